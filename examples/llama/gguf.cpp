#include "gguf.hpp"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <utility>

namespace llama {
namespace {

enum value_type : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, text, list, u64, i64, f64 };

// Takes numbers and texts from the begin of a file and knows where it is.
class file_reader {
public:
    explicit file_reader(const gguf_file& file, std::span<const std::byte> bytes)
        : file_(file), bytes_(bytes) {}

    std::size_t at() const { return at_; }
    std::size_t left() const { return bytes_.size() - at_; }

    template <class T>
    T take(const std::string& what) {
        require(sizeof(T), what);
        T value;
        std::memcpy(&value, bytes_.data() + at_, sizeof value);
        at_ += sizeof value;
        return value;
    }

    std::string_view take_text(const std::string& what) {
        const auto length = take<std::uint64_t>(what);
        require(length, what);
        const std::string_view value(reinterpret_cast<const char*>(bytes_.data() + at_),
                                     static_cast<std::size_t>(length));
        at_ += static_cast<std::size_t>(length);
        return value;
    }

    gguf_value take_value(std::uint32_t type, const std::string& what) {
        switch (type) {
            case u8:
                return std::int64_t{take<std::uint8_t>(what)};
            case i8:
                return std::int64_t{take<std::int8_t>(what)};
            case u16:
                return std::int64_t{take<std::uint16_t>(what)};
            case i16:
                return std::int64_t{take<std::int16_t>(what)};
            case u32:
                return std::int64_t{take<std::uint32_t>(what)};
            case i32:
                return std::int64_t{take<std::int32_t>(what)};
            case f32:
                return double{take<float>(what)};
            case boolean:
                return std::int64_t{take<std::uint8_t>(what) != 0};
            case text:
                return take_text(what);
            case list:
                return take_list(what);
            case u64: {
                const auto value = take<std::uint64_t>(what);
                if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
                    file_.refuse(what + " is " + std::to_string(value) + ", which is too large");
                }
                return static_cast<std::int64_t>(value);
            }
            case i64:
                return take<std::int64_t>(what);
            case f64:
                return take<double>(what);
            default:
                file_.refuse(what + " has the type " + std::to_string(type) + ", known are 0 to 12");
        }
    }

private:
    void require(std::uint64_t bytes, const std::string& what) const {
        if (bytes > left()) {
            file_.refuse(what + " needs " + std::to_string(bytes) + " bytes at byte " + std::to_string(at_) +
                         ", the file ends at " + std::to_string(bytes_.size()));
        }
    }

    gguf_list take_list(const std::string& what) {
        const auto type = take<std::uint32_t>(what);
        const auto count = take<std::uint64_t>(what);
        if (type == list) {
            file_.refuse(what + " is a list of lists, which is not read");
        }
        // Every element has a byte or more: a false number of them is seen before it takes memory.
        require(count, what);
        gguf_list elements;
        elements.is_text = type == text;
        for (std::uint64_t i = 0; i < count; ++i) {
            const gguf_value element = take_value(type, what);
            if (const auto* const words = std::get_if<std::string_view>(&element)) {
                elements.texts.push_back(*words);
            } else if (const auto* const whole = std::get_if<std::int64_t>(&element)) {
                elements.numbers.push_back(static_cast<double>(*whole));
            } else {
                elements.numbers.push_back(std::get<double>(element));
            }
        }
        return elements;
    }

    const gguf_file& file_;
    std::span<const std::byte> bytes_;
    std::size_t at_ = 0;
};

}  // namespace

gguf_file::gguf_file(const std::string& path)
    : file_(std::make_shared<const mapped_file>("GGUF file", path)) {
    const auto bytes = file_->bytes();
    file_reader in(*this, bytes);
    const auto magic = in.take<std::uint32_t>("the header");
    if (magic != 0x46554747) {
        refuse("it does not begin with GGUF");
    }
    const auto version = in.take<std::uint32_t>("the header");
    if (version != 2 &&
        version != 3) {  // they differ in what this reader ignores: files of big-endian machines
        refuse("it has version " + std::to_string(version) + ", read are 2 and 3");
    }
    const auto tensors = in.take<std::uint64_t>("the header"), values = in.take<std::uint64_t>("the header");
    for (std::uint64_t i = 0; i < values; ++i) {
        const std::string_view name = in.take_text("the name of value " + std::to_string(i));
        const std::string what = "value \"" + std::string(name) + "\"";
        const auto type = in.take<std::uint32_t>(what);
        if (!values_.emplace(name, in.take_value(type, what)).second) {
            refuse(what + " is there twice");
        }
    }

    struct place {
        stored_tensor* tensor;
        std::uint64_t offset;
        std::string name;
    };
    std::vector<place> places;
    for (std::uint64_t i = 0; i < tensors; ++i) {
        const std::string name(in.take_text("the name of tensor " + std::to_string(i)));
        const std::string what = "tensor \"" + name + "\"";
        const auto dimensions = in.take<std::uint32_t>(what);
        if (dimensions < 1 || dimensions > 4) {
            refuse(what + " has " + std::to_string(dimensions) + " dimensions, expected 1 to 4");
        }
        stored_tensor tensor;
        for (std::uint32_t d = 0; d < dimensions; ++d) {
            tensor.sizes.insert(tensor.sizes.begin(), in.take<std::uint64_t>(what));
        }
        const auto type = in.take<std::uint32_t>(what);
        tensor.type = find_ggml_type(type);
        tensor.type_name = ggml_type_name(type);
        tensor.file = path;
        const auto offset = in.take<std::uint64_t>(what);
        const auto [entry, is_new] = tensors_.emplace(name, std::move(tensor));
        if (!is_new) {
            refuse(what + " is there twice");
        }
        places.push_back({&entry->second, offset, what});
    }

    const auto alignment = static_cast<std::uint64_t>(integer("general.alignment", 1, 1 << 20, 32));
    const std::uint64_t begin = (in.at() + alignment - 1) / alignment * alignment;
    for (const auto& [tensor, offset, what] : places) {
        // Sizes are below 2^40 together: products below do not overflow.
        std::uint64_t elements = 1;
        for (const std::uint64_t size : tensor->sizes) {
            if (size < 1 || size > (std::uint64_t{1} << 40) / elements) {
                refuse(what + " has a size of " + std::to_string(size) + ", which is impossible");
            }
            elements *= size;
        }
        if (offset % alignment != 0) {
            refuse(what + " begins at byte " + std::to_string(offset) +
                   " of the data, which is no multiple of " + std::to_string(alignment));
        }
        std::uint64_t needed = 0;
        if (tensor->type != nullptr) {
            const auto block = static_cast<std::uint64_t>(tensor->type->block_values);
            if (tensor->sizes.back() % block != 0) {
                refuse(what + " has rows of " + std::to_string(tensor->sizes.back()) + " values, " +
                       tensor->type_name + " has blocks of " + std::to_string(block));
            }
            needed = elements / block * static_cast<std::uint64_t>(tensor->type->block_bytes);
        }
        if (begin > bytes.size() || offset > bytes.size() - begin || needed > bytes.size() - begin - offset) {
            refuse(what + " needs " + std::to_string(needed) + " bytes at byte " + std::to_string(offset) +
                   " of the data, which begin at byte " + std::to_string(begin) + " of a file of " +
                   std::to_string(bytes.size()) + " bytes");
        }
        tensor->bytes = bytes.data() + begin + offset;
    }
}

const gguf_value* gguf_file::find(std::string_view name, bool needed) const {
    const auto found = values_.find(name);
    if (found == values_.end() && needed) {
        refuse("it lacks the value \"" + std::string(name) + "\"");
    }
    return found != values_.end() ? &found->second : nullptr;
}

std::int64_t gguf_file::integer(std::string_view name, std::int64_t least, std::int64_t most,
                                std::optional<std::int64_t> otherwise) const {
    const gguf_value* const value = find(name, !otherwise);
    if (value == nullptr) {
        return *otherwise;
    }
    const auto* const whole = std::get_if<std::int64_t>(value);
    if (whole == nullptr) {
        refuse("value \"" + std::string(name) + "\" is not an integer");
    }
    if (*whole < least || *whole > most) {
        refuse("value \"" + std::string(name) + "\" is " + std::to_string(*whole) + ", expected " +
               std::to_string(least) + " to " + std::to_string(most));
    }
    return *whole;
}

double gguf_file::number(std::string_view name, std::optional<double> otherwise) const {
    const gguf_value* const value = find(name, !otherwise);
    if (value == nullptr) {
        return *otherwise;
    }
    if (const auto* const whole = std::get_if<std::int64_t>(value)) {
        return static_cast<double>(*whole);
    }
    const auto* const number = std::get_if<double>(value);
    if (number == nullptr) {
        refuse("value \"" + std::string(name) + "\" is not a number");
    }
    return *number;
}

std::string_view gguf_file::text(std::string_view name, std::optional<std::string_view> otherwise) const {
    const gguf_value* const value = find(name, !otherwise);
    if (value == nullptr) {
        return *otherwise;
    }
    const auto* const words = std::get_if<std::string_view>(value);
    if (words == nullptr) {
        refuse("value \"" + std::string(name) + "\" is not a text");
    }
    return *words;
}

const gguf_list& gguf_file::list(std::string_view name) const {
    const auto* const elements = std::get_if<gguf_list>(find(name, true));
    if (elements == nullptr) {
        refuse("value \"" + std::string(name) + "\" is not a list");
    }
    return *elements;
}

void gguf_file::refuse(const std::string& reason) const {
    throw std::runtime_error("GGUF file \"" + file_->path() + "\": " + reason);
}

bool is_gguf(const std::string& path) {
    char magic[4] = {};
    std::ifstream file(path, std::ios::binary);
    return file.read(magic, sizeof magic) && std::string_view(magic, sizeof magic) == "GGUF";
}

}  // namespace llama
