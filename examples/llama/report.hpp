// A report on one model: what each format costs on a text of its user. Measured window by window, kept in a
// JSON file on the way.
#pragma once

#include "bootstrap.hpp"
#include "key_bias.hpp"
#include "window.hpp"

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace llama {

struct report_settings {
    int window = 0, chunk = 0, threads = 1;
    int greedy = 0;  // tokens of greedy text behind each window; 0: none
    int probes = 4;  // runs of each window that are read again behind it; 0: none
    const model* draft_model = nullptr;
    bool show_progress = false;
};

struct recall {
    double depth = 0.0;  // mean over windows
    int judged = 0, recalled = 0;
    double negative_log_likelihood = 0.0;  // mean
    double share() const { return judged > 0 ? static_cast<double>(recalled) / judged : 0.0; }
};

// Greedy text behind windows, that of the baseline.
struct greedy_agreement {
    int texts = 0, whole = 0;  // whole: the scheme writes the same text
    int tokens = 0, same = 0;
    double length = 0.0;  // mean number of tokens before the first other one
    draft_count lookup, draft_model, own;
    double same_share() const { return tokens > 0 ? static_cast<double>(same) / tokens : 0.0; }
};

struct report_row {
    std::string scheme;
    double bits = 0.0, bytes_per_token = 0.0, held_per_token = 0.0;
    int windows = 0, tokens = 0;
    bool complete = false;  // all windows are judged
    double perplexity = 0.0;
    interval ppl_change_pct, kl_divergence;
    double same_top = 0.0;
    double worst_kl_divergence = 0.0;  // mean of the worst 1 % of tokens
    double worst_window_kl = 0.0, worst_window_ppl_change_pct = 0.0;
    std::vector<double> by_position;  // mean divergence in as many equal parts of a window
    std::vector<recall> recalls;      // by part of the window
    recall recall_of_all() const;
    greedy_agreement greedy;
    double tokens_per_second = 0.0;  // read by all threads
};

struct report_summary {
    std::vector<report_row> rows;  // the baseline first
    std::vector<attention_error> eight_bits;
    key_bias bias;
    std::string resampled;  // what the intervals resample
    std::vector<std::string> warnings, recommendations;
};

// What was measured so far, and how: the JSON file. Windows and schemes are added one by one.
class report_state {
public:
    static constexpr int parts = 16;  // of a window, for the divergence by position

    // identity: everything that results depend on.
    report_state(nlohmann::ordered_json identity, nlohmann::ordered_json facts,
                 std::vector<std::string> schemes);

    // Goes on from a file of the same identity. Returns false if there is no file. Throws std::runtime_error
    // that names what differs, or that the file is none of a report.
    bool resume(const std::string& path);
    // Writes another file first, which then takes the place of this one.
    void save(const std::string& path) const;

    bool has(std::size_t window, const std::string& scheme) const;
    void add(std::size_t window, const std::string& scheme, const window_result& result);
    void add_eight_bits(const key_bias& bias, const std::vector<attention_error>& errors);
    bool has_eight_bits() const { return state_.contains("eight_bits"); }
    // Bits and bytes of each scheme, in its order.
    void add_sizes(const std::vector<std::pair<double, double>>& bits_and_bytes);

    const nlohmann::ordered_json& facts() const { return state_["facts"]; }
    report_summary summarize() const;

private:
    nlohmann::ordered_json state_;
    std::vector<std::string> schemes_;
};

// Pages for people: Markdown, and HTML with its plots inside.
std::string report_as_markdown(const report_state& state);
std::string report_as_html(const report_state& state);

}  // namespace llama
