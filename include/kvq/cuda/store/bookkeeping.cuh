// Small kernels of a cache that owns its pages: tables and lengths to the device, pages from one number to
// another, slots of a prompt.
//
//   write_words   runs of ints that travel in the parameters of a launch: no pinned memory, no waiting, and
//                 what the host does with its memory afterwards does not matter
//   copy_pages    pages of all layers to other numbers of the same pool (a fork's window)
//   find_prompt_slots   for every token of a prompt the slot that store.cuh writes it to
//
// Contract: ordered by the stream. Lengths are read by launches that follow. The kernels are templates, so
// that several objects of a program may have them.
#pragma once

#include "../layout/launch.cuh"
#include "page_memory.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

template <int = 0>
__global__ void __launch_bounds__(128)
    write_words_kernel(const __grid_constant__ word_runs runs, int* words) {
    for (int at = 0; at < runs.count; at += 2 + runs.data[at + 1])
        for (int i = static_cast<int>(threadIdx.x); i < runs.data[at + 1]; i += static_cast<int>(blockDim.x))
            words[runs.data[at] + i] = runs.data[at + 2 + i];
}
inline status write_words(const word_runs& runs, int* words, cudaStream_t stream) noexcept {
    return launch("launching an update of tables", overlap::no, write_words_kernel<>, dim3(1), 128, 0, stream,
                  runs, words);
}

/// Block: a page, a layer, K or V.
template <int = 0>
__global__ void __launch_bounds__(256)
    copy_pages_kernel(const __grid_constant__ page_copies copies, pool_memory memory) {
    const tensor role = blockIdx.z == 0 ? tensor::key : tensor::value;
    const int layer = static_cast<int>(blockIdx.y);
    const auto* const from =
        reinterpret_cast<const uint4*>(memory.page(role, layer, copies.from[blockIdx.x]));
    auto* const to = reinterpret_cast<uint4*>(memory.page(role, layer, copies.to[blockIdx.x]));
    const auto words = static_cast<int>(memory.page_bytes(role) / sizeof(uint4));
    for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x)) to[i] = from[i];
}
inline status copy_pages(const page_copies& copies, const pool_memory& memory, int layers,
                         cudaStream_t stream) noexcept {
    if (copies.count == 0) return {};
    return launch("launching copies of pages", overlap::no, copy_pages_kernel<>,
                  dim3(static_cast<unsigned>(copies.count), static_cast<unsigned>(layers), 2), 256, 0, stream,
                  copies, memory);
}

template <int = 0>
__global__ void __launch_bounds__(256) prompt_slots_kernel(const __grid_constant__ prompt_slots prompt) {
    const auto& [ranges, before, sinks, page_tokens, ring, window, sink_pages, slot_list] = prompt;
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= ranges.count) return;
    const int position = before + i, token = position - sinks, page = token / page_tokens;
    long long slot;
    if (i < ranges.open)
        slot = static_cast<long long>(sink_pages[position / 16]) * 16 + position % 16;
    else if (i >= ranges.staged && i < ranges.kept)
        slot = static_cast<long long>(page - ranges.first_staged) * page_tokens + token % page_tokens;
    else
        slot = static_cast<long long>(window[page % ring]) * page_tokens + token % page_tokens;
    slot_list[i] = slot;
}
inline status find_prompt_slots(const prompt_slots& prompt, cudaStream_t stream) noexcept {
    return launch("launching the slots of a prompt", overlap::no, prompt_slots_kernel<>,
                  dim3(static_cast<unsigned>((prompt.ranges.count + 255) / 256)), 256, 0, stream, prompt);
}

}}}  // namespace kvq::cuda::detail
