// A decode step of one layer.
//
//   step [--json] [--quick] [--only NAME] [--heads Q/KV] [--baseline FILE]
//
// With -DPART=0 to 6: the rows of one format, or (4) those of formats alone. "-plan": widths by channel
// (key_plans.cuh). With -DHEAD_DIM=256 or 512: heads of a model that has such layers, without trees and
// kvq::cuda::cache.
// Real steps: sequences with 4 sinks and a recent window of 128 tokens in 16 bit, everything else quantized;
// `attend` that stores one token per sequence as well, a launch a layer, and `commit_due_pages` once per step
// of 32 layers, against `store` and `attend` of 16-bit pages of the same lengths. Times are those of a layer,
// the 32nd part of a commit included. "two": `store_new_tokens` and `attend`, two launches a layer.
//   equal    lengths are the largest not above those of the shape with a page half filled behind the window:
//            no page is due
//   ragged   lengths are up to half a page shorter or longer: in most steps some sequence has a page due.
//            Mean of 8 steps
//   window   attend with a sliding window of 512 tokens
//   trees    attend of 16 and 64 drafted tokens a sequence
//   cache    kvq::cuda::cache of 32 layers: attend of a layer that appends as well in a captured step, ragged
//            lengths, begin_step() before every replay included. Mean of 64 steps
// "early" is attention_options::early; ratios are those of such steps. Heads: 32 of queries over 8, 64 over
// 8, 32 over 32.
// FILE: times of torch_sdpa.py, which are for the shape's round number of tokens. Then (not with --quick)
// formats alone: `store` and `attend` of one format; "early": attention_options::early. Launches follow each
// other as in an engine that does nothing else. "attend": without the other launch. Every step has the cache
// of another layer; together they take 0.75 GB or more.
#include <kvq/cuda.cuh>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <tuple>

#include "key_plans.cuh"
#include "timing.cuh"

namespace {

using namespace kvq;

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
constexpr int dim = HEAD_DIM, page_tokens = 64;
constexpr bool wide = dim > 128;
int heads = 8, q_heads = 32;  // of the rows at hand

float16* random_numbers(std::size_t n) {
    float16* numbers = nullptr;
    BENCH_OK(cudaMalloc(&numbers, n * sizeof(float16)));
    bench::fill_normal(numbers, n * sizeof(float16), static_cast<std::uint32_t>(n));
    return numbers;
}

constexpr int sinks = 4, recent = 128;

struct shape {
    int batch, tokens;
};

/// Random pages of one format for `layers` layers, in random order.
template <class Format>
struct page_pool {
    int pages;
    std::size_t key_page = cuda::cache_ref<Format>::dense_key_page(heads),
                value_page = cuda::cache_ref<Format>::dense_value_page(heads);
    std::byte* memory = nullptr;
    int* table = nullptr;
    std::uint16_t* plans = nullptr;
    cuda::cache_ref<Format> first;  // of layer 0

    /// planned: keys of several widths have a plan.
    page_pool(int sequences, int columns, int layers, const int* tokens, int first_token,
              [[maybe_unused]] bool planned = false)
        : pages(sequences * columns) {
        const std::size_t bytes = layer_bytes() * static_cast<std::size_t>(layers);
        BENCH_OK(cudaMalloc(&memory, bytes));
        std::vector<int> order(static_cast<std::size_t>(pages));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(5));
        table = bench::on_device(order);
        first.kv_heads = heads;
        first.key_page_bytes = key_page;
        first.value_page_bytes = value_page;
        first.key_pages = memory;
        first.value_pages = memory + key_page * static_cast<std::size_t>(pages);
        first.block_table = table;
        first.tokens = tokens;
        first.sequences = sequences;
        first.table_columns = columns;
        first.first_token = first_token;
        if constexpr (cuda::detail::codec<typename Format::keys>.several_widths())
            if (planned) first.key_plans = plans = bench::key_plans<Format>(heads);
        if constexpr (full_precision<typename Format::keys> && full_precision<typename Format::values>)
            bench::fill_normal(memory, bytes, static_cast<std::uint32_t>(pages));
        else
            quantize(layers);
    }
    page_pool(const page_pool&) = delete;
    page_pool& operator=(const page_pool&) = delete;
    ~page_pool() {
        cudaFree(memory);
        cudaFree(table);
        cudaFree(plans);
    }
    std::size_t layer_bytes() const { return (key_page + value_page) * static_cast<std::size_t>(pages); }
    cuda::cache_ref<Format> of_layer(int layer) const {
        auto ref = first;
        ref.key_pages += static_cast<std::size_t>(layer) * layer_bytes();
        ref.value_pages += static_cast<std::size_t>(layer) * layer_bytes();
        ref.set_transform(tensor::key, layer);
        return ref;
    }

private:
    /// Pages are quantized from random 16-bit ones.
    void quantize(int layers) {
        using source_format =
            cuda::block_pair<full<float16>, full<float16>, Format::head_dim, Format::page_tokens>;
        constexpr int source_pages = 32;
        const page_pool<source_format> source(1, source_pages, 1, nullptr, 0);
        std::vector<int> from(static_cast<std::size_t>(pages)), to(from);
        for (int i = 0; i < pages; ++i) {
            from[static_cast<std::size_t>(i)] = i % source_pages;
            to[static_cast<std::size_t>(i)] = i;
        }
        int *const from_device = bench::on_device(from), *const to_device = bench::on_device(to);
        for (int layer = 0; layer < layers; ++layer)
            bench::check(cuda::requantize_pages(source.first, of_layer(layer), from_device, to_device, pages,
                                                nullptr, nullptr));
        BENCH_OK(cudaDeviceSynchronize());
        cudaFree(from_device);
        cudaFree(to_device);
    }
};

int layers_for(std::size_t bytes) {
    return static_cast<int>(std::max<std::size_t>(2, (std::size_t{3} << 28) / bytes + 1));
}

/// What steps have in common: queries, output, new tokens, lengths.
struct step_tensors {
    int batch;
    float16 *k, *v, *q, *out;
    int* lengths;

    step_tensors(int sequences, int tokens)
        : batch(sequences),
          k(random_numbers(static_cast<std::size_t>(sequences) * heads * dim)),
          v(random_numbers(static_cast<std::size_t>(sequences) * heads * dim)),
          q(random_numbers(static_cast<std::size_t>(sequences) * q_heads * dim)),
          out(random_numbers(static_cast<std::size_t>(sequences) * q_heads * dim)),
          lengths(bench::on_device(std::vector<int>(static_cast<std::size_t>(sequences), tokens))) {}
    step_tensors(const step_tensors&) = delete;
    step_tensors& operator=(const step_tensors&) = delete;
    ~step_tensors() {
        for (float16* p : {k, v, q, out}) cudaFree(p);
        cudaFree(lengths);
    }
    void set_lengths(const std::vector<int>& all) {
        BENCH_OK(cudaMemcpy(lengths, all.data(), all.size() * sizeof(int), cudaMemcpyHostToDevice));
    }
    token_view<const float16> keys() const { return {k, batch, heads, dim}; }
    token_view<const float16> values() const { return {v, batch, heads, dim}; }
    token_view<const float16> query() const { return {q, batch, q_heads, dim}; }
    token_view<float16> output() const { return {out, batch, q_heads, dim}; }
};

struct step_times {
    double step, early, two, attend, window, ragged, cache, draft16, draft64;
};
constexpr int model_layers = 32;

/// Lengths of sequences in steps of real batches: uniform between half a page less than `tokens` and half a
/// page more.
std::vector<int> ragged_lengths(int batch, int tokens, int page, int draw) {
    std::mt19937 random(static_cast<unsigned>(draw));
    std::vector<int> lengths;
    for (int b = 0; b < batch; ++b)
        lengths.push_back(tokens - page / 2 + static_cast<int>(random() % static_cast<unsigned>(page)));
    return lengths;
}
constexpr int ragged_draws = 8;

/// `store` and `attend` of 16-bit pages. page: what ragged lengths differ by.
step_times time_full_pages(const shape& s, int page) {
    using format = cuda::block_pair<full<float16>, full<float16>, dim, page_tokens>;
    const int columns = (s.tokens + page / 2 + page_tokens - 1) / page_tokens;
    const int layers = layers_for(
        static_cast<std::size_t>(s.batch * columns) *
        (cuda::cache_ref<format>::dense_key_page(heads) + cuda::cache_ref<format>::dense_value_page(heads)));
    step_tensors x(s.batch, s.tokens);
    const page_pool<format> pool(s.batch, columns, layers, x.lengths, 0);
    std::vector<int> table(static_cast<std::size_t>(pool.pages));
    BENCH_OK(cudaMemcpy(table.data(), pool.table, table.size() * sizeof(int), cudaMemcpyDeviceToHost));
    long long* const mapping = bench::on_device(std::vector<long long>(static_cast<std::size_t>(s.batch)));
    const auto set_lengths = [&](const std::vector<int>& lengths) {
        x.set_lengths(lengths);
        std::vector<long long> slots;
        for (int b = 0; b < s.batch; ++b) {
            const int last = lengths[static_cast<std::size_t>(b)] - 1;
            slots.push_back(
                static_cast<long long>(table[static_cast<std::size_t>(b * columns + last / page_tokens)]) *
                    page_tokens +
                last % page_tokens);
        }
        BENCH_OK(cudaMemcpy(mapping, slots.data(), slots.size() * sizeof(slots[0]), cudaMemcpyHostToDevice));
    };
    const std::size_t space = cuda::attend_workspace_bytes<format, float16>(q_heads / heads);
    std::byte* workspace = nullptr;
    BENCH_OK(cudaMalloc(&workspace, space));
    BENCH_OK(cudaMemset(workspace, 0, space));
    const auto time = [&](bool stores) {
        return bench::time_launches(std::max(16, layers), [&](int i, cudaStream_t stream) {
            const auto cache = pool.of_layer(i % layers);
            if (stores) bench::check(cuda::store(cache, x.keys(), x.values(), mapping, nullptr, stream));
            bench::check(cuda::attend(cache, x.query(), x.output(), {}, workspace, space, stream));
        });
    };
    set_lengths(std::vector<int>(static_cast<std::size_t>(s.batch), s.tokens));
    step_times times{.step = time(true), .attend = time(false)};
    for (int draw = 0; draw < ragged_draws; ++draw) {
        set_lengths(ragged_lengths(s.batch, s.tokens, page, draw));
        times.ragged += time(true) / ragged_draws;
    }
    BENCH_OK(cudaFree(workspace));
    BENCH_OK(cudaFree(mapping));
    return times;
}

/// attend of drafted trees. cache_of(layer): a mix.
template <class F>
double time_draft(int batch, int drafted, int layers, const F& cache_of) {
    using mix = decltype(cache_of(0));
    const int rows = batch * drafted;
    float16* const q = random_numbers(static_cast<std::size_t>(rows) * q_heads * dim);
    float16* const out = random_numbers(static_cast<std::size_t>(rows) * q_heads * dim);
    std::vector<std::uint64_t> words;
    for (int b = 0; b < batch; ++b)
        for (int i = 0; i < drafted; ++i)  // two chains
            words.push_back((std::uint64_t{2} << i) - 1 &
                            (i % 2 == 0 ? 0x5555555555555555u : 0xaaaaaaaaaaaaaaaau));
    std::uint64_t* const ancestors = bench::on_device(words);
    const std::size_t space = cuda::attend_workspace_bytes<mix, float16>(q_heads / heads, drafted);
    std::byte* workspace = nullptr;
    BENCH_OK(cudaMalloc(&workspace, space));
    BENCH_OK(cudaMemset(workspace, 0, space));
    const double us = bench::time_launches(
        std::max(4, layers),
        [&](int i, cudaStream_t stream) {
            bench::check(cuda::attend(cache_of(i % layers), token_view<const float16>(q, rows, q_heads, dim),
                                      token_view<float16>(out, rows, q_heads, dim),
                                      {.query_tokens = drafted, .ancestors = ancestors}, workspace, space,
                                      stream));
        },
        3);
    for (void* p : {static_cast<void*>(q), static_cast<void*>(out), static_cast<void*>(ancestors),
                    static_cast<void*>(workspace)})
        BENCH_OK(cudaFree(p));
    return us;
}

/// commit_due_pages, store_new_tokens and attend of sequences as they are.
template <class Format>
step_times time_real_step(const shape& s, bool planned) {
    constexpr int page = Format::page_tokens;
    using window_format = cuda::block_pair<full<float16>, full<float16>, dim, page>;
    using sink_format = cuda::block_pair<full<float16>, full<float16>, dim, 16>;
    const int columns = (s.tokens + page / 2 - sinks - recent) / page + 1;
    const int layers = layers_for(
        static_cast<std::size_t>(s.batch * columns) *
        (cuda::cache_ref<Format>::dense_key_page(heads) + cuda::cache_ref<Format>::dense_value_page(heads)));
    step_tensors x(s.batch, s.tokens);
    const page_pool<Format> quantized(s.batch, columns, layers, x.lengths, sinks, planned);
    const page_pool<window_format> window(s.batch, cuda::window_columns(recent, page), layers, x.lengths,
                                          sinks);
    const page_pool<sink_format> first(s.batch, 1, layers, x.lengths, 0);
    const auto cache_of = [&](int layer) {
        return cuda::make_mixed(recent, cuda::behind_window(quantized.of_layer(layer)),
                                cuda::in_window(window.of_layer(layer)),
                                cuda::sink_tokens(first.of_layer(layer), sinks));
    };
    // Where memory holds fewer layers, they stand for several.
    std::vector<cuda::cache_ref<Format>> quantized_layers;
    std::vector<cuda::cache_ref<window_format>> window_layers;
    for (int i = 0; i < model_layers; ++i) {
        quantized_layers.push_back(quantized.of_layer(i % layers));
        window_layers.push_back(window.of_layer(i % layers));
    }
    const std::size_t space = cuda::attend_workspace_bytes<decltype(cache_of(0)), float16>(q_heads / heads);
    std::byte* workspace = nullptr;
    BENCH_OK(cudaMalloc(&workspace, space));
    BENCH_OK(cudaMemset(workspace, 0, space));
    enum class kind { attends, stores_and_attends, two_launches };
    const auto time = [&](kind what, bool early, int seen = 0) {
        const int launches = (std::max(16, layers) + model_layers - 1) / model_layers * model_layers;
        return bench::time_launches(launches, [&](int i, cudaStream_t stream) {
            const int layer = i % layers;
            if (what != kind::attends && i % model_layers == 0)
                bench::check(
                    cuda::commit_due_pages(std::span<const cuda::cache_ref<Format>>(quantized_layers),
                                           std::span<const cuda::cache_ref<window_format>>(window_layers),
                                           recent, 1, nullptr, stream));
            if (what == kind::stores_and_attends) {
                bench::check(cuda::attend(cache_of(layer),
                                          cuda::new_token_rows<float16>{x.keys(), x.values()}, x.query(),
                                          x.output(), {.early = early}, workspace, space, stream));
                return;
            }
            if (what == kind::two_launches)
                bench::check(cuda::store_new_tokens(window.of_layer(layer), first.of_layer(layer), x.keys(),
                                                    x.values(), 1, nullptr, stream, {.early = early}));
            bench::check(cuda::attend(cache_of(layer), x.query(), x.output(),
                                      {.window = seen, .early = early}, workspace, space, stream));
        });
    };
    constexpr kind step = kind::stores_and_attends;
    step_times times{.step = time(step, false),
                     .early = time(step, true),
                     .two = time(kind::two_launches, true),
                     .attend = time(kind::attends, false),
                     .window = time(kind::attends, false, 512)};
    if constexpr (!wide) {
        times.draft16 = time_draft(s.batch, 16, layers, cache_of);
        times.draft64 = time_draft(s.batch, 64, layers, cache_of);
    }
    for (int draw = 0; draw < ragged_draws; ++draw) {
        x.set_lengths(ragged_lengths(s.batch, s.tokens, page, draw));
        times.ragged += time(step, true) / ragged_draws;
    }
    BENCH_OK(cudaFree(workspace));
    return times;
}

/// Microseconds of a layer in steps of kvq::cuda::cache.
template <class Format>
double time_cache(const std::string& name, const shape& s, bool planned) {
    constexpr int steps = 64;
    const cuda::device_format compiled = cuda::make_device_format<float16, Format>();
    const int most = s.tokens + Format::page_tokens / 2 + steps + 2;
    cudaStream_t stream;
    BENCH_OK(cudaStreamCreate(&stream));
    double us = 0.0;
    {
        cuda::cache cache;
        bench::check(cache.open({.layers = model_layers, .kv_heads = heads, .head_dim = dim},
                                {.formats = {name},
                                 .page_tokens = Format::page_tokens,
                                 .sinks = sinks,
                                 .recent = recent,
                                 .max_batch = s.batch,
                                 .max_tokens = most,
                                 .pool_tokens = s.batch * most,
                                 .pool_sequences = s.batch,
                                 .growing = false},
                                std::span(&compiled, 1), stream));
        if (planned)
            bench::check(cache.calibrate(name, bench::spread_statistics(model_layers, heads, dim), stream));
        std::vector<cuda::sequence_id> batch;
        float16* const prompt = random_numbers(static_cast<std::size_t>(most) * heads * dim);
        for (const int length : ragged_lengths(s.batch, s.tokens, Format::page_tokens, 0)) {
            batch.push_back(cache.new_sequence());
            bench::check(cache.begin_prompt(batch.back(), length, stream));
            const token_view<const float16> rows(prompt, length, heads, dim);
            for (int layer = 0; layer < model_layers; ++layer)
                bench::check(cache.append(layer, rows, rows, stream));
        }
        const step_tensors x(s.batch, s.tokens);
        const auto step = [&] {
            for (int layer = 0; layer < model_layers; ++layer) {
                bench::check(cache.attend(layer, x.keys(), x.values(), x.query(), x.output(), {.early = true},
                                          stream));
            }
        };
        bench::check(cache.begin_step(batch, 1, stream));
        step();
        bench::check(cache.begin_step(batch, 1, stream));
        BENCH_OK(cudaStreamSynchronize(stream));
        BENCH_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        step();
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        BENCH_OK(cudaStreamEndCapture(stream, &graph));
        BENCH_OK(cudaGraphInstantiate(&exec, graph, 0));
        BENCH_OK(cudaGraphLaunch(exec, stream));
        cudaEvent_t from, to;
        BENCH_OK(cudaEventCreate(&from));
        BENCH_OK(cudaEventCreate(&to));
        BENCH_OK(cudaEventRecord(from, stream));
        for (int i = 0; i < steps; ++i) {
            bench::check(cache.begin_step(batch, 1, stream));
            BENCH_OK(cudaGraphLaunch(exec, stream));
        }
        BENCH_OK(cudaEventRecord(to, stream));
        BENCH_OK(cudaEventSynchronize(to));
        float ms = 0.0f;
        BENCH_OK(cudaEventElapsedTime(&ms, from, to));
        us = 1000.0 * static_cast<double>(ms) / (steps * model_layers);
        BENCH_OK(cudaEventDestroy(from));
        BENCH_OK(cudaEventDestroy(to));
        BENCH_OK(cudaGraphExecDestroy(exec));
        BENCH_OK(cudaGraphDestroy(graph));
        BENCH_OK(cudaFree(prompt));
    }
    BENCH_OK(cudaStreamDestroy(stream));
    return us;
}

template <class Format>
[[maybe_unused]] void run_real_step(const char* name, const shape& nominal, double torch, bool json) {
    constexpr int page = Format::page_tokens;
    const int phase = (nominal.tokens - sinks - recent - page / 2) % page;
    const shape s{nominal.batch, nominal.tokens - phase};
    const step_times full = time_full_pages(s, page);
    const std::string row = name, format = row.substr(0, row.find("-plan"));
    const bool planned = format != row;
    step_times real = time_real_step<Format>(s, planned);
    if constexpr (!wide) real.cache = time_cache<Format>(format, s, planned);
    if (json)
        std::printf(
            "{\"op\": \"step\", \"scheme\": \"%s\", \"batch\": %d, \"tokens\": %d, \"q_heads\": %d, "
            "\"kv_heads\": %d, "
            "\"head_dim\": %d, \"us\": %.2f, \"us_early\": %.2f, \"us_two\": %.2f, "
            "\"us_attend\": %.2f, \"us_window\": %.2f, "
            "\"us_ragged\": %.2f, "
            "\"us_cache\": %.2f, \"us_fp16\": %.2f, \"us_attend_fp16\": %.2f, \"us_ragged_fp16\": %.2f, "
            "\"us_torch\": %.2f, \"us_draft16\": %.2f, \"us_draft64\": %.2f, \"sinks\": %d, \"recent\": %d, "
            "\"launches\": 1}\n",
            name, s.batch, s.tokens, q_heads, heads, dim, real.step, real.early, real.two, real.attend,
            real.window, real.ragged, real.cache, full.step, full.attend, full.ragged, torch, real.draft16,
            real.draft64, sinks, recent);
    else
        std::printf(
            "real step  %-10s %2d/%-2d %4d x %6d: attend %7.1f us (fp16 %7.1f, %.2f x; torch %7.1f, %.2f x), "
            "window %7.1f us; step "
            "%7.1f us, early %7.1f us (fp16 %7.1f, %.2f x; two launches %7.1f us); ragged %7.1f us (fp16 "
            "%7.1f, %.2f x); cache "
            "%7.1f us; trees of 16 %7.1f us, of 64 %7.1f us\n",
            name, q_heads, heads, s.batch, s.tokens, real.attend, full.attend, full.attend / real.attend,
            torch, torch / real.attend, real.window, real.step, real.early, full.step, full.step / real.early,
            real.two, real.ragged, full.ragged, full.ragged / real.ragged, real.cache, real.draft16,
            real.draft64);
    std::fflush(stdout);
}

template <class Format>
[[maybe_unused]] void run(const char* name, int batch, int tokens, bool json) {
    const int columns = tokens / page_tokens, pages = batch * columns, most = 8192;  // tokens of a prefill
    const std::size_t key_page = cuda::cache_ref<Format>::dense_key_page(heads),
                      value_page = cuda::cache_ref<Format>::dense_value_page(heads),
                      bytes = (key_page + value_page) * static_cast<std::size_t>(pages);
    const int layers = static_cast<int>(std::max<std::size_t>(2, (std::size_t{3} << 28) / bytes + 1));
    std::byte* memory = nullptr;
    BENCH_OK(cudaMalloc(&memory, bytes * static_cast<std::size_t>(layers)));

    std::vector<int> table(static_cast<std::size_t>(pages));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(5));
    std::vector<long long> newest, all(static_cast<std::size_t>(pages) * page_tokens);
    for (int b = 1; b <= batch; ++b)
        newest.push_back((table[static_cast<std::size_t>(b * columns - 1)] + 1LL) * page_tokens - 1);
    std::iota(all.begin(), all.end(), 0LL);
    int* const table_device = bench::on_device(table);
    int* const lengths = bench::on_device(std::vector<int>(static_cast<std::size_t>(batch), tokens));
    long long* const newest_device = bench::on_device(newest);
    long long* const all_device = bench::on_device(all);

    const auto cache_of = [&](int layer) {
        cuda::cache_ref<Format> c;
        c.kv_heads = heads;
        c.key_page_bytes = key_page;
        c.value_page_bytes = value_page;
        c.key_pages = memory + static_cast<std::size_t>(layer) * bytes;
        c.value_pages = c.key_pages + key_page * static_cast<std::size_t>(pages);
        c.block_table = table_device;
        c.tokens = lengths;
        c.sequences = batch;
        c.table_columns = columns;
        return c;
    };
    float16* const k = random_numbers(std::size_t{most} * heads * dim);
    float16* const v = random_numbers(std::size_t{most} * heads * dim);
    const auto store = [&](int layer, int count, const long long* mapping, cudaStream_t stream) {
        bench::check(cuda::store<Format, float16>(
            cache_of(layer), token_view<const float16>(k, count, heads, dim),
            token_view<const float16>(v, count, heads, dim), mapping, nullptr, stream));
    };
    for (int layer = 0; layer < layers; ++layer)
        for (int first = 0; first < pages * page_tokens; first += most)
            store(layer, std::min(most, pages * page_tokens - first), all_device + first, nullptr);
    BENCH_OK(cudaDeviceSynchronize());

    const std::size_t q_count = static_cast<std::size_t>(batch) * q_heads * dim;
    float16* const q = random_numbers(q_count);
    float16* const out = random_numbers(q_count);
    const std::size_t space = cuda::attend_workspace_bytes<Format, float16>(q_heads / heads);
    std::byte* workspace = nullptr;
    BENCH_OK(cudaMalloc(&workspace, space));
    BENCH_OK(cudaMemset(workspace, 0, space));
    const auto time = [&](bool stores, bool early) {
        return bench::time_launches(std::max(16, layers), [&](int i, cudaStream_t stream) {
            if (stores) store(i % layers, batch, newest_device, stream);
            bench::check(cuda::attend(cache_of(i % layers), token_view<const float16>(q, batch, q_heads, dim),
                                      token_view<float16>(out, batch, q_heads, dim), {.early = early},
                                      workspace, space, stream));
        });
    };
    const double step = time(true, false), early = time(true, true), attend = time(false, false);
    if (json)
        std::printf(
            "{\"op\": \"step\", \"scheme\": \"%s\", \"batch\": %d, \"tokens\": %d, \"q_heads\": %d, "
            "\"kv_heads\": %d, \"head_dim\": %d, \"us\": %.2f, \"us_early\": %.2f, \"us_attend\": %.2f}\n",
            name, batch, tokens, q_heads, heads, dim, step, early, attend);
    else
        std::printf("step  %-12s %4d x %6d: store and attend %7.1f us, early %7.1f us; attend %7.1f us\n",
                    name, batch, tokens, step, early, attend);
    std::fflush(stdout);
    for (void* p : {static_cast<void*>(memory), static_cast<void*>(table_device), static_cast<void*>(lengths),
                    static_cast<void*>(newest_device), static_cast<void*>(all_device), static_cast<void*>(k),
                    static_cast<void*>(v), static_cast<void*>(q), static_cast<void*>(out),
                    static_cast<void*>(workspace)})
        BENCH_OK(cudaFree(p));
}

}  // namespace

int main(int argc, char** argv) {
    bool json = false, quick = false;
    std::string only, of_heads, baseline;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        json = json || argument == "--json";
        quick = quick || argument == "--quick";
        if (argument == "--only" && i + 1 < argc) only = argv[++i];
        if (argument == "--heads" && i + 1 < argc) of_heads = argv[++i];
        if (argument == "--baseline" && i + 1 < argc) baseline = argv[++i];
    }
    const auto torch = bench::read_baseline(baseline.c_str());
    [[maybe_unused]] const auto wanted = [&](const char* name) { return only.empty() || only == name; };
    const auto run_formats = [&]([[maybe_unused]] const shape& s, [[maybe_unused]] double torch_us) {
#if !defined(PART) || PART == 0
        if (wanted("kivi-4-g64"))
            run_real_step<cuda::kivi_pair<4, 64, dim, page_tokens>>("kivi-4-g64", s, torch_us, json);
#endif
#if !defined(PART) || PART == 1
        if (wanted("std4")) run_real_step<cuda::preset_pair<std4, dim>>("std4", s, torch_us, json);
#if HEAD_DIM == 128
        if (wanted("std4-h")) run_real_step<cuda::preset_pair<std4_h, dim>>("std4-h", s, torch_us, json);
#endif
#endif
#if !defined(PART) || PART == 2
        for (const char* const name : {"low2", "low2-plan"})
            if (wanted(name)) run_real_step<cuda::preset_pair<low2, dim>>(name, s, torch_us, json);
#endif
#if !defined(PART) || PART == 3
        if (wanted("int8"))
            run_real_step<cuda::block_pair<int8, int8, dim, page_tokens>>("int8", s, torch_us, json);
#endif
#if !defined(PART) || PART == 5
        if (wanted("mix4-plan")) run_real_step<cuda::preset_pair<mix4, dim>>("mix4-plan", s, torch_us, json);
#endif
#if !defined(PART) || PART == 6
        if (wanted("low3-plan")) run_real_step<cuda::preset_pair<low3, dim>>("low3-plan", s, torch_us, json);
#endif
    };
    if constexpr (wide) {
        const std::tuple<shape, int, int> layers[] = {
            {dim == 256 ? shape{64, 1024} : shape{16, 2048}, 32, dim == 256 ? 16 : 4}, {{8, 32768}, 32, 4}};
        for (const auto& [s, q, kv] : layers) {
            heads = kv;
            q_heads = q;
            run_formats(s, 0.0);
        }
        return 0;
    }
    for (const auto& [q, kv] : {std::pair{32, 8}, std::pair{64, 8}, std::pair{32, 32}}) {
        const std::string both = std::to_string(q) + "/" + std::to_string(kv);
        if (of_heads.empty() ? quick && both != "32/8" : both != of_heads) continue;
        heads = kv;
        q_heads = q;
        for (const shape& s :
             {shape{16, 2048}, shape{64, 1024}, shape{64, 4096}, shape{8, 32768}, shape{1, 131072}}) {
            const auto found = torch.find({s.batch, s.tokens, q, kv, dim});
            const double torch_us = found == torch.end() ? 0.0 : found->second;
            run_formats(s, torch_us);
        }
    }
    heads = 8;
    q_heads = 32;
    if (quick) return 0;
#if !defined(PART) || PART == 4
    for (const auto& [batch, tokens] : {shape{16, 2048}, shape{64, 1024}, shape{128, 4096}}) {
        if (wanted("fp16"))
            run<cuda::block_pair<full<float16>, full<float16>, dim, page_tokens>>("fp16", batch, tokens,
                                                                                  json);
        if (wanted("int8")) run<cuda::block_pair<int8, int8, dim, page_tokens>>("int8", batch, tokens, json);
        if (wanted("token4-g128"))
            run<cuda::block_pair<affine<4, per_token<>>, affine<4, per_token<>>, dim, page_tokens>>(
                "token4-g128", batch, tokens, json);
    }
#endif
    return 0;
}
