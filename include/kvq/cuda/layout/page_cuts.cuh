// Quantized pages that show only some of their tokens: where their tokens lie, and at which positions.
//
//   paged position   of a token: first_token + page_tokens * its page + its number in the page. Lengths that kernels read end at the
//                    paged position of the next token, and so count the tokens that no span shows
//   position         of a token: how many tokens of the sequence stand before it
//   shift            of a page: the skipped tokens behind its first shown one. A query at position q sees the tokens at paged positions t
//                    with t + shift <= q + skipped, and through a window of w tokens those with t + shift > q + skipped - w
//
// A span of the page table (page/page_table.hpp) shows a part of its page after a trim into it; the next token begins a page. So all
// skipped tokens, those that quantized pages hold and no span shows, lie in pages before `end`, where both positions differ; behind them
// they differ by `skipped`. A sequence whose `end` is 0 has no such page, and kernels then look nothing up.
// Contract: every page shows a token. Sinks, the window and drafts show all of theirs.
#pragma once

#include <cstddef>

#include "../../core/bits.hpp"
#include "status.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// What a tile or warp tile of a page shows: its tokens [begin, end), and the page's shift.
struct shown_tokens {
    int begin, end, shift;
};

/// Of one sequence: the paged position behind its last page that is cut, and how many tokens are skipped.
struct sequence_cut {
    static constexpr int none = -(1 << 30);
    int end = none, skipped = 0;
};

}  // namespace detail

/// Of all sequences of a launch, in device memory.
struct page_cuts {
    /// [sequences]: pages from here on show all of their tokens. Null: so do all pages
    const int* end = nullptr;
    const int* skipped = nullptr;  ///< [sequences]: tokens that no span shows
    /// [sequences][columns][2], before `end`: the position of the page's first shown token; the number of
    /// this token in the page, plus 65536 times that of the first one behind the shown ones
    const int* shown = nullptr;
    int columns = 0, page_tokens = 1;
    int first_token = 0;  ///< paged position of the first page

    __device__ __forceinline__ detail::sequence_cut of(int sequence) const {
        if (end == nullptr) return {};
        const int pages = __ldcg(end + sequence);
        if (pages == 0) return {};
        return {first_token + pages * page_tokens, __ldcg(skipped + sequence)};
    }
    /// `count` tokens of one page, from this paged position on. Sinks lie before the first page.
    __device__ __forceinline__ detail::shown_tokens at(int sequence, const detail::sequence_cut& cut,
                                                       int paged, int count) const {
        if (paged >= cut.end) return {0, count, 0};
        if (paged < first_token) return {0, count, cut.skipped};
        const int page = (paged - first_token) / page_tokens,
                  in_page = paged - first_token - page * page_tokens;
        const int* const entry = shown + 2 * (static_cast<std::ptrdiff_t>(sequence) * columns + page);
        const int position = __ldg(entry), range = __ldg(entry + 1);
        const int begin = range & 0xffff, stop = static_cast<int>(static_cast<unsigned>(range) >> 16);
        return {kvq::detail::smaller(kvq::detail::larger(begin - in_page, 0), count),
                kvq::detail::smaller(kvq::detail::larger(stop - in_page, 0), count),
                cut.skipped - (paged - in_page + begin - position)};
    }
    /// The paged position of the first token that a query sees who would see those from `paged` on if none
    /// before it were skipped.
    __device__ __forceinline__ int first_seen(int sequence, int paged) const {
        const detail::sequence_cut cut = of(sequence);
        if (paged >= cut.end) return paged;
        const int position = paged - cut.skipped;
        if (position < first_token) return position;
        const int* const row = shown + 2 * static_cast<std::ptrdiff_t>(sequence) * columns;
        int low = 0, high = (cut.end - first_token) / page_tokens;
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
        return first_token + (low - 1) * page_tokens + kvq::detail::smaller(in_page, page_tokens);
    }
};

}}}  // namespace kvq::cuda
