// SPDX-License-Identifier: MIT
// One decode step for a batch on the GPU: append every sequence's new token, code pages that have become full, attend.
//
//   nvcc -std=c++20 -arch=native -Iinclude examples/gpu_decode.cu -o gpu_decode && ./gpu_decode
//
// KIVI 4 bit with a 16-bit recent window: tokens go to window pages first, and a page is coded once it lies behind the last
// `recent` tokens. The step below could be captured in a CUDA graph: it allocates nothing and waits for nothing.
#include <kvq/backends/cuda.cuh>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace kvq;
using window = cuda::format<full<float16>, full<float16>, 128, 64>;
using packed = cuda::kivi_format<4, 64, 128, 64>;

constexpr int batch = 8, kv_heads = 8, q_heads = 32, dim = 128, recent = 64, columns = 8;
constexpr int window_pages = batch * columns, quantized_pages = batch * columns;

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

template <class Format>
static cuda::cache_ref<Format> make_cache(int pages, int* table, const int* tokens) {
    using ref = cuda::cache_ref<Format>;
    ref c;
    c.key_page_bytes = ref::dense_key_page(kv_heads);
    c.value_page_bytes = ref::dense_value_page(kv_heads);
    c.key_pages = device<std::byte>(c.key_page_bytes * pages);
    c.value_pages = device<std::byte>(c.value_page_bytes * pages);
    c.block_table = table;
    c.tokens = tokens;
    c.sequences = batch;
    c.table_columns = columns;
    c.kv_heads = kv_heads;
    return c;
}

int main() {
    // Tables: every sequence owns `columns` window pages; -1 in the coded table means "not coded yet".
    int* const tokens = device<int>(batch);
    int* const window_table = device<int>(batch * columns);
    int* const coded_table = device<int>(batch * columns, 0xff);
    int* const fresh = device<int>(batch);  // the quantized page that a sequence would take next
    long long* const mapping = device<long long>(batch);
    std::vector<int> pages(batch * columns);
    for (int i = 0; i < batch * columns; ++i) pages[i] = i;
    cudaMemcpy(window_table, pages.data(), pages.size() * sizeof(int), cudaMemcpyHostToDevice);

    const auto win = make_cache<window>(window_pages, window_table, tokens);
    const auto code = make_cache<packed>(quantized_pages, coded_table, tokens);
    const std::size_t kv = static_cast<std::size_t>(batch) * kv_heads * dim,
                      qn = static_cast<std::size_t>(batch) * q_heads * dim;
    float16 *const k = device<float16>(kv), *const v = device<float16>(kv), *const q = device<float16>(qn),
                   *const out = device<float16>(qn);
    float* const state = device<float>(static_cast<std::size_t>(batch) * q_heads * (dim + 2));
    const std::size_t bytes = std::max(cuda::attend_workspace_bytes<window, float16>(q_heads / kv_heads),
                                       cuda::attend_workspace_bytes<packed, float16>(q_heads / kv_heads));
    std::byte* const workspace = device<std::byte>(bytes);  // zeroed once
    cudaStream_t stream;
    cudaStreamCreate(&stream);

    std::vector<float16> random(std::max(kv, qn));
    for (int step = 0; step < 300; ++step) {
        // What a model would hand over: k, v and q of the new tokens, where they go, how long the sequences are now.
        for (auto& x : random)
            x = float16(static_cast<float>(std::rand()) / static_cast<float>(RAND_MAX) - 0.5f);
        for (float16* to : {k, v}) cudaMemcpyAsync(to, random.data(), kv * 2, cudaMemcpyHostToDevice, stream);
        cudaMemcpyAsync(q, random.data(), qn * 2, cudaMemcpyHostToDevice, stream);
        std::vector<long long> slot(batch);
        std::vector<int> length(batch, step + 1), next(batch);
        for (int b = 0; b < batch; ++b) {
            slot[b] = static_cast<long long>(b * columns + step / 64) * 64 + step % 64;
            next[b] = b * columns + (step + 1 - recent) / 64;
        }
        cudaMemcpyAsync(mapping, slot.data(), batch * sizeof(long long), cudaMemcpyHostToDevice, stream);
        cudaMemcpyAsync(tokens, length.data(), batch * sizeof(int), cudaMemcpyHostToDevice, stream);
        cudaMemcpyAsync(fresh, next.data(), batch * sizeof(int), cudaMemcpyHostToDevice, stream);

        // The decode step.
        using in = token_view<const float16>;
        check(cuda::store<window, float16>(win, in(k, batch, kv_heads, dim), in(v, batch, kv_heads, dim),
                                           mapping, nullptr, stream));
        check(cuda::commit_full_pages(win, code, window_table, coded_table, recent, fresh, nullptr, stream));
        cuda::attention_options first, last;
        first.state_out = state;
        last.state_in = state;
        check(cuda::attend<packed, float16>(code, in(q, batch, q_heads, dim), {}, first, workspace, bytes,
                                            stream));
        check(cuda::attend<window, float16>(win, in(q, batch, q_heads, dim), {out, batch, q_heads, dim}, last,
                                            workspace, bytes, stream));
    }
    std::vector<float16> result(qn);
    std::vector<int> table(batch * columns);
    cudaMemcpyAsync(result.data(), out, qn * 2, cudaMemcpyDeviceToHost, stream);
    cudaMemcpyAsync(table.data(), coded_table, table.size() * sizeof(int), cudaMemcpyDeviceToHost, stream);
    check(cudaStreamSynchronize(stream));
    int quantized_now = 0;
    for (const int page : table) quantized_now += page >= 0;
    std::printf("300 tokens x %d sequences: %d quantized pages, out[0] = %g\n", batch, quantized_now,
                static_cast<float>(result[0]));
    return quantized_now == 3 * batch ? 0 : 1;
}
