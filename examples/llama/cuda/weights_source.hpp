// What the engine on the device loads a model from: its configuration, and matrices that are read a few rows
// at a time. Plain C++, so that neither side needs the other's headers.
#pragma once

#include "../model_config.hpp"

#include <functional>
#include <string_view>
#include <vector>

namespace llama {

struct model_weights;

// A matrix [outputs][inputs]. read(first, count, out): rows as floats, one after the other.
struct matrix_source {
    int outputs = 0, inputs = 0;
    std::function<void(int first, int count, float* out)> read{};
};

// Empty rows: the model has none (weights.hpp).
struct layer_source {
    std::vector<float> attention_norm, query_bias, key_bias, value_bias, attention_output_bias, query_norm,
        key_norm, attention_output_norm, feed_forward_norm, feed_forward_output_norm;
    matrix_source query, key, value, attention_output, gate, up, down;
};

struct weights_source {
    model_config config;
    bool random = false;      // matrices are drawn on the device, norms are ones; the rest is empty
    bool tied = false;        // logits are products with the embedding
    bool head_norms = false;  // of a random model
    matrix_source embedding, logits{};
    std::vector<layer_source> layers{};
    std::vector<float> final_norm{};
};

// The weights must outlive the source.
weights_source source_of(const model_weights& weights);

// Random weights of a real shape: "llama-3-8b", "llama-3-70b", "qwen3-8b", or "llama-3-70b-layer", which is
// one layer of it. layers: of the model; 0: all. context: longest text. Throws std::invalid_argument that
// lists the names.
weights_source random_source(std::string_view shape, int layers = 0, int context = 0);

}  // namespace llama
