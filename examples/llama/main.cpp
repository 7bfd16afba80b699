// kvq_llama generate | evaluate | chunks | slot | dump | long-context: a small Llama engine whose KV cache is kvq.
#include "cuda/on_device.hpp"
#include "dump.hpp"
#include "evaluate.hpp"
#include "generate.hpp"
#include "live_cache.hpp"
#include "load_model.hpp"
#include "load_tokenizer.hpp"
#include "long_context.hpp"
#include "progress.hpp"
#include "read_file.hpp"
#include "report.hpp"
#include "slot.hpp"
#include "statistics.hpp"
#include "token_source.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

namespace {

struct options {
    std::string model_path, tokenizer_path, input_path;
    double rope_theta = 0.0;
    llama::cache_settings cache;
    std::string keys, values;  // one more scheme

    std::string scheme = "kivi-4+s4+r32";
    int samples = 1;
    llama::generation_settings generation;

    std::vector<std::string> schemes{"int8",          "affine-8",      "affine-4",     "affine-3",
                                     "affine-2",      "kivi-4",        "kivi-3",       "kivi-2",
                                     "kivi-4+s4+r32", "kivi-3+s4+r32", "kivi-2+s4+r32"};
    int window = 0, tokens = 0, skip = 0;
    std::string statistics_path;
    int statistics_tokens = 2048;
    llama::evaluation_settings evaluation{.chunk = 0};
    bool json = false;
    int chunk = 512;

    std::vector<int> chunks{1, 8, 32, 128, 512};
    double chunk_bound = 0.2, slot_bound = 0.0;  // percent
    llama::slot_settings slot;

    std::string directory;
    llama::dump_settings dump;

    llama::live_settings live;
    int every = 128;

    std::string device = "cpu", prompts_path;
    llama::device_settings on_device;
};

bool is_on_device(const options& chosen) { return chosen.device == "cuda"; }

bool is_live(const options& chosen) {
    return !chosen.live.tiers.empty() || chosen.live.requantize_at > 0 || chosen.live.reload_at > 0 ||
           !chosen.generation.load.empty() || !chosen.generation.save.empty();
}

// The schemes of --keys and --values; if only one is given, it is for both.
std::string pair_of(const options& chosen) {
    const std::string& keys = chosen.keys.empty() ? chosen.values : chosen.keys;
    return keys + '/' + (chosen.values.empty() ? keys : chosen.values);
}
bool has_pair(const options& chosen) { return !chosen.keys.empty() || !chosen.values.empty(); }

// Says where a page cannot hold what the scheme's name promises.
llama::scheme_choice parse_aloud(const std::string& name, const llama::cache_settings& settings) {
    llama::scheme_choice scheme = llama::parse_scheme(name, settings);
    if (const std::string remark = llama::page_remark(scheme); !remark.empty()) {
        std::fprintf(stderr, "kvq_llama: %s\n", remark.c_str());
    }
    return scheme;
}

llama::scheme_choice scheme_of(const options& chosen) {
    if (is_live(chosen)) {
        return llama::live_scheme(chosen.live, chosen.cache);
    }
    return parse_aloud(has_pair(chosen) ? pair_of(chosen) : chosen.scheme, chosen.cache);
}

// The tokenizer of --tokenizer, or the one that comes with the model.
llama::tokenizer tokenizer_of(const options& chosen, int vocab) {
    if (chosen.tokenizer_path.empty() && !llama::has_tokenizer(chosen.model_path)) {
        throw std::invalid_argument(
            "\"" + chosen.model_path +
            "\" has no tokenizer: a text needs --tokenizer (a file of token ids ends in "
            ".u16 or .u32)");
    }
    llama::tokenizer pieces =
        llama::load_tokenizer(chosen.tokenizer_path.empty() ? chosen.model_path : chosen.tokenizer_path);
    llama::check_vocabulary(pieces, vocab);
    return pieces;
}

// On the device, tiers are formats of its cache.
llama::device_settings device_settings_of(const options& chosen) {
    llama::device_settings on = chosen.on_device;
    on.live = chosen.live;
    if (chosen.live.requantize_at > 0 || chosen.live.reload_at > 0) {
        throw std::invalid_argument("--requantize-at and --reload-at are for the CPU");
    }
    return on;
}

// The lines of --prompts, or --prompt.
std::vector<std::string> prompts_of(const options& chosen) {
    if (chosen.prompts_path.empty()) {
        return {chosen.generation.prompt};
    }
    std::istringstream text(llama::read_file("prompts", chosen.prompts_path));
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

void write_generation(const std::string& label, const llama::generation_result& total) {
    std::fprintf(stderr,
                 "%s: %d tokens of prompts, %.1f tokens/s; %d tokens generated, %.1f tokens/s; "
                 "the cache held %d tokens in %zu bytes, %.1f bytes/token\n",
                 label.c_str(), total.prompt_tokens, total.prompt_tokens / total.prompt_seconds,
                 total.generated_tokens, total.generated_tokens / total.seconds, total.tokens_held,
                 total.bytes_held, static_cast<double>(total.bytes_held) / total.tokens_held);
}

void run_generate(const options& chosen) {
    if (is_on_device(chosen)) {
        const llama::model_weights weights = llama::load_model(chosen.model_path, chosen.rope_theta);
        const llama::scheme_choice scheme =
            parse_aloud(has_pair(chosen) ? pair_of(chosen) : chosen.scheme, chosen.cache);
        llama::generation_settings settings = chosen.generation;
        settings.chunk = chosen.chunk;
        const auto total = llama::generate_on_device(
            weights, tokenizer_of(chosen, weights.config.shape.vocab), scheme, settings, prompts_of(chosen),
            chosen.samples, device_settings_of(chosen), std::cout);
        write_generation(scheme.label, total);
        return;
    }
    if (!chosen.prompts_path.empty()) {
        throw std::invalid_argument("--prompts needs --device cuda");
    }
    const llama::model model(llama::load_model(chosen.model_path, chosen.rope_theta));
    const llama::tokenizer pieces = tokenizer_of(chosen, model.shape().vocab);
    const llama::scheme_choice scheme = scheme_of(chosen);

    llama::generation_result total;
    llama::generation_settings settings = chosen.generation;
    settings.chunk = chosen.chunk;
    for (int sample = 0; sample < chosen.samples; ++sample) {
        std::cout << (sample > 0 ? "\n" : "");
        const auto result = llama::generate(model, pieces, scheme, settings, std::cout);
        total.prompt_tokens += result.prompt_tokens;
        total.prompt_seconds += result.prompt_seconds;
        total.generated_tokens += result.generated_tokens;
        total.seconds += result.seconds;
        total.tokens_held += result.tokens_held;
        total.bytes_held += result.bytes_held;
        ++settings.sampler.seed;
    }
    write_generation(scheme.label, total);
}

std::vector<int> read_input(const options& chosen, const std::string& path, int vocab) {
    if (path.ends_with(".u16") || path.ends_with(".u32")) {
        return llama::read_token_ids(path, vocab);
    }
    return llama::read_text(path, tokenizer_of(chosen, vocab));
}

int window_of(const options& chosen, const llama::model_shape& shape) {
    const int window = chosen.window > 0 ? chosen.window : std::min(512, shape.context);
    if (window < 2 || window > shape.context) {
        throw std::invalid_argument("--window " + std::to_string(window) +
                                    " is not between 2 and the context of " + std::to_string(shape.context) +
                                    " tokens");
    }
    return window;
}

// fp16, which is always the baseline, and the chosen schemes.
std::vector<llama::scheme_choice> schemes_of(const options& chosen) {
    std::vector<llama::scheme_choice> schemes{
        llama::parse_scheme("fp16", {.page_tokens = chosen.cache.page_tokens})};
    for (const std::string& name : chosen.schemes) {
        if (name != "fp16") {
            schemes.push_back(parse_aloud(name, chosen.cache));
        }
    }
    if (has_pair(chosen)) {
        schemes.push_back(parse_aloud(pair_of(chosen), chosen.cache));
    }
    if (is_live(chosen)) {
        schemes.push_back(llama::live_scheme(chosen.live, chosen.cache));
    }
    return schemes;
}

void give_statistics(const options& chosen, const llama::model& model, const std::vector<int>& tokens,
                     std::vector<llama::scheme_choice>& schemes) {
    if (std::none_of(schemes.begin(), schemes.end(), [](const auto& s) { return s.use_statistics; })) {
        return;
    }
    std::vector<int> text = chosen.statistics_path.empty()
                                ? tokens
                                : read_input(chosen, chosen.statistics_path, model.shape().vocab);
    text.resize(std::min(text.size(), static_cast<std::size_t>(chosen.statistics_tokens)));
    const kvq::calibration statistics =
        llama::gather_statistics(model, text, window_of(chosen, model.shape()));
    for (llama::scheme_choice& scheme : schemes) {
        scheme.give_statistics(statistics);
    }
}

// The input after --skip and --tokens.
std::vector<int> part_of(const options& chosen, std::vector<int> tokens) {
    tokens.erase(tokens.begin(), tokens.begin() + std::min<std::ptrdiff_t>(chosen.skip, std::ssize(tokens)));
    if (chosen.tokens > 0 && static_cast<std::size_t>(chosen.tokens) < tokens.size()) {
        tokens.resize(static_cast<std::size_t>(chosen.tokens));
    }
    if (tokens.empty()) {
        throw std::invalid_argument("--skip " + std::to_string(chosen.skip) + " leaves no tokens");
    }
    return tokens;
}

// "8 layers, 8/2 heads of 64 channels; pages of 32; "
void write_model(const options& chosen, const llama::model_shape& shape) {
    std::cout << shape.layers << " layers, " << shape.heads << '/' << shape.kv_heads << " heads of "
              << shape.head_dim() << " channels; pages of " << chosen.cache.page_tokens << "; ";
}

// A window must be several chunks long: within its own chunk a query reads only 16-bit tokens, for every scheme.
int chunk_of(const options& chosen, int window) {
    constexpr int usual = 512, chunks_of_window = 4;
    if (chosen.evaluation.chunk >= window) {
        std::fprintf(
            stderr,
            "kvq_llama: a window of %d tokens is one chunk of %d: every query sees 16 bit, and no scheme is "
            "judged\n",
            window, chosen.evaluation.chunk);
    }
    return chosen.evaluation.chunk > 0 ? chosen.evaluation.chunk
                                       : std::min(usual, std::max(1, window / chunks_of_window));
}

void run_evaluate(const options& chosen) {
    std::vector<llama::scheme_choice> schemes = schemes_of(chosen);
    llama::model_weights weights = llama::load_model(chosen.model_path, chosen.rope_theta);
    const llama::model_shape shape = weights.config.shape;
    llama::evaluation_settings settings = chosen.evaluation;
    settings.window = window_of(chosen, shape);
    settings.chunk = chunk_of(chosen, settings.window);
    std::vector<int> tokens = read_input(chosen, chosen.input_path, shape.vocab);
    std::vector<llama::scheme_result> results;
    if (is_on_device(chosen)) {
        tokens = part_of(chosen, std::move(tokens));
        results = llama::evaluate_on_device(weights, tokens, schemes, settings, device_settings_of(chosen));
    } else {
        const llama::model model(std::move(weights));
        give_statistics(chosen, model, tokens, schemes);
        tokens = part_of(chosen, std::move(tokens));
        results = llama::evaluate(model, tokens, schemes, settings);
    }
    if (chosen.json) {
        llama::write_json(std::cout, results);
    } else {
        write_model(chosen, shape);
        std::cout << tokens.size() << " tokens in windows of " << settings.window << " and chunks of "
                  << settings.chunk << "\n\n";
        llama::write_table(std::cout, results);
    }
}

int run_chunks(const options& chosen) {
    if (chosen.chunks.size() < 2) {
        throw std::invalid_argument("--chunks needs two sizes or more, to compare them");
    }
    std::vector<llama::scheme_choice> schemes = schemes_of(chosen);
    const llama::model model(llama::load_model(chosen.model_path, chosen.rope_theta));
    llama::evaluation_settings settings = chosen.evaluation;
    settings.window = window_of(chosen, model.shape());
    std::vector<int> tokens = read_input(chosen, chosen.input_path, model.shape().vocab);
    give_statistics(chosen, model, tokens, schemes);
    tokens = part_of(chosen, std::move(tokens));

    const auto results = llama::evaluate_chunks(model, tokens, schemes, chosen.chunks, settings);
    if (chosen.json) {
        llama::write_json(std::cout, results);
    } else {
        write_model(chosen, model.shape());
        std::cout << "perplexity of " << tokens.size() << " tokens in windows of " << settings.window
                  << ", by chunk size\n\n";
        llama::write_table(std::cout, results);
    }
    int status = 0;
    for (std::size_t scheme = 0; scheme < schemes.size(); ++scheme) {
        const llama::worst_chunk worst = llama::find_worst(results, scheme);
        if (!(worst.ppl_delta_pct <= chosen.chunk_bound)) {
            std::fprintf(stderr,
                         "kvq_llama: %s: chunks of %d have %.3f %% more perplexity than chunks of %d, "
                         "the bound is %g %%\n",
                         schemes[scheme].label.c_str(), worst.chunk, worst.ppl_delta_pct,
                         results.front().chunk, chosen.chunk_bound);
            status = 1;
        }
    }
    return status;
}

int run_slot(const options& chosen) {
    std::vector<llama::scheme_choice> schemes = schemes_of(chosen);
    const llama::model model(llama::load_model(chosen.model_path, chosen.rope_theta));
    llama::slot_settings settings = chosen.slot;
    settings.chunk = chosen.chunk;
    settings.threads = chosen.evaluation.threads;
    settings.show_progress = chosen.evaluation.show_progress;
    std::vector<int> tokens = read_input(chosen, chosen.input_path, model.shape().vocab);
    give_statistics(chosen, model, tokens, schemes);
    tokens = part_of(chosen, std::move(tokens));

    const auto results = llama::run_slot(model, tokens, schemes, settings);
    if (chosen.json) {
        llama::write_json(std::cout, results);
    } else {
        write_model(chosen, model.shape());
        std::cout << "turns of " << settings.turn_tokens << " tokens behind a prompt of "
                  << settings.prompt_tokens << ", in chunks of " << settings.chunk
                  << (settings.varying ? ", other text in between" : "")
                  << "\nperplexity of a turn (and against " << results.front().scheme << ")\n\n";
        llama::write_table(std::cout, results);
    }
    int status = 0;
    for (const llama::slot_result& result : results) {
        if (!(100.0 * result.drift <= chosen.slot_bound)) {
            std::fprintf(
                stderr,
                "kvq_llama: %s: turn %d has a perplexity of %.6f, turn 2 one of %.6f: a drift of %.3g %%, "
                "the bound is %g %%\n",
                result.scheme.c_str(), result.drift_turn,
                result.perplexity[static_cast<std::size_t>(result.drift_turn - 1)], result.perplexity[1],
                100.0 * result.drift, chosen.slot_bound);
            status = 1;
        }
    }
    return status;
}

void run_dump(const options& chosen) {
    const llama::model model(llama::load_model(chosen.model_path, chosen.rope_theta));
    llama::dump_settings settings = chosen.dump;
    settings.window = window_of(chosen, model.shape());
    const int written = llama::dump(model, read_input(chosen, chosen.input_path, model.shape().vocab),
                                    chosen.directory, settings);
    std::printf("%d windows of %d tokens, %d layers in %s\n", written, settings.window, model.shape().layers,
                chosen.directory.c_str());
}

void run_long_context(const options& chosen) {
    const llama::model model(llama::load_model(chosen.model_path, chosen.rope_theta), chosen.tokens);
    std::vector<int> tokens = read_input(chosen, chosen.input_path, model.shape().vocab);
    if (static_cast<std::size_t>(chosen.tokens) > tokens.size()) {
        throw std::invalid_argument("the input has only " + std::to_string(tokens.size()) + " tokens");
    }
    tokens.resize(static_cast<std::size_t>(chosen.tokens));
    const auto rows =
        llama::long_context(model, tokens, chosen.cache, chosen.live, chosen.every, chosen.chunk);
    if (chosen.json) {
        llama::write_json(std::cout, rows);
    } else {
        llama::write_table(std::cout, rows);
    }
}

void add_live_options(CLI::App& command, options& chosen) {
    command
        .add_option_function<std::string>(
            "--tiers", [&](const std::string& text) { chosen.live.tiers = llama::parse_tiers(text); },
            "older tokens in fewer bits, like 64:int8,128:kivi-4,192:kivi-2")
        ->type_name("AGE:SCHEME,...");
    command.add_option("--budget", chosen.live.budget, "bytes that pages may take; the tiers give way")
        ->type_name("BYTES");
    command
        .add_option_function<std::string>(
            "--requantize-at", [&](const std::string& text) { llama::parse_requantize(text, chosen.live); },
            "16 bit up to a number of tokens, then everything in a scheme, like 128:kivi-4")
        ->type_name("TOKENS:SCHEME");
    command
        .add_option("--reload-at", chosen.live.reload_at,
                    "save the cache and go on from what was saved, at a number of tokens")
        ->check(CLI::PositiveNumber)
        ->type_name("TOKENS");
}

void add_device_options(CLI::App& command, options& chosen) {
    command.add_option("--device", chosen.device, "where the model runs; cuda: kvq_llama_cuda only")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->capture_default_str();
    command.add_flag("--fp16", chosen.on_device.fp16,
                     "on the device: weights and activations in fp16 instead of bf16");
    command
        .add_option("--cache-bytes", chosen.on_device.cache_bytes,
                    "on the device: bytes of the cache at most, 0: no limit")
        ->capture_default_str();
}

void add_model_options(CLI::App& command, options& chosen) {
    command
        .add_option("model", chosen.model_path,
                    "GGUF file, folder with config.json and safetensors files, or llama2.c checkpoint")
        ->required();
    command
        .add_option("--rope-theta", chosen.rope_theta,
                    "base of the rotary frequencies, 0: as the model says, 10000 for a llama2.c checkpoint")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
}

constexpr const char* tokenizer_help =
    "llama2.c tokenizer, tokenizer.json or GGUF file; default: the one that comes with the model";

void add_input_options(CLI::App& command, options& chosen) {
    command.add_option("input", chosen.input_path, "text, or token ids in a file named *.u16 or *.u32")
        ->required();
    command.add_option("--tokenizer", chosen.tokenizer_path, tokenizer_help);
    command.add_option("--window", chosen.window, "tokens of a window, 0: the context or 512")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
}

void add_chunk_option(CLI::App& command, options& chosen) {
    command
        .add_option("--chunk", chosen.chunk,
                    "tokens of a text that the cache takes at once; 1: token by token, as decoding does")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
}

void add_pair_options(CLI::App& command, options& chosen, const char* what) {
    command.add_option("--keys", chosen.keys, std::string("format of keys, ") + what)->type_name("FORMAT");
    command.add_option("--values", chosen.values, "format of values; --keys or --values alone is for both")
        ->type_name("FORMAT");
}

// For the commands that judge schemes.
void add_evaluation_options(CLI::App& command, options& chosen, const char* threads) {
    command.add_option("--schemes", chosen.schemes, "schemes to compare, separated by commas")
        ->delimiter(',')
        ->capture_default_str();
    add_pair_options(command, chosen, "of one more scheme");
    command.add_option("--tokens", chosen.tokens, "use only the first tokens of the input, 0: all")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    command
        .add_option("--skip", chosen.skip, "leave out the first tokens of the input, before --tokens counts")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    command.add_option(
        "--statistics", chosen.statistics_path,
        "text that +stats gathers its statistics from; default: the first tokens of the input");
    command.add_option("--statistics-tokens", chosen.statistics_tokens, "tokens of it to use")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    command.add_option("--threads", chosen.evaluation.threads, threads)
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    command.add_flag("--json", chosen.json, "one JSON object a line instead of a table");
    command.add_flag("--progress,!--no-progress", chosen.evaluation.show_progress, "show a progress bar");
}

void add_cache_options(CLI::App& command, options& chosen) {
    command.add_option("--sinks", chosen.cache.sinks, "first tokens kept in 16 bit")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    command.add_option("--recent", chosen.cache.recent, "last tokens kept in 16 bit")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    command.add_option("--page-tokens", chosen.cache.page_tokens, "tokens quantized together")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    command.footer(
        "A scheme may override --sinks and --recent: kivi-4+s4+r32. It may be a format for keys and one for "
        "values: kivi-2-g64/int8. Schemes: " +
        llama::all_scheme_names());
}

}  // namespace

int main(int argc, char** argv) {
    options chosen;
    chosen.evaluation.show_progress = llama::stderr_is_terminal();
    chosen.generation.threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    int status = 0;
    CLI::App app("A small Llama engine that keeps its key/value cache in kvq.", "kvq_llama");
    app.require_subcommand(1);
    // Scripts give defaults; options of the user follow and win.
    app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);

    CLI::App& generate = *app.add_subcommand("generate", "Continue a prompt.");
    add_model_options(generate, chosen);
    add_cache_options(generate, chosen);
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
    add_device_options(generate, chosen);
    generate.add_option("--prompts", chosen.prompts_path,
                        "on the device: a file with a prompt in every line");
    generate.add_option("--batch", chosen.on_device.batch, "on the device: texts that grow at the same time")
        ->check(CLI::Range(1, 4096))
        ->capture_default_str();
    generate.callback([&] { run_generate(chosen); });

    CLI::App& evaluate = *app.add_subcommand("evaluate", "Compare schemes with the 16-bit cache on a text.");
    add_model_options(evaluate, chosen);
    add_input_options(evaluate, chosen);
    add_cache_options(evaluate, chosen);
    evaluate
        .add_option("--chunk", chosen.evaluation.chunk,
                    "tokens of a window that the cache takes at once; 1: token by token, as decoding does; "
                    "0: 512, or "
                    "a quarter of the window if that is less")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    add_evaluation_options(evaluate, chosen, "windows evaluated at the same time");
    add_live_options(evaluate, chosen);
    add_device_options(evaluate, chosen);
    evaluate.callback([&] { run_evaluate(chosen); });

    CLI::App& chunks = *app.add_subcommand(
        "chunks", "Perplexity by chunk size. Fails where a chunk size is worse than the first.");
    add_model_options(chunks, chosen);
    add_input_options(chunks, chosen);
    add_cache_options(chunks, chosen);
    chunks.add_option("--chunks", chosen.chunks, "chunk sizes, separated by commas")
        ->delimiter(',')
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    chunks.add_option("--bound", chosen.chunk_bound, "how much more perplexity is allowed, in percent")
        ->capture_default_str();
    add_evaluation_options(chunks, chosen, "windows evaluated at the same time");
    chunks.callback([&] { status = run_chunks(chosen); });

    CLI::App& slot = *app.add_subcommand("slot",
                                         "A slot of a server: reads a prompt, then turn after turn a text "
                                         "that is cut off again. Fails where the "
                                         "perplexity of the text changes from the second turn on.");
    add_model_options(slot, chosen);
    add_input_options(slot, chosen);
    add_cache_options(slot, chosen);
    add_chunk_option(slot, chosen);
    slot.add_option("--prompt-tokens", chosen.slot.prompt_tokens, "tokens of the prompt")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    slot.add_option("--turns", chosen.slot.turns, "turns")
        ->check(CLI::Range(2, 1 << 20))
        ->capture_default_str();
    slot.add_option("--turn-tokens", chosen.slot.turn_tokens, "tokens of a turn")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    slot.add_flag("--varying", chosen.slot.varying,
                  "read and cut off other text, of other lengths, before each turn");
    slot.add_option("--bound", chosen.slot_bound, "drift that is allowed from the second turn on, in percent")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    add_evaluation_options(slot, chosen, "schemes run at the same time");
    slot.callback([&] { status = run_slot(chosen); });

    CLI::App& dump = *app.add_subcommand("dump", "Write q, k and v of a text to files, for bench_quality.");
    add_model_options(dump, chosen);
    add_input_options(dump, chosen);
    dump.add_option("directory", chosen.directory, "a folder per window is made in it")->required();
    dump.add_option("--windows", chosen.dump.windows, "windows to write")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    dump.add_option("--queries", chosen.dump.queries, "queries to write, the last of each window; 0: all")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    dump.callback([&] { run_dump(chosen); });

    CLI::App& grow = *app.add_subcommand(
        "long-context", "Let one context outgrow its budget, and compare with a 16-bit cache on the way.");
    add_model_options(grow, chosen);
    add_cache_options(grow, chosen);
    grow.add_option("input", chosen.input_path, "text, or token ids in a file named *.u16 or *.u32")
        ->required();
    grow.add_option("--tokenizer", chosen.tokenizer_path, tokenizer_help);
    grow.add_option("--tokens", chosen.tokens, "tokens of the context; it may be longer than the model's own")
        ->check(CLI::Range(2, 1 << 20))
        ->required();
    grow.add_option("--every", chosen.every, "tokens from one row to the next")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    grow.add_flag("--json", chosen.json, "one JSON object a line instead of a table");
    add_chunk_option(grow, chosen);
    add_live_options(grow, chosen);
    grow.callback([&] { run_long_context(chosen); });

    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        return app.exit(error);
    } catch (const std::exception& error) {
        std::cerr << "kvq_llama: " << error.what() << '\n';
        return 1;
    }
    return status;
}
