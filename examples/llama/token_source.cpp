#include "token_source.hpp"

#include "read_file.hpp"

#include <cstddef>
#include <stdexcept>

namespace llama {
namespace {

std::string read_input(const std::string& path) {
    std::string bytes = read_file("input", path);
    if (bytes.empty()) {
        throw std::runtime_error("input \"" + path + "\" is empty");
    }
    return bytes;
}

}  // namespace

void check_vocabulary(const tokenizer& pieces, int vocab) {
    if (pieces.size() != vocab) {
        throw std::runtime_error("the tokenizer has " + std::to_string(pieces.size()) +
                                 " pieces, the model's vocabulary " + std::to_string(vocab));
    }
}

std::vector<int> read_text(const std::string& path, const tokenizer& pieces) {
    return pieces.encode(read_input(path));
}

std::vector<int> read_token_ids(const std::string& path, int vocab) {
    const std::string bytes = read_input(path);
    if (bytes.size() % 2 != 0) {
        throw std::runtime_error("input \"" + path + "\" has " + std::to_string(bytes.size()) +
                                 " bytes, 16-bit token ids need an even number");
    }
    std::vector<int> ids;
    ids.reserve(bytes.size() / 2);
    for (std::size_t at = 0; at < bytes.size(); at += 2) {
        const int id = static_cast<unsigned char>(bytes[at]) | static_cast<unsigned char>(bytes[at + 1]) << 8;
        if (id >= vocab) {
            throw std::runtime_error("input \"" + path + "\": token " + std::to_string(at / 2) +
                                     " has the id " + std::to_string(id) +
                                     ", the model's vocabulary ends at " + std::to_string(vocab - 1));
        }
        ids.push_back(id);
    }
    return ids;
}

}  // namespace llama
