// What a tokenizer is made of. llama2.c files, GGUF files and tokenizer.json all end up here
// (load_tokenizer.hpp).
#pragma once

#include "text_pattern.hpp"

#include <string>
#include <vector>

namespace llama {

// normal, unknown, control, user_defined, unused and byte have their numbers in GGUF files.
enum class token_kind { normal = 1, unknown, control, user_defined, unused, byte };

struct vocabulary {
    struct token {
        std::string text;  // the bytes that it stands for; one byte for token_kind::byte
        float score = 0.0F;
        token_kind kind = token_kind::normal;
    };
    struct merge {
        int left, right, result;
    };
    // A token that is cut out of a text before anything else, with the white space beside it where that is
    // stripped.
    struct added_token {
        int id;
        bool strip_left = false, strip_right = false;
    };

    std::vector<token> tokens;
    std::vector<added_token> added;

    // 1. A text gets a space in front, and so does what follows an added token, unless only_first.
    bool leading_space = false, only_first = false;
    // 2. U+2581, SentencePiece's sign for a space, is a space.
    bool spaces_are_signs = false;
    // 3. Each pattern cuts the parts that the one before left; merges stay inside of a part.
    std::vector<text_pattern> patterns;
    // 4. A part that is a token as a whole is not merged.
    bool whole_parts = false;
    // 5. A part begins as one token per byte, or per character: where a character is no token, as one per
    // byte of it.
    bool begins_as_bytes = false;
    // 6. Two neighbours merge, the best pair first: the earliest of `merges`, or, without them, the pair
    // whose sum has the best score.
    bool merges_by_score = false;
    std::vector<merge> merges;

    bool adds_begin_of_text = true;
    int begin_of_text = -1;      // -1: none
    std::vector<int> ends;       // tokens that end a text
    bool may_be_padded = false;  // the model may have more tokens than the tokenizer
};

// "<0x41>" to 0x41, anything else to -1.
int parse_byte_name(std::string_view text);

// Every U+2581 becomes a space.
std::string signs_to_spaces(std::string_view text);

// Byte-level vocabularies write every byte as a printable character (GPT-2: "Ġ" is a space). Returns the
// bytes; a text with any other character stays as it is.
std::string bytes_of_printable(std::string_view text);

}  // namespace llama
