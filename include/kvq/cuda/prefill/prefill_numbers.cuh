// Parameters of codes as half floats, and x^ of 8 neighbouring columns: the arithmetic of prefill_tile.cuh.
//
//   x^ = (scale * (code - centre) + bias) * token scale
//
// Contract: as prefill_tile.cuh says. Parameters are loaded early and converted late.
#pragma once

#include "../layout/mixed_cache.cuh"
#include "../layout/unpack_codes.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The same number twice.
__device__ __forceinline__ std::uint32_t twice(std::uint16_t half) { return half * 0x00010001u; }

__device__ __forceinline__ std::uint16_t to_half(float x) {
    return static_cast<std::uint16_t>(pack_halves<float16>(x, 0.0f));
}

/// Scale and bias of a set of codes as halves; low: what the scale lost by being rounded.
struct half_parameters {
    std::uint16_t scale, bias, low;
};

/// Scale and bias of a set of codes as they are stored: loaded early, converted late.
template <class P, bool HasBias>
struct stored_pair {
    std::uint32_t scale = 0, bias = 0;
    std::uint32_t numbers[3] = {};  // of the group, for 8-bit parameters: scale unit, first bias, bias step

    /// Set `at` of a block's scales and biases; group_numbers: where its group's three numbers are. All in
    /// bytes.
    template <class Block>
    __device__ __forceinline__ void load(const Block& block, std::size_t scales, std::size_t biases, int at,
                                         int group_numbers) {
        constexpr int width = parameter_width<P>;
        const Block own = block.from(static_cast<std::size_t>(at * width));
        scale = own.template get<width>(static_cast<int>(scales));
        if constexpr (HasBias) bias = own.template get<width>(static_cast<int>(biases));
        if constexpr (std::is_same_v<P, byte_params>)
#pragma unroll
            for (int i = 0; i < 3; ++i) numbers[i] = block.template get<2>(group_numbers + 2 * i);
    }
    __device__ __forceinline__ float2 floats() const {
        if constexpr (std::is_same_v<P, byte_params>)
            return {unpack_half<bfloat16, 0>(numbers[0]) * kvq::detail::scale_float::value(scale),
                    fmaf(unpack_half<bfloat16, 0>(numbers[2]), static_cast<float>(bias),
                         unpack_half<bfloat16, 0>(numbers[1]))};
        else if constexpr (sizeof(P) == 2)
            return {unpack_half<P, 0>(scale), unpack_half<P, 0>(bias)};
        else
            return {__uint_as_float(scale), __uint_as_float(bias)};
    }
};

/// Parameters of a set of codes of a scheme. Planes: of codes of both planes (plane_pair).
template <class S, bool Planes = false>
struct stored_set : stored_pair<typename word_traits<S>::parameter, word_traits<S>::has_bias> {
    using traits = word_traits<S>;
    using P = typename traits::parameter;
    static constexpr bool exact = std::is_same_v<P, float16>;  // halves already
    /// Codes are counted from here: biases are then about the middle of a channel's values, and lose less by
    /// being rounded.
    static constexpr int centre = traits::zero_code != 0 || (exact && !Planes) ? traits::zero_code
                                  : Planes                                     ? 128
                                                                               : 1 << (S::code_bits - 1);
    static constexpr float code_unit = Planes ? 0.0625f : 1.0f, code_zero = Planes ? 7.5f : 0.0f;
    /// Scales of tokens scale whole scores, so that their rounding would not average out.
    static constexpr bool has_low = traits::token_parameters && !exact;

    __device__ __forceinline__ half_parameters halves() const {
        if constexpr (exact && !Planes) {
            return {static_cast<std::uint16_t>(this->scale), static_cast<std::uint16_t>(this->bias), 0};
        } else {
            float2 p = this->floats();
            p.x *= code_unit;
            const std::uint16_t high = to_half(p.x);
            return {high,
                    traits::has_bias ? to_half(fmaf(static_cast<float>(centre) - code_zero, p.x, p.y))
                                     : std::uint16_t{0},
                    has_low ? to_half(p.x - half_bits_to_float(high)) : std::uint16_t{0}};
        }
    }
};
/// stored_set, or nothing for 16-bit values.
struct no_set {
    using P = void;
    static constexpr bool has_low = false;
};
template <class S, bool Planes = false>
struct set_of {
    using type = stored_set<S, Planes>;
};
template <class S, bool Planes>
requires full_precision<S>
struct set_of<S, Planes> {
    using type = no_set;
};

/// A word of two 16-bit numbers as halves.
template <class T>
__device__ __forceinline__ std::uint32_t as_halves(std::uint32_t w) {
    if constexpr (std::is_same_v<T, float16>)
        return w;
    else
        return pack_halves<float16>(unpack_half<T, 0>(w), unpack_half<T, 1>(w));
}
template <class Stored>
__device__ __forceinline__ std::uint16_t half_token_scale(std::uint32_t stored) {
    float scale;
    if constexpr (std::is_same_v<Stored, byte_params>)
        scale = kvq::detail::token_scale_float::value(stored);
    else if constexpr (sizeof(Stored) == 2)
        scale = unpack_half<Stored, 0>(stored);
    else
        scale = __uint_as_float(stored);
    return to_half(scale);
}
__device__ __forceinline__ uint4 four_times(std::uint32_t w) { return {w, w, w, w}; }

/// Parameters of 8 neighbouring columns, as halves.
struct octet_parameters {
    uint4 scale, bias, low, token_scale;

    /// Those of a row, which its columns share.
    __device__ __forceinline__ void set_all(const half_parameters& row) {
        scale = four_times(twice(row.scale));
        bias = four_times(twice(row.bias));
        low = four_times(twice(row.low));
    }
};
/// x^ of 8 columns, whose codes are the bytes of two words.
template <class S, bool Low, bool TokenScales, bool Planes = false>
__device__ __forceinline__ void dequantize_octet(std::uint32_t (&x)[4], std::uint32_t low_quad,
                                                 std::uint32_t high_quad, const octet_parameters& p) {
    constexpr std::uint32_t raised =
        0xe400e400u + 0x00010001u * stored_set<S, Planes>::centre;  // -(1024 + centre)
    x[0] = __byte_perm(low_quad, 0x64646464u, 0x4140);
    x[1] = __byte_perm(low_quad, 0x64646464u, 0x4342);
    x[2] = __byte_perm(high_quad, 0x64646464u, 0x4140);
    x[3] = __byte_perm(high_quad, 0x64646464u, 0x4342);
    const std::uint32_t s[4] = {p.scale.x, p.scale.y, p.scale.z, p.scale.w};
    [[maybe_unused]] const std::uint32_t b[4] = {p.bias.x, p.bias.y, p.bias.z, p.bias.w},
                                         l[4] = {p.low.x, p.low.y, p.low.z, p.low.w},
                                         f[4] = {p.token_scale.x, p.token_scale.y, p.token_scale.z,
                                                 p.token_scale.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const std::uint32_t code = multiply_add_halves(x[k], 0x3c003c00u, raised);
        if constexpr (Low)
            x[k] = multiply_add_halves(code, s[k], multiply_add_halves(code, l[k], b[k]));
        else if constexpr (word_traits<S>::has_bias)
            x[k] = multiply_add_halves(code, s[k], b[k]);
        else
            x[k] = multiply_halves(code, s[k]);
        if constexpr (TokenScales) x[k] = multiply_halves(x[k], f[k]);
    }
}

}}}  // namespace kvq::cuda::detail
