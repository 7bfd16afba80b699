// SPDX-License-Identifier: MIT
// What bench/gpu calls beyond the emulated kernels: `scripts/gpu-test --syntax` reads the benchmarks, nothing
// runs them.
#pragma once

#include "cuda_runtime.h"

cudaError_t cudaEventCreate(cudaEvent_t*);
cudaError_t cudaEventSynchronize(cudaEvent_t);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to);
uint4 __ldcs(const uint4*);
void __stcs(uint4*, uint4);
