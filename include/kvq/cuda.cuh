// The door to the CUDA backend: all but `cache` takes device pointers and a stream, allocates nothing and
// never waits.
//
//   cache                owns its pages and tables: sequences, steps, trim, fork, requantize
//                        cuda/host/cache.hpp
//   make_device_format   the kernels of a format for such a cache
//                        cuda/host/make_device_format.cuh
//   offload, onload      a sequence of it to a cache on the CPU and back (a header of its own)
//                        cuda/host/offload.hpp
//   format, cache_ref    what pages hold and where they are
//                        cuda/layout/cache_ref.cuh
//   mixed_cache_ref      sequences whose pages have several formats
//                        cuda/layout/mixed_cache.cuh
//   store                new tokens into pages                                           cuda/store/store.cuh
//   store_new_tokens     the newest tokens into sinks and window
//                        cuda/store/store_new_tokens.cuh
//   commit_due_pages     pages that leave the window quantized, all layers at once
//                        cuda/quantize/commit_due_pages.cuh
//   commit_full_pages, requantize_pages, convert_pages, dequantize_tokens
//     cuda/quantize/pages.cuh
//   attend               fused attention over packed pages, of a step also with its new tokens
//                        cuda/decode/attend.cuh, attend_new_tokens.cuh
//   prefill              a prompt's attention over packed pages and over itself
//                        cuda/prefill/prefill.cuh
//   attend_latents       attention over latents that are stored once (MLA)
//                        cuda/latent/latent.cuh
//   attend_latent_lists  the same over lists of tokens
//                        cuda/latent/latent_lists.cuh
//   attend_lists         attention over lists of tokens
//                        cuda/decode/attend_lists.cuh
//   index_scores, select_top
//                        which tokens a model reads (headers of their own)
//                        cuda/select/index_scores.cuh, select_top.cuh
//
// Needs the CUDA toolkit, C++20 (nvcc -std=c++20) and compute capability 8.0. Pages are byte for byte those
// of the CPU, so they can be copied between both at any time. docs/reference/gpu_kernels.md has the layout as
// lanes see it, docs/lab/gpu.md measured figures.
#pragma once

#include "cuda.hpp"
#include "cuda/decode/attend_new_tokens.cuh"
#include "cuda/host/make_device_format.cuh"
#include "cuda/latent/latent_lists.cuh"
#include "cuda/prefill/prefill.cuh"
#include "cuda/quantize/commit_due_pages.cuh"
#include "cuda/quantize/convert.cuh"
#include "cuda/quantize/pages.cuh"
#include "cuda/store/store.cuh"
#include "cuda/store/store_new_tokens.cuh"
