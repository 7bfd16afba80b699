#include "drop.hpp"

#include "divergence.hpp"
#include "evaluate.hpp"
#include "kvq_cache.hpp"
#include "progress.hpp"
#include "window.hpp"

#include <kvq/policy/kept_tokens.hpp>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace llama {
namespace {

// Keeps its tokens in 16 bit, and its last queries, until drop().
class dropping_cache final : public kvq_cache {
public:
    dropping_cache(const model_shape& shape, const kvq::cache_options& options, const drop_settings& settings)
        : kvq_cache(shape, options),
          settings_(settings),
          whole_(cache_.new_sequence()),
          queries_(static_cast<std::size_t>(shape.layers)),
          whole_queries_(queries_.size()) {
        sequence_.hold();
    }

    void prefill(int layer, const const_rows& keys, const const_rows& values, const const_rows& queries,
                 rows out, kvq::thread_pool& workers) override {
        matrix& held = queries_[static_cast<std::size_t>(layer)];
        const Eigen::Index fresh = std::min<Eigen::Index>(queries.rows(), settings_.queries),
                           old = std::min(held.rows(), settings_.queries - fresh);
        matrix last(old + fresh, queries.cols());
        last.topRows(old) = held.bottomRows(old);
        last.bottomRows(fresh) = queries.bottomRows(fresh);
        held = std::move(last);
        kvq_cache::prefill(layer, keys, values, queries, out, workers);
    }

    void mark() {
        whole_ = sequence_.fork();
        whole_queries_ = queries_;
    }
    void back_to_mark() {
        sequence_ = whole_.fork();
        queries_ = whole_queries_;
    }

    void drop(double share) {
        for (int layer = 0; layer < shape_.layers && share < 1.0; ++layer) {
            if (shape_.is_recurrent(layer) || shape_.window(layer) > 0) {
                continue;
            }
            const int held = sequence_.tokens(layer);
            const auto q = kvq::tokens_of(queries_[static_cast<std::size_t>(layer)], shape_.heads);
            const int count = std::clamp(static_cast<int>(std::lround(share * held)),
                                         std::min(held, cache_.options().sinks + q.tokens), held);
            const std::vector<float> scores =
                settings_.policy == "knorm" ? kvq::key_norm_scores(sequence_, layer) : scored(layer, q);
            sequence_.retain(layer, kvq::best_tokens(sequence_, layer, scores, count, q.tokens), count);
        }
        sequence_.release();
        sequence_.drop_copies();
    }

private:
    template <class Queries>
    std::vector<float> scored(int layer, const Queries& q) const {
        if (shape_.attention_softcap > 0.0F) {
            return kvq::snapkv_scores(sequence_, layer, q, kvq::softcap{shape_.attention_softcap});
        }
        return kvq::snapkv_scores(sequence_, layer, q);
    }

    drop_settings settings_;
    kvq::sequence whole_;
    std::vector<matrix> queries_, whole_queries_;
};

struct drop_total {
    divergence_sums sums;
    std::size_t bytes = 0;
    int judged = 0, recalled = 0, recalled_cued = 0;
};

}  // namespace

std::vector<drop_result> drop(const model& llama, std::span<const int> tokens,
                              std::span<const scheme_choice> schemes, int window_tokens, int threads,
                              const drop_settings& settings) {
    constexpr int run = window::probe_tokens, cue = window::probe_cue;
    const int prompt = settings.prompt > 0 ? settings.prompt : window_tokens / 2;
    if (prompt >= window_tokens || prompt < settings.queries + run * settings.probes) {
        throw std::invalid_argument("a prompt of " + std::to_string(prompt) + " tokens in windows of " +
                                    std::to_string(window_tokens) + " with " +
                                    std::to_string(settings.queries) + " queries at its end and " +
                                    std::to_string(settings.probes) + " runs of " + std::to_string(run));
    }
    struct setting {
        const scheme_choice* scheme;
        double keep;
    };
    std::vector<setting> all;
    for (const scheme_choice& scheme : schemes) {
        if (!scheme.formats.keys || scheme.live || scheme.own_statistics > 0) {
            throw std::invalid_argument(scheme.label + " is no scheme whose prompt can wait in 16 bit");
        }
        for (const double keep : settings.keep) {
            all.push_back({&scheme, keep});
        }
    }
    if (settings.keep.front() != 1.0) {
        all.insert(all.begin(), {&schemes.front(), 1.0});
    }

    std::vector<drop_total> totals(all.size());
    activations space(threads);
    std::vector<std::span<const int>> windows = windows_of(tokens, window_tokens);
    windows.erase(
        std::remove_if(windows.begin(), windows.end(),
                       [&](const auto& w) { return static_cast<int>(w.size()) < window_tokens - 1; }),
        windows.end());
    if (windows.empty()) {
        throw std::invalid_argument("the text has no window of " + std::to_string(window_tokens) + " tokens");
    }
    progress_bar progress(static_cast<double>(windows.size() * all.size()), settings.show_progress);
    for (const std::span<const int> text : windows) {
        std::vector<int> input{llama.begin_of_text()};
        input.insert(input.end(), text.begin(), text.end() - 1);
        const auto part = [&](int first, int n) {
            return std::span<const int>(input).subspan(static_cast<std::size_t>(first),
                                                       static_cast<std::size_t>(n));
        };
        const int rest = static_cast<int>(input.size()) - prompt;
        std::vector<int> probes;  // in the part of the prompt that is not kept for its queries
        for (int i = 0; i < settings.probes; ++i) {
            probes.push_back(1 + (prompt - settings.queries - run) * (2 * i + 1) / (2 * settings.probes));
        }
        matrix expected, found;
        std::vector<distribution> wanted;
        for (std::size_t i = 0; i < all.size(); ++i) {
            const scheme_choice& scheme = *all[i].scheme;
            dropping_cache cache(llama.shape(), options_with(scheme.settings, scheme.formats), settings);
            (void)llama.read(part(0, prompt), 0, cache, settings.chunk, space);
            cache.mark();
            // Runs whose first tokens belong to the prompt.
            const auto recalled = [&](const matrix& states, int first) {
                matrix logits;
                llama.logits(states, logits, space.workers);
                int right = 0;
                for (Eigen::Index row = 0; row + 1 < logits.rows(); ++row) {
                    right += distribution(logits.row(row)).top() ==
                             input[static_cast<std::size_t>(first + row + 1)];
                }
                return right;
            };
            for (const int at : probes) {
                (void)llama.read(part(at, cue), prompt, cache, settings.chunk, space);
                cache.drop(all[i].keep);
                totals[i].recalled_cued += recalled(
                    llama.read(part(at + cue, run - cue), prompt + cue, cache, settings.chunk, space),
                    at + cue);
                totals[i].judged += run - cue - 1;
                cache.back_to_mark();
            }
            cache.drop(all[i].keep);
            totals[i].bytes += cache.bytes();
            cache.mark();
            for (const int at : probes) {
                (void)llama.read(part(at, cue), prompt, cache, settings.chunk, space);
                totals[i].recalled += recalled(
                    llama.read(part(at + cue, run - cue), prompt + cue, cache, settings.chunk, space),
                    at + cue);
                cache.back_to_mark();
            }
            const matrix states = llama.read(part(prompt, rest), prompt, cache, settings.chunk, space);
            matrix& logits = i == 0 ? expected : found;
            llama.logits(states, logits, space.workers);
            if (i == 0) {
                wanted.clear();
                for (int row = 0; row < rest; ++row) {
                    wanted.emplace_back(expected.row(row));
                }
            }
            for (int row = 0; row < rest; ++row) {
                const auto token = static_cast<std::size_t>(prompt + row);
                totals[i].sums += compare(wanted[static_cast<std::size_t>(row)],
                                          distribution(logits.row(row)), text[token]);
            }
            progress.advance(1.0);
        }
    }

    std::vector<drop_result> results;
    for (std::size_t i = 0; i < all.size(); ++i) {
        const drop_total& of = totals[i];
        const double n = of.sums.tokens, judged = std::max(1, of.judged);
        results.push_back({all[i].scheme->label, all[i].keep, of.bytes,
                           static_cast<double>(of.bytes) / static_cast<double>(totals.front().bytes),
                           of.sums.tokens, std::exp(of.sums.negative_log_likelihood / n),
                           of.sums.kl_divergence / n, of.sums.same_top / n, of.recalled / judged,
                           of.recalled_cued / judged});
    }
    return results;
}

}  // namespace llama
