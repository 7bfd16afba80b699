// SPDX-License-Identifier: MIT
// Requantizing a live cache: the dry run is the truth, the bytes are those of direct quantizing, errors add
// up and no more.
#include <doctest/doctest.h>

#include <array>
#include <atomic>

#include <kvq/core/thread_pool.hpp>

#include "support/attention_error.hpp"
#include "support/ladder.hpp"
#include "support/memory.hpp"
#include "support/typed_cache.hpp"

using test::ladder_cache;
using ladder_sequence = ladder_cache::sequence_type;

namespace requantize_tests {

namespace {

struct fixture {
    int layers;
    kvq::cache_shape shape;
    test::counting_resource memory;
    ladder_cache cache;

    explicit fixture(test::generator& random, int n_layers = 2)
        : layers(n_layers),
          shape(test::random_cache_shape(random, n_layers)),
          cache(shape, options(random)) {}

    kvq::cache_options options(test::generator& random) {
        auto o = test::ladder_options(random, layers);
        o.memory = &memory;
        return o;
    }
};

/// Executes requests on `n` threads without starting them: tasks in an order of their own.
struct backwards_executor {
    int n;
    int concurrency() const { return n; }
    void parallel_for(int count, auto&& f) const {
        for (int i = count; i-- > 0;) f(i);
    }
};

kvq::requantize_report requantize(ladder_cache& cache, std::vector<ladder_sequence*> sequences,
                                  const kvq::requantize_request& request, int threads = 1,
                                  const kvq::requantize_limit& limit = {}) {
    kvq::workspace space(cache.pool().memory());
    return cache.requantize(sequences, request, limit, backwards_executor{threads}, space);
}

}  // namespace

TEST_CASE("the dry run says byte for byte what then happens, shared pages and threads included") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(60); ++round) {
        fixture f(random, random.between(1, 3));
        const int tokens = random.between(0, 300);
        const test::stream s(random, f.shape, tokens + 40);
        std::vector<ladder_sequence> held;
        held.push_back(f.cache.new_sequence());
        test::append(held[0], f.layers, s, 0, tokens);
        const int forks = random.between(0, 2);
        for (int i = 0; i < forks; ++i) {
            held.push_back(held[0].fork());
            if (random.one_in(2)) held.back().trim(random.between(0, tokens));
            if (random.one_in(2)) test::append(held.back(), f.layers, s, tokens, random.between(0, 40));
        }
        std::vector<ladder_sequence*> chosen;
        for (ladder_sequence& one : held)
            if (chosen.empty() || random.one_in(2)) chosen.push_back(&one);
        const std::vector<const ladder_sequence*> const_chosen(chosen.begin(), chosen.end());
        for (int again = 0; again < 3; ++again) {
            const auto request = test::random_request(random, f.layers, tokens);
            const int threads = random.between(1, 4);
            const auto before = test::contents(f.cache, held[0]);
            const auto planned = f.cache.plan_requantize(const_chosen, request, threads);
            CHECK(test::contents(f.cache, held[0]) == before);
            CHECK(planned.bytes_before == f.cache.bytes_in_use());

            const std::size_t other = f.memory.bytes() - f.cache.bytes_in_use();
            f.memory.reset_peak();
            const auto done = requantize(f.cache, chosen, request, threads);
            CHECK(test::same(done, planned));
            CHECK(done.bytes_after == f.cache.bytes_in_use());
            const std::size_t tables = f.memory.bytes() - f.cache.bytes_in_use();
            const auto& options = f.cache.options();
            CHECK(tables == other);
            // Measured by the memory resource: pages, the scratch, and the lists of one job per thread and of
            // those who hold its page.
            const std::size_t lists = 64 * static_cast<std::size_t>(threads) +
                                      chosen.size() * (48 + 8 * static_cast<std::size_t>(threads));
            CHECK(f.memory.peak() >= done.bytes_peak + other);
            CHECK(f.memory.peak() <= done.bytes_peak + tables + done.workspace + lists);
            // One new page per thread.
            std::size_t widest = 0;
            if (request.key >= 0)
                widest = f.cache.page_bytes(kvq::tensor::key,
                                            f.cache.table(kvq::tensor::key).index_of(request.key),
                                            options.page_tokens);
            if (request.value >= 0)
                widest = std::max(
                    widest, f.cache.page_bytes(kvq::tensor::value,
                                               f.cache.table(kvq::tensor::value).index_of(request.value),
                                               options.page_tokens));
            // Pages are not freed that are kept as 16-bit copies, or that a fork still has in its window.
            if (request.only_smaller && held.size() == 1 && options.rollback == 0)
                CHECK(done.bytes_peak <=
                      done.bytes_before + static_cast<std::size_t>(threads) * (64 + widest));
            CHECK(f.cache.plan_requantize(const_chosen, request, threads).pages == 0);
        }
    }
}

TEST_CASE("the dry run is the truth after any history: trims, forks, and pages that went back and forth") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 16};
    const test::stream s(random, shape, 600);
    const auto agree = [](ladder_cache& cache, ladder_sequence& one, const kvq::requantize_request& request) {
        const auto planned = cache.plan_requantize(one, request), done = cache.requantize(one, request);
        CHECK(test::same(planned, done));
        CHECK(done.bytes_after == cache.bytes_in_use());
    };
    {  // A 16-bit copy that becomes useless within the call: a page behind it was quantized long ago.
        kvq::cache_options options{.recent = 1, .page_tokens = 4, .rollback = 18};
        options.layers = {{0, 2}};
        ladder_cache cache(shape, options);
        auto one = cache.new_sequence();
        test::append(one, 1, s, 0, 24);
        cache.requantize(one, {.key = 2, .value = 2, .first_token = 4});
        test::append(one, 1, s, 24, 11);
        cache.requantize(one, {.key = 0, .value = 2, .first_token = 5, .new_pages = true});
        one.trim(33);
        one.trim(19);
        agree(cache, one, {.key = 2, .value = 2});
    }
    for (int round = 0; round < test::rounds(3000); ++round) {
        INFO("round ", round);
        kvq::cache_options options{
            .recent = random.between(0, 4), .page_tokens = 4, .rollback = random.between(0, 20)};
        options.layers = {{random.between(0, 3), random.between(0, 3)}};
        ladder_cache cache(shape, options);
        std::vector<ladder_sequence> held;
        held.push_back(cache.new_sequence());
        for (int step = 0; step < 14; ++step) {
            auto& one = held[static_cast<std::size_t>(random.between(0, static_cast<int>(held.size()) - 1))];
            const int what = random.between(0, 4);
            if (what == 0) {
                test::append(one, 1, s, one.tokens(), random.between(1, 30));
            } else if (what == 1) {
                one.trim(std::max(0, one.tokens() - random.between(0, 20)));
            } else if (what == 2 && held.size() < 3) {
                held.push_back(one.fork());
                continue;  // `one` may have moved
            } else {
                auto request = test::random_request(random, 1, one.tokens());
                request.first_layer = 0;
                request.last_layer = 1;
                agree(cache, one, request);
            }
        }
    }
}

TEST_CASE("16-bit pages become the bytes that direct quantizing would have written") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 20; ++round) {
        const kvq::cache_shape shape = test::random_cache_shape(random, 1);
        auto options = test::random_options(random);
        const int key = random.between(1, 3), value = random.between(1, 3);
        ladder_cache later(shape, options);
        options.layers = {{key, value}};
        ladder_cache at_once(shape, options);
        const int tokens = random.between(1, 300);
        const test::stream s(random, shape, tokens);
        auto a = later.new_sequence(), b = at_once.new_sequence();
        test::append(a, 1, s, 0, tokens);
        test::append(b, 1, s, 0, tokens);
        kvq::requantize_request request;
        request.key = key;
        request.value = value;
        later.requantize(a, request);
        CHECK(test::contents(later, a) == test::contents(at_once, b));
    }
}

TEST_CASE("a request done in pieces, between decode steps, ends where one call ends") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 15; ++round) {
        fixture f(random);
        const int tokens = random.between(100, 300), steps = 40;
        const test::stream s(random, f.shape, tokens + steps);
        auto whole = f.cache.new_sequence(), pieces = f.cache.new_sequence();
        test::append(whole, f.layers, s, 0, tokens);
        test::append(pieces, f.layers, s, 0, tokens);
        kvq::requantize_request request;
        request.key = random.between(0, 3);
        request.value = random.between(0, 3);
        request.new_pages = true;
        f.cache.requantize(whole, request);
        kvq::requantize_limit limit;
        limit.pages = static_cast<std::size_t>(random.between(1, 4));
        std::size_t left = f.cache.plan_requantize(pieces, request).pages;
        for (int i = 0; i < steps; ++i) {
            const auto r = f.cache.requantize(pieces, request, limit);
            CHECK(r.pages == std::min(limit.pages, left));
            CHECK(r.pages_left == left - r.pages);
            left = r.pages_left;
            test::append(whole, f.layers, s, tokens + i, 1);
            test::append(pieces, f.layers, s, tokens + i, 1);
        }
        while (left > 0) left = f.cache.requantize(pieces, request, limit).pages_left;
        CHECK(test::contents(f.cache, pieces) == test::contents(f.cache, whole));
    }
}

TEST_CASE("attention stays that of the dequantized values while pages change") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    fixture f(random, 1);
    const test::stream s(random, f.shape, 400);
    auto sequence = f.cache.new_sequence();
    test::append(sequence, 1, s, 0, 300);
    const auto q = test::random_tensor(random, 1, 2 * f.shape.kv_heads, f.shape.head_dim);
    for (int i = 0; i < 60; ++i) {
        const auto request = test::random_request(random, 1, 300);
        f.cache.requantize(sequence, request, {.pages = 3});
        test::append(sequence, 1, s, 300 + i, 1);
        CHECK(test::measure_attention(f.cache, sequence, 0, q).relative < 5e-4);
    }
}

TEST_CASE("errors of a chain add up to half a step of each link") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 20; ++round) {
        const kvq::cache_shape shape{1, random.between(1, 2), random.between(1, 70), 0};
        kvq::cache_options options;
        options.page_tokens = random.pick(std::vector<int>{8, 16, 32});
        options.recent = options.sinks = 0;
        ladder_cache cache(shape, options);
        const int tokens = 4 * options.page_tokens;
        const test::stream s(random, shape, tokens);
        auto chain = cache.new_sequence();
        test::append(chain, 1, s, 0, tokens);
        auto direct = chain.fork();
        const auto values = [&](const ladder_sequence& x, kvq::tensor role) {
            return test::dequantized(x, shape, 0, role).values();
        };
        const std::array roles{kvq::tensor::key, kvq::tensor::value};
        std::array<std::vector<float>, 2> start, now;
        for (int r = 0; r < 2; ++r) start[r] = now[r] = values(chain, roles[static_cast<std::size_t>(r)]);
        std::array<double, 2> bound{0, 0};
        const auto distance = [](const std::vector<float>& a, const std::vector<float>& b) {
            double worst = 0;
            for (std::size_t i = 0; i < a.size(); ++i)
                worst = std::fmax(worst, std::fabs(static_cast<double>(a[i]) - b[i]));
            return worst;
        };
        for (int format = 1; format <= 3; ++format) {
            kvq::requantize_request request;
            request.key = request.value = format;
            CHECK(cache.requantize(chain, request).pages == 8);
            const std::array<int, 4> width{16, 8, 4, 2};
            for (int r = 0; r < 2; ++r) {
                // What the scheme states: half a step, of a range that is at most the whole tensor's;
                // parameters in fp16.
                float lo = now[r][0], hi = now[r][0];
                for (const float x : now[r]) lo = std::fmin(lo, x), hi = std::fmax(hi, x);
                const double top = (1 << width[static_cast<std::size_t>(format)]) - 1;
                const double range = static_cast<double>(hi) - lo + std::fabs(lo) * 0x1p-10;
                bound[r] += 0.5 * range / top * (1 + 0x1p-10) + 1e-6;
                now[r] = values(chain, roles[static_cast<std::size_t>(r)]);
                CHECK(distance(start[r], now[r]) <= bound[r]);
            }
        }
        // No worse than 16 -> 2 at once plus the error that 8 and 4 bit brought, four thirds of it: once as
        // it is, once because it may widen the range that three steps divide.
        kvq::requantize_request to_two;
        to_two.key = to_two.value = 3;
        auto four = chain.fork();
        cache.requantize(direct, to_two);
        for (int r = 0; r < 2; ++r) {
            const double at_once = distance(start[r], values(direct, roles[static_cast<std::size_t>(r)]));
            float lo = start[r][0], hi = start[r][0];
            for (const float x : start[r]) lo = std::fmin(lo, x), hi = std::fmax(hi, x);
            const double range = static_cast<double>(hi) - lo + std::fabs(lo) * 0x1p-10;
            const double earlier =
                0.5 * range * (1 + 0x1p-9) * (1 / 255.0 + 1 / 15.0 * (1 + 2 / 255.0)) + 1e-5;
            CHECK(at_once <= 0.5 * range / 3 * (1 + 0x1p-9) + 1e-5);
            CHECK(distance(start[r], now[r]) <= 0.5 * range / 3 * (1 + 0x1p-9) + 1e-5 + 4.0 / 3.0 * earlier);
        }
    }
}

TEST_CASE("forks that are requantized together go on sharing; alone, only one of them changes") {
    test::generator random(test::seed());
    kvq::cache_options options;
    options.page_tokens = 16;
    ladder_cache cache({2, 2, 32, 0}, options);
    const test::stream s(random, cache.shape(), 160);
    auto a = cache.new_sequence();
    test::append(a, 2, s, 0, 160);
    auto b = a.fork();
    CHECK(a.pages(0).at(0).keys == b.pages(0).at(0).keys);
    kvq::requantize_request to_four;
    to_four.key = to_four.value = 2;
    requantize(cache, {&a, &b}, to_four);
    CHECK(a.pages(0).at(0).keys->format == 3);
    CHECK(a.pages(0).at(0).keys == b.pages(0).at(0).keys);
    CHECK(a.pages(1).at(9).values == b.pages(1).at(9).values);

    const auto before = test::contents(cache, b);
    kvq::requantize_request to_two;
    to_two.key = to_two.value = 3;
    const auto r = cache.requantize(a, to_two);
    CHECK(r.bytes_freed == 0);
    CHECK(a.pages(0).at(0).keys->format == 4);
    CHECK(test::contents(cache, b) == before);
}

TEST_CASE("16-bit copies survive: a trim within rollback is exact whatever was requantized meanwhile") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 30; ++round) {
        const kvq::cache_shape shape = test::random_cache_shape(random, 1);
        auto options = test::random_options(random);
        options.layers = {{random.between(0, 3), random.between(0, 3)}};
        ladder_cache cache(shape, options);
        const int tokens = random.between(1, 200), drafted = random.between(0, options.rollback);
        const test::stream s(random, shape, tokens + drafted);
        auto drafting = cache.new_sequence(), plain = cache.new_sequence();
        test::append(drafting, 1, s, 0, tokens + drafted);
        test::append(plain, 1, s, 0, tokens);
        kvq::requantize_request request;
        request.key = random.between(0, 3);
        request.value = random.between(0, 3);
        cache.requantize(drafting, request);
        drafting.trim(tokens);
        cache.requantize(plain, request);
        CHECK(test::contents(cache, drafting) == test::contents(cache, plain));
    }
}

TEST_CASE("16-bit copies survive requests that are done in pieces, for some tokens, or for new pages only") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    int restored = 0;
    for (int round = 0; round < 200; ++round) {
        INFO("round ", round);
        const kvq::cache_shape shape = test::random_cache_shape(random, 1);
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{4, 8});
        options.rollback = random.between(1, 64);
        options.layers = {{random.between(0, 3), random.between(0, 3)}};
        ladder_cache cache(shape, options);
        const int tokens = random.between(60, 120);
        const test::stream s(random, shape, tokens + 64);
        auto sequence = cache.new_sequence();
        test::append(sequence, 1, s, 0, tokens);
        // What is in 16 bit now must be what it was when the drafted tokens are gone again.
        const auto window = [&](int n) {
            std::vector<float> values;
            for (const kvq::tensor role : {kvq::tensor::key, kvq::tensor::value}) {
                const int first = std::max(0, n - options.recent), dim = shape.dim(role);
                test::tensor<float> x(n - first, shape.kv_heads, dim);
                sequence.dequantize(0, role, first, x.view());
                values.insert(values.end(), x.values().begin(), x.values().end());
            }
            return values;
        };
        const auto before = window(tokens);
        int drafted = 0;
        for (int step = random.between(2, 6); step > 0; --step) {
            const int most = std::min(options.rollback, 64) - drafted;
            if (random.one_in(2) && most > 0) {
                const int n = random.between(1, most);
                test::append(sequence, 1, s, tokens + drafted, n);
                drafted += n;
                continue;
            }
            kvq::requantize_request request;
            if (!random.one_in(3)) request.key = random.between(1, 3);
            if (!random.one_in(3)) request.value = random.between(1, 3);
            request.new_pages = random.one_in(2);
            if (random.one_in(2)) {
                request.first_token = random.between(0, tokens);
                request.last_token = request.first_token + random.between(0, 60);
            }
            kvq::requantize_limit limit;
            if (random.one_in(2)) limit.pages = static_cast<std::size_t>(random.between(1, 4));
            const auto plan = cache.plan_requantize(sequence, request);
            const auto report = cache.requantize(sequence, request, limit);
            CHECK(report.bytes_after == cache.bytes_in_use());
            if (report.pages_left == 0) CHECK(plan.bytes_after == report.bytes_after);
        }
        sequence.trim(tokens);
        CHECK(window(tokens) == before);
        restored += drafted > 0;
    }
    CHECK(restored > 50);
}

TEST_CASE("no room for one more page: what was converted stays, the rest is as it was") {
    test::generator random(test::seed());
    kvq::cache_options options;
    options.page_tokens = 16;
    options.layers = {{3, 3}};
    ladder_cache probe({1, 1, 32, 0}, options);
    const test::stream s(random, probe.shape(), 320);
    auto p = probe.new_sequence();
    test::append(p, 1, s, 0, 320);
    // Two bit to eight: every page grows.
    options.byte_budget = probe.bytes_in_use() + 9000;
    ladder_cache cache({1, 1, 32, 0}, options);
    auto sequence = cache.new_sequence();
    for (int i = 0; i < 320; ++i) test::append(sequence, 1, s, i, 1);
    kvq::requantize_request to_eight;
    to_eight.key = to_eight.value = 1;
    const auto planned = cache.plan_requantize(sequence, to_eight);
    CHECK(planned.bytes_after > options.byte_budget);
    const auto before = test::dequantized(sequence, cache.shape(), 0, kvq::tensor::key).values();
    CHECK_THROWS_AS(cache.requantize(sequence, to_eight), kvq::out_of_memory);
    CHECK(cache.bytes_in_use() <= options.byte_budget);
    const auto left = cache.plan_requantize(sequence, to_eight);
    CHECK(left.pages > 0);
    CHECK(left.pages < planned.pages);
    // 2-bit levels lie on the 8-bit grid up to its step.
    const auto after = test::dequantized(sequence, cache.shape(), 0, kvq::tensor::key).values();
    for (std::size_t i = 0; i < before.size(); ++i) CHECK(std::fabs(before[i] - after[i]) < 0.05f);
    sequence.trim(48);
    CHECK(cache.requantize(sequence, to_eight).pages_left == 0);
}

namespace {

/// Runs out of memory in one of its calls.
struct failing : kvq::affine<4> {
    using base = kvq::affine<4>;
    static inline std::atomic<int> calls_left{1 << 30};
    std::string name() const { return "failing"; }
    std::uint32_t quantize(const kvq::block_shape& s, kvq::block_id id, const float* values,
                           std::byte* block) const {
        if (calls_left.fetch_sub(1) == 0) throw std::bad_alloc();
        return base::quantize(s, id, values, block);
    }
};

}  // namespace

TEST_CASE(
    "a scheme that runs out of memory on some thread: pages are old or new, and the request can be made "
    "again") {
    test::generator random(test::seed());
    using cache_type = test::typed_cache<test::formats<kvq::int8, failing>>;
    const kvq::cache_shape shape{2, 2, 32};
    for (int at = 0; at < 40; at += 3) {
        cache_type cache(shape, {.recent = 16, .page_tokens = 16});
        const test::stream s(random, shape, 100);
        auto sequence = cache.new_sequence(), wanted = cache.new_sequence();
        test::append(sequence, shape.layers, s, 0, 100);
        test::append(wanted, shape.layers, s, 0, 100);
        const kvq::requantize_request request{.key = 1, .value = 1};
        failing::calls_left = 1 << 30;
        cache.requantize(wanted, request);
        const auto untouched = sequence.fork();
        const auto before = test::contents(cache, untouched);
        kvq::workspace space;
        cache_type::sequence_type* const one = &sequence;
        const std::span all(&one, 1);
        failing::calls_left = at;
        bool failed = false;
        try {
            cache.requantize(all, request, {}, kvq::thread_pool(3), space);
        } catch (const std::bad_alloc&) {
            failed = true;
        }
        CHECK(failed);
        CHECK(test::contents(cache, untouched) == before);
        failing::calls_left = 1 << 30;
        CHECK(cache.requantize(all, request, {}, kvq::thread_pool(3), space).pages_left == 0);
        CHECK(test::contents(cache, sequence) == test::contents(cache, wanted));
    }
}

TEST_CASE("threads beyond the pages take nothing") {
    test::generator random(1);
    fixture f(random, 1);
    auto sequence = f.cache.new_sequence();
    test::append(sequence, 1, test::stream(random, f.shape, 50), 0, 50);
    const std::size_t held = f.memory.bytes();
    f.memory.reset_peak();
    const auto few = f.cache.plan_requantize(sequence, {.key = 3, .value = 3}, 1000);
    const auto many =
        f.cache.plan_requantize(sequence, {.key = 3, .value = 3}, std::numeric_limits<int>::max());
    CHECK(test::same(few, many));
    CHECK(f.memory.peak() - held < 100000);
}

TEST_CASE("impossible requests are refused with their numbers, before anything changes") {
    test::generator random(test::seed());
    fixture f(random);
    const test::stream s(random, f.shape, 200);
    auto sequence = f.cache.new_sequence();
    test::append(sequence, f.layers, s, 0, 200);
    const auto before = test::contents(f.cache, sequence);
    const auto refuse = [&](kvq::requantize_request r, const char* what) {
        CHECK_THROWS_WITH_AS(f.cache.requantize(sequence, r), what, kvq::error);
        CHECK_THROWS_WITH_AS((void)f.cache.plan_requantize(sequence, r), what, kvq::error);
        CHECK(test::contents(f.cache, sequence) == before);
    };
    kvq::requantize_request r;
    r.key = 5;
    refuse(r, "kvq: key format 5 is not among the 5 listed ones");
    r = {};
    r.value = -2;
    refuse(r, "kvq: value format -2 is not among the 5 listed ones");
    r = {};
    r.first_layer = 1, r.last_layer = 3;
    refuse(r, "kvq: layers 1 to 3 are not a range of the 2 layers of the cache");
    r = {};
    r.first_token = 9, r.last_token = 8;
    refuse(r, "kvq: tokens 9 to 8 are not a range");
    r = {};
    r.key = 1;
    r.first_token = kvq::requantize_request::all;
    CHECK(f.cache.requantize(sequence, r).pages == 0);
    CHECK(test::contents(f.cache, sequence) == before);
    {
        auto moved = sequence.fork();
        const auto other = std::move(moved);
        CHECK_THROWS_WITH_AS(f.cache.requantize(moved, r),
                             "kvq: a sequence that was moved from has no layers", kvq::error);
        ladder_cache::sequence_type* const one = &moved;
        CHECK_THROWS_WITH_AS(kvq::step_down(f.cache, std::span(&one, 1), {}),
                             "kvq: a sequence that was moved from has no layers", kvq::error);
    }
    CHECK_THROWS_WITH_AS((void)f.cache.plan_requantize(sequence, {}, 0),
                         "kvq: requantizing needs at least 1 thread, got 0", kvq::error);
    test::generator other_random(1);
    fixture other(other_random);
    auto foreign = other.cache.new_sequence();
    CHECK_THROWS_WITH_AS(f.cache.requantize(foreign, {}),
                         "kvq: sequence 0 of the request belongs to another cache", kvq::error);
    ladder_cache::sequence_type* const stranger = &foreign;
    CHECK_THROWS_WITH_AS(kvq::step_down(f.cache, std::span(&stranger, 1), {}),
                         "kvq: sequence 0 of those to step down belongs to another cache", kvq::error);
    ladder_cache::sequence_type* const twice[] = {&sequence, &sequence};
    const ladder_cache::sequence_type* const looked_at_twice[] = {&sequence, &sequence};
    const char* const what = "kvq: sequence 1 of the request is sequence 0 again";
    kvq::workspace space;
    ladder_cache::sequence_type* const missing[] = {&sequence, nullptr};
    const ladder_cache::sequence_type* const looked_at_missing[] = {&sequence, nullptr};
    CHECK_THROWS_WITH_AS(f.cache.requantize(missing, {}, {}, kvq::serial_executor{}, space),
                         "kvq: sequence 1 of the request is null", kvq::error);
    CHECK_THROWS_WITH_AS((void)f.cache.plan_requantize(looked_at_missing, {}),
                         "kvq: sequence 1 of the request is null", kvq::error);
    CHECK_THROWS_WITH_AS(kvq::step_down(f.cache, std::span<ladder_cache::sequence_type* const>(missing), {}),
                         "kvq: sequence 1 of those to step down is null", kvq::error);
    CHECK_THROWS_WITH_AS(f.cache.requantize(twice, {}, {}, kvq::serial_executor{}, space), what, kvq::error);
    CHECK_THROWS_WITH_AS((void)f.cache.plan_requantize(looked_at_twice, {}), what, kvq::error);
    CHECK_THROWS_WITH_AS(kvq::step_down(f.cache, std::span<ladder_cache::sequence_type* const>(twice), {}),
                         what, kvq::error);
}

}  // namespace requantize_tests
