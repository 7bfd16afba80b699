// One layer of one sequence, seen as a list of pages: what attention walks.
//
// Entry 0 holds the sinks (if there are any), the others `page_tokens` tokens each; the last may not be full.
#pragma once

#include "page.hpp"

namespace kvq::inline v0_1 {

/// How tokens fall into pages.
struct page_geometry {
    int sinks = 0;
    int recent = 0;
    int page_tokens = 0;

    /// Pages (behind the sinks) that n tokens touch.
    constexpr int pages(int n) const noexcept {
        return n <= sinks ? 0 : detail::ceil_div(n - sinks, page_tokens);
    }
    /// Pages that are coded once n tokens are there: whole and behind the recent window.
    constexpr int committed(int n) const noexcept {
        return n <= sinks + recent ? 0 : (n - sinks - recent) / page_tokens;
    }
    /// Number of tokens at which page i is coded.
    constexpr int commit_at(int i) const noexcept { return sinks + (i + 1) * page_tokens + recent; }
    constexpr int first_token(int i) const noexcept { return sinks + i * page_tokens; }
};

struct layer_pages {
    /// A run of tokens that lies in one key page and one value page.
    struct entry {
        int first_token;
        int tokens;
        const page* keys;
        const page* values;
    };

    page_geometry geometry;
    int tokens = 0;
    const page* sink_keys = nullptr;
    const page* sink_values = nullptr;
    const page_ref* keys = nullptr;
    const page_ref* values = nullptr;

    int entries() const noexcept {
        return (geometry.sinks > 0 && tokens > 0 ? 1 : 0) + geometry.pages(tokens);
    }

    entry at(int index) const noexcept {
        const int i = geometry.sinks > 0 ? index - 1 : index;
        if (i < 0) return {0, detail::smaller(tokens, geometry.sinks), sink_keys, sink_values};
        const int first = geometry.first_token(i);
        return {first, detail::smaller(geometry.page_tokens, tokens - first), keys[i].get(), values[i].get()};
    }
};

}  // namespace kvq::inline v0_1
