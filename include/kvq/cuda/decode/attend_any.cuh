// Attention over formats that the warp kernel does not take: any head_dim, page size, group size, 32-bit
// values.
//
// One thread block per query row; its warps take tokens in turn, lanes share the channels; values are read
// one number at a time (block_access.cuh) and the states of the warps are merged at the end. It is right and
// slow: use pages of 16 tokens or a multiple of 32, and head sizes that are multiples of 16, to get the other
// kernel.
// Contract: float arithmetic; error against double below 1e-5 of the largest output.
#pragma once

#include <cmath>

#include "../layout/block_access.cuh"
#include "../layout/transform_row.cuh"
#include "attention_args.cuh"
#include "score_modifiers.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

inline constexpr int any_threads = 256;

template <class Pair, class T, class Score>
__global__ void __launch_bounds__(any_threads)
    attend_any_kernel(const __grid_constant__ attention_args<Pair, T> a,
                      const __grid_constant__ Score modifier) {
    constexpr int dim = Pair::head_dim, value_dim = Pair::value_dim, warps = any_threads / warp_size;
    constexpr int per_lane = ceil_div(value_dim, warp_size);
    __shared__ float query[dim];
    __shared__ float output[value_dim];
    __shared__ float warp_max[warps], warp_sum[warps];
    const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size, lane = thread % warp_size;
    const int row = static_cast<int>(blockIdx.x) % a.rows, line = static_cast<int>(blockIdx.x) / a.rows;
    const int kv_head = line % a.cache.kv_heads, sequence = line / a.cache.kv_heads;
    const int token = a.row_token(sequence, row), head = a.row_head(kv_head, row);

    bool bad = false;
    for (int c = thread; c < dim; c += any_threads) {
        const float x = to_float(a.q.at(token, head)[c]) * a.scale;
        const bool finite = kvq::detail::is_finite(x);
        bad = bad || !finite;
        query[c] = finite ? x : 0.0f;
    }
    bad = __syncthreads_or(bad) != 0;
    // A transform of keys or values is applied by the first warp.
    if constexpr (has_transform<typename Pair::keys>) {
        if (warp == 0) {
            float x[token_numbers<dim>];
#pragma unroll
            for (int i = 0; i < token_numbers<dim>; ++i)
                x[i] = i * warp_size + lane < dim ? query[i * warp_size + lane] : 0.0f;
            transform_row<token_channels, dim>(x, transform_of<tensor::key>(a.cache), kv_head);
#pragma unroll
            for (int i = 0; i < token_numbers<dim>; ++i)
                if (i * warp_size + lane < dim) query[i * warp_size + lane] = x[i];
        }
        __syncthreads();
    }

    const int length = a.work.tokens[sequence];
    const bool of_tree = a.ancestors != nullptr;
    const std::uint64_t visible = of_tree ? a.ancestors[token] : ~std::uint64_t{0};
    const int first_seen =
        a.begin_at(of_tree ? a.text_place(length, visible) : a.row_place(length, row), 0, skipped_tokens{});
    const int begin = larger(0, first_seen), end = a.row_end(length, row);
    const int query_at = a.row_position(length, row) - a.cache.first_token;
    float max = -INFINITY, sum = 0.0f, part[per_lane] = {};
    for (int t = begin + warp; t < end; t += warps) {
        const int page = a.cache.block_table[a.cache.table_entry(sequence, t / Pair::page_tokens)];
        if (page < 0) continue;
        const int in_page = t % Pair::page_tokens;
        float score = 0.0f;
        for (int c = lane; c < dim; c += warp_size)
            score += query[c] * read_value<tensor::key>(a.cache, page, kv_head, in_page, c, sequence);
        for (int step = warp_size / 2; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
        if (a.softcap > 0.0f) score = capped(score, a.softcap);
        if constexpr (has_score<Score>) score = modified_score(a, modifier, score, head, query_at, t);
        if (of_tree && is_hidden(a, visible, t, 0, a.draft_begin(length), first_seen)) score = -INFINITY;
        if (score == -INFINITY) continue;
        const float next = fmaxf(max, score);
        const float keep = max == -INFINITY ? 0.0f : exp2f(max - next), weight = exp2f(score - next);
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            const int c = i * warp_size + lane;
            if (c < value_dim)
                part[i] =
                    part[i] * keep + weight * read_value<tensor::value>(a.cache, page, kv_head, in_page, c);
        }
        sum = sum * keep + weight;
        max = next;
    }
    if (lane == 0) {
        warp_max[warp] = max;
        warp_sum[warp] = sum;
    }
    for (int c = thread; c < value_dim; c += any_threads) output[c] = 0.0f;
    __syncthreads();
    float top = -INFINITY, total = 0.0f;
    for (int w = 0; w < warps; ++w) top = fmaxf(top, warp_max[w]);
    for (int w = 0; w < warps; ++w)
        if (warp_max[w] > -INFINITY) total += warp_sum[w] * exp2f(warp_max[w] - top);
    if (bad && top > -INFINITY) total = NAN;
    const float factor = max == -INFINITY ? 0.0f : exp2f(max - top);
    for (int w = 0; w < warps; ++w) {
        if (w == warp)
#pragma unroll
            for (int i = 0; i < per_lane; ++i)
                if (i * warp_size + lane < value_dim) output[i * warp_size + lane] += part[i] * factor;
        __syncthreads();
    }
    if constexpr (has_transform<typename Pair::values>) {
        if (warp == 0) {
#pragma unroll
            for (int i = 0; i < per_lane; ++i)
                part[i] = i * warp_size + lane < value_dim ? output[i * warp_size + lane] : 0.0f;
            restore_row<token_channels, value_dim, float>(part, transform_of<tensor::value>(a.cache),
                                                          kv_head);
#pragma unroll
            for (int i = 0; i < per_lane; ++i)
                if (i * warp_size + lane < value_dim) output[i * warp_size + lane] = part[i];
        }
        __syncthreads();
    }
    float of_sink = 1.0f;
    if constexpr (has_sinks<Score>) of_sink = add_sink(modifier.sink_logit(head), top, total);
    for (int c = thread; c < value_dim; c += any_threads) {
        float one[1] = {output[c] * of_sink};
        finish_channels(a, token, head, c, top, total, one);
    }
    __syncthreads();
    if (thread == 0) finish_header(a, token, head, top, total);
}

template <class Pair, class T, class Score>
status run_any(const attention_args<Pair, T>& a, const Score& score, cudaStream_t stream) noexcept {
    static_assert(!exchanges<Score>,
                  "kvq::cuda::attend: across_ranks is for pages that attend_warps.cuh takes");
    const int blocks = a.work.sequences * a.cache.kv_heads * a.rows;  // of query rows, see check_attention
    return launch("launching attention (any shape)", overlap::no, attend_any_kernel<Pair, T, Score>,
                  dim3(static_cast<unsigned>(blocks)), any_threads, 0, stream, a, score);
}

}}}  // namespace kvq::cuda::detail
