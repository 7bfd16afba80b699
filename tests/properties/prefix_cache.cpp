// SPDX-License-Identifier: MIT
// Comparison family: exact. A prefix cache does what a list of (tokens, sequence) pairs does that is searched
// from end to end; what it hands out is nobody else's; its bytes are the pool's.
#include <doctest/doctest.h>

#include <kvq/cache/sequence_access.hpp>
#include <kvq/policy/prefix_cache.hpp>
#include <list>
#include <thread>

#include "support/caches.hpp"
#include "support/memory.hpp"

using kvq::prefix_match;
using kvq::store_outcome;
using test::append;
using test::attention_bits;
using test::contents;

namespace prefix_cache_tests {

namespace {

/// Format 0 loses nothing, so that what a sequence holds can be compared with what was put in.
using two_widths = test::formats<kvq::full<float>, kvq::affine<8, kvq::per_token<16>>>;
using test_cache = test::typed_cache<two_widths, two_widths, test::usual, float>;
using sequence_type = test_cache::sequence_type;
using key = std::vector<kvq::token_id>;

constexpr kvq::cache_shape shape{.layers = 2, .kv_heads = 1, .head_dim = 8};
constexpr int vocabulary = 200;

/// K and V are functions of the token id.
void append_tokens(sequence_type& s, const test::stream& words, const key& tokens, int first) {
    for (auto i = static_cast<std::size_t>(first); i < tokens.size(); ++i)
        append(s, shape.layers, words, tokens[i], 1);
}
/// Does a sequence without loss hold these tokens, and no others?
bool holds(const sequence_type& s, const test::stream& words, const key& tokens) {
    if (s.tokens() != static_cast<int>(tokens.size())) return false;
    for (int layer = 0; layer < shape.layers; ++layer)
        for (const kvq::tensor role : {kvq::tensor::key, kvq::tensor::value}) {
            const auto all = test::dequantized(s, shape, layer, role);
            const auto& from = role == kvq::tensor::key ? words.k : words.v;
            for (int t = 0; t < s.tokens(); ++t)
                for (int c = 0; c < shape.head_dim; ++c)
                    if (all.view().at(t, 0)[c] != from.view().at(tokens[static_cast<std::size_t>(t)], 0)[c])
                        return false;
        }
    return true;
}

/// Do two of the sequences hold pages with the same bytes that are not one page? A store makes them one,
/// forks do not.
bool hold_copies(const std::vector<const sequence_type*>& sequences) {
    for (const sequence_type* a : sequences)
        for (const sequence_type* b : sequences)
            for (std::size_t layer = 0; layer < static_cast<std::size_t>(shape.layers); ++layer)
                for (int role = 0; role < 2; ++role) {
                    const auto& mine = kvq::detail::sequence_access::tables(*a)[layer].spans;
                    const auto& theirs = kvq::detail::sequence_access::tables(*b)[layer].spans;
                    const auto same = [](const kvq::page_ref& p, const kvq::page_ref& q) {
                        return p && q && p.get() != q.get() && p->format == q->format &&
                               p->bytes == q->bytes && std::memcmp(p->data(), q->data(), p->bytes) == 0;
                    };
                    for (std::size_t i = 0; i < std::min(mine.size(), theirs.size()); ++i)
                        if (mine[i].full() && theirs[i].full() &&
                            same(mine[i].pages[role], theirs[i].pages[role]))
                            return true;
                }
    return false;
}

/// The same in the plainest way, on a cache of its own in which nobody else holds pages.
struct plain_store {
    struct entry {
        key tokens;
        sequence_type sequence;
    };
    test_cache& cache;
    kvq::prefix_cache_options options;
    std::list<entry> entries{};  // the one used last comes first
    kvq::prefix_cache_statistics statistics{};

    struct result {
        prefix_match match;
        int tokens;
    };

    struct neighbours {
        std::list<entry>::iterator exact, longest_prefix, nearest;
        std::size_t common = 0;
    };
    neighbours around(const key& query) {
        neighbours found{entries.end(), entries.end(), entries.end()};
        for (auto e = entries.begin(); e != entries.end(); ++e) {
            std::size_t n = 0;
            while (n < query.size() && n < e->tokens.size() && query[n] == e->tokens[n]) ++n;
            if (n == e->tokens.size() && n == query.size()) found.exact = e;
            if (n == e->tokens.size() && n < query.size() &&
                (found.longest_prefix == entries.end() || n > found.longest_prefix->tokens.size()))
                found.longest_prefix = e;
            // Of the entries that go on, the one with the smallest tokens.
            if (n < e->tokens.size() && n > 0 &&
                (found.nearest == entries.end() || n > found.common || e->tokens < found.nearest->tokens) &&
                n >= found.common)
                found.nearest = e;
            if (n > found.common && n == e->tokens.size()) found.nearest = entries.end();
            found.common = std::max(found.common, n);
        }
        return found;
    }

    /// Leaves the entry found in front.
    result find(const key& query) {
        const neighbours n = around(query);
        if (n.exact != entries.end()) return use(n.exact, prefix_match::exact, n.common);
        if (n.common == 0) return {prefix_match::miss, 0};
        if (n.common == query.size()) return use(n.nearest, prefix_match::supersequence, n.common);
        const bool whole = n.longest_prefix != entries.end() && n.longest_prefix->tokens.size() == n.common;
        if (static_cast<int>(n.common) < options.min_prefix_tokens)
            return {whole ? prefix_match::miss_short_prefix : prefix_match::miss_short_lcp, 0};
        return whole ? use(n.longest_prefix, prefix_match::prefix, n.common)
                     : use(n.nearest, prefix_match::lcp, n.common);
    }
    result use(std::list<entry>::iterator e, prefix_match match, std::size_t tokens) {
        entries.splice(entries.begin(), entries, e);
        return {match, static_cast<int>(tokens)};
    }

    std::pair<result, sequence_type> fetch(const key& query) {
        const result r = find(query);
        sequence_type s = kvq::is_hit(r.match) ? entries.front().sequence.fork() : cache.new_sequence();
        s.trim(r.tokens);
        ++statistics.fetches[static_cast<std::size_t>(r.match)];
        statistics.tokens_saved += static_cast<std::size_t>(r.tokens);
        return {r, std::move(s)};
    }

    /// `sequence` goes away: afterwards the pool counts entries only.
    store_outcome store(const key& tokens, sequence_type sequence) {
        const neighbours near = around(tokens);
        if (near.exact != entries.end()) {
            use(near.exact, prefix_match::exact, 0);
            ++statistics.duplicates;
            return store_outcome::duplicate;
        }
        sequence.trim(static_cast<int>(tokens.size()));
        if (options.format && static_cast<int>(tokens.size()) >= options.min_quantize_tokens) {
            cache.requantize(
                sequence, {.key = options.format->key, .value = options.format->value, .only_smaller = true});
            for (auto& table : kvq::detail::sequence_access::tables(sequence))
                for (kvq::page_span& span : table.spans)
                    for (kvq::page_ref& copy : span.copies) copy = kvq::page_ref{};
        }
        if (near.common > 0)
            share(sequence, (near.nearest != entries.end() ? near.nearest : near.longest_prefix)->sequence,
                  static_cast<int>(near.common));
        const kvq::usage_report u = sequence.usage();
        const std::size_t headers = pages_of(sequence) * sizeof(kvq::page);
        if (u.quantized + u.window + u.rollback + headers > options.byte_limit) {
            ++statistics.rejections;
            return store_outcome::too_large;
        }
        statistics.replaced += entries.remove_if([&](const entry& e) {
            return e.tokens.size() < tokens.size() &&
                   std::equal(e.tokens.begin(), e.tokens.end(), tokens.begin());
        });
        entries.push_front({tokens, std::move(sequence)});
        ++statistics.stored;
        while (cache.bytes_in_use() > options.byte_limit ||
               entries.size() > static_cast<std::size_t>(options.max_entries)) {
            entries.pop_back();
            ++statistics.evictions;
        }
        return store_outcome::stored;
    }

    /// Pages with equal contents, wholly in the first `common` tokens.
    void share(sequence_type& s, const sequence_type& from, int common) const {
        for (int layer = 0; layer < shape.layers; ++layer) {
            auto& mine = kvq::detail::sequence_access::tables(s)[static_cast<std::size_t>(layer)];
            const auto& theirs = kvq::detail::sequence_access::tables(from)[static_cast<std::size_t>(layer)];
            for (std::size_t i = 0; i < mine.spans.size() && i < theirs.spans.size(); ++i) {
                kvq::page_span& a = mine.spans[i];
                const kvq::page_span& b = theirs.spans[i];
                if (a.end() > common || !a.full() || a.first_token != b.first_token || a.tokens != b.tokens)
                    break;
                for (int role = 0; role < 2; ++role)
                    if (a.pages[role]->format == b.pages[role]->format &&
                        a.pages[role]->bytes == b.pages[role]->bytes &&
                        std::equal(a.pages[role]->data(), a.pages[role]->data() + a.pages[role]->bytes,
                                   b.pages[role]->data()))
                        a.pages[role] = b.pages[role];
            }
        }
    }

    static std::size_t pages_of(const sequence_type& s) {
        std::size_t n = 0;
        for (const auto& table : kvq::detail::sequence_access::tables(s))
            for (const kvq::page_span& span : table.spans)
                n += 2 + (span.copies[0] ? 1 : 0) + (span.copies[1] ? 1 : 0);
        return n;
    }
};

void check_same(const kvq::prefix_cache_statistics& a, const kvq::prefix_cache_statistics& b) {
    CHECK(a.fetches == b.fetches);
    CHECK(a.tokens_saved == b.tokens_saved);
    CHECK(a.stored == b.stored);
    CHECK(a.duplicates == b.duplicates);
    CHECK(a.rejections == b.rejections);
    CHECK(a.replaced == b.replaced);
    CHECK(a.evictions == b.evictions);
}

}  // namespace

TEST_CASE("random requests: finds, keeps, evicts and counts what a plain list does") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::stream words(random, shape, vocabulary);
    kvq::prefix_cache_statistics seen;
    std::size_t evictions = 0, rejections = 0, duplicates = 0, replaced = 0;
    for (int round = 0; round < 100; ++round) {
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{3, 4, 8});
        options.recent = random.pick(std::vector<int>{0, 1, 7});
        const bool codes = random.one_in(2);
        if (codes) options.layers = {{1, 0}, {1, 1}};
        test_cache cache(shape, options), mirror(shape, options);
        kvq::prefix_cache_options limits;
        limits.min_prefix_tokens = random.between(0, 12);
        limits.min_quantize_tokens = random.between(0, 30);
        limits.max_entries = random.between(1, 12);
        if (random.one_in(2))
            limits.byte_limit = static_cast<std::size_t>(random.between(2, 15) * random.between(500, 4000));
        if (random.one_in(2)) limits.format = kvq::layer_format{1, random.between(0, 1)};
        kvq::prefix_cache store(cache, limits);
        plain_store model{mirror, limits};

        std::vector<key> asked;
        for (int step = 0; step < 60; ++step) {
            // A request: like an earlier one up to somewhere, then something else. Few different tokens, so
            // that it meets others.
            key request;
            if (!asked.empty() && !random.one_in(5)) {
                request = random.pick(asked);
                if (random.one_in(2))
                    request.resize(
                        static_cast<std::size_t>(random.between(0, static_cast<int>(request.size()))));
            }
            for (int more = random.one_in(4) ? 0 : random.between(1, 25); more > 0; --more)
                request.push_back(random.one_in(2) ? random.between(0, 2)
                                                   : random.between(0, vocabulary - 1));
            asked.push_back(request);

            const auto looked = store.lookup(request);
            auto got = store.fetch(request);
            auto [expected, plain] = model.fetch(request);
            INFO("round ", round, " step ", step);
            REQUIRE(std::string(kvq::name(got.match)) == kvq::name(expected.match));
            REQUIRE(got.tokens == expected.tokens);
            REQUIRE(looked.match == got.match);
            REQUIRE(looked.tokens == got.tokens);
            REQUIRE(contents(cache, got.sequence) == contents(mirror, plain));
            if (!limits.format && !codes) {
                key head = request;
                head.resize(static_cast<std::size_t>(got.tokens));
                REQUIRE(holds(got.sequence, words, head));
            }
            append_tokens(got.sequence, words, request, got.tokens);
            append_tokens(plain, words, request, got.tokens);
            if (request.empty() || random.one_in(6)) continue;
            // Sometimes less than the sequence holds.
            if (random.one_in(4))
                request.resize(static_cast<std::size_t>(random.between(1, static_cast<int>(request.size()))));
            const auto before = contents(cache, got.sequence, true);
            const store_outcome outcome = store.store(request, got.sequence);
            REQUIRE(contents(cache, got.sequence, true) == before);
            REQUIRE(outcome == model.store(request, std::move(plain)));
            got.sequence = cache.new_sequence();
            REQUIRE(store.entries() == model.entries.size());
            REQUIRE(store.bytes() == cache.bytes_in_use());
            REQUIRE(store.bytes() == mirror.bytes_in_use());
            REQUIRE(store.bytes() <= limits.byte_limit);
        }
        // What is held, and the order in which it goes.
        while (!model.entries.empty()) {
            for (const auto& e : model.entries) REQUIRE(store.lookup(e.tokens).match == prefix_match::exact);
            const std::size_t held = store.bytes();
            model.entries.pop_back();
            ++model.statistics.evictions;
            if (mirror.bytes_in_use() == held) continue;  // its pages are other entries' as well
            REQUIRE(store.release(held - mirror.bytes_in_use()) == held - mirror.bytes_in_use());
            REQUIRE(store.entries() == model.entries.size());
        }
        check_same(store.statistics(), model.statistics);
        store.clear();
        CHECK(store.bytes() == 0);
        CHECK(cache.bytes_in_use() == 0);

        const auto s = store.statistics();
        for (std::size_t i = 0; i < s.fetches.size(); ++i) seen.fetches[i] += s.fetches[i];
        evictions += s.evictions;
        rejections += s.rejections;
        duplicates += s.duplicates;
        replaced += s.replaced;
    }
    // Everything has happened.
    for (const std::size_t n : seen.fetches) CHECK(n > 0);
    for (const std::size_t n : {evictions, rejections, duplicates, replaced}) CHECK(n > 0);
}

TEST_CASE("what is fetched or stored is a sequence of its own: nobody sees what others do to theirs") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::stream words(random, shape, vocabulary);
    for (const bool quantize : {false, true}) {
        test_cache cache(shape, {.sinks = 2, .recent = 5, .page_tokens = 4});
        kvq::prefix_cache_options limits{.min_prefix_tokens = 1, .min_quantize_tokens = 1};
        if (quantize) limits.format = kvq::layer_format{1, 1};
        kvq::prefix_cache store(cache, limits);
        key tokens;
        for (int i = 0; i < 50; ++i) tokens.push_back(random.between(0, vocabulary - 1));
        auto original = cache.new_sequence();
        append_tokens(original, words, tokens, 0);
        REQUIRE(store.store(tokens, original) == store_outcome::stored);
        const auto held = contents(cache, store.fetch(tokens).sequence, true);

        const auto scribble = [&](sequence_type& s) {
            for (int i = 0; i < 6; ++i) {
                s.trim(random.between(0, s.tokens()));
                append(s, shape.layers, words, random.between(0, 100), random.between(0, 30));
            }
            cache.requantize(s, {.key = random.between(0, 1), .value = random.between(0, 1)});
        };
        for (int i = 0; i < 20; ++i) {
            scribble(original);
            auto first = store.fetch(tokens), second = store.fetch(tokens);
            const auto untouched = contents(cache, second.sequence, true);
            scribble(first.sequence);
            REQUIRE(contents(cache, second.sequence, true) == untouched);
            REQUIRE(contents(cache, store.fetch(tokens).sequence, true) == held);
        }
        // Fetched sequences outlive the entry.
        auto last = store.fetch(tokens);
        store.clear();
        original = cache.new_sequence();
        CHECK(contents(cache, last.sequence, true) == held);
    }
}

TEST_CASE("the 16-bit copies are gone once a quantized entry is all that is left") {
    test::generator random(test::seed());
    const test::stream words(random, shape, vocabulary);
    test_cache cache(shape, {.page_tokens = 8, .rollback = 16});
    kvq::prefix_cache store(cache, {.min_quantize_tokens = 64, .format = kvq::layer_format{1, 1}});
    const auto bytes_for = [&](int tokens) {
        auto s = cache.new_sequence();
        append(s, shape.layers, words, 0, tokens);
        key ids;
        for (int i = 0; i < tokens; ++i) ids.push_back(i);
        REQUIRE(store.store(ids, s) == store_outcome::stored);
        s = cache.new_sequence();
        const std::size_t bytes = store.bytes();
        CHECK(bytes == cache.bytes_in_use());
        store.clear();
        return bytes;
    };
    const std::size_t page = cache.page_bytes(kvq::tensor::key, 0, 8),
                      quantized = cache.page_bytes(kvq::tensor::key, 2, 8);
    const auto pages = [](int tokens) { return static_cast<std::size_t>(2 * 2 * tokens / 8); };
    REQUIRE(quantized < page);
    CHECK(bytes_for(64) == pages(64) * kvq::page_pool::allocation(quantized));
    CHECK(bytes_for(56) == pages(56) * kvq::page_pool::allocation(page));
}

TEST_CASE("requests with a common prefix cost their own pages only") {
    test::generator random(test::seed());
    const test::stream words(random, shape, vocabulary);
    constexpr int page_tokens = 8, system_tokens = 400, own_tokens = 40, requests = 8;
    test_cache cache(shape, {.page_tokens = page_tokens, .rollback = 0, .layers = {{1, 1}, {1, 1}}});
    kvq::prefix_cache store(cache);
    std::size_t first = 0;
    for (int r = 0; r < requests; ++r) {
        key tokens;
        for (int i = 0; i < system_tokens; ++i) tokens.push_back(i % vocabulary);
        for (int i = 0; i < own_tokens; ++i) tokens.push_back((i + 20 * r + 7) % vocabulary);
        auto got = store.fetch(tokens);
        CHECK(got.match == (r == 0 ? prefix_match::miss : prefix_match::lcp));
        CHECK(got.tokens == (r == 0 ? 0 : system_tokens));
        append_tokens(got.sequence, words, tokens, got.tokens);
        REQUIRE(store.store(tokens, got.sequence) == store_outcome::stored);
        if (r == 0) first = cache.bytes_in_use();
    }
    const std::size_t page = kvq::page_pool::allocation(cache.page_bytes(kvq::tensor::key, 2, page_tokens));
    CHECK(first == page * 2 * 2 * ((system_tokens + own_tokens) / page_tokens));
    CHECK(cache.bytes_in_use() == first + (requests - 1) * page * 2 * 2 * (own_tokens / page_tokens));
    CHECK(store.bytes() == cache.bytes_in_use());
}

TEST_CASE("what was computed twice is held once where it is the same, and twice where it is not") {
    test::generator random(test::seed());
    const test::stream words(random, shape, vocabulary), others(random, shape, vocabulary);
    constexpr int page_tokens = 8, common = 80, own = 16;
    const kvq::prefix_cache_options limits{.min_quantize_tokens = 0, .format = kvq::layer_format{1, 1}};
    for (const bool same : {true, false}) {
        test_cache cache(shape, {.page_tokens = page_tokens, .rollback = 0});
        kvq::prefix_cache store(cache, limits);
        std::vector<std::vector<test::held_page>> expected;
        std::vector<key> entries;
        for (int r = 0; r < 2; ++r) {
            key tokens;
            for (int i = 0; i < common + own; ++i) tokens.push_back(i < common ? i : i + r * own);
            auto s = cache.new_sequence();  // not fetched
            append_tokens(s, r == 1 && !same ? others : words, tokens, 0);
            REQUIRE(store.store(tokens, s) == store_outcome::stored);
            cache.requantize(s, {.key = 1, .value = 1});
            expected.push_back(contents(cache, s));
            entries.push_back(tokens);
        }
        const std::size_t page =
            kvq::page_pool::allocation(cache.page_bytes(kvq::tensor::key, 2, page_tokens));
        CHECK(cache.bytes_in_use() == store.bytes());
        CHECK(store.bytes() == page * 2 * 2 * (common + 2 * own + (same ? 0 : common)) / page_tokens);
        for (std::size_t r = 0; r < 2; ++r)
            CHECK(contents(cache, store.fetch(entries[r]).sequence) == expected[r]);
    }
}

TEST_CASE(
    "an entry can be stored while the pool has no room for its quantized pages only after others went") {
    test::generator random(test::seed());
    const test::stream words(random, shape, vocabulary);
    const kvq::cache_options roomy{.page_tokens = 8, .rollback = 0};
    test_cache probe(shape, roomy);
    auto s = probe.new_sequence();
    append(s, shape.layers, words, 0, 160);
    auto tight = roomy;
    tight.byte_budget = 2 * probe.bytes_in_use();
    test_cache cache(shape, tight);
    kvq::prefix_cache store(cache, {.min_quantize_tokens = 0, .format = kvq::layer_format{1, 1}});

    const auto ids = [](int first, int n) {
        key k;
        for (int i = first; i < first + n; ++i) k.push_back(i);
        return k;
    };
    // Sequences of 16-bit pages fill the pool; quantizing is what needs more.
    std::vector<sequence_type> live;
    for (int i = 0; i < 2; ++i) {
        live.push_back(cache.new_sequence());
        append(live.back(), shape.layers, words, i, 160);
    }
    REQUIRE(cache.bytes_in_use() == tight.byte_budget);
    CHECK_THROWS_AS(store.store(ids(0, 160), live[0]), kvq::out_of_memory);
    CHECK(store.entries() == 0);
    CHECK(store.bytes() == 0);
    CHECK(cache.bytes_in_use() == tight.byte_budget);
    live.pop_back();
    CHECK(store.store(ids(0, 160), live[0]) == store_outcome::stored);
    const std::size_t quantized = store.bytes();
    live.clear();
    CHECK(cache.bytes_in_use() == quantized);
    CHECK(store.release(1) == quantized);
    CHECK(store.statistics().evictions == 1);
    CHECK(cache.bytes_in_use() == 0);
}

TEST_CASE("entries and live sequences step down together as any sequences that share pages do") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    // Large enough that 8 bits are fewer bytes.
    const kvq::cache_shape wide{.layers = 2, .kv_heads = 1, .head_dim = 16};
    const test::stream words(random, wide, vocabulary);
    int shrunk = 0, shared = 0;
    for (int round = 0; round < 40; ++round) {
        INFO("round ", round);
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{4, 8, 16});
        test_cache cache(wide, options), mirror(wide, options);
        kvq::prefix_cache store(cache);
        std::vector<sequence_type> live, mirrored, mirrored_entries;
        std::vector<key> live_keys, entries;
        const auto grow = [&](sequence_type& a, sequence_type& b, key& ids, int n) {
            for (; n > 0; --n) {
                ids.push_back(random.between(0, vocabulary - 1));
                append(a, wide.layers, words, ids.back(), 1);
                append(b, wide.layers, words, ids.back(), 1);
            }
        };
        for (int i = random.between(1, 5); i > 0; --i) {
            key ids;
            if (live.empty() || random.one_in(3)) {
                live.push_back(cache.new_sequence());
                mirrored.push_back(mirror.new_sequence());
            } else {
                const auto from =
                    static_cast<std::size_t>(random.between(0, static_cast<int>(live.size()) - 1));
                live.push_back(live[from].fork());
                mirrored.push_back(mirrored[from].fork());
                ids = live_keys[from];
            }
            grow(live.back(), mirrored.back(), ids, random.between(1, 80));
            live_keys.push_back(ids);
            if (random.one_in(3)) continue;
            key part = ids;
            if (random.one_in(3))
                part.resize(static_cast<std::size_t>(random.between(1, static_cast<int>(ids.size()))));
            // Prefixes of entries would be replaced.
            if (store.lookup(part).match == prefix_match::exact) continue;
            const std::size_t replaced = store.statistics().replaced;
            REQUIRE(store.store(part, live.back()) == store_outcome::stored);
            if (store.statistics().replaced > replaced)
                for (std::size_t e = entries.size(); e-- > 0;)
                    if (entries[e].size() < part.size() &&
                        std::equal(entries[e].begin(), entries[e].end(), part.begin())) {
                        entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(e));
                        mirrored_entries.erase(mirrored_entries.begin() + static_cast<std::ptrdiff_t>(e));
                    }
            entries.push_back(part);
            mirrored_entries.push_back(mirrored.back().fork());
            mirrored_entries.back().trim(static_cast<int>(part.size()));
        }
        REQUIRE(cache.bytes_in_use() == mirror.bytes_in_use());
        std::vector<const sequence_type*> each;
        for (const auto* some : {&mirrored, &mirrored_entries})
            for (const sequence_type& one : *some) each.push_back(&one);
        if (hold_copies(each)) continue;
        // Some of the live sequences may be somebody else's.
        std::vector<sequence_type*> given, all;
        for (std::size_t i = 0; i < live.size(); ++i)
            if (!random.one_in(4)) {
                given.push_back(&live[i]);
                all.push_back(&mirrored[i]);
            }
        for (sequence_type& e : mirrored_entries) all.push_back(&e);
        kvq::step_down_policy policy;
        policy.tiers = {{0, {0, 0}}, {random.one_in(2) ? 1 << 20 : random.between(0, 60), {1, 1}}};
        if (random.one_in(2))
            policy.byte_budget =
                cache.bytes_in_use() / 100 * static_cast<std::size_t>(random.between(1, 100));
        const std::size_t before = cache.bytes_in_use();
        const auto report = store.step_down(given, policy);
        const auto expected = kvq::step_down(mirror, std::span<sequence_type* const>(all), policy);
        CHECK(report.bytes_before == before);
        CHECK(report.bytes_after == cache.bytes_in_use());
        CHECK(report.bytes_after == expected.bytes_after);
        CHECK(report.bytes_peak == expected.bytes_peak);
        CHECK(report.fits == expected.fits);
        CHECK(report.steps.size() == expected.steps.size());
        shrunk += report.bytes_after < before;
        for (std::size_t i = 0; i < live.size(); ++i)
            REQUIRE(contents(cache, live[i]) == contents(mirror, mirrored[i]));
        for (std::size_t e = 0; e < entries.size(); ++e) {
            const auto got = store.fetch(entries[e]);
            REQUIRE(got.match == prefix_match::exact);
            REQUIRE(contents(cache, got.sequence) == contents(mirror, mirrored_entries[e]));
            for (const sequence_type& one : live)
                shared += got.sequence.tokens() > 0 && one.tokens() > 0 &&
                          got.sequence.pages(0).entries() > 1 &&
                          one.pages(0).at(0).keys == got.sequence.pages(0).at(0).keys;
        }
        live.clear();
        mirrored.clear();
        CHECK(store.bytes() == cache.bytes_in_use());
        CHECK(store.bytes() == mirror.bytes_in_use());
        store.clear();
        CHECK(store.bytes() == 0);
        CHECK(cache.bytes_in_use() == 0);
    }
    CHECK(shrunk > 5);
    CHECK(shared > 5);
}

TEST_CASE("stepping down that ends half way leaves the bytes of the store right") {
    test::generator random(test::seed());
    const kvq::cache_shape wide{.layers = 2, .kv_heads = 1, .head_dim = 16};
    const test::stream words(random, wide, vocabulary);
    test::counting_resource memory;
    test_cache cache(wide, {.page_tokens = 8, .rollback = 0, .memory = &memory});
    kvq::prefix_cache store(cache);
    auto s = cache.new_sequence();
    append(s, wide.layers, words, 0, 100);
    key ids;
    for (int i = 0; i < 100; ++i) ids.push_back(i);
    REQUIRE(store.store(ids, s) == store_outcome::stored);
    s = cache.new_sequence();
    const kvq::step_down_policy policy{.tiers = {{0, {1, 1}}}};
    int failures = 0;
    for (bool done = false; !done; ++failures) {
        memory.arm(failures);
        try {
            done = store.step_down({}, policy).steps.empty();
        } catch (const std::bad_alloc&) {
        }
        memory.arm(test::counting_resource::never);
        REQUIRE(store.bytes() == cache.bytes_in_use());
        REQUIRE(store.entries() == 1);
    }
    CHECK(failures > 5);
}

TEST_CASE("memory that runs out anywhere leaves the store, its entries and the sequence as they were") {
    test::generator random(test::seed());
    const test::stream words(random, shape, vocabulary);
    test::counting_resource memory;
    test_cache cache(
        shape, {.sinks = 1, .recent = 3, .page_tokens = 4, .layers = {{1, 1}, {0, 0}}, .memory = &memory});
    kvq::prefix_cache store(
        cache, {.min_prefix_tokens = 1, .min_quantize_tokens = 0, .format = kvq::layer_format{1, 1}});
    key tokens, other;
    for (int i = 0; i < 30; ++i) tokens.push_back(i);
    other = key(tokens.begin(), tokens.begin() + 14);
    other.resize(25, 100);
    auto first = cache.new_sequence(), second = cache.new_sequence();
    append_tokens(first, words, tokens, 0);
    append_tokens(second, words, other, 0);
    REQUIRE(store.store(tokens, first) == store_outcome::stored);

    const auto held = contents(cache, store.fetch(tokens).sequence, true),
               mine = contents(cache, second, true);
    const std::size_t bytes = memory.bytes(), in_store = store.bytes();
    const auto fails_cleanly = [&](auto&& act) {
        int failures = 0;
        for (bool done = false; !done; ++failures) {
            memory.arm(failures);
            try {
                act();
                done = true;
                memory.arm(test::counting_resource::never);
            } catch (const std::bad_alloc&) {
                memory.arm(test::counting_resource::never);
                REQUIRE(memory.bytes() == bytes);
                REQUIRE(store.bytes() == in_store);
                REQUIRE(store.entries() == 1);
                REQUIRE(contents(cache, store.fetch(tokens).sequence, true) == held);
                REQUIRE(contents(cache, second, true) == mine);
            }
        }
        return failures - 1;
    };
    const key part(tokens.begin(), tokens.begin() + 10), most(other.begin(), other.end() - 3);
    const int fetch_failures = fails_cleanly([&] { store.fetch(part); });
    const int store_failures = fails_cleanly([&] { store.store(most, second); });
    CHECK(fetch_failures > 3);
    CHECK(store_failures > 10);
    CHECK(store.lookup(most).match == prefix_match::exact);
    CHECK(store.entries() == 2);
}

TEST_CASE("a hook that throws for one evicted entry is called for the others, too") {
    test::generator random(test::seed());
    const test::stream words(random, shape, vocabulary);
    test_cache cache(shape);
    std::vector<key> called;
    kvq::prefix_cache store(cache, {.evicted = [&](kvq::token_ids tokens, const kvq::sequence& s) {
                                CHECK(holds(s, words, key(tokens.begin(), tokens.end())));
                                called.emplace_back(tokens.begin(), tokens.end());
                                if (called.size() < 3)
                                    throw std::runtime_error(std::to_string(called.size()));
                            }});
    const std::vector<key> entries{{1, 2, 3}, {4, 5}, {6}};
    for (const key& tokens : entries) {
        auto s = cache.new_sequence();
        append_tokens(s, words, tokens, 0);
        store.store(tokens, s);
    }
    CHECK_THROWS_WITH_AS(store.release(static_cast<std::size_t>(-1)), "1", std::runtime_error);
    CHECK(called == entries);
    CHECK(store.entries() == 0);
    CHECK(cache.bytes_in_use() == 0);
}

TEST_CASE("statistics count what is stored and fetched") {
    test::generator random(test::seed());
    const test::stream words(random, shape, vocabulary);
    test_cache cache(shape);
    kvq::prefix_cache store(cache, {.min_prefix_tokens = 2});
    const key tokens{1, 2, 3};
    sequence_type s = cache.new_sequence();
    append_tokens(s, words, tokens, 0);
    CHECK(store.store(tokens, s) == store_outcome::stored);
    CHECK(store.fetch(tokens).match == prefix_match::exact);
    CHECK(store.fetch(key{7}).match == prefix_match::miss);
    CHECK(store.statistics().stored == 1);
    CHECK(store.statistics().tokens_saved == 3);
    CHECK(store.statistics().hits() == 1);
    CHECK(store.statistics()[prefix_match::exact] == 1);
}

TEST_CASE("what makes no sense is refused with a sentence") {
    test::generator random(test::seed());
    const test::stream words(random, shape, vocabulary);
    test_cache cache(shape), other(shape);
    kvq::prefix_cache store(cache);
    auto s = cache.new_sequence();
    append(s, shape.layers, words, 0, 10);
    const key ten(10, 1), eleven(11, 1);
    CHECK_THROWS_WITH_AS(store.store({}, s), doctest::Contains("at least 1 token"), kvq::error);
    CHECK_THROWS_WITH_AS(store.store(eleven, s),
                         doctest::Contains("11 tokens cannot be made: layer 0 holds 10"), kvq::error);
    s.append(0, words.k.slice(0, 1), words.v.slice(0, 1));  // layer 1 is behind
    CHECK_THROWS_WITH_AS(store.store(eleven, s), doctest::Contains("layer 1 holds 10"), kvq::error);
    CHECK_THROWS_WITH_AS(store.store(ten, other.new_sequence()), doctest::Contains("another cache"),
                         kvq::error);
    CHECK(store.entries() == 0);
    CHECK(store.store(ten, s) == store_outcome::stored);
    // A neighbour, with whose pages those of the sequence would be compared.
    auto drafting = s.fork();
    drafting.trim(10);
    for (int layer = 0; layer < shape.layers; ++layer)
        drafting.append_draft(layer, words.k.slice(1, 2), words.v.slice(1, 2));
    key longer = ten;
    for (const int token : {2, 3}) {
        longer.push_back(token);
        CHECK_THROWS_WITH_AS(store.store(longer, drafting), doctest::Contains("keep() a part of it"),
                             kvq::error);
    }
    CHECK(store.store(ten, drafting) == store_outcome::duplicate);
    CHECK(store.erase(ten));
    CHECK(store.store(ten, drafting) == store_outcome::stored);
    CHECK(store.entries() == 1);
    CHECK_FALSE(store.erase(key(9, 1)));
    CHECK(store.erase(ten));
    CHECK(store.bytes() == 0);

    using store_type = kvq::prefix_cache;
    CHECK_THROWS_AS(store_type(cache, {.max_entries = 0}), kvq::error);
    CHECK_THROWS_AS(store_type(cache, {.min_prefix_tokens = -1}), kvq::error);
    CHECK_THROWS_AS(store_type(cache, {.min_quantize_tokens = -1}), kvq::error);
    CHECK_THROWS_AS(store_type(cache, {.format = kvq::layer_format{2, 0}}), kvq::error);
}

TEST_CASE("threads: everybody gets what was asked for, and every byte is accounted for") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator setup(seed);
    const test::stream words(setup, shape, vocabulary);
    test_cache cache(shape, {.sinks = 1, .recent = 3, .page_tokens = 4});
    kvq::prefix_cache store(cache, {.byte_limit = 40000, .max_entries = 10, .min_prefix_tokens = 2});
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int thread = 0; thread < 4; ++thread)
        threads.emplace_back([&, thread] {
            test::generator random(seed + static_cast<std::uint64_t>(thread));
            for (int step = 0; step < 150; ++step) {
                key request;
                const int family = random.between(0, 3);
                for (int n = random.between(1, 40), i = 0; i < n; ++i)
                    request.push_back(i < 12 ? family : random.between(0, 3));
                auto got = store.fetch(request);
                key head = request;
                head.resize(static_cast<std::size_t>(got.tokens));
                if (!holds(got.sequence, words, head)) ++wrong;
                append_tokens(got.sequence, words, request, got.tokens);
                store.store(request, got.sequence);
                if (!holds(got.sequence, words, request)) ++wrong;
                if (random.one_in(20)) store.release(static_cast<std::size_t>(random.between(1, 5000)));
                if (random.one_in(50)) store.erase(request);
                if (store.bytes() > 40000) ++wrong;
            }
        });
    for (std::thread& t : threads) t.join();
    CHECK(wrong == 0);
    CHECK(store.bytes() == cache.bytes_in_use());
    CHECK(store.statistics().hits() > 0);
    CHECK(store.statistics().hits() + store.statistics().misses() == 600);
    store.clear();
    CHECK(cache.bytes_in_use() == 0);
}

TEST_CASE("threads: entries step down while others fetch and store") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    const kvq::cache_shape wide{.layers = 2, .kv_heads = 1, .head_dim = 16};
    test::generator setup(seed);
    const test::stream words(setup, wide, vocabulary);
    test_cache cache(wide, {.sinks = 1, .recent = 3, .page_tokens = 4});
    kvq::prefix_cache store(cache, {.max_entries = 10, .min_prefix_tokens = 2});
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0}, stepped{0};
    for (int thread = 0; thread < 4; ++thread)
        threads.emplace_back([&, thread] {
            test::generator random(seed + static_cast<std::uint64_t>(thread));
            for (int step = 0; step < 100; ++step) {
                key request;
                const int family = random.between(0, 3);
                for (int n = random.between(1, 40), i = 0; i < n; ++i)
                    request.push_back(i < 12 ? family : random.between(0, 3));
                auto got = store.fetch(request);
                const auto before = contents(cache, got.sequence);
                sequence_type* const mine = &got.sequence;
                if (random.one_in(5)) {
                    const std::span<sequence_type* const> live(&mine, random.one_in(2) ? 1 : 0);
                    kvq::step_down_policy policy;
                    policy.tiers = {{0, {0, 0}}, {random.between(0, 20), {1, 1}}};
                    if (random.one_in(2)) policy.byte_budget = cache.bytes_in_use() / 2;
                    stepped += !store.step_down(live, policy).steps.empty();
                    if (live.empty() && contents(cache, got.sequence) != before) ++wrong;
                }
                append(got.sequence, wide.layers, words, 0, static_cast<int>(request.size()) - got.tokens);
                store.store(request, got.sequence);
            }
        });
    for (std::thread& t : threads) t.join();
    CHECK(wrong == 0);
    CHECK(stepped > 0);
    CHECK(store.bytes() == cache.bytes_in_use());
    store.clear();
    CHECK(cache.bytes_in_use() == 0);
}

}  // namespace prefix_cache_tests
