// Matrix products on the device: y = x W^T by cuBLAS. Where kernels are emulated there is no cuBLAS, and a
// plain kernel takes its place.
#pragma once

#include <kvq/core/float_formats.hpp>

#include <cuda_runtime.h>

#ifdef __CUDACC__
#include <cublas_v2.h>
#endif

#include "launch.cuh"

#include <type_traits>

namespace llama::device {

#ifdef __CUDACC__

template <class T>
inline constexpr cudaDataType_t cuda_type = std::is_same_v<T, float>          ? CUDA_R_32F
                                            : std::is_same_v<T, kvq::float16> ? CUDA_R_16F
                                                                              : CUDA_R_16BF;

class products {
public:
    static constexpr std::size_t workspace_bytes = std::size_t{32} << 20;

    explicit products(cudaStream_t stream) : workspace_(workspace_bytes) {
        check(cublasCreate(&handle_));
        check(cublasSetStream(handle_, stream));
        check(cublasSetWorkspace(handle_, workspace_.get(), workspace_bytes));
    }
    products(const products&) = delete;
    products& operator=(const products&) = delete;
    ~products() { cublasDestroy(handle_); }

    // x: [rows][inputs], weights: [outputs][inputs], y: [rows][outputs], y += if `add`.
    template <class T, class Y>
    void multiply(const T* x, int rows, const T* weights, int outputs, int inputs, Y* y, bool add) {
        const float one = 1.0f, old = add ? 1.0f : 0.0f;
        check(cublasGemmEx(handle_, CUBLAS_OP_T, CUBLAS_OP_N, outputs, rows, inputs, &one, weights,
                           cuda_type<T>, inputs, x, cuda_type<T>, inputs, &old, y, cuda_type<Y>, outputs,
                           CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    }

private:
    static void check(cublasStatus_t code) {
        if (code != CUBLAS_STATUS_SUCCESS)
            throw std::runtime_error(std::string("cuBLAS: ") + cublasGetStatusString(code));
    }

    cublasHandle_t handle_ = nullptr;
    device_buffer<std::byte> workspace_;
};

#else

template <class T, class Y>
__global__ void product_kernel(const T* x, const T* weights, int outputs, int inputs, Y* y, bool add) {
    const int output = static_cast<int>(blockIdx.y * 32 + threadIdx.x);
    if (output >= outputs) return;
    const std::size_t row = blockIdx.x;
    float sum = 0.0f;
    for (int i = 0; i < inputs; ++i)
        sum += static_cast<float>(x[row * static_cast<std::size_t>(inputs) + i]) *
               static_cast<float>(
                   weights[static_cast<std::size_t>(output) * static_cast<std::size_t>(inputs) + i]);
    Y& to = y[row * static_cast<std::size_t>(outputs) + output];
    to = Y((add ? static_cast<float>(to) : 0.0f) + sum);
}

class products {
public:
    static constexpr std::size_t workspace_bytes = 0;

    explicit products(cudaStream_t stream) : stream_(stream) {}

    template <class T, class Y>
    void multiply(const T* x, int rows, const T* weights, int outputs, int inputs, Y* y, bool add) {
        launch(product_kernel<T, Y>,
               dim3(static_cast<unsigned>(rows), static_cast<unsigned>((outputs + 31) / 32)), 32, stream_, x,
               weights, outputs, inputs, y, add);
    }

private:
    cudaStream_t stream_;
};

#endif

}  // namespace llama::device
