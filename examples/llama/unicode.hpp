// Code points of UTF-8 text and their general categories.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace llama {

// Bits of a set of general categories: Lu is bit 0, Ll bit 1, and so on; Cc, Cf, Cs, Co and Cn share the last
// bit.
using category_set = std::uint32_t;

// The set of "L", "Lu", "N", ...; 0 for a name that does not exist.
category_set find_category(std::string_view name);

// The category of a code point, a set of one.
category_set category_of(char32_t code_point);

// The property White_Space.
bool is_white_space(char32_t code_point);

// A byte that is not part of UTF-8 counts as a code point of its own, above all others.
constexpr char32_t first_stray_byte = 0x110000;

struct decoded_text {
    std::vector<char32_t> code_points;
    std::vector<std::size_t> offsets;  // of each code point in bytes, and the end of the text
};
decoded_text decode_utf8(std::string_view text);

void append_utf8(std::string& text, char32_t code_point);

}  // namespace llama
