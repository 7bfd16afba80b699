// SPDX-License-Identifier: MIT
// Comparison family: bounded rounding. Blocks of 16-bit floats times many vectors
// (cpu/window/word_product.hpp), against double arithmetic on the same values. Built for several -march:
// where there are no products of words, floats do better than the bound.
//
// A value is off by half a step of its row, of 32 columns, a number of a vector by a step of 128 columns of
// it: what every column may add.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <limits>

#include "support/random.hpp"

namespace words_tests {

namespace {

constexpr int slack = 16;  // vectors are read in whole registers

template <class T>
struct problem {
    kvq::block_shape shape;
    int rows, cols, n;
    std::vector<std::byte> block;
    std::vector<float> x;

    problem(const kvq::block_shape& s, int r, int c, int count)
        : shape(s),
          rows(r),
          cols(c),
          n(count),
          block(kvq::full<T>{}.block_bytes(s) + 64),
          x(static_cast<std::size_t>(count * (s.cols() + slack))) {}

    int stride() const { return shape.cols() + slack; }
    T* value(int row, int col) {
        return reinterpret_cast<T*>(block.data()) + kvq::value_layout<T>(shape).element(row, col);
    }
    float& number(int i, int col) { return x[static_cast<std::size_t>(i * stride() + col)]; }

    std::vector<float> multiply(bool add) {
        const kvq::full<T> scheme;
        const kvq::block_id id{0, 0};
        const kvq::kernels::block_product<kvq::simd<>, kvq::full<T>> product(
            kvq::kernels::product_blocks_of<kvq::simd<>>(scheme, shape, id), shape, n);
        std::vector<float> space(product.workspace_bytes() / sizeof(float) + 32);
        auto* const aligned =
            reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(space.data()) + 63) / 64 * 64);
        std::vector<float> y(static_cast<std::size_t>(n * (shape.rows() + slack)), 1.0f);
        product.begin(shape, id, block.data(), x.data(), stride(), aligned);
        product.finish(shape, id, block.data(), x.data(), stride(), rows, cols, y.data(),
                       shape.rows() + slack, add, 0, aligned);
        return y;
    }

    /// The step of the numbers of vector i in 128 columns.
    double vector_step(int i, int begin) {
        double top = 0.0, most = 0.0, sum = 0.0;
        for (int c = begin; c < std::min(begin + 128, cols); ++c) {
            if (c % 32 == 0) sum = 0.0;
            const double x_c = std::fabs(static_cast<double>(number(i, c)));
            top = std::fmax(top, x_c);
            most = std::fmax(most, sum += x_c);
        }
        return std::fmax(top / 32766, most / ((1 << 17) - 33));
    }

    /// Rows from `first` on.
    void check(const std::vector<float>& y, bool add, int first = 0) {
        for (int i = 0; i < n; ++i)
            for (int r = first; r < rows; ++r) {
                double exact = add ? 1.0 : 0.0, terms = exact, bound = 0.0;
                double step_x = 0.0;
                for (int begin = 0; begin < cols; begin += 32) {
                    if (begin % 128 == 0) step_x = vector_step(i, begin);
                    const int end = std::min(begin + 32, cols);
                    double sum_x = 0.0, sum_v = 0.0, top_v = 0.0;
                    for (int c = begin; c < end; ++c) {
                        const double v = static_cast<float>(*value(r, c)), x_c = number(i, c);
                        exact += v * x_c;
                        terms += std::fabs(v * x_c);
                        sum_x += std::fabs(x_c);
                        sum_v += std::fabs(v);
                        top_v = std::fmax(top_v, std::fabs(v));
                    }
                    const double step_v = top_v / 16383;
                    bound += 0.51 * step_v * sum_x + 1.01 * step_x * sum_v +
                             0.51 * (end - begin) * step_v * step_x;
                }
                const double got = y[static_cast<std::size_t>(i * (shape.rows() + slack) + r)];
                CAPTURE(i);
                CAPTURE(r);
                REQUIRE(std::fabs(got - exact) <= bound + terms * 0x1p-20);
            }
    }
};

template <class T>
void check_random(test::generator& random) {
    constexpr int sizes[] = {256, 128, 100, 64, 33, 20, 8};
    const auto size = [&] { return sizes[random.between(0, 6)]; };
    const bool key = random.one_in(2);
    const kvq::block_shape shape{key ? kvq::tensor::key : kvq::tensor::value, size(), size()};
    // Of a page that is not full, some tokens: rows of keys, columns of values.
    const int tokens = random.one_in(2) ? shape.tokens : random.between(1, shape.tokens);
    problem<T> p(shape, key ? tokens : shape.dim, key ? shape.dim : tokens, random.between(1, 45));
    CAPTURE(p.rows);
    CAPTURE(p.cols);
    CAPTURE(p.n);
    const float outlier = random.one_in(2) ? 1.0f : 50.0f;
    for (int r = 0; r < shape.rows(); ++r)
        for (int c = 0; c < shape.cols(); ++c)
            *p.value(r, c) = T(random.normal() * (c % 16 == 3 ? outlier : 1.0f));
    const bool equal = random.one_in(4);  // sums as large as they can be
    for (int i = 0; i < p.n; ++i)
        for (int c = 0; c < shape.cols(); ++c) p.number(i, c) = equal ? 0.37f : random.normal();
    if (equal)
        for (int r = 0; r < shape.rows(); ++r)
            for (int c = 0; c < shape.cols(); ++c) *p.value(r, c) = T(r % 2 == 0 ? 3.0f : -3.0f);
    const bool add = random.one_in(2);
    const std::vector<float> y = p.multiply(add);
    p.check(y, add);

    // What lies beyond the tokens does not count.
    constexpr float infinity = std::numeric_limits<float>::infinity();
    for (int r = 0; r < shape.rows(); ++r)
        for (int c = 0; c < shape.cols(); ++c) {
            if (key ? r < tokens : c < tokens) continue;
            const float rest[] = {0.0f, 1e4f, -infinity, std::nanf("")};
            // Unwritten pairs are zero; the other half of the last word is not.
            if (key || c == tokens) *p.value(r, c) = T(rest[random.between(0, 3)]);
        }
    const std::vector<float> again = p.multiply(add);
    for (int i = 0; i < p.n; ++i)
        for (int r = 0; r < p.rows; ++r) {
            const auto at = static_cast<std::size_t>(i * (shape.rows() + slack) + r);
            REQUIRE(y[at] == again[at]);
        }

    // A value that is not finite makes its row so, and leaves the others alone.
    if (p.n == 0 || p.rows < 2) return;
    *p.value(0, 0) = T(random.one_in(2) ? infinity : std::nanf(""));
    const std::vector<float> bad = p.multiply(add);
    for (int i = 0; i < p.n; ++i)
        REQUIRE_FALSE(std::isfinite(bad[static_cast<std::size_t>(i * (shape.rows() + slack))]));
    p.check(bad, add, 1);
}

}  // namespace

TEST_CASE("16-bit values times many vectors stay within half a step of values and a step of vectors") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(60); ++round) {
        check_random<kvq::float16>(random);
        check_random<kvq::bfloat16>(random);
    }
}

TEST_CASE("on normal data products of 16-bit values have a relative error below 1.5e-4") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    problem<kvq::float16> p({kvq::tensor::key, 128, 128}, 128, 128, 64);
    for (int r = 0; r < 128; ++r)
        for (int c = 0; c < 128; ++c) *p.value(r, c) = kvq::float16(random.normal());
    for (float& f : p.x) f = random.normal();
    const std::vector<float> y = p.multiply(false);
    double error = 0.0, power = 0.0;
    for (int i = 0; i < p.n; ++i)
        for (int r = 0; r < 128; ++r) {
            double exact = 0.0;
            for (int c = 0; c < 128; ++c)
                exact += static_cast<double>(static_cast<float>(*p.value(r, c))) *
                         static_cast<double>(p.number(i, c));
            error += std::pow(exact - static_cast<double>(y[static_cast<std::size_t>(i * (128 + slack) + r)]),
                              2.0);
            power += exact * exact;
        }
    INFO("relative error ", std::sqrt(error / power));
    CHECK(std::sqrt(error / power) < 1.5e-4);
}

TEST_CASE("huge, tiny and zero values times many vectors") {
    problem<kvq::bfloat16> p({kvq::tensor::value, 16, 32}, 32, 16, 20);
    const float sizes[] = {1e30f, 1.0f, 1e-20f, 0.0f};
    for (int r = 0; r < 32; ++r)
        for (int c = 0; c < 16; ++c)
            *p.value(r, c) = kvq::bfloat16(sizes[r % 4] * (c % 3 == 0 ? 1.0f : -0.25f));
    for (int i = 0; i < p.n; ++i)
        for (int c = 0; c < 16; ++c)
            p.number(i, c) = (i % 3 == 0 ? 1e6f : i % 3 == 1 ? 1e-6f : 0.0f) * static_cast<float>(1 + c % 5);
    p.check(p.multiply(false), false);
}

}  // namespace words_tests
