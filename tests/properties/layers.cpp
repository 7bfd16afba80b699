// SPDX-License-Identifier: MIT
// Comparison family: exact. A cache of layers that differ is, layer by layer, a cache of one such layer: random histories over random lists of layers,
// over all verbs, beside one cache for each layer; pages, outputs and bytes are equal. And what lists are refused.
//
// KVQ_HISTORIES: how many. KVQ_HISTORY: only the one with this number. Each has the seed KVQ_SEED plus its number.
#include <doctest/doctest.h>

#include <cstdlib>
#include <kvq/cache/requantize.hpp>
#include <kvq/cache/sequence_access.hpp>
#include <kvq/cache/step_down.hpp>
#include <kvq/cache/usage.hpp>
#include <kvq/estimate/budget.hpp>
#include <kvq/io/page_transfer.hpp>
#include <memory>
#include <optional>

#include "support/caches.hpp"
#include "support/memory.hpp"
#include "support/messages.hpp"
#include "support/saved.hpp"

namespace layers_tests {

namespace {

using kvq::tensor;

constexpr int longest = 220;

std::pair<int, int> numbers(int usual) {
    if (const char* const one = std::getenv("KVQ_HISTORY")) return {std::atoi(one), std::atoi(one) + 1};
    const char* const wanted = std::getenv("KVQ_HISTORIES");
    return {0, wanted ? std::atoi(wanted) : test::rounds(usual)};
}

template <class Scheme>
kvq::format format_of() {
    static const kvq::format f = test::made<test::usual>(Scheme{});
    return f;
}

kvq::cache_options mixed_options(test::generator& random) {
    kvq::cache_options o;
    o.keys = {format_of<kvq::kivi<4, 32>::keys>(), format_of<kvq::int8>(),
              format_of<kvq::full<kvq::float16>>()};
    o.values = {format_of<kvq::kivi<4, 32>::values>(), format_of<kvq::affine<2>>()};
    o.sinks = random.pick(std::vector<int>{0, 1, 4});
    o.recent = random.pick(std::vector<int>{0, 7, 16});
    o.page_tokens = random.pick(std::vector<int>{8, 16, 20, 32});
    o.rollback = random.pick(std::vector<int>{0, 1, 8, 24});
    if (random.one_in(4)) o.repack = 0.0f;
    return o;
}

std::vector<kvq::layer> random_layers(test::generator& random) {
    std::vector<kvq::layer> layers;
    const bool rotated = random.one_in(2);
    const int n = random.between(1, 4);
    for (int i = 0; i < n; ++i) {
        kvq::layer l{random.between(1, 3), 4 * random.between(1, 6),
                     random.one_in(2) ? 0 : random.between(1, 20)};
        l.formats = {random.between(0, 2), random.between(0, 1)};
        if (rotated) {
            l.rotary.emplace();
            if (!random.one_in(4)) l.rotary->dims = l.head_dim / random.between(1, 2);
            l.rotary->base = random.one_in(2) ? 10000.0 : 1000000.0;
        }
        layers.push_back(kvq::full_attention(l));
    }
    return layers;
}

/// A cache of one layer of a list.
std::unique_ptr<kvq::cache> alone(const kvq::layer& of, const kvq::cache_options& options) {
    return std::make_unique<kvq::cache>(std::vector<kvq::layer>{of}, options);
}

/// Sequences of a cache of several layers, and of the caches of its layers.
class world {
public:
    world(test::generator& random, const std::vector<kvq::layer>& layers, const kvq::cache_options& options)
        : cache_(layers, options), random_(random) {
        for (const kvq::layer& of : layers) {
            const kvq::cache_shape shape{1, of.kv_heads, of.head_dim, of.value_dim};
            streams_.emplace_back(random, shape, longest + 64);
            apart_.push_back(alone(of, options));
        }
        for (int i = 0; i < 3; ++i) {
            together_.push_back(cache_.new_sequence());
            parts_.emplace_back();
            for (const auto& of : apart_) parts_.back().push_back(of->new_sequence());
        }
    }

    void step() {
        const int s = random_.between(0, 2), held = together_[s].tokens();
        const auto some = [&](int n) {
            const int a = random_.between(0, n);
            return std::pair(
                a, random_.one_in(3) ? random_.between(a, std::min(n, a + 3)) : random_.between(a, n));
        };
        switch (random_.between(0, 14)) {
            case 0:
            case 1:
            case 2:
            case 3:
            case 4:
                return grow(s);
            case 5:
                return both(
                    s, [n = random_.between(std::max(0, held - 40), held)](kvq::sequence& x) { x.trim(n); });
            case 6: {
                const auto [a, b] = some(held);
                if (!cache_.rotations().known() && b < held && a < b) return;
                return both(s, [a = a, b = b](kvq::sequence& x) { x.erase(a, b); });
            }
            case 7: {
                const auto [a, b] = some(held);
                const int by = random_.between(-50, 50);
                if (!cache_.rotations().known()) return;
                return both(s, [=, a = a, b = b](kvq::sequence& x) { x.shift(a, b, by); });
            }
            case 8: {
                const int from = random_.between(0, 2);
                const auto [a, b] = some(together_[from].tokens());
                if (held + b - a > longest || (!cache_.rotations().known() && a != held)) return;
                together_[s].splice(together_[from], a, b);
                for (std::size_t i = 0; i < apart_.size(); ++i) parts_[s][i].splice(parts_[from][i], a, b);
                return;
            }
            case 9: {
                const int from = random_.between(0, 2);
                if (from == s) return;
                together_[s] = together_[from].fork();
                for (std::size_t i = 0; i < apart_.size(); ++i) parts_[s][i] = parts_[from][i].fork();
                return;
            }
            case 10:
                return requantize(s);
            case 11: {
                kvq::step_down_policy policy;
                policy.tiers = {{0, {}}, {random_.between(0, 60), {random_.between(0, 1), 1}}};
                kvq::step_down(cache_, together_[s], policy);
                for (std::size_t i = 0; i < apart_.size(); ++i)
                    kvq::step_down(*apart_[i], parts_[s][i], policy);
                return;
            }
            case 12:
                return draft(s);
            case 13:
                return both(s, [](kvq::sequence& x) { x.drop_copies(); });
            default:
                return leave(s);
        }
    }

    void check() {
        for (int s = 0; s < 3; ++s) {
            kvq::usage_report sum;
            for (int i = 0; i < cache_.layer_count(); ++i) {
                const kvq::sequence& own = parts_[s][i];
                CAPTURE(i);
                REQUIRE(together_[s].tokens(i) == own.tokens());
                same_pages(together_[s].pages(i), own.pages(0));
                const kvq::usage_report u = own.usage();
                sum.quantized += u.quantized;
                sum.window += u.window;
                sum.slack += u.slack;
                sum.rollback += u.rollback;
                sum.pages += u.pages;
                sum.not_finite += u.not_finite;
                sum.repacked += u.repacked;
            }
            const kvq::usage_report u = together_[s].usage();
            REQUIRE(u.quantized == sum.quantized);
            REQUIRE(u.window == sum.window);
            REQUIRE(u.slack == sum.slack);
            REQUIRE(u.rollback == sum.rollback);
            REQUIRE(u.pages == sum.pages);
            REQUIRE(u.not_finite == sum.not_finite);
            REQUIRE(u.repacked == sum.repacked);
        }
        const int s = random_.between(0, 2), layer = random_.between(0, cache_.layer_count() - 1);
        const int held = together_[s].tokens(layer);
        if (held == 0) return;
        const int n = random_.between(1, std::min(held, 5));
        const kvq::cache_shape& shape = cache_.shape(layer);
        const int heads = shape.kv_heads * random_.between(1, 2);
        const auto q = test::random_tensor(random_, n, heads, shape.head_dim);
        auto out = results(layer, n, heads), want = results(layer, n, heads);
        together_[s].attend(layer, q.view(), out.view());
        parts_[s][layer].attend(0, q.view(), want.view());
        REQUIRE(out.values() == want.values());
        for (const tensor role : {tensor::key, tensor::value}) {
            const int first = random_.between(0, held - n);
            test::tensor<float> x(n, shape.kv_heads, shape.dim(role)), y(n, shape.kv_heads, shape.dim(role));
            together_[s].dequantize(layer, role, first, x.view());
            parts_[s][layer].dequantize(0, role, first, y.view());
            REQUIRE(x.values() == y.values());
        }
    }

private:
    test::tensor<float> results(int layer, int n, int heads) const {
        return {n, heads, cache_.shape(layer).dim(tensor::value)};
    }

    static void same_pages(const kvq::layer_pages& a, const kvq::layer_pages& b) {
        REQUIRE(a.entries() == b.entries());
        for (int e = 0; e < a.entries(); ++e) {
            const auto x = a.at(e), y = b.at(e);
            REQUIRE(x.first_token == y.first_token);
            REQUIRE(x.tokens == y.tokens);
            REQUIRE(x.skip == y.skip);
            REQUIRE(x.shift == y.shift);
            for (const auto& [p, q] : {std::pair(x.keys, y.keys), {x.values, y.values}}) {
                REQUIRE(p->format == q->format);
                REQUIRE(p->bytes == q->bytes);
                REQUIRE(std::memcmp(p->data(), q->data(), p->bytes) == 0);
            }
        }
    }

    template <class Change>
    void both(int s, Change change) {
        change(together_[s]);
        for (kvq::sequence& own : parts_[s]) change(own);
    }

    /// Appends, or prefills with queries, alone or in a batch, with or without a reserved step.
    void grow(int s) {
        const int held = together_[s].tokens(), n = random_.between(0, random_.one_in(3) ? 60 : 9),
                  at = random_.between(0, longest);
        if (held + n > longest) return;
        const int queries = random_.between(0, std::min(3, n)), batch = random_.between(0, 2);
        const int heads = 6;
        kvq::workspace space;
        if (random_.one_in(3)) {
            const kvq::step_request step{&together_[s], n, queries};
            cache_.reserve(std::span(&step, 1), heads, 1, space);
        }
        for (int i = 0; i < cache_.layer_count(); ++i) {
            const auto layer = static_cast<std::size_t>(i);
            const auto k = streams_[layer].k.slice(at % 64, n), v = streams_[layer].v.slice(at % 64, n);
            kvq::sequence& own = parts_[s][layer];
            if (batch == 0) {
                together_[s].append(i, k, v);
                own.append(0, k, v);
                continue;
            }
            const auto q = test::random_tensor(random_, queries, heads, cache_.shape(i).head_dim);
            auto out = results(i, queries, heads), want = results(i, queries, heads);
            if (batch == 1) {
                together_[s].prefill(i, k, v, q.view(), out.view());
            } else {
                auto none = results(i, 0, heads);
                const int other = (s + 1) % 3;
                const kvq::prefill_request requests[] = {
                    {&together_[s], k, v, q.view(), out.view(), {}},
                    {&together_[other], k.slice(0, 0), v.slice(0, 0), q.view().slice(0, 0), none.view(), {}}};
                cache_.prefill(i, requests, kvq::causal{}, kvq::serial_executor{}, space);
            }
            own.prefill(0, k, v, q.view(), want.view());
            REQUIRE(out.values() == want.values());
        }
        together_[s].release_reserved();
    }

    void draft(int s) {
        const int n = random_.between(1, 6), at = random_.between(0, 60);
        if (together_[s].tokens() + n > longest) return;
        std::vector<int> path;
        for (int i = 0; i < n; ++i)
            if (random_.one_in(2)) path.push_back(i);
        for (int i = 0; i < cache_.layer_count(); ++i) {
            const auto layer = static_cast<std::size_t>(i);
            const auto k = streams_[layer].k.slice(at, n), v = streams_[layer].v.slice(at, n);
            together_[s].append_draft(i, k, v);
            parts_[s][layer].append_draft(0, k, v);
        }
        both(s, [&](kvq::sequence& x) { x.keep(path); });
    }

    void requantize(int s) {
        kvq::requantize_request request;
        if (!random_.one_in(3)) request.key = random_.between(0, 2);
        if (!random_.one_in(3)) request.value = random_.between(0, 1);
        request.only_smaller = random_.one_in(2);
        request.new_pages = random_.one_in(3);
        const int first = random_.between(0, cache_.layer_count()),
                  last = random_.between(first, cache_.layer_count());
        kvq::requantize_request of_layers = request;
        of_layers.first_layer = first;
        of_layers.last_layer = last;
        cache_.requantize(together_[s], of_layers);
        for (int i = first; i < last; ++i)
            apart_[static_cast<std::size_t>(i)]->requantize(parts_[s][static_cast<std::size_t>(i)], request);
    }

    /// Saved and restored, or sent and received.
    void leave(int s) {
        if (random_.one_in(2)) {
            together_[s] = test::restored(cache_, test::saved(together_[s]));
            for (std::size_t i = 0; i < apart_.size(); ++i)
                parts_[s][i] = test::restored(*apart_[i], test::saved(parts_[s][i]));
            return;
        }
        const auto sent = [](kvq::cache& of, kvq::sequence& x) {
            test::file_bytes bytes;
            for (int i = 0; i < of.layer_count(); ++i)
                kvq::send_pages(x, i, [&](const void* data, std::size_t n) {
                    const auto* const p = static_cast<const std::byte*>(data);
                    bytes.insert(bytes.end(), p, p + n);
                });
            kvq::page_receiver receiver(of);
            test::memory_source source{bytes};
            std::vector<std::byte> storage;
            while (source.position < bytes.size()) receiver.accept(kvq::read_page(source, storage));
            x = receiver.finish(x.tokens());
        };
        sent(cache_, together_[s]);
        for (std::size_t i = 0; i < apart_.size(); ++i) sent(*apart_[i], parts_[s][i]);
    }

    kvq::cache cache_;
    test::generator& random_;
    std::vector<test::stream> streams_;  // of the layers
    std::vector<std::unique_ptr<kvq::cache>> apart_;
    std::vector<kvq::sequence> together_;
    std::vector<std::vector<kvq::sequence>> parts_;
};

}  // namespace

TEST_CASE("layers that differ are caches of one layer each, side by side") {
    const auto [first, last] = numbers(40);
    for (int history = first; history < last; ++history) {
        const auto seed = test::seed() + static_cast<std::uint64_t>(history);
        INFO("KVQ_SEED=", test::seed(), " KVQ_HISTORY=", history);
        test::generator random(seed);
        const kvq::cache_options options = mixed_options(random);
        world w(random, random_layers(random), options);
        for (int step = 0; step < 40; ++step) {
            CAPTURE(step);
            w.step();
            w.check();
        }
    }
}

TEST_CASE("footprint and budget of layers that differ are what is allocated") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(12); ++round) {
        CAPTURE(round);
        test::counting_resource memory;
        kvq::cache_options options = mixed_options(random);
        const auto layers = random_layers(random);
        const kvq::budget_use use{.tokens = 90, .sequences = 1, .chunk = 30};
        options.byte_budget = kvq::budget(options, layers, use);
        options.memory = &memory;
        kvq::cache cache(layers, options);
        auto sequence = cache.new_sequence();
        kvq::workspace space;
        for (int n = 0; sequence.tokens() < use.tokens;) {
            CAPTURE(sequence.tokens());
            REQUIRE(kvq::footprint(cache, sequence.tokens()).total == memory.bytes());
            REQUIRE(sequence.usage().bytes == memory.bytes());
            n = std::min(random.between(1, use.chunk), use.tokens - sequence.tokens());
            const kvq::step_request step{&sequence, n, 0};
            cache.reserve(std::span(&step, 1), 6, 1, space);  // within the budget
            for (int i = 0; i < cache.layer_count(); ++i) {
                const kvq::cache_shape& shape = cache.shape(i);
                sequence.append(
                    i, test::random_tensor(random, n, shape.kv_heads, shape.head_dim).view(),
                    test::random_tensor(random, n, shape.kv_heads, shape.dim(tensor::value)).view());
            }
        }
        REQUIRE(kvq::footprint(cache, use.tokens).total == memory.bytes());
        const auto q = test::random_tensor(random, 1, 6, cache.shape(0).head_dim);
        test::tensor<float> out(1, 6, cache.shape(0).dim(tensor::value));
        REQUIRE(cache.attention_workspace(use.tokens, 6) >= [&] {
            kvq::workspace own;
            sequence.attend(0, q.view(), out.view(), kvq::causal{}, kvq::serial_executor{}, own);
            return own.size();
        }());
    }
}

TEST_CASE("a list that no cache can have is refused with the layer and the numbers") {
    kvq::cache_options options;
    options.keys = {format_of<kvq::int8>(), format_of<kvq::affine<4>>()};
    const auto refused = [&](const std::vector<kvq::layer>& layers, const char* part) {
        const std::string message = test::message_of([&] { kvq::cache cache(layers, options); });
        INFO(message);
        CHECK(test::contains(message, part));
    };
    const kvq::layer good = kvq::full_attention({2, 64});
    refused({}, "at least 1 layer");
    refused({good, kvq::full_attention({0, 64})}, "layer 1, full attention of 0 x 64");
    refused({good, kvq::full_attention({1, 1 << 21})}, "layer 1, full attention of 1 x 2097152");
    refused({good, kvq::full_attention({1, 8, -1})}, "layer 1, full attention of 1 x 8 and -1");
    refused({good, kvq::full_attention({.kv_heads = 1, .head_dim = 8, .formats = {2, 0}})},
            "key format 2 is not among the 2 listed ones");
    refused({kvq::full_attention({.kv_heads = 1, .head_dim = 8, .rotary = kvq::rotary_embedding{}}), good},
            "layer 1, full attention of 2 x 64: it does not say how keys are rotated, but 1 other layers do");
    refused(
        {kvq::full_attention({.kv_heads = 1, .head_dim = 8, .rotary = kvq::rotary_embedding{.dims = 16}})},
        "the rotary embedding of layer 0");
    options.layers = {{1, 0}};
    refused({good, good}, "formats are given for 1 layers of a cache with 2");
    options.layers = {{1, 0}, {1, 0}};
    refused({good, kvq::full_attention({.kv_heads = 1, .head_dim = 8, .formats = {1, 1}})},
            "it has formats 1 and 1, cache_options::layers gives it 1 and 0");
    options.layers = {};
    options.rotary = {{}};
    refused({kvq::full_attention({.kv_heads = 1, .head_dim = 8, .rotary = kvq::rotary_embedding{}})},
            "both say");

    options.rotary = {};
    kvq::cache cache({good, kvq::full_attention({4, 32})}, options);
    const auto raised = [&](auto&& call, const char* part) {
        const std::string message = test::message_of(call);
        INFO(message);
        CHECK(test::contains(message, part));
    };
    raised([&] { (void)cache.shape(); },
           "several shapes: layer 0, full attention of 2 x 64; layer 1, full attention of 4 x 32");
    kvq::workspace space;
    auto sequence = cache.new_sequence();
    const kvq::step_request step{&sequence, 1};
    raised([&] { cache.reserve(std::span(&step, 1), 2, 1, space); },
           "2 query heads, not a multiple of the 4 kv heads of layer 1");
    test::generator random(1);
    const auto x = test::random_tensor(random, 3, 2, 64);
    sequence.append(0, x.view(), x.view());
    raised([&] { sequence.append(1, x.view(), x.view()); },
           "k is 2 heads x 64 channels but the cache holds 4 x 32");
    CHECK(sequence.tokens(1) == 0);

    // A file says the shape of each layer.
    const auto file = test::saved(sequence);
    kvq::cache other({good, kvq::full_attention({4, 40})}, options);
    raised([&] { test::restored(other, file); },
           "head_dim 32, the cache 40, in layer 1, full attention of 4 x 40");
    CHECK(test::restored(cache, file).tokens(0) == 3);
}

}  // namespace layers_tests
