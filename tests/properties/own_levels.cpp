// SPDX-License-Identifier: MIT
// Comparison family: double arithmetic. Levels of a user: attention, estimates of scores and requantizing
// agree with value(), whether or not attention may multiply the codes.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/cpu/simd.hpp>
#include <kvq/io/scheme_identity.hpp>

#include "support/attention_error.hpp"
#include "support/messages.hpp"

namespace own_levels_tests {

namespace {

/// The values of FP4, x^ = scale * table[code]: no multiples of the code.
struct e2m1 {
    static constexpr bool has_bias = false;
    static constexpr int min_bits = 4;
    static constexpr const char* name = "e2m1-";
    static constexpr float table[16] = {0,     0.5f,  1,     1.5f,  2,     3,     4,     6,
                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    template <int>
    static constexpr int zero_code = 0;
    template <int, class P>
    static kvq::stored_parameters<P> fit(float lo, float hi) {
        return {P(std::fmax(-lo, hi) / 6.0f), P(0.0f)};
    }
    template <int>
    static int code(float x, float, float inverse) {
        const float magnitude = std::isnan(x) ? 0.0f : std::fmin(std::fabs(x) * inverse, 6.0f);
        int best = 0;
        for (int i = 1; i < 8; ++i)
            if (std::fabs(table[i] - magnitude) < std::fabs(table[best] - magnitude)) best = i;
        return x < 0.0f ? best + 8 : best;
    }
    template <int>
    static constexpr float value(int code, float scale, float) {
        return kvq::rounded_product(scale, table[code]);
    }
};
/// The same name, other values.
struct other_e2m1 : e2m1 {
    template <int>
    static constexpr float value(int code, float scale, float) {
        return kvq::rounded_product(scale, -table[code]);
    }
};

/// x^ = scale * Numerator / 2 * (code - Zero / 2) + bias: attention's form if Numerator is 2 and Zero / 2 a
/// code.
template <int Zero, int Numerator, bool Bias>
struct steps {
    static constexpr bool has_bias = Bias;
    static constexpr int min_bits = 2;
    static constexpr const char* name = "steps";
    static constexpr float factor = 0.5f * Numerator;
    template <int>
    static constexpr int zero_code = Zero / 2;
    template <int Bits, class P>
    static kvq::stored_parameters<P> fit(float lo, float hi) {
        // With a bias it lies half a range above the least value, so that code 0 is not the bias.
        const float top = (1 << Bits) - 1, zero = 0.5f * Zero;
        if constexpr (Bias) {
            const float scale = std::fabs((hi - lo) / (top * factor));
            const float below = factor > 0.0f ? zero : zero - top;
            return {P(scale), P(lo + below * scale * factor)};
        } else {
            const float below = zero > 0.0f ? -lo / zero : 0.0f, above = hi / (top - zero);
            return {P(std::fmax(below, above) / std::fabs(factor)), P(0.0f)};
        }
    }
    template <int Bits>
    static int code(float x, float bias, float inverse) {
        const float position = ((std::isnan(x) ? 0.0f : x) - bias) * inverse / factor + 0.5f * Zero;
        return static_cast<int>(std::fmin(std::fmax(std::nearbyint(position), 0.0f), (1 << Bits) - 1));
    }
    template <int Bits>
    static constexpr float value(int code, float scale, float bias) {
        return kvq::rounded_product(scale, factor * (static_cast<float>(code) - 0.5f * Zero)) + bias;
    }
};
/// Affine, but not known when the program is compiled.
struct at_run_time : kvq::symmetric {
    static constexpr const char* name = "run_time";
    template <int Bits>
    static float value(int code, float scale, float bias) {
        return symmetric::value<Bits>(code, scale, bias);
    }
};
struct renamed : kvq::symmetric {
    static constexpr const char* name = "renamed";
};
struct without_zero : kvq::symmetric {
    static constexpr const char* name = "below";
    template <int>
    static constexpr int zero_code = -1;
    template <int>
    static constexpr float value(int code, float scale, float) {
        return scale * static_cast<float>(code + 1);
    }
};

template <class Levels, int Bits = 4>
using of = kvq::scheme<kvq::bits<Bits>, Levels, kvq::per_channel<32>, kvq::params<float>>;

// Attention multiplies codes only where value() is scale * (code - zero_code) + bias.
static_assert(!kvq::foldable<of<e2m1>> && !kvq::foldable<of<at_run_time>> &&
              !kvq::foldable<of<without_zero>>);
static_assert(kvq::foldable<of<renamed>> && kvq::foldable<of<renamed, 2>> && kvq::foldable<of<renamed, 8>>);
using shifted = of<steps<6, 2, false>>;  // zero is code 3
using shifted_and_biased = of<steps<14, 2, true>>;
using between_codes = of<steps<15, 2, false>>;  // zero lies between codes 7 and 8
using wide_steps = of<steps<16, 3, true>>;      // steps of 1.5 scales
using mirrored = of<steps<14, -2, true>>;       // the largest code is the least value
static_assert(kvq::foldable<shifted> && kvq::foldable<shifted_and_biased>);
static_assert(!kvq::foldable<between_codes> && !kvq::foldable<wide_steps> && !kvq::foldable<mirrored>);

template <class Scheme, class Backend>
struct pair {
    using scheme = Scheme;
    using backend = Backend;
    using cache = test::typed_cache<Scheme, Scheme, Backend>;
};

/// Derived, but with fold() of the base: it has none where codes are not multiplied.
struct derived_from_e2m1 : of<e2m1> {
    using attends_as = derived_from_e2m1;
};
static_assert(!kvq::foldable<derived_from_e2m1>);

}  // namespace

#define KVQ_TEST_OWN_LEVELS                                                                             \
    pair<of<e2m1>, kvq::scalar>, pair<of<e2m1>, kvq::simd<>>, pair<shifted, kvq::scalar>,               \
        pair<shifted, kvq::simd<>>, pair<shifted_and_biased, kvq::simd<>>, pair<mirrored, kvq::scalar>, \
        pair<between_codes, kvq::scalar>

TEST_CASE_TEMPLATE("levels of a user: attention is that of the dequantized values", P, KVQ_TEST_OWN_LEVELS) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 6; ++round) {
        kvq::cache_shape shape{
            .layers = 1, .kv_heads = 2, .head_dim = random.pick(std::vector<int>{5, 32, 64, 80})};
        if (random.one_in(2)) shape.value_dim = random.between(1, 64);
        const int n = random.between(60, 300);
        typename P::cache cache(shape, {.sinks = random.between(0, 4),
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
        // The values are those of the levels: no further from the input than half the widest step.
        const auto k = test::dequantized(sequence, shape, 0, kvq::tensor::key);
        for (int t = 0; t < n; ++t)
            for (int h = 0; h < 2; ++h)
                for (int c = 0; c < shape.head_dim; ++c)
                    REQUIRE(std::fabs(k.view().at(t, h)[c] - s.k.view().at(t, h)[c]) <= 1.0f);
    }
}

TEST_CASE("levels of a user: descriptions say whether attention dequantizes") {
    const kvq::block_shape block{kvq::tensor::key, 64, 64};
    const auto table = kvq::make_format<of<e2m1>>().describe(block);
    CHECK(table.dequantizes_first);
    CHECK_FALSE((table.attend || table.quantize || table.dequantize || table.all()));
    const auto affine = kvq::make_format<shifted>().describe(block);
    CHECK_FALSE((affine.dequantizes_first || affine.quantize || affine.dequantize));
    CHECK(affine.attend);
}

TEST_CASE("levels of a user: pages are ranked by bounds that hold") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::format table = kvq::make_format<of<e2m1>>();
    CHECK((table.functions().estimate_scores == nullptr));
    for (const kvq::format& f :
         {kvq::make_format<shifted>(), kvq::make_format<shifted_and_biased>(), kvq::with_bounds(table)}) {
        REQUIRE((f.functions().estimate_scores != nullptr));
        const kvq::block_shape shape{kvq::tensor::key, 48, 40};
        auto keys = random.normals(shape.values(), 3.0f);
        const auto q = random.normals(40, 1.0f);
        std::vector<std::byte> block(f.block_bytes(shape) + 64);
        f.functions().quantize_values(f.scheme(), shape, {0, 0}, keys.data(), block.data());
        std::vector<float> scratch(shape.values()), space(f.functions().estimate_floats(f.scheme(), shape));
        f.functions().dequantize(f.scheme(), shape, {0, 0}, block.data(), kvq::float_type::fp32, keys.data(),
                                 40, scratch.data());
        float estimate = 0.0f;
        f.functions().estimate_scores(f.scheme(), shape, {0, 0}, block.data(), q.data(), 40, 1, 0, 48, 1.0f,
                                      &estimate, 0, space.data());
        INFO(f.name());
        for (int t = 0; t < 48; ++t) {
            double score = 0.0;
            for (int c = 0; c < 40; ++c)
                score += static_cast<double>(q[static_cast<std::size_t>(c)]) *
                         static_cast<double>(keys[static_cast<std::size_t>(t * 40 + c)]);
            CHECK(score <= static_cast<double>(estimate) + 1e-3);
        }
    }
}

TEST_CASE("levels of a user: backends write the same bytes, and pages are requantized from their values") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 32};
    const kvq::format formats[2] = {kvq::make_format<of<e2m1>, kvq::scalar>(), kvq::make_format<of<e2m1>>()};
    const kvq::block_shape block{kvq::tensor::value, 64, 32};
    const auto x = random.normals(block.values(), 2.0f);
    std::vector<std::byte> bytes[2];
    for (int i = 0; i < 2; ++i) {
        auto copy = x;
        bytes[i].resize(formats[i].block_bytes(block));
        formats[i].functions().quantize_values(formats[i].scheme(), block, {0, 0}, copy.data(),
                                               bytes[i].data());
    }
    CHECK(bytes[0] == bytes[1]);

    kvq::cache cache(shape,
                     {.keys = {formats[1], kvq::make_format<kvq::int8, kvq::scalar>()}, .page_tokens = 32});
    const test::stream s(random, shape, 64);
    auto sequence = cache.new_sequence();
    test::append(sequence, 1, s, 0, 64);
    const auto before = test::dequantized(sequence, shape, 0, kvq::tensor::key);
    cache.requantize(sequence, {.key = 1, .value = 1});
    const auto after = test::dequantized(sequence, shape, 0, kvq::tensor::key);
    for (int t = 0; t < 64; ++t) {
        float largest = 0.0f;
        for (int c = 0; c < 32; ++c) largest = std::fmax(largest, std::fabs(before.view().at(t, 0)[c]));
        for (int c = 0; c < 32; ++c)
            CHECK(std::fabs(after.view().at(t, 0)[c] - before.view().at(t, 0)[c]) <= largest / 254 + 1e-6f);
    }
}

TEST_CASE("levels of a user: two types of one name are two identities") {
    const auto one = kvq::identity_of(kvq::make_format<of<e2m1>, kvq::scalar>());
    const auto other = kvq::identity_of(kvq::make_format<of<other_e2m1>, kvq::scalar>());
    CHECK(one.name == "e2m1-4-channel-g32-fp32");
    CHECK(one.name == other.name);
    CHECK(one.fingerprint.has_value());
    CHECK_FALSE(one == other);
    CHECK(one == kvq::identity_of(kvq::make_format<of<e2m1>>()));
    CHECK_FALSE(kvq::identity_of(kvq::make_format<kvq::int8, kvq::scalar>()).fingerprint.has_value());
}

namespace {

struct code_16 : renamed {
    template <int>
    static int code(float, float, float) {
        return 16;
    }
};
struct negative_scale : renamed {
    template <int, class P>
    static kvq::stored_parameters<P> fit(float, float) {
        return {P(-1.0f), P(0.0f)};
    }
};

template <class Levels>
std::string refusal() {
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 4};
    kvq::cache cache(shape,
                     {.keys = kvq::make_format<of<Levels>, kvq::scalar>(), .recent = 0, .page_tokens = 16});
    test::generator random(1);
    const test::stream s(random, shape, 40);
    auto sequence = cache.new_sequence();
    const auto message = test::message_of([&] { test::append(sequence, 1, s, 0, 40); });
    CHECK(sequence.tokens() == 0);
    return message;
}

}  // namespace

TEST_CASE("levels of a user: codes and scales that cannot be are refused") {
    CHECK(test::contains(refusal<code_16>(), "renamed4-channel-g32-fp32 has the code 16 for "));
    CHECK(test::contains(refusal<code_16>(), "codes of 4 bits are 0 to 15"));
    CHECK(test::contains(refusal<negative_scale>(), "renamed4-channel-g32-fp32 has the scale -1"));
}

}  // namespace own_levels_tests
