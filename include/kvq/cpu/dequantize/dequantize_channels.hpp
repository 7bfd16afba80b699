// Dequantizing blocks with parameters per channel and scales per token (schemes/scheme.hpp) to tokens, in
// lanes: the mirror of quantize_channels.hpp.
//
//   V   a lane is a channel, as in the output
//   K   a lane is a token: channels are dequantized in the order of the plan, and transposed in their own
//
// Compiled for an instruction set, and widths of codes.
// Contract: the bits of scheme::dequantize, rounded once to the type of the output (tests/conformance), for
// blocks that the registry admits.
#pragma once

#include <utility>

#include "../channels.hpp"
#include "../product/code_sums.hpp"
#include "token_rows.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes, int... Widths>
class channel_dequantizer {
public:
    explicit channel_dequantizer(const channel_blocks& of)
        : of_(of),
          shape_(of.source.shape),
          axes_(of, shape_),
          tokens_(axes_.tokens),
          from_(of.source.block) {}

    /// Writes x^ of all tokens.
    template <class T>
    KVQ_NOINLINE void run(const token_rows<Lanes, T>& out) {
        if (shape_.role == tensor::key)
            of_.scaled ? all<tensor::key, true>(out) : all<tensor::key, false>(out);
        else if constexpr (sizeof...(Widths) == 1)
            of_.scaled ? all<tensor::value, true>(out) : all<tensor::value, false>(out);
    }

private:
    using floats = typename Lanes::floats;
    using ints = typename Lanes::ints;
    static constexpr int width = Lanes::width, most = most_channels;

    /// Scaled: have tokens scales?
    template <tensor Role, bool Scaled, class T>
    void all(const token_rows<Lanes, T>& out) {
        constexpr bool key = Role == tensor::key;
        const parameter_source& source = of_.source;
        if (Scaled) (key ? source.rows : source.columns)(source, 0, token_scale_, nullptr);
        if (key)
            for (int place = 0; place < shape_.dim; ++place)
                place_[of_.order ? of_.order[place] : place] = place;
        for (int g = 0; g < tokens_.groups(); ++g) {
            (key ? source.columns : source.rows)(source, g, scale_, bias_);
            if constexpr (key)
                keys<Scaled>(g, out);
            else
                values<Scaled, Widths...>(g, out);
        }
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

    /// Writes channels of one token after the other. (No lambda: compilers disagree on where `mutable` stands.)
    template <bool Scaled, class T>
    struct put_tokens {
        T* to;
        std::ptrdiff_t stride;
        const float* token_scale;
        floats scale, bias;
        int n;

        KVQ_INLINE void operator()(int, ints code) {
            floats x = value(code, scale, bias);
            if constexpr (Scaled) x = Lanes::multiply(x, Lanes::splat_float(*token_scale++));
            token_rows<Lanes, T>::put(to, x, n);
            to += stride;
        }
    };
    /// Rows are channels, columns tokens.
    template <bool Scaled, int Bits, class T>
    void values(int g, const token_rows<Lanes, T>& out) const {
        const code_layout<Bits> layout(axes_.rows, axes_.cols);
        const int first = tokens_.group_begin(g) / 4, end = first + tokens_.group_slots(g) / 4;
        for (int c = 0; c < shape_.dim; c += width) {
            const int n = detail::smaller(width, shape_.dim - c);
            const floats scale =
                             n == width ? Lanes::load_floats(scale_ + c) : Lanes::load_floats(scale_ + c, n),
                         bias = n == width ? Lanes::load_floats(bias_ + c) : Lanes::load_floats(bias_ + c, n);
            put_tokens<Scaled, T> put{
                out.at(4 * first, c), out.stride(), token_scale_ + 4 * first, scale, bias, n};
            if (n == width)
                each_column<false>(layout, from_, c, n, first, end, put);
            else
                each_column<true>(layout, from_, c, n, first, end, put);
        }
    }

    /// Rows are tokens, columns channels.
    template <bool Scaled, class T>
    void keys(int g, const token_rows<Lanes, T>& out) const {
        const int size = tokens_.group_size(g), first = g * tokens_.group;
        const std::ptrdiff_t stride = out.stride();
        for (int part = 0; part < size;) {
            const int n = rows_of_part<width>(size, part), row = first + part;
            alignas(64) std::byte columns[most * 4 * width];  // a vector of tokens for every place
            floats token_scale = Lanes::splat_float(1.0f);
            if constexpr (Scaled) token_scale = Lanes::load_floats(token_scale_ + tokens_.slot(row), n);
            if (n == width)
                dequantize_columns<false, Scaled>(row, n, token_scale, columns);
            else
                dequantize_columns<true, Scaled>(row, n, token_scale, columns);
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

    template <bool Partial, bool Scaled>
    KVQ_INLINE void dequantize_columns(int row, int n, floats token_scale, std::byte* columns) const {
        const auto put = [=](std::byte* to, floats x) KVQ_INLINE_LAMBDA {
            if constexpr (Scaled) x = Lanes::multiply(x, token_scale);
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
        each_segment<Widths...>(of_, [=, this]<int Bits>(const code_segment& segment) {
            if constexpr (Bits > 0)
                each_column<Partial>(segment_codes<Bits>(axes_, segment), from_ + segment.offset, row, n, 0,
                                     segment.columns / 4, from_place(segment.first));
            else
                for (int place = segment.first; place < segment.first + segment.columns; ++place)
                    put(columns + place * 4 * width, Lanes::splat_float(bias_[place]));
        });
    }

    const channel_blocks& of_;
    const block_shape shape_;
    const channel_axes axes_;
    const grouped_axis tokens_;
    const std::byte* const from_;
    int place_[most];
    alignas(64) float scale_[most], bias_[most];
    // By slots: a group of one token has four of them.
    alignas(64) float token_scale_[4 * most];
};

}}}  // namespace kvq::kernels
