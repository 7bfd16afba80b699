#include "vocabulary.hpp"

#include <array>
#include <charconv>

namespace llama {

int parse_byte_name(std::string_view text) {
    if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>') {
        return -1;
    }
    int byte = -1;
    const auto [end, failed] = std::from_chars(text.data() + 3, text.data() + 5, byte, 16);
    return failed == std::errc{} && end == text.data() + 5 ? byte : -1;
}

std::string signs_to_spaces(std::string_view text) {
    constexpr std::string_view sign = "\xE2\x96\x81";
    std::string spaces;
    spaces.reserve(text.size());
    for (std::size_t at = 0; at < text.size();) {
        const bool found = text.substr(at, sign.size()) == sign;
        spaces += found ? ' ' : text[at];
        at += found ? sign.size() : 1;
    }
    return spaces;
}

// Bytes 33 to 126, 161 to 172 and 174 to 255 are the characters of the same number, all others in order those
// from U+0100 on.
std::string bytes_of_printable(std::string_view text) {
    static const std::array<int, 0x144> byte_of = [] {
        std::array<int, 0x144> table;
        table.fill(-1);
        std::size_t next = 0x100;
        for (int byte = 0; byte < 256; ++byte) {
            const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
            table[printable ? static_cast<std::size_t>(byte) : next++] = byte;
        }
        return table;
    }();
    std::string bytes;
    for (const char32_t c : decode_utf8(text).code_points) {
        if (c >= byte_of.size() || byte_of[c] < 0) {
            return std::string(text);
        }
        bytes += static_cast<char>(byte_of[c]);
    }
    return bytes;
}

}  // namespace llama
