// Asymmetric (affine) levels: x^ = scale * code + bias, code in [0, 2^B - 1].
//
//   bias  = round_down(min),   scale = round_up((max - bias) / (2^B - 1))       both to the stored parameter
//                                                                               type
//   code  = round_half_even((x - bias) / scale)
//
// Contract: rounding bias down and scale up puts the whole group inside the grid of the *stored* parameters,
// so
// |x - x^| <= scale/2 (plus float evaluation, about 1e-7 |x|) as long as min and (max - min) / (2^B - 1) are
// finite in the parameter type (float16: up to 65504) and magnitudes are at most 2^126. Larger ones saturate,
// so that every x^ is finite. A constant group dequantizes exactly if the parameter type can hold its value.
// NaN and infinities never set parameters; NaN is quantized as the value nearest zero, infinities saturate.
// Source: the min-max grid of KIVI (arXiv 2402.02750, eq. 2) and MLX, with directed rounding of the
// parameters.
#pragma once

#include "../core/rounding.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {

/// Larger magnitudes saturate: no range, and no value of a code, is infinite then.
inline constexpr float most_ranged = 0x1p126f;
KVQ_HD constexpr float bound_range(float x) noexcept { return larger(-most_ranged, smaller(x, most_ranged)); }

}  // namespace detail

/// Scale and bias as stored.
template <class P>
struct stored_parameters {
    P scale{};
    P bias{};
};

struct asymmetric {
    static constexpr bool has_bias = true;
    static constexpr int min_bits = 1;
    static constexpr const char* name = "affine";

    template <int Bits>
    static constexpr int top = (1 << Bits) - 1;
    /// Code that dequantizes to bias (symmetric levels: to zero).
    template <int Bits>
    static constexpr int zero_code = 0;

    /// Parameters for finite values in [lo, hi].
    template <int Bits, class P>
    KVQ_HD static constexpr stored_parameters<P> fit(float lo, float hi) noexcept {
        // The minimum of -0 and +0 depends on the order of comparisons; + 0 makes it +0.
        const P bias = detail::round_down<P>(detail::bound_range(lo + 0.0f));
        const float range = detail::bound_range(hi) - static_cast<float>(bias);
        if (!(range > 0.0f)) return {P(0.0f), bias};
        const float scale = detail::rounded_quotient(range, static_cast<float>(top<Bits>));
        return {detail::round_up_to<P>(detail::larger(scale, 1.17549435e-38f)), bias};
    }

    template <int Bits>
    KVQ_HD static constexpr int code(float x, float bias, float inverse) noexcept {
        return detail::affine_code(x, bias, inverse, top<Bits>);
    }

    template <int Bits>
    KVQ_HD static constexpr float value(int code, float scale, float bias) noexcept {
        return detail::affine_value(code, scale, bias);
    }
};

}}  // namespace kvq
