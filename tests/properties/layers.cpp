// SPDX-License-Identifier: MIT
// Comparison family: exact. A cache of layers that differ is, layer by layer, a cache of one such layer:
// random histories over random lists of layers, over all verbs, beside one cache for each layer; pages,
// outputs and bytes are equal. And what lists are refused.
//
// KVQ_HISTORIES: how many. KVQ_HISTORY: only the one with this number. Each has the seed KVQ_SEED plus its
// number.
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <kvq/adapters/sequence_table.hpp>
#include <kvq/cache/requantize.hpp>
#include <kvq/cache/sequence_access.hpp>
#include <kvq/cache/step_down.hpp>
#include <kvq/cache/usage.hpp>
#include <kvq/estimate/budget.hpp>
#include <kvq/format/latent.hpp>
#include <kvq/io/page_transfer.hpp>
#include <kvq/policy/prefix_cache.hpp>
#include <kvq/policy/ring.hpp>
#include <map>
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
constexpr int rotary_channels = 4;  // of latent layers

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

bool is_latent(const kvq::layer& of) { return of.kind == kvq::layer_kind::latent; }
bool is_index(const kvq::layer& of) { return of.kind == kvq::layer_kind::index; }
/// The first format of keys holds the rotary channels of latent layers.
void expect_latents(kvq::cache_options& o, const std::vector<kvq::layer>& layers) {
    if (std::none_of(layers.begin(), layers.end(), is_latent)) return;
    o.keys = {kvq::with_fp16_channels(o.keys[0], rotary_channels), o.keys[1], o.keys[2]};
}

std::vector<kvq::layer> random_layers(test::generator& random, int sinks, bool windows = true,
                                      bool shared = true) {
    std::vector<kvq::layer> layers;
    const bool rotated = random.one_in(2);
    const bool latents = shared && random.one_in(2);
    const int n = random.between(1, shared ? 6 : 4);
    for (int i = 0; i < n; ++i) {
        kvq::layer l{random.between(1, 3), 4 * random.between(latents ? 2 : 1, 6),
                     random.one_in(2) ? 0 : random.between(1, 20)};
        l.formats = {random.between(0, 2), random.between(0, 1)};
        if (rotated) {
            l.rotary.emplace();
            if (!random.one_in(4)) l.rotary->dims = l.head_dim / random.between(1, 2);
            l.rotary->base = random.one_in(2) ? 10000.0 : 1000000.0;
        }
        const int window = random.one_in(3) ? random.between(1, 8) : random.between(9, 90);
        if (windows && sinks > 0 && random.one_in(2)) l.sinks = random.between(1, sinks);
        const int kind = windows ? random.between(0, 2) : 0;
        if (kind == 0) l.sinks = 0;
        if (shared && i > 0 && random.one_in(4)) {
            l.sinks = 0;
            layers.push_back(kvq::cross_layer(l));
            continue;
        }
        if (latents && i > 0 && random.one_in(2)) {
            kvq::layer of = random.one_in(3) ? kvq::index_layer(4 * random.between(2, 6))
                                             : kvq::latent_attention(random.between(1, 40), rotary_channels);
            of.formats = l.formats;
            of.rotary = l.rotary;
            if (of.rotary)
                *of.rotary = {.dims = rotary_channels, .first_channel = of.head_dim - rotary_channels};
            else if (is_latent(of))
                of.value_dim = random.between(1, of.head_dim);
            layers.push_back(of);
            continue;
        }
        if (shared && i > 0 && random.one_in(2)) {
            int before = random.between(0, i - 1);
            while (layers[static_cast<std::size_t>(before)].kind >= kvq::layer_kind::cross) --before;
            const kvq::layer& owner = layers[static_cast<std::size_t>(before)];
            layers.push_back(kvq::shared_with(owner.kind == kvq::layer_kind::shared ? owner.owner : before));
            continue;
        }
        layers.push_back(kind == 0   ? kvq::full_attention(l)
                         : kind == 1 ? kvq::sliding_attention(window, l)
                                     : kvq::chunked_attention(window, l));
    }
    return layers;
}

/// A cache of one layer of a list, which holds all of its tokens.
std::unique_ptr<kvq::cache> alone(kvq::layer of, const kvq::cache_options& options) {
    if (!is_latent(of) && !is_index(of)) of.kind = kvq::layer_kind::full;
    of.window = of.sinks = of.owner = 0;
    return std::make_unique<kvq::cache>(std::vector<kvq::layer>{of}, options);
}

/// The mask that attention over such a cache needs to see what the layer sees.
struct seen_keys {
    kvq::key_window of;
    bool mask(int q_pos, int k_pos) const {
        if (!of.chunked && of.tokens > 0) return k_pos > q_pos - of.tokens || k_pos < of.sinks;
        return of.tokens == 0 || k_pos / of.tokens == q_pos / of.tokens || k_pos < of.sinks;
    }
};

/// Sequences of a cache of several layers, and of the caches of its layers.
class world {
public:
    world(test::generator& random, const std::vector<kvq::layer>& layers, const kvq::cache_options& options)
        : cache_(layers, options), random_(random) {
        for (const kvq::layer& of : cache_.layers()) {
            windows_ = windows_ || of.window > 0;
            cross_ = cross_ || of.kind == kvq::layer_kind::cross;
            const kvq::cache_shape shape{1, of.kv_heads, of.head_dim, of.value_dim};
            streams_.emplace_back(random, shape, longest + 64);
            apart_.push_back(alone(of, options));  // of a shared layer with the keys and values of its owner
        }
        for (int i = 0; i < 3; ++i) {
            together_.push_back(cache_.new_sequence());
            parts_.emplace_back();
            for (const auto& of : apart_) parts_.back().push_back(of->new_sequence());
        }
    }

    void step() {
        const int s = random_.between(0, 2), held = together_[s].tokens();
        for (kvq::sequence& one : together_)
            if (waits(one) && random_.one_in(2)) commit(one);
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
                return trim(s, random_.one_in(8) ? random_.between(0, held)
                                                 : random_.between(std::max(0, held - 40), held));
            case 6: {
                const auto [a, b] = some(held);
                if (b == held) return trim(s, a);
                if (!cache_.rotations().known() && a < b) return;
                return erase(s, a, b);
            }
            case 7: {
                const auto [a, b] = some(held);
                const int by = random_.between(-50, 50);
                if (!cache_.rotations().known()) return;
                const std::string message =
                    test::message_of([&, a = a, b = b] { together_[s].shift(a, b, by); });
                if (test::contains(message, "its sinks")) {
                    REQUIRE(held < longest_sinks);
                    return;
                }
                REQUIRE(message.empty());
                each_part(s, [&, a = a, b = b](kvq::sequence& own) { own.shift(a, b, by); });
                return;
            }
            case 8: {
                const int from = random_.between(0, 2);
                const auto [a, b] = some(together_[from].tokens());
                if (cross_) {
                    REQUIRE(
                        test::contains(test::message_of([&] { together_[s].splice(together_[from], 0, 0); }),
                                       "belong to another text"));
                    return;
                }
                if (waits(together_[from])) {
                    if (from != s && a < b && (cache_.rotations().known() || a == held))
                        REQUIRE_FALSE(test::message_of([&, a = a, b = b] {
                                          together_[s].splice(together_[from], a, b);
                                      }).empty());
                    commit(together_[from]);
                }
                if (held + b - a > longest || (!cache_.rotations().known() && a != held)) return;
                bool all = true;
                for (int i = 0; i < cache_.layer_count(); ++i) all = all && together_[from].holds(i, a, b);
                const std::string message =
                    test::message_of([&, a = a, b = b] { together_[s].splice(together_[from], a, b); });
                if (test::contains(message, "its sinks")) {
                    REQUIRE(held < longest_sinks);
                    return;
                }
                REQUIRE(message.empty() == all);
                if (!all) REQUIRE(test::contains(message, "has freed tokens"));
                if (!all) return;
                for (std::size_t i = 0; i < apart_.size(); ++i) parts_[s][i].splice(parts_[from][i], a, b);
                return;
            }
            case 9: {
                const int from = random_.between(0, 2);
                if (from == s) return;
                // Each of the two commits its own pages of the chunk that waits, which a splice may bring
                // together.
                shares_less_ = shares_less_ || waits(together_[from]);
                together_[s] = together_[from].fork();
                for (std::size_t i = 0; i < apart_.size(); ++i) parts_[s][i] = parts_[from][i].fork();
                return;
            }
            case 10:
                return requantize(s);
            case 11: {
                // By age a page changes with its oldest span, which a window may have freed.
                commit(together_[s]);
                for (int i = 0; windows_ && i < cache_.layer_count(); ++i)
                    if (table(s, i).rearranged) return;
                kvq::step_down_policy policy;
                policy.tiers = {{0, {}}, {random_.between(0, 60), {random_.between(0, 1), 1}}};
                kvq::step_down(cache_, together_[s], policy);
                for (std::size_t i = 0; i < apart_.size(); ++i)
                    if (!is_cross(static_cast<int>(i))) kvq::step_down(*apart_[i], parts_[s][i], policy);
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
        check_usage();
        for (int s = 0; s < 3; ++s) {
            if (waits(together_[s])) continue;
            kvq::usage_report sum;
            for (int i = 0; i < cache_.layer_count(); ++i) {
                const kvq::sequence& own = parts_[s][i];
                CAPTURE(i);
                REQUIRE(together_[s].tokens(i) == own.tokens());
                same_pages(together_[s].pages(i), own.pages(0), front(s, i), cache_.shape(i));
                if (cache_.owner(i) != i) continue;
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
            if (shares_less_) continue;
            if (windows_) {
                REQUIRE(u.quantized <= sum.quantized);
                REQUIRE(u.window <= sum.window);
                continue;
            }
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
        if (held == 0 || waits(together_[s])) return;
        const bool other = is_cross(layer);
        const int n = random_.between(1, other ? 9 : std::min(held, 5));
        const kvq::cache_shape& shape = cache_.shape(layer);
        const int heads = shape.kv_heads * random_.between(1, 2);
        if (is_index(cache_.layers()[static_cast<std::size_t>(layer)])) {
            const auto q = test::random_tensor(random_, n, heads, shape.head_dim);
            const std::vector<float> weights = random_.normals(static_cast<std::size_t>(n * heads));
            std::vector<std::int32_t> out(static_cast<std::size_t>(n * 7), -2), want = out;
            together_[s].select(layer, q.view(), weights.data(), 7, out.data());
            parts_[s][layer].select(0, q.view(), weights.data(), 7, want.data());
            REQUIRE(out == want);
            return;
        }
        const auto q = test::random_tensor(random_, n, heads, shape.head_dim);
        auto out = results(layer, n, heads), want = results(layer, n, heads);
        const int seen = window(layer).first_seen(held - n);
        const std::string message =
            test::message_of([&] { together_[s].attend(layer, q.view(), out.view()); });
        REQUIRE(message.empty() == (seen >= front(s, layer)));
        if (other)
            parts_[s][layer].attend(0, q.view(), want.view(), kvq::cross_attention{});
        else
            parts_[s][layer].attend(0, q.view(), want.view(), seen_keys{window(layer)});
        if (message.empty()) REQUIRE(out.values() == want.values());
        const int m = std::min(n, held);
        for (const tensor role : {tensor::key, tensor::value}) {
            const int first = random_.between(0, held - m);
            if (!together_[s].holds(layer, first, first + m)) continue;
            test::tensor<float> x(m, shape.kv_heads, shape.dim(role)), y(m, shape.kv_heads, shape.dim(role));
            together_[s].dequantize(layer, role, first, x.view());
            parts_[s][layer].dequantize(0, role, first, y.view());
            REQUIRE(x.values() == y.values());
        }
    }

private:
    /// usage() counts every page of a sequence once, also while a chunk waits; and all pages of the pool are
    /// pages of the sequences.
    void check_usage() {
        struct use {
            std::uint32_t spans = 0;
            bool shown = false;
        };
        std::map<const kvq::page*, use> all;
        std::size_t reserved = 0;
        for (const kvq::sequence& s : together_) {
            std::map<const kvq::page*, use> own;
            for (int i = 0; i < cache_.layer_count(); ++i) {
                if (cache_.owner(i) != i) continue;
                const kvq::layer_pages held = s.pages(i);
                for (int at = 0; at < held.count; ++at)
                    for (int role = 0; role < 2; ++role) {
                        if (const kvq::page* const p = held.spans[at].pages[role].get())
                            ++own[p].spans, own[p].shown = true;
                        if (const kvq::page* const p = held.spans[at].copies[role].get()) ++own[p].spans;
                    }
            }
            kvq::usage_report want;
            for (const auto& [p, of] : own) {
                (!of.shown ? want.rollback : p->format == 0 ? want.window : want.quantized) += p->bytes;
                if (p->references > of.spans) want.shared += p->bytes;
            }
            const kvq::usage_report u = s.usage();
            REQUIRE(u.pages == own.size());
            REQUIRE(u.quantized == want.quantized);
            REQUIRE(u.window == want.window);
            REQUIRE(u.rollback == want.rollback);
            REQUIRE(u.shared == want.shared);
            reserved += u.reserved;
            all.merge(own);
        }
        std::size_t bytes = 0;
        for (const auto& [p, of] : all) bytes += kvq::page_pool::allocation(p->bytes);
        if (reserved == 0) REQUIRE(cache_.bytes_in_use() == bytes);
    }
    static bool waits(const kvq::sequence& s) { return kvq::detail::sequence_access::waits(s); }
    static void commit(kvq::sequence& s) {
        s.trim(s.tokens());
        REQUIRE_FALSE(waits(s));
    }
    test::tensor<float> results(int layer, int n, int heads) const {
        return {n, heads, cache_.shape(layer).dim(tensor::value)};
    }

    const kvq::detail::page_table& table(int s, int layer) const {
        return kvq::detail::sequence_access::tables(
            together_[s])[static_cast<std::size_t>(cache_.owner(layer))];
    }
    const test::stream& stream(int layer) const {
        return streams_[static_cast<std::size_t>(cache_.owner(layer))];
    }
    /// Rows of values; none of a latent layer.
    kvq::token_view<const float> values(int layer, int first, int n) const {
        return stream(layer).v.slice(first, cache_.tensors(layer).size() == 2 ? n : 0);
    }
    int front(int s, int layer) const { return table(s, layer).front(); }
    kvq::key_window window(int layer) const { return cache_.geometry(layer).window; }

    /// The first tokens of a 16-bit page: what is behind them depends on who shares it.
    static std::vector<std::uint16_t> shown(const kvq::page& p, tensor role, const kvq::cache_shape& of,
                                            int tokens) {
        const kvq::block_shape shape{role, p.tokens, of.dim(role)};
        const kvq::value_layout<kvq::float16> layout(shape);
        const std::size_t block = kvq::full<kvq::float16>{}.block_bytes(shape);
        std::vector<std::uint16_t> values;
        for (int h = 0; h < of.kv_heads; ++h)
            for (int t = 0; t < tokens; ++t)
                for (int c = 0; c < shape.dim; ++c)
                    values.push_back(kvq::detail::load_as<std::uint16_t>(
                        p.data() + block * static_cast<std::size_t>(h) +
                        2 * kvq::full<kvq::float16>::element(layout, shape, t, c)));
        return values;
    }
    /// a: without the spans in front of token `front` behind its sinks.
    static void same_pages(const kvq::layer_pages& a, const kvq::layer_pages& b, int front,
                           const kvq::cache_shape& shape) {
        if (front == 0) REQUIRE(a.entries() == b.entries());
        REQUIRE(a.entries() <= b.entries());
        for (int e = 0; e < a.entries(); ++e) {
            const auto x = a.at(e), y = b.at(x.first_token < front ? e : b.entries() - a.entries() + e);
            // Where an erase joins two parts of a page again, a layer that has freed the first of them shows
            // the other one.
            const int hidden = x.first_token == front ? front - y.first_token : 0;
            REQUIRE(hidden >= 0);
            REQUIRE(x.first_token == y.first_token + hidden);
            REQUIRE(x.tokens == y.tokens - hidden);
            REQUIRE(x.skip == y.skip + hidden);
            REQUIRE(x.shift == y.shift);
            for (const auto& [p, q] : {std::pair(x.keys, y.keys), {x.values, y.values}}) {
                REQUIRE(p->format == q->format);
                REQUIRE(p->bytes == q->bytes);
                if (p->format == 0)
                    REQUIRE(shown(*p, p == x.keys ? tensor::key : tensor::value, shape, x.skip + x.tokens) ==
                            shown(*q, q == y.keys ? tensor::key : tensor::value, shape, x.skip + x.tokens));
                else
                    REQUIRE(std::memcmp(p->data(), q->data(), p->bytes) == 0);
            }
        }
    }

    void trim(int s, int n) {
        // Otherwise a deep one finds 16-bit tokens, where the layer alone has quantized ones.
        if (together_[s].tokens() - n > cache_.options().rollback) commit(together_[s]);
        const bool reached = together_[s].can_trim(n);
        if (n >= together_[s].trim_limit()) REQUIRE(reached);
        REQUIRE((together_[s].trim_limit() == 0 || !together_[s].can_trim(together_[s].trim_limit() - 1) ||
                 together_[s].trim_limit() <= longest_sinks));
        const std::string message = test::message_of([&] { together_[s].trim(n); });
        REQUIRE(message.empty() == reached);
        if (!reached) REQUIRE(test::contains(message, "the limit is"));
        if (reached) each_part(s, [&](kvq::sequence& own) { own.trim(n); });
    }

    void erase(int s, int a, int b) {
        commit(together_[s]);
        // What each layer would hold afterwards, and what its next token would see.
        bool all = true;
        for (int i = 0; i < cache_.layer_count() && a < b; ++i) {
            if (is_cross(i)) continue;
            const int first = front(s, i), left = together_[s].tokens(i) - (b - a);
            const int then = first == 0 ? 0 : first <= a ? first : first >= b ? first - (b - a) : a;
            const int sinks = table(s, i).end_of_sinks();
            const int sinks_then = std::max(0, std::min(sinks, b) - std::min(sinks, a));
            all = all && sinks - sinks_then >= std::min(window(i).sinks, left);
            all = all &&
                  (window(i).sinks == 0 || a >= window(i).sinks || (a == 0 && table(s, i).committed == 0));
            all = all && (then <= sinks - sinks_then || (left > then && window(i).first_seen(left) >= then));
        }
        const std::string message = test::message_of([&] { together_[s].erase(a, b); });
        REQUIRE(message.empty() == all);
        if (!all) REQUIRE((test::contains(message, "are freed") || test::contains(message, "its sinks")));
        if (all) each_part(s, [&](kvq::sequence& own) { own.erase(a, b); });
    }

    bool is_cross(int layer) const { return window(layer).cross; }
    /// Of the layers whose tokens are those of the sequence.
    template <class Change>
    void each_part(int s, Change change) {
        for (int i = 0; i < cache_.layer_count(); ++i)
            if (!is_cross(i)) change(parts_[s][static_cast<std::size_t>(i)]);
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
        const int most_queries = random_.between(0, std::min(3, n)), batch = random_.between(0, 2);
        const int heads = 6;
        kvq::workspace space;
        if (random_.one_in(3)) {
            const kvq::step_request step{&together_[s], n, most_queries};
            cache_.reserve(std::span(&step, 1), heads, 1, space);
        }
        std::vector<int> order, readers;
        const bool readers_last = random_.one_in(2);
        for (int i = 0; i < cache_.layer_count(); ++i)
            (readers_last && cache_.owner(i) != i ? readers : order).push_back(i);
        while (!readers.empty()) {
            const auto at_random = readers.begin() + random_.between(0, static_cast<int>(readers.size()) - 1);
            order.push_back(*at_random);
            readers.erase(at_random);
        }
        const bool skips = random_.one_in(4);
        for (const int i : order) {
            const auto layer = static_cast<std::size_t>(i);
            const auto k = stream(i).k.slice(at % 64, n), v = values(i, at % 64, n);
            const bool reads = cache_.owner(i) != i;
            const auto given_k = reads ? k.slice(0, 0) : k, given_v = reads ? v.slice(0, 0) : v;
            kvq::sequence& own = parts_[s][layer];
            if (is_cross(i)) {
                grow_other_text(s, i, k, v);
                continue;
            }
            if (batch == 0) {
                if (!reads) together_[s].append(i, k, v);
                own.append(0, k, v);
                continue;
            }
            const int queries = is_index(cache_.layers()[layer]) ? 0 : most_queries;
            const auto q = test::random_tensor(random_, queries, heads, cache_.shape(i).head_dim);
            auto out = results(i, queries, heads), want = results(i, queries, heads);
            own.prefill(0, k, v, q.view(), want.view(), seen_keys{window(i)}, kvq::serial_executor{}, space);
            if (reads && skips && random_.one_in(2)) continue;
            if (batch == 1) {
                together_[s].prefill(i, given_k, given_v, q.view(), out.view());
            } else {
                auto none = results(i, 0, heads);
                const int other = (s + 1) % 3;
                const kvq::prefill_request requests[] = {
                    {&together_[s], given_k, given_v, q.view(), out.view(), {}},
                    {&together_[other], k.slice(0, 0), v.slice(0, 0), q.view().slice(0, 0), none.view(), {}}};
                cache_.prefill(i, requests, kvq::causal{}, kvq::serial_executor{}, space);
            }
            REQUIRE(out.values() == want.values());
        }
        together_[s].release_reserved();
        if (n == 0 || waits(together_[s])) return;
        const int rollback = cache_.options().rollback;
        for (int i = 0; i < cache_.layer_count(); ++i) {
            const kvq::detail::page_table& of = table(s, i);
            const int needed = cache_.geometry(i).first_needed(held + n, rollback);
            for (const kvq::page_span& span : of.spans)
                REQUIRE((span.end() <= of.end_of_sinks() || span.end() > needed));
        }
    }

    /// All tokens of a layer with cross attention at once, at any time; no more behind them.
    void grow_other_text(int s, int i, const kvq::input_view& k, const kvq::input_view& v) {
        const auto layer = static_cast<std::size_t>(i);
        if (k.tokens == 0 || random_.one_in(2)) return;
        if (together_[s].tokens(i) > 0) {
            REQUIRE(test::contains(test::message_of([&] { together_[s].append(i, k, v); }),
                                   "all of which are appended in one call"));
            REQUIRE(test::contains(test::message_of([&] { together_[s].append_draft(i, k, v); }),
                                   "it takes no drafts"));
            return;
        }
        if (random_.one_in(2)) {
            together_[s].append(i, k, v);
            parts_[s][layer].append(0, k, v);
            return;
        }
        const int queries = random_.between(0, 70);
        const auto q = test::random_tensor(random_, queries, 6, cache_.shape(i).head_dim);
        auto out = results(i, queries, 6), want = results(i, queries, 6);
        kvq::workspace space;
        together_[s].prefill(i, k, v, q.view(), out.view());
        parts_[s][layer].prefill(0, k, v, q.view(), want.view(), kvq::cross_attention{},
                                 kvq::serial_executor{}, space);
        REQUIRE(out.values() == want.values());
    }

    void draft(int s) {
        const int n = random_.between(1, 6), at = random_.between(0, 60);
        if (together_[s].tokens() + n > longest) return;
        std::vector<int> path;
        for (int i = 0; i < n; ++i)
            if (random_.one_in(2)) path.push_back(i);
        for (int i = 0; i < cache_.layer_count(); ++i) {
            if (is_cross(i)) continue;
            const auto layer = static_cast<std::size_t>(i);
            const auto k = stream(i).k.slice(at, n), v = values(i, at, n);
            if (cache_.owner(i) == i) together_[s].append_draft(i, k, v);
            parts_[s][layer].append_draft(0, k, v);
            if (is_index(cache_.layers()[layer])) continue;
            const auto q = test::random_tensor(random_, n, 6, cache_.shape(i).head_dim);
            auto out = results(i, n, 6), want = results(i, n, 6);
            together_[s].attend(i, q.view(), out.view());
            parts_[s][layer].attend(0, q.view(), want.view(), seen_keys{window(i)});
            REQUIRE(out.values() == want.values());
        }
        for (int i = together_[s].tokens(); i >= 0; --i) {
            const bool can = together_[s].can_trim(i);
            if (i >= together_[s].trim_limit()) REQUIRE(can);
            if (i % 16 == at % 16 || i + n > together_[s].tokens())
                REQUIRE(test::message_of([&] { together_[s].fork().trim(i); }).empty() == can);
        }
        together_[s].keep(path);
        each_part(s, [&](kvq::sequence& own) { own.keep(path); });
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
        // One sequence, or all: pages that they share are converted once.
        const bool none_waits = std::none_of(together_.begin(), together_.end(), waits),
                   all = none_waits && random_.one_in(2);
        std::vector<kvq::sequence*> chosen;
        for (int i = 0; i < 3; ++i)
            if (all || i == s) chosen.push_back(&together_[i]);
        kvq::workspace space;
        cache_.requantize(chosen, of_layers, {}, kvq::serial_executor{}, space);
        for (int i = 0; i < cache_.layer_count(); ++i) {
            if (cache_.owner(i) < first || cache_.owner(i) >= last) continue;
            const auto layer = static_cast<std::size_t>(i);
            std::vector<kvq::sequence*> parts;
            for (int other = 0; other < 3; ++other)
                if (all || other == s) parts.push_back(&parts_[other][layer]);
            apart_[layer]->requantize(parts, request, {}, kvq::serial_executor{}, space);
            for (int a = 0; a < 3 && none_waits; ++a)
                for (int b = 0; b < a; ++b) REQUIRE(shared(a, b, i) == shared_apart(a, b, i));
        }
    }

    /// Spans of two sequences that show the same page, among those that both tables hold.
    using pairs = std::vector<std::array<int, 2>>;
    static pairs shared(const kvq::layer_pages& a, const kvq::layer_pages& b,
                        const kvq::detail::page_table& held_a, const kvq::detail::page_table& held_b) {
        pairs same;
        for (int i = 0; i < a.entries(); ++i)
            for (int j = 0; j < b.entries(); ++j) {
                const auto x = a.at(i), y = b.at(j);
                if (x.keys == y.keys && held_a.holds(x.first_token, x.first_token + x.tokens) &&
                    held_b.holds(y.first_token, y.first_token + y.tokens))
                    same.push_back({x.first_token, y.first_token});
            }
        return same;
    }
    pairs shared(int a, int b, int layer) const {
        return shared(together_[a].pages(layer), together_[b].pages(layer), table(a, layer), table(b, layer));
    }
    pairs shared_apart(int a, int b, int layer) const {
        return shared(parts_[a][layer].pages(0), parts_[b][layer].pages(0), table(a, layer), table(b, layer));
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
                if (of.holds_tokens(i))
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
        commit(together_[s]);
        sent(cache_, together_[s]);
        for (std::size_t i = 0; i < apart_.size(); ++i) sent(*apart_[i], parts_[s][i]);
    }

    static constexpr int longest_sinks = 4;
    kvq::cache cache_;
    bool windows_ = false, cross_ = false, shares_less_ = false;
    test::generator& random_;
    std::vector<test::stream> streams_;  // of the layers
    std::vector<std::unique_ptr<kvq::cache>> apart_;
    std::vector<kvq::sequence> together_;
    std::vector<std::vector<kvq::sequence>> parts_;
};

}  // namespace

TEST_CASE("layers that differ are caches of one layer each, side by side") {
    const auto [first, last] = test::histories(40);
    for (int history = first; history < last; ++history) {
        const auto seed = test::seed() + static_cast<std::uint64_t>(history);
        INFO("KVQ_SEED=", test::seed(), " KVQ_HISTORY=", history);
        test::generator random(seed);
        kvq::cache_options options = mixed_options(random);
        const auto layers = random_layers(random, options.sinks, random.one_in(2));
        expect_latents(options, layers);
        // Repacking looks at all spans of a layer, and a window leaves some of them.
        for (const kvq::layer& of : layers)
            if (of.window > 0) options.repack = 0.0f;
        world w(random, layers, options);
        for (int step = 0; step < 40; ++step) {
            CAPTURE(step);
            w.step();
            w.check();
        }
    }
}

TEST_CASE("tokens keep their values and positions beside the gap of a window, whatever is cut and repacked") {
    const auto [first, last] = test::histories(60);
    for (int history = first; history < last; ++history) {
        const auto seed = test::seed() + static_cast<std::uint64_t>(history);
        INFO("KVQ_SEED=", test::seed(), " KVQ_HISTORY=", history);
        test::generator random(seed);
        kvq::cache_options options = mixed_options(random);
        options.keys = {format_of<kvq::int8>(), format_of<kvq::full<kvq::float16>>()};
        options.values = {};
        options.repack = random.pick(std::vector<float>{0.1f, 0.25f, 0.5f});
        std::vector<kvq::layer> layers = random_layers(random, options.sinks, true, false);
        for (kvq::layer& of : layers) {
            if (of.kind == kvq::layer_kind::shared) continue;
            of.value_dim = 0;
            of.formats = {random.between(0, 1), random.between(0, 1)};
            of.rotary = kvq::rotary_embedding{.dims = of.head_dim};
        }
        kvq::cache cache(layers, options);
        struct running {
            kvq::sequence sequence;
            std::vector<int> numbers;  // every value of a token
        };
        std::vector<running> all;
        for (int i = 0; i < 3; ++i) all.push_back({cache.new_sequence(), {}});
        const auto done = [](auto&& change) { return test::message_of(change).empty(); };
        for (int step = 0; step < 40; ++step) {
            CAPTURE(step);
            running &x = all[static_cast<std::size_t>(random.between(0, 2))],
                    &other = all[static_cast<std::size_t>(random.between(0, 2))];
            const auto held = static_cast<int>(x.numbers.size());
            const auto at = [&](int n) { return x.numbers.begin() + n; };
            const auto some = [&](int n) {
                const int a = random.between(0, n);
                return std::pair(
                    a, random.one_in(2) ? std::min(n, a + random.between(0, 4)) : random.between(a, n));
            };
            const int verb = random.between(0, 9);
            if (verb <= 3) {
                const int n = random.between(0, random.one_in(3) ? 50 : 6);
                if (held + n > longest) continue;
                for (int i = 0; i < n; ++i) x.numbers.push_back(random.between(1, 60));
                for (int i = 0; i < cache.layer_count(); ++i) {
                    if (!cache.holds_tokens(i)) continue;
                    const kvq::layer& of = layers[static_cast<std::size_t>(i)];
                    test::tensor<float> rows(n, of.kv_heads, of.head_dim);
                    const std::size_t row = static_cast<std::size_t>(of.kv_heads * of.head_dim);
                    for (std::size_t v = 0; v < rows.values().size(); ++v)
                        rows.values()[v] = static_cast<float>(*at(held + static_cast<int>(v / row)));
                    x.sequence.append(i, rows.view(), rows.view());
                }
            } else if (verb == 4) {
                const int n = random.between(random.one_in(4) ? 0 : std::max(0, held - 30), held);
                if (done([&] { x.sequence.trim(n); })) x.numbers.resize(static_cast<std::size_t>(n));
            } else if (verb <= 6) {
                const auto [a, b] = some(held);
                if (done([&, a = a, b = b] { x.sequence.erase(a, b); })) x.numbers.erase(at(a), at(b));
            } else if (verb == 7) {
                const auto [a, b] = some(held);
                (void)done([&, a = a, b = b] { x.sequence.shift(a, b, random.between(-20, 20)); });
            } else if (verb == 8) {
                const auto [a, b] = some(static_cast<int>(other.numbers.size()));
                if (held + b - a > longest) continue;
                const std::vector<int> added(other.numbers.begin() + a, other.numbers.begin() + b);
                if (done([&, a = a, b = b] { x.sequence.splice(other.sequence, a, b); }))
                    x.numbers.insert(x.numbers.end(), added.begin(), added.end());
            } else if (&x != &other) {
                x.sequence = other.sequence.fork();
                x.numbers = other.numbers;
            }
            for (const running& r : all) {
                const auto tokens = static_cast<int>(r.numbers.size());
                REQUIRE(r.sequence.tokens() == tokens);
                for (int i = 0; i < cache.layer_count(); ++i) {
                    if (!cache.holds_tokens(i)) continue;
                    const kvq::layer_pages pages = r.sequence.pages(i);
                    const kvq::key_window window = cache.geometry(i).window;
                    REQUIRE(r.sequence.holds(i, window.first_seen(tokens), tokens));
                    REQUIRE(r.sequence.holds(i, 0, std::min(window.sinks, tokens)));
                    int gaps = 0, end = 0;
                    for (int e = 0; e < pages.entries();
                         end = pages.at(e).first_token + pages.at(e).tokens, ++e) {
                        const auto page = pages.at(e);
                        REQUIRE(page.first_token >= end);
                        gaps += page.first_token > end;
                        test::tensor<float> values(page.tokens, cache.shape(i).kv_heads,
                                                   cache.shape(i).head_dim);
                        r.sequence.dequantize(i, tensor::value, page.first_token, values.view());
                        const std::size_t row =
                            values.values().size() / static_cast<std::size_t>(page.tokens);
                        for (std::size_t v = 0; v < values.values().size(); ++v) {
                            const auto want = static_cast<float>(
                                r.numbers[static_cast<std::size_t>(page.first_token) + v / row]);
                            if (!(std::abs(values.values()[v] - want) <= 0.02f * want))
                                FAIL("value ", values.values()[v], " of a token of ", want);
                        }
                    }
                    REQUIRE(end == tokens);
                    REQUIRE(gaps <= (window ? 1 : 0));
                }
            }
        }
    }
}

TEST_CASE("pages on both sides of a gap are not repacked into one") {
    // A page of a sink that was spliced in is as large as any that could take its place, so it stays, and the
    // window leaves it.
    kvq::layer of = kvq::sliding_attention(1, {1, 4});
    kvq::cache cache({of}, {.keys = {format_of<kvq::int8>()},
                            .sinks = 1,
                            .page_tokens = 64,
                            .rollback = 0,
                            .rotary = {kvq::rotary_embedding{.dims = 4}},
                            .repack = 0.5f});
    test::generator random(9);
    const auto x = test::random_tensor(random, 384, 1, 4);
    auto s = cache.new_sequence(), other = cache.new_sequence();
    other.append(0, x.slice(0, 7), x.slice(0, 7));
    s.append(0, x.slice(0, 1), x.slice(0, 1));
    s.splice(other, 0, 1);
    s.append(0, x.view(), x.view());
    s.trim(s.trim_limit());
    CHECK(s.tokens() == 323);
    const auto last = s.pages(0).at(s.pages(0).entries() - 1);
    CHECK(last.first_token == 322);
    CHECK(last.tokens == 1);
}

TEST_CASE("a sink of another sequence that takes the place of a missing one stays") {
    kvq::layer of = kvq::sliding_attention(37, {1, 16});
    of.sinks = 3;
    kvq::cache cache({of}, {.keys = {format_of<kvq::int8>()},
                            .sinks = 3,
                            .page_tokens = 16,
                            .rollback = 0,
                            .rotary = {kvq::rotary_embedding{.dims = 16}},
                            .repack = 0.5f});
    test::generator random(10);
    const auto x = test::random_tensor(random, 90, 1, 16);
    auto s = cache.new_sequence(), other = cache.new_sequence();
    other.append(0, x.slice(0, 5), x.slice(0, 5));
    s.append(0, x.slice(0, 2), x.slice(0, 2));
    s.splice(other, 2, 3);
    s.append(0, x.view(), x.view());
    CHECK(s.holds(0, 0, 3));
    CHECK_FALSE(s.holds(0, 3, 4));
}

TEST_CASE("footprint and budget of layers that differ are what is allocated") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(12); ++round) {
        CAPTURE(round);
        test::counting_resource memory;
        kvq::cache_options options = mixed_options(random);
        const auto layers = random_layers(random, options.sinks);
        expect_latents(options, layers);
        const kvq::budget_use use{
            .tokens = 90, .sequences = 1, .chunk = 30, .cross_tokens = random.between(1, 80)};
        const kvq::attention_use cross{.cross_tokens = use.cross_tokens};
        options.byte_budget = kvq::budget(options, layers, use);
        options.memory = &memory;
        kvq::cache cache(layers, options);
        auto sequence = cache.new_sequence();
        kvq::workspace space;
        for (int i = 0; i < cache.layer_count(); ++i) {
            if (!cache.geometry(i).window.cross) continue;
            const kvq::cache_shape& shape = cache.shape(i);
            const auto k = test::random_tensor(random, use.cross_tokens, shape.kv_heads, shape.head_dim);
            const auto v =
                test::random_tensor(random, use.cross_tokens, shape.kv_heads, shape.dim(tensor::value));
            sequence.append(i, k.view(), v.view());
        }
        for (int n = 0; sequence.tokens() < use.tokens;) {
            CAPTURE(sequence.tokens());
            REQUIRE(kvq::footprint(cache, sequence.tokens(), 1, cross).total == memory.bytes());
            REQUIRE(sequence.usage().bytes == memory.bytes());
            n = std::min(random.between(1, use.chunk), use.tokens - sequence.tokens());
            const kvq::step_request step{&sequence, n, 0};
            cache.reserve(std::span(&step, 1), 6, 1, space);  // within the budget
            memory.arm(0);                                    // the step itself takes nothing
            const bool prompt = random.one_in(2);
            for (int i = 0; i < cache.layer_count(); ++i) {
                const bool reads = cache.owner(i) != i;
                if (cache.geometry(i).window.cross || (reads && (!prompt || random.one_in(4)))) continue;
                const kvq::cache_shape& shape = cache.shape(i);
                const auto k = test::random_tensor(random, n, shape.kv_heads, shape.head_dim);
                const int values = cache.tensors(i).size() == 2 ? n : 0;
                const auto v = test::random_tensor(random, values, shape.kv_heads, shape.dim(tensor::value));
                test::tensor<float> none(0, shape.kv_heads, shape.dim(tensor::value));
                const int rows = reads ? 0 : n;
                if (prompt)
                    sequence.prefill(i, k.slice(0, rows), v.slice(0, std::min(rows, values)), k.slice(0, 0),
                                     none.view(), kvq::causal{}, kvq::serial_executor{}, space);
                else
                    sequence.append(i, k.view(), v.view());
            }
            sequence.trim(sequence.tokens());  // what waits for layers that share it
            memory.arm(test::counting_resource::never);
        }
        REQUIRE(kvq::footprint(cache, use.tokens, 1, cross).total == memory.bytes());
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
    refused({}, "a cache has 1 to 65536 layers, got 0");
    refused(std::vector<kvq::layer>(65537, good), "a cache has 1 to 65536 layers, got 65537");
    refused({good, kvq::full_attention({0, 64})}, "layer 1, full attention of 0 x 64");
    refused({good, kvq::full_attention({1, 1 << 21})}, "layer 1, full attention of 1 x 2097152");
    kvq::layer wrong = good;
    wrong.window = 9;
    refused({wrong}, "layer 0, full attention of 2 x 64: it has a window of 9 tokens and 0 sinks");
    refused({good, kvq::sliding_attention(0, good)},
            "layer 1, sliding window of 0, 2 x 64: a window has 1 to");
    refused({good, kvq::chunked_attention(-3, good)}, "layer 1, chunks of -3, 2 x 64: a window has 1 to");
    wrong = kvq::sliding_attention(9, good);
    wrong.sinks = 1;
    refused({wrong}, "layer 0, sliding window of 9, 2 x 64: its queries see 1 sinks, the cache has 0");
    wrong.sinks = -1;
    refused({wrong}, "it has a window of 9 tokens and -1 sinks");
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

TEST_CASE("what a layer with a window cannot do is refused with its number, and changes nothing") {
    kvq::cache_options options{.keys = {format_of<kvq::int8>()}, .sinks = 2, .page_tokens = 8, .rollback = 4};
    options.rotary = {kvq::rotary_embedding{.dims = 8}};
    kvq::cache cache(
        {kvq::full_attention({1, 8}), kvq::sliding_attention(10, {1, 8}), kvq::chunked_attention(16, {1, 8})},
        options);
    test::generator random(2);
    const auto x = test::random_tensor(random, 60, 1, 8);
    auto s = cache.new_sequence();
    for (int i = 0; i < 3; ++i) s.append(i, x.slice(0, 47), x.slice(0, 47));
    // Whole pages of 8 behind 2 sinks: 47 - 1 - 4 - 10 + 1 = 33, and 32 is the last multiple of 16 up to 42.
    CHECK_FALSE(s.holds(1, 25, 26));
    CHECK(s.holds(1, 26, 47));
    CHECK(s.holds(1, 0, 2));
    CHECK_FALSE(s.holds(2, 25, 26));
    CHECK(s.holds(2, 26, 47));
    CHECK(s.holds(0, 0, 47));
    CHECK(s.trim_limit() == 35);
    CHECK(s.can_trim(35));
    CHECK_FALSE(s.can_trim(34));
    CHECK(s.can_trim(0));
    const std::size_t bytes = s.usage().bytes;
    const auto file = test::saved(s);
    const auto refused = [&](auto&& call, const char* part) {
        const std::string message = test::message_of(call);
        INFO(message);
        CHECK(test::contains(message, part));
        CHECK(s.tokens() == 47);
        CHECK(s.usage().bytes == bytes);
        CHECK(test::saved(s) == file);
    };
    refused([&] { s.trim(34); },
            "cannot trim to 34 tokens: layer 1, sliding window of 10, 1 x 8, holds tokens from 26 on of 47, "
            "the next "
            "token must see those from 25 on; the limit is 35");
    refused([&] { s.erase(30, 45); }, "layer 1, sliding window of 10, 1 x 8");
    refused([&] { s.splice(s, 3, 9); },
            "cannot splice tokens 3 to 9: layer 1, sliding window of 10, 1 x 8, has freed tokens 2 to 26");
    test::tensor<float> out(12, 1, 8);
    refused([&] { s.dequantize(2, tensor::key, 20, out.view()); }, "layer 2, chunks of 16, 1 x 8, has freed");
    refused([&] { s.attend(1, x.slice(0, 13), test::tensor<float>(13, 1, 8).view()); },
            "layer 1, sliding window of 10, 1 x 8: a query at position 34 sees tokens from 25 on");
    refused([&] { s.attend(1, x.slice(0, 12), out.view(), kvq::cross_attention{}); }, "need positions");
    refused([&] { kvq::ring ring(s.fork(), {.window = 5}); },
            "a ring needs layers that hold all of their tokens, not layer 1, sliding window of 10");
    refused([&] { (void)cache.shape(); }, "not all layers of the cache hold all of their tokens: layer 1");
    kvq::cache_options longer = options;
    longer.page_tokens = 16;
    kvq::cache other(cache.layers(), longer);
    refused([&] { test::restored(other, file, {.convert = true}); },
            "layer 1, sliding window of 10, 1 x 8, has freed tokens 2 to 26 of the saved sequence");
    kvq::cache wider(
        {kvq::full_attention({1, 8}), kvq::sliding_attention(11, {1, 8}), kvq::chunked_attention(16, {1, 8})},
        options);
    refused([&] { test::restored(wider, file); },
            "window 10, the cache 11, in layer 1, sliding window of 11");
    s.trim(35);
    CHECK(s.tokens() == 35);
    s.trim(0);
    CHECK(s.tokens() == 0);
    CHECK(s.trim_limit() == 0);
}

TEST_CASE("what a layer that reads another one cannot do is refused with its number, and changes nothing") {
    kvq::cache_options options{.keys = {format_of<kvq::int8>()}, .sinks = 2, .page_tokens = 8};
    const auto refused = [&](const std::vector<kvq::layer>& layers, const char* part) {
        const std::string message = test::message_of([&] { kvq::cache cache(layers, options); });
        INFO(message);
        CHECK(test::contains(message, part));
    };
    const kvq::layer good = kvq::full_attention({2, 8});
    refused({good, kvq::shared_with(1)},
            "layer 1, shared with layer 1, 0 x 0: a layer shares with one before it");
    refused({good, kvq::shared_with(2), good}, "layer 1, shared with layer 2");
    refused({good, kvq::shared_with(-1)}, "layer 1, shared with layer -1");
    refused({good, kvq::shared_with(0), kvq::shared_with(1)},
            "layer 2, shared with layer 1, 0 x 0: it needs one with keys and values of its own text, not "
            "layer 1, shared with layer 0, 2 x 8");
    refused({kvq::state_layer({{.name = "s"}}), kvq::shared_with(0)}, "not layer 0, state of 1 parts");
    kvq::layer wrong = kvq::shared_with(0);
    wrong.kv_heads = 2;
    wrong.head_dim = 4;
    refused({good, wrong},
            "layer 1, shared with layer 0, 2 x 4: it has the shape of layer 0, full attention of 2 x 8");
    wrong = kvq::shared_with(0);
    wrong.window = 9;
    refused({good, wrong},
            "layer 1, shared with layer 0, 0 x 0: its owner says the window, not 9 tokens and 0 sinks");
    wrong = good;
    wrong.owner = 1;
    refused({good, wrong}, "layer 1, full attention of 2 x 8: it shares no keys and values with layer 1");

    kvq::cache cache({good, kvq::shared_with(0), kvq::shared_with(0)}, options);
    CHECK_FALSE(cache.has_equal_layers());
    test::generator random(6);
    const auto x = test::random_tensor(random, 40, 2, 8);
    const auto none = x.slice(0, 0);
    auto s = cache.new_sequence();
    test::tensor<float> out(20, 2, 8);
    const auto raised = [&](auto&& call, const char* part) {
        const std::size_t bytes = s.usage().bytes;
        const int held = s.tokens();
        const std::string message = test::message_of(call);
        INFO(message);
        CHECK(test::contains(message, part));
        CHECK(s.tokens() == held);
        CHECK(s.usage().bytes == bytes);
    };
    const auto q = x.slice(0, 20);
    raised([&] { (void)cache.shape(); }, "not all layers of the cache hold all of their tokens: layer 1");
    raised([&] { s.append(1, x.view(), x.view()); },
           "layer 1, shared with layer 0, 2 x 8: it takes no keys and values");
    raised([&] { s.append_draft(2, x.slice(0, 1), x.slice(0, 1)); }, "layer 2, shared with layer 0, 2 x 8");
    raised([&] { s.prefill(1, q, q, q, out.view()); },
           "it takes queries only, not k of 20 and v of 20 tokens");
    raised([&] { s.prefill(1, none, none, x.slice(0, 1), test::tensor<float>(1, 2, 8).view()); },
           "layer 1, shared with layer 0, 2 x 8: no chunk of that layer waits for it");
    raised([&] { kvq::send_pages(s, 1, [](const void*, std::size_t) {}); },
           "layer 1, shared with layer 0, 2 x 8: it has no pages of tokens, those of its owner");
    s.prefill(0, q, q, q, out.view());
    const auto first = out.values();
    CHECK(s.tokens(2) == 20);
    // All of the chunk is 16 bit, and counted.
    CHECK(s.usage().quantized == 0);
    CHECK(s.usage().bytes == cache.bytes_in_use() + s.usage().bookkeeping + s.usage().workspace -
                                 s.usage().pages * sizeof(kvq::page));
    raised([&] { (void)kvq::usage_rows(s); },
           "layer 0, full attention of 2 x 8: its last chunk waits in 16 bit for the layers that share it; "
           "trim() to "
           "20, all tokens, commits it");
    raised([&] { s.prefill(1, none, none, x.slice(0, 21), test::tensor<float>(21, 2, 8).view()); },
           "q has 21 tokens but layer 1 holds 20");
    s.prefill(2, none, none, q, out.view());
    CHECK(out.values() == first);
    raised([&] { s.prefill(2, none, none, q, out.view()); }, "layer 2, shared with layer 0, 2 x 8: no chunk");
    // A fork waits for its own layers, wherever it goes.
    auto fork = std::make_unique<kvq::sequence>(s.fork());
    kvq::sequence moved = std::move(*fork);
    fork.reset();
    for (kvq::sequence* const one : {&s, &moved}) {
        one->prefill(1, none, none, q, out.view());
        CHECK(out.values() == first);
        CHECK(one->usage().quantized > 0);
    }
    CHECK(test::saved(moved) == test::saved(s));
    kvq::cache_options longer = options;
    longer.page_tokens = 2 * options.page_tokens;
    kvq::cache longer_pages(cache.layers(), longer);
    CHECK(test::restored(longer_pages, test::saved(s), {.convert = true}).tokens(2) == 20);
    // Without memory for the quantized pages a trim leaves them in 16 bit, and changes nothing else.
    kvq::cache_options tight = options;
    {
        auto other = cache.new_sequence();
        const std::size_t before = cache.bytes_in_use();
        other.prefill(0, q, q, q, out.view());
        tight.byte_budget = cache.bytes_in_use() - before;
    }
    kvq::cache small({good, kvq::shared_with(0)}, tight);
    auto t = small.new_sequence();
    t.prefill(0, q, q, q, out.view());
    CHECK(out.values() == first);
    CHECK(small.bytes_in_use() == tight.byte_budget);
    test::tensor<float> again(20, 2, 8);
    CHECK_THROWS_AS(t.prefill(1, none, none, q, again.view()), kvq::out_of_memory);
    t.trim(20);
    CHECK(t.usage().quantized == 0);
    t.attend(1, q, again.view());
    CHECK(again.values() == first);
    t.trim(12);
    CHECK(t.tokens(1) == 12);
    CHECK(t.usage().quantized > 0);
}

TEST_CASE("what is refused leaves a chunk waiting for the layers that share it") {
    kvq::cache_options options{.keys = {format_of<kvq::int8>()}, .sinks = 2, .page_tokens = 8};
    options.rotary = {kvq::rotary_embedding{}};
    kvq::cache cache({kvq::full_attention({2, 8}), kvq::shared_with(0), kvq::full_attention({2, 8})},
                     options);
    kvq::cache another(cache.layers(), options);
    INFO("KVQ_SEED=", test::seed());
    test::generator random(test::seed());
    const auto x = test::random_tensor(random, 40, 2, 8);
    const auto prompt = x.slice(0, 30), none = x.slice(0, 0);
    test::tensor<float> out(30, 2, 8);
    auto waiting = cache.new_sequence(), drafting = cache.new_sequence(), other = another.new_sequence();
    waiting.prefill(0, prompt, prompt, prompt, out.view());
    const auto first = out.values();
    waiting.append(2, prompt, prompt);
    for (const int layer : {0, 2}) {
        drafting.append(layer, prompt, prompt);
        drafting.append_draft(layer, x.slice(0, 3), x.slice(0, 3));
    }
    other.append(0, prompt, prompt);
    const auto refused = [&](auto&& call, const char* part) {
        const std::string message = test::message_of(call);
        INFO(message);
        CHECK(test::contains(message, part));
        CHECK(kvq::detail::sequence_access::waits(waiting));
    };
    kvq::workspace space;
    const auto requantize = [&](std::vector<kvq::sequence*> all, int key) {
        cache.requantize(all, {.key = key}, {}, kvq::serial_executor{}, space);
    };
    refused([&] { requantize({&waiting}, 7); }, "key format 7 is not among");
    refused([&] { requantize({&waiting, &drafting}, 0); }, "holds a draft of 3");
    refused([&] { requantize({&waiting, &other}, 0); }, "sequence 1 of the request belongs to another cache");
    kvq::step_down_policy policy;
    policy.tiers = {{0, {}}};
    const auto step_down = [&](std::vector<kvq::sequence*> all) { kvq::step_down(cache, all, policy); };
    refused([&] { step_down({&waiting, &drafting}); }, "holds a draft of 3");
    refused(
        [&] {
            step_down({&waiting, &other});
        },
        "sequence 1 of those to step down belongs to another cache");
    auto fork = waiting.fork();
    refused([&] { waiting.splice(fork, 0, 30); }, "its last chunk waits in 16 bit");
    waiting.prefill(1, none, none, prompt, out.view());
    CHECK(out.values() == first);
    // A request that is met counts the bytes behind the commit.
    CHECK(kvq::detail::sequence_access::waits(fork));
    const kvq::requantize_report report = cache.requantize(fork, {.key = 0});
    CHECK(report.bytes_after == report.bytes_before);
    CHECK(report.bytes_after == cache.bytes_in_use());
}

struct failing_executor {
    int concurrency() const { return 1; }
    template <class F>
    void parallel_for(int, F&&) {
        throw std::bad_alloc();
    }
};

TEST_CASE("a step that fails leaves a chunk waiting for the layers that share it") {
    INFO("KVQ_SEED=", test::seed());
    test::generator random(test::seed());
    const auto x = test::random_tensor(random, 100, 2, 8);
    const auto q = x.slice(0, 1);
    test::tensor<float> out(1, 2, 8);
    for (int round = 0; round < 60; ++round) {
        CAPTURE(round);
        test::counting_resource memory;
        kvq::cache_options options{.keys = {format_of<kvq::int8>()},
                                   .sinks = 2,
                                   .recent = random.between(0, 20),
                                   .page_tokens = 8,
                                   .rollback = random.between(0, 12),
                                   .memory = &memory};
        kvq::cache cache({random.one_in(2) ? kvq::sliding_attention(random.between(1, 60), {2, 8})
                                           : kvq::full_attention({2, 8}),
                          kvq::shared_with(0), kvq::shared_with(0)},
                         options);
        const int first = random.between(1, 60), n = random.between(1, 30);
        const auto text = x.slice(0, first), none = x.slice(0, 0);
        auto s = cache.new_sequence();
        s.prefill(0, x.slice(60, 10), x.slice(60, 10), q, out.view());
        s.prefill(0, text, text, q, out.view());
        const auto expected = out.values();
        s.prefill(1, none, none, q, out.view());
        kvq::workspace space(&memory);
        const auto prefill = [&](auto&& executor) {
            cache.prefill(0, std::vector<kvq::prefill_request>{{&s, text, text, q, out.view(), {}}},
                          kvq::causal{}, executor, space);
        };
        const auto unchanged = [&] {
            CHECK(s.tokens() == first + 10);
            CHECK(test::contains(test::message_of([&] { s.prefill(1, none, none, q, out.view()); }),
                                 "no chunk of that layer waits"));
            auto fork = s.fork();
            fork.prefill(2, none, none, q, out.view());
            CHECK(out.values() == expected);
        };
        unchanged();
        if (round % 3 == 0) {
            CHECK_THROWS_AS(prefill(failing_executor{}), std::bad_alloc);
            unchanged();
        }
        CHECK(test::fail_everywhere(
                  memory,
                  [&] {
                      const auto more = x.slice(70, n);
                      if (round % 3 == 0)
                          prefill(kvq::serial_executor{});
                      else if (round % 3 == 1)
                          s.append(0, more, more);
                      else
                          s.append_draft(0, more, more);
                  },
                  unchanged) > 0);
    }
}

TEST_CASE(
    "while a chunk waits, append_bytes() and prefill_bytes() bound what its commit and new tokens take") {
    INFO("KVQ_SEED=", test::seed());
    test::generator random(test::seed());
    const auto x = test::random_tensor(random, 150, 1, 8);
    test::tensor<float> out(1, 1, 8);
    const auto q = x.slice(0, 1);
    for (int round = 0; round < 300; ++round) {
        const int window = random.between(1, 60), first = random.between(1, 150), n = random.between(1, 150);
        const bool forks = random.one_in(2), prefills = random.one_in(2);
        CAPTURE(round);
        kvq::cache_options options{.keys = {format_of<kvq::int8>()},
                                   .sinks = 2,
                                   .recent = random.between(0, 20),
                                   .page_tokens = 8,
                                   .rollback = random.between(0, 12)};
        // The second time with no byte more.
        for (int turn = 0; turn < 2; ++turn) {
            kvq::cache cache({kvq::sliding_attention(window, {1, 8}), kvq::shared_with(0)}, options);
            auto s = cache.new_sequence();
            s.prefill(0, x.slice(0, first), x.slice(0, first), q, out.view());
            const auto fork = forks ? s.fork() : cache.new_sequence();
            options.byte_budget = cache.bytes_in_use() + (prefills ? s.prefill_bytes(n) : s.append_bytes(n));
            if (prefills)
                s.prefill(0, x.slice(0, n), x.slice(0, n), q, out.view());
            else
                s.append(0, x.slice(0, n), x.slice(0, n));
            REQUIRE(s.tokens() == first + n);
        }
    }
}

TEST_CASE("pages of a window behind a long text keep their sharing when they change") {
    // More pages have left the window than a table counts.
    const std::array<int, 2> tokens{70000, 70005};
    const int window = 40;
    kvq::cache cache(
        {kvq::sliding_attention(window, {1, 8})},
        {.keys = {format_of<kvq::int8>(), format_of<kvq::affine<4>>()}, .page_tokens = 1, .rollback = 0});
    const test::tensor<float> x(tokens[0], 1, 8);
    auto s = cache.new_sequence();
    s.append(0, x.view(), x.view());
    auto fork = s.fork();
    fork.append(0, x.slice(0, tokens[1] - tokens[0]), x.slice(0, tokens[1] - tokens[0]));
    kvq::sequence* const both[] = {&s, &fork};
    kvq::workspace space;
    const auto pages = static_cast<std::size_t>(window + tokens[1] - tokens[0]);
    CHECK(cache.plan_requantize(both, {.key = 1}).pages == pages);
    CHECK(cache.requantize(both, {.key = 1}, {}, kvq::serial_executor{}, space).pages == pages);
}

TEST_CASE("a sequence that was moved from is refused, or has nothing to change") {
    kvq::cache cache({kvq::full_attention({2, 8}), kvq::shared_with(0)}, {.keys = {format_of<kvq::int8>()}});
    auto moved = cache.new_sequence();
    const auto held = std::move(moved);
    moved.trim(0);
    moved.drop_copies();
    const auto refused = [&](auto&& call, const char* part) {
        const std::string message = test::message_of(call);
        INFO(message);
        CHECK(test::contains(message, part));
    };
    const char* const no_layers = "a sequence that was moved from has no layers";
    refused([&] { cache.requantize(moved, {}); }, no_layers);
    refused([&] { kvq::step_down(cache, moved, {}); }, no_layers);
    refused([&] { (void)test::saved(moved); }, no_layers);
    kvq::workspace space;
    const kvq::step_request one{&moved, 1, 1};
    refused([&] { cache.reserve(std::span(&one, 1), 2, 1, space); }, "layer 0 is not among the 0 layers");
}

TEST_CASE("cross attention is appended once, shared by forks, and no part of the sequence's text") {
    kvq::cache_options options{.keys = {format_of<kvq::int8>()}, .recent = 8, .page_tokens = 8};
    kvq::cache cache({kvq::full_attention({1, 8}), kvq::cross_layer({2, 16, 4})}, options);
    INFO("KVQ_SEED=", test::seed());
    test::generator random(test::seed());
    const auto x = test::random_tensor(random, 30, 1, 8);
    const auto k = test::random_tensor(random, 50, 2, 16), v = test::random_tensor(random, 50, 2, 4),
               q = test::random_tensor(random, 70, 2, 16);
    auto s = cache.new_sequence();
    s.append(1, k.view(), v.view());
    CHECK(s.tokens() == 0);
    CHECK(s.tokens(1) == 50);
    const std::size_t bytes = cache.bytes_in_use();
    std::vector<kvq::sequence> beams;
    for (int i = 0; i < 4; ++i) beams.push_back(s.fork());
    CHECK(cache.bytes_in_use() == bytes);
    test::tensor<float> out(70, 2, 4), want(70, 2, 4);
    s.attend(1, q.view(), out.view());
    for (int i = 0; i < 4; ++i) {
        beams[static_cast<std::size_t>(i)].append(0, x.slice(i, 20), x.slice(i, 20));
        beams[static_cast<std::size_t>(i)].trim(i);
        beams[static_cast<std::size_t>(i)].attend(1, q.view(), want.view());
        CHECK(out.values() == want.values());
    }
    // Also under causal attention, which is the default, and in a file with other pages.
    s.attend(1, q.view(), want.view(), kvq::cross_attention{});
    CHECK(out.values() == want.values());
    s.append(0, x.view(), x.view());
    kvq::cache_options longer = options;
    longer.page_tokens = 16;
    kvq::cache other(cache.layers(), longer);
    const auto again = test::restored(other, test::saved(s), {.convert = true});
    CHECK(again.tokens() == 30);
    CHECK(again.tokens(1) == 50);
    again.attend(1, q.view(), want.view());
    for (std::size_t i = 0; i < out.values().size(); ++i)
        CHECK(out.values()[i] == doctest::Approx(want.values()[i]).epsilon(0.05));
    const auto refused = [&](auto&& call, const char* part) {
        const std::string message = test::message_of(call);
        INFO(message);
        CHECK(test::contains(message, part));
        CHECK(s.tokens(1) == 50);
    };
    refused([&] { s.append(1, k.view(), v.view()); },
            "layer 1, cross attention of 2 x 16 and 4: it has its 50 tokens, all of which are appended in "
            "one call, "
            "and takes no 50 more");
    refused([&] { s.append_draft(1, k.slice(0, 2), v.slice(0, 2)); },
            "layer 1, cross attention of 2 x 16 and 4: it takes no drafts");
    refused([&] { s.splice(beams[0], 0, 0); }, "layer 1, cross attention of 2 x 16 and 4: tokens of another");
    refused([&] { kvq::prefix_cache store(cache); },
            "layer 1, cross attention of 2 x 16 and 4: a prefix cache");
    refused([&] { kvq::sequence_table table(cache, 2); },
            "layer 1, cross attention of 2 x 16 and 4: a table");
    refused([&] { kvq::ring ring(s.fork(), {.window = 5}); }, "a ring needs layers that hold all");
    refused([&] { (void)cache.shape(); }, "several shapes");
    refused(
        [&] {
            kvq::cache wrong({kvq::cross_layer({1, 8}), kvq::shared_with(0)}, options);
        },
        "not layer 0, cross attention of 1 x 8");
    kvq::layer windowed = kvq::cross_layer({1, 8});
    windowed.window = 4;
    refused([&] { kvq::cache wrong({windowed}, options); }, "cross attention of 1 x 8: it has a window of 4");
    CHECK(kvq::footprint(cache, 30, 1, {.cross_tokens = 50}).total == s.usage().bytes);
    CHECK(kvq::longest_context(cache, 60000, 1, {.cross_tokens = 500}) <
          kvq::longest_context(cache, 60000, 1, {.cross_tokens = 50}));
}

TEST_CASE("the limit of trims counts the snapshots of layers with state") {
    kvq::cache cache({kvq::sliding_attention(10, {1, 8}), kvq::state_layer({{.name = "s"}})},
                     {.keys = {format_of<kvq::int8>()}, .sinks = 2, .page_tokens = 8, .rollback = 4});
    INFO("KVQ_SEED=", test::seed());
    test::generator random(test::seed());
    const auto x = test::random_tensor(random, 60, 1, 8);
    int limited = 0, none_in_reach = 0;
    for (int turn = 0; turn < 200; ++turn) {
        auto s = cache.new_sequence();
        const auto compare = [&] {
            int limit = s.tokens() + 1;
            while (limit > 0 && s.can_trim(limit - 1)) --limit;
            REQUIRE(s.trim_limit() == limit);
            limited += limit > 0;
            none_in_reach += limit > s.tokens();
        };
        while (s.tokens() < 48) {
            const int n = random.between(1, 12);
            s.append(0, x.slice(0, n), x.slice(0, n));
            compare();
            s.state().part(1, 0);
            compare();
            s.state().advance(n);
            compare();
            if (random.between(0, 3) == 0) s.state().snapshot(s.tokens());
            compare();
        }
    }
    CHECK(limited > 0);
    CHECK(none_in_reach > 0);
}

TEST_CASE(
    "a file that says wrong shapes, or that freed what it did not, is refused even under a right seal") {
    const kvq::cache_options options{
        .keys = {format_of<kvq::int8>()}, .sinks = 2, .page_tokens = 8, .rollback = 4};
    kvq::cache cache({kvq::full_attention({1, 8}), kvq::sliding_attention(10, {1, 8}),
                      kvq::chunked_attention(16, {1, 8}), kvq::shared_with(1), kvq::cross_layer({1, 8})},
                     options);
    test::generator random(5);
    const auto x = test::random_tensor(random, 47, 1, 8);
    auto s = cache.new_sequence();
    for (const int i : {0, 1, 2, 4}) s.append(i, x.view(), x.view());
    const auto file = test::saved(s);
    const std::size_t start = 8 + static_cast<std::size_t>(kvq::detail::load_as<std::uint64_t>(file.data()));
    std::map<std::string, std::size_t> at;
    std::map<std::string, std::size_t> bytes;
    for (const auto& t : kvq::read_safetensors_header(test::memory_source{file}).tensors) {
        at[t.name] = start + static_cast<std::size_t>(t.begin);
        bytes[t.name] = static_cast<std::size_t>(t.end - t.begin);
    }
    const std::size_t pages = cache.pool().pages_in_use();
    int refused = 0;
    for (const char* name : {"shapes", "freed", "tokens"})
        for (std::size_t i = 0; i < bytes.at(name) / 4; ++i)
            for (const std::int32_t n : {-1, 0, 1, 2, 3, 4, 5, 9, 17, 46, 47, 1 << 30, -(1 << 30)}) {
                test::file_bytes changed = file;
                std::byte* const place = changed.data() + at.at(name) + 4 * i;
                if (kvq::detail::load_as<std::int32_t>(place) == n) continue;
                kvq::detail::store_as(place, n);
                kvq::detail::store_as(changed.data() + at.at("seal"),
                                      kvq::crc32c::of(changed.data(), at.at("seal")));
                INFO(name, " ", i, " ", n);
                const std::string message = test::message_of([&] { test::restored(cache, changed); });
                CHECK(!message.empty());
                ++refused;
            }
    CHECK(refused > 200);
    CHECK(cache.pool().pages_in_use() == pages);
    // A text may be long, but a few hundred bytes take no gigabytes.
    kvq::cache_options bounded = options;
    test::counting_resource memory;
    bounded.memory = &memory;
    kvq::cache window({kvq::sliding_attention(10, {1, 8})}, bounded);
    auto early = window.new_sequence();
    early.append(0, x.view(), x.view());
    auto late = test::saved(early);
    const std::size_t late_start =
        8 + static_cast<std::size_t>(kvq::detail::load_as<std::uint64_t>(late.data()));
    std::size_t seal = 0;
    for (const auto& t : kvq::read_safetensors_header(test::memory_source{late}).tensors) {
        std::byte* const place = late.data() + late_start + t.begin;
        const auto add = [](std::byte* number) {
            kvq::detail::store_as(number, kvq::detail::load_as<std::int32_t>(number) + (1 << 30));
        };
        if (t.name == "tokens") add(place);
        if (t.name == "freed") add(place + 4);
        if (t.name == "seal") seal = late_start + static_cast<std::size_t>(t.begin);
    }
    kvq::detail::store_as(late.data() + seal, kvq::crc32c::of(late.data(), seal));
    memory.reset_peak();
    auto restored = test::restored(window, late);
    restored.append(0, x.slice(0, 20), x.slice(0, 20));
    CHECK(restored.tokens() == 47 + 20 + (1 << 30));
    CHECK(memory.peak() < std::size_t{64} << 20);
}

TEST_CASE("a prefix cache finds what its entries can be trimmed to") {
    const kvq::cache_options options{.keys = {format_of<kvq::int8>()}, .page_tokens = 8, .rollback = 2};
    kvq::cache cache({kvq::full_attention({1, 8}), kvq::sliding_attention(10, {1, 8})}, options);
    kvq::prefix_cache store(cache, {.min_prefix_tokens = 4});
    test::generator random(3);
    std::vector<kvq::token_id> ids(60);
    for (kvq::token_id& id : ids) id = random.between(0, 9);
    const auto x = test::random_tensor(random, 60, 1, 8);
    const std::span<const kvq::token_id> all(ids);
    for (const int n : {20, 50}) {
        auto s = cache.new_sequence();
        for (int i = 0; i < 2; ++i) s.append(i, x.slice(0, n), x.slice(0, n));
        CHECK(store.store(all.first(static_cast<std::size_t>(n)), s) == kvq::store_outcome::stored);
    }
    CHECK(store.entries() == 2);  // the longer one cannot be trimmed to the shorter one
    const auto fetched = [&](int n) {
        auto f = store.fetch(all.first(static_cast<std::size_t>(n)));
        CHECK(f.sequence.tokens() == f.tokens);
        CHECK(store.lookup(all.first(static_cast<std::size_t>(n))).tokens == f.tokens);
        return f.tokens;
    };
    CHECK(fetched(50) == 50);
    CHECK(fetched(60) == 50);
    CHECK(fetched(49) == 49);
    CHECK(fetched(30) == 20);
    CHECK(fetched(20) == 20);
    CHECK(fetched(12) == 0);
}

TEST_CASE("a drafted tree sees within a window what its paths would see as accepted text") {
    INFO("KVQ_SEED=", test::seed());
    test::generator random(test::seed());
    for (int round = 0; round < test::rounds(20); ++round) {
        CAPTURE(round);
        kvq::layer of{1, 8};
        of.sinks = random.between(0, 2);
        const int window = random.between(1, 40);
        kvq::cache cache(
            {random.one_in(2) ? kvq::chunked_attention(window, of) : kvq::sliding_attention(window, of)},
            {.keys = {format_of<kvq::full<kvq::float16>>()}, .sinks = 2, .page_tokens = 8, .rollback = 3});
        const int n = random.between(1, 60), drafted = random.between(1, 64);
        const auto x = test::random_tensor(random, n + drafted, 1, 8),
                   q = test::random_tensor(random, drafted, 1, 8);
        auto s = cache.new_sequence();
        s.append(0, x.slice(0, n), x.slice(0, n));
        auto draft = s.fork();
        draft.append_draft(0, x.slice(n, drafted), x.slice(n, drafted));
        std::vector<int> parents;
        for (int i = 0; i < drafted; ++i)
            parents.push_back(random.one_in(3) ? i - 1 : random.between(-1, i - 1));
        const kvq::token_tree tree(n, parents);
        test::tensor<float> out(drafted, 1, 8), want(1, 1, 8);
        if (random.one_in(2))
            draft.attend(0, q.view(), out.view(), tree);
        else
            draft.attend(0, q.view(), out.view(), kvq::mods{kvq::softcap{1000.0f}, tree});
        for (int some = 0; some < 6; ++some) {
            const int node = random.between(0, drafted - 1);
            std::vector<int> path;
            for (int i = node; i >= 0; i = tree.parent(i)) path.insert(path.begin(), i);
            auto accepted = s.fork();
            for (const int i : path) accepted.append(0, x.slice(n + i, 1), x.slice(n + i, 1));
            accepted.attend(0, q.slice(node, 1), want.view());
            for (std::size_t c = 0; c < 8; ++c)
                REQUIRE(std::abs(out.values()[static_cast<std::size_t>(node) * 8 + c] - want.values()[c]) <
                        0.02f);
        }
    }
}

TEST_CASE("entries of a prefix cache share pages that are equal, also where a window has freed more of one") {
    kvq::cache cache({kvq::sliding_attention(64, {1, 32})},
                     {.keys = {format_of<kvq::int8>()}, .page_tokens = 16, .rollback = 0});
    test::generator random(6);
    const auto x = test::random_tensor(random, 288, 1, 32);
    const std::vector<kvq::token_id> ids(288, 1);
    const auto prompt = [&](kvq::prefix_cache& store, int n) {
        auto s = cache.new_sequence();
        s.append(0, x.slice(0, n), x.slice(0, n));
        CHECK(store.store(std::span(ids).first(static_cast<std::size_t>(n)), s) ==
              kvq::store_outcome::stored);
        return store.bytes();
    };
    kvq::prefix_cache store(cache), longer(cache);
    const std::size_t one = prompt(store, 256), both = prompt(store, 288), other = prompt(longer, 288);
    CHECK(store.entries() == 2);
    CHECK(both < one + other);
    CHECK(both == one + 2 * (other / 4));  // two new pages of four
}

TEST_CASE("under a budget the oldest pages step down first, those of layers with windows after older ones") {
    kvq::cache cache(
        {kvq::full_attention({1, 32}), kvq::sliding_attention(100, {1, 32})},
        {.keys = {format_of<kvq::int8>(), format_of<kvq::affine<2>>()}, .page_tokens = 32, .rollback = 4});
    test::generator random(7);
    const auto x = test::random_tensor(random, 512, 1, 32);
    auto s = cache.new_sequence();
    for (int i = 0; i < 2; ++i) s.append(i, x.view(), x.view());
    for (std::size_t less = 500; less < 12000; less += 500) {
        auto one = test::restored(cache, test::saved(s));  // with pages of its own
        kvq::step_down_policy policy;
        policy.tiers = {{0, {0, 0}}, {1 << 20, {1, 1}}};
        policy.byte_budget = cache.bytes_in_use() - less;
        CHECK(kvq::step_down(cache, one, policy).fits);
        int wide = 1 << 20, narrow = 0;  // first token of the oldest wide page, of the newest narrow one
        for (int i = 0; i < 2; ++i)
            for (int e = 0; e < one.pages(i).entries(); ++e) {
                const auto page = one.pages(i).at(e);
                if (page.values->format == 1) wide = std::min(wide, page.first_token);
                if (page.keys->format == 2) narrow = std::max(narrow, page.first_token);
            }
        CHECK(narrow <= wide);
    }
}

TEST_CASE("a sequence that is emptied and filled again takes no more memory than the first time") {
    kvq::cache cache({kvq::sliding_attention(10, {1, 8}), kvq::chunked_attention(16, {1, 8})},
                     {.keys = {format_of<kvq::int8>()}, .sinks = 2, .page_tokens = 8, .rollback = 4});
    test::generator random(8);
    const auto x = test::random_tensor(random, 100, 1, 8);
    auto s = cache.new_sequence();
    std::size_t bytes = 0;
    for (int turn = 0; turn < 40; ++turn) {
        for (int i = 0; i < 2; ++i) s.append(i, x.view(), x.view());
        if (turn == 0) bytes = s.usage().bytes;
        CHECK(s.usage().bytes == bytes);
        CHECK(s.fork().usage().bytes == bytes);
        s.trim(turn % 3);
        if (turn % 3 > 0) s.trim(0);
    }
}

TEST_CASE("bytes of a model of windows and full layers, by formula and by allocation") {
    // 50 layers with windows and 10 full ones, as Gemma 4 31B has them, at an eighth of its heads and a short
    // context.
    test::counting_resource memory;
    kvq::cache_options options{.keys = {format_of<kvq::int8>()}, .sinks = 4, .recent = 32, .page_tokens = 32};
    options.memory = &memory;
    std::vector<kvq::layer> layers;
    for (int i = 0; i < 60; ++i)
        layers.push_back(i % 6 == 5 ? kvq::full_attention({1, 64}) : kvq::sliding_attention(64, {2, 32}));
    kvq::cache cache(layers, options);
    auto s = cache.new_sequence();
    test::generator random(4);
    const auto wide = test::random_tensor(random, 500, 1, 64),
               narrow = test::random_tensor(random, 500, 2, 32);
    const int n = 1700;
    for (int done = 0; done < n; done += 500)
        for (int i = 0; i < 60; ++i) {
            const auto rows = (i % 6 == 5 ? wide : narrow).slice(0, std::min(500, n - done));
            s.append(i, rows, rows);
        }
    const kvq::footprint_report f = kvq::footprint(cache, n);
    CHECK(f.total == memory.bytes());
    CHECK(f.total == s.usage().bytes);
    std::vector<kvq::layer> full = layers;
    for (kvq::layer& l : full) l = kvq::full_attention({l.kv_heads, l.head_dim});
    options.memory = std::pmr::get_default_resource();
    const kvq::footprint_report all = kvq::footprint(kvq::cache(full, options), n);
    CHECK(all.quantized > 4 * f.quantized);
    // The model itself, with 131072 tokens, in 16 bit with all layers full, and in 4 bits.
    std::vector<kvq::layer> model, no_windows;
    for (int i = 0; i < 60; ++i) {
        const kvq::layer shape{i % 6 == 5 ? 4 : 16, i % 6 == 5 ? 512 : 256};
        no_windows.push_back(kvq::full_attention(shape));
        model.push_back(i % 6 == 5 ? kvq::full_attention(shape) : kvq::sliding_attention(1024, shape));
    }
    const auto bytes_of = [](const std::vector<kvq::layer>& of, const kvq::format& keys,
                             const kvq::format& values) {
        kvq::cache_options o{.keys = {keys}, .values = {values}, .sinks = 4, .recent = 32};
        return static_cast<double>(kvq::footprint(kvq::cache(of, o), 131072).total);
    };
    const kvq::format fp16 = format_of<kvq::full<kvq::float16>>();
    const double std4 = bytes_of(model, format_of<kvq::std4::keys>(), format_of<kvq::std4::values>());
    CHECK(bytes_of(no_windows, fp16, fp16) > 36.0 * std4);
    CHECK(bytes_of(model, fp16, fp16) > 3.6 * std4);
    // The longest context: every length up to it fits, and the next one does not.
    const std::size_t budget = f.total * 3 / 2;
    const int longest_fit = kvq::longest_context(cache, budget);
    CHECK(longest_fit > n);
    CHECK(kvq::footprint(cache, longest_fit).total <= budget);
    // With chunks the longest lengths are those just before a chunk is freed.
    kvq::cache chunks({kvq::full_attention({1, 16}), kvq::chunked_attention(256, {4, 32})},
                      {.keys = {format_of<kvq::int8>()}, .recent = 8, .page_tokens = 32, .rollback = 4});
    const auto holds = [&](int tokens, std::size_t bytes) {
        const kvq::footprint_report of = kvq::footprint(chunks, tokens);
        return of.total + (tokens > 0 ? of.transient : 0) <= bytes;
    };
    for (std::size_t bytes = 60000; bytes < 400000; bytes += 17000) {
        CAPTURE(bytes);
        int most = -1;
        while (most < 3000 && holds(most + 1, bytes)) ++most;
        if (most < 3000) CHECK(kvq::longest_context(chunks, bytes) == most);
    }
}

}  // namespace layers_tests
