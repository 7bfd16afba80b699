// Parameters of four tokens or channels at a time, from shared memory to registers.
//
//   P = float16, bfloat16, float     as they are stored
//   P = byte_params                        bytes under three numbers of the group (quant/byte_params.hpp):
//                                          scales come in units of
//                                    group_line::unit, which folds into a product's last factor; biases =
//                                      first + step * code
//
// Two bytes at a time are permuted to where half floats have their last bits (biases), and multiplied to
// where these have their exponents (scales, token scales).
// Contract: unit * scales and token scales are exactly those that the CPU dequantizes (the products are
// exact, see byte_params.hpp); codes of biases are integers, and first + step * code is left to who adds them
// up.
#pragma once

#include "../../quant/block_params.hpp"
#include "../arch/ptx.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// 2^exponent, twice.
KVQ_HD constexpr std::uint32_t half_power(int exponent) {
    return static_cast<std::uint32_t>(exponent + 15) * 0x04000400u;
}

/// Codes that lie in half floats as they are count 2^-24 of themselves.
inline constexpr float half_codes = 16777216.0f;

/// Four 16-bit fixed-point numbers (low halves of y) as a word of high bytes and a word of low bytes.
struct byte_words {
    std::uint32_t high, low;
};
__device__ __forceinline__ byte_words split_bytes(std::uint32_t y0, std::uint32_t y1, std::uint32_t y2,
                                                  std::uint32_t y3) {
    const std::uint32_t a = __byte_perm(y0, y1, 0x5140), b = __byte_perm(y2, y3, 0x5140);
    return {__byte_perm(a, b, 0x7632), __byte_perm(a, b, 0x5410)};
}

template <class P>
inline constexpr int parameter_width = std::is_same_v<P, byte_params> ? 1 : static_cast<int>(sizeof(P));

/// What the channels of a group share.
template <class P>
struct group_line {
    static constexpr float unit = 1.0f;
    __device__ __forceinline__ static group_line load(std::uint32_t) { return {}; }
};
template <>
struct group_line<byte_params> {
    float unit, first, step;
    __device__ __forceinline__ static group_line load(std::uint32_t at) {
        return {__uint_as_float(load_shared_2(at) << 16), __uint_as_float(load_shared_2(at + 2) << 16),
                __uint_as_float(load_shared_2(at + 4) << 16)};
    }
};

/// Four half floats: 0 and 2 in one word, 1 and 3 in the other, which is the order in which masks leave the
/// codes of a word.
struct half_quad {
    std::uint32_t even, odd;

    /// Of neighbours 0 and 1, 2 and 3.
    __device__ __forceinline__ static half_quad of(std::uint32_t front, std::uint32_t back) {
        return {__byte_perm(front, back, 0x5410), __byte_perm(front, back, 0x7632)};
    }
    __device__ __forceinline__ half_quad times(const half_quad& other) const {
        return {multiply_halves(even, other.even), multiply_halves(odd, other.odd)};
    }
    __device__ __forceinline__ float4 floats() const {
        return {unpack_half<float16, 0>(even), unpack_half<float16, 0>(odd), unpack_half<float16, 1>(even),
                unpack_half<float16, 1>(odd)};
    }
};
/// The bytes of a word as half floats, 2^-24 of themselves.
__device__ __forceinline__ half_quad byte_halves(std::uint32_t bytes) {
    return {__byte_perm(bytes, 0u, 0x4240), __byte_perm(bytes, 0u, 0x4341)};
}
/// The bytes of a word, codes of a small_float, as half floats; all times half_lift, where the smallest one
/// would be subnormal.
template <class SmallFloat>
inline constexpr int half_lift = SmallFloat::smallest < 0x1p-14f ? 2 : 1;
/// The exponent of the smallest one, as they come.
template <class SmallFloat>
inline constexpr int half_lowest = half_lift<SmallFloat> - SmallFloat::exponents;
/// lowest: two half floats, which code 0 becomes.
template <class SmallFloat>
__device__ __forceinline__ half_quad
small_halves(std::uint32_t codes, std::uint32_t lowest = half_power(half_lowest<SmallFloat>)) {
    constexpr std::uint32_t step = 4 * SmallFloat::exponents;  // of its last bit
    static_assert(SmallFloat::smallest * half_lift<SmallFloat> == 1.0f / (1 << -half_lowest<SmallFloat>));
    return {__byte_perm(codes, 0u, 0x4240) * step + lowest, __byte_perm(codes, 0u, 0x4341) * step + lowest};
}

/// Four neighbouring parameters of a float type.
template <class P>
__device__ __forceinline__ float4 load_parameters(std::uint32_t at) {
    if constexpr (sizeof(P) == 4) {
        const uint4 v = load_shared_16(at);
        return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
    } else {
        const uint2 v = load_shared_8(at);
        return {unpack_half<P, 0>(v.x), unpack_half<P, 1>(v.x), unpack_half<P, 0>(v.y),
                unpack_half<P, 1>(v.y)};
    }
}
template <class P>
__device__ __forceinline__ float4 load_scales(std::uint32_t at) {
    if constexpr (std::is_same_v<P, byte_params>)
        return small_halves<kvq::detail::scale_float>(load_shared_4(at)).floats();
    else
        return load_parameters<P>(at);
}

/// Codes of the token scales of four neighbouring tokens. They may start at any even address: Skew says how
/// far from a word.
template <int Skew>
__device__ __forceinline__ std::uint32_t load_token_scale_codes(std::uint32_t at) {
    static_assert(Skew == 0 || Skew == 2);
    const std::uint32_t word = load_shared_4(at - Skew);
    return Skew == 2 ? __byte_perm(word, load_shared_4(at + 2), 0x5432) : word;
}
template <class P>
inline constexpr int token_scale_lift =
    std::is_same_v<P, byte_params> ? half_lift<kvq::detail::token_scale_float> : 1;
/// TokenScales of four neighbouring tokens, times token_scale_lift.
template <class P, int Skew>
__device__ __forceinline__ float4 load_token_scales(std::uint32_t at) {
    if constexpr (std::is_same_v<P, byte_params>) {
        return small_halves<kvq::detail::token_scale_float>(load_token_scale_codes<Skew>(at)).floats();
    } else {
        static_assert(Skew == 0);
        return load_parameters<P>(at);
    }
}

/// N pairs of neighbouring words.
template <int N>
__device__ __forceinline__ void load_pairs(uint2 (&to)[N], std::uint32_t at) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const std::uint32_t from = at + 8u * static_cast<std::uint32_t>(i);
        if constexpr (N % 2 == 0) {
            if (i % 2 != 0) continue;
            const uint4 v = load_shared_16(from);
            to[i] = {v.x, v.y};
            to[i + 1] = {v.z, v.w};
        } else {
            to[i] = load_shared_8(from);
        }
    }
}

}}}  // namespace kvq::cuda::detail
