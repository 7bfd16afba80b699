// A kvq cache whose pages are dequantized once, when they are quantized; attention is the textbook's, on the dequantized rows.
//
// For schemes that attention could only run by dequantizing every page for every query (tables, norms): what the model sees is
// the same up to the rounding of attention's integer products (5e-4), in a fraction of the time, to run and to compile.
#pragma once

#include "kvq_cache.hpp"
#include "reference_cache.hpp"

namespace llama {

template <class Keys, class Values>
class decoded_cache final : public kv_cache {
    using cache = kvq::cache<Keys, Values>;

public:
    decoded_cache(const model_shape& shape, const cache_settings& settings, Keys keys = {},
                  Values values = {})
        : shape_(shape),
          cache_(coded_cache_shape(shape),
                 {.sinks = settings.sinks, .recent = settings.recent, .page_tokens = settings.page_tokens},
                 typename cache::key_table(std::move(keys)), typename cache::value_table(std::move(values))),
          sequence_(cache_.new_sequence()),
          rows_(shape),
          quantized_(static_cast<std::size_t>(shape.layers), 0) {}

    void prefill(int layer, const const_rows& keys, const const_rows& values, const const_rows& queries,
                 rows out, worker_pool& workers) override {
        // The queries see the chunk in 16 bit.
        rows_.prefill(layer, in_16_bit(keys), in_16_bit(values), queries, out, workers);
        sequence_.append(layer, kvq::tokens_of(keys, shape_.kv_heads),
                         kvq::tokens_of(values, shape_.kv_heads));
        int& quantized = quantized_[static_cast<std::size_t>(layer)];
        const int before = quantized;
        quantized = end_of_quantized(layer);
        if (quantized > before) {
            dequantize(layer, before, quantized);
        }
    }

    // A short cut brings back what was in 16 bit before, so every row is read again.
    void trim(int tokens) override {
        sequence_.trim(tokens);
        rows_.trim(tokens);
        for (int layer = 0; layer < shape_.layers; ++layer) {
            dequantize(layer, 0, sequence_.tokens(layer));
            quantized_[static_cast<std::size_t>(layer)] = end_of_quantized(layer);
        }
    }

    // What the pages take; the dequantized rows are this program's own.
    std::size_t bytes() const override { return sequence_.usage().bytes; }

private:
    static matrix in_16_bit(const const_rows& x) {
        return x.template cast<Eigen::half>().template cast<float>();
    }

    // Behind the last quantized page of a layer.
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

    // Rows from `first` to before `end`.
    void dequantize(int layer, int first, int end) {
        auto keys = rows_.keys(layer, first, end - first), values = rows_.values(layer, first, end - first);
        sequence_.decode(layer, kvq::tensor::key, first, kvq::tokens_of(keys, shape_.kv_heads));
        sequence_.decode(layer, kvq::tensor::value, first, kvq::tokens_of(values, shape_.kv_heads));
    }

    model_shape shape_;
    cache cache_;
    typename cache::sequence_type sequence_;
    reference_cache rows_;
    std::vector<int> quantized_;  // of each layer, where the last quantized page ends
};

// An entry whose caches are Cache<Keys, Values> made with make_keys(statistics or null).
template <template <class...> class Cache, class Keys, class Values, class MakeKeys>
scheme_entry entry_with(std::string_view name, MakeKeys) {
    return {name,
            [](const model_shape& shape, const cache_settings& settings) -> std::unique_ptr<kv_cache> {
                return std::make_unique<Cache<Keys, Values>>(shape, settings,
                                                             MakeKeys{}(statistics_of(settings)));
            },
            [](const model_shape& shape, int page_tokens) {
                return kvq::bytes_per_token<Keys, Values>(coded_cache_shape(shape), page_tokens);
            }};
}

// Collects entries from a family of bench/quality_schemes.hpp.
struct collect_decoded {
    std::vector<scheme_entry>& entries;

    template <class Keys, class Values>
    void operator()(const char* name, const char*) const {
        entries.push_back(
            entry_with<decoded_cache, Keys, Values>(name, [](const kvq::calibration*) { return Keys{}; }));
    }
    template <class Keys, class Values, class MakeKeys>
    void with_statistics(const char* name, const char*, MakeKeys make) const {
        entries.push_back(entry_with<decoded_cache, Keys, Values>(name, make));
    }
};

}  // namespace llama
