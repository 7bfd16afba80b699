// clipped<Inner, Permille>: each token is cut off at a quantile of its own magnitudes before another scheme.
//
//   tau_t = the value of rank floor(Permille / 1000 D) among |x_t|, from 0;
//     x^ = Inner(min(max(x, -tau), tau))
//   block = that of Inner
//
// Contract: that of Inner for the clipped values; NaN is no magnitude, and infinities are cut off.
// Source: OSCAR, arXiv 2605.17757, token-wise clip thresholds, with the quantiles of its published code: 0.96
// for keys, 0.92 for values.
#pragma once

#include <algorithm>
#include <cmath>
#include <kvq/schemes/concepts.hpp>
#include <string>
#include <vector>

namespace baselines {

template <kvq::foldable Inner, int Permille>
struct clipped : Inner {
    static_assert(Permille >= 0 && Permille <= 1000, "baselines::clipped: a quantile in thousandths");
    using attends_as = clipped;

    std::string name() const {
        const std::string inner = Inner::name();
        return "clipped" + std::to_string(Permille) + "-" + inner;
    }

    /// values: [tokens][dim], overwritten. Writes the whole block. Returns how many values were not finite.
    std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id& id, float* values,
                           std::byte* block) const {
        std::vector<float> magnitudes;
        std::uint32_t infinite = 0;
        for (int t = 0; t < s.tokens; ++t) {
            float* const token = values + t * s.dim;
            magnitudes.clear();
            for (int c = 0; c < s.dim; ++c)
                if (!std::isnan(token[c])) magnitudes.push_back(std::fabs(token[c]));
            if (magnitudes.empty()) continue;
            const int last = static_cast<int>(magnitudes.size()) - 1;
            const auto rank =
                magnitudes.begin() + std::min(last, static_cast<int>(magnitudes.size()) * Permille / 1000);
            std::nth_element(magnitudes.begin(), rank, magnitudes.end());
            if (!std::isfinite(*rank)) continue;
            for (int c = 0; c < s.dim; ++c) {
                infinite += std::isinf(token[c]);
                if (!std::isnan(token[c])) token[c] = std::clamp(token[c], -*rank, *rank);
            }
        }
        return Inner::quantize(s, id, values, block) + infinite;
    }
};

}  // namespace baselines
