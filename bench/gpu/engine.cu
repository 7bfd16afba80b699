// The engine of examples/llama with random weights of a real shape: what a format of the cache is worth to
// the whole.
//
//   engine [--json] [--quick] [--random llama-3-8b] [--baseline FILE] [--only NAME]... [--formats a,b,...]
//
// bf16 weights and activations; 4 sinks and 128 recent tokens in 16 bit, pages of 64; greedy decode steps by
// CUDA graphs, whose tokens stay on the device. One sequence is a prompt of random tokens that was really
// read (time to first token); the others take keys and values that the model made for it, from other places
// on. Contexts grow by 48 tokens to the shape's.
//   decode   64 x 8192, 16 x 32768 and 16 x 2048. Of layers as many as fit beside the 16-bit cache
//   memory   as many sequences of 8192 tokens as have pages of 40 GB, all layers
//   fits     tokens that fit into 80 % of an 80 GB card beside weights and activations, by context
// Ratios are to 16 bit. FILE: torch_engine.py's lines "batch context layers ms" for llama-3-8b; its layers
// are taken, so that rows compare.
#include "../../examples/llama/cuda/engine.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "timing.cuh"

namespace {

using namespace llama;

constexpr int page_tokens = 64, grown = 48, chunk = 2048, piece = 4096, shifts = 64;
constexpr double gb = 1e9;

struct bench_options {
    bool json = false, quick = false;
    std::string shape = "llama-3-8b", baseline;
    std::vector<std::string> only, formats = {"bf16", "int8", "kivi-4-g64", "std4", "low2"};
};

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
std::size_t free_bytes() {
    std::size_t free = 0, total = 0;
    BENCH_OK(cudaMemGetInfo(&free, &total));
    return free;
}

struct measured {
    std::string name;
    int batch = 0;
    double step_ms = 0.0, tokens_per_second = 0.0, first_token_ms = 0.0;
    std::size_t cache_bytes = 0, page_bytes = 0, peak_bytes = 0;
};

device::engine_options options_for(const std::string& format, int batch, int context) {
    device::engine_options o;
    o.format = format;
    o.page_tokens = page_tokens;
    o.max_batch = batch;
    o.max_tokens = context;
    o.chunk = chunk;
    return o;
}

/// Random weights: their bytes, and those of a layer.
std::size_t layer_weights(const model_shape& s) {
    const std::size_t heads = static_cast<std::size_t>(2 * s.query_dim() + 2 * s.kv_dim()),
                      hidden = static_cast<std::size_t>(3 * s.hidden_dim);
    return 2 * static_cast<std::size_t>(s.dim) * (heads + hidden);
}

measured run(const std::shared_ptr<const device::device_model>& model, const std::string& format, int batch,
             int context) {
    const std::size_t before = free_bytes();
    device::engine_options options = options_for(format, batch, context);
    options.pool_tokens =
        batch * ((context - options.sinks - options.recent) / options.page_tokens * options.page_tokens);
    options.pool_sequences = batch;
    options.growing = false;
    const auto on = device::make_engine(model, options);
    std::mt19937 random(7);
    const auto draw = [&](int n) {
        std::vector<int> tokens;
        for (int i = 0; i < n; ++i)
            tokens.push_back(static_cast<int>(random() % static_cast<unsigned>(model->config.shape.vocab)));
        return tokens;
    };
    std::vector<int> sequences{on->new_sequence()}, next(1);
    on->read(sequences[0], draw(std::min(context, chunk + 1)));  // loads kernels
    on->free(sequences[0]);
    const int length = context - grown;
    on->record(std::min(length, piece + shifts));
    sequences[0] = on->new_sequence();
    const std::vector<int> prompt = draw(length);
    on->wait();
    measured m{format, batch};
    double start = now();
    on->read(sequences[0], prompt);
    on->choices(next);
    m.first_token_ms = 1e3 * (now() - start);
    while (static_cast<int>(sequences.size()) < batch) {
        const int s = on->new_sequence(), most = std::min(length, piece);
        for (int have = 0; have < length; have += std::min(most, length - have))
            on->append_recorded(s, length > most ? static_cast<int>(random() % shifts) : 0,
                                std::min(most, length - have));
        sequences.push_back(s);
    }
    on->decode(sequences, draw(batch));
    constexpr int warm = 3;
    for (int i = 1; i < warm; ++i) on->decode(sequences, {});
    on->wait();
    start = now();
    const int steps = grown - warm;
    for (int i = 0; i < steps; ++i) on->decode(sequences, {});
    on->wait();
    m.step_ms = 1e3 * (now() - start) / steps;
    m.tokens_per_second = 1e3 * batch / m.step_ms;
    const device::engine_usage usage = on->usage();
    m.cache_bytes = usage.cache_bytes;
    m.page_bytes = usage.cache_pages;
    m.peak_bytes = before - free_bytes() + model->bytes;
    return m;
}

void print(const bench_options& b, const char* what, int context, int layers, const measured& m,
           const measured& plain, double torch_ms) {
    const double ratio = m.tokens_per_second / plain.tokens_per_second;
    if (b.json)
        std::printf(
            "{\"bench\": \"engine\", \"case\": \"%s\", \"model\": \"%s\", \"layers\": %d, \"format\": "
            "\"%s\", \"batch\": %d, "
            "\"context\": %d, \"tokens_per_second\": %.1f, \"ms_per_step\": %.3f, \"first_token_ms\": %.1f, "
            "\"cache_bytes\": "
            "%zu, \"page_bytes\": %zu, \"peak_bytes\": %zu, \"vs_16_bit\": %.3f, \"torch_ms\": %.3f, "
            "\"vs_torch\": %.3f}\n",
            what, b.shape.c_str(), layers, m.name.c_str(), m.batch, context, m.tokens_per_second, m.step_ms,
            m.first_token_ms, m.cache_bytes, m.page_bytes, m.peak_bytes, ratio, torch_ms,
            torch_ms / m.step_ms);
    else
        std::printf(
            "%-7s %2d layers %-10s %4d x %5d: %8.1f tokens/s, %7.2f ms a step (%.2f x 16 bit%s), first token "
            "%7.1f ms, "
            "cache %5.1f GB, peak %5.1f GB\n",
            what, layers, m.name.c_str(), m.batch, context, m.tokens_per_second, m.step_ms, ratio,
            torch_ms > 0.0 ? (", " + std::to_string(torch_ms / m.step_ms).substr(0, 4) + " x torch").c_str()
                           : "",
            m.first_token_ms, static_cast<double>(m.cache_bytes) / gb,
            static_cast<double>(m.peak_bytes) / gb);
    std::fflush(stdout);
}

bool wanted(const bench_options& b, const char* name) {
    return b.only.empty() || std::find(b.only.begin(), b.only.end(), name) != b.only.end();
}

}  // namespace

int main(int argc, char** argv) {
    bench_options b;
    for (int i = 1; i < argc; ++i) {
        const auto value = [&](const char* name) { return std::strcmp(argv[i], name) == 0 && i + 1 < argc; };
        if (std::strcmp(argv[i], "--json") == 0) b.json = true;
        if (std::strcmp(argv[i], "--quick") == 0) b.quick = true;
        if (value("--random")) b.shape = argv[i + 1];
        if (value("--baseline")) b.baseline = argv[i + 1];
        if (value("--only")) b.only.push_back(argv[i + 1]);
        if (value("--formats")) {
            b.formats.clear();
            for (std::string rest = std::string(argv[i + 1]) + ","; !rest.empty();
                 rest.erase(0, rest.find(',') + 1))
                b.formats.push_back(rest.substr(0, rest.find(',')));
        }
    }
    std::map<std::pair<int, int>, std::pair<int, double>> torch;  // by batch and context: layers, ms
    {
        std::ifstream file(b.shape == "llama-3-8b" ? b.baseline : std::string());
        int batch = 0, context = 0, layers = 0;
        double ms = 0.0;
        while (file >> batch >> context >> layers >> ms) torch[{batch, context}] = {layers, ms};
    }
    try {
        const weights_source whole = random_source(b.shape, 0, 32768);
        const model_shape& s = whole.config.shape;
        const std::size_t row = 4 * static_cast<std::size_t>(s.kv_dim());  // bytes of a token and layer
        std::shared_ptr<const device::device_model> model;
        const auto model_of = [&](int layers) {
            if (model && model->config.shape.layers == layers) return model;
            model.reset();
            model = device::upload(random_source(b.shape, layers, 32768), device::precision::bf16);
            return model;
        };
        if (wanted(b, "decode"))
            for (const auto& [batch, context] :
                 {std::pair{64, 8192}, std::pair{16, 32768}, std::pair{16, 2048}}) {
                if (b.quick && batch * context > 64 * 8192 / 4) continue;
                model.reset();
                const auto found = torch.find({batch, context});
                const std::size_t of_layer = layer_weights(s) +
                                             row * static_cast<std::size_t>(batch * context + piece + shifts),
                                  others = 4 * static_cast<std::size_t>(s.vocab) *
                                               static_cast<std::size_t>(s.dim) +
                                           (std::size_t{3} << 30);
                const int fit = static_cast<int>((free_bytes() - others) / of_layer),
                          layers = std::min(
                              {s.layers, fit, found == torch.end() ? s.layers : found->second.first});
                measured plain;
                for (const std::string& format : b.formats) {
                    const measured m = run(model_of(layers), format, batch, context);
                    if (format == b.formats.front()) plain = m;
                    print(b, "decode", context, layers, m, plain,
                          found == torch.end() || found->second.first != layers ? 0.0 : found->second.second);
                }
            }
        std::map<std::string, double> bytes_of[3];
        constexpr int contexts[] = {2048, 8192, 32768};
        if (wanted(b, "memory") || wanted(b, "fits")) {
            for (const std::string& format : b.formats)
                for (int i = 0; i < 3; ++i)
                    bytes_of[i][format] = static_cast<double>(
                        device::make_engine(model_of(s.layers), options_for(format, 1, contexts[i]))
                            ->bytes_for(contexts[i]));
        }
        if (wanted(b, "memory") && !b.quick) {
            measured plain;
            for (const std::string& format : b.formats) {
                const int batch = static_cast<int>(40.0 * gb / bytes_of[1][format]);
                const measured m = run(model_of(s.layers), format, batch, 8192);
                if (format == b.formats.front()) plain = m;
                print(b, "memory", 8192, s.layers, m, plain, 0.0);
            }
        }
        if (wanted(b, "fits"))
            for (int i = 0; i < 3; ++i)
                for (const std::string& format : b.formats) {
                    const auto on =
                        device::make_engine(model_of(s.layers), options_for(format, 64, contexts[i]));
                    const double others = static_cast<double>(model->bytes + on->usage().activation_bytes),
                                 room = 0.8 * 80.0 * gb - others,
                                 tokens = room / bytes_of[i][format] * contexts[i],
                                 ratio = bytes_of[i][b.formats.front()] / bytes_of[i][format];
                    if (b.json)
                        std::printf(
                            "{\"bench\": \"engine\", \"case\": \"fits\", \"model\": \"%s\", \"format\": "
                            "\"%s\", "
                            "\"context\": %d, \"bytes_per_token\": %.1f, \"tokens\": %.0f, \"vs_16_bit\": "
                            "%.3f}\n",
                            b.shape.c_str(), format.c_str(), contexts[i], bytes_of[i][format] / contexts[i],
                            tokens, ratio);
                    else
                        std::printf(
                            "fits    %-10s contexts of %5d: %8.0f tokens, %7.0f bytes a token, %.2f x 16 "
                            "bit\n",
                            format.c_str(), contexts[i], tokens, bytes_of[i][format] / contexts[i], ratio);
                }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "engine: %s\n", error.what());
        return 1;
    }
    return 0;
}
