// Partial attention of one query over some keys, as a mergeable value {max, sum, output}.
//
//   merge(a, b):  m = max(a.m, b.m),  sum = a.sum 2^(a.m - m) + b.sum 2^(b.m - m),  output likewise
//
// Scores are in powers of two (log2 e is folded into the query). An empty state has max = -infinity. Merging
// is associative and commutative up to float rounding; kvq always merges in token order. from_output() makes
// a state of a finished output and its log-sum-exp, so that results over parts of the keys (another device, a
// shared prefix) can be merged.
#pragma once

#include <cmath>
#include <limits>

#include "../core/bits.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

struct softmax_state {
    float max = -std::numeric_limits<float>::infinity();
    float sum = 0.0f;
    float* output = nullptr;  ///< [dim], not yet divided by sum; owned by the caller

    static constexpr float log2e = 1.44269504f;

    /// The state of an output that is already divided by its sum; lse as from log_sum_exp().
    static softmax_state from_output(float* output, float lse) noexcept {
        return {as_max(lse), std::isinf(lse) && lse < 0 ? 0.0f : 1.0f, output};
    }

    /// Adds the keys of `other`.
    void merge(const softmax_state& other, int dim) noexcept {
        if (other.sum == 0.0f && std::isinf(other.max)) return;
        const float top = detail::larger(max, other.max);
        const float mine = std::isinf(max) ? 0.0f : std::exp2(max - top);
        const float theirs = std::exp2(other.max - top);
        for (int d = 0; d < dim; ++d) output[d] = output[d] * mine + other.output[d] * theirs;
        sum = sum * mine + other.sum * theirs;
        max = top;
    }

    /// A score (not in powers of two) as a maximum: finite if it is. Beyond largest_score no two scores
    /// differ.
    static float as_max(float score) noexcept {
        if (std::isinf(score)) return score;
        return detail::larger(detail::smaller(score, largest_score), -largest_score) * log2e;
    }
    static constexpr float largest_score = 2.3586e38f;

    /// Adds a key with this score (not in powers of two) whose value is zero: a learned sink. -infinity adds
    /// nothing.
    void add_sink(float score, int dim) noexcept {
        const float own = as_max(score), top = detail::larger(max, own);
        if (std::isinf(top) && top < 0) return;
        const float mine = std::isinf(max) ? 0.0f : std::exp2(max - top);
        for (int d = 0; d < dim; ++d) output[d] *= mine;
        sum = sum * mine + std::exp2(own - top);
        max = top;
    }

    /// Natural log of the sum of e^score: -infinity without keys, NaN if sum is NaN. sink: the one that was
    /// added; beyond largest_score it outweighs all other scores, or none.
    float log_sum_exp(float sink = 0.0f) const noexcept {
        if (std::abs(sink) > largest_score && sum == 1.0f && max == as_max(sink)) return sink;
        return sum == 0.0f ? -std::numeric_limits<float>::infinity() : (max + std::log2(sum)) / log2e;
    }

    /// Writes output / sum; zeros without keys, NaN if sum is NaN.
    void finish(float* out, int dim) const noexcept {
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        for (int d = 0; d < dim; ++d) out[d] = output[d] * inverse;
    }
};

}}  // namespace kvq
