// Large heads: neighbouring warps share the channels of every warp tile.
//
//   head_dim   64 to 128   256   512
//   bands              1     2     4     of 128 channels, one for each of so many warps
//
// A warp has registers for the query and the output of 128 channels and 16 rows. Warps of more channels would
// keep them in local memory, and their copies would leave shared memory for fewer warps. Scores are sums over
// all channels: warps add up theirs (decode/band_scores.cuh).
// Contract: one number for all formats of a launch. Keys of several widths, and what is behind a transform,
// have one band: a plan and a transform mix all channels.
#pragma once

#include "warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

inline constexpr int band_channels = 128, most_bands = 4;

/// Does no word, tile or group of channels lie in two bands?
template <class Tile, int Bands>
inline constexpr bool tile_fits_bands = [] {
    using traits = typename Tile::traits;
    bool fits = Tile::all_channels % (32 * Bands) == 0;
    if constexpr (Tile::key && !Tile::full)
        for (int p = 0; p < traits::plane_count; ++p)
            fits = fits && Tile::units % traits::units_per_word(p) == 0;
    if (Tile::token_parameters && !Tile::full)
        fits = fits && (Tile::dim % Tile::page_group == 0 || Tile::page_group % Tile::dim == 0);
    return fits;
}();
template <class Pair, int Bands>
inline constexpr bool fits_bands = [] {
    if constexpr (read_by_numbers<typename Pair::keys> || read_by_numbers<typename Pair::values> ||
                  has_transform<typename Pair::keys> || has_transform<typename Pair::values> ||
                  codec<typename Pair::keys>.several_widths())
        return false;
    else
        return tile_fits_bands<code_warp_tile<tensor::key, Pair, 32, true, Bands>, Bands> &&
               tile_fits_bands<code_warp_tile<tensor::value, Pair, 32, true, Bands>, Bands>;
}();

/// Bands of a launch that reads pages of all these formats.
template <class First, class... Pairs>
inline constexpr int bands_of = [] {
    constexpr int channels = larger(First::head_dim, First::value_dim);
    constexpr int bands = channels <= band_channels ? 1 : channels <= 2 * band_channels ? 2 : most_bands;
    if constexpr (bands * band_channels >= channels && fits_bands<First, bands> &&
                  (fits_bands<Pairs, bands> && ...))
        return bands;
    else
        return 1;
}();

}}}  // namespace kvq::cuda::detail
