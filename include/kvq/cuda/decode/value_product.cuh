// Weights of a warp tile and their product with the packed values: an online softmax whose steps are warp
// tiles.
//
//   w = 2^(s - max of the warp tile),   w' = w * value scale of the token,
//     w' ~= step * (256 high + low)   unsigned bytes
//   16-bit values: w = high + low, each rounded to the values' own type
//   state:  max' = max(max, max of the warp tile),
//     output' = output * 2^(max - max') + step * 2^(warp tile max - max') * C w
//
// Weights of codes are rounded lane by lane, so that those of a lane have the rounded sum of what they stand
// for, to within one step, however small they are beside the largest one (cpu/product/folded.hpp:
// sum_rounding). Where tokens have scales, the step comes from the largest w' and weights may be relative to
// an older maximum (follow_maximum). Weights travel through shared memory once, as words of B: [group of
// value parameters][4 rows][column][unit]. Value biases are summed per group of channels and added at the
// end; value parameters of channels apply to the product.
// Contract: weights are exact to 2^-16 of the largest weight of the warp tile (codes), 2^-20 (fp16), 2^-15
// (bf16).
#pragma once

#include "key_product.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

template <class Values>
struct weight_words {
    static constexpr int sets = !Values::full && Values::token_parameters ? Values::runs : 1;
    static constexpr int units = 4 * Values::lane_units;
    static constexpr bool padded = units != Values::units;  // no token fills the last ones: they stay zero
    static constexpr int stride = units + 4;  // words of a column; columns fall into different banks
    static constexpr int row_set = 8 * stride;
    KVQ_HD static constexpr int words(int rows4) { return sets * rows4 * row_set; }
    static constexpr int bias_sets =
        Values::traits::has_bias && Values::token_parameters && !Values::full ? sets : 0;
};

/// Maximum or sum over the lanes with the same t: bits 2..4 of the lane number.
template <class F>
__device__ __forceinline__ float over_tokens(float v, F f) {
    v = f(v, __shfl_xor_sync(~0u, v, 4));
    v = f(v, __shfl_xor_sync(~0u, v, 8));
    return f(v, __shfl_xor_sync(~0u, v, 16));
}

/// What is left of sums relative to `before` when they become relative to `after`.
__device__ __forceinline__ float kept(float before, float after) {
    return before == -INFINITY ? 0.0f : exp2_fast(before - after);
}

/// What a warp leaves of an item: sums over all its tokens. Tiles: of 32 channels.
template <int Tiles, int Rows4>
struct finished_rows {
    float max[Rows4];
    float sum[Rows4];
    float output[Tiles][Rows4][4];  // channel 32 * tile + 4g + i of row n

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            max[n] = -INFINITY;
            sum[n] = 0.0f;
#pragma unroll
            for (int i = 0; i < 4 * Tiles; ++i) output[i / 4][n][i % 4] = 0.0f;
        }
    }
    /// Adds the sums of other tokens.
    __device__ __forceinline__ void add(const finished_rows& other) {
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            const float top = fmaxf(max[n], other.max[n]), mine = kept(max[n], top),
                        theirs = kept(other.max[n], top);
            max[n] = top;
            sum[n] = fmaf(sum[n], mine, other.sum[n] * theirs);
#pragma unroll
            for (int i = 0; i < 4 * Tiles; ++i)
                output[i / 4][n][i % 4] =
                    fmaf(output[i / 4][n][i % 4], mine, other.output[i / 4][n][i % 4] * theirs);
        }
    }
};

/// Softmax state of the rows lane_row(n, t) of a warp; `sum` and `bias` are this lane's part, `max` is the
/// warp's.
template <class Values, int Rows4>
struct warp_state {
    float max[Rows4];
    float sum[Rows4];
    float bias[Rows4][weight_words<Values>::bias_sets + 1];
    float rest[Rows4];                      // of 8-bit biases, what all channels have in common
    float output[Values::tiles][Rows4][4];  // channel 32 * tile + 4g + i of row n

    /// Multiplies the rows' sums of values.
    __device__ __forceinline__ void multiply(const float (&factor)[Rows4]) {
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            if constexpr (Values::has_byte_params) rest[n] *= factor[n];
#pragma unroll
            for (int i = 0; i < weight_words<Values>::bias_sets; ++i) bias[n][i] *= factor[n];
        }
#pragma unroll
        for (int tile = 0; tile < Values::tiles; ++tile)
#pragma unroll
            for (int n = 0; n < Rows4; ++n)
#pragma unroll
                for (int r = 0; r < 4; ++r) output[tile][n][r] *= factor[n];
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            max[n] = -INFINITY;
            sum[n] = rest[n] = 0.0f;
#pragma unroll
            for (int i = 0; i < weight_words<Values>::bias_sets + 1; ++i) bias[n][i] = 0.0f;
#pragma unroll
            for (int tile = 0; tile < Values::tiles; ++tile)
#pragma unroll
                for (int r = 0; r < 4; ++r) output[tile][n][r] = 0.0f;
        }
    }
    __device__ __forceinline__ finished_rows<Values::tiles, Rows4> finished() const {
        finished_rows<Values::tiles, Rows4> rows;
        constexpr int sets = weight_words<Values>::bias_sets,
                      tiles_of_set = ceil_div(Values::tiles, larger(1, sets));
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            rows.max[n] = max[n];
            rows.sum[n] = over_tokens(sum[n], add_floats{});
            float of_bias[sets + 1] = {Values::has_byte_params ? rest[n] : 0.0f};
#pragma unroll
            for (int i = 0; i < sets; ++i) of_bias[i] = over_tokens(bias[n][i], add_floats{});
#pragma unroll
            for (int tile = 0; tile < Values::tiles; ++tile)
#pragma unroll
                for (int r = 0; r < 4; ++r)
                    rows.output[tile][n][r] = sets > 0 || Values::has_byte_params
                                                  ? output[tile][n][r] + of_bias[tile / tiles_of_set]
                                                  : output[tile][n][r];
        }
        return rows;
    }
};

/// Where a unit's weights lie among those of a lane: units that a product takes together stand next to each
/// other, so that they arrive in neighbouring registers. (With two sets, warp_tile::sets, these are units 0
/// and 2, 1 and 3 of four.)
template <int Sets>
KVQ_HD constexpr int weight_place(int unit) {
    return Sets == 2 ? (unit & ~3) | (unit & 1) << 1 | (unit >> 1 & 1) : unit;
}

/// The lane's words of B; an odd last one is zero.
template <int Units, int Registers>
__device__ __forceinline__ void load_weights(std::uint32_t (&b)[Registers], std::uint32_t at) {
    if constexpr (Units % 4 == 0) {
#pragma unroll
        for (int i = 0; i < Units; i += 4) {
            const uint4 v = load_shared_16(at + 4u * static_cast<std::uint32_t>(i));
            b[i] = v.x, b[i + 1] = v.y, b[i + 2] = v.z, b[i + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < Registers; ++i) {
            b[i] = i < Units ? load_shared_4(at + 4u * static_cast<std::uint32_t>(i)) : 0;
        }
    }
}

/// TokenScales of one warp_tile: of what the state holds (unless it follows), of what is added, and of each
/// set's product.
template <class Values, int Rows4>
struct warp_tile_factors {
    float keep[Rows4];
    float take[Rows4];
    float step[weight_words<Values>::sets][Rows4];
};

/// The largest score of the n-th row among the lane's tokens of a warp tile; without tokens -infinity.
template <class Keys, int Rows4>
__device__ __forceinline__ float largest_own(float (&s)[Keys::tiles][Rows4][4], int n, const lane_id& id) {
    const bool idle = Keys::tile_height == 16 && id.g >= 4;
    float top = -INFINITY;
#pragma unroll
    for (int tile = 0; tile < Keys::tiles; ++tile) {
        float(&v)[4] = s[tile][n];
        if (idle) v[0] = v[1] = v[2] = v[3] = -INFINITY;
        top = fmaxf(top, fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])));
    }
    return top;
}
/// Scores of a row become 2^(score - shift); returns the lane's part of their sum.
template <class Keys, int Rows4>
__device__ __forceinline__ float exponentiate(float (&s)[Keys::tiles][Rows4][4], int n, float shift) {
    float sum = 0.0f;
#pragma unroll
    for (int tile = 0; tile < Keys::tiles; ++tile)
#pragma unroll
        for (int r = 0; r < 4; ++r) s[tile][n][r] = exp2_fast(s[tile][n][r] - shift);
#pragma unroll
    for (int tile = 0; tile < Keys::tiles; ++tile)
        sum += (s[tile][n][0] + s[tile][n][1]) + (s[tile][n][2] + s[tile][n][3]);
    return sum;
}
/// Does any row of the warp keep less than all? After a few warp tiles maxima hardly ever rise.
template <int Rows4>
__device__ __forceinline__ bool any_rises(const float (&keep)[Rows4]) {
    bool rises = false;
#pragma unroll
    for (int n = 0; n < Rows4; ++n) rises = rises || keep[n] != 1.0f;
    return __any_sync(~0u, rises);
}

/// How far (in powers of two) a state's maximum may stay below the largest score.
inline constexpr float score_slack = 2.0f;

/// state.max becomes the largest score so far, rounded up, where it was more than score_slack below. Lanes
/// have to know of each other's scores only then. Weights relative to different whole numbers round alike:
/// how a context is divided changes float sums only.
template <class Keys, class State, int Rows4>
__device__ __forceinline__ void follow_maximum(float (&s)[Keys::tiles][Rows4][4], State& state,
                                               const lane_id& id) {
    float top[Rows4];
    bool rises = false;
#pragma unroll
    for (int n = 0; n < Rows4; ++n) {
        top[n] = largest_own<Keys, Rows4>(s, n, id);
        rises = rises || top[n] > state.max[n] + score_slack;
    }
    if (__any_sync(~0u, rises)) [[unlikely]] {
        float keep[Rows4];
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            // Rows that would not have asked stay: no row's bits depend on others.
            const float highest = over_tokens(top[n], max_floats{});
            const float next = highest > state.max[n] + score_slack ? ceilf(highest) : state.max[n];
            keep[n] = kept(state.max[n], next);
            state.max[n] = next;
            state.sum[n] *= keep[n];
        }
        state.multiply(keep);
    }
}
/// Does it follow, rather than be the largest one exactly? Where weights get a step of their own anyway.
template <class Values>
inline constexpr bool follows = !Values::full && Values::scales_tokens;

/// Scores become weights relative to the largest of the warp tile or, where it follows, to the state's; the
/// state moves on.
template <class Keys, class Values, int Rows4>
__device__ __forceinline__ void soften(float (&s)[Keys::tiles][Rows4][4], warp_state<Values, Rows4>& state,
                                       warp_tile_factors<Values, Rows4>& factors, const lane_id& id) {
    if constexpr (follows<Values>) {
        follow_maximum<Keys>(s, state, id);
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            state.sum[n] += exponentiate<Keys, Rows4>(s, n, state.max[n] == -INFINITY ? 0.0f : state.max[n]);
            factors.take[n] = 1.0f;
        }
    } else {
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            const float top = over_tokens(largest_own<Keys, Rows4>(s, n, id), max_floats{});
            const float next = fmaxf(state.max[n], top);
            const float sum = exponentiate<Keys, Rows4>(s, n, top == -INFINITY ? 0.0f : top);
            factors.keep[n] = kept(state.max[n], next);
            factors.take[n] = kept(top, next);
            state.max[n] = next;
            state.sum[n] = fmaf(state.sum[n], factors.keep[n], factors.take[n] * sum);
        }
    }
}

/// Writes the weights as words of B, times the value scales of the tokens; adds up what value biases
/// contribute.
template <class Keys, class Values, int Rows4>
__device__ __forceinline__ void store_weights(const float (&s)[Keys::tiles][Rows4][4],
                                              warp_state<Values, Rows4>& state,
                                              warp_tile_factors<Values, Rows4>& factors, std::uint32_t slot,
                                              std::uint32_t weights, const lane_id& id) {
    using words = weight_words<Values>;
    constexpr int quads_of_tile = Keys::tile_height / 4;
    const bool idle = Keys::tile_height == 16 && id.g >= 4;
    // Where the high and low bytes of the n-th row of this lane go.
    constexpr bool split = split_rows<Rows4>;
    constexpr std::uint32_t to_low = 4u * (split ? words::row_set : words::stride);
    const auto column_of = [&](int set, int n) {
        return weights +
               4u * static_cast<std::uint32_t>((set * Rows4 + (split ? n & ~1 : n)) * words::row_set +
                                               (2 * id.t + (split ? n & 1 : 0)) * words::stride);
    };
    static_for<words::sets>([&](auto set) {
        constexpr int S = decltype(set)::value;
        [[maybe_unused]] float scale[Keys::tiles][4], bias[Keys::tiles][4];
        if constexpr (!Values::full && Values::scales_tokens) {
#pragma unroll
            for (int tile = 0; tile < Keys::tiles; ++tile) {
                const int token = tile * Keys::tile_height + (idle ? 0 : 4 * id.g);
                const float4 v = Values::token_scales(slot, S, token);
                scale[tile][0] = v.x, scale[tile][1] = v.y, scale[tile][2] = v.z, scale[tile][3] = v.w;
                if constexpr (words::bias_sets > 0) {
                    const float4 b = Values::biases(slot, S, token);
                    bias[tile][0] = b.x, bias[tile][1] = b.y, bias[tile][2] = b.z, bias[tile][3] = b.w;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            const std::uint32_t column = column_of(S, n);
            if constexpr (Values::full) {
                using T = typename Values::scheme::value_type;
                factors.step[S][n] = factors.take[n];
#pragma unroll
                for (int tile = 0; tile < Keys::tiles; ++tile)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const float a = s[tile][n][2 * half], b = s[tile][n][2 * half + 1];
                        const std::uint32_t high = pack_halves<T>(a, b);
                        const std::uint32_t low =
                            pack_halves<T>(a - unpack_half<T, 0>(high), b - unpack_half<T, 1>(high));
                        const std::uint32_t at = column + 4u * static_cast<std::uint32_t>(
                                                                   2 * (tile * quads_of_tile + id.g) + half);
                        if (!idle) {
                            store_word(at, high);
                            store_word(at + to_low, low);
                        }
                    }
            } else {
                if constexpr (words::bias_sets > 0) {
                    float parts[2];
#pragma unroll
                    for (int tile = 0; tile < Keys::tiles; ++tile)
#pragma unroll
                        for (int r = 0; r < 4; ++r) {
                            float& part = parts[r % 2];
                            part = 4 * tile + r < 2 ? s[tile][n][r] * bias[tile][r]
                                                    : fmaf(s[tile][n][r], bias[tile][r], part);
                        }
                    static_assert(follows<Values>);
                    state.bias[n][S] += parts[0] + parts[1];
                }
                float w[Keys::tiles][4], largest = 1.0f;
                if constexpr (Values::scales_tokens) {
#pragma unroll
                    for (int tile = 0; tile < Keys::tiles; ++tile) {
#pragma unroll
                        for (int r = 0; r < 4; ++r) w[tile][r] = s[tile][n][r] * scale[tile][r];
                        const float four =
                            fmaxf(fmaxf(w[tile][0], w[tile][1]), fmaxf(w[tile][2], w[tile][3]));
                        largest = tile == 0 ? four : fmaxf(largest, four);
                    }
                    largest = over_tokens(largest, max_floats{});
                } else {
#pragma unroll
                    for (int tile = 0; tile < Keys::tiles; ++tile)
#pragma unroll
                        for (int r = 0; r < 4; ++r) w[tile][r] = s[tile][n][r];
                }
                const float inverse = largest > 1e-33f ? 65280.0f * reciprocal(largest) : 0.0f;
                factors.step[S][n] =
                    factors.take[n] * (largest * (1.0f / static_cast<float>(65280 * Values::scale_lift)));
                // The sums of the lanes of a row begin evenly between -1/2 and 1/2, those of neighbours
                // opposite.
                constexpr float lanes = Keys::tile_height == 16 ? 4.0f : 8.0f;
                const float begin = static_cast<float>(id.g | 1) * (0.5f / lanes);
                float sum = id.g % 2 == 0 ? begin : -begin;
                // 1.5 * 2^23: floats around it are whole, and their bits count them.
                constexpr float nearest = 12582912.0f;
                std::uint32_t rounded = __float_as_uint(nearest);
#pragma unroll
                for (int tile = 0; tile < Keys::tiles; ++tile) {
                    std::uint32_t y[4];
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        sum = fmaf(w[tile][r], inverse, sum);
                        const std::uint32_t before = rounded;
                        rounded = __float_as_uint(sum + nearest);
                        y[r] = rounded - before;
                    }
                    const byte_words p = split_bytes(y[0], y[1], y[2], y[3]);
                    const std::uint32_t at =
                        column + 4u * static_cast<std::uint32_t>(tile * quads_of_tile +
                                                                 weight_place<Values::sets(Rows4)>(id.g));
                    if (!idle) {
                        store_word(at, p.high);
                        store_word(at + to_low, p.low);
                    }
                }
            }
        }
    });
}

/// Parameters of the lane's four channels of tile `Tile`; of 8-bit biases 2^-24 of their codes.
struct channel_numbers {
    float scale[4], bias[4];
};
template <class Values, int Tile>
__device__ __forceinline__ channel_numbers channels_of(std::uint32_t slot, const lane_id& id) {
    constexpr int height = Tile + 1 == Values::tiles ? Values::last_height : Values::tile_height;
    const int channel = Tile * 32 + smaller(4 * id.g, height - 4);
    const float4 s = Values::scales(slot, 0, channel);
    float4 b{0.0f, 0.0f, 0.0f, 0.0f};
    if constexpr (Values::has_byte_params)
        b = byte_halves(Values::bias_bytes(slot, 0, channel)).floats();
    else if constexpr (Values::traits::has_bias)
        b = Values::biases(slot, 0, channel);
    return {{s.x, s.y, s.z, s.w}, {b.x, b.y, b.z, b.w}};
}

/// output = output * keep + step * (values x weights) for every tile of 32 channels. `first`: the warp tile's
/// first token of its page.
template <class Values, int Rows4>
__device__ __forceinline__ void add_values(warp_state<Values, Rows4>& state,
                                           const warp_tile_factors<Values, Rows4>& factors,
                                           std::uint32_t slot, [[maybe_unused]] int first,
                                           std::uint32_t weights, const lane_id& id) {
    using words = weight_words<Values>;
    using traits = typename Values::traits;
    using sum_type = std::conditional_t<Values::full, float, int>;
    constexpr bool channel_parameters = !Values::full && !Values::token_parameters;
    constexpr bool needs_total = traits::zero_code != 0 || (channel_parameters && traits::has_bias);
    constexpr int tiles_of_set = ceil_div(Values::tiles, words::sets);
    [[maybe_unused]] const auto line = line_of<Values>(slot, first, 0);
    if constexpr (!follows<Values>)
        if (any_rises(factors.keep)) state.multiply(factors.keep);
    static_for<words::sets>([&](auto set) {
        constexpr int S = decltype(set)::value;
        std::uint32_t b[Rows4][2 * Values::pairs];
        [[maybe_unused]] int total[Rows4];
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            const std::uint32_t at =
                weights + 4u * static_cast<std::uint32_t>((S * Rows4 + n) * words::row_set +
                                                          id.g * words::stride + id.t * Values::lane_units);
            load_weights<Values::lane_units>(b[n], at);
        }
        if constexpr (needs_total) {
            int sums[Rows4][4] = {};
#pragma unroll
            for (int n = 0; n < Rows4; ++n)
#pragma unroll
                for (int i = 0; i < Values::pairs; ++i)
                    mma_codes_unsigned(sums[n], 0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u,
                                       b[n][2 * i], b[n][2 * i + 1]);
#pragma unroll
            for (int n = 0; n < Rows4; ++n) {
                const byte_sums<Rows4, int> both(sums, n, 0);
                total[n] = 256 * both.high + both.low;
            }
        }
        // 8-bit biases: total * (first + step * code) = rest + slope * code.
        [[maybe_unused]] float slope[Rows4];
        if constexpr (Values::has_byte_params) {
#pragma unroll
            for (int n = 0; n < Rows4; ++n) {
                const float weight = static_cast<float>(total[n]) * factors.step[S][n];
                slope[n] = weight * (line.step * half_codes);
                state.rest[n] = fmaf(weight, line.first, state.rest[n]);
            }
        }
        static_for<tiles_of_set>([&](auto in_set) {
            constexpr int T = S * tiles_of_set + decltype(in_set)::value;
            if constexpr (T < Values::tiles) {
                constexpr int sets = Values::sets(Rows4);
                sum_type all_sums[sets][2][Rows4][4] = {};
                Values::template for_pairs<T, 0, sets>(
                    slot, id, [&](auto in, auto unit_x, auto unit_y, const uint4& x, const uint4& y) {
                        auto& sums = all_sums[decltype(in)::value];
#pragma unroll
                        for (int n = 0; n < Rows4; ++n) {
                            const std::uint32_t b0 = b[n][weight_place<sets>(decltype(unit_x)::value)],
                                                b1 = b[n][weight_place<sets>(decltype(unit_y)::value)];
                            if constexpr (Values::full) {
                                using V = typename Values::scheme::value_type;
                                mma_values<V>(sums[0][n], x.x, x.y, y.x, y.y, b0, b1);
                                mma_values<V>(sums[1][n], x.z, x.w, y.z, y.w, b0, b1);
                            } else {
                                mma_codes_unsigned(sums[0][n], x.x, x.y, y.x, y.y, b0, b1);
                                mma_codes_unsigned(sums[1][n], x.z, x.w, y.z, y.w, b0, b1);
                            }
                        }
                    });
                [[maybe_unused]] channel_numbers parameters;
                if constexpr (channel_parameters) parameters = channels_of<Values, T>(slot, id);
#pragma unroll
                for (int n = 0; n < Rows4; ++n)
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const byte_sums<Rows4, sum_type> sums(all_sums[0][r / 2], n, 2 * (r % 2));
                        float& output = state.output[T][n][r];
                        if constexpr (Values::full) {
                            output = fmaf(sums.high + sums.low, factors.step[S][n], output);
                        } else {
                            constexpr int weight = Values::set_weight(sets),
                                          unit = weight << Values::raised(sets);
                            int whole = 256 * sums.high + sums.low;
                            if constexpr (sets == 2) {
                                const byte_sums<Rows4, sum_type> upper(all_sums[1][r / 2], n, 2 * (r % 2));
                                whole = weight * whole + (256 * upper.high + upper.low);
                            }
                            if constexpr (traits::zero_code != 0)
                                whole -= unit * traits::zero_code * total[n];
                            const float step = factors.step[S][n] * (line.unit * (Values::code_unit / unit));
                            if constexpr (Values::has_byte_params) {
                                float sum = static_cast<float>(whole);
                                if constexpr (Values::code_zero != 0.0f)
                                    sum = fmaf(-Values::code_zero, static_cast<float>(total[n]), sum);
                                output = fmaf(sum * step, parameters.scale[r], output);
                                output = fmaf(parameters.bias[r], slope[n], output);
                            } else if constexpr (channel_parameters) {
                                output = fmaf(static_cast<float>(whole) * step, parameters.scale[r], output);
                                if constexpr (traits::has_bias)
                                    output = fmaf(parameters.bias[r],
                                                  static_cast<float>(total[n]) * factors.step[S][n], output);
                            } else {
                                output = fmaf(static_cast<float>(whole), step, output);
                            }
                        }
                    }
            }
        });
    });
}

}}}  // namespace kvq::cuda::detail
