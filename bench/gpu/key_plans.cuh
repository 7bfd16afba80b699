// Plans of widths for keys of several widths: of channels whose standard deviations differ, exp(normal).
#pragma once

#include <kvq/cuda.cuh>

#include <cmath>
#include <random>
#include <vector>

#include "timing.cuh"

namespace bench {

/// Statistics of keys alone.
inline kvq::calibration spread_statistics(int layers, int kv_heads, int dim) {
    constexpr int tokens = 64;
    kvq::calibration statistics({layers, kv_heads, dim, dim}, false);
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    const auto n = static_cast<std::size_t>(kv_heads * dim);
    for (int layer = 0; layer < layers; ++layer) {
        std::vector<float> deviations(n), keys(n * tokens);
        for (float& x : deviations) x = std::exp(normal(random));
        for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = normal(random) * deviations[i % n];
        statistics.add_keys(layer, kvq::token_view<const float>(keys.data(), tokens, kv_heads, dim));
    }
    return statistics;
}

/// One layer's plans on the device, for cache_ref::key_plans.
template <class Format>
std::uint16_t* key_plans(int kv_heads) {
    const typename Format::keys keys(spread_statistics(1, kv_heads, Format::head_dim));
    std::vector<std::uint16_t> words(static_cast<std::size_t>(kv_heads * kvq::cuda::key_plan_words<Format>));
    kvq::cuda::write_key_plan<Format>(*keys.plan(), 0, words.data());
    return on_device(words);
}

}  // namespace bench
