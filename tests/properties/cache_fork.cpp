// SPDX-License-Identifier: MIT
// Comparison family: exact. Sequences that share pages never see each other's changes, and share what they
// can.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <set>

#include "support/caches.hpp"

using test::append;
using test::attention_bits;
using test::contents;

namespace cache_fork_tests {

namespace {

/// Pages that a sequence can be seen to hold.
template <class Sequence>
std::set<const kvq::page*> pages_of(const Sequence& sequence, int layers) {
    std::set<const kvq::page*> pages;
    for (int layer = 0; layer < layers; ++layer) {
        const auto all = sequence.pages(layer);
        for (int e = 0; e < all.entries(); ++e) {
            pages.insert(all.at(e).keys);
            pages.insert(all.at(e).values);
        }
    }
    return pages;
}

}  // namespace

TEST_CASE_TEMPLATE("random appends, trims and forks: every sequence holds exactly its own tokens", C,
                   KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 4; ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size, 8);
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{4, 7, 8});
        options.rollback = 100000;  // so that what is held depends on the tokens alone
        options.layers = test::rotate_formats<C>(shape.layers);
        auto cache = test::make_cache<C>(shape, options);
        const test::stream words(random, shape, 64);

        using sequence_type = typename C::sequence_type;
        struct branch {
            sequence_type sequence;
            std::vector<int> tokens;  // words, one after the other
        };
        std::vector<branch> branches;
        branches.push_back({cache.new_sequence(), {}});
        for (int step = 0; step < 120; ++step) {
            const auto i = static_cast<std::size_t>(random.between(0, static_cast<int>(branches.size()) - 1));
            const int what = random.between(0, 9);
            if (what < 5) {
                const int first = random.between(0, 60), count = random.between(0, 64 - first) / 2;
                append(branches[i].sequence, shape.layers, words, first, count);
                for (int t = 0; t < count; ++t) branches[i].tokens.push_back(first + t);
            } else if (what < 7) {
                const int n = random.between(0, branches[i].sequence.tokens());
                branches[i].sequence.trim(n);
                branches[i].tokens.resize(static_cast<std::size_t>(n));
            } else if (what < 9 && branches.size() < 6) {
                auto copy = branches[i].sequence.fork();
                branches.push_back({std::move(copy), branches[i].tokens});
            } else if (branches.size() > 1) {
                branches.erase(branches.begin() + static_cast<std::ptrdiff_t>(i));
            }
            if (step % 6 != 0) continue;
            for (const branch& b : branches) {
                auto fresh = cache.new_sequence();
                for (const int word : b.tokens) append(fresh, shape.layers, words, word, 1);
                REQUIRE(b.sequence.tokens() == static_cast<int>(b.tokens.size()));
                REQUIRE(contents(cache, b.sequence) == contents(cache, fresh));
                REQUIRE(attention_bits(cache, b.sequence, 1) == attention_bits(cache, fresh, 1));
            }
        }
        branches.clear();
        CHECK(cache.bytes_in_use() == 0);
        CHECK(cache.pool().pages_in_use() == 0);
    }
}

TEST_CASE_TEMPLATE("without rollback as well: a change in one branch leaves all others untouched", C,
                   KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const auto shape = test::random_cache_shape(random, C::key_table::size, 8);
    auto options = test::random_options(random);
    options.page_tokens = 8;
    options.rollback = random.pick(std::vector<int>{0, 5});
    options.layers = test::rotate_formats<C>(shape.layers);
    auto cache = test::make_cache<C>(shape, options);
    const test::stream s(random, shape, 200);
    auto base = cache.new_sequence();
    append(base, shape.layers, s, 0, 90);
    const auto held = contents(cache, base, true);
    const auto out = attention_bits(cache, base);
    for (int round = 0; round < 60; ++round) {
        auto branch = base.fork();
        for (int step = 0; step < 4; ++step)
            if (random.one_in(2))
                branch.trim(random.between(0, branch.tokens()));
            else
                append(branch, shape.layers, s, random.between(0, 100), random.between(0, 50));
        REQUIRE(contents(cache, base, true) == held);
        REQUIRE(attention_bits(cache, base) == out);
    }
}

TEST_CASE("a fork takes no page; the second request on a shared prefix costs only its new tokens") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 64};
    const int page_tokens = 32, prefix = 1000, answer = 50, question = 20;
    test::kivi_cache cache(shape, {.sinks = 4, .recent = 64, .page_tokens = page_tokens});
    const test::stream s(random, shape, prefix + answer), second_words(random, shape, question + answer);

    auto first = cache.new_sequence();
    append(first, 2, s, 0, prefix);
    for (int i = 0; i < answer; ++i) append(first, 2, s, prefix + i, 1);
    const std::size_t after_first = cache.bytes_in_use();

    auto second = first.fork();
    CHECK(cache.bytes_in_use() == after_first);
    second.trim(prefix);
    append(second, 2, second_words, 0, question);
    for (int i = 0; i < answer; ++i) append(second, 2, second_words, question + i, 1);
    CHECK(second.tokens() == prefix + question + answer);

    // What it added: pages that its own tokens lie in, and the pages of the prefix that it had to see
    // differently (cut in the middle, or uncoded again by the trim).
    const auto mine = pages_of(second, 2);
    auto both = pages_of(first, 2);
    std::size_t own = 0, own_pages = 0;
    for (const kvq::page* p : mine)
        if (both.insert(p).second) {
            own += kvq::page_pool::allocation(p->bytes);
            ++own_pages;
        }
    // Originals are kept for at most ceil(rollback / page_tokens) + 1 pages of each tensor and layer.
    const std::size_t window_page =
        kvq::page_pool::allocation(cache.page_bytes(kvq::tensor::key, 0, page_tokens));
    const std::size_t rollback = 2 * 2 * 2 * window_page;
    CHECK(cache.bytes_in_use() <= after_first + own + rollback);
    const std::size_t touched = 2 * 2 * static_cast<std::size_t>((question + answer) / page_tokens + 2 + 2);
    CHECK(own_pages <= touched);
    // Far from the 16-bit cache of a second copy, and from its own first copy.
    CHECK(cache.bytes_in_use() - after_first < after_first / 2);

    // The shared part is the same memory.
    const auto a = first.pages(0), b = second.pages(0);
    for (int e = 0; e < a.entries() && a.at(e).first_token + page_tokens <= prefix - 64 - page_tokens; ++e) {
        CHECK(a.at(e).keys == b.at(e).keys);
        CHECK(a.at(e).values == b.at(e).values);
    }

    // And it is what a sequence of its own would hold, as far as pages were not quantized by the first
    // request meanwhile.
    auto alone = cache.new_sequence();
    append(alone, 2, s, 0, prefix);
    append(alone, 2, second_words, 0, question + answer);
    CHECK(contents(cache, second).size() == contents(cache, alone).size());
    auto exact = cache.new_sequence();
    append(exact, 2, s, 0, prefix);
    auto forked_at_prefix = exact.fork();
    append(exact, 2, s, prefix, answer);
    append(forked_at_prefix, 2, second_words, 0, question + answer);
    CHECK(contents(cache, forked_at_prefix) == contents(cache, alone));
    CHECK(attention_bits(cache, forked_at_prefix) == attention_bits(cache, alone));
}

TEST_CASE("pages live as long as somebody holds them") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 16};
    test::kivi_cache cache(shape, {.recent = 4, .page_tokens = 8});
    const test::stream s(random, shape, 100);
    auto first = std::make_unique<test::kivi_cache::sequence_type>(cache.new_sequence());
    append(*first, 1, s, 0, 100);
    const std::size_t bytes = cache.bytes_in_use();
    const auto held = contents(cache, *first);
    auto second = first->fork();
    first.reset();
    CHECK(cache.bytes_in_use() == bytes);
    CHECK(contents(cache, second) == held);
    auto third = std::move(second);
    CHECK(contents(cache, third) == held);
    third = cache.new_sequence();
    CHECK(cache.bytes_in_use() == 0);
}

}  // namespace cache_fork_tests
