// Contiguous growing buffers, the layout of MLX-like engines: [batch][heads][capacity][dim] for K and for V.
//
//   kvq::contiguous_cache<kvq::float16> buffers({.batch = 1, .heads = 8, .head_dim = 128});
//   auto all = buffers.append(k, v);            // views of all held tokens: all.keys(row), all.values(row)
//   auto small = kvq::contiguous_quantized(buffers, {.bits = 4, .group = 64});
//   kvq::append_to(sequence, layer, all);       // into kvq pages
//   kvq::append_from(buffers, sequence, layer); // and back
//
// Capacity grows in steps (256 tokens), so that most appends copy only new tokens; trim() removes tokens and keeps the
// memory; trim_to_offset() frees the memory beyond the held tokens: call it before you count or store such buffers.
// contiguous_quantized holds (codes, scales, biases) in MLX's format (mlx_affine.hpp) and trims all three in the same
// way. Guarantees: arguments are checked and memory is allocated before anything changes. One thread at a time
// may write.
#pragma once

#include <memory_resource>
#include <span>

#include "../cache/sequence.hpp"
#include "growing_buffers.hpp"
#include "mlx_affine.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// A snapshot of the buffers, valid until they grow or shrink. T may be const.
template <class T>
struct contiguous_view {
    contiguous_shape shape;
    int tokens = 0;
    int capacity = 0;
    T* key_data = nullptr;    // [batch][heads][capacity][head_dim]
    T* value_data = nullptr;  // [batch][heads][capacity][value_dim]

    token_view<T> keys(int row = 0) const { return of(key_data, row, tensor::key); }
    token_view<T> values(int row = 0) const { return of(value_data, row, tensor::value); }

private:
    token_view<T> of(T* data, int row, tensor role) const {
        detail::expect(row >= 0 && row < shape.batch, "row ", row, " is not among the ", shape.batch,
                       " of the batch");
        const std::ptrdiff_t dim = shape.dim(role), head = capacity * dim;
        return {data + row * shape.heads * head, tokens, shape.heads, static_cast<int>(dim), dim, head};
    }
};

/// K and V of one layer, in type T.
template <float_format T>
class contiguous_cache {
public:
    explicit contiguous_cache(const contiguous_shape& shape,
                              std::pmr::memory_resource* memory = std::pmr::get_default_resource())
        : buffers_(make(shape, memory)) {}

    /// Appends n tokens. k, v: one view of [n][heads][dim] per row of the batch; they may be views of tokens in these
    /// buffers. Returns a view of all held tokens. Raises kvq::error when rows or shapes do not fit, or when tokens or bytes would
    /// overflow their integer types.
    template <class U>
    contiguous_view<T> append(std::span<const token_view<U>> k, std::span<const token_view<U>> v) {
        const int n = check(k, tensor::key, -1);
        check(v, tensor::value, n);
        const auto left = buffers_.reserve(n);  // keeps the old memory: k and v may be views of it
        write<0>(k, n, shape().head_dim);
        write<1>(v, n, shape().dim(tensor::value));
        buffers_.tokens_ += n;
        return view();
    }
    /// For a batch of one row.
    template <class U>
    contiguous_view<T> append(const token_view<U>& k, const token_view<U>& v) {
        return append(std::span<const token_view<U>>(&k, 1), std::span<const token_view<U>>(&v, 1));
    }

    /// Removes every token from n on. Memory stays.
    void trim(int n) { buffers_.trim(n); }
    /// Frees the memory beyond the held tokens.
    void trim_to_offset() { buffers_.trim_to_offset(); }

    contiguous_view<T> view() noexcept {
        return {shape(), tokens(), capacity(), buffers_.template at<0>(0, 0), buffers_.template at<1>(0, 0)};
    }
    contiguous_view<const T> view() const noexcept {
        return {shape(), tokens(), capacity(), buffers_.template at<0>(0, 0), buffers_.template at<1>(0, 0)};
    }
    const contiguous_shape& shape() const noexcept { return buffers_.shape_; }
    int tokens() const noexcept { return buffers_.tokens_; }
    int capacity() const noexcept { return buffers_.capacity_; }
    std::size_t bytes() const noexcept { return buffers_.bytes(); }

    /// For callers that write the next n tokens themselves. prepare() returns a view with room for n more tokens; commit() adds them.
    /// Raises kvq::error for n < 0 and when tokens or bytes would overflow their integer types.
    contiguous_view<T> prepare(int n) {
        detail::expect(n >= 0, "cannot prepare ", n, " tokens");
        buffers_.reserve(n);
        contiguous_view<T> all = view();
        all.tokens += n;
        return all;
    }
    contiguous_view<T> commit(int n) {
        detail::expect(n >= 0 && n <= capacity() - tokens(), "cannot commit ", n,
                       " tokens where there is room for ", capacity() - tokens());
        buffers_.tokens_ += n;
        return view();
    }

private:
    /// A function, because constructor arguments are evaluated in any order: it checks the shape before using it.
    static detail::growing_buffers<T, T> make(const contiguous_shape& shape,
                                              std::pmr::memory_resource* memory) {
        detail::check_contiguous(shape);
        return {shape, detail::growing_buffer<T>(shape.rows(), shape.dim(tensor::key), memory),
                detail::growing_buffer<T>(shape.rows(), shape.dim(tensor::value), memory)};
    }
    template <class U>
    int check(std::span<const token_view<U>> x, tensor role, int tokens) const {
        const char* const name = role == tensor::key ? "k" : "v";
        detail::expect(static_cast<int>(x.size()) == shape().batch, name, " has ", x.size(),
                       " rows of a batch of ", shape().batch);
        for (const token_view<U>& row : x) {
            if (tokens < 0) tokens = row.tokens;
            detail::expect(row.tokens >= 0, name, " has ", row.tokens, " tokens");
            detail::expect(row.tokens == tokens, name, " has ", row.tokens, " tokens where others have ",
                           tokens);
            detail::expect(row.heads == shape().heads && row.dim == shape().dim(role), name, " is ",
                           row.heads, " heads x ", row.dim, " channels but the buffers hold ", shape().heads,
                           " x ", shape().dim(role));
            detail::expect(row.data != nullptr || tokens == 0, name, " has no data for ", tokens, " tokens");
        }
        return tokens;
    }
    template <std::size_t Index, class U>
    void write(std::span<const token_view<U>> x, int n, int dim) noexcept {
        for (int b = 0; b < shape().batch; ++b)
            for (int h = 0; h < shape().heads; ++h)
                for (int t = 0; t < n; ++t) {
                    T* const to = buffers_.template at<Index>(b * shape().heads + h, tokens() + t);
                    const U* const from = x[static_cast<std::size_t>(b)].at(t, h);
                    for (int c = 0; c < dim; ++c) to[c] = T(static_cast<float>(from[c]));
                }
    }

    detail::growing_buffers<T, T> buffers_;
};

/// contiguous_cache, quantized: per tensor codes [batch][heads][capacity][dim * bits / 32], scales and biases
/// [batch][heads][capacity][dim / group].
template <float_format T>
class contiguous_quantized {
public:
    contiguous_quantized(const contiguous_shape& shape, const mlx_format& format,
                         std::pmr::memory_resource* memory = std::pmr::get_default_resource())
        : format_(checked(shape, format)),
          buffers_(shape, words(tensor::key, shape, memory), parameters(tensor::key, shape, memory),
                   parameters(tensor::key, shape, memory), words(tensor::value, shape, memory),
                   parameters(tensor::value, shape, memory), parameters(tensor::value, shape, memory)) {}

    /// A copy of unquantized buffers, without their unused capacity.
    contiguous_quantized(const contiguous_cache<T>& from, const mlx_format& format,
                         std::pmr::memory_resource* memory = std::pmr::get_default_resource())
        : contiguous_quantized(from.shape(), format, memory) {
        append(from.view());
        trim_to_offset();
    }

    /// Quantizes and appends the tokens of a view, all rows of the batch.
    void append(const contiguous_view<const T>& x) {
        const contiguous_shape &mine = shape(), &theirs = x.shape;
        detail::expect(theirs.batch == mine.batch && theirs.heads == mine.heads &&
                           theirs.dim(tensor::key) == mine.dim(tensor::key) &&
                           theirs.dim(tensor::value) == mine.dim(tensor::value),
                       "a view of ", theirs.batch, " x ", theirs.heads, " x ", theirs.dim(tensor::key),
                       " and ", theirs.dim(tensor::value), " does not fit buffers of ", mine.batch, " x ",
                       mine.heads, " x ", mine.dim(tensor::key), " and ", mine.dim(tensor::value));
        detail::expect(x.tokens >= 0 && x.tokens <= x.capacity, "a view of ", x.tokens,
                       " tokens with a capacity of ", x.capacity);
        detail::expect(x.tokens == 0 || (x.key_data != nullptr && x.value_data != nullptr), "a view of ",
                       x.tokens, " tokens has no ", x.key_data ? "values" : "keys");
        buffers_.reserve(x.tokens);
        for_each_token<0>(buffers_, tokens(), x.tokens, [&](int row, int head, int t, auto* w, T* s, T* b) {
            mlx_quantize(format_, mine.dim(tensor::key), x.keys(row).at(t, head), w, s, b);
        });
        for_each_token<3>(buffers_, tokens(), x.tokens, [&](int row, int head, int t, auto* w, T* s, T* b) {
            mlx_quantize(format_, mine.dim(tensor::value), x.values(row).at(t, head), w, s, b);
        });
        buffers_.tokens_ += x.tokens;
    }
    void append(const contiguous_view<T>& x) {
        append(contiguous_view<const T>{x.shape, x.tokens, x.capacity, x.key_data, x.value_data});
    }

    /// All held tokens, dequantized.
    contiguous_cache<T> dequantize(
        std::pmr::memory_resource* memory = std::pmr::get_default_resource()) const {
        contiguous_cache<T> out(shape(), memory);
        const contiguous_view<T> to = out.prepare(tokens());
        for_each_token<0>(buffers_, 0, tokens(), [&](int row, int head, int t, auto* w, auto* s, auto* b) {
            mlx_dequantize(format_, shape().dim(tensor::key), w, s, b, to.keys(row).at(t, head));
        });
        for_each_token<3>(buffers_, 0, tokens(), [&](int row, int head, int t, auto* w, auto* s, auto* b) {
            mlx_dequantize(format_, shape().dim(tensor::value), w, s, b, to.values(row).at(t, head));
        });
        out.commit(tokens());
        return out;
    }

    void trim(int n) { buffers_.trim(n); }
    /// Frees the memory beyond the held tokens, of codes, scales and biases; bits and group stay.
    void trim_to_offset() { buffers_.trim_to_offset(); }

    /// The first word of one token, and its parameters.
    const std::uint32_t* codes(tensor role, int row, int head, int token) const noexcept {
        const int at = row * shape().heads + head;
        return role == tensor::key ? buffers_.template at<0>(at, token) : buffers_.template at<3>(at, token);
    }
    const T* scales(tensor role, int row, int head, int token) const noexcept {
        const int at = row * shape().heads + head;
        return role == tensor::key ? buffers_.template at<1>(at, token) : buffers_.template at<4>(at, token);
    }
    const T* biases(tensor role, int row, int head, int token) const noexcept {
        const int at = row * shape().heads + head;
        return role == tensor::key ? buffers_.template at<2>(at, token) : buffers_.template at<5>(at, token);
    }

    const contiguous_shape& shape() const noexcept { return buffers_.shape_; }
    const mlx_format& format() const noexcept { return format_; }
    int tokens() const noexcept { return buffers_.tokens_; }
    int capacity() const noexcept { return buffers_.capacity_; }
    std::size_t bytes() const noexcept { return buffers_.bytes(); }

private:
    static const mlx_format& checked(const contiguous_shape& shape, const mlx_format& format) {
        detail::check_contiguous(shape);
        detail::check_mlx_format(format, shape.dim(tensor::key));
        detail::check_mlx_format(format, shape.dim(tensor::value));
        return format;
    }
    auto words(tensor role, const contiguous_shape& s, std::pmr::memory_resource* memory) const {
        return detail::growing_buffer<std::uint32_t>(s.rows(), format_.words(s.dim(role)), memory);
    }
    auto parameters(tensor role, const contiguous_shape& s, std::pmr::memory_resource* memory) const {
        return detail::growing_buffer<T>(s.rows(), format_.groups(s.dim(role)), memory);
    }
    /// Calls f(row, head, token, codes, scales, biases) for tokens [first, first + n); Codes: index of the first of three buffers.
    template <std::size_t Codes, class Buffers, class F>
    static void for_each_token(Buffers& buffers, int first, int n, F&& f) {
        const contiguous_shape& s = buffers.shape_;
        for (int row = 0; row < s.batch; ++row)
            for (int head = 0; head < s.heads; ++head)
                for (int t = 0; t < n; ++t) {
                    const int at = row * s.heads + head;
                    f(row, head, t, buffers.template at<Codes>(at, first + t),
                      buffers.template at<Codes + 1>(at, first + t),
                      buffers.template at<Codes + 2>(at, first + t));
                }
    }

    mlx_format format_;
    detail::growing_buffers<std::uint32_t, T, T, std::uint32_t, T, T> buffers_;
};

/// Appends tokens [first, tokens) of one row of contiguous buffers to a layer of a sequence.
template <class T>
void append_to(sequence& s, int layer, const contiguous_view<T>& from, int first = 0, int row = 0) {
    detail::expect(first >= 0 && first <= from.tokens, "cannot begin at token ", first, " of ", from.tokens);
    detail::expect(from.tokens == 0 || (from.key_data != nullptr && from.value_data != nullptr), "a view of ",
                   from.tokens, " tokens has no ", from.key_data ? "values" : "keys");
    s.append(layer, from.keys(row).slice(first, from.tokens - first),
             from.values(row).slice(first, from.tokens - first));
}

/// Appends x^ of tokens [first, tokens) of a layer of a sequence to contiguous buffers of one row. Returns a view of all held
/// tokens.
template <float_format T>
contiguous_view<T> append_from(contiguous_cache<T>& to, const sequence& s, int layer, int first = 0) {
    const cache_shape& shape = detail::sequence_access::cache(s).shape();
    detail::expect(to.shape().batch == 1, "a sequence fills buffers of 1 row, not ", to.shape().batch);
    detail::expect(to.shape().heads == shape.kv_heads &&
                       to.shape().dim(tensor::key) == shape.dim(tensor::key) &&
                       to.shape().dim(tensor::value) == shape.dim(tensor::value),
                   "buffers of ", to.shape().heads, " heads x ", to.shape().dim(tensor::key), " and ",
                   to.shape().dim(tensor::value), " do not fit a cache of ", shape.kv_heads, " x ",
                   shape.dim(tensor::key), " and ", shape.dim(tensor::value));
    detail::expect(first >= 0 && first <= s.tokens(layer), "cannot begin at token ", first, " of ",
                   s.tokens(layer));
    const int n = s.tokens(layer) - first, before = to.tokens();
    const contiguous_view<T> all = to.prepare(n);
    s.dequantize(layer, tensor::key, first, all.keys().slice(before, n));
    s.dequantize(layer, tensor::value, first, all.values().slice(before, n));
    return to.commit(n);
}

}}  // namespace kvq
