// Pages of latents in device memory: K and V of a token are the same numbers, stored once.
//
//   key     x^[0, R + P)    R latent channels, then P rotary channels
//   value   x^[0, V)
//   block   of codes: | block of the scheme, R channels | block of P channels: fp16, int8 or ref8 keys |
//           of 16-bit values, and of records of other systems (schemes/record_layout.hpp): one block of
//           R + P channels
//
// There is one kv head, and there are no pages of values. Both blocks are ordinary blocks of keys
// (docs/reference/format.md), so that what reads keys reads them. A cache_ref of such a pair has `key_pages`
// alone; value_pages may be null.
#pragma once

#include "block_access.cuh"
#include "mixed_cache.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// Blocks of keys alone.
template <class Keys, int Dim, int PageTokens>
struct keys_pair {
    using keys = Keys;
    using values = full<float16>;  // there are none
    static constexpr int head_dim = Dim, value_dim = 1, page_tokens = PageTokens;
    static constexpr std::size_t key_block_bytes = block_bytes_of<Keys>({tensor::key, PageTokens, Dim});
    static constexpr std::size_t value_block_bytes = 0;
};

/// `Count` channels of the keys of Pair from `First` on, to be read.
template <class Pair, int First, int Count>
struct some_channels {
    using keys = typename Pair::keys;
    using values = keys;
    static constexpr int head_dim = Count, value_dim = Count, page_tokens = Pair::page_tokens;
    static constexpr std::size_t key_block_bytes = Pair::key_block_bytes, value_block_bytes = 0;

    KVQ_HD static float number(const std::byte* block, int token, int channel) noexcept {
        return Pair::number(block, token, First + channel);
    }
};
template <class Pair, int First, int Count>
inline constexpr int first_channel<some_channels<Pair, First, Count>> = First;
template <class Pair, int First, int Count>
inline constexpr block_shape stored_shape<tensor::key, some_channels<Pair, First, Count>> =
    shape_of<tensor::key, Pair>;

/// Do blocks of S have this many channels?
template <class S>
constexpr bool holds_channels(int dim) noexcept {
    if constexpr (token_record_scheme<S>) {
        constexpr record_layout l = S::fixed_layout();
        return (l.head_dim == 0 || l.head_dim == dim) && dim % l.group_of(dim) == l.wide % l.group_of(dim);
    } else {
        return true;
    }
}
/// The same pages of keys, seen as blocks of another pair that lie `offset` bytes behind theirs.
template <class To, class Pair>
__device__ __forceinline__ cache_ref<To> keys_as(const cache_ref<Pair>& c, std::size_t offset) noexcept {
    cache_ref<To> to;
    to.key_pages = c.key_pages + offset;
    to.key_page_bytes = c.key_page_bytes;
    return to;
}

}  // namespace detail

/// Scheme: of the latent channels; full<T>, records_of<>: of all channels. Latent, Rotary, Values: R, P, V.
/// Last: of the rotary channels.
template <class Scheme, int Latent, int Rotary, int Values, int PageTokens, class Last = full<float16>>
struct latent_pair {
    static_assert(device_scheme<Scheme> && device_scheme<Last>,
                  "kvq::cuda::latent_pair: kernels do not read blocks of this scheme");
    static_assert(!detail::has_transform<Scheme>,
                  "kvq::cuda::latent_pair: latents behind a transform are read on the CPU alone");
    static_assert(Latent >= 1 && Rotary >= 0 && Values >= 1 && Values <= Latent + Rotary && PageTokens >= 1,
                  "kvq::cuda::latent_pair: values are the first of latent and rotary channels");
    using keys = Scheme;
    using values = Scheme;
    using last = Last;
    static constexpr int head_dim = Latent + Rotary;
    static constexpr int value_dim = Values;
    static constexpr int page_tokens = PageTokens;

    /// Channels of the first block, and of the second one.
    static constexpr int first_channels =
        full_precision<Scheme> || detail::token_record_scheme<Scheme> ? head_dim : Latent;
    static_assert(detail::holds_channels<Scheme>(first_channels),
                  "kvq::cuda::latent_pair: these records have another number of channels");
    static constexpr int second_channels = head_dim - first_channels;
    using first_pair = detail::read_pair<block_pair<Scheme, Scheme, first_channels, PageTokens>>;
    using second_pair =
        detail::read_pair<block_pair<last, last, second_channels == 0 ? 1 : second_channels, PageTokens>>;
    static constexpr std::size_t second_block = first_pair::key_block_bytes;
    static constexpr std::size_t key_block_bytes =
        second_block + (second_channels == 0 ? 0 : second_pair::key_block_bytes);
    static constexpr std::size_t value_block_bytes = 0;

    /// What quantizes to the first block, and what writes the second one.
    using first_coded =
        detail::keys_pair<typename detail::quantized_pair<
                              block_pair<Scheme, full<float16>, first_channels, PageTokens, 1>>::keys,
                          first_channels, PageTokens>;
    using second_coded =
        detail::keys_pair<typename detail::quantized_pair<
                              block_pair<last, full<float16>, second_pair::head_dim, PageTokens, 1>>::keys,
                          second_pair::head_dim, PageTokens>;

    /// x^ of one channel of a token.
    KVQ_HD static float number(const std::byte* block, int token, int channel) noexcept {
        if (second_channels == 0 || channel < first_channels)
            return detail::read_value<typename first_pair::keys>(first_pair::key_shape(), block, token,
                                                                 channel);
        return detail::read_value<typename second_pair::keys>(second_pair::key_shape(), block + second_block,
                                                              token, channel - first_channels);
    }
};

namespace detail {

template <class Pair>
inline constexpr bool is_latent_pair = false;
template <class Scheme, int Latent, int Rotary, int Values, int PageTokens, class Last>
inline constexpr bool is_latent_pair<latent_pair<Scheme, Latent, Rotary, Values, PageTokens, Last>> = true;

/// Kernels know these blocks as they are.
template <class Scheme, int Latent, int Rotary, int Values, int PageTokens, class Last, class Keys,
          class NoValues>
struct pair_like<latent_pair<Scheme, Latent, Rotary, Values, PageTokens, Last>, Keys, NoValues> {
    using type = latent_pair<Scheme, Latent, Rotary, Values, PageTokens, Last>;
};

}  // namespace detail
}}}  // namespace kvq::cuda
