// Codes of any width one behind the other, the lowest bit first, for schemes whose codes are dequantized
// before they are multiplied.
//
//   code of width w at bit position p: bits p, ..., p + w - 1 of the bytes
//
// Contract: w from 1 to 16; the bits that are written were 0 before.
#pragma once

#include <cstddef>

namespace baselines {

inline void put_bits(std::byte* bytes, std::size_t& at, int width, unsigned code) noexcept {
    for (int i = 0; i < width; ++i, ++at)
        bytes[at / 8] |= static_cast<std::byte>((code >> i & 1u) << (at % 8));
}

inline unsigned get_bits(const std::byte* bytes, std::size_t& at, int width) noexcept {
    unsigned code = 0;
    for (int i = 0; i < width; ++i, ++at)
        code |= (static_cast<unsigned>(bytes[at / 8]) >> (at % 8) & 1u) << i;
    return code;
}

}  // namespace baselines
