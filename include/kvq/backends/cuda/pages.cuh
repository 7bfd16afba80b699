// Whole pages on the device: commit (16-bit window -> coded), requantize (any scheme -> any other), decode to 16 bit.
//
//   requantize_pages   pairs of page numbers; committing is requantizing from a full<T> format
//   commit_full_pages  decides on the device which sequences have just completed a page behind their recent window
//   decode_tokens      x^ of every sequence as dense tensors, for prefill through any flash attention
//
// Contract: coded bytes are those of the CPU (scheme::encode on the decoded values); decoded values are the CPU's, rounded
// once to T. Source and target pages must not be the same memory. One launch each, no workspace.
#pragma once

#include "../../core/token_view.hpp"
#include "encode.cuh"

namespace kvq::inline v0_1::cuda {

namespace detail {

/// Codes the K and V blocks of one head of page `to` from page `from`. All threads of a block; grid: one block per tensor.
template <class From, class To>
__device__ __forceinline__ void requantize_block(const cache_ref<From>& source, const cache_ref<To>& target,
                                                 int from, int to, int head, bool keys,
                                                 unsigned* not_finite) {
    const auto run = [&](auto role) {
        constexpr tensor Role = decltype(role)::value;
        constexpr block_shape shape = shape_of<Role, From>;
        std::byte* const out = target.template block<Role>(to, head);
        const unsigned count = encode_block<scheme_of<Role, To>>(shape, out, [&](int token, int channel) {
            return read_value<Role>(source, from, head, token, channel);
        });
        if (not_finite && count) atomicAdd(not_finite, count);
    };
    if (keys)
        run(std::integral_constant<tensor, tensor::key>{});
    else
        run(std::integral_constant<tensor, tensor::value>{});
}

template <class From, class To>
__global__ void __launch_bounds__(encode_threads)
    requantize_kernel(const __grid_constant__ cache_ref<From> source,
                      const __grid_constant__ cache_ref<To> target, const int* from, const int* to,
                      unsigned* not_finite) {
    const int i = static_cast<int>(blockIdx.x);
    if (from[i] < 0 || to[i] < 0) return;
    requantize_block(source, target, from[i], to[i], static_cast<int>(blockIdx.y), blockIdx.z == 0,
                     not_finite);
}

template <class From, class To>
__global__ void __launch_bounds__(encode_threads)
    commit_kernel(const __grid_constant__ cache_ref<From> window, const __grid_constant__ cache_ref<To> coded,
                  int recent, const int* fresh, unsigned* not_finite) {
    const int b = static_cast<int>(blockIdx.x);
    // Page i is coded when first_token + (i + 1) * page_tokens + recent tokens are there (page/layer_pages.hpp).
    const int behind = window.tokens[b] - window.first_token - recent;
    if (behind <= 0 || behind % From::page_tokens != 0) return;
    const int i = behind / From::page_tokens - 1;
    if (i >= window.table_columns || i >= coded.table_columns) return;
    const int from =
        window.block_table[static_cast<std::size_t>(b) * static_cast<std::size_t>(window.table_columns) +
                           static_cast<std::size_t>(i)];
    if (from < 0 || fresh[b] < 0) return;
    requantize_block(window, coded, from, fresh[b], static_cast<int>(blockIdx.y), blockIdx.z == 0,
                     not_finite);
}

/// Moves the entries of pages that commit_kernel coded from one table to the other.
template <class From, class To>
__global__ void commit_tables_kernel(const __grid_constant__ cache_ref<From> window,
                                     const __grid_constant__ cache_ref<To> coded, int recent, int* fresh,
                                     int* window_table, int* coded_table) {
    const int b = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (b >= window.sequences) return;
    const int behind = window.tokens[b] - window.first_token - recent;
    if (behind <= 0 || behind % From::page_tokens != 0) return;
    const int i = behind / From::page_tokens - 1;
    if (i >= window.table_columns || i >= coded.table_columns) return;
    int& from = window_table[static_cast<std::size_t>(b) * static_cast<std::size_t>(window.table_columns) +
                             static_cast<std::size_t>(i)];
    if (from < 0 || fresh[b] < 0) return;
    coded_table[static_cast<std::size_t>(b) * static_cast<std::size_t>(coded.table_columns) +
                static_cast<std::size_t>(i)] = fresh[b];
    const int freed = from;
    from = -1;
    fresh[b] = -2 - freed;
}

template <class Format, class T>
__global__ void decode_kernel(const __grid_constant__ cache_ref<Format> cache, token_view<T> keys,
                              token_view<T> values, const int* starts) {
    const int b = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.z);
    const int length =
        smaller(cache.tokens[b] - cache.first_token, cache.table_columns * Format::page_tokens);
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const int warps = static_cast<int>(blockDim.x) / warp_size;
    for (int t = static_cast<int>(blockIdx.x) * warps + warp; t < length;
         t += static_cast<int>(gridDim.x) * warps) {
        const int page =
            cache.block_table[static_cast<std::size_t>(b) * static_cast<std::size_t>(cache.table_columns) +
                              static_cast<std::size_t>(t / Format::page_tokens)];
        if (page < 0) continue;
        const int in_page = t % Format::page_tokens, at = starts[b] + cache.first_token + t;
        if (keys.data)
            for (int c = lane; c < Format::head_dim; c += warp_size)
                keys.at(at, head)[c] = T(read_value<tensor::key>(cache, page, head, in_page, c));
        if (values.data)
            for (int c = lane; c < Format::value_dim; c += warp_size)
                values.at(at, head)[c] = T(read_value<tensor::value>(cache, page, head, in_page, c));
    }
}

template <class From, class To>
constexpr bool same_geometry =
    From::page_tokens == To::page_tokens&& From::head_dim == To::head_dim&& From::value_dim == To::value_dim;

}  // namespace detail

/// Codes page to[i] of `target` from page from[i] of `source` for i in [0, count); negative numbers skip. `from`, `to` and
/// `not_finite` (adds up NaN and infinities met; may be null) are device memory. Block tables are not touched.
template <class From, class To>
status requantize_pages(const cache_ref<From>& source, const cache_ref<To>& target, const int* from,
                        const int* to, int count, unsigned* not_finite, cudaStream_t stream) noexcept {
    static_assert(detail::same_geometry<From, To>,
                  "kvq::cuda::requantize_pages: both formats must have the same head sizes and page size");
    if (status s = detail::check_ref(source, false); !s) return s;
    if (status s = detail::check_ref(target, false); !s) return s;
    if (source.kv_heads != target.kv_heads)
        return detail::bad_value("source has %d kv heads, target %d", source.kv_heads, target.kv_heads);
    if (count < 0) return detail::bad_value("%d pages to requantize", count);
    if (count == 0) return {};
    if (from == nullptr || to == nullptr) return detail::bad_value("the lists of pages are null pointers");
    const dim3 grid(static_cast<unsigned>(count), static_cast<unsigned>(source.kv_heads), 2);
    detail::requantize_kernel<From, To>
        <<<grid, detail::encode_threads, 0, stream>>>(source, target, from, to, not_finite);
    return detail::launched("requantization");
}

/// After a decode step: codes the window page of every sequence whose length says that exactly now a page lies whole
/// behind its `recent` tokens, into page fresh[b] of `coded`, and moves its entry from window_table to coded_table
/// (the tables that the two refs name, writable). fresh[b] becomes -2 - (number of the window page that is free again).
template <class Window, class Coded>
status commit_full_pages(const cache_ref<Window>& window, const cache_ref<Coded>& coded, int* window_table,
                         int* coded_table, int recent, int* fresh, unsigned* not_finite,
                         cudaStream_t stream) noexcept {
    static_assert(detail::same_geometry<Window, Coded>,
                  "kvq::cuda::commit_full_pages: both formats must have the same head sizes and page size");
    static_assert(full_precision<typename Window::keys> && full_precision<typename Window::values>,
                  "kvq::cuda::commit_full_pages: the window format must be full<T>");
    if (status s = detail::check_ref(window, true); !s) return s;
    if (status s = detail::check_ref(coded, true); !s) return s;
    if (window.kv_heads != coded.kv_heads || window.sequences != coded.sequences ||
        window.first_token != coded.first_token)
        return detail::bad_value("window and coded pages are of different caches");
    if (recent < 0) return detail::bad_value("the recent window is %d tokens", recent);
    if (window.sequences == 0) return {};
    if (fresh == nullptr || window_table != window.block_table || coded_table != coded.block_table)
        return detail::bad_value("tables must be those of the refs, and fresh pages must be given");
    const dim3 grid(static_cast<unsigned>(window.sequences), static_cast<unsigned>(window.kv_heads), 2);
    detail::commit_kernel<Window, Coded>
        <<<grid, detail::encode_threads, 0, stream>>>(window, coded, recent, fresh, not_finite);
    if (status s = detail::launched("commit"); !s) return s;
    detail::commit_tables_kernel<Window, Coded>
        <<<static_cast<unsigned>((window.sequences + 127) / 128), 128, 0, stream>>>(
            window, coded, recent, fresh, window_table, coded_table);
    return detail::launched("commit");
}

/// Writes x^ of token t of sequence b to row starts[b] + t of `keys` and `values` (either may have null data): the layout of
/// variable-length flash attention. Tokens that this format does not hold are left alone.
template <class Format, class T>
status decode_tokens(const cache_ref<Format>& cache, const token_view<T>& keys, const token_view<T>& values,
                     const int* starts, cudaStream_t stream) noexcept {
    if (status s = detail::check_ref(cache, true); !s) return s;
    if (keys.data && (keys.heads != cache.kv_heads || keys.dim != Format::head_dim))
        return detail::bad_value("keys go to %d x %d but blocks are %d x %d", keys.heads, keys.dim,
                                 cache.kv_heads, Format::head_dim);
    if (values.data && (values.heads != cache.kv_heads || values.dim != Format::value_dim))
        return detail::bad_value("values go to %d x %d but blocks are %d x %d", values.heads, values.dim,
                                 cache.kv_heads, Format::value_dim);
    if (cache.sequences == 0) return {};
    if (cache.sequences > 65535)
        return detail::bad_value("%d sequences; at most 65535 at a time", cache.sequences);
    if (starts == nullptr) return detail::bad_value("starts is a null pointer");
    const int tokens = cache.table_columns * Format::page_tokens;
    const dim3 grid(static_cast<unsigned>(detail::smaller((tokens + 7) / 8, 4096)),
                    static_cast<unsigned>(cache.sequences), static_cast<unsigned>(cache.kv_heads));
    detail::decode_kernel<Format, T><<<grid, 256, 0, stream>>>(cache, keys, values, starts);
    return detail::launched("decoding");
}

}  // namespace kvq::inline v0_1::cuda
