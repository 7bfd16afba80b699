// Quantized pages that show only some of their tokens: where their tokens lie, and at which positions.
//
//   paged position   of a token: first_token + page_tokens * its page + its number in the page. Lengths that
//                    kernels read end at the paged position of the next token, and so count the tokens that
//                    no span shows
//   position         of a token: how many tokens of the sequence stand before it
//   shift            of a page: the skipped tokens behind its first shown one. A query at position q sees the
//                    tokens at paged positions t with t + shift <= q + skipped, and through a window of w
//                    tokens those with t + shift > q + skipped - w
//
// A span of the page table (page/page_table.hpp) shows a part of its page after a trim into it; the next
// token begins a page. So all skipped tokens, those that quantized pages hold and no span shows, lie in pages
// before `end`, where both positions differ; behind them they differ by `skipped`. A sequence whose `end` is
// 0 has no such page, and kernels then look nothing up.
// Contract: every page shows a token. Sinks, the window and drafts show all of theirs.
#pragma once

#include "../../config.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

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
};

}}}  // namespace kvq::cuda
