// Reference for packing: reads and writes one code at a time, constexpr, on host and device.
//
//   unpack(pack(codes)) = codes for every width 1..8, every shape and every grouping.
//
// The kernels in cpu/ write the same bytes, one vector at a time.
#pragma once

#include <cstddef>

#include "code_layout.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Byte (counted from the start of the block) of `plane`'s bits of the code at (row, col).
template <int Bits>
KVQ_HD constexpr std::size_t code_byte(const code_layout<Bits>& layout, int row, int col,
                                       int plane) noexcept {
    using planes = code_planes<Bits>;
    const int slot = layout.cols.slot(col);
    const int vector = planes::first_vector(plane, layout.quads()) + slot / 4 / planes::quads_per_word(plane);
    return layout.tiles.word(row, vector) * 4 + static_cast<std::size_t>(slot % 4);
}

/// Writes one code; its bits must have been zero before.
template <int Bits, class Byte>
KVQ_HD constexpr void pack_code(const code_layout<Bits>& layout, Byte* block, int row, int col,
                                unsigned code) noexcept {
    using planes = code_planes<Bits>;
    const int quad = layout.cols.slot(col) / 4;
    for (int p = 0; p < planes::count; ++p) {
        const int width = planes::width(p);
        const unsigned part = (code >> planes::shift(p)) & ((1u << width) - 1u);
        Byte& byte = block[code_byte(layout, row, col, p)];
        byte = static_cast<Byte>(static_cast<unsigned>(byte) |
                                 (part << (width * (quad % planes::quads_per_word(p)))));
    }
}

/// Reads one code.
template <int Bits, class Byte>
KVQ_HD constexpr unsigned unpack_code(const code_layout<Bits>& layout, const Byte* block, int row,
                                      int col) noexcept {
    using planes = code_planes<Bits>;
    const int quad = layout.cols.slot(col) / 4;
    unsigned code = 0;
    for (int p = 0; p < planes::count; ++p) {
        const int width = planes::width(p);
        const auto byte = static_cast<unsigned>(block[code_byte(layout, row, col, p)]);
        const unsigned part = (byte >> (width * (quad % planes::quads_per_word(p)))) & ((1u << width) - 1u);
        code |= part << planes::shift(p);
    }
    return code;
}

}}  // namespace kvq
