// Granularity: which numbers share a scale (and bias).
//
//   per_token<G>    every token has its own parameters, one set per G channels  (per_token<>: one per head)
//   per_channel<G>  every channel has its own parameters, one set per G tokens  (per_channel<>: one per page)
//
// Seen as the matrix of a block (core/shape.hpp), parameters belong either to its rows (they are applied to the product
// afterwards) or to its columns (they are multiplied into the vector beforehand); DESIGN in docs/architecture.md.
// Source: per-channel keys and per-token values: KIVI, arXiv 2402.02750, section 3.
#pragma once

#include "../core/text.hpp"

#include "../core/shape.hpp"
#include "../pack/tile_layout.hpp"

namespace kvq::inline KVQ_TAGGED {

/// One parameter set per token and `Group` channels; 0 means all channels of the head.
template <int Group = 0>
struct per_token {
    static_assert(Group >= 0,
                  "kvq::per_token<G>: the group size G must be at least 1 (or 0 for the whole head)");
    static constexpr int group = Group;
    static constexpr bool on_tokens = true;
    static short_text name() { return Group ? "token-g" + short_text::of(Group) : "token"; }
};

/// One parameter set per channel and `Group` tokens; 0 means all tokens of the page.
template <int Group = 0>
struct per_channel {
    static_assert(Group >= 0,
                  "kvq::per_channel<G>: the group size G must be at least 1 (or 0 for the whole page)");
    static constexpr int group = Group;
    static constexpr bool on_tokens = false;
    static short_text name() { return Group ? "channel-g" + short_text::of(Group) : "channel"; }
};

template <class T>
concept granularity = requires {
    { T::group } -> std::convertible_to<int>;
    { T::on_tokens } -> std::convertible_to<bool>;
};

namespace detail {

/// Do the parameters belong to the rows of the block's matrix?
template <granularity G>
KVQ_HD constexpr bool on_rows(tensor role) noexcept {
    return G::on_tokens == (role == tensor::key);
}

/// The two axes of the block's matrix; the one without parameters is cut into groups.
template <granularity G>
KVQ_HD KVQ_INLINE constexpr grouped_axis row_axis(const block_shape& s) noexcept {
    if constexpr (G::group > 0)
        if (!on_rows<G>(s.role) && G::group < s.rows()) return {s.rows(), G::group};
    return {s.rows(), s.rows()};
}
template <granularity G>
KVQ_HD KVQ_INLINE constexpr grouped_axis col_axis(const block_shape& s) noexcept {
    if constexpr (G::group > 0)
        if (on_rows<G>(s.role) && G::group < s.cols()) return {s.cols(), G::group};
    return {s.cols(), s.cols()};
}

}  // namespace detail
}  // namespace kvq::inline KVQ_TAGGED
