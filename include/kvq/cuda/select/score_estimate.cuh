// An estimate of the scores of a block of keys from its parameters alone, by one warp: that of the CPU
// (cpu/product/score_estimate.hpp).
//
//   x^[t][c] in r_t * [m_c - h_c, m_c + h_c]        m, h: middle and half of the range of the codes of
//                                                   channel c
//   estimate = max over groups of tokens of
//     sum_c q_c m_c + spread * sum_c |q_c| h_c,   times the extreme token scale
//
// Where there are no token scales, and parameters are bytes or half floats, the sums are products of matrices
// (range_products): eight blocks of keys and eight query rows at a time.
// Contract: reads parameters only. Otherwise four query rows at a time; lanes share the channels.
// Source: the bound is that of Quest, arXiv 2406.10774, section 3.2, with the stored grid instead of stored
// minima and maxima.
#pragma once

#include "../layout/block_access.cuh"
#include "../layout/parameters.cuh"
#include "../layout/transform_row.cuh"
#include "../layout/warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// Why pages of such keys have no estimate; null: they have one.
template <class Pair>
inline constexpr const char* no_estimate = [] {
    if constexpr (has_lower<Pair>)
        return "their keys have two planes";
    else if constexpr (read_by_numbers<typename Pair::keys> || full_precision<typename Pair::keys>)
        return "their keys have no parameters";
    else
        return codec<typename Pair::keys>.per_token ? "their keys have parameters per token"
               : Pair::head_dim % 4 != 0            ? "their channels are no multiple of 4"
                                                    : nullptr;
}();

/// Of the distance from the middle of a range to its end, as in attention/page_choice.hpp.
inline constexpr float page_spread = 0.3f;

/// Sums of lanes: lane i gets that of x[i & (N - 1)], N a power of two.
template <int N>
__device__ __forceinline__ float sum_lanes(float (&x)[N]) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
    for (int step = N / 2; step > 0; step /= 2)
#pragma unroll
        for (int i = 0; i < step; ++i) {
            const bool upper = (lane & step) != 0;
            x[i] =
                (upper ? x[i + step] : x[i]) + __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + step], step);
        }
#pragma unroll
    for (int step = N; step < warp_size; step *= 2) x[0] += __shfl_xor_sync(0xffffffffu, x[0], step);
    return x[0];
}

/// Channels of a lane: quads, so that parameters of four neighbours are one load.
using quad_channels = row_layout<2, 5, 0>;

/// What the codes of a block's channels can be.
template <class Pair>
struct key_ranges {
    static constexpr block_shape shape = shape_of<tensor::key, Pair>;
    static constexpr int dim = shape.dim, quads = kvq::detail::ceil_div(dim, 4 * warp_size),
                         numbers = 4 * quads;
    using S = typename inner_of<typename Pair::keys>::type;
    using P = typename S::parameter;
    using parameters = typename S::parameters;
    static constexpr bool mixed = codec<S>.several_widths(), scales = codec<S>.has_token_scales(),
                          has_bias = S::levels::has_bias, bytes = parameter_width<P> == 1;
    static constexpr int groups = typename S::layout_type{}.groups(shape),
                         places = typename S::layout_type{}.slot_count(shape);
    /// Parameters are the end of a block, from this byte on.
    static constexpr std::size_t parameters_at = typename S::layout_type{}.scale_offset(shape);
    static_assert(dim % 4 == 0 && places % 4 == 0 && parameters_at % 4 == 0);

    float half[mixed ? numbers : 1], middle[mixed ? numbers : 1];  // of the largest code; less that of zero

    /// Half of the largest code of a quad of channels, of mixed widths.
    template <class Quads>
    __device__ __forceinline__ static float half_range(const Quads& of_width, int quad) {
        int top = 0, before = 0;
        static_for<S::width_list::count>([&](auto number) {
            constexpr int w = decltype(number)::value, bits = S::width_list::values[w];
            if (quad >= before && quad < before + of_width.of[w]) top = (1 << bits) - 1;
            before += of_width.of[w];
        });
        return 0.5f * static_cast<float>(top);
    }
    /// Of all blocks of a head.
    __device__ __forceinline__ key_ranges(const cache_ref<Pair>& cache, int sequence, int head) {
        if constexpr (mixed) {
            const int lane = static_cast<int>(threadIdx.x) % warp_size;
            const auto of_width = quads_of<S, dim>(cache.key_plan(sequence, head));
#pragma unroll
            for (int i = 0; i < numbers; ++i)
                half[i] = middle[i] = half_range(of_width, quad_channels::channel(i, lane) / 4);
        } else {
            half[0] = 0.5f * static_cast<float>((1 << codec<S>.width()) - 1);
            middle[0] = half[0] - static_cast<float>(codec<S>.zero_code);
        }
    }

    /// Scales and biases of a lane's channels in a group, as they are stored.
    struct stored_group {
        static constexpr int words = (bytes ? 1 : static_cast<int>(sizeof(P))) * quads;
        unsigned scale[words], bias[has_bias ? words : 1];
        unsigned short line[bytes ? 3 : 1];

        __device__ __forceinline__ void load(const std::byte* stored, int g) {
            const int lane = static_cast<int>(threadIdx.x) % warp_size;
            const auto word = [](const std::byte* from) {
                return __ldcg(reinterpret_cast<const unsigned*>(from));
            };
#pragma unroll
            for (int i = 0; i < words; ++i) {
                constexpr int each = words / quads;  // words of a quad
                const int slot = quad_channels::channel(4 * (i / each), lane);
                scale[i] = 0;
                if constexpr (has_bias) bias[i] = 0;
                if (dim % (4 * warp_size) != 0 && slot >= dim) continue;
                const std::byte* const from =
                    stored + static_cast<std::size_t>(g * places + slot) * sizeof(P) + 4 * (i % each);
                scale[i] = word(from);
                if constexpr (has_bias)
                    bias[i] = word(from + (bytes ? static_cast<std::size_t>(groups * places)
                                                 : typename S::layout_type{}.section_bytes(shape)));
            }
            if constexpr (bytes) {
                const auto* const of =
                    reinterpret_cast<const unsigned short*>(parameters::shared(stored, groups, places, g));
#pragma unroll
                for (int i = 0; i < 3; ++i) line[i] = __ldcg(of + i);
            }
        }
        __device__ __forceinline__ float scale_of(int i) const {
            if constexpr (bytes)
                return __uint_as_float(static_cast<unsigned>(line[0]) << 16) *
                       kvq::detail::scale_float::value(scale[i / 4] >> 8 * (i % 4) & 0xffu);
            else
                return number(scale, i);
        }
        __device__ __forceinline__ float bias_of(int i) const {
            if constexpr (!has_bias)
                return 0.0f;
            else if constexpr (bytes)
                return fmaf(__uint_as_float(static_cast<unsigned>(line[2]) << 16),
                            static_cast<float>(bias[i / 4] >> 8 * (i % 4) & 0xffu),
                            __uint_as_float(static_cast<unsigned>(line[1]) << 16));
            else
                return number(bias, i);
        }

    private:
        template <int N>
        __device__ __forceinline__ static float number(const unsigned (&words_of)[N], int i) {
            if constexpr (sizeof(P) == 4)
                return __uint_as_float(words_of[i]);
            else
                return i % 2 == 0 ? unpack_half<P, 0>(words_of[i / 2]) : unpack_half<P, 1>(words_of[i / 2]);
        }
    };

    /// The estimate of a group, for row lane % 4 of four rows.
    __device__ __forceinline__ float estimate(const std::byte* block, const stored_group& of, int g,
                                              const float* query, int rows) const {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        float sums[4] = {}, halves[4] = {};
#pragma unroll
        for (int k = 0; k < quads; ++k) {
            const int c = quad_channels::channel(4 * k, lane);
            if (dim % (4 * warp_size) != 0 && c >= dim) continue;
            float m[4], h[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float scale = of.scale_of(4 * k + i);
                m[i] = fmaf(scale, middle[mixed ? 4 * k + i : 0], of.bias_of(4 * k + i));
                h[i] = scale *
                       (scales ? half[mixed ? 4 * k + i : 0] : page_spread * half[mixed ? 4 * k + i : 0]);
            }
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                if (r >= rows) break;
                const float4 q = *reinterpret_cast<const float4*>(query + r * dim + c);
                const float x[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sums[r] = fmaf(x[i], m[i], sums[r]);
                    (scales ? halves : sums)[r] = fmaf(fabsf(x[i]), h[i], (scales ? halves : sums)[r]);
                }
            }
        }
        const float x = sum_lanes(sums);
        if constexpr (scales) {
            constexpr typename S::layout_type at{};
            const float y = page_spread * sum_lanes(halves);
            float least = INFINITY, most = -INFINITY;
            const auto tokens = at.cut(shape);
            for (int t = lane; t < tokens.group_size(g); t += warp_size) {
                const float s = S::token_scale_type::token_scale(block + at.token_scale_offset(shape),
                                                                 tokens.slot(g * tokens.group + t));
                least = fminf(least, s);
                most = fmaxf(most, s);
            }
#pragma unroll
            for (int step = warp_size / 2; step > 0; step /= 2) {
                least = fminf(least, __shfl_xor_sync(0xffffffffu, least, step));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
            }
            return fmaxf(least * x, most * x) + fmaxf(-least, most) * y;
        }
        return x;
    }
    /// Calls f(r, estimate) for the rows of `query` in fours: the estimate of row r + lane % 4. query: on a
    /// multiple of 16 bytes.
    template <class F>
    __device__ __forceinline__ void estimate_block(const std::byte* block, const float* query, int rows,
                                                   const F& f) const {
        for (int r = 0; r < rows; r += 4) {
            float best = -INFINITY;
#pragma unroll 1
            for (int g = 0; g < groups; ++g) {
                stored_group held;
                held.load(block + parameters_at, g);
                best = fmaxf(best, estimate(block, held, g, query + r * dim, rows - r));
            }
            f(r, best);
        }
    }
};

/// Estimates of blocks as products of matrices, without token scales:
///
///   estimate = max over groups of  sum_c scale_c (middle_c q_c + spread half_c |q_c|)  +  sum_c bias_c q_c
///
/// Rows are eight blocks, of each two groups; columns are eight query rows, as two half floats that add up;
/// depth are channels. Parameters are half floats as they come.
template <class Pair>
struct range_products {
    using ranges = key_ranges<Pair>;
    using S = typename ranges::S;
    using P = typename ranges::P;
    static constexpr int dim = ranges::dim, steps = dim / 16, groups = ranges::groups, columns = 8,
                         blocks = 8;
    static constexpr std::size_t each = ranges::bytes ? 1 : 2;  // bytes of a parameter
    static constexpr bool can = (ranges::bytes || std::is_same_v<P, float16>)&&!ranges::scales &&
                                dim % 64 == 0 && dim <= 128 && ranges::places == dim &&
                                ranges::parameters_at % 16 == 0 && Pair::key_block_bytes % 16 == 0;

    /// Query rows in shared memory: words of two half floats.
    struct query_rows {
        uint4 of_scale[steps * warp_size], of_bias[ranges::has_bias ? steps * warp_size : 1];
        float sum[columns];

        /// The first `count` of `rows`, up to eight. All threads; a barrier must follow.
        __device__ __forceinline__ void store(const cache_ref<Pair>& cache, int sequence, int head,
                                              const ranges& r, const float* rows, int count) {
            const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size;
#pragma unroll 1
            for (int i = thread; i < 2 * steps * warp_size; i += static_cast<int>(blockDim.x)) {
                const bool bias = i >= steps * warp_size;
                if (bias && !ranges::has_bias) break;
                const int at = bias ? i - steps * warp_size : i, row = lane / 4;
                const int c = channel(at / warp_size, lane % 4);
                float half = r.half[0], middle = r.middle[0];
                if constexpr (ranges::mixed)
                    half = middle =
                        ranges::half_range(quads_of<S, dim>(cache.key_plan(sequence, head)), c / 4);
                float x[4] = {};
                if (row < count) {
                    const float4 q = *reinterpret_cast<const float4*>(rows + row * dim + c);
                    const float y[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                    for (int n = 0; n < 4; ++n)
                        x[n] = fminf(fmaxf(bias ? y[n] : fmaf(middle, y[n], page_spread * half * fabsf(y[n])),
                                           -65504.0f),
                                     65504.0f);
                }
                // In the order in which byte_halves() leaves bytes.
                if constexpr (ranges::bytes) {
                    const float third = x[1];
                    x[1] = x[2];
                    x[2] = third;
                }
                const auto rest = [](std::uint32_t high, float a, float b) {
                    return pack_halves<float16>(a - unpack_half<float16, 0>(high),
                                                b - unpack_half<float16, 1>(high));
                };
                const std::uint32_t front = pack_halves<float16>(x[0], x[1]),
                                    back = pack_halves<float16>(x[2], x[3]);
                (bias ? of_bias : of_scale)[at] = {front, back, rest(front, x[0], x[1]),
                                                   rest(back, x[2], x[3])};
            }
            if constexpr (ranges::bytes) {
                for (int row = thread / warp_size; row < columns;
                     row += static_cast<int>(blockDim.x) / warp_size) {
                    float all = 0.0f;
                    if (row < count)
                        for (int c = lane; c < dim; c += warp_size) all += rows[row * dim + c];
#pragma unroll
                    for (int step = 1; step < warp_size; step *= 2)
                        all += __shfl_xor_sync(0xffffffffu, all, step);
                    if (lane == 0) sum[row] = all;
                }
            }
        }
    };

    /// The first of four channels of a lane in a step: a lane's 16 neighbours are those of four steps.
    __device__ __forceinline__ static int channel(int step, int lane) {
        return 64 * (step / 4) + 16 * lane + 4 * (step % 4);
    }
    /// Four parameters as two words of half floats.
    template <bool Scale>
    __device__ __forceinline__ static half_quad halves(const uint4 (&of)[each], int j) {
        const auto word = [](const uint4& v, int i) {
            return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
        };
        if constexpr (!ranges::bytes)
            return {word(of[j / 2], 2 * j % 4), word(of[j / 2], 2 * j % 4 + 1)};
        else if constexpr (Scale)
            return small_halves<kvq::detail::scale_float>(word(of[0], j));
        else
            return byte_halves(word(of[0], j));
    }

    /// Estimates of eight blocks, of which this is that of lanes 4 i to 4 i + 3 (null: none), for query rows
    /// 2 (lane % 4) and the next one. All lanes.
    __device__ __forceinline__ static float2 estimate(const std::byte* block, const query_rows& query) {
        constexpr float lift = half_lift<kvq::detail::scale_float>;
        const int lane = static_cast<int>(threadIdx.x) % warp_size, own = lane % 4;
        const std::byte* const stored = block == nullptr ? nullptr : block + ranges::parameters_at;
        float best[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
        for (int first = 0; first < groups; first += 2) {
            const int group[2] = {first, kvq::detail::smaller(first + 1, groups - 1)};
            float line[2][3] = {};
            if constexpr (ranges::bytes)
                if (block != nullptr)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const auto* const of = reinterpret_cast<const unsigned short*>(
                            ranges::parameters::shared(stored, groups, dim, group[h]));
#pragma unroll
                        for (int i = 0; i < 3; ++i)
                            line[h][i] = __uint_as_float(static_cast<unsigned>(__ldcg(of + i)) << 16);
                    }
            float of_scale[4] = {}, of_bias[4] = {};
#pragma unroll
            for (int s = 0; s < dim / 64; ++s) {
                uint4 scale[2][each] = {}, bias[2][each] = {};
                if (block != nullptr)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
#pragma unroll
                        for (std::size_t i = 0; i < each; ++i) {
                            const std::byte* const from =
                                stored + static_cast<std::size_t>(group[h] * dim + 64 * s + 16 * own) * each +
                                16 * i;
                            scale[h][i] = __ldcg(reinterpret_cast<const uint4*>(from));
                            if constexpr (ranges::has_bias)
                                bias[h][i] = __ldcg(reinterpret_cast<const uint4*>(
                                    from + (ranges::bytes
                                                ? static_cast<std::size_t>(groups * dim)
                                                : typename S::layout_type{}.section_bytes(ranges::shape))));
                        }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = (4 * s + j) * warp_size + lane;
                    const auto multiply = [&](float(&to)[4], half_quad a, half_quad b, const uint4& q) {
                        mma_values<float16>(to, a.even, b.even, a.odd, b.odd, q.x, q.y);
                        mma_values<float16>(to, a.even, b.even, a.odd, b.odd, q.z, q.w);
                    };
                    multiply(of_scale, halves<true>(scale[0], j), halves<true>(scale[1], j),
                             query.of_scale[at]);
                    if constexpr (ranges::has_bias)
                        multiply(ranges::bytes ? of_bias : of_scale, halves<false>(bias[0], j),
                                 halves<false>(bias[1], j), query.of_bias[at]);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float x = of_scale[2 * h + c];
                    if constexpr (ranges::bytes) {
                        x *= line[h][0] * (1.0f / lift);
                        if constexpr (ranges::has_bias)
                            x += fmaf(line[h][2] * half_codes, of_bias[2 * h + c],
                                      line[h][1] * query.sum[2 * own + c]);
                    }
                    best[c] = fmaxf(best[c], x);
                }
            }
        }
        return {best[0], best[1]};
    }
};

/// Where the parameters of a key block begin, if it has an estimate.
template <class Pair>
constexpr std::size_t parameters_of() noexcept {
    if constexpr (no_estimate<Pair> == nullptr)
        return key_ranges<read_pair<Pair>>::parameters_at;
    else
        return 0;
}

}  // namespace detail
}}}  // namespace kvq::cuda
