// Growing buffers, the memory of MLX-like engines: [batch][heads][capacity][dim] for K and for V, plain and
// in MLX's bits.
//
//   growing::buffers<kvq::float16> buffers({.batch = 1, .heads = 8, .head_dim = 128});
//   auto all = buffers.append(k, v);            // views of all held tokens: all.keys(row), all.values(row)
//   growing::append_to(sequence, layer, all);   // into kvq pages
//   growing::append_from(buffers, sequence, layer, first);
//   growing::quantized small(buffers, {.bits = 4, .group = 64});
//
// Capacity grows in steps (256 tokens), so that most appends copy only new tokens. trim() removes tokens and
// keeps the memory; trim_to_offset() frees the memory beyond the held tokens: call it before you count or
// store such buffers. All parts change their capacity, or none.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <kvq/cache/sequence.hpp>
#include <limits>
#include <span>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "mlx_affine.hpp"

namespace growing {

/// Raises std::invalid_argument with the parts of the message unless `good`.
template <class... Part>
void expect(bool good, const Part&... parts) {
    if (good) return;
    std::ostringstream message;
    (message << ... << parts);
    throw std::invalid_argument(message.str());
}

/// value_dim = 0 means "as head_dim".
struct buffer_shape {
    int batch = 1;
    int heads = 0;
    int head_dim = 0;
    int value_dim = 0;
    int step = 256;  ///< tokens by which capacity grows

    int dim(kvq::tensor role) const noexcept {
        return role == kvq::tensor::key || value_dim == 0 ? head_dim : value_dim;
    }
};

/// Arrays [batch * heads][capacity][width], one per type, that grow together.
template <class... E>
class arrays {
public:
    /// widths: elements of a token and head in each array.
    arrays(const buffer_shape& shape, const std::array<int, sizeof...(E)>& widths)
        : shape_(shape), widths_(widths) {
        expect(shape.batch >= 1 && shape.heads >= 1 && shape.head_dim >= 1 && shape.value_dim >= 0 &&
                   shape.step >= 1,
               "buffers of ", shape.batch, " rows x ", shape.heads, " heads x ", shape.head_dim, " and ",
               shape.value_dim, " channels, growing by ", shape.step);
    }

    /// Makes room for `added` more tokens. Returns the old memory, if any: the tokens to append may be views
    /// of it.
    std::tuple<std::vector<E>...> reserve(int added) {
        expect(added >= 0 && added <= (std::numeric_limits<int>::max)() - tokens_ - shape_.step,
               "buffers of ", tokens_, " tokens cannot take ", added, " more");
        const int wanted = tokens_ + added;
        if (wanted <= capacity_) return {};
        return resize((wanted + shape_.step - 1) / shape_.step * shape_.step);
    }
    void add(int tokens) noexcept { tokens_ += tokens; }
    void trim(int n) {
        expect(n >= 0 && n <= tokens_, "cannot trim to ", n, " tokens: the buffers hold ", tokens_);
        tokens_ = n;
    }
    void trim_to_offset() {
        if (capacity_ != tokens_) resize(tokens_);
    }

    template <std::size_t Index>
    auto* at(int row, int token) noexcept {
        return std::get<Index>(memory_).data() + offset(row, token, capacity_, widths_[Index]);
    }
    template <std::size_t Index>
    const auto* at(int row, int token) const noexcept {
        return std::get<Index>(memory_).data() + offset(row, token, capacity_, widths_[Index]);
    }
    const buffer_shape& shape() const noexcept { return shape_; }
    int tokens() const noexcept { return tokens_; }
    int capacity() const noexcept { return capacity_; }
    std::size_t bytes() const noexcept {
        return std::apply([](const auto&... a) { return (... + (a.size() * sizeof(a[0]))); }, memory_);
    }

private:
    static std::ptrdiff_t offset(int row, int token, int capacity, int width) noexcept {
        return (std::ptrdiff_t{row} * capacity + token) * width;
    }
    std::tuple<std::vector<E>...> resize(int capacity) {
        return [&]<std::size_t... Index>(std::index_sequence<Index...>) {
            std::tuple<std::vector<E>...> fresh(
                resized(std::get<Index>(memory_), widths_[Index], capacity)...);
            memory_.swap(fresh);
            capacity_ = capacity;
            return fresh;
        }
        (std::index_sequence_for<E...>{});
    }
    template <class T>
    std::vector<T> resized(const std::vector<T>& old, int width, int capacity) const {
        const int rows = shape_.batch * shape_.heads;
        std::vector<T> fresh(static_cast<std::size_t>(offset(rows, 0, capacity, width)));
        for (int row = 0; row < rows; ++row)
            std::copy_n(old.data() + offset(row, 0, capacity_, width), offset(0, tokens_, 0, width),
                        fresh.data() + offset(row, 0, capacity, width));
        return fresh;
    }

    buffer_shape shape_;
    std::array<int, sizeof...(E)> widths_;
    int tokens_ = 0, capacity_ = 0;
    std::tuple<std::vector<E>...> memory_;
};

/// A snapshot of the buffers, valid until they grow or shrink. T may be const.
template <class T>
struct view_of_all {
    buffer_shape shape;
    int tokens = 0;
    int capacity = 0;
    T* key_data = nullptr;    // [batch][heads][capacity][head_dim]
    T* value_data = nullptr;  // [batch][heads][capacity][value_dim]

    kvq::token_view<T> keys(int row = 0) const { return of(key_data, row, kvq::tensor::key); }
    kvq::token_view<T> values(int row = 0) const { return of(value_data, row, kvq::tensor::value); }

private:
    /// The strides are all that a token_view needs to know of such memory.
    kvq::token_view<T> of(T* data, int row, kvq::tensor role) const {
        expect(row >= 0 && row < shape.batch, "row ", row, " is not among the ", shape.batch,
               " of the batch");
        const std::ptrdiff_t dim = shape.dim(role), head = capacity * dim;
        return {data + row * shape.heads * head, tokens, shape.heads, static_cast<int>(dim), dim, head};
    }
};

/// K and V of one layer, in type T.
template <kvq::float_format T>
class buffers {
public:
    explicit buffers(const buffer_shape& shape)
        : arrays_(shape, {shape.dim(kvq::tensor::key), shape.dim(kvq::tensor::value)}) {}

    /// Appends n tokens. k, v: one view of [n][heads][dim] per row of the batch; they may be views of tokens
    /// in these buffers. Returns a view of all held tokens.
    template <class U>
    view_of_all<T> append(std::span<const kvq::token_view<U>> k, std::span<const kvq::token_view<U>> v) {
        const int n = k.empty() ? 0 : k[0].tokens;
        check(k, "k", kvq::tensor::key, n);
        check(v, "v", kvq::tensor::value, n);
        const auto old = arrays_.reserve(n);  // k and v may be views of it
        write<0>(k);
        write<1>(v);
        arrays_.add(n);
        return view();
    }
    /// For a batch of one row.
    template <class U>
    view_of_all<T> append(const kvq::token_view<U>& k, const kvq::token_view<U>& v) {
        return append(std::span<const kvq::token_view<U>>(&k, 1), std::span<const kvq::token_view<U>>(&v, 1));
    }
    /// For callers that write tokens themselves: write(views of n more tokens), and the tokens are held.
    template <class Write>
    view_of_all<T> append_with(int n, const Write& write) {
        arrays_.reserve(n);
        view_of_all<T> all = view();
        all.tokens += n;
        write(all);
        arrays_.add(n);
        return all;
    }

    void trim(int n) { arrays_.trim(n); }
    void trim_to_offset() { arrays_.trim_to_offset(); }

    view_of_all<T> view() noexcept {
        return {shape(), tokens(), capacity(), arrays_.template at<0>(0, 0), arrays_.template at<1>(0, 0)};
    }
    view_of_all<const T> view() const noexcept {
        return {shape(), tokens(), capacity(), arrays_.template at<0>(0, 0), arrays_.template at<1>(0, 0)};
    }
    const buffer_shape& shape() const noexcept { return arrays_.shape(); }
    int tokens() const noexcept { return arrays_.tokens(); }
    int capacity() const noexcept { return arrays_.capacity(); }
    std::size_t bytes() const noexcept { return arrays_.bytes(); }

private:
    template <class U>
    void check(std::span<const kvq::token_view<U>> x, const char* name, kvq::tensor role, int tokens) const {
        expect(static_cast<int>(x.size()) == shape().batch, name, " has ", x.size(), " rows of a batch of ",
               shape().batch);
        for (const kvq::token_view<U>& row : x)
            expect(row.tokens == tokens && row.heads == shape().heads && row.dim == shape().dim(role), name,
                   " is ", row.tokens, " tokens x ", row.heads, " heads x ", row.dim,
                   " channels but should be ", tokens, " x ", shape().heads, " x ", shape().dim(role));
    }
    template <std::size_t Index, class U>
    void write(std::span<const kvq::token_view<U>> x) noexcept {
        for (int b = 0; b < shape().batch; ++b) {
            const kvq::token_view<U>& row = x[static_cast<std::size_t>(b)];
            for (int h = 0; h < row.heads; ++h)
                for (int t = 0; t < row.tokens; ++t)
                    std::transform(row.at(t, h), row.at(t, h) + row.dim,
                                   arrays_.template at<Index>(b * row.heads + h, tokens() + t),
                                   [](U value) { return T(static_cast<float>(value)); });
        }
    }

    arrays<T, T> arrays_;
};

/// Buffers in MLX's format: per tensor codes [batch][heads][capacity][dim * bits / 32], scales and biases
/// [batch][heads][capacity][dim / group].
template <kvq::float_format T>
class quantized {
public:
    quantized(const buffer_shape& shape, const mlx::affine& format)
        : format_(format), arrays_(shape, widths(shape, format)) {}

    /// A copy of plain buffers, without their unused capacity.
    quantized(const buffers<T>& from, const mlx::affine& format) : quantized(from.shape(), format) {
        append(from.view());
        trim_to_offset();
    }

    /// Quantizes and appends the tokens of a view, all rows of the batch.
    void append(const view_of_all<const T>& x) {
        const buffer_shape &mine = shape(), &theirs = x.shape;
        expect(theirs.batch == mine.batch && theirs.heads == mine.heads &&
                   theirs.dim(kvq::tensor::key) == mine.dim(kvq::tensor::key) &&
                   theirs.dim(kvq::tensor::value) == mine.dim(kvq::tensor::value),
               "a view of ", theirs.batch, " rows x ", theirs.heads, " heads does not fit buffers of ",
               mine.batch, " x ", mine.heads, ", or their channels differ");
        arrays_.reserve(x.tokens);
        for_each_token<0>(arrays_, tokens(), x.tokens, [&](int row, int head, int t, auto* w, T* s, T* b) {
            mlx::quantize(format_, mine.dim(kvq::tensor::key), x.keys(row).at(t, head), w, s, b);
        });
        for_each_token<3>(arrays_, tokens(), x.tokens, [&](int row, int head, int t, auto* w, T* s, T* b) {
            mlx::quantize(format_, mine.dim(kvq::tensor::value), x.values(row).at(t, head), w, s, b);
        });
        arrays_.add(x.tokens);
    }

    /// All held tokens, dequantized.
    buffers<T> dequantize() const {
        buffers<T> out(shape());
        out.append_with(tokens(), [&](const view_of_all<T>& to) {
            for_each_token<0>(arrays_, 0, tokens(), [&](int row, int head, int t, auto* w, auto* s, auto* b) {
                mlx::dequantize(format_, shape().dim(kvq::tensor::key), w, s, b, to.keys(row).at(t, head));
            });
            for_each_token<3>(arrays_, 0, tokens(), [&](int row, int head, int t, auto* w, auto* s, auto* b) {
                mlx::dequantize(format_, shape().dim(kvq::tensor::value), w, s, b,
                                to.values(row).at(t, head));
            });
        });
        return out;
    }

    void trim(int n) { arrays_.trim(n); }
    /// Frees the memory beyond the held tokens, of codes, scales and biases; bits and group stay.
    void trim_to_offset() { arrays_.trim_to_offset(); }

    const buffer_shape& shape() const noexcept { return arrays_.shape(); }
    const mlx::affine& format() const noexcept { return format_; }
    int tokens() const noexcept { return arrays_.tokens(); }
    int capacity() const noexcept { return arrays_.capacity(); }
    std::size_t bytes() const noexcept { return arrays_.bytes(); }

private:
    static std::array<int, 6> widths(const buffer_shape& s, const mlx::affine& format) {
        const int key = s.dim(kvq::tensor::key), value = s.dim(kvq::tensor::value);
        format.check(key);
        format.check(value);
        return {format.words(key),   format.groups(key),   format.groups(key),
                format.words(value), format.groups(value), format.groups(value)};
    }
    /// Calls f(row, head, token, codes, scales, biases) for tokens [first, first + n); Codes: index of the
    /// first of three arrays.
    template <std::size_t Codes, class Arrays, class F>
    static void for_each_token(Arrays& arrays, int first, int n, F&& f) {
        const buffer_shape& s = arrays.shape();
        for (int row = 0; row < s.batch; ++row)
            for (int head = 0; head < s.heads; ++head)
                for (int t = 0; t < n; ++t) {
                    const int at = row * s.heads + head;
                    f(row, head, t, arrays.template at<Codes>(at, first + t),
                      arrays.template at<Codes + 1>(at, first + t),
                      arrays.template at<Codes + 2>(at, first + t));
                }
    }

    mlx::affine format_;
    arrays<std::uint32_t, T, T, std::uint32_t, T, T> arrays_;
};

/// Appends tokens [first, tokens) of one row of buffers to a layer of a sequence.
template <class T>
void append_to(kvq::sequence& s, int layer, const view_of_all<T>& from, int first = 0, int row = 0) {
    expect(first >= 0 && first <= from.tokens, "cannot begin at token ", first, " of ", from.tokens);
    s.append(layer, from.keys(row).slice(first, from.tokens - first),
             from.values(row).slice(first, from.tokens - first));
}

/// Appends x^ of tokens [first, tokens) of a layer of a sequence to buffers of one row. Returns a view of all
/// held tokens.
template <kvq::float_format T>
view_of_all<T> append_from(buffers<T>& to, const kvq::sequence& s, int layer, int first = 0) {
    expect(to.shape().batch == 1, "a sequence fills buffers of 1 row, not ", to.shape().batch);
    expect(first >= 0 && first <= s.tokens(layer), "cannot begin at token ", first, " of ", s.tokens(layer));
    const int n = s.tokens(layer) - first, before = to.tokens();
    return to.append_with(n, [&](const view_of_all<T>& all) {
        s.dequantize(layer, kvq::tensor::key, first, all.keys().slice(before, n));
        s.dequantize(layer, kvq::tensor::value, first, all.values().slice(before, n));
    });
}

}  // namespace growing
