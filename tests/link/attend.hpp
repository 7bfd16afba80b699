// SPDX-License-Identifier: MIT
// One small attention problem, computed with whatever backend the including file was compiled for.
#pragma once

#include <cmath>
#include <kvq/kvq.hpp>
#include <vector>

std::vector<float> attend_narrow();
std::vector<float> attend_wide();

namespace {

template <class Backend>
std::vector<float> attend() {
    constexpr int tokens = 150, heads = 2, dim = 64;
    using scheme = kvq::kivi<4, 32>;
    kvq::cache<scheme::keys, scheme::values, Backend> cache(
        {.layers = 1, .kv_heads = heads, .head_dim = dim});
    auto sequence = cache.new_sequence();

    const auto wave = [](int n, float step) {
        std::vector<float> x(static_cast<std::size_t>(n));
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(step * static_cast<float>(i));
        return x;
    };
    const auto k = wave(tokens * heads * dim, 0.37F);
    const auto v = wave(tokens * heads * dim, 0.11F);
    const auto q = wave(heads * dim, 0.53F);
    std::vector<float> out(q.size());
    sequence.append(0, kvq::token_view<const float>(k.data(), tokens, heads, dim),
                    kvq::token_view<const float>(v.data(), tokens, heads, dim));
    sequence.attend(0, kvq::token_view<const float>(q.data(), 1, heads, dim),
                    kvq::token_view<float>(out.data(), 1, heads, dim));
    return out;
}

}  // namespace
