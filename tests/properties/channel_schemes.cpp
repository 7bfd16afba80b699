// SPDX-License-Identifier: MIT
// Comparison family: half a step of the stored parameters, and what the encoders promise beyond
// (quant/encoders.hpp).
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/affine.hpp>

#include "support/blocks.hpp"

namespace channel_schemes_tests {

namespace {

using kvq::byte_params;
using kvq::enclosing;
using kvq::float16;
using kvq::least_squares;
using kvq::mean_corrected;
using kvq::min_max;
using kvq::no_token_scales;
using kvq::packed_params;
using kvq::params;
using kvq::token_scales;

/// A channel of one group: what went in (divided by the factors of its tokens), what came out, and the stored
/// parameters.
struct channel {
    std::vector<double> y, dequantized, factor;
    double scale, bias, bias_step;
};

/// Magnitudes as the scheme limits them; what is not finite is left out.
template <class S, class Check>
void for_each_channel(const S& scheme, const kvq::block_shape& shape, const std::vector<float>& x,
                      const std::vector<std::byte>& block, Check check) {
    using loads = kvq::detail::plain_loads;
    const auto z = test::dequantized(scheme, shape, block);
    const kvq::grouped_axis tokens = typename S::layout_type().cut(shape);
    const auto slot_count = static_cast<std::size_t>(typename S::layout_type().slot_count(shape));
    std::vector<float> scales(slot_count), biases(slot_count),
        factors(static_cast<std::size_t>(tokens.padded_size()), 1.0f);
    if constexpr (S::token_scale_type::present)
        S::token_scale_type::template load<loads>(block.data() + scheme.layout().token_scale_offset(shape),
                                                  tokens.padded_size(), factors.data());
    for (int g = 0; g < tokens.groups(); ++g) {
        scheme.template load<loads>(shape, block.data(), g, scales.data(), biases.data());
        double step = 0;
        if constexpr (std::is_same_v<typename S::parameters, kvq::block_parameters<byte_params>>)
            step = static_cast<double>(static_cast<float>(kvq::detail::load_as<kvq::bfloat16>(
                block.data() + scheme.layout().scale_offset(shape) +
                2 * slot_count * static_cast<std::size_t>(tokens.groups()) + 6 * static_cast<std::size_t>(g) +
                4)));
        for (int c = 0; c < shape.dim; ++c) {
            channel out{{},
                        {},
                        {},
                        static_cast<double>(scales[static_cast<std::size_t>(c)]),
                        static_cast<double>(biases[static_cast<std::size_t>(c)]),
                        step};
            for (int t = g * tokens.group; t < g * tokens.group + tokens.group_size(g); ++t) {
                const auto i = static_cast<std::size_t>(t * shape.dim + c);
                if (!std::isfinite(x[i])) continue;
                const auto r = static_cast<double>(factors[static_cast<std::size_t>(tokens.slot(t))]);
                out.y.push_back(std::clamp(static_cast<double>(x[i]), -0x1p100, 0x1p100) / r);
                out.dequantized.push_back(static_cast<double>(z[i]) / r);
                out.factor.push_back(r);
            }
            if (!out.y.empty()) check(out);
        }
    }
}

/// What float arithmetic adds to one number: division by the factor, subtraction, product, and two roundings
/// on the way back.
template <class S>
double evaluation(const channel& ch, double y) {
    return 0x1p-23 * (std::fabs(y) + 2 * std::fabs(ch.bias) + 2 * ch.scale * S::top) + 0x1p-120;
}

}  // namespace

#define KVQ_ENCLOSING_GRIDS                                                                                  \
    kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, enclosing>,                                       \
        kvq::affine<2, kvq::per_channel<>, byte_params, enclosing, token_scales<byte_params>>,               \
        kvq::affine<3, kvq::per_channel<7>, packed_params<float>, enclosing, token_scales<params<float16>>>, \
        kvq::affine<8, kvq::per_channel<32>, kvq::byte_params, enclosing>

TEST_CASE_TEMPLATE("enclosing: |x - x^| <= factor * scale / 2", S, KVQ_ENCLOSING_GRIDS) {
    const S scheme;
    test::for_random_shapes(scheme, 60, 140, [&](test::generator& random, const kvq::block_shape& shape) {
        const auto x =
            random.one_in(2) ? test::hostile_block(random, shape) : test::random_block(random, shape);
        int too_far = 0;
        for_each_channel(scheme, shape, x, test::quantized(scheme, shape, x), [&](const channel& ch) {
            for (std::size_t i = 0; i < ch.y.size(); ++i)
                too_far +=
                    !(std::fabs(ch.y[i] - ch.dequantized[i]) <= ch.scale / 2 + evaluation<S>(ch, ch.y[i]));
        });
        CHECK(too_far == 0);
    });
}

TEST_CASE_TEMPLATE("min_max: half a step and what rounding stored parameters to nearest cuts off", S,
                   kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::min_max>,
                   kvq::affine<3, kvq::per_channel<>, byte_params, min_max, token_scales<byte_params>>,
                   kvq::affine<8, kvq::per_channel<5>, kvq::byte_params, kvq::min_max>) {
    const S scheme;
    test::for_random_shapes(scheme, 40, 140, [&](test::generator& random, const kvq::block_shape& shape) {
        const auto x =
            random.one_in(2) ? test::hostile_block(random, shape) : test::random_block(random, shape);
        int too_far = 0;
        for_each_channel(scheme, shape, x, test::quantized(scheme, shape, x), [&](const channel& ch) {
            const auto [lo, hi] = std::minmax_element(ch.y.begin(), ch.y.end());
            const double cut = std::fmax(ch.bias_step / 2, (*hi - ch.bias) / 64);
            for (const double& y : ch.y) {
                const double dequantized = ch.dequantized[static_cast<std::size_t>(&y - ch.y.data())];
                too_far += !(std::fabs(y - dequantized) <= ch.scale / 2 + cut + evaluation<S>(ch, y));
            }
        });
        CHECK(too_far == 0);
    });
}

TEST_CASE_TEMPLATE(
    "mean_corrected: errors of a channel average to at most half a step of biases", S,
    kvq::affine<2, kvq::per_channel<64>, kvq::byte_params, mean_corrected<least_squares>>,
    kvq::affine<2, kvq::per_channel<>, byte_params, mean_corrected<min_max>, token_scales<byte_params>>,
    kvq::affine<4, kvq::per_channel<33>, packed_params<float>, mean_corrected<enclosing>>) {
    const S scheme;
    test::for_random_shapes(scheme, 40, 140, [&](test::generator& random, const kvq::block_shape& shape) {
        const auto x = test::random_block(random, shape);
        int too_far = 0;
        for_each_channel(scheme, shape, x, test::quantized(scheme, shape, x), [&](const channel& ch) {
            double error = 0, slack = 0;
            for (std::size_t i = 0; i < ch.y.size(); ++i) {
                error += ch.y[i] - ch.dequantized[i];
                slack += 4 * evaluation<S>(ch, ch.y[i]);
            }
            too_far += !(std::fabs(error) <= ch.bias_step / 2 * static_cast<double>(ch.y.size()) + slack);
        });
        CHECK(too_far == 0);
    });
}

TEST_CASE_TEMPLATE(
    "any input: every byte written, the same from every backend, finite numbers back", S,
    kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::error_feedback<min_max>>,
    kvq::affine<2, kvq::per_channel<>, byte_params, mean_corrected<least_squares>, token_scales<byte_params>>,
    kvq::affine<7, kvq::per_channel<5>, packed_params<float16>, kvq::shrink_search,
                token_scales<params<float16>>>) {
    const S scheme;
    test::for_random_shapes(scheme, 40, 140, [&](test::generator& random, const kvq::block_shape& shape) {
        auto x = test::hostile_block(random, shape);
        const kvq::full<float> full;
        std::vector<std::byte> window(full.block_bytes(shape));
        full.quantize(shape, {}, x.data(), window.data());
        const std::size_t bytes = scheme.block_bytes(shape);
        CHECK(bytes % 16 == 0);
        std::uint32_t counted = 0;
        const auto block = test::quantized(scheme, shape, x, &counted);
        CHECK(counted == std::count_if(x.begin(), x.end(), [](float v) { return !std::isfinite(v); }));
        const auto y = test::dequantized(scheme, shape, block);
        CHECK(std::all_of(y.begin(), y.end(), [](float v) { return std::isfinite(v); }));
        const auto with = [&]<class Backend>(Backend) {
            std::vector<std::byte> out(bytes + 64, std::byte{0x32});
            std::vector<float> scratch(shape.values());
            CHECK(Backend::quantize(scheme, shape, {}, kvq::float_type::fp32, window.data(), out.data(),
                                    scratch.data()) == counted);
            CHECK(std::equal(block.begin(), block.end(), out.begin()));
            CHECK(std::count(out.end() - 64, out.end(), std::byte{0x32}) == 64);
        };
        with(kvq::scalar{});
        with(kvq::simd<>{});
    });
}

TEST_CASE("searches never leave more squared error than the range does") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 300; ++round) {
        const int n = random.between(1, 200), top = (1 << random.between(1, 8)) - 1;
        auto x = random.normals(static_cast<std::size_t>(n));
        if (random.one_in(3)) x[0] *= 20.0f;
        std::vector<float> codes(x.size());
        const auto error = [&](const kvq::grid_range& r) {
            return kvq::detail::code_on_grid(x.data(), n, r, top, codes.data());
        };
        const double range = error(min_max::fit(x.data(), n, top, codes.data()));
        const double search = error(kvq::shrink_search::fit(x.data(), n, top, codes.data()));
        const double refit = error(least_squares::fit(x.data(), n, top, codes.data()));
        CHECK(search <= range);
        CHECK(refit <= search);
    }
}

TEST_CASE("a scale per token keeps tokens of any size as precise as the others") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::affine<4, kvq::per_channel<>, byte_params, min_max, token_scales<byte_params>> dual;
    for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
        const kvq::block_shape shape{role, 64, 64};
        auto x = test::random_block(random, shape);
        std::vector<double> size(64);
        for (int t = 0; t < 64; ++t) {
            const float factor = std::exp2(-static_cast<float>(t % 13));
            for (int c = 0; c < 64; ++c) {
                float& v = x[static_cast<std::size_t>(t * 64 + c)];
                v *= factor;
                size[static_cast<std::size_t>(t)] += static_cast<double>(v) * static_cast<double>(v);
            }
        }
        const auto y = test::dequantized(dual, shape, test::quantized(dual, shape, x));
        for (int t = 0; t < 64; ++t) {
            double error = 0;
            for (int c = 0; c < 64; ++c) {
                const auto i = static_cast<std::size_t>(t * 64 + c);
                error += std::pow(static_cast<double>(x[i] - y[i]), 2.0);
            }
            // 16 levels over at most +-4 standard deviations, rounded: 0.15; twice that for factors that are
            // not exact.
            CHECK(std::sqrt(error / size[static_cast<std::size_t>(t)]) < 0.3);
        }
    }
}

TEST_CASE_TEMPLATE(
    "zero is zero, and one constant everywhere is nearly exact", S,
    kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::min_max>,
    kvq::affine<2, kvq::per_channel<>, byte_params, mean_corrected<least_squares>, token_scales<byte_params>>,
    kvq::affine<8, kvq::per_channel<>, packed_params<float16>, min_max, token_scales<params<float16>>>) {
    const S scheme;
    INFO(scheme.name());
    for (const float value : {0.0f, 1.0f, -2.5f, 1000.0f, 1e-6f}) {
        const kvq::block_shape shape{kvq::tensor::value, 50, 30};
        const std::vector<float> x(shape.values(), value);
        for (const float y : test::dequantized(scheme, shape, test::quantized(scheme, shape, x)))
            CHECK(std::fabs(y - value) <= std::fabs(value) * 0x1p-8f + (value == 0.0f ? 0.0f : 0x1p-24f));
    }
}

TEST_CASE("blocks beyond 1024 tokens or channels are refused") {
    const kvq::affine<4, kvq::per_channel<>, kvq::byte_params, kvq::min_max> scheme;
    CHECK(scheme.block_bytes({kvq::tensor::key, 1024, 1024}) > 0);
    CHECK_THROWS_AS(scheme.block_bytes({kvq::tensor::key, 1025, 64}), kvq::error);
    CHECK_THROWS_AS(scheme.block_bytes({kvq::tensor::value, 64, 1025}), kvq::error);
}

TEST_CASE_TEMPLATE(
    "value() is what dequantize() gives", S,
    kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::min_max>,
    kvq::affine<5, kvq::per_channel<20>, byte_params, min_max, token_scales<byte_params>>,
    kvq::affine<8, kvq::per_channel<>, packed_params<float16>, min_max, token_scales<params<float16>>>) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 20; ++round) {
        const auto shape = test::random_shape(random, 140);
        INFO(shape);
        const auto block = test::quantized(S{}, shape, test::hostile_block(random, shape));
        const auto dequantized = test::dequantized(S{}, shape, block);
        int differ = 0;
        for (int t = 0; t < shape.tokens; ++t)
            for (int c = 0; c < shape.dim; ++c)
                differ += S::value(shape, block.data(), t, c) !=
                          dequantized[static_cast<std::size_t>(t * shape.dim + c)];
        CHECK(differ == 0);
    }
}

}  // namespace channel_schemes_tests
