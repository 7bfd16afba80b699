// Numbers of rows of tokens as floats, 32 channels at a time, in registers.
//
//   float_lanes<Lanes, Code>       8-bit floats of words as floats, and back
//   row_numbers<Lanes, Kind>       load(from, v): the 32 numbers of a chunk as 32 / width vectors
//   row_chunk                      channels of a chunk, and where channel i of it lies among the vectors
//
// Kind: row_layout::number (schemes/row_layout.hpp), or plain_floats: numbers that are floats already.
// Two e2m1 in a byte, and neighbours of e4m3 in 16 bits, stay apart: a vector holds the even channels of
// 2 * width neighbours, the next one the odd ones. Operands and sums have the same order, so that nothing is
// interleaved.
// Numbers are exact times `unit`, which callers put into what they multiply. e4m3 through fp16 has no NaN:
// where `checks_nan` is true, callers look for codes of NaN first.
#pragma once

#include <array>
#include <limits>

#include "../../core/bits.hpp"
#include "../../core/float_formats.hpp"
#include "../../schemes/row_layout.hpp"
#include "../../schemes/token_rows.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes, class Code>
struct float_lanes;

/// Below 2^-6, the smallest normal number, e4m3 counts units of 2^-9. As a number with an exponent of its own
/// such a code is x < 2^-6 instead, and stands for 2x - 2^-6; above, that is more than x.
template <class Lanes>
struct float_lanes<Lanes, e4m3> {
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;

    static KVQ_INLINE floats values(ints codes) {
        const ints magnitude = Lanes::bit_and(codes, Lanes::splat(0x7f));
        const floats wide =
            Lanes::as_floats(Lanes::add(Lanes::template shift_left<20>(magnitude), Lanes::splat(120 << 23)));
        const floats nan = Lanes::keep_above(Lanes::splat_float(std::numeric_limits<float>::quiet_NaN()),
                                             wide, e4m3::max_finite);
        const floats x = Lanes::add(Lanes::smaller(wide, Lanes::multiply_add(wide, Lanes::splat_float(2.0f),
                                                                             Lanes::splat_float(-normal))),
                                    nan);
        return Lanes::as_floats(Lanes::bit_or(
            Lanes::as_ints(x), Lanes::template shift_left<24>(Lanes::bit_and(codes, Lanes::splat(0x80)))));
    }
    static KVQ_INLINE ints codes(floats x) {
        const floats magnitude = Lanes::smaller(Lanes::abs(x), Lanes::splat_float(e4m3::max_finite));
        const ints wide = Lanes::as_ints(Lanes::larger(magnitude, Lanes::splat_float(normal)));
        const ints odd = Lanes::bit_and(Lanes::template shift_right<20>(wide), Lanes::splat(1));
        const ints of_normal =
            Lanes::template shift_right<20>(Lanes::add(Lanes::add(wide, Lanes::splat(0x7ffff)), odd));
        // The unit of 2^14 in a float is 2^-9.
        const ints units = Lanes::as_ints(
            Lanes::add(Lanes::smaller(magnitude, Lanes::splat_float(normal)), Lanes::splat_float(0x1p14f)));
        constexpr std::int32_t both = 120 * 8 + 0x46800000 + 8;
        const ints all = Lanes::subtract(Lanes::add(of_normal, units), Lanes::splat(both));
        return Lanes::bit_or(
            all, Lanes::bit_and(Lanes::template shift_right<24>(Lanes::as_ints(x)), Lanes::splat(0x80)));
    }

private:
    static constexpr float normal = 0x1p-6f;
};

inline constexpr int row_chunk = 32;

/// Numbers that are floats: of blocks that were dequantized, or numbers of the end of a row.
inline constexpr auto plain_floats = static_cast<row_layout::number>(255);

/// Where channel i of a chunk lies among the lanes of its vectors.
constexpr int place_in_chunk(bool pairs, int width, int i) noexcept {
    return pairs ? (i / (2 * width) * 2 + i % 2) * width + i % (2 * width) / 2 : i;
}

template <class Lanes, row_layout::number Kind>
struct row_numbers {
    using kind = row_layout::number;
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    static constexpr int width = Lanes::width, vectors = row_chunk / width;
    static constexpr bool through_halves =
        Kind == kind::e4m3 && requires(const std::byte* p, floats (&v)[2]) {
        Lanes::load_e4m3(p, v);
    };
    static constexpr bool pairs = Kind == kind::e2m1 || through_halves, checks_nan = through_halves;
    static constexpr float unit = through_halves ? 256.0f : 1.0f;

    /// The chunk's numbers at `from`, behind its scale and minimum.
    static KVQ_INLINE void load(const std::byte* from, floats (&v)[vectors]) {
        if constexpr (Kind == plain_floats) {
            KVQ_UNROLL
            for (int i = 0; i < vectors; ++i) v[i] = Lanes::template load_values<float>(from + 4 * width * i);
        } else if constexpr (nibbles) {
            load_nibbles(from, v);
        } else if constexpr (through_halves) {
            KVQ_UNROLL
            for (int i = 0; i < vectors; i += 2) {
                floats of[2];
                Lanes::load_e4m3(from + width * i, of);
                v[i] = of[0];
                v[i + 1] = of[1];
            }
        } else {
            KVQ_UNROLL
            for (int i = 0; i < vectors; ++i) v[i] = load_byte_numbers(from + width * i);
        }
    }

private:
    static constexpr bool fifth_bits = Kind == kind::centred5 || Kind == kind::unsigned5;
    static constexpr bool sixth_bits = Kind == kind::centred6;
    static constexpr bool nibbles = Kind == kind::e2m1 || Kind == kind::iq4_nl || sixth_bits ||
                                    Kind == kind::centred4 || Kind == kind::unsigned4 || fifth_bits;
    static constexpr bool by_words = requires(floats table, ints index) { Lanes::lookup(table, index); }
    &&width == 16;

    static KVQ_INLINE floats load_byte_numbers(const std::byte* from) {
        if constexpr (Kind == kind::e4m3)
            return float_lanes<Lanes, e4m3>::values(Lanes::load_bytes(from));
        else if constexpr (Kind == kind::e5m2)
            return Lanes::template halves<float16, 0>(Lanes::template shift_left<8>(Lanes::load_bytes(from)));
        else if constexpr (requires { Lanes::load_signed_bytes(from); })
            return Lanes::to_floats(Lanes::load_signed_bytes(from));
        else
            return Lanes::to_floats(signed_bytes(Lanes::load_bytes(from)));
    }
    static KVQ_INLINE ints signed_bytes(ints bytes) {
        return Lanes::template shift_right_signed<24>(Lanes::template shift_left<24>(bytes));
    }

    /// What a code of four bits stands for: of five and six bits, with those above at zero.
    static constexpr auto entries = [] {
        std::array<float, 16> of{};
        if constexpr (nibbles)
            for (std::size_t i = 0; i < 16; ++i)
                of[i] = detail::number_of_code(Kind, static_cast<std::uint8_t>(i));
        return of;
    }();

    static KVQ_INLINE void load_nibbles(const std::byte* from, floats (&v)[vectors]) {
        std::uint32_t fifth = 0;
        if constexpr (fifth_bits) {
            fifth = detail::load_as<std::uint32_t>(from);
            from += 4;
        }
        [[maybe_unused]] std::uint32_t sixth[2];
        if constexpr (sixth_bits) {
            sixth[0] = detail::load_as<std::uint32_t>(from);
            sixth[1] = detail::load_as<std::uint32_t>(from + 4);
            from += 8;
        }
        KVQ_UNROLL
        for (int h = 0; h < vectors / 2; ++h) {
            const ints bytes = Lanes::load_bytes(from + width * h),
                       high = Lanes::template shift_right<4>(bytes);
            const int low_at = pairs ? 2 * h : h, high_at = pairs ? 2 * h + 1 : vectors / 2 + h;
            v[low_at] = of_nibbles(bytes);
            v[high_at] = of_nibbles(high);
            if constexpr (fifth_bits) {
                v[low_at] = add_fifth(v[low_at], fifth >> width * h);
                v[high_at] = add_fifth(v[high_at], fifth >> (16 + width * h));
            }
            if constexpr (sixth_bits) {
                v[low_at] = add_sixth(v[low_at], sixth[0], sixth[1], h);
                v[high_at] = add_sixth(v[high_at], sixth[0] >> 2, sixth[1] >> 2, h);
            }
        }
    }
    /// Of the low four bits of words.
    static KVQ_INLINE floats of_nibbles(ints codes) {
        if constexpr (by_words) {
            return Lanes::lookup(Lanes::load_floats(entries.data()), codes);
        } else if constexpr (Kind == kind::e2m1 || Kind == kind::iq4_nl) {
            // Integers: twice the numbers of e2m1.
            constexpr float times = Kind == kind::e2m1 ? 2.0f : 1.0f;
            alignas(16) static constexpr auto bytes = [] {
                std::array<std::uint8_t, 16> of{};
                for (std::size_t i = 0; i < 16; ++i)
                    of[i] = static_cast<std::uint8_t>(static_cast<int>(times * entries[i]));
                return of;
            }();
            const ints found = Lanes::lookup_bytes(Lanes::sixteen_bytes(bytes.data()),
                                                   Lanes::bit_and(codes, Lanes::splat(15)));
            return Lanes::multiply(Lanes::to_floats(signed_bytes(found)), Lanes::splat_float(1.0f / times));
        } else {
            return Lanes::to_floats(Lanes::subtract(Lanes::bit_and(codes, Lanes::splat(15)),
                                                    Lanes::splat(static_cast<int>(-entries[0]))));
        }
    }
    /// x plus 16 times the lane's two bits: of channel i of 16, bits of byte i % 8 of two words, from bit 0
    /// or 4 on. h: the vector among the 16.
    static KVQ_INLINE floats add_sixth(floats x, std::uint32_t first, std::uint32_t second, int h) {
        struct lane_bits {
            std::int32_t of[2][vectors / 2][width];
            float inverse[vectors / 2][width];
        };
        static constexpr lane_bits bits = [] {
            lane_bits b{};
            for (int i = 0; i < 16; ++i) {
                const int at = i % 4 * 8 + i / 8 * 4;
                b.of[i / 4 % 2][i / width][i % width] = 3 << at;
                b.inverse[i / width][i % width] = 16.0f / static_cast<float>(1 << at);
            }
            return b;
        }();
        const auto of_word = [&](std::uint32_t word, int which) KVQ_INLINE_LAMBDA {
            return Lanes::bit_and(Lanes::splat(static_cast<std::int32_t>(word)),
                                  Lanes::load(reinterpret_cast<const std::byte*>(bits.of[which][h])));
        };
        return Lanes::multiply_add(Lanes::to_floats(Lanes::bit_or(of_word(first, 0), of_word(second, 1))),
                                   Lanes::load_floats(bits.inverse[h]), x);
    }
    /// x + 16 where the lane's bit is set.
    static KVQ_INLINE floats add_fifth(floats x, std::uint32_t bits) {
        struct powers {
            std::int32_t bit[width];
            float inverse[width];
        };
        static constexpr powers of = [] {
            powers p{};
            for (int i = 0; i < width; ++i) {
                p.bit[i] = 1 << i;
                p.inverse[i] = 16.0f / static_cast<float>(1 << i);
            }
            return p;
        }();
        const ints of_lanes = Lanes::bit_and(Lanes::splat(static_cast<std::int32_t>(bits)),
                                             Lanes::load(reinterpret_cast<const std::byte*>(of.bit)));
        return Lanes::multiply_add(Lanes::to_floats(of_lanes), Lanes::load_floats(of.inverse), x);
    }
};

}}}  // namespace kvq::kernels
