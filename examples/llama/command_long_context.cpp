#include "commands.hpp"
#include "tables.hpp"

#include <iostream>
#include <stdexcept>

namespace llama {
namespace {

void run_long_context(const options& chosen) {
    const model model(weights_of(chosen), chosen.tokens);
    std::vector<int> tokens = read_input(chosen, chosen.input_path, model.shape());
    if (static_cast<std::size_t>(chosen.tokens) > tokens.size()) {
        throw std::invalid_argument("the input has only " + std::to_string(tokens.size()) + " tokens");
    }
    tokens.resize(static_cast<std::size_t>(chosen.tokens));
    const auto rows = long_context(model, tokens, chosen.cache, chosen.live, chosen.every, chosen.chunk);
    if (chosen.json) {
        write_json(std::cout, rows);
    } else {
        write_table(std::cout, rows);
    }
}

}  // namespace

void add_long_context(CLI::App& app, options& chosen) {
    CLI::App& grow = *app.add_subcommand(
        "long-context", "Let one context outgrow its budget, and compare with a 16-bit cache on the way.");
    add_model_options(grow, chosen);
    add_cache_options(grow, chosen.cache);
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
}

}  // namespace llama
