// A whole page in another format: window values to codes, codes to window values, or one scheme to another.
//
//   window    -> quantized  quantize() of the target format on the 16/32-bit values
//   quantized -> window     x^ rounded once to the window format
//   two planes -> upper     the upper plane as it is (format/planes.hpp)
//   quantized -> quantized  requantize() of the target scheme on x^ in float, or quantize() for a scheme
//                           without requantize(); transforms are undone and applied on the way
//
// Error, with e the error of the source page: of min-max fits |x - x''| <= e + scale''/2, so that a chain
// loses at most the sum of its half steps. A chain of ten among presets loses at most 1.5 times the sum of
// the errors of its formats (twice, where 4 bits or less and 8 bits alternate), any other chain at most 2
// times the sum over its links: measured, tests/properties/requantize_chains.cpp; why, and the limits:
// docs/guide/requantize.md. A 16-bit page between two formats breaks the chain: its values are fitted as new
// values.
#pragma once

#include <cstring>
#include <vector>

#include "../core/float_environment.hpp"
#include "../core/rounding.hpp"
#include "../format/format_table.hpp"
#include "../page/page.hpp"
#include "../quant/quantize_group.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// Fills block `h` of `to`, in the format of `to`, with the values of `from`. Returns the number of values
/// that it found not finite. scratch: shape.values() floats of one block. Blocks may be filled on several
/// threads. A 16-bit page must be zero: odd rows and columns leave gaps in its blocks.
inline std::uint32_t convert_block(const format_table& table, const cache_shape& shape, int layer,
                                   const page& from, page& to, int h, float* scratch) {
    const block_shape block{table.role(), from.tokens, shape.dim(table.role())};
    const format &source_format = table.of(from), &target_format = table.of(to);
    const format_functions &read = source_format.functions(), &write = target_format.functions();
    const default_arithmetic arithmetic;
    block_id from_id{layer, h}, id{layer, h};
    const std::byte* const source = source_format.block_at(block, from.data(), from.lower, h, from_id);
    std::byte* const target = target_format.block_at(block, to.data(), to.lower, h, id);
    if (from.format == 0)
        return write.quantize(target_format.scheme(), block, id, table.window_type(), source, target,
                              scratch);
    if (table.drops_lower(from.format, to.format)) {
        std::memcpy(target, source, target_format.block_bytes(block));
        return 0;
    }
    read.dequantize(source_format.scheme(), block, from_id, source, float_type::fp32, scratch, block.dim,
                    scratch);
    if (to.format == 0)
        return write.write_tokens(block, target, float_type::fp32, scratch, block.dim, block.tokens, 0);
    float token_scales[most_quantized];
    const bool known = read.read_token_scales != nullptr;
    if (known) read.read_token_scales(source_format.scheme(), block, source, token_scales);
    return write.requantize_values(target_format.scheme(), block, id, scratch, known ? token_scales : nullptr,
                                   target);
}

/// Fills `to`, in the format of `to`, with the values of `from`. scratch: shape.values() floats of one block.
inline void convert_page(const format_table& table, const cache_shape& shape, int layer, const page& from,
                         page& to, float* scratch) {
    if (to.format == 0) std::memset(to.data(), 0, to.bytes);
    std::uint32_t found = 0;
    for (int h = 0; h < shape.kv_heads; ++h)
        found += convert_block(table, shape, layer, from, to, h, scratch);
    // Those that a page of values has counted are found again; codes hold none.
    to.not_finite = larger(from.not_finite, found);
}

/// A new page of a cache, in format `target`, with the values of `from`. numbers: scratch.
template <class Cache>
page_ref converted_page(Cache& of, tensor role, int layer, const page& from, int target,
                        std::vector<float>& numbers) {
    page_ref to = of.pool().allocate(of.page_bytes(role, layer, target, from.tokens), target, from.tokens,
                                     of.lower_bytes(role, layer, target, from.tokens));
    numbers.resize(static_cast<std::size_t>(from.tokens) *
                   static_cast<std::size_t>(of.shape(layer).dim(role)));
    convert_page(of.table(role), of.shape(layer), layer, from, *to, numbers.data());
    return to;
}

}}}  // namespace kvq::detail
