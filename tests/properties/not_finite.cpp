// SPDX-License-Identifier: MIT
// Comparison family: double arithmetic. NaN and infinities in 16-bit pages, in sinks and in what score
// modifiers return: rows are NaN where the reference is, and usage() counts every such value once.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "support/attention_error.hpp"

using test::append;

namespace not_finite_tests {

namespace {

const std::vector<float> hostile{NAN, -NAN, INFINITY, -INFINITY, 65520.0f, -70000.0f, 1e30f, 3.4e38f};

/// Some values of K and V become hostile.
void poison(test::generator& random, test::stream& s, int one_in) {
    for (auto* x : {&s.k, &s.v})
        for (float& v : x->values())
            if (random.one_in(one_in)) v = random.pick(hostile);
}

template <class Window>
std::size_t count(const test::stream& s, int tokens, const kvq::cache_shape& shape) {
    std::size_t n = 0;
    for (auto* x : {&s.k, &s.v})
        for (int t = 0; t < tokens; ++t)
            for (int h = 0; h < shape.kv_heads; ++h)
                for (int c = 0; c < x->view().dim; ++c)
                    n += !std::isfinite(static_cast<float>(Window(x->view().at(t, h)[c])));
    return n;
}

template <class Cache, class Mods>
void compare(const Cache& cache, const kvq::sequence& sequence, const test::tensor<float>& q,
             const Mods& mods) {
    const auto k = test::dequantized(sequence, cache.shape(), 0, kvq::tensor::key),
               v = test::dequantized(sequence, cache.shape(), 0, kvq::tensor::value);
    const auto qv = q.view();
    const int dim = cache.shape().dim(kvq::tensor::value);
    test::tensor<float> out(qv.tokens, qv.heads, dim);
    test::tensor<double> expected(qv.tokens, qv.heads, dim);
    std::vector<float> lse(static_cast<std::size_t>(qv.tokens * qv.heads));
    sequence.attend(0, qv, kvq::output_view(out.view()).with_lse(lse.data()), mods);
    kvq::reference_attend(k.view(), v.view(), qv, expected.view(), mods);
    for (int t = 0; t < qv.tokens; ++t)
        for (int h = 0; h < qv.heads; ++h) {
            const float* const row = out.view().at(t, h);
            const double* const right = expected.view().at(t, h);
            INFO("query ", t, " of ", qv.tokens, ", head ", h, ": ", row[0], " for ", right[0]);
            REQUIRE(std::isnan(lse[static_cast<std::size_t>(t * qv.heads + h)]) == std::isnan(right[0]));
            double error = 0, size = 0;
            for (int c = 0; c < dim; ++c) {
                REQUIRE(std::isnan(row[c]) == std::isnan(right[c]));
                error += std::isnan(right[c]) ? 0.0 : std::pow(static_cast<double>(row[c]) - right[c], 2);
                size += std::isnan(right[c]) ? 0.0 : right[c] * right[c];
            }
            REQUIRE(std::sqrt(error) <= 1e-2 * std::sqrt(size) + 1e-4);
        }
}

/// Makes scores of some keys NaN or infinite.
struct broken_modifier {
    float value;
    int every;
    float score(float s, int, int, int k_pos) const { return k_pos % every == every - 1 ? value : s; }
};

}  // namespace

TEST_CASE_TEMPLATE("keys that are not finite give NaN where the reference does", C, test::plain_cache,
                   test::kivi_cache, test::rotated_cache, test::int8_cache, test::product_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(12); ++round) {
        kvq::cache_shape shape{.layers = 1, .kv_heads = random.between(1, 2), .head_dim = 0};
        shape.head_dim = random.pick(std::vector<int>{8, 33, 64});
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{4, 16, 32, 64});
        const int n = random.between(1, 120);
        test::stream s(random, shape, n);
        // Values stay finite: one that is not reaches every query that reads its page, masks or not. The
        // first four are not finite in any window; what a wider window holds would be an outlier.
        const bool narrow = std::is_same_v<typename C::window, kvq::float16>;
        for (float& x : s.k.values())
            if (random.one_in(random.one_in(2) ? 400 : 3000))
                x = narrow ? random.pick(hostile) : hostile[static_cast<std::size_t>(random.between(0, 3))];
        auto cache = test::make_cache<C>(shape, options);
        auto sequence = cache.new_sequence();
        append(sequence, 1, s, 0, n);
        const int queries = random.pick(std::vector<int>{1, 2, std::min(n, 20)});
        const auto q = test::random_tensor(random, std::min(queries, n), 2 * shape.kv_heads, shape.head_dim);
        INFO(n, " tokens of ", shape.head_dim, ", sinks ", options.sinks, ", recent ", options.recent,
             ", pages of ", options.page_tokens);
        compare(cache, sequence, q, kvq::causal{});
        compare(cache, sequence, q, kvq::sliding_window{random.between(1, 40)});
    }
}

TEST_CASE("a key that is not finite far behind others, in every chunk of a long sequence") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 8};
    test::plain_cache cache(shape, {});
    const int n = 6000;
    for (const int at : {0, 2047, 2048, 5999}) {
        test::stream s(random, shape, n);
        s.k.view().at(at, 0)[3] = random.pick(hostile);
        auto sequence = cache.new_sequence();
        append(sequence, 1, s, 0, n);
        const auto q = test::random_tensor(random, 2, 2, 8);
        compare(cache, sequence, q, kvq::causal{});
        compare(cache, sequence, q, kvq::skipped_values{0.01f});
    }
}

TEST_CASE("a modifier that returns NaN or infinity gives NaN, on codes as on 16-bit pages") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 32};
    test::kivi_cache cache(shape, {.page_tokens = 32});
    const test::stream s(random, shape, 130);
    auto sequence = cache.new_sequence();
    append(sequence, 1, s, 0, 130);
    const auto q = test::random_tensor(random, 40, 4, 32);
    for (const float value : {NAN, INFINITY, -INFINITY})
        for (const int every : {1, 2, 100, 129, 200})
            compare(cache, sequence, q, broken_modifier{value, every});
}

TEST_CASE("sinks of any finite logit") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 16};
    test::plain_cache cache(shape, {});
    const test::stream s(random, shape, 50);
    auto sequence = cache.new_sequence();
    append(sequence, 1, s, 0, 50);
    const auto q = test::random_tensor(random, 1, 1, 16);
    for (const float logit :
         {-INFINITY, -3.4e38f, -2.5e38f, -1e30f, 0.0f, 3.0f, 90.0f, 1e30f, 2.3e38f, 2.5e38f, 3.4e38f}) {
        INFO("logit ", logit);
        const kvq::learned_sinks sinks{{&logit, 1}};
        compare(cache, sequence, q, sinks);
        compare(cache, sequence, q, kvq::mods{sinks, kvq::skipped_values{0.01f}});
        test::tensor<float> out(1, 1, 16);
        float lse = 0;
        sequence.attend(0, q.view(), kvq::output_view(out.view()).with_lse(&lse), sinks);
        if (logit > 1e20f) CHECK(lse == doctest::Approx(logit).epsilon(1e-6));
    }
}

TEST_CASE("numbers that are given once are refused unless they are finite") {
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 8};
    test::plain_cache cache(shape, {});
    test::generator random(1);
    const test::stream s(random, shape, 5);
    auto sequence = cache.new_sequence();
    append(sequence, 1, s, 0, 5);
    const auto q = test::random_tensor(random, 1, 2, 8);
    test::tensor<float> out(1, 2, 8);
    const auto refuses = [&](const auto& mods, const char* what) {
        std::fill(out.values().begin(), out.values().end(), 7.0f);
        std::string message;
        try {
            sequence.attend(0, q.view(), out.view(), mods);
        } catch (const kvq::error& e) {
            message = e.what();
        }
        INFO(message);
        CHECK(message.find(what) != std::string::npos);
        CHECK(out.values() == std::vector<float>(16, 7.0f));
    };
    struct own_scale {
        float scale(int) const { return NAN; }
    };
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
        const std::vector<float> two{1.0f, bad};
        refuses(kvq::alibi{two}, "query head 1");
        if (!(bad < 0.0f)) refuses(kvq::learned_sinks{two}, "query head 1");
        refuses(kvq::softcap{bad}, "softcap");
        refuses(kvq::score_scale{bad}, "score_scale");
        refuses(kvq::mods{kvq::alibi{two}, kvq::softcap{5.0f}}, "query head 1");
    }
    refuses(kvq::softcap{0.0f}, "softcap");
    refuses(own_scale{}, "scaled by nan");
}

TEST_CASE_TEMPLATE("usage().not_finite counts each value once, from the call that appends it on", C,
                   test::plain_cache, test::kivi_cache, test::rotated_cache, test::product_cache,
                   test::int8_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(20); ++round) {
        kvq::cache_shape shape{.layers = 1, .kv_heads = random.between(1, 3), .head_dim = 0};
        shape.head_dim = random.pick(std::vector<int>{1, 8, 33, 64, 80});
        auto options = test::random_options(random);
        options.rollback = random.pick(std::vector<int>{8, 40});
        const int n = random.between(1, 150);
        test::stream s(random, shape, n);
        poison(random, s, random.pick(std::vector<int>{2, 20, 300}));
        auto cache = test::make_cache<C>(shape, options);
        auto sequence = cache.new_sequence();
        std::vector<kvq::sequence> forks;
        int longest = 0;
        const auto counted = [&](const kvq::sequence& of) {
            REQUIRE(of.usage().not_finite == count<typename C::window>(s, of.tokens(), shape));
        };
        while (sequence.tokens() < n) {
            const int held = sequence.tokens(), most = n - held;
            const int more =
                random.one_in(2) ? std::min(most, random.between(1, 3)) : random.between(1, most);
            const auto k = s.k.slice(held, more), v = s.v.slice(held, more);
            switch (random.between(0, 3)) {
                case 0: {
                    const auto q = test::random_tensor(random, more, shape.kv_heads, shape.head_dim);
                    test::tensor<float> out(more, shape.kv_heads, shape.head_dim);
                    sequence.prefill(0, k, v, q.view(), out.view());
                    break;
                }
                case 1: {
                    const auto half = test::converted<typename C::window>(s.k, test::order::hnd),
                               half_v = test::converted<typename C::window>(s.v, test::order::nhd);
                    sequence.append(0, half.slice(held, more), half_v.slice(held, more));
                    break;
                }
                default:
                    sequence.append(0, k, v);
            }
            counted(sequence);
            longest = std::max(longest, sequence.tokens());
            // Trims that are exact: what is left is the state without the trimmed tokens.
            if (random.one_in(3)) {
                sequence.trim(random.between(std::max(0, longest - options.rollback), sequence.tokens()));
                counted(sequence);
            }
            if (random.one_in(4)) forks.push_back(sequence.fork());
            for (const kvq::sequence& f : forks) counted(f);
        }
    }
}

}  // namespace not_finite_tests
