// SPDX-License-Identifier: MIT
// Transforms in front of schemes: orthogonal, undone by dequantize, and attention cannot tell them from the
// dequantized values.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <kvq/kvq.hpp>
#include <kvq/schemes/transformed.hpp>
#include <numeric>

#include "baselines/centred.hpp"
#include "baselines/published.hpp"
#include "support/blocks.hpp"
#include "support/typed_cache.hpp"

namespace transforms_tests {

namespace {

/// The one kind that stays foldable when it is centred: factors on columns only.
using symmetric_channels = kvq::scheme<kvq::bits<5>, kvq::symmetric, kvq::per_channel<32>>;
static_assert(kvq::foldable<baselines::centred<symmetric_channels>> &&
              !kvq::foldable<baselines::centred<kvq::affine<4>>>);
/// Its base's requantize() knows nothing of means.
static_assert(kvq::detail::requantizing<kvq::std4::keys> &&
              !kvq::detail::requantizing<baselines::centred<kvq::std4::keys>> &&
              kvq::detail::requantizing<kvq::std4_h::keys>);

using requantized = kvq::low2::keys;
static_assert(kvq::detail::requantizing<requantized>);
/// A requantize() of its own goes with the quantize() that is inherited.
struct own_requantize : requantized {
    using attends_as = own_requantize;
    std::uint32_t requantize(const kvq::block_shape& s, const kvq::block_id& id, float* values,
                             float* scales_of_tokens, std::byte* block) const {
        return requantized::requantize(s, id, values, scales_of_tokens, block);
    }
};
static_assert(kvq::detail::requantizing<own_requantize>);
/// A quantize() of its own, whatever kind of function it is, does not go with the requantize() that is
/// inherited.
struct own_quantize : requantized {
    using attends_as = own_quantize;
    std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id& id, float* values,
                           std::byte* block) const {
        return requantized::quantize(s, id, values, block);
    }
};
struct static_quantize : requantized {
    using attends_as = static_quantize;
    static std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id& id, float* values,
                                  std::byte* block) {
        return requantized{}.quantize(s, id, values, block);
    }
};
struct template_quantize : requantized {
    using attends_as = template_quantize;
    template <class Value>
    std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id& id, Value* values,
                           std::byte* block) const {
        return requantized::quantize(s, id, values, block);
    }
};
struct overloaded_quantize : own_quantize {
    using attends_as = overloaded_quantize;
    using own_quantize::quantize;
    std::uint32_t quantize(const kvq::block_shape&, std::nullptr_t) const { return 0; }
};
static_assert(kvq::kv_scheme<own_quantize> && !kvq::detail::requantizing<own_quantize>);
static_assert(kvq::kv_scheme<static_quantize> && !kvq::detail::requantizing<static_quantize>);
static_assert(kvq::kv_scheme<template_quantize> && !kvq::detail::requantizing<template_quantize>);
static_assert(kvq::kv_scheme<overloaded_quantize> && !kvq::detail::requantizing<overloaded_quantize>);
/// Unless the scheme says that they belong together; a type derived from it has to say so again.
struct own_pair : template_quantize {
    using attends_as = own_pair;
    using requantizes_as = own_pair;
};
struct derived_from_pair : own_pair {
    using attends_as = derived_from_pair;
};
static_assert(kvq::detail::requantizing<own_pair> && !kvq::detail::requantizing<derived_from_pair>);

/// A random orthogonal matrix: Gram-Schmidt in double.
std::vector<float> random_rotation(test::generator& random, int n) {
    const auto dim = static_cast<std::size_t>(n);
    std::vector<std::vector<double>> rows;
    while (rows.size() < dim) {
        std::vector<double> row(dim);
        for (double& v : row) v = static_cast<double>(random.normal());
        for (int pass = 0; pass < 2; ++pass)
            for (const auto& r : rows) {
                const double along = std::inner_product(row.begin(), row.end(), r.begin(), 0.0);
                for (std::size_t i = 0; i < dim; ++i) row[i] -= along * r[i];
            }
        const double length = std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0));
        for (double& v : row) v /= length;
        rows.push_back(row);
    }
    std::vector<float> matrix;
    for (const auto& row : rows)
        for (const double v : row) matrix.push_back(static_cast<float>(v));
    return matrix;
}

template <class Transform>
void check_orthogonal(test::generator& random, const Transform& transform, int dim, const kvq::block_id& id) {
    INFO(transform.name(), " of ", dim);
    const auto a = random.normals(static_cast<std::size_t>(dim)),
               b = random.normals(static_cast<std::size_t>(dim));
    auto ta = a, tb = b;
    transform.forward(dim, id, ta.data());
    transform.forward(dim, id, tb.data());
    double plain = 0, turned = 0, size = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        plain += static_cast<double>(a[i]) * static_cast<double>(b[i]);
        turned += static_cast<double>(ta[i]) * static_cast<double>(tb[i]);
        size += std::fabs(static_cast<double>(a[i]) * static_cast<double>(b[i]));
    }
    // log2(dim) + 2 roundings of float per number; the matrix itself is rounded too.
    CHECK(std::fabs(plain - turned) <= 20 * 0x1p-24 * (size + 1) * std::sqrt(dim));
    transform.backward(dim, id, ta.data());
    for (std::size_t i = 0; i < a.size(); ++i) CHECK(std::fabs(a[i] - ta[i]) <= 40 * 0x1p-24f * 8);
}

}  // namespace

TEST_CASE("transforms keep products and are undone, for any number of channels") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const int dim : {1, 2, 3, 8, 48, 80, 96, 127, 128}) {
        const kvq::block_id id{random.between(0, 1), random.between(0, 2)};
        check_orthogonal(random, kvq::hadamard_transform<>{}, dim, id);
        check_orthogonal(random, kvq::hadamard_transform<32, 0>{}, dim, id);
        std::vector<float> matrices;
        for (int i = 0; i < 6; ++i) {
            const auto one = random_rotation(random, dim);
            matrices.insert(matrices.end(), one.begin(), one.end());
        }
        check_orthogonal(random, kvq::rotation(2, 3, dim, matrices), dim, id);
    }
}

TEST_CASE("Hadamard: blocks are the largest powers of two that fit, from the first channel on") {
    int wrong = 0;
    for (int dim = 1; dim <= 300; ++dim)
        for (const int largest : {0, 1, 8, 32, 256})
            for (int first = 0, n; first < dim; first += n) {
                for (n = 1; first + 2 * n <= dim && (largest == 0 || 2 * n <= largest);) n *= 2;
                for (int c = first; c < first + n; ++c)
                    wrong += kvq::detail::hadamard_block(dim, largest, c) != n;
            }
    CHECK(wrong == 0);
}

TEST_CASE("Hadamard: rows of the Sylvester matrix without signs; signs depend on seed, layer and head") {
    // The image of a unit vector is a column: (-1)^popcount(r & c) / sqrt(n).
    for (int c = 0; c < 16; ++c) {
        std::vector<float> x(16);
        x[static_cast<std::size_t>(c)] = 1.0f;
        kvq::hadamard_transform<0, 0>{}.forward(16, {}, x.data());
        for (int r = 0; r < 16; ++r)
            CHECK(x[static_cast<std::size_t>(r)] ==
                  (__builtin_popcount(static_cast<unsigned>(r & c)) % 2 ? -0.25f : 0.25f));
    }
    const auto image = [](auto transform, kvq::block_id id) {
        std::vector<float> x(64, 1.0f);
        transform.forward(64, id, x.data());
        return x;
    };
    const kvq::hadamard_transform<> one;
    CHECK(image(one, {0, 1}) == image(one, {0, 1}));
    CHECK(image(one, {0, 1}) != image(one, {1, 0}));
    CHECK(image(one, {0, 1}) != image(kvq::hadamard_transform<0, 2>{}, {0, 1}));
}

TEST_CASE("a matrix that is not orthogonal, too short, or missing is refused with its numbers") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    auto matrix = random_rotation(random, 8);
    const kvq::rotation fine(1, 1, 8, matrix);
    std::vector<float> x(8, 1.0f);
    CHECK_THROWS_WITH_AS(fine.forward(8, {0, 1}, x.data()), doctest::Contains("head 1 has no rotation"),
                         kvq::error);
    CHECK_THROWS_WITH_AS(fine.forward(6, {0, 0}, x.data()),
                         doctest::Contains("8 channels does not fit a block of 6"), kvq::error);
    const kvq::rotated<kvq::affine<4>> scheme(fine);
    using cache = test::typed_cache<test::formats<kvq::rotated<kvq::affine<4>>>,
                                    test::formats<kvq::rotated<kvq::affine<4>>>>;
    const auto make = [&](const kvq::cache_shape& shape) {
        cache(shape, {}, cache::key_table(scheme), cache::value_table(scheme));
    };
    CHECK_NOTHROW(make({1, 1, 8}));
    for (const kvq::cache_shape& shape : {kvq::cache_shape{2, 1, 8}, kvq::cache_shape{1, 2, 8},
                                          kvq::cache_shape{1, 1, 16}, kvq::cache_shape{1, 1, 8, 16}})
        CHECK_THROWS_WITH_AS(
            make(shape), doctest::Contains("a rotation of 1 layers, 1 heads and 8 channels in a cache of"),
            kvq::error);
    CHECK_THROWS_WITH_AS(kvq::rotation(1, 2, 8, matrix), doctest::Contains("has 128 values, got 64"),
                         kvq::error);
    for (int i = 0; i < 8; ++i) matrix[static_cast<std::size_t>(3 * 8 + i)] *= 1.01f;
    CHECK_THROWS_WITH_AS(kvq::rotation(1, 1, 8, matrix), doctest::Contains("rows 3 and 3"), kvq::error);
}

TEST_CASE_TEMPLATE("transformed<T, Inner> codes T x: its block is Inner's, its values are turned back", Inner,
                   kvq::affine<4>, kvq::kivi<3>::keys,
                   baselines::codebook_scheme<baselines::nf4, kvq::per_token<32>>) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::hadamard<Inner> scheme;
    for (int round = 0; round < 20; ++round) {
        const auto shape = test::random_shape(random, 96);
        const kvq::block_id id{random.between(0, 3), random.between(0, 3)};
        INFO(shape);
        auto x = random.one_in(2) ? test::hostile_block(random, shape) : test::random_block(random, shape);
        std::uint32_t counted = 0, wanted = 0;
        const auto block = test::quantized(scheme, shape, x, &counted, id);
        for (float& v : x)
            if (!std::isfinite(v)) ++wanted, v = 0.0f;
        CHECK(counted == wanted);
        for (int t = 0; t < shape.tokens; ++t)
            scheme.transform.forward(shape.dim, id, x.data() + t * shape.dim);
        CHECK(block == test::quantized(Inner{}, shape, x));
        auto y = test::dequantized(Inner{}, shape, block);
        for (int t = 0; t < shape.tokens; ++t)
            scheme.transform.backward(shape.dim, id, y.data() + t * shape.dim);
        CHECK(y == test::dequantized(scheme, shape, block, id));
    }
    static_assert(kvq::transforming<kvq::hadamard<Inner>> == kvq::foldable<Inner>);
}

TEST_CASE("an outlier channel costs groups of a token less behind a Hadamard transform") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::block_shape shape{kvq::tensor::key, 64, 64};
    auto x = test::random_block(random, shape);
    for (int t = 0; t < shape.tokens; ++t) x[static_cast<std::size_t>(t * shape.dim + 5)] *= 50.0f;
    const auto error = [&](const auto& scheme) {
        const auto y = test::dequantized(scheme, shape, test::quantized(scheme, shape, x));
        double sum = 0.0;
        for (std::size_t i = 0; i < x.size(); ++i)
            sum += std::pow(static_cast<double>(x[i]) - static_cast<double>(y[i]), 2);
        return sum;
    };
    using plain = kvq::affine<4, kvq::per_token<>>;
    CHECK(2 * error(kvq::hadamard<plain>{}) < error(plain{}));
}

TEST_CASE_TEMPLATE("centring: k^ = Inner(k - m) + m with the stored mean", Inner,
                   kvq::affine<4, kvq::per_token<32>>, symmetric_channels) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const baselines::centred<Inner> scheme;
    for (int round = 0; round < 20; ++round) {
        auto shape = test::random_shape(random, 96);
        shape.role = kvq::tensor::key;
        INFO(shape);
        // Small integers over a power of two: means, differences and shifts are exact.
        std::vector<float> x(shape.values());
        for (float& v : x) v = static_cast<float>(random.between(-64, 64)) / 16.0f;
        const auto block = test::quantized(scheme, shape, x);
        const auto y = test::dequantized(scheme, shape, block);
        auto rest = x;
        std::vector<float> mean(static_cast<std::size_t>(shape.dim));
        for (int c = 0; c < shape.dim; ++c) {
            double sum = 0.0;
            for (int t = 0; t < shape.tokens; ++t)
                sum += static_cast<double>(x[static_cast<std::size_t>(t * shape.dim + c)]);
            const float m = static_cast<float>(kvq::float16(static_cast<float>(sum / shape.tokens)));
            mean[static_cast<std::size_t>(c)] = m;
            for (int t = 0; t < shape.tokens; ++t) rest[static_cast<std::size_t>(t * shape.dim + c)] -= m;
        }
        const auto inner = test::dequantized(Inner{}, shape, test::quantized(Inner{}, shape, rest));
        for (std::size_t i = 0; i < x.size(); ++i)
            REQUIRE(y[i] == inner[i] + mean[i % static_cast<std::size_t>(shape.dim)]);
    }
}

}  // namespace transforms_tests
