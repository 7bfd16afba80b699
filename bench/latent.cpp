// Latent attention (MLA): formats against 16-bit latents, 512 + 64 channels: scripts/bench latent.
//
// GMAC/s: multiply-adds of both products (tokens x rows x 1088) per second: on one thread of CPU time, so
// that other programs disturb it little, on several (--threads) of real time. Rounds take turns; the fastest
// one of each format counts. off: relative difference of outputs from those of bf16. Where CMake finds ggml,
// or ik_llama.cpp (docs/lab/cpu.md), its flash attention runs on the same latents.
//
//   scripts/bench latent --tokens 131072 --heads 16 --rounds 3 --listed 2048
//     also over so many tokens that are chosen at random for each query (kvq::listed_tokens), and what an
//     index of int8 and of e4m3 takes to select them
//   scripts/bench latent --errors
//     what formats of the rotary channels add to the error of 4-bit latents, against attention in double over
//     exact ones
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <deque>
#include <kvq/attention/reference.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/presets.hpp>
#include <random>
#include <string>
#include <vector>

#include "support.hpp"

#if defined(KVQ_BENCH_GGML)
#include "ggml_attention.hpp"
#endif

namespace {

constexpr int latent = 512, rotary = 64, channels = latent + rotary;

struct row {
    kvq::cache cache;
    kvq::sequence sequence;
    std::string name;
    double seconds = 1e30, listed_seconds = 1e30, off = 0.0;

    row(const kvq::format& keys, const kvq::format& window, const std::vector<float>& latents)
        : cache({kvq::latent_attention(latent, rotary)}, {.keys = keys, .window = window}),
          sequence(cache.new_sequence()),
          name(keys.name()) {
        const int tokens = static_cast<int>(latents.size()) / channels;
        sequence.append(0, kvq::token_view(latents.data(), tokens, 1, channels), kvq::no_rows());
    }
    /// Of a token.
    double bytes() const {
        const int format = cache.target_format(kvq::tensor::key, 0);
        return static_cast<double>(cache.page_bytes(kvq::tensor::key, 0, format, kvq::default_page_tokens)) /
               kvq::default_page_tokens;
    }
};

/// Latents of N(0, 1). Of the 32 pairs of rotary channels four have a mean of size `range`, turned by their
/// positions; all have noise of N(0, 1), and of a tenth of the mean.
std::vector<float> turned_latents(int tokens, double range) {
    std::vector<float> all = bench::random_floats(static_cast<std::size_t>(tokens) * channels, 5);
    const std::vector<float> noise = bench::random_floats(static_cast<std::size_t>(tokens) * rotary, 6);
    for (int t = 0; t < tokens; ++t)
        for (int pair = 0; pair < rotary / 2; ++pair) {
            float* const x = &all[static_cast<std::size_t>(t * channels + latent + 2 * pair)];
            const float* const n = &noise[static_cast<std::size_t>(t * rotary + 2 * pair)];
            const double size = pair % 8 == 4 ? range : 0.0, turn = std::pow(1e4, -2.0 * pair / rotary) * t,
                         a = size * std::cos(pair) * (1 + 0.1 * n[0]) + x[0],
                         b = size * std::sin(pair) * (1 + 0.1 * n[1]) + x[1];
            x[0] = static_cast<float>(a * std::cos(turn) - b * std::sin(turn));
            x[1] = static_cast<float>(a * std::sin(turn) + b * std::cos(turn));
        }
    return all;
}

void print_errors(int tokens) {
    constexpr int heads = 16;
    const kvq::score_scale scale{1.0f / std::sqrt(192.0f)};
    const kvq::format std4 = kvq::make_format<kvq::std4::keys>(),
                      kivi = kvq::make_format<kvq::kivi<4, 64>::keys>(), int8 = kvq::make_format<kvq::int8>(),
                      ref8 = kvq::make_format<kvq::ref8::keys>(),
                      fp16 = kvq::make_format<kvq::full<kvq::float16>>();
    std::vector<float> q = bench::random_floats(std::size_t{heads} * channels, 2);
    for (std::size_t i = 0; i < q.size(); ++i)
        if (i % channels < latent) q[i] *= 0.6f;
    const kvq::token_view<const float> queries(q.data(), 1, heads, channels);
    std::printf("%-44s %12s", "error of outputs, range of rotary channels", "bytes/token");
    constexpr double ranges[] = {1, 10, 100, 1000};
    for (const double range : ranges) std::printf(" %8.0f", range);
    std::printf("\n");
    struct exact {
        std::vector<float> keys;
        std::vector<double> out;
    };
    std::vector<exact> all;
    for (const double range : ranges) {
        exact& e =
            all.emplace_back(exact{turned_latents(tokens, range), std::vector<double>(heads * latent)});
        std::vector<float> values;
        for (std::size_t t = 0; t < e.keys.size(); t += channels)
            values.insert(values.end(), &e.keys[t], &e.keys[t] + latent);
        kvq::reference_attend(kvq::token_view<const float>(e.keys.data(), tokens, 1, channels),
                              kvq::token_view<const float>(values.data(), tokens, 1, latent), queries,
                              kvq::token_view<double>(e.out.data(), 1, heads, latent), scale);
    }
    for (const kvq::format& first : {std4, kivi, int8})
        for (const kvq::format& last : {fp16, ref8, int8}) {
            const kvq::format keys = kvq::with_last_channels(first, last, rotary);
            std::string line;
            double bytes = 0;
            for (const exact& e : all) {
                const row r(keys, fp16, e.keys);
                std::vector<float> out(heads * latent);
                r.sequence.attend(0, queries, kvq::token_view(out.data(), 1, heads, latent), scale);
                double off = 0, size = 0;
                for (std::size_t i = 0; i < out.size(); ++i) {
                    off += std::pow(static_cast<double>(out[i]) - e.out[i], 2);
                    size += e.out[i] * e.out[i];
                }
                char text[16];
                std::snprintf(text, sizeof text, " %8.2g", std::sqrt(off / size));
                line += text;
                bytes = r.bytes();
            }
            std::printf("%-44s %12.1f%s\n", keys.name(), bytes, line.c_str());
        }
}

double difference(const std::vector<float>& x, const std::vector<float>& y) {
    double off = 0.0, size = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) {
        off += std::pow(static_cast<double>(x[i]) - static_cast<double>(y[i]), 2);
        size += std::pow(static_cast<double>(y[i]), 2);
    }
    return std::sqrt(off / size);
}

double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }
double real_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

int main(int argc, char** argv) {
    int tokens = 8192, heads = 128, query_tokens = 1, rounds = 15, listed = 0, threads = 1;
    CLI::App app("latent attention");
    app.add_option("--tokens", tokens);
    app.add_option("--heads", heads);
    app.add_option("--query-tokens", query_tokens);
    app.add_option("--rounds", rounds);
    app.add_option("--listed", listed, "tokens of a list for each query; 0: no lists");
    bool errors = false;
    app.add_flag("--errors", errors, "errors of formats of the rotary channels");
    app.add_option("--threads", threads)->check(CLI::Range(1, 1024));
    std::vector<std::string> only;
    app.add_option("--keys", only, "besides bf16 only keys whose names contain one of these")->delimiter(',');
    CLI11_PARSE(app, argc, argv);
    if (errors) {
        print_errors(tokens);
        return 0;
    }
    const kvq::thread_pool pool(threads);
    const auto seconds = [&] { return threads == 1 ? cpu_seconds() : real_seconds(); };

    const auto queries = static_cast<std::size_t>(heads) * static_cast<std::size_t>(query_tokens);
    const auto latents = bench::random_floats(static_cast<std::size_t>(tokens) * channels, 1),
               q = bench::random_floats(queries * channels, 2);
    std::vector<float> out(queries * latent);
    const kvq::format bf16 = kvq::make_format<kvq::full<kvq::bfloat16>>(),
                      fp16 = kvq::make_format<kvq::full<kvq::float16>>();
    const auto wanted = [&](const std::string& name) {
        return only.empty() || std::any_of(only.begin(), only.end(), [&](const std::string& part) {
                   return name.find(part) != std::string::npos;
               });
    };
    std::deque<row> rows;
    const auto add = [&](const kvq::format& keys, const kvq::format& window, const char* words = "") {
        const std::string name = std::string(keys.name()) + words;
        if (rows.empty() || wanted(name)) rows.emplace_back(keys, window, latents).name = name;
    };
    add(bf16, bf16);
    add(fp16, fp16);
    using four_bits = kvq::affine<4, kvq::per_channel<128>>;
    for (const kvq::format& f : {kvq::make_format<kvq::int8>(), kvq::make_format<four_bits>(),
                                 kvq::make_format<kvq::std4::keys>(), kvq::make_format<kvq::std4_h::keys>()})
        add(kvq::with_fp16_channels(f, rotary), fp16);
    add(kvq::with_last_channels(kvq::make_format<kvq::std4::keys>(), kvq::make_format<kvq::ref8::keys>(),
                                rotary),
        fp16);
    // Queries and weights of one byte; of bfloat16, where the CPU multiplies tiles of it.
    using short_queries = kvq::simd<kvq::arch::best, kvq::query_bytes<1>>;
    const kvq::format bf16_short = kvq::make_format<kvq::full<kvq::bfloat16>, short_queries>();
    add(bf16_short, bf16_short, "/1");
    add(kvq::with_fp16_channels(kvq::make_format<four_bits, short_queries>(), rotary),
        kvq::make_format<kvq::full<kvq::float16>, short_queries>(), "/1");
#if defined(KVQ_BENCH_GGML)
    struct peer {
        std::string name;
        bench::ggml_attention attention;
        double seconds = 1e30;
    };
    std::deque<peer> peers;
    for (const auto& [name, type] :
         {std::pair(PEER " f16", GGML_TYPE_F16), std::pair(PEER " bf16", GGML_TYPE_BF16),
          std::pair(PEER " q8_0", GGML_TYPE_Q8_0), std::pair(PEER " q4_0", GGML_TYPE_Q4_0)}) {
        if (!wanted(name)) continue;
        auto k = latents, none = std::vector<float>();
        peers.push_back(
            {name,
             {bench::ggml_path::latents, type, query_tokens, heads, 1, channels, tokens, threads, latent}});
        peers.back().attention.fill(q, k, none);
    }
#endif
    for (const std::string& part : only) {
        const auto has = [&](const auto& r) { return r.name.find(part) != std::string::npos; };
        bool found = std::any_of(rows.begin(), rows.end(), has);
#if defined(KVQ_BENCH_GGML)
        found = found || std::any_of(peers.begin(), peers.end(), has);
#endif
        if (!found) {
            std::fprintf(stderr, "bench_latent: no keys have \"%s\" in their name\n", part.c_str());
            return 2;
        }
    }
    std::mt19937 random(3);
    std::vector<std::int32_t> list;
    for (int i = 0; i < listed * query_tokens; ++i)
        list.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(tokens)));
    const kvq::listed_tokens given{.selected = {list.data(), listed}, .queries = query_tokens};
    const auto attend = [&](const row& r, const kvq::mods_view& mods, double& fastest) {
        static kvq::workspace space;
        const double start = seconds();
        r.sequence.attend(0, kvq::token_view(q.data(), query_tokens, heads, channels),
                          kvq::token_view(out.data(), query_tokens, heads, latent), mods, pool, space);
        fastest = std::min(fastest, seconds() - start);
    };
    std::vector<float> exact;
    for (int round = 0; round < rounds; ++round) {
        for (row& r : rows) {
            attend(r, kvq::causal{}, r.seconds);
            if (exact.empty()) exact = out;
            if (round == 0) r.off = difference(out, exact);
            if (listed > 0) attend(r, given, r.listed_seconds);
        }
#if defined(KVQ_BENCH_GGML)
        for (peer& p : peers) {
            const double start = seconds();
            p.attention.run();
            p.seconds = std::min(p.seconds, seconds() - start);
        }
#endif
    }
    std::printf("%d tokens, %d heads, %d query tokens, %d threads\n%-44s %12s %10s %8s %8s %8s\n", tokens,
                heads, query_tokens, threads, "keys", "bytes/token", "ms", "GMAC/s", "x bf16", "off");
    const auto print = [&](const std::string& name, double bytes, double time, double off) {
        std::printf("%-44s %12.1f %10.2f %8.1f %8.2f %8.2g\n", name.c_str(), bytes, 1e3 * time,
                    1e-9 * tokens * static_cast<double>(queries) * (channels + latent) / time,
                    rows[0].seconds / time, off);
    };
    for (const row& r : rows) print(r.name, r.bytes(), r.seconds, r.off);
#if defined(KVQ_BENCH_GGML)
    for (const peer& p : peers)
        print(p.name, static_cast<double>(p.attention.cache_bytes()) / tokens, p.seconds,
              difference(p.attention.output(), exact));
#endif
    if (listed == 0) return 0;
    std::printf("\n%-44s %12s %10s\n", ("lists of " + std::to_string(listed)).c_str(), "ms", "x dense");
    for (const row& r : rows)
        std::printf("%-44s %12.2f %10.1f\n", r.name.c_str(), 1e3 * r.listed_seconds,
                    r.seconds / r.listed_seconds);

    constexpr int index_heads = 64, index_channels = 128;
    const auto k = bench::random_floats(static_cast<std::size_t>(tokens) * index_channels, 4);
    const std::vector<float> weights(static_cast<std::size_t>(query_tokens) * index_heads, 0.1f);
    const auto index_q = bench::random_floats(weights.size() * index_channels, 5);
    for (const char* const name : {"int8", "e4m3"}) {
        kvq::cache index(
            {kvq::index_layer(index_channels)},
            {.keys = name == std::string("int8") ? kvq::make_format<kvq::int8>()
                                                 : kvq::make_format<kvq::float_rows<kvq::e4m3>>()});
        kvq::sequence keys = index.new_sequence();
        keys.append(0, kvq::token_view(k.data(), tokens, 1, index_channels), kvq::no_rows());
        double fastest = 1e30;
        kvq::workspace space;
        for (int round = 0; round < rounds; ++round) {
            const double start = seconds();
            keys.select(0, kvq::token_view(index_q.data(), query_tokens, index_heads, index_channels),
                        weights.data(), listed, list.data(), pool, space);
            fastest = std::min(fastest, seconds() - start);
        }
        std::printf("index of %s, 64 x %d: select %-19s %12.2f\n", name, index_channels, "", 1e3 * fastest);
    }
    return 0;
}
