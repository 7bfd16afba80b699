// SPDX-License-Identifier: MIT
// A cache of some formats in use. Each file that includes it has a function of its own, of its instruction
// set. Without functions of std, which have no name of an instruction set.
#pragma once

#include <kvq/kvq.hpp>

struct prompt {
    // Two quantized pages and two in 16 bit: without optimization and emulated every token costs.
    static constexpr int tokens = 168, heads = 1, dim = 64;
    const float *k, *v, *q;
    int queries;
};

static void attend(const kvq::format& keys, const kvq::format& values, const prompt& of, float* outputs) {
    kvq::cache cache({.layers = 1, .kv_heads = prompt::heads, .head_dim = prompt::dim},
                     {.keys = keys, .values = values, .recent = 40});
    auto sequence = cache.new_sequence();
    const kvq::query_view q(of.q, of.queries, 2 * prompt::heads, prompt::dim);
    const kvq::output_view out(outputs, of.queries, 2 * prompt::heads, prompt::dim);
    sequence.prefill(0, kvq::input_view(of.k, prompt::tokens, prompt::heads, prompt::dim),
                     kvq::input_view(of.v, prompt::tokens, prompt::heads, prompt::dim), q, out);
    sequence.attend(0, q, out);
}
