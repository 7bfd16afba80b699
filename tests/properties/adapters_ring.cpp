// SPDX-License-Identifier: MIT
// Comparison family: exact for what is held, a tolerance in terms of rounding for attention. A ring is the
// end of the sequence that was never cut, as far as a sliding window can see.
#include <doctest/doctest.h>

#include <kvq/policy/ring.hpp>

#include "support/attention_error.hpp"
#include "support/caches.hpp"

namespace adapters_ring_tests {

namespace {

using ring_cache = test::typed_cache<kvq::kivi<4, 8>>;
using ring = kvq::ring;

/// The entries of the full sequence that hold sinks or begin at token `from` or later, as if there were
/// nothing between.
std::vector<test::held_page> end_of(std::vector<test::held_page> all, int sinks, std::int64_t from) {
    if (from == 0) return all;
    std::erase_if(all,
                  [&](const test::held_page& p) { return p.first_token >= sinks && p.first_token < from; });
    for (test::held_page& p : all)
        if (p.first_token >= sinks) p.first_token -= static_cast<int>(from) - sinks;
    return all;
}

void append(kvq::ring& r, const kvq::cache_shape& shape, const test::stream& words, int at, int n) {
    for (int layer = 0; layer < shape.layers; ++layer)
        r.append(layer, words.k.slice(at, n), words.v.slice(at, n));
}

std::vector<float> attended(const kvq::ring& r, const test::tensor<float>& q, int value_dim) {
    test::tensor<float> out(q.view().tokens, q.view().heads, value_dim);
    r.attend(0, q.view(), out.view());
    return {out.values().begin(), out.values().end()};
}

}  // namespace

TEST_CASE(
    "random appends and trims: a ring holds the end of the full sequence, and attends like its sliding "
    "window") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    int refused = 0, trimmed = 0, overwritten = 0, behind_sinks = 0;
    for (int round = 0; round < 25; ++round) {
        const kvq::cache_shape shape{
            .layers = 2, .kv_heads = 2, .head_dim = 8, .value_dim = random.between(1, 9)};
        auto options = test::random_options(random);
        options.sinks = random.one_in(2) ? 0 : random.between(1, 9);
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
            if (random.one_in(4)) {
                // Whoever goes on with a fork, or with the sequence and its position, has the same ring.
                ring other = random.one_in(2) ? r.fork() : ring(r.held().fork(), limits, r.first_token());
                append(r, shape, words, 0, random.between(1, 9));
                r = std::move(other);
            }
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
                append(r, shape, words, at, last);
                test::append(full, 2, words, at, last);
                REQUIRE(full.tokens() - last - std::max<std::int64_t>(r.first_token(), options.sinks) <
                        limits.window + limits.slack + options.page_tokens);
            }
            const auto first_token = static_cast<int>(r.first_token());
            overwritten += first_token > 0;
            behind_sinks += first_token > 0 && options.sinks > 0;
            REQUIRE(r.tokens() == full.tokens());
            REQUIRE(test::contents(cache, r.held()) ==
                    end_of(test::contents(cache, full), options.sinks, first_token));

            const int visible = std::min(full.tokens() - first_token, std::max(last, 1));
            if (visible == 0) continue;
            const auto q = test::random_tensor(random, visible, 4, shape.head_dim);
            const int dim = shape.dim(kvq::tensor::value);
            test::tensor<float> a(visible, 4, dim), b(visible, 4, dim);
            const int layer = random.between(0, 1);
            if (first_token > std::max(0, full.tokens() - visible - limits.window + 1)) {
                CHECK_THROWS_WITH_AS(r.attend(layer, q.view(), a.view()),
                                     doctest::Contains("were overwritten"), kvq::error);
                continue;
            }
            r.attend(layer, q.view(), a.view());
            full.attend(layer, q.view(), b.view(), kvq::sink_window{limits.window, options.sinks});
            for (std::size_t i = 0; i < a.values().size(); ++i)
                REQUIRE(std::fabs(a.values()[i] - b.values()[i]) <=
                        1e-5f * (1.0f + std::fabs(b.values()[i])));
        }
    }
    CHECK(refused > 0);
    CHECK(trimmed > 0);
    CHECK(overwritten > 0);
    CHECK(behind_sinks > 0);
}

TEST_CASE("a ring goes on past 2^31 tokens, with and without sinks") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 1, .head_dim = 8};
    const test::stream words(random, shape, 100);
    const auto q = test::random_tensor(random, 1, 2, 8);
    constexpr std::int64_t end = std::int64_t{1} << 31;
    for (const int sinks : {0, 3}) {
        ring_cache cache(shape, {.sinks = sinks, .page_tokens = 4});
        ring near(cache.new_sequence(), {.window = 10, .slack = 2});
        append(near, shape, words, 0, 30);
        append(near, shape, words, 30, 1);
        const std::int64_t moved = end - 40 - near.tokens();
        ring far(near.held().fork(), near.options(), near.first_token() + moved);
        REQUIRE(far.tokens() == end - 40);
        for (int i = 0; i < 100; ++i) {
            append(near, shape, words, i, 1);
            append(far, shape, words, i, 1);
            REQUIRE(far.tokens() == end - 39 + i);
            REQUIRE(far.first_token() == near.first_token() + moved);
            REQUIRE(attended(far, q, 8) == attended(near, q, 8));
        }
        REQUIRE(far.first_token() > end);
        REQUIRE(test::contents(cache, far.held()) == test::contents(cache, near.held()));
        test::tensor<float> a(3, 1, 8), b(3, 1, 8);
        far.dequantize(1, kvq::tensor::key, far.tokens() - 3, a.view());
        near.dequantize(1, kvq::tensor::key, near.tokens() - 3, b.view());
        CHECK(a.values() == b.values());
        far.trim(far.tokens() - 2);
        CHECK(far.tokens() == end + 58);
        CHECK_THROWS_WITH_AS(far.trim(end), doctest::Contains("cannot trim to position 2147483648"),
                             kvq::error);
        CHECK_THROWS_WITH_AS(far.dequantize(0, kvq::tensor::key, end + 57, a.view()),
                             doctest::Contains("3 tokens from 2147483705 on: 2147483706"), kvq::error);
    }
}

TEST_CASE("what a ring holds is requantized and stepped down like the end of any sequence") {
    test::generator random(test::seed());
    using cache_type = test::typed_cache<test::formats<kvq::full<kvq::float16>, kvq::int8, kvq::affine<4>>>;
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 1, .head_dim = 32};
    const test::stream words(random, shape, 100);
    const auto q = test::random_tensor(random, 1, 2, 32);
    for (const int sinks : {0, 3}) {
        const kvq::cache_options options{.sinks = sinks, .recent = 8, .page_tokens = 4, .rollback = 0};
        cache_type cache(shape, options), copy(shape, options);
        kvq::ring r(cache.new_sequence(), {.window = 40, .slack = 2});
        auto full = copy.new_sequence();
        for (int i = 0; i < 100; ++i) append(r, shape, words, i, 1);
        test::append(full, 2, words, 0, 100);
        REQUIRE(r.first_token() > 0);
        const auto same = [&] {
            REQUIRE(test::contents(cache, r.held()) ==
                    end_of(test::contents(copy, full), sinks, r.first_token()));
        };
        same();
        const auto before = test::contents(cache, r.held());
        const kvq::requantize_request to_int8{.key = 1, .value = 1, .new_pages = true};
        const auto shared = r.fork();
        CHECK(cache.requantize(r.held(), to_int8).pages > 0);
        copy.requantize(full, to_int8);
        same();
        CHECK(test::contents(cache, shared.held()) == before);
        const kvq::step_down_policy policy{
            .tiers = {{.age = 0, .format = {1, 1}}, {.age = 20, .format = {2, 2}}}};
        CHECK(!kvq::step_down(cache, r.held(), policy).steps.empty());
        kvq::step_down(copy, full, policy);
        same();
        // And goes on.
        append(r, shape, words, 0, 20);
        test::append(full, 2, words, 0, 20);
        same();
        test::tensor<float> out(1, 2, 32);
        full.attend(0, q.view(), out.view(), kvq::sink_window{40, sinks});
        const auto got = attended(r, q, 32);
        for (std::size_t i = 0; i < got.size(); ++i)
            CHECK(std::fabs(got[i] - out.values()[i]) <= 1e-5f * (1.0f + std::fabs(out.values()[i])));
    }
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
                      2 * 2 * kvq::page_pool::allocation(cache.page_bytes(kvq::tensor::key, 0, page_tokens)));
}

TEST_CASE("16-bit copies of dropped pages go with them, however far a rollback may reach") {
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
    ring_cache cache(shape, {.page_tokens = 4}), with_sinks(shape, {.sinks = 3, .page_tokens = 4});
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
    CHECK_THROWS_WITH_AS(r.dequantize(0, kvq::tensor::key, 35, out.view()),
                         doctest::Contains("were overwritten, cannot dequantize 3 from 35 on"), kvq::error);
    r.dequantize(0, kvq::tensor::key, 47, out.view());
    const auto held = test::dequantized(r.held(), shape, 0, kvq::tensor::key);
    for (int c = 0; c < 8; ++c) CHECK(out.view().at(0, 0)[c] == held.view().at(11, 0)[c]);
    r.trim(45);
    CHECK(r.tokens() == 45);
    // More tokens than can be counted are refused before any is read.
    constexpr int most = std::numeric_limits<int>::max();
    const kvq::token_view<const float> endless(words.k.view().at(0, 0), most, 1, 8);
    for (const int queries : {1, most}) {
        const kvq::token_view<const float> q(words.k.view().at(0, 0), queries, 1, 8);
        const kvq::token_view<float> to(out.view().at(0, 0), queries, 1, 8);
        CHECK_THROWS_WITH_AS(r.prefill(0, endless, endless, q, to),
                             doctest::Contains("a sequence of 9 tokens cannot take 2147483647 more"),
                             kvq::error);
    }
    CHECK(r.tokens() == 45);
    CHECK(r.held().tokens() == 9);

    ring s(with_sinks.new_sequence(), {.window = 10, .slack = 2});
    for (int i = 0; i < 50; ++i) s.append(0, words.k.slice(i, 1), words.v.slice(i, 1));
    CHECK(s.first_token() == 35);
    CHECK_THROWS_WITH_AS(
        s.dequantize(0, kvq::tensor::key, 1, out.view()),
        doctest::Contains("tokens from 3 to 35 were overwritten, cannot dequantize 3 from 1 on"), kvq::error);
    CHECK_THROWS_AS(s.dequantize(0, kvq::tensor::key, 34, out.view()), kvq::error);
    CHECK_THROWS_AS(s.dequantize(0, kvq::tensor::key, -1, out.view()), kvq::error);
    for (const int at : {0, 40}) {
        s.dequantize(0, kvq::tensor::value, at, out.view());
        for (int t = 0; t < 3; ++t)
            for (int c = 0; c < 8; ++c)
                CHECK(std::fabs(out.view().at(t, 0)[c] - words.v.view().at(at + t, 0)[c]) < 0.5f);
    }
    CHECK_THROWS_AS(s.trim(3), kvq::error);

    // A position needs a window before it, and sinks in front.
    const auto at = [&](ring_cache& c, int tokens, std::int64_t position) {
        auto sequence = c.new_sequence();
        sequence.append(0, words.k.slice(0, tokens), words.v.slice(0, tokens));
        return ring(std::move(sequence), {.window = 10}, position);
    };
    CHECK(at(cache, 9, 20).tokens() == 29);
    CHECK_THROWS_WITH_AS(at(cache, 8, 20),
                         doctest::Contains("cannot begin at position 28: its window of 10 tokens begins at "
                                           "19, but tokens before 20 were overwritten"),
                         kvq::error);
    CHECK(at(with_sinks, 12, 20).tokens() == 29);
    CHECK_THROWS_AS(at(with_sinks, 11, 20), kvq::error);
    CHECK(at(with_sinks, 12, 3).first_token() == 0);
    CHECK_THROWS_WITH_AS(
        at(with_sinks, 12, 2),
        doctest::Contains(
            "before position 2 cannot have been dropped behind 3 sinks of a sequence of 12 tokens"),
        kvq::error);
    CHECK_THROWS_AS(at(with_sinks, 2, 20), kvq::error);
    CHECK_THROWS_WITH_AS(at(cache, 20, -1), doctest::Contains("position -1"), kvq::error);
    CHECK_THROWS_AS(at(cache, 20, std::numeric_limits<std::int64_t>::max()), kvq::error);
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

}  // namespace adapters_ring_tests
