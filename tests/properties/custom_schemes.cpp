// SPDX-License-Identifier: MIT
// The users' schemes of the tests do what they claim, so that what runs over them means something.
#include <doctest/doctest.h>

#include <cmath>

#include "support/blocks.hpp"
#include "support/messages.hpp"
#include "support/scheme_list.hpp"
#include "support/typed_cache.hpp"

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
        // Divided by its token's factor (the largest magnitude, rounded up to float16) a channel spans at
        // most 2, plus the rounding of its bias; log scales are at most 2^(1/8) too coarse.
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

namespace {

/// dequantize() counts codes from 0, attention from 1.
struct other_zero : test::product_scheme<4> {
    using attends_as = other_zero;
    static constexpr int zero_code = 1;
};
/// Attention swaps scales and biases of values.
struct other_parameters : test::product_scheme<4> {
    using attends_as = other_parameters;
    template <class Backend>
    void row_parameters(const kvq::block_shape& s, const kvq::block_id& id, const std::byte* block, int group,
                        float* scales, float* biases) const {
        product_scheme::row_parameters<Backend>(s, id, block, group, biases, scales);
        if (s.role == kvq::tensor::key) std::copy(biases, biases + s.rows(), scales);
    }
};
/// Lengths change by a factor: orthogonal with 1 alone.
template <int Percent>
struct stretched {
    static std::string name() { return "stretched"; }
    static std::uint64_t fingerprint() { return Percent; }
    static void forward(int dim, const kvq::block_id&, float* x) {
        for (int c = 0; c < dim; ++c) x[c] *= 0.01f * Percent;
    }
    static void backward(int dim, const kvq::block_id&, float* x) {
        for (int c = 0; c < dim; ++c) x[c] /= 0.01f * Percent;
    }
};
template <int Percent>
using behind_stretch = kvq::transformed<stretched<Percent>, kvq::affine<8, kvq::per_channel<>>>;

template <class Keys, class Values>
std::string refusal(const kvq::cache_shape& shape, const kvq::cache_options& options) {
    return test::message_of([&] {
        kvq::cache_options with = options;
        with.keys = kvq::make_format<Keys, kvq::scalar>();
        with.values = kvq::make_format<Values, kvq::scalar>();
        const kvq::cache cache(shape, with);
    });
}

}  // namespace

TEST_CASE("a cache refuses a scheme that attention reads differently from dequantize()") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using right = test::product_scheme<4>;
    for (int round = 0; round < 18; ++round) {
        kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = random.between(1, 130)};
        kvq::cache_options options{.page_tokens = 16 * random.between(1, 8)};
        if (round < 16) {  // few channels, whose sum could be near 0
            shape.head_dim = 1 + round;
            options.page_tokens = 64;
        }
        INFO(shape.head_dim, " channels, pages of ", options.page_tokens);
        CHECK(refusal<right, right>(shape, options).empty());
        CHECK(refusal<behind_stretch<100>, behind_stretch<100>>(shape, options).empty());
        CHECK(test::contains(refusal<other_zero, right>(shape, options),
                             "key format 0, product4, has attends_as"));
        CHECK(test::contains(refusal<right, other_zero>(shape, options), "value format 0, product4, has"));
        CHECK(test::contains(refusal<right, other_parameters>(shape, options),
                             "value format 0, product4, has"));
        CHECK(test::contains(refusal<behind_stretch<200>, right>(shape, options),
                             "stretched-affine8-channel-fp16, has attends_as"));
        CHECK(refusal<right, behind_stretch<200>>(shape, options).empty());  // sum p v is linear in v
    }
}
