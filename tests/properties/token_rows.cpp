// SPDX-License-Identifier: MIT
// Comparison family: error bounds; double arithmetic. Rows of tokens in the bytes of other systems: how far
// values are, what is not finite, attention, what is refused. Their bytes: tests/golden/row_bytes.cpp.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/cpu/scalar.hpp>
#include <kvq/schemes/token_rows.hpp>

#include "support/attention_error.hpp"
#include "support/blocks.hpp"
#include "support/saved.hpp"

namespace token_rows_tests {

namespace {

/// The largest error as a part of the largest magnitude of a group; fp8 and e5m2: of the value itself, or of
/// the smallest normal number.
double bound(const kvq::row_layout& l, double value, double largest, double range) {
    using number = kvq::row_layout::number;
    const double half = std::ldexp(1.0, -11);
    switch (l.numbers) {
        case number::int8:
            return largest * (0.5 / 127 + half) * 1.001;
        case number::centred4:
            return largest * (1.0 / 8 + half) * 1.001;
        case number::centred5:
            return largest * (1.0 / 16 + half) * 1.001;
        case number::unsigned4:
            return (range * (0.5 / 15 + half) + largest * half) * 1.001;
        case number::unsigned5:
            return (range * (0.5 / 31 + half) + largest * half) * 1.001;
        case number::e5m2:
            return std::fmax(value / 8, std::ldexp(1.0, -17));
        case number::e4m3:
            // mxfp8: numbers of 256 to 512 times the scale, which end at 448.
            return l.channels > 0 ? std::fmax(value / 7, largest * std::ldexp(1.0, -17))
                                  : std::fmax(value / 16, std::ldexp(1.0, -10));
        case number::e2m1:
            // Scales round down, so that numbers may end before the largest: at 6 of up to 8 times a power of
            // two, at 6 of 6.4 times an e4m3.
            return l.scale == kvq::row_layout::stored::e8m0 ? largest / 4 * 1.001 : largest / 5.6;
    }
    return 0;
}

/// For test::measure_attention.
struct plain_cache : kvq::cache {
    using sequence_type = kvq::sequence;
    using cache::cache;
};

}  // namespace

TEST_CASE("rows of other systems: errors are those of their numbers, one at a time or all together") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const kvq::row_layout& l : kvq::row_layouts)
        for (int round = 0; round < 8; ++round) {
            INFO(l.name);
            auto s = test::random_shape(random, 60);
            s.dim = l.channels > 0 ? l.channels * random.between(1, 5) : random.between(1, 150);
            INFO(s);
            const auto x = random.normals(s.values(), round % 2 ? 1.0f : 5.0f);
            const kvq::token_rows scheme(l);
            const auto block = test::quantized(scheme, s, x);
            const auto y = test::dequantized(scheme, s, block);
            const int n = l.group_of(s.dim);
            for (int at = 0; at < static_cast<int>(x.size()); ++at) {
                const auto i = static_cast<std::size_t>(at);
                const auto first = x.begin() + (at - at % s.dim % n);
                const auto [low, high] = std::minmax_element(first, first + n);
                const double least = static_cast<double>(*low), most = static_cast<double>(*high),
                             value = static_cast<double>(x[i]);
                REQUIRE(std::fabs(static_cast<double>(y[i]) - value) <=
                        bound(l, std::fabs(value), std::fmax(-least, most), most - least));
                REQUIRE(scheme.device_value(s, block.data(), at / s.dim, at % s.dim) == y[i]);
            }
        }
}

TEST_CASE("rows of other systems: no value is NaN or infinite, and those that are not finite are counted") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const kvq::row_layout& l : kvq::row_layouts)
        for (int round = 0; round < 8; ++round) {
            INFO(l.name);
            auto s = test::random_shape(random, 40);
            s.dim = 32 * random.between(1, 4);
            const auto x = test::hostile_block(random, s);
            std::uint32_t not_finite = 0, wanted = 0;
            const kvq::token_rows scheme(l);
            const auto y = test::dequantized(scheme, s, test::quantized(scheme, s, x, &not_finite));
            for (const float v : x) wanted += std::isfinite(v) ? 0 : 1;
            CHECK(not_finite == wanted);
            int wrong = 0;
            for (const float v : y) wrong += std::isfinite(v) ? 0 : 1;
            CHECK(wrong == 0);
        }
}

TEST_CASE("rows of other systems: attention is that of double on the values") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const kvq::row_layout& l : kvq::row_layouts) {
        INFO(l.name);
        const auto rows = kvq::make_format<kvq::scalar>(kvq::token_rows(l));
        const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 32 * random.between(1, 3)};
        plain_cache cache(shape, {.keys = rows, .values = rows, .sinks = 2, .recent = 9, .page_tokens = 32});
        const int n = random.between(60, 200);
        const test::stream s(random, shape, n);
        auto sequence = cache.new_sequence();
        test::append(sequence, 1, s, 0, n);
        const auto q = test::random_tensor(random, random.between(1, 5), 4, shape.head_dim);
        const auto error = test::measure_attention(cache, sequence, 0, q);
        CHECK(error.of_terms <= 1e-5);
    }
}

TEST_CASE("rows of other systems: chunks, trims, refills and files leave what one prompt would") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const kvq::row_layout& l : kvq::row_layouts) {
        INFO(l.name);
        const auto rows = kvq::make_format<kvq::scalar>(kvq::token_rows(l));
        const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 32};
        plain_cache cache(shape, {.keys = rows, .values = rows, .sinks = 2, .recent = 9, .page_tokens = 32});
        const int n = 300;
        const test::stream s(random, shape, n), other(random, shape, n);
        auto whole = cache.new_sequence(), parts = cache.new_sequence();
        test::append(whole, 1, s, 0, n);
        while (parts.tokens() < n) {
            const int at = parts.tokens();
            test::append(parts, 1, s, at, std::min(n - at, random.between(1, 70)));
            // Tokens that go again within the rollback leave nothing behind.
            if (const int wrong = random.between(0, 16); wrong > 0 && parts.tokens() + wrong <= n) {
                const int before = parts.tokens();
                test::append(parts, 1, other, before, wrong);
                CHECK(parts.trim(before) == 0);
            }
            if (random.one_in(4)) {
                const test::file_bytes file = test::saved(parts);
                parts = test::restored(cache, file);
                CHECK(test::saved(parts) == file);
            }
        }
        CHECK(test::saved(parts) == test::saved(whole));
        for (const auto role : {kvq::tensor::key, kvq::tensor::value})
            CHECK(test::dequantized(parts, shape, 0, role).values() ==
                  test::dequantized(whole, shape, 0, role).values());
    }
}

TEST_CASE("rows of other systems: sizes, scales of the tensor, refusals") {
    const auto bytes = [](const char* name, int tokens, int dim) {
        const kvq::token_rows rows(kvq::row_layout_named(name));
        return rows.block_bytes({kvq::tensor::key, tokens, dim}) / static_cast<std::size_t>(tokens);
    };
    CHECK(bytes("fp8", 64, 128) == 128);
    CHECK(bytes("nvfp4", 64, 128) == 72);
    CHECK(bytes("mxfp8", 64, 128) == 132);
    CHECK(bytes("mxfp4", 64, 128) == 68);
    CHECK(bytes("q8_0", 64, 128) == 136);
    CHECK(bytes("q4_0", 64, 128) == 72);
    CHECK(bytes("q4_1", 64, 128) == 80);
    CHECK(bytes("q5_0", 64, 128) == 88);
    CHECK(bytes("q5_1", 64, 128) == 96);
    const kvq::token_rows q8_0(kvq::row_layout_named("q8_0"));
    CHECK_THROWS_WITH_AS(q8_0.check({.layers = 1, .kv_heads = 1, .head_dim = 80}, kvq::tensor::key),
                         "kvq: q8_0 has a scale for 32 channels, but head_dim is 80", std::invalid_argument);
    CHECK_THROWS_WITH_AS(
        kvq::cache({kvq::latent_attention(80, 64)}, {.keys = kvq::make_format<kvq::scalar>(q8_0)}),
        "kvq: q8_0 has a scale for 32 channels, but head_dim is 144", std::invalid_argument);
    CHECK_THROWS_WITH_AS(kvq::token_rows(kvq::row_layout_named("fp8"), 0.0f),
                         "kvq: fp8 takes a positive scale of the tensor, but got 0.000000",
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(kvq::token_rows(kvq::row_layout_named("q8_0"), 2.0f),
                         "kvq: q8_0 takes no scale of the tensor, but got 2.000000", std::invalid_argument);
    CHECK_THROWS_AS(kvq::token_rows(kvq::row_layout_named("fp8-e5m2"), 1e38f), std::invalid_argument);
    CHECK_THROWS_WITH_AS(kvq::row_layout_named("q9_0"), "kvq: there are no rows of the name q9_0",
                         std::invalid_argument);
    CHECK(kvq::token_rows(kvq::row_layout_named("fp8"), 0.5f).fingerprint() !=
          kvq::token_rows(kvq::row_layout_named("fp8")).fingerprint());
}

}  // namespace token_rows_tests
