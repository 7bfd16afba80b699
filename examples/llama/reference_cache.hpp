// The textbook cache: fp32 rows and an explicit softmax. It checks the other caches.
#pragma once

#include "kv_cache.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <vector>

namespace llama {

class reference_cache final : public kv_cache {
public:
    explicit reference_cache(const model_shape& shape)
        : shape_(shape), layers_(static_cast<std::size_t>(shape.layers)) {
        if (shape.has_state()) {
            state_ = std::make_unique<own_state>(shape);
        }
    }

    void prefill(int layer, const const_rows& keys, const const_rows& values, const const_rows& queries,
                 rows out, kvq::thread_pool& workers) override {
        append(layer, keys, values);
        attend(layers_[static_cast<std::size_t>(layer)], queries, out, shape_.window(layer), workers);
    }

    void append(int layer, const const_rows& keys, const const_rows& values) override {
        layer_rows& rows_of = layers_[static_cast<std::size_t>(layer)];
        add(rows_of.keys, keys);
        add(rows_of.values, values);
    }

    kvq::recurrent_state* state() override { return state_ ? &state_->live : nullptr; }

    int trim(int tokens) override {
        const int again = state_ ? state_->live.trim(tokens) : 0;
        tokens -= again;
        for (layer_rows& rows_of : layers_) {
            const std::size_t floats =
                static_cast<std::size_t>(tokens) * static_cast<std::size_t>(shape_.kv_dim());
            rows_of.keys.resize(std::min(rows_of.keys.size(), floats));
            rows_of.values.resize(std::min(rows_of.values.size(), floats));
        }
        return again;
    }

    // Tokens first, first + 1, ... of one layer, for writing.
    rows keys(int layer, int first, int tokens) {
        return part(layers_[static_cast<std::size_t>(layer)].keys, first, tokens);
    }
    rows values(int layer, int first, int tokens) {
        return part(layers_[static_cast<std::size_t>(layer)].values, first, tokens);
    }

    std::size_t bytes() const override {
        std::size_t floats = 0;
        for (const layer_rows& rows_of : layers_) {
            floats += rows_of.keys.size() + rows_of.values.size();
        }
        return floats * sizeof(float) + (state_ ? state_->pool.bytes_in_use() : 0);
    }

private:
    using head_view = Eigen::Map<const matrix, Eigen::Unaligned, Eigen::OuterStride<>>;

    struct layer_rows {
        std::vector<float> keys, values;  // [tokens][kv_heads][head_dim]
    };

    struct own_state {
        explicit own_state(const model_shape& shape)
            : layout(parts_of(shape)), pool(std::pmr::get_default_resource()), live(layout, pool) {}

        static std::vector<std::vector<kvq::state_part>> parts_of(const model_shape& shape) {
            std::vector<std::vector<kvq::state_part>> parts(static_cast<std::size_t>(shape.layers));
            for (int layer = 0; layer < shape.layers; ++layer) {
                if (shape.is_recurrent(layer)) {
                    parts[static_cast<std::size_t>(layer)] = state_parts(shape.delta);
                }
            }
            return parts;
        }

        kvq::state_layout layout;
        kvq::page_pool pool;
        kvq::recurrent_state live;
    };

    static void add(std::vector<float>& to, const const_rows& from) {
        for (Eigen::Index row = 0; row < from.rows(); ++row) {
            to.insert(to.end(), from.row(row).begin(), from.row(row).end());
        }
    }

    Eigen::Map<matrix> part(std::vector<float>& of, int first, int tokens) const {
        return {of.data() + static_cast<std::ptrdiff_t>(first) * shape_.kv_dim(), tokens, shape_.kv_dim()};
    }

    // Attention for the queries of the last tokens.
    void attend(const layer_rows& rows_of, const const_rows& queries, rows out, int window,
                kvq::thread_pool& workers) const {
        constexpr Eigen::Index block = 64;  // queries at once: their scores fit the CPU cache
        const Eigen::Index head_dim = shape_.head_dim(), kv_dim = shape_.kv_dim();
        const Eigen::Index before = static_cast<Eigen::Index>(rows_of.keys.size()) / kv_dim - queries.rows();
        const float scale = 1.0F / std::sqrt(static_cast<float>(head_dim));

        workers.parallel_for(shape_.heads, [&](int head) {
            const Eigen::Index kv_head = head / (shape_.heads / shape_.kv_heads);
            matrix weights;
            for (Eigen::Index first = 0; first < queries.rows(); first += block) {
                const Eigen::Index count = std::min(block, queries.rows() - first);
                const Eigen::Index seen = before + first + count;  // keys of the last query
                const head_view keys(rows_of.keys.data() + kv_head * head_dim, seen, head_dim,
                                     Eigen::OuterStride<>(kv_dim));
                const head_view values(rows_of.values.data() + kv_head * head_dim, seen, head_dim,
                                       Eigen::OuterStride<>(kv_dim));

                weights.noalias() =
                    queries.block(first, head * head_dim, count, head_dim) * keys.transpose() * scale;
                if (const float cap = shape_.attention_softcap; cap > 0.0F) {
                    weights.array() = cap * (weights.array() / cap).tanh();
                }
                for (Eigen::Index row = 0; row < count; ++row) {
                    constexpr float hidden = -std::numeric_limits<float>::infinity();
                    const Eigen::Index own_token = before + first + row;
                    weights.row(row).tail(count - 1 - row).setConstant(hidden);
                    if (window > 0 && own_token >= window) {
                        weights.row(row).head(own_token + 1 - window).setConstant(hidden);
                    }
                    auto own = weights.row(row).array();
                    own = (own - own.maxCoeff()).exp();
                    own /= own.sum();
                }
                out.block(first, head * head_dim, count, head_dim).noalias() = weights * values;
            }
        });
    }

    model_shape shape_;
    std::vector<layer_rows> layers_;
    std::unique_ptr<own_state> state_;
};

}  // namespace llama
