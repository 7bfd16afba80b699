#include "evaluate.hpp"

#include "window.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace llama {
namespace {

window_total total_of(const window_result& of, double bytes_per_token) {
    return {of.sums(),  static_cast<double>(of.bytes_held),  static_cast<double>(of.tokens_held),
            of.seconds, static_cast<double>(of.tokens_read), bytes_per_token};
}

}  // namespace

std::vector<std::span<const int>> windows_of(std::span<const int> tokens, int window) {
    const std::size_t step = static_cast<std::size_t>(window - 1);
    std::vector<std::span<const int>> windows;
    for (std::size_t begin = 0; begin < tokens.size(); begin += step) {
        windows.push_back(tokens.subspan(begin, std::min(step, tokens.size() - begin)));
    }
    return windows;
}

std::vector<std::size_t> part_of_windows(std::size_t windows, const evaluation_settings& settings) {
    std::vector<std::size_t> part;
    for (auto w = static_cast<std::size_t>(settings.part - 1); w < windows;
         w += static_cast<std::size_t>(settings.parts)) {
        part.push_back(w);
    }
    return part;
}

void scheme_total::add(const window_total& of) {
    sums += of.sums;
    bytes_held += of.bytes_held;
    tokens_held += of.tokens_held;
    seconds += of.seconds;
    tokens_read += of.tokens_read;
    bytes_per_token = of.bytes_per_token;
    windows.push_back(of.sums);
}

std::vector<scheme_result> evaluate(const model& llama, std::span<const int> tokens,
                                    std::span<const scheme_choice> schemes,
                                    const evaluation_settings& settings, evaluation_record& record) {
    const auto windows = windows_of(tokens, settings.window);
    const auto part = part_of_windows(windows.size(), settings);
    const auto known = [&](std::size_t window, const scheme_choice& scheme) {
        return record.find(window, scheme.label) != nullptr;
    };
    double work = 0.0, done = 0.0;
    for (const std::size_t w : part) {
        for (const scheme_choice& scheme : schemes) {
            window::check(scheme, static_cast<int>(windows[w].size()), settings.chunk);
            const double of = window::work(llama, static_cast<int>(windows[w].size()), settings.chunk, scheme,
                                           &scheme == &schemes.front());
            work += of;
            done += known(w, scheme) ? of : 0.0;
        }
    }

    progress_bar progress(work, settings.show_progress);
    progress.skip(done);
    activations space(settings.threads);
    for (const std::size_t w : part) {
        const auto is_known = [&](const scheme_choice& scheme) { return known(w, scheme); };
        if (std::all_of(schemes.begin(), schemes.end(), is_known)) {
            continue;
        }
        window judged(llama, windows[w], schemes.front(), settings.chunk, 0, 0, nullptr, space, progress);
        record.add(w, schemes.front().label,
                   total_of(judged.baseline(), schemes.front().bytes_per_token(llama.shape())));
        for (const scheme_choice& scheme : schemes.subspan(1)) {
            if (!is_known(scheme)) {
                record.add(w, scheme.label,
                           total_of(judged.judge(scheme), scheme.bytes_per_token(llama.shape())));
            }
        }
    }

    std::vector<scheme_total> totals(schemes.size());
    for (const std::size_t w : part) {
        for (std::size_t scheme = 0; scheme < schemes.size(); ++scheme) {
            totals[scheme].add(*record.find(w, schemes[scheme].label));
        }
    }
    return results_of(llama.shape(), schemes, totals);
}

bool is_recorded(const evaluation_record& record, std::span<const int> tokens,
                 const evaluation_settings& settings, const scheme_choice& scheme) {
    const auto part = part_of_windows(windows_of(tokens, settings.window).size(), settings);
    return std::all_of(part.begin(), part.end(),
                       [&](std::size_t w) { return record.find(w, scheme.label) != nullptr; });
}

std::vector<scheme_result> results_of(const model_shape& shape, std::span<const scheme_choice> schemes,
                                      std::span<const scheme_total> totals) {
    std::vector<scheme_result> results;
    for (std::size_t scheme = 0; scheme < schemes.size(); ++scheme) {
        const scheme_total& total = totals[scheme];
        const scheme_choice& choice = schemes[scheme];
        const double perplexity = std::exp(total.sums.negative_log_likelihood / total.sums.tokens);
        const double bytes =
            total.bytes_per_token != 0.0 ? total.bytes_per_token : choice.bytes_per_token(shape);
        const double baseline_bytes = results.empty() ? bytes : results.front().bytes_per_token;
        std::vector<block_sums> blocks;
        for (std::size_t w = 0; w < total.windows.size(); ++w) {
            const divergence_sums &of = total.windows[w], &base = totals.front().windows[w];
            blocks.push_back({static_cast<double>(of.tokens),
                              of.negative_log_likelihood - base.negative_log_likelihood, of.kl_divergence});
        }
        if (blocks.empty()) {
            const double change =
                total.sums.negative_log_likelihood - totals.front().sums.negative_log_likelihood;
            blocks.push_back({static_cast<double>(total.sums.tokens), change, total.sums.kl_divergence});
        }
        results.push_back({choice.label, total.sums.tokens, perplexity, ppl_change_pct_of(blocks),
                           kl_divergence_of(blocks), worst_of(blocks).kl_divergence(),
                           worst_of(blocks).ppl_change_pct(),
                           static_cast<double>(total.sums.same_top) / total.sums.tokens, bytes,
                           baseline_bytes / bytes, 16.0 * bytes / baseline_bytes,
                           total.bytes_held / total.tokens_held, total.tokens_read / total.seconds});
    }
    return results;
}

std::vector<chunk_result> evaluate_chunks(const model& llama, std::span<const int> tokens,
                                          std::span<const scheme_choice> schemes, std::span<const int> chunks,
                                          evaluation_settings settings) {
    std::vector<chunk_result> results;
    for (const int chunk : chunks) {
        settings.chunk = chunk;
        evaluation_record record;
        results.push_back({chunk, evaluate(llama, tokens, schemes, settings, record)});
    }
    return results;
}

worst_chunk find_worst(std::span<const chunk_result> results, std::size_t scheme) {
    const double first = results.front().schemes[scheme].perplexity;
    worst_chunk worst{0, -std::numeric_limits<double>::infinity()};
    for (const chunk_result& result : results.subspan(1)) {
        const double change = 100.0 * (result.schemes[scheme].perplexity / first - 1.0);
        if (!(change <= worst.ppl_delta_pct)) {  // NaN is worse than any number
            worst = {result.chunk, change};
        }
    }
    return worst;
}

}  // namespace llama
