// Dequantizing blocks with parameters per channel and scales per token (schemes/scheme.hpp) to tokens, in
// lanes: the mirror of quantize_channels.hpp.
//
//   V   a lane is a channel, as in the output
//   K   a lane is a token: channels are dequantized in the order of the plan, and transposed in their own
//
// Compiled for an instruction set; what reads codes, for each width.
// Contract: the bits of scheme::dequantize, rounded once to the type of the output (tests/conformance), for
// blocks that the registry admits.
#pragma once

#include <utility>

#include "../channels.hpp"
#include "../product/code_sums.hpp"
#include "token_rows.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes>
class channel_dequantizer {
public:
    explicit channel_dequantizer(const channel_blocks& of)
        : of_(of),
          shape_(of.source.shape),
          axes_(of, shape_),
          tokens_(axes_.tokens),
          from_(of.source.block) {}

    /// Writes x^ of all tokens. Widths: of the codes; V has one.
    template <int... Widths, class T>
    void run(const token_rows<Lanes, T>& out) {
        const bool key = shape_.role == tensor::key;
        const parameter_source& source = of_.source;
        if (of_.scaled)
            (key ? source.rows : source.columns)(source, 0, token_scale_, nullptr);
        else if (!key)
            for (int slot = 0; slot < tokens_.padded_size(); ++slot) token_scale_[slot] = 1.0f;
        if (key)
            for (int place = 0; place < shape_.dim; ++place)
                place_[of_.order ? of_.order[place] : place] = place;
        for (int g = 0; g < tokens_.groups(); ++g) {
            (key ? source.columns : source.rows)(source, g, scale_, bias_);
            if (key)
                keys(g, &dequantize_columns<Widths...>, out);
            else if constexpr (sizeof...(Widths) == 1)
                values<Widths...>(g, out);
        }
    }

private:
    using floats = typename Lanes::floats;
    using ints = typename Lanes::ints;
    static constexpr int width = Lanes::width, most = most_channels;

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

    /// Writes channels of one token after the other. (No lambda: compilers disagree on where `mutable`
    /// stands.)
    template <class T>
    struct put_tokens {
        T* to;
        std::ptrdiff_t stride;
        const float* token_scale;
        floats scale, bias;
        int n;

        KVQ_INLINE void operator()(int, ints code) {
            const floats x = Lanes::multiply(value(code, scale, bias), Lanes::splat_float(*token_scale++));
            token_rows<Lanes, T>::put(to, x, n);
            to += stride;
        }
    };
    /// Rows are channels, columns tokens.
    template <int Bits, class T>
    KVQ_NOINLINE void values(int g, const token_rows<Lanes, T>& out) const {
        const code_layout<Bits> layout(axes_.rows, axes_.cols);
        const int first = tokens_.group_begin(g) / 4, end = first + tokens_.group_slots(g) / 4;
        for (int c = 0; c < shape_.dim; c += width) {
            const int n = detail::smaller(width, shape_.dim - c);
            const floats scale =
                             n == width ? Lanes::load_floats(scale_ + c) : Lanes::load_floats(scale_ + c, n),
                         bias = n == width ? Lanes::load_floats(bias_ + c) : Lanes::load_floats(bias_ + c, n);
            put_tokens<T> put{out.at(4 * first, c), out.stride(), token_scale_ + 4 * first, scale, bias, n};
            if (n == width)
                each_column<false>(layout, from_, c, n, first, end, put);
            else
                each_column<true>(layout, from_, c, n, first, end, put);
        }
    }

    /// Dequantizes n rows, which are tokens, from `row` on: a vector of tokens for every place.
    using columns_function = void(const channel_dequantizer&, int row, int n, floats token_scale,
                                  std::byte* to);

    /// Rows are tokens, columns channels.
    template <class T>
    KVQ_NOINLINE void keys(int g, columns_function* dequantize, const token_rows<Lanes, T>& out) const {
        const int size = tokens_.group_size(g), first = g * tokens_.group;
        const std::ptrdiff_t stride = out.stride();
        for (int part = 0; part < size;) {
            const int n = rows_of_part<width>(size, part), row = first + part;
            alignas(64) std::byte columns[most * 4 * width];
            floats token_scale = Lanes::splat_float(1.0f);
            if (of_.scaled) token_scale = Lanes::load_floats(token_scale_ + tokens_.slot(row), n);
            dequantize(*this, row, n, token_scale, columns);
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

    template <int... Widths>
    static void dequantize_columns(const channel_dequantizer& d, int row, int n, floats token_scale,
                                   std::byte* to) {
        each_segment<Widths...>(d.of_, [&]<int Bits>(const code_segment& segment) {
            if constexpr (Bits > 0) {
                if (n < width)
                    d.columns_of<Bits, true, true>(segment, row, n, token_scale, to);
                else if (d.of_.scaled)
                    d.columns_of<Bits, false, true>(segment, row, n, token_scale, to);
                else
                    d.columns_of<Bits, false, false>(segment, row, n, token_scale, to);
            } else {
                for (int place = segment.first; place < segment.first + segment.columns; ++place)
                    Lanes::store(
                        to + place * 4 * width,
                        Lanes::as_ints(Lanes::multiply(Lanes::splat_float(d.bias_[place]), token_scale)));
            }
        });
    }
    /// Those of a segment. Partial: n is less than a vector.
    template <int Bits, bool Partial, bool Scaled>
    KVQ_NOINLINE void columns_of(const code_segment& segment, int row, int n, floats token_scale,
                                 std::byte* to) const {
        // Captures are values: a pointer that is captured by reference would be read again behind every
        // store.
        const auto put = [=, scale = scale_ + segment.first, bias = bias_ + segment.first,
                          columns = to + segment.first * 4 * width](int c, ints code) KVQ_INLINE_LAMBDA {
            floats x = value(code, Lanes::splat_float(scale[c]), Lanes::splat_float(bias[c]));
            if constexpr (Scaled) x = Lanes::multiply(x, token_scale);
            Lanes::store(columns + c * 4 * width, Lanes::as_ints(x));
        };
        each_column<Partial>(segment_codes<Bits>(axes_, segment), from_ + segment.offset, row, n, 0,
                             segment.columns / 4, put);
    }

    const channel_blocks& of_;
    const block_shape shape_;
    const channel_axes axes_;
    const grouped_axis tokens_;
    const std::byte* const from_;
    int place_[most];
    alignas(64) float scale_[most], bias_[most];
    // By slots: a group of one token has four of them.
    alignas(64) float token_scale_[4 * most_tokens];
};

}}}  // namespace kvq::kernels
