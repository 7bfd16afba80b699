// Scores of an index cache: how much a query wants to read each token.
//
//   score[t] = k_scale[t] * sum_h w_h q_scale_h max(0, sum_c q_hc k_tc)        h: heads of the indexer
//
// Keys are the 8-bit codes of their pages; every head of a query is rounded to 8 bits, its largest number to
// 127. Products are those of tensor cores (m16n8k32), and exact. A warp has two tiles on their way to shared
// memory while it multiplies a third one: registers that wait for memory would be those of the products. A
// lane reads 16 bytes: four words of channels of four neighbouring tokens, which are rows of two products.
// Queries are in shared memory in the order of lanes. Keys of 16 bits (sinks and window of a cache) are
// multiplied with the queries as they are (m16n8k16), in float sums.
// Of 131072 tokens and 64 heads: 17.3 MB, and 1.07 * 10^9 multiply-adds.
// Contract: the same bits on every device and in every batch. A number of a query that is not finite makes
// all scores of its row NaN.
// Source: the lightning indexer of DeepSeek V3.2.
#pragma once

#include "../layout/held_tokens.cuh"
#include "../store/store_token.cuh"
#include "index_pages.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

inline constexpr int index_tile = 32, index_warps = 4, index_heads = 64,
                     index_blocks = 4;  // of a multiprocessor

/// Kernel arguments. First: the pair of the first part.
template <class First, class T, class... Parts>
struct index_args {
    static constexpr int channels = First::head_dim;
    static constexpr bool mixed = sizeof...(Parts) > 1;
    object_list<Parts...> parts;
    int recent;
    const int* tokens;  // [sequences]: paged lengths
    int sequences;
    token_view<const T> q;  // [rows][heads][channels]
    const float* weights;   // [rows][heads]
    int query_tokens, behind;
    int room;
    float* scores;  // [rows][room]

    /// Of all parts.
    __device__ __forceinline__ int tiles(int sequence) const {
        const int length = __ldg(tokens + sequence);
        int n = 0;
        each_part(*this, [&](const auto& part) {
            n += held_tokens(part, sequence, length, recent).tiles(index_tile);
        });
        return n;
    }
};

/// Queries of a row, as lanes multiply them: of head 8 n + g and words 16 p + {0, 4, 8, 12} + t lane 4 g + t
/// has word n * pairs + p.
template <int Channels>
struct index_queries {
    static constexpr int pairs = Channels / 64, blocks = index_heads / 8;
    uint4 words[blocks * pairs][warp_size];
    float weights[index_heads];  // times the scales of the codes
    float own_weights[index_heads];

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
            if (t == 0) {
                const float own = !there ? 0.0f
                                  : finite
                                      ? w[static_cast<std::size_t>(row) * static_cast<std::size_t>(q.heads) +
                                          static_cast<std::size_t>(head)]
                                      : NAN;
                own_weights[8 * n + g] = own;
                weights[8 * n + g] = own * (there && finite ? top / 127.0f : 1.0f);
            }
        }
    }
};

/// Codes of 32 tokens, and a scale of each. Lines of words have their 16 bytes in another order, so that 8
/// lanes, which read two of them in four lines, meet all banks.
template <int Channels>
struct index_stage {
    uint4 words[Channels / 4 * (index_tile / 4)];
    float scales[index_tile];

    __device__ __forceinline__ static int place(int line, int quad) {
        return line * (index_tile / 4) + (quad ^ line % 4 * 2);
    }
};
/// Shared memory of a thread block: queries, and the tiles of a warp that are on their way.
template <int Channels>
struct index_memory : index_queries<Channels> {
    static constexpr int stages = 2;
    index_stage<Channels> ring[index_warps][stages];
};

/// Tiles of a row of scores by a thread block.
template <class Args>
struct index_scorer {
    static constexpr int channels = Args::channels, columns = channels / 16;  // words of a lane
    using queries = index_queries<channels>;
    using memory_type = index_memory<channels>;
    using stage = index_stage<channels>;
    const Args& args;
    memory_type& memory;
    int warp, lane;

    struct tile {
        uint4 words[columns];  // of word 4 j + t of tokens 4 g to 4 g + 3
        float scale;           // of token `lane`
    };
    /// Tokens of a part, which counts them from its first one.
    struct run {
        int sequence, first, stop;  // of tile 0; behind the last token that is held and seen
        int cut_end;                // pages before it may be cut
        float* scores;              // of its token 0, without cuts
        bool more;                  // heads have been added already
    };
    __device__ __forceinline__ float* row_scores(int row) const {
        return args.scores + static_cast<std::size_t>(row) * static_cast<std::size_t>(args.room);
    }
    /// Positions before it are seen.
    __device__ __forceinline__ int seen(int length, const sequence_cut& cut, int query) const {
        return kvq::detail::smaller(args.room,
                                    length - cut.skipped - args.behind - args.query_tokens + query + 1);
    }
    template <class Part>
    __device__ __forceinline__ run run_of(const Part& part, int sequence, int query, int row, int length,
                                          const token_range& held, bool more) const {
        const sequence_cut cut = cut_of(part.cuts, sequence);
        const int position = part.cache.first_token - cut.skipped;  // of token 0, without cuts
        return {sequence,
                held.first,
                kvq::detail::smaller(held.end, seen(length, cut, query) - position),
                cut.end - part.cache.first_token,
                row_scores(row) + position,
                more};
    }
    /// The score of the token of this lane. Cut: may its page be cut?
    template <bool Cut, class Part>
    __device__ __forceinline__ void put(const Part& part, const run& of, int row, int token,
                                        float score) const {
        float* to = of.scores + token;
        bool seen_by = token < of.stop;
        if (Cut && token - lane < of.cut_end) {
            const sequence_cut cut = cut_of(part.cuts, of.sequence);
            const int paged = part.cache.first_token + token;
            const shown_tokens shown = shown_at(part.cuts, of.sequence, cut, paged - lane, index_tile);
            const int position = paged - cut.skipped + shown.shift, length = __ldg(args.tokens + of.sequence);
            seen_by = lane >= shown.begin && lane < shown.end &&
                      position < seen(length, cut, row - of.sequence * args.query_tokens);
            to = row_scores(row) + position;
        }
        if (!seen_by) return;
        if (of.more) score += *to;
        *to = score;
    }
    template <class Part>
    __device__ __forceinline__ int page_of(const Part& part, int sequence, int token) const {
        const int number = token / Part::pair_type::page_tokens,
                  column = part.range == page_range::window ? number % part.cache.table_columns : number;
        return __ldg(part.cache.block_table + part.cache.table_entry(sequence, column));
    }
    /// Asks for a tile.
    template <class Pair>
    __device__ __forceinline__ void fetch(stage& to, const cache_ref<Pair>& cache, int page,
                                          int token) const {
        if (page >= 0) {
            const std::byte* const block = cache.key_block(page, 0);
            const int first = token % Pair::page_tokens;
            const std::byte* const words = block + first * channels + lane * 16;
            const std::uint32_t at = shared_address(to.words + stage::place(lane / 8, lane % 8));
#pragma unroll
            for (int j = 0; j < columns; ++j)
                copy_async(at + static_cast<std::uint32_t>(j * 512), words + j * 512);
            if (lane < index_tile / 4)
                copy_async(shared_address(to.scales + lane * 4),
                           block + Pair::scale_offset + (first + lane * 4) * 4);
        }
        copy_commit();
    }
    /// What lanes multiply of a tile. Codes are 128 above their numbers.
    __device__ __forceinline__ tile take(const stage& from) const {
        tile x;
#pragma unroll
        for (int j = 0; j < columns; ++j) {
            const uint4 v = from.words[stage::place(4 * j + lane % 4, lane / 4)];
            x.words[j] = {v.x ^ 0x80808080u, v.y ^ 0x80808080u, v.z ^ 0x80808080u, v.w ^ 0x80808080u};
        }
        x.scale = from.scales[lane];
        return x;
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
        return own_sum(sums) * x.scale;
    }
    /// Of four lanes with sums of four tokens each gets one.
    __device__ __forceinline__ float own_sum(const float (&sums)[4]) const {
        const int t = lane % 4;
        const bool upper = t >= 2, odd = t % 2 != 0;
        const float kept0 = upper ? sums[2] : sums[0], kept1 = upper ? sums[3] : sums[1];
        const float sum0 = kept0 + __shfl_xor_sync(0xffffffffu, upper ? sums[0] : sums[2], 2),
                    sum1 = kept1 + __shfl_xor_sync(0xffffffffu, upper ? sums[1] : sums[3], 2);
        return (odd ? sum1 : sum0) + __shfl_xor_sync(0xffffffffu, odd ? sum0 : sum1, 1);
    }
    /// Tiles [from, to) of codes, for heads from `first` on. All threads.
    template <bool Cut, class Part>
    __device__ __forceinline__ void code_tiles(const Part& part, const run& of, int from, int to, int row,
                                               int first) {
        using pair = typename Part::pair_type;
        const auto page_at = [&](int number) {
            return number < to ? __ldg(part.cache.block_table +
                                       part.cache.table_entry(
                                           of.sequence, (of.first + number * index_tile) / pair::page_tokens))
                               : -1;
        };
        constexpr int stages = memory_type::stages;
        int number = from + warp, pages[stages + 1];
#pragma unroll
        for (int i = 0; i <= stages; ++i) pages[i] = page_at(number + i * index_warps);
#pragma unroll
        for (int i = 0; i < stages; ++i)
            fetch(memory.ring[warp][i], part.cache, pages[i],
                  of.first + (number + i * index_warps) * index_tile);
        load(row, first);
        int at = 0;
#pragma unroll 1
        for (; number < to; number += index_warps) {
            stage& own = memory.ring[warp][at];
            at = at + 1 < stages ? at + 1 : 0;
            copy_wait<stages - 1>();
            __syncwarp();
            const tile now = take(own);
            __syncwarp();
            const int page = pages[0];
#pragma unroll
            for (int i = 0; i < stages; ++i) pages[i] = pages[i + 1];
            pages[stages] = page_at(number + (stages + 1) * index_warps);
            fetch(own, part.cache, pages[stages - 1],
                  of.first + (number + stages * index_warps) * index_tile);
            const float sum = score(now, args.q.heads - first);
            // A missing page of several parts is in another one.
            if (!Args::mixed || page >= 0)
                put<Cut>(part, of, row, of.first + number * index_tile + lane, page < 0 ? -INFINITY : sum);
        }
        copy_wait<0>();
    }
    /// Pages that are cut are rare: a call keeps registers for others. There are none of an index alone.
    template <class Part>
    __device__ __noinline__ void cut_tiles(const Part& part, const run& of, int from, int to, int row,
                                           int first) {
        code_tiles<true>(part, of, from, to, row, first);
    }
    /// Tiles [from, to) of 16-bit keys, which are few: a call keeps its registers from others. Rows i and
    /// i + 8 of a product are tokens 4 i and 4 i + 1, then 4 i + 2 and 4 i + 3, so that lanes get the sums
    /// that they get of codes.
    template <class Part, class T>
    __device__ __noinline__ void value_tiles(const Part& part, const run& of, int from, int to, int row,
                                             const token_view<const T>& q, int first_head) const {
        using pair = typename Part::pair_type;
        static_assert(std::is_same_v<typename pair::keys::value_type, T>,
                      "kvq::cuda::index_scores: queries have the type of 16-bit keys");
        constexpr int page_tokens = pair::page_tokens, height = kvq::detail::smaller(32, page_tokens),
                      row_words = channels / 2;
        const int g = lane / 4, t = lane % 4, heads = q.heads - first_head;
#pragma unroll 1
        for (int number = from + warp; number < to; number += index_warps) {
            const int token = of.first + number * index_tile + lane,
                      page = token < of.stop ? page_of(part, of.sequence, token) : -1,
                      in_page = token % page_tokens;
            const auto at = reinterpret_cast<std::uintptr_t>(
                page < 0
                    ? nullptr
                    : part.cache.key_block(page, 0) + 4 * ((in_page & ~31) * row_words + in_page % height));
            float sums[4] = {};
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                const auto row_of = [&](int i) {
                    return reinterpret_cast<const std::uint32_t*>(
                        __shfl_sync(0xffffffffu, at, 4 * g + 2 * half + i));
                };
                const std::uint32_t* const keys[2] = {row_of(0), row_of(1)};
                std::uint32_t a[2][channels / 8];
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int k = 0; k < channels / 8; ++k)
                        a[i][k] = keys[i] == nullptr ? 0u : fetch_word(keys[i] + (4 * k + t) * height);
                float own[2] = {};
#pragma unroll 1
                for (int n = 0; n < queries::blocks && 8 * n < heads; ++n) {
                    const bool there = 8 * n + g < heads;
                    const auto* const from_q = reinterpret_cast<const std::uint32_t*>(
                        q.at(row, first_head + (there ? 8 * n + g : 0)));
                    float d[4] = {};
#pragma unroll
                    for (int k = 0; k < channels / 16; ++k)
                        mma_values<T>(d, a[0][2 * k], a[1][2 * k], a[0][2 * k + 1], a[1][2 * k + 1],
                                      from_q[8 * k + t], from_q[8 * k + 4 + t]);
                    const float2 w = *reinterpret_cast<const float2*>(memory.own_weights + 8 * n + 2 * t);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        // NaN of keys stays.
                        own[i] = fmaf(w.x, d[2 * i] < 0.0f ? 0.0f : d[2 * i], own[i]);
                        own[i] = fmaf(w.y, d[2 * i + 1] < 0.0f ? 0.0f : d[2 * i + 1], own[i]);
                    }
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (half == 0)
                        sums[i] = own[i];
                    else
                        sums[2 + i] = own[i];
                }
            }
            const float own = own_sum(sums);
            if (page >= 0) put<true>(part, of, row, token, own);
        }
    }
    /// The heads of a row from `first` on. All threads.
    __device__ __forceinline__ void load(int row, int first) {
        __syncthreads();
        memory.load(args.q, args.weights, row, first, warp, lane);
        __syncthreads();
    }
    /// Tiles [from, to) of a row. All threads.
    __device__ __forceinline__ void piece(int sequence, int query, int from, int to) {
        const int row = sequence * args.query_tokens + query, length = __ldg(args.tokens + sequence);
        int before = 0;
        each_part(args, [&](const auto& part) {
            using part_type = std::remove_cvref_t<decltype(part)>;
            const token_range held = held_tokens(part, sequence, length, args.recent);
            const int count = held.tiles(index_tile), begin = kvq::detail::larger(from - before, 0),
                      end = kvq::detail::smaller(to - before, count);
            before += count;
            if (begin >= end) return;
#pragma unroll 1
            for (int first = 0; first < args.q.heads; first += index_heads) {
                const run of = run_of(part, sequence, query, row, length, held, first > 0);
                if constexpr (full_precision<typename part_type::pair_type::keys>) {
                    load(row, first);
                    value_tiles(part, of, begin, end, row, args.q, first);
                } else {
                    if constexpr (Args::mixed)
                        if (of.first + begin * index_tile < of.cut_end) {
                            cut_tiles(part, of, begin, end, row, first);
                            continue;
                        }
                    code_tiles<false>(part, of, begin, end, row, first);
                }
            }
        });
    }
};

/// Thread block i of n has tiles [T i / n, T (i + 1) / n) of the line of all rows' tiles.
template <class Args>
__global__ void __launch_bounds__(index_warps* warp_size, index_blocks)
    index_scores_kernel(const __grid_constant__ Args args) {
    __shared__ index_memory<Args::channels> memory;
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    launch_dependents();
    wait_for_predecessor();
    const int sequences = args.sequences;
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
    index_scorer<Args> scorer{args, memory, warp, lane};
#pragma unroll 1
    for (; left > 0; ++sequence) {
        const int size = args.tiles(sequence);
#pragma unroll 1
        for (; at < size * args.query_tokens && left > 0;) {
            const int query = at / size, from = at - query * size,
                      count = kvq::detail::smaller(left, size - from);
            scorer.piece(sequence, query, from, from + count);
            at += count;
            left -= count;
        }
        at = 0;
    }
}

/// Channels and page sizes of a mix of an index and of its 16-bit keys.
template <class First, class... Others>
inline constexpr bool same_index = is_latent_pair<First> &&
                                   ((is_latent_pair<Others> && First::head_dim == Others::head_dim) && ...);

}  // namespace detail

/// Which queries are scored, and where.
struct score_options {
    int query_tokens = 1;  ///< per sequence: query i of them sees the tokens up to its own
    int behind = 0;        ///< so many tokens of every sequence stand behind its last query
    int room = 0;          ///< scores of a row: tokens from this position on have none
};

/// Scores of the last query_tokens tokens of every sequence. Parts: of index_pair, and of 16-bit pages of its
/// keys. q: [sequences * query_tokens][heads][channels]; weights: [sequences * query_tokens][heads]; scores:
/// [sequences * query_tokens][room], by position of the sequence; those of seen tokens are written.
/// All in device memory. Lengths and tables are read on the device.
template <class T, class... Parts>
status index_scores(const mixed_cache_ref<Parts...>& index, const token_view<const T>& q,
                    const float* weights, const score_options& options, float* scores,
                    cudaStream_t stream) noexcept {
    static_assert(float_format<T>, "kvq::cuda::index_scores: q must be float16, bfloat16 or float");
    static_assert(detail::same_index<typename Parts::pair_type...>,
                  "kvq::cuda::index_scores: parts are of index_pair, or of its keys in 16 bit");
    using first_pair = typename std::tuple_element_t<0, std::tuple<Parts...>>::pair_type;
    using args_type = detail::index_args<first_pair, T, cache_part<typename Parts::pair_type>...>;
    if (status s = detail::check_mix(index); !s) return s;
    const cache_ref<first_pair>& first = get<0>(index.parts).cache;
    if (options.query_tokens < 1 || q.tokens != first.sequences * options.query_tokens || q.heads < 1 ||
        q.dim != first_pair::head_dim || options.behind < 0 || options.room < 0)
        return detail::bad_value(
            "q is %d x %d x %d, the index has %d sequences of %d query tokens and %d channels", q.tokens,
            q.heads, q.dim, first.sequences, options.query_tokens, first_pair::head_dim);
    if (q.tokens == 0) return {};
    if (q.data == nullptr || weights == nullptr || scores == nullptr)
        return detail::bad_value("q, weights or scores is a null pointer");
    if (sizeof...(Parts) > 1 &&
        (reinterpret_cast<std::uintptr_t>(q.data) % 4 != 0 || (q.token_stride | q.head_stride) % 2 != 0))
        return detail::bad_value("queries of an index begin on 4 bytes, an even number of channels apart");
    int device = 0, processors = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (code != cudaSuccess) return detail::runtime_error(code, "asking how many multiprocessors there are");
    args_type args{{},      index.recent,         first.tokens,   first.sequences, q,
                   weights, options.query_tokens, options.behind, options.room,    scores};
    [&]<int... Is>(std::integer_sequence<int, Is...>) {
        ((detail::get<Is>(args.parts) = detail::get<Is>(index.parts)), ...);
    }
    (std::make_integer_sequence<int, sizeof...(Parts)>{});
    return detail::launch("launching the scores of an index", detail::overlap::yes,
                          detail::index_scores_kernel<args_type>,
                          dim3(static_cast<unsigned>(detail::index_blocks * processors)),
                          detail::index_warps * detail::warp_size, 0, stream, args);
}
/// Of an index alone, room for table_columns * page_tokens scores. Those of missing pages are -infinity.
template <class Pair, class T>
status index_scores(const cache_ref<Pair>& index, const token_view<const T>& q, const float* weights,
                    int query_tokens, float* scores, cudaStream_t stream) noexcept {
    return index_scores<T>(make_mixed(0, index), q, weights,
                           {query_tokens, 0, index.table_columns * Pair::page_tokens}, scores, stream);
}

}}}  // namespace kvq::cuda
