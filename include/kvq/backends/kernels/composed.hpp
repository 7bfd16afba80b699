// Which schemes the vectorised kernels for quantizing and dequantizing take (quantize_block.hpp, quantize_values.hpp, dequantize_block.hpp),
// and where the parameters of such a block lie.
//
// They take scheme<...> with the library's own levels; quantizing also needs the encoder min_max. Others are quantized by
// scheme::quantize(). Grids of channels have kernels of their own (channel_schemes.hpp).
// Contract: types derived from scheme<...> are not taken, because their members may do more. Same bytes as scheme::quantize().
#pragma once

#include "../../schemes/scheme.hpp"

namespace kvq::inline KVQ_TAGGED::kernels {

template <class S>
inline constexpr bool is_composed = false;
template <class Bits, class Levels, class Granularity, class Params, class Encoder>
inline constexpr bool is_composed<scheme<Bits, Levels, Granularity, Params, Encoder>> =
    std::same_as<Levels, asymmetric> || std::same_as<Levels, symmetric>;

/// A scheme composed of the library's own levels. Types derived from one are excluded: their quantize() and dequantize() may do more
/// (transform, search).
template <class S>
concept composed_scheme = is_composed<S>;
/// A composed scheme whose parameters are the range of a group. The kernels fit such parameters.
template <class S>
concept range_scheme = composed_scheme<S> && S::fits_range;

/// Offsets of a block's parameters: scheme::parameter_offset and section_bytes, computed once per block.
struct parameter_sections {
    std::size_t first, bytes;
    int slot_count, size;

    template <composed_scheme S>
    parameter_sections(const S& scheme, const block_shape& shape, const code_layout<S::code_bits>& codes)
        : first(scheme.scale_offset(shape)),
          bytes(scheme.section_bytes(shape)),
          slot_count(detail::on_rows<typename S::granularity_type>(shape.role) ? codes.rows().padded_size()
                                                                               : codes.cols.padded_size()),
          size(sizeof(typename S::parameter)) {}

    KVQ_INLINE std::size_t offset(int group, int slot) const {
        return first + static_cast<std::size_t>((group * slot_count + slot) * size);
    }
};

}  // namespace kvq::inline KVQ_TAGGED::kernels
