// The door to caches on a GPU for programs without nvcc: the kernels are those of kvq::library.
//
//   kvq::cuda::cache cache;
//   auto s = cache.open(shape, {.formats = {"std4"}, .page_tokens = 128},
//                       kvq::cuda::library_formats(), stream);
//
// Needs the headers of the CUDA toolkit, C++20, and kvq::library built with KVQ_LIBRARY_CUDA, whose CMake
// options say which formats, head sizes and page sizes are compiled. Any compiler with the standard library
// that kvq::library was built with, any -march. docs/guide/gpu.md is the guide; cuda.cuh is the door for
// nvcc.
#pragma once

#include "cuda/host/cache.hpp"
