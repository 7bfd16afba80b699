// The warps of prefill_wgmma.cuh that multiply: two warpgroups, the consumers of tiles.
//
//   tile i   S = Q K^T asked for; O += P V of tile i - 1 asked for; S there: maxima, weights; O there
//
//   up to 256 channels   a warpgroup has 64 rows of its own, and weights stay in registers
//   512                  both have the same 64 rows (split): scores of 32 tokens of a tile each, and 256
//                        channels of the output each. They exchange maxima, and weights of all tokens,
//                        through shared memory. Each product is waited for at once, so that its stage is free
//                        before the next one is
//
// Contract: stages are read in order; each is free again once its products are there. A row's bits depend on
// its tiles alone.
// Source: as prefill_wgmma.cuh.
#pragma once

#include "prefill_ready.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

#if KVQ_WARPGROUP_PRODUCTS

template <int Dim, bool Softcap, class Args>
__device__ __forceinline__ void consume_tiles(const Args& a, const prefill_block& block,
                                              const wgmma_place& place, int tiles, int group) {
    using memory = wgmma_memory<Dim>;
    using shape = typename memory::shape;
    constexpr int tile_tokens = shape::tile, units = shape::units;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
    const int g = lane / 4, t = lane % 4;
    // Split: both warpgroups have the same rows, scores of half of the tokens, and half of the channels.
    constexpr bool split = shape::split;
    constexpr int own_channels = shape::unit_channels;
    constexpr int own_tokens = split ? tile_tokens / 2 : tile_tokens;
    const int first_row = split ? 0 : group * 64, first_channel = split ? group * own_channels : 0;
    const int own_row = place.rank * shape::rows + first_row + warp * 16 + g;  // and 8 rows further
    std::uint32_t q =
        operand_at(place.tiles + static_cast<std::uint32_t>(memory::query + first_row * Dim * 2));
    // Positions of both rows.
    int position[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
        position[r] = block.history + a.newest_of_row(block.first_row + own_row + 8 * r);

    float o[own_channels / 2], factor[2];
    std::uint32_t p[split ? 1 : tile_tokens / 4] = {};
    row_pair rows;
    const float scale = Softcap ? 1.0f : a.scale;

    // Every tile has its own scores: their registers would otherwise stay taken between tiles, which spills
    // others.
    using tile_scores = float[own_tokens / 2];
    const auto key_stage = [&](int tile, int unit) {
        return wgmma_stage::of(place, (tile * units + unit) % shape::stages, memory{});
    };
    const auto value_stage = [&](int tile) {  // of this warpgroup's channels
        return wgmma_stage::of(place, split ? group : tile % shape::stages, memory{});
    };
    const auto wait_for_keys = [&](int tile, int unit) {
        barrier_wait(key_stage(tile, unit).full_keys,
                     static_cast<std::uint32_t>((tile * units + unit) / shape::stages) & 1u);
    };
    const auto wait_for_values = [&](int tile, const wgmma_stage& stage) {
        barrier_wait(stage.full_values, static_cast<std::uint32_t>(split ? tile : tile / shape::stages) & 1u);
    };
    const auto done_with = [&](std::uint32_t barrier) {  // of a stage that all of the cluster write to
        __syncwarp();
        if (lane < 2) barrier_arrive_cluster(place_in(lane, barrier));
    };
    const auto ask_scores = [&](int tile, const wgmma_stage& first, tile_scores& s) {
        static_for<units>([&](auto unit) {
            constexpr int u = decltype(unit)::value, steps = own_channels / 16;
            const wgmma_stage stage = u > 0 ? key_stage(tile, u) : first;
            if constexpr (u > 0) wait_for_keys(tile, u);
            std::uint32_t k =
                operand_at(stage.keys + static_cast<std::uint32_t>(split ? group * own_tokens * 128 : 0));
            asm volatile("" : "+r"(q));  // otherwise the descriptors of all steps take registers
            if constexpr (shape::wide) asm volatile("" : "+r"(k));
            products_begin();
            static_for<steps>([&](auto step) {
                constexpr int i = decltype(step)::value, of_row = u * steps + i;
                const std::uint64_t queries = operand(q, of_row / 4 * 64 * 128 + i % 4 * 32),
                                    keys = operand(k, i / 4 * tile_tokens * 128 + i % 4 * 32);
                if constexpr (split)
                    multiply_few<of_row != 0, false>(s, queries, keys);
                else
                    multiply_shared<of_row != 0>(s, queries, keys);
            });
            products_commit();
            if constexpr (split) {
                products_wait<0>();
                products_there(s);
                done_with(stage.free_keys);
            }
        });
    };
    // Split: weights of a tile, of both warpgroups, stand in shared memory; read before the next maxima are
    // exchanged.
    const std::uint32_t weights_at = place.tiles + static_cast<std::uint32_t>(memory::weights);
    const auto ask_output = [&](int tile, const wgmma_stage& stage) {
        if constexpr (split) wait_at_barrier(3, 256);  // the other's weights are there
        [[maybe_unused]] std::uint32_t weights = 0;
        if constexpr (split) {
            weights = operand_at(weights_at);
            asm volatile("" : "+r"(weights));
        }
        wait_for_values(tile, stage);
        std::uint32_t v = operand_at(stage.values);
        if constexpr (shape::wide) {
            asm volatile("" : "+r"(v));
            if constexpr (split) publish_to_products();  // weights
        }
        products_begin();
        static_for<tile_tokens / 16>([&](auto step) {
            constexpr int i = decltype(step)::value, at_once = kvq::detail::smaller(own_channels, 128);
            static_for<own_channels / at_once>([&](auto part) {
                constexpr int n = decltype(part)::value * at_once;  // the first channel
                auto& own = reinterpret_cast<float(&)[at_once / 2]>(o[n / 2]);
                const std::uint64_t values = operand(v, (i / 4 * own_channels + n) * 128 + i % 4 * 32);
                if constexpr (split)
                    multiply_shared<true>(own, operand(weights, i * 32), values);
                else
                    multiply_registers(own, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], values);
            });
        });
        products_commit();
        if constexpr (split) {
            products_wait<0>();
            products_there(o);
            done_with(stage.free_values);
        }
    };
    // Split: a number of each row of both warpgroups, which both get.
    const auto exchange = [&](const float(&own)[2], float(&other)[2]) {
        const std::uint32_t at =
            place.tiles + static_cast<std::uint32_t>(memory::maxima + (warp * 16 + g) * 4);
        if (t == 0)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                store_word(at + static_cast<std::uint32_t>((group * shape::rows + 8 * r) * 4),
                           __float_as_uint(own[r]));
        wait_at_barrier(4, 256);
#pragma unroll
        for (int r = 0; r < 2; ++r)
            other[r] = __uint_as_float(
                load_shared_4(at + static_cast<std::uint32_t>(((group ^ 1) * shape::rows + 8 * r) * 4)));
    };
    const auto pack = [&](const tile_scores& s) {
        const auto two = [&](int i) { return pack_halves<float16>(s[2 * i], s[2 * i + 1]); };
        if constexpr (split) {
            const int row = warp * 16 + lane % 16, octet = group * own_tokens / 8 + lane / 16;
#pragma unroll
            for (int i = 0; i < own_tokens / 16; ++i)
                store_matrices<false>(weights_at + octet_offset<64>(row, octet + 2 * i), two(4 * i),
                                      two(4 * i + 1), two(4 * i + 2), two(4 * i + 3));
        } else {
#pragma unroll
            for (int i = 0; i < tile_tokens / 4; ++i) p[i] = two(i);
        }
    };
    // Was a maximum raised in any row of the warp?
    const auto weigh = [&](tile_note note, tile_scores& s) {
        if constexpr (split) {
            note.position += group * own_tokens;
            note.count -= group * own_tokens;
            note.slices >>= group * own_tokens / 16;
        }
        mask_scores<Softcap>(a, block, note, position, own_row, t, s);
        if constexpr (split) {
            float top[2], other[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) top[r] = greatest_of_lanes(greatest(s, r, rows.max[r]));
            exchange(top, other);
#pragma unroll
            for (int r = 0; r < 2; ++r) weigh_row(s, rows, factor, scale, r, fmaxf(top[r], other[r]));
            pack(s);
            return __any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f);
        } else {
            return softmax_step(s, rows, factor, scale);
        }
    };
    // Of the newest scores, behind which `Behind` groups of products were asked for.
    const auto wait_for_scores = [&]<int Behind>(const wgmma_stage& stage, tile_scores& s,
                                                 std::integral_constant<int, Behind>) {
        products_wait<Behind>();
        products_there(s);
        done_with(stage.free_keys);
    };

#pragma unroll
    for (float& x : o) x = 0.0f;
    if (lacks_tiles(a, block.sequence)) rows.sum[0] = rows.sum[1] = NAN;
    if (tiles == 0) return finish_rows<Dim>(a, block, own_row, t, rows, scale, o, first_channel);
    {
        const wgmma_stage first = key_stage(0, 0);
        wait_for_keys(0, 0);
        const tile_note note = tile_note::load(first.note);
        tile_scores s;
        ask_scores(0, first, s);
        if constexpr (!split) wait_for_scores(first, s, std::integral_constant<int, 0>{});
        weigh(note, s);
        if constexpr (!split) pack(s);
    }
#pragma unroll 1
    for (int tile = 1; tile < tiles; ++tile) {
        const wgmma_stage now = key_stage(tile, 0), before = value_stage(tile - 1);
        wait_for_keys(tile, 0);
        const tile_note note = tile_note::load(now.note);
        tile_scores s;
        ask_scores(tile, now, s);
        ask_output(tile - 1, before);
        if constexpr (!split) wait_for_scores(now, s, std::integral_constant<int, 1>{});
        const bool raised = weigh(note, s);
        products_there(s);
        // The wait is behind the sums (which are never below zero), so that the softmax is over before it. It
        // has no condition itself: all warps of a warpgroup must take the same one.
        if constexpr (!split) {
            products_wait_behind<0>(!(rows.sum[0] + rows.sum[1] >= 0.0f));
            products_there(o);
        }
        if (raised)  // in few tiles
#pragma unroll
            for (int i = 0; i < own_channels / 2; ++i) o[i] *= factor[i / 2 % 2];
        if constexpr (!split) {
            done_with(before.free_values);
            pack(s);
        }
    }
    {
        const wgmma_stage last = value_stage(tiles - 1);
        ask_output(tiles - 1, last);
        products_wait<0>();
        products_there(o);
    }
    if constexpr (split) {
        float own[2], other[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            own[r] = rows.sum[r] + __shfl_xor_sync(0xffffffffu, rows.sum[r], 1);
            own[r] += __shfl_xor_sync(0xffffffffu, own[r], 2);
        }
        exchange(own, other);
#pragma unroll
        for (int r = 0; r < 2; ++r) rows.sum[r] = t == 0 ? own[r] + other[r] : 0.0f;
    }

    finish_rows<Dim>(a, block, own_row, t, rows, scale, o, first_channel);
}

#endif

}}}  // namespace kvq::cuda::detail
