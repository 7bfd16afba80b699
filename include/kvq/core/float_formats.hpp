// 16-bit floating point formats as storage types, with every conversion written in integer arithmetic.
//
// | type     | exponent | mantissa | largest  | smallest normal | unit roundoff |
// |----------|----------|----------|----------|-----------------|---------------|
// | float16  | 5        | 10       | 65504    | 6.1e-5          | 2^-11         |
// | bfloat16 | 8        | 7        | 3.4e38   | 1.2e-38         | 2^-8          |
//
// Contract: conversion from float rounds to nearest, ties to even; overflow gives infinity; NaN stays NaN
// (quiet, upper payload bits kept): bit for bit what IEEE 754 hardware (F16C, NEON, CUDA) does. Conversion to
// float is exact. `round_down` gives the largest value that is at most x, `round_up` the smallest one that is at least x.
#pragma once

#include <concepts>
#include <cstdint>

#include "bits.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

struct float16 {
    std::uint16_t bits = 0;

    float16() = default;
    KVQ_HD constexpr explicit float16(float value) noexcept : bits(from_float(value)) {}
    KVQ_HD static constexpr float16 from_bits(std::uint16_t b) noexcept {
        float16 h;
        h.bits = b;
        return h;
    }
    KVQ_HD constexpr operator float() const noexcept { return to_float(bits); }

    static constexpr float max_finite = 65504.0f;
    static constexpr const char* name = "fp16";

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

struct bfloat16 {
    std::uint16_t bits = 0;

    bfloat16() = default;
    KVQ_HD constexpr explicit bfloat16(float value) noexcept : bits(from_float(value)) {}
    KVQ_HD static constexpr bfloat16 from_bits(std::uint16_t b) noexcept {
        bfloat16 h;
        h.bits = b;
        return h;
    }
    KVQ_HD constexpr operator float() const noexcept {
        return detail::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
    }

    static constexpr float max_finite = 3.38953139e38f;
    static constexpr const char* name = "bf16";

    KVQ_HD static constexpr std::uint16_t from_float(float value) noexcept {
        const auto u = detail::bit_cast<std::uint32_t>(value);
        if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
        return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
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

/// Neighbour of a sign-magnitude 16-bit float in the given direction.
template <class T>
KVQ_HD constexpr T next(T value, bool up) noexcept {
    std::uint16_t b = value.bits;
    if ((b & 0x7fffu) == 0) return T::from_bits(up ? 0x0001u : 0x8001u);
    const bool negative = (b & 0x8000u) != 0;
    b = static_cast<std::uint16_t>(negative != up ? b + 1 : b - 1);
    return T::from_bits(b);
}

/// Largest value of T that is at most x (finite x beyond the range: the largest finite value of its sign).
/// Parameter types other than float, float16 and bfloat16 round to nearest.
template <class T>
KVQ_HD constexpr T round_down(float x) noexcept {
    const float limit = max_finite<T>;
    const float clamped = x < -limit ? -limit : (x > limit ? limit : x);
    if constexpr (std::same_as<T, float>) {
        return clamped;
    } else {
        T t(clamped);
        if constexpr (float_format<T>)
            if (static_cast<float>(t) > clamped) t = next(t, false);
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
        if constexpr (float_format<T>)
            if (static_cast<float>(t) < clamped) t = next(t, true);
        return t;
    }
}

}  // namespace detail
}}  // namespace kvq
