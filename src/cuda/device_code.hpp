// What nvcc compiles for the C interface beside its formats (device_code.cu).
//
// Files for nvcc read the headers without KVQ_COMPILED (kvq/config.hpp), where views have other names. So
// these functions take numbers and pointers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace kvq::c {

/// Rows of outputs in the type of a window, bf16 or fp16, in device memory; strides in values.
struct device_rows {
    void* data;
    bool bf16;
    int tokens, heads, dim;
    std::ptrdiff_t token_stride, head_stride;
};

/// One more score without a value in each softmax sum, behind attention. lse: log-sums [tokens][heads];
/// sinks: a score of each head.
cudaError_t add_learned_sinks(const device_rows& out, const float* sinks, float* lse, cudaStream_t stream);

/// Bytes of shared memory that a thread block must be able to have for the kernels of this library, 0 if some
/// suit every device; and how many it can have on the current device, 0 if there is none.
struct shared_memory_facts {
    int least, has;
};
shared_memory_facts shared_memory_of_kernels() noexcept;

}  // namespace kvq::c
