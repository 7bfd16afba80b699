// The cache interface of the model; one sequence of one model.
#pragma once

#include <kvq/core/thread_pool.hpp>
#include <kvq/state/recurrent_state.hpp>

#include "matrix.hpp"
#include "model_config.hpp"

#include <cstddef>
#include <limits>
#include <stdexcept>

namespace llama {

// The state of a recurrent layer.
enum state_part { recurrent_part, convolution_part };
inline std::vector<kvq::state_part> state_parts(const delta_shape& of) {
    return {
        {.name = "recurrent", .heads = of.value_heads, .rows = of.key_channels, .columns = of.value_channels},
        {.name = "convolution", .rows = of.kernel - 1, .columns = of.mixed_dim()}};
}

class kv_cache {
public:
    using rows = Eigen::Ref<matrix>;
    using const_rows = Eigen::Ref<const matrix>;

    virtual ~kv_cache() = default;

    // One chunk of one layer: appends its tokens and computes attention for their queries. keys and values
    // are [tokens][kv_heads * head_dim], queries and out [tokens][heads * head_dim]. Every query attends to
    // its own token and all tokens before it. The chunk, and all tokens that were 16 bit before it, are read
    // in 16 bit: pages are quantized after attention.
    virtual void prefill(int layer, const const_rows& keys, const const_rows& values,
                         const const_rows& queries, rows out, kvq::thread_pool& workers) = 0;

    // The same without queries: what prefill() leaves, without attention.
    virtual void append(int layer, const const_rows& keys, const const_rows& values) = 0;

    // The state of recurrent layers, which the model reads and writes in place; null where there are none.
    // Its parts: state_parts().
    virtual kvq::recurrent_state* state() = 0;

    // Removes every token from position `tokens` on, in all layers. With recurrent layers all go back to a
    // snapshot: returns how many tokens before `tokens` must be read again (model::trim).
    virtual int trim(int tokens) = 0;

    // From now on, does attention leave out the lower planes of pages with two (kvq/format/planes.hpp)?
    virtual void read_upper_planes(bool) {
        throw std::invalid_argument("this cache has no pages with two planes, a cache of nested8 has");
    }

    // Bytes that this sequence holds now, window included.
    virtual std::size_t bytes() const = 0;

    // The model calls this when `tokens` tokens have passed all layers: a cache may then requantize its
    // pages. The state takes a snapshot where a prompt ends. The cache gives the number of tokens that may
    // pass in between.
    virtual void end_of_step(int tokens, bool prompt_ends) {
        if (kvq::recurrent_state* const of = state()) {
            of->advance(tokens, prompt_ends);
        }
    }
    virtual int step_tokens() const { return std::numeric_limits<int>::max(); }
};

}  // namespace llama
