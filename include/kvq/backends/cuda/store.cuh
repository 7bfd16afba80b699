// New tokens into pages: prefill (many) and decode (one per sequence), through a slot mapping.
//
//   slot = page * page_tokens + position, below 2^31; negative: skip. K and V of one call go to the same slots, every token
//   to one of its own
//
// For full<T> formats and for schemes with parameters per token. (Parameters per channel need a whole group of tokens: such
// tokens go to 16-bit window pages first and are coded when a page is full: pages.cuh.)
// One thread block takes 32 input tokens of one head and tensor. Where 32 of them fill 32 slots in a row, it codes them as a
// tile from shared memory: lane = token for parameters and keys, lane = 4 channels for values, whole words, no atomics. Other
// tokens go one by one; only the bits of their own codes are changed, so tokens of a call may share bytes.
// Contract: a page whose slots have all been written holds the bytes that the CPU writes for the same tokens.
#pragma once

#include "store_tile.cuh"

namespace kvq::inline v0_1::cuda {

namespace detail {

/// Starts copying 32 input tokens of one head to shared memory. All threads of a block.
template <tensor Role, class Format, class T>
__device__ __forceinline__ void fetch_tile(const token_view<const T>& x, int first, int head,
                                           std::byte* rows) {
    constexpr int dim = dim_of<Role, Format>;
    constexpr int per_row = dim * static_cast<int>(sizeof(T)) / 16;
    constexpr int row_bytes = store_rows<T, dim>::row_bytes;
    const T* const from = x.at(first, head);
    if ((reinterpret_cast<std::uintptr_t>(from) | static_cast<std::uintptr_t>(x.token_stride) * sizeof(T)) %
            16 ==
        0) {
#pragma unroll
        for (int i = static_cast<int>(threadIdx.x); i < 32 * per_row; i += store_threads)
            copy_async(
                shared_address(rows) + static_cast<std::uint32_t>(i / per_row * row_bytes + i % per_row * 16),
                reinterpret_cast<const uint4*>(from + i / per_row * x.token_stride) + i % per_row);
    } else {
        for (int i = static_cast<int>(threadIdx.x); i < 32 * dim; i += store_threads)
            *reinterpret_cast<T*>(rows + i / dim * row_bytes + i % dim * static_cast<int>(sizeof(T))) =
                from[i / dim * x.token_stride + i % dim];
    }
    copy_commit();
}

/// One tensor: 32 input tokens, heads blockIdx.y, blockIdx.y + gridDim.y, ... Few: `parts` blocks share the tokens that go
/// one by one, of which each warp has at most one.
template <class Format, class T, tensor Role, bool Few>
__device__ __forceinline__ void store_tokens(const cache_ref<Format>& cache, const token_view<const T>& x,
                                             const long long* mapping, unsigned* not_finite, int part,
                                             int parts, std::byte* shared) {
    using S = scheme_of<Role, Format>;
    constexpr int dim = dim_of<Role, Format>;
    using store = store_traits<S, dim, Format::page_tokens>;
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const int heads = static_cast<int>(gridDim.y);
    const int head = static_cast<int>(blockIdx.y);
    const int begin = static_cast<int>(blockIdx.x) / parts * 32;
    const auto slot_of = [&](int token) {
        return token >= 0 && token < x.tokens ? static_cast<int>(larger(mapping[token], -1LL)) : -1;
    };
    auto& own = *reinterpret_cast<store_memory<Role, Format, T>*>(shared);
    // Numbers are fetched before it is known where they go. Many tokens are mostly whole tiles, few mostly are not.
    const bool guess = store::tiles && !Few && begin + 32 <= x.tokens;
    if (guess) fetch_tile<Role, Format, T>(x, begin, head, own.rows[0]);
    const int here = slot_of(begin + lane);
    [[maybe_unused]] int before = -1, behind = -1;
    [[maybe_unused]] token_numbers<Role, Format, T> single;
    const int single_at = part * store_warps + warp;
    if constexpr (Few) {
        if constexpr (store::tiles) before = slot_of(begin - 32 + lane), behind = slot_of(begin + 32 + lane);
        if (begin + single_at < x.tokens) single.fetch(x.at(begin + single_at, head), lane);
    }
    unsigned bad = 0;
    unsigned covered = 0;
    if constexpr (store::tiles) {
        // Which tokens start 32 slots in a row that a tile of the page takes? Often the block's first token alone.
        unsigned leads_here = 1u;
        covered = ~0u;
        if (!__all_sync(~0u, here == __shfl_sync(~0u, here, 0) + lane &&
                                 (lane > 0 || (here >= 0 && here % 32 == 0)))) {
            // Which continue the slot of the token before them: 32 before, here, 32 behind.
            if constexpr (!Few) before = slot_of(begin - 32 + lane), behind = slot_of(begin + 32 + lane);
            const auto runs = [&](int slot, int previous_last) {
                int previous = __shfl_up_sync(~0u, slot, 1);
                if (lane == 0) previous = previous_last;
                return __ballot_sync(~0u, slot >= 0 && previous >= 0 && slot == previous + 1);
            };
            const unsigned run_before = runs(before, -1), run_here = runs(here, __shfl_sync(~0u, before, 31)),
                           run_behind = runs(behind, __shfl_sync(~0u, here, 31));
            const auto leads = [&](int slot, unsigned low, unsigned high) {
                const unsigned follow = static_cast<unsigned>(
                    ((static_cast<unsigned long long>(high) << 32 | low) >> (lane + 1)) & 0x7fffffffu);
                return __ballot_sync(~0u, slot >= 0 && slot % 32 == 0 && follow == 0x7fffffffu);
            };
            const unsigned leads_before = leads(before, run_before, run_here);
            leads_here = leads(here, run_here, run_behind);
            const int lead = lane - here % 32;  // of this lane's token, if it has one
            covered = __ballot_sync(
                ~0u, here >= 0 && ((lead >= 0 ? leads_here >> lead : leads_before >> (32 + lead)) & 1u));
        }
        unsigned leads = part == 0 ? leads_here : 0u;
        int at = __ffs(static_cast<int>(leads)) - 1;
        if (leads && !(guess && at == 0)) {
            copy_wait<0>();
            __syncthreads();
            fetch_tile<Role, Format, T>(x, begin + at, head, own.rows[0]);
        }
        constexpr int buffers = store_memory<Role, Format, T>::row_buffers;
        for (int tile_head = head, buffer = 0; leads; buffer ^= buffers - 1) {
            const int slot = __shfl_sync(~0u, here, at), this_head = tile_head;
            tile_head += heads;
            if (tile_head >= x.heads) {
                tile_head = head;
                leads &= leads - 1;
                at = __ffs(static_cast<int>(leads)) - 1;
            }
            if (buffers == 2 && leads) {
                __syncthreads();  // nobody reads the other buffer any more
                fetch_tile<Role, Format, T>(x, begin + at, tile_head, own.rows[buffer ^ 1]);
                copy_wait<1>();
            } else {
                copy_wait<0>();
            }
            __syncthreads();
            bad += store_tile<Role, Format, T>(cache, own.rows[buffer], slot, this_head, own.tile);
            if (buffers == 1 && leads) {
                __syncthreads();
                fetch_tile<Role, Format, T>(x, begin + at, tile_head, own.rows[0]);
            }
        }
    }
    unsigned left = __ballot_sync(~0u, here >= 0) & ~covered;
    if constexpr (Few) {
        if (left >> single_at & 1u)
            bad += store_numbers<Role, Format, T>(cache, single, __shfl_sync(~0u, here, single_at), head);
    } else {
        for (; left; left &= left - 1) {
            const int at = __ffs(static_cast<int>(left)) - 1;
            if (at % (parts * store_warps) != part * store_warps + warp) continue;
            const int slot = __shfl_sync(~0u, here, at);
            for (int h = head; h < x.heads; h += heads)
                bad += store_token<Role, Format, T>(cache, x.at(begin + at, h), slot, h);
        }
    }
    if (not_finite && bad) atomicAdd(not_finite, bad);
    copy_wait<0>();  // of a tile that was fetched in vain
}

inline constexpr int few_parts = 32 / store_warps;  // one warp per token

/// Few tokens are usually one per sequence and wait for memory; of many, as many thread blocks as possible shall be under way.
template <class Format, class T, bool Few>
__global__ void __launch_bounds__(store_threads, Few ? 4 : 8)
    store_kernel(const __grid_constant__ cache_ref<Format> cache, token_view<const T> k,
                 token_view<const T> v, const long long* mapping, unsigned* not_finite) {
    __shared__ __align__(16) std::byte shared[larger(sizeof(store_memory<tensor::key, Format, T>),
                                                     sizeof(store_memory<tensor::value, Format, T>))];
    launch_dependents();
    wait_for_predecessor();
    constexpr int parts = Few ? few_parts : 1;
    const int part = static_cast<int>(blockIdx.x) % parts;
    if (blockIdx.z == 0)
        store_tokens<Format, T, tensor::key, Few>(cache, k, mapping, not_finite, part, parts, shared);
    else
        store_tokens<Format, T, tensor::value, Few>(cache, v, mapping, not_finite, part, parts, shared);
}

}  // namespace detail

/// Stores token i of k and v at mapping[i] (device memory); negative slots skip. k: [n][kv_heads][head_dim], v likewise with
/// value_dim; any strides, channels contiguous. not_finite, if given, adds up NaN and infinities.
template <class Format, class T>
status store(const cache_ref<Format>& cache, const token_view<const T>& k, const token_view<const T>& v,
             const long long* mapping, unsigned* not_finite, cudaStream_t stream) noexcept {
    static_assert(
        detail::word_traits<typename Format::keys>::token_parameters &&
            detail::word_traits<typename Format::values>::token_parameters,
        "kvq::cuda::store: schemes with parameters per channel are coded a page at a time; store into 16-bit "
        "window pages and use commit_full_pages or requantize_pages");
    if (status s = detail::check_ref(cache, false); !s) return s;
    if (k.tokens != v.tokens) return detail::bad_value("k has %d tokens but v has %d", k.tokens, v.tokens);
    if (k.heads != cache.kv_heads || v.heads != cache.kv_heads || k.dim != Format::head_dim ||
        v.dim != Format::value_dim)
        return detail::bad_value("k is %d x %d and v %d x %d but the cache holds %d heads of %d and %d",
                                 k.heads, k.dim, v.heads, v.dim, cache.kv_heads, Format::head_dim,
                                 Format::value_dim);
    if (k.tokens < 0) return detail::bad_value("k has %d tokens", k.tokens);
    if (k.tokens == 0) return {};
    if (k.data == nullptr || v.data == nullptr || mapping == nullptr)
        return detail::bad_value("k, v or mapping is a null pointer");
    // Few tokens are usually one per sequence: then more blocks share the tokens that do not make tiles. Of many, a block takes
    // several heads, so that it loads while it computes.
    const bool few = k.tokens <= 512;
    const int parts = few ? detail::few_parts : 1, tiles = (k.tokens + 31) / 32;
    int heads = cache.kv_heads;  // thread blocks along the heads: all, or as few as leave 4096 blocks in all
    if (!few)
        while (heads % 2 == 0 && cache.kv_heads / heads < 4 && tiles * heads >= 4096) heads /= 2;
    const dim3 grid(static_cast<unsigned>(tiles * parts), static_cast<unsigned>(heads), 2);
    // Small launches that overlap took longer than small launches that follow each other.
    return detail::launch(
        "launching store", few ? detail::overlap::no : detail::overlap::yes,
        few ? detail::store_kernel<Format, T, true> : detail::store_kernel<Format, T, false>, grid,
        detail::store_threads, 0, stream, cache, k, v, mapping, not_finite);
}

}  // namespace kvq::inline v0_1::cuda
