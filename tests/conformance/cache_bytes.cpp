// SPDX-License-Identifier: MIT
// Comparison family: exact. Caches hold the same bytes on every backend, whatever their history and whatever
// the program does with subnormal floats. Built for several -march.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <kvq/cpu/scalar.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/presets.hpp>

#include "support/caches.hpp"
#include "support/flushed_subnormals.hpp"
#include "support/random.hpp"

namespace cache_bytes_tests {

namespace {

using native = kvq::simd<>;

}  // namespace

#if defined(KVQ_TEST_FLUSHES)
TEST_CASE_TEMPLATE("the same numbers whether or not the program flushes subnormal floats to zero", T, float,
                   kvq::float16) {
    using cache_type =
        test::typed_cache<test::formats<kvq::affine<4, kvq::per_channel<32>>, kvq::int8, kvq::low2::keys>,
                          test::formats<kvq::affine<2, kvq::per_token<32>>, kvq::std4::values>, native>;
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{6, 2, 64};
    auto options = test::random_options(random);
    options.page_tokens = 32;
    options.recent = 40;
    options.layers = test::rotate_formats<cache_type>(shape.layers);
    for (const float size : {1e-4f, 2e-5f, 1e-6f}) {
        std::vector<T> x(static_cast<std::size_t>(200 * 2 * 64));
        for (T& v : x) v = T(size * random.normal());
        const kvq::token_view<const T> tokens(x.data(), 200, 2, 64);
        const auto dequantized = [&] {
            std::vector<std::vector<T>> all;
            auto cache = test::make_cache<cache_type>(shape, options);
            auto sequence = cache.new_sequence();
            for (int layer = 0; layer < shape.layers; ++layer) {
                sequence.append(layer, tokens.slice(0, 90), tokens.slice(0, 90));
                for (int t = 90; t < 200; ++t) sequence.append(layer, tokens.slice(t, 1), tokens.slice(t, 1));
                for (const kvq::tensor role : {kvq::tensor::key, kvq::tensor::value}) {
                    std::vector<T> out(x.size());
                    sequence.dequantize(layer, role, 0, kvq::token_view<T>(out.data(), 200, 2, 64));
                    all.push_back(out);
                }
            }
            return all;
        };
        const auto expected = dequantized();
        const test::flushed_subnormals flushed;
        const auto got = dequantized();
        for (std::size_t i = 0; i < got.size(); ++i)
            CHECK(std::memcmp(got[i].data(), expected[i].data(), sizeof(T) * got[i].size()) == 0);
    }
}
#endif

TEST_CASE("a cache holds the same bytes on every backend, whatever its history") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using keys = test::formats<kvq::affine<3, kvq::per_channel<7>>, kvq::int8, test::magnitude_bytes,
                               kvq::full<kvq::bfloat16>>;
    using values = test::formats<kvq::affine<4, kvq::per_token<32>>, test::rotated, kvq::full<float>>;
    constexpr int layers = 5;
    using reference = test::typed_cache<keys, values, kvq::scalar>;
    using other = test::typed_cache<keys, values, native>;
    for (int round = 0; round < test::rounds(6); ++round) {
        const auto shape = test::random_cache_shape(random, layers, 70);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<reference>(layers);
        auto a = test::make_cache<reference>(shape, options);
        auto b = test::make_cache<other>(shape, options);
        auto x = a.new_sequence();
        auto y = b.new_sequence();
        test::stream s(random, shape, 200);
        for (float& v : s.v.values())
            if (random.one_in(200)) v = random.pick(test::hostile_values());
        for (int step = 0; step < 12; ++step) {
            const int held = x.tokens(), n = random.between(0, std::min(60, 200 - held)),
                      cut = random.between(0, held);
            const bool trims = random.one_in(4);
            if (trims) {
                x.trim(cut);
                y.trim(cut);
            } else {
                test::append(x, layers, s, held, n);
                test::append(y, layers, s, held, n);
            }
            REQUIRE(test::contents(a, x) == test::contents(b, y));
            REQUIRE(x.usage().not_finite == y.usage().not_finite);
        }
    }
}

}  // namespace cache_bytes_tests
