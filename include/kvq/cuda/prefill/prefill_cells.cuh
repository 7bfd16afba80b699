// How the pages of each format become tiles for a prompt's attention, and which formats do not.
//
//   cells_of   what a warp of a tile reads: prefill_tile.cuh for codes of one width and 16-bit values, prefill_mixed.cuh for several widths
//   no_tiles   why a format has no tiles; the guide's list of conditions (docs/guide/gpu.md, "Prompts") is this one
#pragma once

#include "prefill_mixed.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The cells of a warp of a tile of this format.
template <tensor Role, class Pair, int TileRows, int TileColumns, int Warps, int Stride = TileRows>
using cells_of = std::conditional_t<is_mixed<scheme_of<Role, Pair>>,
                                    mixed_cells<Pair, TileRows, TileColumns, Warps, Stride>,
                                    cell_batch<Role, Pair, TileRows, TileColumns, Warps, Stride>>;

/// Why no tiles are made of this format's keys or values; null: they are.
template <tensor Role, class Pair>
inline constexpr const char* no_tiles = []() -> const char* {
    using S = scheme_of<Role, Pair>;
    using traits = word_traits<S>;
    constexpr int page = Pair::page_tokens, dim = dim_of<Role, Pair>;
    constexpr const char* groups = "groups are not a multiple of 32";
    if constexpr (dim % 32 != 0 || dim > 256) {
        return "head_dim is not a multiple of 32 up to 256";
    } else if constexpr (page != 16 && page % 32 != 0) {
        return "pages have neither 16 tokens nor a multiple of 32";
    } else if constexpr (is_mixed<S>) {
        // A row of codes of a cell lies in one page; the table has two planes; offsets of codes have 16 bits.
        constexpr int group = S::granularity_type::group;
        return page % 32 != 0                    ? "pages of keys of several widths have 16 tokens"
               : group % 32 != 0 && group < page ? groups
               : most_planes<S> > 2              ? "7 bits are among several widths of keys"
               : typename S::layout_type{}.scale_offset(shape_of<Role, Pair>) > 65536
                   ? "a block has more than 64 KB of codes of several widths"
                   : nullptr;
    } else if constexpr (traits::full) {
        return sizeof(typename S::value_type) == 2 ? nullptr : "pages hold fp32 values";
    } else {
        constexpr int axis = traits::token_parameters ? dim : page;
        return traits::group != 0 && traits::group < axis && traits::group % 32 != 0 ? groups
               : Role == tensor::key && !std::is_same_v<typename traits::token_scale_type, void>
                   ? "keys have token scales"
                   : nullptr;
    }
}();

/// Why prefill() has no kernels for this format; null: it has.
template <class Pair>
inline constexpr const char* no_prefill =
    Pair::head_dim != Pair::value_dim        ? "keys and values differ in head_dim"
    : no_tiles<tensor::key, Pair> != nullptr ? no_tiles<tensor::key, Pair>
                                             : no_tiles<tensor::value, Pair>;
template <class Pair>
inline constexpr bool prefills = no_prefill<Pair> == nullptr;

}}}  // namespace kvq::cuda::detail
