// SPDX-License-Identifier: MIT
// Variance normalisation against its formula, written down once more in logarithms, as its authors have it.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "baselines/kvarn.hpp"
#include "support/blocks.hpp"

namespace kvarn_tests {

namespace {

using free3 = baselines::variance_normalized<3, false>;

/// Rows and columns as the block's matrix; columns are the lines that are rounded.
struct log_factors {
    std::vector<double> rows, cols;
};

double log_deviation(const std::vector<double>& x) {
    double mean = 0.0, squares = 0.0;
    for (const double v : x) mean += v / static_cast<double>(x.size());
    for (const double v : x) squares += (v - mean) * (v - mean) / static_cast<double>(x.size());
    return std::log(std::clamp(std::sqrt(squares), 1e-3, 1e3));
}

log_factors normalise(const std::vector<std::vector<double>>& x, bool floor) {
    const std::size_t rows = x.size(), cols = x[0].size();
    log_factors now{std::vector<double>(rows), std::vector<double>(cols)}, best = now;
    const auto of_row = [&](std::size_t r) {
        std::vector<double> line(cols);
        for (std::size_t c = 0; c < cols; ++c) line[c] = x[r][c] * std::exp(-now.rows[r] - now.cols[c]);
        return log_deviation(line);
    };
    const auto of_col = [&](std::size_t c) {
        std::vector<double> line(rows);
        for (std::size_t r = 0; r < rows; ++r) line[r] = x[r][c] * std::exp(-now.rows[r] - now.cols[c]);
        return log_deviation(line);
    };
    const auto clip = [&](double l) { return std::clamp(l, floor ? -0.3 : std::log(1e-6), 10.0); };
    double least = HUGE_VAL;
    for (int turn = 0; turn <= 8; ++turn) {
        std::vector<double> r(rows), c(cols);
        for (std::size_t i = 0; i < rows; ++i) r[i] = of_row(i);
        for (std::size_t i = 0; i < cols; ++i) c[i] = of_col(i);
        const auto [r0, r1] = std::minmax_element(r.begin(), r.end());
        const auto [c0, c1] = std::minmax_element(c.begin(), c.end());
        if (const double imbalance = std::exp(*r1 - *r0) + std::exp(*c1 - *c0); imbalance < least)
            least = imbalance, best = now;
        for (std::size_t i = 0; i < cols; ++i) now.cols[i] = clip(now.cols[i] + c[i]);
        for (std::size_t i = 0; i < rows; ++i) r[i] = of_row(i);
        for (std::size_t i = 0; i < rows; ++i) now.rows[i] = clip(now.rows[i] + r[i]);
    }
    return best;
}

}  // namespace

TEST_CASE_TEMPLATE("KVarN: x^ = (s code + z) f of the normalised matrix, at most half a step off", S,
                   baselines::variance_normalized<4>, baselines::variance_normalized<2>, free3) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const S scheme;
    constexpr bool floor = std::is_same_v<S, baselines::variance_normalized<S::code_bits, true>>;
    for (int round = 0; round < 8; ++round) {
        const kvq::block_shape shape{round % 2 ? kvq::tensor::key : kvq::tensor::value, 40, 24};
        INFO(shape);
        auto x = test::random_block(random, shape);
        // Tokens and channels of different sizes: what the normalisation is for.
        for (int t = 0; t < shape.tokens; ++t)
            for (int c = 0; c < shape.dim; ++c)
                x[static_cast<std::size_t>(t * shape.dim + c)] *=
                    static_cast<float>((1 + t % 5) * (1 + 2 * (c % 3))) * (round < 4 ? 1.0f : 0.1f);
        const auto y = test::dequantized(scheme, shape, test::quantized(scheme, shape, x));
        const auto at = [&](const std::vector<float>& from, int r, int c) {
            return static_cast<double>(from[static_cast<std::size_t>(
                shape.role == kvq::tensor::key ? r * shape.dim + c : c * shape.dim + r)]);
        };
        std::vector<std::vector<double>> matrix(static_cast<std::size_t>(shape.rows()));
        for (int r = 0; r < shape.rows(); ++r)
            for (int c = 0; c < shape.cols(); ++c) matrix[static_cast<std::size_t>(r)].push_back(at(x, r, c));
        const log_factors f = normalise(matrix, floor);
        int wrong = 0;
        for (int c = 0; c < shape.cols(); ++c) {
            double lo = HUGE_VAL, hi = -HUGE_VAL;
            const auto factor = [&](int r) {
                return std::exp(f.rows[static_cast<std::size_t>(r)] + f.cols[static_cast<std::size_t>(c)]);
            };
            for (int r = 0; r < shape.rows(); ++r) {
                lo = std::min(lo, at(x, r, c) / factor(r));
                hi = std::max(hi, at(x, r, c) / factor(r));
            }
            const double step = (hi - lo) / S::top;
            for (int r = 0; r < shape.rows(); ++r) {
                const double position = (at(x, r, c) / factor(r) - lo) / step;
                if (std::fabs(position - std::floor(position) - 0.5) < 1e-4)
                    continue;  // either code is right
                const double wanted = (std::nearbyint(position) * step + lo) * factor(r);
                // Three factors of 11 bits; two of them meet the larger end of the line.
                wrong += !(std::fabs(at(y, r, c) - wanted) <=
                           3 * 0x1p-11 * factor(r) * (std::fabs(lo) + std::nearbyint(position) * step));
            }
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("KVarN: poison is counted, dequantizes to finite numbers, and leaves its line's range alone") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const baselines::variance_normalized<4> scheme;
    for (int round = 0; round < 40; ++round) {
        const auto shape = test::random_shape(random, 60);
        INFO(shape);
        const auto x = test::hostile_block(random, shape);
        std::uint32_t counted = 0, wanted = 0;
        const auto y = test::dequantized(scheme, shape, test::quantized(scheme, shape, x, &counted));
        for (std::size_t i = 0; i < x.size(); ++i) {
            wanted += !std::isfinite(x[i]);
            REQUIRE(std::isfinite(y[i]));
        }
        CHECK(counted == wanted);
    }
}

}  // namespace kvarn_tests
