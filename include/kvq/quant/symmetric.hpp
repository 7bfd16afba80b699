// Symmetric levels: x^ = scale * (code - 2^(B-1)), code in [1, 2^B - 1].
//
//   scale = round_up(max|x| / (2^(B-1) - 1))       to the stored parameter type
//   code  = 2^(B-1) + round_half_even(x / scale)
//
// Contract: |x - x^| <= scale/2 (plus float evaluation) up to 2^126, larger magnitudes saturate; zero is
// exact. Needs at least 2 bits. NaN is quantized as zero, infinities saturate. The grid is that of symmetric
// INT8 per (token, head) caches, with rounding to nearest instead of truncation (truncation has four times
// the squared error).
#pragma once

#include "affine.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

struct symmetric {
    static constexpr bool has_bias = false;
    static constexpr int min_bits = 2;
    static constexpr const char* name = "int";

    template <int Bits>
    static constexpr int top = (1 << Bits) - 1;
    template <int Bits>
    static constexpr int zero_code = 1 << (Bits - 1);

    template <int Bits, class P>
    KVQ_HD static constexpr stored_parameters<P> fit(float lo, float hi) noexcept {
        const float largest = detail::bound_range(detail::larger(-lo, hi));
        if (!(largest > 0.0f)) return {P(0.0f), P(0.0f)};
        const float steps = static_cast<float>(top<Bits> - zero_code<Bits>);
        return {
            detail::round_up_to<P>(detail::larger(detail::rounded_quotient(largest, steps), 1.17549435e-38f)),
            P(0.0f)};
    }

    template <int Bits>
    KVQ_HD static constexpr int code(float x, float, float inverse) noexcept {
        constexpr int steps = top<Bits> - zero_code<Bits>;
        const float position = detail::rounded_product(x, inverse);
        const float magnitude = position < 0.0f ? -position : position;
        if (!(magnitude > 0.0f)) return zero_code<Bits>;
        const int level = magnitude >= static_cast<float>(steps) ? steps : detail::round_half_even(magnitude);
        return position < 0.0f ? zero_code<Bits> - level : zero_code<Bits> + level;
    }

    template <int Bits>
    KVQ_HD static constexpr float value(int code, float scale, float) noexcept {
        return detail::rounded_product(scale, static_cast<float>(code - zero_code<Bits>));
    }
};

}}  // namespace kvq
