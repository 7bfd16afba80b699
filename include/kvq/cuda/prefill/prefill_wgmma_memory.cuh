// Where the thread blocks of prefill_wgmma.cuh have tiles and barriers in shared memory, for each head size.
//
//   stages   tiles that bulk copies write and products read, each with its barriers
//
// Contract: at most 227 KB. Addresses are the same in both blocks of a cluster.
#pragma once

#include "../arch/wgmma.cuh"
#include "prefill_rows.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// How a head size is computed. Wide: tiles are shorter.
template <int Dim>
struct wgmma_shape {
    static constexpr bool wide = Dim > 128;
    static constexpr int cluster = 2;  // blocks that share tiles
    static constexpr int tile = wide ? 64 : 128;
    /// A stage holds a unit: all tokens of a tile, and so many channels. Where a warpgroup has no registers
    /// for all channels of the output (split), both have the same rows, and a unit of values each.
    static constexpr int unit_channels = kvq::detail::smaller(Dim, 256), units = Dim / unit_channels;
    static constexpr bool split = units > 1;
    static constexpr int stages = 2;  // of keys; as many of values
    static constexpr int rows = split ? 64 : 128, cluster_rows = cluster * rows;  // rows: of a block
    /// The first two warps of four ask for keys and for values.
    static constexpr int producer_warps = 4, consumer_warps = 8;
    static constexpr int threads = 32 * (producer_warps + consumer_warps);
    /// Of a thread, in all those of a multiprocessor.
    static constexpr int consumer_registers = 232, producer_registers = 40;
};

template <int Dim>
struct wgmma_memory {
    using shape = wgmma_shape<Dim>;
    static constexpr int query = 0, query_bytes = shape::rows * Dim * 2;
    static constexpr int unit_bytes = shape::tile * shape::unit_channels * 2;
    static constexpr int keys = query + query_bytes, values = keys + shape::stages * unit_bytes;
    /// Weights of a tile, where the warpgroups of consumers have half of the tokens each.
    static constexpr int weights = values + shape::stages * unit_bytes,
                         weight_bytes = shape::rows * shape::tile * 2;
    /// Notes and barriers of the stages.
    static constexpr int control = weights + (shape::split ? weight_bytes : 0);
    static constexpr int stage_bytes = static_cast<int>(sizeof(tile_note)) + 32;
    /// [warpgroup of consumers][row], floats.
    static constexpr int maxima = control + shape::stages * stage_bytes;
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

#endif

}}}  // namespace kvq::cuda::detail
