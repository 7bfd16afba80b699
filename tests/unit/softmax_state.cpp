// SPDX-License-Identifier: MIT
// Comparison family: float rounding. Partial attention as a value.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/attention/softmax_state.hpp>
#include <kvq/cpu/plain_lanes.hpp>
#include <kvq/cpu/softmax.hpp>
#include <vector>

#include "support/random.hpp"

namespace softmax_state_tests {

namespace {

constexpr int dim = 6;

/// A state that owns its output.
struct owned {
    std::vector<float> output = std::vector<float>(dim);
    float max = -std::numeric_limits<float>::infinity(), sum = 0.0f;

    kvq::softmax_state view() { return {max, sum, output.data()}; }
    owned& merge(owned other) {
        kvq::softmax_state mine = view();
        mine.merge(other.view(), dim);
        max = mine.max;
        sum = mine.sum;
        return *this;
    }
};

/// What attention over a few keys leaves behind.
owned random_state(test::generator& random) {
    owned s;
    if (random.one_in(5)) return s;  // saw no key
    s.max = 20.0f * random.normal();
    s.sum = 1.0f + 10.0f * random.uniform();
    for (float& x : s.output) x = s.sum * random.normal();
    return s;
}

/// sum and output in units of 2^max, in double.
std::vector<double> meaning(const owned& s, double unit) {
    std::vector<double> all;
    const double factor = std::isinf(s.max) ? 0.0 : std::exp2(static_cast<double>(s.max) - unit);
    all.push_back(static_cast<double>(s.sum) * factor);
    for (const float x : s.output) all.push_back(static_cast<double>(x) * factor);
    return all;
}

/// Each merge scales twice and adds once: 3 roundings and two calls of exp2, of what the largest term was.
void check_same(const owned& a, const owned& b, double largest_output) {
    CHECK(a.max == b.max);
    if (std::isinf(a.max)) return;
    const auto x = meaning(a, static_cast<double>(a.max)), y = meaning(b, static_cast<double>(a.max));
    for (std::size_t i = 0; i < x.size(); ++i) CHECK(std::fabs(x[i] - y[i]) <= 16 * 0x1p-24 * largest_output);
}

}  // namespace

TEST_CASE("merging is associative and commutative, and an empty state changes nothing") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 2000; ++round) {
        const owned a = random_state(random), b = random_state(random), c = random_state(random);
        double largest = 1;
        for (const owned* s : {&a, &b, &c}) {
            largest = std::fmax(largest, static_cast<double>(s->sum));
            for (const float x : s->output) largest = std::fmax(largest, std::fabs(static_cast<double>(x)));
        }
        check_same(owned(a).merge(b).merge(c), owned(a).merge(owned(b).merge(c)), 3 * largest);
        check_same(owned(a).merge(b), owned(b).merge(a), 2 * largest);
        const owned same = owned(a).merge(owned{});
        CHECK(same.max == a.max);
        CHECK(same.sum == a.sum);
        CHECK(same.output == a.output);
        const owned from_empty = owned{}.merge(a);
        CHECK(from_empty.max == a.max);
        CHECK(from_empty.sum == a.sum);
        CHECK(from_empty.output == a.output);
    }
}

TEST_CASE("an empty state finishes as zeros") {
    owned s;
    std::vector<float> out(dim, 7.0f);
    s.view().finish(out.data(), dim);
    CHECK(out == std::vector<float>(dim, 0.0f));
}

TEST_CASE("softmax_tile: tiles of any size and cut give the same softmax as double arithmetic") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 300; ++round) {
        const int n = random.between(1, 70);
        std::vector<float> scores(static_cast<std::size_t>(n));
        const float spread = random.pick(std::vector<float>{0.1f, 3.0f, 60.0f});
        for (float& s : scores)
            s = random.one_in(9) ? -std::numeric_limits<float>::infinity() : spread * random.normal();
        double top = -HUGE_VAL, sum = 0;
        for (const float s : scores) top = std::fmax(top, static_cast<double>(s));
        for (const float s : scores) sum += std::isinf(top) ? 0 : std::exp2(static_cast<double>(s) - top);

        float max = -std::numeric_limits<float>::infinity(), total = 0.0f;
        auto weights = scores;
        std::vector<double> factors;  // of what was seen before
        for (int first = 0; first < n;) {
            const int count = std::min(n - first, random.between(1, 40));
            float factor = 0.0f;
            kvq::kernels::softmax_tile<kvq::plain_lanes, 1>(weights.data() + first, 0, count, &max, &total,
                                                            &factor);
            for (int i = 0; i < first; ++i) weights[static_cast<std::size_t>(i)] *= factor;
            first += count;
        }
        CHECK((std::isinf(top) ? std::isinf(max) : static_cast<double>(max) == top));
        // exp2 is within 3e-7, once for the tile and once for every tile that follows.
        CHECK(std::fabs(static_cast<double>(total) - sum) <= 1e-5 * sum);
        for (int i = 0; i < n; ++i) {
            const auto s = scores[static_cast<std::size_t>(i)];
            const double wanted = std::isinf(s) ? 0 : std::exp2(static_cast<double>(s) - top);
            CHECK(std::fabs(static_cast<double>(weights[static_cast<std::size_t>(i)]) - wanted) <=
                  1e-5 * wanted + 0x1p-125);
        }
    }
}

}  // namespace softmax_state_tests
