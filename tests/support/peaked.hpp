// SPDX-License-Identifier: MIT
// Attention in which few keys dominate: one key of every page has a score about 11 above the usual ones, so
// that the weights of the others are half a step of 16-bit numbers below its own. Errors of attend() against
// double arithmetic on the dequantized values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <kvq/kvq.hpp>
#include <string>
#include <vector>

#include "random.hpp"

namespace test {

struct peaked_case {
    int tokens = 1000;
    int page = 128;
    int rows = 1;  ///< query tokens of four heads, which share one kv head
    float query_scale = 1.0f;
    bool outliers = false;  ///< three channels of the keys are 8 times as large
    int dim = 64;

    /// Bounds of the output's relative error. Queries ten times the usual size show their own 16 bits.
    double bound() const {
        const bool large = query_scale > 3.0f;
        return outliers ? (large ? 4e-3 : 1e-3) : (large ? 1e-3 : 5e-4);
    }
    std::string text() const {
        char line[120];
        std::snprintf(line, sizeof line, "%d tokens of %d, pages of %d, %d query tokens times %g%s", tokens,
                      dim, page, rows, static_cast<double>(query_scale),
                      outliers ? ", outlier channels" : "");
        return line;
    }
};

struct peaked_error {
    double output = 0.0;  ///< relative, of all rows
    double lse = 0.0;     ///< largest, absolute
    double score = 0.0;   ///< largest, absolute

    /// Of a score, the 16 bits of queries leave an error in proportion to it.
    double lse_bound() const { return std::max(1e-3, 1.5e-4 * score); }
};

/// Runs the long tests: KVQ_LONG of the environment.
inline bool long_tests() { return std::getenv("KVQ_LONG") != nullptr; }

inline peaked_error measure_peaked(const kvq::format& keys, const kvq::format& values, const peaked_case& of,
                                   generator& random) {
    constexpr int heads = 4;
    const int n = of.tokens, dim = of.dim;
    const auto at = [&](std::vector<float>& x, int row) { return x.data() + std::ptrdiff_t{row} * dim; };
    const auto size = [&](int rows) {
        return static_cast<std::size_t>(rows) * static_cast<std::size_t>(dim);
    };
    std::vector<float> k = random.normals(size(n)), v = random.normals(size(n)),
                       q = random.normals(size(of.rows * heads), 0.5f * of.query_scale), direction(size(1));
    for (float& x : direction) x = random.one_in(2) ? 1.0f : -1.0f;
    for (int i = 0; i < of.rows * heads; ++i)
        for (int c = 0; c < dim; ++c) at(q, i)[c] += of.query_scale * direction[static_cast<std::size_t>(c)];
    for (int t = 0; t < n; ++t) {
        if (of.outliers)
            for (int c = 3; c < dim; c += dim / 3) at(k, t)[c] *= 8.0f;
        if (t % of.page == 5 % of.page)
            for (int c = 0; c < dim; ++c)
                at(k, t)[c] += direction[static_cast<std::size_t>(c)] * 11.2f / of.query_scale /
                               std::sqrt(static_cast<float>(dim));
    }
    kvq::cache cache({.layers = 1, .kv_heads = 1, .head_dim = dim},
                     {.keys = {keys}, .values = {values}, .page_tokens = of.page, .rollback = 0});
    auto sequence = cache.new_sequence();
    const auto view = [&](std::vector<float>& x) {
        return kvq::token_view<float>(x.data(), static_cast<int>(x.size()) / dim, 1, dim);
    };
    sequence.append(0, view(k), view(v));
    std::vector<float> out(q.size()), lse(static_cast<std::size_t>(of.rows * heads));
    sequence.attend(0, kvq::query_view(q.data(), of.rows, heads, dim),
                    kvq::output_view(out.data(), of.rows, heads, dim).with_lse(lse.data()),
                    kvq::bidirectional{});
    sequence.dequantize(0, kvq::tensor::key, 0, view(k));
    sequence.dequantize(0, kvq::tensor::value, 0, view(v));

    peaked_error worst;
    double difference = 0.0, norm = 0.0;
    std::vector<double> weights(static_cast<std::size_t>(n)), exact(static_cast<std::size_t>(dim));
    for (int i = 0; i < of.rows * heads; ++i) {
        double top = -1e300, sum = 0.0;
        for (int t = 0; t < n; ++t) {
            double score = 0.0;
            for (int c = 0; c < dim; ++c)
                score += static_cast<double>(at(q, i)[c]) * static_cast<double>(at(k, t)[c]);
            weights[static_cast<std::size_t>(t)] = score / std::sqrt(static_cast<double>(dim));
            top = std::max(top, weights[static_cast<std::size_t>(t)]);
            worst.score = std::max(worst.score, std::fabs(weights[static_cast<std::size_t>(t)]));
        }
        std::fill(exact.begin(), exact.end(), 0.0);
        for (int t = 0; t < n; ++t) {
            const double weight = std::exp(weights[static_cast<std::size_t>(t)] - top);
            sum += weight;
            for (int c = 0; c < dim; ++c)
                exact[static_cast<std::size_t>(c)] += weight * static_cast<double>(at(v, t)[c]);
        }
        for (int c = 0; c < dim; ++c) {
            const double right = exact[static_cast<std::size_t>(c)] / sum;
            difference += std::pow(static_cast<double>(at(out, i)[c]) - right, 2.0);
            norm += right * right;
        }
        const double off =
            std::fabs(static_cast<double>(lse[static_cast<std::size_t>(i)]) - top - std::log(sum));
        if (!(off <= worst.lse)) worst.lse = off;  // so that NaN is the worst of all
    }
    worst.output = std::sqrt(difference / norm);
    return worst;
}

}  // namespace test
