// Text, token by token, from a cache of any scheme.
#pragma once

#include "model.hpp"
#include "sampler.hpp"
#include "schemes.hpp"
#include "tokenizer.hpp"

#include <iosfwd>
#include <string>

namespace llama {

struct generation_settings {
    std::string prompt;
    int chunk = 512;  // tokens of the prompt per prefill
    int threads = 1;
    int steps = 0;  // 0: until the context is full
    int draft = 0;  // tokens to draft from the upper planes before a pass over both checks them; 0: none
    bool ignore_eos = false;  // no token that ends the text is chosen
    sampling sampler;
    std::string load, save;  // files of a live cache (live_cache.hpp): continue from one, write one
};

struct generation_result {
    int prompt_tokens = 0;        // begin-of-text included, without the tokens of a loaded cache
    double prompt_seconds = 0.0;  // time to read the prompt
    int generated_tokens = 0;
    int drafted_tokens = 0, accepted_tokens = 0;
    double seconds = 0.0;  // for the generated tokens alone
    int tokens_held = 0;
    std::size_t bytes_held = 0;
};

// Streams the prompt and its continuation up to an end-of-text token.
// Throws std::invalid_argument when prompt and steps do not fit into the context, or when there are no tokens
// to continue.
generation_result generate(const model& llama, const tokenizer& pieces, const scheme_choice& scheme,
                           const generation_settings& settings, std::ostream& out);

}  // namespace llama
