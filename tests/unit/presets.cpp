// SPDX-License-Identifier: MIT
// Comparison family: exact. Presets, their options, and the choice among them.
#include <doctest/doctest.h>

#include <kvq/estimate/bytes.hpp>
#include <kvq/estimate/choose.hpp>
#include <kvq/kvq.hpp>
#include <string>

#include "support/random.hpp"
#include "support/typed_cache.hpp"

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
constexpr documented table[] = {{"ref8", 8.4375, 8.5},   {"hi6", 6.15625, 6.1875}, {"std5", 5.21875, 5.25},
                                {"std4", 4.21875, 4.25}, {"mix4", 4.21875, 4.25},  {"low3", 3.21875, 3.25},
                                {"low2", 2.21875, 2.25}};

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
    CHECK(found == 7);
}

TEST_CASE("preset_options: what presets are measured with") {
    const kvq::cache_options options = kvq::preset_options(50);
    CHECK(options.sinks == 4);
    CHECK(options.recent == 50);
    CHECK(options.page_tokens == 128);
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

TEST_CASE("choose: within the budget, and more budget is never worse") {
    using enum kvq::statistics_of;
    for (const kvq::statistics_of statistics : {nothing, keys, keys_and_queries})
        for (const int dim : {64, 128}) {
            const kvq::cache_shape shape{.layers = 22, .kv_heads = 4, .head_dim = dim};
            double last = HUGE_VAL;
            for (double budget = 1.013; budget < 17.0; budget += 0.05) {
                const auto choice = kvq::choose(budget, shape, statistics);
                CHECK((choice.name != nullptr) == (budget >= kvq::preset_bits<kvq::low2>(shape)));
                if (!choice.name) continue;
                CHECK(choice.bits <= budget);
                CHECK(choice.error.divergence > 0.0);
                CHECK(choice.error.divergence <= last);
                last = choice.error.divergence;
                // The same budget in bytes per token.
                const double numbers = 22.0 * 4 * 2 * dim;
                const auto same = kvq::choose_bytes(budget * numbers / 8.0 * (1 + 1e-12), shape, statistics);
                CHECK(std::string(same.name) == choice.name);
            }
            CHECK(std::string(kvq::choose(16.0, shape, statistics).name) == "ref8");
        }
}

TEST_CASE("choose: statistics never make the measured errors larger") {
    for (const kvq::detail::preset_error& e : kvq::detail::preset_errors) {
        CHECK(e.errors.by_keys.divergence <= e.errors.plain.divergence);
        CHECK(e.errors.by_queries.divergence <= e.errors.by_keys.divergence);
        CHECK(&e.errors.with(kvq::statistics_of::nothing) == &e.errors.plain);
        CHECK(&e.errors.with(kvq::statistics_of::keys) == &e.errors.by_keys);
        CHECK(&e.errors.with(kvq::statistics_of::keys_and_queries) == &e.errors.by_queries);
    }
}

TEST_CASE("choose: the window of a short context costs bits, that of a long one does not") {
    const kvq::cache_shape shape{.layers = 22, .kv_heads = 4, .head_dim = 64};
    CHECK(kvq::preset_bits<kvq::low2>(shape, 100) == 16.0);
    CHECK(kvq::preset_bits<kvq::low2>(shape, 1000) == doctest::Approx(2.2656 * 0.9 + 1.6).epsilon(0.002));
    CHECK(kvq::preset_bits<kvq::low2>(shape, 1000000) ==
          doctest::Approx(kvq::preset_bits<kvq::low2>(shape)).epsilon(0.001));
    CHECK(kvq::choose(4.4, shape, kvq::statistics_of::keys, 2000).bits <= 4.4);
    CHECK(kvq::choose(4.4, shape, kvq::statistics_of::keys, 2000).bits > kvq::preset_bits<kvq::low2>(shape));
    CHECK_THROWS_AS((void)kvq::choose(4.0, {0, 1, 64}), kvq::error);
}
