// Error feedback across channels: the next channels correct the rounding error of one channel, weighted by
// the queries' correlations.
//
//   logit error of a token = q^T e,  E[(q^T e)^2] = e^T H e = |R e|^2,
//     H = C + damping * mean(diag C) * 1 = R^T R
//   C_ij = keep * E[q_i q_j],  C_ii = E[q_i^2],
//     keep = 1 - (correlations of n / 4 random queries) / (measured correlations)
//   channels from the last place to the first:
//     code_i = round((x_i + sum_{j>i} R_ij / R_ii e_j - bias_i) / scale_i),
//   e_j = x_j - x^_j
//
// Contract: the block format and dequantizing are those of the inner encoder; only codes change. Without
// matrices, or for heads without queries, the result is the inner encoder's. The error of a channel may
// exceed half a step; e^T H e falls. With few queries, correlations that may be chance are shrunk, down to
// zero (docs/lab/presets.md). Sums are double over exact products, in a fixed order. Cost: head_dim^2 / 2
// products per token.
// Source: GPTQ, arXiv 2210.17323, section 3.2, in the form of successive rounding in a triangular basis
// (Babai); shrinkage of correlations: Schaefer & Strimmer 2005, target D.
#pragma once

#include <cmath>
#include <concepts>
#include <memory>

#include "../core/tagged_vector.hpp"
#include "../core/text.hpp"
#include "calibration.hpp"
#include "encoders.hpp"
#include "width_allocation.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// R_ij / R_ii for every layer and head, by places, column after column.
class feedback_matrices {
public:
    /// statistics: with products. plan: orders of channels that the scheme uses, or null for their own order.
    /// Raises kvq::error without products, or when damping leaves a matrix that is not positive. O(blocks *
    /// head_dim^3).
    explicit feedback_matrices(const calibration& statistics, const width_plan* plan = nullptr,
                               double damping = 0.3)
        : heads_(statistics.shape().kv_heads), dim_(statistics.shape().head_dim) {
        detail::expect(statistics.has_products(),
                       "error feedback needs a calibration with products of queries");
        detail::expect(damping > 0.0, "damping must be positive, got ", damping);
        const int layers = statistics.shape().layers;
        detail::expect(!plan || (plan->head_dim == dim_ && plan->kv_heads == heads_ &&
                                 static_cast<int>(plan->blocks.size()) == layers * heads_),
                       "a plan of another shape than the calibration");
        const auto n = static_cast<std::size_t>(dim_);
        coefficients_.resize(static_cast<std::size_t>(layers * heads_) * n * n);
        detail::tagged_vector<double> r(n * n);
        for (int layer = 0; layer < layers; ++layer)
            for (int head = 0; head < heads_; ++head) {
                if (statistics.queries(layer, head) == 0) continue;
                const int number = layer * heads_ + head;
                const auto block = static_cast<std::size_t>(number);
                if (!fill_damped(statistics, plan, {layer, head}, block, damping, r)) continue;
                detail::expect(factorize(r, n), "products of queries of layer ", layer, ", head ", head,
                               " are not positive: more damping than ", damping, " is needed");
                for (std::size_t i = 0; i < n; ++i)
                    for (std::size_t j = i + 1; j < n; ++j)
                        coefficients_[(block * n + j) * n + i] =
                            static_cast<float>(r[i * n + j] / r[i * n + i]);
            }
    }

    /// Weights of the error of place i for the places before it: R_ji / R_jj for j < i. Null if the block has
    /// no matrix.
    const float* row(block_id id, int dim, int i) const noexcept {
        if (id.layer < 0 || id.head < 0 || id.head >= heads_ || dim != dim_) return nullptr;
        const auto n = static_cast<std::size_t>(dim_);
        const auto at =
            (static_cast<std::size_t>(id.layer * heads_ + id.head) * n + static_cast<std::size_t>(i)) * n;
        return at + n <= coefficients_.size() ? coefficients_.data() + at : nullptr;
    }

    int kv_heads() const noexcept { return heads_; }

    /// Raises kvq::error if the matrices belong to another shape.
    void check(const cache_shape& s) const {
        const auto n = static_cast<std::size_t>(dim_);
        detail::expect(s.kv_heads == heads_ && s.head_dim == dim_ &&
                           coefficients_.size() == static_cast<std::size_t>(s.layers * heads_) * n * n,
                       "error feedback for ", coefficients_.size() / (n * n), " blocks of ", dim_,
                       " channels in a cache of ", s.layers, " layers, ", s.kv_heads, " heads of ",
                       s.head_dim);
    }

private:
    /// Queries of neighbouring tokens and of heads that share keys are alike: this many count as one.
    static constexpr double alike = 4.0;

    /// The part of a head's correlations that is more than chance. The correlations r of n independent
    /// queries have a variance of (1 - r^2)^2 / n.
    double kept_correlation(const calibration& statistics, const block_id& id) const {
        double chance = 0.0, size = 0.0;
        for (int i = 0; i < dim_; ++i)
            for (int j = 0; j < i; ++j) {
                const double power = detail::rounded_product(statistics.query_power(id.layer, id.head, i),
                                                             statistics.query_power(id.layer, id.head, j));
                const double product = statistics.query_product(id.layer, id.head, i, j);
                if (power == 0.0) continue;
                const double r2 = detail::rounded_product(product, product) / power;
                size += r2;
                chance += detail::rounded_product(1.0 - r2, 1.0 - r2);
            }
        chance *= alike / statistics.queries(id.layer, id.head);
        return size > chance ? 1.0 - chance / size : 0.0;
    }

    /// H of a head, by places; false if all queries are zero.
    bool fill_damped(const calibration& statistics, const width_plan* plan, const block_id& id,
                     std::size_t block, double damping, detail::tagged_vector<double>& h) const {
        const double keep = kept_correlation(statistics, id);
        double mean = 0.0;
        for (int c = 0; c < dim_; ++c) mean += statistics.query_power(id.layer, id.head, c) / dim_;
        if (mean == 0.0) return false;
        const auto channel = [&](std::size_t place) {
            return plan ? static_cast<int>(plan->blocks[block].order[place]) : static_cast<int>(place);
        };
        const auto n = static_cast<std::size_t>(dim_);
        for (std::size_t i = 0; i < n; ++i)
            for (std::size_t j = 0; j < n; ++j)
                h[i * n + j] = detail::rounded_product(
                                   i == j ? 1.0 : keep,
                                   statistics.query_product(id.layer, id.head, channel(i), channel(j))) +
                               (i == j ? detail::rounded_product(damping, mean) : 0.0);
        return true;
    }

    /// Cholesky: replaces the upper triangle of H = R^T R by R, row after row; false if H is not positive.
    static bool factorize(detail::tagged_vector<double>& r, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) {
            for (std::size_t k = 0; k < i; ++k)
                for (std::size_t j = i; j < n; ++j)
                    r[i * n + j] -= detail::rounded_product(r[k * n + i], r[k * n + j]);
            if (!(r[i * n + i] > 0.0)) return false;
            const double root = std::sqrt(r[i * n + i]);
            for (std::size_t j = i; j < n; ++j) r[i * n + j] /= root;
        }
        return true;
    }

    int heads_, dim_;
    detail::tagged_vector<float> coefficients_;
};

/// Any encoder, with feedback for blocks that have matrices. Alone: the encoder while there are no matrices.
template <class Encoder, class Alone = Encoder>
struct error_feedback : Encoder {
    static_assert(Encoder::rounding == Alone::rounding && Encoder::corrects_mean == Alone::corrects_mean,
                  "kvq::error_feedback: both encoders must round parameters and correct means alike");
    static short_text name() {
        return (std::same_as<Encoder, Alone> ? "" : Alone::name()) + Encoder::name() + "-feedback";
    }

    std::shared_ptr<const feedback_matrices> matrices;

    grid_range fit(const float* x, int n, int top, float* codes) const noexcept {
        return matrices ? Encoder::fit(x, n, top, codes) : Alone::fit(x, n, top, codes);
    }

    error_feedback() = default;
    explicit error_feedback(std::shared_ptr<const feedback_matrices> m) : matrices(std::move(m)) {}
    /// Feedback if the statistics hold products of queries, else none. plan: orders of channels, or null.
    explicit error_feedback(const calibration& statistics, const width_plan* plan = nullptr,
                            double damping = 0.3) {
        if (statistics.has_products() && statistics.has_queries())
            matrices = std::make_shared<const feedback_matrices>(statistics, plan, damping);
    }

    /// Weights of an error in place i for places 0 to i - 1; null: no feedback.
    const float* feedback_row(block_id id, int dim, int i) const noexcept {
        return matrices ? matrices->row(id, dim, i) : nullptr;
    }
    /// Raises kvq::error if the matrices were made for other shapes.
    void check(const cache_shape& shape) const {
        if (matrices) matrices->check(shape);
    }
};

namespace detail {

/// An encoder made from the statistics, if it can use them; else a default one.
template <class Encoder>
Encoder make_encoder(const calibration& statistics, const width_plan* plan = nullptr) {
    if constexpr (std::constructible_from<Encoder, const calibration&, const width_plan*>)
        return Encoder(statistics, plan);
    else
        return Encoder{};
}

}  // namespace detail
}}  // namespace kvq
