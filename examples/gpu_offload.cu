// SPDX-License-Identifier: MIT
// Host offload: a sequence goes from the GPU to the CPU, is attended there, and comes back; nothing is
// converted.
//
//   nvcc -std=c++20 -arch=native -Iinclude examples/gpu_offload.cu -o gpu_offload && ./gpu_offload
//
// A GPU page and a CPU page hold the same bytes, so moving a sequence is copying its pages.
#include <kvq/cuda.cuh>
#include <kvq/cuda/host/offload.hpp>
#include <kvq/format/make_format.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace kvq;
using keys = affine<4, per_token<64>>;
using values = affine<4, per_token<64>>;
constexpr int kv_heads = 4, q_heads = 16, dim = 128, page_tokens = 64, tokens = 1000, sinks = 4, recent = 64;

static void check(cudaError_t code, const char* message = "") {
    if (code == cudaSuccess) return;
    std::fprintf(stderr, "%s (%s)\n", message, cudaGetErrorName(code));
    std::exit(1);
}
static void check(const cuda::status& s) { check(s.code, s.message); }

static float16* device(const std::vector<float16>& host) {
    void* p = nullptr;
    check(cudaMalloc(&p, host.size() * sizeof(float16)));
    check(cudaMemcpy(p, host.data(), host.size() * sizeof(float16), cudaMemcpyHostToDevice));
    return static_cast<float16*>(p);
}

int main() {
    const cuda::device_format compiled[] = {
        cuda::make_device_format<float16, cuda::block_pair<keys, values, dim, page_tokens>>()};
    const cache_shape shape{.layers = 1, .kv_heads = kv_heads, .head_dim = dim};
    cudaStream_t stream;
    check(cudaStreamCreate(&stream));
    cuda::cache gpu;
    check(gpu.open(
        shape, {.formats = {"affine-4-g64"}, .page_tokens = page_tokens, .sinks = sinks, .recent = recent},
        compiled, stream));
    cache cpu(shape, {.keys = make_format<keys, scalar>(),
                      .values = make_format<values, scalar>(),
                      .sinks = sinks,
                      .recent = recent,
                      .page_tokens = page_tokens});

    // A sequence of 1000 tokens on the GPU.
    const auto random = [](std::size_t n) {
        std::vector<float16> x(n);
        for (float16& v : x)
            v = float16(4.0f * static_cast<float>(std::rand()) / static_cast<float>(RAND_MAX) - 2.0f);
        return x;
    };
    float16* const k = device(random(tokens * kv_heads * dim));
    float16* const v = device(random(tokens * kv_heads * dim));
    cuda::sequence_id id = gpu.new_sequence();
    check(gpu.begin_prompt(id, tokens, stream));
    check(gpu.append(0, token_view<const float16>(k, tokens, kv_heads, dim),
                     token_view<const float16>(v, tokens, kv_heads, dim), stream));

    // Attention there.
    const std::vector<float16> q = random(q_heads * dim);
    float16 *const q_there = device(q), *const out = device(q);
    const auto attend_there = [&] {
        check(gpu.begin_step(std::span(&id, 1), 0, stream));
        check(gpu.attend(0, token_view<const float16>(q_there, 1, q_heads, dim),
                         token_view<float16>(out, 1, q_heads, dim), {}, stream));
        std::vector<float16> result(q.size());
        check(cudaStreamSynchronize(stream));
        check(cudaMemcpy(result.data(), out, result.size() * sizeof(float16), cudaMemcpyDeviceToHost));
        return result;
    };
    const std::vector<float16> on_gpu = attend_there();

    // To the CPU: its memory on the GPU is free for others.
    sequence on_host = cpu.new_sequence();
    check(cuda::offload(gpu, id, on_host, stream));
    check(gpu.free(id));
    std::vector<float> on_cpu(q.size());
    on_host.attend(0, token_view<const float16>(q.data(), 1, q_heads, dim),
                   token_view<float>(on_cpu.data(), 1, q_heads, dim));
    double error = 0.0, size = 0.0;
    for (std::size_t i = 0; i < q.size(); ++i) {
        error += std::pow(static_cast<float>(on_gpu[i]) - on_cpu[i], 2.0);
        size += std::pow(on_cpu[i], 2.0);
    }
    error = std::sqrt(error / size);

    // And back: the same bits as before.
    check(cuda::onload(on_host, gpu, id, stream));
    const std::vector<float16> again = attend_there();
    const bool same = std::equal(again.begin(), again.end(), on_gpu.begin(),
                                 [](float16 a, float16 b) { return a.bits == b.bits; });
    std::printf("GPU against CPU: %.2e; after the way back: %s\n", error,
                same ? "the same bits" : "DIFFERENT");
    return error < 2e-3 && same ? 0 : 1;
}
