// Dequantizing blocks with parameters per channel and scales per token (schemes/scheme.hpp) to tokens, in
// lanes: the mirror of quantize_channels.hpp.
//
//   V   a lane is a channel, as in the output
//   K   a lane is a token: channels are dequantized in the order of the plan, and transposed in their own
//
// Contract: the bits of scheme::dequantize, rounded once to the type of the output (tests/conformance), for blocks that the registry
// admits.
#pragma once

#include <utility>

#include "../channels.hpp"
#include "../product/code_sums.hpp"
#include "token_rows.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Backend, dequantized_by_channels Scheme>
class channel_dequantizer {
public:
    channel_dequantizer(const Scheme& scheme, const block_shape& shape, block_id id, const std::byte* block)
        : scheme_(scheme), shape_(shape), id_(id), tokens_(scheme.layout().cut(shape)), from_(block) {}

    /// Writes x^ of all tokens.
    template <class T>
    KVQ_NOINLINE void run(const token_rows<typename Backend::lanes, T>& out) {
        if (shape_.role == tensor::key) find_places();
        for (int g = 0; g < tokens_.groups(); ++g) {
            load_parameters(g);
            if (shape_.role == tensor::key)
                keys(g, out);
            else if constexpr (!mixed)
                values(g, out);
        }
    }

private:
    using Lanes = typename Backend::lanes;
    using floats = typename Lanes::floats;
    using ints = typename Lanes::ints;
    static constexpr bool mixed = segmented<Scheme>;
    static constexpr int width = Lanes::width, most = most_channels;

    static constexpr bool has_token_scales = [] {
        if constexpr (mixed)
            return false;
        else
            return Scheme::token_scale_type::present;
    }();

    /// The place of every channel in the block.
    void find_places() {
        int order[most];
        channel_order(scheme_, shape_, id_, order);
        for (int place = 0; place < shape_.dim; ++place) place_[order[place]] = place;
    }

    void load_parameters(int g) {
        if constexpr (mixed)
            scheme_.columns(shape_).template load<Backend>(from_, g, scale_, bias_);
        else
            scheme_.template load<Backend>(shape_, from_, g, scale_, bias_);
        if constexpr (has_token_scales)
            if (g == 0)
                Scheme::token_scale_type::template load<Backend>(
                    from_ + scheme_.layout().token_scale_offset(shape_), tokens_.padded_size(), token_scale_);
    }

    /// Calls f(column, codes) for the columns of quads [first, end) of n rows; first begins a step.
    template <bool Partial, int Bits, class F>
    static KVQ_INLINE void each_column(const code_layout<Bits>& layout, const std::byte* codes, int row,
                                       int n, int first, int end, F&& f) {
        using planes = code_planes<Bits>;
        const std::ptrdiff_t next = layout.tiles.vector_bytes(row);
        const std::byte* const begin = codes + 4 * layout.tiles.word(row, 0);
        const std::byte* plane[planes::count];
        for (int i = 0; i < planes::count; ++i)
            plane[i] =
                begin + (planes::first_vector(i, layout.quads()) + first / planes::quads_per_word(i)) * next;
        for (int step = first; step < end; step += planes::quads_per_step) {
            [&]<int... Quad>(std::integer_sequence<int, Quad...>) KVQ_INLINE_LAMBDA {
                const auto quad = [&]<int Q>(std::integral_constant<int, Q>) KVQ_INLINE_LAMBDA {
                    if (step + Q >= end) return;
                    const ints words = unpack_quad<Lanes, Bits, Q, Partial>(plane, next, 0, n);
                    const int column = 4 * (step + Q);
                    const ints byte = Lanes::splat(255);
                    f(column, Lanes::bit_and(words, byte));
                    f(column + 1, Lanes::bit_and(Lanes::template shift_right<8>(words), byte));
                    f(column + 2, Lanes::bit_and(Lanes::template shift_right<16>(words), byte));
                    f(column + 3, Lanes::template shift_right<24>(words));
                };
                (quad(std::integral_constant<int, Quad>{}), ...);
            }
            (std::make_integer_sequence<int, planes::quads_per_step>{});
            for (int i = 0; i < planes::count; ++i)
                plane[i] += planes::quads_per_step / planes::quads_per_word(i) * next;
        }
    }
    static KVQ_INLINE floats value(ints code, floats scale, floats bias) {
        return Lanes::add(Lanes::rounded_product(scale, Lanes::to_floats(code)), bias);
    }

    /// Rows are channels, columns tokens.
    template <class T>
    void values(int g, const token_rows<Lanes, T>& out) const {
        const auto layout = scheme_.codes(shape_);
        const int first = tokens_.group_begin(g) / 4, end = first + tokens_.group_slots(g) / 4;
        for (int c = 0; c < shape_.dim; c += width) {
            const int n = detail::smaller(width, shape_.dim - c);
            const floats scale =
                             n == width ? Lanes::load_floats(scale_ + c) : Lanes::load_floats(scale_ + c, n),
                         bias = n == width ? Lanes::load_floats(bias_ + c) : Lanes::load_floats(bias_ + c, n);
            T* const to = out.at(0, c);
            const std::ptrdiff_t stride = out.stride();
            [[maybe_unused]] const float* const token_scale = token_scale_;
            const auto put = [=](int t, ints code) KVQ_INLINE_LAMBDA {
                floats x = value(code, scale, bias);
                if constexpr (has_token_scales) x = Lanes::multiply(x, Lanes::splat_float(token_scale[t]));
                token_rows<Lanes, T>::put(to + t * stride, x, n);
            };
            if (n == width)
                each_column<false>(layout, from_, c, n, first, end, put);
            else
                each_column<true>(layout, from_, c, n, first, end, put);
        }
    }

    /// Rows are tokens, columns channels.
    template <class T>
    void keys(int g, const token_rows<Lanes, T>& out) const {
        const int size = tokens_.group_size(g), first = g * tokens_.group;
        const std::ptrdiff_t stride = out.stride();
        for (int part = 0; part < size;) {
            const int n = rows_of_part<width>(size, part), row = first + part;
            alignas(64) std::byte columns[most * 4 * width];  // a vector of tokens for every place
            floats token_scale = Lanes::splat_float(1.0f);
            if constexpr (has_token_scales)
                token_scale = Lanes::load_floats(token_scale_ + tokens_.slot(row), n);
            if (n == width)
                dequantize_columns<false>(row, n, token_scale, columns);
            else
                dequantize_columns<true>(row, n, token_scale, columns);
            for (int c = 0; c < shape_.dim; c += width) {
                const int channels = detail::smaller(width, shape_.dim - c);
                ints square[width];
                for (int i = 0; i < width; ++i)
                    square[i] =
                        i < channels ? Lanes::load(columns + place_[c + i] * 4 * width) : Lanes::splat(0);
                Lanes::transpose(square);
                T* to = out.at(row, c);
                for (int i = 0; i < n; ++i, to += stride) out.put(to, Lanes::as_floats(square[i]), channels);
            }
            part += n;
        }
    }

    template <bool Partial>
    KVQ_INLINE void dequantize_columns(int row, int n, floats token_scale, std::byte* columns) const {
        const auto put = [=](std::byte* to, floats x) KVQ_INLINE_LAMBDA {
            if constexpr (has_token_scales) x = Lanes::multiply(x, token_scale);
            Lanes::store(to, Lanes::as_ints(x));
        };
        // Captures are values: a pointer that is captured by reference would be read again behind every store.
        const auto from_place = [=, this](int place) KVQ_INLINE_LAMBDA {
            return [=, scale = scale_ + place, bias = bias_ + place, to = columns + place * 4 * width](
                       int c, ints code) KVQ_INLINE_LAMBDA {
                put(to + c * 4 * width,
                    value(code, Lanes::splat_float(scale[c]), Lanes::splat_float(bias[c])));
            };
        };
        if constexpr (mixed)
            scheme_.for_each_segment(shape_, id_, [&]<int Bits>(const code_segment& segment) {
                if constexpr (Bits > 0)
                    each_column<Partial>(scheme_.template segment_layout<Bits>(shape_, segment),
                                         from_ + segment.offset, row, n, 0, segment.columns / 4,
                                         from_place(segment.first));
                else
                    for (int place = segment.first; place < segment.first + segment.columns; ++place)
                        put(columns + place * 4 * width, Lanes::splat_float(bias_[place]));
            });
        else
            each_column<Partial>(scheme_.codes(shape_), from_, row, n, 0, shape_.dim / 4, from_place(0));
    }

    const Scheme& scheme_;
    const block_shape shape_;
    const block_id id_;
    const grouped_axis tokens_;
    const std::byte* const from_;
    int place_[most];
    alignas(64) float scale_[most], bias_[most];
    // By slots: a group of one token has four of them.
    alignas(64) float token_scale_[has_token_scales ? 4 * most : 1];
};

}}}  // namespace kvq::kernels
