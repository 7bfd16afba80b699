// expect: kvq::cache: a scheme must be copyable and destructible
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>
#include <memory>

struct holds_state : kvq::affine<4> {
    std::unique_ptr<float> state;
};
kvq::cache<kvq::formats<kvq::int8, holds_state>> cache({.layers = 1, .kv_heads = 1, .head_dim = 8});
