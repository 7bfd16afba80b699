// SPDX-License-Identifier: MIT
// Comparison family: exact. Presets and their options.
#include <doctest/doctest.h>

#include <algorithm>
#include <kvq/estimate/bytes.hpp>
#include <kvq/kvq.hpp>
#include <string>

#include "support/caches.hpp"
#include "support/random.hpp"
#include "support/saved.hpp"
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

/// All pages of layer 0, keys and values in turns.
std::vector<test::held_page> pages_of(const kvq::sequence& sequence) {
    const auto pages = sequence.pages(0);
    std::vector<test::held_page> all;
    for (int e = 0; e < pages.entries(); ++e)
        for (const kvq::page* const p : {&*pages.at(e).keys, &*pages.at(e).values})
            all.push_back(
                {p->format, pages.at(e).first_token, pages.at(e).tokens, {p->data(), p->data() + p->bytes}});
    return all;
}

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

TEST_CASE("a list that steps down through presets of the same values is that of their different formats") {
    constexpr kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 32};
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    kvq::cache_options repeated = kvq::preset_options();
    repeated.page_tokens = 32;
    const auto list = [&]<class P>(P) {
        repeated.keys.push_back(test::made<test::usual>(typename P::keys{}));
        repeated.values.push_back(test::made<test::usual>(typename P::values{}));
    };
    list(kvq::mix6{});
    list(kvq::mix5{});
    list(kvq::mix4{});
    kvq::cache_options different = repeated;
    different.values = {repeated.values[0], repeated.values[1]};
    const test::stream words(random, shape, 1000 + random.between(0, 100));
    std::vector<std::vector<test::held_page>> pages;
    std::vector<std::vector<std::uint32_t>> bits;
    std::vector<std::size_t> bytes;
    for (const auto& [options, last] : {std::pair(repeated, 2), std::pair(different, 1)}) {
        kvq::cache cache(shape, options);
        auto sequence = cache.new_sequence();
        for (int layer = 0; layer < shape.layers; ++layer)
            sequence.append(layer, words.k.view(), words.v.view());
        const kvq::step_down_policy policy{
            .tiers = {{.age = 0}, {.age = 300, .format = {1, 1}}, {.age = 600, .format = {2, last}}}};
        const auto report = kvq::step_down(cache, sequence, policy);
        CHECK(report.steps.size() == 2);
        const auto restored = test::restored(cache, test::saved(sequence));
        CHECK(pages_of(restored) == pages_of(sequence));
        pages.push_back(pages_of(sequence));
        bits.push_back(test::attention_bits(cache, sequence));
        bytes.push_back(cache.pool().bytes_in_use());
        for (int index = 1; index <= 3; ++index)
            CHECK(std::ranges::any_of(pages.back(), [&](const auto& p) { return p.format == index; }));
    }
    CHECK(pages[0] == pages[1]);
    CHECK(bits[0] == bits[1]);
    CHECK(bytes[0] == bytes[1]);
}

}  // namespace presets_tests
