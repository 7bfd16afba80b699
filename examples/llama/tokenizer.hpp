// Text to tokens and back: SentencePiece and byte-pair encoding, whose differences are fields of a
// vocabulary.
#pragma once

#include "vocabulary.hpp"

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace llama {

class tokenizer {
public:
    explicit tokenizer(vocabulary words);
    tokenizer(tokenizer&&) = default;  // no copies: the index refers to the tokens
    tokenizer& operator=(tokenizer&&) = default;

    int size() const { return static_cast<int>(words_.tokens.size()); }

    // Without the begin-of-text token. Added tokens in the text ("<|im_start|>") are tokens.
    std::vector<int> encode(std::string_view text) const;

    // The bytes of one token; after begin-of-text, the space that encode() adds before a text is dropped.
    std::string_view decode(int previous, int token) const;

    bool adds_begin_of_text() const { return words_.adds_begin_of_text; }
    bool ends_text(int token) const;
    bool may_be_padded() const { return words_.may_be_padded; }

private:
    struct pair_merge {
        float cost;  // the lowest first
        int result;  // -1: the two do not merge
    };

    void encode_segment(std::string_view text, bool is_first, std::vector<int>& ids) const;
    void encode_part(std::string_view text, std::vector<int>& ids) const;
    std::vector<int> first_tokens(std::string_view text) const;
    pair_merge merged(int left, int right) const;
    const vocabulary::added_token* added_at(std::string_view text) const;

    vocabulary words_;
    std::unordered_map<std::string_view, int> ids_;                // tokens that a text is made of
    std::unordered_map<std::uint64_t, pair_merge> merges_;         // by left << 32 | right
    std::array<int, 256> byte_ids_{};                              // the token of a single byte, or -1
    std::array<std::vector<vocabulary::added_token>, 256> added_;  // by first byte, the longest first
    int unknown_ = -1;
};

}  // namespace llama
