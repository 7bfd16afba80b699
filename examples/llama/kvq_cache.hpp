// One sequence in a kvq::cache behind the interface of the model.
#pragma once

#include <kvq/adapters/eigen.hpp>
#include <kvq/kvq.hpp>

#include "schemes.hpp"

namespace llama {

inline kvq::cache_shape quantized_cache_shape(const model_shape& shape) {
    return {.layers = shape.layers, .kv_heads = shape.kv_heads, .head_dim = shape.head_dim()};
}

// The options without formats.
inline kvq::cache_options options_of(const cache_settings& settings) {
    kvq::cache_options options;
    options.sinks = settings.sinks;
    options.recent = settings.recent;
    options.page_tokens = settings.page_tokens;
    return options;
}

class kvq_cache : public kv_cache {
public:
    kvq_cache(const model_shape& shape, const kvq::cache_options& options)
        : shape_(shape), cache_(quantized_cache_shape(shape), options), sequence_(cache_.new_sequence()) {}

    void prefill(int layer, const const_rows& keys, const const_rows& values, const const_rows& queries,
                 rows out, kvq::thread_pool& workers) override {
        const auto attend = [&](const auto& mods) {
            sequence_.prefill(layer, kvq::tokens_of(keys, shape_.kv_heads),
                              kvq::tokens_of(values, shape_.kv_heads), kvq::tokens_of(queries, shape_.heads),
                              kvq::tokens_of(out, shape_.heads), mods, workers, workspace_);
        };
        const kvq::softcap cap{shape_.attention_softcap};
        const kvq::sliding_window window{shape_.window(layer)};
        if (shape_.attention_softcap > 0.0F && shape_.window(layer) > 0) {
            attend(kvq::mods{cap, window});
        } else if (shape_.attention_softcap > 0.0F) {
            attend(cap);
        } else if (shape_.window(layer) > 0) {
            attend(window);
        } else {
            attend(kvq::causal{});
        }
    }

    void append(int layer, const const_rows& keys, const const_rows& values) override {
        sequence_.append(layer, kvq::tokens_of(keys, shape_.kv_heads),
                         kvq::tokens_of(values, shape_.kv_heads));
    }

    void trim(int tokens) override { sequence_.trim(tokens); }

    std::size_t bytes() const override { return sequence_.usage().bytes; }

protected:
    model_shape shape_;
    kvq::cache cache_;
    kvq::sequence sequence_;
    kvq::workspace workspace_;  // kept, so that decode steps do not allocate
};

}  // namespace llama
