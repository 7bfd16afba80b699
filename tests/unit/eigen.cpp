// SPDX-License-Identifier: MIT
// Comparison family: exact. Eigen matrices are tokens in and tokens out, in either storage order, without a
// copy.
#include <doctest/doctest.h>

#include <kvq/adapters/eigen.hpp>

#include "support/caches.hpp"

namespace eigen_tests {

namespace {

constexpr kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 6};
constexpr int tokens = 20, features = 12;
using window_cache = test::typed_cache<kvq::full<float>, kvq::full<float>, test::usual, float>;

template <class Matrix>
Matrix filled(int rows, int cols, unsigned seed) {
    test::generator random(seed);
    Matrix m(rows, cols);
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < cols; ++j) m(i, j) = typename Matrix::Scalar(random.normal());
    return m;
}

}  // namespace

TEST_CASE_TEMPLATE("a token is a row of a row-major matrix and a column of a column-major one", T, float,
                   Eigen::half, Eigen::bfloat16) {
    using row_major = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    using col_major = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>;
    const row_major rows = filled<row_major>(tokens, features, 1);
    const col_major cols = rows.transpose();
    const auto check = [&](const auto& view, int first = 0) {
        static_assert(std::is_const_v<std::remove_pointer_t<decltype(view.data)>>);
        REQUIRE(view.heads == 2);
        REQUIRE(view.dim == 6);
        for (int t = 0; t < view.tokens; ++t)
            for (int h = 0; h < 2; ++h)
                for (int c = 0; c < 6; ++c)
                    REQUIRE(static_cast<float>(view.at(t, h)[c]) ==
                            static_cast<float>(rows(first + t, h * 6 + c)));
    };
    const auto whole = kvq::tokens_of(rows, 2);
    CHECK(whole.tokens == tokens);
    CHECK(static_cast<const void*>(whole.data) == rows.data());
    check(whole);
    check(kvq::tokens_of(cols, 2));
    check(kvq::tokens_of(rows.middleRows(3, 7), 2), 3);
    check(kvq::tokens_of(cols.rightCols(5), 2), tokens - 5);
    const Eigen::Map<const row_major> map(rows.data(), tokens, features);
    check(kvq::tokens_of(map, 2));
    const Eigen::Ref<const col_major, 0, Eigen::OuterStride<>> ref(cols);
    check(kvq::tokens_of(ref, 2));
}

TEST_CASE("tokens go in from Eigen and come out into Eigen") {
    const auto k = filled<Eigen::MatrixXf>(features, tokens, 2),
               v = filled<Eigen::MatrixXf>(features, tokens, 3);
    window_cache cache(shape, {.page_tokens = 8});
    auto s = cache.new_sequence();
    s.append(0, kvq::tokens_of(k, 2), kvq::tokens_of(v, 2));

    Eigen::MatrixXf all = Eigen::MatrixXf::Constant(features, tokens, -1.0f);
    s.dequantize(0, kvq::tensor::key, 0, kvq::tokens_of(all, 2));
    CHECK(all == k);
    // Into part of a larger matrix, nothing beside it is touched.
    Eigen::MatrixXf larger = Eigen::MatrixXf::Constant(features + 4, tokens, -1.0f);
    s.dequantize(0, kvq::tensor::value, 5, kvq::tokens_of(larger.block(2, 1, features, 9), 2));
    CHECK(larger.block(2, 1, features, 9) == v.middleCols(5, 9));
    larger.block(2, 1, features, 9).setConstant(-1.0f);
    CHECK((larger.array() == -1.0f).all());
    // 16 bit.
    Eigen::Matrix<Eigen::half, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> half(tokens, features);
    s.dequantize(0, kvq::tensor::key, 0, kvq::tokens_of(half, 2));
    CHECK(half == k.transpose().cast<Eigen::half>());

    // Attention: queries and outputs.
    const auto q = filled<Eigen::MatrixXf>(4 * 6, 3, 4);
    Eigen::MatrixXf out(4 * 6, 3);
    test::tensor<float> expected(3, 4, 6);
    s.attend(0, kvq::tokens_of(q, 4), kvq::tokens_of(out, 4));
    s.attend(0, kvq::token_view<const float>(q.data(), 3, 4, 6), expected.view());
    for (int t = 0; t < 3; ++t)
        for (int i = 0; i < 24; ++i) CHECK(out(i, t) == expected.view().at(t, 0)[i]);
}

TEST_CASE("matrices that are not tokens are refused") {
    Eigen::MatrixXf m(features, tokens);
    CHECK_THROWS_WITH_AS(kvq::tokens_of(m, 5), doctest::Contains("12 features per token cannot hold 5 heads"),
                         kvq::error);
    CHECK_THROWS_AS(kvq::tokens_of(m, 0), kvq::error);
    const Eigen::Map<Eigen::MatrixXf> huge(m.data(), 1, (Eigen::Index{1} << 32) + 2);
    CHECK_THROWS_WITH_AS(kvq::tokens_of(huge, 1),
                         doctest::Contains("4294967298 tokens x 1 features is too large"), kvq::error);
    const Eigen::Map<Eigen::MatrixXf, 0, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>> strided(
        m.data(), 4, 5, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>(features, 2));
    CHECK_THROWS_WITH_AS(kvq::tokens_of(strided, 1), doctest::Contains("stride is 2"), kvq::error);
}

}  // namespace eigen_tests
