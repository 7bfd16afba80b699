// What every call of the CUDA backend returns: a cudaError_t and one readable sentence.
//
//   if (auto s = kvq::cuda::attend(...); !s) std::fputs(s.message, stderr);
//
// Contract: shapes and pointers are checked before anything is launched; a call that reports
// cudaErrorInvalidValue has not touched the stream. Errors of kernels themselves arrive later, as with every
// launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>

#include "../../config.hpp"
#include "../arch/architecture.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

struct [[nodiscard]] status {
    cudaError_t code = cudaSuccess;
    char message[192] = "";

    explicit operator bool() const noexcept { return code == cudaSuccess; }
};

namespace detail {

template <class... Numbers>
inline status bad_value(const char* format, Numbers... numbers) noexcept {
    status s;
    s.code = cudaErrorInvalidValue;
    if constexpr (sizeof...(Numbers) == 0)
        std::snprintf(s.message, sizeof s.message, "kvq: %s", format);
    else {
        const int n = std::snprintf(s.message, sizeof s.message, "kvq: ");
        std::snprintf(s.message + n, sizeof s.message - static_cast<std::size_t>(n), format, numbers...);
    }
    return s;
}

/// An error of the runtime. The caller has its code, so it is not left for somebody's next
/// cudaGetLastError().
inline status runtime_error(cudaError_t code, const char* what) noexcept {
    (void)cudaGetLastError();
    status s;
    s.code = code;
    std::snprintf(s.message, sizeof s.message, "kvq: %s: %s", what, cudaGetErrorString(code));
    return s;
}

/// May the blocks of a launch take their places while the stream's previous kernel runs out? Then the kernel
/// itself waits (wait_for_predecessor) before it touches what that one may write.
enum class overlap { no, yes };

/// Launches a kernel. The status is that of this launch, whatever error others have left behind.
template <class... Parameters, class... Arguments>
inline status launch(const char* what, overlap overlapped, void (*kernel)(Parameters...), dim3 grid,
                     int threads, std::size_t shared, cudaStream_t stream,
                     const Arguments&... arguments) noexcept {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs =
        overlapped == overlap::yes && lacks(compute_capability(), feature::early_launch) == 0 ? 1 : 0;
    const cudaError_t code = cudaLaunchKernelEx(&config, kernel, arguments...);
    return code == cudaSuccess ? status{} : runtime_error(code, what);
}

}  // namespace detail
}}}  // namespace kvq::cuda
