// A whole file as bytes.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

namespace llama {

// `role`: kind of the file, for the error message.
inline std::string read_file(const std::string& role, const std::string& path) {
    std::error_code ignored;
    std::ifstream file(path, std::ios::binary);
    if (!file || std::filesystem::is_directory(path, ignored)) {
        throw std::runtime_error(role + " \"" + path + "\" cannot be opened");
    }
    return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace llama
