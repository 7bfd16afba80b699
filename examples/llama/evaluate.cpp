#include "evaluate.hpp"

#include "progress.hpp"
#include "stopwatch.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

namespace llama {
namespace {

struct window_result {
    divergence_sums sums;
    double bytes_held = 0.0;
    int tokens_held = 0;
    double seconds = 0.0;  // time to read the tokens
};

// The window convention: every window is begin-of-text and the next (window - 1) tokens of the input, all of which
// are predicted, so that each token of the input counts once. The last window may be shorter.
std::vector<window_result> evaluate_window(const text_reader& reader, std::span<const int> text,
                                           std::span<const scheme_choice> schemes, int chunk,
                                           progress_bar& progress) {
    std::vector<int> input{reader.config().begin_of_text};
    input.insert(input.end(), text.begin(), text.end() - 1);

    std::vector<window_result> results;
    std::vector<matrix> states;
    for (const scheme_choice& scheme : schemes) {
        text_in_cache read = reader.read(input, scheme, chunk);
        states.push_back(std::move(read.states));
        results.push_back(
            {{}, static_cast<double>(read.bytes), static_cast<int>(input.size()), read.seconds});
        progress.advance();
    }

    // States are small, logits are large: logits exist for a few tokens at a time, the baseline's first.
    constexpr Eigen::Index block = 64;
    matrix baseline_logits, other_logits;
    const auto count = static_cast<Eigen::Index>(text.size());
    for (Eigen::Index begin = 0; begin < count; begin += block) {
        const Eigen::Index rows = std::min(block, count - begin);
        std::vector<distribution> baseline;
        for (std::size_t scheme = 0; scheme < schemes.size(); ++scheme) {
            matrix& logits = scheme == 0 ? baseline_logits : other_logits;
            reader.logits(states[scheme].middleRows(begin, rows), logits);
            for (Eigen::Index row = 0; row < rows; ++row) {
                const distribution current(logits.row(row));
                if (scheme == 0) {
                    baseline.push_back(current);
                }
                results[scheme].sums += compare(baseline[static_cast<std::size_t>(row)], current,
                                                text[static_cast<std::size_t>(begin + row)]);
            }
        }
    }
    return results;
}

class model_reader final : public text_reader {
public:
    explicit model_reader(const model& llama) : model_(llama) {}

    const model_config& config() const override { return model_.config(); }
    text_in_cache read(std::span<const int> tokens, const scheme_choice& scheme, int chunk) const override {
        const auto cache = scheme.make_cache(model_.shape());
        activations space;
        const stopwatch time;
        text_in_cache text{model_.read(tokens, 0, *cache, chunk, space)};
        text.bytes = cache->bytes();
        text.seconds = time.seconds();
        return text;
    }
    void logits(const kv_cache::const_rows& states, matrix& out) const override {
        model_.logits(states, out);
    }

private:
    const model& model_;
};

}  // namespace

std::vector<scheme_result> evaluate(const model& llama, std::span<const int> tokens,
                                    std::span<const scheme_choice> schemes,
                                    const evaluation_settings& settings) {
    return evaluate(model_reader(llama), tokens, schemes, settings);
}

std::vector<scheme_result> evaluate(const text_reader& reader, std::span<const int> tokens,
                                    std::span<const scheme_choice> schemes,
                                    const evaluation_settings& settings) {
    const std::size_t step = static_cast<std::size_t>(settings.window - 1);
    const std::size_t windows = (tokens.size() + step - 1) / step;

    std::vector<std::vector<window_result>> by_window(windows);
    {
        progress_bar progress(static_cast<int>(windows * schemes.size()), settings.show_progress);
        kvq::thread_pool(settings.threads).parallel_for(static_cast<int>(windows), [&](int window) {
            const std::size_t index = static_cast<std::size_t>(window), begin = index * step;
            const auto text = tokens.subspan(begin, std::min(step, tokens.size() - begin));
            by_window[index] = evaluate_window(reader, text, schemes, settings.chunk, progress);
        });
    }

    std::vector<scheme_result> results;
    for (std::size_t scheme = 0; scheme < schemes.size(); ++scheme) {
        window_result total;
        for (const auto& window : by_window) {
            total.sums += window[scheme].sums;
            total.bytes_held += window[scheme].bytes_held;
            total.tokens_held += window[scheme].tokens_held;
            total.seconds += window[scheme].seconds;
        }
        const scheme_choice& choice = schemes[scheme];
        const double perplexity = std::exp(total.sums.negative_log_likelihood / total.sums.tokens);
        const double bytes = choice.bytes_per_token(reader.config().shape);
        const double baseline_perplexity = results.empty() ? perplexity : results.front().perplexity;
        const double baseline_bytes = results.empty() ? bytes : results.front().bytes_per_token;
        results.push_back({choice.label, total.sums.tokens, perplexity,
                           100.0 * (perplexity / baseline_perplexity - 1.0),
                           total.sums.kl_divergence / total.sums.tokens,
                           static_cast<double>(total.sums.same_top) / total.sums.tokens, bytes,
                           baseline_bytes / bytes, 16.0 * bytes / baseline_bytes,
                           total.bytes_held / total.tokens_held, total.tokens_held / total.seconds});
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
