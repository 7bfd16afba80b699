// SPDX-License-Identifier: MIT
// Bytes after any erases, shifts, splices, trims, appends and forks: at most 4 times those of the tokens that
// are shown and one page per layer. Comparison family: double arithmetic on what a sequence reports.
//   KVQ_SHIFT_STEPS   steps of the random test; 100000 takes minutes
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <kvq/adapters/sequence_table.hpp>
#include <kvq/cache/sequence_access.hpp>
#include <kvq/estimate/footprint.hpp>
#include <set>

#include "support/attention_error.hpp"
#include "support/memory.hpp"
#include "support/saved.hpp"
#include "support/typed_cache.hpp"

namespace shifts_bytes_tests {

namespace {

using kvq::detail::sequence_access;

kvq::rotary_embedding rotary_of(int dims) {
    kvq::rotary_embedding r;
    r.dims = dims;
    return r;
}

/// Bytes of the pages that a sequence shows, headers included, each counted once.
std::size_t shown_bytes(const kvq::sequence& s) {
    std::set<const kvq::page*> pages;
    std::size_t bytes = 0;
    for (const auto& table : sequence_access::tables(s))
        for (const kvq::page_span& span : table.spans)
            for (const kvq::page_ref& p : span.pages)
                if (pages.insert(p.get()).second) bytes += kvq::page_pool::allocation(p->bytes);
    return bytes;
}
/// The part of the footprint that shown_bytes() counts.
std::size_t footprint_of_pages(const kvq::cache& cache, int tokens) {
    const auto f = kvq::footprint(cache, tokens);
    return f.quantized + f.window +
           2 * sizeof(kvq::page) * static_cast<std::size_t>(cache.geometry().spans(tokens)) *
               static_cast<std::size_t>(cache.shape().layers);
}
/// A 16-bit page of every layer, K and V.
std::size_t page_per_layer(const kvq::cache& cache) {
    const int tokens = cache.options().page_tokens;
    return static_cast<std::size_t>(cache.shape().layers) *
           (kvq::page_pool::allocation(cache.page_bytes(kvq::tensor::key, 0, tokens)) +
            kvq::page_pool::allocation(cache.page_bytes(kvq::tensor::value, 0, tokens)));
}

/// A token of a text: its key before the rotation, and its value, which are those of all layers.
struct token {
    std::uint64_t id;  // in its sequence
    std::uint64_t text;
    std::int64_t position;
};
void rotate(double* x, int dim, std::int64_t by) {
    for (int j = 0; j < dim / 2; ++j) {
        const double a = std::pow(10000.0, -2.0 * j / dim) * static_cast<double>(by);
        const double u = x[j], v = x[j + dim / 2];
        x[j] = u * std::cos(a) - v * std::sin(a);
        x[j + dim / 2] = v * std::cos(a) + u * std::sin(a);
    }
}
std::vector<float> key_of(const token& t, int heads, int dim) {
    test::generator random(t.text);
    std::vector<float> k;
    for (int h = 0; h < heads; ++h) {
        std::vector<double> x;
        for (int c = 0; c < dim; ++c) x.push_back(static_cast<double>(random.normal()));
        rotate(x.data(), dim, t.position);
        for (const double y : x) k.push_back(static_cast<float>(y));
    }
    return k;
}
std::vector<float> value_of(const token& t, int heads, int dim) {
    test::generator random(~t.text);
    std::vector<float> v;
    for (int c = 0; c < heads * dim; ++c) v.push_back(random.normal());
    return v;
}

/// The row of a quantized page as it is stored, without a rotation; no row: it is in 16 bit.
using stored_row = std::vector<float>;

struct text {
    kvq::sequence s;
    std::vector<token> tokens;
    std::vector<std::vector<stored_row>> rows[2] = {};  // [K, V][layer][token]
};

std::vector<std::vector<stored_row>> stored_rows(const kvq::cache& cache, const kvq::sequence& s,
                                                 kvq::tensor role) {
    const int dim = cache.shape().dim(role), heads = cache.shape().kv_heads;
    std::vector<std::vector<stored_row>> rows;
    for (int layer = 0; layer < cache.shape().layers; ++layer) {
        rows.emplace_back();
        const kvq::layer_pages pages = s.pages(layer);
        for (int e = 0; e < pages.entries(); ++e) {
            const auto entry = pages.at(e);
            const kvq::page& p = role == kvq::tensor::key ? *entry.keys : *entry.values;
            const auto first = rows.back().size();
            rows.back().resize(first + static_cast<std::size_t>(entry.tokens));
            if (p.format == 0) continue;
            const kvq::block_shape block{role, p.tokens, dim};
            const kvq::format& f = cache.table(role)[p.format];
            std::vector<float> x(block.values()), scratch(block.values());
            for (int h = 0; h < heads; ++h) {
                f.functions().dequantize(f.scheme(), block, {layer, h},
                                         p.data() + f.block_bytes(block) * static_cast<std::size_t>(h),
                                         kvq::float_type::fp32, x.data(), dim, scratch.data());
                for (int t = 0; t < entry.tokens; ++t) {
                    const auto at = x.begin() + static_cast<std::ptrdiff_t>(entry.skip + t) * dim;
                    stored_row& row = rows.back()[first + static_cast<std::size_t>(t)];
                    row.insert(row.end(), at, at + dim);
                }
            }
        }
    }
    return rows;
}

/// Steps of the random test.
int steps() {
    const char* const wanted = std::getenv("KVQ_SHIFT_STEPS");
    return wanted ? std::atoi(wanted) : test::rounds(900);
}

/// Values that changed their codes are counted in usage().repacked. Returns how many did.
std::size_t check_codes(const kvq::cache& cache, text& t,
                        const std::vector<std::vector<stored_row>> (&was)[2], std::size_t repacked_before) {
    std::size_t changed = 0;
    for (const auto role : {kvq::tensor::key, kvq::tensor::value})
        t.rows[static_cast<int>(role)] = stored_rows(cache, t.s, role);
    for (std::size_t layer = 0; layer < t.rows[0].size(); ++layer)
        for (std::size_t i = 0; i < t.tokens.size(); ++i) {
            bool same = true;
            for (int role = 0; role < 2; ++role)
                same = same && (was[role][layer][i].empty() || t.rows[role][layer][i].empty() ||
                                t.rows[role][layer][i] == was[role][layer][i]);
            changed += !same;
        }
    REQUIRE(changed <= t.s.usage().repacked - repacked_before);
    return changed;
}

/// Order, positions and values: what is reported is near what was appended.
void check_values(const kvq::cache& cache, const text& t, double most) {
    const int heads = cache.shape().kv_heads, dim = cache.shape().head_dim;
    for (int layer = 0; layer < cache.shape().layers; ++layer) {
        const auto k = test::dequantized(t.s, cache.shape(), layer, kvq::tensor::key),
                   v = test::dequantized(t.s, cache.shape(), layer, kvq::tensor::value);
        double error[2] = {}, size[2] = {};
        for (int i = 0; i < t.s.tokens(); ++i) {
            const token& one = t.tokens[static_cast<std::size_t>(i)];
            const std::vector<float> wanted[2] = {key_of(one, heads, dim), value_of(one, heads, dim)};
            for (int role = 0; role < 2; ++role) {
                const float* const got = (role == 0 ? k : v).view().at(i, 0);
                for (int c = 0; c < heads * dim; ++c) {
                    const double x = wanted[role][static_cast<std::size_t>(c)],
                                 d = static_cast<double>(got[c]) - x;
                    error[role] += d * d;
                    size[role] += x * x;
                }
            }
        }
        for (int role = 0; role < 2; ++role) {
            CAPTURE(role);
            REQUIRE(error[role] <= most * most * size[role]);
        }
    }
}

void append(kvq::cache& cache, text& t, test::generator& random, int n) {
    const int heads = cache.shape().kv_heads, dim = cache.shape().head_dim;
    test::tensor<float> k(n, heads, dim), v(n, heads, dim);
    for (int i = 0; i < n; ++i) {
        const token fresh{random.bits(), random.bits(), static_cast<std::int64_t>(t.tokens.size())};
        const auto key = key_of(fresh, heads, dim), value = value_of(fresh, heads, dim);
        std::copy(key.begin(), key.end(), k.view().at(i, 0));
        std::copy(value.begin(), value.end(), v.view().at(i, 0));
        t.tokens.push_back(fresh);
    }
    for (int layer = 0; layer < cache.shape().layers; ++layer) t.s.append(layer, k.view(), v.view());
}

/// One random change. Returns whether it may have repacked.
bool change(kvq::cache& cache, std::vector<text>& texts, std::size_t i, test::generator& random,
            int longest) {
    text& t = texts[i];
    auto& tokens = t.tokens;
    const int n = t.s.tokens(), what = n < 20 ? 0 : n > longest ? 4 : random.between(0, 13);
    // Often a token or two, and often near the front.
    const int first = random.one_in(3) ? random.between(0, std::min(n, 12)) : random.between(0, n),
              last = std::min(n, first + (random.one_in(2) ? random.between(1, 3)
                                                           : random.between(0, random.one_in(3) ? n : 40)));
    if (what < 4) {
        append(cache, t, random, random.between(1, random.one_in(4) ? 70 : 6));
    } else if (what < 8) {
        t.s.erase(first, last);
        for (int at = last; at < n; ++at) tokens[static_cast<std::size_t>(at)].position -= last - first;
        tokens.erase(tokens.begin() + first, tokens.begin() + last);
    } else if (what < 9) {
        const int by = random.between(-300, 300);
        t.s.shift(first, last, by);
        for (int at = first; at < last; ++at) tokens[static_cast<std::size_t>(at)].position += by;
    } else if (what < 11) {
        const text& other = texts[random.one_in(2) ? i : static_cast<std::size_t>(random.between(0, 2))];
        const int from = random.between(0, other.s.tokens()),
                  to = std::min(other.s.tokens(), from + random.between(0, random.one_in(4) ? 60 : 6));
        std::vector<token> taken(other.tokens.begin() + from, other.tokens.begin() + to);
        for (token& one : taken) {
            one.id = random.bits();
            one.position += n - from;
        }
        t.s.splice(other.s, from, to);
        tokens.insert(tokens.end(), taken.begin(), taken.end());
    } else if (what < 13) {
        t.s.trim(last);
        tokens.resize(static_cast<std::size_t>(last));
    } else {
        text& other = texts[static_cast<std::size_t>(random.between(0, 2))];
        if (&other == &t) return false;
        other.s = t.s.fork();
        other.tokens = tokens;
    }
    return what >= 4;
}

/// seed: so that a failure is replayed without the steps of other caches.
template <class C>
void random_steps(std::uint64_t seed, int count, float repack, double most_error) {
    test::generator random(seed);
    kvq::cache_shape shape;
    shape.layers = C::key_table::size - 1;
    shape.kv_heads = random.between(1, 2);
    shape.head_dim = 2 * random.between(12, 24);
    kvq::cache_options options;
    options.sinks = random.pick(std::vector<int>{0, 4});
    options.recent = random.pick(std::vector<int>{0, 8, 40});
    options.page_tokens = random.pick(std::vector<int>{32, 64, 100, 128});
    options.rollback = random.pick(std::vector<int>{0, 16});
    options.repack = repack;
    options.layers = test::rotate_formats<C>(shape.layers);
    options.rotary = {rotary_of(shape.head_dim)};
    INFO("pages of ", options.page_tokens, ", sinks ", options.sinks, ", recent ", options.recent,
         ", rollback ", options.rollback, ", heads ", shape.kv_heads, " x ", shape.head_dim);
    auto cache = test::make_cache<C>(shape, options);
    std::vector<text> texts;
    for (int i = 0; i < 3; ++i) texts.push_back({cache.new_sequence(), {}});
    std::size_t changed = 0;
    double worst = 0, largest = 0;
    for (int step = 0; step < count; ++step) {
        CAPTURE(step);
        const auto i = static_cast<std::size_t>(random.between(0, 2));
        text& t = texts[i];
        const std::size_t repacked = t.s.usage().repacked;
        const bool checks = step % 3 == 0;
        std::vector<std::vector<stored_row>> was[2];
        std::vector<token> were;
        if (checks) {
            were = t.tokens;
            for (const auto role : {kvq::tensor::key, kvq::tensor::value})
                was[static_cast<int>(role)] = stored_rows(cache, t.s, role);
        }
        const bool cut = change(cache, texts, i, random, 500);
        if (!cut) REQUIRE(t.s.usage().repacked == repacked);
        if (repack == 0.0f) REQUIRE(t.s.usage().repacked == 0);
        const int n = t.s.tokens();
        REQUIRE(n == static_cast<int>(t.tokens.size()));
        const std::size_t bytes = shown_bytes(t.s);
        if (repack > 0.0f) {
            const auto limit = static_cast<std::size_t>(static_cast<double>(footprint_of_pages(cache, n)) /
                                                        static_cast<double>(repack)) +
                               page_per_layer(cache);
            CAPTURE(n);
            REQUIRE(bytes <= limit);
            largest = std::max(largest, static_cast<double>(bytes) / static_cast<double>(limit));
        }
        if (checks) {
            // Rows of the tokens that are still there.
            std::vector<std::vector<stored_row>> before[2];
            std::size_t at = 0;
            std::vector<std::ptrdiff_t> from;
            for (const token& one : t.tokens) {
                std::size_t next = at;
                while (next < were.size() && were[next].id != one.id) ++next;
                from.push_back(next < were.size() ? static_cast<std::ptrdiff_t>(next) : -1);
                if (next < were.size()) at = next + 1;
            }
            for (int role = 0; role < 2; ++role)
                for (const auto& layer : was[role]) {
                    before[role].emplace_back();
                    for (const std::ptrdiff_t f : from)
                        before[role].back().push_back(f < 0 ? stored_row{}
                                                            : layer[static_cast<std::size_t>(f)]);
                }
            changed += check_codes(cache, t, before, repacked);
        }
        if (n == 0 || step % 10 != 0) continue;
        check_values(cache, t, most_error);
        const int layer = random.between(0, shape.layers - 1);
        const auto q = test::random_tensor(random, std::min(n, 2), 2 * shape.kv_heads, shape.head_dim);
        const double error = test::measure_attention(cache, t.s, layer, q).of_terms;
        REQUIRE(error < 1e-3);
        worst = std::max(worst, error);
    }
    MESSAGE("largest share of the bound ", largest, ", error of attention ", worst, ", ", changed,
            " tokens seen with other codes");
    texts.clear();
    REQUIRE(cache.bytes_in_use() == 0);
}

}  // namespace

TEST_CASE("bytes stay in proportion to the tokens that are shown, whatever was cut") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    const int count = steps();
    random_steps<test::int8_cache>(seed, count, 0.25f, 0.03);
    random_steps<test::kivi_cache>(seed + 1, count, 0.25f, 0.3);
    random_steps<test::plain_cache>(seed + 2, count, 0.25f, 0.01);
    random_steps<test::mixed_cache>(seed + 3, count, 0.5f, 0.7);
    random_steps<test::int8_cache>(seed + 4, count / 3, 0.0f, 0.02);
}

TEST_CASE("hostile cuts: single tokens of many pages, and trims again and again") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 32};
    kvq::cache_options options{.recent = 8, .page_tokens = 64};
    options.rotary = {rotary_of(32)};
    test::int8_cache cache(shape, options);
    const auto check = [&](const text& t) {
        REQUIRE(shown_bytes(t.s) <= 4 * footprint_of_pages(cache, t.s.tokens()) + page_per_layer(cache));
    };
    const auto erase = [](text& t, int first, int last) {
        t.s.erase(first, last);
        for (std::size_t at = static_cast<std::size_t>(last); at < t.tokens.size(); ++at)
            t.tokens[at].position -= last - first;
        t.tokens.erase(t.tokens.begin() + first, t.tokens.begin() + last);
    };
    text whole{cache.new_sequence(), {}};
    append(cache, whole, random, 64 * 30);
    for (const int kept : {1, 2, 15, 17, 40}) {
        INFO(kept, " tokens kept of every 64");
        text t{whole.s.fork(), whole.tokens};
        for (int at = 0; at + 64 < t.s.tokens(); at += kept) {
            erase(t, at + kept, at + 64);
            check(t);
        }
        check_values(cache, t, 0.03);
        // Once more: nothing is left to be repacked.
        const std::size_t repacked = t.s.usage().repacked;
        t.s.shift(0, 0, 1);
        t.s.shift(0, t.s.tokens(), 1);
        for (token& one : t.tokens) ++one.position;
        CHECK(t.s.usage().repacked == repacked);
    }
    text one_by_one{cache.new_sequence(), {}};
    append(cache, one_by_one, random, 5);
    for (int at = 0; at < 64 * 20; at += 37) {
        one_by_one.s.splice(whole.s, at, at + 1);
        token taken = whole.tokens[static_cast<std::size_t>(at)];
        taken.position = one_by_one.s.tokens() - 1;
        one_by_one.tokens.push_back(taken);
        check(one_by_one);
    }
    check_values(cache, one_by_one, 0.03);
    text trimmed{cache.new_sequence(), {}};
    for (int held = 0; held < 150; ++held) {
        append(cache, trimmed, random, 100);
        trimmed.s.trim(held + 1);
        trimmed.tokens.resize(static_cast<std::size_t>(held) + 1);
        check(trimmed);
    }
    check_values(cache, trimmed, 0.03);
    CHECK(trimmed.s.usage().repacked > 0);
}

TEST_CASE("context shifts of any length, and erases of one token, cost less than 1.3 times the footprint") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 32};
    const int context = 600;
    test::tensor<float> x = test::random_tensor(random, context, 1, 32);
    for (const int sinks : {0, 4}) {
        kvq::cache_options options{.sinks = sinks, .recent = 32, .page_tokens = 64};
        options.rotary = {rotary_of(32)};
        test::kivi_cache cache(shape, options);
        // The most bytes of any length, of which a step may be any part.
        std::size_t most = 0;
        for (int n = context - options.page_tokens; n <= context; ++n)
            most = std::max(most, footprint_of_pages(cache, n));
        const auto check = [&](const kvq::sequence& s) {
            REQUIRE(static_cast<double>(shown_bytes(s)) <= 1.3 * static_cast<double>(most));
        };
        for (const int keep : {0, 4, 100})
            for (const int discard : {1, 32, 64, 128, (context - keep) / 2}) {
                INFO("sinks ", sinks, ", keep ", keep, ", discard ", discard);
                auto s = cache.new_sequence();
                s.append(0, x.view(), x.view());
                for (int round = 0; round < 300 / discard + 3; ++round) {
                    s.erase(keep, keep + discard);
                    check(s);
                    for (int left = discard; left > 0;) {
                        const int n = std::min(left, round % 2 == 0 ? 1 : 40);
                        s.append(0, x.slice(0, n), x.slice(0, n));
                        left -= n;
                        check(s);
                    }
                }
                // The tail is an ordinary sequence of whole pages: the cut leaves at most three spans.
                CHECK(s.pages(0).entries() <= cache.geometry().spans(context) + 3);
                // As an engine does it, which removes positions and then moves the rest.
                kvq::sequence_table table(cache, 1);
                kvq::workspace space;
                static const std::int32_t id = 0;
                int past = 0;
                const auto feed = [&](int n) {
                    std::vector<std::int32_t> positions(static_cast<std::size_t>(n));
                    const std::vector<const std::int32_t*> ids(static_cast<std::size_t>(n), &id);
                    for (int i = 0; i < n; ++i) positions[static_cast<std::size_t>(i)] = past + i;
                    table.begin({n, positions.data(), nullptr, ids.data()}, 1, 1, space);
                    test::tensor<float> out(n, 1, 32);
                    table.prefill(0, x.slice(0, n), x.slice(0, n), x.slice(0, n), out.view(), kvq::causal{},
                                  kvq::serial_executor{}, space);
                    table.end();
                    past += n;
                };
                feed(context);
                for (int round = 0; round < 40 / discard + 2; ++round) {
                    table.remove(0, keep, keep + discard);
                    table.shift(0, keep + discard, past, -discard);
                    past -= discard;
                    feed(discard);
                    REQUIRE(static_cast<double>(cache.bytes_in_use() - shown_bytes(s)) <=
                            1.3 * static_cast<double>(most));
                }
            }
    }
}

TEST_CASE(
    "a cut that finds no memory to repack leaves the pages as they are, and the next one repacks them") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 32};
    test::counting_resource memory;
    kvq::cache_options options{.recent = 0, .page_tokens = 32, .rollback = 0};
    options.rotary = {rotary_of(32)};
    options.memory = &memory;
    test::int8_cache cache(shape, options);
    text t{cache.new_sequence(), {}};
    append(cache, t, random, 32 * 8);
    const auto whole = cache.bytes_in_use();
    memory.arm(0);
    t.s.trim(32 * 6 + 2);
    memory.arm(test::counting_resource::never);
    t.tokens.resize(32 * 6 + 2);
    CHECK(t.s.usage().repacked == 0);
    CHECK(cache.bytes_in_use() == whole / 8 * 7);
    t.s.trim(32 * 6 + 1);
    t.tokens.pop_back();
    CHECK(t.s.usage().repacked == 1);
    CHECK(cache.bytes_in_use() < whole / 8 * 7);
    check_values(cache, t, 0.03);
    // Every allocation of an erase may fail.
    for (int i = 0; i < 2000; ++i) {
        auto s = t.s.fork();
        const auto before = test::contents(cache, s, true);
        bool failed = false;
        memory.arm(i);
        try {
            s.erase(3, 32 * 3 - 2);
        } catch (const std::bad_alloc&) {
            failed = true;
        }
        memory.arm(test::counting_resource::never);
        if (failed)
            REQUIRE(test::contents(cache, s, true) == before);
        else
            REQUIRE(s.tokens() == t.s.tokens() - (32 * 3 - 5));
        if (!failed && s.usage().repacked == t.s.usage().repacked + 5) break;
        REQUIRE(i < 1999);
    }
}

}  // namespace shifts_bytes_tests
