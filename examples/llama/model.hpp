// The Llama forward pass. It is const and keeps no state: earlier tokens are in the cache alone.
#pragma once

#include "gated_delta.hpp"
#include "kv_cache.hpp"
#include "weights.hpp"

#include <span>

namespace llama {

// Memory and threads of a forward pass: the activations between its layers, kept from call to call so that
// nothing is allocated, and the worker threads.
struct activations {
    explicit activations(int threads = 1) : workers(threads) {}

    matrix states, input, queries, keys, values, attention, output, gate, up;
    matrix gated_queries;  // [tokens][heads][query, gate]
    matrix mixed;          // [tokens][value_dim]: of recurrent layers, in place of attention
    delta_space delta;
    matrix cosines[2], sines[2];  // [tokens][pairs]: of all layers, and of those with a window
    kvq::thread_pool workers;
};

class model {
public:
    // positions: longest text; 0: the context that the model was trained with.
    explicit model(model_weights weights, int positions = 0);

    const model_config& config() const { return weights_.config; }
    const model_shape& shape() const { return weights_.config.shape; }
    // The token in front of every text that is judged.
    int begin_of_text() const { return weights_.config.begin_of_text; }

    // Runs tokens at positions first_position, first_position + 1, ... and returns the normed states after
    // the last layer, [tokens][dim], a reference into `space`. The matrix products take all tokens at once;
    // the cache takes `chunk` of them at a time (kv_cache::prefill). With a chunk of 1 every query reads the
    // same cache as in decode.
    const matrix& forward(std::span<const int> tokens, int first_position, kv_cache& cache, int chunk,
                          activations& space, bool prompt_ends = false) const;

    // forward() for a text of any length, in parts: whole chunks, at most a step of the cache and at most
    // some thousand tokens. Where it has several tokens it is a prompt.
    matrix read(std::span<const int> tokens, int first_position, kv_cache& cache, int chunk,
                activations& space) const;

    // Trims a cache to `text`, which it holds the first tokens of, and reads again what its recurrent layers
    // have lost.
    void trim(std::span<const int> text, kv_cache& cache, int chunk, activations& space) const;

    // out: [rows][vocab]
    void logits(const kv_cache::const_rows& states, matrix& out) const;
    void logits(const kv_cache::const_rows& states, matrix& out, kvq::thread_pool& workers) const;

private:
    void find_angles(int first_position, Eigen::Index count, activations& space) const;
    void rotate(kv_cache::rows heads, Eigen::Index first_token, bool has_window,
                const activations& space) const;

    model_weights weights_;
    int positions_;
};

}  // namespace llama
