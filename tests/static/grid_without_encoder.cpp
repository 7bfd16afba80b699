// expect: kvq::channel_grid<bits, group, encoder, parameters, factors>: the third argument must be an encoder
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

kvq::cache<kvq::channel_grid<4, 64, kvq::params<kvq::float16>>> cache({.layers = 1,
                                                                       .kv_heads = 1,
                                                                       .head_dim = 8});
