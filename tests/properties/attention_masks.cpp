// SPDX-License-Identifier: MIT
// Comparison family: mixed-precision reduction (see attention.cpp) for the hooks; exact for executors.
#include <doctest/doctest.h>

#include <algorithm>

#include <kvq/core/thread_pool.hpp>

#include "support/attention_error.hpp"
#include "support/typed_cache.hpp"

using test::append;
using test::measure_attention;

namespace attention_masks_tests {

namespace {

constexpr double bound = 5e-4;

/// Hooks of a user: keys of odd position count half; no key is seen.
struct odd_keys_fade {
    float score(float score, int, int, int k_pos) const noexcept {
        return k_pos % 2 ? score - 0.6931472f : score;
    }
};
struct sees_nothing {
    static bool mask(int, int) { return false; }
};

/// Seven workers, one after the other, the last one first.
struct backwards {
    static int concurrency() { return 7; }
    template <class F>
    void parallel_for(int n, const F& f) const {
        for (int i = n - 1; i >= 0; --i) f(i);
    }
};

template <class C, class Check>
void with_sequence(test::generator& random, int tokens, Check check) {
    const kvq::cache_shape shape{
        .layers = C::key_table::size, .kv_heads = 2, .head_dim = 48, .value_dim = 40};
    auto cache = test::make_cache<C>(
        shape,
        {.sinks = 4, .recent = 20, .page_tokens = 32, .layers = test::rotate_formats<C>(shape.layers)});
    const test::stream s(random, shape, tokens);
    auto sequence = cache.new_sequence();
    append(sequence, shape.layers, s, 0, tokens);
    for (int layer = 0; layer < shape.layers; ++layer) check(cache, sequence, layer);
}

void check_error(const test::attention_error& error) {
    CHECK(error.relative <= bound);
    CHECK(error.of_terms <= bound);
}

}  // namespace

TEST_CASE_TEMPLATE("scale, softcap, sliding window, ALiBi, alone and together", C, test::kivi_cache,
                   test::mixed_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    with_sequence<C>(random, 230, [&](const auto& cache, const auto& sequence, int layer) {
        float slopes[6];
        for (int i = 0; i < 6; ++i) slopes[i] = 0.5f / static_cast<float>(1 << i);
        for (const int rows : {1, 3, 37}) {
            const auto q = test::random_tensor(random, rows, 6, 48);
            INFO("layer ", layer, ", ", rows, " query tokens");
            const auto check = [&](const auto& v) {
                check_error(measure_attention(cache, sequence, layer, q, v));
            };
            check(kvq::score_scale{0.05f});
            check(kvq::softcap{3.0f});
            check(kvq::alibi{slopes});
            check(odd_keys_fade{});
            for (const int window : {1, 2, 31, 32, 64, 1000}) check(kvq::sliding_window{window});
            // Fewer than the sinks of the cache, as many, into the next page, and more than there are.
            for (const int sinks : {0, 3, 4, 50, 1000})
                for (const int window : {1, 40}) check(kvq::sink_window{window, sinks});
            check(kvq::mods{kvq::softcap{5.0f}, kvq::sink_window{40, 4}});
            check(kvq::mods{kvq::softcap{5.0f}, kvq::sliding_window{40}});
            check(kvq::mods{kvq::score_scale{0.2f}, kvq::alibi{slopes}, odd_keys_fade{},
                            kvq::sliding_window{100}});
        }
    });
}

TEST_CASE("a window that sees everything is no window") {
    test::generator random(test::seed());
    with_sequence<test::kivi_cache>(random, 150, [&](const auto& cache, const auto& sequence, int layer) {
        const auto q = test::random_tensor(random, 5, 4, 48);
        test::tensor<float> plain(5, 4, 40), windowed(5, 4, 40);
        sequence.attend(layer, q.view(), plain.view());
        sequence.attend(layer, q.view(), windowed.view(), kvq::sliding_window{150});
        CHECK(plain.values() == windowed.values());
        (void)cache;
    });
}

TEST_CASE_TEMPLATE("the result does not depend on the executor or the number of threads", C, test::kivi_cache,
                   test::mixed_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    // 2500 tokens are cut into chunks; few rows make the chunks tasks of their own, many rows do not.
    for (const int tokens : {40, 2500})
        with_sequence<C>(random, tokens, [&](const auto& cache, const auto& sequence, int layer) {
            for (const int rows : {1, 3, 20}) {
                const auto q = test::random_tensor(random, rows, 4, 48);
                test::tensor<float> expected(rows, 4, 40), out(rows, 4, 40);
                sequence.attend(layer, q.view(), expected.view());
                kvq::workspace space;
                for (int threads = 1; threads <= 4; ++threads) {
                    std::fill(out.values().begin(), out.values().end(), -1.0f);
                    sequence.attend(layer, q.view(), out.view(), kvq::causal{}, kvq::thread_pool(threads),
                                    space);
                    CHECK(out.values() == expected.values());
                    CHECK(space.size() >= cache.attention_workspace(tokens, 4, rows, threads));
                }
            }
        });
}

TEST_CASE_TEMPLATE("a batch gives every sequence what it gets alone, on any number of threads", C,
                   test::kivi_cache, test::mixed_cache, test::rotated_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 4; ++round) {
        const kvq::cache_shape shape{2, 2, 48, 40};
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{16, 32, 33});
        options.layers = test::rotate_formats<C>(shape.layers, random.between(0, 3));
        auto cache = test::make_cache<C>(shape, options);
        const int count = random.between(0, 7), layer = random.between(0, 1);
        std::vector<typename C::sequence_type> sequences;
        std::vector<test::tensor<float>> q, expected, out;
        std::vector<std::vector<float>> lse;
        for (int i = 0; i < count; ++i) {
            if (i > 0 && random.one_in(4)) {
                sequences.push_back(sequences.back().fork());
            } else {
                // Some are cut into chunks that are tasks of their own.
                const int tokens = random.one_in(3) ? random.between(2100, 4500) : random.between(1, 300);
                const test::stream s(random, shape, tokens);
                sequences.push_back(cache.new_sequence());
                sequences.back().append(layer, s.k.slice(0, tokens), s.v.slice(0, tokens));
            }
            const int heads = 2 * random.between(1, 4);
            const int rows =
                std::min(sequences.back().tokens(layer), random.one_in(5) ? 0 : random.between(1, 6));
            q.push_back(test::random_tensor(random, rows, heads, 48));
            expected.emplace_back(rows, heads, 40);
            out.emplace_back(rows, heads, 40);
            lse.emplace_back(static_cast<std::size_t>(rows * heads), 77.0f);
        }
        const auto check = [&](const auto& mods, auto&& executor) {
            std::vector<kvq::attention_request> batch;
            for (std::size_t i = 0; i < sequences.size(); ++i) {
                sequences[i].attend(layer, q[i].view(),
                                    kvq::output_view(expected[i].view()).with_lse(lse[i].data()), mods);
                std::fill(out[i].values().begin(), out[i].values().end(), -1.0f);
                batch.push_back({&sequences[i], q[i].view(), out[i].view()});
            }
            kvq::workspace space;
            cache.attend(layer, batch, mods, executor, space);
            for (std::size_t i = 0; i < sequences.size(); ++i) CHECK(out[i].values() == expected[i].values());
            for (std::size_t i = 0; i < sequences.size(); ++i) {
                const auto wanted = lse[i];
                std::fill(lse[i].begin(), lse[i].end(), 77.0f);
                batch[i].out = kvq::output_view(out[i].view()).with_lse(lse[i].data());
                cache.attend(layer, std::span(batch).subspan(i, 1), mods, executor, space);
                CHECK(lse[i] == wanted);
            }
        };
        for (const int threads : {1, 3}) check(kvq::causal{}, kvq::thread_pool(threads));
        check(kvq::sliding_window{100}, backwards{});
        check(kvq::softcap{5.0f}, kvq::serial_executor{});
    }
}

TEST_CASE("a batch with a part that does not fit is refused before anything is written") {
    test::generator random(test::seed());
    using cache_type = test::typed_cache<kvq::int8>;
    const kvq::cache_shape shape{1, 1, 32};
    cache_type cache(shape), other(shape);
    const test::stream s(random, shape, 20);
    auto mine = cache.new_sequence(), theirs = other.new_sequence();
    mine.append(0, s.k.view(), s.v.view());
    theirs.append(0, s.k.view(), s.v.view());
    const auto q = test::random_tensor(random, 1, 4, 32);
    std::vector<float> out(2 * 128, -1.0f);
    const auto to = [&](int i) { return kvq::output_view(out.data() + 128 * i, 1, 4, 32); };
    kvq::workspace space;
    const auto refused = [&](const kvq::attention_request& second, const char* words) {
        const std::vector<kvq::attention_request> batch{{&mine, q.view(), to(0)}, second};
        CHECK_THROWS_WITH_AS(cache.attend(0, batch, kvq::causal{}, kvq::serial_executor{}, space),
                             doctest::Contains(words), kvq::error);
        CHECK(out == std::vector<float>(2 * 128, -1.0f));
    };
    refused({&theirs, q.view(), to(1)}, "sequence 1 of the batch is not one of this cache");
    refused({nullptr, q.view(), to(1)}, "sequence 1 of the batch");
    refused({&mine, q.view(), kvq::output_view(out.data(), 1, 4, 16)}, "out is 1 x 4 x 16");
    const auto empty = cache.new_sequence();
    refused({&empty, q.view(), to(1)}, "holds 0");
    const auto moved = std::move(mine);
    refused({&mine, q.view(), to(1)}, "0 layers");
}

TEST_CASE_TEMPLATE("log-sum-exp: that of the scores on dequantized keys, whatever the mask", C,
                   test::kivi_cache, test::mixed_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const int tokens : {40, 2300})
        with_sequence<C>(random, tokens, [&](const auto& cache, const auto& sequence, int layer) {
            const int rows = 3, group = 4 / cache.shape().kv_heads;
            const auto q = test::random_tensor(random, rows, 4, 48);
            const auto k = test::dequantized(sequence, cache.shape(), layer, kvq::tensor::key);
            test::tensor<float> expected(rows, 4, 40), out(rows, 4, 40);
            std::vector<float> lse(static_cast<std::size_t>(rows * 4));
            const auto check = [&](const auto& mods, int window, double cap) {
                sequence.attend(layer, q.view(), expected.view(), mods);
                std::fill(lse.begin(), lse.end(), 77.0f);
                sequence.attend(layer, q.view(), kvq::output_view(out.view()).with_lse(lse.data()), mods);
                CHECK(out.values() == expected.values());
                for (int t = 0; t < rows; ++t)
                    for (int h = 0; h < 4; ++h) {
                        const int last = tokens - rows + t;
                        double sum = 0;
                        for (int key = std::max(0, last - window + 1); key <= last; ++key) {
                            double score = 0;
                            for (int c = 0; c < 48; ++c)
                                score += static_cast<double>(q.view().at(t, h)[c]) *
                                         static_cast<double>(k.view().at(key, h / group)[c]);
                            score /= std::sqrt(48.0);
                            sum += std::exp(cap > 0 ? cap * std::tanh(score / cap) : score);
                        }
                        const float got = lse[static_cast<std::size_t>(t * 4 + h)];
                        if (window == 0)
                            CHECK(got == -std::numeric_limits<float>::infinity());
                        else
                            CHECK(std::fabs(static_cast<double>(got) - std::log(sum)) <= 1e-3);
                    }
            };
            check(kvq::causal{}, tokens, 0);
            check(kvq::softcap{3.0f}, tokens, 3);
            check(kvq::sliding_window{25}, 25, 0);
            check(sees_nothing{}, 0, 0);
        });
}

TEST_CASE("outputs over parts of the keys and their log-sum-exp make the output over all") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using cache_type = test::typed_cache<kvq::full<float>, kvq::full<float>, test::usual, float>;
    const kvq::cache_shape shape{1, 2, 32};
    for (int round = 0; round < 20; ++round) {
        cache_type cache(shape, {.page_tokens = 32});
        const int first = random.between(1, 200), n = first + random.between(1, 200);
        const test::stream s(random, shape, n);
        auto whole = cache.new_sequence(), left = cache.new_sequence(), right = cache.new_sequence();
        whole.append(0, s.k.slice(0, n), s.v.slice(0, n));
        left.append(0, s.k.slice(0, first), s.v.slice(0, first));
        right.append(0, s.k.slice(first, n - first), s.v.slice(first, n - first));
        const auto q = test::random_tensor(random, 1, 4, 32);
        test::tensor<float> expected(1, 4, 32), a(1, 4, 32), b(1, 4, 32);
        float lse_a[4], lse_b[4], lse[4];
        whole.attend(0, q.view(), kvq::output_view(expected.view()).with_lse(lse));
        left.attend(0, q.view(), kvq::output_view(a.view()).with_lse(lse_a));
        right.attend(0, q.view(), kvq::output_view(b.view()).with_lse(lse_b));
        for (int h = 0; h < 4; ++h) {
            float* const out = a.view().at(0, h);
            auto merged = kvq::softmax_state::from_output(out, lse_a[h]);
            merged.merge(kvq::softmax_state::from_output(b.view().at(0, h), lse_b[h]), 32);
            CHECK(std::fabs(merged.log_sum_exp() - lse[h]) <= 1e-5f);
            merged.finish(out, 32);
            for (int c = 0; c < 32; ++c) CHECK(std::fabs(out[c] - expected.view().at(0, h)[c]) <= 1e-5f);
        }
    }
}

TEST_CASE("an executor may run tasks in any order") {
    static_assert(kvq::executor<backwards> && kvq::executor<kvq::serial_executor> &&
                  kvq::executor<kvq::thread_pool>);
    test::generator random(test::seed());
    with_sequence<test::kivi_cache>(random, 5000, [&](const auto&, const auto& sequence, int layer) {
        const auto q = test::random_tensor(random, 2, 4, 48);
        test::tensor<float> expected(2, 4, 40), out(2, 4, 40);
        sequence.attend(layer, q.view(), expected.view());
        kvq::workspace space;
        sequence.attend(layer, q.view(), out.view(), kvq::causal{}, backwards{}, space);
        CHECK(out.values() == expected.values());
    });
}

TEST_CASE("attention is a function of what a sequence holds: repeated, forked, in a used workspace") {
    test::generator random(test::seed());
    with_sequence<test::custom_cache>(random, 300, [&](const auto& cache, const auto& sequence, int layer) {
        const auto q = test::random_tensor(random, 4, 4, 48);
        test::tensor<float> expected(4, 4, 40), out(4, 4, 40);
        sequence.attend(layer, q.view(), expected.view());
        kvq::workspace space;
        std::byte* const memory = space.reserve(2 * cache.attention_workspace(300, 4, 4));
        std::fill_n(memory, space.size(), std::byte{0xff});
        const auto copy = sequence.fork();
        for (int i = 0; i < 3; ++i) {
            copy.attend(layer, q.view(), out.view(), kvq::causal{}, kvq::serial_executor{}, space);
            CHECK(out.values() == expected.values());
        }
    });
}

TEST_CASE("strided queries and outputs") {
    test::generator random(test::seed());
    with_sequence<test::kivi_cache>(random, 100, [&](const auto&, const auto& sequence, int layer) {
        const auto q = test::random_tensor(random, 3, 4, 48);
        test::tensor<float> expected(3, 4, 40);
        sequence.attend(layer, q.view(), expected.view());
        // Heads outermost, with gaps.
        std::vector<float> from(5000), to(5000, -1.0f);
        const kvq::token_view<float> qs(from.data(), 3, 4, 48, 50, 200), outs(to.data(), 3, 4, 40, 44, 400);
        for (int t = 0; t < 3; ++t)
            for (int h = 0; h < 4; ++h) std::copy_n(q.view().at(t, h), 48, qs.at(t, h));
        sequence.attend(layer, qs, outs);
        int written = 0;
        for (const float x : to) written += x != -1.0f;
        CHECK(written == 3 * 4 * 40);
        for (int t = 0; t < 3; ++t)
            for (int h = 0; h < 4; ++h)
                CHECK(std::equal(outs.at(t, h), outs.at(t, h) + 40, expected.view().at(t, h)));
    });
}

}  // namespace attention_masks_tests
