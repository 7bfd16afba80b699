// Schemes whose blocks the kernels quantize and dequantize channel by channel, and the blocks that they take.
//
// These are scheme<...> per channel with asymmetric levels, any of the library's encoders, any parameters, token scales, several widths.
// Where the grid is the range in params<P>, quantizing group by group is faster (composed.hpp).
// Contract: at most most_channels channels and tokens; channels are a multiple of 4; groups of tokens of V are whole steps of codes.
#pragma once

#include "../schemes/scheme.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

inline constexpr int most_channels = 256;  // also of tokens

/// False for types derived from the library's schemes, which may differ.
template <class S>
inline constexpr bool is_channel_scheme = false;
template <class Codes, class Granularity, class Params, class Encoder, class TokenScales>
inline constexpr bool
    is_channel_scheme<scheme<Codes, asymmetric, Granularity, Params, Encoder, TokenScales>> =
        !Granularity::on_tokens;

template <class Scheme>
requires is_channel_scheme<Scheme>
bool channels_line_up(const block_shape& shape, const grouped_axis& tokens) {
    if (shape.tokens > most_channels || shape.dim > most_channels || shape.dim % 4 != 0) return false;
    if (shape.role == tensor::key) return true;
    if constexpr (segmented<Scheme>) {
        return false;
    } else {
        constexpr int step = 4 * code_planes<Scheme::code_bits>::quads_per_step;
        return shape.tokens % 4 == 0 && (tokens.groups() == 1 || tokens.group % step == 0);
    }
}

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
