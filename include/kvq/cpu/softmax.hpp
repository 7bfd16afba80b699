// One tile of an online softmax, in powers of two: scores become weights, the running maximum and sum are
// updated.
//
//   m' = max(m, max s),  w = 2^(s - m'),  sum' = sum * 2^(m - m') + sum of w,   returns 2^(m - m')
//
// Contract: exp2 has a relative error below 3e-7 for arguments in [-126, 0]; below that the weight is exactly
// 0. A score of NaN or +infinity makes the sum of its row NaN; the weights of the tile are then 0, so that no
// product sees them.
// Source: online softmax, Milakov & Gimelshein, arXiv 1805.02867, algorithm 3.
#pragma once

#include <limits>

#include "../core/bits.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// 2^x for x <= 0. NaN stays NaN, whatever Lanes::larger makes of it.
template <class Lanes>
KVQ_INLINE typename Lanes::floats exp2_negative(typename Lanes::floats x) {
    constexpr bool scales = requires { Lanes::scale_by_power(x, x); };
    typename Lanes::floats f = x;
    typename Lanes::ints whole{};
    if constexpr (scales) {
        f = Lanes::distance_to_whole(x);
    } else {
        const auto bounded = Lanes::larger(x, Lanes::splat_float(-126.0f));
        whole = Lanes::round(bounded);
        f = Lanes::subtract(x, Lanes::to_floats(whole));
    }
    auto p = Lanes::splat_float(1.540353039e-4f);
    p = Lanes::multiply_add(p, f, Lanes::splat_float(1.333355815e-3f));
    p = Lanes::multiply_add(p, f, Lanes::splat_float(9.618129108e-3f));
    p = Lanes::multiply_add(p, f, Lanes::splat_float(5.550410866e-2f));
    p = Lanes::multiply_add(p, f, Lanes::splat_float(2.402265070e-1f));
    p = Lanes::multiply_add(p, f, Lanes::splat_float(6.931471806e-1f));
    p = Lanes::multiply_add(p, f, Lanes::splat_float(1.0f));
    if constexpr (scales)
        return Lanes::keep_unless_below(Lanes::scale_by_power(p, Lanes::subtract(x, f)), x, -126.0f);
    const auto power = Lanes::as_floats(Lanes::template shift_left<23>(Lanes::add(whole, Lanes::splat(127))));
    return Lanes::keep_unless_below(Lanes::multiply(p, power), x, -126.0f);
}

/// Columns of a page that one float adds up: a longer sum would round away small weights behind a large one.
inline constexpr int sum_columns = 512;

/// Turns scores [0, n) of `Rows` rows, `stride` apart, into weights, in place; updates max and sum. factor:
/// scale of a row's earlier weights. Rows are processed side by side, so that none waits for its own maximum.
template <class Lanes, int Rows>
void softmax_tile(float* scores, std::ptrdiff_t stride, int n, float* max, float* sum, float* factor) {
    constexpr float lowest = -std::numeric_limits<float>::infinity();
    using floats = typename Lanes::floats;
    floats shift[Rows], total[Rows];
    KVQ_UNROLL
    for (int r = 0; r < Rows; ++r) shift[r] = Lanes::splat_float(lowest);
    int i = 0;
    for (; i + Lanes::width <= n; i += Lanes::width) {
        KVQ_UNROLL
        for (int r = 0; r < Rows; ++r)
            shift[r] = Lanes::larger(shift[r], Lanes::load_floats(scores + r * stride + i));
    }
    float top[Rows], weights[Rows];
    KVQ_UNROLL
    for (int r = 0; r < Rows; ++r) {
        top[r] = detail::larger(max[r], Lanes::largest(shift[r]));
        for (int k = i; k < n; ++k) top[r] = detail::larger(top[r], scores[r * stride + k]);
        // While all keys are hidden, the maximum is replaced by 0, so that -infinity minus it gives the
        // weight 0.
        shift[r] = Lanes::splat_float(top[r] == lowest ? 0.0f : top[r]);
        weights[r] = 0.0f;
    }
    for (i = 0; i + Lanes::width <= n;) {
        KVQ_UNROLL
        for (int r = 0; r < Rows; ++r) total[r] = Lanes::splat_float(0.0f);
        for (const int end = detail::smaller(n, i + sum_columns); i + Lanes::width <= end;
             i += Lanes::width) {
            KVQ_UNROLL
            for (int r = 0; r < Rows; ++r) {
                float* const at = scores + r * stride + i;
                const auto w = exp2_negative<Lanes>(Lanes::subtract(Lanes::load_floats(at), shift[r]));
                Lanes::store_floats(at, w);
                total[r] = Lanes::add(total[r], w);
            }
        }
        KVQ_UNROLL
        for (int r = 0; r < Rows; ++r) weights[r] += Lanes::sum(total[r]);
    }
    const auto one_weight = [](float x) {
        float all[Lanes::width];
        Lanes::store_floats(all, exp2_negative<Lanes>(Lanes::splat_float(x)));
        return all[0];
    };
    KVQ_UNROLL
    for (int r = 0; r < Rows; ++r) {
        for (int k = i; k < n; ++k) {
            float& score = scores[r * stride + k];
            weights[r] += score = one_weight(score - (top[r] == lowest ? 0.0f : top[r]));
        }
        if (weights[r] != weights[r])
            for (int k = 0; k < n; ++k) scores[r * stride + k] = 0.0f;
        factor[r] = top[r] > max[r] ? one_weight(max[r] == lowest ? -1e30f : max[r] - top[r]) : 1.0f;
        sum[r] = sum[r] * factor[r] + weights[r];
        max[r] = top[r];
    }
}

}}}  // namespace kvq::kernels
