// The tokens to evaluate on: a text file, or a file of token ids (16 or 32 bits, little-endian).
#pragma once

#include "tokenizer.hpp"

#include <string>
#include <vector>

namespace llama {

// Throws std::runtime_error when the vocabularies of model and tokenizer differ.
void check_vocabulary(const tokenizer& pieces, int vocab);

std::vector<int> read_text(const std::string& path, const tokenizer& pieces);

// 32-bit ids in a file named *.u32, else 16-bit ones. Throws std::runtime_error for an id that is not in a
// vocabulary of this size.
std::vector<int> read_token_ids(const std::string& path, int vocab);

}  // namespace llama
