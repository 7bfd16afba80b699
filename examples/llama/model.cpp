#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace llama {
namespace {

void norm(const kv_cache::const_rows& states, const row_vector& weight, float epsilon, kv_cache::rows out) {
    for (Eigen::Index token = 0; token < states.rows(); ++token) {
        const float mean = states.row(token).squaredNorm() / static_cast<float>(states.cols());
        out.row(token).array() =
            states.row(token).array() * weight.array() * (1.0F / std::sqrt(mean + epsilon));
    }
}

// The norm of every head; no weight: none.
void norm_heads(kv_cache::rows heads, const row_vector& weight, float epsilon) {
    for (Eigen::Index first = 0; weight.size() > 0 && first < heads.cols(); first += weight.size()) {
        auto head = heads.middleCols(first, weight.size());
        norm(head, weight, epsilon, head);
    }
}

void add_bias(kv_cache::rows out, const row_vector& bias) {
    if (bias.size() > 0) {
        out.rowwise() += bias;
    }
}

// x times the activation of its gate.
template <class Gate, class Up>
void apply_gate(activation kind, Gate&& gate, const Up& up) {
    auto g = gate.array();
    if (kind == activation::silu) {
        g *= up.array() / (1.0F + (-g).exp());  // SwiGLU
    } else {
        constexpr float root = 0.7978845608028654F;  // sqrt(2 / pi)
        g *= 0.5F * up.array() * (1.0F + (root * (g + 0.044715F * g.cube())).tanh());
    }
}

}  // namespace

model::model(model_weights weights, int positions)
    : weights_(std::move(weights)), positions_(positions > 0 ? positions : weights_.config.shape.context) {}

void model::find_angles(int first_position, Eigen::Index count, activations& space) const {
    const rotary_angles* const angles[2] = {&weights_.config.rotary, &weights_.config.window_rotary};
    for (int kind = 0; kind < 2; ++kind) {
        const auto pairs = static_cast<Eigen::Index>(angles[kind]->frequencies.size());
        space.cosines[kind].resize(count, pairs);
        space.sines[kind].resize(count, pairs);
        for (Eigen::Index token = 0; token < count; ++token) {
            for (Eigen::Index pair = 0; pair < pairs; ++pair) {
                const double angle = static_cast<double>(first_position + token) *
                                     angles[kind]->frequencies[static_cast<std::size_t>(pair)];
                space.cosines[kind](token, pair) =
                    static_cast<float>(angles[kind]->amplitude * std::cos(angle));
                space.sines[kind](token, pair) =
                    static_cast<float>(angles[kind]->amplitude * std::sin(angle));
            }
        }
    }
}

// Two channels of a head are a point in the plane. It is rotated by an angle that grows with the position.
void model::rotate(kv_cache::rows heads, Eigen::Index first_token, bool has_window,
                   const activations& space) const {
    const int kind = has_window && space.cosines[1].cols() > 0 ? 1 : 0;
    const matrix &cosines = space.cosines[kind], &sines = space.sines[kind];
    const Eigen::Index pairs = cosines.cols();
    const bool interleaved = weights_.config.pairs == kvq::rotary_layout::interleaved;
    const Eigen::Index step = interleaved ? 2 : 1, other = interleaved ? 1 : pairs, dim = shape().head_dim();
    for (Eigen::Index token = 0; token < heads.rows(); ++token) {
        const float* const cosine = &cosines(first_token + token, 0);
        const float* const sine = &sines(first_token + token, 0);
        float* const begin = &heads(token, 0);
        for (float* head = begin; head < begin + heads.cols(); head += dim) {
            for (Eigen::Index pair = 0; pair < pairs; ++pair) {
                float& first = head[step * pair];
                float& second = head[step * pair + other];
                const float x = first, y = second;
                first = x * cosine[pair] - y * sine[pair];
                second = x * sine[pair] + y * cosine[pair];
            }
        }
    }
}

const matrix& model::forward(std::span<const int> tokens, int first_position, kv_cache& cache, int chunk,
                             activations& space, bool prompt_ends) const {
    const model_config& config = weights_.config;
    const Eigen::Index count = static_cast<Eigen::Index>(tokens.size());
    if (first_position + count > positions_) {
        throw std::runtime_error("position " + std::to_string(first_position + count - 1) +
                                 " lies behind the context of " + std::to_string(positions_) + " tokens");
    }

    matrix &states = space.states, &input = space.input, &queries = space.queries, &keys = space.keys,
           &values = space.values, &attention = space.attention, &output = space.output, &gate = space.gate,
           &up = space.up;
    kvq::thread_pool& workers = space.workers;
    states.resize(count, shape().dim);
    input.resize(count, shape().dim);
    queries.resize(count, shape().query_dim());
    attention.resize(count, shape().query_dim());
    keys.resize(count, shape().kv_dim());
    values.resize(count, shape().kv_dim());
    gate.resize(count, shape().hidden_dim);
    up.resize(count, shape().hidden_dim);
    find_angles(first_position, count, space);
    for (Eigen::Index token = 0; token < count; ++token) {
        weights_.embedding.read_rows(tokens[static_cast<std::size_t>(token)], 1, states.row(token).data());
    }
    if (config.embedding_scale != 1.0F) {
        states *= config.embedding_scale;
    }

    const auto for_each_block = [&](const auto& work) { for_each_token_block(count, workers, work); };
    const auto norm_states = [&](const row_vector& weight) {
        for_each_block([&](Eigen::Index first, Eigen::Index n) {
            norm(states.middleRows(first, n), weight, config.norm_epsilon, input.middleRows(first, n));
        });
    };
    // states += x Wᵀ + bias, or the norm of it.
    const auto add_to_states = [&](const matrix& x, const linear& weights, const row_vector& bias,
                                   const row_vector& output_norm) {
        if (bias.size() == 0 && output_norm.size() == 0) {
            weights.multiply_add(x, states, workers);
            return;
        }
        output.resize(count, shape().dim);
        weights.multiply(x, output, workers);
        add_bias(output, bias);
        if (output_norm.size() > 0) {
            norm(output, output_norm, config.norm_epsilon, output);
        }
        states += output;
    };

    const Eigen::Index head_dim = shape().head_dim();
    // attention = that of the normed states
    const auto attend = [&](int layer, const layer_weights& weights) {
        if (config.attention_gate) {
            matrix& both = space.gated_queries;
            both.resize(count, 2 * shape().query_dim());
            weights.query.multiply(input, both, workers);
            add_bias(both, weights.query_bias);
            for (Eigen::Index head = 0; head < shape().heads; ++head) {
                queries.middleCols(head * head_dim, head_dim) =
                    both.middleCols(2 * head * head_dim, head_dim);
            }
        } else {
            weights.query.multiply(input, queries, workers);
            add_bias(queries, weights.query_bias);
        }
        weights.key.multiply(input, keys, workers);
        weights.value.multiply(input, values, workers);
        for_each_block([&](Eigen::Index first, Eigen::Index n) {
            auto q = queries.middleRows(first, n), k = keys.middleRows(first, n);
            add_bias(k, weights.key_bias);
            add_bias(values.middleRows(first, n), weights.value_bias);
            norm_heads(q, weights.query_norm, config.norm_epsilon);
            norm_heads(k, weights.key_norm, config.norm_epsilon);
            const bool has_window = shape().window(layer) > 0;
            rotate(q, first, has_window, space);
            rotate(k, first, has_window, space);
            if (config.query_scale != 1.0F) {
                q *= config.query_scale;
            }
        });
        for (Eigen::Index first = 0; first < count; first += chunk) {
            const Eigen::Index n = std::min<Eigen::Index>(chunk, count - first);
            cache.prefill(layer, keys.middleRows(first, n), values.middleRows(first, n),
                          queries.middleRows(first, n), attention.middleRows(first, n), workers);
        }
        for (Eigen::Index head = 0; config.attention_gate && head < shape().heads; ++head) {
            const auto gates = space.gated_queries.middleCols((2 * head + 1) * head_dim, head_dim).array();
            attention.middleCols(head * head_dim, head_dim).array() /= 1.0F + (-gates).exp();
        }
    };

    int layer = 0;
    for (const layer_weights& weights : weights_.layers) {
        norm_states(weights.attention_norm);
        if (shape().is_recurrent(layer)) {
            run_gated_delta(shape().delta, weights.delta, config.norm_epsilon, input, *cache.state(), layer,
                            space.delta, space.mixed, workers);
            add_to_states(space.mixed, weights.delta.output, {}, {});
        } else {
            attend(layer, weights);
            add_to_states(attention, weights.attention_output, weights.attention_output_bias,
                          weights.attention_output_norm);
        }
        norm_states(weights.feed_forward_norm);
        weights.gate.multiply(input, gate, workers);
        weights.up.multiply(input, up, workers);
        for_each_block([&](Eigen::Index first, Eigen::Index n) {
            apply_gate(config.gate, gate.middleRows(first, n), up.middleRows(first, n));
        });
        add_to_states(gate, weights.down, {}, weights.feed_forward_output_norm);
        ++layer;
    }
    cache.end_of_step(static_cast<int>(count), prompt_ends);
    norm(states, weights_.final_norm, config.norm_epsilon, input);
    return input;
}

matrix model::read(std::span<const int> tokens, int first_position, kv_cache& cache, int chunk,
                   activations& space) const {
    constexpr int most = 2048;  // tokens: activations take 4 (6 dim + 2 hidden_dim) bytes per token
    const int piece = std::min(std::max(chunk, most / chunk * chunk), cache.step_tokens());
    const int count = static_cast<int>(tokens.size());
    matrix states(count, shape().dim);
    for (int first = 0; first < count; first += piece) {
        const int n = std::min(piece, count - first);
        states.middleRows(first, n) =
            forward(tokens.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(n)),
                    first_position + first, cache, chunk, space, count > 1 && first + n == count);
    }
    return states;
}

void model::trim(std::span<const int> text, kv_cache& cache, int chunk, activations& space) const {
    const int again = cache.trim(static_cast<int>(text.size()));
    if (again > 0) {
        const auto lost = text.last(static_cast<std::size_t>(again));
        read(lost, static_cast<int>(text.size() - lost.size()), cache, chunk, space);
    }
}

void model::logits(const kv_cache::const_rows& states, matrix& out) const {
    kvq::thread_pool alone(1);
    logits(states, out, alone);
}

void model::logits(const kv_cache::const_rows& states, matrix& out, kvq::thread_pool& workers) const {
    out.resize(states.rows(), shape().vocab);
    weights_.logits.multiply(states, out, workers);
    if (const float cap = weights_.config.logit_softcap; cap > 0.0F) {
        out.array() = cap * (out.array() / cap).tanh();
    }
}

}  // namespace llama
