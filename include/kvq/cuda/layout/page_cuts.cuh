// Reading where the tokens of cut pages lie (page_cuts.hpp), on the device.
#pragma once

#include <cstddef>

#include "../../core/bits.hpp"
#include "launch.cuh"
#include "page_cuts.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// What a tile or warp tile of a page shows: its tokens [begin, end), and the page's shift.
struct shown_tokens {
    int begin, end, shift;
};

/// Of one sequence: the paged position behind its last page that is cut, and how many tokens are skipped.
struct sequence_cut {
    static constexpr int none = -(1 << 30);
    int end = none, skipped = 0;
};

__device__ __forceinline__ sequence_cut cut_of(const page_cuts& c, int sequence) {
    if (c.end == nullptr) return {};
    const int pages = __ldcg(c.end + sequence);
    if (pages == 0) return {};
    return {c.first_token + pages * c.page_tokens, __ldcg(c.skipped + sequence)};
}
/// `count` tokens of one page, from this paged position on. Sinks lie before the first page.
__device__ __forceinline__ shown_tokens shown_at(const page_cuts& c, int sequence, const sequence_cut& cut,
                                                 int paged, int count) {
    if (paged >= cut.end) return {0, count, 0};
    if (paged < c.first_token) return {0, count, cut.skipped};
    const int page = (paged - c.first_token) / c.page_tokens,
              in_page = paged - c.first_token - page * c.page_tokens;
    const int* const entry = c.shown + 2 * (static_cast<std::ptrdiff_t>(sequence) * c.columns + page);
    const int position = __ldg(entry), range = __ldg(entry + 1);
    const int begin = range & 0xffff, stop = static_cast<int>(static_cast<unsigned>(range) >> 16);
    return {kvq::detail::smaller(kvq::detail::larger(begin - in_page, 0), count),
            kvq::detail::smaller(kvq::detail::larger(stop - in_page, 0), count),
            cut.skipped - (paged - in_page + begin - position)};
}
/// shown_at(), but a call, for what is rare: a launch fetches all of its instructions.
template <int = 0>
__device__ __noinline__ shown_tokens call_shown_at(const page_cuts& cuts, int sequence,
                                                   const sequence_cut& cut, int paged, int count) {
    return shown_at(cuts, sequence, cut, paged, count);
}
/// The paged position of the first token that a query sees who would see those from `paged` on if none
/// before it were skipped.
__device__ __forceinline__ int first_seen(const page_cuts& c, int sequence, int paged) {
    const sequence_cut cut = cut_of(c, sequence);
    if (paged >= cut.end) return paged;
    const int position = paged - cut.skipped;
    if (position < c.first_token) return position;
    const int* const row = c.shown + 2 * static_cast<std::ptrdiff_t>(sequence) * c.columns;
    int low = 0, high = (cut.end - c.first_token) / c.page_tokens;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (__ldcg(row + 2 * middle) <= position)
            low = middle + 1;
        else
            high = middle;
    }
    // In page low - 1, or behind what it shows. (Words that are just being written may not fit together.)
    low = kvq::detail::larger(low, 1);
    const int begin = __ldcg(row + 2 * (low - 1) + 1) & 0xffff,
              in_page = begin + position - __ldcg(row + 2 * (low - 1));
    return c.first_token + (low - 1) * c.page_tokens + kvq::detail::smaller(in_page, c.page_tokens);
}

}}}  // namespace kvq::cuda::detail
