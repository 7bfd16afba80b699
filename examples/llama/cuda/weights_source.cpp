#include "weights_source.hpp"

#include "../weights.hpp"

#include <stdexcept>

namespace llama {
namespace {

matrix_source rows_of(const stored_matrix& stored) {
    return {static_cast<int>(stored.outputs), static_cast<int>(stored.inputs),
            [stored](int first, int count, float* out) { stored.read_rows(first, count, out); }};
}
matrix_source rows_of(const linear& matrix) { return rows_of(matrix.stored()); }

std::vector<float> values_of(const row_vector& row) { return {row.data(), row.data() + row.size()}; }

}  // namespace

weights_source source_of(const model_weights& weights) {
    if (weights.config.shape.has_state()) {
        throw std::invalid_argument("models with recurrent layers are for the CPU");
    }
    weights_source source;
    source.config = weights.config;
    source.embedding = rows_of(weights.embedding);
    source.tied = weights.logits.stored().bytes == weights.embedding.bytes;
    if (!source.tied) {
        source.logits = rows_of(weights.logits);
    }
    source.final_norm = values_of(weights.final_norm);
    for (const layer_weights& of : weights.layers) {
        layer_source layer;
        layer.attention_norm = values_of(of.attention_norm);
        layer.query_bias = values_of(of.query_bias);
        layer.key_bias = values_of(of.key_bias);
        layer.value_bias = values_of(of.value_bias);
        layer.attention_output_bias = values_of(of.attention_output_bias);
        layer.query_norm = values_of(of.query_norm);
        layer.key_norm = values_of(of.key_norm);
        layer.attention_output_norm = values_of(of.attention_output_norm);
        layer.feed_forward_norm = values_of(of.feed_forward_norm);
        layer.feed_forward_output_norm = values_of(of.feed_forward_output_norm);
        layer.query = rows_of(of.query);
        layer.key = rows_of(of.key);
        layer.value = rows_of(of.value);
        layer.attention_output = rows_of(of.attention_output);
        layer.gate = rows_of(of.gate);
        layer.up = rows_of(of.up);
        layer.down = rows_of(of.down);
        source.layers.push_back(std::move(layer));
    }
    return source;
}

}  // namespace llama
