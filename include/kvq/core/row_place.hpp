// Where the rows of one head lie: in a page of kvq, or in memory of another system, in blocks of any number
// of tokens.
//
//   token t of block b = blocks[t / block_tokens]:  rows + b * block_stride + t % block_tokens * row_stride
//   without blocks:                                 rows + t * row_stride
//
// Scales that lie beside the numbers: the same with their strides, and group_stride from one group of
// channels to the next (0: one behind the other); biases as scales. Strides count bytes and may be negative.
// A value; it owns nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../config.hpp"

namespace kvq { inline namespace v0_3 {

struct row_place {
    const std::byte* rows = nullptr;
    std::ptrdiff_t row_stride = 0;
    const std::byte* scales = nullptr;
    std::ptrdiff_t scale_stride = 0, group_stride = 1;
    const std::byte* biases = nullptr;
    const std::int32_t* blocks = nullptr;  ///< a block table, or null
    int block_tokens = 0;
    std::ptrdiff_t block_stride = 0, scale_block_stride = 0;
    int end = 0;  ///< tokens that may be read ahead of a call, to prefetch them
};

/// Bytes of a token: in its row, and of scales and biases beside it.
struct row_bytes {
    int row = 0, scales = 0, biases = 0;
    int together = 1;  ///< tokens whose scales take turns: blocks have multiples of it
    int group = 0;     ///< from one group's scale to the next where they lie beside the row, densely
    int padding = 0;   ///< of the scales beside: zeros behind those of a token, where they lie densely
};

/// Products with tokens [from, from + tokens) of a place, on a plan of the format (cpu/rows/row_product.hpp),
/// or their values [tokens][dim]; they return whether all scales are finite. Null: the format has none.
struct row_place_functions {
    bool (*keys)(const void* plan, const row_place&, int from, int tokens, float* y, std::ptrdiff_t y_stride,
                 std::byte* workspace) = nullptr;
    /// Adds to y.
    bool (*values)(const void* plan, const row_place&, int from, int tokens, const float* w,
                   std::ptrdiff_t w_stride, float* y, std::ptrdiff_t y_stride,
                   std::byte* workspace) = nullptr;
    bool (*read)(const void* scheme, const row_place&, int dim, int from, int tokens,
                 float* values) = nullptr;
    /// Of a token of `dim` channels.
    row_bytes (*bytes)(const void* scheme, int dim) = nullptr;
};

}}  // namespace kvq
