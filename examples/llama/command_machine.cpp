#include "commands.hpp"
#include "machine.hpp"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>

namespace llama {
namespace {

constexpr int bar_width = 28;

// As many signs as the share of the largest value has; at least one.
std::string bar(double value, double largest) {
    const int signs = static_cast<int>(bar_width * value / largest + 0.5);
    std::string text(static_cast<std::size_t>(std::clamp(signs, 1, bar_width)), '#');
    text.resize(bar_width, ' ');
    return text;
}

void write_bars(const std::vector<machine_row>& rows, const machine_settings& settings, double memory) {
    for (std::size_t i = 0; i < settings.tokens.size(); ++i) {
        double slowest = 0.0, largest = 0.0;
        for (const machine_row& row : rows) {
            slowest = std::max(slowest, row.costs[i].seconds);
            largest = std::max(largest, static_cast<double>(row.costs[i].bytes));
        }
        std::printf(
            "one token over %d, %d/%d heads of %d channels, %d threads: attention and bytes of a layer\n",
            settings.tokens[i], settings.heads, settings.kv_heads, settings.head_dim, settings.threads);
        const context_cost& full = rows.front().costs[i];
        for (const machine_row& row : rows) {
            const context_cost& cost = row.costs[i];
            const double bytes = static_cast<double>(cost.bytes);
            std::printf("  %-12s %8.2f ms %s %4.1f x   %7.1f MB %s %4.1f x\n", row.scheme.c_str(),
                        1e3 * cost.seconds, bar(cost.seconds, slowest).c_str(), full.seconds / cost.seconds,
                        1e-6 * bytes, bar(bytes, largest).c_str(), static_cast<double>(full.bytes) / bytes);
        }
        std::printf("\n");
    }
    double longest = 1.0;
    for (const machine_row& row : rows) {
        longest = std::max(longest, static_cast<double>(row.longest));
    }
    std::printf("tokens of a sequence that fit into %.1f GB of memory, with %d layers of these heads\n",
                1e-9 * memory, settings.layers);
    for (const machine_row& row : rows) {
        std::printf("  %-12s %10d %s\n", row.scheme.c_str(), row.longest,
                    bar(static_cast<double>(row.longest), longest).c_str());
    }
}

void write_lines(const std::vector<machine_row>& rows, const machine_settings& settings) {
    for (const machine_row& row : rows) {
        nlohmann::ordered_json line{{"scheme", row.scheme}, {"longest_context", row.longest}};
        for (std::size_t i = 0; i < row.costs.size(); ++i) {
            line["attention"].push_back({{"tokens", settings.tokens[i]},
                                         {"seconds", row.costs[i].seconds},
                                         {"bytes", row.costs[i].bytes}});
        }
        std::cout << line << '\n';
    }
}

void run_machine(const options& chosen, machine_settings settings) {
    settings.threads = chosen.evaluation.threads;
    std::sort(settings.tokens.begin(), settings.tokens.end());
    if (settings.memory <= 0.0) {
        settings.memory = free_memory();
    }
    const auto rows = measure_machine(schemes_of(chosen), settings);
    if (chosen.json) {
        write_lines(rows, settings);
    } else {
        write_bars(rows, settings, settings.memory);
    }
}

}  // namespace

void add_machine(CLI::App& app, options& chosen) {
    CLI::App& machine = *app.add_subcommand("machine",
                                            "What a long context costs on this machine, without a model: "
                                            "time and bytes of attention, and how many "
                                            "tokens fit into its memory.");
    const auto settings = std::make_shared<machine_settings>();
    add_cache_options(machine, chosen.cache);
    machine.add_option("--schemes", chosen.schemes, "schemes to compare, separated by commas")
        ->delimiter(',');
    machine.add_option("--tokens", settings->tokens, "lengths of contexts, separated by commas")
        ->delimiter(',')
        ->check(CLI::Range(1, 1 << 24))
        ->capture_default_str();
    machine.add_option("--heads", settings->heads, "query heads")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    machine.add_option("--kv-heads", settings->kv_heads)->check(CLI::PositiveNumber)->capture_default_str();
    machine.add_option("--head-dim", settings->head_dim)->check(CLI::PositiveNumber)->capture_default_str();
    machine.add_option("--layers", settings->layers, "of the model whose longest context is computed")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    machine.add_option("--memory", settings->memory, "bytes for that context; default: what is free now")
        ->check(CLI::PositiveNumber);
    machine.add_option("--seconds", settings->seconds, "of each measurement")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    add_thread_options(machine, chosen, "threads that share a token");
    machine.add_flag("--json", chosen.json, "one JSON object a line instead of bars");
    machine.callback([&chosen, settings] { run_machine(chosen, *settings); });
}

}  // namespace llama
