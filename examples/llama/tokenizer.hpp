// A llama2.c tokenizer file: pieces of text with scores; encode() merges the best pair until no pair is left.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace llama {

class tokenizer {
public:
    static constexpr int begin_of_text = 1, end_of_text = 2;

    // Throws std::runtime_error when the file is truncated or a length in it is impossible.
    explicit tokenizer(const std::string& path);
    tokenizer(tokenizer&&) = default;  // no copies: the index refers to the pieces
    tokenizer& operator=(tokenizer&&) = default;

    int size() const { return static_cast<int>(pieces_.size()); }

    // Without the begin-of-text token.
    std::vector<int> encode(std::string_view text) const;

    // The bytes of one token; after begin-of-text, the space that encode() adds before a text is dropped.
    std::string_view decode(int previous, int token) const;

private:
    struct piece {
        std::string text;
        float score;
    };

    void find_byte_pieces();
    std::vector<int> split(std::string_view text) const;
    int merged(int left, int right) const;

    std::vector<piece> pieces_;
    std::unordered_map<std::string_view, int> ids_;
    std::array<int, 256> byte_ids_{};  // the piece of a single byte, or -1
    bool leading_space_ = false;       // SentencePiece style: a text begins with a space
    int first_plain_piece_ = 0;        // after the special pieces and the block of bytes
};

}  // namespace llama
