// SPDX-License-Identifier: MIT
// Comparison family: exact. Every allocation of every operation is made to fail once: nothing has changed
// then.
#include <doctest/doctest.h>

#include <algorithm>

#include "support/ladder.hpp"
#include "support/memory.hpp"
#include "support/typed_cache.hpp"

using test::append;
using test::attention_bits;
using test::contents;

namespace {
}  // namespace

TEST_CASE_TEMPLATE("append, trim, fork and attend leave everything as it was when memory runs out", C,
                   KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 4; ++round) {
        test::counting_resource memory;
        const auto shape = test::random_cache_shape(random, C::key_table::size, 8);
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{4, 7, 8});
        options.layers = test::rotate_formats<C>(shape.layers);
        options.memory = &memory;
        auto cache = test::make_cache<C>(shape, options);
        const test::stream s(random, shape, 400);
        {
            auto sequence = cache.new_sequence(), twin = cache.new_sequence();
            for (int step = 0; step < 14; ++step) {
                const int held = sequence.tokens(0);
                // Shared pages make copy-on-write part of what may fail.
                auto sharing = sequence.fork();
                const auto before = contents(cache, sequence), theirs = contents(cache, sharing, true);
                const auto out = attention_bits(cache, sequence);
                const auto in_use = cache.bytes_in_use();
                const auto unchanged = [&] {
                    REQUIRE(cache.bytes_in_use() == in_use);
                    REQUIRE(contents(cache, sequence) == before);
                    REQUIRE(contents(cache, sharing, true) == theirs);
                    REQUIRE(attention_bits(cache, sequence) == out);
                };
                const int what = random.between(0, 3);
                if (what < 2 && held < 300) {
                    const int n = random.between(1, 40);
                    for (int layer = 0; layer < shape.layers; ++layer) {
                        // Layers that are done differ from `before`; look at this one alone.
                        auto layer_before = contents(cache, sequence);
                        const auto layer_in_use = cache.bytes_in_use();
                        test::fail_everywhere(
                            memory, [&] { sequence.append(layer, s.k.slice(held, n), s.v.slice(held, n)); },
                            [&] {
                                REQUIRE(cache.bytes_in_use() == layer_in_use);
                                REQUIRE(sequence.tokens(layer) == held);
                                REQUIRE(contents(cache, sequence) == layer_before);
                                REQUIRE(contents(cache, sharing, true) == theirs);
                            });
                    }
                    append(twin, shape.layers, s, held, n);
                } else if (what == 2) {
                    const int n = random.between(0, held);
                    test::fail_everywhere(
                        memory, [&] { sequence.trim(n); }, unchanged);
                    // A trim raises nothing: without the memory it repacks nothing, so the twin has none
                    // either.
                    memory.arm(0);
                    twin.trim(n);
                    memory.arm(test::counting_resource::never);
                } else {
                    const std::size_t bytes = memory.bytes();
                    test::fail_everywhere(
                        memory, [&] { auto copy = sequence.fork(); },
                        [&] {
                            REQUIRE(memory.bytes() == bytes);
                            unchanged();
                        });
                    test::fail_everywhere(
                        memory, [&] { attention_bits(cache, sequence); }, unchanged);
                    test::fail_everywhere(
                        memory, [&] { (void)cache.new_sequence(); }, unchanged);
                    test::fail_everywhere(
                        memory, [&] { test::dequantized(sequence, shape, 0, kvq::tensor::key); }, unchanged);
                }
                // After all these failures it holds what one without failures holds.
                REQUIRE(contents(cache, sequence) == contents(cache, twin));
            }
        }
        CHECK(memory.bytes() == 0);
    }
}

TEST_CASE("requantizing and stepping down: pages done stay done, the others stay as they were") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 6; ++round) {
        test::counting_resource memory;
        const auto shape = test::random_cache_shape(random, 2, 8);
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{4, 7, 8});
        options.memory = &memory;
        {
            test::ladder_cache cache(shape, options);
            const test::stream s(random, shape, 60);
            auto sequence = cache.new_sequence();
            append(sequence, 2, s, 0, 60);
            const kvq::step_down_policy tiers{{{0, {0, 0}}, {8, {1, 1}}, {24, {2, 2}}}};
            const kvq::requantize_request request{.key = 3, .value = 3};
            const auto lowered = [&](auto operation, auto&& twin) {
                operation(twin);
                return contents(cache, twin);
            };
            // Of pages that a fork holds, too, stepping down changes none.
            const auto alone = [&] {
                auto twin = cache.new_sequence();
                append(twin, 2, s, 0, 60);
                return twin;
            };
            // Whatever page was reached: a page is as it was or as it will be, never anything else.
            const auto either = [&](const auto& before, const auto& after) {
                const auto now = contents(cache, sequence);
                REQUIRE(now.size() == before.size());
                for (std::size_t i = 0; i < now.size(); ++i)
                    REQUIRE((now[i] == before[i] || now[i] == after[i]));
                REQUIRE(cache.bytes_in_use() <= memory.bytes());
            };
            const auto step = [&](auto& x) { kvq::step_down(cache, x, tiers); };
            const auto all = [&](auto& x) { cache.requantize(x, request); };
            {
                const auto before = contents(cache, sequence), after = lowered(step, alone());
                test::fail_everywhere(
                    memory, [&] { step(sequence); }, [&] { either(before, after); });
                REQUIRE(contents(cache, sequence) == after);
            }
            {
                const auto before = contents(cache, sequence), after = lowered(all, sequence.fork());
                test::fail_everywhere(
                    memory, [&] { all(sequence); }, [&] { either(before, after); });
                REQUIRE(contents(cache, sequence) == after);
            }
            test::fail_everywhere(
                memory, [&] { (void)kvq::usage_rows(sequence); }, [] {});
        }
        CHECK(memory.bytes() == 0);
    }
}

namespace allocation_failure_tests {

namespace {

/// 8-bit codes on a fixed grid, by a scheme that needs memory of its own while it quantizes, as the baselines
/// do.
struct hungry_scheme {
    static inline int calls = 0, fail_at = test::counting_resource::never;
    static void take_memory() {
        if (calls++ == fail_at) throw std::bad_alloc();
    }

    std::string name() const { return "hungry"; }
    std::size_t block_bytes(const kvq::block_shape& s) const { return (s.values() + 15) / 16 * 16; }
    std::uint32_t quantize(const kvq::block_shape& s, kvq::block_id, float* values, std::byte* block) const {
        take_memory();
        std::fill_n(block, block_bytes(s), std::byte{0});
        for (std::size_t i = 0; i < s.values(); ++i)
            block[i] = static_cast<std::byte>(std::clamp(static_cast<int>(values[i] * 4.0f) + 128, 0, 255));
        return 0;
    }
    void dequantize(const kvq::block_shape& s, kvq::block_id, const std::byte* block, float* values) const {
        take_memory();
        for (std::size_t i = 0; i < s.values(); ++i)
            values[i] = 0.25f * static_cast<float>(std::to_integer<int>(block[i]) - 128);
    }
};

}  // namespace

TEST_CASE("append and trim leave everything as it was when a scheme runs out of memory while it codes") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 20; ++round) {
        const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 8};
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{4, 7, 8});
        options.repack = 0.0f;  // a trim without memory repacks later: shifts_bytes.cpp
        test::typed_cache<hungry_scheme> cache(shape, options);
        const test::stream s(random, shape, 400);
        auto sequence = cache.new_sequence(), twin = cache.new_sequence();
        for (int step = 0; step < 12; ++step) {
            const int held = sequence.tokens();
            const bool longer = held == 0 || (held < 300 && random.between(0, 2) > 0);
            const int n = longer ? random.between(1, 40) : random.between(0, held);
            const auto before = contents(cache, sequence);
            const auto in_use = cache.bytes_in_use();
            const auto work = [&](auto& x) {
                if (longer)
                    x.append(0, s.k.slice(held, n), s.v.slice(held, n));
                else
                    x.trim(n);
            };
            for (int i = 0;; ++i) {
                hungry_scheme::calls = 0;
                hungry_scheme::fail_at = i;
                bool failed = false;
                try {
                    work(sequence);
                } catch (const std::bad_alloc&) {
                    failed = true;
                }
                hungry_scheme::fail_at = test::counting_resource::never;
                if (!failed) break;
                REQUIRE(cache.bytes_in_use() == in_use);
                REQUIRE(sequence.tokens() == held);
                REQUIRE(contents(cache, sequence) == before);
            }
            work(twin);
            REQUIRE(contents(cache, sequence) == contents(cache, twin));
        }
        // Nor has any failure cost a 16-bit copy.
        const int back = std::min(options.rollback, sequence.tokens());
        sequence.trim(sequence.tokens() - back);
        twin.trim(twin.tokens() - back);
        REQUIRE(contents(cache, sequence) == contents(cache, twin));
    }
}

}  // namespace allocation_failure_tests
