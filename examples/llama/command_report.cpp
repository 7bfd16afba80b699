#include "commands.hpp"
#include "report.hpp"
#include "statistics.hpp"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <utility>

namespace llama {
namespace {

constexpr const char* usual_names[] = {"int8", "fp8", "q8_0", "std4", "std4-h", "q4_0", "nvfp4"};
// Of these each sequence makes a plan of its first tokens, as presets do by default.
constexpr const char* planned_names[] = {"mix4", "low3", "low2"};
constexpr const char* eight_bit_schemes[] = {"fp16", "int8", "affine-8-g64", "kivi-8-g64", "ref8"};
constexpr int probes_of_window = 4;

// Those that the library has, a smaller one may lack some widths, and that can hold the model's heads.
std::vector<scheme_choice> available(std::span<const char* const> names, const cache_settings& settings,
                                     const model_shape& shape, const std::string& suffix = "") {
    std::vector<scheme_choice> schemes;
    for (const std::string name : names) {
        std::optional<scheme_choice> scheme;
        try {
            scheme = parse_scheme(name + suffix, settings);
        } catch (const std::exception&) {
            std::fprintf(stderr, "kvq_llama: %s is left out, this program does not have it\n", name.c_str());
            continue;
        }
        try {
            static_cast<void>(scheme->make_cache(shape));
        } catch (const std::exception& reason) {
            std::fprintf(stderr, "kvq_llama: %s is left out: %s\n", name.c_str(), reason.what());
            continue;
        }
        schemes.push_back(std::move(*scheme));
    }
    return schemes;
}

// A plan is made of tokens of the first chunk, which all schemes see in 16 bit; of fewer than 64 there is
// none.
std::vector<scheme_choice> report_schemes(const report_options& chosen, const model_shape& shape, int chunk) {
    constexpr int usual_plan = 512, least_plan = 64;
    std::vector<scheme_choice> schemes{parse_scheme("fp16", {.page_tokens = chosen.cache.page_tokens})};
    if (chosen.schemes.empty()) {
        for (scheme_choice& scheme : available(usual_names, chosen.cache, shape)) {
            schemes.push_back(std::move(scheme));
        }
        const std::string suffix = chunk >= usual_plan   ? "+own"
                                   : chunk >= least_plan ? "+own" + std::to_string(chunk)
                                                         : "";
        for (scheme_choice& scheme : available(planned_names, chosen.cache, shape, suffix)) {
            schemes.push_back(std::move(scheme));
        }
    }
    for (const std::string& name : chosen.schemes) {
        if (name != "fp16") {
            schemes.push_back(parse_aloud(name, chosen.cache));
            static_cast<void>(schemes.back().make_cache(shape));  // raises what does not fit at once
        }
    }
    return schemes;
}

// The text in two: what statistics are gathered from, and what is judged.
struct parts_of_text {
    std::vector<int> statistics, judged;
    std::string source;  // of the statistics
};

parts_of_text divide(const options& chosen, const model& model) {
    parts_of_text parts;
    std::vector<int> tokens = read_input(chosen, chosen.input_path, model.shape());
    const auto wanted = static_cast<std::size_t>(chosen.statistics_tokens);
    if (!chosen.statistics_path.empty()) {
        parts.statistics = read_input(chosen, chosen.statistics_path, model.shape());
        parts.statistics.resize(std::min(parts.statistics.size(), wanted));
        parts.judged = std::move(tokens);
        parts.source = "of another text";
    } else {
        // At most a third of a short text.
        const auto count = static_cast<std::ptrdiff_t>(std::min(wanted, tokens.size() / 3));
        parts.statistics.assign(tokens.begin(), tokens.begin() + count);
        parts.judged.assign(tokens.begin() + count, tokens.end());
        parts.source = "before them";
    }
    if (chosen.report.tokens > 0) {
        parts.judged.resize(std::min(parts.judged.size(), static_cast<std::size_t>(chosen.report.tokens)));
    }
    if (parts.judged.size() < 2) {
        throw std::invalid_argument("the text has " + std::to_string(tokens.size()) +
                                    " tokens: nothing is left to judge");
    }
    return parts;
}

// Tokens of a window, of greedy text and of runs that are read behind it, within the context of the model.
report_settings settings_of(const options& chosen, const model& model) {
    constexpr int usual_window = 2048, shortest = 256, runs = probes_of_window * (window::probe_tokens - 1);
    report_settings settings;
    settings.threads = chosen.evaluation.threads;
    settings.show_progress = chosen.evaluation.show_progress;
    const int context = model.shape().context;
    if (chosen.window > 0) {
        settings.window = window_of(chosen, model.shape());
        settings.greedy = std::min(chosen.report.greedy, context - settings.window);
    } else {
        settings.greedy = std::min(chosen.report.greedy, context / 4);
        settings.window = std::min(usual_window, context - settings.greedy);
    }
    settings.probes = 0;
    if (chosen.report.recall) {
        const int fitting = std::min(settings.window, context - settings.greedy - runs);
        if (fitting >= shortest && (chosen.window == 0 || fitting == settings.window)) {
            settings.window = fitting;
            settings.probes = probes_of_window;
        }
    }
    settings.chunk = chunk_of(chosen, settings.window);
    return settings;
}

void check_draft_model(const model& drafting, const model& judging, int greedy) {
    const model_shape &small = drafting.shape(), &large = judging.shape();
    if (small.vocab != large.vocab) {
        throw std::invalid_argument("the draft model has a vocabulary of " + std::to_string(small.vocab) +
                                    ", the model one of " + std::to_string(large.vocab));
    }
    if (small.context < greedy + 2 * draft_tokens) {
        throw std::invalid_argument("the draft model has a context of " + std::to_string(small.context) +
                                    ": too few for a greedy text of " + std::to_string(greedy) + " tokens");
    }
}

void write_file(const std::string& path, const std::string& text) {
    std::ofstream file(path, std::ios::binary);
    file << text;
    if (!file.flush()) {
        throw std::runtime_error("cannot write \"" + path + "\"");
    }
}

void write_pages(const report_state& state, const std::string& output) {
    state.save(output + ".json");
    write_file(output + ".md", report_as_markdown(state));
    write_file(output + ".html", report_as_html(state));
}

void run_report(const options& chosen) {
    const report_options& wanted = chosen.report;
    const model model(weights_of(chosen));
    report_settings settings = settings_of(chosen, model);
    std::vector<scheme_choice> schemes = report_schemes(wanted, model.shape(), settings.chunk);
    std::optional<llama::model> draft_model;
    if (!wanted.draft_model_path.empty()) {
        draft_model.emplace(load_model(wanted.draft_model_path));
        check_draft_model(*draft_model, model, settings.greedy);
        settings.draft_model = &*draft_model;
    }
    parts_of_text text = divide(chosen, model);
    // A short rest has little behind its first chunk, and would only thin out the figures.
    const std::size_t step = static_cast<std::size_t>(settings.window - 1), rest = text.judged.size() % step;
    if (text.judged.size() > step && rest < step / 2) {
        text.judged.resize(text.judged.size() - rest);
    }
    const auto windows = windows_of(text.judged, settings.window);
    const std::string output =
        wanted.output.empty() ? file_name(chosen.model_path) + ".report" : wanted.output;

    std::vector<std::string> labels;
    std::vector<std::pair<double, double>> sizes;
    const double sixteen_bits = schemes.front().bytes_per_token(model.shape());
    nlohmann::ordered_json remarks = nlohmann::ordered_json::array();
    for (const scheme_choice& scheme : schemes) {
        labels.push_back(scheme.label);
        const double bytes = scheme.bytes_per_token(model.shape());
        sizes.emplace_back(16.0 * bytes / sixteen_bits, bytes);
        if (const std::string remark = page_remark(scheme); !remark.empty()) {
            remarks.push_back(remark + ".");
        }
    }
    const cache_settings& cache = wanted.cache;
    nlohmann::ordered_json identity =
        conditions_of(chosen, cache, text.judged, text.statistics, settings.window, settings.chunk);
    identity["runs"] = settings.probes;
    identity["greedy"] = settings.greedy;
    identity["draft_model"] = file_name(wanted.draft_model_path);
    report_state state(
        std::move(identity),
        {{"name", file_name(chosen.model_path)},
         {"model",
          describe(model.shape()) + ", a vocabulary of " + std::to_string(model.shape().vocab) + "."},
         {"text", std::to_string(text.judged.size()) + " tokens of " + file_name(chosen.input_path) + " in " +
                      std::to_string(windows.size()) + " windows of " + std::to_string(settings.window) +
                      ", read in chunks of " + std::to_string(settings.chunk) + "; statistics from " +
                      std::to_string(text.statistics.size()) + " tokens " + text.source + "."},
         {"conditions", std::to_string(cache.sinks) + " sinks and " + std::to_string(cache.recent) +
                            " recent tokens in 16 bit, pages of " + std::to_string(cache.page_tokens) + ", " +
                            std::to_string(settings.threads) + " threads."},
         {"remarks", std::move(remarks)},
         {"windows", windows.size()},
         {"window_tokens", settings.window - 1}},
        labels);
    const bool resumed = !wanted.fresh && state.resume(output + ".json");
    state.add_sizes(sizes);

    double work = 0.0, done = 0.0;
    bool needs_statistics = !state.has_eight_bits();
    for (std::size_t w = 0; w < windows.size(); ++w) {
        for (const scheme_choice& scheme : schemes) {
            window::check(scheme, static_cast<int>(windows[w].size()), settings.chunk);
            const double of = window::work(model, static_cast<int>(windows[w].size()), settings.chunk, scheme,
                                           &scheme == &schemes.front());
            work += of;
            const bool known = state.has(w, scheme.label);
            done += known ? of : 0.0;
            needs_statistics = needs_statistics || (!known && scheme.use_statistics);
        }
    }
    if (resumed) {
        std::printf("going on from %s.json, %.0f %% done\n", output.c_str(), 100.0 * done / work);
    }
    activations space(settings.threads);
    const double statistics_work = needs_statistics ? static_cast<double>(text.statistics.size()) *
                                                          window::work(model, 1, 0, schemes.front(), true)
                                                    : 0.0;
    progress_bar progress(work + statistics_work, settings.show_progress);
    progress.skip(done);
    if (needs_statistics) {
        recording_cache recorded(model.shape());
        const kvq::calibration statistics =
            gather_statistics(model, text.statistics, settings.window, space, &recorded);
        for (scheme_choice& scheme : schemes) {
            scheme.give_statistics(statistics);
        }
        if (!state.has_eight_bits()) {
            const auto eight_bits = available(eight_bit_schemes, cache, model.shape());
            state.add_eight_bits(find_key_bias(model.config(), statistics),
                                 attention_errors(model.shape(), recorded, eight_bits, space.workers));
        }
        progress.advance(statistics_work);
    }
    write_pages(state, output);
    for (std::size_t w = 0; w < windows.size(); ++w) {
        const bool all =
            std::all_of(labels.begin(), labels.end(), [&](const auto& l) { return state.has(w, l); });
        if (all) {
            continue;
        }
        window judged(model, windows[w], schemes.front(), settings.chunk, settings.probes, settings.greedy,
                      settings.draft_model, space, progress);
        state.add(w, labels.front(), judged.baseline());
        for (std::size_t s = 0; s < schemes.size(); ++s) {
            if (s > 0 && state.has(w, labels[s])) {
                continue;
            }
            if (s > 0) {
                state.add(w, labels[s], judged.judge(schemes[s]));
            }
            write_pages(state, output);
            const report_row row = state.summarize().rows[s];
            progress.hide();
            std::printf(
                "window %zu of %zu  %-16s %5.2f bits  perplexity %9.4f  %+7.3f %%  KL %.2e  top-1 %6.2f %%\n",
                w + 1, windows.size(), row.scheme.c_str(), row.bits, row.perplexity, row.ppl_change_pct.value,
                row.kl_divergence.value, 100.0 * row.same_top);
            std::fflush(stdout);
        }
    }
    progress.hide();
    const report_summary summary = state.summarize();
    for (const auto& lines : {summary.recommendations, summary.warnings}) {
        for (const std::string& line : lines) {
            std::printf("%s\n", line.c_str());
        }
    }
    std::printf("%s.md, %s.html and %s.json are written\n", output.c_str(), output.c_str(), output.c_str());
}

}  // namespace

void add_report(CLI::App& app, options& chosen) {
    CLI::App& report = *app.add_subcommand(
        "report",
        "What each format costs on this model and text: a page with tables, plots and a recommendation.");
    report_options& wanted = chosen.report;
    add_model_options(report, chosen);
    add_input_options(report, chosen);
    add_cache_options(report, wanted.cache);
    add_window_chunk_option(report, chosen);
    report
        .add_option("--schemes", wanted.schemes,
                    "schemes to compare, separated by commas; default: ten usual ones")
        ->delimiter(',');
    report.add_option("--tokens", wanted.tokens, "tokens of the text to judge, 0: all")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    add_statistics_options(report, chosen);
    add_thread_options(report, chosen, "threads that share a window");
    report.add_option("--device", chosen.device, "cuda-products: the matrix products on a GPU, in fp32")
        ->check(CLI::IsMember({"cpu", "cuda-products"}))
        ->capture_default_str();
    report.add_option(
        "--output", wanted.output,
        "files to write, without extension: .md, .html, and .json, from which an interrupted report goes "
        "on; default: the name of the model and .report");
    report
        .add_option("--greedy", wanted.greedy,
                    "tokens of greedy text behind each window, for divergence lengths and drafts; at most a "
                    "quarter of the context")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    report.add_option("--draft-model", wanted.draft_model_path,
                      "a small model of the same vocabulary, whose drafts the formats judge");
    report.add_flag("--fresh", wanted.fresh, "start from the beginning and overwrite the .json");
    report.add_flag("--recall,!--no-recall", wanted.recall, "read runs of each window again behind it");
    report.callback([&] { run_report(chosen); });
}

}  // namespace llama
