// Quantizing blocks with parameters per channel that encoders fit (schemes/scheme.hpp), in lanes.
//
//   1. scales      of tokens; every token is divided by its token scale
//                  (token_scale_fit.hpp)
//   2. fit         a lane is a channel                                                    (channel_fit.hpp)
//   3. store       parameters, by the functions of quant/block_params.hpp
//   4. round       a lane is a row of the block: a channel of V, with the mean of its errors; a token of K,
//                  after a transposition
//   5. feedback    of K, from the last channel to the first, a few channels at a time: the weighted errors of
//                  later channels are summed in registers
//                  (quant/error_feedback.hpp)
//
// Compiled for an instruction set, and widths of codes: steps 4 and 5 alone know of these.
// Contract: the same bytes as scheme::quantize (tests/conformance), for blocks that the registry admits. For
// values that are not finite or above 2^100 run() returns false and has changed nothing but the block.
#pragma once

#include <cstring>

#include "../channels.hpp"
#include "../parameter_sections.hpp"
#include "../special_values.hpp"
#include "channel_fit.hpp"
#include "pack_codes.hpp"
#include "token_scale_fit.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// The steps that do not depend on the widths of codes.
template <class Lanes>
class channel_grids {
protected:
    using floats = typename Lanes::floats;
    using doubles = typename Lanes::doubles;
    using ints = typename Lanes::ints;
    static constexpr int width = Lanes::width, half = width / 2;
    static constexpr int most = most_channels;
    static_assert(most_tokens <= channel_fits<Lanes>::most_tokens && most_tokens <= most &&
                  most <= token_scale_fit<Lanes>::most_channels);

    channel_grids(const channel_blocks& of, const channel_encoding& encoding, float* values, std::byte* block)
        : of_(of),
          encoding_(encoding),
          shape_(of.source.shape),
          axes_(of, of.source.shape),
          tokens_(axes_.tokens),
          values_(values),
          to_(block) {}

    float* token(int t) const { return values_ + t * shape_.dim; }

    /// Are all values finite and small enough to square?
    KVQ_NOINLINE bool ordinary() const {
        floats most_of = Lanes::splat_float(0.0f);
        const int n = shape_.tokens * shape_.dim;
        for (int i = 0; i < n; i += width)
            most_of =
                Lanes::larger(most_of, Lanes::abs(i + width <= n ? Lanes::load_floats(values_ + i)
                                                                 : Lanes::load_floats(values_ + i, n - i)));
        return all_finite<Lanes>(values_, shape_.values()) && Lanes::largest(most_of) <= 0x1p100f;
    }

    /// known: token scales of the last block, or null. top: the largest code.
    KVQ_NOINLINE void divide_by_token_scales(const float* known, int top) {
        float token_scales[most_tokens];
        if (known)
            std::memcpy(token_scales, known, sizeof(float) * static_cast<std::size_t>(shape_.tokens));
        else
            token_scale_fit<Lanes>::run(values_, shape_.tokens, shape_.dim, token_scales);
        for (int g = 0; g < tokens_.groups(); ++g) {
            float* const scales = token_scales + g * tokens_.group;
            if (encoding_.keeps)
                detail::settle_token_scales(token(g * tokens_.group), tokens_.group_size(g), shape_.dim, top,
                                            scales);
            encoding_.token_scales(to_ + of_.source.at.token_scales, tokens_.group_begin(g), scales,
                                   tokens_.group_size(g));
        }
        for (int t = 0; t < shape_.tokens; ++t) {
            const floats by = Lanes::splat_float(token_scales[t]);
            float* const x = token(t);
            int c = 0;
            for (; c + width <= shape_.dim; c += width)
                Lanes::store_floats(x + c, Lanes::divide(Lanes::load_floats(x + c), by));
            for (; c < shape_.dim; ++c) x[c] /= token_scales[t];
        }
    }

    /// Channels of every token in the order of the plan.
    KVQ_NOINLINE void order_channels() {
        float y[most];
        for (int t = 0; t < shape_.tokens; ++t) {
            float* const x = token(t);
            for (int c = 0; c < shape_.dim; ++c) y[c] = x[of_.order[c]];
            std::memcpy(x, y, sizeof(float) * static_cast<std::size_t>(shape_.dim));
        }
    }

    /// Scales, their inverses and biases of a group of tokens, as stored.
    KVQ_NOINLINE void fit_group(int g) {
        const int dim = shape_.dim;
        for (int c = 0; c < dim; c += width) {
            const int n = detail::smaller(width, dim - c);
            const auto grids =
                channel_fits<Lanes>(token(g * tokens_.group) + c, dim, tokens_.group_size(g), n, top_ + c)
                    .fit(encoding_.fits, encoding_.keeps);
            for (int i = 0; i < n; ++i) {
                bias_[c + i] = grids.first[i];
                scale_[c + i] = grids.last[i];
            }
        }
        store(encoding_.biases, g, bias_);
        for (int c = 0; c < dim; ++c)
            scale_[c] = top_[c] > 0 ? (scale_[c] - bias_[c]) / static_cast<float>(top_[c]) : 0.0f;
        store(encoding_.scales, g, scale_);
        for (int c = 0; c < dim; ++c) inverse_[c] = scale_[c] > 0.0f ? 1.0f / scale_[c] : 0.0f;
    }
    /// Biases of a group again, moved by the means of errors.
    KVQ_NOINLINE void correct_means(int g, const double* errors) {
        for (int c = 0; c < shape_.dim; ++c)
            bias_[c] = static_cast<float>(static_cast<double>(bias_[c]) + errors[c] / tokens_.group_size(g));
        store(encoding_.corrected_biases, g, bias_);
    }
    void store(channel_encoding::store all, int g, float* p) {
        const auto& at = of_.source.at;
        all(to_ + at.scales, at.groups, at.slot_count, g, p, shape_.dim);
    }

    static KVQ_INLINE ints code(floats x, floats bias, floats inverse, floats top) {
        const floats position = Lanes::rounded_product(Lanes::subtract(x, bias), inverse);
        return Lanes::round(Lanes::limited(position, top));
    }
    static KVQ_INLINE floats error_of(floats x, ints code, floats scale, floats bias) {
        return Lanes::subtract(x, Lanes::add(Lanes::rounded_product(scale, Lanes::to_floats(code)), bias));
    }

    KVQ_INLINE ints code(floats x, int c) const {
        return code(x, Lanes::splat_float(bias_[c]), Lanes::splat_float(inverse_[c]),
                    Lanes::splat_float(static_cast<float>(top_[c])));
    }

    /// Transposes n tokens to channels, a vector each.
    KVQ_NOINLINE void transpose(int first, int n, std::byte* columns) const {
        for (int c = 0; c < shape_.dim; c += width) {
            const int channels = detail::smaller(width, shape_.dim - c);
            ints square[width];
            for (int i = 0; i < width; ++i)
                square[i] = i >= n ? Lanes::splat(0)
                            : channels == width
                                ? Lanes::as_ints(Lanes::load_floats(token(first + i) + c))
                                : Lanes::as_ints(Lanes::load_floats(token(first + i) + c, channels));
            Lanes::transpose(square);
            for (int i = 0; i < channels; ++i) Lanes::store(columns + (c + i) * 4 * width, square[i]);
        }
    }

    /// rows: weights of the error of a channel for the channels before it, [dim][dim].
    KVQ_NOINLINE void code_with_feedback(const float* rows, std::byte* columns) const {
        constexpr int together = 4;  // channels whose error sums are in registers; dim is a multiple
        const int dim = shape_.dim;
        alignas(64) double errors[most * width];
        for (int first = dim - together; first >= 0; first -= together) {
            doubles low[together], high[together];
            KVQ_UNROLL
            for (int k = 0; k < together; ++k) low[k] = high[k] = Lanes::splat_double(0.0);
            const auto add = [&](int k, int c, doubles e_low, doubles e_high) KVQ_INLINE_LAMBDA {
                const doubles by = Lanes::splat_double(static_cast<double>(rows[c * dim + first + k]));
                low[k] = Lanes::multiply_add(by, e_low, low[k]);
                high[k] = Lanes::multiply_add(by, e_high, high[k]);
            };
            for (int c = dim - 1; c >= first + together; --c) {
                const doubles e_low = Lanes::load_doubles(errors + c * width),
                              e_high = Lanes::load_doubles(errors + c * width + half);
                KVQ_UNROLL
                for (int k = 0; k < together; ++k) add(k, c, e_low, e_high);
            }
            KVQ_UNROLL
            for (int i = 0; i < together; ++i) {
                const int k = together - 1 - i, c = first + k;
                std::byte* const at = columns + c * 4 * width;
                const floats x = Lanes::as_floats(Lanes::load(at));
                const ints q = code(Lanes::add(x, Lanes::narrow(low[k], high[k])), c);
                const floats error =
                    error_of(x, q, Lanes::splat_float(scale_[c]), Lanes::splat_float(bias_[c]));
                const doubles e_low = Lanes::template widen<0>(error),
                              e_high = Lanes::template widen<1>(error);
                Lanes::store_doubles(errors + c * width, e_low);
                Lanes::store_doubles(errors + c * width + half, e_high);
                KVQ_UNROLL
                for (int j = 0; j < together; ++j)
                    if (j < k) add(j, c, e_low, e_high);
                Lanes::store(at, q);
            }
        }
    }

    const channel_blocks& of_;
    const channel_encoding& encoding_;
    const block_shape shape_;
    const channel_axes axes_;
    const grouped_axis tokens_;
    float* const values_;
    std::byte* const to_;
    int top_[most];
    alignas(64) float bias_[most], scale_[most], inverse_[most];
};

template <class Lanes, int... Widths>
class channel_quantizer : channel_grids<Lanes> {
    using base = channel_grids<Lanes>;

public:
    /// values: [tokens][dim]; run() overwrites them if it succeeds.
    channel_quantizer(const channel_blocks& of, const channel_encoding& encoding, float* values,
                      std::byte* block)
        : base(of, encoding, values, block) {}

    /// token_scales: those of the values' last block, or null.
    KVQ_NOINLINE bool run(const float* token_scales) {
        if (!this->ordinary()) return false;
        std::memset(to_, 0, of_.bytes);
        each_segment<Widths...>(of_, [&]<int Bits>(const code_segment& segment) {
            for (int c = 0; c < segment.columns; ++c) this->top_[segment.first + c] = (1 << Bits) - 1;
        });
        if (of_.order) this->order_channels();
        if (of_.scaled) this->divide_by_token_scales(token_scales, this->top_[0]);
        for (int g = 0; g < tokens_.groups(); ++g) {
            this->fit_group(g);
            if (shape_.role == tensor::key)
                code_keys(g);
            else if constexpr (sizeof...(Widths) == 1)
                code_values<Widths...>(g);
        }
        return true;
    }

private:
    using base::width, base::half, base::most, base::of_, base::shape_, base::tokens_, base::to_;
    using typename base::doubles;
    using typename base::floats;
    using typename base::ints;

    /// Codes and words of a step of four columns each; a step that ends early is padded with zeros.
    template <int Bits, class Code>
    KVQ_INLINE void put_step(const code_layout<Bits>& layout, std::byte* to, int row, int n, int step,
                             int quads, int first_quad, Code&& code_of) const {
        using writer = code_packer<Lanes, Bits>;
        ints words[writer::step_quads];
        for (int q = 0; q < writer::step_quads; ++q) {
            words[q] = Lanes::splat(0);
            if (first_quad + q >= quads) continue;
            ints c[4];
            for (int k = 0; k < 4; ++k) c[k] = code_of(4 * (first_quad + q) + k);
            words[q] = writer::four_codes(c[0], c[1], c[2], c[3]);
        }
        const std::ptrdiff_t next = layout.tiles.vector_bytes(row);
        std::byte* const at = to + 4 * layout.tiles.word(row, 0);
        writer::template put<true>(layout.quads(), step, words, [&](int vector, ints w) KVQ_INLINE_LAMBDA {
            if (n == width)
                Lanes::store(at + vector * next, w);
            else
                Lanes::store(at + vector * next, w, n);
        });
    }

    // Values: rows are channels, columns tokens.

    template <int Bits>
    void code_values(int g) {
        alignas(64) double errors[most];
        for (int c = 0; c < shape_.dim; c += width) {
            const int n = detail::smaller(width, shape_.dim - c);
            if (this->encoding_.corrects_mean)
                n == width ? quantize_channels<Bits, true, true>(g, c, n, errors + c)
                           : quantize_channels<Bits, false, true>(g, c, n, errors + c);
            else
                n == width ? quantize_channels<Bits, true, false>(g, c, n, errors + c)
                           : quantize_channels<Bits, false, false>(g, c, n, errors + c);
        }
        if (this->encoding_.corrects_mean) this->correct_means(g, errors);
    }

    template <int Bits, bool Whole, bool Sum>
    void quantize_channels(int g, int c, int n, double* errors) const {
        constexpr int step_quads = code_planes<Bits>::quads_per_step;
        const code_layout<Bits> layout(this->axes_.rows, this->axes_.cols);
        const auto load = [&](const float* p) {
            return Whole ? Lanes::load_floats(p) : Lanes::load_floats(p, n);
        };
        const floats bias = load(this->bias_ + c), scale = load(this->scale_ + c),
                     inverse = load(this->inverse_ + c),
                     top = Lanes::splat_float(static_cast<float>((1 << Bits) - 1));
        doubles low = Lanes::splat_double(0.0), high = low;
        const auto code_of = [&](int t) KVQ_INLINE_LAMBDA {
            const floats x = load(this->token(t) + c);
            const ints q = base::code(x, bias, inverse, top);
            if constexpr (Sum) {
                const floats error = base::error_of(x, q, scale, bias);
                low = Lanes::add(low, Lanes::template widen<0>(error));
                high = Lanes::add(high, Lanes::template widen<1>(error));
            }
            return q;
        };
        const int first = tokens_.group_begin(g) / 4, end = first + tokens_.group_slots(g) / 4;
        for (int q = first; q < end; q += step_quads)
            put_step(layout, to_, c, n, q / step_quads, end, q, code_of);
        if constexpr (Sum) {
            alignas(64) double sums[width];
            Lanes::store_doubles(sums, low);
            Lanes::store_doubles(sums + half, high);
            std::memcpy(errors, sums, sizeof(double) * static_cast<std::size_t>(n));
        }
    }

    // Keys: rows are tokens, columns channels.

    void code_keys(int g) {
        const int size = tokens_.group_size(g), first = g * tokens_.group;
        for (int part = 0; part < size;) {
            const int n = rows_of_part<width>(size, part);
            alignas(64) std::byte columns[most * 4 * width];  // values of a channel, then their codes
            this->transpose(first + part, n, columns);
            if (this->encoding_.feedback)
                this->code_with_feedback(this->encoding_.feedback, columns);
            else
                for (int c = 0; c < shape_.dim; ++c) {
                    std::byte* const at = columns + c * 4 * width;
                    Lanes::store(at, this->code(Lanes::as_floats(Lanes::load(at)), c));
                }
            put_columns(first + part, n, columns);
            part += n;
        }
    }

    /// Packs codes of n tokens.
    void put_columns(int row, int n, const std::byte* columns) const {
        each_segment<Widths...>(of_, [&, this]<int Bits>(const code_segment& segment) {
            if constexpr (Bits > 0) {
                constexpr int step_quads = code_planes<Bits>::quads_per_step, vector = 4 * Lanes::width;
                const auto layout = segment_codes<Bits>(this->axes_, segment);
                const std::byte* const codes = columns + segment.first * vector;
                for (int q = 0; 4 * q < segment.columns; q += step_quads)
                    put_step(layout, this->to_ + segment.offset, row, n, q / step_quads, segment.columns / 4,
                             q, [&](int c) KVQ_INLINE_LAMBDA { return Lanes::load(codes + c * vector); });
            }
        });
    }
};

}}}  // namespace kvq::kernels
