// Layout of 16- and 32-bit values in an unquantized block: tiles whose words hold 2 (16-bit) or 1 (32-bit)
// columns.
//
// Values of the summed axis that have not been written are zero, so that a block can be used before it is
// full.
#pragma once

#include "../core/shape.hpp"
#include "tile_layout.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

template <class T>
struct value_layout {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "kvq::value_layout holds 16-bit or 32-bit values");
    static constexpr int values_per_word = 4 / static_cast<int>(sizeof(T));

    tile_layout tiles;

    KVQ_HD constexpr explicit value_layout(const block_shape& s) noexcept
        : tiles{{s.rows(), s.rows()}, detail::ceil_div(s.cols(), values_per_word)} {}

    /// Index of the element (row, col), counted in T.
    KVQ_HD constexpr std::size_t element(int row, int col) const noexcept {
        return tiles.word(row, col / values_per_word) * values_per_word +
               static_cast<std::size_t>(col % values_per_word);
    }
    KVQ_HD constexpr std::size_t bytes() const noexcept { return tiles.words() * 4; }
};

}}  // namespace kvq
