// How far the next-token distribution of one cache is from that of another.
#pragma once

#include "checkpoint.hpp"

#include <cmath>

namespace llama {

// Sums over predicted tokens.
struct divergence_sums {
    int tokens = 0;
    double negative_log_likelihood = 0.0;
    double kl_divergence = 0.0;
    int same_top = 0;

    void operator+=(const divergence_sums& other) {
        tokens += other.tokens;
        negative_log_likelihood += other.negative_log_likelihood;
        kl_divergence += other.kl_divergence;
        same_top += other.same_top;
    }
};

// In double, since the divergence of a good cache is far below the rounding of a float logit.
struct distribution {
    Eigen::ArrayXd log_probability;
    Eigen::ArrayXd probability;
    Eigen::Index top = 0;

    explicit distribution(const Eigen::Ref<const Eigen::RowVectorXf>& logits)
        : log_probability(logits.transpose().cast<double>()) {
        log_probability -= log_probability.maxCoeff(&top);
        probability = log_probability.exp();
        const double sum = probability.sum();
        probability /= sum;
        log_probability -= std::log(sum);
    }
};

inline divergence_sums compare(const distribution& baseline, const distribution& other, int next_token) {
    const double divergence =
        (baseline.probability * (baseline.log_probability - other.log_probability)).sum();
    return {1, -other.log_probability[next_token], divergence, baseline.top == other.top ? 1 : 0};
}

}  // namespace llama
