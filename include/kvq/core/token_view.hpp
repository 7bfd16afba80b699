// A strided view of tokens x heads x channels in memory of the caller. Channels are contiguous.
//
// NHD tensors ([tokens][heads][dim]) are the dense default; HND ([heads][tokens][dim]) is
// token_view(data, tokens, heads, dim, dim, tokens * dim). Strides count elements, not bytes.
#pragma once

#include <cstddef>
#include <type_traits>

#include "float_formats.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

template <class T>
struct token_view {
    T* data = nullptr;
    int tokens = 0;
    int heads = 0;
    int dim = 0;
    std::ptrdiff_t token_stride = 0;
    std::ptrdiff_t head_stride = 0;

    constexpr token_view() = default;

    /// Dense [tokens][heads][dim].
    KVQ_HD constexpr token_view(T* d, int n_tokens, int n_heads, int n_dim) noexcept
        : token_view(d, n_tokens, n_heads, n_dim, static_cast<std::ptrdiff_t>(n_heads) * n_dim, n_dim) {}

    KVQ_HD constexpr token_view(T* d, int n_tokens, int n_heads, int n_dim, std::ptrdiff_t per_token,
                                std::ptrdiff_t per_head) noexcept
        : data(d),
          tokens(n_tokens),
          heads(n_heads),
          dim(n_dim),
          token_stride(per_token),
          head_stride(per_head) {}

    /// Converts to a view of const elements, for functions that only read.
    template <class U>
    requires std::is_same_v<T, const U> KVQ_HD constexpr token_view(const token_view<U>& v) noexcept
        : token_view(v.data, v.tokens, v.heads, v.dim, v.token_stride, v.head_stride) {}

    /// The `dim` channels of one token and head.
    KVQ_HD constexpr T* at(int token, int head) const noexcept {
        return data + token * token_stride + head * head_stride;
    }

    /// Tokens [first, first + count).
    KVQ_HD constexpr token_view slice(int first, int count) const noexcept {
        return {data + first * token_stride, count, heads, dim, token_stride, head_stride};
    }
};

template <class T>
token_view(T*, int, int, int) -> token_view<T>;

}}  // namespace kvq
