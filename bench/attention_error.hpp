// What a quantized cache does to attention, in double: relative error of the output, KL divergence of the
// weights, worst query.
//
//   out   = sqrt(sum |o' - o|^2 / sum |o|^2) over the queries of a head         kld = mean KL(p || p'), nats
//   worst = largest |o' - o| / |o| of one query
//
// A query sees the keys up to its own position. A window of `sinks` first and `recent` last tokens *as seen
// from that query* is exact: what a sequence has while it decodes.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace bench {

struct error_sums {
    double error = 0.0, power = 0.0, divergence = 0.0, worst = 0.0;
    int queries = 0;

    void add(const double* exact, const double* other, int dim, double kl) {
        double e = 0.0, p = 0.0;
        for (int c = 0; c < dim; ++c) {
            e += (other[c] - exact[c]) * (other[c] - exact[c]);
            p += exact[c] * exact[c];
        }
        error += e;
        power += p;
        divergence += kl;
        worst = std::max(worst, std::sqrt(e / std::max(p, 1e-300)));
        ++queries;
    }
};

/// K and V of one head, in double: keys [channel][token], values [token][channel].
struct head_values {
    int tokens, dim, value_dim;
    std::vector<double> keys, values;

    head_values(int n, int key_dim, int v_dim)
        : tokens(n),
          dim(key_dim),
          value_dim(v_dim),
          keys(static_cast<std::size_t>(n) * static_cast<std::size_t>(key_dim)),
          values(static_cast<std::size_t>(n) * static_cast<std::size_t>(v_dim)) {}

    double& key(int token, int channel) {
        return keys[static_cast<std::size_t>(channel) * static_cast<std::size_t>(tokens) +
                    static_cast<std::size_t>(token)];
    }
    double& value(int token, int channel) {
        return values[static_cast<std::size_t>(token * value_dim + channel)];
    }
    const double* value_row(int token) const {
        return values.data() + static_cast<std::ptrdiff_t>(token) * value_dim;
    }

    /// q . k / sqrt(dim) for tokens [0, seen).
    void logits(const float* q, int seen, double* out) const {
        std::fill(out, out + seen, 0.0);
        const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
        for (int c = 0; c < dim; ++c) {
            const double f = static_cast<double>(q[c]) * scale;
            const double* const row = keys.data() + static_cast<std::ptrdiff_t>(c) * tokens;
            for (int i = 0; i < seen; ++i) out[i] += f * row[i];
        }
    }
};

/// One query's exact attention.
struct exact_query {
    const float* q = nullptr;
    int seen = 0;  ///< keys it sees
    std::vector<double> logits, weights, output;
    double log_sum = 0.0;  ///< log of the sum of exp(logits)
};

inline double log_sum_exp(const std::vector<double>& logits, int n) {
    const double top = *std::max_element(logits.begin(), logits.begin() + n);
    double sum = 0.0;
    for (int i = 0; i < n; ++i) sum += std::exp(logits[static_cast<std::size_t>(i)] - top);
    return top + std::log(sum);
}

inline exact_query make_exact(const head_values& head, const float* q, int seen) {
    exact_query e;
    e.q = q;
    e.seen = seen;
    e.logits.resize(static_cast<std::size_t>(seen));
    head.logits(q, seen, e.logits.data());
    e.log_sum = log_sum_exp(e.logits, seen);
    e.output.assign(static_cast<std::size_t>(head.value_dim), 0.0);
    for (int i = 0; i < seen; ++i) {
        const double p = std::exp(e.logits[static_cast<std::size_t>(i)] - e.log_sum);
        e.weights.push_back(p);
        for (int c = 0; c < head.value_dim; ++c)
            e.output[static_cast<std::size_t>(c)] += p * head.value_row(i)[c];
    }
    return e;
}

/// Adds one query of the quantized head; `logits` are those of the quantized keys, tokens of the window are
/// taken from `exact`.
inline void add_query(const head_values& exact, const head_values& quantized, const exact_query& e,
                      std::vector<double> logits, int sinks, int recent, error_sums& sums) {
    const int first_recent = std::max(e.seen - recent, 0);
    const auto kept = [&](int i) { return i < sinks || i >= first_recent; };
    for (int i = 0; i < e.seen; ++i)
        if (kept(i)) logits[static_cast<std::size_t>(i)] = e.logits[static_cast<std::size_t>(i)];
    const double log_sum = log_sum_exp(logits, e.seen);
    std::vector<double> output(static_cast<std::size_t>(exact.value_dim), 0.0);
    double kl = 0.0;
    for (int i = 0; i < e.seen; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const double log_p = e.logits[at] - e.log_sum, log_other = logits[at] - log_sum;
        kl += e.weights[at] * (log_p - log_other);
        const double p = std::exp(log_other);
        const double* const v = kept(i) ? exact.value_row(i) : quantized.value_row(i);
        for (int c = 0; c < exact.value_dim; ++c) output[static_cast<std::size_t>(c)] += p * v[c];
    }
    sums.add(e.output.data(), output.data(), exact.value_dim, kl);
}

}  // namespace bench
