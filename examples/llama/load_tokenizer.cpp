#include "load_tokenizer.hpp"

#include "gguf.hpp"

#include <filesystem>

namespace llama {

tokenizer load_tokenizer(const std::string& path) {
    std::error_code ignored;
    if (std::filesystem::is_directory(path, ignored)) {
        return tokenizer(read_json_vocabulary((std::filesystem::path(path) / "tokenizer.json").string()));
    }
    if (path.ends_with(".json")) {
        return tokenizer(read_json_vocabulary(path));
    }
    return tokenizer(is_gguf(path) ? read_gguf_vocabulary(path) : read_llama2c_vocabulary(path));
}

bool has_tokenizer(const std::string& path) {
    std::error_code ignored;
    return is_gguf(path) || std::filesystem::exists(std::filesystem::path(path) / "tokenizer.json", ignored);
}

}  // namespace llama
