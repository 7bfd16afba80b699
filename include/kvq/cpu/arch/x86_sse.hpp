// SSE2 and SSE4.1: 4 lanes. float16 is widened with integer arithmetic, exactly as core/float_formats.hpp
// does.
//
// Semantics of the operations: register_ops.hpp. Contract: the bits of plain_lanes.hpp
// (tests/conformance/lanes.cpp).
#pragma once

#include <emmintrin.h>
#if defined(__SSSE3__)
#include <tmmintrin.h>
#endif

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "../../core/float_formats.hpp"
#include "arch.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace arch {

template <class Arch>
requires std::derived_from<Arch, sse2> || std::derived_from<Arch, sse4_1>
struct register_ops<Arch> {
    using registers = typename Arch::registers;
    using ints = xsimd::batch<std::uint32_t, registers>;
    using floats = xsimd::batch<float, registers>;
    using doubles = xsimd::batch<double, registers>;
    static constexpr int width = 4;
    static constexpr bool word_products = true;
    static constexpr int row_vectors = 2;
    static constexpr int value_vectors = 2;

    static KVQ_INLINE ints load_words(const std::byte* p, int n) {
        std::uint32_t some[4] = {};
        __builtin_memcpy(some, p, static_cast<std::size_t>(n) * 4);
        return ints::load_unaligned(some);
    }
    static KVQ_INLINE void store_words(std::byte* p, ints a, int n) {
        std::uint32_t all[4];
        a.store_unaligned(all);
        __builtin_memcpy(p, all, static_cast<std::size_t>(n) * 4);
    }
    static KVQ_INLINE floats load_floats(const float* p, int n) {
        float some[4] = {};
        __builtin_memcpy(some, p, static_cast<std::size_t>(n) * 4);
        return floats::load_unaligned(some);
    }
    static KVQ_INLINE void store_floats(float* p, floats a, int n) {
        float all[4];
        a.store_unaligned(all);
        __builtin_memcpy(p, all, static_cast<std::size_t>(n) * 4);
    }

    template <int Bits>
    static KVQ_INLINE ints dot(ints acc, ints codes, ints x) {
#if defined(__SSSE3__)
        if constexpr (Bits < 8 && std::derived_from<Arch, sse4_1>) {  // the sum of two products fits 16 bits
            const __m128i pairs = _mm_maddubs_epi16(codes, x);
            return in_register(_mm_add_epi32(acc, _mm_madd_epi16(pairs, _mm_set1_epi16(1))));
        }
#endif
        const ints even = _mm_madd_epi16(even_bytes(codes), _mm_srai_epi16(_mm_slli_epi16(x, 8), 8));
        const ints odd = _mm_madd_epi16(odd_bytes(codes), _mm_srai_epi16(x, 8));
        return in_register(_mm_add_epi32(acc, _mm_add_epi32(even, odd)));
    }
    static KVQ_INLINE ints sixteen_bytes(const std::uint8_t* p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    }
    static KVQ_INLINE ints lookup_bytes(ints table, ints a) {
#if defined(__SSSE3__)
        if constexpr (std::derived_from<Arch, sse4_1>) return _mm_shuffle_epi8(table, a);
#endif
        alignas(16) std::uint8_t from[16], at[16];
        _mm_store_si128(reinterpret_cast<__m128i*>(from), table);
        _mm_store_si128(reinterpret_cast<__m128i*>(at), a);
        for (std::uint8_t& byte : at) byte = from[byte];
        return _mm_load_si128(reinterpret_cast<const __m128i*>(at));
    }
    static KVQ_INLINE ints even_bytes(ints a) { return _mm_and_si128(a, _mm_set1_epi16(255)); }
    static KVQ_INLINE ints odd_bytes(ints a) { return _mm_srli_epi16(a, 8); }
    static KVQ_INLINE ints dot_words(ints acc, ints a, ints x) {
        return in_register(_mm_add_epi32(acc, _mm_madd_epi16(a, x)));
    }
    static KVQ_INLINE void store_word_pairs(std::uint32_t* out, int, ints a) {
        const __m128i upper = _mm_slli_epi32(_mm_shuffle_epi32(a, 0x0e), 16);
        const __m128i pairs = _mm_or_si128(_mm_and_si128(a, _mm_set1_epi32(0xffff)), upper);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out), pairs);
    }

    template <int Half>
    static KVQ_INLINE doubles widen(floats a) {
        return _mm_cvtps_pd(Half ? _mm_movehl_ps(a, a) : __m128(a));
    }
    static KVQ_INLINE floats narrow(doubles low, doubles high) {
        return _mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high));
    }
    static KVQ_INLINE floats limited(floats a, floats top) {
        // max returns the second operand if one is NaN.
        return _mm_min_ps(_mm_max_ps(a, _mm_setzero_ps()), top);
    }
    static KVQ_INLINE floats to_floats(ints a) { return _mm_cvtepi32_ps(a); }
    static KVQ_INLINE ints round(floats a) { return _mm_cvtps_epi32(a); }
    static KVQ_INLINE floats as_floats(ints a) { return _mm_castsi128_ps(a); }
    static KVQ_INLINE ints as_ints(floats a) { return _mm_castps_si128(a); }
    template <int S>
    static KVQ_INLINE ints shift_signed(ints a) {
        return _mm_srai_epi32(a, S);
    }
    template <bool Signed>
    static KVQ_INLINE ints pack_bytes(ints a, ints b, ints c, ints d) {
        const __m128i ab = _mm_packs_epi32(a, b), cd = _mm_packs_epi32(c, d);
        return Signed ? _mm_packs_epi16(ab, cd) : _mm_packus_epi16(ab, cd);
    }
    static KVQ_INLINE ints add_bytes(ints a, ints b) { return _mm_add_epi8(a, b); }
    static KVQ_INLINE ints ordered_halves(ints a) {
        return _mm_xor_si128(a, _mm_and_si128(_mm_srai_epi16(a, 15), _mm_set1_epi16(0x7fff)));
    }
    static KVQ_INLINE ints min_halves(ints a, ints b) { return _mm_min_epi16(a, b); }
    static KVQ_INLINE ints max_halves(ints a, ints b) { return _mm_max_epi16(a, b); }
    static KVQ_INLINE void store_high_low(std::uint32_t* out, int, ints high, ints low) {
        const __m128i byte = _mm_set1_epi32(255);
        const __m128i words = _mm_packs_epi32(_mm_and_si128(high, byte), _mm_and_si128(low, byte));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
    }

    static KVQ_INLINE void transpose(ints (&v)[4]) {
        const __m128i a = _mm_unpacklo_epi32(v[0], v[1]), b = _mm_unpackhi_epi32(v[0], v[1]);
        const __m128i c = _mm_unpacklo_epi32(v[2], v[3]), d = _mm_unpackhi_epi32(v[2], v[3]);
        v[0] = _mm_unpacklo_epi64(a, c);
        v[1] = _mm_unpackhi_epi64(a, c);
        v[2] = _mm_unpacklo_epi64(b, d);
        v[3] = _mm_unpackhi_epi64(b, d);
    }
    static KVQ_INLINE ints load_bytes(const std::byte* p) {
        std::int32_t four;
        __builtin_memcpy(&four, p, 4);
        const __m128i none = _mm_setzero_si128();
        return _mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(four), none), none);
    }
    static KVQ_INLINE ints load_halfwords(const std::byte* p) {
        return _mm_unpacklo_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), _mm_setzero_si128());
    }
    static KVQ_INLINE void store_halfwords(std::byte* p, ints a) {
        const __m128i word = _mm_srai_epi32(_mm_slli_epi32(a, 16), 16);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(word, word));
    }
    template <class T>
    static KVQ_INLINE ints half_bits(floats a) {
        float all[4];
        a.store_unaligned(all);
        return _mm_setr_epi32(T(all[0]).bits, T(all[1]).bits, T(all[2]).bits, T(all[3]).bits);
    }
    static KVQ_INLINE ints in_register(ints a) {
        __m128i word = a;
        __asm__("" : "+x"(word));
        return word;
    }
    static KVQ_INLINE floats rounded_product(floats a, floats b) {
        __m128 product = _mm_mul_ps(a, b);
        __asm__("" : "+x"(product));
        return product;
    }

    template <class T>
    static KVQ_INLINE floats load_values(const std::byte* p) {
        if constexpr (std::same_as<T, float>)
            return _mm_loadu_ps(reinterpret_cast<const float*>(p));
        else
            return widen<T>(_mm_unpacklo_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)),
                                               _mm_setzero_si128()));
    }
    template <class T>
    static KVQ_INLINE floats load_values(const std::byte* p, int n) {
        T some[4] = {};
        __builtin_memcpy(some, p, static_cast<std::size_t>(n) * sizeof(T));
        return load_values<T>(reinterpret_cast<const std::byte*>(some));
    }
    template <class T, int Half>
    static KVQ_INLINE floats halves(ints words) {
        return widen<T>(Half ? _mm_srli_epi32(words, 16) : _mm_and_si128(words, _mm_set1_epi32(0xffff)));
    }

    static KVQ_INLINE floats splat_pair(const float* p) {
        double pair;
        __builtin_memcpy(&pair, p, 8);
        return _mm_castpd_ps(_mm_set1_pd(pair));
    }
    static KVQ_INLINE floats add_pairs(floats a, floats b) {
        return _mm_add_ps(_mm_shuffle_ps(a, b, 0x88), _mm_shuffle_ps(a, b, 0xdd));
    }
    static KVQ_INLINE floats keep_even(floats a) {
        return _mm_and_ps(a, _mm_castsi128_ps(_mm_setr_epi32(-1, 0, -1, 0)));
    }
    static KVQ_INLINE float sum(floats a) {
        const __m128 s = _mm_add_ps(a, _mm_movehl_ps(a, a));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
    }
    static KVQ_INLINE float largest(floats a) {
        const __m128 s = _mm_max_ps(a, _mm_movehl_ps(a, a));
        return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
    }
    static KVQ_INLINE float smallest(floats a) {
        const __m128 s = _mm_min_ps(a, _mm_movehl_ps(a, a));
        return _mm_cvtss_f32(_mm_min_ss(s, _mm_shuffle_ps(s, s, 1)));
    }

private:
    /// 16-bit patterns in 32-bit lanes.
    template <class T>
    static KVQ_INLINE floats widen(__m128i h) {
        if constexpr (std::same_as<T, bfloat16>) {
            return _mm_castsi128_ps(_mm_slli_epi32(h, 16));
        } else {
            const __m128i magnitude = _mm_slli_epi32(_mm_and_si128(h, _mm_set1_epi32(0x7fff)), 13);
            const __m128i sign = _mm_slli_epi32(_mm_and_si128(h, _mm_set1_epi32(0x8000)), 16);
            const __m128i normal = _mm_add_epi32(magnitude, _mm_set1_epi32(112 << 23));
            // Subnormals: 2^-14 + m 2^-24, minus 2^-14. No operand is a subnormal float, which a program may
            // flush to zero.
            const __m128i least = _mm_set1_epi32(113 << 23);
            const __m128i subnormal = _mm_castps_si128(
                _mm_sub_ps(_mm_castsi128_ps(_mm_or_si128(magnitude, least)), _mm_castsi128_ps(least)));
            const __m128i small = _mm_cmplt_epi32(magnitude, _mm_set1_epi32(1 << 23));
            const __m128i finite =
                _mm_or_si128(_mm_and_si128(small, subnormal), _mm_andnot_si128(small, normal));
            const __m128i special = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x0f7fffff));
            const __m128i infinite = _mm_and_si128(special, _mm_set1_epi32(0x7f800000));
            const __m128i quiet = _mm_and_si128(_mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x0f800000)),
                                                _mm_set1_epi32(0x00400000));
            return _mm_castsi128_ps(_mm_or_si128(_mm_or_si128(finite, sign), _mm_or_si128(infinite, quiet)));
        }
    }
};

}}}  // namespace kvq::arch
