// Picks the next token from logits.
#pragma once

#include <cstdint>
#include <random>
#include <span>

namespace llama {

struct sampling {
    double temperature = 0.8;  // 0: always the likeliest token
    double top_p = 0.9;        // draw from the likeliest tokens whose probabilities sum to this
    std::uint64_t seed = 1;
};

class sampler {
public:
    explicit sampler(const sampling& settings) : settings_(settings), random_(settings.seed) {}

    int operator()(std::span<const float> logits);

private:
    sampling settings_;
    std::mt19937_64 random_;
};

}  // namespace llama
