// The tensors of one or several files, by name. Readers of containers fill it; the reader of a model takes
// tensors out of it.
#pragma once

#include "stored_type.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace llama {

struct stored_tensor {
    const stored_type* type = nullptr;  // nullptr: a type that is not read
    std::string type_name;
    std::vector<std::uint64_t> sizes;  // the outermost first; the bytes fit them where the type is read
    const std::byte* bytes = nullptr;
    std::string file;
};

using tensor_directory = std::map<std::string, stored_tensor, std::less<>>;

}  // namespace llama
