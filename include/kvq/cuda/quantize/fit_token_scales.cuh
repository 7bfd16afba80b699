// Token scales on the device: quant/token_scales.hpp.
//
//   channels   one thread adds up a channel's squares, token by token, as the CPU does
//   tokens     one thread adds up one of the eight parts of two tokens' sums
//
// Contract: the same token scales as on the CPU, bit for bit.
#pragma once

#include "../../quant/token_scales.hpp"
#include "../layout/warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Scratch in shared memory, by token slot and by channel.
struct token_scale_scratch {
    float* inverse;      // [slots] 1 / token_scale
    float* weight;       // [dim] 1 / w
    double* parts;       // [8][slots]
    float* token_scale;  // [slots]
};

/// In double, where the product is exact: fused with a sum or not, it is the same.
__device__ __forceinline__ double square(float x) {
    const double y = x;
    return y * y;
}

/// The two sums of one iteration over channels [first, first + count) (first: a multiple of 8), whose numbers
/// lie at values[channel - first][stride]; what is no token of a slot, or not finite, is 0. All threads of a
/// block; ends with a barrier.
template <int Threads, int Slots>
__device__ __forceinline__ void add_squares(const token_scale_scratch& s, const float* values, int stride,
                                            int first, int count, int tokens) {
    for (int c = static_cast<int>(threadIdx.x); c < count; c += Threads) {
        const float* const x = values + c * stride;
        double sum = 0.0;
#pragma unroll 4
        for (int t = 0; t < Slots; t += 4) {
            const float4 v = *reinterpret_cast<const float4*>(x + t);
            const float4 by = *reinterpret_cast<const float4*>(s.inverse + t);
            const float y[4] = {v.x * by.x, v.y * by.y, v.z * by.z, v.w * by.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) sum += square(y[k]);
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
            const float weight = s.weight[first + c];
            sum.x += square(v.x * weight);
            sum.y += square(v.y * weight);
        }
        sums = sum;
    }
    __syncthreads();
}

/// TokenScales from the sums over all channels: s.inverse, and f(slot, token_scale). valid(slot): is there a
/// token? Ends with a barrier.
template <int Threads, int Slots, class Valid, class F>
__device__ __forceinline__ void normalize_token_scales(const token_scale_scratch& s, int dim,
                                                       const Valid& valid, const F& f) {
    const int thread = static_cast<int>(threadIdx.x);
    for (int t = thread; t < Slots; t += Threads) {
        double sum = 0.0;
#pragma unroll
        for (int part = 0; part < 8; ++part) sum += s.parts[part * Slots + t];
        s.token_scale[t] = valid(t) ? static_cast<float>(std::sqrt(sum / dim)) : 0.0f;
    }
    __syncthreads();
    float largest = 0.0f;
    for (int t = thread % warp_size; t < Slots; t += warp_size) largest = fmaxf(largest, s.token_scale[t]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    __syncthreads();
    for (int t = thread; t < Slots; t += Threads) {
        const float token_scale = kvq::detail::scaled_token_scale(s.token_scale[t], largest);
        s.inverse[t] = valid(t) ? __fdiv_rn(1.0f, token_scale) : 0.0f;
        s.token_scale[t] = f(t, token_scale);
    }
    __syncthreads();
}

}}}  // namespace kvq::cuda::detail
