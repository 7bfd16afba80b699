// What the forward pass must know about a model besides its weights. The readers of model files fill it
// (load_model.hpp).
#pragma once

#include <kvq/attention/rotary.hpp>

#include <cstddef>
#include <vector>

namespace llama {

// Gated DeltaNet (Yang et al., arXiv 2412.06464): attention over a state in place of keys and values.
struct delta_shape {
    int key_heads = 0, value_heads = 0;  // a key head serves value_heads / key_heads neighbouring value heads
    int key_channels = 0, value_channels = 0;
    int kernel = 0;  // tokens that a convolution over queries, keys and values sees, at least 2

    int key_dim() const { return key_heads * key_channels; }
    int value_dim() const { return value_heads * value_channels; }
    int mixed_dim() const { return 2 * key_dim() + value_dim(); }
};

// What a cache must know of a model.
struct model_shape {
    int dim, hidden_dim, layers, heads, kv_heads, vocab, context;
    int head_channels = 0;        // 0: dim / heads
    float attention_softcap = 0;  // scores become softcap * tanh(score / softcap); 0: they stay
    std::vector<int> windows =
        {};  // by layer: a token sees itself and the window - 1 tokens before it; 0: all. Empty: all zero
    std::vector<bool> recurrent = {};  // by layer: Gated DeltaNet. Empty: none
    delta_shape delta = {};

    int head_dim() const { return head_channels > 0 ? head_channels : dim / heads; }
    int query_dim() const { return heads * head_dim(); }
    int kv_dim() const { return kv_heads * head_dim(); }
    int window(int layer) const { return windows.empty() ? 0 : windows[static_cast<std::size_t>(layer)]; }
    bool is_recurrent(int layer) const {
        return !recurrent.empty() && recurrent[static_cast<std::size_t>(layer)];
    }
    // With keys and values, ascending.
    std::vector<int> attention_layers() const {
        std::vector<int> all;
        for (int layer = 0; layer < layers; ++layer) {
            if (!is_recurrent(layer)) {
                all.push_back(layer);
            }
        }
        return all;
    }
    bool has_state() const { return static_cast<int>(attention_layers().size()) < layers; }
};

// Angles of the rotary embedding: position * frequency. Cosine and sine are multiplied by `amplitude` (the
// attention factor of YaRN).
struct rotary_angles {
    // Radians per position, by pair of the channels that are rotated, the first ones: [head_dim / 2], or
    // fewer.
    std::vector<double> frequencies;
    double amplitude = 1.0;
};

enum class activation { silu, gelu_tanh };

struct model_config {
    model_shape shape;
    float norm_epsilon = 1e-5F;
    kvq::rotary_layout pairs = kvq::rotary_layout::interleaved;
    rotary_angles rotary, window_rotary{};  // window_rotary: of layers with a window; empty: as the others
    activation gate = activation::silu;
    float embedding_scale = 1.0F;  // tokens enter the first layer multiplied by it
    // Outputs of attention are multiplied by the sigmoid of a gate, which comes with the query.
    bool attention_gate = false;
    float query_scale = 1.0F;    // queries are multiplied by it; attention divides scores by sqrt(head_dim)
    float logit_softcap = 0.0F;  // as attention_softcap, for logits
    int begin_of_text = 1;       // the token in front of every text that is judged
};

}  // namespace llama
