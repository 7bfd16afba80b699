// What the host knows of a sequence on the device: its length, and the numbers of its pages. Plain C++: no page is touched here.
//
//   sinks     [0, sinks)                          16 bit, in pages of 16 tokens
//   page i    [sinks + i P, sinks + (i + 1) P)    quantized for i < committed(); else 16 bit, in column i % ring of the window
//
// All layers have the same page numbers. A page is committed when it is whole and `recent` tokens follow it, as on the CPU. The ring is
// wide enough for the 16-bit values of pages from first_copy on: those that a trim within `rollback` brings back. So such a trim is
// arithmetic, and the page is committed again with the same bytes. A page that was committed earlier stays quantized for good; a trim
// may end where it ends, but not inside it.
// Contract: the same pages are quantized as in a CPU cache that did the same (cache/layer_track.hpp).
#pragma once

#include <utility>
#include <vector>

#include "../../core/bits.hpp"
#include "free_pages.hpp"

namespace kvq::inline KVQ_TAGGED::cuda::detail {

/// How tokens are divided into pages.
struct page_rules {
    int sinks = 0, recent = 0, rollback = 0, page_tokens = 0;
    int ring = 0;  ///< columns of the window's table

    static constexpr int sink_page_tokens = 16;

    /// Pages behind the sinks that n tokens touch.
    constexpr int pages(int n) const noexcept {
        return n <= sinks ? 0 : kvq::detail::ceil_div(n - sinks, page_tokens);
    }
    /// Pages that are due in a sequence of n tokens.
    constexpr int due(int n) const noexcept {
        return n <= sinks + recent ? 0 : (n - sinks - recent) / page_tokens;
    }
    constexpr int first_token(int page) const noexcept { return sinks + page * page_tokens; }
    constexpr int sink_pages(int n) const noexcept {
        return kvq::detail::ceil_div(kvq::detail::smaller(n, sinks), sink_page_tokens);
    }
};

/// A quantized page: its format, and its number in that format's pool.
struct held_page {
    int format = 0, number = 0;
};

struct sequence_pages {
    int tokens = 0;
    int drafted = 0;     ///< tokens behind them that wait for keep(), in the window and in sinks
    int first_copy = 0;  ///< committed pages from here on have their 16-bit values in the ring
    int target = 0;      ///< the format of pages that are committed from now on
    std::vector<held_page> quantized;  ///< the committed pages
    std::vector<int> window;           ///< numbers by column of the ring, -1: none yet
    std::vector<int> sinks;            ///< numbers of pages of 16 tokens

    int committed() const noexcept { return static_cast<int>(quantized.size()); }
    /// Committed pages after a growth to n tokens.
    int committed_at(int n, const page_rules& r) const noexcept {
        return kvq::detail::larger(committed(), r.due(n));
    }
    /// Ring columns without a page that a growth to n tokens writes to.
    int missing_columns(int n, const page_rules& r) const noexcept {
        int missing = 0;
        for_each_written(n, r, [&](int column) { missing += window[static_cast<std::size_t>(column)] < 0; });
        return missing;
    }
    /// Calls f(column) once for every column of the ring that a growth to n tokens writes to.
    template <class F>
    void for_each_written(int n, const page_rules& r, F&& f) const {
        const int end = r.pages(n),
                  begin = kvq::detail::larger(tokens > r.sinks ? (tokens - r.sinks) / r.page_tokens : 0,
                                              end - r.ring);
        for (int page = begin; page < end; ++page) f(page % r.ring);
    }
    /// Committed pages after a trim to n tokens; -1 - i: the trim would cut page i, which has no 16-bit values any more.
    int committed_after_trim(int n, const page_rules& r) const noexcept {
        int left = kvq::detail::smaller(committed(), r.pages(n));
        while (left > r.due(n) && left > first_copy) --left;
        return left > 0 && r.first_token(left) > n ? -left : left;
    }

    // Pools: has quantized(format), window() and sinks(), each a free_pages&.

    /// To n tokens. The pools have enough free pages.
    template <class Pools>
    void grow(int n, const page_rules& r, const Pools& pools) {
        take_written(n, r, pools);
        for (int i = committed_at(n, r); committed() < i;)
            quantized.push_back({target, pools.quantized(target).take()});
        tokens = n;
        while (first_copy < committed() && r.first_token(first_copy + 1) + r.recent <= n - r.rollback)
            ++first_copy;
    }
    /// n more drafted tokens. No page is committed for them.
    template <class Pools>
    void draft(int n, const page_rules& r, const Pools& pools) {
        drafted += n;
        take_written(tokens + drafted, r, pools);
    }
    /// Gives back pages that no accepted token needs.
    template <class Pools>
    void release_unused(const page_rules& r, const Pools& pools) noexcept {
        for (int column = 0; column < static_cast<int>(window.size()); ++column) {
            int& number = window[static_cast<std::size_t>(column)];
            // The newest page of the column.
            const int page = r.pages(tokens) - 1 - (r.pages(tokens) - 1 - column + r.ring) % r.ring;
            if (number >= 0 && page < first_copy) pools.window().release(std::exchange(number, -1));
        }
        for (; static_cast<int>(sinks.size()) > r.sink_pages(tokens); sinks.pop_back())
            pools.sinks().release(sinks.back());
    }
    /// To n tokens, of which `left` pages stay quantized. A draft is gone. Gives back what no token needs.
    template <class Pools>
    void trim(int n, int left, const page_rules& r, const Pools& pools) noexcept {
        for (; committed() > left; quantized.pop_back())
            pools.quantized(quantized.back().format).release(quantized.back().number);
        first_copy = kvq::detail::smaller(first_copy, left);
        tokens = n;
        drafted = 0;
        release_unused(r, pools);
    }
    template <class Pools>
    void free(const page_rules& r, const Pools& pools) noexcept {
        trim(0, 0, r, pools);
    }

private:
    /// 16-bit pages for all tokens up to n.
    template <class Pools>
    void take_written(int n, const page_rules& r, const Pools& pools) {
        for_each_written(n, r, [&](int column) {
            int& number = window[static_cast<std::size_t>(column)];
            if (number < 0) number = pools.window().take();
        });
        while (static_cast<int>(sinks.size()) < r.sink_pages(n)) sinks.push_back(pools.sinks().take());
    }
};

}  // namespace kvq::inline KVQ_TAGGED::cuda::detail
