// expect: kvq::normal_levels<B>: there are tables for codes of 2, 3 and 4 bits (turboquant<2> to <4>)
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>
#include <kvq/schemes/published.hpp>

kvq::cache<kvq::turboquant<5>> cache({.layers = 1, .kv_heads = 1, .head_dim = 8});
