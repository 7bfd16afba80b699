#include "window.hpp"

#include "stopwatch.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace llama {
namespace {

constexpr Eigen::Index logit_rows = 256;  // logits exist for so many tokens at a time,
constexpr std::size_t most_logits = std::size_t{1}
                                    << 28;  // but for the baseline's, if they are at most so many

// Says how far reading is, and keeps the keys and values of the first tokens.
class watched_cache final : public kv_cache {
public:
    watched_cache(kv_cache& cache, int layers, double work_per_token, progress_bar& progress)
        : cache_(cache), work_(work_per_token / layers), progress_(progress) {}

    void keep_first(int tokens, std::vector<matrix>& keys, std::vector<matrix>& values) {
        kept_ = tokens;
        keys_ = &keys;
        values_ = &values;
    }

    void prefill(int layer, const const_rows& keys, const const_rows& values, const const_rows& queries,
                 rows out, kvq::thread_pool& workers) override {
        if (keys_ && keys.rows() == kept_ && (*keys_)[static_cast<std::size_t>(layer)].size() == 0) {
            (*keys_)[static_cast<std::size_t>(layer)] = keys;
            (*values_)[static_cast<std::size_t>(layer)] = values;
        }
        cache_.prefill(layer, keys, values, queries, out, workers);
        progress_.advance(work_ * static_cast<double>(keys.rows()));
    }
    void append(int layer, const const_rows& keys, const const_rows& values) override {
        cache_.append(layer, keys, values);
    }
    kvq::recurrent_state* state() override { return cache_.state(); }
    int trim(int tokens) override { return cache_.trim(tokens); }
    std::size_t bytes() const override { return cache_.bytes(); }
    void end_of_step(int tokens, bool prompt_ends) override { cache_.end_of_step(tokens, prompt_ends); }
    int step_tokens() const override { return cache_.step_tokens(); }

private:
    kv_cache& cache_;
    double work_;
    progress_bar& progress_;
    int kept_ = 0;
    std::vector<matrix>*keys_ = nullptr, *values_ = nullptr;
};

// Greedy drafts of another model behind each prefix of `text`; its own cache is fp16. It sees as much of what
// is before as its context has room for.
std::vector<std::vector<int>> model_drafts(const model& drafting, std::span<const int> before,
                                           std::span<const int> text, activations& space) {
    constexpr int chunk = 512;
    const std::size_t room = static_cast<std::size_t>(drafting.shape().context) - text.size() - draft_tokens;
    const auto cache = parse_scheme("fp16", {}).make_cache(drafting.shape());
    const auto seen = before.last(std::min(before.size(), room));
    std::vector<int> known(seen.begin(), seen.end());
    matrix state = drafting.read(known, 0, *cache, chunk, space).bottomRows(1), next, logits;
    const auto likeliest = [&](const matrix& of) {
        drafting.logits(of, logits, space.workers);
        return static_cast<int>(distribution(logits.row(0)).top());
    };
    std::vector<std::vector<int>> drafts;
    for (const int token : text) {
        const int held = static_cast<int>(known.size());
        std::vector<int>& draft = drafts.emplace_back(1, likeliest(state));
        while (static_cast<int>(draft.size()) < draft_tokens) {
            const int position = held + static_cast<int>(draft.size()) - 1;
            next = drafting.forward({&draft.back(), 1}, position, *cache, 1, space);
            draft.push_back(likeliest(next));
        }
        drafting.trim(known, *cache, chunk, space);
        state = drafting.forward({&token, 1}, held, *cache, 1, space);
        known.push_back(token);
    }
    return drafts;
}

double reading_work(const model_shape& shape) {
    const double dim = shape.dim;
    return shape.layers *
           (dim * (2.0 * shape.query_dim() + 2.0 * shape.kv_dim()) + 3.0 * dim * shape.hidden_dim);
}
// Two exponentials and the sums of a divergence take as long as some hundred multiplications.
double judging_work(const model_shape& shape) { return shape.vocab * (shape.dim + 200.0); }

}  // namespace

divergence_sums window_result::sums() const {
    divergence_sums sum;
    for (std::size_t i = 0; i < kl_divergence.size(); ++i) {
        sum += {1, static_cast<double>(negative_log_likelihood[i]), static_cast<double>(kl_divergence[i]),
                same_top[i]};
    }
    return sum;
}

double window::work(const model& llama, int tokens, int chunk, const scheme_choice& scheme,
                    bool is_baseline) {
    const bool shares = scheme.has_fp16_window() && !llama.shape().has_state();
    const int known = is_baseline || !shares ? 0 : std::min(chunk, tokens);
    return (tokens - known) * (reading_work(llama.shape()) + judging_work(llama.shape()));
}

window::window(const model& llama, std::span<const int> text, const scheme_choice& baseline, int chunk,
               int probes, int greedy, const model* draft_model, activations& space, progress_bar& progress)
    : llama_(llama),
      text_(text.begin(), text.end()),
      input_{llama.begin_of_text()},
      chunk_(std::min(chunk, static_cast<int>(text.size()))),
      shares_first_chunk_(baseline.has_fp16_window() && !llama.shape().has_state()),
      space_(space),
      progress_(progress),
      first_keys_(static_cast<std::size_t>(llama.shape().layers)),
      first_values_(first_keys_.size()) {
    input_.insert(input_.end(), text_.begin(), text_.end() - 1);
    const auto cache = baseline.make_cache(llama.shape());
    watched_cache watched(*cache, llama.shape().layers, reading_work(llama.shape()), progress);
    if (shares_first_chunk_) {
        watched.keep_first(chunk_, first_keys_, first_values_);
    }
    const stopwatch time;
    states_ = llama.read(input_, 0, watched, chunk_, space);
    baseline_.seconds = time.seconds();
    baseline_.tokens_read = baseline_.tokens_held = static_cast<int>(input_.size());
    baseline_.bytes_held = cache->bytes();
    if (text_.size() * static_cast<std::size_t>(llama.shape().vocab) <= most_logits) {
        llama.logits(states_, logits_, space.workers);
    }
    score(states_, 0, baseline_, true);
    write_greedy(*cache, greedy);
    if (draft_model != nullptr) {
        drafts_ = model_drafts(*draft_model, input_, greedy_, space);
    }
    judge_drafts(baseline_);
    find_probes(probes);
    read_probes(*cache, baseline_);
}

void window::check(const scheme_choice& scheme, int tokens, int chunk) {
    const int exact = std::max(scheme.own_statistics, scheme.settings.plan_tokens);
    if (exact > chunk && tokens > chunk) {
        throw std::invalid_argument(
            scheme.label + " has 16-bit keys for " + std::to_string(exact) +
            " tokens, more than the chunk of " + std::to_string(chunk) +
            " that is exact for every scheme: that would flatter it; see +ownN and +selfN");
    }
}

window_result window::judge(const scheme_choice& scheme) {
    check(scheme, static_cast<int>(text_.size()), chunk_);
    const auto cache = scheme.make_cache(llama_.shape());
    const int known = shares_first_chunk_ && scheme.has_fp16_window() ? chunk_ : 0;
    window_result result;
    for (int i = 0; i < known; ++i) {
        result.negative_log_likelihood.push_back(
            baseline_.negative_log_likelihood[static_cast<std::size_t>(i)]);
    }
    result.kl_divergence.assign(static_cast<std::size_t>(known), 0.0F);
    result.same_top.assign(static_cast<std::size_t>(known), 1);
    if (known > 0) {
        for (int layer = 0; layer < llama_.shape().layers; ++layer) {
            cache->append(layer, first_keys_[static_cast<std::size_t>(layer)],
                          first_values_[static_cast<std::size_t>(layer)]);
        }
    }
    const auto rest = span_of_int(input_).subspan(static_cast<std::size_t>(known));
    watched_cache watched(*cache, llama_.shape().layers, reading_work(llama_.shape()), progress_);
    const stopwatch time;
    const matrix states =
        rest.empty() ? matrix(0, llama_.shape().dim) : llama_.read(rest, known, watched, chunk_, space_);
    result.seconds = time.seconds();
    result.tokens_read = static_cast<int>(rest.size());
    result.tokens_held = static_cast<int>(input_.size());
    result.bytes_held = cache->bytes();
    score(states, known, result, false);
    read_greedy(*cache, (rest.empty() ? states_ : states).bottomRows(1), result);
    read_probes(*cache, result);
    return result;
}

// The last token of the text is only predicted: the model has not read it, and writes its own instead.
void window::write_greedy(kv_cache& cache, int tokens) {
    matrix state = states_.bottomRows(1), logits;
    while (static_cast<int>(greedy_.size()) < tokens) {
        llama_.logits(state, logits, space_.workers);
        greedy_.push_back(static_cast<int>(distribution(logits.row(0)).top()));
        lookups_.push_back(lookup_drafts(input_, greedy_, static_cast<int>(greedy_.size()) - 1));
        if (static_cast<int>(greedy_.size()) < tokens) {
            const int position = static_cast<int>(input_.size() + greedy_.size()) - 1;
            state = llama_.forward({&greedy_.back(), 1}, position, cache, 1, space_);
        }
    }
    baseline_.greedy.likeliest = greedy_;
}

void window::read_greedy(kv_cache& cache, const matrix& last_state, window_result& result) {
    if (greedy_.empty()) {
        return;
    }
    const int count = static_cast<int>(greedy_.size());
    matrix states(count, llama_.shape().dim), logits;
    states.topRows(1) = last_state;
    if (count > 1) {
        states.bottomRows(count - 1) =
            llama_.read(span_of_int(greedy_).first(static_cast<std::size_t>(count - 1)),
                        static_cast<int>(input_.size()), cache, 1, space_);
    }
    llama_.logits(states, logits, space_.workers);
    for (int i = 0; i < count; ++i) {
        result.greedy.likeliest.push_back(static_cast<int>(distribution(logits.row(i)).top()));
    }
    judge_drafts(result);
}

void window::judge_drafts(window_result& result) const {
    result.greedy.lookup = accepted_drafts(greedy_, result.greedy.likeliest, lookups_);
    result.greedy.draft_model = accepted_drafts(greedy_, result.greedy.likeliest, drafts_);
}

// Judges the tokens from `first` on; `states` begin there.
void window::score(const matrix& states, Eigen::Index first, window_result& result, bool is_baseline) {
    const std::size_t count = static_cast<std::size_t>(first + states.rows());
    result.negative_log_likelihood.resize(count);
    result.kl_divergence.resize(count);
    result.same_top.resize(count);
    if (is_baseline && logits_.size() > 0) {
        distributions_.resize(count);
    }
    matrix expected, found;
    for (Eigen::Index begin = 0; begin < states.rows(); begin += logit_rows) {
        const Eigen::Index rows = std::min(logit_rows, states.rows() - begin);
        if (logits_.size() == 0) {
            llama_.logits(states_.middleRows(first + begin, rows), expected, space_.workers);
        }
        if (!is_baseline) {
            llama_.logits(states.middleRows(begin, rows), found, space_.workers);
        }
        space_.workers.parallel_for(static_cast<int>(rows), [&](int row) {
            const auto token = static_cast<std::size_t>(first + begin + row);
            const bool kept = logits_.size() > 0;
            if (is_baseline && kept) {
                distributions_[token] = distribution(logits_.row(static_cast<Eigen::Index>(token)));
            }
            const distribution wanted = kept ? distributions_[token] : distribution(expected.row(row));
            const distribution other = is_baseline ? wanted : distribution(found.row(row));
            const divergence_sums of = compare(wanted, other, text_[token]);
            result.negative_log_likelihood[token] = static_cast<float>(of.negative_log_likelihood);
            result.kl_divergence[token] = static_cast<float>(of.kl_divergence);
            result.same_top[token] = of.same_top != 0;
        });
        progress_.advance(judging_work(llama_.shape()) * static_cast<double>(rows));
    }
}

void window::find_probes(int probes) {
    const int count = static_cast<int>(text_.size());
    for (int probe = 0; probe < probes; ++probe) {
        const int begin = std::max(1, count / probes * probe),
                  end = count / probes * (probe + 1) - probe_tokens;
        int hardest = -1;
        double most = -1.0;
        for (int first = begin; first < end; ++first) {
            double sum = 0.0;
            for (int i = probe_cue; i < probe_tokens; ++i) {
                sum += static_cast<double>(
                    baseline_.negative_log_likelihood[static_cast<std::size_t>(first + i)]);
            }
            if (sum > most) {
                most = sum;
                hardest = first;
            }
        }
        if (hardest >= 0) {
            probes_.push_back(hardest);
        }
    }
}

// The runs follow the window and its greedy text, one after the other; the last token of its text, which is
// only predicted, is left out. All are read at once, since the matrices become floats for every reading.
void window::read_probes(kv_cache& cache, window_result& result) {
    constexpr int read = probe_tokens - 1, judged = probe_tokens - probe_cue;
    std::vector<int> runs;
    for (const int first : probes_) {
        runs.insert(runs.end(), text_.begin() + first, text_.begin() + first + read);
    }
    if (runs.empty()) {
        return;
    }
    const std::size_t before = input_.size() + std::max<std::size_t>(greedy_.size(), 1) - 1;
    const matrix states = llama_.read(runs, static_cast<int>(before), cache, read, space_);
    matrix logits;
    for (std::size_t i = 0; i < probes_.size(); ++i) {
        const auto run = span_of_int(text_).subspan(static_cast<std::size_t>(probes_[i]), probe_tokens);
        llama_.logits(states.middleRows(static_cast<Eigen::Index>(i) * read + read - judged, judged), logits,
                      space_.workers);
        probe_result probe{static_cast<double>(probes_[i]) / static_cast<double>(text_.size())};
        for (int token = probe_cue; token < probe_tokens; ++token) {
            const distribution found(logits.row(token - probe_cue));
            const int wanted = run[static_cast<std::size_t>(token)];
            ++probe.judged;
            probe.recalled += found.top() == wanted;
            probe.negative_log_likelihood -= found.log_probability(wanted);
        }
        result.probes.push_back(probe);
    }
}

}  // namespace llama
