// One layer of one sequence as spans of tokens: the only place that stores the positions of a page's tokens.
//
//   span
//     a key page and a value page that hold the same tokens: positions [first_token, first_token + tokens),
//             which are tokens [skip, skip + tokens) of both pages
//   spans     in the order of their positions, without gaps
//   shift     rotary position of a span's keys now, minus the one at which they were rotated
//             (attention/rotary.hpp)
//
// A new span has room for a page of tokens. A trim into a quantized page leaves a span that shows fewer
// tokens than its page holds; the next tokens begin a new span. A removal from the middle of a page leaves
// two spans that share the page. So positions come from the spans, not from a fixed grid.
// Contract: tokens >= 1, skip + tokens <= room; attention, saving, requantizing and all other loops over
// pages read spans.
#pragma once

#include <array>
#include <cstdint>

#include "page.hpp"
#include "page_geometry.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// A run of tokens and the two pages that hold it.
struct page_span {
    int first_token = 0;  ///< position of its first token
    int tokens = 0;       ///< shown tokens
    int room = 0;  ///< tokens of its pages that may be shown: all of them, or fewer if it was closed early
    std::array<page_ref, 2> pages;   ///< K, V; a latent layer has no pages of V
    std::array<page_ref, 2> copies;  ///< 16-bit copies of the committed pages, for an exact trim; or null
    int skip = 0;                    ///< tokens of both pages before the first shown one
    bool sinks = false;              ///< its pages have room for the sinks, and are never quantized
    std::int64_t shift = 0;          ///< see above

    int end() const noexcept { return first_token + tokens; }
    bool full() const noexcept { return skip + tokens == room; }
    /// Does the span hold the 16-bit values of tensor `role`?
    bool has_window_page(std::size_t role) const noexcept {
        return copies[role] || !pages[role] || pages[role]->format == 0;
    }
};

/// The pages of one layer, as attention reads them. Valid until the sequence changes.
struct layer_pages {
    /// A span for readers.
    struct entry {
        int first_token;
        int tokens;
        const page* keys;
        const page* values;  ///< of a layer without pages of values, which reads its keys: `keys`
        int skip;
        std::int64_t shift;
    };

    page_geometry geometry;
    int tokens = 0;
    const page_span* spans = nullptr;
    int count = 0;          ///< number of spans
    bool of_a_pool = true;  ///< false: some pages are in memory of the caller (cache/page_list.hpp)

    /// The data of a page, in a pool without a look at its header.
    const std::byte* data(const page& p) const noexcept;
    int entries() const noexcept { return count; }
    entry at(int index) const noexcept;
    /// The first entry whose first token is at or after `token`. O(log entries)
    int lower_bound(int token) const noexcept;
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "layer_pages-inl.hpp"
#endif
