// The program behind bench_quality and bench_ablation: quality of schemes on real q, k and v. Bits, error of
// the attention output, divergence of its weights, worst query, each with an exact window and without; and
// what quantizing costs.
//
// Pages cover the whole sequence, also tokens behind a query (the state in which a finished cache is); the
// query sees the keys up to its own position. All sums are double, on dequantized values. Nothing here runs
// the attention kernels.
#pragma once

#include <time.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdio>
#include <functional>
#include <kvq/core/thread_pool.hpp>
#include <kvq/quant/calibration.hpp>
#include <nlohmann/json.hpp>

#include "attention_error.hpp"
#include "dump.hpp"
#include "page_remark.hpp"
#include "quality_schemes.hpp"

namespace quality {

struct settings {
    int sinks = 4, recent = 32, page_tokens = kvq::default_page_tokens, queries = 64, threads = 2;
    std::vector<int> layers;  ///< empty: all
    bool json = false;
};

/// One tensor of one head, quantized page by page and dequantized again.
struct quantized_tensor {
    std::vector<float> values;
    std::size_t bytes = 0;
    double seconds = 0.0;
};

inline double cpu_seconds() {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// Tokens that lie in whole pages; the others would still be in 16 bit.
inline int whole_pages(int tokens, int page_tokens) { return tokens / page_tokens * page_tokens; }

inline quantized_tensor code(const kvq::format& f, kvq::tensor role, kvq::block_id id,
                             const bench::tensor_dump& from, int page_tokens) {
    const kvq::block_shape shape{role, page_tokens, from.dim};
    quantized_tensor result;
    std::vector<float> page(shape.values()), scratch(shape.values());
    std::vector<std::byte> block(f.block_bytes(shape));
    for (int first = 0; first + page_tokens <= from.tokens; first += page_tokens) {
        for (int t = 0; t < page_tokens; ++t)
            std::copy_n(from.at(first + t, id.head), from.dim, page.data() + t * from.dim);
        const double start = cpu_seconds();
        f.functions().quantize_values(f.scheme(), shape, id, page.data(), block.data());
        result.seconds += cpu_seconds() - start;
        f.functions().dequantize(f.scheme(), shape, id, block.data(), kvq::float_type::fp32, page.data(),
                                 from.dim, scratch.data());
        result.values.insert(result.values.end(), page.begin(), page.end());
        result.bytes += block.size();
    }
    return result;
}

/// What keys can be made from: of a text, and of the first tokens of the sequence itself
/// (kvq/policy/self_calibration.hpp).
struct known_statistics {
    kvq::calibration text, own;
};

/// What a row of the table is about. Formats with statistics are three of them: name, name+stats and
/// name+self; name+own is what a cache makes of keys by default, of the first tokens.
struct entry {
    std::string name, source;
    std::function<kvq::format_pair(const known_statistics&)> make;
};
inline std::vector<entry> entries_of(const std::vector<listed_format>& formats) {
    std::vector<entry> entries;
    for (const listed_format& f : formats) {
        entries.push_back({f.name, f.source, [f](const known_statistics&) {
                               return kvq::format_pair{f.keys(nullptr), f.values()};
                           }});
        if (f.plans)
            entries.push_back({f.name + "+own", f.source, [f](const known_statistics& known) {
                                   const kvq::calibration keys_alone = known.own.without_queries();
                                   return kvq::format_pair{f.keys(&keys_alone), f.values()};
                               }});
        if (!f.takes_statistics) continue;
        entries.push_back({f.name + "+stats", f.source, [f](const known_statistics& known) {
                               return kvq::format_pair{f.keys(&known.text), f.values()};
                           }});
        entries.push_back({f.name + "+self", f.source, [f](const known_statistics& known) {
                               return kvq::format_pair{f.keys(&known.own), f.values()};
                           }});
    }
    return entries;
}

inline kvq::calibration empty_statistics(const std::vector<bench::layer_dump>& layers) {
    const bench::layer_dump& any = layers.front();
    return kvq::calibration(
        {.layers = layers.back().layer + 1, .kv_heads = any.k.heads, .head_dim = any.k.dim}, true);
}

/// Adds what the first 1/part of a sequence has, and at most `most` tokens: keys, and the same share of its
/// queries.
inline void add_statistics(kvq::calibration& statistics, const std::vector<bench::layer_dump>& layers,
                           int part, int most = std::numeric_limits<int>::max()) {
    for (const bench::layer_dump& l : layers) {
        const int keys = std::min(most, l.k.tokens / part);
        const int queries = static_cast<int>(std::int64_t{keys} * l.q.tokens / l.k.tokens);
        statistics.add_keys(l.layer, kvq::token_view(l.k.values.data(), keys, l.k.heads, l.k.dim));
        statistics.add_queries(l.layer, kvq::token_view(l.q.values.data(), queries, l.q.heads, l.q.dim));
    }
}

inline bool has_layer(const std::vector<bench::layer_dump>& layers, int layer) {
    return std::any_of(layers.begin(), layers.end(),
                       [&](const bench::layer_dump& l) { return l.layer == layer; });
}

/// Variance of the logarithm of a channel's importance from one text to another, over the channels of a head;
/// mean over heads.
/// What kvq::text_doubt stands for.
inline double text_variance(const kvq::calibration& a, const kvq::calibration& b) {
    const kvq::cache_shape& s = a.shape();
    double variance = 0.0, heads = 0.0;
    for (int layer = 0; layer < s.layers; ++layer)
        for (int head = 0; head < s.kv_heads; ++head) {
            if (a.keys(layer, head) == 0 || b.keys(layer, head) == 0) continue;
            double sum = 0.0, squares = 0.0, n = 0.0;
            for (int c = 0; c < s.head_dim; ++c) {
                const auto importance = [&](const kvq::calibration& x) {
                    return x.query_power(layer, head, c) * x.key_variance(layer, head, c);
                };
                if (!(importance(a) > 0.0 && importance(b) > 0.0)) continue;
                const double x = std::log(importance(a) / importance(b));
                sum += x, squares += x * x, ++n;
            }
            if (n == 0.0) continue;
            variance += squares / n - sum / n * (sum / n);
            ++heads;
        }
    return variance / heads;
}

/// What one head contributes to a scheme's result.
struct head_result {
    std::vector<bench::error_sums> window, bare;  // of each query head
    std::size_t key_bytes = 0, value_bytes = 0, key_values = 0, value_values = 0;
    double key_seconds = 0.0, value_seconds = 0.0;
};

/// Query tokens spread evenly over the second half of the dump's (the first is for statistics), the last one
/// among them.
inline std::vector<int> pick_queries(int tokens, int wanted) {
    const int first = tokens / 2, most = tokens - first;
    const int n = wanted < 1 || wanted > most ? most : wanted;
    std::vector<int> picked;
    for (int i = 0; i < n; ++i)
        picked.push_back(first + static_cast<int>((static_cast<long>(i) + 1) * most / n) - 1);
    return picked;
}

inline std::vector<head_result> measure_head(const bench::layer_dump& dump, int head,
                                             const std::vector<kvq::format_pair>& schemes,
                                             const settings& chosen) {
    const int tokens = dump.k.tokens, group = dump.q.heads / dump.k.heads;
    bench::head_values exact(tokens, dump.k.dim, dump.v.dim);
    for (int t = 0; t < tokens; ++t) {
        for (int c = 0; c < dump.k.dim; ++c) exact.key(t, c) = static_cast<double>(dump.k.at(t, head)[c]);
        for (int c = 0; c < dump.v.dim; ++c) exact.value(t, c) = static_cast<double>(dump.v.at(t, head)[c]);
    }
    const std::vector<int> picked = pick_queries(dump.q.tokens, chosen.queries);
    std::vector<std::vector<bench::exact_query>> queries(static_cast<std::size_t>(group));
    for (int g = 0; g < group; ++g)
        for (const int i : picked)
            queries[static_cast<std::size_t>(g)].push_back(
                bench::make_exact(exact, dump.q.at(i, head * group + g), tokens - dump.q.tokens + i + 1));

    std::vector<head_result> results;
    for (const kvq::format_pair& scheme : schemes) {
        const kvq::block_id id{dump.layer, head};
        const quantized_tensor k = code(scheme.keys, kvq::tensor::key, id, dump.k, chosen.page_tokens);
        const quantized_tensor v = code(scheme.values, kvq::tensor::value, id, dump.v, chosen.page_tokens);
        bench::head_values quantized = exact;
        const int whole = whole_pages(tokens, chosen.page_tokens);
        for (int t = 0; t < whole; ++t) {
            for (int c = 0; c < dump.k.dim; ++c)
                quantized.key(t, c) =
                    static_cast<double>(k.values[static_cast<std::size_t>(t * dump.k.dim + c)]);
            for (int c = 0; c < dump.v.dim; ++c)
                quantized.value(t, c) =
                    static_cast<double>(v.values[static_cast<std::size_t>(t * dump.v.dim + c)]);
        }
        head_result r;
        r.key_bytes = k.bytes, r.value_bytes = v.bytes;
        r.key_values = k.values.size(), r.value_values = v.values.size();
        r.key_seconds = k.seconds, r.value_seconds = v.seconds;
        for (const auto& of_head : queries) {
            bench::error_sums window, bare;
            for (const bench::exact_query& q : of_head) {
                std::vector<double> logits(static_cast<std::size_t>(q.seen));
                quantized.logits(q.q, q.seen, logits.data());
                bench::add_query(exact, quantized, q, logits, chosen.sinks, chosen.recent, window);
                bench::add_query(exact, quantized, q, std::move(logits), 0, 0, bare);
            }
            r.window.push_back(window);
            r.bare.push_back(bare);
        }
        results.push_back(std::move(r));
    }
    return results;
}

struct errors {
    double out = 0.0, kld = 0.0, worst = 0.0;
};
/// Mean over query heads of the relative error of a head; the worst query of all.
inline errors summarize(const std::vector<bench::error_sums>& heads) {
    errors e;
    double queries = 0.0;
    for (const bench::error_sums& h : heads) {
        e.out += std::sqrt(h.error / h.power) / static_cast<double>(heads.size());
        e.kld += h.divergence;
        queries += h.queries;
        e.worst = std::max(e.worst, h.worst);
    }
    e.kld /= queries;
    return e;
}

inline void run(const std::vector<std::string>& paths, const std::vector<std::string>& statistics_paths,
                const std::vector<entry>& schemes, const settings& chosen) {
    const auto read = [&](const std::string& path) {
        std::vector<bench::layer_dump> layers = bench::read_dump(path);
        if (!chosen.layers.empty())
            std::erase_if(layers, [&](const bench::layer_dump& l) {
                return std::find(chosen.layers.begin(), chosen.layers.end(), l.layer) == chosen.layers.end();
            });
        if (layers.empty()) throw std::runtime_error(path + " has none of the layers");
        return layers;
    };
    struct sequence {
        std::vector<bench::layer_dump> layers;
        std::vector<kvq::format_pair> formats;
    };
    std::vector<sequence> sequences;
    kvq::calibration judged, others;
    for (const std::string& path : paths) {
        sequence s{read(path), {}};
        known_statistics statistics{empty_statistics(s.layers), empty_statistics(s.layers)};
        if (statistics_paths.empty()) add_statistics(statistics.text, s.layers, 2);
        for (const std::string& other : statistics_paths) {
            std::vector<bench::layer_dump> known = read(other);
            std::erase_if(known, [&](const bench::layer_dump& l) { return !has_layer(s.layers, l.layer); });
            add_statistics(statistics.text, known, 1);
        }
        add_statistics(statistics.own, s.layers, 2, 512);  // errors are those of the second half
        if (sequences.empty()) judged = empty_statistics(s.layers);
        add_statistics(judged, s.layers, 1);
        others = statistics.text;
        for (const entry& e : schemes) s.formats.push_back(e.make(statistics));
        sequences.push_back(std::move(s));
    }

    struct job {
        const bench::layer_dump* layer;
        int head;
        const std::vector<kvq::format_pair>* formats;
    };
    std::vector<job> jobs;
    std::size_t layers = 0;
    for (const sequence& s : sequences)
        for (const bench::layer_dump& l : s.layers) {
            ++layers;
            if (l.k.tokens < chosen.page_tokens)
                throw std::runtime_error(l.source + " has " + std::to_string(l.k.tokens) +
                                         " tokens, less than a page of " +
                                         std::to_string(chosen.page_tokens));
            for (int head = 0; head < l.k.heads; ++head) jobs.push_back({&l, head, &s.formats});
        }
    std::vector<std::vector<head_result>> results(jobs.size());
    const kvq::thread_pool threads(chosen.threads);
    std::atomic<std::size_t> next{0};
    threads.parallel_for(chosen.threads, [&](int) {
        for (std::size_t job = next.fetch_add(1); job < jobs.size(); job = next.fetch_add(1))
            results[job] = measure_head(*jobs[job].layer, jobs[job].head, *jobs[job].formats, chosen);
    });

    const bench::layer_dump& first = sequences.front().layers.front();
    int width = 6;
    for (const entry& e : schemes) width = std::max(width, static_cast<int>(e.name.size()));
    if (!chosen.json && !statistics_paths.empty())
        std::printf("variance of log importance from the texts of the statistics to these: %.3f\n",
                    text_variance(judged, others));
    if (!chosen.json)
        std::printf(
            "%zu layers of %d tokens, q/kv heads %d/%d, head_dim %d, pages of %d, %d queries a head; window "
            "%d/%d\n"
            "%-*s %6s %6s %8s | %9s %9s %9s | %9s %9s %9s | %s\n",
            layers, first.k.tokens, first.q.heads, first.k.heads, first.k.dim, chosen.page_tokens,
            static_cast<int>(pick_queries(first.q.tokens, chosen.queries).size()), chosen.sinks,
            chosen.recent, width, "scheme", "bits", "K bits", "+window", "out", "KLD", "worst", "bare out",
            "bare KLD", "worst", "quantize ns/value K, V");
    for (std::size_t s = 0; s < schemes.size(); ++s) {
        head_result sum;
        for (const auto& head : results) {
            const head_result& r = head[s];
            sum.key_bytes += r.key_bytes, sum.value_bytes += r.value_bytes;
            sum.key_values += r.key_values, sum.value_values += r.value_values;
            sum.key_seconds += r.key_seconds, sum.value_seconds += r.value_seconds;
            sum.window.insert(sum.window.end(), r.window.begin(), r.window.end());
            sum.bare.insert(sum.bare.end(), r.bare.begin(), r.bare.end());
        }
        const auto ratio = [](auto a, auto b) { return static_cast<double>(a) / static_cast<double>(b); };
        const double key_bits = 8.0 * ratio(sum.key_bytes, sum.key_values);
        const double value_bits = 8.0 * ratio(sum.value_bytes, sum.value_values);
        const double bits = 8.0 * ratio(sum.key_bytes + sum.value_bytes, sum.key_values + sum.value_values);
        const double kept = ratio(chosen.sinks + chosen.recent, first.k.tokens);
        const double bits_window = bits * (1.0 - kept) + 16.0 * kept;
        const errors window = summarize(sum.window), bare = summarize(sum.bare);
        const double key_ns = 1e9 * sum.key_seconds / static_cast<double>(sum.key_values);
        const double value_ns = 1e9 * sum.value_seconds / static_cast<double>(sum.value_values);
        if (chosen.json) {
            nlohmann::ordered_json line{{"scheme", schemes[s].name},
                                        {"source", schemes[s].source},
                                        {"bits", bits},
                                        {"key_bits", key_bits},
                                        {"value_bits", value_bits},
                                        {"bits_with_window", bits_window},
                                        {"tokens", first.k.tokens},
                                        {"page_tokens", chosen.page_tokens},
                                        {"sinks", chosen.sinks},
                                        {"recent", chosen.recent},
                                        {"out", window.out},
                                        {"kld", window.kld},
                                        {"worst", window.worst},
                                        {"bare_out", bare.out},
                                        {"bare_kld", bare.kld},
                                        {"bare_worst", bare.worst},
                                        {"key_quantize_ns", key_ns},
                                        {"value_quantize_ns", value_ns}};
            if (!statistics_paths.empty()) line["text_variance"] = text_variance(judged, others);
            std::printf("%s\n", line.dump().c_str());
        } else {
            std::printf("%-*s %6.3f %6.3f %8.3f | %9.5f %9.2e %9.4f | %9.5f %9.2e %9.4f | %.1f, %.1f\n",
                        width, schemes[s].name.c_str(), bits, key_bits, bits_window, window.out, window.kld,
                        window.worst, bare.out, bare.kld, bare.worst, key_ns, value_ns);
        }
    }
}

inline int run_program(int argc, char** argv, const std::vector<listed_format>& formats) {
    const std::vector<entry> all = entries_of(formats);
    CLI::App app("Quality of schemes on real q, k and v");
    settings chosen;
    std::vector<std::string> paths, names;
    std::vector<std::string> statistics_paths;
    bool list = false;
    app.add_option("dumps", paths,
                   "folders or .safetensors files, a sequence each (bench/dump.hpp says how they look)");
    app.add_option("--schemes", names, "only these, separated by commas")->delimiter(',');
    app.add_option("--sinks", chosen.sinks, "exact first tokens")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    app.add_option("--recent", chosen.recent, "exact last tokens, as seen from the query")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    app.add_option("--page-tokens", chosen.page_tokens)
        ->take_last()
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    app.add_option("--queries", chosen.queries,
                   "queries of a head, spread over the second half of those of the dump; 0: all")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    app.add_option("--threads", chosen.threads)
        ->take_last()
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    app.add_option(
        "--statistics", statistics_paths,
        "gather what schemes named +stats use from these dumps (of the layers that are judged), not from the "
        "first half of each sequence");
    app.add_option("--layers", chosen.layers, "only these layers of the dumps, separated by commas")
        ->delimiter(',');
    app.add_flag("--json", chosen.json, "one JSON object a line");
    app.add_flag("--list", list, "name the schemes and where they come from");
    CLI11_PARSE(app, argc, argv);

    try {
        if (list) {
            for (const entry& e : all) std::printf("%-24s %s\n", e.name.c_str(), e.source.c_str());
            return 0;
        }
        std::vector<entry> picked;
        for (const std::string& name : names) {
            const auto found =
                std::find_if(all.begin(), all.end(), [&](const entry& e) { return e.name == name; });
            if (found == all.end())
                throw std::runtime_error("there is no scheme " + name + "; --list names them");
            picked.push_back(*found);
        }
        if (paths.empty()) throw std::runtime_error("no dump is given; --help says what one is");
        for (const entry& e : names.empty() ? all : picked)
            if (const std::string remark = page_remark(e.name, chosen.page_tokens, e.name); !remark.empty())
                std::fprintf(stderr, "%s: %s\n", argv[0], remark.c_str());
        run(paths, statistics_paths, names.empty() ? all : picked, chosen);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
        return 1;
    }
    return 0;
}

}  // namespace quality
