// New tokens into pages: prefill (many) and decode (one per sequence), through a slot mapping.
//
//   slot = page * page_tokens + position, below 2^31; negative: skip. K and V of one call go to the same
//   slots, every token to one of its own
//
// For full<T> formats and for schemes with parameters per token. (Parameters per channel need a whole group
// of tokens: such tokens go to 16-bit window pages first and are quantized when a page is full: pages.cuh.)
// Of many tokens, one thread block takes 32 of one head and tensor; of few, which are usually one per
// sequence, each warp takes one. 32 tokens that fill 32 slots in a row are quantized as a tile, others one by
// one (store_tile.cuh, store_token.cuh); only the bits of their own codes are changed, so tokens of a call
// may share bytes.
// Tokens behind a transform are stored one by one, a head by a warp; rows of tokens: store_rows.cuh.
// Contract: a page whose slots have all been written holds the bytes that the CPU writes for the same tokens.
#pragma once

#include "../layout/latent_pair.cuh"
#include "../layout/transform_row.cuh"
#include "store_rows.cuh"
#include "store_token.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// What a kernel needs to know of one tensor, and nothing else: parameters of a launch are not in any cache,
/// so they shall fill few lines of 64 bytes.
template <class T>
struct store_tensor {
    std::byte* pages;
    std::size_t page_bytes;
    const T* from;
    std::ptrdiff_t token_stride, head_stride;

    __device__ __forceinline__ const T* at(int token, int head) const {
        return from + token * token_stride + head * head_stride;
    }
    template <tensor Role, class Pair>
    __device__ __forceinline__ std::byte* block(int page, int head) const {
        constexpr std::size_t bytes = Role == tensor::key ? Pair::key_block_bytes : Pair::value_block_bytes;
        return pages + static_cast<std::size_t>(page) * page_bytes + static_cast<std::size_t>(head) * bytes;
    }
};

/// Starts copying 32 input tokens of one head to shared memory. All threads of a block.
template <tensor Role, class Pair, class T>
__device__ __forceinline__ void fetch_tile(const store_tensor<T>& x, int first, int head, std::byte* rows) {
    constexpr int dim = dim_of<Role, Pair>;
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

/// Where an input token goes; negative: nowhere.
__device__ __forceinline__ long long slot_of(const long long* mapping, int tokens, int token) {
    return static_cast<unsigned>(token) < static_cast<unsigned>(tokens) ? mapping[token] : -1;
}

/// Many tokens of one tensor: 32 of them, heads blockIdx.y, blockIdx.y + gridDim.y, ...
template <class Pair, class T, tensor Role>
__device__ __forceinline__ void store_many(const store_tensor<T>& x, int tokens, int all_heads,
                                           const long long* mapping, unsigned* not_finite,
                                           std::byte* shared) {
    using S = scheme_of<Role, Pair>;
    constexpr int dim = dim_of<Role, Pair>, page_tokens = Pair::page_tokens;
    using store = store_traits<S, dim, page_tokens>;
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const int heads = static_cast<int>(gridDim.y);
    const int head = static_cast<int>(blockIdx.y);
    const int begin = static_cast<int>(blockIdx.x) * 32;
    auto& own = *reinterpret_cast<store_memory<Role, Pair, T>*>(shared);
    // Numbers are fetched before it is known where they go: they are mostly whole tiles.
    const bool guess = store::tiles && begin + 32 <= tokens;
    if (guess) fetch_tile<Role, Pair, T>(x, begin, head, own.rows[0]);
    const auto slot_at = [&](int token) {
        return static_cast<int>(larger(slot_of(mapping, tokens, token), -1LL));
    };
    const int here = slot_at(begin + lane);
    unsigned bad = 0;
    unsigned covered = 0;
    if constexpr (store::tiles) {
        // Which tokens start 32 slots in a row that a tile of the page takes? Often the block's first token
        // alone.
        unsigned leads = 1u;
        covered = ~0u;
        if (!__all_sync(~0u, here == __shfl_sync(~0u, here, 0) + lane &&
                                 (lane > 0 || (here >= 0 && here % 32 == 0)))) {
            // Which continue the slot of the token before them: 32 before, here, 32 behind.
            const int before = slot_at(begin - 32 + lane), behind = slot_at(begin + 32 + lane);
            const auto runs = [&](int slot, int previous_last) {
                int previous = __shfl_up_sync(~0u, slot, 1);
                if (lane == 0) previous = previous_last;
                return __ballot_sync(~0u, slot >= 0 && previous >= 0 && slot == previous + 1);
            };
            const unsigned run_before = runs(before, -1), run_here = runs(here, __shfl_sync(~0u, before, 31)),
                           run_behind = runs(behind, __shfl_sync(~0u, here, 31));
            const auto leads_of = [&](int slot, unsigned low, unsigned high) {
                const unsigned follow = static_cast<unsigned>(
                    ((static_cast<unsigned long long>(high) << 32 | low) >> (lane + 1)) & 0x7fffffffu);
                return __ballot_sync(~0u, slot >= 0 && slot % 32 == 0 && follow == 0x7fffffffu);
            };
            const unsigned leads_before = leads_of(before, run_before, run_here);
            leads = leads_of(here, run_here, run_behind);
            const int lead = lane - here % 32;  // of this lane's token, if it has one
            covered = __ballot_sync(
                ~0u, here >= 0 && ((lead >= 0 ? leads >> lead : leads_before >> (32 + lead)) & 1u));
        }
        int at = __ffs(static_cast<int>(leads)) - 1;
        if (leads && !(guess && at == 0)) {
            copy_wait<0>();
            __syncthreads();
            fetch_tile<Role, Pair, T>(x, begin + at, head, own.rows[0]);
        }
        constexpr int buffers = store_memory<Role, Pair, T>::row_buffers;
        for (int tile_head = head, buffer = 0; leads; buffer ^= buffers - 1) {
            const int slot = __shfl_sync(~0u, here, at), this_head = tile_head;
            tile_head += heads;
            if (tile_head >= all_heads) {
                tile_head = head;
                leads &= leads - 1;
                at = __ffs(static_cast<int>(leads)) - 1;
            }
            if (buffers == 2 && leads) {
                __syncthreads();  // nobody reads the other buffer any more
                fetch_tile<Role, Pair, T>(x, begin + at, tile_head, own.rows[buffer ^ 1]);
                copy_wait<1>();
            } else {
                copy_wait<0>();
            }
            __syncthreads();
            bad += store_tile<Role, Pair, T>(x.template block<Role, Pair>(slot / page_tokens, this_head),
                                             own.rows[buffer], slot % page_tokens, own.tile);
            if (buffers == 1 && leads) {
                __syncthreads();
                fetch_tile<Role, Pair, T>(x, begin + at, tile_head, own.rows[0]);
            }
        }
    }
    for (unsigned left = __ballot_sync(~0u, here >= 0) & ~covered; left; left &= left - 1) {
        const int at = __ffs(static_cast<int>(left)) - 1;
        if (at % store_warps != warp) continue;
        const int slot = __shfl_sync(~0u, here, at);
        for (int h = head; h < all_heads; h += heads)
            bad += store_token<Role, Pair, T>(
                x.at(begin + at, h), x.template block<Role, Pair>(slot / page_tokens, h), slot % page_tokens);
    }
    if (not_finite && bad) atomicAdd(not_finite, bad);
    copy_wait<0>();  // of a tile that was fetched in vain
}

/// Heads of a token that a warp stores where there are few tokens, at most.
inline constexpr int few_heads = 2;

/// Few tokens of one tensor, usually one per sequence: each warp has one of them, of heads blockIdx.y and
/// blockIdx.y + gridDim.y.
template <class Pair, class T, tensor Role>
__device__ __forceinline__ void store_few(const store_tensor<T>& x, int tokens, int all_heads,
                                          const long long* mapping, unsigned* not_finite, std::byte* shared) {
    constexpr int page_tokens = Pair::page_tokens;
    constexpr bool tiles = store_traits<scheme_of<Role, Pair>, dim_of<Role, Pair>, page_tokens>::tiles;
    const int warp = static_cast<int>(threadIdx.x / warp_size),
              lane = static_cast<int>(threadIdx.x % warp_size);
    const int head = static_cast<int>(blockIdx.y), heads = static_cast<int>(gridDim.y);
    const int token = static_cast<int>(blockIdx.x) * store_warps + warp;
    // Slots of this token and the 31 before it, and of the 32 behind it.
    const long long before = slot_of(mapping, tokens, token - 31 + lane);
    [[maybe_unused]] const long long behind = tiles ? slot_of(mapping, tokens, token + 1 + lane) : -1;
    token_row<Role, Pair, T> rows[few_heads];
#pragma unroll
    for (int i = 0; i < few_heads; ++i)
        if (token < tokens && head + i * heads < all_heads)
            rows[i].fetch(x.at(token, head + i * heads), lane);
    // Not at the start: attend as the next launch then took 1 to 10 us longer.
    launch_dependents();
    const long long here = __shfl_sync(~0u, before, 31);
    const unsigned slot = static_cast<unsigned>(here);
    const int page = static_cast<int>(slot / page_tokens), at = static_cast<int>(slot % page_tokens);
    bool covered = false;
    if constexpr (tiles) {
        // Is the token one of 32 in a row that a tile of the page takes?
        const unsigned long long in_a_row =
            static_cast<unsigned long long>(__ballot_sync(~0u, behind == here + 1 + lane)) << 32 |
            __ballot_sync(~0u, before == here - 31 + lane);
        covered = here >= 0 && static_cast<unsigned>(in_a_row >> (31 - slot % 32)) == ~0u;
    }
    unsigned bad = 0;
    if (here >= 0 && !covered) {
#pragma unroll 1
        for (int h = head; h < all_heads; h += heads) {
            std::byte* const block = x.template block<Role, Pair>(page, h);
            if (!rows[0].store(block, at, lane)) bad += store_token<Role, Pair, T>(x.at(token, h), block, at);
#pragma unroll
            for (int i = 1; i < few_heads; ++i) rows[i - 1] = rows[i];
        }
    }
    if constexpr (tiles) {
        // Every fourth token of a tile stands for one head of the tile, and at most one of the four of a
        // block.
        const int tile_head = head + static_cast<int>(slot % 32 / store_warps) * heads;
        const bool takes = covered && slot % store_warps == 0 && tile_head < all_heads;
        auto& own = *reinterpret_cast<store_memory<Role, Pair, T>*>(shared);
        int* const told = reinterpret_cast<int*>(own.tile.of);
        if (takes) told[0] = static_cast<int>(slot), told[1] = token;
        if (__syncthreads_or(takes)) {
            const int place = told[0] % 32, h = head + place / store_warps * heads;
            const int first = told[0] - place;
            fetch_tile<Role, Pair, T>(x, told[1] - place, h, own.rows[0]);
            copy_wait<0>();
            __syncthreads();
            bad += store_tile<Role, Pair, T>(x.template block<Role, Pair>(first / page_tokens, h),
                                             own.rows[0], first % page_tokens, own.tile);
        }
    }
    if (bad && not_finite) atomicAdd(not_finite, bad);
}

/// Behind a transform of keys or values: a warp stores one head of one token.
template <class Pair, class T>
__global__ void __launch_bounds__(store_threads)
    store_turned_kernel(const __grid_constant__ cache_ref<Pair> cache, const store_tensor<T> k,
                        const store_tensor<T> v, const long long* mapping, unsigned* not_finite, int tokens) {
    __shared__ __align__(16) float turned[store_warps][round_up(larger(Pair::head_dim, Pair::value_dim), 4)];
    launch_dependents();
    wait_for_predecessor();
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const int token = static_cast<int>(blockIdx.x) * store_warps + warp, head = static_cast<int>(blockIdx.y);
    const long long slot = slot_of(mapping, tokens, token);
    if (slot < 0) return;
    const int page = static_cast<int>(slot / Pair::page_tokens),
              at = static_cast<int>(slot % Pair::page_tokens);
    unsigned bad = 0;
    const auto go = [&]<tensor Role>(std::integral_constant<tensor, Role>, const store_tensor<T>& x) {
        std::byte* const block = x.template block<Role, Pair>(page, head);
        const T* const from = x.at(token, head);
        if constexpr (has_transform<scheme_of<Role, Pair>>) {
            constexpr int dim = dim_of<Role, Pair>, N = token_numbers<dim>;
            float numbers[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const int c = i * warp_size + lane;
                numbers[i] = c < dim ? to_float(from[c]) : 0.0f;
                if (!kvq::detail::is_finite(numbers[i])) {
                    ++bad;
                    numbers[i] = 0.0f;
                }
            }
            transform_row<token_channels, dim>(numbers, transform_of<Role>(cache), head);
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (i * warp_size + lane < dim) turned[warp][i * warp_size + lane] = numbers[i];
            __syncwarp();
            (void)store_token<Role, Pair, float>(turned[warp], block, at);
        } else {
            bad += store_token<Role, Pair, T>(from, block, at);
        }
    };
    if (blockIdx.z == 0)
        go(std::integral_constant<tensor, tensor::key>{}, k);
    else
        go(std::integral_constant<tensor, tensor::value>{}, v);
    if (bad != 0 && not_finite != nullptr) atomicAdd(not_finite, bad);
}

/// As many thread blocks as possible shall be under way.
template <class Pair, class T, bool Few>
__global__ void __launch_bounds__(store_threads, 8)
    store_kernel(const store_tensor<T> k, const store_tensor<T> v, const long long* mapping,
                 unsigned* not_finite, int tokens, int heads) {
    constexpr std::size_t bytes = sizeof(store_memory<tensor::key, Pair, T>),
                          of_values = has_values<Pair> ? sizeof(store_memory<tensor::value, Pair, T>) : 0;
    __shared__ __align__(16) std::byte shared[larger(bytes, of_values)];
    if constexpr (!Few) launch_dependents();
    wait_for_predecessor();
    const auto go = [&](auto role, const store_tensor<T>& x) {
        constexpr tensor Role = decltype(role)::value;
        if constexpr (Few)
            store_few<Pair, T, Role>(x, tokens, heads, mapping, not_finite, shared);
        else
            store_many<Pair, T, Role>(x, tokens, heads, mapping, not_finite, shared);
    };
    if (blockIdx.z == 0)
        go(std::integral_constant<tensor, tensor::key>{}, k);
    else if constexpr (has_values<Pair>)
        go(std::integral_constant<tensor, tensor::value>{}, v);
}

/// Launches the store of both tensors, or of keys alone, without a transform. coded: quantized_pair.
template <class coded, class T>
status launch_store(const store_tensor<T>& keys, const store_tensor<T>& values, const long long* mapping,
                    unsigned* not_finite, int tokens, int all_heads, cudaStream_t stream) noexcept {
    const bool few = tokens <= 512;
    const int groups = kvq::detail::ceil_div(tokens, few ? store_warps : 32);
    // Where there are many blocks, they take two or four heads each: a block loads while it computes, and
    // a launch takes 0.6 us per 1000 blocks.
    int heads = all_heads;  // thread blocks along the heads
    for (int enough = few ? 512 : 1024;
         heads % 2 == 0 && all_heads / heads < (few ? few_heads : 4) && groups * heads >= enough;
         enough = 4096)
        heads /= 2;
    const dim3 grid(static_cast<unsigned>(groups), static_cast<unsigned>(heads), tensors_of<coded>);
    return launch("launching store", overlap::yes,
                  few ? store_kernel<coded, T, true> : store_kernel<coded, T, false>, grid, store_threads, 0,
                  stream, keys, values, mapping, not_finite, tokens, all_heads);
}

}  // namespace detail

namespace detail {
/// Do tokens have all that they need in their own bytes and those of others' codes?
template <class S>
inline constexpr bool takes_tokens = [] {
    if constexpr (token_bytes_scheme<S> || float_row_scheme<S>)
        return true;
    else
        return word_traits<S>::token_parameters;
}();
}  // namespace detail

/// Stores token i of k and v at mapping[i] (device memory); negative slots skip. k: [n][kv_heads][head_dim],
/// v likewise with value_dim, of latents 0 tokens; any strides, channels contiguous. not_finite, if given,
/// adds up NaN and infinities.
template <class Pair, class T>
status store(const cache_ref<Pair>& cache, const token_view<const T>& k, const token_view<const T>& v,
             const long long* mapping, unsigned* not_finite, cudaStream_t stream) noexcept {
    constexpr bool values_too = detail::has_values<Pair>;
    static_assert(detail::takes_tokens<typename Pair::keys> &&
                      (!values_too || detail::takes_tokens<typename Pair::values>),
                  "kvq::cuda::store: schemes with parameters per channel are quantized a page at a time; "
                  "store into 16-bit "
                  "window pages and use commit_full_pages or requantize_pages");
    static_assert(detail::quantizes<Pair>,
                  "kvq::cuda::store: encoders other than enclosing run on the CPU for parameters per token");
    using coded = detail::quantized_pair<Pair>;
    if (status s = detail::check_ref(cache, false); !s) return s;
    if (v.tokens != (values_too ? k.tokens : 0))
        return detail::bad_value("k has %d tokens but v has %d", k.tokens, v.tokens);
    if (k.heads != cache.kv_heads || k.dim != Pair::head_dim ||
        (values_too && (v.heads != cache.kv_heads || v.dim != Pair::value_dim)))
        return detail::bad_value("k is %d x %d and v %d x %d but the cache holds %d heads of %d and %d",
                                 k.heads, k.dim, v.heads, v.dim, cache.kv_heads, Pair::head_dim,
                                 Pair::value_dim);
    if (k.tokens < 0) return detail::bad_value("k has %d tokens", k.tokens);
    if (k.tokens == 0) return {};
    if (k.data == nullptr || (values_too && v.data == nullptr) || mapping == nullptr)
        return detail::bad_value("k, v or mapping is a null pointer");
    if constexpr (detail::stores_rows<Pair>) {
        return detail::store_token_rows(cache, k, v, mapping, not_finite, stream);
    } else if constexpr (detail::float_row_scheme<typename Pair::keys>) {
        return detail::store_float_rows(cache, k, v, mapping, not_finite, stream);
    } else {
        const detail::store_tensor<T> keys{cache.key_pages, cache.key_page_bytes, k.data, k.token_stride,
                                           k.head_stride},
            values{cache.value_pages, cache.value_page_bytes, v.data, v.token_stride, v.head_stride};
        if constexpr (detail::pair_turns<coded>) {
            const dim3 grid(static_cast<unsigned>(kvq::detail::ceil_div(k.tokens, detail::store_warps)),
                            static_cast<unsigned>(cache.kv_heads), 2);
            return detail::launch("launching store", detail::overlap::yes,
                                  detail::store_turned_kernel<coded, T>, grid, detail::store_threads, 0,
                                  stream, detail::as_pair<coded>(cache), keys, values, mapping, not_finite,
                                  k.tokens);
        } else if constexpr (detail::is_latent_pair<Pair>) {
            status result = detail::launch_store<typename Pair::first_coded>(keys, values, mapping,
                                                                             not_finite, k.tokens, 1, stream);
            if constexpr (Pair::second_channels > 0) {
                detail::store_tensor<T> rotary = keys;
                rotary.pages += Pair::second_block;
                rotary.from += Pair::first_channels;
                if (result)
                    result = detail::launch_store<typename Pair::second_coded>(
                        rotary, values, mapping, not_finite, k.tokens, 1, stream);
            }
            return result;
        } else {
            return detail::launch_store<coded>(keys, values, mapping, not_finite, k.tokens, cache.kv_heads,
                                               stream);
        }
    }
}

}}}  // namespace kvq::cuda
