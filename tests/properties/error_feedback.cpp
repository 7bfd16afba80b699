// SPDX-License-Identifier: MIT
// Comparison family: exact where nothing may change, and what feedback is for: less error in what queries
// see.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/schemes/affine.hpp>
#include <utility>

#include "support/blocks.hpp"
#include "support/tensors.hpp"

namespace error_feedback_tests {

namespace {

using kvq::error_feedback;
using kvq::min_max;

/// Queries whose channels go together: a few directions and some noise.
test::tensor<float> correlated_queries(test::generator& random, int n, int dim) {
    const int directions = 4;
    const auto basis = random.normals(static_cast<std::size_t>(directions * dim));
    auto q = test::random_tensor(random, n, 1, dim);
    for (int t = 0; t < n; ++t) {
        const auto weights = random.normals(directions);
        for (int c = 0; c < dim; ++c)
            for (int i = 0; i < directions; ++i)
                q.view().at(t, 0)[c] +=
                    weights[static_cast<std::size_t>(i)] * basis[static_cast<std::size_t>(i * dim + c)];
    }
    return q;
}

double logit_error(const test::tensor<float>& q, const std::vector<float>& x, const std::vector<float>& y,
                   int tokens, int dim) {
    double error = 0;
    for (int t = 0; t < tokens; ++t)
        for (int i = 0; i < q.view().tokens; ++i) {
            double e = 0;
            for (int c = 0; c < dim; ++c) {
                const auto at = static_cast<std::size_t>(t * dim + c);
                e += static_cast<double>(q.view().at(i, 0)[c]) *
                     (static_cast<double>(x[at]) - static_cast<double>(y[at]));
            }
            error += e * e;
        }
    return error;
}

}  // namespace

TEST_CASE_TEMPLATE(
    "feedback makes logits of queries like the statistics' better, in the same format", S,
    kvq::affine<3, kvq::per_channel<64>, kvq::params<kvq::float16>, error_feedback<min_max>>,
    kvq::affine<3, kvq::per_channel<64>, kvq::byte_params, error_feedback<min_max>>,
    kvq::mixed_affine<kvq::code_widths<4, 2, 0>, kvq::average_eighths<24>, kvq::per_channel<64>,
                      kvq::byte_params, error_feedback<kvq::least_squares_below_3_bits>>) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const int dim : {16, 48, 64}) {
        const auto all = correlated_queries(random, 4000, dim);
        kvq::calibration with({1, 1, dim}, true), without({1, 1, dim});
        for (kvq::calibration* s : {&with, &without}) s->add_queries(0, all.slice(0, 3900));
        test::tensor<float> fresh(100, 1, dim);
        for (int t = 0; t < 100; ++t)
            for (int c = 0; c < dim; ++c) fresh.view().at(t, 0)[c] = all.slice(3900 + t, 1).at(0, 0)[c];
        const kvq::block_shape shape{kvq::tensor::key, 64, dim};
        const auto x = test::random_block(random, shape);
        const S plain(without), fed(with);
        CHECK(plain.name() == fed.name());
        CHECK(plain.block_bytes(shape) == fed.block_bytes(shape));
        const double a =
            logit_error(fresh, x, test::dequantized(plain, shape, test::quantized(plain, shape, x)), 64, dim);
        const double b =
            logit_error(fresh, x, test::dequantized(fed, shape, test::quantized(fed, shape, x)), 64, dim);
        INFO(dim, " channels: ", a, " -> ", b);
        CHECK(b < 0.7 * a);
    }
}

TEST_CASE("independent queries have nothing to feed back: the same bytes") {
    const kvq::cache_shape one{.layers = 1, .kv_heads = 1, .head_dim = 8};
    kvq::calibration statistics(one, true);
    // Every pair of channels meets with both signs: all products beside the diagonal are zero.
    std::vector<float> q(8 * 8, 0.0f);
    for (int i = 0; i < 8; ++i) q[static_cast<std::size_t>(i * 8 + i)] = 1.0f + static_cast<float>(i);
    statistics.add_queries(0, kvq::token_view<const float>(q.data(), 8, 1, 8));
    using S = kvq::affine<3, kvq::per_channel<>, kvq::byte_params, error_feedback<min_max>>;
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::block_shape shape{kvq::tensor::key, 40, 8};
    const auto x = test::hostile_block(random, shape);
    CHECK(test::quantized(S(statistics), shape, x) == test::quantized(S{}, shape, x));
    CHECK(test::quantized(S(statistics), shape, x) ==
          test::quantized(kvq::affine<3, kvq::per_channel<>, kvq::byte_params, kvq::min_max>{}, shape, x));
}

TEST_CASE("an encoder for the time without matrices, another one with them") {
    using kvq::least_squares;
    using both = kvq::affine<2, kvq::per_channel<>, kvq::byte_params, error_feedback<min_max, least_squares>>;
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    kvq::calibration statistics({1, 1, 16}, true), diagonal({1, 1, 16});
    const auto q = correlated_queries(random, 500, 16);
    for (kvq::calibration* c : {&statistics, &diagonal}) c->add_queries(0, q.view());
    const kvq::block_shape shape{kvq::tensor::key, 64, 16};
    const auto x = test::random_block(random, shape);
    const auto squares =
        test::quantized(kvq::affine<2, kvq::per_channel<>, kvq::byte_params, least_squares>{}, shape, x);
    CHECK(test::quantized(both{}, shape, x) == squares);
    CHECK(test::quantized(both(diagonal), shape, x) == squares);
    CHECK(test::quantized(both(statistics), shape, x) ==
          test::quantized(
              kvq::affine<2, kvq::per_channel<>, kvq::byte_params, error_feedback<min_max>>(statistics),
              shape, x));
    CHECK(test::quantized(both(statistics), shape, x) != squares);
}

TEST_CASE("values are left alone") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const auto q = correlated_queries(random, 2000, 16);
    kvq::calibration statistics({1, 1, 16}, true);
    statistics.add_queries(0, q.view());
    using S = kvq::affine<3, kvq::per_channel<>, kvq::byte_params, error_feedback<min_max>>;
    for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
        const kvq::block_shape shape{role, 32, 16};
        const auto x = test::random_block(random, shape);
        CHECK((test::quantized(S(statistics), shape, x) == test::quantized(S{}, shape, x)) ==
              (role == kvq::tensor::value));
    }
}

TEST_CASE("feedback needs products, positive damping and a plan of its shape") {
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 8};
    const kvq::calibration diagonal(shape), full(shape, true);
    CHECK_THROWS_AS(kvq::feedback_matrices{diagonal}, kvq::error);
    CHECK_THROWS_AS((kvq::feedback_matrices{full, nullptr, 0.0}), kvq::error);
    const kvq::width_plan plan{2, 16, {}};
    CHECK_THROWS_AS((kvq::feedback_matrices{full, &plan}), kvq::error);
    // No queries: no matrices, nothing changes.
    const kvq::feedback_matrices none{full};
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 8; ++j) CHECK(none.row({0, 1}, 8, i)[j] == 0.0f);
    CHECK(none.row({0, 2}, 8, 0) == nullptr);
    CHECK(none.row({0, 0}, 7, 0) == nullptr);
}

}  // namespace error_feedback_tests
