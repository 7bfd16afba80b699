#include "tables.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iomanip>
#include <ostream>

namespace llama {
namespace {

template <class Result>
int name_width_of(std::span<const Result> results) {
    std::size_t widest = 6;
    for (const Result& result : results) {
        widest = std::max(widest, result.scheme.size());
    }
    return static_cast<int>(widest) + 1;
}

nlohmann::ordered_json to_json(const scheme_result& result) {
    return {{"scheme", result.scheme},
            {"tokens", result.tokens},
            {"perplexity", result.perplexity},
            {"ppl_delta_pct", result.ppl_delta_pct.value},
            {"ppl_delta_pct_low", result.ppl_delta_pct.low},
            {"ppl_delta_pct_high", result.ppl_delta_pct.high},
            {"kld", result.kld.value},
            {"kld_low", result.kld.low},
            {"kld_high", result.kld.high},
            {"kld_worst_window", result.worst_window_kld},
            {"ppl_delta_pct_worst_window", result.worst_window_ppl_delta_pct},
            {"top1", result.top1},
            {"bits", result.bits},
            {"bytes_per_token", result.bytes_per_token},
            {"compression", result.compression},
            {"window_bytes_per_token", result.window_bytes_per_token},
            {"tokens_per_second", result.tokens_per_second}};
}

// Width of a column of tokens in one scheme.
int width_of(const held_scheme& scheme) {
    return static_cast<int>(std::max<std::size_t>(8, scheme.scheme.size() + 2));
}

double percent(double value, double baseline) { return 100.0 * (value / baseline - 1.0); }

}  // namespace

void write_table(std::ostream& out, std::span<const scheme_result> results) {
    const int name_width = name_width_of(results);

    out << std::left << std::setw(name_width) << "scheme" << std::right
        << "  perplexity   change %  KL divergence      (95 % interval)  worst window  same top-1 %  bits  "
           "bytes/token  "
           "compression  "
           "held/token  tokens/s\n";
    for (const scheme_result& result : results) {
        out << std::left << std::setw(name_width) << result.scheme << std::right                    //
            << std::fixed << std::setprecision(4) << std::setw(12) << result.perplexity             //
            << std::showpos << std::setprecision(3) << std::setw(11) << result.ppl_delta_pct.value  //
            << std::noshowpos << std::scientific << std::setprecision(2) << std::setw(15) << result.kld.value
            << "  (" << result.kld.low << ' ' << result.kld.high << ')' << std::setw(14)
            << result.worst_window_kld << std::fixed << std::setprecision(2) << std::setw(14)
            << 100.0 * result.top1  //
            << std::setprecision(1);
        // A live cache has no fixed size per token.
        if (std::isnan(result.bytes_per_token)) {
            out << std::setw(6) << '-' << std::setw(13) << '-' << std::setw(13) << '-';
        } else {
            out << std::setprecision(2) << std::setw(6) << result.bits << std::setprecision(1)
                << std::setw(13) << result.bytes_per_token << std::setprecision(2) << std::setw(13)
                << result.compression;
        }
        out  //
            << std::setprecision(1) << std::setw(12) << result.window_bytes_per_token << std::setprecision(0)
            << std::setw(10) << result.tokens_per_second << '\n';
    }
}

void write_json(std::ostream& out, std::span<const scheme_result> results) {
    for (const scheme_result& result : results) {
        out << to_json(result) << '\n';
    }
}

void write_table(std::ostream& out, std::span<const long_context_row> rows) {
    if (rows.empty()) {
        return;
    }
    out << "  tokens   16 bit KB       KB  requantized  KL divergence  same top-1 %  perplexity   16 bit |  "
           "tokens in";
    for (const auto& scheme : rows.front().held) {
        out << std::setw(width_of(scheme)) << scheme.scheme;
    }
    out << '\n';
    for (const long_context_row& row : rows) {
        out << std::fixed << std::setprecision(1) << std::setw(8) << row.tokens << std::setw(12)
            << static_cast<double>(row.baseline_bytes) / 1000 << std::setw(9)
            << static_cast<double>(row.bytes) / 1000 << std::setw(13) << row.requantized << std::scientific
            << std::setprecision(2) << std::setw(15) << row.kld << std::fixed << std::setw(14)
            << 100.0 * row.top1 << std::setw(12) << row.perplexity << std::setw(9) << row.baseline_perplexity
            << " |           ";
        for (const auto& scheme : row.held) {
            out << std::setw(width_of(scheme)) << scheme.tokens;
        }
        out << '\n';
    }
}

void write_json(std::ostream& out, std::span<const long_context_row> rows) {
    for (const long_context_row& row : rows) {
        nlohmann::ordered_json line{{"tokens", row.tokens},
                                    {"baseline_bytes", row.baseline_bytes},
                                    {"bytes", row.bytes},
                                    {"requantized", row.requantized},
                                    {"kld", row.kld},
                                    {"top1", row.top1},
                                    {"perplexity", row.perplexity},
                                    {"baseline_perplexity", row.baseline_perplexity}};
        for (const auto& scheme : row.held) {
            line["held"].push_back(
                {{"scheme", scheme.scheme}, {"tokens", scheme.tokens}, {"bytes", scheme.bytes}});
        }
        out << line << '\n';
    }
}

void write_table(std::ostream& out, std::span<const slot_result> results) {
    constexpr int width = 24;
    out << std::setw(6) << "turn";
    for (const slot_result& result : results) {
        out << std::setw(width) << result.scheme;
    }
    out << '\n';
    const std::size_t turns = results.front().perplexity.size();
    for (std::size_t turn = 1; turn <= turns; turn = turn < turns ? std::min(2 * turn, turns) : turns + 1) {
        out << std::setw(6) << turn << std::fixed;
        for (const slot_result& result : results) {
            const double own = result.perplexity[turn - 1], base = results.front().perplexity[turn - 1];
            out << std::setprecision(4) << std::setw(width - 11) << own << " (" << std::showpos
                << std::setprecision(2) << std::setw(6) << percent(own, base) << std::noshowpos << " %)";
        }
        out << '\n';
    }
    out << std::setw(6) << "drift";
    for (const slot_result& result : results) {
        out << std::setprecision(4) << std::setw(width - 2) << 100.0 * result.drift << " %";
    }
    out << '\n';
}

void write_json(std::ostream& out, std::span<const slot_result> results) {
    for (const slot_result& result : results) {
        nlohmann::ordered_json line{{"scheme", result.scheme}};
        for (std::size_t turn = 0; turn < result.perplexity.size(); ++turn) {
            const double own = result.perplexity[turn];
            line["perplexity"].push_back(own);
            line["ppl_delta_pct"].push_back(percent(own, results.front().perplexity[turn]));
        }
        line["drift_pct"] = 100.0 * result.drift;
        line["drift_turn"] = result.drift_turn;
        out << line << '\n';
    }
}

void write_table(std::ostream& out, std::span<const chunk_result> results) {
    const std::span<const scheme_result> first = results.front().schemes;
    const int name_width = name_width_of(first);
    out << std::left << std::setw(name_width) << "chunk" << std::right;
    for (const chunk_result& result : results) {
        out << std::setw(11) << result.chunk;
    }
    out << "    worst %     tokens/s: " << results.front().chunk << " to " << results.back().chunk << '\n';
    for (std::size_t scheme = 0; scheme < first.size(); ++scheme) {
        out << std::left << std::setw(name_width) << first[scheme].scheme << std::right << std::fixed
            << std::setprecision(4);
        for (const chunk_result& result : results) {
            out << std::setw(11) << result.schemes[scheme].perplexity;
        }
        out << std::showpos << std::setprecision(3) << std::setw(11)
            << find_worst(results, scheme).ppl_delta_pct << std::noshowpos << std::setprecision(0)
            << std::setw(14) << first[scheme].tokens_per_second << " to "
            << results.back().schemes[scheme].tokens_per_second << '\n';
    }
}

void write_json(std::ostream& out, std::span<const chunk_result> results) {
    for (const chunk_result& result : results) {
        for (const scheme_result& scheme : result.schemes) {
            nlohmann::ordered_json line = to_json(scheme);
            line["chunk"] = result.chunk;
            out << line << '\n';
        }
    }
}

}  // namespace llama
