// What the model asks of a cache; one sequence of one model.
#pragma once

#include "checkpoint.hpp"
#include "worker_pool.hpp"

#include <cstddef>
#include <limits>

namespace llama {

class kv_cache {
public:
    using rows = Eigen::Ref<matrix>;
    using const_rows = Eigen::Ref<const matrix>;

    virtual ~kv_cache() = default;

    // One chunk of one layer: adds its tokens and answers their queries. keys and values are [tokens][kv_heads * head_dim],
    // queries and out [tokens][heads * head_dim]. Every query sees its own token and everything before it. The chunk, and
    // what was in 16 bit before it, is seen in 16 bit: pages are quantized when the queries have been answered.
    virtual void prefill(int layer, const const_rows& keys, const const_rows& values,
                         const const_rows& queries, rows out, worker_pool& workers) = 0;

    // Forgets every token from position `tokens` on, in all layers.
    virtual void trim(int tokens) = 0;

    // Bytes this sequence holds now, window included.
    virtual std::size_t bytes() const = 0;

    // The model calls this when tokens have passed all layers: the moment for a cache to change its mind. How many
    // tokens may pass in between is for the cache to say.
    virtual void end_of_step() {}
    virtual int step_tokens() const { return std::numeric_limits<int>::max(); }
};

}  // namespace llama
