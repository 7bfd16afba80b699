// Timing on the device: graph replay, medians of events, the read ceiling.
#pragma once

#include <kvq/core/float_formats.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <tuple>
#include <vector>

namespace bench {

#define BENCH_OK(call)                                                                             \
    do {                                                                                           \
        const cudaError_t code_ = (call);                                                          \
        if (code_ != cudaSuccess) {                                                                \
            std::fprintf(stderr, "line %d: %s: %s\n", __LINE__, #call, cudaGetErrorString(code_)); \
            std::exit(2);                                                                          \
        }                                                                                          \
    } while (0)

/// Ends the program where a kvq::cuda::status is an error.
template <class Status>
void check(const Status& status) {
    if (status) return;
    std::fprintf(stderr, "%s\n", status.message);
    std::exit(2);
}

/// Times of torch_sdpa.py in microseconds, by batch, tokens, query heads, kv heads and head_dim. A file that
/// is not there has none.
inline std::map<std::tuple<int, int, int, int, int>, double> read_baseline(const char* path) {
    std::map<std::tuple<int, int, int, int, int>, double> times;
    if (std::FILE* file = std::fopen(path, "r")) {
        int batch = 0, tokens = 0, q_heads = 0, kv_heads = 0, dim = 0;
        double us = 0.0;
        while (std::fscanf(file, "%d %d %d %d %d %lf", &batch, &tokens, &q_heads, &kv_heads, &dim, &us) == 6)
            times[{batch, tokens, q_heads, kv_heads, dim}] = us;
        std::fclose(file);
    }
    return times;
}

/// A copy on the device, with room for 16 bytes behind it.
template <class T>
T* on_device(const std::vector<T>& host) {
    T* device = nullptr;
    BENCH_OK(cudaMalloc(&device, host.size() * sizeof(T) + 16));
    BENCH_OK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return device;
}

/// Microseconds per launch: `launch(i, stream)` is captured `count` times, the graph replayed, the median
/// taken.
template <class F>
double time_launches(int count, F&& launch, int replays = 9) {
    cudaStream_t stream;
    BENCH_OK(cudaStreamCreate(&stream));
    launch(0, stream);  // function attributes and modules are loaded outside the capture
    BENCH_OK(cudaStreamSynchronize(stream));
    BENCH_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; ++i) launch(i, stream);
    cudaGraph_t graph;
    BENCH_OK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t exec;
    BENCH_OK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t from, to;
    BENCH_OK(cudaEventCreate(&from));
    BENCH_OK(cudaEventCreate(&to));
    std::vector<float> times;
    for (int i = 0; i < replays + 2; ++i) {
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
    BENCH_OK(cudaStreamDestroy(stream));
    std::sort(times.begin(), times.end());
    return 1000.0 * static_cast<double>(times[times.size() / 2]) / count;
}

__global__ void read_kernel(const uint4* from, std::size_t n, unsigned* to) {
    unsigned sum = 0;
    const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
    std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 3 * threads < n; i += 4 * threads) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) v[k] = __ldcs(from + i + static_cast<std::size_t>(k) * threads);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (sum == 0x12345678u) *to = sum;
}

__global__ void copy_kernel(const uint4* from, std::size_t n, uint4* to) {
    const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
    for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += threads)
        to[i] = from[i];
}

__global__ void random_kernel(std::uint32_t* to, std::size_t words, std::uint32_t seed) {
    const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
    for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words;
         i += threads) {
        std::uint32_t x = static_cast<std::uint32_t>(i) * 0x9e3779b9u + seed;
        x = (x ^ (x >> 16)) * 0x85ebca6bu;
        x = (x ^ (x >> 13)) * 0xc2b2ae35u;
        to[i] = x ^ (x >> 16);
    }
}

/// About normal fp16 numbers, in place of random bits.
__global__ void normal_kernel(std::uint32_t* words, std::size_t n) {
    const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
    for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
         i += threads) {
        std::uint32_t word = 0, x = words[i];
        for (int half = 0; half < 2; ++half) {
            int sum = -4 * 128;
            for (int k = 0; k < 4; ++k, x = x * 0x9e3779b9u + 0x7f4a7c15u) sum += static_cast<int>(x >> 24);
            word |= static_cast<std::uint32_t>(kvq::float16(static_cast<float>(sum) / 148.0f).bits)
                    << (16 * half);
        }
        words[i] = word;
    }
}

/// Fills `bytes` with about normal fp16 numbers.
inline void fill_normal(void* to, std::size_t bytes, std::uint32_t seed) {
    auto* const words = static_cast<std::uint32_t*>(to);
    random_kernel<<<1056, 256>>>(words, bytes / 4, seed);
    normal_kernel<<<1056, 256>>>(words, bytes / 4);
    BENCH_OK(cudaGetLastError());
}

struct ceilings {
    double read, copy;  // GB/s
};
/// Best of a few grids over `bytes` of `memory`.
inline ceilings measure_ceilings(std::byte* memory, std::size_t bytes) {
    ceilings c{0.0, 0.0};
    const std::size_t n = bytes / 16;
    for (const unsigned grid : {264u, 528u, 1056u, 2112u}) {
        const double us = time_launches(2, [&](int, cudaStream_t s) {
            read_kernel<<<grid, 512, 0, s>>>(reinterpret_cast<const uint4*>(memory), n,
                                             reinterpret_cast<unsigned*>(memory));
        });
        c.read = std::max(c.read, static_cast<double>(bytes) / us * 1e-3);
        const double copy_us = time_launches(2, [&](int, cudaStream_t s) {
            copy_kernel<<<grid, 512, 0, s>>>(reinterpret_cast<const uint4*>(memory), n / 2,
                                             reinterpret_cast<uint4*>(memory) + n / 2);
        });
        c.copy = std::max(c.copy, static_cast<double>(bytes) / copy_us * 1e-3);
    }
    return c;
}

}  // namespace bench
