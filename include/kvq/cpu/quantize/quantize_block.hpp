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
    static constexpr int column_block = Values::column_block, most_groups = 8;

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
    /// Parameters of a strip's rows: of(k) for a vector of rows, of_token(i, c) for columns [c, c + width) of
    /// one row.
    struct row_parameters {
        alignas(64) float bias[width], inverse[width];
        floats biases, inverses;

        KVQ_INLINE void load() {
            biases = Lanes::load_floats(bias);
            inverses = Lanes::load_floats(inverse);
        }
        KVQ_INLINE grid of(int) const { return {biases, inverses}; }
        KVQ_INLINE grid of_token(int i, int) const {
            return {Lanes::splat_float(bias[i]), Lanes::splat_float(inverse[i])};
        }
    };
    /// The same for parameters of a block of columns, which all rows share.
    struct column_parameters {
        alignas(64) float bias[column_block], inverse[column_block];

        KVQ_INLINE grid of(int c) const {
            return {Lanes::splat_float(bias[c]), Lanes::splat_float(inverse[c])};
        }
        KVQ_INLINE grid of_token(int, int c) const {
            return {Lanes::load_floats(bias + c), Lanes::load_floats(inverse + c)};
        }
    };

    void quantize() {
        const grouped_axis &rows = of_.codes.rows(), &cols = of_.codes.cols;
        // Padding between sections and of odd groups is zero, as in the reference. Codes are written, but for
        // rows that pad a group.
        const std::size_t written = rows.padded_size() == rows.size ? of_.codes.bytes() : 0;
        std::memset(to_ + written, 0, of_.bytes - written);
        steps_line_up_ = cols.groups() == 1 || cols.group % step_columns == 0;
        if (!of_.sections.on_rows) {
            for (int g = 0; g < rows.groups(); ++g) code_columns(g);
        } else if (!steps_line_up_) {
            each_strip(0, [&](const strip& at) { code_odd_rows(at); });
        } else {
            // The values of some groups stay in L1. Where the columns of a strip are far apart, one group is
            // enough.
            const int some = values_.by_column() ? 1 : most_groups;
            for (int g = 0; g < cols.groups(); g += some)
                each_strip(0, [&](const strip& at) {
                    if (whole(at))
                        code_rows(at, g, detail::smaller(g + some, cols.groups()));
                    else if (g == 0)
                        code_odd_rows(at);
                });
        }
    }

    /// Calls f(strip) for all rows of a group. Tiles of codes begin with the group, those of values with the block.
    template <class F>
    void each_strip(int group, F&& f) const {
        constexpr int tile = tile_layout::tile_rows;
        const grouped_axis& rows = of_.codes.rows();
        const int first = group * rows.group, size = rows.group_size(group);
        for (int part = 0; part < size;) {
            const int row = first + part;
            const int n = detail::smaller(detail::smaller(width, size - part),
                                          tile - detail::larger(row % tile, part % tile));
            f(strip{values_.strip(row, n), to_ + 4 * of_.codes.tiles.word(row, 0),
                    of_.codes.tiles.vector_bytes(row)});
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
                    const auto [bias, inverse] = p.of((s - first) * step_columns + 4 * q + k);
                    return codes::template code<false>(x[k], bias, inverse);
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
        constexpr int square_columns = 4 * width, squares = detail::larger(1, step_quads / width);
        const int columns = (last - first) * step_columns;
        for (int c = 0; c < columns; c += squares * square_columns) {
            ints words[squares * width];
            if (c + squares * square_columns <= columns)
                turned_codes<true>(at, first * step_columns, c, columns, p, words);
            else
                turned_codes<false>(at, first * step_columns, c, columns, p, words);
            KVQ_UNROLL
            for (int s = 0; s < squares * width / step_quads; ++s)
                if (c + s * step_columns < columns)
                    writer::template put<false>(
                        of_.codes.quads(), first + c / step_columns + s, words + s * step_quads,
                        [&](int vector, ints w)
                            KVQ_INLINE_LAMBDA { Lanes::store(at.to + vector * at.to_step, w); });
        }
    }
    /// The words of columns from `first` + c on, up to `columns` behind `first`. Whole: all columns of the
    /// words exist.
    template <bool Whole, class Parameters, std::size_t N>
    KVQ_INLINE void turned_codes(const strip& at, int first, int c, int columns, const Parameters& p,
                                 ints (&words)[N]) const {
        const std::ptrdiff_t line = values_.line_bytes();
        for (int n = 0; n < static_cast<int>(N); n += width) {
            ints square[width];
            const std::byte* from = at.from.from + 4 * first;
            for (int i = 0; i < width; ++i, from += line) {
                const auto level = [&](int k) KVQ_INLINE_LAMBDA {
                    const int column = c + 4 * n + k * width, left = Whole ? width : columns - column;
                    if (left <= 0) return Lanes::splat(0);
                    const auto* const x = reinterpret_cast<const float*>(from) + column;
                    const auto [bias, inverse] = p.of_token(i, column);
                    return codes::template level<false>(
                        left < width ? Lanes::load_floats(x, left) : Lanes::load_floats(x), bias, inverse);
                };
                const ints l0 = level(0), l1 = level(1), l2 = level(2), l3 = level(3);
                square[i] = codes::packed(l0, l1, l2, l3);
            }
            Lanes::transpose(square);
            KVQ_UNROLL
            for (int i = 0; i < width; ++i) words[n + i % 4 * (width / 4) + i / 4] = square[i];
        }
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

    KVQ_NOINLINE void fit_group(const strip& at, int g, row_parameters& p) {
        const grouped_axis& cols = of_.codes.cols;
        alignas(64) float lo[width], hi[width];
        const int begin = g * cols.group;
        values_.row_extremes(at.from, begin, begin + cols.group_size(g), lo, hi);
        of_.fit(lo, hi, at.from.n, codes::steps,
                to_ + of_.sections.offset(g, of_.codes.rows().slot(at.from.row)), of_.sections.bytes, p.bias,
                p.inverse, most_);
    }

    /// Groups [first, last) of whole steps: first their parameters, so that one fit need not wait for the
    /// other.
    KVQ_INLINE void code_rows(const strip& at, int first, int last) {
        const grouped_axis& cols = of_.codes.cols;
        row_parameters parameters[most_groups];
        for (int g = first; g < last; ++g) fit_group(at, g, parameters[g - first]);
        for (int g = first; g < last; ++g) {
            row_parameters& p = parameters[g - first];
            p.load();
            const int begin = g * cols.group, end = begin + cols.group_size(g);
            code_steps(at, begin / step_columns, end / step_columns, p);
            if (end % step_columns != 0) {
                coded_column some[step_columns];
                for (int k = 0; k < end % step_columns; ++k) some[k] = {p.biases, p.inverses, true};
                code_any_step(at, end / step_columns, end / step_columns * step_columns, some);
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
                    row_parameters p;
                    fit_group(at, column / cols.group, p);
                    p.load();
                    bias = p.biases;
                    inverse = p.inverses;
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
            alignas(64) float lo[column_block], hi[column_block];
            column_parameters p;
            values_.column_extremes(first, size, first_row, last_row, lo, hi);
            for (int c = 0; c < size; c += width)
                of_.fit(lo + c, hi + c, detail::smaller(width, size - c), codes::steps,
                        to_ + of_.sections.offset(group, first + c), of_.sections.bytes, p.bias + c,
                        p.inverse + c, most_);
            each_strip(group, [&](const strip& at) {
                const int from = first / step_columns;
                int done = 0;
                if (whole(at)) {
                    done = size / step_columns;
                    code_steps(at, from, from + done, p);
                }
                for (; done * step_columns < size; ++done) {
                    coded_column some[step_columns];
                    const int begin = done * step_columns, n = detail::smaller(step_columns, size - begin);
                    for (int k = 0; k < n; ++k) {
                        const auto [bias, inverse] = p.of(begin + k);
                        some[k] = {bias, inverse, true};
                    }
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
