// Values of a block as block_quantizer reads them: rows across lanes, from either order in memory.
//
//   half_values    a block of fp16 values (pack/value_layout.hpp), the usual window: extremes of both halves
//                  of a word at once
//   float_values   a block of fp32 values, or floats [token][channel], as dequantizing gives them
//
//   strip                up to a vector of neighbouring rows, all in one tile of codes
//   row_extremes         the least and the largest value of every row of a strip, over some columns
//   column_extremes      those of some columns, over some rows
//   extremes_of_channels row_extremes of neighbouring strips, of tokens of V
//   quad                 the four values of a quad of columns, from its first word; word w of all rows lies
//                        at from + w * step
//
// In blocks and in tokens of V the rows of a column are neighbours. Tokens of K (by_token) have the columns
// of a row beside each other: their extremes are found token by token, and quad does not read them.
// Contract: finite() is false if a value of which extremes were found is not finite; extremes are undefined
// then. It may be false for floats of which a sum of products of two overflows.
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
        return by_token() ? channel_of_tokens(at.row, at.n, c)
                          : Lanes::as_floats(load(at.from + c * at.step, at.n));
    }

    KVQ_INLINE void row_extremes(const value_strip& at, int begin, int end, float* lo, float* hi) {
        if (by_token()) return extremes_of_tokens(at.row, at.n, begin, end, lo, hi);
        if (at.n == width)
            extremes_of_lines<true, 0>(at.from + begin * at.step, at.step, end - begin, width, lo, hi);
        else
            extremes_of_lines<false, 0>(at.from + begin * at.step, at.step, end - begin, at.n, lo, hi);
    }

    KVQ_INLINE void column_extremes(int first, int size, int begin, int end, float* least, float* most) {
        if (by_token()) return extremes_of_channels(first, size, begin, end, least, most);
        if (by_column()) {
            for (int c = 0; c < size; c += width)
                extremes_of_tokens(first + c, detail::smaller(width, size - c), begin, end, least + c,
                                   most + c);
            return;
        }
        constexpr int rows_of_tile = tile_layout::tile_rows;
        const bool whole_tiles = begin % rows_of_tile == 0 && (end - begin) % rows_of_tile == 0;
        const std::ptrdiff_t next_tile =
            4 * rows_of_tile * static_cast<std::ptrdiff_t>(layout_.tiles.words_per_row);
        const auto place = [&](int row, int column) { return from_ + 4 * layout_.tiles.word(row, column); };
        const auto rows_of = [&](int row) {
            return detail::smaller(end - row, rows_of_tile - row % rows_of_tile);
        };
        floats sums = sums_;
        for (int c = 0; c < size; c += width) {
            ints lo[width], hi[width];
            for (int i = 0; i < width; ++i) {
                const int column = first + detail::smaller(c + i, size - 1);
                const std::byte* p = place(begin, column);
                extremes found =
                    whole_tiles ? extremes_of(p, rows_of_tile) : extremes_of_rows(p, rows_of(begin));
                int row = begin + rows_of(begin);
                for (; whole_tiles && row < end; row += rows_of_tile) {
                    p += next_tile;
                    found.add(extremes_of(p, rows_of_tile));
                }
                for (; row < end; row += rows_of(row))
                    found.add(extremes_of_rows(place(row, column), rows_of(row)));
                sums = Lanes::add(sums, found.sum);
                lo[i] = Lanes::as_ints(found.lo);
                hi[i] = Lanes::as_ints(found.hi);
            }
            Lanes::store_floats(least + c, Lanes::template extreme_of_each<true>(lo));
            Lanes::store_floats(most + c, Lanes::template extreme_of_each<false>(hi));
        }
        sums_ = sums;
    }

    /// Of tokens: of `size` channels, over tokens [begin, end).
    KVQ_NOINLINE void extremes_of_channels(int first, int size, int begin, int end, float* least,
                                           float* most) {
        const std::ptrdiff_t line = line_bytes();
        const std::byte* const p = from_ + line * begin + 4 * first;
        int c = 0;
        for (; c + 4 * width <= size; c += 4 * width)
            extremes_of_lines<true, 0, 1, 2, 3>(p + 4 * c, line, end - begin, width, least + c, most + c);
        for (; c + width <= size; c += width)
            extremes_of_lines<true, 0>(p + 4 * c, line, end - begin, width, least + c, most + c);
        if (c < size)
            extremes_of_lines<false, 0>(p + 4 * c, line, end - begin, size - c, least + c, most + c);
    }

private:
    /// tiles: of a block. rows: the columns of a row are neighbours. columns: the rows of a column are.
    enum class order : unsigned char { tiles, rows, columns };

    /// Of values two by two: a product of two is the cheapest way to see that one is not finite.
    struct extremes {
        floats lo, hi;
        floats sum;  // not finite if a value is not, or if it overflows

        KVQ_INLINE extremes(ints one, ints other) { start(in_register(one), in_register(other)); }
        KVQ_INLINE void take(ints one, ints other) {
            const floats x = in_register(one), y = in_register(other);
            lo = Lanes::smaller(lo, Lanes::smaller(x, y));
            hi = Lanes::larger(hi, Lanes::larger(x, y));
            sum = Lanes::multiply_add(x, y, sum);
        }
        KVQ_INLINE void add(const extremes& other) {
            lo = Lanes::smaller(lo, other.lo);
            hi = Lanes::larger(hi, other.hi);
            sum = Lanes::add(sum, other.sum);
        }

    private:
        KVQ_INLINE void start(floats x, floats y) {
            lo = Lanes::smaller(x, y);
            hi = Lanes::larger(x, y);
            sum = Lanes::multiply(x, y);
        }
        /// A minimum and a maximum that both read memory are slower.
        static KVQ_INLINE floats in_register(ints x) { return Lanes::as_floats(Lanes::in_register(x)); }
    };
    /// Of `count` neighbours, at least a vector.
    static KVQ_INLINE extremes extremes_of(const std::byte* p, int count) {
        const auto at = [&](int i) KVQ_INLINE_LAMBDA { return Lanes::load(p + 4 * i); };
        const int last = count - width;  // its vector may overlap others
        extremes found(at(0), at(detail::smaller(width, last)));
        int i = 2 * width;
        for (; i + 2 * width <= count; i += 2 * width) found.take(at(i), at(i + width));
        if (i < count) found.take(at(detail::smaller(i, last)), at(last));
        return found;
    }
    /// Of any number.
    static KVQ_NOINLINE extremes extremes_of_rows(const std::byte* p, int count) {
        if (count >= width) return extremes_of(p, count);
        const ints x = repeated(p, count);
        return {x, x};
    }
    /// Of `count` lines, `step` bytes apart, of neighbouring vectors. Whole: else of one vector of n values.
    template <bool Whole, int... Vector>
    KVQ_INLINE void extremes_of_lines(const std::byte* p, std::ptrdiff_t step, int count, int n, float* least,
                                      float* most) {
        const auto at = [&](const std::byte* line, int v) KVQ_INLINE_LAMBDA {
            return Whole ? Lanes::load(line + v * 4 * width) : Lanes::load(line, n);
        };
        const std::byte* const second = count > 1 ? p + step : p;
        extremes found[] = {extremes(at(p, Vector), at(second, Vector))...};
        for (count -= 2, p += 2 * step; count > 1; count -= 2, p += 2 * step)
            (found[Vector].take(at(p, Vector), at(p + step, Vector)), ...);
        if (count > 0) (found[Vector].take(at(p, Vector), at(p, Vector)), ...);
        ((sums_ = Lanes::add(sums_, found[Vector].sum)), ...);
        (Lanes::store_floats(least + Vector * width, found[Vector].lo), ...);
        (Lanes::store_floats(most + Vector * width, found[Vector].hi), ...);
    }
    /// Of up to a vector of tokens, over channels [begin, end).
    KVQ_NOINLINE void extremes_of_tokens(int first, int n, int begin, int end, float* least, float* most) {
        if (end - begin < width) return extremes_of_few(first, n, begin, end, least, most);
        ints lo[width], hi[width];
        floats sums = sums_;
        const std::ptrdiff_t line = line_bytes();
        const std::byte* p = from_ + line * first + 4 * begin;
        for (int i = 0; i < width; ++i) {
            const extremes found = extremes_of(p, end - begin);
            sums = Lanes::add(sums, found.sum);
            lo[i] = Lanes::as_ints(found.lo);
            hi[i] = Lanes::as_ints(found.hi);
            if (i + 1 < n) p += line;  // lanes behind the last token repeat it
        }
        sums_ = sums;
        Lanes::store_floats(least, Lanes::template extreme_of_each<true>(lo));
        Lanes::store_floats(most, Lanes::template extreme_of_each<false>(hi));
    }
    /// Of channels that do not fill a vector: one after the other.
    KVQ_NOINLINE void extremes_of_few(int first, int n, int begin, int end, float* least, float* most) {
        const auto channel = [&](int c) { return Lanes::as_ints(channel_of_tokens(first, n, c)); };
        extremes found(channel(begin), channel(begin));
        for (int c = begin + 1; c < end; ++c) found.take(channel(c), channel(c));
        sums_ = Lanes::add(sums_, found.sum);
        Lanes::store_floats(least, found.lo);
        Lanes::store_floats(most, found.hi);
    }
    /// A channel of up to a vector of tokens.
    floats channel_of_tokens(int first, int n, int c) const {
        float x[width] = {};
        for (int i = 0; i < n; ++i) x[i] = detail::load_as<float>(from_ + line_bytes() * (first + i) + 4 * c);
        return Lanes::load_floats(x);
    }

    const value_layout<float> layout_;
    const int dim_;
    const order order_;
    const std::byte* from_;
    floats sums_ = Lanes::splat_float(0.0f);
};

}}}  // namespace kvq::kernels
