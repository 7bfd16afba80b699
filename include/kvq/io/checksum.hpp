// CRC32C: the checksum of saved files and of pages on the wire.
//
//   c(x) = x^32 * m(x) mod g(x),  g = 0x1edc6f41 (reflected 0x82f63b78), all ones before, inverted after
//
// Finds every error burst of up to 32 bits, so every flipped bit and every damaged byte. Not a signature: it
// protects against accidents, not against intent.
// Source: polynomial of Castagnoli, Brauer and Herrmann 1993; parameters and test vectors of RFC 3720,
// section 12.1 and appendix B.4; eight bytes at a time after Kounavis and Berry 2005 ("slicing by 8").
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "../core/bits.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {

/// Row k holds the remainder of every byte that is followed by k zero bytes.
constexpr std::array<std::array<std::uint32_t, 256>, 8> crc32c_tables() noexcept {
    std::array<std::array<std::uint32_t, 256>, 8> tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t c = byte;
        for (int bit = 0; bit < 8; ++bit) c = c >> 1 ^ (c & 1 ? 0x82f63b78u : 0u);
        tables[0][byte] = c;
    }
    for (std::size_t k = 1; k < 8; ++k)
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t c = tables[k - 1][byte];
            tables[k][byte] = c >> 8 ^ tables[0][c & 0xff];
        }
    return tables;
}

}  // namespace detail

/// A checksum of all bytes added so far.
class crc32c {
public:
    void add(const void* data, std::size_t bytes) noexcept {
        const auto& t = tables;
        const auto* p = static_cast<const unsigned char*>(data);
        std::uint32_t c = state_;
        for (; bytes >= 8; bytes -= 8, p += 8) {
            const std::uint32_t a = c ^ word(p), b = word(p + 4);
            c = t[7][a & 0xff] ^ t[6][a >> 8 & 0xff] ^ t[5][a >> 16 & 0xff] ^ t[4][a >> 24] ^ t[3][b & 0xff] ^
                t[2][b >> 8 & 0xff] ^ t[1][b >> 16 & 0xff] ^ t[0][b >> 24];
        }
        for (; bytes > 0; --bytes, ++p) c = c >> 8 ^ t[0][(c ^ *p) & 0xff];
        state_ = c;
    }
    std::uint32_t value() const noexcept { return ~state_; }

    static std::uint32_t of(const void* data, std::size_t bytes) noexcept {
        crc32c c;
        c.add(data, bytes);
        return c.value();
    }

private:
    static constexpr auto tables = detail::crc32c_tables();

    static std::uint32_t word(const unsigned char* p) noexcept {
        return static_cast<std::uint32_t>(p[0]) | static_cast<std::uint32_t>(p[1]) << 8 |
               static_cast<std::uint32_t>(p[2]) << 16 | static_cast<std::uint32_t>(p[3]) << 24;
    }

    std::uint32_t state_ = ~std::uint32_t{0};
};

}}  // namespace kvq
