// SPDX-License-Identifier: MIT
// Codebooks against the formulas they claim: written down once more here, in double.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "baselines/published.hpp"
#include "support/blocks.hpp"

namespace codebooks_tests {

namespace {

double density(double x) { return std::exp(-0.5 * x * x) / std::sqrt(2.0 * std::acos(-1.0)); }
/// P(a < X < b) for a normal X, without cancellation in the tails.
double probability(double a, double b) {
    const auto above = [](double x) { return 0.5 * std::erfc(x / std::sqrt(2.0)); };
    return a > 0.0 ? above(a) - above(b) : above(-b) - above(-a);
}

/// Lloyd's iteration for N(0, 1): cells end half-way between levels, a level is the mean of its cell.
std::vector<double> lloyd_max(int n) {
    std::vector<double> levels;
    for (int i = 0; i < n; ++i) levels.push_back(-2.0 + 4.0 * (i + 0.5) / n);
    for (double moved = 1.0; moved > 1e-12;) {
        moved = 0.0;
        const std::vector<double> old = levels;
        const auto edge = [&](int i) {  // lower end of cell i
            return i == 0   ? -40.0
                   : i == n ? 40.0
                            : 0.5 * (old[static_cast<std::size_t>(i - 1)] + old[static_cast<std::size_t>(i)]);
        };
        for (int i = 0; i < n; ++i) {
            const double a = edge(i), b = edge(i + 1);
            double& level = levels[static_cast<std::size_t>(i)];
            level = (density(a) - density(b)) / probability(a, b);
            moved = std::max(moved, std::fabs(level - old[static_cast<std::size_t>(i)]));
        }
    }
    return levels;
}

/// Dequantizes what S makes of random groups and compares every number with formula(group, x). Where the
/// formula itself jumps when x, or the whole group, moves by five millionths of the largest number, either
/// side is right (integer_zero chooses codes by a scale that has lost four bits). `slack`: of the stored
/// scale, relative. ties_move_scale: a tie at one number moves the scale of all a little, so that on either
/// side of it the others are right too.
template <class S, class Formula>
void check_formula(const Formula& formula, double slack, bool ties_move_scale = false) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const S scheme;
    INFO(scheme.name());
    const kvq::block_shape shape{kvq::tensor::key, 40, 32};
    int skipped = 0;
    for (int round = 0; round < 10; ++round) {
        auto x = random.normals(shape.values(), random.any_magnitude(-3, 3));
        if (random.one_in(2))
            for (std::size_t i = 0; i < x.size(); ++i) x[i] += i % 7 == 0 ? 3.0f : 0.0f;
        const auto y = test::dequantized(scheme, shape, test::quantized(scheme, shape, x));
        for (int t = 0; t < shape.tokens; ++t) {
            const auto begin = x.begin() + t * shape.dim;
            const std::vector<double> group(begin, begin + shape.dim);
            double most = 0.0;
            for (const double v : group) most = std::max(most, std::fabs(v));
            for (int c = 0; c < shape.dim; ++c) {
                const double v = group[static_cast<std::size_t>(c)];
                const double wanted = formula(group, v);
                const double near = 5e-6 * most;
                const auto moved = [&](double by) {
                    auto others = group;
                    for (double& u : others) u += by;
                    return formula(others, v + by);
                };
                const auto [lowest, highest] = std::minmax(
                    {formula(group, v - near), formula(group, v + near), moved(-near), moved(near)});
                if (highest - lowest > 1e-4 * most) {
                    ++skipped;
                    continue;
                }
                const auto got = static_cast<double>(y[static_cast<std::size_t>(t * shape.dim + c)]);
                const double off = ties_move_scale ? std::max(std::min(lowest, wanted) - got,
                                                              got - std::max(highest, wanted))
                                                   : std::fabs(got - wanted);
                REQUIRE(off <= slack * std::fabs(wanted) + 1e-6 * most);
            }
        }
    }
    CHECK(skipped < 256);  // of 12800
}

double first_largest(const std::vector<double>& x) {
    double most = 0.0;
    for (const double v : x)
        if (std::fabs(v) > std::fabs(most)) most = v;
    return most;
}
template <class Levels>
double nearest(const Levels& levels, double x) {
    double best = levels[0];
    for (const auto level : levels)
        if (std::fabs(x - static_cast<double>(level)) < std::fabs(x - best))
            best = static_cast<double>(level);
    return best;
}

constexpr double half_ulp = 0x1p-11;  // of a float16 scale

template <class C, class P = kvq::float16>
using groups_of_32 = baselines::codebook_scheme<C, kvq::per_token<32>, kvq::params<P>>;

}  // namespace

TEST_CASE_TEMPLATE("levels for the normal are those of Lloyd's iteration", T, baselines::normal_levels<2>,
                   baselines::normal_levels<3>, baselines::normal_levels<4>) {
    const auto wanted = lloyd_max(1 << T::bits);
    for (std::size_t i = 0; i < wanted.size(); ++i)
        CHECK(std::fabs(static_cast<double>(T::levels[i]) - wanted[i]) < 2e-7);
}

TEST_CASE("nearest level: no other level is nearer, ties go up, NaN is quantized as 0") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const auto& levels = baselines::nf4_levels::levels;
    for (int i = 0; i < 2000; ++i) {
        const float x = random.one_in(10) ? random.pick(test::hostile_values()) : random.normal();
        const float got = levels[baselines::nearest_level(levels, 16, x)];
        if (std::isnan(x))
            CHECK(got == 0.0f);
        else if (std::isinf(x))
            CHECK(got == (x > 0.0f ? 1.0f : -1.0f));
        else
            for (const float level : levels) REQUIRE(std::fabs(x - got) <= std::fabs(x - level));
    }
    constexpr float whole[] = {0.0f, 1.0f, 2.0f, 3.0f};
    CHECK(baselines::nearest_level(whole, 4, 0.5f) == 1);
    CHECK(baselines::nearest_level(whole, 4, 2.5f) == 3);
}

TEST_CASE("nf4: nearest entry times the largest magnitude") {
    check_formula<groups_of_32<baselines::nf4>>(
        [](const std::vector<double>& x, double v) {
            const double d = std::fabs(first_largest(x));
            return d * nearest(baselines::nf4_levels::levels, v / d);
        },
        half_ulp);
}

TEST_CASE("q4_0: d = m / -8, code = min(15, int(x / d + 8.5))") {
    check_formula<groups_of_32<baselines::q4_0>>(
        [](const std::vector<double>& x, double v) {
            const double d = first_largest(x) / -8.0;
            return d * (std::min(15.0, std::floor(v / d + 8.5)) - 8.0);
        },
        half_ulp);
}

TEST_CASE("iq4_nl: codes of d0 = m / -127, then d = sum w x t / sum w t^2 with w = x^2") {
    check_formula<groups_of_32<baselines::iq4_nl>>(
        [](const std::vector<double>& x, double v) {
            const auto& table = baselines::iq4_nl_levels::levels;
            const double first = first_largest(x) / -127.0;
            double cross = 0.0, square = 0.0;
            for (const double u : x) {
                const double t = nearest(table, u / first);
                cross += u * u * u * t;
                square += u * u * t * t;
            }
            return cross / square * nearest(table, v / first);
        },
        half_ulp, true);
}

TEST_CASE_TEMPLATE("midpoint: code = clamp(floor(x / s m + m)), x^ = (code - (m - 1/2)) s / m", C,
                   baselines::midpoint<2>, baselines::midpoint<3>, baselines::midpoint<4>) {
    check_formula<groups_of_32<C>>(
        [](const std::vector<double>& x, double v) {
            const double s = std::fabs(first_largest(x)) + 1e-10, m = 1 << (C::bits - 1);
            return (std::clamp(std::floor(v / s * m + m), 0.0, 2 * m - 1) - (m - 0.5)) * s / m;
        },
        half_ulp);
}

TEST_CASE("fp8: s = max|x| / 448, x^ = s e4m3(x / s)") {
    check_formula<groups_of_32<baselines::fp8_e4m3, float>>(
        [](const std::vector<double>& x, double v) {
            const double s = std::fabs(first_largest(x)) / 448.0, u = std::fabs(v / s);
            const double step = std::ldexp(1.0, std::max(std::ilogb(u), -6) - 3);
            return std::copysign(std::nearbyint(u / step) * step, v) * s;
        },
        0x1p-22);
}

TEST_CASE("integer zero: x^ = s (code - z), z in four bits of the mantissa of s") {
    check_formula<groups_of_32<baselines::integer_zero<4>, float>>(
        [](const std::vector<double>& x, double v) {
            const auto [lo, hi] = std::minmax_element(x.begin(), x.end());
            const double s = (*hi - *lo) / 15.0;
            const double z = std::clamp(std::floor(-*lo / s + 0.5), 0.0, 15.0);
            return s * (std::clamp(std::nearbyint(v / s + z), 0.0, 15.0) - z);
        },
        0x1p-18);  // four of 23 bits
}

TEST_CASE_TEMPLATE("norm: x^ = |x| / sqrt(n) t, renormalised x^ = |x| t / |t|", T,
                   baselines::normal_levels<2>, baselines::normal_levels<4>) {
    const auto unit = [](const std::vector<double>& x) {
        double sum = 0.0;
        for (const double v : x) sum += v * v;
        return std::sqrt(sum / static_cast<double>(x.size()));
    };
    check_formula<groups_of_32<baselines::by_norm<T>>>(
        [&](const std::vector<double>& x, double v) { return unit(x) * nearest(T::levels, v / unit(x)); },
        half_ulp);
    // The length is kept, whatever the codes: |x^| = |x| up to the rounding of the stored scale.
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const groups_of_32<baselines::by_norm<T, true>> renormalised;
    const kvq::block_shape shape{kvq::tensor::value, 1, 32};
    for (int round = 0; round < 200; ++round) {
        const auto x = random.normals(32, random.any_magnitude(-3, 3));
        const auto y = test::dequantized(renormalised, shape, test::quantized(renormalised, shape, x));
        const double wanted = baselines::norm(x.data(), 32);
        CHECK(std::fabs(baselines::norm(y.data(), 32) - wanted) <= (half_ulp + 1e-6) * wanted);
    }
}

TEST_CASE_TEMPLATE(
    "codebooks: what is not finite is counted and leaves its neighbours alone; zeros stay zeros", C,
    baselines::nf4, baselines::iq4_nl, baselines::q4_0, baselines::fp8_e4m3, baselines::integer_zero<4>,
    baselines::by_norm<baselines::normal_levels<3>, true>) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const groups_of_32<C, float> scheme;
    for (int round = 0; round < 50; ++round) {
        const auto shape = test::random_shape(random, 70);
        INFO(shape);
        auto x = test::hostile_block(random, shape);
        for (float& v : x)  // published formats say nothing of numbers near the largest float
            if (std::isfinite(v)) v = std::clamp(v, -1e30f, 1e30f);
        std::uint32_t counted = 0, wanted = 0;
        const auto y = test::dequantized(scheme, shape, test::quantized(scheme, shape, x, &counted));
        for (std::size_t i = 0; i < x.size(); ++i) {
            wanted += !std::isfinite(x[i]);
            REQUIRE(std::isfinite(y[i]));
        }
        CHECK(counted == wanted);
    }
    const kvq::block_shape shape{kvq::tensor::key, 3, 40};
    for (const float y :
         test::dequantized(scheme, shape, test::quantized(scheme, shape, std::vector<float>(120))))
        CHECK(y == 0.0f);
    // A group of 32 with poison dequantizes like the group without it.
    for (int round = 0; round < 50; ++round) {
        auto x = random.normals(32);
        const int at = random.between(0, 31);
        std::vector<float> rest = x;
        rest.erase(rest.begin() + at);
        x[static_cast<std::size_t>(at)] =
            random.pick(std::vector<float>{HUGE_VALF, -HUGE_VALF, std::nanf("")});
        const kvq::block_shape whole{kvq::tensor::key, 1, 32}, less{kvq::tensor::key, 1, 31};
        auto y = test::dequantized(scheme, whole, test::quantized(scheme, whole, x));
        y.erase(y.begin() + at);
        CHECK(y == test::dequantized(scheme, less, test::quantized(scheme, less, rest)));
    }
}

}  // namespace codebooks_tests
