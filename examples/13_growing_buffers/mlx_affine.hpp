// MLX's group-wise affine format, in the layout of MLX's arrays: for reading and writing MLX memory, not for
// attention.
//
//   a row of D channels  ->  D*B/32 words: codes of B bits one after the other, little end first
//                            D/G scales and D/G biases of the input's type T;
//                              x^ = T(T(scale * code) + bias)
//   n = 2^B - 1;  s = max((max - min) / n, 1e-7);
//     edge = min and s if |min| > |max|, otherwise edge = max and -s
//   k = round(edge / s);  k != 0:  s = edge / k, bias = edge;   k == 0:  bias = 0
//   code = clamp(round((x - bias) / s), 0, n) with s and bias in float; both are then rounded to T
//
// The end of the range with the larger magnitude dequantizes exactly, and zero nearly so. MLX's devices
// differ: the CPU rounds ties to even; Metal and CUDA round them away from zero and let the maximum start at
// 0, so that a group of negative values is quantized over [min, 0]. Groups of 32, 64 or 128 channels; 2, 3,
// 4, 5, 6 or 8 bits; D is a multiple of G. Contract: finite input gives MLX's words, scales and biases. MLX
// leaves NaN and infinities undefined; here finite members set the parameters, NaN is quantized as zero,
// infinities saturate.
// Source: mlx ops.cpp (affine_quantize), backend/cpu/quantized.cpp, metal/kernels/quantized.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <kvq/core/float_formats.hpp>
#include <kvq/core/rounding.hpp>
#include <limits>
#include <stdexcept>
#include <string>

namespace mlx {

/// The MLX device whose rounding is used.
enum class device : unsigned char { cpu, gpu };

struct affine {
    int bits = 8;
    int group = 64;
    device rounding = device::cpu;

    int words(int dim) const noexcept { return dim * bits / 32; }
    int groups(int dim) const noexcept { return dim / group; }
    float round(float x) const noexcept {
        return rounding == device::cpu ? std::nearbyint(x) : std::round(x);
    }
    /// Raises std::invalid_argument for a format that MLX does not have, or a row that is not a multiple of
    /// its group.
    void check(int dim) const {
        if (bits < 2 || bits > 8 || bits == 7)
            throw std::invalid_argument("MLX has 2, 3, 4, 5, 6 and 8 bits, not " + std::to_string(bits));
        if (group != 32 && group != 64 && group != 128)
            throw std::invalid_argument("MLX has groups of 32, 64 and 128, not " + std::to_string(group));
        if (dim < 1 || dim % group != 0)
            throw std::invalid_argument("a row of " + std::to_string(dim) +
                                        " channels is not a multiple of a group of " + std::to_string(group));
    }
};

/// Quantizes one row of `dim` channels. words: format.words(dim), scales and biases: format.groups(dim).
template <kvq::float_format T>
void quantize(const affine& format, int dim, const T* row, std::uint32_t* words, T* scales, T* biases) {
    format.check(dim);
    const auto top = static_cast<float>((1 << format.bits) - 1);
    std::fill_n(words, format.words(dim), 0u);
    for (int g = 0; g < format.groups(dim); ++g) {
        const T* const x = row + g * format.group;
        constexpr float most = std::numeric_limits<float>::max();
        float low = most, high = format.rounding == device::cpu ? -most : 0.0f;
        bool any = false;
        for (int i = 0; i < format.group; ++i) {
            const auto v = static_cast<float>(x[i]);
            if (!std::isfinite(v)) continue;
            any = true;
            low = std::fmin(low, v);
            high = std::fmax(high, v);
        }
        if (!any) low = high = 0.0f;
        float scale = std::fmax((high - low) / top, 1e-7f), bias = 0.0f;
        const bool from_low = std::fabs(low) > std::fabs(high);
        if (!from_low) scale = -scale;
        const float edge = from_low ? low : high;
        const float steps = format.round(edge / scale);
        if (steps != 0.0f) {
            scale = edge / steps;
            bias = edge;
        }
        for (int i = 0; i < format.group; ++i) {
            auto v = static_cast<float>(x[i]);
            if (std::isnan(v)) v = 0.0f;
            const float position = format.round((v - bias) / scale);
            const auto code =
                static_cast<std::uint32_t>(!(position > 0.0f) ? 0.0f : std::fmin(position, top));
            const int bit = (g * format.group + i) * format.bits;
            words[bit / 32] |= code << (bit % 32);
            if (bit % 32 + format.bits > 32) words[bit / 32 + 1] |= code >> (32 - bit % 32);
        }
        scales[g] = T(scale);
        biases[g] = T(bias);
    }
}

/// The values of one row, computed as in MLX: product and sum rounded to T.
template <kvq::float_format T>
void dequantize(const affine& format, int dim, const std::uint32_t* words, const T* scales, const T* biases,
                T* row) {
    format.check(dim);
    for (int i = 0; i < dim; ++i) {
        const int bit = i * format.bits;
        std::uint32_t code = words[bit / 32] >> (bit % 32);
        if (bit % 32 + format.bits > 32) code |= words[bit / 32 + 1] << (32 - bit % 32);
        code &= (1u << format.bits) - 1u;
        const int g = i / format.group;
        const T product(kvq::rounded_product(static_cast<float>(scales[g]), static_cast<float>(code)));
        row[i] = T(static_cast<float>(product) + static_cast<float>(biases[g]));
    }
}

}  // namespace mlx
