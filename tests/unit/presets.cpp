// SPDX-License-Identifier: MIT
// Comparison family: exact. Presets and their options.
#include <doctest/doctest.h>

#include <kvq/estimate/bytes.hpp>
#include <kvq/kvq.hpp>
#include <string>

#include "support/random.hpp"
#include "support/typed_cache.hpp"

namespace presets_tests {

namespace {

template <class P>
double bits(int dim) {
    const kvq::block_shape k{kvq::tensor::key, 128, dim}, v{kvq::tensor::value, 128, dim};
    return (kvq::bits_per_value<typename P::keys>(k) + kvq::bits_per_value<typename P::values>(v)) / 2;
}

/// What the table in schemes/presets.hpp says; pages share up to 0.02 bits more.
struct documented {
    const char* name;
    double bits_128, bits_64;
};
constexpr documented table[] = {{"ref8", 8.4375, 8.5},    {"hi6", 6.15625, 6.1875}, {"std5", 5.21875, 5.25},
                                {"std4", 4.21875, 4.25},  {"mix4", 4.21875, 4.25},  {"low3", 3.21875, 3.25},
                                {"low2", 2.21875, 2.25},  {"std4-h", 4.25, 4.3125}, {"hi6-h", 6.25, 6.3125},
                                {"std5-h", 5.25, 5.3125}, {"low3-h", 3.25, 3.3125}, {"low2-h", 2.25, 2.3125},
                                {"mix5", 4.84, 4.88},     {"mix6", 5.84, 5.88}};

}  // namespace

TEST_CASE("presets take the bits that their table says") {
    int found = 0;
    kvq::for_each_preset([&]<class P>(P) {
        for (const documented& d : table) {
            if (std::string(d.name) != P::name) continue;
            ++found;
            INFO(d.name);
            CHECK(bits<P>(128) >= d.bits_128);
            CHECK(bits<P>(128) <= d.bits_128 + 0.02);
            CHECK(bits<P>(64) >= d.bits_64);
            CHECK(bits<P>(64) <= d.bits_64 + 0.02);
        }
    });
    CHECK(found == 14);
}

TEST_CASE("preset_options: what presets are measured with") {
    const kvq::cache_options options = kvq::preset_options(50);
    CHECK(options.sinks == 4);
    CHECK(options.recent == 50);
    CHECK(options.page_tokens == 128);
    CHECK(kvq::cache_options{}.page_tokens == 128);  // one default everywhere
    CHECK(kvq::preset_options().recent >= 32);
    CHECK_THROWS_AS(kvq::preset_options(-1), kvq::error);
}

TEST_CASE("protected layers: the first and last, for any number of layers") {
    using pair = test::protected_layers<kvq::low2, kvq::std5>;
    for (int layers = 1; layers <= 9; ++layers)
        for (int protect = 0; protect <= 10; ++protect) {
            const auto options = kvq::protect_layers(layers, protect);
            CHECK(options.sinks == 4);
            REQUIRE(static_cast<int>(options.layers.size()) == layers);
            test::typed_cache<pair::keys, pair::values> cache({layers, 1, 16}, options);
            for (int i = 0; i < layers; ++i) {
                const bool outer = i < protect || layers - 1 - i < protect;
                CHECK(cache.target_format(kvq::tensor::key, i) == (outer ? 2 : 1));
                CHECK(cache.target_format(kvq::tensor::value, i) == (outer ? 2 : 1));
            }
        }
    CHECK_THROWS_AS(kvq::protect_layers(0, 1), kvq::error);
    CHECK_THROWS_AS(kvq::protect_layers(4, -1), kvq::error);
}

}  // namespace presets_tests
