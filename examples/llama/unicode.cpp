#include "unicode.hpp"

#include <array>
#include <memory>

namespace llama {
namespace {

constexpr std::string_view category_names[] = {"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd",
                                               "Nl", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po",
                                               "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cn"};
constexpr std::size_t other = std::size(category_names) - 1;

constexpr std::string_view runs =
#include "data/unicode_categories.inc"
    ;

// The place of each code point's category in `category_names`.
std::unique_ptr<const std::uint8_t[]> read_categories() {
    auto categories = std::make_unique<std::uint8_t[]>(first_stray_byte);
    std::size_t code_point = 0;
    for (std::size_t at = 0; at < runs.size();) {
        const char letter = runs[at++];
        std::size_t length = 0;
        for (; at < runs.size() && runs[at] >= '0' && runs[at] <= '9'; ++at) {
            length = 10 * length + static_cast<std::size_t>(runs[at] - '0');
        }
        for (std::size_t i = 0; i < (length > 0 ? length : 1) && code_point < first_stray_byte; ++i) {
            const std::size_t place = letter == 'A'   ? i % 2
                                      : letter == 'B' ? (i + 1) % 2
                                                      : static_cast<std::size_t>(letter - 'a');
            categories[code_point++] = static_cast<std::uint8_t>(place);
        }
    }
    return categories;
}

}  // namespace

category_set find_category(std::string_view name) {
    category_set set = 0;
    for (std::size_t place = 0; place < other; ++place) {
        if (!name.empty() && (category_names[place] == name || category_names[place].substr(0, 1) == name)) {
            set |= category_set{1} << place;
        }
    }
    return set;
}

category_set category_of(char32_t code_point) {
    static const std::unique_ptr<const std::uint8_t[]> categories = read_categories();
    return category_set{1} << (code_point < first_stray_byte ? categories[code_point] : other);
}

bool is_white_space(char32_t c) {
    return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

decoded_text decode_utf8(std::string_view text) {
    decoded_text decoded;
    for (std::size_t at = 0; at < text.size();) {
        const auto byte = [&](std::size_t index) { return static_cast<unsigned char>(text[index]); };
        const unsigned first = byte(at);
        const std::size_t length = first < 0x80   ? 1
                                   : first < 0xC2 ? 0
                                   : first < 0xE0 ? 2
                                   : first < 0xF0 ? 3
                                   : first < 0xF5 ? 4
                                                  : 0;
        char32_t code_point = length == 1 ? first : first & (0x7FU >> length);
        bool valid = length > 0 && at + length <= text.size();
        for (std::size_t i = 1; valid && i < length; ++i) {
            valid = (byte(at + i) & 0xC0) == 0x80;
            code_point = code_point << 6 | (byte(at + i) & 0x3F);
        }
        constexpr char32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
        valid = valid && code_point >= least[length] && code_point < first_stray_byte &&
                (code_point < 0xD800 || code_point > 0xDFFF);
        decoded.code_points.push_back(valid ? code_point : first_stray_byte + first);
        decoded.offsets.push_back(at);
        at += valid ? length : 1;
    }
    decoded.offsets.push_back(text.size());
    return decoded;
}

void append_utf8(std::string& text, char32_t c) {
    const auto add = [&](char32_t byte) { text += static_cast<char>(byte); };
    if (c < 0x80) {
        add(c);
        return;
    }
    if (c < 0x800) {
        add(0xC0 | c >> 6);
    } else {
        if (c < 0x10000) {
            add(0xE0 | c >> 12);
        } else {
            add(0xF0 | c >> 18);
            add(0x80 | (c >> 12 & 0x3F));
        }
        add(0x80 | (c >> 6 & 0x3F));
    }
    add(0x80 | (c & 0x3F));
}

}  // namespace llama
