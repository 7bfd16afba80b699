// Pages of latents in device memory: K and V of a token are the same numbers, stored once.
//
//   key     x^[0, R + P)    R latent channels, then P rotary channels
//   value   x^[0, V)
//   block   of codes: | block of the scheme, R channels | block of fp16, P channels |    of 16-bit values:
//           one block of R + P channels
//
// There is one kv head, and there are no pages of values. Both blocks are ordinary blocks of keys
// (docs/reference/format.md), so that what reads keys reads them. A cache_ref of such a pair has `key_pages`
// alone; value_pages may be null.
#pragma once

#include "../layout/block_access.cuh"
#include "../layout/mixed_cache.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// Scheme: of the latent channels; full<T>: of all channels. Latent, Rotary, Values: R, P and V.
template <class Scheme, int Latent, int Rotary, int Values, int PageTokens>
struct latent_pair {
    static_assert(device_scheme<Scheme>, "kvq::cuda::latent_pair: kernels do not read blocks of this scheme");
    static_assert(!detail::has_transform<Scheme>,
                  "kvq::cuda::latent_pair: latents behind a transform are read on the CPU alone");
    static_assert(Latent >= 1 && Rotary >= 0 && Values >= 1 && Values <= Latent + Rotary && PageTokens >= 1,
                  "kvq::cuda::latent_pair: values are the first of latent and rotary channels");
    using keys = Scheme;
    using values = Scheme;
    static constexpr int head_dim = Latent + Rotary;
    static constexpr int value_dim = Values;
    static constexpr int page_tokens = PageTokens;

    /// Channels of the first block, and of the second one.
    static constexpr int first_channels = full_precision<Scheme> ? head_dim : Latent;
    static constexpr int second_channels = head_dim - first_channels;
    using first_pair = detail::read_pair<block_pair<Scheme, Scheme, first_channels, PageTokens>>;
    using second_pair =
        block_pair<full<float16>, full<float16>, second_channels == 0 ? 1 : second_channels, PageTokens>;
    static constexpr std::size_t second_block = first_pair::key_block_bytes;
    static constexpr std::size_t key_block_bytes =
        second_block + (second_channels == 0 ? 0 : second_pair::key_block_bytes);
    static constexpr std::size_t value_block_bytes = 0;
};

namespace detail {

template <class Pair>
inline constexpr bool is_latent_pair = false;
template <class Scheme, int Latent, int Rotary, int Values, int PageTokens>
inline constexpr bool is_latent_pair<latent_pair<Scheme, Latent, Rotary, Values, PageTokens>> = true;

/// x^ of one channel of a token.
template <class Pair>
KVQ_HD float read_latent(const cache_ref<Pair>& cache, int page, int in_page, int channel) noexcept {
    const std::byte* const block = cache.key_block(page, 0);
    using first = typename Pair::first_pair;
    using second = typename Pair::second_pair;
    if (Pair::second_channels == 0 || channel < Pair::first_channels)
        return read_value<typename first::keys>(first::key_shape(), block, in_page, channel);
    return read_value<typename second::keys>(second::key_shape(), block + Pair::second_block, in_page,
                                             channel - Pair::first_channels);
}

}  // namespace detail
}}}  // namespace kvq::cuda
