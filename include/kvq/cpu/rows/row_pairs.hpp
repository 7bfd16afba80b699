// Products of pairs of bfloat16 with rows of e4m3, where they are fast (AMD): an instruction takes twice as
// many as of floats, and numbers are looked up instead of converted.
//
//   begin_pair_operands     x as two bfloat16, x = high + low
//   pair_keys<Lanes, Q>     y[i][t] = sum_c number[t][c] x[i][c]
//   pair_values<Lanes, Q>   y[i][c] = sum_t w[i][t] number[t][c]
//
// A number of e4m3 is one bfloat16. A product takes two channels of keys, or two tokens of values.
// Contract: |x - high - low| <= 2^-17 |x| + 2^-126; sums are those of floats, and NaN where a number is. Rows
// have whole vectors of 64 numbers without scales between them. Nothing outside of the rows is read.
#pragma once

#include "row_kernels.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Instruction sets with these kernels; a CPU of theirs has them if Lanes::multiplies_pairs().
template <class Lanes>
inline constexpr bool has_pairs = requires {
    Lanes::multiplies_pairs();
};

/// Numbers of a vector of bytes.
inline constexpr int pair_channels = 64;

/// The halves of the bfloat16 of the codes 0 to 127; those above differ in sign.
struct bfloat_tables {
    alignas(64) std::uint8_t low[128] = {}, high[128] = {};
};
inline constexpr bfloat_tables bfloats_of_e4m3 = [] {
    bfloat_tables t{};
    for (int code = 0; code < 128; ++code) {
        const std::uint32_t bits = code == 127
                                       ? 0x7fc00000u
                                       : detail::bit_cast<std::uint32_t>(detail::number_of_code(
                                             row_layout::number::e4m3, static_cast<std::uint8_t>(code)));
        t.low[code] = static_cast<std::uint8_t>(bits >> 16);
        t.high[code] = static_cast<std::uint8_t>(bits >> 24);
    }
    return t;
}();

template <class Lanes>
class bfloat_loader {
public:
    using ints = typename Lanes::ints;

    bfloat_loader() {
        for (int k = 0; k < 2; ++k) {
            low_[k] = Lanes::load(reinterpret_cast<const std::byte*>(bfloats_of_e4m3.low) + 64 * k);
            high_[k] = Lanes::load(reinterpret_cast<const std::byte*>(bfloats_of_e4m3.high) + 64 * k);
        }
    }
    /// Of each 128-bit lane of codes: the numbers of bytes 0 to 7, and of bytes 8 to 15.
    KVQ_INLINE void load(const std::byte* from, ints (&v)[2]) const {
        const ints codes = Lanes::load(from);
        const ints low = Lanes::lookup_128(low_, codes),
                   high = Lanes::select_bits(Lanes::splat(static_cast<std::int32_t>(0x80808080u)), codes,
                                             Lanes::lookup_128(high_, codes));
        Lanes::interleave_bytes(low, high, v);
    }

private:
    ints low_[2], high_[2];
};

/// n floats as high and low bfloat16, n rounded up to a vector.
template <class Lanes>
KVQ_INLINE void split_floats(const float* x, int n, std::byte* high, std::byte* low) {
    for (int c = 0; c < n; c += Lanes::width) {
        const auto value =
            n - c < Lanes::width ? Lanes::load_floats(x + c, n - c) : Lanes::load_floats(x + c);
        const auto rounded = [](typename Lanes::floats a) KVQ_INLINE_LAMBDA {
            return Lanes::add(Lanes::as_ints(a), Lanes::splat(0x8000));
        };
        const auto top = rounded(value);
        const auto rest = Lanes::subtract(
            value,
            Lanes::as_floats(Lanes::bit_and(top, Lanes::splat(static_cast<std::int32_t>(0xffff0000u)))));
        Lanes::store_halfwords(high + 2 * c, Lanes::template shift_right<16>(top));
        Lanes::store_halfwords(low + 2 * c, Lanes::template shift_right<16>(rounded(rest)));
    }
}

/// Four operands of keys, of which `count` are there: [64 channels][half of lanes][high, low][operand] a
/// vector. scratch: 4 * dim bytes.
template <class Lanes>
KVQ_NOINLINE void begin_pair_operands(const float* x, std::ptrdiff_t x_stride, int count, int dim,
                                      std::byte* to, std::byte* scratch) {
    for (int i = 0; i < 4; ++i) {
        split_floats<Lanes>(x + detail::smaller(i, count - 1) * x_stride, dim, scratch, scratch + 2 * dim);
        for (int c = 0; c < dim; c += pair_channels)
            for (int half = 0; half < 2; ++half)
                for (int part = 0; part < 2; ++part)
                    Lanes::store(
                        to + (((c / pair_channels * 2 + half) * 2 + part) * 4 + i) * 64,
                        Lanes::load_parts(scratch + part * 2 * dim + 2 * c + 16 * half, {32, 64, 96}));
    }
}

/// y: of as many tokens as fill vectors.
template <class Lanes, int Q>
KVQ_NOINLINE void pair_keys(const row_pass& pass, const std::byte* operands, float* y,
                            std::ptrdiff_t y_stride) {
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    constexpr int together = Lanes::width / Q, fours = together / 4;
    const row_pass r = pass;
    const bfloat_loader<Lanes> numbers;
    for (int t = 0; t < r.tokens; t += together) {
        floats sum[Q * together];
        KVQ_UNROLL
        for (int i = 0; i < Q * together; ++i) sum[i] = Lanes::splat_float(0.0f);
        for (int c = 0; c < r.dim; c += pair_channels) {
            const std::byte* const x = operands + c * 16;
            KVQ_UNROLL
            for (int b = 0; b < fours; ++b) {
                ints of[4][2];
                KVQ_UNROLL
                for (int k = 0; k < 4; ++k) {
                    detail::prefetch(r.next[t + 4 * b + k] + c);
                    numbers.load(r.rows[t + 4 * b + k] + c, of[k]);
                }
                KVQ_UNROLL
                for (int part = 0; part < 4; ++part) {  // high and low of two halves
                    KVQ_UNROLL
                    for (int i = 0; i < Q; ++i) {
                        // Else compilers load it for every product.
                        const ints operand = Lanes::in_register(Lanes::load(x + (part * 4 + i) * 64));
                        KVQ_UNROLL
                        for (int k = 0; k < 4; ++k) {
                            floats& to = sum[i * together + 4 * b + k];
                            to = Lanes::dot_pairs(to, of[k][part / 2], operand);
                        }
                    }
                }
            }
        }
        ints lanes[Lanes::width];
        KVQ_UNROLL
        for (int i = 0; i < Lanes::width; ++i) lanes[i] = Lanes::as_ints(sum[i]);
        float sums[Lanes::width];
        Lanes::store_floats(sums,
                            Lanes::merge_lanes(lanes, [](floats a, floats b) { return Lanes::add(a, b); }));
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i)
            std::memcpy(y + i * y_stride + t, sums + i * together, sizeof(float) * together);
    }
}

/// w: count rows of Q. y: Q rows. scratch: 4 * Q * tokens_of_pass bytes.
template <class Lanes, int Q>
KVQ_NOINLINE void pair_values(const row_pass& pass, const float* w, std::ptrdiff_t w_stride, int count,
                              float* y, std::ptrdiff_t y_stride, std::byte* scratch) {
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    constexpr std::ptrdiff_t part_bytes = 2 * tokens_of_pass;
    const row_pass r = pass;
    const bfloat_loader<Lanes> numbers;
    for (int i = 0; i < Q; ++i)
        split_floats<Lanes>(w + detail::smaller(i, count - 1) * w_stride, r.tokens,
                            scratch + 2 * i * part_bytes, scratch + (2 * i + 1) * part_bytes);
    for (int c = 0; c < r.dim; c += pair_channels) {
        floats sum[Q][4];
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) {
            KVQ_UNROLL
            for (int j = 0; j < 4; ++j) sum[i][j] = Lanes::splat_float(0.0f);
        }
        for (std::ptrdiff_t t = 0; t < r.tokens; t += 2) {  // behind the last token weights are zero
            ints of[4];
            {
                ints a[2], b[2];
                detail::prefetch(r.next[t] + c);
                detail::prefetch(r.next[t + 1] + c);
                numbers.load(r.rows[t] + c, a);
                numbers.load(r.rows[t + 1] + c, b);
                Lanes::interleave_words(a, b, of);
            }
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) {
                KVQ_UNROLL
                for (int part = 0; part < 2; ++part) {
                    const ints weight = Lanes::in_register(Lanes::splat(
                        detail::load_as<std::int32_t>(scratch + (2 * i + part) * part_bytes + 2 * t)));
                    KVQ_UNROLL
                    for (int j = 0; j < 4; ++j) sum[i][j] = Lanes::dot_pairs(sum[i][j], of[j], weight);
                }
            }
        }
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) {
            ints all[4];
            KVQ_UNROLL
            for (int j = 0; j < 4; ++j) all[j] = Lanes::as_ints(sum[i][j]);
            Lanes::store_lanes(reinterpret_cast<std::byte*>(y + i * y_stride + c), 64, all);
        }
    }
}

}}}  // namespace kvq::kernels
