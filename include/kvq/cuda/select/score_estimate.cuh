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
#include "../layout/transform_row.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// Why pages of such keys have no estimate; null: they have one.
template <class Pair>
inline constexpr const char* no_estimate = [] {
    if constexpr (read_by_numbers<typename Pair::keys> || full_precision<typename Pair::keys>)
        return "their keys have no parameters";
    else
        return codec<typename Pair::keys>.per_token ? "their keys have parameters per token" : nullptr;
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

/// What the codes of a block's channels can be.
template <class Pair>
struct key_ranges {
    static constexpr block_shape shape = shape_of<tensor::key, Pair>;
    static constexpr int dim = shape.dim, numbers = token_numbers<dim>;
    using S = typename inner_of<typename Pair::keys>::type;
    static constexpr bool mixed = codec<S>.several_widths(), scales = codec<S>.has_token_scales();
    static constexpr int groups = typename S::layout_type{}.groups(shape);

    float half[numbers], middle[numbers];  // half of the largest code; the middle one less that of zero

    /// Of all blocks of a head.
    __device__ __forceinline__ key_ranges(const cache_ref<Pair>& cache, int head) {
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        [[maybe_unused]] const auto quads = [&] {
            if constexpr (mixed)
                return quads_of<S, dim>(cache.key_plan(head));
            else
                return 0;
        }();
#pragma unroll
        for (int i = 0; i < numbers; ++i) {
            if constexpr (mixed) {
                int left = (i * warp_size + lane) / 4, top = 0;
#pragma unroll
                for (int w = S::width_list::count - 1; w >= 0; --w) {
                    int before = 0;
#pragma unroll
                    for (int k = 0; k < w; ++k) before += quads.of[k];
                    if (left >= before && left < before + quads.of[w])
                        top = (1 << S::width_list::values[w]) - 1;
                }
                half[i] = 0.5f * static_cast<float>(top);
                middle[i] = half[i];
            } else {
                half[i] = 0.5f * static_cast<float>((1 << codec<S>.width()) - 1);
                middle[i] = half[i] - static_cast<float>(codec<S>.zero_code);
            }
        }
    }
    /// The largest estimate of the groups of a block, for row lane % 4 of four rows.
    __device__ __forceinline__ float estimate(const std::byte* block, const float* query, int rows) const {
        constexpr typename S::layout_type at{};
        using parameters = typename S::parameters;
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        const std::byte* const stored = block + at.scale_offset(shape);
        float best = -INFINITY;
#pragma unroll(groups <= 4 ? groups : 1)
        for (int g = 0; g < groups; ++g) {
            float sums[4] = {}, halves[4] = {};
#pragma unroll
            for (int i = 0; i < numbers; ++i) {
                const int c = i * warp_size + lane;
                if (c >= dim) break;
                const float scale = parameters::scale(stored, groups, at.slot_count(shape), g, c);
                float bias = 0.0f;
                if constexpr (S::levels::has_bias)
                    bias = parameters::bias(stored, groups, at.slot_count(shape), g, c);
                const float m = fmaf(scale, middle[i], bias), h = scale * half[i];
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const float q = r < rows ? query[r * dim + c] : 0.0f;
                    if constexpr (scales) {
                        sums[r] = fmaf(q, m, sums[r]);
                        halves[r] = fmaf(fabsf(q), h, halves[r]);
                    } else {
                        sums[r] = fmaf(q, m, fmaf(page_spread * fabsf(q), h, sums[r]));
                    }
                }
            }
            float x = sum_lanes(sums);
            if constexpr (scales) {
                const float h = sum_lanes(halves);
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
                x = fmaxf(least * x, most * x) + page_spread * fmaxf(-least, most) * h;
            }
            best = fmaxf(best, x);
        }
        return best;
    }
};

}  // namespace detail
}}}  // namespace kvq::cuda
