// Codes of four numbers as a word, and words of code blocks from them.
//
// Contract: the codes of core/rounding.hpp.
#pragma once

#include "unpack_codes.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The low bytes of four words as one word.
__device__ __forceinline__ std::uint32_t bytes_as_word(const std::uint32_t (&y)[4]) {
    return __byte_perm(__byte_perm(y[0], y[1], 0x0040), __byte_perm(y[2], y[3], 0x0040), 0x5410);
}

/// The code of x in the low byte, for a finite x of a group that fits its grid (no NaN, no infinity, no
/// clamping): the rounding of core/rounding.hpp by adding a number whose last place is 1.
template <class S>
__device__ __forceinline__ std::uint32_t quick_code(float x, float bias, float inverse) {
    if constexpr (S::levels::has_bias)
        return __float_as_uint(__fadd_rn(__fmul_rn(x - bias, inverse), 8388608.0f));
    else
        return __float_as_uint(
            __fadd_rn(__fmul_rn(x, inverse), 12582912.0f + static_cast<float>(S::zero_code)));
}
/// Does no number of [lo, hi] need clamping?
template <class S>
__device__ __forceinline__ bool fits_grid(float lo, float hi, float bias, float inverse) {
    constexpr float top = static_cast<float>(S::levels::template top<S::code_bits>);
    if constexpr (S::levels::has_bias)
        return lo >= bias && (hi - bias) * inverse < top + 0.25f;
    else
        return fmaxf(fabsf(lo), fabsf(hi)) * inverse < top - static_cast<float>(S::zero_code) + 0.25f;
}

/// Four codes as the bytes of a word.
template <class S>
__device__ __forceinline__ std::uint32_t quad_of_codes(const float (&x)[4], const float (&bias)[4],
                                                       const float (&inverse)[4], bool clean) {
    std::uint32_t y[4];
    if (clean) {
#pragma unroll
        for (int k = 0; k < 4; ++k) y[k] = quick_code<S>(x[k], bias[k], inverse[k]);
    } else {
#pragma unroll
        for (int k = 0; k < 4; ++k)
            y[k] =
                static_cast<std::uint32_t>(S::levels::template code<S::code_bits>(x[k], bias[k], inverse[k]));
    }
    return bytes_as_word(y);
}

/// The words of one step of quads of a row: f(vector of the row, word) for all planes. `unit` is the step's
/// first quad.
template <class S, class F>
__device__ __forceinline__ void pack_step(int unit, int units,
                                          const std::uint32_t (&quads)[word_traits<S>::units_per_step],
                                          F&& f) {
    using planes = code_planes<S::code_bits>;
    static_for<planes::count>([&](auto plane) {
        constexpr int p = decltype(plane)::value;
        constexpr int per = planes::quads_per_word(p), width = planes::width(p), shift = planes::shift(p);
        constexpr std::uint32_t mask = ((1u << width) - 1u) * 0x01010101u;
#pragma unroll
        for (int v = 0; v < word_traits<S>::units_per_step / per; ++v) {
            std::uint32_t word = 0;
#pragma unroll
            for (int q = 0; q < per; ++q) word |= ((quads[v * per + q] >> shift) & mask) << (width * q);
            f(planes::first_vector(p, units) + unit / per + v, word);
        }
    });
}

}}}  // namespace kvq::cuda::detail
