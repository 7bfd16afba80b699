// One factor per token such that tokens, divided by it, look alike: x = r_t y, y of the same size in every token.
//
//   r_t = rms_c(x_tc / w_c),  w_c = rms_t(x_tc / r_t),      by turns; then scaled so that the largest r_t is 31/16
//
// Contract: finite members only; factors are in (0, 31/16], those of tokens without a member other than zero are the
// smallest. Sums are taken in double over exact products (squares of floats), in a fixed order: the same bits everywhere.
// Source: the alternating standardisation of KVarN (variance of rows and columns), here without centring.
#pragma once

#include <cmath>

#include "encoders.hpp"

namespace kvq::inline v0_1::detail {

/// 1 / w of a channel, or 0 for one of zeros, from a sum of squares over n tokens.
KVQ_HD inline double inverse_size(double squares, int n) noexcept {
    return squares > 0.0 ? std::sqrt(n / squares) : 0.0;
}
/// A factor such that the largest one is 31/16.
KVQ_HD inline float scaled_factor(float factor, float largest) noexcept {
    return largest > 0.0f ? larger(factor / largest * factor_float::largest, factor_float::smallest)
                          : factor_float::largest;
}

/// values: [tokens][dim], at most 1024 channels; factors: tokens floats.
inline void fit_token_factors(const float* values, int tokens, int dim, float* factors,
                              int iterations = 8) noexcept {
    double sums[1024];
    for (int t = 0; t < tokens; ++t) factors[t] = 1.0f;
    for (int c = 0; c < dim; ++c) sums[c] = 0.0;
    for (int i = 0; i < iterations; ++i) {
        // sums[c]: 1 / w_c^2 from here to the end of the loop over tokens.
        for (int c = 0; c < dim; ++c) sums[c] = 0.0;
        for (int t = 0; t < tokens; ++t) {
            const double inverse = 1.0 / static_cast<double>(factors[t]);
            for (int c = 0; c < dim; ++c) {
                const float x = values[t * dim + c];
                const double y = static_cast<float>((is_finite(x) ? static_cast<double>(x) : 0.0) * inverse);
                sums[c] += y * y;
            }
        }
        for (int c = 0; c < dim; ++c) sums[c] = inverse_size(sums[c], tokens);
        for (int t = 0; t < tokens; ++t) {
            interleaved_sum sum;
            const auto add = [&](int c, int part) {
                const float x = values[t * dim + c];
                const double y = static_cast<float>((is_finite(x) ? static_cast<double>(x) : 0.0) * sums[c]);
                sum.part[part] += y * y;
            };
            int c = 0;
            for (; c + interleaved_sum::parts <= dim; c += interleaved_sum::parts)
                for (int k = 0; k < interleaved_sum::parts; ++k) add(c + k, k);
            for (int k = 0; c + k < dim; ++k) add(c + k, k);
            factors[t] = static_cast<float>(std::sqrt(sum.total() / dim));
        }
        float largest = 0.0f;
        for (int t = 0; t < tokens; ++t) largest = larger(largest, factors[t]);
        for (int t = 0; t < tokens; ++t) factors[t] = scaled_factor(factors[t], largest);
    }
}

}  // namespace kvq::inline v0_1::detail
