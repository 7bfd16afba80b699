// y = X^ x on the codes of a block: an integer matrix times fixed-point vectors (backends/kernels/folded.hpp).
//
//   y[r] = row_scale[r] * (step * sum_c (code - zero) * piece + bias_dot) + row_bias[r] * sum
//
// Contract: integer sums are exact (255 * 128 * columns stays below 2^31 up to 65 000 columns); per column group there is
// one float rounding of each term. Every word of the block is loaded once per query block of up to 4 vectors.
#pragma once

#include <utility>

#include "folded.hpp"

namespace kvq::inline v0_1::kernels {

/// The first n words of a vector, or all of them.
template <class Lanes, bool Partial>
KVQ_INLINE typename Lanes::ints load_vector(const std::byte* from, int n) {
    if constexpr (Partial)
        return Lanes::load(from, n);
    else
        return Lanes::load(from);
}

/// The codes of one quad, as bytes, from the vectors of all planes of a step.
template <class Lanes, int Bits, int Quad, bool Partial, int Plane = 0>
KVQ_INLINE typename Lanes::ints quad_codes(const std::byte* const* planes, std::ptrdiff_t vector_bytes,
                                           std::ptrdiff_t offset, int n) {
    using P = code_planes<Bits>;
    constexpr int width = P::width(Plane), per_word = P::quads_per_word(Plane);
    auto w = load_vector<Lanes, Partial>(planes[Plane] + (Quad / per_word) * vector_bytes + offset, n);
    if constexpr (width < 8) {
        constexpr std::uint32_t mask = ((1u << width) - 1u) * 0x01010101u;
        w = Lanes::bit_and(Lanes::template shift_right<width*(Quad % per_word)>(w),
                           Lanes::splat(static_cast<std::int32_t>(mask)));
    }
    if constexpr (P::shift(Plane) > 0) w = Lanes::template shift_left<P::shift(Plane)>(w);
    if constexpr (Plane + 1 < P::count)
        w = Lanes::bit_or(w,
                          quad_codes<Lanes, Bits, Quad, Partial, Plane + 1>(planes, vector_bytes, offset, n));
    return w;
}

/// Integer sums of `Vectors` row vectors with `Queries` vectors.
template <class Lanes, int Vectors, int Queries>
struct code_sums {
    typename Lanes::ints high[Queries][Vectors];
    typename Lanes::ints low[Queries][Vectors];
};

template <class Lanes, int Bits, int Vectors, int Queries, bool Partial, int Quad>
KVQ_INLINE void add_quad(code_sums<Lanes, Vectors, Queries>& sums, const std::byte* const* planes,
                         std::ptrdiff_t vector_bytes, const std::uint32_t* x, int n) {
    typename Lanes::ints codes[Vectors];
    KVQ_UNROLL
    for (int v = 0; v < Vectors; ++v)
        codes[v] = quad_codes<Lanes, Bits, Quad, Partial>(planes, vector_bytes, v * Lanes::width * 4, n);
    KVQ_UNROLL
    for (int i = 0; i < Queries; ++i) {
        const auto h = Lanes::splat(static_cast<std::int32_t>(x[(Quad * Queries + i) * 2]));
        const auto l = Lanes::splat(static_cast<std::int32_t>(x[(Quad * Queries + i) * 2 + 1]));
        KVQ_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            sums.high[i][v] = Lanes::template dot<Bits>(sums.high[i][v], codes[v], h);
            sums.low[i][v] = Lanes::template dot<Bits>(sums.low[i][v], codes[v], l);
        }
    }
}

template <class Lanes, int Bits, int Vectors, int Queries, bool Partial, int... Quads>
KVQ_INLINE void add_quads(code_sums<Lanes, Vectors, Queries>& sums, const std::byte* const* planes,
                          std::ptrdiff_t vector_bytes, int count, const std::uint32_t* x, int n,
                          std::integer_sequence<int, Quads...>) {
    ((Quads < count
          ? add_quad<Lanes, Bits, Vectors, Queries, Partial, Quads>(sums, planes, vector_bytes, x, n)
          : void()),
     ...);
}

/// Sums over `steps` steps. first: where each plane's first vector lies, at the first row of this part of the tile;
/// quads: how many there are from there on (a step that reaches beyond them is cut short); n: rows if Partial.
template <class Lanes, int Bits, int Vectors, int Queries, bool Partial>
KVQ_INLINE code_sums<Lanes, Vectors, Queries> sum_codes(const std::byte* const* first,
                                                        std::ptrdiff_t vector_bytes, int steps, int quads,
                                                        const std::uint32_t* x, int n) {
    using P = code_planes<Bits>;
    using all = std::make_integer_sequence<int, P::quads_per_step>;
    code_sums<Lanes, Vectors, Queries> sums;
    KVQ_UNROLL
    for (int i = 0; i < Queries; ++i) {
        KVQ_UNROLL
        for (int v = 0; v < Vectors; ++v) sums.high[i][v] = sums.low[i][v] = Lanes::splat(0);
    }
    const std::byte* planes[P::count];
    for (int p = 0; p < P::count; ++p) planes[p] = first[p];
    const int whole = detail::smaller(steps, quads / P::quads_per_step);
    for (int s = 0; s < whole; ++s) {
        add_quads<Lanes, Bits, Vectors, Queries, Partial>(sums, planes, vector_bytes, P::quads_per_step, x, n,
                                                          all{});
        for (int p = 0; p < P::count; ++p)
            planes[p] += (P::quads_per_step / P::quads_per_word(p)) * vector_bytes;
        x += P::quads_per_step * Queries * 2;
    }
    if (whole < steps)
        add_quads<Lanes, Bits, Vectors, Queries, Partial>(sums, planes, vector_bytes,
                                                          quads % P::quads_per_step, x, n, all{});
    return sums;
}

/// Everything a tile needs to turn integer sums into floats.
struct code_product_target {
    float* y;
    std::ptrdiff_t y_stride;
    const float* row_scale;  // null: 1
    const float* row_bias;   // null: 0
    const fold_scalars* scalars;
    int zero_code;
    bool add;  // to what y holds
};

template <class Lanes, int Bits, int Vectors, int Queries, bool Partial>
void code_product_tile(const std::byte* const* first, std::ptrdiff_t vector_bytes, int steps, int quads,
                       const std::uint32_t* x, int rows, int slots, const code_product_target& to) {
    const auto sums =
        sum_codes<Lanes, Bits, Vectors, Queries, Partial>(first, vector_bytes, steps, quads, x, slots);
    KVQ_UNROLL
    for (int i = 0; i < Queries; ++i) {
        const fold_scalars& s = to.scalars[i];
        const auto high_zero = Lanes::splat(-to.zero_code * s.high_sum);
        const auto low_zero = Lanes::splat(-to.zero_code * s.low_sum);
        KVQ_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            const int n = rows - v * Lanes::width < Lanes::width ? rows - v * Lanes::width : Lanes::width;
            const bool whole = n == Lanes::width;
            const auto high = Lanes::to_floats(Lanes::add(sums.high[i][v], high_zero));
            const auto low = Lanes::to_floats(Lanes::add(sums.low[i][v], low_zero));
            auto y = Lanes::multiply_add(Lanes::multiply_add(high, Lanes::splat_float(256.0f), low),
                                         Lanes::splat_float(s.step), Lanes::splat_float(s.bias_dot));
            const auto load = [&](const float* p) {
                return whole ? Lanes::load_floats(p + v * Lanes::width)
                             : Lanes::load_floats(p + v * Lanes::width, n);
            };
            if (to.row_scale) y = Lanes::multiply(y, load(to.row_scale));
            if (to.row_bias) y = Lanes::multiply_add(load(to.row_bias), Lanes::splat_float(s.sum), y);
            float* const out = to.y + i * to.y_stride;
            if (to.add) y = Lanes::add(y, load(out));
            if (whole)
                Lanes::store_floats(out + v * Lanes::width, y);
            else
                Lanes::store_floats(out + v * Lanes::width, y, n);
        }
    }
}

/// Floats of scratch that code_product needs for row parameters.
template <class Scheme>
std::size_t row_parameter_floats(const Scheme& scheme, const block_shape& shape) {
    const auto codes = scheme.codes(shape);
    const fold_use use = Scheme::fold(shape.role);
    const int arrays = (use.row_scale ? 1 : 0) + (use.row_bias ? 1 : 0);
    return static_cast<std::size_t>(arrays) * static_cast<std::size_t>(codes.cols.groups()) *
           static_cast<std::size_t>(codes.rows().slots() + 16);
}

/// y[i][r] (+)= sum_c X^[r][c] x[i][c] for the n vectors in `folded`.
template <class Lanes, class Backend, class Scheme>
void code_product(const Scheme& scheme, const block_shape& shape, block_id id, const std::byte* block,
                  std::byte* folded, int n, float* y, std::ptrdiff_t y_stride, bool add, float* parameters) {
    constexpr int Bits = Scheme::code_bits;
    using P = code_planes<Bits>;
    const fold_use use = Scheme::fold(shape.role);
    const auto codes = scheme.codes(shape);
    const fold_layout<Bits> layout(codes, use.columns(), n);
    const grouped_axis& rows = codes.rows();
    const grouped_axis& cols = codes.cols;

    const std::ptrdiff_t line = rows.slots() + 16;
    float* const biases = parameters + (use.row_scale ? line * cols.groups() : 0);
    if constexpr (requires {
                      scheme.template row_parameters<Backend>(shape, id, block, 0, parameters, biases);
                  })
        if (use.row_scale || use.row_bias)
            for (int g = 0; g < cols.groups(); ++g)
                scheme.template row_parameters<Backend>(shape, id, block, g, parameters + g * line,
                                                        biases + g * line);

    int words_before = 0;  // of the query block, per query
    for (int first = 0; first < n;) {
        const int block_n = next_query_block(n - first);
        for (int rg = 0; rg < rows.groups(); ++rg) {
            const int set = use.columns() ? rg : 0;
            const std::uint32_t* const set_words =
                layout.words(folded) +
                static_cast<std::size_t>(set) * static_cast<std::size_t>(layout.set_words() * n) +
                static_cast<std::size_t>(words_before);
            const int group_slots = rows.group_slots(rg), group_rows = rows.group_size(rg);
            for (int tile = 0; tile < group_slots; tile += tile_layout::tile_rows) {
                const int height = detail::smaller(tile_layout::tile_rows, group_slots - tile);
                const std::byte* const tile_begin =
                    block + 4 * static_cast<std::size_t>(rows.group_begin(rg) + tile) *
                                static_cast<std::size_t>(codes.tiles.words_per_row);
                const std::ptrdiff_t vector_bytes = height * 4;
                for (int part = 0; part < height;) {
                    const int row = rg * rows.group + tile + part;
                    const int slots = height - part;
                    const int part_rows = group_rows - tile - part;
                    const bool several = Lanes::row_vectors > 1 && slots >= Lanes::row_vectors * Lanes::width;
                    const std::uint32_t* x = set_words;
                    for (int g = 0; g < cols.groups(); ++g) {
                        const int from = layout.first_step(g), steps = layout.last_step(g) - from;
                        const std::byte* planes[P::count];
                        for (int p = 0; p < P::count; ++p)
                            planes[p] = tile_begin + part * 4 +
                                        (P::first_vector(p, codes.quads()) +
                                         from * (P::quads_per_step / P::quads_per_word(p))) *
                                            vector_bytes;
                        const int slot = rows.group_begin(rg) + tile + part;
                        const code_product_target to{
                            y + first * y_stride + row,
                            y_stride,
                            use.row_scale ? parameters + g * line + slot : nullptr,
                            use.row_bias ? biases + g * line + slot : nullptr,
                            layout.scalars(folded) + (set * cols.groups() + g) * n + first,
                            Scheme::zero_code,
                            add || g > 0};
                        const auto run = [&](auto vectors, auto queries) {
                            constexpr int V = decltype(vectors)::value, Q = decltype(queries)::value;
                            const auto product = V == 1 && slots < Lanes::width
                                                     ? &code_product_tile<Lanes, Bits, 1, Q, true>
                                                     : &code_product_tile<Lanes, Bits, V, Q, false>;
                            product(planes, vector_bytes, steps, codes.quads() - from * P::quads_per_step, x,
                                    detail::smaller(part_rows, V * Lanes::width), slots, to);
                        };
                        const auto with_queries = [&](auto vectors) {
                            if (block_n == 4)
                                run(vectors, std::integral_constant<int, 4>{});
                            else if (block_n == 2)
                                run(vectors, std::integral_constant<int, 2>{});
                            else
                                run(vectors, std::integral_constant<int, 1>{});
                        };
                        if (several)
                            with_queries(std::integral_constant<int, Lanes::row_vectors>{});
                        else
                            with_queries(std::integral_constant<int, 1>{});
                        x += steps * P::quads_per_step * block_n * 2;
                    }
                    part += several ? Lanes::row_vectors * Lanes::width : Lanes::width;
                }
            }
        }
        words_before += layout.set_words() * block_n;
        first += block_n;
    }
}

}  // namespace kvq::inline v0_1::kernels
