// Which tokens of a sequence a part of a mixed cache holds (mixed_cache.cuh), on the device.
#pragma once

#include "mixed_cache.cuh"
#include "unpack_codes.cuh"
#include "window_columns.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// Tokens [first, end) of a part, counted from its first one; `first` begins a page or lies a whole number of
/// tiles behind one that does.
struct token_range {
    int first, end;
    KVQ_HD constexpr int tiles(int tile) const noexcept {
        return kvq::detail::ceil_div(kvq::detail::larger(0, end - first), tile);
    }
};
/// Those that it holds of sequence b, of `length` tokens.
template <class Pair>
__device__ __forceinline__ token_range held_tokens(const cache_part<Pair>& part, int b, int length,
                                                   int recent) {
    constexpr int page = Pair::page_tokens;
    const int behind = length - part.cache.first_token;
    const int named = part.range == page_range::window ? most_tokens : part.cache.table_columns * page;
    int from = 0, end = kvq::detail::smaller(behind, part.capacity < 0 ? named : part.capacity);
    if (part.range != page_range::all) {
        const int committed = committed_pages(behind, recent, page);
        if (part.range == page_range::window)
            from = committed;
        else
            end = kvq::detail::smaller(end, committed * page);
    }
    if (part.first_page != nullptr) from = kvq::detail::larger(from, __ldg(part.first_page + b));
    if (part.end_page != nullptr) end = kvq::detail::smaller(end, __ldg(part.end_page + b) * page);
    return {from * page, end};
}
/// Calls f(part) for every part, in order.
template <class Args, class F>
__device__ __forceinline__ void each_part(const Args& a, F&& f) {
    static_for<decltype(a.parts)::count>([&](auto number) { f(get<decltype(number)::value>(a.parts)); });
}

}}}}  // namespace kvq::cuda::detail
