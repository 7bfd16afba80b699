// A context that outgrows its budget: pages step down while it grows, and the loss is measured on the way.
#pragma once

#include "live_settings.hpp"
#include "model.hpp"

#include <span>
#include <vector>

namespace llama {

// The state of both caches at a context of `tokens`.
struct long_context_row {
    int tokens;
    std::size_t baseline_bytes;  // of the 16-bit cache
    std::size_t bytes;
    std::size_t requantized;  // pages, since the last row
    std::vector<held_scheme> held;
    // Over the tokens since the last row, against the 16-bit cache.
    double kld, top1, perplexity, baseline_perplexity;
};

// Runs the tokens through a 16-bit cache and through a live one, `chunk` at a time; a row every `every`
// tokens.
std::vector<long_context_row> long_context(const model& llama, std::span<const int> tokens,
                                           const cache_settings& settings, const live_settings& live,
                                           int every, int chunk);

}  // namespace llama
