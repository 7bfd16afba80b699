// Quantizes the channels of one group of tokens: fits grids, stores their parameters, replaces values by codes.
//
//   1. fit      a grid per channel, from finite members                       (quant/encoders.hpp)
//   2. store    biases first, then scales that reach from the stored bias to the grid's end
//   3. round    code = round_half_even((y - bias) / scale) from the stored parameters, token by token; with feedback (quant/
//               error_feedback.hpp), y is moved by the weighted errors of later channels
//   4. correct  for encoders that correct means: biases again, moved by the mean error of the codes
//
// Contract: with `enclosing`, step 2 puts every finite member inside its channel's grid (biases down, scales up); with min_max up to the
// rounding of the stored parameters (quant/encoders.hpp).
#pragma once

#include <cstddef>

#include "../core/shape.hpp"
#include "grid_keeper.hpp"

namespace kvq::inline KVQ_TAGGED::detail {

inline constexpr int most_quantized = 1024;            // tokens, channels: the size of scratch on the stack
inline constexpr int most_slots = 4 * most_quantized;  // groups of one token have four slots

/// Finite values are limited to +-2^100, so that no sum or quotient overflows.
inline constexpr float most_magnitude = 0x1p100f;
KVQ_HD constexpr float bound_magnitude(float x) noexcept {
    return larger(-most_magnitude, smaller(x, most_magnitude));
}
/// Limits the magnitudes of values; returns how many are not finite.
inline std::uint32_t bound_magnitudes(float* values, std::size_t n) noexcept {
    std::uint32_t not_finite = 0;
    for (std::size_t i = 0; i < n; ++i)
        if (is_finite(values[i]))
            values[i] = bound_magnitude(values[i]);
        else
            ++not_finite;
    return not_finite;
}

/// y: [tokens][stride], replaced by codes. top(c): largest code of channel c; 0 stores its mean alone.
template <class Parameters, class Encoder, class Top>
void quantize_channels(const Encoder& encoder, block_id id, float* y, int tokens, int channels, int stride,
                       Top top, std::byte* parameters, int groups, int slot_count, int group) {
    float line[most_quantized], codes[most_quantized], biases[most_quantized], scales[most_quantized];
    const auto gather = [&](int c) {
        int n = 0;
        for (int t = 0; t < tokens; ++t) {
            const float x = y[t * stride + c];
            if (is_finite(x)) line[n++] = x;
        }
        return n;
    };
    for (int c = 0; c < channels; ++c) {
        const int n = gather(c);
        grid_range r;
        if (n > 0) r = top(c) > 0 ? encoder.fit(line, n, top(c), codes) : mean_of(line, n);
        biases[c] = r.first;
        scales[c] = r.last;
    }
    Parameters::store_biases(parameters, groups, slot_count, group, biases, channels, Encoder::rounding);
    for (int c = 0; c < channels; ++c)
        scales[c] = top(c) > 0 ? (scales[c] - biases[c]) / static_cast<float>(top(c)) : 0.0f;
    Parameters::store_scales(parameters, groups, slot_count, group, scales, channels, Encoder::rounding);

    for (int c = 0; c < channels; ++c) codes[c] = scales[c] > 0.0f ? 1.0f / scales[c] : 0.0f;
    double errors[most_quantized] = {};
    int finite[most_quantized] = {};
    for (int t = 0; t < tokens; ++t) {
        constexpr bool feeds_back = requires { encoder.feedback_row(id, channels, 0); };
        double carried[most_quantized];
        if constexpr (feeds_back)
            for (int c = 0; c < channels; ++c) carried[c] = 0.0;
        for (int c = channels - 1; c >= 0; --c) {
            float& x = y[t * stride + c];
            float wanted = x;
            if constexpr (feeds_back) wanted += static_cast<float>(carried[c]);
            const int code = affine_code(wanted, biases[c], codes[c], top(c));
            const float error = is_finite(x) ? x - affine_value(code, scales[c], biases[c]) : 0.0f;
            if constexpr (feeds_back)
                if (const float* const row = encoder.feedback_row(id, channels, c))
                    for (int j = 0; j < c; ++j)
                        carried[j] += static_cast<double>(row[j]) * static_cast<double>(error);
            errors[c] += static_cast<double>(error);
            finite[c] += is_finite(x);
            x = static_cast<float>(code);
        }
    }
    for (int c = 0; c < channels; ++c)
        if (finite[c] > 0)
            biases[c] = static_cast<float>(static_cast<double>(biases[c]) + errors[c] / finite[c]);
    if constexpr (Encoder::corrects_mean)
        Parameters::store_biases(parameters, groups, slot_count, group, biases, channels,
                                 corrected_rounding<Encoder>);
}

}  // namespace kvq::inline KVQ_TAGGED::detail
