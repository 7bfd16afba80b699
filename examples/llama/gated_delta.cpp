#include "gated_delta.hpp"

#include "kv_cache.hpp"

#include <cmath>

namespace llama {
namespace {

float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }
float softplus(float x) { return x > 20.0F ? x : std::log1p(std::exp(x)); }

// before: the last kernel - 1 inputs of earlier tokens.
void convolve(const matrix& kernel, const Eigen::Map<const matrix>& before, const matrix& in,
              Eigen::Index first, Eigen::Index count, matrix& out) {
    const Eigen::Index earlier = before.rows();
    for (Eigen::Index token = first; token < first + count; ++token) {
        auto row = out.row(token).array();
        row.setZero();
        for (Eigen::Index tap = 0; tap <= earlier; ++tap) {
            const Eigen::Index from = token + tap - earlier;
            if (from < 0) {
                row += kernel.row(tap).array() * before.row(token + tap).array();
            } else {
                row += kernel.row(tap).array() * in.row(from).array();
            }
        }
        row /= 1.0F + (-row).exp();
    }
}

}  // namespace

void run_gated_delta(const delta_shape& shape, const delta_weights& weights, float epsilon,
                     const matrix& input, kvq::recurrent_state& state, int layer, delta_space& space,
                     matrix& out, kvq::thread_pool& workers) {
    const Eigen::Index count = input.rows(), key_dim = shape.key_dim(), keys = shape.key_channels,
                       values = shape.value_channels, earlier = shape.kernel - 1;
    space.mixed.resize(count, shape.mixed_dim());
    space.convolved.resize(count, shape.mixed_dim());
    space.gate.resize(count, shape.value_dim());
    space.beta.resize(count, shape.value_heads);
    space.decay.resize(count, shape.value_heads);
    out.resize(count, shape.value_dim());
    weights.mixed.multiply(input, space.mixed, workers);
    weights.gate.multiply(input, space.gate, workers);
    weights.beta.multiply(input, space.beta, workers);
    weights.decay.multiply(input, space.decay, workers);
    float* const inputs = state.values<float>(layer, convolution_part).data();
    float* const recurrent = state.values<float>(layer, recurrent_part).data();

    const Eigen::Map<const matrix> before(inputs, earlier, shape.mixed_dim());
    for_each_token_block(count, workers, [&](Eigen::Index first, Eigen::Index n) {
        convolve(weights.kernel, before, space.mixed, first, n, space.convolved);
    });
    Eigen::Map<matrix> after(inputs, earlier, shape.mixed_dim());
    for (Eigen::Index row = 0; row < earlier; ++row) {
        const Eigen::Index from = count - earlier + row;
        if (from < 0) {
            after.row(row) = before.row(count + row);
        } else {
            after.row(row) = space.mixed.row(from);
        }
    }

    const int share = shape.value_heads / shape.key_heads;
    workers.parallel_for(shape.value_heads, [&](int head) {
        Eigen::Map<matrix> memory(recurrent + head * keys * values, keys, values);
        row_vector q(keys), k(keys), change(values);
        for (Eigen::Index token = 0; token < count; ++token) {
            const auto row = space.convolved.row(token);
            q = row.segment(head / share * keys, keys);
            k = row.segment(key_dim + head / share * keys, keys);
            q /= std::sqrt((q.squaredNorm() + 1e-6F) * static_cast<float>(keys));
            k /= std::sqrt(k.squaredNorm() + 1e-6F);
            const float g = -std::exp(weights.log_decay[head]) *
                            softplus(space.decay(token, head) + weights.decay_bias[head]);
            memory *= std::exp(g);
            change = row.segment(2 * key_dim + head * values, values);
            change.noalias() -= k * memory;
            change *= sigmoid(space.beta(token, head));
            memory.noalias() += k.transpose() * change;
            auto result = out.row(token).segment(head * values, values);
            result.noalias() = q * memory;
            const float scale = 1.0F / std::sqrt(result.squaredNorm() / static_cast<float>(values) + epsilon);
            const auto gate = space.gate.row(token).segment(head * values, values).array();
            result.array() *= weights.norm.array() * scale * gate / (1.0F + (-gate).exp());
        }
    });
}

}  // namespace llama
