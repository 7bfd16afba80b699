// One sequence in a kvq::cache behind the interface of the model.
#pragma once

#include <kvq/adapters/eigen.hpp>
#include <kvq/kvq.hpp>

#include "schemes.hpp"

namespace llama {

// Layers with a window free what no query sees any more; recurrent ones have state.
inline std::vector<kvq::layer> cache_layers(const model_shape& shape) {
    const kvq::layer heads{.kv_heads = shape.kv_heads, .head_dim = shape.head_dim()};
    std::vector<kvq::layer> layers;
    for (int layer = 0; layer < shape.layers; ++layer) {
        const int window = shape.window(layer);
        layers.push_back(shape.is_recurrent(layer) ? kvq::state_layer(state_parts(shape.delta))
                         : window > 0              ? kvq::sliding_attention(window, heads)
                                                   : kvq::full_attention(heads));
    }
    return layers;
}

// The options without formats.
inline kvq::cache_options options_of(const cache_settings& settings) {
    kvq::cache_options options;
    options.sinks = settings.sinks;
    options.recent = settings.recent;
    options.page_tokens = settings.page_tokens;
    options.rollback = settings.rollback;
    if (settings.plan_tokens > 0) {
        options.statistics = kvq::key_statistics::own;
        options.statistics_tokens = settings.plan_tokens;
    }
    return options;
}

class kvq_cache : public kv_cache {
public:
    kvq_cache(const model_shape& shape, const kvq::cache_options& options)
        : shape_(shape), cache_(cache_layers(shape), options), sequence_(cache_.new_sequence()) {}

    void prefill(int layer, const const_rows& keys, const const_rows& values, const const_rows& queries,
                 rows out, kvq::thread_pool& workers) override {
        const auto attend = [&](const auto& mods) {
            sequence_.prefill(layer, kvq::tokens_of(keys, shape_.kv_heads),
                              kvq::tokens_of(values, shape_.kv_heads), kvq::tokens_of(queries, shape_.heads),
                              kvq::tokens_of(out, shape_.heads), mods, workers, workspace_);
        };
        if (shape_.attention_softcap > 0.0F) {
            attend(kvq::mods{kvq::softcap{shape_.attention_softcap}, upper_});
        } else {
            attend(upper_);
        }
    }

    void append(int layer, const const_rows& keys, const const_rows& values) override {
        sequence_.append(layer, kvq::tokens_of(keys, shape_.kv_heads),
                         kvq::tokens_of(values, shape_.kv_heads));
    }

    kvq::recurrent_state* state() override { return shape_.has_state() ? &sequence_.state() : nullptr; }
    int trim(int tokens) override { return sequence_.trim(tokens); }

    void read_upper_planes(bool alone) override { upper_.only = alone; }

    std::size_t bytes() const override { return sequence_.usage().bytes; }

protected:
    model_shape shape_;
    kvq::cache cache_;
    kvq::sequence sequence_;
    kvq::upper_plane upper_{false};
    kvq::workspace workspace_;  // kept, so that decode steps do not allocate
};

}  // namespace llama
