// SPDX-License-Identifier: MIT
// Comparison family: exact for allocations and bytes, double rounding for statistics.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/quant/calibration.hpp>
#include <kvq/quant/width_allocation.hpp>
#include <utility>

#include "support/random.hpp"
#include "support/tensors.hpp"

namespace calibration_tests {

namespace {

double error_of(const std::vector<double>& sorted, const std::vector<int>& widths,
                const std::vector<int>& quads) {
    double error = 0;
    std::size_t c = 0;
    for (std::size_t w = 0; w < widths.size(); ++w)
        for (int i = 0; i < 4 * quads[w] && c < sorted.size(); ++i)
            error += kvq::detail::width_noise(widths[w]) * sorted[c++];
    return error;
}

/// Least error over all cuts into runs.
double brute_force(const std::vector<double>& sorted, const std::vector<int>& widths, int words,
                   std::vector<int>& quads, std::size_t at, int left) {
    if (at + 1 == widths.size()) {
        quads[at] = left;
        int used = 0;
        for (std::size_t w = 0; w < widths.size(); ++w) used += kvq::detail::code_words(widths[w], quads[w]);
        return used <= words ? error_of(sorted, widths, quads) : HUGE_VAL;
    }
    double least = HUGE_VAL;
    for (quads[at] = 0; quads[at] <= left; ++quads[at]) {
        const int n = quads[at];
        least = std::fmin(least, brute_force(sorted, widths, words, quads, at + 1, left - n));
        quads[at] = n;
    }
    return least;
}

}  // namespace

TEST_CASE("allocation: no cut into widths within the words has less error") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const std::vector<std::vector<int>> sets = {{4, 2, 0}, {6, 4, 2, 0}, {8, 3}, {5, 4, 3, 2}, {2, 1, 0}};
    for (int round = 0; round < 150; ++round) {
        const auto widths = random.pick(sets);
        const int channels = random.between(1, 64), quads = (channels + 3) / 4;
        std::vector<double> importance(static_cast<std::size_t>(channels));
        for (double& x : importance)
            x = random.one_in(8) ? 0.0 : std::fabs(static_cast<double>(random.any_magnitude(-8, 8)));
        const int least = kvq::detail::code_words(widths.back(), quads),
                  most = kvq::detail::code_words(widths.front(), quads);
        const int words = random.between(least, std::max(least, most));
        const auto a = kvq::allocate_widths(importance, widths, words);

        std::vector<double> sorted;
        std::vector<bool> seen(importance.size());
        for (const auto c : a.order) {
            sorted.push_back(importance[c]);
            seen[c] = true;
        }
        CHECK(std::count(seen.begin(), seen.end(), false) == 0);
        CHECK(std::is_sorted(sorted.rbegin(), sorted.rend()));
        std::vector<int> got(a.quads.begin(), a.quads.end()), any(widths.size());
        int used = 0, held = 0;
        for (std::size_t w = 0; w < widths.size(); ++w) {
            used += kvq::detail::code_words(widths[w], got[w]);
            held += got[w];
        }
        CHECK(used <= words);
        CHECK(held == quads);
        const double expected = brute_force(sorted, widths, words, any, 0, quads);
        CHECK(error_of(sorted, widths, got) <= expected * (1 + 1e-12));
    }
    const std::vector<double> two(8, 1.0);
    const std::vector<int> wide = {8};
    CHECK_THROWS_AS(kvq::allocate_widths(two, wide, 1), kvq::error);
}

TEST_CASE(
    "importances are drawn together by the part of their spread that comes from the text, and keep their "
    "order") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 200; ++round) {
        std::vector<double> x(static_cast<std::size_t>(random.between(1, 130)));
        const int spread = random.between(0, 5);
        for (double& v : x) v = std::fabs(static_cast<double>(random.any_magnitude(-spread, spread)));
        const double doubt = random.pick(std::vector<double>{0.01, 0.2, 1.0, 30.0});
        const double top = *std::max_element(x.begin(), x.end());
        double mean = 0, variance = 0;
        for (const double v : x)
            mean += std::log(std::fmax(v / top, 0x1p-20)) / static_cast<double>(x.size());
        for (const double v : x)
            variance +=
                std::pow(std::log(std::fmax(v / top, 0x1p-20)) - mean, 2) / static_cast<double>(x.size());
        const double power = variance > doubt ? 1 - doubt / variance : 0;
        auto y = x, scaled = x;
        kvq::steady_importance(y, doubt);
        // Only ratios count.
        for (double& v : scaled) v *= 0x1p-300;
        kvq::steady_importance(scaled, doubt);
        CHECK(y == scaled);
        for (std::size_t i = 0; i < x.size(); ++i)
            for (std::size_t j = 0; j < x.size(); ++j) {
                if (x[i] < x[j]) CHECK(y[i] <= y[j]);
                const double ratio = std::fmax(x[i] / top, 0x1p-20) / std::fmax(x[j] / top, 0x1p-20);
                CHECK(std::fabs(y[i] / y[j] / std::pow(ratio, power) - 1) < 1e-5);
            }
    }
    std::vector<double> same = {3.0, 0.0, 1.0}, none = {0.0, 0.0}, empty;
    kvq::steady_importance(same, 0.0);
    CHECK(same == std::vector<double>{3.0, 0.0, 1.0});
    kvq::steady_importance(same, HUGE_VAL);
    CHECK(same == std::vector<double>(3, 1.0));
    kvq::steady_importance(none, 0.2);
    CHECK(none == std::vector<double>(2, 0.0));
    kvq::steady_importance(empty, 0.2);
}

TEST_CASE("logarithms and powers are those of the standard library, from below and to 24 bits") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 1000; ++round) {
        const double x = 1.0 + std::fabs(static_cast<double>(random.any_magnitude(-20, 40)));
        const double log = kvq::detail::floor_log2(x);
        CHECK(log == std::floor(log * 0x1p24) * 0x1p-24);
        CHECK(log <= std::log2(x) + 1e-9);
        CHECK(log > std::log2(x) - 0x1p-23);
        CHECK(std::fabs(kvq::detail::exact_exp2(log) / std::exp2(log) - 1) < 1e-13);
    }
    CHECK(kvq::detail::floor_log2(1.0) == 0.0);
    CHECK(kvq::detail::floor_log2(0x1p20) == 20.0);
    CHECK(kvq::detail::exact_exp2(20.0) == 0x1p20);
}

TEST_CASE("statistics: powers, products and variances inside groups of 64") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 6};
    kvq::calibration plain(shape), full(shape, true);
    auto k = test::random_tensor(random, 150, 2, 6), q = test::random_tensor(random, 30, 6, 6);
    k.view().at(70, 1)[3] = NAN;
    for (kvq::calibration* c : {&plain, &full}) {
        c->add_keys(1, std::as_const(k).view());
        c->add_queries(1, std::as_const(q).view());
    }
    for (int h = 0; h < 2; ++h)
        for (int i = 0; i < 6; ++i) {
            double variance = 0, power = 0;
            for (const auto& [first, n] : {std::pair{0, 64}, std::pair{64, 64}, std::pair{128, 22}}) {
                double mean = 0, squares = 0, count = 0, all = 0;
                for (int t = first; t < first + n; ++t)
                    if (const auto x = static_cast<double>(k.view().at(t, h)[i]); std::isfinite(x))
                        mean += x, all += x * x, ++count;
                mean /= count;
                power += all / count * n;
                for (int t = first; t < first + n; ++t)
                    if (const auto x = static_cast<double>(k.view().at(t, h)[i]); std::isfinite(x))
                        squares += (x - mean) * (x - mean);
                variance += squares / count * n;
            }
            CHECK(full.key_variance(1, h, i) == doctest::Approx(variance / 150));
            CHECK(plain.key_variance(1, h, i) == full.key_variance(1, h, i));
            CHECK(full.key_power(1, h, i) == doctest::Approx(power / 150));
            CHECK(plain.key_power(1, h, i) == full.key_power(1, h, i));
            for (int j = 0; j < 6; ++j) {
                double product = 0;
                for (int t = 0; t < 30; ++t)
                    for (int head = 3 * h; head < 3 * h + 3; ++head)
                        product += static_cast<double>(q.view().at(t, head)[i]) *
                                   static_cast<double>(q.view().at(t, head)[j]);
                CHECK(full.query_product(1, h, i, j) == doctest::Approx(product / 90));
            }
            CHECK(plain.query_power(1, h, i) == doctest::Approx(full.query_power(1, h, i)));
            CHECK(plain.query_power(0, h, i) == 1.0);
            CHECK(plain.key_variance(0, h, i) == 1.0);
            CHECK(plain.key_power(0, h, i) == 1.0);
        }
    CHECK(plain.has_queries());
    CHECK(!kvq::calibration(shape, true).has_queries());
    CHECK_THROWS_AS(plain.add_keys(2, std::as_const(k).view()), kvq::error);
    CHECK_THROWS_AS(plain.add_keys(0, std::as_const(q).view()), kvq::error);
}

TEST_CASE("save and load: the same numbers; what is not a calibration is refused") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const bool products : {false, true}) {
        const kvq::cache_shape shape{.layers = 2, .kv_heads = 3, .head_dim = 5, .value_dim = 4};
        kvq::calibration c(shape, products);
        const auto k = test::random_tensor(random, 80, 3, 5), q = test::random_tensor(random, 7, 6, 5);
        c.add_keys(1, k.view());
        c.add_queries(1, q.view());
        const auto bytes = c.save();
        const auto again = kvq::calibration::load(bytes);
        CHECK(again.save() == bytes);
        CHECK(again.shape().value_dim == 4);
        CHECK(again.has_products() == products);
        CHECK(again.query_product(1, 2, 3, 4) == c.query_product(1, 2, 3, 4));
        CHECK(again.key_power(1, 2, 3) == c.key_power(1, 2, 3));
        CHECK(again.key_variance(1, 2, 3) == c.key_variance(1, 2, 3));

        for (const std::size_t n :
             {std::size_t{0}, std::size_t{7}, std::size_t{31}, bytes.size() - 8, bytes.size() - 1})
            CHECK_THROWS_AS(kvq::calibration::load(std::span(bytes).first(n)), kvq::error);
        auto longer = bytes;
        longer.resize(bytes.size() + 8);
        CHECK_THROWS_AS(kvq::calibration::load(longer), kvq::error);
        // A header with other sizes, a number that is not finite, a negative variance.
        for (int i = 0; i < 200; ++i) {
            auto broken = bytes;
            broken[static_cast<std::size_t>(random.between(0, 27))] ^=
                static_cast<std::byte>(1 << random.between(0, 7));
            if (broken != bytes && !(broken[20] != bytes[20] || broken[21] != bytes[21] ||
                                     broken[22] != bytes[22] || broken[23] != bytes[23]))
                CHECK_THROWS_AS(kvq::calibration::load(broken), kvq::error);
        }
        auto broken = bytes;
        const double nan = NAN, negative = -1.0;
        std::memcpy(broken.data() + 32, &nan, 8);
        CHECK_THROWS_AS(kvq::calibration::load(broken), kvq::error);
        std::memcpy(broken.data() + 32, &negative, 8);
        CHECK_THROWS_AS(kvq::calibration::load(broken), kvq::error);
    }
}

}  // namespace calibration_tests
