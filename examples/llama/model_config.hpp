// What the forward pass must know about a model besides its weights. The readers of model files fill it (load_model.hpp).
#pragma once

#include <kvq/attention/rotary.hpp>

#include <Eigen/Core>

#include <cstddef>
#include <vector>

namespace llama {

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using matrix_view = Eigen::Map<const matrix>;
using row_vector = Eigen::RowVectorXf;

// What a cache must know of a model.
struct model_shape {
    int dim, hidden_dim, layers, heads, kv_heads, vocab, context;
    int head_channels = 0;        // 0: dim / heads
    float attention_softcap = 0;  // scores become softcap * tanh(score / softcap); 0: they stay
    std::vector<int> windows =
        {};  // by layer: a token sees itself and the window - 1 tokens before it; 0: all. Empty: all zero

    int head_dim() const { return head_channels > 0 ? head_channels : dim / heads; }
    int query_dim() const { return heads * head_dim(); }
    int kv_dim() const { return kv_heads * head_dim(); }
    int window(int layer) const { return windows.empty() ? 0 : windows[static_cast<std::size_t>(layer)]; }
};

// Angles of the rotary embedding: position * frequency. Cosine and sine are multiplied by `amplitude` (the attention factor
// of YaRN).
struct rotary_angles {
    std::vector<double> frequencies;  // radians per position, by pair of channels: [head_dim / 2]
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
    float query_scale = 1.0F;      // queries are multiplied by it; attention divides scores by sqrt(head_dim)
    float logit_softcap = 0.0F;    // as attention_softcap, for logits
    int begin_of_text = 1;         // the token in front of every text that is judged
};

}  // namespace llama
