// SPDX-License-Identifier: MIT
// Comparison family: exact. What is trimmed was never there, and what is left did not move.
#include <doctest/doctest.h>

#include <algorithm>

#include "support/caches.hpp"

using test::append;
using test::attention_bits;
using test::contents;

namespace cache_trim_tests {

namespace {

/// Tokens of a layer that lie in quantized pages.
template <class Sequence>
int quantized_tokens(const Sequence& sequence, int layer) {
    if (sequence.tokens(layer) == 0) return 0;
    const auto pages = sequence.pages(layer);
    int quantized = 0;
    for (int e = 0; e < pages.entries(); ++e)
        if (pages.at(e).keys->format != 0 || pages.at(e).values->format != 0)
            quantized = pages.at(e).first_token + pages.at(e).tokens;
    return quantized;
}

}  // namespace

TEST_CASE_TEMPLATE("a trim within the rollback equals never having appended, and so does what follows", C,
                   KVQ_TEST_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 12; ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size, 16);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        options.rollback = random.between(1, 60);
        const int n = random.between(1, 120);
        const test::stream s(random, shape, n), other(random, shape, n);
        auto cache = test::make_cache<C>(shape, options);
        for (int kept = std::max(0, n - options.rollback); kept <= n; kept += random.between(1, 6)) {
            INFO("from ", n, " to ", kept, ", sinks ", options.sinks, ", recent ", options.recent,
                 ", pages of ", options.page_tokens, ", rollback ", options.rollback);
            auto trimmed = cache.new_sequence(), never = cache.new_sequence();
            append(trimmed, shape.layers, s, 0, kept);
            append(trimmed, shape.layers, other, kept, n - kept);
            trimmed.trim(kept);
            append(never, shape.layers, s, 0, kept);
            CHECK(trimmed.tokens() == kept);
            CHECK(contents(cache, trimmed) == contents(cache, never));
            CHECK(attention_bits(cache, trimmed) == attention_bits(cache, never));
            append(trimmed, shape.layers, s, kept, n - kept);
            append(never, shape.layers, s, kept, n - kept);
            CHECK(contents(cache, trimmed) == contents(cache, never));
            CHECK(attention_bits(cache, trimmed) == attention_bits(cache, never));
        }
    }
}

TEST_CASE_TEMPLATE("a trim to any position: surviving tokens keep the values that they had", C,
                   KVQ_TEST_CACHES) {
    using window = typename C::window;
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 3; ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size, 16);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        options.rollback = random.pick(std::vector<int>{0, 5});
        options.repack = 0.0f;  // else a page of which little is left is quantized once more
        const int n = random.between(1, 120);
        const test::stream s(random, shape, n);
        auto cache = test::make_cache<C>(shape, options);
        auto full = cache.new_sequence();
        append(full, shape.layers, s, 0, n);
        for (int kept = 0; kept <= n; ++kept) {
            INFO("from ", n, " to ", kept, ", sinks ", options.sinks, ", recent ", options.recent,
                 ", pages of ", options.page_tokens, ", rollback ", options.rollback);
            auto trimmed = full.fork();
            trimmed.trim(kept);
            REQUIRE(trimmed.tokens() == kept);
            for (int layer = 0; layer < shape.layers; ++layer)
                for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
                    const auto before = test::dequantized(full, shape, layer, role);
                    const auto after = test::dequantized(trimmed, shape, layer, role);
                    const auto input = role == kvq::tensor::key ? s.k.view() : s.v.view();
                    int wrong = 0;
                    for (int t = 0; t < kept; ++t)
                        for (int h = 0; h < shape.kv_heads; ++h)
                            for (int c = 0; c < shape.dim(role); ++c) {
                                const float is = after.view().at(t, h)[c], was = before.view().at(t, h)[c];
                                // A page that was committed within the rollback may be 16 bit again.
                                const auto original = static_cast<float>(window(input.at(t, h)[c]));
                                const bool again =
                                    t + options.page_tokens + options.recent > n - options.rollback;
                                wrong += !(is == was || (again && is == original));
                            }
                    REQUIRE(wrong == 0);
                }
            // It goes on as a sequence of its own.
            if (kept % 17 == 0) {
                append(trimmed, shape.layers, s, kept, n - kept);
                CHECK(trimmed.tokens() == n);
                CHECK(attention_bits(cache, trimmed).size() == attention_bits(cache, full).size());
            }
        }
    }
}

TEST_CASE_TEMPLATE("histories of trims of any depth: no token ever takes the value of another", C,
                   test::kivi_cache, test::int8_cache, test::product_cache) {
    using window = typename C::window;
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 6; ++round) {
        const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 6, .value_dim = 5};
        auto options = test::random_options(random);
        options.repack = 0.0f;
        options.page_tokens = random.pick(std::vector<int>{4, 7, 8});
        options.rollback = random.between(0, 40);
        auto cache = test::make_cache<C>(shape, options);
        const test::stream s(random, shape, 200);
        auto sequence = cache.new_sequence();
        // What a value has ever been: 16-bit copies may be what an earlier, deep trim had left.
        std::vector<std::vector<float>> seen[2];
        for (auto& of : seen) of.resize(200 * 6);
        for (int step = 0; step < 80; ++step) {
            const int held = sequence.tokens();
            const auto before = std::pair(test::dequantized(sequence, shape, 0, kvq::tensor::key),
                                          test::dequantized(sequence, shape, 0, kvq::tensor::value));
            const int quantized_before = quantized_tokens(sequence, 0);
            if (random.one_in(2))
                sequence.trim(random.one_in(3) ? random.between(0, held)
                                               : random.between(std::max(0, held - 30), held));
            else
                append(sequence, 1, s, held, random.between(0, std::min(60, 200 - held)));
            const int left = std::min(held, sequence.tokens());
            const int quantized_after = quantized_tokens(sequence, 0);
            for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
                const auto after = test::dequantized(sequence, shape, 0, role);
                const auto& was = role == kvq::tensor::key ? before.first : before.second;
                const auto input = role == kvq::tensor::key ? s.k.view() : s.v.view();
                int wrong = 0;
                for (int t = 0; t < left; ++t) {
                    // What an append codes changes within the scheme's error; that is another test's subject.
                    if (t >= quantized_before && t < quantized_after) continue;
                    for (int c = 0; c < shape.dim(role); ++c) {
                        const float is = after.view().at(t, 0)[c], old = was.view().at(t, 0)[c];
                        auto& earlier = seen[static_cast<int>(role)][static_cast<std::size_t>(t * 6 + c)];
                        const bool known = std::find(earlier.begin(), earlier.end(), is) != earlier.end();
                        wrong += !(is == old || is == static_cast<float>(window(old)) ||
                                   is == static_cast<float>(window(input.at(t, 0)[c])) || known);
                        for (const float x : {old, is})
                            if (std::find(earlier.begin(), earlier.end(), x) == earlier.end())
                                earlier.push_back(x);
                    }
                }
                INFO("step ", step, ": ", held, " to ", sequence.tokens(), " tokens, rollback ",
                     options.rollback);
                REQUIRE(wrong == 0);
            }
        }
    }
}

TEST_CASE_TEMPLATE("speculative decoding: thousands of drafts cut back to what was accepted leave no trace",
                   C, test::kivi_cache, test::mixed_cache, test::product_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 1, .head_dim = 8, .value_dim = 5};
    const int longest_draft = 8;
    auto cache = test::make_cache<C>(shape, {.sinks = 3,
                                             .recent = 9,
                                             .page_tokens = 8,
                                             .rollback = longest_draft,
                                             .layers = test::rotate_formats<C>(2, 1)});
    const int n = 9000;
    const test::stream s(random, shape, n), draft(random, shape, longest_draft);
    auto drafting = cache.new_sequence(), plain = cache.new_sequence();
    int accepted = 0;
    for (int step = 0; accepted < n; ++step) {
        const int good = random.between(0, std::min(longest_draft, n - accepted));
        append(drafting, 2, s, accepted, good);
        append(drafting, 2, draft, 0, longest_draft - good);
        drafting.trim(accepted + good);
        append(plain, 2, s, accepted, good);
        accepted += good;
        if (step % 200 == 0 || accepted == n) {
            INFO(accepted, " tokens");
            REQUIRE(contents(cache, drafting) == contents(cache, plain));
            REQUIRE(attention_bits(cache, drafting) == attention_bits(cache, plain));
            REQUIRE(drafting.usage().quantized == plain.usage().quantized);
            REQUIRE(drafting.usage().window >= plain.usage().window);
            REQUIRE(drafting.usage().rollback <= plain.usage().rollback);
        }
    }
}

TEST_CASE("layers shorter than the position stay as they are") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 3, .kv_heads = 2, .head_dim = 8};
    test::kivi_cache cache(shape, {.sinks = 2, .recent = 4, .page_tokens = 8, .rollback = 0});
    const test::stream s(random, shape, 60);
    auto sequence = cache.new_sequence();
    sequence.append(0, s.k.slice(0, 60), s.v.slice(0, 60));
    sequence.append(1, s.k.slice(0, 20), s.v.slice(0, 20));
    sequence.trim(30);
    CHECK(sequence.tokens(0) == 30);
    CHECK(sequence.tokens(1) == 20);
    CHECK(sequence.tokens(2) == 0);
    sequence.trim(0);
    CHECK(cache.bytes_in_use() == 0);
}

TEST_CASE("a trim gives back the pages that nobody needs") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 8};
    test::kivi_cache cache(shape, {.sinks = 2, .recent = 4, .page_tokens = 8, .rollback = 0});
    const test::stream s(random, shape, 100);
    auto sequence = cache.new_sequence();
    std::vector<std::size_t> bytes;
    for (int n = 0; n < 100; ++n) {
        bytes.push_back(cache.bytes_in_use());
        append(sequence, 1, s, n, 1);
    }
    for (int n = 99; n > 0; --n) {
        sequence.trim(n);
        // At most the page that was cut is larger than it would have been.
        CHECK(cache.bytes_in_use() <=
              bytes[static_cast<std::size_t>(n)] + 2 * cache.page_bytes(kvq::tensor::key, 0, 8));
    }
    sequence.trim(0);
    CHECK(cache.bytes_in_use() == 0);
}

}  // namespace cache_trim_tests
