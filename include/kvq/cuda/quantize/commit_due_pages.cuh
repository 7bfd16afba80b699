// Pages that a decode step pushes out of the recent window are quantized: one launch per step, for all
// layers.
//
//   due    pages [committed before the new tokens, committed with them) of every sequence (mixed_cache.cuh):
//          one at most, since new_tokens <= page_tokens. None of its tokens is new, since new_tokens <=
//          recent
//   job    (due page, layer, K or V, head): a thread block quantizes one block of a page. All blocks walk the
//          jobs of all layers
//
// Quantizing takes 10 to 100 us, for one page as for a hundred. A launch per layer would add this time to
// every layer, and in batches of many sequences some page is due in nearly every step; a launch for all
// layers adds it once per step. Due pages are found on the device from `tokens`: a captured graph stays valid
// while sequences grow. No table is written: the quantized table must name the page of a column by the time
// that it is committed (a negative entry: its tokens are lost).
// Contract: committed bytes are those of `requantize_pages`, which are the CPU's. The same launch again
// writes the same bytes.
#pragma once

#include <span>

#include "../layout/mixed_cache.cuh"
#include "pages.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// What differs from layer to layer.
struct committed_layer {
    std::byte *key_pages, *value_pages, *window_keys, *window_values;
    const std::uint16_t* key_plans;
    const float* key_feedback;
};
/// The same with lower planes.
struct committed_planes : committed_layer {
    layer_memory lower;
};
/// The same behind transforms.
struct turned_layer : committed_layer {
    device_transform keys, values;
};
/// Layers of a launch: as many as its parameters have room for.
template <class Pair>
inline constexpr int most_layers = pair_turns<Pair>  ? 24
                                   : has_lower<Pair> ? 40
                                                     : 64;

template <class Quantized, class Window>
struct commit_args {
    cache_ref<Quantized> quantized;  // of the first layer; tables and strides are the same in all
    cache_ref<Window> window;
    int layers, recent, new_tokens;
    const int* counts;
    unsigned* not_finite;  // of every layer
    std::conditional_t<pair_turns<Quantized>, turned_layer,
                       std::conditional_t<has_lower<Quantized>, committed_planes, committed_layer>>
        memory[most_layers<Quantized>];
};

/// The page of a sequence that is due, or -1.
template <class Quantized, class Window>
__device__ __forceinline__ int page_due(const commit_args<Quantized, Window>& a, int sequence) {
    const int tokens = a.window.tokens[sequence] - a.window.first_token;
    const int new_tokens = a.counts == nullptr ? a.new_tokens : a.counts[sequence];
    const int after = committed_pages(tokens, a.recent, Window::page_tokens);
    if (after == committed_pages(tokens - new_tokens, a.recent, Window::page_tokens) ||
        after > a.quantized.table_columns)
        return -1;
    return after - 1;
}

template <class Quantized, class Window>
__global__ void __launch_bounds__(page_quantizer<Quantized>::threads, page_quantizer<Quantized>::blocks)
    commit_due_kernel(const __grid_constant__ commit_args<Quantized, Window> a) {
    constexpr int threads = page_quantizer<Quantized>::threads, warps = threads / warp_size;
    extern __shared__ __align__(16) std::byte page_memory[];
    __shared__ due_list<threads> list;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size, lane = thread % warp_size;
    launch_dependents();
    wait_for_predecessor();
    const int heads = a.window.kv_heads, jobs_of_page = 2 * heads * a.layers;
    auto job = static_cast<long long>(blockIdx.x);
    for (int first = 0; first < a.window.sequences; first += threads) {
        const int b = first + thread;
        const bool due = b < a.window.sequences && page_due(a, b) >= 0;
        if (__syncthreads_or(due) == 0) continue;
        const unsigned mask = __ballot_sync(~0u, due);
        if (lane == 0) list.counts[warp] = __popc(mask);
        __syncthreads();
        int before = 0, all = 0;
        for (int w = 0; w < warps; ++w) {
            if (w < warp) before += list.counts[w];
            all += list.counts[w];
        }
        if (due) list.sequences[before + __popc(mask & ((1u << lane) - 1u))] = b;
        __syncthreads();
        const long long jobs = static_cast<long long>(all) * jobs_of_page;
        for (; job < jobs; job += gridDim.x) {
            // Values first: they take longer. Layers last: heads of a page lie side by side.
            const int i = static_cast<int>(job % jobs_of_page), sequence = list.sequences[job / jobs_of_page];
            const bool keys = i >= jobs_of_page / 2;
            const int layer = i / heads % a.layers, head = i % heads, page = page_due(a, sequence);
            const auto& memory = a.memory[layer];
            cache_ref<Quantized> to = a.quantized;
            cache_ref<Window> from = a.window;
            to.key_pages = memory.key_pages;
            to.value_pages = memory.value_pages;
            to.key_plans = memory.key_plans;
            if constexpr (codec<typename Quantized::keys>.several_widths()) to = to.of_plan(sequence);
            to.key_feedback = memory.key_feedback;
            if constexpr (has_lower<Quantized>) static_cast<layer_memory&>(to.lower) = memory.lower;
            if constexpr (has_transform<typename Quantized::keys>) to.own_keys.transform = memory.keys;
            if constexpr (has_transform<typename Quantized::values>) to.own_values.transform = memory.values;
            from.key_pages = memory.window_keys;
            from.value_pages = memory.window_values;
            const int from_page = from.block_table[from.table_entry(sequence, page % from.table_columns)],
                      to_page = to.block_table[to.table_entry(sequence, page)];
            if (from_page >= 0 && to_page >= 0)
                requantize_block(from, to, from_page, to_page, head, keys,
                                 a.not_finite == nullptr ? nullptr : a.not_finite + layer, page_memory);
            __syncthreads();
        }
        job -= jobs;
    }
}

template <class Pair>
bool same_tables(const cache_ref<Pair>& a, const cache_ref<Pair>& b) noexcept {
    return a.block_table == b.block_table && a.tokens == b.tokens && a.sequences == b.sequences &&
           a.table_columns == b.table_columns && a.first_token == b.first_token && a.kv_heads == b.kv_heads &&
           a.plan_numbers == b.plan_numbers && a.plan_words == b.plan_words &&
           a.key_page_bytes == b.key_page_bytes && a.value_page_bytes == b.value_page_bytes;
}

template <class Quantized, class Window>
status check_commit(std::span<const cache_ref<Quantized>> quantized,
                    std::span<const cache_ref<Window>> window, int recent, int new_tokens) noexcept {
    if (quantized.size() != window.size())
        return bad_value("%zu layers of quantized pages but %zu of window pages", quantized.size(),
                         window.size());
    for (std::size_t i = 0; i < quantized.size(); ++i) {
        if (status s = check_ref(quantized[i], true); !s) return s;
        if (status s = check_ref(window[i], true); !s) return s;
        if (!same_tables(quantized[i], quantized[0]) || !same_tables(window[i], window[0]))
            return bad_value("layer %zu has other tables, lengths or strides than layer 0", i);
    }
    if (quantized.empty()) return {};
    const auto& w = window[0];
    if (w.kv_heads != quantized[0].kv_heads || w.sequences != quantized[0].sequences ||
        w.first_token != quantized[0].first_token || w.tokens != quantized[0].tokens)
        return bad_value("window and quantized pages are of different caches");
    if (new_tokens < 1 || new_tokens > Window::page_tokens || new_tokens > recent)
        return bad_value("%d new tokens a sequence, but pages have %d and the recent window %d", new_tokens,
                         Window::page_tokens, recent);
    if (recent > most_tokens) return bad_value("the recent window is %d tokens", recent);
    const int needed = window_columns(recent, Window::page_tokens, new_tokens);
    if (w.sequences > 0 && w.table_columns < needed)
        return bad_value("a window of %d tokens needs %d pages of %d tokens, its table has %d columns",
                         recent, needed, Window::page_tokens, w.table_columns);
    return {};
}

}  // namespace detail

/// Quantizes the pages that fall behind the recent window with the newest new_tokens tokens of every sequence
/// (tokens[b] counts them already), from the window's ring to `quantized`. One entry of both lists for each
/// layer; layers have the same tables, lengths and strides and differ in their pages. Once a step: before the
/// attention of the first layer, before or after its store_new_tokens. not_finite, if given, has a number for
/// each layer, to which NaN and infinities are added. counts: [sequences] new tokens, in device memory, each
/// at most new_tokens. Null: new_tokens of every sequence.
template <class Quantized, class Window>
status commit_due_pages(std::span<const cache_ref<Quantized>> quantized,
                        std::span<const cache_ref<Window>> window, int recent, int new_tokens,
                        unsigned* not_finite, cudaStream_t stream, const int* counts = nullptr) noexcept {
    static_assert(detail::same_geometry<Window, Quantized>,
                  "kvq::cuda::commit_due_pages: both formats must have the same head sizes and page size");
    static_assert(full_precision<typename Window::keys> && full_precision<typename Window::values>,
                  "kvq::cuda::commit_due_pages: the window format must be full<T>");
    static_assert(detail::quantizes<Quantized>,
                  "kvq::cuda::commit_due_pages: encoders of your own, and encoders other than enclosing per "
                  "token, run on the CPU");
    if (status s = detail::check_commit(quantized, window, recent, new_tokens); !s) return s;
    if (quantized.empty() || window[0].sequences == 0) return {};
    using read = detail::read_pair<Window>;
    using coded = detail::quantized_pair<Quantized>;
    auto* const kernel = detail::commit_due_kernel<coded, read>;
    if (status s = detail::allow_shared_memory<coded, read>(kernel); !s) return s;
    int device = 0, multiprocessors = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (code != cudaSuccess) return detail::runtime_error(code, "asking for the device");
    using quantizer = detail::page_quantizer<coded, read>;
    constexpr int most_layers = detail::most_layers<coded>;
    for (std::size_t first = 0; first < quantized.size(); first += most_layers) {
        detail::commit_args<coded, read> a{detail::as_pair<coded>(quantized[0]),
                                           detail::as_pair<read>(window[0]),
                                           0,
                                           recent,
                                           new_tokens,
                                           counts,
                                           not_finite == nullptr ? nullptr : not_finite + first,
                                           {}};
        for (std::size_t i = first; i < quantized.size() && a.layers < most_layers; ++i) {
            auto& memory = a.memory[a.layers++];
            static_cast<detail::committed_layer&>(memory) = {
                quantized[i].key_pages, quantized[i].value_pages, window[i].key_pages,
                window[i].value_pages,  quantized[i].key_plans,   quantized[i].key_feedback};
            if constexpr (detail::has_lower<coded>) memory.lower = quantized[i].lower;
            if constexpr (detail::has_transform<typename coded::keys>)
                memory.keys = quantized[i].own_keys.transform;
            if constexpr (detail::has_transform<typename coded::values>)
                memory.values = quantized[i].own_values.transform;
        }
        const long long jobs = 2LL * a.layers * window[0].kv_heads * window[0].sequences,
                        resident = static_cast<long long>(multiprocessors) * quantizer::blocks;
        const dim3 blocks(static_cast<unsigned>(kvq::detail::smaller(jobs, resident)));
        if (status s = detail::launch("committing pages", detail::overlap::yes, kernel, blocks,
                                      quantizer::threads, quantizer::shared_bytes, stream, a);
            !s)
            return s;
    }
    return {};
}
/// The same for one layer.
template <class Quantized, class Window>
status commit_due_pages(const cache_ref<Quantized>& quantized, const cache_ref<Window>& window, int recent,
                        int new_tokens, unsigned* not_finite, cudaStream_t stream) noexcept {
    return commit_due_pages(std::span<const cache_ref<Quantized>>(&quantized, 1),
                            std::span<const cache_ref<Window>>(&window, 1), recent, new_tokens, not_finite,
                            stream);
}

}}}  // namespace kvq::cuda
