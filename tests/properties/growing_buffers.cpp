// SPDX-License-Identifier: MIT
// Comparison family: exact. The growing buffers of examples/13_growing_buffers hold what was appended,
// whatever their capacity; MLX's format is its formula.
#include <doctest/doctest.h>

#include "13_growing_buffers/growing_buffers.hpp"
#include "support/caches.hpp"

namespace growing_buffers_tests {

namespace {

/// What one row of the batch should hold: [tokens][heads][dim].
struct plain_rows {
    std::vector<std::vector<float>> rows;
    int values_per_token;

    void trim(int n) {
        for (auto& r : rows) r.resize(static_cast<std::size_t>(n * values_per_token));
    }
};

template <class T>
void check_equal(const kvq::token_view<T>& got, const std::vector<float>& expected) {
    std::size_t i = 0;
    REQUIRE(expected.size() == static_cast<std::size_t>(got.tokens * got.heads * got.dim));
    for (int t = 0; t < got.tokens; ++t)
        for (int h = 0; h < got.heads; ++h)
            for (int c = 0; c < got.dim; ++c)
                if (static_cast<float>(got.at(t, h)[c]) != expected[i++])
                    FAIL("token ", t, " head ", h, " channel ", c);
}

/// One group by the book, in double where that cannot round otherwise, with codes as numbers.
struct group_by_formula {
    std::vector<int> codes;
    float scale, bias;

    group_by_formula(const std::vector<float>& x, int bits, mlx::device device) {
        const bool cpu = device == mlx::device::cpu;
        float low = x[0], high = cpu ? x[0] : std::fmax(0.0f, x[0]);
        for (const float v : x) {
            low = std::fmin(low, v);
            high = std::fmax(high, v);
        }
        const auto n = static_cast<float>((1 << bits) - 1);
        const float s = std::fmax((high - low) / n, 1e-7f);
        const bool low_dominates = std::fabs(low) > std::fabs(high);
        scale = low_dominates ? s : -s;
        bias = low_dominates ? low : high;
        const auto rounded = [&](float v) { return cpu ? std::rint(v) : std::round(v); };
        const float k = rounded(bias / scale);
        if (k == 0.0f)
            bias = 0.0f;
        else
            scale = bias / k;
        for (const float v : x)
            codes.push_back(static_cast<int>(std::fmin(std::fmax(rounded((v - bias) / scale), 0.0f), n)));
    }
};

/// Bit i of a row of words.
int bit_of(const std::uint32_t* words, int i) { return static_cast<int>(words[i / 32] >> (i % 32) & 1u); }

}  // namespace

TEST_CASE_TEMPLATE(
    "random appends and trims: views show what was appended, capacity is a multiple of the step", T, float,
    kvq::float16, kvq::bfloat16) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 30; ++round) {
        growing::buffer_shape shape;
        shape.batch = random.between(1, 3);
        shape.heads = random.between(1, 3);
        shape.head_dim = random.between(1, 9);
        shape.value_dim = random.one_in(2) ? 0 : random.between(1, 9);
        shape.step = random.pick(std::vector<int>{1, 5, 16, 256});
        const int value_dim = shape.dim(kvq::tensor::value);
        growing::buffers<T> buffers(shape);
        plain_rows k{{}, shape.heads * shape.head_dim}, v{{}, shape.heads * value_dim};
        k.rows.resize(static_cast<std::size_t>(shape.batch));
        v.rows.resize(static_cast<std::size_t>(shape.batch));
        for (int step = 0; step < 25; ++step) {
            const int what = random.between(0, 9);
            if (what < 6) {
                const int n = random.between(0, 20);
                std::vector<test::tensor<float>> ks, vs;
                std::vector<kvq::token_view<const float>> kv, vv;
                for (int b = 0; b < shape.batch; ++b) {
                    ks.push_back(test::random_tensor(random, n, shape.heads, shape.head_dim));
                    vs.push_back(test::random_tensor(random, n, shape.heads, value_dim));
                    for (const float x : ks.back().values())
                        k.rows[static_cast<std::size_t>(b)].push_back(static_cast<float>(T(x)));
                    for (const float x : vs.back().values())
                        v.rows[static_cast<std::size_t>(b)].push_back(static_cast<float>(T(x)));
                }
                for (int b = 0; b < shape.batch; ++b) {
                    kv.push_back(std::as_const(ks[static_cast<std::size_t>(b)]).view());
                    vv.push_back(std::as_const(vs[static_cast<std::size_t>(b)]).view());
                }
                const auto all = buffers.append(std::span<const kvq::token_view<const float>>(kv),
                                                std::span<const kvq::token_view<const float>>(vv));
                REQUIRE(all.tokens == buffers.tokens());
                if (n > 0) REQUIRE(buffers.capacity() >= buffers.tokens());
            } else if (what < 8) {
                const int n = random.between(0, buffers.tokens());
                const int capacity = buffers.capacity();
                buffers.trim(n);
                k.trim(n);
                v.trim(n);
                REQUIRE(buffers.capacity() == capacity);
            } else {
                buffers.trim_to_offset();
                REQUIRE(buffers.capacity() == buffers.tokens());
                REQUIRE(buffers.bytes() ==
                        sizeof(T) * static_cast<std::size_t>(buffers.tokens() * shape.batch * shape.heads *
                                                             (shape.head_dim + value_dim)));
            }
            for (int b = 0; b < shape.batch; ++b) {
                check_equal(buffers.view().keys(b), k.rows[static_cast<std::size_t>(b)]);
                check_equal(std::as_const(buffers).view().values(b), v.rows[static_cast<std::size_t>(b)]);
            }
        }
    }
}

TEST_CASE_TEMPLATE("MLX rows: words, scales and biases are the formula's, for every width, group and device",
                   T, float, kvq::float16, kvq::bfloat16) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const mlx::device device : {mlx::device::cpu, mlx::device::gpu})
        for (const int bits : {2, 3, 4, 5, 6, 8})
            for (const int group : {32, 64, 128})
                for (int round = 0; round < 12; ++round) {
                    const mlx::affine format{bits, group, device};
                    const int groups = random.between(1, 3), dim = groups * group;
                    std::vector<T> row;
                    for (int g = 0; g < groups; ++g) {
                        const int kind = random.between(0, 4);
                        const float offset = 4.0f * random.normal();
                        for (int i = 0; i < group; ++i)
                            row.push_back(T(kind == 0   ? 0.0f
                                            : kind == 1 ? offset
                                            : kind == 2 ? -std::fabs(random.normal()) - 1.0f
                                            : kind == 3 ? static_cast<float>(random.between(-3, 3))
                                                        : random.normal() + offset));
                    }
                    REQUIRE(format.words(dim) * 32 == dim * bits);
                    std::vector<std::uint32_t> words(static_cast<std::size_t>(format.words(dim)), 0xdeadbeef);
                    std::vector<T> scales(static_cast<std::size_t>(groups)), biases(scales), back(row.size());
                    mlx::quantize(format, dim, row.data(), words.data(), scales.data(), biases.data());
                    mlx::dequantize(format, dim, words.data(), scales.data(), biases.data(), back.data());
                    for (int g = 0; g < groups; ++g) {
                        const auto begin = row.begin() + g * group;
                        const group_by_formula f(std::vector<float>(begin, begin + group), bits, device);
                        const auto at = static_cast<std::size_t>(g);
                        REQUIRE(static_cast<float>(scales[at]) == static_cast<float>(T(f.scale)));
                        REQUIRE(static_cast<float>(biases[at]) == static_cast<float>(T(f.bias)));
                        for (int i = 0; i < group; ++i) {
                            int code = 0;
                            for (int b = 0; b < bits; ++b)
                                code |= bit_of(words.data(), (g * group + i) * bits + b) << b;
                            REQUIRE(code == f.codes[static_cast<std::size_t>(i)]);
                            const T product(kvq::rounded_product(static_cast<float>(scales[at]),
                                                                 static_cast<float>(code)));
                            const float sum = static_cast<float>(product) + static_cast<float>(biases[at]);
                            REQUIRE(static_cast<float>(back[static_cast<std::size_t>(g * group + i)]) ==
                                    static_cast<float>(T(sum)));
                        }
                    }
                }
}

TEST_CASE("MLX rows: what is not finite stays in its place") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const mlx::device device : {mlx::device::cpu, mlx::device::gpu})
        for (int round = 0; round < 50; ++round) {
            const mlx::affine format{4, 32, device};
            auto clean = random.normals(32), dirty = clean;
            const auto i = static_cast<std::size_t>(random.between(0, 31));
            clean[i] = 0.0f;  // as a NaN codes; inside the range, so it sets no parameter
            dirty[i] = std::numeric_limits<float>::quiet_NaN();
            std::uint32_t a[4], b[4];
            float scale_a, scale_b, bias_a, bias_b, back[32];
            mlx::quantize(format, 32, clean.data(), a, &scale_a, &bias_a);
            mlx::quantize(format, 32, dirty.data(), b, &scale_b, &bias_b);
            CHECK(std::equal(a, a + 4, b));
            CHECK(scale_a == scale_b);
            CHECK(bias_a == bias_b);
            for (const float sign : {1.0f, -1.0f}) {
                const float infinity = sign * std::numeric_limits<float>::infinity();
                dirty[i] = infinity;
                mlx::quantize(format, 32, dirty.data(), b, &scale_b, &bias_b);
                mlx::dequantize(format, 32, b, &scale_b, &bias_b, back);
                CHECK(scale_a == scale_b);
                for (const float x : back) CHECK((infinity > 0 ? x <= back[i] : x >= back[i]));
            }
        }
}

TEST_CASE_TEMPLATE("quantized buffers: trimmed to what they hold in all three parts, width and group kept", T,
                   float, kvq::float16, kvq::bfloat16) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 10; ++round) {
        const int group = random.pick(std::vector<int>{32, 64, 128});
        const mlx::affine format{random.pick(std::vector<int>{2, 3, 4, 5, 6, 8}), group};
        growing::buffer_shape shape{.batch = random.between(1, 2), .heads = 2, .head_dim = group};
        shape.value_dim = 2 * group;
        const int n = random.between(1, 30);
        growing::buffers<T> buffers(shape);
        buffers.append_with(n, [&](const growing::view_of_all<T>& to) {
            for (int b = 0; b < shape.batch; ++b)
                for (const auto& view : {to.keys(b), to.values(b)})
                    for (int t = 0; t < n; ++t)
                        for (int h = 0; h < shape.heads; ++h)
                            for (int c = 0; c < view.dim; ++c) view.at(t, h)[c] = T(random.normal());
        });

        growing::quantized<T> small(buffers, format);
        const auto bytes_of = [&](int tokens) {
            const std::size_t values =
                static_cast<std::size_t>(tokens * shape.batch * shape.heads * 3 * group);
            return values * static_cast<std::size_t>(format.bits) / 8 +
                   values / static_cast<std::size_t>(group) * 2 * sizeof(T);
        };
        CHECK(small.capacity() == n);
        CHECK(small.bytes() == bytes_of(n));
        const auto check_tokens = [&](int tokens) {
            const auto dequantized = small.dequantize();
            REQUIRE(dequantized.tokens() == tokens);
            for (int b = 0; b < shape.batch; ++b)
                for (const kvq::tensor role : {kvq::tensor::key, kvq::tensor::value}) {
                    const bool key = role == kvq::tensor::key;
                    const int dim = shape.dim(role);
                    const auto from = key ? buffers.view().keys(b) : buffers.view().values(b);
                    const auto got = key ? dequantized.view().keys(b) : dequantized.view().values(b);
                    for (int t = 0; t < tokens; ++t)
                        for (int h = 0; h < shape.heads; ++h) {
                            std::vector<std::uint32_t> words(static_cast<std::size_t>(format.words(dim)));
                            std::vector<T> s(static_cast<std::size_t>(format.groups(dim))), m(s);
                            std::vector<T> row(static_cast<std::size_t>(dim));
                            const int source = t % n;
                            mlx::quantize(format, dim, from.at(source, h), words.data(), s.data(), m.data());
                            mlx::dequantize(format, dim, words.data(), s.data(), m.data(), row.data());
                            for (int c = 0; c < dim; ++c)
                                REQUIRE(static_cast<float>(row[static_cast<std::size_t>(c)]) ==
                                        static_cast<float>(got.at(t, h)[c]));
                        }
                }
        };
        check_tokens(n);
        small.append(std::as_const(buffers).view());
        CHECK(small.capacity() == (2 * n + 255) / 256 * 256);
        CHECK(small.bytes() == bytes_of(small.capacity()));
        small.trim_to_offset();
        CHECK(small.bytes() == bytes_of(2 * n));
        CHECK(small.format().bits == format.bits);
        CHECK(small.format().group == format.group);
        check_tokens(2 * n);
        const int kept = random.between(0, n);
        small.trim(kept);
        CHECK(small.bytes() == bytes_of(2 * n));
        small.trim_to_offset();
        CHECK(small.bytes() == bytes_of(kept));
        check_tokens(kept);
    }
}

TEST_CASE_TEMPLATE("a sequence takes its tokens from contiguous buffers and gives them back", T, float,
                   kvq::float16, kvq::bfloat16) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 12, .value_dim = 5};
    test::typed_cache<kvq::full<T>, kvq::full<T>, test::usual, T> cache(
        shape, {.sinks = 3, .recent = 4, .page_tokens = 8});
    growing::buffers<T> buffers({.heads = 2, .head_dim = 12, .value_dim = 5, .step = 7});
    const test::stream s(random, shape, 50);
    const auto k = test::converted<T>(s.k, test::order::hnd), v = test::converted<T>(s.v, test::order::nhd);
    buffers.append(k.slice(0, 50), v.slice(0, 50));

    auto sequence = cache.new_sequence();
    growing::append_to(sequence, 1, buffers.view());
    CHECK(sequence.tokens(1) == 50);
    CHECK(sequence.tokens(0) == 0);
    growing::append_to(sequence, 0, std::as_const(buffers).view(), 20);
    CHECK(sequence.tokens(0) == 30);
    auto direct = cache.new_sequence();
    direct.append(1, k.slice(0, 50), v.slice(0, 50));
    direct.append(0, k.slice(20, 30), v.slice(20, 30));
    CHECK(test::contents(cache, sequence) == test::contents(cache, direct));

    growing::buffers<T> back({.heads = 2, .head_dim = 12, .value_dim = 5});
    growing::append_from(back, sequence, 1, 10);
    growing::append_from(back, sequence, 0);
    REQUIRE(back.tokens() == 70);
    for (int t = 0; t < 70; ++t)
        for (int h = 0; h < 2; ++h) {
            const int from = t < 40 ? t + 10 : t - 40 + 20;
            for (int c = 0; c < 12; ++c)
                REQUIRE(static_cast<float>(back.view().keys().at(t, h)[c]) ==
                        static_cast<float>(k.view().at(from, h)[c]));
            for (int c = 0; c < 5; ++c)
                REQUIRE(static_cast<float>(back.view().values().at(t, h)[c]) ==
                        static_cast<float>(v.view().at(from, h)[c]));
        }

    // Quantized pages: rounded once from what dequantize() gives.
    test::typed_cache<kvq::int8> eight_bits(shape, {.page_tokens = 8});
    auto quantized = eight_bits.new_sequence();
    growing::append_to(quantized, 0, buffers.view());
    const auto exact = test::dequantized(quantized, shape, 0, kvq::tensor::key);
    growing::buffers<T> rounded({.heads = 2, .head_dim = 12, .value_dim = 5});
    const auto all = growing::append_from(rounded, quantized, 0);
    for (int t = 0; t < 50; ++t)
        for (int h = 0; h < 2; ++h)
            for (int c = 0; c < 12; ++c)
                REQUIRE(static_cast<float>(all.keys().at(t, h)[c]) ==
                        static_cast<float>(T(exact.view().at(t, h)[c])));
}

TEST_CASE("buffers append tokens that they hold themselves, whether they grow or not") {
    test::generator random(test::seed());
    growing::buffers<float> buffers({.heads = 2, .head_dim = 16, .step = 8});
    const auto k = test::random_tensor(random, 4, 2, 16), v = test::random_tensor(random, 4, 2, 16);
    buffers.append(k.view(), v.view());
    for (const int capacity : {8, 16, 32}) {  // 4 more tokens fit, the next 8 and 16 do not
        const auto held = buffers.view();
        buffers.append(held.keys(), held.values());
        REQUIRE(buffers.capacity() == capacity);
    }
    const auto held = buffers.view();
    REQUIRE(held.tokens == 32);
    for (int t = 0; t < 32; ++t)
        for (int h = 0; h < 2; ++h)
            for (int c = 0; c < 16; ++c) {
                REQUIRE(held.keys().at(t, h)[c] == k.view().at(t % 4, h)[c]);
                REQUIRE(held.values().at(t, h)[c] == v.view().at(t % 4, h)[c]);
            }
}

TEST_CASE("what does not fit is refused, and nothing changes") {
    test::generator random(test::seed());
    growing::buffers<float> buffers({.batch = 2, .heads = 2, .head_dim = 32});
    const auto x = test::random_tensor(random, 3, 2, 32), narrow = test::random_tensor(random, 3, 2, 31);
    const std::vector<kvq::token_view<const float>> good(2, x.view()), wrong{x.view(), narrow.view()};
    using views = std::span<const kvq::token_view<const float>>;
    buffers.append(views(good), views(good));
    CHECK_THROWS_WITH(buffers.append(x.view(), x.view()), doctest::Contains("1 rows of a batch of 2"));
    CHECK_THROWS_WITH(buffers.append(views(good), views(wrong)), doctest::Contains("31 channels"));
    CHECK_THROWS_AS(buffers.trim(4), std::invalid_argument);
    CHECK_THROWS_AS(buffers.view().keys(2), std::invalid_argument);
    CHECK(buffers.tokens() == 3);
    using quantized = growing::quantized<float>;
    CHECK_THROWS_WITH(quantized(buffers, {.bits = 7}), doctest::Contains("not 7"));
    CHECK_THROWS_WITH(quantized(buffers, {.bits = 4, .group = 64}),
                      doctest::Contains("32 channels is not a multiple"));
    CHECK_THROWS_AS(growing::buffers<float>({.heads = 0, .head_dim = 3}), std::invalid_argument);

    test::typed_cache<kvq::int8> cache({.layers = 1, .kv_heads = 2, .head_dim = 32});
    auto sequence = cache.new_sequence();
    CHECK_THROWS_AS(growing::append_from(buffers, sequence, 0), std::invalid_argument);  // two rows
    growing::buffers<float> one({.heads = 2, .head_dim = 31});
    sequence.append(0, x.view(), x.view());
    CHECK_THROWS_AS(growing::append_from(one, sequence, 0), kvq::error);
    CHECK_THROWS_AS(growing::append_to(sequence, 0, buffers.view(), 4), std::invalid_argument);
    CHECK(one.tokens() == 0);
}

}  // namespace growing_buffers_tests
