// One entry of the list of built-in formats, and the list of a program: from the compiled library or from a
// file of its own.
//
//   kvq::builtin_formats(&count)     defined by kvq::library, or by a file that includes
//                                    format/define_builtin_formats.hpp
//
// Names: fp16, bf16, fp32, int8, e4m3, affine-B-gG, kivi-B-gG, every preset (schemes/presets.hpp), and every
// row_layout (schemes/row_layout.hpp: fp8, nvfp4, q8_0, ...). B: bits, 1 to 8. G: values that share a scale;
// 32, 64 and 128 are listed, and find_format takes any other G as well, and "-bounds" (format/bounds.hpp) and
// "-fp16x64", "-int8x64", "-ref8x64" (format/latent.hpp) behind any name.
#pragma once

#include "format.hpp"

namespace kvq { inline namespace v0_3 {

struct builtin_format {
    const char* name;
    bool keys, values;      ///< tensors that this entry is for; K and V of kivi-4-g64 are two entries
    bool takes_statistics;  ///< keys that can be made from statistics (quant/calibration.hpp)
    int group;              ///< the G at the end of the name; 0: none
    /// group: another G, for an entry that has one. statistics: the bytes of calibration::save(), or null; of
    /// a row_layout those of a float, the scale of the tensor, or with group heads those of their scales.
    format (*make)(int group, const std::byte* statistics, std::size_t bytes);
};

/// The formats for the best instructions of this CPU. The list lives as long as the program.
KVQ_EXPORT const builtin_format* builtin_formats(std::size_t* count);

}}  // namespace kvq
