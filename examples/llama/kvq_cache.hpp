// One sequence in a kvq::cache behind the interface of the model. Only the schemes_*.cpp include this.
#pragma once

#include <kvq/adapters/eigen.hpp>
#include <kvq/backends/simd.hpp>
#include <kvq/kvq.hpp>

#include "schemes.hpp"

namespace llama {

constexpr kvq::cache_shape coded_cache_shape(const model_shape& shape) {
    return {.layers = shape.layers, .kv_heads = shape.kv_heads, .head_dim = shape.head_dim()};
}

template <class Keys, class Values, class Window>
class kvq_cache final : public kv_cache {
    using cache = kvq::cache<Keys, Values, kvq::simd<>, Window>;

public:
    kvq_cache(const model_shape& shape, const cache_settings& settings, Keys keys = {}, Values values = {})
        : shape_(shape),
          cache_(coded_cache_shape(shape),
                 {.sinks = settings.sinks, .recent = settings.recent, .page_tokens = settings.page_tokens},
                 typename cache::key_table(std::move(keys)), typename cache::value_table(std::move(values))),
          sequence_(cache_.new_sequence()) {}

    void prefill(int layer, const const_rows& keys, const const_rows& values, const const_rows& queries,
                 rows out, worker_pool& workers) override {
        sequence_.prefill(layer, kvq::tokens_of(keys, shape_.kv_heads),
                          kvq::tokens_of(values, shape_.kv_heads), kvq::tokens_of(queries, shape_.heads),
                          kvq::tokens_of(out, shape_.heads), kvq::causal{}, workers, workspace_);
    }

    void trim(int tokens) override { sequence_.trim(tokens); }

    std::size_t bytes() const override { return sequence_.usage().bytes; }

private:
    model_shape shape_;
    cache cache_;
    typename cache::sequence_type sequence_;
    kvq::workspace workspace_;  // kept, so that decoding does not allocate
};

// Window is what sinks, recent tokens and pages not yet full are kept in.
template <class Keys, class Values, class Window = kvq::float16>
constexpr scheme_entry kvq_entry(std::string_view name) {
    using cache = kvq_cache<Keys, Values, Window>;
    return {name,
            [](const model_shape& shape, const cache_settings& settings) -> std::unique_ptr<kv_cache> {
                return std::make_unique<cache>(shape, settings);
            },
            [](const model_shape& shape, int page_tokens) {
                return kvq::bytes_per_token<Keys, Values>(coded_cache_shape(shape), page_tokens);
            }};
}

// As settings.statistics, for make functions of bench/quality_schemes.hpp.
inline const kvq::calibration* statistics_of(const cache_settings& settings) {
    return settings.use_statistics ? settings.statistics.get() : nullptr;
}

}  // namespace llama
