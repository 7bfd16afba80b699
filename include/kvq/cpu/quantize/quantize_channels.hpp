// Quantizing blocks with parameters per channel that encoders fit (schemes/scheme.hpp), in lanes.
//
//   1. scales      of tokens; every token is divided by its token scale                   (token_scale_fit.hpp)
//   2. fit         a lane is a channel                                                    (channel_fit.hpp)
//   3. store       parameters, by the functions of quant/block_params.hpp
//   4. round       a lane is a row of the block: a channel of V, with the mean of its errors; a token of K, after a transposition
//   5. feedback    of K, from the last channel to the first, a few channels at a time: the weighted errors of later channels
//                  are summed in registers                                                (quant/error_feedback.hpp)
//
// Contract: the same bytes as scheme::quantize (tests/conformance), for blocks that the registry admits. For values that are not finite or
// above 2^100 run() returns false and has changed nothing but the block.
#pragma once

#include <cstring>

#include "../channels.hpp"
#include "../parameter_sections.hpp"
#include "../special_values.hpp"
#include "channel_fit.hpp"
#include "pack_codes.hpp"
#include "token_scale_fit.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes, channel_scheme Scheme>
class channel_quantizer {
public:
    /// values: [tokens][dim]; run() overwrites them if it succeeds. again: as Scheme::requantize, for values that were quantized
    /// before. token_scales: the token scales of their last block, or null.
    channel_quantizer(const Scheme& scheme, const block_shape& shape, block_id id, float* values,
                      std::byte* block, bool again = false, const float* token_scales = nullptr)
        : again_(again),
          scheme_(scheme),
          encoder_(scheme.encoder),
          shape_(shape),
          id_(id),
          tokens_(scheme.layout().cut(shape)),
          values_(values),
          known_scales_(token_scales),
          to_(block) {}

    KVQ_NOINLINE bool run() {
        if (!ordinary()) return false;
        std::memset(to_, 0, scheme_.block_bytes(shape_));
        set_tops();
        if constexpr (mixed)
            order_channels();
        else if constexpr (Scheme::token_scale_type::present)
            divide_by_token_scales();
        for (int g = 0; g < tokens_.groups(); ++g) {
            fit_group(g);
            if (shape_.role == tensor::key)
                code_keys(g);
            else if constexpr (!mixed)
                code_values(g);
        }
        return true;
    }

private:
    using encoder = typename Scheme::encoder_type;
    using keeper = detail::grid_keeper<encoder>;
    using parameters = typename Scheme::parameters;
    using floats = typename Lanes::floats;
    using doubles = typename Lanes::doubles;
    using ints = typename Lanes::ints;
    static constexpr bool mixed = segmented<Scheme>;
    static constexpr bool feeds_back = detail::encoder_traits<encoder>::feedback;
    static constexpr int width = Lanes::width, half = width / 2;
    static constexpr int most = most_channels;
    static_assert(most <= channel_fits<Lanes>::most_tokens && most <= token_scale_fit<Lanes>::most_channels);

    /// Rounding of stored biases after the mean is corrected.
    parameter_rounding mean_rounding() const {
        return again_ ? detail::corrected_rounding<keeper> : detail::corrected_rounding<encoder>;
    }

    float* token(int t) const { return values_ + t * shape_.dim; }

    /// Are all values finite and small enough to square?
    bool ordinary() const {
        floats most_of = Lanes::splat_float(0.0f);
        const int n = shape_.tokens * shape_.dim;
        for (int i = 0; i < n; i += width)
            most_of =
                Lanes::larger(most_of, Lanes::abs(i + width <= n ? Lanes::load_floats(values_ + i)
                                                                 : Lanes::load_floats(values_ + i, n - i)));
        return all_finite<Lanes>(values_, shape_.values()) && Lanes::largest(most_of) <= 0x1p100f;
    }

    void set_tops() {
        if constexpr (mixed) {
            scheme_.for_each_segment(shape_, id_, [&]<int Bits>(const code_segment& segment) {
                for (int c = 0; c < segment.columns; ++c) top_[segment.first + c] = (1 << Bits) - 1;
            });
        } else {
            for (int c = 0; c < shape_.dim; ++c) top_[c] = Scheme::top;
        }
    }

    void divide_by_token_scales() {
        using token_scales_of = typename Scheme::token_scale_type;
        float token_scales[most];
        if (known_scales_)
            std::memcpy(token_scales, known_scales_, sizeof(float) * static_cast<std::size_t>(shape_.tokens));
        else
            token_scale_fit<Lanes>::run(values_, shape_.tokens, shape_.dim, token_scales);
        if constexpr (keeper::keeps)
            if (again_) scheme_.settle_token_scales(shape_, values_, token_scales);
        for (int g = 0; g < tokens_.groups(); ++g)
            token_scales_of::store(to_ + scheme_.layout().token_scale_offset(shape_), tokens_.group_begin(g),
                                   token_scales + g * tokens_.group, tokens_.group_size(g));
        for (int t = 0; t < shape_.tokens; ++t) {
            const floats by = Lanes::splat_float(token_scales[t]);
            float* const x = token(t);
            int c = 0;
            for (; c + width <= shape_.dim; c += width)
                Lanes::store_floats(x + c, Lanes::divide(Lanes::load_floats(x + c), by));
            for (; c < shape_.dim; ++c) x[c] /= token_scales[t];
        }
    }

    /// Channels of every token in the order of the scheme, which is asked once.
    void order_channels() {
        int from[most];
        channel_order(scheme_, shape_, id_, from);
        float y[most];
        for (int t = 0; t < shape_.tokens; ++t) {
            float* const x = token(t);
            for (int c = 0; c < shape_.dim; ++c) y[c] = x[from[c]];
            std::memcpy(x, y, sizeof(float) * static_cast<std::size_t>(shape_.dim));
        }
    }

    /// Scales, their inverses and biases of a group of tokens, as stored.
    void fit_group(int g) {
        auto fits = detail::encoder_traits<encoder>::fits;
        if constexpr (feeds_back)
            if (!encoder_.matrices) fits = detail::encoder_traits<encoder>::alone;
        const int dim = shape_.dim;
        for (int c = 0; c < dim; c += width) {
            const int n = detail::smaller(width, dim - c);
            const auto grids =
                channel_fits<Lanes>(token(g * tokens_.group) + c, dim, tokens_.group_size(g), n, top_ + c)
                    .fit(fits, again_ && keeper::keeps);
            for (int i = 0; i < n; ++i) {
                bias_[c + i] = grids.first[i];
                scale_[c + i] = grids.last[i];
            }
        }
        // Constants: a rounding that is a value takes 2 % of the time of keys with 4 bits.
        if (again_)
            store_grids(g, keeper::rounding);
        else
            store_grids(g, encoder::rounding);
        for (int c = 0; c < dim; ++c) inverse_[c] = scale_[c] > 0.0f ? 1.0f / scale_[c] : 0.0f;
    }

    /// Stores the grids of a group of tokens; bias_ and scale_ become what is stored.
    KVQ_INLINE void store_grids(int g, parameter_rounding rounding) {
        const int dim = shape_.dim;
        std::byte* const at = to_ + scheme_.layout().scale_offset(shape_);
        const int groups = tokens_.groups(), slot_count = scheme_.layout().slot_count(shape_);
        parameters::store_biases(at, groups, slot_count, g, bias_, dim, rounding);
        for (int c = 0; c < dim; ++c)
            scale_[c] = top_[c] > 0 ? (scale_[c] - bias_[c]) / static_cast<float>(top_[c]) : 0.0f;
        parameters::store_scales(at, groups, slot_count, g, scale_, dim, rounding);
    }

    static KVQ_INLINE ints code(floats x, floats bias, floats inverse, floats top) {
        const floats position = Lanes::rounded_product(Lanes::subtract(x, bias), inverse);
        return Lanes::round(Lanes::limited(position, top));
    }
    static KVQ_INLINE floats error_of(floats x, ints code, floats scale, floats bias) {
        return Lanes::subtract(x, Lanes::add(Lanes::rounded_product(scale, Lanes::to_floats(code)), bias));
    }

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

    void code_values(int g) requires(!mixed) {
        const int dim = shape_.dim;
        double errors[most];
        for (int c = 0; c < dim; c += width)
            if (c + width <= dim)
                quantize_channels<true>(g, c, width, errors + c);
            else
                quantize_channels<false>(g, c, dim - c, errors + c);
        if constexpr (encoder::corrects_mean) {
            for (int c = 0; c < dim; ++c)
                bias_[c] =
                    static_cast<float>(static_cast<double>(bias_[c]) + errors[c] / tokens_.group_size(g));
            parameters::store_biases(to_ + scheme_.layout().scale_offset(shape_), tokens_.groups(),
                                     scheme_.layout().slot_count(shape_), g, bias_, dim, mean_rounding());
        }
    }

    template <bool Whole>
    void quantize_channels(int g, int c, int n, double* errors) const {
        constexpr int bits = Scheme::code_bits, step_quads = code_planes<bits>::quads_per_step;
        const auto layout = scheme_.codes(shape_);
        const auto load = [&](const float* p) {
            return Whole ? Lanes::load_floats(p) : Lanes::load_floats(p, n);
        };
        const floats bias = load(bias_ + c), scale = load(scale_ + c), inverse = load(inverse_ + c),
                     top = Lanes::splat_float(static_cast<float>(Scheme::top));
        doubles low = Lanes::splat_double(0.0), high = low;
        const auto code_of = [&](int t) KVQ_INLINE_LAMBDA {
            const floats x = load(token(t) + c);
            const ints q = code(x, bias, inverse, top);
            if constexpr (encoder::corrects_mean) {
                const floats error = error_of(x, q, scale, bias);
                low = Lanes::add(low, Lanes::template widen<0>(error));
                high = Lanes::add(high, Lanes::template widen<1>(error));
            }
            return q;
        };
        const int first = tokens_.group_begin(g) / 4, end = first + tokens_.group_slots(g) / 4;
        for (int q = first; q < end; q += step_quads)
            put_step(layout, to_, c, n, q / step_quads, end, q, code_of);
        alignas(64) double sums[width];
        Lanes::store_doubles(sums, low);
        Lanes::store_doubles(sums + half, high);
        std::memcpy(errors, sums, sizeof(double) * static_cast<std::size_t>(n));
    }

    // Keys: rows are tokens, columns channels.

    void code_keys(int g) {
        const float* row = nullptr;
        if constexpr (feeds_back) row = encoder_.feedback_row(id_, shape_.dim, 0);
        const int size = tokens_.group_size(g), first = g * tokens_.group;
        for (int part = 0; part < size;) {
            const int n = rows_of_part<width>(size, part);
            alignas(64) std::byte columns[most * 4 * width];  // values of a channel, then their codes
            transpose(first + part, n, columns);
            if (row)
                code_with_feedback(row, columns);
            else
                for (int c = 0; c < shape_.dim; ++c) {
                    std::byte* const at = columns + c * 4 * width;
                    Lanes::store(at, code(Lanes::as_floats(Lanes::load(at)), c));
                }
            put_columns(first + part, n, columns);
            part += n;
        }
    }
    KVQ_INLINE ints code(floats x, int c) const {
        return code(x, Lanes::splat_float(bias_[c]), Lanes::splat_float(inverse_[c]),
                    Lanes::splat_float(static_cast<float>(top_[c])));
    }

    /// Transposes n tokens to channels, a vector each.
    void transpose(int first, int n, std::byte* columns) const {
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

    /// Packs codes of n tokens.
    void put_columns(int row, int n, const std::byte* columns) const {
        const auto put = [&]<int Bits>(const code_layout<Bits>& layout, int column, int count,
                                       std::byte* to) {
            constexpr int step_quads = code_planes<Bits>::quads_per_step;
            for (int q = 0; 4 * q < count; q += step_quads)
                put_step(layout, to, row, n, q / step_quads, count / 4, q, [&](int c) KVQ_INLINE_LAMBDA {
                    return Lanes::load(columns + (column + c) * 4 * width);
                });
        };
        if constexpr (mixed)
            scheme_.for_each_segment(shape_, id_, [&]<int Bits>(const code_segment& segment) {
                if constexpr (Bits > 0)
                    put(scheme_.template segment_layout<Bits>(shape_, segment), segment.first,
                        segment.columns, to_ + segment.offset);
            });
        else
            put(scheme_.codes(shape_), 0, shape_.dim, to_);
    }

    /// rows: weights of the error of a channel for the channels before it, [dim][dim].
    void code_with_feedback(const float* rows, std::byte* columns) const {
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

    const bool again_;
    const Scheme& scheme_;
    const encoder& encoder_;
    const block_shape shape_;
    const block_id id_;
    const grouped_axis tokens_;
    float* const values_;
    const float* const known_scales_;
    std::byte* const to_;
    int top_[most];
    alignas(64) float bias_[most], scale_[most], inverse_[most];
};

}}}  // namespace kvq::kernels
