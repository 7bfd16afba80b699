// expect: kvq::channel_grid<bits, group, encoder, parameters, factors>: factors are no_factors, token_factors<coded>
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

kvq::cache<kvq::channel_grid<4, 64, kvq::min_max, kvq::coded, kvq::coded>> cache({.layers = 1,
                                                                                  .kv_heads = 1,
                                                                                  .head_dim = 8});
