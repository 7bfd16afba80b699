// The index cache in device memory: one key per token, with which a model chooses the tokens that its
// attention reads (DeepSeek V3.2).
//
//   block   K block of the format int8: codes in tiles of 32 tokens, then a float scale of every token;
//           128 channels: 132 bytes a token
//
// There is one head and no value: a cache_ref of an index_pair has `key_pages` alone.
//
//   store_index(index, keys, mapping, not_finite, stream);                 new tokens
//   index_scores(index, q, weights, query_tokens, scores, stream);         index_scores.cuh
//   select_top(scores, ..., positions, workspace, bytes, stream);          select_top.cuh
//
// Contract: bytes are those of the CPU.
#pragma once

#include "../../core/token_view.hpp"
#include "../store/store_token.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

template <int Channels, int PageTokens>
struct index_pair {
    static_assert(Channels == 64 || Channels == 128, "kvq::cuda::index_pair: keys have 64 or 128 channels");
    static_assert(PageTokens >= 32 && PageTokens % 32 == 0,
                  "kvq::cuda::index_pair: pages have a multiple of 32 tokens");
    using keys = int8;
    using values = int8;
    static constexpr int head_dim = Channels;
    static constexpr int value_dim = Channels;
    static constexpr int page_tokens = PageTokens;

    /// The pair whose kernels quantize such keys.
    using stored_pair = detail::quantized_pair<block_pair<int8, int8, Channels, PageTokens>>;
    static constexpr std::size_t key_block_bytes = stored_pair::key_block_bytes;
    static constexpr std::size_t value_block_bytes = 0;
    static constexpr std::size_t scale_offset =
        block_layout{detail::codec<int8>}.scale_offset({tensor::key, PageTokens, Channels});
};

namespace detail {

template <class Pair>
status check_index(const cache_ref<Pair>& c, bool tables) noexcept {
    if (c.kv_heads != 1) return bad_value("an index has one head, the cache_ref has %d", c.kv_heads);
    if (c.key_pages == nullptr) return bad_value("the index has no pages (null pointer)");
    if ((reinterpret_cast<std::uintptr_t>(c.key_pages) | c.key_page_bytes) % 16 != 0)
        return bad_value("pages must start on 16 bytes and be a multiple of 16 bytes apart");
    if (c.key_page_bytes < Pair::key_block_bytes)
        return bad_value("a page stride of %zu bytes is smaller than the %zu of an index block",
                         c.key_page_bytes, Pair::key_block_bytes);
    if (c.first_token != 0) return bad_value("an index begins with token 0, not %d", c.first_token);
    if (!tables) return {};
    if (c.sequences < 0 || c.table_columns < (c.sequences > 0 ? 1 : 0) ||
        c.table_columns > most_tokens / Pair::page_tokens)
        return bad_value("%d sequences with %d block table columns of %d tokens", c.sequences,
                         c.table_columns, Pair::page_tokens);
    if (c.sequences > 0 && (c.block_table == nullptr || c.tokens == nullptr))
        return bad_value("the index has no block table or no lengths (null pointer)");
    return {};
}

inline constexpr int store_index_warps = 4;

template <class Pair, class T>
__global__ void __launch_bounds__(store_index_warps* warp_size)
    store_index_kernel(const __grid_constant__ cache_ref<Pair> index, const token_view<const T> keys,
                       const long long* mapping, unsigned* not_finite) {
    launch_dependents();
    wait_for_predecessor();
    const int token =
        static_cast<int>(blockIdx.x) * store_index_warps + static_cast<int>(threadIdx.x) / warp_size;
    const long long place = token < keys.tokens ? mapping[token] : -1;
    if (place < 0) return;
    const unsigned bad = store_token<tensor::key, typename Pair::stored_pair, T>(
        keys.at(token, 0), index.key_block(static_cast<int>(place / Pair::page_tokens), 0),
        static_cast<int>(place % Pair::page_tokens));
    if (bad != 0 && not_finite != nullptr) atomicAdd(not_finite, bad);
}

}  // namespace detail

/// Stores token i of keys, [n][1][channels], at mapping[i] = page * page_tokens + position (device memory);
/// negative: nowhere. Every token has a place of its own. not_finite, if given, adds up NaN and infinities.
template <class Pair, class T>
status store_index(const cache_ref<Pair>& index, const token_view<const T>& keys, const long long* mapping,
                   unsigned* not_finite, cudaStream_t stream) noexcept {
    if (status s = detail::check_index(index, false); !s) return s;
    if (keys.tokens < 0 || keys.heads != 1 || keys.dim != Pair::head_dim)
        return detail::bad_value("keys are %d x %d x %d, the index holds one head of %d channels",
                                 keys.tokens, keys.heads, keys.dim, Pair::head_dim);
    if (keys.tokens == 0) return {};
    if (keys.data == nullptr || mapping == nullptr)
        return detail::bad_value("keys or mapping is a null pointer");
    const int blocks = kvq::detail::ceil_div(keys.tokens, detail::store_index_warps);
    return detail::launch("launching the store of an index", detail::overlap::yes,
                          detail::store_index_kernel<Pair, T>, dim3(static_cast<unsigned>(blocks)),
                          detail::store_index_warps * detail::warp_size, 0, stream, index, keys, mapping,
                          not_finite);
}

}}}  // namespace kvq::cuda
