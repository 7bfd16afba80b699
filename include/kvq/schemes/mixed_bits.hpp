// mixed_bits<code_widths<6, 4, 3, 0>, average_eighths<32>>: codes of several widths in one block, so many
// bits on average.
//
//   row = [codes of the widest channels] ... [codes of the narrowest]      in row_words(dim) words, in every
//                                                                          block of a shape
//
// Which channel has which width says a plan (schemes/scheme_codes.hpp). Without a plan channels keep their
// order and have the average width, or the two widths around it. Contract: a channel has one width in all
// blocks of a head; a width of 0 stores the mean alone.
// Source: allocation of widths: quant/width_allocation.hpp. docs/reference/format.md draws the block.
#pragma once

#include "../quant/width_allocation.hpp"
#include "concepts.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Bits per code: 2 to 8 different widths of 0 to 8 bits, the widest first, code_widths<6, 4, 3, 0>.
template <int... Width>
requires(sizeof...(Width) > 0) struct code_widths {
    static constexpr int count = sizeof...(Width);
    static constexpr int values[count] = {Width...};
    static_assert(
        [] {
            for (int i = 0; i + 1 < count; ++i)
                if (values[i] <= values[i + 1]) return false;
            return count >= 2 && count <= 8 && values[0] <= 8 && values[count - 1] >= 0;
        }(),
        "kvq::code_widths: 2 to 8 different widths of 0 to 8 bits, the widest first");
};
/// Average bits of a channel, in eighths.
template <int Eighths>
struct average_eighths {
    static constexpr int value = Eighths;
};

template <class Widths, class Average>
struct mixed_bits {
    static constexpr bool several_widths = true;
    using width_list = Widths;
    static constexpr int eighths = Average::value;
    static_assert(eighths >= 8 * width_list::values[width_list::count - 1] &&
                      eighths <= 8 * width_list::values[0],
                  "kvq::mixed_bits: average_eighths / 8 lies between the narrowest and the widest channel");

    static constexpr int width_below_average = [] {
        int w = 0;
        while (8 * width_list::values[w] > eighths) ++w;
        return w;
    }();
    /// The width, or the narrower of the two widths, of channels without a plan.
    static constexpr int narrow_width = width_list::values[width_below_average];

    /// Words of a row of codes.
    KVQ_HD static constexpr int row_words(int dim) noexcept {
        return detail::row_words(eighths, narrow_width, detail::ceil_div(dim, 4));
    }
    /// Quads of every width.
    struct width_quads {
        int of[width_list::count] = {};
    };
    /// Quads without a plan: the average width; if it is not a width of the list, the next narrower one and
    /// as many quads of the next wider one as fit.
    KVQ_HD static constexpr width_quads even_quads(int dim) noexcept {
        const int all = detail::ceil_div(dim, 4), words = row_words(dim);
        constexpr int w = width_below_average;
        width_quads quads;
        quads.of[w] = all;
        if constexpr (8 * narrow_width < eighths) {
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
};

}}  // namespace kvq
