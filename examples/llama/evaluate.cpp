#include "evaluate.hpp"

#include "window.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace llama {

std::vector<std::span<const int>> windows_of(std::span<const int> tokens, int window) {
    const std::size_t step = static_cast<std::size_t>(window - 1);
    std::vector<std::span<const int>> windows;
    for (std::size_t begin = 0; begin < tokens.size(); begin += step) {
        windows.push_back(tokens.subspan(begin, std::min(step, tokens.size() - begin)));
    }
    return windows;
}

std::vector<scheme_result> evaluate(const model& llama, std::span<const int> tokens,
                                    std::span<const scheme_choice> schemes,
                                    const evaluation_settings& settings) {
    const auto windows = windows_of(tokens, settings.window);
    double work = 0.0;
    for (const auto& text : windows) {
        for (const scheme_choice& scheme : schemes) {
            work += window::work(llama, static_cast<int>(text.size()), settings.chunk, scheme,
                                 &scheme == &schemes.front());
        }
    }

    const auto add = [](scheme_total& total, const window_result& of) {
        total.sums += of.sums();
        total.bytes_held += static_cast<double>(of.bytes_held);
        total.tokens_held += of.tokens_held;
        total.seconds += of.seconds;
        total.tokens_read += of.tokens_read;
    };
    std::vector<scheme_total> totals(schemes.size());
    {
        progress_bar progress(work, settings.show_progress);
        activations space(settings.threads);
        for (const auto& text : windows) {
            window judged(llama, text, schemes.front(), settings.chunk, 0, space, progress);
            add(totals[0], judged.baseline());
            for (std::size_t scheme = 1; scheme < schemes.size(); ++scheme) {
                add(totals[scheme], judged.judge(schemes[scheme]));
            }
        }
    }

    return results_of(llama.shape(), schemes, totals);
}

std::vector<scheme_result> results_of(const model_shape& shape, std::span<const scheme_choice> schemes,
                                      std::span<const scheme_total> totals) {
    std::vector<scheme_result> results;
    for (std::size_t scheme = 0; scheme < schemes.size(); ++scheme) {
        const scheme_total& total = totals[scheme];
        const scheme_choice& choice = schemes[scheme];
        const double perplexity = std::exp(total.sums.negative_log_likelihood / total.sums.tokens);
        const double bytes = choice.bytes_per_token(shape);
        const double baseline_perplexity = results.empty() ? perplexity : results.front().perplexity;
        const double baseline_bytes = results.empty() ? bytes : results.front().bytes_per_token;
        results.push_back({choice.label, total.sums.tokens, perplexity,
                           100.0 * (perplexity / baseline_perplexity - 1.0),
                           total.sums.kl_divergence / total.sums.tokens,
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
        results.push_back({chunk, evaluate(llama, tokens, schemes, settings)});
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
