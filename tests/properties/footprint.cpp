// SPDX-License-Identifier: MIT
// Comparison family: exact, to the byte. Footprints of every kind of cache, users' schemes and mixed layers
// included.
#include <doctest/doctest.h>

#include <algorithm>
#include <kvq/estimate/footprint.hpp>

#include "support/caches.hpp"
#include "support/memory.hpp"

using test::append;

TEST_CASE_TEMPLATE("footprint() equals what a cache allocates, at once or token by token", C, KVQ_TEST_CACHES,
                   test::bounded_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 8; ++round) {
        test::counting_resource memory;
        const auto shape = test::random_cache_shape(random, C::key_table::size);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        options.memory = &memory;
        auto cache = test::make_cache<C>(shape, options);
        const int n = random.between(0, 250);
        INFO(n, " tokens, sinks ", options.sinks, ", recent ", options.recent, ", pages of ",
             options.page_tokens, ", rollback ", options.rollback);
        const test::stream s(random, shape, 250);
        auto whole = cache.new_sequence();
        append(whole, shape.layers, s, 0, n);
        const auto one = kvq::footprint(cache, n);
        CHECK(memory.bytes() == one.total);
        const auto u = whole.usage();
        CHECK(one.quantized == u.quantized);
        CHECK(one.window == u.window);
        CHECK(one.rollback == u.rollback);
        CHECK(one.bookkeeping == u.bookkeeping);
        CHECK(one.workspace == u.workspace);

        auto stepwise = cache.new_sequence();
        for (int i = 0; i < n; ++i) append(stepwise, shape.layers, s, i, 1);
        CHECK(memory.bytes() == kvq::footprint(cache, n, 2).total);
    }
}

TEST_CASE_TEMPLATE("a decoding cache never holds more than footprint() and its transient part say", C,
                   KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 6; ++round) {
        test::counting_resource memory;
        const auto shape = test::random_cache_shape(random, C::key_table::size);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        options.memory = &memory;
        auto cache = test::make_cache<C>(shape, options);
        INFO("sinks ", options.sinks, ", recent ", options.recent, ", pages of ", options.page_tokens,
             ", rollback ", options.rollback);
        const test::stream s(random, shape, 200);
        auto sequence = cache.new_sequence();
        for (int n = 1; n <= 200; ++n) {
            memory.reset_peak();
            const std::size_t before = memory.bytes();  // layers that wait for their token hold what they did
            append(sequence, shape.layers, s, n - 1, 1);
            const auto f = kvq::footprint(cache, n);
            REQUIRE(memory.bytes() == f.total);
            REQUIRE(memory.peak() <= std::max(before, f.total) + f.transient);
        }
    }
}

TEST_CASE_TEMPLATE("the longest context fits its budget at every length, and one token more does not", C,
                   test::int8_cache, test::kivi_cache) {
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 16};
    test::generator random(test::seed());
    for (const std::size_t budget : {std::size_t{30000}, std::size_t{100000}, std::size_t{400000}}) {
        test::counting_resource memory;
        C cache(shape, {.sinks = 4, .recent = 20, .page_tokens = 16, .memory = &memory});
        const int longest = kvq::longest_context(cache, budget);
        INFO(longest, " tokens in ", budget, " bytes");
        REQUIRE(longest > 0);
        const auto beyond = kvq::footprint(cache, longest + 1);
        CHECK(beyond.total + beyond.transient > budget);
        const test::stream s(random, shape, longest);
        auto sequence = cache.new_sequence();
        for (int n = 0; n < longest; ++n) append(sequence, 2, s, n, 1);
        CHECK(memory.peak() <= budget);
    }
    for (int round = 0; round < 20; ++round) {
        C cache(shape, {.sinks = random.between(0, 5),
                        .recent = random.between(0, 40),
                        .page_tokens = random.pick(std::vector<int>{1, 8, 16, 30}),
                        .rollback = random.between(0, 40)});
        const int n = random.between(0, 300);
        // Budgets around what that length takes, which is where a page more or less decides.
        const auto f = kvq::footprint(cache, n);
        const std::size_t budget = f.total + f.transient - static_cast<std::size_t>(random.between(0, 1));
        int expected = -1;
        for (int m = 0;; ++m) {
            const auto each = kvq::footprint(cache, m);
            if (each.total + (m > 0 ? each.transient : 0) > budget) break;
            expected = m;
        }
        CHECK(kvq::longest_context(cache, budget) == expected);
    }
    C cache(shape);
    CHECK(kvq::longest_context(cache, 10) == -1);
    // A short context, none of which is quantized yet, holds nothing for a moment but what it keeps.
    C small(shape, {.sinks = 4, .recent = 20, .page_tokens = 16});
    for (int n = 1; n <= 30; ++n) {
        const auto f = kvq::footprint(small, n);
        CHECK(kvq::longest_context(small, f.total + f.transient) >= n);
    }
}

TEST_CASE("a footprint of nothing, and of nonsense") {
    test::kivi_cache cache({.layers = 1, .kv_heads = 1, .head_dim = 8});
    CHECK(kvq::footprint(cache, 0).quantized == 0);
    CHECK(kvq::footprint(cache, 100, 0).total == 0);
    CHECK_THROWS_AS((void)kvq::footprint(cache, -1), kvq::error);
    CHECK_THROWS_AS((void)kvq::footprint(cache, 1, -2), kvq::error);
    CHECK_THROWS_AS((void)kvq::footprint(cache, std::numeric_limits<int>::max()), kvq::error);
    // A chunk has no more tokens than the sequence.
    const auto whole = kvq::footprint(cache, 1000, 1, {.chunk = 1000});
    for (const int chunk : {1001, std::numeric_limits<int>::max()}) {
        const auto more = kvq::footprint(cache, 1000, 1, {.chunk = chunk});
        CHECK(more.total == whole.total);
        CHECK(more.transient == whole.transient);
    }
    CHECK(whole.transient > kvq::footprint(cache, 1000, 1, {.chunk = 1}).transient);
}
