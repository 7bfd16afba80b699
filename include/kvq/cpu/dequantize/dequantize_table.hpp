// Dequantizing a block to tokens with tables, for narrow codes and parameters per token: x^ is looked up,
// never computed.
//
//   table of a token and group = x^ of every code, rounded to the type of the output; repeated until it fills
//   a vector
//   value = table[code]
//
//   K   rows are tokens: words are transposed within 128-bit lanes, so that a lane holds neighbouring columns
//       of one token, and spread to the lanes of the output
//   V   rows are channels, as in the output; for 16-bit output words of two vectors are split into halves
//       first
//
// An index carries bits of its neighbours above its own, which a repeating table ignores: codes need no mask.
// Measured against dequantize_block.hpp, in one run on a pinned core (Zen 4, blocks of 128 x 128, groups of
// 64): 4 bits to fp16 in 58 % of the time for K and 40 % for V, to fp32 in 85 % and 50 %. Constant counts of
// with_steps() are up to 15 % of that.
// Contract: the bits of scheme::dequantize, rounded once to the type of the output (tests/conformance). run()
// returns false, and has written nothing, for shapes that do not fill vectors and lanes without lookup_table.
#pragma once

#include <utility>

#include "../parameter_sections.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes, class Levels, int Bits, float_format T>
class table_dequantizer {
public:
    table_dequantizer(const group_block<Bits>& of, const block_shape& shape, const std::byte* block, T* out,
                      std::ptrdiff_t stride)
        : shape_(shape),
          codes_(of.codes),
          sections_(of.sections),
          load_(of.load),
          from_(block),
          to_(out),
          stride_(stride) {}

    bool run() {
        if constexpr (has_table) {
            if (!fills_vectors()) return false;
            if (shape_.role == tensor::key)
                with_steps<lane_columns>([&]<int Steps>() { keys<Steps>(); });
            else
                with_steps<per_store>([&]<int Steps>() { values<Steps>(); });
            return true;
        } else {
            return false;
        }
    }

private:
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    using planes = code_planes<Bits>;
    static constexpr int width = Lanes::width;
    static constexpr bool has_table = planes::count == 1 && (1 << Bits) <= width && requires(ints a) {
        Lanes::template lookup_table<T>(a, a);
    };
    /// Columns of a word, of the words of a row in a 128-bit lane, and values of an output vector.
    static constexpr int word_columns = 4 * planes::quads_per_word(0), lane_columns = 4 * word_columns;
    static constexpr int per_store = 4 * width / static_cast<int>(sizeof(T));
    /// Lanes (K) or vectors (V) of a span.
    static constexpr int most = 16;

    bool fills_vectors() const {
        const bool key = shape_.role == tensor::key;
        const grouped_axis& channels = key ? codes_.cols : codes_.rows();
        const int token_step = key ? width : word_columns, channel_step = key ? lane_columns : per_store;
        return shape_.tokens % token_step == 0 && shape_.dim % channel_step == 0 &&
               (channels.groups() == 1 || channels.group % channel_step == 0);
    }

    /// Parameters of some tokens, for every group of channels in a span.
    struct parameters {
        alignas(64) float scale[most][width], bias[most][width];
    };
    /// A range of channels, counted in steps (lanes of K, vectors of V), and its groups.
    struct span {
        int first, count;        // steps
        int group, steps, left;  // the first group, steps of a group, steps of the first group here

        /// Calls f(group, counted from the first; its first step, counted from the span's first; steps).
        /// Steps: of every group, if known at compile time; else 0.
        template <int Steps, class F>
        KVQ_INLINE void each_group(F&& f) const {
            if constexpr (Steps > 0)
                for (int g = 0; g * Steps < count; ++g) f(g, g * Steps, Steps);
            int begin = Steps > 0 ? count : 0, end = left;
            for (int g = 0; begin < count; ++g, begin = end, end += steps)
                f(g, begin, detail::smaller(end, count) - begin);
        }
    };
    /// Calls f<Steps>. Steps: steps of every group, if all groups have 2 or 4 and spans begin with a group,
    /// so that loops over them have constant counts; else 0.
    template <int Step, class F>
    void with_steps(F&& f) const {
        const int group = (shape_.role == tensor::key ? codes_.cols : codes_.rows()).group;
        const auto is = [&](int steps) { return group == steps * Step && shape_.dim % group == 0; };
        if (is(2)) return f.template operator()<2>();
        if (is(4)) return f.template operator()<4>();
        f.template operator()<0>();
    }
    /// Calls f(span) for all channels: long spans, so that tokens are written in long runs.
    template <class F>
    KVQ_INLINE void each_span(const grouped_axis& channels, int step, F&& f) const {
        const int all = shape_.dim / step, steps = channels.groups() == 1 ? all : channels.group / step;
        for (int i = 0; i < all; i += most)
            f(span{i, detail::smaller(most, all - i), i / steps, steps, steps - i % steps});
    }
    KVQ_INLINE void load(parameters& p, const span& at, int token, int n) const {
        at.template each_group<0>([&](int g, int, int) KVQ_INLINE_LAMBDA {
            const std::byte* const from = from_ + sections_.offset(at.group + g, token);
            load_.template run<Lanes>(from, n, p.scale[g]);
            if constexpr (Levels::has_bias) load_.template run<Lanes>(from + sections_.bytes, n, p.bias[g]);
        });
    }

    /// The levels of all codes, code i in lane i, repeated to fill the vector.
    static KVQ_INLINE floats all_levels() {
        float level[width];
        for (int i = 0; i < width; ++i)
            level[i] = static_cast<float>((i & ((1 << Bits) - 1)) - Levels::template zero_code<Bits>);
        return Lanes::load_floats(level);
    }
    static KVQ_INLINE ints table(const parameters& p, int g, int i, floats level) {
        const floats product = Lanes::rounded_product(Lanes::splat_float(p.scale[g][i]), level);
        if constexpr (Levels::has_bias)
            return Lanes::template code_table<T>(Lanes::add(product, Lanes::splat_float(p.bias[g][i])));
        else
            return Lanes::template code_table<T>(product);
    }

    template <int Steps>
    void keys() const {
        const floats level = all_levels();
        // Local copies: stores to the output cannot change them.
        const std::ptrdiff_t stride = stride_;
        const int rows = shape_.tokens;
        each_span(codes_.cols, lane_columns, [&, stride, rows](const span at) {
            T* out = to_ + at.first * lane_columns;
            parameters p;
            alignas(64) std::byte turned[most][4][4 * width];
            for (int row = 0; row < rows; row += width) {
                load(p, at, row, width);
                const std::byte* from = from_ + 4 * codes_.tiles.word(row, 4 * at.first);
                const std::ptrdiff_t step = codes_.tiles.vector_bytes(row);
                for (int n = 0; n < at.count; ++n, from += 4 * step) {
                    ints words[4] = {Lanes::load(from), Lanes::load(from + step),
                                     Lanes::load(from + 2 * step), Lanes::load(from + 3 * step)};
                    Lanes::transpose_fours(words);
                    KVQ_UNROLL
                    for (int i = 0; i < 4; ++i) Lanes::store(turned[n][i], words[i]);
                }
                for (int r = 0; r < width; ++r, out += stride) {
                    const std::byte* const lanes = turned[0][r % 4] + r / 4 * 16;
                    at.template each_group<Steps>([&](int g, int first, int count) KVQ_INLINE_LAMBDA {
                        const ints values = table(p, g, r, level);
                        for (int n = 0; n < (Steps > 0 ? Steps : count); ++n)
                            write_lane(lanes + (first + n) * 4 * 4 * width, values,
                                       out + (first + n) * lane_columns,
                                       std::make_integer_sequence<int, lane_columns / per_store>{});
                    });
                }
            }
        });
    }
    template <int... Part>
    static KVQ_INLINE void write_lane(const std::byte* lane, ints values, T* to,
                                      std::integer_sequence<int, Part...>) {
        (Lanes::store(
             reinterpret_cast<std::byte*>(to + Part * per_store),
             Lanes::template lookup_table<T>(Lanes::template spread_codes<T, Bits, Part>(lane), values)),
         ...);
    }

    template <int Steps>
    void values() const {
        const floats level = all_levels();
        const std::ptrdiff_t stride = stride_;
        const int cols = shape_.tokens;
        each_span(codes_.rows(), per_store, [&, stride, cols](const span at) {
            T* out = to_ + at.first * per_store;
            parameters p;
            ints words[most][2];
            const std::byte* from[most];
            std::ptrdiff_t step[most];
            for (int n = 0; n < at.count; ++n) {
                const int row = (at.first + n) * per_store;
                from[n] = from_ + 4 * codes_.tiles.word(row, 0);
                step[n] = codes_.tiles.vector_bytes(row);
            }
            for (int t = 0; t < cols; t += word_columns) {
                for (int n = 0; n < at.count; ++n) {
                    words[n][0] = Lanes::load(from[n]);
                    if constexpr (sizeof(T) == 2) {
                        words[n][1] = Lanes::load(from[n] + 4 * width);
                        Lanes::split_halves(words[n]);
                    }
                    from[n] += step[n];
                }
                [&]<int... Column>(std::integer_sequence<int, Column...>) KVQ_INLINE_LAMBDA {
                    const auto one = [&]<int C>(std::integral_constant<int, C>) KVQ_INLINE_LAMBDA {
                        // A vector of parameters at a time: loads after a masked store are slow.
                        const int i = (t + C) % width;
                        if (C % width == 0 && i == 0)
                            load(p, at, t + C, detail::smaller(width, cols - t - C));
                        at.template each_group<Steps>([&](int g, int first, int count) KVQ_INLINE_LAMBDA {
                            const ints values = table(p, g, i, level);
                            for (int n = 0; n < (Steps > 0 ? Steps : count); ++n)
                                Lanes::store(
                                    reinterpret_cast<std::byte*>(out + (first + n) * per_store),
                                    Lanes::template lookup_table<T>(code<C>(words[first + n]), values));
                        });
                        out += stride;
                    };
                    (one(std::integral_constant<int, Column>{}), ...);
                }
                (std::make_integer_sequence<int, word_columns>{});
            }
        });
    }
    /// The codes of a column of words, or of words split into halves.
    template <int Column>
    static KVQ_INLINE ints code(const ints (&words)[2]) {
        constexpr int byte = Column % 4, in_byte = Column / 4 * Bits;
        if constexpr (sizeof(T) == 2)
            return Lanes::template shift_right<byte % 2 * 8 + in_byte>(words[byte / 2]);
        else
            return Lanes::template shift_right<byte * 8 + in_byte>(words[0]);
    }

    const block_shape shape_;
    const code_layout<Bits> codes_;
    const parameter_sections sections_;
    const parameter_load load_;
    const std::byte* from_;
    T* to_;
    std::ptrdiff_t stride_;
};

}}}  // namespace kvq::kernels
