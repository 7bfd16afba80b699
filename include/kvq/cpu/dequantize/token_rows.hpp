// Output of dequantized tokens: rows of 16- or 32-bit floats.
//
//   row t, channel c   at data + t * stride + c
//
// Contract: values are rounded once, as float16(x) does; nothing outside of the given channels is written.
#pragma once

#include <cstddef>
#include <cstring>

#include "../../core/float_formats.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes, float_format T>
class token_rows {
public:
    using floats = typename Lanes::floats;

    /// stride: values from one token to the next.
    token_rows(T* out, std::ptrdiff_t stride) : data_(out), stride_(stride) {}

    KVQ_INLINE std::ptrdiff_t stride() const { return stride_; }
    KVQ_INLINE T* at(int token, int channel) const { return data_ + token * stride_ + channel; }

    /// Writes a vector of channels from `to` on; n: only the first n of them.
    static KVQ_INLINE void put(T* to, floats x) {
        Lanes::template store_values<T>(reinterpret_cast<std::byte*>(to), x);
    }
    static KVQ_INLINE void put(T* to, floats x, int n) {
        if (n == Lanes::width)
            put(to, x);
        else
            put_some(to, x, n);
    }

private:
    static KVQ_NOINLINE void put_some(T* to, floats x, int n) {
        T all[Lanes::width];
        put(all, x);
        std::memcpy(to, all, static_cast<std::size_t>(n) * sizeof(T));
    }

    T* data_;
    std::ptrdiff_t stride_;
};

}}}  // namespace kvq::kernels
