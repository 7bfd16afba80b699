// Quantizing to rows and records of tokens (schemes/token_rows.hpp, token_records.hpp) on the device, with
// the CPU's own functions.
//
//   piece    the channels of a token that share a scale; where all tokens share one, up to 32 of them; the
//            wide channels of a record
//
// A thread quantizes a piece. Layouts are constants here, so that only their own part of the function is
// left.
// Contract: the bytes of the scheme's quantize(), padding included.
#pragma once

#include "row_numbers.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

template <class S>
struct row_pieces {
    static constexpr int most = S::channels > 0 ? S::channels : token_rows::most_channels;

    KVQ_HD static constexpr int of(const block_shape& s) { return kvq::detail::ceil_div(s.dim, most); }
    KVQ_HD static constexpr int token_bytes(const block_shape& s) {
        constexpr kvq::row_layout layout = S::fixed_layout();
        return layout.row_bytes(s.dim) + layout.scales_behind(s.dim);
    }

    /// number(channel): of the token. Returns how many are not finite.
    template <class Number>
    __device__ __forceinline__ static unsigned quantize(const S& scheme, const block_shape& s,
                                                        std::byte* block, int token, int piece,
                                                        const Number& number) {
        constexpr kvq::row_layout layout = S::fixed_layout();
        const int bytes = layout.row_bytes(s.dim);
        return quantize_row(
            scheme, s.dim, block + std::ptrdiff_t{token} * bytes,
            block + std::ptrdiff_t{s.tokens} * bytes + std::ptrdiff_t{token} * layout.scales_behind(s.dim),
            piece, number);
    }
    /// The same of a row whose scales lie anywhere.
    template <class Number>
    __device__ __forceinline__ static unsigned quantize_row(const S& scheme, int dim, std::byte* row,
                                                            std::byte* scales, int piece,
                                                            const Number& number) {
        constexpr kvq::row_layout layout = S::fixed_layout();
        const int first = piece * most, n = kvq::detail::smaller(most, dim - first);
        float x[most];
#pragma unroll
        for (int k = 0; k < most; ++k) x[k] = k < n ? number(first + k) : 0.0f;
        return scheme.fixed().quantize_group(x, n, row + piece * layout.group_bytes(most), scales + piece);
    }
};

template <class S>
requires token_record_scheme<S>
struct row_pieces<S> {
    KVQ_HD static constexpr int of(const block_shape& s) {
        constexpr record_layout layout = S::fixed_layout();
        return layout.groups(s.dim) + (layout.wide > 0);
    }
    KVQ_HD static constexpr int token_bytes(const block_shape& s) {
        constexpr record_layout layout = S::fixed_layout();
        return layout.token_bytes(s.dim);
    }

    template <class Number>
    __device__ __forceinline__ static unsigned quantize(const S&, const block_shape& s, std::byte* block,
                                                        int token, int piece, const Number& number) {
        struct channels {
            const Number& number;
            int first;
            __device__ __forceinline__ float operator[](int i) const { return number(first + i); }
        };
        constexpr record_layout layout = S::fixed_layout();
        const int groups = layout.groups(s.dim);
        if (layout.wide > 0 && piece == groups)
            return S::fixed().store_wide(s, channels{number, layout.scaled_channels(s.dim)}, block, token);
        return S::fixed().quantize_group(s, channels{number, piece * layout.group_of(s.dim)}, block, token,
                                         piece);
    }
};

/// One piece of a token of a page of `cache`.
template <tensor Role, class Pair, class Number>
__device__ __forceinline__ unsigned quantize_piece(const cache_ref<Pair>& cache, int page, int head,
                                                   int token, int piece, const Number& number) {
    using pieces = row_pieces<scheme_of<Role, Pair>>;
    constexpr block_shape shape = shape_of<Role, Pair>;
    if constexpr (is_strided<Pair>) {
        const row_address at = cache.template row<Role>(page, head, token);
        return pieces::quantize_row(own_scheme<Role>(cache), shape.dim, at.row,
                                    const_cast<std::byte*>(at.scales), piece, number);
    } else {
        return pieces::quantize(own_scheme<Role>(cache), shape, cache.template block<Role>(page, head), token,
                                piece, number);
    }
}

/// A whole block, by all threads of a thread block. number(token, channel).
template <int Threads, tensor Role, class Pair, class Number>
__device__ __forceinline__ unsigned quantize_rows(const cache_ref<Pair>& cache, int page, int head,
                                                  const Number& number) {
    using pieces = row_pieces<scheme_of<Role, Pair>>;
    constexpr block_shape s = shape_of<Role, Pair>;
    const int thread = static_cast<int>(threadIdx.x), count = s.tokens * pieces::of(s);
    if constexpr (!is_strided<Pair>) {
        std::byte* const block = cache.template block<Role>(page, head);
        for (std::size_t i = static_cast<std::size_t>(s.tokens * pieces::token_bytes(s)) + threadIdx.x;
             i < own_scheme<Role>(cache).block_bytes(s); i += Threads)
            block[i] = std::byte{0};
    }
    unsigned not_finite = 0;
    for (int i = thread; i < count; i += Threads) {
        const int token = i % s.tokens;
        not_finite += quantize_piece<Role>(cache, page, head, token, i / s.tokens,
                                           [&](int channel) { return number(token, channel); });
    }
    return not_finite;
}

}}}  // namespace kvq::cuda::detail
