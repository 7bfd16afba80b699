// SPDX-License-Identifier: MIT
// Comparison family: exact for what is held, a tolerance in terms of rounding for attention. A ring is the end of the
// sequence that was never cut, as far as a sliding window can see.
#include <doctest/doctest.h>

#include <kvq/adapters/ring.hpp>

#include "support/attention_error.hpp"
#include "support/caches.hpp"

namespace {

using ring_cache = kvq::cache<kvq::kivi<4, 8>>;
using ring = kvq::ring<ring_cache>;

/// The entries of the full sequence that begin at token `from` or later.
std::vector<test::held_page> end_of(std::vector<test::held_page> all, int from) {
    std::erase_if(all, [&](const test::held_page& p) { return p.first_token < from; });
    for (test::held_page& p : all) p.first_token -= from;
    return all;
}

}  // namespace

TEST_CASE(
    "random appends and trims: a ring holds the end of the full sequence, and attends like its sliding "
    "window") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    int refused = 0, trimmed = 0, overwritten = 0;
    for (int round = 0; round < 25; ++round) {
        const kvq::cache_shape shape{
            .layers = 2, .kv_heads = 2, .head_dim = 8, .value_dim = random.between(1, 9)};
        auto options = test::random_options(random);
        options.sinks = 0;
        options.page_tokens = random.pick(std::vector<int>{4, 7, 8});
        ring_cache cache(shape, options);
        const kvq::ring_options limits{random.pick(std::vector<int>{1, 5, 16, 40}),
                                       random.pick(std::vector<int>{0, 3, 20})};
        ring r(cache.new_sequence(), limits);
        auto full = cache.new_sequence();
        int longest = 0;
        const test::stream words(random, shape, 100);
        for (int step = 0; step < 40; ++step) {
            INFO("round ", round, " step ", step);
            int last = 0;
            longest = std::max(longest, full.tokens());
            if (random.one_in(4)) {
                const int n = random.between(0, full.tokens());
                const int first = std::max(0, n - limits.window + 1);
                if (first < r.first_token()) {
                    CHECK_THROWS_WITH_AS(r.trim(n), doctest::Contains("were overwritten"), kvq::error);
                    REQUIRE(longest - n > limits.slack);
                    ++refused;
                } else {
                    r.trim(n);
                    full.trim(n);
                    trimmed += r.first_token() > 0;
                }
            } else {
                last = random.one_in(3) ? random.between(0, 50) : random.between(0, 3);
                const int at = random.between(0, 50);
                for (int layer = 0; layer < 2; ++layer) {
                    r.append(layer, words.k.slice(at, last), words.v.slice(at, last));
                    full.append(layer, words.k.slice(at, last), words.v.slice(at, last));
                }
                REQUIRE(full.tokens() - last - r.first_token() <
                        limits.window + limits.slack + options.page_tokens);
            }
            overwritten += r.first_token() > 0;
            REQUIRE(r.tokens() == full.tokens());
            REQUIRE(r.first_token() % options.page_tokens == 0);
            REQUIRE(test::contents(cache, r.held()) == end_of(test::contents(cache, full), r.first_token()));

            const int visible = std::min({r.tokens() - r.first_token(), std::max(last, 1), r.tokens()});
            if (visible == 0) continue;
            const auto q = test::random_tensor(random, visible, 4, shape.head_dim);
            const int dim = shape.dim(kvq::tensor::value);
            test::tensor<float> a(visible, 4, dim), b(visible, 4, dim);
            const int layer = random.between(0, 1);
            if (r.first_token() > std::max(0, r.tokens() - visible - limits.window + 1)) {
                CHECK_THROWS_WITH_AS(r.attend(layer, q.view(), a.view()),
                                     doctest::Contains("were overwritten"), kvq::error);
                continue;
            }
            r.attend(layer, q.view(), a.view());
            full.attend(layer, q.view(), b.view(), kvq::sliding_window{limits.window});
            for (std::size_t i = 0; i < a.values().size(); ++i)
                REQUIRE(std::fabs(a.values()[i] - b.values()[i]) <=
                        1e-5f * (1.0f + std::fabs(b.values()[i])));
        }
    }
    CHECK(refused > 0);
    CHECK(trimmed > 0);
    CHECK(overwritten > 0);
}

TEST_CASE("decoding for ever takes the bytes of a window") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 1, .head_dim = 8};
    constexpr int window = 64, page_tokens = 8, slack = 4;
    ring_cache cache(shape, {.recent = 8, .page_tokens = page_tokens, .rollback = 0});
    ring r(cache.new_sequence(), {.window = window, .slack = slack});
    const test::stream words(random, shape, 100);
    std::size_t most = 0;
    for (int step = 0; step < 1000; ++step) {
        for (int layer = 0; layer < 2; ++layer)
            r.append(layer, words.k.slice(step % 100, 1), words.v.slice(step % 100, 1));
        if (step > 200) {
            most = std::max(most, cache.bytes_in_use());
            REQUIRE(r.held().tokens() >= window);
            REQUIRE(r.held().tokens() <= window + slack + page_tokens);
        }
    }
    CHECK(r.tokens() == 1000);
    auto longest = cache.new_sequence();
    for (int layer = 0; layer < 2; ++layer)
        longest.append(layer, words.k.slice(0, window + slack + page_tokens),
                       words.v.slice(0, window + slack + page_tokens));
    const std::size_t own = cache.bytes_in_use();
    longest = cache.new_sequence();
    CHECK(most <= own - cache.bytes_in_use() +
                      2 * 2 * kvq::page_pool::allocation(cache.page_bytes<kvq::tensor::key>(0, page_tokens)));
}

TEST_CASE("originals of dropped pages go with them, however far a rollback may reach") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 8};
    ring_cache cache(shape, {.page_tokens = 4, .rollback = 1000});
    ring r(cache.new_sequence(), {.window = 10, .slack = 2});
    const test::stream words(random, shape, 100);
    for (int i = 0; i < 100; ++i) r.append(0, words.k.slice(i, 1), words.v.slice(i, 1));
    const auto pages = static_cast<std::size_t>(kvq::detail::ceil_div(r.held().tokens(), 4));
    CHECK(pages <= 4);
    CHECK(cache.pool().pages_in_use() <= 2 * 2 * pages);
}

TEST_CASE("what was overwritten is named; options are checked") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 8};
    ring_cache cache(shape, {.page_tokens = 4}), sinks(shape, {.sinks = 1, .page_tokens = 4});
    const test::stream words(random, shape, 100);
    ring r(cache.new_sequence(), {.window = 10, .slack = 2});
    for (int i = 0; i < 50; ++i) r.append(0, words.k.slice(i, 1), words.v.slice(i, 1));
    // Before token 49: 49 - 2 - 10 + 1 = 38, whole pages of 4.
    CHECK(r.first_token() == 36);
    CHECK_THROWS_WITH_AS(
        r.trim(44),
        doctest::Contains("cannot trim to position 44: its window of 10 tokens begins at 35, but "
                          "tokens before 36 were overwritten"),
        kvq::error);
    CHECK_THROWS_AS(r.trim(51), kvq::error);
    CHECK_THROWS_AS(r.trim(-1), kvq::error);
    CHECK(r.tokens() == 50);
    test::tensor<float> out(3, 1, 8);
    CHECK_THROWS_WITH_AS(r.decode(0, kvq::tensor::key, 35, out.view()),
                         doctest::Contains("cannot decode from 35"), kvq::error);
    r.decode(0, kvq::tensor::key, 47, out.view());
    const auto held = test::decoded(r.held(), shape, 0, kvq::tensor::key);
    for (int c = 0; c < 8; ++c) CHECK(out.view().at(0, 0)[c] == held.view().at(11, 0)[c]);
    r.trim(45);
    CHECK(r.tokens() == 45);

    CHECK_THROWS_WITH_AS(ring(sinks.new_sequence(), {.window = 4}), doctest::Contains("1 sinks"), kvq::error);
    CHECK_THROWS_AS(ring(cache.new_sequence(), {.window = 0}), kvq::error);
    CHECK_THROWS_AS(ring(cache.new_sequence(), {.window = 4, .slack = -1}), kvq::error);
    ring_cache two({.layers = 2, .kv_heads = 1, .head_dim = 8}, {.page_tokens = 4});
    auto uneven = two.new_sequence();
    uneven.append(1, words.k.slice(0, 3), words.v.slice(0, 3));
    CHECK_THROWS_WITH_AS(ring(std::move(uneven), {.window = 4}),
                         doctest::Contains("layer 1 holds 3 tokens but layer 0 0"), kvq::error);
    const ring moved = std::move(r);
    CHECK_THROWS_WITH_AS(r.append(0, words.k.slice(0, 1), words.v.slice(0, 1)),
                         doctest::Contains("moved from"), kvq::error);
}
