// A kvq cache that dequantizes each page once, when it is quantized. Attention is the textbook's, on the
// dequantized rows.
//
// For formats for which attention would dequantize every page for every query (tables, norms): the model
// reads the same values, up to rounding, in a fraction of the time.
#pragma once

#include "kvq_cache.hpp"
#include "reference_cache.hpp"

namespace llama {

class dequantized_cache final : public kv_cache {
public:
    // The window must be fp16.
    dequantized_cache(const model_shape& shape, const kvq::cache_options& options)
        : shape_(shape),
          cache_(cache_layers(shape), options),
          sequence_(cache_.new_sequence()),
          rows_(shape),
          quantized_(static_cast<std::size_t>(shape.layers), 0) {}

    void prefill(int layer, const const_rows& keys, const const_rows& values, const const_rows& queries,
                 rows out, kvq::thread_pool& workers) override {
        // Attention reads the chunk in 16 bit.
        rows_.prefill(layer, in_16_bit(keys), in_16_bit(values), queries, out, workers);
        quantize(layer, keys, values);
    }

    void append(int layer, const const_rows& keys, const const_rows& values) override {
        rows_.append(layer, in_16_bit(keys), in_16_bit(values));
        quantize(layer, keys, values);
    }

    kvq::recurrent_state* state() override { return shape_.has_state() ? &sequence_.state() : nullptr; }
    // A short trim restores tokens in 16 bit, so every row is read again.
    int trim(int tokens) override {
        const int again = sequence_.trim(tokens);
        rows_.trim(tokens - again);
        for (const int layer : shape_.attention_layers()) {
            dequantize(layer, 0, sequence_.tokens(layer));
            quantized_[static_cast<std::size_t>(layer)] = end_of_quantized(layer);
        }
        return again;
    }

    // Bytes of the pages; the dequantized rows do not count.
    std::size_t bytes() const override { return sequence_.usage().bytes; }

private:
    static matrix in_16_bit(const const_rows& x) { return x.cast<Eigen::half>().cast<float>(); }

    // Stores a chunk; rows of the pages that this quantizes are those of the pages from now on.
    void quantize(int layer, const const_rows& keys, const const_rows& values) {
        sequence_.append(layer, kvq::tokens_of(keys, shape_.kv_heads),
                         kvq::tokens_of(values, shape_.kv_heads));
        int& quantized = quantized_[static_cast<std::size_t>(layer)];
        const int before = quantized;
        quantized = end_of_quantized(layer);
        if (quantized > before) {
            dequantize(layer, before, quantized);
        }
    }

    // End of the last quantized page of a layer.
    int end_of_quantized(int layer) const {
        const kvq::layer_pages pages = sequence_.pages(layer);
        for (int i = pages.entries() - 1; i >= 0; --i) {
            const auto entry = pages.at(i);
            if (entry.keys->format != 0 || entry.values->format != 0) {
                return entry.first_token + entry.tokens;
            }
        }
        return 0;
    }

    // Rows of the pages from `first` to before `end` that the layer holds: one with a window has freed
    // others.
    void dequantize(int layer, int first, int end) {
        const kvq::layer_pages pages = sequence_.pages(layer);
        for (int i = 0; i < pages.entries(); ++i) {
            const auto entry = pages.at(i);
            if (entry.first_token < first || entry.first_token >= end) {
                continue;
            }
            auto keys = rows_.keys(layer, entry.first_token, entry.tokens),
                 values = rows_.values(layer, entry.first_token, entry.tokens);
            sequence_.dequantize(layer, kvq::tensor::key, entry.first_token,
                                 kvq::tokens_of(keys, shape_.kv_heads));
            sequence_.dequantize(layer, kvq::tensor::value, entry.first_token,
                                 kvq::tokens_of(values, shape_.kv_heads));
        }
    }

    model_shape shape_;
    kvq::cache cache_;
    kvq::sequence sequence_;
    reference_cache rows_;
    std::vector<int> quantized_;  // per layer: end of the last quantized page
};

}  // namespace llama
