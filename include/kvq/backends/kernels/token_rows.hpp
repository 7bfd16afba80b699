// Output of dequantized tokens: rows of 16- or 32-bit floats. The type is a value, so that a kernel is compiled once for both.
//
//   row t, channel c   at data + t * stride + c * size,  size = 2 (float16) or 4 (float)
//
// Contract: values are rounded once, as float16(x) does; nothing outside of the given channels is written.
#pragma once

#include <cstddef>
#include <cstring>

#include "../../core/float_formats.hpp"

namespace kvq::inline KVQ_TAGGED::kernels {

template <class Lanes>
class token_rows {
public:
    using floats = typename Lanes::floats;

    /// stride: values from one token to the next.
    template <class T>
    token_rows(T* out, std::ptrdiff_t stride)
        : data_(reinterpret_cast<std::byte*>(out)),
          size_(sizeof(T)),
          stride_(stride * static_cast<std::ptrdiff_t>(sizeof(T))) {
        static_assert(std::same_as<T, float> || std::same_as<T, float16>);
    }

    KVQ_INLINE bool halves() const { return size_ == 2; }
    KVQ_INLINE std::byte* at(int token, int channel) const {
        return data_ + token * stride_ + channel * size_;
    }

    /// Writes a vector of channels from `to` on; n: only the first n of them.
    KVQ_INLINE void put(std::byte* to, floats x) const {
        if (halves())
            Lanes::template store_values<float16>(to, x);
        else
            Lanes::template store_values<float>(to, x);
    }
    KVQ_INLINE void put(std::byte* to, floats x, int n) const {
        if (n == Lanes::width)
            put(to, x);
        else
            put_some(to, x, n);
    }

private:
    KVQ_NOINLINE void put_some(std::byte* to, floats x, int n) const {
        std::byte all[4 * Lanes::width];
        put(all, x);
        std::memcpy(to, all, static_cast<std::size_t>(n * size_));
    }

    std::byte* data_;
    int size_;
    std::ptrdiff_t stride_;  // bytes
};

}  // namespace kvq::inline KVQ_TAGGED::kernels
