// The cache's share of a decode step in one launch: new tokens go to the window (or the sinks), pages that are now behind the window
// are committed.
//
//   position   tokens[b] - new_tokens + i of new token i of sequence b. Below first_token: a sink. Otherwise page
//              (position - first_token) / page_tokens, in column page % table_columns of the window's table
//   due        pages [committed before the new tokens, committed with them) (mixed_cache.cuh): one at most, since new_tokens <= page_tokens.
//              None of its tokens is new, since new_tokens <= recent. So nothing in the launch waits for anything else in it
//
// Slots and pages are found on the device from `tokens`: a captured graph stays valid while sequences grow. No table is written: the
// quantized table must name the page of a column by the time that it is committed (a negative entry: its tokens are lost).
// Contract: stored and committed bytes are those of `store` and `requantize_pages`, which are the CPU's. The same launch again writes the
// same bytes.
#pragma once

#include "mixed_cache.cuh"
#include "pages.cuh"
#include "store.cuh"

namespace kvq::inline KVQ_TAGGED::cuda {

namespace detail {

/// Sinks: void where sequences have none.
template <class Quantized, class Window, class Sinks, class T>
struct step_args {
    cache_ref<Quantized> quantized;
    cache_ref<Window> window;
    cache_ref<std::conditional_t<std::is_void_v<Sinks>, Window, Sinks>> sinks;
    token_view<const T> k, v;
    int new_tokens, recent;
    unsigned* not_finite;
    int commit_columns;
};

/// Stores one head of one new token.
template <tensor Role, class Format, class T>
__device__ __forceinline__ unsigned store_head(const cache_ref<Format>& cache, int page, int slot, int head,
                                               const T* from, int lane) {
    token_row<Role, Format, T> row;
    row.fetch(from, lane);
    if (page < 0) return 0;
    std::byte* const block = cache.template block<Role>(page, head);
    return row.store(block, slot, lane) ? 0u : store_token<Role, Format, T>(from, block, slot);
}

/// A warp's part of the new tokens: number `task` of (token, tensor, head).
template <class Quantized, class Window, class Sinks, class T>
__device__ __forceinline__ void store_new(const step_args<Quantized, Window, Sinks, T>& a, int task,
                                          int lane) {
    const int heads = a.window.kv_heads, head = task % heads, tensor_number = task / heads % 2,
              token = task / (2 * heads);
    const int sequence = token / a.new_tokens;
    const int position = a.window.tokens[sequence] - a.new_tokens + token % a.new_tokens,
              behind_sinks = position - a.window.first_token;
    const auto store_in = [&](const auto& cache, int column, int slot) {
        using format = typename std::remove_cvref_t<decltype(cache)>::format_type;
        const int page = cache.block_table[cache.table_entry(sequence, column)];
        return tensor_number == 0
                   ? store_head<tensor::key, format, T>(cache, page, slot, head, a.k.at(token, head), lane)
                   : store_head<tensor::value, format, T>(cache, page, slot, head, a.v.at(token, head), lane);
    };
    unsigned bad = 0;
    if (behind_sinks >= 0) {
        constexpr int page_tokens = Window::page_tokens;
        bad = store_in(a.window, behind_sinks / page_tokens % a.window.table_columns,
                       behind_sinks % page_tokens);
    } else if (position >= 0) {
        if constexpr (!std::is_void_v<Sinks>)
            bad = store_in(a.sinks, position / Sinks::page_tokens, position % Sinks::page_tokens);
    }
    if (bad != 0 && a.not_finite != nullptr) atomicAdd(a.not_finite, bad);
}

/// The page of a sequence that is due, or -1.
template <class Quantized, class Window, class Sinks, class T>
__device__ __forceinline__ int page_due(const step_args<Quantized, Window, Sinks, T>& a, int sequence) {
    const int tokens = a.window.tokens[sequence] - a.window.first_token;
    const int after = committed_pages(tokens, a.recent, Window::page_tokens);
    if (after == committed_pages(tokens - a.new_tokens, a.recent, Window::page_tokens) ||
        after > a.quantized.table_columns)
        return -1;
    return after - 1;
}

/// All blocks store. Then block x of a head and tensor commits the page of the x-th sequence that has one due, of the one commit_columns
/// further, and so on; mostly there is none.
template <class Quantized, class Window, class Sinks, class T>
__global__ void __launch_bounds__(page_quantizer<Quantized>::threads,
                                  1024 / page_quantizer<Quantized>::threads)
    step_kernel(const __grid_constant__ step_args<Quantized, Window, Sinks, T> a) {
    constexpr int threads = page_quantizer<Quantized>::threads, warps = threads / warp_size;
    extern __shared__ __align__(16) std::byte page_memory[];
    __shared__ int counts[warps], mine[threads];
    const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size, lane = thread % warp_size;
    // Behind the loads, as in store_few, attention started 2 us later.
    launch_dependents();
    wait_for_predecessor();
    const int number = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    const int tasks = a.k.tokens * a.window.kv_heads * 2;
    for (int task = warp * blocks + number; task < tasks; task += warps * blocks) store_new(a, task, lane);
    // Values first: they take longer.
    const int heads = a.window.kv_heads, own = number % a.commit_columns,
              head = number / a.commit_columns % heads;
    const bool keys = number / a.commit_columns >= heads;
    int seen = 0;  // sequences before that have a page due
    for (int first = 0; first < a.window.sequences; first += threads) {
        const int b = first + thread;
        const bool due = b < a.window.sequences && page_due(a, b) >= 0;
        if (__syncthreads_or(due) == 0) continue;
        const unsigned mask = __ballot_sync(~0u, due);
        if (lane == 0) counts[warp] = __popc(mask);
        __syncthreads();
        int before = seen, all = seen;
        for (int w = 0; w < warps; ++w) {
            if (w < warp) before += counts[w];
            all += counts[w];
        }
        const int place = before + __popc(mask & ((1u << lane) - 1u));
        if (due && place % a.commit_columns == own) mine[(place - seen) / a.commit_columns] = b;
        // Of the numbers from `seen` on, those that are own modulo commit_columns.
        const int skipped = (own - seen % a.commit_columns + a.commit_columns) % a.commit_columns;
        const int jobs = all - seen > skipped ? ceil_div(all - seen - skipped, a.commit_columns) : 0;
        seen = all;
        __syncthreads();
        for (int j = 0; j < jobs; ++j) {
            const int sequence = mine[j], page = page_due(a, sequence);
            const int from =
                          a.window.block_table[a.window.table_entry(sequence, page % a.window.table_columns)],
                      to = a.quantized.block_table[a.quantized.table_entry(sequence, page)];
            if (from >= 0 && to >= 0)
                requantize_block(a.window, a.quantized, from, to, head, keys, a.not_finite, page_memory);
            __syncthreads();
        }
    }
}

template <class Quantized, class Window, class Sinks, class T>
status run_step(step_args<Quantized, Window, Sinks, T> a, cudaStream_t stream) noexcept {
    static_assert(same_geometry<Window, Quantized>,
                  "kvq::cuda::store_and_commit: both formats must have the same head sizes and page size");
    static_assert(full_precision<typename Window::keys> && full_precision<typename Window::values>,
                  "kvq::cuda::store_and_commit: the window format must be full<T>");
    const auto& w = a.window;
    if (status s = check_ref(w, true); !s) return s;
    if (status s = check_ref(a.quantized, true); !s) return s;
    if (w.kv_heads != a.quantized.kv_heads || w.sequences != a.quantized.sequences ||
        w.first_token != a.quantized.first_token || w.tokens != a.quantized.tokens)
        return bad_value("window and quantized pages are of different caches");
    if (a.new_tokens < 1 || a.new_tokens > Window::page_tokens || a.new_tokens > a.recent)
        return bad_value("%d new tokens a sequence, but pages have %d and the recent window %d", a.new_tokens,
                         Window::page_tokens, a.recent);
    if (a.recent > most_tokens) return bad_value("the recent window is %d tokens", a.recent);
    const int needed = window_columns(a.recent, Window::page_tokens, a.new_tokens);
    if (w.sequences > 0 && w.table_columns < needed)
        return bad_value("a window of %d tokens needs %d pages of %d tokens, its table has %d columns",
                         a.recent, needed, Window::page_tokens, w.table_columns);
    const long long tokens = static_cast<long long>(w.sequences) * a.new_tokens;
    if (a.k.tokens != tokens || a.v.tokens != tokens)
        return bad_value("k has %d and v %d tokens, but %d sequences have %d new ones each", a.k.tokens,
                         a.v.tokens, w.sequences, a.new_tokens);
    if (a.k.heads != w.kv_heads || a.v.heads != w.kv_heads || a.k.dim != Window::head_dim ||
        a.v.dim != Window::value_dim)
        return bad_value("k is %d x %d and v %d x %d but the cache holds %d heads of %d and %d", a.k.heads,
                         a.k.dim, a.v.heads, a.v.dim, w.kv_heads, Window::head_dim, Window::value_dim);
    if (w.sequences == 0) return {};
    if (a.k.data == nullptr || a.v.data == nullptr) return bad_value("k or v is a null pointer");
    if (tokens * w.kv_heads * 2 > 2147483647LL) return bad_value("%lld new tokens are too many", tokens);
    if constexpr (std::is_void_v<Sinks>) {
        if (w.first_token != 0)
            return bad_value("the window begins behind %d sinks, which are not given", w.first_token);
    } else {
        static_assert(full_precision<typename Sinks::keys> && full_precision<typename Sinks::values>,
                      "kvq::cuda::store_and_commit: the format of sinks must be full<T>");
        if (status s = check_ref(a.sinks, true); !s) return s;
        if (a.sinks.kv_heads != w.kv_heads || a.sinks.sequences != w.sequences || a.sinks.first_token != 0 ||
            a.sinks.table_columns * Sinks::page_tokens < w.first_token)
            return bad_value("the pages of sinks do not hold the first %d tokens of these sequences",
                             w.first_token);
    }
    auto* const kernel = step_kernel<Quantized, Window, Sinks, T>;
    if (status s = allow_shared_memory<Quantized>(kernel); !s) return s;
    using quantizer = page_quantizer<Quantized>;
    a.commit_columns = kvq::detail::smaller(w.sequences, kvq::detail::larger(1, 128 / w.kv_heads));
    const int blocks = a.commit_columns * w.kv_heads * 2;
    return launch("launching store and commit", overlap::yes, kernel, dim3(static_cast<unsigned>(blocks)),
                  quantizer::threads, quantizer::shared_bytes, stream, a);
}

}  // namespace detail

/// Stores the newest new_tokens tokens of every sequence (tokens[b] counts them already) and commits pages to `quantized`; see the top
/// of this file. k: [sequences * new_tokens][kv_heads][head_dim], v likewise with value_dim; sequences of length 0 are not there.
/// not_finite, if given, adds up NaN and infinities, of committed pages once more.
template <class Quantized, class Window, class Sinks, class T>
status store_and_commit(const cache_ref<Quantized>& quantized, const cache_ref<Window>& window,
                        const cache_ref<Sinks>& sinks, int recent, const token_view<const T>& k,
                        const token_view<const T>& v, int new_tokens, unsigned* not_finite,
                        cudaStream_t stream) noexcept {
    return detail::run_step<Quantized, Window, Sinks, T>(
        {quantized, window, sinks, k, v, new_tokens, recent, not_finite, 0}, stream);
}
/// The same for sequences without sinks.
template <class Quantized, class Window, class T>
status store_and_commit(const cache_ref<Quantized>& quantized, const cache_ref<Window>& window, int recent,
                        const token_view<const T>& k, const token_view<const T>& v, int new_tokens,
                        unsigned* not_finite, cudaStream_t stream) noexcept {
    return detail::run_step<Quantized, Window, void, T>(
        {quantized, window, {}, k, v, new_tokens, recent, not_finite, 0}, stream);
}

}  // namespace kvq::inline KVQ_TAGGED::cuda
