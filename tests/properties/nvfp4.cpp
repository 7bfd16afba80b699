// SPDX-License-Identifier: MIT
// Comparison family: exact bytes; double arithmetic. NVFP4 (bench/baselines/nvfp4.hpp) against a description
// of its bytes bit by bit, and against its formula by trying all values.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/cpu/simd.hpp>

#include "baselines/nvfp4.hpp"
#include "support/attention_error.hpp"
#include "support/blocks.hpp"

namespace nvfp4_tests {

namespace {

using baselines::nvfp4;
using baselines::nvfp4_rows;

constexpr double levels[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

/// The value of a scale, from the definition of e4m3.
double scale_value(int bits) {
    const int e = bits >> 3, m = bits & 7;
    return e ? std::ldexp(8 + m, e - 10) : std::ldexp(m, -9);
}

/// What the published bytes hold for a token and channel: bits 4 (channel % 2) of byte channel / 2 of the
/// row, and byte channel / 16 of the row of scales behind all codes.
struct fields {
    int code, scale;
    fields(const kvq::block_shape& s, const std::vector<std::byte>& rows, int token, int channel) {
        const int bit = (token * s.dim + channel) * 4;
        code = static_cast<int>(rows[static_cast<std::size_t>(bit / 8)]) >> bit % 8 & 15;
        const int scales = s.tokens * s.dim / 2;
        scale = static_cast<int>(rows[static_cast<std::size_t>(scales + (token * s.dim + channel) / 16)]);
    }
    double level() const { return code & 8 ? -levels[code & 7] : levels[code & 7]; }
};

struct with_global : nvfp4 {
    using attends_as = with_global;
    with_global() : nvfp4(0.02f) {}
};

kvq::block_shape random_nvfp4_shape(test::generator& random) {
    auto s = test::random_shape(random, 80);
    s.dim = 16 * random.between(1, 9);
    return s;
}

}  // namespace

TEST_CASE("NVFP4: bytes are those of the formula, tried in double over all scales and levels") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 40; ++round) {
        const kvq::block_shape s = random_nvfp4_shape(random);
        INFO(s);
        const auto global =
            static_cast<float>(std::ldexp(1.0 + 0.125 * random.between(0, 7), random.between(-9, 3)));
        const auto x = random.normals(s.values(), 3.0f);
        const auto rows = test::quantized(nvfp4_rows(global), s, x);
        for (int t = 0; t < s.tokens; ++t)
            for (int g = 0; g < s.dim; g += 16) {
                const float* const of = x.data() + t * s.dim + g;
                double largest = 0;
                for (int i = 0; i < 16; ++i)
                    largest = std::fmax(largest, std::fabs(static_cast<double>(of[i])));
                const double wanted = largest / 6 / static_cast<double>(global);
                const int scale = fields(s, rows, t, g).scale;
                REQUIRE(scale < 0x7f);
                // No other scale is nearer, but for the rounding of two divisions.
                const double distance = std::fabs(scale_value(scale) - wanted);
                if (scale > 0) REQUIRE(distance <= std::fabs(scale_value(scale - 1) - wanted) * (1 + 1e-5));
                if (scale < 0x7e)
                    REQUIRE(distance <= std::fabs(scale_value(scale + 1) - wanted) * (1 + 1e-5));
                const auto step = static_cast<double>(static_cast<float>(scale_value(scale)) * global);
                for (int i = 0; i < 16; ++i) {
                    const fields f(s, rows, t, g + i);
                    REQUIRE(f.scale == scale);
                    const auto value = static_cast<double>(of[i]);
                    const double error = std::fabs(f.level() * step - value);
                    for (const double level : levels)
                        REQUIRE(error <=
                                std::fabs(level * step - std::fabs(value)) + 1e-6 * std::fabs(value));
                    if (f.code != 0) REQUIRE((f.code >= 8) == (value < 0));
                }
            }
    }
}

TEST_CASE("NVFP4: every code under every scale comes back, with the bytes that it had") {
    // A token for each scale; a group holds all codes, so that 6 is among them.
    const kvq::block_shape s{kvq::tensor::key, 0x7f, 16};
    std::vector<std::byte> rows(nvfp4_rows().block_bytes(s));
    for (int t = 0; t < s.tokens; ++t) {
        std::uint8_t codes[16];
        for (int i = 0; i < 16; ++i) codes[i] = static_cast<std::uint8_t>(t % 2 ? i : 15 - i);
        baselines::nvfp4_row_view(s, rows.data())
            .put(t, 0, kvq::e4m3::from_bits(static_cast<std::uint8_t>(t)), codes);
    }
    for (const float global : {1.0f, 0.00390625f, 0.0123f, 77.7f}) {
        INFO(global);
        const nvfp4_rows scheme(global);
        const auto x = test::dequantized(scheme, s, rows);
        for (int t = 0; t < s.tokens; ++t)
            for (int c = 0; c < 16; ++c) {
                const fields f(s, rows, t, c);
                const double wanted =
                    f.level() * static_cast<double>(static_cast<float>(scale_value(t)) * global);
                REQUIRE(static_cast<double>(x[static_cast<std::size_t>(16 * t + c)]) ==
                        doctest::Approx(wanted));
                REQUIRE(std::signbit(x[static_cast<std::size_t>(16 * t + c)]) == (f.code >= 8));
            }
        auto again = test::quantized(scheme, s, x);
        // Codes under the scale 0 are not kept: they all stand for 0.
        for (int i = 0; i < 8; ++i) again[static_cast<std::size_t>(i)] = rows[static_cast<std::size_t>(i)];
        CHECK((again == rows));
    }
}

TEST_CASE("NVFP4: codes are those of e2m1, also half-way between two values") {
    const kvq::block_shape s{kvq::tensor::key, 1, 16};
    for (const float sign : {1.0f, -1.0f})
        for (int i = 0; i < 512; ++i) {
            std::vector<float> x(16, 6.0f);  // the scale is 1
            x[3] = sign * static_cast<float>(i) / 64.0f;
            if (i > 6 * 64) x[3] = sign * std::nextafter(static_cast<float>(i % 8) * 0.25f, 9.0f);
            const auto rows = test::quantized(nvfp4_rows(), s, x);
            REQUIRE(fields(s, rows, 0, 3).scale == 0x38);
            REQUIRE(fields(s, rows, 0, 3).code == kvq::e2m1(x[3]).bits);
        }
}

TEST_CASE("NVFP4: tiles hold the same codes and scales, there and back") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 60; ++round) {
        const kvq::block_shape s = random_nvfp4_shape(random);
        INFO(s);
        const float global = round % 2 ? 1.0f : 0.01f;
        const nvfp4 tiles(global);
        const nvfp4_rows rows(global);
        const auto x = round < 30 ? random.normals(s.values()) : test::hostile_block(random, s);
        std::uint32_t not_finite[2];
        const auto as_rows = test::quantized(rows, s, x, &not_finite[0]),
                   as_tiles = test::quantized(tiles, s, x, &not_finite[1]);
        CHECK(not_finite[0] == not_finite[1]);
        std::vector<std::byte> made(as_tiles.size(), std::byte{0xcd}), back(as_rows.size(), std::byte{0xcd});
        baselines::to_tiles(s, as_rows.data(), made.data());
        baselines::to_rows(s, as_tiles.data(), back.data());
        CHECK((made == as_tiles));
        CHECK((back == as_rows));
        CHECK((test::dequantized(tiles, s, as_tiles) == test::dequantized(rows, s, as_rows)));
        // The library's own reader of codes agrees with the fields of the published bytes.
        const auto layout = tiles.codes(s);
        const bool key = s.role == kvq::tensor::key;
        int wrong = 0;
        for (int t = 0; t < s.tokens; ++t)
            for (int c = 0; c < s.dim; ++c)
                wrong += static_cast<int>(kvq::unpack_code(layout, as_tiles.data(), key ? t : c,
                                                           key ? c : t)) != fields(s, as_rows, t, c).code;
        CHECK(wrong == 0);
    }
}

TEST_CASE_TEMPLATE("NVFP4: attention multiplies codes, and is that of double on the values", Backend,
                   kvq::scalar, kvq::simd<>) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const auto described = kvq::make_format<with_global, Backend>().describe({kvq::tensor::key, 64, 64});
    CHECK(described.attend == std::is_same_v<Backend, kvq::simd<>>);
    CHECK_FALSE(described.dequantizes_first);
    for (int round = 0; round < 6; ++round) {
        kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 16 * random.between(1, 8)};
        if (random.one_in(2)) shape.value_dim = 16 * random.between(1, 6);
        const int n = random.between(60, 300);
        test::typed_cache<with_global, with_global, Backend> cache(
            shape, {.sinks = random.between(0, 4),
                    .recent = random.between(0, 20),
                    .page_tokens = random.pick(std::vector<int>{16, 40, 64})});
        const test::stream s(random, shape, n);
        auto sequence = cache.new_sequence();
        test::append(sequence, 1, s, 0, n);
        for (const int rows : {1, random.between(2, 40)}) {
            const auto q = test::random_tensor(random, rows, 2 * random.between(1, 3), shape.head_dim);
            const auto error = test::measure_attention(cache, sequence, 0, q);
            INFO(n, " tokens of ", shape.head_dim, "/", shape.value_dim, ", ", rows, " query tokens");
            CHECK(error.of_terms <= 5e-4);
            CHECK(error.relative <= 5e-4);
        }
    }
}

TEST_CASE("NVFP4: what is not finite sets no scale; NaN is 0, infinities saturate") {
    const kvq::block_shape s{kvq::tensor::value, 1, 32};
    std::vector<float> x(32, 0.25f), zeros(32, 0.0f);
    x[1] = -3.0f;
    x[2] = std::nanf("");
    x[3] = -std::numeric_limits<float>::infinity();
    zeros[5] = std::numeric_limits<float>::infinity();
    for (auto* const values : {&x, &zeros}) {
        std::uint32_t not_finite = 0;
        const auto rows = test::quantized(nvfp4_rows(), s, *values, &not_finite);
        CHECK(not_finite == (values == &x ? 2 : 1));
        const auto y = test::dequantized(nvfp4_rows(), s, rows);
        CHECK(y[1] == (*values)[1]);
        CHECK(y[2] == 0.0f);
        CHECK(y[3] == (values == &x ? -3.0f : 0.0f));
        CHECK(y[5] == (values == &x ? 0.25f : 0.0f));
    }
}

TEST_CASE("NVFP4: groups of 16 channels, and one scale of the tensor") {
    CHECK_THROWS_WITH_AS(nvfp4().check({.layers = 1, .kv_heads = 1, .head_dim = 40}, kvq::tensor::key),
                         "NVFP4 has a scale for 16 channels, but head_dim is 40", std::invalid_argument);
    nvfp4().check({.layers = 1, .kv_heads = 1, .head_dim = 48}, kvq::tensor::value);
    CHECK(nvfp4(1.0f).fingerprint() != nvfp4(2.0f).fingerprint());
    CHECK(nvfp4().block_bytes({kvq::tensor::key, 64, 128}) == 64 * 72);
    CHECK(nvfp4_rows().block_bytes({kvq::tensor::value, 64, 128}) == 64 * 72);
}

}  // namespace nvfp4_tests
