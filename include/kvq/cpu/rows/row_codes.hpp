// Products of bytes with rows of tokens: numbers of up to eight bits that share a scale, where a CPU
// multiplies bytes faster than floats.
//
//   begin_code_operands            x as 16 bits
//   code_keys<Lanes, Q>            y[i][t] = sum_g scale[g][t] sum_c code[t][c] x[i][c]
//   code_weights<Lanes, Q>         w[i][t] scale[g][t] as 16 bits, for eight groups of channels
//   code_values<Lanes, Q>          y[i][c] = step[i][g] sum_t number[t][c] w[i][g][t]
//
// A code is an unsigned byte: the number plus an offset. Half bytes are looked up in a table. A product takes
// four channels of keys, or four tokens of values. What codes are multiplied with has 16 bits, as two bytes:
// the largest magnitude of an operand, or of the weights of a group in a pass, is 32512.
// Contract: integer sums are exact; all else as row_kernels.hpp. Nothing outside of the rows is read.
#pragma once

#include "row_kernels.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Instruction sets with these kernels.
template <class Lanes>
inline constexpr bool multiplies_codes =
    !Lanes::word_products && Lanes::width == 16 &&
    requires(const std::byte* const (&p)[4], typename Lanes::ints (&v)[2]) {
    Lanes::turn_thirty_two(p, v[0], v);
};

/// How rows are read as codes.
struct code_rows {
    bool of_bytes = false, of_nibbles = false;
    bool pairs = false;  ///< two neighbours share a byte; else channels 16 apart
    int offset = 0;
    float unit = 1.0f;  ///< number = (code - offset) * unit
    alignas(16) std::uint8_t table[16] = {};

    explicit code_rows(const row_layout& l) {
        using number = row_layout::number;
        const bool sixteens = l.numbers == number::e2m1 && l.channels == 16;
        if (l.scale == row_layout::stored::none || (l.channels != row_chunk && !sixteens)) return;
        switch (l.numbers) {
            case number::int8:
                of_bytes = true;
                offset = 128;
                return;
            case number::e2m1:
                pairs = true;
                unit = 0.5f;
                offset = 12;
                break;
            case number::centred4:
                offset = 8;
                break;
            case number::iq4_nl:
                offset = 127;
                break;
            case number::unsigned4:
                break;
            default:
                return;
        }
        of_nibbles = true;
        for (int i = 0; i < 16; ++i)
            table[i] = static_cast<std::uint8_t>(
                static_cast<int>(detail::number_of_code(l.numbers, static_cast<std::uint8_t>(i)) / unit) +
                offset);
    }
    explicit operator bool() const { return of_bytes || of_nibbles; }
    /// Where channel c of an operand of keys lies: [64 channels][vector of codes][lane][byte of a word].
    int key_place(int c) const {
        const int byte = of_bytes ? c
                         : pairs  ? c / 2
                                  : c / row_chunk * 16 + c % 16,
                  half = pairs ? c % 2 : c % row_chunk / 16, word = byte % 16 / 4, lane = byte % 64 / 16;
        const int place = of_bytes ? byte / 64 * 64 + word * 16
                                   : (byte / 64 * 2 + word / 2) * 64 + (word % 2 * 2 + half) * 16;
        return place + lane * 4 + byte % 4;
    }
    /// The group of lane k of the codes of 64 channels.
    int key_group(int pass, int lane, int group_channels) const {
        return of_bytes               ? 2 * pass + lane / 2
               : group_channels == 16 ? pass / 2 * 8 + 2 * lane + pass % 2
                                      : pass / 2 * 4 + lane;
    }
};

/// The largest magnitude of what codes are multiplied with: high bytes end at 127.
inline constexpr float code_operand_limit = 32512.0f;

/// Vector v of the codes of rows: of half bytes without scales between them as many words as there are, else
/// of parts between scales, of which the last one may be there twice.
template <class Lanes, bool Nibbles, bool InParts>
class code_loader {
public:
    using ints = typename Lanes::ints;
    static constexpr int part_words = Nibbles ? 4 : 8, parts = Lanes::width / part_words;

    code_loader(const row_pass& r, int v)
        : words_(detail::smaller(Lanes::width, r.dim / (Nibbles ? 8 : 4) - v * Lanes::width)),
          at_(std::ptrdiff_t{v} * parts * r.chunk_bytes + r.front) {
        for (int i = 1; i < parts; ++i)
            part_[i - 1] = std::ptrdiff_t{detail::smaller(i, words_ / part_words - 1)} * r.chunk_bytes;
    }
    KVQ_INLINE ints load(const std::byte* row) const {
        if constexpr (InParts)
            return Lanes::load_parts(row + at_, part_);
        else
            return Lanes::load(row + at_, words_);
    }

private:
    int words_;
    std::ptrdiff_t at_, part_[parts - 1];
};

/// Bytes of 128 channels: of half bytes, of a vector.
inline int bytes_of_128(const row_pass& r, bool nibbles) {
    return r.front > 0 ? 4 * r.chunk_bytes : nibbles ? 64 : 128;
}
/// Without branches: a line too many costs less.
template <bool Nibbles>
KVQ_INLINE void prefetch_128(const std::byte* from) {
    detail::prefetch(from);
    detail::prefetch(from + 64);
    if constexpr (!Nibbles) detail::prefetch(from + 128);
}

/// The codes in the bytes of a, or in its low half bytes.
template <class Lanes, bool Nibbles>
KVQ_INLINE typename Lanes::ints codes_of(typename Lanes::ints a, typename Lanes::ints table) {
    if constexpr (Nibbles)
        return Lanes::lookup_bytes(table, Lanes::bit_and(a, Lanes::splat(0x0f0f0f0f)));
    else
        return Lanes::add_bytes(a, table);
}
template <class Lanes, bool Nibbles>
KVQ_INLINE typename Lanes::ints table_of(const code_rows& codes) {
    if constexpr (Nibbles)
        return Lanes::sixteen_bytes(codes.table);
    else
        return Lanes::splat(static_cast<std::int32_t>(0x80808080u));
}

/// Four operands of keys. Of 64 channels: [operand][vector of codes][high, low] a word of each 128-bit
/// lane, four times, then -offset times the sums of the lanes. Of groups the sums, and steps, which are NaN
/// where an operand is not finite.
struct code_operands {
    float* all;
    int passes, groups;  ///< two passes for each 128 channels

    static constexpr int of_operand = 2 * 4 * 16, of_pass = 4 * (of_operand + 16);
    static constexpr int floats(int passes, int groups) noexcept { return passes * of_pass + 4 * groups + 4; }
    std::uint32_t* words(int pass, int operand) const {
        return reinterpret_cast<std::uint32_t*>(all) + pass * of_pass + operand * of_operand;
    }
    std::int32_t* starts(int pass, int operand) const {
        return reinterpret_cast<std::int32_t*>(all) + pass * of_pass + 4 * of_operand + operand * 16;
    }
    float* sums() const { return all + passes * of_pass; }
    float* steps() const { return sums() + 4 * groups; }
    bool finite() const {
        float zero = 0.0f;
        for (int i = 0; i < 4; ++i) zero += steps()[i] * 0.0f;
        return zero == 0.0f;
    }
};

/// scratch: 13 * 64 floats for each pass.
template <class Lanes>
KVQ_NOINLINE void begin_code_operands(const code_rows& codes, const float* x, std::ptrdiff_t x_stride,
                                      int count, int dim, bool minima, const code_operands& to,
                                      float* scratch) {
    const int padded = 64 * to.passes, group = dim / to.groups;
    auto* const four = reinterpret_cast<std::uint32_t*>(scratch + 4 * padded);
    auto* const place = reinterpret_cast<std::int32_t*>(scratch + 12 * padded);
    for (int c = 0; c < dim; ++c) place[c] = codes.key_place(c);
    for (int i = 0; i < 4; ++i) {
        float* const row = scratch + i * padded;
        std::memset(row, 0, static_cast<std::size_t>(padded) * sizeof(float));
        for (int c = 0; c < dim && i < count; ++c) row[place[c]] = x[i * x_stride + c];
        auto largest = Lanes::splat_float(0.0f), zeros = largest;
        for (int c = 0; c < padded; c += Lanes::width) {
            const auto value = Lanes::load_floats(row + c);
            largest = Lanes::larger_magnitude(largest, value);
            zeros = Lanes::multiply_add(value, Lanes::splat_float(0.0f), zeros);
        }
        const float most = Lanes::largest(largest), zero = Lanes::sum(zeros);
        const float step = detail::larger(most / code_operand_limit, 0x1p-126f);
        to.steps()[i] = step + zero;
        for (int c = 0; c < padded; c += Lanes::width) {
            const auto whole =
                zero == 0.0f ? Lanes::multiply(Lanes::load_floats(row + c), Lanes::splat_float(1.0f / step))
                             : Lanes::splat_float(0.0f);
            Lanes::store(reinterpret_cast<std::byte*>(row + c), Lanes::round(whole));
        }
        const auto* const whole = reinterpret_cast<const std::int32_t*>(row);
        for (int g = 0; minima && g < to.groups; ++g) {
            std::int32_t sum = 0;
            for (int c = g * group; c < (g + 1) * group; ++c) sum += whole[place[c]];
            to.sums()[4 * g + i] = static_cast<float>(sum);
        }
        for (int p = 0; p < to.passes; ++p) {
            const auto at = [&](int k) {
                return Lanes::load(reinterpret_cast<const std::byte*>(whole + 64 * p + 16 * k));
            };
            std::int32_t sums[16];
            Lanes::store(reinterpret_cast<std::byte*>(sums),
                         Lanes::add(Lanes::add(at(0), at(1)), Lanes::add(at(2), at(3))));
            for (int k = 0; k < 16; k += 4) {
                const std::int32_t sum = sums[k] + sums[k + 1] + sums[k + 2] + sums[k + 3];
                for (int n = 0; n < 4; ++n) to.starts(p, i)[k + n] = -codes.offset * sum;
            }
        }
    }
    for (int c = 0; c < padded; c += Lanes::width) {
        typename Lanes::ints a[4];
        for (int i = 0; i < 4; ++i)
            a[i] = Lanes::load(reinterpret_cast<const std::byte*>(scratch + i * padded + c));
        Lanes::store_high_low_of_four(four + 2 * c, a);
    }
    std::int32_t every_eighth[16];
    for (int k = 0; k < 16; ++k) every_eighth[k] = k / 4 * 8;
    const auto eighths = Lanes::load(reinterpret_cast<const std::byte*>(every_eighth));
    for (int j = 0; j < 4 * to.passes; ++j) {  // vectors
        const auto* const from = reinterpret_cast<const float*>(four + 32 * j);
        const auto a = Lanes::load_floats(from), b = Lanes::load_floats(from + 16);
        for (int i = 0; i < 4; ++i)
            for (int k = 0; k < 2; ++k)  // high or low
                Lanes::store(
                    reinterpret_cast<std::byte*>(to.words(j / 4, i) + (2 * (j % 4) + k) * 16),
                    Lanes::as_ints(Lanes::lookup(a, b, Lanes::add(eighths, Lanes::splat(2 * i + k)))));
    }
}

/// Rows are turned within 128-bit lanes: a lane of a vector of codes has a word of four tokens, its sums are
/// those of a part of the channels. y: of as many tokens as fill vectors.
template <class Lanes, int Q, bool Nibbles, bool InParts>
KVQ_NOINLINE void code_keys(const row_pass& pass, const code_rows& codes, int group_channels,
                            const code_operands& operands, float* y, std::ptrdiff_t y_stride) {
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    static_assert(Lanes::width == 16);
    constexpr int fours = 4, together = 4 * fours;
    alignas(64) float scale[fours][Lanes::width], sum[Q][fours][Lanes::width];
    const row_pass r = pass;
    const ints table = table_of<Lanes, Nibbles>(codes);
    const int next_bytes = bytes_of_128(r, Nibbles);
    using loader_of = code_loader<Lanes, Nibbles, InParts>;
    for (int p = 0; p < operands.passes; p += 2) {
        // Bytes behind the row: the operands are zero.
        const loader_of loaders[2] = {loader_of(r, Nibbles ? p / 2 : p),
                                      loader_of(r, Nibbles                ? p / 2
                                                   : (p + 1) * 64 < r.dim ? p + 1
                                                                          : 0)};
        std::ptrdiff_t of[2][4], behind[2][3];  // scales of lanes
        for (int h = 0; h < 2; ++h)
            for (int lane = 0; lane < 4; ++lane) {
                const int group = codes.key_group(p + h, lane, group_channels);
                of[h][lane] = std::ptrdiff_t{detail::smaller(group, operands.groups - 1)} * tokens_of_pass *
                              std::ptrdiff_t{sizeof(float)};
                if (lane > 0) behind[h][lane - 1] = of[h][lane] - of[h][0];
            }
        for (int first = 0; first < r.tokens; first += together) {
            ints raw[fours][4];  // [four tokens][vector]
            const auto turn = [&](int h) KVQ_INLINE_LAMBDA {
                KVQ_UNROLL
                for (int g = 0; g < fours; ++g) {
                    KVQ_UNROLL
                    for (int k = 0; k < 4; ++k) raw[g][k] = loaders[h].load(r.rows[first + 4 * g + k]);
                    Lanes::transpose_fours(raw[g]);
                }
            };
            if constexpr (Nibbles) turn(0);
            const std::byte* const* next = r.next + first;
            const std::ptrdiff_t of_next = std::ptrdiff_t{p / 2} * next_bytes;
            KVQ_UNROLL
            for (int h = 0; h < 2; ++h) {
                ints code[fours][4];
                if constexpr (!Nibbles) turn(h);
                KVQ_UNROLL
                for (int g = 0; g < fours; ++g) {
                    KVQ_UNROLL
                    for (int k = 0; k < 4; ++k) {
                        if constexpr (Nibbles) {
                            const ints bytes = raw[g][2 * h + k / 2];
                            code[g][k] = codes_of<Lanes, true>(
                                k % 2 == 0 ? bytes : Lanes::template shift_right<4>(bytes), table);
                        } else {
                            code[g][k] = codes_of<Lanes, false>(raw[g][k], table);
                        }
                    }
                    Lanes::store(reinterpret_cast<std::byte*>(scale[g]),
                                 Lanes::load_parts(
                                     reinterpret_cast<const std::byte*>(r.scales + first + 4 * g) + of[h][0],
                                     behind[h]));
                }
                for (int i = 0; i < Q; ++i) {
                    for (int k = 0; k < together / 2 / Q; ++k) prefetch_128<Nibbles>(*next++ + of_next);
                    ints high[fours], low[fours];
                    KVQ_UNROLL
                    for (int g = 0; g < fours; ++g) {
                        high[g] = Lanes::splat(0);
                        low[g] = Lanes::load(reinterpret_cast<const std::byte*>(operands.starts(p + h, i)));
                    }
                    KVQ_UNROLL
                    for (int j = 0; j < 4; ++j) {
                        const auto* const x =
                            reinterpret_cast<const std::byte*>(operands.words(p + h, i)) + 128 * j;
                        // Else compilers load them for every product.
                        const ints of_high = Lanes::in_register(Lanes::load(x)),
                                   of_low = Lanes::in_register(Lanes::load(x + 64));
                        KVQ_UNROLL
                        for (int g = 0; g < fours; ++g) {
                            high[g] = Lanes::template dot<8>(high[g], code[g][j], of_high);
                            low[g] = Lanes::template dot<8>(low[g], code[g][j], of_low);
                        }
                    }
                    floats part[fours];
                    KVQ_UNROLL
                    for (int g = 0; g < fours; ++g) {
                        const floats whole =
                            Lanes::to_floats(Lanes::add(Lanes::template shift_left<8>(high[g]), low[g]));
                        part[g] = h == 0 ? Lanes::multiply(whole, Lanes::load_floats(scale[g]))
                                         : Lanes::multiply_add(whole, Lanes::load_floats(scale[g]),
                                                               Lanes::load_floats(sum[i][g]));
                        if (h == 0) Lanes::store_floats(sum[i][g], part[g]);
                    }
                    if (h == 0) continue;
                    float* const to = y + i * y_stride + first;
                    floats all = Lanes::sum_lanes(part);
                    if (p > 0) all = Lanes::add(all, Lanes::load_floats(to));
                    Lanes::store_floats(to, all);
                }
            }
        }
    }
    if (!r.minima) return;
    for (int i = 0; i < Q; ++i)
        for (int t = 0; t < r.tokens; t += Lanes::width) {
            floats all = Lanes::load_floats(y + i * y_stride + t);
            for (int g = 0; g < operands.groups; ++g)
                all = Lanes::multiply_add(Lanes::splat_float(operands.sums()[4 * g + i]),
                                          Lanes::load_floats(r.minima + g * tokens_of_pass + t), all);
            Lanes::store_floats(y + i * y_stride + t, all);
        }
}

/// Groups of weights that are prepared together: their maxima fill two vectors.
inline constexpr int weight_groups = 8;

/// Weights of eight groups, of four tokens in a word, and of each group and operand -offset times their sum,
/// a step, and the sum of weights times minima.
struct code_weight_space {
    std::uint32_t words[weight_groups * 2][tokens_of_pass];
    std::int32_t starts[weight_groups * 4];
    float steps[weight_groups * 4], of_minima[weight_groups * 4];
};
/// Words of an operand and four tokens, from token 0 on: high bytes of Sets groups, then low ones.
template <int Sets>
KVQ_INLINE std::ptrdiff_t weight_place(int group, int operand) noexcept {
    return (2 * group + (Sets == 1 ? operand / 2 : operand)) * tokens_of_pass +
           (Sets == 1 ? operand % 2 * 2 : 0);
}

/// w: count rows of Q, w_stride apart. False: products are not finite.
template <class Lanes, int Q, int Sets>
KVQ_NOINLINE bool code_weights(const float* w, std::ptrdiff_t w_stride, int count, int tokens, int groups,
                               const float* scales, const float* minima, std::ptrdiff_t scale_stride,
                               int offset, code_weight_space& to) {
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    constexpr int width = Lanes::width;
    static_assert(2 * width == weight_groups * 4);
    const auto zero = Lanes::splat_float(0.0f);
    const float* row[Q];
    KVQ_UNROLL
    for (int i = 0; i < Q; ++i) row[i] = w + detail::smaller(i, count - 1) * w_stride;
    // Else compilers load it for every product.
    const auto once = [](floats a) KVQ_INLINE_LAMBDA {
        return Lanes::as_floats(Lanes::in_register(Lanes::as_ints(a)));
    };
    // of(t, load): a vector of tokens, behind the last one zeros.
    const auto each_vector = [&](const auto& of) KVQ_INLINE_LAMBDA {
        int t = 0;
        for (; t + width <= tokens; t += width)
            of(t, [](const float* p) KVQ_INLINE_LAMBDA { return Lanes::load_floats(p); });
        const int rest = tokens - t;
        if (rest > 0) of(t, [&](const float* p) KVQ_INLINE_LAMBDA { return Lanes::load_floats(p, rest); });
    };
    const int filled = detail::round_up(4 * groups, width);  // maxima of groups and operands, in vectors
    ints most[2 * width];
    if (Q < 4 || 4 * groups < filled)
        for (int k = 0; k < filled; ++k) most[k] = Lanes::splat(0);
    constexpr int two = 2;  // groups that share the loads of weights
    for (int g = 0; g < groups; g += two) {
        floats largest[two][Q], of_minima[two][Q];
        std::ptrdiff_t place[two];
        KVQ_UNROLL
        for (int s = 0; s < two; ++s) {
            place[s] = detail::smaller(g + s, groups - 1) * scale_stride;
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) largest[s][i] = of_minima[s][i] = zero;
        }
        each_vector([&](int t, const auto& load) KVQ_INLINE_LAMBDA {
            floats weight[Q];
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) weight[i] = once(load(row[i] + t));
            KVQ_UNROLL
            for (int s = 0; s < two; ++s) {
                const floats scale = once(load(scales + place[s] + t));
                KVQ_UNROLL
                for (int i = 0; i < Q; ++i) {
                    largest[s][i] = Lanes::larger_magnitude(largest[s][i], Lanes::multiply(weight[i], scale));
                    if (minima)
                        of_minima[s][i] =
                            Lanes::multiply_add(weight[i], load(minima + place[s] + t), of_minima[s][i]);
                }
            }
        });
        KVQ_UNROLL
        for (int s = 0; s < two; ++s) {
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) {
                most[4 * (g + s) + i] = Lanes::as_ints(largest[s][i]);
                if (minima) to.of_minima[4 * (g + s) + i] = Lanes::sum(of_minima[s][i]);
            }
        }
    }
    float inverses[2 * width];
    auto zeros = zero;
    for (int k = 0; k < filled; k += width) {
        const floats largest = Lanes::template extreme_of_each<false>(most + k);
        zeros = Lanes::multiply_add(largest, zero, zeros);
        // The inverse is finite.
        const floats step =
            Lanes::larger(Lanes::multiply(largest, Lanes::splat_float(1.0f / code_operand_limit)),
                          Lanes::splat_float(0x1p-126f));
        Lanes::store_floats(inverses + k, Lanes::divide(Lanes::splat_float(1.0f), step));
        Lanes::store_floats(to.steps + k, step);
    }
    if (!(Lanes::sum(zeros) == 0.0f)) return false;
    // In a float of this size the lowest bits are a whole number. 128: high_low_pairs.
    const auto whole = Lanes::splat_float(0x1.8p23f + 128.0f);
    const ints ones = Lanes::splat(0x01010101);
    constexpr int planes = Q == 1 ? 1 : 2 * Sets;
    for (int g = 0; g < groups; g += Sets) {
        floats by[Sets][Q];
        ints sum[planes];  // of the bytes of words
        KVQ_UNROLL
        for (int s = 0; s < Sets; ++s) {
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i)
                by[s][i] = Lanes::splat_float(inverses[4 * detail::smaller(g + s, groups - 1) + i]);
        }
        KVQ_UNROLL
        for (int k = 0; k < planes; ++k) sum[k] = Lanes::splat(0);
        std::uint32_t* const words = to.words[2 * g];
        each_vector([&](int t, const auto& load) KVQ_INLINE_LAMBDA {
            ints a[Sets][Q];
            floats weight[Q];
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) weight[i] = once(load(row[i] + t));
            KVQ_UNROLL
            for (int s = 0; s < Sets; ++s) {
                const floats scale =
                    once(load(scales + detail::smaller(g + s, groups - 1) * scale_stride + t));
                KVQ_UNROLL
                for (int i = 0; i < Q; ++i)
                    a[s][i] = Lanes::as_ints(
                        Lanes::multiply_add(Lanes::multiply(weight[i], scale), by[s][i], whole));
            }
            KVQ_UNROLL
            for (int k = 0; k < planes; ++k) {
                const ints all =
                    Sets == 1 ? Lanes::template high_low_pairs<false>(a[0][2 * k % Q], a[0][(2 * k + 1) % Q])
                              : Lanes::template high_low_pairs<true>(a[0][k % Q], a[Sets - 1][k % Q]);
                sum[k] = Lanes::template dot<8>(sum[k], ones, all);
                Lanes::store(reinterpret_cast<std::byte*>(words + k * tokens_of_pass + t), all);
            }
        });
        floats sums[4];
        KVQ_UNROLL
        for (int k = 0; k < 4; ++k) sums[k] = Lanes::to_floats(sum[k % planes]);
        float bytes[4][4];
        Lanes::store_floats(bytes[0], Lanes::sum_lanes(sums));
        KVQ_UNROLL
        for (int s = 0; s < Sets; ++s) {
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) {
                // Of high bytes, and of low ones.
                const float* const of = Sets == 1 ? bytes[i / 2] + i % 2 * 2 : bytes[i] + s;
                to.starts[4 * (g + s) + i] = -offset * static_cast<std::int32_t>(256.0f * of[0] + of[Sets]);
            }
        }
    }
    return true;
}

/// Where code_values has the channels of a chunk: bytes; half bytes in order, in pairs, in pairs of two
/// groups.
struct value_places {
    std::int32_t of[4][row_chunk];
};
inline constexpr value_places where_values_are = [] {
    value_places p{};
    for (int c = 0; c < row_chunk; ++c) {
        p.of[0][c] = c / 8 % 2 * 16 + c / 16 * 8 + c % 8;
        p.of[1][c] = c;
        p.of[2][c] = c % 2 * 16 + c / 2;
        p.of[3][c] = c % 2 * 16 + c % 16 / 2 * 2 + c / 16;
    }
    return p;
}();

/// Values of chunks of 32 channels, whose weights lie in `weights` from its beginning on. Sets: groups of a
/// chunk. half: null, or the last chunk's rows, 16 bytes apart, if it is half of one. y: Q rows.
template <class Lanes, int Q, bool Nibbles, int Sets>
KVQ_NOINLINE void code_values(const row_pass& pass, const code_rows& codes, int from, int chunks,
                              const std::byte* half, const code_weight_space& weights, bool minima, float* y,
                              std::ptrdiff_t y_stride) {
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    constexpr int width = Lanes::width;
    const row_pass r = pass;
    const ints table = table_of<Lanes, Nibbles>(codes);
    const int next_bytes = bytes_of_128(r, Nibbles);
    // Of each group in lanes that take turns.
    const auto of_groups = [](const auto* x, int behind) KVQ_INLINE_LAMBDA {
        float both[Sets];
        for (int s = 0; s < Sets; ++s) std::memcpy(both + s, x + s * behind, sizeof(float));
        if constexpr (Sets == 2)
            return Lanes::splat_pair(both);
        else
            return Lanes::splat_float(both[0]);
    };
    const std::int32_t* const places = where_values_are.of[!Nibbles ? 0 : !codes.pairs ? 1 : 1 + Sets];
    for (int c = from; c < from + chunks; ++c, y += row_chunk) {
        const int group = (c - from) * Sets;
        ints high[Q][2], low[Q][2];
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) {
            high[i][0] = high[i][1] = Lanes::splat(0);
            low[i][0] = low[i][1] = Lanes::as_ints(of_groups(weights.starts + 4 * group + i, 4));
        }
        const std::ptrdiff_t at = std::ptrdiff_t{c} * r.chunk_bytes + r.front;
        // A row with four tokens: all of them in the time of four chunks.
        const std::ptrdiff_t of_next = std::ptrdiff_t{c / 4} * next_bytes;
        const std::byte* const* next = r.next + c % 4 * r.tokens / 4;
        const std::uint32_t* w[Q];
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) w[i] = weights.words[0] + weight_place<Sets>(group, i);
        for (std::ptrdiff_t t = 0; t < r.tokens; t += 4, ++next) {
            prefetch_128<Nibbles>(*next + of_next);
            const std::byte* rows[4];
            KVQ_UNROLL
            for (int k = 0; k < 4; ++k) rows[k] = r.rows[t + k] + at;
            ints x[2];
            if constexpr (Nibbles) {
                if (half && c >= r.whole_chunks())
                    for (int k = 0; k < 4; ++k) rows[k] = half + (t + k) * (row_chunk / 2);
                const ints bytes = Lanes::template turn_sixteen<Sets>(rows);
                x[0] = codes_of<Lanes, true>(bytes, table);
                x[1] = codes_of<Lanes, true>(Lanes::template shift_right<4>(bytes), table);
            } else {
                Lanes::turn_thirty_two(rows, table, x);
            }
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) {
                const ints of_high = Lanes::as_ints(of_groups(w[i] + t, 1)),
                           of_low = Lanes::as_ints(of_groups(w[i] + t + Sets, 1));
                KVQ_UNROLL
                for (int v = 0; v < 2; ++v) {
                    high[i][v] = Lanes::template dot<8>(high[i][v], x[v], of_high);
                    low[i][v] = Lanes::template dot<8>(low[i][v], x[v], of_low);
                }
            }
        }
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) {
            const int of = 4 * group + i;
            const floats step = Lanes::multiply(of_groups(weights.steps + of, 4),
                                                Lanes::splat_float(codes.unit)),
                         shift = minima ? of_groups(weights.of_minima + of, 4) : Lanes::splat_float(0.0f);
            floats all[2];
            KVQ_UNROLL
            for (int v = 0; v < 2; ++v)
                all[v] = Lanes::multiply_add(
                    Lanes::to_floats(Lanes::add(Lanes::template shift_left<8>(high[i][v]), low[i][v])), step,
                    shift);
            KVQ_UNROLL
            for (int v = 0; v < 2; ++v)
                Lanes::store_floats(
                    y + i * y_stride + v * width,
                    Lanes::lookup(all[0], all[1],
                                  Lanes::load(reinterpret_cast<const std::byte*>(places + v * width))));
        }
    }
}

}}}  // namespace kvq::kernels
