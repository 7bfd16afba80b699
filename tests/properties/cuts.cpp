// SPDX-License-Identifier: MIT
// Comparison family: exact. A cut keeps codes: whatever is trimmed, however often, the tokens that stay keep
// their values.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <kvq/cache/preset_options.hpp>
#include <kvq/cache/sequence_access.hpp>
#include <kvq/io/page_transfer.hpp>
#include <kvq/schemes/presets.hpp>

#include "support/attention_error.hpp"
#include "support/saved.hpp"
#include "support/typed_cache.hpp"

using test::append;
using test::contents;

namespace cuts_tests {

namespace {

bool same_bits(const float* a, const float* b, int n) {
    return n == 0 || std::memcmp(a, b, static_cast<std::size_t>(n) * sizeof(float)) == 0;
}

/// Spans that show fewer tokens than their pages hold, but for the last one, which may be filled.
template <class Sequence>
int partial_spans(const Sequence& s) {
    const auto& table = kvq::detail::sequence_access::tables(s).front();
    int n = 0;
    for (int i = 0; i < table.committed; ++i) n += !table[i].full();
    return n;
}

/// Positions without gaps, nothing empty, and only the last span is being filled.
template <class Sequence>
void require_whole(const Sequence& s, int layer) {
    const auto& table = kvq::detail::sequence_access::tables(s)[static_cast<std::size_t>(layer)];
    int at = 0;
    for (int i = 0; i < table.size(); ++i) {
        REQUIRE(table[i].first_token == at);
        REQUIRE(table[i].tokens >= 1);
        REQUIRE(table[i].tokens <= table[i].room);
        REQUIRE((i < table.committed || table[i].full() || i == table.size() - 1));
        at = table[i].end();
    }
    REQUIRE(at == table.tokens);
}

/// The same sequence by another way: a fork, a file, or messages.
template <class Cache>
kvq::sequence elsewhere(Cache& cache, const kvq::sequence& s, int how) {
    if (how == 0) return s.fork();
    if (how == 1) return test::restored(cache, test::saved(s));
    kvq::page_receiver receiver(cache);
    std::vector<std::byte> bytes;
    for (int layer = 0; layer < cache.shape().layers; ++layer)
        kvq::send_pages(s, layer, [&](const void* data, std::size_t n) {
            const auto* const p = static_cast<const std::byte*>(data);
            bytes.insert(bytes.end(), p, p + n);
        });
    std::size_t at = 0;
    while (at < bytes.size()) {
        std::vector<std::byte> page;
        receiver.accept(kvq::read_page(
            [&](void* to, std::size_t n) {
                n = std::min(n, bytes.size() - at);
                std::memcpy(to, bytes.data() + at, n);
                at += n;
                return n;
            },
            page));
    }
    return receiver.finish(s.tokens());
}

}  // namespace

TEST_CASE_TEMPLATE(
    "10000 random cuts, appends, forks, files and messages: once quantized, a value never changes", C,
    KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const int longest = 90;
    for (int round = 0; round < 5; ++round) {
        auto shape = test::random_cache_shape(random, C::key_table::size, 6);
        shape.kv_heads = 1;
        auto options = test::random_options(random);
        options.repack = 0.0f;
        options.page_tokens = random.pick(std::vector<int>{4, 7, 8, 16});
        options.rollback = random.pick(std::vector<int>{0, 0, 3, 16});
        options.layers = test::rotate_formats<C>(shape.layers);
        auto cache = test::make_cache<C>(shape, options);
        const test::stream s(random, shape, 4 * longest);
        auto sequence = cache.new_sequence();
        // What the layers hold; and how far they were committed for good: no trim within the rollback goes
        // back there.
        std::vector<test::tensor<float>> values[2];
        std::vector<int> settled(static_cast<std::size_t>(shape.layers), 0);
        const auto look = [&](auto& into, kvq::tensor role) {
            into.clear();
            for (int layer = 0; layer < shape.layers; ++layer)
                into.push_back(test::dequantized(sequence, shape, layer, role));
        };
        look(values[0], kvq::tensor::key);
        look(values[1], kvq::tensor::value);
        for (int step = 0; step < 2000; ++step) {
            INFO("round ", round, " step ", step, ", pages of ", options.page_tokens, ", rollback ",
                 options.rollback);
            const int held = sequence.tokens(), what = random.between(0, 9);
            if (what < 4) {
                sequence.trim(random.one_in(3) ? random.between(0, held)
                                               : random.between(held * 2 / 3, held));
            } else if (what < 9) {
                const int n = random.between(0, std::min(longest - held, 25)),
                          at = random.between(0, 3 * longest);
                append(sequence, shape.layers, s, at, n);
            } else {
                auto other = elsewhere(cache, sequence, random.between(0, 2));
                REQUIRE(contents(cache, other) == contents(cache, sequence));
                sequence = std::move(other);
            }
            for (int layer = 0; layer < shape.layers; ++layer) {
                require_whole(sequence, layer);
                const auto at = static_cast<std::size_t>(layer);
                const int stay = std::min({settled[at], values[0][at].tokens(), sequence.tokens(layer)});
                for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
                    const auto now = test::dequantized(sequence, shape, layer, role);
                    const auto& was = values[static_cast<int>(role)][at];
                    REQUIRE(same_bits(now.values().data(), was.values().data(), stay * shape.dim(role)));
                }
                const auto& table = kvq::detail::sequence_access::tables(sequence)[at];
                settled[at] = stay;
                for (int i = 0; i < table.committed; ++i)
                    if (!table[i].copies[0] && !table[i].copies[1] &&
                        (table[i].pages[0]->format != 0 || table[i].pages[1]->format != 0))
                        settled[at] = table[i].end();
            }
            look(values[0], kvq::tensor::key);
            look(values[1], kvq::tensor::value);
        }
    }
}

TEST_CASE_TEMPLATE("a trim within the rollback is exact after deeper cuts as well, and so is what follows", C,
                   KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 30; ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size, 8);
        auto options = test::random_options(random);
        options.repack = 0.0f;
        options.layers = test::rotate_formats<C>(shape.layers);
        options.rollback = random.between(1, 40);
        auto cache = test::make_cache<C>(shape, options);
        const test::stream s(random, shape, 300);
        auto sequence = cache.new_sequence();
        for (int cut = random.between(1, 4); cut > 0; --cut) {
            append(sequence, shape.layers, s, random.between(0, 100), random.between(30, 120));
            sequence.trim(random.between(0, sequence.tokens()));
        }
        // As long as ever, so that the rollback reaches as far as it may.
        append(sequence, shape.layers, s, random.between(0, 100), random.between(options.rollback, 120));
        auto never = sequence.fork();
        const int held = sequence.tokens(), n = random.between(1, options.rollback);
        append(sequence, shape.layers, s, 0, n);
        sequence.trim(held);
        INFO("round ", round, ": ", held, " tokens and ", n, ", rollback ", options.rollback);
        REQUIRE(contents(cache, sequence) == contents(cache, never));
        append(sequence, shape.layers, s, 7, 80);
        append(never, shape.layers, s, 7, 80);
        REQUIRE(contents(cache, sequence) == contents(cache, never));
    }
}

TEST_CASE("cuts leave at most one partial page each, and a deeper cut takes it away") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 8};
    test::kivi_cache cache(shape, {.sinks = 2, .recent = 4, .page_tokens = 8, .rollback = 0, .repack = 0.0f});
    const test::stream s(random, shape, 400);
    auto sequence = cache.new_sequence();
    std::vector<int> cuts;  // positions that are still in the sequence
    for (int step = 0; step < 400; ++step) {
        append(sequence, 1, s, random.between(0, 300), random.between(0, 40));
        const int n = random.between(sequence.tokens() / 2, sequence.tokens());
        sequence.trim(n);
        while (!cuts.empty() && cuts.back() >= n) cuts.pop_back();
        cuts.push_back(n);
        REQUIRE(partial_spans(sequence) <= static_cast<int>(cuts.size()));
    }
    sequence.trim(2);
    CHECK(partial_spans(sequence) == 0);
    // A cut between pages costs nothing; a cut inside leaves the page its bytes.
    sequence.trim(0);
    append(sequence, 1, s, 0, 2 + 5 * 8);
    const auto before = sequence.usage();
    sequence.trim(2 + 2 * 8);
    CHECK(partial_spans(sequence) == 0);
    CHECK(sequence.usage().quantized == before.quantized * 2 / 4);
    sequence.trim(2 + 8 + 1);
    CHECK(partial_spans(sequence) == 1);
    CHECK(sequence.usage().quantized == before.quantized * 2 / 4);
    sequence.trim(2 + 8);
    CHECK(partial_spans(sequence) == 0);
    CHECK(sequence.usage().quantized == before.quantized * 1 / 4);
}

TEST_CASE_TEMPLATE("attention over cut pages is that of the values they show", C, KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 20; ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size, 24);
        auto options = test::random_options(random);
        options.repack = 0.0f;
        options.layers = test::rotate_formats<C>(shape.layers);
        options.rollback = random.pick(std::vector<int>{0, 9});
        auto cache = test::make_cache<C>(shape, options);
        const test::stream s(random, shape, 300);
        auto sequence = cache.new_sequence();
        for (int cut = 0; cut < 4; ++cut) {
            append(sequence, shape.layers, s, random.between(0, 100), random.between(10, 90));
            sequence.trim(random.between(1, sequence.tokens()));
        }
        if (random.one_in(2)) append(sequence, shape.layers, s, 0, random.between(0, 60));
        for (int layer = 0; layer < shape.layers; ++layer) {
            const int rows = random.between(1, std::min(20, sequence.tokens(layer)));
            const auto q = test::random_tensor(random, rows, 2 * shape.kv_heads, shape.head_dim);
            INFO("round ", round, " layer ", layer, " tokens ", sequence.tokens(layer));
            CHECK(test::measure_attention(cache, sequence, layer, q).of_terms < 5e-4);
            CHECK(test::measure_attention(cache, sequence, layer, q, kvq::sliding_window{5}).of_terms < 5e-4);
        }
    }
}

TEST_CASE("a slot that is cut back to its prompt again and again keeps the prompt of every preset") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 64};
    using keys = test::formats<kvq::ref8::keys, kvq::std4::keys, kvq::low3::keys, kvq::low2::keys>;
    using values = test::formats<kvq::ref8::values, kvq::std4::values, kvq::low3::values, kvq::low2::values>;
    const int prompt = 300;
    for (int preset = 0; preset < 4; ++preset) {
        auto options = kvq::preset_options();
        options.layers = {{preset, preset}};
        test::typed_cache<keys, values> cache(shape, options);
        auto sequence = cache.new_sequence();
        append(sequence, 1, test::stream(random, shape, prompt), 0, prompt);
        append(sequence, 1, test::stream(random, shape, 200), 0, 200);
        sequence.trim(prompt);
        const auto k = test::dequantized(sequence, shape, 0, kvq::tensor::key).values();
        const auto v = test::dequantized(sequence, shape, 0, kvq::tensor::value).values();
        const std::size_t bytes = sequence.usage().bytes;
        for (int turn = 0; turn < 20; ++turn) {
            append(sequence, 1, test::stream(random, shape, 200), 0, random.between(1, 200));
            sequence.trim(prompt);
            INFO("preset ", preset, " turn ", turn);
            REQUIRE(test::dequantized(sequence, shape, 0, kvq::tensor::key).values() == k);
            REQUIRE(test::dequantized(sequence, shape, 0, kvq::tensor::value).values() == v);
            REQUIRE(sequence.usage().bytes == bytes);
        }
    }
}

TEST_CASE("requantizing and stepping down go on after cuts, and keep what pages show") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using cache_type = test::typed_cache<test::formats<kvq::affine<8>, kvq::affine<4>>>;
    for (int round = 0; round < 30; ++round) {
        auto options = test::random_options(random);
        options.repack = 0.0f;
        cache_type cache({2, 1, 16, 0}, options);
        const test::stream s(random, cache.shape(), 300);
        auto sequence = cache.new_sequence();
        for (int cut = 0; cut < 3; ++cut) {
            append(sequence, 2, s, random.between(0, 100), random.between(10, 120));
            sequence.trim(random.between(1, sequence.tokens()));
        }
        append(sequence, 2, s, 0, random.between(1, 120));
        auto together = sequence.fork();
        const auto before = contents(cache, sequence);
        cache_type::sequence_type* const both[] = {&sequence, &together};
        const kvq::requantize_request request{.key = 1, .value = 1, .first_token = random.between(0, 40)};
        const cache_type::sequence_type* const planned_for[] = {&sequence, &together};
        const auto planned = cache.plan_requantize(planned_for, request);
        kvq::workspace space;
        const auto done = cache.requantize(both, request, {}, kvq::serial_executor{}, space);
        CHECK(done.pages == planned.pages);
        CHECK(done.bytes_after == planned.bytes_after);
        CHECK(done.bytes_after == cache.bytes_in_use());
        const auto after = contents(cache, sequence);
        REQUIRE(after == contents(cache, together));
        REQUIRE(after.size() == before.size());
        for (std::size_t i = 0; i < after.size(); ++i) {
            CHECK(after[i].first_token == before[i].first_token);
            CHECK(after[i].tokens == before[i].tokens);
            const bool quantized = before[i].format != 0 && before[i].first_token >= request.first_token;
            CHECK(after[i].format == (quantized ? 2 : before[i].format));
        }
        kvq::step_down_policy policy;
        policy.tiers = {{0, {0, 0}}, {0, {1, 1}}};
        CHECK(kvq::step_down(cache, sequence, policy).fits);
        for (int layer = 0; layer < 2; ++layer) require_whole(sequence, layer);
    }
}

}  // namespace cuts_tests
