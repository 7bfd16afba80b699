// SPDX-License-Identifier: MIT
// Comparison family: exact. After cache::reserve() a step over all layers succeeds while every allocation
// fails, and gives what it gives otherwise.
#include <doctest/doctest.h>

#include <algorithm>
#include <kvq/core/thread_pool.hpp>
#include <kvq/policy/ring.hpp>

#include "support/caches.hpp"
#include "support/memory.hpp"

using test::append;
using test::contents;

namespace reserve_tests {

namespace {

constexpr int group = 2, longest = 600;

/// Every allocation fails as long as it lives.
struct no_memory {
    test::counting_resource& memory;
    explicit no_memory(test::counting_resource& m) : memory(m) { memory.fail_every(1); }
    ~no_memory() { memory.fail_every(0); }
};

/// Texts of several sequences of one cache.
template <class C>
struct engine {
    using sequence = typename C::sequence_type;

    test::generator& random;
    C& cache;
    const kvq::cache_shape& shape;
    const test::stream& s;
    const test::tensor<float>& q;

    test::tensor<float> output(int rows) const {
        return {rows, group * shape.kv_heads, shape.dim(kvq::tensor::value)};
    }
    kvq::prefill_request request(sequence& of, int layer, int n, int asked, test::tensor<float>& out) const {
        const int at = of.tokens(layer);
        return {&of, s.k.slice(at, n), s.v.slice(at, n), q.slice(at + n - asked, asked), out.view()};
    }

    /// One step of all sequences. Calls are cut and ordered by `how`; outputs do not depend on it.
    std::vector<std::vector<float>> step(std::vector<sequence>& held, const std::vector<int>& n,
                                         const std::vector<int>& asked, test::generator how,
                                         const kvq::executor_view& threads, kvq::workspace& space) const {
        const auto count = held.size();
        std::vector<test::tensor<float>> out;
        std::vector<std::pair<int, std::size_t>> calls;
        for (int layer = 0; layer < shape.layers; ++layer)
            for (std::size_t i = 0; i < count; ++i) {
                out.push_back(output(asked[i]));
                calls.emplace_back(layer, i);
            }
        const auto of = [&](int layer, std::size_t i) -> test::tensor<float>& {
            return out[static_cast<std::size_t>(layer) * count + i];
        };
        if (how.one_in(2)) {  // a batch per layer, last layer first
            for (int layer = shape.layers - 1; layer >= 0; --layer) {
                std::vector<kvq::prefill_request> batch;
                for (std::size_t i = 0; i < count; ++i)
                    batch.push_back(request(held[i], layer, n[i], asked[i], of(layer, i)));
                cache.prefill(layer, std::span<const kvq::prefill_request>(batch), kvq::causal{}, threads,
                              space);
            }
        } else {  // alone, in any order
            for (std::size_t i = calls.size(); i > 1; --i)
                std::swap(calls[i - 1],
                          calls[static_cast<std::size_t>(how.between(0, static_cast<int>(i) - 1))]);
            for (const auto& [layer, i] : calls) {
                const auto r = request(held[i], layer, n[i], asked[i], of(layer, i));
                held[i].prefill(layer, r.k, r.v, r.q, r.out, kvq::causal{}, threads, space);
            }
        }
        std::vector<std::vector<float>> values;
        for (const auto& o : out) values.push_back(o.values());
        return values;
    }

    /// Something that an engine does between steps.
    void change(sequence& of, std::vector<sequence>& others) const {
        const int held = of.tokens();
        switch (random.between(0, 7)) {
            case 0:
                of.trim(random.between(0, held));
                break;
            case 1:
                of.trim(std::max(0, held - random.between(0, 20)));
                break;
            case 2:
                others.push_back(of.fork());
                break;
            case 3: {
                const int n = random.between(1, 9);
                for (int layer = 0; layer < shape.layers; ++layer)
                    of.append_draft(layer, s.k.slice(held, n), s.v.slice(held, n));
                of.keep(std::vector<int>{0});
                break;
            }
            case 4:
                if (held > 3) of.erase(random.between(0, held / 2), random.between(held / 2, held));
                break;
            case 5:
                if (held > 0 && held < 100) of.splice(of.fork(), held / 3, held);
                break;
            case 6:
                of.shift(held / 2, held, 3);
                break;
            default:
                append(of, shape.layers, s, held, random.between(1, 30));
        }
    }
};

}  // namespace

TEST_CASE_TEMPLATE("after reserve() a step over all layers takes no memory: any history, format and order", C,
                   test::kivi_cache, test::mixed_cache, test::plain_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 5; ++round) {
        test::counting_resource memory;
        auto shape = test::random_cache_shape(random, std::max(2, C::key_table::size), 8);
        shape.head_dim = 2 * ((shape.head_dim + 1) / 2);
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{4, 7, 16, 32, 33});
        options.layers = test::rotate_formats<C>(shape.layers);
        options.memory = &memory;
        options.rotary = {{.dims = shape.head_dim}};
        auto cache = test::make_cache<C>(shape, options);
        const test::stream s(random, shape, longest);
        const auto q = test::random_tensor(random, longest, group * shape.kv_heads, shape.head_dim);
        const engine<C> engine{random, cache, shape, s, q};
        const kvq::thread_pool pool(3);
        const kvq::serial_executor serial;
        {
            std::vector<typename C::sequence_type> held, others;
            for (int i = 0; i < 3; ++i) held.push_back(cache.new_sequence());
            kvq::workspace space(&memory);
            for (int step = 0; step < 10; ++step) {
                INFO("round ", round, " step ", step);
                std::vector<int> n, asked;
                std::vector<kvq::step_request> batch;
                for (auto& sequence : held) {
                    if (sequence.tokens() < 200) engine.change(sequence, others);
                    if (sequence.tokens() > 350) sequence.trim(100);
                    n.push_back(random.one_in(2) ? 1 : random.between(0, 90));
                    asked.push_back(random.one_in(2) ? n.back() : random.between(0, n.back()));
                    batch.push_back({&sequence, n.back(), asked.back()});
                }
                // Twins share every page with those that are reserved for.
                std::vector<typename C::sequence_type> twins;
                std::vector<std::vector<test::held_page>> before;
                for (const auto& sequence : held) {
                    twins.push_back(sequence.fork());
                    before.push_back(contents(cache, sequence));
                }
                const auto in_use = cache.bytes_in_use(), bytes = memory.bytes() - space.size();
                const kvq::executor_view threads =
                    random.one_in(2) ? kvq::executor_view(pool) : kvq::executor_view(serial);
                const auto reserve = [&] {
                    cache.reserve(batch, group * shape.kv_heads, threads.concurrency(), space);
                };
                const auto as_before = [&] {
                    REQUIRE(cache.bytes_in_use() == in_use);
                    REQUIRE(memory.bytes() - space.size() == bytes);
                    for (std::size_t i = 0; i < held.size(); ++i) {
                        REQUIRE(held[i].usage().reserved == 0);
                        REQUIRE(contents(cache, held[i]) == before[i]);
                    }
                };
                if (random.one_in(8)) {
                    test::fail_everywhere(memory, reserve, as_before);
                    for (auto& sequence : held) sequence.release_reserved();
                    as_before();
                }
                std::size_t least = 0, reserved = 0;
                for (std::size_t i = 0; i < held.size(); ++i) least += held[i].prefill_bytes(n[i]);
                reserve();
                for (const auto& sequence : held) reserved += sequence.usage().reserved;
                REQUIRE(memory.bytes() - space.size() == bytes + reserved);
                REQUIRE(cache.bytes_in_use() >= in_use + least);
                REQUIRE(reserved >= cache.bytes_in_use() - in_use);
                const auto how = random;
                (void)random.bits();
                std::vector<std::vector<float>> out;
                const auto full = cache.bytes_in_use();
                {
                    const no_memory none(memory);
                    out = engine.step(held, n, asked, how, threads, space);
                }
                REQUIRE(cache.bytes_in_use() <= full);
                kvq::workspace other_space;
                const auto expected = engine.step(twins, n, asked, how, kvq::serial_executor{}, other_space);
                REQUIRE(out == expected);
                for (std::size_t i = 0; i < held.size(); ++i) {
                    REQUIRE(held[i].usage().reserved == 0);
                    REQUIRE(contents(cache, held[i]) == contents(cache, twins[i]));
                }
                if (others.size() > 2) others.clear();
            }
        }
        CHECK(cache.bytes_in_use() == 0);
        CHECK(memory.bytes() == 0);
    }
}

TEST_CASE("append and attend after reserve() take no memory either") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 10; ++round) {
        test::counting_resource memory;
        const auto shape = test::random_cache_shape(random, 3, 20);
        auto options = test::random_options(random);
        options.memory = &memory;
        test::kivi_cache cache(shape, options);
        const test::stream s(random, shape, longest);
        const auto q = test::random_tensor(random, 1, group * shape.kv_heads, shape.head_dim);
        test::tensor<float> out(1, group * shape.kv_heads, shape.dim(kvq::tensor::value)),
            expected(1, group * shape.kv_heads, shape.dim(kvq::tensor::value));
        auto sequence = cache.new_sequence(), twin = cache.new_sequence();
        kvq::workspace space(&memory);
        while (sequence.tokens() < longest - 60) {
            const int held = sequence.tokens(), n = random.one_in(3) ? random.between(1, 60) : 1;
            append(twin, shape.layers, s, held, n);
            const kvq::step_request one{&sequence, n};
            cache.reserve(std::span(&one, 1), group * shape.kv_heads, 1, space);
            const no_memory none(memory);
            for (int layer = 0; layer < shape.layers; ++layer) {
                sequence.append(layer, s.k.slice(held, n), s.v.slice(held, n));
                sequence.attend(layer, q.view(), out.view(), kvq::causal{}, kvq::serial_executor{}, space);
            }
            REQUIRE(sequence.usage().reserved == 0);
        }
        REQUIRE(contents(cache, sequence) == contents(cache, twin));
        twin.attend(2, q.view(), expected.view());
        REQUIRE(out.values() == expected.values());
    }
}

TEST_CASE(
    "pages of keys that get or do not get the plan of their sequence take no memory in a reserved step") {
    test::generator random(test::seed());
    for (const int page_tokens : {32, 64}) {
        test::counting_resource memory;
        const kvq::cache_shape shape{1, 2, 32};
        kvq::cache cache(shape, {.keys = {test::made<test::usual>(kvq::low2::keys{})},
                                 .values = {test::made<test::usual>(kvq::low2::values{})},
                                 .recent = 8,
                                 .page_tokens = page_tokens,
                                 .statistics = kvq::key_statistics::own,
                                 .statistics_tokens = 64,
                                 .memory = &memory});
        test::stream s(random, shape, 512);
        for (int t = 0; t < 512;
             ++t)  // channels that are large in the first half of the text, and in the second
            for (int c = t < 256 ? 0 : 1; c < 32; c += 4)
                for (int h = 0; h < 2; ++h) s.k.view().at(t, h)[c] *= 16.0f;
        kvq::sequence sequence = cache.new_sequence();
        append(sequence, 1, s, 0, 64);
        kvq::workspace space(&memory);
        for (int at = 64; at < 512; at += 28) {
            const kvq::step_request one{&sequence, 28};
            cache.reserve(std::span(&one, 1), 2, 1, space);
            const no_memory none(memory);
            sequence.append(0, s.k.slice(at, 28), s.v.slice(at, 28));
        }
        int planned = 0, even = 0;
        for (int e = 0; e < sequence.pages(0).entries(); ++e) {
            const kvq::page& keys = *sequence.pages(0).at(e).keys;
            if (keys.format != 0) ++(keys.plan ? planned : even);
        }
        CHECK(planned > 0);
        CHECK(even > 0);
    }
}

TEST_CASE("a ring reserves its steps") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 6; ++round) {
        test::counting_resource memory;
        const kvq::cache_shape shape{.layers = 3, .kv_heads = 2, .head_dim = 16};
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{4, 7, 32, 33});
        options.memory = &memory;
        options.rotary = {{.dims = 16}};
        test::kivi_cache cache(shape, options);
        const test::stream s(random, shape, longest);
        const auto q = test::random_tensor(random, longest, group * 2, 16);
        const kvq::ring_options of{
            .window = 70,
            .slack = options.rollback,
            .sinks = random.one_in(2) ? kvq::sink_positions::in_cache : kvq::ring_options{}.sinks};
        kvq::ring ring(cache.new_sequence(), of), twin(cache.new_sequence(), of);
        kvq::workspace space(&memory), twin_space;
        while (ring.tokens() < longest - 50) {
            const int held = static_cast<int>(ring.tokens()),
                      n = random.one_in(3) ? random.between(1, 50) : 1;
            ring.reserve(n, n, group * 2, 1, space);
            // Sinks that move along are where the drop has left them, and reserve() drops earlier.
            if (of.sinks == kvq::sink_positions::in_cache) twin.reserve(n, n, group * 2, 1, twin_space);
            test::tensor<float> out(n, group * 2, 16), expected(n, group * 2, 16);
            for (int layer = 0; layer < 3; ++layer) {
                {
                    const no_memory none(memory);
                    ring.prefill(layer, s.k.slice(held, n), s.v.slice(held, n), q.slice(held, n), out.view(),
                                 kvq::causal{}, kvq::serial_executor{}, space);
                }
                twin.prefill(layer, s.k.slice(held, n), s.v.slice(held, n), q.slice(held, n),
                             expected.view());
                REQUIRE(out.values() == expected.values());
            }
            REQUIRE(ring.held().usage().reserved == 0);
        }
    }
}

TEST_CASE("a reserved step has room for selected pages and skipped values, also behind cuts") {
    test::counting_resource memory;
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 32};
    test::kivi_cache cache(shape, {.recent = 16, .page_tokens = 32, .rollback = 0, .memory = &memory});
    const test::stream s(random, shape, longest);
    auto sequence = cache.new_sequence();
    append(sequence, 2, s, 0, 200);
    for (const int cut : {150, 100, 70}) {  // pages that are partly visible: more pages than the length needs
        sequence.trim(cut);
        append(sequence, 2, s, cut, 100);
    }
    const int n = 3, before = sequence.tokens();
    const auto q = test::random_tensor(random, n, 4, 32);
    test::tensor<float> out(n, 4, 32);
    const kvq::mods mods{kvq::selected_pages{.tokens = 64}, kvq::skipped_values{.mass = 1e-2f}};
    kvq::workspace space(&memory);
    const kvq::step_request one{&sequence, n, n};
    cache.reserve(std::span(&one, 1), 4, 1, space, mods);
    {
        const no_memory none(memory);
        for (int layer = 0; layer < 2; ++layer)
            sequence.prefill(layer, s.k.slice(before, n), s.v.slice(before, n), q.view(), out.view(), mods,
                             kvq::serial_executor{}, space);
    }
    CHECK(sequence.tokens() == before + n);
}

TEST_CASE("a batch that fails leaves its reserved sequences what they reserved") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 40; ++round) {
        test::counting_resource memory;
        const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 32};
        auto options = test::random_options(random);
        options.memory = &memory;
        test::kivi_cache cache(shape, options);
        const test::stream s(random, shape, longest);
        auto a = cache.new_sequence(), b = cache.new_sequence();
        int held = random.between(0, 150);
        append(a, 2, s, 0, held);
        append(b, 2, s, 0, random.between(0, 50));
        if (held > 0 && random.one_in(2)) a.trim(held = random.between(held / 2, held));
        // Of a page that the fork shares, the step makes a copy.
        const auto fork = random.one_in(2) ? a.fork() : cache.new_sequence();
        const int n = random.between(1, 100), other = b.tokens();
        const auto q = test::random_tensor(random, n, 4, 32);
        test::tensor<float> out(n, 4, 32);
        kvq::workspace space(&memory);
        const kvq::step_request both[] = {{&a, n, n}, {&b, n, n}};
        cache.reserve(both, 4, 1, space);
        b.release_reserved();
        const auto in_use = cache.bytes_in_use();
        const auto before = contents(cache, a);
        const no_memory none(memory);
        for (int layer = 0; layer < 2; ++layer) {
            const kvq::prefill_request batch[] = {
                {&a, s.k.slice(held, n), s.v.slice(held, n), q.view(), out.view()},
                {&b, s.k.slice(other, n), s.v.slice(other, n), q.view(), out.view()}};
            bool failed = false;
            try {
                cache.prefill(layer, batch, kvq::causal{}, kvq::serial_executor{}, space);
            } catch (const std::bad_alloc&) {
                failed = true;
            }
            if (failed && layer == 0) {
                REQUIRE(cache.bytes_in_use() == in_use);
                REQUIRE(contents(cache, a) == before);
            }
            // The step that was promised to take no memory.
            if (failed)
                cache.prefill(layer, std::span(batch, 1), kvq::causal{}, kvq::serial_executor{}, space);
        }
        REQUIRE(a.tokens() == held + n);
        REQUIRE(a.usage().reserved == 0);
    }
}

TEST_CASE("a reservation that is given back, replaced or dropped with its sequence leaves nothing") {
    test::counting_resource memory;
    {
        test::generator random(test::seed());
        const kvq::cache_shape shape{.layers = 4, .kv_heads = 2, .head_dim = 32};
        test::kivi_cache cache(shape, {.recent = 16, .page_tokens = 32, .memory = &memory});
        const test::stream s(random, shape, 200);
        auto sequence = cache.new_sequence();
        append(sequence, 4, s, 0, 50);
        kvq::workspace space;
        const auto reserve = [&](kvq::sequence& of, int n) {
            const kvq::step_request one{&of, n, n};
            cache.reserve(std::span(&one, 1), 4, 2, space);
        };
        const auto in_use = cache.bytes_in_use(), bytes = memory.bytes();
        reserve(sequence, 100);
        const auto more = cache.bytes_in_use();
        CHECK(more >= in_use + sequence.prefill_bytes(100));
        CHECK(sequence.usage().bytes - sequence.usage().reserved == bytes);
        reserve(sequence, 100);
        CHECK(cache.bytes_in_use() == more);
        reserve(sequence, 1);
        CHECK(cache.bytes_in_use() < more);
        sequence.release_reserved();
        CHECK(cache.bytes_in_use() == in_use);
        CHECK(memory.bytes() == bytes);
        {
            auto other = sequence.fork();
            reserve(other, 64);
            auto moved = std::move(other);
            const auto held = cache.bytes_in_use();
            memory.fail_every(1);
            for (int layer = 0; layer < 3; ++layer) moved.append(layer, s.k.slice(50, 64), s.v.slice(50, 64));
            memory.fail_every(0);
            CHECK(cache.bytes_in_use() <= held);
            CHECK(moved.usage().reserved > 0);  // one layer is missing
        }
        CHECK(cache.bytes_in_use() == in_use);
        CHECK(memory.bytes() == bytes);

        CHECK_THROWS_AS(reserve(sequence, -1), kvq::error);
        kvq::workspace other;
        const kvq::step_request twice[] = {{&sequence, 1}, {&sequence, 1}}, none{nullptr, 1};
        CHECK_THROWS_AS(cache.reserve(twice, 4, 1, other), kvq::error);
        CHECK_THROWS_AS(cache.reserve(std::span(&none, 1), 4, 1, other), kvq::error);
        CHECK_THROWS_AS(cache.reserve(std::span(twice, 1), 3, 1, other), kvq::error);
        CHECK_THROWS_AS(cache.reserve(std::span(twice, 1), 4, 0, other), kvq::error);
    }
    CHECK(memory.bytes() == 0);
}

}  // namespace reserve_tests
