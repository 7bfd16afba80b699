// expect: kvq::cache: one of the schemes does not support this tensor (key or value)
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

struct values_only : kvq::affine<4> {
    static constexpr bool supports(kvq::tensor role) { return role == kvq::tensor::value; }
};
static_assert(kvq::value_scheme<values_only> && !kvq::key_scheme<values_only>);
kvq::cache<values_only> cache({.layers = 1, .kv_heads = 1, .head_dim = 8});
