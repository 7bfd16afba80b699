// Floating point formats as storage types, with every conversion written in integer arithmetic.
//
// | type     | bits | exponent, bias | mantissa | largest | smallest normal | unit roundoff | inf, NaN   |
// |----------|------|----------------|----------|---------|-----------------|---------------|------------|
// | float16  | 16   | 5, 15          | 10       | 65504   | 6.1e-5          | 2^-11         | both       |
// | bfloat16 | 16   | 8, 127         | 7        | 3.4e38  | 1.2e-38         | 2^-8          | both       |
// | e4m3     | 8    | 4, 7           | 3        | 448     | 2^-6            | 2^-4          | NaN (0x7f) |
// | e5m2     | 8    | 5, 15          | 2        | 57344   | 2^-14           | 2^-3          | both       |
// | e2m1     | 4    | 2, 1           | 1        | 6       | 1               | 2^-2          | neither    |
// | e8m0     | 8    | 8, 127         | 0        | 2^127   | 2^-127          | 2^-1          | NaN (0xff) |
//
// Contract: conversion from float rounds to nearest, ties to even. float16, bfloat16: overflow gives
// infinity; NaN stays NaN (quiet, upper payload bits kept): bit for bit what IEEE 754 hardware (F16C, NEON,
// CUDA) does. e4m3, e5m2, e2m1: overflow and infinities give the largest value, as the saturating conversions
// of GPUs (cvt.rn.satfinite) do; NaN is 0x7f in e4m3 and e5m2, and 6 in e2m1, which has none. e8m0 has no
// sign and no zero: numbers below 2^-127 give 2^-127, negative ones too; ties go to the even exponent.
// Conversion to float is exact. `round_down` gives the largest value that is at most x, `round_up_to` the
// smallest one that is at least x.
// Sources: IEEE 754; Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433, table 1 (e4m3,
// without infinities, and e5m2, the first byte of a float16); OCP Microscaling Formats (MX) 1.0, 5.3.3 (e2m1)
// and 5.4.1 (e8m0).
#pragma once

#include <concepts>
#include <cstdint>

#include "bits.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {

/// A number as the pattern that Number::from_float() and to_float() make and read.
template <class Number, class Pattern>
struct stored_number {
    Pattern bits = 0;

    stored_number() = default;
    KVQ_HD constexpr explicit stored_number(float value) noexcept : bits(Number::from_float(value)) {}
    KVQ_HD static constexpr Number from_bits(Pattern b) noexcept {
        Number x;
        x.bits = b;
        return x;
    }
    KVQ_HD constexpr operator float() const noexcept { return Number::to_float(bits); }
};

}  // namespace detail

struct float16 : detail::stored_number<float16, std::uint16_t> {
    using stored_number::stored_number;

    static constexpr float max_finite = 65504.0f;
    static constexpr const char* name = "fp16";
    static constexpr std::uint32_t sign_bit = 0x8000u;

    KVQ_HD static constexpr std::uint16_t from_float(float value) noexcept {
        const auto u = detail::bit_cast<std::uint32_t>(value);
        const std::uint32_t sign = (u >> 16) & 0x8000u;
        const std::uint32_t magnitude = u & 0x7fffffffu;
        if (magnitude > 0x7f800000u)
            return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
        if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
        if (magnitude >= 0x38800000u) {
            const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
            return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
        }
        if (magnitude <= 0x33000000u) return static_cast<std::uint16_t>(sign);
        const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        const std::uint32_t shift = 126u - (magnitude >> 23);
        const std::uint32_t rest = mantissa & ((1u << shift) - 1u);
        const std::uint32_t half = 1u << (shift - 1u);
        std::uint32_t result = mantissa >> shift;
        if (rest > half || (rest == half && (result & 1u))) ++result;
        return static_cast<std::uint16_t>(sign | result);
    }

    KVQ_HD static constexpr float to_float(std::uint16_t h) noexcept {
        const std::uint32_t sign = (h & 0x8000u) << 16;
        const std::uint32_t exponent = (h >> 10) & 31u;
        std::uint32_t mantissa = h & 0x3ffu;
        if (exponent == 31)
            return detail::bit_cast<float>(sign | 0x7f800000u | (mantissa ? 0x400000u : 0u) |
                                           (mantissa << 13));
        if (exponent == 0) {
            if (mantissa == 0) return detail::bit_cast<float>(sign);
            std::uint32_t e = 113;
            while (!(mantissa & 0x400u)) {
                mantissa <<= 1;
                --e;
            }
            return detail::bit_cast<float>(sign | (e << 23) | ((mantissa & 0x3ffu) << 13));
        }
        return detail::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    }
};

struct bfloat16 : detail::stored_number<bfloat16, std::uint16_t> {
    using stored_number::stored_number;

    static constexpr float max_finite = 3.38953139e38f;
    static constexpr const char* name = "bf16";
    static constexpr std::uint32_t sign_bit = 0x8000u;

    KVQ_HD static constexpr std::uint16_t from_float(float value) noexcept {
        const auto u = detail::bit_cast<std::uint32_t>(value);
        if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
        return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
    KVQ_HD static constexpr float to_float(std::uint16_t b) noexcept {
        return detail::bit_cast<float>(static_cast<std::uint32_t>(b) << 16);
    }
};

namespace detail {

/// The pattern of the number of an 8-bit type without infinities that is nearest to a finite or infinite x,
/// ties to even, without its sign. Largest: the pattern of the largest value.
template <int Mantissa, int Bias, std::uint32_t Largest>
KVQ_HD constexpr std::uint32_t saturated_magnitude(float x) noexcept {
    const std::uint32_t magnitude = bit_cast<std::uint32_t>(x) & 0x7fffffffu;
    const int exponent = static_cast<int>(magnitude >> 23) - 127 + Bias;
    // Bits that do not fit; below the normal numbers the unit stays the same, and the leading 1 is written.
    const int shift = 23 - Mantissa + (exponent < 1 ? 1 - exponent : 0);
    if (shift > 24) return 0;
    const std::uint32_t kept = exponent < 1 ? (magnitude & 0x7fffffu) | 0x800000u
                                            : magnitude - ((127u - static_cast<std::uint32_t>(Bias)) << 23);
    const std::uint32_t half = 1u << (shift - 1);
    const std::uint32_t rounded = (kept + half - 1 + ((kept >> shift) & 1u)) >> shift;
    return rounded < Largest ? rounded : Largest;
}

/// Numbers of 8 bits or fewer without infinities. Nan: the pattern that NaN gets.
template <class Number, int Mantissa, int Bias, std::uint32_t Largest, std::uint8_t Nan>
struct saturated_number : stored_number<Number, std::uint8_t> {
    using stored_number<Number, std::uint8_t>::stored_number;

    KVQ_HD static constexpr std::uint8_t from_float(float value) noexcept {
        const auto u = bit_cast<std::uint32_t>(value);
        if ((u & 0x7fffffffu) > 0x7f800000u) return Nan;
        return static_cast<std::uint8_t>((u & 0x80000000u ? Number::sign_bit : 0u) |
                                         saturated_magnitude<Mantissa, Bias, Largest>(value));
    }
};

/// The value of a pattern of such a type, without its sign.
template <int Mantissa, int Bias>
KVQ_HD constexpr float value_of_magnitude(std::uint32_t pattern) noexcept {
    const std::uint32_t exponent = pattern >> Mantissa;
    if (exponent == 0)
        return static_cast<float>(pattern) *
               bit_cast<float>(static_cast<std::uint32_t>(128 - Bias - Mantissa) << 23);
    return bit_cast<float>((pattern << (23 - Mantissa)) + (static_cast<std::uint32_t>(127 - Bias) << 23));
}

}  // namespace detail

/// FP8 with 4 bits of exponent, the variant without infinities ("e4m3fn"): what NVFP4 stores its scales in.
struct e4m3 : detail::saturated_number<e4m3, 3, 7, 0x7e, 0x7f> {
    using saturated_number::saturated_number;

    static constexpr float max_finite = 448.0f;
    static constexpr const char* name = "e4m3";
    static constexpr std::uint32_t sign_bit = 0x80u;

    KVQ_HD static constexpr float to_float(std::uint8_t b) noexcept {
        const std::uint32_t magnitude = b & 0x7fu;
        const float x = magnitude == 0x7fu ? detail::bit_cast<float>(0x7fc00000u)
                                           : detail::value_of_magnitude<3, 7>(magnitude);
        return b & 0x80u ? -x : x;
    }
};

/// FP8 with 5 bits of exponent: the first byte of a float16.
struct e5m2 : detail::saturated_number<e5m2, 2, 15, 0x7b, 0x7f> {
    using saturated_number::saturated_number;

    static constexpr float max_finite = 57344.0f;
    static constexpr const char* name = "e5m2";
    static constexpr std::uint32_t sign_bit = 0x80u;

    KVQ_HD static constexpr float to_float(std::uint8_t b) noexcept {
        return float16::to_float(static_cast<std::uint16_t>(b << 8));
    }
};

/// FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, in the low 4 bits; the high 4 are 0. Twice a value is
/// an integer.
struct e2m1 : detail::saturated_number<e2m1, 1, 1, 7, 7> {
    using saturated_number::saturated_number;
    /// The high 4 bits are dropped.
    KVQ_HD static constexpr e2m1 from_bits(std::uint8_t b) noexcept {
        return saturated_number::from_bits(b & 15u);
    }

    static constexpr float max_finite = 6.0f;
    static constexpr const char* name = "e2m1";
    static constexpr std::uint32_t sign_bit = 8u;

    KVQ_HD static constexpr float to_float(std::uint8_t b) noexcept {
        const float x = detail::value_of_magnitude<1, 1>(b & 7u);
        return b & 8u ? -x : x;
    }
};

/// A power of two, the scale of MX blocks: 2^(bits - 127).
struct e8m0 : detail::stored_number<e8m0, std::uint8_t> {
    using stored_number::stored_number;

    static constexpr float max_finite = 1.70141183e38f;
    static constexpr const char* name = "e8m0";
    static constexpr std::uint32_t sign_bit = 0u;

    KVQ_HD static constexpr std::uint8_t from_float(float value) noexcept {
        const auto u = detail::bit_cast<std::uint32_t>(value);
        if ((u & 0x7fffffffu) > 0x7f800000u) return 0xff;
        // Numbers between 2^-127 and 2^-126 have no leading 1 in a float: 2^-127 is a half of the smallest
        // normal one.
        if (u >= 0x80000000u || u <= 0x600000u) return 0;
        const std::uint32_t exponent = u >> 23, rest = u & 0x7fffffu;
        const std::uint32_t nearest = exponent + (rest > 0x400000u || (rest == 0x400000u && exponent & 1u));
        return static_cast<std::uint8_t>(exponent == 0 ? 1u : nearest < 0xfeu ? nearest : 0xfeu);
    }
    KVQ_HD static constexpr float to_float(std::uint8_t b) noexcept {
        if (b == 0xff) return detail::bit_cast<float>(0x7fc00000u);
        return detail::bit_cast<float>(b == 0 ? 0x400000u : static_cast<std::uint32_t>(b) << 23);
    }
};

/// float, float16 or bfloat16: the types of K and V tensors.
template <class T>
concept float_format = std::same_as<T, float> || std::same_as<T, float16> || std::same_as<T, bfloat16>;

template <class T>
inline constexpr const char* float_name = T::name;
template <>
inline constexpr const char* float_name<float> = "fp32";

namespace detail {

/// A format of this file: sign and magnitude, or a magnitude alone, in `bits`.
template <class T>
concept stored_float = std::same_as<T, float16> || std::same_as<T, bfloat16> || std::same_as<T, e4m3> ||
    std::same_as<T, e5m2> || std::same_as<T, e2m1> || std::same_as<T, e8m0>;

inline constexpr float max_float = 3.40282347e38f;

KVQ_HD constexpr bool is_finite(float x) noexcept {
    return (bit_cast<std::uint32_t>(x) & 0x7fffffffu) < 0x7f800000u;
}
KVQ_HD constexpr bool is_nan(float x) noexcept {
    return (bit_cast<std::uint32_t>(x) & 0x7fffffffu) > 0x7f800000u;
}

/// Largest finite value of `T`.
template <class T>
inline constexpr float max_finite = [] {
    if constexpr (std::same_as<T, float>)
        return max_float;
    else if constexpr (requires { T::max_finite; })
        return static_cast<float>(T::max_finite);
    else
        return max_float;
}();

/// Neighbour of a number in the given direction, which must have one there.
template <class T>
KVQ_HD constexpr T next(T value, bool up) noexcept {
    using pattern = decltype(value.bits);
    const auto b = static_cast<std::uint32_t>(value.bits);
    if (T::sign_bit != 0 && (b & ~T::sign_bit) == 0)
        return T::from_bits(static_cast<pattern>(up ? 1u : T::sign_bit | 1u));
    const bool negative = (b & T::sign_bit) != 0;
    return T::from_bits(static_cast<pattern>(negative != up ? b + 1 : b - 1));
}

/// Largest value of T that is at most x (finite x beyond the range: the value of T that is nearest to it).
/// Parameter types of your own round to nearest.
template <class T>
KVQ_HD constexpr T round_down(float x) noexcept {
    const float limit = max_finite<T>;
    const float clamped = x < -limit ? -limit : (x > limit ? limit : x);
    if constexpr (std::same_as<T, float>) {
        return clamped;
    } else {
        T t(clamped);
        if constexpr (stored_float<T>)
            if (static_cast<float>(t) > clamped && (T::sign_bit != 0 || t.bits != 0)) t = next(t, false);
        return t;
    }
}

/// Smallest value of T that is at least x; same limits as round_down.
template <class T>
KVQ_HD constexpr T round_up_to(float x) noexcept {
    const float limit = max_finite<T>;
    const float clamped = x < -limit ? -limit : (x > limit ? limit : x);
    if constexpr (std::same_as<T, float>) {
        return clamped;
    } else {
        T t(clamped);
        if constexpr (stored_float<T>)
            if (static_cast<float>(t) < clamped) t = next(t, true);
        return t;
    }
}

}  // namespace detail
}}  // namespace kvq
