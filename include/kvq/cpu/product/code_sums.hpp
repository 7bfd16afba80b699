// Integer sums of codes with fixed-point operands in registers, and their conversion to floats: used by
// code_product.hpp.
//
// A value of an operand is two bytes or a 16-bit word (16 bits, the default), or one byte (half of the
// products): form_of.
// Contract: integer sums are exact (255 * 128 * columns stays below 2^31 up to 65 000 columns; words are
// scaled so that their sums fit); per part of the columns (fold_layout) there is one float rounding of each
// term. Every word of the block is loaded once per query block of up to 4 operands.
#pragma once

#include <utility>

#include "folded.hpp"
#include "unpack_codes.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// What a product multiplies in place of codes: the codes themselves.
template <class Lanes>
struct plain_codes {
    explicit plain_codes(const std::uint8_t*) {}
    template <int Bits>
    static constexpr int bits = Bits == two_planes ? 8 : Bits;
    KVQ_INLINE typename Lanes::ints operator()(typename Lanes::ints codes) const { return codes; }
};
/// The entries of a table of 16 that codes of 4 bits stand for; entries have 7 bits (code_entries in
/// schemes/concepts.hpp).
template <class Lanes>
struct table_codes {
    typename Lanes::ints table;

    explicit table_codes(const std::uint8_t* entries) : table(Lanes::sixteen_bytes(entries)) {}
    template <int Bits>
    static constexpr int bits = 7;
    KVQ_INLINE typename Lanes::ints operator()(typename Lanes::ints codes) const {
        return Lanes::lookup_bytes(table, codes);
    }
};

template <class Lanes, bool Table>
using codes_meant = std::conditional_t<Table, table_codes<Lanes>, plain_codes<Lanes>>;

/// Integer sums of `Vectors` row vectors with `Queries` operands.
template <class Lanes, int Vectors, int Queries>
struct code_sums {
    typename Lanes::ints high[Queries][Vectors];
    typename Lanes::ints low[Queries][Vectors];
};

template <vector_form Form, class Lanes, int Bits, int Raise, int Vectors, int Queries, bool Partial,
          int Quad, class Codes>
KVQ_INLINE void add_quad(code_sums<Lanes, Vectors, Queries>& sums, const std::byte* const* planes,
                         std::ptrdiff_t vector_bytes, const std::uint32_t* x, int n, const Codes& meant) {
    typename Lanes::ints codes[Vectors];
    KVQ_UNROLL
    for (int v = 0; v < Vectors; ++v)
        codes[v] = meant(
            unpack_quad<Lanes, Bits, Quad, Partial, Raise>(planes, vector_bytes, v * Lanes::width * 4, n));
    if constexpr (Form == vector_form::word) {
        typename Lanes::ints even[Vectors], odd[Vectors];
        KVQ_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            even[v] = Lanes::even_bytes(codes[v]);
            odd[v] = Lanes::odd_bytes(codes[v]);
        }
        KVQ_UNROLL
        for (int i = 0; i < Queries; ++i) {
            const auto of_even = Lanes::splat(static_cast<std::int32_t>(x[(Quad * Queries + i) * 2]));
            const auto of_odd = Lanes::splat(static_cast<std::int32_t>(x[(Quad * Queries + i) * 2 + 1]));
            KVQ_UNROLL
            for (int v = 0; v < Vectors; ++v)
                sums.high[i][v] =
                    Lanes::dot_words(Lanes::dot_words(sums.high[i][v], even[v], of_even), odd[v], of_odd);
        }
    } else {
        KVQ_UNROLL
        for (int i = 0; i < Queries; ++i) {
            const auto h = Lanes::splat(static_cast<std::int32_t>(x[(Quad * Queries + i) * 2]));
            [[maybe_unused]] const auto l =
                Lanes::splat(static_cast<std::int32_t>(x[(Quad * Queries + i) * 2 + 1]));
            KVQ_UNROLL
            for (int v = 0; v < Vectors; ++v) {
                sums.high[i][v] =
                    Lanes::template dot<Codes::template bits<Bits> + Raise>(sums.high[i][v], codes[v], h);
                if constexpr (Form == vector_form::two_bytes)
                    sums.low[i][v] =
                        Lanes::template dot<Codes::template bits<Bits> + Raise>(sums.low[i][v], codes[v], l);
            }
        }
    }
}

template <vector_form Form, class Lanes, int Bits, int Raise, int Vectors, int Queries, bool Partial,
          class Codes, int... Quads>
KVQ_INLINE void add_quads(code_sums<Lanes, Vectors, Queries>& sums, const std::byte* const* planes,
                          std::ptrdiff_t vector_bytes, int count, const std::uint32_t* x, int n,
                          const Codes& meant, std::integer_sequence<int, Quads...>) {
    ((Quads < count ? add_quad<Form, Lanes, Bits, Raise, Vectors, Queries, Partial, Quads>(
                          sums, planes, vector_bytes, x, n, meant)
                    : void()),
     ...);
}

/// The part of a block that one call works on: some rows of a tile, the columns
/// of one group.
struct code_part {
    const std::byte* const* planes;  ///< each plane's first vector, at the first of the rows
    std::ptrdiff_t vector_bytes;
    std::ptrdiff_t ahead;        ///< distance to the bytes to prefetch, of the upper plane of two_planes
    std::ptrdiff_t lower_ahead;  ///< the same of the lower plane
    int steps;
    int quads;       ///< from the first step to the end of the row: a step that reaches
                     ///< beyond is cut short
    int slot_count;  ///< rows that may be loaded into one vector
    const std::uint32_t* x;
    const std::uint8_t* entries = nullptr;  ///< of table_codes
};

/// Prefetches the vectors of the same step of the next block, into L2, because L1 has few outstanding misses.
template <class Lanes, int Bits, int Vectors, int Plane = 0>
KVQ_INLINE void fetch_ahead(const std::byte* const* planes, std::ptrdiff_t vector_bytes, std::ptrdiff_t ahead,
                            std::ptrdiff_t lower_ahead) {
    using P = code_planes<Bits>;
    const std::byte* const from = planes[Plane] + (Bits == two_planes && Plane == 1 ? lower_ahead : ahead);
    for (int v = 0; v < P::quads_per_step / P::quads_per_word(Plane); ++v)
        for (int line = 0; line < Vectors * Lanes::width * 4; line += 64)
            detail::prefetch(from + v * vector_bytes + line);
    if constexpr (Plane + 1 < P::count)
        fetch_ahead<Lanes, Bits, Vectors, Plane + 1>(planes, vector_bytes, ahead, lower_ahead);
}

template <class Lanes, int Vectors, int Queries>
KVQ_INLINE void clear(code_sums<Lanes, Vectors, Queries>& sums) {
    KVQ_UNROLL
    for (int i = 0; i < Queries; ++i) {
        KVQ_UNROLL
        for (int v = 0; v < Vectors; ++v) sums.high[i][v] = sums.low[i][v] = Lanes::splat(0);
    }
}

/// Adds the sums of the part, times 2^Raise, to `sums`. Codes: plain_codes or table_codes.
template <vector_form Form, class Lanes, int Bits, int Raise, int Vectors, int Queries, bool Partial,
          class Codes = plain_codes<Lanes>>
KVQ_INLINE void sum_codes(const code_part& part, code_sums<Lanes, Vectors, Queries>& sums) {
    using P = code_planes<Bits>;
    using all = std::make_integer_sequence<int, P::quads_per_step>;
    const std::byte* planes[P::count];
    for (int p = 0; p < P::count; ++p) planes[p] = part.planes[p];
    const std::uint32_t* x = part.x;
    const Codes meant(part.entries);
    const int whole = detail::smaller(part.steps, part.quads / P::quads_per_step);
    for (int s = 0; s < whole; ++s) {
        fetch_ahead<Lanes, Bits, Vectors>(planes, part.vector_bytes, part.ahead, part.lower_ahead);
        add_quads<Form, Lanes, Bits, Raise, Vectors, Queries, Partial>(
            sums, planes, part.vector_bytes, P::quads_per_step, x, part.slot_count, meant, all{});
        for (int p = 0; p < P::count; ++p)
            planes[p] += (P::quads_per_step / P::quads_per_word(p)) * part.vector_bytes;
        x += P::quads_per_step * Queries * 2;
    }
    if (whole < part.steps)
        add_quads<Form, Lanes, Bits, Raise, Vectors, Queries, Partial>(sums, planes, part.vector_bytes,
                                                                       part.quads % P::quads_per_step, x,
                                                                       part.slot_count, meant, all{});
}

/// Output of the sums of a part, and the parameters that turn them into floats.
struct code_target {
    float* y;
    std::ptrdiff_t y_stride;
    int rows;
    const float* row_scale;  ///< null: 1
    const float* row_bias;   ///< null: 0
    const fold_scalars* scalars;
    bool add;  ///< add to y instead of overwriting it
};

/// Integer sums as floats, with the parameters of `Vectors` row vectors applied, which are the same for all
/// operands: they are read once. Whole: all vectors are full, and Scale and Bias match the target.
template <vector_form Form, class Lanes, bool Whole, bool Scale, bool Bias, int Vectors>
class row_finish {
public:
    KVQ_INLINE explicit row_finish(const code_target& to)
        : y_(to.y),
          y_stride_(to.y_stride),
          rows_(to.rows),
          scalars_(to.scalars),
          add_(to.add),
          has_scale_(Scale && (Whole || to.row_scale)),
          has_bias_(Bias && (Whole || to.row_bias)) {
        KVQ_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            scale_[v] = Lanes::splat_float(1.0f);
            bias_[v] = Lanes::splat_float(0.0f);
            if (has_scale_) scale_[v] = load_rows<Lanes>(to.row_scale + v * Lanes::width, left(v));
            if (has_bias_) bias_[v] = load_rows<Lanes>(to.row_bias + v * Lanes::width, left(v));
        }
    }
    /// The sums of operand i.
    KVQ_INLINE void write(int i, const typename Lanes::ints* high, const typename Lanes::ints* low) const {
        const fold_scalars& s = scalars_[i];
        float* const out = y_ + i * y_stride_;
        KVQ_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            auto y = Lanes::to_floats(high[v]);
            if constexpr (Form == vector_form::two_bytes)
                y = Lanes::multiply_add(y, Lanes::splat_float(256.0f), Lanes::to_floats(low[v]));
            y = Lanes::multiply_add(y, Lanes::splat_float(s.step), Lanes::splat_float(s.bias_dot));
            // Rounded: otherwise the compiler would choose, kernel by kernel, which of the two products to
            // fuse with the sum.
            if (has_scale_) y = Lanes::rounded_product(y, scale_[v]);
            if (has_bias_) y = Lanes::multiply_add(bias_[v], Lanes::splat_float(s.sum), y);
            if (add_) y = Lanes::add(y, load_rows<Lanes>(out + v * Lanes::width, left(v)));
            if (Whole || left(v) >= Lanes::width)
                Lanes::store_floats(out + v * Lanes::width, y);
            else if (left(v) > 0)
                Lanes::store_floats(out + v * Lanes::width, y, left(v));
        }
    }

private:
    KVQ_INLINE int left(int v) const {
        return Whole ? Lanes::width : detail::smaller(rows_ - v * Lanes::width, Lanes::width);
    }

    // Fields that no store can alias: a wide copy of a target that narrow stores have just written would
    // stall.
    float* y_;
    std::ptrdiff_t y_stride_;
    int rows_;
    const fold_scalars* scalars_;
    bool add_, has_scale_, has_bias_;
    typename Lanes::floats scale_[Vectors], bias_[Vectors];
};

template <vector_form Form, class Lanes, bool Whole, bool Scale, bool Bias, int Vectors, int Queries>
KVQ_INLINE void finish_rows(const code_sums<Lanes, Vectors, Queries>& sums, const code_target& to) {
    const row_finish<Form, Lanes, Whole, Scale, Bias, Vectors> rows(to);
    KVQ_UNROLL
    for (int i = 0; i < Queries; ++i) rows.write(i, sums.high[i], sums.low[i]);
}

/// finish_rows for the parameters of the target. They are tested once, since branches for every vector cost 3
/// % of attention.
template <vector_form Form, class Lanes, int Vectors, int Queries>
KVQ_INLINE void finish_sums(const code_sums<Lanes, Vectors, Queries>& sums, const code_target& to) {
    const bool whole = to.rows >= Vectors * Lanes::width;
    if (whole && !to.row_scale && !to.row_bias)
        finish_rows<Form, Lanes, true, false, false>(sums, to);
    else if (whole && to.row_scale && to.row_bias)
        finish_rows<Form, Lanes, true, true, true>(sums, to);
    else
        finish_rows<Form, Lanes, false, true, true>(sums, to);
}

template <vector_form Form, class Lanes, int Bits, int Vectors, int Queries, bool Partial, class Codes>
void multiply_part(const code_part& part, const code_target& to) {
    code_sums<Lanes, Vectors, Queries> sums;
    clear(sums);
    sum_codes<Form, Lanes, Bits, 0, Vectors, Queries, Partial, Codes>(part, sums);
    finish_sums<Form, Lanes>(sums, to);
}

}}}  // namespace kvq::kernels
