// From the warps' softmax states to the output: merged within a thread block, then across the blocks of an item.
//
//   state {max, sum, output}: max = max of maxes, sum and output = those of the parts times 2^(max of the part - max)
//
// A block that handled a whole item writes its rows. Otherwise it leaves a partial state in the workspace; the block with the item's
// last part merges all of them in token order when its share is done. Every word of a state says itself whether it has arrived, so
// nothing is fenced or counted. A block waits for blocks of lower numbers only, which are dispatched before it.
// Loops that need no constants are not unrolled: code that runs once per share waits for its instructions.
// Contract: the order of additions is fixed by the shares. `Memory` is attention_memory<...>.
// Source: words that carry their own flag are the "LL" protocol of NCCL; waiting for lower numbers: decoupled look-back (CUB).
#pragma once

#include "attention_args.cuh"
#include "value_product.cuh"

namespace kvq::inline v0_1::cuda::detail {

/// Softmax state of the rows of a block part, in shared memory.
struct block_state {
    float* max;          // [rows]
    float* sum;          // [rows]
    float* output;       // [rows][output_stride]
    unsigned* bad_rows;  // bit per row of the item at hand: is a number of the query not finite?
};

/// Merges the warps' states into `to`; sums of bad rows are NaN where there is a token to see. All threads; all_here() is called
/// between two barriers and may mark the bad rows of the next item.
template <class Memory, int Rows4, class Values, class F>
__device__ __forceinline__ void merge_warps(const warp_state<Values, Rows4>& state, const block_state& to,
                                            float* warp_max, float* warp_sum, int warp, const lane_id& id,
                                            F&& all_here) {
    constexpr int rows = Memory::rows;
    unsigned bad = 0;  // of the first lane
    if (warp == 0 && id.lane == 0) {
        bad = *to.bad_rows;
        *to.bad_rows = 0;
    }
    float bias[Rows4][weight_words<Values>::bias_sets + 1];
#pragma unroll
    for (int n = 0; n < Rows4; ++n) {
        const float sum = over_tokens(state.sum[n], add_floats{});
#pragma unroll
        for (int i = 0; i < weight_words<Values>::bias_sets; ++i)
            bias[n][i] = over_tokens(state.bias[n][i], add_floats{});
        if (id.g == 0) {
            warp_max[warp * rows + lane_row<Rows4>(n, id.t)] = state.max[n];
            warp_sum[warp * rows + lane_row<Rows4>(n, id.t)] = sum;
        }
    }
    __syncthreads();
    all_here();
    if (warp == 0) bad = __shfl_sync(~0u, bad, 0);
    // Lane (g, t) looks at warps g, g + 8, ... of its rows.
    float factor[Rows4];
#pragma unroll
    for (int n = 0; n < Rows4; ++n) {
        const int row = lane_row<Rows4>(n, id.t);
        constexpr int each = ceil_div(Memory::warps, 8);
        float m[each], top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const int w = id.g + 8 * i;
            m[i] = w < Memory::warps ? warp_max[w * rows + row] : -INFINITY;
            top = fmaxf(top, m[i]);
        }
        top = over_tokens(top, max_floats{});
#pragma unroll
        for (int i = 0; i < each; ++i)
            if (m[i] > -INFINITY) sum += warp_sum[(id.g + 8 * i) * rows + row] * exp2_fast(m[i] - top);
        sum = over_tokens(sum, add_floats{});
        factor[n] = kept(state.max[n], top);
        if (warp == 0 && id.g == 0) {
            to.max[row] = top;
            to.sum[row] = (bad >> row & 1u) != 0 && top > -INFINITY ? NAN : sum;
        }
    }
    constexpr int sets = larger(1, weight_words<Values>::bias_sets);
    constexpr int tiles_of_set = ceil_div(Values::tiles, sets);
    // As many warps at a time as there are parts, the last ones first: each adds to its part; parts are added when they are read.
    constexpr int parts = Memory::output_parts;
    static_assert(Memory::warps % parts == 0);
#pragma unroll 1
    for (int turn = 0; turn < Memory::warps / parts; ++turn) {
        if (warp / parts == Memory::warps / parts - 1 - turn) {
            float* const half = to.output + warp % parts * Memory::output_part;
#pragma unroll
            for (int n = 0; n < Rows4; ++n)
#pragma unroll
                for (int tile = 0; tile < Values::tiles; ++tile) {
                    const int channel = 32 * tile + 4 * id.g;
                    if (channel < Values::dim) {
                        float4* const at = reinterpret_cast<float4*>(
                            half + lane_row<Rows4>(n, id.t) * Memory::output_stride + channel);
                        float b = 0.0f;
                        if constexpr (weight_words<Values>::bias_sets > 0) b = bias[n][tile / tiles_of_set];
                        float4 v = turn == 0 ? float4{0.0f, 0.0f, 0.0f, 0.0f} : *at;
                        v.x = fmaf(state.output[tile][n][0] + b, factor[n], v.x);
                        v.y = fmaf(state.output[tile][n][1] + b, factor[n], v.y);
                        v.z = fmaf(state.output[tile][n][2] + b, factor[n], v.z);
                        v.w = fmaf(state.output[tile][n][3] + b, factor[n], v.w);
                        *at = v;
                    }
                }
        }
        __syncthreads();
    }
}

/// Four channels of a row: the sum of `Parts` parts.
template <class Memory, int Parts>
__device__ __forceinline__ float4 read_output(const block_state& state, int row, int channel) {
    float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < Parts; ++i) {
        const float4 v = *reinterpret_cast<const float4*>(state.output + i * Memory::output_part +
                                                          row * Memory::output_stride + channel);
        sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
    }
    return sum;
}

/// Writes the rows of a finished item. All threads; `state` may be written again after the next barrier, as merge_warps does.
template <class Memory, int Parts, class Format, class T>
__device__ __forceinline__ void write_rows(const attention_args<Format, T>& a, const item_part& item,
                                           const block_state& state) {
    const int kv_head = item.kv_head;
    const int first_row = item.row_block * Memory::rows;
    const int rows = smaller(Memory::rows, a.rows - first_row);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < rows * Format::value_dim / 4; i += Memory::threads) {
        const int row = i / (Format::value_dim / 4), channel = i % (Format::value_dim / 4) * 4;
        const float4 v = read_output<Memory, Parts>(state, row, channel);
        float output[4] = {v.x, v.y, v.z, v.w};
        finish_channels(a, a.row_token(item.sequence, first_row + row), a.row_head(kv_head, first_row + row),
                        channel, state.max[row], state.sum[row], output);
    }
    if (a.state_out) {
        __syncthreads();
#pragma unroll 1
        for (int row = static_cast<int>(threadIdx.x); row < rows; row += Memory::threads)
            finish_header(a, a.row_token(item.sequence, first_row + row),
                          a.row_head(kv_head, first_row + row), state.max[row], state.sum[row]);
    }
}

/// The shares that have a part of an item.
struct share_span {
    int from, to;        // first and last
    int from_is_second;  // the item is the second one that share `from` has a part of
};
__device__ __forceinline__ share_span find_span(const share_plan& plan, const item_part& item) {
    const int from = plan.holder(item.begin);
    return {from, plan.holder(item.begin + item.count - 1), plan.begin(from) != item.begin};
}

/// What a thread block notes for the end of its share: the item that it merges.
struct merge_note {
    int pending;
    share_span span;
    item_part item;
};

/// A float on its way to another thread block. Zero, which the workspace holds between launches, says that it has not arrived: the
/// inverse of a NaN that no instruction makes.
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

template <class Memory, class Format, class T>
__device__ __forceinline__ std::uint32_t* partial_state(const attention_args<Format, T>& a, int slot) {
    return a.partials + static_cast<std::size_t>(slot) * static_cast<std::size_t>(Memory::partial_words);
}

/// Leaves this block's part of an item in the workspace. All threads.
template <class Memory, class Format, class T>
__device__ __forceinline__ void write_partial(const attention_args<Format, T>& a, const block_state& state,
                                              bool first_of_share) {
    constexpr int rows = Memory::rows, dim = Format::value_dim;
    const int share = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    std::uint32_t* const mine = partial_state<Memory>(a, 2 * share + (first_of_share ? 0 : 1));
#pragma unroll 1
    for (int i = thread; i < rows * dim / 4; i += Memory::threads) {
        const int row = i / (dim / 4), channel = i % (dim / 4) * 4;
        store_relaxed(reinterpret_cast<uint4*>(mine + 2 * rows) + i,
                      sealed(read_output<Memory, Memory::output_parts>(state, row, channel)));
    }
#pragma unroll 1
    for (int i = thread; i < rows; i += Memory::threads) {
        store_relaxed(mine + i, sealed(state.max[i]));
        store_relaxed(mine + rows + i, sealed(state.sum[i]));
    }
}

/// Merges all parts of an item, as they arrive in the workspace, in token order, writes its rows, and leaves zeros. All threads of
/// the block that has the item's last part, when they have nothing else to do.
template <class Memory, class Format, class T>
__device__ __forceinline__ void merge_parts(const attention_args<Format, T>& a, const merge_note& note,
                                            const block_state& state) {
    constexpr int rows = Memory::rows, dim = Format::value_dim;
    const int thread = static_cast<int>(threadIdx.x);
    const int from = note.span.from, count = note.span.to - from + 1, second = note.span.from_is_second;
    const auto part = [&](int i) { return partial_state<Memory>(a, 2 * (from + i) + (i == 0 ? second : 0)); };
    // A row belongs to `width` neighbouring lanes; each takes every so-manieth group of 4 channels. With twice as many
    // threads there are two sets, which take turns with the parts. All loads of a step are under way together; those of parts that
    // have not arrived are repeated.
    constexpr int width = smaller(warp_size, 128 / rows), groups = ceil_div(dim / 4, width);
    constexpr int sets = larger(1, smaller(2, Memory::threads / (width * rows)));
    constexpr int at_once = larger(1, smaller(8 / groups, width / sets));  // parts of a set
    static_assert(width * rows <= Memory::threads && dim % 4 == 0 && at_once * sets <= width);
    const int set = thread / (width * rows), lane = thread % width;
    const bool active = set < sets;
    const int row = active ? thread / width % rows : 0;
    float top = -INFINITY, sum = 0.0f;
    float4 output[groups] = {};
#pragma unroll 1
    for (int begin = 0; begin < count; begin += at_once * sets) {
        // Max and sum of a part per lane; they are read by all sets and zeroed below.
        const bool has_own = lane < at_once * sets && begin + lane < count;
        const std::uint32_t* const own = part(smaller(begin + lane, count - 1)) + row;
        std::uint32_t m_word = 0, l_word = 0;
        // Outputs: each word is read by one thread, which then zeroes it.
        uint4 v[at_once][groups] = {};
        uint4* from_part[at_once];
        bool wanted[at_once][groups];
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            const int p = begin + k * sets + set;
            from_part[k] = reinterpret_cast<uint4*>(part(p) + 2 * rows + row * dim) + lane;
#pragma unroll
            for (int i = 0; i < groups; ++i)
                wanted[k][i] = active && p < count && (i * width + lane) * 4 < dim;
        }
        while (true) {
            bool missing = has_own && (m_word == 0 || l_word == 0);
            load_relaxed_if(missing, m_word, own);
            load_relaxed_if(missing, l_word, own + rows);
#pragma unroll
            for (int k = 0; k < at_once; ++k)
#pragma unroll
                for (int i = 0; i < groups; ++i) {
                    const bool again = wanted[k][i] & !arrived(v[k][i]);
                    load_relaxed_if(again, v[k][i], from_part[k] + i * width);
                    missing = missing | again;
                }
            if (!missing) break;
        }
        __syncwarp();
        const float m = has_own ? opened(m_word) : -INFINITY;
        float next = m;
#pragma unroll
        for (int step = width / 2; step > 0; step /= 2) next = fmaxf(next, __shfl_xor_sync(~0u, next, step));
        next = fmaxf(next, top);
        const float keep = top == -INFINITY ? 0.0f : exp2_fast(top - next);
        const float take = m == -INFINITY ? 0.0f : exp2_fast(m - next);
        top = next;
        sum = fmaf(sum, keep, m == -INFINITY ? 0.0f : opened(l_word) * take);
#pragma unroll
        for (int i = 0; i < groups; ++i)
            output[i] = {output[i].x * keep, output[i].y * keep, output[i].z * keep, output[i].w * keep};
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            const float factor = __shfl_sync(~0u, take, k * sets + (active ? set : 0), width);
#pragma unroll
            for (int i = 0; i < groups; ++i) {
                if (wanted[k][i]) store_relaxed(from_part[k] + i * width, uint4{0, 0, 0, 0});
                if (factor == 0.0f) continue;  // no such part, or an empty one
                output[i].x = fmaf(opened(v[k][i].x), factor, output[i].x);
                output[i].y = fmaf(opened(v[k][i].y), factor, output[i].y);
                output[i].z = fmaf(opened(v[k][i].z), factor, output[i].z);
                output[i].w = fmaf(opened(v[k][i].w), factor, output[i].w);
            }
        }
    }
#pragma unroll
    for (int step = width / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < groups; ++i) {
        const int channel = (i * width + lane) * 4;
        if (active && channel < dim) {
            float* const at = state.output + row * Memory::output_stride + channel;
            *reinterpret_cast<float4*>(at + set * Memory::output_part) = output[i];
        }
    }
    if (set == 0 && lane == 0) {
        state.max[row] = top;
        state.sum[row] = sum;
    }
    if (set == 0)
#pragma unroll 1
        for (int s = lane; s < count; s += width) {
            store_relaxed(part(s) + row, 0u);
            store_relaxed(part(s) + rows + row, 0u);
        }
    __syncthreads();
    write_rows<Memory, sets>(a, note.item, state);
}

}  // namespace kvq::inline v0_1::cuda::detail
