// Layout of a matrix in 32-bit words: the summed axis inside words, the remaining axis across lanes.
//
//   matrix rows (remaining axis)   -> tiles of up to 32 neighbouring rows; the last tile of a row group may
//                                  have fewer
//   one tile                       -> words_per_row vectors, one after the other
//   one vector                     -> one 32-bit word of every row of the tile, side by side
//   one word                       -> consecutive columns (summed axis) of one row
//
// So a SIMD lane (or a row of a tensor-core tile) is one row, a product broadcasts words of the query or
// weight, and no sum runs across lanes. Heights are multiples of 4 rows (16 bytes). Axes may be cut into
// groups (values that share parameters); a group starts on a multiple of 4, so odd groups cost padding but
// nothing else.
// All offsets are relative: a block can be copied anywhere. docs/reference/format.md draws this.
#pragma once

#include <cstddef>

#include "../core/bits.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// An axis of `size` elements cut into groups of `group`; every group is padded to a multiple of 4 slots.
/// The counts are stored instead of divided at each call: kernels read them once per block.
struct grouped_axis {
    int size = 0;
    int group = 0;
    int count = 0;   ///< groups
    int stride = 0;  ///< slots from one group to the next

    constexpr grouped_axis() = default;
    KVQ_HD KVQ_INLINE constexpr grouped_axis(int n, int per_group) noexcept
        : size(n),
          group(per_group),
          count(n == per_group ? 1 : detail::ceil_div(n, per_group)),
          stride(detail::round_up(per_group, 4)) {}

    KVQ_HD constexpr int groups() const noexcept { return count; }
    KVQ_HD constexpr int group_size(int g) const noexcept { return detail::smaller(group, size - g * group); }
    /// Slots of group g: its size rounded up to 4.
    KVQ_HD constexpr int group_slots(int g) const noexcept { return detail::round_up(group_size(g), 4); }
    /// First slot of group g.
    KVQ_HD constexpr int group_begin(int g) const noexcept { return g * stride; }
    KVQ_HD constexpr int padded_size() const noexcept {
        return group_begin(count - 1) + group_slots(count - 1);
    }
    KVQ_HD constexpr int slot(int index) const noexcept {
        if (count == 1) return index;
        return group_begin(index / group) + index % group;
    }
    /// Index of the element in a slot; -1: padding.
    KVQ_HD constexpr int index(int slot) const noexcept {
        const int g = count == 1 ? 0 : slot / stride, in_group = slot - g * stride;
        return g < count && in_group < group_size(g) ? g * group + in_group : -1;
    }
};

struct tile_layout {
    static constexpr int tile_rows = 32;

    grouped_axis rows;
    int words_per_row = 0;

    KVQ_HD constexpr std::size_t words() const noexcept {
        return static_cast<std::size_t>(rows.padded_size()) * static_cast<std::size_t>(words_per_row);
    }

    /// Index of the word `vector` of `row`. O(1).
    KVQ_HD constexpr std::size_t word(int row, int vector) const noexcept {
        const int group = rows.count == 1 ? 0 : row / rows.group;
        const int in_group = row - group * rows.group;
        const int in_tile = in_group % tile_rows;
        const int first = rows.group_begin(group) + in_group - in_tile;
        const int height = detail::smaller(tile_rows, rows.group_slots(group) - (in_group - in_tile));
        return static_cast<std::size_t>(first) * static_cast<std::size_t>(words_per_row) +
               static_cast<std::size_t>(vector) * static_cast<std::size_t>(height) +
               static_cast<std::size_t>(in_tile);
    }
    /// Bytes from one vector of the tile of `row` to the next.
    constexpr std::ptrdiff_t vector_bytes(int row) const noexcept {
        if (words_per_row < 2) return 0;
        const int in_group = rows.count == 1 ? row : row % rows.group,
                  group = rows.count == 1 ? 0 : row / rows.group;
        return 4 * detail::smaller(tile_rows, rows.group_slots(group) - (in_group - in_group % tile_rows));
    }
};

}}  // namespace kvq
