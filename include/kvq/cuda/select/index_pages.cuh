// The index cache in device memory: one key per token, with which a model chooses the tokens that its
// attention reads (DeepSeek V3.2).
//
//   int8               K block of the format: codes in tiles of 32 tokens, then a float scale of every token
//   float_rows<e4m3>   rows of 8-bit floats, then a float scale of every token
//
// 128 channels are 132 bytes a token.
//
// There is one head and no value: a cache_ref of an index_pair has `key_pages` alone. store(),
// requantize_pages() and what else writes pages of latents takes them, with no rows of values.
//
//   store(index, keys, no rows, mapping, not_finite, stream);              new tokens
//   index_scores(index, q, weights, query_tokens, scores, stream);         index_scores.cuh
//   select_top(scores, ..., positions, workspace, bytes, stream);          select_top.cuh
//
// Contract: bytes are those of the CPU.
#pragma once

#include "../../schemes/float_rows.hpp"
#include "../layout/latent_pair.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

template <int Channels, int PageTokens, class Scheme = int8>
struct index_pair : latent_pair<Scheme, Channels, 0, Channels, PageTokens> {
    static_assert(std::is_same_v<Scheme, int8> || std::is_same_v<Scheme, float_rows<e4m3>>,
                  "kvq::cuda::index_pair: keys are int8 or float_rows<e4m3>");
    static_assert(Channels == 64 || Channels == 128, "kvq::cuda::index_pair: keys have 64 or 128 channels");
    static_assert(PageTokens >= 32 && PageTokens % 32 == 0,
                  "kvq::cuda::index_pair: pages have a multiple of 32 tokens");
    static constexpr std::size_t scale_offset = [] {
        constexpr block_shape shape{tensor::key, PageTokens, Channels};
        if constexpr (detail::float_row_scheme<Scheme>)
            return Scheme::scale_offset(shape);
        else
            return block_layout{detail::codec<Scheme>}.scale_offset(shape);
    }();
};

namespace detail {

template <class Pair>
inline constexpr bool is_index_pair = false;
template <int Channels, int PageTokens, class Scheme>
inline constexpr bool is_index_pair<index_pair<Channels, PageTokens, Scheme>> = true;
template <int Channels, int PageTokens, class Scheme>
inline constexpr bool is_latent_pair<index_pair<Channels, PageTokens, Scheme>> = true;

/// Kernels know these blocks as they are.
template <int Channels, int PageTokens, class Scheme, class Keys, class NoValues>
struct pair_like<index_pair<Channels, PageTokens, Scheme>, Keys, NoValues> {
    using type = index_pair<Channels, PageTokens, Scheme>;
};

}  // namespace detail
}}}  // namespace kvq::cuda
