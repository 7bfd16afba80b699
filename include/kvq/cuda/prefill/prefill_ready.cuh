// Tiles of a prompt's attention in device memory: a launch in front of it dequantizes every page once.
//
//   tile    as products read it in shared memory: keys, then values (prefill_tile.cuh)
//   note    of a tile: what consumers must know of it
//   range   tiles of a part, or of the new tokens, one behind the other
//   order   of the channels of queries and keys of a head (prefill_block::order)
//
//   scratch memory: [sequence][range] ranges, [sequence][tile] notes, [sequence][head] orders,
//   [sequence][head][tile] tiles. Heads: of a launch
//
// Of a tile of 128 tokens 64 KB are written once and read by every cluster, mostly from the second-level
// cache.
// Contract: tiles of all that rows of a sequence see. A sequence has no more than `columns` tiles: where it
// needs more, all its rows are NaN.
#pragma once

#include "prefill_rows.cuh"
#include "prefill_wgmma_memory.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Tiles that lie behind each other.
struct tile_range {
    int tiles;
    int first_token;  // of the first tile: counted from the first one of the part
    int part_token;   // the part's first one
    int kept;         // seen in spite of a window. Of the new tokens: there are more tiles than columns
};
static_assert(sizeof(tile_range) == 16 && sizeof(tile_note) == 16);

/// Where they are.
struct ready_tiles {
    std::byte* memory = nullptr;
    int sequences = 0, columns = 0, ranges = 0;  // columns, ranges: of a sequence
    int first_head = 0, heads = 0;               // of a launch
    int tile_bytes = 0;

    KVQ_HD std::size_t notes_at() const { return of_sequences(ranges) * sizeof(tile_range); }
    KVQ_HD std::size_t orders_at() const { return notes_at() + of_sequences(columns) * sizeof(tile_note); }
    KVQ_HD std::size_t tiles_at() const {
        return kvq::detail::round_up(orders_at() + of_sequences(heads) * sizeof(void*), std::size_t{1024});
    }
    KVQ_HD std::size_t bytes() const {
        return tiles_at() +
               of_sequences(columns) * static_cast<std::size_t>(heads) * static_cast<std::size_t>(tile_bytes);
    }
    __device__ __forceinline__ tile_range* range(int sequence, int i) const {
        return reinterpret_cast<tile_range*>(memory) + sequence * ranges + i;
    }
    __device__ __forceinline__ tile_note* note(int sequence, int tile) const {
        return reinterpret_cast<tile_note*>(memory + notes_at()) +
               static_cast<std::ptrdiff_t>(sequence) * columns + tile;
    }
    __device__ __forceinline__ const std::uint16_t** order(int sequence, int head) const {
        return reinterpret_cast<const std::uint16_t**>(memory + orders_at()) + sequence * heads + head -
               first_head;
    }
    __device__ __forceinline__ std::byte* tile(int sequence, int head, int tile) const {
        return memory + tiles_at() +
               (static_cast<std::size_t>(sequence * heads + head - first_head) *
                    static_cast<std::size_t>(columns) +
                static_cast<std::size_t>(tile)) *
                   static_cast<std::size_t>(tile_bytes);
    }

private:
    KVQ_HD std::size_t of_sequences(int n) const {
        return static_cast<std::size_t>(sequences) * static_cast<std::size_t>(n);
    }
};

/// What attention over them takes: the arguments of a call without its pages.
template <class Args>
struct ready_args : Args {
    ready_tiles ready;
};
/// Queries may have an order of channels.
template <class Args>
inline constexpr bool has_widths<ready_args<Args>> = true;

/// 16 bytes that the launch in front has written.
template <class X>
__device__ __forceinline__ X load_written(const X* from) {
    static_assert(sizeof(X) == 16);
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(from));
    return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), static_cast<int>(v.w)};
}

/// Calls f(tile of the sequence) for those that rows of a block see.
template <class Args, class F>
__device__ __forceinline__ void each_ready_tile(const Args& a, const prefill_block& block, int tile, F&& f) {
    int base = 0;
#pragma unroll 1
    for (int i = 0; i < a.ready.ranges; ++i) {
        const tile_range r = load_written(a.ready.range(block.sequence, i));
        if (i + 1 == a.ready.ranges) {
            const new_range range = a.new_tokens(block, tile);
#pragma unroll 1
            for (int first = range.begin(); first < range.end; first = range.behind(first, tile))
                if (first / tile < r.tiles) f(base + first / tile);
        } else {
            int n = 0;
            if (a.window.tokens > 0 && r.kept == 0)  // as tokens_of()
                n = kvq::detail::larger(
                        0, first_seen(a.cuts, block.sequence, kvq::detail::larger(0, a.seen_from(block))) -
                               r.part_token - r.first_token) /
                    tile;
#pragma unroll 1
            for (; n < r.tiles; ++n) f(base + n);
        }
        base += r.tiles;
    }
}

/// Does a sequence need more tiles than there is room for?
template <class Args>
__device__ __forceinline__ bool lacks_tiles(const Args& a, int sequence) {
    return load_written(a.ready.range(sequence, a.ready.ranges - 1)).kept != 0;
}

/// Of prefill_tiles_kernel: a block makes `tokens` tokens of a tile at a time; warps have keys or values.
inline constexpr int ready_role_warps = 4, ready_threads = 2 * 32 * ready_role_warps;

template <int Dim>
struct ready_memory {
    using shape = wgmma_shape<Dim>;
    static constexpr int tokens = 64, parts = shape::tile / tokens;
    /// Cells are given to so many warps, in passes.
    static constexpr int cell_warps = kvq::detail::larger(ready_role_warps, Dim / 32),
                         passes = cell_warps / ready_role_warps;
    static constexpr int part_bytes = tokens * Dim * 2;
    static constexpr int tables = 2 * part_bytes,
                         bytes = tables + ready_role_warps * (key_table_bytes + value_table_bytes);
    /// Of the keys, or the values, of a tile.
    static constexpr int role_bytes = shape::tile * Dim * 2, tile_bytes = 2 * role_bytes;
};

/// A part of a tile of a sequence and head: its keys, or its values.
template <tensor Role, int Dim, class Args>
struct ready_producer {
    using memory = ready_memory<Dim>;
    static constexpr bool key = Role == tensor::key;
    static constexpr int tile = memory::shape::tile, tokens = memory::tokens, rows = key ? tokens : Dim,
                         columns = key ? Dim : tokens;
    const Args& a;
    const prefill_block& block;
    const ready_tiles& to;
    std::uint32_t base;
    int warp, lane;    // of this role
    int number, part;  // of the tile

    template <class Part>
    __device__ __forceinline__ void pages(const Part& all, const token_range& range, int i, bool kept) {
        using pair = typename Part::pair_type;
        using cells_type = cells_of<Role, pair, rows, columns, memory::cell_warps, has_widths<Args>>;
        const int first = range.first + i * tile, count = kvq::detail::smaller(tile, range.end - first);
        const int page = page_of_lane(all, block.sequence, first, range.end, tile, lane);
        const unsigned held = __ballot_sync(0xffffffffu, page >= 0);
        write_note({all.cache.first_token + first, count, static_cast<int>(held), kept ? 1 : 0});
        const int own_page = __shfl_sync(0xffffffffu, page, lane + part * (tokens / slice_tokens));
        const tile_tokens own_tokens = tile_tokens::of(first + part * tokens, count - part * tokens,
                                                       lane < tokens / slice_tokens ? own_page : -1);
        const blocks_in_memory<Role, pair> source{&all.cache, block.kv_head, block.sequence};
#pragma unroll 1
        for (int pass = 0; pass < memory::passes; ++pass) {
            const int own_warp = warp + pass * ready_role_warps;
            const typename cells_type::lane_channel channel(all.cache, block.sequence, block.kv_head,
                                                            own_warp, lane,
                                                            has_widths<Args> ? block.order : nullptr);
            cells_type cells(channel);
            cells.fetch(source, own_tokens, own_warp, lane);
            cells.store(source, own(), own_tokens, table(), own_warp, lane);
        }
        copy_out();
    }
    __device__ __forceinline__ void new_tokens(int first) {
        const int count = kvq::detail::smaller(tile, block.new_tokens - first);
        write_note({block.history + first, count, -1, 0});
        copy_new_tile<Role, rows, columns, ready_role_warps>(
            key ? a.k : a.v, block.kv_head, block.start + first + part * tokens, count - part * tokens, own(),
            warp, lane, has_widths<Args> ? block.order : nullptr);
        copy_out();
    }

private:
    __device__ __forceinline__ std::uint32_t own() const {
        return base + static_cast<std::uint32_t>(key ? 0 : memory::part_bytes);
    }
    __device__ __forceinline__ std::uint32_t table() const {
        return base + static_cast<std::uint32_t>(memory::tables + (key ? warp * key_table_bytes
                                                                       : ready_role_warps * key_table_bytes +
                                                                             warp * value_table_bytes));
    }
    __device__ __forceinline__ void write_note(const tile_note& note) const {
        if (key && part == 0 && block.kv_head == to.first_head && warp == 0 && lane == 0)
            *to.note(block.sequence, number) = note;
    }
    __device__ __forceinline__ void copy_out() const {
        wait_at_barrier(key ? 1 : 2, ready_role_warps * 32);
        std::byte* const tile_at =
            to.tile(block.sequence, block.kv_head, number) + (key ? 0 : memory::role_bytes);
#pragma unroll 8
        for (int n = 0; n < memory::part_bytes / (ready_role_warps * 512); ++n) {
            const int at = (n * ready_role_warps + warp) * 512 + lane * 16;
            // Keys: of each 64 channels, rows of this part.
            const int there = key ? (at / (tokens * 128) * tile + part * tokens) * 128 + at % (tokens * 128)
                                  : part * memory::part_bytes + at;
            *reinterpret_cast<uint4*>(tile_at + there) =
                load_shared_16(own() + static_cast<std::uint32_t>(at));
        }
        wait_at_barrier(key ? 1 : 2, ready_role_warps * 32);  // before the next one is made here
    }
};

template <int Dim, class Args>
__global__ void __launch_bounds__(ready_threads, 3)
    prefill_tiles_kernel(const __grid_constant__ Args a, const __grid_constant__ ready_tiles to) {
    constexpr int tile = wgmma_shape<Dim>::tile, parts = ready_memory<Dim>::parts;
    extern __shared__ __align__(128) std::byte shared[];
    launch_dependents();
    const std::uint32_t memory = shared_address(shared);
    const int head = to.first_head + static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z);
    prefill_block block(a, 1 << 30, 0, head, sequence);
    if (block.empty()) return;
    find_order(a, block);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const bool leads = blockIdx.x == 0 && thread == 0;
    if (leads) *to.order(sequence, head) = block.order;
    // All ranges first: lengths are asked for together, and a block ends with its last tile.
    token_range ranges[decltype(a.parts)::count];
    int of_range = 0;
    each_part(a, [&](const auto& part) { ranges[of_range++] = tokens_of(a, part, block, tile); });
    of_range = 0;
    int number = static_cast<int>(blockIdx.x);  // of the parts of all tiles
    int base = 0;
    /// The own ones of the next n tiles.
    const auto produce = [&](int n, auto&& f) {
#pragma unroll 1
        for (; number < (base + n) * parts; number += static_cast<int>(gridDim.x)) {
            const int own = number / parts;
            if (warp < ready_role_warps) {
                ready_producer<tensor::key, Dim, Args> producer{a,    block, to,  memory,
                                                                warp, lane,  own, number % parts};
                f(producer, own - base);
            } else {
                ready_producer<tensor::value, Dim, Args> producer{
                    a, block, to, memory, warp - ready_role_warps, lane, own, number % parts};
                f(producer, own - base);
            }
        }
        base += n;
        ++of_range;
    };
    bool lacks = false;
    const auto room_for = [&](int n) {
        lacks = lacks || n > to.columns - base;
        return kvq::detail::smaller(n, to.columns - base);
    };
    const auto note_range = [&](const tile_range& range) {
        if (leads && head == to.first_head) *to.range(sequence, of_range) = range;
    };
    each_part(a, [&]<class Part>(const Part& part) {
        const token_range range = ranges[of_range];
        const bool kept = a.template keeps<Part>();
        const int n = room_for(range.tiles(tile));
        note_range({n, range.first, part.cache.first_token, kept ? 1 : 0});
        produce(n, [&](auto& own, int i) { own.pages(part, range, i, kept); });
    });
    const new_range range = a.new_tokens(block, tile);
    const int n = room_for(kvq::detail::ceil_div(range.end, tile));
    note_range({n, 0, 0, lacks ? 1 : 0});
    produce(n, [&](auto& own, int i) {
        if (i * tile < range.sinks || i * tile >= range.first) own.new_tokens(i * tile);
    });
}

}}}  // namespace kvq::cuda::detail
