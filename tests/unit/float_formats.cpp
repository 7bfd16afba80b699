// SPDX-License-Identifier: MIT
// Comparison family: exact. Formats of 16, 8 and 4 bits against an independent computation in double, float16
// also against hardware.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <kvq/core/float_formats.hpp>
#include <type_traits>
#include <vector>

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

/// Every float whose neighbourhood decides something: each 16-bit value, the midpoint to the next, and their
/// neighbours.
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

namespace {

/// The value of every pattern of a narrow format, from its definition; NaN where it has none.
std::vector<double> all_values(kvq::e4m3) {
    std::vector<double> values(256);
    for (int b = 0; b < 256; ++b) {
        const int e = (b >> 3) & 15, m = b & 7;
        const double x = e ? std::ldexp(1.0 + m / 8.0, e - 7) : std::ldexp(m / 8.0, -6);
        values[static_cast<std::size_t>(b)] = e == 15 && m == 7 ? std::nan("") : b & 0x80 ? -x : x;
    }
    return values;
}
std::vector<double> all_values(kvq::e5m2) {
    std::vector<double> values(256);
    for (int b = 0; b < 256; ++b) {
        const int e = (b >> 2) & 31, m = b & 3;
        const double x = e ? std::ldexp(1.0 + m / 4.0, e - 15) : std::ldexp(m / 4.0, -14),
                     special = m == 0 ? static_cast<double>(HUGE_VALF) : std::nan("");
        values[static_cast<std::size_t>(b)] = (b & 0x80 ? -1.0 : 1.0) * (e == 31 ? special : x);
    }
    return values;
}
std::vector<double> all_values(kvq::e2m1) {
    return {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0};
}
std::vector<double> all_values(kvq::e8m0) {
    std::vector<double> values;
    for (int b = 0; b < 255; ++b) values.push_back(std::ldexp(1.0, b - 127));
    values.push_back(std::nan(""));
    return values;
}
template <class T>
constexpr bool is_signed = !std::is_same_v<T, kvq::e8m0>;

/// The pattern of the nearest value, the even one of two equally near; found by trying all of them.
template <class T>
int nearest_pattern(const std::vector<double>& values, float x) {
    const auto most = static_cast<double>(T::max_finite), least_of_all = is_signed<T> ? -most : 0.0;
    const double wanted = std::clamp(static_cast<double>(x), least_of_all, most);
    int best = -1;
    double least = 0.0;
    for (int b = 0; b < static_cast<int>(values.size()); ++b) {
        const double v = values[static_cast<std::size_t>(b)];
        if (!std::isfinite(v) || (is_signed<T> && std::signbit(v) != std::signbit(wanted))) continue;
        const double distance = std::fabs(v - wanted);
        if (best < 0 || distance < least || (distance == least && b % 2 == 0)) {
            best = b;
            least = distance;
        }
    }
    return best;
}

}  // namespace

TEST_CASE_TEMPLATE(
    "narrow formats: patterns are what the format defines; the nearest one is found, ties to even", T,
    kvq::e4m3, kvq::e5m2, kvq::e2m1, kvq::e8m0) {
    const std::vector<double> values = all_values(T{});
    std::vector<double> sorted;
    int wrong = 0;
    for (int b = 0; b < static_cast<int>(values.size()); ++b) {
        const auto byte = static_cast<std::uint8_t>(b);
        const float x = T::from_bits(byte);
        const double wanted = values[static_cast<std::size_t>(b)];
        wrong += !same(static_cast<double>(x), wanted);
        if (!std::isfinite(wanted)) continue;
        wrong += T(x).bits != byte;
        sorted.push_back(wanted);
    }
    CHECK(wrong == 0);
    std::sort(sorted.begin(), sorted.end());
    CHECK(static_cast<double>(T::max_finite) == sorted.back());

    const auto check = [&](float x) {
        wrong += T(x).bits != nearest_pattern<T>(values, x);
        if (!std::isfinite(x)) return;
        // The neighbours from below and above, which are the same for a value of the format.
        const float clamped = std::clamp(x, static_cast<float>(sorted.front()), T::max_finite);
        const auto low = static_cast<double>(static_cast<float>(kvq::detail::round_down<T>(x)));
        const auto high = static_cast<double>(static_cast<float>(kvq::detail::round_up_to<T>(x)));
        const auto above = std::lower_bound(sorted.begin(), sorted.end(), static_cast<double>(clamped));
        wrong += high != *above || low != (*above == static_cast<double>(clamped) ? *above : *(above - 1));
    };
    // What decides: each value, the middle to the next one, and the floats beside them.
    for (std::size_t i = 0; i < sorted.size(); ++i) {
        const double middle = i + 1 < sorted.size() ? (sorted[i] + sorted[i + 1]) / 2 : 2 * sorted[i];
        for (const float x : {static_cast<float>(sorted[i]), static_cast<float>(middle)}) {
            check(x);
            check(std::nextafter(x, HUGE_VALF));
            check(std::nextafter(x, -HUGE_VALF));
        }
    }
    for (const float x : {0.0f, -0.0f, HUGE_VALF, -HUGE_VALF, kvq::detail::max_float, 1e-45f, -1e-45f})
        check(x);
    CHECK(wrong == 0);

    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int i = 0; i < 50'000; ++i) {
        const float x = bit_cast<float>(static_cast<std::uint32_t>(random.bits()));
        if (!std::isnan(x)) check(x);
        check(random.any_magnitude(-12, 10));
    }
    CHECK(wrong == 0);
}

TEST_CASE("narrow formats: what is no number, and infinities") {
    const float nan = std::nanf("");
    CHECK(kvq::e4m3(nan).bits == 0x7f);
    CHECK(kvq::e4m3(-nan).bits == 0x7f);
    CHECK(std::isnan(static_cast<float>(kvq::e4m3::from_bits(0xff))));
    CHECK(kvq::e4m3(HUGE_VALF).bits == 0x7e);
    CHECK(kvq::e4m3(-HUGE_VALF).bits == 0xfe);
    CHECK(kvq::e5m2(nan).bits == 0x7f);
    CHECK(kvq::e5m2(HUGE_VALF).bits == 0x7b);
    CHECK(kvq::e5m2(-HUGE_VALF).bits == 0xfb);
    CHECK(kvq::e2m1(nan).bits == 7);
    CHECK(kvq::e2m1(-nan).bits == 7);
    CHECK(kvq::e2m1::from_bits(0xf3).bits == 3);
    CHECK(kvq::e8m0(nan).bits == 0xff);
    CHECK(kvq::e8m0(-nan).bits == 0xff);
    CHECK(kvq::e8m0(-1.0f).bits == 0);
    CHECK(kvq::e8m0(HUGE_VALF).bits == 0xfe);
    static_assert(kvq::e4m3(1.0f).bits == 0x38 && kvq::e4m3(464.0f).bits == 0x7e &&
                  kvq::e4m3(-0.0f).bits == 0x80);
    static_assert(kvq::e2m1(2.5f).bits == 4 && kvq::e2m1(-0.25f).bits == 8 && kvq::e8m0(1.5f).bits == 128);
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
