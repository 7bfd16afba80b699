// SPDX-License-Identifier: MIT
// Comparison family: exact. Two requests with a common prefix, 35 MB and 62 MB in 16 bit: the sizes of the
// case for which vllm-mlx (pull request 69) needed a fix, since quantized buffers kept what had been
// allocated ahead.
#include <doctest/doctest.h>

#include <kvq/policy/prefix_cache.hpp>

#include "support/caches.hpp"

namespace prefix_cache_bytes_tests {

namespace {

// MLX's formats: groups of 64 channels, 16-bit scale and bias.
using widths = test::formats<kvq::full<kvq::float16>, kvq::affine<8>, kvq::affine<4>>;
using wide_cache = test::typed_cache<widths>;

constexpr kvq::cache_shape shape{.layers = 4, .kv_heads = 4, .head_dim = 128};
constexpr std::size_t bytes_per_token = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim;
constexpr int first_tokens = 4288, second_tokens = 7552;
static_assert(first_tokens * bytes_per_token / 1'000'000 == 35);
static_assert((second_tokens * bytes_per_token + 500'000) / 1'000'000 == 62);

std::vector<kvq::token_id> ids(int n) {
    std::vector<kvq::token_id> tokens;
    for (int i = 0; i < n; ++i) tokens.push_back(i * 7919 % 32000);
    return tokens;
}

}  // namespace

TEST_CASE(
    "35 and 62 MB with a common prefix: half in 8 bit, a quarter in 4, the prefix once, attention as without "
    "a store") {
    test::generator random(test::seed());
    const test::stream s(random, shape, second_tokens / 8);
    const auto append = [&](wide_cache::sequence_type& sequence, int from, int to) {
        for (int n; from < to; from += n) {
            const int at = from % s.k.tokens();
            n = std::min(to - from, s.k.tokens() - at);
            test::append(sequence, shape.layers, s, at, n);
        }
    };
    const auto first = ids(first_tokens), second = ids(second_tokens);

    for (const int bits : {8, 4}) {
        const int format = bits == 8 ? 1 : 2;
        wide_cache cache(shape, {.page_tokens = 64});  // computes in 16 bit
        kvq::prefix_cache store(cache, {.format = kvq::layer_format{format, format}});

        std::size_t bytes_first = 0;
        {
            auto a = store.fetch(first);
            REQUIRE(a.match == kvq::prefix_match::miss);
            append(a.sequence, 0, first_tokens);
            CHECK(a.sequence.usage().window == first_tokens * bytes_per_token);
            REQUIRE(store.store(first, a.sequence) == kvq::store_outcome::stored);
        }
        bytes_first = cache.bytes_in_use();
        {
            auto b = store.fetch(second);
            REQUIRE(b.match == kvq::prefix_match::prefix);
            REQUIRE(b.tokens == first_tokens);
            append(b.sequence, first_tokens, second_tokens);
            REQUIRE(store.store(second, b.sequence) == kvq::store_outcome::stored);
        }
        const std::size_t bytes_both = cache.bytes_in_use();
        MESSAGE(bits << " bit: " << bytes_first << " bytes for " << first_tokens * bytes_per_token
                     << ", then " << bytes_both << " for both requests, " << second_tokens * bytes_per_token
                     << " for the second");
        CHECK(store.bytes() == bytes_both);
        // 8.5 bits per value with the parameters; 4 bit in proportion.
        CHECK(bytes_first <= 19'000'000u * static_cast<unsigned>(2 * bits + 1) / 17);
        CHECK(bytes_both <= 33'000'000u * static_cast<unsigned>(2 * bits + 1) / 17);

        // A cache of this width, without a store: the same pages, hence the same attention.
        wide_cache plain(shape, {.page_tokens = 64,
                                 .rollback = 0,
                                 .layers = std::vector<kvq::layer_format>(
                                     static_cast<std::size_t>(shape.layers), {format, format})});
        auto fresh = plain.new_sequence();
        append(fresh, 0, second_tokens);
        const auto fetched = store.fetch(second);
        CHECK(fetched.match == kvq::prefix_match::exact);
        CHECK(test::contents(cache, fetched.sequence) == test::contents(plain, fresh));
        CHECK(test::attention_bits(cache, fetched.sequence) == test::attention_bits(plain, fresh));
        const auto shorter = store.fetch(first);
        CHECK(shorter.match == kvq::prefix_match::supersequence);
        fresh.trim(first_tokens);
        CHECK(test::attention_bits(cache, shorter.sequence) == test::attention_bits(plain, fresh));
    }
}

}  // namespace prefix_cache_bytes_tests
