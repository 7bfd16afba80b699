// Lanes on xsimd registers: the interface of backends/kernels/plain_lanes.hpp for one architecture.
//
// Arithmetic that xsimd has in every version is written with xsimd::batch; what differs per instruction set (integer dot
// products, 16-bit floats, partial loads) comes from register_ops<Arch>, one header per instruction set.
#pragma once

#include "arch.hpp"
#include "register_ops.hpp"

namespace kvq::inline v0_1 {

template <class Arch>
struct simd_lanes : arch::register_ops<Arch> {
    using ops = arch::register_ops<Arch>;
    using ints = typename ops::ints;
    using floats = typename ops::floats;
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

    static KVQ_INLINE floats load_floats(const float* p) { return floats::load_unaligned(p); }
    static KVQ_INLINE void store_floats(float* p, floats a) { a.store_unaligned(p); }
    static KVQ_INLINE floats splat_float(float x) { return floats(x); }
    static KVQ_INLINE floats add(floats a, floats b) { return a + b; }
    static KVQ_INLINE floats subtract(floats a, floats b) { return a - b; }
    static KVQ_INLINE floats multiply(floats a, floats b) { return a * b; }
    static KVQ_INLINE floats multiply_add(floats a, floats b, floats c) { return xsimd::fma(a, b, c); }
    static KVQ_INLINE floats max(floats a, floats b) { return xsimd::max(a, b); }
    static KVQ_INLINE floats min(floats a, floats b) { return xsimd::min(a, b); }
    static KVQ_INLINE floats abs(floats a) { return xsimd::abs(a); }
    static KVQ_INLINE floats keep_above(floats a, floats test, float limit) {
        return xsimd::select(test > floats(limit), a, floats(0.0f));
    }
};

}  // namespace kvq::inline v0_1
