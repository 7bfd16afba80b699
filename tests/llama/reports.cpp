// SPDX-License-Identifier: MIT
// The state of a report: what is measured is kept, goes on after an interruption, and gives the figures of
// its definitions; pages that stand alone.
#include <doctest/doctest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <random>

#include "report.hpp"
#include "svg_plot.hpp"
#include "temporary_folder.hpp"

namespace llama_reports_tests {

namespace {

using json = nlohmann::ordered_json;

json identity(int chunk = 64) { return {{"model", "m.gguf"}, {"chunk", chunk}}; }
json facts(int windows, int window_tokens) {
    return {{"name", "m.gguf"},
            {"model", "2 layers."},
            {"text", "A text."},
            {"conditions", "4 sinks."},
            {"remarks", json::array()},
            {"windows", windows},
            {"window_tokens", window_tokens}};
}

/// Likelihoods and divergences around these means; `same` of ten tokens have the same likeliest one.
llama::window_result result_of(std::mt19937& random, int tokens, double likelihood, double divergence,
                               int same) {
    std::uniform_real_distribution<double> spread(0.5, 1.5);
    llama::window_result result;
    for (int i = 0; i < tokens; ++i) {
        result.negative_log_likelihood.push_back(static_cast<float>(likelihood));
        result.kl_divergence.push_back(static_cast<float>(divergence * spread(random)));
        result.same_top.push_back(i % 10 < same);
    }
    result.bytes_held = 1000;
    result.tokens_held = tokens;
    result.tokens_read = tokens;
    result.seconds = 0.5;
    result.probes = {{0.25, 16, 16, 1.6}, {0.75, 16, same >= 9 ? 16 : 4, 3.2}};
    result.greedy.likeliest = {7, 8, 9, 10, 11, 12, 13, 14};
    if (same < 10) result.greedy.likeliest[5] = 99;
    result.greedy.lookup = {2, 8, 6};
    return result;
}

llama::report_state filled(int windows, int tokens) {
    std::mt19937 random(7);
    llama::report_state state(identity(), facts(windows, tokens), {"fp16", "good", "bad"});
    state.add_sizes({{16.0, 400.0}, {4.25, 106.0}, {2.25, 56.0}});
    for (int w = 0; w < windows; ++w) {
        state.add(static_cast<std::size_t>(w), "fp16", result_of(random, tokens, 2.0, 0.0, 10));
        state.add(static_cast<std::size_t>(w), "good", result_of(random, tokens, 2.0005, 1e-3, 10));
        state.add(static_cast<std::size_t>(w), "bad", result_of(random, tokens, 2.3, 0.5, 5));
    }
    return state;
}

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("lookups find what followed the last tokens") {
    const std::vector<int> before{1, 2, 3, 4, 9, 2, 3, 5, 6, 7, 8};
    using list = std::vector<int>;
    CHECK(llama::lookup_drafts(before, list{1, 2, 3}, 3) ==
          list{4, 9, 2, 3});  // three tokens before the later two
    CHECK(llama::lookup_drafts(before, list{2, 3}, 2) == list{5, 6, 7, 8});  // the latest place
    CHECK(llama::lookup_drafts(before, list{9, 9, 9}, 1) == list{2, 3, 5, 6});
    CHECK(llama::lookup_drafts(before, list{9, 9, 9}, 3) == list{9});  // places may overlap the end
    CHECK(llama::lookup_drafts(before, list{10}, 1).empty());
    CHECK(llama::lookup_drafts({}, list{10}, 1).empty());
}

TEST_CASE("drafts are accepted up to the first that is not the likeliest") {
    using list = std::vector<int>;
    const list text{1, 2, 3, 4, 5, 6};
    const std::vector<list> drafts{{1, 2, 0, 4}, {}, {}, {9, 9, 9, 9}, {5, 6}, {6}};
    // 0: two of four, and the likeliest; 3: none of three that fit; 4: both.
    const llama::draft_count same = llama::accepted_drafts(text, text, drafts);
    CHECK(same.steps == 3);
    CHECK(same.drafted == 9);
    CHECK(same.accepted == 4);
    // What a cache takes and the text does not have ends the step: 9 at place 3.
    const llama::draft_count other = llama::accepted_drafts(text, list{1, 2, 3, 9, 5, 6}, drafts);
    CHECK(other.steps == 3);
    CHECK(other.accepted == 5);
    const llama::draft_count none = llama::accepted_drafts({}, {}, {});
    CHECK(none.tokens_per_step() == 1.0);
    CHECK(none.accepted_share() == 0.0);
}

TEST_CASE("figures of a report are those of its definitions") {
    constexpr int windows = 10, tokens = 500;
    const llama::report_summary summary = filled(windows, tokens).summarize();
    REQUIRE(summary.rows.size() == 3);
    const llama::report_row &full = summary.rows[0], &good = summary.rows[1], &bad = summary.rows[2];
    CHECK(full.perplexity == doctest::Approx(std::exp(2.0)));
    CHECK(full.kl_divergence.value == 0.0);
    CHECK(good.ppl_change_pct.value == doctest::Approx(100.0 * std::expm1(0.0005)).epsilon(1e-3));
    CHECK(good.kl_divergence.value == doctest::Approx(1e-3).epsilon(0.05));
    CHECK(good.worst_window_kl >= good.kl_divergence.value);
    CHECK(good.worst_window_kl < 1.2e-3);
    CHECK(bad.worst_window_ppl_change_pct == doctest::Approx(100.0 * std::expm1(0.3)).epsilon(1e-3));
    CHECK(good.greedy.texts == windows);
    CHECK(good.greedy.whole == windows);
    CHECK(good.greedy.length == doctest::Approx(8.0));
    CHECK(good.greedy.own.accepted == good.greedy.own.drafted);
    CHECK(bad.greedy.whole == 0);
    CHECK(bad.greedy.length == doctest::Approx(5.0));
    CHECK(bad.greedy.same == 7 * windows);
    CHECK(bad.greedy.lookup.tokens_per_step() == doctest::Approx(4.0));
    // Four drafts and the token behind them; three, of which the first is wrong; two.
    CHECK(bad.greedy.own.steps == 3 * windows);
    CHECK(bad.greedy.own.drafted == 9 * windows);
    CHECK(bad.greedy.own.accepted == 6 * windows);
    CHECK(good.kl_divergence.low < good.kl_divergence.value);
    CHECK(good.kl_divergence.high > good.kl_divergence.value);
    // Uniform within half of the mean: a standard error of 1e-3 / sqrt(12 * 5000).
    CHECK(good.kl_divergence.high - good.kl_divergence.low < 6 * 1e-3 / std::sqrt(12.0 * windows * tokens));
    CHECK(good.worst_kl_divergence > 1.45e-3);
    CHECK(good.worst_kl_divergence <= 1.5e-3);
    CHECK(bad.same_top == doctest::Approx(0.5));
    CHECK(bad.tokens == windows * tokens);
    CHECK(bad.complete);
    CHECK(bad.tokens_per_second == doctest::Approx(tokens / 0.5));
    CHECK(bad.held_per_token == doctest::Approx(1000.0 / tokens));
    REQUIRE(bad.by_position.size() == llama::report_state::parts);
    for (const double x : bad.by_position) {
        CHECK(x == doctest::Approx(0.5).epsilon(0.1));
    }
    REQUIRE(bad.recalls.size() == 2);
    CHECK(bad.recalls[0].share() == 1.0);
    CHECK(bad.recalls[1].share() == 0.25);
    CHECK(bad.recalls[1].depth == doctest::Approx(0.75));
    CHECK(bad.recall_of_all().share() == doctest::Approx(0.625));

    // The smaller one loses too much for every bound.
    REQUIRE(summary.recommendations.size() == 3);
    for (const std::string& line : summary.recommendations) {
        CHECK(contains(line, "`good`"));
    }
    CHECK(contains(summary.resampled, "10 windows"));
    CHECK(contains(filled(2, tokens).summarize().resampled, "blocks of 256 tokens"));
}

TEST_CASE("a report goes on where it was, and not with other conditions") {
    test::temporary_folder folder;
    const std::string path = folder / "report.json";
    llama::report_state none(identity(), facts(3, 50), {"fp16", "good"});
    CHECK_FALSE(none.resume(path));
    const llama::report_state whole = filled(3, 50);
    whole.save(path);

    llama::report_state again(identity(), facts(3, 50), {"fp16", "good", "other"});
    REQUIRE(again.resume(path));
    CHECK(again.has(2, "good"));
    CHECK(again.has(2, "bad"));  // it is kept, although this report does not ask for it
    CHECK_FALSE(again.has(0, "other"));
    CHECK_FALSE(again.has(3, "good"));
    CHECK(again.summarize().rows[1].kl_divergence.value ==
          doctest::Approx(whole.summarize().rows[1].kl_divergence.value));

    llama::report_state different(identity(65), facts(3, 50), {"fp16"});
    CHECK_THROWS_WITH_AS(different.resume(path), doctest::Contains("another chunk: 64, not 65"),
                         std::runtime_error);
    for (const char* const text :
         {"", "{", "[]", "{\"kvq_report\":99}", "{\"kvq_report\":1,\"identity\":{}}"}) {
        std::ofstream(path) << text;
        CHECK_THROWS_WITH_AS(again.resume(path), doctest::Contains("not a report"), std::runtime_error);
    }
}

TEST_CASE("values that are not finite survive the file") {
    test::temporary_folder folder;
    const std::string path = folder / "report.json";
    std::mt19937 random(1);
    llama::report_state state(identity(), facts(1, 20), {"fp16", "broken"});
    state.add(0, "fp16", result_of(random, 20, 2.0, 0.0, 10));
    llama::window_result broken = result_of(random, 20, 2.0, 0.1, 1);
    broken.negative_log_likelihood[3] = std::numeric_limits<float>::quiet_NaN();
    broken.kl_divergence[3] = std::numeric_limits<float>::infinity();
    state.add(0, "broken", broken);
    state.save(path);
    llama::report_state again(identity(), facts(1, 20), {"fp16", "broken"});
    REQUIRE(again.resume(path));
    const auto summary = again.summarize();
    CHECK(std::isnan(summary.rows[1].perplexity));
    for (const std::string& line : summary.recommendations) {
        CHECK_FALSE(contains(line, "`broken`"));
    }
    CHECK(contains(llama::report_as_markdown(again), "| broken |"));
}

TEST_CASE("pages stand alone, and say when they are not finished") {
    const llama::report_state whole = filled(2, 300);
    const std::string markdown = llama::report_as_markdown(whole), html = llama::report_as_html(whole);
    for (const std::string& page : {markdown, html}) {
        CHECK(contains(page, "Recommendation"));
        CHECK(contains(page, "4.25"));
        CHECK_FALSE(contains(page, "Not finished"));
    }
    CHECK(contains(html, "<svg"));
    for (const char* const outside : {"<script", "<img", "<link", "url(", "@import"}) {
        CHECK_FALSE(contains(html, outside));
    }
    std::size_t open = 0, closed = 0;
    for (std::size_t at = 0; (at = html.find("<table>", at)) != std::string::npos; ++at) ++open;
    for (std::size_t at = 0; (at = html.find("</table>", at)) != std::string::npos; ++at) ++closed;
    CHECK(open == closed);
    CHECK(open >= 3);

    std::mt19937 random(1);
    llama::report_state part(identity(), facts(2, 300), {"fp16", "a<b>&\"c\""});
    part.add(0, "fp16", result_of(random, 300, 2.0, 0.0, 10));
    CHECK(contains(llama::report_as_markdown(part), "Not finished"));
    CHECK(contains(llama::report_as_html(part), "a&lt;b&gt;&amp;&quot;c&quot;"));
}

TEST_CASE("large key biases are said, with the 8-bit format that holds") {
    llama::report_state state = filled(2, 300);
    state.add_eight_bits({3, 1, 60, 90.0, 1.0}, {{"fp16", 16.0, 0.009, 0.02, 1e-5},
                                                 {"int8", 8.25, 0.24, 0.4, 1e-2},
                                                 {"ref8", 8.44, 0.005, 0.01, 1e-6}});
    const auto summary = state.summarize();
    REQUIRE(summary.warnings.size() >= 2);
    CHECK(contains(summary.warnings[0], "layer 3, head 1, pair of channels 60"));
    CHECK(contains(summary.warnings[0], "90 times"));
    CHECK(contains(summary.warnings[1], "int8 is not without loss"));
    CHECK(contains(summary.recommendations.back(), "8 bits: `ref8`"));
}

TEST_CASE("plots: ticks and points lie in the picture, whatever the values") {
    for (const bool logarithmic : {false, true}) {
        llama::plot p{"t", "x", "y", logarithmic, true, {}};
        p.series = {{"a", {0, 1, 2}, {1e-9, 0.0, 5.0}}, {"b", {3}, {std::nan("")}}, {"none", {}, {}}};
        const std::string svg = llama::as_svg(p);
        CHECK(contains(svg, "</svg>"));
        CHECK_FALSE(contains(svg, "nan"));
        CHECK_FALSE(contains(svg, "inf"));
        for (std::size_t at = 0; (at = svg.find("cy=\"", at)) != std::string::npos; ++at) {
            const double y = std::stod(svg.substr(at + 4));
            CHECK(y >= 0.0);
            CHECK(y <= 360.0);
        }
    }
    CHECK(contains(llama::as_svg({"one", "x", "y", false, false, {{"p", {5}, {5}}}}), "<circle"));
}

}  // namespace llama_reports_tests
