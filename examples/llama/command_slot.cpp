#include "commands.hpp"
#include "tables.hpp"

#include <cstdio>
#include <iostream>
#include <utility>

namespace llama {
namespace {

int run_slot(const options& chosen) {
    std::vector<scheme_choice> schemes = schemes_of(chosen);
    const model model(weights_of(chosen));
    slot_settings settings = chosen.slot;
    settings.chunk = chosen.chunk;
    settings.threads = chosen.evaluation.threads;
    settings.show_progress = chosen.evaluation.show_progress;
    std::vector<int> tokens = read_input(chosen, chosen.input_path, model.shape());
    give_statistics(chosen, model, statistics_text(chosen, model.shape(), tokens), schemes);
    tokens = part_of(chosen, std::move(tokens));

    const auto results = run_slot(model, tokens, schemes, settings);
    if (chosen.json) {
        write_json(std::cout, results);
    } else {
        write_model(chosen, model.shape());
        std::cout << "turns of " << settings.turn_tokens << " tokens behind a prompt of "
                  << settings.prompt_tokens << ", in chunks of " << settings.chunk
                  << (settings.varying ? ", other text in between" : "")
                  << "\nperplexity of a turn (and against " << results.front().scheme << ")\n\n";
        write_table(std::cout, results);
    }
    int status = 0;
    for (const slot_result& result : results) {
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

}  // namespace

void add_slot(CLI::App& app, options& chosen, int& status) {
    CLI::App& slot = *app.add_subcommand("slot",
                                         "A slot of a server: reads a prompt, then turn after turn a text "
                                         "that is cut off again. Fails where the "
                                         "perplexity of the text changes from the second turn on.");
    add_model_options(slot, chosen);
    add_input_options(slot, chosen);
    add_cache_options(slot, chosen.cache);
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
}

}  // namespace llama
