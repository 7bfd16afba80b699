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

template <class Lanes, int... Widths>
void dequantize_channels(const channel_blocks& of, float_type type, void* out, std::ptrdiff_t stride,
                         float* scratch) {
    const auto run = [&]<class T>(T* to, std::ptrdiff_t to_stride) {
        channel_dequantizer<Lanes>(of).template run<Widths...>(token_rows<Lanes, T>(to, to_stride));
    };
    const block_shape& shape = of.source.shape;
    run_in_type<Lanes>(shape, type, out, stride, scratch, run);
}

}}}  // namespace kvq::kernels
