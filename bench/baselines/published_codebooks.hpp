// Codebooks of published methods, one struct each, with formula and source.
//
//   normal_levels<B>     Lloyd-Max levels of the unit normal                  TurboQuant
//   nf4_levels           quantiles of the normal, zero exact                  QLoRA
//   iq4_nl               a fixed 16-entry table, weighted least squares       ggml
//   q4_0                 16 steps, the largest magnitude exact                ggml
//   midpoint<B>          midpoints of 2^B equal intervals, no zero            exllamav3
//   fp8_e4m3             8-bit floats under one scale                         vLLM, TensorRT-LLM
//   integer_zero<B>      affine with an integer zero in the scale's mantissa  vLLM int4_per_token_head
//
// Contract: that of a codebook (codebook.hpp). The arithmetic is the published one, in float unless it says
// otherwise.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <kvq/core/float_formats.hpp>

#include "codebook.hpp"

namespace baselines {

/// The 2^B levels with the smallest mean squared error for N(0, 1): each the mean of its cell, cells end
/// half-way.
/// Sources: Max, Quantizing for minimum distortion, IRE Trans. IT-6, 1960, table I; Lloyd, IEEE Trans. IT-28,
/// 1982.
template <int B>
struct normal_levels;
template <>
struct normal_levels<2> {
    static constexpr int bits = 2;
    static constexpr const char* name = "normal";
    static constexpr float levels[] = {-1.510417608f, -0.452780035f, 0.452780035f, 1.510417608f};
};
template <>
struct normal_levels<3> {
    static constexpr int bits = 3;
    static constexpr const char* name = "normal";
    static constexpr float levels[] = {-2.151945705f, -1.343909279f, -0.756005281f, -0.245094179f,
                                       0.245094179f,  0.756005281f,  1.343909279f,  2.151945705f};
};
template <>
struct normal_levels<4> {
    static constexpr int bits = 4;
    static constexpr const char* name = "normal";
    static constexpr float levels[] = {-2.732589571f, -2.069017227f, -1.618046386f, -1.256231197f,
                                       -0.942340456f, -0.656759119f, -0.388048299f, -0.128395030f,
                                       0.128395030f,  0.388048299f,  0.656759119f,  0.942340456f,
                                       1.256231197f,  1.618046386f,  2.069017227f,  2.732589571f};
};

template <int B>
constexpr int bits_with_a_table() {
    static_assert(
        B >= 2 && B <= 4,
        "baselines::normal_levels<B>: there are tables for codes of 2, 3 and 4 bits (turboquant<2> to <4>)");
    return 4;
}
template <int B>
struct normal_levels : normal_levels<bits_with_a_table<B>()> {};

/// NormalFloat: quantiles of the normal, scaled to [-1, 1], zero among them.
/// Source: QLoRA, arXiv 2305.14314, appendix E.
struct nf4_levels {
    static constexpr int bits = 4;
    static constexpr const char* name = "nf";
    static constexpr float levels[] = {-1.0f,        -0.69619280f, -0.52507305f, -0.39491749f,
                                       -0.28444138f, -0.18477343f, -0.09105004f, 0.0f,
                                       0.07958030f,  0.16093020f,  0.24611230f,  0.33791524f,
                                       0.44070983f,  0.56261700f,  0.72295684f,  1.0f};
};
using nf4 = by_largest<nf4_levels>;

/// ggml iq4_nl: d0 = m / -127 with m the first value of the largest magnitude; codes are the entries nearest
/// to x / d0; stored d = sum w x t / sum w t^2 with t the entries and w = x^2. The codes stay.
/// Source: ggml, ggml-common.h (kvalues_iq4nl) and quantize_row_iq4_nl.
struct iq4_nl_levels {
    static constexpr int bits = 4;
    static constexpr const char* name = "iq";
    static constexpr signed char levels[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                             1,    13,   25,  38,  53,  69,  89,  113};
};
struct iq4_nl : table_levels<iq4_nl_levels> {
    static fitted fit(const float* x, int n) noexcept {
        float most = 0.0f, signed_most = 0.0f;
        for (int i = 0; i < n; ++i)
            if (const float a = x[i] < 0.0f ? -x[i] : x[i]; a > most) most = a, signed_most = x[i];
        const float first = signed_most / -127.0f;
        double cross = 0.0, square = 0.0;
        for (int i = 0; i < n; ++i) {
            const auto v = static_cast<double>(x[i]);
            const auto t = static_cast<double>(iq4_nl_levels::levels[code(x[i], first)]);
            cross += kvq::rounded_product(v * v * v, t);
            square += kvq::rounded_product(v * v * t, t);
        }
        return {first, square > 0.0 ? static_cast<float>(cross / square) : 0.0f};
    }
};

/// ggml q4_0: d = m / -8 with m the first value of the largest magnitude, code = min(15, int(x / d + 8.5)),
/// x^ = d (code - 8). Source: ggml, quantize_row_q4_0.
struct q4_0 {
    static constexpr int bits = 4;
    static constexpr const char* name = "q4_0-";
    static fitted fit(const float* x, int n) noexcept {
        float most = 0.0f, signed_most = 0.0f;
        for (int i = 0; i < n; ++i)
            if (const float a = x[i] < 0.0f ? -x[i] : x[i]; a > most) most = a, signed_most = x[i];
        return {signed_most / -8.0f, signed_most / -8.0f};
    }
    static int code(float x, float scale) noexcept {
        const float position = std::isnan(x) ? 8.5f : scaled(x, scale) + 8.5f;
        return position <= 0.0f ? 0 : position >= 15.0f ? 15 : static_cast<int>(position);
    }
    static float value(int code, float scale) noexcept {
        return kvq::rounded_product(scale, static_cast<float>(code - 8));
    }
};

/// exllamav3: s = max|x| + 1e-10, m = 2^(B-1), code = clamp(floor(x / s * m + m), 0, 2m - 1), x^ = (code - (m
/// - 1/2)) s / m.
/// Source: exllamav3, q_cache_kernels.cuh.
template <int B>
struct midpoint {
    static constexpr int bits = B;
    static constexpr const char* name = "midpoint";
    static constexpr float m = static_cast<float>(1 << (B - 1));

    static fitted fit(const float* x, int n) noexcept {
        const float scale = largest_magnitude(x, n) + 1e-10f;
        return {scale, scale};
    }
    static int code(float x, float scale) noexcept {
        const float position = kvq::rounded_product(std::isnan(x) ? 0.0f : x / scale, m) + m;
        return position <= 0.0f              ? 0
               : position >= 2.0f * m - 1.0f ? static_cast<int>(2.0f * m) - 1
                                             : static_cast<int>(position);
    }
    static float value(int code, float scale) noexcept {
        return kvq::rounded_product(static_cast<float>(code) - (m - 0.5f), scale / m);
    }
};

/// FP8 under one scale: s = max(max|x| / 448, 1e-6), code = e4m3(x / s); NaN becomes 0. The patterns of NaN,
/// which code() never gives, read as 0.
/// Source: vLLM, fp8_per_token_head (pull request 38378).
struct fp8_e4m3 {
    static constexpr int bits = 8;
    static constexpr const char* name = "fp8-e4m3-";
    static fitted fit(const float* x, int n) noexcept {
        const float scale = std::max(largest_magnitude(x, n) / kvq::e4m3::max_finite, 1e-6f);
        return {scale, scale};
    }
    static int code(float x, float scale) noexcept {
        return std::isnan(x) ? 0 : kvq::e4m3::from_float(x / scale);
    }
    static float value(int code, float scale) noexcept {
        if ((code & 0x7f) == 0x7f) return 0.0f;
        return kvq::rounded_product(scale, kvq::e4m3::to_float(static_cast<std::uint8_t>(code)));
    }
};

/// vLLM int4_per_token_head: s = max((max - min) / 15, 1e-6), z = clamp(round(-min / s), 0, 15), code =
/// clamp(round(x / s + z)), x^ = s (code - z). z lies in the low bits of the mantissa of s, which must be
/// stored as float. If all values of a group have one sign and are far from zero, the grid does not reach
/// them: this is a property of the method.
/// Source: vLLM, int4_per_token_head.py (pull request 40835).
template <int B>
struct integer_zero {
    static_assert(B <= 4, "baselines::integer_zero keeps its zero in 4 bits");
    static constexpr int bits = B;
    static constexpr const char* name = "integer-zero";
    static constexpr int top = (1 << B) - 1;

    static fitted fit(const float* x, int n) noexcept {
        float lo = n ? x[0] : 0.0f, hi = lo;
        for (int i = 1; i < n; ++i) lo = std::min(lo, x[i]), hi = std::max(hi, x[i]);
        const float scale = std::max((hi - lo) / static_cast<float>(top), 1e-6f);
        const float zero = std::floor(-lo / scale + 0.5f);
        const int z = zero <= 0.0f ? 0 : zero >= static_cast<float>(top) ? top : static_cast<int>(zero);
        const std::uint32_t bits_of = std::bit_cast<std::uint32_t>(scale);
        const auto packed = std::bit_cast<float>((bits_of & ~15u) | static_cast<std::uint32_t>(z));
        return {packed, packed};
    }
    static int code(float x, float packed) noexcept {
        const float position = (std::isnan(x) ? 0.0f : x / scale(packed)) + static_cast<float>(zero(packed));
        return position <= 0.0f                      ? 0
               : position >= static_cast<float>(top) ? top
                                                     : static_cast<int>(std::nearbyint(position));
    }
    static float value(int code, float packed) noexcept {
        return kvq::rounded_product(scale(packed), static_cast<float>(code - zero(packed)));
    }

private:
    static int zero(float packed) noexcept {
        return static_cast<int>(std::bit_cast<std::uint32_t>(packed) & 15u);
    }
    static float scale(float packed) noexcept {
        return std::bit_cast<float>(std::bit_cast<std::uint32_t>(packed) & ~15u);
    }
};

static_assert(codebook<by_norm<normal_levels<4>>> && codebook<nf4> && codebook<iq4_nl> && codebook<q4_0> &&
              codebook<midpoint<4>> && codebook<fp8_e4m3> && codebook<integer_zero<4>>);

}  // namespace baselines
