// One entry of the list of built-in formats, and the list that a program has: from the compiled library or from a file of its own.
//
//   kvq::builtin_formats(&count)     defined by kvq::library, or by a file that includes format/define_builtin_formats.hpp
//
// Names: fp16, bf16, fp32, int8, affine-B-gG, kivi-B-gG, and every preset (schemes/presets.hpp). B: bits, 1 to 8. G: values that share
// a scale; 32, 64 and 128 are listed, find_format takes any other, too.
#pragma once

#include "format.hpp"

namespace kvq::inline v0_1 {

struct builtin_format {
    const char* name;
    bool keys, values;      ///< tensors that this entry is for; K and V of kivi-4-g64 are two entries
    bool takes_statistics;  ///< keys that may be made from statistics (quant/calibration.hpp)
    int group;              ///< the G that its name ends with; 0: none
    /// group: another G, for an entry that has one. statistics: what calibration::save() has written, or null.
    format (*make)(int group, const std::byte* statistics, std::size_t bytes);
};

/// Those for the best instructions that this CPU has. The list lives as long as the program.
KVQ_EXPORT const builtin_format* builtin_formats(std::size_t* count);

}  // namespace kvq::inline v0_1
