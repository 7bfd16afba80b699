// SPDX-License-Identifier: MIT
// Stepping down: pages take the tier of their age, then shrink until the budget holds; nothing else changes.
#include <doctest/doctest.h>

#include <kvq/core/thread_pool.hpp>
#include <kvq/estimate/footprint.hpp>

#include "support/ladder.hpp"
#include "support/memory.hpp"

using test::ladder_cache;
using ladder_sequence = ladder_cache::sequence_type;

namespace step_down_tests {

namespace {

kvq::step_down_policy random_policy(test::generator& random) {
    kvq::step_down_policy policy;
    int age = random.between(0, 20), format = random.between(0, 1);
    for (; format < test::ladder_formats; ++format) {
        policy.tiers.push_back({age, {format, format}});
        age += random.between(0, 80);
    }
    return policy;
}

/// The listed formats are the tiers; the first of them is the window's own.
int tier_of(int format) { return format == 0 ? 0 : format - 1; }

int format_of(const ladder_cache& cache, const kvq::layer_format& f, kvq::tensor role) {
    return role == kvq::tensor::key ? cache.table(kvq::tensor::key).index_of(f.key)
                                    : cache.table(kvq::tensor::value).index_of(f.value);
}

/// step_down(), behind a dry run that says what it does and changes nothing.
kvq::step_down_report foretold(ladder_cache& cache, std::span<ladder_sequence* const> sequences,
                               const kvq::step_down_policy& policy, int threads = 1) {
    const auto held = [&] {
        std::vector<std::vector<test::held_page>> all;
        for (const ladder_sequence* const s : sequences) all.push_back(test::contents(cache, *s));
        return all;
    };
    const auto before = held();
    const std::size_t in_use = cache.bytes_in_use();
    const std::vector<const ladder_sequence*> read(sequences.begin(), sequences.end());
    const kvq::step_down_report plan = kvq::plan_step_down(cache, read, policy, threads);
    CHECK(cache.bytes_in_use() == in_use);
    CHECK(held() == before);
    const kvq::step_down_report done = kvq::step_down(cache, sequences, policy, kvq::thread_pool(threads));
    CHECK(plan.bytes_before == done.bytes_before);
    CHECK(plan.bytes_after == done.bytes_after);
    CHECK(plan.bytes_peak == done.bytes_peak);
    CHECK(plan.fits == done.fits);
    REQUIRE(plan.steps.size() == done.steps.size());
    for (std::size_t i = 0; i < done.steps.size(); ++i) {
        const kvq::step_down_step &a = plan.steps[i], &b = done.steps[i];
        CHECK((a.tier == b.tier && a.first_token == b.first_token && a.last_token == b.last_token &&
               a.pages == b.pages && a.bytes_after == b.bytes_after));
    }
    return done;
}
kvq::step_down_report foretold(ladder_cache& cache, ladder_sequence& s, const kvq::step_down_policy& policy) {
    ladder_sequence* const one = &s;
    return foretold(cache, std::span(&one, 1), policy);
}

/// page(i): the i-th entry that does not hold the sinks.
auto pages_behind_sinks(const kvq::layer_pages& pages) {
    return [pages](int i) { return pages.at(pages.geometry.sinks > 0 ? i + 1 : i); };
}

}  // namespace

TEST_CASE("by age, every page has the format of its tier, and a second call finds nothing to do") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(40); ++round) {
        // Large enough that fewer bits are fewer bytes.
        const kvq::cache_shape shape{random.between(1, 4), random.between(1, 3), 32 * random.between(1, 2),
                                     0};
        kvq::cache_options options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{16, 32, 33});
        ladder_cache cache(shape, options);
        const kvq::page_geometry g = cache.geometry();
        kvq::step_down_policy policy = random_policy(random);
        policy.first_layers_kept = random.between(0, shape.layers / 2);
        policy.last_layers_kept = random.between(0, shape.layers / 2);
        const test::stream s(random, shape, 400);
        auto sequence = cache.new_sequence();
        int tokens = 0;
        while (tokens < 300) {
            const int n = random.between(1, 90);
            test::append(sequence, shape.layers, s, tokens, n);
            tokens += n;
            const auto report = foretold(cache, sequence, policy);
            CHECK(report.fits);
            CHECK(report.bytes_after == cache.bytes_in_use());
            for (int layer = 0; layer < shape.layers; ++layer) {
                const bool kept =
                    layer < policy.first_layers_kept || layer >= shape.layers - policy.last_layers_kept;
                const auto page = pages_behind_sinks(sequence.pages(layer));
                for (int i = 0; i < g.pages(tokens); ++i) {
                    int expected[2] = {0, 0};
                    if (i < g.committed(tokens) && !kept)
                        for (const kvq::tier& t : policy.tiers)
                            if (tokens - g.first_token(i + 1) >= t.age)
                                for (const auto role : {kvq::tensor::key, kvq::tensor::value})
                                    expected[static_cast<int>(role)] = format_of(cache, t.format, role);
                    CHECK(page(i).keys->format == expected[0]);
                    CHECK(page(i).values->format == expected[1]);
                }
            }
            CHECK(kvq::step_down(cache, sequence, policy).steps.empty());
        }
    }
}

TEST_CASE("under a budget, the oldest page of the widest tier goes first, no further than needed") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(40); ++round) {
        kvq::cache_shape shape{2, 2, 48, 0};
        auto options = test::random_options(random);
        options.page_tokens = 16;
        ladder_cache cache(shape, options);
        const test::stream s(random, shape, 600);
        auto sequence = cache.new_sequence();
        const int tokens = random.between(100, 600);
        test::append(sequence, shape.layers, s, 0, tokens);
        kvq::step_down_policy policy;
        for (int f = 0; f < 4; ++f) policy.tiers.push_back({1 << 20, {f, f}});
        policy.tiers.front().age = 0;
        const std::size_t full = cache.bytes_in_use();
        policy.byte_budget = full * static_cast<std::size_t>(random.between(10, 100)) / 100;
        const auto report = foretold(cache, sequence, policy);
        CHECK(report.bytes_before == full);
        CHECK(report.bytes_after == cache.bytes_in_use());
        CHECK(report.fits == (report.bytes_after <= policy.byte_budget));
        const kvq::page_geometry g = cache.geometry();
        const auto page = pages_behind_sinks(sequence.pages(0));
        // Quantizing a page that a trim within `rollback` would need again frees nothing.
        int movable = g.committed(tokens);
        while (movable > 0 && g.commit_at(movable - 1) > tokens - options.rollback) --movable;
        int last = 4;
        for (int i = 0; i < movable; ++i) {
            CHECK(page(i).keys->format <= last);  // older pages are never wider
            CHECK(page(i).keys->format == page(i).values->format);
            last = page(i).keys->format;
        }
        if (movable > 0) {
            CHECK(tier_of(page(0).keys->format) - tier_of(last) <= 1);  // tier by tier
            if (!report.fits) CHECK(last == 4);
        }
        for (int i = movable; i < g.pages(tokens); ++i) CHECK(page(i).keys->format == 0);
        // One step less would not have been enough.
        if (report.steps.size() > 1)
            CHECK(report.steps[report.steps.size() - 2].bytes_after > policy.byte_budget);
        if (report.steps.empty() && report.fits) CHECK(full <= policy.byte_budget);
        if (!report.steps.empty()) CHECK(report.steps.back().bytes_after == report.bytes_after);
    }
}

TEST_CASE(
    "under a budget nothing is converted that somebody else holds, and everything else is, as far as "
    "needed") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    int left_alone = 0, did_not_fit = 0, fitted = 0;
    for (int round = 0; round < 100; ++round) {
        INFO("round ", round);
        const int layers = random.between(1, 3);
        const kvq::cache_shape shape{layers, random.between(1, 2), 32, 0};
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{8, 16, 32});
        for (int i = 0; i < layers; ++i)
            options.layers.push_back({random.between(0, 1), random.between(0, 1)});
        ladder_cache cache(shape, options);
        const test::stream s(random, shape, 500);
        // A family of forks, trimmed anywhere and continued, and a stranger.
        std::vector<ladder_sequence> all;
        all.push_back(cache.new_sequence());
        test::append(all[0], layers, s, 0, random.between(50, 400));
        for (int i = random.between(0, 4); i > 0; --i) {
            all.push_back(
                all[static_cast<std::size_t>(random.between(0, static_cast<int>(all.size()) - 1))].fork());
            ladder_sequence& fork = all.back();
            if (random.one_in(2)) fork.trim(random.between(0, fork.tokens()));
            if (random.one_in(2)) test::append(fork, layers, s, 400, random.between(0, 100));
        }
        all.push_back(cache.new_sequence());
        test::append(all.back(), layers, s, 100, random.between(0, 200));
        std::vector<ladder_sequence*> given;
        std::vector<const ladder_sequence*> given_const, others;
        for (ladder_sequence& one : all)
            if (given.empty() || random.one_in(2))
                given.push_back(&one);
            else
                others.push_back(&one);
        given_const.assign(given.begin(), given.end());
        std::vector<std::vector<test::held_page>> untouched;
        for (const auto* one : others) untouched.push_back(test::contents(cache, *one));

        kvq::step_down_policy policy;
        for (int f = 0; f < test::ladder_formats; ++f) policy.tiers.push_back({1 << 20, {f, f}});
        policy.first_layers_kept = random.between(0, layers - 1);
        const std::size_t before = cache.bytes_in_use();
        policy.byte_budget =
            random.one_in(4) ? 1 : before / 100 * static_cast<std::size_t>(random.between(5, 100));
        const int threads = random.between(1, 2);
        const auto report = foretold(cache, given, policy, threads);
        CHECK(report.bytes_before == before);
        CHECK(report.bytes_after == cache.bytes_in_use());
        CHECK(report.fits == (report.bytes_after <= policy.byte_budget));
        std::size_t now = before;
        for (const kvq::step_down_step& step : report.steps) {
            CHECK(step.bytes_after < now);
            now = step.bytes_after;
        }
        CHECK(now == report.bytes_after);
        CHECK(report.bytes_peak <=
              before + static_cast<std::size_t>(threads) * kvq::page_pool::allocation(cache.page_bytes(
                                                               kvq::tensor::key, 0, options.page_tokens)));
        for (std::size_t i = 0; i < others.size(); ++i)
            REQUIRE(test::contents(cache, *others[i]) == untouched[i]);
        // Nothing is left that would free a byte.
        (report.fits ? fitted : did_not_fit) += 1;
        if (report.fits) continue;
        kvq::requantize_request rest{.key = 3, .value = 3, .first_layer = policy.first_layers_kept};
        rest.only_smaller = true;
        const auto planned = cache.plan_requantize(given_const, rest);
        CHECK(planned.bytes_freed == 0);
        left_alone += planned.pages > 0;
    }
    CHECK(left_alone > 0);
    CHECK(did_not_fit > 0);
    CHECK(fitted > 0);
}

TEST_CASE("after a deep trim, a page that is quantized already takes part") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    int beyond = 0;
    for (int round = 0; round < test::rounds(40); ++round) {
        auto options = test::random_options(random);
        options.page_tokens = 16;
        options.repack = 0.0f;
        options.rollback = random.pick(std::vector<int>{0, 8});
        options.recent = random.between(0, 100);
        options.layers = {{1, 1}, {1, 1}};
        ladder_cache cache({2, 1, 32, 0}, options);
        const test::stream s(random, cache.shape(), 400);
        auto sequence = cache.new_sequence();
        test::append(sequence, 2, s, 0, 400);
        const int tokens = random.between(100, 400);
        sequence.trim(tokens);
        kvq::step_down_policy policy;
        policy.tiers = {{0, {1, 1}}, {1 << 20, {3, 3}}};
        policy.byte_budget = 1;
        const auto report = foretold(cache, sequence, policy);
        CHECK_FALSE(report.fits);
        CHECK(report.bytes_after == cache.bytes_in_use());
        const auto pages = sequence.pages(1);
        const int sinks = options.sinks > 0 ? 1 : 0;
        for (int i = sinks; i < pages.entries(); ++i) {
            CHECK(pages.at(i).keys->format != 2);
            beyond += i - sinks >= cache.geometry().committed(tokens) && pages.at(i).keys->format == 4;
        }
        CHECK(cache.plan_requantize(sequence, {.key = 3, .value = 3}).bytes_freed == 0);
    }
    CHECK(beyond > 0);
}

TEST_CASE("drafted tokens leave no trace when the policy runs on what was accepted") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 10; ++round) {
        const kvq::cache_shape shape = test::random_cache_shape(random, 2);
        auto options = test::ladder_options(random, 2);
        options.rollback = 16;
        ladder_cache cache(shape, options);
        const auto policy = random_policy(random);
        const test::stream s(random, shape, 400), drafts(random, shape, 16);
        auto drafting = cache.new_sequence(), plain = cache.new_sequence();
        int tokens = 0;
        while (tokens < 300) {
            const int accepted = random.between(1, 8), wrong = random.between(0, 8);
            test::append(drafting, 2, s, tokens, accepted);
            test::append(drafting, 2, drafts, 0, wrong);
            drafting.trim(tokens + accepted);
            for (int i = 0; i < accepted; ++i) test::append(plain, 2, s, tokens + i, 1);
            tokens += accepted;
            kvq::step_down(cache, drafting, policy);
            kvq::step_down(cache, plain, policy);
            REQUIRE(test::contents(cache, drafting) == test::contents(cache, plain));
        }
    }
}

TEST_CASE("sequences that share pages go on sharing; the oldest holder decides") {
    test::generator random(test::seed());
    kvq::cache_options options;
    options.page_tokens = 16;
    ladder_cache cache({1, 1, 32, 0}, options);
    const test::stream s(random, cache.shape(), 400);
    auto a = cache.new_sequence();
    test::append(a, 1, s, 0, 160);
    auto b = a.fork();
    test::append(b, 1, s, 160, 160);
    kvq::step_down_policy policy;
    policy.tiers = {{0, {0, 0}}, {64, {1, 1}}, {160, {2, 2}}};
    ladder_sequence* both[] = {&a, &b};
    foretold(cache, both, policy);
    for (int i = 0; i < 10; ++i) {
        CHECK(a.pages(0).at(i).keys == b.pages(0).at(i).keys);
        CHECK(a.pages(0).at(i).keys->format == 3);  // 160 behind the end of b
    }
    CHECK(b.pages(0).at(10).keys->format == 2);
    CHECK(b.pages(0).at(19).keys->format == 0);
}

TEST_CASE(
    "footprint() with a policy equals what a cache holds that steps down, longest_context() what fits") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(40); ++round) {
        INFO("round ", round);
        const kvq::cache_shape shape = test::random_cache_shape(random, random.between(1, 4));
        test::counting_resource memory;
        kvq::cache_options options = test::ladder_options(random, shape.layers);
        options.memory = &memory;
        ladder_cache cache(shape, options);
        kvq::step_down_policy policy = random_policy(random);
        policy.first_layers_kept = random.between(0, shape.layers / 2);
        policy.last_layers_kept = random.between(0, shape.layers / 2);
        const test::stream s(random, shape, 400);
        auto sequence = cache.new_sequence();
        int tokens = 0;
        while (tokens < 300) {
            const int n = random.between(1, 60);
            test::append(sequence, shape.layers, s, tokens, n);
            tokens += n;
            kvq::step_down(cache, sequence, policy);
            const auto f = kvq::footprint(cache, tokens, 1, {}, policy);
            const auto u = sequence.usage();
            CHECK(f.quantized == u.quantized);
            CHECK(f.window == u.window);
            CHECK(f.rollback == u.rollback);
            CHECK(f.bookkeeping == u.bookkeeping);
            CHECK(f.total == memory.bytes());
        }
        const auto f = kvq::footprint(cache, random.between(0, 300), 1, {}, policy);
        const std::size_t budget = f.total + f.transient - static_cast<std::size_t>(random.between(0, 1));
        int expected = -1;
        for (int m = 0;; ++m) {
            const auto each = kvq::footprint(cache, m, 1, {}, policy);
            if (each.total + (m > 0 ? each.transient : 0) > budget) break;
            expected = m;
        }
        CHECK(kvq::longest_context(cache, budget, 1, {}, policy) == expected);
    }
    ladder_cache cache({2, 1, 32, 0}, {});
    CHECK_THROWS_AS((void)kvq::footprint(cache, 10, 1, {}, {.tiers = {{8, {1, 7}}}}), kvq::error);
}

TEST_CASE("of formats with as many bytes a page takes the first tier's, whenever it comes to it") {
    kvq::cache_options options{.sinks = 0, .recent = 0, .page_tokens = 1, .rollback = 0};
    ladder_cache cache({1, 1, 8, 0}, options);
    const auto bytes = [&](int listed) {
        return cache.page_bytes(kvq::tensor::key, 0, cache.table(kvq::tensor::key).index_of(listed), 1);
    };
    REQUIRE(bytes(2) == bytes(3));
    REQUIRE(bytes(2) < bytes(0));
    const kvq::step_down_policy policy{.tiers = {{3, {2, 2}}, {5, {3, 3}}}};
    test::generator random(test::seed());
    const test::stream s(random, cache.shape(), 20);
    for (const int n : {1, 20}) {  // tokens between two steps down
        auto sequence = cache.new_sequence();
        for (int at = 0; at < 20; at += n) {
            test::append(sequence, 1, s, at, n);
            foretold(cache, sequence, policy);
        }
        for (int i = 0; i < 17; ++i) CHECK(sequence.pages(0).at(i).keys->format == 3);
        CHECK(sequence.usage().window == kvq::footprint(cache, 20, 1, {}, policy).window);
    }
}

TEST_CASE("by age, pages that a sequence holds which is not given stay: no byte is added") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(30); ++round) {
        kvq::cache_options options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{16, 32});
        options.rollback = 0;  // else 16-bit pages have copies
        ladder_cache cache({1, 2, 32, 0}, options);
        const test::stream s(random, cache.shape(), 400);
        auto a = cache.new_sequence();
        test::append(a, 1, s, 0, 300);
        auto b = a.fork();
        b.trim(random.between(0, 300));
        test::append(b, 1, s, 300, random.between(0, 100));
        const auto of_b = test::contents(cache, b);
        const auto policy = random_policy(random);
        const auto alone = foretold(cache, a, policy);
        CHECK(alone.bytes_after <= alone.bytes_before);
        REQUIRE(test::contents(cache, b) == of_b);
        ladder_sequence* both[] = {&a, &b};
        const auto together = foretold(cache, both, policy);
        CHECK(together.bytes_after <= together.bytes_before);
        CHECK(kvq::step_down(cache, both, policy).steps.empty());
    }
}

TEST_CASE("impossible policies are refused with their numbers") {
    ladder_cache cache({2, 1, 32, 0}, {});
    auto s = cache.new_sequence();
    const auto refuse = [&](const kvq::step_down_policy& p, const char* what) {
        CHECK_THROWS_WITH_AS(kvq::step_down(cache, s, p), what, kvq::error);
        CHECK_THROWS_WITH_AS((void)kvq::plan_step_down(cache, s, p), what, kvq::error);
    };
    refuse({.tiers = {{0, {0, 0}}, {-1, {1, 1}}}}, "kvq: tier 1 starts at age -1, before 0");
    refuse({.tiers = {{-1, {1, 1}}}}, "kvq: tier 0 starts at age -1, before 0");
    refuse({.tiers = {{0, {0, 0}}, {8, {1, 7}}}},
           "kvq: tier 1 has formats 1 and 7, not among the 5 and 5 listed ones");
    refuse({.tiers = {}, .first_layers_kept = 2, .last_layers_kept = 1},
           "kvq: cannot keep 2 first and 1 last of 2 layers");
    constexpr int most = std::numeric_limits<int>::max();
    refuse({.tiers = {}, .first_layers_kept = most, .last_layers_kept = most},
           "kvq: cannot keep 2147483647 first and 2147483647 last of 2 layers");
}

TEST_CASE("usage rows add up to the usage report") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 20; ++round) {
        const kvq::cache_shape shape = test::random_cache_shape(random, 3);
        ladder_cache cache(shape, test::ladder_options(random, 3));
        const test::stream s(random, shape, 300);
        auto sequence = cache.new_sequence();
        test::append(sequence, 3, s, 0, random.between(0, 300));
        cache.requantize(sequence, test::random_request(random, 3, 300));
        const kvq::usage_report u = sequence.usage();
        std::size_t quantized = 0, window = 0, slack = 0;
        std::vector<int> tokens(6);
        for (const kvq::usage_row& row : kvq::usage_rows(sequence)) {
            (row.format == 0 ? window : quantized) += row.codes + row.parameters;
            slack += row.slack;
            tokens[static_cast<std::size_t>(2 * row.layer + static_cast<int>(row.role))] += row.tokens;
            CHECK(row.room >= row.tokens);
            CHECK(row.shared == 0);
            CHECK(!row.scheme.empty());
            CHECK(row.bookkeeping == static_cast<std::size_t>(row.pages) * sizeof(kvq::page));
        }
        CHECK(quantized == u.quantized);
        CHECK(window == u.window);
        CHECK(slack == u.slack);
        for (const int n : tokens) CHECK(n == sequence.tokens());
    }
}

}  // namespace step_down_tests
