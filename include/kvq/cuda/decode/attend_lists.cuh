// Attention over lists of tokens, in layers with keys and values (NSA; models that select what they read).
//
//   attend_lists<float16>(pages, q, out, {.scale = scale, .selected = {positions, 2048}}, workspace, bytes,
//                         stream);
//
// Every query token has two lists, `selected` and `window`, for each kv head or for all. A thread block has a
// part of the tokens of a (query, kv head); each of its warps takes 32 of them at a time, finds where they
// lie, and reads them one number at a time, lanes sharing the channels: time goes with the lists and not with
// the context. What a token costs is pieces of 32 bytes, in which memory is read: its words lie beside those
// of other tokens of its page, so that 132 bytes of codes are about 1.5 KB. A second launch merges the parts.
// Contract: float arithmetic; error against double below 1e-5 of the largest output. Lists: listed_pages.cuh.
// A row without listed tokens is zero; a query that is not finite is NaN. The same bits on every run.
#pragma once

#include "attend.cuh"
#include "listed_pages.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

inline constexpr int list_warps = 4, list_threads = list_warps * warp_size;
inline constexpr int list_batch = 4;  // tokens of a warp that are read at once

/// Kernel arguments. a: of the first part; its sequences are query tokens, its rows the heads of a group.
template <class First, class T, class... Parts>
struct list_args {
    using first_pair = First;
    attention_args<First, T> a;
    object_list<Parts...> parts;
    int recent;
    listed_queries lists;
    const float* sink_logits;
    int row_blocks, splits;
    float* states;  // [splits][queries][q_heads][value_dim + 2]; null: there is one split

    /// Query rows of a thread block.
    static constexpr int dim = First::head_dim, value_dim = First::value_dim,
                         largest_dim = kvq::detail::larger(dim, value_dim),
                         rows = largest_dim <= 128   ? 8
                                : largest_dim <= 256 ? 4
                                : largest_dim <= 512 ? 2
                                                     : 1;
    static constexpr int width = value_dim + 2;
};

/// Writes a row from states of its parts, `stride` numbers apart. All threads of a block.
template <class Args>
__device__ __forceinline__ void finish_list_row(const Args& args, int query, int head, const float* states,
                                                std::size_t stride, int count) {
    float top = -INFINITY, sum = 0.0f;
    for (int i = 0; i < count; ++i) top = fmaxf(top, states[static_cast<std::size_t>(i) * stride]);
    const float largest = top;
    const auto factor_of = [&](int i) {
        const float own = states[static_cast<std::size_t>(i) * stride];
        return own == -INFINITY ? 0.0f : exp2_fast(own - largest);
    };
    for (int i = 0; i < count; ++i)
        sum = fmaf(states[static_cast<std::size_t>(i) * stride + 1], factor_of(i), sum);
    float of_sink = 1.0f;
    if (args.sink_logits != nullptr) of_sink = add_sink(args.sink_logits[head], top, sum);
    for (int c = static_cast<int>(threadIdx.x); c < Args::value_dim; c += list_threads) {
        float one[1] = {};
        for (int i = 0; i < count; ++i)
            one[0] = fmaf(states[static_cast<std::size_t>(i) * stride + 2 + static_cast<std::size_t>(c)],
                          factor_of(i), one[0]);
        one[0] *= of_sink;
        finish_channels(args.a, query, head, c, top, sum, one);
    }
    __syncthreads();
    if (threadIdx.x == 0) finish_header(args.a, query, head, top, sum);
}

/// Rows of a kv head over 32 tokens at a time. A warp.
template <class Args>
struct list_rows {
    static constexpr int dim = Args::dim, value_dim = Args::value_dim, rows = Args::rows,
                         per_lane = ceil_div(dim, warp_size),
                         values_per_lane = ceil_div(value_dim, warp_size);
    const Args& args;
    int sequence, kv_head, count, lane;  // rows that there are
    float query[rows][per_lane] = {}, output[rows][values_per_lane] = {};
    float top[rows] = {}, sum[rows] = {};

    /// x^ of `list_batch` tokens from number `first` of the warp's on; of none: 0.
    template <tensor Role, int Count>
    __device__ __forceinline__ void read(float (&x)[list_batch][Count], const listed_token& own,
                                         int first) const {
        constexpr int width = Role == tensor::key ? dim : value_dim;
        listed_token token[list_batch];
#pragma unroll
        for (int b = 0; b < list_batch; ++b) {
            token[b] = {__shfl_sync(0xffffffffu, own.part, first + b),
                        __shfl_sync(0xffffffffu, own.page, first + b),
                        __shfl_sync(0xffffffffu, own.in_page, first + b)};
#pragma unroll
            for (int i = 0; i < Count; ++i) x[b][i] = 0.0f;
        }
        static_for<decltype(Args::parts)::count>([&](auto number) {
            constexpr int part = decltype(number)::value;
            // In place of tokens of other parts one of this part is read, so that there are no branches.
            listed_token any;
#pragma unroll
            for (int b = 0; b < list_batch; ++b)
                if (token[b].part == part) any = token[b];
            if (any.part < 0) return;
            const auto& cache = get<part>(args.parts).cache;
#pragma unroll
            for (int b = 0; b < list_batch; ++b) {
                const bool of_part = token[b].part == part;
                const int page = of_part ? token[b].page : any.page,
                          in_page = of_part ? token[b].in_page : any.in_page;
#pragma unroll
                for (int i = 0; i < Count; ++i) {
                    const int c = i * warp_size + lane;
                    const float number =
                        c < width ? read_value<Role>(cache, page, kv_head, in_page, c, sequence) : 0.0f;
                    x[b][i] = of_part ? number : x[b][i];
                }
            }
        });
    }
    /// own: a token of each lane.
    __device__ __forceinline__ void add(const listed_token& own) {
        const unsigned there = __ballot_sync(0xffffffffu, own.part >= 0);
        float score[rows];
#pragma unroll
        for (int r = 0; r < rows; ++r) score[r] = -INFINITY;
#pragma unroll 1
        for (int first = 0; first < warp_size; first += list_batch) {
            if ((there >> first & ((1u << list_batch) - 1u)) == 0) continue;
            float k[list_batch][per_lane];
            read<tensor::key>(k, own, first);
            // Sums of lanes: lane i gets that of row i / list_batch and token i % list_batch.
            constexpr int all = rows * list_batch;
            float x[all];
#pragma unroll
            for (int i = 0; i < all; ++i) {
                x[i] = 0.0f;
                if (i / list_batch >= count) continue;
#pragma unroll
                for (int c = 0; c < per_lane; ++c)
                    x[i] = fmaf(query[i / list_batch][c], k[i % list_batch][c], x[i]);
            }
#pragma unroll
            for (int step = all / 2; step > 0; step /= 2)
#pragma unroll
                for (int i = 0; i < step; ++i) {
                    const bool upper = (lane & step) != 0;
                    x[i] = (upper ? x[i + step] : x[i]) +
                           __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + step], step);
                }
#pragma unroll
            for (int step = all; step < warp_size; step *= 2)
                x[0] += __shfl_xor_sync(0xffffffffu, x[0], step);
            const bool of_lane = lane / list_batch == first / list_batch && own.part >= 0;
#pragma unroll
            for (int r = 0; r < rows; ++r) {
                const float s = __shfl_sync(0xffffffffu, x[0], r * list_batch + lane % list_batch);
                if (of_lane) score[r] = s;
            }
        }
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            if (r >= count) break;
            float next = score[r];
#pragma unroll
            for (int step = warp_size / 2; step > 0; step /= 2)
                next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, step));
            next = fmaxf(next, top[r]);
            const float base = next == -INFINITY ? 0.0f : next,
                        keep = top[r] == -INFINITY ? 0.0f : exp2_fast(top[r] - base);
            score[r] = own.part < 0 ? 0.0f : exp2_fast(score[r] - base);  // the weight
            float all = score[r];
#pragma unroll
            for (int step = warp_size / 2; step > 0; step /= 2)
                all += __shfl_xor_sync(0xffffffffu, all, step);
            sum[r] = sum[r] * keep + all;
            top[r] = next;
#pragma unroll
            for (int i = 0; i < values_per_lane; ++i) output[r][i] *= keep;
        }
#pragma unroll 1
        for (int first = 0; first < warp_size; first += list_batch) {
            if ((there >> first & ((1u << list_batch) - 1u)) == 0) continue;
            float v[list_batch][values_per_lane];
            read<tensor::value>(v, own, first);
#pragma unroll
            for (int r = 0; r < rows; ++r) {
                if (r >= count) break;
#pragma unroll
                for (int b = 0; b < list_batch; ++b) {
                    const float weight = __shfl_sync(0xffffffffu, score[r], first + b);
#pragma unroll
                    for (int i = 0; i < values_per_lane; ++i)
                        output[r][i] = fmaf(weight, v[b][i], output[r][i]);
                }
            }
        }
    }
};

/// Thread block (split, row block, kv head, query).
template <class Args>
__global__ void __launch_bounds__(list_threads, 3) attend_lists_kernel(const __grid_constant__ Args args) {
    using rows_type = list_rows<Args>;
    constexpr int width = Args::width;
    __shared__ float states[list_warps][Args::rows][width];
    launch_dependents();
    wait_for_predecessor();
    const auto& a = args.a;
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    auto item = static_cast<int>(blockIdx.x);
    const auto take = [&](int n) {
        const int number = item % n;
        item /= n;
        return number;
    };
    const int split = take(args.splits), row_block = take(args.row_blocks), kv_head = take(a.cache.kv_heads),
              query = item;
    const int first_row = row_block * Args::rows, first_head = a.row_head(kv_head, first_row);
    const listed_pages<Args> pages(args, query);
    rows_type own{args, pages.sequence, kv_head, kvq::detail::smaller(Args::rows, a.rows - first_row), lane};
#pragma unroll
    for (int r = 0; r < Args::rows; ++r) {
        own.top[r] = -INFINITY;
#pragma unroll
        for (int i = 0; i < rows_type::per_lane; ++i) {
            const int c = i * warp_size + lane;
            own.query[r][i] =
                r < own.count && c < Args::dim ? to_float(a.q.at(query, first_head + r)[c]) * a.scale : 0.0f;
        }
    }
    const long long groups = ceil_div(args.lists.count(), warp_size);
    const int end = static_cast<int>(groups * (split + 1) / args.splits);
#pragma unroll 1
    for (int group = static_cast<int>(groups * split / args.splits) + warp; group < end; group += list_warps)
        own.add(pages.find(args.lists.token(query, kv_head, group * warp_size + lane)));
#pragma unroll
    for (int r = 0; r < Args::rows; ++r) {
        float* const to = states[warp][r];
        // A row of NaN has no maximum, but is not empty.
        if (lane == 0) {
            to[0] = own.top[r] == -INFINITY && own.sum[r] != 0.0f ? 0.0f : own.top[r];
            to[1] = own.sum[r];
        }
#pragma unroll
        for (int i = 0; i < rows_type::values_per_lane; ++i)
            if (const int c = i * warp_size + lane; c < Args::value_dim) to[2 + c] = own.output[r][i];
    }
    __syncthreads();
    constexpr std::size_t stride = std::size_t{Args::rows} * width;
    if (args.splits == 1) {
#pragma unroll 1
        for (int r = 0; r < own.count; ++r)
            finish_list_row(args, query, first_head + r, states[0][r], stride, list_warps);
        return;
    }
    // The sum of the warps' states.
    const auto rows = static_cast<std::size_t>(a.q.tokens) * static_cast<std::size_t>(a.q.heads);
    for (int i = static_cast<int>(threadIdx.x); i < own.count * width; i += list_threads) {
        const int r = i / width, number = i - r * width;
        float top = -INFINITY, x = 0.0f;
        for (int w = 0; w < list_warps; ++w) top = fmaxf(top, states[w][r][0]);
        for (int w = 0; w < list_warps; ++w)
            if (states[w][r][0] != -INFINITY)
                x = fmaf(states[w][r][number], exp2_fast(states[w][r][0] - top), x);
        const std::size_t row = static_cast<std::size_t>(query) * static_cast<std::size_t>(a.q.heads) +
                                static_cast<std::size_t>(first_head + r);
        args.states[(static_cast<std::size_t>(split) * rows + row) * width +
                    static_cast<std::size_t>(number)] = number == 0 ? top : x;
    }
}

/// Thread block (head, query).
template <class Args>
__global__ void __launch_bounds__(list_threads) merge_lists_kernel(const __grid_constant__ Args args) {
    wait_for_predecessor();
    const auto& a = args.a;
    const auto block = static_cast<std::size_t>(blockIdx.x);
    const int query = static_cast<int>(blockIdx.x) / a.q.heads,
              head = static_cast<int>(blockIdx.x) - query * a.q.heads;
    const auto rows = static_cast<std::size_t>(a.q.tokens) * static_cast<std::size_t>(a.q.heads);
    finish_list_row(args, query, head, args.states + block * Args::width, rows * Args::width, args.splits);
}

template <class T, class... Parts>
using list_args_of = list_args<read_pair<typename std::tuple_element_t<0, std::tuple<Parts...>>::pair_type>,
                               T, cache_part<read_pair<typename Parts::pair_type>>...>;

/// Why listed tokens of such a mix are not read; null: they are.
template <class... Pairs>
inline constexpr const char* no_lists =
    ((has_transform<typename Pairs::keys> || has_transform<typename Pairs::values>) || ...)
        ? "pages of a format behind a transform are read whole"
        : nullptr;

/// Thread blocks that share the tokens of a (query, kv head), at least 64 tokens each.
template <class Args>
int list_splits(int queries, int q_heads, int kv_heads, int count, std::size_t bytes) noexcept {
    int device = 0, processors = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (code != cudaSuccess) {
        (void)cudaGetLastError();
        return 1;
    }
    const long long items = 1LL * queries * kv_heads * ceil_div(q_heads / kv_heads, Args::rows),
                    row_bytes = 1LL * queries * q_heads * Args::width * static_cast<long long>(sizeof(float));
    long long splits = kvq::detail::smaller(ceil_div(8LL * processors, items), ceil_div(count, 64) + 0LL);
    splits = kvq::detail::smaller(splits, static_cast<long long>(bytes) / row_bytes);
    return static_cast<int>(kvq::detail::larger(1LL, splits));
}

}  // namespace detail

/// Bytes of workspace with which attend_lists() of this mixed_cache_ref is fastest on the current device, for
/// so many query tokens and listed tokens of each. It takes less, and none.
template <class Mix, class T>
requires detail::is_mix<Mix> std::size_t list_workspace_bytes(int queries, int q_heads, int kv_heads,
                                                              int count)
noexcept {
    return [&]<class... Parts>(std::type_identity<mixed_cache_ref<Parts...>>) -> std::size_t {
        using args = detail::list_args_of<T, Parts...>;
        if (queries < 1 || kv_heads < 1 || q_heads < kv_heads) return 0;
        const int splits = detail::list_splits<args>(queries, q_heads, kv_heads, count, ~std::size_t{0} >> 1);
        return splits == 1 ? 0
                           : static_cast<std::size_t>(splits) * static_cast<std::size_t>(queries) *
                                 static_cast<std::size_t>(q_heads) * args::width * sizeof(float);
    }(std::type_identity<Mix>{});
}

/// Attention of the last query_tokens tokens of every sequence over their lists. q: [sequences *
/// query_tokens][heads][head_dim]; out likewise with value_dim.
template <class T, class... Parts>
status attend_lists(const mixed_cache_ref<Parts...>& cache, const token_view<const T>& q,
                    const token_view<T>& out, const list_options& options, void* workspace,
                    std::size_t workspace_bytes, cudaStream_t stream) noexcept {
    static_assert(float_format<T>, "kvq::cuda::attend_lists: q and out must be float16, bfloat16 or float");
    static_assert(detail::no_lists<typename Parts::pair_type...> == nullptr,
                  "kvq::cuda::attend_lists: formats behind a transform are read a page at a time");
    using args_type = detail::list_args_of<T, Parts...>;
    if (status s = detail::check_mix(cache); !s) return s;
    const auto mix = detail::read_mix(cache);
    const auto& first = get<0>(mix.parts).cache;
    const attention_options plain = detail::without_lists(options);
    if (status s = detail::check_attention(first, q, out, plain); !s) return s;
    if (status s = detail::check_lists(options, first.kv_heads); !s) return s;
    if (q.tokens == 0) return {};
    args_type args{};
    args.a = detail::make_arguments(first, q, out, plain);
    args.a.work.query_tokens = 1;
    args.a.work.sequences = q.tokens;
    args.a.set_group(q.heads);
    [&]<int... Is>(std::integer_sequence<int, Is...>) {
        ((detail::get<Is>(args.parts) = detail::get<Is>(mix.parts)), ...);
    }
    (std::make_integer_sequence<int, sizeof...(Parts)>{});
    args.recent = cache.recent;
    args.lists = detail::listed_queries(options);
    args.sink_logits = options.sink_logits;
    args.row_blocks = kvq::detail::ceil_div(args.a.rows, args_type::rows);
    args.splits = detail::list_splits<args_type>(q.tokens, q.heads, first.kv_heads, args.lists.count(),
                                                 workspace == nullptr ? 0 : workspace_bytes);
    args.states = static_cast<float*>(workspace);
    const long long blocks = 1LL * q.tokens * first.kv_heads * args.row_blocks * args.splits;
    if (blocks > 2147483647LL || 1LL * q.tokens * q.heads > 2147483647LL)
        return detail::bad_value("%d query tokens of %d heads are too many for one launch", q.tokens,
                                 q.heads);
    if (status s = detail::launch("launching attention over lists", detail::overlap::yes,
                                  detail::attend_lists_kernel<args_type>, dim3(static_cast<unsigned>(blocks)),
                                  detail::list_threads, 0, stream, args);
        !s || args.splits == 1)
        return s;
    return detail::launch(
        "merging attention over lists", detail::overlap::yes, detail::merge_lists_kernel<args_type>,
        dim3(static_cast<unsigned>(q.tokens * q.heads)), detail::list_threads, 0, stream, args);
}

}}}  // namespace kvq::cuda
