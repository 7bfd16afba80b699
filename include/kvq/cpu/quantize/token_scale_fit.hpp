// Token scales, a vector of channels at a time: quant/token_scales.hpp, bit for bit.
//
// Sums over tokens have a channel per lane. Sums over channels have a part per lane (interleaved_sum: channel
// c belongs to part c % 8): with 8 doubles to a register one register holds all parts, with fewer the halves
// of vectors alternate.
// Contract: all values are finite and at most 2^100; at most most_channels channels and most_tokens tokens.
// Channels behind the last one count as zeros, which change no sum.
#pragma once

#include <cmath>
#include <cstddef>

#include "../../quant/token_scales.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes>
class token_scale_fit {
public:
    static constexpr int width = Lanes::width;
    static constexpr int most_channels = 512, most_tokens = 256;

    /// values: [tokens][dim]; token_scales: output, `tokens` token scales.
    static void run(const float* values, int tokens, int dim, float* token_scales, int iterations = 8) {
        alignas(64) float weights[most_channels + step], inverse[most_tokens];
        for (int c = dim; c < dim + step; ++c) weights[c] = 0.0f;
        for (int t = 0; t < tokens; ++t) token_scales[t] = 1.0f;
        for (int i = 0; i < iterations; ++i) {
            for (int t = 0; t < tokens; ++t) inverse[t] = 1.0f / token_scales[t];
            for (int c = 0; c < dim; c += width)
                if (c + width <= dim)
                    weigh<true>(values + c, tokens, dim, width, inverse, weights + c);
                else
                    weigh<false>(values + c, tokens, dim, dim - c, inverse, weights + c);
            for (int t = 0; t < tokens; ++t)
                token_scales[t] =
                    static_cast<float>(std::sqrt(sum_channels(values + t * dim, dim, weights) / dim));
            detail::normalize_token_scales(token_scales, tokens);
        }
    }

private:
    using floats = typename Lanes::floats;
    using doubles = typename Lanes::doubles;
    static constexpr int half = width / 2, parts = detail::interleaved_sum::parts;
    static constexpr int registers = detail::larger(parts / half, 1);
    static constexpr int step = detail::larger(width, parts);

    /// Weights of n channels, from the squares of x / r_t.
    template <bool Whole>
    static void weigh(const float* values, int tokens, int dim, int n, const float* inverse, float* weights) {
        doubles low = Lanes::splat_double(0.0), high = low;
        for (int t = 0; t < tokens; ++t) {
            const float* const p = values + t * dim;
            const floats y = Lanes::multiply(Whole ? Lanes::load_floats(p) : Lanes::load_floats(p, n),
                                             Lanes::splat_float(inverse[t]));
            add_squares(y, low, high);
        }
        alignas(64) double sums[width];
        Lanes::store_doubles(sums, low);
        Lanes::store_doubles(sums + half, high);
        for (int i = 0; i < n; ++i) weights[i] = detail::inverse_size(sums[i], tokens);
    }

    /// Sum of the squares of x / w_c.
    static double sum_channels(const float* x, int dim, const float* weights) {
        doubles sums[registers];
        for (int i = 0; i < registers; ++i) sums[i] = Lanes::splat_double(0.0);
        int c = 0;
        for (; c + step <= dim; c += step) KVQ_UNROLL
        for (int v = 0; v < step / width; ++v) add<true>(v, x + c, width, weights + c, sums);
        for (int v = 0; c + v * width < dim; ++v)
            add<false>(v, x + c, dim - c - v * width, weights + c, sums);
        alignas(64) double part[registers * half];
        for (int i = 0; i < registers; ++i) Lanes::store_doubles(part + i * half, sums[i]);
        double sum = 0.0;
        for (int i = 0; i < parts; ++i) sum += part[i];
        return sum;
    }
    /// Vector v of a step; n channels remain.
    template <bool Whole>
    static KVQ_INLINE void add(int v, const float* x, int n, const float* weights,
                               doubles (&sums)[registers]) {
        const float* const p = x + v * width;
        const floats y =
            Lanes::multiply(Whole || n >= width ? Lanes::load_floats(p) : Lanes::load_floats(p, n),
                            Lanes::load_floats(weights + v * width));
        add_squares(y, sums[2 * v % registers], sums[(2 * v + 1) % registers]);
    }
    /// low and high may be the same register: first the lower half of y, then the upper one.
    static KVQ_INLINE void add_squares(floats y, doubles& low, doubles& high) {
        const doubles a = Lanes::template widen<0>(y), b = Lanes::template widen<1>(y);
        low = Lanes::multiply_add(a, a, low);
        high = Lanes::multiply_add(b, b, high);
    }
};

}}}  // namespace kvq::kernels
