// The pre-tokenizers that GGUF files name (tokenizer.ggml.pre): regular expressions that cut a text into
// parts.
//
// Source: the tokenizer.json of the models that they are named after; "default" as in llama.cpp
// (src/llama-vocab.cpp).
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace llama {

struct pre_tokenizer {
    std::vector<std::string_view> expressions;
    bool whole_parts = false;         // a part that is a token as a whole is not merged
    bool adds_begin_of_text = false;  // unless the file says otherwise
};

// The expression of GPT-2, which byte-level tokenizers use when they name no other.
extern const std::string_view gpt2_expression;

// Throws std::runtime_error for a name that is not known.
pre_tokenizer find_pre_tokenizer(std::string_view name);

}  // namespace llama
