// SPDX-License-Identifier: MIT
// Comparison family: exact. The bytes of pages, pinned: what users store and send must not change unnoticed.
//
// A change that is meant: run with KVQ_PRINT_GOLDEN=1, paste the printed table, say so in CHANGELOG.md and
// docs/reference/format.md.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <kvq/kvq.hpp>
#include <kvq/schemes/affine.hpp>
#include <string>
#include <vector>

#include "support/golden.hpp"
#include "support/random.hpp"
#include "support/typed_cache.hpp"

namespace page_bytes_tests {

namespace {

using test::block_of;
using test::hex;

// clang-format off
const std::vector<test::golden> table = {
#include "page_bytes.inc"
};
// clang-format on

#define KVQ_GOLDEN_SCHEMES                                                                                 \
    kvq::full<kvq::float16>, kvq::full<kvq::bfloat16>, kvq::full<float>, kvq::int8,                        \
        kvq::float_rows<kvq::e4m3>, kvq::affine<1>, kvq::affine<2>, kvq::affine<3>, kvq::affine<4>,        \
        kvq::affine<5>, kvq::affine<6>, kvq::affine<7>, kvq::affine<8>, kvq::affine<4, kvq::per_token<0>>, \
        kvq::affine<4, kvq::per_token<32>>, kvq::affine<3, kvq::per_token<5>>,                             \
        kvq::affine<4, kvq::per_token<32>, kvq::params<kvq::bfloat16>>,                                    \
        kvq::affine<4, kvq::per_token<32>, kvq::params<float>>, kvq::affine<1, kvq::per_channel<0>>,       \
        kvq::kivi<2>::keys, kvq::affine<3, kvq::per_channel<7>>, kvq::kivi<4>::keys,                       \
        kvq::affine<5, kvq::per_channel<32>>, kvq::affine<6, kvq::per_channel<64>>,                        \
        kvq::affine<8, kvq::per_channel<32>>,                                                              \
        kvq::scheme<kvq::bits<4>, kvq::symmetric, kvq::per_channel<32>>

}  // namespace

TEST_CASE_TEMPLATE("bytes of a block", S, KVQ_GOLDEN_SCHEMES) {
    const S scheme;
    for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
        const char letter = role == kvq::tensor::key ? 'K' : 'V';
        const auto block =
            block_of(scheme, {role, test::golden_tokens, test::golden_dim}, test::golden_input());
        if (std::getenv("KVQ_PRINT_GOLDEN")) {
            std::printf("    {\"%s\", '%c', %zu, 0x%016llxu, \"%s\"},\n", scheme.name().c_str(), letter,
                        block.size(), static_cast<unsigned long long>(test::fnv1a(block)),
                        hex(block, 16).c_str());
            continue;
        }
        INFO(scheme.name(), " ", letter);
        bool found = false;
        for (const test::golden& g : table) {
            if (g.name != scheme.name() || g.role != letter) continue;
            found = true;
            CHECK(block.size() == g.bytes);
            CHECK(hex(block, 16) == g.first);
            CHECK(test::fnv1a(block) == g.hash);
        }
        CHECK(found);
    }
}

// What engines store of an index (DeepSeek V3.2): codes of all tokens of a page, [tokens][128], then their
// scales.
TEST_CASE("e4m3 pages have the bytes of index caches of 132 bytes a token") {
    constexpr int tokens = 64, dim = 128;
    test::generator random(test::seed());
    INFO("KVQ_SEED=", test::seed());
    std::vector<float> x = random.normals(tokens * dim, 3.0f);
    for (int c = 0; c < dim; ++c) x[static_cast<std::size_t>(5 * dim + c)] *= 1e-3f;
    const auto block = block_of(kvq::float_rows<kvq::e4m3>{}, {kvq::tensor::key, tokens, dim}, x);
    REQUIRE(block.size() == tokens * 132);
    for (int t = 0; t < tokens; ++t) {
        const float* const token = x.data() + t * dim;
        float largest = 0.0f;
        for (int c = 0; c < dim; ++c) largest = std::fmax(largest, std::fabs(token[c]));
        const float scale = largest / 448.0f;
        float stored;
        std::memcpy(&stored, block.data() + tokens * dim + 4 * t, 4);
        CHECK(stored == scale);
        int wrong = 0;
        for (int c = 0; c < dim; ++c) {
            // Values of e4m3 by its definition: 8 of them from one power of two to the next.
            int nearest = 0;
            double distance = HUGE_VAL;
            for (int code = 0; code < 127; ++code) {
                const double value =
                                 code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10),
                             d = std::fabs(value - static_cast<double>(std::fabs(token[c] / scale)));
                if (d < distance || (d == distance && code % 2 == 0)) nearest = code, distance = d;
            }
            wrong += static_cast<int>(block[static_cast<std::size_t>(t * dim + c)]) !=
                     (nearest | (std::signbit(token[c]) ? 128 : 0));
        }
        CHECK(wrong == 0);
    }
}

// The worked example of docs/reference/format.md: 4 tokens of 8 channels, 4 bits per token. Every token holds
// its codes plus its number, from 0 to 15 each, so that scales are 1 and biases are the tokens' numbers.
TEST_CASE("the worked example of docs/reference/format.md") {
    const int codes[4][8] = {{0, 1, 2, 3, 4, 5, 6, 15},
                             {15, 7, 0, 8, 9, 1, 2, 3},
                             {0, 15, 1, 14, 2, 13, 3, 12},
                             {10, 11, 12, 13, 14, 15, 0, 1}};
    std::vector<float> x;
    for (int t = 0; t < 4; ++t)
        for (const int code : codes[t]) x.push_back(static_cast<float>(code + t));
    const kvq::affine<4, kvq::per_token<0>> scheme;

    CHECK(hex(block_of(scheme, {kvq::tensor::key, 4, 8}, x), 99) ==
          "405162f3"                            // token 0: channels 0|4, 1|5, 2|6, 3|7
          "9f172038"                            // token 1
          "20df31ce"                            // token 2
          "eafb0c1d"                            // token 3
          "003c003c003c003c0000000000000000"    // scales 1, 1, 1, 1 and padding
          "0000003c004000420000000000000000");  // biases 0, 1, 2, 3 and padding
    CHECK(hex(block_of(scheme, {kvq::tensor::value, 4, 8}, x), 99) ==
          "000f000a"  // channel 0: tokens 0, 1, 2, 3
          "01070f0b"
          "0200010c"
          "03080e0d"
          "0409020e"
          "05010d0f"
          "06020300"
          "0f030c01"  // channel 7
          "003c003c003c003c0000000000000000"
          "0000003c004000420000000000000000");

    // Codes of 3 bits: a plane of 2 bits, then a plane of 1 bit.
    for (float& v : x) v = 0.0f;
    const int small[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int t = 0; t < 4; ++t)
        for (int c = 0; c < 8; ++c) x[static_cast<std::size_t>(t * 8 + c)] = static_cast<float>(small[c]);
    CHECK(hex(block_of(kvq::affine<3, kvq::per_token<0>>{}, {kvq::tensor::key, 4, 8}, x), 32) ==
          "00050a0f00050a0f00050a0f00050a0f"    // low two bits of channels 0|4, 1|5, 2|6, 3|7
          "02020202020202020202020202020202");  // high bit: 0 in channels 0..3, 1 in 4..7

    // 16-bit values: two columns per word.
    CHECK(hex(block_of(kvq::full<kvq::float16>{}, {kvq::tensor::key, 4, 4},
                       {0, 1, 2, 3, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3}),
              99) ==
          "0000003c003c003c0040004000420042"    // channels 0 and 1 of tokens 0, 1, 2, 3
          "00400042003c003c0040004000420042");  // channels 2 and 3
}

TEST_CASE("a page is its heads' blocks, one after the other") {
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 3, .head_dim = 20, .value_dim = 12};
    test::typed_cache<kvq::kivi<4>, kvq::kivi<4>, kvq::scalar> cache(shape,
                                                                     {.page_tokens = 32, .rollback = 0});
    std::vector<float> k(32 * 3 * 20), v(32 * 3 * 12);
    for (std::size_t i = 0; i < k.size(); ++i)
        k[i] = static_cast<float>(static_cast<int>(i * 7 % 61) - 30) / 8.0f;
    for (std::size_t i = 0; i < v.size(); ++i)
        v[i] = static_cast<float>(static_cast<int>(i * 11 % 53) - 26) / 8.0f;
    auto sequence = cache.new_sequence();
    sequence.append(0, kvq::token_view<const float>(k.data(), 32, 3, 20),
                    kvq::token_view<const float>(v.data(), 32, 3, 12));
    const auto entry = sequence.pages(0).at(0);
    const auto check = [](const kvq::page& p, const auto& scheme, kvq::tensor role, int channels,
                          const std::vector<float>& all) {
        REQUIRE(p.format == 1);
        std::vector<std::byte> expected;
        for (int h = 0; h < 3; ++h) {
            std::vector<float> one;
            for (int t = 0; t < 32; ++t)
                for (int c = 0; c < channels; ++c)
                    one.push_back(all[static_cast<std::size_t>((t * 3 + h) * channels + c)]);
            const auto block = block_of(scheme, {role, 32, channels}, one);
            expected.insert(expected.end(), block.begin(), block.end());
        }
        CHECK(std::vector<std::byte>(p.data(), p.data() + p.bytes) == expected);
    };
    check(*entry.keys, kvq::kivi<4>::keys{}, kvq::tensor::key, 20, k);
    check(*entry.values, kvq::kivi<4>::values{}, kvq::tensor::value, 12, v);
}

}  // namespace page_bytes_tests
