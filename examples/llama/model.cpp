#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace llama {
namespace {

void norm(const kv_cache::const_rows& states, const row_view& weight, kv_cache::rows out) {
    constexpr float epsilon = 1e-5F;
    for (Eigen::Index row = 0; row < states.rows(); ++row) {
        const float mean = states.row(row).squaredNorm() / static_cast<float>(states.cols());
        out.row(row).array() = states.row(row).array() * weight.array() * (1.0F / std::sqrt(mean + epsilon));
    }
}

}  // namespace

model::model(checkpoint weights, double rope_theta, int positions) : weights_(std::move(weights)) {
    const int pairs = shape().head_dim() / 2;
    const int reach = positions > 0 ? positions : shape().context;
    cos_.resize(reach, pairs);
    sin_.resize(reach, pairs);
    for (int pair = 0; pair < pairs; ++pair) {
        const double frequency = std::pow(rope_theta, -static_cast<double>(pair) / pairs);
        for (int position = 0; position < reach; ++position) {
            cos_(position, pair) = static_cast<float>(std::cos(position * frequency));
            sin_(position, pair) = static_cast<float>(std::sin(position * frequency));
        }
    }
}

// Channels 2i and 2i + 1 of a head are a point in the plane. It is rotated by an angle that grows with the
// position.
void model::rotate(kv_cache::rows heads, Eigen::Index first_position) const {
    const Eigen::Index pairs = cos_.cols();
    for (Eigen::Index token = 0; token < heads.rows(); ++token) {
        const float* const cosine = &cos_(first_position + token, 0);
        const float* const sine = &sin_(first_position + token, 0);
        float* const row = &heads(token, 0);
        for (float* head = row; head < row + heads.cols(); head += 2 * pairs) {
            for (Eigen::Index pair = 0; pair < pairs; ++pair) {
                const float x = head[2 * pair], y = head[2 * pair + 1];
                head[2 * pair] = x * cosine[pair] - y * sine[pair];
                head[2 * pair + 1] = x * sine[pair] + y * cosine[pair];
            }
        }
    }
}

const matrix& model::forward(std::span<const int> tokens, int first_position, kv_cache& cache, int chunk,
                             activations& space) const {
    const Eigen::Index count = static_cast<Eigen::Index>(tokens.size());
    if (first_position + count > cos_.rows()) {
        throw std::runtime_error("position " + std::to_string(first_position + count - 1) +
                                 " lies behind the context of " + std::to_string(cos_.rows()) + " tokens");
    }

    auto& [states, input, queries, keys, values, attention, gate, up, workers] = space;
    for (matrix* const wide : {&states, &input, &queries, &attention}) {
        wide->resize(count, shape().dim);
    }
    keys.resize(count, shape().kv_dim());
    values.resize(count, shape().kv_dim());
    gate.resize(count, shape().hidden_dim);
    up.resize(count, shape().hidden_dim);
    for (Eigen::Index token = 0; token < count; ++token) {
        states.row(token) = weights_.embedding.row(tokens[static_cast<std::size_t>(token)]);
    }

    // Outside of attention tokens are independent: threads take blocks of them. Larger blocks are faster, and smaller blocks
    // keep all threads busy; the blocks, and so the results, do not depend on the number of threads.
    const Eigen::Index block = count < 1024 ? 128 : 256;
    const auto for_each_block = [&](const auto& work) {
        workers.parallel_for(static_cast<int>((count + block - 1) / block), [&](int index) {
            const Eigen::Index first = index * block;
            work(first, std::min(block, count - first));
        });
    };

    int layer = 0;
    for (const layer_weights& weights : weights_.layers) {
        for_each_block([&](Eigen::Index first, Eigen::Index n) {
            auto x = input.middleRows(first, n), q = queries.middleRows(first, n),
                 k = keys.middleRows(first, n);
            norm(states.middleRows(first, n), weights.attention_norm, x);
            q.noalias() = x * weights.query;
            k.noalias() = x * weights.key;
            values.middleRows(first, n).noalias() = x * weights.value;
            rotate(q, first_position + first);
            rotate(k, first_position + first);
        });
        for (Eigen::Index first = 0; first < count; first += chunk) {
            const Eigen::Index n = std::min<Eigen::Index>(chunk, count - first);
            cache.prefill(layer, keys.middleRows(first, n), values.middleRows(first, n),
                          queries.middleRows(first, n), attention.middleRows(first, n), workers);
        }
        for_each_block([&](Eigen::Index first, Eigen::Index n) {
            auto x = input.middleRows(first, n), y = states.middleRows(first, n),
                 g = gate.middleRows(first, n), u = up.middleRows(first, n);
            y.noalias() += attention.middleRows(first, n) * weights.attention_output;
            norm(y, weights.feed_forward_norm, x);
            g.noalias() = x * weights.gate;
            u.noalias() = x * weights.up;
            g.array() *= u.array() / (1.0F + (-g.array()).exp());  // SwiGLU
            y.noalias() += g * weights.down;
        });
        ++layer;
    }
    cache.end_of_step();
    norm(states, weights_.final_norm, input);
    return input;
}

matrix model::read(std::span<const int> tokens, int first_position, kv_cache& cache, int chunk,
                   activations& space) const {
    constexpr int most = 2048;  // tokens: the activations between two layers take some 10 KB per token
    const int piece = std::min(std::max(chunk, most / chunk * chunk), cache.step_tokens());
    const int count = static_cast<int>(tokens.size());
    matrix states(count, shape().dim);
    for (int first = 0; first < count; first += piece) {
        const int n = std::min(piece, count - first);
        states.middleRows(first, n) =
            forward(tokens.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(n)),
                    first_position + first, cache, chunk, space);
    }
    return states;
}

void model::logits(const kv_cache::const_rows& states, matrix& out) const {
    out.noalias() = states * weights_.classifier;
}

}  // namespace llama
