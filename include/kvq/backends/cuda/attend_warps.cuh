// The fused attention kernel: every warp walks its chunks with tensor cores and its own ring of asynchronous copies.
//
//   warp:   K chunk -> scores -> weights -> V chunk -> output, while the next two or three units are on their way
//   block:  4 or 8 warps share an item; their softmax states are merged in shared memory, in the order of the warps
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

template <class S>
inline constexpr int bits_of = 16;
template <class B, class L, class G, class P>
inline constexpr int bits_of<scheme<B, L, G, P>> = B::value;

/// Tokens a warp takes at a time: as many as give units of at most 9 KB, so that several fit into flight.
template <class Format>
constexpr int chunk_tokens() {
    constexpr int page = Format::page_tokens;
    int tokens = page <= 128 ? page : 128;
    constexpr int least = smaller(32, page);  // a tile of keys
    constexpr int widest =
        static_cast<int>(larger(Format::key_block_bytes, Format::value_block_bytes)) / page;
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
    /// Warps of a thread block. 8 leave fewer partial states and share the work of an item better; where a block of 8 would
    /// be the only one that fits, it must not starve the instruction issue: 2 bit and wide formats stay with 4.
    static constexpr int bits = larger(bits_of<typename Format::keys>, bits_of<typename Format::values>);
    /// So do keys with channel parameters for every 32 tokens, which fold often.
    static constexpr bool folds_often = !keys::full && !keys::token_parameters && keys::group <= 32;
    static constexpr int warps = Rows4 == 1 && (bits == 3 || bits == 4) && !folds_often ? 8 : 4;
    static constexpr int threads = warps * warp_size;
    using words = weight_words<values>;
    static constexpr int rows = 4 * Rows4;
    static constexpr int slot_bytes = round_up(larger(keys::bytes, values::bytes), 128);
    static constexpr int slots = 3;
    static constexpr int weight_bytes = round_up(words::words(Rows4) * 4, 128);
    static constexpr int warp_bytes = slots * slot_bytes + weight_bytes;
    static constexpr int query_stride = Format::head_dim;
    static constexpr int query_bytes = round_up(rows * query_stride * 4, 128);
    static constexpr int output_stride = Format::value_dim + 8;
    static constexpr int output_half =
        rows * output_stride;  // floats; there are two, which add up to the output
    static constexpr int output_bytes = round_up(2 * output_half * 4, 128);
    static constexpr int scalar_bytes = 128 + 2 * warps * rows * 4 + 2 * rows * 4;
    static constexpr int bytes =
        warps * warp_bytes + query_bytes + output_bytes + round_up(scalar_bytes, 128);
    static constexpr int blocks = larger(1, smaller((Rows4 == 1   ? 4
                                                     : Rows4 == 2 ? 3
                                                                  : 2) *
                                                        4 / warps,
                                                    232448 / (bytes + 1024)));
    /// Floats of one partial state in the workspace.
    static constexpr int partial_floats = rows * (Format::value_dim + 2);
};

/// Feeds a warp's ring: key and value units of its chunks in turn, across items. Page numbers are fetched a chunk ahead.
template <class Memory, class Format, class T>
struct unit_feed {
    using keys = typename Memory::keys;
    using values = typename Memory::values;
    const attention_args<Format, T>& a;
    item_walk<Memory::tokens> walk;  // of the chunk after the current one
    int index;                       // of that chunk, relative to its item
    int next_page, next_first, next_head;
    int page, first, head;  // of the current chunk
    int slot = 0;
    unsigned present = 0;  // bit per slot: does it hold a chunk?

    __device__ __forceinline__ unit_feed(const attention_args<Format, T>& args,
                                         const item_walk<Memory::tokens>& start, int warp)
        : a(args), walk(start), index(start.item.from + warp - Memory::warps) {
        seek(warp);
        advance(warp);
    }
    /// Starts the next unit's copy into the next slot of the ring at `ring`.
    template <tensor Role>
    __device__ __forceinline__ void issue(std::uint32_t ring, int warp, int lane) {
        const std::uint32_t to = ring + static_cast<std::uint32_t>(slot * Memory::slot_bytes);
        const unsigned bit = 1u << slot;
        if (page >= 0) {
            present |= bit;
            if constexpr (Role == tensor::key)
                keys::copy(to, a.cache.key_block(page, head), first, lane);
            else
                values::copy(to, a.cache.value_block(page, head), first, lane);
        } else {
            present &= ~bit;
        }
        copy_commit();
        if constexpr (Role == tensor::value) advance(warp);
        slot = slot + 1 == Memory::slots ? 0 : slot + 1;
    }

private:
    __device__ __forceinline__ void advance(int warp) {
        page = next_page;
        first = next_first;
        head = next_head;
        seek(warp);
    }
    __device__ __forceinline__ void seek(int warp) {
        index += Memory::warps;
        while (!walk.done() && index >= walk.item.to) {
            walk.next();
            index = walk.item.from + warp;
        }
        next_page = -1;
        const int token = (walk.item.first + index) * Memory::tokens;
        const int column = token / Format::page_tokens;
        if (!walk.done() && index < walk.item.real && column < a.cache.table_columns) {
            next_page = __ldg(a.cache.block_table +
                              static_cast<std::size_t>(walk.item.sequence) *
                                  static_cast<std::size_t>(a.cache.table_columns) +
                              static_cast<std::size_t>(column));
            next_first = token % Format::page_tokens;
            next_head = walk.item.kv_head;
        }
    }
};

/// The query rows of an item on their way to shared memory: fetched early, stored late. Rows that do not exist are zero.
template <class Memory, class Format, class T>
struct query_rows {
    static constexpr int per_load = 8;  // channels of one thread
    static constexpr int pieces = Memory::rows * Format::head_dim / per_load;
    static constexpr int loads = ceil_div(pieces, Memory::threads);
    T values[loads][per_load];

    __device__ __forceinline__ void fetch(const attention_args<Format, T>& a, const item_part& item) {
        const int first_row = item.row_block * Memory::rows;
#pragma unroll
        for (int i = 0; i < loads; ++i) {
            const int piece = i * Memory::threads + static_cast<int>(threadIdx.x);
            const int row = first_row + piece / (Format::head_dim / per_load);
            const int channel = piece % (Format::head_dim / per_load) * per_load;
            if (piece < pieces && row < a.rows) {
                const T* const from =
                    a.q.at(a.row_token(item.sequence, row), a.row_head(item.kv_head, row)) + channel;
                if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
                    constexpr int words = per_load * static_cast<int>(sizeof(T)) / 16;
                    uint4 raw[words];
#pragma unroll
                    for (int w = 0; w < words; ++w) raw[w] = __ldg(reinterpret_cast<const uint4*>(from) + w);
                    __builtin_memcpy(values[i], raw, sizeof raw);
                } else {
#pragma unroll
                    for (int k = 0; k < per_load; ++k) values[i][k] = from[k];
                }
            } else {
#pragma unroll
                for (int k = 0; k < per_load; ++k) values[i][k] = T(0.0f);
            }
        }
    }
    __device__ __forceinline__ void store(float* query, float scale) const {
#pragma unroll
        for (int i = 0; i < loads; ++i) {
            const int piece = i * Memory::threads + static_cast<int>(threadIdx.x);
            if (piece >= pieces) continue;
            float4* const to = reinterpret_cast<float4*>(query + piece * per_load);
#pragma unroll
            for (int k = 0; k < per_load; k += 4)
                to[k / 4] = {to_float(values[i][k]) * scale, to_float(values[i][k + 1]) * scale,
                             to_float(values[i][k + 2]) * scale, to_float(values[i][k + 3]) * scale};
        }
    }
};

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
        for (int w = 0; w < Memory::warps; ++w) top = fmaxf(top, warp_max[w * rows + row]);
#pragma unroll
        for (int w = 0; w < Memory::warps; ++w) {
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
    // Two warps at a time, the last ones first: each adds to its half; the halves are added when they are read.
    for (int turn = 0; turn < Memory::warps / 2; ++turn) {
        if (warp / 2 == Memory::warps / 2 - 1 - turn) {
            float* const half = to.output + warp % 2 * Memory::output_half;
#pragma unroll
            for (int n = 0; n < Rows4; ++n)
#pragma unroll
                for (int tile = 0; tile < Values::tiles; ++tile) {
                    const int channel = 32 * tile + 4 * id.g;
                    if (channel < Values::dim) {
                        float4* const at = reinterpret_cast<float4*>(
                            half + (4 * n + id.t) * Memory::output_stride + channel);
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

/// Writes the rows of a finished item. All threads; `state` may be written again after the next barrier.
template <class Memory, class Format, class T>
__device__ __forceinline__ void write_rows(const attention_args<Format, T>& a, const item_part& item,
                                           const block_state& state) {
    const int kv_head = item.kv_head;
    const int first_row = item.row_block * Memory::rows;
    const int rows = smaller(Memory::rows, a.rows - first_row);
    for (int i = static_cast<int>(threadIdx.x); i < rows * Format::value_dim; i += Memory::threads) {
        const int row = i / Format::value_dim, channel = i % Format::value_dim;
        finish_channel(a, a.row_token(item.sequence, first_row + row), a.row_head(kv_head, first_row + row),
                       channel, state.max[row], state.sum[row],
                       state.output[row * Memory::output_stride + channel] +
                           state.output[Memory::output_half + row * Memory::output_stride + channel]);
    }
    if (a.state_out) {
        __syncthreads();
        for (int row = static_cast<int>(threadIdx.x); row < rows; row += Memory::threads)
            finish_header(a, a.row_token(item.sequence, first_row + row),
                          a.row_head(kv_head, first_row + row), state.max[row], state.sum[row]);
    }
}

/// Leaves this block's part of an item in the workspace; the last block of the item merges all parts and writes.
template <class Memory, class Format, class T>
__device__ __forceinline__ void write_partial(const attention_args<Format, T>& a, const item_part& item,
                                              const share_plan& plan, const block_state& state,
                                              bool first_of_share, int* flag) {
    constexpr int rows = Memory::rows, dim = Format::value_dim;
    const int share = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    const auto partial = [&](int slot) {
        return a.partials + static_cast<std::size_t>(slot) * static_cast<std::size_t>(Memory::partial_floats);
    };
    float* const mine = partial(2 * share + (first_of_share ? 0 : 1));
    for (int i = thread; i < rows * dim / 4; i += Memory::threads) {
        const float* const from = state.output + i / (dim / 4) * Memory::output_stride + i % (dim / 4) * 4;
        const float4 a_half = *reinterpret_cast<const float4*>(from);
        const float4 b_half = *reinterpret_cast<const float4*>(from + Memory::output_half);
        __stcg(reinterpret_cast<float4*>(mine + 2 * rows) + i,
               float4{a_half.x + b_half.x, a_half.y + b_half.y, a_half.z + b_half.z, a_half.w + b_half.w});
    }
    for (int i = thread; i < rows; i += Memory::threads) {
        __stcg(mine + i, state.max[i]);
        __stcg(mine + rows + i, state.sum[i]);
    }
    const int from = plan.holder(item.begin), to = plan.holder(item.begin + item.count - 1);
    __syncthreads();
    // atomicInc returns to zero after the last block, so the counter is ready for the next launch.
    if (thread == 0) {
        __threadfence();
        *flag = static_cast<int>(atomicInc(reinterpret_cast<unsigned*>(a.counters + from),
                                           static_cast<unsigned>(to - from))) == to - from;
        __threadfence();
    }
    __syncthreads();
    if (!*flag) return;
    const bool from_is_first = plan.begin(from) == item.begin;
    const auto part = [&](int s) { return partial(2 * s + (s == from && !from_is_first ? 1 : 0)); };
    // A row belongs to `threads_of_row` neighbouring lanes; each takes every so-manieth group of 4 channels.
    constexpr int threads_of_row = smaller(warp_size, 128 / rows);
    static_assert(threads_of_row * rows <= Memory::threads && dim % 4 == 0);
    const bool active = thread < threads_of_row * rows;
    const int row = active ? thread / threads_of_row : 0, lane = thread % threads_of_row;
    float top = -INFINITY;
    for (int s = from + lane; s <= to; s += threads_of_row) top = fmaxf(top, __ldcg(part(s) + row));
#pragma unroll
    for (int step = threads_of_row / 2; step > 0; step /= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    constexpr int groups = ceil_div(dim / 4, threads_of_row);
    float sum = 0.0f;
    float4 output[groups] = {};
    if (top > -INFINITY) {
        constexpr int at_once = groups == 1   ? 16
                                : groups == 2 ? 8
                                              : 4;  // parts whose loads are under way together
        for (int begin = from; begin <= to; begin += at_once) {
            float m[at_once], l[at_once];
            float4 v[at_once][groups];
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                const float* const p = part(smaller(begin + k, to));
                m[k] = begin + k <= to ? __ldcg(p + row) : -INFINITY;
                l[k] = __ldcg(p + rows + row);
#pragma unroll
                for (int i = 0; i < groups; ++i) {
                    const int channel = (i * threads_of_row + lane) * 4;
                    if (channel < dim)
                        v[k][i] = __ldcg(reinterpret_cast<const float4*>(p + 2 * rows + row * dim + channel));
                }
            }
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                const float factor = m[k] == -INFINITY ? 0.0f : exp2_fast(m[k] - top);
                sum = fmaf(l[k], factor, sum);
#pragma unroll
                for (int i = 0; i < groups; ++i) {
                    output[i].x = fmaf(v[k][i].x, factor, output[i].x);
                    output[i].y = fmaf(v[k][i].y, factor, output[i].y);
                    output[i].z = fmaf(v[k][i].z, factor, output[i].z);
                    output[i].w = fmaf(v[k][i].w, factor, output[i].w);
                }
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < groups; ++i) {
        const int channel = (i * threads_of_row + lane) * 4;
        if (active && channel < dim) {
            float* const at = state.output + row * Memory::output_stride + channel;
            *reinterpret_cast<float4*>(at) = output[i];
            *reinterpret_cast<float4*>(at + Memory::output_half) = float4{0.0f, 0.0f, 0.0f, 0.0f};
        }
    }
    if (active && lane == 0) {
        state.max[row] = top;
        state.sum[row] = sum;
    }
    __syncthreads();
    write_rows<Memory>(a, item, state);
}

template <class Format, class T, int Rows4>
__global__ void __launch_bounds__((attention_memory<Format, Rows4>::threads),
                                  attention_memory<Format, Rows4>::blocks)
    attend_warps_kernel(const __grid_constant__ attention_args<Format, T> a) {
    using memory = attention_memory<Format, Rows4>;
    using keys = typename memory::keys;
    using values = typename memory::values;
    constexpr int rows = memory::rows;
    extern __shared__ __align__(128) std::byte shared[];
    launch_dependents();
    wait_for_predecessor();
    const lane_id id;
    // The shuffle tells the compiler that all lanes have the same number.
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / warp_size, 0);

    std::byte* const warp_memory = shared + warp * memory::warp_bytes;
    const std::uint32_t ring = shared_address(warp_memory);
    const std::uint32_t weights = ring + memory::slots * memory::slot_bytes;
    std::byte* const block_memory = shared + memory::warps * memory::warp_bytes;
    float* const query = reinterpret_cast<float*>(block_memory);
    float* const scalars =
        reinterpret_cast<float*>(block_memory + memory::query_bytes + memory::output_bytes);
    int* const flag = reinterpret_cast<int*>(scalars);
    float* const warp_max = scalars + 32;
    float* const warp_sum = warp_max + memory::warps * rows;
    const block_state merged{warp_sum + memory::warps * rows, warp_sum + memory::warps * rows + rows,
                             reinterpret_cast<float*>(block_memory + memory::query_bytes)};

    item_walk<memory::tokens> walk{a.work, 0, 0, {}};
    const share_plan plan = find_share(a.work, memory::warps, walk);
    if (walk.share_begin >= walk.share_end) return;

    unit_feed<memory, Format, T> feed(a, walk, warp);
    query_rows<memory, Format, T> query_part;
    query_part.fetch(a, walk.item);
    // Into the slot of a used unit of keys goes one of values, or keys again, depending on the number of slots.
    constexpr bool turns = memory::slots % 2 == 1;
    constexpr std::integral_constant<tensor, turns ? tensor::value : tensor::key> after_keys;
    constexpr std::integral_constant<tensor, turns ? tensor::key : tensor::value> after_values;
#pragma unroll
    for (int i = 0; i < memory::slots; ++i)
        if (i % 2 == 0)
            feed.template issue<tensor::key>(ring, warp, id.lane);
        else
            feed.template issue<tensor::value>(ring, warp, id.lane);
    // Weights of units that no token fills stay zero.
    for (int i = id.lane; i < memory::weight_bytes / 4; i += warp_size)
        store_word(weights + 4u * static_cast<std::uint32_t>(i), 0);

    int slot = 0;
    const auto next_unit = [&](auto role) {
        __syncwarp();
        feed.template issue<decltype(role)::value>(ring, warp, id.lane);
        slot = slot + 1 == memory::slots ? 0 : slot + 1;
    };
    const auto wait_unit = [&] {
        copy_wait<memory::slots - 1>();
        __syncwarp();
        return ring + static_cast<std::uint32_t>(slot * memory::slot_bytes);
    };

    while (!walk.done()) {
        const item_part item = walk.item;
        query_part.store(query, a.scale);
        __syncthreads();
        const std::uint32_t query_at = shared_address(query + id.g / 2 * memory::query_stride);
        const int length = a.work.tokens[item.sequence];
        const int first_row = item.row_block * rows, last_row = smaller(first_row + rows, a.rows) - 1;
        // Tokens that every row sees: [common_begin, common_end); that some row sees: [any_begin, any_end).
        const int any_begin = a.row_begin(length, first_row), common_begin = a.row_begin(length, last_row);
        const int common_end = a.row_end(length, first_row), any_end = a.row_end(length, last_row);
        warp_state<values, Rows4> state;
        state.clear();
        folded_row<keys> folded[Rows4];
        constexpr bool fold_once = keys::full || keys::token_parameters;
        constexpr int tiles_of_run =
            fold_once ? keys::tiles : smaller(keys::tiles, keys::group / keys::tile_height);
        if constexpr (fold_once) fold_rows(folded, query_at, memory::query_stride, 0, 0, id);

        for (int index = item.from + warp; index < item.to; index += memory::warps) {
            std::uint32_t at = wait_unit();
            const bool present = ((feed.present >> slot) & 1u) != 0;  // held in this format
            const int first = (item.first + index) * memory::tokens;
            float scores[keys::tiles][Rows4][4];
            chunk_factors<values, Rows4> factors;
            bool masked = false;
            if (present) {
                static_for<keys::tiles>([&](auto tile) {
                    constexpr int Tile = decltype(tile)::value;
                    if constexpr (!fold_once && Tile % tiles_of_run == 0)
                        fold_rows(folded, query_at, memory::query_stride, at, Tile / tiles_of_run, id);
                    score_tile<keys, Rows4, Tile>(scores[Tile], folded, at, id);
                });
                if (a.softcap > 0.0f) {
#pragma unroll
                    for (int i = 0; i < keys::tiles * Rows4 * 4; ++i) {
                        float& s = scores[i / (4 * Rows4)][i / 4 % Rows4][i % 4];
                        s = capped(s, a.softcap);
                    }
                }
                masked = first + memory::tokens > common_end || first < common_begin;
                if (masked) {
#pragma unroll
                    for (int n = 0; n < Rows4; ++n) {
                        const int row = first_row + 4 * n + id.t;
                        const int begin = a.row_begin(length, row),
                                  end = row < a.rows ? a.row_end(length, row) : 0;
#pragma unroll
                        for (int tile = 0; tile < keys::tiles; ++tile)
#pragma unroll
                            for (int r = 0; r < 4; ++r) {
                                const int token = first + tile * keys::tile_height + 4 * id.g + r;
                                if (token < begin || token >= end) scores[tile][n][r] = -INFINITY;
                            }
                    }
                }
                soften<keys, values, Rows4>(scores, state, factors, id);
            }
            next_unit(after_keys);
            at = wait_unit();
            if (present) {
                if (masked) {  // what tokens outside hold may be anything, even NaN
                    if constexpr (values::full)
                        values::clear_columns(at, id, any_begin - first, any_end - first);
                    else if constexpr (values::token_parameters)
                        values::clear_parameters(at, id, any_begin - first, any_end - first);
                    __syncwarp();
                }
                store_weights<keys, values, Rows4>(scores, state, factors, at, weights, id);
                __syncwarp();
                add_values<values, Rows4>(state, factors, at, weights, id);
            }
            next_unit(after_values);
        }

        walk.next();
        if (!walk.done()) query_part.fetch(a, walk.item);
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
