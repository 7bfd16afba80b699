// SPDX-License-Identifier: MIT
// Comparison family: float sums. Attention over the tokens that lists name, and the tokens that an index
// selects, against double arithmetic on the dequantized values; which tokens are read; and what is refused.
//
// KVQ_HISTORIES: how many. KVQ_HISTORY: only the one with this number. Each has the seed KVQ_SEED plus its
// number.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/core/thread_pool.hpp>
#include <kvq/format/bounds.hpp>
#include <kvq/format/latent.hpp>

#include "support/latents.hpp"

namespace listed_tokens_tests {

namespace {

using kvq::tensor;

constexpr int longest = 260;

using test::format_of;

/// Two lists for every query.
struct lists {
    std::vector<std::int32_t> selected, window;
    kvq::listed_tokens part;

    lists(test::generator& random, int held, int queries, int kv_heads) {
        part.queries = queries;
        part.kv_heads = random.one_in(2) ? 1 : kv_heads;
        const auto fill = [&](std::vector<std::int32_t>& of, kvq::token_lists& to) {
            to.count = random.one_in(6) ? 0 : random.between(1, random.one_in(8) ? 1200 : 150);
            const int near = random.one_in(2) ? held : random.between(1, held);
            for (int i = 0; i < to.count * part.kv_heads * queries; ++i)
                of.push_back(random.one_in(9) ? -1 : random.between(held - near, held - 1));
            to.tokens = of.data();
        };
        fill(selected, part.selected);
        fill(window, part.window);
    }
    lists(const lists&) = delete;
};

struct result {
    std::vector<float> out, lse;
    bool operator==(const result&) const = default;
};

result attended(const kvq::sequence& s, int layer, const kvq::query_view& q, int dim,
                const kvq::mods_view& mods, int threads) {
    const auto rows = static_cast<std::size_t>(q.tokens) * static_cast<std::size_t>(q.heads);
    result r{std::vector<float>(rows * static_cast<std::size_t>(dim)), std::vector<float>(rows)};
    const kvq::output_view out =
        kvq::output_view(kvq::token_view<float>(r.out.data(), q.tokens, q.heads, dim)).with_lse(r.lse.data());
    kvq::workspace space;
    if (threads == 1) {
        s.attend(layer, q, out, mods, kvq::serial_executor{}, space);
    } else {
        kvq::thread_pool pool(threads);
        s.attend(layer, q, out, mods, pool, space);
    }
    return r;
}

struct one_bias {
    float slope;
    float score(float score, int q_head, int q_pos, int k_pos) const {
        return score + slope * static_cast<float>((q_head + 1) * (k_pos - q_pos));
    }
};

}  // namespace

TEST_CASE("queries attend to the tokens of their lists, as masks show them") {
    const auto [first, last] = test::histories(60);
    int compared = 0;
    for (int history = first; history < last; ++history) {
        INFO("KVQ_SEED=", test::seed(), " KVQ_HISTORY=", history);
        test::generator random(test::seed() + static_cast<std::uint64_t>(history));
        const int heads = random.between(1, 3), dim = random.between(5, 40);
        const kvq::rotary_embedding rotary{.dims = dim / 2 * 2};
        std::vector<kvq::layer> of = {kvq::full_attention({heads, dim, random.between(1, 40)}),
                                      kvq::latent_attention(random.between(1, 60), 4)};
        of[0].rotary = rotary;
        of[1].rotary = kvq::rotary_embedding{.dims = 4, .first_channel = of[1].head_dim - 4};
        const bool slides = random.one_in(4);
        if (slides) of[0] = kvq::sliding_attention(random.between(1, 90), of[0]);
        kvq::cache_options options = test::random_options(random);
        options.window = test::random_window(random);
        const std::vector<kvq::format> some = {
            format_of<kvq::int8>(), format_of<kvq::full<float>>(), format_of<kvq::float_rows<kvq::e4m3>>(),
            kvq::with_bounds(format_of<kvq::affine<8, kvq::per_channel<>>>()),
            format_of<test::product_scheme<7>>()};
        options.keys.push_back(random.pick(some));
        options.values.push_back(random.pick(some));
        options.keys.push_back(kvq::with_fp16_channels(format_of<kvq::std4_h::keys>(), 4));
        of[1].formats.key = 1;
        if (random.one_in(2)) of[0].formats.key = 1;
        kvq::cache cache(of, options);
        kvq::sequence s = cache.new_sequence();
        for (int step = 0; step < 5; ++step) {
            CAPTURE(step);
            const int held = s.tokens(), n = std::min(longest - held, random.between(1, 90));
            for (int l = 0; l < 2; ++l) {
                const auto k = test::random_tensor(random, n, of[static_cast<std::size_t>(l)].kv_heads,
                                                   cache.shape(l).head_dim);
                const auto v = test::random_tensor(random, n, heads, cache.shape(0).dim(tensor::value));
                s.append(l, k.view(), l == 0 ? kvq::input_view(v.view()) : kvq::no_rows());
            }
            if (!slides && random.one_in(3)) {
                const int a = random.between(0, s.tokens()), b = random.between(a, s.tokens());
                s.erase(a, std::min(b, a + 9));
            }
            if (!slides && random.one_in(3)) s.shift(random.between(0, s.tokens()), s.tokens(), 7);
            // After a trim a window may have freed what its last token saw.
            if (!slides && random.one_in(3)) s.trim(std::max(0, s.tokens() - random.between(0, 9)));
            const int tokens = s.tokens();
            if (tokens == 0) continue;
            const int layer = random.between(0, 1), k_dim = cache.shape(layer).head_dim,
                      v_dim = cache.shape(layer).dim(tensor::value), kv_heads = cache.shape(layer).kv_heads;
            const int queries = slides ? 1 : random.between(1, std::min(tokens, 4));
            const auto q = test::random_tensor(
                random, queries, kv_heads * random.between(1, random.one_in(6) ? 140 : 6), k_dim, 2.0f);
            const lists given(random, tokens, queries, kv_heads);
            const std::vector<float> logits(static_cast<std::size_t>(q.view().heads), 0.7f);
            // A layer with a window has let tokens go: those that its mask shows are compared.
            const int from = slides && layer == 0 ? std::max(0, tokens - of[0].window) : 0;
            test::tensor<float> k(tokens, kv_heads, k_dim), v(tokens, kv_heads, v_dim);
            s.dequantize(layer, tensor::key, from, k.view().slice(from, tokens - from));
            s.dequantize(layer, tensor::value, from, v.view().slice(from, tokens - from));
            const auto compare = [&](const auto& mods, const auto& reference) {
                const result got = attended(s, layer, q.view(), v_dim, mods, 1);
                CHECK(attended(s, layer, q.view(), v_dim, mods, 3) == got);
                test::errors e;
                e.add(got.out, test::attended(k, v, q, reference));
                REQUIRE(e.relative() <= 2e-5);
                ++compared;
            };
            const kvq::sliding_window window{slides && layer == 0 ? of[0].window : 1000};
            switch (random.between(0, 4)) {
                case 0:
                    compare(given.part, kvq::mods(given.part, window));
                    break;
                case 1:
                    compare(kvq::mods(given.part, kvq::learned_sinks{logits}),
                            kvq::mods(given.part, kvq::learned_sinks{logits}, window));
                    break;
                case 2: {
                    const kvq::sliding_window own{random.between(1, 60)};
                    compare(kvq::mods(own, given.part), kvq::mods(given.part, own, window));
                    break;
                }
                case 3:
                    compare(kvq::mods(one_bias{0.01f}, given.part),
                            kvq::mods(given.part, one_bias{0.01f}, window));
                    break;
                default:
                    if (slides && layer == 0) break;
                    compare(kvq::mods(given.part, kvq::bidirectional{}),
                            kvq::mods(given.part, kvq::bidirectional{}));
            }
        }
    }
    if (first == 0) CHECK(compared > 2 * (last - first));
}

TEST_CASE("a step appends its tokens, and may list them; a batch of sequences has the bits of each alone") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    kvq::cache cache({1, 2, 16}, {.keys = format_of<kvq::int8>(), .recent = 8, .page_tokens = 16});
    std::vector<kvq::sequence> all;
    std::vector<test::tensor<float>> q, out, alone;
    std::vector<std::unique_ptr<lists>> given;
    for (int i = 0; i < 3; ++i) {
        all.push_back(cache.new_sequence());
        const auto rows = test::random_tensor(random, 50 + i, 2, 16);
        all.back().append(0, rows.view(), rows.view());
        q.push_back(test::random_tensor(random, 1 + i, 4, 16));
        out.emplace_back(1 + i, 4, 16);
        alone.emplace_back(1 + i, 4, 16);
        given.push_back(std::make_unique<lists>(random, 50 + i, 1 + i, 2));
    }
    std::vector<kvq::attention_request> batch;
    for (std::size_t i = 0; i < 3; ++i) {
        all[i].attend(0, q[i].view(), alone[i].view(), given[i]->part);
        batch.push_back({&all[i], q[i].view(), out[i].view()});
        if (i < 2) batch.back().mods = given[i]->part;
    }
    all[2].attend(0, q[2].view(), alone[2].view());  // without a list, in the same batch
    kvq::workspace space;
    cache.attend(0, batch, kvq::causal{}, kvq::thread_pool(2), space);
    for (std::size_t i = 0; i < 3; ++i) CHECK(out[i].values() == alone[i].values());

    const auto rows = test::random_tensor(random, 2, 2, 16);
    const std::int32_t newest[] = {50, 50, 51, -1};
    const kvq::listed_tokens of_step{.selected = {newest, 2}, .queries = 2};
    test::tensor<float> step(2, 4, 16);
    all[0].prefill(0, rows.view(), rows.view(), q[1].view(), step.view(), of_step, kvq::serial_executor{},
                   space);
    for (int t = 0; t < 2; ++t)
        for (int h = 0; h < 4; ++h)
            for (int c = 0; c < 16; ++c)
                CHECK(step.view().at(t, h)[c] ==
                      doctest::Approx(static_cast<double>(rows.view().at(t, h / 2)[c])).epsilon(1e-3));
}

TEST_CASE("tokens that no list names are not read; a list of nothing gives zeros") {
    kvq::cache cache({1, 1, 8}, {.keys = format_of<kvq::int8>(), .recent = 64});
    kvq::sequence s = cache.new_sequence();
    test::tensor<float> rows(20, 1, 8), q(1, 2, 8), out(1, 2, 8);
    for (float& x : rows.values()) x = 1.0f;
    for (float& x : q.values()) x = 1.0f;
    const float hostile[] = {std::nanf(""), HUGE_VALF, -HUGE_VALF};
    for (int t = 0; t < 20; t += 2) std::fill_n(rows.view().at(t, 0), 8, hostile[t / 2 % 3]);
    s.append(0, rows.view(), rows.view());
    std::vector<std::int32_t> odd, none(3, -1);
    for (int t = 1; t < 20; t += 2) odd.push_back(t);
    const kvq::listed_tokens finite{.selected = {odd.data(), 10}};
    s.attend(0, q.view(), out.view(), finite);
    for (const float x : out.values()) CHECK(x == 1.0f);
    odd[3] = 0;
    s.attend(0, q.view(), out.view(), finite);
    for (const float x : out.values()) CHECK(std::isnan(x));

    float lse[2];
    s.attend(0, q.view(), kvq::output_view(out.view()).with_lse(lse),
             kvq::listed_tokens{.selected = {none.data(), 3}});
    for (const float x : out.values()) CHECK(x == 0.0f);
    for (const float x : lse) CHECK(x == -HUGE_VALF);
    s.attend(0, q.view(), out.view(), kvq::listed_tokens{});
    for (const float x : out.values()) CHECK(x == 0.0f);
    q.values()[0] = hostile[0];
    s.attend(0, q.view(), out.view(), kvq::listed_tokens{.selected = {odd.data() + 4, 1}});
    for (int c = 0; c < 8; ++c) {
        CHECK(std::isnan(out.view().at(0, 0)[c]));
        CHECK(out.view().at(0, 1)[c] == 1.0f);
    }
}

TEST_CASE("lists that do not fit are refused with the numbers, and change nothing") {
    kvq::cache cache({1, 2, 8}, {.keys = format_of<kvq::int8>()});
    kvq::sequence s = cache.new_sequence();
    test::tensor<float> rows(10, 2, 8), q(2, 2, 8), out(2, 2, 8);
    s.append(0, rows.view(), rows.view());
    kvq::workspace space;
    std::vector<std::int32_t> tokens(12, 3);
    const auto refused = [&](const kvq::mods_view& mods, const std::string& message) {
        const auto raised = [&](auto&& call) {
            try {
                call();
            } catch (const kvq::argument_error& e) {
                return std::string(e.what()).substr(5);  // without "kvq: "
            }
            return std::string("nothing");
        };
        CHECK(raised([&] { s.attend(0, q.view(), out.view(), mods); }) == message);
        CHECK(raised([&] {
                  s.prefill(0, rows.slice(0, 0), rows.slice(0, 0), q.view(), out.view(), mods,
                            kvq::serial_executor{}, space);
              }) == message);
        CHECK(s.tokens() == 10);
    };
    kvq::listed_tokens of{.selected = {tokens.data(), 6}, .queries = 2};
    tokens[7] = 10;
    refused(of, "query 1 lists token 10, layer 0 holds 10 tokens (-1: none)");
    tokens[7] = -2;
    refused(of, "query 1 lists token -2, layer 0 holds 10 tokens (-1: none)");
    tokens[7] = 0;
    of.queries = 1;
    refused(of,
            "tokens are listed for 1 queries and 1 kv heads, not for the 2 queries and 1 or 2 kv heads of "
            "layer 0");
    of.queries = 2;
    of.kv_heads = 3;
    refused(of,
            "tokens are listed for 2 queries and 3 kv heads, not for the 2 queries and 1 or 2 kv heads of "
            "layer 0");
    of.kv_heads = 0;
    refused(of, "tokens are listed for 2 queries and 0 kv heads, which are at least 0 and 1");
    of.kv_heads = 1;
    of.window.count = 2;
    refused(of, "a query lists 0 to 16777216 tokens, got 2 and no positions");
    of.window.count = -1;
    refused(of, "a query lists 0 to 16777216 tokens, got -1 and no positions");
    of.window.count = 0;
    const std::string both =
        "queries attend to the tokens of their lists: they select no pages and skip no values";
    refused(kvq::mods(of, kvq::selected_pages{4}), both);
    refused(kvq::mods(of, kvq::skipped_values{0.1f}), both);
    s.attend(0, q.view(), out.view(), of);
}

TEST_CASE("an index selects the tokens with the best scores, whatever became of its tokens") {
    const auto [first, last] = test::histories(30);
    for (int history = first; history < last; ++history) {
        INFO("KVQ_SEED=", test::seed(), " KVQ_HISTORY=", history);
        test::generator random(test::seed() + static_cast<std::uint64_t>(history));
        kvq::layer of = kvq::index_layer(4 * random.between(2, 20));
        of.rotary = kvq::rotary_embedding{.dims = 4};
        of.formats.key = random.between(0, 2);
        kvq::cache_options options = test::random_options(random);
        options.keys = {format_of<kvq::int8>(), format_of<kvq::std4_h::keys>(),
                        format_of<kvq::float_rows<kvq::e4m3>>()};
        kvq::cache cache({of}, options);
        kvq::sequence s = cache.new_sequence();
        for (int step = 0; step < 5; ++step) {
            CAPTURE(step);
            const auto k = test::random_tensor(random, random.between(1, 90), 1, of.head_dim);
            s.append(0, k.view(), kvq::no_rows());
            if (random.one_in(3)) s.erase(0, random.between(0, std::min(9, s.tokens() - 1)));
            if (random.one_in(3)) s.shift(random.between(0, s.tokens()), s.tokens(), 7);
            if (random.one_in(3)) s.trim(s.tokens() - random.between(0, std::min(9, s.tokens() - 1)));
            const int held = s.tokens(), n = random.between(1, std::min(held, 5)),
                      heads = random.between(1, random.one_in(4) ? 140 : 9),
                      best = random.one_in(4) ? held + 3 : random.between(1, 40);
            const auto q = test::random_tensor(random, n, heads, of.head_dim);
            const std::vector<float> weights = random.normals(static_cast<std::size_t>(n * heads));
            std::vector<std::int32_t> out(static_cast<std::size_t>(n * best), -2), again = out;
            s.select(0, q.view(), weights.data(), best, out.data());
            kvq::workspace space;
            s.select(0, q.view(), weights.data(), best, again.data(), kvq::thread_pool(3), space);
            REQUIRE(out == again);
            test::tensor<float> keys(held, 1, of.head_dim);
            s.dequantize(0, tensor::key, 0, keys.view());
            for (int i = 0; i < n; ++i) {
                const int seen = held - n + i + 1, count = std::min(best, seen);
                std::vector<double> score(static_cast<std::size_t>(seen));
                double size = 0.0;
                for (int t = 0; t < seen; ++t)
                    for (int h = 0; h < heads; ++h) {
                        double dot = 0.0, terms = 0.0;
                        for (int c = 0; c < of.head_dim; ++c) {
                            const double term = static_cast<double>(q.view().at(i, h)[c]) *
                                                static_cast<double>(keys.view().at(t, 0)[c]);
                            dot += term;
                            terms += std::fabs(term);
                        }
                        const auto weight =
                            static_cast<double>(weights[static_cast<std::size_t>(i * heads + h)]);
                        score[static_cast<std::size_t>(t)] += weight * std::max(dot, 0.0);
                        size = std::max(size, terms * std::fabs(weight));
                    }
                const std::int32_t* const chosen = out.data() + std::ptrdiff_t{i} * best;
                std::vector<bool> taken(static_cast<std::size_t>(seen));
                const double error = 2e-4 * size * std::sqrt(static_cast<double>(heads));
                for (int j = 0; j < best; ++j) {
                    if (j >= count) {
                        REQUIRE(chosen[j] == -1);
                        continue;
                    }
                    REQUIRE(chosen[j] >= 0);
                    REQUIRE(chosen[j] < seen);
                    const auto at = static_cast<std::size_t>(chosen[j]);
                    REQUIRE_FALSE(taken[at]);
                    taken[at] = true;
                    if (j > 0) REQUIRE(score[static_cast<std::size_t>(chosen[j - 1])] >= score[at] - error);
                }
                for (std::size_t t = 0; t < taken.size(); ++t)
                    if (!taken[t])
                        REQUIRE(score[static_cast<std::size_t>(chosen[count - 1])] >= score[t] - error);
            }
        }
    }
}

TEST_CASE("of equal scores the earlier token comes first, NaN last; an index takes keys alone") {
    std::vector<kvq::layer> layers = {kvq::index_layer(8), kvq::full_attention({1, 8})};
    kvq::cache cache(layers, {.keys = format_of<kvq::int8>(), .recent = 16, .page_tokens = 16});
    kvq::sequence s = cache.new_sequence();
    test::tensor<float> k(50, 1, 8), q(2, 3, 8), out(2, 3, 8);
    for (float& x : k.values()) x = 1.0f;
    for (float& x : q.values()) x = 1.0f;
    k.view().at(20, 0)[3] = 2.0f;
    k.view().at(48, 0)[3] = std::nanf("");  // 16 bit still
    s.append(0, k.view(), kvq::no_rows());
    const std::vector<float> weights(6, 0.5f);
    std::vector<std::int32_t> best(12, -2);
    s.select(0, q.view(), weights.data(), 6, best.data());
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 6; ++j) CHECK(best[static_cast<std::size_t>(6 * i + j)] == (j == 0 ? 20 : j - 1));
    best.assign(120, -2);
    s.select(0, q.view(), weights.data(), 60, best.data());
    CHECK(best[48] == 48);  // of the first query the last one, which sees 49 tokens
    CHECK(best[49] == -1);
    CHECK(best[60 + 49] == 48);
    CHECK(best[60 + 48] == 49);
    q.values()[5] = std::nanf("");
    s.select(0, q.view(), weights.data(), 60, best.data());
    for (int j = 0; j < 49; ++j) CHECK(best[static_cast<std::size_t>(j)] == j);

    const auto before = best;
    const auto refused = [&](auto&& call, const std::string& message) {
        try {
            call();
            FAIL_CHECK("nothing is refused: ", message);
        } catch (const kvq::argument_error& e) {
            CHECK(std::string(e.what()).substr(5) == message);
        }
        CHECK(best == before);
        CHECK(s.tokens(0) == 50);
    };
    const auto select = [&](int layer, const kvq::query_view& queries, const float* w, int n) {
        return [&, layer, queries, w, n] { s.select(layer, queries, w, n, best.data()); };
    };
    const float* const w = weights.data();
    refused(select(1, q.view(), w, 4),
            "layer 1, full attention of 1 x 8: it is no index, which selects tokens");
    refused(select(0, q.view(), w, 0), "a query selects at least 1 token, not 0");
    refused(select(0, q.view(), nullptr, 1), "there are no weights for 2 tokens");
    refused(select(0, test::tensor<float>(1, 2, 4).view(), w, 1),
            "q is 2 x 4, not at least 1 head of the 8 channels of layer 0");
    refused(select(0, test::tensor<float>(51, 1, 8).view(), w, 1), "q has 51 tokens but layer 0 holds 50");
    refused([&] { s.attend(0, q.view(), out.view()); },
            "layer 0, index, 1 x 8: it selects tokens (select), and has no values to attend to");
    refused([&] { s.append(0, k.view(), k.view()); },
            "layer 0, index, 1 x 8: it takes keys alone, and v has 50 tokens, not 0");
    layers[0].kv_heads = 2;
    refused([&] { kvq::cache of_two(layers, {.keys = format_of<kvq::int8>()}); },
            "layer 0, index, 2 x 8: it has one head, and no values");
}

}  // namespace listed_tokens_tests
