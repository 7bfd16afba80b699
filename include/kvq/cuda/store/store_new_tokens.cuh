// New tokens of a decode step go to the 16-bit window, or to the sinks: one launch per layer.
//
//   position
//     tokens[b] - new_tokens + i of new token i of sequence b. Below first_token: a sink. Otherwise page
//              (position - first_token) / page_tokens, in column page % table_columns of the window's table,
//                which is a ring
//
// Slots are found on the device from `tokens`: a captured graph stays valid while sequences grow, and no
// table is written.
// Contract: stored bytes are those of `store`, which are the CPU's. The same launch again writes the same
// bytes. The page that a new token enters must be free: commit_due_pages (commit_due_pages.cuh) runs once a
// step before or after it, but before attention.
#pragma once

#include "../layout/mixed_cache.cuh"
#include "store.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

struct store_options {
    /// The caller promises that lengths and tables were written before the launches of kvq that directly
    /// precede this one: then slots are found while the previous launch runs out.
    bool early = false;
};

namespace detail {

/// Sinks: void where sequences have none.
template <class Window, class Sinks, class T>
struct new_token_args {
    cache_ref<Window> window;
    cache_ref<std::conditional_t<std::is_void_v<Sinks>, Window, Sinks>> sinks;
    token_view<const T> k, v;
    int new_tokens;
    unsigned* not_finite;
    bool early;
};

/// Number `task` of (token, tensor, head): a warp stores one head of one new token.
struct store_task {
    int token, head;
    bool values;
    __device__ __forceinline__ store_task(int task, int heads, int tensors)
        : token(task / (tensors * heads)), head(task % heads), values(task / heads % tensors != 0) {}
};

/// Where a new token goes; page -1: nowhere.
struct store_place {
    int page = -1, slot = 0;
    bool of_sinks = false;
};
template <class Window, class Sinks, class T>
__device__ __forceinline__ store_place find_place(const new_token_args<Window, Sinks, T>& a, int token) {
    const int sequence = token / a.new_tokens;
    const int position = a.window.tokens[sequence] - a.new_tokens + token % a.new_tokens,
              behind_sinks = position - a.window.first_token;
    if (behind_sinks >= 0) {
        const int page = behind_sinks / Window::page_tokens;
        return {a.window.block_table[a.window.table_entry(sequence, page % a.window.table_columns)],
                behind_sinks % Window::page_tokens, false};
    }
    if constexpr (!std::is_void_v<Sinks>)
        if (position >= 0)
            return {a.sinks.block_table[a.sinks.table_entry(sequence, position / Sinks::page_tokens)],
                    position % Sinks::page_tokens, true};
    return {};
}

template <class Window, class Sinks, class T>
__global__ void __launch_bounds__(store_threads)
    store_new_kernel(const __grid_constant__ new_token_args<Window, Sinks, T> a, int tasks) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size,
              task = static_cast<int>(blockIdx.x) * store_warps + static_cast<int>(threadIdx.x) / warp_size;
    launch_dependents();
    if (!a.early) wait_for_predecessor();
    const store_task what(task, a.window.kv_heads, tensors_of<Window>);
    const store_place place = task < tasks ? find_place(a, what.token) : store_place{};
    if (a.early) wait_for_predecessor();
    if (place.page < 0) return;
    unsigned bad = 0;
    const auto store_head = [&]<tensor Role, class Pair>(const cache_ref<Pair>& cache, const T* from) {
        token_row<Role, Pair, T> row;
        row.fetch(from, lane);
        std::byte* const block = cache.template block<Role>(place.page, what.head);
        if (!row.store(block, place.slot, lane)) bad = store_token<Role, Pair, T>(from, block, place.slot);
    };
    const auto store_in = [&]<class Pair>(const cache_ref<Pair>& cache) {
        if (!what.values)
            store_head.template operator()<tensor::key>(cache, a.k.at(what.token, what.head));
        else if constexpr (has_values<Pair>)
            store_head.template operator()<tensor::value>(cache, a.v.at(what.token, what.head));
    };
    if (std::is_void_v<Sinks> || !place.of_sinks)
        store_in(a.window);
    else
        store_in(a.sinks);
    if (bad != 0 && a.not_finite != nullptr) atomicAdd(a.not_finite, bad);
}

template <class Window, class Sinks, class T>
status store_new(const new_token_args<Window, Sinks, T>& a, cudaStream_t stream) noexcept {
    static_assert(full_precision<typename Window::keys> && full_precision<typename Window::values>,
                  "kvq::cuda::store_new_tokens: the window format must be full<T>");
    const auto& w = a.window;
    if (status s = check_ref(w, true); !s) return s;
    if (a.new_tokens < 1 || a.new_tokens > Window::page_tokens)
        return bad_value("%d new tokens a sequence, but pages have %d", a.new_tokens, Window::page_tokens);
    const long long tokens = static_cast<long long>(w.sequences) * a.new_tokens;
    const bool values = has_values<Window>;
    if (a.k.tokens != tokens || a.v.tokens != (values ? tokens : 0))
        return bad_value("k has %d and v %d tokens, but %d sequences have %d new ones each", a.k.tokens,
                         a.v.tokens, w.sequences, a.new_tokens);
    if (a.k.heads != w.kv_heads || a.k.dim != Window::head_dim ||
        (values && (a.v.heads != w.kv_heads || a.v.dim != Window::value_dim)))
        return bad_value("k is %d x %d and v %d x %d but the cache holds %d heads of %d and %d", a.k.heads,
                         a.k.dim, a.v.heads, a.v.dim, w.kv_heads, Window::head_dim, Window::value_dim);
    if (w.sequences == 0) return {};
    if (a.k.data == nullptr || (values && a.v.data == nullptr)) return bad_value("k or v is a null pointer");
    constexpr int tensors = tensors_of<Window>;
    if (tokens * w.kv_heads * tensors > 2147483647LL)
        return bad_value("%lld new tokens are too many", tokens);
    if constexpr (std::is_void_v<Sinks>) {
        if (w.first_token != 0)
            return bad_value("the window begins behind %d sinks, which are not given", w.first_token);
    } else {
        static_assert(full_precision<typename Sinks::keys> && full_precision<typename Sinks::values>,
                      "kvq::cuda::store_new_tokens: the format of sinks must be full<T>");
        static_assert(Sinks::head_dim == Window::head_dim && Sinks::value_dim == Window::value_dim,
                      "kvq::cuda::store_new_tokens: sinks and window must have the same head sizes");
        if (status s = check_ref(a.sinks, true); !s) return s;
        if (a.sinks.kv_heads != w.kv_heads || a.sinks.sequences != w.sequences || a.sinks.first_token != 0 ||
            a.sinks.table_columns * Sinks::page_tokens < w.first_token)
            return bad_value("the pages of sinks do not hold the first %d tokens of these sequences",
                             w.first_token);
    }
    const int tasks = static_cast<int>(tokens) * w.kv_heads * tensors;
    const dim3 blocks(static_cast<unsigned>(kvq::detail::ceil_div(tasks, store_warps)));
    return launch("storing new tokens", overlap::yes, store_new_kernel<Window, Sinks, T>, blocks,
                  store_threads, 0, stream, a, tasks);
}

}  // namespace detail

/// Stores the newest new_tokens tokens of every sequence (tokens[b] counts them already). k: [sequences *
/// new_tokens][kv_heads][head_dim], v likewise with value_dim, of latents 0 tokens; sequences of length 0 are
/// not there.
/// not_finite, if given, adds up NaN and infinities.
template <class Window, class Sinks, class T>
status store_new_tokens(const cache_ref<Window>& window, const cache_ref<Sinks>& sinks,
                        const token_view<const T>& k, const token_view<const T>& v, int new_tokens,
                        unsigned* not_finite, cudaStream_t stream, const store_options& o = {}) noexcept {
    return detail::store_new<Window, Sinks, T>({window, sinks, k, v, new_tokens, not_finite, o.early},
                                               stream);
}
/// The same for sequences without sinks.
template <class Window, class T>
status store_new_tokens(const cache_ref<Window>& window, const token_view<const T>& k,
                        const token_view<const T>& v, int new_tokens, unsigned* not_finite,
                        cudaStream_t stream, const store_options& o = {}) noexcept {
    return detail::store_new<Window, void, T>({window, {}, k, v, new_tokens, not_finite, o.early}, stream);
}

}}}  // namespace kvq::cuda
