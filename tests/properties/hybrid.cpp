// SPDX-License-Identifier: MIT
// Comparison family: exact. A sequence of a model with layers of keys and layers of state holds, after any
// history, what running its tokens once gives: after trims that run tokens again, forks, files, messages and
// a prefix cache. A small engine, whose state and keys are computed from token ids, is the model.
//
// KVQ_HISTORIES: how many. KVQ_HISTORY: only the one with this number. Each has the seed KVQ_SEED plus its
// number.
#include <doctest/doctest.h>

#include <filesystem>
#include <kvq/cache/page_list.hpp>
#include <kvq/cache/requantize.hpp>
#include <kvq/estimate/budget.hpp>
#include <kvq/estimate/footprint.hpp>
#include <kvq/io/page_transfer.hpp>
#include <kvq/io/state_wire.hpp>
#include <kvq/kvq.hpp>
#include <kvq/policy/prefix_tiers.hpp>
#include <kvq/policy/ring.hpp>
#include <kvq/policy/self_calibration.hpp>

#include "support/caches.hpp"
#include "support/memory.hpp"
#include "support/saved.hpp"

using kvq::layer_kind;
using kvq::tensor;
using test::contains;
using test::message_of;

namespace hybrid_tests {

namespace {

using ids = std::vector<kvq::token_id>;

kvq::format fp16() {
    static const kvq::format f = test::made<test::usual>(kvq::full<kvq::float16>{});
    return f;
}

/// A number of a token: exact in fp16.
float number(int token, int layer, std::size_t i) {
    return static_cast<float>((token * 31 + layer * 7 + static_cast<int>(i % 97) * 13) % 257) / 16.0f;
}

/// Runs tokens [from, to) of a text, `chunk` at a time.
class engine {
public:
    explicit engine(const kvq::cache& of) : cache_(&of) {}

    void run(kvq::sequence& s, const ids& text, int from, int to, int chunk, bool prompt) const {
        for (int at = from; at < to; at += chunk) {
            const int n = std::min(chunk, to - at);
            layers(s, text, at, n, cache_->layer_count());
            if (cache_->state_layout()) s.state().advance(n, prompt && at + n == to);
        }
    }
    /// The first layers of a step.
    void layers(kvq::sequence& s, const ids& text, int at, int n, int count) const {
        for (int layer = 0; layer < count; ++layer) {
            const kvq::layer& of = cache_->layers()[static_cast<std::size_t>(layer)];
            if (of.kind == layer_kind::state) {
                for (std::size_t part = 0; part < of.parts.size(); ++part)
                    for (float& x : s.state().values<float>(layer, static_cast<int>(part)))
                        for (int t = at; t < at + n; ++t) x = next(x, text, t, layer, part);
                continue;
            }
            const std::vector<float> k = rows(of, text, at, n, layer);
            const kvq::token_view<const float> view(k.data(), n, of.kv_heads, of.head_dim);
            s.append(layer, view, view);
        }
    }
    /// The sequence holds what the first tokens of the text give.
    void check(const kvq::sequence& s, const ids& text, int tokens) const {
        REQUIRE(s.tokens() == tokens);
        kvq::sequence copy = s.fork();
        for (int layer = 0; layer < cache_->layer_count(); ++layer) {
            REQUIRE(s.tokens(layer) == tokens);
            const kvq::layer& of = cache_->layers()[static_cast<std::size_t>(layer)];
            if (of.kind == layer_kind::state) {
                for (std::size_t part = 0; part < of.parts.size(); ++part) {
                    float x = 0.0f;
                    for (int t = 0; t < tokens; ++t) x = next(x, text, t, layer, part);
                    for (const float held : copy.state().values<float>(layer, static_cast<int>(part)))
                        REQUIRE(held == x);
                }
                continue;
            }
            std::vector<float> is(static_cast<std::size_t>(tokens * of.kv_heads * of.head_dim));
            s.dequantize(layer, tensor::value, 0,
                         kvq::token_view<float>(is.data(), tokens, of.kv_heads, of.head_dim));
            REQUIRE(is == rows(of, text, 0, tokens, layer));
        }
    }

private:
    static float next(float x, const ids& text, int t, int layer, std::size_t part) {
        return 0.5f * x + number(text[static_cast<std::size_t>(t)], layer, part) - static_cast<float>(t % 5);
    }
    static std::vector<float> rows(const kvq::layer& of, const ids& text, int at, int n, int layer) {
        std::vector<float> x;
        for (int t = at; t < at + n; ++t)
            for (int i = 0; i < of.kv_heads * of.head_dim; ++i)
                x.push_back(number(text[static_cast<std::size_t>(t)], layer, static_cast<std::size_t>(i)));
        return x;
    }

    const kvq::cache* cache_;
};

std::vector<kvq::layer> random_layers(test::generator& random) {
    std::vector<kvq::layer> list;
    for (int i = random.between(1, 5); i > 0; --i)
        if (random.one_in(2))
            list.push_back(kvq::full_attention({random.between(1, 2), 4 * random.between(1, 3)}));
        else
            list.push_back(kvq::state_layer({{.name = "recurrent",
                                              .heads = random.between(1, 2),
                                              .rows = random.between(1, 5),
                                              .columns = random.between(1, 7)},
                                             {.name = "convolution", .columns = random.between(1, 30)}}));
    return list;
}

kvq::cache_options hybrid_options(test::generator& random) {
    return {
        .keys = {fp16()},
        .sinks = random.between(0, 2),
        .recent = random.between(0, 20),
        .page_tokens = random.between(3, 20),
        .rollback = random.between(0, 9),
        .snapshots = {.every = random.one_in(3) ? 0 : random.between(1, 25), .prompt_end = random.one_in(2)}};
}

}  // namespace

TEST_CASE("a sequence with state is one that ran its tokens once, whatever was done to it") {
    const auto seed = test::seed();
    const auto [first, last] = test::histories(15);
    for (int history = first; history < last; ++history) {
        INFO("KVQ_SEED=", seed, " KVQ_HISTORY=", history);
        test::generator random(seed + static_cast<std::uint64_t>(history));
        auto options = hybrid_options(random);
        test::counting_resource memory;
        options.memory = &memory;
        const std::vector<kvq::layer> list = random_layers(random);
        kvq::cache cache(list, options);
        const engine model(cache);
        kvq::prefix_cache store(cache, {.max_entries = 3, .min_prefix_tokens = 1});
        struct running {
            kvq::sequence sequence;
            ids text;
        };
        std::vector<running> all;
        all.push_back({cache.new_sequence(), {}});
        const auto grow = [&](running& r, int n) {
            const auto held = static_cast<int>(r.text.size());
            for (int i = 0; i < n; ++i) r.text.push_back(random.between(0, 2));
            model.run(r.sequence, r.text, held, held + n, random.between(1, 30), random.one_in(2));
        };
        for (int step = 0; step < 40; ++step) {
            const auto which = static_cast<std::size_t>(random.between(0, static_cast<int>(all.size()) - 1));
            running& r = all[which];
            const int verb = random.between(0, 9);
            INFO("step ", step, " verb ", verb, " of sequence ", which);
            const auto held = static_cast<int>(r.text.size());
            if (verb <= 2) {
                grow(r, random.between(0, 30));
            } else if (verb <= 4) {  // goes back, and runs again what the state has lost
                const int n = random.between(std::max(0, held - 40), held), reach = r.sequence.reach(n);
                const int again = r.sequence.trim(n);
                REQUIRE(again == n - reach);
                REQUIRE(r.sequence.tokens() == reach);
                r.text.resize(static_cast<std::size_t>(n));
                if (random.one_in(4))
                    r.text.resize(static_cast<std::size_t>(reach));
                else
                    model.run(r.sequence, r.text, reach, n, random.between(1, 30), false);
            } else if (verb == 5 && all.size() < 3) {
                running other{r.sequence.fork(), r.text};
                all.push_back(std::move(other));
            } else if (verb == 6) {
                r.sequence = test::restored(cache, test::saved(r.sequence));
            } else if (verb == 7) {
                kvq::page_receiver receiver(cache);
                for (int layer = 0; layer < cache.layer_count(); ++layer) {
                    if (!cache.holds_tokens(layer)) continue;
                    std::vector<std::byte> stream, storage;
                    kvq::send_pages(r.sequence, layer, [&](const void* data, std::size_t n) {
                        const auto* p = static_cast<const std::byte*>(data);
                        stream.insert(stream.end(), p, p + n);
                    });
                    test::memory_source source{stream};
                    while (source.position < stream.size()) receiver.accept(kvq::read_page(source, storage));
                }
                if (cache.state_layout()) {
                    REQUIRE(contains(message_of([&] { (void)receiver.finish(); }),
                                     "the state of the layers was not received"));
                    std::vector<std::byte> stream;
                    kvq::write_recurrent_state(
                        [&](const void* data, std::size_t n) {
                            const auto* p = static_cast<const std::byte*>(data);
                            stream.insert(stream.end(), p, p + n);
                        },
                        r.sequence.state());
                    receiver.accept(kvq::read_recurrent_state(
                        test::memory_source{stream}, *cache.state_layout(), cache.pool(), options.snapshots));
                    if (held > 0) REQUIRE(!message_of([&] { (void)receiver.finish(held - 1); }).empty());
                }
                r.sequence = receiver.finish(held);
            } else if (verb == 8 && held > 0) {
                if (r.sequence.reach(held) > 0) (void)store.store(r.text, r.sequence);
            } else if (verb == 9) {
                ids asked = r.text;
                if (!asked.empty() && random.one_in(2)) asked.resize(asked.size() / 2 + 1);
                const auto seen = store.lookup(asked);
                auto [match, n, sequence] = store.fetch(asked);
                REQUIRE(seen.match == match);
                REQUIRE(seen.tokens == n);
                REQUIRE(sequence.tokens() == n);
                asked.resize(static_cast<std::size_t>(n));
                all[which] = {std::move(sequence), asked};
            }
            for (const running& one : all)
                model.check(one.sequence, one.text, static_cast<int>(one.text.size()));
            if (all.size() == 1 && store.entries() == 0)
                REQUIRE(memory.bytes() == all[0].sequence.usage().bytes);
        }
        // A step that fails after some layers: a trim to the tokens before it puts all layers back.
        running& r = all[0];
        const auto held = static_cast<int>(r.text.size());
        r.text.resize(r.text.size() + 7, 1);
        model.layers(r.sequence, r.text, held, 7, random.between(0, cache.layer_count()));
        r.text.resize(static_cast<std::size_t>(held));
        const int again = r.sequence.trim(held);
        model.run(r.sequence, r.text, held - again, held, 5, false);
        model.check(r.sequence, r.text, held);
    }
}

TEST_CASE("the footprint of a model with state is what is allocated, and a budget is enough") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 12; ++round) {
        test::counting_resource memory;
        auto options = hybrid_options(random);
        options.memory = &memory;
        options.snapshots.prompt_end = false;
        auto list = random_layers(random);
        list.push_back(kvq::state_layer(
            {{.name = "s", .rows = 9, .columns = 33, .snapshot = kvq::snapshot_type::e4m3}}));
        {
            const kvq::cache plain(list, options);
            options.snapshots.most_bytes =
                plain.state_layout()->snapshot_bytes() * static_cast<std::size_t>(random.between(1, 4));
        }
        const int longest = 60;
        options.byte_budget = kvq::budget(options, list, {.tokens = longest, .chunk = 1});
        kvq::cache cache(list, options);
        const engine model(cache);
        auto s = cache.new_sequence();
        const ids text(static_cast<std::size_t>(longest), 1);
        for (int n = 0; n <= longest; ++n) {
            if (n > 0)
                // what an exact snapshot shares with the live state is copied by the next step
                s.state().reserve();
            REQUIRE(s.usage().bytes == memory.bytes());
            REQUIRE(kvq::footprint(cache, n).total == memory.bytes());
            REQUIRE(kvq::footprint(cache, n).state == s.usage().state);
            if (n == longest) break;
            model.layers(s, text, n, 1, cache.layer_count());
            memory.reset_peak();
            s.state().advance(1);
            REQUIRE(memory.peak() <=
                    kvq::footprint(cache, n + 1).total + kvq::footprint(cache, n + 1).transient);
        }
        REQUIRE(s.state().usage().skipped == 0);
    }
}

TEST_CASE(
    "a prefix cache gives as many tokens as pages and a snapshot have, and its entries hold no live state") {
    const std::vector<kvq::layer> list{
        kvq::full_attention({1, 8}),
        kvq::state_layer(
            {{.name = "s", .rows = 64, .columns = 16, .snapshot = kvq::snapshot_type::int8_rows}})};
    kvq::cache cache(list,
                     {.keys = {fp16()}, .page_tokens = 16, .snapshots = {.every = 32, .prompt_end = false}});
    const engine model(cache);
    kvq::prefix_cache store(cache, {.min_prefix_tokens = 10});
    ids text(100, 1);
    {
        auto s = cache.new_sequence();
        model.run(s, text, 0, 100, 8, true);
        CHECK(s.state().snapshots().size() == 3);  // at 32, 64 and 96
        CHECK(store.store(text, s) == kvq::store_outcome::stored);
    }
    // Its own snapshot at token 100, and those before.
    const std::size_t pages = 2 * (7 * 16 * 8 * 2 + 7 * 64) + 4 * cache.state_layout()->snapshot_bytes();
    CHECK(store.bytes() <= pages);
    CHECK(store.bytes() > 4 * cache.state_layout()->snapshot_bytes());
    CHECK(cache.bytes_in_use() == store.bytes());
    const auto asked = [&](int common, int n) {
        ids other(text.begin(), text.begin() + common);
        other.resize(static_cast<std::size_t>(n), 2);
        auto [match, tokens, sequence] = store.fetch(other);
        CHECK(sequence.tokens() == tokens);
        CHECK(sequence.tokens(0) == tokens);
        return std::pair(match, tokens);
    };
    CHECK(asked(100, 100) == std::pair(kvq::prefix_match::exact, 100));
    CHECK(asked(100, 120) == std::pair(kvq::prefix_match::prefix, 100));
    CHECK(asked(99, 120) == std::pair(kvq::prefix_match::lcp, 96));
    CHECK(asked(70, 70) == std::pair(kvq::prefix_match::supersequence, 64));
    CHECK(asked(40, 50) == std::pair(kvq::prefix_match::lcp, 32));
    CHECK(asked(31, 50) == std::pair(kvq::prefix_match::miss, 0));
    kvq::prefix_cache strict(cache, {.min_prefix_tokens = 33});
    {
        auto s = store.fetch(text).sequence;
        CHECK(strict.store(text, s) == kvq::store_outcome::stored);
    }
    text.resize(40);
    text.resize(60, 2);
    CHECK(strict.lookup(text).match == kvq::prefix_match::miss_short_lcp);  // 40 tokens, a snapshot at 32
}

TEST_CASE("a store gives at least the tokens of every entry that begins a request") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    int limited = 0;
    for (int round = 0; round < 12; ++round) {
        CAPTURE(round);
        auto options = hybrid_options(random);
        if (random.one_in(2)) options.snapshots = {.prompt_end = false};
        std::vector<kvq::layer> list = random_layers(random);
        const bool window = random.one_in(2);
        if (window) list.push_back(kvq::sliding_attention(random.between(1, 9), {1, 4}));
        kvq::cache cache(list, options);
        const engine model(cache);
        kvq::prefix_cache store(cache, {.min_prefix_tokens = 1});
        kvq::prefix_tiers tiers(cache, {.memory = {.byte_limit = 1, .min_prefix_tokens = 1},
                                        .folder = std::filesystem::temp_directory_path().string()});
        std::vector<ids> stored;
        std::vector<kvq::sequence> entries;
        // What any entry could give of a request.
        const auto reached = [&](const ids& asked) {
            int most = 0;
            for (std::size_t i = 0; i < entries.size(); ++i) {
                const auto end =
                    std::mismatch(stored[i].begin(), stored[i].end(), asked.begin(), asked.end());
                const auto same = static_cast<int>(end.first - stored[i].begin());
                if (end.first == stored[i].end()) most = std::max(most, same);
                for (int n = most + 1; n <= same; ++n)
                    if (entries[i].can_trim(n) && entries[i].reach(n) == n) most = n;
            }
            return most;
        };
        const auto text_of = [&](int n) {  // one of two texts
            const bool other = random.one_in(2);
            ids text;
            for (int i = 0; i < n; ++i) text.push_back(i / 20 % 2 == 1 && other ? 2 : 1);
            return text;
        };
        for (int n = 0; n < 6; ++n) {
            stored.push_back(text_of(random.between(1, 70)));
            auto s = cache.new_sequence();
            const int tokens = static_cast<int>(stored.back().size());
            model.run(s, stored.back(), 0, tokens, random.between(1, 30), false);
            const bool again = store.store(stored.back(), s) == kvq::store_outcome::duplicate;
            CHECK(tiers.store(stored.back(), s) != kvq::store_outcome::too_large);
            if (again)
                stored.pop_back();  // the first one stays, whose snapshots are others
            else
                entries.push_back(std::move(s));
            for (const ids& entry : stored) {
                ids asked = entry;
                asked.resize(asked.size() + static_cast<std::size_t>(random.between(0, 5)), 3);
                const auto all = static_cast<int>(entry.size());
                REQUIRE(store.lookup(asked).tokens >= all);
                const auto found = tiers.fetch(asked);
                REQUIRE(found.tokens >= all);
                REQUIRE(found.sequence.tokens() == found.tokens);
                // A part of an entry, as far back as its layers go.
                asked.resize(static_cast<std::size_t>(random.between(1, all)));
                const auto part = tiers.fetch(asked);
                REQUIRE(part.tokens == reached(asked));
                REQUIRE(store.lookup(asked).tokens == part.tokens);
                REQUIRE(part.sequence.tokens() == part.tokens);
                REQUIRE((part.tokens > 0) == (part.tier == kvq::prefix_tier::file));
                limited += part.tokens < static_cast<int>(asked.size());
                // One that leaves the text: an entry with fewer tokens in common may give more.
                const ids other = text_of(70);
                asked.insert(asked.end(), other.begin() + static_cast<std::ptrdiff_t>(asked.size()),
                             other.end());
                const auto left = tiers.fetch(asked);
                REQUIRE(left.tokens == reached(asked));
                REQUIRE(store.lookup(asked).tokens == left.tokens);
            }
        }
    }
    CHECK(limited > 0);
}

TEST_CASE("a step of a model with state that was reserved takes no memory") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 20; ++round) {
        test::counting_resource memory;
        auto options = hybrid_options(random);
        options.memory = &memory;
        options.snapshots = {.prompt_end = false};
        kvq::cache cache(random_layers(random), options);
        const engine model(cache);
        auto s = cache.new_sequence();
        const ids text(100, 1);
        kvq::workspace space(&memory);
        for (int n = 0; n < 60;) {
            const int more = random.between(1, 12);
            if (cache.state_layout() && random.one_in(3)) s.state().snapshot(n);
            const kvq::step_request request{&s, more, 0, {}};
            cache.reserve(std::span(&request, 1), 2, 1, space);
            memory.arm(0);
            model.run(s, text, n, n + more, more, false);
            memory.arm(test::counting_resource::never);
            model.check(s, text, n += more);
            REQUIRE(s.usage().reserved == 0);
        }
    }
}

TEST_CASE("what a layer with state cannot do is refused with the layer and its kind, and nothing changes") {
    const std::vector<kvq::layer> list{kvq::full_attention({2, 8}),
                                       kvq::state_layer({{.name = "s", .rows = 3}, {.name = "t"}})};
    kvq::cache cache(list, {.keys = {fp16()}, .rotary = {kvq::rotary_embedding{}}});
    auto s = cache.new_sequence();
    const engine model(cache);
    const ids text(10, 1);
    model.run(s, text, 0, 10, 4, true);
    const auto before = test::saved(s);
    const std::vector<float> numbers(64);
    const kvq::token_view<const float> rows(numbers.data(), 1, 2, 8);
    std::vector<float> out(64);
    const auto says = [&](auto&& f, const char* text_of) {
        const std::string message = message_of(f);
        INFO(message);
        CHECK(contains(message, text_of));
        CHECK(test::saved(s) == before);
    };
    says([&] { s.append(1, rows, rows); }, "layer 1, state of 2 parts: it holds no keys and values");
    says([&] { s.attend(1, rows, kvq::token_view<float>(out.data(), 1, 2, 8)); },
         "layer 1, state of 2 parts: it holds no");
    says([&] { s.append_draft(1, rows, rows); }, "layer 1, state of 2 parts: it holds no keys");
    says([&] { (void)s.pages(1); }, "layer 1, state of 2 parts");
    says([&] { s.erase(2, 4); }, "layer 1, state of 2 parts: cannot erase tokens of a state");
    says([&] { s.shift(2, 4, 1); }, "layer 1, state of 2 parts: cannot shift tokens of a state");
    says([&] { s.splice(s, 2, 4); }, "layer 1, state of 2 parts: cannot splice tokens of a state");
    says([&] { kvq::send_pages(s, 1, [](const void*, std::size_t) {}); },
         "layer 1, state of 2 parts: it has no pages of tokens");
    kvq::page_message page;
    page.layer = 1;
    says([&] { kvq::page_receiver(cache).accept(page); },
         "layer 1, state of 2 parts: it has no pages of tokens");
    says([&] { kvq::ring ring(s.fork(), {.window = 4}); },
         "layer 1, state of 2 parts: a ring has layers with keys and values only");
    says([&] { kvq::self_calibration own(cache); },
         "layer 1, state of 2 parts: a cache that calibrates itself");
    says([&] { kvq::page_list pages(cache, 1); }, "layer 1, state of 2 parts");
    CHECK(kvq::usage_rows(s).size() == 2);
    CHECK(cache.requantize(s, {.key = 0, .value = 0}).pages == 0);
    kvq::prefix_cache store(cache, {.min_prefix_tokens = 1});
    says([&] { (void)store.store(std::span(text).first(9), s); },
         "an entry of 9 tokens cannot be made: layer 1, state of 2 parts, has no snapshot");
    kvq::cache plain({.layers = 1, .kv_heads = 2, .head_dim = 8}, {.keys = {fp16()}});
    auto other = plain.new_sequence();
    says([&] { (void)other.state(); }, "no layer of the cache has state");
    // Through a cache with other pages and back.
    kvq::cache longer(list, {.keys = {fp16()}, .page_tokens = 16, .rotary = {kvq::rotary_embedding{}}});
    const auto again = test::restored(longer, before, {.convert = true});
    CHECK(test::saved(test::restored(cache, test::saved(again), {.convert = true})) == before);
    says([&] { (void)test::restored(plain, before); }, "the saved sequence has layers 2, the cache 1");
    kvq::cache full({list[0], list[0]}, {.keys = {fp16()}});
    says([&] { (void)test::restored(full, before); },
         "the saved sequence has kind 5, the cache 0, in layer 1, full attention");

    const auto refused = [&](kvq::layer of, const char* text_of) {
        says([&] { kvq::cache bad({list[0], of}, {.keys = {fp16()}}); }, text_of);
    };
    refused(kvq::state_layer({}), "layer 1, state of 0 parts: a state has at least 1 part");
    refused(kvq::state_layer({{.name = "s", .rows = 0}}), "part s of layer 1 has 1 heads of 0 rows");
    kvq::layer both = kvq::state_layer({{.name = "s"}});
    both.kv_heads = 2;
    refused(both, "layer 1, state of 1 parts: a state has at least 1 part, and no heads (2 x 0)");
    kvq::layer parts = list[0];
    parts.parts = list[1].parts;
    refused(parts, "layer 1, full attention of 2 x 8: it has no parts of a state, got 2");
    says([&] { kvq::cache bad(list, {.keys = {fp16()}, .snapshots = {.most_bytes = 10}}); },
         "snapshots of at most 10 bytes");
    auto moved = cache.new_sequence();
    const auto owner = std::move(moved);
    CHECK(moved.tokens() == 0);
    CHECK(moved.usage().state == 0);
    says([&] { (void)moved.state(); }, "a sequence that was moved from has no layers");
    // A model of state alone.
    kvq::cache recurrent({list[1]}, {.keys = {fp16()}});
    CHECK(contains(message_of([&] { (void)recurrent.shape(); }),
                   "no layer of the cache holds keys and values: layer 0, state"));
    auto alone = recurrent.new_sequence();
    alone.state().advance(5);
    CHECK(alone.tokens() == 5);
    CHECK(alone.trim(3) == 3);
}

TEST_CASE("a damaged file of a sequence with state is refused") {
    const std::vector<kvq::layer> list{
        kvq::full_attention({1, 4}),
        kvq::state_layer({{.name = "s", .rows = 3, .snapshot = kvq::snapshot_type::int8_rows}})};
    kvq::cache cache(list, {.keys = {fp16()}});
    const engine model(cache);
    auto s = cache.new_sequence();
    model.run(s, ids(6, 1), 0, 6, 6, true);
    const auto good = test::saved(s);
    const std::size_t pages = cache.pool().pages_in_use();
    for (std::size_t at = 0; at < good.size(); ++at) {
        auto damaged = good;
        damaged[at] ^= std::byte{0x10};
        REQUIRE(message_of([&] { (void)test::restored(cache, damaged); }).rfind("kvq: ", 0) == 0);
        damaged.resize(at);
        REQUIRE(message_of([&] { (void)test::restored(cache, damaged); }).rfind("kvq: ", 0) == 0);
    }
    CHECK(cache.pool().pages_in_use() == pages);
}

}  // namespace hybrid_tests
