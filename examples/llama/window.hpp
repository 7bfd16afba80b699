// One window of a text: read once by a baseline, then judged with one scheme after the other.
#pragma once

#include "divergence.hpp"
#include "drafts.hpp"
#include "model.hpp"
#include "progress.hpp"
#include "schemes.hpp"

#include <span>
#include <vector>

namespace llama {

// A run of tokens of the window that is read again behind its end. The model sees the first tokens of the run
// and has to go on with the others, which it can only do by looking them up in the cache.
struct probe_result {
    double depth;  // of the run in the window, 0 to 1
    int judged = 0, recalled = 0;
    double negative_log_likelihood = 0.0;  // sum
};

// Greedy text behind a window: the baseline writes it, the other schemes read it as decoding would, one token
// after the other. Up to the first token that they would have chosen otherwise it is their own greedy text.
struct continuation {
    std::vector<int> likeliest;  // behind each prefix of the baseline's text
    draft_count lookup;          // drafts out of the text itself, judged by the scheme
    draft_count draft_model;     // drafts of another model, judged by the scheme
};

// What a scheme makes of a window; one value for each predicted token, in the order of the text.
struct window_result {
    std::vector<float> negative_log_likelihood, kl_divergence;
    std::vector<unsigned char> same_top;
    std::vector<probe_result> probes;
    continuation greedy;
    std::size_t bytes_held = 0;  // by the sequence at the end of the text
    int tokens_held = 0;
    double seconds = 0.0;  // to read tokens_read tokens
    int tokens_read = 0;

    divergence_sums sums() const;
};

// The window convention: a window is begin-of-text and its text but for the last token, so that each token of
// the text is predicted once. All threads of `space` work on one window.
//
// No query of the first chunk sees a quantized page. So for every scheme with an fp16 window the states of
// that chunk are the baseline's, and the cache takes its keys and values as the baseline had them.
class window {
public:
    static constexpr int probe_tokens = 24, probe_cue = 8;  // of a run; the first ones are not judged

    // Reads the text with the baseline, which then writes `greedy` tokens. `probes` runs are sought, one in
    // each of as many equal parts of the window, those that the baseline found hardest to predict. Throws
    // what the model throws if all that does not fit into its positions.
    window(const model& llama, std::span<const int> text, const scheme_choice& baseline, int chunk,
           int probes, int greedy, const model* draft_model, activations& space, progress_bar& progress);

    const window_result& baseline() const { return baseline_; }
    window_result judge(const scheme_choice& scheme);

    // Throws std::invalid_argument where a scheme has 16-bit keys for more tokens than the chunk that is
    // exact for every scheme.
    static void check(const scheme_choice& scheme, int tokens, int chunk);

    // What a window costs, in multiplications: the baseline, and each further scheme.
    static double work(const model& llama, int tokens, int chunk, const scheme_choice& scheme,
                       bool is_baseline);

private:
    using span_of_int = std::span<const int>;

    void score(const matrix& states, Eigen::Index first, window_result& result, bool is_baseline);
    void find_probes(int probes);
    void read_probes(kv_cache& cache, window_result& result);
    void write_greedy(kv_cache& cache, int tokens);
    void read_greedy(kv_cache& cache, const matrix& last_state, window_result& result);
    void judge_drafts(window_result& result) const;

    const model& llama_;
    std::vector<int> text_, input_;
    int chunk_;
    bool shares_first_chunk_;
    activations& space_;
    progress_bar& progress_;
    matrix states_;                                   // of the baseline
    matrix logits_;                                   // of the baseline, if they fit into memory
    std::vector<distribution> distributions_;         // of logits_
    std::vector<matrix> first_keys_, first_values_;   // by layer: of the first chunk
    std::vector<int> probes_;                         // first tokens of runs, in text_
    std::vector<int> greedy_;                         // the baseline's text behind the window
    std::vector<std::vector<int>> lookups_, drafts_;  // behind each prefix of it
    window_result baseline_;
};

}  // namespace llama
