#include "tokenizer.hpp"

#include "read_file.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <queue>
#include <stdexcept>

namespace llama {
namespace {

constexpr int first_byte_piece = 3;  // after unknown, begin and end of text

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
    throw std::runtime_error("tokenizer \"" + path + "\": " + reason);
}

template <class T>
T load(const std::string& bytes, std::size_t at) {
    T value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
}

std::string hex_name(int byte) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(byte));
    return name;
}

// The character U+0000 to U+00FF in UTF-8.
std::string utf8_character(int code_point) {
    if (code_point < 0x80) {
        return {static_cast<char>(code_point)};
    }
    return {static_cast<char>(0xC0 | (code_point >> 6)), static_cast<char>(0x80 | (code_point & 0x3F))};
}

std::size_t character_length(std::string_view text) {
    std::size_t length = 1;
    while (length < text.size() && length < 4 && (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) {
        ++length;
    }
    return length;
}

}  // namespace

tokenizer::tokenizer(const std::string& path) {
    // File: longest piece as a 32-bit integer, then score (fp32), length (32-bit integer), bytes for each
    // piece.
    const std::string bytes = read_file("tokenizer", path);
    if (bytes.size() < 4) {
        refuse(path, "the file has " + std::to_string(bytes.size()) + " bytes, the header alone needs 4");
    }
    const auto longest = load<std::int32_t>(bytes, 0);
    std::size_t at = 4;
    while (at < bytes.size()) {
        const std::size_t left = bytes.size() - at;
        const std::string where =
            "piece " + std::to_string(pieces_.size()) + " at byte " + std::to_string(at);
        if (left < 8) {
            refuse(path, where + " is cut: " + std::to_string(left) + " bytes are left");
        }
        const auto score = load<float>(bytes, at);
        const auto length = load<std::int32_t>(bytes, at + 4);
        if (length < 0 || length > longest) {
            refuse(path, where + " is " + std::to_string(length) + " bytes long, the header allows 0 to " +
                             std::to_string(longest));
        }
        if (left - 8 < static_cast<std::size_t>(length)) {
            refuse(path, where + " is cut: " + std::to_string(left - 8) + " of " + std::to_string(length) +
                             " bytes are left");
        }
        pieces_.push_back({bytes.substr(at + 8, static_cast<std::size_t>(length)), score});
        at += 8 + static_cast<std::size_t>(length);
    }
    find_byte_pieces();
}

// Three layouts are in use. Newer files name the byte pieces 3 to 258 "<0x00>" to "<0xFF>"; older ones have
// the character with that code point there, so that bytes from 0x80 on take two bytes; byte-level vocabularies have
// no such block: every byte is an ordinary piece.
void tokenizer::find_byte_pieces() {
    bool named = size() >= first_byte_piece + 256;
    bool characters = named;
    for (int byte = 0; byte < 256 && (named || characters); ++byte) {
        const int id = first_byte_piece + byte;
        const std::string& text = pieces_[static_cast<std::size_t>(id)].text;
        named = named && text == hex_name(byte);
        characters = characters && text == utf8_character(byte);
    }
    leading_space_ = named || characters;
    first_plain_piece_ = first_byte_piece + (leading_space_ ? 256 : 0);

    for (int id = first_plain_piece_; id < size(); ++id) {
        ids_.emplace(pieces_[static_cast<std::size_t>(id)].text, id);
    }
    for (int byte = 0; byte < 256; ++byte) {
        int& id = byte_ids_[static_cast<std::size_t>(byte)];
        const char character = static_cast<char>(byte);
        if (leading_space_) {
            id = first_byte_piece + byte;
            pieces_[static_cast<std::size_t>(id)].text.assign(1, character);
        } else {
            const auto found = ids_.find(std::string_view(&character, 1));
            id = found != ids_.end() ? found->second : -1;
        }
    }
}

// One piece per character, or its bytes if the vocabulary lacks it.
std::vector<int> tokenizer::split(std::string_view text) const {
    std::vector<int> ids;
    while (!text.empty()) {
        const std::string_view character = text.substr(0, character_length(text));
        text.remove_prefix(character.size());
        if (const auto found = ids_.find(character); found != ids_.end()) {
            ids.push_back(found->second);
            continue;
        }
        for (const char unit : character) {
            const auto byte = static_cast<unsigned char>(unit);
            if (byte_ids_[byte] < 0) {
                throw std::runtime_error("the tokenizer has no piece for byte " + hex_name(byte));
            }
            ids.push_back(byte_ids_[byte]);
        }
    }
    return ids;
}

// The piece of two neighbours merged, or -1; fallback bytes do not merge.
int tokenizer::merged(int left, int right) const {
    if (leading_space_ && std::min(left, right) < first_plain_piece_) {
        return -1;
    }
    const std::string& head = pieces_[static_cast<std::size_t>(left)].text;
    const auto found = ids_.find(head + pieces_[static_cast<std::size_t>(right)].text);
    return found != ids_.end() ? found->second : -1;
}

std::vector<int> tokenizer::encode(std::string_view text) const {
    struct symbol {
        int id, previous, next;  // remaining neighbours; -1 and the size of the list mark the ends
    };
    struct pair {
        float score;
        int left, right, left_id, right_id, merged_id;

        bool operator<(const pair& other) const {  // the best score first, then the leftmost
            return score != other.score ? score < other.score : left > other.left;
        }
    };

    std::vector<symbol> symbols;
    std::string padded(leading_space_ && !text.empty() ? " " : "");
    padded += text;
    for (const int id : split(padded)) {
        const int index = static_cast<int>(symbols.size());
        symbols.push_back({id, index - 1, index + 1});
    }
    const int end = static_cast<int>(symbols.size());

    std::priority_queue<pair> pairs;
    const auto consider = [&](int left) {
        const int right = left < 0 ? end : symbols[static_cast<std::size_t>(left)].next;
        if (right >= end) {
            return;
        }
        const int left_id = symbols[static_cast<std::size_t>(left)].id;
        const int right_id = symbols[static_cast<std::size_t>(right)].id;
        if (const int id = merged(left_id, right_id); id >= 0) {
            pairs.push({pieces_[static_cast<std::size_t>(id)].score, left, right, left_id, right_id, id});
        }
    };
    for (int index = 0; index < end; ++index) {
        consider(index);
    }

    constexpr int gone = -1;
    while (!pairs.empty()) {
        const pair best = pairs.top();
        pairs.pop();
        symbol& left = symbols[static_cast<std::size_t>(best.left)];
        symbol& right = symbols[static_cast<std::size_t>(best.right)];
        if (left.id != best.left_id || right.id != best.right_id || left.next != best.right) {
            continue;  // one of the two was merged since
        }
        left.id = best.merged_id;
        left.next = right.next;
        right.id = gone;
        if (right.next < end) {
            symbols[static_cast<std::size_t>(right.next)].previous = best.left;
        }
        consider(left.previous);
        consider(best.left);
    }

    std::vector<int> ids;
    for (const symbol& each : symbols) {
        if (each.id != gone) {
            ids.push_back(each.id);
        }
    }
    return ids;
}

std::string_view tokenizer::decode(int previous, int token) const {
    std::string_view text = pieces_[static_cast<std::size_t>(token)].text;
    if (leading_space_ && previous == begin_of_text && text.starts_with(' ')) {
        text.remove_prefix(1);
    }
    return text;
}

}  // namespace llama
