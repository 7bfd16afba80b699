// Scores of a chunk: the query as two pieces in the columns of B, the packed keys as they are in A.
//
//   column 2h   high piece of query row h        column 2h + 1   low piece        (h = 0..3, one such tile per 4 rows)
//   codes:      x' ~= step * (256 high + low), signed bytes, step = max|x'| / 32512     (as backends/kernels/folded.hpp)
//   16-bit:     x' / max|x'| = high + low, each rounded to the key's own type
//
// Lane (g, t) ends up with rows (tokens) 4g..4g+3 of every tile for query row 4n + t: no exchange, no reduction.
// Contract: |x' - pieces| <= 2^-16 max|x'| (codes), 2^-20 (fp16), 2^-16 (bf16); integer sums are exact.
// Parameters of channels are multiplied into the query once per group of tokens; those of tokens into the scores.
#pragma once

#include "chunk.cuh"

namespace kvq::inline v0_1::cuda::detail {

/// A query row in pieces, as registers of B: the part of lane (g, t) for column g. One set per column group.
template <class Chunk>
struct folded_row {
    static constexpr int groups = Chunk::column_groups;
    std::uint32_t pieces[groups][2 * Chunk::pairs];
    // For the lane's own row (4n + t), not for column g:
    float step[groups];
    float sum[groups];  // of x', where tokens have biases
    float
        offset[groups];  // x times the biases of channels, and what rounding x took from a code in the middle
    int zero[groups];    // zero_code * sum of the fixed-point numbers
};

__device__ __forceinline__ float max_abs4(float4 v, float top) {
    return fmaxf(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))), top);
}
/// Sum or maximum over the lanes that share a query row: bits 0..2 of the lane number.
template <class F>
__device__ __forceinline__ float over_row(float v, F f) {
    v = f(v, __shfl_xor_sync(~0u, v, 1));
    v = f(v, __shfl_xor_sync(~0u, v, 2));
    return f(v, __shfl_xor_sync(~0u, v, 4));
}
struct add_floats {
    __device__ float operator()(float a, float b) const { return a + b; }
};
struct max_floats {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// Where byte `at` of a query row lies in shared memory: lanes of different t read pieces 128 bytes apart.
template <int Dim>
__device__ __forceinline__ std::uint32_t query_byte(int at) {
    return static_cast<std::uint32_t>(Dim % 32 == 0 ? at ^ ((at >> 7 & 7) << 4) : at);
}

/// A query row as fixed-point numbers: the words of their high and low bytes, the step, and the sum of the numbers.
template <int N>
__device__ __forceinline__ float fixed_point(const float (&x)[N][4], std::uint32_t (&high)[N],
                                             std::uint32_t (&low)[N], int& total) {
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) top = max_abs4({x[i][0], x[i][1], x[i][2], x[i][3]}, top);
    top = over_row(top, max_floats{});
    const float inverse = top > 1e-33f ? __fdividef(32512.0f, top) : 0.0f;
    total = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        // 1.5 * 2^23 + 128 + x: byte 1 of the sum is the high piece, byte 0 the low piece plus 128.
        std::uint32_t y[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) y[k] = __float_as_uint(fmaf(x[i][k], inverse, 12583040.0f));
        total += static_cast<int>((y[0] + y[1]) + (y[2] + y[3]) - 4u * 0x4b400080u);
        const piece_words w = split_pieces(y[0], y[1], y[2], y[3]);
        high[i] = w.high;
        low[i] = w.low ^ 0x80808080u;
    }
    return top * (1.0f / 32512.0f);
}

/// Folds the query rows 4n + g/2 (`rows`: shared address of row g/2 of [rows][stride] floats) with the channel parameters
/// in `run` of `slot` (whose chunk starts at token `first` of its page), if there are any. Lanes with even g prepare the first half of the units for their neighbour with odd
/// g and vice versa.
/// Codes are centred: c x = (c - m) x + m x with m half of the largest code, and m x is added in float, so that the
/// rounding of x is multiplied by numbers half as large.
template <class Chunk, int Rows4>
__device__ __forceinline__ void fold_rows(folded_row<Chunk> (&to)[Rows4], std::uint32_t rows, int stride,
                                          std::uint32_t slot, [[maybe_unused]] int first,
                                          [[maybe_unused]] int run, const lane_id& id) {
    using traits = typename Chunk::traits;
    constexpr bool columns = !Chunk::full && !Chunk::token_parameters;
    constexpr int width = traits::columns_per_unit;
    constexpr int halves = Chunk::pairs;  // units that this lane prepares, of 2 * pairs
    const int parity = id.g & 1;
    [[maybe_unused]] const auto line = Chunk::line(slot, first, run);
    static_for<Chunk::column_groups>([&](auto column_group) {
        constexpr int G = decltype(column_group)::value;
        int channel[halves];
        bool inside[halves];
        [[maybe_unused]] float4 scale[halves], bias[halves];
#pragma unroll
        for (int i = 0; i < halves; ++i) {
            const int unit = parity * halves + i, in_group = id.t * Chunk::lane_units + unit;
            inside[i] = (Chunk::lane_units % 2 == 0 || unit < Chunk::lane_units) &&
                        (4 * Chunk::lane_units == Chunk::group_units || in_group < Chunk::group_units);
            channel[i] = (G * Chunk::group_units + (inside[i] ? in_group : 0)) * width;
        }
        if constexpr (columns) {
            if constexpr (halves % 2 == 0 && 4 * Chunk::lane_units == Chunk::group_units) {
#pragma unroll
                for (int i = 0; i < halves; i += 2) {
                    Chunk::eight_scales(slot, run, channel[i], scale[i], scale[i + 1]);
                    if constexpr (traits::has_bias)
                        Chunk::eight_biases(slot, run, channel[i], bias[i], bias[i + 1], line);
                }
            } else {
#pragma unroll
                for (int i = 0; i < halves; ++i) {
                    scale[i] = Chunk::scales(slot, run, channel[i]);
                    if constexpr (traits::has_bias) bias[i] = Chunk::biases(slot, run, channel[i], line);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            const std::uint32_t row = rows + static_cast<std::uint32_t>(16 * n * stride);
            float x[halves][width];
            [[maybe_unused]] float sum = 0.0f;
            [[maybe_unused]] float4 dots{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < halves; ++i) {
                if constexpr (Chunk::full) {
                    const uint2 v = load_shared_8(row + query_byte<Chunk::dim>(channel[i] * 4));
                    x[i][0] = inside[i] ? __uint_as_float(v.x) : 0.0f;
                    x[i][1] = inside[i] ? __uint_as_float(v.y) : 0.0f;
                } else {
                    const uint4 v = load_shared_16(row + query_byte<Chunk::dim>(channel[i] * 4));
                    float4 q{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                             __uint_as_float(v.w)};
                    if (!inside[i]) q = {0.0f, 0.0f, 0.0f, 0.0f};
                    if constexpr (columns && traits::has_bias) {
                        // Four short chains instead of a long one.
                        dots.x = fmaf(q.x, bias[i].x, dots.x), dots.y = fmaf(q.y, bias[i].y, dots.y);
                        dots.z = fmaf(q.z, bias[i].z, dots.z), dots.w = fmaf(q.w, bias[i].w, dots.w);
                    }
                    if constexpr (columns)
                        q = {q.x * scale[i].x, q.y * scale[i].y, q.z * scale[i].z, q.w * scale[i].w};
                    if constexpr (traits::has_bias) sum += (q.x + q.y) + (q.z + q.w);
                    x[i][0] = q.x, x[i][1] = q.y, x[i][2] = q.z, x[i][3] = q.w;
                }
            }
            std::uint32_t high[halves], low[halves];
            [[maybe_unused]] int total = 0;
            float step;
            if constexpr (Chunk::full) {
                using T = typename Chunk::scheme::value_type;
                step = 0.0f;
#pragma unroll
                for (int i = 0; i < halves; ++i) step = fmaxf(step, fmaxf(fabsf(x[i][0]), fabsf(x[i][1])));
                step = over_row(step, max_floats{});
                const float inverse = step > 1e-33f ? __fdividef(1.0f, step) : 0.0f;
#pragma unroll
                for (int i = 0; i < halves; ++i) {
                    const float a = x[i][0] * inverse, b = x[i][1] * inverse;
                    high[i] = pack_halves<T>(a, b);
                    low[i] = pack_halves<T>(a - unpack_half<T, 0>(high[i]), b - unpack_half<T, 1>(high[i]));
                }
            } else {
                step = fixed_point(x, high, low, total);
            }
#pragma unroll
            for (int i = 0; i < halves; ++i) {
                const std::uint32_t own = parity ? low[i] : high[i];
                const std::uint32_t received = __shfl_xor_sync(~0u, parity ? high[i] : low[i], 4);
                to[n].pieces[G][i] = parity ? received : own;
                to[n].pieces[G][halves + i] = parity ? own : received;
            }
            // Scalars of row g/2 move to the lanes whose own row it is: row t sits in lanes 8t..8t+7.
            to[n].step[G] = __shfl_sync(~0u, step * line.unit, 8 * id.t);
            if constexpr (!Chunk::full) {
                [[maybe_unused]] constexpr float middle =
                    0.5f * static_cast<float>((1 << Chunk::scheme::code_bits) - 1);
                if constexpr (columns && traits::has_bias) {
                    const float dot = (dots.x + dots.y) + (dots.z + dots.w);
                    const float part =
                        fmaf(middle * line.unit, fmaf(-step, static_cast<float>(total), sum), dot);
                    to[n].offset[G] = __shfl_sync(~0u, over_row(part, add_floats{}), 8 * id.t);
                }
                if constexpr ((!columns && traits::has_bias) || traits::zero_code != 0) {
                    total += __shfl_xor_sync(~0u, total, 1);
                    total += __shfl_xor_sync(~0u, total, 2);
                    total += __shfl_xor_sync(~0u, total, 4);
                }
                if constexpr (!columns && traits::has_bias) {
                    const float whole = over_row(sum, add_floats{});
                    to[n].offset[G] =
                        __shfl_sync(~0u, middle * fmaf(-step, static_cast<float>(total), whole), 8 * id.t);
                    to[n].sum[G] = __shfl_sync(~0u, whole, 8 * id.t);
                }
                if constexpr (traits::zero_code != 0)
                    to[n].zero[G] = __shfl_sync(~0u, traits::zero_code * total, 8 * id.t);
            }
        }
    });
}

/// Scores of tile `Tile` for Rows4 * 4 query rows: scores[n][r] is token 4g + r of the tile, query row 4n + t.
template <class Chunk, int Rows4, int Tile>
__device__ __forceinline__ void score_tile(float (&scores)[Rows4][4], const folded_row<Chunk> (&query)[Rows4],
                                           std::uint32_t slot, const lane_id& id) {
    using traits = typename Chunk::traits;
    using sum_type = std::conditional_t<Chunk::full, float, int>;
    static_for<Chunk::column_groups>([&](auto column_group) {
        constexpr int G = decltype(column_group)::value;
        constexpr int sets = Chunk::sets(Rows4);
        sum_type all_sums[sets][2][Rows4][4] = {};
        Chunk::template for_pairs<Tile, G, sets>(
            slot, id, [&](auto set, auto unit_a, auto unit_b, const uint4& a, const uint4& b) {
                auto& sums = all_sums[decltype(set)::value];
#pragma unroll
                for (int n = 0; n < Rows4; ++n) {
                    const std::uint32_t b0 = query[n].pieces[G][decltype(unit_a)::value],
                                        b1 = query[n].pieces[G][decltype(unit_b)::value];
                    if constexpr (Chunk::full) {
                        using T = typename Chunk::scheme::value_type;
                        mma_values<T>(sums[0][n], a.x, a.y, b.x, b.y, b0, b1);
                        mma_values<T>(sums[1][n], a.z, a.w, b.z, b.w, b0, b1);
                    } else {
                        mma_codes_signed(sums[0][n], a.x, a.y, b.x, b.y, b0, b1);
                        mma_codes_signed(sums[1][n], a.z, a.w, b.z, b.w, b0, b1);
                    }
                }
            });
        float4 scale{1.0f, 1.0f, 1.0f, 1.0f}, bias{0.0f, 0.0f, 0.0f, 0.0f};
        if constexpr (!Chunk::full && Chunk::token_parameters) {
            const int token = Tile * Chunk::tile_height + smaller(4 * id.g, Chunk::tile_height - 4);
            scale = Chunk::scales(slot, G, token);
            if constexpr (traits::has_bias) bias = Chunk::biases(slot, G, token);
        }
        [[maybe_unused]] const float scale4[4] = {scale.x, scale.y, scale.z, scale.w};
        [[maybe_unused]] const float bias4[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
        for (int n = 0; n < Rows4; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int at = 2 * (r % 2);
                const sum_type high = all_sums[0][r / 2][n][at], low = all_sums[0][r / 2][n][at + 1];
                float s;
                if constexpr (Chunk::full) {
                    s = (high + low) * query[n].step[G];
                } else {
                    constexpr int weight = Chunk::set_weight(sets);
                    const float step = query[n].step[G] * (1.0f / weight);
                    int whole = 256 * high + low;
                    if constexpr (sets == 2)
                        whole = weight * whole +
                                (256 * all_sums[1][r / 2][n][at] + all_sums[1][r / 2][n][at + 1]);
                    if constexpr (traits::zero_code != 0) whole -= weight * query[n].zero[G];
                    s = static_cast<float>(whole);
                    if constexpr (traits::has_bias)
                        s = fmaf(s, step, query[n].offset[G]);
                    else
                        s *= step;
                    if constexpr (Chunk::token_parameters) {
                        s *= scale4[r];
                        if constexpr (traits::has_bias) s = fmaf(bias4[r], query[n].sum[G], s);
                    }
                }
                scores[n][r] = G == 0 ? s : scores[n][r] + s;
            }
    });
}

}  // namespace kvq::inline v0_1::cuda::detail
