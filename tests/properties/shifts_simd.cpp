// SPDX-License-Identifier: MIT
// Comparison family: double arithmetic. Keys that moved, on the kernels of this CPU: every way in which a
// kernel keeps what it made of a query (once per page, once for all pages, transformed) sees the query of the
// page.
#include <doctest/doctest.h>

#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/transformed.hpp>

#include "support/attention_error.hpp"
#include "support/typed_cache.hpp"

namespace shifts_simd_tests {

namespace {

template <class Keys, class Values>
using simd_cache = test::typed_cache<Keys, Values, kvq::simd<>>;
using all_keys = test::formats<kvq::full<kvq::float16>, kvq::int8, kvq::kivi<4, 32>::keys, kvq::std4::keys,
                               kvq::low2::keys, kvq::hadamard<kvq::affine<4>>>;
using all_values = test::formats<kvq::affine<4>>;

}  // namespace

TEST_CASE("attention over moved keys of every kind of kernel, for one row and for many") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 6, .kv_heads = 1, .head_dim = 64};
    kvq::rotary_embedding rotary;
    rotary.dims = 64;
    kvq::cache_options options{.sinks = 4, .recent = 20, .page_tokens = 32};
    options.rotary = {rotary};
    options.layers = {{0, 0}, {1, 0}, {2, 0}, {3, 0}, {4, 0}, {5, 0}};
    simd_cache<all_keys, all_values> cache(shape, options);
    const test::stream text(random, shape, 400);
    for (int round = 0; round < 6; ++round) {
        auto s = cache.new_sequence();
        test::append(s, shape.layers, text, 0, 300);
        for (int i = 0; i < 5; ++i) {
            const int first = random.between(0, s.tokens() - 40);
            if (random.one_in(2))
                s.erase(first, first + random.between(1, 30));
            else
                s.shift(first, s.tokens(), random.between(-500, 500));
        }
        test::append(s, shape.layers, text, 300, 30);
        // Pages of all formats in one layer, with different shifts side by side.
        if (round > 2)
            for (int format = 0; format < 6; ++format)
                cache.requantize(s,
                                 {.key = format, .first_token = 30 * format, .last_token = 30 * format + 60});
        for (int layer = 0; layer < shape.layers; ++layer)
            for (const int rows : {1, 5, 40}) {
                const auto q = test::random_tensor(random, rows, 4, shape.head_dim);
                INFO("round ", round, " layer ", layer, " rows ", rows);
                CHECK(test::measure_attention(cache, s, layer, q).of_terms < 1e-3);
            }
    }
}

}  // namespace shifts_simd_tests
