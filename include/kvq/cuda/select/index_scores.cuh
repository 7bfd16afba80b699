// Scores of an index cache: how much a query wants to read each token.
//
//   score[t] = k_scale[t] * sum_h w_h q_scale_h max(0, sum_c q_hc k_tc)        h: heads of the indexer
//
// Keys are the 8-bit codes of their pages, multiplied as index_tiles.cuh says. A warp has two tiles on their
// way to shared memory while it multiplies a third one: registers that wait for memory would be those of the
// products. Keys of 16 bits (sinks and window of a cache) are multiplied with the queries as they are
// (m16n8k16), in float sums.
// Of 131072 tokens and 64 heads: 17.3 MB, and 1.07 * 10^9 multiply-adds.
// Contract: as index_tiles.cuh says.
// Source: the lightning indexer of DeepSeek V3.2.
#pragma once

#include "../layout/held_tokens.cuh"
#include "../store/store_token.cuh"
#include "index_tiles.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// Kernel arguments. First: the pair of the first part.
template <class First, class T, class... Parts>
struct index_args {
    static constexpr int channels = First::head_dim;
    using scheme = std::conditional_t<full_precision<typename First::keys>, int8, typename First::keys>;
    static constexpr bool mixed = sizeof...(Parts) > 1;
    static constexpr int blocks = float_row_scheme<scheme> ? 3 : 4;  // of a multiprocessor
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

/// Tiles of a row of scores by a thread block.
template <class Args>
struct index_scorer {
    static constexpr int channels = Args::channels, columns = channels / 16;
    template <class Scheme>
    using memory_of = index_memory<Scheme, channels>;
    const Args& args;
    std::byte* shared;  // memory of the scheme at hand
    int warp, lane;

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
    __device__ __forceinline__ void fetch(index_stage<typename Pair::keys, channels>& to,
                                          const cache_ref<Pair>& cache, int page, int token) const {
        if (page >= 0) {
            const std::byte* const block = cache.key_block(page, 0);
            const int first = token % Pair::page_tokens;
            const std::byte* const words = block + first * channels + lane * 16;
#pragma unroll
            for (int j = 0; j < columns; ++j)
                copy_async(shared_address(to.words + to.copied(j, lane)), words + j * 512);
            if (lane < index_tile / 4)
                copy_async(shared_address(to.scales + lane * 4),
                           block + Pair::scale_offset + (first + lane * 4) * 4);
        }
        copy_commit();
    }
    /// The score of token `lane`.
    template <class Scheme>
    __device__ __forceinline__ float score(const index_keys<Scheme, channels>& keys,
                                           const memory_of<Scheme>& memory, int heads) const {
        float sums[4] = {};
        keys.add_heads(sums, memory, heads, lane);
        return own_sum(sums, lane) * keys.scale;
    }
    /// Tiles [from, to) of codes, for heads from `first` on. All threads.
    template <bool Cut, class Part>
    __device__ __forceinline__ void code_tiles(const Part& part, const run& of, int from, int to, int row,
                                               int first) {
        using pair = typename Part::pair_type;
        using scheme = typename pair::keys;
        auto& memory = *reinterpret_cast<memory_of<scheme>*>(shared);
        const auto page_at = [&](int number) {
            return number < to ? __ldg(part.cache.block_table +
                                       part.cache.table_entry(
                                           of.sequence, (of.first + number * index_tile) / pair::page_tokens))
                               : -1;
        };
        constexpr int stages = memory_of<scheme>::stages;
        int number = from + warp, pages[stages + 1];
#pragma unroll
        for (int i = 0; i <= stages; ++i) pages[i] = page_at(number + i * index_warps);
#pragma unroll
        for (int i = 0; i < stages; ++i)
            fetch(memory.ring[warp][i], part.cache, pages[i],
                  of.first + (number + i * index_warps) * index_tile);
        load<scheme>(row, first);
        int at = 0;
        // As often by all warps: those of a warpgroup multiply together.
#pragma unroll 1
        for (; from < to; from += index_warps, number += index_warps) {
            auto& own = memory.ring[warp][at];
            at = at + 1 < stages ? at + 1 : 0;
            copy_wait<stages - 1>();
            __syncwarp();
            const index_keys<scheme, channels> now(own, lane);
            __syncwarp();
            const int page = pages[0];
#pragma unroll
            for (int i = 0; i < stages; ++i) pages[i] = pages[i + 1];
            pages[stages] = page_at(number + (stages + 1) * index_warps);
            fetch(own, part.cache, pages[stages - 1],
                  of.first + (number + stages * index_warps) * index_tile);
            const float sum = score<scheme>(now, memory, args.q.heads - first);
            // A missing page of several parts is in another one.
            if (number < to && (!Args::mixed || page >= 0))
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
        const float* const own_weights =
            reinterpret_cast<const memory_of<typename Args::scheme>*>(shared)->own_weights;
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
                for (int n = 0; 8 * n < kvq::detail::smaller(heads, index_heads); ++n) {
                    const bool there = 8 * n + g < heads;
                    const auto* const from_q = reinterpret_cast<const std::uint32_t*>(
                        q.at(row, first_head + (there ? 8 * n + g : 0)));
                    float d[4] = {};
#pragma unroll
                    for (int k = 0; k < channels / 16; ++k)
                        mma_values<T>(d, a[0][2 * k], a[1][2 * k], a[0][2 * k + 1], a[1][2 * k + 1],
                                      from_q[8 * k + t], from_q[8 * k + 4 + t]);
                    const float2 w = *reinterpret_cast<const float2*>(own_weights + 8 * n + 2 * t);
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
            const float own = own_sum(sums, lane);
            if (page >= 0) put<true>(part, of, row, token, own);
        }
    }
    /// The heads of a row from `first` on. All threads.
    template <class Scheme>
    __device__ __forceinline__ void load(int row, int first) {
        __syncthreads();
        reinterpret_cast<memory_of<Scheme>*>(shared)->load(args.q, args.weights, row, first, warp, lane);
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
                    load<typename Args::scheme>(row, first);
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
__global__ void __launch_bounds__(index_warps* warp_size, Args::blocks)
    index_scores_kernel(const __grid_constant__ Args args) {
#if KVQ_WARPGROUP_PRODUCTS
    extern __shared__ __align__(1024) std::byte swizzled_memory[];
    std::byte* const shared = swizzled_memory;
#else
    extern __shared__ __align__(16) std::byte page_memory[];
    std::byte* const shared = page_memory;
#endif
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
    index_scorer<Args> scorer{args, shared, warp, lane};
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

/// Shared memory of a thread block.
template <class Args>
struct index_bytes;
template <class First, class T, class... Parts>
struct index_bytes<index_args<First, T, Parts...>> {
    template <class Keys>
    static constexpr int of() {
        if constexpr (full_precision<Keys>)
            return static_cast<int>(sizeof(index_memory<int8, First::head_dim>));
        else
            return static_cast<int>(sizeof(index_memory<Keys, First::head_dim>));
    }
    static constexpr int value = [] {
        int most = 0;
        ((most = kvq::detail::larger(most, of<typename Parts::pair_type::keys>())), ...);
        return most;
    }();
};

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
    constexpr int bytes = detail::index_bytes<args_type>::value;
    if (code == cudaSuccess && bytes > detail::default_shared_memory)
        code = cudaFuncSetAttribute(detail::index_scores_kernel<args_type>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (code != cudaSuccess)
        return detail::runtime_error(code, "asking the device what scores of an index need");
    args_type args{{},      index.recent,         first.tokens,   first.sequences, q,
                   weights, options.query_tokens, options.behind, options.room,    scores};
    [&]<int... Is>(std::integer_sequence<int, Is...>) {
        ((detail::get<Is>(args.parts) = detail::get<Is>(index.parts)), ...);
    }
    (std::make_integer_sequence<int, sizeof...(Parts)>{});
    return detail::launch("launching the scores of an index", detail::overlap::yes,
                          detail::index_scores_kernel<args_type>,
                          dim3(static_cast<unsigned>(args_type::blocks * processors)),
                          detail::index_warps * detail::warp_size, std::size_t{bytes}, stream, args);
}
/// Of an index alone, room for table_columns * page_tokens scores. Those of missing pages are -infinity.
template <class Pair, class T>
status index_scores(const cache_ref<Pair>& index, const token_view<const T>& q, const float* weights,
                    int query_tokens, float* scores, cudaStream_t stream) noexcept {
    return index_scores<T>(make_mixed(0, index), q, weights,
                           {query_tokens, 0, index.table_columns * Pair::page_tokens}, scores, stream);
}

}}}  // namespace kvq::cuda
