#include "tokenizer.hpp"

#include <algorithm>
#include <cstdio>
#include <queue>
#include <stdexcept>
#include <utility>

namespace llama {
namespace {

std::size_t character_length(std::string_view text) {
    std::size_t length = 1;
    while (length < text.size() && length < 4 && (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) {
        ++length;
    }
    return length;
}

std::uint64_t pair_key(int left, int right) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
           static_cast<std::uint32_t>(right);
}

}  // namespace

tokenizer::tokenizer(vocabulary words) : words_(std::move(words)) {
    byte_ids_.fill(-1);
    for (int id = 0; id < size(); ++id) {
        const vocabulary::token& token = words_.tokens[static_cast<std::size_t>(id)];
        if (token.kind == token_kind::normal || token.kind == token_kind::user_defined) {
            ids_.emplace(token.text, id);
        } else if (token.kind == token_kind::byte) {
            byte_ids_[static_cast<unsigned char>(token.text[0])] = id;
        } else if (token.kind == token_kind::unknown) {
            unknown_ = id;
        }
    }
    for (std::size_t byte = 0; byte < byte_ids_.size(); ++byte) {
        const char character = static_cast<char>(byte);
        const auto found = ids_.find(std::string_view(&character, 1));
        if (byte_ids_[byte] < 0 && found != ids_.end()) {
            byte_ids_[byte] = found->second;
        }
    }
    float rank = 0.0F;
    for (const vocabulary::merge& each : words_.merges) {
        merges_.emplace(pair_key(each.left, each.right), pair_merge{rank, each.result});
        rank += 1.0F;
    }
    const auto text_of = [&](const vocabulary::added_token& added) -> const std::string& {
        return words_.tokens[static_cast<std::size_t>(added.id)].text;
    };
    for (const vocabulary::added_token& added : words_.added) {
        if (!text_of(added).empty()) {
            added_[static_cast<unsigned char>(text_of(added)[0])].push_back(added);
        }
    }
    for (auto& list : added_) {
        std::stable_sort(list.begin(), list.end(),
                         [&](const auto& a, const auto& b) { return text_of(a).size() > text_of(b).size(); });
    }
}

// The longest added token at the begin of a text.
const vocabulary::added_token* tokenizer::added_at(std::string_view text) const {
    for (const vocabulary::added_token& added : added_[static_cast<unsigned char>(text[0])]) {
        if (text.starts_with(words_.tokens[static_cast<std::size_t>(added.id)].text)) {
            return &added;
        }
    }
    return nullptr;
}

std::vector<int> tokenizer::encode(std::string_view text) const {
    constexpr std::string_view white = " \t\n\r\f\v";
    std::vector<int> ids;
    std::size_t begin = 0;  // of the text that is not yet encoded
    for (std::size_t at = 0; at < text.size();) {
        const vocabulary::added_token* const added = added_at(text.substr(at));
        if (added == nullptr) {
            ++at;
            continue;
        }
        std::string_view before = text.substr(begin, at - begin);
        if (added->strip_left) {
            before = before.substr(0, before.find_last_not_of(white) + 1);
        }
        encode_segment(before, begin == 0, ids);
        ids.push_back(added->id);
        at += words_.tokens[static_cast<std::size_t>(added->id)].text.size();
        if (added->strip_right) {
            at = std::min(text.find_first_not_of(white, at), text.size());
        }
        begin = at;
    }
    encode_segment(text.substr(begin), begin == 0, ids);
    return ids;
}

// Text without added tokens.
void tokenizer::encode_segment(std::string_view text, bool is_first, std::vector<int>& ids) const {
    if (text.empty()) {
        return;
    }
    std::string prepared(words_.leading_space && (is_first || !words_.only_first) ? " " : "");
    prepared += words_.spaces_are_signs ? signs_to_spaces(text) : std::string(text);
    if (words_.patterns.empty()) {
        encode_part(prepared, ids);
        return;
    }
    const decoded_text decoded = decode_utf8(prepared);
    std::vector<text_part> parts{{0, decoded.code_points.size()}};
    for (const text_pattern& pattern : words_.patterns) {
        parts = split(decoded.code_points, parts, pattern);
    }
    for (const text_part& part : parts) {
        const std::size_t begin = decoded.offsets[part.begin];
        encode_part(std::string_view(prepared).substr(begin, decoded.offsets[part.end] - begin), ids);
    }
}

std::vector<int> tokenizer::first_tokens(std::string_view text) const {
    std::vector<int> ids;
    while (!text.empty()) {
        const std::string_view character =
            text.substr(0, words_.begins_as_bytes ? 1 : character_length(text));
        text.remove_prefix(character.size());
        if (const auto found = ids_.find(character); found != ids_.end()) {
            ids.push_back(found->second);
            continue;
        }
        for (const char unit : character) {
            const int id = byte_ids_[static_cast<unsigned char>(unit)];
            if (id >= 0) {
                ids.push_back(id);
                continue;
            }
            if (unknown_ < 0) {
                char name[8];
                std::snprintf(name, sizeof name, "0x%02X",
                              static_cast<unsigned>(static_cast<unsigned char>(unit)));
                throw std::runtime_error(std::string("the tokenizer has no piece for byte ") + name);
            }
            ids.push_back(unknown_);  // once per character
            break;
        }
    }
    return ids;
}

tokenizer::pair_merge tokenizer::merged(int left, int right) const {
    if (!words_.merges_by_score) {
        const auto found = merges_.find(pair_key(left, right));
        return found != merges_.end() ? found->second : pair_merge{0.0F, -1};
    }
    const vocabulary::token& head = words_.tokens[static_cast<std::size_t>(left)];
    const vocabulary::token& tail = words_.tokens[static_cast<std::size_t>(right)];
    if (head.kind == token_kind::byte || tail.kind == token_kind::byte) {  // fallback bytes do not merge
        return {0.0F, -1};
    }
    const auto found = ids_.find(head.text + tail.text);
    return found != ids_.end()
               ? pair_merge{-words_.tokens[static_cast<std::size_t>(found->second)].score, found->second}
               : pair_merge{0.0F, -1};
}

void tokenizer::encode_part(std::string_view text, std::vector<int>& ids) const {
    struct symbol {
        int id, previous, next;  // remaining neighbours; -1 and the size of the list mark the ends
    };
    struct pair {
        float cost;
        int left, right, left_id, right_id, merged_id;

        bool operator<(const pair& other) const {  // the best pair first, then the leftmost
            return cost != other.cost ? cost > other.cost : left > other.left;
        }
    };

    if (words_.whole_parts) {
        if (const auto found = ids_.find(text); found != ids_.end()) {
            ids.push_back(found->second);
            return;
        }
    }
    std::vector<symbol> symbols;
    for (const int id : first_tokens(text)) {
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
        if (const pair_merge found = merged(left_id, right_id); found.result >= 0) {
            pairs.push({found.cost, left, right, left_id, right_id, found.result});
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

    for (const symbol& each : symbols) {
        if (each.id != gone) {
            ids.push_back(each.id);
        }
    }
}

std::string_view tokenizer::decode(int previous, int token) const {
    if (token >= size()) {  // a model may have more tokens
        return {};
    }
    std::string_view text = words_.tokens[static_cast<std::size_t>(token)].text;
    if (words_.leading_space && previous == words_.begin_of_text && text.starts_with(' ')) {
        text.remove_prefix(1);
    }
    return text;
}

bool tokenizer::ends_text(int token) const {
    return std::find(words_.ends.begin(), words_.ends.end(), token) != words_.ends.end();
}

}  // namespace llama
