// Symmetric INT8 per (token, head) with fp32 scale: 132 bytes per 128 channels.
//
//   scale = max|x| / 127,  x^ = scale * (code - 128)
//
// The INT8 cache of vLLM (int8_per_token_head) and nano-vllm, but rounded to nearest. Contract:
// quant/symmetric.hpp.
#pragma once

#include "scheme.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

using int8 = scheme<bits<8>, symmetric, per_token<>, params<float>>;

static_assert(key_scheme<int8> && value_scheme<int8> && foldable<int8>);
static_assert(int8{}.block_bytes({tensor::key, 64, 128}) == 64 * 132);

}}  // namespace kvq
