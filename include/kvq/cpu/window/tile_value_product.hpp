// y = X x on blocks of 16-bit floats for many operands at once, for CPUs that multiply tiles of bfloat16
// (AMX).
//
//   x = high + low + d, |d| <= 2^-16 |x|      bfloat16 each; with one byte per operand high alone, |d| <=
//                                             2^-8 |x|
//   X = high + low                            exactly; of bfloat16 low is 0
//   y[r] += X_high x_high + X_high x_low + X_low x_high        sums of floats
//
// Blocks have the order that tiles read: words of two columns, of rows side by side. A tile of their rows is
// copied to the workspace, as high and low, and multiplied with all operands, 32 at a time.
// Contract: |y - X x| is at most 2^-14 of the sum of |X| |x|; with one byte per operand 2^-8. The rows of a
// tile with a value that is not finite are multiplied in floats (window_product.hpp).
#pragma once

#include <limits>
#include <type_traits>

#include "../product/tile_product.hpp"
#include "window_product.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Does a product of n operands with blocks of T use tiles of bfloat16? For fewer operands, reading the block
/// takes longer than tiles save.
template <class Lanes, class T>
bool multiplies_tiles(int n) noexcept {
    if constexpr (has_tiles<Lanes> && sizeof(T) == 2) return n >= 16 && Lanes::architecture::tiles::ready();
    return false;
}

/// The workspace of products of n operands with blocks of one shape: tiles of the operands [16 of them][32
/// columns][high, low]; of rows of the block [32 columns][16 rows][high, low]; sums.
struct value_tile_space {
    static constexpr int tile_bytes = 1024, tile_columns_of_pairs = 32, tile_words = 16;

    int n = 0, steps = 0;
    std::size_t rows = 0, sums = 0, bytes = 0;

    value_tile_space() = default;
    value_tile_space(const block_shape& shape, int count, int operand_pieces, int value_pieces)
        : n(count), steps(detail::ceil_div(shape.cols(), tile_columns_of_pairs)) {
        const auto tiles = [&](int number, int pieces) {
            return static_cast<std::size_t>(number) * static_cast<std::size_t>(steps * pieces * tile_bytes);
        };
        rows = tiles(detail::ceil_div(n, tile_lines), operand_pieces);
        sums = rows + tiles(2, value_pieces);
        bytes = sums + 4 * tile_bytes;
    }
};

/// Pieces: of an operand, 1 or 2.
template <has_tiles Lanes, class T, int Pieces>
class tile_value_product {
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    using tiles = typename Lanes::architecture::tiles;
    using space_of = value_tile_space;

public:
    static constexpr int value_pieces = std::is_same_v<T, bfloat16> ? 1 : 2;

    /// Splits the operands: `cols` columns of each, and zeros up to the end of a tile.
    static void fold(const space_of& s, const float* x, std::ptrdiff_t x_stride, int cols, std::byte* space) {
        for (int i = 0; i < s.n; ++i, x += x_stride) {
            std::byte* to = operand(s, space, i / tile_lines, 0) + i % tile_lines * 64;
            for (int c = 0; c < detail::round_up(cols, space_of::tile_columns_of_pairs); c += Lanes::width) {
                const floats v = load_rows<Lanes>(x + c, cols - c);
                std::byte* const at = to + c % space_of::tile_columns_of_pairs * 2;
                if constexpr (Pieces == 1) {
                    Lanes::store_halfwords(at, Lanes::template half_bits<bfloat16>(v));
                } else {
                    const ints high = Lanes::bit_and(Lanes::as_ints(v), Lanes::splat(-65536));
                    const ints low = Lanes::as_ints(Lanes::subtract(v, Lanes::as_floats(high)));
                    Lanes::store_halfwords(at, Lanes::template shift_right<16>(high));
                    Lanes::store_halfwords(
                        at + space_of::tile_bytes,
                        Lanes::template shift_right<16>(Lanes::add(low, Lanes::splat(0x8000))));
                }
                if ((c + Lanes::width) % space_of::tile_columns_of_pairs == 0)
                    to += Pieces * space_of::tile_bytes;
            }
        }
    }

    /// y[i][r] (+)= sum over the first `cols` columns of X[r][c] x[i][c], for the first `rows` rows and the
    /// operands of the last `fold`, which must have had as many columns.
    static void run(const space_of& s, const block_shape& shape, const std::byte* block, const float* x,
                    std::ptrdiff_t x_stride, int rows, int cols, float* y, std::ptrdiff_t y_stride, bool add,
                    std::ptrdiff_t ahead, std::byte* space) {
        const value_layout<T> layout(shape);
        const auto row_bytes = 4 * static_cast<std::ptrdiff_t>(layout.tiles.words_per_row);
        const int padded_rows = layout.tiles.rows.padded_size();
        for (int row = 0; row < rows; row += tile_layout::tile_rows, y += tile_layout::tile_rows) {
            const int here = detail::smaller(tile_layout::tile_rows, rows - row);
            const std::byte* const from = block + row * row_bytes;
            if (read(from, detail::smaller(tile_layout::tile_rows, padded_rows - row), here, cols, ahead,
                     space + s.rows)) {
                multiply(s, here, detail::ceil_div(cols, space_of::tile_columns_of_pairs), y, y_stride, add,
                         space);
                continue;
            }
            block_shape of = shape;
            (shape.role == tensor::key ? of.tokens : of.dim) =
                detail::smaller(tile_layout::tile_rows, shape.rows() - row);
            window_product<Lanes, T>(of, from, x, x_stride, s.n, here, cols, y, y_stride, add, 0);
        }
    }

private:
    static std::byte* operand(const space_of& s, std::byte* space, int block, int step) {
        return space + (block * s.steps + step) * Pieces * space_of::tile_bytes;
    }

    /// Copies `cols` columns of a tile's rows, and zeros up to the end of a step. Are the values of the first
    /// `rows` rows finite?
    static bool read(const std::byte* from, int height, int rows, int cols, std::ptrdiff_t ahead,
                     std::byte* to) {
        constexpr int vectors = tile_layout::tile_rows / Lanes::width;
        const int words = detail::ceil_div(cols, 2), all = detail::round_up(words, int{space_of::tile_words});
        ints top[vectors];
        KVQ_UNROLL
        for (int v = 0; v < vectors; ++v) top[v] = Lanes::splat(0);
        for (int w = 0; w < all; ++w, from += height * 4) {
            // The other half of the last word may hold the value of a trimmed token.
            const ints mask = Lanes::splat(2 * w + 1 < cols ? -1 : 0xffff);
            for (int line = 0; w < words && line < 4 * tile_layout::tile_rows; line += 64)
                detail::prefetch(from + ahead + line);
            KVQ_UNROLL
            for (int v = 0; v < vectors; ++v) {
                constexpr int width = Lanes::width;
                const int row = v * width, left = w < words ? height - row : 0;
                ints word = Lanes::splat(0);
                if (left >= width)
                    word = Lanes::bit_and(Lanes::load(from + row * 4), mask);
                else if (left > 0)
                    word = Lanes::bit_and(Lanes::load(from + row * 4, left), mask);
                top[v] = Lanes::max_halves(top[v], Lanes::bit_and(word, Lanes::splat(0x7fff7fff)));
                store(word, to +
                                (w / space_of::tile_words * 2 + row / tile_space::half_rows) * value_pieces *
                                    space_of::tile_bytes +
                                w % space_of::tile_words * 64 + row % tile_space::half_rows * 4);
            }
        }
        std::uint16_t tops[2 * tile_layout::tile_rows], largest = 0;
        KVQ_UNROLL
        for (int v = 0; v < vectors; ++v)
            Lanes::store(reinterpret_cast<std::byte*>(tops) + v * Lanes::width * 4, top[v]);
        for (int i = 0; i < 2 * rows; ++i) largest = detail::larger(largest, tops[i]);
        constexpr float infinity = std::numeric_limits<float>::infinity();
        return largest < T(infinity).bits;
    }
    /// Stores words of values as words of bfloat16.
    static KVQ_INLINE void store(ints word, std::byte* to) {
        if constexpr (value_pieces == 1) {
            Lanes::store(to, word);
        } else {
            const ints mask = Lanes::splat(-65536);
            const floats even = Lanes::template halves<T, 0>(word), odd = Lanes::template halves<T, 1>(word);
            const auto rounded = [&](floats v) {
                return Lanes::bit_and(Lanes::add(Lanes::as_ints(v), Lanes::splat(0x8000)), mask);
            };
            const ints even_high = rounded(even), odd_high = rounded(odd);
            const auto rest = [&](floats v, ints high) {
                return Lanes::as_ints(Lanes::subtract(v, Lanes::as_floats(high)));
            };
            Lanes::store(to, Lanes::bit_or(Lanes::template shift_right<16>(even_high), odd_high));
            Lanes::store(
                to + space_of::tile_bytes,
                Lanes::bit_or(Lanes::template shift_right<16>(rest(even, even_high)), rest(odd, odd_high)));
        }
    }

    /// The rows of a tile times all operands.
    static void multiply(const space_of& s, int rows, int steps, float* y, std::ptrdiff_t y_stride, bool add,
                         std::byte* space) {
        const bool two_halves = rows > tile_space::half_rows;
        for (int first = 0; first < s.n; first += 2 * tile_lines, y += 2 * tile_lines * y_stride) {
            const int block = first / tile_lines;
            const bool two_blocks = s.n - first > tile_lines;
            const auto sum = [&]<int Sum>(std::integral_constant<int, Sum>) {
                return sums{y + Sum / 2 * tile_lines * y_stride + Sum % 2 * tile_space::half_rows,
                            y_stride,
                            detail::smaller(s.n - first - Sum / 2 * tile_lines, tile_lines),
                            detail::smaller(rows - Sum % 2 * tile_space::half_rows, +tile_space::half_rows),
                            add,
                            space + s.sums + Sum * space_of::tile_bytes};
            };
            const auto for_each_sum = [&](const auto& f) KVQ_INLINE_LAMBDA {
                f(std::integral_constant<int, 0>{});
                if (two_halves) f(std::integral_constant<int, 1>{});
                if (two_blocks) f(std::integral_constant<int, 2>{});
                if (two_blocks && two_halves) f(std::integral_constant<int, 3>{});
            };
            for_each_sum([&](auto i) KVQ_INLINE_LAMBDA { sum(i).template begin<i.value>(); });
            const std::byte* values = space + s.rows;
            for (int step = 0; step < steps; ++step, values += 2 * value_pieces * space_of::tile_bytes) {
                const auto load_operands = [&](int piece) KVQ_INLINE_LAMBDA {
                    tiles::template load<4>(operand(s, space, block, step) + piece * space_of::tile_bytes,
                                            64);
                    if (two_blocks)
                        tiles::template load<5>(
                            operand(s, space, block + 1, step) + piece * space_of::tile_bytes, 64);
                };
                const auto load_values = [&](int piece) KVQ_INLINE_LAMBDA {
                    const std::byte* const at = values + piece * space_of::tile_bytes;
                    tiles::template load<6>(at, 64);
                    if (two_halves) tiles::template load<7>(at + value_pieces * space_of::tile_bytes, 64);
                };
                const auto product = [&]() KVQ_INLINE_LAMBDA {
                    tiles::template multiply_floats<0, 4, 6>();
                    if (two_halves) tiles::template multiply_floats<1, 4, 7>();
                    if (two_blocks) tiles::template multiply_floats<2, 5, 6>();
                    if (two_blocks && two_halves) tiles::template multiply_floats<3, 5, 7>();
                };
                load_operands(0);
                if constexpr (value_pieces == 2) {
                    load_values(1);
                    product();
                }
                load_values(0);
                product();
                if constexpr (Pieces == 2) {
                    load_operands(1);
                    product();
                }
            }
            for_each_sum([&](auto i) KVQ_INLINE_LAMBDA { sum(i).template end<i.value>(); });
        }
    }

    /// The sums in a tile: of up to 16 operands and 16 rows.
    struct sums {
        float* y;
        std::ptrdiff_t y_stride;
        int n, rows;
        bool add;
        std::byte* memory;

        /// Tiles are read and written whole.
        bool whole() const { return n == tile_lines && rows == tile_space::half_rows; }

        template <int Tile>
        KVQ_INLINE void begin() const {
            if (add && whole())
                tiles::template load<Tile>(reinterpret_cast<const std::byte*>(y), 4 * y_stride);
            else
                tiles::template zero<Tile>();
        }
        template <int Tile>
        KVQ_INLINE void end() const {
            if (whole()) return tiles::template store<Tile>(reinterpret_cast<std::byte*>(y), 4 * y_stride);
            tiles::template store<Tile>(memory, 64);
            for (int i = 0; i < n; ++i)
                for (int r = 0; r < rows; ++r) {
                    const float sum = detail::load_as<float>(memory + 64 * i + 4 * r);
                    y[i * y_stride + r] = add ? y[i * y_stride + r] + sum : sum;
                }
        }
    };
};

/// The product in tiles of a backend, if it has one.
template <class Lanes, class T, class Backend>
struct tile_product_of {
    using type = void;
};
template <has_tiles Lanes, class T, class Backend>
struct tile_product_of<Lanes, T, Backend> {
    using type = tile_value_product<Lanes, T, Backend::query_bytes>;
};

}}}  // namespace kvq::kernels
