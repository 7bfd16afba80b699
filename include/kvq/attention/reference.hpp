// Attention in double, one product after the other: the reference for the error of attend().
//
//   out[t][h] = sum_k p_k v[k],   p = softmax_k(score(scale * q[t][h] . k[k])),   over the keys that the mask
//                                                                                 shows to the query
//
// Works on dequantized values (sequence::dequantize), so that it shows the error of the kernels and not that
// of the scheme. It asks masks and score modifiers (attention/mods.hpp) about one pair of query and key after
// the other, with float scores. Not for speed.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "../core/token_view.hpp"
#include "masks.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// k: [n][kv_heads][head_dim], v: [n][kv_heads][value_dim]; q and out: the last q.tokens of these n tokens,
/// or any number of queries without positions. Zeros for a query that sees no key.
template <class Mods = causal>
void reference_attend(const token_view<const float>& k, const token_view<const float>& v,
                      const token_view<const float>& q, const token_view<double>& out,
                      const Mods& mods = {}) {
    double scale = 1.0 / std::sqrt(static_cast<double>(q.dim));
    if constexpr (detail::own_scale<const Mods>) scale = static_cast<double>(mods.scale(q.dim));
    const int group = q.heads / k.heads;
    constexpr double lowest = -std::numeric_limits<double>::infinity();
    std::vector<double> p(static_cast<std::size_t>(k.tokens));

    for (int t = 0; t < q.tokens; ++t)
        for (int h = 0; h < q.heads; ++h) {
            const int q_pos = detail::has_query_positions<Mods>() ? k.tokens - q.tokens + t : t;
            std::vector<int> times(static_cast<std::size_t>(k.tokens), 1);
            if constexpr (detail::own_lists<const Mods>) {
                const listed_tokens& lists = *mods.lists();
                times.assign(times.size(), 0);
                for (int i = 0; i < lists.count(); ++i)
                    if (const int token = lists.token(t, h / group, i); token >= 0)
                        ++times[static_cast<std::size_t>(token)];
            }
            const auto hidden = [&](int i) {
                if (times[static_cast<std::size_t>(i)] == 0) return true;
                if (!detail::lifts_causal<Mods>() && i > q_pos) return true;
                if constexpr (detail::masking<Mods>) return !detail::visible(mods, q_pos, i);
                return false;
            };

            double top = lowest, sink = lowest;
            if constexpr (detail::own_sink<const Mods>) sink = static_cast<double>(mods.sink_logit(h));
            for (int i = 0; i < k.tokens; ++i) {
                if (hidden(i)) continue;
                double score = 0.0;
                for (int d = 0; d < q.dim; ++d)
                    score += static_cast<double>(q.at(t, h)[d]) * static_cast<double>(k.at(i, h / group)[d]);
                score *= scale;
                if constexpr (detail::scoring<Mods>)
                    score = static_cast<double>(
                        detail::changed_score(mods, static_cast<float>(score), h, q_pos, i));
                p[static_cast<std::size_t>(i)] = score;
                top = score > top || std::isnan(score) ? score : top;
            }

            for (int c = 0; c < out.dim; ++c) out.at(t, h)[c] = 0.0;
            if (top == lowest) continue;
            double sum = std::exp(sink - top);
            for (int i = 0; i < k.tokens; ++i) {
                if (hidden(i)) continue;
                const double weight =
                    times[static_cast<std::size_t>(i)] * std::exp(p[static_cast<std::size_t>(i)] - top);
                sum += weight;
                for (int c = 0; c < out.dim; ++c)
                    out.at(t, h)[c] += weight * static_cast<double>(v.at(i, h / group)[c]);
            }
            for (int c = 0; c < out.dim; ++c) out.at(t, h)[c] /= sum;
        }
}

}}  // namespace kvq
