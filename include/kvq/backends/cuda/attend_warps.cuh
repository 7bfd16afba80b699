// The fused attention kernel: every warp walks its chunks with tensor cores and its own ring of asynchronous copies.
//
//   warp:   K chunk -> scores -> weights -> V chunk -> output, while the next two or three units are on their way
//   block:  4 warps share an item; their softmax states are merged in shared memory, in the order of the warps
//   grid:   as many blocks as fit; an item that spans blocks is merged by the block that comes last (same launch)
//
// Nothing is decoded to memory, warps wait for each other only at the end of an item, and copies run on across items.
// Contract: error against double arithmetic on the decoded values below 2e-3 (measured: docs/gpu.md); deterministic for
// a given grid. Instantiated once per (format, type of q, 4, 8 or 16 query rows).
// Source: split keys with a merge, Flash-Decoding; shares of equal size over ragged work: stream-K, arXiv 2301.03598.
#pragma once

#include "attention_args.cuh"
#include "value_product.cuh"

namespace kvq::inline v0_1::cuda::detail {

inline constexpr int attention_warps = 4;
inline constexpr int attention_threads = attention_warps * warp_size;

/// Tokens a warp takes at a time: as many as give units of at most 9 KB, so that several fit into flight.
template <class Format>
constexpr int chunk_tokens() {
    constexpr int page = Format::page_tokens;
    int tokens = page <= 128 ? page : 128;
    constexpr int least = smaller(32, page);  // a tile of keys
    constexpr int widest = static_cast<int>(larger(Format::key_block_bytes, Format::value_block_bytes)) / page;
    while (tokens > least && tokens * widest > 9216) tokens /= 2;
    using values = chunk<tensor::value, Format, page>;
    if (!values::full && !values::token_parameters)
        while (tokens > least && tokens > values::group) tokens /= 2;
    while (tokens > least && page % tokens != 0) tokens /= 2;
    return tokens;
}

template <class Format>
inline constexpr bool warps_can = [] {
    constexpr int tokens = chunk_tokens<Format>();
    return chunk<tensor::key, Format, tokens>::supported && chunk<tensor::value, Format, tokens>::supported;
}();

/// Shared memory of a thread block.
template <class Format, int Rows4>
struct attention_memory {
    static constexpr int tokens = chunk_tokens<Format>();
    using keys = chunk<tensor::key, Format, tokens>;
    using values = chunk<tensor::value, Format, tokens>;
    using words = weight_words<values>;
    static constexpr int rows = 4 * Rows4;
    static constexpr int slot_bytes = round_up(larger(keys::bytes, values::bytes), 128);
    static constexpr int slots = 3;
    static constexpr int weight_bytes = round_up(words::words(Rows4) * 4, 128);
    static constexpr int warp_bytes = slots * slot_bytes + weight_bytes;
    static constexpr int query_stride = Format::head_dim;
    static constexpr int query_bytes = round_up(rows * query_stride * 4, 128);
    static constexpr int output_stride = Format::value_dim + 8;
    static constexpr int output_bytes = round_up(rows * output_stride * 4, 128);
    static constexpr int scalar_bytes = 128 + 2 * attention_warps * rows * 4 + 2 * rows * 4;
    static constexpr int bytes =
        attention_warps * warp_bytes + query_bytes + output_bytes + round_up(scalar_bytes, 128);
    static constexpr int blocks = larger(1, smaller(Rows4 == 1 ? 4 : Rows4 == 2 ? 3 : 2, 232448 / (bytes + 1024)));
    /// Floats of one partial state in the workspace.
    static constexpr int partial_floats = rows * (Format::value_dim + 2);
};

/// Feeds a warp's ring: key and value units of its chunks, in order, across items.
template <class Memory, class Format, class T>
struct unit_feed {
    using keys = typename Memory::keys;
    using values = typename Memory::values;
    const attention_args<Format, T>& a;
    item_walk<Memory::tokens> walk;
    int chunk_index;  // relative to the item
    int page;         // of the chunk; fetched one unit ahead
    int slot = 0;
    unsigned present = 0;  // bit per slot: does it hold a chunk?
    bool value_next = false;

    __device__ __forceinline__ unit_feed(const attention_args<Format, T>& args, const item_walk<Memory::tokens>& start,
                                         int warp)
        : a(args), walk(start), chunk_index(start.item.from + warp) {
        seek(warp);
    }
    __device__ __forceinline__ void seek(int warp) {
        while (!walk.done() && chunk_index >= walk.item.to) {
            walk.next();
            chunk_index = walk.item.from + warp;
        }
        page = -1;
        if (!walk.done()) {
            const int token = (walk.item.first + chunk_index) * Memory::tokens;
            const int column = token / Format::page_tokens;
            if (chunk_index < walk.item.real)
                page = a.cache.block_table[static_cast<std::size_t>(walk.item.sequence) *
                                               static_cast<std::size_t>(a.cache.table_columns) +
                                           static_cast<std::size_t>(column)];
        }
    }
    /// Starts the next unit's copy into the next slot of the ring at `ring`.
    __device__ __forceinline__ void issue(std::uint32_t ring, int warp, int lane) {
        const std::uint32_t to = ring + static_cast<std::uint32_t>(slot * Memory::slot_bytes);
        const bool holds = page >= 0;
        present = (present & ~(1u << slot)) | (holds ? 1u << slot : 0u);
        if (holds) {
            const int first = ((walk.item.first + chunk_index) * Memory::tokens) % Format::page_tokens;
            const int head = walk.item.line / a.row_blocks;
            if (value_next)
                values::copy(to, a.cache.value_block(page, head), first, lane);
            else
                keys::copy(to, a.cache.key_block(page, head), first, lane);
        }
        copy_commit();
        if (value_next) {
            chunk_index += attention_warps;
            seek(warp);
        }
        value_next = !value_next;
        slot = slot + 1 == Memory::slots ? 0 : slot + 1;
    }
};

/// Brings the query rows of an item to shared memory, scaled, as floats; rows that do not exist are zero.
template <class Memory, class Format, class T>
__device__ __forceinline__ void load_query(const attention_args<Format, T>& a, const item_part& item, float* query) {
    const int kv_head = item.line / a.row_blocks;
    const int first_row = item.line % a.row_blocks * Memory::rows;
    for (int i = static_cast<int>(threadIdx.x); i < Memory::rows * Format::head_dim; i += attention_threads) {
        const int row = first_row + i / Format::head_dim, channel = i % Format::head_dim;
        float x = 0.0f;
        if (row < a.rows)
            x = to_float(a.q.at(a.row_token(item.sequence, row), a.row_head(kv_head, row))[channel]) * a.scale;
        query[i] = x;
    }
}

/// Softmax state of the rows of a block part, in shared memory.
struct block_state {
    float* max;     // [rows]
    float* sum;     // [rows]
    float* output;  // [rows][output_stride]
};

/// Merges the warps' states into `to`. All threads.
template <class Memory, int Rows4, class Values>
__device__ __forceinline__ void merge_warps(const warp_state<Values, Rows4>& state, const block_state& to,
                                            float* warp_max, float* warp_sum, int warp, const lane_id& id) {
    constexpr int rows = Memory::rows;
    float bias[Rows4][weight_words<Values>::bias_sets + 1];
#pragma unroll
    for (int n = 0; n < Rows4; ++n) {
        const float sum = over_tokens(state.sum[n], add_floats{});
#pragma unroll
        for (int i = 0; i < weight_words<Values>::bias_sets; ++i)
            bias[n][i] = over_tokens(state.bias[n][i], add_floats{});
        if (id.g == 0) {
            warp_max[warp * rows + 4 * n + id.t] = state.max[n];
            warp_sum[warp * rows + 4 * n + id.t] = sum;
        }
    }
    __syncthreads();
    float factor[Rows4];
#pragma unroll
    for (int n = 0; n < Rows4; ++n) {
        const int row = 4 * n + id.t;
        float top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < attention_warps; ++w) top = fmaxf(top, warp_max[w * rows + row]);
#pragma unroll
        for (int w = 0; w < attention_warps; ++w) {
            const float m = warp_max[w * rows + row];
            if (m > -INFINITY) sum += warp_sum[w * rows + row] * exp2_fast(m - top);
        }
        factor[n] = state.max[n] == -INFINITY ? 0.0f : exp2_fast(state.max[n] - top);
        if (warp == 0 && id.g == 0) {
            to.max[row] = top;
            to.sum[row] = sum;
        }
    }
    constexpr int sets = larger(1, weight_words<Values>::bias_sets);
    constexpr int tiles_of_set = ceil_div(Values::tiles, sets);
    for (int w = 0; w < attention_warps; ++w) {
        if (w == warp) {
#pragma unroll
            for (int n = 0; n < Rows4; ++n)
#pragma unroll
                for (int tile = 0; tile < Values::tiles; ++tile) {
                    const int channel = 32 * tile + 4 * id.g;
                    if (channel < Values::dim) {
                        float* const at = to.output + (4 * n + id.t) * Memory::output_stride + channel;
                        float b = 0.0f;
                        if constexpr (weight_words<Values>::bias_sets > 0) b = bias[n][tile / tiles_of_set];
                        float4 v = w == 0 ? float4{0.0f, 0.0f, 0.0f, 0.0f} : *reinterpret_cast<float4*>(at);
                        v.x = fmaf(state.output[tile][n][0] + b, factor[n], v.x);
                        v.y = fmaf(state.output[tile][n][1] + b, factor[n], v.y);
                        v.z = fmaf(state.output[tile][n][2] + b, factor[n], v.z);
                        v.w = fmaf(state.output[tile][n][3] + b, factor[n], v.w);
                        *reinterpret_cast<float4*>(at) = v;
                    }
                }
        }
        __syncthreads();
    }
}

/// Writes the rows of a finished item. All threads; `state` may be written again after the next barrier.
template <class Memory, class Format, class T>
__device__ __forceinline__ void write_rows(const attention_args<Format, T>& a, const item_part& item,
                                           const block_state& state) {
    const int kv_head = item.line / a.row_blocks;
    const int first_row = item.line % a.row_blocks * Memory::rows;
    const int rows = smaller(Memory::rows, a.rows - first_row);
    for (int i = static_cast<int>(threadIdx.x); i < rows * Format::value_dim; i += attention_threads) {
        const int row = i / Format::value_dim, channel = i % Format::value_dim;
        finish_channel(a, a.row_token(item.sequence, first_row + row), a.row_head(kv_head, first_row + row), channel,
                       state.max[row], state.sum[row], state.output[row * Memory::output_stride + channel]);
    }
    if (a.state_out) {
        __syncthreads();
        for (int row = static_cast<int>(threadIdx.x); row < rows; row += attention_threads)
            finish_header(a, a.row_token(item.sequence, first_row + row), a.row_head(kv_head, first_row + row),
                          state.max[row], state.sum[row]);
    }
}

/// Leaves this block's part of an item in the workspace; the last block of the item merges all parts and writes.
template <class Memory, class Format, class T>
__device__ __forceinline__ void write_partial(const attention_args<Format, T>& a, const item_part& item,
                                              const share_plan& plan, const block_state& state, bool first_of_share,
                                              int* flag) {
    constexpr int rows = Memory::rows, dim = Format::value_dim;
    const int share = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    const auto partial = [&](int slot) {
        return a.partials + static_cast<std::size_t>(slot) * static_cast<std::size_t>(Memory::partial_floats);
    };
    float* const mine = partial(2 * share + (first_of_share ? 0 : 1));
    for (int i = thread; i < rows * dim; i += attention_threads)
        __stcg(mine + 2 * rows + i, state.output[i / dim * Memory::output_stride + i % dim]);
    for (int i = thread; i < rows; i += attention_threads) {
        __stcg(mine + i, state.max[i]);
        __stcg(mine + rows + i, state.sum[i]);
    }
    const int from = plan.holder(item.begin), to = plan.holder(item.begin + item.count - 1);
    __threadfence();
    __syncthreads();
    // atomicInc returns to zero after the last block, so the counter is ready for the next launch.
    if (thread == 0)
        *flag = static_cast<int>(atomicInc(reinterpret_cast<unsigned*>(a.counters + from),
                                           static_cast<unsigned>(to - from))) == to - from;
    __syncthreads();
    if (!*flag) return;
    __threadfence();
    const bool from_is_first = plan.begin(from) == item.begin;
    const auto part = [&](int s) { return partial(2 * s + (s == from && !from_is_first ? 1 : 0)); };
    static_assert(attention_threads % rows == 0);
    constexpr int threads_of_row = attention_threads / rows;
    const int row = thread / threads_of_row, lane = thread % threads_of_row;
    float top = -INFINITY;
    for (int s = from; s <= to; ++s) top = fmaxf(top, __ldcg(part(s) + row));
    constexpr int mine_count = ceil_div(dim, threads_of_row);
    float sum = 0.0f, output[mine_count] = {};
    if (top > -INFINITY) {
#pragma unroll 4
        for (int s = from; s <= to; ++s) {
            const float* const p = part(s);
            const float m = __ldcg(p + row);
            const float factor = m == -INFINITY ? 0.0f : exp2_fast(m - top);
            sum = fmaf(__ldcg(p + rows + row), factor, sum);
#pragma unroll
            for (int i = 0; i < mine_count; ++i) {
                const int channel = i * threads_of_row + lane;
                if (channel < dim) output[i] = fmaf(__ldcg(p + 2 * rows + row * dim + channel), factor, output[i]);
            }
        }
    }
    __syncthreads();
    for (int i = 0; i < mine_count; ++i)
        if (i * threads_of_row + lane < dim)
            state.output[row * Memory::output_stride + i * threads_of_row + lane] = output[i];
    if (lane == 0) {
        state.max[row] = top;
        state.sum[row] = sum;
    }
    __syncthreads();
    write_rows<Memory>(a, item, state);
}

template <class Format, class T, int Rows4>
__global__ void __launch_bounds__(attention_threads, attention_memory<Format, Rows4>::blocks)
    attend_warps_kernel(const __grid_constant__ attention_args<Format, T> a) {
    using memory = attention_memory<Format, Rows4>;
    using keys = typename memory::keys;
    using values = typename memory::values;
    constexpr int rows = memory::rows;
    extern __shared__ __align__(128) std::byte shared[];
    const lane_id id;
    const int warp = static_cast<int>(threadIdx.x) / warp_size;

    std::byte* const warp_memory = shared + warp * memory::warp_bytes;
    const std::uint32_t ring = shared_address(warp_memory);
    const std::uint32_t weights = ring + memory::slots * memory::slot_bytes;
    std::byte* const block_memory = shared + attention_warps * memory::warp_bytes;
    float* const query = reinterpret_cast<float*>(block_memory);
    float* const scalars = reinterpret_cast<float*>(block_memory + memory::query_bytes + memory::output_bytes);
    int* const flag = reinterpret_cast<int*>(scalars);
    float* const warp_max = scalars + 32;
    float* const warp_sum = warp_max + attention_warps * rows;
    const block_state merged{warp_sum + attention_warps * rows, warp_sum + attention_warps * rows + rows,
                             reinterpret_cast<float*>(block_memory + memory::query_bytes)};

    item_walk<memory::tokens> walk{a.work, 0, 0, {}};
    const share_plan plan = find_share<memory::tokens, attention_threads>(a.work, attention_warps, walk.item,
                                                                          walk.share_begin, walk.share_end, flag);
    if (walk.share_begin >= walk.share_end) return;
    walk.clip();

    unit_feed<memory, Format, T> feed(a, walk, warp);
#pragma unroll
    for (int i = 0; i < memory::slots; ++i) feed.issue(ring, warp, id.lane);
    // Weights of units that no token fills stay zero.
    for (int i = id.lane; i < memory::weight_bytes / 4; i += warp_size)
        store_word(weights + 4u * static_cast<std::uint32_t>(i), 0);

    int slot = 0;
    const auto next_unit = [&] {
        __syncwarp();
        feed.issue(ring, warp, id.lane);
        slot = slot + 1 == memory::slots ? 0 : slot + 1;
    };
    const auto wait_unit = [&] {
        copy_wait<memory::slots - 1>();
        __syncwarp();
        return ring + static_cast<std::uint32_t>(slot * memory::slot_bytes);
    };

    for (; !walk.done(); walk.next()) {
        const item_part item = walk.item;
        load_query<memory>(a, item, query);
        __syncthreads();
        const std::uint32_t query_at = shared_address(query);
        const int length = a.work.tokens[item.sequence];
        const int first_row = item.line % a.row_blocks * rows;
        warp_state<values, Rows4> state;
        state.clear();
        folded_row<keys> folded[Rows4];
        const auto fold = [&](std::uint32_t at, int run) {
#pragma unroll
            for (int n = 0; n < Rows4; ++n)
                fold_row(folded[n],
                         query_at + 4u * static_cast<std::uint32_t>((4 * n + id.g / 2) * memory::query_stride), at, run,
                         id);
        };
        constexpr bool fold_once = keys::full || keys::token_parameters;
        if constexpr (fold_once) fold(0, 0);

        for (int index = item.from + warp; index < item.to; index += attention_warps) {
            std::uint32_t at = wait_unit();
            if (((feed.present >> slot) & 1u) == 0) {  // not held in this format
                next_unit();
                wait_unit();
                next_unit();
                continue;
            }
            float scores[keys::tiles][Rows4][4];
            constexpr int tiles_of_run = fold_once ? keys::tiles : smaller(keys::tiles, keys::group / keys::tile_height);
            static_for<keys::tiles>([&](auto tile) {
                constexpr int Tile = decltype(tile)::value;
                if constexpr (!fold_once && Tile % tiles_of_run == 0) fold(at, Tile / tiles_of_run);
                score_tile<keys, Rows4, Tile>(scores[Tile], folded, at, id);
            });
            next_unit();

            const int first = (item.first + index) * memory::tokens;
            if (a.softcap > 0.0f) {
#pragma unroll
                for (int i = 0; i < keys::tiles * Rows4 * 4; ++i) {
                    float& s = scores[i / (4 * Rows4)][i / 4 % Rows4][i % 4];
                    s = capped(s, a.softcap);
                }
            }
            const bool masked = first + memory::tokens > a.row_end(length, first_row) ||
                                (a.work.window > 0 &&
                                 first < a.row_begin(length, smaller(first_row + rows, a.rows) - 1));
            if (masked) {
#pragma unroll
                for (int n = 0; n < Rows4; ++n) {
                    const int row = first_row + 4 * n + id.t;
                    const int begin = a.row_begin(length, row), end = row < a.rows ? a.row_end(length, row) : 0;
#pragma unroll
                    for (int tile = 0; tile < keys::tiles; ++tile)
#pragma unroll
                        for (int r = 0; r < 4; ++r) {
                            const int token = first + tile * keys::tile_height + 4 * id.g + r;
                            if (token < begin || token >= end) scores[tile][n][r] = -INFINITY;
                        }
                }
            }
            at = wait_unit();
            chunk_factors<values, Rows4> factors;
            make_weights<keys, values, Rows4>(scores, state, factors, at, weights, masked, id);
            if constexpr (values::full) {
                if (masked) {
                    const int last_row = smaller(first_row + rows, a.rows) - 1;
                    values::clear_columns(at, id, a.row_begin(length, first_row) - first,
                                          a.row_end(length, last_row) - first);
                }
            }
            __syncwarp();
            add_values<values, Rows4>(state, factors, at, weights, id);
            next_unit();
        }

        const bool whole = item.from == 0 && item.to == item.count;
        merge_warps<memory, Rows4>(state, merged, warp_max, warp_sum, warp, id);
        if (whole)
            write_rows<memory>(a, item, merged);
        else
            write_partial<memory>(a, item, plan, merged, item.begin <= walk.share_begin, flag);
        __syncthreads();
    }
    copy_wait<0>();
}

}  // namespace kvq::inline v0_1::cuda::detail
