// Definitions of bytes.hpp.
#pragma once

#include "../core/error.hpp"
#include "bytes.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC double bytes_per_token(const cache_shape& shape, int page_tokens, const format& keys,
                                const format& values) {
    detail::expect(page_tokens >= 1, "a page has at least 1 token, got ", page_tokens);
    const std::size_t block = keys.block_bytes({tensor::key, page_tokens, shape.dim(tensor::key)}) +
                              values.block_bytes({tensor::value, page_tokens, shape.dim(tensor::value)});
    return static_cast<double>(block) * shape.kv_heads * shape.layers / page_tokens;
}

}}
