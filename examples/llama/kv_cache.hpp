// The cache interface of the model; one sequence of one model.
#pragma once

#include <kvq/core/thread_pool.hpp>

#include "matrix.hpp"
#include "model_config.hpp"

#include <cstddef>
#include <limits>

namespace llama {

class kv_cache {
public:
    using rows = Eigen::Ref<matrix>;
    using const_rows = Eigen::Ref<const matrix>;

    virtual ~kv_cache() = default;

    // One chunk of one layer: appends its tokens and computes attention for their queries. keys and values are
    // [tokens][kv_heads * head_dim], queries and out [tokens][heads * head_dim]. Every query attends to its own token and all tokens
    // before it. The chunk, and all tokens that were 16 bit before it, are read in 16 bit: pages are quantized after attention.
    virtual void prefill(int layer, const const_rows& keys, const const_rows& values,
                         const const_rows& queries, rows out, kvq::thread_pool& workers) = 0;

    // The same without queries: what prefill() leaves, without attention.
    virtual void append(int layer, const const_rows& keys, const const_rows& values) = 0;

    // Removes every token from position `tokens` on, in all layers.
    virtual void trim(int tokens) = 0;

    // Bytes that this sequence holds now, window included.
    virtual std::size_t bytes() const = 0;

    // The model calls this when tokens have passed all layers: a cache may then requantize its pages. The cache gives the number
    // of tokens that may pass in between.
    virtual void end_of_step() {}
    virtual int step_tokens() const { return std::numeric_limits<int>::max(); }
};

}  // namespace llama
