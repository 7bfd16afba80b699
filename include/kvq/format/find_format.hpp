// Built-in formats by name, chosen at run time.
//
//   format keys = find_format("kivi-4-g64", tensor::key);      any group size: "kivi-4-g48"
//   for_each_format([](const builtin_format& f) { ... });
//   find_format("int8-bounds", tensor::key)                    with bounds, for selected_pages
//                                                              (format/bounds.hpp)
//   find_format("std4-fp16x64", tensor::key)                   the last 64 channels in 16 bits, for latent
//                                                              layers (format/latent.hpp); std4-int8x64,
//                                                              std4-ref8x64: in 8
//   find_rows_format("fp8", k_scale)                           bytes of another system that have a scale
//   cache cache(shape, preset("std4"));                        both formats, window and page size
//   find_format("low2", tensor::key, statistics)               keys made from statistics
//                                                              (quant/calibration.hpp)
//
// Contract: the format keeps the name that was asked for, for messages (format/format_names.hpp). An unknown
// name raises kvq::error, whose message lists the most similar names. The program needs kvq::library, or one
// file that includes format/define_builtin_formats.hpp.
#pragma once

#include <span>
#include <string_view>

#include "../cache/preset_options.hpp"
#include "builtin_format.hpp"

namespace kvq { inline namespace KVQ_COMMON {

class calibration;

/// Calls f(const builtin_format&) for every built-in format.
template <class F>
void for_each_format(F&& f) {
    std::size_t count = 0;
    const builtin_format* const formats = builtin_formats(&count);
    for (std::size_t i = 0; i < count; ++i) f(formats[i]);
}

/// "NAME-bounds", "NAME-fp16x64", -int8x64, -ref8x64: format NAME; as keys with_bounds() (format/bounds.hpp),
/// with_last_channels() (format/latent.hpp).
[[nodiscard]] format find_format(std::string_view name, tensor role);
/// The format made from statistics, if it takes them; else the same as without them.
[[nodiscard]] format find_format(std::string_view name, tensor role, const calibration& statistics);

/// A row_layout whose tensor has this scale, by which its numbers were divided: "fp8", "nvfp4". Other rows
/// and records have the scale 1. Raises kvq::error for other formats, and unless the scale is positive.
[[nodiscard]] format find_rows_format(std::string_view name, float tensor_scale);
/// The same with a scale for each head: [kv_heads] or [layers][kv_heads].
[[nodiscard]] format find_rows_format(std::string_view name, std::span<const float> scales, int kv_heads);
/// Bytes of a token of one head of such rows, or of records. Raises kvq::error for other formats, and for
/// channels that they cannot have.
[[nodiscard]] row_bytes bytes_of_row(const format& rows, int dim);

/// K and V in the formats of one name, with the window and the page size of presets.
[[nodiscard]] cache_options preset(std::string_view name, int recent = 32);

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "find_format-inl.hpp"
#endif
