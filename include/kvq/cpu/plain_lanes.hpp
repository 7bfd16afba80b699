// Lanes without intrinsics: the interface of a set of SIMD lanes, written as loops that compilers vectorise.
//
// The kernels in this folder are templates over such a type. `ints` are 32-bit words, `floats` are floats,
// both `width` wide; `doubles` are half as many. The SIMD versions are in cpu/arch/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "../core/rounding.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

struct plain_lanes {
    static constexpr int width = 8;
    /// Vectors of rows that a product kernel keeps in registers at once.
    static constexpr int row_vectors = 1;
    static constexpr int value_vectors = 2;
    /// Are products of 16-bit words faster than two of bytes? (The operations for them are needed only then.)
    static constexpr bool word_products = false;

    struct ints {
        std::int32_t v[width];
    };
    struct floats {
        float v[width];
    };
    struct doubles {
        double v[width / 2];
    };

    template <class F>
    static KVQ_INLINE ints map_ints(F f) {
        ints r;
        for (int i = 0; i < width; ++i) r.v[i] = f(i);
        return r;
    }
    template <class F>
    static KVQ_INLINE floats map_floats(F f) {
        floats r;
        for (int i = 0; i < width; ++i) r.v[i] = f(i);
        return r;
    }

    // Words. The versions with a count touch only the first n lanes; loaded lanes beyond are zero.
    static KVQ_INLINE ints load(const std::byte* p) { return detail::load_as<ints>(p); }
    static KVQ_INLINE ints load(const std::byte* p, int n) {
        return map_ints([&](int i) { return i < n ? detail::load_as<std::int32_t>(p + 4 * i) : 0; });
    }
    static KVQ_INLINE void store(std::byte* p, ints a) { detail::store_as(p, a); }
    static KVQ_INLINE void store(std::byte* p, ints a, int n) {
        for (int i = 0; i < n; ++i) detail::store_as(p + 4 * i, a.v[i]);
    }
    static KVQ_INLINE ints splat(std::int32_t x) {
        return map_ints([&](int) { return x; });
    }
    template <int S>
    static KVQ_INLINE ints shift_right(ints a) {
        return map_ints(
            [&](int i) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(a.v[i]) >> S); });
    }
    template <int S>
    static KVQ_INLINE ints shift_right_signed(ints a) {
        return map_ints([&](int i) { return a.v[i] >> S; });
    }
    template <int S>
    static KVQ_INLINE ints shift_left(ints a) {
        return map_ints(
            [&](int i) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(a.v[i]) << S); });
    }
    static KVQ_INLINE ints bit_and(ints a, ints b) {
        return map_ints([&](int i) { return a.v[i] & b.v[i]; });
    }
    static KVQ_INLINE ints bit_or(ints a, ints b) {
        return map_ints([&](int i) { return a.v[i] | b.v[i]; });
    }
    // Sums wrap, as in registers: operands that are not finite give any integers.
    static KVQ_INLINE ints add(ints a, ints b) {
        return map_ints([&](int i) {
            return static_cast<std::int32_t>(static_cast<std::uint32_t>(a.v[i]) +
                                             static_cast<std::uint32_t>(b.v[i]));
        });
    }
    static KVQ_INLINE ints subtract(ints a, ints b) {
        return map_ints([&](int i) {
            return static_cast<std::int32_t>(static_cast<std::uint32_t>(a.v[i]) -
                                             static_cast<std::uint32_t>(b.v[i]));
        });
    }
    /// Word i of 128-bit lane l: the bytes of lane l of vector i.
    template <bool Signed>
    static KVQ_INLINE ints pack_bytes(ints a, ints b, ints c, ints d) {
        const ints v[4] = {a, b, c, d};
        return map_ints([&](int i) {
            std::uint32_t word = 0;
            for (int k = 0; k < 4; ++k)
                word |= (static_cast<std::uint32_t>(v[i % 4].v[i / 4 * 4 + k]) & 255u) << (8 * k);
            return static_cast<std::int32_t>(word);
        });
    }
    static KVQ_INLINE ints add_bytes(ints a, ints b) {
        return map_ints([&](int i) {
            std::uint32_t word = 0;
            for (int k = 0; k < 32; k += 8)
                word |=
                    (((static_cast<std::uint32_t>(a.v[i]) >> k) + (static_cast<std::uint32_t>(b.v[i]) >> k)) &
                     255u)
                    << k;
            return static_cast<std::int32_t>(word);
        });
    }
    /// 16-bit halves as signed integers: minima and maxima; and conversion to integers with the order of
    /// 16-bit floats (and back).
    template <class F>
    static KVQ_INLINE ints map_halves(F f) {
        return map_ints([&](int i) {
            const std::uint32_t low = static_cast<std::uint16_t>(f(i, 0)),
                                high = static_cast<std::uint16_t>(f(i, 16));
            return static_cast<std::int32_t>(low | high << 16);
        });
    }
    static KVQ_INLINE ints min_halves(ints a, ints b) {
        return map_halves([&](int i, int at) {
            const auto x = static_cast<std::int16_t>(a.v[i] >> at),
                       y = static_cast<std::int16_t>(b.v[i] >> at);
            return x < y ? x : y;
        });
    }
    static KVQ_INLINE ints max_halves(ints a, ints b) {
        return map_halves([&](int i, int at) {
            const auto x = static_cast<std::int16_t>(a.v[i] >> at),
                       y = static_cast<std::int16_t>(b.v[i] >> at);
            return x > y ? x : y;
        });
    }
    static KVQ_INLINE ints ordered_halves(ints a) {
        return map_halves([&](int i, int at) {
            const auto x = static_cast<std::int16_t>(a.v[i] >> at);
            return static_cast<std::int16_t>(x < 0 ? x ^ 0x7fff : x);
        });
    }
    /// acc + the sum of four products: unsigned bytes of `codes` (each below 2^Bits), signed bytes of `x`.
    template <int Bits>
    static KVQ_INLINE ints dot(ints acc, ints codes, ints x) {
        return map_ints([&](int i) {
            const auto c = static_cast<std::uint32_t>(codes.v[i]), y = static_cast<std::uint32_t>(x.v[i]);
            std::int32_t sum = 0;
            for (int b = 0; b < 32; b += 8)
                sum += static_cast<std::int32_t>((c >> b) & 255u) * static_cast<std::int8_t>((y >> b) & 255u);
            return static_cast<std::int32_t>(static_cast<std::uint32_t>(acc.v[i]) +
                                             static_cast<std::uint32_t>(sum));
        });
    }
    /// 16 bytes, as often as they fit, and for every byte of a, 0 to 15, that byte of the 16 of `table`
    /// around it.
    static KVQ_INLINE ints sixteen_bytes(const std::uint8_t* p) {
        return map_ints([&](int i) { return detail::load_as<std::int32_t>(p + 4 * (i % 4)); });
    }
    static KVQ_INLINE ints lookup_bytes(ints table, ints a) {
        return map_ints([&](int i) {
            std::uint32_t found = 0;
            for (int b = 0; b < 32; b += 8) {
                const auto at = static_cast<std::uint32_t>(a.v[i]) >> b & 15u;
                found |=
                    (static_cast<std::uint32_t>(table.v[i / 4 * 4 + static_cast<int>(at / 4)]) >> at % 4 * 8 &
                     255u)
                    << b;
            }
            return static_cast<std::int32_t>(found);
        });
    }

    // Floats.
    static KVQ_INLINE floats load_floats(const float* p) { return detail::load_as<floats>(p); }
    static KVQ_INLINE floats load_floats(const float* p, int n) {
        return map_floats([&](int i) { return i < n ? p[i] : 0.0f; });
    }
    static KVQ_INLINE void store_floats(float* p, floats a) { detail::store_as(p, a); }
    static KVQ_INLINE void store_floats(float* p, floats a, int n) {
        for (int i = 0; i < n; ++i) p[i] = a.v[i];
    }
    static KVQ_INLINE floats splat_float(float x) {
        return map_floats([&](int) { return x; });
    }
    /// p[0], p[1], p[0], p[1], ...
    static KVQ_INLINE floats splat_pair(const float* p) {
        return map_floats([&](int i) { return p[i & 1]; });
    }
    /// a[0] + a[1], a[2] + a[3], ..., b[0] + b[1], ...
    static KVQ_INLINE floats add_pairs(floats a, floats b) {
        return map_floats([&](int i) {
            const floats& from = i < width / 2 ? a : b;
            const int at = 2 * i % width;
            return from.v[at] + from.v[at + 1];
        });
    }
    /// Odd lanes become zero.
    static KVQ_INLINE floats keep_even(floats a) {
        return map_floats([&](int i) { return i & 1 ? 0.0f : a.v[i]; });
    }
    static KVQ_INLINE floats add(floats a, floats b) {
        return map_floats([&](int i) { return a.v[i] + b.v[i]; });
    }
    static KVQ_INLINE floats subtract(floats a, floats b) {
        return map_floats([&](int i) { return a.v[i] - b.v[i]; });
    }
    static KVQ_INLINE floats multiply(floats a, floats b) {
        return map_floats([&](int i) { return a.v[i] * b.v[i]; });
    }
    /// The product, never fused with a sum that follows (core/rounding.hpp).
    static KVQ_INLINE floats rounded_product(floats a, floats b) {
        return map_floats([&](int i) { return detail::rounded_product(a.v[i], b.v[i]); });
    }
    /// Fused if the CPU can: explicit, because the compiler would decide differently in every kernel.
    static KVQ_INLINE floats multiply_add(floats a, floats b, floats c) {
#if defined(__FP_FAST_FMAF)
        return map_floats([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
#else
        return map_floats([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
#endif
    }
    static KVQ_INLINE floats divide(floats a, floats b) {
        return map_floats([&](int i) { return a.v[i] / b.v[i]; });
    }

    // Doubles: a register of them has half as many lanes.
    template <class F>
    static KVQ_INLINE doubles map_doubles(F f) {
        doubles r;
        for (int i = 0; i < width / 2; ++i) r.v[i] = f(i);
        return r;
    }
    /// Lanes of the lower (Half = 0) or upper (1) half.
    template <int Half>
    static KVQ_INLINE doubles widen(floats a) {
        return map_doubles([&](int i) { return static_cast<double>(a.v[Half * width / 2 + i]); });
    }
    static KVQ_INLINE floats narrow(doubles low, doubles high) {
        return map_floats(
            [&](int i) { return static_cast<float>(i < width / 2 ? low.v[i] : high.v[i - width / 2]); });
    }
    static KVQ_INLINE doubles load_doubles(const double* p) { return detail::load_as<doubles>(p); }
    static KVQ_INLINE void store_doubles(double* p, doubles a) { detail::store_as(p, a); }
    static KVQ_INLINE doubles splat_double(double x) {
        return map_doubles([&](int) { return x; });
    }
    static KVQ_INLINE doubles add(doubles a, doubles b) {
        return map_doubles([&](int i) { return a.v[i] + b.v[i]; });
    }
    static KVQ_INLINE doubles multiply(doubles a, doubles b) {
        return map_doubles([&](int i) { return a.v[i] * b.v[i]; });
    }
    /// a b + c; fused or not, so only for exact products of floats.
    static KVQ_INLINE doubles multiply_add(doubles a, doubles b, doubles c) {
        return map_doubles([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
    }

    static KVQ_INLINE floats larger(floats a, floats b) {
        return map_floats([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
    }
    static KVQ_INLINE floats smaller(floats a, floats b) {
        return map_floats([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
    }
    /// `a` limited to [0, top]; NaN becomes 0.
    static KVQ_INLINE floats limited(floats a, floats top) {
        return map_floats([&](int i) {
            const float x = a.v[i] > 0.0f ? a.v[i] : 0.0f;
            return x < top.v[i] ? x : top.v[i];
        });
    }
    static KVQ_INLINE floats abs(floats a) {
        return map_floats([&](int i) { return a.v[i] < 0.0f ? -a.v[i] : a.v[i]; });
    }
    static KVQ_INLINE float sum(floats a) {
        float s = 0.0f;
        for (const float x : a.v) s += x;
        return s;
    }
    static KVQ_INLINE float largest(floats a) {
        float s = a.v[0];
        for (int i = 1; i < width; ++i) s = s > a.v[i] ? s : a.v[i];
        return s;
    }
    static KVQ_INLINE float smallest(floats a) {
        float s = a.v[0];
        for (int i = 1; i < width; ++i) s = s < a.v[i] ? s : a.v[i];
        return s;
    }
    static KVQ_INLINE floats to_floats(ints a) {
        return map_floats([&](int i) { return static_cast<float>(a.v[i]); });
    }
    /// Nearest integers, ties to even; |a| < 2^22. Any integer for other values: products of huge or NaN
    /// queries.
    static KVQ_INLINE ints round(floats a) {
        return map_ints([&](int i) {
            const float magnitude = a.v[i] < 0.0f ? -a.v[i] : a.v[i];
            if (!(magnitude < 2147483648.0f)) return std::numeric_limits<std::int32_t>::lowest();
            const auto below = static_cast<std::int32_t>(magnitude);
            const float rest = magnitude - static_cast<float>(below);
            const std::int32_t r = below + ((rest > 0.5f || (rest == 0.5f && (below & 1))) ? 1 : 0);
            return a.v[i] < 0.0f ? -r : r;
        });
    }
    /// `a` where `test` > `limit`, else 0.
    static KVQ_INLINE floats keep_above(floats a, floats test, float limit) {
        return map_floats([&](int i) { return test.v[i] > limit ? a.v[i] : 0.0f; });
    }
    /// 0 where `test` <= `limit`, else `a`, also where `test` is NaN.
    static KVQ_INLINE floats keep_unless_below(floats a, floats test, float limit) {
        return map_floats([&](int i) { return test.v[i] <= limit ? 0.0f : a.v[i]; });
    }
    static KVQ_INLINE floats as_floats(ints a) { return detail::load_as<floats>(a.v); }
    static KVQ_INLINE ints as_ints(floats a) { return detail::load_as<ints>(a.v); }

    /// Packs the lowest bytes of four words each: word q of `high` to out[q * stride], of `low` to out[q *
    /// stride + 1].
    static KVQ_INLINE void store_high_low(std::uint32_t* out, int stride, ints high, ints low) {
        const auto pack = [](const ints& a, int q) {
            std::uint32_t word = 0;
            for (int k = 0; k < 4; ++k)
                word |= (static_cast<std::uint32_t>(a.v[4 * q + k]) & 255u) << (8 * k);
            return word;
        };
        for (int q = 0; q < width / 4; ++q) {
            out[q * stride] = pack(high, q);
            out[q * stride + 1] = pack(low, q);
        }
    }

    /// Rows become columns: word i of v[j] is afterwards the former word j of v[i].
    static KVQ_INLINE void transpose(ints (&v)[width]) {
        for (int i = 0; i < width; ++i)
            for (int j = 0; j < i; ++j) {
                const std::int32_t word = v[i].v[j];
                v[i].v[j] = v[j].v[i];
                v[j].v[i] = word;
            }
    }
    /// Returns a, held in a register, so that a second use does not load it again.
    static KVQ_INLINE ints in_register(ints a) { return a; }
    /// Lane i: all lanes of vector i reduced by `pick`, in any order.
    template <class F>
    static KVQ_INLINE floats merge_lanes(const ints* v, F pick) {
        ints square[width];
        for (int i = 0; i < width; ++i) square[i] = v[i];
        transpose(square);
        floats result = as_floats(square[0]);
        for (int i = 1; i < width; ++i) result = pick(result, as_floats(square[i]));
        return result;
    }
    /// Lane i: the smallest (largest) lane of vector i.
    template <bool Smallest>
    static KVQ_INLINE floats extreme_of_each(const ints* v) {
        return map_floats([&](int i) {
            const floats x = as_floats(v[i]);
            return Smallest ? smallest(x) : largest(x);
        });
    }
    /// `width` consecutive bytes, or 16-bit words, as words.
    static KVQ_INLINE ints load_bytes(const std::byte* p) {
        return map_ints([&](int i) { return static_cast<std::int32_t>(p[i]); });
    }
    static KVQ_INLINE ints load_halfwords(const std::byte* p) {
        return map_ints(
            [&](int i) { return static_cast<std::int32_t>(detail::load_as<std::uint16_t>(p + 2 * i)); });
    }
    static KVQ_INLINE void store_halfwords(std::byte* p, ints a) {
        for (int i = 0; i < width; ++i) detail::store_as(p + 2 * i, static_cast<std::uint16_t>(a.v[i]));
    }
    /// `width` floats as consecutive values of type T, each rounded once.
    template <class T>
    static KVQ_INLINE void store_values(std::byte* p, floats a) {
        for (int i = 0; i < width; ++i) detail::store_as(p + i * int{sizeof(T)}, T(a.v[i]));
    }
    /// The same rounded down or up instead; the floats are finite and in the range of T.
    template <class T, bool Up>
    static KVQ_INLINE ints directed_bits(floats a) {
        return map_ints([&](int i) {
            const T t = Up ? detail::round_up_to<T>(a.v[i]) : detail::round_down<T>(a.v[i]);
            return static_cast<std::int32_t>(t.bits);
        });
    }
    /// Bit patterns of floats rounded to float16 or bfloat16, as words.
    template <class T>
    static KVQ_INLINE ints half_bits(floats a) {
        return map_ints([&](int i) { return static_cast<std::int32_t>(T(a.v[i]).bits); });
    }

    // 16- and 32-bit values.

    /// `width` consecutive values of type T.
    template <class T>
    static KVQ_INLINE floats load_values(const std::byte* p) {
        return map_floats(
            [&](int i) { return static_cast<float>(detail::load_as<T>(p + i * int{sizeof(T)})); });
    }
    template <class T>
    static KVQ_INLINE floats load_values(const std::byte* p, int n) {
        return map_floats([&](int i) {
            return i < n ? static_cast<float>(detail::load_as<T>(p + i * int{sizeof(T)})) : 0.0f;
        });
    }
    /// The 16-bit values in the low (Half = 0) or high (1) halves of words.
    template <class T, int Half>
    static KVQ_INLINE floats halves(ints words) {
        return map_floats([&](int i) {
            const auto w = static_cast<std::uint32_t>(words.v[i]) >> (16 * Half);
            return static_cast<float>(T::from_bits(static_cast<std::uint16_t>(w & 0xffffu)));
        });
    }
};

}}  // namespace kvq
