// A decode step of one layer in one launch: new tokens are stored, then attended.
//
//   kvq::cuda::attend(mix, new_token_rows<T>{k, v}, q, out, options, workspace, bytes, stream);
//
// A launch of its own for the tokens (store_new_tokens.cuh) costs what stands between two launches: one waits
// for the end of the other, and looks up lengths and pages again.
// Contract: bytes of pages and outputs are those of store_new_tokens() and attend(), one after the other.
#pragma once

#include <initializer_list>

#include "attend.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// Where the new tokens of a mix go.
template <class... Parts>
struct new_token_places {
    /// The number of the only part of this kind; -1: there is none, or more.
    static constexpr int only(std::initializer_list<bool> is) noexcept {
        int found = -1, i = 0;
        for (const bool yes : is) {
            if (yes) found = found == -1 ? i : -2;
            ++i;
        }
        return kvq::detail::larger(found, -1);
    }
    template <class Part>
    static constexpr bool is_full =
        full_precision<typename Part::pair_type::keys>&& full_precision<typename Part::pair_type::values>;
    static constexpr int sinks = only({is_sink_part<Parts>...}),
                         window = only({(is_full<Parts> && !is_sink_part<Parts>)...});
    template <int I>
    using part = std::tuple_element_t<static_cast<std::size_t>(I), std::tuple<Parts...>>;
    /// Does the window's kernel read the sinks as well?
    static constexpr bool joined = [] {
        if constexpr (window >= 0) {
            using pair = read_pair<typename part<window>::pair_type>;
            if constexpr (sinks < 0)
                return reads_sinks<pair>;
            else
                return are_sinks_of<decltype(read_part(part<sinks>{})), pair>;
        }
        return false;
    }();
    template <class T>
    static auto arguments(const mixed_cache_ref<Parts...>& cache, const new_token_rows<T>& rows,
                          bool early) noexcept {
        const auto& in = get<window>(cache.parts).cache;
        using pair = typename part<window>::pair_type;
        if constexpr (sinks < 0)
            return new_token_args<pair, void, T>{in, {}, rows, early};
        else
            return new_token_args<pair, typename part<sinks>::pair_type, T>{in, get<sinks>(cache.parts).cache,
                                                                            rows, early};
    }
};

}  // namespace detail

/// store_new_tokens() and attend() of a mix, with the checks of both: in one launch where window and sinks
/// have pages that are copied line by line (window_copy.cuh), in two otherwise. The window holds the new
/// tokens (recent >= rows.count), pages that are due have been committed, and all new tokens are queries.
template <class T, class... Parts, class Score = unmodified>
status attend(const mixed_cache_ref<Parts...>& cache, const new_token_rows<T>& rows,
              const token_view<const T>& q, const token_view<T>& out, const attention_options& options,
              void* workspace, std::size_t workspace_bytes, cudaStream_t stream,
              const Score& score = {}) noexcept {
    using places = detail::new_token_places<Parts...>;
    static_assert(places::window >= 0,
                  "kvq::cuda::attend: new tokens are for a mix with one window and its sinks in 16 bit");
    const auto& window = detail::get<places::window>(cache.parts);
    if (window.range != page_range::window || cache.recent < rows.count)
        return detail::bad_value("%d new tokens a sequence, but the recent window has %d", rows.count,
                                 window.range != page_range::window ? 0 : cache.recent);
    if (options.query_tokens < rows.count)
        return detail::bad_value("%d new tokens a sequence, but queries of %d", rows.count,
                                 options.query_tokens);
    const auto args = places::template arguments<T>(cache, rows, options.early);
    if (status s = detail::check_new_tokens(args); !s) return s;
    if constexpr (places::joined) {
        return detail::attend_mix<T>(detail::read_mix(cache), rows, q, out, options, workspace,
                                     workspace_bytes, stream, score);
    } else {
        if (status s = detail::store_new(args, stream); !s) return s;
        return attend(cache, q, out, options, workspace, workspace_bytes, stream, score);
    }
}

}}}  // namespace kvq::cuda
