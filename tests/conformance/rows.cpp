// SPDX-License-Identifier: MIT
// Comparison family: bounded rounding. Products with rows of tokens in the layouts of other systems
// (cpu/rows/row_product.hpp), against double arithmetic on the dequantized values, for every instruction set:
// in pages and where they lie in other memory, with strides; scales of any size and sign; NaN.
//
// A sum of floats is off by a rounding of each product and each sum. Where rows are multiplied as codes
// (cpu/rows/row_codes.hpp), what they are multiplied with has steps of 1/32512 of the largest magnitude (of
// an operand, or of the weights times scales of a group of channels and 128 tokens), of 2^-126 at least.
// Products below the least normal float are rounded to multiples of 2^-149.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/token_rows.hpp>
#include <limits>

#include "support/random.hpp"

namespace rows_tests {

namespace {

using lanes = kvq::simd<>::lanes;
using stored = kvq::row_layout::stored;

/// Rows of a tensor in memory of their own, row_stride and scale_stride bytes apart, behind some bytes of
/// others.
struct problem {
    kvq::token_rows scheme;
    kvq::block_shape shape;
    int n;
    std::vector<std::byte> block, memory;
    kvq::row_place place{};
    std::vector<float> values, x;

    problem(test::generator& random, const kvq::token_rows& of, kvq::block_shape s, int operands, bool apart)
        : scheme(of), shape(s), n(operands), block(of.block_bytes(s)), values(s.values()) {
        auto from = random.normals(s.values(), 3.0f);
        scheme.quantize(s, {}, from.data(), block.data());
        scheme.dequantize(s, {}, block.data(), values.data());
        x = random.normals(static_cast<std::size_t>(n * s.cols()));
        const kvq::row_layout& l = scheme.layout();
        const int row = l.row_bytes(s.dim), behind = l.scales_behind(s.dim),
                  stride = row + (apart ? random.between(1, 70) : 0);
        place = {block.data(), row, block.data() + std::ptrdiff_t{s.tokens} * row, behind};
        if (!apart) return;
        // Scales of a token lie 3 bytes apart, tokens backwards.
        const int group_stride = 3, line = behind * group_stride + 5, of_rows = stride * (s.tokens - 1) + row;
        memory.resize(static_cast<std::size_t>(of_rows + line * s.tokens), std::byte{0xff});
        for (int t = 0; t < s.tokens; ++t) {
            std::memcpy(memory.data() + t * stride, block.data() + t * row, static_cast<std::size_t>(row));
            for (int g = 0; g < behind; ++g)
                memory[static_cast<std::size_t>(of_rows + line * (s.tokens - 1 - t) + g * group_stride)] =
                    place.scales[t * behind + g];
        }
        place = {memory.data(), stride, memory.data() + of_rows + line * (s.tokens - 1), -line, group_stride};
    }

    /// y[i][r], added to 1 if `add`.
    std::vector<float> multiply(int tokens, bool add) const {
        const kvq::kernels::row_product<lanes> product(scheme.layout(), scheme.tensor_scale(), shape, n);
        std::vector<float> space(product.workspace_bytes() / sizeof(float) + 32,
                                 std::numeric_limits<float>::quiet_NaN());
        auto* const aligned =
            reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(space.data()) + 63) / 64 * 64);
        std::vector<float> y(static_cast<std::size_t>(n * shape.rows()), 1.0f);
        if (shape.role == kvq::tensor::key) {
            product.begin(x.data(), shape.cols(), aligned);
            product.keys(place, 0, tokens, y.data(), shape.rows(), add, 0, aligned);
        } else {
            product.values(place, 0, tokens, x.data(), shape.cols(), y.data(), shape.rows(), add, 0, aligned);
        }
        return y;
    }
    /// Scale times number, and minimum, of a channel of a token.
    struct parts {
        double scale, number, minimum;
    };
    parts parts_of(int token, int channel) const {
        const kvq::row_layout& l = scheme.layout();
        const int group = l.group_of(shape.dim), g = channel / group;
        const std::byte* const from =
            block.data() + std::ptrdiff_t{token} * l.row_bytes(shape.dim) + g * l.group_bytes(group);
        const auto half = [&](int at) {
            return static_cast<double>(
                kvq::float16::to_float(kvq::detail::load_as<std::uint16_t>(from + at)));
        };
        const int behind = l.scales_behind(shape.dim);
        const double scale =
            l.scale == stored::fp16
                ? half(0)
                : static_cast<double>(kvq::detail::scale_of_code(
                      l.scale, block[static_cast<std::size_t>(shape.tokens * l.row_bytes(shape.dim) +
                                                              token * behind + g)])) *
                      static_cast<double>(scheme.tensor_scale());
        const float number = kvq::detail::number_of_code(
            l.numbers, kvq::detail::code_at(l.numbers, from + l.front_bytes(), channel % group));
        return {scale, static_cast<double>(number), l.minimum ? half(2) : 0.0};
    }
    /// Of operands that become two bfloat16: of each product.
    double pair_rounding() const {
        const kvq::row_layout& l = scheme.layout();
        if constexpr (kvq::kernels::has_pairs<lanes>)
            if (l.numbers == kvq::row_layout::number::e4m3 && l.scale == stored::none && shape.dim % 64 == 0)
                return 0x1p-17;
        return 0;
    }
    /// What rounding of operand i to 16 bits may do to y[i][r].
    double rounding(int i, int r, int tokens) const {
        if (!kvq::kernels::multiplies_codes<lanes> || !kvq::kernels::code_rows(scheme.layout())) return 0;
        const auto operand = [&](int c) {
            return std::fabs(static_cast<double>(x[static_cast<std::size_t>(i * shape.cols() + c)]));
        };
        constexpr double half_step = 0.5001 / 32512;
        double sum = 0;
        if (shape.role == kvq::tensor::key) {
            double most = 0;
            for (int c = 0; c < shape.dim; ++c) {
                const parts p = parts_of(r, c);
                sum += std::fabs(p.scale * p.number) + std::fabs(p.minimum);
                most = std::fmax(most, operand(c));
            }
            return sum * most * half_step;
        }
        for (int first = 0; first < tokens; first += kvq::kernels::tokens_of_pass) {
            double most = 32512 * 0x1p-126, numbers = 0;  // of the least step
            for (int t = first; t < tokens && t < first + kvq::kernels::tokens_of_pass; ++t) {
                const parts p = parts_of(t, r);
                most = std::fmax(most, operand(t) * std::fabs(p.scale));
                numbers += std::fabs(p.number);
            }
            sum += most * numbers;
        }
        return sum * half_step;
    }
    void check(int tokens, bool add) const {
        const auto y = multiply(tokens, add);
        const bool keys = shape.role == kvq::tensor::key;
        for (int i = 0; i < n; ++i)
            for (int r = 0; r < (keys ? tokens : shape.rows()); ++r) {
                double wanted = add ? 1.0 : 0.0, size = wanted;
                for (int c = 0; c < (keys ? shape.cols() : tokens); ++c) {
                    const auto at = static_cast<std::size_t>(keys ? r * shape.dim + c : c * shape.dim + r);
                    const double p = static_cast<double>(values[at]) *
                                     static_cast<double>(x[static_cast<std::size_t>(i * shape.cols() + c)]);
                    wanted += p;
                    size += std::fabs(p);
                }
                const auto got = static_cast<double>(y[static_cast<std::size_t>(i * shape.rows() + r)]);
                if (std::isnan(wanted))
                    REQUIRE(std::isnan(got));
                else
                    REQUIRE(std::fabs(got - wanted) <=
                            (4e-6 + pair_rounding()) * size + 0x1p-140 + rounding(i, r, tokens));
            }
    }
};

}  // namespace

TEST_CASE("products with rows of other systems are those of double, in pages and in other memory") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    std::vector<kvq::row_layout> layouts(std::begin(kvq::row_layouts), std::end(kvq::row_layouts));
    using number = kvq::row_layout::number;
    for (const int channels : {16, 24}) {  // layouts of one's own
        layouts.push_back({"int8-fp16", channels, number::int8, stored::fp16, false});
        layouts.push_back({"e4m3-e8m0", channels, number::e4m3, stored::e8m0, false});
        layouts.push_back({"e2m1-e4m3", channels, number::e2m1, stored::e4m3, false});
    }
    for (const kvq::row_layout& l : layouts)
        for (const auto role : {kvq::tensor::key, kvq::tensor::value})
            for (int round = 0; round < 10; ++round) {
                const int unit = l.channels > 0     ? l.channels
                                 : random.one_in(2) ? 64
                                                    : random.between(1, 40),
                          tokens = random.one_in(3) ? random.between(128, 300) : random.between(1, 50);
                const kvq::block_shape s{role, tokens, unit * random.between(1, 5)};
                const bool scales = l.scale == stored::none || l.scale == stored::e4m3;
                const kvq::token_rows scheme(l, scales && random.one_in(2) ? 0.37f : 1.0f);
                const problem p(random, scheme, s, random.between(1, 9), random.one_in(2));
                INFO(l.name, ", ", tokens, " tokens of ", s.dim, " channels, ", p.n, " operands");
                p.check(random.between(1, tokens), random.one_in(2));
            }
}

TEST_CASE("rows of other systems: negative, zero and NaN scales and numbers") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const kvq::row_layout& l : kvq::row_layouts)
        for (const auto role : {kvq::tensor::key, kvq::tensor::value})
            for (int round = 0; round < 6; ++round) {
                problem p(random, kvq::token_rows(l),
                          {role, random.between(1, 40), round % 2 == 0 ? 96 : 128}, random.between(1, 6),
                          false);
                INFO(l.name, " round ", round);
                // Any bytes: NaN stays NaN; numbers are left out whose sums are beyond those of floats.
                auto* const bytes = p.block.data();
                const auto count = static_cast<int>(p.block.size());
                for (int k = 0; k < 3; ++k) {
                    const int at = random.between(0, count - 1);
                    const auto old = bytes[at];
                    bytes[at] = static_cast<std::byte>(random.between(0, 255));
                    p.scheme.dequantize(p.shape, {}, bytes, p.values.data());
                    for (const float v : p.values)
                        if (std::fabs(v) > 1e35f) bytes[at] = old;
                }
                p.scheme.dequantize(p.shape, {}, bytes, p.values.data());
                p.check(p.shape.tokens, round % 2 == 0);
            }
}

TEST_CASE("rows of other systems: scales of any size and sign") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const kvq::row_layout& l : kvq::row_layouts)
        for (const auto role : {kvq::tensor::key, kvq::tensor::value})
            for (int round = 0; round < 3 && l.scale != stored::none; ++round) {
                problem p(random, kvq::token_rows(l), {role, random.between(1, 140), 96},
                          random.between(1, 6), false);
                INFO(l.name, ", ", p.shape.tokens, " tokens, ", p.n, " operands");
                const int groups = p.shape.dim / l.channels, row = l.row_bytes(p.shape.dim);
                for (int i = 0; i < p.shape.tokens * groups; ++i) {
                    const int token = i / groups, group = i % groups;
                    const auto half =
                        static_cast<std::uint16_t>(random.between(0, 1) << 15 | random.between(0, 0x7bff));
                    if (l.scale == stored::fp16)
                        std::memcpy(p.block.data() + token * row + group * l.group_bytes(l.channels), &half,
                                    2);
                    else  // up to 2^109: sums of numbers times operands are finite
                        p.block[static_cast<std::size_t>(p.shape.tokens * row + i)] = static_cast<std::byte>(
                            l.scale == stored::e8m0 ? random.between(216, 236) : half >> 8 | (half & 3));
                }
                p.scheme.dequantize(p.shape, {}, p.block.data(), p.values.data());
                p.check(p.shape.tokens, false);
            }
}

TEST_CASE("rows of other systems: operands and weights that are NaN or huge do not reach other rows") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const kvq::row_layout& l : kvq::row_layouts)
        for (const auto role : {kvq::tensor::key, kvq::tensor::value})
            for (const float bad : {std::numeric_limits<float>::quiet_NaN(), 3e38f}) {
                problem p(random, kvq::token_rows(l), {role, random.between(1, 200), 64},
                          random.between(2, 6), false);
                INFO(l.name, ", ", p.shape.tokens, " tokens, ", p.n, " operands, ", bad);
                const auto before = p.multiply(p.shape.tokens, false);
                // An operand of one row alone.
                const int row = random.between(0, p.n - 1);
                p.x[static_cast<std::size_t>(row * p.shape.cols() + random.between(0, p.shape.cols() - 1))] =
                    bad;
                const auto after = p.multiply(p.shape.tokens, false);
                for (int i = 0; i < p.n; ++i)
                    for (int r = 0; r < p.shape.rows(); ++r) {
                        const auto at = static_cast<std::size_t>(i * p.shape.rows() + r);
                        if (i != row)
                            REQUIRE(std::fabs(after[at] - before[at]) <=
                                    1e-3f * std::fabs(before[at]) + 0.05f);
                        else if (bad != bad)
                            REQUIRE(std::isnan(after[at]));
                    }
            }
}

}  // namespace rows_tests
