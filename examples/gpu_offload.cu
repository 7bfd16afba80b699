// SPDX-License-Identifier: MIT
// Host offload: pages go from the GPU to the CPU by memcpy, are attended there, and come back; nothing is converted.
//
//   nvcc -std=c++20 -arch=native -Iinclude examples/gpu_offload.cu -o gpu_offload && ./gpu_offload
//
// A GPU page and a CPU page hold the same bytes, so moving a sequence is copying its pages.
#include <kvq/backends/cuda.cuh>
#include <kvq/cache/sequence.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/io/page_transfer.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace kvq;
using keys = affine<4, per_token<>>;
using values = affine<4, per_token<>>;
constexpr int kv_heads = 4, q_heads = 16, dim = 128, page_tokens = 64, tokens = 1000;
constexpr int pages = (tokens + page_tokens - 1) / page_tokens;
using packed = cuda::format<keys, values, dim, page_tokens>;
using ref = cuda::cache_ref<packed>;

static void check(const cuda::status& s) {
    if (s) return;
    std::fprintf(stderr, "%s (%s)\n", s.message, cudaGetErrorName(s.code));
    std::exit(1);
}
template <class T>
static T* device(std::size_t n) {
    void* p = nullptr;
    if (cudaMalloc(&p, n * sizeof(T)) != cudaSuccess || cudaMemset(p, 0, n * sizeof(T)) != cudaSuccess)
        std::exit(1);
    return static_cast<T*>(p);
}
template <class T>
static T* device(const std::vector<T>& host) {
    T* const p = device<T>(host.size());
    cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
    return p;
}

int main() {
    // A sequence of 1000 tokens on the GPU.
    ref gpu;
    gpu.key_page_bytes = ref::dense_key_page(kv_heads);
    gpu.value_page_bytes = ref::dense_value_page(kv_heads);
    gpu.key_pages = device<std::byte>(pages * gpu.key_page_bytes);
    gpu.value_pages = device<std::byte>(pages * gpu.value_page_bytes);
    std::vector<int> table(pages);
    std::vector<long long> mapping(tokens);
    for (int i = 0; i < pages; ++i) table[i] = i;
    for (int i = 0; i < tokens; ++i) mapping[i] = i;
    gpu.block_table = device(table);
    gpu.tokens = device(std::vector<int>{tokens});
    gpu.sequences = 1;
    gpu.table_columns = pages;
    gpu.kv_heads = kv_heads;
    const auto random = [](std::size_t n) {
        std::vector<float> x(n);
        for (float& v : x) v = 4.0f * static_cast<float>(std::rand()) / static_cast<float>(RAND_MAX) - 2.0f;
        return x;
    };
    float* const k = device(random(tokens * kv_heads * dim));
    float* const v = device(random(tokens * kv_heads * dim));
    check(cuda::store<packed, float>(gpu, {k, tokens, kv_heads, dim}, {v, tokens, kv_heads, dim},
                                     device(mapping), nullptr, nullptr));

    // Attention there.
    const std::vector<float> q = random(q_heads * dim);
    float* const out = device<float>(q.size());
    const std::size_t bytes = cuda::attend_workspace_bytes<packed, float>(q_heads / kv_heads);
    check(cuda::attend<packed, float>(gpu, {device(q), 1, q_heads, dim}, {out, 1, q_heads, dim}, {},
                                      device<std::byte>(bytes), bytes, nullptr));
    std::vector<float> on_gpu(q.size());
    cudaMemcpy(on_gpu.data(), out, q.size() * sizeof(float), cudaMemcpyDeviceToHost);

    // To the CPU: the same bytes in pages of a cache.
    cache cpu({.layers = 1, .kv_heads = kv_heads, .head_dim = dim}, {.keys = make_format<keys, scalar>(),
                                                                     .values = make_format<values, scalar>(),
                                                                     .page_tokens = page_tokens});
    page_receiver receiver(cpu);
    const auto receive = [&](tensor role, const std::byte* gpu_pages, std::size_t page_bytes) {
        std::vector<std::byte> page(page_bytes);
        for (int i = 0; i < pages; ++i) {
            cudaMemcpy(page.data(), gpu_pages + i * page_bytes, page_bytes, cudaMemcpyDeviceToHost);
            page_message m;
            m.role = role;
            m.committed = true;
            m.first_token = i * page_tokens;
            m.tokens = m.used = page_tokens;
            m.kv_heads = kv_heads;
            m.dim = dim;
            m.scheme = identity_of(cpu.table(role)[1]);
            m.data = page;
            receiver.accept(m);
        }
    };
    receive(tensor::key, gpu.key_pages, gpu.key_page_bytes);
    receive(tensor::value, gpu.value_pages, gpu.value_page_bytes);
    sequence on_host = receiver.finish(pages * page_tokens);
    on_host.trim(tokens);  // the last page is not full
    std::vector<float> on_cpu(q.size());
    on_host.attend(0, {q.data(), 1, q_heads, dim}, {on_cpu.data(), 1, q_heads, dim});
    double error = 0.0, size = 0.0;
    for (std::size_t i = 0; i < q.size(); ++i) {
        error += std::pow(on_gpu[i] - on_cpu[i], 2.0);
        size += std::pow(on_cpu[i], 2.0);
    }
    error = std::sqrt(error / size);

    // And back: the GPU's pages are poisoned, refilled from the CPU's, and give the same bits as before.
    cudaMemset(gpu.key_pages, 0xff, pages * gpu.key_page_bytes);
    cudaMemset(gpu.value_pages, 0xff, pages * gpu.value_page_bytes);
    const layer_pages layer = on_host.pages(0);
    for (int i = 0; i < pages; ++i) {
        cudaMemcpy(gpu.key_pages + i * gpu.key_page_bytes, layer.at(i).keys->data(), gpu.key_page_bytes,
                   cudaMemcpyHostToDevice);
        cudaMemcpy(gpu.value_pages + i * gpu.value_page_bytes, layer.at(i).values->data(),
                   gpu.value_page_bytes, cudaMemcpyHostToDevice);
    }
    check(cuda::attend<packed, float>(gpu, {device(q), 1, q_heads, dim}, {out, 1, q_heads, dim}, {},
                                      device<std::byte>(bytes), bytes, nullptr));
    std::vector<float> again(q.size());
    cudaMemcpy(again.data(), out, q.size() * sizeof(float), cudaMemcpyDeviceToHost);
    const bool same = std::equal(again.begin(), again.end(), on_gpu.begin());
    std::printf("GPU against CPU: %.2e; after the way back: %s\n", error,
                same ? "the same bits" : "DIFFERENT");
    return error < 2e-3 && same ? 0 : 1;
}
