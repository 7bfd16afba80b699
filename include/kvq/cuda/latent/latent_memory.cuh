// Shared memory of latent attention on tensor cores, and what its consumers have in common.
//
//   query | tiles, two stages | weights | numbers that warps tell each other | notes and barriers of stages
//
// Contract: at most 227 KB for 576 channels. Tiles: latent_tiles.cuh.
#pragma once

#include "../prefill/prefill_new_tile.cuh"
#include "latent_tiles.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// How a number of query rows is computed.
///
///   few    a warpgroup of consumers has up to 32 rows: tokens and channels are the rows of its products
///          (latent_few_rows.cuh)
///   many   two warpgroups have the same 64 rows, half of the tokens of a tile and half of the channels each
///          (latent_many_rows.cuh)
template <int Rows>
struct latent_shape {
    static constexpr int rows = Rows, stages = 2, cluster = 1;
    static constexpr bool many = Rows > 32;
    static constexpr int groups = many ? 2 : 1;  // of consumers
    static constexpr int producer_warps = many ? 8 : 12, consumer_warps = 4 * groups;
    static constexpr int stage_warps = producer_warps;  // that write a tile together
    static constexpr int threads = 32 * (producer_warps + consumer_warps);
    /// Of a thread.
    static constexpr int producer_registers = many        ? 80
                                              : Rows > 16 ? 88
                                                          : 112,
                         consumer_registers = many        ? 176
                                              : Rows > 16 ? 240
                                                          : 168;
    /// Weights of a tile are written while products may still read those before, unless memory is short.
    static constexpr int weight_buffers = many ? 1 : 2;
};

/// 128 rows: a cluster of two thread blocks with 64 each, of which each makes half of every tile for both
/// (latent_cluster.cuh).
struct latent_cluster_shape {
    static constexpr int rows = 128, stages = 2, cluster = 2, groups = 2;
    static constexpr int producer_warps = 4, consumer_warps = 8, stage_warps = producer_warps;
    static constexpr int threads = 32 * (producer_warps + consumer_warps);
    static constexpr int producer_registers = 120, consumer_registers = 192;
};

template <int Dim, class Shape>
struct latent_memory {
    static constexpr int query = 0, query_bytes = Shape::rows * Dim * 2;
    static constexpr int tiles = query_bytes, tile_bytes = latent_tile * Dim * 2;
    static constexpr int weights = tiles + Shape::stages * tile_bytes,
                         weight_bytes = Shape::rows * latent_tile * 2;
    static constexpr int numbers = weights + Shape::weight_buffers * weight_bytes;
    /// What warps or warpgroups tell each other: a number of each and every row.
    static constexpr int number_bytes = (Shape::many ? 2 : 4) * Shape::rows * 4;
    static constexpr int notes = numbers + number_bytes;
    static constexpr int barriers = notes + Shape::stages * 16;
    static constexpr int bytes = barriers + Shape::stages * 16;
    static_assert(Dim > 576 || bytes <= most_shared_memory<false>);
};

/// query of the block's 64 rows | tiles | weights | numbers | notes and barriers of stages | barriers of
/// weights, and of halves of tiles that the other block sends
template <int Dim, class Shape>
requires(Shape::cluster == 2) struct latent_memory<Dim, Shape> {
    static constexpr int query = 0, query_bytes = 64 * Dim * 2;
    static constexpr int tiles = query_bytes, tile_bytes = latent_tile * Dim * 2;
    static constexpr int weights = tiles + Shape::stages * tile_bytes, weight_bytes = 64 * latent_tile * 2;
    static constexpr int numbers = weights + weight_bytes;  // maxima and sums of every row
    static constexpr int notes = numbers + 2 * 64 * 4;
    static constexpr int barriers = notes + Shape::stages * 16;
    static constexpr int ready = barriers + Shape::stages * 16;
    static constexpr int arrived = ready + 2 * 8;
    static constexpr int bytes = arrived + Shape::stages * 8;
    static_assert(Dim > 576 || bytes <= most_shared_memory<false>);
};

template <class Memory>
struct latent_stage {
    std::uint32_t tile, note, full, free;

    __device__ __forceinline__ static latent_stage of(std::uint32_t memory, int i) {
        const auto at = [&](int offset) { return memory + static_cast<std::uint32_t>(offset); };
        return {at(Memory::tiles + i * Memory::tile_bytes), at(Memory::notes + i * 16),
                at(Memory::barriers + i * 16), at(Memory::barriers + i * 16 + 8)};
    }
};

/// Query rows of a sequence from `first` on as half floats, as tensor cores read them. Rows that do not exist
/// are zero.
template <int Rows, int Dim, class Args>
__device__ __forceinline__ void load_latent_queries(const Args& a, int sequence, int first, std::uint32_t to,
                                                    int thread, int threads) {
    const auto load = [&]<bool Aligned>(std::bool_constant<Aligned>) {
#pragma unroll(Aligned ? 9 : 1)
        for (int i = thread; i < Rows * (Dim / 8); i += threads) {
            const int own = i / (Dim / 8), octet = i % (Dim / 8), row = first + own,
                      held = kvq::detail::smaller(row, a.rows - 1);
            std::uint32_t x[4];
            load_halves<Aligned>(a.q.at(a.row_token(sequence, held), a.row_head(0, held)) + octet * 8, x);
            if (row >= a.rows) x[0] = x[1] = x[2] = x[3] = 0;
            store_shared_16(
                to + octet_offset<Rows>(own, octet),
                {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]), __uint_as_float(x[3])});
        }
    };
    if (rows_aligned(a.q))
        load(std::true_type{});
    else
        load(std::false_type{});
}

/// What a tile shows, as its producers note it.
struct latent_note {
    int position;             // paged, of its first token
    std::uint32_t low, high;  // bit i: token i, token 32 + i

    __device__ __forceinline__ void store(std::uint32_t at) const {
        store_shared_16(at, {__int_as_float(position), __uint_as_float(low), __uint_as_float(high), 0.0f});
    }
    __device__ __forceinline__ static latent_note load(std::uint32_t at) {
        const uint4 v = load_shared_16(at);
        return {static_cast<int>(v.x), v.y, v.z};
    }
    __device__ __forceinline__ std::uint64_t shown() const {
        return static_cast<std::uint64_t>(high) << 32 | low;
    }
    /// Do all rows see all of it? end: all rows see what stands before this paged position.
    __device__ __forceinline__ bool is_whole(int end) const {
        return (low & high) == ~0u && position + latent_tile <= end;
    }
};
/// Weights are relative to a maximum that is raised where a score is more than 2 to this power times above
/// it.
inline constexpr float latent_slack = 8.0f;

}}}  // namespace kvq::cuda::detail
