// SPDX-License-Identifier: MIT
// Structs that kernels take by value. A kernel's name says how many bytes its parameter has on the host;
// parameter_sizes.py compares that with the PTX, since nvcc may lay out a parameter otherwise. No emulator
// sees it.
#include <kvq/cuda.cuh>

#include "../../bench/baselines/nvfp4.hpp"

namespace parameter_sizes {

using namespace kvq;

template <unsigned HostBytes, class Parameter>
__global__ void kernel_parameter(Parameter) {}

template <class Pair>
void launch() {
    using cache = cuda::cache_ref<Pair>;
    using attention = cuda::detail::attention_args<Pair, float16>;
    kernel_parameter<sizeof(cache)><<<1, 1>>>(cache{});
    kernel_parameter<sizeof(attention)><<<1, 1>>>(attention{});
}

template void launch<cuda::block_pair<full<float16>, full<float16>, 128, 64>>();
template void launch<cuda::preset_pair<std4, 128>>();
template void launch<cuda::preset_pair<low3, 128>>();
template void launch<cuda::preset_pair<std4_h, 128>>();
template void launch<cuda::block_pair<baselines::nvfp4_rows, baselines::nvfp4_rows, 128, 64>>();

}  // namespace parameter_sizes
