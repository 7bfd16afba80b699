// Latent attention of 64 query rows, which are the rows of products: two warpgroups share a tile.
//
//   S = Q K^T    warpgroup w: [64 rows][tokens 32 w to 32 w + 31]
//   O += P V     warpgroup w: [64 rows][half of the channels], from the weights of both in shared memory
//
// Lane (g, t) of warp u: rows 16 u + g and + 8, columns 8 i + 2 t and the next one. Maxima as in
// latent_few_rows.cuh.
#pragma once

#include "latent_memory.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

#if KVQ_WARPGROUP_PRODUCTS

/// All pieces of a share. warp: of the consumers.
template <class Shape, class Args>
requires Shape::many __device__ __forceinline__ void consume_latents(const Args& args, std::uint32_t place,
                                                                     int warp, int lane,
                                                                     latent_walk<Args> walk) {
    using pair = typename Args::first_pair;
    constexpr int dim = pair::head_dim, own_channels = pair::value_dim / 2, halves = own_channels / 128;
    constexpr int rows = Shape::rows, stages = Shape::stages, threads = 256, own_tokens = latent_tile / 2;
    using memory = latent_memory<dim, Shape>;
    const auto& a = args.a;
    const auto at = [&](int offset) { return place + static_cast<std::uint32_t>(offset); };
    const int g = lane / 4, t = lane % 4, group = warp / 4,
              own_row = warp % 4 * 16 + g;  // and 8 rows further
    const std::uint32_t weights = at(memory::weights), numbers = at(memory::numbers);
    // Lane i of a store of matrices: row i % 8 of matrix i / 8, which are rows 0 and 8 on of tokens 0 on, and
    // of tokens 8 on.
    const int stored_row = warp % 4 * 16 + lane / 8 % 2 * 8 + lane % 8;
    const auto number_at = [&](int of_group, int r) {
        return numbers + static_cast<std::uint32_t>((of_group * rows + own_row + 8 * r) * 4);
    };
    std::uint32_t q = operand_at(at(memory::query));
    int read = 0;  // tiles

    latent_piece piece;
    while (walk.next(piece)) {
        if (warp == 0 && lane == 0) note_bounds(args, piece);
        const int first_row = piece.row_block * rows;
        load_latent_queries<rows, dim>(a, piece.sequence, first_row, at(memory::query), warp * 32 + lane,
                                       threads);
        publish_to_products();
        wait_at_barrier(1, threads);

        float o[halves][64], top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
#pragma unroll
        for (int j = 0; j < halves; ++j)
#pragma unroll
            for (int i = 0; i < 64; ++i) o[j][i] = 0.0f;

        using tile_scores = float[own_tokens / 2];
        const auto ask_scores = [&](int number, tile_scores& s) {
            const auto stage = latent_stage<memory>::of(place, number % stages);
            barrier_wait(stage.full, static_cast<std::uint32_t>(number / stages) & 1u);
            const std::uint32_t k =
                operand_at(stage.tile + static_cast<std::uint32_t>(group * own_tokens * 128));
            asm volatile("" : "+r"(q));  // otherwise the descriptors of all steps take registers
            products_begin();
            static_for<dim / 16>([&](auto step) {
                constexpr int i = decltype(step)::value;
                multiply_few<(i > 0), false>(s, operand(q, i / 4 * rows * 128 + i % 4 * 32),
                                             operand(k, i / 4 * latent_tile * 128 + i % 4 * 32));
            });
            products_commit();
        };
        const auto ask_output = [&](int number) {
            const std::uint32_t p = operand_at(weights),
                                v = transposed_operand_at(
                                    latent_stage<memory>::of(place, number % stages).tile +
                                        static_cast<std::uint32_t>(group * own_channels * latent_tile * 2),
                                    64 * latent_tile * 2);
            products_begin();
            static_for<latent_tile / 16>([&](auto step) {
                constexpr int i = decltype(step)::value;
                static_for<halves>([&](auto half) {
                    constexpr int j = decltype(half)::value;
                    multiply_shared<true, true>(o[j], operand(p, i * 32),
                                                operand(v, (j * 128 * latent_tile + i * 16 * 64) * 2));
                });
            });
            products_commit();
        };
        const auto done_with = [&](int number) {
            __syncwarp();
            if (lane == 0) barrier_arrive(latent_stage<memory>::of(place, number % stages).free);
        };
        // Scores to weights, in shared memory.
        const auto weigh = [&](int number, tile_scores& s) {
            const auto note = latent_note::load(latent_stage<memory>::of(place, number % stages).note);
            products_there(s);
#pragma unroll
            for (int i = 0; i < own_tokens / 2; ++i) s[i] *= a.scale;
            if (a.softcap != 0.0f) [[unlikely]]
#pragma unroll
                for (int i = 0; i < own_tokens / 2; ++i) s[i] = capped(s[i], a.softcap);
            if (!args.all_see(note, piece.sequence, piece.length)) {
                const unsigned shown = group == 0 ? note.low : note.high;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int end = args.row_end(piece.length, first_row + own_row + 8 * r) - note.position -
                                    own_tokens * group;
#pragma unroll
                    for (int i = 0; i < own_tokens / 8; ++i)
#pragma unroll
                        for (int k = 0; k < 2; ++k)
                            if (const int token = 8 * i + 2 * t + k;
                                (shown >> token & 1u) == 0 || token >= end)
                                s[4 * i + 2 * r + k] = -INFINITY;
                }
                // Not in one loop: it would spill what stays in registers.
                if (args.masked()) [[unlikely]]
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const auto seen =
                            static_cast<unsigned>(args.mask(piece.sequence, piece.length,
                                                            first_row + own_row + 8 * r, note.position) >>
                                                  own_tokens * group);
#pragma unroll
                        for (int i = 0; i < own_tokens / 8; ++i)
#pragma unroll
                            for (int k = 0; k < 2; ++k)
                                if ((seen >> (8 * i + 2 * t + k) & 1u) == 0) s[4 * i + 2 * r + k] = -INFINITY;
                    }
            }
            bool above = false;
#pragma unroll
            for (int i = 0; i < own_tokens / 2; ++i) above = above || s[i] > top[i / 2 % 2] + latent_slack;

            float added[2];
            const auto write = [&] {
                std::uint32_t word[own_tokens / 4];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float base = top[r] == -INFINITY ? 0.0f : top[r];
                    added[r] = 0.0f;
#pragma unroll
                    for (int i = 0; i < own_tokens / 8; ++i) {
                        const float x = exp2_fast(s[4 * i + 2 * r] - base),
                                    y = exp2_fast(s[4 * i + 2 * r + 1] - base);
                        added[r] += x + y;
                        word[2 * i + r] = pack_halves<float16>(x, y);
                    }
                }
#pragma unroll
                for (int i = 0; i < own_tokens / 16; ++i)
                    store_matrices<false>(
                        weights + octet_offset<rows>(stored_row, own_tokens / 8 * group + 2 * i + lane / 16),
                        word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]);
                publish_to_products();
            };
            write();
            if (any_at_barrier(1, threads, above)) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float high = -INFINITY;
#pragma unroll
                    for (int i = 0; i < own_tokens / 8; ++i)
                        high = fmaxf(high, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
                    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
                    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
                    if (t == 0) store_word(number_at(group, r), __float_as_uint(high));
                }
                wait_at_barrier(1, threads);
                products_there(reinterpret_cast<float(&)[halves * 64]>(o));
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float high = fmaxf(top[r], fmaxf(__uint_as_float(load_shared_4(number_at(0, r))),
                                                           __uint_as_float(load_shared_4(number_at(1, r)))));
                    const float factor = top[r] == -INFINITY ? 0.0f : exp2_fast(top[r] - high);
                    top[r] = high;
                    sum[r] *= factor;
#pragma unroll
                    for (int j = 0; j < halves; ++j)
#pragma unroll
                        for (int i = 0; i < 64; i += 4) {
                            o[j][i + 2 * r] *= factor;
                            o[j][i + 2 * r + 1] *= factor;
                        }
                }
                write();
                wait_at_barrier(1, threads);
            }
            sum[0] += added[0];
            sum[1] += added[1];
        };

        const int last = read + piece.to - piece.from - 1;
        if (read <= last) {
            tile_scores s;
            ask_scores(read, s);
            products_wait<0>();
            weigh(read, s);
#pragma unroll 1
            for (; read < last; ++read) {
                ask_output(read);
                products_wait<0>();
                done_with(read);  // before the wait for a tile: warps that have written theirs go on
                tile_scores next;
                ask_scores(read + 1, next);
                wait_at_barrier(1, threads);  // weights have been read
                products_wait<0>();
                weigh(read + 1, next);
            }
            ask_output(last);
            products_wait<0>();
            products_there(reinterpret_cast<float(&)[halves * 64]>(o));
            done_with(last);
            read = last + 1;
        }
        launch_merge();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
            if (t == 0) store_word(number_at(group, r), __float_as_uint(sum[r]));
        }
        wait_at_barrier(1, threads);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (first_row + own_row + 8 * r >= a.rows) continue;
            float* const state = args.state(piece.number, own_row + 8 * r);
            if (group == 0 && t == 0) {
                const float all = __uint_as_float(load_shared_4(number_at(0, r))) +
                                  __uint_as_float(load_shared_4(number_at(1, r)));
                // A row of NaN has no maximum, but is not empty.
                *reinterpret_cast<float2*>(state) = {top[r] == -INFINITY && all != 0.0f ? 0.0f : top[r], all};
            }
#pragma unroll
            for (int j = 0; j < halves; ++j)
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    *reinterpret_cast<float2*>(state + state_header + group * own_channels + j * 128 + 8 * i +
                                               2 * t) = {o[j][4 * i + 2 * r], o[j][4 * i + 2 * r + 1]};
        }
    }
}

#endif

}}}  // namespace kvq::cuda::detail
