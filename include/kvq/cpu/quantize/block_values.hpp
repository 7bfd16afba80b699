// Values of a block as block_quantizer reads them: rows across lanes, from either order in memory.
//
//   half_values    a block of fp16 values (pack/value_layout.hpp), the usual window: extremes of both halves
//                  of a word at once
//   float_values   a block of fp32 values, or floats [token][channel], as dequantizing gives them
//
//   strip                up to a vector of neighbouring rows, all in one tile of codes
//   row_extremes         the least and the largest value of every row of a strip, over some columns
//   column_extremes      those of some columns, over some rows
//   quad                 the four values of a quad of columns, from its first word; word w of all rows lies
//                        at from + w * step
//
// In blocks and in tokens of V the rows of a column are neighbours. Tokens of K (by_token) have the columns
// of a row beside each other: their extremes are found token by token, and quad does not read them.
// Contract: finite() is false if a value of which extremes were found is not finite; extremes are undefined
// then. It may be false for floats whose sum overflows.
#pragma once

#include <utility>

#include "../../pack/value_layout.hpp"
#include "../special_values.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Up to a vector of neighbouring rows of one tile.
struct value_strip {
    const std::byte* from;  // its first word
    std::ptrdiff_t step;    // bytes from one word of a row to the next
    int row, n;
};

template <class Lanes>
class lane_values {
protected:
    using ints = typename Lanes::ints;
    static constexpr int width = Lanes::width;

    static KVQ_INLINE ints load(const std::byte* p, int n) {
        return n == width ? Lanes::load(p) : Lanes::load(p, n);
    }
    /// The first n lanes; lanes behind them repeat lane 0, so that they change no minimum or maximum.
    static ints repeated(const std::byte* p, int n) {
        std::uint32_t lane[width];
        Lanes::store(reinterpret_cast<std::byte*>(lane), Lanes::load(p, n));
        for (int i = n; i < width; ++i) lane[i] = lane[0];
        return Lanes::load(reinterpret_cast<const std::byte*>(lane));
    }
};

template <class Lanes>
class half_values : lane_values<Lanes> {
    using typename lane_values<Lanes>::ints;
    using lane_values<Lanes>::width, lane_values<Lanes>::load, lane_values<Lanes>::repeated;
    using floats = typename Lanes::floats;
    using special = special_values<Lanes, float16>;

public:
    /// Values come times 2^-112, which is exact (fit.hpp).
    static constexpr bool scaled = true;
    static constexpr int quad_words = 2;
    /// Columns whose parameters are held in arrays: their values stay in L1.
    static constexpr int column_block = 64;

    half_values(const block_shape& shape, const std::byte* window) : layout_(shape), from_(window) {}

    bool finite() const { return !special::any(special_); }
    value_strip strip(int row, int n) const {
        return {from_ + 4 * layout_.tiles.word(row, 0), layout_.tiles.vector_bytes(row), row, n};
    }
    static constexpr bool by_token() { return false; }
    static constexpr bool by_column() { return false; }
    /// The values of the quad whose first word is at p, of a whole strip.
    static KVQ_INLINE void quad(const std::byte* p, std::ptrdiff_t step, floats (&x)[4]) {
        const ints w0 = Lanes::load(p), w1 = Lanes::load(p + step);
        x[0] = half<0>(w0);
        x[1] = half<1>(w0);
        x[2] = half<0>(w1);
        x[3] = half<1>(w1);
    }
    static floats column(const value_strip& at, int c) {
        const ints w = load(at.from + c / 2 * at.step, at.n);
        return c % 2 ? half<1>(w) : half<0>(w);
    }

    /// Of columns [begin, end).
    KVQ_INLINE void row_extremes(const value_strip& at, int begin, int end, float* lo, float* hi) {
        const extremes found =
            at.n == width ? range_of<true>(at, begin, end) : range_of<false>(at, begin, end);
        const ints least = found.least(), most = found.most();
        special_ = Lanes::bit_or(special_, Lanes::bit_or(special::marks(least), special::marks(most)));
        Lanes::store_floats(lo, real(Lanes::smaller(half<0>(least), half<1>(least))));
        Lanes::store_floats(hi, real(Lanes::larger(half<0>(most), half<1>(most))));
    }

    /// Of columns [first, first + size), over rows [begin, end); first is even, size at most column_block.
    KVQ_INLINE void column_extremes(int first, int size, int begin, int end, float* least, float* most) {
        // The extremes of a word's columns, in every lane.
        ints lo[column_block / 2], hi[column_block / 2];
        constexpr int rows_of_tile = tile_layout::tile_rows, tile_vectors = rows_of_tile / width;
        const bool whole_tiles = begin % rows_of_tile == 0 && (end - begin) % rows_of_tile == 0;
        const std::ptrdiff_t next_tile =
            4 * rows_of_tile * static_cast<std::ptrdiff_t>(layout_.tiles.words_per_row);
        const int words = detail::ceil_div(size, 2);
        for (int w = 0; w < words; ++w) {
            extremes found;
            const int word = first / 2 + w;
            const std::byte* p = from_ + 4 * layout_.tiles.word(begin, word);
            for (int tile = begin; whole_tiles && tile < end; tile += rows_of_tile, p += next_tile) {
                KVQ_UNROLL
                for (int v = 0; v < tile_vectors; ++v) found.take(Lanes::load(p + v * 4 * width), v % 2);
            }
            for (int tile = begin; !whole_tiles && tile < end;) {
                const int left = detail::smaller(end - tile, rows_of_tile - tile % rows_of_tile);
                p = from_ + 4 * layout_.tiles.word(tile, word);
                int r = 0;
                for (; r + width <= left; r += width) found.take(Lanes::load(p + 4 * r), 0);
                if (r < left) found.take(repeated(p + 4 * r, left - r), 1);
                tile += left;
            }
            lo[w] = found.least();
            hi[w] = found.most();
            special_ = Lanes::bit_or(special_, Lanes::bit_or(special::marks(lo[w]), special::marks(hi[w])));
        }
        for (int w = words; w % width != 0; ++w) lo[w] = hi[w] = Lanes::splat(0);
        // The extremes of every column, one after the other.
        alignas(64) std::byte halves[2][2 * column_block];
        for (int w = 0; w < words; w += width) {
            Lanes::store(halves[0] + 4 * w, merged<true>(lo + w));
            Lanes::store(halves[1] + 4 * w, merged<false>(hi + w));
        }
        for (int c = 0; c < size; c += width) {
            Lanes::store_floats(least + c, Lanes::template load_values<float16>(halves[0] + 2 * c));
            Lanes::store_floats(most + c, Lanes::template load_values<float16>(halves[1] + 2 * c));
        }
    }

private:
    /// One half of each word, times 2^-112.
    template <int Half>
    static KVQ_INLINE floats half(ints words) {
        const ints high = Half ? words : Lanes::template shift_left<16>(words);
        return Lanes::as_floats(Lanes::bit_and(Lanes::template shift_right_signed<3>(high),
                                               Lanes::splat(static_cast<std::int32_t>(0x8fffe000u))));
    }
    static KVQ_INLINE floats real(floats x) { return Lanes::multiply(x, Lanes::splat_float(0x1p112f)); }

    /// Minima and maxima of words in every lane; two of each, so that they do not wait for each other. Values
    /// are compared as integers of the same order, both halves at once; among these, infinities and NaN are
    /// the extremes.
    struct extremes {
        ints lo[2], hi[2];

        KVQ_INLINE extremes() {
            for (int i = 0; i < 2; ++i) {
                lo[i] = Lanes::splat(0x7fff7fff);
                hi[i] = Lanes::splat(static_cast<std::int32_t>(0x80008000u));
            }
        }
        KVQ_INLINE void take(ints words, int i) {
            words = Lanes::ordered_halves(words);
            lo[i] = Lanes::min_halves(lo[i], words);
            hi[i] = Lanes::max_halves(hi[i], words);
        }
        /// Words of the least and of the largest values.
        KVQ_INLINE ints least() const { return Lanes::ordered_halves(Lanes::min_halves(lo[0], lo[1])); }
        KVQ_INLINE ints most() const { return Lanes::ordered_halves(Lanes::max_halves(hi[0], hi[1])); }
    };

    /// Words with both halves equal to one of them.
    template <int Half>
    static KVQ_INLINE ints twice(ints words) {
        const ints low = Lanes::splat(0xffff), high = Lanes::splat(-0x10000);
        if constexpr (Half == 0)
            return Lanes::bit_or(Lanes::bit_and(words, low), Lanes::template shift_left<16>(words));
        else
            return Lanes::bit_or(Lanes::template shift_right<16>(words), Lanes::bit_and(words, high));
    }

    template <bool Whole>
    KVQ_INLINE static extremes range_of(const value_strip& at, int begin, int end) {
        const auto words = [&](const std::byte* p)
                               KVQ_INLINE_LAMBDA { return Whole ? Lanes::load(p) : Lanes::load(p, at.n); };
        extremes found;
        const std::byte* p = at.from + begin / 2 * at.step;
        if (begin % 2 && begin < end) {
            found.take(twice<1>(words(p)), 0);
            p += at.step;
            ++begin;
        }
        for (; begin + 4 <= end; begin += 4, p += 2 * at.step) {
            found.take(words(p), 0);
            found.take(words(p + at.step), 1);
        }
        for (; begin + 2 <= end; begin += 2, p += at.step) found.take(words(p), 0);
        if (begin < end) found.take(twice<0>(words(p)), 0);
        return found;
    }

    /// Lane i: the least (largest) word of vector i, each half by itself.
    template <bool Least>
    static KVQ_INLINE ints merged(const ints* v) {
        ints ordered[width];
        KVQ_UNROLL
        for (int i = 0; i < width; ++i) ordered[i] = Lanes::ordered_halves(v[i]);
        return Lanes::ordered_halves(Lanes::as_ints(Lanes::merge_lanes(ordered, [](floats a, floats b) {
            const ints x = Lanes::as_ints(a), y = Lanes::as_ints(b);
            return Lanes::as_floats(Least ? Lanes::min_halves(x, y) : Lanes::max_halves(x, y));
        })));
    }

    const value_layout<float16> layout_;
    const std::byte* from_;
    ints special_ = Lanes::splat(0);
};

template <class Lanes>
class float_values : lane_values<Lanes> {
    using typename lane_values<Lanes>::ints;
    using lane_values<Lanes>::width, lane_values<Lanes>::load, lane_values<Lanes>::repeated;
    using floats = typename Lanes::floats;

public:
    static constexpr bool scaled = false;
    static constexpr int quad_words = 4, column_block = 64;

    /// Of a block of fp32 values.
    float_values(const block_shape& shape, const std::byte* window)
        : layout_(shape), dim_(shape.dim), order_(order::tiles), from_(window) {}
    /// Of tokens, [token][channel].
    float_values(const block_shape& shape, const float* tokens)
        : layout_(shape),
          dim_(shape.dim),
          order_(shape.role == tensor::key ? order::rows : order::columns),
          from_(reinterpret_cast<const std::byte*>(tokens)) {}

    bool finite() const { return detail::is_finite(Lanes::sum(sums_)); }
    value_strip strip(int row, int n) const {
        switch (order_) {
            case order::rows:
                return {from_ + line_bytes() * row, 4, row, n};
            case order::columns:
                return {from_ + 4 * row, line_bytes(), row, n};
            default:
                return {from_ + 4 * layout_.tiles.word(row, 0), layout_.tiles.vector_bytes(row), row, n};
        }
    }
    /// Are the columns of a row neighbours in memory, from `from` on? Rows are line_bytes() apart.
    bool by_token() const { return order_ == order::rows; }
    /// Do the rows of a column lie line_bytes() behind those of the column before?
    bool by_column() const { return order_ == order::columns; }
    std::ptrdiff_t line_bytes() const { return 4 * static_cast<std::ptrdiff_t>(dim_); }
    static KVQ_INLINE void quad(const std::byte* p, std::ptrdiff_t step, floats (&x)[4]) {
        KVQ_UNROLL
        for (int i = 0; i < 4; ++i) x[i] = Lanes::as_floats(Lanes::load(p + i * step));
    }
    floats column(const value_strip& at, int c) const {
        if (!by_token()) return Lanes::as_floats(load(at.from + c * at.step, at.n));
        float x[width] = {};
        for (int i = 0; i < at.n; ++i) x[i] = detail::load_as<float>(at.from + i * line_bytes() + 4 * c);
        return Lanes::load_floats(x);
    }

    KVQ_INLINE void row_extremes(const value_strip& at, int begin, int end, float* lo, float* hi) {
        if (by_token()) return extremes_of_tokens(at, begin, end, lo, hi);
        const std::byte* p = at.from + begin * at.step;
        extremes even(load(p, at.n)), odd = even;
        for (; begin + 2 <= end; begin += 2, p += 2 * at.step) {
            even.take(load(p, at.n));
            odd.take(load(p + at.step, at.n));
        }
        if (begin < end) even.take(load(p, at.n));
        even.add(odd);
        see(even);
        Lanes::store_floats(lo, even.lo);
        Lanes::store_floats(hi, even.hi);
    }

    KVQ_INLINE void column_extremes(int first, int size, int begin, int end, float* least, float* most) {
        if (by_token()) return extremes_of_channels(first, size, begin, end, least, most);
        constexpr int rows_of_tile = tile_layout::tile_rows, tile_vectors = rows_of_tile / width;
        const bool whole_tiles = begin % rows_of_tile == 0 && (end - begin) % rows_of_tile == 0;
        const bool tiles = order_ == order::tiles;
        const std::ptrdiff_t next_tile = 4 * rows_of_tile * (tiles ? layout_.tiles.words_per_row : 1);
        const auto place = [&](int row, int column) {
            return from_ + (tiles ? 4 * static_cast<std::ptrdiff_t>(layout_.tiles.word(row, column))
                                  : line_bytes() * column + 4 * row);
        };
        for (int c = 0; c < size; c += width) {
            ints lo[width], hi[width];
            for (int i = 0; i < width; ++i) {
                const int column = first + detail::smaller(c + i, size - 1);
                const std::byte* p = place(begin, column);
                extremes even(whole_tiles ? Lanes::load(p) : repeated(p, 1)), odd = even;
                for (int tile = begin; whole_tiles && tile < end; tile += rows_of_tile, p += next_tile) {
                    KVQ_UNROLL
                    for (int v = 0; v < tile_vectors; v += 2) {
                        even.take(Lanes::load(p + v * 4 * width));
                        odd.take(Lanes::load(p + (v + 1) * 4 * width));
                    }
                }
                for (int row = begin; !whole_tiles && row < end;) {
                    const int n =
                        detail::smaller(width, detail::smaller(end - row, rows_of_tile - row % rows_of_tile));
                    p = place(row, column);
                    even.take(n == width ? Lanes::load(p) : repeated(p, n));
                    row += n;
                }
                even.add(odd);
                see(even);
                lo[i] = Lanes::as_ints(even.lo);
                hi[i] = Lanes::as_ints(even.hi);
            }
            Lanes::store_floats(least + c, Lanes::template extreme_of_each<true>(lo));
            Lanes::store_floats(most + c, Lanes::template extreme_of_each<false>(hi));
        }
    }

private:
    /// tiles: of a block. rows: the columns of a row are neighbours. columns: the rows of a column are.
    enum class order : unsigned char { tiles, rows, columns };

    struct extremes {
        floats lo, hi;
        floats sum;  // not finite if a value is not, or if it overflows

        KVQ_INLINE explicit extremes(ints one) : lo(Lanes::as_floats(one)), hi(lo), sum(lo) {}
        /// From a register: a minimum and a maximum that both read memory are slower.
        KVQ_INLINE void take(ints one) {
            const floats x = Lanes::as_floats(Lanes::in_register(one));
            lo = Lanes::smaller(lo, x);
            hi = Lanes::larger(hi, x);
            sum = Lanes::add(sum, x);
        }
        KVQ_INLINE void add(const extremes& other) {
            lo = Lanes::smaller(lo, other.lo);
            hi = Lanes::larger(hi, other.hi);
            sum = Lanes::add(sum, other.sum);
        }
    };
    KVQ_INLINE void see(const extremes& found) { sums_ = Lanes::add(sums_, found.sum); }

    /// Tokens of K: a token after the other.
    KVQ_NOINLINE void extremes_of_tokens(const value_strip& at, int begin, int end, float* least,
                                         float* most) {
        ints lo[width], hi[width];
        const int size = end - begin;
        for (int i = 0; i < width; ++i) {
            // Lanes behind the last token repeat it.
            const std::byte* const p = at.from + line_bytes() * detail::smaller(i, at.n - 1) + 4 * begin;
            extremes found(size < width ? repeated(p, size) : Lanes::load(p));
            int c = width;
            for (; c + width <= size; c += width) found.take(Lanes::load(p + 4 * c));
            if (c < size) found.take(Lanes::load(p + 4 * (size - width)));
            see(found);
            lo[i] = Lanes::as_ints(found.lo);
            hi[i] = Lanes::as_ints(found.hi);
        }
        Lanes::store_floats(least, Lanes::template extreme_of_each<true>(lo));
        Lanes::store_floats(most, Lanes::template extreme_of_each<false>(hi));
    }
    /// Tokens of K: lanes are channels.
    KVQ_NOINLINE void extremes_of_channels(int first, int size, int begin, int end, float* least,
                                           float* most) {
        const auto find = [&]<int... V>(std::integer_sequence<int, V...>, int c, int n) KVQ_INLINE_LAMBDA {
            const std::byte* p = from_ + line_bytes() * begin + 4 * (first + c);
            const auto words = [&](int v) KVQ_INLINE_LAMBDA { return load(p + v * 4 * width, n); };
            extremes found[] = {extremes(words(V))...};
            for (int t = begin + 1; t < end; ++t) {
                p += line_bytes();
                (found[V].take(words(V)), ...);
            }
            (see(found[V]), ...);
            (Lanes::store_floats(least + c + V * width, found[V].lo), ...);
            (Lanes::store_floats(most + c + V * width, found[V].hi), ...);
        };
        int c = 0;
        for (; c + 4 * width <= size; c += 4 * width) find(std::make_integer_sequence<int, 4>{}, c, width);
        for (; c < size; c += width)
            find(std::make_integer_sequence<int, 1>{}, c, detail::smaller(width, size - c));
    }

    const value_layout<float> layout_;
    const int dim_;
    const order order_;
    const std::byte* from_;
    floats sums_ = Lanes::splat_float(0.0f);
};

/// A block of fp32 values from one of bfloat16, for rows that are a multiple of 4 and pairs of columns.
template <class Lanes>
void widen_block(const block_shape& shape, const std::byte* block, float* to) {
    const grouped_axis rows(shape.rows(), shape.rows());
    const int words = shape.cols() / 2;
    for (int tile = 0; tile < rows.size; tile += tile_layout::tile_rows) {
        const int height = detail::smaller(tile_layout::tile_rows, rows.size - tile);
        for (int w = 0; w < words; ++w, block += 4 * height, to += 2 * height)
            for (int r = 0; r < height; r += Lanes::width) {
                const int n = detail::smaller(Lanes::width, height - r);
                const auto put = [&](float* at, typename Lanes::floats x) {
                    if (n == Lanes::width)
                        Lanes::store_floats(at, x);
                    else
                        Lanes::store_floats(at, x, n);
                };
                const auto both =
                    n == Lanes::width ? Lanes::load(block + 4 * r) : Lanes::load(block + 4 * r, n);
                put(to + r, Lanes::template halves<bfloat16, 0>(both));
                put(to + height + r, Lanes::template halves<bfloat16, 1>(both));
            }
    }
}

}}}  // namespace kvq::kernels
