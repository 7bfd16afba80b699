// expect: kvq::mixed_width<widths, eighths, group, encoder, parameters>: the fourth argument must be an encoder
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

kvq::cache<kvq::mixed_width<kvq::widths<4, 2, 0>, 16, 64, kvq::coded>, kvq::int8> cache({.layers = 1,
                                                                                         .kv_heads = 1,
                                                                                         .head_dim = 8});
