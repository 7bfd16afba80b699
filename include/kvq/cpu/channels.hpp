// What quantizing and dequantizing channel by channel take of a scheme (registry.hpp: which blocks), so that
// schemes with the same widths of codes share kernels: where codes and parameters lie, and how grids are
// found and stored.
//
//   channel_blocks_of<Backend>(scheme, shape, id, block, order)    of the blocks of one layer and head
//   channel_encoding_of(scheme, shape, id, again)                  again: as Scheme::requantize
#pragma once

#include "../quant/encoder_traits.hpp"
#include "../quant/grid_keeper.hpp"
#include "../schemes/scheme.hpp"
#include "product/product_blocks.hpp"
#include "registry.hpp"

namespace kvq { inline namespace v0_3 {

struct channel_blocks {
    int row_group, col_group;  ///< of codes
    int token_group;           ///< tokens that share parameters
    std::size_t bytes;
    bool scaled;  ///< have tokens scales?
    parameter_source source;
    code_segment segments[codec_spec::most_widths];  ///< the places that have each width of the codec
    const int* order;                                ///< the channel at every place; null: its own
};

struct channel_encoding {
    /// Stores n parameters of a group, and replaces them by what is stored.
    using store = void (*)(std::byte* at, int groups, int slot_count, int group, float* p, int n);

    grid_fits fits;
    bool keeps;             ///< grids on which the values already lie, and near token scales
    bool corrects_mean;     ///< then biases are stored again
    const float* feedback;  ///< weights of the error of a channel for those before it, [dim][dim]; null: none
    store biases, scales, corrected_biases;
    void (*token_scales)(std::byte* at, int first, float* scales, int n);
};

}}  // namespace kvq

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// With the axes of the codes, and of tokens.
struct channel_axes {
    grouped_axis rows, cols, tokens;

    channel_axes(const channel_blocks& of, const block_shape& s)
        : rows(s.rows(), of.row_group), cols(s.cols(), of.col_group), tokens(s.tokens, of.token_group) {}
};

/// block: to dequantize, else null. order: room for that of a plan.
template <class Backend, class Scheme>
channel_blocks channel_blocks_of(const Scheme& scheme, const block_shape& shape, const block_id& id,
                                 const std::byte* block, [[maybe_unused]] int (&order)[most_channels]) {
    const block_layout at = scheme.layout();
    channel_blocks b{at.rows(shape).group,
                     at.cols(shape).group,
                     at.cut(shape).group,
                     at.bytes(shape),
                     at.codec.has_token_scales(),
                     parameters_of<Backend>(scheme, shape),
                     {},
                     nullptr};
    b.source.id = id;
    b.source.block = block;
    if constexpr (segmented<Scheme>) {
        scheme.for_each_segment(shape, id, [&]<int Bits>(const code_segment& segment) {
            int w = 0;
            while (Scheme::width_list::values[w] != Bits) ++w;
            b.segments[w] = segment;
        });
        float channels[most_channels];
        for (int c = 0; c < shape.dim; ++c) channels[c] = static_cast<float>(c);
        scheme.transform_query(shape, id, channels);
        for (int c = 0; c < shape.dim; ++c) order[c] = static_cast<int>(channels[c]);
        b.order = order;
    } else {
        b.segments[0].columns = shape.dim;
    }
    return b;
}

/// The rounding is a constant: as a value it takes 2 % of the time of keys with 4 bits.
template <class Parameters, parameter_rounding Rounding>
void store_biases(std::byte* at, int groups, int slot_count, int group, float* p, int n) {
    Parameters::store_biases(at, groups, slot_count, group, p, n, Rounding);
}
template <class Parameters, parameter_rounding Rounding>
void store_scales(std::byte* at, int groups, int slot_count, int group, float* p, int n) {
    Parameters::store_scales(at, groups, slot_count, group, p, n, Rounding);
}

template <class Scheme>
channel_encoding channel_encoding_of(const Scheme& scheme, [[maybe_unused]] const block_shape& shape,
                                     [[maybe_unused]] const block_id& id, bool again) {
    using encoder = typename Scheme::encoder_type;
    using traits = detail::encoder_traits<encoder>;
    using parameters = typename Scheme::parameters;
    channel_encoding c{traits::fits, false,  encoder::corrects_mean, nullptr, nullptr, nullptr,
                       nullptr,      nullptr};
    const auto store_as = [&]<class E>(const E*) {
        c.biases = &store_biases<parameters, E::rounding>;
        c.scales = &store_scales<parameters, E::rounding>;
        if constexpr (encoder::corrects_mean)
            c.corrected_biases = &store_biases<parameters, detail::corrected_rounding<E>>;
    };
    if (again) {
        c.keeps = detail::grid_keeper<encoder>::keeps;
        store_as(static_cast<const detail::grid_keeper<encoder>*>(nullptr));
    } else {
        store_as(static_cast<const encoder*>(nullptr));
    }
    if constexpr (Scheme::token_scale_type::present) c.token_scales = &Scheme::token_scale_type::store;
    if constexpr (traits::feedback) {
        if (!scheme.encoder.matrices) c.fits = traits::alone;
        if (shape.role == tensor::key) c.feedback = scheme.encoder.feedback_row(id, shape.dim, 0);
    }
    return c;
}

/// Rows of a group of K, from `part` on, that share a tile and fit a vector.
template <int Width>
constexpr int rows_of_part(int size, int part) {
    return detail::smaller(
        Width, detail::smaller(size - part, tile_layout::tile_rows - part % tile_layout::tile_rows));
}

/// Codes of the places of a segment: tokens are rows.
template <int Bits>
code_layout<Bits> segment_codes(const channel_axes& of, const code_segment& segment) {
    return {of.rows, {segment.columns, segment.columns}};
}
/// Calls f.operator()<Bits>(segment) for every width of which there are places.
template <int... Bits, class F>
KVQ_INLINE void each_segment(const channel_blocks& of, F&& f) {
    int w = 0;
    const auto one = [&]<int B>(std::integral_constant<int, B>) KVQ_INLINE_LAMBDA {
        const code_segment& segment = of.segments[w++];
        if (segment.columns > 0) f.template operator()<B>(segment);
    };
    (one(std::integral_constant<int, Bits>{}), ...);
}

}}}  // namespace kvq::kernels
