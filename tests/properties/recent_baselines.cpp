// SPDX-License-Identifier: MIT
// Methods of 2026 in bench/baselines: their formulas written down once more in double, their bits counted,
// hostile values.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <kvq/cache/step_down.hpp>
#include <kvq/cpu/scalar.hpp>
#include <kvq/kvq.hpp>
#include <limits>
#include <numeric>

#include "baselines/block_gtq.hpp"
#include "baselines/octopus.hpp"
#include "baselines/oscar_spectral.hpp"
#include "baselines/progressive.hpp"
#include "baselines/token_normalized.hpp"
#include "support/blocks.hpp"
#include "support/caches.hpp"

namespace recent_baselines_tests {

namespace {

using kvq::tensor;
using normalized2 = baselines::token_normalized<kvq::affine<2, kvq::per_channel<32>>>;
using normalized4 = baselines::token_normalized<kvq::affine<4, kvq::per_channel<16>>>;

double bits_of(std::size_t bytes, const kvq::block_shape& s) {
    return 8.0 * static_cast<double>(bytes) / static_cast<double>(s.values());
}

double square_error(const std::vector<float>& x, const std::vector<float>& y) {
    double error = 0.0, power = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) {
        const double a = static_cast<double>(x[i]), b = static_cast<double>(y[i]);
        error += (a - b) * (a - b), power += a * a;
    }
    return error / power;
}

/// Statistics of queries and keys whose channels have these standard deviations.
kvq::calibration statistics_of(test::generator& random, const kvq::cache_shape& shape,
                               const std::vector<double>& deviation) {
    kvq::calibration statistics(shape, true);
    for (int layer = 0; layer < shape.layers; ++layer) {
        auto k = test::random_tensor(random, 256, shape.kv_heads, shape.head_dim),
             q = test::random_tensor(random, 256, 2 * shape.kv_heads, shape.head_dim);
        for (auto* x : {&k, &q})
            for (std::size_t i = 0; i < x->values().size(); ++i)
                x->values()[i] *= static_cast<float>(deviation[i % deviation.size()]);
        statistics.add_keys(layer, k.view());
        statistics.add_queries(layer, q.view());
    }
    return statistics;
}

}  // namespace

TEST_CASE("the bits of the methods, with everything counted") {
    const kvq::block_shape k128{tensor::key, 128, 128}, k64{tensor::key, 128, 64},
        v128{tensor::value, 128, 128};
    using namespace baselines;
    CHECK(bits_of(oscar_scaled<2>::keys().block_bytes(k128), k128) == 2 + 1 + 0.125);
    CHECK(bits_of(oscar_scaled<2>::keys().block_bytes(k64), k64) == 2 + 1 + 0.25);
    CHECK(bits_of(oscar_scaled<2, 64>::keys().block_bytes(k64), k64) == 2 + 0.5 + 0.25);
    CHECK(bits_of(oscar_scaled<2>::values().block_bytes(v128), v128) == 3);
    CHECK(bits_of(oscar_spectral<2>::values().block_bytes(v128), v128) == 2.25);
    CHECK(bits_of(oscar_spectral<2>::keys_without_statistics().block_bytes(k64), k64) == 2.5);
    CHECK(bits_of(octopus<2>::keys().block_bytes(k128), k128) ==
          doctest::Approx((43 * 7 + 32) / 128.0).epsilon(1e-9));
    CHECK(bits_of(octopus<4>::keys().block_bytes(k64), k64) ==
          doctest::Approx((22 * 13 + 32) / 64.0).epsilon(1e-9));
    CHECK(bits_of(block_gtq_keys<3>().block_bytes(k64), k64) == 3.25);
    CHECK(bits_of(progressive_kivi<2, 8, 4>::keys().block_bytes(k64), k64) == 2.5);

    // A group of Block-GTQ has a length of its own; every block has room for as many as the head with the
    // most.
    test::generator random(3);
    std::vector<double> deviation(64);
    for (std::size_t i = 0; i < 64; ++i) deviation[i] = std::exp2(-0.25 * static_cast<double>(i % 32));
    const block_gtq_keys<3> planned(statistics_of(random, {2, 2, 64}, deviation));
    REQUIRE(planned.plan() != nullptr);
    CHECK(planned.plan()->groups() > 2);
    CHECK(bits_of(planned.block_bytes(k64), k64) == 3 + 16.0 * planned.plan()->groups() / 64);
}

TEST_CASE_TEMPLATE("OScaR: tokens of one length, then channels; at most half a step off", S, normalized2,
                   normalized4) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const S scheme;
    constexpr int group = S::code_bits == 2 ? 32 : 16, top = (1 << S::code_bits) - 1;
    for (int round = 0; round < 6; ++round) {
        const kvq::block_shape shape{tensor::key, random.between(1, 70), random.between(1, 40)};
        INFO(shape);
        auto x = random.normals(shape.values(), random.any_magnitude(-3, 3));
        for (int t = 0; t < shape.tokens; ++t)  // token norms that differ
            for (int c = 0; c < shape.dim; ++c)
                x[static_cast<std::size_t>(t * shape.dim + c)] *=
                    t % 5 == 0 ? 0.01f : 1.0f + static_cast<float>(t % 3);
        const auto y = test::dequantized(scheme, shape, test::quantized(scheme, shape, x));
        const auto at = [&](int t, int c) { return static_cast<std::size_t>(t * shape.dim + c); };
        std::vector<double> length;
        for (int t = 0; t < shape.tokens; ++t) {
            double squares = 0.0;
            for (int c = 0; c < shape.dim; ++c) squares += std::pow(static_cast<double>(x[at(t, c)]), 2);
            length.push_back(static_cast<double>(
                static_cast<float>(kvq::float16(static_cast<float>(std::sqrt(squares / shape.dim))))));
        }
        for (int c = 0; c < shape.dim; ++c)
            for (int first = 0; first < shape.tokens; first += group) {
                double lo = HUGE_VAL, hi = -HUGE_VAL;
                const int end = std::min(first + group, shape.tokens);
                for (int t = first; t < end; ++t) {
                    const double v = static_cast<double>(x[at(t, c)]) / length[static_cast<std::size_t>(t)];
                    lo = std::min(lo, v), hi = std::max(hi, v);
                }
                // Parameters are fp16, rounded outside the range.
                const double step =
                    ((hi - lo) * (1 + 0x1p-9) + std::max(std::fabs(lo), std::fabs(hi)) * 0x1p-9) / top;
                for (int t = first; t < end; ++t)
                    REQUIRE(std::fabs(static_cast<double>(x[at(t, c)]) - static_cast<double>(y[at(t, c)])) <=
                            (0.5 * step + 1e-3 * std::max(std::fabs(lo), std::fabs(hi))) *
                                    length[static_cast<std::size_t>(t)] +
                                1e-6);
            }
    }
}

TEST_CASE("OScaR: what one length for all tokens is for") {
    test::generator random(test::seed());
    const kvq::block_shape shape{tensor::key, 64, 64};
    auto x = random.normals(shape.values(), 1.0f);
    for (int t = 0; t < 64; t += 16)
        for (int c = 0; c < 64; ++c) x[static_cast<std::size_t>(t * 64 + c)] *= 20.0f;
    const auto error_of_small = [&](const auto& scheme) {
        const auto y = test::dequantized(scheme, shape, test::quantized(scheme, shape, x));
        const std::vector<float> from(x.begin() + 64, x.begin() + 128), to(y.begin() + 64, y.begin() + 128);
        return square_error(from, to);
    };
    CHECK(error_of_small(normalized2()) < 0.2 * error_of_small(kvq::affine<2, kvq::per_channel<32>>()));
}

TEST_CASE("OSCAR: clipping at a quantile of the token, a rotation that undoes the correlations of queries") {
    test::generator random(test::seed());
    const baselines::clipped<kvq::affine<8, kvq::per_token<>>, 960> scheme;
    const kvq::block_shape shape{tensor::key, 9, 50};
    const auto x = random.normals(shape.values(), 1.0f);
    const auto y = test::dequantized(scheme, shape, test::quantized(scheme, shape, x));
    for (int t = 0; t < shape.tokens; ++t) {
        std::vector<float> magnitudes;
        for (int c = 0; c < 50; ++c) magnitudes.push_back(std::fabs(x[static_cast<std::size_t>(t * 50 + c)]));
        std::sort(magnitudes.begin(), magnitudes.end());
        const float tau = magnitudes[48];  // floor(0.96 * 50)
        for (int c = 0; c < 50; ++c) {
            const auto i = static_cast<std::size_t>(t * 50 + c);
            CHECK(std::fabs(y[i] - std::clamp(x[i], -tau, tau)) <= 0.6f * 2.0f * tau / 255.0f);
        }
    }

    // Queries along one direction: behind the rotation all channels of keys have the same share of what
    // queries see.
    constexpr int dim = 16;
    kvq::calibration statistics({1, 1, dim}, true);
    auto q = test::random_tensor(random, 400, 1, dim);
    for (int t = 0; t < 400; ++t) {
        const float along = static_cast<float>(3.0 * random.normal());
        for (int c = 0; c < dim; ++c)
            q.values()[static_cast<std::size_t>(t * dim + c)] += along * (c % 3 == 0 ? 1.0f : -0.5f);
    }
    statistics.add_queries(0, q.view());
    const kvq::rotation rotation = baselines::spectral_rotation(statistics);
    std::vector<std::vector<double>> r;  // rows
    for (int c = 0; c < dim; ++c) {
        std::vector<float> e(dim, 0.0f);
        e[static_cast<std::size_t>(c)] = 1.0f;
        rotation.forward(dim, {0, 0}, e.data());
        r.emplace_back(e.begin(), e.end());  // column c of R
    }
    double trace = 0.0;
    for (int c = 0; c < dim; ++c) trace += statistics.query_power(0, 0, c);
    for (int row = 0; row < dim; ++row) {
        double power = 0.0;
        for (int i = 0; i < dim; ++i)
            for (int j = 0; j < dim; ++j)
                power += r[static_cast<std::size_t>(i)][static_cast<std::size_t>(row)] *
                         r[static_cast<std::size_t>(j)][static_cast<std::size_t>(row)] *
                         statistics.query_product(0, 0, i, j);
        CHECK(power == doctest::Approx(trace / dim).epsilon(1e-4));
    }
}

TEST_CASE("eigenvectors: A v = lambda v, the largest first, orthonormal") {
    test::generator random(test::seed());
    for (const int n : {1, 2, 7, 48}) {
        const auto size = static_cast<std::size_t>(n);
        std::vector<double> a(size * size);
        for (std::size_t i = 0; i < size; ++i)
            for (std::size_t j = 0; j <= i; ++j) a[i * size + j] = a[j * size + i] = random.normal();
        const auto v = baselines::eigenvectors(a, n);
        double before = HUGE_VAL;
        for (std::size_t i = 0; i < size; ++i) {
            double lambda = 0.0;
            std::vector<double> av(size, 0.0);
            for (std::size_t r = 0; r < size; ++r) {
                for (std::size_t c = 0; c < size; ++c) av[r] += a[r * size + c] * v[i * size + c];
                lambda += av[r] * v[i * size + r];
            }
            for (std::size_t r = 0; r < size; ++r)
                CHECK(std::fabs(av[r] - lambda * v[i * size + r]) < 1e-9 * n);
            CHECK(lambda <= before + 1e-12);
            before = lambda;
            for (std::size_t j = 0; j <= i; ++j) {
                const double dot = std::inner_product(v.begin() + static_cast<std::ptrdiff_t>(i * size),
                                                      v.begin() + static_cast<std::ptrdiff_t>((i + 1) * size),
                                                      v.begin() + static_cast<std::ptrdiff_t>(j * size), 0.0);
                CHECK(std::fabs(dot - (i == j ? 1.0 : 0.0)) < 1e-12 * n);
            }
        }
    }
}

TEST_CASE("Block-GTQ: greedy widths minimize sum s 4^-b") {
    test::generator random(test::seed());
    for (int round = 0; round < 20; ++round) {
        std::vector<double> energy;
        for (int i = 0; i < 4; ++i) energy.push_back(std::exp(3.0 * random.normal()));
        const int average = random.between(1, 4);
        const auto cost = [&](const std::vector<int>& b) {
            double sum = 0.0;
            for (std::size_t i = 0; i < b.size(); ++i) sum += energy[i] * std::pow(4.0, -b[i]);
            return sum;
        };
        double best = HUGE_VAL;
        for (int code = 0; code < 4096; ++code) {
            const std::vector<int> b{1 + code % 8, 1 + code / 8 % 8, 1 + code / 64 % 8, 1 + code / 512};
            if (std::accumulate(b.begin(), b.end(), 0) == 4 * average) best = std::min(best, cost(b));
        }
        const auto got = baselines::pair_widths(energy, average);
        CHECK(std::accumulate(got.begin(), got.end(), 0) == 4 * average);
        CHECK(cost(got) == doctest::Approx(best).epsilon(1e-12));
    }
}

TEST_CASE("Block-GTQ: pairs are found, energetic ones lose less, the plan beats even widths") {
    test::generator random(test::seed());
    for (const bool half : {true, false}) {
        constexpr int dim = 32;
        std::vector<double> deviation(dim);
        for (int i = 0; i < dim / 2; ++i) {
            const double d = std::exp2(-0.5 * i);
            deviation[static_cast<std::size_t>(half ? i : 2 * i)] = d;
            deviation[static_cast<std::size_t>(half ? i + dim / 2 : 2 * i + 1)] = d;
        }
        const baselines::block_gtq_keys<3> scheme(statistics_of(random, {1, 1, dim}, deviation)), even;
        REQUIRE(scheme.plan() != nullptr);
        CHECK(scheme.plan()->half_apart == half);
        const kvq::block_shape shape{tensor::key, 40, dim};
        auto x = random.normals(shape.values(), 1.0f);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] *= static_cast<float>(deviation[i % dim]);
        const auto error = [&](const auto& s) {
            return square_error(x, test::dequantized(s, shape, test::quantized(s, shape, x)));
        };
        CHECK(error(scheme) < 0.5 * error(even));
        CHECK(scheme.fingerprint() != even.fingerprint());
        CHECK_THROWS_AS(scheme.check({1, 2, dim}, tensor::key), std::invalid_argument);
    }
}

TEST_CASE("OCTOPUS: the map and its inverse, errors of the paper's size, joint rounding") {
    test::generator random(test::seed());
    for (int i = 0; i < 500; ++i) {
        baselines::octahedron::direction n{static_cast<float>(random.normal()),
                                           static_cast<float>(random.normal()),
                                           static_cast<float>(random.normal())};
        const float length = std::sqrt(n[0] * n[0] + n[1] * n[1] + n[2] * n[2]);
        const auto p = baselines::octahedron::to_square(n);
        CHECK(std::fabs(p.x) <= 1.0f);
        CHECK(std::fabs(p.y) <= 1.0f);
        const auto back = baselines::octahedron::to_sphere(p);
        for (std::size_t c = 0; c < 3; ++c) CHECK(std::fabs(back[c] - n[c] / length) < 1e-6f);
    }
    // arXiv 2605.21226 gives 0.0897 at 2 bits and 0.0071 at 4 (128 channels); the Lloyd-Max bound of scalars
    // is 0.1175 and 0.0095.
    const kvq::block_shape shape{tensor::value, 64, 128};
    const auto x = random.normals(shape.values(), 3.0f);
    const auto error = [&](const auto& s) {
        return square_error(x, test::dequantized(s, shape, test::quantized(s, shape, x)));
    };
    CHECK(error(baselines::octopus_codes<2>()) < 0.092);
    CHECK(error(baselines::octopus_codes<2>()) > 0.07);
    CHECK(error(baselines::octopus_codes<4>()) < 0.0074);
    CHECK(error(baselines::octopus_codes<4>()) > 0.0055);
}

TEST_CASE("progressive widths are the pages of a cache that stepped down") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{1, 2, 32};
    using k8 = kvq::kivi<8, 64>;
    using k4 = kvq::kivi<4, 64>;
    using k2 = kvq::kivi<2, 64>;
    const auto list = [](auto... s) {
        return kvq::format_list{kvq::make_format<decltype(s), kvq::scalar>()...};
    };
    kvq::cache cache(shape, {.keys = list(k8::keys(), k4::keys(), k2::keys()),
                             .values = list(k8::values(), k4::values(), k2::values()),
                             .page_tokens = 64,
                             .rollback = 0});
    const test::stream s(random, shape, 256);
    auto sequence = cache.new_sequence();
    kvq::step_down_policy policy;
    policy.tiers = {{0, {0, 0}}, {64, {1, 1}}, {128, {2, 2}}};
    for (int t = 0; t < 256; t += 64) {
        test::append(sequence, 1, s, t, 64);
        kvq::step_down(cache, sequence, policy);
    }
    const auto check = [&](tensor role, const auto& scheme, const test::tensor<float>& words) {
        const auto held = test::dequantized(sequence, shape, 0, role);
        for (int head = 0; head < shape.kv_heads; ++head) {
            std::vector<float> block;  // the first page
            for (int t = 0; t < 64; ++t)
                for (int c = 0; c < 32; ++c)  // a cache has tokens in fp16 before it quantizes them
                    block.push_back(static_cast<float>(kvq::float16(words.view().at(t, head)[c])));
            const kvq::block_shape of{role, 64, 32};
            const auto expected = test::dequantized(scheme, of, test::quantized(scheme, of, block));
            for (int t = 0; t < 64; ++t)
                for (int c = 0; c < 32; ++c)
                    REQUIRE(held.view().at(t, head)[c] == expected[static_cast<std::size_t>(t * 32 + c)]);
        }
    };
    check(tensor::key, baselines::progressive_kivi<2, 8, 4>::keys(), s.k);
    check(tensor::value, baselines::progressive_kivi<2, 8, 4>::values(), s.v);
}

TEST_CASE_TEMPLATE("hostile values are counted, and what remains is finite", S, normalized2,
                   baselines::oscar_scaled<2>::keys, baselines::oscar_spectral<2>::values,
                   baselines::oscar_spectral<2>::clipped_keys, baselines::octopus_codes<2>,
                   baselines::block_gtq_keys<2>) {
    test::generator random(test::seed());
    const S scheme;
    const kvq::block_shape shape{tensor::key, 40, 32};
    auto x = random.normals(shape.values(), 1.0f);
    const float inf = std::numeric_limits<float>::infinity();
    std::uint32_t bad = 0;
    for (std::size_t i = 0; i < x.size(); i += 97, ++bad)
        x[i] = i % 3 == 0 ? inf : i % 3 == 1 ? -inf : std::nanf("");
    std::fill(x.begin() + 5 * 32, x.begin() + 6 * 32, 0.0f);
    std::fill(x.begin() + 7 * 32, x.begin() + 8 * 32, std::nanf(""));
    bad = 0;
    for (const float v : x) bad += !std::isfinite(v);
    std::vector<std::byte> block(scheme.block_bytes(shape));
    auto copy = x;
    CHECK(scheme.quantize(shape, {0, 0}, copy.data(), block.data()) == bad);
    std::vector<float> y(x.size());
    scheme.dequantize(shape, {0, 0}, block.data(), y.data());
    for (const float v : y) REQUIRE(std::isfinite(v));
    for (int c = 0; c < 32; ++c) CHECK(std::fabs(y[static_cast<std::size_t>(5 * 32 + c)]) < 1e-3f);
}

}  // namespace recent_baselines_tests
