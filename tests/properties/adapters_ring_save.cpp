// SPDX-License-Identifier: MIT
// Comparison family: exact. A ring that was saved as its sequence and the position of it goes on as if it
// never had been.
#include <doctest/doctest.h>

#include <kvq/policy/ring.hpp>

#include "support/saved.hpp"
#include "support/typed_cache.hpp"

TEST_CASE("a saved ring goes on where it was, sinks and positions included") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using cache_type = test::typed_cache<kvq::kivi<4, 8>>;
    using ring = kvq::ring;
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 1, .head_dim = 8};
    const test::stream words(random, shape, 100);
    const auto append = [&](ring& r, int at, int n) {
        for (int layer = 0; layer < 2; ++layer) r.append(layer, words.k.slice(at, n), words.v.slice(at, n));
    };
    for (const int sinks : {0, 3})
        for (const int tokens : {0, 2, 15, 100}) {
            INFO(sinks, " sinks, ", tokens, " tokens");
            const kvq::cache_options options{.sinks = sinks, .recent = 5, .page_tokens = 4, .rollback = 6};
            cache_type cache(shape, options), other(shape, options);
            ring r(cache.new_sequence(), {.window = 10, .slack = 4});
            for (int i = 0; i < tokens; ++i) append(r, i, 1);
            REQUIRE((r.first_token() > 0) == (tokens > 20));
            ring again(test::restored(other, test::saved(r.held())), r.options(), r.first_token());
            for (int step = 0; step < 40; ++step) {
                REQUIRE(again.tokens() == r.tokens());
                REQUIRE(again.first_token() == r.first_token());
                REQUIRE(test::contents(other, again.held()) == test::contents(cache, r.held()));
                if (random.one_in(4) && r.tokens() > 4) {
                    const std::int64_t n = r.tokens() - random.between(0, 1);
                    r.trim(n);
                    again.trim(n);
                }
                const int at = random.between(0, 99);
                append(r, at, 1);
                append(again, at, 1);
                const auto q = test::random_tensor(random, 1, 2, 8);
                test::tensor<float> a(1, 2, 8), b(1, 2, 8);
                r.attend(1, q.view(), a.view());
                again.attend(1, q.view(), b.view());
                REQUIRE(a.values() == b.values());
            }
        }
}
