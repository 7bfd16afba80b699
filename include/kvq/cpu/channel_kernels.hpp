// Kernels of codecs whose blocks are quantized and dequantized channel by channel (registry.hpp:
// quantizer::channels, dequantizer::channels), as functions of what channels.hpp takes of a scheme: compiled
// for an instruction set, and widths of codes.
//
// Contract: the registry admits the block; channel_functions in kernel_table.hpp.
#pragma once

#include "dequantize/dequantize_channels.hpp"
#include "quantize/quantize_channels.hpp"
#include "transformed.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes, int... Widths>
bool quantize_channels(const channel_blocks& of, const channel_encoding& encoding, float* values,
                       const float* token_scales, std::byte* block) {
    return channel_quantizer<Lanes, Widths...>(of, encoding, values, block).run(token_scales);
}

/// To bfloat16 through floats, so that fewer kernels are compiled.
template <class Lanes, int... Widths>
void dequantize_channels(const channel_blocks& of, float_type type, void* out, std::ptrdiff_t stride,
                         float* scratch) {
    const auto run = [&]<class T>(T* to, std::ptrdiff_t to_stride) {
        channel_dequantizer<Lanes, Widths...>(of).run(token_rows<Lanes, T>(to, to_stride));
    };
    const block_shape& shape = of.source.shape;
    if (type == float_type::fp16)
        run(static_cast<float16*>(out), stride);
    else if (type == float_type::fp32)
        run(static_cast<float*>(out), stride);
    else {
        run(scratch, shape.dim);
        round_tokens<Lanes>(shape, scratch, static_cast<bfloat16*>(out), stride);
    }
}

}}}  // namespace kvq::kernels
