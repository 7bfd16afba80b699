// Latents as tiles of half floats in shared memory, as tensor cores read them: once for both products.
//
//   tile     [block of 64 channels][64 tokens][64 halves], swizzled as tiles of keys (prefill_tile.cuh)
//   scores   rows = tokens, columns = channels:        S^T = K Q^T sums over columns
//   output   the same bytes, read transposed:          O^T = V^T P^T sums over tokens
//   units    what a warp dequantizes at a time: 32 channels of 64 tokens (codes) or 32 tokens (16-bit values)
//
// Contract: x^ as in prefill_tile.cuh. Tokens that are not shown are zeros. R and P are multiples of 64.
#pragma once

#include "../arch/wgmma.cuh"
#include "latent_shares.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Why tiles are not made of these pages; null: they are.
template <class Pair>
inline constexpr const char* no_latent_tiles = []() -> const char* {
    constexpr int first = Pair::first_channels, second = Pair::second_channels;
    if (first % 64 != 0 || second % 64 != 0 || Pair::value_dim % 64 != 0)
        return "latent, rotary or value channels are not multiples of 64";
    if (Pair::head_dim > 576) return "there are more than 576 channels";
    if (codec<typename Pair::keys>.several_widths()) return "codes have several widths";
    if (codec<typename Pair::keys>.content == block_content::codes && Pair::page_tokens % 32 != 0)
        return odd_pages;
    return no_tiles(codec<typename Pair::first_pair::keys>, {tensor::key, Pair::page_tokens, 64});
}();

/// Of a warp: cell_batch's table for the rows of one page.
inline constexpr int latent_table_bytes = key_table_bytes / 2;

/// The blocks of a tile's tokens: a lane has those of tokens `lane` and 32 + `lane`. Offset: in a page.
template <std::size_t Offset>
struct latent_blocks {
    static constexpr bool shared = false, zeroes_parameters = false;
    const std::byte* at[2];

    __device__ __forceinline__ int page(const tile_tokens&, int) const { return 0; }
    __device__ __forceinline__ static bool any(const tile_tokens& tile) { return tile.any >= 0; }
    __device__ __forceinline__ block_in_memory block(int, int token_of_tile) const {
        return {(token_of_tile < 32 ? at[0] : at[1]) + Offset};
    }
};
template <class Pair>
__device__ __forceinline__ latent_blocks<0> blocks_of_tile(const cache_ref<Pair>& cache,
                                                           const tile_tokens& tile, int lane) {
    latent_blocks<0> blocks;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int own = __shfl_sync(0xffffffffu, tile.page, (32 * i + lane) / slice_tokens),
                  number = own < 0 ? kvq::detail::larger(tile.any, 0) : own;
        blocks.at[i] = cache.key_block(number, 0);
    }
    return blocks;
}

/// The units of some channels of a tile, of which `Warps` warps have the same number each, or one less. A
/// warp asks for some at once (a lane for `Words` words, or one unit) and stores them: all that it waits for
/// has been asked for together, since waiting for loads is waiting for later ones as well.
template <class Pair, int Channels, int Warps, int Words>
struct latent_units {
    static constexpr bool full = full_precision<typename Pair::keys>;
    static constexpr int count = Channels / 32 * (full ? 2 : 1), passes = kvq::detail::ceil_div(count, Warps);
    using cells = cell_batch<tensor::key, Pair, latent_tile, Channels, count, latent_tile>;
    static constexpr int held =
        kvq::detail::smaller(passes, kvq::detail::larger(1, Words / (cells::count * cells::words)));
    cells own[held];

    /// Asks for units from pass `Pass` on.
    template <int Pass = 0, class Blocks>
    __device__ __forceinline__ void fetch(const Blocks& blocks, const tile_tokens& tile, int warp, int lane) {
        static_for<held>([&](auto number) {
            constexpr int i = decltype(number)::value;
            const int unit = warp + (Pass + i) * Warps;
            if (Pass + i < passes && unit < count) own[i].fetch(blocks, tile, unit, lane);
        });
    }
    /// Stores all units of the tile whose first ones have been asked for.
    template <class Blocks>
    __device__ __forceinline__ void store(const Blocks& blocks, const tile_tokens& tile, std::uint64_t shown,
                                          std::uint32_t to, std::uint32_t table, int warp, int lane) {
        static_for<kvq::detail::ceil_div(passes, held)>([&](auto round) {
            constexpr int pass = decltype(round)::value * held;
            if constexpr (pass > 0) fetch<pass>(blocks, tile, warp, lane);
            static_for<held>([&](auto number) {
                constexpr int i = decltype(number)::value;
                const int unit = warp + (pass + i) * Warps;
                if (pass + i >= passes || unit >= count) return;
                own[i].store(blocks, to, tile, table, unit, lane);
                if (~shown != 0) clear(to, shown, unit, lane);
            });
        });
    }

private:
    __device__ __forceinline__ static void clear(std::uint32_t to, std::uint64_t shown, int unit, int lane) {
#pragma unroll
        for (int i = 0; i < cells::count; ++i) {
            const int row = cells::cells::row(unit, i) + lane;
            if ((shown >> row & 1) != 0) continue;
#pragma unroll
            for (int octet = 0; octet < 4; ++octet)
                store_shared_16(to + octet_offset<latent_tile>(row, cells::cells::column(unit) / 8 + octet),
                                {0.0f, 0.0f, 0.0f, 0.0f});
        }
    }
};

}}}  // namespace kvq::cuda::detail
