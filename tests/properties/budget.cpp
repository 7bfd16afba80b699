// SPDX-License-Identifier: MIT
// Comparison family: exact, to the byte. The budget against caches of every kind that reserve every step
// there is; and engines that live on it. KVQ_BUDGET_ROUNDS=100 makes it long.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <kvq/estimate/budget.hpp>
#include <limits>

#include "support/caches.hpp"

namespace budget_tests {

using test::append;

const char* wanted() { return std::getenv("KVQ_BUDGET_ROUNDS"); }
int rounds(int usual) { return test::rounds(wanted() ? std::atoi(wanted()) : usual); }

/// A step of n more tokens for each sequence, under attention by two query heads for each of theirs.
void reserve(kvq::cache& cache, std::vector<kvq::sequence>& sequences, int n) {
    std::vector<kvq::step_request> step;
    for (kvq::sequence& s : sequences) step.push_back({&s, n, 1});
    kvq::workspace space;
    cache.reserve(step, 2 * cache.shape().kv_heads, 1, space);
}

struct need {
    std::size_t bytes = 0;
    int held = 0, added = 0;
};

/// The most bytes in use behind a reservation, of all lengths and all steps: tried one by one.
template <class C>
need least(C& cache, const test::stream& s, const kvq::budget_use& use) {
    need most;
    std::vector<kvq::sequence> one;
    one.push_back(cache.new_sequence());
    for (int held = 0; held < use.tokens; ++held) {
        for (int n = 1; n <= std::min(use.chunk, use.tokens - held); ++n) {
            reserve(cache, one, n);
            if (cache.bytes_in_use() > most.bytes) most = {cache.bytes_in_use(), held, n};
            one[0].release_reserved();
        }
        append(one[0], cache.shape().layers, s, held, 1);
    }
    return most;
}

TEST_CASE_TEMPLATE("the budget is what the hungriest step takes, and with one byte less that step fails", C,
                   test::plain_cache, test::int8_cache, test::kivi_cache, test::mixed_cache,
                   test::custom_cache, test::product_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < rounds(4); ++round) {
        const auto shape = test::random_cache_shape(random, random.between(1, 3), 8);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        if (random.one_in(3)) options.sinks = random.between(30, 80);
        const int longest = wanted() && random.one_in(8) ? 400 : 150;
        const kvq::budget_use use{.tokens = random.between(0, longest),
                                  .sequences = random.between(1, 3),
                                  .chunk = random.one_in(3) ? 1 : random.between(1, longest / 2)};
        INFO(use.tokens, " tokens in chunks of ", use.chunk, ", ", use.sequences, " sequences, sinks ",
             options.sinks, ", recent ", options.recent, ", pages of ", options.page_tokens, ", rollback ",
             options.rollback);
        auto unbounded = test::make_cache<C>(shape, options);
        const test::stream s(random, shape, longest);
        const need one = least(unbounded, s, use);
        const std::size_t budget = kvq::budget(unbounded.options(), shape, use);
        INFO("hungriest: ", one.added, " tokens more than ", one.held);
        REQUIRE(budget == one.bytes * static_cast<std::size_t>(use.sequences));
        if (budget == 0) continue;
        for (const std::size_t less : {0, 1}) {
            options.byte_budget = budget - less;
            auto cache = test::make_cache<C>(shape, options);
            std::vector<kvq::sequence> all;
            for (int i = 0; i < use.sequences; ++i) {
                all.push_back(cache.new_sequence());
                for (int at = 0; at < one.held; ++at) append(all.back(), shape.layers, s, at, 1);
            }
            if (less == 0)
                CHECK_NOTHROW(reserve(cache, all, one.added));
            else
                CHECK_THROWS_AS(reserve(cache, all, one.added), kvq::out_of_memory);
        }
    }
}

TEST_CASE("a budget of nothing, of nonsense, and of pages that are allocated up front") {
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 1, .head_dim = 3};
    kvq::cache_options options = test::kivi_cache(shape, {.page_tokens = 7}).options();
    CHECK(kvq::budget(options, shape, {.tokens = 0, .chunk = 9}) == 0);
    CHECK(kvq::budget(options, shape, {.tokens = 9, .sequences = 0}) == 0);
    CHECK_THROWS_AS((void)kvq::budget(options, shape, {.tokens = -1}), kvq::error);
    CHECK_THROWS_AS((void)kvq::budget(options, shape, {.tokens = std::numeric_limits<int>::max()}),
                    kvq::error);
    CHECK_THROWS_AS((void)kvq::budget(options, shape, {.tokens = 1, .sequences = -1}), kvq::error);
    CHECK_THROWS_AS((void)kvq::budget(options, shape, {.tokens = 1, .chunk = 0}), kvq::error);
    CHECK_THROWS_AS((void)kvq::budget(options, shape, {.tokens = 1, .cuts = -1}), kvq::error);
    // A chunk has no more tokens than a sequence, nor a sequence more cuts.
    constexpr int most = std::numeric_limits<int>::max();
    CHECK(kvq::budget(options, shape, {.tokens = 50, .chunk = most, .cuts = most}) ==
          kvq::budget(options, shape, {.tokens = 50, .chunk = 50, .cuts = 50}));
    const auto exact = kvq::budget(options, shape, {.tokens = 50});
    options.byte_budget = 1;
    options.preallocate = true;
    const auto rounded = kvq::budget(options, shape, {.tokens = 50});
    CHECK(rounded > exact);
    CHECK(rounded % 64 == 0);
    options.page_tokens = -1;
    CHECK_THROWS_AS((void)kvq::budget(options, shape, {.tokens = 1}), kvq::error);
}

TEST_CASE_TEMPLATE("cuts take no more than the budget adds for them", C, test::plain_cache, test::kivi_cache,
                   test::mixed_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < rounds(6); ++round) {
        auto shape = test::random_cache_shape(random, random.between(1, 3), 8);
        shape.head_dim = 8;
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        options.rotary = {{.dims = 8}};
        const int most = random.between(1, 6);
        kvq::budget_use use{.tokens = random.between(20, 200),
                            .chunk = random.one_in(3) ? 1 : random.between(1, 70)};
        auto cache = test::make_cache<C>(shape, options);
        const test::stream s(random, shape, 200);
        std::vector<kvq::sequence> one;
        one.push_back(cache.new_sequence());
        INFO(use.tokens, " tokens in chunks of ", use.chunk, ", sinks ", options.sinks, ", recent ",
             options.recent, ", pages of ", options.page_tokens, ", rollback ", options.rollback);
        std::size_t budget = 0;
        for (int step = 0, longest = 0, known = 0; step < 40; ++step) {
            const int held = one[0].tokens(), n = std::min(random.between(1, use.chunk), use.tokens - held);
            for (; known <= use.cuts; ++known) budget = kvq::budget(cache.options(), shape, use);
            if (n > 0) {
                reserve(cache, one, n);
                INFO("step ", step, ": ", n, " tokens more than ", held, ", ", use.cuts, " cuts");
                REQUIRE(cache.bytes_in_use() <= budget);
                append(one[0], shape.layers, s, held, n);
            }
            const int now = one[0].tokens();
            longest = std::max(longest, now);
            if (random.one_in(4)) {
                const int to = std::max(0, now - random.between(0, options.rollback));
                use.cuts += to < longest - options.rollback;
                one[0].trim(to);
            } else if (use.cuts < most && random.one_in(4)) {
                const int to = random.between(0, now);
                use.cuts += to < longest - options.rollback;
                one[0].trim(to);
                longest = to;
            } else if (use.cuts + 3 <= most && random.one_in(3)) {
                const int first = random.between(0, now);
                int last = random.between(first, now);
                if (random.one_in(2)) last = std::min(now, first + 3);
                if (random.one_in(2))
                    one[0].erase(first, last);
                else
                    one[0].shift(first, last, random.between(-5, 5));
                use.cuts += 3;
                longest = one[0].tokens();
            }
        }
    }
}

}  // namespace budget_tests
