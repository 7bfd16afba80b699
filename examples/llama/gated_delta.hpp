// Gated DeltaNet (Yang et al., arXiv 2412.06464): a layer that attends over a state of fixed size.
//
//   q, k, v   silu(a convolution of the last `kernel` tokens, channel by channel); q and k of a head have
//             length 1, q / sqrt(key_channels)
//   S         exp(g) S, then S += k (beta (v - k S)), of every value head: [key_channels][value_channels]
//   g, beta   -exp(log_decay) softplus(decay + decay_bias), sigmoid(...), of every value head and token
//   out       norm(q S) silu(gate)
//
// The state is S and the last kernel - 1 inputs of the convolution. Tokens are taken one after the other, so
// results depend neither on how a text is cut into steps nor on the number of threads.
#pragma once

#include <kvq/state/recurrent_state.hpp>

#include "weights.hpp"

namespace llama {

// Memory that is kept from call to call.
struct delta_space {
    matrix mixed, convolved, gate, beta, decay;
};

// input: [tokens][dim]. out: [tokens][value_dim], which delta_weights::output multiplies.
void run_gated_delta(const delta_shape& shape, const delta_weights& weights, float epsilon,
                     const matrix& input, kvq::recurrent_state& state, int layer, delta_space& space,
                     matrix& out, kvq::thread_pool& workers);

}  // namespace llama
