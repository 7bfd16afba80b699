#include "report.hpp"
#include "svg_plot.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>

namespace llama {
namespace {

std::string formatted(const char* format, double value) {
    char text[64];
    std::snprintf(text, sizeof text, format, value);
    return std::isfinite(value) ? text : "–";
}

// The cells of a table; both pages write the same ones.
struct table {
    std::vector<std::string> head;
    std::vector<std::vector<std::string>> rows;
};

// "+0.53 (+0.41 to +0.66)"
std::string with_interval(const char* format, const interval& of) {
    return formatted(format, of.value) +
           (of.low < of.high ? " (" + formatted(format, of.low) + " to " + formatted(format, of.high) + ")"
                             : "");
}

table main_table(const report_summary& summary) {
    table t{{"format", "bits", "bytes/token", "perplexity", "change %", "KL divergence", "same top-1 %",
             "KL, worst 1 %", "KL, worst window", "recall %", "held/token", "tokens/s", "judged"},
            {}};
    for (const report_row& row : summary.rows) {
        if (row.tokens == 0) {
            t.rows.push_back({row.scheme, formatted("%.2f", row.bits), formatted("%.0f", row.bytes_per_token),
                              "…", "", "", "", "", "", "", "", "", ""});
            continue;
        }
        const bool is_baseline = &row == &summary.rows.front();
        const recall all = row.recall_of_all();
        t.rows.push_back({row.scheme, formatted("%.2f", row.bits), formatted("%.0f", row.bytes_per_token),
                          formatted("%.4f", row.perplexity),
                          is_baseline ? "" : with_interval("%+.2f", row.ppl_change_pct),
                          is_baseline ? "0" : with_interval("%.2e", row.kl_divergence),
                          formatted("%.2f", 100.0 * row.same_top),
                          is_baseline ? "0" : formatted("%.2e", row.worst_kl_divergence),
                          is_baseline ? "0"
                                      : formatted("%.2e", row.worst_window_kl) +
                                            formatted(" (%+.2f %%)", row.worst_window_ppl_change_pct),
                          all.judged > 0 ? formatted("%.0f", 100.0 * all.share()) : "–",
                          formatted("%.0f", row.held_per_token), formatted("%.0f", row.tokens_per_second),
                          std::to_string(row.tokens) + (row.complete ? "" : " so far")});
    }
    return t;
}

table position_table(const report_summary& summary) {
    constexpr std::size_t step = 2;  // two parts side by side: eight columns
    table t{{"KL divergence, part of the window"}, {}};
    for (std::size_t part = 0; part < report_state::parts; part += step) {
        t.head.push_back(
            formatted("%.0f", 100.0 * static_cast<double>(part) / report_state::parts) + "–" +
            formatted("%.0f %%", 100.0 * static_cast<double>(part + step) / report_state::parts));
    }
    for (const report_row& row : summary.rows) {
        if (row.tokens == 0 || &row == &summary.rows.front()) {
            continue;
        }
        std::vector<std::string> cells{row.scheme};
        for (std::size_t part = 0; part + 1 < row.by_position.size(); part += step) {
            cells.push_back(formatted("%.1e", 0.5 * (row.by_position[part] + row.by_position[part + 1])));
        }
        t.rows.push_back(std::move(cells));
    }
    return t;
}

table recall_table(const report_summary& summary) {
    table t{{"recalled %, run at"}, {}};
    for (const report_row& row : summary.rows) {
        if (row.recalls.empty()) {
            continue;
        }
        if (t.rows.empty()) {
            for (const recall& part : row.recalls) {
                t.head.push_back(formatted("%.0f %%", 100.0 * part.depth));
            }
            t.head.push_back("all");
            t.head.push_back("log-probability of a token");
        }
        std::vector<std::string> cells{row.scheme};
        for (const recall& part : row.recalls) {
            cells.push_back(formatted("%.0f", 100.0 * part.share()));
        }
        cells.push_back(formatted("%.0f", 100.0 * row.recall_of_all().share()));
        cells.push_back(formatted("%.3f", -row.recall_of_all().negative_log_likelihood));
        t.rows.push_back(std::move(cells));
    }
    return t;
}

table greedy_table(const report_summary& summary) {
    table t{
        {"greedy text", "same tokens before the first other", "texts the same to the end", "same token %",
         "lookup: tokens/step", "lookup: accepted %", "own drafts: tokens/step", "own drafts: accepted %"},
        {}};
    const bool has_model = summary.rows.front().greedy.draft_model.steps > 0;
    if (has_model) {
        t.head.insert(t.head.end(), {"draft model: tokens/step", "draft model: accepted %"});
    }
    for (const report_row& row : summary.rows) {
        const greedy_agreement& of = row.greedy;
        if (of.texts == 0) {
            continue;
        }
        t.rows.push_back({row.scheme, formatted("%.1f", of.length),
                          std::to_string(of.whole) + " of " + std::to_string(of.texts),
                          formatted("%.2f", 100.0 * of.same_share())});
        const auto add = [&](const draft_count& drafts) {
            t.rows.back().push_back(formatted("%.2f", drafts.tokens_per_step()));
            t.rows.back().push_back(formatted("%.1f", 100.0 * drafts.accepted_share()));
        };
        add(of.lookup);
        add(of.own);
        if (has_model) {
            add(of.draft_model);
        }
    }
    return t;
}

table eight_bit_table(const report_summary& summary) {
    table t{{"format", "bits", "error of attention", "worst head", "KL divergence of weights"}, {}};
    for (const attention_error& error : summary.eight_bits) {
        t.rows.push_back({error.scheme, formatted("%.2f", error.bits), formatted("%.1e", error.mean),
                          formatted("%.1e", error.worst_head), formatted("%.1e", error.kl_divergence)});
    }
    return t;
}

std::vector<plot> plots_of(const report_summary& summary) {
    plot sizes{"Loss and size", "bits of a value", "KL divergence", true, false, {}};
    plot positions{
        "Loss by position in the context", "position in the window, %", "KL divergence", true, true, {}};
    plot recalls{"Recall by depth", "depth of the run in the window, %", "recalled, %", false, true, {}};
    for (const report_row& row : summary.rows) {
        const bool is_baseline = &row == &summary.rows.front();
        if (row.tokens == 0) {
            continue;
        }
        if (!is_baseline) {
            sizes.series.push_back({row.scheme, {row.bits}, {row.kl_divergence.value}});
            plot_series series{row.scheme, {}, row.by_position};
            for (std::size_t part = 0; part < row.by_position.size(); ++part) {
                series.x.push_back(100.0 * (static_cast<double>(part) + 0.5) / report_state::parts);
            }
            positions.series.push_back(std::move(series));
        }
        plot_series series{row.scheme, {}, {}};
        for (const recall& part : row.recalls) {
            series.x.push_back(100.0 * part.depth);
            series.y.push_back(100.0 * part.share());
        }
        if (!series.x.empty()) {
            recalls.series.push_back(std::move(series));
        }
    }
    std::vector<plot> plots{std::move(sizes), std::move(positions)};
    if (!recalls.series.empty()) {
        plots.push_back(std::move(recalls));
    }
    return plots;
}

// Whatever both pages have, in one order.
struct page_writer {
    std::function<void(const std::string&)> title, heading, paragraph, item;
    std::function<void(const table&)> cells;
    std::function<void(const plot&)> picture;
};

void write_page(const report_state& state, const page_writer& to) {
    const report_summary summary = state.summarize();
    const nlohmann::ordered_json& facts = state.facts();
    const auto fact = [&](const char* name) {
        return facts.contains(name) ? facts[name].get<std::string>() : "";
    };
    const bool complete =
        std::all_of(summary.rows.begin(), summary.rows.end(), [](const auto& r) { return r.complete; });

    to.title("Formats of the KV cache for " + fact("name"));
    to.paragraph(fact("model") + " " + fact("text") +
                 (complete ? "" : " Not finished: figures are those of what was judged so far."));
    if (summary.rows.front().tokens > 0) {
        to.heading("Recommendation");
        for (const std::string& line : summary.recommendations) {
            to.item(line);
        }
    }
    if (!summary.warnings.empty()) {
        to.heading("Warnings");
        for (const std::string& line : summary.warnings) {
            to.item(line);
        }
    }
    to.heading("Formats");
    to.cells(main_table(summary));
    to.paragraph(
        "KL divergence: mean over tokens, in nats, of the distribution of the next token from that with a "
        "16-bit cache. "
        "In brackets: 95 % of 1000 resamplings of " +
        summary.resampled +
        ". Worst window: the one with the largest divergence, and the change of its perplexity. Bits and "
        "bytes: quantized pages, parameters included. held/token: what a sequence held at the end "
        "of a "
        "window, with its 16-bit tokens. tokens/s: read by all threads, without judging. " +
        fact("conditions"));
    const std::vector<plot> plots = plots_of(summary);
    to.picture(plots[0]);
    to.heading("Position in the context");
    to.paragraph("No query of the first chunk of a window sees a quantized page.");
    to.cells(position_table(summary));
    to.picture(plots[1]);
    to.heading("Recall");
    if (plots.size() > 2) {
        to.paragraph(
            "Behind each window some runs of it are read again, one of each part of the window, those that "
            "were the hardest to "
            "predict. " +
            std::to_string(window::probe_cue) + " tokens of a run are given, the next " +
            std::to_string(window::probe_tokens - window::probe_cue) +
            " have to be the likeliest ones; the model must find them in the cache.");
        to.cells(recall_table(summary));
        to.picture(plots[2]);
    } else {
        to.paragraph("Not measured: the context is too short.");
    }
    if (const greedy_agreement& greedy = summary.rows.front().greedy; greedy.texts > 0) {
        to.heading("Greedy text and drafts");
        to.paragraph(
            "Behind each window the 16-bit cache writes " + std::to_string(greedy.tokens / greedy.texts) +
            " tokens of greedy text. The others read it token by token, as decoding does: up to the first "
            "token that they "
            "would have chosen otherwise it is their own. Speculative decoding drafts at most " +
            std::to_string(draft_tokens) +
            " tokens a step. Lookup: what followed the last tokens where they stood before; draft model: a "
            "small model; both verified with the format's cache. Own drafts: the model drafts with the "
            "format's cache, and verifies with 16 bit.");
        to.cells(greedy_table(summary));
    }
    if (!summary.eight_bits.empty()) {
        to.heading("8 bits");
        const key_bias& bias = summary.bias;
        to.paragraph(
            "Relative error of the outputs of attention on keys, values and queries of the statistics' text, "
            "in double; 16 bit "
            "beside it. The largest bias of keys: amplitude " +
            formatted("%.3g", bias.amplitude) + ", " + formatted("%.1f", bias.ratio()) +
            " times the usual deviation of a channel (layer " + std::to_string(bias.layer) + ", head " +
            std::to_string(bias.head) + ", pair " + std::to_string(bias.pair) + ").");
        to.cells(eight_bit_table(summary));
    }
}

}  // namespace

std::string report_as_markdown(const report_state& state) {
    std::string text;
    page_writer to;
    to.title = [&](const std::string& s) { text += "# " + s + "\n\n"; };
    to.heading = [&](const std::string& s) { text += "\n## " + s + "\n\n"; };
    to.paragraph = [&](const std::string& s) { text += s + "\n\n"; };
    to.item = [&](const std::string& s) { text += "- " + s + "\n"; };
    to.cells = [&](const table& t) {
        const auto line = [&](const std::vector<std::string>& cells) {
            text += "|";
            for (const std::string& cell : cells) {
                text += " " + cell + " |";
            }
            text += "\n";
        };
        line(t.head);
        text += "|---|";
        for (std::size_t i = 1; i < t.head.size(); ++i) {
            text += "---:|";
        }
        text += "\n";
        for (const auto& row : t.rows) {
            line(row);
        }
        text += "\n";
    };
    to.picture = [](const plot&) {};
    write_page(state, to);
    return text;
}

std::string report_as_html(const report_state& state) {
    // `code` of Markdown.
    const auto rich = [](const std::string& s) {
        std::string out, plain = escaped(s);
        bool inside = false;
        for (const char c : plain) {
            if (c == '`') {
                out += inside ? "</code>" : "<code>";
                inside = !inside;
            } else {
                out += c;
            }
        }
        return out;
    };
    std::string body;
    bool list = false;
    const auto end_list = [&] {
        body += list ? "</ul>\n" : "";
        list = false;
    };
    const auto block = [&](const std::string& tag, const std::string& s) {
        end_list();
        body += "<" + tag + ">" + rich(s) + "</" + tag + ">\n";
    };
    std::string title;
    page_writer to;
    to.title = [&](const std::string& s) {
        title = s;
        block("h1", s);
    };
    to.heading = [&](const std::string& s) { block("h2", s); };
    to.paragraph = [&](const std::string& s) { block("p", s); };
    to.item = [&](const std::string& s) {
        body += std::string(list ? "" : "<ul>\n") + "<li>" + rich(s) + "</li>\n";
        list = true;
    };
    to.cells = [&](const table& t) {
        end_list();
        const auto line = [&](const std::vector<std::string>& cells, const char* tag) {
            body += "<tr>";
            for (const std::string& cell : cells) {
                body += std::string("<") + tag + ">" + rich(cell) + "</" + tag + ">";
            }
            body += "</tr>\n";
        };
        body += "<div class=\"wide\"><table>\n";
        line(t.head, "th");
        for (const auto& row : t.rows) {
            line(row, "td");
        }
        body += "</table></div>\n";
    };
    to.picture = [&](const plot& p) {
        end_list();
        body += as_svg(p);
    };
    write_page(state, to);
    end_list();
    return "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
           "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
           escaped(title) +
           "</title>\n<style>\n"
           ":root{color-scheme:light dark}\n"
           "body{font-family:sans-serif;line-height:1.5;max-width:1000px;margin:2em auto;padding:0 1em}\n"
           ".wide{overflow-x:auto}\n"
           "table{border-collapse:collapse;font-size:13px;white-space:nowrap}\n"
           "th,td{padding:3px 8px;text-align:right;border-bottom:1px solid #8884}\n"
           "th:first-child,td:first-child{text-align:left}\n"
           "svg{width:100%;max-width:760px;height:auto;margin:1em 0}\n"
           "</style></head><body>\n" +
           body + "</body></html>\n";
}

}  // namespace llama
