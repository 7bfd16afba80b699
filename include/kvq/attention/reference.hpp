// Attention in double, one product after the other: the reference for the error of attend().
//
//   out[t][h] = sum_k p_k v[k],   p = softmax_k(logit(scale * q[t][h] . k[k])),   over the keys that the mask shows to the query
//
// Works on dequantized values (sequence::dequantize), so that it shows the error of the kernels and not that of the scheme. It calls the
// hooks of a variant (attention/variant.hpp) with float scores. Not for speed.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "../core/token_view.hpp"
#include "variant.hpp"

namespace kvq::inline KVQ_TAGGED {

/// k: [n][kv_heads][head_dim], v: [n][kv_heads][value_dim]; q and out: the last q.tokens of these n tokens.
template <class Variant = causal>
void reference_attend(const token_view<const float>& k, const token_view<const float>& v,
                      const token_view<const float>& q, const token_view<double>& out,
                      const Variant& variant = {}) {
    double scale = 1.0 / std::sqrt(static_cast<double>(q.dim));
    if constexpr (detail::scaling<Variant>) scale = static_cast<double>(variant.scale(q.dim));
    const int group = q.heads / k.heads;
    std::vector<double> p(static_cast<std::size_t>(k.tokens));

    for (int t = 0; t < q.tokens; ++t)
        for (int h = 0; h < q.heads; ++h) {
            const int q_pos = k.tokens - q.tokens + t;
            int first = 0;
            if constexpr (detail::limiting_keys<Variant>) first = variant.first_key(q_pos);
            const auto hidden = [&](int i) { return i < first && i >= detail::kept_keys(variant); };

            double top = -std::numeric_limits<double>::infinity();
            for (int i = 0; i <= q_pos; ++i) {
                if (hidden(i)) continue;
                double score = 0.0;
                for (int d = 0; d < q.dim; ++d)
                    score += static_cast<double>(q.at(t, h)[d]) * static_cast<double>(k.at(i, h / group)[d]);
                score *= scale;
                if constexpr (detail::changing_logits<Variant>)
                    score = static_cast<double>(variant.logit(static_cast<float>(score), h, q_pos, i));
                p[static_cast<std::size_t>(i)] = score;
                top = std::fmax(top, score);
            }

            double sum = 0.0;
            for (int c = 0; c < out.dim; ++c) out.at(t, h)[c] = 0.0;
            for (int i = 0; i <= q_pos; ++i) {
                if (hidden(i)) continue;
                const double weight = std::exp(p[static_cast<std::size_t>(i)] - top);
                sum += weight;
                for (int c = 0; c < out.dim; ++c)
                    out.at(t, h)[c] += weight * static_cast<double>(v.at(i, h / group)[c]);
            }
            for (int c = 0; c < out.dim; ++c) out.at(t, h)[c] /= sum;
        }
}

}  // namespace kvq::inline KVQ_TAGGED
