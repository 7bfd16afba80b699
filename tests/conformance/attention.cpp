// SPDX-License-Identifier: MIT
// Comparison family: mixed-precision reduction (tests/properties/attention.cpp). The SIMD kernels against
// double arithmetic, and their results against each other whatever the number of threads. Built for several
// -march.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <kvq/core/thread_pool.hpp>
#include <kvq/cpu/simd.hpp>

#include "support/attention_error.hpp"
#include "support/peaked.hpp"
#include "support/typed_cache.hpp"

namespace attention_conformance_tests {

namespace {

constexpr double bound = 5e-4;

template <class K, class V, class Window = kvq::float16>
using simd_cache = test::typed_cache<K, V, kvq::simd<>, Window>;

#if defined(KVQ_TEST_FEWER_SCHEMES)
// Weaker instruction sets: what differs between them are the registers, not the schemes.
using every_width =
    simd_cache<test::formats<kvq::affine<3, kvq::per_token<64>>, kvq::affine<4, kvq::per_channel<7>>>,
               test::formats<kvq::affine<2, kvq::per_token<32>>, kvq::int8>>;
using users = simd_cache<test::formats<test::odd_keys, test::rotated>,
                         test::formats<test::product_scheme<7>, test::magnitude_bytes>>;
#else
using every_width = simd_cache<
    test::formats<kvq::affine<1, kvq::per_token<0>>, kvq::affine<3, kvq::per_token<64>>,
                  kvq::affine<4, kvq::per_channel<7>>, kvq::affine<6, kvq::per_channel<0>>,
                  kvq::affine<8, kvq::per_channel<64>>>,
    test::formats<kvq::affine<2, kvq::per_token<32>>, kvq::affine<4, kvq::per_token<5>>,
                  kvq::affine<5, kvq::per_channel<7>>, kvq::affine<7, kvq::per_channel<32>>, kvq::int8>>;
using users = simd_cache<
    test::formats<test::odd_keys, test::magnitude_bytes, test::product_scheme<4>, test::rotated>,
    test::formats<test::rotated, test::product_scheme<7>, test::odd_values, test::magnitude_bytes>>;
#endif
using float_window = simd_cache<kvq::affine<8>, kvq::full<kvq::bfloat16>, float>;
using bfloat_window = simd_cache<kvq::kivi<4>, kvq::kivi<4>, kvq::bfloat16>;

}  // namespace

TEST_CASE_TEMPLATE("SIMD attention against double arithmetic: any width, shape, mix and length", C,
                   every_width, users, float_window, bfloat_window) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(10); ++round) {
        kvq::cache_shape shape{
            .layers = C::key_table::size - 1, .kv_heads = random.between(1, 2), .head_dim = 0};
        shape.head_dim = random.pick(std::vector<int>{1, 2, 3, 8, 15, 16, 17, 31, 48, 64, 80, 96, 128, 256});
        shape.value_dim = random.one_in(2) ? 0 : random.between(1, 130);
        auto options = test::random_options(random);
        if (random.one_in(2)) options.page_tokens = 64;
        options.layers = test::rotate_formats<C>(shape.layers);
        auto cache = test::make_cache<C>(shape, options);
        const int n = random.one_in(4) ? random.between(1, 2500) : random.between(1, 300);
        const test::stream s(random, shape, n);
        auto sequence = cache.new_sequence();
        for (int layer = 0; layer < shape.layers; ++layer) {
            sequence.append(layer, s.k.view(), s.v.view());
            const int rows = n > 300 || random.one_in(2) ? 1 : random.between(1, std::min(n, 21));
            const auto q =
                test::random_tensor(random, rows, shape.kv_heads * random.between(1, 6), shape.head_dim);
            const std::string on = kvq::simd<>::name();
            INFO(on, ": ", n, " tokens of ", shape.head_dim, "/", shape.value_dim, ", layer ", layer,
                 ", sinks ", options.sinks, ", recent ", options.recent, ", pages of ", options.page_tokens,
                 ", ", rows, " query tokens of ", q.view().heads, " heads");
            const auto error = test::measure_attention(cache, sequence, layer, q);
            CHECK(error.relative <= bound);
            CHECK(error.of_terms <= bound);
        }
    }
}

TEST_CASE("SIMD attention where one key of every page dominates") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::format keys[] = {test::made<kvq::simd<>>(kvq::affine<3, kvq::per_token<64>>()),
                                test::made<kvq::simd<>>(kvq::affine<4, kvq::per_channel<7>>()),
                                test::made<kvq::simd<>>(kvq::full<kvq::float16>())},
                      values[] = {test::made<kvq::simd<>>(kvq::affine<2, kvq::per_token<32>>()),
                                  test::made<kvq::simd<>>(kvq::int8()),
                                  test::made<kvq::simd<>>(kvq::full<kvq::float16>())};
    for (const int page : {32, 512})
        for (const int rows : {1, 17})
            for (std::size_t i = 0; i < std::size(keys); ++i) {
                const test::peaked_case of{1100, page, rows, random.one_in(2) ? 1.0f : 3.0f,
                                           random.one_in(2)};
                const auto error = test::measure_peaked(keys[i], values[i], of, random);
                const std::string on = kvq::simd<>::name();
                INFO(on, ", ", std::string(keys[i].name()), ": ", of.text());
                CHECK(error.output <= of.bound());
                CHECK(error.lse <= error.lse_bound());
            }
}

TEST_CASE("SIMD attention: same bits on one thread and on many, alone and in a batch") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using C = bfloat_window;
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 48, .value_dim = 40};
    C cache(shape, {.sinks = 4, .recent = 20, .page_tokens = 32});
    const test::stream s(random, shape, 4500);
    auto sequence = cache.new_sequence();
    test::append(sequence, 1, s, 0, 4500);
    for (const int rows : {1, 3, 20}) {
        const auto q = test::random_tensor(random, rows, 6, 48);
        test::tensor<float> expected(rows, 6, 40), out(rows, 6, 40), last(1, 6, 40);
        sequence.attend(0, q.view(), expected.view());
        kvq::workspace space;
        for (int threads = 1; threads <= 4; ++threads) {
            sequence.attend(0, q.view(), out.view(), kvq::causal{}, kvq::thread_pool(threads), space);
            CHECK(out.values() == expected.values());
        }
        sequence.attend(0, q.slice(rows - 1, 1), last.view());
        // From 16 query rows on, 16-bit pages may be multiplied as integers (cpu/window/word_product.hpp):
        // within the bound then.
        const float* const among_all = expected.view().at(rows - 1, 0);
        const bool words = kvq::kernels::has_word_dots<kvq::simd<>::lanes> && 3 * rows >= 16;
        if (!words) CHECK(std::equal(last.values().begin(), last.values().end(), among_all));
        double error = 0.0, power = 0.0;
        for (std::size_t i = 0; i < last.values().size(); ++i) {
            error += std::pow(static_cast<double>(last.values()[i]) - static_cast<double>(among_all[i]), 2.0);
            power += std::pow(static_cast<double>(among_all[i]), 2.0);
        }
        CHECK(std::sqrt(error) <= bound * std::sqrt(power));
    }
}

}  // namespace attention_conformance_tests
