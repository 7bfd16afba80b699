// The reference cache, which also records its input.
#pragma once

#include "reference_cache.hpp"

#include <vector>

namespace llama {

class recording_cache final : public kv_cache {
public:
    struct recorded {
        std::vector<float> queries, keys, values;  // [token][head][channel]
    };

    explicit recording_cache(const model_shape& shape)
        : exact_(shape), shape_(shape), layers_(static_cast<std::size_t>(shape.layers)) {}

    const std::vector<recorded>& layers() const { return layers_; }

    void prefill(int layer, const const_rows& keys, const const_rows& values, const const_rows& queries,
                 rows out, kvq::thread_pool& workers) override {
        recorded& of = layers_[static_cast<std::size_t>(layer)];
        add(of.keys, keys);
        add(of.values, values);
        add(of.queries, queries);
        exact_.prefill(layer, keys, values, queries, out, workers);
    }
    void append(int layer, const const_rows& keys, const const_rows& values) override {
        recorded& of = layers_[static_cast<std::size_t>(layer)];
        add(of.keys, keys);
        add(of.values, values);
        exact_.append(layer, keys, values);
    }
    kvq::recurrent_state* state() override { return exact_.state(); }
    int trim(int tokens) override {
        const int again = exact_.trim(tokens);
        tokens -= again;
        for (recorded& of : layers_) {
            cut(of.keys, tokens, shape_.kv_dim());
            cut(of.values, tokens, shape_.kv_dim());
            cut(of.queries, tokens, shape_.query_dim());
        }
        return again;
    }
    std::size_t bytes() const override { return exact_.bytes(); }

private:
    static void add(std::vector<float>& to, const const_rows& from) {
        for (Eigen::Index row = 0; row < from.rows(); ++row) {
            to.insert(to.end(), from.row(row).begin(), from.row(row).end());
        }
    }
    static void cut(std::vector<float>& of, int tokens, int dim) {
        of.resize(std::min(of.size(), static_cast<std::size_t>(tokens) * static_cast<std::size_t>(dim)));
    }

    reference_cache exact_;
    model_shape shape_;
    std::vector<recorded> layers_;
};

}  // namespace llama
