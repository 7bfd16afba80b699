// Ranges of groups to parameters, and values to codes: quant/affine.hpp and quant/symmetric.hpp, a group or a
// value per lane.
//
//   lane_fit       parameters of a vector of groups, stored in a block; compiled once for a type of
//                  parameters
//   lane_codes     codes of a vector of values
//
// Contract: bit for bit the results of levels::fit and levels::code. Stored types other than float, float16
// and bfloat16 are fitted lane by lane. Scaled: values are float16 times 2^-112, which every step here undoes
// exactly. Codes need no clamping unless a wanted parameter exceeds the stored type, or a magnitude 2^126:
// with bias rounded down and scale rounded up, (x - bias) / scale is at most top * (1 + 2^-22), which rounds
// to top.
#pragma once

#include <cstddef>

#include "../../quant/affine.hpp"
#include "../../quant/symmetric.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Fits n groups with extremes lo and hi, and writes their parameters: scales at `to`, biases `section` bytes
/// behind them. bias, inverse (1 / scale, or 0): output, which may replace lo and hi. All four are whole
/// vectors. most: the largest parameters that were wanted so far. steps: steps of the grid on one side of
/// zero.
using range_fit = void (*)(const float* lo, const float* hi, int n, float steps, std::byte* to,
                           std::size_t section, float* bias, float* inverse, float* most);

template <class Lanes, class Levels, float_format P>
struct lane_fit {
    static void run(const float* lo, const float* hi, int n, float steps, std::byte* to, std::size_t section,
                    float* bias, float* inverse, float* most) {
        floats all = Lanes::load_floats(most);
        for (int i = 0; i < n; i += Lanes::width)
            all = Lanes::larger(all, fit(lo + i, hi + i, detail::smaller(Lanes::width, n - i), steps,
                                         to + i * int{sizeof(P)}, section, bias + i, inverse + i));
        Lanes::store_floats(most, all);
    }

private:
    using floats = typename Lanes::floats;
    using ints = typename Lanes::ints;
    static constexpr float limit = detail::max_finite<P>;

    /// A vector of groups; returns the larger parameters that were wanted.
    static KVQ_INLINE floats fit(const float* low, const float* high, int n, float steps, std::byte* to,
                                 std::size_t section, float* bias_out, float* inverse_out) {
        floats lo = Lanes::load_floats(low), hi = Lanes::load_floats(high);
        const floats none = Lanes::splat_float(0.0f);
        floats range = hi, most = none, bias = none;
        if constexpr (limit > detail::most_ranged) {  // otherwise parameters saturate below it
            most = Lanes::larger(Lanes::subtract(none, lo), hi);
            lo = bounded(lo, detail::most_ranged);
            hi = bounded(hi, detail::most_ranged);
        }
        if constexpr (Levels::has_bias) {
            // + 0 turns -0 into +0, as in asymmetric::fit.
            lo = Lanes::add(lo, none);
            store(to + section, rounded<false>(bounded(lo, limit), bias), n);
            range = Lanes::subtract(hi, bias);
            most = Lanes::larger(most, Lanes::subtract(none, lo));
        } else {
            range = Lanes::larger(Lanes::subtract(none, lo), hi);
        }
        const floats wanted = Lanes::divide(range, Lanes::splat_float(steps));
        const floats least = Lanes::larger(wanted, Lanes::splat_float(1.17549435e-38f));
        floats scale;
        store(to, rounded<true>(Lanes::keep_above(bounded(least, limit), range, 0.0f), scale), n);
        Lanes::store_floats(bias_out, bias);
        Lanes::store_floats(inverse_out,
                            Lanes::keep_above(Lanes::divide(Lanes::splat_float(1.0f), scale), scale, 0.0f));
        return Lanes::larger(most, wanted);
    }

    static KVQ_INLINE floats bounded(floats x, float most) {
        return Lanes::smaller(Lanes::larger(x, Lanes::splat_float(-most)), Lanes::splat_float(most));
    }
    /// Rounded down or up to the stored type: its bits, and their value.
    template <bool Up>
    static KVQ_INLINE ints rounded(floats x, floats& value) {
        if constexpr (std::same_as<P, float>) {
            value = x;
            return Lanes::as_ints(x);
        } else {
            const ints pattern = Lanes::template directed_bits<P, Up>(x);
            value = Lanes::template halves<P, 0>(pattern);
            return pattern;
        }
    }
    static KVQ_INLINE void store(std::byte* to, ints pattern, int n) {
        if constexpr (std::same_as<P, float>) {
            if (n == Lanes::width)
                Lanes::store(to, pattern);
            else
                Lanes::store(to, pattern, n);
        } else {
            if (n == Lanes::width) {
                Lanes::store_halfwords(to, pattern);
            } else {
                std::byte all[2 * Lanes::width];
                Lanes::store_halfwords(all, pattern);
                const int bytes = 2 * n;
                __builtin_memcpy(to, all, static_cast<std::size_t>(bytes));
            }
        }
    }
};

/// The same for parameters of one's own.
template <class Levels, int Bits, class P>
void fit_own(const float* lo, const float* hi, int n, float, std::byte* to, std::size_t section, float* bias,
             float* inverse, float*) {
    for (int i = 0; i < n; ++i, to += sizeof(P)) {
        const stored_parameters<P> stored = Levels::template fit<Bits, P>(lo[i], hi[i]);
        detail::store_as(to, stored.scale);
        if constexpr (Levels::has_bias) detail::store_as(to + section, stored.bias);
        const float scale = static_cast<float>(stored.scale);
        bias[i] = static_cast<float>(stored.bias);
        inverse[i] = scale > 0.0f ? 1.0f / scale : 0.0f;
    }
}

template <class Lanes, class Levels, int Bits, class P>
constexpr range_fit range_fit_of() {
    if constexpr (float_format<P>)
        return &lane_fit<Lanes, Levels, P>::run;
    else
        return &fit_own<Levels, Bits, P>;
}
/// Codes must be clamped if a wanted parameter, or a magnitude, is above this: types of one's own may round
/// in any direction.
template <class P>
constexpr float range_limit() {
    if constexpr (float_format<P>)
        return detail::smaller(detail::max_finite<P>, detail::most_ranged);
    else
        return -1.0f;
}

template <class Lanes, class Levels, int Bits, bool Scaled>
struct lane_codes {
    using floats = typename Lanes::floats;
    using ints = typename Lanes::ints;
    static constexpr int zero = Levels::template zero_code<Bits>;
    static constexpr auto steps = static_cast<float>(Levels::template top<Bits> - zero);

    template <bool Clamp>
    static KVQ_INLINE ints code(floats x, floats bias, floats inverse) {
        const ints codes = level<Clamp>(x, bias, inverse);
        if constexpr (zero == 0)
            return codes;
        else
            return Lanes::add(codes, Lanes::splat(zero));
    }
    /// The codes of four vectors of levels, packed as Lanes::pack_bytes does.
    static KVQ_INLINE ints packed(ints a, ints b, ints c, ints d) {
        const ints bytes = Lanes::template pack_bytes<zero != 0>(a, b, c, d);
        if constexpr (zero == 0)
            return bytes;
        else
            return Lanes::add_bytes(bytes, Lanes::splat(static_cast<std::int32_t>(zero * 0x01010101u)));
    }
    /// Codes minus the zero code.
    template <bool Clamp>
    static KVQ_INLINE ints level(floats x, floats bias, floats inverse) {
        floats v;
        if constexpr (!Levels::has_bias)
            v = Scaled ? Lanes::multiply(x, Lanes::splat_float(0x1p112f)) : x;
        else if constexpr (Scaled)  // the product is exact, so this rounds once, like a subtraction
            v = Lanes::multiply_add(x, Lanes::splat_float(0x1p112f),
                                    Lanes::subtract(Lanes::splat_float(0.0f), bias));
        else
            v = Lanes::subtract(x, bias);
        v = Lanes::multiply(v, inverse);
        if constexpr (Clamp)
            v = Lanes::smaller(Lanes::larger(v, Lanes::splat_float(Levels::has_bias ? 0.0f : -steps)),
                               Lanes::splat_float(steps));
        return Lanes::round(v);
    }
};

}}}  // namespace kvq::kernels
