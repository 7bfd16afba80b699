// Decode, prompts and transfers on several GPUs over NCCL, against one GPU in the same run.
//
//   nccl [--json] [--quick] [--ranks N] [--blocking] [--only context|prompt|transfer]
//
// With -DPART=0: std4, and transfers; 1: kivi-4-g64. 32 query heads, 8 kv heads of 128, 4 sinks, 128 recent
// tokens, one token per sequence.
//   context   every rank has a range of the tokens: attend, partial states to all ranks (ncclAllGather, or
//             peer memory), merge; all ranks get all outputs
//   heads     every rank has 8 / N kv heads: attend; "gathered": with all heads on all ranks afterwards
//   prompt    2048 tokens behind a context, all of them divided: queries to all ranks, prefill, states back,
//             merge, pages of own tokens
//   transfer  a prompt of 32768 tokens and 32 layers to another GPU, against ncclSend and ncclRecv of as many
//             bytes
// Times are those of a layer: a graph of many layers, replayed by all ranks at once, the slowest rank's
// median (prompts: without a graph). --blocking: with communicators that block, as an engine may bring them.
// Ends with 1 where a bound is missed: context 1.7 x and heads (8 x 131072) 1.85 x of one GPU on two ranks,
// transfer 0.8 of NCCL's rate, std4 0.29 of the bytes of fp16.
#include <kvq/adapters/distributed/nccl_attention.cuh>
#include <kvq/adapters/distributed/nccl_prefill.cuh>
#include <kvq/adapters/distributed/nccl_transfer.cuh>
#include <kvq/adapters/distributed/peer_attention.cuh>
#include <kvq/cuda.cuh>

#include <barrier>
#include <functional>
#include <string>
#include <thread>

#include "timing.cuh"

namespace {

using namespace kvq;

#if !defined(PART) || PART == 0
constexpr const char* name = "std4";
using bench_format = cuda::preset_pair<std4, 128, 64>;
#else
constexpr const char* name = "kivi-4-g64";
using bench_format = cuda::kivi_pair<4, 64, 128, 64>;
#endif
constexpr int kv_heads = 8, q_heads = 32, dim = 128, sinks = 4, recent = 128, page_tokens = 64;

int ranks = 2;
bool json = false, blocking = false, missed = false;

/// What all ranks share: they meet, and tell each other times.
struct meeting {
    std::barrier<> all;
    std::vector<double> times;
    explicit meeting(int n) : all(n), times(static_cast<std::size_t>(n)) {}
    /// The largest of all ranks' times.
    double slowest(int rank, double own) {
        times[static_cast<std::size_t>(rank)] = own;
        all.arrive_and_wait();
        const double most = *std::max_element(times.begin(), times.end());
        all.arrive_and_wait();
        return most;
    }
};

void must(const cuda::status& s) { bench::check(s); }

float16* random_values(std::size_t n, cudaStream_t stream) {
    float16* p = nullptr;
    BENCH_OK(cudaMalloc(&p, n * sizeof(float16)));
    bench::fill_normal(p, n * sizeof(float16), static_cast<std::uint32_t>(n));
    BENCH_OK(cudaDeviceSynchronize());
    (void)stream;
    return p;
}

const cuda::device_format& compiled(bool across) {
    static const cuda::device_format
        plain = cuda::make_device_format<float16, bench_format>(),
        ranks = cuda::make_scored_format<cuda::across_ranks, float16, bench_format>();
    return across ? ranks : plain;
}

/// A cache with random sequences.
struct filled_cache {
    cuda::cache cache;
    std::vector<cuda::sequence_id> batch;
    int layers, heads, held_recent;

    filled_cache(int l, int h, int window, int first, int max_batch, int max_tokens, cudaStream_t stream,
                 bool across = false)
        : layers(l), heads(h), held_recent(window) {
        cuda::cache_options o;
        const cuda::device_format& f = compiled(across);
        o.formats = {f.kinds[0].name};
        o.page_tokens = page_tokens;
        o.sinks = first;
        o.recent = window;
        o.rollback = 0;
        o.step_tokens = window > 0 ? 1 : 0;
        o.max_batch = max_batch;
        o.max_tokens = max_tokens;
        must(cache.open({.layers = layers, .kv_heads = heads, .head_dim = dim}, o, std::span(&f, 1), stream));
    }
    void add(int tokens, cudaStream_t stream) {
        constexpr int chunk = 32768;
        const std::size_t n =
            static_cast<std::size_t>(std::min(tokens, chunk)) * static_cast<std::size_t>(heads) * dim;
        float16* const k = random_values(n, stream);
        float16* const v = random_values(n, stream);
        batch.push_back(cache.new_sequence());
        for (int first = 0; first < tokens; first += chunk) {
            const int count = std::min(chunk, tokens - first);
            must(cache.begin_prompt(batch.back(), count, stream));
            for (int layer = 0; layer < layers; ++layer)
                must(cache.append(layer, token_view<const float16>(k, count, heads, dim),
                                  token_view<const float16>(v, count, heads, dim), stream));
        }
        BENCH_OK(cudaStreamSynchronize(stream));
        BENCH_OK(cudaFree(k));
        BENCH_OK(cudaFree(v));
    }
};

/// Microseconds per call of launch(i), captured `count` times, replayed by all ranks of `m` at once.
double time_together(int rank, meeting& m, int count, cudaStream_t stream,
                     const std::function<void(int)>& launch) {
    launch(0);
    BENCH_OK(cudaStreamSynchronize(stream));
    m.all.arrive_and_wait();
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    BENCH_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; ++i) launch(i);
    BENCH_OK(cudaStreamEndCapture(stream, &graph));
    BENCH_OK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t from, to;
    BENCH_OK(cudaEventCreate(&from));
    BENCH_OK(cudaEventCreate(&to));
    std::vector<float> times;
    for (int i = 0; i < 9; ++i) {
        m.all.arrive_and_wait();
        BENCH_OK(cudaEventRecord(from, stream));
        BENCH_OK(cudaGraphLaunch(exec, stream));
        BENCH_OK(cudaEventRecord(to, stream));
        BENCH_OK(cudaEventSynchronize(to));
        float ms = 0.0f;
        BENCH_OK(cudaEventElapsedTime(&ms, from, to));
        if (i >= 2) times.push_back(ms);
    }
    BENCH_OK(cudaEventDestroy(from));
    BENCH_OK(cudaEventDestroy(to));
    BENCH_OK(cudaGraphExecDestroy(exec));
    BENCH_OK(cudaGraphDestroy(graph));
    std::sort(times.begin(), times.end());
    return m.slowest(rank, 1000.0 * static_cast<double>(times[times.size() / 2]) / count);
}

struct decode_times {
    double one, part, exchange, context, peers, peer_exchange, heads, gathered;
};

decode_times time_decode(int rank, meeting& m, meeting& alone, cuda::nccl_group& group, int batch, int tokens,
                         cudaStream_t stream) {
    const int layers = batch == 1 ? 6 : 2, count = batch == 1 ? 60 : 16;
    decode_times t{};
    const std::size_t values = static_cast<std::size_t>(batch) * q_heads * dim;
    float16* const q = random_values(values, stream);
    float16* const out = random_values(values, stream);
    float16* const all = random_values(2 * values, stream);
    const auto view = [&](float16* p, int heads) { return token_view<float16>(p, batch, heads, dim); };
    const auto step = [&](filled_cache& c, int heads, bool states, float* to, int i) {
        must(c.cache.attend(i % layers, token_view<const float16>(view(q, heads)),
                            states ? token_view<float16>{} : view(out, heads),
                            {.state_out = to, .early = true}, stream));
    };
    if (rank == 0) {
        filled_cache one(layers, kv_heads, recent, sinks, batch, tokens + 1, stream);
        for (int b = 0; b < batch; ++b) one.add(tokens, stream);
        must(one.cache.begin_step(one.batch, 0, stream));
        t.one = time_together(0, alone, count, stream, [&](int i) { step(one, q_heads, false, nullptr, i); });
    }
    m.all.arrive_and_wait();
    {
        const std::vector<int> weights(static_cast<std::size_t>(ranks), 1);
        context_split split({sinks, recent, page_tokens}, weights, -1, page_tokens);
        split.add(tokens);
        const page_geometry g = split.geometry(rank);
        const auto run = [&](auto& merge, bool across, double& all_of_it, double& alone_of_it) {
            filled_cache own(layers, kv_heads, g.recent, g.sinks, batch, tokens + 1, stream, across);
            for (int b = 0; b < batch; ++b) own.add(split.tokens(rank), stream);
            must(own.cache.begin_step(own.batch, 0, stream));
            must(merge.open(group, batch, q_heads, dim, stream));
            all_of_it = time_together(rank, m, count, stream, [&](int i) {
                must(merge.attend(own.cache, i % layers, token_view<const float16>(view(q, q_heads)),
                                  view(out, q_heads), {.early = true}, stream));
            });
            alone_of_it = time_together(rank, m, count, stream,
                                        [&](int) { must(merge.merge(view(out, q_heads), nullptr, stream)); });
            if (!across)
                t.part = time_together(rank, m, count, stream,
                                       [&](int i) { step(own, q_heads, true, merge.own_states(), i); });
            m.all.arrive_and_wait();
        };
        cuda::context_attention merge;
        run(merge, false, t.context, t.exchange);
        cuda::peer_context_attention peers;
        run(peers, true, t.peers, t.peer_exchange);
        must(peers.wait(stream, "for the last outputs"));
        m.all.arrive_and_wait();
    }
    {
        const std::vector<int> weights(static_cast<std::size_t>(ranks), 1);
        std::vector<index_range> heads = split(kv_heads, weights);
        const int mine = heads[static_cast<std::size_t>(rank)].size();
        for (index_range& r : heads) r = {4 * r.first, 4 * r.end};
        filled_cache own(layers, mine, recent, sinks, batch, tokens + 1, stream);
        for (int b = 0; b < batch; ++b) own.add(tokens, stream);
        must(own.cache.begin_step(own.batch, 0, stream));
        t.heads =
            time_together(rank, m, count, stream, [&](int i) { step(own, 4 * mine, false, nullptr, i); });
        t.gathered = time_together(rank, m, count, stream, [&](int i) {
            step(own, 4 * mine, false, nullptr, i);
            must(cuda::gather_heads<float16>(group, heads, view(out, 4 * mine), view(all, q_heads),
                                             all + values, stream));
        });
    }
    for (float16* p : {q, out, all}) BENCH_OK(cudaFree(p));
    m.all.arrive_and_wait();
    return t;
}

void bound(bool holds, const char* what) {
    if (holds) return;
    std::printf("  missed: %s\n", what);
    missed = true;
}

void print_decode(const decode_times& t, int batch, int tokens) {
    const double c = t.one / t.context, p = t.one / t.peers, h = t.one / t.heads, g = t.one / t.gathered;
    if (json)
        std::printf(
            "{\"op\": \"ranks\", \"scheme\": \"%s\", \"ranks\": %d, \"batch\": %d, \"tokens\": %d, "
            "\"us_one\": %.2f, "
            "\"us_part\": %.2f, \"us_exchange\": %.2f, \"us_context\": %.2f, \"us_peer_exchange\": %.2f, "
            "\"us_peers\": %.2f, \"us_heads\": %.2f, \"us_heads_gathered\": %.2f}\n",
            name, ranks, batch, tokens, t.one, t.part, t.exchange, t.context, t.peer_exchange, t.peers,
            t.heads, t.gathered);
    else
        std::printf(
            "%-10s %d x %6d, %d ranks: one GPU %.1f us, a part %.1f us (%.2f x); context over NCCL %.1f us, "
            "%.2f x "
            "(gather and merge alone %.1f); over peer memory %.1f us, %.2f x (alone %.1f); heads %.1f us, "
            "%.2f x, "
            "gathered %.1f us, %.2f x\n",
            name, batch, tokens, ranks, t.one, t.part, t.one / t.part, t.context, c, t.exchange, t.peers, p,
            t.peer_exchange, t.heads, h, t.gathered, g);
    if (ranks != 2) return;
    bound(c >= 1.7, "context parallel over NCCL 1.7 x of one GPU");
    bound(p >= 1.7, "context parallel over peer memory 1.7 x of one GPU");
    if (batch == 8) bound(h >= 1.85, "head parallel 1.85 x of one GPU");
}

constexpr int prompt_layers = 4;

/// Microseconds per layer of a prompt, of ranks that start together: the slowest rank's median of five runs.
/// begin(id) begins the prompt of a fork of the cache's sequence, launch(layer) is what is timed.
double time_prompt(int rank, meeting& m, filled_cache& c, cudaStream_t stream,
                   const std::function<void(cuda::sequence_id)>& begin,
                   const std::function<cuda::status()>& wait, const std::function<void(int)>& launch) {
    cudaEvent_t from, to;
    BENCH_OK(cudaEventCreate(&from));
    BENCH_OK(cudaEventCreate(&to));
    std::vector<float> times;
    for (int run = 0; run < 6; ++run) {
        cuda::sequence_id fork;
        must(c.cache.fork(c.batch[0], fork, stream));
        begin(fork);
        BENCH_OK(cudaStreamSynchronize(stream));
        m.all.arrive_and_wait();
        BENCH_OK(cudaEventRecord(from, stream));
        for (int layer = 0; layer < prompt_layers; ++layer) launch(layer);
        BENCH_OK(cudaEventRecord(to, stream));
        must(wait());
        float ms = 0.0f;
        BENCH_OK(cudaEventElapsedTime(&ms, from, to));
        if (run > 0) times.push_back(ms);
        must(c.cache.free(fork));
    }
    BENCH_OK(cudaEventDestroy(from));
    BENCH_OK(cudaEventDestroy(to));
    std::sort(times.begin(), times.end());
    return m.slowest(rank, 1000.0 * static_cast<double>(times[times.size() / 2]) / prompt_layers);
}

void prompts(int rank, meeting& m, meeting& alone, cuda::nccl_group& group, bool quick, cudaStream_t stream) {
    constexpr int chunk = 2048;
    const std::size_t values = static_cast<std::size_t>(chunk) * q_heads * dim;
    float16* const q = random_values(values, stream);
    float16* const kv = random_values(values, stream);
    float16* const out = random_values(values, stream);
    for (const int tokens : {32768, 131072}) {
        if (quick && tokens > 32768) continue;
        double one_us = 0.0;
        if (rank == 0) {
            filled_cache one(prompt_layers, kv_heads, recent, sinks, 1, tokens + chunk, stream);
            one.add(tokens, stream);
            const token_view<const float16> x(kv, chunk, kv_heads, dim);
            one_us = time_prompt(
                0, alone, one, stream,
                [&](cuda::sequence_id id) { must(one.cache.begin_prompt(id, chunk, stream)); },
                [&] {
                    BENCH_OK(cudaStreamSynchronize(stream));
                    return cuda::status{};
                },
                [&](int layer) {
                    must(one.cache.prefill(layer, x, x, token_view<const float16>(q, chunk, q_heads, dim),
                                           token_view<float16>(out, chunk, q_heads, dim), {}, stream));
                });
        }
        m.all.arrive_and_wait();
        const std::vector<int> weights(static_cast<std::size_t>(ranks), 1);
        context_split split({sinks, recent, page_tokens}, weights, -1, page_tokens), of_fork = split;
        split.add(tokens);
        const page_geometry g = split.geometry(rank);
        filled_cache own(prompt_layers, kv_heads, g.recent, g.sinks, 1, tokens + chunk, stream);
        own.add(split.tokens(rank), stream);
        cuda::context_prefill prompt;
        must(prompt.open(group, q_heads));
        const double us = time_prompt(
            rank, m, own, stream,
            [&](cuda::sequence_id id) {
                of_fork = split;
                must(prompt.begin(own.cache, id, of_fork, chunk, stream));
            },
            [&] { return group.wait(stream, "for outputs of a prompt"); },
            [&](int layer) {
                const int n = prompt.own_tokens();
                const token_view<const float16> x(kv, n, kv_heads, dim);
                must(prompt.prefill(layer, x, x, token_view<const float16>(q, n, q_heads, dim),
                                    token_view<float16>(out, n, q_heads, dim), {}, stream));
            });
        const double sent = m.slowest(rank, static_cast<double>(prompt.sent_bytes()));
        if (rank != 0) continue;
        if (json)
            std::printf(
                "{\"op\": \"rank_prompt\", \"scheme\": \"%s\", \"ranks\": %d, \"chunk\": %d, \"tokens\": %d, "
                "\"us_one\": %.1f, \"us_divided\": %.1f, \"sent_bytes\": %.0f}\n",
                name, ranks, chunk, tokens, one_us, us, sent);
        else
            std::printf(
                "%-10s prompt of %d over %6d, %d ranks: one GPU %.1f us, divided %.1f us, %.2f x; a rank "
                "sends "
                "%.1f MB a layer\n",
                name, chunk, tokens, ranks, one_us, us, one_us / us, sent * 1e-6);
        std::fflush(stdout);
    }
    for (float16* p : {q, kv, out}) BENCH_OK(cudaFree(p));
    m.all.arrive_and_wait();
}

[[maybe_unused]] double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

#if !defined(PART) || PART == 0
/// Of a prompt from rank 0 to rank 1: best of three.
struct transfer_time {
    double seconds = 1e9;
    cuda::sequence_report report;
};
transfer_time time_transfer(int rank, meeting& m, cuda::nccl_group& group, filled_cache& c,
                            cudaStream_t stream) {
    transfer_time best;
    for (int i = 0; i < 4 && rank < 2; ++i) {
        m.all.arrive_and_wait();
        double own = 0.0;
        cuda::sequence_report report;
        if (rank == 0) {
            cuda::sequence_sender sender;
            must(sender.open(group, 1, c.cache, c.batch[0], stream));
            BENCH_OK(cudaStreamSynchronize(stream));
            m.all.arrive_and_wait();
            const auto start = std::chrono::steady_clock::now();
            for (int layer = 0; layer < c.layers; ++layer) must(sender.send_layer(layer, stream));
            must(sender.finish(&report));
            own = seconds_since(start);
        } else {
            cuda::sequence_receiver receiver;
            must(receiver.open(group, 0, c.cache, stream));
            must(receiver.begin());
            BENCH_OK(cudaStreamSynchronize(stream));
            m.all.arrive_and_wait();
            const auto start = std::chrono::steady_clock::now();
            cuda::sequence_id id;
            must(receiver.receive(id, &report));
            own = seconds_since(start);
            must(c.cache.free(id));
        }
        own = m.slowest(rank, own);
        if (i > 0 && own < best.seconds) best = {own, report};
    }
    return best;
}
/// ncclSend and ncclRecv of so many bytes, in messages of at most 1 GiB from and to the same memory: best of
/// three.
double time_messages(int rank, meeting& m, cuda::nccl_group& group, std::size_t bytes, cudaStream_t stream) {
    const std::size_t most = std::min(bytes, std::size_t{1} << 30);
    std::byte* memory = nullptr;
    BENCH_OK(cudaMalloc(&memory, most));
    double best = 1e9;
    for (int i = 0; i < 4; ++i) {
        m.all.arrive_and_wait();
        const auto start = std::chrono::steady_clock::now();
        for (std::size_t at = 0; at < bytes; at += most) {
            const std::size_t n = std::min(most, bytes - at);
            must(rank == 0 ? group.send(memory, n, 1, stream) : group.receive(memory, n, 0, stream));
        }
        must(group.wait(stream, "for messages"));
        const double own = m.slowest(rank, seconds_since(start));
        if (i > 0) best = std::min(best, own);
    }
    BENCH_OK(cudaFree(memory));
    return best;
}

void transfers(int rank, meeting& m, cuda::nccl_group& group, cudaStream_t stream) {
    constexpr int layers = 32, tokens = 32768;
    const auto print = [&](const char* what, const transfer_time& t, double messages) {
        const double rate = static_cast<double>(t.report.bytes) / t.seconds * 1e-9,
                     other = static_cast<double>(t.report.bytes) / messages * 1e-9;
        if (json)
            std::printf(
                "{\"op\": \"transfer\", \"what\": \"%s\", \"tokens\": %d, \"layers\": %d, \"bytes\": %zu, "
                "\"ms\": %.2f, "
                "\"gb_per_s\": %.1f, \"nccl_gb_per_s\": %.1f}\n",
                what, tokens, layers, t.report.bytes, 1000.0 * t.seconds, rate, other);
        else
            std::printf(
                "transfer %-22s %d tokens, %d layers: %.1f MB in %.2f ms, %.1f GB/s; NCCL %.1f GB/s, %.2f of "
                "it\n",
                what, tokens, layers, static_cast<double>(t.report.bytes) * 1e-6, 1000.0 * t.seconds, rate,
                other, rate / other);
        return rate / other;
    };
    // 16 bit: a window as long as the prompt.
    filled_cache full(layers, kv_heads, tokens, sinks, 1, tokens + 1, stream),
        narrow(layers, kv_heads, recent, sinks, 1, tokens + 1, stream);
    if (rank == 0) {
        full.add(tokens, stream);
        narrow.add(tokens, stream);
    }
    const transfer_time whole = time_transfer(rank, m, group, full, stream);
    const double whole_messages = time_messages(rank, m, group, whole.report.bytes, stream);
    const transfer_time quantized = time_transfer(rank, m, group, narrow, stream);
    const double quantized_messages = time_messages(rank, m, group, quantized.report.bytes, stream);
    const transfer_time on_the_way = time_transfer(rank, m, group, rank == 0 ? full : narrow, stream);
    if (rank != 0) return;
    const double a = print("fp16", whole, whole_messages), b = print("std4", quantized, quantized_messages);
    print("fp16, std4 on the way", on_the_way, quantized_messages);
    const double share =
        static_cast<double>(quantized.report.bytes) / static_cast<double>(whole.report.bytes);
    std::printf("transfer: std4 takes %.3f of the bytes of fp16; on the way %.1f of %.1f MB are saved\n",
                share, static_cast<double>(on_the_way.report.saved()) * 1e-6,
                static_cast<double>(on_the_way.report.bytes_as_is) * 1e-6);
    bound(a >= 0.8 && b >= 0.8, "transfer 0.8 of NCCL's rate");
    bound(share <= 0.29, "std4 0.29 of the bytes of fp16");
}
#endif

}  // namespace

int main(int argc, char** argv) {
    bool quick = false;
    std::string only;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        json = json || argument == "--json";
        quick = quick || argument == "--quick";
        blocking = blocking || argument == "--blocking";
        if (argument == "--ranks" && i + 1 < argc) ranks = std::atoi(argv[++i]);
        if (argument == "--only" && i + 1 < argc) only = argv[++i];
    }
    int devices = 0;
    BENCH_OK(cudaGetDeviceCount(&devices));
    if (ranks < 2) {
        std::printf("nccl: needs two ranks\n");
        return 2;
    }
    if (ranks > devices) {
        std::printf("ranks: not run, %d ranks need as many GPUs, there are %d\n", ranks, devices);
        return 0;
    }
    ncclUniqueId id;
    must(cuda::nccl_group::make_id(id));
    meeting all(ranks), pair(2), alone(1);
    const auto wanted = [&](const char* what) { return only.empty() || only == what; };
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r)
        threads.emplace_back([&, r] {
            BENCH_OK(cudaSetDevice(r));
            cudaStream_t stream;
            BENCH_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            cuda::nccl_group group;
            ncclComm_t comm = nullptr;
            if (blocking) {
                if (ncclCommInitRank(&comm, ranks, id, r) != ncclSuccess) std::exit(2);
                must(group.adopt(comm));
            } else {
                must(group.open(id, r, ranks));
            }
            for (const int batch : {1, 8}) {
                if (!wanted("context")) break;
                const int tokens = quick ? 16384 : 131072;
                const decode_times t = time_decode(r, all, alone, group, batch, tokens, stream);
                if (r == 0) print_decode(t, batch, tokens);
                std::fflush(stdout);
            }
            if (wanted("prompt")) prompts(r, all, alone, group, quick, stream);
#if !defined(PART) || PART == 0
            if (r < 2 && wanted("transfer")) transfers(r, pair, group, stream);
            std::fflush(stdout);
#endif
            all.all.arrive_and_wait();
            group.close();
            if (comm != nullptr) (void)ncclCommDestroy(comm);
        });
    for (std::thread& t : threads) t.join();
    return missed ? 1 : 0;
}
