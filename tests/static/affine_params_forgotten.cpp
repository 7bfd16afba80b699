// expect: kvq::scheme: the type of parameters is written params<float16>, not float16
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

kvq::cache<kvq::affine<4, kvq::per_token<64>, kvq::float16>> cache({.layers = 1,
                                                                    .kv_heads = 1,
                                                                    .head_dim = 8});
