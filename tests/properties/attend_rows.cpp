// SPDX-License-Identifier: MIT
// Comparison family: error bounds; double arithmetic. Attention over keys and values in the memory of other
// systems (attention/attend_rows.hpp): blocks in any order, of any size, in every layout of heads, tokens and
// scales; what is refused.
#include <doctest/doctest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <kvq/attention/attend_rows.hpp>
#include <kvq/attention/copy_rows.hpp>
#include <kvq/attention/reference.hpp>
#include <kvq/core/thread_pool.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/head_rows.hpp>
#include <kvq/schemes/rotated_records.hpp>
#include <limits>
#include <numeric>
#include <utility>

#include "support/random.hpp"

namespace attend_rows_tests {

namespace {

/// One tensor in blocks of another system.
struct owner {
    kvq::row_layout layout;
    int tokens, heads, dim;
    std::vector<std::byte> data, scales;
    std::vector<float> values;   ///< [token][head][channel], as the owner's bytes say
    std::vector<float> factors;  ///< [token][head][group]: scales, magnitudes of them
    kvq::rows_view view;

    void clear() {
        std::fill(data.begin(), data.end(), std::byte{0xee});
        std::fill(scales.begin(), scales.end(), std::byte{0xff});
    }
    bool same_bytes(const owner& o) const { return data == o.data && scales == o.scales; }
    int groups() const { return dim / layout.group_of(dim); }
    const float* at(int token, int head) const {
        return values.data() + (token * heads + head) * static_cast<std::ptrdiff_t>(dim);
    }
    float scale(int token, int head, int group) const {
        return factors[static_cast<std::size_t>((token * heads + head) * groups() + group)];
    }

    /// order: 0 NHD, 1 HND, 2 NHD with K and V of a block side by side.
    owner(test::generator& random, const kvq::row_layout& l, int all_tokens, int all_heads, int channels,
          int order, const std::vector<std::int32_t>& table, int blocks, int block_tokens)
        : layout(l),
          tokens(all_tokens),
          heads(all_heads),
          dim(channels),
          values(static_cast<std::size_t>(tokens * heads * dim)) {
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
                for (int g = 0; g < groups(); ++g) factors.push_back(factor(block.data(), g));
                for (int g = 0; g < behind; ++g)
                    scales[static_cast<std::size_t>(
                        b * view.scale_block_stride + in + h * view.scale_head_stride +
                        g * view.scale_group_stride)] = block[static_cast<std::size_t>(row + g)];
            }
    }

private:
    float factor(const std::byte* row, int group) const {
        using stored = kvq::row_layout::stored;
        const auto* const beside = reinterpret_cast<const std::uint8_t*>(row + layout.row_bytes(dim) + group);
        return layout.scale == stored::none   ? 1.0f
               : layout.scale == stored::e8m0 ? kvq::e8m0::to_float(*beside)
               : layout.scale == stored::e4m3
                   ? kvq::e4m3::to_float(*beside)
                   : std::abs(kvq::float16::to_float(kvq::detail::load_as<std::uint16_t>(
                         row + group * layout.group_bytes(layout.channels))));
    }
};

/// The largest magnitude of a number that is multiplied as a code, and 0 for sums of floats.
double largest_code(const kvq::row_layout& l) {
    using number = kvq::row_layout::number;
    if (!kvq::kernels::multiplies_codes<kvq::simd<>::lanes> || !kvq::kernels::code_rows(l)) return 0.0;
    return l.numbers == number::e2m1        ? 6.0
           : l.numbers == number::centred4  ? 8.0
           : l.numbers == number::unsigned4 ? 15.0
                                            : 127.0;
}

struct distance {
    double error = 0.0, allowed = 0.0;
};

/// Of outputs to those of double, in squares: sums of floats, and what 16 bits of queries and of weights lose
/// by the formula of attention/attend_rows.hpp.
distance measure(const owner& k, const owner& v, const kvq::token_view<const float>& q,
                 const std::vector<float>& got, const std::vector<double>& wanted,
                 const kvq::mods_view& mods = kvq::causal{}) {
    const double code = largest_code(v.layout), key_code = largest_code(k.layout);
    const int group = q.heads / k.heads, dim = v.dim, groups = v.groups();
    double square = 1e-30, error = 0.0, codes = 0.0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        error += std::pow(static_cast<double>(got[i]) - wanted[i], 2.0);
        square += wanted[i] * wanted[i];
    }
    std::vector<float> scores(static_cast<std::size_t>(k.tokens));
    std::vector<double> key_squares(scores.size()), weights(scores.size());
    for (int row = 0; row < q.tokens * q.heads && code + key_code > 0.0; ++row) {
        const int h = row % q.heads, head = h / group,
                  position = (mods.has_query_positions() ? k.tokens - q.tokens : 0) + row / q.heads;
        const float* const x = q.at(row / q.heads, h);
        const float most = std::abs(
            *std::max_element(x, x + q.dim, [](float a, float b) { return std::abs(a) < std::abs(b); }));
        for (int t = 0; t < k.tokens; ++t) {
            double sum = 0.0, squares = 0.0;
            for (int c = 0; c < q.dim; ++c) {
                const double of = static_cast<double>(k.at(t, head)[c]);
                sum += static_cast<double>(x[c]) * of;
                squares += of * of;
            }
            scores[static_cast<std::size_t>(t)] = static_cast<float>(sum) * mods.scale(q.dim);
            key_squares[static_cast<std::size_t>(t)] = squares;
        }
        if (mods.changes_scores()) mods.change_scores(scores.data(), k.tokens, h, position, 0, 1.0f);
        mods.hide(scores.data(), k.tokens, position, 0);
        const auto top = static_cast<double>(*std::max_element(scores.begin(), scores.end()));
        double sum = mods.has_sink() ? std::exp(static_cast<double>(mods.sink_logit(h)) - top) : 0.0;
        for (std::size_t t = 0; t < scores.size(); ++t)
            sum += weights[t] = std::exp(static_cast<double>(scores[t]) - top);
        const double query_step =
            key_code > 0.0 ? static_cast<double>(most * mods.scale(q.dim)) / 32512.0 : 0.0;
        for (int t = 0; t < k.tokens; ++t) {
            double spread = 0.0;
            for (int c = 0; c < dim; ++c)
                spread += std::pow(
                    static_cast<double>(v.at(t, head)[c]) - wanted[static_cast<std::size_t>(row * dim + c)],
                    2.0);
            const auto at = static_cast<std::size_t>(t);
            codes += std::pow(weights[at] / sum * query_step, 2.0) / 12.0 * key_squares[at] * spread;
        }
        for (int from = 0; from < k.tokens && code > 0.0; from += 128)
            for (int g = 0; g < groups; ++g) {
                const int end = std::min(from + 128, k.tokens);
                double largest = 0.0;
                for (int t = from; t < end; ++t)
                    largest = std::max(largest, weights[static_cast<std::size_t>(t)] / sum *
                                                    static_cast<double>(v.scale(t, head, g)));
                codes += dim / groups * (end - from) / 12.0 * std::pow(largest * code / 32512.0, 2.0);
            }
    }
    return {std::sqrt(error), 1e-5 * std::sqrt(square) + std::sqrt(codes)};
}

}  // namespace

TEST_CASE("attention over the memory of other systems is that of double on its values") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    kvq::workspace memory;
    for (const kvq::row_layout& l : kvq::row_layouts)
        for (int round = 0; round < 4; ++round) {
            const int unit = l.channels > 0 ? l.channels : 24 + round % 2 * 40,
                      dim = unit * random.between(1, 4), value_dim = unit * random.between(1, 4),
                      heads = random.between(1, 3), group = random.between(1, 5),
                      tokens = random.between(1, 300), block_tokens = round == 0 ? 1 : random.between(1, 64),
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
            const distance d = measure(k, v, of_q, out, wanted);
            CHECK(d.error <= d.allowed);
            kvq::thread_pool pool(2);
            kvq::attend_rows(k.view, v.view, of_blocks, shape, of_q,
                             kvq::token_view<float>(again.data(), queries, heads * group, value_dim), memory,
                             kvq::causal{}, pool);
            CHECK(again == out);
        }
}

TEST_CASE(
    "rows that are multiplied as codes: an output moves by at most A / 508 where all weights round down") {
    const kvq::row_layout& l = kvq::row_layout_named("q8_0");
    constexpr int tokens = 128, dim = 32, row = 34;
    std::vector<std::byte> k(tokens * row), v(tokens * row);
    const auto write = [&](std::byte* to, float scale, int code) {
        kvq::detail::store_as(to, kvq::float16(scale).bits);
        std::memset(to + 2, code, dim);
    };
    // The first token has weight 1, the others 1.49 of the 32512 steps that it has; values are 127.
    const float difference = std::log(1.49f / 32512.0f);
    for (int t = 0; t < tokens; ++t) {
        write(k.data() + t * row, 1.0f, t == 0 ? 0 : 1);
        write(v.data() + t * row, 1.0f, 127);
    }
    const std::vector<float> q(dim, difference / dim * std::sqrt(static_cast<float>(dim)));
    std::vector<float> out(dim);
    kvq::workspace memory;
    kvq::rows_view keys{
        .rows = kvq::make_format<kvq::simd<>>(kvq::token_rows(l)), .data = k.data(), .token_stride = row},
        values = keys;
    values.data = v.data();
    kvq::attend_rows(keys, values, {}, {tokens, 1, dim}, kvq::query_view(q.data(), 1, 1, dim),
                     kvq::output_view(out.data(), 1, 1, dim), memory);
    const double most = 127.0 / 508.0;
    for (const float o : out) {
        const double error = 127.0 - static_cast<double>(o);
        CHECK(error <= (largest_code(l) > 0.0 ? most : 1e-5 * 127.0));
        if (largest_code(l) > 0.0) CHECK(error >= 0.9 * most);
    }
}

/// Of records: rows, then scales and biases of a block, as the owner has them: padded pages of mla-584,
/// scales of a group as many bytes apart as they have, of four tokens in turns.
struct records {
    std::vector<std::byte> data, beside, biases;
    std::vector<float> values;
    kvq::rows_view view;

    void clear() {
        std::fill(data.begin(), data.end(), std::byte{0xee});
        for (auto* const of : {&beside, &biases}) std::fill(of->begin(), of->end(), std::byte{0xff});
    }
    bool same_bytes(const records& o) const {
        return data == o.data && beside == o.beside && biases == o.biases;
    }

    /// heads_first: [block][head][token], else [block][token][head]. Scales of inline records lie in the
    /// rows.
    template <class Scheme>
    records(test::generator& random, const Scheme& scheme, int tokens, int heads, int dim, bool heads_first,
            const std::vector<std::int32_t>& table, int blocks, int block_tokens)
        : values(static_cast<std::size_t>(tokens * heads * dim)) {
        const kvq::record_layout& l = scheme.layout();
        const int row = l.row_bytes(dim), behind = l.bytes_behind(dim), size = l.scale_bytes();
        view.rows = kvq::make_format<kvq::simd<>>(scheme);
        view.token_stride = heads_first ? row : row * heads;
        view.head_stride = heads_first ? row * block_tokens : row;
        view.block_stride = std::ptrdiff_t{row} * heads * block_tokens;
        if (l.page_multiple > 16) {  // scales follow the rows of a page, which is padded
            view.block_stride = kvq::detail::round_up((row + behind) * block_tokens * heads, l.page_multiple);
            view.scale_token_stride = heads_first ? behind : behind * heads;
            view.scale_head_stride = heads_first ? behind * block_tokens : behind;
            view.scale_block_stride = view.block_stride;
        } else if (behind > 0) {
            view.scale_token_stride = heads_first ? behind : behind * heads;
            view.scale_head_stride = heads_first ? behind * block_tokens : behind;
            view.scale_block_stride = std::ptrdiff_t{behind} * heads * block_tokens;
        }
        data.assign(static_cast<std::size_t>(view.block_stride * blocks), std::byte{0xee});
        beside.assign(static_cast<std::size_t>(view.scale_block_stride * blocks) + 1, std::byte{0xff});
        biases = beside;
        view.data = data.data();
        std::byte* scales = beside.data();
        if (l.page_multiple > 16) scales = data.data() + row * block_tokens * heads;
        if (behind > 0) view.scales = scales;
        if (l.biased()) view.biases = biases.data();
        const kvq::block_shape one{kvq::tensor::key, 1, dim};
        std::vector<std::byte> block(scheme.block_bytes(one));
        for (int t = 0; t < tokens; ++t)
            for (int h = 0; h < heads; ++h) {
                auto x = random.normals(static_cast<std::size_t>(dim));
                scheme.quantize(one, {}, x.data(), block.data());
                scheme.dequantize(one, {}, block.data(),
                                  values.data() + (t * heads + h) * static_cast<std::ptrdiff_t>(dim));
                const std::ptrdiff_t b = table[static_cast<std::size_t>(t / block_tokens)],
                                     in = t % block_tokens, turns = l.in_turns ? 4 : 1,
                                     scale = b * view.scale_block_stride + h * view.scale_head_stride +
                                             in / turns * turns * view.scale_token_stride + in % turns;
                std::memcpy(
                    data.data() + b * view.block_stride + in * view.token_stride + h * view.head_stride,
                    block.data(), static_cast<std::size_t>(row));
                for (int g = 0; g < behind / size; ++g) {
                    std::memcpy(scales + scale + g * turns * size, block.data() + row + g * size,
                                static_cast<std::size_t>(size));
                    if (l.biased())
                        std::memcpy(biases.data() + scale + g * size, block.data() + row + behind + g * size,
                                    static_cast<std::size_t>(size));
                }
            }
    }
};

TEST_CASE("records in the memory of other systems: attention is that of double on their values") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    kvq::workspace memory;
    const auto check = [&](const auto& scheme) {
        const kvq::record_layout& l = scheme.layout();
        for (int round = 0; round < 3; ++round) {
            const bool latent = l.head_dim > 128;
            const int dim = l.head_dim > 0 ? l.head_dim : 64 * random.between(1, 2),
                      value_dim = latent ? 512 : dim, heads = latent ? 1 : random.between(1, 3),
                      group = random.between(1, latent ? 16 : 3), tokens = random.between(1, 300),
                      block_tokens = l.in_turns   ? 4 * random.between(1, 16)
                                     : round == 0 ? 1
                                     : round == 1 ? 256
                                                  : random.between(2, 100),
                      used = (tokens + block_tokens - 1) / block_tokens, blocks = used + random.between(0, 3),
                      queries = random.between(1, std::min(tokens, 3));
            // Scales in turns belong to a head.
            const bool heads_first = l.in_turns || random.one_in(2);
            INFO(l.name, ", ", tokens, " tokens in blocks of ", block_tokens, ", ", heads, " heads of ", dim,
                 ", ", queries, " queries of ", group, heads_first ? ", heads first" : "");
            std::vector<std::int32_t> table(static_cast<std::size_t>(blocks));
            std::iota(table.begin(), table.end(), 0);
            for (int i = blocks - 1; i > 0; --i)
                std::swap(table[static_cast<std::size_t>(i)],
                          table[static_cast<std::size_t>(random.between(0, i))]);
            records k(random, scheme, tokens, heads, dim, heads_first, table, blocks, block_tokens);
            records v(random, scheme, tokens, heads, dim, heads_first, table, blocks, block_tokens);
            const records& of_values = latent ? k : v;
            // The same rows, with strides that are 0 in the other view, or of which there are none.
            kvq::rows_view view_of_values = of_values.view;
            if (latent) {
                view_of_values.head_stride = 7;
                if (view_of_values.scales) view_of_values.scale_group_stride = l.scale_bytes();
            }
            const auto q = random.normals(static_cast<std::size_t>(queries * heads * group * dim));
            const kvq::token_view<const float> of_q(q.data(), queries, heads * group, dim);
            std::vector<float> out(static_cast<std::size_t>(queries * heads * group * value_dim)),
                again(out.size());
            std::vector<double> wanted(out.size());
            kvq::reference_attend<kvq::causal>(
                kvq::token_view<const float>(k.values.data(), tokens, heads, dim),
                kvq::token_view<const float>(of_values.values.data(), tokens, heads, value_dim, dim * heads,
                                             dim),
                of_q, kvq::token_view<double>(wanted.data(), queries, heads * group, value_dim));
            const auto attend = [&](std::vector<float>& to, kvq::executor_view threads) {
                kvq::attend_rows(k.view, view_of_values, {table.data(), used, block_tokens, blocks},
                                 {tokens, heads, dim, value_dim}, of_q,
                                 kvq::token_view<float>(to.data(), queries, heads * group, value_dim), memory,
                                 kvq::causal{}, threads);
            };
            attend(out, kvq::serial_executor{});
            double error = 0.0, square = 1e-30;
            for (std::size_t i = 0; i < out.size(); ++i) {
                error += std::pow(static_cast<double>(out[i]) - wanted[i], 2.0);
                square += wanted[i] * wanted[i];
            }
            CHECK(std::sqrt(error) <= 1e-5 * std::sqrt(square));
            kvq::thread_pool pool(2);
            attend(again, pool);
            CHECK(again == out);
        }
    };
    for (const kvq::record_layout& l : kvq::record_layouts) check(kvq::token_records(l));
    check(kvq::rotated_records(kvq::int4_token_head));
}

/// make(i): memory i of two, which hold the same tokens in blocks[i]. Rows are read, written anew and moved
/// to the other one. x: what they were quantized from, [tokens][heads][dim].
template <class Make>
void check_copies(const Make& make, const kvq::row_blocks (&blocks)[2], const std::vector<float>& x,
                  const kvq::rows_shape& shape, test::generator& random) {
    kvq::workspace memory;
    kvq::thread_pool pool(2);
    const int tokens = shape.tokens, heads = shape.kv_heads, dim = shape.head_dim,
              first = random.between(0, tokens - 1);
    const auto wanted = make(0);
    std::vector<float> read(static_cast<std::size_t>((tokens - first) * heads * dim));
    kvq::read_rows(wanted.view, blocks[0], first,
                   kvq::token_view<float>(read.data(), tokens - first, heads, dim), memory, pool);
    CHECK(std::equal(read.begin(), read.end(), wanted.values.begin() + first * heads * dim));
    const auto is_written = [&](int i, const auto& write) {
        const auto as = make(i);
        auto empty = make(i);
        empty.clear();
        CHECK(!empty.same_bytes(as));
        write(empty.view);
        CHECK(empty.same_bytes(as));
    };
    is_written(0, [&](const kvq::rows_view& to) {  // in two parts, the later one first
        const auto write = [&](int t, int n) {
            CHECK(kvq::write_rows(to, blocks[0], t,
                                  kvq::input_view(x.data() + t * heads * dim, n, heads, dim), memory,
                                  pool) == 0);
        };
        write(first, tokens - first);
        write(0, first);
    });
    is_written(1, [&](const kvq::rows_view& to) {
        CHECK(kvq::convert_rows(wanted.view, blocks[0], to, blocks[1], shape, memory, pool) == 0);
    });
    // Another format gets the values that rows stand for.
    const kvq::token_records scheme(kvq::record_layout_named("fp8-token-head"));
    const kvq::block_shape page{kvq::tensor::key, tokens, dim};
    const std::size_t bytes = scheme.block_bytes(page);
    std::vector<std::byte> converted(bytes * static_cast<std::size_t>(heads)), pages(converted);
    const kvq::rows_view to{.rows = kvq::make_format<kvq::simd<>>(scheme),
                            .data = converted.data(),
                            .token_stride = dim + 4,
                            .head_stride = static_cast<std::ptrdiff_t>(bytes)};
    kvq::convert_rows(wanted.view, blocks[0], to, {}, shape, memory);
    for (int h = 0; h < heads; ++h) {
        std::vector<float> values;
        for (int t = 0; t < tokens; ++t) {
            const auto at = wanted.values.begin() + (t * heads + h) * dim;
            values.insert(values.end(), at, at + dim);
        }
        scheme.quantize(page, {}, values.data(), pages.data() + h * to.head_stride);
    }
    CHECK(converted == pages);
}

TEST_CASE("rows in the memory of other systems are read, written and moved") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const auto check = [&](const char* name, int unit, int most_units, int together, const auto& make) {
        const int dim = unit * random.between(1, most_units), heads = unit > 128 ? 1 : random.between(1, 3),
                  tokens = random.between(1, 200);
        INFO(name, ", ", tokens, " tokens, ", heads, " heads of ", dim);
        std::vector<std::int32_t> table[2];
        kvq::row_blocks blocks[2];
        for (int i = 0; i < 2; ++i) {
            const int block_tokens = together * random.between(1, i == 0 ? 9 : 64),
                      used = kvq::detail::ceil_div(tokens, block_tokens), all = used + random.between(0, 3);
            for (int b = 0; b < all; ++b) table[i].insert(table[i].begin() + random.between(0, b), b);
            blocks[i] = {table[i].data(), used, block_tokens, all};
        }
        const test::generator rows = random;
        test::generator values = rows;
        std::vector<float> x;
        for (int i = 0; i < tokens * heads; ++i) {
            const auto row = values.normals(static_cast<std::size_t>(dim));
            x.insert(x.end(), row.begin(), row.end());
        }
        check_copies(
            [&](int i) {
                test::generator same = rows;
                return make(same, tokens, heads, dim, i, table[i], blocks[i].all_blocks,
                            blocks[i].block_tokens);
            },
            blocks, x, {tokens, heads, dim}, random);
    };
    for (const kvq::row_layout& l : kvq::row_layouts)
        check(l.name, l.channels > 0 ? l.channels : 24, 3, 1,
              [&](test::generator& r, const auto&... at) { return owner(r, l, at...); });
    const auto of_records = [&](const auto& scheme, int unit, int most) {
        const kvq::record_layout& l = scheme.layout();
        check(l.name, unit, most, l.in_turns ? 4 : 1,
              [&](test::generator& r, int tokens, int heads, int dim, int i, const auto&... at) {
                  return records(r, scheme, tokens, heads, dim, i == 1 || l.in_turns, at...);
              });
    };
    for (const kvq::record_layout& l : kvq::record_layouts)
        of_records(kvq::token_records(l), l.head_dim > 0 ? l.head_dim : 64, l.head_dim > 0 ? 1 : 2);
    of_records(kvq::rotated_records(kvq::int4_token_head), 64, 2);
}

TEST_CASE("rows in the memory of other systems: copies that are refused") {
    test::generator random(test::seed());
    kvq::workspace memory;
    const std::vector<std::int32_t> table{2, 0, 1};
    const int tokens = 40, heads = 2, dim = 32;
    owner k(random, kvq::row_layout_named("q8_0"), tokens, heads, dim, 0, table, 3, 16);
    std::vector<float> x(static_cast<std::size_t>(tokens * heads * dim), 0.5f);
    const auto before = k.data;
    const auto refused = [&](const kvq::row_blocks& blocks, int first, int n, const char* message) {
        CHECK_THROWS_WITH_AS(
            kvq::read_rows(k.view, blocks, first, kvq::token_view<float>(x.data(), n, heads, dim), memory),
            message, std::invalid_argument);
        CHECK_THROWS_WITH_AS(
            kvq::write_rows(k.view, blocks, first, kvq::input_view(x.data(), n, heads, dim), memory), message,
            std::invalid_argument);
        CHECK(k.data == before);
    };
    const kvq::row_blocks blocks{table.data(), 3, 16, 3};
    refused(blocks, -1, 1, "kvq: rows of 1 tokens from token -1 on, 2 kv heads and 32 channels");
    refused(blocks, 40, 9, "kvq: 49 tokens need 4 blocks of 16, but the table has 3");
    refused({table.data(), 3, 16, 2}, 0, 9, "kvq: block 0 of the table is 2, but the memory has 2 blocks");
    kvq::read_rows(k.view, {table.data(), 3, 16, 2}, 16, kvq::token_view<float>(x.data(), 9, heads, dim),
                   memory);
    for (auto* const stride : {&k.view.token_stride, &k.view.head_stride, &k.view.block_stride}) {
        const std::ptrdiff_t good = std::exchange(*stride, 32);
        CHECK_THROWS_AS(
            kvq::read_rows(k.view, blocks, 0, kvq::token_view<float>(x.data(), 40, heads, dim), memory),
            std::invalid_argument);
        *stride = good;
    }
    // NaN is written as the number nearest to zero; scales that are none are not read.
    x.assign(x.size(), 0.5f);
    x[3] = std::numeric_limits<float>::quiet_NaN();
    x[4] = std::numeric_limits<float>::infinity();
    CHECK(kvq::write_rows(k.view, blocks, 39, kvq::input_view(x.data(), 1, heads, dim), memory) == 2);
    kvq::read_rows(k.view, blocks, 39, kvq::token_view<float>(x.data(), 1, heads, dim), memory);
    CHECK(x[3] == 0.0f);
    CHECK(x[4] == x[5]);
    kvq::detail::store_as(k.data.data() + k.view.head_stride, std::uint16_t{0xfc00});  // token 16, head 1
    CHECK_THROWS_WITH_AS(
        kvq::read_rows(k.view, blocks, 0, kvq::token_view<float>(x.data(), 40, heads, dim), memory),
        "kvq: rows of tokens 0 to 39 of kv head 1 have a scale that is NaN or infinite",
        std::invalid_argument);
    kvq::read_rows(k.view, blocks, 17, kvq::token_view<float>(x.data(), 23, heads, dim), memory);
    CHECK_THROWS_WITH_AS(
        kvq::convert_rows(k.view, blocks, k.view, blocks, {40, heads, INT_MAX - 31}, memory),
        "kvq: rows that are read of 2 kv heads of 2147483616 channels; 65536 of 1048576 are the most",
        std::invalid_argument);
    k.view.rows = kvq::make_format<kvq::int8>();
    CHECK_THROWS_AS(
        kvq::read_rows(k.view, blocks, 0, kvq::token_view<float>(x.data(), 40, heads, dim), memory),
        std::invalid_argument);
}

TEST_CASE(
    "rows in the memory of other systems: scales of each group of channels lie in memory of their own") {
    test::generator random(test::seed());
    kvq::workspace memory;
    const int tokens = 8;
    const auto check = [&](const kvq::format& rows, int dim) {
        INFO(rows.asked_name());
        const kvq::row_bytes bytes = rows.functions().of_places.bytes(rows.scheme(), dim);
        const int unit = std::max(bytes.group / bytes.together, 1),
                  apart_bytes = (bytes.scales - bytes.padding) * tokens;
        struct memories {
            std::vector<std::byte> data, scales, biases;
            kvq::rows_view view;
        };
        const auto make = [&](int of_scales) {
            const auto sized = [](int n) {  // nothing behind it is written
                return std::vector<std::byte>(static_cast<std::size_t>(n + 64), std::byte{0xee});
            };
            memories m{sized(bytes.row * tokens), sized(of_scales), sized(of_scales), {.rows = rows}};
            m.view.data = m.data.data();
            m.view.token_stride = bytes.row;
            m.view.scales = m.scales.data();
            m.view.scale_token_stride = bytes.scales;
            if (bytes.biases > 0) m.view.biases = m.biases.data();
            return m;
        };
        memories dense = make(bytes.scales * tokens), back = make(bytes.scales * tokens),
                 apart = make(apart_bytes);
        apart.view.scale_token_stride = unit;
        apart.view.scale_group_stride = tokens * unit;
        const std::vector<float> x = random.normals(static_cast<std::size_t>(tokens * dim));
        std::vector<float> read(x.size()), read_apart(x.size());
        const auto of_x = kvq::input_view(x.data(), tokens, 1, dim);
        kvq::write_rows(dense.view, {}, 0, of_x, memory);
        kvq::write_rows(apart.view, {}, 0, of_x, memory);
        for (const std::vector<std::byte>& of : {apart.scales, apart.biases})
            CHECK(std::all_of(of.end() - 64, of.end(), [](std::byte b) { return b == std::byte{0xee}; }));
        kvq::read_rows(dense.view, {}, 0, kvq::token_view<float>(read.data(), tokens, 1, dim), memory);
        kvq::read_rows(apart.view, {}, 0, kvq::token_view<float>(read_apart.data(), tokens, 1, dim), memory);
        CHECK(read == read_apart);
        kvq::convert_rows(apart.view, {}, back.view, {}, {tokens, 1, dim}, memory);
        CHECK(back.data == dense.data);
        CHECK(back.scales == dense.scales);
        CHECK(back.biases == dense.biases);
        dense.view.scale_token_stride = unit;  // of elements, not of bytes
        CHECK_THROWS_AS(kvq::write_rows(dense.view, {}, 0, of_x, memory), std::invalid_argument);
    };
    check(kvq::make_format<kvq::simd<>>(kvq::token_rows(kvq::row_layout_named("nvfp4"))), 64);
    for (const char* const name : {"mla-584", "nvfp4-v4", "mxfp4-g16", "mlx-4-g64"})
        check(kvq::make_format<kvq::simd<>>(kvq::token_records(kvq::record_layout_named(name))), 512);
}

TEST_CASE("records in the memory of other systems: what is refused") {
    test::generator random(test::seed());
    kvq::workspace memory;
    const std::vector<std::int32_t> table{1, 0};
    const auto refused = [&](const kvq::rows_view& k, const kvq::rows_view& v, int dim, int value_dim,
                             const char* message) {
        const std::vector<float> q(static_cast<std::size_t>(dim), 0.25f);
        std::vector<float> out(static_cast<std::size_t>(value_dim));
        CHECK_THROWS_WITH_AS(kvq::attend_rows(k, v, {table.data(), 2, 16, 2}, {20, 1, dim, value_dim},
                                              kvq::query_view(q.data(), 1, 1, dim),
                                              kvq::output_view(out.data(), 1, 1, value_dim), memory),
                             message, std::invalid_argument);
    };
    records latents(random, kvq::token_records(kvq::record_layout_named("mla-656")), 20, 1, 576, true, table,
                    2, 16),
        others(random, kvq::token_records(kvq::record_layout_named("mla-656")), 20, 1, 576, true, table, 2,
               16),
        index(random, kvq::token_records(kvq::record_layout_named("index-132")), 20, 1, 128, true, table, 2,
              16),
        mlx(random, kvq::token_records(kvq::record_layout_named("mlx-4-g64")), 20, 1, 64, true, table, 2, 16);
    refused(latents.view, latents.view, 512, 512, "kvq: mla-656 has 576 channels, but head_dim is 512");
    // Values that are not the keys' records have all channels.
    refused(latents.view, others.view, 576, 512, "kvq: mla-656 has 576 channels, but head_dim is 512");
    kvq::rows_view none = index.view;
    none.scales = nullptr;
    refused(none, none, 128, 128,
            "kvq: keys are index-132, whose scales lie beside the rows, but scales is null");
    none = mlx.view;
    none.biases = nullptr;
    refused(none, none, 64, 64,
            "kvq: keys are mlx-4-g64, whose biases lie beside the rows, but biases is null");
    none = latents.view;
    none.scales = latents.data.data();
    refused(none, none, 576, 512,
            "kvq: keys are mla-656, which has no scales beside the rows, but scales are given");
    none = index.view;
    none.biases = index.data.data();
    refused(none, none, 128, 128,
            "kvq: keys are index-132, which has no biases beside the rows, but biases are given");
    const records turns(random, kvq::token_records(kvq::record_layout_named("nvfp4-v4")), 12, 1, 64, true,
                        {0, 1}, 2, 8);
    const std::vector<float> q(64, 0.25f);
    std::vector<float> out(64);
    CHECK_THROWS_WITH_AS(
        kvq::attend_rows(turns.view, turns.view, {table.data(), 2, 6, 2}, {12, 1, 64, 64},
                         kvq::query_view(q.data(), 1, 1, 64), kvq::output_view(out.data(), 1, 1, 64), memory),
        "kvq: keys are nvfp4-v4, where scales of 4 tokens take turns, but blocks have 6 tokens",
        std::invalid_argument);
    const float bad = std::numeric_limits<float>::infinity();
    std::memcpy(latents.data.data() + 656 * 16 + 5 * 656 + 512 + 4, &bad, 4);  // token 5, its second scale
    refused(latents.view, latents.view, 576, 512,
            "kvq: keys of tokens 0 to 19 of kv head 0 have a scale that is NaN or infinite");
    refused(others.view, latents.view, 576, 576,
            "kvq: values of tokens 0 to 19 of kv head 0 have a scale that is NaN or infinite");
}

TEST_CASE("rows in the memory of other systems: a scale for each kv head") {
    test::generator random(test::seed());
    kvq::workspace memory;
    const kvq::row_layout& l = kvq::row_layout_named("fp8");
    const int tokens = 200, heads = 3, dim = 32, block_tokens = 16, blocks = 13;
    std::vector<std::int32_t> table(blocks);
    std::iota(table.rbegin(), table.rend(), 0);
    owner k(random, l, tokens, heads, dim, 0, table, blocks, block_tokens),
        v(random, l, tokens, heads, dim, 1, table, blocks, block_tokens);
    const auto scale_heads = [&](owner& of, std::vector<float> scales) {
        of.view.rows = kvq::make_format<kvq::simd<>>(kvq::head_rows(l, scales, heads));
        for (std::size_t i = 0; i < of.values.size(); ++i)
            of.values[i] *= scales[i / static_cast<std::size_t>(dim) % heads];
    };
    scale_heads(k, {0.5f, 1.25f, 2.0f});
    scale_heads(v, {3.0f, 0.25f, 1.0f});
    const auto q = random.normals(2 * heads * dim);
    const kvq::token_view<const float> of_q(q.data(), 2, heads, dim);
    std::vector<float> out(q.size());
    std::vector<double> wanted(q.size());
    kvq::reference_attend<kvq::causal>(kvq::token_view<const float>(k.values.data(), tokens, heads, dim),
                                       kvq::token_view<const float>(v.values.data(), tokens, heads, dim),
                                       of_q, kvq::token_view<double>(wanted.data(), 2, heads, dim));
    const auto attend = [&](int kv_heads) {
        kvq::attend_rows(k.view, v.view, {table.data(), blocks, block_tokens, blocks},
                         {tokens, kv_heads, dim}, of_q, kvq::token_view<float>(out.data(), 2, heads, dim),
                         memory);
    };
    attend(heads);
    const distance d = measure(k, v, of_q, out, wanted);
    CHECK(d.error <= d.allowed);
    CHECK_THROWS_WITH_AS(attend(1), "kvq: fp8 has scales for 1 layers of 3 heads, but there are 1 of 1",
                         std::invalid_argument);
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
            const distance d = measure(k, v, of_q, out, wanted, mods);
            CHECK(d.error <= d.allowed);
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
        const distance d = measure(k, v, of_q, out, wanted, mods);
        CHECK(d.error <= d.allowed);
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
