// Kernels of codecs whose parameters belong to groups (registry.hpp: quantizer::ranges, dequantizer::groups),
// as functions of the codec's spec: compiled for an instruction set, levels, and a width of codes, for all
// schemes and types of parameters.
//
// Contract: the registry admits the block; group_functions in kernel_table.hpp.
#pragma once

#include "dequantize/dequantize_block.hpp"
#include "dequantize/dequantize_table.hpp"
#include "kernel_table.hpp"
#include "quantize/quantize_block.hpp"
#include "transformed.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Of a type of parameters; Backend: has lanes and load_floats<P>.
template <class Backend, class Levels, int Bits, class P>
inline constexpr parameter_functions functions_of_parameters{
    range_fit_of<typename Backend::lanes, Levels, Bits, P>(), range_limit<P>(),
    &Backend::template load_floats<P>, std::same_as<P, float16>};

/// From tokens, and directly from blocks of fp16, the usual window, and fp32; no others, so that fewer
/// kernels are compiled.
template <class Lanes, class Levels, int Bits>
bool quantize_ranges(const codec_spec& codec, const parameter_functions& parameters, const block_shape& shape,
                     const block_input& values, std::byte* block) {
    const range_block<Bits> of(block_layout{codec}, parameters, shape);
    const auto run = [&]<class Values>(Values from) {
        return block_quantizer<Lanes, Levels, Bits, Values>(of, from, block).run();
    };
    if (values.tokens) return run(float_values<Lanes>(shape, reinterpret_cast<const float*>(values.from)));
    if (values.type == float_type::fp16) return run(half_values<Lanes>(shape, values.from));
    if (values.type == float_type::fp32) return run(float_values<Lanes>(shape, values.from));
    return false;
}

template <class Lanes, class Levels, int Bits, bool PerToken>
bool dequantize_groups(const codec_spec& codec, const parameter_functions& parameters,
                       const block_shape& shape, const std::byte* block, float_type type, void* out,
                       std::ptrdiff_t stride, float* scratch) {
    const auto run = [&]<class T>(T* to, std::ptrdiff_t to_stride) {
        // Here, so that the compiler keeps it in registers: a copy from memory that was just written would
        // stall.
        const group_block<Bits> of(block_layout{codec}, parameters, shape);
        if constexpr (PerToken)
            if (table_dequantizer<Lanes, Levels, Bits, T>(of, shape, block, to, to_stride).run()) return;
        block_dequantizer<Lanes, Levels, Bits, PerToken>(of, shape, block)
            .run(token_rows<Lanes, T>(to, to_stride));
    };
    run_in_type<Lanes>(shape, type, out, stride, scratch, run);
    return true;
}

}}}  // namespace kvq::kernels
