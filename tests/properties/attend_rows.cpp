// SPDX-License-Identifier: MIT
// Comparison family: error bounds; double arithmetic. Attention over keys and values in the memory of other
// systems (attention/attend_rows.hpp): blocks in any order, of any size, in every layout of heads, tokens and
// scales; what is refused.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/attention/attend_rows.hpp>
#include <kvq/attention/reference.hpp>
#include <kvq/core/thread_pool.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/token_rows.hpp>
#include <limits>
#include <numeric>
#include <utility>

#include "support/random.hpp"

namespace attend_rows_tests {

namespace {

/// One tensor in blocks of another system.
struct owner {
    kvq::row_layout layout;
    std::vector<std::byte> data, scales;
    std::vector<float> values;  ///< [token][head][channel], as the owner's bytes say
    kvq::rows_view view;

    /// order: 0 NHD, 1 HND, 2 NHD with K and V of a block side by side.
    owner(test::generator& random, const kvq::row_layout& l, int tokens, int heads, int dim, int order,
          const std::vector<std::int32_t>& table, int blocks, int block_tokens)
        : layout(l), values(static_cast<std::size_t>(tokens * heads * dim)) {
        const kvq::token_rows scheme(l);
        const int row = l.row_bytes(dim), behind = l.scales_behind(dim), parts = order == 2 ? 2 : 1;
        view.rows = kvq::make_format<kvq::simd<>>(scheme);
        view.token_stride = order == 1 ? row : row * heads;
        view.head_stride = order == 1 ? row * block_tokens : row;
        view.block_stride = std::ptrdiff_t{row} * heads * block_tokens * parts;
        // Scales: [block][group][head][token].
        view.scale_token_stride = 1;
        view.scale_head_stride = block_tokens;
        view.scale_group_stride = block_tokens * heads;
        view.scale_block_stride = std::ptrdiff_t{behind} * heads * block_tokens;
        data.assign(static_cast<std::size_t>(view.block_stride * blocks), std::byte{0xee});
        scales.assign(static_cast<std::size_t>(view.scale_block_stride * blocks) + 1, std::byte{0xff});
        view.data = data.data();
        if (behind > 0) view.scales = scales.data();
        const kvq::block_shape one{kvq::tensor::key, 1, dim};
        std::vector<std::byte> block(scheme.block_bytes(one));
        for (int t = 0; t < tokens; ++t)
            for (int h = 0; h < heads; ++h) {
                const auto x = random.normals(static_cast<std::size_t>(dim));
                scheme.quantize(one, {}, x.data(), block.data());
                scheme.dequantize(one, {}, block.data(),
                                  values.data() + (t * heads + h) * static_cast<std::ptrdiff_t>(dim));
                const std::ptrdiff_t b = table[static_cast<std::size_t>(t / block_tokens)],
                                     in = t % block_tokens;
                std::memcpy(
                    data.data() + b * view.block_stride + in * view.token_stride + h * view.head_stride,
                    block.data(), static_cast<std::size_t>(row));
                for (int g = 0; g < behind; ++g)
                    scales[static_cast<std::size_t>(
                        b * view.scale_block_stride + in + h * view.scale_head_stride +
                        g * view.scale_group_stride)] = block[static_cast<std::size_t>(row + g)];
            }
    }
};

double error_of(const std::vector<float>& got, const std::vector<double>& wanted) {
    double error = 0.0, power = 1e-30;
    for (std::size_t i = 0; i < got.size(); ++i) {
        error += std::pow(static_cast<double>(got[i]) - wanted[i], 2.0);
        power += wanted[i] * wanted[i];
    }
    return std::sqrt(error / power);
}

/// Of sums of floats; as codes (cpu/rows/row_codes.hpp), queries and weights have 16 bits, as with pages of
/// kvq's own codes, whose error on such numbers is this.
double bound(const kvq::row_layout& l) {
    return kvq::kernels::multiplies_codes<kvq::simd<>::lanes> && kvq::kernels::code_rows(l) ? 2e-4 : 1e-5;
}

}  // namespace

TEST_CASE("attention over the memory of other systems is that of double on its values") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    kvq::workspace memory;
    for (const kvq::row_layout& l : kvq::row_layouts)
        for (int round = 0; round < 4; ++round) {
            const int unit = l.channels > 0 ? l.channels : 24, dim = unit * random.between(1, 4),
                      value_dim = unit * random.between(1, 4), heads = random.between(1, 3),
                      group = random.between(1, 5), tokens = random.between(1, 300),
                      block_tokens = round == 0 ? 1 : random.between(1, 64),
                      used = (tokens + block_tokens - 1) / block_tokens, blocks = used + random.between(0, 5),
                      order = random.between(0, 2), queries = random.between(1, std::min(tokens, 20));
            INFO(l.name, ", ", tokens, " tokens in blocks of ", block_tokens, ", ", heads, " heads of ", dim,
                 " and ", value_dim, ", ", queries, " queries of ", group, ", order ", order);
            std::vector<std::int32_t> table(static_cast<std::size_t>(blocks));
            std::iota(table.begin(), table.end(), 0);
            for (int i = blocks - 1; i > 0; --i)
                std::swap(table[static_cast<std::size_t>(i)],
                          table[static_cast<std::size_t>(random.between(0, i))]);
            owner k(random, l, tokens, heads, dim, order, table, blocks, block_tokens),
                v(random, l, tokens, heads, value_dim, order, table, blocks, block_tokens);
            const auto q = random.normals(static_cast<std::size_t>(queries * heads * group * dim));
            std::vector<float> out(static_cast<std::size_t>(queries * heads * group * value_dim)),
                lse(static_cast<std::size_t>(queries * heads * group)), again(out);
            std::vector<double> wanted(out.size());
            const kvq::token_view<const float> of_q(q.data(), queries, heads * group, dim);
            kvq::reference_attend<kvq::causal>(
                kvq::token_view<const float>(k.values.data(), tokens, heads, dim),
                kvq::token_view<const float>(v.values.data(), tokens, heads, value_dim), of_q,
                kvq::token_view<double>(wanted.data(), queries, heads * group, value_dim));
            const kvq::row_blocks of_blocks{table.data(), used, block_tokens, blocks};
            const kvq::rows_shape shape{tokens, heads, dim, value_dim};
            kvq::attend_rows(
                k.view, v.view, of_blocks, shape, of_q,
                kvq::output_view(kvq::token_view<float>(out.data(), queries, heads * group, value_dim))
                    .with_lse(lse.data()),
                memory);
            CHECK(error_of(out, wanted) <= bound(l));
            kvq::thread_pool pool(2);
            kvq::attend_rows(k.view, v.view, of_blocks, shape, of_q,
                             kvq::token_view<float>(again.data(), queries, heads * group, value_dim), memory,
                             kvq::causal{}, pool);
            CHECK(again == out);
        }
}

TEST_CASE("rows in the memory of other systems: refusals, and masks") {
    test::generator random(test::seed());
    kvq::workspace memory;
    const kvq::row_layout& q8_0 = kvq::row_layout_named("q8_0");
    const std::vector<std::int32_t> table{2, 0, 1};
    owner k(random, q8_0, 40, 1, 32, 0, table, 3, 16), v(random, q8_0, 40, 1, 32, 0, table, 3, 16);
    const auto q = random.normals(32);
    std::vector<float> out(32);
    const auto attend = [&](const kvq::row_blocks& blocks, int tokens = 40,
                            const kvq::mods_view& mods = kvq::causal{}) {
        kvq::attend_rows(k.view, v.view, blocks, {tokens, 1, 32},
                         kvq::token_view<const float>(q.data(), 1, 1, 32),
                         kvq::token_view<float>(out.data(), 1, 1, 32), memory, mods);
    };
    const kvq::sliding_window window{40 - 18};
    attend({table.data(), 3, 16, 3}, 40, window);
    const auto of_window = out;
    attend({table.data(), 3, 16, 3});
    CHECK_THROWS_WITH_AS(attend({table.data(), 3, 16, 2}),
                         "kvq: block 0 of the table is 2, but the memory has 2 blocks",
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(attend({table.data(), 2, 16, 3}),
                         "kvq: 40 tokens need 3 blocks of 16, but the table has 2", std::invalid_argument);
    constexpr int any_size = (std::numeric_limits<int>::max)();
    CHECK_THROWS_WITH_AS(attend({table.data(), 3, any_size, 2}),
                         "kvq: block 0 of the table is 2, but the memory has 2 blocks",
                         std::invalid_argument);
    attend({table.data(), 1, any_size, 3}, 16);
    for (std::ptrdiff_t* const stride : {&k.view.token_stride, &k.view.block_stride}) {
        const std::ptrdiff_t before = std::exchange(*stride, 0);
        CHECK_THROWS_AS(attend({table.data(), 3, 16, 3}), std::invalid_argument);
        attend({table.data(), 3, 16, 3}, 1);
        *stride = before;
    }
    const auto bad = kvq::float16(std::numeric_limits<float>::quiet_NaN()).bits,
               infinite = static_cast<std::uint16_t>(0xfc00);
    for (const auto bits : {bad, infinite}) {
        // Of token 17, which lies in block 0.
        const auto before = kvq::detail::load_as<std::uint16_t>(v.data.data() + 34);
        kvq::detail::store_as(v.data.data() + 34, bits);
        CHECK_THROWS_WITH_AS(
            attend({table.data(), 3, 16, 3}),
            "kvq: values of tokens 0 to 39 of kv head 0 have a scale that is NaN or infinite",
            std::invalid_argument);
        attend({table.data(), 3, 16, 3}, 16);  // not among the first 16
        attend({table.data(), 3, 16, 3}, 40, window);
        CHECK(out == of_window);
        kvq::detail::store_as(v.data.data() + 34, before);
    }
    v.view.rows = kvq::make_format<kvq::simd<>>(kvq::token_rows(kvq::row_layout_named("mxfp8")));
    CHECK_THROWS_WITH_AS(attend({table.data(), 3, 16, 3}),
                         "kvq: values are mxfp8, whose scales lie beside the rows, but scales is null",
                         std::invalid_argument);
    v.view.scales = v.data.data();
    for (std::ptrdiff_t* const stride : {&v.view.scale_token_stride, &v.view.scale_block_stride}) {
        v.view.scale_token_stride = v.view.scale_block_stride = 1;
        *stride = 0;
        CHECK_THROWS_AS(attend({table.data(), 3, 16, 3}), std::invalid_argument);
    }
    v.view.scale_block_stride = 16;
    v.view.scale_token_stride = 1;
    v.view.rows = kvq::make_format<kvq::simd<>>(kvq::token_rows(q8_0));
    CHECK_THROWS_WITH_AS(attend({table.data(), 3, 16, 3}),
                         "kvq: values are q8_0, which has no scales beside the rows, but scales are given",
                         std::invalid_argument);
    v.view.scales = nullptr;
    v.view.rows = kvq::make_format<kvq::int8>();
    CHECK_THROWS_AS(attend({table.data(), 3, 16, 3}), std::invalid_argument);
}

TEST_CASE("rows in the memory of other systems: windows, caps, slopes and sinks are those of double") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    kvq::workspace memory;
    const int heads = 2, group = 3, dim = 64;
    for (const char* const name : {"fp8", "nvfp4", "q5_1"}) {
        const int tokens = random.between(130, 400), queries = random.between(1, 70), block_tokens = 48,
                  blocks = (tokens + block_tokens - 1) / block_tokens;
        INFO(name, ", ", tokens, " tokens, ", queries, " queries");
        std::vector<std::int32_t> table(static_cast<std::size_t>(blocks));
        std::iota(table.rbegin(), table.rend(), 0);
        const kvq::row_layout& l = kvq::row_layout_named(name);
        owner k(random, l, tokens, heads, dim, 0, table, blocks, block_tokens),
            v(random, l, tokens, heads, dim, 1, table, blocks, block_tokens);
        const auto q = random.normals(static_cast<std::size_t>(queries * heads * group * dim)),
                   slopes = random.normals(heads * group, 0.02f), logits = random.normals(heads * group);
        const kvq::token_view<const float> of_q(q.data(), queries, heads * group, dim);
        const auto check = [&](const auto& mods) {
            std::vector<float> out(q.size());
            std::vector<double> wanted(q.size());
            kvq::reference_attend(kvq::token_view<const float>(k.values.data(), tokens, heads, dim),
                                  kvq::token_view<const float>(v.values.data(), tokens, heads, dim), of_q,
                                  kvq::token_view<double>(wanted.data(), queries, heads * group, dim), mods);
            kvq::attend_rows(k.view, v.view, {table.data(), blocks, block_tokens, blocks},
                             {tokens, heads, dim}, of_q,
                             kvq::token_view<float>(out.data(), queries, heads * group, dim), memory, mods);
            CHECK(error_of(out, wanted) <= bound(l));
        };
        check(kvq::sliding_window{random.between(1, tokens)});
        check(kvq::cross_attention{});
        check(kvq::mods(kvq::sink_window{random.between(1, tokens), random.between(0, 5)}, kvq::softcap{2.0f},
                        kvq::alibi{slopes}, kvq::learned_sinks{logits}));
    }
}

TEST_CASE("rows in the memory of other systems: a long context is split, on any number of threads") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    kvq::workspace memory;
    const int heads = 2, group = 3, dim = 32, block_tokens = 64, tokens = 2048 * 2 + random.between(1, 2048),
              queries = random.between(1, 10), blocks = (tokens + block_tokens - 1) / block_tokens;
    INFO(tokens, " tokens, ", queries, " queries");
    std::vector<std::int32_t> table(static_cast<std::size_t>(blocks));
    std::iota(table.rbegin(), table.rend(), 0);
    const kvq::row_layout& l = kvq::row_layout_named("q8_0");
    owner k(random, l, tokens, heads, dim, 0, table, blocks, block_tokens),
        v(random, l, tokens, heads, dim, 0, table, blocks, block_tokens);
    auto q = random.normals(static_cast<std::size_t>(queries * heads * group * dim));
    const kvq::token_view<const float> of_q(q.data(), queries, heads * group, dim);
    const auto attend = [&](const auto& mods, kvq::executor_view threads) {
        std::vector<float> out(q.size());
        kvq::attend_rows(k.view, v.view, {table.data(), blocks, block_tokens, blocks}, {tokens, heads, dim},
                         of_q, kvq::token_view<float>(out.data(), queries, heads * group, dim), memory, mods,
                         threads);
        return out;
    };
    const auto check = [&](const auto& mods) {
        std::vector<double> wanted(q.size());
        kvq::reference_attend(kvq::token_view<const float>(k.values.data(), tokens, heads, dim),
                              kvq::token_view<const float>(v.values.data(), tokens, heads, dim), of_q,
                              kvq::token_view<double>(wanted.data(), queries, heads * group, dim), mods);
        const auto out = attend(mods, kvq::serial_executor{});
        CHECK(error_of(out, wanted) <= bound(l));
        kvq::thread_pool pool(3);
        CHECK(attend(mods, pool) == out);
    };
    check(kvq::causal{});
    check(kvq::sliding_window{random.between(1, 300)});  // splits without a token that is seen
    const auto logits = random.normals(heads * group);
    check(kvq::mods(kvq::causal{}, kvq::learned_sinks{logits}));
    q[0] = std::numeric_limits<float>::quiet_NaN();
    const auto out = attend(kvq::causal{}, kvq::serial_executor{});
    CHECK(std::isnan(out[0]));
    CHECK(!std::isnan(out[static_cast<std::size_t>(dim)]));
}

}  // namespace attend_rows_tests
