// AVX2 with FMA and F16C, with and without VNNI: 8 lanes.
//
// Semantics of the operations: register_ops.hpp. Contract: the bits of plain_lanes.hpp
// (tests/conformance/lanes.cpp). Without VNNI vpmaddwd multiplies 16-bit words as fast as bytes
// (word_products), with it vpdpbusd takes bytes.
#pragma once

#include <immintrin.h>

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "../../core/float_formats.hpp"
#include "arch.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace arch {

template <class Arch>
requires std::derived_from<Arch, avx2>
struct register_ops<Arch> {
    using ints = xsimd::batch<std::uint32_t, avx2::registers>;
    using floats = xsimd::batch<float, avx2::registers>;
    using doubles = xsimd::batch<double, avx2::registers>;
    static constexpr int width = 8;
    static constexpr bool vnni = std::derived_from<Arch, avxvnni>;
    static constexpr bool word_products = !vnni;
    static constexpr int row_vectors = 2;
    static constexpr int value_vectors = 2;

    static KVQ_INLINE __m256i first(int n) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }

    static KVQ_INLINE ints load_words(const std::byte* p, int n) {
        return _mm256_maskload_epi32(reinterpret_cast<const int*>(p), first(n));
    }
    static KVQ_INLINE void store_words(std::byte* p, ints a, int n) {
        _mm256_maskstore_epi32(reinterpret_cast<int*>(p), first(n), a);
    }
    static KVQ_INLINE floats load_floats(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
    static KVQ_INLINE void store_floats(float* p, floats a, int n) { _mm256_maskstore_ps(p, first(n), a); }

    template <int Bits>
    static KVQ_INLINE ints dot(ints acc, ints codes, ints x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        if constexpr (vnni) return _mm256_dpbusd_epi32(__m256i(acc), __m256i(codes), __m256i(x));
#elif defined(__AVXVNNI__)
        if constexpr (vnni) return _mm256_dpbusd_avx_epi32(__m256i(acc), __m256i(codes), __m256i(x));
#endif
        if constexpr (Bits < 8) {  // the sum of two products fits 16 bits
            const __m256i pairs = _mm256_maddubs_epi16(codes, x);
            return in_register(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
        } else {
            const ints even =
                _mm256_madd_epi16(even_bytes(codes), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
            const ints odd = _mm256_madd_epi16(odd_bytes(codes), _mm256_srai_epi16(x, 8));
            return in_register(_mm256_add_epi32(acc, _mm256_add_epi32(even, odd)));
        }
    }
    static KVQ_INLINE ints sixteen_bytes(const std::uint8_t* p) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static KVQ_INLINE ints lookup_bytes(ints table, ints a) { return _mm256_shuffle_epi8(table, a); }
    static KVQ_INLINE ints even_bytes(ints a) { return _mm256_and_si256(a, _mm256_set1_epi16(255)); }
    static KVQ_INLINE ints odd_bytes(ints a) { return _mm256_srli_epi16(a, 8); }
    static KVQ_INLINE ints dot_words(ints acc, ints a, ints x) {
        return in_register(_mm256_add_epi32(acc, _mm256_madd_epi16(a, x)));
    }
    static KVQ_INLINE void store_word_pairs(std::uint32_t* out, int stride, ints a) {
        const __m256i pairs = _mm256_shuffle_epi8(
            a, _mm256_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(pairs));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out + stride), _mm256_extracti128_si256(pairs, 1));
    }

    template <int Half>
    static KVQ_INLINE doubles widen(floats a) {
        return _mm256_cvtps_pd(Half ? _mm256_extractf128_ps(a, 1) : _mm256_castps256_ps128(a));
    }
    static KVQ_INLINE floats narrow(doubles low, doubles high) {
        return _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low));
    }
    static KVQ_INLINE floats limited(floats a, floats top) {
        // max returns the second operand if one is NaN.
        return _mm256_min_ps(_mm256_max_ps(a, _mm256_setzero_ps()), top);
    }
    static KVQ_INLINE floats to_floats(ints a) { return _mm256_cvtepi32_ps(a); }
    static KVQ_INLINE ints round(floats a) { return _mm256_cvtps_epi32(a); }
    static KVQ_INLINE ints ordered_halves(ints a) {
        return _mm256_xor_si256(a, _mm256_and_si256(_mm256_srai_epi16(a, 15), _mm256_set1_epi16(0x7fff)));
    }
    static KVQ_INLINE ints min_halves(ints a, ints b) { return _mm256_min_epi16(a, b); }
    static KVQ_INLINE ints max_halves(ints a, ints b) { return _mm256_max_epi16(a, b); }
    template <bool Signed>
    static KVQ_INLINE ints pack_bytes(ints a, ints b, ints c, ints d) {
        const __m256i ab = _mm256_packs_epi32(a, b), cd = _mm256_packs_epi32(c, d);
        return Signed ? _mm256_packs_epi16(ab, cd) : _mm256_packus_epi16(ab, cd);
    }
    static KVQ_INLINE ints add_bytes(ints a, ints b) { return _mm256_add_epi8(a, b); }
    static KVQ_INLINE floats as_floats(ints a) { return _mm256_castsi256_ps(a); }
    static KVQ_INLINE ints as_ints(floats a) { return _mm256_castps_si256(a); }
    template <int S>
    static KVQ_INLINE ints shift_signed(ints a) {
        return _mm256_srai_epi32(a, S);
    }
    static KVQ_INLINE void store_high_low(std::uint32_t* out, int stride, ints high, ints low) {
        const __m256i bytes =
            _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                             0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
        const __m256i both =
            _mm256_unpacklo_epi32(_mm256_shuffle_epi8(high, bytes), _mm256_shuffle_epi8(low, bytes));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(both));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out + stride), _mm256_extracti128_si256(both, 1));
    }

    static KVQ_INLINE void transpose(ints (&v)[8]) {
        __m256i a[8], b[8];
        for (int i = 0; i < 8; i += 2) {
            a[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
            a[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
            b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
            b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
            b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
        }
        for (int i = 0; i < 4; ++i) {
            v[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
            v[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
        }
    }
    /// Lane i: lane index[i] of the table.
    static KVQ_INLINE floats lookup(floats table, ints index) {
        return _mm256_permutevar8x32_ps(table, index);
    }
    static KVQ_INLINE ints load_bytes(const std::byte* p) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static KVQ_INLINE ints load_signed_bytes(const std::byte* p) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static KVQ_INLINE void load_e4m3(const std::byte* p, floats (&v)[2]) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)),
                      even = _mm_srai_epi16(_mm_slli_epi16(bytes, 8), 1), odd = _mm_srai_epi16(bytes, 1);
        v[0] = _mm256_cvtph_ps(_mm_and_si128(even, _mm_set1_epi16(-0x4001)));
        v[1] = _mm256_cvtph_ps(_mm_and_si128(odd, _mm_set1_epi16(-0x4080)));
    }
    static KVQ_INLINE ints load_halfwords(const std::byte* p) {
        return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static KVQ_INLINE void store_halfwords(std::byte* p, ints a) {
        const __m256i packed = _mm256_packus_epi32(a, a);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                         _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
    }
    template <class T>
    static KVQ_INLINE ints half_bits(floats a) {
        if constexpr (std::same_as<T, float16>) {
            return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        } else {
            const __m256i u = _mm256_castps_si256(a), one = _mm256_set1_epi32(1);
            const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), one);
            const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
            const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
            return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
        }
    }
    template <bool Up>
    static KVQ_INLINE ints directed_float16(floats a) {
        constexpr int mode = (Up ? _MM_FROUND_TO_POS_INF : _MM_FROUND_TO_NEG_INF) | _MM_FROUND_NO_EXC;
        return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(a, mode));
    }
    static KVQ_INLINE void store_float16(std::byte* p, floats a) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                         _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static KVQ_INLINE ints in_register(ints a) {
        __m256i word = a;
        __asm__("" : "+x"(word));
        return word;
    }
    static KVQ_INLINE floats rounded_product(floats a, floats b) {
        __m256 product = _mm256_mul_ps(a, b);
        __asm__("" : "+x"(product));
        return product;
    }

    template <class T>
    static KVQ_INLINE floats load_values(const std::byte* p) {
        if constexpr (std::same_as<T, float>)
            return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
        else
            return widen<T>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    template <class T>
    static KVQ_INLINE floats load_values(const std::byte* p, int n) {
        if constexpr (std::same_as<T, float>) {
            return _mm256_maskload_ps(reinterpret_cast<const float*>(p), first(n));
        } else {
            std::uint16_t some[8] = {};
            __builtin_memcpy(some, p, static_cast<std::size_t>(n) * 2);
            return widen<T>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(some)));
        }
    }
    template <class T, int Half>
    static KVQ_INLINE floats halves(ints words) {
        if constexpr (std::same_as<T, bfloat16>) {
            return _mm256_castsi256_ps(Half ? _mm256_and_si256(words, _mm256_set1_epi32(-65536))
                                            : _mm256_slli_epi32(words, 16));
        } else {
            const __m256i w =
                Half ? _mm256_srli_epi32(words, 16) : _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
            const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(w, w), 0x08);
            return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
        }
    }

    static KVQ_INLINE floats splat_pair(const float* p) {
        double pair;
        __builtin_memcpy(&pair, p, 8);
        return _mm256_castpd_ps(_mm256_set1_pd(pair));
    }
    static KVQ_INLINE floats add_pairs(floats a, floats b) {
        const __m256 sums = _mm256_hadd_ps(a, b);  // halves of a and b alternate
        return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums), 0xd8));
    }
    static KVQ_INLINE floats keep_even(floats a) { return _mm256_blend_ps(a, _mm256_setzero_ps(), 0xaa); }
    static KVQ_INLINE float sum(floats a) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
    static KVQ_INLINE float largest(floats a) {
        __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        s = _mm_max_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
    }
    static KVQ_INLINE float smallest(floats a) {
        __m128 s = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        s = _mm_min_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_min_ss(s, _mm_movehdup_ps(s)));
    }

private:
    template <class T>
    static KVQ_INLINE floats widen(__m128i values) {
        if constexpr (std::same_as<T, float16>)
            return _mm256_cvtph_ps(values);
        else
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16));
    }
};

}}}  // namespace kvq::arch
