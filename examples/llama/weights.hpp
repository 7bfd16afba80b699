// The weights of a model: matrices as they lie in a file, and products with them.
#pragma once

#include <kvq/core/thread_pool.hpp>
#include "mapped_file.hpp"
#include "matrix.hpp"
#include "model_config.hpp"
#include "stored_type.hpp"

#include <algorithm>
#include <memory>
#include <vector>

namespace llama {

// A matrix [outputs][inputs] in the memory of a file; a row is whole blocks.
struct stored_matrix {
    const stored_type* type = nullptr;
    const std::byte* bytes = nullptr;
    Eigen::Index outputs = 0, inputs = 0;

    std::ptrdiff_t row_bytes() const { return inputs / type->block_values * type->block_bytes; }

    // `count` rows as floats, one after the other.
    void read_rows(Eigen::Index first, Eigen::Index count, float* out) const {
        type->dequantize(bytes + first * row_bytes(), count * (inputs / type->block_values), out);
    }
};

// What multiplies with the weights in place of the threads: a GPU. The same products in fp32, in another
// order of sums.
class product_device {
public:
    virtual ~product_device() = default;

    // out = x Wᵀ, or out += x Wᵀ. x: [tokens][inputs], out: [tokens][outputs]
    virtual void multiply(const stored_matrix& weights, const Eigen::Ref<const matrix>& x,
                          Eigen::Ref<matrix> out, bool add, kvq::thread_pool& workers) = 0;
};

// y = x Wᵀ. F32 weights are transposed into memory of their own, which Eigen packs faster; other types stay
// in the file: some rows at a time become floats, and all tokens are multiplied with them. Results do not
// depend on the number of threads.
class linear {
public:
    using rows = Eigen::Ref<matrix>;
    using const_rows = Eigen::Ref<const matrix>;

    linear() = default;
    explicit linear(const stored_matrix& stored);

    Eigen::Index outputs() const { return stored_.outputs; }
    const stored_matrix& stored() const { return stored_; }
    void use(product_device* device) { device_ = device; }

    // x: [tokens][inputs], out: [tokens][outputs]
    void multiply(const const_rows& x, rows out, kvq::thread_pool& workers) const;
    // out += x Wᵀ
    void multiply_add(const const_rows& x, rows out, kvq::thread_pool& workers) const;

private:
    template <bool Add>
    void run(const const_rows& x, rows out, kvq::thread_pool& workers) const;

    stored_matrix stored_;
    matrix transposed_;                 // [inputs][outputs], F32 only
    product_device* device_ = nullptr;  // the threads
};

// What a layer with Gated DeltaNet has in place of attention.
struct delta_weights {
    linear mixed;                      // [mixed_dim][dim]: queries, keys and values, before the convolution
    linear gate;                       // [value_dim][dim]
    linear beta, decay;                // [value_heads][dim]
    matrix kernel;                     // [kernel][mixed_dim]: of the convolution, the newest token last
    row_vector decay_bias, log_decay;  // [value_heads]
    row_vector norm;                   // [value_channels], of every head
    linear output;                     // [dim][value_dim]
};

// Empty rows: the model has none.
struct layer_weights {
    row_vector attention_norm;  // [dim]
    // query: with a gate of the outputs, its rows follow those of the query in every head
    linear query, key, value, attention_output;
    delta_weights delta;  // or these
    row_vector query_bias, key_bias, value_bias, attention_output_bias;
    row_vector query_norm, key_norm;      // [head_dim], of every head, before the rotation
    row_vector attention_output_norm;     // [dim], before the residual sum
    row_vector feed_forward_norm;         // [dim]
    linear gate, up, down;                // [hidden_dim][dim] twice, [dim][hidden_dim]
    row_vector feed_forward_output_norm;  // [dim], before the residual sum
};

struct model_weights {
    model_config config;
    std::vector<std::shared_ptr<const mapped_file>> files;  // the memory of all stored matrices
    stored_matrix embedding;                                // [vocab][dim]
    std::vector<layer_weights> layers;
    row_vector final_norm;  // [dim]
    linear logits;          // [vocab][dim]

    // All products from now on.
    void use(std::shared_ptr<product_device> device);

private:
    std::shared_ptr<product_device> device_;
};

// Tasks on consecutive tokens, which are independent of each other outside of attention: work(first, count).
// Larger blocks are faster, and smaller blocks keep all threads busy; the blocks, and so the results, do not
// depend on the number of threads.
template <class Work>
void for_each_token_block(Eigen::Index tokens, kvq::thread_pool& workers, const Work& work) {
    const Eigen::Index block = tokens < 1024 ? 128 : 256;
    workers.parallel_for(static_cast<int>((tokens + block - 1) / block), [&](int index) {
        const Eigen::Index first = index * block;
        work(first, std::min(block, tokens - first));
    });
}

}  // namespace llama
