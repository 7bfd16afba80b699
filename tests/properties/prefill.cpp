// SPDX-License-Identifier: MIT
// Comparison family: exact for pages, 5e-4 for outputs. A chunk is seen in 16 bit by its own queries, and its
// pages are those of token by token.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <kvq/core/thread_pool.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/policy/ring.hpp>

#include "support/attention_error.hpp"
#include "support/memory.hpp"

using test::append;
using test::contents;

namespace prefill_tests {

namespace {

constexpr int group = 2;

struct queries {
    test::tensor<float> q;
    queries(test::generator& random, const kvq::cache_shape& shape, int tokens)
        : q(test::random_tensor(random, tokens, group * shape.kv_heads, shape.head_dim)) {}
};

template <class Sequence>
std::vector<float> prefill(Sequence& sequence, const kvq::cache_shape& shape, int layer,
                           const test::stream& s, const queries& all, int first, int n, int asked) {
    test::tensor<float> out(asked, group * shape.kv_heads, shape.dim(kvq::tensor::value));
    sequence.prefill(layer, s.k.slice(first, n), s.v.slice(first, n), all.q.slice(first + n - asked, asked),
                     out.view());
    return out.values();
}

/// max over rows of |out - reference| / sum p |v|; k and v: what the queries see.
template <class Mods = kvq::causal>
double error_of(const std::vector<float>& out, test::tensor<float> k, test::tensor<float> v,
                const kvq::token_view<const float>& q, const Mods& mods = {}) {
    const int dim = v.view().dim;
    test::tensor<double> expected(q.tokens, q.heads, dim), size(q.tokens, q.heads, dim);
    kvq::reference_attend(std::as_const(k).view(), std::as_const(v).view(), q, expected.view(), mods);
    for (float& x : v.values()) x = std::fabs(x);
    kvq::reference_attend(std::as_const(k).view(), std::as_const(v).view(), q, size.view(), mods);
    double worst = 0;
    const auto width = static_cast<std::size_t>(dim);
    for (std::size_t row = 0; row < out.size() / width; ++row) {
        double difference = 0, terms = 0;
        for (std::size_t c = row * width; c < (row + 1) * width; ++c) {
            difference += std::pow(static_cast<double>(out[c]) - expected.values()[c], 2.0);
            terms += std::pow(size.values()[c], 2.0);
        }
        if (!(std::sqrt(difference) <= worst * std::sqrt(terms))) worst = std::sqrt(difference / terms);
    }
    return worst;
}

/// What queries of a chunk must see: the values as they were before it, then the chunk as the window has it.
template <class C>
test::tensor<float> seen(const typename C::sequence_type& before, const kvq::cache_shape& shape, int layer,
                         kvq::tensor role, const test::tensor<float>& input, int n) {
    const int held = before.tokens(layer);
    test::tensor<float> all(held + n, shape.kv_heads, shape.dim(role));
    if (held > 0) before.dequantize(layer, role, 0, all.view().slice(0, held));
    for (int t = held; t < held + n; ++t)
        for (int h = 0; h < shape.kv_heads; ++h)
            for (int c = 0; c < shape.dim(role); ++c)
                all.view().at(t, h)[c] = static_cast<float>(typename C::window(input.view().at(t, h)[c]));
    return all;
}

}  // namespace

TEST_CASE_TEMPLATE(
    "chunks of any size leave the pages of token by token, and see all of themselves in 16 bit", C,
    KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(6); ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size, 20);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        auto cache = test::make_cache<C>(shape, options);
        const int tokens = 150;
        const test::stream s(random, shape, tokens);
        const queries all(random, shape, tokens);
        auto chunked = cache.new_sequence(), one_by_one = cache.new_sequence();
        while (chunked.tokens() < tokens) {
            const int first = chunked.tokens();
            const int n = random.between(1, random.one_in(3) ? tokens - first : std::min(9, tokens - first));
            const int asked = random.one_in(3) ? random.between(0, n) : n;
            INFO("round ", round, ": ", n, " tokens at ", first, ", pages of ", options.page_tokens);
            const auto before = chunked.fork();
            for (int layer = 0; layer < shape.layers; ++layer) {
                const auto out = prefill(chunked, shape, layer, s, all, first, n, asked);
                CHECK(error_of(out, seen<C>(before, shape, layer, kvq::tensor::key, s.k, n),
                               seen<C>(before, shape, layer, kvq::tensor::value, s.v, n),
                               all.q.slice(first + n - asked, asked)) < 5e-4);
            }
            for (int i = 0; i < n; ++i) append(one_by_one, shape.layers, s, first + i, 1);
            REQUIRE(contents(cache, chunked) == contents(cache, one_by_one));
            // The fork makes it copy a page that is filled, to one that need not be as large as a trim has
            // left it.
            REQUIRE(chunked.usage().bytes <= one_by_one.usage().bytes);
            REQUIRE(chunked.usage().rollback == one_by_one.usage().rollback);
            if (random.one_in(6)) {
                const int n_left = random.between(0, chunked.tokens());
                chunked.trim(n_left);
                one_by_one.trim(n_left);
            }
        }
    }
}

TEST_CASE_TEMPLATE(
    "a batch of prompts in chunks and of sequences that decode: the bits of each alone, on any number of "
    "threads",
    C, KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(4); ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size, 20);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        auto cache = test::make_cache<C>(shape, options);
        const test::stream s(random, shape, 400);
        const queries all(random, shape, 400);
        std::vector<typename C::sequence_type> held;
        std::vector<int> chunk;
        for (int i = 0; i < 5; ++i) {
            held.push_back(cache.new_sequence());
            append(held.back(), shape.layers, s, 0, random.between(0, 120));
            if (random.one_in(3)) held.back().trim(held.back().tokens() / 2);
            chunk.push_back(random.one_in(2) ? 1 : random.between(0, 90));
        }
        const int layer = random.between(0, shape.layers - 1);
        const auto width = [&](int n) {
            return static_cast<std::size_t>(n * group * shape.kv_heads * shape.dim(kvq::tensor::value));
        };
        std::vector<std::vector<float>> alone;
        std::vector<typename C::sequence_type> after;
        for (std::size_t i = 0; i < held.size(); ++i) {
            after.push_back(held[i].fork());
            const int at = held[i].tokens();
            alone.push_back(prefill(after.back(), shape, layer, s, all, at, chunk[i], chunk[i]));
        }
        for (const int threads : {1, 2, 4}) {
            std::vector<typename C::sequence_type> forks;
            std::vector<kvq::prefill_request> batch;
            std::vector<std::vector<float>> out(held.size());
            forks.reserve(held.size());
            for (std::size_t i = 0; i < held.size(); ++i) {
                forks.push_back(held[i].fork());
                out[i].resize(width(chunk[i]) + 1, -77.0f);
                const int at = held[i].tokens(), n = chunk[i];
                batch.push_back({&forks[i], s.k.slice(at, n), s.v.slice(at, n), all.q.slice(at, n),
                                 kvq::token_view<float>(out[i].data(), n, group * shape.kv_heads,
                                                        shape.dim(kvq::tensor::value))});
            }
            kvq::workspace space;
            cache.prefill(layer, std::span<const kvq::prefill_request>(batch), kvq::causal{},
                          kvq::thread_pool(threads), space);
            for (std::size_t i = 0; i < held.size(); ++i) {
                INFO("round ", round, " threads ", threads, " sequence ", i);
                REQUIRE(out[i].back() == -77.0f);
                out[i].pop_back();
                REQUIRE(out[i] == alone[i]);
                REQUIRE(contents(cache, forks[i]) == contents(cache, after[i]));
            }
        }
    }
}

TEST_CASE("input types and masks: pages of T(x), outputs under the mask") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using C = test::kivi_cache;
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 32};
    C cache(shape, {.sinks = 2, .recent = 8, .page_tokens = 32});
    const test::stream s(random, shape, 200);
    const queries all(random, shape, 200);
    const auto as = [&]<class T>(T) {
        const auto k = test::converted<T>(s.k, test::order::hnd),
                   v = test::converted<T>(s.v, test::order::nhd);
        auto chunked = cache.new_sequence(), plain = cache.new_sequence();
        test::tensor<float> out(100, 2 * group, 32);
        for (const int first : {0, 100})
            chunked.prefill(0, k.slice(first, 100), v.slice(first, 100), all.q.slice(first, 100), out.view());
        plain.append(0, k.slice(0, 200), v.slice(0, 200));
        CHECK(contents(cache, chunked) == contents(cache, plain));
    };
    as(float{});
    as(kvq::float16{});
    as(kvq::bfloat16{});
    const auto with = [&](const auto& mods) {
        auto sequence = cache.new_sequence();
        append(sequence, 1, s, 0, 120);
        const auto before = sequence.fork();
        test::tensor<float> out(70, 2 * group, 32);
        kvq::workspace space;
        sequence.prefill(0, s.k.slice(120, 70), s.v.slice(120, 70), all.q.slice(120, 70), out.view(), mods,
                         kvq::serial_executor{}, space);
        CHECK(error_of(out.values(), seen<C>(before, shape, 0, kvq::tensor::key, s.k, 70),
                       seen<C>(before, shape, 0, kvq::tensor::value, s.v, 70), all.q.slice(120, 70),
                       mods) < 5e-4);
    };
    with(kvq::sliding_window{20});
    with(kvq::mods{kvq::softcap{3.0f}, kvq::sink_window{9, 2}});
}

TEST_CASE_TEMPLATE("a ring in chunks attends like its window over the whole text", C, test::kivi_cache,
                   test::int8_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 8; ++round) {
        const kvq::cache_shape shape{.layers = 2, .kv_heads = 1, .head_dim = 16};
        auto options = test::random_options(random);
        C cache(shape, options);
        const int window = random.between(1, 40);
        kvq::ring ring(cache.new_sequence(), {.window = window, .slack = random.between(0, 8)});
        auto full = cache.new_sequence();
        const test::stream s(random, shape, 300);
        const queries all(random, shape, 300);
        while (ring.tokens() < 270) {
            const int first = static_cast<int>(ring.tokens()), n = random.between(1, 30);
            for (int layer = 0; layer < 2; ++layer) {
                test::tensor<float> mine(n, group, 16), theirs(n, group, 16);
                ring.prefill(layer, s.k.slice(first, n), s.v.slice(first, n), all.q.slice(first, n),
                             mine.view());
                kvq::workspace space;
                full.prefill(layer, s.k.slice(first, n), s.v.slice(first, n), all.q.slice(first, n),
                             theirs.view(), kvq::sink_window{window, options.sinks}, kvq::serial_executor{},
                             space);
                double worst = 0;
                for (std::size_t i = 0; i < mine.values().size(); ++i)
                    worst = std::fmax(worst, std::fabs(static_cast<double>(mine.values()[i]) -
                                                       static_cast<double>(theirs.values()[i])));
                INFO("round ", round, " at ", first, " chunk ", n, " window ", window);
                CHECK(worst < 2e-3);
            }
        }
        CHECK(ring.held().tokens() < ring.tokens());
    }
}

TEST_CASE("keys and values may have different types: both are rounded to the window's") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 16};
    test::kivi_cache cache(shape, {.recent = 4, .page_tokens = 8});
    const test::stream s(random, shape, 60);
    const auto halves = test::converted<kvq::float16>(s.v, test::order::nhd);
    auto one = cache.new_sequence(), other = cache.new_sequence();
    one.append(0, s.k.view(), s.v.view());
    other.append(0, s.k.view(), halves.view());
    CHECK(contents(cache, one) == contents(cache, other));
}

TEST_CASE("a chunk that is refused changes nothing, and says why") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 16};
    const kvq::cache_options options{.sinks = 2, .recent = 4, .page_tokens = 8};
    test::kivi_cache cache(shape, options), other(shape, options);
    const test::stream s(random, shape, 100);
    const queries all(random, shape, 100);
    auto sequence = cache.new_sequence(), stranger = other.new_sequence();
    append(sequence, 2, s, 0, 30);
    const auto before = contents(cache, sequence);
    test::tensor<float> out(10, 4, 16), narrow(10, 4, 15);
    using request = kvq::prefill_request;
    const auto refused = [&](const char* part, const std::vector<request>& batch, int layer = 0) {
        kvq::workspace space;
        CHECK_THROWS_WITH_AS(cache.prefill(layer, std::span<const request>(batch), kvq::causal{},
                                           kvq::serial_executor{}, space),
                             doctest::Contains(part), kvq::error);
        CHECK(contents(cache, sequence) == before);
        CHECK(sequence.tokens(0) == 30);
    };
    const auto k = s.k.slice(30, 10), v = s.v.slice(30, 10), q = all.q.slice(30, 10);
    refused("sequence 0 of the batch is not one of this cache", {{nullptr, k, v, q, out.view()}});
    refused("sequence 0 of the batch is not one of this cache", {{&stranger, k, v, q, out.view()}});
    refused("sequence 1 of the batch is sequence 0 again",
            {{&sequence, k, v, q, out.view()}, {&sequence, k, v, q, out.view()}});
    refused("layer 2 is not among the 2", {{&sequence, k, v, q, out.view()}}, 2);
    refused("k has 10 tokens but v has 9", {{&sequence, k, s.v.slice(30, 9), q, out.view()}});
    refused("out is 10 x 4 x 15", {{&sequence, k, v, q, narrow.view()}});
    refused("q has 50 tokens but layer 0 holds 40",
            {{&sequence, k, v, all.q.slice(0, 50), test::tensor<float>(50, 4, 16).view()}});
    kvq::workspace space;
    CHECK_THROWS_WITH_AS(
        sequence.prefill(0, k, v, q, out.view(), kvq::sliding_window{0}, kvq::serial_executor{}, space),
        doctest::Contains("at least 1 token"), kvq::error);
    CHECK(contents(cache, sequence) == before);
    CHECK(sequence.tokens(0) == 30);
    // Nothing to do is no error.
    cache.prefill(0, std::span<const request>(), kvq::causal{}, kvq::serial_executor{}, space);
    sequence.prefill(0, s.k.slice(0, 0), s.v.slice(0, 0), all.q.slice(0, 0),
                     test::tensor<float>(0, 4, 16).view());
    CHECK(contents(cache, sequence) == before);
}

TEST_CASE_TEMPLATE("memory that runs out anywhere in a batch leaves all of its sequences as they were", C,
                   KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    int all_failures = 0;
    for (int round = 0; round < 4; ++round) {
        test::counting_resource memory;
        const auto shape = test::random_cache_shape(random, C::key_table::size, 8);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        options.memory = &memory;
        auto cache = test::make_cache<C>(shape, options);
        const test::stream s(random, shape, 300);
        const queries all(random, shape, 300);
        std::vector<typename C::sequence_type> held;
        for (int i = 0; i < 3; ++i) {
            held.push_back(cache.new_sequence());
            append(held.back(), shape.layers, s, 0, random.between(0, 60));
        }
        auto shared = held[0].fork();
        std::vector<test::tensor<float>> out;
        std::vector<kvq::prefill_request> batch;
        for (auto& one : held) {
            const int n = random.between(1, 50), at = one.tokens();
            out.emplace_back(n, group * shape.kv_heads, shape.dim(kvq::tensor::value));
            batch.push_back(
                {&one, s.k.slice(at, n), s.v.slice(at, n), all.q.slice(at, n), out.back().view()});
        }
        const int layer = random.between(0, shape.layers - 1);
        std::vector<std::vector<test::held_page>> before;
        for (const auto& one : held) before.push_back(contents(cache, one));
        const auto theirs = contents(cache, shared, true);
        const std::size_t in_use = cache.bytes_in_use();
        int failures = 0;
        for (bool done = false; !done; ++failures) {
            REQUIRE(failures < 1000);
            kvq::workspace space(&memory);
            memory.arm(failures);
            try {
                cache.prefill(layer, std::span<const kvq::prefill_request>(batch), kvq::causal{},
                              kvq::serial_executor{}, space);
                done = true;
            } catch (const std::bad_alloc&) {
            }
            memory.arm(test::counting_resource::never);
            if (done) break;
            INFO("round ", round, " allocation ", failures);
            REQUIRE(cache.bytes_in_use() == in_use);
            for (std::size_t i = 0; i < held.size(); ++i) REQUIRE(contents(cache, held[i]) == before[i]);
            REQUIRE(contents(cache, shared, true) == theirs);
        }
        CHECK(failures > 0);
        all_failures += failures;
        CHECK(contents(cache, shared, true) == theirs);
    }
    CHECK(all_failures > 24);
}

TEST_CASE_TEMPLATE(
    "prefill_bytes(): with so many left a chunk goes through in every layer, with one byte less not in one",
    C, KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    int refused = 0;
    for (int round = 0; round < test::rounds(15) || (refused <= 3 && round < 100); ++round) {
        INFO("round ", round);
        const bool one_layer = random.one_in(2);
        const auto shape = test::random_cache_shape(random, one_layer ? 1 : C::key_table::size);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers, random.between(0, 3));
        const test::stream s(random, shape, 300);
        const queries all(random, shape, 300);
        const int held = random.between(0, 120), added = random.between(1, 100);
        std::size_t most = 0;
        const auto goes_through = [&](std::size_t spare) {
            options.byte_budget = most + spare;
            auto cache = test::make_cache<C>(shape, options);
            auto sequence = cache.new_sequence();
            for (int i = 0; i < held; ++i) append(sequence, shape.layers, s, i, 1);
            if (spare == kvq::page_pool::no_budget / 2) most = cache.bytes_in_use();
            const std::size_t needed = sequence.prefill_bytes(added);
            try {
                for (int layer = 0; layer < shape.layers; ++layer)
                    prefill(sequence, shape, layer, s, all, held, added, added);
            } catch (const kvq::out_of_memory&) {
                return std::pair(needed, false);
            }
            return std::pair(needed, true);
        };
        const auto [needed, free] = goes_through(kvq::page_pool::no_budget / 2);
        REQUIRE(free);
        try {
            const auto [again, enough] = goes_through(needed);
            CHECK(again == needed);
            CHECK(enough);
            if (!one_layer || needed == 0) continue;
            CHECK_FALSE(goes_through(needed - 1).second);
            ++refused;
        } catch (const kvq::out_of_memory&) {
            // The tokens before it took more for a moment.
        }
    }
    CHECK(refused > 3);
}

TEST_CASE(
    "a cache of a preset, int8 or kivi holds at most what a 16-bit cache of the same options holds, and its "
    "16-bit copies") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 48};
    for (const int page_tokens : {32, 64, 128}) {
        const kvq::cache_options options{.sinks = 4, .recent = 32, .page_tokens = page_tokens};
        test::typed_cache<kvq::full<kvq::float16>> plain(shape, options);
        std::deque<kvq::cache> caches;
        const auto add = [&](kvq::format keys, kvq::format values) {
            kvq::cache_options of = options;
            of.keys = {std::move(keys)};
            of.values = {std::move(values)};
            caches.emplace_back(shape, of);
        };
        using kivi = kvq::kivi<4, 32>;
        add(test::made<kvq::simd<>>(kvq::int8{}), test::made<kvq::simd<>>(kvq::int8{}));
        add(test::made<kvq::simd<>>(kivi::keys{}), test::made<kvq::simd<>>(kivi::values{}));
        kvq::for_each_preset([&](auto preset) {
            add(test::made<test::usual>(typename decltype(preset)::keys{}),
                test::made<test::usual>(typename decltype(preset)::values{}));
        });
        const test::stream s(random, shape, 500);
        auto full = plain.new_sequence();
        std::vector<kvq::sequence> sequences;
        for (kvq::cache& cache : caches) sequences.push_back(cache.new_sequence());
        for (int n = 1; n <= 500; ++n) {
            append(full, 2, s, n - 1, 1);
            const kvq::usage_report f = full.usage();
            for (std::size_t i = 0; i < caches.size(); ++i) {
                append(sequences[i], 2, s, n - 1, 1);
                const kvq::usage_report u = sequences[i].usage();
                INFO(caches[i].options().keys[0].name(), ", ", n, " tokens in pages of ", page_tokens);
                REQUIRE(u.bytes - u.rollback - u.bookkeeping <= f.bytes - f.bookkeeping);
                // The headers of the copies are what bookkeeping differs by.
                REQUIRE(u.bookkeeping - f.bookkeeping <=
                        u.rollback / (2 * 48 * static_cast<std::size_t>(page_tokens) * 2) *
                            sizeof(kvq::page));
            }
            // A short sequence does not hold whole pages.
            REQUIRE(f.slack <= 4u * 2 * 2 * 48 * kvq::page_geometry::window_step);
        }
        // What was compared are quantized pages.
        for (std::size_t i = 0; i < caches.size(); ++i) REQUIRE(sequences[i].usage().quantized > 0);
    }
}

}  // namespace prefill_tests
