// expect: kvq::channel_grid, kvq::mixed_width: parameters are `coded` or params<P>, such as params<float16>
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

kvq::cache<kvq::channel_grid<4, 64, kvq::min_max, kvq::float16>> cache({.layers = 1,
                                                                        .kv_heads = 1,
                                                                        .head_dim = 8});
