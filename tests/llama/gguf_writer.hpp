// SPDX-License-Identifier: MIT
// Writes GGUF files (examples/llama/gguf.hpp has the format).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace test {

template <class T>
void put(std::string& to, T value) {
    to.append(reinterpret_cast<const char*>(&value), sizeof value);
}
inline void put_text(std::string& to, std::string_view text) {
    put(to, static_cast<std::uint64_t>(text.size()));
    to += text;
}

class gguf_writer {
public:
    void add(const std::string& name, std::uint32_t value) { put(begin(name, 4), value); }
    void add(const std::string& name, int value) { add(name, static_cast<std::uint32_t>(value)); }
    void add(const std::string& name, float value) { put(begin(name, 6), value); }
    void add(const std::string& name, bool value) { put(begin(name, 7), static_cast<std::uint8_t>(value)); }
    void add(const std::string& name, const char* value) { put_text(begin(name, 8), value); }
    void add(const std::string& name, const std::vector<std::string>& texts) {
        list(name, 8, texts.size());
        for (const std::string& text : texts) put_text(values_, text);
    }
    void add(const std::string& name, const std::vector<float>& numbers) {
        list(name, 6, numbers.size());
        for (const float number : numbers) put(values_, number);
    }
    void add(const std::string& name, const std::vector<std::int32_t>& numbers) {
        list(name, 5, numbers.size());
        for (const std::int32_t number : numbers) put(values_, number);
    }
    // sizes: the innermost first
    void tensor(const std::string& name, const std::vector<std::uint64_t>& sizes, int type,
                const std::string& bytes) {
        put_text(tensors_, name);
        put(tensors_, static_cast<std::uint32_t>(sizes.size()));
        for (const std::uint64_t size : sizes) put(tensors_, size);
        put(tensors_, static_cast<std::uint32_t>(type));
        put(tensors_, static_cast<std::uint64_t>(data_.size()));
        data_ += bytes;
        data_.resize((data_.size() + 31) / 32 * 32);
        ++tensor_count_;
    }

    std::string file() const {
        std::string bytes = header();
        bytes.resize((bytes.size() + 31) / 32 * 32);
        return bytes + data_;
    }
    // Everything in front of the data.
    std::string header() const {
        std::string bytes = "GGUF";
        put(bytes, std::uint32_t{3});
        put(bytes, tensor_count_);
        put(bytes, value_count_);
        return bytes + values_ + tensors_;
    }

private:
    std::string& begin(const std::string& name, std::uint32_t type) {
        put_text(values_, name);
        put(values_, type);
        ++value_count_;
        return values_;
    }
    void list(const std::string& name, std::uint32_t type, std::size_t count) {
        put(begin(name, 9), type);
        put(values_, static_cast<std::uint64_t>(count));
    }

    std::string values_, tensors_, data_;
    std::uint64_t value_count_ = 0, tensor_count_ = 0;
};

}  // namespace test
