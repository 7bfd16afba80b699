#include "commands.hpp"

#include "cuda/products_on_device.hpp"
#include "load_tokenizer.hpp"
#include "statistics.hpp"
#include "token_source.hpp"

#include <kvq/version.hpp>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <stdexcept>

namespace llama {

bool is_live(const options& chosen) {
    return !chosen.live.tiers.empty() || chosen.live.requantize_at > 0 || chosen.live.reload_at > 0 ||
           !chosen.generation.load.empty() || !chosen.generation.save.empty();
}

namespace {

// The schemes of --keys and --values; if only one is given, it is for both.
std::string pair_of(const options& chosen) {
    const std::string& keys = chosen.keys.empty() ? chosen.values : chosen.keys;
    return keys + '/' + (chosen.values.empty() ? keys : chosen.values);
}
bool has_pair(const options& chosen) { return !chosen.keys.empty() || !chosen.values.empty(); }

}  // namespace

scheme_choice parse_aloud(const std::string& name, const cache_settings& settings) {
    scheme_choice scheme = parse_scheme(name, settings);
    if (const std::string remark = page_remark(scheme); !remark.empty()) {
        std::fprintf(stderr, "kvq_llama: %s\n", remark.c_str());
    }
    return scheme;
}

scheme_choice plain_scheme_of(const options& chosen) {
    return parse_aloud(has_pair(chosen) ? pair_of(chosen) : chosen.scheme, chosen.cache);
}
scheme_choice scheme_of(const options& chosen) {
    return is_live(chosen) ? live_scheme(chosen.live, chosen.cache) : plain_scheme_of(chosen);
}

void add_device_options(CLI::App& command, options& chosen) {
    command
        .add_option("--device", chosen.device,
                    "where the model runs; cuda: on a GPU, some formats (kvq_llama_cuda); cuda-products: "
                    "the matrix products on a GPU, in fp32, and the cache on the CPU, all formats")
        ->check(CLI::IsMember({"cpu", "cuda", "cuda-products"}))
        ->capture_default_str();
    command.add_flag("--fp16", chosen.on_device.fp16,
                     "on the device: weights and activations in fp16 instead of bf16");
    command
        .add_option("--cache-bytes", chosen.on_device.cache_bytes,
                    "on the device: bytes of the cache at most, 0: no limit")
        ->capture_default_str();
}
bool is_on_device(const options& chosen) { return chosen.device == "cuda"; }
device_settings device_settings_of(const options& chosen) {
    if (chosen.live.requantize_at > 0 || chosen.live.reload_at > 0) {
        throw std::invalid_argument("--requantize-at and --reload-at are for the CPU");
    }
    device_settings on = chosen.on_device;
    on.live = chosen.live;
    return on;
}

model_weights weights_of(const options& chosen) {
    model_weights weights = load_model(chosen.model_path, chosen.rope_theta);
    if (chosen.context > 0) {
        weights.config.shape.context = chosen.context;
    }
    if (chosen.device == "cuda-products") {
        weights.use(make_product_device());
    }
    return weights;
}

tokenizer tokenizer_of(const options& chosen, const model_shape& shape) {
    if (chosen.tokenizer_path.empty() && !has_tokenizer(chosen.model_path)) {
        throw std::invalid_argument(
            "\"" + chosen.model_path +
            "\" has no tokenizer: a text needs --tokenizer (a file of token ids ends in "
            ".u16 or .u32)");
    }
    tokenizer pieces =
        load_tokenizer(chosen.tokenizer_path.empty() ? chosen.model_path : chosen.tokenizer_path);
    check_vocabulary(pieces, shape.vocab);
    return pieces;
}

std::vector<int> read_input(const options& chosen, const std::string& path, const model_shape& shape) {
    if (path.ends_with(".u16") || path.ends_with(".u32")) {
        return read_token_ids(path, shape.vocab);
    }
    return read_text(path, tokenizer_of(chosen, shape));
}

int window_of(const options& chosen, const model_shape& shape) {
    const int window = chosen.window > 0 ? chosen.window : std::min(512, shape.context);
    if (window < 2 || window > shape.context) {
        throw std::invalid_argument("--window " + std::to_string(window) +
                                    " is not between 2 and the context of " + std::to_string(shape.context) +
                                    " tokens");
    }
    return window;
}

std::vector<scheme_choice> schemes_of(const options& chosen) {
    std::vector<scheme_choice> schemes{parse_scheme("fp16", {.page_tokens = chosen.cache.page_tokens})};
    for (const std::string& name : chosen.schemes) {
        if (name != "fp16") {
            schemes.push_back(parse_aloud(name, chosen.cache));
        }
    }
    if (has_pair(chosen)) {
        schemes.push_back(parse_aloud(pair_of(chosen), chosen.cache));
    }
    if (is_live(chosen)) {
        schemes.push_back(live_scheme(chosen.live, chosen.cache));
    }
    return schemes;
}

std::vector<int> statistics_text(const options& chosen, const model_shape& shape,
                                 const std::vector<int>& tokens) {
    std::vector<int> text =
        chosen.statistics_path.empty() ? tokens : read_input(chosen, chosen.statistics_path, shape);
    text.resize(std::min(text.size(), static_cast<std::size_t>(chosen.statistics_tokens)));
    return text;
}

void give_statistics(const options& chosen, const model& model, const std::vector<int>& text,
                     std::vector<scheme_choice>& schemes) {
    if (std::none_of(schemes.begin(), schemes.end(), [](const auto& s) { return s.use_statistics; })) {
        return;
    }
    activations space(chosen.evaluation.threads);
    const kvq::calibration statistics =
        gather_statistics(model, text, window_of(chosen, model.shape()), space);
    for (scheme_choice& scheme : schemes) {
        scheme.give_statistics(statistics);
    }
}

std::string file_name(const std::string& path) {
    const std::filesystem::path p(path);
    return (p.has_filename() ? p.filename() : p.parent_path().filename()).string();
}

nlohmann::ordered_json conditions_of(const options& chosen, const cache_settings& cache,
                                     std::span<const int> judged, std::span<const int> statistics, int window,
                                     int chunk) {
    std::error_code unknown;
    const auto size = std::filesystem::file_size(chosen.model_path, unknown);
    return {{"version", std::to_string(KVQ_VERSION_MAJOR) + "." + std::to_string(KVQ_VERSION_MINOR) + "." +
                            std::to_string(KVQ_VERSION_PATCH)},
            {"model", file_name(chosen.model_path)},
            {"model_bytes", unknown ? 0 : size},
            {"device", chosen.device},
            {"rope_theta", chosen.rope_theta},
            {"text", fingerprint_of(judged)},
            {"statistics", fingerprint_of(statistics)},
            {"window", window},
            {"chunk", chunk},
            {"sinks", cache.sinks},
            {"recent", cache.recent},
            {"page_tokens", cache.page_tokens}};
}

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

std::string describe(const model_shape& shape) {
    return std::to_string(shape.layers) + " layers, " + std::to_string(shape.heads) + '/' +
           std::to_string(shape.kv_heads) + " heads of " + std::to_string(shape.head_dim()) + " channels";
}

void write_model(const options& chosen, const model_shape& shape) {
    std::cout << describe(shape) << "; pages of " << chosen.cache.page_tokens << "; ";
}

int chunk_of(const options& chosen, int window) {
    constexpr int usual = 512, chunks_of_window = 4;
    if (chosen.evaluation.chunk >= window) {
        std::fprintf(stderr,
                     "kvq_llama: a window of %d tokens, a chunk of %d: the chunk covers the whole window, so "
                     "no query reads quantized pages; choose a smaller --chunk\n",
                     window, chosen.evaluation.chunk);
    }
    return chosen.evaluation.chunk > 0 ? chosen.evaluation.chunk
                                       : std::min(usual, std::max(1, window / chunks_of_window));
}

void add_live_options(CLI::App& command, options& chosen) {
    command
        .add_option_function<std::string>(
            "--tiers", [&](const std::string& text) { chosen.live.tiers = parse_tiers(text); },
            "older tokens in fewer bits, like 64:int8,128:kivi-4,192:kivi-2")
        ->type_name("AGE:SCHEME,...");
    command
        .add_option("--budget", chosen.live.budget,
                    "limit for bytes of pages; older pages are requantized to stay below it")
        ->type_name("BYTES");
    command
        .add_option_function<std::string>(
            "--requantize-at", [&](const std::string& text) { parse_requantize(text, chosen.live); },
            "16 bit up to a number of tokens, then everything in a scheme, like 128:kivi-4")
        ->type_name("TOKENS:SCHEME");
    command
        .add_option("--reload-at", chosen.live.reload_at,
                    "save the cache and go on from what was saved, at a number of tokens")
        ->check(CLI::PositiveNumber)
        ->type_name("TOKENS");
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
    command
        .add_option(
            "--context", chosen.context,
            "positions that the model may read, 0: those that it was trained with; more need a larger "
            "--rope-theta")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
}

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

void add_window_chunk_option(CLI::App& command, options& chosen) {
    command
        .add_option("--chunk", chosen.evaluation.chunk,
                    "tokens of a window that the cache takes at once; 1: token by token, as decoding does; "
                    "0: 512, or "
                    "a quarter of the window if that is less")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
}

void add_pair_options(CLI::App& command, options& chosen, const char* what) {
    command.add_option("--keys", chosen.keys, std::string("format of keys, ") + what)->type_name("FORMAT");
    command.add_option("--values", chosen.values, "format of values; --keys or --values alone is for both")
        ->type_name("FORMAT");
}

void add_statistics_options(CLI::App& command, options& chosen) {
    command.add_option(
        "--statistics", chosen.statistics_path,
        "text that +stats gathers its statistics from; default: the first tokens of the input");
    command.add_option("--statistics-tokens", chosen.statistics_tokens, "tokens of it to use")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
}

void add_thread_options(CLI::App& command, options& chosen, const char* threads) {
    command.add_option("--threads", chosen.evaluation.threads, threads)
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    command.add_flag("--progress,!--no-progress", chosen.evaluation.show_progress, "show a progress bar");
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
    add_statistics_options(command, chosen);
    add_thread_options(command, chosen, threads);
    command.add_flag("--json", chosen.json, "one JSON object a line instead of a table");
}

void add_cache_options(CLI::App& command, cache_settings& cache) {
    command.add_option("--sinks", cache.sinks, "first tokens kept in 16 bit")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    command.add_option("--recent", cache.recent, "last tokens kept in 16 bit")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    command.add_option("--page-tokens", cache.page_tokens, "tokens quantized together")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    command.footer(
        "A scheme may override --sinks and --recent: kivi-4+s4+r32. It may be a format for keys and one for "
        "values: kivi-2-g64/int8. Schemes: " +
        all_scheme_names());
}

}  // namespace llama
