// One tile of an online softmax, in powers of two: scores become weights, the running maximum and sum move on.
//
//   m' = max(m, max s),  w = 2^(s - m'),  sum' = sum * 2^(m - m') + sum of w,   returns 2^(m - m')
//
// Contract: exp2 has a relative error below 3e-7 for arguments in [-126, 0]; below that the weight is exactly 0.
// Source: online softmax, Milakov & Gimelshein, arXiv 1805.02867, algorithm 3.
#pragma once

#include <limits>

#include "../../core/bits.hpp"

namespace kvq::inline v0_1::kernels {

/// 2^x for x <= 0.
template <class Lanes>
KVQ_INLINE typename Lanes::floats exp2_negative(typename Lanes::floats x) {
    const auto bounded = Lanes::max(x, Lanes::splat_float(-126.0f));
    const auto whole = Lanes::round(bounded);
    const auto f = Lanes::subtract(bounded, Lanes::to_floats(whole));
    auto p = Lanes::splat_float(1.540353039e-4f);
    p = Lanes::multiply_add(p, f, Lanes::splat_float(1.333355815e-3f));
    p = Lanes::multiply_add(p, f, Lanes::splat_float(9.618129108e-3f));
    p = Lanes::multiply_add(p, f, Lanes::splat_float(5.550410866e-2f));
    p = Lanes::multiply_add(p, f, Lanes::splat_float(2.402265070e-1f));
    p = Lanes::multiply_add(p, f, Lanes::splat_float(6.931471806e-1f));
    p = Lanes::multiply_add(p, f, Lanes::splat_float(1.0f));
    const auto power = Lanes::as_floats(Lanes::template shift_left<23>(Lanes::add(whole, Lanes::splat(127))));
    return Lanes::keep_above(Lanes::multiply(p, power), x, -126.0f);
}

/// Scores [0, n) become weights in place.
template <class Lanes>
float softmax_tile(float* scores, int n, float& max, float& sum) {
    constexpr float lowest = -std::numeric_limits<float>::infinity();
    float top = max;
    int i = 0;
    auto tops = Lanes::splat_float(lowest);
    for (; i + Lanes::width <= n; i += Lanes::width) tops = Lanes::max(tops, Lanes::load_floats(scores + i));
    top = detail::larger(top, Lanes::largest(tops));
    for (; i < n; ++i) top = detail::larger(top, scores[i]);
    if (top == lowest) {
        for (int k = 0; k < n; ++k) scores[k] = 0.0f;
        return 1.0f;
    }
    const auto shift = Lanes::splat_float(top);
    auto total = Lanes::splat_float(0.0f);
    for (i = 0; i + Lanes::width <= n; i += Lanes::width) {
        const auto w = exp2_negative<Lanes>(Lanes::subtract(Lanes::load_floats(scores + i), shift));
        Lanes::store_floats(scores + i, w);
        total = Lanes::add(total, w);
    }
    float weights = Lanes::sum(total);
    for (; i < n; ++i) {
        float one[Lanes::width];
        Lanes::store_floats(one, exp2_negative<Lanes>(Lanes::splat_float(scores[i] - top)));
        scores[i] = one[0];
        weights += one[0];
    }
    float factor = 1.0f;
    if (top > max) {
        float one[Lanes::width];
        Lanes::store_floats(one,
                            exp2_negative<Lanes>(Lanes::splat_float(max == lowest ? -1e30f : max - top)));
        factor = one[0];
    }
    sum = sum * factor + weights;
    max = top;
    return factor;
}

}  // namespace kvq::inline v0_1::kernels
