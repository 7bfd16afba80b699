// Quality loss of a scheme: perplexity, and divergence from the same model with a 16-bit cache.
#pragma once

#include "bootstrap.hpp"
#include "divergence.hpp"
#include "evaluation_record.hpp"
#include "model.hpp"
#include "schemes.hpp"

#include <span>
#include <string>
#include <vector>

namespace llama {

struct evaluation_settings {
    int window = 512;
    int chunk = 512;  // tokens per prefill
    int threads = 2;  // that share a window
    bool show_progress = false;
    int part = 1, parts = 1;  // every parts-th window, the first of them counted from 1
};

struct scheme_result {
    std::string scheme;
    int tokens;  // predicted
    double perplexity;
    interval ppl_delta_pct;             // against the 16-bit cache; intervals resample windows
    interval kld;                       // mean over tokens, in nats
    double worst_window_kld;            // of the window where it is largest,
    double worst_window_ppl_delta_pct;  // and the change of its perplexity
    double top1;                        // share of tokens whose likeliest successor stays the same
    double bytes_per_token;             // quantized pages
    double compression;                 // against 16-bit pages
    double bits;                        // per quantized value, parameters included
    double window_bytes_per_token;      // held by a sequence at the end of a window, 16-bit tokens included
    double tokens_per_second;           // read by all threads, without the evaluation
};

// The text of each window: one token less than the window, which begins with begin-of-text. The last one may
// be shorter.
std::vector<std::span<const int>> windows_of(std::span<const int> tokens, int window);

// The numbers of the windows that are to be judged.
std::vector<std::size_t> part_of_windows(std::size_t windows, const evaluation_settings& settings);

// Sums over windows, of one scheme.
struct scheme_total : window_total {
    std::vector<divergence_sums> windows;  // empty: not known one by one

    void add(const window_total& of);
};
// The first scheme is the baseline. Without single windows the intervals are the values.
std::vector<scheme_result> results_of(const model_shape& shape, std::span<const scheme_choice> schemes,
                                      std::span<const scheme_total> totals);

// The first scheme is the baseline. All results except tokens_per_second are independent of the number of
// threads. Windows that `record` has are not read again; others are added to it.
std::vector<scheme_result> evaluate(const model& llama, std::span<const int> tokens,
                                    std::span<const scheme_choice> schemes,
                                    const evaluation_settings& settings, evaluation_record& record);

// All windows that are to be judged are in the record.
bool is_recorded(const evaluation_record& record, std::span<const int> tokens,
                 const evaluation_settings& settings, const scheme_choice& scheme);

struct chunk_result {
    int chunk;
    std::vector<scheme_result> schemes;
};

// The same with several chunk sizes, each against the baseline of its own chunk size.
std::vector<chunk_result> evaluate_chunks(const model& llama, std::span<const int> tokens,
                                          std::span<const scheme_choice> schemes, std::span<const int> chunks,
                                          evaluation_settings settings);

// The chunk size, other than the first, with the worst perplexity against the first; and the difference in
// percent.
struct worst_chunk {
    int chunk;
    double ppl_delta_pct;
};
worst_chunk find_worst(std::span<const chunk_result> results, std::size_t scheme);

}  // namespace llama
