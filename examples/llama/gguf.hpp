// A GGUF file, version 3: values by name, and tensors. All of the file is checked before anything is used.
//
//   "GGUF", version (u32), tensors (u64), values (u64)
//   each value    name, type (u32), value; a list is the type of its elements (u32), their number (u64), and
//                 they
//   each tensor   name, dimensions (u32), size of each (u64), the innermost first, type (u32), offset in the
//                 data (u64)
//   padding, data; offsets are multiples of the value general.alignment, 32 without one
//
// A text is its length (u64) and bytes. Source: docs/gguf.md of github.com/ggml-org/ggml.
#pragma once

#include "mapped_file.hpp"
#include "tensor_directory.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace llama {

// A list of texts has texts, a list of numbers has numbers.
struct gguf_list {
    std::vector<double> numbers;
    std::vector<std::string_view> texts;
    bool is_text = false;

    std::size_t size() const { return is_text ? texts.size() : numbers.size(); }
};

// Integers (and booleans) of every width, floating-point numbers, texts, lists.
using gguf_value = std::variant<std::int64_t, double, std::string_view, gguf_list>;

class gguf_file {
public:
    // Throws std::runtime_error with the place of the damage.
    explicit gguf_file(const std::string& path);

    const std::string& path() const { return file_->path(); }
    const std::shared_ptr<const mapped_file>& memory() const { return file_; }
    const std::map<std::string, gguf_value, std::less<>>& values() const { return values_; }
    const tensor_directory& tensors() const { return tensors_; }

    // Values; nothing or `otherwise` where the file has none. Throw std::runtime_error where it is of another
    // type or out of range.
    bool has(std::string_view name) const { return values_.find(name) != values_.end(); }
    std::int64_t integer(std::string_view name, std::int64_t least, std::int64_t most,
                         std::optional<std::int64_t> otherwise = {}) const;
    double number(std::string_view name, std::optional<double> otherwise = {}) const;
    std::string_view text(std::string_view name, std::optional<std::string_view> otherwise = {}) const;
    const gguf_list& list(std::string_view name) const;

    // "GGUF file "path": reason"
    [[noreturn]] void refuse(const std::string& reason) const;

private:
    const gguf_value* find(std::string_view name, bool needed) const;

    std::shared_ptr<const mapped_file> file_;
    std::map<std::string, gguf_value, std::less<>> values_;
    tensor_directory tensors_;
};

bool is_gguf(const std::string& path);

}  // namespace llama
