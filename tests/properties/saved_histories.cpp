// SPDX-License-Identifier: MIT
// Comparison family: exact. Every state of a sequence that can be saved, sent or written is read back, and
// has the same future: random histories over all verbs, in the middle of which a copy leaves the cache and
// comes back; then both copies go on alike.
//
// KVQ_HISTORIES: how many. KVQ_HISTORY: only the one with this number. Each has the seed KVQ_SEED plus its
// number.
#include <doctest/doctest.h>

#include <filesystem>
#include <functional>
#include <kvq/adapters/distributed/send_sequence.hpp>
#include <kvq/adapters/sequence_state.hpp>
#include <kvq/cache/sequence_access.hpp>
#include <kvq/cache/step_down.hpp>
#include <kvq/policy/prefix_tiers.hpp>
#include <optional>

#include "support/caches.hpp"
#include "support/messages.hpp"
#include "support/ranks.hpp"
#include "support/saved.hpp"

namespace saved_histories_tests {

namespace {

constexpr int longest = 300;

/// Numbers [first, last) of the histories to run.
// ---- caches -----------------------------------------------------------------------------------------------

template <class Scheme>
kvq::format format_of() {
    static const kvq::format f = test::made<test::usual>(Scheme{});
    return f;
}

kvq::cache_options random_options(test::generator& random, const kvq::cache_shape& shape) {
    const std::vector<std::function<kvq::format()>> keys = {
        format_of<kvq::full<kvq::float16>>, format_of<kvq::int8>, format_of<kvq::kivi<4, 32>::keys>,
        format_of<kvq::std4::keys>, format_of<kvq::affine<2>>};
    const std::vector<std::function<kvq::format()>> values = {
        format_of<kvq::full<kvq::float16>>, format_of<kvq::int8>, format_of<kvq::kivi<4, 32>::values>,
        format_of<kvq::std4::values>, format_of<kvq::affine<2>>};
    kvq::cache_options o;
    const auto list = [&](kvq::format_list& to, const auto& from) {
        const int n = random.between(1, 3), first = random.between(0, 4);
        for (int i = 0; i < n; ++i) to.push_back(from[static_cast<std::size_t>((first + i) % 5)]());
    };
    list(o.keys, keys);
    list(o.values, values);
    for (int layer = 0; layer < shape.layers; ++layer)
        o.layers.push_back({random.between(0, static_cast<int>(o.keys.size()) - 1),
                            random.between(0, static_cast<int>(o.values.size()) - 1)});
    const int window = random.between(0, 5);
    if (window == 0) o.window = format_of<kvq::full<kvq::bfloat16>>();
    if (window == 1) o.window = format_of<kvq::full<float>>();
    o.sinks = random.pick(std::vector<int>{0, 1, 4, 5});
    o.recent = random.pick(std::vector<int>{0, 1, 7, 16, 32});
    o.page_tokens = random.pick(std::vector<int>{16, 16, 20, 32});
    o.rollback = random.pick(std::vector<int>{0, 1, 8, 16, 50});
    kvq::rotary_embedding rotary;
    rotary.dims = shape.head_dim / random.between(1, 2);
    rotary.base = random.one_in(2) ? 10000.0 : 500000.0;
    if (random.one_in(3)) rotary.layout = kvq::rotary_layout::interleaved;
    if (random.one_in(3)) rotary.frequencies = kvq::llama3_frequencies(rotary.dims, rotary.base, {});
    o.rotary = {rotary};
    if (shape.layers > 1 && random.one_in(3)) o.rotary.push_back({});
    return o;
}

/// A cache, a sequence whose history is looked at, and a fork of it from which it may take tokens.
struct world {
    std::shared_ptr<kvq::cache> cache;
    std::optional<kvq::sequence> sequence, other{};
};

// ---- verbs -----------------------------------------------------------------------------------------------

/// Does one thing to a world; returns what it saw.
struct verb {
    std::string says;
    std::function<std::vector<float>(world&)> run;
};
template <class... Numbers>
std::string text(const char* name, Numbers... n) {
    std::string s = name;
    ((s += ' ' + std::to_string(n)), ...);
    return s + "; ";
}

std::vector<float> nothing() { return {}; }

bool same_tokens(const kvq::sequence& s, int layers) {
    for (int layer = 0; layer < layers; ++layer)
        if (s.tokens(layer) != s.tokens()) return false;
    return true;
}

/// A verb for a world in this state. The same verb is then done to its copy.
verb random_verb(test::generator& random, const world& w, const test::stream& s) {
    const kvq::cache_shape shape = w.cache->shape();
    const int held = w.sequence->tokens(), layers = shape.layers, at = random.between(0, longest);
    const auto range = [&](int n) {
        const int a = random.between(0, n),
                  b = random.one_in(3) ? random.between(a, std::min(n, a + 3)) : random.between(a, n);
        return std::pair(a, b);
    };
    switch (random.between(0, 15)) {
        case 0:
        case 1:
        case 2: {
            const int n = random.between(0, random.one_in(3) ? 60 : 9);
            // Now and then a step that has not reached all layers.
            const int reached = random.one_in(12) ? random.between(0, layers) : layers;
            return verb{text("append", n, reached), [=, &s](world& x) {
                            if (x.sequence->tokens() + n <= longest)
                                for (int layer = 0; layer < reached; ++layer)
                                    x.sequence->append(layer, s.k.slice(at, n), s.v.slice(at, n));
                            return nothing();
                        }};
        }
        case 3:
        case 4: {
            const int n = random.between(1, 40), queries = random.between(0, std::min(n, 3));
            return verb{
                text("prefill", n, queries), [=, &s](world& x) {
                    std::vector<float> seen;
                    if (x.sequence->tokens() + n > longest) return seen;
                    for (int layer = 0; layer < layers; ++layer) {
                        test::tensor<float> out(queries, 2 * shape.kv_heads, shape.dim(kvq::tensor::value)),
                            q(queries, 2 * shape.kv_heads, shape.head_dim);
                        for (std::size_t i = 0; i < q.values().size(); ++i) q.values()[i] = s.k.values()[i];
                        x.sequence->prefill(layer, s.k.slice(at, n), s.v.slice(at, n), q.view(), out.view());
                        seen.insert(seen.end(), out.values().begin(), out.values().end());
                    }
                    return seen;
                }};
        }
        case 5:
        case 6: {
            const int n =
                random.one_in(2) ? random.between(0, held) : std::max(0, held - random.between(0, 20));
            return verb{text("trim", n), [=](world& x) { return x.sequence->trim(n), nothing(); }};
        }
        case 7: {
            const bool back = random.one_in(2);
            return verb{text("fork", back), [=](world& x) {
                            if (back && x.other)
                                std::swap(x.sequence, x.other);
                            else
                                x.other = x.sequence->fork();
                            return nothing();
                        }};
        }
        case 8:
        case 9: {
            const auto [a, b] = range(held);
            const bool stay =
                random.one_in(3);  // the tokens behind keep their positions, as sequence_table does it
            return verb{text("erase", a, b, stay), [=](world& x) {
                            x.sequence->erase(a, b);
                            if (stay && a < x.sequence->tokens())
                                x.sequence->shift(a, x.sequence->tokens(), b - a);
                            return nothing();
                        }};
        }
        case 10: {
            const auto [a, b] = range(held);
            const int by = random.between(-9, 9);
            const bool back = random.one_in(2);
            return verb{text("shift", a, b, by, back), [=](world& x) {
                            x.sequence->shift(a, b, by);
                            if (back) x.sequence->shift(a, b, -by);
                            return nothing();
                        }};
        }
        case 11: {
            const bool own = !w.other || random.one_in(2);
            const auto [a, b] = range(own ? held : w.other->tokens());
            const bool back = random.one_in(2);
            return verb{text("splice", own, a, b, back), [=](world& x) {
                            const int n = x.sequence->tokens();
                            if (n + b - a > longest) return nothing();
                            x.sequence->splice(own ? *x.sequence : *x.other, a, b);
                            if (back && b > a) x.sequence->shift(n, n + b - a, a - n);
                            return nothing();
                        }};
        }
        case 12: {
            const int n = random.between(1, 9);
            std::vector<int> path;
            for (int i = 0; i < n; ++i)
                if (random.one_in(2)) path.push_back(i);
            const bool rejected = random.one_in(4);
            return verb{text("draft", n, path.size(), rejected), [=, &s](world& x) {
                            if (x.sequence->tokens() + n > longest || !same_tokens(*x.sequence, layers))
                                return nothing();
                            const int before = x.sequence->tokens();
                            for (int layer = 0; layer < layers; ++layer)
                                x.sequence->append_draft(layer, s.k.slice(at, n), s.v.slice(at, n));
                            if (rejected)
                                x.sequence->trim(before);
                            else
                                x.sequence->keep(path);
                            return nothing();
                        }};
        }
        case 13: {
            kvq::requantize_request r;
            r.key = random.between(-1, w.cache->table(kvq::tensor::key).listed() - 1);
            r.value = random.between(-1, w.cache->table(kvq::tensor::value).listed() - 1);
            r.first_layer = random.between(0, layers - 1);
            if (random.one_in(2)) r.last_token = random.between(0, held);
            r.only_smaller = random.one_in(3);
            r.new_pages = random.one_in(2);
            return verb{
                text("requantize", r.key, r.value, r.first_layer, r.last_token, r.only_smaller, r.new_pages),
                [=](world& x) { return x.cache->requantize(*x.sequence, r), nothing(); }};
        }
        case 14: {
            kvq::step_down_policy p;
            const int keys = w.cache->table(kvq::tensor::key).listed(),
                      values = w.cache->table(kvq::tensor::value).listed();
            for (int i = 0; i < 2; ++i)
                p.tiers.push_back({i * random.between(0, 60),
                                   {random.between(0, keys - 1), random.between(0, values - 1)}});
            return verb{text("step_down", p.tiers[1].age),
                        [=](world& x) { return kvq::step_down(*x.cache, *x.sequence, p), nothing(); }};
        }
        default: {
            const int layer = random.between(0, layers - 1),
                      listed = random.between(0, w.cache->table(kvq::tensor::key).listed() - 1);
            if (!random.one_in(3))
                return verb{text("usage"), [](world& x) { return (void)x.sequence->usage(), nothing(); }};
            return verb{text("commit_to", listed, layer), [=](world& x) {
                            return x.cache->commit_to(kvq::tensor::key, listed, layer), nothing();
                        }};
        }
    }
}

/// What a verb saw, or the message of its error.
std::pair<std::vector<float>, std::string> done(const verb& v, world& w) {
    std::vector<float> seen;
    std::string error = test::message_of([&] { seen = v.run(w); });
    return {std::move(seen), std::move(error)};
}

// ---- channels --------------------------------------------------------------------------------------------

kvq::sequence by_messages(kvq::cache& to, const kvq::sequence& s, test::generator& random) {
    std::vector<test::file_bytes> messages;
    int parts = 0;
    for (int layer = 0; layer < to.shape().layers; ++layer)
        kvq::send_pages(s, layer, [&](const void* data, std::size_t n) {
            if (parts++ % 3 == 0) messages.emplace_back();
            const auto* const p = static_cast<const std::byte*>(data);
            messages.back().insert(messages.back().end(), p, p + n);
        });
    for (std::size_t i = messages.size(); i > 1; --i) std::swap(messages[i - 1], messages[random.bits() % i]);
    kvq::page_receiver receiver(to);
    for (const test::file_bytes& m : messages) receiver.accept(kvq::parse_page(m));
    return receiver.finish();
}

kvq::sequence over_ranks(kvq::cache& from, kvq::cache& to, const kvq::sequence& s) {
    test::wire over(2);
    test::wire::transport here(over, 0), there(over, 1);
    test::channel sends(here), receives(there);
    kvq::sequence_receiver receiver(receives, 0, to);
    kvq::sequence_sender sender(sends, 1, from);
    for (int layer = 0; layer < from.shape().layers; ++layer) sender.send_layer(s, layer);
    sender.finish(s);
    return receiver.receive().sequence;
}

kvq::sequence from_a_file(kvq::cache& of, const kvq::sequence& s) {
    kvq::prefix_tiers tiers(of, {.memory = {.byte_limit = 1, .min_prefix_tokens = 1},
                                 .folder = std::filesystem::temp_directory_path().string()});
    const std::vector<kvq::token_id> ids(static_cast<std::size_t>(s.tokens()), 7);
    REQUIRE(tiers.store(ids, s) == kvq::store_outcome::stored);
    auto found = tiers.fetch(ids);
    INFO(tiers.statistics().last_failure);
    REQUIRE(found.tier == kvq::prefix_tier::file);
    return std::move(found.sequence);
}

// ---- what is compared ------------------------------------------------------------------------------------

/// Bytes of pages, and those of them that 16-bit pages hold beyond what their tokens need: a trim leaves
/// them, a file does not.
struct page_bytes {
    std::size_t all = 0, spare = 0, headers = 0;
};
page_bytes bytes_of(const kvq::cache& cache, const std::vector<const kvq::sequence*>& sequences) {
    page_bytes sum;
    const kvq::page_geometry g = cache.geometry();
    for (int layer = 0; layer < cache.shape().layers; ++layer)
        for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
            std::map<const kvq::page*, int> needed;  // tokens
            for (const kvq::sequence* const one : sequences) {
                const auto& table =
                    kvq::detail::sequence_access::tables(*one)[static_cast<std::size_t>(layer)];
                for (int i = 0; i < table.size(); ++i) {
                    const kvq::page_span& s = table[i];
                    const kvq::page* const p = s.pages[static_cast<std::size_t>(role)].get();
                    const int tokens =
                        i < table.committed ? p->tokens : g.window_tokens(s.tokens, g.capacity(s.sinks));
                    needed[p] = std::max(needed[p], tokens);
                    if (const auto& copy = s.copies[static_cast<std::size_t>(role)])
                        needed[copy.get()] = copy->tokens;
                }
            }
            for (const auto& [p, tokens] : needed) {
                sum.all += p->bytes;
                sum.headers += sizeof(kvq::page);
                if (tokens < p->tokens) sum.spare += p->bytes - cache.page_bytes(role, 0, tokens);
            }
        }
    return sum;
}

/// The spans of a sequence, for the message of a failure.
std::string spans_of(const world& w) {
    std::string all;
    for (const auto& table : kvq::detail::sequence_access::tables(*w.sequence)) {
        all += text("\nlayer: tokens, committed", table.tokens, table.committed, table.targets[0],
                    table.targets[1]);
        for (const kvq::page_span& s : table.spans) {
            all += text("\n  first, tokens, room, skip, sinks, shift", s.first_token, s.tokens, s.room,
                        s.skip, s.sinks, s.shift);
            for (const auto* list : {&s.pages, &s.copies})
                for (const kvq::page_ref& p : *list)
                    if (p) all += text("format, memory, holders", p->format, p->tokens, p.references());
        }
    }
    return all;
}

void require_alike(const world& a, const world& b) {
    if (test::saved(*a.sequence) != test::saved(*b.sequence))
        FAIL("the files differ: ", spans_of(a), "\nand of the copy: ", spans_of(b));
    REQUIRE(test::attention_bits(*a.cache, *a.sequence) == test::attention_bits(*b.cache, *b.sequence));
    const auto x = a.sequence->usage(), y = b.sequence->usage();
    REQUIRE(x.quantized == y.quantized);
    REQUIRE(x.rollback == y.rollback);
    REQUIRE(x.not_finite == y.not_finite);
    const page_bytes first = bytes_of(*a.cache, {&*a.sequence}), second = bytes_of(*b.cache, {&*b.sequence});
    REQUIRE(x.quantized + x.window + x.rollback == first.all);
    REQUIRE(y.quantized + y.window + y.rollback == second.all);
    REQUIRE(first.all - first.spare == second.all - second.spare);
}

}  // namespace

TEST_CASE("what is saved, sent or stored comes back, and has the same future, after any history") {
    const auto seed = test::seed();
    const auto [first, last] = test::histories(150);
    for (int number = first; number < last; ++number) {
        INFO("KVQ_SEED=", seed, " KVQ_HISTORY=", number);
        test::generator random(seed + static_cast<std::uint64_t>(number));
        const kvq::cache_shape shape{.layers = random.between(1, 2),
                                     .kv_heads = random.between(1, 2),
                                     .head_dim = random.pick(std::vector<int>{32, 32, 64}),
                                     .value_dim = random.pick(std::vector<int>{0, 0, 48})};
        const auto options = random_options(random, shape);
        test::stream s(random, shape, 2 * longest);
        if (random.one_in(10))
            for (int i = 0; i < 20; ++i) {
                s.k.values()[random.bits() % s.k.values().size()] = random.pick(test::hostile_values());
                s.v.values()[random.bits() % s.v.values().size()] = random.pick(test::hostile_values());
            }
        world a{std::make_shared<kvq::cache>(shape, options), {}};
        a.sequence = a.cache->new_sequence();
        std::string verbs;
        for (int step = random.between(2, 14); step > 0; --step) {
            const verb v = random_verb(random, a, s);
            verbs += v.says;
            done(v, a);
        }
        // Sharing with other sequences does not leave the cache.
        a.other.reset();

        world b{std::make_shared<kvq::cache>(shape, a.cache->options()), {}};
        int channel = random.between(0, 9);
        // An empty layer is not sent, nor what its pages would be quantized to.
        for (int layer = 0; layer < shape.layers; ++layer)
            if (a.sequence->tokens(layer) == 0 && channel < 9) channel = 0;
        const bool complete = same_tokens(*a.sequence, shape.layers);
        if (channel == 8 && !complete) {
            REQUIRE(test::contains(test::message_of([&] { over_ranks(*a.cache, *b.cache, *a.sequence); }),
                                   "in the middle of a step"));
            channel = 0;
        }
        verbs += text("\nchannel", channel);
        INFO(verbs);
        if (channel < 4) {
            b.sequence = test::restored(*b.cache, test::saved(*a.sequence));
        } else if (channel < 8) {
            b.sequence = by_messages(*b.cache, *a.sequence, random);
        } else if (channel == 8) {
            b.sequence = over_ranks(*a.cache, *b.cache, *a.sequence);
        } else {
            b.cache = a.cache;
            const bool stored = complete && a.sequence->tokens() > 0;
            b.sequence = stored ? from_a_file(*a.cache, *a.sequence) : a.sequence->fork();
        }
        require_alike(a, b);
        if (channel < 9) {
            const page_bytes pages = bytes_of(*b.cache, {&*b.sequence});
            REQUIRE(b.cache->bytes_in_use() == pages.all + pages.headers);
            REQUIRE(pages.spare == 0);
        }
        for (int step = random.between(2, 9); step > 0; --step) {
            const verb v = random_verb(random, a, s);
            verbs += v.says;
            INFO(v.says);
            const auto of_a = done(v, a), of_b = done(v, b);
            REQUIRE(of_a.second == of_b.second);
            REQUIRE(of_a.first.size() == of_b.first.size());
            REQUIRE((of_a.first.empty() || std::memcmp(of_a.first.data(), of_b.first.data(),
                                                       of_a.first.size() * sizeof(float)) == 0));
            if (random.one_in(4)) {
                a.other.reset();
                b.other.reset();
                b.sequence = test::restored(*b.cache, test::saved(*b.sequence));
            }
            require_alike(a, b);
        }
    }
}

TEST_CASE(
    "after a context shift every length is saved and read back, by a sequence that was read back itself") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 32};
    kvq::cache_options o{
        .keys = {format_of<kvq::int8>()}, .sinks = 4, .recent = 32, .page_tokens = 128, .rollback = 16};
    o.rotary = {{.dims = 32}};
    kvq::cache cache(shape, o);
    const test::stream s(random, shape, 200);
    for (const bool by_file : {true, false}) {
        auto sequence = cache.new_sequence();
        test::append(sequence, 1, s, 0, 200);
        sequence.erase(10, 130);
        sequence =
            by_file ? test::restored(cache, test::saved(sequence)) : by_messages(cache, sequence, random);
        for (int n = 81; n < 300; ++n) {
            test::append(sequence, 1, s, n % 200, 1);
            INFO(n, " tokens");
            REQUIRE(test::saved(test::restored(cache, test::saved(sequence))) == test::saved(sequence));
        }
    }
}

TEST_CASE("sinks that were cut before they were full, and others behind them, are saved and read back") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 32};
    kvq::cache_options o{.keys = {format_of<kvq::int8>()}, .sinks = 4, .recent = 32, .page_tokens = 32};
    o.rotary = {{.dims = 32}};
    kvq::cache cache(shape, o);
    const test::stream s(random, shape, 100);
    for (int n = 2; n < 80; ++n) {
        auto sequence = cache.new_sequence();
        test::append(sequence, 1, s, 0, 3);
        sequence.erase(1, 2);
        sequence.shift(1, 2, 1);
        test::append(sequence, 1, s, 3, n - 2);
        INFO(n, " tokens");
        for (const bool by_file : {true, false}) {
            const auto back =
                by_file ? test::restored(cache, test::saved(sequence)) : by_messages(cache, sequence, random);
            REQUIRE(test::saved(back) == test::saved(sequence));
        }
    }
}

TEST_CASE("a splice of own tokens that is shifted back shares its pages again after it was read back") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 32};
    kvq::cache_options o{.keys = {format_of<kvq::int8>()}, .page_tokens = 32};
    o.rotary = {{.dims = 32}};
    kvq::cache cache(shape, o);
    const test::stream s(random, shape, 100);
    auto sequence = cache.new_sequence();
    test::append(sequence, 1, s, 0, 64);
    const std::size_t bytes = sequence.usage().quantized;
    sequence.splice(sequence, 0, 64);
    sequence.shift(64, 128, -64);
    REQUIRE(sequence.usage().quantized == bytes);
    for (const bool by_file : {true, false}) {
        const auto back =
            by_file ? test::restored(cache, test::saved(sequence)) : by_messages(cache, sequence, random);
        CHECK(back.usage().quantized == bytes);
    }
}

// ---- states of a table -----------------------------------------------------------------------------------

namespace {

constexpr int ids = 4;

struct table_world {
    std::shared_ptr<kvq::cache> cache;
    std::shared_ptr<kvq::sequence_table> table;
};
struct table_verb {
    std::string says;
    std::function<std::vector<float>(table_world&)> run;
};

test::file_bytes state_of(const table_world& w, int id = -1) {
    test::file_bytes bytes;
    kvq::write_state(
        *w.table,
        [&](const void* data, std::size_t n) {
            const auto* const p = static_cast<const std::byte*>(data);
            bytes.insert(bytes.end(), p, p + n);
        },
        id);
    return bytes;
}

table_verb random_table_verb(test::generator& random, const table_world& w, const test::stream& s) {
    const kvq::cache_shape shape = w.cache->shape();
    const int id = random.between(0, ids - 1), to = random.between(0, ids - 1);
    int end = 0;
    for (int i = 0; i < ids; ++i) end = std::max(end, w.table->position_max(i) + 1);
    const int last = w.table->position_max(id) + 1, a = random.between(0, last),
              b = random.one_in(3)   ? -1
                  : random.one_in(2) ? random.between(a, last)
                                     : std::min(a + 3, last);
    switch (random.between(0, 9)) {
        case 0:
        case 1:
        case 2:
        case 3: {
            const int n = end > longest ? 0 : random.between(0, random.one_in(2) ? 30 : 3),
                      at = random.between(0, longest);
            std::vector<std::int32_t> positions, counts, named;
            for (int i = 0; i < n; ++i) {
                positions.push_back(end + i);
                const int first = random.one_in(8) ? random.between(0, ids - 1) : id;
                counts.push_back(random.one_in(4) && first != to ? 2 : 1);
                named.push_back(first);
                named.push_back(to);
            }
            return {text("step", n, id, to), [=, &s](table_world& x) {
                        kvq::workspace space;
                        std::vector<const std::int32_t*> all;
                        for (int i = 0; i < n; ++i) all.push_back(named.data() + 2 * i);
                        x.table->begin({n, positions.data(), counts.data(), all.data()}, shape.kv_heads, 1,
                                       space);
                        std::vector<float> seen;
                        for (int layer = 0; layer < shape.layers; ++layer) {
                            test::tensor<float> out(n, shape.kv_heads, shape.dim(kvq::tensor::value));
                            x.table->prefill(layer, s.k.slice(at, n), s.v.slice(at, n), s.k.slice(at, n),
                                             out.view(), kvq::causal{}, kvq::serial_executor{}, space);
                            seen.insert(seen.end(), out.values().begin(), out.values().end());
                        }
                        x.table->end();
                        return seen;
                    }};
        }
        case 4:
        case 5:
            return {text("remove", id, a, b),
                    [=](table_world& x) { return x.table->remove(id, a, b), nothing(); }};
        case 6:
        case 7:
            return {text("copy", id, to, a, b),
                    [=](table_world& x) { return x.table->copy(id, to, a, b), nothing(); }};
        case 8: {
            const int by = random.between(-9, 3);
            return {text("shift", id, a, b, by),
                    [=](table_world& x) { return x.table->shift(id, a, b, by), nothing(); }};
        }
        default:
            if (random.one_in(3))
                return {text("keep", id), [=](table_world& x) { return x.table->keep(id), nothing(); }};
            return {text("remove", id),
                    [=](table_world& x) { return x.table->remove(id, -1, -1), nothing(); }};
    }
}

/// Bytes of all pages but what trims have left in 16-bit pages.
std::size_t bytes_needed(const table_world& w) {
    std::vector<const kvq::sequence*> all;
    for (int id = 0; id < ids; ++id)
        if (const auto* const s = w.table->find(id)) all.push_back(s);
    const page_bytes sum = bytes_of(*w.cache, all);
    REQUIRE(sum.all + sum.headers == w.cache->bytes_in_use());
    return sum.all - sum.spare;
}

}  // namespace

TEST_CASE("a state of many sequences is read back with the pages that they share, and has the same future") {
    const auto seed = test::seed();
    const auto [first, last] = test::histories(100);
    for (int number = first; number < last; ++number) {
        test::generator random(seed + static_cast<std::uint64_t>(number));
        const kvq::cache_shape shape{.layers = random.between(1, 2), .kv_heads = 1, .head_dim = 32};
        const auto options = random_options(random, shape);
        const test::stream s(random, shape, 2 * longest);
        const auto made = [&] {
            table_world w{std::make_shared<kvq::cache>(shape, options), nullptr};
            w.table = std::make_shared<kvq::sequence_table>(*w.cache, ids);
            return w;
        };
        const auto done_to = [](const table_verb& v, table_world& w) {
            std::vector<float> seen;
            std::string error = test::message_of([&] { seen = v.run(w); });
            return std::pair(std::move(seen), std::move(error));
        };
        table_world a = made(), b = made();
        std::string verbs;
        for (int step = random.between(2, 14); step > 0; --step) {
            const table_verb v = random_table_verb(random, a, s);
            verbs += v.says;
            done_to(v, a);
        }
        verbs += "\nstate; ";
        INFO("KVQ_SEED=", seed, " KVQ_HISTORY=", number, " ", verbs);
        kvq::read_state(*b.table, test::memory_source{state_of(a)});
        REQUIRE(state_of(a) == state_of(b));
        REQUIRE(bytes_needed(a) == bytes_needed(b));
        for (int step = random.between(2, 9); step > 0; --step) {
            const table_verb v = random_table_verb(random, a, s);
            verbs += v.says;
            INFO(v.says);
            const auto of_a = done_to(v, a), of_b = done_to(v, b);
            REQUIRE(of_a.second == of_b.second);
            REQUIRE(of_a.first == of_b.first);
            REQUIRE(state_of(a) == state_of(b));
            REQUIRE(bytes_needed(a) == bytes_needed(b));
        }
        // One sequence alone, under another id.
        const int id = random.between(0, ids - 1), to = random.between(0, ids - 1);
        table_world c = made();
        kvq::read_state(*c.table, test::memory_source{state_of(a, id)}, to);
        REQUIRE(c.table->tokens(to) == a.table->tokens(id));
        if (const auto* const one = a.table->find(id)) {
            REQUIRE(test::saved(*one) == test::saved(*c.table->find(to)));
            REQUIRE(test::attention_bits(*a.cache, *one) ==
                    test::attention_bits(*c.cache, *c.table->find(to)));
        }
    }
}

}  // namespace saved_histories_tests
