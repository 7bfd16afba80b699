// Readers of tokenizers, one for each kind of file.
#pragma once

#include "tokenizer.hpp"

#include <string>

namespace llama {

// path: a GGUF file, a tokenizer.json, a folder with one, or a llama2.c tokenizer. Throws std::runtime_error
// that names the file and what is wrong with it or not handled.
tokenizer load_tokenizer(const std::string& path);

// Does the file or folder of a model have one?
bool has_tokenizer(const std::string& path);

vocabulary read_llama2c_vocabulary(const std::string& path);
vocabulary read_gguf_vocabulary(const std::string& path);
// Also reads tokenizer_config.json and generation_config.json beside it, where they are, for the tokens that
// begin and end a text.
vocabulary read_json_vocabulary(const std::string& path);

}  // namespace llama
