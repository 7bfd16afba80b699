// SPDX-License-Identifier: MIT
// Comparison family: exact. What a sequence holds depends on its tokens, not on how they came.
#include <doctest/doctest.h>

#include <algorithm>

#include "support/caches.hpp"

using test::append;
using test::attention_bits;
using test::contents;

TEST_CASE_TEMPLATE("tokens at once, one by one, or in random pieces: the same bytes and the same attention",
                   C, KVQ_TEST_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 8; ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        const int n = random.between(1, 150);
        INFO(n, " tokens, ", shape.kv_heads, " x ", shape.head_dim, "/", shape.value_dim, ", sinks ",
             options.sinks, ", recent ", options.recent, ", pages of ", options.page_tokens, ", rollback ",
             options.rollback);
        const test::stream s(random, shape, n);
        auto cache = test::make_cache<C>(shape, options);

        auto whole = cache.new_sequence(), single = cache.new_sequence(), pieces = cache.new_sequence();
        append(whole, shape.layers, s, 0, n);
        for (int i = 0; i < n; ++i) append(single, shape.layers, s, i, 1);
        for (int i = 0; i < n;) {
            const int count = std::min(n - i, random.between(0, 60));
            append(pieces, shape.layers, s, i, count);
            i += count;
        }
        const auto bytes = contents(cache, whole, true);
        CHECK(contents(cache, single, true) == bytes);
        CHECK(contents(cache, pieces, true) == bytes);
        const auto out = attention_bits(cache, whole);
        CHECK(attention_bits(cache, single) == out);
        CHECK(attention_bits(cache, pieces) == out);
        CHECK(whole.usage().rollback == single.usage().rollback);
    }
}

TEST_CASE("input format and strides do not matter, only values do") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 3, .head_dim = 20, .value_dim = 12};
    test::kivi_cache cache(shape, {.sinks = 2, .recent = 5, .page_tokens = 16});
    // Values that all three formats hold exactly.
    test::tensor<float> k(70, 3, 20), v(70, 3, 12);
    for (float& x : k.values()) x = static_cast<float>(kvq::bfloat16(random.normal()));
    for (float& x : v.values()) x = static_cast<float>(kvq::bfloat16(random.normal()));

    auto reference = cache.new_sequence();
    reference.append(0, k.view(), v.view());
    const auto bytes = contents(cache, reference, true);
    const auto same = [&]<class T>(T, test::order order) {
        const auto tk = test::converted<T>(k, order), tv = test::converted<T>(v, order);
        auto sequence = cache.new_sequence();
        sequence.append(0, tk.slice(0, 33), tv.slice(0, 33));
        sequence.append(0, tk.slice(33, 37), tv.slice(33, 37));
        return contents(cache, sequence, true) == bytes;
    };
    for (const auto order : {test::order::nhd, test::order::hnd}) {
        CHECK(same(float{}, order));
        CHECK(same(kvq::float16{}, order));
        CHECK(same(kvq::bfloat16{}, order));
    }

    // One row of a larger tensor: K, V and other things interleaved, mutable data.
    std::vector<float> joined(70 * 200, -1.0f);
    const kvq::token_view<float> kj(joined.data() + 7, 70, 3, 20, 200, 25),
        vj(joined.data() + 100, 70, 3, 12, 200, 30);
    for (int t = 0; t < 70; ++t)
        for (int h = 0; h < 3; ++h) {
            std::copy_n(k.view().at(t, h), 20, kj.at(t, h));
            std::copy_n(v.view().at(t, h), 12, vj.at(t, h));
        }
    auto sequence = cache.new_sequence();
    sequence.append(0, kj, vj);
    CHECK(contents(cache, sequence, true) == bytes);
}

TEST_CASE_TEMPLATE("pages are quantized when they lie behind the recent window, sinks never", C,
                   KVQ_TEST_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 6; ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size, 12);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        const test::stream s(random, shape, 120);
        auto cache = test::make_cache<C>(shape, options);
        auto sequence = cache.new_sequence();
        for (int n = 1; n <= 120; ++n) {
            append(sequence, shape.layers, s, n - 1, 1);
            for (int layer = 0; layer < shape.layers; ++layer) {
                const auto pages = sequence.pages(layer);
                int next_token = 0;
                for (int e = 0; e < pages.entries(); ++e) {
                    const auto entry = pages.at(e);
                    REQUIRE(entry.first_token == next_token);
                    next_token += entry.tokens;
                    const bool sink = entry.first_token < options.sinks;
                    const bool behind =
                        !sink && entry.tokens == options.page_tokens && next_token <= n - options.recent;
                    REQUIRE(entry.keys->format ==
                            (behind ? cache.target_format(kvq::tensor::key, layer) : 0));
                    REQUIRE(entry.values->format ==
                            (behind ? cache.target_format(kvq::tensor::value, layer) : 0));
                }
                REQUIRE(next_token == n);
            }
        }
    }
}

TEST_CASE_TEMPLATE(
    "what is in the window is the input rounded once; what is quantized is the scheme's x^ of that", C,
    KVQ_TEST_CACHES) {
    using window = typename C::window;
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 6; ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        const int n = random.between(1, 120);
        const test::stream s(random, shape, n);
        auto cache = test::make_cache<C>(shape, options);
        auto sequence = cache.new_sequence();
        append(sequence, shape.layers, s, 0, n);
        for (int layer = 0; layer < shape.layers; ++layer) {
            const auto check = [&]<kvq::tensor Role>(std::integral_constant<kvq::tensor, Role>,
                                                     const auto& input) {
                const auto got = test::dequantized(sequence, shape, layer, Role);
                const auto pages = sequence.pages(layer);
                int wrong = 0;
                for (int e = 0; e < pages.entries(); ++e) {
                    const auto entry = pages.at(e);
                    const kvq::page& p = Role == kvq::tensor::key ? *entry.keys : *entry.values;
                    const kvq::block_shape block{Role, p.tokens, shape.dim(Role)};
                    for (int h = 0; h < shape.kv_heads; ++h) {
                        std::vector<float> x(block.values());
                        for (int t = 0; t < entry.tokens; ++t)
                            for (int c = 0; c < block.dim; ++c)
                                x[static_cast<std::size_t>(t * block.dim + c)] =
                                    static_cast<float>(window(input.view().at(entry.first_token + t, h)[c]));
                        if (p.format != 0)
                            test::round_trip(cache.table(Role)[p.format], block, {layer, h}, x);
                        for (int t = 0; t < entry.tokens; ++t)
                            for (int c = 0; c < block.dim; ++c)
                                wrong += got.view().at(entry.first_token + t, h)[c] !=
                                         x[static_cast<std::size_t>(t * block.dim + c)];
                    }
                }
                CHECK(wrong == 0);
            };
            check(std::integral_constant<kvq::tensor, kvq::tensor::key>{}, s.k);
            check(std::integral_constant<kvq::tensor, kvq::tensor::value>{}, s.v);
        }
    }
}

TEST_CASE("layers may run ahead of each other") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 3, .kv_heads = 1, .head_dim = 8};
    test::kivi_cache cache(shape, {.sinks = 1, .recent = 4, .page_tokens = 8});
    const test::stream s(random, shape, 60);
    auto ahead = cache.new_sequence(), even = cache.new_sequence();
    append(even, 3, s, 0, 60);
    ahead.append(0, s.k.slice(0, 60), s.v.slice(0, 60));
    ahead.append(1, s.k.slice(0, 31), s.v.slice(0, 31));
    CHECK(ahead.tokens() == 60);
    CHECK(ahead.tokens(1) == 31);
    CHECK(ahead.tokens(2) == 0);
    ahead.append(1, s.k.slice(31, 29), s.v.slice(31, 29));
    ahead.append(2, s.k.slice(0, 60), s.v.slice(0, 60));
    CHECK(contents(cache, ahead, true) == contents(cache, even, true));
}

TEST_CASE("empty sequences and zero-length input are ordinary") {
    test::kivi_cache cache({.layers = 2, .kv_heads = 2, .head_dim = 8}, {.sinks = 3});
    auto sequence = cache.new_sequence();
    CHECK(sequence.tokens() == 0);
    CHECK(sequence.usage().quantized == 0);
    CHECK(sequence.usage().window == 0);
    CHECK(cache.bytes_in_use() == 0);
    const kvq::token_view<const float> none(nullptr, 0, 2, 8);
    const kvq::token_view<float> no_output(nullptr, 0, 2, 8);
    sequence.append(0, none, none);
    sequence.attend(0, none, no_output);
    sequence.dequantize(0, kvq::tensor::key, 0, no_output);
    sequence.trim(0);
    auto other = sequence.fork();
    CHECK(other.tokens() == 0);
    CHECK(cache.bytes_in_use() == 0);

    test::generator random(1);
    const test::stream s(random, cache.shape(), 5);
    append(sequence, 2, s, 0, 5);
    const auto bytes = contents(cache, sequence, true);
    const auto in_use = cache.bytes_in_use();
    sequence.append(1, none, none);
    sequence.trim(5);
    CHECK(contents(cache, sequence, true) == bytes);
    CHECK(cache.bytes_in_use() == in_use);
    sequence.trim(0);
    CHECK(sequence.tokens() == 0);
    CHECK(cache.bytes_in_use() == 0);
    append(sequence, 2, s, 0, 5);
    CHECK(contents(cache, sequence, true) == bytes);
}
