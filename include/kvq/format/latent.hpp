// Formats of latent attention (MLA): keys whose last channels are in a format of their own, and values that
// are read from the blocks of keys.
//
//   format keys = with_fp16_channels(make_format<kivi<4>::keys>(), 64);
//     or by name: find_format("kivi-4-g64-fp16x64", tensor::key)
//   format smaller = with_last_channels(make_format<kivi<4>::keys>(), make_format<ref8::keys>(), 64);
//     or by name: find_format("kivi-4-g64-ref8x64", tensor::key)
//
//   block = block of the first format, of the first dim - n channels | block of the other one, of the last n
//
// The last channels of a latent are rotated: they reach 10^3, and few keys dominate by them. They are fp16,
// int8 (8 bits, a scale per token) or ref8 (8 bits, scale and bias per channel over 64 tokens). Both parts
// are blocks of keys as they are elsewhere (docs/reference/format.md): all that holds, counts, converts,
// saves and sends pages takes such a format like any other.
//
// Values of a latent layer are the first channels of its keys, and have no pages (cache/layers.hpp).
// detail::values_of_keys() multiplies weights with them: with the codes, or 16-bit values, of a block of
// keys, which are turned in the workspace of the thread once for all rows of weights
// (cpu/product/turned_product.hpp). Outputs of a format with a transform are restored once, not every token.
// Blocks that attention does not read as they are, and a part of the channels of a format with a transform,
// are dequantized to fp16 in the workspace.
// Contract: scores are the sum of both parts. Outputs are those of x^ of the keys; of keys that are
// dequantized rounded to fp16 (values beyond its normal numbers, up or down, are multiplied in floats).
// Cost: a task takes scratch of one turned block, or two, which stay in the L2 cache; one pass over a block
// for up to 128 rows.
#pragma once

#include "format.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// The format with the last `channels` of a key in fp16, int8 or ref8 (`last`, of the backend of f), the
/// others in f. 0 channels, or a format that holds no keys: f as it is. Raises kvq::error for fewer, for
/// another `last`, and for a format that has such channels or bounds: with_bounds(with_last_channels(f, ...))
/// has both.
[[nodiscard]] format with_last_channels(const format& f, const format& last, int channels);
/// The same with the fp16 of its backend.
[[nodiscard]] format with_fp16_channels(const format& f, int channels);

namespace detail {

/// The format of the values of a latent layer: the first value_dim (0: all) of the key_dim channels of keys
/// in format `keys`. It can attend and nothing else.
format values_of_keys(const format& keys, int key_dim, int value_dim);

}  // namespace detail
}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "latent-inl.hpp"
#endif
