#include "commands.hpp"
#include "tables.hpp"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <stdexcept>
#include <utility>

namespace llama {
namespace {

void parse_part(const std::string& text, evaluation_settings& settings) {
    char behind = 0;
    if (std::sscanf(text.c_str(), "%d/%d%c", &settings.part, &settings.parts, &behind) != 2 ||
        settings.part < 1 || settings.part > settings.parts) {
        throw std::invalid_argument("--part " + text + " is not like 1/4");
    }
}

void run_evaluate(const options& chosen) {
    std::vector<scheme_choice> schemes = schemes_of(chosen);
    model_weights weights = weights_of(chosen);
    const model_shape shape = weights.config.shape;
    evaluation_settings settings = chosen.evaluation;
    settings.window = window_of(chosen, shape);
    settings.chunk = chunk_of(chosen, settings.window);
    std::vector<int> tokens = read_input(chosen, chosen.input_path, shape);
    std::vector<scheme_result> results;
    if (is_on_device(chosen)) {
        if (!chosen.record_path.empty()) {
            throw std::invalid_argument(
                "--record keeps what --device cpu or cuda-products measures, not cuda");
        }
        tokens = part_of(chosen, std::move(tokens));
        results = evaluate_on_device(weights, tokens, schemes, settings, device_settings_of(chosen));
    } else {
        const model model(std::move(weights));
        const std::vector<int> text = statistics_text(chosen, shape, tokens);
        tokens = part_of(chosen, std::move(tokens));
        evaluation_record record(chosen.record_path, conditions_of(chosen, chosen.cache, tokens, text,
                                                                   settings.window, settings.chunk));
        if (std::any_of(schemes.begin(), schemes.end(), [&](const scheme_choice& scheme) {
                return scheme.use_statistics && !is_recorded(record, tokens, settings, scheme);
            })) {
            give_statistics(chosen, model, text, schemes);
        }
        if (part_of_windows(windows_of(tokens, settings.window).size(), settings).empty()) {
            throw std::invalid_argument("--part " + std::to_string(settings.part) + "/" +
                                        std::to_string(settings.parts) + ": the text has only " +
                                        std::to_string(settings.part - 1) + " windows or fewer");
        }
        results = evaluate(model, tokens, schemes, settings, record);
    }
    if (chosen.json) {
        write_json(std::cout, results);
    } else {
        write_model(chosen, shape);
        std::cout << tokens.size() << " tokens in windows of " << settings.window << " and chunks of "
                  << settings.chunk << "\n\n";
        write_table(std::cout, results);
    }
}

int run_chunks(const options& chosen) {
    if (chosen.chunks.size() < 2) {
        throw std::invalid_argument("--chunks needs two sizes or more, to compare them");
    }
    std::vector<scheme_choice> schemes = schemes_of(chosen);
    const model model(weights_of(chosen));
    evaluation_settings settings = chosen.evaluation;
    settings.window = window_of(chosen, model.shape());
    std::vector<int> tokens = read_input(chosen, chosen.input_path, model.shape());
    give_statistics(chosen, model, statistics_text(chosen, model.shape(), tokens), schemes);
    tokens = part_of(chosen, std::move(tokens));

    const auto results = evaluate_chunks(model, tokens, schemes, chosen.chunks, settings);
    if (chosen.json) {
        write_json(std::cout, results);
    } else {
        write_model(chosen, model.shape());
        std::cout << "perplexity of " << tokens.size() << " tokens in windows of " << settings.window
                  << ", by chunk size\n\n";
        write_table(std::cout, results);
    }
    int status = 0;
    for (std::size_t scheme = 0; scheme < schemes.size(); ++scheme) {
        const worst_chunk worst = find_worst(results, scheme);
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

}  // namespace

void add_evaluate(CLI::App& app, options& chosen) {
    CLI::App& evaluate = *app.add_subcommand("evaluate", "Compare schemes with the 16-bit cache on a text.");
    add_model_options(evaluate, chosen);
    add_input_options(evaluate, chosen);
    add_cache_options(evaluate, chosen.cache);
    add_window_chunk_option(evaluate, chosen);
    add_evaluation_options(evaluate, chosen, "threads that share a window");
    evaluate.add_option("--record", chosen.record_path,
                        "file that keeps what was measured of each window with each scheme; the same command "
                        "goes on from there");
    evaluate
        .add_option_function<std::string>(
            "--part", [&](const std::string& text) { parse_part(text, chosen.evaluation); },
            "every N-th window, the first of them number I: several programs share a text and a --record")
        ->type_name("I/N");
    add_live_options(evaluate, chosen);
    add_device_options(evaluate, chosen);
    evaluate.callback([&] { run_evaluate(chosen); });
}

void add_chunks(CLI::App& app, options& chosen, int& status) {
    CLI::App& chunks = *app.add_subcommand(
        "chunks", "Perplexity by chunk size. Fails where a chunk size is worse than the first.");
    add_model_options(chunks, chosen);
    add_input_options(chunks, chosen);
    add_cache_options(chunks, chosen.cache);
    chunks.add_option("--chunks", chosen.chunks, "chunk sizes, separated by commas")
        ->delimiter(',')
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    chunks.add_option("--bound", chosen.chunk_bound, "how much more perplexity is allowed, in percent")
        ->capture_default_str();
    add_evaluation_options(chunks, chosen, "threads that share a window");
    chunks.callback([&] { status = run_chunks(chosen); });
}

}  // namespace llama
