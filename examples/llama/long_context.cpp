#include "long_context.hpp"

#include "divergence.hpp"
#include "live_cache.hpp"

#include <algorithm>
#include <cmath>

namespace llama {

std::vector<long_context_row> long_context(const model& llama, std::span<const int> tokens,
                                           const cache_settings& settings, const live_settings& live,
                                           int every, int chunk) {
    std::vector<int> input{llama.begin_of_text()};
    input.insert(input.end(), tokens.begin(), tokens.end() - 1);

    const scheme_choice full = parse_scheme("fp16", {.page_tokens = settings.page_tokens});
    const auto baseline = full.make_cache(llama.shape());
    const auto cache = std::make_unique<live_cache>(llama.shape(), settings, live);

    std::vector<long_context_row> rows;
    divergence_sums sums, baseline_sums;
    std::size_t requantized = 0;
    activations space;
    matrix expected, got;
    const int count = static_cast<int>(input.size()), step = cache->step_tokens();
    for (int first = 0; first < count; first += step) {
        const auto piece = std::span<const int>(input).subspan(
            static_cast<std::size_t>(first), static_cast<std::size_t>(std::min(step, count - first)));
        llama.logits(llama.forward(piece, first, *baseline, chunk, space), expected, space.workers);
        llama.logits(llama.forward(piece, first, *cache, chunk, space), got, space.workers);
        for (Eigen::Index row = 0; row < got.rows(); ++row) {
            const distribution wanted(expected.row(row)), found(got.row(row));
            const int next = tokens[static_cast<std::size_t>(first + row)];
            baseline_sums += compare(wanted, wanted, next);
            sums += compare(wanted, found, next);
        }
        const int held = first + static_cast<int>(piece.size());
        if (sums.tokens >= every || held == count) {
            const double n = sums.tokens;
            rows.push_back({held, baseline->bytes(), cache->bytes(), cache->requantized() - requantized,
                            cache->held(), sums.kl_divergence / n, sums.same_top / n,
                            std::exp(sums.negative_log_likelihood / n),
                            std::exp(baseline_sums.negative_log_likelihood / n)});
            requantized = cache->requantized();
            sums = baseline_sums = {};
        }
    }
    return rows;
}

}  // namespace llama
