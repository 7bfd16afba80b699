// expect: kvq::cache: one of the schemes holds state that it cannot make up, such as the matrices of rotated<>
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>
#include <kvq/schemes/transformed.hpp>

kvq::cache<kvq::rotated<kvq::affine<4>>, kvq::affine<4>> cache({.layers = 1, .kv_heads = 1, .head_dim = 8});
