// What a cache of each scheme holds, loses and costs: memory, error, time to store a prompt and to read it
// back; and what appending one token costs next to attending with it.
//
// memory     bytes of the pages of all layers; savings against 16-bit values
// error      of the values that come back against those that went in: mean and largest absolute difference,
//            normal data
// quantize   append of the whole prompt, 16-bit input, all layers; dequantize: dequantize of it to 16-bit
//            tensors
// append     one token in all layers, averaged over a page (so that quantizing a page is in it), and its
//            share of the time of decode attention over --attend-tokens tokens (query heads: four times the
//            kv heads)
// prefill    a chunk of --seq-len tokens with its queries over --attend-tokens tokens, one layer, one thread;
//            and how long append followed by attend of the same takes beside it, in turns
#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <nlohmann/json.hpp>

#include "support.hpp"

namespace {

struct settings {
    int layers = 32, tokens = 512, heads = 8, head_dim = 128, group = 64, attend_tokens = 4096, rounds = 5;
    bool json = false;
};

struct row {
    std::string mode;
    double memory = 0, mean_error = 0, max_error = 0, quantize_ms = 0, dequantize_ms = 0, append_us = 0,
           append_share = 0, prefill_ms = 0, append_attend_ms = 0;
};

double ms_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}
double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

row measure(const char* mode, const kvq::format_pair& formats, const settings& s) {
    using kvq::tensor;
    row r{mode};
    const kvq::cache_options options{.keys = formats.keys, .values = formats.values, .page_tokens = 128};
    kvq::cache cache({s.layers, s.heads, s.head_dim}, options);
    const auto n = static_cast<std::size_t>(s.tokens * s.heads * s.head_dim);
    std::vector<kvq::float16> input(n), output(n);
    const auto x = bench::random_floats(n, 3);
    for (std::size_t i = 0; i < n; ++i) input[i] = kvq::float16(x[i]);
    const kvq::token_view<kvq::float16> in(input.data(), s.tokens, s.heads, s.head_dim),
        out(output.data(), s.tokens, s.heads, s.head_dim);

    std::vector<double> quantize, dequantize;
    for (int round = 0; round < s.rounds; ++round) {
        auto sequence = cache.new_sequence();
        auto start = std::chrono::steady_clock::now();
        for (int layer = 0; layer < s.layers; ++layer) sequence.append(layer, in, in);
        quantize.push_back(ms_since(start));
        start = std::chrono::steady_clock::now();
        for (int layer = 0; layer < s.layers; ++layer)
            for (const tensor role : {tensor::key, tensor::value}) sequence.dequantize(layer, role, 0, out);
        dequantize.push_back(ms_since(start));
        if (round > 0) continue;
        const kvq::usage_report u = sequence.usage();
        r.memory = static_cast<double>(u.quantized + u.window - u.slack);
        for (const tensor role : {tensor::key, tensor::value}) {
            sequence.dequantize(0, role, 0, out);
            for (std::size_t i = 0; i < n; ++i) {
                const double e = std::fabs(static_cast<double>(static_cast<float>(output[i])) -
                                           static_cast<double>(static_cast<float>(input[i])));
                r.mean_error += 0.5 * e / static_cast<double>(n);
                r.max_error = std::max(r.max_error, e);
            }
        }
    }
    r.quantize_ms = median(quantize);
    r.dequantize_ms = median(dequantize);

    // One layer with the long context; the other layers of a model do the same again.
    kvq::cache one({1, s.heads, s.head_dim}, options);
    auto sequence = one.new_sequence();
    for (int done = 0; done < s.attend_tokens; done += s.tokens) {
        const int some = std::min(s.tokens, s.attend_tokens - done);
        sequence.append(0, in.slice(0, some), in.slice(0, some));
    }
    const int q_heads = 4 * s.heads;
    {
        const auto chunk_q =
            bench::random_floats(static_cast<std::size_t>(s.tokens * q_heads * s.head_dim), 8);
        std::vector<float> chunk_out(chunk_q.size());
        const kvq::token_view<const float> queries(chunk_q.data(), s.tokens, q_heads, s.head_dim);
        const kvq::token_view<float> outputs(chunk_out.data(), s.tokens, q_heads, s.head_dim);
        kvq::workspace space;
        std::vector<double> together, apart;
        for (int round = 0; round < s.rounds; ++round) {
            auto chunked = sequence.fork(), plain = sequence.fork();
            auto start = std::chrono::steady_clock::now();
            chunked.prefill(0, in, in, queries, outputs, kvq::causal{}, kvq::serial_executor{}, space);
            together.push_back(ms_since(start));
            start = std::chrono::steady_clock::now();
            plain.append(0, in, in);
            plain.attend(0, queries, outputs, kvq::causal{}, kvq::serial_executor{}, space);
            apart.push_back(ms_since(start));
        }
        r.prefill_ms = median(together);
        r.append_attend_ms = median(apart);
    }
    std::vector<double> page;
    for (int round = 0; round < s.rounds; ++round) {
        const auto start = std::chrono::steady_clock::now();
        for (int t = 0; t < options.page_tokens; ++t) {
            const auto token = in.slice(t % s.tokens, 1);
            sequence.append(0, token, token);
        }
        page.push_back(ms_since(start) / options.page_tokens);
    }
    const auto q = bench::random_floats(static_cast<std::size_t>(q_heads * s.head_dim), 9);
    std::vector<float> y(q.size());
    kvq::workspace space;
    const double attend_ns = bench::median_ns(
        [&] {
            sequence.attend(0, kvq::token_view<const float>(q.data(), 1, q_heads, s.head_dim),
                            kvq::token_view<float>(y.data(), 1, q_heads, s.head_dim), kvq::causal{},
                            kvq::serial_executor{}, space);
            benchmark::DoNotOptimize(y.data());
        },
        1, 0.02);
    const double append_ns = median(page) * 1e6;
    r.append_us = append_ns * s.layers * 1e-3;
    r.append_share = append_ns / attend_ns;
    return r;
}

template <int Group>
std::vector<row> measure_all(const settings& s) {
    return {measure("fp16", kvq::make_formats<kvq::full<kvq::float16>>(), s),
            measure("int8", kvq::make_formats<kvq::int8>(), s),
            measure("8-bit", kvq::make_formats<kvq::affine<8, kvq::per_token<Group>>>(), s),
            measure("4-bit", kvq::make_formats<kvq::affine<4, kvq::per_token<Group>>>(), s),
            measure("kivi-4", kvq::make_formats<kvq::kivi<4, Group>>(), s),
            measure("kivi-2", kvq::make_formats<kvq::kivi<2, Group>>(), s),
            measure("std4", kvq::make_formats<kvq::std4>(), s)};
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app("Memory, error and cost of storing a prompt");
    settings s;
    app.add_option("--layers", s.layers);
    app.add_option("--seq-len", s.tokens);
    app.add_option("--heads", s.heads, "kv heads");
    app.add_option("--head-dim", s.head_dim);
    app.add_option("--group-size", s.group)->check(CLI::IsMember({32, 64, 128}));
    app.add_option("--attend-tokens", s.attend_tokens,
                   "context of the attention that an append is compared with");
    app.add_flag("--json", s.json, "one JSON object a line");
    CLI11_PARSE(app, argc, argv);

    const auto rows = s.group == 32   ? measure_all<32>(s)
                      : s.group == 64 ? measure_all<64>(s)
                                      : measure_all<128>(s);
    if (!s.json)
        std::printf(
            "%d layers, %d tokens, %d kv heads, head_dim %d, groups of %d\n"
            "%-8s %12s %8s %11s %10s %12s %14s %11s %9s %11s %16s\n",
            s.layers, s.tokens, s.heads, s.head_dim, s.group, "mode", "memory (MB)", "savings", "mean error",
            "max error", "quantize ms", "dequantize ms", "append us", "of attend", "prefill ms",
            "append, attend ms");
    const row* best = nullptr;
    for (const row& r : rows) {
        const double savings = 1.0 - r.memory / rows[0].memory;
        if (s.json) {
            const nlohmann::json line{{"mode", r.mode},
                                      {"memory", r.memory},
                                      {"savings", savings},
                                      {"mean_error", r.mean_error},
                                      {"max_error", r.max_error},
                                      {"quantize_ms", r.quantize_ms},
                                      {"dequantize_ms", r.dequantize_ms},
                                      {"append_us", r.append_us},
                                      {"append_share", r.append_share},
                                      {"prefill_ms", r.prefill_ms},
                                      {"append_attend_ms", r.append_attend_ms},
                                      {"layers", s.layers},
                                      {"tokens", s.tokens},
                                      {"heads", s.heads},
                                      {"head_dim", s.head_dim},
                                      {"group", s.group}};
            std::printf("%s\n", line.dump().c_str());
        } else {
            std::printf("%-8s %12.2f %7.1f%% %11.5f %10.4f %12.2f %14.2f %11.1f %8.2f%% %11.1f %16.1f\n",
                        r.mode.c_str(), r.memory / 1e6, 100.0 * savings, r.mean_error, r.max_error,
                        r.quantize_ms, r.dequantize_ms, r.append_us, 100.0 * r.append_share, r.prefill_ms,
                        r.append_attend_ms);
        }
        // Half a step of 4 bits on normal data is about 0.15: more than a tenth of the values' spread shows
        // in models.
        if (r.mean_error < 0.1 && (!best || r.memory < best->memory)) best = &r;
    }
    if (!s.json && best)
        std::printf(
            "recommended: %s, the smallest with a mean error below a tenth of the values' standard "
            "deviation\n",
            best->mode.c_str());
}
