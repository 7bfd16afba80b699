// expect: kvq::cache: the window format must be float16, bfloat16 or float
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

kvq::cache<kvq::int8, kvq::int8, kvq::scalar, signed char> cache({.layers = 1, .kv_heads = 1, .head_dim = 8});
