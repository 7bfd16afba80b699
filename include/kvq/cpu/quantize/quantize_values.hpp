// Quantizing float values [token][channel] with a composed scheme: lanes are neighbouring channels, as they lie in memory.
//
//   per token      minima and maxima of `width` tokens, merged to one lane each; a token's parameters are broadcast
//   per channel    minima and maxima lane by lane, over the tokens of a group
//   K              rows are tokens: codes are packed to bytes first and transposed as words of four, which is a quarter of the work
//   V              rows are channels: nothing moves between lanes
//
// Contract: the bytes of scheme::quantize (tests/conformance). run() returns false, and the contents of the block are undefined,
// for shapes that do not fill vectors, for lanes without pack_bytes, for codes that would need clamping, and for NaN or
// infinities: a NaN, and nothing else, gives the integer -2^31; infinities are extremes.
#pragma once

#include <array>
#include <cstring>
#include <utility>

#include "../composed.hpp"
#include "../special_values.hpp"
#include "fit.hpp"
#include "pack_codes.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes, range_scheme Scheme>
class value_quantizer {
public:
    value_quantizer(const Scheme& scheme, const block_shape& shape, const float* values, std::byte* block)
        : shape_(shape),
          codes_(scheme.codes(shape)),
          sections_(scheme, shape),
          halves_(per_token && axis(false).groups() > 1 && axis(false).group == unit / 2),
          from_(values),
          to_(block) {}

    KVQ_NOINLINE bool run() {
        if constexpr (fits_lanes && requires(ints a) { Lanes::template pack_bytes<true>(a, a, a, a); }) {
            if (!fills_vectors()) return false;
            std::memset(to_ + sections_.first, 0, (levels::has_bias ? 2 : 1) * sections_.bytes);
            if constexpr (per_token)
                each_token();
            else
                each_channel();
            return !fit::exceeds(most_) && !special::any(special_);
        } else {
            return false;
        }
    }

private:
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    using levels = typename Scheme::levels;
    using parameter = typename Scheme::parameter;
    using fit = group_fit<Lanes, levels, Scheme::code_bits, parameter, float>;
    using writer = code_words<Lanes, Scheme::code_bits>;
    using special = special_values<Lanes, float>;  // of extremes, and of codes
    static constexpr int width = Lanes::width;
    static constexpr int step_quads = writer::step_quads, step_columns = 4 * step_quads;
    static constexpr bool per_token = detail::on_rows<typename Scheme::granularity_type>(tensor::key);
    /// Channels that are packed at a time.
    static constexpr int unit = 4 * width;
    /// Are parameters fitted a vector at a time?
    static constexpr bool fits_lanes = float_format<parameter>;
    /// Tokens that are quantized at a time, for parameters per token: enough to hide the latency of the fit's divisions.
    static constexpr int most_tokens = 32;

    /// Parameters in use: of tokens (one line for each group of channels in a unit), or of channels.
    struct parameters {
        alignas(64) float bias[2][64], inverse[2][64];
    };

    /// Channels and tokens that are quantized at a time.
    struct area {
        int channel, channels, token, tokens;
    };

    const grouped_axis& axis(bool tokens) const {
        return (shape_.role == tensor::key) == tokens ? codes_.rows() : codes_.cols;
    }
    int token_step() const {
        return shape_.role == tensor::key ? width : detail::larger(width, step_columns);
    }

    bool fills_vectors() const {
        const grouped_axis &channels = axis(false), &tokens = axis(true);
        const auto whole = [](const grouped_axis& a, int step) {
            return a.size > 0 && a.size % step == 0 && (a.groups() == 1 || a.group % step == 0);
        };
        return whole(tokens, token_step()) && shape_.dim % unit == 0 && (halves_ || whole(channels, unit));
    }

    const float* token(int t) const { return from_ + t * shape_.dim; }

    // ---- extremes ----

    struct extremes {
        floats lo, hi;

        /// A load into a register: a minimum and a maximum that both read memory are slower.
        static KVQ_INLINE floats load(const float* p) {
            return Lanes::as_floats(Lanes::in_register(Lanes::load(reinterpret_cast<const std::byte*>(p))));
        }
        KVQ_INLINE explicit extremes(const float* p) : lo(load(p)), hi(lo) {}
        KVQ_INLINE void take(const float* p) {
            const floats x = load(p);
            lo = Lanes::smaller(lo, x);
            hi = Lanes::larger(hi, x);
        }
    };

    /// Fits groups with these extremes and writes their parameters; slot: of the first one.
    KVQ_INLINE void fitted(floats lo, floats hi, int group, int slot, float* bias, float* inverse) {
        special_ = Lanes::bit_or(
            special_, Lanes::bit_or(special::marks(Lanes::as_ints(lo)), special::marks(Lanes::as_ints(hi))));
        const fit f(lo, hi);
        f.store(to_ + sections_.offset(group, slot), sections_.bytes, width);
        Lanes::store_floats(bias, f.bias);
        Lanes::store_floats(inverse, f.inverse);
        most_ = Lanes::larger(most_, f.most());
    }

    /// Fits groups of channels [begin, end) of `width` tokens from t on.
    void fit_tokens(int t, int begin, int end, int group, float* bias, float* inverse) {
        ints lo[width], hi[width];
        for (int i = 0; i < width; ++i) {
            const float* const p = token(t + i);
            extremes found(p + begin);
            for (int c = begin + width; c < end; c += width) found.take(p + c);
            lo[i] = Lanes::as_ints(found.lo);
            hi[i] = Lanes::as_ints(found.hi);
        }
        fitted(Lanes::template extreme_of_each<true>(lo), Lanes::template extreme_of_each<false>(hi), group,
               axis(true).slot(t), bias, inverse);
    }

    /// Fits a unit of channels, from c on, over tokens [begin, end).
    void fit_channels(int c, int begin, int end, int group, float* bias, float* inverse) {
        const auto start = [&]<int... Load>(std::integer_sequence<int, Load...>) {
            return std::array<extremes, 4>{extremes(token(begin) + c + Load * width)...};
        };
        auto found = start(std::make_integer_sequence<int, 4>{});
        for (int t = begin + 1; t < end; ++t) {
            KVQ_UNROLL
            for (int i = 0; i < 4; ++i) found[static_cast<std::size_t>(i)].take(token(t) + c + i * width);
        }
        for (int i = 0; i < 4; ++i) {
            const extremes& e = found[static_cast<std::size_t>(i)];
            fitted(e.lo, e.hi, group, axis(false).slot(c + i * width), bias + i * width, inverse + i * width);
        }
    }

    // ---- codes ----

    void each_token() {
        const grouped_axis& channels = axis(false);
        const int group = channels.groups() == 1 ? shape_.dim : channels.group;
        const int some = detail::larger(unit, group);
        parameters p;
        for (int t = 0; t < shape_.tokens; t += most_tokens)
            for (int c = 0; c < shape_.dim; c += some) {
                const int end = detail::smaller(c + some, shape_.dim);
                const int step = detail::smaller(most_tokens, shape_.tokens - t);
                for (int g = c; g < end; g += group)
                    for (int i = 0; i < step; i += width)
                        fit_tokens(t + i, g, detail::smaller(g + group, end), g / group,
                                   p.bias[(g - c) / group] + i, p.inverse[(g - c) / group] + i);
                code(area{c, end - c, t, step}, [&](int token_of, int vector) KVQ_INLINE_LAMBDA {
                    const int line = halves_ ? vector / 2 : 0;
                    return std::pair(Lanes::splat_float(p.bias[line][token_of]),
                                     Lanes::splat_float(p.inverse[line][token_of]));
                });
            }
    }

    void each_channel() {
        const grouped_axis& tokens = axis(true);
        parameters p;
        for (int g = 0; g < tokens.groups(); ++g)
            for (int c = 0; c < shape_.dim; c += unit) {
                const int begin = g * tokens.group, n = tokens.group_size(g);
                fit_channels(c, begin, begin + n, g, p.bias[0], p.inverse[0]);
                code(area{c, unit, begin, n}, [&](int, int vector) KVQ_INLINE_LAMBDA {
                    return std::pair(Lanes::load_floats(p.bias[0] + vector * width),
                                     Lanes::load_floats(p.inverse[0] + vector * width));
                });
            }
    }

    template <class F>
    KVQ_INLINE void code(const area& a, F&& of) {
        if (shape_.role == tensor::key)
            code_keys(a, of);
        else
            code_values(a, of);
    }

    /// The levels of values at p with the parameters of(token, vector), counted in the area and in the unit.
    template <class F>
    static KVQ_INLINE ints code_at(const float* p, int token_of, int vector, F&& of) {
        const auto [bias, inverse] = of(token_of, vector);
        return fit::template level<false>(Lanes::load_floats(p), bias, inverse);
    }
    /// Collects sign bits: only the integer -2^31, that of NaN, has one.
    static KVQ_INLINE void look_at(ints& seen, ints a, ints b, ints c, ints d) {
        seen = Lanes::bit_or(seen, Lanes::bit_or(Lanes::bit_or(fit::code_of(a), fit::code_of(b)),
                                                 Lanes::bit_or(fit::code_of(c), fit::code_of(d))));
    }

    template <class F>
    KVQ_INLINE void code_keys(const area& a, F&& of) {
        ints seen = Lanes::splat(0);
        for (int t = 0; t < a.tokens; t += width)
            for (int c = a.channel; c < a.channel + a.channels; c += unit) {
                ints square[width];
                for (int i = 0; i < width; ++i) {
                    const float* const p = token(a.token + t + i) + c;
                    const auto one = [&](int k)
                                         KVQ_INLINE_LAMBDA { return code_at(p + k * width, t + i, k, of); };
                    const ints c0 = one(0), c1 = one(1), c2 = one(2), c3 = one(3);
                    look_at(seen, c0, c1, c2, c3);
                    square[i] = fit::packed(c0, c1, c2, c3);
                }
                Lanes::transpose(square);
                ints words[width];
                KVQ_UNROLL
                for (int i = 0; i < width; ++i) words[i % 4 * (width / 4) + i / 4] = square[i];
                const int row = a.token + t;
                std::byte* const to = to_ + 4 * codes_.tiles.word(row, 0);
                const std::ptrdiff_t step = codes_.tiles.vector_bytes(row);
                KVQ_UNROLL
                for (int s = 0; s < width / step_quads; ++s)
                    writer::template put<false>(codes_.quads(), c / step_columns + s, words + s * step_quads,
                                                [&](int v, ints w)
                                                    KVQ_INLINE_LAMBDA { Lanes::store(to + v * step, w); });
            }
        special_ = Lanes::bit_or(special_, seen);
    }

    template <class F>
    KVQ_INLINE void code_values(const area& a, F&& of) {
        ints seen = Lanes::splat(0);
        for (int c = a.channel; c < a.channel + a.channels; c += width) {
            std::byte* const to = to_ + 4 * codes_.tiles.word(c, 0);
            const std::ptrdiff_t step = codes_.tiles.vector_bytes(c);
            const int vector = (c - a.channel) % unit / width;
            for (int t = 0; t < a.tokens; t += step_columns) {
                ints words[step_quads];
                KVQ_UNROLL
                for (int q = 0; q < step_quads; ++q) {
                    const auto one = [&](int k) KVQ_INLINE_LAMBDA {
                        return code_at(token(a.token + t + 4 * q + k) + c, t + 4 * q + k, vector, of);
                    };
                    const ints c0 = one(0), c1 = one(1), c2 = one(2), c3 = one(3);
                    look_at(seen, c0, c1, c2, c3);
                    words[q] = writer::four_codes(fit::code_of(c0), fit::code_of(c1), fit::code_of(c2),
                                                  fit::code_of(c3));
                }
                writer::template put<false>(codes_.quads(), (a.token + t) / step_columns, words,
                                            [&](int v, ints w)
                                                KVQ_INLINE_LAMBDA { Lanes::store(to + v * step, w); });
            }
        }
        special_ = Lanes::bit_or(special_, seen);
    }

    const block_shape shape_;
    const code_layout<Scheme::code_bits> codes_;
    const parameter_sections sections_;
    const bool halves_;  // has a unit two groups of channels?
    const float* from_;
    std::byte* to_;
    ints special_ = Lanes::splat(0);
    floats most_ = Lanes::splat_float(0.0f);
};

}}}  // namespace kvq::kernels
