// Latent attention of 128 query rows by two thread blocks that see each other's shared memory: each has 64 of
// the rows, and makes half of every tile for both, so that a page is read and converted once.
//
//   S = Q K^T    warpgroup w: [the block's 64 rows][64 tokens] of tiles w, w + 2, ...
//   O += P V     warpgroup w: the same rows, V channels 256 w to 256 w + 255, of every tile; P of its own
//                tiles from registers, of the other warpgroup's from shared memory
//   tiles        block r makes channels 256 r to 256 r + 255; of those behind them (512 to 575) 32 of 64
//                tokens, or where a unit has all 64 (latent_tiles.cuh) every other tile
//
// While one warpgroup turns scores into weights, the other one multiplies. A row's maximum goes from tile to
// tile with the weights. Warpgroup r is the last one that reads half r of a tile: it tells block r that the
// place is free. Lane (g, t) of warp u: rows 16 u + g and + 8, columns 8 i + 2 t and the next one. Maxima as
// in latent_few_rows.cuh.
// Contract: attend_latents() in latent.cuh, V = 512, no tree of drafts.
// Source: warpgroups in turns, each with half of the channels: FlashMLA (DeepSeek, 2025).
#pragma once

#include "latent_wgmma.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

#if KVQ_WARPGROUP_PRODUCTS

/// All pieces of a share. warp: of the consumers.
template <class Shape, class Args>
requires(Shape::cluster == 2) __device__ __forceinline__
    void consume_latents(const Args& args, std::uint32_t place, int warp, int lane, latent_walk<Args> walk) {
    using pair = typename Args::first_pair;
    constexpr int dim = pair::head_dim, rows = 64, own_channels = 256, threads = 256;
    using memory = latent_memory<dim, Shape>;
    const auto& a = args.a;
    const auto at = [&](int offset) { return place + static_cast<std::uint32_t>(offset); };
    const int g = lane / 4, t = lane % 4, group = warp / 4, rank = cluster_rank(),
              own_row = warp % 4 * 16 + g;  // and 8 rows further
    const std::uint32_t weights = at(memory::weights);
    const auto number_at = [&](int of_group, int r) {
        return at(memory::numbers + (of_group * rows + own_row + 8 * r) * 4);
    };
    std::uint32_t q = operand_at(at(memory::query));
    int read = 0;  // tiles

    latent_piece piece;
    while (walk.next(piece)) {
        if (rank == 0 && warp == 0 && lane == 0) note_bounds(args, piece);
        const int first_row = piece.row_block * Shape::rows + rank * rows;
        load_latent_queries<rows, dim>(a, piece.sequence, first_row, at(memory::query), warp * 32 + lane,
                                       threads);
        publish_to_products();
        wait_at_barrier(1, threads);

        float o[own_channels / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
        std::uint32_t weight[16];
#pragma unroll
        for (int i = 0; i < own_channels / 2; ++i) o[i] = 0.0f;

        const auto ask_scores = [&](int number, float(&s)[32]) {
            const auto stage = latent_stage<memory>::of(place, number % 2);
            barrier_wait(stage.full, static_cast<std::uint32_t>(number / 2) & 1u);
            constexpr int half = 4 * 64 * 128;  // bytes of four blocks of 64 channels
            const auto behind = static_cast<std::uint32_t>(rank * (half >> 4));
            const std::uint32_t k = operand_at(stage.tile);
            asm volatile("" : "+r"(q));  // otherwise the descriptors of all steps take registers
            products_begin();
            static_for<16>([&](auto step) {
                constexpr int i = decltype(step)::value, from = i / 4 * latent_tile * 128 + i % 4 * 32;
                multiply_shared<(i > 0)>(s, operand(q + behind, from), operand(k + behind, from));
            });
            products_commit();
            barrier_wait(at(memory::arrived + number % 2 * 8), static_cast<std::uint32_t>(number / 2) & 1u);
            products_begin();
            const std::uint32_t other = (half >> 4) - behind;
            static_for<16>([&](auto step) {
                constexpr int i = decltype(step)::value, from = i / 4 * latent_tile * 128 + i % 4 * 32;
                multiply_shared<true>(s, operand(q + other, from), operand(k + other, from));
            });
            static_for<dim / 16 - 32>([&](auto step) {
                constexpr int from = 2 * half + decltype(step)::value * 32;
                multiply_shared<true>(s, operand(q, from), operand(k, from));
            });
            products_commit();
        };
        const auto values_of = [&](int number) {
            return transposed_operand_at(
                latent_stage<memory>::of(place, number % 2).tile +
                    static_cast<std::uint32_t>(group * own_channels * latent_tile * 2),
                64 * latent_tile * 2);
        };
        const auto ask_other_output = [&](int number) {
            const std::uint32_t p = operand_at(weights), v = values_of(number);
            products_begin();
            static_for<latent_tile / 16>([&](auto step) {
                constexpr int i = decltype(step)::value;
                multiply_shared_wide(o, operand(p, i * 32), operand(v, i * 16 * 128));
            });
            products_commit();
        };
        const auto ask_output = [&](int number) {
            const std::uint32_t v = values_of(number);
            products_begin();
            static_for<latent_tile / 16>([&](auto step) {
                constexpr int i = decltype(step)::value;
                multiply_registers<true>(o, weight[4 * i], weight[4 * i + 1], weight[4 * i + 2],
                                         weight[4 * i + 3], operand(v, i * 16 * 128));
            });
            products_commit();
        };
        /// To the block that makes this warpgroup's half of tiles.
        const auto done_with = [&](int number) {
            products_there(o);
            __syncwarp();
            if (lane == 0)
                barrier_arrive_cluster(place_in(group, latent_stage<memory>::of(place, number % 2).free));
        };
        const auto raise = [&](const float(&to)[2]) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float factor = top[r] == -INFINITY ? 0.0f : exp2_fast(top[r] - to[r]);
                top[r] = to[r];
                sum[r] *= factor;
#pragma unroll
                for (int i = 0; i < own_channels / 2; i += 4) {
                    o[i + 2 * r] *= factor;
                    o[i + 2 * r + 1] *= factor;
                }
            }
        };
        /// Maxima of the other warpgroup's tile.
        const auto take = [&](int number) {
            barrier_wait(at(memory::ready + number % 2 * 8), static_cast<std::uint32_t>(number / 2) & 1u);
            float high[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) high[r] = __uint_as_float(load_shared_4(number_at(0, r)));
            if (__any_sync(0xffffffffu, high[0] != top[0] || high[1] != top[1])) {
                raise(high);
            }
        };
        const float scale = fabsf(a.scale);
        /// Scores to weights, for the other warpgroup too.
        const auto weigh = [&](int number, float(&s)[32]) {
            const auto note = latent_note::load(latent_stage<memory>::of(place, number % 2).note);
            if (a.scale < 0.0f)
#pragma unroll
                for (int i = 0; i < 32; ++i) s[i] = -s[i];
            if (!note.is_whole(args.common_end(piece.length))) {
                const int own_lane = read_lane();
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int end =
                        args.row_end(piece.length, first_row + warp % 4 * 16 + own_lane / 4 + 8 * r) -
                        note.position;
#pragma unroll
                    for (int i = 0; i < 8; ++i)
#pragma unroll
                        for (int k = 0; k < 2; ++k)
                            if (const int token = 8 * i + own_lane % 4 * 2 + k;
                                ((i < 4 ? note.low : note.high) >> token % 32 & 1u) == 0 || token >= end)
                                s[4 * i + 2 * r + k] = -INFINITY;
                }
            }
            float high[2] = {-INFINITY, -INFINITY};
#pragma unroll
            for (int i = 0; i < 32; ++i) high[i / 2 % 2] = fmaxf(high[i / 2 % 2], s[i]);
            high[0] *= scale;
            high[1] *= scale;
            if (__any_sync(0xffffffffu, high[0] > top[0] + latent_slack || high[1] > top[1] + latent_slack)) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    high[r] = fmaxf(high[r], __shfl_xor_sync(0xffffffffu, high[r], 1));
                    high[r] = fmaxf(high[r], __shfl_xor_sync(0xffffffffu, high[r], 2));
                    high[r] = fmaxf(high[r], top[r]);
                }
                raise(high);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float base = top[r] == -INFINITY ? 0.0f : -top[r];
                float added = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float x = exp2_fast(fmaf(s[4 * i + 2 * r], scale, base)),
                                y = exp2_fast(fmaf(s[4 * i + 2 * r + 1], scale, base));
                    added += x + y;
                    weight[2 * i + r] = pack_halves<float16>(x, y);
                }
                sum[r] += added;
                if (t == 0) store_word(number_at(0, r), __float_as_uint(top[r]));
            }
            // Lane i of a store of matrices: row i % 8 of matrix i / 8, which are rows 0 and 8 on of tokens 0
            // on, and of tokens 8 on.
            const int own_lane = read_lane(),
                      stored_row = warp % 4 * 16 + own_lane / 8 % 2 * 8 + own_lane % 8;
            wait_at_barrier(2 + group, 128);  // products have read the weights before
#pragma unroll
            for (int i = 0; i < 4; ++i)
                store_matrices<false>(weights + octet_offset<rows>(stored_row, 2 * i + own_lane / 16),
                                      weight[4 * i], weight[4 * i + 1], weight[4 * i + 2], weight[4 * i + 3]);
            publish_to_products();
            __syncwarp();
            if (lane == 0) barrier_arrive(at(memory::ready + number % 2 * 8));
        };

        const int first = read, last = read + piece.to - piece.from - 1;
        read = last + 1;
#pragma unroll 1
        for (int own = first + ((first ^ group) & 1); own <= last; own += 2) {
            float s[32];
            if (own > first) {
                take(own - 1);
                ask_other_output(own - 1);
                products_wait<0>();
                done_with(own - 1);  // before the wait for a tile, which needs this place
            }
            ask_scores(own, s);
            products_wait<0>();
            products_there(s);
            weigh(own, s);
            ask_output(own);
            products_wait<0>();
            done_with(own);
        }
        if (first <= last && (last ^ group) % 2 != 0) {
            take(last);
            ask_other_output(last);
            products_wait<0>();
            done_with(last);
        }
        launch_merge();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
            if (group == 1 && t == 0) store_word(number_at(1, r), __float_as_uint(sum[r]));
        }
        wait_at_barrier(1, threads);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (first_row + own_row + 8 * r >= a.rows) continue;
            float* const state = args.state(piece.number, rank * rows + own_row + 8 * r);
            if (group == 0 && t == 0) {
                const float all = sum[r] + __uint_as_float(load_shared_4(number_at(1, r)));
                // A row of NaN has no maximum, but is not empty.
                *reinterpret_cast<float2*>(state) = {top[r] == -INFINITY && all != 0.0f ? 0.0f : top[r], all};
            }
#pragma unroll
            for (int i = 0; i < own_channels / 8; ++i)
                *reinterpret_cast<float2*>(state + state_header + group * own_channels + 8 * i + 2 * t) = {
                    o[4 * i + 2 * r], o[4 * i + 2 * r + 1]};
        }
    }
}

#endif

/// Producer: what turns pages into tiles.
template <class Shape, class Args, template <class, class> class Producer>
__global__ void __launch_bounds__((warpgroup_threads<Shape::threads>), 1)
    latent_cluster_kernel([[maybe_unused]] const __grid_constant__ Args args) {
#if KVQ_WARPGROUP_PRODUCTS
    using memory = latent_memory<Args::first_pair::head_dim, Shape>;
    extern __shared__ __align__(1024) std::byte swizzled_memory[];
    const std::uint32_t place = shared_address(swizzled_memory);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    // By a shuffle, what depends on the warp is known to be the same for all lanes.
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
    if (thread == 0) {
        for (int i = 0; i < Shape::stages; ++i) {
            const auto stage = latent_stage<memory>::of(place, i);
            barrier_init(stage.full, Shape::stage_warps);
            barrier_init(stage.free, Shape::consumer_warps);
            barrier_init(place + static_cast<std::uint32_t>(memory::ready + i * 8), 4);
            barrier_init(place + static_cast<std::uint32_t>(memory::arrived + i * 8), 1);
        }
    }
    __syncthreads();
    cluster_wait();
    wait_for_predecessor();
    const auto share = [&] {
        return latent_walk<Args>(args, static_cast<int>(blockIdx.x) / 2, static_cast<int>(gridDim.x) / 2);
    };
    if (warp < Shape::producer_warps) {
        leave_registers<Shape>();
        Producer<Shape, Args> producer{args, place, warp, lane};
        producer.rank = cluster_rank();
        latent_walk<Args> walk = share();
        latent_piece piece;
        while (walk.next(piece)) producer.piece(piece);
    } else {
        take_registers<Shape>();
        consume_latents<Shape>(args, place, warp - Shape::producer_warps, lane, share());
    }
    cluster_wait();  // the other block may still send tiles, and arrive
#endif
}

}}}  // namespace kvq::cuda::detail
