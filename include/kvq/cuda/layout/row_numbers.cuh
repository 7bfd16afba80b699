// Numbers of rows of tokens (schemes/row_layout.hpp) as half floats.
//
//   8 bits   e4m3: one conversion for two; e5m2: the first bytes of half floats
//   4 bits   e2m1 s e e m becomes s 0 0 e e m 0 0, which is e4m3 of 2^-6 of it
//   scale    e4m3: a half float, exact. e8m0: 2^(s - e), where e is the largest exponent of the token (of
//            keys) or of the warp tile (of values) and is multiplied in afterwards
//
// Contract: half floats are exactly number * scale * 2^rise, but for scales far below the largest one of
// those that share e: an absolute error of 2^-25, where the largest number is at least 2^5.
#pragma once

#include "cache_ref.cuh"
#include "parameters.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The scale of the tensor that rows of tokens have; 1 of other blocks.
template <tensor Role, class Pair>
__device__ __forceinline__ float tensor_scale([[maybe_unused]] const cache_ref<Pair>& cache) {
    if constexpr (token_row_scheme<scheme_of<Role, Pair>>)
        return own_scheme<Role>(cache).tensor_scale();
    else
        return 1.0f;
}

/// The lower (0) or upper (1) four bits of every byte, of e2m1, as numbers of e4m3 2^-6 as large.
template <int Upper>
__device__ __forceinline__ std::uint32_t e2m1_as_e4m3(std::uint32_t w) {
    return Upper ? (w & 0x80808080u) | (w >> 2 & 0x1c1c1c1cu)
                 : (w << 4 & 0x80808080u) | (w << 2 & 0x1c1c1c1cu);
}

/// Layout of the rows of S for kernels that read words of numbers.
template <class S>
struct row_reader {
    using number = kvq::row_layout::number;
    using stored = kvq::row_layout::stored;
    static constexpr number numbers = S::numbers;
    static constexpr bool fours = numbers == number::e2m1;
    static constexpr bool scaled = S::scale != stored::none, by_exponent = S::scale == stored::e8m0;
    /// Are they floats without anything between them?
    static constexpr bool reads =
        (numbers == number::e4m3 || numbers == number::e5m2 || fours) && S::scale != stored::fp16;
    static constexpr int word_channels = fours ? 8 : 4;
    /// By how many powers of two half floats of a scale are too large, and those of numbers too small.
    static constexpr int lift = !by_exponent ? 0 : fours ? 15 : numbers == number::e5m2 ? 0 : 6;
    /// What products of half floats are multiplied by.
    static constexpr float unit = static_cast<float>(fours ? 64 : 1) / static_cast<float>(1 << lift);

    /// The channels of half float number i of a word: of the low 16 bits, and of the high ones.
    KVQ_HD static constexpr int first_channel(int i) { return fours ? i % 2 * 4 + i / 2 : 2 * i; }
    static constexpr int pair_step = fours ? 2 : 1;

    /// Four bytes as two words of half floats.
    __device__ __forceinline__ static void of_bytes(std::uint32_t bytes, std::uint32_t& low,
                                                    std::uint32_t& high) {
        if constexpr (numbers == number::e5m2) {
            low = __byte_perm(bytes, 0, 0x1404);
            high = __byte_perm(bytes, 0, 0x3424);
        } else {
            low = halves_of_e4m3<0>(bytes);
            high = halves_of_e4m3<1>(bytes);
        }
    }
    /// The half floats of a word of a row.
    __device__ __forceinline__ static void of_word(std::uint32_t word,
                                                   std::uint32_t (&to)[word_channels / 2]) {
        if constexpr (fours) {
            of_bytes(e2m1_as_e4m3<0>(word), to[0], to[1]);
            of_bytes(e2m1_as_e4m3<1>(word), to[2], to[3]);
        } else {
            of_bytes(word, to[0], to[1]);
        }
    }
    /// A scale as a half float, twice. largest: the exponent that it is relative to.
    __device__ __forceinline__ static std::uint32_t scale_halves(std::uint32_t code,
                                                                 [[maybe_unused]] std::uint32_t largest) {
        if constexpr (by_exponent) {
            const int power = static_cast<int>(code - largest) + lift + 127;
            const float x = __uint_as_float(
                code == 255u ? 0x7fc00000u : static_cast<std::uint32_t>(kvq::detail::larger(power, 0)) << 23);
            return pack_halves<float16>(x, x);
        } else {
            return halves_of_e4m3<0>(code * 0x0101u);
        }
    }
    /// The larger exponent; that of NaN does not count.
    __device__ __forceinline__ static std::uint32_t larger_exponent(std::uint32_t largest,
                                                                    std::uint32_t code) {
        return code == 255u ? largest : kvq::detail::larger(largest, code);
    }
};

}}}  // namespace kvq::cuda::detail
