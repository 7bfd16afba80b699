// SPDX-License-Identifier: MIT
// Comparison family: exact. 8-bit scales and biases against their definition.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/quant/block_params.hpp>

#include "support/random.hpp"

using kvq::parameter_rounding;

TEST_CASE_TEMPLATE("small floats: 2^M steps an octave, rising, every product with a bfloat16 exact", F,
                   kvq::detail::scale_float, kvq::detail::token_scale_float, kvq::detail::small_float<6>) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    CHECK(F::value(0) == F::smallest);
    CHECK(F::value(255) == F::largest);
    for (unsigned c = 1; c < 256; ++c) CHECK(F::value(c) > F::value(c - 1));
    for (int round = 0; round < 3000; ++round) {
        const kvq::bfloat16 unit(std::fabs(random.any_magnitude(-20, 20)));
        const auto code = static_cast<unsigned>(random.between(0, 255));
        const float product = static_cast<float>(unit) * F::value(code);
        CHECK(static_cast<double>(product) ==
              static_cast<double>(static_cast<float>(unit)) * static_cast<double>(F::value(code)));
        // A value that can be stored is stored as itself.
        CHECK(F::code(product, unit, parameter_rounding::nearest) == code);
        CHECK(F::code(product, unit, parameter_rounding::outside) == code);
    }
}

TEST_CASE_TEMPLATE("small floats: the nearest code, or the smallest one that is not below", F,
                   kvq::detail::scale_float, kvq::detail::token_scale_float) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 2000; ++round) {
        const float unit = kvq::bfloat16(std::fabs(random.any_magnitude(-20, 20)));
        const float x = std::fabs(random.any_magnitude(-20, 20));
        unsigned nearest = 0, above = 255;
        for (unsigned c = 0; c < 256; ++c)
            if (std::fabs(unit * F::value(c) - x) < std::fabs(unit * F::value(nearest) - x)) nearest = c;
        for (unsigned c = 256; c-- > 0;)
            if (unit * F::value(c) >= x) above = c;
        CHECK(std::fabs(unit * F::value(F::code(x, unit, parameter_rounding::nearest)) - x) ==
              std::fabs(unit * F::value(nearest) - x));
        CHECK(F::code(x, unit, parameter_rounding::outside) == above);
        // The contract: at most one step of the mantissa (2 - largest) more than wanted, or the smallest
        // value.
        const double wanted = static_cast<double>(x), one = static_cast<double>(unit);
        if (wanted <= one * static_cast<double>(F::largest))
            CHECK(one * static_cast<double>(F::value(above)) <=
                  std::fmax(wanted * (3.0 - static_cast<double>(F::largest)),
                            one * static_cast<double>(F::smallest)));
        // The unit for x reaches x, and wastes no more than its own rounding.
        const float fitting = F::unit_for(x);
        CHECK(fitting * F::largest >= x);
        CHECK(fitting * F::largest <= x * (1.0f + 0x1p-6f));
    }
    CHECK(F::code(0.0f, 1.0f, parameter_rounding::outside) == 0);
    CHECK(F::code(1.0f, 0.0f, parameter_rounding::outside) == 0);
}

TEST_CASE("biases: on the line, nearest or not above, the range always inside") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 2000; ++round) {
        float lo = random.any_magnitude(-20, 20), hi = random.any_magnitude(-20, 20);
        if (lo > hi) std::swap(lo, hi);
        if (random.one_in(20)) hi = lo;
        const auto line = kvq::detail::bias_line::through(lo, hi);
        CHECK(line.at(0) <= lo);
        CHECK(line.at(255) >= hi - 0x1p-22f * std::fmax(std::fabs(lo), std::fabs(hi)));
        const float x = lo + (hi - lo) * random.uniform();
        const unsigned below = line.code(x, parameter_rounding::outside);
        const unsigned nearest = line.code(x, parameter_rounding::nearest);
        CHECK(line.at(below) <= x);
        if (below < 255 && static_cast<float>(line.step) > 0) CHECK(line.at(below + 1) > x);
        const double slack =
            0x1p-22 * (std::fabs(static_cast<double>(lo)) + std::fabs(static_cast<double>(hi)));
        CHECK(std::fabs(static_cast<double>(line.at(nearest)) - static_cast<double>(x)) <=
              static_cast<double>(static_cast<float>(line.step)) / 2 + slack);
    }
}

TEST_CASE_TEMPLATE("what is stored is what is loaded, for any groups and slots", P,
                   kvq::block_parameters<kvq::byte_params>, kvq::block_parameters<kvq::params<kvq::float16>>,
                   kvq::block_parameters<kvq::packed_params<kvq::float16>>,
                   kvq::block_parameters<kvq::params<float>>) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 50; ++round) {
        const int groups = random.between(1, 5), n = random.between(1, 40), slot_count = (n + 3) / 4 * 4;
        const auto size = static_cast<std::size_t>(n), all = static_cast<std::size_t>(slot_count);
        std::vector<std::byte> block(P::bytes(groups, slot_count) + 8, std::byte{0x5a});
        std::vector<std::vector<float>> scales, biases;
        for (int g = 0; g < groups; ++g) {
            scales.push_back(random.normals(size));
            for (float& x : scales.back()) x = std::fabs(x);
            biases.push_back(random.normals(size));
            // In either order: biases may be stored again.
            P::store_biases(block.data(), groups, slot_count, g, biases.back().data(), n,
                            parameter_rounding::outside);
            P::store_scales(block.data(), groups, slot_count, g, scales.back().data(), n,
                            parameter_rounding::nearest);
        }
        for (int g = 0; g < groups; ++g) {
            std::vector<float> s(all), b(all);
            P::template load_scales<kvq::detail::plain_loads>(block.data(), groups, slot_count, g, 0, n,
                                                              s.data());
            P::template load_biases<kvq::detail::plain_loads>(block.data(), groups, slot_count, g, 0, n,
                                                              b.data());
            s.resize(size);
            b.resize(size);
            CHECK(s == scales[static_cast<std::size_t>(g)]);
            CHECK(b == biases[static_cast<std::size_t>(g)]);
        }
        for (std::size_t i = block.size() - 8; i < block.size(); ++i) CHECK(block[i] == std::byte{0x5a});
    }
}
