// Learned sinks behind attention, from its log-sums: one more score without a value in each softmax sum, exp(sink) more in its denominator.
//
//   out *= 1 / (1 + exp(sink - lse)),   lse = log(exp(lse) + exp(sink))
//
// So attention of decode steps needs no kernels of its own for them. One block for each token and query head; outputs are rounded once more.
#pragma once

#include "objects.cuh"

namespace kvq::c {

inline constexpr int sink_threads = 64;

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

/// out: of the type of a window.
inline void add_learned_sinks(const output_view& out, const float* sinks, float* lse, cudaStream_t stream) {
    if (out.tokens == 0 || out.heads == 0) return;
    const auto add = [&]<class T>(const token_view<T>& rows) {
        check(cuda::detail::launch(
            "launching learned sinks", cuda::detail::overlap::no, add_learned_sinks_kernel<T>,
            dim3(static_cast<unsigned>(rows.tokens), static_cast<unsigned>(rows.heads)), sink_threads, 0,
            stream, rows, sinks, lse));
    };
    out.type == float_type::fp16 ? add(out.as<float16>()) : add(out.as<bfloat16>());
}

/// What attention by append() and attend() needs for them, and for ALiBi.
inline void expect_modifiers(const kvq_cuda_attend_options& o, bool alibi) {
    expect(o.sink_logits == nullptr || o.lse != nullptr, KVQ_ERROR_HANDLE,
           "options.sink_logits needs options.lse, which is NULL");
    expect(alibi || o.alibi_slopes == nullptr, KVQ_ERROR_ARGUMENT,
           "options.alibi_slopes needs a cache with kernels for them: kvq_cuda_cache_options.alibi");
    expect(!alibi || o.alibi_slopes != nullptr, KVQ_ERROR_HANDLE,
           "the cache has kernels with ALiBi, but options.alibi_slopes is NULL");
}

}  // namespace kvq::c
