// expect: kvq::bits<B>: a code has 1 to 8 bits
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

kvq::cache<kvq::affine<0>> cache({.layers = 1, .kv_heads = 1, .head_dim = 8});
