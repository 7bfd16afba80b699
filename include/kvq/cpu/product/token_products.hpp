// Products of vectors with tokens that are rows of floats: scores and outputs of gathered tokens, and the
// scores of an index.
//
//   score   y[i][t] = sum over channels of x[i][c] token[t][c]
//   add     y[i][c] += sum over tokens of w[i][t] token[t][c]
//   add_rectified   y[t] += sum over rows of w[i] max(s[i][t], 0)
//
// Contract: float sums in an order that depends on the number of rows, tokens and channels alone. NaN stays.
// Cost: a few rows and tokens share each load, so that a processor multiplies and adds in most cycles.
#pragma once

#include <cstddef>
#include <type_traits>

#include "../../core/bits.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes>
struct token_products {
    using floats = typename Lanes::floats;
    static constexpr int width = Lanes::width;
    /// Sums in registers: rows x tokens, or rows x vectors of channels.
    static constexpr int rows_together = width >= 16 ? 4 : 2, tokens_together = 4;
    static constexpr int vectors_together = width >= 16 ? 4 : 2;

    static void score(const float* tokens, std::ptrdiff_t stride, int n, int dim, const float* x,
                      std::ptrdiff_t x_stride, int rows, float* y, std::ptrdiff_t y_stride) {
        int i = 0;
        const auto with_rows = [&]<int Rows>(std::integral_constant<int, Rows>) {
            int t = 0;
            for (; t + tokens_together <= n; t += tokens_together)
                score_tile<Rows, tokens_together>(tokens + t * stride, stride, dim, x + i * x_stride,
                                                  x_stride, y + i * y_stride + t, y_stride);
            for (; t < n; ++t)
                score_tile<Rows, 1>(tokens + t * stride, stride, dim, x + i * x_stride, x_stride,
                                    y + i * y_stride + t, y_stride);
        };
        for (; i + rows_together <= rows; i += rows_together)
            with_rows(std::integral_constant<int, rows_together>{});
        for (; i < rows; ++i) with_rows(std::integral_constant<int, 1>{});
    }

    static void add(const float* tokens, std::ptrdiff_t stride, int n, int dim, const float* w,
                    std::ptrdiff_t w_stride, int rows, float* y, std::ptrdiff_t y_stride) {
        int i = 0;
        const auto with_rows = [&]<int Rows>(std::integral_constant<int, Rows>) {
            const float* const weights = w + i * w_stride;
            float* const out = y + i * y_stride;
            int c = 0;
            for (; c + vectors_together * width <= dim; c += vectors_together * width)
                add_tile<Rows, vectors_together>(tokens + c, stride, n, width, weights, w_stride, out + c,
                                                 y_stride);
            for (; c < dim; c += width)
                add_tile<Rows, 1>(tokens + c, stride, n, detail::smaller(width, dim - c), weights, w_stride,
                                  out + c, y_stride);
        };
        for (; i + rows_together <= rows; i += rows_together)
            with_rows(std::integral_constant<int, rows_together>{});
        for (; i < rows; ++i) with_rows(std::integral_constant<int, 1>{});
    }

    static void add_rectified(const float* scores, std::ptrdiff_t stride, int rows, int n, const float* w,
                              float* y) {
        for (int t = 0; t < n; t += width) {
            const int some = detail::smaller(width, n - t);
            floats sum = load(y + t, some);
            for (int i = 0; i < rows; ++i) {
                const floats s = load(scores + i * stride + t, some);
                sum =
                    Lanes::multiply_add(Lanes::splat_float(w[i]), Lanes::keep_unless_below(s, s, 0.0f), sum);
            }
            store(y + t, sum, some);
        }
    }

private:
    static KVQ_INLINE floats load(const float* from, int n) {
        return n == width ? Lanes::load_floats(from) : Lanes::load_floats(from, n);
    }
    static KVQ_INLINE void store(float* to, floats x, int n) {
        n == width ? Lanes::store_floats(to, x) : Lanes::store_floats(to, x, n);
    }

    template <int Rows, int Tokens>
    static KVQ_INLINE void score_tile(const float* tokens, std::ptrdiff_t stride, int dim, const float* x,
                                      std::ptrdiff_t x_stride, float* y, std::ptrdiff_t y_stride) {
        floats sum[Rows][Tokens];
        KVQ_UNROLL
        for (int i = 0; i < Rows; ++i) KVQ_UNROLL
        for (int t = 0; t < Tokens; ++t) sum[i][t] = Lanes::splat_float(0.0f);
        const auto step = [&](int c, auto load_some) KVQ_INLINE_LAMBDA {
            floats of_row[Rows];
            KVQ_UNROLL
            for (int i = 0; i < Rows; ++i) of_row[i] = load_some(x + i * x_stride + c);
            KVQ_UNROLL
            for (int t = 0; t < Tokens; ++t) {
                const floats of_token = load_some(tokens + t * stride + c);
                KVQ_UNROLL
                for (int i = 0; i < Rows; ++i)
                    sum[i][t] = Lanes::multiply_add(of_row[i], of_token, sum[i][t]);
            }
        };
        int c = 0;
        for (; c + width <= dim; c += width)
            step(c, [](const float* from) KVQ_INLINE_LAMBDA { return Lanes::load_floats(from); });
        if (c < dim)
            step(c,
                 [n = dim - c](const float* from) KVQ_INLINE_LAMBDA { return Lanes::load_floats(from, n); });
        KVQ_UNROLL
        for (int i = 0; i < Rows; ++i) KVQ_UNROLL
        for (int t = 0; t < Tokens; ++t) y[i * y_stride + t] = Lanes::sum(sum[i][t]);
    }

    /// n: channels of the last vector.
    template <int Rows, int Vectors>
    static KVQ_INLINE void add_tile(const float* tokens, std::ptrdiff_t stride, int count, int n,
                                    const float* w, std::ptrdiff_t w_stride, float* y,
                                    std::ptrdiff_t y_stride) {
        floats sum[Rows][Vectors];
        KVQ_UNROLL
        for (int i = 0; i < Rows; ++i) KVQ_UNROLL
        for (int v = 0; v < Vectors; ++v) sum[i][v] = load(y + i * y_stride + v * width, n);
        for (int t = 0; t < count; ++t) {
            floats x[Vectors];
            KVQ_UNROLL
            for (int v = 0; v < Vectors; ++v) x[v] = load(tokens + t * stride + v * width, n);
            KVQ_UNROLL
            for (int i = 0; i < Rows; ++i) {
                const floats weight = Lanes::splat_float(w[i * w_stride + t]);
                KVQ_UNROLL
                for (int v = 0; v < Vectors; ++v) sum[i][v] = Lanes::multiply_add(weight, x[v], sum[i][v]);
            }
        }
        KVQ_UNROLL
        for (int i = 0; i < Rows; ++i) KVQ_UNROLL
        for (int v = 0; v < Vectors; ++v) store(y + i * y_stride + v * width, sum[i][v], n);
    }
};

}}}  // namespace kvq::kernels
