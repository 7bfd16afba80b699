// Quantizing a full block of 16-bit values with a composed scheme, a vector of rows at a time.
//
// The window block and the quantized block have the same tiles, so nothing is transposed: a lane stays a row. Minima and maxima
// of a group come first, then its codes, from values that are still in L1; parameters are fitted a vector at
// a time (fit.hpp), those of columns after a transposition in registers.
// Contract: the same bytes as scheme::quantize (tests/conformance). For blocks that hold NaN or infinities, and for row groups that
// do not line up with tiles, run() returns false, and the contents of the block are undefined.
#pragma once

#include <cstring>

#include "../../pack/value_layout.hpp"
#include "../composed.hpp"
#include "../special_values.hpp"
#include "fit.hpp"
#include "pack_codes.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes, range_scheme Scheme>
class block_quantizer {
public:
    block_quantizer(const Scheme& scheme, const block_shape& shape, const std::byte* window, std::byte* block)
        : scheme_(scheme),
          shape_(shape),
          window_(shape),
          codes_(scheme.codes(shape)),
          sections_(scheme, shape),
          from_(window),
          to_(block) {}

    KVQ_NOINLINE bool run() {
        const grouped_axis &rows = codes_.rows(), &cols = codes_.cols;
        const bool lines_up = rows.groups() == 1 || rows.group % tile_layout::tile_rows == 0 ||
                              tile_layout::tile_rows % rows.group == 0;
        if (!lines_up || shape_.rows() < 2) return false;
        // Padding between sections and of odd groups is zero, as in the reference.
        const bool whole_steps =
            cols.size % step_columns == 0 && (cols.groups() == 1 || cols.group % step_columns == 0);
        std::memset(to_, 0, scheme_.block_bytes(shape_));
        const bool on_rows = detail::on_rows<typename Scheme::granularity_type>(shape_.role);
        for (int g = 0; g < rows.groups(); ++g) {
            if (!on_rows)
                code_columns(g);
            else if (whole_steps)
                each_strip(g, [&](const auto& at) { code_rows(at); });
            else
                each_strip(g, [&](const auto& at) { code_odd_rows(at); });
        }
        return !special::any(special_);
    }

private:
    using levels = typename Scheme::levels;
    using parameter = typename Scheme::parameter;
    using planes = code_planes<Scheme::code_bits>;
    using writer = code_words<Lanes, Scheme::code_bits>;
    using floats = typename Lanes::floats;
    using ints = typename Lanes::ints;
    using fit = group_fit<Lanes, levels, Scheme::code_bits, parameter, float16>;
    using special = special_values<Lanes, float16>;
    static constexpr int bits = Scheme::code_bits;
    static constexpr int per_word = value_layout<float16>::values_per_word;
    static constexpr int step_quads = planes::quads_per_step, step_columns = 4 * step_quads;
    /// Columns whose parameters are held in arrays, if columns carry parameters.
    static constexpr int chunk = 64;

    /// Up to a vector of neighbouring rows of one tile: the address of their values and codes.
    template <bool Whole>
    struct strip {
        const std::byte* from;
        std::ptrdiff_t from_step;  // bytes from one word of a row to the next
        std::byte* to;
        std::ptrdiff_t to_step;
        int row, n;  // n: Lanes::width if Whole

        KVQ_INLINE ints load(const std::byte* p) const {
            if constexpr (Whole)
                return Lanes::load(p);
            else
                return Lanes::load(p, n);
        }
        KVQ_INLINE void store(std::byte* p, ints words) const {
            if constexpr (Whole)
                Lanes::store(p, words);
            else
                Lanes::store(p, words, n);
        }
    };

    /// Calls f(strip) for all rows of a group.
    template <class F>
    void each_strip(int group, F&& f) const {
        const grouped_axis& rows = codes_.rows();
        const int first = group * rows.group, size = rows.group_size(group);
        for (int part = 0; part < size;) {
            const int row = first + part;
            const int n = detail::smaller(
                Lanes::width,
                detail::smaller(size - part, tile_layout::tile_rows - row % tile_layout::tile_rows));
            const std::byte* const from = from_ + 4 * window_.tiles.word(row, 0);
            std::byte* const to = to_ + 4 * codes_.tiles.word(row, 0);
            const std::ptrdiff_t from_step = window_.tiles.vector_bytes(row),
                                 to_step = codes_.tiles.vector_bytes(row);
            if (n == Lanes::width)
                f(strip<true>{from, from_step, to, to_step, row, n});
            else
                f(strip<false>{from, from_step, to, to_step, row, n});
            part += n;
        }
    }

    /// One half of each word, in the form of group_fit: times 2^-112.
    template <int Half>
    static KVQ_INLINE floats half(ints words) {
        const ints high = Half ? words : Lanes::template shift_left<16>(words);
        return Lanes::as_floats(Lanes::bit_and(Lanes::template shift_right_signed<3>(high),
                                               Lanes::splat(static_cast<std::int32_t>(0x8fffe000u))));
    }

    /// Minima and maxima of words in every lane; two of each, so that they do not wait for each other. Values are compared as
    /// integers of the same order, both halves at once; among these, infinities and NaN are the extremes.
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
        KVQ_INLINE ints met() const { return Lanes::bit_or(special::marks(least()), special::marks(most())); }
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

    /// The extremes of columns [begin, end).
    template <bool Whole>
    KVQ_INLINE extremes range_of(const strip<Whole>& at, int begin, int end) {
        extremes found;
        const std::byte* p = at.from + begin / per_word * at.from_step;
        if (begin % 2 && begin < end) {
            found.take(twice<1>(at.load(p)), 0);
            p += at.from_step;
            ++begin;
        }
        for (; begin + 2 * per_word <= end; begin += 2 * per_word, p += 2 * at.from_step) {
            found.take(at.load(p), 0);
            found.take(at.load(p + at.from_step), 1);
        }
        for (; begin + per_word <= end; begin += per_word, p += at.from_step) found.take(at.load(p), 0);
        if (begin < end) found.take(twice<0>(at.load(p)), 0);
        special_ = Lanes::bit_or(special_, found.met());
        return found;
    }

    /// Stores the words of all quads of a step; Cut: the last step of a row may be short.
    template <bool Cut, bool Whole>
    KVQ_INLINE void put(const strip<Whole>& at, int step, const ints (&words)[step_quads]) const {
        writer::template put<Cut>(codes_.quads(), step, words, [&](int vector, ints w) KVQ_INLINE_LAMBDA {
            at.store(at.to + vector * at.to_step, w);
        });
    }
    static KVQ_INLINE ints four_codes(ints a, ints b, ints c, ints d) {
        return writer::four_codes(a, b, c, d);
    }

    /// The four values of a quad, from its first word.
    template <bool Whole>
    static KVQ_INLINE void load_quad(const strip<Whole>& at, const std::byte* p, floats (&x)[4]) {
        const ints w0 = at.load(p), w1 = at.load(p + at.from_step);
        x[0] = half<0>(w0);
        x[1] = half<1>(w0);
        x[2] = half<0>(w1);
        x[3] = half<1>(w1);
    }
    /// Codes of whole steps [first, last) with the same parameters for all columns.
    template <bool Clamp, bool Whole>
    KVQ_INLINE void code_steps(const strip<Whole>& at, int first, int last, floats bias,
                               floats inverse) const {
        const std::byte* p = at.from + first * step_columns / per_word * at.from_step;
        for (int s = first; s < last; ++s) {
            ints words[step_quads];
            KVQ_UNROLL
            for (int q = 0; q < step_quads; ++q, p += 4 / per_word * at.from_step) {
                floats x[4];
                load_quad(at, p, x);
                words[q] = four_codes(fit::template code<Clamp>(x[0], bias, inverse),
                                      fit::template code<Clamp>(x[1], bias, inverse),
                                      fit::template code<Clamp>(x[2], bias, inverse),
                                      fit::template code<Clamp>(x[3], bias, inverse));
            }
            put<false>(at, s, words);
        }
    }
    /// The same for parameters per column; bias and inverse start at step `first`.
    template <bool Clamp, bool Whole>
    KVQ_INLINE void code_steps(const strip<Whole>& at, int first, int last, const float* bias,
                               const float* inverse) const {
        const std::byte* p = at.from + first * step_columns / per_word * at.from_step;
        for (int s = first; s < last; ++s, bias += step_columns, inverse += step_columns) {
            ints words[step_quads];
            KVQ_UNROLL
            for (int q = 0; q < step_quads; ++q, p += 4 / per_word * at.from_step) {
                floats x[4];
                load_quad(at, p, x);
                const auto code = [&](int k) KVQ_INLINE_LAMBDA {
                    return fit::template code<Clamp>(x[k], Lanes::splat_float(bias[4 * q + k]),
                                                     Lanes::splat_float(inverse[4 * q + k]));
                };
                words[q] = four_codes(code(0), code(1), code(2), code(3));
            }
            put<false>(at, s, words);
        }
    }
    template <bool Whole>
    KVQ_INLINE ints code_one(const strip<Whole>& at, int c, floats bias, floats inverse) const {
        const ints w = at.load(at.from + c / per_word * at.from_step);
        return fit::template code<true>(c % 2 ? half<1>(w) : half<0>(w), bias, inverse);
    }

    template <bool Whole>
    fit fit_group(const strip<Whole>& at, int g) {
        const int begin = g * codes_.cols.group;
        const extremes found = range_of(at, begin, begin + codes_.cols.group_size(g));
        const floats lo = Lanes::smaller(half<0>(found.least()), half<1>(found.least())),
                     hi = Lanes::larger(half<0>(found.most()), half<1>(found.most()));
        const fit f(lo, hi);
        f.store(to_ + sections_.offset(g, codes_.rows().slot(at.row)), sections_.bytes, at.n);
        return f;
    }

    /// Parameters on rows, groups of whole steps.
    template <bool Whole>
    void code_rows(const strip<Whole>& at) {
        const grouped_axis& cols = codes_.cols;
        for (int g = 0; g < cols.groups(); ++g) {
            const fit f = fit_group(at, g);
            const int first = g * cols.group / step_columns,
                      last = (g * cols.group + cols.group_size(g)) / step_columns;
            if (f.must_clamp())
                code_steps<true>(at, first, last, f.bias, f.inverse);
            else
                code_steps<false>(at, first, last, f.bias, f.inverse);
        }
    }

    /// Parameters on rows, groups of any size.
    template <bool Whole>
    void code_odd_rows(const strip<Whole>& at) {
        const grouped_axis& cols = codes_.cols;
        floats bias = Lanes::splat_float(0.0f), inverse = bias;
        for (int s = 0; step_columns * s < cols.padded_size(); ++s) {
            ints words[step_quads];
            for (int q = 0; q < step_quads; ++q) {
                ints code[4];
                for (int k = 0; k < 4; ++k) {
                    const int slot = s * step_columns + 4 * q + k;
                    const int g = cols.groups() == 1 ? 0 : slot / cols.stride;
                    const int in_group = slot - g * cols.stride;
                    code[k] = Lanes::splat(0);
                    if (g >= cols.groups() || in_group >= cols.group_size(g)) continue;
                    if (in_group == 0) {
                        const fit f = fit_group(at, g);
                        bias = f.bias;
                        inverse = f.inverse;
                    }
                    code[k] = code_one(at, g * cols.group + in_group, bias, inverse);
                }
                words[q] = four_codes(code[0], code[1], code[2], code[3]);
            }
            put<true>(at, s, words);
        }
    }

    /// Parameters on columns, one row group: a chunk of columns at a time, so that the second read of the values hits L1.
    void code_columns(int group) {
        const int cols = shape_.cols();
        for (int first = 0; first < cols; first += chunk) {
            const int size = detail::smaller(chunk, cols - first);
            alignas(64) float bias[chunk], inverse[chunk];
            const bool clamp = fit_columns(group, first, size, bias, inverse);
            const int from = first / step_columns, whole = size / step_columns;
            each_strip(group, [&](const auto& at) {
                if (clamp)
                    code_steps<true>(at, from, from + whole, bias, inverse);
                else
                    code_steps<false>(at, from, from + whole, bias, inverse);
                if (whole * step_columns == size) return;
                ints words[step_quads];
                for (int q = 0; q < step_quads; ++q) {
                    ints code[4];
                    for (int k = 0; k < 4; ++k) {
                        const int c = whole * step_columns + 4 * q + k;
                        code[k] = c < size ? code_one(at, first + c, Lanes::splat_float(bias[c]),
                                                      Lanes::splat_float(inverse[c]))
                                           : Lanes::splat(0);
                    }
                    words[q] = four_codes(code[0], code[1], code[2], code[3]);
                }
                put<true>(at, from + whole, words);
            });
        }
    }

    /// Fits the parameters of columns [first, first + size) of a row group. Returns whether codes must be clamped.
    bool fit_columns(int group, int first, int size, float* bias, float* inverse) {
        // The extremes of a word's columns, in every lane.
        ints lo[chunk], hi[chunk];
        const grouped_axis& rows = codes_.rows();
        const int begin = group * rows.group, end = begin + rows.group_size(group);
        constexpr int rows_of_tile = tile_layout::tile_rows, tile_vectors = rows_of_tile / Lanes::width;
        const bool whole_tiles = begin % rows_of_tile == 0 && (end - begin) % rows_of_tile == 0;
        const std::ptrdiff_t next_tile =
            4 * rows_of_tile * static_cast<std::ptrdiff_t>(window_.tiles.words_per_row);
        for (int c = 0; c < size; c += per_word) {
            extremes found;
            const int word = (first + c) / per_word;
            const std::byte* p = from_ + 4 * window_.tiles.word(begin, word);
            for (int tile = begin; whole_tiles && tile < end; tile += rows_of_tile, p += next_tile) {
                KVQ_UNROLL
                for (int v = 0; v < tile_vectors; ++v)
                    found.take(Lanes::load(p + v * 4 * Lanes::width), v % 2);
            }
            for (int tile = begin; !whole_tiles && tile < end;) {
                const int left = detail::smaller(end - tile, rows_of_tile - tile % rows_of_tile);
                p = from_ + 4 * window_.tiles.word(tile, word);
                int r = 0;
                for (; r + Lanes::width <= left; r += Lanes::width) found.take(Lanes::load(p + 4 * r), 0);
                if (r < left) found.take(repeated(Lanes::load(p + 4 * r, left - r), left - r), 1);
                tile += left;
            }
            special_ = Lanes::bit_or(special_, found.met());
            lo[c / per_word] = found.least();
            hi[c / per_word] = found.most();
        }
        for (int w = detail::ceil_div(size, per_word); w % Lanes::width != 0; ++w)
            lo[w] = hi[w] = Lanes::splat(0);
        // The extremes of every column, one after the other.
        alignas(64) std::byte least[2 * chunk], most[2 * chunk];
        for (int w = 0; w < detail::ceil_div(size, per_word); w += Lanes::width) {
            Lanes::store(least + 4 * w, merged<true>(lo + w));
            Lanes::store(most + 4 * w, merged<false>(hi + w));
        }
        bool clamp = false;
        for (int c = 0; c < size; c += Lanes::width) {
            const auto bytes = static_cast<std::size_t>(c) * 2;
            const group_fit<Lanes, levels, bits, parameter, float16, false> f(
                Lanes::template load_values<float16>(least + bytes),
                Lanes::template load_values<float16>(most + bytes));
            f.store(to_ + sections_.offset(group, first + c), sections_.bytes,
                    detail::smaller(Lanes::width, size - c));
            Lanes::store_floats(bias + c, f.bias);
            Lanes::store_floats(inverse + c, f.inverse);
            clamp = clamp || f.must_clamp();
        }
        return clamp;
    }

    /// Lane i: the least (largest) word of vector i, each half by itself.
    template <bool Least>
    static KVQ_INLINE ints merged(const ints* v) {
        ints ordered[Lanes::width];
        KVQ_UNROLL
        for (int i = 0; i < Lanes::width; ++i) ordered[i] = Lanes::ordered_halves(v[i]);
        return Lanes::ordered_halves(Lanes::as_ints(Lanes::merge_lanes(ordered, [](floats a, floats b) {
            const ints x = Lanes::as_ints(a), y = Lanes::as_ints(b);
            return Lanes::as_floats(Least ? Lanes::min_halves(x, y) : Lanes::max_halves(x, y));
        })));
    }

    /// Lanes from n on repeat lane 0, so that they change no minimum or maximum.
    static ints repeated(ints words, int n) {
        std::uint32_t lane[Lanes::width];
        Lanes::store(reinterpret_cast<std::byte*>(lane), words);
        for (int i = n; i < Lanes::width; ++i) lane[i] = lane[0];
        return Lanes::load(reinterpret_cast<const std::byte*>(lane));
    }

    const Scheme& scheme_;
    const block_shape shape_;
    const value_layout<float16> window_;
    const code_layout<bits> codes_;
    const parameter_sections sections_;
    const std::byte* from_;
    std::byte* to_;
    ints special_ = Lanes::splat(0);
};

}}}  // namespace kvq::kernels
