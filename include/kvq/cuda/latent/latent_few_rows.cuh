// Latent attention of up to 32 query rows: tokens and channels are the rows of products, so that few queries
// do no more than their work.
//
//   S^T = K Q^T       [64 tokens][rows], warp w has tokens 16 w to 16 w + 15
//   O^T += V^T P^T    [V channels][rows], 64 at a time; P from shared memory
//
// Lane (g, t): tokens (channels) g and g + 8 of its warp's 16, rows 8 i + 2 t and the next one. A row's
// maximum is raised only where a score is far above it (latent_slack), so no sum crosses threads before a
// piece ends, and a tile has one barrier.
// Source: lazy maxima: FlashAttention-4 (Dao-AILab, 2025).
#pragma once

#include "latent_memory.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

#if KVQ_WARPGROUP_PRODUCTS

/// All pieces of a share. warp: of the consumers.
template <class Shape, class Args>
requires(!Shape::many) __device__ __forceinline__
    void consume_latents(const Args& args, std::uint32_t place, int warp, int lane, latent_walk<Args> walk) {
    using pair = typename Args::first_pair;
    constexpr int dim = pair::head_dim, value_dim = pair::value_dim, bands = value_dim / 64;
    constexpr int rows = Shape::rows, columns = rows / 4, stages = Shape::stages, threads = 128;
    constexpr int chains = rows > 16 ? 1 : 2;  // sums of products that do not wait for each other
    using memory = latent_memory<dim, Shape>;
    const auto& a = args.a;
    const auto at = [&](int offset) { return place + static_cast<std::uint32_t>(offset); };
    const int g = lane / 4, t = lane % 4, thread = warp * 32 + lane;
    const std::uint32_t query = at(memory::query), numbers = at(memory::numbers);
    // Row of the block of column c: 0 and 1 are neighbours, 2 and 3 the two that are 8 further.
    const auto row_of = [&](int c) { return c / 2 * 8 + 2 * t + c % 2; };
    const auto number_at = [&](int of_warp, int c) {
        return numbers + static_cast<std::uint32_t>((of_warp * rows + row_of(c)) * 4);
    };
    // Lane i of a store of transposed matrices: column i % 8 of matrix i / 8, which are tokens 0 and 8 on of
    // rows 0 on, and of rows 8 on.
    const std::uint32_t own_weights = static_cast<std::uint32_t>(
        (lane / 16 * 8 + lane % 8) * 128 + (((2 * warp + lane / 8 % 2) ^ (lane % 8)) << 4));
    const auto weights_of = [&](int tile) {
        return at(memory::weights + tile % Shape::weight_buffers * memory::weight_bytes);
    };
    std::uint32_t q = operand_at(query);
    int read = 0;  // tiles

    latent_piece piece;
    while (walk.next(piece)) {
        if (thread == 0) note_bounds(args, piece);
        const int first_row = piece.row_block * rows;
        load_latent_queries<rows, dim>(a, piece.sequence, first_row, query, thread, threads);
        publish_to_products();
        wait_at_barrier(1, threads);

        float o[bands][rows / 2], top[columns], sum[columns];
#pragma unroll
        for (int j = 0; j < bands; ++j)
#pragma unroll
            for (int i = 0; i < rows / 2; ++i) o[j][i] = 0.0f;
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            top[c] = -INFINITY;
            sum[c] = 0.0f;
        }
        // Scores of a tile, counted from the share's first one; other: sums of every second step.
        using tile_scores = float[rows / 2];
        const auto ask_scores = [&](int number, tile_scores& s, tile_scores& other) {
            const auto stage = latent_stage<memory>::of(place, number % stages);
            barrier_wait(stage.full, static_cast<std::uint32_t>(number / stages) & 1u);
            const std::uint32_t tile = operand_at(stage.tile);
            asm volatile("" : "+r"(q));  // otherwise the descriptors of all steps take registers
            products_begin();
            static_for<dim / 16>([&](auto step) {
                constexpr int i = decltype(step)::value;
                const std::uint64_t k = operand(tile, i / 4 * latent_tile * 128 + i % 4 * 32),
                                    own = operand(q, i / 4 * rows * 128 + i % 4 * 32);
                if constexpr (chains > 1 && i % 2 != 0)
                    multiply_few<(i >= chains), false>(other, k, own);
                else
                    multiply_few<(i >= chains), false>(s, k, own);
            });
            products_commit();
        };
        const auto ask_output = [&](int number) {
            const std::uint32_t tile = operand_at(latent_stage<memory>::of(place, number % stages).tile),
                                p = operand_at(weights_of(number));
            products_begin();
            static_for<latent_tile / 16>([&](auto step) {
                constexpr int i = decltype(step)::value;
                static_for<bands>([&](auto band) {
                    constexpr int j = decltype(band)::value;
                    multiply_few<true, true>(o[j], operand(tile, (j * latent_tile + i * 16) * 128),
                                             operand(p, i * 32));
                });
            });
            products_commit();
        };
        const auto done_with = [&](int number) {
            __syncwarp();
            if (lane == 0) barrier_arrive(latent_stage<memory>::of(place, number % stages).free);
        };
        // Scores to weights, in shared memory.
        const auto weigh = [&](int number, tile_scores& s, tile_scores& other) {
            const auto note = latent_note::load(latent_stage<memory>::of(place, number % stages).note);
            products_there(s);
            if constexpr (chains > 1) {
                products_there(other);
#pragma unroll
                for (int i = 0; i < rows / 2; ++i) s[i] += other[i];
            }
#pragma unroll
            for (int i = 0; i < rows / 2; ++i) s[i] *= a.scale;
            if (a.softcap != 0.0f) [[unlikely]]
#pragma unroll
                for (int i = 0; i < rows / 2; ++i) s[i] = capped(s[i], a.softcap);
            if (!args.all_see(note, piece.sequence, piece.length)) {
#pragma unroll
                for (int c = 0; c < columns; ++c) {
                    const auto seen = static_cast<unsigned>(
                        (note.shown() &
                         args.seen_by(piece.sequence, piece.length, first_row + row_of(c), note.position)) >>
                        16 * warp);
#pragma unroll
                    for (int r = 0; r < 2; ++r)
                        if ((seen >> (g + 8 * r) & 1u) == 0) s[c / 2 * 4 + 2 * r + c % 2] = -INFINITY;
                }
            }
            bool above = false;
#pragma unroll
            for (int c = 0; c < columns; ++c)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    above = above || s[c / 2 * 4 + 2 * r + c % 2] > top[c] + latent_slack;

            const std::uint32_t to = weights_of(number);
            float added[columns];
            const auto write = [&] {
                std::uint32_t word[rows / 4];
#pragma unroll
                for (int c = 0; c < columns; ++c) {
                    const float base = top[c] == -INFINITY ? 0.0f : top[c];
                    const int i = c / 2 * 4 + c % 2;
                    const float w0 = exp2_fast(s[i] - base), w1 = exp2_fast(s[i + 2] - base);
                    added[c] = w0 + w1;
                    // Of a pair of columns: tokens g, then tokens g + 8.
                    if (c % 2 == 0) {
                        word[c] = __float_as_uint(w0);
                        word[c + 1] = __float_as_uint(w1);
                    } else {
                        word[c - 1] = pack_halves<float16>(__uint_as_float(word[c - 1]), w0);
                        word[c] = pack_halves<float16>(__uint_as_float(word[c]), w1);
                    }
                }
#pragma unroll
                for (int i = 0; i < rows / 16; ++i)
                    store_matrices<true>(to + own_weights + static_cast<std::uint32_t>(i * 16 * 128),
                                         word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]);
                publish_to_products();
            };
            write();
            if (any_at_barrier(1, threads, above)) {
                // Maxima of all tokens of the tile, over lanes and warps.
#pragma unroll
                for (int c = 0; c < columns; ++c) {
                    const int i = c / 2 * 4 + c % 2;
                    float high = fmaxf(s[i], s[i + 2]);
#pragma unroll
                    for (int step = 4; step < 32; step *= 2)
                        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, step));
                    if (g == 0) store_word(number_at(warp, c), __float_as_uint(high));
                }
                wait_at_barrier(1, threads);
                products_there(reinterpret_cast<float(&)[bands * rows / 2]>(o));
#pragma unroll
                for (int c = 0; c < columns; ++c) {
                    float high = top[c];
#pragma unroll
                    for (int w = 0; w < 4; ++w)
                        high = fmaxf(high, __uint_as_float(load_shared_4(number_at(w, c))));
                    const float factor = top[c] == -INFINITY ? 0.0f : exp2_fast(top[c] - high);
                    top[c] = high;
                    sum[c] *= factor;
#pragma unroll
                    for (int j = 0; j < bands; ++j) {
                        o[j][c / 2 * 4 + c % 2] *= factor;
                        o[j][c / 2 * 4 + c % 2 + 2] *= factor;
                    }
                }
                write();
                wait_at_barrier(1, threads);
            }
#pragma unroll
            for (int c = 0; c < columns; ++c) sum[c] += added[c];
        };

        const int last = read + piece.to - piece.from - 1;
        if (read <= last) {
            tile_scores s, other;
            ask_scores(read, s, other);
            products_wait<0>();
            weigh(read, s, other);
#pragma unroll 1
            for (; read < last; ++read) {
                ask_output(read);
                products_wait<0>();
                done_with(read);  // before the wait for a tile: warps that have written theirs go on
                tile_scores next, other_next;
                ask_scores(read + 1, next, other_next);
                products_wait<0>();
                weigh(read + 1, next, other_next);
            }
            ask_output(last);
            products_wait<0>();
            products_there(reinterpret_cast<float(&)[bands * rows / 2]>(o));
            done_with(last);
            read = last + 1;
        }
        launch_merge();
#pragma unroll
        for (int c = 0; c < columns; ++c) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], step);
            if (g == 0) store_word(number_at(warp, c), __float_as_uint(sum[c]));
        }
        wait_at_barrier(1, threads);
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            if (first_row + row_of(c) >= a.rows) continue;
            float* const state = args.state(piece.number, row_of(c));
            if (warp == 0 && g == 0) {
                float all = 0.0f;
#pragma unroll
                for (int w = 0; w < 4; ++w) all += __uint_as_float(load_shared_4(number_at(w, c)));
                // A row of NaN has no maximum, but is not empty.
                *reinterpret_cast<float2*>(state) = {top[c] == -INFINITY && all != 0.0f ? 0.0f : top[c], all};
            }
#pragma unroll
            for (int j = 0; j < bands; ++j)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    state[state_header + 64 * j + 16 * warp + 8 * r + g] = o[j][c / 2 * 4 + 2 * r + c % 2];
        }
    }
}

#endif

}}}  // namespace kvq::cuda::detail
