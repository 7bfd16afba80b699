// Scores of a warp_tile: the query as two bytes in the columns of B, the packed keys as they are in A.
//
//   4 query rows    column 2h = high byte of row h, column 2h + 1 = low byte
//   8, 16           column h = row h: the high bytes in one tile of columns, the low bytes in the next one
//
//   codes:
//     x' ~= step * (256 high + low), signed bytes, step = max|x'| / 32512     (as cpu/product/folded.hpp)
//   16-bit:     x' / max|x'| = high + low, each rounded to the key's own type
//
// Lane (g, t) ends up with rows (tokens) 4g..4g+3 of every tile for query row lane_row(n, t): no exchange, no
// reduction.
// Contract: |x' - (high, low)| <= 2^-16 max|x'| (codes), 2^-20 (fp16), 2^-16 (bf16); integer sums are exact.
// Parameters of channels are multiplied into the query once per group of tokens; those of tokens into the
// scores.
#pragma once

#include "../layout/row_warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Do the high and the low bytes of a row lie in two tiles of columns? Then a lane folds one row of 8 and
/// keeps both.
template <int Rows4>
inline constexpr bool split_rows = Rows4 % 2 == 0;

/// The n-th query row of a lane.
template <int Rows4>
__device__ __forceinline__ int lane_row(int n, int t) {
    return split_rows<Rows4> ? n / 2 * 8 + 2 * t + n % 2 : 4 * n + t;
}

/// The sums of the n-th row of a lane: `at` is 0 for row g of a product, 2 for row g + 8.
template <int Rows4, class Sum>
struct byte_sums {
    Sum high, low;
    __device__ __forceinline__ byte_sums(const Sum (&sums)[Rows4][4], int n, int at)
        : high(split_rows<Rows4> ? sums[n & ~1][at + (n & 1)] : sums[n][at]),
          low(split_rows<Rows4> ? sums[n | (Rows4 > 1)][at + (n & 1)] : sums[n][at + 1]) {}
};

/// A tile of query columns as registers of B: the part of lane (g, t) for column g. One set per column group.
template <class WarpTile>
struct folded_row {
    static constexpr int groups = WarpTile::column_groups;
    std::uint32_t words[groups][2 * WarpTile::pairs];
    // For the lane's own row lane_row(n, t), not for column g:
    float step[groups];
    float sum[groups];  // of x', where tokens have biases
    float
        offset[groups];  // x times the biases of channels, and what rounding x took from a code in the middle
    int zero[groups];    // zero_code * sum of the fixed-point numbers
};

__device__ __forceinline__ float max_abs4(float4 v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}
/// Sum or maximum over the lanes that fold the same row: the lower two or three bits of the lane number.
template <bool Split, class F>
__device__ __forceinline__ float over_row(float v, F f) {
    v = f(v, __shfl_xor_sync(~0u, v, 1));
    v = f(v, __shfl_xor_sync(~0u, v, 2));
    return Split ? v : f(v, __shfl_xor_sync(~0u, v, 4));
}
struct add_floats {
    __device__ float operator()(float a, float b) const { return a + b; }
};
struct max_floats {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// Where byte `at` of query row `row` lies in shared memory: lanes of different t read 16 bytes that lie 128
/// bytes apart, lanes of different g neighbouring rows.
template <int Dim>
__device__ __forceinline__ std::uint32_t query_byte(int row, int at) {
    return static_cast<std::uint32_t>(
        Dim % 32 == 0 ? at ^ (((at >> 7 & 7) ^ (row % 2 * (Dim > 128 ? 1 : 4))) << 4) : at);
}

/// A query row as fixed-point numbers: the words of their high and low bytes, the step, and the sum of the
/// numbers.
template <bool Split, int N>
__device__ __forceinline__ float fixed_point(const float (&x)[N][4], std::uint32_t (&high)[N],
                                             std::uint32_t (&low)[N], int& total) {
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float four = max_abs4({x[i][0], x[i][1], x[i][2], x[i][3]});
        top = i == 0 ? four : fmaxf(four, top);
    }
    top = over_row<Split>(top, max_floats{});
    const float inverse = top > 1e-33f ? 32512.0f * reciprocal(top) : 0.0f;
    total = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        // 1.5 * 2^23 + 128 + x: byte 1 of the sum is the high byte, byte 0 the low byte plus 128.
        std::uint32_t y[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) y[k] = __float_as_uint(fmaf(x[i][k], inverse, 12583040.0f));
        total += static_cast<int>((y[0] + y[1]) + (y[2] + y[3]) - 4u * 0x4b400080u);
        const byte_words w = split_bytes(y[0], y[1], y[2], y[3]);
        high[i] = w.high;
        low[i] = w.low ^ 0x80808080u;
    }
    return top * (1.0f / 32512.0f);
}

/// A number that the lanes of a folded row share, as lanes want it that own row i of two, or the only one:
/// row t sits in lanes 8t..8t+7, or 4t..4t+3.
template <bool Split, class N>
__device__ __forceinline__ N to_owner(N number, int i, const lane_id& id) {
    return __shfl_sync(~0u, number, Split ? 4 * (2 * id.t + i) : 8 * id.t);
}

/// Which query rows and channels a lane folds: row 8m + g, or row 4m + g / 2, where lanes with even g prepare
/// the first half of the units for their neighbour with odd g and vice versa.
template <class WarpTile, int Rows4>
struct fold_part {
    static constexpr bool split = split_rows<Rows4>;
    static constexpr int rows = split ? Rows4 / 2 : Rows4;
    static constexpr int units = split ? 2 * WarpTile::pairs : WarpTile::pairs;  // of 2 * pairs
    static constexpr int rows_of_tile = split ? 8 : 4;
    int row;  // of its tile
    int in_group[units];
    bool inside[units];

    __device__ __forceinline__ explicit fold_part(const lane_id& id) : row(split ? id.g : id.g / 2) {
#pragma unroll
        for (int i = 0; i < units; ++i) {
            const int unit = split ? i : (id.g & 1) * units + i;
            in_group[i] = id.t * WarpTile::lane_units + unit;
            inside[i] =
                (WarpTile::lane_units % 2 == 0 || unit < WarpTile::lane_units) &&
                (4 * WarpTile::lane_units == WarpTile::group_units || in_group[i] < WarpTile::group_units);
            if (!inside[i]) in_group[i] = 0;
        }
    }
    __device__ __forceinline__ int channel(int i, int column_group) const {
        return (column_group * WarpTile::group_units + in_group[i]) * WarpTile::traits::columns_per_unit;
    }
};

/// 8-bit biases are integers under two numbers of their group, first + step * code. So what the query adds up
/// with them is a sum of integers, four channels in two instructions; the query becomes such numbers (as x
/// above) once per item.
template <class Part>
struct query_bytes {
    static constexpr bool split = Part::split;
    std::uint32_t high[Part::rows][Part::units], low[Part::rows][Part::units];
    float step[Part::rows], sum[Part::rows];

    /// Of the query in shared memory at `rows`, as in fold_rows.
    template <int Dim>
    __device__ __forceinline__ void prepare(std::uint32_t rows, int stride, const Part& part) {
#pragma unroll
        for (int m = 0; m < Part::rows; ++m) {
            const std::uint32_t row =
                rows + static_cast<std::uint32_t>(4 * (Part::rows_of_tile * m + part.row) * stride);
            float x[Part::units][4];
            sum[m] = 0.0f;
#pragma unroll
            for (int i = 0; i < Part::units; ++i) {
                float4 q = load_parameters<float>(row + query_byte<Dim>(part.row, 4 * part.channel(i, 0)));
                if (!part.inside[i]) q = {0.0f, 0.0f, 0.0f, 0.0f};
                x[i][0] = q.x, x[i][1] = q.y, x[i][2] = q.z, x[i][3] = q.w;
                sum[m] += (q.x + q.y) + (q.z + q.w);
            }
            int total;
            step[m] = fixed_point<split>(x, high[m], low[m], total);
            sum[m] = over_row<split>(sum[m], add_floats{});
        }
    }
    /// The lane's part of the product of row `m` with the codes, less 128 each, in units of step[m].
    __device__ __forceinline__ float dot(const std::uint32_t (&codes)[Part::units], int m) const {
        int h = 0, l = 0;
#pragma unroll
        for (int i = 0; i < Part::units; ++i) {
            const int centred = static_cast<int>(codes[i] ^ 0x80808080u);
            h = __dp4a(centred, static_cast<int>(high[m][i]), h);
            l = __dp4a(centred, static_cast<int>(low[m][i]), l);
        }
        return static_cast<float>(256 * h + l);
    }
    /// What belongs to the product of a whole row besides.
    __device__ __forceinline__ float rest(const group_line<byte_params>& line, int m) const {
        return fmaf(128.0f, line.step, line.first) * sum[m];
    }
};

/// The query of an item, as a warp keeps it for folding.
template <class WarpTile, int Rows4>
struct key_query {
    __device__ __forceinline__ key_query(std::uint32_t, int, float, const lane_id&) {}
};
template <class WarpTile, int Rows4>
requires(WarpTile::has_byte_params) struct key_query<WarpTile, Rows4>
    : query_bytes<fold_part<WarpTile, Rows4>> {
    __device__ __forceinline__ key_query(std::uint32_t rows, int stride, float, const lane_id& id) {
        this->template prepare<WarpTile::dim>(rows, stride, fold_part<WarpTile, Rows4>(id));
    }
};

/// Folds query rows (`rows`: shared address of the first row of [rows][stride] floats) with the channel
/// parameters in `run` of `slot` (whose warp tile starts at token `first` of its page), if there are any.
/// Codes are centred: c x = (c - m) x + m x with m half of the largest code, and m x is added in float, so
/// that the rounding of x is multiplied by numbers half as large. Channels with codes of at most 4 bits do
/// without: there the rounding weighs little (a sum of 128 channels errs by 5e-5 instead of 2.5e-5), and the
/// instructions come once per group of tokens. order: where 16-bit keys find the query's channels, or null.
template <class WarpTile, int Rows4>
__device__ __forceinline__ void fold_rows(folded_row<WarpTile> (&to)[Rows4], std::uint32_t rows, int stride,
                                          std::uint32_t slot, [[maybe_unused]] int first,
                                          [[maybe_unused]] int run,
                                          [[maybe_unused]] const key_query<WarpTile, Rows4>& query_row,
                                          const lane_id& id,
                                          [[maybe_unused]] const std::uint16_t* order = nullptr) {
    using traits = typename WarpTile::traits;
    using part_type = fold_part<WarpTile, Rows4>;
    constexpr bool columns = !WarpTile::full && !WarpTile::token_parameters;
    constexpr bool split = split_rows<Rows4>;
    constexpr int width = traits::columns_per_unit;
    constexpr int own_rows = part_type::rows, own_units = part_type::units;
    const part_type part(id);
    const int parity = id.g & 1, own_row = part.row;
    const auto& inside = part.inside;
    rows += static_cast<std::uint32_t>(4 * own_row * stride);
    [[maybe_unused]] const auto line = line_of<WarpTile>(slot, first, run);
    static_for<WarpTile::column_groups>([&](auto column_group) {
        constexpr int G = decltype(column_group)::value;
        int channel[own_units];
        [[maybe_unused]] float4 scale[own_units], bias[own_units];
        [[maybe_unused]] std::uint32_t codes[own_units];  // of 8-bit biases
#pragma unroll
        for (int i = 0; i < own_units; ++i) channel[i] = part.channel(i, G);
        if constexpr (columns) {
            if constexpr (own_units % 2 == 0 && WarpTile::lane_units % 2 == 0 &&
                          4 * WarpTile::lane_units == WarpTile::group_units) {
#pragma unroll
                for (int i = 0; i < own_units; i += 2) {
                    WarpTile::eight_scales(slot, run, channel[i], scale[i], scale[i + 1]);
                    if constexpr (WarpTile::has_byte_params)
                        WarpTile::eight_bias_bytes(slot, run, channel[i], codes[i], codes[i + 1]);
                    else if constexpr (traits::has_bias)
                        WarpTile::eight_biases(slot, run, channel[i], bias[i], bias[i + 1]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < own_units; ++i) {
                    scale[i] = WarpTile::scales(slot, run, channel[i]);
                    if constexpr (WarpTile::has_byte_params)
                        codes[i] = WarpTile::bias_bytes(slot, run, channel[i]);
                    else if constexpr (traits::has_bias)
                        bias[i] = WarpTile::biases(slot, run, channel[i]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < own_rows; ++m) {
            const std::uint32_t row =
                rows + static_cast<std::uint32_t>(4 * part_type::rows_of_tile * m * stride);
            float x[own_units][width];
            [[maybe_unused]] float sum = 0.0f;
            [[maybe_unused]] float4 dots{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < own_units; ++i) {
                const std::uint32_t at = row + query_byte<WarpTile::dim>(own_row, channel[i] * 4);
                if constexpr (WarpTile::full) {
                    uint2 v;
                    if constexpr (reads_rows<WarpTile>) {
                        constexpr int units = WarpTile::lane_units;
                        const int unit = channel[i] / 2,
                                  from = unit / units * (2 * units) + WarpTile::unit_channel(unit % units);
                        v = {load_shared_4(row + query_byte<WarpTile::dim>(own_row, 4 * from)),
                             load_shared_4(
                                 row + query_byte<WarpTile::dim>(own_row, 4 * (from + WarpTile::pair_step)))};
                    } else if (order == nullptr)
                        v = load_shared_8(at);
                    else
                        v = {load_shared_4(row + query_byte<WarpTile::dim>(own_row, 4 * order[channel[i]])),
                             load_shared_4(row +
                                           query_byte<WarpTile::dim>(own_row, 4 * order[channel[i] + 1]))};
                    x[i][0] = inside[i] ? __uint_as_float(v.x) : 0.0f;
                    x[i][1] = inside[i] ? __uint_as_float(v.y) : 0.0f;
                } else {
                    float4 q = load_parameters<float>(at);
                    if (!inside[i]) q = {0.0f, 0.0f, 0.0f, 0.0f};
                    if constexpr (columns && traits::has_bias && !WarpTile::has_byte_params) {
                        // Four short chains instead of a long one.
                        dots.x = fmaf(q.x, bias[i].x, dots.x), dots.y = fmaf(q.y, bias[i].y, dots.y);
                        dots.z = fmaf(q.z, bias[i].z, dots.z), dots.w = fmaf(q.w, bias[i].w, dots.w);
                    }
                    if constexpr (columns)
                        q = {q.x * scale[i].x, q.y * scale[i].y, q.z * scale[i].z, q.w * scale[i].w};
                    if constexpr (traits::has_bias) {
                        const float four = (q.x + q.y) + (q.z + q.w);
                        sum = i == 0 ? four : sum + four;
                    }
                    x[i][0] = q.x, x[i][1] = q.y, x[i][2] = q.z, x[i][3] = q.w;
                }
            }
            std::uint32_t high[own_units], low[own_units];
            [[maybe_unused]] int total = 0;
            float step;
            if constexpr (WarpTile::full) {
                using T = typename WarpTile::scheme::value_type;
                step = 0.0f;
#pragma unroll
                for (int i = 0; i < own_units; ++i) step = fmaxf(step, fmaxf(fabsf(x[i][0]), fabsf(x[i][1])));
                step = over_row<split>(step, max_floats{});
                const float inverse = step > 1e-33f ? reciprocal(step) : 0.0f;
#pragma unroll
                for (int i = 0; i < own_units; ++i) {
                    const float a = x[i][0] * inverse, b = x[i][1] * inverse;
                    high[i] = pack_halves<T>(a, b);
                    low[i] = pack_halves<T>(a - unpack_half<T, 0>(high[i]), b - unpack_half<T, 1>(high[i]));
                }
            } else {
                step = fixed_point<split>(x, high, low, total);
            }
#pragma unroll
            for (int i = 0; i < own_units; ++i) {
                if constexpr (split) {
                    to[2 * m].words[G][i] = high[i];
                    to[2 * m + 1].words[G][i] = low[i];
                } else {
                    const std::uint32_t own = parity ? low[i] : high[i];
                    const std::uint32_t received = __shfl_xor_sync(~0u, parity ? high[i] : low[i], 4);
                    to[m].words[G][i] = parity ? received : own;
                    to[m].words[G][own_units + i] = parity ? own : received;
                }
            }
            // Scalars of the row move to the lanes whose own row it is.
            [[maybe_unused]] float offset = 0.0f, whole = 0.0f;
            if constexpr (!WarpTile::full) {
                [[maybe_unused]] constexpr float middle =
                    0.5f * static_cast<float>((1 << WarpTile::scheme::code_bits) - 1);
                if constexpr (columns && traits::has_bias) {
                    float dot;
                    if constexpr (WarpTile::has_byte_params)
                        dot = query_row.dot(codes, m) * (query_row.step[m] * line.step);
                    else
                        dot = (dots.x + dots.y) + (dots.z + dots.w);
                    if constexpr (WarpTile::code_zero != 0.0f)
                        dot = fmaf(line.unit * WarpTile::code_unit,
                                   fmaf(-middle * step, static_cast<float>(total),
                                        (middle - WarpTile::code_zero) * sum),
                                   dot);
                    else if constexpr (WarpTile::centred)
                        dot = fmaf(middle * line.unit, fmaf(-step, static_cast<float>(total), sum), dot);
                    offset = over_row<split>(dot, add_floats{});
                    if constexpr (WarpTile::has_byte_params) offset += query_row.rest(line, m);
                }
                if constexpr ((!columns && traits::has_bias) || traits::zero_code != 0) {
                    total += __shfl_xor_sync(~0u, total, 1);
                    total += __shfl_xor_sync(~0u, total, 2);
                    if constexpr (!split) total += __shfl_xor_sync(~0u, total, 4);
                }
                if constexpr (!columns && traits::has_bias) {
                    whole = over_row<split>(sum, add_floats{});
                    offset = middle * fmaf(-step, static_cast<float>(total), whole);
                }
            }
#pragma unroll
            for (int i = 0; i < (split ? 2 : 1); ++i) {
                folded_row<WarpTile>& own = to[split ? 2 * m + i : m];
                own.step[G] = to_owner<split>(step * (line.unit * WarpTile::code_unit), i, id);
                if constexpr (!WarpTile::full && traits::has_bias)
                    own.offset[G] = to_owner<split>(offset, i, id);
                if constexpr (!WarpTile::full && !columns && traits::has_bias)
                    own.sum[G] = to_owner<split>(whole, i, id);
                if constexpr (traits::zero_code != 0)
                    own.zero[G] = to_owner<split>(traits::zero_code * total, i, id);
            }
        }
    });
}

/// Scores of tile `Tile` for Rows4 * 4 query rows: scores[n][r] is token 4g + r of the tile, query row
/// lane_row(n, t).
template <class WarpTile, int Rows4, int Tile>
__device__ __forceinline__ void score_tile(float (&scores)[Rows4][4],
                                           const folded_row<WarpTile> (&query)[Rows4], std::uint32_t slot,
                                           const lane_id& id) {
    using traits = typename WarpTile::traits;
    using sum_type = std::conditional_t<WarpTile::full, float, int>;
    static_for<WarpTile::column_groups>([&](auto column_group) {
        constexpr int G = decltype(column_group)::value;
        constexpr int sets = WarpTile::sets(Rows4);
        sum_type all_sums[sets][2][Rows4][4] = {};
        WarpTile::template for_pairs<Tile, G, sets>(
            slot, id, [&](auto set, auto unit_a, auto unit_b, const uint4& a, const uint4& b) {
                auto& sums = all_sums[decltype(set)::value];
#pragma unroll
                for (int n = 0; n < Rows4; ++n) {
                    const std::uint32_t b0 = query[n].words[G][decltype(unit_a)::value],
                                        b1 = query[n].words[G][decltype(unit_b)::value];
                    if constexpr (WarpTile::full) {
                        using T = typename WarpTile::scheme::value_type;
                        mma_values<T>(sums[0][n], a.x, a.y, b.x, b.y, b0, b1);
                        mma_values<T>(sums[1][n], a.z, a.w, b.z, b.w, b0, b1);
                    } else {
                        mma_codes_signed(sums[0][n], a.x, a.y, b.x, b.y, b0, b1);
                        mma_codes_signed(sums[1][n], a.z, a.w, b.z, b.w, b0, b1);
                    }
                }
            });
        float4 scale{1.0f, 1.0f, 1.0f, 1.0f}, bias{0.0f, 0.0f, 0.0f, 0.0f};
        if constexpr (!WarpTile::full && WarpTile::token_parameters) {
            const int token = Tile * WarpTile::tile_height + smaller(4 * id.g, WarpTile::tile_height - 4);
            scale = WarpTile::scales(slot, G, token);
            if constexpr (traits::has_bias) bias = WarpTile::biases(slot, G, token);
        }
        [[maybe_unused]] const float scale4[4] = {scale.x, scale.y, scale.z, scale.w};
        [[maybe_unused]] const float bias4[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
        for (int n = 0; n < Rows4; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const byte_sums<Rows4, sum_type> sums(all_sums[0][r / 2], n, 2 * (r % 2));
                float s;
                if constexpr (WarpTile::full) {
                    s = (sums.high + sums.low) * query[n].step[G];
                } else {
                    constexpr int weight = WarpTile::set_weight(sets),
                                  unit = weight << WarpTile::raised(sets);
                    const float step = query[n].step[G] * (1.0f / unit);
                    int whole = 256 * sums.high + sums.low;
                    if constexpr (sets == 2) {
                        const byte_sums<Rows4, sum_type> upper(all_sums[1][r / 2], n, 2 * (r % 2));
                        whole = weight * whole + (256 * upper.high + upper.low);
                    }
                    if constexpr (traits::zero_code != 0) whole -= unit * query[n].zero[G];
                    s = static_cast<float>(whole);
                    if constexpr (traits::has_bias)
                        s = fmaf(s, step, query[n].offset[G]);
                    else
                        s *= step;
                    if constexpr (WarpTile::token_parameters) {
                        s *= scale4[r];
                        if constexpr (traits::has_bias) s = fmaf(bias4[r], query[n].sum[G], s);
                    }
                }
                scores[n][r] = G == 0 ? s : scores[n][r] + s;
            }
    });
}

/// Scores of all tiles of the warp tile at `slot`, laid out as those of score_tile, times the scales of their
/// tokens, if keys have them beside the parameters of channels. unit: of rows of tokens.
template <class WarpTile, int Rows4>
__device__ __forceinline__ void scale_scores([[maybe_unused]] float (&scores)[WarpTile::tiles][Rows4][4],
                                             [[maybe_unused]] std::uint32_t slot,
                                             [[maybe_unused]] const lane_id& id,
                                             [[maybe_unused]] float unit) {
    constexpr bool rows = reads_rows<WarpTile>;
    if constexpr (!WarpTile::mixed)
        if constexpr (rows || WarpTile::has_token_scales)
#pragma unroll
            for (int tile = 0; tile < WarpTile::tiles; ++tile) {
                [[maybe_unused]] const int token =
                    tile * WarpTile::tile_height + smaller(4 * id.g, WarpTile::tile_height - 4);
                float4 f{unit, unit, unit, unit};
                float of_all = 1.0f;
                if constexpr (!rows) {
                    f = WarpTile::token_scales(slot, 0, token);
                    of_all = 1.0f / WarpTile::scale_lift;
                } else if constexpr (WarpTile::has_token_factors) {
                    f = WarpTile::token_factors(slot, token);
                }
                const float scale[4] = {f.x * of_all, f.y * of_all, f.z * of_all, f.w * of_all};
#pragma unroll
                for (int n = 0; n < Rows4; ++n)
#pragma unroll
                    for (int r = 0; r < 4; ++r) scores[tile][n][r] *= scale[r];
            }
}

}}}  // namespace kvq::cuda::detail
