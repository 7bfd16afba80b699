// Where the thread blocks of prefill_wgmma.cuh have tiles, blocks of pages, tables and barriers in shared
// memory, for each head size.
//
//   stages   tiles that producers write and products read, each with its barriers
//   slots    blocks of pages as they are, on their way to a tile (up to 128 channels)
//
// Contract: at most 227 KB. Addresses are the same in both blocks of a cluster.
#pragma once

#include "../arch/wgmma.cuh"
#include "prefill_octets.cuh"
#include "prefill_rows.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// How a head size is computed. Wide: tiles are shorter, blocks of a cluster share them by channels, not by
/// tokens, and words come right from pages.
/// Ready: tiles come from device memory as they are (prefill_ready.cuh).
template <int Dim, bool Ready = false>
struct wgmma_shape {
    static constexpr bool wide = Dim > 128, ready = Ready;
    static constexpr int cluster = 2;  // blocks that share tiles
    static constexpr int tile = wide ? 64 : 128, half_tile = tile / 2;
    /// A stage holds a unit: all tokens of a tile, and so many channels. Where a warpgroup has no registers
    /// for all channels of the output (split), both have the same rows, and a unit of values each.
    static constexpr int unit_channels = kvq::detail::smaller(Dim, 256), units = Dim / unit_channels;
    static constexpr bool split = units > 1;
    static constexpr int stages = 2;  // of keys; as many of values
    static constexpr int rows = split ? 64 : 128, cluster_rows = cluster * rows;  // rows: of a block
    static constexpr int role_warps = Ready || Dim == 256 ? 2 : 4;  // produce keys; as many produce values
    static constexpr int producer_warps = 2 * role_warps, consumer_warps = 8;
    static constexpr int threads = 32 * (producer_warps + consumer_warps);
    /// Of a thread, in all those of a multiprocessor; with fewer, products of wide tiles do not overlap.
    static constexpr int consumer_registers = Ready        ? 232
                                              : Dim == 256 ? 208
                                              : wide       ? 176
                                                           : 192,
                         producer_registers = Ready        ? 40
                                              : Dim == 256 ? 88
                                              : wide       ? 80
                                                           : 64;
    /// Wide: 32 channels of a tile are a warp's cells at a time. Of those of a unit, a block of a cluster has
    /// its share, which a role's warps take one after the other.
    static constexpr int share = unit_channels / 32 / cluster, passes = share / role_warps;
};
/// Blocks of pages as they are, on their way to a tile: a slot has those of half a tile of keys or values.
inline constexpr int block_slots = 2, block_slot_bytes = 16 * 1024;

template <int Dim, bool Ready = false>
struct wgmma_memory {
    using shape = wgmma_shape<Dim, Ready>;
    static constexpr int query = 0, query_bytes = shape::rows * Dim * 2;
    static constexpr int unit_bytes = shape::tile * shape::unit_channels * 2;
    static constexpr int keys = query + query_bytes, values = keys + shape::stages * unit_bytes;
    static constexpr int slots_at = values + shape::stages * unit_bytes;
    /// Weights of a tile, where the warpgroups of consumers have half of the tokens each.
    static constexpr int weights = slots_at + (shape::wide || Ready ? 0 : 2 * block_slots * block_slot_bytes),
                         weight_bytes = shape::rows * shape::tile * 2;
    static constexpr int tables = weights + (shape::split ? weight_bytes : 0);
    // Notes and barriers of the stages, barriers of the slots.
    static constexpr int key_table = shape::wide ? octet_table_bytes : key_table_bytes,
                         value_table = shape::wide ? octet_table_bytes : value_table_bytes;
    static constexpr int control = tables + (Ready ? 0 : shape::role_warps * (key_table + value_table));
    static constexpr int stage_bytes = static_cast<int>(sizeof(tile_note)) + 32;
    static constexpr int slot_barriers = control + shape::stages * stage_bytes;
    /// [warpgroup of consumers][row], floats.
    static constexpr int maxima = slot_barriers + 2 * block_slots * 8;
    static constexpr int bytes = maxima + (shape::split ? 2 * shape::rows * 4 : 0);
    static_assert(bytes <= 227 * 1024);
};

#if KVQ_WARPGROUP_PRODUCTS

/// Addresses in shared memory, and which block of the cluster this is.
struct wgmma_place {
    std::uint32_t tiles;
    int rank;
};

/// Barriers of a stage: keys there, keys read, values there, values read. Both blocks of a cluster use the
/// same addresses.
struct wgmma_stage {
    std::uint32_t keys, values, note, full_keys, free_keys, full_values, free_values;

    template <class Memory>
    __device__ __forceinline__ static wgmma_stage of(const wgmma_place& place, int i, Memory) {
        const auto u = [](int x) { return static_cast<std::uint32_t>(x); };
        const std::uint32_t control = place.tiles + u(Memory::control + i * Memory::stage_bytes),
                            b = control + u(sizeof(tile_note));
        return {place.tiles + u(Memory::keys + i * Memory::unit_bytes),
                place.tiles + u(Memory::values + i * Memory::unit_bytes),
                control,
                b,
                b + 8,
                b + 16,
                b + 24};
    }
};

/// A block of a page in shared memory, for cells.
struct block_in_shared {
    std::uint32_t at;

    __device__ __forceinline__ block_in_shared from(std::size_t byte) const {
        return {at + static_cast<std::uint32_t>(byte)};
    }
    template <int Bytes>
    __device__ __forceinline__ std::uint32_t get(int byte) const {
        const std::uint32_t from = at + static_cast<std::uint32_t>(byte);
        if constexpr (Bytes == 1)
            return load_shared_1(from);
        else if constexpr (Bytes == 2)
            return load_shared_2(from);
        else
            return load_shared_4(from);
    }
    __device__ __forceinline__ uint2 two(int byte) const {
        return load_shared_8(at + static_cast<std::uint32_t>(byte));
    }
};
/// The blocks of half a tile: one, or several of small pages, or one with the other half.
template <tensor Role, class Pair>
struct blocks_in_slot {
    static constexpr int half_tile = wgmma_shape<128>::half_tile, tile = 2 * half_tile;
    static constexpr int page_tokens = Pair::page_tokens,
                         count = kvq::detail::larger(1, half_tile / page_tokens);
    static constexpr int block_bytes =
        static_cast<int>(Role == tensor::key ? Pair::key_block_bytes : Pair::value_block_bytes);
    /// Other blocks are read from device memory.
    static constexpr bool fit = !has_lower<Pair> && (half_tile % page_tokens == 0 || page_tokens == tile) &&
                                count * block_bytes <= block_slot_bytes;
    static constexpr bool shared = true;

    std::uint32_t at;
    __device__ __forceinline__ int page(const tile_tokens&, int) const { return 0; }
    __device__ __forceinline__ static bool any(const tile_tokens&) { return true; }
    __device__ __forceinline__ static std::uint32_t existing(const tile_tokens& tile, int first) {
        return existing_columns(tile.count - first);
    }
    __device__ __forceinline__ block_in_shared block(int, int token_of_tile) const {
        return {at +
                (count == 1 ? 0u : static_cast<std::uint32_t>(token_of_tile / page_tokens * block_bytes))};
    }
};

#endif

}}}  // namespace kvq::cuda::detail
