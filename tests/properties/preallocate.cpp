// SPDX-License-Identifier: MIT
// Comparison family: exact. A cache whose pages are allocated up front holds what any other cache holds, in
// the bytes of its budget.
#include <doctest/doctest.h>

#include <algorithm>
#include <kvq/estimate/footprint.hpp>
#include <thread>

#include "support/caches.hpp"
#include "support/memory.hpp"

using test::append;
using test::contents;

TEST_CASE("pages of an allocated pool do not overlap, and all bytes come back as one range") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(40); ++round) {
        test::counting_resource memory;
        const auto budget = static_cast<std::size_t>(random.between(0, 20000));
        {
            kvq::page_pool pool(&memory, budget, true);
            REQUIRE(memory.bytes() == budget);
            REQUIRE(pool.bytes_held() == budget);
            struct held {
                kvq::page_ref page;
                int mark;
            };
            std::vector<held> pages;
            const auto intact = [](const held& h) {
                return std::all_of(h.page->data(), h.page->data() + h.page->bytes,
                                   [&](std::byte b) { return b == static_cast<std::byte>(h.mark); });
            };
            std::size_t in_use = 0;
            for (int step = 0; step < 400; ++step) {
                if (random.one_in(2) || pages.empty()) {
                    const auto bytes = static_cast<std::size_t>(
                        random.between(0, 3) == 0 ? random.between(0, 900) : 64 * random.between(1, 5));
                    try {
                        held h{pool.allocate(bytes, 1, 2), random.between(0, 255)};
                        REQUIRE(reinterpret_cast<std::uintptr_t>(h.page->data()) % 64 == 0);
                        std::fill_n(h.page->data(), bytes, static_cast<std::byte>(h.mark));
                        in_use += kvq::page_pool::allocation(bytes);
                        pages.push_back(std::move(h));
                    } catch (const kvq::out_of_memory&) {
                    }
                } else {
                    const auto i =
                        static_cast<std::size_t>(random.between(0, static_cast<int>(pages.size()) - 1));
                    REQUIRE(intact(pages[i]));
                    in_use -= kvq::page_pool::allocation(pages[i].page->bytes);
                    std::swap(pages[i], pages.back());
                    pages.pop_back();
                }
                REQUIRE(pool.bytes_in_use() == in_use);
                REQUIRE(memory.bytes() == budget);
            }
            CHECK(std::all_of(pages.begin(), pages.end(), intact));
            pages.clear();
            if (const std::size_t whole = budget / 64 * 64; whole >= 64) {
                const auto all = pool.allocate(whole - 64, 0, 0);
                CHECK(pool.bytes_in_use() == whole);
                CHECK_THROWS_AS((void)pool.allocate(0, 0, 0), kvq::out_of_memory);
            }
        }
        CHECK(memory.bytes() == 0);
    }
}

TEST_CASE("a refusal names the longest free range") {
    kvq::page_pool pool(std::pmr::get_default_resource(), 640, true);
    std::vector<kvq::page_ref> pages;
    for (int i = 0; i < 5; ++i) pages.push_back(pool.allocate(64, 0, 1));
    pages.erase(pages.begin() + 3);
    pages.erase(pages.begin() + 1);
    try {
        (void)pool.allocate(128, 0, 1);
        FAIL("no range is long enough");
    } catch (const kvq::out_of_memory& e) {
        CHECK(std::string(e.what()) ==
              "kvq: a page of 192 bytes does not fit: 384 of a budget of 640 bytes are in use, and the "
              "longest free "
              "range has 128");
    }
    CHECK_THROWS_AS(
        kvq::cache({1, 1, 8}, {.keys = {test::made<test::usual>(kvq::int8{})}, .preallocate = true}),
        kvq::error);
}

TEST_CASE_TEMPLATE("a cache in memory allocated up front: same pages, and the footprint to the byte", C,
                   test::kivi_cache, test::mixed_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(8); ++round) {
        test::counting_resource memory;
        const auto shape = test::random_cache_shape(random, C::key_table::size, 40);
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{7, 16, 32, 33});
        options.layers = test::rotate_formats<C>(shape.layers);
        auto plain = test::make_cache<C>(shape, options);
        options.memory = &memory;
        options.preallocate = true;
        options.byte_budget =
            2 * kvq::footprint(plain, 400).total + kvq::footprint(plain, 400, 1, {.chunk = 60}).transient;
        auto cache = test::make_cache<C>(shape, options);
        REQUIRE(memory.bytes() == options.byte_budget);
        REQUIRE(cache.bytes_held() == options.byte_budget);
        const test::stream s(random, shape, 400);
        {
            auto sequence = cache.new_sequence();
            auto twin = plain.new_sequence();
            while (sequence.tokens() < 340) {
                const int held = sequence.tokens(), n = random.between(1, random.one_in(3) ? 60 : 3);
                append(sequence, shape.layers, s, held, n);
                append(twin, shape.layers, s, held, n);
                REQUIRE(contents(cache, sequence) == contents(plain, twin));
                REQUIRE(cache.bytes_in_use() == plain.bytes_in_use());
                const auto f = kvq::footprint(cache, held + n);
                REQUIRE(f.total == memory.bytes());
                REQUIRE(f.unused == options.byte_budget - cache.bytes_in_use());
            }
            // No page is allocated from the resource.
            const kvq::step_request one{&sequence, 20, 20};
            kvq::workspace space;
            const std::size_t blocks = memory.blocks();
            cache.reserve(std::span(&one, 1), shape.kv_heads, 1, space);
            memory.fail_every(1);
            append(sequence, shape.layers, s, sequence.tokens(), 20);
            memory.fail_every(0);
            CHECK(memory.blocks() == blocks);
            const auto fits = [&](int n) {
                const auto f = kvq::footprint(cache, n);
                return f.transient <= f.unused;
            };
            const int longest = kvq::longest_context(cache, std::size_t{1} << 40);
            CHECK(longest >= 400);
            CHECK(fits(longest));
            CHECK(kvq::longest_context(cache, options.byte_budget - 1) == -1);
        }
        CHECK(cache.bytes_in_use() == 0);
        CHECK(memory.bytes() == options.byte_budget);
    }
}

TEST_CASE("several threads take pages of an allocated pool") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    kvq::page_pool pool(std::pmr::get_default_resource(), 1 << 16, true);
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int id = 0; id < 4; ++id)
        threads.emplace_back([&, id] {
            test::generator random(seed + static_cast<std::uint64_t>(id));
            std::vector<kvq::page_ref> pages;
            for (int step = 0; step < 2000; ++step) {
                if (random.one_in(2)) {
                    try {
                        pages.push_back(
                            pool.allocate(static_cast<std::size_t>(random.between(1, 2000)), id, 1));
                        std::fill_n(pages.back()->data(), pages.back()->bytes, static_cast<std::byte>(id));
                    } catch (const kvq::out_of_memory&) {
                        pages.clear();
                    }
                } else if (!pages.empty()) {
                    const kvq::page& p = *pages.front();
                    if (!std::all_of(p.data(), p.data() + p.bytes,
                                     [&](std::byte b) { return b == static_cast<std::byte>(id); }))
                        ++wrong;
                    pages.erase(pages.begin());
                }
            }
        });
    for (std::thread& t : threads) t.join();
    CHECK(wrong == 0);
    CHECK(pool.bytes_in_use() == 0);
    CHECK(pool.pages_in_use() == 0);
}
