// SPDX-License-Identifier: MIT
// Host offload: pages go from the GPU to the CPU by memcpy, are attended there, and come back; nothing is converted.
//
//   nvcc -std=c++20 -arch=native -Iinclude examples/gpu_offload.cu -o gpu_offload && ./gpu_offload
//
// A GPU page and a CPU page hold the same bytes, so moving a sequence is copying its pages.
#include <kvq/attention/attend.hpp>
#include <kvq/backends/cuda.cuh>
#include <kvq/backends/scalar.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory_resource>
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

    // To the CPU: the same bytes in pages of its pool.
    page_pool pool(std::pmr::get_default_resource());
    std::vector<page_ref> key_pages, value_pages;
    for (int i = 0; i < pages; ++i) {
        key_pages.push_back(pool.allocate(gpu.key_page_bytes, 1, page_tokens));
        value_pages.push_back(pool.allocate(gpu.value_page_bytes, 1, page_tokens));
        cudaMemcpy(key_pages[i]->data(), gpu.key_pages + i * gpu.key_page_bytes, gpu.key_page_bytes,
                   cudaMemcpyDeviceToHost);
        cudaMemcpy(value_pages[i]->data(), gpu.value_pages + i * gpu.value_page_bytes, gpu.value_page_bytes,
                   cudaMemcpyDeviceToHost);
    }
    const format_table<tensor::key, float16, formats<keys>> key_formats;
    const format_table<tensor::value, float16, formats<values>> value_formats;
    const cache_shape shape{1, kv_heads, dim, dim};
    const page_geometry geometry{0, 0, page_tokens};
    std::vector<page_span> spans;
    for (std::size_t i = 0; i < key_pages.size(); ++i) {
        const int first = geometry.first_token(static_cast<int>(i));
        spans.push_back(
            {first, std::min(page_tokens, tokens - first), page_tokens, {key_pages[i], value_pages[i]}, {}});
    }
    const layer_pages layer{geometry, tokens, spans.data(), static_cast<int>(spans.size())};
    std::vector<float> on_cpu(q.size());
    std::vector<std::byte> memory(attention_workspace_bytes<scalar>(key_formats, value_formats, shape,
                                                                    geometry, tokens, q_heads, 1, 1) +
                                  64);
    auto* const aligned =
        reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64);
    serial_executor serial;
    kvq::attend<scalar>(key_formats, value_formats, shape, 0, layer, {q.data(), 1, q_heads, dim},
                        {on_cpu.data(), 1, q_heads, dim}, causal{}, serial, 1, aligned);
    double error = 0.0, size = 0.0;
    for (std::size_t i = 0; i < q.size(); ++i) {
        error += std::pow(on_gpu[i] - on_cpu[i], 2.0);
        size += std::pow(on_cpu[i], 2.0);
    }
    error = std::sqrt(error / size);

    // And back: the GPU's pages are poisoned, refilled from the CPU's, and give the same bits as before.
    cudaMemset(gpu.key_pages, 0xff, pages * gpu.key_page_bytes);
    cudaMemset(gpu.value_pages, 0xff, pages * gpu.value_page_bytes);
    for (int i = 0; i < pages; ++i) {
        cudaMemcpy(gpu.key_pages + i * gpu.key_page_bytes, key_pages[i]->data(), gpu.key_page_bytes,
                   cudaMemcpyHostToDevice);
        cudaMemcpy(gpu.value_pages + i * gpu.value_page_bytes, value_pages[i]->data(), gpu.value_page_bytes,
                   cudaMemcpyHostToDevice);
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
