// Divergence of the next-token distributions of two caches.
#pragma once

#include "matrix.hpp"

#include <algorithm>
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

// softmax of a row of logits (a view of the row). Differences and sums are in double, since the divergence of
// a good cache is far below the rounding of a float logit.
class distribution {
public:
    distribution() = default;
    explicit distribution(const Eigen::Ref<const Eigen::RowVectorXf>& logits)
        : logits_(logits.data()), size_(logits.size()) {
        const double most = logits.maxCoeff(&top_);
        double sum = 0.0;
        for_each_block(size_, [&](Eigen::Index first, Eigen::Index count) {
            Eigen::Array<double, Eigen::Dynamic, 1, 0, block, 1> above(count);
            for (Eigen::Index i = 0; i < count; ++i) {
                above[i] = static_cast<double>(logits_[first + i]) - most;
            }
            sum += above.exp().sum();
        });
        log_sum_ = most + std::log(sum);
    }

    Eigen::Index top() const { return top_; }
    double log_probability(int token) const { return static_cast<double>(logits_[token]) - log_sum_; }

    // KL divergence of another distribution from this one, in nats.
    double divergence(const distribution& other) const {
        const double shift = other.log_sum_ - log_sum_;
        const auto log_sum = static_cast<float>(log_sum_);
        double sum = 0.0;
        for_each_block(size_, [&](Eigen::Index first, Eigen::Index count) {
            // Probabilities are weights here: float is accurate enough.
            const Eigen::Array<float, Eigen::Dynamic, 1, 0, block, 1> probability =
                (Eigen::Map<const Eigen::ArrayXf>(logits_ + first, count) - log_sum).exp();
            Eigen::Array<double, Eigen::Dynamic, 1, 0, block, 1> terms(count);
            for (Eigen::Index i = 0; i < count; ++i) {
                const double ratio = static_cast<double>(logits_[first + i]) -
                                     static_cast<double>(other.logits_[first + i]) + shift;
                terms[i] = static_cast<double>(probability[i]) * ratio;
            }
            sum += terms.sum();
        });
        return sum;
    }

private:
    static constexpr Eigen::Index block = 512;

    template <class Visit>
    static void for_each_block(Eigen::Index count, const Visit& visit) {
        for (Eigen::Index first = 0; first < count; first += block) {
            visit(first, std::min(block, count - first));
        }
    }

    const float* logits_ = nullptr;
    Eigen::Index size_ = 0, top_ = 0;
    double log_sum_ = 0.0;
};

inline divergence_sums compare(const distribution& baseline, const distribution& other, int next_token) {
    return {1, -other.log_probability(next_token), baseline.divergence(other),
            baseline.top() == other.top() ? 1 : 0};
}

}  // namespace llama
