// New tokens of a decode step go to the 16-bit window, or to the sinks: one launch per layer, or none where
// attention stores them itself (decode/attend_new_tokens.cuh).
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

/// The newest `count` tokens of every sequence: k has [sequences * count][kv_heads][head_dim], v likewise
/// with value_dim. not_finite, if given, adds up NaN and infinities.
template <class T>
struct new_token_rows {
    token_view<const T> k, v;
    int count = 1;
    unsigned* not_finite = nullptr;
};

namespace detail {

/// Sinks: void where sequences have none.
template <class Window, class Sinks, class T>
struct new_token_args {
    cache_ref<Window> window;
    cache_ref<std::conditional_t<std::is_void_v<Sinks>, Window, Sinks>> sinks;
    new_token_rows<T> tokens;
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
/// position: of the sequence; where it has no sinks, none is below first_token.
template <class Window, class Sinks>
__device__ __forceinline__ store_place find_place(const cache_ref<Window>& window,
                                                  const cache_ref<Sinks>& sinks, int sequence, int position) {
    const int behind_sinks = position - window.first_token;
    if (behind_sinks >= 0) {
        const int page = behind_sinks / Window::page_tokens;
        return {window.block_table[window.table_entry(sequence, page % window.table_columns)],
                behind_sinks % Window::page_tokens, false};
    }
    if (position < 0) return {};
    return {sinks.block_table[sinks.table_entry(sequence, position / Sinks::page_tokens)],
            position % Sinks::page_tokens, true};
}

template <class Window, class Sinks, class T>
__global__ void __launch_bounds__(store_threads)
    store_new_kernel(const __grid_constant__ new_token_args<Window, Sinks, T> a, int tasks) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size,
              task = static_cast<int>(blockIdx.x) * store_warps + static_cast<int>(threadIdx.x) / warp_size;
    launch_dependents();
    if (!a.early) wait_for_predecessor();
    const store_task what(task, a.window.kv_heads, tensors_of<Window>);
    store_place place;
    if (task < tasks) {
        const int sequence = what.token / a.tokens.count;
        place = find_place(a.window, a.sinks, sequence,
                           a.window.tokens[sequence] - a.tokens.count + what.token % a.tokens.count);
    }
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
            store_head.template operator()<tensor::key>(cache, a.tokens.k.at(what.token, what.head));
        else if constexpr (has_values<Pair>)
            store_head.template operator()<tensor::value>(cache, a.tokens.v.at(what.token, what.head));
    };
    if (std::is_void_v<Sinks> || !place.of_sinks)
        store_in(a.window);
    else
        store_in(a.sinks);
    if (bad != 0 && a.tokens.not_finite != nullptr) atomicAdd(a.tokens.not_finite, bad);
}

template <class Window, class Sinks, class T>
status check_new_tokens(const new_token_args<Window, Sinks, T>& a) noexcept {
    static_assert(full_precision<typename Window::keys> && full_precision<typename Window::values>,
                  "kvq::cuda::store_new_tokens: the window format must be full<T>");
    const auto& w = a.window;
    const auto& [k, v, count, not_finite] = a.tokens;
    if (status s = check_ref(w, true); !s) return s;
    if (count < 1 || count > Window::page_tokens)
        return bad_value("%d new tokens a sequence, but pages have %d", count, Window::page_tokens);
    const long long tokens = static_cast<long long>(w.sequences) * count;
    const bool values = has_values<Window>;
    if (k.tokens != tokens || v.tokens != (values ? tokens : 0))
        return bad_value("k has %d and v %d tokens, but %d sequences have %d new ones each", k.tokens,
                         v.tokens, w.sequences, count);
    if (k.heads != w.kv_heads || k.dim != Window::head_dim ||
        (values && (v.heads != w.kv_heads || v.dim != Window::value_dim)))
        return bad_value("k is %d x %d and v %d x %d but the cache holds %d heads of %d and %d", k.heads,
                         k.dim, v.heads, v.dim, w.kv_heads, Window::head_dim, Window::value_dim);
    if (w.sequences == 0) return {};
    if (k.data == nullptr || (values && v.data == nullptr)) return bad_value("k or v is a null pointer");
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
    return {};
}

template <class Window, class Sinks, class T>
status store_new(const new_token_args<Window, Sinks, T>& a, cudaStream_t stream) noexcept {
    if (status s = check_new_tokens(a); !s || a.window.sequences == 0) return s;
    const int tasks = a.tokens.k.tokens * a.window.kv_heads * tensors_of<Window>;
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
    return detail::store_new<Window, Sinks, T>({window, sinks, {k, v, new_tokens, not_finite}, o.early},
                                               stream);
}
/// The same for sequences without sinks.
template <class Window, class T>
status store_new_tokens(const cache_ref<Window>& window, const token_view<const T>& k,
                        const token_view<const T>& v, int new_tokens, unsigned* not_finite,
                        cudaStream_t stream, const store_options& o = {}) noexcept {
    return detail::store_new<Window, void, T>({window, {}, {k, v, new_tokens, not_finite}, o.early}, stream);
}

}}}  // namespace kvq::cuda
