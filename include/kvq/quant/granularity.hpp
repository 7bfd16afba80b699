// Granularity: which values share a scale (and bias).
//
//   per_token<G>    every token has its own parameters, one set per G channels  (per_token<>: one per head)
//   per_channel<G>  every channel has its own parameters, one set per G tokens  (per_channel<>: one per page)
//   per_token<any_group>{G}, per_channel<any_group>{G}    the same; G is a value, so that functions for all G
//                                                         are compiled once
//
// On the matrix of a block (core/shape.hpp), parameters belong either to rows (they are applied to the
// product afterwards) or to columns (they are multiplied into the query or weight beforehand);
// docs/reference/architecture.md.
// Source: per-channel keys and per-token values: KIVI, arXiv 2402.02750, section 3.
#pragma once

#include <type_traits>

#include "../core/shape.hpp"
#include "../core/text.hpp"
#include "../pack/tile_layout.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// The G of per_token and per_channel for a group size that is a value.
inline constexpr int any_group = -1;

namespace detail {
inline short_text granularity_name(const char* of, int group) {
    return group != 0 ? short_text(of) + "-g" + short_text::of(group) : short_text(of);
}
inline void check_group(int group) {
    expect(group >= 0, "a group has at least 1 value (0: all of them), got ", group);
}
}  // namespace detail

/// One parameter set per token and `Group` channels; 0 means all channels of the head.
template <int Group = 0>
struct per_token {
    static_assert(Group >= 0,
                  "kvq::per_token<G>: the group size G must be at least 1 (or 0 for the whole head)");
    static constexpr int group = Group;
    static constexpr bool on_tokens = true;
    static short_text name() { return detail::granularity_name("token", Group); }
};
template <>
struct per_token<any_group> {
    int group;
    static constexpr bool on_tokens = true;

    /// Raises kvq::error if n < 0.
    explicit per_token(int n = 0) : group(n) { detail::check_group(n); }
    short_text name() const { return detail::granularity_name("token", group); }
};

/// One parameter set per channel and `Group` tokens; 0 means all tokens of the page.
template <int Group = 0>
struct per_channel {
    static_assert(Group >= 0,
                  "kvq::per_channel<G>: the group size G must be at least 1 (or 0 for the whole page)");
    static constexpr int group = Group;
    static constexpr bool on_tokens = false;
    static short_text name() { return detail::granularity_name("channel", Group); }
};
template <>
struct per_channel<any_group> {
    int group;
    static constexpr bool on_tokens = false;

    /// Raises kvq::error if n < 0.
    explicit per_channel(int n = 0) : group(n) { detail::check_group(n); }
    short_text name() const { return detail::granularity_name("channel", group); }
};

namespace detail {
template <class T>
inline constexpr bool is_granularity = false;
template <int Group>
inline constexpr bool is_granularity<per_token<Group>> = true;
template <int Group>
inline constexpr bool is_granularity<per_channel<Group>> = true;
}  // namespace detail

/// per_token<G> or per_channel<G>: the layout of blocks and all kernels know no others.
template <class T>
concept granularity = detail::is_granularity<T>;

namespace detail {

/// Do the parameters belong to the rows of the block's matrix?
template <granularity G>
KVQ_HD constexpr bool on_rows(tensor role) noexcept {
    return G::on_tokens == (role == tensor::key);
}

/// Is the group size part of the type?
template <granularity G>
inline constexpr bool fixed_group = !std::is_member_object_pointer_v<decltype(&G::group)>;

/// The same granularity with a group size that is a value.
template <class G>
struct any_group_of {
    using type = G;
};
template <int Group>
struct any_group_of<per_token<Group>> {
    using type = per_token<any_group>;
};
template <int Group>
struct any_group_of<per_channel<Group>> {
    using type = per_channel<any_group>;
};

/// The two axes of the block's matrix; the one without parameters is cut into groups.
template <granularity G>
KVQ_HD KVQ_INLINE constexpr grouped_axis row_axis(const G& g, const block_shape& s) noexcept {
    if (g.group > 0 && !on_rows<G>(s.role) && g.group < s.rows()) return {s.rows(), g.group};
    return {s.rows(), s.rows()};
}
template <granularity G>
KVQ_HD KVQ_INLINE constexpr grouped_axis col_axis(const G& g, const block_shape& s) noexcept {
    if (g.group > 0 && on_rows<G>(s.role) && g.group < s.cols()) return {s.cols(), g.group};
    return {s.cols(), s.cols()};
}

}  // namespace detail
}}  // namespace kvq
