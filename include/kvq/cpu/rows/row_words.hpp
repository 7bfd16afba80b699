// The products of row_kernels.hpp as integers, where two products of 16-bit words are one instruction: half
// as many multiplications as with floats.
//
//   x^ ~= S * word * unit      word = number * scale / S, in 16 bits; S: of a token (keys), or of a group of
//                              channels of all tokens of a pass (values): the largest |scale|
//   operand ~= step * word     step: so that sums of words fit 32 bits
//
// For numbers that are integers of up to 8 bits, or entries of a table, with a scale. Operands of keys are
// prepared once; weights for each pass, with a step for some tokens.
// Contract: |x^ - its word| <= 2^-15 of the largest x^ of the token or group; operands are within a step of
// 2^-15 of the largest or of the sum of a lane's columns (keys), of the sum over some tokens (values).
#pragma once

#include "row_kernels.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Does the instruction set have the operations?
template <class Lanes>
concept has_row_words = Lanes::width == 16 && requires(typename Lanes::ints a) {
    Lanes::dot_word_pairs(a, a, a);
    Lanes::multiply_words(a, a);
};

/// Numbers as words: times this, which is below 2^15; 0: they are multiplied as floats.
constexpr float word_factor(row_layout::number kind) noexcept {
    using number = row_layout::number;
    switch (kind) {
        case number::int8:
        case number::iq4_nl:
            return 256.0f;
        case number::e2m1:
            return 20.0f * 256.0f;
        case number::centred4:
            return 15.0f * 256.0f;
        default:
            return 0.0f;
    }
}
/// What a word stands for is its number times S times this.
constexpr float word_unit(row_layout::number kind) noexcept {
    return 32768.0f / 32767.0f / word_factor(kind);
}

/// Tokens whose weights share a step.
inline constexpr int tokens_of_step = 16;
/// The largest sum of the words of an operand in a lane: times 2^15 it fits 32 bits.
inline constexpr float most_word_sum = 65400.0f, most_weight_sum = 32700.0f;

struct row_word_pass {
    row_pass rows;
    const std::int16_t* ratios;   ///< scale / S in 2^-15: [chunk][token], two for each where scale_of_16
    std::ptrdiff_t ratio_stride;  ///< from one chunk to the next
    const float* largest;         ///< S of values, as the scales of a token are
};

template <class Lanes, row_layout::number Kind, row_scales Scales>
struct row_word_reader {
    using ints = typename Lanes::ints;
    static constexpr int each = Scales == row_scales::scale_of_16 ? 2 : 1;

    ints table;

    row_word_reader() : table(Lanes::splat(0)) {
        if constexpr (Kind != row_layout::number::int8) table = Lanes::sixteen_bytes(entries.data());
    }
    /// Chunk c of token t.
    KVQ_INLINE ints load(const row_word_pass& p, const std::byte* row, const std::byte* next,
                         const std::int16_t* ratios, int t, std::ptrdiff_t at) const {
        detail::prefetch(next + at);
        row += at + p.rows.front;
        ints words;
        if constexpr (Kind == row_layout::number::int8)
            words = Lanes::load_high_bytes(row);
        else
            words = Lanes::load_high_entries(row, table);
        if constexpr (each == 2)
            return Lanes::multiply_words(words, Lanes::splat_two_words(ratios + 2 * t));
        else
            return Lanes::multiply_words(words, Lanes::splat_word(ratios + t));
    }

private:
    static constexpr auto entries = [] {
        std::array<std::uint8_t, 16> of{};
        for (std::size_t i = 0; i < 16; ++i)
            of[i] = static_cast<std::uint8_t>(static_cast<int>(
                detail::number_of_code(Kind, static_cast<std::uint8_t>(i)) * word_factor(Kind) / 256.0f));
        return of;
    }();
};

/// x: words of Q operands. y[i][t] without steps, S and unit.
template <class Lanes, row_layout::number Kind, row_scales Scales, int Q>
KVQ_NOINLINE void row_word_keys(const row_word_pass& pass, const std::int16_t* const* operands, float* y,
                                std::ptrdiff_t y_stride) {
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    constexpr int width = Lanes::width, together = width / Q;
    const row_word_pass p = pass;
    const row_word_reader<Lanes, Kind, Scales> reader;
    const std::byte* x[Q];
    KVQ_UNROLL
    for (int i = 0; i < Q; ++i) x[i] = reinterpret_cast<const std::byte*>(operands[i]);
    const int chunks = p.rows.whole_chunks();
    for (int t = 0; t < p.rows.tokens; t += together) {
        ints sum[width];
        KVQ_UNROLL
        for (int i = 0; i < width; ++i) sum[i] = Lanes::splat(0);
        const std::byte *row[together], *next[together];
        int token[together];
        KVQ_UNROLL
        for (int k = 0; k < together; ++k) {
            token[k] = detail::smaller(t + k, p.rows.tokens - 1);
            row[k] = p.rows.rows[token[k]];
            next[k] = p.rows.next[token[k]];
        }
        std::ptrdiff_t at = 0;
        const std::int16_t* ratios = p.ratios;
        for (int c = 0; c < chunks; ++c, at += p.rows.chunk_bytes, ratios += p.ratio_stride) {
            ints of_x[Q];
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) of_x[i] = Lanes::in_register(Lanes::load(x[i] + c * 2 * row_chunk));
            KVQ_UNROLL
            for (int k = 0; k < together; ++k) {
                const ints v = reader.load(p, row[k], next[k], ratios, token[k], at);
                KVQ_UNROLL
                for (int i = 0; i < Q; ++i)
                    sum[i * together + k] = Lanes::dot_word_pairs(sum[i * together + k], v, of_x[i]);
            }
        }
        KVQ_UNROLL
        for (int i = 0; i < width; ++i) sum[i] = Lanes::as_ints(Lanes::to_floats(sum[i]));
        float sums[width];
        Lanes::store_floats(sums,
                            Lanes::merge_lanes(sum, [](floats a, floats b) { return Lanes::add(a, b); }));
        const int here = detail::smaller(together, p.rows.tokens - t);
        if (here == together) {
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i)
                std::memcpy(y + i * y_stride + t, sums + i * together, sizeof(float) * together);
        } else {
            for (int i = 0; i < Q; ++i)
                for (int k = 0; k < here; ++k) y[i * y_stride + t + k] = sums[i * together + k];
        }
    }
}

/// w[i][t]: words, zero up to a multiple of tokens_of_step; steps[i][t / tokens_of_step]. y: Q rows in the
/// order of the vectors, without unit, to which is added.
template <class Lanes, row_layout::number Kind, row_scales Scales, int Q>
KVQ_NOINLINE void row_word_values(const row_word_pass& pass, const std::int16_t* w, std::ptrdiff_t w_stride,
                                  const float* steps, std::ptrdiff_t step_stride, float* y,
                                  std::ptrdiff_t y_stride) {
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    const row_word_pass p = pass;
    const row_word_reader<Lanes, Kind, Scales> reader;
    const int last = p.rows.tokens - 1;
    std::ptrdiff_t at = 0;
    const std::int16_t* ratios = p.ratios;
    for (int c = 0; c < p.rows.whole_chunks(); ++c, at += p.rows.chunk_bytes, ratios += p.ratio_stride) {
        floats total[Q][2];
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) total[i][0] = total[i][1] = Lanes::splat_float(0.0f);
        for (int first = 0, step = 0; first <= last; first += tokens_of_step, ++step) {
            ints sum[Q][2];
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) sum[i][0] = sum[i][1] = Lanes::splat(0);
            for (int t = first; t < first + tokens_of_step && t <= last; t += 2) {
                const int other = detail::smaller(t + 1, last);
                const ints a = reader.load(p, p.rows.rows[t], p.rows.next[t], ratios, t, at),
                           b = reader.load(p, p.rows.rows[other], p.rows.next[other], ratios, other, at),
                           low = Lanes::template word_pairs<false>(a, b),
                           high = Lanes::template word_pairs<true>(a, b);
                KVQ_UNROLL
                for (int i = 0; i < Q; ++i) {
                    const ints both = Lanes::splat(detail::load_as<std::int32_t>(w + i * w_stride + t));
                    sum[i][0] = Lanes::dot_word_pairs(sum[i][0], low, both);
                    sum[i][1] = Lanes::dot_word_pairs(sum[i][1], high, both);
                }
            }
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) {
                const floats by = Lanes::splat_float(steps[i * step_stride + step]);
                total[i][0] = Lanes::multiply_add(Lanes::to_floats(sum[i][0]), by, total[i][0]);
                total[i][1] = Lanes::multiply_add(Lanes::to_floats(sum[i][1]), by, total[i][1]);
            }
        }
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) {
            floats v[2] = {Lanes::template join_fours<0>(total[i][0], total[i][1]),
                           Lanes::template join_fours<1>(total[i][0], total[i][1])};
            row_reader<Lanes, Kind, Scales>::scale(p.largest, nullptr, c, v);
            float* const to = y + i * y_stride + c * row_chunk;
            Lanes::store_floats(to, Lanes::add(Lanes::load_floats(to), v[0]));
            Lanes::store_floats(to + 16, Lanes::add(Lanes::load_floats(to + 16), v[1]));
        }
    }
}

}}}  // namespace kvq::kernels
