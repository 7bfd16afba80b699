// Scores of keys whose channels have other parameters every few tokens: codes become half floats, the query
// stays as it is.
//
//   k' = s 2^-e (c - m)      codes masked where they lie, which makes them subnormal half floats, times s
//                            2^(24 - place - e)
//   score = step (2^e sum q' k' + sum q' (b + m s))
//     q' = q by a power of two: one half float, two where q is a float
//
// key_product.cuh multiplies the parameters into the query, once per group of tokens whatever the group
// holds. Where groups are short and 8 or 16 query rows share the codes, it takes fewer instructions to
// multiply the codes. What the query adds up with biases and scales is one more product per 16 channels, with
// biases and scales as rows of A. m is a power of two in the middle of the codes, so that m s is exact; e
// brings the largest scale of the group to where k' keeps its digits.
//
// Contract: k' is s 2^-e (c - m) rounded once, |error| <= 2^-11 of it + 2^-25 (2 bit: exact but for the
// latter); q', b and s are exact (a float q: to 2^-22); sums are floats. Unlike that of a folded query, the
// error differs from token to token.
#pragma once

#include "key_product.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Up to how many tokens a group may have: more share a folded query in fewer instructions. (Measured:
/// docs/lab/gpu_experiments.md.)
template <class WarpTile, int Rows4>
inline constexpr int longest_dequantized_group = [] {
    const bool few_bits = WarpTile::scheme::code_bits <= 2;
    if (Rows4 == 4) return few_bits ? 64 : 32;
    return Rows4 == 2 && few_bits ? 32 : 0;
}();

/// Are codes of keys made half floats? Those of one plane that lanes share evenly.
template <class WarpTile, int Rows4>
inline constexpr bool dequantizes_keys = [] {
    if constexpr (WarpTile::mixed) {
        return false;
    } else if constexpr (WarpTile::full || WarpTile::token_parameters || WarpTile::has_byte_params ||
                         WarpTile::has_token_scales || has_transform<typename WarpTile::scheme>) {
        return false;  // a query behind a transform is no half float
    } else {
        return std::is_same_v<typename WarpTile::parameter, float16> && WarpTile::traits::plane_count == 1 &&
               WarpTile::scheme::code_bits <= 4 && 4 * WarpTile::lane_units == WarpTile::group_units &&
               WarpTile::lane_units % WarpTile::traits::units_per_word(0) == 0 &&
               WarpTile::lane_units % 2 == 0 && WarpTile::group <= longest_dequantized_group<WarpTile, Rows4>;
    }
}();

/// The query rows of an item as half floats: of column g in every tile of 8 rows, the lane's quarter of the
/// channels.
template <class WarpTile, int Rows4, class T>
struct half_query {
    static constexpr int tiles = Rows4 / 2, units = WarpTile::lane_units;
    static constexpr bool wide = sizeof(T) > 2;
    half_quad high[tiles][units], low[wide ? tiles : 1][wide ? units : 1];
    float step[Rows4];  // of the lane's own rows

    /// Of the query in shared memory at `rows`, as in fold_rows, but not multiplied by `scale` yet.
    __device__ __forceinline__ half_query(std::uint32_t rows, int stride, float scale, const lane_id& id) {
#pragma unroll
        for (int m = 0; m < tiles; ++m) {
            const std::uint32_t row = rows + static_cast<std::uint32_t>(4 * (8 * m + id.g) * stride);
            float4 x[units];
            float top = 0.0f;
#pragma unroll
            for (int i = 0; i < units; ++i) {
                x[i] = load_parameters<float>(row + query_byte<WarpTile::dim>(id.g, 16 * (id.t * units + i)));
                top = fmaxf(top, max_abs4(x[i]));
            }
            // The largest becomes 2^10 to 2^11. All numbers are finite; 2^127 takes the power of 2^126.
            const std::uint32_t exponent =
                smaller(__float_as_uint(over_row<true>(top, max_floats{})) >> 23, 253u);
            const float power = top > 1e-33f ? __uint_as_float((254u - exponent) << 23) * 1024.0f : 0.0f;
#pragma unroll
            for (int i = 0; i < units; ++i) {
                const float a = x[i].x * power, b = x[i].y * power, c = x[i].z * power, d = x[i].w * power;
                half_quad& h = high[m][i];
                h = {pack_halves<float16>(a, c), pack_halves<float16>(b, d)};
                if constexpr (wide)
                    low[m][i] = {pack_halves<float16>(a - unpack_half<float16, 0>(h.even),
                                                      c - unpack_half<float16, 1>(h.even)),
                                 pack_halves<float16>(b - unpack_half<float16, 0>(h.odd),
                                                      d - unpack_half<float16, 1>(h.odd))};
            }
            const float own = __uint_as_float(exponent << 23) * (1.0f / 1024.0f) * scale;
#pragma unroll
            for (int i = 0; i < 2; ++i) step[2 * m + i] = to_owner<true>(own, i, id);
        }
    }
    /// sums[m] += the product of 16 rows with unit `u`: rows g and g + 8.
    __device__ __forceinline__ void multiply(float (&sums)[tiles][4], const half_quad& upper,
                                             const half_quad& lower, int u) const {
#pragma unroll
        for (int m = 0; m < tiles; ++m) {
            mma_values<float16>(sums[m], upper.even, lower.even, upper.odd, lower.odd, high[m][u].even,
                                high[m][u].odd);
            if constexpr (wide)
                mma_values<float16>(sums[m], upper.even, lower.even, upper.odd, lower.odd, low[m][u].even,
                                    low[m][u].odd);
        }
    }
};

/// The query of an item, as a warp keeps it.
template <class WarpTile, int Rows4, class T>
using query_of = std::conditional_t<dequantizes_keys<WarpTile, Rows4>, half_query<WarpTile, Rows4, T>,
                                    key_query<WarpTile, Rows4>>;

/// Parameters of units First to First + N - 1 of the lane in run `run`; `at`: of the section.
template <class WarpTile, int First, int N>
__device__ __forceinline__ void load_channels(half_quad (&to)[N], std::uint32_t at, int run,
                                              const lane_id& id) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        const uint4 v = load_shared_16(
            at + WarpTile::parameter_byte(
                     2 * (run * WarpTile::run + 4 * (id.t * WarpTile::lane_units + First + i))));
        to[i] = half_quad::of(v.x, v.y);
        to[i + 1] = half_quad::of(v.z, v.w);
    }
}

/// The exponent bits of the largest scale of a run, as those of half floats. All lanes.
template <class WarpTile>
__device__ __forceinline__ int largest_exponent(std::uint32_t slot, int run, const lane_id& id) {
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < ceil_div(WarpTile::run_bytes, 16 * warp_size); ++i) {
        const int at = smaller(16 * (i * warp_size + id.lane), WarpTile::run_bytes - 16);
        const uint4 v = load_shared_16(
            slot + static_cast<std::uint32_t>(WarpTile::scale_at + run * WarpTile::run_bytes + at));
        constexpr std::uint32_t bits = 0x7fff7fffu;
        const std::uint32_t four = max_halves<float16>(max_halves<float16>(v.x & bits, v.y & bits),
                                                       max_halves<float16>(v.z & bits, v.w & bits));
        largest = larger(largest, larger(four & 0xffffu, four >> 16));
    }
    return static_cast<int>(__reduce_max_sync(~0u, largest) >> 10);
}

/// Scores of the tiles from First on that have the parameters of run `run`.
template <int First, int Count, class WarpTile, int Rows4, class T>
__device__ __forceinline__ void score_dequantized(float (&scores)[WarpTile::tiles][Rows4][4],
                                                  const half_query<WarpTile, Rows4, T>& query,
                                                  std::uint32_t slot, int run, const lane_id& id) {
    using traits = typename WarpTile::traits;
    constexpr int tiles = Rows4 / 2, per_line = traits::units_per_word(0);
    constexpr unsigned middle = 1u << (WarpTile::scheme::code_bits - 1);
    // Scales are multiplied by 2^(29 - exponent - place), in two steps, since half floats end at 2^15.
    const int exponent = largest_exponent<WarpTile>(slot, run, id), rise = 29 - exponent;
    const std::uint32_t front = half_power(smaller(rise, 15));
    const int rest = larger(rise, 15) - 15;
    float sums[Count][2][tiles][4] = {};
    float base[tiles][4] = {};  // of the lane's two rows: with biases, with scales
    static_for<WarpTile::lane_units / per_line>([&](auto line) {
        constexpr int Line = decltype(line)::value, Unit = Line * per_line;
        half_quad scale[per_line], bias[per_line], centre[per_line];
        load_channels<WarpTile, Unit>(scale, slot + WarpTile::scale_at, run, id);
        if constexpr (traits::has_bias)
            load_channels<WarpTile, Unit>(bias, slot + WarpTile::bias_at, run, id);
        static_for<per_line>([&](auto i) {
            constexpr int I = decltype(i)::value, place = WarpTile::place(I);
            query.multiply(base, traits::has_bias ? bias[I] : scale[I], scale[I], Unit + I);
            constexpr std::uint32_t code = 0x80008000u + (middle << place) * 0x00010001u;
            const std::uint32_t back = half_power(rest - place);
            scale[I] = scale[I].times({front, front}).times({back, back});
            centre[I] = scale[I].times({code, code});
        });
        static_for<Count>([&](auto tile) {
            constexpr int Tile = decltype(tile)::value;
            WarpTile::template for_line_halves<First + Tile, Line>(
                slot, id, [&](auto unit, const uint4& even, const uint4& odd) {
                    constexpr int U = decltype(unit)::value, I = U - Unit;
                    const auto dequantized = [&](std::uint32_t a, std::uint32_t b) {
                        return half_quad{multiply_add_halves(a, scale[I].even, centre[I].even),
                                         multiply_add_halves(b, scale[I].odd, centre[I].odd)};
                    };
                    query.multiply(sums[Tile][0], dequantized(even.x, odd.x), dequantized(even.y, odd.y), U);
                    query.multiply(sums[Tile][1], dequantized(even.z, odd.z), dequantized(even.w, odd.w), U);
                });
        });
    });
    const float unit = __uint_as_float(static_cast<std::uint32_t>(exponent + 122) << 23);
#pragma unroll
    for (int n = 0; n < Rows4; ++n) {
        const float step = query.step[n];
        const float from_bias = traits::has_bias ? base[n / 2][n % 2] : 0.0f;
        constexpr auto rest_of_code = static_cast<float>(static_cast<int>(middle) - traits::zero_code);
        const float offset = fmaf(rest_of_code, base[n / 2][2 + n % 2], from_bias) * step;
#pragma unroll
        for (int tile = 0; tile < Count; ++tile)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                scores[First + tile][n][r] =
                    fmaf(sums[tile][r / 2][n / 2][2 * (r % 2) + n % 2], unit * step, offset);
    }
}

}}}  // namespace kvq::cuda::detail
