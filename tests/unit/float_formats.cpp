// SPDX-License-Identifier: MIT
// Comparison family: exact. float16 and bfloat16 against an independent computation in double, and against hardware.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/core/float_formats.hpp>

#include "support/random.hpp"
#if defined(__F16C__)
#include <immintrin.h>
#endif

using kvq::bfloat16;
using kvq::float16;
using kvq::detail::bit_cast;

namespace float_formats_tests {

namespace {

/// What a format is, from its definition: the number of mantissa bits and the smallest exponent.
struct description {
    int mantissa_bits, smallest_exponent;
};
constexpr description describe(float16) { return {10, -14}; }
constexpr description describe(bfloat16) { return {7, -126}; }

template <class T>
double value_in_double(std::uint16_t bits) {
    const auto [m, lowest] = describe(T{});
    const int exponent_bits = 15 - m;
    const int exponent = (bits >> m) & ((1 << exponent_bits) - 1);
    const int mantissa = bits & ((1 << m) - 1);
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1) return mantissa ? std::nan("") : sign * HUGE_VAL;
    const int implicit = exponent ? 1 << m : 0;
    return sign * std::ldexp(implicit + mantissa, (exponent ? exponent - 1 : 0) + lowest - m);
}

/// Nearest value, ties to even, found in double arithmetic: no bit of the implementation is reused.
template <class T>
double rounded_in_double(float x) {
    const auto [m, lowest] = describe(T{});
    if (std::isnan(x) || std::isinf(x) || x == 0.0f) return static_cast<double>(x);
    const int exponent = std::max(std::ilogb(static_cast<double>(x)), lowest);
    const double unit = std::ldexp(1.0, exponent - m);
    const double rounded = std::nearbyint(static_cast<double>(x) / unit) * unit;
    const double limit = std::ldexp(2.0 - std::ldexp(1.0, -m), -lowest + 1);
    return std::fabs(rounded) > limit ? std::copysign(HUGE_VAL, static_cast<double>(x)) : rounded;
}

bool same(double a, double b) {
    return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

/// Every float whose neighbourhood decides something: each 16-bit value, the midpoint to the next, and their neighbours.
template <class T, class Check>
void for_each_interesting_float(Check check) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const auto b = static_cast<std::uint16_t>(bits);
        const float x = T::from_bits(b);
        if (std::isnan(x)) continue;
        const double next = value_in_double<T>(static_cast<std::uint16_t>(b + 1));
        const float middle =
            std::isfinite(next) ? static_cast<float>((static_cast<double>(x) + next) / 2) : x;
        for (const float near : {x, middle}) {
            check(near);
            check(std::nextafter(near, HUGE_VALF));
            check(std::nextafter(near, -HUGE_VALF));
        }
    }
}

}  // namespace

TEST_CASE_TEMPLATE("every 16-bit pattern means what the format defines", T, float16, bfloat16) {
    int wrong = 0;
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const auto b = static_cast<std::uint16_t>(bits);
        const auto x = static_cast<float>(T::from_bits(b));
        if (!same(static_cast<double>(x), value_in_double<T>(b))) ++wrong;
    }
    CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("T(float(h)) = h for every pattern", T, float16, bfloat16) {
    int wrong = 0;
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const auto b = static_cast<std::uint16_t>(bits);
        const auto x = static_cast<float>(T::from_bits(b));
        const std::uint16_t back = T(x).bits;
        // A signalling NaN comes back quiet, with its payload.
        const int quiet = 1 << (describe(T{}).mantissa_bits - 1);
        if (std::isnan(x) ? back != (b | quiet) : back != b) ++wrong;
    }
    CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("conversion from float is the nearest value, ties to even", T, float16, bfloat16) {
    int wrong = 0;
    for_each_interesting_float<T>([&](float x) {
        wrong += !same(static_cast<double>(static_cast<float>(T(x))), rounded_in_double<T>(x));
    });
    CHECK(wrong == 0);

    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int i = 0; i < 1'000'000; ++i) {
        const float x = bit_cast<float>(static_cast<std::uint32_t>(random.bits()));
        wrong += !same(static_cast<double>(static_cast<float>(T(x))), rounded_in_double<T>(x));
    }
    CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("NaN stays NaN and keeps its sign and upper payload", T, float16, bfloat16) {
    const int m = describe(T{}).mantissa_bits;
    for (const std::uint32_t sign : {0u, 0x80000000u})
        for (std::uint32_t payload = 1; payload < 0x800000u; payload = payload * 3 + 1) {
            const float x = bit_cast<float>(sign | 0x7f800000u | payload);
            const std::uint16_t h = T(x).bits;
            CHECK(std::isnan(static_cast<float>(T::from_bits(h))));
            CHECK((h & 0x8000u) == sign >> 16);
            CHECK((h & ((1u << (m - 1)) - 1u)) == ((payload >> (23 - m)) & ((1u << (m - 1)) - 1u)));
        }
}

TEST_CASE_TEMPLATE("round_down and round_up_to are the neighbours from below and above", T, float16,
                   bfloat16) {
    int wrong = 0;
    for_each_interesting_float<T>([&](float x) {
        if (!std::isfinite(x)) return;
        const float limit = kvq::detail::max_finite<T>;
        const float clamped = std::fmin(std::fmax(x, -limit), limit);
        const T down = kvq::detail::round_down<T>(x), up = kvq::detail::round_up_to<T>(x);
        const auto low = static_cast<float>(down), high = static_cast<float>(up);
        wrong += !(low <= clamped && clamped <= high);
        // They are equal if the number is a value of the format, and next to each other if not.
        const float nearest = T(clamped);
        if (nearest == clamped)
            wrong += !(low == clamped && high == clamped);
        else
            wrong += static_cast<float>(kvq::detail::next(down, true)) != high;
    });
    CHECK(wrong == 0);
}

TEST_CASE("largest finite values") {
    CHECK(value_in_double<float16>(0x7bff) == static_cast<double>(float16::max_finite));
    CHECK(value_in_double<bfloat16>(0x7f7f) == static_cast<double>(bfloat16::max_finite));
    CHECK(static_cast<float>(kvq::detail::round_up_to<float16>(1e9f)) == 65504.0f);
    CHECK(static_cast<float>(kvq::detail::round_down<float16>(-1e9f)) == -65504.0f);
    CHECK(static_cast<float>(kvq::detail::round_down<float>(HUGE_VALF)) == kvq::detail::max_float);
}

TEST_CASE("conversions work at compile time") {
    static_assert(float16(1.0f).bits == 0x3c00 && float16(65504.0f).bits == 0x7bff &&
                  float16(65520.0f).bits == 0x7c00);
    static_assert(float16(5.9604645e-8f).bits == 1 && float16(2.9802322e-8f).bits == 0);
    static_assert(bfloat16(1.0f).bits == 0x3f80 &&
                  static_cast<float>(bfloat16::from_bits(0x4049)) == 3.140625f);
}

#if defined(__F16C__)
TEST_CASE("float16 is what F16C computes, bit for bit") {
    int wrong = 0;
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const auto h = static_cast<std::uint16_t>(bits);
        wrong += bit_cast<std::uint32_t>(_cvtsh_ss(h)) != bit_cast<std::uint32_t>(float16::to_float(h));
    }
    CHECK(wrong == 0);
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const auto check = [&](float x) {
        const int hardware = _mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT), 0);
        wrong += hardware != float16::from_float(x);
    };
    for_each_interesting_float<float16>(check);
    for (int i = 0; i < 1'000'000; ++i) check(bit_cast<float>(static_cast<std::uint32_t>(random.bits())));
    CHECK(wrong == 0);
}
#endif

}  // namespace float_formats_tests
