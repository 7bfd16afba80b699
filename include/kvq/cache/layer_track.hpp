// One layer of one sequence: its spans (page/layer_pages.hpp) and how far they are committed.
//
//   spans   [sinks][page][page] ... [page]     the first `committed` of them are past the recent window
//
// Committed means: quantized, or left in 16 bit if that is the target format of the tensor. Spans that are not committed
// are the last ones: they hold 16-bit pages, and the very last one may take more tokens.
// Contract: K and V share the spans. The vector reserves its memory before anything changes, so that later steps cannot fail.
#pragma once

#include <cstring>
#include <memory_resource>
#include <utility>
#include <vector>

#include "../core/shape.hpp"
#include "options.hpp"

namespace kvq::inline KVQ_TAGGED::detail {

struct layer_track {
    int tokens = 0;
    int committed = 0;   ///< leading spans that are past the window; the sinks count once they are complete
    int first_copy = 0;  ///< spans before it have no 16-bit copies
    int targets[2];      ///< formats to which K and V pages are committed; 0: pages stay 16 bit
    std::pmr::vector<page_span> spans;
    int draft = 0;                 ///< tokens of the last span that wait for keep() (cache/draft.hpp)
    std::size_t table_before = 0;  ///< capacity of `spans` before the draft

    layer_track(std::pmr::memory_resource* memory, int key_target, int value_target)
        : targets{key_target, value_target}, spans(memory) {}
    layer_track(const layer_track& other, std::pmr::memory_resource* memory)
        : tokens(other.tokens),
          committed(other.committed),
          first_copy(other.first_copy),
          targets{other.targets[0], other.targets[1]},
          spans(memory),
          draft(other.draft),
          table_before(draft == 0 ? 0 : table_capacity(other.spans.size() - 1)) {
        spans.reserve(table_capacity(other.spans.size()));
        spans.assign(other.spans.begin(), other.spans.end());
    }

    page_span& operator[](int i) noexcept { return spans[static_cast<std::size_t>(i)]; }
    const page_span& operator[](int i) const noexcept { return spans[static_cast<std::size_t>(i)]; }
    int size() const noexcept { return static_cast<int>(spans.size()); }

    /// Does span i hold the sinks? Sinks are never quantized.
    bool is_sinks(int i, const page_geometry& g) const noexcept { return g.sinks > 0 && i == 0; }

    /// Number of tokens at which a whole span is committed.
    static int commit_at(const page_span& s, const page_geometry& g) noexcept {
        return s.first_token + s.room + g.recent;
    }
    /// Is span i committed in a layer of n tokens without cuts?
    bool is_due(int i, int n, const page_geometry& g) const noexcept {
        const page_span& s = spans[static_cast<std::size_t>(i)];
        return s.full() && (is_sinks(i, g) || commit_at(s, g) <= n);
    }
    /// Does a layer of n tokens need the 16-bit copies of span i? Yes, if a trim by up to `rollback` tokens can restore them.
    static bool keeps_copies(const page_span& s, int n, const page_geometry& g, int rollback) noexcept {
        return commit_at(s, g) > n - rollback;
    }
    /// The last span, if it may take more tokens.
    bool has_open_span() const noexcept { return size() > committed && !spans.back().full(); }
    /// Number of spans after `added` more tokens.
    int size_after(int added, const page_geometry& g) const noexcept {
        int spans_after = size();
        if (has_open_span()) added -= smaller(added, spans.back().room - spans.back().tokens);
        if (added > 0 && spans_after == 0 && g.sinks > 0) {
            added -= smaller(added, g.sinks);
            ++spans_after;
        }
        return spans_after + ceil_div(added, g.page_tokens);
    }

    /// Removes the draft, if there is one.
    void drop_draft() noexcept {
        if (draft == 0) return;
        spans.pop_back();
        tokens -= std::exchange(draft, 0);
    }
    /// Drops copies that no trim within `rollback` can restore any more.
    void drop_copies(const page_geometry& g, int rollback) noexcept {
        for (; first_copy < committed; ++first_copy) {
            page_span& s = spans[static_cast<std::size_t>(first_copy)];
            if (!is_sinks(first_copy, g) && keeps_copies(s, tokens, g, rollback)) return;
            for (page_ref& copy : s.copies) copy = page_ref{};
        }
    }
    /// Removes every token from position n on. Spans that are not due any more become 16 bit again where an exact copy exists;
    /// the remaining tokens of other quantized pages keep their codes.
    void cut(int n, const page_geometry& g) noexcept {
        if (n >= tokens) return;
        while (size() > 0 && spans.back().first_token >= n) spans.pop_back();
        if (size() > 0) spans.back().tokens = smaller(spans.back().tokens, n - spans.back().first_token);
        tokens = n;
        committed = smaller(committed, size());
        while (committed > 0 && !is_due(committed - 1, n, g)) {
            page_span& s = spans[static_cast<std::size_t>(committed - 1)];
            // Only the last span may be filled.
            const bool filled = s.full() || committed == size();
            if (!filled || !s.has_window_page(0) || !s.has_window_page(1)) break;
            for (int role = 0; role < 2; ++role)
                if (s.copies[role]) s.pages[role] = std::move(s.copies[role]);
            --committed;
        }
        // A page that shows a part of its tokens needs no copy: restoring it would bring back the hidden tokens.
        if (committed > 0 && !spans[static_cast<std::size_t>(committed - 1)].full())
            for (page_ref& copy : spans[static_cast<std::size_t>(committed - 1)].copies) copy = page_ref{};
        first_copy = smaller(first_copy, committed);
    }
    /// After a restore: a copy with the same bytes as its page becomes a reference to that page.
    void join_copies() noexcept {
        for (page_span& s : spans)
            for (int role = 0; role < 2; ++role) {
                const page_ref &p = s.pages[role], &copy = s.copies[role];
                if (copy && p->format == 0 && p->bytes == copy->bytes &&
                    std::memcmp(p->data(), copy->data(), p->bytes) == 0)
                    s.copies[role] = page_ref{};
            }
    }
};

}  // namespace kvq::inline KVQ_TAGGED::detail
