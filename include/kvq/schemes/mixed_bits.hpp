// mixed_bits<width_mix{...}>: codes of several widths in one block, each channel with one of them, so many bits on average.
//
//   row = [codes of the widest channels] ... [codes of the narrowest]      in row_words(dim) words, in every block of a shape
//
// Which channel has which width says a plan (schemes/scheme_codes.hpp). Without a plan channels keep their order and have the average
// width, or the two widths around it. Contract: at most 8 widths of 0 to 8 bits, the widest first; a width of 0 stores the mean alone.
// Source: allocation of widths: quant/width_allocation.hpp. docs/reference/format.md draws the block.
#pragma once

#include <cstring>
#include <utility>

#include "../quant/width_allocation.hpp"
#include "concepts.hpp"

namespace kvq::inline KVQ_TAGGED {

/// Bits per code: up to 8 different widths, the widest first, {6, 4, 3, 0}. (An aggregate, because nvcc prints template arguments as
/// aggregates.)
struct code_widths {
    int first = 0, second = -1, third = -1, fourth = -1, fifth = -1, sixth = -1, seventh = -1, eighth = -1;

    KVQ_HD constexpr int operator[](int i) const noexcept {
        return i == 0   ? first
               : i == 1 ? second
               : i == 2 ? third
               : i == 3 ? fourth
               : i == 4 ? fifth
               : i == 5 ? sixth
               : i == 6 ? seventh
               : i == 7 ? eighth
                        : -1;
    }
    KVQ_HD constexpr int count() const noexcept {
        int n = 1;
        while ((*this)[n] >= 0) ++n;
        return n;
    }
};

/// The argument of mixed_bits: mixed_bits<width_mix{.bits = {4, 2, 0}, .average_eighths = 16}>.
struct width_mix {
    code_widths bits{};
    int average_eighths = 0;  ///< average bits of a channel, in eighths
};

namespace detail {

template <width_mix Widths, class Index>
struct listed_widths;
template <width_mix Widths, int... Width>
struct listed_widths<Widths, std::integer_sequence<int, Width...>> {
    static constexpr int count = sizeof...(Width);
    static constexpr int values[count] = {Widths.bits[Width]...};
};

}  // namespace detail

template <width_mix Widths>
struct mixed_bits {
    static constexpr bool several_widths = true;
    using width_list = detail::listed_widths<Widths, std::make_integer_sequence<int, Widths.bits.count()>>;
    static constexpr int average_eighths = Widths.average_eighths;
    static_assert(
        [] {
            for (int i = 0; i + 1 < Widths.bits.count(); ++i)
                if (Widths.bits[i] <= Widths.bits[i + 1]) return false;
            return Widths.bits.count() > 1 && Widths.bits[0] <= 8;
        }(),
        "kvq::mixed_bits: .bits are different widths of 0 to 8 bits, the widest first");
    static_assert(average_eighths >= 8 * width_list::values[width_list::count - 1] &&
                      average_eighths <= 8 * width_list::values[0],
                  "kvq::mixed_bits: .average_eighths / 8 lies between the narrowest and the widest channel");

    /// Words of a row of codes: the average width, but at least enough for the narrower of the two widths around it.
    KVQ_HD static constexpr int row_words(int dim) noexcept {
        const int quads = detail::ceil_div(dim, 4);
        return detail::larger(detail::ceil_div(quads * average_eighths, 64),
                              detail::code_words(narrow_width, quads));
    }
    /// Quads of every width.
    struct width_quads {
        int of[width_list::count] = {};
    };
    /// Quads without a plan: the average width; if it is not a width of the list, the next narrower one and as many quads of the next
    /// wider one as fit.
    KVQ_HD static constexpr width_quads even_quads(int dim) noexcept {
        const int all = detail::ceil_div(dim, 4), words = row_words(dim);
        constexpr int w = width_below_average;
        width_quads quads;
        quads.of[w] = all;
        if constexpr (8 * narrow_width < average_eighths) {
            constexpr int wider = width_list::values[w - 1];
            for (int wide = all; wide > 0; --wide)
                if (detail::code_words(wider, wide) + detail::code_words(narrow_width, all - wide) <= words) {
                    quads.of[w - 1] = wide;
                    quads.of[w] = all - wide;
                    break;
                }
        }
        return quads;
    }

private:
    static constexpr int width_below_average = [] {
        int w = 0;
        while (8 * width_list::values[w] > average_eighths) ++w;
        return w;
    }();
    static constexpr int narrow_width = width_list::values[width_below_average];
};

}  // namespace kvq::inline KVQ_TAGGED
