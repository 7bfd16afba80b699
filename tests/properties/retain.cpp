// SPDX-License-Identifier: MIT
// Comparison family: exact, and float sums. Tokens that are dropped head by head: what is kept of a prompt in
// 16 bit has the pages of a sequence that never had the rest; histories against lists of rows; the mass of
// attention against double arithmetic; and what is refused.
//
// KVQ_HISTORIES: how many. KVQ_HISTORY: only the one with this number. Each has the seed KVQ_SEED plus its
// number.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/core/thread_pool.hpp>
#include <kvq/format/latent.hpp>
#include <kvq/io/page_transfer.hpp>
#include <kvq/policy/kept_tokens.hpp>
#include <kvq/policy/prefix_cache.hpp>

#include "support/latents.hpp"
#include "support/messages.hpp"
#include "support/saved.hpp"

namespace retain_tests {

namespace {

using kvq::tensor;
using test::format_of;

/// Lists for every kv head: the sinks, then tokens of [from, tokens) that ascend.
std::vector<int> random_lists(test::generator& random, int heads, int count, int sinks, int from,
                              int tokens) {
    std::vector<int> kept;
    for (int h = 0; h < heads; ++h) {
        for (int t = 0; t < sinks; ++t) kept.push_back(t);
        int left = count - sinks;
        for (int t = from; t < tokens && left > 0; ++t)
            if (random.between(1, tokens - t) <= left) {
                kept.push_back(t);
                --left;
            }
    }
    return kept;
}

/// The rows that lists name, head by head.
test::tensor<float> rows_of(const kvq::token_view<const float>& all, const std::vector<int>& kept,
                            int count) {
    test::tensor<float> rows(count, all.heads, all.dim);
    for (int h = 0; h < all.heads; ++h)
        for (int i = 0; i < count; ++i)
            std::copy_n(all.at(kept[static_cast<std::size_t>(h * count + i)], h), all.dim,
                        rows.view().at(i, h));
    return rows;
}

struct page_bytes {
    int tokens, room, format;
    std::vector<std::byte> bytes;
    bool operator==(const page_bytes&) const = default;
};
/// Quantized pages, in their order, and how many tokens the others show.
std::vector<page_bytes> pages_of(const kvq::sequence& s, int layer) {
    std::vector<page_bytes> all;
    const kvq::layer_pages pages = s.pages(layer);
    for (int e = 0; e < pages.entries(); ++e)
        for (const kvq::page_ref& p : pages.spans[e].pages)
            if (p)
                all.push_back({pages.spans[e].tokens, pages.spans[e].room, p->format,
                               p->format == 0 ? std::vector<std::byte>{}
                                              : std::vector<std::byte>(p->data(), p->data() + p->bytes)});
    return all;
}

/// What a layer holds, as rows: sinks and what is behind the gap.
test::tensor<float> held_rows(const kvq::sequence& s, int layer, tensor role, const kvq::cache_shape& shape,
                              int sinks, int held) {
    const int tokens = s.tokens(layer), first = sinks + tokens - held;
    test::tensor<float> rows(held, shape.kv_heads, shape.dim(role));
    s.dequantize(layer, role, 0, rows.view().slice(0, sinks));
    s.dequantize(layer, role, first, rows.view().slice(sinks, held - sinks));
    return rows;
}

/// The formats of the tokens that a layer holds, in their order.
std::vector<int> formats_of(const kvq::sequence& s, int sinks, int front, tensor role) {
    std::vector<int> all;
    const kvq::layer_pages pages = s.pages(0);
    for (int e = 0; e < pages.entries(); ++e)
        for (int t = pages.at(e).first_token; t < pages.at(e).first_token + pages.at(e).tokens; ++t)
            if (t < sinks || t >= front)
                all.push_back((role == tensor::key ? pages.at(e).keys : pages.at(e).values)->format);
    return all;
}

/// Rows that were quantized are the same; others are, or they are as a page of this row alone holds them.
void check_rows(const test::tensor<float>& rows, const test::tensor<float>& want,
                const std::vector<int>& formats, const std::vector<int>& kept, kvq::cache_options options,
                tensor role) {
    options.sinks = options.recent = 0;
    options.page_tokens = 1;
    const auto r = rows.view();
    kvq::cache cache({1, r.heads, r.dim}, options);
    int again = 0;
    for (int h = 0; h < r.heads; ++h)
        for (int i = 0; i < r.tokens; ++i) {
            if (std::equal(r.at(i, h), r.at(i, h) + r.dim, want.view().at(i, h))) continue;
            const auto at = static_cast<std::size_t>(h * r.tokens + i);
            REQUIRE(formats[static_cast<std::size_t>(kept[at])] == 0);
            if (again++ > 4) continue;  // a sequence for each takes long
            kvq::sequence alone = cache.new_sequence();
            alone.append(0, want.slice(i, 1), want.slice(i, 1));
            test::tensor<float> one(1, r.heads, r.dim);
            alone.dequantize(0, role, 0, one.view());
            REQUIRE(std::equal(r.at(i, h), r.at(i, h) + r.dim, one.view().at(0, h)));
        }
}

std::vector<float> attended(const kvq::sequence& s, int layer, const test::tensor<float>& q, int dim) {
    test::tensor<float> out(q.tokens(), q.view().heads, dim);
    s.attend(layer, q.view(), out.view());
    return out.values();
}

const std::vector<kvq::format>& any_formats() {
    static const std::vector<kvq::format> all = {format_of<kvq::int8>(),
                                                 format_of<kvq::kivi<4, 32>::keys>(),
                                                 format_of<kvq::std4::values>(),
                                                 format_of<kvq::full<kvq::float16>>(),
                                                 format_of<kvq::float_rows<kvq::e4m3>>(),
                                                 format_of<kvq::std4_h::keys>()};
    return all;
}

}  // namespace

TEST_CASE("what is kept of a held prompt has the pages of a sequence that never had the rest") {
    const auto [first, last] = test::histories(40);
    for (int history = first; history < last; ++history) {
        INFO("KVQ_SEED=", test::seed(), " KVQ_HISTORY=", history);
        test::generator random(test::seed() + static_cast<std::uint64_t>(history));
        const int heads = random.between(1, 3), dim = random.pick(std::vector<int>{32, 40, 64});
        kvq::cache_options options = test::random_options(random);
        options.window = test::random_window(random);
        options.keys.push_back(random.pick(any_formats()));
        options.values.push_back(random.pick(any_formats()));
        kvq::cache cache({2, heads, dim}, options);
        kvq::sequence s = cache.new_sequence(), alone = cache.new_sequence();
        const int tokens = random.between(options.sinks + 1, 250);
        const test::tensor<float> k = test::random_tensor(random, tokens, heads, dim),
                                  v = test::random_tensor(random, tokens, heads, dim);
        s.hold();
        for (int at = 0; at < tokens;) {
            const int n = std::min(tokens - at, random.between(1, 100));
            for (int l = 0; l < 2; ++l) {
                if (random.one_in(2)) {
                    s.append(l, k.slice(at, n), v.slice(at, n));
                } else {
                    test::tensor<float> q(n, heads, dim), out(n, heads, dim);
                    s.prefill(l, k.slice(at, n), v.slice(at, n), q.view(), out.view());
                }
            }
            at += n;
        }
        for (const page_bytes& p : pages_of(s, 0)) REQUIRE(p.format == 0);
        for (int l = 0; l < 2; ++l) {
            const int count = random.between(options.sinks + 1, tokens);
            const std::vector<int> kept =
                random_lists(random, heads, count, options.sinks, options.sinks, tokens);
            const auto k_rows = rows_of(k.view(), kept, count), v_rows = rows_of(v.view(), kept, count);
            s.retain(l, kept, count);
            alone.append(l, k_rows.view(), v_rows.view());
            REQUIRE(s.tokens(l) == tokens);
            CHECK(pages_of(s, l) == pages_of(alone, l));
            CHECK(held_rows(s, l, tensor::key, cache.shape(l), options.sinks, count).values() ==
                  held_rows(alone, l, tensor::key, cache.shape(l), options.sinks, count).values());
        }
        if (options.rollback == 0) CHECK(s.usage().bytes == alone.usage().bytes);
        for (int step = 0; step < 30; ++step) {
            const auto row = test::random_tensor(random, 1, heads, dim),
                       q = test::random_tensor(random, 1, 2 * heads, dim);
            for (int l = 0; l < 2; ++l) {
                s.append(l, row.view(), row.view());
                alone.append(l, row.view(), row.view());
                REQUIRE(attended(s, l, q, dim) == attended(alone, l, q, dim));
            }
        }
        for (int l = 0; l < 2; ++l) CHECK(pages_of(s, l) == pages_of(alone, l));
        CHECK(s.trim_limit() <= tokens);
        s.trim(tokens);
        CHECK(s.tokens() == tokens);
    }
}

TEST_CASE("histories with dropped tokens hold the rows that lists say") {
    // Formats whose codes come out as they were: no row changes, however often it is quantized again.
    const std::vector<kvq::format> same_again = {
        format_of<kvq::int8>(), format_of<kvq::float_rows<kvq::e4m3>>(), format_of<kvq::full<float>>()};
    const auto [first, last] = test::histories(60);
    int dropped = 0;
    for (int history = first; history < last; ++history) {
        INFO("KVQ_SEED=", test::seed(), " KVQ_HISTORY=", history);
        test::generator random(test::seed() + static_cast<std::uint64_t>(history));
        const int heads = random.between(1, 3), dim = random.between(5, 40);
        kvq::cache_options options = test::random_options(random);
        options.window = format_of<kvq::full<float>>();
        options.keys.push_back(random.pick(same_again));
        options.values.push_back(random.pick(same_again));
        kvq::cache cache({1, heads, dim}, options);
        kvq::sequence s = cache.new_sequence();
        int held = 0, limit = 0;  // tokens that each head holds; where trims end
        for (int step = 0; step < 14; ++step) {
            CAPTURE(step);
            const int sinks = std::min(held, options.sinks), tokens = s.tokens();
            const auto before = [&](tensor role) {
                return held_rows(s, 0, role, cache.shape(), sinks, held);
            };
            switch (random.between(0, 5)) {
                case 0:
                case 1: {
                    const int n = random.between(1, 60);
                    const auto k = test::random_tensor(random, n, heads, dim),
                               v = test::random_tensor(random, n, heads, dim);
                    s.append(0, k.view(), v.view());
                    held += n;
                    break;
                }
                case 2: {
                    const int n = random.between(std::max(limit, tokens - 40), tokens);
                    s.trim(n);
                    held -= tokens - n;
                    break;
                }
                case 3:
                    if (random.one_in(2)) {
                        s = s.fork();
                    } else {  // a file does not say when tokens were dropped
                        s = test::restored(cache, test::saved(s));
                        if (limit > 0) limit = tokens;
                    }
                    break;
                default: {
                    if (held <= options.sinks) break;
                    const int count = random.between(options.sinks + 1, held),
                              front = options.sinks + tokens - held;
                    std::vector<int> kept = random_lists(random, heads, count, options.sinks, front, tokens);
                    if (random.one_in(3))  // all heads alike, so that some pages stay whole
                        for (int h = 1; h < heads; ++h)
                            std::copy_n(kept.begin(), count, kept.begin() + h * count);
                    const auto k = before(tensor::key), v = before(tensor::value);
                    const std::vector<int> formats[2] = {formats_of(s, options.sinks, front, tensor::key),
                                                         formats_of(s, options.sinks, front, tensor::value)};
                    s.retain(0, kept, count);
                    REQUIRE(s.tokens() == tokens);
                    for (int& t : kept)
                        if (t >= options.sinks) t -= tokens - held;
                    const auto rows = [&](tensor role) {
                        return held_rows(s, 0, role, cache.shape(), options.sinks, count);
                    };
                    check_rows(rows(tensor::key), rows_of(k.view(), kept, count), formats[0], kept, options,
                               tensor::key);
                    check_rows(rows(tensor::value), rows_of(v.view(), kept, count), formats[1], kept, options,
                               tensor::value);
                    if (count < held) {
                        limit = tokens;
                        ++dropped;
                    }
                    CHECK(s.trim_limit() == limit);
                    held = count;
                }
            }
            if (held == 0) continue;
            const int now = std::min(held, options.sinks);
            const auto k = held_rows(s, 0, tensor::key, cache.shape(), now, held),
                       v = held_rows(s, 0, tensor::value, cache.shape(), now, held);
            const auto q = test::random_tensor(random, 1, heads * random.between(1, 4), dim);
            test::errors e;
            e.add(attended(s, 0, q, dim), test::attended(k, v, q, kvq::causal{}));
            REQUIRE(e.relative() <= 5e-4);
        }
    }
    if (first == 0) CHECK(dropped > last - first);
}

TEST_CASE("pages that all heads keep whole stay, others are quantized once more, and memory goes back") {
    test::generator random(test::seed());
    kvq::cache cache({1, 2, 64}, {.keys = format_of<kvq::std4::keys>(),
                                  .values = format_of<kvq::std4::values>(),
                                  .sinks = 4,
                                  .recent = 16,
                                  .page_tokens = 32});
    kvq::sequence s = cache.new_sequence();
    const auto rows = test::random_tensor(random, 4 + 8 * 32 + 20, 2, 64);
    s.append(0, rows.view(), rows.view());
    s.drop_copies();
    std::vector<int> kept;
    for (int h = 0; h < 2; ++h)
        for (int t = 0; t < 280; ++t)  // pages 1, 4 and 7 whole, half of page 6, the last tokens
            if (t < 4 || (t >= 36 && t < 68) || (t >= 132 && t < 164) ||
                (t >= 196 && t < 228 && t % 2 == h) || t >= 228)
                kept.push_back(t);
    const auto count = static_cast<int>(kept.size() / 2);
    const kvq::layer_pages old = s.pages(0);
    const kvq::page *const one = old.at(2).keys, *const four = old.at(5).values;
    const std::size_t before = cache.bytes_in_use();
    {
        const kvq::sequence fork = s.fork();  // has all tokens, also behind a retain of the other
        const test::file_bytes all = test::saved(fork);
        kvq::sequence other = s.fork();
        other.retain(0, kept, count);
        CHECK(test::saved(fork) == all);
        CHECK(test::saved(s) == all);
    }
    s.retain(0, kept, count);
    CHECK(s.pages(0).at(1).keys == one);
    CHECK(s.pages(0).at(2).values == four);
    CHECK(s.usage().repacked == 16);
    CHECK(s.pages(0).at(4).tokens == 32);
    CHECK(before - cache.bytes_in_use() >
          4 * (cache.page_bytes(tensor::key, 1, 32) + cache.page_bytes(tensor::value, 1, 32)));
    CHECK(static_cast<int>(s.usage().tokens) == 280);
    kvq::sequence other = s.fork();
    other.trim(0);
    CHECK(other.trim_limit() == 0);
}

TEST_CASE(
    "4 bits of half of the tokens of a long prompt take 0.15 of 16 bit, in an arena and with latents too") {
    test::generator random(test::seed());
    constexpr int tokens = 16384, heads = 2, step = 512;
    const auto bytes = [&](const kvq::format& keys, const kvq::format& values, double share) {
        kvq::cache cache({1, heads, 64}, {.keys = keys,
                                          .values = values,
                                          .sinks = 4,
                                          .recent = 32,
                                          .byte_budget = std::size_t{16} << 20,
                                          .preallocate = true});
        kvq::sequence s = cache.new_sequence();
        const auto rows = test::random_tensor(random, step, heads, 64);
        if (share < 1.0) s.hold();
        for (int t = 0; t < tokens; t += step) s.append(0, rows.view(), rows.view());
        const auto count = static_cast<int>(tokens * share);
        if (share < 1.0) s.retain(0, random_lists(random, heads, count, 4, 4, tokens), count);
        s.drop_copies();
        REQUIRE(s.tokens() == tokens);
        return static_cast<double>(cache.bytes_in_use());
    };
    const kvq::format fp16 = format_of<kvq::full<kvq::float16>>();
    CHECK(bytes(format_of<kvq::std4::keys>(), format_of<kvq::std4::values>(), 0.5) <=
          0.15 * bytes(fp16, fp16, 1.0));

    kvq::cache latents(
        {kvq::latent_attention(32, 8)},
        {.keys = kvq::with_fp16_channels(format_of<kvq::std4_h::keys>(), 8), .sinks = 2, .page_tokens = 16});
    kvq::sequence s = latents.new_sequence(), alone = latents.new_sequence();
    const auto k = test::random_tensor(random, 100, 1, 40);
    s.hold();
    s.append(0, k.view(), kvq::no_rows());
    const std::vector<int> kept = random_lists(random, 1, 50, 2, 2, 100);
    alone.append(0, rows_of(k.view(), kept, 50).view(), kvq::no_rows());
    s.retain(0, kept, 50);
    CHECK(pages_of(s, 0) == pages_of(alone, 0));
}

TEST_CASE("the mass of attention is that of double arithmetic, on any number of threads") {
    const auto [first, last] = test::histories(40);
    for (int history = first; history < last; ++history) {
        INFO("KVQ_SEED=", test::seed(), " KVQ_HISTORY=", history);
        test::generator random(test::seed() + static_cast<std::uint64_t>(history));
        const int heads = random.between(1, 3), dim = random.between(5, 40);
        std::vector<kvq::layer> of = {kvq::full_attention({heads, dim, random.between(1, 40)})};
        const bool slides = random.one_in(4);
        if (slides) of[0] = kvq::sliding_attention(random.between(20, 90), of[0]);
        kvq::cache_options options = test::random_options(random);
        options.keys.push_back(random.pick(std::vector<kvq::format>{
            format_of<kvq::int8>(), format_of<kvq::full<float>>(), format_of<test::product_scheme<7>>()}));
        options.values.push_back(format_of<kvq::int8>());
        kvq::cache cache(of, options);
        kvq::sequence s = cache.new_sequence();
        const int tokens = random.between(30, random.one_in(8) ? 2600 : 300);
        for (int i = 0; i < 2; ++i) {
            const auto k = test::random_tensor(random, tokens / 2, heads, dim),
                       v = test::random_tensor(random, tokens / 2, heads, cache.shape(0).dim(tensor::value));
            s.append(0, k.view(), v.view());
        }
        int held = s.tokens(), sinks = std::min(options.sinks, held);
        if (!slides && random.one_in(2)) {
            const int count = random.between(sinks + 1, held);
            s.retain(0, random_lists(random, heads, count, sinks, sinks, held), count);
            held = count;
        }
        const int all = s.tokens(), from = slides ? std::max(0, all - of[0].window) : sinks + all - held;
        if (slides) sinks = 0;
        const int queries = held < all || slides ? 1 : random.between(1, std::min(all, 40));
        const auto q = test::random_tensor(random, queries, heads * random.between(1, 5), dim, 2.0f);
        test::tensor<float> k(sinks + all - from, heads, dim),
            one_hot(sinks + all - from, heads, sinks + all - from);
        s.dequantize(0, tensor::key, 0, k.view().slice(0, sinks));
        s.dequantize(0, tensor::key, from, k.view().slice(sinks, all - from));
        for (int t = 0; t < k.tokens(); ++t)
            for (int h = 0; h < heads; ++h) one_hot.view().at(t, h)[t] = 1.0f;
        const auto compare = [&](const auto& mods) {
            std::vector<float> mass(static_cast<std::size_t>(heads) * static_cast<std::size_t>(all), -1.0f),
                again(mass.size(), 2.0f);
            s.attention_mass(0, q.view(), mass.data(), mods);
            kvq::workspace space;
            kvq::thread_pool pool(3);
            s.attention_mass(0, q.view(), again.data(), mods, pool, space);
            CHECK(mass == again);
            const test::tensor<double> weights = test::attended(k, one_hot, q, mods);
            double difference = 0, norm = 0;
            for (int h = 0; h < heads; ++h)
                for (int t = 0; t < all; ++t) {
                    const int row = t < sinks ? t : t - from + sinks, group = q.view().heads / heads;
                    double want = 0;
                    if (row >= 0 && (t < sinks || t >= from))
                        for (int i = 0; i < queries; ++i)
                            for (int g = 0; g < group; ++g) want += weights.view().at(i, h * group + g)[row];
                    const double d = static_cast<double>(mass[static_cast<std::size_t>(h * all + t)]) - want;
                    difference += d * d;
                    norm += want * want;
                }
            REQUIRE(std::sqrt(difference) <= 5e-4 * std::sqrt(norm));
        };
        const std::vector<float> logits(static_cast<std::size_t>(q.view().heads), 0.7f);
        switch (random.between(0, 3)) {
            case 0:
                compare(kvq::causal{});
                break;
            case 1:
                compare(kvq::softcap{3.0f});
                break;
            case 2:
                compare(kvq::learned_sinks{logits});
                break;
            default:
                if (held == all && !slides)
                    compare(kvq::sliding_window{random.between(1, all)});
                else
                    compare(kvq::causal{});
        }
    }
}

TEST_CASE("policies list the best tokens, with sinks and recent ones") {
    const auto [first, last] = test::histories(30);
    for (int history = first; history < last; ++history) {
        INFO("KVQ_SEED=", test::seed(), " KVQ_HISTORY=", history);
        test::generator random(test::seed() + static_cast<std::uint64_t>(history));
        const int heads = random.between(1, 3), tokens = random.between(30, 200),
                  recent = random.between(0, 9);
        kvq::cache_options options = test::random_options(random);
        options.keys.push_back(format_of<kvq::full<float>>());
        options.window = format_of<kvq::full<float>>();
        kvq::cache cache({1, heads, 8}, options);
        kvq::sequence s = cache.new_sequence();
        const auto k = test::random_tensor(random, tokens, heads, 8),
                   v = test::random_tensor(random, tokens, heads, 8);
        s.append(0, k.view(), v.view());
        const int sinks = options.sinks;
        REQUIRE(s.gap(0) == kvq::token_range{sinks, sinks});
        const std::vector<float> norms = kvq::key_norm_scores(s, 0);
        const int count = random.between(sinks + recent + 1, tokens);
        const std::vector<int> kept = kvq::best_tokens(s, 0, norms, count, recent);
        REQUIRE(kept.size() == static_cast<std::size_t>(heads * count));
        for (int h = 0; h < heads; ++h) {
            std::vector<bool> is_kept(static_cast<std::size_t>(tokens));
            for (int i = 0; i < count; ++i)
                is_kept[static_cast<std::size_t>(kept[static_cast<std::size_t>(h * count + i)])] = true;
            float worst = std::numeric_limits<float>::infinity(), best = -worst;
            for (int t = sinks; t < tokens - recent; ++t) {
                float sum = 0;
                for (int c = 0; c < 8; ++c) sum += k.view().at(t, h)[c] * k.view().at(t, h)[c];
                const float score = -std::sqrt(sum);
                REQUIRE(std::abs(norms[static_cast<std::size_t>(h * tokens + t)] - score) < 1e-4f);
                if (is_kept[static_cast<std::size_t>(t)])
                    worst = std::min(worst, norms[static_cast<std::size_t>(h * tokens + t)]);
                else
                    best = std::max(best, norms[static_cast<std::size_t>(h * tokens + t)]);
            }
            CHECK(best <= worst);
        }
        s.retain(0, kept, count);
        CHECK(s.gap(0) == (count == tokens ? kvq::token_range{sinks, sinks}
                                           : kvq::token_range{sinks, sinks + tokens - count}));
        const auto q = test::random_tensor(random, 1, heads, 8);
        const std::vector<float> scores = kvq::snapkv_scores(s, 0, q.view(), kvq::causal{}, 1);
        std::vector<float> mass(scores.size());
        s.attention_mass(0, q.view(), mass.data());
        CHECK(scores == mass);
        kvq::calibration statistics(cache.shape(), true);
        statistics.add_queries(0, q.view());
        const std::vector<float> expected = kvq::expected_attention_scores(s, 0, statistics);
        const int t = s.tokens() - 1;
        double product = 0, norm = 0;
        test::tensor<float> row(1, heads, 8), value(1, heads, 8);
        s.dequantize(0, tensor::key, t, row.view());
        s.dequantize(0, tensor::value, t, value.view());
        for (int c = 0; c < 8; ++c) {
            product +=
                static_cast<double>(row.view().at(0, 0)[c]) * static_cast<double>(q.view().at(0, 0)[c]);
            norm +=
                static_cast<double>(value.view().at(0, 0)[c]) * static_cast<double>(value.view().at(0, 0)[c]);
        }
        CHECK(expected[static_cast<std::size_t>(t)] ==
              doctest::Approx(product * product / 16 + 0.5 * std::log(norm)).epsilon(1e-4));
    }
    CHECK(kvq::pyramid_counts(3, 100, 0.5) == std::vector<int>{150, 100, 50});
}

TEST_CASE("kept keys have the plan of the first tokens of their prompt, which may be dropped") {
    test::generator random(test::seed());
    kvq::cache_options options{.keys = test::made<test::usual>(kvq::low2::keys{}),
                               .values = format_of<kvq::int8>(),
                               .sinks = 4,
                               .recent = 16,
                               .page_tokens = 32};
    options.statistics = kvq::key_statistics::own;
    options.statistics_tokens = 96;
    kvq::cache cache({1, 2, 32}, options);
    kvq::sequence s = cache.new_sequence(), all = cache.new_sequence();
    auto k = test::random_tensor(random, 300, 2, 32);
    for (int t = 0; t < 300; ++t)
        for (int h = 0; h < 2; ++h)
            for (int c = 0; c < 32; c += 4) k.view().at(t, h)[c] *= 16.0f;
    s.hold();
    s.append(0, k.view(), k.view());
    all.append(0, k.view(), k.view());
    std::vector<int> kept;
    for (int h = 0; h < 2; ++h)
        for (int i = 0; i < 154; ++i) kept.push_back(i < 4 ? i : 146 + i);
    s.retain(0, kept, 154);
    const kvq::page &mine = *s.pages(0).at(1).keys, &theirs = *all.pages(0).at(1).keys;
    REQUIRE((mine.plan && theirs.plan));
    CHECK(mine.plan.record().fingerprint == theirs.plan.record().fingerprint);
    CHECK(mine.format == theirs.format);
}

TEST_CASE("what is kept goes on as any sequence: requantized, reserved, drafted, in a prefix cache") {
    test::generator random(test::seed());
    kvq::cache_options options{.keys = {format_of<kvq::int8>(), format_of<kvq::kivi<4, 32>::keys>()},
                               .values = format_of<kvq::int8>(),
                               .sinks = 2,
                               .recent = 8,
                               .page_tokens = 16};
    kvq::cache cache({1, 2, 32}, options);
    kvq::sequence s = cache.new_sequence();
    const auto rows = test::random_tensor(random, 200, 2, 32);
    s.append(0, rows.view(), rows.view());
    s.retain(0, random_lists(random, 2, 101, 2, 2, 200), 101);
    int held = 101;
    const auto check = [&](const kvq::sequence& of) {
        const auto k = held_rows(of, 0, tensor::key, cache.shape(), 2, held),
                   v = held_rows(of, 0, tensor::value, cache.shape(), 2, held);
        const auto q = test::random_tensor(random, 1, 4, 32);
        test::errors e;
        e.add(attended(of, 0, q, 32), test::attended(k, v, q, kvq::causal{}));
        REQUIRE(e.relative() <= 5e-4);
    };
    check(s);
    const std::size_t before = cache.bytes_in_use();
    CHECK(cache.requantize(s, {.key = 1}).pages > 0);
    CHECK(cache.bytes_in_use() < before);
    check(s);
    kvq::workspace space;
    const kvq::step_request step[] = {{&s, 40, 1}};
    cache.reserve(step, 4, 1, space);
    const auto more = test::random_tensor(random, 40, 2, 32), q = test::random_tensor(random, 1, 4, 32);
    test::tensor<float> out(1, 4, 32);
    s.prefill(0, more.view(), more.view(), q.view(), out.view(), kvq::causal{}, kvq::serial_executor{},
              space);
    held += 40;
    check(s);
    s.append_draft(0, more.slice(0, 3), more.slice(0, 3));
    const int path[] = {0, 1};
    s.keep(path);
    held += 2;
    CHECK(s.tokens() == 242);
    check(s);
    s.trim(200);
    held -= 42;
    check(s);

    kvq::prefix_cache store(cache);
    std::vector<kvq::token_id> ids(240);
    for (kvq::token_id& id : ids) id = random.between(0, 9);
    const std::span<const kvq::token_id> all(ids);
    CHECK(store.store(all.first(200), s) == kvq::store_outcome::stored);
    const auto longer = store.fetch(all);  // goes on behind the prompt whose tokens were dropped
    CHECK(longer.tokens == 200);
    check(longer.sequence);
    CHECK(store.fetch(all.first(150)).tokens <= 2);  // and not within it
}

TEST_CASE("what cannot be dropped is refused with a sentence, and nothing changes") {
    test::generator random(test::seed());
    kvq::cache cache({kvq::full_attention({2, 16}), kvq::sliding_attention(16, {2, 16})},
                     {.keys = format_of<kvq::int8>(),
                      .values = format_of<kvq::int8>(),
                      .sinks = 2,
                      .page_tokens = 8,
                      .rotary = {kvq::rotary_embedding{.dims = 16}}});
    kvq::sequence s = cache.new_sequence();
    const auto rows = test::random_tensor(random, 40, 2, 16), q = test::random_tensor(random, 2, 4, 16);
    for (int l = 0; l < 2; ++l) s.append(l, rows.view(), rows.view());
    const auto refused = [&](const char* part, auto&& f) {
        const test::file_bytes before = test::saved(s);
        CHECK(test::contains(test::message_of(f), part));
        CHECK(test::saved(s) == before);
    };
    const std::vector<int> good = {0, 1, 5, 39, 0, 1, 20, 21}, late = {0, 1, 5, 40, 0, 1, 20, 21},
                           no_sinks = {0, 2, 5, 39, 0, 1, 20, 21}, twice = {0, 1, 5, 5, 0, 1, 20, 21};
    refused("full attention", [&] { s.retain(1, good, 4); });
    refused("layer 2 is not among", [&] { s.retain(2, good, 4); });
    refused("below 40", [&] { s.retain(0, late, 4); });
    refused("all 2 sinks come first", [&] { s.retain(0, no_sinks, 4); });
    refused("token 5 at place 3", [&] { s.retain(0, twice, 4); });
    CHECK(!test::contains(test::message_of([&] { s.retain(0, twice, 4); }), "gone"));
    refused("retain 3 tokens each", [&] { s.retain(0, good, 3); });
    refused("at least its 2 sinks and 1 token", [&] { s.retain(0, std::span(good).first(4), 2); });
    s.retain(0, good, 4);
    refused("dropped tokens when it held 40", [&] { s.trim(39); });
    refused("cannot erase", [&] { s.erase(5, 6); });
    refused("cannot shift", [&] { s.shift(5, 6, 1); });
    refused("cannot splice", [&] { s.splice(s, 5, 6); });
    refused("comes before", [&] {
        std::vector<float> mass(80);
        s.attention_mass(0, q.view(), mass.data());
    });
    test::tensor<float> out(2, 4, 16);
    refused("comes before", [&] { s.attend(0, q.view(), out.view()); });
    refused("cannot send", [&] { kvq::send_pages(s, 0, [](const void*, std::size_t) {}); });
    refused("are gone", [&] { s.retain(0, good, 4), s.retain(0, std::vector<int>{0, 1, 5, 0, 1, 20}, 3); });
    kvq::cache full({1, 2, 16}, {.keys = format_of<kvq::int8>(), .page_tokens = 8, .byte_budget = 8192});
    kvq::sequence most = full.new_sequence();
    most.append(0, rows.view(), rows.view());
    const test::file_bytes all = test::saved(most);
    std::vector<int> others;
    for (int t = 0; t < 78; ++t) others.push_back(t % 39 + 1);
    const std::size_t used = full.bytes_in_use();
    std::vector<kvq::page_ref> taken;  // all that is left
    while (test::message_of([&] { taken.push_back(full.pool().allocate(64, 0, 1)); }).empty()) {
    }
    CHECK(test::contains(test::message_of([&] { most.retain(0, others, 39); }), "does not fit"));
    taken.clear();
    CHECK(test::saved(most) == all);
    CHECK(full.bytes_in_use() == used);
    s.hold();
    CHECK(test::contains(test::message_of([&] { (void)test::saved(s); }), "held in 16 bit"));
    s.release();
    (void)test::saved(s);
}

}  // namespace retain_tests
