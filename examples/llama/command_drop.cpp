#include "commands.hpp"

#include <iomanip>
#include <iostream>

namespace llama {
namespace {

void run_drop(const options& chosen) {
    std::vector<scheme_choice> schemes = schemes_of(chosen);
    schemes.front() = parse_scheme("fp16", chosen.cache);  // its sinks are kept as well
    const model model(weights_of(chosen));
    const int window = window_of(chosen, model.shape());
    std::vector<int> tokens = read_input(chosen, chosen.input_path, model.shape());
    give_statistics(chosen, model, statistics_text(chosen, model.shape(), tokens), schemes);
    tokens = part_of(chosen, std::move(tokens));
    drop_settings settings = chosen.drop;
    settings.chunk = chunk_of(chosen, window);
    settings.show_progress = chosen.evaluation.show_progress;
    const auto results = drop(model, tokens, schemes, window, chosen.evaluation.threads, settings);
    if (chosen.json) {
        for (const drop_result& of : results) {
            std::cout << nlohmann::ordered_json{{"scheme", of.scheme},
                                                {"keep", of.keep},
                                                {"bytes", of.bytes},
                                                {"of_fp16", of.of_fp16},
                                                {"perplexity", of.perplexity},
                                                {"kld", of.kld},
                                                {"top1", of.top1},
                                                {"recalled", of.recalled},
                                                {"recalled_cued", of.recalled_cued}}
                      << '\n';
        }
        return;
    }
    write_model(chosen, model.shape());
    std::cout
        << "prompts of " << (settings.prompt > 0 ? settings.prompt : window / 2) << " tokens in windows of "
        << window << ", of which " << settings.policy << " keeps a share; " << results.front().tokens
        << " tokens behind them\n\n"
        << "scheme               kept   of fp16  perplexity  KL divergence  same top-1 %  recalled %  cued "
           "%\n";
    for (const drop_result& of : results) {
        std::cout << std::left << std::setw(20) << of.scheme << std::right << std::fixed
                  << std::setprecision(2) << std::setw(5) << of.keep << std::setprecision(3) << std::setw(10)
                  << of.of_fp16 << std::setprecision(3) << std::setw(12) << of.perplexity << std::scientific
                  << std::setprecision(2) << std::setw(15) << of.kld << std::fixed << std::setprecision(1)
                  << std::setw(14) << 100.0 * of.top1 << std::setw(12) << 100.0 * of.recalled << std::setw(8)
                  << 100.0 * of.recalled_cued << '\n';
    }
}

}  // namespace

void add_drop(CLI::App& app, options& chosen) {
    CLI::App& drop = *app.add_subcommand(
        "drop", "Drop tokens of a prompt head by head, and compare what follows with the 16-bit cache.");
    add_model_options(drop, chosen);
    add_input_options(drop, chosen);
    add_cache_options(drop, chosen.cache);
    add_window_chunk_option(drop, chosen);
    drop.add_option("--prompt", chosen.drop.prompt, "tokens of a window that are its prompt, 0: half of them")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    drop.add_option("--keep", chosen.drop.keep, "shares of the prompt to keep, separated by commas")
        ->delimiter(',')
        ->check(CLI::Range(0.0, 1.0))
        ->capture_default_str();
    drop.add_option("--policy", chosen.drop.policy, "how tokens are chosen")
        ->check(CLI::IsMember({"snapkv", "knorm"}))
        ->capture_default_str();
    drop.add_option("--queries", chosen.drop.queries, "last tokens of the prompt, whose queries choose")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    drop.add_option("--probes", chosen.drop.probes, "runs of each prompt that are sought behind it")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    add_evaluation_options(drop, chosen, "threads that share a window");
    drop.callback([&] { run_drop(chosen); });
}

}  // namespace llama
