// Formats of latent attention (MLA): keys whose last channels are 16 bit, and values that are read from the
// blocks of keys.
//
//   format keys = with_fp16_channels(make_format<kivi<4>::keys>(), 64);
//     or by name: find_format("kivi-4-g64-fp16x64", tensor::key)
//
//   block = block of the inner format, of the first dim - n channels | 16-bit block (fp16) of the last n
//     channels
//
// The last channels of a latent are rotated: they reach 10^3, and few keys dominate by them. Both parts are
// blocks of keys as they are elsewhere (docs/reference/format.md): all that holds, counts, converts, saves
// and sends pages takes such a format like any other.
//
// Values of a latent layer are the first channels of its keys, and have no pages (cache/layers.hpp).
// detail::values_of_keys() multiplies weights with them: a block of keys is dequantized once for all rows of
// weights, into a block of 16-bit values in the workspace of the thread.
// Contract: scores are the sum of both parts. Outputs are those of x^ of the keys, rounded to fp16 (values
// beyond it are multiplied in floats); keys of 16 or 32 bits are not rounded.
// Cost: a task takes scratch of three blocks, which stay in the L2 cache; one pass over a block for up to 128
// rows.
#pragma once

#include "format.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// The format with the last `channels` of a key in fp16, the others in f. 0 channels, or a format that holds
/// no keys: f as it is. Raises kvq::error for fewer, and for a format that has such channels or bounds:
/// with_bounds(with_fp16_channels(f, n)) has both.
[[nodiscard]] format with_fp16_channels(const format& f, int channels);

namespace detail {

/// The format of the values of a latent layer whose keys have `key_dim` channels in format `keys`. It can
/// attend and nothing else.
format values_of_keys(const format& keys, int key_dim);

}  // namespace detail
}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "latent-inl.hpp"
#endif
