#include "token_source.hpp"

#include "read_file.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
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
    if (pieces.size() > vocab || (pieces.size() < vocab && !pieces.may_be_padded())) {
        throw std::runtime_error("the tokenizer has " + std::to_string(pieces.size()) +
                                 " pieces, the model's vocabulary " + std::to_string(vocab));
    }
}

std::vector<int> read_text(const std::string& path, const tokenizer& pieces) {
    return pieces.encode(read_input(path));
}

std::vector<int> read_token_ids(const std::string& path, int vocab) {
    const std::string bytes = read_input(path);
    const std::size_t width = path.ends_with(".u32") ? 4 : 2;
    if (bytes.size() % width != 0) {
        throw std::runtime_error("input \"" + path + "\" has " + std::to_string(bytes.size()) +
                                 " bytes, token ids of " + std::to_string(8 * width) +
                                 " bits need a multiple of " + std::to_string(width));
    }
    std::vector<int> ids;
    ids.reserve(bytes.size() / width);
    for (std::size_t at = 0; at < bytes.size(); at += width) {
        std::uint32_t id = 0;
        std::memcpy(&id, bytes.data() + at, width);
        if (id >= static_cast<std::uint32_t>(vocab)) {
            throw std::runtime_error("input \"" + path + "\": token " + std::to_string(at / width) +
                                     " has the id " + std::to_string(id) +
                                     ", the model's vocabulary ends at " + std::to_string(vocab - 1));
        }
        ids.push_back(static_cast<int>(id));
    }
    return ids;
}

}  // namespace llama
