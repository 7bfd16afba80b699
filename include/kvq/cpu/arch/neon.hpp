// NEON on AArch64, with and without the dot product extension: 4 lanes.
//
// Semantics of the operations: register_ops.hpp. Contract: the bits of plain_lanes.hpp
// (tests/conformance/lanes.cpp).
#pragma once

#include <arm_neon.h>

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "../../core/float_formats.hpp"
#include "arch.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace arch {

template <class Arch>
requires std::derived_from<Arch, neon64>
struct register_ops<Arch> {
    using ints = xsimd::batch<std::uint32_t, xsimd::neon64>;
    using floats = xsimd::batch<float, xsimd::neon64>;
    using doubles = xsimd::batch<double, xsimd::neon64>;
    static constexpr int width = 4;
    static constexpr bool word_products = !std::derived_from<Arch, neon64_dot>;
    static constexpr int row_vectors = 2;
    static constexpr int value_vectors = 4;

    static KVQ_INLINE ints load_words(const std::byte* p, int n) {
        std::uint32_t some[4] = {};
        __builtin_memcpy(some, p, static_cast<std::size_t>(n) * 4);
        return vld1q_u32(some);
    }
    static KVQ_INLINE void store_words(std::byte* p, ints a, int n) {
        std::uint32_t all[4];
        vst1q_u32(all, a);
        __builtin_memcpy(p, all, static_cast<std::size_t>(n) * 4);
    }
    static KVQ_INLINE floats load_floats(const float* p, int n) {
        float some[4] = {};
        __builtin_memcpy(some, p, static_cast<std::size_t>(n) * 4);
        return vld1q_f32(some);
    }
    static KVQ_INLINE void store_floats(float* p, floats a, int n) {
        float all[4];
        vst1q_f32(all, a);
        __builtin_memcpy(p, all, static_cast<std::size_t>(n) * 4);
    }

    template <int Bits>
    static KVQ_INLINE ints dot(ints acc, ints codes, ints x) {
        const uint8x16_t c = vreinterpretq_u8_u32(codes);
        const int8x16_t y = vreinterpretq_s8_u32(x);
        const int32x4_t sum = vreinterpretq_s32_u32(acc);
        if constexpr (Bits < 8) {
            const int8x16_t s = vreinterpretq_s8_u8(c);
#if defined(__ARM_FEATURE_DOTPROD)
            if constexpr (std::derived_from<Arch, neon64_dot>)
                return vreinterpretq_u32_s32(vdotq_s32(sum, s, y));
#endif
            const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(s), vget_low_s8(y)));
            const int32x4_t high = vpaddlq_s16(vmull_high_s8(s, y));
            return vreinterpretq_u32_s32(vaddq_s32(sum, vpaddq_s32(low, high)));
        } else {
            const int16x8_t c0 = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(c)));
            const int16x8_t c1 = vreinterpretq_s16_u16(vmovl_high_u8(c));
            const int16x8_t y0 = vmovl_s8(vget_low_s8(y)), y1 = vmovl_high_s8(y);
            const int32x4_t low =
                vpaddq_s32(vmull_s16(vget_low_s16(c0), vget_low_s16(y0)), vmull_high_s16(c0, y0));
            const int32x4_t high =
                vpaddq_s32(vmull_s16(vget_low_s16(c1), vget_low_s16(y1)), vmull_high_s16(c1, y1));
            return vreinterpretq_u32_s32(vaddq_s32(sum, vpaddq_s32(low, high)));
        }
    }

    static KVQ_INLINE ints sixteen_bytes(const std::uint8_t* p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }
    static KVQ_INLINE ints lookup_bytes(ints table, ints a) {
        return vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(table), vreinterpretq_u8_u32(a)));
    }
    static KVQ_INLINE ints even_bytes(ints a) { return vandq_u32(a, vdupq_n_u32(0x00ff00ff)); }
    static KVQ_INLINE ints odd_bytes(ints a) {
        return vreinterpretq_u32_u16(vshrq_n_u16(vreinterpretq_u16_u32(a), 8));
    }
    static KVQ_INLINE ints dot_words(ints acc, ints a, ints x) {
        const int16x8_t u = vreinterpretq_s16_u32(a), v = vreinterpretq_s16_u32(x);
        const int32x4_t sums = vpaddq_s32(vmull_s16(vget_low_s16(u), vget_low_s16(v)), vmull_high_s16(u, v));
        return vaddq_u32(acc, vreinterpretq_u32_s32(sums));
    }
    static KVQ_INLINE void store_word_pairs(std::uint32_t* out, int, ints a) {
        const uint32x4_t word = a;
        vst1_u32(out, vorr_u32(vand_u32(vget_low_u32(word), vdup_n_u32(0xffff)),
                               vshl_n_u32(vget_high_u32(word), 16)));
    }

    template <int Half>
    static KVQ_INLINE doubles widen(floats a) {
        if constexpr (Half == 0)
            return vcvt_f64_f32(vget_low_f32(a));
        else
            return vcvt_high_f64_f32(a);
    }
    static KVQ_INLINE floats narrow(doubles low, doubles high) {
        return vcvt_high_f32_f64(vcvt_f32_f64(low), high);
    }
    static KVQ_INLINE floats limited(floats a, floats top) {
        return vminq_f32(vmaxnmq_f32(a, vdupq_n_f32(0.0f)), top);
    }
    static KVQ_INLINE floats to_floats(ints a) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a)); }
    static KVQ_INLINE ints round(floats a) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(a)); }
    static KVQ_INLINE floats as_floats(ints a) { return vreinterpretq_f32_u32(a); }
    static KVQ_INLINE ints as_ints(floats a) { return vreinterpretq_u32_f32(a); }
    template <int S>
    static KVQ_INLINE ints shift_signed(ints a) {
        return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(a), S));
    }
    template <bool Signed>
    static KVQ_INLINE ints pack_bytes(ints a, ints b, ints c, ints d) {
        const uint16x8_t ab = vcombine_u16(vmovn_u32(a), vmovn_u32(b)),
                         cd = vcombine_u16(vmovn_u32(c), vmovn_u32(d));
        return vreinterpretq_u32_u8(vcombine_u8(vmovn_u16(ab), vmovn_u16(cd)));
    }
    static KVQ_INLINE ints add_bytes(ints a, ints b) {
        return vreinterpretq_u32_u8(vaddq_u8(vreinterpretq_u8_u32(a), vreinterpretq_u8_u32(b)));
    }
    static KVQ_INLINE ints ordered_halves(ints a) {
        const int16x8_t sign = vshrq_n_s16(vreinterpretq_s16_u32(a), 15);
        return veorq_u32(a, vreinterpretq_u32_s16(vandq_s16(sign, vdupq_n_s16(0x7fff))));
    }
    static KVQ_INLINE ints min_halves(ints a, ints b) {
        return vreinterpretq_u32_s16(vminq_s16(vreinterpretq_s16_u32(a), vreinterpretq_s16_u32(b)));
    }
    static KVQ_INLINE ints max_halves(ints a, ints b) {
        return vreinterpretq_u32_s16(vmaxq_s16(vreinterpretq_s16_u32(a), vreinterpretq_s16_u32(b)));
    }
    static KVQ_INLINE void store_high_low(std::uint32_t* out, int, ints high, ints low) {
        const uint8x8_t bytes = vmovn_u16(vcombine_u16(vmovn_u32(high), vmovn_u32(low)));
        vst1_u8(reinterpret_cast<std::uint8_t*>(out), bytes);
    }

    static KVQ_INLINE void transpose(ints (&v)[4]) {
        const uint32x4_t a = vtrn1q_u32(v[0], v[1]), b = vtrn2q_u32(v[0], v[1]);
        const uint32x4_t c = vtrn1q_u32(v[2], v[3]), d = vtrn2q_u32(v[2], v[3]);
        v[0] = vcombine_u32(vget_low_u32(a), vget_low_u32(c));
        v[1] = vcombine_u32(vget_low_u32(b), vget_low_u32(d));
        v[2] = vcombine_u32(vget_high_u32(a), vget_high_u32(c));
        v[3] = vcombine_u32(vget_high_u32(b), vget_high_u32(d));
    }
    static KVQ_INLINE ints load_bytes(const std::byte* p) {
        std::uint8_t eight[8] = {};
        __builtin_memcpy(eight, p, 4);
        return vmovl_u16(vget_low_u16(vmovl_u8(vld1_u8(eight))));
    }
    static KVQ_INLINE ints load_halfwords(const std::byte* p) {
        return vmovl_u16(vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const std::uint8_t*>(p))));
    }
    static KVQ_INLINE void store_halfwords(std::byte* p, ints a) {
        vst1_u8(reinterpret_cast<std::uint8_t*>(p), vreinterpret_u8_u16(vmovn_u32(a)));
    }
    template <class T>
    static KVQ_INLINE ints half_bits(floats a) {
        if constexpr (std::same_as<T, float16>) {
            return vmovl_u16(vreinterpret_u16_f16(narrow(a)));
        } else {
            const uint32x4_t u = vreinterpretq_u32_f32(a), one = vdupq_n_u32(1);
            const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), one);
            const uint32x4_t rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
            return vshrq_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16);
        }
    }
    static KVQ_INLINE void store_float16(std::byte* p, floats a) {
        vst1_u8(reinterpret_cast<std::uint8_t*>(p), vreinterpret_u8_f16(narrow(a)));
    }
    static KVQ_INLINE ints in_register(ints a) {
        uint32x4_t word = a;
        __asm__("" : "+w"(word));
        return word;
    }
    static KVQ_INLINE floats rounded_product(floats a, floats b) {
        float32x4_t product = vmulq_f32(a, b);
        __asm__("" : "+w"(product));
        return product;
    }

    /// Correctly rounded; on ARM xsimd divides floats through an estimate of the reciprocal.
    static KVQ_INLINE floats divide(floats a, floats b) { return vdivq_f32(a, b); }

    template <class T>
    static KVQ_INLINE floats load_values(const std::byte* p) {
        if constexpr (std::same_as<T, float>)
            return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(p)));
        else
            return widen<T>(vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const std::uint8_t*>(p))));
    }
    template <class T>
    static KVQ_INLINE floats load_values(const std::byte* p, int n) {
        T some[4] = {};
        __builtin_memcpy(some, p, static_cast<std::size_t>(n) * sizeof(T));
        return load_values<T>(reinterpret_cast<const std::byte*>(some));
    }
    template <class T, int Half>
    static KVQ_INLINE floats halves(ints words) {
        return widen<T>(Half ? vshrn_n_u32(words, 16) : vmovn_u32(words));
    }

    static KVQ_INLINE floats splat_pair(const float* p) {
        const float32x2_t pair = vld1_f32(p);
        return vcombine_f32(pair, pair);
    }
    static KVQ_INLINE floats add_pairs(floats a, floats b) { return vpaddq_f32(a, b); }
    static KVQ_INLINE floats keep_even(floats a) {
        const std::uint32_t mask[4] = {~0u, 0, ~0u, 0};
        return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), vld1q_u32(mask)));
    }
    static KVQ_INLINE float sum(floats a) { return vaddvq_f32(a); }
    static KVQ_INLINE float largest(floats a) { return vmaxvq_f32(a); }
    static KVQ_INLINE float smallest(floats a) { return vminvq_f32(a); }

private:
    /// g++ removes 16 bits -> float -> 16 bits as a no-op, but the conversion makes a signalling NaN quiet.
    static KVQ_INLINE float16x4_t narrow(float32x4_t a) {
        __asm__("" : "+w"(a));
        return vcvt_f16_f32(a);
    }
    template <class T>
    static KVQ_INLINE floats widen(uint16x4_t h) {
        if constexpr (std::same_as<T, float16>)
            return vcvt_f32_f16(vreinterpret_f16_u16(h));
        else
            return vreinterpretq_f32_u32(vshll_n_u16(h, 16));
    }
};

}}}  // namespace kvq::arch
