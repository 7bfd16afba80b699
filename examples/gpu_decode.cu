// SPDX-License-Identifier: MIT
// Decode steps for a batch on the GPU, two launches each: store the new tokens and commit full pages, then attend.
//
//   nvcc -std=c++20 -arch=native -Iinclude examples/gpu_decode.cu -o gpu_decode && ./gpu_decode
//
// KIVI 4 bit behind 4 sinks, with a recent window of 64 tokens in 16 bit. The step is captured in a CUDA graph once and replayed while
// the sequences grow: only their lengths change.
#include <kvq/backends/cuda.cuh>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace kvq;
using window = cuda::format<full<float16>, full<float16>, 128, 64>;
using packed = cuda::kivi_format<4, 64, 128, 64>;

using sinks = cuda::format<full<float16>, full<float16>, 128, 16>;

constexpr int batch = 8, kv_heads = 8, q_heads = 32, dim = 128, page = 64;
constexpr int sink_count = 4, recent = 64, steps = 300;
constexpr int columns = steps / page + 1;                 // quantized pages of a sequence
constexpr int ring = cuda::window_columns(recent, page);  // window pages of a sequence, used in turn

static void check(cudaError_t code, const char* message = "") {
    if (code == cudaSuccess) return;
    std::fprintf(stderr, "%s (%s)\n", message, cudaGetErrorName(code));
    std::exit(1);
}
static void check(const cuda::status& s) { check(s.code, s.message); }

template <class T>
static T* device(std::size_t n, int fill = 0) {
    void* p = nullptr;
    check(cudaMalloc(&p, n * sizeof(T)));
    check(cudaMemset(p, fill, n * sizeof(T)));
    return static_cast<T*>(p);
}

/// Every sequence owns `per_sequence` pages of a format.
template <class Format>
static cuda::cache_ref<Format> make_cache(int per_sequence, int first_token, const int* tokens) {
    using ref = cuda::cache_ref<Format>;
    const int pages = batch * per_sequence;
    std::vector<int> numbers(pages);
    for (int i = 0; i < pages; ++i) numbers[i] = i;
    int* const table = device<int>(pages);
    check(cudaMemcpy(table, numbers.data(), numbers.size() * sizeof(int), cudaMemcpyHostToDevice));
    ref c;
    c.key_page_bytes = ref::dense_key_page(kv_heads);
    c.value_page_bytes = ref::dense_value_page(kv_heads);
    c.key_pages = device<std::byte>(c.key_page_bytes * pages);
    c.value_pages = device<std::byte>(c.value_page_bytes * pages);
    c.block_table = table;
    c.tokens = tokens;
    c.sequences = batch;
    c.table_columns = per_sequence;
    c.kv_heads = kv_heads;
    c.first_token = first_token;
    return c;
}

int main() {
    int* const tokens = device<int>(batch);
    const auto quantized = make_cache<packed>(columns, sink_count, tokens);
    const auto in_16_bit = make_cache<window>(ring, sink_count, tokens);
    const auto first = make_cache<sinks>(1, 0, tokens);
    const auto cache = cuda::make_mixed(recent, cuda::behind_window(quantized), cuda::in_window(in_16_bit),
                                        cuda::sink_tokens(first, sink_count));

    const std::size_t kv = static_cast<std::size_t>(batch) * kv_heads * dim,
                      qn = static_cast<std::size_t>(batch) * q_heads * dim;
    float16 *const k = device<float16>(kv), *const v = device<float16>(kv), *const q = device<float16>(qn),
                   *const out = device<float16>(qn);
    const std::size_t bytes =
        cuda::attend_workspace_bytes<std::remove_const_t<decltype(cache)>, float16>(q_heads / kv_heads);
    std::byte* const workspace = device<std::byte>(bytes);  // zeroed once
    cudaStream_t stream;
    check(cudaStreamCreate(&stream));

    // The decode step. It allocates nothing and waits for nothing.
    const auto step = [&] {
        const token_view<const float16> keys(k, batch, kv_heads, dim), values(v, batch, kv_heads, dim);
        check(
            cuda::commit_due_pages(quantized, in_16_bit, recent, 1, nullptr, stream));  // once for all layers
        check(cuda::store_new_tokens(in_16_bit, first, keys, values, 1, nullptr, stream));
        check(cuda::attend<float16>(cache, token_view<const float16>(q, batch, q_heads, dim),
                                    token_view<float16>(out, batch, q_heads, dim), {}, workspace, bytes,
                                    stream));
    };
    step();  // sequences are empty: nothing changes, and kernels are loaded outside the capture
    check(cudaStreamSynchronize(stream));
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    step();
    cudaGraph_t graph;
    check(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t replay;
    check(cudaGraphInstantiate(&replay, graph, 0));

    std::vector<float16> random(std::max(kv, qn));
    for (int i = 0; i < steps; ++i) {
        // What a model would hand over: k, v and q of the new tokens, and how long the sequences are now.
        for (auto& x : random)
            x = float16(static_cast<float>(std::rand()) / static_cast<float>(RAND_MAX) - 0.5f);
        for (float16* to : {k, v})
            check(cudaMemcpyAsync(to, random.data(), kv * 2, cudaMemcpyHostToDevice, stream));
        check(cudaMemcpyAsync(q, random.data(), qn * 2, cudaMemcpyHostToDevice, stream));
        const std::vector<int> lengths(batch, i + 1);
        check(cudaMemcpyAsync(tokens, lengths.data(), batch * sizeof(int), cudaMemcpyHostToDevice, stream));
        check(cudaGraphLaunch(replay, stream));
    }
    std::vector<float16> result(qn);
    check(cudaMemcpyAsync(result.data(), out, qn * 2, cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
    bool finite = true;
    for (const float16 x : result) finite = finite && static_cast<float>(x) == static_cast<float>(x);
    std::printf("%d tokens x %d sequences: %d quantized pages each, out[0] = %g\n", steps, batch,
                cuda::committed_pages(steps - sink_count, recent, page), static_cast<float>(result[0]));
    check(cudaGraphExecDestroy(replay));
    check(cudaGraphDestroy(graph));
    return finite ? 0 : 1;
}
