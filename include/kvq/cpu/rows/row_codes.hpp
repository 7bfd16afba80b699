// Products of bytes with rows of tokens: numbers of up to eight bits that share a scale, where a CPU
// multiplies bytes faster than floats.
//
//   turn_keys<Lanes, Nibbles>      [width tokens][word of 4 channels]: a word of each token in a vector
//   pair_values<Lanes>             [two tokens][16 channels]: bytes of the two beside each other
//   begin_code_operands            x as 16 bits
//   code_keys<Lanes, Q>            y[i][t] = sum_g scale[g][t] sum_c code[t][c] x[i][c]
//   code_weights<Lanes, Q>         w[i][t] scale[g][t] as 16 bits, for four groups of channels
//   code_values<Lanes, Q, V>       y[i][c] += step[i][g] sum_t number[t][c] w[i][g][t]
//
// A code of keys is an unsigned byte: the number plus an offset. Numbers of values are signed, as words of 16
// bits, two tokens in a product. Half bytes are looked up in a table. What codes are multiplied with has 16
// bits: the largest magnitude of an operand, or of the weights of a group in a pass, is 32512.
// Contract: integer sums are exact; all else as row_kernels.hpp. Nothing outside of the rows is read.
#pragma once

#include "row_kernels.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Instruction sets with these kernels.
template <class Lanes>
inline constexpr bool multiplies_codes =
    !Lanes::word_products && Lanes::width == 16 && requires(typename Lanes::ints(&v)[2]) {
    Lanes::interleave_bytes(v);
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
    /// Where channel c of an operand of keys lies, which has four channels to a word of codes.
    int key_place(int c) const {
        if (of_bytes) return c;
        return pairs ? c / 8 * 8 + c % 2 * 4 + c % 8 / 2
                     : c / row_chunk * row_chunk + c % 16 / 4 * 8 + c % row_chunk / 16 * 4 + c % 4;
    }
};

/// The largest magnitude of what codes are multiplied with: high bytes end at 127.
inline constexpr float code_operand_limit = 32512.0f;

/// Vector v of the codes of rows, or of the parts of it between their scales; fewer words in the last one.
template <class Lanes, bool Nibbles>
class code_loader {
public:
    using ints = typename Lanes::ints;
    static constexpr int part_words = Nibbles ? 4 : 8, parts = Lanes::width / part_words;

    code_loader(const row_pass& r, int v)
        : words_(detail::smaller(Lanes::width, r.dim / (Nibbles ? 8 : 4) - v * Lanes::width)),
          in_parts_(r.front > 0),
          at_(std::ptrdiff_t{v} * parts * (in_parts_ ? r.chunk_bytes : 4 * part_words) + r.front) {
        for (int i = 1; i < parts; ++i)
            part_[i - 1] = std::ptrdiff_t{detail::smaller(i, words_ / part_words - 1)} * r.chunk_bytes;
    }
    KVQ_INLINE ints load(const std::byte* row) const {
        if (in_parts_) return Lanes::load_parts(row + at_, part_);
        return words_ == Lanes::width ? Lanes::load(row + at_) : Lanes::load(row + at_, words_);
    }

private:
    int words_;
    bool in_parts_;
    std::ptrdiff_t at_, part_[parts - 1];
};

/// Vectors of a row, and bytes of one that is turned, of a vector of tokens.
template <class Lanes>
constexpr int row_vectors_of(int dim, bool nibbles) noexcept {
    return detail::ceil_div(dim, (nibbles ? 8 : 4) * Lanes::width);
}
template <class Lanes>
constexpr int turned_bytes(bool nibbles) noexcept {
    return (nibbles ? 8 : 4) * Lanes::width * Lanes::width;
}

/// Bytes of 128 channels: of half bytes, of a vector.
inline int bytes_of_128(const row_pass& r, bool nibbles) {
    return r.front > 0 ? 4 * r.chunk_bytes : nibbles ? 64 : 128;
}
KVQ_INLINE void prefetch_128(const std::byte* from, int bytes) {
    detail::prefetch(from);
    if (bytes > 64) detail::prefetch(from + 64);
    if (bytes > 128) detail::prefetch(from + 128);
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

/// Two vectors of tokens, from `first` on.
template <class Lanes, bool Nibbles>
KVQ_NOINLINE void turn_keys(const row_pass& pass, const code_rows& codes, int first, std::byte* out) {
    using ints = typename Lanes::ints;
    constexpr int width = Lanes::width, bytes = 4 * width, turned = turned_bytes<Lanes>(Nibbles);
    const row_pass r = pass;
    const ints table = table_of<Lanes, Nibbles>(codes);
    const int vectors = row_vectors_of<Lanes>(r.dim, Nibbles);
    // In this order compilers do not keep the addresses of all rows.
    for (int v = 0; v < vectors; ++v) {
        const code_loader<Lanes, Nibbles> loader(r, v);
        for (int k = 0; k < 2; ++k) {
            const std::byte* const* const rows = r.rows + first + k * width;
            std::byte* to = out + (k * vectors + v) * turned;
            ints words[width];
            KVQ_UNROLL
            for (int i = 0; i < width; ++i) {
                words[i] = loader.load(rows[i]);
            }
            Lanes::transpose(words);
            KVQ_UNROLL
            for (int j = 0; j < width; ++j) {
                Lanes::store(to, codes_of<Lanes, Nibbles>(words[j], table));
                to += bytes;
                if constexpr (Nibbles) {
                    Lanes::store(to, codes_of<Lanes, true>(Lanes::template shift_right<4>(words[j]), table));
                    to += bytes;
                }
            }
        }
    }
}

/// Bytes of two tokens in a vector of half bytes of rows.
inline constexpr int pair_bytes = 256;
/// Where 16 channels of them lie: even ones before odd ones.
constexpr int pair_place(int sixteen) noexcept { return (sixteen % 2 * 4 + sixteen / 2) * 32; }

/// Numbers of half bytes, of vector v of the rows.
template <class Lanes>
KVQ_NOINLINE void pair_values(const row_pass& pass, const code_rows& codes, int v, std::byte* out) {
    using ints = typename Lanes::ints;
    const row_pass r = pass;
    const code_loader<Lanes, true> loader(r, v);
    const std::uint32_t back = (256u - static_cast<std::uint32_t>(codes.offset)) * 0x01010101u;
    const ints table =
        Lanes::add_bytes(Lanes::sixteen_bytes(codes.table),
                         Lanes::splat(static_cast<std::int32_t>(codes.offset > 0 ? back : 0u)));
    const int end = detail::round_up(r.tokens, 4);
    for (int t = 0; t < end; t += 2, out += pair_bytes) {
        ints two[2];
        KVQ_UNROLL
        for (int k = 0; k < 2; ++k) {
            two[k] = loader.load(r.rows[t + k]);
        }
        Lanes::interleave_bytes(two);
        KVQ_UNROLL
        for (int k = 0; k < 2; ++k) {
            ints numbers[2] = {codes_of<Lanes, true>(two[k], table),
                               codes_of<Lanes, true>(Lanes::template shift_right<4>(two[k]), table)};
            Lanes::interleave_lanes(numbers);
            Lanes::store(out + k * pair_bytes / 2, numbers[0]);
            Lanes::store(out + k * pair_bytes / 2 + pair_bytes / 4, numbers[1]);
        }
    }
}

/// Four operands of keys: [word][operand][high, low], of groups and operands -offset times the sum, the sum,
/// and steps. Steps are NaN where an operand is not finite.
struct code_operands {
    float* all;
    int dim, groups;

    static constexpr int floats(int dim, int groups) noexcept { return 2 * dim + 8 * groups + 4; }
    std::uint32_t* words() const { return reinterpret_cast<std::uint32_t*>(all); }
    std::int32_t* starts() const { return reinterpret_cast<std::int32_t*>(all + 2 * dim); }
    float* sums() const { return all + 2 * dim + 4 * groups; }
    float* steps() const { return all + 2 * dim + 8 * groups; }
    bool finite() const {
        float zero = 0.0f;
        for (int i = 0; i < 4; ++i) zero += steps()[i] * 0.0f;
        return zero == 0.0f;
    }
};

/// scratch: 4 * dim floats.
template <class Lanes>
KVQ_NOINLINE void begin_code_operands(const code_rows& codes, const float* x, std::ptrdiff_t x_stride,
                                      int count, const code_operands& to, float* scratch) {
    const int dim = to.dim, group = dim / to.groups;
    for (int i = 0; i < 4; ++i) {
        float* const row = scratch + i * dim;
        float most = 0.0f, zero = 0.0f;
        for (int c = 0; c < dim; ++c) {
            const float value = i < count ? x[i * x_stride + c] : 0.0f;
            row[codes.key_place(c)] = value;
            most = detail::larger(most, value < 0.0f ? -value : value);
            zero += value * 0.0f;
        }
        const float step = detail::larger(most / code_operand_limit, 0x1p-126f);
        to.steps()[i] = step + zero;
        for (int c = 0; c < dim; c += Lanes::width) {
            const auto whole =
                zero == 0.0f ? Lanes::multiply(Lanes::load_floats(row + c), Lanes::splat_float(1.0f / step))
                             : Lanes::splat_float(0.0f);
            Lanes::store(reinterpret_cast<std::byte*>(row + c), Lanes::round(whole));
        }
        const auto* const whole = reinterpret_cast<const std::int32_t*>(row);
        for (int g = 0; g < to.groups; ++g) {
            std::int32_t sum = 0;
            for (int c = g * group; c < (g + 1) * group; ++c) sum += whole[c];
            to.starts()[4 * g + i] = -codes.offset * sum;
            to.sums()[4 * g + i] = static_cast<float>(sum);
        }
    }
    for (int c = 0; c < dim; c += Lanes::width) {
        typename Lanes::ints a[4];
        for (int i = 0; i < 4; ++i)
            a[i] = Lanes::load(reinterpret_cast<const std::byte*>(scratch + i * dim + c));
        Lanes::store_high_low_of_four(to.words() + 2 * c, a);
    }
}

/// Of two vectors of tokens, whose codes are `second` bytes apart, for which operands are loaded once.
/// scales, minima: of their first token. next: their rows that are prefetched meanwhile, a row with each
/// word; bytes_of_next: of 128 channels.
template <class Lanes, int Q>
KVQ_NOINLINE void code_keys(const std::byte* codes, std::ptrdiff_t second, const std::byte* const* next,
                            int bytes_of_next, const code_operands& operands, const float* scales,
                            const float* minima, std::ptrdiff_t scale_stride, float* y,
                            std::ptrdiff_t y_stride) {
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    constexpr int width = Lanes::width, bytes = 4 * width;
    const int groups = operands.groups, words_of_group = operands.dim / groups / 4;
    const std::int32_t* starts = operands.starts();
    const float* sums = operands.sums();
    const std::uint32_t* operand = operands.words();
    int row = 0;
    std::ptrdiff_t of_row = 0;
    floats sum[2][Q];
    KVQ_UNROLL
    for (int i = 0; i < Q; ++i) sum[0][i] = sum[1][i] = Lanes::splat_float(0.0f);
    for (int g = 0; g < groups; ++g, starts += 4, sums += 4, scales += scale_stride) {
        ints high[2][Q], low[2][Q];
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) {
            high[0][i] = high[1][i] = Lanes::splat(0);
            low[0][i] = low[1][i] = Lanes::splat(starts[i]);
        }
        for (int j = 0; j < words_of_group; ++j, codes += bytes, operand += 8) {
            prefetch_128(next[row] + of_row, bytes_of_next);
            if (++row == 2 * width) row = 0, of_row += bytes_of_next;
            const ints code[2] = {Lanes::load(codes), Lanes::load(codes + second)};
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) {
                const ints of_high = Lanes::splat(static_cast<std::int32_t>(operand[2 * i])),
                           of_low = Lanes::splat(static_cast<std::int32_t>(operand[2 * i + 1]));
                KVQ_UNROLL
                for (int k = 0; k < 2; ++k) {
                    high[k][i] = Lanes::template dot<8>(high[k][i], code[k], of_high);
                    low[k][i] = Lanes::template dot<8>(low[k][i], code[k], of_low);
                }
            }
        }
        KVQ_UNROLL
        for (int k = 0; k < 2; ++k) {
            const floats scale = Lanes::load_floats(scales + k * width);
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i)
                sum[k][i] = Lanes::multiply_add(
                    Lanes::to_floats(Lanes::add(Lanes::template shift_left<8>(high[k][i]), low[k][i])), scale,
                    sum[k][i]);
            if (minima) {
                const floats minimum = Lanes::load_floats(minima + g * scale_stride + k * width);
                KVQ_UNROLL
                for (int i = 0; i < Q; ++i)
                    sum[k][i] = Lanes::multiply_add(Lanes::splat_float(sums[i]), minimum, sum[k][i]);
            }
        }
    }
    KVQ_UNROLL
    for (int i = 0; i < Q; ++i) {
        KVQ_UNROLL
        for (int k = 0; k < 2; ++k) Lanes::store_floats(y + i * y_stride + k * width, sum[k][i]);
    }
}

/// Groups of weights that are prepared together: their maxima fill a vector.
inline constexpr int weight_groups = 4;

/// Weights of four groups, two tokens in a word: [group][16 tokens][tokens 2k + h of fours][four][operand],
/// and of each group and operand a step, and the sum of weights times minima.
struct code_weight_space {
    std::uint32_t words[weight_groups][tokens_of_pass / 16][2][4][4];
    float steps[weight_groups * 4], of_minima[weight_groups * 4];
};

/// w: count rows of Q, w_stride apart. False: products are not finite.
template <class Lanes, int Q>
KVQ_NOINLINE bool code_weights(const float* w, std::ptrdiff_t w_stride, int count, int tokens, int groups,
                               const float* scales, const float* minima, std::ptrdiff_t scale_stride,
                               code_weight_space& to) {
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    constexpr int width = Lanes::width;
    static_assert(width == weight_groups * 4);
    const auto zero = Lanes::splat_float(0.0f);
    const float* row[Q];
    KVQ_UNROLL
    for (int i = 0; i < Q; ++i) row[i] = w + detail::smaller(i, count - 1) * w_stride;
    // of(t, load): a vector of tokens, behind the last one zeros.
    const auto each_vector = [&](const auto& of) KVQ_INLINE_LAMBDA {
        int t = 0;
        for (; t + width <= tokens; t += width)
            of(t, [](const float* p) KVQ_INLINE_LAMBDA { return Lanes::load_floats(p); });
        const int rest = tokens - t;
        if (rest > 0) of(t, [&](const float* p) KVQ_INLINE_LAMBDA { return Lanes::load_floats(p, rest); });
    };
    ints most[width];
    for (int k = 0; k < width; ++k) most[k] = Lanes::splat(0);
    for (int g = 0; g < groups; ++g) {
        floats largest[Q], of_minima[Q];
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) largest[i] = of_minima[i] = zero;
        each_vector([&](int t, const auto& load) KVQ_INLINE_LAMBDA {
            const floats scale = load(scales + g * scale_stride + t);
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) {
                const floats weight = load(row[i] + t);
                largest[i] = Lanes::larger_magnitude(largest[i], Lanes::multiply(weight, scale));
                if (minima)
                    of_minima[i] =
                        Lanes::multiply_add(weight, load(minima + g * scale_stride + t), of_minima[i]);
            }
        });
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) {
            most[4 * g + i] = Lanes::as_ints(largest[i]);
            if (minima) to.of_minima[4 * g + i] = Lanes::sum(of_minima[i]);
        }
    }
    const floats largest = Lanes::template extreme_of_each<false>(most);
    if (!(Lanes::sum(Lanes::multiply(largest, zero)) == 0.0f)) return false;
    // The inverse is finite.
    const floats step = Lanes::larger(Lanes::multiply(largest, Lanes::splat_float(1.0f / code_operand_limit)),
                                      Lanes::splat_float(0x1p-126f));
    float inverses[width];
    Lanes::store_floats(inverses, Lanes::divide(Lanes::splat_float(1.0f), step));
    Lanes::store_floats(to.steps, step);
    for (int g = 0; g < groups; ++g) {
        floats by[Q];
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) by[i] = Lanes::splat_float(inverses[4 * g + i]);
        each_vector([&](int t, const auto& load) KVQ_INLINE_LAMBDA {
            const floats scale = load(scales + g * scale_stride + t);
            ints a[4];
            KVQ_UNROLL
            for (int i = 0; i < 4; ++i)
                a[i] = i < Q ? Lanes::round(
                                   Lanes::multiply(Lanes::multiply(load(row[i % Q] + t), scale), by[i % Q]))
                             : Lanes::splat(0);
            Lanes::store_word_pairs_of_four(to.words[g][t / 16][0][0], a);
        });
    }
    return true;
}

/// Values of some groups: bytes of the rows at channel group `from` (V = 2), or what pair_values wrote of a
/// vector. V: vectors of 16 channels of a group. y: Q rows, where four (bytes), eight or single (pairs)
/// neighbours of 32 channels are in turns in the first and second vector.
template <class Lanes, int Q, int V, bool Nibbles>
KVQ_NOINLINE void code_values(const row_pass& pass, const std::byte* pairs, int vector, int from, int groups,
                              const code_weight_space& weights, bool minima, float unit, float* y,
                              std::ptrdiff_t y_stride) {
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    const row_pass r = pass;
    [[maybe_unused]] const int next_bytes = bytes_of_128(r, Nibbles);
    [[maybe_unused]] const std::ptrdiff_t of_next = std::ptrdiff_t{vector} * next_bytes;
    [[maybe_unused]] int row = detail::smaller(from * V * r.tokens / 8, r.tokens - 1);
    for (int g = 0; g < groups; ++g, y += V * Lanes::width) {
        ints sum[Q][V];
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) {
            KVQ_UNROLL
            for (int v = 0; v < V; ++v) sum[i][v] = Lanes::splat(0);
        }
        const std::ptrdiff_t chunk = std::ptrdiff_t{from + g} * r.chunk_bytes;
        // A line of each row with a group, of as many as there are.
        [[maybe_unused]] const std::ptrdiff_t line = std::ptrdiff_t{from + g} * 64;
        [[maybe_unused]] const bool prefetches = line < std::ptrdiff_t{r.chunks()} * r.chunk_bytes;
        const auto* w = reinterpret_cast<const std::uint32_t*>(weights.words[g]);
        for (int t = 0; t < r.tokens; t += 4, w += t % 16 == 0 ? 20 : 4) {
            if constexpr (Nibbles)  // all rows, in the time of all groups
                if (V == 2 || t % 8 == 0) {
                    prefetch_128(r.next[row] + of_next, next_bytes);
                    row += row < r.tokens - 1 ? 1 : 0;
                }
            KVQ_UNROLL
            for (int h = 0; h < 2; ++h) {
                ints x[2];
                if constexpr (Nibbles) {
                    KVQ_UNROLL
                    for (int v = 0; v < V; ++v)
                        x[v] =
                            Lanes::load_bytes_as_halves(pairs + std::ptrdiff_t{t + 2 * h} * (pair_bytes / 2) +
                                                        pair_place(V * (from + g) + v));
                } else {
                    KVQ_UNROLL
                    for (int k = 0; k < 2; ++k) {
                        if (prefetches) detail::prefetch(r.next[t + 2 * h + k] + line);
                        x[k] = Lanes::load_bytes_as_halves(r.rows[t + 2 * h + k] + chunk + r.front);
                    }
                    Lanes::interleave_halves(x);
                }
                KVQ_UNROLL
                for (int i = 0; i < Q; ++i) {
                    const ints weight = Lanes::splat(static_cast<std::int32_t>(w[16 * h + i]));
                    KVQ_UNROLL
                    for (int v = 0; v < V; ++v) sum[i][v] = Lanes::dot_word_pairs(sum[i][v], x[v], weight);
                }
            }
        }
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) {
            const int at = 4 * g + i;
            const floats step = Lanes::splat_float(weights.steps[at] * unit),
                         shift = Lanes::splat_float(minima ? weights.of_minima[at] : 0.0f);
            KVQ_UNROLL
            for (int v = 0; v < V; ++v) {
                float* const to = y + i * y_stride + v * Lanes::width;
                Lanes::store_floats(to, Lanes::multiply_add(Lanes::to_floats(sum[i][v]), step, shift));
            }
        }
    }
}

}}}  // namespace kvq::kernels
