// As much of CUDA as kvq's kernels and their tests use, on the CPU (engine.hpp). Stands in for the toolkit's
// header.
#pragma once

#include <cmath>
#include <functional>
#include <mutex>
#include <type_traits>

#include "engine.hpp"

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local

using emulated::blockDim, emulated::blockIdx, emulated::gridDim, emulated::threadIdx;

struct alignas(8) uint2 {
    std::uint32_t x, y;
};
struct alignas(16) uint4 {
    std::uint32_t x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

// ---- functions of the device ----

inline void __syncwarp(unsigned = ~0u) { emulated::meet(emulated::meeting::warp); }
inline void __syncthreads() { emulated::wait_at_barrier(0, 0); }
inline void __threadfence() {}
inline int __syncthreads_count(int value) {
    emulated::wait_at_barrier(0, 0, value);
    return emulated::thread->votes;
}
inline int __syncthreads_or(int value) {
    emulated::wait_at_barrier(0, 0, value);
    return emulated::thread->any;
}
inline int __syncthreads_and(int value) {
    emulated::wait_at_barrier(0, 0, value);
    return emulated::thread->all;
}

template <class T>
T emulated_shuffle(T value, int from) {
    std::uint32_t words[2] = {};
    static_assert(sizeof(T) <= sizeof words);
    std::memcpy(words, &value, sizeof value);
    const auto all = emulated::exchange(emulated::meeting::shuffle, words[0], words[1]);
    std::memcpy(&value, all[from & 31], sizeof value);
    return value;
}
template <class T>
T __shfl_sync(unsigned, T value, int lane, int width = emulated::warp_size) {
    return emulated_shuffle(value, (emulated::thread->lane & ~(width - 1)) | (lane & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulated_shuffle(value, emulated::thread->lane ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
    const int lane = emulated::thread->lane;
    return emulated_shuffle(value, lane >= distance ? lane - distance : lane);
}
inline unsigned __ballot_sync(unsigned, int value) {
    const auto words = emulated::exchange(emulated::meeting::vote, value != 0);
    unsigned bits = 0;
    for (int i = 0; i < emulated::warp_size; ++i) bits |= words[i][0] << i;
    return bits;
}
inline int __any_sync(unsigned mask, int value) { return __ballot_sync(mask, value) != 0; }
inline int __all_sync(unsigned mask, int value) { return __ballot_sync(mask, value) == ~0u; }
template <class T, class F>
T emulated_reduce(T value, F&& f) {
    const auto words = emulated::exchange(emulated::meeting::vote, value);
    for (int i = 0; i < emulated::warp_size; ++i)
        if (i != emulated::thread->lane) value = f(value, static_cast<T>(words[i][0]));
    return value;
}
template <class T>
T __reduce_max_sync(unsigned, T value) {
    return emulated_reduce(value, [](T a, T b) { return a > b ? a : b; });
}
template <class T>
T __reduce_min_sync(unsigned, T value) {
    return emulated_reduce(value, [](T a, T b) { return a < b ? a : b; });
}
template <class T>
T __reduce_add_sync(unsigned, T value) {
    return emulated_reduce(value, [](T a, T b) { return a + b; });
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
    return emulated_reduce(value, [](unsigned a, unsigned b) { return a | b; });
}

template <class To, class From>
To emulated_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &value, sizeof to);
    return to;
}
inline std::uint32_t __float_as_uint(float x) { return emulated_bits<std::uint32_t>(x); }
inline int __float_as_int(float x) { return emulated_bits<int>(x); }
inline float __uint_as_float(std::uint32_t x) { return emulated_bits<float>(x); }
inline float __int_as_float(int x) { return emulated_bits<float>(x); }
inline double __hiloint2double(int high, int low) {
    return emulated_bits<double>(std::uint64_t{static_cast<std::uint32_t>(high)} << 32 |
                                 static_cast<std::uint32_t>(low));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(std::uint64_t{a} * b >> 32); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline std::uint32_t __funnelshift_l(std::uint32_t low, std::uint32_t high, int shift) {
    return static_cast<std::uint32_t>((std::uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline std::uint32_t __byte_perm(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
    const std::uint64_t bytes = std::uint64_t{b} << 32 | a;
    std::uint32_t result = 0;
    for (int i = 0; i < 4; ++i)
        result |= static_cast<std::uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; ++i)
        sum += static_cast<std::int8_t>(a >> 8 * i) * static_cast<std::int8_t>(b >> 8 * i);
    return sum;
}
/// Every look at the clock takes a while.
inline long long clock64() {
    static thread_local long long now = 0;
    return now += 1000;
}
template <class T>
T __ldg(const T* p) {
    return *p;
}
template <class T>
T __ldcg(const T* p) {
    return *p;
}
template <class T>
T atomicAdd(T* p, T value) {
    return std::exchange(*p, static_cast<T>(*p + value));
}
inline unsigned atomicAnd(unsigned* p, unsigned value) { return std::exchange(*p, *p & value); }
inline unsigned atomicOr(unsigned* p, unsigned value) { return std::exchange(*p, *p | value); }

// ---- functions of the host ----

enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorInvalidConfiguration,
    cudaErrorMemoryAllocation,
    cudaErrorNotReady,
    cudaErrorTimeout,
    cudaErrorPeerAccessAlreadyEnabled,
    cudaErrorUnknown
};
inline const char* cudaGetErrorString(cudaError_t code) {
    return code == cudaSuccess ? "no error" : "emulated error";
}
inline const char* cudaGetErrorName(cudaError_t code) { return cudaGetErrorString(code); }
inline cudaError_t emulated_last_error = cudaSuccess;
inline cudaError_t cudaGetLastError() { return std::exchange(emulated_last_error, cudaSuccess); }
inline cudaError_t cudaPeekAtLastError() { return emulated_last_error; }

using emulated_graph = std::vector<std::function<void()>>;
struct emulated_stream {
    emulated_graph* capture = nullptr;
    bool blocks = true;  // waits for the default stream
    bool stuck = false;  // behind a message that does not come (nccl.h)
};
using cudaStream_t = emulated_stream*;
using cudaGraph_t = emulated_graph*;
using cudaGraphExec_t = emulated_graph*;
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal };
inline constexpr unsigned cudaStreamNonBlocking = 1;

/// cudaMemcpy to the device may return before the device has the numbers. Here they come as late as they may:
/// when the default stream is waited for, also by a stream that blocks.
class emulated_late_copies {
public:
    void add(void* to, const void* from, std::size_t bytes) {
        const auto* const first = static_cast<const std::byte*>(from);
        const std::lock_guard lock(mutex_);
        copies_.push_back({to, {first, first + bytes}});
    }
    void finish() {
        const std::lock_guard lock(mutex_);
        for (const copy& c : copies_) std::memcpy(c.to, c.bytes.data(), c.bytes.size());
        copies_.clear();
    }
    void finish_before(cudaStream_t stream) {
        if (stream == nullptr || stream->blocks) finish();
    }

private:
    struct copy {
        void* to;
        std::vector<std::byte> bytes;
    };
    std::mutex mutex_;
    std::vector<copy> copies_;
};
inline emulated_late_copies emulated_late;

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    *stream = new emulated_stream;
    (*stream)->blocks = flags != cudaStreamNonBlocking;
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    emulated_late.finish_before(stream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return stream != nullptr && stream->stuck ? cudaErrorNotReady : cudaSuccess;
}
// Launches take place at once, so events have nothing to do but to pass on that a stream is stuck.
struct emulated_event {
    bool stuck = false;
};
using cudaEvent_t = emulated_event*;
inline constexpr unsigned cudaEventDisableTiming = 2;
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new emulated_event;
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->stuck = stream != nullptr && stream->stuck;
    return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
    stream->stuck = stream->stuck || event->stuck;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
    emulated_late.finish();
    return cudaSuccess;
}
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    const bool captured = stream != nullptr && stream->capture != nullptr;
    *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    stream->capture = new emulated_graph;
    return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    *graph = std::exchange(stream->capture, nullptr);
    return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    *exec = new emulated_graph(*graph);
    return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    emulated_late.finish_before(stream);
    for (const auto& launch : *exec) launch();
    return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete exec;
    return cudaSuccess;
}

template <class T>
cudaError_t cudaMalloc(T** p, std::size_t bytes) {
    *p = bytes < std::size_t{1} << 40 ? static_cast<T*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256))
                                      : nullptr;
    return *p != nullptr ? cudaSuccess : emulated_last_error = cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void* p) {
    emulated_late.finish();
    std::free(p);
    return cudaSuccess;
}
template <class T>
cudaError_t cudaMallocHost(T** p, std::size_t bytes) {
    return cudaMalloc(p, bytes);
}
inline cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
inline cudaError_t cudaMemsetAsync(void* p, int value, std::size_t bytes, cudaStream_t stream) {
    emulated_late.finish_before(stream);
    std::memset(p, value, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemset(void* p, int value, std::size_t bytes) {
    return cudaMemsetAsync(p, value, bytes, nullptr);
}
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
    emulated_late.finish_before(stream);
    if (bytes > 0) std::memcpy(to, from, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                                     std::size_t width, std::size_t height, cudaMemcpyKind kind,
                                     cudaStream_t stream) {
    for (std::size_t i = 0; i < height; ++i)
        (void)cudaMemcpyAsync(static_cast<std::byte*>(to) + i * to_pitch,
                              static_cast<const std::byte*>(from) + i * from_pitch, width, kind, stream);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    if (kind != cudaMemcpyHostToDevice) return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    if (bytes > 0) emulated_late.add(to, from, bytes);
    return cudaSuccess;
}

enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor
};
inline cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
    *free = *total = std::size_t{1} << 34;
    return cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
// Ranks are threads of one process.
struct cudaIpcMemHandle_t {};
inline constexpr unsigned cudaIpcMemLazyEnablePeerAccess = 1;
inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaSuccess; }
inline cudaError_t cudaIpcOpenMemHandle(void**, const cudaIpcMemHandle_t&, unsigned) {
    return cudaErrorInvalidValue;
}
inline cudaError_t cudaIpcCloseMemHandle(void*) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    // Of compute capability 8.9, unless it has more shared memory than that.
    const bool large = emulated::device_shared_memory > 99 * 1024;
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount:
            *value = 3;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = static_cast<int>(emulated::device_shared_memory);
            break;
        case cudaDevAttrComputeCapabilityMajor:
            *value = large ? 9 : 8;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = large ? 0 : 9;
            break;
    }
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
    return cudaSuccess;
}
struct cudaFuncAttributes {
    std::size_t sharedSizeBytes;
    int maxThreadsPerBlock;
};
/// No kernel has shared memory of its own, or, unless the program says so, code for sm_90a: those that need
/// it are empty, with a bound of one warp.
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
    *attributes = {};
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    attributes->maxThreadsPerBlock = 1024;
#else
    attributes->maxThreadsPerBlock = 32;
#endif
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, std::size_t) {
    *blocks = 1;
    return cudaSuccess;
}

enum cudaLaunchAttributeID {
    cudaLaunchAttributeProgrammaticStreamSerialization,
    cudaLaunchAttributeClusterDimension
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int programmaticStreamSerializationAllowed;
        struct {
            unsigned x, y, z;
        } clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    std::size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
    if (config->dynamicSmemBytes > emulated::device_shared_memory || config->gridDim.x == 0)
        return cudaErrorInvalidConfiguration;
    if (cudaStreamQuery(config->stream) != cudaSuccess) return cudaSuccess;
    emulated_late.finish_before(config->stream);
    int blocks = 1;  // of a cluster
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
            blocks = static_cast<int>(config->attrs[i].val.clusterDim.x);
    const auto launch = [call = [=] { kernel(static_cast<const std::decay_t<Parameters>&>(arguments)...); },
                         grid = config->gridDim, threads = config->blockDim,
                         shared_bytes = config->dynamicSmemBytes, blocks] {
        using kernel_call = decltype(call);
        emulated::run_grid(
            grid, threads, shared_bytes, [](const void* c) { (*static_cast<const kernel_call*>(c))(); },
            &call, blocks);
    };
    if (config->stream != nullptr && config->stream->capture != nullptr)
        config->stream->capture->push_back(launch);
    else
        launch();
    return cudaSuccess;
}
