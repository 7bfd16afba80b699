// Latent attention on tensor cores of compute capability 9.0: a tile is dequantized once, and both products
// read it.
//
//   producers   warps that turn pages into tiles of half floats (latent_tiles.cuh)
//   consumers   one or two warpgroups: scores, weights, output (latent_few_rows.cuh, latent_many_rows.cuh)
//
// Of a thread block and tile of 576 channels with 16 rows: 26 KB of pages (4 bits), 74 KB written to shared
// memory and as much read for each product; the tensor cores wait for shared memory.
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
    /// Tiles of tokens [first, end) of a part.
    template <class Part>
    __device__ __forceinline__ void tiles(const Part& part, int sequence, int first, int end) {
        using pair = typename Part::pair_type;
        // Warps of a cluster have registers for 64 tokens of 8 bits.
        using all_units = tile_units<pair, Shape::cluster == 2>;
        constexpr bool two = all_units::two;
        using units = typename all_units::first;
        using second_units = typename all_units::second;
        constexpr int per_first = units::of_block, per_second = second_units::of_block,
                      first_blocks = pair::first_channels / 64, blocks = dim / 64;
        // Of a block of the cluster: channels 256 rank to 256 rank + 255; of a ninth block of 64 channels
        // half of the tokens, or every other tile.
        constexpr bool ninth = blocks > 8, ninth_of_first = first_blocks > 8,
                       ninth_halves = (ninth_of_first ? units::of_block : second_units::of_block) == 2;
        const auto blocks_of = [](int all, int of_rank) {
            return kvq::detail::smaller(kvq::detail::larger(all - 4 * of_rank, 0), 4);
        };
        const int own_first = blocks_of(first_blocks, rank) * per_first,
                  own_second = (blocks_of(blocks, rank) - blocks_of(first_blocks, rank)) * per_second;
        const auto has_ninth = [&](int of_rank, int tile) {
            return ninth && (ninth_halves || tile % 2 == of_rank);
        };
        const auto count_of = [&](int tile) {
            if constexpr (Shape::cluster == 1)
                return units::count + (two ? second_units::count : 0);
            else
                return own_first + own_second + (has_ninth(rank, tile) ? 1 : 0);
        };
        // Units of a warp. turn: the warp that has the first one.
        const auto each_unit = [&](int tile, int from_turn, std::uint32_t at, auto&& of_first,
                                   auto&& of_second) {
            [[maybe_unused]] const std::uint32_t second_at =
                at + static_cast<std::uint32_t>(pair::first_channels * latent_tile * 2);
            const int count = count_of(tile);
#pragma unroll 1
            for (int unit = first_unit(from_turn); unit < count; unit += warps) {
                if constexpr (Shape::cluster == 1) {
                    if (unit < units::count)
                        of_first(unit, at);
                    else if constexpr (two)
                        of_second(unit - units::count, second_at);
                } else {
                    const int ninth_half = ninth_halves ? rank : 0;
                    if (unit < own_first)
                        of_first(unit + 4 * rank * per_first, at);
                    else if (ninth_of_first && unit == own_first)
                        of_first(8 * per_first + ninth_half, at);
                    else if constexpr (two)
                        of_second(unit - own_first < own_second
                                      ? unit - own_first +
                                            kvq::detail::larger(4 * rank - first_blocks, 0) * per_second
                                      : (8 - first_blocks) * per_second + ninth_half,
                                  second_at);
                }
            }
        };
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
        const auto free_of = [&](int tile) {
            return latent_stage<memory>::of(place, tile % Shape::stages).free;
        };
        const auto free_parity = [](int tile) {
            return static_cast<std::uint32_t>(tile / Shape::stages + 1) & 1u;
        };
        const auto fetch = [&](int tile, int from_turn, const latent_runs<pair>& runs) {
            each_unit(
                tile, from_turn, latent_stage<memory>::of(place, tile % Shape::stages).tile,
                [&](int unit, std::uint32_t to) { units::fetch(runs, unit, to, own); },
                [&](int unit, std::uint32_t to) { second_units::fetch(runs, unit, to, own); });
        };
        bool fetched = false;
#pragma unroll 1
        for (; first < end; first += latent_tile, ++made) {
            const auto at = latent_stage<memory>::of(place, made % Shape::stages);
            const int page = of_tile(pages, slice), ahead = slice + 2 * tile_slices,
                      ahead_page = of_tile(ahead < 32 ? pages : next_pages, ahead);
            const std::uint64_t shown =
                shown_of_tile(part, sequence, cut, first, end - first, page, own.lane);
            const latent_runs<pair> runs(part.cache, first, page);
            const int next_turn = (turn + count_of(made)) % warps;
            const auto store_note = [&] {
                if (warp == 0 && own.lane == 0)
                    latent_note{part.cache.first_token + first, static_cast<std::uint32_t>(shown),
                                static_cast<std::uint32_t>(shown >> 32)}
                        .store(at.note);
            };
            if (!fetched) {
                barrier_wait(at.free, free_parity(made));
                // Behind the copies it costs records 5 %: the compiler makes something else of both.
                if constexpr (Shape::cluster == 1) store_note();
                fetch(made, turn, runs);
            }
            if constexpr (Shape::cluster == 2) store_note();
            copy_commit();
            if (rank == 0) prefetch(part, first + 2 * latent_tile, ahead_page);
            if constexpr (Shape::cluster == 2) {
                // What the next tile needs comes meanwhile, if its place is free.
                fetched =
                    first + latent_tile < end && barrier_passed(free_of(made + 1), free_parity(made + 1));
                if (fetched)
                    fetch(made + 1, next_turn,
                          latent_runs<pair>(
                              part.cache, first + latent_tile,
                              of_tile(slice + tile_slices < 32 ? pages : next_pages, slice + tile_slices)));
                copy_commit();
                copy_wait<1>();
            } else {
                copy_wait<0>();
            }
            __syncwarp();
            if constexpr (Shape::cluster == 2 && units::full && !two) {
                const auto number = [&](int unit) {
                    return unit < own_first ? unit + 4 * rank * per_first : 8 * per_first + rank;
                };
                const int count = count_of(made);
#pragma unroll 1
                for (int unit = first_unit(turn); unit < count; unit += 2 * warps) {
                    const int a = number(unit), b = number(unit + warps);
                    if (unit + warps < count) {
                        units::store_two(a, b, at.tile, shown, own);
                        send(units::place(at.tile, a), units::bytes);
                        copy_to_other(units::place(at.tile, b), units::bytes);
                    } else {
                        units::store(runs, a, at.tile, shown, own);
                        send(units::place(at.tile, a), units::bytes);
                    }
                }
            } else {
                each_unit(
                    made, turn, at.tile,
                    [&](int unit, std::uint32_t tile) {
                        units::store(runs, unit, tile, shown, own);
                        send(units::place(tile, unit), units::bytes);
                    },
                    [&](int unit, std::uint32_t tile) {
                        second_units::store(runs, unit, tile, shown, own);
                        send(second_units::place(tile, unit), second_units::bytes);
                    });
            }
            publish_to_products();
            __syncwarp();
            if (own.lane == 0) {
                if constexpr (Shape::cluster == 2)
                    if (warp == 0)  // so many bytes come from the other block
                        barrier_expect(arrived_at(),
                                       blocks_of(blocks, rank ^ 1) * 8192 +
                                           (has_ninth(rank ^ 1, made) ? ninth_halves ? 4096 : 8192 : 0));
                barrier_arrive(at.full);
            }
            turn = next_turn;
            slice += tile_slices;
            if (slice == 32) {
                slice = 0;
                pages = next_pages;
                next_pages = pages_at(first + latent_tile + 32 * slice_tokens);
            }
        }
    }
    /// turn: the warp that has the first unit of a tile.
    __device__ __forceinline__ int first_unit(int of_turn) const {
        return warp < of_turn ? warp - of_turn + warps : warp - of_turn;
    }
    /// Counts what the other block sends of this tile.
    __device__ __forceinline__ std::uint32_t arrived_at() const {
        return place + static_cast<std::uint32_t>(memory::arrived + made % Shape::stages * 8);
    }
    /// A unit is there, for the other block of the cluster too.
    __device__ __forceinline__ void send(std::uint32_t from, int bytes) const {
        if constexpr (Shape::cluster == 2) {
            publish_to_products();
            __syncwarp();
            copy_to_other(from, bytes);
        }
    }
    __device__ __forceinline__ void copy_to_other(std::uint32_t from, int bytes) const {
        if (own.lane == 0)
            copy_bulk_to(place_in(rank ^ 1, from), from, bytes, place_in(rank ^ 1, arrived_at()));
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
    if (thread == 0)
        for (int i = 0; i < Shape::stages; ++i) {
            const auto stage = latent_stage<memory>::of(place, i);
            barrier_init(stage.full, Shape::stage_warps);
            barrier_init(stage.free, Shape::consumer_warps);
        }
    __syncthreads();
    wait_for_predecessor();
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
