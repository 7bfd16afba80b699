// block_layout: where the codes, parameters and token scales of a block of scheme<...> lie. The CPU and CUDA read every offset here.
//
//   block = [codes][parameters][token scales]      codes padded to 16 bytes, the block as well; docs/reference/format.md
//
//   lines    the axis of the block's matrix that carries parameters: tokens (per_token) or channels (per_channel)
//   cut      the other axis, cut into groups that share parameters; parameters are stored [group][slot of the line]
//
// Contract: constant expressions of the shape and of the group size; no plan of widths changes them.
#pragma once

#include "../pack/code_layout.hpp"
#include "../quant/block_params.hpp"
#include "../quant/granularity.hpp"
#include "mixed_bits.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

template <class Codes, class Granularity, bool HasBias, class Params, class TokenScales>
struct block_layout {
    using parameters = block_parameters<Params>;
    static constexpr bool several_widths = Codes::several_widths;

    [[no_unique_address]] Granularity granularity{};

    KVQ_HD constexpr grouped_axis rows(const block_shape& s) const noexcept {
        return detail::row_axis(granularity, s);
    }
    KVQ_HD constexpr grouped_axis cols(const block_shape& s) const noexcept {
        return detail::col_axis(granularity, s);
    }
    KVQ_HD constexpr grouped_axis lines(const block_shape& s) const noexcept {
        return detail::on_rows<Granularity>(s.role) ? rows(s) : cols(s);
    }
    KVQ_HD constexpr grouped_axis cut(const block_shape& s) const noexcept {
        return detail::on_rows<Granularity>(s.role) ? cols(s) : rows(s);
    }
    KVQ_HD constexpr int groups(const block_shape& s) const noexcept { return cut(s).groups(); }
    /// Slots of the lines: their number rounded up to 4.
    KVQ_HD constexpr int slot_count(const block_shape& s) const noexcept { return lines(s).padded_size(); }

    /// Codes of one width; they start at the block's first byte.
    KVQ_HD KVQ_INLINE constexpr auto codes(const block_shape& s) const noexcept requires(!several_widths) {
        return code_layout<Codes::value>{rows(s), cols(s)};
    }
    KVQ_HD constexpr std::size_t code_bytes(const block_shape& s) const noexcept {
        if constexpr (several_widths)
            return static_cast<std::size_t>(cut(s).padded_size()) *
                   static_cast<std::size_t>(Codes::row_words(s.dim)) * 4;
        else
            return codes(s).bytes();
    }

    KVQ_HD constexpr std::size_t scale_offset(const block_shape& s) const noexcept {
        return detail::round_up(code_bytes(s), std::size_t{16});
    }
    /// Bytes from a scale to its bias.
    KVQ_HD constexpr std::size_t section_bytes(const block_shape& s) const noexcept {
        return parameters::section_bytes(groups(s), slot_count(s));
    }
    /// The scale of a slot in a group, of params<P>.
    KVQ_HD constexpr std::size_t parameter_offset(const block_shape& s, int group, int slot) const noexcept {
        return scale_offset(s) +
               static_cast<std::size_t>(group * slot_count(s) + slot) * sizeof(typename parameters::stored);
    }
    KVQ_HD constexpr std::size_t bias_offset(const block_shape& s) const noexcept {
        return scale_offset(s) + section_bytes(s);
    }
    /// A token has the slot of its place on the cut axis.
    KVQ_HD constexpr std::size_t token_scale_offset(const block_shape& s) const noexcept {
        return scale_offset(s) + (HasBias ? parameters::bytes(groups(s), slot_count(s)) : section_bytes(s));
    }
    KVQ_HD constexpr std::size_t bytes(const block_shape& s) const noexcept {
        return detail::round_up(token_scale_offset(s) + TokenScales::bytes(cut(s).padded_size()),
                                std::size_t{16});
    }
};

}}  // namespace kvq
