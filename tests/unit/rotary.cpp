// SPDX-License-Identifier: MIT
// Comparison family: double arithmetic, published formulas. Rotary embeddings: both layouts, scaled
// frequencies, long moves.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/attention/rotary.hpp>

#include "support/messages.hpp"
#include "support/random.hpp"

using kvq::detail::rotation;
using test::contains;
using test::message_of;

namespace rotary_tests {

namespace {

constexpr double pi = 3.141592653589793;

kvq::rotary_embedding of(int dims, int first, kvq::rotary_layout layout, double base) {
    kvq::rotary_embedding e;
    e.dims = dims;
    e.first_channel = first;
    e.layout = layout;
    e.base = base;
    return e;
}

}  // namespace

TEST_CASE("both layouts turn their pairs by position times frequency, and leave other channels alone") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 300; ++round) {
        const int head_dim = random.between(2, 200), dims = 2 * random.between(0, head_dim / 2),
                  first = random.between(0, head_dim - dims), pairs = dims / 2, rows = random.between(1, 5);
        const auto layout =
            random.one_in(2) ? kvq::rotary_layout::half_split : kvq::rotary_layout::interleaved;
        const double base = random.one_in(2) ? 10000.0 : 500000.0;
        const std::int64_t by =
            random.one_in(2) ? random.between(-100, 100) : random.between(-2000000000, 2000000000);
        const rotation rotate(of(dims, first, layout, base), head_dim, "");
        CHECK(static_cast<bool>(rotate) == (dims > 0));
        const auto before = random.normals(static_cast<std::size_t>(rows * head_dim));
        auto x = before;
        rotate(x.data(), rows, head_dim, by);
        double worst = 0;
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < head_dim; ++c) {
                const auto at = [&](int channel) {
                    return static_cast<double>(before[static_cast<std::size_t>(r * head_dim + channel)]);
                };
                double wanted = at(c);
                if (c >= first && c < first + dims) {
                    const bool split = layout == kvq::rotary_layout::half_split;
                    const int i = c - first, j = split ? i % pairs : i / 2;
                    const bool second = split ? i >= pairs : i % 2 == 1;
                    const int other = split ? (second ? c - pairs : c + pairs) : (second ? c - 1 : c + 1);
                    // In long double: its angle is what others are measured against.
                    const long double angle = std::pow(static_cast<long double>(base), -2.0L * j / dims) *
                                              static_cast<long double>(by);
                    const auto cosine = static_cast<double>(std::cos(angle)),
                               sine = static_cast<double>(std::sin(angle));
                    wanted = second ? at(c) * cosine + at(other) * sine : at(c) * cosine - at(other) * sine;
                }
                worst = std::max(
                    worst,
                    std::fabs(static_cast<double>(x[static_cast<std::size_t>(r * head_dim + c)]) - wanted));
            }
        INFO("round ", round, " by ", by);
        // 5e-7 of rounding in float; 2e9 positions times 4e-16.
        CHECK(worst < 4e-6);
        if (by == 0) CHECK(x == before);
    }
}

TEST_CASE("moves add up: there and back is where it was, and a million steps are one of a million") {
    test::generator random(test::seed());
    const rotation rotate(of(128, 0, kvq::rotary_layout::half_split, 500000.0), 128, "");
    const auto before = random.normals(128);
    auto x = before, y = before;
    rotate(x.data(), 1, 128, 1234567);
    rotate(x.data(), 1, 128, -1234567);
    rotate(y.data(), 1, 128, 0);
    CHECK(y == before);
    for (std::size_t i = 0; i < 128; ++i) CHECK(x[i] == doctest::Approx(before[i]).epsilon(1e-5));
}

TEST_CASE("sine and cosine of angles in turns") {
    test::generator random(test::seed());
    double worst = 0;
    for (int i = 0; i < 200000; ++i) {
        const double turns = i < 64 ? i / 16.0 - 2.0 : 100.0 * (static_cast<double>(random.uniform()) - 0.5);
        float sine, cosine;
        kvq::detail::sine_and_cosine(turns, sine, cosine);
        const double whole = turns - std::floor(turns);
        worst = std::max({worst, std::fabs(static_cast<double>(sine) - std::sin(2 * pi * whole)),
                          std::fabs(static_cast<double>(cosine) - std::cos(2 * pi * whole))});
    }
    CHECK(worst < 1e-7);
}

TEST_CASE("frequencies of Llama 3.1, as in the code of its authors") {
    // apply_scaling of meta-llama/llama-models: wavelengths compared with bounds, a smooth part between.
    const int dims = 128;
    const double base = 500000.0, factor = 8.0, low = 1.0, high = 4.0, old_context = 8192.0;
    const auto f = kvq::llama3_frequencies(dims, base, {});
    REQUIRE(f.size() == 64);
    int kept = 0, stretched = 0, between = 0;
    for (int j = 0; j < 64; ++j) {
        const double plain = 1.0 / std::pow(base, 2.0 * j / dims), wavelength = 2 * pi / plain;
        double wanted;
        if (wavelength < old_context / high) {
            wanted = plain;
            ++kept;
        } else if (wavelength > old_context / low) {
            wanted = plain / factor;
            ++stretched;
        } else {
            const double smooth = (old_context / wavelength - low) / (high - low);
            wanted = (1 - smooth) * plain / factor + smooth * plain;
            ++between;
        }
        CHECK(f[static_cast<std::size_t>(j)] == doctest::Approx(wanted).epsilon(1e-13));
    }
    CHECK(kept > 20);
    CHECK(stretched > 20);
    CHECK(between > 3);
}

TEST_CASE("frequencies of YaRN, as in the code of its authors") {
    // yarn_find_correction_range and yarn_linear_ramp_mask of jquesnelle/yarn.
    const int dims = 128;
    const double base = 10000.0, factor = 16.0, old_context = 4096.0;
    const auto f = kvq::yarn_frequencies(dims, base, {.factor = factor, .original_context = old_context});
    const auto dim_of = [&](double rotations) {
        return dims * std::log(old_context / (rotations * 2 * pi)) / (2 * std::log(base));
    };
    const double low = std::max(std::floor(dim_of(32)), 0.0),
                 high = std::min(std::ceil(dim_of(1)), dims - 1.0);
    REQUIRE(low == 20);
    REQUIRE(high == 46);
    for (int j = 0; j < 64; ++j) {
        const double plain = 1.0 / std::pow(base, 2.0 * j / dims);
        const double mask = 1 - std::min(1.0, std::max(0.0, (j - low) / (high - low)));
        const double wanted = plain / factor * (1 - mask) + plain * mask;
        CHECK(f[static_cast<std::size_t>(j)] == doctest::Approx(wanted).epsilon(1e-13));
    }
    CHECK(f[20] == doctest::Approx(std::pow(base, -40.0 / dims)).epsilon(1e-13));
    CHECK(f[46] == doctest::Approx(std::pow(base, -92.0 / dims) / factor).epsilon(1e-13));
}

TEST_CASE("scalings out of range") {
    CHECK(contains(message_of([] { (void)kvq::rotary_frequencies(7, 10000.0); }), "not 7 channels"));
    CHECK(contains(message_of([] { (void)kvq::rotary_frequencies(8, -1.0); }), "is -1"));
    CHECK(contains(message_of([] { (void)kvq::llama3_frequencies(8, 1e4, {.factor = 0.0}); }),
                   "scaling by 0.0"));
    CHECK(contains(message_of([] { (void)kvq::llama3_frequencies(8, 1e4, {.high_freq_factor = 1.0}); }),
                   "factors 1.000000 and 1.000000"));
    CHECK(contains(message_of([] { (void)kvq::yarn_frequencies(8, 1e4, {.beta_fast = 1.0}); }),
                   "betas 1.000000 and 1.000000"));
    CHECK(contains(message_of([] { (void)kvq::yarn_frequencies(8, 1.0, {}); }), "base 1"));
}

}  // namespace rotary_tests
