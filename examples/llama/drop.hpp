// Half of the tokens of a prompt, or another share, chosen head by head at its end
// (kvq/policy/kept_tokens.hpp), before they are quantized: what the cache holds then, and how the model goes
// on.
#pragma once

#include "model.hpp"
#include "schemes.hpp"

#include <span>
#include <string>
#include <vector>

namespace llama {

struct drop_settings {
    int prompt = 0;                      // tokens of a window that are its prompt; 0: half of them
    std::vector<double> keep{1.0, 0.5};  // shares of the prompt
    std::string policy = "snapkv";       // or "knorm"
    int queries = 64;                    // last ones of the prompt, whose tokens are kept
    int probes = 4;                      // runs of a window that are sought
    int chunk = 512;
    bool show_progress = false;
};

struct drop_result {
    std::string scheme;
    double keep;
    std::size_t bytes;  // of the sequences at the ends of their prompts
    double of_fp16;     // these, divided by those of fp16 with all tokens
    int tokens;         // predicted behind the prompts
    double perplexity, kld, top1;
    // Runs of a prompt that follow it once more, by their first tokens: share of the others that is the
    // likeliest. cued: the first tokens are the end of the prompt, before tokens are dropped.
    double recalled, recalled_cued;
};

// The first scheme is the baseline, with all tokens.
std::vector<drop_result> drop(const model& llama, std::span<const int> tokens,
                              std::span<const scheme_choice> schemes, int window, int threads,
                              const drop_settings& settings);

}  // namespace llama
