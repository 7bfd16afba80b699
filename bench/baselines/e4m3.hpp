// FP8 E4M3 as a storage format: 4 exponent bits (bias 7), 3 mantissa bits, largest 448, no infinities (the "fn" variant).
//
//   value = (-1)^s 2^(e - 7) (1 + m / 8);   e = 0: (-1)^s 2^-6 m / 8
//
// Contract: from_float rounds to nearest, ties to even, and saturates at +-448, infinities too. NaN becomes 0. to_float is
// exact. The NaN patterns 0x7f and 0xff, which from_float never gives, read as 0.
// Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433, table 1.
#pragma once

#include <cmath>
#include <cstdint>

namespace baselines {

struct e4m3 {
    static constexpr float max_finite = 448.0f;

    /// The value of a byte; any byte is allowed.
    static float to_float(std::uint8_t b) noexcept {
        const int exponent = (b >> 3) & 15, mantissa = b & 7;
        if (exponent == 15 && mantissa == 7) return 0.0f;
        const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                              : std::ldexp(static_cast<float>(mantissa + 8), exponent - 10);
        return b & 0x80 ? -magnitude : magnitude;
    }

    /// The byte whose value is nearest to x; any x is allowed.
    static std::uint8_t from_float(float x) noexcept {
        if (std::isnan(x)) return 0;
        const std::uint8_t sign = x < 0.0f ? 0x80 : 0;
        const float magnitude = x < 0.0f ? -x : x;
        if (magnitude >= max_finite) return static_cast<std::uint8_t>(sign | 0x7e);
        // In units of the last place: 2^-9 for subnormals and the first binade.
        float scaled = magnitude * 512.0f;
        int exponent = 1;
        while (scaled >= 16.0f) {
            scaled *= 0.5f;
            ++exponent;
        }
        const int units = static_cast<int>(std::nearbyint(scaled));  // 0..16; 8 and above are normal values
        return static_cast<std::uint8_t>(sign | (units < 8 ? units : units + 8 * (exponent - 1)));
    }
};

}  // namespace baselines
