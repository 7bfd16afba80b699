// What the kernels share that quantize and dequantize blocks channel by channel (registry.hpp: which blocks).
#pragma once

#include "../schemes/scheme.hpp"
#include "registry.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Rows of a group of K, from `part` on, that share a tile and fit a vector.
template <int Width>
constexpr int rows_of_part(int size, int part) {
    return detail::smaller(
        Width, detail::smaller(size - part, tile_layout::tile_rows - part % tile_layout::tile_rows));
}

/// The channel at every place of the block: their own order, but for plans of widths.
template <class Scheme>
void channel_order(const Scheme& scheme, const block_shape& shape, block_id id, int* order) {
    float channels[most_channels];
    for (int c = 0; c < shape.dim; ++c) channels[c] = static_cast<float>(c);
    if constexpr (segmented<Scheme>) scheme.transform_query(shape, id, channels);
    for (int c = 0; c < shape.dim; ++c) order[c] = static_cast<int>(channels[c]);
}

}}}  // namespace kvq::kernels
