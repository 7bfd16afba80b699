// 16-bit pages to codes of ranges, in registers: a warp quantizes rows of 32 lanes, whose words lie as lanes
// do.
//
//   rows are lines       (keys per token, values per channel)  a lane has a row of 32, and finds the range of
//                        its groups
//   columns are lines    (values per token, keys per channel)  a lane has its row of every tile of 32 rows of
//                        a group; ranges go from lane to lane, half of the columns to each, until a lane has
//                        one pair of columns
//
// A word of a 16-bit page is two neighbouring columns of a row. Ranges are packed minima and maxima, which
// are exact. Where a number is not finite, or does not lie on its grid, the warp reads its words again, one
// at a time.
// Contract: the bytes that quantize_block writes (quantize.cuh).
#pragma once

#include "lane_halves.cuh"
#include "quantize.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// What a warp has in registers at a time of a block of To.
template <class To, tensor Role>
struct page_tiles {
    using S = scheme_of<Role, To>;
    static constexpr block_shape shape = shape_of<Role, To>;
    static constexpr int rows = shape.rows(), cols = shape.cols();
    static constexpr int step = [] {  // columns that fill a word of every plane of codes
        if constexpr (codes_ranges<S>)
            return 4 * word_traits<S>::units_per_step;
        else
            return 4;
    }();
    static constexpr bool on_rows = codec<S>.per_token == (Role == tensor::key);
    static constexpr int line_length = on_rows ? cols : rows,
                         group = codec<S>.group == 0 || codec<S>.group > line_length ? line_length
                                                                                     : codec<S>.group;
    /// Row tiles of a group, and columns; 64 words of two columns.
    static constexpr int tiles = on_rows ? 1 : group / 32,
                         most_columns = on_rows ? cols : 128 / larger(1, tiles),
                         columns = smaller(smaller(cols, 64), most_columns);
    static constexpr bool fit =
        codes_ranges<S> && rows % 32 == 0 && cols % 4 == 0 && line_length % group == 0 &&
        (on_rows ? cols <= 128 && group % step == 0 && cols % step == 0
                 : group % 32 == 0 && tiles <= 8 && columns > 0 && columns % step == 0 &&
                       cols % larger(1, columns) == 0 && (columns & (columns - 1)) == 0);
    static constexpr int bytes = on_rows ? 0 : 8 * columns;  // of shared memory, of a warp
};

/// Do numbers [lo, hi] lie on the grid that is stored for them? parameters: bias, 1 / scale.
template <class S>
__device__ __forceinline__ bool store_range(const block_shape& s, std::byte* block, int group, int slot,
                                            float lo, float hi, float2& parameters) {
    const auto stored = fit_range<S>(lo, hi);
    write_parameters<S>(s, block, group, slot, stored);
    parameters = {to_float(stored.bias), inverse_scale(to_float(stored.scale))};
    return lo > -INFINITY && hi < INFINITY && fits_grid<S>(lo, hi, parameters.x, parameters.y);
}

/// Codes the block from one of 16-bit numbers, whose rows have `RowWords` words, of other channels as well.
/// Shared memory: page_tiles::bytes for each warp. All threads of a block. Returns this thread's count of
/// values that are not finite.
template <class T, class To, tensor Role, int Threads, int RowWords>
__device__ __forceinline__ unsigned quantize_tiles(const std::uint32_t* from, std::byte* block,
                                                   std::byte* shared) {
    using tiles = page_tiles<To, Role>;
    using S = typename tiles::S;
    using traits = word_traits<S>;
    constexpr block_shape s = tiles::shape;
    constexpr int rows = tiles::rows, cols = tiles::cols, step = tiles::step, units = cols / 4;
    constexpr int from_words = cols / 2, to_words = traits::lines(units), warps = Threads / warp_size;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size, lane = thread % warp_size;
    auto* const to = reinterpret_cast<std::uint32_t*>(block);
    const auto layout = typename S::layout_type{}.codes(s);
    const grouped_axis lines = tiles::on_rows ? layout.rows() : layout.cols;
    // Padding between and behind the sections.
    for (int i = static_cast<int>(layout.bytes() / 4) + thread;
         i < static_cast<int>(typename S::layout_type{}.bytes(s) / 4); i += Threads)
        to[i] = 0;
    __syncthreads();
    unsigned not_finite = 0;
    const auto number = [](std::uint32_t word, int k) {
        return k % 2 ? unpack_half<T, 1>(word) : unpack_half<T, 0>(word);
    };
    // Columns [first, first + step) of row 32 * tile + lane. word(i): numbers 2 i and 2 i + 1 of the step;
    // parameters(k): of number k.
    const auto code = [&](int tile, int first, bool clean, const auto& word, const auto& parameters) {
        std::uint32_t quads[step / 4];
#pragma unroll
        for (int q = 0; q < step / 4; ++q) {
            float x[4], bias[4], inverse[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                x[k] = number(word(2 * q + k / 2), k);
                const float2 p = parameters(4 * q + k);
                bias[k] = p.x, inverse[k] = p.y;
            }
            quads[q] = quad_of_codes<S>(x, bias, inverse, clean);
        }
        pack_step<S>(first / 4, units, quads, [&](int v, std::uint32_t packed) {
            to[(tile * to_words + v) * warp_size + lane] = packed;
        });
    };
    if constexpr (tiles::on_rows) {
        constexpr int group = tiles::group;
        for (int tile = warp; tile < rows / 32; tile += warps) {
            const std::uint32_t* const at = from + tile * RowWords * warp_size + lane;
            std::uint32_t x[from_words];
#pragma unroll
            for (int i = 0; i < from_words; ++i) x[i] = at[i * warp_size];
#pragma unroll
            for (int g = 0; g < cols / group; ++g) {
                std::uint32_t lo = x[g * group / 2], hi = lo;
#pragma unroll
                for (int i = 1; i < group / 2; ++i) {
                    lo = min_halves<T>(lo, x[g * group / 2 + i]);
                    hi = max_halves<T>(hi, x[g * group / 2 + i]);
                }
                lo = min_halves<T>(lo, lo >> 16), hi = max_halves<T>(hi, hi >> 16);
                float2 p;
                const auto store = [&](float low, float high) {
                    return store_range<S>(s, block, g, lines.slot(tile * 32 + lane), low, high, p);
                };
                if (__all_sync(~0u, store(number(lo, 0), number(hi, 0)))) {
#pragma unroll
                    for (int first = g * group; first < (g + 1) * group; first += step)
                        code(
                            tile, first, true, [&](int i) { return x[first / 2 + i]; },
                            [&](int) { return p; });
                    continue;
                }
                value_range range;
#pragma unroll 1
                for (int i = 0; i < group; ++i) {
                    const float y = number(at[(g * group + i) / 2 * warp_size], i);
                    not_finite += !kvq::detail::is_finite(y);
                    range.add(y);
                }
                store(range.lo, range.hi);
#pragma unroll 1
                for (int first = g * group; first < (g + 1) * group; first += step)
                    code(
                        tile, first, false, [&](int i) { return at[(first / 2 + i) * warp_size]; },
                        [&](int) { return p; });
            }
        }
    } else {
        constexpr int columns = tiles::columns, pairs = columns / 2, depth = tiles::tiles;
        constexpr int jobs = rows / tiles::group * (cols / columns);
        auto* const parameters = reinterpret_cast<float2*>(shared + warp * tiles::bytes);
        for (int job = warp; job < jobs; job += warps) {
            const int g = job / (cols / columns), begin = job % (cols / columns) * columns, tile = g * depth;
            const std::uint32_t* const at = from + (tile * RowWords + begin / 2) * warp_size + lane;
            std::uint32_t x[depth][pairs], lo[pairs], hi[pairs];
#pragma unroll
            for (int t = 0; t < depth; ++t)
#pragma unroll
                for (int i = 0; i < pairs; ++i) x[t][i] = at[(t * RowWords + i) * warp_size];
#pragma unroll
            for (int i = 0; i < pairs; ++i) {
                lo[i] = hi[i] = x[0][i];
#pragma unroll
                for (int t = 1; t < depth; ++t) {
                    lo[i] = min_halves<T>(lo[i], x[t][i]);
                    hi[i] = max_halves<T>(hi[i], x[t][i]);
                }
            }
            const auto smaller_ones = [](std::uint32_t a, std::uint32_t b) { return min_halves<T>(a, b); };
            const auto larger_ones = [](std::uint32_t a, std::uint32_t b) { return max_halves<T>(a, b); };
            reduce_over_lanes(lo, lane, smaller_ones);
            reduce_over_lanes(hi, lane, larger_ones);
            bool clean = true;
            const auto store = [&](int column, float low, float high) {
                clean &=
                    store_range<S>(s, block, g, lines.slot(begin + column), low, high, parameters[column]);
            };
            // Lanes that have the same pair take a column each, or both where there are no two.
            const int own = 2 * number_of_lane<pairs>(lane);
            __syncwarp();  // the last job's parameters have been read
            if constexpr (pairs < warp_size) {
                const int k = lane / pairs;
                if (k < 2) store(own + k, number(lo[0], k), number(hi[0], k));
            } else {
                store(own, number(lo[0], 0), number(hi[0], 0));
                store(own + 1, number(lo[0], 1), number(hi[0], 1));
            }
            clean = __all_sync(~0u, clean) != 0;
            __syncwarp();
            if (!clean) {
#pragma unroll 1
                for (int column = 0; column < columns; ++column) {
                    float low = INFINITY, high = -INFINITY;
#pragma unroll 1
                    for (int t = 0; t < depth; ++t) {
                        const float y = number(at[(t * RowWords + column / 2) * warp_size], column);
                        const bool finite = kvq::detail::is_finite(y);
                        not_finite += !finite;
                        if (finite) low = fminf(low, y), high = fmaxf(high, y);
                    }
                    for (int distance = 1; distance < warp_size; distance *= 2) {
                        low = fminf(low, __shfl_xor_sync(~0u, low, distance));
                        high = fmaxf(high, __shfl_xor_sync(~0u, high, distance));
                    }
                    if (lane == 0) store(column, low > high ? 0.0f : low, low > high ? 0.0f : high);
                }
                __syncwarp();
#pragma unroll 1
                for (int first = 0; first < columns; first += step)
#pragma unroll 1
                    for (int t = 0; t < depth; ++t)
                        code(
                            tile + t, begin + first, false,
                            [&](int i) { return at[(t * RowWords + first / 2 + i) * warp_size]; },
                            [&](int k) { return parameters[first + k]; });
                continue;
            }
#pragma unroll
            for (int first = 0; first < columns; first += step) {
                float4 p[step / 2];
#pragma unroll
                for (int i = 0; i < step / 2; ++i)
                    p[i] = *reinterpret_cast<const float4*>(parameters + first + 2 * i);
#pragma unroll
                for (int t = 0; t < depth; ++t)
                    code(
                        tile + t, begin + first, true, [&](int i) { return x[t][first / 2 + i]; },
                        [&](int k) {
                            return k % 2 ? float2{p[k / 2].z, p[k / 2].w} : float2{p[k / 2].x, p[k / 2].y};
                        });
            }
        }
    }
    return not_finite;
}

}}}  // namespace kvq::cuda::detail
