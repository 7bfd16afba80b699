// What the host keeps of a sequence on the device: its length, and the numbers of its pages. Plain C++: no page is touched here.
//
//   sinks     places [0, sinks)                          16 bit, in pages of 16 tokens
//   page i    places [sinks + i P, sinks + (i + 1) P)    quantized for i < committed(); else 16 bit, in column i % ring of the window
//
// A token's place is its position in the sequence, plus the tokens that pages before it hide (page_cuts.cuh): those that a trim has cut off
// a quantized page, and those that an erase on the CPU has removed from one. The page keeps its bytes and shows the others.
// All layers have the same page numbers. A page is committed when it is whole and `recent` tokens follow it, as on the CPU. The ring is
// wide enough for the 16-bit values of pages from first_copy on: those that a trim within `rollback` brings back. So such a trim is
// arithmetic, and the page is committed again with the same bytes. A page that was committed earlier stays quantized for good: a trim
// into it hides its last tokens, and the next token begins a page.
// Contract: the same pages are quantized and the same tokens shown as in a CPU cache that did the same (cache/layer_track.hpp).
#pragma once

#include <utility>
#include <vector>

#include "../../core/bits.hpp"
#include "free_pages.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// How places are divided into pages.
struct page_rules {
    int sinks = 0, recent = 0, rollback = 0, page_tokens = 0;
    int ring = 0;  ///< columns of the window's table

    static constexpr int sink_page_tokens = 16;

    /// Pages behind the sinks that n places touch.
    constexpr int pages(int n) const noexcept {
        return n <= sinks ? 0 : kvq::detail::ceil_div(n - sinks, page_tokens);
    }
    /// Pages that are due in a sequence of n places.
    constexpr int due(int n) const noexcept {
        return n <= sinks + recent ? 0 : (n - sinks - recent) / page_tokens;
    }
    constexpr int first_place(int page) const noexcept { return sinks + page * page_tokens; }
    constexpr int sink_pages(int n) const noexcept {
        return kvq::detail::ceil_div(kvq::detail::smaller(n, sinks), sink_page_tokens);
    }
};

/// A quantized page: its format, and its number in that format's pool.
struct held_page {
    int format = 0, number = 0;
    int position = 0;        ///< of the first token that it shows
    int begin = 0, end = 0;  ///< it shows tokens [begin, end) of its own

    int shown() const noexcept { return end - begin; }
};

struct sequence_pages {
    int tokens = 0;      ///< that are shown
    int hidden = 0;      ///< tokens that quantized pages do not show
    int cut_end = 0;     ///< pages from here on show all of their tokens
    int drafted = 0;     ///< tokens behind them that wait for keep(), in the window and in sinks
    int first_copy = 0;  ///< committed pages from here on have their 16-bit values in the ring
    int target = 0;      ///< the format of pages that are committed from now on
    std::vector<held_page> quantized;  ///< the committed pages
    std::vector<int> window;           ///< numbers by column of the ring, -1: none yet
    std::vector<int> sinks;            ///< numbers of pages of 16 tokens

    int committed() const noexcept { return static_cast<int>(quantized.size()); }
    /// Where the next accepted token goes.
    int places() const noexcept { return tokens + hidden; }
    bool hides_tokens(int page, const page_rules& r) const noexcept {
        return quantized[static_cast<std::size_t>(page)].shown() < r.page_tokens;
    }
    /// Pages that hide tokens.
    int cut_pages(const page_rules& r) const noexcept {
        int count = 0;
        for (int i = 0; i < cut_end; ++i) count += hides_tokens(i, r);
        return count;
    }
    /// Committed pages after a growth to n places.
    int committed_at(int n, const page_rules& r) const noexcept {
        return kvq::detail::larger(committed(), r.due(n));
    }
    /// Ring columns without a page that a growth to n places writes to.
    int missing_columns(int n, const page_rules& r) const noexcept {
        int missing = 0;
        for_each_written(n, r, [&](int column) { missing += window[static_cast<std::size_t>(column)] < 0; });
        return missing;
    }
    /// Calls f(column) once for every column of the ring that a growth to n places writes to.
    template <class F>
    void for_each_written(int n, const page_rules& r, F&& f) const {
        const int end = r.pages(n),
                  begin = kvq::detail::larger(places() > r.sinks ? (places() - r.sinks) / r.page_tokens : 0,
                                              end - r.ring);
        for (int page = begin; page < end; ++page) f(page % r.ring);
    }
    // Pools: has quantized(format), window() and sinks(), each a free_pages&.

    /// To n places. The pools have enough free pages.
    template <class Pools>
    void grow(int n, const page_rules& r, const Pools& pools) {
        take_written(n, r, pools);
        for (int i = committed_at(n, r); committed() < i;)
            quantized.push_back({target, pools.quantized(target).take(), r.first_place(committed()) - hidden,
                                 0, r.page_tokens});
        tokens = n - hidden;
        while (first_copy < committed() && r.first_place(first_copy + 1) + r.recent <= n - r.rollback)
            ++first_copy;
    }
    /// n more drafted tokens. No page is committed for them.
    template <class Pools>
    void draft(int n, const page_rules& r, const Pools& pools) {
        drafted += n;
        take_written(places() + drafted, r, pools);
    }
    /// Gives back pages that no accepted token needs.
    template <class Pools>
    void release_unused(const page_rules& r, const Pools& pools) noexcept {
        for (int column = 0; column < static_cast<int>(window.size()); ++column) {
            int& number = window[static_cast<std::size_t>(column)];
            // The newest page of the column.
            const int last = r.pages(places()) - 1, page = last - (last - column + r.ring) % r.ring;
            if (number >= 0 && page < first_copy) pools.window().release(std::exchange(number, -1));
        }
        for (; static_cast<int>(sinks.size()) > r.sink_pages(tokens); sinks.pop_back())
            pools.sinks().release(sinks.back());
    }
    /// What a trim to n tokens leaves: quantized pages, and the place behind the last token. O(pages that go)
    struct rest {
        int committed, end;
    };
    rest behind_trim(int n, const page_rules& r) const noexcept {
        int left = committed(), end = n + hidden;
        while (left > 0 && quantized[static_cast<std::size_t>(left - 1)].position >= n) --left;
        if (left == 0) end = n;
        if (left > 0) {
            const held_page& last = quantized[static_cast<std::size_t>(left - 1)];
            if (n <= last.position + last.shown())
                end = r.first_place(left - 1) + last.begin + n - last.position;
        }
        // Pages that have 16-bit values.
        while (left > r.due(end) && left > first_copy) --left;
        return {left, end};
    }
    /// To n tokens. A draft is gone. Gives back what no token needs. O(pages that go)
    template <class Pools>
    void trim(int n, const page_rules& r, const Pools& pools) noexcept {
        auto [left, end] = behind_trim(n, r);
        for (; committed() > left; quantized.pop_back())
            pools.quantized(quantized.back().format).release(quantized.back().number);
        if (left > 0 && end < r.first_place(left)) {
            quantized.back().end = end - r.first_place(left - 1);
            end = r.first_place(left);
        }
        first_copy = kvq::detail::smaller(first_copy, left);
        tokens = n;
        hidden = end - n;
        cut_end = left > 0 && hides_tokens(left - 1, r) ? left : kvq::detail::smaller(cut_end, left);
        while (cut_end > 0 && !hides_tokens(cut_end - 1, r)) --cut_end;
        drafted = 0;
        release_unused(r, pools);
    }
    template <class Pools>
    void free(const page_rules& r, const Pools& pools) noexcept {
        trim(0, r, pools);
    }

private:
    /// 16-bit pages for all places up to n.
    template <class Pools>
    void take_written(int n, const page_rules& r, const Pools& pools) {
        for_each_written(n, r, [&](int column) {
            int& number = window[static_cast<std::size_t>(column)];
            if (number < 0) number = pools.window().take();
        });
        while (static_cast<int>(sinks.size()) < r.sink_pages(n)) sinks.push_back(pools.sinks().take());
    }
};

}}}  // namespace kvq::cuda::detail
