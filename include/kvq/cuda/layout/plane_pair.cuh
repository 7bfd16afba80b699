// Formats with two planes on a device (format/planes.hpp): the blocks of a format of 4 bits and, in pages of
// their own, 4 further bits of every code.
//
//   plane_pair<P>         both planes are read and written
//   upper_plane_pair<P>   the upper ones of the same pages, with the kernels of P
//
// A page number in a table names both pages (layer_memory.hpp), so one table serves either pair.
// Contract: the upper plane has the bytes of P, the lower one those of cpu/product/plane_codes.hpp.
#pragma once

#include "device_codec.cuh"
#include "layer_memory.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// Of the lower plane of a block.
template <class S>
constexpr std::size_t lower_bytes_of(const block_shape& s) {
    return kvq::detail::round_up(typename S::layout_type{}.codes(s).bytes(), std::size_t{16});
}
template <class S>
inline constexpr bool takes_lower_plane = [] {
    if constexpr (has_transform<S> || codec<S>.content != block_content::codes)
        return false;
    else
        return codec<S>.width() == 4 && codec<S>.has_bias;
}();

}  // namespace detail

/// A format with a lower plane: blocks of Upper, and in pages of their own 4 further bits of every code.
template <class Upper>
struct plane_pair : Upper {
    static_assert(detail::takes_lower_plane<typename Upper::keys> &&
                      detail::takes_lower_plane<typename Upper::values>,
                  "kvq::cuda::plane_pair: a lower plane belongs to codes of 4 bits, not behind a transform");
    using upper = Upper;
    /// Bytes of the lower plane of a block: the words of its codes, padded.
    static constexpr std::size_t lower_key_bytes =
        detail::lower_bytes_of<typename Upper::keys>(Upper::key_shape());
    static constexpr std::size_t lower_value_bytes =
        detail::lower_bytes_of<typename Upper::values>(Upper::value_shape());
};
/// The upper planes of such pages alone: kernels of Upper, numbers of plane_pair.
template <class Upper>
struct upper_plane_pair : Upper {
    using upper = Upper;
};

namespace detail {

/// Does a number of a page name those of both planes? Are both read?
template <class Pair>
inline constexpr bool names_planes = false;
template <class Upper>
inline constexpr bool names_planes<plane_pair<Upper>> = true;
template <class Upper>
inline constexpr bool names_planes<upper_plane_pair<Upper>> = true;
template <class Pair>
inline constexpr bool has_lower = false;
template <class Upper>
inline constexpr bool has_lower<plane_pair<Upper>> = true;

/// Where the lower planes lie: as pages of a format do.
template <class Pair>
struct lower_pages {};
template <class Pair>
requires has_lower<Pair>
struct lower_pages<Pair> : layer_memory {
};

}  // namespace detail
}}}  // namespace kvq::cuda
