// Dequantizing a block of a composed scheme, a vector of rows at a time: the mirror of quantize_block.hpp.
//
//   codes of 64 columns -> words of four codes -> x^ = scale * code + bias -> tokens
//
//   V   lanes are channels, as in the output
//   K   rows are tokens: codes are transposed while they are bytes, which is a quarter of the work of floats
//
// Contract: the bits of scheme::dequantize (tests/conformance), then rounded once to the type of the output.
#pragma once

#include <utility>

#include "../parameter_sections.hpp"
#include "../product/code_sums.hpp"
#include "token_rows.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// PerToken: whether tokens have parameters, or channels.
template <class Lanes, class Levels, int Bits, bool PerToken>
class block_dequantizer {
public:
    block_dequantizer(const group_block<Bits>& of, const block_shape& shape, const std::byte* block)
        : shape_(shape), codes_(of.codes), sections_(of.sections), load_(of.load), from_(block) {}

    /// Writes x^ of all tokens.
    template <class T>
    KVQ_NOINLINE void run(token_rows<Lanes, T> out) const {
        if (shape_.role == tensor::key)
            run_as<true>(out);
        else
            run_as<false>(out);
    }

private:
    template <bool Key, class T>
    KVQ_NOINLINE void run_as(const token_rows<Lanes, T>& out) const {
        // A copy: the compiler keeps its members in registers, since nothing that is written can change them.
        block_dequantizer(*this).template run_here<Key, PerToken == Key>(token_rows<Lanes, T>(out));
    }
    /// OnRows: whether rows of the block's matrix have the parameters, or columns.
    template <bool Key, bool OnRows, class T>
    KVQ_INLINE void run_here(const token_rows<Lanes, T>& out) const {
        if constexpr (Key)
            each_part([&](const part& p) KVQ_INLINE_LAMBDA { turned_part<OnRows>(p, out); });
        else
            each_value<OnRows>([&](const part& p, int token, floats x)
                                   KVQ_INLINE_LAMBDA { out.put(out.at(token, p.row), x, p.rows); });
    }

    using planes = code_planes<Bits>;
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    /// Columns that are dequantized at a time: whole steps of every width, a multiple of every vector.
    static constexpr int column_block = 64, block_quads = column_block / 4;

    /// Rows of one tile that fit a vector.
    struct part {
        int group;       // row group
        int row;         // first row
        int rows;        // of the matrix
        int slot;        // of the first row
        int height;      // slots of the tile
        int slot_count;  // from here to the end of the tile
    };

    template <class F>
    KVQ_INLINE void each_part(F&& f) const {
        for (int g = 0; g < codes_.rows().groups(); ++g) each_part_of(g, f);
    }
    template <class F>
    KVQ_INLINE void each_part_of(int g, F&& f) const {
        const grouped_axis& rows = codes_.rows();
        const int slot_count = rows.group_slots(g), size = rows.group_size(g);
        for (int tile = 0; tile < slot_count; tile += tile_layout::tile_rows) {
            const int height = detail::smaller(tile_layout::tile_rows, slot_count - tile);
            for (int in = 0; in < height && tile + in < size; in += Lanes::width)
                f(part{g, g * rows.group + tile + in, detail::smaller(Lanes::width, size - tile - in),
                       rows.group_begin(g) + tile + in, height, height - in});
        }
    }

    static KVQ_INLINE floats value(ints code, floats scale, floats bias) {
        if constexpr (Levels::has_bias) {
            return Lanes::add(Lanes::rounded_product(scale, Lanes::to_floats(code)), bias);
        } else {
            const ints level = Lanes::add(code, Lanes::splat(-Levels::template zero_code<Bits>));
            return Lanes::multiply(scale, Lanes::to_floats(level));
        }
    }

    /// x^ of codes that share a scale and a bias; a table, if a vector holds the values of all codes.
    struct values_of {
        static constexpr bool tabled = (1 << Bits) <= Lanes::width && requires(floats t, ints i) {
            Lanes::lookup(t, i);
        };
        floats scale, bias;

        values_of() = default;
        KVQ_INLINE values_of(float s, const float* b)
            : scale(Lanes::splat_float(s)), bias(Lanes::splat_float(Levels::has_bias ? *b : 0.0f)) {
            if constexpr (tabled) scale = value(all_codes(), scale, bias);
        }
        KVQ_INLINE floats operator()(ints code) const {
            if constexpr (tabled)
                return Lanes::lookup(scale, code);
            else
                return value(code, scale, bias);
        }
        static KVQ_INLINE ints all_codes() {
            alignas(64) static constexpr std::int32_t codes[] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                                 8, 9, 10, 11, 12, 13, 14, 15};
            return Lanes::load(reinterpret_cast<const std::byte*>(codes));
        }
    };

    /// Quads [first, first + count) of a part as words of four codes; first is a multiple of a column block.
    KVQ_INLINE void load_column_block(const part& p, int first, int count, ints (&quads)[block_quads]) const {
        const std::ptrdiff_t vector_bytes = p.height * 4;
        const std::byte* plane[planes::count];
        first_vectors(p, first, plane);
        const auto load = [&]<bool Partial, bool Cut>() KVQ_INLINE_LAMBDA {
            KVQ_UNROLL
            for (int s = 0; s < block_quads / planes::quads_per_step; ++s)
                [&]<int... Q>(std::integer_sequence<int, Q...>) KVQ_INLINE_LAMBDA {
                    ((Cut && s * planes::quads_per_step + Q >= count
                          ? void()
                          : void(quads[s * planes::quads_per_step + Q] =
                                     step_quad<Q, Partial>(plane, s, vector_bytes, p.slot_count))),
                     ...);
                }
            (std::make_integer_sequence<int, planes::quads_per_step>{});
        };
        const bool partial = p.slot_count < Lanes::width;
        if (count == block_quads && !partial)
            load.template operator()<false, false>();
        else if (!partial)
            load.template operator()<false, true>();
        else
            load.template operator()<true, true>();
    }
    template <int Quad, bool Partial>
    static KVQ_INLINE ints step_quad(const std::byte* const* plane, int s, std::ptrdiff_t vector_bytes,
                                     int n) {
        const std::byte* at[planes::count];
        for (int i = 0; i < planes::count; ++i)
            at[i] = plane[i] + s * (planes::quads_per_step / planes::quads_per_word(i)) * vector_bytes;
        return unpack_quad<Lanes, Bits, Quad, Partial>(at, vector_bytes, 0, n);
    }

    /// n parameters of one group, from a slot on; arrays hold a column block.
    KVQ_INLINE void load_parameters(int group, int slot, int n, float* scale, float* bias) const {
        const std::byte* const at = from_ + sections_.offset(group, slot);
        load_.template run<Lanes>(at, n, scale);
        if constexpr (Levels::has_bias) load_.template run<Lanes>(at + sections_.bytes, n, bias);
    }

    /// Calls f(part, column, values of its rows) for all columns of all parts; the columns of a part come in
    /// order.
    template <bool OnRows, class F>
    KVQ_INLINE void each_value(F&& f) const {
        if constexpr (OnRows)
            each_part([&](const part& p) KVQ_INLINE_LAMBDA { values_of_rows(p, f); });
        else
            for (int g = 0; g < codes_.rows().groups(); ++g) values_of_columns(g, f);
    }

    template <int K>
    static KVQ_INLINE ints code_of(ints words) {
        if constexpr (K == 3)
            return Lanes::template shift_right<24>(words);
        else
            return Lanes::bit_and(Lanes::template shift_right<8 * K>(words), Lanes::splat(255));
    }

    /// Parameters on rows: a part at a time.
    template <class F>
    KVQ_INLINE void values_of_rows(const part& p, F& f) const {
        const grouped_axis& cols = codes_.cols;
        float scale[column_block], bias[column_block];
        floats row_scale = Lanes::splat_float(0.0f), row_bias = row_scale;
        int group = -1;
        for (int first = 0; first < codes_.quads(); first += block_quads) {
            const int count = detail::smaller(block_quads, codes_.quads() - first);
            ints quads[block_quads];
            load_column_block(p, first, count, quads);
            for (int quad = 0; quad < count; ++quad) {
                const int col = 4 * (first + quad);
                const int now = cols.groups() == 1 ? 0 : col / cols.group;
                if (now != group) {
                    group = now;
                    load_parameters(group, p.slot, detail::smaller(p.slot_count, Lanes::width), scale, bias);
                    row_scale = Lanes::load_floats(scale);
                    if constexpr (Levels::has_bias) row_bias = Lanes::load_floats(bias);
                }
                const ints words = quads[quad];
                const auto put = [&](int k, ints code) KVQ_INLINE_LAMBDA {
                    if (col + k < cols.size) f(p, col + k, value(code, row_scale, row_bias));
                };
                put(0, code_of<0>(words));
                put(1, code_of<1>(words));
                put(2, code_of<2>(words));
                put(3, code_of<3>(words));
            }
        }
    }

    /// Parameters on columns: a few columns of all parts of a row group, so that tokens of V are written from
    /// end to end.
    template <class F>
    KVQ_INLINE void values_of_columns(int group, F& f) const {
        constexpr int step_columns = 4 * planes::quads_per_step;
        const int cols = codes_.cols.size, quads = codes_.quads();
        for (int first = 0; first < quads; first += block_quads) {
            alignas(64) float scale[column_block], bias[column_block];
            const int count = detail::smaller(block_quads, quads - first);
            load_parameters(group, 4 * first, 4 * count, scale, bias);
            for (int col = 4 * first; col < 4 * (first + count) && col < cols; col += step_columns) {
                values_of of[step_columns];
                KVQ_UNROLL
                for (int k = 0; k < step_columns; ++k)
                    if (col + k < cols)
                        of[k] = values_of(scale[col - 4 * first + k], bias + (col - 4 * first + k));
                each_part_of(group, [&](const part& p) KVQ_INLINE_LAMBDA {
                    if (col + step_columns <= cols && p.rows == Lanes::width)
                        step_of<true>(p, col, of, f);
                    else
                        step_of<false>(p, col, of, f);
                });
            }
        }
    }
    /// The columns of one step. Whole: all of them exist, and rows fill a vector.
    template <bool Whole, class F>
    KVQ_INLINE void step_of(part p, int col, const values_of* of, F& f) const {
        if (Whole) p.rows = Lanes::width;                     // a constant for f
        constexpr bool partial = !Whole && Lanes::width > 4;  // rows come in fours
        const std::byte* plane[planes::count];
        first_vectors(p, col / 4, plane);
        const int left = codes_.cols.size - col, rows = detail::smaller(p.slot_count, Lanes::width);
        const auto run = [&]<int... Q>(std::integer_sequence<int, Q...>) {
            const auto quad = [&]<int Quad>(std::integral_constant<int, Quad>) KVQ_INLINE_LAMBDA {
                if (!Whole && 4 * Quad >= left) return;
                const ints words = unpack_quad<Lanes, Bits, Quad, partial>(plane, p.height * 4, 0, rows);
                f(p, col + 4 * Quad, of[4 * Quad](code_of<0>(words)));
                if (Whole || 4 * Quad + 1 < left)
                    f(p, col + 4 * Quad + 1, of[4 * Quad + 1](code_of<1>(words)));
                if (Whole || 4 * Quad + 2 < left)
                    f(p, col + 4 * Quad + 2, of[4 * Quad + 2](code_of<2>(words)));
                if (Whole || 4 * Quad + 3 < left)
                    f(p, col + 4 * Quad + 3, of[4 * Quad + 3](code_of<3>(words)));
            };
            (quad(std::integral_constant<int, Q>{}), ...);
        };
        run(std::make_integer_sequence<int, planes::quads_per_step>{});
    }
    /// Finds each plane's vector of the step that begins at quad `first`.
    KVQ_INLINE void first_vectors(const part& p, int first, const std::byte** plane) const {
        const int in_tile = p.height - p.slot_count;
        const std::byte* const begin = from_ + 4 * (static_cast<std::size_t>(p.slot - in_tile) *
                                                        static_cast<std::size_t>(codes_.tiles.words_per_row) +
                                                    static_cast<std::size_t>(in_tile));
        for (int i = 0; i < planes::count; ++i)
            plane[i] = begin + (planes::first_vector(i, codes_.quads()) + first / planes::quads_per_word(i)) *
                                   p.height * 4;
    }

    /// A part of K: rows are tokens.
    template <bool OnRows, class T>
    KVQ_INLINE void turned_part(const part& p, const token_rows<Lanes, T>& out) const {
        const grouped_axis& cols = codes_.cols;
        float scale[column_block], bias[column_block];
        int group = -1;
        for (int first = 0; first < codes_.quads(); first += block_quads) {
            const int count = detail::smaller(block_quads, codes_.quads() - first);
            ints quads[block_quads];
            load_column_block(p, first, count, quads);
            for (int i = count; i < block_quads; ++i) quads[i] = Lanes::splat(0);
            alignas(64) std::byte turned[Lanes::width][column_block];
            KVQ_UNROLL
            for (int q = 0; q < block_quads; q += Lanes::width) {
                ints square[Lanes::width];
                KVQ_UNROLL
                for (int i = 0; i < Lanes::width; ++i) square[i] = quads[q + i];
                Lanes::transpose(square);
                KVQ_UNROLL
                for (int i = 0; i < Lanes::width; ++i) Lanes::store(turned[i] + 4 * q, square[i]);
            }
            const int size = detail::smaller(4 * count, cols.size - 4 * first);
            if (!OnRows) {
                load_parameters(p.group, 4 * first, 4 * count, scale, bias);
                if (size == column_block) {
                    scaled_rows(p, turned, scale, bias, first, out);
                    continue;
                }
            }
            for (int from = 0; from < size;) {
                int to = size;
                if (OnRows) {
                    const int now = cols.groups() == 1 ? 0 : (4 * first + from) / cols.group;
                    if (now != group) {
                        group = now;
                        load_parameters(group, p.slot, detail::smaller(p.slot_count, Lanes::width), scale,
                                        bias);
                    }
                    if (cols.groups() > 1) to = detail::smaller(size, (group + 1) * cols.group - 4 * first);
                }
                for (int r = 0; r < p.rows; ++r) {
                    const std::byte* const codes = turned[r];
                    T* const row = out.at(p.row + r, 4 * first);
                    const auto some = [&](auto&& of) KVQ_INLINE_LAMBDA {
                        if (to - from == column_block) {
                            KVQ_UNROLL
                            for (int c = 0; c < column_block; c += Lanes::width)
                                out.put(row + c, of(c, Lanes::load_bytes(codes + c)));
                        } else {
                            for (int c = from; c < to; c += Lanes::width)
                                out.put(row + c, of(c, Lanes::load_bytes(codes + c)),
                                        detail::smaller(Lanes::width, to - c));
                        }
                    };
                    if (OnRows)
                        some([of = values_of(scale[r], bias + r)](int, ints code)
                                 KVQ_INLINE_LAMBDA { return of(code); });
                    else
                        some([&](int c, ints code) KVQ_INLINE_LAMBDA {
                            return value(code, Lanes::load_floats(scale + c), Lanes::load_floats(bias + c));
                        });
                }
                from = to;
            }
        }
    }

    /// A whole column block with parameters on columns, which all rows share.
    template <class T>
    KVQ_INLINE void scaled_rows(const part& p, const std::byte (&turned)[Lanes::width][column_block],
                                const float* scale, const float* bias, int first,
                                const token_rows<Lanes, T>& out) const {
        constexpr int vectors = column_block / Lanes::width;
        floats scales[vectors], biases[vectors];
        KVQ_UNROLL
        for (int v = 0; v < vectors; ++v) {
            scales[v] = Lanes::load_floats(scale + v * Lanes::width);
            biases[v] = Levels::has_bias ? Lanes::load_floats(bias + v * Lanes::width) : scales[v];
        }
        for (int r = 0; r < p.rows; ++r) {
            T* const row = out.at(p.row + r, 4 * first);
            KVQ_UNROLL
            for (int v = 0; v < vectors; ++v) {
                const int c = v * Lanes::width;
                out.put(row + c, value(Lanes::load_bytes(turned[r] + c), scales[v], biases[v]));
            }
        }
    }

    const block_shape shape_;
    const code_layout<Bits> codes_;
    const parameter_sections sections_;
    const parameter_load load_;
    const std::byte* from_;
};

}}}  // namespace kvq::kernels
