// A slot of a server: it keeps a prompt, reads a turn of text after it, trims to the prompt and reads the
// next turn.
#pragma once

#include "model.hpp"
#include "schemes.hpp"

#include <span>
#include <string>
#include <vector>

namespace llama {

struct slot_settings {
    int prompt_tokens = 991;  // begin-of-text included; usually not a multiple of page_tokens
    int turns = 64;
    int turn_tokens = 256;
    int chunk = 512;
    bool varying = false;  // other text is read and trimmed before each turn
    int threads = 2;
    bool show_progress = false;
};

struct slot_result {
    std::string scheme;
    std::vector<double> perplexity;  // of each turn

    // The largest |perplexity / that of the second turn - 1| from the second turn on, and its turn (1, 2,
    // ...).
    // The first turn does not count: it may read the last tokens of the prompt in 16 bit, which its own
    // tokens then quantize.
    double drift = 0.0;
    int drift_turn = 2;
};

// Every turn reads and predicts the same text after the prompt: a cache whose trims lose nothing has the same
// perplexity in every turn from the second one on, bit for bit. Throws std::invalid_argument when the text or
// the context is too short.
std::vector<slot_result> run_slot(const model& llama, std::span<const int> tokens,
                                  std::span<const scheme_choice> schemes, const slot_settings& settings);

}  // namespace llama
