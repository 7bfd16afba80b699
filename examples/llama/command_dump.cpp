#include "commands.hpp"

#include <cstdio>

namespace llama {
namespace {

void run_dump(const options& chosen) {
    const model model(weights_of(chosen));
    dump_settings settings = chosen.dump;
    settings.window = window_of(chosen, model.shape());
    const int written =
        dump(model, read_input(chosen, chosen.input_path, model.shape()), chosen.directory, settings);
    std::printf("%d windows of %d tokens, %d layers in %s\n", written, settings.window, model.shape().layers,
                chosen.directory.c_str());
}

}  // namespace

void add_dump(CLI::App& app, options& chosen) {
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
}

}  // namespace llama
