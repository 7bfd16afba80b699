// y = X x on blocks of 16-bit floats for many operands at once, for CPUs on which one instruction sums
// products of 16-bit words.
//
//   X[r][c] ~= step[r] * code,  code = round(X[r][c] / step[r]),  step[r] = max_c |X[r][c]| / 16383
//   x[c]    ~= step * word,     |word| <= 32767,  sum of |word| <= 2^17
//
// Sums of 32 columns, whose rows have a step of their own, fit 32 bits for any data: 16383 * 2^17 < 2^31. An
// operand has a step per 128 columns. Rows of a tile are converted to words in the workspace once for all
// operands, which pays only for many operands: twice the products of floats per cycle.
// Contract: |X - step code| <= step / 2, that is 2^-15 of a row's largest value of the 32, and |x - step
// word| <= step, where the step is the larger of max |x| / 32766 of the 128 columns and about sum |x| / 2^17
// of any 32 of them; words have the sum of x / step to within one a lane (folded.hpp). On normal data the sum
// of both is a relative error of 1e-4 (tests/conformance/words.cpp). A block with a value that is not finite
// is multiplied in floats (window_product.hpp).
#pragma once

#include <limits>
#include <utility>

#include "window_product.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Does a product of n operands with blocks of T use words? For fewer operands, the conversion takes longer
/// than words save.
template <class Lanes, class T>
constexpr bool multiplies_words(int n) noexcept {
    return has_word_dots<Lanes> && sizeof(T) == 2 && n >= 16;
}

/// The workspace of products of n operands with blocks of one shape: [parts][n] floats: steps of the
/// operands; [n][stride] words of them; [sums][row slots] floats: steps of the rows; a tile of words.
struct word_space {
    static constexpr int tile_rows = tile_layout::tile_rows;
    static constexpr int part_columns = 128;  ///< of an operand have one step
    static constexpr int sum_columns = 32;    ///< of a row have one step, and a sum of integers
    static constexpr int part_words = part_columns / 2, sum_words = sum_columns / 2;

    int n = 0;
    int row_slots = 0;
    std::ptrdiff_t stride = 0;  ///< from one operand to the next, in words of two columns
    std::size_t vectors = 0, steps = 0, tile = 0, bytes = 0;

    word_space() = default;
    word_space(const block_shape& shape, int count)
        : n(count),
          row_slots(detail::round_up(shape.rows(), tile_rows)),
          stride(detail::round_up(shape.cols(), sum_columns) / 2) {
        const auto floats_of = [&](int steps_of_each, int each) {
            return detail::round_up(
                static_cast<std::size_t>(steps_of_each) * static_cast<std::size_t>(each) * sizeof(float),
                std::size_t{64});
        };
        vectors = floats_of(detail::ceil_div(shape.cols(), part_columns), n);
        steps = vectors + static_cast<std::size_t>(n) * static_cast<std::size_t>(stride) * 4;
        tile = steps + floats_of(detail::ceil_div(shape.cols(), sum_columns), row_slots);
        bytes = tile + static_cast<std::size_t>(stride) * tile_rows * 4;
    }

    float* vector_steps(std::byte* space) const noexcept { return reinterpret_cast<float*>(space); }
    std::byte* vector(std::byte* space, int i) const noexcept { return space + vectors + i * stride * 4; }
    float* row_steps(std::byte* space) const noexcept { return reinterpret_cast<float*>(space + steps); }
};

template <has_word_dots Lanes, class T>
class word_product {
public:
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;

    /// Converts the operands to words: `cols` columns of each, zeros up to the end of the last vector of
    /// lanes.
    static void fold(const word_space& s, const float* x, std::ptrdiff_t x_stride, int cols,
                     std::byte* space) {
        for (int i = 0; i < s.n; ++i, x += x_stride)
            for (int first = 0; first < cols; first += part_columns) {
                const int size = detail::smaller(cols - first, part_columns);
                const auto load = [&](int c) { return load_rows<Lanes>(x + first + c, size - c); };
                floats top = Lanes::splat_float(0.0f);
                float most = 0.0f;
                for (int c = 0; c < size;) {
                    floats sum = Lanes::splat_float(0.0f);
                    for (const int end = c + sum_columns; c < end; c += Lanes::width) {
                        const floats a = Lanes::abs(load(c));
                        top = Lanes::larger(top, a);
                        sum = Lanes::add(sum, a);
                    }
                    most = detail::larger(most, Lanes::sum(sum));
                }
                const float largest = Lanes::largest(top),
                            step =
                                detail::larger(largest * (1.0f / top_number), most * (1.0f / sum_of_numbers));
                const bool some = largest > tiny;
                s.vector_steps(space)[first / part_columns * s.n + i] = some ? step : 0.0f;
                const floats inverse = Lanes::splat_float(some ? 1.0f / step : 0.0f);
                sum_rounding<Lanes> words;
                words.begin();
                for (int c = 0; c < size; c += 2 * Lanes::width) {
                    const auto one = words.next(load(c), inverse);
                    Lanes::store_as_halfwords(s.vector(space, i) + 2 * (first + c), one,
                                              words.next(load(c + Lanes::width), inverse));
                }
            }
    }

    /// y[i][r] (+)= sum over the first `cols` columns of X[r][c] x[i][c], for the first `rows` rows and the
    /// operands of the last `fold`, which must have had as many columns. Returns false, without a product, if
    /// a value is not finite.
    static bool run(const word_space& s, const block_shape& shape, const std::byte* block, int rows, int cols,
                    float* y, std::ptrdiff_t y_stride, bool add, std::ptrdiff_t ahead, std::byte* space) {
        const value_layout<T> layout(shape);
        const int padded_rows = layout.tiles.rows.padded_size(), pairs = detail::ceil_div(cols, 2);
        const auto row_bytes = 4 * static_cast<std::ptrdiff_t>(layout.tiles.words_per_row);
        float* const steps = s.row_steps(space);
        for (int tile = 0; tile < rows; tile += tile_rows)
            if (!find_steps(block + tile * row_bytes, detail::smaller(tile_rows, padded_rows - tile),
                            rows - tile, cols, steps + tile, s.row_slots, ahead))
                return false;
        std::byte* const words = space + s.tile;
        for (int tile = 0; tile < rows; tile += tile_rows) {
            const int here = detail::smaller(tile_rows, rows - tile);
            make_words(block + tile * row_bytes, detail::smaller(tile_rows, padded_rows - tile), pairs,
                       steps + tile, s.row_slots, words);
            for (int i = 0; i < s.n;) {
                const auto multiply = [&](auto count) {
                    constexpr int Q = decltype(count)::value;
                    multiply_tile<Q>(words, pairs, s, space, i, steps + tile, here, y + i * y_stride + tile,
                                     y_stride, add);
                    i += Q;
                };
                with_queries(next_query_block(s.n - i), multiply);
            }
        }
        return true;
    }

private:
    static constexpr int tile_rows = word_space::tile_rows, parts = tile_rows / Lanes::width;
    static constexpr int word_bytes = 4 * tile_rows;  // of a word of every row of a tile, in the workspace
    static constexpr int part_columns = word_space::part_columns, part_words = word_space::part_words,
                         sum_columns = word_space::sum_columns, sum_words = word_space::sum_words;
    // Words may be one more than x / step.
    static constexpr float top_number = 32766.0f, top_code = 16383.0f, tiny = 1e-33f,
                           sum_of_numbers = (1 << 17) - sum_columns - 1;
    static_assert(parts >= 1 && tile_rows % Lanes::width == 0 && sum_columns % (2 * Lanes::width) == 0 &&
                  part_columns % sum_columns == 0);

    template <int Part>
    static KVQ_INLINE ints load_words(const std::byte* from, int height) {
        if (height >= tile_rows) return Lanes::load(from + Part * Lanes::width * 4);
        const int left = height - Part * Lanes::width;
        return left <= 0
                   ? Lanes::splat(0)
                   : Lanes::load(from + Part * Lanes::width * 4, left < Lanes::width ? left : Lanes::width);
    }

    /// Finds the steps of a tile's rows, [sum][row], slot_count apart; empty rows get 0. Returns whether all
    /// values of the first `rows` rows are finite.
    static bool find_steps(const std::byte* from, int height, int rows, int cols, float* steps,
                           std::ptrdiff_t slot_count, std::ptrdiff_t ahead) {
        ints all = Lanes::splat(0);
        for (int first = 0; first < cols; first += sum_columns, steps += slot_count) {
            ints top[parts];
            KVQ_UNROLL
            for (int p = 0; p < parts; ++p) top[p] = Lanes::splat(0);
            const auto visit = [&](ints mask) KVQ_INLINE_LAMBDA {
                for (int line = 0; line < word_bytes; line += 64) detail::prefetch(from + ahead + line);
                for_parts([&]<int P>() KVQ_INLINE_LAMBDA {
                    top[P] = Lanes::max_halves(top[P], Lanes::bit_and(load_words<P>(from, height), mask));
                });
                from += height * 4;
            };
            const int here = detail::smaller(cols - first, sum_columns);
            for (int w = 0; w < here / 2; ++w) visit(Lanes::splat(0x7fff7fff));
            // The other half of the last word may hold the value of a trimmed token.
            if (here % 2 != 0) visit(Lanes::splat(0x7fff));
            KVQ_UNROLL
            for (int p = 0; p < parts; ++p) {
                std::byte words[4 * Lanes::width];
                Lanes::store(words, top[p]);
                const int left = rows - p * Lanes::width;
                all = Lanes::max_halves(all, left >= Lanes::width ? top[p]
                                             : left > 0           ? Lanes::load(words, left)
                                                                  : Lanes::splat(0));
                const floats a =
                    Lanes::larger(Lanes::template halves<T, 0>(top[p]), Lanes::template halves<T, 1>(top[p]));
                Lanes::store_floats(
                    steps + p * Lanes::width,
                    Lanes::multiply(Lanes::keep_above(a, a, tiny), Lanes::splat_float(1.0f / top_code)));
            }
        }
        return all_finite(all);
    }
    static bool all_finite(ints tops) {
        constexpr float unbounded = std::numeric_limits<float>::infinity();
        const std::uint16_t infinity = T(unbounded).bits;
        std::byte words[4 * Lanes::width];
        Lanes::store(words, tops);
        std::uint16_t most = 0;
        for (int i = 0; i < 2 * Lanes::width; ++i)
            most = detail::larger(most, detail::load_as<std::uint16_t>(words + 2 * i));
        return most < infinity;
    }

    /// The codes of a tile's rows: [word][row], two columns to a word.
    static void make_words(const std::byte* from, int height, int pairs, const float* steps,
                           std::ptrdiff_t slot_count, std::byte* out) {
        floats inverse[parts][2];  // two lanes per row
        for (int w = 0; w < pairs; ++w, from += height * 4, out += word_bytes) {
            if (w % sum_words == 0) {
                for_parts([&]<int P>() KVQ_INLINE_LAMBDA {
                    const floats step = Lanes::load_floats(steps + P * Lanes::width);
                    const floats one =
                        Lanes::keep_above(Lanes::divide(Lanes::splat_float(1.0f), step), step, 0.0f);
                    inverse[P][0] = Lanes::template repeat_lanes<0>(one);
                    inverse[P][1] = Lanes::template repeat_lanes<1>(one);
                });
                steps += slot_count;
            }
            for_parts([&]<int P>() KVQ_INLINE_LAMBDA {
                const std::byte* const at = from + P * Lanes::width * 4;
                const auto code = [&]<int Half>() KVQ_INLINE_LAMBDA {
                    const std::byte* const values = at + Half * Lanes::width * 2;
                    floats v;
                    if (height >= tile_rows) {
                        v = Lanes::template load_values<T>(values);
                    } else {
                        const int left = (height - P * Lanes::width) * 2 - Half * Lanes::width;
                        v = left > 0 ? Lanes::template load_values<T>(
                                           values, left < Lanes::width ? left : Lanes::width)
                                     : Lanes::splat_float(0.0f);
                    }
                    return Lanes::round(Lanes::multiply(v, inverse[P][Half]));
                };
                Lanes::store_as_halfwords(out + P * Lanes::width * 4, code.template operator()<0>(),
                                          code.template operator()<1>());
            });
        }
    }

    template <int Q>
    static void multiply_tile(const std::byte* words, int pairs, const word_space& s, std::byte* space,
                              int first, const float* row_steps, int rows, float* y, std::ptrdiff_t y_stride,
                              bool add) {
        floats total[Q][parts];
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) {
            KVQ_UNROLL
            for (int p = 0; p < parts; ++p) {
                const int left = rows - p * Lanes::width;
                total[i][p] = add && left > 0 ? load_rows<Lanes>(y + i * y_stride + p * Lanes::width, left)
                                              : Lanes::splat_float(0.0f);
            }
        }
        const std::byte* x = s.vector(space, first);
        const std::ptrdiff_t stride = 4 * s.stride;
        const float* steps = s.vector_steps(space) + first;
        for (int left = pairs; left > 0; left -= part_words) {
            floats part[Q][parts];
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) {
                KVQ_UNROLL
                for (int p = 0; p < parts; ++p) part[i][p] = Lanes::splat_float(0.0f);
            }
            for (int here = detail::smaller(left, part_words); here > 0; here -= sum_words) {
                ints sum[Q][parts];
                KVQ_UNROLL
                for (int i = 0; i < Q; ++i) {
                    KVQ_UNROLL
                    for (int p = 0; p < parts; ++p) sum[i][p] = Lanes::splat(0);
                }
                for (int w = detail::smaller(here, sum_words); w > 0; --w, words += word_bytes, x += 4) {
                    ints k[parts];
                    KVQ_UNROLL
                    for (int p = 0; p < parts; ++p) k[p] = Lanes::load(words + p * Lanes::width * 4);
                    KVQ_UNROLL
                    for (int i = 0; i < Q; ++i) {
                        const auto b = Lanes::splat(detail::load_as<std::int32_t>(x + i * stride));
                        KVQ_UNROLL
                        for (int p = 0; p < parts; ++p) sum[i][p] = Lanes::dot_word_pairs(sum[i][p], k[p], b);
                    }
                }
                floats row[parts];
                KVQ_UNROLL
                for (int p = 0; p < parts; ++p) row[p] = Lanes::load_floats(row_steps + p * Lanes::width);
                row_steps += s.row_slots;
                KVQ_UNROLL
                for (int i = 0; i < Q; ++i) {
                    KVQ_UNROLL
                    for (int p = 0; p < parts; ++p)
                        part[i][p] = Lanes::multiply_add(Lanes::to_floats(sum[i][p]), row[p], part[i][p]);
                }
            }
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) {
                const auto step = Lanes::splat_float(steps[i]);
                KVQ_UNROLL
                for (int p = 0; p < parts; ++p)
                    total[i][p] = Lanes::multiply_add(part[i][p], step, total[i][p]);
            }
            steps += s.n;
        }
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) {
            KVQ_UNROLL
            for (int p = 0; p < parts; ++p) {
                const int left = rows - p * Lanes::width;
                float* const to = y + i * y_stride + p * Lanes::width;
                if (left >= Lanes::width)
                    Lanes::store_floats(to, total[i][p]);
                else if (left > 0)
                    Lanes::store_floats(to, total[i][p], left);
            }
        }
    }

    template <class F>
    static KVQ_INLINE void for_parts(F&& f) {
        [&]<int... P>(std::integer_sequence<int, P...>) KVQ_INLINE_LAMBDA {
            (f.template operator()<P>(), ...);
        }
        (std::make_integer_sequence<int, parts>{});
    }
};

}}}  // namespace kvq::kernels
