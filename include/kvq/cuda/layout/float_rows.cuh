// Quantizing to 8-bit floats with a scale of each token (schemes/float_rows.hpp): a warp has a token.
//
// Contract: the bytes of float_rows::quantize for these tokens; padding is written with whole blocks alone.
#pragma once

#include "cache_ref.cuh"
#include "warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// number(channel): of the token. All lanes of a warp. Returns how many numbers of this lane are not finite.
template <class S, int Dim, class Number>
__device__ __forceinline__ unsigned quantize_float_row(const block_shape& s, std::byte* block, int token,
                                                       int lane, const Number& number) {
    constexpr int per_lane = ceil_div(Dim, warp_size);
    float x[per_lane], largest = 0.0f;
    unsigned not_finite = 0;
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
        const int c = i * warp_size + lane;
        x[i] = c < Dim ? number(c) : 0.0f;
        if (kvq::detail::is_finite(x[i]))
            largest = fmaxf(largest, fabsf(x[i]));
        else
            ++not_finite;
    }
#pragma unroll
    for (int step = warp_size / 2; step > 0; step /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    const float scale = S::scale_of(largest);
#pragma unroll
    for (int i = 0; i < per_lane; ++i)
        if (const int c = i * warp_size + lane; c < Dim)
            kvq::detail::store_as(block + std::ptrdiff_t{token} * Dim + c, S::code_of(x[i], scale));
    if (lane == 0)
        *reinterpret_cast<float*>(block + S::scale_offset(s) +
                                  static_cast<std::size_t>(token) * sizeof(float)) = scale;
    return not_finite;
}

/// A whole block, by all threads of a thread block. number(token, channel).
template <class S, int Dim, int Threads, class Number>
__device__ __forceinline__ unsigned quantize_float_rows(const block_shape& s, std::byte* block,
                                                        const Number& number) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size, lane = thread % warp_size;
    const std::size_t used = S::scale_offset(s) + static_cast<std::size_t>(s.tokens) * sizeof(float);
    for (std::size_t i = used + threadIdx.x; i < S{}.block_bytes(s); i += Threads) block[i] = std::byte{0};
    unsigned not_finite = 0;
    for (int token = warp; token < s.tokens; token += Threads / warp_size)
        not_finite += quantize_float_row<S, Dim>(s, block, token, lane,
                                                 [&](int channel) { return number(token, channel); });
    return not_finite;
}

}}}  // namespace kvq::cuda::detail
