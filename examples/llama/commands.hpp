// The commands of kvq_llama: one file each. Options that several commands have are here.
#pragma once

#include "cuda/on_device.hpp"
#include "drop.hpp"
#include "dump.hpp"
#include "evaluate.hpp"
#include "generate.hpp"
#include "live_settings.hpp"
#include "load_model.hpp"
#include "long_context.hpp"
#include "slot.hpp"

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace llama {

struct report_options {
    cache_settings cache{.sinks = 4, .recent = 32};
    std::vector<std::string> schemes;  // empty: the usual ones, as far as the library has them
    int tokens = 4096;
    std::string output;  // without extension
    bool fresh = false, recall = true;
    int greedy = 128;  // tokens of greedy text behind each window
    std::string draft_model_path;
};

struct options {
    std::string model_path, tokenizer_path, input_path;
    double rope_theta = 0.0;
    int context = 0;  // 0: the model's
    cache_settings cache;
    std::string keys, values;  // one more scheme

    std::string scheme = "kivi-4+s4+r32";
    int samples = 1;
    generation_settings generation;

    std::vector<std::string> schemes{"int8",          "affine-8",      "affine-4",     "affine-3",
                                     "affine-2",      "kivi-4",        "kivi-3",       "kivi-2",
                                     "kivi-4+s4+r32", "kivi-3+s4+r32", "kivi-2+s4+r32"};
    int window = 0, tokens = 0, skip = 0;
    std::string statistics_path;
    int statistics_tokens = 2048;
    evaluation_settings evaluation{.chunk = 0};
    std::string record_path;
    bool json = false;
    int chunk = 512;

    std::vector<int> chunks{1, 8, 32, 128, 512};
    double chunk_bound = 0.2, slot_bound = 0.0;  // percent
    slot_settings slot;

    std::string directory;
    dump_settings dump;

    live_settings live;
    int every = 128;

    drop_settings drop;

    report_options report;

    std::string device = "cpu", prompts_path;
    device_settings on_device;
};

// Adds a command. `status` becomes the exit status.
void add_generate(CLI::App& app, options& chosen);
void add_evaluate(CLI::App& app, options& chosen);
void add_report(CLI::App& app, options& chosen);
void add_chunks(CLI::App& app, options& chosen, int& status);
void add_slot(CLI::App& app, options& chosen, int& status);
void add_dump(CLI::App& app, options& chosen);
void add_long_context(CLI::App& app, options& chosen);
void add_machine(CLI::App& app, options& chosen);
void add_drop(CLI::App& app, options& chosen);

// Options of more than one command.
inline constexpr const char* tokenizer_help =
    "llama2.c tokenizer, tokenizer.json or GGUF file; default: the one that comes with the model";
void add_model_options(CLI::App& command, options& chosen);
void add_input_options(CLI::App& command, options& chosen);
void add_statistics_options(CLI::App& command, options& chosen);
void add_cache_options(CLI::App& command, cache_settings& cache);
void add_chunk_option(CLI::App& command, options& chosen);
void add_window_chunk_option(CLI::App& command, options& chosen);
void add_pair_options(CLI::App& command, options& chosen, const char* what);
void add_evaluation_options(CLI::App& command, options& chosen, const char* threads);
void add_thread_options(CLI::App& command, options& chosen, const char* threads);
void add_live_options(CLI::App& command, options& chosen);

bool is_live(const options& chosen);

// --device cuda: generate and evaluate.
void add_device_options(CLI::App& command, options& chosen);
bool is_on_device(const options& chosen);
// With --tiers and --budget.
device_settings device_settings_of(const options& chosen);

// The scheme of --keys and --values, or that of --scheme; live: that of --tiers and their like.
scheme_choice plain_scheme_of(const options& chosen);
scheme_choice scheme_of(const options& chosen);
// fp16, which is always the baseline, and the chosen schemes.
std::vector<scheme_choice> schemes_of(const options& chosen);
// Says where a page cannot hold what the scheme's name promises.
scheme_choice parse_aloud(const std::string& name, const cache_settings& settings);

// The model as the options want it.
model_weights weights_of(const options& chosen);

// The tokenizer of --tokenizer, or the one that comes with the model.
tokenizer tokenizer_of(const options& chosen, const model_shape& shape);
std::vector<int> read_input(const options& chosen, const std::string& path, const model_shape& shape);
int window_of(const options& chosen, const model_shape& shape);
// A window must be several chunks long: within its own chunk a query reads only 16-bit tokens, for every
// scheme.
int chunk_of(const options& chosen, int window);
// The input after --skip and --tokens.
std::vector<int> part_of(const options& chosen, std::vector<int> tokens);
// The text of --statistics, or the first tokens of the input.
std::vector<int> statistics_text(const options& chosen, const model_shape& shape,
                                 const std::vector<int>& tokens);
void give_statistics(const options& chosen, const model& model, const std::vector<int>& text,
                     std::vector<scheme_choice>& schemes);
// Everything that results of windows depend on, for the files that they are kept in.
nlohmann::ordered_json conditions_of(const options& chosen, const cache_settings& cache,
                                     std::span<const int> judged, std::span<const int> statistics, int window,
                                     int chunk);
// The name of a file or folder without the folders that it is in.
std::string file_name(const std::string& path);
// "8 layers, 8/2 heads of 64 channels"
std::string describe(const model_shape& shape);
// The same on stdout, with the pages: "...; pages of 32; "
void write_model(const options& chosen, const model_shape& shape);

}  // namespace llama
