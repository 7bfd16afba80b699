// 16-bit warp tiles of 32 tokens on their way to shared memory in few instructions: window pages, and sinks
// in pages of 16 tokens.
//
//   keys     a line of 128 bytes is two channels of 32 tokens; of two pages of 16 tokens, its halves are 64
//            bytes of each
//   values   a line is two tokens of 32 channels; the second page follows the first one
//
// The copies of warp_tile.cuh and joined_warp_tile.cuh take any block. These take whole lines, so that a lane
// adds constants to two addresses: a launch that fetches few warp tiles fetches each instruction for them.
// Contract: as warp_tile.cuh, whose places in shared memory these are. Of a page that is null nothing is
// read.
#pragma once

#include "channel_bands.cuh"
#include "joined_warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Pages of 16 tokens in the scheme of a 16-bit format: its sinks.
template <class Pair>
using sink_pair = block_pair<typename Pair::keys, typename Pair::values, Pair::head_dim, 16, Pair::value_dim>;

template <class Pair, int Bands>
inline constexpr bool copies_bands = [] {
    if constexpr (full_precision<typename Pair::keys> && full_precision<typename Pair::values>) {
        constexpr bool pages =
            Pair::page_tokens % 32 == 0 && Pair::head_dim % 16 == 0 && Pair::value_dim % 32 == 0;
        if constexpr (pages && joins_pages<sink_pair<Pair>>) {
            using keys = code_warp_tile<tensor::key, Pair, 32, true, Bands>;
            using values = code_warp_tile<tensor::value, Pair, 32, true, Bands>;
            return keys::no_tile == nullptr && values::no_tile == nullptr && keys::aligned &&
                   values::aligned && !keys::skewed && !values::skewed &&
                   keys::traits::columns_per_unit == 2 && values::traits::columns_per_unit == 2;
        }
    }
    return false;
}();

template <class Pair>
inline constexpr bool copies_windows = copies_bands<Pair, 1>&& copies_bands<Pair, bands_of<Pair>>;

/// What a lane copies of a warp tile: vectors lane, lane + 32, ... of 16 bytes. A line has 8 of them.
template <tensor Role, class Pair, int Bands>
struct window_vectors {
    using unit = code_warp_tile<Role, Pair, 32, true, Bands>;
    static constexpr int lines = unit::lines, of_line = 8, of_tile = lines * of_line,
                         steps = unit::tiles * of_tile / warp_size;
    static_assert(of_tile % warp_size == 0);

    /// Where vector lane + 32 * step goes, from the warp tile on: quarters of a tile are turned
    /// (warp_tile.cuh).
    static __device__ __forceinline__ int place(int step, int lane) {
        constexpr int of_quarter = unit::lane_lines(0), last = unit::last_quarter(0),
                      at_once = warp_size / of_line;
        const int first_line = step * at_once % lines;
        const int quarter =
            of_quarter % at_once == 0 ? first_line / of_quarter : (first_line + lane / of_line) / of_quarter;
        return step * 16 * warp_size + ((16 * lane) ^ (quarter & last) << 5);
    }
};

/// Starts copying the warp tile of a band that begins at token `first` of `page`. All lanes of a warp.
template <tensor Role, class Pair, int Bands>
__device__ __forceinline__ void copy_window(std::uint32_t to, const std::byte* page, int first, int lane,
                                            int band) {
    using vectors = window_vectors<Role, Pair, Bands>;
    using unit = typename vectors::unit;
    // Of keys, tiles of 32 tokens hold all channels; of values, tiles of 32 channels all tokens of the page.
    constexpr int tile_bytes = 128 * unit::page_lines;
    const std::byte* const from = page + (Role == tensor::key ? first / 32 * tile_bytes : first / 2 * 128) +
                                  128 * unit::band_lines(0, band) + 16 * lane;
#pragma unroll
    for (int step = 0; step < vectors::steps; ++step) {
        const int vector = step * warp_size, tile = vector / vectors::of_tile;
        copy_async(to + static_cast<std::uint32_t>(vectors::place(step, lane)),
                   from + tile * tile_bytes + vector % vectors::of_tile * 16);
    }
}

/// The same from two pages of sinks: each has half of the tokens, or none where it is null. A call: it is
/// rare.
template <tensor Role, class Pair, int Bands>
__device__ __attribute__((noinline)) void copy_sinks(std::uint32_t to, const std::byte* page,
                                                     const std::byte* second, int lane,
                                                     [[maybe_unused]] int band) {
    using vectors = window_vectors<Role, Pair, Bands>;
    constexpr int half = vectors::of_line / 2, lines = vectors::lines;
#pragma unroll 1
    for (int step = 0; step < vectors::steps; ++step) {
        const int i = step * warp_size + lane, vector = i % vectors::of_line,
                  line = i / vectors::of_line % lines, tile = i / vectors::of_tile;
        const bool behind = Role == tensor::key ? vector >= half : line >= lines / 2;
        int at = Role == tensor::key ? line * half + vector % half
                                     : (tile * (lines / 2) + line % (lines / 2)) * vectors::of_line + vector;
        if constexpr (Bands > 1) at += band * (vectors::steps * warp_size / 2);
        const std::byte* const block = behind ? second : page;
        if (block != nullptr)
            copy_async(to + static_cast<std::uint32_t>(vectors::place(step, lane)), block + at * 16);
    }
}

}}}  // namespace kvq::cuda::detail
