// Quantizing a block whose parameters are the range of a group, a vector of rows at a time.
//
//   parameters on rows      a strip of rows after the other: extremes, parameters, codes of a group of
//                           columns
//   parameters on columns   some columns after the other: extremes over all rows, parameters, then codes,
//                           strip by strip
//
// Compiled for an instruction set, levels and a width of codes, and for two orders of values
// (block_values.hpp): fp16 blocks, whose tiles are those of the codes, so that a lane stays a row; and
// floats. Parameters are fitted by a function of their type (fit.hpp). Whole steps of whole vectors are
// quantized without branches; the rest, and codes that need clamping, column by column.
// Contract: the same bytes as scheme::quantize (tests/conformance). For values that are not finite run()
// returns false, and the contents of the block are undefined.
#pragma once

#include <cstring>

#include "../parameter_sections.hpp"
#include "block_values.hpp"
#include "fit.hpp"
#include "pack_codes.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// What the kernel knows of blocks of a codec and a shape.
template <int Bits>
struct range_block {
    code_layout<Bits> codes;
    parameter_sections sections;
    range_fit fit;
    float limit;        ///< parameters above it need codes that are clamped
    std::size_t bytes;  ///< of a block

    range_block(const block_layout& of, const parameter_functions& p, const block_shape& shape)
        : codes(of.rows(shape), of.cols(shape)),
          sections(of, shape),
          fit(p.fit),
          limit(p.limit),
          bytes(of.bytes(shape)) {}
};

template <class Lanes, class Levels, int Bits, class Values>
class block_quantizer {
public:
    block_quantizer(const range_block<Bits>& of, Values& values, std::byte* to)
        : of_(of), values_(values), to_(to) {
        Lanes::store_floats(most_, Lanes::splat_float(0.0f));
    }

    KVQ_NOINLINE bool run() {
        clamp_ = of_.limit < 0.0f;
        quantize();
        if (!values_.finite()) return false;
        // Only parameters of 1-bit codes can exceed fp16 for fp16 values.
        if (!clamp_ && Lanes::largest(Lanes::load_floats(most_)) > of_.limit) {
            clamp_ = true;
            quantize();
        }
        return true;
    }

private:
    using planes = code_planes<Bits>;
    using writer = code_packer<Lanes, Bits>;
    using codes = lane_codes<Lanes, Levels, Bits, Values::scaled>;
    using floats = typename Lanes::floats;
    using ints = typename Lanes::ints;
    static constexpr int width = Lanes::width;
    static constexpr int step_quads = planes::quads_per_step, step_columns = 4 * step_quads;
    static constexpr int column_block = Values::column_block, most_fitted = 8, most_values = 4096;

    /// Up to a vector of neighbouring rows of one tile.
    struct strip {
        value_strip from;
        std::byte* to;
        std::ptrdiff_t to_step;
    };
    /// Parameters in lanes.
    struct grid {
        floats bias, inverse;
    };
    /// Parameters of neighbouring strips, a vector of rows each, in neighbouring groups: [group][strip][row].
    struct fitted_rows {
        alignas(64) float bias[most_fitted * width], inverse[most_fitted * width];
    };
    /// Those of a strip. bias_of(c), inverse_of(c): of column c of the first group, a row in every lane.
    /// of_pair(c)(i, v): of row i, a column in every lane, of vector v of two from c on. Columns are counted
    /// from the first group on.
    struct row_parameters {
        const float *bias, *inverse;
        int group, next;  // columns of a group, floats to the next one
        floats first_bias = Lanes::load_floats(bias), first_inverse = Lanes::load_floats(inverse);

        KVQ_INLINE floats bias_of(int) const { return first_bias; }
        KVQ_INLINE floats inverse_of(int) const { return first_inverse; }
        KVQ_INLINE auto of_pair(int c) const {
            const int at = c / group * next;
            return [biases = bias + at, inverses = inverse + at](int i, int) KVQ_INLINE_LAMBDA {
                return grid{Lanes::splat_float(biases[i]), Lanes::splat_float(inverses[i])};
            };
        }
    };
    /// The same for parameters of a block of columns, which all rows share.
    struct column_parameters {
        alignas(64) float bias[column_block], inverse[column_block];

        KVQ_INLINE floats bias_of(int c) const { return Lanes::splat_float(bias[c]); }
        KVQ_INLINE floats inverse_of(int c) const { return Lanes::splat_float(inverse[c]); }
        KVQ_INLINE auto of_pair(int c) const {
            return [biases = bias + c, inverses = inverse + c](int, int v) KVQ_INLINE_LAMBDA {
                return grid{Lanes::load_floats(biases + v * width), Lanes::load_floats(inverses + v * width)};
            };
        }
    };

    void quantize() {
        const grouped_axis &rows = of_.codes.rows(), &cols = of_.codes.cols;
        // Padding between sections and of odd groups is zero, as in the reference. Codes are written, but for
        // rows that pad a group.
        const std::size_t written = rows.padded_size() == rows.size ? of_.codes.bytes() : 0;
        std::memset(to_ + written, 0, of_.bytes - written);
        steps_line_up_ = cols.groups() == 1 || cols.group % step_columns == 0;
        if (of_.sections.on_rows)
            code_all_rows();
        else
            for (int g = 0; g < rows.groups(); ++g) code_columns(g);
    }

    /// n rows of a group, from its row `part` on. As tile_layout::word, without divisions.
    KVQ_INLINE strip strip_of(int group, int part, int n) const {
        const tile_layout& tiles = of_.codes.tiles;
        const int in_tile = part % tile_layout::tile_rows, tile = part - in_tile;
        const auto word = static_cast<std::size_t>(tiles.rows.group_begin(group) + tile) *
                              static_cast<std::size_t>(tiles.words_per_row) +
                          static_cast<std::size_t>(in_tile);
        return {values_.strip(group * tiles.rows.group + part, n), to_ + 4 * word,
                4 * detail::smaller(tile_layout::tile_rows, tiles.rows.group_slots(group) - tile)};
    }
    /// Calls f(strip) for all rows of a group. Tiles of codes begin with the group, those of values with the
    /// block.
    template <class F>
    KVQ_INLINE void each_strip(int group, F&& f) const {
        constexpr int tile = tile_layout::tile_rows;
        const grouped_axis& rows = of_.codes.rows();
        const int first = group * rows.group, size = rows.group_size(group);
        for (int part = 0; part < size;) {
            const int n = detail::smaller(detail::smaller(width, size - part),
                                          tile - detail::larger((first + part) % tile, part % tile));
            f(strip_of(group, part, n));
            part += n;
        }
    }
    bool whole(const strip& at) const { return at.from.n == width && !clamp_; }

    // ---- codes ----

    /// Codes of whole steps [first, last) of a whole strip. p: parameters of the columns from the first one
    /// on.
    template <class Parameters>
    KVQ_INLINE void code_steps(const strip& at, int first, int last, const Parameters& p) const {
        if constexpr (!Values::scaled)
            if (values_.by_token()) return code_tokens(at, first, last, p);
        // Copies: what is stored cannot change them.
        std::byte* const to = at.to;
        const std::ptrdiff_t to_step = at.to_step, step = at.from.step;
        const int quads = of_.codes.quads();
        const std::byte* from = at.from.from + first * step_quads * Values::quad_words * step;
        for (int s = first; s < last; ++s) {
            ints words[step_quads];
            KVQ_UNROLL
            for (int q = 0; q < step_quads; ++q, from += Values::quad_words * step) {
                floats x[4];
                Values::quad(from, step, x);
                const auto code = [&](int k) KVQ_INLINE_LAMBDA {
                    const int c = (s - first) * step_columns + 4 * q + k;
                    return codes::template code<false>(x[k], p.bias_of(c), p.inverse_of(c));
                };
                const ints c0 = code(0), c1 = code(1), c2 = code(2), c3 = code(3);
                words[q] = writer::four_codes(c0, c1, c2, c3);
            }
            writer::template put<false>(quads, s, words, [&](int vector, ints w) KVQ_INLINE_LAMBDA {
                Lanes::store(to + vector * to_step, w);
            });
        }
    }
    /// The same where the columns of a row are neighbours in memory: codes are packed to bytes in this order
    /// and transposed as words of four, which is a quarter of the work.
    template <class Parameters>
    KVQ_NOINLINE void code_tokens(const strip& at, int first, int last, const Parameters& p) const {
        constexpr int squares = detail::larger(1, step_quads / width), some = squares * 4 * width;
        const int columns = (last - first) * step_columns;
        int c = 0;
        for (; c + some <= columns; c += some) code_squares<squares, true>(at, first, c, columns, p);
        for (; c < columns; c += some) code_squares<squares, false>(at, first, c, columns, p);
    }
    /// Columns from c on, counted from step `first`, of which `columns` are coded. Whole: all columns of the
    /// squares exist.
    template <int Squares, bool Whole, class Parameters>
    KVQ_INLINE void code_squares(const strip& at, int first, int c, int columns, const Parameters& p) const {
        // Copies: what is stored cannot change them.
        std::byte* const to = at.to;
        const std::ptrdiff_t to_step = at.to_step, line = values_.line_bytes();
        const int quads = of_.codes.quads();
        const std::byte* const values = at.from.from + 4 * (first * step_columns);
        ints words[Squares * width];
        KVQ_UNROLL
        for (int n = 0; n < Squares * width; n += width) {
            ints square[width];
            const std::byte* from = values;
            const auto vector = [&](int k) { return c + 4 * n + k * width; };
            const auto first_pair = p.of_pair(vector(0)), last_pair = p.of_pair(vector(2));
            for (int i = 0; i < width; ++i, from += line) {
                const auto level = [&](int k, const auto& parameters) KVQ_INLINE_LAMBDA {
                    const int left = Whole ? width : columns - vector(k);
                    if (left <= 0) return Lanes::splat(0);
                    const auto* const x = reinterpret_cast<const float*>(from) + vector(k);
                    const auto [bias, inverse] = parameters(i, k % 2);
                    return codes::template level<false>(
                        left < width ? Lanes::load_floats(x, left) : Lanes::load_floats(x), bias, inverse);
                };
                const ints l0 = level(0, first_pair), l1 = level(1, first_pair), l2 = level(2, last_pair),
                           l3 = level(3, last_pair);
                square[i] = codes::packed(l0, l1, l2, l3);
            }
            Lanes::transpose(square);
            KVQ_UNROLL
            for (int i = 0; i < width; ++i) words[n + i % 4 * (width / 4) + i / 4] = square[i];
        }
        KVQ_UNROLL
        for (int s = 0; s < Squares * width / step_quads; ++s)
            if (Whole || c + s * step_columns < columns)
                writer::template put<false>(
                    quads, first + c / step_columns + s, words + s * step_quads,
                    [&](int vector, ints w) KVQ_INLINE_LAMBDA { Lanes::store(to + vector * to_step, w); });
    }

    /// A column of a step, with the parameters of a strip.
    struct coded_column {
        floats bias, inverse;
        bool used = false;  // else padding
    };
    /// Codes of any step. columns: of its slots; first: the first column among them.
    KVQ_NOINLINE void code_any_step(const strip& at, int s, int first,
                                    const coded_column (&columns)[step_columns]) const {
        ints words[step_quads];
        for (int q = 0; q < step_quads; ++q) {
            ints code[4];
            for (int k = 0; k < 4; ++k) {
                const coded_column& c = columns[4 * q + k];
                code[k] =
                    c.used ? codes::template code<true>(values_.column(at.from, first++), c.bias, c.inverse)
                           : Lanes::splat(0);
            }
            words[q] = writer::four_codes(code[0], code[1], code[2], code[3]);
        }
        writer::template put<true>(of_.codes.quads(), s, words, [&](int vector, ints w) {
            std::byte* const to = at.to + vector * at.to_step;
            if (at.from.n == width)
                Lanes::store(to, w);
            else
                Lanes::store(to, w, at.from.n);
        });
    }

    // ---- parameters on rows ----

    /// Rows are one group: whole strips, then rows that do not fill one.
    void code_all_rows() {
        const grouped_axis &rows = of_.codes.rows(), &cols = of_.codes.cols;
        const int whole = steps_line_up_ && !clamp_ ? rows.size / width * width : 0;
        // Some groups of some strips: their values stay in L1, and one fit need not wait for another. Where
        // the columns of a strip are far apart, one group, and strips enough for whole cache lines.
        const bool apart = values_.by_column();
        const int some = apart ? 1 : detail::smaller(most_fitted, cols.groups());
        const int strips = detail::smaller(
            most_fitted / some, detail::larger(apart ? 4 : 1, most_values / (width * some * cols.group)));
        for (int g = 0; g < cols.groups(); g += some)
            for (int row = 0; row < whole; row += strips * width)
                code_rows(row, detail::smaller(strips * width, whole - row), g,
                          detail::smaller(g + some, cols.groups()));
        for (int row = whole; row < rows.size; row += width)
            code_odd_rows(strip_of(0, row, detail::smaller(width, rows.size - row)));
    }

    /// Fits groups [first, last), where values are by_column() one, of `count` rows from `row` on.
    KVQ_NOINLINE void fit_rows(int row, int count, int first, int last, fitted_rows& p) {
        const grouped_axis& cols = of_.codes.cols;
        const int next = detail::round_up(count, width);
        // All extremes before all fits, which are chains of slow steps.
        if constexpr (!Values::scaled)
            if (values_.by_column())
                values_.extremes_of_channels(row, count, first * cols.group,
                                             first * cols.group + cols.group_size(first), p.bias, p.inverse);
        if (!values_.by_column())
            for (int r = 0; r < count; r += width)
                for (int g = first, at = r; g < last; ++g, at += next)
                    values_.row_extremes(values_.strip(row + r, detail::smaller(width, count - r)),
                                         g * cols.group, g * cols.group + cols.group_size(g), p.bias + at,
                                         p.inverse + at);
        for (int g = first, at = 0; g < last; ++g, at += next)
            of_.fit(p.bias + at, p.inverse + at, count, codes::steps, to_ + of_.sections.offset(g, row),
                    of_.sections.bytes, p.bias + at, p.inverse + at, most_);
    }

    /// The same rows and groups, of whole strips and steps.
    KVQ_INLINE void code_rows(int row, int count, int first, int last) {
        fitted_rows fitted;
        fit_rows(row, count, first, last, fitted);
        const grouped_axis& cols = of_.codes.cols;
        // Groups that pairs of vectors fill are turned together.
        const int together = values_.by_token() && cols.group % (2 * width) == 0 ? last - first : 1;
        for (int r = 0; r < count; r += width) {
            const strip rows = strip_of(0, row + r, width);
            for (int g = first, at = r; g < last; g += together, at += together * count) {
                const int begin = g * cols.group,
                          end = detail::smaller(begin + together * cols.group, cols.size);
                code_steps(rows, begin / step_columns, end / step_columns,
                           row_parameters{fitted.bias + at, fitted.inverse + at, cols.group, count});
                if (end % step_columns != 0) {
                    const int of_last = at + (together - 1) * count;
                    coded_column some[step_columns];
                    for (int k = 0; k < end % step_columns; ++k)
                        some[k] = {Lanes::load_floats(fitted.bias + of_last),
                                   Lanes::load_floats(fitted.inverse + of_last), true};
                    code_any_step(rows, end / step_columns, end / step_columns * step_columns, some);
                }
            }
        }
    }

    /// Groups of any size.
    KVQ_NOINLINE void code_odd_rows(const strip& at) {
        const grouped_axis& cols = of_.codes.cols;
        floats bias = Lanes::splat_float(0.0f), inverse = bias;
        int column = 0;
        for (int s = 0; step_columns * s < cols.padded_size(); ++s) {
            coded_column some[step_columns];
            const int first = column;
            for (int k = 0; k < step_columns; ++k) {
                if (cols.index(s * step_columns + k) != column) continue;
                if (column % cols.group == 0) {
                    fitted_rows p;
                    fit_rows(at.from.row, at.from.n, column / cols.group, column / cols.group + 1, p);
                    bias = Lanes::load_floats(p.bias);
                    inverse = Lanes::load_floats(p.inverse);
                }
                some[k] = {bias, inverse, true};
                ++column;
            }
            code_any_step(at, s, first, some);
        }
    }

    // ---- parameters on columns ----

    /// A row group: a column block at a time, so that the second read of the values hits L1.
    void code_columns(int group) {
        const int cols = of_.codes.cols.size;
        const grouped_axis& rows = of_.codes.rows();
        const int first_row = group * rows.group, last_row = first_row + rows.group_size(group);
        for (int first = 0; first < cols; first += column_block) {
            const int size = detail::smaller(column_block, cols - first);
            column_parameters p;
            values_.column_extremes(first, size, first_row, last_row, p.bias, p.inverse);
            of_.fit(p.bias, p.inverse, size, codes::steps, to_ + of_.sections.offset(group, first),
                    of_.sections.bytes, p.bias, p.inverse, most_);
            each_strip(group, [&](const strip& at) KVQ_INLINE_LAMBDA {
                const int from = first / step_columns;
                int done = 0;
                if (whole(at)) {
                    done = size / step_columns;
                    code_steps(at, from, from + done, p);
                }
                for (; done * step_columns < size; ++done) {
                    coded_column some[step_columns];
                    const int begin = done * step_columns, n = detail::smaller(step_columns, size - begin);
                    for (int k = 0; k < n; ++k)
                        some[k] = {p.bias_of(begin + k), p.inverse_of(begin + k), true};
                    code_any_step(at, from + done, first + begin, some);
                }
            });
        }
    }

    const range_block<Bits>& of_;
    Values& values_;
    std::byte* const to_;
    bool clamp_ = false, steps_line_up_ = false;
    alignas(64) float most_[width];
};

}}}  // namespace kvq::kernels
