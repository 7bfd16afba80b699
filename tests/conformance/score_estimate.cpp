// SPDX-License-Identifier: MIT
// Comparison family: double arithmetic. Estimates of scores from parameters alone: with spread 1 they bound
// every score, and those of vectors agree with portable ones. Built for several -march.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/presets.hpp>

#include "support/channel_plans.hpp"
#include "support/quantized_blocks.hpp"
#include "support/scheme_list.hpp"
#include "support/typed_cache.hpp"

namespace score_estimate_tests {

namespace {

using token_scaled =
    kvq::affine<4, kvq::per_channel<32>, kvq::byte_params, kvq::min_max, kvq::token_scales<kvq::byte_params>>;

/// dim: of all blocks; 0: any.
void check_estimates(test::generator& random, const kvq::format& portable, const kvq::format& vectors,
                     int dim_of_all = 0) {
    REQUIRE((portable.functions().estimate_scores != nullptr));
    REQUIRE((vectors.functions().estimate_scores != nullptr));
    for (int round = 0; round < test::rounds(25); ++round) {
        const kvq::block_shape shape{
            kvq::tensor::key, random.pick(std::vector<int>{1, 4, 7, 32, 64, 100, 128}),
            dim_of_all > 0 ? dim_of_all : random.pick(std::vector<int>{1, 3, 8, 16, 40, 64, 80, 128, 130})};
        const int rows = random.between(1, 9), dim = shape.dim;
        const kvq::block_id id{0, 0};
        std::vector<float> values = random.normals(shape.values(), random.any_magnitude(-6, 6));
        for (float& x : values) {
            if (random.one_in(50)) x *= 30.0f;
            if (random.one_in(200))
                x = random.one_in(2) ? std::nanf("") : std::numeric_limits<float>::infinity();
        }
        if (round % 5 == 4) std::fill(values.begin(), values.end(), 0.0f);
        std::vector<std::byte> block(portable.block_bytes(shape) + 64);
        std::vector<float> copy = values, scratch(shape.values());
        const kvq::format_functions& f = portable.functions();
        f.quantize_values(portable.scheme(), shape, id, copy.data(), block.data());
        if (f.estimates_first) {  // the block holds the bounds
            copy = values;
            std::vector<std::byte> same(block.size());
            vectors.functions().quantize_values(vectors.scheme(), shape, id, copy.data(), same.data());
            CHECK(same == block);
        }
        std::vector<float> keys(shape.values());
        f.dequantize(portable.scheme(), shape, id, block.data(), kvq::float_type::fp32, keys.data(), dim,
                     scratch.data());
        const std::vector<float> q = random.normals(static_cast<std::size_t>(rows * dim), 2.0f);
        std::vector<float> turned = q;
        if (f.transforms && !f.estimates_first)
            f.transform_query(portable.scheme(), shape, id, turned.data(), dim, rows);
        const int first = random.between(0, shape.tokens - 1), end = random.between(first + 1, shape.tokens);
        const float spread = random.one_in(2) ? 1.0f : random.uniform();
        std::vector<float> estimates[2];
        for (const kvq::format* of : {&portable, &vectors}) {
            std::vector<float> out(static_cast<std::size_t>(rows), -7.0f);
            std::vector<float> space(of->functions().estimate_floats(of->scheme(), shape));
            of->functions().estimate_scores(of->scheme(), shape, id, block.data(), turned.data(), dim, rows,
                                            first, end, spread, out.data(), 0, space.data());
            estimates[of == &vectors] = out;
        }
        INFO("round ", round, ": ", shape.tokens, " x ", dim, ", tokens ", first, " to ", end, ", spread ",
             spread);
        for (int i = 0; i < rows; ++i) {
            double terms = 1e-30, largest = -std::numeric_limits<double>::infinity();
            for (int t = first; t < end; ++t) {
                double score = 0.0, size = 0.0;
                for (int c = 0; c < dim; ++c) {
                    const double term = static_cast<double>(q[static_cast<std::size_t>(i * dim + c)]) *
                                        static_cast<double>(keys[static_cast<std::size_t>(t * dim + c)]);
                    score += term;
                    size += std::fabs(term);
                }
                largest = std::fmax(largest, score);
                terms = std::fmax(terms, size);
            }
            const auto at = static_cast<std::size_t>(i);
            const double a = static_cast<double>(estimates[0][at]), b = static_cast<double>(estimates[1][at]);
            CHECK(std::isfinite(a));
            // Terms of the bound are as large as those of the scores, and half a range more.
            CHECK(std::fabs(a - b) <= 1e-5 * (std::fabs(a) + 10.0 * terms));
            if (spread == 1.0f) CHECK(a >= largest - 1e-5 * terms);
        }
    }
}

template <class Scheme>
void check_scheme(const Scheme& scheme) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    check_estimates(random, test::made<kvq::scalar>(scheme), test::made<kvq::simd<>>(scheme));
}

}  // namespace

#if defined(KVQ_TEST_FEWER_SCHEMES)
#define KVQ_TEST_ESTIMATED \
    kvq::affine<3 KVQ_COMMA kvq::per_channel<7> KVQ_COMMA kvq::params<kvq::bfloat16>>, token_scaled
#else
#define KVQ_TEST_ESTIMATED                                                                                \
    kvq::affine<1 KVQ_COMMA kvq::per_channel<32>>,                                                        \
        kvq::affine<3 KVQ_COMMA kvq::per_channel<7> KVQ_COMMA kvq::params<kvq::bfloat16>>,                \
        test::symmetric_scheme<4 KVQ_COMMA kvq::per_channel<32> KVQ_COMMA kvq::float16>, kvq::std4::keys, \
        kvq::low2::keys, token_scaled, kvq::hadamard<kvq::affine<4 KVQ_COMMA kvq::per_channel<32>>>
#endif

TEST_CASE_TEMPLATE("estimates bound the scores of keys with parameters of channels", Scheme,
                   KVQ_TEST_ESTIMATED) {
    check_scheme(Scheme{});
}

TEST_CASE_TEMPLATE("estimates of keys with a plan of widths", Scheme, kvq::low2::keys) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const int dim : {8, 64, 96}) {
        const auto statistics = test::random_statistics(random, {1, 1, dim});
        check_estimates(random, test::made<kvq::scalar>(Scheme(statistics)),
                        test::made_from<kvq::simd<>, Scheme>(statistics), dim);
    }
}

TEST_CASE_TEMPLATE("stored bounds of keys without parameters of channels", Scheme, kvq::int8, kvq::affine<3>,
                   kvq::hadamard<kvq::affine<4>>, test::magnitude_bytes) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const auto scheme = test::make_scheme<Scheme>();
    check_estimates(random, kvq::with_bounds(test::made<kvq::scalar>(scheme)),
                    kvq::with_bounds(test::made<kvq::simd<>>(scheme)));
}

TEST_CASE("stored bounds of 16- and 32-bit keys: zeros, values beyond fp16, infinities and NaN") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const std::vector<float> special{0.0f,  -0.0f, 1e-10f, -1e-10f,  65504.0f,  -65504.0f,     65505.0f,
                                     -1e5f, 3e38f, -3e38f, infinity, -infinity, std::nanf(""), 1.0009f};
    const auto check = [&]<class Scheme>(const Scheme& scheme) {
        const kvq::format formats[] = {kvq::with_bounds(test::made<kvq::scalar>(scheme)),
                                       kvq::with_bounds(test::made<kvq::simd<>>(scheme))};
        for (int round = 0; round < test::rounds(25); ++round) {
            const kvq::block_shape shape{kvq::tensor::key, random.pick(std::vector<int>{1, 2, 7, 32}),
                                         random.pick(std::vector<int>{1, 3, 8, 40, 64, 67})};
            const auto dim = static_cast<std::size_t>(shape.dim);
            std::vector<float> values(shape.values());
            for (std::size_t i = 0; i < values.size(); ++i)
                values[i] = round % 3 == 0 ? random.normal()
                                           : random.pick(special) * (random.one_in(2) ? 1.0f : -1.0f);
            std::vector<std::byte> blocks[2];
            std::vector<float> keys(values.size());
            for (int i = 0; i < 2; ++i) {
                const kvq::format& f = formats[i];
                std::vector<float> copy = values;
                blocks[i].assign(f.block_bytes(shape), std::byte{0xcd});
                f.functions().quantize_values(f.scheme(), shape, {}, copy.data(), blocks[i].data());
                f.functions().dequantize(f.scheme(), shape, {}, blocks[i].data(), kvq::float_type::fp32,
                                         keys.data(), shape.dim, copy.data());
            }
            CHECK(blocks[0] == blocks[1]);
            const std::size_t inner = Scheme{}.block_bytes(shape);
            REQUIRE(blocks[0].size() == inner + kvq::detail::round_up(4 * dim, std::size_t{16}));
            for (std::size_t c = 0; c < dim; ++c) {
                const auto bound = [&](std::size_t at) {
                    return static_cast<float>(
                        kvq::detail::load_as<kvq::float16>(blocks[0].data() + inner + 2 * at));
                };
                const float low = bound(c), high = bound(dim + c);
                float least = infinity, most = -infinity;
                bool finite = true;
                for (std::size_t t = 0; t < static_cast<std::size_t>(shape.tokens); ++t) {
                    const float x = keys[t * dim + c];
                    finite = finite && kvq::detail::is_finite(x);
                    least = std::fmin(least, x);
                    most = std::fmax(most, x);
                }
                INFO("channel ", c, ": ", least, " to ", most, ", bounds ", low, " to ", high);
                if (!finite) {
                    CHECK(low == -infinity);
                    CHECK(high == infinity);
                    continue;
                }
                CHECK(low <= least);
                CHECK(high >= most);
                // Rounded once.
                if (std::fabs(least) <= 65504.0f)
                    CHECK(least - low <= std::fmax(0x1p-24f, std::fabs(least) * 0x1p-10f));
                if (std::fabs(most) <= 65504.0f)
                    CHECK(high - most <= std::fmax(0x1p-24f, std::fabs(most) * 0x1p-10f));
            }
        }
    };
    check(kvq::full<kvq::float16>{});
    check(kvq::full<float>{});
}

TEST_CASE("formats without parameters of channels have no estimate") {
    const auto estimated = [](const kvq::format& f) { return f.functions().estimate_scores != nullptr; };
    CHECK(!estimated(test::made<kvq::scalar>(kvq::affine<4>{})));
    CHECK(!estimated(test::made<kvq::scalar>(kvq::int8{})));
    CHECK(!estimated(test::made<kvq::scalar>(kvq::full<kvq::float16>{})));
    CHECK(!estimated(test::made<kvq::scalar>(test::make_scheme<test::magnitude_bytes>())));
}

}  // namespace score_estimate_tests
