// y = X x on blocks of 16- or 32-bit values: the same loops as code_product.hpp, with float products.
//
// A word holds two 16-bit columns; pairs of the operand are broadcast and even and odd columns summed in
// neighbouring lanes, which are added once at the end. Contract: float products and sums, one per column, in
// column order, of sum_columns at a time.
#pragma once

#include "../../pack/value_layout.hpp"
#include "../product/folded.hpp"
#include "../softmax.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes, class T, bool Partial>
KVQ_INLINE typename Lanes::floats load_value_vector(const std::byte* from, int n) {
    if constexpr (Partial)
        return Lanes::template load_values<T>(from, n);
    else
        return Lanes::template load_values<T>(from);
}

template <class Lanes, class T, int Vectors, int Queries, bool Partial>
void window_product_tile(const std::byte* words, std::ptrdiff_t vector_bytes, int cols, const float* x,
                         std::ptrdiff_t x_stride, int values, float* y, std::ptrdiff_t y_stride, bool add,
                         std::ptrdiff_t ahead) {
    constexpr int per_word = value_layout<T>::values_per_word;
    constexpr int bytes = Lanes::width * static_cast<int>(sizeof(T));
    typename Lanes::floats sum[Queries][Vectors];
    KVQ_UNROLL
    for (int i = 0; i < Queries; ++i) {
        KVQ_UNROLL
        for (int v = 0; v < Vectors; ++v) sum[i][v] = Lanes::splat_float(0.0f);
    }

    const int pairs = cols / per_word;
    for (int w = 0; w < pairs; ++w, words += vector_bytes) {
        for (int line = 0; line < Vectors * bytes; line += 64) detail::prefetch(words + line + ahead);
        typename Lanes::floats k[Vectors];
        KVQ_UNROLL
        for (int v = 0; v < Vectors; ++v)
            k[v] = load_value_vector<Lanes, T, Partial>(words + v * bytes, values);
        KVQ_UNROLL
        for (int i = 0; i < Queries; ++i) {
            const float* const from = x + i * x_stride + w * per_word;
            const auto b = per_word == 2 ? Lanes::splat_pair(from) : Lanes::splat_float(*from);
            KVQ_UNROLL
            for (int v = 0; v < Vectors; ++v) sum[i][v] = Lanes::multiply_add(k[v], b, sum[i][v]);
        }
    }
    if (cols % per_word != 0) {
        // The other half of the last word may hold the value of a trimmed token.
        KVQ_UNROLL
        for (int i = 0; i < Queries; ++i) {
            const auto b = Lanes::splat_float(x[i * x_stride + cols - 1]);
            KVQ_UNROLL
            for (int v = 0; v < Vectors; ++v) {
                const auto k = load_value_vector<Lanes, T, Partial>(words + v * bytes, values);
                sum[i][v] = Lanes::multiply_add(Lanes::keep_even(k), b, sum[i][v]);
            }
        }
    }

    KVQ_UNROLL
    for (int i = 0; i < Queries; ++i) {
        float* const out = y + i * y_stride;
        if (Vectors % per_word == 0 && values >= Vectors * Lanes::width) {
            KVQ_UNROLL
            for (int v = 0; v < Vectors; v += per_word) {
                auto total = sum[i][v];
                if constexpr (per_word == 2 && Vectors % 2 == 0)
                    total = Lanes::add_pairs(total, sum[i][v + 1]);
                float* const to = out + v * (Lanes::width / per_word);
                Lanes::store_floats(to, add ? Lanes::add(Lanes::load_floats(to), total) : total);
            }
            continue;
        }
        KVQ_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            float lane[Lanes::width];
            Lanes::store_floats(lane, sum[i][v]);
            float* const to = out + v * (Lanes::width / per_word);
            const int n = detail::smaller(Lanes::width, values - v * Lanes::width) / per_word;
            for (int r = 0; r < n; ++r) {
                const float total = per_word == 2 ? lane[2 * r] + lane[2 * r + 1] : lane[r];
                to[r] = add ? to[r] + total : total;
            }
        }
    }
}

/// Columns [from, from + cols) of window_product, x[i][0] belongs to column `from`.
template <class Lanes, class T>
void multiply_columns(const value_layout<T>& layout, const std::byte* block, int from, const float* x,
                      std::ptrdiff_t x_stride, int n, int rows, int cols, float* y, std::ptrdiff_t y_stride,
                      bool add, std::ptrdiff_t ahead) {
    constexpr int per_word = value_layout<T>::values_per_word;
    constexpr int vector_rows = Lanes::width / per_word;
    constexpr int vectors = Lanes::value_vectors;
    const int slot_count = layout.tiles.rows.padded_size();
    for (int first = 0; first < n;) {
        const int block_n = next_query_block(n - first);
        for (int tile = 0; tile < rows; tile += tile_layout::tile_rows) {
            const int height = detail::smaller(tile_layout::tile_rows, slot_count - tile);
            const std::byte* const begin =
                block +
                4 * (static_cast<std::size_t>(tile) * static_cast<std::size_t>(layout.tiles.words_per_row) +
                     static_cast<std::size_t>(from / per_word) * static_cast<std::size_t>(height));
            for (int part = 0; part < height && tile + part < rows;) {
                const int left = detail::smaller(height - part, rows - tile - part);
                const bool several =
                    height - part >= vectors * vector_rows && left > (vectors - 1) * vector_rows;
                const auto run = [&](auto v, auto q) {
                    constexpr int V = decltype(v)::value;
                    const int here = detail::smaller(left, V * vector_rows);
                    constexpr int Q = decltype(q)::value;
                    // Vectors stay inside the tile; rows beyond `rows` are dropped. Slots are a multiple of
                    // 4, so vectors of up to 4 are always full.
                    const int values = detail::smaller(height - part, V * vector_rows) * per_word;
                    constexpr auto product =
                        &window_product_tile<Lanes, T, V, Q, (V == 1 && vector_rows > 4)>;
                    if (here == V * vector_rows) {
                        product(begin + part * 4, height * 4, cols, x + first * x_stride, x_stride, values,
                                y + first * y_stride + tile + part, y_stride, add, ahead);
                        return;
                    }
                    float lane_y[Q][V * vector_rows];
                    product(begin + part * 4, height * 4, cols, x + first * x_stride, x_stride, values,
                            lane_y[0], V * vector_rows, false, ahead);
                    for (int i = 0; i < Q; ++i)
                        for (int r = 0; r < here; ++r) {
                            float& out = y[(first + i) * y_stride + tile + part + r];
                            out = add ? out + lane_y[i][r] : lane_y[i][r];
                        }
                };
                with_queries(block_n, [&](auto q) {
                    if (several)
                        run(std::integral_constant<int, vectors>{}, q);
                    else
                        run(std::integral_constant<int, 1>{}, q);
                });
                part += several ? vectors * vector_rows : vector_rows;
            }
        }
        first += block_n;
    }
}

/// y[i][r] (+)= sum over the first `cols` columns of X[r][c] x[i][c], for the first `rows` rows.
/// ahead: distance in bytes from this block to the one that is read next; 0: none.
template <class Lanes, class T>
void window_product(const block_shape& shape, const std::byte* block, const float* x, std::ptrdiff_t x_stride,
                    int n, int rows, int cols, float* y, std::ptrdiff_t y_stride, bool add,
                    std::ptrdiff_t ahead) {
    const value_layout<T> layout(shape);
    for (int from = 0; from < cols; from += sum_columns)
        multiply_columns<Lanes, T>(layout, block, from, x + from, x_stride, n, rows,
                                   detail::smaller(cols - from, sum_columns), y, y_stride, add || from > 0,
                                   ahead);
}

}}}  // namespace kvq::kernels
