// SPDX-License-Identifier: MIT
// Comparison family: exact. Growing buffers hold what was appended, whatever their capacity; MLX's format is its
// formula.
#include <doctest/doctest.h>

#include <kvq/adapters/contiguous.hpp>

#include "support/caches.hpp"
#include "support/memory.hpp"

namespace adapters_contiguous_tests {

namespace {

using kvq::mlx_device;
using kvq::mlx_format;

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

    group_by_formula(const std::vector<float>& x, int bits, mlx_device device) {
        const bool cpu = device == mlx_device::cpu;
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
        kvq::contiguous_shape shape;
        shape.batch = random.between(1, 3);
        shape.heads = random.between(1, 3);
        shape.head_dim = random.between(1, 9);
        shape.value_dim = random.one_in(2) ? 0 : random.between(1, 9);
        shape.step = random.pick(std::vector<int>{1, 5, 16, 256});
        const int value_dim = shape.dim(kvq::tensor::value);
        kvq::contiguous_cache<T> buffers(shape);
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

TEST_CASE("buffers grow by their step, and not before they are full") {
    test::generator random(test::seed());
    kvq::contiguous_cache<kvq::float16> buffers({.heads = 2, .head_dim = 8});
    const auto x = test::random_tensor(random, 300, 2, 8);
    buffers.append(x.slice(0, 1), x.slice(0, 1));
    CHECK(buffers.capacity() == 256);
    buffers.append(x.slice(0, 255), x.slice(0, 255));
    CHECK(buffers.capacity() == 256);
    buffers.append(x.slice(0, 1), x.slice(0, 1));
    CHECK(buffers.capacity() == 512);
    buffers.trim_to_offset();
    CHECK(buffers.capacity() == 257);
    CHECK(buffers.bytes() == 257 * 2 * 2 * 8 * 2);
    buffers.append(x.slice(0, 300), x.slice(0, 300));
    CHECK(buffers.capacity() == 768);
    kvq::contiguous_cache<kvq::float16> whole({.heads = 2, .head_dim = 8});
    whole.append(x.slice(0, 256), x.slice(0, 256));
    CHECK(whole.capacity() == 256);
}

TEST_CASE_TEMPLATE("MLX rows: words, scales and biases are the formula's, for every width, group and device",
                   T, float, kvq::float16, kvq::bfloat16) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const mlx_device device : {mlx_device::cpu, mlx_device::gpu})
        for (const int bits : {2, 3, 4, 5, 6, 8})
            for (const int group : {32, 64, 128})
                for (int round = 0; round < 12; ++round) {
                    const mlx_format format{bits, group, device};
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
                    kvq::mlx_quantize(format, dim, row.data(), words.data(), scales.data(), biases.data());
                    kvq::mlx_dequantize(format, dim, words.data(), scales.data(), biases.data(), back.data());
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
                            const T product(kvq::detail::rounded_product(static_cast<float>(scales[at]),
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
    for (const mlx_device device : {mlx_device::cpu, mlx_device::gpu})
        for (int round = 0; round < 50; ++round) {
            const mlx_format format{4, 32, device};
            auto clean = random.normals(32), dirty = clean;
            const auto i = static_cast<std::size_t>(random.between(0, 31));
            clean[i] = 0.0f;  // as a NaN codes; inside the range, so it sets no parameter
            dirty[i] = std::numeric_limits<float>::quiet_NaN();
            std::uint32_t a[4], b[4];
            float scale_a, scale_b, bias_a, bias_b, back[32];
            kvq::mlx_quantize(format, 32, clean.data(), a, &scale_a, &bias_a);
            kvq::mlx_quantize(format, 32, dirty.data(), b, &scale_b, &bias_b);
            CHECK(std::equal(a, a + 4, b));
            CHECK(scale_a == scale_b);
            CHECK(bias_a == bias_b);
            for (const float sign : {1.0f, -1.0f}) {
                const float infinity = sign * std::numeric_limits<float>::infinity();
                dirty[i] = infinity;
                kvq::mlx_quantize(format, 32, dirty.data(), b, &scale_b, &bias_b);
                kvq::mlx_dequantize(format, 32, b, &scale_b, &bias_b, back);
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
        const mlx_format format{random.pick(std::vector<int>{2, 3, 4, 5, 6, 8}), group};
        kvq::contiguous_shape shape{.batch = random.between(1, 2), .heads = 2, .head_dim = group};
        shape.value_dim = 2 * group;
        const int n = random.between(1, 30);
        kvq::contiguous_cache<T> buffers(shape);
        const auto to = buffers.prepare(n);
        for (int b = 0; b < shape.batch; ++b)
            for (const auto& view : {to.keys(b), to.values(b)})
                for (int t = 0; t < n; ++t)
                    for (int h = 0; h < shape.heads; ++h)
                        for (int c = 0; c < view.dim; ++c) view.at(t, h)[c] = T(random.normal());
        buffers.commit(n);

        kvq::contiguous_quantized<T> small(buffers, format);
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
                            kvq::mlx_quantize(format, dim, from.at(source, h), words.data(), s.data(),
                                              m.data());
                            kvq::mlx_dequantize(format, dim, words.data(), s.data(), m.data(), row.data());
                            REQUIRE(std::equal(words.begin(), words.end(), small.codes(role, b, h, t)));
                            for (std::size_t g = 0; g < s.size(); ++g) {
                                REQUIRE(static_cast<float>(s[g]) ==
                                        static_cast<float>(small.scales(role, b, h, t)[g]));
                                REQUIRE(static_cast<float>(m[g]) ==
                                        static_cast<float>(small.biases(role, b, h, t)[g]));
                            }
                            for (int c = 0; c < dim; ++c)
                                REQUIRE(static_cast<float>(row[static_cast<std::size_t>(c)]) ==
                                        static_cast<float>(got.at(t, h)[c]));
                        }
                }
        };
        check_tokens(n);
        small.append(buffers.view());
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
    kvq::contiguous_cache<T> buffers({.heads = 2, .head_dim = 12, .value_dim = 5, .step = 7});
    const test::stream s(random, shape, 50);
    const auto k = test::converted<T>(s.k, test::order::hnd), v = test::converted<T>(s.v, test::order::nhd);
    buffers.append(k.slice(0, 50), v.slice(0, 50));

    auto sequence = cache.new_sequence();
    kvq::append_to(sequence, 1, buffers.view());
    CHECK(sequence.tokens(1) == 50);
    CHECK(sequence.tokens(0) == 0);
    kvq::append_to(sequence, 0, std::as_const(buffers).view(), 20);
    CHECK(sequence.tokens(0) == 30);
    auto direct = cache.new_sequence();
    direct.append(1, k.slice(0, 50), v.slice(0, 50));
    direct.append(0, k.slice(20, 30), v.slice(20, 30));
    CHECK(test::contents(cache, sequence) == test::contents(cache, direct));

    kvq::contiguous_cache<T> back({.heads = 2, .head_dim = 12, .value_dim = 5});
    kvq::append_from(back, sequence, 1, 10);
    kvq::append_from(back, sequence, 0);
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
    kvq::append_to(quantized, 0, buffers.view());
    const auto exact = test::dequantized(quantized, shape, 0, kvq::tensor::key);
    kvq::contiguous_cache<T> rounded({.heads = 2, .head_dim = 12, .value_dim = 5});
    const auto all = kvq::append_from(rounded, quantized, 0);
    for (int t = 0; t < 50; ++t)
        for (int h = 0; h < 2; ++h)
            for (int c = 0; c < 12; ++c)
                REQUIRE(static_cast<float>(all.keys().at(t, h)[c]) ==
                        static_cast<float>(T(exact.view().at(t, h)[c])));
}

TEST_CASE("buffers append tokens that they hold themselves, whether they grow or not") {
    test::generator random(test::seed());
    kvq::contiguous_cache<float> buffers({.heads = 2, .head_dim = 16, .step = 8});
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

TEST_CASE("sizes that cannot be counted are refused before memory is taken") {
    test::counting_resource memory;
    memory.arm(0);
    constexpr int heads = 1 << 16, dim = 1 << 20, tokens = 1 << 28;
    kvq::contiguous_cache<kvq::float16> keys({.heads = heads, .head_dim = dim}, &memory);
    CHECK_THROWS_WITH_AS(keys.prepare(tokens),
                         doctest::Contains("65536 rows x 268435456 tokens x 1048576 elements of 2 bytes"),
                         kvq::error);
    CHECK(keys.capacity() == 0);
    // One doubling below the overflow of the product is not too large to be counted, but nobody has it.
    CHECK_THROWS_AS(keys.prepare(tokens / 256), std::bad_alloc);
    kvq::contiguous_cache<kvq::float16> values({.heads = heads, .head_dim = 1, .value_dim = dim}, &memory);
    memory.arm(0);
    CHECK_THROWS_WITH_AS(values.prepare(tokens), doctest::Contains("x 1048576 elements"), kvq::error);
    CHECK(values.capacity() == 0);
}

TEST_CASE("an allocation that fails leaves the buffers as they were") {
    test::generator random(test::seed());
    test::counting_resource memory;
    const auto x = test::random_tensor(random, 300, 2, 32);
    const kvq::contiguous_shape shape{.heads = 2, .head_dim = 32};
    kvq::contiguous_cache<float> buffers(shape, &memory);
    kvq::contiguous_quantized<float> small(shape, {.bits = 3, .group = 32}, &memory);
    buffers.append(x.slice(0, 3), x.slice(0, 3));
    small.append(buffers.view());
    const auto fails_cleanly = [&](auto& held, auto&& act) {
        int failures = 0;
        for (bool done = false; !done; ++failures) {
            const int tokens = held.tokens(), capacity = held.capacity();
            const std::size_t bytes = memory.bytes();
            memory.arm(failures);
            try {
                act();
                done = true;
            } catch (const std::bad_alloc&) {
                REQUIRE(held.tokens() == tokens);
                REQUIRE(held.capacity() == capacity);
                REQUIRE(memory.bytes() == bytes);
            }
        }
        memory.arm(test::counting_resource::never);
        return failures - 1;
    };
    const auto first = [&](const auto& view) {
        return std::vector<float>(view.at(0, 0), view.at(0, 0) + 32);
    };
    const auto before = first(buffers.view().keys());
    CHECK(fails_cleanly(buffers, [&] { buffers.append(x.slice(0, 300), x.slice(0, 300)); }) == 2);
    CHECK(fails_cleanly(buffers, [&] { buffers.trim_to_offset(); }) == 2);
    CHECK(first(buffers.view().keys()) == before);
    CHECK(fails_cleanly(small, [&] { small.append(buffers.view()); }) == 6);
    CHECK(fails_cleanly(small, [&] { small.trim_to_offset(); }) == 6);
    CHECK(small.tokens() == 306);
}

TEST_CASE("what does not fit is refused, and nothing changes") {
    test::generator random(test::seed());
    kvq::contiguous_cache<float> buffers({.batch = 2, .heads = 2, .head_dim = 32});
    const auto x = test::random_tensor(random, 3, 2, 32), narrow = test::random_tensor(random, 3, 2, 31);
    const std::vector<kvq::token_view<const float>> good(2, x.view()), wrong{x.view(), narrow.view()},
        shorter{x.view(), x.slice(0, 2)};
    using views = std::span<const kvq::token_view<const float>>;
    buffers.append(views(good), views(good));
    CHECK_THROWS_WITH_AS(buffers.append(x.view(), x.view()), doctest::Contains("1 rows of a batch of 2"),
                         kvq::error);
    CHECK_THROWS_WITH_AS(buffers.append(views(good), views(wrong)), doctest::Contains("31 channels"),
                         kvq::error);
    CHECK_THROWS_WITH_AS(buffers.append(views(shorter), views(good)),
                         doctest::Contains("2 tokens where others have 3"), kvq::error);
    CHECK_THROWS_AS(buffers.trim(4), kvq::error);
    CHECK_THROWS_AS(buffers.view().keys(2), kvq::error);
    CHECK(buffers.tokens() == 3);
    CHECK_THROWS_WITH_AS(kvq::contiguous_cache<float>({.batch = 40000, .heads = 65536, .head_dim = 32}),
                         doctest::Contains("40000 rows x 65536 heads"), kvq::error);

    kvq::contiguous_quantized<float> small({.batch = 2, .heads = 2, .head_dim = 64},
                                           {.bits = 4, .group = 64});
    CHECK_THROWS_WITH_AS(small.append(buffers.view()), doctest::Contains("does not fit"), kvq::error);
    using quantized = kvq::contiguous_quantized<float>;
    CHECK_THROWS_WITH_AS(quantized(buffers, {.bits = 7}), doctest::Contains("not 7"), kvq::error);
    CHECK_THROWS_WITH_AS(quantized(buffers, {.bits = 4, .group = 48}), doctest::Contains("not 48"),
                         kvq::error);
    CHECK_THROWS_WITH_AS(quantized(buffers, {.bits = 4, .group = 64}),
                         doctest::Contains("32 channels is not a multiple"), kvq::error);
    using contiguous = kvq::contiguous_cache<float>;
    CHECK_THROWS_AS(contiguous({.heads = 0, .head_dim = 3}), kvq::error);
    CHECK_THROWS_AS(contiguous({.heads = 1, .head_dim = 3, .step = 0}), kvq::error);

    test::typed_cache<kvq::int8> cache({.layers = 1, .kv_heads = 2, .head_dim = 32});
    auto sequence = cache.new_sequence();
    CHECK_THROWS_AS(kvq::append_from(buffers, sequence, 0), kvq::error);  // two rows
    contiguous one({.heads = 2, .head_dim = 31});
    CHECK_THROWS_WITH_AS(kvq::append_from(one, sequence, 0), doctest::Contains("do not fit a cache"),
                         kvq::error);
    CHECK_THROWS_AS(kvq::append_to(sequence, 0, buffers.view(), 4), kvq::error);
    kvq::contiguous_cache<float> fits({.heads = 2, .head_dim = 32});
    CHECK_THROWS_AS(kvq::append_from(fits, sequence, 0, 1), kvq::error);
    CHECK_THROWS_AS(kvq::append_from(fits, sequence, 0, std::numeric_limits<int>::min()), kvq::error);
    CHECK(fits.tokens() == 0);
}

TEST_CASE("views that cannot be are refused, and nothing changes") {
    test::generator random(test::seed());
    const kvq::contiguous_shape shape{.heads = 2, .head_dim = 32};
    kvq::contiguous_cache<float> buffers(shape);
    const auto x = test::random_tensor(random, 3, 2, 32);
    buffers.append(x.view(), x.view());
    kvq::contiguous_quantized<float> small(buffers, {.bits = 4, .group = 32});
    test::typed_cache<kvq::int8> cache({.layers = 1, .kv_heads = 2, .head_dim = 32});
    auto sequence = cache.new_sequence();
    const auto refused = [&](auto&& change, const char* message) {
        auto view = std::as_const(buffers).view();
        change(view);
        CHECK_THROWS_WITH_AS(small.append(view), doctest::Contains(message), kvq::error);
        CHECK(small.tokens() == 3);
        CHECK(small.capacity() == 3);
        CHECK_THROWS_AS(kvq::append_to(sequence, 0, view, view.tokens > 1 ? 1 : 0), kvq::error);
        CHECK(sequence.tokens() == 0);
    };
    refused([](auto& view) { view.tokens = -2; }, "a view of -2 tokens");
    refused([](auto& view) { view.key_data = nullptr; }, "3 tokens has no keys");
    refused([](auto& view) { view.value_data = nullptr; }, "3 tokens has no values");
    auto longer = std::as_const(buffers).view();
    longer.tokens = longer.capacity + 1;
    CHECK_THROWS_WITH_AS(small.append(longer),
                         doctest::Contains("a view of 257 tokens with a capacity of 256"), kvq::error);
    // No tokens need no memory.
    small.append(kvq::contiguous_view<const float>{shape, 0, 0, nullptr, nullptr});
    CHECK(small.tokens() == 3);

    const kvq::token_view<const float> negative(x.view().at(0, 0), -1, 2, 32), nowhere(nullptr, 3, 2, 32);
    CHECK_THROWS_WITH_AS(buffers.append(negative, negative), doctest::Contains("k has -1 tokens"),
                         kvq::error);
    CHECK_THROWS_WITH_AS(buffers.append(x.view(), nowhere), doctest::Contains("v has no data for 3 tokens"),
                         kvq::error);
    CHECK_THROWS_WITH_AS(buffers.prepare(-1), doctest::Contains("-1 tokens"), kvq::error);
    CHECK_THROWS_WITH_AS(buffers.commit(-1), doctest::Contains("-1 tokens"), kvq::error);
    CHECK(buffers.tokens() == 3);
}

}  // namespace adapters_contiguous_tests
