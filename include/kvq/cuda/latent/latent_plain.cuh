// Latent attention where tiles are not made: any number of channels and any page size, on every device.
//
// A thread block has 16 query rows, a warp two of them; lanes share the channels, and pages are read one
// number at a time. It is right and slow.
// Contract: float arithmetic. Pieces and states are those of latent_shares.cuh.
#pragma once

#include "latent_shares.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

inline constexpr int plain_latent_threads = 256, plain_latent_rows = 16;

/// One row over the tiles of a piece.
template <class Args>
struct plain_latent_row {
    static constexpr int dim = Args::first_pair::head_dim, value_dim = Args::first_pair::value_dim;
    static constexpr int per_lane = ceil_div(dim, 32), values_per_lane = ceil_div(value_dim, 32);
    float query[per_lane], output[values_per_lane] = {}, top = -INFINITY, sum = 0.0f;

    template <class T>
    __device__ __forceinline__ plain_latent_row(const T* q, float scale, int lane) {
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            const int c = i * 32 + lane;
            query[i] = c < dim ? to_float(q[c]) * scale : 0.0f;
        }
    }
    /// A token of a page.
    template <class Pair>
    __device__ __forceinline__ void add(const cache_ref<Pair>& cache, int page, int in_page, int lane,
                                        float softcap) {
        float score = 0.0f;
        for (int i = 0; i < per_lane; ++i)
            if (const int c = i * 32 + lane; c < dim)
                score += query[i] * read_value<tensor::key>(cache, page, 0, in_page, c);
        for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(0xffffffffu, score, step);
        if (softcap != 0.0f) score = capped(score, softcap);
        if (score == -INFINITY) return;
        const float next = fmaxf(top, score), keep = top == -INFINITY ? 0.0f : exp2f(top - next),
                    weight = exp2f(score - next);
        for (int i = 0; i < values_per_lane; ++i)
            if (const int c = i * 32 + lane; c < value_dim)
                output[i] = output[i] * keep + weight * read_value<tensor::key>(cache, page, 0, in_page, c);
        sum = sum * keep + weight;
        top = next;
    }
    /// Tokens [first, end) of a part, as far as this row of a piece sees them.
    template <class Part>
    __device__ __forceinline__ void tokens(const Args& args, const latent_piece& piece, const Part& part,
                                           int row, int first, int end, int lane) {
        const int sequence = piece.sequence;
        constexpr int page_tokens = Part::pair_type::page_tokens;
        const auto& cache = part.cache;
        const sequence_cut cut = cut_of(part.cuts, sequence);
#pragma unroll 1
        for (int token = first; token < end; ++token) {
            if ((args.seen_by(sequence, piece.length, row, cache.first_token + token) & 1u) == 0) continue;
            const int number = token / page_tokens, in_page = token - number * page_tokens;
            const int column = part.range == page_range::window ? number % cache.table_columns : number;
            const int page = cache.block_table[cache.table_entry(sequence, column)];
            const shown_tokens shown = shown_at(part.cuts, sequence, cut, cache.first_token + token, 1);
            if (page < 0 || shown.begin >= shown.end) continue;
            add(cache, page, in_page, lane, args.a.softcap);
        }
    }
    __device__ __forceinline__ void write(float* state, int lane) const {
        // A row of NaN has no maximum, but is not empty.
        if (lane == 0)
            *reinterpret_cast<float2*>(state) = {top == -INFINITY && sum != 0.0f ? 0.0f : top, sum};
        for (int i = 0; i < values_per_lane; ++i)
            if (const int c = i * 32 + lane; c < value_dim) state[state_header + c] = output[i];
    }
};

/// The tokens of a piece, as parts have them.
struct plain_part_tokens {
    template <class Args>
    __device__ __forceinline__ static void add(const Args& args, const latent_piece& piece, int row,
                                               plain_latent_row<Args>& state, int lane) {
        each_held(args, piece, [&](const auto& part, int first, int end) {
            state.tokens(args, piece, part, row, first, end, lane);
        });
    }
};

/// Tokens: which tokens a piece has.
template <class Args, class Tokens>
__global__ void __launch_bounds__(plain_latent_threads)
    latent_plain_kernel(const __grid_constant__ Args args) {
    const auto& a = args.a;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    launch_dependents();
    wait_for_predecessor();
    latent_walk<Args> walk(args, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    latent_piece piece;
    while (walk.next(piece)) {
        if (threadIdx.x == 0) note_bounds(args, piece);
#pragma unroll 1
        for (int own = warp; own < plain_latent_rows; own += plain_latent_threads / 32) {
            const int row = piece.row_block * plain_latent_rows + own;
            if (row >= a.rows) continue;
            plain_latent_row<Args> state(a.q.at(a.row_token(piece.sequence, row), a.row_head(0, row)),
                                         a.scale, lane);
            Tokens::add(args, piece, row, state, lane);
            state.write(args.state(piece.number, own), lane);
        }
    }
}

}}}  // namespace kvq::cuda::detail
