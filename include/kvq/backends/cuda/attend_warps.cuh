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

#include <initializer_list>

#include "attention_args.cuh"
#include "merge.cuh"
#include "mixed_keys.cuh"

namespace kvq::inline v0_1::cuda {

namespace detail {

/// Tokens a warp takes at a time: as many as give units of at most 9 KB, so that several fit into flight. 16 query rows have
/// no registers for the scores of more than 64 tokens, 8 rows only where codes are few.
template <class Format, int Rows4>
constexpr int chunk_tokens() {
    constexpr int page = Format::page_tokens;
    int tokens = smaller(page, Rows4 == 4 ? 64 : 128);
    constexpr int least = smaller(32, page);  // a tile of keys
    constexpr int widest =
        static_cast<int>(larger(Format::key_block_bytes, Format::value_block_bytes)) / page;
    while (tokens > least && tokens * widest > 9216) tokens /= 2;
    if (Rows4 == 2 && tokens > 64 && tokens * widest > 5120) tokens /= 2;
    using values = chunk<tensor::value, Format, page>;
    if (!values::full && !values::token_parameters)
        while (tokens > least && tokens > values::group) tokens /= 2;
    while (tokens > least && page % tokens != 0) tokens /= 2;
    return tokens;
}

}  // namespace detail

/// Shared memory that a thread block of attend() may take, in bytes: what compute capability 8.0, 9.0 and 10.0 have.
/// Programs for 8.6, 8.9 and 12.0 specialize it for their formats: 99 * 1024.
template <class Format>
inline constexpr int shared_memory_budget = 163 * 1024;

namespace detail {

template <class Format>
inline constexpr bool warps_can = [] {
    const auto can = [](auto tokens) {
        return chunk<tensor::key, Format, tokens()>::supported &&
               chunk<tensor::value, Format, tokens()>::supported;
    };
    return can(std::integral_constant<int, chunk_tokens<Format, 1>()>{}) &&
           can(std::integral_constant<int, chunk_tokens<Format, 4>()>{});
}();

/// Shared memory of a thread block.
template <class Format, int Rows4>
struct attention_memory {
    static constexpr int tokens = chunk_tokens<Format, Rows4>();
    using keys = chunk<tensor::key, Format, tokens>;
    using values = chunk<tensor::value, Format, tokens>;
    using words = weight_words<values>;
    static constexpr int rows = 4 * Rows4;
    static constexpr int slot_bytes = round_up(larger(keys::bytes, values::bytes), 128);
    // Keys are done with their scratch when weights are written.
    static constexpr int scratch_at = words::padded ? round_up(words::words(Rows4) * 4, 16) : 0;
    static constexpr int weight_bytes =
        round_up(larger(words::words(Rows4) * 4, scratch_at + keys::scratch_bytes(Rows4)), 128);
    static constexpr int notes_bytes = 128;  // warp_notes
    static constexpr int query_stride = Format::head_dim;
    static constexpr int query_bytes = round_up(rows * query_stride * 4, 128);
    static constexpr int output_stride = Format::value_dim + 8;
    static constexpr int output_part = rows * output_stride;  // floats
    static constexpr int output_parts = Rows4 == 4 ? 2 : 4;   // add up to the output
    static constexpr int output_bytes = round_up(output_parts * output_part * 4, 128);

    struct size {
        int warps, slots;
        constexpr int warp_bytes() const { return slots * slot_bytes + weight_bytes + notes_bytes; }
        constexpr int bytes() const {
            return warps * warp_bytes() + query_bytes + output_bytes +
                   round_up(128 + (2 * warps + 2) * rows * 4, 128);
        }
    };
    /// One large thread block per multiprocessor leaves the fewest partial states and shares the work of an item best. Two
    /// units per warp are under way instead of three where memory is short; more warps pay where units are small.
    static constexpr size chosen = [] {
        for (const int warps : {Rows4 == 1 && slot_bytes <= 3072 ? 12 : 8, 4})
            for (const int slots : {3, 2})
                if (size{warps, slots}.bytes() <= shared_memory_budget<Format>) return size{warps, slots};
        return size{4, 2};
    }();
    static constexpr int warps = chosen.warps, slots = chosen.slots;
    static constexpr int threads = warps * warp_size;
    static constexpr int warp_bytes = size{warps, slots}.warp_bytes(), bytes = size{warps, slots}.bytes();
    /// Thread blocks per multiprocessor: what registers (at most 128 to 255 per thread) and memory allow.
    static constexpr int blocks = larger(1, smaller((Rows4 == 1 ? 12 : 8) / warps, 232448 / (bytes + 1024)));
    static constexpr int registers = smaller(255, 65536 / (threads * blocks));  // per thread
    /// Floats of one partial state in the workspace.
    static constexpr int partial_floats = rows * (Format::value_dim + 2);
};

/// What a warp needs once per item; it waits in shared memory.
struct warp_notes {
    walk_state reader, feeder;
    share_plan plan;
};

/// Feeds a warp's ring: key and value units of its chunks in turn, across items. Page numbers are fetched a chunk ahead.
template <class Memory, class Format, class T>
struct unit_feed {
    using keys = typename Memory::keys;
    using values = typename Memory::values;
    const attention_args<Format, T>& a;
    walk_state* parked;    // of the chunk after the current one
    int index, to;         // of that chunk, relative to its item; where the item's part ends
    int item_first, real;  // as in item_part
    const int* table;      // row of the item's sequence
    int next_page, next_first, next_head;
    int page, first, head;  // of the current chunk
    unsigned present = 0;   // bit per slot: does it hold a chunk?

    __device__ __forceinline__ unit_feed(const attention_args<Format, T>& args,
                                         const item_walk<Memory::tokens>& start, int warp, walk_state* notes)
        : a(args), parked(notes) {
        start.park(parked);
        take(start, warp);
        index -= Memory::warps;
        seek(warp);
        advance(warp);
    }
    /// Starts the next unit's copy into `slot` of the ring at `ring`.
    template <tensor Role>
    __device__ __forceinline__ void issue(std::uint32_t ring, int slot, int warp, int lane) {
        const std::uint32_t to_slot = ring + static_cast<std::uint32_t>(slot * Memory::slot_bytes);
        const unsigned bit = 1u << slot;
        if (page >= 0) {
            present |= bit;
            if constexpr (Role == tensor::key && keys::mixed)
                keys::copy(to_slot, a.cache.key_block(page, head), first, lane, a.cache.key_plan(head));
            else if constexpr (Role == tensor::key)
                keys::copy(to_slot, a.cache.key_block(page, head), first, lane);
            else
                values::copy(to_slot, a.cache.value_block(page, head), first, lane);
        } else {
            present &= ~bit;
        }
        copy_commit();
        if constexpr (Role == tensor::value) advance(warp);
    }

private:
    __device__ __forceinline__ void take(const item_walk<Memory::tokens>& walk, int warp) {
        index = walk.item.from + warp;
        to = walk.item.to;
        item_first = walk.item.first;
        real = walk.item.real;
        table = a.cache.block_table + static_cast<std::size_t>(walk.item.sequence) *
                                          static_cast<std::size_t>(a.cache.table_columns);
        next_head = walk.item.kv_head;
    }
    __device__ __forceinline__ void advance(int warp) {
        page = next_page;
        first = next_first;
        head = next_head;
        seek(warp);
    }
    __device__ __forceinline__ void seek(int warp) {
        index += Memory::warps;
        if (index >= to) {
            item_walk<Memory::tokens> walk(a.work);
            walk.fetch(parked);
            do {
                walk.next();
                if (walk.done()) {
                    to = 0x7fffffff;
                    index = real = 0;
                    break;
                }
                take(walk, warp);
            } while (index >= to);
            walk.park(parked);
        }
        next_page = -1;
        const int token = (item_first + index) * Memory::tokens;
        const int column = token / Format::page_tokens;
        if (index < real && column < a.cache.table_columns) {
            next_page = __ldg(table + column);
            next_first = token % Format::page_tokens;
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
    /// plan: of keys of mixed widths, which want channels in another order; or null.
    __device__ __forceinline__ void store(float* query, float scale,
                                          [[maybe_unused]] const std::uint16_t* plan) const {
#pragma unroll
        for (int i = 0; i < loads; ++i) {
            const int piece = i * Memory::threads + static_cast<int>(threadIdx.x);
            if (piece >= pieces) continue;
            const int row = piece / (Format::head_dim / per_load),
                      byte = piece % (Format::head_dim / per_load) * per_load * 4;
            if constexpr (Memory::keys::mixed)
                if (plan != nullptr) {
#pragma unroll
                    for (int k = 0; k < per_load; ++k)
                        *reinterpret_cast<float*>(
                            reinterpret_cast<std::byte*>(query + row * Format::head_dim) +
                            query_byte<Format::head_dim>(4 * static_cast<int>(plan[byte / 4 + k]))) =
                            to_float(values[i][k]) * scale;
                    continue;
                }
#pragma unroll
            for (int k = 0; k < per_load; k += 4)
                *reinterpret_cast<float4*>(reinterpret_cast<std::byte*>(query + row * Format::head_dim) +
                                           query_byte<Format::head_dim>(byte + 4 * k)) = {
                    to_float(values[i][k]) * scale, to_float(values[i][k + 1]) * scale,
                    to_float(values[i][k + 2]) * scale, to_float(values[i][k + 3]) * scale};
        }
    }
};

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
    if (!a.early) wait_for_predecessor();
    const lane_id id;
    // The shuffle tells the compiler that all lanes have the same number.
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / warp_size, 0);

    std::byte* const warp_memory = shared + warp * memory::warp_bytes;
    const std::uint32_t ring = shared_address(warp_memory);
    const std::uint32_t weights = ring + memory::slots * memory::slot_bytes;
    const std::uint32_t scratch = weights + memory::scratch_at;
    std::byte* const block_memory = shared + memory::warps * memory::warp_bytes;
    float* const query = reinterpret_cast<float*>(block_memory);
    float* const scalars =
        reinterpret_cast<float*>(block_memory + memory::query_bytes + memory::output_bytes);
    int* const flag = reinterpret_cast<int*>(scalars);
    float* const warp_max = scalars + 32;
    float* const warp_sum = warp_max + memory::warps * rows;
    const block_state merged{warp_sum + memory::warps * rows, warp_sum + memory::warps * rows + rows,
                             reinterpret_cast<float*>(block_memory + memory::query_bytes)};

    warp_notes* const notes =
        reinterpret_cast<warp_notes*>(warp_memory + memory::warp_bytes - memory::notes_bytes);
    item_walk<memory::tokens> walk(a.work);
    {
        const share_plan plan = find_share(a.work, a.cut, memory::warps, walk);
        if (id.lane == 0) notes->plan = plan;
    }
    if (walk.share_begin >= walk.share_end) return;

    unit_feed<memory, Format, T> feed(a, walk, warp, &notes->feeder);
    walk.park(&notes->reader);
    // Into the slot of a used unit of keys goes one of values, or keys again, depending on the number of slots.
    constexpr bool turns = memory::slots % 2 == 1;
    constexpr std::integral_constant<tensor, turns ? tensor::value : tensor::key> after_keys;
    constexpr std::integral_constant<tensor, turns ? tensor::key : tensor::value> after_values;
    if (a.early) {  // the warp's first two chunks may hold tokens that are just being written
        const int last = walk.item.from + warp + memory::warps;
        if (last >= walk.item.to || (walk.item.first + last + 1) * memory::tokens >
                                        a.work.end(walk.item.sequence) - a.work.query_tokens)
            wait_for_predecessor();
    }
#pragma unroll
    for (int i = 0; i < memory::slots; ++i)
        if (i % 2 == 0)
            feed.template issue<tensor::key>(ring, i, warp, id.lane);
        else
            feed.template issue<tensor::value>(ring, i, warp, id.lane);
    if (a.early) wait_for_predecessor();
    query_rows<memory, Format, T> query_part;
    query_part.fetch(a, walk.item);
    // Weights of units that no token fills stay zero.
    for (int i = id.lane; i < memory::weight_bytes / 4; i += warp_size)
        store_word(weights + 4u * static_cast<std::uint32_t>(i), 0);

    int slot = 0;
    const auto next_unit = [&](auto role) {
        __syncwarp();
        feed.template issue<decltype(role)::value>(ring, slot, warp, id.lane);
        slot = slot + 1 == memory::slots ? 0 : slot + 1;
    };
    const auto wait_unit = [&] {
        copy_wait<memory::slots - 1>();
        __syncwarp();
        return ring + static_cast<std::uint32_t>(slot * memory::slot_bytes);
    };

    while (true) {
        walk.fetch(&notes->reader);
        const item_part item = walk.item;
        query_part.store(query, a.scale, a.cache.key_plan(item.kv_head));
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
        if constexpr (fold_once<keys>) fold_rows(folded, query_at, memory::query_stride, 0, 0, 0, id);

        for (int index = item.from + warp; index < item.to; index += memory::warps) {
            std::uint32_t at = wait_unit();
            const bool present = ((feed.present >> slot) & 1u) != 0;  // held in this format
            const int first = (item.first + index) * memory::tokens, in_page = first % Format::page_tokens;
            float scores[keys::tiles][Rows4][4];
            chunk_factors<values, Rows4> factors;
            bool masked = false;
            if (present) {
                score_chunk(scores, folded, query_at, memory::query_stride, at, in_page, scratch,
                            a.cache.key_plan(item.kv_head), id);
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
                    else if constexpr (values::clears_parameters)
                        values::clear_parameters(at, id, any_begin - first, any_end - first);
                    __syncwarp();
                }
                store_weights<keys, values, Rows4>(scores, state, factors, at, weights, id);
                __syncwarp();
                add_values<values, Rows4>(state, factors, at, in_page, weights, id);
            }
            next_unit(after_values);
        }

        walk.fetch(&notes->reader);
        const item_part done = walk.item;
        const bool first_of_share = done.begin <= walk.share_begin;
        walk.next();
        const bool last = walk.done();
        if (!last) query_part.fetch(a, walk.item);
        walk.park(&notes->reader);
        merge_warps<memory, Rows4>(state, merged, warp_max, warp_sum, warp, id);
        if ((done.from == 0 && done.to == done.count))
            write_rows<memory, memory::output_parts>(a, done, merged);
        else
            write_partial<memory>(a, done, notes->plan, merged, first_of_share, flag);
        if (last) break;
        __syncthreads();
    }
    copy_wait<0>();
}

}  // namespace detail
}  // namespace kvq::inline v0_1::cuda
