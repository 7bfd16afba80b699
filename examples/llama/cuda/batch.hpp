// Many prompts on one engine, by continuous batching: a prompt joins the batch as soon as there is a row and
// memory for it, and leaves when its text ends. What all prompts begin with is read once, and forked.
#pragma once

#include "../sampler.hpp"
#include "engine.hpp"

#include <functional>

namespace llama::device {

struct request {
    std::vector<int> prompt;
    int steps = 0;  // tokens to generate at most
    sampling sampler{};
};

struct reply {
    std::vector<int> tokens;     // generated, the end of the text excluded
    double first_seconds = 0.0;  // from the start of the run to its first token
    std::size_t bytes = 0;       // of its pages at its end, shared ones included
};

struct batch_settings {
    std::function<bool(int token)> ends_text = [](int) { return false; };
    std::function<void(int request, int token)> on_token = [](int, int) {};
};

struct batch_result {
    std::vector<reply> replies;
    int shared_tokens = 0;  // that were read once for all
    int prompt_tokens = 0;  // that were read
    int generated_tokens = 0, steps = 0, largest_batch = 0;
    int evictions = 0;  // sequences that gave their memory to older ones, and were read again
    double prompt_seconds = 0.0, decode_seconds = 0.0;
};

// The engine's max_batch sequences run at the same time. Throws out_of_memory where not even one request
// fits.
batch_result run_batch(engine& on, std::span<const request> requests, const batch_settings& settings);

}  // namespace llama::device
