// Quantizes values that are fitted together: fits grids, stores their parameters, replaces values by codes.
//
//   1. fit      a grid per set of values, from finite members                       (quant/encoders.hpp)
//   2. store    biases first, then scales that reach from the stored bias to the grid's end
//   3. round    code = round_half_even((y - bias) / scale) from the stored parameters, token by token; with
//               feedback (quant/ error_feedback.hpp), y is moved by the weighted errors of later channels
//   4. correct  for encoders that correct means: biases again, moved by the mean error of the codes
//
// A set is a channel over all tokens of a group (per_channel), or a group of channels of one token
// (per_token).
// Contract: with `enclosing`, step 2 puts every finite member inside its set's grid (biases down, scales up);
// with min_max up to the rounding of the stored parameters (quant/encoders.hpp).
#pragma once

#include <cstddef>

#include "../core/shape.hpp"
#include "grid_keeper.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

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

/// y: [tokens][channels], replaced by codes. per_set: neighbouring channels of a set. top(c): largest code of
/// channel c; 0 stores its mean alone. store.biases(p, n, rounding) and store.scales(...): write n parameters
/// p of sets 0 to n - 1, and replace them by what is stored.
template <class Store, class Encoder, class Top>
void quantize_group(const Encoder& encoder, block_id id, float* y, int tokens, int channels, int per_set,
                    Top top, const Store& store) {
    const int sets = ceil_div(channels, per_set);
    float members[most_quantized], codes[most_quantized], biases[most_quantized], scales[most_quantized];
    const auto gather = [&](int first) {
        const int end = smaller(first + per_set, channels);
        int n = 0;
        for (int t = 0; t < tokens; ++t)
            for (int c = first; c < end; ++c) {
                const float x = y[t * channels + c];
                if (is_finite(x)) members[n++] = x;
            }
        return n;
    };
    for (int s = 0; s < sets; ++s) {
        const int first = s * per_set, n = gather(first);
        grid_range r;
        if (n > 0) r = top(first) > 0 ? encoder.fit(members, n, top(first), codes) : mean_of(members, n);
        biases[s] = r.first;
        scales[s] = r.last;
    }
    store.biases(biases, sets, Encoder::rounding);
    for (int s = 0; s < sets; ++s) {
        const int largest = top(s * per_set);
        scales[s] = largest > 0 ? (scales[s] - biases[s]) / static_cast<float>(largest) : 0.0f;
    }
    store.scales(scales, sets, Encoder::rounding);

    float* const inverses = codes;
    for (int s = 0; s < sets; ++s) inverses[s] = scales[s] > 0.0f ? 1.0f / scales[s] : 0.0f;
    // Only a mean that is corrected needs its errors.
    constexpr int summed = Encoder::corrects_mean ? most_quantized : 1;
    [[maybe_unused]] double errors[summed] = {};
    [[maybe_unused]] int finite[summed] = {};
    for (int t = 0; t < tokens; ++t) {
        constexpr bool feeds_back = requires { encoder.feedback_row(id, channels, 0); };
        double carried[most_quantized];
        if constexpr (feeds_back)
            for (int c = 0; c < channels; ++c) carried[c] = 0.0;
        for (int c = channels - 1; c >= 0; --c) {
            const int s = c / per_set;
            float& x = y[t * channels + c];
            float wanted = x;
            if constexpr (feeds_back) wanted += static_cast<float>(carried[c]);
            const int code = affine_code(wanted, biases[s], inverses[s], top(c));
            [[maybe_unused]] const float error =
                is_finite(x) ? x - affine_value(code, scales[s], biases[s]) : 0.0f;
            if constexpr (feeds_back)
                if (const float* const row = encoder.feedback_row(id, channels, c))
                    for (int j = 0; j < c; ++j)
                        carried[j] += static_cast<double>(row[j]) * static_cast<double>(error);
            if constexpr (Encoder::corrects_mean) {
                errors[s] += static_cast<double>(error);
                finite[s] += is_finite(x);
            }
            x = static_cast<float>(code);
        }
    }
    if constexpr (Encoder::corrects_mean) {
        for (int s = 0; s < sets; ++s)
            if (finite[s] > 0)
                biases[s] = static_cast<float>(static_cast<double>(biases[s]) + errors[s] / finite[s]);
        store.biases(biases, sets, corrected_rounding<Encoder>);
    }
}

}}}  // namespace kvq::detail
