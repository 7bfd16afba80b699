// Which tokens of a layer to keep: scores of tokens, head by head, and the lists that sequence::retain takes.
//
//   sequence.hold();                                              before the prompt
//   ... prefill of the prompt, of all layers ...
//   auto scores = snapkv_scores(sequence, layer, last_queries);   [kv_heads][tokens], larger is better
//   const int count = sequence.tokens(layer) / 2;
//   sequence.retain(layer, best_tokens(sequence, layer, scores, count, last_queries.tokens), count);
//
//   SnapKV (arXiv 2404.14469)     mass of the last queries of the prompt, averaged over neighbouring tokens
//   H2O (arXiv 2306.14048)        sequence::attention_mass of all queries
//   Knorm (arXiv 2406.11430)      - |k|
//   Expected Attention            log of E[exp(q . k)] |v| for normally distributed queries with the second
//     (arXiv 2510.00636)          moments of a calibration: k^T E[q q^T] k / (2 channels) + log |v|
//   PyramidKV (arXiv 2406.02069)  more tokens in the first layers
//
// Scores of your own are as good. Contract: ties keep the later token; scores that are NaN come last.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "../cache/retain.hpp"
#include "../cache/sequence_access.hpp"
#include "../core/error.hpp"
#include "../quant/calibration.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Lists for sequence::retain: of each kv head its sinks, the last `recent` tokens, and the others with the
/// largest scores, `count` in all. scores: [kv_heads][tokens(layer)], those of tokens that are gone are not
/// read. Raises kvq::error for another number of scores, or a count that has no room for sinks and recent
/// tokens, or is more than the layer holds. O(tokens)
inline std::vector<int> best_tokens(const sequence& s, int layer, std::span<const float> scores, int count,
                                    int recent) {
    const int tokens = s.tokens(layer);
    const int heads = detail::sequence_access::cache(s).shape(layer).kv_heads;
    const auto [sinks, first] = s.gap(layer);
    const int held = sinks + tokens - first;
    detail::expect(scores.size() == static_cast<std::size_t>(heads) * static_cast<std::size_t>(tokens),
                   "layer ", layer, " has ", heads, " kv heads of ", tokens, " tokens, and there are ",
                   scores.size(), " scores");
    recent = detail::smaller(recent, tokens - first);
    detail::expect(recent >= 0 && count >= sinks + recent && count <= held, "layer ", layer, " keeps ", count,
                   " tokens, at least its ", sinks, " sinks and ", recent, " recent ones, and at most ",
                   held);
    std::vector<int> lists, order(static_cast<std::size_t>(tokens - recent - first));
    for (int h = 0; h < heads; ++h) {
        const float* const of =
            scores.data() + static_cast<std::size_t>(h) * static_cast<std::size_t>(tokens);
        for (int t = 0; t < sinks; ++t) lists.push_back(t);
        std::iota(order.begin(), order.end(), first);
        const auto chosen = order.begin() + (count - sinks - recent);
        const auto better = [of](int a, int b) {
            const bool no_a = of[a] != of[a], no_b = of[b] != of[b];
            if (no_a != no_b) return no_b;
            return no_a || of[a] == of[b] ? a > b : of[a] > of[b];
        };
        if (chosen != order.end()) std::nth_element(order.begin(), chosen, order.end(), better);
        std::sort(order.begin(), chosen);
        lists.insert(lists.end(), order.begin(), chosen);
        for (int t = tokens - recent; t < tokens; ++t) lists.push_back(t);
    }
    return lists;
}

/// Scores by the attention of the last queries, averaged over `width` neighbouring tokens. q, mods: as for
/// sequence::attention_mass. Keep the queries' own tokens (`recent`).
inline std::vector<float> snapkv_scores(const sequence& s, int layer, const query_view& q,
                                        const mods_view& mods = causal{}, int width = 5) {
    detail::expect(width >= 1, "scores are averaged over at least 1 token, not ", width);
    const int tokens = s.tokens(layer);
    const auto heads = static_cast<std::size_t>(detail::sequence_access::cache(s).shape(layer).kv_heads);
    std::vector<float> mass(heads * static_cast<std::size_t>(tokens)), scores(mass.size());
    s.attention_mass(layer, q, mass.data(), mods);
    for (std::size_t h = 0; h < heads; ++h)
        for (int t = 0; t < tokens; ++t) {
            const float* const of = mass.data() + h * static_cast<std::size_t>(tokens);
            float sum = 0.0f;
            for (int i = detail::larger(0, t - width / 2); i < detail::smaller(tokens, t - width / 2 + width);
                 ++i)
                sum += of[i];
            scores[h * static_cast<std::size_t>(tokens) + static_cast<std::size_t>(t)] =
                sum / static_cast<float>(width);
        }
    return scores;
}

namespace detail {

/// Calls f(kv head, token, key or value as floats) for all tokens that a layer holds.
template <class F>
void for_each_row(const sequence& s, int layer, tensor role, F&& f) {
    const cache_shape& shape = sequence_access::cache(s).shape(layer);
    const auto [sinks, first] = s.gap(layer);
    constexpr int step = 256;
    const int dim = shape.dim(role);
    std::vector<float> rows(static_cast<std::size_t>(step * shape.kv_heads * dim));
    for (int at = 0, end = sinks; at < s.tokens(layer); end = s.tokens(layer)) {
        const int n = smaller(step, end - at);
        const token_view<float> view(rows.data(), n, shape.kv_heads, dim);
        s.dequantize(layer, role, at, view);
        for (int t = 0; t < n; ++t)
            for (int h = 0; h < shape.kv_heads; ++h) f(h, at + t, view.at(t, h));
        at += n;
        if (at == sinks) at = first;
    }
}

}  // namespace detail

/// Scores that prefer short keys.
inline std::vector<float> key_norm_scores(const sequence& s, int layer) {
    const cache_shape& shape = detail::sequence_access::cache(s).shape(layer);
    const auto tokens = static_cast<std::size_t>(s.tokens(layer));
    std::vector<float> scores(static_cast<std::size_t>(shape.kv_heads) * tokens);
    detail::for_each_row(s, layer, tensor::key, [&](int h, int t, const float* k) {
        double sum = 0.0;
        for (int c = 0; c < shape.head_dim; ++c) sum += static_cast<double>(k[c]) * static_cast<double>(k[c]);
        scores[static_cast<std::size_t>(h) * tokens + static_cast<std::size_t>(t)] =
            static_cast<float>(-std::sqrt(sum));
    });
    return scores;
}

/// Scores by the attention that queries as those of the calibration would give on average. Raises kvq::error
/// for a calibration without products. O(tokens * head_dim^2)
inline std::vector<float> expected_attention_scores(const sequence& s, int layer, const calibration& of) {
    const cache_shape& shape = detail::sequence_access::cache(s).shape(layer);
    const cache_shape& theirs = of.shape();
    detail::expect(of.has_products() && layer < theirs.layers && theirs.kv_heads == shape.kv_heads &&
                       theirs.head_dim == shape.head_dim,
                   "expected attention needs E[q q^T] of layer ", layer, " of this cache");
    const auto tokens = static_cast<std::size_t>(s.tokens(layer));
    const auto place = [&](int h, int t) {
        return static_cast<std::size_t>(h) * tokens + static_cast<std::size_t>(t);
    };
    std::vector<float> scores(static_cast<std::size_t>(shape.kv_heads) * tokens);
    const int dim = shape.head_dim;
    detail::for_each_row(s, layer, tensor::key, [&](int h, int t, const float* k) {
        double sum = 0.0;
        for (int i = 0; i < dim; ++i)
            for (int j = 0; j < dim; ++j)
                sum +=
                    static_cast<double>(k[i]) * of.query_product(layer, h, i, j) * static_cast<double>(k[j]);
        scores[place(h, t)] = static_cast<float>(sum / (2.0 * dim));
    });
    detail::for_each_row(s, layer, tensor::value, [&](int h, int t, const float* v) {
        double sum = 0.0;
        for (int c = 0; c < shape.dim(tensor::value); ++c)
            sum += static_cast<double>(v[c]) * static_cast<double>(v[c]);
        scores[place(h, t)] += static_cast<float>(0.5 * std::log(sum));
    });
    return scores;
}

/// Tokens of each layer, `mean` on average: the first one has (1 + steepness) times as many, the last one
/// (1 - steepness) times, in even steps. 0 <= steepness < 1.
inline std::vector<int> pyramid_counts(int layers, int mean, double steepness) {
    detail::expect(layers >= 1 && mean >= 1 && steepness >= 0.0 && steepness < 1.0, "a pyramid of ", layers,
                   " layers with ", mean, " tokens each, and a steepness of ", steepness);
    std::vector<int> counts;
    for (int i = 0; i < layers; ++i) {
        const double place = layers == 1 ? 0.0 : 1.0 - 2.0 * i / (layers - 1);
        counts.push_back(detail::larger(1, static_cast<int>(std::lround(mean * (1.0 + steepness * place)))));
    }
    return counts;
}

}}  // namespace kvq
