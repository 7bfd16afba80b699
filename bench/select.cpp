// What attention loses that reads only the best pages, or leaves out values that hardly weigh, on real q, k
// and v: scripts/quality select.
//
// The sequence grows to the position of a query, as in decode, with 4 sinks and 32 recent tokens in 16 bit;
// then the query attends to all pages, to the best ones (kvq::selected_pages), and without values
// (kvq::skipped_values). Compared with attention over all pages of the same format:
//   kept      share of the weights on the pages that were read, mean over queries and query heads
//   best      the same for the pages with the most weight: as many, for the same query heads together,
//             besides those that are always read
//   KL        KL divergence of the weights on the pages that were read from those on all pages, nats:
//             -log(kept), mean
//   error     |o' - o| / |o| over all outputs
//   hits      with --resident: of the quantized pages that were read, those that a kv head holds if it holds
//             as many as that share of its pages at the end: the ones that it has read last (the resident
//             slots of caches on a device, select/resident_pages.cuh). The first query's are not counted.
//             With --queries 256 queries are neighbours
//   of bound  largest |o' - o| of a channel over the bound: share left out * largest |value|, and 1e-6 of it
//             for float sums
// Exit status 1: an output is outside of its bound, or more weights were left out than asked for.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <deque>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <nlohmann/json.hpp>
#include <numeric>

#include "dump.hpp"

namespace {

struct settings {
    int page_tokens = kvq::default_page_tokens, sinks = 4, recent = 32, queries = 32;
    bool json = false;
};

/// The pages that a kv head has read last, by number.
struct held_last {
    std::size_t room = 0;
    std::deque<int> pages{};  // the last one first
    std::int64_t hits = 0, read = 0;

    void read_page(int page, bool counts) {
        const auto at = std::find(pages.begin(), pages.end(), page);
        if (counts) {
            ++read;
            hits += at != pages.end();
        }
        if (at != pages.end())
            pages.erase(at);
        else if (pages.size() == room)
            pages.pop_back();
        pages.push_front(page);
    }
};

struct outputs {
    std::vector<float> out, lse;
};

/// Sums over queries.
struct measured {
    double kept = 0.0, best = 0.0, divergence = 0.0, error = 0.0, power = 0.0, of_bound = 0.0;
    std::int64_t pages = 0, read = 0, rows = 0;
    double left_out = 0.0, most_left_out = 0.0;
};

class judged_layer {
public:
    judged_layer(const kvq::format_pair& formats, const bench::layer_dump& dump, const settings& s)
        : dump_(dump),
          settings_(s),
          cache_({1, dump.k.heads, dump.k.dim, dump.v.dim}, {.keys = formats.keys,
                                                             .values = formats.values,
                                                             .sinks = s.sinks,
                                                             .recent = s.recent,
                                                             .page_tokens = s.page_tokens}),
          sequence_(cache_.new_sequence()) {}

    /// Calls use(query) with the sequence as it is when query i of the dump is decoded.
    template <class Use>
    void for_each_query(const Use& use) {
        const int all = dump_.q.tokens, n = std::min(settings_.queries, all);
        for (int i = 0; i < n; ++i) {
            const int query = static_cast<int>(static_cast<long>(i + 1) * all / n) - 1;
            const int end = dump_.k.tokens - all + query + 1, held = sequence_.tokens();
            sequence_.append(
                0, kvq::token_view<const float>(dump_.k.at(held, 0), end - held, dump_.k.heads, dump_.k.dim),
                kvq::token_view<const float>(dump_.v.at(held, 0), end - held, dump_.v.heads, dump_.v.dim));
            use(query);
        }
    }
    outputs attend(int query, const kvq::mods_view& mods) const {
        outputs o{std::vector<float>(static_cast<std::size_t>(dump_.q.heads * dump_.v.dim)),
                  std::vector<float>(static_cast<std::size_t>(dump_.q.heads))};
        const kvq::token_view<float> out(o.out.data(), 1, dump_.q.heads, dump_.v.dim);
        sequence_.attend(0, kvq::token_view<const float>(dump_.q.at(query, 0), 1, dump_.q.heads, dump_.q.dim),
                         kvq::output_view(out).with_lse(o.lse.data()), mods);
        return o;
    }
    /// The share of the weights on the pages with the most weight: always read ones and `more`, by kv head.
    /// Mean over query heads.
    double best_kept(int query, int more) const {
        const int tokens = sequence_.tokens(), heads = dump_.k.heads, group = dump_.q.heads / heads,
                  dim = dump_.k.dim;
        std::vector<float> k(static_cast<std::size_t>(tokens * heads * dim));
        sequence_.dequantize(0, kvq::tensor::key, 0, kvq::token_view<float>(k.data(), tokens, heads, dim));
        const kvq::layer_pages pages = sequence_.pages(0);
        double kept = 0.0;
        for (int h = 0; h < heads; ++h) {
            std::vector<double> of_page(static_cast<std::size_t>(pages.entries()));
            for (int g = h * group; g < (h + 1) * group; ++g) {
                std::vector<double> score(static_cast<std::size_t>(tokens));
                for (int t = 0; t < tokens; ++t) {
                    double sum = 0.0;
                    for (int c = 0; c < dim; ++c)
                        sum += static_cast<double>(dump_.q.at(query, g)[c]) *
                               static_cast<double>(k[static_cast<std::size_t>((t * heads + h) * dim + c)]);
                    score[static_cast<std::size_t>(t)] = sum / std::sqrt(static_cast<double>(dim));
                }
                const double top = *std::max_element(score.begin(), score.end());
                double total = 0.0;
                for (double& x : score) total += x = std::exp(x - top);
                for (int e = 0; e < pages.entries(); ++e)
                    for (int t = pages.at(e).first_token; t < pages.at(e).first_token + pages.at(e).tokens;
                         ++t)
                        of_page[static_cast<std::size_t>(e)] += score[static_cast<std::size_t>(t)] / total;
            }
            std::vector<double> others;
            for (int e = 0; e < pages.entries(); ++e) {
                const bool always = e == 0 || e + 2 >= pages.entries() || pages.at(e).keys->format == 0;
                if (always)
                    kept += of_page[static_cast<std::size_t>(e)];
                else
                    others.push_back(of_page[static_cast<std::size_t>(e)]);
            }
            std::sort(others.rbegin(), others.rend());
            for (std::size_t i = 0; i < others.size() && static_cast<int>(i) < more; ++i) kept += others[i];
        }
        return kept / dump_.q.heads;
    }
    /// Quantized pages when all tokens are there, of one head.
    int last_pages() const {
        return std::max(1, (dump_.k.tokens - settings_.sinks - settings_.recent) / settings_.page_tokens);
    }
    /// Reads the chosen pages that are quantized. held: [kv_heads]
    void read_chosen(const std::vector<kvq::chosen_tokens>& chosen, std::vector<held_last>& held,
                     bool counts) const {
        const kvq::layer_pages pages = sequence_.pages(0);
        for (const kvq::chosen_tokens& run : chosen)
            for (int e = 0; e < pages.entries(); ++e)
                if (const auto page = pages.at(e); page.first_token >= run.tokens.begin &&
                                                   page.first_token < run.tokens.end &&
                                                   page.keys->format != 0)
                    held[static_cast<std::size_t>(run.kv_head)].read_page(e, counts);
    }
    float largest_value() const {
        std::vector<float> v(static_cast<std::size_t>(sequence_.tokens() * dump_.v.heads * dump_.v.dim));
        sequence_.dequantize(
            0, kvq::tensor::value, 0,
            kvq::token_view<float>(v.data(), sequence_.tokens(), dump_.v.heads, dump_.v.dim));
        float most = 0.0f;
        for (const float x : v) most = std::max(most, std::fabs(x));
        return most;
    }

private:
    const bench::layer_dump& dump_;
    settings settings_;
    kvq::cache cache_;
    kvq::sequence sequence_;
};

void add_error(measured& m, const outputs& o, const outputs& all) {
    for (std::size_t i = 0; i < all.out.size(); ++i) {
        m.error += std::pow(static_cast<double>(o.out[i]) - static_cast<double>(all.out[i]), 2.0);
        m.power += std::pow(static_cast<double>(all.out[i]), 2.0);
    }
}

/// Returns whether all bounds hold.
bool run(const std::vector<std::string>& paths, const settings& s, const std::vector<int>& budgets,
         const std::vector<float>& masses, const std::vector<int>& residents,
         const std::vector<std::pair<std::string, kvq::format_pair>>& formats) {
    std::vector<bench::layer_dump> layers;
    for (const std::string& path : paths)
        for (bench::layer_dump& l : bench::read_dump(path)) layers.push_back(std::move(l));
    bool holds = true;
    if (!s.json)
        std::printf(
            "%zu layers of %d tokens, q/kv heads %d/%d, head_dim %d, pages of %d, window %d/%d, %d queries\n",
            layers.size(), layers[0].k.tokens, layers[0].q.heads, layers[0].k.heads, layers[0].k.dim,
            s.page_tokens, s.sinks, s.recent, s.queries);
    for (const auto& [name, pair] : formats) {
        std::vector<measured> of_budget(budgets.size()), of_mass(masses.size());
        std::vector<std::int64_t> hits(budgets.size() * residents.size()), reads(hits.size());
        for (const bench::layer_dump& l : layers) {
            judged_layer judged(pair, l, s);
            std::vector<std::vector<held_last>> held;
            for (std::size_t i = 0; i < hits.size(); ++i)
                held.emplace_back(static_cast<std::size_t>(l.k.heads),
                                  held_last{static_cast<std::size_t>(std::max(
                                      1, judged.last_pages() * residents[i % residents.size()] / 100))});
            bool counts = false;
            judged.for_each_query([&](int query) {
                const outputs all = judged.attend(query, kvq::causal{});
                for (std::size_t b = 0; b < budgets.size(); ++b) {
                    measured& m = of_budget[b];
                    kvq::selection_report report;
                    std::vector<kvq::chosen_tokens> chosen;
                    report.chosen = &chosen;
                    const outputs o = judged.attend(query, kvq::selected_pages{budgets[b], &report});
                    for (std::size_t i = 0; i < residents.size(); ++i)
                        judged.read_chosen(chosen, held[b * residents.size() + i], counts);
                    m.pages += report.pages;
                    m.read += report.read;
                    for (std::size_t h = 0; h < o.lse.size(); ++h) {
                        const double lost = static_cast<double>(all.lse[h]) - static_cast<double>(o.lse[h]);
                        m.kept += std::exp(-lost);
                        m.divergence += lost;
                        ++m.rows;
                    }
                    m.best += judged.best_kept(query, 1 + (budgets[b] - 1) / s.page_tokens) * l.q.heads;
                    add_error(m, o, all);
                }
                counts = true;
                const double largest = static_cast<double>(judged.largest_value());
                for (std::size_t i = 0; i < masses.size(); ++i) {
                    measured& m = of_mass[i];
                    kvq::skipping_report report;
                    const outputs o = judged.attend(query, kvq::skipped_values{masses[i], &report});
                    m.pages += report.pages;
                    m.read += report.pages - report.skipped;
                    m.rows += report.rows;
                    m.left_out += report.left_out;
                    const double most = static_cast<double>(report.most_left_out);
                    m.most_left_out = std::max(m.most_left_out, most);
                    double error = 0.0;
                    for (std::size_t j = 0; j < o.out.size(); ++j)
                        error = std::max(error, std::fabs(static_cast<double>(o.out[j]) -
                                                          static_cast<double>(all.out[j])));
                    m.of_bound = std::max(m.of_bound, error / (largest * (most + 1e-6)));
                    holds = holds && m.of_bound <= 1.0 && most <= static_cast<double>(masses[i]) * 1.0001;
                    add_error(m, o, all);
                }
            });
            for (std::size_t i = 0; i < hits.size(); ++i)
                for (const held_last& head : held[i]) {
                    hits[i] += head.hits;
                    reads[i] += head.read;
                }
        }
        const auto share = [](auto a, auto b) { return static_cast<double>(a) / static_cast<double>(b); };
        for (std::size_t b = 0; b < budgets.size(); ++b) {
            const measured& m = of_budget[b];
            const double n = static_cast<double>(m.rows), error = std::sqrt(m.error / m.power);
            if (s.json)
                std::printf("%s\n", nlohmann::ordered_json{{"scheme", name},
                                                           {"select", budgets[b]},
                                                           {"page_tokens", s.page_tokens},
                                                           {"pages_read", share(m.read, m.pages)},
                                                           {"kept", m.kept / n},
                                                           {"best", m.best / n},
                                                           {"kld", m.divergence / n},
                                                           {"out", error}}
                                        .dump()
                                        .c_str());
            else
                std::printf(
                    "%-19s best %-5d pages read %5.1f %%  kept %6.2f %%  best possible %6.2f %%  KL %.2e  "
                    "error %.4f\n",
                    name.c_str(), budgets[b], 100.0 * share(m.read, m.pages), 100.0 * m.kept / n,
                    100.0 * m.best / n, m.divergence / n, error);
            for (std::size_t i = 0; i < residents.size(); ++i) {
                const double hit = share(hits[b * residents.size() + i], reads[b * residents.size() + i]);
                if (s.json)
                    std::printf("%s\n", nlohmann::ordered_json{{"scheme", name},
                                                               {"select", budgets[b]},
                                                               {"resident", residents[i]},
                                                               {"hits", hit}}
                                            .dump()
                                            .c_str());
                else
                    std::printf("%-19s best %-5d of %d %% of the pages held  hits %5.1f %%\n", name.c_str(),
                                budgets[b], residents[i], 100.0 * hit);
            }
        }
        for (std::size_t i = 0; i < masses.size(); ++i) {
            const measured& m = of_mass[i];
            const double error = std::sqrt(m.error / m.power),
                         mean = m.left_out / static_cast<double>(m.rows);
            if (s.json)
                std::printf("%s\n", nlohmann::ordered_json{{"scheme", name},
                                                           {"mass", masses[i]},
                                                           {"page_tokens", s.page_tokens},
                                                           {"values_skipped", 1.0 - share(m.read, m.pages)},
                                                           {"left_out", mean},
                                                           {"most_left_out", m.most_left_out},
                                                           {"out", error},
                                                           {"of_bound", m.of_bound}}
                                        .dump()
                                        .c_str());
            else
                std::printf(
                    "%-19s without %-6g values skipped %5.1f %%  left out %.1e, at most %.1e  error %.1e, "
                    "%.2f of its bound\n",
                    name.c_str(), static_cast<double>(masses[i]), 100.0 * (1.0 - share(m.read, m.pages)),
                    mean, m.most_left_out, error, m.of_bound);
        }
        std::fflush(stdout);
    }
    if (!holds) std::fprintf(stderr, "an error is outside of its bound\n");
    return holds;
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app("Selected pages and skipped values on real q, k and v");
    settings s;
    std::vector<std::string> paths;
    std::vector<int> budgets{256, 512};
    std::vector<int> residents;
    std::vector<float> masses{1e-4f, 1e-3f, 1e-2f};
    app.add_option("dumps", paths, "folders or .safetensors files (bench/dump.hpp says how they look)")
        ->required();
    app.add_option("--select", budgets, "tokens of the best pages")
        ->check(CLI::PositiveNumber)
        ->delimiter(',');
    app.add_option("--mass", masses, "share of the weights whose values may be left out")
        ->check(CLI::Range(0.0f, 0.99f))
        ->delimiter(',');
    app.add_option("--resident", residents, "per cent of the pages that a kv head holds")
        ->check(CLI::Range(1, 100))
        ->delimiter(',');
    app.add_option("--page-tokens", s.page_tokens)->check(CLI::PositiveNumber)->capture_default_str();
    app.add_option("--sinks", s.sinks)->check(CLI::NonNegativeNumber)->capture_default_str();
    app.add_option("--recent", s.recent)->check(CLI::NonNegativeNumber)->capture_default_str();
    app.add_option("--queries", s.queries, "of every layer, evenly spread")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    app.add_flag("--json", s.json, "one JSON object a line");
    CLI11_PARSE(app, argc, argv);
    const auto int8 = kvq::make_format<kvq::int8>(),
               affine4 = kvq::make_format<kvq::affine<4, kvq::per_token<64>>>();
    try {
        return run(paths, s, budgets, masses, residents,
                   {{"kivi-4-g64", kvq::make_formats<kvq::kivi<4, 64>>()},
                    {"std4", kvq::make_formats<kvq::std4>()},
                    {"low2", kvq::make_formats<kvq::low2>()},
                    {"int8", {int8, int8}},
                    {"int8-bounds", {kvq::with_bounds(int8), int8}},
                    {"affine-4-g64", {affine4, affine4}},
                    {"affine-4-g64-bounds", {kvq::with_bounds(affine4), affine4}}})
                   ? 0
                   : 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
        return 2;
    }
}
