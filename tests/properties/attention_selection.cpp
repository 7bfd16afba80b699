// SPDX-License-Identifier: MIT
// Comparison family: exact for pages that are chosen (the same bits as under a mask), on any number of
// threads and in any batch; double arithmetic for bounds of scores and for what values that are not read
// cost.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <kvq/core/thread_pool.hpp>
#include <kvq/policy/ring.hpp>

#include "support/attention_error.hpp"
#include "support/messages.hpp"
#include "support/typed_cache.hpp"

using test::append;

namespace attention_selection_tests {

namespace {

struct attended {
    std::vector<float> out, lse;
    bool operator==(const attended&) const = default;
};

attended attend(const kvq::sequence& s, const kvq::cache_shape& shape, int layer,
                const test::tensor<float>& q, const kvq::mods_view& mods, int threads = 1) {
    const auto qv = q.view();
    test::tensor<float> out(qv.tokens, qv.heads, shape.dim(kvq::tensor::value));
    std::fill(out.values().begin(), out.values().end(), -1.0f);
    attended a{{}, std::vector<float>(static_cast<std::size_t>(qv.tokens * qv.heads), 77.0f)};
    kvq::workspace space;
    s.attend(layer, qv, kvq::output_view(out.view()).with_lse(a.lse.data()), mods, kvq::thread_pool(threads),
             space);
    a.out = out.values();
    return a;
}

/// The ranges of every query in one kv head, as the arguments of token_ranges.
struct ranges_of_queries {
    std::vector<kvq::token_range> ranges;
    std::vector<int> starts{0};

    ranges_of_queries(const std::vector<kvq::chosen_tokens>& chosen, int layer, int kv_head, int queries) {
        for (int i = 0; i < queries; ++i) {
            for (const kvq::chosen_tokens& c : chosen)
                if (c.layer == layer && c.kv_head == kv_head && c.first_query <= i && i <= c.last_query)
                    ranges.push_back(c.tokens);
            starts.push_back(static_cast<int>(ranges.size()));
        }
    }
    kvq::token_ranges mask(int first_query) const { return {ranges, starts, first_query}; }
};

/// Hides nothing; unlike `causal`, it does not keep the causal mask beside `bidirectional`.
struct everything {
    bool mask(int, int) const { return true; }
    kvq::page_visibility mask_page(int, int, int, int) const { return kvq::page_visibility::all; }
};

/// Calls use(mods_view) with `part` and random masks and score modifiers beside it. The same ones for the
/// same seed.
template <class Part, class Use>
void beside(std::uint64_t seed, int tokens, int heads, const Part& part, const Use& use) {
    test::generator random(seed);
    const int window = random.between(1, 2 * tokens), kept = random.between(0, 9);
    std::vector<float> slopes, sinks;
    for (int h = 0; h < heads; ++h) {
        slopes.push_back(0.1f * random.uniform());
        sinks.push_back(random.normal());
    }
    std::vector<int> starts{0};
    for (int t = 1; t < tokens; ++t)
        if (random.one_in(40)) starts.push_back(t);
    switch (random.between(0, 7)) {
        case 0:
            return use(kvq::mods{kvq::sink_window{window, kept}, part});
        case 1:
            return use(kvq::mods{part, kvq::document_mask{starts}, kvq::softcap{5.0f}});
        case 2:
            return use(kvq::mods{kvq::alibi{slopes}, part});
        case 3:
            return use(kvq::mods{kvq::learned_sinks{sinks}, kvq::mods{part}});
        case 4:
            return use(kvq::mods{kvq::bidirectional{}, part});
        default:
            return use(part);
    }
}

/// Drafts up to nine tokens in every layer and keeps the first of them.
void draft_and_keep(kvq::sequence& sequence, test::generator& random, int layers, const test::stream& s,
                    int tokens) {
    const int held = sequence.tokens(), n = std::min(9, tokens - held);
    if (n == 0) return;
    std::vector<int> path;
    for (int i = random.between(0, n); i > 0; --i) path.push_back(static_cast<int>(path.size()));
    for (int layer = 0; layer < layers; ++layer)
        sequence.append_draft(layer, s.k.slice(held, n), s.v.slice(held, n));
    sequence.keep(path);
}

/// A sequence with a past: appended, drafted, trimmed, moved, spliced, requantized.
template <class C>
kvq::sequence random_sequence(C& cache, test::generator& random, const kvq::cache_shape& shape, int tokens) {
    const test::stream s(random, shape, tokens);
    auto sequence = cache.new_sequence();
    while (sequence.tokens() < tokens) {
        append(sequence, shape.layers, s, sequence.tokens(),
               random.between(1, random.one_in(2) ? tokens - sequence.tokens()
                                                  : std::min(60, tokens - sequence.tokens())));
        const int held = sequence.tokens();
        const int first = random.between(0, held - 1), last = random.between(first, held - 1);
        switch (random.between(0, 9)) {
            case 0:
                sequence.trim(random.between(1, held));
                break;
            case 1:
                sequence.erase(first, std::min(last, first + 20));
                break;
            case 2:
                sequence.shift(first, last, random.between(-5, 5));
                break;
            case 3: {
                auto other = sequence.fork();
                if (held + last - first <= tokens) sequence.splice(other, first, last);
                break;
            }
            case 4:
                draft_and_keep(sequence, random, shape.layers, s, tokens);
                break;
            case 5:
                cache.requantize(sequence, {.key = random.between(-1, C::key_table::size - 2),
                                            .value = random.between(-1, C::value_table::size - 2),
                                            .first_token = first,
                                            .last_token = last + 1});
                break;
            default:
                break;
        }
    }
    return sequence;
}

template <class C>
C random_cache(test::generator& random, kvq::cache_shape& shape) {
    shape = {C::key_table::size, random.between(1, 3), random.pick(std::vector<int>{3, 8, 20, 32, 40}),
             random.between(3, 40)};
    auto options = test::random_options(random);
    options.page_tokens = random.pick(std::vector<int>{4, 8, 16, 33});
    options.layers = test::rotate_formats<C>(shape.layers);
    kvq::rotary_embedding rotary;
    rotary.dims = shape.head_dim / 2 * 2;
    options.rotary = {rotary};
    return test::make_cache<C>(shape, options);
}

}  // namespace

TEST_CASE_TEMPLATE("chosen pages are those of a mask, bit for bit", C, test::kivi_cache, test::mixed_cache,
                   test::rotated_cache, test::custom_cache, test::bounded_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    std::int64_t hidden = 0;
    for (int round = 0; round < test::rounds(8); ++round) {
        kvq::cache_shape shape;
        C cache = random_cache<C>(random, shape);
        const int longest = round % 8 == 7 ? 4500 : 250;  // the longer ones are cut into chunks
        auto sequence = random_sequence(cache, random, shape, longest);
        const int layer = random.between(0, shape.layers - 1), tokens = sequence.tokens(layer);
        const int group = random.pick(std::vector<int>{1, 2, 4}), heads = group * shape.kv_heads;
        const int queries = random.one_in(2) ? 1 : random.between(1, std::min(tokens, 40));
        const auto q = test::random_tensor(random, queries, heads, shape.head_dim);
        const int page_tokens = cache.options().page_tokens;
        const int budget = random.between(1, random.one_in(4) ? 2 * tokens : std::max(1, tokens / 4));
        const auto around = random.bits();
        INFO("round ", round, ": ", queries, " queries over ", tokens, " tokens in pages of ", page_tokens,
             ", budget ", budget);

        std::vector<kvq::chosen_tokens> chosen;
        kvq::selection_report report{.chosen = &chosen};
        attended dense, some;
        beside(around, tokens, heads, everything{},
               [&](const kvq::mods_view& m) { dense = attend(sequence, shape, layer, q, m); });
        beside(around, tokens, heads, kvq::selected_pages{budget, &report},
               [&](const kvq::mods_view& m) { some = attend(sequence, shape, layer, q, m); });
        CHECK(report.read <= report.pages);
        hidden += report.pages - report.read;

        // Every kv head under the mask of its pages.
        for (int h = 0; h < shape.kv_heads; ++h) {
            const ranges_of_queries of(chosen, layer, h, queries);
            attended masked;
            beside(around, tokens, heads, of.mask(tokens - queries),
                   [&](const kvq::mods_view& m) { masked = attend(sequence, shape, layer, q, m); });
            const int dim = shape.dim(kvq::tensor::value);
            for (int t = 0; t < queries; ++t)
                for (int g = h * group; g < (h + 1) * group; ++g) {
                    const auto at = (t * heads + g) * dim;
                    CHECK(std::equal(some.out.begin() + at, some.out.begin() + at + dim,
                                     masked.out.begin() + at));
                    CHECK(some.lse[static_cast<std::size_t>(t * heads + g)] ==
                          masked.lse[static_cast<std::size_t>(t * heads + g)]);
                }
        }
        if (report.read == report.pages) CHECK(some == dense);

        for (int threads = 2; threads <= 4; ++threads) {
            std::vector<kvq::chosen_tokens> again;
            kvq::selection_report other{.chosen = &again};
            beside(around, tokens, heads, kvq::selected_pages{budget, &other}, [&](const kvq::mods_view& m) {
                CHECK(attend(sequence, shape, layer, q, m, threads) == some);
            });
            CHECK(other.pages == report.pages);
            CHECK(other.read == report.read);
            CHECK(std::equal(again.begin(), again.end(), chosen.begin(), chosen.end(),
                             [](const auto& a, const auto& b) {
                                 return a.kv_head == b.kv_head && a.first_query == b.first_query &&
                                        a.last_query == b.last_query && a.tokens == b.tokens;
                             }));
        }
    }
    CHECK(hidden > 0);
}

TEST_CASE("stored bounds hold for every shown key, after any history") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    int pages = 0;
    for (int round = 0; round < test::rounds(20); ++round) {
        kvq::cache_shape shape;
        test::bounded_cache cache = random_cache<test::bounded_cache>(random, shape);
        auto sequence = random_sequence(cache, random, shape, 250);
        auto fork = sequence.fork();
        fork.trim(random.between(1, fork.tokens()));
        const kvq::tensor keys = kvq::tensor::key;
        const int layer = random.between(0, shape.layers - 1), dim = shape.head_dim;
        const std::vector<float> q = random.normals(static_cast<std::size_t>(dim), 2.0f);
        for (const kvq::sequence* s : {&sequence, &fork}) {
            const kvq::layer_pages held = s->pages(layer);
            for (int e = 0; e < held.entries(); ++e) {
                const auto entry = held.at(e);
                const kvq::page& p = *entry.keys;
                const kvq::format& f = cache.table(keys)[p.format];
                if (!f.functions().estimates_first) continue;
                ++pages;
                const kvq::block_shape block{keys, p.tokens, dim};
                std::vector<float> moved = q, scratch(f.functions().estimate_floats(f.scheme(), block));
                if (entry.shift != 0) (*cache.rotations().at(layer))(moved.data(), 1, dim, -entry.shift);
                test::tensor<float> x(entry.tokens, shape.kv_heads, dim);
                s->dequantize(layer, keys, entry.first_token, x.view());
                for (int h = 0; h < shape.kv_heads; ++h) {
                    float bound = 0.0f;
                    f.functions().estimate_scores(
                        f.scheme(), block, {layer, h},
                        p.data() + f.block_bytes(block) * static_cast<std::size_t>(h), moved.data(), dim, 1,
                        entry.skip, entry.skip + entry.tokens, 1.0f, &bound, 0, scratch.data());
                    for (int t = 0; t < entry.tokens; ++t) {
                        double score = 0.0, terms = 0.0;
                        for (int c = 0; c < dim; ++c) {
                            const double term = static_cast<double>(q[static_cast<std::size_t>(c)]) *
                                                static_cast<double>(x.view().at(t, h)[c]);
                            score += term;
                            terms += std::fabs(term);
                        }
                        INFO("round ", round, ", ", f.name(), ", page ", e, ", token ", t);
                        REQUIRE(static_cast<double>(bound) >= score - 1e-5 * terms);
                    }
                }
            }
        }
    }
    CHECK(pages > 100);
}

TEST_CASE_TEMPLATE(
    "the best pages are read, and what is always read: pages in 16 bit, the first and the last two", C,
    test::kivi_cache, test::typed_cache<test::bounded<kvq::int8> KVQ_COMMA kvq::int8>,
    test::typed_cache<test::bounded<kvq::full<kvq::float16>> KVQ_COMMA kvq::int8>,
    test::typed_cache<test::bounded<test::rotated> KVQ_COMMA kvq::int8>) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{1, 1, 32};
    for (int round = 0; round < test::rounds(10); ++round) {
        C cache = test::make_cache<C>(shape, {.sinks = 4, .recent = 16, .page_tokens = 32});
        test::stream s(random, shape, 20 * 32 + 4 + 16);
        const auto q = test::random_tensor(random, 1, 2, shape.head_dim);
        // The keys of two pages lie in the direction of the queries.
        const int pages[2] = {random.between(1, 9), random.between(10, 18)};
        for (const int p : pages)
            for (int t = 4 + 32 * p; t < 4 + 32 * (p + 1); ++t)
                for (int c = 0; c < shape.head_dim; ++c)
                    s.k.view().at(t, 0)[c] += q.view().at(0, 0)[c] + q.view().at(0, 1)[c];
        auto sequence = cache.new_sequence();
        append(sequence, 1, s, 0, 20 * 32 + 4 + 16);
        std::vector<kvq::chosen_tokens> chosen;
        kvq::selection_report report{.chosen = &chosen};
        attend(sequence, shape, 0, q, kvq::selected_pages{.tokens = 64, .report = &report});
        std::vector<kvq::token_range> ranges;
        for (const auto& c : chosen) ranges.push_back(c.tokens);
        const auto of = [](int p) { return kvq::token_range{4 + 32 * p, 4 + 32 * (p + 1)}; };
        std::vector<kvq::token_range> wanted{{0, 4}, of(pages[0]), of(pages[1]), {612, 660}};
        if (pages[1] == pages[0] + 1) wanted = {{0, 4}, {of(pages[0]).begin, of(pages[1]).end}, {612, 660}};
        if (wanted[wanted.size() - 2].end == 612) {
            wanted[wanted.size() - 2].end = 660;
            wanted.pop_back();
        }
        CHECK(ranges == wanted);
        CHECK(report.read == 5);
        CHECK(report.pages == 22);
    }
}

namespace {

/// Keys and values that count how often they are read; not foldable, so that they have no estimate.
struct counting : kvq::affine<4> {
    using base = kvq::affine<4>;
    static inline std::atomic<int> read{0};
    std::uint32_t quantize(const kvq::block_shape& s, kvq::block_id id, float* values,
                           std::byte* block) const {
        return base::quantize(s, id, values, block);
    }
    void dequantize(const kvq::block_shape& s, kvq::block_id id, const std::byte* block,
                    float* values) const {
        ++read;
        base::dequantize(s, id, block, values);
    }
};
static_assert(!kvq::foldable<counting>);

}  // namespace

TEST_CASE("values of pages that are not chosen, or skipped, are not read; keys only without an estimate") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{1, 2, 32};
    const auto reads = [&](auto& sequence, const test::tensor<float>& q, const kvq::mods_view& mods) {
        counting::read = 0;
        attend(sequence, shape, 0, q, mods);
        return counting::read.load();
    };
    const test::stream s(random, shape, 640);
    auto q = test::random_tensor(random, 1, 4, shape.head_dim);
    for (float& x : q.values()) x *= 6.0f;
    test::typed_cache<kvq::affine<4, kvq::per_channel<>>, counting> estimated(shape, {.page_tokens = 32});
    test::typed_cache<counting, counting> plain(shape, {.page_tokens = 32});
    test::typed_cache<test::bounded<counting>, counting> bounded(shape, {.page_tokens = 32});
    auto a = estimated.new_sequence(), b = plain.new_sequence(), c = bounded.new_sequence();
    append(a, 1, s, 0, 640);
    append(b, 1, s, 0, 640);
    append(c, 1, s, 0, 640);
    CHECK(reads(a, q, kvq::causal{}) == 2 * 20);
    CHECK(reads(b, q, kvq::causal{}) == 4 * 20);
    // 3 pages and that of the query.
    // 3 pages besides the first and the last two.
    CHECK(reads(a, q, kvq::selected_pages{96}) == 2 * 6);
    // Keys of those three bound the sums, the others are ranked by their scores, then 6 pages are read.
    CHECK(reads(b, q, kvq::selected_pages{96}) == 2 * (3 + 17 + 2 * 6));
    // Stored bounds rank the others.
    CHECK(reads(c, q, kvq::selected_pages{96}) == 2 * (3 + 2 * 6));
    const std::vector<kvq::token_range> ranges{{0, 32}, {320, 330}, {639, 640}};
    CHECK(reads(b, q, kvq::token_ranges{ranges}) == 4 * 3);
    kvq::skipping_report report;
    const int values = reads(a, q, kvq::skipped_values{.mass = 0.05f, .report = &report});
    CHECK(report.pages == 40);
    CHECK(report.skipped > 0);
    CHECK(values == report.pages - report.skipped);
}

TEST_CASE("skipped values: with a mass of 0 not even a share below all floats is left out") {
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 1};
    test::plain_cache cache(shape, {.recent = 0, .page_tokens = 32});
    test::tensor<float> k(192, 1, 1), v(192, 1, 1), q(1, 1, 1);
    q.view().at(0, 0)[0] = 1.0f;
    for (int t = 0; t < 192; ++t) {  // page 1 has all values, and 2^-149 of the weight
        k.view().at(t, 0)[0] = t < 64 ? 0.0f : 102.0f;
        v.view().at(t, 0)[0] = t / 32 == 1 ? 65504.0f : 0.0f;
    }
    auto sequence = cache.new_sequence();
    sequence.append(0, k.view(), v.view());
    for (const float mass : {0.0f, 1e-4f}) {
        kvq::skipping_report report;
        test::tensor<float> dense(1, 1, 1), some(1, 1, 1);
        sequence.attend(0, q.view(), dense.view());
        sequence.attend(0, q.view(), some.view(), kvq::skipped_values{mass, &report});
        CHECK(some.values() == dense.values());
        CHECK(report.most_left_out <= mass);
        CHECK((report.skipped > 0) == (mass > 0.0f));
    }
}

TEST_CASE_TEMPLATE("skipped values: what is left out is counted and bounds the error", C, test::kivi_cache,
                   test::mixed_cache, test::rotated_cache, test::custom_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    std::int64_t skipped = 0;
    for (int round = 0; round < test::rounds(8); ++round) {
        kvq::cache_shape shape;
        C cache = random_cache<C>(random, shape);
        auto sequence = random_sequence(cache, random, shape, round % 8 == 7 ? 4500 : 250);
        const int layer = random.between(0, shape.layers - 1), tokens = sequence.tokens(layer);
        const int heads = random.between(1, 4) * shape.kv_heads;
        const int queries = random.one_in(2) ? 1 : random.between(1, std::min(tokens, 20));
        auto q = test::random_tensor(random, queries, heads, shape.head_dim);
        for (float& x : q.values()) x *= 4.0f;  // so that few keys have the weight
        const float mass = random.pick(std::vector<float>{0.0f, 1e-4f, 1e-3f, 1e-2f, 0.2f});
        const auto around = random.bits();
        INFO("round ", round, ": ", queries, " queries over ", tokens, " tokens, mass ", mass);
        attended dense, some;
        kvq::skipping_report report;
        kvq::selection_report seen;
        beside(around, tokens, heads, everything{},
               [&](const kvq::mods_view& m) { dense = attend(sequence, shape, layer, q, m); });
        beside(around, tokens, heads, kvq::skipped_values{mass, &report},
               [&](const kvq::mods_view& m) { some = attend(sequence, shape, layer, q, m); });
        beside(around, tokens, heads, kvq::selected_pages{1 << 30, &seen},
               [&](const kvq::mods_view& m) { CHECK(attend(sequence, shape, layer, q, m) == dense); });
        skipped += report.skipped;
        CHECK(report.pages == seen.pages);
        CHECK(report.rows == queries * heads);
        CHECK(report.most_left_out <= mass * 1.0001f);
        CHECK(report.left_out <=
              static_cast<double>(report.most_left_out) * static_cast<double>(report.rows));
        CHECK(some.lse == dense.lse);
        if (mass == 0.0f) CHECK(some == dense);
        float largest = 0.0f, error = 0.0f;
        auto values = test::dequantized(sequence, shape, layer, kvq::tensor::value);
        for (const float v : values.values()) largest = std::fmax(largest, std::fabs(v));
        for (std::size_t i = 0; i < some.out.size(); ++i)
            error = std::fmax(error, std::fabs(some.out[i] - dense.out[i]));
        // A page with less weight rounds the weights of others in no other way: float sums remain.
        CHECK(error <= largest * (report.most_left_out * 1.001f + 1e-6f));
        for (int threads = 2; threads <= 4; ++threads) {
            kvq::skipping_report other;
            beside(around, tokens, heads, kvq::skipped_values{mass, &other}, [&](const kvq::mods_view& m) {
                CHECK(attend(sequence, shape, layer, q, m, threads) == some);
            });
            CHECK(other.pages == report.pages);
            CHECK(other.skipped == report.skipped);
            CHECK(other.left_out == report.left_out);
            CHECK(other.most_left_out == report.most_left_out);
        }
    }
    CHECK(skipped > 0);
}

namespace {

/// token_ranges by the definition.
struct listed {
    static constexpr bool is_causal = false;
    const kvq::token_ranges& of;
    bool causal;
    bool mask(int q_pos, int k_pos) const {
        if (causal && k_pos > q_pos) return false;
        std::size_t begin = 0, end = of.ranges.size();
        if (!of.starts.empty()) {
            begin = static_cast<std::size_t>(of.starts[static_cast<std::size_t>(q_pos - of.first_query)]);
            end = static_cast<std::size_t>(of.starts[static_cast<std::size_t>(q_pos - of.first_query) + 1]);
        }
        for (; begin < end; ++begin)
            if (of.ranges[begin].begin <= k_pos && k_pos < of.ranges[begin].end) return true;
        return false;
    }
};
struct without_positions : listed {
    static constexpr bool has_query_positions = false;
};

}  // namespace

TEST_CASE("given ranges: the reference, pages that are not read, and bad lists") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(15); ++round) {
        const kvq::cache_shape shape{1, random.between(1, 2), random.between(3, 40)};
        const int tokens = random.between(1, 200), queries = random.between(1, std::min(tokens, 40));
        test::kivi_cache cache(shape, {.page_tokens = random.pick(std::vector<int>{1, 7, 16, 33})});
        const test::stream s(random, shape, tokens);
        auto sequence = cache.new_sequence();
        append(sequence, 1, s, 0, tokens);
        const auto q = test::random_tensor(random, queries, 2 * shape.kv_heads, shape.head_dim);
        const bool each = random.one_in(2), positions = random.one_in(2);
        std::vector<kvq::token_range> ranges;
        std::vector<int> starts;
        for (int i = 0; i < (each ? queries : 1); ++i) {
            starts.push_back(static_cast<int>(ranges.size()));
            for (int at = random.between(0, tokens); at < tokens && !random.one_in(4);) {
                const int end = random.between(at + 1, std::min(tokens + 5, at + 40));
                ranges.push_back({at, end});
                at = end + random.between(0, 20);
            }
        }
        starts.push_back(static_cast<int>(ranges.size()));
        if (!each) starts.clear();
        const int first = positions ? tokens - queries : 0;
        const kvq::token_ranges mask{ranges, starts, first};
        INFO("round ", round, ": ", queries, " queries over ", tokens, " tokens, ", ranges.size(), " ranges");
        if (positions) {
            CHECK(test::measure_attention(cache, sequence, 0, q, mask, listed{mask, true}).of_terms <= 5e-4);
            CHECK(attend(sequence, shape, 0, q, mask) == attend(sequence, shape, 0, q, listed{mask, true}));
        } else {
            const kvq::mods free{kvq::cross_attention{}, mask};
            CHECK(attend(sequence, shape, 0, q, free) ==
                  attend(sequence, shape, 0, q, without_positions{{mask, false}}));
        }
        for (int i = 0; i < 50; ++i) {  // answers for pages and rows agree with those for pairs
            const int from = random.between(first, first + queries - 1),
                      to = random.between(from, first + queries - 1);
            const int begin = random.between(0, tokens), end = random.between(begin + 1, tokens + 9);
            bool any = false, all = true;
            for (int qp = from; qp <= to; ++qp) {
                std::vector<float> row(static_cast<std::size_t>(end - begin), 1.0f);
                mask.mask_row(row.data(), end - begin, qp, begin);
                for (int k = begin; k < end; ++k) {
                    const bool seen = listed{mask, false}.mask(qp, k);
                    any = any || seen;
                    all = all && seen;
                    CHECK(mask.mask(qp, k) == seen);
                    CHECK((row[static_cast<std::size_t>(k - begin)] == 1.0f) == seen);
                }
            }
            const auto answer = mask.mask_page(from, to, begin, end);
            CHECK((answer == kvq::page_visibility::none) == !any);
            if (answer == kvq::page_visibility::all) CHECK(all);
        }
    }

    const auto says = [](const auto& call, std::initializer_list<const char*> parts) {
        const std::string message = test::message_of(call);
        for (const char* const part : parts) {
            INFO(message);
            CHECK(test::contains(message, part));
        }
    };
    const std::vector<kvq::token_range> empty{{3, 3}}, reversed{{0, 5}, {4, 9}}, negative{{-1, 4}},
        good{{0, 4}, {8, 9}};
    const std::vector<int> falling{0, 2, 1}, beyond{0, 3};
    says([&] { kvq::token_ranges{empty}.check(1); }, {"range 0", "[3, 3)"});
    says([&] { kvq::token_ranges{reversed}.check(1); }, {"range 1", "[4, 9)"});
    says([&] { kvq::token_ranges{negative}.check(1); }, {"range 0", "[-1, 4)"});
    says([&] { (kvq::token_ranges{good, falling}.check(1)); }, {"query 2", "start at 1"});
    says([&] { (kvq::token_ranges{good, beyond}.check(1)); }, {"query 1", "start at 3 of 2"});
    says([&] { kvq::selected_pages{0}.check(1); }, {"at least 1 token, got 0"});
    says([&] { kvq::skipped_values{1.0f}.check(1); }, {"less than 1", "got 1"});
    says([&] { kvq::skipped_values{std::nanf("")}.check(1); }, {"less than 1"});
}

TEST_CASE("batches: every request has the bits, the pages and the report that it has alone") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{1, 2, 32};
    test::kivi_cache cache(shape, {.sinks = 4, .recent = 16, .page_tokens = 16});
    std::vector<kvq::sequence> sequences;
    std::vector<test::tensor<float>> q, out;
    std::vector<kvq::selected_pages> selected;
    std::vector<kvq::skipped_values> skipped;
    std::vector<kvq::selection_report> pages(6), pages_alone(6);
    std::vector<kvq::skipping_report> values(6), values_alone(6);
    for (std::size_t i = 0; i < 6; ++i) {
        const int tokens = random.between(1, i == 2 ? 3000 : 300);
        const test::stream s(random, shape, tokens);
        sequences.push_back(cache.new_sequence());
        append(sequences.back(), 1, s, 0, tokens);
        q.push_back(test::random_tensor(random, random.between(1, std::min(tokens, 20)), 4, 32));
        out.emplace_back(q.back().view().tokens, 4, 32);
        selected.push_back({random.between(1, 100), &pages[i]});
        skipped.push_back({0.01f, &values[i]});
    }
    using both = decltype(kvq::mods{selected[0], skipped[0]});
    std::vector<both> mods;
    for (std::size_t i = 0; i < 6; ++i) mods.push_back(kvq::mods{selected[i], skipped[i]});
    std::vector<kvq::attention_request> batch;
    for (std::size_t i = 0; i < 6; ++i) {
        batch.push_back({.sequence = &sequences[i], .q = q[i].view(), .out = out[i].view()});
        if (i != 4) batch.back().mods = mods[i];
    }
    kvq::workspace space;
    cache.attend(0, batch, kvq::causal{}, kvq::thread_pool(3), space);
    for (std::size_t i = 0; i < 6; ++i) {
        const kvq::mods alone{kvq::selected_pages{selected[i].tokens, &pages_alone[i]},
                              kvq::skipped_values{0.01f, &values_alone[i]}};
        CHECK(out[i].values() == (i == 4 ? attend(sequences[i], shape, 0, q[i], kvq::causal{})
                                         : attend(sequences[i], shape, 0, q[i], alone))
                                     .out);
        CHECK(pages[i].pages == pages_alone[i].pages);
        CHECK(pages[i].read == pages_alone[i].read);
        CHECK(values[i].skipped == values_alone[i].skipped);
        CHECK(values[i].left_out == values_alone[i].left_out);
    }
}

TEST_CASE("in a ring: the pages that are chosen lie in its window, and are those of a mask, bit for bit") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{1, 1, 16};
    test::kivi_cache cache(shape, {.sinks = 2, .recent = 8, .page_tokens = 8});
    const test::stream s(random, shape, 1500);
    kvq::ring ring(cache.new_sequence(), {.window = 100, .slack = 8});
    std::int64_t hidden = 0;
    for (int at = 0; at + 20 <= 1500;) {
        const int n = random.between(1, 20);
        ring.append(0, s.k.slice(at, n), s.v.slice(at, n));
        at += n;
        const auto q = test::random_tensor(random, 1, 2, 16);
        test::tensor<float> some(1, 2, 16), masked(1, 2, 16);
        std::vector<kvq::chosen_tokens> chosen;
        kvq::selection_report report{.chosen = &chosen};
        ring.attend(0, q.view(), some.view(), kvq::selected_pages{random.between(1, 60), &report});
        hidden += report.pages - report.read;
        const ranges_of_queries of(chosen, 0, 0, 1);
        ring.attend(0, q.view(), masked.view(), of.mask(ring.held().tokens(0) - 1));
        REQUIRE(some.values() == masked.values());
        // The sinks, and what the window shows.
        for (const kvq::token_range& r : of.ranges)
            REQUIRE((r.end <= 8 || r.end > ring.held().tokens(0) - 100));
    }
    CHECK(hidden > 0);
}

TEST_CASE("the workspace is what it is said to be") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(10); ++round) {
        const kvq::cache_shape shape{1, random.between(1, 3), 16};
        test::kivi_cache cache(shape, {.sinks = random.between(0, 5), .page_tokens = 8});
        const int tokens = random.between(1, 3000), queries = random.between(1, std::min(tokens, 30));
        const test::stream s(random, shape, tokens);
        auto sequence = cache.new_sequence();
        append(sequence, 1, s, 0, tokens);
        const auto q = test::random_tensor(random, queries, 2 * shape.kv_heads, 16);
        test::tensor<float> out(queries, 2 * shape.kv_heads, 16);
        const int threads = random.between(1, 3);
        const auto check = [&](const kvq::mods_view& mods) {
            kvq::workspace space;
            sequence.attend(0, q.view(), out.view(), mods, kvq::thread_pool(threads), space);
            CHECK(space.size() ==
                  cache.attention_workspace(tokens, 2 * shape.kv_heads, queries, threads, mods));
            CHECK(space.size() ==
                  kvq::footprint(
                      cache, tokens, 1,
                      {.q_heads = 2 * shape.kv_heads, .q_tokens = queries, .threads = threads, .mods = &mods})
                      .attention);
        };
        check(kvq::causal{});
        check(kvq::selected_pages{random.between(1, 400)});
        check(kvq::skipped_values{0.1f});
        check(kvq::mods{kvq::selected_pages{random.between(1, 400)}, kvq::skipped_values{0.1f}});
    }
}

TEST_CASE("softcap: tanh is within 1e-6 of its value, and NaN stays NaN") {
    double worst = 0.0;
    for (float x = 1e-20f; x < 1e20f; x *= 1.0009f)
        for (const float y : {x, -x}) {
            const double exact = std::tanh(static_cast<double>(y));
            worst = std::fmax(
                worst, std::fabs(static_cast<double>(kvq::softcap{1.0f}.score(y, 0, 0, 0)) / exact - 1.0));
        }
    CHECK(worst <= 1e-6);
    CHECK(std::isnan(kvq::softcap{1.0f}.score(std::nanf(""), 0, 0, 0)));
    CHECK(kvq::softcap{30.0f}.score(std::numeric_limits<float>::infinity(), 0, 0, 0) ==
          doctest::Approx(30.0));
}

}  // namespace attention_selection_tests
