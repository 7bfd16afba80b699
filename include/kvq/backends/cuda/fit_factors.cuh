// Factors of tokens on the device: quant/token_factors.hpp.
//
//   channels   one thread adds up a channel's squares, token by token, as the CPU does
//   tokens     one thread adds up one of the eight parts of two tokens' sums
//
// A product of doubles is rounded to float, as the CPU does, by adding and subtracting a number whose last place is that of the
// float: conversions of doubles are slow.
// Contract: the same factors as on the CPU, bit for bit.
#pragma once

#include "../../quant/token_factors.hpp"
#include "chunk.cuh"

namespace kvq::inline v0_1::cuda::detail {

/// a * b rounded to double and then to float: to the last place of a float, of 2^-149 at least. (Below the largest float.)
__device__ __forceinline__ double product_as_float(double a, double b) {
    constexpr int ahead = 29 << 20 | 0x80000;  // 1.5 * 2^29 times the power of two below p
    const double p = __dmul_rn(a, b);
    const int high = max((__double2hiint(p) & 0x7ff00000) + ahead, ((1023 - 126) << 20) + ahead);
    const double shift = __hiloint2double(high, 0);
    return __dadd_rn(__dadd_rn(p, shift), -shift);
}

/// Scratch in shared memory, by token slot and by channel.
struct factor_scratch {
    double* inverse;  // [slots] 1 / factor
    double* weight;   // [dim] 1 / w
    double* parts;    // [8][slots]
    float* factor;    // [slots]
};

/// The two sums of one iteration over channels [first, first + count) (first: a multiple of 8), whose numbers lie at
/// values[channel - first][stride]; what is no token of a slot, or not finite, is 0. All threads of a block; ends with a barrier.
template <int Threads, int Slots>
__device__ __forceinline__ void add_squares(const factor_scratch& s, const float* values, int stride,
                                            int first, int count, int tokens) {
    for (int c = static_cast<int>(threadIdx.x); c < count; c += Threads) {
        const float* const x = values + c * stride;
        double sum = 0.0;
#pragma unroll 4
        for (int t = 0; t < Slots; t += 4) {
            const float4 v = *reinterpret_cast<const float4*>(x + t);
            const double2 a = *reinterpret_cast<const double2*>(s.inverse + t),
                          b = *reinterpret_cast<const double2*>(s.inverse + t + 2);
            const double y[4] = {product_as_float(v.x, a.x), product_as_float(v.y, a.y),
                                 product_as_float(v.z, b.x), product_as_float(v.w, b.y)};
#pragma unroll
            for (int k = 0; k < 4; ++k) sum += y[k] * y[k];
        }
        s.weight[first + c] = kvq::detail::inverse_size(sum, tokens);
    }
    __syncthreads();
    constexpr int pairs = Slots / 2;
    for (int i = static_cast<int>(threadIdx.x); i < 8 * pairs; i += Threads) {
        const int part = i / pairs, t = i % pairs * 2;
        double2& sums = *reinterpret_cast<double2*>(s.parts + part * Slots + t);
        double2 sum = first == 0 ? double2{0.0, 0.0} : sums;
#pragma unroll 4
        for (int c = part; c < count; c += 8) {
            const float2 v = *reinterpret_cast<const float2*>(values + c * stride + t);
            const double weight = s.weight[first + c];
            const double y0 = product_as_float(v.x, weight), y1 = product_as_float(v.y, weight);
            sum.x += y0 * y0;
            sum.y += y1 * y1;
        }
        sums = sum;
    }
    __syncthreads();
}

/// Factors from the sums over all channels: s.inverse, and f(slot, factor). valid(slot): is there a token? Ends with a barrier.
template <int Threads, int Slots, class Valid, class F>
__device__ __forceinline__ void scale_factors(const factor_scratch& s, int dim, const Valid& valid,
                                              const F& f) {
    const int thread = static_cast<int>(threadIdx.x);
    for (int t = thread; t < Slots; t += Threads) {
        double sum = 0.0;
#pragma unroll
        for (int part = 0; part < 8; ++part) sum += s.parts[part * Slots + t];
        s.factor[t] = valid(t) ? static_cast<float>(std::sqrt(sum / dim)) : 0.0f;
    }
    __syncthreads();
    float largest = 0.0f;
    for (int t = thread % warp_size; t < Slots; t += warp_size) largest = fmaxf(largest, s.factor[t]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    __syncthreads();
    for (int t = thread; t < Slots; t += Threads) {
        const float factor = kvq::detail::scaled_factor(s.factor[t], largest);
        s.inverse[t] = valid(t) ? 1.0 / static_cast<double>(factor) : 0.0;
        s.factor[t] = f(t, factor);
    }
    __syncthreads();
}

}  // namespace kvq::inline v0_1::cuda::detail
