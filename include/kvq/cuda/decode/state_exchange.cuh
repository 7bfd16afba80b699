// Softmax states of the same rows on several GPUs, written straight into each other's memory and merged on
// every one of them.
//
//   inbox of every device: [2][ranks][rows][vectors] of four words: {max, sum, 0, 0}, then output * sum
//   merged = sum_r 2^(max_r - max) output_r / sum_r 2^(max_r - max) sum_r     over ranks r in order
//
// A launch sends a row to all ranks, its own among them, then reads what all have sent. Every word says
// itself whether it has arrived. Two sets of inboxes take turns, by steps that every row counts: a rank sends
// the next step but one only when all others have sent the next, and so have read this one.
// Contract: the order of additions is that of the ranks, so all have the same bits. A team sends all rows of
// its share before it waits for any, and shares have rows in the same order on all ranks: so ranks never wait
// for each other in a circle. Words that do not come within the limit are NaN, and *failed is 1.
// Source: words that carry their own flag are the "LL" protocol of NCCL.
#pragma once

#include "../../core/token_view.hpp"
#include "../layout/warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

inline constexpr float log2e = 1.44269504f;

/// A float on its way to another thread block, or device. Zero, which memory holds between launches, says
/// that it has not arrived: the inverse of a NaN that no instruction makes.
__device__ __forceinline__ std::uint32_t sealed(float x) {
    const std::uint32_t bits = __float_as_uint(x);
    return bits == ~0u ? 0x80000000u : ~bits;
}
__device__ __forceinline__ uint4 sealed(const float4& v) {
    return {sealed(v.x), sealed(v.y), sealed(v.z), sealed(v.w)};
}
__device__ __forceinline__ float opened(std::uint32_t word) { return __uint_as_float(~word); }
__device__ __forceinline__ bool arrived(const uint4& v) {
    return (v.x != 0) & (v.y != 0) & (v.z != 0) & (v.w != 0);
}

/// What a rank knows of the others. It travels in the parameters of the launch.
struct state_exchange {
    static constexpr int most_ranks = 8;  // what CUDA connects without a switch

    uint4* inboxes[most_ranks];  // on the ranks' devices
    uint4* own;                  // on this device
    unsigned* steps;             // [rows]
    volatile int* failed;        // memory of the host
    unsigned long long limit;    // nanoseconds
    int rank, ranks;
    unsigned vectors, stride;  // of a row, and of all rows of a rank

    /// Where a device has a row of rank 0. The launch before wrote the step: what is in the first-level cache
    /// may be older.
    __device__ __forceinline__ unsigned place(int row) const {
        const unsigned set = __ldcg(steps + row) % 2 * static_cast<unsigned>(ranks);
        return set * stride + static_cast<unsigned>(row) * vectors;
    }
    /// Sends a row, a vector of it from every lane of a warp: word(0) is {max, sum, 0, 0}, word(1 + i) has
    /// channels 4 i to 4 i + 3.
    template <class Word>
    __device__ __forceinline__ void send(int row, int lane, const Word& word) const {
        const unsigned at = place(row) + static_cast<unsigned>(rank) * stride;
#pragma unroll 1
        for (int v = lane; v < static_cast<int>(vectors); v += warp_size) {
            const uint4 words = sealed(word(v));
#pragma unroll 1
            for (int i = 1; i <= ranks; ++i)
                store_system(inboxes[rank + i < ranks ? rank + i : rank + i - ranks] + at + v, words);
        }
    }
    /// A vector once it has arrived. Clock and *failed, memory of the host, take long to read: words that
    /// come soon do not wait for them. Launches behind one that has failed do not wait as long as that one
    /// did.
    __device__ __forceinline__ uint4 await(const uint4* from) const {
        uint4 v = load_system(from);
        unsigned long long start = 0;
#pragma unroll 1
        for (int looks = 0; !arrived(v); ++looks) {
            v = load_system(from);
            if (looks < 1000) continue;
            const unsigned long long now = nanoseconds();
            if (start == 0) start = now;
            if (now - start > limit || *failed != 0) {
                *failed = 1;
                break;
            }
        }
        return v;
    }
};

/// Writes N neighbouring channels of an output.
template <int N, class T>
__device__ __forceinline__ void write_channels(T* to, const float (&output)[N]) {
    struct alignas(N * sizeof(T)) together {
        T x[N];
    } out;
#pragma unroll
    for (int i = 0; i < N; ++i) out.x[i] = from_float<T>(output[i]);
    if (N > 1 && reinterpret_cast<std::uintptr_t>(to) % sizeof out == 0)
        *reinterpret_cast<together*>(to) = out;
    else
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = out.x[i];
}
/// The logarithm of a softmax sum.
__device__ __forceinline__ float natural_log(float max, float sum) {
    return sum == 0.0f ? -INFINITY : (max + log2f(sum)) / log2e;
}

/// Writes a row, merged from all ranks once it has arrived. A warp; loops over ranks are short and run once,
/// so they are not unrolled: they would wait for their instructions. Leaves zeros.
template <class T>
__device__ __forceinline__ void merge_ranks(const state_exchange& x, int row, int lane, T* out, int dim,
                                            float* lse) {
    uint4* const heads = x.own + x.place(row);
    uint4* const end = heads + static_cast<std::size_t>(x.ranks) * x.stride;
    float max = -INFINITY;
#pragma unroll 1
    for (uint4* head = heads; head < end; head += x.stride) max = fmaxf(max, opened(x.await(head).x));
    float sum = 0.0f;
#pragma unroll 1
    for (int v = 1 + lane; v < static_cast<int>(x.vectors); v += warp_size) {
        float output[4] = {};
        sum = 0.0f;
#pragma unroll 1
        for (uint4* head = heads; head < end; head += x.stride) {
            const uint4 of_rank = load_system(head), part = x.await(head + v);
            store_relaxed(head + v, uint4{0, 0, 0, 0});
            if (opened(of_rank.x) == -INFINITY) continue;
            const float factor = exp2_fast(opened(of_rank.x) - max);
            sum = fmaf(opened(of_rank.y), factor, sum);
            output[0] = fmaf(opened(part.x), factor, output[0]);
            output[1] = fmaf(opened(part.y), factor, output[1]);
            output[2] = fmaf(opened(part.z), factor, output[2]);
            output[3] = fmaf(opened(part.w), factor, output[3]);
        }
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        for (float& y : output) y *= inverse;
        const int channel = 4 * (v - 1);
        if (channel + 4 <= dim)
            write_channels(out + channel, output);
        else
            for (int i = 0; i < dim - channel; ++i) out[channel + i] = from_float<T>(output[i]);
    }
    __syncwarp();
    if (lane > 0) return;
    if (lse != nullptr) lse[row] = natural_log(max, sum);
#pragma unroll 1
    for (uint4* head = heads; head < end; head += x.stride) store_relaxed(head, uint4{0, 0, 0, 0});
    x.steps[row] = __ldcg(x.steps + row) + 1;
}

}  // namespace detail

/// In place of a score modifier: attention over a context that is divided among GPUs of one machine, in one
/// launch on every one of them. Of formats that make_scored_format<across_ranks, ...>() compiles;
/// peer_context_attention fills it in. Without ranks it is attention as usual.
struct across_ranks {
    static constexpr const char* name = "across ranks";
    detail::state_exchange exchange;
};

}}}  // namespace kvq::cuda
