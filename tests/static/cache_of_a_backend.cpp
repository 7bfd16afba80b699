// expect: kvq::cache: a format must be a scheme (kv_scheme), a pair like kivi<4>, or formats<...>
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

// The second argument is the format of values.
kvq::cache<kvq::int8, kvq::scalar> cache({.layers = 1, .kv_heads = 1, .head_dim = 8});
