// Lanes on xsimd registers: the interface of cpu/plain_lanes.hpp for one architecture.
//
// Arithmetic that xsimd has in every version is written with xsimd::batch. Operations that differ per
// instruction set (integer dot products, 16-bit floats, partial loads) come from register_ops<Arch>, one
// header per instruction set.
#pragma once

#include <concepts>

#include "../../core/float_formats.hpp"

// g++ before 13 takes the deliberately undefined registers of its own AVX-512 header for a mistake, where
// this header calls it.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "arch.hpp"
#include "register_ops.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

template <class Arch>
struct simd_lanes : arch::register_ops<Arch> {
    using architecture = Arch;
    using ops = arch::register_ops<Arch>;
    using ints = typename ops::ints;
    using floats = typename ops::floats;
    using doubles = typename ops::doubles;
    static constexpr int width = ops::width;

    using ops::load_floats;
    using ops::store_floats;

    static KVQ_INLINE ints load(const std::byte* p) {
        return ints::load_unaligned(reinterpret_cast<const std::uint32_t*>(p));
    }
    static KVQ_INLINE ints load(const std::byte* p, int n) { return ops::load_words(p, n); }
    static KVQ_INLINE void store(std::byte* p, ints a) {
        a.store_unaligned(reinterpret_cast<std::uint32_t*>(p));
    }
    static KVQ_INLINE void store(std::byte* p, ints a, int n) { ops::store_words(p, a, n); }
    static KVQ_INLINE ints splat(std::int32_t x) { return ints(static_cast<std::uint32_t>(x)); }
    template <int S>
    static KVQ_INLINE ints shift_right(ints a) {
        if constexpr (S == 0)
            return a;
        else
            return a >> S;
    }
    template <int S>
    static KVQ_INLINE ints shift_right_signed(ints a) {
        return ops::template shift_signed<S>(a);
    }
    template <int S>
    static KVQ_INLINE ints shift_left(ints a) {
        if constexpr (S == 0)
            return a;
        else
            return a << S;
    }
    static KVQ_INLINE ints bit_and(ints a, ints b) { return a & b; }
    static KVQ_INLINE ints bit_or(ints a, ints b) { return a | b; }
    static KVQ_INLINE ints add(ints a, ints b) { return a + b; }
    static KVQ_INLINE ints subtract(ints a, ints b) { return a - b; }

    static KVQ_INLINE floats load_floats(const float* p) { return floats::load_unaligned(p); }
    static KVQ_INLINE void store_floats(float* p, floats a) { a.store_unaligned(p); }
    static KVQ_INLINE floats splat_float(float x) { return floats(x); }
    static KVQ_INLINE floats add(floats a, floats b) { return a + b; }
    static KVQ_INLINE floats subtract(floats a, floats b) { return a - b; }
    static KVQ_INLINE floats multiply(floats a, floats b) { return a * b; }
    static KVQ_INLINE floats multiply_add(floats a, floats b, floats c) { return xsimd::fma(a, b, c); }
    static KVQ_INLINE floats divide(floats a, floats b) {
        if constexpr (requires { ops::divide(a, b); })
            return ops::divide(a, b);
        else
            return a / b;
    }
    static KVQ_INLINE doubles load_doubles(const double* p) { return doubles::load_unaligned(p); }
    static KVQ_INLINE void store_doubles(double* p, doubles a) { a.store_unaligned(p); }
    static KVQ_INLINE doubles splat_double(double x) { return doubles(x); }
    static KVQ_INLINE doubles add(doubles a, doubles b) { return a + b; }
    static KVQ_INLINE doubles multiply(doubles a, doubles b) { return a * b; }
    static KVQ_INLINE doubles multiply_add(doubles a, doubles b, doubles c) { return xsimd::fma(a, b, c); }
    static KVQ_INLINE floats larger(floats a, floats b) { return (xsimd::max)(a, b); }
    static KVQ_INLINE floats smaller(floats a, floats b) { return (xsimd::min)(a, b); }
    static KVQ_INLINE floats abs(floats a) { return xsimd::abs(a); }
    /// Bit patterns of floats rounded down or up to float16 or bfloat16; the floats are finite and in range.
    template <class T, bool Up>
    static KVQ_INLINE ints directed_bits(floats a) {
        if constexpr (std::same_as<T, float16>) {
            if constexpr (requires { ops::template directed_float16<Up>(a); }) {
                return ops::template directed_float16<Up>(a);
            } else {
                float from[width];
                std::uint32_t to[width];
                store_floats(from, a);
                for (int i = 0; i < width; ++i)
                    to[i] = (Up ? detail::round_up_to<T>(from[i]) : detail::round_down<T>(from[i])).bits;
                return load(reinterpret_cast<const std::byte*>(to));
            }
        } else {
            // Adds one in magnitude if truncation of the low half rounded in the wrong direction.
            const ints u = ops::as_ints(a);
            const ints wrong = Up ? ops::template shift_signed<31>(~u) : ops::template shift_signed<31>(u);
            return shift_right<16>(u + (wrong & splat(0xffff)));
        }
    }
    /// `width` floats as consecutive values of type T, each rounded once.
    template <class T>
    static KVQ_INLINE void store_values(std::byte* p, floats a) {
        if constexpr (std::same_as<T, float>)
            a.store_unaligned(reinterpret_cast<float*>(p));
        else if constexpr (std::same_as<T, float16> && requires { ops::store_float16(p, a); })
            ops::store_float16(p, a);
        else
            ops::store_halfwords(p, ops::template half_bits<T>(a));
    }
    /// Lane i: all lanes of vector i reduced by `pick`, in any order.
    template <class F>
    static KVQ_INLINE floats merge_lanes(const ints* v, F pick) {
        if constexpr (requires { ops::merge_lanes(v, pick); }) {
            return ops::merge_lanes(v, pick);
        } else {
            ints square[width];
            KVQ_UNROLL
            for (int i = 0; i < width; ++i) square[i] = v[i];
            ops::transpose(square);
            floats result = ops::as_floats(square[0]);
            KVQ_UNROLL
            for (int i = 1; i < width; ++i) result = pick(result, ops::as_floats(square[i]));
            return result;
        }
    }
    /// Lane i: the smallest (largest) lane of vector i.
    template <bool Smallest>
    static KVQ_INLINE floats extreme_of_each(const ints* v) {
        return merge_lanes(v, [](floats a, floats b) { return Smallest ? smaller(a, b) : larger(a, b); });
    }
    static KVQ_INLINE floats keep_above(floats a, floats test, float limit) {
        return xsimd::select(test > floats(limit), a, floats(0.0f));
    }
    /// 0 where `test` <= `limit`, else `a`, also where `test` is NaN.
    static KVQ_INLINE floats keep_unless_below(floats a, floats test, float limit) {
        return xsimd::select(test <= floats(limit), floats(0.0f), a);
    }
};

}}  // namespace kvq

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic pop
#endif
