// Latent attention on tensor cores of compute capability 9.0: a tile is dequantized once, and both products
// read it.
//
//   producers   warps that turn pages into tiles of half floats (latent_tiles.cuh)
//   consumers   one or two warpgroups: scores, weights, output (latent_few_rows.cuh, latent_many_rows.cuh)
//
// Of a thread block and tile of 576 channels with 16 rows: 26 KB of pages (4 bits), 74 KB written to shared
// memory and as much read for each product, 1360 cycles of the tensor cores, which wait for shared memory
// (docs/lab/gpu_experiments.md).
// Contract: attend_latents() in latent.cuh. sm_90a; elsewhere the kernel is empty and its bound is 32
// threads.
// Source: latents read in place by both products: FlashMLA (DeepSeek, 2025).
#pragma once

#include "latent_few_rows.cuh"
#include "latent_many_rows.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

template <class Shape, class Args>
struct latent_producer;

#if KVQ_WARPGROUP_PRODUCTS

/// Writes the tiles of all pieces of a share. Warps take the units of one tile after the other in turn.
template <class Shape, class Args>
struct latent_producer {
    static constexpr int dim = Args::first_pair::head_dim, warps = Shape::producer_warps;
    using memory = latent_memory<dim, Shape>;
    const Args& args;
    std::uint32_t place;
    int warp;
    latent_lane own;
    int made = 0;  // tiles
    int turn = 0;  // the warp that has the first unit of the next tile
    int rank = 0;  // of the cluster

    __device__ __forceinline__ void piece(const latent_piece& p) {
        each_held(args, p,
                  [&](const auto& part, int first, int end) { tiles(part, p.sequence, first, end); });
    }

private:
    /// Of so many blocks of 64 channels, how many does this block of the cluster have?
    __device__ __forceinline__ int units_of_block(int all) const {
        return kvq::detail::smaller(kvq::detail::larger(all - 4 * rank, 0), 4) + (all > 8 ? 1 : 0);
    }
    /// Tiles of tokens [first, end) of a part.
    template <class Part>
    __device__ __forceinline__ void tiles(const Part& part, int sequence, int first, int end) {
        using pair = typename Part::pair_type;
        constexpr bool two = tile_units<pair>::two;
        using units = typename tile_units<pair>::first;
        using second_units = typename tile_units<pair>::second;
        constexpr int per = units::of_block, second_per = second_units::of_block;
        const int first_units = units_of_block(pair::first_channels / 64) * per;
        const int count = Shape::cluster == 1
                              ? units::count + (two ? second_units::count : 0)
                              : first_units + second_per * (units_of_block(dim / 64) -
                                                            units_of_block(pair::first_channels / 64));
        // Lanes have the pages of eight tiles, and of the next eight.
        constexpr int tile_slices = latent_tile / slice_tokens;
        const auto pages_at = [&](int token) {
            return page_of_lane(part, sequence, token, end, 32 * slice_tokens, own.lane);
        };
        const auto of_tile = [&](int pages, int slice) {
            return __shfl_sync(0xffffffffu, pages, (slice + own.lane) % 32);
        };
        const sequence_cut cut = cut_of(part.cuts, sequence);
        int pages = pages_at(first), next_pages = pages_at(first + 32 * slice_tokens), slice = 0;
#pragma unroll 1
        for (; first < end; first += latent_tile, ++made) {
            const auto at = latent_stage<memory>::of(place, made % Shape::stages);
            const int page = of_tile(pages, slice), ahead = slice + 2 * tile_slices,
                      ahead_page = of_tile(ahead < 32 ? pages : next_pages, ahead);
            const std::uint64_t shown =
                shown_of_tile(part, sequence, cut, first, end - first, page, own.lane);
            const latent_runs<pair> runs(part.cache, first, page);
            barrier_wait(at.free, static_cast<std::uint32_t>(made / Shape::stages + 1) & 1u);
            if (warp == 0 && own.lane == 0)
                latent_note{part.cache.first_token + first, static_cast<std::uint32_t>(shown),
                            static_cast<std::uint32_t>(shown >> 32)}
                    .store(at.note);
            const std::uint32_t second_tile =
                at.tile + static_cast<std::uint32_t>(pair::first_channels * latent_tile * 2);
            // Units of a warp. A block of a cluster has blocks of 64 channels 4 rank to 4 rank + 3, and 8.
            const auto each_unit = [&](auto&& of_first, auto&& of_second) {
#pragma unroll 1
                for (int unit = warp < turn ? warp - turn + warps : warp - turn; unit < count;
                     unit += warps) {
                    if constexpr (Shape::cluster == 1) {
                        if (unit < units::count)
                            of_first(unit, at.tile);
                        else if constexpr (two)
                            of_second(unit - units::count, second_tile);
                    } else {
                        const auto whole = [&](int i) { return i < 4 ? 4 * rank + i : 8; };
                        const auto from = [&](int local, int number) {
                            return at.tile + static_cast<std::uint32_t>((local - number) * 8192);
                        };
                        if (unit < first_units) {
                            const int i = unit / per, number = whole(i);
                            of_first(number * per + unit % per, from(i, number));
                        } else if constexpr (two) {
                            const int i = first_units / per + (unit - first_units) / second_per,
                                      number = whole(i) - pair::first_channels / 64;
                            of_second(number * second_per + (unit - first_units) % second_per,
                                      from(i, number));
                        }
                    }
                }
            };
            each_unit([&](int unit, std::uint32_t tile) { units::fetch(runs, unit, tile, own); },
                      [&](int unit, std::uint32_t tile) { second_units::fetch(runs, unit, tile, own); });
            copy_commit();
            if (rank == 0) prefetch(part, first + 2 * latent_tile, ahead_page);
            copy_wait<0>();
            __syncwarp();
            each_unit(
                [&](int unit, std::uint32_t tile) { units::store(runs, unit, tile, shown, own); },
                [&](int unit, std::uint32_t tile) { second_units::store(runs, unit, tile, shown, own); });
            publish_to_products();
            __syncwarp();
            if (own.lane == 0) barrier_arrive(at.full);
            turn = (turn + count) % warps;
            slice += tile_slices;
            if (slice == 32) {
                slice = 0;
                pages = next_pages;
                next_pages = pages_at(first + latent_tile + 32 * slice_tokens);
            }
        }
    }
    /// Asks for the pages that begin in a tile. page: of lane i, of tokens 16 i to 16 i + 15.
    template <class Part>
    __device__ __forceinline__ void prefetch(const Part& part, int first, int page) const {
        using pair = typename Part::pair_type;
        if (warp == made % warps && own.lane < latent_tile / slice_tokens && page >= 0 &&
            (first + own.lane * slice_tokens) % pair::page_tokens == 0)
            prefetch_bulk(part.cache.key_block(page, 0), static_cast<int>(pair::key_block_bytes));
    }
};

#endif

/// Producer: what turns pages into tiles.
template <class Shape, class Args, template <class, class> class Producer>
__global__ void __launch_bounds__((warpgroup_threads<Shape::threads>), 1)
    latent_wgmma_kernel([[maybe_unused]] const __grid_constant__ Args args) {
#if KVQ_WARPGROUP_PRODUCTS
    using memory = latent_memory<Args::first_pair::head_dim, Shape>;
    extern __shared__ __align__(1024) std::byte swizzled_memory[];
    const std::uint32_t place = shared_address(swizzled_memory);
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    launch_dependents();
    if (thread == 0)
        for (int i = 0; i < Shape::stages; ++i) {
            const auto stage = latent_stage<memory>::of(place, i);
            barrier_init(stage.full, Shape::stage_warps);
            barrier_init(stage.free, Shape::consumer_warps);
        }
    __syncthreads();
    const auto share = [&] {
        return latent_walk<Args>(args, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    };
    if (warp < Shape::producer_warps) {
        if constexpr (Shape::producer_registers != Shape::consumer_registers) leave_registers<Shape>();
        Producer<Shape, Args> producer{args, place, warp, lane};
        latent_walk<Args> walk = share();
        latent_piece piece;
        while (walk.next(piece)) producer.piece(piece);
    } else {
        if constexpr (Shape::producer_registers != Shape::consumer_registers) take_registers<Shape>();
        consume_latents<Shape>(args, place, warp - Shape::producer_warps, lane, share());
    }
#endif
}

}}}  // namespace kvq::cuda::detail
