// SPDX-License-Identifier: MIT
// Comparison family: mixed-precision reduction (see attention.cpp) against a reference that asks about one
// pair of query and key after the other; exact for what must not matter: answers for pages, threads, batches.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <kvq/core/thread_pool.hpp>
#include <kvq/policy/ring.hpp>

#include "support/attention_error.hpp"
#include "support/typed_cache.hpp"

using test::append;
using test::measure_attention;

namespace attention_mods_tests {

namespace {

constexpr double bound = 5e-4;
constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

/// Masks and score modifiers by the definition, one pair at a time, without answers for pages.
template <bool Positions, bool Scores = true>
struct pairwise {
    static constexpr bool is_causal = false;
    static constexpr bool has_query_positions = Positions;

    std::vector<std::function<bool(int, int)>> masks;
    std::vector<std::function<float(float, int, int)>> scores;  // score, head, distance
    std::vector<float> sinks;
    float factor = 0.0f;

    bool mask(int q, int k) const {
        return std::all_of(masks.begin(), masks.end(), [&](const auto& m) { return m(q, k); });
    }
    float score(float s, int head, int q, int k) const requires Scores {
        for (const auto& change : scores) s = change(s, head, q - k);
        return s;
    }
    float scale(int dim) const { return factor != 0 ? factor : 1 / std::sqrt(static_cast<float>(dim)); }
    float sink_logit(int head) const {
        return sinks.empty() ? minus_infinity : sinks[static_cast<std::size_t>(head)];
    }
};

enum class seen { earlier, all, without_positions, prefix };

/// Random masks and score modifiers, as the library has them and by their definition.
struct composition {
    test::generator& random;
    int tokens, heads;
    std::vector<float> slopes, sinks;
    std::vector<int> starts;
    pairwise<true> wanted;

    composition(test::generator& r, int n, int q_heads) : random(r), tokens(n), heads(q_heads) {
        for (int h = 0; h < heads; ++h) {
            slopes.push_back(0.5f * random.uniform());
            sinks.push_back(random.one_in(5) ? minus_infinity : 2 * random.normal());
        }
    }

    /// Calls use(mods_view, seen) for one composition.
    template <class Use>
    void choose(const Use& use) {
        wanted = {};
        choose_window(use);
    }

private:
    template <class Use, class... Parts>
    void choose_window(const Use& use, Parts... parts) {
        const int window = random.between(1, random.one_in(3) ? 2 * tokens : 40);
        const int kept = random.between(0, random.one_in(3) ? tokens + 5 : 9);
        switch (random.between(0, 2)) {
            case 0:
                return choose_documents(use, parts...);
            case 1:
                wanted.masks.emplace_back([=](int q, int k) { return q - k < window; });
                return choose_documents(use, parts..., kvq::sliding_window{window});
            default:
                wanted.masks.emplace_back([=](int q, int k) { return q - k < window || k < kept; });
                return choose_documents(use, parts..., kvq::sink_window{window, kept});
        }
    }
    template <class Use, class... Parts>
    void choose_documents(const Use& use, Parts... parts) {
        if (random.one_in(2)) return choose_scores(use, parts...);
        std::vector<int> document;  // of each position
        starts.assign(1, 0);
        for (int t = 0; t < 4 * tokens; ++t) {
            for (int i = 0; t > 0 && i < 2; ++i)  // an empty one now and then
                if (random.one_in(30)) starts.push_back(t);
            document.push_back(static_cast<int>(starts.size()));
        }
        wanted.masks.emplace_back([=](int q, int k) {
            return document[static_cast<std::size_t>(q)] == document[static_cast<std::size_t>(k)];
        });
        choose_scores(use, parts..., kvq::document_mask{starts});
    }
    template <class Use, class... Parts>
    void choose_scores(const Use& use, Parts... parts) {
        if (random.one_in(2)) return choose_sums(use, parts...);
        const float cap = random.pick(std::vector<float>{2.0f, 30.0f});
        wanted.scores.emplace_back([this](float s, int head, int distance) {
            return s - slopes[static_cast<std::size_t>(head)] * static_cast<float>(distance);
        });
        wanted.scores.emplace_back([=](float s, int, int) { return cap * std::tanh(s / cap); });
        choose_sums(use, parts..., kvq::alibi{slopes}, kvq::softcap{cap});
    }
    template <class Use, class... Parts>
    void choose_sums(const Use& use, Parts... parts) {
        if (random.one_in(2)) return choose_direction(use, parts...);
        wanted.sinks = sinks;
        wanted.factor = 0.1f;
        choose_direction(use, kvq::score_scale{0.1f}, parts..., kvq::learned_sinks{sinks});
    }
    template <class Use, class... Parts>
    void choose_direction(const Use& use, Parts... parts) {
        const int prefix = random.between(0, tokens + 3);
        switch (random.between(0, 4)) {
            case 0:
                return use(kvq::mods{parts..., kvq::bidirectional{}}, seen::all);
            case 1:
                return use(kvq::mods{kvq::cross_attention{}, parts...}, seen::without_positions);
            case 2:
                wanted.masks.emplace_back([=](int q, int k) { return k <= q || k < prefix; });
                return use(kvq::mods{kvq::prefix_lm{prefix}, parts...}, seen::prefix);
            case 3:
                wanted.masks.emplace_back([](int q, int k) { return k <= q; });
                return use(kvq::mods{kvq::causal{}, kvq::mods{parts...}, kvq::prefix_lm{prefix}},
                           seen::earlier);
            default:
                wanted.masks.emplace_back([](int q, int k) { return k <= q; });
                return use(kvq::mods{kvq::mods{parts...}}, seen::earlier);
        }
    }
};

void check_error(const test::attention_error& error) {
    CHECK(error.relative <= bound);
    CHECK(error.of_terms <= bound);
}

std::vector<float> attended(const kvq::sequence& s, const kvq::cache_shape& shape, int layer,
                            const test::tensor<float>& q, const kvq::mods_view& mods, int threads,
                            std::vector<float>* lse = nullptr) {
    const auto qv = q.view();
    test::tensor<float> out(qv.tokens, qv.heads, shape.dim(kvq::tensor::value));
    std::fill(out.values().begin(), out.values().end(), -1.0f);
    std::vector<float> sums(static_cast<std::size_t>(qv.tokens * qv.heads), 77.0f);
    kvq::workspace space;
    s.attend(layer, qv, kvq::output_view(out.view()).with_lse(sums.data()), mods, kvq::thread_pool(threads),
             space);
    if (lse) *lse = sums;
    return out.values();
}

/// A checkerboard of blocks, by rows and by pages.
struct checkers {
    int side;
    mutable int rows = 0, pages[3] = {};

    bool mask(int q, int k) const { return (q / side + k / side) % 2 == 0; }
    void mask_row(float* scores, int n, int q, int first_k) const {
        ++rows;
        for (int t = 0; t < n; ++t)
            if (!mask(q, first_k + t)) scores[t] = kvq::hidden_score;
    }
    kvq::page_visibility mask_page(int first_q, int last_q, int first_k, int end_k) const {
        bool any = false, all = true;
        for (int q = first_q; q <= last_q; ++q)
            for (int k = first_k; k < end_k; ++k) {
                any = any || mask(q, k);
                all = all && mask(q, k);
            }
        const auto answer = all   ? kvq::page_visibility::all
                            : any ? kvq::page_visibility::some
                                  : kvq::page_visibility::none;
        ++pages[static_cast<int>(answer)];
        return answer;
    }
};

struct lifted_checkers : checkers {
    static constexpr bool is_causal = false;
};

}  // namespace

TEST_CASE_TEMPLATE("random compositions on random histories, against one pair after the other", C,
                   test::kivi_cache, test::mixed_cache, test::rotated_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(10); ++round) {
        const kvq::cache_shape shape{C::key_table::size, random.between(1, 3), random.between(3, 48),
                                     random.between(3, 40)};
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        auto cache = test::make_cache<C>(shape, options);
        const int longest = round % 10 == 9 ? 2300 : 160;  // the longer ones are cut into chunks
        const test::stream s(random, shape, longest);
        auto sequence = cache.new_sequence();
        for (int step = 0; step < 4; ++step) {  // trims leave pages that show a part of their tokens
            append(sequence, shape.layers, s, 0, random.between(1, longest - sequence.tokens() - 4 + step));
            if (random.one_in(2)) sequence.trim(random.between(1, sequence.tokens()));
        }
        const int layer = random.between(0, shape.layers - 1), tokens = sequence.tokens(layer);
        const int heads = shape.kv_heads * random.between(1, 4);
        composition all(random, tokens, heads);
        for (int i = 0; i < (longest > 1000 ? 3 : 12); ++i)
            all.choose([&](const kvq::mods_view& mods, seen direction) {
                const bool positions = direction != seen::without_positions;
                const int most = positions ? tokens : 3 * tokens;
                const int rows = random.between(0, std::min(most, random.one_in(3) ? 60 : 5));
                const auto q = test::random_tensor(random, rows, heads, shape.head_dim);
                INFO("round ", round, ", composition ", i, ", direction ", static_cast<int>(direction), ", ",
                     rows, " queries over ", tokens, " tokens in pages of ", options.page_tokens);
                CHECK(mods.is_causal() == (direction == seen::earlier));
                const pairwise<false> without{all.wanted.masks, all.wanted.scores, all.wanted.sinks,
                                              all.wanted.factor};
                check_error(positions ? measure_attention(cache, sequence, layer, q, mods, all.wanted)
                                      : measure_attention(cache, sequence, layer, q, mods, without));
                std::vector<float> lse, other_lse;
                const auto out = attended(sequence, shape, layer, q, mods, 1, &lse);
                for (int threads = 2; threads <= 4; ++threads) {
                    CHECK(attended(sequence, shape, layer, q, mods, threads, &other_lse) == out);
                    CHECK(other_lse == lse);
                }
                // A page that is left out adds what a page of hidden keys adds: nothing.
                if (!all.wanted.scores.empty()) return;
                const pairwise<true, false> mask{all.wanted.masks, {}, all.wanted.sinks, all.wanted.factor};
                const pairwise<false, false> mask_without{mask.masks, {}, mask.sinks, mask.factor};
                CHECK((positions ? attended(sequence, shape, layer, q, mask, 1, &other_lse)
                                 : attended(sequence, shape, layer, q, mask_without, 1, &other_lse)) == out);
                CHECK(other_lse == lse);
            });
    }
}

TEST_CASE("a mask is asked about pages first, and about rows only where a page is seen in part") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{1, 2, 32};
    test::kivi_cache cache(shape, {.page_tokens = 32});
    const test::stream s(random, shape, 400);
    auto sequence = cache.new_sequence();
    append(sequence, 1, s, 0, 400);
    for (const int side : {16, 32, 64, 7})
        for (const int rows : {1, 2, 30}) {
            const auto q = test::random_tensor(random, rows, 4, 32);
            check_error(
                measure_attention(cache, sequence, 0, q, kvq::mods{kvq::bidirectional{}, checkers{side}}));
            check_error(measure_attention(cache, sequence, 0, q, checkers{side}));
            const lifted_checkers lifted{{side}};
            test::tensor<float> out(rows, 4, 32);
            sequence.attend(0, q.view(), out.view(), lifted);
            // 13 pages and the whole chunk, for each kv head and block of rows; every row of 2 query heads
            // asks once for itself.
            const int asked = lifted.pages[0] + lifted.pages[1] + lifted.pages[2];
            CHECK(asked % 14 == 0);
            const int blocks = asked / 14;
            CHECK(blocks >= 2);
            if (side == 32 && rows == 1) {
                CHECK(lifted.rows == 0);
                CHECK(lifted.pages[0] == 2 * 6);
            }
            if (blocks == 2) CHECK(lifted.rows == (lifted.pages[1] - 2) * rows * 2);
        }
}

TEST_CASE("pages that no query sees are not read") {
    test::generator random(test::seed());
    using cache_type = test::typed_cache<kvq::full<kvq::float16>>;
    const kvq::cache_shape shape{1, 1, 32};
    cache_type cache(shape, {.page_tokens = 32});
    // Documents of a page each; all but one hold NaN, which would reach the output even with weight zero.
    const int documents = 5, mine = 2;
    test::stream s(random, shape, 32 * documents);
    for (test::tensor<float>* of : {&s.k, &s.v})
        for (int t = 0; t < 32 * documents; ++t)
            for (int c = 0; c < 32; ++c)
                if (t / 32 != mine) of->view().at(t, 0)[c] = std::numeric_limits<float>::quiet_NaN();
    auto sequence = cache.new_sequence();
    append(sequence, 1, s, 0, 32 * documents);
    const std::vector<int> starts{0, 32, 64, 96, 128, 160};
    const auto q = test::random_tensor(random, 32 * documents, 2, 32);
    test::tensor<float> out(32 * documents, 2, 32);
    sequence.attend(0, q.view(), out.view(), kvq::document_mask{starts});
    // A block of rows may hold queries of two documents: row 1 on its own is another call.
    for (int t = 32 * mine; t < 32 * (mine + 1); ++t) {
        auto part = sequence.fork();
        part.trim(t + 1);
        part.attend(0, q.slice(t, 1), out.view().slice(t, 1), kvq::document_mask{starts});
        for (int h = 0; h < 2; ++h)
            for (int c = 0; c < 32; ++c) CHECK(std::isfinite(out.view().at(t, h)[c]));
    }
}

TEST_CASE("a learned sink is one more key without a value, in output and log-sum-exp") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{1, 2, 32};
    for (const int tokens : {1, 50, 5000}) {
        test::kivi_cache cache(shape, {.page_tokens = 32});
        const test::stream s(random, shape, tokens);
        auto sequence = cache.new_sequence();
        append(sequence, 1, s, 0, tokens);
        const auto q = test::random_tensor(random, 1, 4, 32);
        const std::vector<float> logits{0.5f, -3.0f, minus_infinity, 12.0f};
        std::vector<float> plain_lse, lse;
        const auto plain = attended(sequence, shape, 0, q, kvq::causal{}, 2, &plain_lse);
        const auto out = attended(sequence, shape, 0, q, kvq::learned_sinks{logits}, 2, &lse);
        for (std::size_t h = 0; h < 4; ++h) {
            const double without = static_cast<double>(plain_lse[h]);
            const double sum = std::exp(without) + std::exp(static_cast<double>(logits[h]));
            CHECK(std::fabs(static_cast<double>(lse[h]) - std::log(sum)) <= 1e-5);
            for (std::size_t c = 32 * h; c < 32 * (h + 1); ++c)
                CHECK(std::fabs(static_cast<double>(out[c]) -
                                static_cast<double>(plain[c]) * std::exp(without) / sum) <= 1e-5);
        }
        CHECK(std::equal(out.begin() + 64, out.begin() + 96, plain.begin() + 64));
        // Where nothing is seen, the sink is all there is.
        const std::vector<int> starts{0, tokens + 1};
        struct nothing {
            static bool mask(int, int) { return false; }
        };
        const auto zeros =
            attended(sequence, shape, 0, q, kvq::mods{kvq::learned_sinks{logits}, nothing{}}, 1, &lse);
        CHECK(zeros == std::vector<float>(128, 0.0f));
        for (std::size_t h = 0; h < 4; ++h)
            CHECK((lse[h] == logits[h] || std::fabs(lse[h] - logits[h]) <= 1e-6f * std::fabs(logits[h])));
    }
}

TEST_CASE("cross-attention: any number of queries over any number of tokens, also none") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{1, 2, 32};
    test::kivi_cache cache(shape, {.page_tokens = 32});
    auto sequence = cache.new_sequence();
    const auto q = test::random_tensor(random, 7, 4, 32);
    std::vector<float> lse;
    CHECK(attended(sequence, shape, 0, q, kvq::cross_attention{}, 1, &lse) ==
          std::vector<float>(7 * 128, 0.0f));
    CHECK(lse == std::vector<float>(28, minus_infinity));
    test::tensor<float> out(7, 4, 32);
    CHECK_THROWS_AS(sequence.attend(0, q.view(), out.view(), kvq::bidirectional{}), kvq::error);
    const test::stream s(random, shape, 3);
    append(sequence, 1, s, 0, 3);
    check_error(measure_attention(cache, sequence, 0, q, kvq::cross_attention{}));
    // Every query by itself gives the same.
    const auto all = attended(sequence, shape, 0, q, kvq::cross_attention{}, 1);
    test::tensor<float> one(1, 4, 32);
    for (int t = 0; t < 7; ++t) {
        sequence.attend(0, q.slice(t, 1), one.view());
        for (std::size_t i = 0; i < 128; ++i)
            CHECK(std::fabs(one.values()[i] - all[static_cast<std::size_t>(t) * 128 + i]) <= 1e-3f);
    }
}

TEST_CASE("queries that are not finite give NaN for their head, whatever is hidden") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{1, 1, 32};
    test::kivi_cache cache(shape, {.page_tokens = 32});
    const test::stream s(random, shape, 5000);
    auto sequence = cache.new_sequence();
    append(sequence, 1, s, 0, 5000);
    for (const int rows : {1, 200}) {
        auto q = test::random_tensor(random, rows, 2, 32);
        q.view().at(rows - 1, 1)[7] = std::numeric_limits<float>::infinity();
        const auto out = attended(sequence, shape, 0, q, kvq::sliding_window{40}, 2);
        for (std::size_t i = 0; i < out.size(); ++i) CHECK(std::isnan(out[i]) == (i + 32 >= out.size()));
    }
}

TEST_CASE("a batch: one mask for all, or one for each request, as alone") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{1, 2, 32};
    test::kivi_cache cache(shape, {.recent = 16, .page_tokens = 32});
    const int heads = 4;
    for (int round = 0; round < 10; ++round) {
        std::vector<kvq::sequence> sequences, twins;
        std::vector<test::stream> streams;
        std::vector<test::tensor<float>> q, out;
        for (int i = 0; i < 4; ++i) {
            const int tokens = random.one_in(3) ? random.between(2100, 3000) : random.between(10, 200);
            streams.emplace_back(random, shape, tokens);
            sequences.push_back(cache.new_sequence());
            q.push_back(test::random_tensor(random, random.between(1, 9), heads, 32));
            out.emplace_back(q.back().tokens(), heads, 32);
        }
        const kvq::sliding_window all{33};
        const std::vector<int> starts{0, 20, 70};
        const kvq::mods own{kvq::document_mask{starts}, kvq::softcap{3.0f}};
        const kvq::bidirectional lifted;
        const bool prefill = round % 2 == 0;
        std::vector<kvq::attention_request> attend;
        std::vector<kvq::prefill_request> prefills;
        for (std::size_t i = 0; i < 4; ++i) {
            const int n = streams[i].k.tokens();
            std::optional<kvq::mods_view> mods;
            if (i == 1) mods = own;
            if (i == 3) mods = lifted;
            twins.push_back(sequences[i].fork());
            if (!prefill) append(sequences[i], 1, streams[i], 0, n);
            attend.push_back({&sequences[i], q[i].view(), out[i].view(), mods});
            prefills.push_back(
                {&sequences[i], streams[i].k.view(), streams[i].v.view(), q[i].view(), out[i].view(), mods});
        }
        kvq::workspace space;
        const kvq::thread_pool threads(random.between(1, 4));
        if (prefill)
            cache.prefill(0, prefills, all, threads, space);
        else
            cache.attend(0, attend, all, threads, space);
        for (std::size_t i = 0; i < 4; ++i) {
            test::tensor<float> alone(q[i].tokens(), heads, 32);
            const kvq::mods_view mods = i == 1   ? kvq::mods_view(own)
                                        : i == 3 ? kvq::mods_view(lifted)
                                                 : kvq::mods_view(all);
            if (prefill)
                twins[i].prefill(0, streams[i].k.view(), streams[i].v.view(), q[i].view(), alone.view(), mods,
                                 kvq::serial_executor{}, space);
            else
                sequences[i].attend(0, q[i].view(), alone.view(), mods);
            CHECK(alone.values() == out[i].values());
        }
    }
}

TEST_CASE("mods combine as written: masks with AND, scores one after the other, in either form of a hook") {
    const float slopes[1] = {2.0f};
    struct since_even {
        static void mask_row(float* scores, int n, int q_pos, int first_k) {
            for (int t = 0; t < n; ++t)
                if (first_k + t < q_pos / 2 * 2) scores[t] = kvq::hidden_score;
        }
    };
    const kvq::mods both{kvq::sliding_window{3}, since_even{}};
    CHECK(both.mask(11, 10));
    CHECK(!both.mask(11, 9));
    CHECK(both.mask(10, 10));
    CHECK(!both.mask(10, 9));
    CHECK(both.mask_page(10, 10, 0, 8) == kvq::page_visibility::none);
    CHECK(both.mask_page(10, 10, 8, 11) == kvq::page_visibility::some);  // since_even does not say
    CHECK(kvq::mods{kvq::sliding_window{3}}.mask_page(10, 10, 8, 11) == kvq::page_visibility::all);
    const kvq::mods scores{kvq::alibi{slopes}, kvq::softcap{1.0f}};
    CHECK(scores.score(0.5f, 0, 3, 2) == kvq::softcap{1.0f}.score(-1.5f, 0, 3, 2));
    float row[2] = {0.5f, 0.25f};
    scores.score_row(row, 2, 0, 3, 2);
    CHECK(row[0] == kvq::softcap{1.0f}.score(-1.5f, 0, 3, 2));
    CHECK(row[1] == kvq::softcap{1.0f}.score(0.25f, 0, 3, 3));
    static_assert(!kvq::detail::masking<decltype(scores)> && !kvq::detail::own_scale<decltype(scores)>);
    static_assert(!kvq::detail::scoring<decltype(both)> && !kvq::detail::own_sink<decltype(both)>);
    static_assert(!kvq::detail::scoring<kvq::causal> && !kvq::detail::masking<kvq::causal>);
    static_assert(kvq::detail::lifts_causal<kvq::mods<kvq::prefix_lm, kvq::mods<kvq::softcap>>>());
    static_assert(!kvq::detail::lifts_causal<kvq::mods<kvq::prefix_lm, kvq::causal>>());
    CHECK(kvq::mods{kvq::score_scale{0.25f}, kvq::softcap{1.0f}}.scale(64) == 0.25f);
}

}  // namespace attention_mods_tests
