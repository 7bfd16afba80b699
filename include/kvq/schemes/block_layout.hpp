// block_layout: where the codes, parameters and token scales of a block lie. The CPU and CUDA read every
// offset here.
//
//   block = [codes][parameters][token scales]      codes padded to 16 bytes, the block as well;
//                                                  docs/reference/format.md
//
//   lines
//     the axis of the block's matrix that carries parameters: tokens (per token) or channels (per channel)
//   cut
//     the other axis, cut into groups that share parameters; parameters are stored [group][slot of the line]
//
// Contract: a function of the spec, whose content is codes and whose group size is known, and of the shape;
// no plan of widths changes it. Constant expressions.
#pragma once

#include "../pack/code_layout.hpp"
#include "codec_spec.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

struct block_layout {
    codec_spec codec;

    KVQ_HD KVQ_INLINE constexpr grouped_axis rows(const block_shape& s) const noexcept {
        return axis(s.rows(), !codec.on_rows(s.role));
    }
    KVQ_HD KVQ_INLINE constexpr grouped_axis cols(const block_shape& s) const noexcept {
        return axis(s.cols(), codec.on_rows(s.role));
    }
    KVQ_HD KVQ_INLINE constexpr grouped_axis lines(const block_shape& s) const noexcept {
        return codec.on_rows(s.role) ? rows(s) : cols(s);
    }
    KVQ_HD KVQ_INLINE constexpr grouped_axis cut(const block_shape& s) const noexcept {
        return codec.on_rows(s.role) ? cols(s) : rows(s);
    }
    KVQ_HD KVQ_INLINE constexpr int groups(const block_shape& s) const noexcept { return cut(s).groups(); }
    /// Slots of the lines: their number rounded up to 4.
    KVQ_HD KVQ_INLINE constexpr int slot_count(const block_shape& s) const noexcept {
        return lines(s).padded_size();
    }

    /// 32-bit words of a row of codes.
    KVQ_HD KVQ_INLINE constexpr int row_words(const block_shape& s) const noexcept {
        return detail::row_words(codec.average_eighths, codec.narrow_width, cols(s).padded_size() / 4);
    }
    /// Codes start at the block's first byte.
    KVQ_HD KVQ_INLINE constexpr std::size_t code_bytes(const block_shape& s) const noexcept {
        return static_cast<std::size_t>(rows(s).padded_size()) * static_cast<std::size_t>(row_words(s)) * 4;
    }
    KVQ_HD KVQ_INLINE constexpr std::size_t scale_offset(const block_shape& s) const noexcept {
        return detail::round_up(code_bytes(s), std::size_t{16});
    }
    /// Bytes from a scale to its bias.
    KVQ_HD KVQ_INLINE constexpr std::size_t section_bytes(const block_shape& s) const noexcept {
        return detail::round_up(static_cast<std::size_t>(groups(s)) *
                                    static_cast<std::size_t>(slot_count(s)) *
                                    static_cast<std::size_t>(codec.parameter_bytes),
                                static_cast<std::size_t>(codec.parameter_padding));
    }
    /// The scale of a slot in a group, of params<P>.
    KVQ_HD KVQ_INLINE constexpr std::size_t parameter_offset(const block_shape& s, int group,
                                                             int slot) const noexcept {
        return scale_offset(s) +
               static_cast<std::size_t>((group * slot_count(s) + slot) * codec.parameter_bytes);
    }
    KVQ_HD KVQ_INLINE constexpr std::size_t bias_offset(const block_shape& s) const noexcept {
        return scale_offset(s) + section_bytes(s);
    }
    /// A token has the slot of its place on the cut axis.
    KVQ_HD KVQ_INLINE constexpr std::size_t token_scale_offset(const block_shape& s) const noexcept {
        const std::size_t shared = codec.parameters == parameter_storage::bytes
                                       ? block_parameters<byte_params>::shared_bytes
                                       : std::size_t{0};
        return scale_offset(s) + (codec.has_bias ? 2 : 1) * section_bytes(s) +
               shared * static_cast<std::size_t>(groups(s));
    }
    KVQ_HD KVQ_INLINE constexpr std::size_t bytes(const block_shape& s) const noexcept {
        return detail::round_up(
            token_scale_offset(s) + static_cast<std::size_t>(cut(s).padded_size() * codec.token_scale_bytes),
            std::size_t{16});
    }

private:
    KVQ_HD KVQ_INLINE constexpr grouped_axis axis(int size, bool is_cut) const noexcept {
        if (is_cut && codec.group > 0 && codec.group < size) return {size, codec.group};
        return {size, size};
    }
};

}}  // namespace kvq
