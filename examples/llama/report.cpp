#include "report.hpp"

#include "evaluation_record.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace llama {
namespace {

using json = nlohmann::ordered_json;

constexpr int version = 2;

// JSON has no numbers that are not finite.
json number(double x) { return std::isfinite(x) ? json(x) : json(nullptr); }
double number(const json& x) { return x.is_null() ? std::nan("") : x.get<double>(); }

json numbers(const std::vector<float>& values) {
    json list = json::array();
    for (const float x : values) {
        list.push_back(number(static_cast<double>(x)));
    }
    return list;
}
std::vector<float> floats(const json& list) {
    std::vector<float> values;
    for (const json& x : list) {
        values.push_back(static_cast<float>(number(x)));
    }
    return values;
}

json to_json(const draft_count& of) { return {of.steps, of.drafted, of.accepted}; }
draft_count drafts_from_json(const json& of) { return {of.at(0), of.at(1), of.at(2)}; }

json to_json(const window_result& of) {
    std::string same;
    for (const unsigned char x : of.same_top) {
        same += x ? '1' : '0';
    }
    json result{{"negative_log_likelihood", numbers(of.negative_log_likelihood)},
                {"kl_divergence", numbers(of.kl_divergence)},
                {"same_top", same},
                {"bytes_held", of.bytes_held},
                {"tokens_held", of.tokens_held},
                {"seconds", of.seconds},
                {"tokens_read", of.tokens_read},
                {"probes", json::array()},
                {"greedy",
                 {{"likeliest", of.greedy.likeliest},
                  {"lookup", to_json(of.greedy.lookup)},
                  {"draft_model", to_json(of.greedy.draft_model)}}}};
    for (const probe_result& probe : of.probes) {
        result["probes"].push_back({{"depth", probe.depth},
                                    {"judged", probe.judged},
                                    {"recalled", probe.recalled},
                                    {"negative_log_likelihood", number(probe.negative_log_likelihood)}});
    }
    return result;
}
window_result from_json(const json& of) {
    window_result result;
    result.negative_log_likelihood = floats(of.at("negative_log_likelihood"));
    result.kl_divergence = floats(of.at("kl_divergence"));
    for (const char x : of.at("same_top").get<std::string>()) {
        result.same_top.push_back(x == '1');
    }
    result.bytes_held = of.at("bytes_held");
    result.tokens_held = of.at("tokens_held");
    result.seconds = of.at("seconds");
    result.tokens_read = of.at("tokens_read");
    for (const json& probe : of.at("probes")) {
        result.probes.push_back({probe.at("depth"), probe.at("judged"), probe.at("recalled"),
                                 number(probe.at("negative_log_likelihood"))});
    }
    const json& greedy = of.at("greedy");
    result.greedy = {greedy.at("likeliest").get<std::vector<int>>(), drafts_from_json(greedy.at("lookup")),
                     drafts_from_json(greedy.at("draft_model"))};
    return result;
}

void add_greedy(greedy_agreement& sum, const window_result& baseline, const window_result& of) {
    const std::vector<int>&text = baseline.greedy.likeliest, &found = of.greedy.likeliest;
    if (text.empty() || found.size() != text.size()) {
        return;
    }
    const auto part = std::mismatch(text.begin(), text.end(), found.begin()).first - text.begin();
    sum.length = (sum.length * sum.texts + static_cast<double>(part)) / (sum.texts + 1);
    ++sum.texts;
    sum.whole += part == std::ssize(text);
    sum.tokens += static_cast<int>(text.size());
    for (std::size_t i = 0; i < text.size(); ++i) {
        sum.same += text[i] == found[i];
    }
    sum.lookup += of.greedy.lookup;
    sum.draft_model += of.greedy.draft_model;
    sum.own += accepted_own_drafts(text, found);
}

std::string text_of(const char* format, auto... values) {
    char text[512];
    std::snprintf(text, sizeof text, format, values...);
    return text;
}

// Bounds of what is recommended.
struct bound {
    const char* name;
    double ppl_change_pct, same_top, recall_loss;
};
constexpr bound bounds[] = {{"No loss that this text shows", 0.2, 0.985, 0.02},
                            {"Small loss", 1.0, 0.95, 0.05},
                            {"Smallest that still works", 5.0, 0.0, 0.15}};

void recommend(report_summary& summary) {
    const report_row& full = summary.rows.front();
    const double full_recall = full.recall_of_all().share();
    const bool recalls = full.recall_of_all().judged > 0 && full_recall >= 0.5;
    for (const bound& limit : bounds) {
        const report_row* best = nullptr;
        for (const report_row& row : summary.rows) {
            const bool holds = row.complete && row.windows == full.windows && &row != &full &&
                               row.ppl_change_pct.high <= limit.ppl_change_pct &&
                               row.same_top >= limit.same_top &&
                               (!recalls || row.recall_of_all().share() >= full_recall - limit.recall_loss);
            const auto better = [&] {
                return !best || row.bits < best->bits - 0.05 ||
                       (row.bits < best->bits + 0.05 && row.kl_divergence.value < best->kl_divergence.value);
            };
            if (holds && better()) {
                best = &row;
            }
        }
        const std::string conditions =
            text_of("perplexity at most +%g %% (end of the interval)", limit.ppl_change_pct) +
            (limit.same_top > 0.0
                 ? text_of(", the same likeliest token at least %.1f %% of the time", 100.0 * limit.same_top)
                 : std::string()) +
            (recalls ? text_of(", recall at most %g points below 16 bit", 100.0 * limit.recall_loss)
                     : std::string());
        if (!best) {
            summary.recommendations.push_back(std::string(limit.name) +
                                              ": none of the formats. Asked for: " + conditions + ".");
            continue;
        }
        std::string reason = text_of(
            ": %.2f bits, %.1f times smaller than 16 bit; perplexity %+.2f %% (%+.2f to %+.2f), KL "
            "divergence %.2e, "
            "the same likeliest token %.1f %% of the time",
            best->bits, 16.0 / best->bits, best->ppl_change_pct.value, best->ppl_change_pct.low,
            best->ppl_change_pct.high, best->kl_divergence.value, 100.0 * best->same_top);
        if (recalls) {
            reason += text_of(", recall %.0f %% where 16 bit has %.0f %%",
                              100.0 * best->recall_of_all().share(), 100.0 * full_recall);
        }
        summary.recommendations.push_back(std::string(limit.name) + ": `" + best->scheme + "`" + reason +
                                          ". Asked for: " + conditions + ".");
    }
}

void warn(report_summary& summary) {
    const attention_error* best = nullptr;
    const attention_error* int8 = nullptr;
    const attention_error* sixteen = nullptr;
    for (const attention_error& error : summary.eight_bits) {
        if (error.scheme == "fp16") {
            sixteen = &error;
            continue;
        }
        if (error.scheme == "int8") {
            int8 = &error;
        }
        if (!best || error.mean < best->mean) {
            best = &error;
        }
    }
    const key_bias& bias = summary.bias;
    if (best) {
        const bool matters = (int8 && int8->mean >= 0.01) || (sixteen && sixteen->mean >= 1e-3);
        if (bias.ratio() >= 8.0 && matters) {
            summary.warnings.push_back(
                text_of("Keys have large biases: layer %d, head %d, pair of channels %d has an amplitude of "
                        "%.3g, %.0f times "
                        "the usual deviation of a channel. One scale per token (int8) is made by these "
                        "channels; 16 bit itself "
                        "is off by %.1e.",
                        bias.layer, bias.head, bias.pair, bias.amplitude, bias.ratio(),
                        sixteen ? sixteen->mean : 0.0));
        }
        if (int8 && int8->mean > 2.0 * best->mean && int8->worst_head > 0.02) {
            summary.warnings.push_back(text_of("int8 is not without loss here: attention is off by %.1e on "
                                               "average and by %.2f in the worst "
                                               "head, with ",
                                               int8->mean, int8->worst_head) +
                                       best->scheme +
                                       text_of(" by %.1e and %.3f.", best->mean, best->worst_head));
        }
        summary.recommendations.push_back(
            "8 bits: `" + best->scheme +
            text_of("`: attention is off by %.1e (worst head %.1e)", best->mean, best->worst_head) +
            (int8 && int8 != best ? text_of(", int8 by %.1e (%.1e)", int8->mean, int8->worst_head)
                                  : std::string()) +
            (sixteen ? text_of(", fp16 by %.1e (%.1e).", sixteen->mean, sixteen->worst_head) : "."));
    }
    const report_row& full = summary.rows.front();
    if (const recall all = full.recall_of_all(); all.judged > 0 && all.share() < 0.5) {
        summary.warnings.push_back(
            text_of("With 16 bit the model recalls only %.0f %% of what it has read: the figures of recall "
                    "say little "
                    "about formats, and nothing was recommended by them.",
                    100.0 * all.share()));
    }
    if (full.tokens > 0 && full.tokens < 2000) {
        summary.warnings.push_back(
            text_of("Only %d tokens were judged: intervals are wide, and the worst 1 %% are a few tokens.",
                    full.tokens));
    }
}

}  // namespace

recall report_row::recall_of_all() const {
    recall all;
    double likelihood = 0.0;
    for (const recall& part : recalls) {
        all.judged += part.judged;
        all.recalled += part.recalled;
        likelihood += part.negative_log_likelihood * part.judged;
    }
    all.negative_log_likelihood = all.judged > 0 ? likelihood / all.judged : 0.0;
    return all;
}

report_state::report_state(json identity, json facts, std::vector<std::string> schemes)
    : state_{{"kvq_report", version},
             {"identity", std::move(identity)},
             {"facts", std::move(facts)},
             {"sizes", json::object()},
             {"windows", json::array()}},
      schemes_(std::move(schemes)) {}

bool report_state::resume(const std::string& path) {
    std::ifstream file(path);
    if (!file) {
        return false;
    }
    json found;
    try {
        found = json::parse(file);
    } catch (const json::exception&) {
        found = nullptr;
    }
    if (!found.is_object() || found.value("kvq_report", 0) != version || !found.contains("identity") ||
        !found.contains("windows") || !found["windows"].is_array()) {
        throw std::runtime_error("\"" + path + "\" is not a report of this program: --fresh begins anew");
    }
    check_conditions(path, found["identity"], state_["identity"],
                     "--fresh begins anew, --output takes another file");
    state_["windows"] = found["windows"];
    if (found.contains("eight_bits")) {
        state_["key_bias"] = found["key_bias"];
        state_["eight_bits"] = found["eight_bits"];
    }
    return true;
}

void report_state::save(const std::string& path) const {
    const std::string other = path + ".new";
    {
        std::ofstream file(other);
        json all = state_;
        const report_summary summary = summarize();
        json rows = json::array();
        for (const report_row& row : summary.rows) {
            json line{
                {"scheme", row.scheme},
                {"bits", number(row.bits)},
                {"bytes_per_token", number(row.bytes_per_token)},
                {"held_per_token", number(row.held_per_token)},
                {"windows", row.windows},
                {"tokens", row.tokens},
                {"complete", row.complete},
                {"perplexity", number(row.perplexity)},
                {"ppl_delta_pct", number(row.ppl_change_pct.value)},
                {"ppl_delta_pct_interval", {number(row.ppl_change_pct.low), number(row.ppl_change_pct.high)}},
                {"kld", number(row.kl_divergence.value)},
                {"kld_interval", {number(row.kl_divergence.low), number(row.kl_divergence.high)}},
                {"top1", number(row.same_top)},
                {"kld_worst_1_pct", number(row.worst_kl_divergence)},
                {"kld_worst_window", number(row.worst_window_kl)},
                {"ppl_delta_pct_worst_window", number(row.worst_window_ppl_change_pct)},
                {"tokens_per_second", number(row.tokens_per_second)}};
            line["kld_by_position"] = json::array();
            for (const double x : row.by_position) {
                line["kld_by_position"].push_back(number(x));
            }
            line["recall"] = json::array();
            for (const recall& part : row.recalls) {
                line["recall"].push_back({{"depth", part.depth},
                                          {"judged", part.judged},
                                          {"recalled", part.recalled},
                                          {"negative_log_likelihood", number(part.negative_log_likelihood)}});
            }
            line["greedy"] = {{"texts", row.greedy.texts},
                              {"whole", row.greedy.whole},
                              {"tokens", row.greedy.tokens},
                              {"same", row.greedy.same},
                              {"length", row.greedy.length},
                              {"lookup", to_json(row.greedy.lookup)},
                              {"draft_model", to_json(row.greedy.draft_model)},
                              {"own_drafts", to_json(row.greedy.own)}};
            rows.push_back(std::move(line));
        }
        all["rows"] = std::move(rows);
        all["warnings"] = summary.warnings;
        all["recommendations"] = summary.recommendations;
        file << all.dump() << '\n';
        if (!file.flush()) {
            throw std::runtime_error("cannot write \"" + other + "\"");
        }
    }
    std::filesystem::rename(other, path);
}

bool report_state::has(std::size_t window, const std::string& scheme) const {
    return window < state_["windows"].size() && state_["windows"][window].contains(scheme);
}

void report_state::add(std::size_t window, const std::string& scheme, const window_result& result) {
    while (state_["windows"].size() <= window) {
        state_["windows"].push_back(json::object());
    }
    state_["windows"][window][scheme] = to_json(result);
}

void report_state::add_eight_bits(const key_bias& bias, const std::vector<attention_error>& errors) {
    state_["key_bias"] = {{"layer", bias.layer},
                          {"head", bias.head},
                          {"pair", bias.pair},
                          {"amplitude", number(bias.amplitude)},
                          {"usual", number(bias.usual)}};
    state_["eight_bits"] = json::array();
    for (const attention_error& error : errors) {
        state_["eight_bits"].push_back({{"scheme", error.scheme},
                                        {"bits", number(error.bits)},
                                        {"error", number(error.mean)},
                                        {"worst_head", number(error.worst_head)},
                                        {"kld", number(error.kl_divergence)}});
    }
}

void report_state::add_sizes(const std::vector<std::pair<double, double>>& bits_and_bytes) {
    for (std::size_t i = 0; i < bits_and_bytes.size(); ++i) {
        state_["sizes"][schemes_[i]] = {number(bits_and_bytes[i].first), number(bits_and_bytes[i].second)};
    }
}

report_summary report_state::summarize() const {
    constexpr std::size_t enough_windows = 8, block_tokens = 256;
    report_summary summary;
    const json& windows = state_["windows"];
    const std::size_t planned = state_["facts"].value("windows", std::size_t{0});
    const bool by_window = planned >= enough_windows;
    summary.resampled = by_window
                            ? std::to_string(planned) + " windows"
                            : "blocks of " + std::to_string(block_tokens) + " tokens, since there are only " +
                                  std::to_string(planned) + " windows";
    std::vector<window_result> baselines;
    for (std::size_t w = 0; w < windows.size(); ++w) {
        baselines.push_back(has(w, schemes_.front()) ? from_json(windows[w][schemes_.front()])
                                                     : window_result());
    }
    for (const std::string& scheme : schemes_) {
        report_row row;
        row.scheme = scheme;
        if (state_["sizes"].contains(scheme)) {
            row.bits = number(state_["sizes"][scheme][0]);
            row.bytes_per_token = number(state_["sizes"][scheme][1]);
        }
        std::vector<block_sums> blocks, windows_sums;
        std::vector<float> divergences;
        std::vector<double> position_sums(parts, 0.0), position_tokens(parts, 0.0);
        double likelihood = 0.0, same = 0.0, held = 0.0, held_tokens = 0.0, seconds = 0.0, read = 0.0;
        for (std::size_t w = 0; w < windows.size(); ++w) {
            if (!has(w, scheme) || baselines[w].kl_divergence.empty()) {
                continue;
            }
            const window_result of = from_json(windows[w][scheme]);
            ++row.windows;
            held += static_cast<double>(of.bytes_held);
            held_tokens += of.tokens_held;
            seconds += of.seconds;
            read += of.tokens_read;
            add_greedy(row.greedy, baselines[w], of);
            block_sums& sums = windows_sums.emplace_back();
            const std::size_t count = of.kl_divergence.size();
            const std::size_t whole = state_["facts"].value("window_tokens", count);
            for (std::size_t i = 0; i < count; ++i) {
                if (i == 0 || (!by_window && i % block_tokens == 0)) {
                    blocks.emplace_back();
                }
                const double nll = static_cast<double>(of.negative_log_likelihood[i]),
                             kld = static_cast<double>(of.kl_divergence[i]);
                likelihood += nll;
                same += of.same_top[i];
                divergences.push_back(of.kl_divergence[i]);
                blocks.back().tokens += 1.0;
                const double change = nll - static_cast<double>(baselines[w].negative_log_likelihood[i]);
                blocks.back().likelihood_change += change;
                blocks.back().divergence += kld;
                sums.tokens += 1.0;
                sums.likelihood_change += change;
                sums.divergence += kld;
                const std::size_t part =
                    std::min<std::size_t>(parts - 1, i * parts / std::max<std::size_t>(1, whole));
                position_sums[part] += kld;
                position_tokens[part] += 1.0;
            }
            for (std::size_t i = 0; i < of.probes.size(); ++i) {
                row.recalls.resize(std::max(row.recalls.size(), i + 1));
                recall& part = row.recalls[i];
                const int judged = part.judged + of.probes[i].judged;
                part.negative_log_likelihood =
                    (part.negative_log_likelihood * part.judged + of.probes[i].negative_log_likelihood) /
                    judged;
                part.depth = (part.depth * part.judged + of.probes[i].depth * of.probes[i].judged) / judged;
                part.judged = judged;
                part.recalled += of.probes[i].recalled;
            }
        }
        row.tokens = static_cast<int>(divergences.size());
        row.complete = planned > 0 && static_cast<std::size_t>(row.windows) == planned;
        if (row.tokens > 0) {
            const double n = row.tokens;
            row.perplexity = std::exp(likelihood / n);
            row.same_top = same / n;
            row.ppl_change_pct = ppl_change_pct_of(blocks);
            row.kl_divergence = kl_divergence_of(blocks);
            row.worst_window_kl = worst_of(windows_sums).kl_divergence();
            row.worst_window_ppl_change_pct = worst_of(windows_sums).ppl_change_pct();
            const std::size_t worst = std::max<std::size_t>(1, divergences.size() / 100);
            std::partial_sort(divergences.begin(), divergences.begin() + static_cast<std::ptrdiff_t>(worst),
                              divergences.end(), std::greater<>());
            for (std::size_t i = 0; i < worst; ++i) {
                row.worst_kl_divergence += static_cast<double>(divergences[i]) / static_cast<double>(worst);
            }
            row.held_per_token = held / held_tokens;
            row.tokens_per_second = seconds > 0.0 ? read / seconds : 0.0;
            for (std::size_t i = 0; i < parts; ++i) {
                row.by_position.push_back(position_tokens[i] > 0.0 ? position_sums[i] / position_tokens[i]
                                                                   : std::nan(""));
            }
        }
        summary.rows.push_back(std::move(row));
    }
    if (has_eight_bits()) {
        const json& bias = state_["key_bias"];
        summary.bias = {bias.at("layer"), bias.at("head"), bias.at("pair"), number(bias.at("amplitude")),
                        number(bias.at("usual"))};
        for (const json& error : state_["eight_bits"]) {
            summary.eight_bits.push_back({error.at("scheme"), number(error.at("bits")),
                                          number(error.at("error")), number(error.at("worst_head")),
                                          number(error.at("kld"))});
        }
    }
    if (summary.rows.front().tokens > 0) {
        recommend(summary);
    }
    warn(summary);
    if (state_["facts"].contains("remarks")) {
        for (const json& remark : state_["facts"]["remarks"]) {
            summary.warnings.push_back(remark);
        }
    }
    return summary;
}

}  // namespace llama
