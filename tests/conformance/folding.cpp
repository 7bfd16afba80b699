// SPDX-License-Identifier: MIT
// Comparison family: bounded rounding. What fold_use says is what attention multiplies: every set of
// parameters that a scheme may give to rows and columns, against double arithmetic on what it dequantizes to.
// Built for several -march.
//
// A column's factor is rounded to a step of the largest one, 2^-15 of it at most, and the sum of those that
// share a lane, too, whatever their number (cpu/product/folded.hpp); every other term of a row has a few
// float roundings.
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <utility>

#include "support/random.hpp"

namespace folding_tests {

namespace {

/// x^[r][c] = row_scale[r] * (col_scale[c] * (code - Zero) + col_bias[c]) + row_bias[r] * col_scale[c]: bits
/// of Uses say which of the parameters there are. They depend on row and column alone, so a block is its
/// codes.
template <unsigned Uses, int Zero>
struct any_fold {
    using attends_as = any_fold;
    static constexpr int code_bits = 4;
    static constexpr int zero_code = Zero;
    static constexpr kvq::fold_use uses{(Uses & 1) != 0, (Uses & 2) != 0, (Uses & 4) != 0, (Uses & 8) != 0};

    std::string name() const { return "any-fold"; }
    static constexpr kvq::fold_use fold(kvq::tensor) noexcept { return uses; }
    constexpr kvq::code_layout<4> codes(const kvq::block_shape& s) const noexcept {
        return {{s.rows(), s.rows()}, {s.cols(), s.cols()}};
    }
    std::size_t block_bytes(const kvq::block_shape& s) const noexcept { return codes(s).bytes(); }
    // Attention does not code.
    std::uint32_t quantize(const kvq::block_shape&, const kvq::block_id&, float*, std::byte*) const {
        return 0;
    }
    void dequantize(const kvq::block_shape&, const kvq::block_id&, const std::byte*, float*) const {}

    template <class Backend>
    void row_parameters(const kvq::block_shape& s, const kvq::block_id&, const std::byte*, int, float* scale,
                        float* bias) const {
        for (int r = 0; r < s.rows(); ++r) {
            if (uses.row_scale) scale[r] = row_scale(r);
            if (uses.row_bias) bias[r] = row_bias(r);
        }
    }
    template <class Backend>
    void col_parameters(const kvq::block_shape& s, const kvq::block_id&, const std::byte*, int, float* scale,
                        float* bias) const {
        for (int c = 0; c < s.cols(); ++c) {
            if (uses.col_scale) scale[c] = col_scale(c);
            if (uses.col_bias) bias[c] = col_bias(c);
        }
    }
    static float row_scale(int r) { return uses.row_scale ? varied(r, 0.5f, 1.5f) : 1.0f; }
    static float row_bias(int r) { return uses.row_bias ? varied(r, -1.0f, 2.0f) : 0.0f; }
    static float col_scale(int c) { return uses.col_scale ? varied(c, 0.1f, 0.5f) : 1.0f; }
    static float col_bias(int c) { return uses.col_bias ? varied(c, -0.5f, 1.0f) : 0.0f; }

private:
    static float varied(int i, float from, float to) {
        return from + (to - from) * static_cast<float>((i * 37 + 11) % 64) / 63.0f;
    }
};

/// Codes that stand for entries of a table, which are no grid.
template <unsigned Uses>
struct table_fold : any_fold<Uses, 12> {
    using attends_as = table_fold;
    static constexpr std::array<std::uint8_t, 16> code_entries{12, 13, 14,  15, 16, 18, 20, 24,
                                                               12, 11, 127, 9,  8,  6,  4,  0};
};

template <class Scheme>
double multiplied(unsigned code) {
    if constexpr (requires { Scheme::code_entries; })
        return Scheme::code_entries[code] - Scheme::zero_code;
    else
        return static_cast<int>(code) - Scheme::zero_code;
}

/// y[i][r] = sum_c x^[r][c] x[i][c] by the kernel and in double, for n vectors.
template <class scheme_type>
void check_product(test::generator& random, const kvq::block_shape& shape, int n) {
    static_assert(kvq::foldable<scheme_type>);
    const scheme_type scheme;
    const auto layout = scheme.codes(shape);
    const int rows = shape.rows(), cols = shape.cols();
    std::vector<std::byte> block(scheme.block_bytes(shape) + 64);
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < cols; ++c)
            kvq::pack_code(layout, block.data(), r, c, static_cast<unsigned>(random.between(0, 15)));

    constexpr int slack = 16;  // vectors are read and rows written in whole registers
    std::vector<float> x(static_cast<std::size_t>(n * (cols + slack))),
        y(static_cast<std::size_t>(n * (rows + slack)));
    for (float& f : x) f = random.normal();
    const kvq::block_id id{0, 0};
    const kvq::kernels::block_product<kvq::simd<>, scheme_type> product(
        kvq::kernels::product_blocks_of<kvq::simd<>>(scheme, shape, id), shape, n);
    std::vector<float> space(product.workspace_bytes() / sizeof(float) + 32);
    auto* const aligned =
        reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(space.data()) + 63) / 64 * 64);
    const kvq::kernels::tile_session<kvq::simd<>::lanes, kvq::simd<>> tiles(n);
    product.begin(shape, id, block.data(), x.data(), cols + slack, aligned);
    product.finish(shape, id, block.data(), x.data(), cols + slack, rows, cols, y.data(), rows + slack, false,
                   0, aligned);

    for (int i = 0; i < n; ++i) {
        double largest = 0;
        for (int c = 0; c < cols; ++c)
            largest = std::fmax(
                largest, std::fabs(static_cast<double>(x[static_cast<std::size_t>(i * (cols + slack) + c)]) *
                                   static_cast<double>(scheme_type::col_scale(c))));
        for (int r = 0; r < rows; ++r) {
            double sum = 0, terms = 0, codes = 0;
            const double row_scale = scheme_type::row_scale(r), row_bias = scheme_type::row_bias(r);
            for (int c = 0; c < cols; ++c) {
                const double level = multiplied<scheme_type>(kvq::unpack_code(layout, block.data(), r, c));
                const double scale = scheme_type::col_scale(c), bias = scheme_type::col_bias(c);
                const double f = x[static_cast<std::size_t>(i * (cols + slack) + c)];
                sum += f * (row_scale * (scale * level + bias) + row_bias * scale);
                // Codes and what is subtracted from them are summed apart.
                terms += std::fabs(f) *
                         (row_scale * (scale * (level + 2 * scheme_type::zero_code) + std::fabs(bias)) +
                          std::fabs(row_bias) * scale);
                codes += std::fabs(level);
            }
            const double error =
                std::fabs(sum - static_cast<double>(y[static_cast<std::size_t>(i * (rows + slack) + r)]));
            CAPTURE(r);
            const double lanes = std::fmin(cols, kvq::simd<>::lanes::width);
            REQUIRE(error <= (row_scale * codes + std::fabs(row_bias) * lanes) * largest * 0x1p-15 * 1.02 +
                                 terms * 0x1p-20);
        }
    }
}

template <unsigned... Uses>
void check_all(test::generator& random, const kvq::block_shape& shape, int n,
               std::integer_sequence<unsigned, Uses...>) {
    const auto check = [&]<unsigned Use>() {
        CAPTURE(Use);
        check_product<any_fold<Use, 0>>(random, shape, n);
        check_product<any_fold<Use, 8>>(random, shape, n);
    };
    (check.template operator()<Uses>(), ...);
}

}  // namespace

TEST_CASE("products with every set of parameters of rows and columns") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(40); ++round) {
        // Whole vectors and ends of vectors, in rows and in columns; blocks of one, two and four vectors, and
        // tiles of more.
        constexpr int sizes[] = {128, 64, 48, 40, 33, 7, 1};
        const kvq::block_shape shape{random.one_in(2) ? kvq::tensor::key : kvq::tensor::value,
                                     random.pick(sizes), random.pick(sizes)};
        const int n = random.between(1, 16);
        INFO(shape.tokens, " tokens of ", shape.dim, ", ", n, " vectors");
        check_all(random, shape, n, std::make_integer_sequence<unsigned, 16>{});
        check_product<table_fold<5>>(random, shape, n);  // scales of rows and of columns
    }
}

}  // namespace folding_tests
