// The Walsh-Hadamard transform with random signs (quant/hadamard.hpp) of all tokens of a block, in lanes.
//
//   steps within a vector     `width` vectors are transposed; sums and differences are then of whole vectors
//   steps between vectors     without a transposition
//
// Contract: sums and differences have the order of quant/hadamard.hpp, so the bits are the same.
#pragma once

#include "../../core/bits.hpp"
#include "../../quant/hadamard.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes>
class hadamard_rows {
public:
    /// x: `tokens` rows of `dim` values, `stride` apart.
    hadamard_rows(float* x, int tokens, int dim, std::ptrdiff_t stride)
        : x_(x), tokens_(tokens), dim_(dim), stride_(stride) {}

    /// Transforms every row's channels [first, first + n), n a power of two.
    void transform(int first, int n) const {
        if (n < width) {
            for (int t = 0; t < tokens_; ++t) detail::walsh_hadamard(row(t) + first, n);
            return;
        }
        const int vectors = n / width, all = tokens_ * vectors;
        const auto place = [&](int v) { return row(v / vectors) + first + v % vectors * width; };
        for (int v = 0; v < all; v += width) {
            const int count = detail::smaller(width, all - v);
            ints square[width];
            for (int i = 0; i < width; ++i)
                square[i] = i < count ? Lanes::as_ints(Lanes::load_floats(place(v + i))) : Lanes::splat(0);
            Lanes::transpose(square);
            for (int half = 1; half < width; half *= 2)
                for (int i = 0; i < width; i += 2 * half)
                    for (int j = i; j < i + half; ++j) {
                        const floats a = Lanes::as_floats(square[j]), b = Lanes::as_floats(square[j + half]);
                        square[j] = Lanes::as_ints(Lanes::add(a, b));
                        square[j + half] = Lanes::as_ints(Lanes::subtract(a, b));
                    }
            Lanes::transpose(square);
            for (int i = 0; i < count; ++i) Lanes::store_floats(place(v + i), Lanes::as_floats(square[i]));
        }
        const floats norm = Lanes::splat_float(detail::hadamard_norm(n));
        for (int t = 0; t < tokens_; ++t) {
            float* const x = row(t) + first;
            for (int half = width; half < n; half *= 2)
                for (int i = 0; i < n; i += 2 * half)
                    for (int j = i; j < i + half; j += width) {
                        const floats a = Lanes::load_floats(x + j), b = Lanes::load_floats(x + j + half);
                        Lanes::store_floats(x + j, Lanes::add(a, b));
                        Lanes::store_floats(x + j + half, Lanes::subtract(a, b));
                    }
            for (int i = 0; i < n; i += width)
                Lanes::store_floats(x + i, Lanes::multiply(Lanes::load_floats(x + i), norm));
        }
    }
    /// Multiplies every channel by its sign: sign(channel) is 1 or -1.
    template <class F>
    void multiply(F&& sign) const {
        for (int c = 0; c < dim_; c += width) {
            const int n = detail::smaller(width, dim_ - c);
            float signs[width];
            for (int i = 0; i < n; ++i) signs[i] = sign(c + i);
            if (n == width) {
                const floats s = Lanes::load_floats(signs);
                for (int t = 0; t < tokens_; ++t)
                    Lanes::store_floats(row(t) + c, Lanes::multiply(Lanes::load_floats(row(t) + c), s));
            } else {
                for (int t = 0; t < tokens_; ++t)
                    for (int i = 0; i < n; ++i) row(t)[c + i] *= signs[i];
            }
        }
    }

private:
    using floats = typename Lanes::floats;
    using ints = typename Lanes::ints;
    static constexpr int width = Lanes::width;

    float* row(int t) const { return x_ + t * stride_; }

    float* x_;
    int tokens_, dim_;
    std::ptrdiff_t stride_;
};

}}}  // namespace kvq::kernels
