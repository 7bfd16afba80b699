// A cache whose keys take their plan from the first tokens of its own text (kvq/policy/self_calibration.hpp).
// Until then keys are 16 bit.
#pragma once

#include "kvq_cache.hpp"

#include <kvq/policy/self_calibration.hpp>

#include <algorithm>
#include <functional>
#include <utility>

namespace llama {

class self_calibrating_cache final : public kvq_cache {
public:
    // Makes the format of keys from statistics.
    using format_maker = std::function<kvq::format(const kvq::calibration&)>;

    // options.keys: the format until then.
    self_calibrating_cache(const model_shape& shape, const kvq::cache_options& options, int tokens,
                           format_maker make)
        : kvq_cache(shape, options), tokens_(tokens), own_(cache_, tokens), make_(std::move(make)) {}

    void prefill(int layer, const const_rows& keys, const const_rows& values, const const_rows& queries,
                 rows out, kvq::thread_pool& workers) override {
        own_.add_queries(layer, kvq::tokens_of(queries, shape_.heads));
        kvq_cache::prefill(layer, keys, values, queries, out, workers);
    }

    void end_of_step(int, bool) override { own_.apply(sequence_, make_); }
    int step_tokens() const override {
        return own_.done() ? kvq_cache::step_tokens() : std::max(1, tokens_ - sequence_.tokens());
    }

private:
    int tokens_;
    kvq::self_calibration own_;
    format_maker make_;
};

}  // namespace llama
