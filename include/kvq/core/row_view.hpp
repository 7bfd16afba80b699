// The rows that a step reads (keys, values, queries) and writes (outputs), in the float type of the engine:
// float, float16 or bfloat16, in host or device memory. Any token_view converts to these views. The type is
// known only at run time, so that kernels are compiled once.
//
//   query = float(q)     out = T(output), rounded once
//
// Contract: one call per row of channels, nothing is allocated. Views do not own their memory.
#pragma once

#include <type_traits>

#include "float_type.hpp"
#include "token_view.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// Shape and address of rows of a type that is known at run time.
template <class Data>
struct row_view {
    Data* data = nullptr;
    int tokens = 0;
    int heads = 0;
    int dim = 0;
    std::ptrdiff_t token_bytes = 0;
    std::ptrdiff_t head_bytes = 0;
    float_type type = float_type::fp32;

    template <class T>
    explicit row_view(const token_view<T>& v) noexcept
        : data(v.data),
          tokens(v.tokens),
          heads(v.heads),
          dim(v.dim),
          token_bytes(v.token_stride * static_cast<std::ptrdiff_t>(sizeof(T))),
          head_bytes(v.head_stride * static_cast<std::ptrdiff_t>(sizeof(T))),
          type(row_type<std::remove_const_t<T>>()) {}

    /// Distance from one token to the next, in values.
    std::ptrdiff_t token_stride() const noexcept {
        return token_bytes / static_cast<std::ptrdiff_t>(size_of(type));
    }
    /// The same rows; T: the type that they have.
    template <class T>
    token_view<T> as() const noexcept {
        constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(T));
        return {static_cast<T*>(data), tokens, heads, dim, token_bytes / size, head_bytes / size};
    }
    template <class T>
    static constexpr float_type row_type() noexcept {
        if constexpr (float_format<T>)
            return float_type_of<T>;
        else
            return float_type::fp32;  // so that only the static_assert of the caller reports an error
    }
    Data* at(int token, int head) const noexcept {
        using byte = std::conditional_t<std::is_const_v<Data>, const std::byte, std::byte>;
        return static_cast<byte*>(data) + token * token_bytes + head * head_bytes;
    }
};

}  // namespace detail

/// New keys or values, [tokens][kv_heads][dim], read-only: a token_view of a type that is known at run time.
class input_view : public detail::row_view<const void> {
public:
    /// T: float, float16 or bfloat16, const or not.
    template <class T>
    input_view(const token_view<T>& v) noexcept : row_view(v) {
        static_assert(float_format<std::remove_const_t<T>>,
                      "kvq::input_view: keys and values must be float, float16 or bfloat16");
    }

    /// Arguments as for token_view(shape...).
    template <class T, class... Shape>
    requires(sizeof...(Shape) >= 3) KVQ_NO_COPY input_view(T* rows, Shape... shape)
    noexcept : input_view(token_view<T>(rows, shape...)) {}
};

/// No rows: the values of a latent layer, or the keys and values of a layer that takes queries only.
inline input_view no_rows() noexcept { return token_view<const float>(); }

/// Queries, [tokens][q_heads][head_dim], read-only.
class query_view : public detail::row_view<const void> {
public:
    /// T: float, float16 or bfloat16, const or not.
    template <class T>
    requires float_format<std::remove_const_t<T>> query_view(const token_view<T>& v)
    noexcept : row_view(v) {}

    /// Arguments as for token_view(shape...): a pointer, numbers of tokens, heads and channels, and two
    /// strides if they are not dense.
    template <class T, class... Shape>
    requires(sizeof...(Shape) >= 3) KVQ_NO_COPY query_view(T* rows, Shape... shape)
    noexcept : query_view(token_view<T>(rows, shape...)) {}
};

/// Outputs, [tokens][q_heads][value_dim], written.
class output_view : public detail::row_view<void> {
public:
    /// T: float, float16 or bfloat16.
    template <float_format T>
    output_view(const token_view<T>& v) noexcept
        : row_view(v), store_([](const float* from, void* to, int n) {
              for (int i = 0; i < n; ++i) static_cast<T*>(to)[i] = T(from[i]);
          }) {}

    /// Arguments as for token_view(shape...).
    template <class T, class... Shape>
    requires(sizeof...(Shape) >= 3) KVQ_NO_COPY output_view(T* rows, Shape... shape)
    noexcept : output_view(token_view<T>(rows, shape...)) {}

    /// Also writes the natural log of each row's softmax sum, [tokens][q_heads]: -infinity for a row without
    /// keys. Outputs over different keys are merged with it (attention/softmax_state.hpp).
    KVQ_NO_COPY output_view with_lse(float* lse) const noexcept { return with_lse(lse, heads); }
    /// The same with `token_stride` numbers from one token to the next.
    KVQ_NO_COPY output_view with_lse(float* lse, std::ptrdiff_t token_stride) const noexcept {
        output_view v = *this;
        v.lse_ = lse;
        v.lse_stride_ = token_stride;
        return v;
    }

    /// Writes `from` to the channels of one token and head, rounded.
    void store(int token, int head, const float* from) const noexcept { store_(from, at(token, head), dim); }
    /// Address of the log-sum-exp of one token and head, or null.
    float* lse(int token, int head) const noexcept {
        return lse_ ? lse_ + token * lse_stride_ + head : nullptr;
    }
    std::ptrdiff_t lse_stride() const noexcept { return lse_stride_; }

private:
    void (*store_)(const float* from, void* to, int n);
    float* lse_ = nullptr;
    std::ptrdiff_t lse_stride_ = 0;
};

}}  // namespace kvq
