// Intervals of what is summed over blocks of tokens: the blocks are drawn again with replacement, 1000 times.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>
#include <vector>

namespace llama {

// A value and the interval that 95 of 100 resamplings of the blocks give.
struct interval {
    double value = 0.0, low = 0.0, high = 0.0;
};

// What is resampled: tokens that belong together.
struct block_sums {
    double tokens = 0.0, likelihood_change = 0.0, divergence = 0.0;

    // Change of the perplexity in percent, and mean KL divergence.
    double ppl_change_pct() const { return 100.0 * std::expm1(likelihood_change / tokens); }
    double kl_divergence() const { return divergence / tokens; }
};

// The block with the largest divergence; one without change where there is none.
inline block_sums worst_of(const std::vector<block_sums>& blocks) {
    const auto worst = std::max_element(
        blocks.begin(), blocks.end(),
        [](const block_sums& a, const block_sums& b) { return a.kl_divergence() < b.kl_divergence(); });
    return worst == blocks.end() ? block_sums{1.0, 0.0, 0.0} : *worst;
}

// A statistic of all blocks, and its 2.5 and 97.5 percentiles; of fewer than two blocks these are the value.
template <class Statistic>
interval bootstrap(const std::vector<block_sums>& blocks, const Statistic& statistic) {
    const auto of = [&](const auto& choose) {
        block_sums sum;
        for (std::size_t i = 0; i < blocks.size(); ++i) {
            const block_sums& block = blocks[choose(i)];
            sum.tokens += block.tokens;
            sum.likelihood_change += block.likelihood_change;
            sum.divergence += block.divergence;
        }
        return statistic(sum);
    };
    interval result;
    result.value = result.low = result.high = of([](std::size_t i) { return i; });
    if (blocks.size() < 2) {
        return result;
    }
    std::mt19937 random(1);
    std::vector<double> values;
    for (int turn = 0; turn < 1000; ++turn) {
        values.push_back(of([&](std::size_t) { return random() % blocks.size(); }));
    }
    std::sort(values.begin(), values.end());
    result.low = values[25];
    result.high = values[974];
    return result;
}

inline interval ppl_change_pct_of(const std::vector<block_sums>& blocks) {
    return bootstrap(blocks, [](const block_sums& s) { return s.ppl_change_pct(); });
}
inline interval kl_divergence_of(const std::vector<block_sums>& blocks) {
    return bootstrap(blocks, [](const block_sums& s) { return s.kl_divergence(); });
}

}  // namespace llama
