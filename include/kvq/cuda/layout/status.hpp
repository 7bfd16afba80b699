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

}  // namespace detail
}}}  // namespace kvq::cuda
