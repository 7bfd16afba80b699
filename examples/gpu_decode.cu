// SPDX-License-Identifier: MIT
// A batch of sequences on the GPU: prompts, then decode steps that are captured in a CUDA graph once and
// replayed while contexts grow.
//
//   nvcc -std=c++20 -arch=native -Iinclude examples/gpu_decode.cu -o gpu_decode && ./gpu_decode [kivi-4-g64 |
//     int8]
//
// The format is chosen when the program runs, among those that it has compiled. 4 sinks and the 64 newest
// tokens stay in 16 bit.
#include <kvq/cuda.cuh>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace kvq;

constexpr int batch = 8, layers = 2, kv_heads = 8, q_heads = 32, dim = 128, prompt = 100, steps = 200;

static void check(cudaError_t code, const char* message = "") {
    if (code == cudaSuccess) return;
    std::fprintf(stderr, "%s (%s)\n", message, cudaGetErrorName(code));
    std::exit(1);
}
static void check(const cuda::status& s) { check(s.code, s.message); }

static float16* device(std::size_t n) {
    void* p = nullptr;
    check(cudaMalloc(&p, n * sizeof(float16)));
    return static_cast<float16*>(p);
}

int main(int argc, char** argv) {
    const cuda::device_format compiled[] = {
        cuda::make_device_format<float16, cuda::kivi_pair<4, 64, dim, 64>>(),
        cuda::make_device_format<float16, cuda::block_pair<int8, int8, dim, 64>>()};
    cudaStream_t stream;
    check(cudaStreamCreate(&stream));
    cuda::cache cache;
    check(
        cache.open({.layers = layers, .kv_heads = kv_heads, .head_dim = dim},
                   {.formats = {argc > 1 ? argv[1] : "kivi-4-g64"},
                    .page_tokens = 64,
                    .sinks = 4,
                    .recent = 64,
                    .max_batch = batch,
                    .pool_tokens = batch * (prompt + steps + 64),  // up front, so that the graph stays valid
                    .pool_sequences = batch},
                   compiled, stream));

    // What a model would hand over: k, v and q of new tokens. Here they are the same in all layers.
    constexpr int most = prompt;  // tokens
    const std::size_t kv_size = most * kv_heads * dim, q_size = batch * q_heads * dim;
    float16 *const k = device(kv_size), *const v = device(kv_size), *const q = device(q_size),
                   *const out = device(q_size);
    std::vector<float16> random(std::max(kv_size, q_size));
    const auto next_tokens = [&] {
        for (auto& x : random)
            x = float16(static_cast<float>(std::rand()) / static_cast<float>(RAND_MAX) - 0.5f);
        for (float16* to : {k, v})
            check(cudaMemcpyAsync(to, random.data(), kv_size * 2, cudaMemcpyHostToDevice, stream));
        check(cudaMemcpyAsync(q, random.data(), q_size * 2, cudaMemcpyHostToDevice, stream));
    };

    std::vector<cuda::sequence_id> sequences;
    for (int b = 0; b < batch; ++b) {
        sequences.push_back(cache.new_sequence());
        next_tokens();
        check(cache.begin_prompt(sequences.back(), prompt, stream));
        for (int layer = 0; layer < layers; ++layer)
            check(cache.append(layer, token_view<const float16>(k, prompt, kv_heads, dim),
                               token_view<const float16>(v, prompt, kv_heads, dim), stream));
    }

    // A decode step behind begin_step(): a launch a layer, which finds everything else on the device.
    const auto decode = [&] {
        for (int layer = 0; layer < layers; ++layer)
            check(cache.attend(layer, token_view<const float16>(k, batch, kv_heads, dim),
                               token_view<const float16>(v, batch, kv_heads, dim),
                               token_view<const float16>(q, batch, q_heads, dim),
                               token_view<float16>(out, batch, q_heads, dim), {.early = true}, stream));
    };
    cudaGraphExec_t replay = nullptr;
    std::uint64_t captured = 0;
    for (int i = 0; i < steps; ++i) {
        next_tokens();
        check(cache.begin_step(sequences, 1, stream));
        if (i == 0) {
            decode();  // kernels are loaded outside the capture
            continue;
        }
        if (replay == nullptr || captured != cache.graph_id()) {
            if (replay != nullptr) check(cudaGraphExecDestroy(replay));
            check(cudaStreamSynchronize(stream));
            check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            decode();
            cudaGraph_t graph;
            check(cudaStreamEndCapture(stream, &graph));
            check(cudaGraphInstantiate(&replay, graph, 0));
            check(cudaGraphDestroy(graph));
            captured = cache.graph_id();
        }
        check(cudaGraphLaunch(replay, stream));
    }
    std::vector<float16> result(q_size);
    check(cudaMemcpyAsync(result.data(), out, q_size * 2, cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
    bool finite = true;
    for (const float16 x : result) finite = finite && static_cast<float>(x) == static_cast<float>(x);
    const usage_report usage = cache.usage();
    std::printf("%d tokens x %d sequences in %s: %zu KB quantized, %zu KB in 16 bit, out[0] = %g\n",
                cache.tokens(sequences[0]), batch, cache.options().formats[0].c_str(), usage.quantized / 1024,
                (usage.window + usage.rollback) / 1024, static_cast<double>(static_cast<float>(result[0])));
    check(cudaGraphExecDestroy(replay));
    return finite ? 0 : 1;
}
