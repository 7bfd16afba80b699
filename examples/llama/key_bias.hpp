// Keys with large biases, as those of Qwen2: how large they are, and what 8-bit formats and 16 bits make of
// them.
//
//   amplitude of a pair of channels = sqrt(E[k^2] - var(k)) over both, var within groups of 64 tokens: RoPE
//   turns slow pairs little in 64 tokens, so what is left is a bias
//   error = |o' - o| / |o| of attention outputs, mean over heads, in double on dequantized keys and values
#pragma once

#include "model.hpp"
#include "recording_cache.hpp"
#include "schemes.hpp"

#include <span>
#include <string>
#include <vector>

namespace llama {

struct key_bias {
    int layer = 0, head = 0, pair = 0;  // the largest one
    double amplitude = 0.0;
    double usual = 0.0;  // the median standard deviation of the channels of its head
    double ratio() const { return usual > 0.0 ? amplitude / usual : 0.0; }
};

// Of pairs that turn by at most one radian in 64 tokens; all pairs where no one does.
key_bias find_key_bias(const model_config& config, const kvq::calibration& statistics);

struct attention_error {
    std::string scheme;
    double bits = 0.0;
    double mean = 0.0, worst_head = 0.0;
    double kl_divergence = 0.0;  // of attention weights
};

// Errors on the recorded tokens, for queries of their second half. Window: the sinks and recent tokens of the
// scheme, exact.
std::vector<attention_error> attention_errors(const model_shape& shape, const recording_cache& recorded,
                                              std::span<const scheme_choice> schemes,
                                              kvq::thread_pool& workers);

}  // namespace llama
