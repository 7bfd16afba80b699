// Kernels of the C interface: learned sinks behind attention, from its log-sums: one more score without a
// value in each softmax sum, exp(sink) more in its denominator.
//
//   out *= 1 / (1 + exp(sink - lse)),   lse = log(exp(lse) + exp(sink))
//
// So attention of decode steps needs no kernels of its own for them. One block for each token and query head;
// outputs are rounded once more.
#include "device_code.hpp"

#include <kvq/core/token_view.hpp>
#include <kvq/cuda/arch/architecture.cuh>
#include <kvq/cuda/arch/ptx.cuh>
#include <kvq/cuda/layout/launch.cuh>

namespace kvq::c {

namespace {

constexpr int sink_threads = 64;

template <class T>
__global__ void __launch_bounds__(sink_threads)
    add_learned_sinks_kernel(token_view<T> out, const float* sinks, float* lse) {
    const int token = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
    float& sum = lse[static_cast<std::size_t>(token) * static_cast<std::size_t>(out.heads) +
                     static_cast<std::size_t>(head)];
    const float before = sum, sink = sinks[head];
    if (before == -INFINITY) return;  // a row that sees nothing
    const float top = fmaxf(before, sink), total = expf(before - top) + expf(sink - top);
    const float factor = expf(before - top) / total;
    T* const row = out.at(token, head);
    for (int c = static_cast<int>(threadIdx.x); c < out.dim; c += sink_threads)
        row[c] = cuda::detail::from_float<T>(cuda::detail::to_float(row[c]) * factor);
    __syncthreads();
    if (threadIdx.x == 0) sum = top + logf(total);
}

template <class T>
cudaError_t add_to(const device_rows& out, const float* sinks, float* lse, cudaStream_t stream) {
    const token_view<T> rows(static_cast<T*>(out.data), out.tokens, out.heads, out.dim, out.token_stride,
                             out.head_stride);
    return cuda::detail::launch("launching learned sinks", cuda::detail::overlap::no,
                                add_learned_sinks_kernel<T>,
                                dim3(static_cast<unsigned>(out.tokens), static_cast<unsigned>(out.heads)),
                                sink_threads, 0, stream, rows, sinks, lse)
        .code;
}

}  // namespace

cudaError_t add_learned_sinks(const device_rows& out, const float* sinks, float* lse, cudaStream_t stream) {
    if (out.tokens == 0 || out.heads == 0) return cudaSuccess;
    return (out.bf16 ? &add_to<bfloat16> : &add_to<float16>)(out, sinks, lse, stream);
}

shared_memory_facts shared_memory_of_kernels() noexcept {
    return {cuda::detail::targets().small ? 0 : cuda::detail::sm_80.shared_memory,
            cuda::detail::device_shared_memory()};
}

}  // namespace kvq::c
