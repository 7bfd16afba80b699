// Which schemes the vectorised kernels take that work group by group, on either axis (quantize_block.hpp,
// dequantize_block.hpp), and where the parameters of such a block lie.
//
// They take scheme<...> with the library's own levels and params<P>; quantizing also needs the encoder `enclosing`. Kernels that work
// channel by channel take other encoders, parameters, token scales and several widths (channel_schemes.hpp).
// Contract: types derived from scheme<...> are not taken, because their members may do more. Same bytes as scheme::quantize().
#pragma once

#include "../schemes/scheme.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class S>
inline constexpr bool is_composed = false;
template <int Bits, class Levels, class Granularity, class P, class Encoder>
inline constexpr bool is_composed<scheme<bits<Bits>, Levels, Granularity, params<P>, Encoder>> =
    detail::library_levels<Levels>;

/// A scheme composed of the library's own levels. Types derived from one are excluded: their quantize() and dequantize() may do more
/// (transform, search).
template <class S>
concept composed_scheme = is_composed<S>;
/// A composed scheme whose parameters are the range of a group. The kernels fit such parameters.
template <class S>
concept range_scheme = composed_scheme<S> && S::fits_range;

/// Offsets of a block's parameters (schemes/block_layout.hpp), computed once per block.
struct parameter_sections {
    std::size_t first, bytes;
    int slot_count, size;

    template <composed_scheme S>
    parameter_sections(const S& scheme, const block_shape& shape)
        : first(scheme.layout().scale_offset(shape)),
          bytes(scheme.layout().section_bytes(shape)),
          slot_count(scheme.layout().slot_count(shape)),
          size(sizeof(typename S::parameter)) {}

    KVQ_INLINE std::size_t offset(int group, int slot) const {
        return first + static_cast<std::size_t>((group * slot_count + slot) * size);
    }
};

}}}  // namespace kvq::kernels
