// Launches of the engine's own kernels, device memory with an owner, errors as exceptions.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace llama::device {

inline void check(cudaError_t code, const char* what) {
    if (code == cudaSuccess) return;
    (void)cudaGetLastError();
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, cudaStream_t stream,
            const Arguments&... arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "launching a kernel");
}

template <class T>
class device_buffer {
public:
    device_buffer() = default;
    explicit device_buffer(std::size_t size) : size_(size) {
        if (size > 0 && cudaMalloc(&data_, size * sizeof(T)) != cudaSuccess) {
            (void)cudaGetLastError();
            throw std::runtime_error("the device has no " + std::to_string(size * sizeof(T)) + " bytes left");
        }
    }
    device_buffer(device_buffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    device_buffer& operator=(device_buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~device_buffer() {
        if (data_ != nullptr) (void)cudaFree(data_);
    }

    T* get() const { return data_; }
    std::size_t size() const { return size_; }
    std::size_t bytes() const { return size_ * sizeof(T); }

private:
    T* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace llama::device
