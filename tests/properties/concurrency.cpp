// SPDX-License-Identifier: MIT
// Many sequences on one pool, one writer each, forks handed from thread to thread. Run under ThreadSanitizer
// by the preset `thread`.
#include <doctest/doctest.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <thread>

#include "support/ladder.hpp"
#include "support/memory.hpp"

using test::ladder_cache;

TEST_CASE("sequences on one pool: forks, frees and requantizing from several threads") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    constexpr int threads = 4, steps = 3000, layers = 2;
    const kvq::cache_shape shape{layers, 2, 32, 0};
    test::counting_resource memory;
    {
        kvq::cache_options options;
        options.page_tokens = 16;
        options.recent = 8;
        options.memory = &memory;
        options.byte_budget = 600000;
        ladder_cache cache(shape, options);
        test::generator random(seed);
        const test::stream s(random, shape, 400);
        memory.fail_every(101);

        struct handed {
            ladder_cache::sequence_type sequence;
            std::vector<test::held_page> contents;
        };
        std::mutex mutex;
        std::vector<std::optional<handed>> table(8);
        std::atomic<int> refused{0}, wrong{0}, over{0};
        const auto work = [&](int id) {
            test::generator mine(seed * 100 + static_cast<std::uint64_t>(id));
            std::optional<ladder_cache::sequence_type> own;
            for (int step = 0; step < steps; ++step) {
                try {
                    if (!own) own.emplace(cache.new_sequence());
                    const int n = own->tokens();
                    switch (mine.between(0, 5)) {
                        case 0: {  // hand a fork to whoever finds it
                            handed h{own->fork(), test::contents(cache, *own)};
                            const std::lock_guard lock(mutex);
                            table[static_cast<std::size_t>(mine.between(0, 7))].emplace(std::move(h));
                            break;
                        }
                        case 1: {  // go on with somebody else's
                            std::optional<handed> h;
                            {
                                const std::lock_guard lock(mutex);
                                h.swap(table[static_cast<std::size_t>(mine.between(0, 7))]);
                            }
                            if (!h) break;
                            if (test::contents(cache, h->sequence) != h->contents) ++wrong;
                            own.emplace(std::move(h->sequence));
                            break;
                        }
                        case 2:
                            own->trim(mine.between(0, n));
                            break;
                        case 3:
                            cache.requantize(*own, test::random_request(mine, layers, n));
                            break;
                        default: {
                            // Layers are appended one by one: what fails in between is trimmed away.
                            const int more = std::min(mine.between(1, 20), 400 - n);
                            try {
                                test::append(*own, layers, s, n, more);
                            } catch (...) {
                                own.reset();
                                throw;
                            }
                        }
                    }
                } catch (const std::bad_alloc&) {
                    ++refused;
                }
                if (cache.bytes_in_use() > options.byte_budget) ++over;
            }
        };
        std::vector<std::thread> workers;
        for (int id = 0; id < threads; ++id) workers.emplace_back(work, id);
        for (std::thread& t : workers) t.join();
        memory.fail_every(0);
        CHECK(wrong == 0);
        CHECK(over == 0);
        CHECK(refused > 0);
        table.clear();
        CHECK(cache.bytes_in_use() == 0);
        CHECK(cache.pool().pages_in_use() == 0);
    }
    CHECK(memory.bytes() == 0);
    CHECK(memory.peak() > 0);
}

TEST_CASE("reading one sequence from several threads") {
    test::generator random(test::seed());
    kvq::cache_options options;
    options.page_tokens = 16;
    options.layers = {{2, 2}, {1, 1}};
    const kvq::cache_shape shape{2, 2, 32, 0};
    ladder_cache cache(shape, options);
    const test::stream s(random, shape, 200);
    auto sequence = cache.new_sequence();
    test::append(sequence, 2, s, 0, 200);
    const auto expected = test::contents(cache, sequence);
    const auto attended = test::attention_bits(cache, sequence);
    std::atomic<int> wrong{0};
    std::vector<std::thread> readers;
    for (int i = 0; i < 4; ++i)
        readers.emplace_back([&, i] {
            auto copy = sequence.fork();
            if (test::contents(cache, sequence) != expected) ++wrong;
            if (test::attention_bits(cache, sequence) != attended) ++wrong;
            if (i % 2) test::append(copy, 2, s, 0, 40);
            (void)cache.plan_requantize(sequence, {.key = 3, .value = 3});
        });
    for (std::thread& t : readers) t.join();
    CHECK(wrong == 0);
}
