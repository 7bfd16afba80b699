// Short text in a buffer of its own: names of schemes and messages of errors.
//
// Contract: text that does not fit is cut off, nothing is allocated. Kernels use it instead of std::string,
// whose inline functions every object would compile for its own instruction set and share with all others.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>

#include "../config.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

class short_text {
public:
    static constexpr std::size_t room = 1000;

    constexpr short_text() = default;
    KVQ_NOINLINE constexpr short_text(const char* s) { *this += s; }
    KVQ_INLINE short_text(const std::string& s) { add(s.data(), s.size()); }
    /// Appends a number in decimal.
    template <class Number>
    requires std::is_arithmetic_v<Number> KVQ_NOINLINE static short_text of(Number number) {
        char digits[32];
        if constexpr (std::is_floating_point_v<Number>)
            std::snprintf(digits, sizeof(digits), "%f", static_cast<double>(number));
        else if constexpr (std::is_signed_v<Number>)
            std::snprintf(digits, sizeof(digits), "%lld", static_cast<long long>(number));
        else
            std::snprintf(digits, sizeof(digits), "%llu", static_cast<unsigned long long>(number));
        return digits;
    }

    KVQ_NOINLINE constexpr short_text& operator+=(const char* s) {
        std::size_t n = 0;
        while (s[n] != 0) ++n;
        return add(s, n);
    }
    KVQ_NOINLINE constexpr short_text& operator+=(const short_text& other) {
        return add(other.data_, other.size_);
    }
    KVQ_NOINLINE friend constexpr short_text operator+(const short_text& a, const short_text& b) {
        short_text both = a;
        return both += b;
    }

    constexpr const char* c_str() const noexcept { return data_; }
    KVQ_INLINE operator std::string() const { return {data_, size_}; }
    friend bool operator==(const short_text& a, std::string_view b) noexcept {
        return std::string_view(a.data_, a.size_) == b;
    }
    friend bool operator==(const short_text& a, const char* b) noexcept { return a == std::string_view(b); }
    friend bool operator==(const short_text& a, const short_text& b) noexcept {
        return a == std::string_view(b.data_, b.size_);
    }

private:
    constexpr short_text& add(const char* s, std::size_t n) {
        for (std::size_t i = 0; i < n && size_ < room; ++i) data_[size_++] = s[i];
        data_[size_] = 0;
        return *this;
    }

    std::size_t size_ = 0;
    char data_[room + 1] = {};
};

}}  // namespace kvq
