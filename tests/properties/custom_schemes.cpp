// SPDX-License-Identifier: MIT
// The users' schemes of the tests do what they claim, so that what runs over them means something.
#include <doctest/doctest.h>

#include <cmath>

#include "support/blocks.hpp"
#include "support/scheme_list.hpp"

TEST_CASE_TEMPLATE("parameter types: P(float(p)) = p for every pattern", P, test::log8, test::float24) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int i = 0; i < 5000; ++i) {
        const P p(random.any_magnitude(-14, 14));
        const auto x = static_cast<float>(p);
        REQUIRE(static_cast<float>(P(x)) == x);
    }
    CHECK(static_cast<float>(P(0.0f)) == 0.0f);
}

TEST_CASE_TEMPLATE("product scheme: half a step of its two-factor grid", S, test::product_scheme<4>,
                   test::product_scheme<7>) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const S scheme;
    for (int round = 0; round < 20; ++round) {
        const auto shape = test::random_shape(random, 80);
        INFO(shape);
        auto x = test::random_block(random, shape);
        const auto y = test::dequantized(scheme, shape, test::quantized(scheme, shape, x));
        // Divided by its token's factor (the largest magnitude, rounded up to float16) a channel spans at most 2, plus
        // the rounding of its bias; log scales are at most 2^(1/8) too coarse.
        const double step = 2.0 * (1 + 0x1p-9) / S::top * std::exp2(0.125);
        for (int t = 0; t < shape.tokens; ++t) {
            double largest = 0;
            for (int c = 0; c < shape.dim; ++c)
                largest = std::fmax(
                    largest, std::fabs(static_cast<double>(x[static_cast<std::size_t>(t * shape.dim + c)])));
            for (int c = 0; c < shape.dim; ++c) {
                const auto i = static_cast<std::size_t>(t * shape.dim + c);
                REQUIRE(std::fabs(static_cast<double>(x[i]) - static_cast<double>(y[i])) <=
                        largest * (1 + 0x1p-9) * (step / 2 + 0x1p-20));
            }
        }
    }
}

TEST_CASE("direct scheme: half a step, whatever layer and head") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::magnitude_bytes scheme(0.0625f);
    for (int round = 0; round < 20; ++round) {
        const auto shape = test::random_shape(random, 80);
        const kvq::block_id id{random.between(0, 40), random.between(0, 40)};
        const auto x = test::random_block(random, shape);
        const auto y = test::dequantized(scheme, shape, test::quantized(scheme, shape, x, nullptr, id), id);
        for (std::size_t i = 0; i < x.size(); ++i) REQUIRE(std::fabs(x[i] - y[i]) <= 0.03125f);
    }
}
