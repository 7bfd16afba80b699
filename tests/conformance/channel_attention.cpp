// SPDX-License-Identifier: MIT
// Comparison family: mixed-precision reduction (tests/properties/attention.cpp). Attention on schemes with
// parameters per channel, with factors of tokens and with channels of different widths, against double
// arithmetic on the dequantized values. Built for several -march.
#include <doctest/doctest.h>

#include <algorithm>
#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/affine.hpp>

#include "support/attention_error.hpp"
#include "support/channel_plans.hpp"
#include "support/typed_cache.hpp"

namespace channel_attention_tests {

namespace {

constexpr double bound = 5e-4;

using kvq::byte_params;
using kvq::float16;
using kvq::packed_params;
using kvq::params;
using kvq::token_scales;
using mixed = kvq::mixed_affine<kvq::code_widths<6, 4, 3, 0>, kvq::average_eighths<26>, kvq::per_channel<64>>;
using keys =
    test::formats<kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::min_max>, mixed,
                  kvq::affine<2, kvq::per_channel<7>, byte_params, kvq::min_max, token_scales<byte_params>>>;
using values = test::formats<
    kvq::affine<4, kvq::per_channel<>, byte_params, kvq::min_max, token_scales<byte_params>>,
    kvq::affine<2, kvq::per_channel<64>, kvq::byte_params, kvq::mean_corrected<kvq::least_squares>>,
    kvq::affine<8, kvq::per_channel<5>, packed_params<float16>, kvq::min_max, token_scales<params<float16>>>>;

}  // namespace

#if defined(KVQ_TEST_FEWER_SCHEMES)
#define KVQ_TEST_BACKENDS kvq::simd<>
#else
#define KVQ_TEST_BACKENDS kvq::scalar, kvq::simd<>
#endif

TEST_CASE_TEMPLATE("attention with parameters per channel: any shape, page and length", Backend,
                   KVQ_TEST_BACKENDS) {
    using C = test::typed_cache<keys, values, Backend>;
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    test::attention_error worst;
    for (int round = 0; round < test::rounds(12); ++round) {
        kvq::cache_shape shape{.layers = 3, .kv_heads = random.between(1, 2), .head_dim = 0};
        shape.head_dim = random.pick(std::vector<int>{1, 3, 16, 17, 48, 64, 80, 96, 128, 200});
        shape.value_dim = random.one_in(2) ? 0 : random.between(1, 130);
        auto options = test::random_options(random);
        if (random.one_in(2)) options.page_tokens = random.pick(std::vector<int>{64, 128});
        options.layers = test::rotate_formats<C>(3);
        const kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::min_max> first;
        const auto plan = test::with_random_plan<mixed>(random, {3, shape.kv_heads, shape.head_dim});
        C cache(shape, options, typename C::key_table(first, random.one_in(3) ? mixed{} : plan, {}));
        const int n = random.one_in(4) ? random.between(1, 1500) : random.between(1, 400);
        const test::stream s(random, shape, n);
        auto sequence = cache.new_sequence();
        for (int layer = 0; layer < 3; ++layer) {
            sequence.append(layer, s.k.view(), s.v.view());
            const int rows = n > 300 || random.one_in(2) ? 1 : random.between(1, std::min(n, 21));
            const auto q =
                test::random_tensor(random, rows, shape.kv_heads * random.between(1, 6), shape.head_dim);
            INFO(n, " tokens of ", shape.head_dim, "/", shape.value_dim, ", layer ", layer, ", sinks ",
                 options.sinks, ", recent ", options.recent, ", pages of ", options.page_tokens, ", ", rows,
                 " query tokens of ", q.view().heads, " heads");
            const auto error = test::measure_attention(cache, sequence, layer, q);
            CHECK(error.relative <= bound);
            CHECK(error.of_terms <= bound);
            worst.include(error);
        }
    }
    if (std::getenv("KVQ_SEED"))
        MESSAGE("worst relative error ", worst.relative, ", of the terms ", worst.of_terms);
}

TEST_CASE("a trim into a quantized page of mixed widths, and a fork, keep every token's dequantized value") {
    using C = test::typed_cache<mixed, kvq::full<kvq::float16>, kvq::scalar>;
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 48};
    C cache(shape, {.sinks = 4, .recent = 8, .page_tokens = 32, .rollback = 0},
            typename C::key_table(test::with_random_plan<mixed>(random, shape)));
    const test::stream s(random, shape, 200);
    auto sequence = cache.new_sequence();
    sequence.append(0, s.k.view(), s.v.view());
    const auto before = test::dequantized(sequence, shape, 0, kvq::tensor::key);
    auto fork = sequence.fork();
    fork.trim(90);
    const auto after = test::dequantized(fork, shape, 0, kvq::tensor::key);
    for (int t = 0; t < 90; ++t)
        for (int h = 0; h < 2; ++h)
            for (int c = 0; c < 48; ++c)
                // Trimmed pages are window values: dequantized values rounded to fp16 once.
                CHECK(std::fabs(after.view().at(t, h)[c] - before.view().at(t, h)[c]) <=
                      std::fabs(before.view().at(t, h)[c]) * 0x1p-11f + 0x1p-25f);
    CHECK(test::dequantized(sequence, shape, 0, kvq::tensor::key).values() == before.values());
}

}  // namespace channel_attention_tests
