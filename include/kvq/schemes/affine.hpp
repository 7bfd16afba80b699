// Group-wise asymmetric B bits (MLX, HQQ and KIVI style): x^ = scale * code + bias for every group.
//
// Bytes per 128 channels with fp16 parameters and groups of 64: 8 bit 136, 6 bit 104, 5 bit 88, 4 bit 72, 3
// bit 56, 2 bit 40. Contract: quant/affine.hpp for the encoder `enclosing`, the default, which rounds stored
// parameters outward; quant/encoders.hpp for others. The presets take min_max, which rounds them to nearest.
#pragma once

#include "scheme.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// affine<4, per_token<64>>, affine<2, per_channel<32>, params<float>>, affine<3, per_token<64>,
/// params<float16>, least_squares>, affine<4, per_channel<64>, byte_params, min_max,
/// token_scales<byte_params>>, ...
template <int Bits, class Granularity = per_token<64>, class Params = params<float16>,
          class Encoder = enclosing, class TokenScales = no_token_scales>
using affine = scheme<bits<Bits>, asymmetric, Granularity, Params, Encoder, TokenScales>;

/// The same with several widths: mixed_affine<code_widths<6, 4, 3, 0>, average_eighths<32>, per_channel<64>>.
/// For keys; its default encoder is that of the presets.
template <class Widths, class Average, class Granularity = per_channel<64>, class Params = byte_params,
          class Encoder = min_max>
using mixed_affine = scheme<mixed_bits<Widths, Average>, asymmetric, Granularity, Params, Encoder>;

static_assert(foldable<affine<4>>);
static_assert(affine<4>{}.block_bytes({tensor::key, 64, 128}) == 64 * 72);
static_assert(affine<8>{}.block_bytes({tensor::value, 64, 128}) == 64 * 136);

}}  // namespace kvq
