// expect: kvq::scheme<bits<B>, levels, granularity, params<P>>: in this order
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

kvq::cache<kvq::affine<4, kvq::params<float>>> cache({.layers = 1, .kv_heads = 1, .head_dim = 8});
