// Estimates equal allocations: every footprint is compared with what a counting memory resource saw.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/kvq.hpp>
#include <random>
#include <vector>

#include "support/memory.hpp"
#include "support/typed_cache.hpp"

namespace footprint_tests {

namespace {

template <class Cache>
void append_random(typename Cache::sequence_type& seq, const kvq::cache_shape& shape, int tokens,
                   std::mt19937& random) {
    const int value_dim = shape.dim(kvq::tensor::value);
    std::normal_distribution<float> normal;
    std::vector<float> k(static_cast<std::size_t>(tokens * shape.kv_heads * shape.head_dim));
    std::vector<float> v(static_cast<std::size_t>(tokens * shape.kv_heads * value_dim));
    for (float& x : k) x = normal(random);
    for (float& x : v) x = normal(random);
    for (int layer = 0; layer < shape.layers; ++layer)
        seq.append(layer, kvq::token_view<const float>(k.data(), tokens, shape.kv_heads, shape.head_dim),
                   kvq::token_view<const float>(v.data(), tokens, shape.kv_heads, value_dim));
}

}  // namespace

TEST_CASE_TEMPLATE("footprint equals what the cache allocates, byte for byte", Formats, kvq::kivi<4>,
                   kvq::int8, kvq::full<kvq::float16>, kvq::affine<3, kvq::per_token<32>>) {
    using cache_type = test::typed_cache<Formats, Formats>;
    const unsigned seed = 20260;
    INFO("seed ", seed);
    std::mt19937 random(seed);
    const auto between = [&](int a, int b) { return std::uniform_int_distribution<int>(a, b)(random); };
    for (int round = 0; round < 25; ++round) {
        const kvq::cache_shape shape{between(1, 3), between(1, 3), between(1, 70),
                                     between(0, 1) ? 0 : between(1, 70)};
        test::counting_resource memory;
        kvq::cache_options options;
        options.sinks = between(0, 5);
        options.recent = between(0, 40);
        options.page_tokens = between(0, 1) ? 32 : between(1, 50);
        options.rollback = between(0, 1) ? 16 : between(0, 90);
        options.memory = &memory;
        CAPTURE(round);
        CAPTURE(shape.head_dim);
        CAPTURE(options.page_tokens);
        cache_type cache(shape, options);
        auto seq = cache.new_sequence();
        REQUIRE(kvq::footprint(cache, 0).total == memory.bytes());
        for (int step = 0; step < 12; ++step) {
            const int tokens = between(0, step % 3 == 0 ? 120 : 6);
            const std::size_t before = memory.bytes();
            memory.reset_peak();
            append_random<cache_type>(seq, shape, tokens, random);
            const kvq::footprint_report f = kvq::footprint(cache, seq.tokens());
            CAPTURE(seq.tokens());
            REQUIRE(f.total == memory.bytes());
            const kvq::usage_report u = seq.usage();
            REQUIRE(u.bytes == f.total);
            REQUIRE(u.quantized == f.quantized);
            REQUIRE(u.window == f.window);
            REQUIRE(u.rollback == f.rollback);
            REQUIRE(cache.pool().bytes_in_use() <= memory.bytes());
            // Staging lists are a few pointers per new page, and outlive the call by nothing.
            const std::size_t staging = 64 * (static_cast<std::size_t>(tokens) + 8);
            REQUIRE(memory.peak() <= std::max(before, f.total) + f.transient + staging);
        }
        auto other = seq.fork();
        REQUIRE(other.usage().bytes == seq.usage().bytes);
    }
}

TEST_CASE("footprint includes the attention workspace that attend really takes") {
    test::counting_resource memory;
    kvq::cache_options options;
    options.memory = &memory;
    test::typed_cache<kvq::kivi<4, 64>, kvq::kivi<4, 64>> cache({1, 2, 64}, options);
    auto seq = cache.new_sequence();
    std::mt19937 random(3);
    append_random<decltype(cache)>(seq, cache.shape(), 5000, random);
    std::vector<float> q(8 * 64, 1.0f), out(8 * 64);
    kvq::workspace space(&memory);
    const std::size_t before = memory.bytes();
    seq.attend(0, kvq::token_view<const float>(q.data(), 1, 8, 64),
               kvq::token_view<float>(out.data(), 1, 8, 64), kvq::causal{}, kvq::serial_executor{}, space);
    CHECK(memory.bytes() - before == kvq::footprint(cache, 5000, 1, {.q_heads = 8}).attention);
    CHECK(space.size() == memory.bytes() - before);
}

TEST_CASE("published check: 28 layers, 8 kv heads, D 128, 500 blocks of 256 tokens") {
    const kvq::cache_shape shape{28, 8, 128};
    constexpr double mebi = 1024.0 * 1024.0;
    const double tokens = 500.0 * 256.0;
    const kvq::format fp16 = test::made<test::usual>(kvq::full<kvq::float16>{}),
                      int8 = test::made<test::usual>(kvq::int8{});
    CHECK(kvq::bytes_per_token(shape, 256, fp16, fp16) * tokens / mebi == 14000.0);
    CHECK(kvq::bytes_per_token(shape, 256, int8, int8) * tokens / mebi == 7218.75);

    const kvq::cache_options options{.page_tokens = 256, .rollback = 0};
    CHECK(static_cast<double>(
              kvq::footprint(test::typed_cache<kvq::int8>(shape, options), 500 * 256).quantized) /
              mebi ==
          7218.75);
    CHECK(static_cast<double>(
              kvq::footprint(test::typed_cache<kvq::full<kvq::float16>>(shape, options), 500 * 256).window) /
              mebi ==
          14000.0);
}

TEST_CASE("bytes per 128-vector are the published ones, at compile time") {
    constexpr kvq::block_shape keys{kvq::tensor::key, 64, 128}, values{kvq::tensor::value, 64, 128};
    static_assert(kvq::bits_per_value<kvq::int8>(keys) * 16 == 132);
    static_assert(kvq::bits_per_value<kvq::int8>(values) * 16 == 132);
    static_assert(kvq::bits_per_value<kvq::affine<4>>(keys) * 16 == 72);
    static_assert(kvq::bits_per_value<kvq::affine<8>>(values) * 16 == 136);
    static_assert(kvq::bits_per_value<kvq::kivi<2, 32>::keys>(keys) * 16 == 48);
    static_assert(kvq::bits_per_value<kvq::kivi<2, 32>::values>(values) * 16 == 48);
    static_assert(kvq::bits_per_value<kvq::affine<3>>(keys) == 3.5);
    CHECK(kvq::bytes_per_token({32, 8, 128}, 64, test::made<test::usual>(kvq::kivi<4, 64>::keys{}),
                               test::made<test::usual>(kvq::kivi<4, 64>::values{})) == 32 * 8 * 144);
}

TEST_CASE("the longest context fits, one token more does not") {
    test::typed_cache<kvq::kivi<4>, kvq::kivi<4>> cache({2, 2, 64},
                                                        {.sinks = 4, .recent = 32, .page_tokens = 32});
    for (const std::size_t budget : {std::size_t{100000}, std::size_t{1000000}, std::size_t{12345678}}) {
        const int n = kvq::longest_context(cache, budget);
        CAPTURE(budget);
        REQUIRE(n > 0);
        std::size_t most = 0;
        for (int m = 1; m <= n + 1; ++m) {
            const auto f = kvq::footprint(cache, m);
            if (m <= n) most = std::max(most, f.total + f.transient);
            if (m == n + 1) CHECK(f.total + f.transient > budget);
        }
        CHECK(most <= budget);
    }
    CHECK(kvq::longest_context(cache, 10) == -1);
}

}  // namespace footprint_tests
