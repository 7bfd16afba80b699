// Parameters of a vector of groups: quant/affine.hpp and quant/symmetric.hpp, a group per lane.
//
// Contract: bit for bit the results of levels::fit and levels::code. Stored types other than float, float16 and bfloat16 are
// fitted lane by lane. Values have the form of quantize_block.hpp: a float16 times 2^-112, which every step here undoes exactly.
// Codes need no clamping unless the range of the group exceeds that of the stored type: with bias rounded down and
// scale rounded up, (x - bias) / scale is at most top * (1 + 2^-22), which rounds to top.
#pragma once

#include <cstddef>

#include "../../quant/affine.hpp"
#include "../../quant/symmetric.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Scaled: are float16 values given times 2^-112?
template <class Lanes, class Levels, int Bits, class P, class Window,
          bool Scaled = std::same_as<Window, float16>>
class group_fit {
    using floats = typename Lanes::floats;
    using ints = typename Lanes::ints;
    static constexpr bool in_lanes = float_format<P>;
    static constexpr float limit = detail::max_finite<P>;
    static constexpr int top = Levels::template top<Bits>, zero = Levels::template zero_code<Bits>;
    static constexpr auto steps = static_cast<float>(top - zero);
    /// True if no group of finite Window values can exceed the range of the parameters.
    static constexpr bool always_fits = in_lanes && std::same_as<Window, float16> &&
                                        (Levels::has_bias ? 131008.0f : 65504.0f) / steps <= limit;

public:
    floats bias = Lanes::splat_float(0.0f);
    floats inverse = Lanes::splat_float(0.0f);

    KVQ_INLINE group_fit(floats lo, floats hi) {
        lo = real(lo);
        hi = real(hi);
        if constexpr (in_lanes) {
            floats range = hi;
            if constexpr (Levels::has_bias) {
                // + 0 turns -0 into +0, as in asymmetric::fit.
                lo = Lanes::add(lo, Lanes::splat_float(0.0f));
                stored_bias_ = rounded<false>(bounded(lo), bias);
                range = Lanes::subtract(hi, bias);
            } else {
                range = Lanes::larger(Lanes::subtract(Lanes::splat_float(0.0f), lo), hi);
            }
            const floats wanted = Lanes::divide(range, Lanes::splat_float(steps));
            if constexpr (!always_fits) {
                most_ = wanted;
                if constexpr (Levels::has_bias)
                    most_ = Lanes::larger(most_, Lanes::subtract(Lanes::splat_float(0.0f), lo));
            }
            floats scale;
            const floats least = Lanes::larger(wanted, Lanes::splat_float(1.17549435e-38f));
            stored_scale_ = rounded<true>(Lanes::keep_above(bounded(least), range, 0.0f), scale);
            inverse = Lanes::keep_above(Lanes::divide(Lanes::splat_float(1.0f), scale), scale, 0.0f);
        } else {
            float low[Lanes::width], high[Lanes::width], b[Lanes::width], f[Lanes::width];
            Lanes::store_floats(low, lo);
            Lanes::store_floats(high, hi);
            for (int i = 0; i < Lanes::width; ++i) {
                stored_[i] = Levels::template fit<Bits, P>(low[i], high[i]);
                const float scale = static_cast<float>(stored_[i].scale);
                b[i] = static_cast<float>(stored_[i].bias);
                f[i] = scale > 0.0f ? 1.0f / scale : 0.0f;
            }
            bias = Lanes::load_floats(b);
            inverse = Lanes::load_floats(f);
            most_ = Lanes::as_floats(Lanes::splat(0x7f800000));
        }
    }

    KVQ_INLINE bool must_clamp() const { return !always_fits && exceeds(most_); }
    /// Codes must be clamped if a lane of this is above the range of the parameters. (For several fits: test the largest.)
    KVQ_INLINE floats most() const { return most_; }
    static KVQ_INLINE bool exceeds(floats most) { return Lanes::largest(most) > limit; }

    /// Writes the first n lanes' parameters: scales at `to`, biases `section` bytes further.
    KVQ_INLINE void store(std::byte* to, std::size_t section, int n) const {
        if constexpr (in_lanes) {
            store_lanes(to, stored_scale_, n);
            if constexpr (Levels::has_bias) store_lanes(to + section, stored_bias_, n);
        } else {
            for (int i = 0; i < n; ++i) {
                std::byte* const at = to + static_cast<std::size_t>(i) * sizeof(P);
                detail::store_as(at, stored_[i].scale);
                if constexpr (Levels::has_bias) detail::store_as(at + section, stored_[i].bias);
            }
        }
    }

    /// Codes of values x.
    template <bool Clamp>
    static KVQ_INLINE ints code(floats x, floats bias, floats inverse) {
        return code_of(level<Clamp>(x, bias, inverse));
    }
    /// The levels of the codes: the codes themselves, or the codes minus the zero code.
    template <bool Clamp>
    static KVQ_INLINE ints level(floats x, floats bias, floats inverse) {
        floats v;
        if constexpr (!Levels::has_bias)
            v = real(x);
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
    static KVQ_INLINE ints code_of(ints level) {
        if constexpr (zero == 0)
            return level;
        else
            return Lanes::add(level, Lanes::splat(zero));
    }
    /// The codes of four vectors of levels, packed as Lanes::pack_bytes does.
    static KVQ_INLINE ints packed(ints a, ints b, ints c, ints d) {
        const ints bytes = Lanes::template pack_bytes<zero != 0>(a, b, c, d);
        if constexpr (zero == 0)
            return bytes;
        else
            return Lanes::add_bytes(bytes, Lanes::splat(static_cast<std::int32_t>(zero * 0x01010101u)));
    }

private:
    static KVQ_INLINE floats real(floats x) {
        if constexpr (Scaled)
            return Lanes::multiply(x, Lanes::splat_float(0x1p112f));
        else
            return x;
    }
    static KVQ_INLINE floats bounded(floats x) {
        return Lanes::smaller(Lanes::larger(x, Lanes::splat_float(-limit)), Lanes::splat_float(limit));
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
    static KVQ_INLINE void store_lanes(std::byte* to, ints pattern, int n) {
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

    struct nothing {};
    ints stored_scale_ = Lanes::splat(0), stored_bias_ = Lanes::splat(0);
    [[no_unique_address]] std::conditional_t<in_lanes, nothing, stored_parameters<P>[Lanes::width]> stored_ {
    };
    floats most_ = Lanes::splat_float(0.0f);
};

}}}  // namespace kvq::kernels
