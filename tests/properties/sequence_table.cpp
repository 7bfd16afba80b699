// SPDX-License-Identifier: MIT
// Comparison family: double arithmetic, and exact. Sequences by id and position: whatever is added, removed,
// copied and moved, a token attends to the tokens before it in its sequence, with keys rotated at their
// positions.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <kvq/adapters/sequence_state.hpp>
#include <kvq/cache/preset_options.hpp>
#include <kvq/core/thread_pool.hpp>
#include <kvq/estimate/budget.hpp>

#include "support/memory.hpp"
#include "support/messages.hpp"
#include "support/random.hpp"
#include "support/typed_cache.hpp"

namespace sequence_table_tests {

namespace {

constexpr int layers = 2, kv_heads = 2, q_heads = 4, dim = 16, value_dim = 24, ids = 5;
constexpr double base = 1000.0;
const kvq::cache_shape shape{layers, kv_heads, dim, value_dim};

kvq::format fp32() { return test::made<test::usual>(kvq::full<float>{}); }

kvq::cache_options exact_options() {
    kvq::cache_options o;
    o.keys = {fp32()};
    o.window = fp32();
    o.page_tokens = 32;
    o.sinks = 2;
    o.recent = 5;
    o.rotary = {{.dims = dim, .base = base}};
    return o;
}
/// Windows of the layers; 0: full attention.
using layer_windows = std::array<int, layers>;
std::vector<kvq::layer> layers_of(const layer_windows& windows) {
    const kvq::layer heads{.kv_heads = kv_heads, .head_dim = dim, .value_dim = value_dim};
    std::vector<kvq::layer> list;
    for (const int w : windows)
        list.push_back(w > 0 ? kvq::sliding_attention(w, heads) : kvq::full_attention(heads));
    return list;
}
kvq::cache_options std4_options() {
    kvq::cache_options o = exact_options();
    o.keys = {test::made<test::usual>(kvq::std4::keys{})};
    o.values = {test::made<test::usual>(kvq::std4::values{})};
    o.window = test::made<test::usual>(kvq::full<kvq::float16>{});
    return o;
}

/// Rows of one layer, [tokens][heads][channels].
struct rows {
    int tokens, heads, channels;
    std::vector<float> x;
    rows(int n, int h, int c) : tokens(n), heads(h), channels(c), x(static_cast<std::size_t>(n * h * c)) {}
    kvq::token_view<float> view() { return {x.data(), tokens, heads, channels}; }
    float* at(int t) { return x.data() + static_cast<std::ptrdiff_t>(t) * heads * channels; }
};

void rotate(double* x, double position) {
    for (int j = 0; j < dim / 2; ++j) {
        const double a = position * std::pow(base, -2.0 * j / dim), u = x[j], v = x[j + dim / 2];
        x[j] = u * std::cos(a) - v * std::sin(a);
        x[j + dim / 2] = v * std::cos(a) + u * std::sin(a);
    }
}

/// A token of the model: keys without rotation and values of all layers, and its position.
struct held_token {
    std::int32_t position;
    std::vector<double> k, v;  // [layers][kv_heads][dim]
};
using history = std::vector<held_token>;

/// A batch, and its memory.
struct drawn_batch {
    std::vector<std::int32_t> positions, counts;
    std::vector<std::vector<std::int32_t>> ids_of;
    std::vector<const std::int32_t*> pointers{};

    int tokens() const { return static_cast<int>(positions.size()); }
    kvq::token_batch c() {
        pointers.clear();
        for (const auto& of : ids_of) pointers.push_back(of.data());
        return {tokens(), positions.data(), counts.data(), pointers.data()};
    }
    void add(std::int32_t position, std::vector<std::int32_t> of) {
        positions.push_back(position);
        counts.push_back(static_cast<std::int32_t>(of.size()));
        ids_of.push_back(std::move(of));
    }
};

std::vector<std::byte> state(kvq::sequence_table& table, int id = -1,
                             const kvq::state_options& options = {}) {
    std::vector<std::byte> bytes;
    kvq::write_state(
        table,
        [&](const void* data, std::size_t n) {
            const auto* const p = static_cast<const std::byte*>(data);
            bytes.insert(bytes.end(), p, p + n);
        },
        id, options);
    CHECK(kvq::state_bytes(table, id, options) == bytes.size());
    return bytes;
}
void restore(kvq::sequence_table& table, std::span<const std::byte> bytes, int id = -1) {
    kvq::read_state(
        table,
        [&](void* to, std::size_t n) {
            n = std::min(n, bytes.size());
            std::memcpy(to, bytes.data(), n);
            bytes = bytes.subspan(n);
            return n;
        },
        id);
}

/// A table and the model of what it holds.
struct twin {
    test::generator& random;
    kvq::cache& cache;
    layer_windows windows{};
    kvq::sequence_table table{cache, ids};
    std::vector<history> model = std::vector<history>(ids);
    kvq::workspace space{};
    kvq::thread_pool threads{2};

    /// Appends a batch, and compares each output with double arithmetic.
    void step(drawn_batch b) {
        const int n = b.tokens();
        std::vector<held_token> fresh(static_cast<std::size_t>(n));
        for (int i = 0; i < n; ++i) {
            held_token& t = fresh[static_cast<std::size_t>(i)];
            t.position = b.positions[static_cast<std::size_t>(i)];
            for (const float x : random.normals(layers * kv_heads * dim))
                t.k.push_back(static_cast<double>(x));
            for (const float x : random.normals(layers * kv_heads * value_dim))
                t.v.push_back(static_cast<double>(x));
        }
        table.begin(b.c(), q_heads, 2, space);
        for (int i = 0; i < n; ++i)
            for (const int id : b.ids_of[static_cast<std::size_t>(i)])
                model[static_cast<std::size_t>(id)].push_back(fresh[static_cast<std::size_t>(i)]);
        for (int layer = layers - 1; layer >= 0; --layer) {
            rows k(n, kv_heads, dim), v(n, kv_heads, value_dim), q(n, q_heads, dim),
                out(n, q_heads, value_dim);
            std::vector<std::vector<double>> queries;
            for (int i = 0; i < n; ++i) {
                const held_token& t = fresh[static_cast<std::size_t>(i)];
                for (int h = 0; h < kv_heads; ++h) {
                    std::vector<double> key(t.k.begin() + (layer * kv_heads + h) * dim,
                                            t.k.begin() + (layer * kv_heads + h + 1) * dim);
                    rotate(key.data(), t.position);
                    std::copy(key.begin(), key.end(), k.at(i) + h * dim);
                }
                std::copy_n(t.v.begin() + layer * kv_heads * value_dim, kv_heads * value_dim, v.at(i));
                for (int h = 0; h < q_heads; ++h) {
                    std::vector<double> query;
                    for (const float x : random.normals(dim)) query.push_back(static_cast<double>(x));
                    std::vector<double> turned = query;
                    rotate(turned.data(), t.position);
                    std::copy(turned.begin(), turned.end(), q.at(i) + h * dim);
                    queries.push_back(std::move(query));
                }
            }
            std::fill(out.x.begin(), out.x.end(), NAN);
            // Not asked for now and then.
            std::vector<float> lse(random.one_in(4) ? 0 : static_cast<std::size_t>(n * q_heads), NAN);
            table.prefill(layer, k.view(), v.view(), q.view(),
                          kvq::output_view(out.view()).with_lse(lse.empty() ? nullptr : lse.data()),
                          kvq::causal{}, threads, space);
            for (int i = 0; i < n; ++i)
                for (int h = 0; h < q_heads; ++h)
                    check_row(windows[static_cast<std::size_t>(layer)],
                              model[static_cast<std::size_t>(b.ids_of[static_cast<std::size_t>(i)][0])],
                              layer, h, b.positions[static_cast<std::size_t>(i)],
                              queries[static_cast<std::size_t>(i * q_heads + h)], out.at(i) + h * value_dim,
                              lse.empty() ? nullptr : &lse[static_cast<std::size_t>(i * q_heads + h)]);
        }
        table.end();
        check();
    }
    static void check_row(int window, const history& held, int layer, int head, std::int32_t position,
                          const std::vector<double>& query, const float* out, const float* lse) {
        const int of = layer * kv_heads + head / (q_heads / kv_heads);
        double sum = 0.0;
        std::vector<double> expected(value_dim);
        const auto after = std::upper_bound(held.begin(), held.end(), position,
                                            [](int p, const held_token& t) { return p < t.position; });
        const auto seen =
            window > 0 ? std::min<std::ptrdiff_t>(window, after - held.begin()) : after - held.begin();
        for (auto i = after - seen; i != after; ++i) {
            const held_token& t = *i;
            // The score depends on the distance of positions alone.
            std::vector<double> key(t.k.begin() + of * dim, t.k.begin() + (of + 1) * dim);
            rotate(key.data(), t.position - position);
            double score = 0.0;
            for (std::size_t c = 0; c < dim; ++c) score += key[c] * query[c];
            const double weight = std::exp(score / std::sqrt(double{dim}));
            sum += weight;
            for (std::size_t c = 0; c < value_dim; ++c)
                expected[c] += weight * t.v[static_cast<std::size_t>(of) * value_dim + c];
        }
        double off = 0.0;
        for (std::size_t c = 0; c < value_dim; ++c)
            off = std::fmax(off, std::fabs(static_cast<double>(out[c]) - expected[c] / sum));
        REQUIRE(off < 2e-5);
        if (lse) REQUIRE(std::fabs(static_cast<double>(*lse) - std::log(sum)) < 2e-5);
    }
    void check() const {
        for (int id = 0; id < ids; ++id) {
            const history& held = model[static_cast<std::size_t>(id)];
            REQUIRE(table.tokens(id) == static_cast<int>(held.size()));
            REQUIRE(table.position_min(id) == (held.empty() ? -1 : held.front().position));
            REQUIRE(table.position_max(id) == (held.empty() ? -1 : held.back().position));
            REQUIRE((table.find(id) == nullptr) == held.empty());
            for (std::size_t i = 0; i < held.size(); ++i) REQUIRE(table.positions(id)[i] == held[i].position);
        }
    }

    /// Tokens of one id or of several, in any order of ids, with gaps now and then.
    drawn_batch draw() {
        drawn_batch b;
        std::vector<std::int32_t> next;
        for (int id = 0; id < ids; ++id)
            next.push_back(table.position_max(id) + 1 + (random.one_in(8) ? 3 : 0));
        std::vector<std::int32_t> all;
        for (int id = 0; id < ids; ++id) all.push_back(id);
        const int n = random.one_in(3) ? random.between(20, 70) : random.between(1, 9),
                  kind = random.between(0, 3);
        const int only = random.between(0, ids - 1), other = random.between(0, ids - 1);
        for (int i = 0; i < n; ++i) {
            std::vector<std::int32_t> of;
            if (kind == 0)
                of = {only};
            else if (kind == 1)
                of = {i % ids};  // rows at equal distances
            else if (kind == 2)
                of = {random.between(0, ids - 1)};
            else if (only == other)
                of = all;
            else if (random.one_in(2))
                of = {only, other};
            else
                of = {random.one_in(2) ? only : other};
            std::int32_t position = 0;
            for (const int id : of) position = std::max(position, next[static_cast<std::size_t>(id)]);
            for (const int id : of) next[static_cast<std::size_t>(id)] = position + 1;
            b.add(position, of);
        }
        return b;
    }
    std::pair<std::int32_t, std::int32_t> range(int id) {
        const int end = std::max(1, table.position_max(std::max(id, 0)) + 1);
        const int first = random.between(-1, end), last = random.between(-1, end + 3);
        return {first, last};
    }
    static bool inside(std::int32_t p, std::int32_t first, std::int32_t last) {
        return p >= std::max(first, 0) && (last < 0 || p < last);
    }

    /// A change, or with windows its refusal, which leaves everything as it is.
    void change() {
        keep();
        try {
            draw_change();
        } catch (const kvq::error& e) {
            const std::string text = e.what();
            INFO(text);
            REQUIRE(windows != layer_windows{});
            REQUIRE(test::contains(text, "sliding window of "));
            model = kept_model;
            REQUIRE(state(table) == kept);
        }
        check();
    }
    std::vector<history> kept_model{};
    std::vector<std::byte> kept{};
    void keep() {
        kept_model = model;
        kept = state(table);
    }
    void draw_change() {
        const int id = random.between(0, ids - 1), kind = random.between(0, 11);
        const int which = random.one_in(4) ? -1 : id;
        const auto chosen = range(which);
        const std::int32_t first = chosen.first,
                           last = chosen.second;  // a structured binding is not captured by clang 14
        const auto affected = [&](int i) { return which < 0 || i == which; };
        if (kind <= 3) {
            INFO("remove ", which, ": ", first, " to ", last);
            table.remove(which, first, last);
            for (int i = 0; i < ids; ++i)
                if (affected(i))
                    std::erase_if(model[static_cast<std::size_t>(i)],
                                  [&](const held_token& t) { return inside(t.position, first, last); });
        } else if (kind <= 6) {
            const int to = random.between(0, ids - 1);
            if (random.one_in(2)) {
                table.remove(to, -1, -1);
                model[static_cast<std::size_t>(to)].clear();
                keep();
            }
            history part;
            for (const held_token& t : model[static_cast<std::size_t>(id)])
                if (inside(t.position, first, last)) part.push_back(t);
            history& of = model[static_cast<std::size_t>(to)];
            INFO("copy ", id, " to ", to, ": ", first, " to ", last);
            if (id != to && !part.empty() && !of.empty() && of.back().position >= part.front().position) {
                CHECK_THROWS_AS(table.copy(id, to, first, last), kvq::error);
            } else {
                table.copy(id, to, first, last);
                if (id != to) of.insert(of.end(), part.begin(), part.end());
            }
        } else if (kind <= 9) {
            const int by = random.between(-12, 12);
            INFO("shift ", which, ": ", first, " to ", last, " by ", by);
            std::vector<history> moved = model;
            bool ascend = true;
            for (int i = 0; i < ids; ++i) {
                if (!affected(i)) continue;
                history& of = moved[static_cast<std::size_t>(i)];
                for (held_token& t : of)
                    if (inside(t.position, first, last)) t.position += by;
                std::erase_if(of, [](const held_token& t) { return t.position < 0; });
                for (std::size_t j = 1; j < of.size(); ++j)
                    ascend = ascend && of[j - 1].position < of[j].position;
            }
            if (!ascend) {
                CHECK_THROWS_AS(table.shift(which, first, last, by), kvq::error);
            } else {
                table.shift(which, first, last, by);
                model = moved;
            }
        } else if (kind == 10) {
            const std::vector<std::byte> all = state(table);
            if (random.one_in(2)) {
                table.clear();
                for (int i = 0; i < ids; ++i) REQUIRE(table.tokens(i) == 0);
            }
            restore(table, all);
            REQUIRE(state(table) == all);
            const int to = random.between(0, ids - 1);
            restore(table, state(table, id), to);
            model[static_cast<std::size_t>(to)] = model[static_cast<std::size_t>(id)];
        } else if (random.one_in(4)) {
            table.keep(id);
            for (int i = 0; i < ids; ++i)
                if (i != id) model[static_cast<std::size_t>(i)].clear();
        }
    }
};

/// A step of n tokens of one id that follow its last.
drawn_batch following(const kvq::sequence_table& table, int id, int n) {
    drawn_batch b;
    for (int i = 0; i < n; ++i) b.add(table.position_max(id) + 1 + i, {id});
    return b;
}

/// Random rows for every layer of a step; returns the outputs.
std::vector<float> run(kvq::sequence_table& table, drawn_batch b, unsigned seed, kvq::workspace& space) {
    test::generator random(seed);
    table.begin(b.c(), q_heads, 1, space);
    std::vector<float> all;
    for (int layer = 0; layer < layers; ++layer) {
        rows k(b.tokens(), kv_heads, dim), v(b.tokens(), kv_heads, value_dim), q(b.tokens(), q_heads, dim),
            out(b.tokens(), q_heads, value_dim);
        for (rows* r : {&k, &v, &q}) r->x = random.normals(r->x.size());
        table.prefill(layer, k.view(), v.view(), q.view(), out.view(), kvq::causal{}, kvq::serial_executor{},
                      space);
        all.insert(all.end(), out.x.begin(), out.x.end());
    }
    table.end();
    return all;
}

}  // namespace

TEST_CASE("random batches, removal, copies, shifts and states against double arithmetic") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 6; ++round) {
        layer_windows windows{};
        if (round % 2 == 1) windows = {random.between(1, 30), random.one_in(2) ? random.between(1, 30) : 0};
        kvq::cache cache(layers_of(windows), exact_options());
        twin both{random, cache, windows};
        for (int i = 0; i < 40; ++i) {
            if (random.one_in(2)) both.step(both.draw());
            both.change();
        }
        both.table.clear();
        CHECK(cache.bytes_in_use() == 0);
    }
}

TEST_CASE("quantized: the bits of sequences that are driven directly") {
    kvq::cache cache(shape, std4_options());
    kvq::sequence_table table(cache, ids);
    kvq::sequence direct = cache.new_sequence();
    kvq::workspace space;
    unsigned step = 0;
    const auto both = [&](int n) {
        drawn_batch b = following(table, 2, n);
        const std::vector<float> out = run(table, b, ++step, space);
        test::generator random(step);
        std::vector<float> expected;
        for (int layer = 0; layer < layers; ++layer) {
            rows k(n, kv_heads, dim), v(n, kv_heads, value_dim), q(n, q_heads, dim),
                same(n, q_heads, value_dim);
            for (rows* r : {&k, &v, &q}) r->x = random.normals(r->x.size());
            direct.prefill(layer, k.view(), v.view(), q.view(), same.view());
            expected.insert(expected.end(), same.x.begin(), same.x.end());
        }
        CHECK(out == expected);
    };
    both(150);
    for (int i = 0; i < 20; ++i) both(1);
    table.remove(2, 160, -1);
    direct.trim(160);
    both(40);
    table.remove(2, 50, 60);
    direct.erase(50, 60);
    direct.shift(50, direct.tokens(), 10);
    both(3);
    table.remove(2, 100, 140);
    table.shift(2, 140, -1, -40);
    direct.erase(90, 130);
    both(30);
    restore(table, state(table, 2), 2);
    both(5);
    // Another id goes its own way and leaves this one as it is.
    table.copy(2, 4, -1, -1);
    run(table, following(table, 4, 70), 99, space);
    both(70);
}

TEST_CASE("ids with the same tokens share them") {
    kvq::cache cache(shape, std4_options());
    kvq::sequence_table table(cache, ids);
    kvq::workspace space;
    drawn_batch prompt;
    for (int i = 0; i < 200; ++i) prompt.add(i, {0, 1, 2, 3, 4});
    const std::vector<float> out = run(table, prompt, 1, space);
    for (int id = 1; id < ids; ++id) CHECK(table.find(id) == table.find(0));
    kvq::cache alone(shape, std4_options());
    kvq::sequence_table one(alone, ids);
    CHECK(run(one, following(one, 3, 200), 1, space) == out);
    CHECK(cache.bytes_in_use() == alone.bytes_in_use());
    CHECK(table.bytes() == one.bytes());
    CHECK(state(table).size() == state(one).size() + 4 * 4);
    // A state keeps what is shared.
    restore(table, state(table));
    CHECK(table.find(4) == table.find(0));
    CHECK(cache.bytes_in_use() == alone.bytes_in_use());
    CHECK(table.distinct_tokens() == 200);
    // One token of one id: the others stay together.
    run(table, following(table, 1, 1), 2, space);
    // Sinks of 2, pages of 32: the last page begins at 194 and was copied.
    CHECK(table.distinct_tokens() == 200 + 6 + 1);
    CHECK(table.find(1) != table.find(0));
    CHECK(table.find(2) == table.find(0));
    // Removal for all ids keeps them together.
    table.remove(-1, 20, 30);
    CHECK(table.find(3) == table.find(0));
    CHECK(table.tokens(3) == 190);
    CHECK(table.tokens(1) == 191);
    // Both sides of the cut show parts of one page.
    CHECK(table.distinct_tokens() == 190 + 6 + 1);
    table.clear();
    CHECK(table.distinct_tokens() == 0);
}

TEST_CASE("a state without 16-bit copies is smaller, and attends as one with them") {
    kvq::cache_options options = std4_options();
    options.rollback = 40;
    kvq::cache cache(shape, options);
    kvq::sequence_table table(cache, ids);
    kvq::workspace space;
    run(table, following(table, 0, 150), 1, space);
    const std::size_t copies = table.find(0)->usage().rollback;
    REQUIRE(copies > 0);
    const auto whole = state(table, 0), without = state(table, 0, {.copies = false});
    CHECK(without.size() + copies <= whole.size());
    CHECK(table.find(0)->usage().rollback == copies);
    restore(table, whole, 1);
    restore(table, without, 2);
    CHECK(table.find(1)->usage().rollback == copies);
    CHECK(table.find(2)->usage().rollback == 0);
    CHECK(table.find(2)->usage().quantized == table.find(1)->usage().quantized);
    const auto step = [&](int id) {
        drawn_batch one;
        one.add(150, {id});
        return run(table, one, 7, space);
    };
    CHECK(step(1) == step(2));
}

TEST_CASE("a state of int8 is smaller than one of fp16 without copies of its pages") {
    const auto bytes = [](const kvq::format& f, bool copies) {
        kvq::cache_options o = kvq::preset_options();
        o.keys = {f};
        kvq::cache cache(shape, o);
        kvq::sequence_table table(cache, ids);
        kvq::workspace space;
        run(table, following(table, 0, 300), 1, space);
        return state(table, 0, {.copies = copies}).size();
    };
    const std::size_t fp16 = bytes(test::made<test::usual>(kvq::full<kvq::float16>{}), true);
    CHECK(bytes(test::made<test::usual>(kvq::int8{}), false) < fp16);
}

TEST_CASE("a step that does not end well is taken back") {
    for (const layer_windows& windows : {layer_windows{}, layer_windows{20, 0}, layer_windows{3, 40}}) {
        test::counting_resource memory;
        kvq::cache_options o = std4_options();
        o.memory = &memory;
        kvq::cache cache(layers_of(windows), o), same_cache(layers_of(windows), std4_options());
        kvq::sequence_table table(cache, ids), same(same_cache, ids);
        kvq::workspace space(&memory), same_space;
        run(table, following(table, 0, 100), 1, space);
        run(same, following(same, 0, 100), 1, same_space);
        const auto partly = [&] {
            drawn_batch b = following(table, 0, 8);
            for (int i = 0; i < 6; ++i) b.add(i, {3});
            table.begin(b.c(), q_heads, 1, space);
            CHECK(table.tokens(0) == 108);
            rows k(14, kv_heads, dim), v(14, kv_heads, value_dim), q(14, q_heads, dim),
                out(14, q_heads, value_dim);
            table.prefill(1, k.view(), v.view(), q.view(), out.view(), kvq::causal{}, kvq::serial_executor{},
                          space);
        };
        const auto unchanged = [&] {
            CHECK(table.tokens(0) == 100);
            CHECK(table.tokens(3) == 0);
            // A window may have freed a page more.
            if (windows == layer_windows{}) CHECK(state(table) == state(same));
            CHECK(run(table, following(table, 0, 5), 2, space) ==
                  run(same, following(same, 0, 5), 2, same_space));
            table.remove(0, 100, -1);
            same.remove(0, 100, -1);
        };
        partly();
        CHECK(test::contains(test::message_of([&] { table.end(); }), "before layer 0 had its tokens"));
        unchanged();
        partly();
        table.take_back();
        unchanged();
        partly();
        (void)state(table);  // ends the step that is open
        unchanged();
        // Longer than a trim of a window can reach back, with all layers done.
        if (windows != layer_windows{}) {
            drawn_batch b = following(table, 0, 70);
            table.begin(b.c(), q_heads, 1, space);
            rows k(70, kv_heads, dim), v(70, kv_heads, value_dim), q(70, q_heads, dim),
                out(70, q_heads, value_dim);
            for (int layer = 0; layer < layers; ++layer)
                table.prefill(layer, k.view(), v.view(), q.view(), out.view(), kvq::causal{},
                              kvq::serial_executor{}, space);
            table.take_back();
            unchanged();
        }
        // Every allocation of the cache's resource fails in turn: nothing has changed, then all goes well.
        test::fail_everywhere(
            memory, [&] { table.begin(following(table, 0, 70).c(), q_heads, 1, space); }, [] {});
        table.take_back();
        unchanged();
        // A step that was begun takes no memory.
        drawn_batch b = following(table, 0, 70);
        b.add(0, {1});
        b.add(1, {1, 2});
        b.add(170, {0});
        table.begin(b.c(), q_heads, 1, space);
        memory.fail_every(1);
        for (int layer = 0; layer < layers; ++layer) {
            rows k(73, kv_heads, dim), v(73, kv_heads, value_dim), q(73, q_heads, dim),
                out(73, q_heads, value_dim);
            table.prefill(layer, k.view(), v.view(), q.view(), out.view(), kvq::causal{},
                          kvq::serial_executor{}, space);
        }
        memory.fail_every(0);
        table.end();
        CHECK(table.tokens(2) == 1);
        // A trim takes none.
        const int left = windows == layer_windows{} ? 60 : 165;
        memory.fail_every(1);
        table.remove(0, left, -1);
        memory.fail_every(0);
        CHECK(table.tokens(0) == left);
    }
}

TEST_CASE("layers that share keys and values: the bits of sequences that are driven directly") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 3; ++round) {
        std::vector<kvq::layer> list = layers_of({random.one_in(2) ? 0 : random.between(1, 40), 0});
        list.push_back(kvq::shared_with(1));
        list.insert(list.begin() + 1, kvq::shared_with(0));
        list.back().owner = 2;
        kvq::cache_options o = std4_options();
        o.rotary.clear();
        kvq::cache cache(list, o), same_cache(list, o);
        kvq::sequence_table table(cache, ids);
        kvq::sequence direct[2] = {same_cache.new_sequence(), same_cache.new_sequence()};
        kvq::workspace space;
        // Rows of both ids in turns, or in any order, so that they are gathered; now and then a step is not
        // completed.
        for (int step = 0; step < 12; ++step) {
            const bool fails = random.one_in(4), in_turns = random.one_in(2);
            const int n = random.one_in(2) ? random.between(1, 5)
                          : fails          ? random.between(1, o.rollback)  // what a trim takes back exactly
                                           : random.between(20, 80);
            drawn_batch b;
            std::vector<int> rows_of_id[2];
            std::int32_t next[2] = {table.position_max(0) + 1, table.position_max(1) + 1};
            for (int i = 0; i < n; ++i) {
                const int id = in_turns ? i % 2 : random.between(0, 1);
                b.add(next[id]++, {id});
                rows_of_id[id].push_back(i);
            }
            table.begin(b.c(), q_heads, 1, space);
            for (int layer = 0; layer < static_cast<int>(list.size()); ++layer) {
                const bool shared = cache.owner(layer) != layer;
                rows k(shared ? 0 : n, kv_heads, dim), v(shared ? 0 : n, kv_heads, value_dim),
                    q(n, q_heads, dim), out(n, q_heads, value_dim);
                for (rows* r : {&k, &v, &q}) r->x = random.normals(r->x.size());
                if (fails && layer == 3) break;
                table.prefill(layer, k.view(), v.view(), q.view(), out.view(), kvq::causal{},
                              kvq::serial_executor{}, space);
                for (int id = 0; id < 2 && !fails; ++id) {
                    const auto own = [&](rows& all) {
                        const int count = all.tokens == 0 ? 0 : static_cast<int>(rows_of_id[id].size());
                        rows some(count, all.heads, all.channels);
                        for (int i = 0; i < count; ++i)
                            std::copy_n(all.at(rows_of_id[id][static_cast<std::size_t>(i)]),
                                        all.heads * all.channels, some.at(i));
                        return some;
                    };
                    rows mine_k = own(k), mine_v = own(v), mine_q = own(q), expected = own(out),
                         got = expected;
                    if (mine_q.tokens == 0) continue;
                    direct[id].prefill(layer, mine_k.view(), mine_v.view(), mine_q.view(), got.view());
                    REQUIRE(got.x == expected.x);
                }
            }
            if (fails)
                CHECK(
                    test::contains(test::message_of([&] { table.end(); }), "before layer 3 had its tokens"));
            else
                table.end();
            for (int id = 0; id < 2; ++id) REQUIRE(table.tokens(id) == direct[id].tokens());
            const std::vector<std::byte> all = state(table);
            if (step % 4 == 3) restore(table, all);
            REQUIRE(state(table) == all);
        }
        table.clear();
        CHECK(cache.bytes_in_use() == 0);
    }
}

namespace {

/// What a recurrent layer makes of tokens, of which each is a number.
float fold(float state, float x) { return 0.5f * state + x; }

}  // namespace

TEST_CASE("recurrent layers and windows: random batches, removal, copies and states, in a budget") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    int removed = 0, refused = 0;
    for (int round = 0; round < 4; ++round) {
        std::vector<kvq::layer> list = layers_of({random.one_in(2) ? 0 : random.between(1, 40), 0});
        const auto at = list.begin() + random.between(0, 2);
        const auto layer = static_cast<int>(at - list.begin());
        list.insert(at, kvq::state_layer({{.name = "s", .rows = 40}}));
        kvq::cache_options o = std4_options();
        o.rotary = {{.dims = dim, .base = base}};
        o.snapshots.every = 10;
        const int most = 100, chunk = 40;
        o.snapshots.most_bytes = 50000;
        {
            const kvq::cache unlimited(list, o);
            o.byte_budget =
                kvq::budget(o, list, {.tokens = most, .sequences = ids, .chunk = chunk, .cuts = 1}) +
                (ids + 1) * unlimited.state_layout()->live_bytes();
        }
        kvq::cache cache(list, o);
        kvq::sequence_table table(cache, ids);
        kvq::workspace space;
        std::vector<std::vector<float>> model(ids);  // the numbers of the tokens
        const auto value_of = [&](const kvq::sequence& s) {
            kvq::sequence copy = s.fork();
            return copy.state().values<float>(layer, 0)[7];
        };
        const auto check = [&] {
            for (int id = 0; id < ids; ++id) {
                const std::vector<float>& held = model[static_cast<std::size_t>(id)];
                REQUIRE(table.tokens(id) == static_cast<int>(held.size()));
                float s = 0.0f;
                for (const float x : held) s = fold(s, x);
                if (const kvq::sequence* const found = table.find(id)) REQUIRE(value_of(*found) == s);
            }
        };
        for (int step = 0; step < 60; ++step) {
            const int id = random.between(0, ids - 1), other = random.between(0, ids - 1),
                      kind = random.between(0, 9);
            std::vector<float>& held = model[static_cast<std::size_t>(id)];
            if (kind < 6) {
                drawn_batch b;
                std::vector<float> numbers;
                std::vector<std::vector<float>> after = model;
                const int n = random.one_in(2) ? 1 : random.between(1, chunk);
                for (int i = 0; i < n; ++i) {
                    std::vector<std::int32_t> of{random.one_in(4) ? other : id};
                    if (kind == 0 && other != id) of = {id, other};
                    std::int32_t position = 0;
                    for (const int j : of) {
                        position = std::max(position, table.position_max(j) + 1 + i);
                        if (after[static_cast<std::size_t>(j)].size() == most) of.clear();
                    }
                    if (of.empty()) continue;
                    numbers.push_back(random.normal());
                    for (const int j : of) after[static_cast<std::size_t>(j)].push_back(numbers.back());
                    b.add(position, of);
                }
                if (b.tokens() == 0) continue;
                table.begin(b.c(), q_heads, 1, space);
                std::vector<float> outputs(numbers.size(), NAN);
                for (int i = 0; i < cache.layer_count(); ++i) {
                    if (cache.holds_tokens(i)) {
                        rows k(b.tokens(), kv_heads, dim), v(b.tokens(), kv_heads, value_dim),
                            q(b.tokens(), q_heads, dim), out(b.tokens(), q_heads, value_dim);
                        table.prefill(i, k.view(), v.view(), q.view(), out.view(), kvq::causal{},
                                      kvq::serial_executor{}, space);
                        continue;
                    }
                    for (int p = 0; p < table.step_parts(); ++p) {
                        const kvq::sequence_table::step_part part = table.part_of_step(p);
                        float& s = part.state->values<float>(layer, 0)[7];
                        for (std::size_t r = 0; r < part.rows.size(); ++r) {
                            const auto row = static_cast<std::size_t>(part.rows[r]);
                            s = fold(s, numbers[row]);
                            if (part.wanted[r]) outputs[row] = s;
                        }
                    }
                }
                if (random.one_in(4)) {
                    table.take_back();
                } else {
                    table.end(random.one_in(2));
                    model = std::move(after);
                    std::vector<std::size_t> seen(ids);
                    for (int i = b.tokens() - 1; i >= 0; --i) {  // the last row of an id is its state
                        const auto of = static_cast<std::size_t>(b.ids_of[static_cast<std::size_t>(i)][0]);
                        if (seen[of]++ > 0) continue;
                        float s = 0.0f;
                        for (const float x : model[of]) s = fold(s, x);
                        REQUIRE(outputs[static_cast<std::size_t>(i)] == s);
                    }
                }
            } else if (kind < 8 && !held.empty()) {
                const auto snapshots = table.find(id)->state().snapshots();
                int n = random.between(0, static_cast<int>(held.size()) - 1);
                if (random.one_in(2) && !snapshots.empty()) n = random.pick(snapshots).tokens;
                if (n == static_cast<int>(held.size())) continue;
                const std::int32_t from = table.positions(id)[static_cast<std::size_t>(n)];
                const int to = table.find(id)->reach(n);
                const bool can = to == n && table.find(id)->can_trim(n);
                const std::vector<std::byte> before = state(table);
                const std::string message = test::message_of([&] { table.remove(id, from, -1); });
                REQUIRE(message.empty() == can);
                if (can) {
                    held.resize(static_cast<std::size_t>(n));
                    ++removed;
                } else {
                    REQUIRE(state(table) == before);
                    if (to < n)
                        REQUIRE(test::contains(
                            message, ("the newest one before is of " + std::to_string(to)).c_str()));
                    ++refused;
                }
                const std::int32_t least = table.position_min(id);
                if (held.size() > 1)
                    REQUIRE(test::contains(test::message_of([&] { table.remove(id, least, least + 1); }),
                                           "erase tokens of a state"));
            } else if (kind == 8) {
                table.remove(other, -1, -1);
                model[static_cast<std::size_t>(other)].clear();
                table.copy(id, other, -1, -1);
                model[static_cast<std::size_t>(other)] = held;
            } else {
                const std::vector<std::byte> all = state(table);
                table.clear();
                restore(table, all);
                REQUIRE(state(table) == all);
            }
            check();
        }
        CHECK_FALSE(table.can_shift());
        table.clear();
        CHECK(cache.bytes_in_use() == 0);
    }
    CHECK(removed > 0);
    CHECK(refused > 0);
}

TEST_CASE("a budget that is too small") {
    kvq::cache_options o = std4_options();
    o.byte_budget = 60000;
    o.preallocate = true;
    kvq::cache cache(shape, o);
    kvq::sequence_table table(cache, ids);
    kvq::workspace space;
    CHECK(table.bytes() == 60000);
    run(table, following(table, 0, 50), 1, space);
    const auto before = state(table);
    CHECK_THROWS_AS(table.begin(following(table, 1, 3000).c(), q_heads, 1, space), kvq::out_of_memory);
    CHECK(state(table) == before);
    run(table, following(table, 0, 50), 1, space);
}

TEST_CASE("bad input is refused with a sentence") {
    kvq::cache cache(shape, std4_options());
    kvq::sequence_table table(cache, ids);
    kvq::workspace space;
    run(table, following(table, 0, 40), 1, space);
    const auto before = state(table);
    const auto begins = [&](drawn_batch b, const char* text) {
        CHECK(test::contains(test::message_of([&] { table.begin(b.c(), q_heads, 1, space); }), text));
    };
    drawn_batch b;
    b.add(39, {0});
    begins(b, "token 0 of the batch has position 39 in sequence 0, which is not behind position 39");
    b = {};
    b.add(3, {1});
    b.add(3, {1});
    begins(b, "token 1 of the batch has position 3 in sequence 1, which is not behind position 3");
    b = {};
    b.add(3, {1, 1});
    begins(b, "position 3 in sequence 1");
    b = {};
    b.add(-1, {1});
    begins(b, "position -1");
    b = {};
    b.add(0, {5});
    begins(b, "sequence 5, which is not among the 5");
    b = {};
    b.add(0, {});
    begins(b, "token 0 of the batch has 0 ids");
    CHECK(test::contains(test::message_of([&] {
                             table.begin({2, nullptr, nullptr, nullptr}, q_heads, 1, space);
                         }),
                         "needs positions"));
    CHECK(test::contains(test::message_of([&] { table.begin(following(table, 1, 2).c(), 3, 1, space); }),
                         "3 query heads"));
    CHECK(test::contains(test::message_of([&] { (void)table.tokens(-1); }), "sequence -1"));
    CHECK(test::contains(test::message_of([&] { table.keep(7); }), "sequence 7"));
    CHECK(test::contains(test::message_of([&] { table.copy(0, 9, 0, 5); }), "sequence 9"));
    CHECK(test::contains(test::message_of([&] { table.divide(0, 0, -1, 2); }), "cannot be divided by 2"));
    CHECK(test::message_of([&] { table.divide(0, 0, -1, 1); }).empty());
    CHECK(test::message_of([&] { table.divide(1, 0, -1, 2); }).empty());  // nothing to divide
    CHECK(test::contains(test::message_of([&] { kvq::sequence_table(cache, 0); }), "at least 1 id"));
    rows k(1, kv_heads, dim), v(1, kv_heads, value_dim), q(1, q_heads, dim), out(1, q_heads, value_dim);
    CHECK(test::contains(test::message_of([&] {
                             table.prefill(0, k.view(), v.view(), q.view(), out.view(), kvq::causal{},
                                           kvq::serial_executor{}, space);
                         }),
                         "but the step has 0 tokens"));
    CHECK(state(table) == before);
    // Keys that cannot move.
    kvq::cache_options o = std4_options();
    o.rotary.clear();
    kvq::cache fixed(shape, o);
    kvq::sequence_table still(fixed, ids);
    CHECK(table.can_shift());
    CHECK_FALSE(still.can_shift());
    run(still, following(still, 0, 40), 1, space);
    const auto held = state(still);
    CHECK(test::contains(test::message_of([&] { still.remove(0, 3, 5); }), "cache_options::rotary"));
    CHECK(test::contains(test::message_of([&] { still.shift(0, 3, 5, 1); }), "cache_options::rotary"));
    CHECK(test::contains(test::message_of([&] { still.copy(0, 1, 3, 5); }), "cache_options::rotary"));
    CHECK(state(still) == held);
    still.copy(0, 1, 0, 5);
    CHECK(still.tokens(1) == 5);
    still.remove(0, 30, -1);
    CHECK(still.tokens(0) == 30);
    // What a window has freed.
    kvq::cache narrow(layers_of({3, 0}), std4_options());
    kvq::sequence_table few(narrow, ids);
    run(few, following(few, 0, 200), 1, space);
    run(few, following(few, 1, 20), 1, space);
    const auto whole = state(few);
    for (const auto& change :
         std::vector<std::function<void()>>{[&] { few.remove(0, 100, -1); }, [&] { few.remove(-1, 100, -1); },
                                            [&] { few.copy(0, 2, 0, 100); }, [&] { few.copy(0, 2, 50, 100); },
                                            [&] { few.copy(0, 1, 50, -1); }})
        CHECK(test::contains(test::message_of(change), "layer 0, sliding window of 3, 2 x 16 and 24"));
    CHECK(state(few) == whole);
}

TEST_CASE("damaged states are refused") {
    kvq::cache cache(shape, std4_options());
    kvq::sequence_table table(cache, ids), other(cache, 2);
    kvq::workspace space;
    run(table, following(table, 0, 90), 1, space);
    table.copy(0, 3, -1, 40);
    const std::vector<std::byte> good = state(table);
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int i = 0; i < 400; ++i) {
        std::vector<std::byte> bad = good;
        // The first bytes, and places anywhere.
        const std::size_t at = i < 60 ? static_cast<std::size_t>(i) : random.bits() % bad.size();
        INFO("byte ", at);
        if (i % 3 == 0)
            bad.resize(at);
        else
            bad[at] ^= static_cast<std::byte>(1 << random.between(0, 7));
        CHECK_THROWS_AS(restore(table, bad), kvq::error);
        CHECK(table.tokens(0) == 90);
    }
    CHECK(state(table) == good);
    CHECK(test::contains(test::message_of([&] { restore(other, good); }),
                         "sequence 3, which is not among the 2"));
    CHECK(test::contains(test::message_of([&] { restore(other, good, 1); }),
                         "2 sequences, for 1 of the table"));
    CHECK(other.tokens(1) == 0);
    restore(other, state(table, 3), 1);
    CHECK(other.tokens(1) == 40);
    restore(other, state(table, 1), 1);  // an empty one
    CHECK(other.tokens(1) == 0);
}

}  // namespace sequence_table_tests
