// SPDX-License-Identifier: MIT
// Comparison family: exact, to the byte. What usage() says is what the memory resource gave out.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "support/caches.hpp"
#include "support/memory.hpp"

using test::append;
using test::attention_bits;
using test::contents;

TEST_CASE_TEMPLATE("usage() accounts for every byte that a sequence takes, after any history", C,
                   KVQ_TEST_CACHES, test::bounded_cache) {
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
        {
            const test::stream s(random, shape, 300);
            auto sequence = cache.new_sequence();
            for (int step = 0; step < 30; ++step) {
                const int held = sequence.tokens();
                if (random.one_in(3))
                    sequence.trim(random.between(0, held));
                else
                    append(sequence, shape.layers, s, held, random.between(0, std::min(70, 300 - held)));
                const auto u = sequence.usage();
                REQUIRE(memory.bytes() == u.bytes);
                REQUIRE(u.bytes == u.quantized + u.window + u.rollback + u.bookkeeping + u.workspace);
                REQUIRE(cache.bytes_in_use() == u.quantized + u.window + u.rollback +
                                                    cache.pool().pages_in_use() * sizeof(kvq::page));
                REQUIRE(u.slack <= u.window);
                REQUIRE(u.tokens == sequence.tokens());
            }
        }
        CHECK(memory.bytes() == 0);
        CHECK(memory.blocks() == 0);
    }
}

TEST_CASE("the parts of usage(): an example that can be checked by hand") {
    // 100 tokens, 4 of them sinks: pages of 16 begin at 4, 20, 36, 52, 68, 84, 100. With 20 recent tokens the
    // four that end at 68 or before are quantized (at 40, 56, 72 and 88 tokens); the 16-bit copies of the
    // last one are kept, because a trim by 16 to 84 tokens would want them.
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 64};
    test::typed_cache<kvq::affine<4>> cache(shape,
                                            {.sinks = 4, .recent = 20, .page_tokens = 16, .rollback = 16});
    test::generator random(1);
    const test::stream s(random, shape, 100);
    auto sequence = cache.new_sequence();
    append(sequence, 1, s, 0, 100);
    const auto u = sequence.usage();
    const std::size_t quantized_page = 2 * 16 * (32 + 4), window_page = 2 * 16 * 64 * 2,
                      sink_page = 2 * 4 * 64 * 2;
    CHECK(u.quantized == 2 * 4 * quantized_page);
    CHECK(u.window == 2 * (2 * window_page + sink_page));
    CHECK(u.slack == 0);
    CHECK(u.rollback == 2 * window_page);
    CHECK(u.workspace == 16 * 64 * sizeof(float));
    CHECK(u.tokens == 100);
    CHECK(u.pages == 2 * 8);
    CHECK(u.shared == 0);
    CHECK(cache.bytes_in_use() == u.quantized + u.window + u.rollback + u.pages * 64);
    {
        const auto fork = sequence.fork();
        CHECK(fork.usage().shared == u.quantized + u.window + u.rollback);
        CHECK(sequence.usage().shared == fork.usage().shared);
    }
    CHECK(sequence.usage().shared == 0);
    // The next token opens a page of which it uses one sixteenth.
    append(sequence, 1, s, 0, 1);
    CHECK(sequence.usage().slack == 2 * window_page / 16 * 15);
}

TEST_CASE("not_finite counts what is in 16-bit pages and what was quantized, once per value") {
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 8};
    test::kivi_cache cache(shape, {.sinks = 1, .recent = 4, .page_tokens = 8});
    test::generator random(test::seed());
    test::stream s(random, shape, 33);
    const auto at = [](auto& t, int token, int head, int channel) -> float& {
        return t.view().at(token, head)[channel];
    };
    at(s.k, 0, 0, 0) = NAN;        // a sink: never quantized
    at(s.k, 3, 1, 2) = NAN;        // page 0
    at(s.k, 3, 1, 3) = INFINITY;   // page 0
    at(s.v, 9, 0, 7) = -1e9f;      // page 1: beyond the 16-bit window, so an infinity
    at(s.v, 30, 0, 0) = INFINITY;  // not yet quantized
    auto sequence = cache.new_sequence();
    append(sequence, 2, s, 0, 33);
    CHECK(sequence.usage().not_finite == 2 * 5);
    auto copy = sequence.fork();
    CHECK(copy.usage().not_finite == 2 * 5);
}

TEST_CASE("quantized bytes per token are what the estimate says") {
    const kvq::cache_shape shape{.layers = 3, .kv_heads = 2, .head_dim = 48, .value_dim = 40};
    test::typed_cache<kvq::kivi<4, 32>> cache(shape, {.page_tokens = 64, .rollback = 0});
    test::generator random(1);
    const test::stream s(random, shape, 640);
    auto sequence = cache.new_sequence();
    append(sequence, 3, s, 0, 640);
    const double per_token =
        kvq::bytes_per_token(shape, 64, test::made<test::usual>(kvq::kivi<4, 32>::keys{}),
                             test::made<test::usual>(kvq::kivi<4, 32>::values{}));
    CHECK(static_cast<double>(sequence.usage().quantized) == 640 * per_token);
    CHECK(sequence.usage().window == 0);
}

TEST_CASE_TEMPLATE("a byte budget is never exceeded, and whoever meets it can go on", C,
                   KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 10; ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size, 12);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        options.byte_budget = static_cast<std::size_t>(random.between(2000, 60000));
        auto cache = test::make_cache<C>(shape, options);
        const test::stream s(random, shape, 400);
        auto sequence = cache.new_sequence();
        int refused = 0;
        for (int step = 0; step < 40; ++step) {
            const int before = sequence.tokens(0), n = random.between(1, 30);
            const auto held = contents(cache, sequence);
            const auto in_use = cache.bytes_in_use();
            try {
                sequence.append(0, s.k.slice(before, n), s.v.slice(before, n));
                REQUIRE(sequence.tokens(0) == before + n);
            } catch (const kvq::out_of_memory& e) {
                ++refused;
                REQUIRE(std::string(e.what()).find(std::to_string(options.byte_budget)) != std::string::npos);
                REQUIRE(sequence.tokens(0) == before);
                REQUIRE(cache.bytes_in_use() == in_use);
                REQUIRE(contents(cache, sequence) == held);
                sequence.trim(before / 2);
                REQUIRE(cache.bytes_in_use() <= in_use);
            }
            REQUIRE(cache.bytes_in_use() <= options.byte_budget);
            if (sequence.tokens(0) > 370) sequence.trim(0);
        }
        if (options.byte_budget < 4000) CHECK(refused > 0);
    }
}

TEST_CASE("sequences of one cache share its budget") {
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 64};
    test::generator random(1);
    const test::stream s(random, shape, 16);
    // Room for the two pages of one sequence and one more.
    const std::size_t page = kvq::page_pool::allocation(16 * 64 * 2);
    test::kivi_cache cache(shape, {.page_tokens = 16, .byte_budget = 3 * page});
    auto first = cache.new_sequence(), second = cache.new_sequence();
    append(first, 1, s, 0, 8);
    CHECK_THROWS_AS(append(second, 1, s, 0, 8), kvq::out_of_memory);
    CHECK(second.tokens() == 0);
    CHECK(cache.bytes_in_use() == 2 * page);
    first.trim(0);
    append(second, 1, s, 0, 8);
    CHECK(cache.bytes_in_use() == 2 * page);
}

TEST_CASE_TEMPLATE(
    "append_bytes(): with so many left an append goes through, of one layer with one byte less it does not",
    C, KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    int refused = 0;
    for (int round = 0; round < 40 || refused <= 3; ++round) {
        INFO("round ", round);
        REQUIRE(round < 400);
        const auto history = static_cast<std::uint64_t>(random.between(1, 1 << 30));
        const bool one_layer = random.one_in(2);
        const auto shape = test::random_cache_shape(random, one_layer ? 1 : C::key_table::size);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers, random.between(0, 3));
        options.rotary = {kvq::rotary_embedding{}};
        if (random.one_in(2)) options.repack = 0.0f;
        const test::stream s(random, shape, 300);
        const int added = random.between(1, 60);
        // The same sequences again, in a cache with room for `spare` bytes more; returns what the last append
        // was said to need.
        const auto replay = [&](std::size_t budget, std::vector<std::size_t>& in_use, bool& went_through) {
            options.byte_budget = budget;
            auto cache = test::make_cache<C>(shape, options);
            test::generator steps(history);
            auto sequence = cache.new_sequence(), other = cache.new_sequence();
            in_use.clear();
            for (int step = 0; step < 6; ++step) {
                const int held = sequence.tokens();
                const int what = steps.between(0, 5), from = steps.between(0, held);
                if (what == 0)
                    sequence.trim(steps.between(0, held));
                else if (what == 4)
                    sequence.erase(from, steps.between(from, held));
                else if (what == 5 && held < 120)
                    sequence.splice(other, 0, steps.between(0, std::min(50, other.tokens())));
                else if (what == 1)
                    other = sequence.fork();
                else
                    append(sequence, shape.layers, s, held, steps.between(0, std::min(70, 240 - held)));
                in_use.insert(in_use.end(), {sequence.usage().bytes, cache.bytes_in_use()});
            }
            const std::size_t needed = sequence.append_bytes(added);
            REQUIRE(sequence.append_bytes(0) == 0);
            went_through = true;
            try {
                append(sequence, shape.layers, s, sequence.tokens(), added);
            } catch (const kvq::out_of_memory&) {
                went_through = false;
            }
            return needed;
        };
        std::vector<std::size_t> in_use;  // after each step: of the sequence, and in all
        bool went_through = false;
        const std::size_t needed = replay(kvq::page_pool::no_budget, in_use, went_through);
        const auto before = in_use;
        REQUIRE(went_through);
        std::size_t again = 0;
        try {
            again = replay(before.back() + needed, in_use, went_through);
        } catch (const kvq::out_of_memory&) {
            continue;  // the history alone took more for a moment
        }
        if (in_use != before && options.repack > 0.0f) continue;  // a cut has found no memory to repack
        REQUIRE(again == needed);
        REQUIRE(in_use == before);
        CHECK(went_through);
        if (!one_layer || needed == 0) continue;
        try {
            replay(before.back() + needed - 1, in_use, went_through);
        } catch (const kvq::out_of_memory&) {
            continue;
        }
        CHECK(!went_through);
        ++refused;
    }
}
