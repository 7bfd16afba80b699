// Token scales on the device: quant/token_scales.hpp.
//
//   channels   one thread adds up a channel's squares, token by token, as the CPU does
//   tokens     one thread adds up one of the eight parts of two tokens' sums
//
// Stored token scales have 16 steps an octave, so mostly floats decide them (quick_token_scales), with
// squares in registers and sums in any order. u = 2^-24; distance of two vectors of token scales: the largest
// less the smallest log of their quotients.
//
//   an iteration        keeps vectors as near to each other as they were: it is homogeneous and monotone (a
//                       floor included)
//   in floats           is within (18 + t + c + w / 4) u of the same in real arithmetic, where a lane has t
//                       tokens of c channels in one of w warps: sums of squares of a channel are within (9 +
//                       t) u of themselves, their inverses 3 u more, a token's sum (3 + c + w / 4) u more,
//                       the floor 3 u; scales are roots, and two of them make a quotient
//   on the CPU          within 2 * 7 u
//   iterations left     change token scales by no more than the last one did, each
//
// So the result of the CPU's eight iterations is within 8 times the sum of the first two, and left * change.
// Where a token scale of the floats would be stored as another one within that distance, the block goes
// through the CPU's sums.
//
// Contract: the same token scales as on the CPU, bit for bit.
#pragma once

#include "../../quant/token_scales.hpp"
#include "../layout/warp_tile.cuh"
#include "lane_halves.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Scratch in shared memory, by token slot and by channel.
struct token_scale_scratch {
    float* inverse;      // [slots] 1 / token_scale, 0 where there is no token
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

/// Token scales from the sums over all channels, replaced by f(slot, token scale), and s.inverse.
/// valid(slot): is there a token? Ends with a barrier.
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
        const float token_scale = f(t, kvq::detail::scaled_token_scale(s.token_scale[t], largest));
        s.inverse[t] = valid(t) ? __fdiv_rn(1.0f, token_scale) : 0.0f;
        s.token_scale[t] = token_scale;
    }
    __syncthreads();
}

/// Token scales of a page whose numbers lie at values[channel][stride], stored by store(token, token scale),
/// which returns what is stored; s.token_scale and s.inverse of the stored ones. Halves: numbers are half
/// floats. ordinary: is every number 0 or of an ordinary size? False: they have not certainly been stored as
/// by the CPU. A lane has the same tokens of a few channels. All threads of a block.
template <int Threads, int Tokens, int Dim, bool Halves, class F>
__device__ __forceinline__ bool quick_token_scales(const token_scale_scratch& s, const float* values,
                                                   int stride, bool& ordinary, const F& store) {
    constexpr int warps = Threads / warp_size, channels = Dim / warps, tokens = Tokens / warp_size;
    constexpr float largest_scale = kvq::detail::token_scale_float::largest,
                    smallest_scale = kvq::detail::token_scale_float::smallest;
    static_assert(tokens * warp_size == Tokens && channels * warps == Dim && warps <= 16);
    const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size, lane = thread % warp_size;
    float x[channels][tokens];
    std::uint32_t below = 0, above = ~0u;
#pragma unroll
    for (int c = 0; c < channels; ++c)
#pragma unroll
        for (int t = 0; t < tokens; ++t) {
            const float number = values[(warp * channels + c) * stride + lane * tokens + t];
            x[c][t] = number * number;
            if constexpr (!Halves) {
                const std::uint32_t size = __float_as_uint(fabsf(number));
                below = larger(below, size);
                above = smaller(above, size - 1u);  // 0 becomes the largest word
            }
        }
    ordinary = Halves || __syncthreads_and(below <= __float_as_uint(0x1p20f) &&
                                           above >= __float_as_uint(0x1p-20f)) != 0;
    if (!ordinary) return false;
    // Squares of token scales are relative to the largest one.
    constexpr float smallest_square = smallest_scale / largest_scale * (smallest_scale / largest_scale);
    float square[tokens], inverse_square[tokens];
#pragma unroll
    for (int t = 0; t < tokens; ++t) square[t] = inverse_square[t] = 1.0f;
    auto* const partial = reinterpret_cast<float*>(s.parts);  // [warps][Tokens]
    int left = 8;
    float change = 0.0f;
    do {
        float sum[channels];
#pragma unroll
        for (int c = 0; c < channels; ++c) {
            sum[c] = 0.0f;
#pragma unroll
            for (int t = 0; t < tokens; ++t) sum[c] += x[c][t] * inverse_square[t];
        }
        // Half of the channels go to the other lane, until each has one.
        reduce_over_lanes(sum, lane, [](float a, float b) { return a + b; });
        const float weight = sum[0] > 0.0f ? static_cast<float>(Tokens) * reciprocal(sum[0]) : 0.0f;
        float total[tokens] = {};
        static_for<channels>([&](auto channel) {
            constexpr int c = decltype(channel)::value, from = lane_of_number<channels>(c);
            const float own = __shfl_sync(~0u, weight, from);
#pragma unroll
            for (int t = 0; t < tokens; ++t) total[t] += x[c][t] * own;
        });
#pragma unroll
        for (int t = 0; t < tokens; ++t) partial[warp * Tokens + lane * tokens + t] = total[t];
        __syncthreads();
        for (int t = thread; t < Tokens; t += Threads) {
            float part[4] = {};
#pragma unroll
            for (int w = 0; w < warps; ++w) part[w % 4] += partial[w * Tokens + t];
            s.token_scale[t] = part[0] + part[1] + (part[2] + part[3]);
        }
        __syncthreads();
        unsigned largest = 0, most = 0, least = ~0u;
#pragma unroll
        for (int t = 0; t < tokens; ++t) {
            square[t] = s.token_scale[lane * tokens + t];
            largest = larger(largest, __float_as_uint(square[t]));
        }
        const float size = __uint_as_float(__reduce_max_sync(~0u, largest)), per_size = reciprocal(size);
#pragma unroll
        for (int t = 0; t < tokens; ++t) {
            square[t] = size > 0.0f ? fmaxf(square[t] * per_size, smallest_square) : 1.0f;
            const float grown = square[t] * inverse_square[t];
            most = larger(most, __float_as_uint(grown));
            least = smaller(least, __float_as_uint(grown));
            inverse_square[t] = reciprocal(square[t]);
        }
        most = __reduce_max_sync(~0u, most);
        least = __reduce_min_sync(~0u, least);
        change = 0.5f * (__uint_as_float(most) * reciprocal(__uint_as_float(least)) - 1.0f) + 0x1p-21f;
        --left;
    } while (left > 0 && static_cast<float>(left) * change > 0x1p-17f);
    constexpr int places = 8 * (18 + tokens + channels + ceil_div(warps, 4) + 14) + 8;  // 8 to store it
    const float slack = static_cast<float>(places) * 0x1p-24f + static_cast<float>(left) * change;
    bool certain = true;
    __syncthreads();  // all have read s.token_scale
#pragma unroll
    for (int t = 0; t < tokens; ++t)
        if (warp == t % warps) {
            const int token = lane * tokens + t;
            const float scale = sqrtf(square[t]) * largest_scale,
                        stored = store(token, scale * (1.0f + slack));
            certain = certain && stored == store(token, scale * (1.0f - slack));
            s.token_scale[token] = stored;
            s.inverse[token] = __fdiv_rn(1.0f, stored);
        }
    return __syncthreads_and(certain) != 0;
}

/// x / by, rounded, from 1 / by, rounded. Of numbers of ordinary size remainders are exact: what is within
/// one place of the quotient is rounded by the second one (Markstein's theorem).
__device__ __forceinline__ float quotient(float x, float by, float inverse, bool ordinary) {
    if (!ordinary) return __fdiv_rn(x, by);
    float q = __fmul_rn(x, inverse);
    q = __fmaf_rn(__fmaf_rn(-q, by, x), inverse, q);
    return __fmaf_rn(__fmaf_rn(-q, by, x), inverse, q);
}

/// The numbers of a lane of a line (fit_grids.cuh) over the scales of their tokens, and their range. slot: of
/// the first number; n: a multiple of 8. A barrier of the warp at the end.
template <int Lanes>
__device__ __forceinline__ void divide_line(float* x, int n, int q, const token_scale_scratch& scales,
                                            int slot, bool ordinary, float& lo, float& hi) {
    constexpr int parts = 8 / Lanes, aligned = parts < 4 ? 4 * parts : 16;
    float* const own = x + parts * q;
    const float* const by = scales.token_scale + slot + parts * q;
    const float* const inverse = scales.inverse + slot + parts * q;
#pragma unroll 4
    for (int i = 0; i < n; i += 8) {
        float v[parts], f[parts], r[parts];
        __builtin_memcpy(v, __builtin_assume_aligned(own + i, aligned), sizeof v);
        __builtin_memcpy(f, __builtin_assume_aligned(by + i, aligned), sizeof f);
        __builtin_memcpy(r, __builtin_assume_aligned(inverse + i, aligned), sizeof r);
#pragma unroll
        for (int p = 0; p < parts; ++p) {
            v[p] = quotient(v[p], f[p], r[p], ordinary);
            lo = fminf(lo, v[p]);
            hi = fmaxf(hi, v[p]);
        }
        if constexpr (parts == 2)
            *reinterpret_cast<float2*>(own + i) = {v[0], v[1]};
        else
#pragma unroll
            for (int p = 0; p < parts; p += 4)
                *reinterpret_cast<float4*>(own + i + p) = {v[p], v[p + 1], v[p + 2], v[p + 3]};
    }
    __syncwarp();
}

}}}  // namespace kvq::cuda::detail
