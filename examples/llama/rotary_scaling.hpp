// How models stretch their rotary frequencies to longer contexts.
//
//   linear   every frequency / factor
//   llama3   kvq::llama3_frequencies        yarn   kvq::yarn_frequencies; the amplitude is 0.1 ln(factor) + 1
//
// Source: YaRN, Peng et al., arXiv 2309.00071; the names are those of `rope_scaling` in config.json.
#pragma once

#include "model_config.hpp"

#include <string>

namespace llama {

struct rotary_scaling {
    std::string type = "none";  // none, default, linear, llama3, yarn
    double factor = 1.0;
    double original_context = 0.0;                         // tokens that the model was trained with first
    double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
    double beta_fast = 32.0, beta_slow = 1.0;              // yarn
    double amplitude = 0.0;                                // yarn; 0: as above
};

// theta: base of the frequencies. Throws std::runtime_error (or kvq::error, for impossible numbers) that
// names what is not handled.
rotary_angles scaled_angles(int head_dim, double theta, const rotary_scaling& scaling);

}  // namespace llama
