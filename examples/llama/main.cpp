// kvq_llama generate | evaluate | report | chunks | slot | dump | long-context | machine | drop: a small
// Llama engine whose KV cache is kvq.
#include "commands.hpp"
#include "progress.hpp"

#include <algorithm>
#include <exception>
#include <iostream>
#include <thread>

int main(int argc, char** argv) {
    llama::options chosen;
    const int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    chosen.evaluation.show_progress = llama::stderr_is_terminal();
    chosen.generation.threads = threads;
    int status = 0;
    CLI::App app("A small Llama engine that keeps its key/value cache in kvq.", "kvq_llama");
    app.require_subcommand(1);
    // Scripts give defaults; options of the user follow and win.
    app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);

    llama::add_generate(app, chosen);
    llama::add_evaluate(app, chosen);
    llama::add_report(app, chosen);
    llama::add_chunks(app, chosen, status);
    llama::add_slot(app, chosen, status);
    llama::add_dump(app, chosen);
    llama::add_long_context(app, chosen);
    llama::add_machine(app, chosen);
    llama::add_drop(app, chosen);

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
