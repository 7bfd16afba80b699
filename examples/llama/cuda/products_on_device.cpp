#include "products_on_device.hpp"

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

namespace llama {
namespace {

void check(cudaError_t code) {
    if (code != cudaSuccess) {
        throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(code));
    }
}
void check(cublasStatus_t code) {
    if (code != CUBLAS_STATUS_SUCCESS) {
        throw std::runtime_error(std::string("cuBLAS: ") + cublasGetStatusString(code));
    }
}

// Memory that grows: on the device, and of the host in pages that the device reads by itself.
struct floats {
    float *device = nullptr, *host = nullptr;
    std::size_t size = 0;

    void reserve(std::size_t count) {
        if (count > size) {
            release();
            check(cudaMalloc(&device, count * sizeof(float)));
            check(cudaMallocHost(&host, count * sizeof(float)));
            size = count;
        }
    }
    void release() {
        cudaFree(device);
        cudaFreeHost(host);
        device = host = nullptr;
        size = 0;
    }
};

class cublas_products final : public product_device {
public:
    cublas_products() { check(cublasCreate(&handle_)); }
    ~cublas_products() override {
        for (const auto& [bytes, weights] : weights_) {
            cudaFree(weights);
        }
        x_.release();
        out_.release();
        cublasDestroy(handle_);
    }

    void multiply(const stored_matrix& weights, const Eigen::Ref<const matrix>& x, Eigen::Ref<matrix> out,
                  bool add, kvq::thread_pool& workers) override {
        const float one = 1.0F, old = add ? 1.0F : 0.0F;
        const float* const w = on_device(weights, workers);
        const auto rows = static_cast<int>(x.rows()), inputs = static_cast<int>(weights.inputs),
                   outputs = static_cast<int>(weights.outputs);
        x_.reserve(static_cast<std::size_t>(x.size()));
        out_.reserve(static_cast<std::size_t>(out.size()));
        for_each_row(x.rows(), workers, [&](Eigen::Index row) {
            std::memcpy(x_.host + row * inputs, x.row(row).data(),
                        sizeof(float) * static_cast<std::size_t>(inputs));
            if (add) {
                std::memcpy(out_.host + row * outputs, out.row(row).data(),
                            sizeof(float) * static_cast<std::size_t>(outputs));
            }
        });
        copy(x_.device, x_.host, x.size(), cudaMemcpyHostToDevice);
        if (add) {
            copy(out_.device, out_.host, out.size(), cudaMemcpyHostToDevice);
        }
        check(cublasSgemm(handle_, CUBLAS_OP_T, CUBLAS_OP_N, outputs, rows, inputs, &one, w, inputs,
                          x_.device, inputs, &old, out_.device, outputs));
        copy(out_.host, out_.device, out.size(), cudaMemcpyDeviceToHost);
        check(cudaStreamSynchronize(nullptr));
        for_each_row(out.rows(), workers, [&](Eigen::Index row) {
            std::memcpy(out.row(row).data(), out_.host + row * outputs,
                        sizeof(float) * static_cast<std::size_t>(outputs));
        });
    }

private:
    template <class Work>
    static void for_each_row(Eigen::Index rows, kvq::thread_pool& workers, const Work& work) {
        constexpr Eigen::Index part = 32;
        workers.parallel_for(static_cast<int>((rows + part - 1) / part), [&](int index) {
            for (Eigen::Index row = index * part; row < std::min(rows, (index + 1) * part); ++row) {
                work(row);
            }
        });
    }

    static void copy(float* to, const float* from, Eigen::Index count, cudaMemcpyKind kind) {
        check(cudaMemcpyAsync(to, from, sizeof(float) * static_cast<std::size_t>(count), kind, nullptr));
    }

    const float* on_device(const stored_matrix& stored, kvq::thread_pool& workers) {
        float*& weights = weights_[stored.bytes];
        if (!weights) {
            matrix values(stored.outputs, stored.inputs);
            for_each_row(stored.outputs, workers,
                         [&](Eigen::Index row) { stored.read_rows(row, 1, values.row(row).data()); });
            check(cudaMalloc(&weights, sizeof(float) * static_cast<std::size_t>(values.size())));
            copy(weights, values.data(), values.size(), cudaMemcpyHostToDevice);
            check(cudaStreamSynchronize(nullptr));
        }
        return weights;
    }

    cublasHandle_t handle_ = nullptr;
    std::map<const std::byte*, float*> weights_;  // by their place in the file
    floats x_, out_;
};

}  // namespace

std::shared_ptr<product_device> make_product_device() { return std::make_shared<cublas_products>(); }

}  // namespace llama
