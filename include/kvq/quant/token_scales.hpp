// One scale per token, so that tokens divided by their token scales have equal sizes: x = r_t y, y of the
// same size in every token.
//
//   r_t = rms_c(x_tc / w_c),  w_c = rms_t(x_tc / r_t),      in turns; then scaled so that the largest r_t is
//                                                           31/16
//
// Contract: finite members only; token scales are in (0, 31/16]; tokens of zeros have the smallest one.
// Quotients are products of floats with a rounded inverse; their squares are exact in double and summed in a
// fixed order: the same bits everywhere.
// Source: the alternating standardisation of KVarN (variance of rows and columns), here without centring.
#pragma once

#include <cmath>

#include "encoders.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

/// 1 / w of a channel, or 0 for a channel of zeros, from a sum of squares over n tokens.
KVQ_HD inline float inverse_size(double squares, int n) noexcept {
    return squares > 0.0 ? static_cast<float>(smaller(std::sqrt(n / squares), 0x1p100)) : 0.0f;
}
/// A token scale after scaling: the largest one becomes 31/16, and none is smaller than the smallest stored
/// value.
KVQ_HD inline float scaled_token_scale(float token_scale, float largest) noexcept {
    return largest > 0.0f ? larger(rounded_quotient(token_scale, largest) * token_scale_float::largest,
                                   token_scale_float::smallest)
                          : token_scale_float::largest;
}
inline void normalize_token_scales(float* token_scales, int tokens) noexcept {
    float largest = 0.0f;
    for (int t = 0; t < tokens; ++t) largest = larger(largest, token_scales[t]);
    for (int t = 0; t < tokens; ++t) token_scales[t] = scaled_token_scale(token_scales[t], largest);
}

/// values: [tokens][dim], at most 1024 channels; token_scales: output, one token scale per token.
inline void fit_token_scales(const float* values, int tokens, int dim, float* token_scales,
                             int iterations = 8) noexcept {
    double sums[1024];
    float weights[1024];
    const auto square = [](float x, float by) {
        const auto y = static_cast<double>((is_finite(x) ? x : 0.0f) * by);
        return y * y;
    };
    for (int t = 0; t < tokens; ++t) token_scales[t] = 1.0f;
    for (int i = 0; i < iterations; ++i) {
        for (int c = 0; c < dim; ++c) sums[c] = 0.0;
        for (int t = 0; t < tokens; ++t) {
            const float inverse = 1.0f / token_scales[t];
            for (int c = 0; c < dim; ++c) sums[c] += square(values[t * dim + c], inverse);
        }
        for (int c = 0; c < dim; ++c) weights[c] = inverse_size(sums[c], tokens);
        for (int t = 0; t < tokens; ++t) {
            interleaved_sum sum;
            const auto add = [&](int c, int part) {
                sum.part[part] += square(values[t * dim + c], weights[c]);
            };
            int c = 0;
            for (; c + interleaved_sum::parts <= dim; c += interleaved_sum::parts)
                for (int k = 0; k < interleaved_sum::parts; ++k) add(c + k, k);
            for (int k = 0; c + k < dim; ++k) add(c + k, k);
            token_scales[t] = static_cast<float>(std::sqrt(sum.total() / dim));
        }
        normalize_token_scales(token_scales, tokens);
    }
}

}}}  // namespace kvq::detail
