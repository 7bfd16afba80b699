// What an engine does to a sequence, and what it must not cost: scripts/quality prefill, scripts/quality
// cuts.
//
//   prefill DUMP...   the last queries of a dump, token by token and in chunks: error of the attention output
//                     against double on the values of the dump. Chunks must not be worse than token by token
//                     by more than --bound, a layer that shares the keys and values not worse than their
//                     owner by more than --shared-bound.
//   cuts              N times: cut back to a prompt and append other tokens. What is left of the prompt must
//                     not change.
//
// Exit status 1 where a bound does not hold. Dumps: bench/dump.hpp.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <kvq/cache/preset_options.hpp>
#include <kvq/cache/sequence.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/full.hpp>
#include <kvq/schemes/int8.hpp>
#include <kvq/schemes/kivi.hpp>
#include <kvq/schemes/presets.hpp>
#include <nlohmann/json.hpp>
#include <random>

#include "attention_error.hpp"
#include "dump.hpp"

namespace {

struct scheme {
    const char* name;
    kvq::format_pair formats;
};

const std::vector<scheme>& schemes() {
    static const std::vector<scheme> all{{"bf16", kvq::make_formats<kvq::full<kvq::bfloat16>>()},
                                         {"int8", kvq::make_formats<kvq::int8>()},
                                         {"affine-4-g64", kvq::make_formats<kvq::affine<4>>()},
                                         {"kivi-4-g64", kvq::make_formats<kvq::kivi<4, 64>>()},
                                         {"kivi-3-g64", kvq::make_formats<kvq::kivi<3, 64>>()},
                                         {"kivi-2-g64", kvq::make_formats<kvq::kivi<2, 64>>()},
                                         {"low2", kvq::make_formats<kvq::low2>()},
                                         {"low3", kvq::make_formats<kvq::low3>()},
                                         {"std4", kvq::make_formats<kvq::std4>()},
                                         {"std4-h", kvq::make_formats<kvq::std4_h>()},
                                         {"mix4", kvq::make_formats<kvq::mix4>()},
                                         {"std5", kvq::make_formats<kvq::std5>()},
                                         {"hi6", kvq::make_formats<kvq::hi6>()},
                                         {"ref8", kvq::make_formats<kvq::ref8>()}};
    return all;
}

kvq::token_view<const float> tokens_of(const bench::tensor_dump& x, int first, int count) {
    return {x.at(first, 0), count, x.heads, x.dim};
}

// ---- prefill ---------------------------------------------------------------------------------------------

struct prefill_settings {
    std::vector<std::string> dumps, wanted;
    std::vector<int> layers, chunks{1, 8, 32, 64, 128, 256, 512, 1024, 2048};
    double bound = 1.1, shared_bound = 1.02;
    bool json = false;
};

/// Outputs of all queries by exact attention on the values of the dump, [query][head][channel].
std::vector<double> exact_outputs(const bench::layer_dump& l) {
    const int queries = l.q.tokens, group = l.q.heads / l.k.heads, history = l.k.tokens - queries;
    std::vector<double> out(static_cast<std::size_t>(queries * l.q.heads * l.v.dim));
    for (int kv = 0; kv < l.k.heads; ++kv) {
        bench::head_values head(l.k.tokens, l.k.dim, l.v.dim);
        for (int t = 0; t < l.k.tokens; ++t) {
            for (int c = 0; c < l.k.dim; ++c) head.key(t, c) = static_cast<double>(l.k.at(t, kv)[c]);
            for (int c = 0; c < l.v.dim; ++c) head.value(t, c) = static_cast<double>(l.v.at(t, kv)[c]);
        }
        for (int h = kv * group; h < (kv + 1) * group; ++h)
            for (int i = 0; i < queries; ++i) {
                const auto e = bench::make_exact(head, l.q.at(i, h), history + i + 1);
                std::copy(e.output.begin(), e.output.end(), out.begin() + (i * l.q.heads + h) * l.v.dim);
            }
    }
    return out;
}

/// Relative error of what the queries of a dump get: the tokens before them appended, the last ones in
/// chunks. chunk 0: token by token, append and attend. Chunks of more tokens than there are queries begin in
/// the history. shared: the queries are those of a layer that shares the keys and values.
double prefill_error(const bench::layer_dump& l, const scheme& s, int chunk, const std::vector<double>& exact,
                     bool shared = false) {
    kvq::cache cache({kvq::full_attention({l.k.heads, l.k.dim, l.v.dim}), kvq::shared_with(0)},
                     kvq::preset_options(s.formats));
    const int layer = shared ? 1 : 0;
    auto sequence = cache.new_sequence();
    const int queries = l.q.tokens, history = l.k.tokens - queries;
    std::vector<float> out(static_cast<std::size_t>(queries * l.q.heads * l.v.dim));
    const auto output = [&](int first, int count) {
        return kvq::token_view<float>(out.data() + static_cast<std::ptrdiff_t>(first) * l.q.heads * l.v.dim,
                                      count, l.q.heads, l.v.dim);
    };
    const int first = chunk > queries ? l.k.tokens - chunk : history;
    sequence.append(0, tokens_of(l.k, 0, first), tokens_of(l.v, 0, first));
    for (int t = first; t < l.k.tokens;) {
        const int n = std::min(std::max(chunk, 1), l.k.tokens - t);
        const int seen = std::min(n, queries), at = t + n - seen - history;
        if (chunk == 0) {
            sequence.append(0, tokens_of(l.k, t, n), tokens_of(l.v, t, n));
            sequence.attend(layer, tokens_of(l.q, at, seen), output(at, seen));
        } else {
            const int own = shared ? 0 : seen;
            sequence.prefill(0, tokens_of(l.k, t, n), tokens_of(l.v, t, n), tokens_of(l.q, at, own),
                             output(at, own));
            sequence.prefill(1, tokens_of(l.k, t, 0), tokens_of(l.v, t, 0), tokens_of(l.q, at, seen - own),
                             output(at, seen - own));
        }
        t += n;
    }
    double error = 0.0, power = 0.0;
    for (std::size_t i = 0; i < out.size(); ++i) {
        const double d = static_cast<double>(out[i]) - exact[i];
        error += d * d;
        power += exact[i] * exact[i];
    }
    return std::sqrt(error / std::max(power, 1e-300));
}

bool chosen(const std::vector<std::string>& wanted, const char* name) {
    return wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end();
}

int prefill(const prefill_settings& settings) {
    double worst = 0.0, worst_shared = 0.0;
    for (const std::string& path : settings.dumps)
        for (const bench::layer_dump& l : bench::read_dump(path)) {
            if (!settings.layers.empty() &&
                std::find(settings.layers.begin(), settings.layers.end(), l.layer) == settings.layers.end())
                continue;
            std::vector<int> chunks;
            for (const int c : settings.chunks)
                if (c >= 1 && c <= l.k.tokens) chunks.push_back(c);
            if (!settings.json) {
                std::printf("\n%s, layer %d: %d tokens, the last %d as queries\n\n", path.c_str(), l.layer,
                            l.k.tokens, l.q.tokens);
                std::printf("| scheme | token by token |");
                for (const int c : chunks) std::printf(" %d |", c);
                std::printf("\n|---|---:|");
                for (std::size_t i = 0; i < chunks.size(); ++i) std::printf("---:|");
                std::printf("\n");
            }
            const auto exact = exact_outputs(l);
            for (const scheme& s : schemes()) {
                if (!chosen(settings.wanted, s.name)) continue;
                const double by_token = prefill_error(l, s, 0, exact);
                std::vector<double> errors;
                if (!settings.json) std::printf("| %s | %.4f |", s.name, by_token);
                for (const int c : chunks) {
                    const double error = prefill_error(l, s, c, exact), ratio = error / by_token;
                    errors.push_back(error);
                    if (!(ratio <= worst)) worst = ratio;
                    if (settings.json)
                        std::printf("%s\n", nlohmann::json{{"dump", path},
                                                           {"layer", l.layer},
                                                           {"scheme", s.name},
                                                           {"chunk", c},
                                                           {"error", error},
                                                           {"token_by_token", by_token},
                                                           {"ratio", ratio}}
                                                .dump()
                                                .c_str());
                    else
                        std::printf(" %.2f |", ratio);
                    std::fflush(stdout);
                }
                if (!settings.json) std::printf("\n| %s, shared, over its owner | |", s.name);
                for (std::size_t i = 0; i < chunks.size(); ++i) {
                    const double error = prefill_error(l, s, chunks[i], exact, true),
                                 ratio = error / errors[i];
                    if (!(ratio <= worst_shared)) worst_shared = ratio;
                    if (settings.json)
                        std::printf("%s\n", nlohmann::json{{"dump", path},
                                                           {"layer", l.layer},
                                                           {"scheme", s.name},
                                                           {"chunk", chunks[i]},
                                                           {"shared_error", error},
                                                           {"owner_error", errors[i]},
                                                           {"ratio", ratio}}
                                                .dump()
                                                .c_str());
                    else
                        std::printf(" %.2f |", ratio);
                }
                if (!settings.json) std::printf("\n");
            }
        }
    const bool holds = worst <= settings.bound && worst_shared <= settings.shared_bound;
    std::fflush(stdout);
    std::fprintf(stderr,
                 "largest ratio of chunks to token by token: %.3f, bound %.3f; of a shared layer to its "
                 "owner: %.3f, bound %.3f: %s\n",
                 worst, settings.bound, worst_shared, settings.shared_bound, holds ? "holds" : "FAILS");
    return holds ? 0 : 1;
}

// ---- cuts ------------------------------------------------------------------------------------------------

struct cut_settings {
    std::vector<std::string> wanted;
    std::vector<int> turns{0, 1, 8, 64, 1000};
    int prompt = 991, length = 1120, first = 900, last = 990, heads = 2, dim = 128;
    unsigned seed = 1;
    bool json = false;
};

int cuts(cut_settings settings) {
    std::sort(settings.turns.begin(), settings.turns.end());
    const int most = settings.turns.back();
    if (settings.turns.front() != 0) settings.turns.insert(settings.turns.begin(), 0);
    if (settings.first < 0 || settings.first >= settings.last || settings.last > settings.prompt ||
        settings.prompt >= settings.length)
        throw std::runtime_error("tokens first < last <= prompt < length are wanted");
    const kvq::cache_shape shape{.layers = 1, .kv_heads = settings.heads, .head_dim = settings.dim};
    if (!settings.json) {
        std::printf(
            "trim(%d), append to %d tokens; %d heads of %d channels, seed %u; relative error of keys / "
            "values of tokens %d "
            "to %d\n\n| scheme |",
            settings.prompt, settings.length, settings.heads, settings.dim, settings.seed, settings.first,
            settings.last - 1);
        for (const int n : settings.turns) std::printf(" %d |", n);
        std::printf(" unchanged |\n|---|");
        for (std::size_t i = 0; i <= settings.turns.size(); ++i) std::printf("---:|");
        std::printf("\n");
    }
    bool all_hold = true;
    const int row = settings.heads * settings.dim, count = settings.last - settings.first;
    for (const scheme& s : schemes()) {
        if (!chosen(settings.wanted, s.name)) continue;
        std::mt19937 random(settings.seed);
        std::normal_distribution<float> normal;
        kvq::cache cache(shape, kvq::preset_options(s.formats));
        auto sequence = cache.new_sequence();
        std::vector<kvq::float16> k, v, original[2];
        const auto append = [&](int n) {
            k.resize(static_cast<std::size_t>(n * row));
            v.resize(k.size());
            for (kvq::float16& x : k) x = kvq::float16(normal(random));
            for (kvq::float16& x : v) x = kvq::float16(normal(random));
            const kvq::token_view<const kvq::float16> keys(k.data(), n, settings.heads, settings.dim),
                values(v.data(), n, settings.heads, settings.dim);
            sequence.append(0, keys, values);
        };
        append(settings.length);
        original[0].assign(k.begin() + settings.first * row, k.begin() + settings.last * row);
        original[1].assign(v.begin() + settings.first * row, v.begin() + settings.last * row);
        std::vector<float> before[2];
        bool unchanged = true;
        if (!settings.json) std::printf("| %s |", s.name);
        for (int turn = 0; turn <= most; ++turn) {
            if (turn > 0) {
                sequence.trim(settings.prompt);
                append(settings.length - settings.prompt);
            }
            double error[2];
            bool same = true;
            for (int i = 0; i < 2; ++i) {
                std::vector<float> now(static_cast<std::size_t>(count * row));
                sequence.dequantize(0, i == 0 ? kvq::tensor::key : kvq::tensor::value, settings.first,
                                    kvq::token_view<float>(now.data(), count, settings.heads, settings.dim));
                double e = 0.0, p = 0.0;
                for (std::size_t j = 0; j < now.size(); ++j) {
                    const auto x = static_cast<double>(static_cast<float>(original[i][j]));
                    e += (static_cast<double>(now[j]) - x) * (static_cast<double>(now[j]) - x);
                    p += x * x;
                }
                error[i] = std::sqrt(e / p);
                if (turn == 0) before[i] = now;
                same = same && std::memcmp(now.data(), before[i].data(), now.size() * sizeof(float)) == 0;
            }
            unchanged = unchanged && same;
            if (std::find(settings.turns.begin(), settings.turns.end(), turn) == settings.turns.end())
                continue;
            if (settings.json)
                std::printf("%s\n", nlohmann::json{{"scheme", s.name},
                                                   {"turns", turn},
                                                   {"seed", settings.seed},
                                                   {"key_error", error[0]},
                                                   {"value_error", error[1]},
                                                   {"unchanged", same}}
                                        .dump()
                                        .c_str());
            else
                std::printf(" %.3g / %.3g |", error[0], error[1]);
            std::fflush(stdout);
        }
        if (!settings.json) std::printf(" %s |\n", unchanged ? "yes" : "NO");
        all_hold = all_hold && unchanged;
    }
    std::fflush(stdout);
    std::fprintf(stderr, "survivors of cuts have the values that they had before: %s\n",
                 all_hold ? "holds" : "FAILS");
    return all_hold ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app{
        "What an engine does to a sequence: prompts in chunks, cuts. Exit status 1 where a bound fails."};
    app.require_subcommand(1);
    prefill_settings p;
    CLI::App* const run_prefill = app.add_subcommand("prefill", "chunks of a prompt against token by token");
    run_prefill
        ->add_option("dumps", p.dumps, "folders or .safetensors files with q, k and v (bench/dump.hpp)")
        ->required();
    run_prefill->add_option("--schemes", p.wanted, "names; default: all")->delimiter(',');
    run_prefill->add_option("--layers", p.layers, "default: all")->delimiter(',');
    run_prefill->add_option("--chunks", p.chunks, "tokens of a chunk")->capture_default_str()->delimiter(',');
    run_prefill->add_option("--bound", p.bound, "largest ratio of errors")->capture_default_str();
    run_prefill->add_option("--shared-bound", p.shared_bound, "largest ratio of a shared layer to its owner")
        ->capture_default_str();
    run_prefill->add_flag("--json", p.json, "a line per scheme, layer and chunk size");
    cut_settings c;
    CLI::App* const run_cuts = app.add_subcommand("cuts", "cut back to a prompt again and again");
    run_cuts->add_option("--schemes", c.wanted, "names; default: all")->delimiter(',');
    run_cuts->add_option("--turns", c.turns, "cuts after which errors are printed; all are checked")
        ->capture_default_str()
        ->delimiter(',');
    run_cuts->add_option("--prompt", c.prompt, "tokens that are kept")->capture_default_str();
    run_cuts->add_option("--tokens", c.length, "length before a cut")->capture_default_str();
    run_cuts->add_option("--seed", c.seed, "of the random tokens")->capture_default_str();
    run_cuts->add_flag("--json", c.json, "a line per scheme and number of cuts");
    CLI11_PARSE(app, argc, argv);
    try {
        return run_prefill->parsed() ? prefill(p) : cuts(c);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_engine: %s\n", e.what());
        return 2;
    }
}
