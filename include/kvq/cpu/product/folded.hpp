// Folding: converts the operands of a product to 16-bit fixed point, high and low bytes, once per block, so
// that the product runs on codes. An operand is a query (K) or a row of weights (V).
//
//   x'  = col_scale * x                                        (only where columns carry parameters)
//   x' ~= step * (256 * high + low),  high, low signed bytes,  step = max|x'| / 32512
//
// With one byte (Backend::query_bytes == 1): x' ~= step * high, step = max|x'| / 126. The low word of a pair
// is then unused.
// If the instruction set multiplies 16-bit words as fast as bytes (Lanes::word_products; no VNNI), x' ~= step
// * word instead of high and low bytes: half of the products. The step grows if sums of words might not fit
// 32 bits (8-bit codes, more than 260 columns). A part has a step of its own: a column group, or 256 columns
// of a larger one.
// Contract: queries are rounded to nearest: |x' - step * (256 high + low)| <= step / 2, that is 2^-16 of the
// part's largest |x'|. Weights are within one step, and the sum over all columns of a part that share a lane
// is off by at most one step as well (sum_rounding), in either direction. So small weights beside a large one
// are not lost, and what a product with codes gets wrong is not the same for all pages. Row biases are
// multiplied with the sum of the rounded x', column biases with x.
// Layout for a set of operands (one set per row group if columns carry parameters, else one):
//   [query block][part][quad][query in block] two 32-bit words: high and low of four signed bytes each, or
//   16-bit words of columns 0 and 2 and of columns 1 and 3.
// For products of tiles (tile_product.hpp), in blocks of as many queries as fit a tile:
//   [query block][part][64 columns][query in block][high, low][64 signed bytes]
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "product_blocks.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Queries that share one pass over a block.
inline constexpr int query_block = 4;

/// Splits n queries into blocks of 4, 2 and 1.
constexpr int next_query_block(int remaining) noexcept { return remaining >= 4 ? 4 : remaining >= 2 ? 2 : 1; }
/// Calls f(std::integral_constant<int, queries>{}) for each block of next_query_block.
template <class F>
KVQ_INLINE void with_queries(int queries, F&& f) {
    if (queries == 4)
        f(std::integral_constant<int, 4>{});
    else if (queries == 2)
        f(std::integral_constant<int, 2>{});
    else
        f(std::integral_constant<int, 1>{});
}

/// Calls f(std::integral_constant<int, i>{}) for i below N: arrays that are indexed so stay in registers,
/// also across other loops.
template <int N, class F>
KVQ_INLINE void each(F&& f) {
    [&]<int... Index>(std::integer_sequence<int, Index...>) KVQ_INLINE_LAMBDA {
        (f(std::integral_constant<int, Index>{}), ...);
    }
    (std::make_integer_sequence<int, N>{});
}

/// Form of a value of a folded operand: a signed byte, two of them, or a signed 16-bit word.
enum class vector_form { byte, two_bytes, word };

template <class Backend>
inline constexpr vector_form byte_form =
    Backend::query_bytes == 1 ? vector_form::byte : vector_form::two_bytes;

template <class Lanes, class Backend>
inline constexpr vector_form form_of =
    Backend::query_bytes != 1 && Lanes::word_products ? vector_form::word : byte_form<Backend>;

/// Are sums of two products of 16-bit words one instruction?
template <class Lanes>
concept has_word_dots = requires(typename Lanes::ints a) {
    Lanes::dot_word_pairs(a, a, a);
};

/// Does the architecture multiply tiles?
template <class Lanes>
concept has_tiles = requires {
    typename Lanes::architecture::tiles;
};

inline constexpr int tile_columns = 64;  // bytes of a row of a tile
inline constexpr int tile_lines = 16;    // rows of a tile: bytes of operands, or rows of a block

/// Rows of a tile for each of n operands, if tiles multiply them; else 0. A product of tiles takes as long
/// for one row as for sixteen: up to eight, registers are faster.
template <class Lanes, class Backend>
int query_bytes_in_tiles(int n) {
    if constexpr (has_tiles<Lanes>) {
        const int lines = n * Backend::query_bytes;
        if (lines > 8 && Lanes::architecture::tiles::ready()) return Backend::query_bytes;
    }
    return 0;
}

/// Scalars of an operand besides its bytes, per (set, part, query).
struct fold_scalars {
    float step;
    float sum;       // of the rounded x'
    float bias_dot;  // of x with col_bias, less zero times `sum`
};

/// Offsets of the parts of a folded set of `n` operands in memory: [scratch][scalars][words]; see above.
/// Sizes are stored, because kernels read them at every block.
struct fold_layout {
    /// Bytes beyond the last word that stores of whole vectors may write, and loads of whole tiles read.
    static constexpr std::size_t overrun = 256, tile_overrun = tile_columns * tile_lines;
    /// Rows of float scratch of folding: scales and biases of a set, and the operands of a query block.
    constexpr int scratch_rows() const noexcept { return 2 * held_sets() + query_block; }

    /// Columns that share a step at most: of a larger group, light columns would be a few steps each beside
    /// the largest one, and sums of words of 8-bit codes would need larger steps.
    static constexpr int part_columns = 256;

    grouped_axis cols;
    int step_shift;      ///< a step of codes has 1 << step_shift columns; divisions would show in decode
    grouped_axis parts;  ///< columns that share a step: those of a group, or 256 of them
    int group_parts;     ///< parts of a whole group
    int sets;
    int n;
    int tile_query_bytes;        ///< query_bytes_in_tiles
    int set_words;               ///< per query of one set
    std::size_t scratch_floats;  ///< one padded row
    std::size_t scalars_offset, words_offset, bytes;

    /// cut: groups may have several parts.
    template <int Bits>
    constexpr fold_layout(const code_layout<Bits>& codes, bool per_row_group, int queries,
                          int query_bytes_of_tiles, bool cut = true) noexcept
        : cols(codes.cols),
          step_shift(std::countr_zero(4u * code_planes<Bits>::quads_per_step)),
          parts(cut ? cut_groups(cols) : cols),
          group_parts(detail::ceil_div(cols.group, parts.group)),
          sets(per_row_group ? codes.rows().groups() : 1),
          n(queries),
          tile_query_bytes(query_bytes_of_tiles) {
        int steps = 0, blocks = 0;
        for (int p = 0; p < parts.groups(); ++p) {
            steps += last_step(p) - first_step(p);
            blocks += tile_blocks(p);
        }
        set_words =
            tile_query_bytes > 0 ? tile_query_bytes * blocks * tile_columns / 4 : (steps << step_shift) / 2;
        // A step has up to 8 quads, and vectors run beyond the last one.
        scratch_floats = detail::round_up(static_cast<std::size_t>(cols.padded_size()), std::size_t{16}) +
                         32 + (tile_query_bytes > 0 ? tile_columns : 0);
        const std::size_t each = static_cast<std::size_t>(sets) * static_cast<std::size_t>(n);
        scalars_offset = static_cast<std::size_t>(scratch_rows()) * scratch_floats * sizeof(float);
        words_offset = scalars_offset + detail::round_up(each * static_cast<std::size_t>(parts.groups()) *
                                                             sizeof(fold_scalars),
                                                         std::size_t{64});
        bytes = words_offset + detail::round_up(each * static_cast<std::size_t>(set_words) * 4 +
                                                    (tile_query_bytes > 0 ? tile_overrun : overrun),
                                                std::size_t{64});
    }

    /// Parts without gaps between them: of one group, or of groups that they fill.
    static constexpr grouped_axis cut_groups(const grouped_axis& axis) noexcept {
        const bool fills = axis.groups() == 1 || axis.group % part_columns == 0;
        return axis.group > part_columns && fills ? grouped_axis(axis.size, part_columns) : axis;
    }

    // Groups are rarely cut, and divisions take longer than branches.
    constexpr int group_of(int part) const noexcept { return group_parts == 1 ? part : part / group_parts; }
    constexpr int first_step(int part) const noexcept { return parts.group_begin(part) >> step_shift; }
    constexpr int last_step(int part) const noexcept {
        return ((parts.group_begin(part) + parts.group_slots(part) - 1) >> step_shift) + 1;
    }

    /// Number of tiles, one after the other, that hold the columns of the part's steps.
    constexpr int tile_blocks(int part) const noexcept {
        return detail::ceil_div((last_step(part) - first_step(part)) << step_shift, tile_columns);
    }
    /// Operands that share a tile.
    constexpr int tile_queries() const noexcept { return tile_lines / tile_query_bytes; }
    /// Steps of 64 columns of a tile of rows, over all parts.
    constexpr int tile_steps() const noexcept { return set_words * 4 / (tile_query_bytes * tile_columns); }

    /// More operands than registers of tiles have sums for?
    constexpr bool several() const noexcept { return n * tile_query_bytes > 2 * tile_lines; }
    /// Sets whose parameters are in the scratch at a time.
    constexpr int held_sets() const noexcept { return several() ? sets : 1; }

    float* scratch(std::byte* memory) const noexcept { return reinterpret_cast<float*>(memory); }
    /// Of the columns of a set; biases follow in the next row.
    float* scales(std::byte* memory, int set) const noexcept {
        return scratch(memory) + 2 * static_cast<std::size_t>(several() ? set : 0) * scratch_floats;
    }
    fold_scalars* scalars(std::byte* memory) const noexcept {
        return reinterpret_cast<fold_scalars*>(memory + scalars_offset);
    }
    std::uint32_t* words(std::byte* memory) const noexcept {
        return reinterpret_cast<std::uint32_t*>(memory + words_offset);
    }
};

/// max(a, |b|) for a >= 0.
template <class Lanes>
KVQ_INLINE typename Lanes::floats larger_magnitude(typename Lanes::floats a, typename Lanes::floats b) {
    if constexpr (requires { Lanes::larger_magnitude(a, b); })
        return Lanes::larger_magnitude(a, b);
    else
        return Lanes::larger(a, Lanes::abs(b));
}

/// Where the sums of a vector's lanes begin: evenly between -1/2 and 1/2, so that equal lanes do not round
/// together. Neighbours are opposite, so that parts which do not fill a vector are rounded up as often as
/// down.
template <class Lanes>
KVQ_INLINE typename Lanes::floats lane_phases() {
    alignas(64) static constexpr auto phases = [] {
        std::array<float, Lanes::width> a{};
        for (std::size_t i = 0; i < Lanes::width; ++i)
            a[i] = static_cast<float>(i - i % 2 + 1) / static_cast<float>(2 * Lanes::width) *
                   (i % 2 == 0 ? 1.0f : -1.0f);
        return a;
    }();
    return Lanes::load_floats(phases.data());
}

/// Rounds the columns of an operand, one vector of them after the other, to integers of which every lane has
/// the rounded sum:
///
///   S[c] = S[c - width] + x'[c] / step,   f[c] = round(S[c]) - round(S[c - width])
///
/// So |f - x'/step| <= 1, zero stays zero, and the integers of a lane have the sum of x'/step to within one.
/// (Rounded one by one, columns below half a step would all be lost.)
template <class Lanes>
struct sum_rounding {
    typename Lanes::floats sum;
    typename Lanes::ints rounded;

    KVQ_INLINE void begin() {
        sum = lane_phases<Lanes>();
        rounded = Lanes::splat(0);
    }
    KVQ_INLINE typename Lanes::ints next(typename Lanes::floats x, typename Lanes::floats inverse) {
        sum = Lanes::multiply_add(x, inverse, sum);
        const auto before = rounded;
        rounded = Lanes::round(sum);
        return Lanes::subtract(rounded, before);
    }
};

/// Rounds every column to the nearest integer. Columns of queries have either sign, so that what rounding
/// drops does not add up, and their sums need no addition that waits for the last one.
template <class Lanes, bool Sum>
struct nearest_rounding {
    typename Lanes::ints rounded;  ///< sum of the integers of every lane, if Sum

    KVQ_INLINE void begin() { rounded = Lanes::splat(0); }
    KVQ_INLINE typename Lanes::ints next(typename Lanes::floats x, typename Lanes::floats inverse) {
        const auto fixed = Lanes::round(Lanes::multiply(x, inverse));
        if constexpr (Sum) rounded = Lanes::add(rounded, fixed);
        return fixed;
    }
};

/// The first n floats of a vector, or all of them; none if n is not positive.
template <class Lanes>
KVQ_INLINE typename Lanes::floats load_rows(const float* from, int n) {
    if (n >= Lanes::width) return Lanes::load_floats(from);
    return Lanes::load_floats(from, detail::larger(n, 0));
}

/// One part of `Queries` operands, which share their loads of the parameters. Tiles: bytes are written in the
/// layout of tiles. Widths of codes are no template parameter: code is the same for all.
template <vector_form Form, bool Tiles, class Lanes>
struct part_fold {
    fold_use use;
    bool sums;           ///< sum_rounding; else nearest_rounding
    const float* scale;  ///< of the part's columns, where use.col_scale
    const float* bias;   ///< of the part's columns, where use.col_bias
    float* scratch;      ///< query_block rows, scratch_stride apart
    std::ptrdiff_t scratch_stride;
    int before, size, after;  ///< columns of other parts; of the part; to the end of its last step
    /// words from one quad of an operand's bytes to the next, or from one 64 columns to the next
    int stride;
    float top_code;   ///< largest code that the operand is multiplied with
    float zero_code;  ///< what is subtracted from every code
    float unit;       ///< what a code counts

    /// Words from one operand to the next.
    static constexpr int vector_words = !Tiles                      ? 2
                                        : Form == vector_form::byte ? tile_columns / 4
                                                                    : tile_columns / 2;

    /// x: the part's first columns, operands x_stride apart. Operand i starts at out + vector_words * i,
    /// scalars at s + i.
    template <int Queries>
    void run(const float* x, std::ptrdiff_t x_stride, std::uint32_t* out, fold_scalars* s) const {
        // A local copy that no store can alias: otherwise every loop would read its pointers and counts
        // again.
        part_fold(*this).template run_own<Queries>(x, x_stride, out, s);
    }

private:
    template <int Queries>
    KVQ_INLINE void run_own(const float* x, std::ptrdiff_t x_stride, std::uint32_t* out,
                            fold_scalars* s) const {
        float inverse[Queries];
        // Tested once: branches between the columns would cost 5 % of attention.
        const bool whole = size % Lanes::width == 0;
        if (whole && use.col_scale && use.col_bias && !use.row_bias)
            scale_columns<Queries, true, true, true>(x, x_stride, s, inverse);
        else if (whole && use.col_scale && !use.col_bias)
            scale_columns<Queries, true, true, false>(x, x_stride, s, inverse);
        else if (whole && !use.columns())
            scale_columns<Queries, true, false, false>(x, x_stride, s, inverse);
        else
            scale_columns<Queries, false, true, true>(x, x_stride, s, inverse);
        if (sums)
            write<Queries, sum_rounding<Lanes>>(out, inverse, s);
        else if (!Tiles || needs_sums())
            write<Queries, nearest_rounding<Lanes, true>>(out, inverse, s);
        else if constexpr (Tiles)
            write<Queries, nearest_rounding<Lanes, false>>(out, inverse, s);
    }
    template <int Queries, class Rounding>
    KVQ_INLINE void write(std::uint32_t* out, const float* inverse, fold_scalars* s) const {
        if constexpr (Tiles)
            write_rows<Queries, Rounding>(out, inverse, s);
        else
            write_query_bytes<Queries, Rounding>(out, inverse, s);
    }

    using floats = typename Lanes::floats;
    using ints = typename Lanes::ints;

    /// x' with zeros around it, and the scale to fixed point. Whole: all vectors are full, Scale and Bias
    /// equal `use`.
    template <int Queries, bool Whole, bool Scale, bool Bias>
    KVQ_INLINE void scale_columns(const float* x, std::ptrdiff_t x_stride, fold_scalars* s,
                                  float* inverse) const {
        const bool scales = Scale && (Whole || use.col_scale), biases = Bias && (Whole || use.col_bias);
        const auto load = [&](const float* from, int c) {
            if constexpr (Whole)
                return Lanes::load_floats(from + c);
            else
                return load_rows<Lanes>(from + c, size - c);
        };
        if (before + after > 0 || !Whole)
            for (int i = 0; i < Queries; ++i) clear_around(scratch + i * scratch_stride);
        floats largest[Queries], dot[Queries];
        KVQ_UNROLL
        for (int i = 0; i < Queries; ++i) largest[i] = dot[i] = Lanes::splat_float(0.0f);
        for (int c = 0; c < size; c += Lanes::width) {
            floats b = Lanes::splat_float(0.0f), f = b;
            if (biases) b = load(bias, c);
            if (scales) f = load(scale, c);
            KVQ_UNROLL
            for (int i = 0; i < Queries; ++i) {
                auto v = load(x + i * x_stride, c);
                if (biases) dot[i] = Lanes::multiply_add(v, b, dot[i]);
                if (scales) v = Lanes::multiply(v, f);
                Lanes::store_floats(scratch + i * scratch_stride + before + c, v);
                largest[i] = larger_magnitude<Lanes>(largest[i], v);
            }
        }
        // A rounded column may be one more than its range.
        float range = Form == vector_form::byte ? 126.0f : 32512.0f;
        if constexpr (Form == vector_form::word)
            range = detail::smaller(range, 0x1.fffffp30f / (top_code * static_cast<float>(size)) - 1.0f);
        // One kind of operation after the other, without branches: the sums of all operands overlap.
        float top[Queries];
        KVQ_UNROLL
        for (int i = 0; i < Queries; ++i) {
            top[i] = Lanes::largest(largest[i]);
            s[i].bias_dot = Lanes::sum(dot[i]);
            s[i].sum = 0.0f;
        }
        KVQ_UNROLL
        for (int i = 0; i < Queries; ++i) {
            // Operands this small count as zero.
            const bool some = top[i] > 1e-33f;
            inverse[i] = some ? range / top[i] : 0.0f;
            s[i].step = some ? top[i] / range : 0.0f;
        }
    }

    /// Writes zeros around x', for columns of other parts in a step of codes.
    KVQ_INLINE void clear_around(float* row) const {
        for (int c = 0; c < before; ++c) row[c] = 0.0f;
        for (int c = before + size; c < detail::round_up(before + size + after, Lanes::width); ++c)
            row[c] = 0.0f;
    }

    template <int Queries, class Rounding>
    KVQ_INLINE void write_query_bytes(std::uint32_t* out, const float* inverse, fold_scalars* s) const {
        Rounding rounding[Queries];
        each<Queries>([&](auto i) KVQ_INLINE_LAMBDA { rounding[i].begin(); });
        for (int c = 0; c < before + size + after; c += Lanes::width) {
            ints fixed[Queries], high[Queries];
            each<Queries>([&](auto i) KVQ_INLINE_LAMBDA {
                fixed[i] = rounding[i].next(Lanes::load_floats(scratch + i * scratch_stride + c),
                                            Lanes::splat_float(inverse[i]));
                high[i] = fixed[i];
                if constexpr (Form == vector_form::two_bytes && !packs<Queries>)
                    high[i] = Lanes::template shift_right_signed<8>(Lanes::add(fixed[i], Lanes::splat(128)));
            });
            if constexpr (packs<Queries>) {
                if constexpr (Form == vector_form::byte)
                    for (int i = 0; i < Queries; ++i) fixed[i] = Lanes::template shift_left<8>(fixed[i]);
                Lanes::store_high_low_of_four(out, fixed);
            } else {
                KVQ_UNROLL
                for (int i = 0; i < Queries; ++i) {
                    if constexpr (Form == vector_form::word)
                        Lanes::store_word_pairs(out + 2 * i, stride, fixed[i]);
                    else
                        Lanes::store_high_low(out + 2 * i, stride, high[i], fixed[i]);
                }
            }
            out += Lanes::width / 4 * stride;
        }
        write_sums<Queries>(rounding, s);
    }

    bool needs_sums() const { return use.row_bias || zero_code != 0.0f; }
    /// The sums beside the codes, of the same integers that the codes are multiplied with.
    template <int Queries, class Rounding>
    KVQ_INLINE void write_sums(const Rounding* rounding, fold_scalars* s) const {
        if (needs_sums())
            each<Queries>([&](auto i) KVQ_INLINE_LAMBDA {
                s[i].sum = s[i].step * Lanes::sum(Lanes::to_floats(rounding[i].rounded));
                s[i].bias_dot -= zero_code * unit * s[i].sum;
            });
        if (unit != 1.0f)
            for (int i = 0; i < Queries; ++i) s[i].step *= unit;
    }

    /// Rows of tiles: 64 columns of one operand at a time.
    template <int Queries, class Rounding>
    KVQ_INLINE void write_rows(std::uint32_t* out, const float* inverse, fold_scalars* s) const {
        constexpr int vectors = tile_columns / Lanes::width;
        for (int i = 0; i < Queries; ++i) {
            const float* const row = scratch + i * scratch_stride;
            std::uint32_t* to = out + i * vector_words;
            const floats factor = Lanes::splat_float(inverse[i]);
            Rounding rounding;
            rounding.begin();
            for (int c = 0; c < before + size + after; c += tile_columns, to += stride) {
                ints fixed[vectors];
                KVQ_UNROLL
                for (int v = 0; v < vectors; ++v)
                    fixed[v] = rounding.next(Lanes::load_floats(row + c + v * Lanes::width), factor);
                store_row(reinterpret_cast<std::byte*>(to), fixed);
            }
            write_sums<1>(&rounding, s + i);
        }
    }

    static KVQ_INLINE ints high_byte(ints fixed) {
        if constexpr (Form == vector_form::two_bytes)
            return Lanes::template shift_right_signed<8>(Lanes::add(fixed, Lanes::splat(128)));
        else
            return fixed;
    }

    /// 64 values: their high bytes, then, for two bytes, their low bytes.
    static KVQ_INLINE void store_row(std::byte* to, const ints* fixed) {
        if constexpr (requires { Lanes::store_high_low_rows(to, to, fixed); }) {
            if constexpr (Form == vector_form::two_bytes) {
                Lanes::store_high_low_rows(to, to + tile_columns, fixed);
            } else {
                alignas(64) std::byte zeros[tile_columns];
                ints high[tile_columns / Lanes::width];
                KVQ_UNROLL
                for (int v = 0; v < tile_columns / Lanes::width; ++v)
                    high[v] = Lanes::template shift_left<8>(fixed[v]);
                Lanes::store_high_low_rows(to, zeros, high);
            }
        } else {
            for (int v = 0; v < tile_columns / Lanes::width; ++v) {
                std::uint32_t pairs[Lanes::width / 2];
                Lanes::store_high_low(pairs, 2, high_byte(fixed[v]), fixed[v]);
                for (int quad = 0; quad < Lanes::width / 4; ++quad) {
                    std::byte* const at = to + v * Lanes::width + 4 * quad;
                    std::memcpy(at, &pairs[2 * quad], 4);
                    if constexpr (Form == vector_form::two_bytes)
                        std::memcpy(at + tile_columns, &pairs[2 * quad + 1], 4);
                }
            }
        }
    }

    /// Are the bytes of this many operands stored together?
    template <int Queries>
    static constexpr bool packs = Form != vector_form::word&& Queries ==
                                  query_block&& requires(std::uint32_t* out, const ints* a) {
        Lanes::store_high_low_of_four(out, a);
    };
};

/// Folds operands [from, from + count) of layout.n, x[i] (cols floats each, x_stride apart), for the rows of
/// one set of parameters, which load_columns has written. In tiles, `from` is the first operand of one.
template <class Lanes, vector_form Form, bool Tiles>
void fold_operands(const code_meaning& meaning, const fold_layout& layout, int set, int from, int count,
                   const float* x, std::ptrdiff_t x_stride, std::byte* memory) {
    using part_type = part_fold<Form, Tiles, Lanes>;
    const int n = layout.n;
    const int step = 1 << layout.step_shift;
    const grouped_axis& cols = layout.cols;
    const auto row_floats = static_cast<std::ptrdiff_t>(layout.scratch_floats);
    const float* const scale = layout.scales(memory, set);
    const float* const bias = scale + row_floats;
    float* const scratch = layout.scratch(memory) + 2 * layout.held_sets() * row_floats;
    const bool dense = cols.groups() == 1 || cols.group % 4 == 0;
    std::uint32_t* const words =
        layout.words(memory) + static_cast<std::ptrdiff_t>(set) * layout.set_words * n;

    for (int first = from; first < from + count;) {
        const int block_n = next_query_block(from + count - first);
        // Operands of a tile lie side by side, also those of the next query block.
        int beside = block_n, in_tile = 0;
        if constexpr (Tiles) {
            in_tile = first % layout.tile_queries();
            beside = detail::smaller(layout.tile_queries(), n - (first - in_tile));
        }
        std::uint32_t* out = words + (first - in_tile) * layout.set_words + in_tile * part_type::vector_words;
        for (int p = 0; p < layout.parts.groups(); ++p) {
            const int begin = layout.parts.group_begin(p), size = layout.parts.group_size(p);
            const int at = step * layout.first_step(p);
            const int to = Tiles ? at + tile_columns * layout.tile_blocks(p) : step * layout.last_step(p);
            const part_type part{meaning.use,       meaning.weights,
                                 scale + begin,     bias + begin,
                                 scratch,           row_floats,
                                 begin - at,        size,
                                 to - begin - size, part_type::vector_words * beside,
                                 meaning.top_code,  meaning.zero_code,
                                 meaning.unit};
            const float* const operands = x + first * x_stride + (dense ? begin : p * cols.group);
            fold_scalars* const s = layout.scalars(memory) + (set * layout.parts.groups() + p) * n + first;
            if (block_n == query_block)
                part.template run<query_block>(operands, x_stride, out, s);
            else
                for (int i = 0; i < block_n; ++i)
                    part.template run<1>(operands + i * x_stride, x_stride, out + i * part_type::vector_words,
                                         s + i);
            out += (to - at) / (Tiles ? tile_columns : 4) * part.stride;
        }
        first += block_n;
    }
}

/// The parameters of the columns of a set, to the scratch.
inline void load_columns(const fold_layout& layout, const parameter_source& source, int set,
                         std::byte* memory) {
    float* const scale = layout.scales(memory, set);
    source.columns(source, set, scale, scale + layout.scratch_floats);
}

/// Folds all operands for products with the block of `source`.
template <class Lanes, vector_form Form, bool Tiles>
void fold_as(const code_meaning& meaning, const fold_layout& layout, const parameter_source& source,
             const float* x, std::ptrdiff_t x_stride, std::byte* memory) {
    for (int set = 0; set < layout.sets; ++set) {
        if (meaning.use.columns()) load_columns(layout, source, set, memory);
        fold_operands<Lanes, Form, Tiles>(meaning, layout, set, 0, layout.n, x, x_stride, memory);
    }
}

template <class Lanes, class Backend>
void fold(const code_meaning& meaning, const fold_layout& layout, const parameter_source& source,
          const float* x, std::ptrdiff_t x_stride, std::byte* memory) {
    if constexpr (has_tiles<Lanes>)
        if (layout.tile_query_bytes > 0)
            return fold_as<Lanes, byte_form<Backend>, true>(meaning, layout, source, x, x_stride, memory);
    fold_as<Lanes, form_of<Lanes, Backend>, false>(meaning, layout, source, x, x_stride, memory);
}

}}}  // namespace kvq::kernels
