// A sequence as it is: sinks and recent window in 16 bit, everything else in one or more quantized formats.
//
//   auto cache = kvq::cuda::make_mixed(recent, behind_window(quantized), in_window(window),
//                                      sink_tokens(sinks, 4));
//
// One cache_ref per format: pages, strides, a block table. A part states which pages of a sequence it holds,
// so no table is searched:
//
//   all             those that its table names, up to the end of the sequence or of the table (sinks; pages
//                   that were requantized)
//   behind_window   pages [0, committed)
//   in_window       pages from `committed` on. The table is a ring: page i stands in column i % table_columns
//   committed       = (tokens - first_token - recent) / page_tokens pages lie wholly behind the recent window
//
// `first_page` and `end_page` cut a part further, per sequence: formats that follow each other (step down)
// cost nothing for the pages of the others. Negative entries of a table are skipped, as everywhere. Counts
// come from `tokens`, which kernels read on the device: a captured graph stays valid while sequences grow,
// and no table changes when a page is committed. Spans may show a part of a quantized page (page_cuts.cuh):
// `tokens` then is a paged length, and positions count the tokens that spans show.
// Contract: every token is named by one part at most; parts have the same tokens, sequences, kv heads, head
// sizes and cuts.
#pragma once

#include <utility>

#include "cache_ref.cuh"
#include "page_cuts.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// Which pages of a sequence a part holds.
enum class page_range { all, behind_window, window };

/// The pages of one format.
template <class Pair>
struct cache_part {
    using pair_type = Pair;
    using part_type = cache_part;
    cache_ref<Pair> cache;
    page_range range = page_range::all;
    const int* first_page =
        nullptr;  // [sequences], device memory: pages before it are not of this format. Null: 0
    const int* end_page = nullptr;  // [sequences]: nor are pages from here on. Null: as many as there are
    int capacity = -1;  // it holds so many tokens of a sequence at most; negative: as many as its table names
    int span = -1;      // and has so many from first_page to end_page; negative: not known (prefill_scratch)
    page_cuts cuts = {};  // pages that are cut: the same for all parts
};

/// The first tokens of every sequence. In pages of 16 tokens in the window's 16-bit format they cost least:
/// attention reads them with the window's instructions.
template <class Pair>
struct sink_part : cache_part<Pair> {};

namespace detail {

template <int I, class X>
struct numbered {
    X value;
};
template <class Numbers, class... Xs>
struct numbered_list;
template <int... I, class... Xs>
struct numbered_list<std::integer_sequence<int, I...>, Xs...> : numbered<I, Xs>... {};
/// Objects of different types, by number; also in kernels' parameters.
template <class... Xs>
struct object_list : numbered_list<std::make_integer_sequence<int, sizeof...(Xs)>, Xs...> {
    static constexpr int count = sizeof...(Xs);
};
template <int I, class X>
KVQ_HD constexpr X& get(numbered<I, X>& list) noexcept {
    return list.value;
}
template <int I, class X>
KVQ_HD constexpr const X& get(const numbered<I, X>& list) noexcept {
    return list.value;
}

/// Calls f with every object, on the host.
template <class... Xs, class F>
void for_each_part(const object_list<Xs...>& list, F&& f) {
    [&]<int... I>(std::integer_sequence<int, I...>) { (f(get<I>(list)), ...); }
    (std::make_integer_sequence<int, sizeof...(Xs)>{});
}

template <class Pair>
cache_part<Pair> as_part(const cache_ref<Pair>& cache) noexcept {
    return {cache};
}
template <class Part>
requires requires {
    typename Part::pair_type;
    typename Part::part_type;
}
Part as_part(const Part& part) noexcept { return part; }

/// Parts and mixes as kernels read them (read_pair).
template <class To, class Pair>
cache_part<To> as_pair(const cache_part<Pair>& p) noexcept {
    return {as_pair<To>(p.cache), p.range, p.first_page, p.end_page, p.capacity, p.span, p.cuts};
}
template <class Pair>
cache_part<read_pair<Pair>> read_part(const cache_part<Pair>& p) noexcept {
    return as_pair<read_pair<Pair>>(p);
}
template <class Pair>
sink_part<read_pair<Pair>> read_part(const sink_part<Pair>& p) noexcept {
    return {as_pair<read_pair<Pair>>(static_cast<const cache_part<Pair>&>(p))};
}

template <class Part>
inline constexpr bool is_sink_part = false;
template <class Pair>
inline constexpr bool is_sink_part<sink_part<Pair>> = true;

}  // namespace detail

/// Parts: cache_part or sink_part, of one format each.
template <class... Parts>
struct mixed_cache_ref {
    detail::object_list<Parts...> parts;
    int recent = 0;  // tokens at the end of a sequence that stay in 16 bit at least
};

template <class Pair>
cache_part<Pair> behind_window(const cache_ref<Pair>& cache) noexcept {
    return {cache, page_range::behind_window};
}
template <class Pair>
cache_part<Pair> in_window(const cache_ref<Pair>& cache) noexcept {
    return {cache, page_range::window};
}
/// The first `sinks` tokens of every sequence, in pages that may have room for more.
template <class Pair>
sink_part<Pair> sink_tokens(const cache_ref<Pair>& cache, int sinks) noexcept {
    return {{cache, page_range::all, nullptr, nullptr, sinks}};
}
/// Parts are made by behind_window(), in_window() and sink_tokens(); a cache_ref stands for all pages that
/// its table names.
template <class... Parts>
auto make_mixed(int recent, const Parts&... parts) noexcept {
    const auto make = [&]<class... Made>(const Made&... made) {
        return mixed_cache_ref<Made...>{{{{made}...}}, recent};
    };
    return make(detail::as_part(parts)...);
}

namespace detail {

template <class Mix>
inline constexpr bool is_mix = false;
template <class... Parts>
inline constexpr bool is_mix<mixed_cache_ref<Parts...>> = true;

template <class... Parts>
auto read_mix(const mixed_cache_ref<Parts...>& mix) noexcept {
    return [&]<int... I>(std::integer_sequence<int, I...>) {
        return make_mixed(mix.recent, read_part(get<I>(mix.parts))...);
    }
    (std::make_integer_sequence<int, sizeof...(Parts)>{});
}
template <class Pair, class First>
status check_part(const cache_part<Pair>& part, const cache_ref<First>& first, int recent) noexcept {
    const cache_ref<Pair>& c = part.cache;
    if (status s = check_ref(c, true); !s) return s;
    if (c.tokens != first.tokens || c.sequences != first.sequences || c.kv_heads != first.kv_heads)
        return bad_value("the parts of a mixed cache are of different sequences");
    const int needed = window_columns(recent, Pair::page_tokens, 0);
    if (part.range == page_range::window && c.sequences > 0 && c.table_columns < needed)
        return bad_value("a window of %d tokens needs %d pages of %d tokens, its table has %d columns",
                         recent, needed, Pair::page_tokens, c.table_columns);
    return {};
}

/// Parts that the recent window divides must have pages of the same size behind the same sinks.
template <class... Parts>
status check_mix(const mixed_cache_ref<Parts...>& cache) noexcept {
    if (cache.recent < 0 || cache.recent > most_tokens)
        return bad_value("the recent window is %d tokens", cache.recent);
    status result;
    int page_tokens = 0, first_token = 0;
    const auto check = [&]<class Pair>(const cache_part<Pair>& part) {
        if (result) result = check_part(part, get<0>(cache.parts).cache, cache.recent);
        if (!result || part.range == page_range::all) return;
        if (page_tokens != 0 && (page_tokens != Pair::page_tokens || first_token != part.cache.first_token))
            result = bad_value("window and quantized pages of a mixed cache have other sizes or sinks");
        page_tokens = Pair::page_tokens;
        first_token = part.cache.first_token;
    };
    static_assert((0 + ... + (is_sink_part<Parts> ? 1 : 0)) <= 1,
                  "kvq::cuda: the sinks of a mixed cache are one part");
    for_each_part(cache.parts, [&]<class Part>(const Part& part) {
        if (result && is_sink_part<Part> && (part.cache.first_token != 0 || part.capacity < 0))
            result = bad_value("%d sinks behind position %d", part.capacity, part.cache.first_token);
    });
    for_each_part(cache.parts, check);
    return result;
}

}  // namespace detail
}}}  // namespace kvq::cuda
