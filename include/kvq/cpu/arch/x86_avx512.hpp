// AVX-512 (F, BW, DQ, VL), with and without VNNI: 16 lanes.
//
// Semantics of the operations: register_ops.hpp. Contract: the bits of plain_lanes.hpp
// (tests/conformance/lanes.cpp). Loads and stores of some lanes are masked; lanes that are not loaded are
// zero.
#pragma once

#include <immintrin.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "../../core/float_formats.hpp"
#include "arch.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace arch {

template <class Arch>
requires std::derived_from<Arch, avx512bw>
struct register_ops<Arch> {
    using ints = xsimd::batch<std::uint32_t, xsimd::avx512bw>;
    using floats = xsimd::batch<float, xsimd::avx512bw>;
    using doubles = xsimd::batch<double, xsimd::avx512bw>;
    static constexpr int width = 16;
    static constexpr bool word_products = !std::derived_from<Arch, avx512vnni>;
    static constexpr int row_vectors = 2;
    static constexpr int value_vectors = 4;

    static KVQ_INLINE __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

    static KVQ_INLINE ints load_words(const std::byte* p, int n) {
        return _mm512_maskz_loadu_epi32(first(n), p);
    }
    static KVQ_INLINE void store_words(std::byte* p, ints a, int n) {
        _mm512_mask_storeu_epi32(p, first(n), a);
    }
    static KVQ_INLINE floats load_floats(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
    static KVQ_INLINE void store_floats(float* p, floats a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }

    template <int Bits>
    static KVQ_INLINE ints dot(ints acc, ints codes, ints x) {
#if defined(__AVX512VNNI__)
        if constexpr (std::derived_from<Arch, avx512vnni>) {
#if defined(__clang__)
            return _mm512_dpbusd_epi32(acc, codes, x);
#else
            // g++ 12 copies the accumulator twice around the intrinsic, which costs a third of the kernel's
            // speed.
            __m512i sum = acc;
            __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(__m512i(codes)), "v"(__m512i(x)));
            return sum;
#endif
        }
#endif
        if constexpr (Bits < 8) {  // the sum of two products fits 16 bits
            const __m512i pairs = _mm512_maddubs_epi16(codes, x);
            return in_register(_mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1))));
        } else {
            const ints even =
                _mm512_madd_epi16(even_bytes(codes), _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
            const ints odd = _mm512_madd_epi16(odd_bytes(codes), _mm512_srai_epi16(x, 8));
            return in_register(_mm512_add_epi32(acc, _mm512_add_epi32(even, odd)));
        }
    }
    static KVQ_INLINE ints sixteen_bytes(const std::uint8_t* p) {
        return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static KVQ_INLINE ints lookup_bytes(ints table, ints a) { return _mm512_shuffle_epi8(table, a); }
    static KVQ_INLINE ints even_bytes(ints a) { return _mm512_and_si512(a, _mm512_set1_epi16(255)); }
    static KVQ_INLINE ints odd_bytes(ints a) { return _mm512_srli_epi16(a, 8); }
    static KVQ_INLINE ints dot_words(ints acc, ints a, ints x) {
        return in_register(_mm512_add_epi32(acc, _mm512_madd_epi16(a, x)));
    }
    static KVQ_INLINE ints dot_word_pairs(ints acc, ints a,
                                          ints x) requires(std::derived_from<Arch, avx512vnni>) {
        // Inline assembly for the same reason as in dot().
        __m512i sum = acc;
        __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(__m512i(a)), "v"(__m512i(x)));
        return sum;
    }
    /// Has this CPU dot_pairs and lookup_128, which are written as assembly?
    static bool runs_pairs() requires(std::derived_from<Arch, avx512vnni>) {
        return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
    }
    /// And are they fast? On Intel's CPUs products of pairs take longer than those of floats (kernels of a
    /// Xeon with AMX 1.7 times as long).
    static bool multiplies_pairs() requires(std::derived_from<Arch, avx512vnni>) {
        return __builtin_cpu_is("amd") && runs_pairs();
    }
    /// acc plus the products of pairs of bfloat16.
    static KVQ_INLINE floats dot_pairs(floats acc, ints a, ints b) {
        __m512 sum = acc;
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(__m512i(a)), "v"(__m512i(b)));
        return sum;
    }
    /// Bytes of a table of 128: by the low seven bits of each byte of index.
    static KVQ_INLINE ints lookup_128(const ints (&table)[2], ints index) {
        __m512i found = index;
        __asm__("vpermi2b %2, %1, %0" : "+v"(found) : "v"(__m512i(table[0])), "v"(__m512i(table[1])));
        return found;
    }
    /// Of each 128-bit lane: bytes of a and b in turns, of the lower halves and of the upper ones.
    static KVQ_INLINE void interleave_bytes(ints a, ints b, ints (&v)[2]) {
        v[0] = _mm512_unpacklo_epi8(a, b);
        v[1] = _mm512_unpackhi_epi8(a, b);
    }
    /// The same with 16-bit words, of a[0] and b[0], then of a[1] and b[1].
    static KVQ_INLINE void interleave_words(const ints (&a)[2], const ints (&b)[2], ints (&v)[4]) {
        KVQ_UNROLL
        for (int k = 0; k < 2; ++k) {
            v[2 * k] = _mm512_unpacklo_epi16(a[k], b[k]);
            v[2 * k + 1] = _mm512_unpackhi_epi16(a[k], b[k]);
        }
    }
    static KVQ_INLINE void store_as_halfwords(std::byte* p, ints a, ints b) {
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        _mm512_storeu_si512(p, _mm512_permutexvar_epi64(order, _mm512_packs_epi32(a, b)));
    }
    template <int Half>
    static KVQ_INLINE floats repeat_lanes(floats a) {
        const __m512i index = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        return _mm512_permutexvar_ps(_mm512_add_epi32(index, _mm512_set1_epi32(8 * Half)), a);
    }
    static KVQ_INLINE void store_word_pairs(std::uint32_t* out, int stride, ints a) {
        alignas(64) std::uint32_t all[16];
        const __m512i upper = _mm512_slli_epi32(_mm512_shuffle_epi32(a, _MM_PERM_DCDC), 16);
        _mm512_store_si512(all, _mm512_or_si512(_mm512_and_si512(a, _mm512_set1_epi32(0xffff)), upper));
        for (int q = 0; q < 4; ++q) {
            out[q * stride] = all[4 * q];
            out[q * stride + 1] = all[4 * q + 1];
        }
    }

    template <int Half>
    static KVQ_INLINE doubles widen(floats a) {
        return _mm512_cvtps_pd(Half ? _mm512_extractf32x8_ps(a, 1) : _mm512_castps512_ps256(a));
    }
    static KVQ_INLINE floats narrow(doubles low, doubles high) {
        return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
    }
    static KVQ_INLINE floats limited(floats a, floats top) {
        // max returns the second operand if one is NaN.
        return _mm512_min_ps(_mm512_max_ps(a, _mm512_setzero_ps()), top);
    }
    static KVQ_INLINE floats to_floats(ints a) { return _mm512_cvtepi32_ps(a); }
    static KVQ_INLINE ints round(floats a) { return _mm512_cvtps_epi32(a); }
    static KVQ_INLINE ints ordered_halves(ints a) {
        const __m512i sign = _mm512_srai_epi16(a, 15);  // a ^ (sign & 0x7fff)
        return _mm512_ternarylogic_epi32(a, sign, _mm512_set1_epi16(0x7fff), 0x78);
    }
    static KVQ_INLINE ints min_halves(ints a, ints b) { return _mm512_min_epi16(a, b); }
    static KVQ_INLINE ints max_halves(ints a, ints b) { return _mm512_max_epi16(a, b); }
    template <bool Signed>
    static KVQ_INLINE ints pack_bytes(ints a, ints b, ints c, ints d) {
        const __m512i ab = _mm512_packs_epi32(a, b), cd = _mm512_packs_epi32(c, d);
        return Signed ? _mm512_packs_epi16(ab, cd) : _mm512_packus_epi16(ab, cd);
    }
    static KVQ_INLINE ints add_bytes(ints a, ints b) { return _mm512_add_epi8(a, b); }
    static KVQ_INLINE floats as_floats(ints a) { return _mm512_castsi512_ps(a); }
    static KVQ_INLINE ints as_ints(floats a) { return _mm512_castps_si512(a); }
    /// a minus the nearest integer; 0 for infinities.
    static KVQ_INLINE floats distance_to_whole(floats a) { return _mm512_reduce_ps(a, 0); }
    /// a 2^n for integer n.
    static KVQ_INLINE floats scale_by_power(floats a, floats n) { return _mm512_scalef_ps(a, n); }
    /// max(|a|, |b|)
    static KVQ_INLINE floats larger_magnitude(floats a, floats b) { return _mm512_range_ps(a, b, 11); }
    /// The bits of a where mask has ones, else those of b. In the register of a.
    static KVQ_INLINE ints select_bits(ints mask, ints a, ints b) {
        return _mm512_ternarylogic_epi32(a, mask, b, 0xe2);
    }
    template <int S>
    static KVQ_INLINE ints shift_signed(ints a) {
        return _mm512_srai_epi32(a, S);
    }
    static KVQ_INLINE void store_high_low(std::uint32_t* out, int stride, ints high, ints low) {
        const __m128i h = _mm512_cvtepi32_epi8(high), l = _mm512_cvtepi32_epi8(low);
        const __m128i first_two = _mm_unpacklo_epi32(h, l), last_two = _mm_unpackhi_epi32(h, l);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out), first_two);
        _mm_storeh_pd(reinterpret_cast<double*>(out + stride), _mm_castsi128_pd(first_two));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 2 * stride), last_two);
        _mm_storeh_pd(reinterpret_cast<double*>(out + 3 * stride), _mm_castsi128_pd(last_two));
    }

    static KVQ_INLINE void store_high_low_of_four(std::uint32_t* out, const ints* a) {
        // Two values to a word; plus 128, byte 1 of each is its high byte and byte 0 its low byte plus 128.
        const auto two = [](__m512i x, __m512i y) {
            const __m512i half = _mm512_set1_epi16(128);
            const __m512i order =
                _mm512_broadcast_i32x4(_mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
            const __m512i sums = _mm512_add_epi16(_mm512_packs_epi32(x, y), half);
            return _mm512_shuffle_epi8(_mm512_xor_si512(sums, half), order);
        };
        const __m512i first = two(a[0], a[1]), second = two(a[2], a[3]);
        _mm512_storeu_si512(
            out, _mm512_permutex2var_epi64(first, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second));
        _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi64(
                                          first, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), second));
    }

    static KVQ_INLINE void store_high_low_rows(std::byte* high, std::byte* low, const ints* a) {
        // Two values to a word; plus 128, byte 1 of each is its high byte. Of every 128-bit lane: words of
        // four high bytes of x, of y, of four low bytes of x, of y.
        const auto two = [](__m512i x, __m512i y) {
            const __m512i order =
                _mm512_broadcast_i32x4(_mm_setr_epi8(1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14));
            const __m512i words = _mm512_packs_epi32(x, y),
                          sums = _mm512_add_epi16(words, _mm512_set1_epi16(128));
            return _mm512_shuffle_epi8(_mm512_ternarylogic_epi32(_mm512_set1_epi16(255), words, sums, 0xca),
                                       order);
        };
        const __m512i ab = two(a[0], a[1]), cd = two(a[2], a[3]);
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 16, 20, 24, 28, 17, 21, 25, 29);
        _mm512_storeu_si512(high, _mm512_permutex2var_epi32(ab, order, cd));
        _mm512_storeu_si512(low,
                            _mm512_permutex2var_epi32(ab, _mm512_add_epi32(order, _mm512_set1_epi32(2)), cd));
    }

    static KVQ_INLINE void transpose(ints (&v)[16]) {
        __m512i a[16], b[16];
        KVQ_UNROLL
        for (int i = 0; i < 16; i += 2) {
            a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
            a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        }
        KVQ_UNROLL
        for (int i = 0; i < 16; i += 4) {
            b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
            b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
            b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
            b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
        }
        // 128-bit lane k of b[4g + i] holds rows 4g..4g+3 of column 4k + i.
        KVQ_UNROLL
        for (int i = 0; i < 4; ++i) {
            const __m512i low0 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x44),
                          high0 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xee),
                          low1 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x44),
                          high1 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xee);
            v[i] = _mm512_shuffle_i32x4(low0, low1, 0x88);
            v[4 + i] = _mm512_shuffle_i32x4(low0, low1, 0xdd);
            v[8 + i] = _mm512_shuffle_i32x4(high0, high1, 0x88);
            v[12 + i] = _mm512_shuffle_i32x4(high0, high1, 0xdd);
        }
    }
    /// Lane i: all lanes of vector i reduced by `pick`. Each level halves the number of vectors and the rest
    /// of each.
    template <class F>
    static KVQ_INLINE floats merge_lanes(const ints* v, F pick) {
        const auto f = [](__m512i a) { return floats(_mm512_castsi512_ps(a)); };
        __m512 a[8], b[4], c[2];
        KVQ_UNROLL
        for (int i = 0; i < 8; ++i)
            a[i] = pick(f(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1])),
                        f(_mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1])));
        KVQ_UNROLL
        for (int i = 0; i < 4; ++i) {
            const __m512i x = _mm512_castps_si512(a[2 * i]), y = _mm512_castps_si512(a[2 * i + 1]);
            b[i] = pick(f(_mm512_unpacklo_epi64(x, y)), f(_mm512_unpackhi_epi64(x, y)));
        }
        KVQ_UNROLL
        for (int i = 0; i < 2; ++i)
            c[i] = pick(floats(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88)),
                        floats(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd)));
        return pick(floats(_mm512_shuffle_f32x4(c[0], c[1], 0x88)),
                    floats(_mm512_shuffle_f32x4(c[0], c[1], 0xdd)));
    }
    /// 4 x 4 words within 128-bit lanes: afterwards lane l of v[i] holds the former word 4l + i of all four.
    static KVQ_INLINE void transpose_fours(ints (&v)[4]) {
        const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]),
                      c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
        v[0] = _mm512_unpacklo_epi64(a, c);
        v[1] = _mm512_unpackhi_epi64(a, c);
        v[2] = _mm512_unpacklo_epi64(b, d);
        v[3] = _mm512_unpackhi_epi64(b, d);
    }
    /// Writes the 128-bit lanes of four vectors side by side: lane l of them to out + l * stride.
    static KVQ_INLINE void store_lanes(std::byte* out, std::ptrdiff_t stride, const ints (&v)[4]) {
        const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[0], v[1], 0xee),
                      c = _mm512_shuffle_i32x4(v[2], v[3], 0x44), d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
        _mm512_storeu_si512(out, _mm512_shuffle_i32x4(a, c, 0x88));
        _mm512_storeu_si512(out + stride, _mm512_shuffle_i32x4(a, c, 0xdd));
        _mm512_storeu_si512(out + 2 * stride, _mm512_shuffle_i32x4(b, d, 0x88));
        _mm512_storeu_si512(out + 3 * stride, _mm512_shuffle_i32x4(b, d, 0xdd));
    }
    /// The low halves of words are 256 high + low + 128. Of each four words of x and y: the bytes of high
    /// x, low x, high y, low y; or, Turned, high x, high y, low x, low y.
    template <bool Turned>
    static KVQ_INLINE ints high_low_pairs(ints x, ints y) {
        // -1: zero.
        const __m512i of_x = _mm512_broadcast_i32x4(
                          Turned ? _mm_setr_epi8(1, 5, 9, 13, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1)
                                 : _mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1)),
                      of_y = _mm512_broadcast_i32x4(
                          Turned ? _mm_setr_epi8(-1, -1, -1, -1, 1, 5, 9, 13, -1, -1, -1, -1, 0, 4, 8, 12)
                                 : _mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 1, 5, 9, 13, 0, 4, 8, 12)),
                      low = _mm512_broadcast_i32x4(Turned ? _mm_setr_epi32(0, 0, -0x7f7f7f80, -0x7f7f7f80)
                                                          : _mm_setr_epi32(0, -0x7f7f7f80, 0, -0x7f7f7f80));
        return _mm512_ternarylogic_epi32(_mm512_shuffle_epi8(x, of_x), _mm512_shuffle_epi8(y, of_y), low,
                                         0x56);
    }
    /// Word k: byte of[k] of four rows of 16 bytes. Sets = 1: in order; 2: bytes k and 8 + k in turns.
    template <int Sets>
    static KVQ_INLINE ints turn_sixteen(const std::byte* const (&rows)[4]) {
        const auto two = [&](int i, int k) KVQ_INLINE_LAMBDA {
            const auto part = [&](int n) KVQ_INLINE_LAMBDA {
                return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[n]));
            };
            return _mm256_inserti128_si256(_mm256_castsi128_si256(part(i)), part(k), 1);
        };
        const __m256i a = two(0, 2), b = two(1, 3);
        return _mm512_permutexvar_epi16(word_order<Sets>(),
                                        _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_unpacklo_epi8(a, b)),
                                                           _mm256_unpackhi_epi8(a, b), 1));
    }
    /// Byte k of four rows of 32 bytes, plus `add`, in a word: of bytes 0 to 7 and 16 to 23 in v[0].
    static KVQ_INLINE void turn_thirty_two(const std::byte* const (&rows)[4], ints add, ints (&v)[2]) {
        const auto two = [&](int i, int k) KVQ_INLINE_LAMBDA {
            const auto part = [&](int n) KVQ_INLINE_LAMBDA {
                return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[n]));
            };
            return _mm512_add_epi8(_mm512_inserti64x4(_mm512_castsi256_si512(part(i)), part(k), 1), add);
        };
        const __m512i a = two(0, 2), b = two(1, 3), order = word_order<0>();
        v[0] = _mm512_permutexvar_epi16(order, _mm512_unpacklo_epi8(a, b));
        v[1] = _mm512_permutexvar_epi16(order, _mm512_unpackhi_epi8(a, b));
    }
    /// The sums of the 128-bit lanes of four vectors, side by side.
    static KVQ_INLINE floats sum_lanes(const floats (&v)[4]) {
        const auto two = [&](__m512 a, __m512 b) KVQ_INLINE_LAMBDA {
            return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        };
        const __m512 a = two(v[0], v[1]), b = two(v[2], v[3]);
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    /// Lane i: lane index[i] of a, or from `width` on of b.
    static KVQ_INLINE floats lookup(floats a, floats b, ints index) {
        return _mm512_permutex2var_ps(a, index, b);
    }
    /// Equal parts: at p, and as many bytes behind it.
    static KVQ_INLINE ints load_parts(const std::byte* p, const std::ptrdiff_t (&behind)[1]) {
        const auto part = [](const std::byte* at) KVQ_INLINE_LAMBDA {
            return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        };
        return _mm512_inserti64x4(_mm512_castsi256_si512(part(p)), part(p + behind[0]), 1);
    }
    static KVQ_INLINE ints load_parts(const std::byte* p, const std::ptrdiff_t (&behind)[3]) {
        const auto part = [](const std::byte* at) KVQ_INLINE_LAMBDA {
            return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        };
        const auto two = [&](const std::byte* a, const std::byte* b) KVQ_INLINE_LAMBDA {
            return _mm256_inserti128_si256(_mm256_castsi128_si256(part(a)), part(b), 1);
        };
        return _mm512_inserti64x4(_mm512_castsi256_si512(two(p, p + behind[0])),
                                  two(p + behind[1], p + behind[2]), 1);
    }
    /// The low halves of the 128-bit lanes of two vectors side by side, and the high ones.
    static KVQ_INLINE void split_lanes(ints (&v)[2]) {
        const __m512i low = _mm512_unpacklo_epi64(v[0], v[1]);
        v[1] = _mm512_unpackhi_epi64(v[0], v[1]);
        v[0] = low;
    }
    /// The low halves of the words of two vectors side by side, and the high ones.
    static KVQ_INLINE void split_halves(ints (&v)[2]) {
        alignas(64) static constexpr auto even = [] {
            std::array<std::uint16_t, 32> i{};
            for (std::size_t k = 0; k < 32; ++k) i[k] = static_cast<std::uint16_t>(2 * k);
            return i;
        }();
        const __m512i index = _mm512_load_si512(even.data());
        const __m512i low = _mm512_permutex2var_epi16(v[0], index, v[1]);
        v[1] = _mm512_permutex2var_epi16(v[0], _mm512_or_si512(index, _mm512_set1_epi16(1)), v[1]);
        v[0] = low;
    }
    /// 16 values rounded to T, twice if two copies fit; lane i of an index of T's size reads entry i % (lanes
    /// of T) of the table.
    template <class T>
    static KVQ_INLINE ints code_table(floats a) {
        if constexpr (std::same_as<T, float>)
            return as_ints(a);
        else if constexpr (std::same_as<T, float16>)
            return _mm512_broadcast_i64x4(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        else
            return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(half_bits<T>(a)));
    }
    template <class T>
    static KVQ_INLINE ints lookup_table(ints index, ints table) {
        if constexpr (sizeof(T) == 2)
            return _mm512_permutexvar_epi16(index, table);
        else
            return _mm512_permutexvar_epi32(index, table);
    }
    /// 16 bytes hold four words of codes of one row: those of columns [Part * n, (Part + 1) * n), one in each
    /// of the n lanes of T; the bits above a code are those of other codes in the byte.
    template <class T, int Bits, int Part>
    static KVQ_INLINE ints spread_codes(const std::byte* p) {
        struct indices {
            std::uint8_t byte[64];
            std::uint8_t shift[64];
        };
        alignas(64) static constexpr indices of = [] {
            indices r{};
            constexpr int size = sizeof(T), n = 64 / size, quads = 8 / Bits;  // of a word
            for (int i = 0; i < 64; ++i) {
                const int column = Part * n + i / size, quad = column / 4;
                r.byte[i] = static_cast<std::uint8_t>(i % size == 0 ? quad / quads * 4 + column % 4 : 0x80);
                r.shift[i] = static_cast<std::uint8_t>(i % size == 0 ? quad % quads * Bits : 0);
            }
            return r;
        }();
        const __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const __m512i bytes = _mm512_shuffle_epi8(words, _mm512_load_si512(of.byte));
        if constexpr (sizeof(T) == 2)
            return _mm512_srlv_epi16(bytes, _mm512_load_si512(of.shift));
        else
            return _mm512_srlv_epi32(bytes, _mm512_load_si512(of.shift));
    }
    /// Lane i: lane index[i] of the table.
    static KVQ_INLINE floats lookup(floats table, ints index) { return _mm512_permutexvar_ps(index, table); }
    static KVQ_INLINE ints load_bytes(const std::byte* p) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static KVQ_INLINE ints load_signed_bytes(const std::byte* p) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static KVQ_INLINE void load_e4m3(const std::byte* p, floats (&v)[2]) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                      even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 1),
                      odd = _mm256_srai_epi16(bytes, 1);
        v[0] = _mm512_cvtph_ps(_mm256_and_si256(even, _mm256_set1_epi16(-0x4001)));
        v[1] = _mm512_cvtph_ps(_mm256_and_si256(odd, _mm256_set1_epi16(-0x4080)));
    }
    /// Byte k of 16 words in v[k]; NaN is 480.
    static KVQ_INLINE void load_e4m3_words(const std::byte* p, floats (&v)[4]) {
        const __m512i words = _mm512_loadu_si512(p),
                      even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(words, 8), 1),
                                              _mm512_set1_epi16(-0x4001)),
                      odd = _mm512_and_si512(_mm512_srai_epi16(words, 1), _mm512_set1_epi16(-0x4080));
        v[0] = halves<float16, 0>(even);
        v[1] = halves<float16, 0>(odd);
        v[2] = halves<float16, 1>(even);
        v[3] = halves<float16, 1>(odd);
    }
    /// 16 rows of 8 bytes: byte k of all of them in v[k]; NaN is 480.
    static KVQ_INLINE void turn_e4m3(const ints (&two)[2], floats (&v)[8]) {
        alignas(64) static constexpr auto order = [] {
            std::array<std::uint16_t, 32> of{};
            for (std::size_t k = 0; k < 32; ++k) of[k] = static_cast<std::uint16_t>(k % 16 * 4 + k / 16);
            return of;
        }();
        const __m512i first = _mm512_load_si512(order.data());
        KVQ_UNROLL
        for (int i = 0; i < 2; ++i) {
            const __m512i bytes = _mm512_permutex2var_epi16(
                two[0], _mm512_add_epi16(first, _mm512_set1_epi16(static_cast<short>(2 * i))), two[1]);
            const __m512i of[2] = {_mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 1),
                                                    _mm512_set1_epi16(-0x4001)),
                                   _mm512_and_si512(_mm512_srai_epi16(bytes, 1), _mm512_set1_epi16(-0x4080))};
            KVQ_UNROLL
            for (int k = 0; k < 2; ++k) {
                v[4 * i + k] = _mm512_cvtph_ps(_mm512_castsi512_si256(of[k]));
                v[4 * i + 2 + k] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(of[k], 1));
            }
        }
    }
    static KVQ_INLINE ints load_halfwords(const std::byte* p) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static KVQ_INLINE void store_halfwords(std::byte* p, ints a) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
    }
    template <class T>
    static KVQ_INLINE ints half_bits(floats a) {
        if constexpr (std::same_as<T, float16>) {
            return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        } else {
            const __m512i u = _mm512_castps_si512(a), one = _mm512_set1_epi32(1);
            const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), one);
            const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
            return _mm512_srli_epi32(_mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000)), 16);
        }
    }
    template <bool Up>
    static KVQ_INLINE ints directed_float16(floats a) {
        constexpr int mode = (Up ? _MM_FROUND_TO_POS_INF : _MM_FROUND_TO_NEG_INF) | _MM_FROUND_NO_EXC;
        return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(a, mode));
    }
    static KVQ_INLINE void store_float16(std::byte* p, floats a) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                            _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static KVQ_INLINE ints in_register(ints a) {
        __m512i word = a;
        __asm__("" : "+v"(word));
        return word;
    }
    static KVQ_INLINE floats rounded_product(floats a, floats b) {
        __m512 product = _mm512_mul_ps(a, b);
        __asm__("" : "+v"(product));
        return product;
    }

    template <class T>
    static KVQ_INLINE floats load_values(const std::byte* p) {
        if constexpr (std::same_as<T, float>)
            return _mm512_loadu_ps(p);
        else
            return widen<T>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    template <class T>
    static KVQ_INLINE floats load_values(const std::byte* p, int n) {
        if constexpr (std::same_as<T, float>)
            return _mm512_maskz_loadu_ps(first(n), p);
        else
            return widen<T>(_mm256_maskz_loadu_epi16(first(n), p));
    }
    template <class T, int Half>
    static KVQ_INLINE floats halves(ints words) {
        if constexpr (std::same_as<T, bfloat16>) {
            return _mm512_castsi512_ps(Half ? _mm512_and_si512(words, _mm512_set1_epi32(-65536))
                                            : _mm512_slli_epi32(words, 16));
        } else {
            const __m512i w = Half ? _mm512_srli_epi32(words, 16) : static_cast<__m512i>(words);
            return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(w));
        }
    }

    static KVQ_INLINE floats splat_pair(const float* p) {
        double pair;
        __builtin_memcpy(&pair, p, 8);
        return _mm512_castpd_ps(_mm512_set1_pd(pair));
    }
    static KVQ_INLINE floats add_pairs(floats a, floats b) {
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        return _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
    }
    static KVQ_INLINE floats keep_even(floats a) { return _mm512_maskz_mov_ps(0x5555, a); }
    static KVQ_INLINE float sum(floats a) { return _mm512_reduce_add_ps(a); }
    static KVQ_INLINE float largest(floats a) { return _mm512_reduce_max_ps(a); }
    static KVQ_INLINE float smallest(floats a) { return _mm512_reduce_min_ps(a); }

private:
    /// Pairs of bytes of four rows. 0: those of two rows, then of the others; 1, 2: turn_sixteen.
    template <int Sets>
    static KVQ_INLINE __m512i word_order() {
        alignas(64) static constexpr auto order = [] {
            std::array<std::uint16_t, 32> of{};
            for (std::size_t k = 0; k < 16; ++k) {
                const std::size_t byte = Sets == 2 ? k % 2 * 8 + k / 2 : k,
                                  first = Sets == 0 ? k : byte / 8 * 16 + byte % 8;
                of[2 * k] = static_cast<std::uint16_t>(first);
                of[2 * k + 1] = static_cast<std::uint16_t>(first + (Sets == 0 ? 16 : 8));
            }
            return of;
        }();
        return _mm512_load_si512(order.data());
    }
    template <class T>
    static KVQ_INLINE floats widen(__m256i values) {
        if constexpr (std::same_as<T, float16>)
            return _mm512_cvtph_ps(values);
        else
            return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
    }
};

}}}  // namespace kvq::arch
