// Bounds of keys, stored for formats whose parameters say nothing of channels, so that selected_pages can
// rank their pages without reading the keys (attention/selection.hpp).
//
//   format keys = with_bounds(make_format<int8>());      or by name: find_format("int8-bounds", tensor::key)
//
//   block = block of the inner format | dim float16: the least value of each channel, rounded down
//                                     | dim float16: the largest, rounded up
//                                     | zeros to a multiple of 16 bytes
//
// A format of its own, with its own blocks: all that holds, counts, converts, saves and sends pages takes it
// like any other. Blocks of values have no bounds, and are those of the inner format.
// Contract: the bounds are those of x^ in the basis of the model, also where the inner format has a
// transform. They are functions of the block alone, and hold for any part of its tokens. Attention,
// dequantizing and errors are those of the inner format, bit for bit.
// Cost: 4 bytes per channel and block, 1/32 of int8 keys in pages of 128 tokens; a commit dequantizes the
// block once more.
#pragma once

#include "format.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// The format with bounds of its keys. A format that needs none comes back as it is: its keys have parameters
/// of channels, or it holds no keys.
[[nodiscard]] format with_bounds(const format& f);

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "bounds-inl.hpp"
#endif
