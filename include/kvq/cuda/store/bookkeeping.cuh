// Small kernels of a cache that owns its pages: tables and lengths to the device, pages from one number to
// another, slots of a prompt.
//
//   write_words   runs of ints that travel in the parameters of a launch: no pinned memory, no waiting, and what the host does
//                 with its memory afterwards does not matter
//   copy_pages    pages of all layers to other numbers of the same pool (a fork's window)
//   prompt_slots  for every token of a prompt the slot that store.cuh writes it to
//
// Contract: ordered by the stream. Lengths are read by launches that follow. The kernels are templates, so
// that several objects of a program may have them.
#pragma once

#include "../layout/status.cuh"
#include "store.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Runs of words: index of the first one, their count, the words.
struct word_runs {
    static constexpr int room = 960;
    int count = 0;
    int data[room];
};
template <int = 0>
__global__ void __launch_bounds__(128)
    write_words_kernel(const __grid_constant__ word_runs runs, int* words) {
    for (int at = 0; at < runs.count; at += 2 + runs.data[at + 1])
        for (int i = static_cast<int>(threadIdx.x); i < runs.data[at + 1]; i += static_cast<int>(blockDim.x))
            words[runs.data[at] + i] = runs.data[at + 2 + i];
}

/// Collects words and launches when there are enough.
class word_writer {
public:
    word_writer(int* words, cudaStream_t stream) noexcept : words_(words), stream_(stream) {}

    void put(int index, int value) noexcept {
        const bool continues = begin_ >= 0 && index == runs_.data[begin_] + runs_.data[begin_ + 1];
        if (runs_.count + (continues ? 1 : 3) > word_runs::room) {
            (void)flush();
            put(index, value);
            return;
        }
        if (!continues) {
            begin_ = runs_.count;
            runs_.data[runs_.count++] = index;
            runs_.data[runs_.count++] = 0;
        }
        ++runs_.data[begin_ + 1];
        runs_.data[runs_.count++] = value;
    }
    /// Launches what is left. The first error of all launches.
    status flush() noexcept {
        if (runs_.count > 0 && result_)
            result_ = launch("launching an update of tables", overlap::no, write_words_kernel<>, dim3(1), 128,
                             0, stream_, runs_, words_);
        runs_.count = 0;
        begin_ = -1;
        return result_;
    }

private:
    int* words_;
    cudaStream_t stream_;
    word_runs runs_;
    int begin_ = -1;  // of the current run
    status result_;
};

/// Pages of one layer and format.
struct layer_memory {
    std::byte *keys = nullptr, *values = nullptr;
    std::size_t key_page_bytes = 0, value_page_bytes = 0;
};

/// Memory of all pages of one format: all key pages of layer 0, its value pages, those of layer 1, ...
struct pool_memory {
    std::byte* data = nullptr;
    std::size_t key_page_bytes = 0, value_page_bytes = 0;
    int pages = 0;  ///< of a layer

    KVQ_HD std::size_t page_bytes() const noexcept { return key_page_bytes + value_page_bytes; }
    KVQ_HD std::size_t layer_bytes() const noexcept { return static_cast<std::size_t>(pages) * page_bytes(); }
    KVQ_HD layer_memory layer(int i) const noexcept {
        std::byte* const keys = data + static_cast<std::size_t>(i) * layer_bytes();
        return {keys, keys + static_cast<std::size_t>(pages) * key_page_bytes, key_page_bytes,
                value_page_bytes};
    }
    KVQ_HD std::size_t page_bytes(tensor role) const noexcept {
        return role == tensor::key ? key_page_bytes : value_page_bytes;
    }
    KVQ_HD std::byte* page(tensor role, int of_layer, int number) const noexcept {
        const layer_memory l = layer(of_layer);
        return (role == tensor::key ? l.keys : l.values) +
               static_cast<std::size_t>(number) * page_bytes(role);
    }
};

struct page_copies {
    static constexpr int room = 64;
    int count = 0;
    int from[room], to[room];
};
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

/// A prompt of one sequence: its tokens in the order of where they go.
///
///   [0, open)       sinks
///   [open, staged)  the rest of a window page that has tokens already
///   [staged, kept)  pages that are quantized at once: 16-bit pages of the layer's scratch, from page `first_staged` of the sequence on
///   [kept, count)   window pages
struct prompt_ranges {
    int open = 0, staged = 0, kept = 0, count = 0;
    int first_staged = 0;
};
template <int = 0>
__global__ void __launch_bounds__(256)
    prompt_slots_kernel(prompt_ranges ranges, int before, int sinks, int page_tokens, int ring,
                        const int* window, const int* sink_pages, long long* slot_list) {
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

}}}  // namespace kvq::cuda::detail
