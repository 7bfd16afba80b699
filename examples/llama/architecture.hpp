// The architectures that are read, and the building of a model from the tensors of its files.
#pragma once

#include "tensor_directory.hpp"
#include "weights.hpp"

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace llama {

// What an architecture has beyond Llama.
struct architecture {
    std::string_view name;
    bool needs_biases = false;      // of q, k and v; others may have them
    bool needs_head_norms = false;  // of q and k
    bool is_gemma = false;          // a gate with GELU, scaled embeddings
    bool output_norms = false;      // Gemma 2 and 3: norms of what a layer adds
    bool is_hybrid = false;         // Qwen3.5: layers with Gated DeltaNet, gated attention; folders only
    // Of so many layers the last sees everything, the others have a window or are recurrent; 0: all are
    // alike.
    int full_attention_every = 0;
};

// llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3, gemma3_text, qwen3_5_text. Returns nullptr for others.
const architecture* find_architecture(std::string_view name);
std::string architecture_names();

// Names of tensors, without ".weight" and ".bias"; # is the number of the layer. Empty: the file has none.
struct tensor_names {
    std::string_view embedding{}, final_norm{}, logits{};
    std::string_view attention_norm{}, query{}, key{}, value{}, attention_output{};
    std::string_view query_norm{}, key_norm{}, attention_output_norm{};
    std::string_view feed_forward_norm{}, gate{}, up{}, down{}, feed_forward_output_norm{};
    std::string_view delta_mixed{}, delta_gate{}, delta_beta{}, delta_decay{}, delta_kernel{};
    std::string_view delta_decay_bias{}, delta_log_decay{}, delta_norm{}, delta_output{};
};

// What an error begins with; it does not return.
using refusal = std::function<void(const std::string& reason)>;

// Sets what follows from the architecture alone, from shape and `window` (tokens, 0: none). all_layers: the
// window is one of every layer, also for an architecture in which only some layers have one.
void apply_architecture(const architecture& kind, int window, model_config& config);

// Builds a model. config.shape.vocab is that of the embedding. Refuses tensors that are missing, have other
// sizes, are of a type that is not read, or that would not be used. `norm_offset` is added to the weights of
// norms (Gemma and Qwen3.5 in Hugging Face's files: 1).
model_weights build_model(const architecture& kind, model_config config, const tensor_directory& tensors,
                          const tensor_names& names, float norm_offset, const refusal& refuse);

// Refuses a shape that no model can have.
void check_shape(const model_shape& shape, const refusal& refuse);

}  // namespace llama
