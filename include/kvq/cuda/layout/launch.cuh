// Launching a kernel: the one place that calls cudaLaunchKernelEx.
//
// Contract: a call that fails leaves no error of the runtime behind. Errors of kernels themselves arrive
// later.
#pragma once

#include <cuda_runtime_api.h>

#include "../arch/architecture.cuh"
#include "status.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// May the blocks of a launch take their places while the stream's previous kernel runs out? Then the kernel
/// itself waits (wait_for_predecessor) before it touches what that one may write.
enum class overlap { no, yes };

/// Launches a kernel. The status is that of this launch, whatever error others have left behind. Cluster:
/// blocks side by side that see each other's shared memory.
template <int Cluster = 1, class... Parameters, class... Arguments>
inline status launch(const char* what, overlap overlapped, void (*kernel)(Parameters...), dim3 grid,
                     int threads, std::size_t shared, cudaStream_t stream,
                     const Arguments&... arguments) noexcept {
    cudaLaunchAttribute attributes[2] = {};
    unsigned count = 0;
    if (overlapped == overlap::yes && lacks(compute_capability(), feature::early_launch) == 0) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if constexpr (Cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count++].val.clusterDim = {Cluster, 1, 1};
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    const cudaError_t code = cudaLaunchKernelEx(&config, kernel, arguments...);
    return code == cudaSuccess ? status{} : runtime_error(code, what);
}

}}}  // namespace kvq::cuda::detail
