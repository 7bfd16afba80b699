// A slot of a server: it keeps a prompt, takes a turn of text behind it, cuts back to the prompt and takes the next turn.
#pragma once

#include "model.hpp"
#include "schemes.hpp"

#include <span>
#include <string>
#include <vector>

namespace llama {

struct slot_settings {
    int prompt_tokens = 991;  // begin-of-text included; in general no whole number of pages
    int turns = 64;
    int turn_tokens = 256;
    int chunk = 512;
    bool varying = false;  // other text is read and cut off again before each turn
    int threads = 2;
    bool show_progress = false;
};

struct slot_result {
    std::string scheme;
    std::vector<double> perplexity;  // of each turn

    // The largest |perplexity / that of the second turn - 1| from the second turn on, and the turn (1, 2, ...) that has it.
    // The first turn is left out: it may find the last tokens of the prompt in 16 bit, which its own tokens then quantize.
    double drift = 0.0;
    int drift_turn = 2;
};

// Every turn reads and judges the same text, the one behind the prompt: a cache that loses nothing by a cut gives every turn
// the perplexity of the second one, to the bit. Throws std::invalid_argument where the text or the context is too short.
std::vector<slot_result> run_slot(const model& llama, std::span<const int> tokens,
                                  std::span<const scheme_choice> schemes, const slot_settings& settings);

}  // namespace llama
