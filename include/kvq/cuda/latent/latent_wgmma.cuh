// Latent attention on tensor cores of compute capability 9.0: a tile is dequantized once, and both products
// read it.
//
//   producers   two times four warps that turn pages into tiles of half floats (latent_tiles.cuh)
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

#if KVQ_WARPGROUP_PRODUCTS

/// Writes the tiles of all pieces of a share: four warps those of a stage, so that some wait for memory while
/// others dequantize.
template <class Shape, class Args>
struct latent_producer {
    static constexpr int dim = Args::first_pair::head_dim, warps = Shape::stage_warps;
    using memory = latent_memory<dim, Shape>;
    const Args& args;
    std::uint32_t place;
    int stage, warp, lane;  // warp: of the stage
    int made = 0;           // tiles of all stages

    __device__ __forceinline__ void piece(const latent_piece& p) {
        int before = 0;  // tiles of parts before
        each_part(args, [&]<class Part>(const Part& part) {
            const token_range range = held_tokens(part, p.sequence, p.length, args.recent);
            const int count = range.tiles(latent_tile), from = kvq::detail::larger(p.from - before, 0),
                      to = kvq::detail::smaller(p.to - before, count);
            if (from < to) {
                const int own = (stage - made) & (Shape::stages - 1);  // the first tile of this stage
                tiles(part, p.sequence, range.first + (from + own) * latent_tile,
                      kvq::detail::smaller(range.end, range.first + to * latent_tile), made + own);
                made += to - from;
            }
            before += count;
        });
    }

private:
    /// Every so-manieth tile of tokens [first, end) of a part; number: of the first one.
    template <class Part>
    __device__ __forceinline__ void tiles(const Part& part, int sequence, int first, int end, int number) {
        using pair = typename Part::pair_type;
        using first_pair = typename pair::first_pair;
        constexpr bool full = full_precision<typename pair::keys>, two = pair::second_channels > 0;
        using second_pair = std::conditional_t<two, typename pair::second_pair, first_pair>;
        constexpr int tile = latent_tile, step = Shape::stages * tile;
        if (first >= end) return;
        const std::uint32_t table =
            place + static_cast<std::uint32_t>(memory::tables + (stage * warps + warp) * latent_table_bytes);
        const auto at = latent_stage<memory>::of(place, stage);
        const auto page_at = [&](int token) { return page_of_lane(part, sequence, token, end, tile, lane); };
        const auto tokens_at = [&](int token, int page) {
            return tile_tokens::of(token, kvq::detail::smaller(tile, end - token), page);
        };
        latent_units<first_pair, pair::first_channels, warps, full ? Shape::value_words : Shape::code_words>
            units;
        latent_units<second_pair, two ? pair::second_channels : 64, warps, 0> second;
        tile_tokens now = tokens_at(first, page_at(first));
        int next_page = page_at(first + step), ahead_page = page_at(first + 2 * step);
        latent_blocks<0> blocks = blocks_of_tile(part.cache, now, lane);
        const auto second_blocks = [&] {
            return latent_blocks<pair::second_block>{{blocks.at[0], blocks.at[1]}};
        };
        int own = warp, own_lane = lane;
        const auto fetch = [&] {
            units.fetch(blocks, now, own, own_lane);
            if constexpr (two && !Shape::many) second.fetch(second_blocks(), now, own, own_lane);
        };
        fetch();
#pragma unroll 1
        for (; first < end; first += step, number += Shape::stages) {
            const std::uint64_t shown = shown_of_tile(part, sequence, first, now.count, now.page, lane);
            barrier_wait(at.free, static_cast<std::uint32_t>(number / Shape::stages + 1) & 1u);
            if (warp == 0 && lane == 0)
                latent_note{part.cache.first_token + first, static_cast<std::uint32_t>(shown),
                            static_cast<std::uint32_t>(shown >> 32)}
                    .store(at.note);
            // Otherwise the places of all units are computed before the loop, and take registers.
            asm volatile("" : "+r"(own), "+r"(own_lane));
            units.store(blocks, now, shown, at.tile, table, own, own_lane);
            if constexpr (two && Shape::many) second.fetch(second_blocks(), now, own, own_lane);
            if constexpr (two)
                second.store(second_blocks(), now, shown,
                             at.tile + static_cast<std::uint32_t>(pair::first_channels * tile * 2), table,
                             own, own_lane);
            publish_to_products();
            __syncwarp();
            if (lane == 0) barrier_arrive(at.full);
            if (first + step >= end) break;
            now = tokens_at(first + step, next_page);
            blocks = blocks_of_tile(part.cache, now, lane);
            fetch();
            if (warp == warps - 1) prefetch(part, first + 2 * step, ahead_page);
            next_page = ahead_page;
            ahead_page = page_at(first + 3 * step);
        }
    }
    /// Asks for the pages that begin in a tile. page: of 16 tokens a lane.
    template <class Part>
    __device__ __forceinline__ void prefetch(const Part& part, int first, int page) const {
        using pair = typename Part::pair_type;
        constexpr int bytes = static_cast<int>(pair::key_block_bytes),
                      step = kvq::detail::round_up(bytes, 512) / 32;
        unsigned begin =
            __ballot_sync(0xffffffffu, page >= 0 && (first + lane * slice_tokens) % pair::page_tokens == 0);
        while (begin != 0) {
            const int number = __shfl_sync(0xffffffffu, page, __ffs(static_cast<int>(begin)) - 1);
            begin &= begin - 1;
            const int at = lane * step, count = kvq::detail::smaller(step, bytes - at);
            if (count > 0) prefetch_bulk(part.cache.key_block(number, 0) + at, count);
        }
    }
};

#endif

template <class Shape, class Args>
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
        latent_producer<Shape, Args> producer{args, place, warp / Shape::stage_warps,
                                              warp % Shape::stage_warps, lane};
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
