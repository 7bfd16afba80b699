// Device memory of caches in tests, with a count of its bytes. It is poisoned: NaN in every float format.
#pragma once

#include <kvq/cuda/host/cache.hpp>

#include "support.cuh"

namespace test {

struct counted_memory {
    static inline std::size_t bytes = 0, limit = std::size_t{1} << 40;
    static kvq::cuda::device_allocator allocator() {
        kvq::cuda::device_allocator a;
        a.allocate = [](std::size_t n, void*) -> void* {
            void* p = nullptr;
            if (bytes + n > limit || cudaMalloc(&p, n) != cudaSuccess) return nullptr;
            CUDA_OK(cudaMemset(p, 0xff, n));
            bytes += n;
            return p;
        };
        a.release = [](void* p, std::size_t n, void*) {
            CUDA_OK(cudaFree(p));
            bytes -= n;
        };
        return a;
    }
};

}  // namespace test
