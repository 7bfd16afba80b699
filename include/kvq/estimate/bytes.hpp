// Bytes per token of two formats; bits per value of a scheme, at compile time (of a format: format::bits).
//
//   bytes per token = layers * kv_heads * (block bytes of K + of V) / page_tokens
//   bits per value  = 8 * block bytes / (tokens * dim)
//
// Contract: exactly the bytes of quantized pages, parameters and padding included. bits_per_value is constexpr if block_bytes is.
#pragma once

#include "../format/format.hpp"
#include "../schemes/full.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Bytes of quantized K and V per token over all layers and kv heads: the cost of a long context per token.
/// (Page headers, 16-bit window and unfinished pages: estimate/footprint.hpp.)
[[nodiscard]] inline double bytes_per_token(const cache_shape& shape, int page_tokens, const format& keys,
                                            const format& values) {
    detail::expect(page_tokens >= 1, "a page has at least 1 token, got ", page_tokens);
    const std::size_t block = keys.block_bytes({tensor::key, page_tokens, shape.dim(tensor::key)}) +
                              values.block_bytes({tensor::value, page_tokens, shape.dim(tensor::value)});
    return static_cast<double>(block) * shape.kv_heads * shape.layers / page_tokens;
}

/// Bits per value of one tensor, parameters included; of a block with at least one token and channel.
template <kv_scheme Scheme>
[[nodiscard]] constexpr double bits_per_value(const block_shape& shape, const Scheme& scheme = {}) {
    detail::expect(shape.tokens >= 1 && shape.dim >= 1, "a block of ", shape.tokens, " tokens x ", shape.dim,
                   " channels has no values");
    return 8.0 * static_cast<double>(scheme.block_bytes(shape)) / static_cast<double>(shape.values());
}

static_assert(bits_per_value<full<float16>>({tensor::key, 64, 128}) == 16.0);

}}  // namespace kvq
