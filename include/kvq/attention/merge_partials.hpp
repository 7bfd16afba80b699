// Merges attention over parts of the keys, which other devices or processes computed, to attention over all
// keys.
//
//   parts      outputs of the same queries over different keys, each with its log-sum-exp
//              (output_view::with_lse)
//   merged     sum_i e^(lse_i - lse) output_i,   lse = log sum_i e^lse_i       (attention/softmax_state.hpp)
//
// Parts are merged in the order of the span, so that the result does not depend on which part came first. A
// part without keys (lse = -infinity) changes no bit; NaN propagates. Error: float rounding, about 1e-7 of
// the norm for each part.
// Cost: O(parts * rows * dim) multiply-adds. Nothing is allocated.
#pragma once

#include <cmath>
#include <span>

#include "../core/error.hpp"
#include "softmax_state.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Attention of some rows (queries times heads) over some keys.
struct partial_output {
    float* output = nullptr;     ///< [rows][dim], as attend() writes it; read only
    const float* lse = nullptr;  ///< [rows], natural log of each row's softmax sum
};

/// out[rows][dim] and, if it is not null, lse[rows]: attention over the keys of all parts. `sinks`: logits of
/// learned sinks, one per query head, for rows [tokens][heads]; none if empty. Rows without keys give zeros
/// and -infinity. out must not be memory of a part.
inline void merge_partials(std::span<const partial_output> parts, int rows, int dim, float* out,
                           float* lse = nullptr, std::span<const float> sinks = {}) {
    detail::expect(rows >= 0 && dim >= 1, "cannot merge ", rows, " rows of ", dim, " channels");
    for (int row = 0; row < rows; ++row) {
        const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(row) * dim;
        softmax_state merged;
        merged.output = out + at;
        for (int d = 0; d < dim; ++d) merged.output[d] = 0.0f;
        for (const partial_output& part : parts)
            merged.merge(softmax_state::from_output(part.output + at, part.lse[row]), dim);
        if (!sinks.empty() && merged.sum != 0.0f)
            merged.add_sink(sinks[static_cast<std::size_t>(row) % sinks.size()], dim);
        if (lse) lse[row] = merged.log_sum_exp();
        merged.finish(merged.output, dim);
    }
}

}}  // namespace kvq
