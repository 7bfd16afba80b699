// A llama2.c tokenizer file: longest piece as a 32-bit integer, then for each piece score (fp32), length
// (32-bit integer) and bytes.
#include "load_tokenizer.hpp"
#include "read_file.hpp"

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace llama {
namespace {

constexpr int begin_word = 1, end_word = 2, first_byte_piece = 3;  // 0 is unknown

[[noreturn]] void refuse_vocabulary(const std::string& path, const std::string& reason) {
    throw std::runtime_error("tokenizer \"" + path + "\": " + reason);
}

template <class T>
T load(const std::string& bytes, std::size_t at) {
    T value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
}

// Three layouts are in use. Newer files name the byte pieces 3 to 258 "<0x00>" to "<0xFF>"; older ones have
// the character with that code point there, so that bytes from 0x80 on take two bytes; byte-level
// vocabularies have no such block: every byte is an ordinary piece.
void find_byte_pieces(vocabulary& words) {
    bool named = std::ssize(words.tokens) >= first_byte_piece + 256;
    bool characters = named;
    const auto piece = [&](int byte) -> vocabulary::token& {
        return words.tokens[static_cast<std::size_t>(first_byte_piece + byte)];
    };
    for (int byte = 0; byte < 256 && (named || characters); ++byte) {
        std::string character;
        append_utf8(character, static_cast<char32_t>(byte));
        named = named && parse_byte_name(piece(byte).text) == byte;
        characters = characters && piece(byte).text == character;
    }
    words.leading_space = named || characters;
    for (int byte = 0; byte < 256 && words.leading_space; ++byte) {
        piece(byte).text.assign(1, static_cast<char>(byte));
        piece(byte).kind = token_kind::byte;
    }
}

}  // namespace

vocabulary read_llama2c_vocabulary(const std::string& path) {
    const std::string bytes = read_file("tokenizer", path);
    if (bytes.size() < 4) {
        refuse_vocabulary(
            path, "the file has " + std::to_string(bytes.size()) + " bytes, the header alone needs 4");
    }
    vocabulary words;
    const auto longest = load<std::int32_t>(bytes, 0);
    std::size_t at = 4;
    while (at < bytes.size()) {
        const std::size_t left = bytes.size() - at;
        const std::string where =
            "piece " + std::to_string(words.tokens.size()) + " at byte " + std::to_string(at);
        if (left < 8) {
            refuse_vocabulary(path, where + " is cut: " + std::to_string(left) + " bytes are left");
        }
        const auto score = load<float>(bytes, at);
        const auto length = load<std::int32_t>(bytes, at + 4);
        if (length < 0 || length > longest) {
            refuse_vocabulary(path, where + " is " + std::to_string(length) +
                                        " bytes long, the header allows 0 to " + std::to_string(longest));
        }
        if (left - 8 < static_cast<std::size_t>(length)) {
            refuse_vocabulary(path, where + " is cut: " + std::to_string(left - 8) + " of " +
                                        std::to_string(length) + " bytes are left");
        }
        // Unknown, begin and end of text: pieces of no text.
        const bool special = words.tokens.size() < first_byte_piece;
        words.tokens.push_back({bytes.substr(at + 8, static_cast<std::size_t>(length)), score,
                                special ? token_kind::control : token_kind::normal});
        at += 8 + static_cast<std::size_t>(length);
    }
    find_byte_pieces(words);
    words.merges_by_score = true;
    words.begin_of_text = begin_word;
    words.ends = {begin_word, end_word};
    return words;
}

}  // namespace llama
