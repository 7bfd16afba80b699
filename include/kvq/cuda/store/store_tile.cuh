// Coding 32 new tokens in a row as a tile.
//
// A tile lies in shared memory: lane = token for ranges, parameters and keys, lane = 4 channels for values;
// whole words, no atomics.
// Contract: the bytes that the CPU writes for the same tokens (core/rounding.hpp). Ranges of 16-bit input
// come from packed minima and maxima, which are exact; rows with NaN or infinities take the careful path.
#pragma once

#include "../../core/token_view.hpp"
#include "../layout/block_access.cuh"
#include "../layout/code_words.cuh"
#include "../layout/warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// W(float(x)) as the CPU rounds it, NaN payloads included.
template <class W, class T>
__device__ __forceinline__ W window_value(T x) {
    if constexpr (std::is_same_v<W, T> && !std::is_same_v<W, float>) {
        constexpr std::uint16_t infinity = std::is_same_v<W, float16> ? 0x7c00 : 0x7f80;
        constexpr std::uint16_t quiet = std::is_same_v<W, float16> ? 0x200 : 0x40;
        return (x.bits & 0x7fffu) > infinity ? W::from_bits(static_cast<std::uint16_t>(x.bits | quiet)) : x;
    }
    const float f = to_float(x);
    if constexpr (std::is_same_v<W, float>)
        return f;
    else if (kvq::detail::is_nan(f))
        return W(static_cast<float>(x));
    else
        return from_float<W>(f);
}

/// What a scheme's tile needs to know at compile time.
template <class S, int Dim, int PageTokens>
struct store_traits {
    using words = word_traits<S>;
    static constexpr bool quantized = !words::full;
    static constexpr int group = !quantized || words::group == 0 || words::group > Dim ? Dim : words::group;
    static constexpr int groups = quantized ? ceil_div(Dim, group) : 1;
    /// Whole tiles: 32 tokens of a page, groups and words that do not overlap.
    static constexpr bool tiles =
        PageTokens % 32 == 0 && Dim % 16 == 0 && group % 8 == 0 &&
        (group == Dim ? Dim % (4 * words::units_per_step) == 0
                      : Dim % group == 0 && group % (4 * words::units_per_step) == 0) &&
        (!words::full || words::columns_per_unit == 2);
};

inline constexpr int store_warps = 4;
inline constexpr int store_threads = store_warps * warp_size;

template <class T, int Dim>
struct store_rows {
    static constexpr int row_bytes = Dim * static_cast<int>(sizeof(T)) + 16;  // rows start in different banks
};

/// N neighbouring input numbers, `at` aligned to their size.
template <int N, class T>
__device__ __forceinline__ void read_numbers(const std::byte* at, float (&x)[N]) {
    T raw[N];
    __builtin_memcpy(raw, __builtin_assume_aligned(at, N * sizeof(T) > 16 ? 16 : N * sizeof(T)), sizeof raw);
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = to_float(raw[k]);
}

/// What the threads of a tile tell each other: [group][token] bias and 1 / scale; parts of ranges.
template <int Groups>
struct tile_parameters {
    float2 of[Groups][32];
    float lo[store_warps][32], hi[store_warps][32];
};

/// Shared memory of a thread block for one tensor.
template <tensor Role, class Pair, class T>
struct store_memory {
    static constexpr int dim = dim_of<Role, Pair>;
    using parameters = tile_parameters<store_traits<scheme_of<Role, Pair>, dim, Pair::page_tokens>::groups>;
    /// While one is quantized the other one is filled; rows of 4-byte numbers and long ones leave space for
    /// one only.
    static constexpr int row_buffers = 64 * store_rows<T, dim>::row_bytes <= 20480 ? 2 : 1;
    alignas(16) std::byte rows[row_buffers][32 * store_rows<T, dim>::row_bytes];
    alignas(16) parameters tile;
};

/// Range of the finite numbers of `Count` channels (a multiple of 8) of a token, and how many are not finite.
/// (Whether a zero is -0 or +0 makes no difference to parameters.)
template <int Count, class T>
__device__ __forceinline__ int row_range(const std::byte* row, float& lo, float& hi) {
    static_assert(Count % 8 == 0);
    bool careful = false;
    if constexpr (sizeof(T) == 2) {
        constexpr std::uint32_t infinity = std::is_same_v<T, float16> ? 0x7c007c00u : 0x7f807f80u;
        std::uint32_t low = infinity, high = infinity | 0x80008000u;
#pragma unroll 4
        for (int i = 0; i < Count / 8; ++i) {
            const uint4 v = *reinterpret_cast<const uint4*>(row + 16 * i);
            const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (const std::uint32_t w : words) {
                low = min_halves<T>(low, w);
                high = max_halves<T>(high, w);
            }
        }
        // A NaN stays in both (min_halves, max_halves) and makes each comparison below false.
        low = min_halves<T>(low, low >> 16), high = max_halves<T>(high, high >> 16);
        lo = unpack_half<T, 0>(low), hi = unpack_half<T, 0>(high);
        careful = !(lo > -INFINITY && hi < INFINITY);
    } else {
        careful = true;
    }
    if (!careful) return 0;
    lo = INFINITY, hi = -INFINITY;
    int not_finite = 0;
    for (int i = 0; i < Count; i += 4) {
        float x[4];
        read_numbers<4, T>(row + i * static_cast<int>(sizeof(T)), x);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const bool finite = kvq::detail::is_finite(x[k]);
            not_finite += !finite;
            if (finite && x[k] < lo) lo = x[k];
            if (finite && x[k] > hi) hi = x[k];
        }
    }
    return not_finite;
}

/// Tokens in shared memory (`rows`, row_bytes apart) to tokens [first, first + 32) of a page's block. All
/// threads of a thread block.
template <tensor Role, class Pair, class T>
__device__ __forceinline__ unsigned store_tile(
    std::byte* block, const std::byte* rows, int first,
    tile_parameters<store_traits<scheme_of<Role, Pair>, dim_of<Role, Pair>, Pair::page_tokens>::groups>&
        shared) {
    using S = scheme_of<Role, Pair>;
    using traits = word_traits<S>;
    constexpr block_shape s = shape_of<Role, Pair>;
    constexpr int dim = dim_of<Role, Pair>, page = Pair::page_tokens;
    using store = store_traits<S, dim, page>;
    constexpr int row_bytes = store_rows<T, dim>::row_bytes, width = static_cast<int>(sizeof(T));
    constexpr int units = (Role == tensor::key ? dim : page) / traits::columns_per_unit;
    constexpr int lines = traits::lines(units);  // of a tile of 32 rows
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const std::byte* const own_row = rows + lane * row_bytes;  // lane = token
    unsigned not_finite = 0;
    bool clean = true;
    const float2* parameters = nullptr;  // [group][32]
    if constexpr (store::quantized) {
        const auto fit = [&](float lo, float hi, int g) {
            if (lo > hi) lo = hi = 0.0f;  // nothing finite
            const auto stored = fit_range<S>(lo, hi);
            write_parameters<S>(s, block, g, first + lane, stored);
            const float bias = to_float(stored.bias), inverse = inverse_scale(to_float(stored.scale));
            clean = clean && fits_grid<S>(lo, hi, bias, inverse);
            return float2{bias, inverse};
        };
        if constexpr (store_warps % store::groups == 0 && dim % (8 * store_warps) == 0) {
            // Every warp takes a quarter of the channels; then one warp of each group makes its parameters:
            // done by all, they would cost more than another barrier.
            constexpr int quarter = dim / store_warps, warps = store_warps / store::groups;
            float lo, hi;
            not_finite = row_range<quarter, T>(own_row + warp * quarter * width, lo, hi);
            shared.lo[warp][lane] = lo;
            shared.hi[warp][lane] = hi;
            __syncthreads();
            if (warp < store::groups) {
#pragma unroll
                for (int w = 0; w < warps; ++w) {
                    const float other_lo = shared.lo[warp * warps + w][lane],
                                other_hi = shared.hi[warp * warps + w][lane];
                    lo = w == 0 || other_lo < lo ? other_lo : lo;
                    hi = w == 0 || other_hi > hi ? other_hi : hi;
                }
                shared.of[warp][lane] = fit(lo, hi, store::groups == 1 ? 0 : warp);
            }
            clean = __syncthreads_and(clean && not_finite == 0);
            parameters = shared.of[0];
        } else {
            // Groups belong to one warp each.
            for (int g = warp; g < store::groups; g += store_warps) {
                float lo, hi;
                not_finite += row_range<store::group, T>(own_row + g * store::group * width, lo, hi);
                shared.of[g][lane] = fit(lo, hi, g);
            }
            clean = __syncthreads_and(clean && not_finite == 0);
            parameters = shared.of[0];
        }
    }
    if constexpr (Role == tensor::key) {
        // lane = token; the tile of these 32 tokens is one run of lines, of which every warp writes some
        auto* const to = reinterpret_cast<std::uint32_t*>(block) + first * lines + lane;
        if constexpr (!store::quantized) {
            using W = typename S::value_type;
#pragma unroll 4
            for (int i = warp; i < dim / 8; i += store_warps) {
                T raw[8];
                __builtin_memcpy(raw, __builtin_assume_aligned(own_row + i * 8 * width, 16), sizeof raw);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const T a = raw[2 * k], b = raw[2 * k + 1];
                    not_finite += !kvq::detail::is_finite(to_float(a)) + !kvq::detail::is_finite(to_float(b));
                    to[(4 * i + k) * 32] =
                        window_value<W>(a).bits | static_cast<std::uint32_t>(window_value<W>(b).bits) << 16;
                }
            }
        } else {
            constexpr int step = traits::units_per_step;  // quads
            constexpr int jobs = units / step;
#pragma unroll 4
            for (int job = warp; job < jobs; job += store_warps) {
                const float2 p = parameters[job * 4 * step / store::group * 32 + lane];
                const float bias[4] = {p.x, p.x, p.x, p.x}, inverse[4] = {p.y, p.y, p.y, p.y};
                float x[4 * step];
                read_numbers<4 * step, T>(own_row + job * 4 * step * width, x);
                std::uint32_t quads[step];
#pragma unroll
                for (int q = 0; q < step; ++q) {
                    const float four[4] = {x[4 * q], x[4 * q + 1], x[4 * q + 2], x[4 * q + 3]};
                    quads[q] = quad_of_codes<S>(four, bias, inverse, clean);
                }
                pack_step<S>(job * step, units, quads, [&](int v, std::uint32_t word) { to[v * 32] = word; });
            }
        }
    } else {
        // lane = 4 neighbouring channels, which are rows of a tile of 32 channels; the warps share channels
        // and tokens
        constexpr int step = traits::units_per_step;
        constexpr int steps =
            store::quantized ? 8 / step : 16;  // of a tile: words of quads, or pairs of tokens
        constexpr int lanes = dim / 4, parts = ceil_div(lanes, warp_size);
#pragma unroll 4
        for (int job = warp; job < steps * parts; job += store_warps) {
            const int i = job / parts, channel = (job % parts * warp_size + lane) * 4;
            if (channel >= dim) continue;
            const int tile = channel / 32, height = smaller(32, dim - tile * 32);
            auto* const to = reinterpret_cast<std::uint32_t*>(block) + tile * 32 * lines + channel % 32;
            const auto write = [&](int vector, const std::uint32_t(&w)[4]) {
                *reinterpret_cast<uint4*>(to + vector * height) = uint4{w[0], w[1], w[2], w[3]};
            };
            if constexpr (!store::quantized) {
                using W = typename S::value_type;
                T a[4], b[4];
                const std::byte* const from = rows + 2 * i * row_bytes + channel * width;
                __builtin_memcpy(a, __builtin_assume_aligned(from, 4 * width), sizeof a);
                __builtin_memcpy(b, __builtin_assume_aligned(from + row_bytes, 4 * width), sizeof b);
                std::uint32_t words[4];
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    not_finite +=
                        !kvq::detail::is_finite(to_float(a[c])) + !kvq::detail::is_finite(to_float(b[c]));
                    words[c] = window_value<W>(a[c]).bits |
                               static_cast<std::uint32_t>(window_value<W>(b[c]).bits) << 16;
                }
                write(first / 2 + i, words);
            } else {
                const float2* const p = parameters + channel / store::group * 32 + 4 * i * step;
                std::uint32_t quads[4][step];
#pragma unroll
                for (int q = 0; q < step; ++q) {
                    float x[4][4], bias[4], inverse[4];
#pragma unroll
                    for (int k = 0; k < 4; k += 2) {
                        const float4 both = *reinterpret_cast<const float4*>(p + 4 * q + k);
                        bias[k] = both.x, inverse[k] = both.y;
                        bias[k + 1] = both.z, inverse[k + 1] = both.w;
                    }
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        float four[4];
                        read_numbers<4, T>(rows + (4 * (i * step + q) + k) * row_bytes + channel * width,
                                           four);
#pragma unroll
                        for (int c = 0; c < 4; ++c) x[c][k] = four[c];
                    }
#pragma unroll
                    for (int c = 0; c < 4; ++c) quads[c][q] = quad_of_codes<S>(x[c], bias, inverse, clean);
                }
                std::uint32_t words[traits::lines(step)][4];
                int vectors[traits::lines(step)];
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    int n = 0;
                    pack_step<S>(first / 4 + i * step, units, quads[c], [&](int v, std::uint32_t word) {
                        vectors[n] = v;
                        words[n++][c] = word;
                    });
                }
#pragma unroll
                for (int n = 0; n < traits::lines(step); ++n) write(vectors[n], words[n]);
            }
        }
    }
    return not_finite;
}

}}}  // namespace kvq::cuda::detail
