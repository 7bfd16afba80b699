// Parameters of many channels in 8 bits each, with parameters that a group shares: scales as small floats,
// biases on a line.
//
//   scale = scale_unit * (32 + m) / 32 * 2^(e - 7)       code = 32 e + m: 32 steps an octave, 8 octaves
//   bias  = first + step * code
//
// scale_unit, first and step are bfloat16, so that both products are exact in float: a fused multiply-add
// gives the same bits, and a bias is rounded once.
//
// Contract, for finite wanted scales in [0, 2^120] and biases in [-2^120, 2^120]: rounded up, a stored scale
// is at least the wanted one and at most max(33/32 of it, scale_unit * 2^-7); rounded down, a stored bias is
// at most the wanted one and less than one step (and one float rounding) below. Rounded to nearest, the error
// is at most half of that, in both directions.
// Source: 8-bit block scales of log type, as in QUIK-like and MX formats; the linear bias is this library's
// own.
#pragma once

#include "../core/rounding.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Tag: 8-bit parameters with bfloat16 parameters shared by the channels of a group. 16 bits per channel and
/// group.
struct byte_params {
    static constexpr const char* name = "coded";  // part of the names of schemes in saved files
};

/// Rounding of stored parameters. outside: scales up and biases down, so that a group stays inside its grid.
/// settled: to nearest with shared parameters that are powers of two, so that settled parameters are stored
/// again without a change.
enum class parameter_rounding : unsigned char { outside, nearest, settled };

namespace detail {

/// The largest power of two that is at most x, for a normal float x > 0.
KVQ_HD constexpr float power_below(float x) noexcept {
    return bit_cast<float>(bit_cast<std::uint32_t>(x) & 0x7f800000u);
}

/// An unsigned float of 8 bits with `Mantissa` mantissa bits: (1 + m / 2^M) * 2^(e - e_max). Steps are 2^-M
/// to 2^-(M+1) of a value; the smallest value is 2^(8-M) octaves below the largest. Computed by shifting the
/// bits of a float.
template <int Mantissa>
struct small_float {
    static constexpr int exponents = 1 << (8 - Mantissa);
    static constexpr std::uint32_t offset = static_cast<std::uint32_t>(128 - exponents) << 23;

    KVQ_HD static KVQ_INLINE constexpr float value(unsigned code) noexcept {
        return bit_cast<float>((code << (23 - Mantissa)) + offset);
    }
    static constexpr float largest = 2.0f - 1.0f / static_cast<float>(1 << Mantissa);
    static constexpr float smallest = 2.0f / static_cast<float>(1u << (exponents - 1)) / 2.0f;

    /// Code whose unit * value(code) is nearest to x, or the smallest one that is at least x; saturates at
    /// both ends. unit: a bfloat16, so that the products are exact.
    KVQ_HD static constexpr unsigned code(float x, float unit, parameter_rounding rounding) noexcept {
        if (!(unit > 0.0f) || !(x > 0.0f)) return 0;
        const float ratio = rounded_quotient(x, unit);
        if (!(ratio > smallest)) return 0;
        if (ratio >= largest) return 255;
        unsigned code = (bit_cast<std::uint32_t>(ratio) - offset) >> (23 - Mantissa);
        // The rounding of the ratio can be off by one code.
        while (code > 0 && unit * value(code) > x) --code;
        while (code < 255 && unit * value(code + 1) <= x) ++code;
        const float below = unit * value(code);
        if (code == 255 || below >= x) return code;
        const float above = unit * value(code + 1);
        return rounding == parameter_rounding::outside || above - x < x - below ? code + 1 : code;
    }
    /// Unit for which `x` is at most the largest code.
    KVQ_HD static constexpr bfloat16 unit_for(float x) noexcept {
        if (!(x > 0.0f)) return {};
        return round_up_to<bfloat16>(larger(rounded_quotient(x, largest) * (1.0f + 0x1p-22f), 0x1p-100f));
    }
    /// The least power of two for which `x` is stored as the nearest value. Such units share one set of
    /// values.
    KVQ_HD static constexpr bfloat16 settled_unit_for(float x) noexcept {
        if (!(x > 0.0f)) return {};
        const float unit = power_below(larger(x, 0x1p-100f));
        // The next value above `largest` would be 2: a value nearer to 2 belongs to the next octave.
        const bfloat16 settled(x > unit * (largest + 0x1p-6f) ? 2.0f * unit : unit);
        return settled;
    }
};
/// Scales of channels: 32 steps an octave, 8 octaves. (A wider range would cost resolution, and a
/// scale of less than 1/250 of the largest one does not matter.) Token scales: 16 steps, 16 octaves.
using scale_float = small_float<5>;
using token_scale_float = small_float<4>;
static_assert(scale_float::value(255) == scale_float::largest &&
              scale_float::value(0) == scale_float::smallest);
static_assert(scale_float::smallest == 0x1p-7f && token_scale_float::smallest == 0x1p-15f);
static_assert(token_scale_float::value(255) == token_scale_float::largest &&
              token_scale_float::value(0) == token_scale_float::smallest);

/// Shared parameters of the biases of a group.
struct bias_line {
    bfloat16 first;
    bfloat16 step;

    /// x, a bfloat16, rounded down to a multiple of a power of two. The result is a bfloat16.
    KVQ_HD static constexpr float multiple_below(float x, float step) noexcept {
        const float multiple = x / step;
        if (!(multiple < 0x1p23f && multiple > -0x1p23f)) return x;
        const auto whole = static_cast<float>(static_cast<std::int32_t>(multiple));
        return (whole > multiple ? whole - 1.0f : whole) * step;
    }

    KVQ_HD static constexpr bias_line through(float lo, float hi) noexcept {
        bias_line line;
        line.first = round_down<bfloat16>(lo + 0.0f);
        const float range = hi - static_cast<float>(line.first);
        line.step = range > 0.0f ? round_up_to<bfloat16>(larger(rounded_quotient(range, 255.0f), 0x1p-120f))
                                 : bfloat16(0.0f);
        return line;
    }
    /// The step is a power of two and the first value a multiple of it, so that the values of such a line are
    /// also values of every finer one.
    KVQ_HD static constexpr bias_line settled(float lo, float hi) noexcept {
        bias_line line;
        line.first = round_down<bfloat16>(lo + 0.0f);
        const float range = hi - static_cast<float>(line.first);
        line.step = bfloat16(0.0f);
        if (!(range > 0.0f)) return line;
        float step = power_below(larger(rounded_quotient(range, 255.0f), 0x1p-120f));
        for (;; step *= 2.0f) {
            const float first = multiple_below(static_cast<float>(line.first), step);
            if (hi - first <= 255.5f * step) {
                line.first = bfloat16(first);
                line.step = bfloat16(step);
                return line;
            }
        }
    }
    KVQ_HD KVQ_INLINE constexpr float at(unsigned code) const noexcept {
        return static_cast<float>(first) + static_cast<float>(step) * static_cast<float>(code);
    }
    KVQ_HD constexpr unsigned code(float x, parameter_rounding rounding) const noexcept {
        if (!(static_cast<float>(step) > 0.0f)) return 0;
        const float position = rounded_quotient(x - static_cast<float>(first), static_cast<float>(step));
        if (!(position > 0.0f)) return 0;
        auto c = static_cast<unsigned>(position >= 255.0f ? 255 : round_half_even(position));
        if (rounding == parameter_rounding::outside) {
            while (c > 0 && at(c) > x) --c;
            while (c < 255 && at(c + 1) <= x) ++c;
        }
        return c;
    }
};

}  // namespace detail
}}  // namespace kvq
