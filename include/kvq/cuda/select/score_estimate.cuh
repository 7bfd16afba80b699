// An estimate of the scores of a block of keys from its parameters alone, by one warp: that of the CPU
// (cpu/product/score_estimate.hpp).
//
//   x^[t][c] in r_t * [m_c - h_c, m_c + h_c]        m, h: middle and half of the range of the codes of
//                                                   channel c
//   estimate = max over groups of tokens of
//     sum_c q_c m_c + spread * sum_c |q_c| h_c,   times the extreme token scale
//
// Contract: reads parameters only. Four query rows at a time; lanes share the channels.
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

    /// Of all blocks of a head.
    __device__ __forceinline__ key_ranges(const cache_ref<Pair>& cache, int sequence, int head) {
        if constexpr (mixed) {
            const int lane = static_cast<int>(threadIdx.x) % warp_size;
            const auto of_width = quads_of<S, dim>(cache.key_plan(sequence, head));
#pragma unroll
            for (int i = 0; i < numbers; ++i) {
                const int quad = quad_channels::channel(i, lane) / 4;
                int top = 0, before = 0;
                static_for<S::width_list::count>([&](auto number) {
                    constexpr int w = decltype(number)::value, bits = S::width_list::values[w];
                    if (quad >= before && quad < before + of_width.of[w]) top = (1 << bits) - 1;
                    before += of_width.of[w];
                });
                half[i] = middle[i] = 0.5f * static_cast<float>(top);
            }
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
            const auto word = [](const std::byte* from) { return *reinterpret_cast<const unsigned*>(from); };
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
                for (int i = 0; i < 3; ++i) line[i] = of[i];
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
