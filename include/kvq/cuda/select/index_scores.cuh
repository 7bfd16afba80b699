// Scores of an index cache: how much a query wants to read each token.
//
//   score[t] = k_scale[t] * sum_h w_h q_scale_h max(0, sum_c q_hc k_tc)        h: heads of the indexer
//
// Keys are the 8-bit codes of their pages; every head of a query is rounded to 8 bits, its largest number to
// 127. Products are those of tensor cores (m16n8k32), and exact. A lane loads 16 bytes of a page: four words
// of channels of four neighbouring tokens, which are rows of two products, so that codes go from memory
// to registers as they lie there. Queries are in shared memory in the order of lanes.
// Of 131072 tokens and 64 heads: 17.3 MB, and 1.07 * 10^9 multiply-adds.
// Contract: the same bits on every device and in every batch. A number of a query that is not finite makes
// all scores of its row NaN.
// Source: the lightning indexer of DeepSeek V3.2.
#pragma once

#include "index_pages.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

inline constexpr int index_tile = 32, index_warps = 4, index_heads = 64;

template <class Pair, class T>
struct index_args {
    cache_ref<Pair> index;
    token_view<const T> q;  // [rows][heads][channels]
    const float* weights;   // [rows][heads]
    int query_tokens;
    float* scores;  // [rows][table_columns * page_tokens]

    /// Of the tokens that the table has columns for.
    __device__ __forceinline__ int tiles(int sequence) const {
        const int tokens =
            kvq::detail::smaller(__ldg(index.tokens + sequence), index.table_columns * Pair::page_tokens);
        return kvq::detail::larger(0, ceil_div(tokens, index_tile));
    }
};

/// Queries of a row, as lanes multiply them: of head 8 n + g and words 16 p + {0, 4, 8, 12} + t lane 4 g + t
/// has word n * pairs + p.
template <int Channels>
struct index_queries {
    static constexpr int pairs = Channels / 64, blocks = index_heads / 8;
    uint4 words[blocks * pairs][warp_size];
    float weights[index_heads];

    template <class T>
    __device__ __forceinline__ void load(const token_view<const T>& q, const float* w, int row, int first,
                                         int warp, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll 1
        for (int n = warp; n < blocks; n += index_warps) {
            const int head = first + 8 * n + g;
            const bool there = head < q.heads;
            const T* const from = q.at(row, there ? head : 0);
            float x[pairs * 4][4], top = 0.0f;
            bool finite = true;
#pragma unroll
            for (int i = 0; i < pairs * 4; ++i)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const float number = there ? to_float(from[4 * (4 * i + t) + c]) : 0.0f;
                    finite = finite && kvq::detail::is_finite(number);
                    x[i][c] = number;
                    top = fmaxf(top, fabsf(number));
                }
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            finite = (__ballot_sync(0xffffffffu, finite) >> (4 * g) & 15u) == 15u;
            const float inverse = top > 0.0f && finite ? 127.0f / top : 0.0f;
            std::uint32_t packed[pairs * 4];
#pragma unroll
            for (int i = 0; i < pairs * 4; ++i) {
                packed[i] = 0;
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    // The last byte of x + 1.5 * 2^23 is that of the nearest integer.
                    const float code = fminf(fmaxf(x[i][c] * inverse, -127.0f), 127.0f) + 12582912.0f;
                    packed[i] |= (__float_as_uint(code) & 0xffu) << 8 * c;
                }
            }
#pragma unroll
            for (int p = 0; p < pairs; ++p)
                words[n * pairs + p][lane] = {packed[4 * p], packed[4 * p + 1], packed[4 * p + 2],
                                              packed[4 * p + 3]};
            if (t == 0)
                weights[8 * n + g] =
                    !there   ? 0.0f
                    : finite ? w[static_cast<std::size_t>(row) * static_cast<std::size_t>(q.heads) +
                                 static_cast<std::size_t>(head)] *
                                   (top / 127.0f)
                             : NAN;
        }
    }
};

/// Tiles of a row of scores by a thread block.
template <class Pair, class T>
struct index_scorer {
    static constexpr int channels = Pair::head_dim, page_tokens = Pair::page_tokens,
                         columns = channels / 16;  // words of a lane
    using queries = index_queries<channels>;
    const index_args<Pair, T>& args;
    queries& memory;
    int warp, lane;

    struct tile {
        uint4 words[columns];  // of word 4 j + t of tokens 4 g to 4 g + 3
        float scale;           // of token `lane`
    };
    __device__ __forceinline__ int page_at(int sequence, int number, int end) const {
        if (number >= end) return -1;
        return __ldg(args.index.block_table +
                     args.index.table_entry(sequence, number * index_tile / page_tokens));
    }
    __device__ __forceinline__ void fetch(tile& x, int page, int number) const {
        if (page < 0) return;
        const std::byte* const block = args.index.key_block(page, 0);
        const int first = number * index_tile % page_tokens;
        const auto* const words = reinterpret_cast<const uint4*>(block + first * channels);
#pragma unroll
        for (int j = 0; j < columns; ++j)
            x.words[j] = fetch_16(words + (4 * j + lane % 4) * (index_tile / 4) + lane / 4);
        x.scale = __uint_as_float(
            fetch_word(reinterpret_cast<const std::uint32_t*>(block + Pair::scale_offset) + first + lane));
    }
    /// The score of token `lane`.
    __device__ __forceinline__ float score(const tile& x, int heads) const {
        const int t = lane % 4;
        // Integers as floats: bits of 1.5 * 2^23 + n are those of 1.5 * 2^23 and n added up.
        constexpr int zero_bits = 0x4b400000;
        constexpr float zero = 12582912.0f;
        float sums[4] = {};
#pragma unroll
        for (int n = 0; n < queries::blocks; ++n) {
            if (8 * n >= heads) break;
            int d[2][4];
#pragma unroll
            for (int i = 0; i < 8; ++i) d[i / 4][i % 4] = zero_bits;
#pragma unroll
            for (int p = 0; p < queries::pairs; ++p) {
                const uint4 b = memory.words[n * queries::pairs + p][lane];
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const uint4 &low = x.words[4 * p + 2 * s], &high = x.words[4 * p + 2 * s + 1];
                    const std::uint32_t b0 = s == 0 ? b.x : b.z, b1 = s == 0 ? b.y : b.w;
                    mma_signed(d[0], low.x, low.y, high.x, high.y, b0, b1);
                    mma_signed(d[1], low.z, low.w, high.z, high.w, b0, b1);
                }
            }
            const float2 w = *reinterpret_cast<const float2*>(memory.weights + 8 * n + 2 * t);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums[i] = fmaf(w.x, fmaxf(__int_as_float(d[i / 2][i % 2 * 2]) - zero, 0.0f), sums[i]);
                sums[i] = fmaf(w.y, fmaxf(__int_as_float(d[i / 2][i % 2 * 2 + 1]) - zero, 0.0f), sums[i]);
            }
        }
        // Of four lanes with sums of four tokens each gets one.
        const bool upper = t >= 2, odd = t % 2 != 0;
        const float kept0 = upper ? sums[2] : sums[0], kept1 = upper ? sums[3] : sums[1];
        const float sum0 = kept0 + __shfl_xor_sync(0xffffffffu, upper ? sums[0] : sums[2], 2),
                    sum1 = kept1 + __shfl_xor_sync(0xffffffffu, upper ? sums[1] : sums[3], 2);
        return ((odd ? sum1 : sum0) + __shfl_xor_sync(0xffffffffu, odd ? sum0 : sum1, 1)) * x.scale;
    }
    /// Tiles [from, to) of a row, which sees tokens before `end`. All threads.
    __device__ __forceinline__ void piece(int row, int sequence, int from, int to, int end) {
        const std::size_t room = static_cast<std::size_t>(args.index.table_columns) * page_tokens;
        float* const scores = args.scores + static_cast<std::size_t>(row) * room;
#pragma unroll 1
        for (int first = 0; first < args.q.heads; first += index_heads) {
            int number = from + warp, page = page_at(sequence, number, to),
                next_page = page_at(sequence, number + index_warps, to);
            tile now{}, next{};
            fetch(now, page, number);
            __syncthreads();
            memory.load(args.q, args.weights, row, first, warp, lane);
            __syncthreads();
#pragma unroll 1
            for (; number < to; number += index_warps) {
                fetch(next, next_page, number + index_warps);
                const int after = page_at(sequence, number + 2 * index_warps, to);
                // Codes are 128 above their numbers.
#pragma unroll
                for (int j = 0; j < columns; ++j)
                    now.words[j] = {now.words[j].x ^ 0x80808080u, now.words[j].y ^ 0x80808080u,
                                    now.words[j].z ^ 0x80808080u, now.words[j].w ^ 0x80808080u};
                float own = score(now, args.q.heads - first);
                const int position = number * index_tile + lane;
                if (position < end) {
                    if (first > 0) own += scores[position];
                    scores[position] = page < 0 ? -INFINITY : own;
                }
                now = next;
                page = next_page;
                next_page = after;
            }
        }
    }
};

/// Thread block i of n has tiles [T i / n, T (i + 1) / n) of the line of all rows' tiles.
template <class Pair, class T>
__global__ void __launch_bounds__(index_warps* warp_size, 4)
    index_scores_kernel(const __grid_constant__ index_args<Pair, T> args) {
    __shared__ index_queries<Pair::head_dim> memory;
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    launch_dependents();
    wait_for_predecessor();
    const int sequences = args.index.sequences;
    long long all = 0;
#pragma unroll 1
    for (int b = lane; b < sequences; b += warp_size) all += args.tiles(b);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) all += __shfl_xor_sync(0xffffffffu, all, step);
    all *= args.query_tokens;
    const long long begin = all * blockIdx.x / gridDim.x;
    int left = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x - begin);
    // The sequence with the first tile.
    int sequence = 0, at = 0;
    long long before = 0;
#pragma unroll 1
    for (int first = 0; left > 0 && first < sequences; first += warp_size) {
        const int b = first + lane;
        const long long own = b < sequences ? 1LL * args.tiles(b) * args.query_tokens : 0;
        long long end = own;
#pragma unroll
        for (int step = 1; step < warp_size; step *= 2) {
            const long long lower = __shfl_up_sync(0xffffffffu, end, static_cast<unsigned>(step));
            if (lane >= step) end += lower;
        }
        const unsigned behind = __ballot_sync(0xffffffffu, before + end > begin);
        if (behind != 0) {
            const int found = __ffs(static_cast<int>(behind)) - 1;
            sequence = first + found;
            at = static_cast<int>(begin - before - __shfl_sync(0xffffffffu, end - own, found));
            break;
        }
        before += __shfl_sync(0xffffffffu, end, warp_size - 1);
    }
    index_scorer<Pair, T> scorer{args, memory, warp, lane};
#pragma unroll 1
    for (; left > 0; ++sequence) {
        const int size = args.tiles(sequence), length = __ldg(args.index.tokens + sequence);
#pragma unroll 1
        for (; at < size * args.query_tokens && left > 0;) {
            const int query = at / size, from = at - query * size,
                      count = kvq::detail::smaller(left, size - from);
            scorer.piece(sequence * args.query_tokens + query, sequence, from, from + count,
                         length - args.query_tokens + query + 1);
            at += count;
            left -= count;
        }
        at = 0;
    }
}

}  // namespace detail

/// Scores of the last query_tokens tokens of every sequence: query i of them sees the tokens up to its own.
/// q: [sequences * query_tokens][heads][channels]; weights: [sequences * query_tokens][heads]; scores:
/// [sequences * query_tokens][table_columns * page_tokens], of which those of seen tokens are written, of
/// missing pages -infinity. All in device memory. Lengths and tables are read on the device.
template <class Pair, class T>
status index_scores(const cache_ref<Pair>& index, const token_view<const T>& q, const float* weights,
                    int query_tokens, float* scores, cudaStream_t stream) noexcept {
    static_assert(float_format<T>, "kvq::cuda::index_scores: q must be float16, bfloat16 or float");
    if (status s = detail::check_index(index, true); !s) return s;
    if (query_tokens < 1 || q.tokens != index.sequences * query_tokens || q.heads < 1 ||
        q.dim != Pair::head_dim)
        return detail::bad_value(
            "q is %d x %d x %d, the index has %d sequences of %d query tokens and %d channels", q.tokens,
            q.heads, q.dim, index.sequences, query_tokens, Pair::head_dim);
    if (q.tokens == 0) return {};
    if (q.data == nullptr || weights == nullptr || scores == nullptr)
        return detail::bad_value("q, weights or scores is a null pointer");
    int device = 0, processors = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (code != cudaSuccess) return detail::runtime_error(code, "asking how many multiprocessors there are");
    return detail::launch("launching the scores of an index", detail::overlap::yes,
                          detail::index_scores_kernel<Pair, T>, dim3(static_cast<unsigned>(4 * processors)),
                          detail::index_warps * detail::warp_size, 0, stream,
                          detail::index_args<Pair, T>{index, q, weights, query_tokens, scores});
}

}}}  // namespace kvq::cuda
