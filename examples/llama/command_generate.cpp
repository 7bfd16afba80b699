#include "commands.hpp"
#include "read_file.hpp"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <stdexcept>

namespace llama {
namespace {

// The lines of --prompts, or --prompt.
std::vector<std::string> prompts_of(const options& chosen) {
    if (chosen.prompts_path.empty()) {
        return {chosen.generation.prompt};
    }
    std::istringstream text(read_file("prompts", chosen.prompts_path));
    std::vector<std::string> prompts;
    for (std::string line; std::getline(text, line);) {
        if (!line.empty()) {
            prompts.push_back(line);
        }
    }
    if (prompts.empty()) {
        throw std::invalid_argument("\"" + chosen.prompts_path + "\" has no prompts");
    }
    return prompts;
}

void write_result(const std::string& label, const generation_result& total) {
    std::fprintf(stderr,
                 "%s: %d tokens of prompts, %.1f tokens/s; %d tokens generated, %.1f tokens/s; "
                 "the cache held %d tokens in %zu bytes, %.1f bytes/token\n",
                 label.c_str(), total.prompt_tokens, total.prompt_tokens / total.prompt_seconds,
                 total.generated_tokens, total.generated_tokens / total.seconds, total.tokens_held,
                 total.bytes_held, static_cast<double>(total.bytes_held) / total.tokens_held);
    if (total.drafted_tokens > 0) {
        std::fprintf(stderr, "%d tokens drafted, %d accepted: %.1f %%\n", total.drafted_tokens,
                     total.accepted_tokens, 100.0 * total.accepted_tokens / total.drafted_tokens);
    }
}

void run_generate(const options& chosen) {
    if (is_on_device(chosen)) {
        const model_weights weights = weights_of(chosen);
        const scheme_choice scheme = plain_scheme_of(chosen);
        generation_settings settings = chosen.generation;
        settings.chunk = chosen.chunk;
        const tokenizer pieces = tokenizer_of(chosen, weights.config.shape);
        write_result(scheme.label, generate_on_device(weights, pieces, scheme, settings, prompts_of(chosen),
                                                      chosen.samples, device_settings_of(chosen), std::cout));
        return;
    }
    if (!chosen.prompts_path.empty()) {
        throw std::invalid_argument("--prompts needs --device cuda");
    }
    const model model(weights_of(chosen));
    const tokenizer pieces = tokenizer_of(chosen, model.shape());
    scheme_choice scheme = scheme_of(chosen);

    generation_result total;
    generation_settings settings = chosen.generation;
    settings.chunk = chosen.chunk;
    if (settings.draft > 0) {  // what it trims comes back exactly
        scheme.settings.rollback = std::max(scheme.settings.rollback, settings.draft + 1);
    }
    for (int sample = 0; sample < chosen.samples; ++sample) {
        std::cout << (sample > 0 ? "\n" : "");
        const auto result = generate(model, pieces, scheme, settings, std::cout);
        total.prompt_tokens += result.prompt_tokens;
        total.prompt_seconds += result.prompt_seconds;
        total.generated_tokens += result.generated_tokens;
        total.drafted_tokens += result.drafted_tokens;
        total.accepted_tokens += result.accepted_tokens;
        total.seconds += result.seconds;
        total.tokens_held += result.tokens_held;
        total.bytes_held += result.bytes_held;
        ++settings.sampler.seed;
    }
    write_result(scheme.label, total);
}

}  // namespace

void add_generate(CLI::App& app, options& chosen) {
    CLI::App& generate = *app.add_subcommand("generate", "Continue a prompt.");
    add_model_options(generate, chosen);
    add_cache_options(generate, chosen.cache);
    generate.add_option("--tokenizer", chosen.tokenizer_path, tokenizer_help);
    generate.add_option("--scheme", chosen.scheme, "how the cache is quantized")->capture_default_str();
    add_pair_options(generate, chosen, "in place of --scheme");
    generate.add_option("--prompt", chosen.generation.prompt, "text to continue");
    generate
        .add_option("--steps", chosen.generation.steps, "tokens to generate, 0: until the context is full")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    generate
        .add_option("--temperature", chosen.generation.sampler.temperature, "0: always the likeliest token")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    generate
        .add_option("--top-p", chosen.generation.sampler.top_p, "share of the likeliest tokens to draw from")
        ->check(CLI::Range(0.0, 1.0))
        ->capture_default_str();
    generate.add_option("--seed", chosen.generation.sampler.seed, "seed of the random numbers")
        ->capture_default_str();
    generate.add_option("--samples", chosen.samples, "texts to generate, one seed after the other")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    generate
        .add_option("--draft", chosen.generation.draft,
                    "tokens that the model drafts from the upper planes of nested8 before it checks them")
        ->check(CLI::Range(0, 16))
        ->capture_default_str();
    generate.add_flag("--ignore-eos", chosen.generation.ignore_eos,
                      "never choose an end of text, for speeds at a given length");
    generate.add_option("--load", chosen.generation.load, "go on from a saved cache");
    generate.add_option("--save", chosen.generation.save,
                        "save the cache afterwards; its formats: --tiers, --requantize-at, or 16 bit");
    add_chunk_option(generate, chosen);
    generate
        .add_option("--threads", chosen.generation.threads,
                    "threads that read the prompt and answer queries; the text is the same on any number")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    add_live_options(generate, chosen);
    add_device_options(generate, chosen);
    generate.add_option("--prompts", chosen.prompts_path,
                        "on the device: a file with a prompt in every line");
    generate.add_option("--batch", chosen.on_device.batch, "on the device: texts that grow at the same time")
        ->check(CLI::Range(1, 4096))
        ->capture_default_str();
    generate.callback([&] { run_generate(chosen); });
}

}  // namespace llama
