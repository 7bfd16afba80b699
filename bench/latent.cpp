// Latent attention (MLA): formats against 16-bit latents, 512 + 64 channels, one thread: scripts/bench
// latent.
//
// GMAC/s: multiply-adds of both products (tokens x rows x 1088) per second of CPU time, so that other
// programs disturb it little. Rounds take turns; the fastest one of each format counts.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <deque>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/presets.hpp>
#include <string>
#include <vector>

#include "support.hpp"

namespace {

constexpr int latent = 512, rotary = 64, channels = latent + rotary;

struct row {
    kvq::cache cache;
    kvq::sequence sequence;
    std::string name;
    double seconds = 1e30;

    row(const kvq::format& keys, const kvq::format& window, const std::vector<float>& latents)
        : cache({kvq::latent_attention(latent, rotary)}, {.keys = keys, .window = window}),
          sequence(cache.new_sequence()),
          name(keys.name()) {
        const int tokens = static_cast<int>(latents.size()) / channels;
        sequence.append(0, kvq::token_view(latents.data(), tokens, 1, channels), kvq::no_rows());
    }
};

double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

}  // namespace

int main(int argc, char** argv) {
    int tokens = 8192, heads = 128, query_tokens = 1, rounds = 15;
    CLI::App app("latent attention on one thread");
    app.add_option("--tokens", tokens);
    app.add_option("--heads", heads);
    app.add_option("--query-tokens", query_tokens);
    app.add_option("--rounds", rounds);
    CLI11_PARSE(app, argc, argv);

    const auto queries = static_cast<std::size_t>(heads) * static_cast<std::size_t>(query_tokens);
    const auto latents = bench::random_floats(static_cast<std::size_t>(tokens) * channels, 1),
               q = bench::random_floats(queries * channels, 2);
    std::vector<float> out(queries * latent);
    const kvq::format bf16 = kvq::make_format<kvq::full<kvq::bfloat16>>(),
                      fp16 = kvq::make_format<kvq::full<kvq::float16>>();
    std::deque<row> rows;
    rows.emplace_back(bf16, bf16, latents);
    rows.emplace_back(fp16, fp16, latents);
    for (const kvq::format& f :
         {kvq::make_format<kvq::int8>(), kvq::make_format<kvq::affine<4, kvq::per_channel<128>>>(),
          kvq::make_format<kvq::std4::keys>(), kvq::make_format<kvq::std4_h::keys>()})
        rows.emplace_back(kvq::with_fp16_channels(f, rotary), fp16, latents);
    kvq::workspace space;
    for (int round = 0; round < rounds; ++round)
        for (row& r : rows) {
            const double start = cpu_seconds();
            r.sequence.attend(0, kvq::token_view(q.data(), query_tokens, heads, channels),
                              kvq::token_view(out.data(), query_tokens, heads, latent), kvq::causal{},
                              kvq::serial_executor{}, space);
            r.seconds = std::min(r.seconds, cpu_seconds() - start);
        }
    std::printf("%d tokens, %d heads, %d query tokens\n%-44s %12s %10s %8s %8s\n", tokens, heads,
                query_tokens, "keys", "bytes/token", "ms", "GMAC/s", "x bf16");
    for (const row& r : rows)
        std::printf(
            "%-44s %12.1f %10.2f %8.1f %8.2f\n", r.name.c_str(),
            static_cast<double>(r.cache.page_bytes(
                kvq::tensor::key, 0, r.cache.target_format(kvq::tensor::key, 0), kvq::default_page_tokens)) /
                kvq::default_page_tokens,
            1e3 * r.seconds, 1e-9 * tokens * static_cast<double>(queries) * (channels + latent) / r.seconds,
            rows[0].seconds / r.seconds);
    return 0;
}
