// How the pages of each format become tiles for a prompt's attention, and which formats do not.
//
//   cells_of     what a warp of a tile reads: prefill_tile.cuh for codes of one width and 16-bit values,
//                prefill_mixed.cuh for several widths, prefill_row_tile.cuh for rows of tokens
//   no_prefill   why prompts have no kernels for a format
#pragma once

#include "prefill_mixed.cuh"
#include "prefill_row_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The cells of a warp of a tile of this format.
template <tensor Role, class Pair, int TileRows, int TileColumns, int Warps, bool Ordered>
struct choose_cells {
    using type = std::conditional_t<codec<scheme_of<Role, Pair>>.several_widths(),
                                    mixed_cells<Pair, TileRows, TileColumns, Warps>,
                                    cell_batch<Role, Pair, TileRows, TileColumns, Warps, Ordered>>;
};
template <tensor Role, class Pair, int TileRows, int TileColumns, int Warps, bool Ordered>
requires token_row_scheme<scheme_of<Role, Pair>>
struct choose_cells<Role, Pair, TileRows, TileColumns, Warps, Ordered> {
    using type = row_cells<Role, Pair, TileRows, TileColumns, Warps, Ordered>;
};
/// Ordered: keys may stand in an order of channels that is not their own (prefill_block::order).
template <tensor Role, class Pair, int TileRows, int TileColumns, int Warps, bool Ordered>
using cells_of = typename choose_cells<Role, Pair, TileRows, TileColumns, Warps, Ordered>::type;

template <class S>
constexpr const char* no_tiles_of(const block_shape& s) noexcept {
    if constexpr (token_row_scheme<S>)
        return no_row_tiles<S>(s);
    else
        return no_tiles(codec<S>, s);
}

/// Why prefill() has no kernels for pages of these formats; null: it has.
template <class... Pairs>
inline constexpr const char* no_prefill = [] {
    const char* reason = nullptr;
    const auto ask = [&]<class Pair>(std::type_identity<Pair>) {
        if (reason == nullptr && has_lower<Pair> && Pair::head_dim > 128)
            reason = "pages have two planes and heads more than 128 channels";
        if (reason == nullptr && Pair::head_dim != Pair::value_dim)
            reason = "keys and values differ in head_dim";
        if (reason == nullptr && Pair::head_dim > 256 && pair_turns<Pair>)
            reason = "heads of more than 256 channels are behind a transform";
        if (reason == nullptr) reason = no_tiles_of<typename Pair::keys>(Pair::key_shape());
        if (reason == nullptr) reason = no_tiles_of<typename Pair::values>(Pair::value_shape());
    };
    (ask(std::type_identity<Pairs>{}), ...);
    return reason;
}();
template <class... Pairs>
inline constexpr bool prefills = no_prefill<Pairs...> == nullptr;

}}}  // namespace kvq::cuda::detail
