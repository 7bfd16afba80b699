// SPDX-License-Identifier: MIT
// Comparison family: exact where a theorem says so, half a step of the stored parameters elsewhere.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "support/blocks.hpp"
#include "support/scheme_list.hpp"

using kvq::block_shape;

namespace schemes_tests {

namespace {

/// A number, its group's stored parameters, and what it dequantized to.
struct quantized_value {
    double x, dequantized, scale, bias;
};

template <class S>
kvq::grouped_axis cut_axis(const S& s, const block_shape& shape) {
    return s.layout().cut(shape);
}

/// Its ranges go through what all encoders use; those of `enclosing` have a shorter way.
struct enclosing_encoder : kvq::enclosing {};

/// Calls check(quantized_value, group's members) for every number of the block.
template <class S, class Check>
void for_each_group(const S& s, const block_shape& shape, const std::vector<float>& x,
                    const std::vector<std::byte>& block, Check check) {
    using P = typename S::parameter;
    const auto y = test::dequantized(s, shape, block);
    const bool on_tokens = S::granularity_type::on_tokens;
    const auto layout = s.codes(shape);
    const bool rows = kvq::detail::on_rows<typename S::granularity_type>(shape.role);
    const auto lines = rows ? layout.rows() : layout.cols;
    const auto cut = cut_axis(s, shape);
    for (int line = 0; line < lines.size; ++line)
        for (int g = 0; g < cut.groups(); ++g) {
            const std::byte* at = block.data() + s.parameter_offset(shape, g, lines.slot(line));
            const float scale = kvq::detail::load_as<P>(at);
            float bias = 0.0f;
            if constexpr (S::levels::has_bias)
                bias = kvq::detail::load_as<P>(at + s.layout().section_bytes(shape));
            std::vector<quantized_value> group;
            for (int i = 0; i < cut.group_size(g); ++i) {
                const int other = g * cut.group + i;
                const auto index =
                    static_cast<std::size_t>(on_tokens ? line * shape.dim + other : other * shape.dim + line);
                group.push_back({static_cast<double>(x[index]), static_cast<double>(y[index]),
                                 static_cast<double>(scale), static_cast<double>(bias)});
            }
            check(group);
        }
}

/// First and last grid point of the group's stored parameters, in exact arithmetic.
template <class S>
std::pair<double, double> grid(const quantized_value& n) {
    constexpr int first = S::levels::has_bias ? 0 : 1 - S::zero_code;
    constexpr int last = S::levels::template top<S::code_bits> - S::zero_code;
    return {n.scale * first + n.bias, n.scale * last + n.bias};
}

/// What float arithmetic may add: each of x - bias, 1 / scale, the product, and scale * code + bias is
/// rounded once, so a code moves by at most 3 u of its size and its value by u of the two terms; u = 2^-24.
template <class S>
double evaluation(const quantized_value& n) {
    constexpr int top = S::levels::template top<S::code_bits>;
    return 0x1p-24 * (4.0 * n.scale * top + 2.0 * std::fabs(n.bias)) + 0x1p-148;
}

}  // namespace

TEST_CASE_TEMPLATE("quantize writes every byte of the block, no other, and the same bytes each time", S,
                   KVQ_TEST_SCHEMES) {
    const S scheme = test::make_scheme<S>();
    test::for_random_shapes(scheme, 25, 96, [&](test::generator& random, const kvq::block_shape& shape) {
        const auto x = test::hostile_block(random, shape);
        const std::size_t bytes = scheme.block_bytes(shape);
        CHECK(bytes % 16 == 0);
        std::vector<std::byte> one(bytes + 64, std::byte{0xcd}), two(bytes + 64, std::byte{0x32});
        auto scratch = x;
        scheme.quantize(shape, {1, 2}, scratch.data(), one.data());
        scratch = x;
        scheme.quantize(shape, {1, 2}, scratch.data(), two.data());
        CHECK(std::equal(one.begin(), one.begin() + static_cast<std::ptrdiff_t>(bytes), two.begin()));
        for (std::size_t i = bytes; i < bytes + 64; ++i)
            CHECK((one[i] == std::byte{0xcd} && two[i] == std::byte{0x32}));
    });
}

TEST_CASE_TEMPLATE("quantize counts what is not finite; quantized blocks dequantize to finite numbers", S,
                   KVQ_TEST_SCHEMES) {
    const S scheme = test::make_scheme<S>();
    test::for_random_shapes(scheme, 25, 96, [&](test::generator& random, const kvq::block_shape& shape) {
        const auto x = test::hostile_block(random, shape);
        const auto expected = std::count_if(x.begin(), x.end(), [](float v) {
            if constexpr (kvq::full_precision<S>)  // what the type cannot hold becomes infinite
                return !std::isfinite(static_cast<float>(typename S::value_type(v)));
            else
                return !std::isfinite(v);
        });
        std::uint32_t counted = 0;
        const auto block = test::quantized(scheme, shape, x, &counted);
        CHECK(counted == expected);
        if constexpr (!kvq::full_precision<S>) {
            const auto y = test::dequantized(scheme, shape, block);
            CHECK(std::all_of(y.begin(), y.end(), [](float v) { return std::isfinite(v); }));
        }
    });
}

TEST_CASE_TEMPLATE(
    "groups of any granularity take any encoder: less error than the range, in the same format", S,
    kvq::affine<2, kvq::per_token<16>, kvq::params<kvq::float16>, kvq::least_squares>,
    kvq::affine<3, kvq::per_channel<>, kvq::params<kvq::float16>, kvq::mean_corrected<kvq::shrink_search>>,
    kvq::affine<2, kvq::per_channel<7>, kvq::params<float>, kvq::mean_corrected<kvq::least_squares>>) {
    using range = kvq::scheme<kvq::bits<S::code_bits>, kvq::asymmetric, typename S::granularity_type,
                              kvq::params<typename S::parameter>>;
    const S scheme;
    const range plain;
    CHECK(scheme.name() == plain.name());
    double fitted = 0, ranged = 0;
    test::for_random_shapes(scheme, 30, 96, [&](test::generator& random, const kvq::block_shape& shape) {
        CHECK(scheme.block_bytes(shape) == plain.block_bytes(shape));
        const auto x = test::random_block(random, shape);
        const auto block = test::quantized(scheme, shape, x);
        const auto y = test::dequantized(scheme, shape, block),
                   other = test::dequantized(plain, shape, test::quantized(plain, shape, x));
        CHECK(test::dequantized(plain, shape, block) == y);
        for (std::size_t i = 0; i < x.size(); ++i) {
            fitted += (static_cast<double>(x[i]) - y[i]) * (static_cast<double>(x[i]) - y[i]);
            ranged += (static_cast<double>(x[i]) - other[i]) * (static_cast<double>(x[i]) - other[i]);
        }
        // Hostile values are counted, and what is left is finite.
        const auto hostile = test::hostile_block(random, shape);
        std::uint32_t counted = 0;
        const auto z = test::dequantized(scheme, shape, test::quantized(scheme, shape, hostile, &counted));
        CHECK(counted ==
              std::count_if(hostile.begin(), hostile.end(), [](float v) { return !std::isfinite(v); }));
        CHECK(std::all_of(z.begin(), z.end(), [](float v) { return std::isfinite(v); }));
    });
    INFO("squared errors: ", fitted, ", of the range ", ranged);
    CHECK(fitted < 0.95 * ranged);
}

TEST_CASE_TEMPLATE("every number dequantizes to the nearest value of its group's grid", S,
                   KVQ_TEST_AFFINE_SCHEMES) {
    const S scheme;
    test::for_random_shapes(scheme, 30, 96, [&](test::generator& random, const kvq::block_shape& shape) {
        const auto x =
            random.one_in(2) ? test::hostile_block(random, shape) : test::random_block(random, shape);
        int too_far = 0;
        for_each_group(scheme, shape, x, test::quantized(scheme, shape, x),
                       [&](const std::vector<quantized_value>& group) {
                           for (const quantized_value& n : group) {
                               if (std::isnan(n.x)) continue;
                               const auto [low, high] = grid<S>(n);
                               const double inside = std::clamp(n.x, low, high);
                               // All-zero groups have scale 0 and saturate to their only value.
                               too_far +=
                                   !(std::fabs(n.dequantized - inside) <= n.scale / 2 + evaluation<S>(n));
                           }
                       });
        CHECK(too_far == 0);
    });
}

TEST_CASE_TEMPLATE(
    "|x - x^| <= scale / 2: directed rounding of the parameters keeps the group inside its grid", S,
    KVQ_TEST_AFFINE_SCHEMES) {
    using P = typename S::parameter;
    if constexpr (kvq::float_format<P>) {
        const auto seed = test::seed();
        INFO("KVQ_SEED=", seed);
        test::generator random(seed);
        const S scheme;
        INFO(scheme.name());
        for (int round = 0; round < 30; ++round) {
            const auto shape = test::random_shape(random, 96);
            INFO(shape);
            const auto x =
                random.one_in(2) ? test::hostile_block(random, shape) : test::random_block(random, shape);
            int too_far = 0;
            for_each_group(
                scheme, shape, x, test::quantized(scheme, shape, x),
                [&](const std::vector<quantized_value>& group) {
                    double lo = HUGE_VAL, hi = -HUGE_VAL;
                    for (const quantized_value& n : group)
                        if (std::isfinite(n.x)) lo = std::min(lo, n.x), hi = std::max(hi, n.x);
                    if (std::max(-lo, hi) > 0x1p126) return;  // larger magnitudes saturate
                    // The contract holds for groups whose bias and scale the parameter type can hold.
                    const double limit = static_cast<double>(kvq::detail::max_finite<P>);
                    constexpr int steps = S::levels::template top<S::code_bits> - S::zero_code;
                    const double span = S::levels::has_bias ? hi - std::min(lo, limit) : std::max(-lo, hi);
                    if (span / steps > limit || (S::levels::has_bias && lo < -limit)) return;
                    for (const quantized_value& n : group)
                        if (std::isfinite(n.x))
                            too_far += !(std::fabs(n.dequantized - n.x) <= n.scale / 2 + evaluation<S>(n));
                });
            CHECK(too_far == 0);
        }
    }
}

TEST_CASE_TEMPLATE("what all encoders use gives the bytes of the range, for any granularity", S,
                   kvq::affine<4, kvq::per_token<16>, kvq::params<kvq::float16>, enclosing_encoder>,
                   kvq::affine<3, kvq::per_channel<7>, kvq::params<kvq::bfloat16>, enclosing_encoder>,
                   kvq::affine<2, kvq::per_channel<>, kvq::params<float>, enclosing_encoder>) {
    using range = kvq::scheme<kvq::bits<S::code_bits>, kvq::asymmetric, typename S::granularity_type,
                              kvq::params<typename S::parameter>>;
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 30; ++round) {
        const auto shape = test::random_shape(random, 96);
        INFO(shape);
        const auto x = test::random_block(random, shape);
        CHECK(test::quantized(S(), shape, x) == test::quantized(range(), shape, x));
    }
}

TEST_CASE_TEMPLATE("parameters waste at most one rounding: scale <= (range / steps), rounded up once", S,
                   KVQ_TEST_AFFINE_SCHEMES) {
    using P = typename S::parameter;
    if constexpr (kvq::float_format<P>) {
        const auto seed = test::seed();
        INFO("KVQ_SEED=", seed);
        test::generator random(seed);
        const S scheme;
        INFO(scheme.name());
        // One unit in the last place of P for normal numbers, plus float evaluation.
        constexpr double ulp = std::is_same_v<P, float>          ? 0x1p-23
                               : std::is_same_v<P, kvq::float16> ? 0x1p-10
                                                                 : 0x1p-7;
        for (int round = 0; round < 10; ++round) {
            const auto shape = test::random_shape(random, 96);
            INFO(shape);
            const auto x = test::random_block(random, shape);
            for_each_group(scheme, shape, x, test::quantized(scheme, shape, x),
                           [&](const std::vector<quantized_value>& group) {
                               double lo = HUGE_VAL, hi = -HUGE_VAL;
                               for (const quantized_value& n : group)
                                   lo = std::min(lo, n.x), hi = std::max(hi, n.x);
                               constexpr int steps = S::levels::template top<S::code_bits> - S::zero_code;
                               const double bias = group.front().bias;
                               if (S::levels::has_bias)
                                   REQUIRE((bias <= lo && bias >= lo - ulp * std::fabs(lo)));
                               const double exact =
                                   (S::levels::has_bias ? hi - bias : std::max(-lo, hi)) / steps;
                               const double smallest = std::is_same_v<P, kvq::float16> ? 0x1p-24 : 0.0;
                               REQUIRE(group.front().scale <= exact * (1 + ulp) * (1 + 0x1p-22) + smallest);
                           });
        }
    }
}

TEST_CASE_TEMPLATE("constant groups are exact where the parameter type can hold the value, zero always", S,
                   KVQ_TEST_AFFINE_SCHEMES) {
    using P = typename S::parameter;
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const S scheme;
    INFO(scheme.name());
    for (int round = 0; round < 40; ++round) {
        const auto shape = test::random_shape(random, 40);
        const float value = round == 0 ? 0.0f : static_cast<float>(P(random.any_magnitude(-12, 12)));
        INFO(shape, " of ", value);
        const std::vector<float> x(shape.values(), value);
        for (const float y : test::dequantized(scheme, shape, test::quantized(scheme, shape, x))) {
            if (S::levels::has_bias || value == 0.0f) REQUIRE(y == value);
            // the largest number of a symmetric group is steps * scale, scale rounded up to P once, then to
            // float
            else
                REQUIRE(std::fabs(y - value) <=
                        std::fabs(value) * (std::is_same_v<P, float>          ? 0x1p-22f
                                            : std::is_same_v<P, kvq::float16> ? 0x1p-10f
                                                                              : 0x1p-7f));
        }
    }
}

TEST_CASE_TEMPLATE("what is not finite leaves its neighbours alone", S, KVQ_TEST_AFFINE_SCHEMES) {
    const S scheme;
    test::for_random_shapes(scheme, 30, 80, [&](test::generator& random, const kvq::block_shape& shape) {
        auto x = test::random_block(random, shape);
        for (float& v : x)
            if (random.one_in(5)) v = random.pick(test::hostile_values());
        // Replacing every NaN and infinity by another member of its group changes nothing for the others.
        auto clean = x;
        const auto cut = cut_axis(scheme, shape);
        const bool on_tokens = S::granularity_type::on_tokens;
        const auto at = [&](int line, int i) {
            return static_cast<std::size_t>(on_tokens ? line * shape.dim + i : i * shape.dim + line);
        };
        for (int line = 0; line < (on_tokens ? shape.tokens : shape.dim); ++line)
            for (int g = 0; g < cut.groups(); ++g) {
                float member = 0.0f;
                for (int i = 0; i < cut.group_size(g); ++i)
                    if (const float v = x[at(line, g * cut.group + i)]; std::isfinite(v)) member = v;
                for (int i = 0; i < cut.group_size(g); ++i)
                    if (float& v = clean[at(line, g * cut.group + i)]; !std::isfinite(v)) v = member;
            }
        const auto with = test::dequantized(scheme, shape, test::quantized(scheme, shape, x));
        const auto without = test::dequantized(scheme, shape, test::quantized(scheme, shape, clean));
        int changed = 0;
        for (std::size_t i = 0; i < x.size(); ++i) changed += std::isfinite(x[i]) && with[i] != without[i];
        CHECK(changed == 0);
    });
}

TEST_CASE_TEMPLATE("NaN becomes the grid's value nearest zero, infinities the ends of the grid", S,
                   KVQ_TEST_AFFINE_SCHEMES) {
    const S scheme;
    test::for_random_shapes(scheme, 30, 80, [&](test::generator& random, const kvq::block_shape& shape) {
        auto x = test::random_block(random, shape);
        const float shift = random.pick(std::vector<float>{0.0f, 10.0f, -10.0f});
        for (float& v : x) v = random.one_in(6) ? random.pick(test::hostile_values()) : v + shift;
        int wrong = 0;
        for_each_group(
            scheme, shape, x, test::quantized(scheme, shape, x),
            [&](const std::vector<quantized_value>& group) {
                for (const quantized_value& n : group) {
                    const auto [low, high] = grid<S>(n);
                    const double wanted = std::isnan(n.x) ? std::clamp(0.0, low, high) : n.x > 0 ? high : low;
                    if (std::isfinite(n.x) || n.scale == 0.0) continue;
                    const double slack = (std::isnan(n.x) ? n.scale / 2 : 0.0) + evaluation<S>(n);
                    wrong += !(std::fabs(n.dequantized - wanted) <= slack);
                }
            });
        CHECK(wrong == 0);
    });
}

TEST_CASE_TEMPLATE("full precision rounds once and keeps infinities and NaN", T, float, kvq::float16,
                   kvq::bfloat16) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 30; ++round) {
        const auto shape = test::random_shape(random);
        const auto x = test::hostile_block(random, shape);
        const auto y = test::dequantized(kvq::full<T>{}, shape, test::quantized(kvq::full<T>{}, shape, x));
        for (std::size_t i = 0; i < x.size(); ++i) {
            const auto expected = static_cast<float>(T(x[i]));
            REQUIRE((std::isnan(x[i]) ? std::isnan(y[i]) : y[i] == expected));
        }
    }
}

TEST_CASE("symmetric codes are symmetric: quantize(-x) dequantizes to -x^") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 30; ++round) {
        const auto shape = test::random_shape(random);
        auto x = test::random_block(random, shape);
        const auto plus = test::dequantized(kvq::int8{}, shape, test::quantized(kvq::int8{}, shape, x));
        for (float& v : x) v = -v;
        const auto minus = test::dequantized(kvq::int8{}, shape, test::quantized(kvq::int8{}, shape, x));
        for (std::size_t i = 0; i < x.size(); ++i) REQUIRE(plus[i] == -minus[i]);
    }
}

}  // namespace schemes_tests
