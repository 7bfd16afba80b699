// SPDX-License-Identifier: MIT
// Comparison family: exact for pages, bytes, usage and files; 5e-4 for attention under a tree. A sequence
// that drafts and keeps is the sequence that appended the accepted tokens alone.
#include <doctest/doctest.h>

#include <algorithm>
#include <kvq/cache/preset_options.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/policy/ring.hpp>

#include "support/attention_error.hpp"
#include "support/memory.hpp"
#include "support/saved.hpp"
#include "support/typed_cache.hpp"

using test::append;
using test::contents;

namespace speculation_tests {

namespace {

std::vector<int> random_parents(test::generator& random, int n) {
    std::vector<int> parents;
    const int how = random.between(0, 2);  // a chain, siblings, anything
    for (int i = 0; i < n; ++i)
        parents.push_back(how == 0   ? i - 1
                          : how == 1 ? random.between(-1, std::min(i - 1, 2))
                                     : random.between(-1, i - 1));
    return parents;
}

/// From the accepted text down to some token, or to a leaf.
std::vector<int> random_path(test::generator& random, const std::vector<int>& parents) {
    std::vector<int> path;
    if (parents.empty() || random.one_in(5)) return path;
    int at = random.one_in(3) ? static_cast<int>(parents.size()) - 1
                              : random.between(0, static_cast<int>(parents.size()) - 1);
    for (; at >= 0; at = parents[static_cast<std::size_t>(at)]) path.insert(path.begin(), at);
    return path;
}

/// The tree by its definition: a walk from the query up to the root.
struct walk_of_parents {
    int first;
    const std::vector<int>* parents;
    bool mask(int q, int k) const {
        if (k < first) return true;
        for (int at = q - first; at >= 0; at = (*parents)[static_cast<std::size_t>(at)])
            if (at == k - first) return true;
        return false;
    }
};

/// Rows of a stream, in any order.
struct picked : test::stream {
    picked(test::generator& random, const kvq::cache_shape& shape, const test::stream& from, int first,
           const std::vector<int>& path)
        : test::stream(random, shape, static_cast<int>(path.size())) {
        for (std::size_t i = 0; i < path.size(); ++i)
            for (int h = 0; h < shape.kv_heads; ++h) {
                const int to = static_cast<int>(i), at = first + path[i];
                std::copy_n(from.k.view().at(at, h), shape.head_dim, k.view().at(to, h));
                std::copy_n(from.v.view().at(at, h), shape.dim(kvq::tensor::value), v.view().at(to, h));
            }
    }
};

void require_same_usage(const kvq::usage_report& a, const kvq::usage_report& b) {
    REQUIRE(a.quantized == b.quantized);
    REQUIRE(a.window == b.window);
    REQUIRE(a.slack == b.slack);
    REQUIRE(a.rollback == b.rollback);
    REQUIRE(a.bookkeeping == b.bookkeeping);
    REQUIRE(a.workspace == b.workspace);
    REQUIRE(a.bytes == b.bytes);
    REQUIRE(a.not_finite == b.not_finite);
    REQUIRE(a.tokens == b.tokens);
}

template <class C>
void require_identical(const C& cache, const kvq::sequence& s, const C& other, const kvq::sequence& twin) {
    REQUIRE(contents(cache, s, true) == contents(other, twin, true));
    require_same_usage(s.usage(), twin.usage());
}

/// Drafts the same rows in every layer, in one or several calls.
void draft(test::generator& random, kvq::sequence& s, int layers, const test::stream& from, int first,
           int n) {
    for (int layer = 0; layer < layers; ++layer)
        for (int done = 0; done < n;) {
            const int count = random.one_in(2) ? n - done : random.between(1, n - done);
            s.append_draft(layer, from.k.slice(first + done, count), from.v.slice(first + done, count));
            done += count;
        }
}

}  // namespace

TEST_CASE_TEMPLATE(
    "10000 random steps of draft, keep, append, trim and fork: as if only accepted tokens had been appended",
    C, KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const int longest = 150, rounds = 8, steps = 10000 / (3 * rounds) + 1;
    int refused = 0, compared = 0;
    for (int round = 0; round < rounds; ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size, 6);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        auto cache = test::make_cache<C>(shape, options), other = test::make_cache<C>(shape, options);
        test::stream s(random, shape, 600);
        const bool hostile = round % 4 == 3;
        if (hostile)
            for (test::tensor<float>* of : {&s.k, &s.v})
                for (std::size_t i = 0; i + 40 < of->values().size(); i += 40)
                    if (random.one_in(5)) test::fill_hostile(random, of->values().data() + i, 40);
        auto sequence = cache.new_sequence(), twin = other.new_sequence();
        std::vector<kvq::sequence> shared, shared_twins;  // they hold the same pages until one writes
        for (int step = 0; step < steps; ++step) {
            INFO("round ", round, " step ", step, ", pages of ", options.page_tokens, ", rollback ",
                 options.rollback);
            const int held = sequence.tokens();
            int shortest = held;
            for (int layer = 0; layer < shape.layers; ++layer)
                shortest = std::min(shortest, sequence.tokens(layer));
            const int at = random.between(0, 300), what = random.between(0, 10);
            if (what == 0) {
                const int n =
                    random.one_in(3) ? random.between(0, held) : std::max(0, held - random.between(0, 20));
                sequence.trim(n);
                twin.trim(n);
            } else if (what == 1) {
                if (shared.size() > 1) {
                    shared.erase(shared.begin());
                    shared_twins.erase(shared_twins.begin());
                }
                shared.push_back(sequence.fork());
                shared_twins.push_back(twin.fork());
                if (random.one_in(2)) {
                    std::swap(shared.back(), sequence);
                    std::swap(shared_twins.back(), twin);
                }
            } else if (what == 2 && random.one_in(3)) {  // a step that has not reached all layers
                const int layer = random.between(0, shape.layers - 1);
                sequence.append(layer, s.k.slice(at, 2), s.v.slice(at, 2));
                twin.append(layer, s.k.slice(at, 2), s.v.slice(at, 2));
            } else if (what < 4) {
                const int n = random.between(0, std::max(0, std::min(longest - held, 30)));
                append(sequence, shape.layers, s, at, n);
                append(twin, shape.layers, s, at, n);
            } else {
                const int n = random.between(0, random.one_in(4) ? 64 : 12);
                const auto parents = random_parents(random, n);
                auto path = random_path(random, parents);
                if (held + static_cast<int>(path.size()) > 2 * longest) path.clear();
                draft(random, sequence, shape.layers, s, at, n);
                REQUIRE(sequence.tokens() == held + n);
                REQUIRE(kvq::token_tree(held, parents).is_path(path));
                if (n > 0 && !hostile && random.one_in(8)) {
                    const int rows = random.between(1, n), layer = random.between(0, shape.layers - 1);
                    const auto q = test::random_tensor(random, rows, 2 * shape.kv_heads, shape.head_dim);
                    const int first = sequence.tokens(layer) - n;
                    const auto error =
                        test::measure_attention(cache, sequence, layer, q, kvq::token_tree(first, parents),
                                                walk_of_parents{first, &parents});
                    CHECK(error.of_terms < 5e-4);
                    ++compared;
                }
                if (n > 0 && random.one_in(8)) {
                    CHECK_THROWS_AS(append(sequence, 1, s, 0, 1), kvq::error);
                    CHECK_THROWS_AS((void)sequence.append_bytes(1), kvq::error);
                    CHECK_THROWS_AS(cache.requantize(sequence, {.key = 0, .value = 0}), kvq::error);
                    CHECK_THROWS_AS((void)test::saved(sequence), kvq::error);
                    if (n > 1 && shortest == held) CHECK_THROWS_AS(sequence.trim(held + 1), kvq::error);
                    ++refused;
                }
                if (n > 0 && random.one_in(4)) {  // another branch is kept, or none, by a fork
                    auto fork = sequence.fork();
                    auto fork_twin = twin.fork();
                    const auto its_path = random_path(random, parents);
                    if (its_path.empty() && random.one_in(2)) {
                        fork.trim(shortest);
                        fork_twin.trim(shortest);
                    } else {
                        fork.keep(its_path);
                    }
                    const picked rows(random, shape, s, at, its_path);
                    append(fork_twin, shape.layers, rows, 0, rows.k.tokens());
                    REQUIRE(contents(cache, fork, true) == contents(other, fork_twin, true));
                }
                sequence.keep(path);
                const picked rows(random, shape, s, at, path);
                append(twin, shape.layers, rows, 0, rows.k.tokens());
            }
            require_identical(cache, sequence, other, twin);
            if (what == 1) REQUIRE(cache.bytes_in_use() == other.bytes_in_use());
            for (std::size_t i = 0; i < shared.size(); ++i)
                require_identical(cache, shared[i], other, shared_twins[i]);
        }
        REQUIRE(cache.bytes_in_use() == other.bytes_in_use());
        REQUIRE(test::saved(sequence) == test::saved(twin));
    }
    CHECK(refused > 20);
    CHECK(compared > 20);
}

TEST_CASE_TEMPLATE("append_draft and keep leave everything as it was when memory runs out", C,
                   test::kivi_cache, test::mixed_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 30; ++round) {
        test::counting_resource memory;
        const auto shape = test::random_cache_shape(random, C::key_table::size, 8);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        auto other = test::make_cache<C>(shape, options);
        options.memory = &memory;
        auto cache = test::make_cache<C>(shape, options);
        const test::stream s(random, shape, 200);
        {
            auto sequence = cache.new_sequence(), twin = other.new_sequence();
            const int held = random.between(0, 100), n = random.between(1, 64);
            append(sequence, shape.layers, s, 0, held);
            append(twin, shape.layers, s, 0, held);
            const auto parents = random_parents(random, n);
            const auto path = random_path(random, parents);
            const auto sharing = sequence.fork();
            const auto twin_sharing = twin.fork();
            const auto retried = [&](const auto& operation) {
                for (int i = 0;; ++i) {
                    REQUIRE(i < 1000);
                    const auto before = contents(cache, sequence, true),
                               theirs = contents(cache, sharing, true);
                    const auto usage = sequence.usage();
                    const auto in_use = cache.bytes_in_use();
                    memory.arm(i);
                    bool failed = false;
                    try {
                        operation();
                    } catch (const std::bad_alloc&) {
                        failed = true;
                    }
                    memory.arm(test::counting_resource::never);
                    REQUIRE(contents(cache, sharing, true) == theirs);
                    if (!failed) return i;
                    REQUIRE(contents(cache, sequence, true) == before);
                    REQUIRE(cache.bytes_in_use() == in_use);
                    // A table of pages that has grown for an operation stays so when the operation fails.
                    auto now = sequence.usage();
                    REQUIRE(now.bookkeeping >= usage.bookkeeping);
                    now.bytes -= now.bookkeeping - usage.bookkeeping;
                    now.bookkeeping = usage.bookkeeping;
                    require_same_usage(now, usage);
                }
            };
            for (int layer = 0; layer < shape.layers; ++layer)
                for (int done = 0; done < n;) {
                    const int count = random.between(1, n - done);
                    CHECK(retried([&] {
                              sequence.append_draft(layer, s.k.slice(100 + done, count),
                                                    s.v.slice(100 + done, count));
                          }) < 10);
                    done += count;
                }
            CHECK(retried([&] { sequence.keep(path); }) > 0);
            const picked rows(random, shape, s, 100, path);
            append(twin, shape.layers, rows, 0, rows.k.tokens());
            require_identical(cache, sequence, other, twin);
        }
        CHECK(memory.bytes() == 0);
    }
}

TEST_CASE("pages of a draft or of sinks may be longer than the others, in any kernel") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using cache_type = test::typed_cache<kvq::kivi<4, 32>, kvq::kivi<4, 32>, kvq::simd<>>;
    const kvq::cache_shape shape{1, 2, 64, 48};
    for (const int sinks : {0, 100})
        for (const int page_tokens : {8, 16, 64}) {
            cache_type cache(shape, {.sinks = sinks, .recent = 8, .page_tokens = page_tokens});
            const test::stream s(random, shape, 400);
            auto sequence = cache.new_sequence();
            append(sequence, 1, s, 0, 200);
            // Few rows, and so many that kernels for prompts run.
            for (const int rows : {1, 30})
                CHECK(test::measure_attention(cache, sequence, 0, test::random_tensor(random, rows, 8, 64))
                          .of_terms < 5e-4);
            const auto parents = random_parents(random, 64);
            sequence.append_draft(0, s.k.slice(200, 64), s.v.slice(200, 64));
            for (const int rows : {1, 64})
                CHECK(test::measure_attention(cache, sequence, 0, test::random_tensor(random, rows, 8, 64),
                                              kvq::token_tree(200, parents), walk_of_parents{200, &parents})
                          .of_terms < 5e-4);
        }
}

TEST_CASE("draft_bytes bounds what a draft and keep() take from a budget, in any number of calls") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 100; ++round) {
        const auto shape = test::random_cache_shape(random, 2, 8);
        auto options = test::random_options(random);
        options.byte_budget = 1 << 24;
        test::kivi_cache cache(shape, options);
        const int held = random.between(0, 100), n = random.between(1, 64);
        const test::stream s(random, shape, 200);
        auto sequence = cache.new_sequence();
        append(sequence, 2, s, 0, held);
        // A page that leaves so many bytes of the budget.
        const auto leave = [&](std::size_t bytes) {
            const std::size_t rest = options.byte_budget - cache.bytes_in_use();
            return cache.pool().allocate(rest - bytes - sizeof(kvq::page), 0, 1);
        };
        {
            const auto others = leave(64);
            CHECK_THROWS_AS(draft(random, sequence, 2, s, 100, n), kvq::out_of_memory);
            CHECK(sequence.tokens() == held);
        }
        CHECK(sequence.draft_bytes(0) == 0);
        const auto others = leave(sequence.draft_bytes(n));
        draft(random, sequence, 2, s, 100, n);
        const auto path = random_path(random, random_parents(random, n));
        sequence.keep(path);
        CHECK(sequence.tokens() == held + static_cast<int>(path.size()));
    }
}

TEST_CASE("a tree as a ring of a window sees it; what is kept is what the ring would have appended") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{1, 2, 16};
    test::kivi_cache cache(shape, {.sinks = 2, .recent = 8, .page_tokens = 8});
    const test::stream s(random, shape, 2000);
    kvq::ring ring(cache.new_sequence(), {.window = 40, .slack = 8}),
        twin(cache.new_sequence(), {.window = 40, .slack = 8});
    for (int step = 0, at = 0; step < 100; ++step) {
        ring.append(0, s.k.slice(at, 3), s.v.slice(at, 3));
        twin.append(0, s.k.slice(at, 3), s.v.slice(at, 3));
        at += 3;
        const int n = random.between(1, 8);
        const auto parents = random_parents(random, n);
        const auto path = random_path(random, parents);
        const int first = ring.held().tokens(0);
        ring.held().append_draft(0, s.k.slice(at, n), s.v.slice(at, n));
        const auto q = test::random_tensor(random, n, 4, 16);
        test::tensor<float> out(n, 4, 16), expected(n, 4, 16);
        ring.attend(0, q.view(), out.view(), kvq::token_tree(first, parents));
        ring.held().attend(0, q.view(), expected.view(),
                           kvq::mods{kvq::token_tree(first, parents), kvq::sink_window{40, 2}});
        CHECK(out.values() == expected.values());
        ring.held().keep(path);
        const picked rows(random, shape, s, at, path);
        twin.append(0, rows.k.view(), rows.v.view());
        REQUIRE(ring.tokens() == twin.tokens());
        test::tensor<float> a(1, 4, 16), b(1, 4, 16);
        ring.attend(0, q.slice(0, 1), a.view());
        twin.attend(0, q.slice(0, 1), b.view());
        CHECK(a.values() == b.values());
        at += n;
    }
}

TEST_CASE("drafts and paths that make no sense are refused, before anything changes") {
    test::generator random(1);
    const kvq::cache_shape shape{2, 1, 16};
    test::kivi_cache cache(shape, {.page_tokens = 16});
    const test::stream s(random, shape, 100);
    auto sequence = cache.new_sequence();
    append(sequence, 2, s, 0, 10);
    const auto refused = [](const auto& f, const char* words) {
        CHECK_THROWS_WITH_AS(f(), doctest::Contains(words), kvq::error);
    };
    refused([&] { sequence.append_draft(0, s.k.slice(0, 65), s.v.slice(0, 65)); }, "at most 64 tokens");
    refused([&] { sequence.append_draft(2, s.k.slice(0, 1), s.v.slice(0, 1)); }, "layer 2");
    refused([&] { sequence.append_draft(0, s.k.slice(0, 1), s.v.slice(0, 2)); }, "v has 2");
    refused([&] { sequence.keep(std::vector<int>{0}); }, "draft of 0 tokens");
    sequence.keep({});
    sequence.append_draft(0, s.k.slice(0, 60), s.v.slice(0, 60));
    sequence.append_draft(1, s.k.slice(0, 4), s.v.slice(0, 4));
    refused([&] { sequence.append_draft(0, s.k.slice(0, 5), s.v.slice(0, 5)); },
            "holds 60 and cannot take 5 more");
    refused([&] { (void)sequence.draft_bytes(5); }, "draft of 60 tokens");
    refused([&] { (void)sequence.draft_bytes(65); }, "not 65");
    refused(
        [&] {
            sequence.keep(std::vector<int>{0, 4});
        },
        "token 4 at place 1 of a path through a draft of 4 tokens");
    refused([&] { sequence.keep(std::vector<int>{-1}); }, "token -1");
    refused([&] { sequence.keep(std::vector<int>{1, 1}); }, "token 1 at place 1");
    refused([&] { sequence.append(0, s.k.slice(0, 1), s.v.slice(0, 1)); }, "draft of 60 tokens: keep()");
    test::tensor<float> q(1, 2, 16), out(1, 2, 16);
    refused([&] { sequence.prefill(0, s.k.slice(0, 1), s.v.slice(0, 1), q.view(), out.view()); },
            "draft of 60 tokens");
    refused([&] { (void)test::saved(sequence); }, "draft of 60 tokens");
    refused([&] { sequence.trim(12); }, "cannot trim to 12 tokens: the draft of a layer is tokens 10 to 70");
    CHECK(sequence.tokens(0) == 70);
    CHECK(sequence.tokens(1) == 14);
    sequence.keep(std::vector<int>{3});
    CHECK(sequence.tokens(0) == 11);
    CHECK(sequence.tokens(1) == 11);
    refused([&] { kvq::token_tree(0, std::vector<int>(65, -1)); }, "at most 64 tokens, got 65");
    refused([&] { kvq::token_tree(0, std::vector<int>{-1, 1}); }, "token 1 of a tree has parent 1");
    refused([&] { kvq::token_tree(0, std::vector<int>{-2}); }, "parent -2");
    refused([&] { kvq::token_tree(-1, std::vector<int>{-1}); }, "got -1");
}

TEST_CASE("a tree: ancestors, depths and paths") {
    const std::vector<int> parents{-1, 0, 0, 2, -1, 4};
    const kvq::token_tree tree(100, parents);
    CHECK(tree.size() == 6);
    CHECK(tree.ancestors(3) == 0b1101u);
    CHECK(tree.depth(3) == 2);
    CHECK(tree.depth(4) == 0);
    CHECK(tree.is_path(std::vector<int>{0, 2, 3}));
    CHECK(tree.is_path(std::vector<int>{}));
    CHECK(!tree.is_path(std::vector<int>{0, 3}));
    CHECK(!tree.is_path(std::vector<int>{2, 3}));
    CHECK(!tree.is_path(std::vector<int>{0, 6}));
    CHECK(tree.mask(103, 99));
    CHECK(tree.mask(103, 102));
    CHECK(!tree.mask(103, 101));
    CHECK(tree.mask(105, 104));
    CHECK(!tree.mask(105, 103));
}

TEST_CASE_TEMPLATE("drafts behind erased, shifted and spliced tokens", C, KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 12; ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size, 6);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        options.rotary = {kvq::rotary_embedding{}};  // keys without positions may move
        auto cache = test::make_cache<C>(shape, options), other = test::make_cache<C>(shape, options);
        test::stream s(random, shape, 400);
        auto sequence = cache.new_sequence(), twin = other.new_sequence();
        int used = 0;
        const auto both = [&](const auto& call) { call(sequence), call(twin); };
        for (int step = 0; step < 10; ++step) {
            const int n = random.between(1, 30);
            both([&](kvq::sequence& to) { append(to, shape.layers, s, used, n); });
            used += n;
            const int held = sequence.tokens(), first = random.between(0, held),
                      last = random.between(first, held);
            const int how = random.between(0, 2), by = random.between(-9, 9);
            both([&](kvq::sequence& to) {
                if (how == 0) to.erase(first, last);
                if (how == 1) to.shift(first, last, by);
                if (how == 2) to.splice(to.fork(), first, last);
            });
            const std::vector<int> parents = random_parents(random, random.between(1, 8));
            const int drafted = static_cast<int>(parents.size()), before = sequence.tokens();
            draft(random, sequence, shape.layers, s, used, drafted);
            if (before > 0) {
                CHECK_THROWS_AS(sequence.shift(0, before, 1), kvq::error);
                CHECK_THROWS_AS(sequence.splice(sequence, 0, 1), kvq::error);
                CHECK_THROWS_AS(sequence.erase(0, before), kvq::error);
            }
            REQUIRE(sequence.tokens() == before + drafted);
            const std::vector<int> path = random_path(random, parents);
            sequence.keep(path);
            append(twin, shape.layers, picked(random, shape, s, used, path), 0,
                   static_cast<int>(path.size()));
            used += drafted;
            require_identical(cache, sequence, other, twin);
        }
    }
}

}  // namespace speculation_tests
