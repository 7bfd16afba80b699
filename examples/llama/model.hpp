// The Llama forward pass. It is const and keeps no state: the past lives in the cache alone.
#pragma once

#include "checkpoint.hpp"
#include "kv_cache.hpp"

#include <span>

namespace llama {

// What one forward pass needs beside the weights: what lies between its layers, kept from call to call so that nothing is
// allocated, and the threads that it runs on.
struct activations {
    explicit activations(int threads = 1) : workers(threads) {}

    matrix states, input, queries, keys, values, attention, gate, up;
    worker_pool workers;
};

class model {
public:
    // positions: how far texts may reach; 0: as far as the model was trained to, its context.
    explicit model(checkpoint weights, double rope_theta = 10000.0, int positions = 0);

    const model_shape& shape() const { return weights_.shape; }

    // Runs tokens at positions first_position, first_position + 1, ... and returns the normed states behind
    // the last layer, [tokens][dim], which lie in `space`. The matrix products take all tokens at once; the cache takes
    // `chunk` of them at a time (kv_cache::prefill). With a chunk of 1 every query sees the cache that decoding would
    // have shown it.
    const matrix& forward(std::span<const int> tokens, int first_position, kv_cache& cache, int chunk,
                          activations& space) const;

    // forward() for a text of any length, in pieces: of whole chunks, no longer than a step of the cache, of some thousand
    // tokens at most.
    matrix read(std::span<const int> tokens, int first_position, kv_cache& cache, int chunk,
                activations& space) const;

    // out: [rows][vocab]
    void logits(const kv_cache::const_rows& states, matrix& out) const;

private:
    void rotate(kv_cache::rows heads, Eigen::Index first_position) const;

    checkpoint weights_;
    matrix cos_, sin_;  // [positions][head_dim / 2]
};

}  // namespace llama
