// SPDX-License-Identifier: MIT
// How far attention over pages is from double arithmetic on the dequantized values.
#pragma once

#include <cmath>
#include <kvq/attention/reference.hpp>

#include "caches.hpp"

namespace test {

struct attention_error {
    /// |out - reference| / |reference|, Euclidean norms over the whole output: the relative error of a
    /// result. 0 where a token's output has fewer than 32 numbers, which may all but cancel: then only the
    /// size of the terms says something.
    double relative = 0;
    /// The largest of one query's output: |out - reference| / |sum_k p_k |v_k||. What rounding explains,
    /// whatever cancels. Of fewer than 16 channels |v_k| counts as an eighth of the largest of its channel at
    /// least: 16-bit values of 32 tokens share a step for many queries (cpu/window/word_product.hpp), and no
    /// other channels outweigh the one value that counts and is small.
    double of_terms = 0;

    void include(const attention_error& other) {
        relative = std::fmax(relative, other.relative);
        of_terms = std::fmax(of_terms, other.of_terms);
    }
};

/// wanted: what the reference takes, the same masks and score modifiers in other words.
template <class Cache, class Mods, class Wanted>
attention_error measure_attention(const Cache& cache, const typename Cache::sequence_type& sequence,
                                  int layer, const tensor<float>& q, const Mods& mods, const Wanted& wanted) {
    const kvq::cache_shape& shape = cache.shape();
    const auto k = dequantized(sequence, shape, layer, kvq::tensor::key);
    auto v = dequantized(sequence, shape, layer, kvq::tensor::value);
    const auto qv = q.view();
    const int value_dim = shape.dim(kvq::tensor::value);
    tensor<float> out(qv.tokens, qv.heads, value_dim);
    for (float& x : out.values()) x = std::numeric_limits<float>::quiet_NaN();
    sequence.attend(layer, qv, out.view(), mods);

    tensor<double> expected(qv.tokens, qv.heads, value_dim), size(qv.tokens, qv.heads, value_dim);
    kvq::reference_attend(k.view(), std::as_const(v).view(), qv, expected.view(), wanted);
    for (float& x : v.values()) x = std::fabs(x);
    const auto all = v.view();
    for (int i = 0; value_dim < 16 && i < all.heads * value_dim; ++i) {
        const int h = i / value_dim, c = i % value_dim;
        float most = 0;
        for (int t = 0; t < all.tokens; ++t)
            if (const float x = all.at(t, h)[c]; x > most && std::isfinite(x)) most = x;
        for (int t = 0; t < all.tokens; ++t)
            if (float& x = all.at(t, h)[c]; x < most / 8) x = most / 8;
    }
    kvq::reference_attend(k.view(), std::as_const(v).view(), qv, size.view(), wanted);

    attention_error worst;
    double difference = 0, norm = 0;
    for (int t = 0; t < qv.tokens; ++t)
        for (int h = 0; h < qv.heads; ++h) {
            double row_difference = 0, row_size = 0;
            for (int c = 0; c < value_dim; ++c) {
                const double exact = expected.view().at(t, h)[c], terms = size.view().at(t, h)[c];
                const double d = static_cast<double>(out.view().at(t, h)[c]) - exact;
                row_difference += d * d;
                row_size += terms * terms;
                norm += exact * exact;
            }
            difference += row_difference;
            // Written so that a NaN is the worst of all.
            if (!(std::sqrt(row_difference) <= worst.of_terms * std::sqrt(row_size)))
                worst.of_terms = std::sqrt(row_difference / row_size);
        }
    const bool telling = qv.heads * value_dim >= 32 || std::isnan(difference);
    worst.relative = telling && !(difference <= 0) ? std::sqrt(difference / norm) : 0;
    return worst;
}

template <class Cache, class Mods = kvq::causal>
attention_error measure_attention(const Cache& cache, const typename Cache::sequence_type& sequence,
                                  int layer, const tensor<float>& q, const Mods& mods = {}) {
    return measure_attention(cache, sequence, layer, q, mods, mods);
}

}  // namespace test
