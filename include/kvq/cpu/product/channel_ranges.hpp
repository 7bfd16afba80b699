// Products of vectors with the ranges in which the channels of keys lie: what estimates of scores are made
// of.
//
//   sum_ranges      sum_c x_c m_c + spread * sum_c |x_c| h_c    m, h: middle and half of a range
//   channel_bounds  ranges that are stored beside a block: the least and the largest value of every channel,
//                   for formats whose parameters say nothing of channels (format/bounds.hpp)
//
// Bytes of stored bounds: dim float16 rounded down, then dim float16 rounded up. What lies beyond float16 is
// infinite, and so is the range of a channel with a value that is not finite. The bytes are the same on every
// backend.
// Source: Tang et al., arXiv 2406.10774 (Quest), section 3.2.
#pragma once

#include <cstring>

#include "../../core/float_formats.hpp"
#include "folded.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Sums over n channels for `Rows` vectors. A range is scale * to_middle + bias, plus or minus scale *
/// to_half. Apart: `half` gets the second sum without the spread; else `middle` gets both, and `half` is 0.
template <class Lanes, int Rows, bool Apart>
void sum_ranges(const float* scale, const float* bias, float to_middle, float to_half, const float* x,
                std::ptrdiff_t x_stride, int n, float spread, float* middle, float* half) {
    using floats = typename Lanes::floats;
    floats m[Rows], h[Rows];
    for (int r = 0; r < Rows; ++r) m[r] = h[r] = Lanes::splat_float(0.0f);
    const floats middles = Lanes::splat_float(to_middle), halves = Lanes::splat_float(to_half);
    int c = 0;
    for (; c + Lanes::width <= n; c += Lanes::width) {
        const floats s = Lanes::load_floats(scale + c);
        const floats of_middle = Lanes::multiply_add(s, middles, Lanes::load_floats(bias + c));
        const floats of_half = Lanes::multiply(s, halves);
        KVQ_UNROLL
        for (int r = 0; r < Rows; ++r) {
            const floats q = Lanes::load_floats(x + r * x_stride + c);
            m[r] = Lanes::multiply_add(q, of_middle, m[r]);
            h[r] = Lanes::multiply_add(Lanes::abs(q), of_half, h[r]);
        }
    }
    for (int r = 0; r < Rows; ++r) {
        if constexpr (Apart) {
            middle[r] = Lanes::sum(m[r]);
            half[r] = Lanes::sum(h[r]);
        } else {
            middle[r] = Lanes::sum(Lanes::multiply_add(h[r], Lanes::splat_float(spread), m[r]));
            half[r] = 0.0f;
        }
        for (int k = c; k < n; ++k) {
            const float q = x[r * x_stride + k];
            middle[r] += q * (scale[k] * to_middle + bias[k]);
            (Apart ? half[r] : middle[r]) +=
                (Apart ? 1.0f : spread) * (q < 0.0f ? -q : q) * scale[k] * to_half;
        }
    }
}

template <class Backend>
class channel_bounds {
    using lanes = typename Backend::lanes;
    using floats = typename lanes::floats;

public:
    /// values: [tokens][dim]; at least one token.
    static void find(const float* values, int tokens, int dim, std::byte* bounds) {
        constexpr int width = lanes::width;
        int c = 0;
        for (; c + width <= dim; c += width) {
            const float* from = values + c;
            const floats zero = lanes::splat_float(0.0f);
            floats low = lanes::load_floats(from), high = low, zeros = lanes::multiply(low, zero);
            for (int t = 1; t < tokens; ++t) {
                from += dim;
                const floats x = lanes::load_floats(from);
                low = lanes::smaller(low, x);
                high = lanes::larger(high, x);
                // 0 * x is NaN for an x that is not finite.
                zeros = lanes::multiply_add(x, zero, zeros);
            }
            float lows[width], highs[width];
            lanes::store_floats(lows, lanes::add(low, zeros));
            lanes::store_floats(highs, lanes::add(high, zeros));
            for (int i = 0; i < width; ++i) store(bounds, dim, c + i, lows[i], highs[i]);
        }
        for (; c < dim; ++c) {
            float low = values[c], high = low, zeros = 0.0f * low;
            for (int t = 1; t < tokens; ++t) {
                const float x = values[static_cast<std::ptrdiff_t>(t) * dim + c];
                low = x < low ? x : low;
                high = x > high ? x : high;
                zeros += 0.0f * x;
            }
            store(bounds, dim, c, low + zeros, high + zeros);
        }
    }

    /// out[i] for `rows` vectors x of dim floats: at least the largest product with any of the keys, if
    /// spread is 1. scratch: scratch_floats(dim).
    static void estimate(const std::byte* bounds, int dim, const float* x, std::ptrdiff_t x_stride, int rows,
                         float spread, float* out, std::ptrdiff_t ahead, float* scratch) {
        const int bytes = 2 * dim * static_cast<int>(sizeof(float16));
        for (int at = 0; at < bytes; at += 64) detail::prefetch(bounds + ahead + at);
        float* const low = scratch;
        float* const range = scratch + scratch_floats(dim) / 2;
        Backend::template load_floats<float16>(bounds, dim, low);
        Backend::template load_floats<float16>(bounds + bytes / 2, dim, range);
        for (int c = 0; c < dim; ++c) {
            low[c] = detail::larger(low[c], -endless);
            range[c] = detail::smaller(range[c], endless) - low[c];
        }
        for (int i = 0; i < rows;) {
            const int queries = next_query_block(rows - i);
            float half[query_block];
            with_queries(queries, [&](auto n) {
                sum_ranges<lanes, decltype(n)::value, false>(range, low, 0.5f, 0.5f, x + i * x_stride,
                                                             x_stride, dim, spread, out + i, half);
            });
            i += queries;
        }
    }
    static constexpr std::size_t scratch_floats(int dim) {
        return 2 * (static_cast<std::size_t>(detail::round_up(dim, 16)) + 16);
    }

private:
    /// Stands for infinity in sums, which stay finite then.
    static constexpr float endless = 1e30f;

    static void store(std::byte* bounds, int dim, int channel, float low, float high) {
        constexpr float limit = float16::max_finite;
        constexpr std::uint16_t infinity = 0x7c00, minus_infinity = 0xfc00;
        // Written so that NaN is beyond both limits.
        const float16 down =
            low >= -limit ? detail::round_down<float16>(low) : float16::from_bits(minus_infinity);
        const float16 up = high <= limit ? detail::round_up_to<float16>(high) : float16::from_bits(infinity);
        std::memcpy(bounds + 2 * channel, &down, 2);
        std::memcpy(bounds + 2 * (dim + channel), &up, 2);
    }
};

}}}  // namespace kvq::kernels
