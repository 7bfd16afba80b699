// Bytes per token of two formats; bits per value of a scheme, at compile time (of a format: format::bits).
//
//   bytes per token = layers * kv_heads * (block bytes of K + of V) / page_tokens
//   bits per value  = 8 * block bytes / (tokens * dim)
//
// Contract: exactly the bytes of quantized pages, parameters and padding included. bits_per_value is
// constexpr if block_bytes is.
#pragma once

#include "../core/error.hpp"
#include "../format/format.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// Bytes of quantized K and V per token over all layers and kv heads: the cost of a long context per token.
/// (Page headers, 16-bit window and unfinished pages: estimate/footprint.hpp.)
[[nodiscard]] double bytes_per_token(const cache_shape& shape, int page_tokens, const format& keys,
                                     const format& values);

/// Bits per value of one tensor, parameters included; of a block with at least one token and channel.
template <class Scheme>
[[nodiscard]] constexpr double bits_per_value(const block_shape& shape, const Scheme& scheme = {}) {
    detail::expect(shape.tokens >= 1 && shape.dim >= 1, "a block of ", shape.tokens, " tokens x ", shape.dim,
                   " channels has no values");
    return 8.0 * static_cast<double>(scheme.block_bytes(shape)) / static_cast<double>(shape.values());
}

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "bytes-inl.hpp"
#endif
