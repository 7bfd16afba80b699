// SPDX-License-Identifier: MIT
// Comparison family: mixed-precision reduction. Products with one byte per value: a larger error than two
// bytes make, and none beyond what rounding queries and weights to 8 bits explains. Built for several -march.
#include <doctest/doctest.h>

#include <kvq/cpu/simd.hpp>

#include "support/attention_error.hpp"
#include "support/typed_cache.hpp"

namespace attention_query_bytes_tests {

namespace {

constexpr int tokens = 256, page_tokens = 64, dim = 64, heads = 2, q_heads = 4;
constexpr kvq::cache_shape shape{.layers = 1, .kv_heads = heads, .head_dim = dim};

/// Every page quantized with a scale per token: rounding is then that of q, and of p times the scale of its
/// value.
template <int QueryBytes>
struct quantized_tokens {
    using cache_type =
        test::typed_cache<kvq::int8, kvq::int8, kvq::simd<kvq::arch::best, kvq::query_bytes<QueryBytes>>>;
    cache_type cache{shape, {.recent = 0, .page_tokens = page_tokens}};
    typename cache_type::sequence_type sequence = cache.new_sequence();

    explicit quantized_tokens(const test::stream& s) { sequence.append(0, s.k.view(), s.v.view()); }
    test::attention_error error(const test::tensor<float>& q) const {
        return test::measure_attention(cache, sequence, 0, q);
    }
};

double absolute_sum(const float* x) {
    double sum = 0;
    for (int c = 0; c < dim; ++c) sum += std::fabs(static_cast<double>(x[c]));
    return sum;
}
double absolute_most(const float* x) {
    double most = 0;
    for (int c = 0; c < dim; ++c) most = std::fmax(most, std::fabs(static_cast<double>(x[c])));
    return most;
}

}  // namespace

TEST_CASE("one byte per value: within what 8 bits of query and weights allow, and not as good as two bytes") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 5; ++round) {
        const test::stream s(random, shape, tokens);
        const auto q = test::random_tensor(random, 1, q_heads, dim);
        const quantized_tokens<1> one(s);
        const quantized_tokens<2> two(s);
        REQUIRE(one.sequence.usage().window == 0);  // nothing is left in 16 bits
        CHECK(two.error(q).relative <= 5e-4);
        CHECK(one.error(q).relative > 4 * two.error(q).relative);

        const auto k = test::dequantized(one.sequence, shape, 0, kvq::tensor::key),
                   v = test::dequantized(one.sequence, shape, 0, kvq::tensor::value);
        test::tensor<float> out(1, q_heads, dim);
        one.sequence.attend(0, q.view(), out.view());
        for (int h = 0; h < q_heads; ++h) {
            const int head = h / (q_heads / heads);
            const float* const query = q.view().at(0, h);
            // The query is off by at most a step of max|q| / 126 in every channel, so a score by
            // max|q| / 126 * sum |k| / sqrt(dim), and a weight by twice that in its exponent.
            std::vector<double> p(tokens);
            double most = -1e300, sum = 0, off = 0;
            for (int t = 0; t < tokens; ++t) {
                const float* const key = k.view().at(t, head);
                double score = 0;
                for (int c = 0; c < dim; ++c)
                    score += static_cast<double>(query[c]) * static_cast<double>(key[c]);
                p[static_cast<std::size_t>(t)] = score / std::sqrt(double{dim});
                most = std::fmax(most, p[static_cast<std::size_t>(t)]);
                off = std::fmax(off, absolute_most(query) / 126 * absolute_sum(key) / std::sqrt(double{dim}));
            }
            for (double& x : p) sum += x = std::exp(x - most);
            for (double& x : p) x /= sum;
            const double weight_off = std::expm1(2 * off);
            for (int c = 0; c < dim; ++c) {
                double expected = 0, terms = 0, rounding = 0;
                for (int page = 0; page < tokens; page += page_tokens) {
                    // Weights times scales are off by a step of the page's largest; the codes are v / scale.
                    double largest = 0, codes = 0;
                    for (int t = page; t < page + page_tokens; ++t) {
                        const double weight = p[static_cast<std::size_t>(t)];
                        const double x = static_cast<double>(v.view().at(t, head)[c]);
                        const double scale = absolute_most(v.view().at(t, head)) / 127;
                        expected += weight * x;
                        terms += weight * std::fabs(x);
                        largest = std::fmax(largest, weight * scale);
                        codes += std::fabs(x) / scale;
                    }
                    rounding += largest / 126 * codes;
                }
                const double difference = std::fabs(static_cast<double>(out.view().at(0, h)[c]) - expected);
                REQUIRE(difference <= weight_off * terms + (1 + weight_off) * rounding + 5e-4 * terms);
            }
        }
    }
}

}  // namespace attention_query_bytes_tests
