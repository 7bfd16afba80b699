#include "commands.hpp"

#include <cstdio>
#include <iostream>

namespace llama {
namespace {

void run_generate(const options& chosen) {
    const model model(load_model(chosen.model_path, chosen.rope_theta));
    const tokenizer pieces = tokenizer_of(chosen, model);
    const scheme_choice scheme = scheme_of(chosen);

    generation_result total;
    generation_settings settings = chosen.generation;
    settings.chunk = chosen.chunk;
    for (int sample = 0; sample < chosen.samples; ++sample) {
        std::cout << (sample > 0 ? "\n" : "");
        const auto result = generate(model, pieces, scheme, settings, std::cout);
        total.prompt_tokens += result.prompt_tokens;
        total.prompt_seconds += result.prompt_seconds;
        total.generated_tokens += result.generated_tokens;
        total.seconds += result.seconds;
        total.tokens_held += result.tokens_held;
        total.bytes_held += result.bytes_held;
        ++settings.sampler.seed;
    }
    std::fprintf(stderr,
                 "%s: %d tokens of prompts, %.1f tokens/s; %d tokens generated, %.1f tokens/s; "
                 "the cache held %d tokens in %zu bytes, %.1f bytes/token\n",
                 scheme.label.c_str(), total.prompt_tokens, total.prompt_tokens / total.prompt_seconds,
                 total.generated_tokens, total.generated_tokens / total.seconds, total.tokens_held,
                 total.bytes_held, static_cast<double>(total.bytes_held) / total.tokens_held);
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
    generate.add_option("--seed", chosen.generation.sampler.seed, "of the random numbers")
        ->capture_default_str();
    generate.add_option("--samples", chosen.samples, "texts to generate, one seed after the other")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
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
    generate.callback([&] { run_generate(chosen); });
}

}  // namespace llama
