// SPDX-License-Identifier: MIT
// Comparison family: mixed-precision reduction. Attention over pages against double arithmetic on the
// dequantized values.
//
// What attend() may lose: queries and weights are fixed-point with 16 bits below their largest element, so a
// score moves by some 2^-16 of its largest term and a weight by 2^-16 of the page's largest; float sums and
// exp2 add about 2^-21. Over thousands of random values the errors add like sqrt(n), and so does the result,
// which leaves about 1e-4; the bound is 5e-4, what the library promises for random data.
#include <doctest/doctest.h>

#include <algorithm>

#include "support/attention_error.hpp"

using test::append;
using test::measure_attention;

namespace attention_tests {

namespace {

constexpr double bound = 5e-4;

/// Random histories: appended in pieces, trimmed and appended again, so that pages are of all kinds.
template <class C, class Check>
void for_random_sequences(test::generator& random, int rounds, int longest, Check check) {
    for (int round = 0; round < rounds; ++round) {
        kvq::cache_shape shape{.layers = C::key_table::size, .kv_heads = random.between(1, 2), .head_dim = 0};
        constexpr int dims[] = {1, 2, 3, 8, 16, 48, 64, 80, 96, 128, 192, 256};
        shape.head_dim = random.one_in(3) ? random.between(1, 256) : random.pick(dims);
        if (random.one_in(2)) shape.value_dim = random.one_in(3) ? random.between(1, 256) : random.pick(dims);
        auto options = test::random_options(random);
        if (random.one_in(2)) options.page_tokens = 64;
        options.layers = test::rotate_formats<C>(shape.layers);
        // Long sequences where the reference can afford them.
        const int n = std::min(random.one_in(2) ? random.between(1, 200) : random.between(1, longest),
                               1 + 400000 / (shape.head_dim + shape.dim(kvq::tensor::value)));
        const test::stream s(random, shape, n);
        auto cache = test::make_cache<C>(shape, options);
        auto sequence = cache.new_sequence();
        const int layer = random.between(0, shape.layers - 1);
        const auto fill = [&] {
            while (sequence.tokens(layer) < n) {
                const int held = sequence.tokens(layer);
                const int count = std::min(n - held, random.between(1, n));
                sequence.append(layer, s.k.slice(held, count), s.v.slice(held, count));
            }
        };
        for (int i = random.between(0, 2); i > 0; --i) {
            fill();
            sequence.trim(random.between(0, n));
        }
        fill();
        if (random.one_in(3)) sequence.trim(random.between(1, n));
        INFO(sequence.tokens(), " tokens of ", shape.head_dim, "/", shape.value_dim, ", layer ", layer,
             ", sinks ", options.sinks, ", recent ", options.recent, ", pages of ", options.page_tokens);
        check(cache, sequence, layer);
    }
}

/// Only where a seed is asked for, so that an ordinary run stays silent.
void report(const test::attention_error& worst) {
    if (std::getenv("KVQ_SEED"))
        MESSAGE("worst relative error ", worst.relative, ", of the sum's terms ", worst.of_terms);
}

}  // namespace

TEST_CASE_TEMPLATE("decode: one query token, any GQA ratio", C, KVQ_TEST_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    test::attention_error worst;
    for_random_sequences<C>(
        random, test::rounds(8), 5000, [&](const auto& cache, const auto& sequence, int layer) {
            const int group = random.between(1, sequence.tokens() > 1000 ? 4 : 16);
            const auto q =
                test::random_tensor(random, 1, cache.shape().kv_heads * group, cache.shape().head_dim);
            const auto error = measure_attention(cache, sequence, layer, q);
            INFO("group ", group);
            CHECK(error.of_terms <= bound);
            CHECK(error.relative <= bound);
            worst.include(error);
        });
    report(worst);
}

TEST_CASE_TEMPLATE("prefill: many query tokens, each sees itself and what came before", C, KVQ_TEST_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    test::attention_error worst;
    for_random_sequences<C>(random, 6, 300, [&](const auto& cache, const auto& sequence, int layer) {
        const int group = random.between(1, 3);
        const int rows = random.between(1, std::min(sequence.tokens(), 40));
        const auto q =
            test::random_tensor(random, rows, cache.shape().kv_heads * group, cache.shape().head_dim);
        const auto error = measure_attention(cache, sequence, layer, q);
        INFO("group ", group, ", ", rows, " query tokens");
        CHECK(error.of_terms <= bound);
        CHECK(error.relative <= bound);
        worst.include(error);
    });
    report(worst);
}

TEST_CASE("outlier channels, large scores and tiny values stay within the bound") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using C = test::kivi_cache;
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 64};
    for (int round = 0; round < 6; ++round) {
        C cache(shape, {.sinks = 4, .recent = 16, .page_tokens = 32});
        test::stream s(random, shape, 400);
        // Keys with a few channels of 20 times the size and an offset; values of any size.
        for (int t = 0; t < 400; ++t)
            for (int h = 0; h < 2; ++h) {
                for (int c = 0; c < 64; c += 17)
                    s.k.view().at(t, h)[c] = 20.0f * s.k.view().at(t, h)[c] + 30.0f;
                if (round % 2)
                    for (int c = 0; c < 64; ++c) s.v.view().at(t, h)[c] *= 1e-3f;
            }
        auto sequence = cache.new_sequence();
        append(sequence, 1, s, 0, 400);
        auto q = test::random_tensor(random, 3, 8, 64);
        for (int t = 0; t < 3; ++t)
            for (int h = 0; h < 8; ++h)
                for (int c = 0; c < 64; c += 17) q.view().at(t, h)[c] *= 0.05f;
        const auto error = measure_attention(cache, sequence, 0, q);
        CHECK(error.of_terms <= bound);
        CHECK(error.relative <= bound);
    }
}

TEST_CASE_TEMPLATE("NaN and infinities that were quantized do not reach the output", C, test::kivi_cache,
                   test::int8_cache, test::product_cache, test::rotated_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 40};
    C cache(shape, {.page_tokens = 16});
    test::stream s(random, shape, 160);
    const float poison[] = {NAN, -NAN, INFINITY, -INFINITY};
    for (auto* x : {&s.k, &s.v})
        for (float& v : x->values())
            if (random.one_in(50)) v = random.pick(poison);
    auto sequence = cache.new_sequence();
    append(sequence, 1, s, 0, 160);
    CHECK(sequence.usage().not_finite > 0);
    const auto error = measure_attention(cache, sequence, 0, test::random_tensor(random, 3, 4, 40));
    CHECK(error.relative <= bound);
    CHECK(error.of_terms <= bound);
}

TEST_CASE("a small value that outweighs large ones is off by a step of 16-bit values, for any queries") {
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 2, .value_dim = 1};
    for (const float small : {0.01f, 0.1f, 0.7f})
        for (const int rows : {1, 20}) {
            test::plain_cache cache(shape, {.page_tokens = 32});
            test::tensor<float> k(64, 1, 2), v(64, 1, 1), q(rows, 1, 2), out(rows, 1, 1);
            k.view().at(7, 0)[0] = 6.0f;
            for (int t = 0; t < 64; ++t) v.view().at(t, 0)[0] = t % 2 ? -3.0f : 2.9f;
            v.view().at(7, 0)[0] = small;
            for (int i = 0; i < rows; ++i) q.view().at(i, 0)[0] = 6.0f;
            auto sequence = cache.new_sequence();
            sequence.append(0, k.view(), v.view());
            sequence.attend(0, q.view(), out.view());
            const float held = static_cast<float>(kvq::float16(small));
            INFO(small, ", ", rows, " query tokens");
            for (const float x : out.values()) CHECK(std::fabs(x - held) <= 3.0f * 0x1p-14f);
            CHECK(measure_attention(cache, sequence, 0, q).of_terms <= bound);
        }
}

// From 16 query rows on, 16-bit pages may be multiplied as integers (cpu/window/word_product.hpp): then the
// same rows alone are within the bound, not the same bits.
TEST_CASE_TEMPLATE("the result does not depend on what else is asked: last row of a prefill, single heads", C,
                   KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for_random_sequences<C>(random, 6, 300, [&](const auto& cache, const auto& sequence, int layer) {
        const kvq::cache_shape& shape = cache.shape();
        const int group = random.between(1, 5), value_dim = shape.dim(kvq::tensor::value);
        const int rows = random.between(1, std::min(sequence.tokens(), 20));
        const auto q = test::random_tensor(random, rows, shape.kv_heads * group, shape.head_dim);
        test::tensor<float> all(rows, shape.kv_heads * group, value_dim),
            last(1, shape.kv_heads * group, value_dim), single(1, shape.kv_heads, value_dim);
        sequence.attend(layer, q.view(), all.view());
        sequence.attend(layer, q.slice(rows - 1, 1), last.view());
        test::tensor<float> one(1, shape.kv_heads, shape.head_dim);
        double error = 0.0, power = 0.0;
        for (int member = 0; member < group; ++member) {
            for (int h = 0; h < shape.kv_heads; ++h)
                std::copy_n(q.view().at(rows - 1, h * group + member), shape.head_dim, one.view().at(0, h));
            sequence.attend(layer, std::as_const(one).view(), single.view());
            for (int h = 0; h < shape.kv_heads; ++h)
                for (int c = 0; c < value_dim; ++c) {
                    const float among_all = all.view().at(rows - 1, h * group + member)[c],
                                in_row = last.view().at(0, h * group + member)[c];
                    REQUIRE(single.view().at(0, h)[c] == in_row);
                    if (!kvq::kernels::has_word_dots<typename C::backend::lanes> || rows * group < 16)
                        REQUIRE(in_row == among_all);
                    error += std::pow(static_cast<double>(in_row) - static_cast<double>(among_all), 2.0);
                    power += std::pow(static_cast<double>(in_row), 2.0);
                }
        }
        CHECK(std::sqrt(error) <= bound * std::sqrt(power));
    });
}

TEST_CASE("decode step by step gives the rows of a prefill") {
    // Nothing is quantized, so that both see the same values. Chunks of 7 tokens, 14 query rows, sum floats
    // in different orders, hence a few float roundings; more rows may be multiplied as integers
    // (cpu/window/word_product.hpp), within the bound.
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 40, .value_dim = 24};
    test::plain_cache cache(shape, {.page_tokens = 16});
    const int n = 91, chunk = 7;
    const test::stream s(random, shape, n);
    const auto q = test::random_tensor(random, n, 4, 40);
    test::tensor<float> rows(n, 4, 24), part(chunk, 4, 24), row(1, 4, 24);
    auto whole = cache.new_sequence(), chunks = cache.new_sequence(), steps = cache.new_sequence();
    append(whole, 1, s, 0, n);
    whole.attend(0, q.view(), rows.view());
    double error = 0.0, power = 0.0;
    for (int t = 0; t < n; ++t) {
        if (t % chunk == 0) {
            append(chunks, 1, s, t, chunk);
            chunks.attend(0, q.slice(t, chunk), part.view());
        }
        append(steps, 1, s, t, 1);
        steps.attend(0, q.slice(t, 1), row.view());
        for (int h = 0; h < 4; ++h)
            for (int c = 0; c < 24; ++c) {
                const float step = row.view().at(0, h)[c];
                REQUIRE(std::fabs(step - part.view().at(t % chunk, h)[c]) <= 16 * 0x1p-24f * 4);
                error +=
                    std::pow(static_cast<double>(step) - static_cast<double>(rows.view().at(t, h)[c]), 2.0);
                power += std::pow(static_cast<double>(step), 2.0);
            }
    }
    CHECK(std::sqrt(error) <= bound * std::sqrt(power));
}

TEST_CASE("a sequence of one token returns its value") {
    for (const int dim : {1, 7, 64}) {
        test::plain_cache cache({.layers = 1, .kv_heads = 1, .head_dim = dim});
        test::generator random(1);
        test::tensor<float> k(1, 1, dim), v(1, 1, dim), out(1, 3, dim);
        for (float& x : v.values()) x = static_cast<float>(kvq::float16(random.normal()));
        auto sequence = cache.new_sequence();
        sequence.append(0, k.view(), v.view());
        const auto q = test::random_tensor(random, 1, 3, dim);
        sequence.attend(0, q.view(), out.view());
        for (int h = 0; h < 3; ++h)
            for (int c = 0; c < dim; ++c) CHECK(out.view().at(0, h)[c] == v.view().at(0, 0)[c]);
    }
}

TEST_CASE_TEMPLATE("queries and outputs in 16 bits: those of float, rounded once, in any memory order", T,
                   kvq::float16, kvq::bfloat16) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 20; ++round) {
        const kvq::cache_shape shape{.layers = 1,
                                     .kv_heads = random.between(1, 3),
                                     .head_dim = random.between(1, 70),
                                     .value_dim = random.between(1, 70)};
        test::kivi_cache cache(shape, {.recent = 8, .page_tokens = 16});
        // Long ones are cut into chunks whose states are merged.
        const int n = random.one_in(4) ? 5000 : random.between(1, 100);
        const test::stream s(random, shape, n);
        auto sequence = cache.new_sequence();
        append(sequence, 1, s, 0, n);
        const int rows = std::min(n, random.between(1, 5)), heads = shape.kv_heads * random.between(1, 4);
        const auto order = random.one_in(2) ? test::order::nhd : test::order::hnd;
        const auto narrow =
            test::converted<T>(test::random_tensor(random, rows, heads, shape.head_dim), order);
        const auto wide = test::converted<float>(narrow, test::order::nhd);
        test::tensor<float> expected(rows, heads, shape.dim(kvq::tensor::value));
        test::tensor<T> out(rows, heads, shape.dim(kvq::tensor::value), order);
        sequence.attend(0, wide.view(), expected.view());
        if (order == test::order::nhd)  // as token_view is made
            sequence.attend(0, {narrow.values().data(), rows, heads, shape.head_dim},
                            {out.values().data(), rows, heads, shape.dim(kvq::tensor::value)});
        else
            sequence.attend(0, narrow.view(), out.view());
        for (int t = 0; t < rows; ++t)
            for (int h = 0; h < heads; ++h)
                for (int c = 0; c < expected.view().dim; ++c)
                    CHECK(static_cast<float>(out.view().at(t, h)[c]) ==
                          static_cast<float>(T(expected.view().at(t, h)[c])));
    }
}

TEST_CASE_TEMPLATE("a query that is not finite makes its own head NaN, and nothing else", C,
                   test::plain_cache, test::int8_cache, test::kivi_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const float poison[] = {NAN, -NAN, INFINITY, -INFINITY};
    for (int round = 0; round < 12; ++round) {
        const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = random.between(1, 70)};
        C cache(shape, {.recent = 8, .page_tokens = 16});
        const int n = round % 4 == 0 ? 5000 : random.between(2, 100);
        const test::stream s(random, shape, n);
        auto sequence = cache.new_sequence();
        append(sequence, 1, s, 0, n);
        auto q = test::random_tensor(random, 2, 6, shape.head_dim);
        test::tensor<float> before(2, 6, shape.head_dim), after(2, 6, shape.head_dim);
        sequence.attend(0, q.view(), before.view());
        const int token = random.between(0, 1), head = random.between(0, 5);
        q.view().at(token, head)[random.between(0, shape.head_dim - 1)] = random.pick(poison);
        sequence.attend(0, q.view(), after.view());
        for (int t = 0; t < 2; ++t)
            for (int h = 0; h < 6; ++h)
                for (int c = 0; c < shape.head_dim; ++c) {
                    const float x = after.view().at(t, h)[c];
                    if (t == token && h == head)
                        CHECK(std::isnan(x));
                    else
                        CHECK(x == before.view().at(t, h)[c]);
                }
    }
}

}  // namespace attention_tests
