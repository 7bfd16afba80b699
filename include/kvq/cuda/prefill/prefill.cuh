// Attention of a prompt's new tokens over the pages before them and over themselves.
//
//   out[i] = softmax(scale q_i K^T) V     K, V: x^ of all pages of the sequence, then the new tokens 0..i in
//                                         16 bit
//
// The new tokens are not stored yet: they see each other, and the recent window, in 16 bit, as in the CPU's
// prefill. Store them afterwards (store_new_tokens, commit_due_pages, or requantize_pages for a long prompt).
// Sequences of a batch may have any number of new tokens each, one or none too; a block of 256 (query, head)
// pairs is the least work, so single tokens are better off with attend().
// Contract: each row is computed by one thread block, in order of position: results depend neither on the
// batch nor on timing. Weights, values and keys are rounded to half floats (prefill_tile.cuh). Relative error
// against double on dequantized values, on normal data: 3e-4 (fp16) to 8e-4 (low2); a score of products p_c
// moves by about 2^-11 sqrt(sum p_c^2 / 6), which shows where one key outweighs all others. A row whose q
// holds NaN is NaN. Kernels: sm_90a with options.scratch, 64, 128, 256 or 512 channels, no transforms:
// prefill_ready.cuh, then prefill_wgmma.cuh; everything else from 8.0 on: prefill_mma.cuh, which takes no
// memory besides its arguments.
#pragma once

#include <cmath>

#include "prefill_mma.cuh"
#include "prefill_wgmma.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// Over tiles in scratch memory.
template <int Dim, bool Softcap, class Args>
struct wgmma_launch {
    static constexpr auto* kernel = prefill_wgmma_kernel<Dim, Softcap, ready_args<Args>>;
    using memory = wgmma_memory<Dim>;
    using shape = typename memory::shape;
    static constexpr int rows = shape::cluster_rows, threads = shape::threads;
    static constexpr int cluster = shape::cluster;  // thread blocks that see each other's shared memory
    static constexpr kernel_facts facts{
        "prefill_wgmma_kernel",
        shape::rows,
        0,
        memory::bytes,
        memory::bytes,
        threads,
        feature::warpgroup_products | feature::clusters | feature::bulk_copies};
};
template <int Dim, int Rows, bool Softcap, class Args>
struct mma_launch {
    static constexpr auto* kernel = prefill_mma_kernel<Dim, Rows, Softcap, Args>;
    static constexpr int rows = Rows, threads = mma_threads, cluster = 1;
    static constexpr kernel_facts facts{"prefill_mma_kernel", Rows, 0, mma_shape<Dim, Rows>::bytes,
                                        mma_shape<Dim, Rows>::bytes};
};
/// Is a part behind a transform? Then queries change from part to part, and prefill_wgmma_kernel keeps one
/// for all.
template <class Args>
inline constexpr bool turns_queries = false;
template <class T, class... Parts>
inline constexpr bool turns_queries<prefill_args<T, Parts...>> = (pair_turns<typename Parts::pair_type> ||
                                                                  ...);
template <class Score, class Args>
inline constexpr bool turns_queries<scored_args<Score, Args>> = turns_queries<Args>;
template <int Dim, class Args>
inline constexpr bool has_wgmma =
    !turns_queries<Args> && (Dim == 64 || Dim == 128 || Dim == 256 || Dim == 512);
/// Blocks of 256 channels and 128 rows need more shared memory than 8.0 has; a warp must have whole rows of
/// outputs that are turned.
template <int Dim, bool Softcap, class Args>
using mma_launches =
    std::conditional_t<Dim <= 128 || Dim == 512 || turns_queries<Args>,
                       both_sizes<mma_shape<Dim, prefill_rows<Dim>>::bytes,
                                  kernel_list<mma_launch<Dim, prefill_rows<Dim>, Softcap, Args>>,
                                  kernel_list<mma_launch<Dim, small_mma_rows<Dim>, Softcap, Args>>>,
                       kernel_list<mma_launch<Dim, prefill_rows<Dim>, Softcap, Args>,
                                   mma_launch<Dim, small_mma_rows<Dim>, Softcap, Args>>>;
/// The preferred one first. Scratch: is there memory for tiles? All: the arguments with their pages; Without:
/// without them.
template <int Dim, bool Softcap, bool Scratch, class All, class Without>
using prefill_launches =
    joined<std::conditional_t<Scratch && has_wgmma<Dim, All>,
                              kernel_list<wgmma_launch<Dim, Softcap, Without>>, kernel_list<>>,
           mma_launches<Dim, Softcap, All>>;

template <class Launch, class Args>
status launch_prefill(Launch, const Args& args, int query_rows, int kv_heads, int sequences,
                      cudaStream_t stream, overlap overlapped = overlap::no) noexcept {
    constexpr int bytes = Launch::facts.shared_memory, cluster = Launch::cluster;
    auto* const kernel = Launch::kernel;
    const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (code != cudaSuccess) {
        char what[64];
        std::snprintf(what, sizeof what, "prefill needs %d bytes of shared memory per block", bytes);
        return runtime_error(code, what);
    }
    const dim3 grid(static_cast<unsigned>(kvq::detail::ceil_div(query_rows, Launch::rows) * cluster),
                    static_cast<unsigned>(kv_heads), static_cast<unsigned>(sequences));
    return launch<cluster>("launching prefill", overlapped, kernel, grid, Launch::threads, bytes, stream,
                           args);
}

/// Tiles of a call that takes scratch memory for all heads, without their place. tokens: as prefill_scratch
/// has them.
template <int Dim, class... Parts>
ready_tiles ready_for(const mixed_cache_ref<Parts...>& history, int tokens, int most_new_tokens) noexcept {
    constexpr int tile = wgmma_shape<Dim>::tile;
    const auto& cache = get<0>(history.parts).cache;
    ready_tiles ready;
    ready.columns = kvq::detail::ceil_div(most_new_tokens, tile);
    ready.ranges = 1;
    // Formats may hold pages in turns, and each makes tiles from its first page to its last one.
    for_each_part(history.parts, [&]<class Part>(const Part& part) {
        auto most = static_cast<long long>(part.cache.table_columns) * Part::pair_type::page_tokens;
        if (part.capacity >= 0) most = kvq::detail::smaller<long long>(most, part.capacity);
        if (part.span >= 0) most = kvq::detail::smaller<long long>(most, part.span);
        most = kvq::detail::smaller<long long>(most, tokens > 0 ? tokens : most_tokens);
        ready.columns += kvq::detail::ceil_div(static_cast<int>(most), tile);
        ++ready.ranges;
    });
    ready.sequences = cache.sequences;
    ready.heads = cache.kv_heads;
    ready.tile_bytes = ready_memory<Dim>::tile_bytes;
    return ready;
}

/// Dequantizes all tiles, then attends over them, for as many heads at a time as scratch memory has room for.
template <int Dim, bool Softcap, class Args, class Without>
status launch_ready(const Args& args, const Without& without, ready_tiles ready, int query_rows,
                    const prefill_scratch& scratch, cudaStream_t stream) noexcept {
    using memory = ready_memory<Dim>;
    const int kv_heads = ready.heads;
    while (ready.heads > 1 && ready.bytes() > scratch.bytes) --ready.heads;
    if (ready.bytes() > scratch.bytes)
        return bad_value(
            "scratch memory of %zu bytes, but one kv head of %d sequences with %d tiles of %d tokens needs "
            "%zu",
            scratch.bytes, ready.sequences, ready.columns, wgmma_shape<Dim>::tile, ready.bytes());
    auto* const kernel = prefill_tiles_kernel<Dim, Args>;
    cudaError_t code =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory::bytes);
    int device = 0, multiprocessors = 0;
    if (code == cudaSuccess) code = cudaGetDevice(&device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (code != cudaSuccess) return runtime_error(code, "prefill: shared memory of a block");
    ready.memory = static_cast<std::byte*>(scratch.memory);
    // As many passes, of as equal numbers of heads as there are.
    const int heads = kvq::detail::ceil_div(kv_heads, kvq::detail::ceil_div(kv_heads, ready.heads));
    for (int head = 0; head < kv_heads; head += heads) {
        ready.first_head = head;
        ready.heads = kvq::detail::smaller(heads, kv_heads - head);
        // Blocks for all places and some more: those that a window leaves nothing to make take time, too.
        const int places = kvq::detail::ceil_div(8 * multiprocessors, ready.heads * ready.sequences);
        const dim3 grid(static_cast<unsigned>(kvq::detail::smaller(memory::parts * ready.columns, places)),
                        static_cast<unsigned>(ready.heads), static_cast<unsigned>(ready.sequences));
        if (status s = launch("launching the tiles of prefill", overlap::no, kernel, grid, ready_threads,
                              memory::bytes, stream, args, ready);
            !s)
            return s;
        if (status s =
                launch_prefill(wgmma_launch<Dim, Softcap, Without>{}, ready_args<Without>{without, ready},
                               query_rows, ready.heads, ready.sequences, stream, overlap::yes);
            !s)
            return s;
    }
    return {};
}

/// Of parts as kernels read them.
template <class T, class Score, class... Parts>
status prefill_mix(const mixed_cache_ref<Parts...>& history, const token_view<const T>& k,
                   const token_view<const T>& v, const token_view<const T>& q, const token_view<T>& out,
                   const int* starts, int most_new_tokens, const prefill_options& options,
                   cudaStream_t stream, [[maybe_unused]] const Score& score) noexcept {
    using first_pair = typename std::tuple_element_t<0, std::tuple<Parts...>>::pair_type;
    constexpr int dim = first_pair::head_dim;
    const auto& cache = get<0>(history.parts).cache;
    if (status s = check_mix(history); !s) return s;
    if (q.dim != dim || k.dim != dim || v.dim != dim || out.dim != dim)
        return bad_value("q, k, v, out have %d, %d, %d, %d channels but pages %d", q.dim, k.dim, v.dim,
                         out.dim, dim);
    if (k.heads != cache.kv_heads || v.heads != cache.kv_heads || q.heads != out.heads || q.heads < 1 ||
        q.heads % cache.kv_heads != 0)
        return bad_value("q, k, v, out have %d, %d, %d, %d heads but the cache %d kv heads", q.heads, k.heads,
                         v.heads, out.heads, cache.kv_heads);
    if (!q.data || ((!k.data || !v.data) && k.tokens > 0) || (!out.data && !options.state_out))
        return bad_value("q, k, v or out is a null pointer");
    if (starts == nullptr && (cache.sequences != 1 || k.tokens != v.tokens || most_new_tokens != q.tokens))
        return bad_value(
            "without starts there is one sequence, and as many keys as values; got %d sequences, %d queries "
            "of %d, %d keys, %d values",
            cache.sequences, most_new_tokens, q.tokens, k.tokens, v.tokens);
    if (starts != nullptr && options.lead != 0)
        return bad_value(
            "queries that are not those of the new tokens (lead %d) need starts to be "
            "null",
            options.lead);
    if (most_new_tokens < 0 || most_new_tokens > q.tokens ||
        (starts != nullptr && (k.tokens < q.tokens || v.tokens < q.tokens)) || out.tokens < q.tokens)
        return bad_value("up to %d new tokens of %d queries, %d keys, %d values, %d outputs", most_new_tokens,
                         q.tokens, k.tokens, v.tokens, out.tokens);
    if (!(options.softcap >= 0.0f) || options.window < 0 || !(options.scale >= 0.0f))
        return bad_value("scale %g, softcap %g, window %d", static_cast<double>(options.scale),
                         static_cast<double>(options.softcap), options.window);
    if (reinterpret_cast<std::uintptr_t>(options.scratch.memory) % 16 != 0 || options.scratch.tokens < 0)
        return bad_value("scratch memory at %p, not on a multiple of 16, or of sequences with %d tokens",
                         options.scratch.memory, options.scratch.tokens);
    if (cache.sequences == 0 || most_new_tokens == 0) return {};
    const page_cuts& cache_cuts = get<0>(history.parts).cuts;
    int sinks = 0;
    if (options.window > 0 && options.window_sinks)
        for_each_part(history.parts, [&]<class Part>(const Part& part) {
            if (is_sink_part<Part>) sinks = part.capacity;
        });
    const int group = q.heads / cache.kv_heads;
    if (most_new_tokens > most_tokens / group || cache.sequences > 65535 || cache.kv_heads > 65535)
        return bad_value("%d new tokens of %d sequences with %d query heads", most_new_tokens,
                         cache.sequences, q.heads);

    using args_type = prefill_args<T, Parts...>;
    args_type args{
        {q, k, v, out, starts, cache.tokens, history.recent, group, 0.0f, options.softcap,
         row_window(options.window, options.chunked), options.window_sinks, sinks, options.sink_logits,
         options.lse, cache_cuts, options.state_out, options.lead, has_score<Score>},
        history.parts};
    const float scale = options.scale == 0.0f ? 1.0f / std::sqrt(static_cast<float>(dim)) : options.scale;
    args.scale = options.softcap > 0.0f || has_score<Score> ? scale : scale * log2e;
    const int rows = most_new_tokens * group;
    // all: the call with its pages; without: without them.
    const auto launch = [&]<bool Softcap, class All, class Without>(std::bool_constant<Softcap>,
                                                                    const All& all, const Without& without) {
        const auto start = [&]<class Launch>(Launch kernel) {
            if constexpr (std::is_same_v<Launch, wgmma_launch<dim, Softcap, Without>>)
                return launch_ready<dim, Softcap>(
                    args, without,
                    ready_for<dim>(history, options.scratch.tokens,
                                   starts == nullptr ? k.tokens : most_new_tokens),
                    rows, options.scratch, stream);
            else
                return launch_prefill(kernel, all, rows, cache.kv_heads, cache.sequences, stream);
        };
        return options.scratch.memory != nullptr
                   ? with_kernel(prefill_launches<dim, Softcap, true, All, Without>{}, rows, start)
                   : with_kernel(prefill_launches<dim, Softcap, false, All, Without>{}, rows, start);
    };
    const prefill_args<T>& without = args;
    if constexpr (has_score<Score>)
        return launch(std::true_type{}, scored_args<Score, args_type>{args, score},
                      scored_args<Score, prefill_args<T>>{without, score});
    else
        return options.softcap > 0.0f ? launch(std::true_type{}, args, without)
                                      : launch(std::false_type{}, args, without);
}

}  // namespace detail

/// history: the sequences before their new tokens (lengths do not count these). k, v, q, out: rows starts[b]
/// to starts[b + 1] - 1 are the new tokens of sequence b; T is float16, bfloat16 or float. starts: [sequences
/// + 1], device memory. most_new_tokens: of one sequence. starts null: one sequence, whose queries are all
/// rows of q and whose new tokens are all rows of k and v (options.lead). With options.state_out, out may be
/// a null pointer. score: as of attend(); learned sinks alone are options.sink_logits. Complexity: q_heads *
/// (new tokens) * (tokens before) * 4 * head_dim operations; every 256 / group new tokens (128 / group of
/// heads with 512 channels) read the cache once.
template <class T, class... Parts, class Score = unmodified>
status prefill(const mixed_cache_ref<Parts...>& history, const token_view<const T>& k,
               const token_view<const T>& v, const token_view<const T>& q, const token_view<T>& out,
               const int* starts, int most_new_tokens, const prefill_options& options, cudaStream_t stream,
               const Score& score = {}) noexcept {
    static_assert(std::is_same_v<Score, unmodified> || detail::has_score<Score>,
                  "kvq::cuda::prefill: a score modifier has score(); sink_logits alone are an option");
    using first_pair = typename std::tuple_element_t<0, std::tuple<Parts...>>::pair_type;
    constexpr int dim = first_pair::head_dim;
    static_assert((detail::has_values<typename Parts::pair_type> && ...),
                  "kvq::cuda::prefill: pages of latents are for attend_latents()");
    static_assert(((Parts::pair_type::head_dim == dim) && ...),
                  "kvq::cuda::prefill: all parts must have the same head_dim");
    static_assert(
        detail::prefills<typename Parts::pair_type...>,
        "kvq::cuda::prefill: no kernels for these pages (detail::no_prefill says why): other formats go "
        "through dequantize_tokens");
    return detail::prefill_mix<T>(detail::read_mix(history), k, v, q, out, starts, most_new_tokens, options,
                                  stream, score);
}

/// Bytes of prefill_scratch with which prefill() computes so many kv heads at a time on the current device;
/// heads 0: all. 0: it takes none. tokens: as prefill_scratch has them; new_tokens: the most of a sequence.
template <class T, class... Parts>
std::size_t prefill_scratch_bytes(const mixed_cache_ref<Parts...>& history, int tokens, int new_tokens,
                                  int heads = 0) noexcept {
    return [&]<class... Read>(const mixed_cache_ref<Read...>& cache) -> std::size_t {
        constexpr int dim = std::tuple_element_t<0, std::tuple<Read...>>::pair_type::head_dim;
        if constexpr (detail::prefills<typename Read::pair_type...> &&
                      detail::has_wgmma<dim, detail::prefill_args<T, Read...>>) {
            using launch = detail::wgmma_launch<dim, false, detail::prefill_args<T>>;
            const detail::device_facts device{detail::compute_capability(), detail::device_shared_memory()};
            if (detail::refuses<launch>(device, nullptr)) return 0;
            detail::ready_tiles ready = detail::ready_for<dim>(cache, tokens, new_tokens);
            if (heads > 0) ready.heads = kvq::detail::smaller(heads, ready.heads);
            return ready.bytes();
        } else {
            return 0;
        }
    }(detail::read_mix(history));
}

/// The kernel that prefill() of this mixed_cache_ref takes on the current device, and why; or why it has
/// none. Scratch: with options.scratch.
template <class Mix, class T, bool Scratch = true>
requires detail::is_mix<Mix> kernel_choice prefill_kernel()
noexcept {
    return [&]<class... Parts>(const mixed_cache_ref<Parts...>&) {
        using pair = typename std::tuple_element_t<0, std::tuple<Parts...>>::pair_type;
        constexpr const char* reason = detail::no_prefill<typename Parts::pair_type...>;
        kernel_choice choice;
        if constexpr (reason != nullptr)
            detail::add_words(choice, "prefill has no kernels for these pages: %s", reason);
        else
            detail::with_kernel(
                detail::prefill_launches<pair::head_dim, false, Scratch, detail::prefill_args<T, Parts...>,
                                         detail::prefill_args<T>>{},
                1, [](auto) {}, &choice);
        return choice;
    }(detail::read_mix(Mix{}));
}

}}}  // namespace kvq::cuda
