// A llama2.c checkpoint (legacy format): seven 32-bit integers, then every weight as fp32 without padding.
#pragma once

#include <Eigen/Core>

#include <memory>
#include <string>
#include <vector>

namespace llama {

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using matrix_view = Eigen::Map<const matrix>;
using row_view = Eigen::Map<const Eigen::RowVectorXf>;

struct model_shape {
    int dim, hidden_dim, layers, heads, kv_heads, vocab, context;

    constexpr int head_dim() const { return dim / heads; }
    constexpr int kv_dim() const { return kv_heads * head_dim(); }
};

// Matrices are [inputs][outputs], the transpose of those in the file: Eigen packs them faster that way.
struct layer_weights {
    row_view attention_norm;        // [dim]
    matrix_view query, key, value;  // [dim][dim or kv_dim]
    matrix_view attention_output;   // [dim][dim]
    row_view feed_forward_norm;     // [dim]
    matrix_view gate, down, up;     // [dim][hidden_dim], [hidden_dim][dim], [dim][hidden_dim]
};

struct checkpoint {
    model_shape shape;
    std::unique_ptr<float[]> storage;  // the memory of all views below
    matrix_view embedding;             // [vocab][dim]
    std::vector<layer_weights> layers;
    row_view final_norm;  // [dim]
    matrix classifier;    // [dim][vocab]
};

// Throws std::runtime_error when the header is impossible or the length of the file is not exactly that of the
// header.
checkpoint load_checkpoint(const std::string& path);

}  // namespace llama
