// The product of weights and packed values with half floats: codes are masked where they lie, which makes
// them (subnormal) half floats.
//
//   w = 2^(score - r + 12 - e)      w' = w * value scale of the token, both rounded to half floats
//   output = sum w' (c - m) + m sum w s + sum w b
//     m = half of the largest code; the last sums once per group and warp tile
//
// Where 8 or 16 query rows share the codes, this takes fewer instructions than whole numbers
// (value_product.cuh): weights pass through shared memory once for all groups of channels, and a lane
// multiplies two of them with their tokens' scales at once. What else a group needs of the parameters are
// products of tensor cores too, with parameters as rows of A. A code that lies `place` bits higher counts
// 2^place times: w' is multiplied by 2^-place. r is a whole number, at most 2 below the largest score so far:
// it follows when a lane finds one farther above. Weights are lifted by 2^12, since half floats below 2^-14
// lose digits; e is 0 unless scales of values are 2 or more and grows with them, so that no product leaves
// the range.
//
// Contract: |w' - w s| <= 2^-11 w s + 2^-25 2^place; the rounding of w' is multiplied by c - m; sums are
// floats.
#pragma once

#include "value_product.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Do the products of values take half floats? For codes of one plane, up to 4 bits: others take more
/// instructions to become half floats than that saves. With 8 rows it pays where weights are multiplied with
/// something of their tokens, and not for few bits under a single set of weights.
template <class Values, int Rows4>
inline constexpr bool takes_halves = [] {
    if constexpr (Values::full || Rows4 == 1) {
        return false;
    } else {
        constexpr int bits = Values::scheme::code_bits, sets = Values::token_parameters ? Values::runs : 1;
        constexpr bool half_parameters =
            Values::has_byte_params ||
            (std::is_same_v<typename Values::parameter, float16> && !Values::has_token_scales);
        return half_parameters && (bits == 4 || bits < 3) &&
               (Rows4 == 4 || (Values::scales_tokens && (bits == 4 || sets > 1)));
    }
}();

/// Tiles of 8 query columns.
template <int Rows4>
inline constexpr int column_tiles = Rows4 / 2;

/// 2 m: the largest code, or twice the zero of symmetric codes.
template <class Values>
inline constexpr int twice_middle = Values::traits::has_bias ? (1 << Values::scheme::code_bits) - 1
                                                             : 2 * Values::traits::zero_code;

/// Weights in shared memory: [8 columns of a tile][unit] words, two to a unit of four tokens.
template <class Values>
struct half_words {
    static constexpr int stride = 8 * Values::lane_units + 4;
    KVQ_HD static constexpr int words(int rows4) { return 4 * rows4 * stride; }
};

/// Softmax state of a warp whose values take products of half floats; finished() is what others know.
template <class Values, int Rows4>
struct half_state {
    static constexpr int tiles = column_tiles<Rows4>;
    static constexpr int sets = Values::token_parameters ? Values::runs : 1;
    /// Weights are at most 2^(lift + score_slack).
    static constexpr float lift = 12.0f;
    float max[Rows4];  // r
    float sum[Rows4];  // this lane's part
    float rest[Rows4][sets];
    float output[Values::tiles][tiles][2][4];  // as tensor cores leave them
    float exponent;                            // e, the same for all rows

    __device__ __forceinline__ void clear() {
        exponent = 0.0f;
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            max[n] = -INFINITY;
            sum[n] = 0.0f;
#pragma unroll
            for (int s = 0; s < sets; ++s) rest[n][s] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < Values::tiles * tiles * 8; ++i)
            output[i / (8 * tiles)][i / 8 % tiles][i / 4 % 2][i % 4] = 0.0f;
    }
    /// Multiplies the rows' sums of values.
    __device__ __forceinline__ void multiply(const float (&factor)[Rows4]) {
#pragma unroll
        for (int n = 0; n < Rows4; ++n)
#pragma unroll
            for (int s = 0; s < sets; ++s) rest[n][s] *= factor[n];
#pragma unroll
        for (int tile = 0; tile < Values::tiles; ++tile)
#pragma unroll
            for (int m = 0; m < tiles; ++m)
#pragma unroll
                for (int i = 0; i < 8; ++i) output[tile][m][i / 4][i % 4] *= factor[2 * m + i % 2];
    }
    __device__ __forceinline__ finished_rows<Values::tiles, Rows4> finished() const {
        finished_rows<Values::tiles, Rows4> rows;
        constexpr int tiles_of_set = ceil_div(Values::tiles, sets);
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            rows.max[n] = max[n] - lift + exponent;
            rows.sum[n] = over_tokens(sum[n], add_floats{});
#pragma unroll
            for (int tile = 0; tile < Values::tiles; ++tile)
#pragma unroll
                for (int r = 0; r < 4; ++r)
                    rows.output[tile][n][r] =
                        fmaf(output[tile][n / 2][r / 2][2 * (r % 2) + n % 2],
                             Values::token_parameters ? half_codes : 1.0f, rest[n][tile / tiles_of_set]);
        }
        return rows;
    }
};

/// Scores become weights; the state's sums move on.
template <class Keys, class Values, int Rows4>
__device__ __forceinline__ void soften(float (&s)[Keys::tiles][Rows4][4], half_state<Values, Rows4>& state,
                                       warp_tile_factors<Values, Rows4>&, const lane_id& id) {
    follow_maximum<Keys>(s, state, id);
#pragma unroll
    for (int n = 0; n < Rows4; ++n)
        state.sum[n] += exponentiate<Keys, Rows4>(
            s, n, state.max[n] == -INFINITY ? 0.0f : state.max[n] - state.lift + state.exponent);
}

/// Has any scale of a warp tile, as far as the lane looks at them, reached 2?
template <class Values>
__device__ __forceinline__ bool large_scales(std::uint32_t slot, const lane_id& id) {
    std::uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < ceil_div(Values::section, 16 * warp_size); ++i) {
        const int at = smaller(16 * (i * warp_size + id.lane), Values::section - 16);
        const uint4 v = load_shared_16(slot + static_cast<std::uint32_t>(Values::scale_at + at));
        bits |= v.x | v.y | v.z | v.w;
    }
    return (bits & 0x40004000u) != 0;
}
/// The exponent that the largest scale of a warp tile asks for: so much above 2. All lanes.
template <class Values>
__device__ __forceinline__ float scale_exponent(std::uint32_t slot, const lane_id& id) {
    std::uint32_t largest = 0;
#pragma unroll 1
    for (int i = id.lane; i < Values::section / 2; i += warp_size)
        largest = larger(
            largest, load_shared_2(slot + static_cast<std::uint32_t>(Values::scale_at + 2 * i)) & 0x7fffu);
    largest = __reduce_max_sync(~0u, largest);
    return static_cast<float>(static_cast<int>(largest >> 10) - 15);
}

/// Writes the weights as words of B.
template <class Keys, class Values, int Rows4>
__device__ __forceinline__ void store_halves(const float (&s)[Keys::tiles][Rows4][4], std::uint32_t weights,
                                             const lane_id& id) {
    using words = half_words<Values>;
    constexpr int quads_of_tile = Keys::tile_height / 4;
    if (Keys::tile_height == 16 && id.g >= 4) return;
#pragma unroll
    for (int n = 0; n < Rows4; ++n) {
        const int column = n / 2 * 8 + 2 * id.t + n % 2;
#pragma unroll
        for (int tile = 0; tile < Keys::tiles; ++tile) {
            const std::uint32_t at =
                weights +
                4u * static_cast<std::uint32_t>(column * words::stride + 2 * (tile * quads_of_tile + id.g));
            const float(&v)[4] = s[tile][n];
            store_words(at, pack_halves<float16>(v[0], v[2]), pack_halves<float16>(v[1], v[3]));
        }
    }
}
template <class Keys, class Values, int Rows4>
__device__ __forceinline__ void store_weights(float (&s)[Keys::tiles][Rows4][4],
                                              half_state<Values, Rows4>& state,
                                              warp_tile_factors<Values, Rows4>&, std::uint32_t slot,
                                              std::uint32_t weights, const lane_id& id) {
    // Stored before scales have been looked at, which takes a while and asks for other weights hardly ever.
    [[maybe_unused]] bool large = false;
    if constexpr (Values::token_parameters) large = large_scales<Values>(slot, id);
    store_halves<Keys, Values, Rows4>(s, weights, id);
    if constexpr (Values::token_parameters) {
        if (!__any_sync(~0u, large)) [[likely]]
            return;
        const float wanted = scale_exponent<Values>(slot, id);
        if (wanted <= state.exponent) return;
        float factor[Rows4];
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            factor[n] = exp2_fast(state.exponent - wanted);
            state.sum[n] *= factor[n];
#pragma unroll
            for (int tile = 0; tile < Keys::tiles; ++tile)
#pragma unroll
                for (int r = 0; r < 4; ++r) s[tile][n][r] *= factor[n];
        }
        state.multiply(factor);
        state.exponent = wanted;
        store_halves<Keys, Values, Rows4>(s, weights, id);
    }
}

/// Loads what belongs to the tokens of the lane's units: load(to, first token). Units that the warp tile does
/// not have get that of the first one: it is multiplied by zeros but must be finite.
template <class Values, class F>
__device__ __forceinline__ void load_units(half_quad (&to)[Values::lane_units], const lane_id& id, F&& load) {
    constexpr int n = Values::lane_units;
    if constexpr (4 * n == Values::units) {
        load(to, 4 * n * id.t);
    } else {
#pragma unroll
        for (int i = 0; i < n; ++i) {
            half_quad one[1];
            load(one, n * id.t + i < Values::units ? 4 * (n * id.t + i) : 0);
            to[i] = one[0];
        }
    }
}

/// Adds the products with the values of a warp tile whose first token is `first` of its page.
template <class Values, int Rows4>
__device__ __forceinline__ void add_values(half_state<Values, Rows4>& state,
                                           const warp_tile_factors<Values, Rows4>&, std::uint32_t slot,
                                           [[maybe_unused]] int first, std::uint32_t weights,
                                           const lane_id& id) {
    using words = half_words<Values>;
    using traits = typename Values::traits;
    using state_type = half_state<Values, Rows4>;
    constexpr int units = Values::lane_units, column_tiles = state_type::tiles;
    constexpr int sets = state_type::sets, tiles_of_set = ceil_div(Values::tiles, sets);
    constexpr float middle = 0.5f * static_cast<float>(twice_middle<Values>);
    half_quad w[column_tiles][units];
#pragma unroll
    for (int m = 0; m < column_tiles; ++m) {
        uint2 pairs[units];
        load_pairs(pairs, weights + 4u * static_cast<std::uint32_t>((8 * m + id.g) * words::stride +
                                                                    2 * id.t * units));
#pragma unroll
        for (int i = 0; i < units; ++i) w[m][i] = {pairs[i].x, pairs[i].y};
    }
    constexpr bool scaled = Values::scales_tokens;
    [[maybe_unused]] constexpr float codes = half_codes / Values::scale_lift;
    [[maybe_unused]] const auto line = line_of<Values>(slot, first, 0);
    // Parameters of channels: output += scale * (product - rounded + m * total) + bias * total. Products
    // start with what does not depend on the channel.
    [[maybe_unused]] float total[Rows4], start[Rows4], slope[Rows4];
    static_for<sets>([&](auto set) {
        constexpr int S = decltype(set)::value;
        half_quad scale[units], bias[units] = {}, x[column_tiles][units];
        if constexpr (Values::token_parameters) {
            const auto load = [&](int section_at) {
                return [=]<int N>(half_quad(&part)[N], int token) {
                    uint2 pairs[N];
                    load_pairs(pairs, slot + static_cast<std::uint32_t>(
                                                 section_at + (S * Values::run + token) * Values::width));
#pragma unroll
                    for (int i = 0; i < N; ++i) part[i] = half_quad::of(pairs[i].x, pairs[i].y);
                };
            };
            load_units<Values>(scale, id, load(Values::scale_at));
            if constexpr (traits::has_bias) load_units<Values>(bias, id, load(Values::bias_at));
        } else if constexpr (scaled) {
            load_units<Values>(scale, id, [&](auto& part, int token) {
                constexpr int skew = Values::token_scale_skew % 4;
#pragma unroll
                for (auto& four : part) {
                    four = small_halves<kvq::detail::token_scale_float>(load_token_scale_codes<skew>(
                        slot + static_cast<std::uint32_t>(Values::token_scale_at + token)));
                    token += 4;
                }
            });
        } else {
#pragma unroll
            for (int i = 0; i < units; ++i) scale[i] = {half_power(0), half_power(0)};
        }
        // Of rows 2t and 2t + 1: w' with twice the middle; w with scales, with biases.
        float rounded[column_tiles][4] = {}, dots[column_tiles][4] = {};
        static_for<units>([&](auto u) {
            constexpr int U = decltype(u)::value;
            constexpr int place = Values::place(U);
            constexpr std::uint32_t lower = half_power(-place),
                                    centre = (twice_middle<Values> << place) * 0x00010001u;
#pragma unroll
            for (int m = 0; m < column_tiles; ++m) {
                half_quad& y = x[m][U];
                y = scaled ? w[m][U].times(scale[U]) : w[m][U];
                if constexpr (place > 0) y = y.times({lower, lower});
                mma_values<float16>(rounded[m], centre, centre, centre, centre, y.even, y.odd);
                mma_values<float16>(dots[m], scale[U].even, bias[U].even, scale[U].odd, bias[U].odd,
                                    w[m][U].even, w[m][U].odd);
            }
        });
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            const int m = n / 2, i = n % 2;
            if constexpr (Values::token_parameters) {
                float& rest = state.rest[n][S];
                rest = fmaf(-0.5f * half_codes, rounded[m][i], rest);
                if constexpr (traits::has_bias) rest += fmaf(middle, dots[m][i], dots[m][2 + i]);
            } else {
                total[n] = dots[m][i] * (1.0f / Values::scale_lift);
                start[n] = fmaf(-0.5f, rounded[m][i], traits::has_bias ? middle / codes * total[n] : 0.0f);
                if constexpr (Values::has_byte_params) {
                    slope[n] = total[n] * (line.step * half_codes);
                    state.rest[n][0] = fmaf(total[n], line.first, state.rest[n][0]);
                }
            }
        }
        static_for<tiles_of_set>([&](auto in_set) {
            constexpr int T = S * tiles_of_set + decltype(in_set)::value;
            if constexpr (T < Values::tiles) {
                [[maybe_unused]] float products[state_type::tiles][2][4];
                if constexpr (!Values::token_parameters)
#pragma unroll
                    for (int i = 0; i < 8 * state_type::tiles; ++i)
                        products[i / 8][i / 4 % 2][i % 4] = start[2 * (i / 8) + i % 2];
                Values::template for_half_units<T>(
                    slot, id, [&](auto unit, const uint4& even, const uint4& odd) {
                        constexpr int U = decltype(unit)::value;
#pragma unroll
                        for (int m = 0; m < column_tiles; ++m) {
                            const half_quad& b = x[m][U];
                            float(&sums)[2][4] = Values::token_parameters ? state.output[T][m] : products[m];
                            mma_values<float16>(sums[0], even.x, even.y, odd.x, odd.y, b.even, b.odd);
                            mma_values<float16>(sums[1], even.z, even.w, odd.z, odd.w, b.even, b.odd);
                        }
                    });
                if constexpr (!Values::token_parameters) {
                    const channel_numbers parameters = channels_of<Values, T>(slot, id);
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const float scale = parameters.scale[r] * (codes * line.unit);
#pragma unroll
                        for (int n = 0; n < Rows4; ++n) {
                            float& output = state.output[T][n / 2][r / 2][2 * (r % 2) + n % 2];
                            output = fmaf(products[n / 2][r / 2][2 * (r % 2) + n % 2], scale, output);
                            if constexpr (traits::has_bias)
                                output = fmaf(parameters.bias[r],
                                              Values::has_byte_params ? slope[n] : total[n], output);
                        }
                    }
                }
            }
        });
    });
}

}}}  // namespace kvq::cuda::detail
