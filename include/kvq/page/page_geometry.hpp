// How the tokens of a layer are divided into pages: the formulas that the CPU's and the GPU's caches share.
//
//   sinks     tokens [0, sinks)                                        16 bit for good
//   page i    tokens [first_token(i), first_token(i + 1))              committed (quantized) from
//                                                                      commit_at(i) tokens on
//   window    the last `recent` tokens, and those of their pages       16 bit
//
//   left      pages that no query sees any more (key_window.hpp), from the next one on or after a trim by
//             `rollback` tokens: freed. Sinks stay
//
// A layer that was cut has its pages at other positions: page_table.hpp. Contract: 0 <= sinks, 0 <= recent, 1
// <= page_tokens, and their sums with a number of tokens fit in an int.
#pragma once

#include <cstddef>
#include <span>

#include "../core/bits.hpp"
#include "key_window.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// Division of tokens into pages in a layer without cuts.
struct page_geometry {
    /// 16-bit pages that are not full have memory for a multiple of 32 tokens, so that short sequences stay
    /// small.
    static constexpr int window_step = 32;
    /// Drafted tokens that may wait in a layer; they share a page.
    static constexpr int most_drafted = 64;

    int sinks = 0;
    int recent = 0;
    int page_tokens = 0;
    key_window window = {};
    int commits_from = 0;  ///< no page is committed before the layer has so many tokens (cache/key_plan.hpp)

    /// The first token behind the sinks that a layer of n tokens needs: the last token that a trim by
    /// `rollback` tokens leaves sees it.
    constexpr int first_needed(int n, int rollback) const noexcept {
        return window.first_seen(detail::larger(0, n - 1 - rollback));
    }
    /// The most tokens of a page: 16-bit pages of sinks and of drafts may be longer than the others.
    constexpr int longest_page() const noexcept {
        return detail::larger(detail::larger(page_tokens, sinks), most_drafted);
    }
    /// Number of pages (behind the sinks) of n tokens.
    constexpr int pages(int n) const noexcept {
        return n <= sinks ? 0 : detail::ceil_div(n - sinks, page_tokens);
    }
    /// Number of spans of n tokens: the pages, and the sinks.
    constexpr int spans(int n) const noexcept { return pages(n) + (sinks > 0 && n > 0 ? 1 : 0); }
    /// Number of committed pages of n tokens: pages that are whole and behind the recent window.
    constexpr int committed(int n) const noexcept {
        return n <= sinks + recent || n < commits_from ? 0 : (n - sinks - recent) / page_tokens;
    }
    /// Number of tokens at which page i is committed.
    constexpr int commit_at(int i) const noexcept {
        return detail::larger(commits_from, sinks + (i + 1) * page_tokens + recent);
    }
    constexpr int first_token(int i) const noexcept { return sinks + i * page_tokens; }
    /// Capacity of the pages of a span.
    constexpr int capacity(bool of_sinks) const noexcept { return of_sinks ? sinks : page_tokens; }

    /// Tokens for which a new 16-bit page gets memory, if it holds `used` tokens and has room for `room`.
    constexpr int window_tokens(int used, int room) const noexcept {
        return static_cast<int>(detail::smaller(
            static_cast<long long>(room),
            detail::round_up(static_cast<long long>(used), static_cast<long long>(window_step))));
    }
};

namespace detail {

/// Number of spans that a layer reserves memory for when it must hold n.
constexpr std::size_t table_capacity(std::size_t n) noexcept {
    std::size_t capacity = 16;
    while (capacity < n) capacity *= 2;
    return n == 0 ? 0 : capacity;
}

/// Pages of K or V of a layer that are alike.
struct alike_pages {
    int count, format, tokens;
    bool copies = false;  ///< 16-bit copies for rollback
};
/// Committed pages have changed to this format since, the first `pages` of them.
struct changed_pages {
    int pages, format;
};

/// Calls f(alike_pages) for the pages of a layer of n tokens without cuts, whose pages behind the sinks begin
/// at token `first`, are committed to format `target`, and have changed since: in the order of `changes`,
/// always fewer of them. Pages that have left are not there. Estimates count by it.
template <class F>
constexpr void for_each_alike(const page_geometry& g, int first, int n, int rollback, int target,
                              std::span<const changed_pages> changes, F&& f) {
    if (g.sinks > 0 && n > 0) f(alike_pages{1, 0, g.window_tokens(smaller(n, g.sinks), g.sinks)});
    const page_geometry behind{first, g.recent, g.page_tokens, {}, g.commits_from};
    const int pages = behind.pages(n), committed = behind.committed(n);
    // Pages from here on have copies, if they were ever quantized: a trim within `rollback` may restore them.
    const int in_reach = behind.committed(n - rollback);
    const int freed = larger(0, (g.first_needed(n, rollback) - first) / g.page_tokens);
    int format = target, left = committed;
    const auto take = [&](int older) {
        f(alike_pages{larger(0, left - larger(older, freed)), format, g.page_tokens});
        if (target != 0 || format != 0)
            f(alike_pages{larger(0, left - larger(older, larger(in_reach, freed))), 0, g.page_tokens, true});
        left = older;
    };
    for (const changed_pages& c : changes) {
        take(c.pages);
        format = c.format;
    }
    take(0);
    if (pages == committed) return;
    f(alike_pages{larger(0, pages - larger(committed, freed) - 1), 0, g.page_tokens});
    f(alike_pages{1, 0, g.window_tokens(n - behind.first_token(pages - 1), g.page_tokens)});
}

}  // namespace detail
}}  // namespace kvq
