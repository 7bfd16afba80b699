// The page table: which pages hold the tokens of a layer, and what a growth, a trim or a cut does to them.
//
//   spans   [sinks][page][page] ... [page]     the first `committed` of them are past the recent window
//
// The cache on the CPU has a table for each layer (cache/sequence.hpp), the cache on a GPU one for all layers (cuda/host/sequence_pages.hpp).
// Both ask it what is committed, copied, restored, shared and given back, and carry that out: they allocate pages and fill them. A table
// holds references to pages and writes no byte of them.
//
// Committed means: quantized, or left in 16 bit if that is the target format. Spans that are not committed are the last ones: they
// hold 16-bit pages and skip no tokens, and the very last one may take more tokens; if its keys moved, new keys take its rotation. A
// committed span that was closed before it was full (an erase) has pages for its own tokens only.
// Pieces: the parts of a span's pages that are held and freed apart. On the CPU they are K and V; on a GPU there is one, and the
// other is null.
// Contract: all pieces share the spans. The vector reserves its memory before anything changes, so that later steps cannot fail. The
// decisions depend on the spans alone, so that the same calls give the same tables on both sides (tests/properties/page_table.cpp).
#pragma once

#include <algorithm>
#include <cstring>
#include <memory_resource>
#include <utility>
#include <vector>

#include "../core/resource_vector.hpp"
#include "layer_pages.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

struct page_table {
    int tokens = 0;
    int committed = 0;    ///< leading spans that are past the window; the sinks count once they are complete
    int copies_from = 0;  ///< spans before it have no 16-bit copies
    int targets[2];       ///< formats to which K and V pages are committed; 0: pages stay 16 bit
    bool rearranged = false;   ///< after an erase, shift or splice: two spans may share a page
    std::size_t repacked = 0;  ///< tokens that were quantized once more (cache/repack.hpp)
    resource_vector<page_span> spans;
    int draft = 0;                 ///< tokens of the last span that wait for keep() (cache/draft.hpp)
    std::size_t table_before = 0;  ///< capacity of `spans` before the draft

    page_table(std::pmr::memory_resource* memory, int key_target, int value_target)
        : targets{key_target, value_target}, spans(memory) {}
    page_table(const page_table& other, std::pmr::memory_resource* memory)
        : tokens(other.tokens),
          committed(other.committed),
          copies_from(other.copies_from),
          targets{other.targets[0], other.targets[1]},
          rearranged(other.rearranged),
          repacked(other.repacked),
          spans(memory),
          draft(other.draft),
          table_before(draft == 0 ? 0 : table_capacity(other.spans.size() - 1)) {
        spans.reserve(table_capacity(other.spans.size()));
        spans.assign(other.spans.begin(), other.spans.end());
    }

    page_span& operator[](int i) noexcept { return spans[static_cast<std::size_t>(i)]; }
    const page_span& operator[](int i) const noexcept { return spans[static_cast<std::size_t>(i)]; }
    int size() const noexcept { return static_cast<int>(spans.size()); }

    /// Number of tokens at which a whole span is committed. A span that was closed is whole from the next token on.
    static std::int64_t commit_at(const page_span& s, const page_geometry& g) noexcept {
        const int closed = s.room < g.capacity(s.sinks) ? 1 : 0;
        return std::int64_t{s.first_token} + s.room - s.skip + larger(g.recent, closed);
    }
    /// Is a span committed in a layer of n tokens without cuts?
    static bool is_due(const page_span& s, int n, const page_geometry& g) noexcept {
        return s.full() && ((s.sinks && s.room == g.sinks) || commit_at(s, g) <= n);
    }
    /// Could the spans behind the first `committed` ones still wait to be committed in a layer of n tokens? Spans are committed in
    /// their order, so only the first of them must not be due. For spans from files and messages.
    template <class Spans>
    static bool may_wait(const Spans& spans, std::size_t committed, int n, const page_geometry& g) noexcept {
        return committed >= spans.size() || !is_due(spans[committed], n, g);
    }
    /// Does a layer of n tokens need the 16-bit copies of span i? Yes, if a trim by up to `rollback` tokens can restore them.
    static bool keeps_copies(const page_span& s, int n, const page_geometry& g, int rollback) noexcept {
        return commit_at(s, g) > n - rollback;
    }
    /// Does a new span pass the window at once in a growth to n tokens? Then its 16-bit pages are only read to quantize them.
    static bool passes(const page_span& s, int n, const page_geometry& g, int rollback) noexcept {
        return s.full() && !s.sinks && commit_at(s, g) <= n && !keeps_copies(s, n, g, rollback);
    }
    /// May the last span take more tokens?
    bool has_open_span() const noexcept { return size() > committed && !spans.back().full(); }
    /// Do new tokens begin with the sinks?
    bool begins_with_sinks(const page_geometry& g) const noexcept { return size() == 0 && g.sinks > 0; }
    /// Number of spans after `added` more tokens.
    int size_after(int added, const page_geometry& g) const noexcept {
        int spans_after = size();
        if (has_open_span()) added -= smaller(added, spans.back().room - spans.back().tokens);
        if (added > 0 && begins_with_sinks(g)) {
            added -= smaller(added, g.sinks);
            ++spans_after;
        }
        return spans_after + ceil_div(added, g.page_tokens);
    }

    /// The span of the next tokens in a growth to n tokens, when no span is open. Without pages.
    page_span next_span(int n, const page_geometry& g) const noexcept {
        const bool of_sinks = begins_with_sinks(g);
        const int room = g.capacity(of_sinks);
        return {tokens, smaller(room, n - tokens), room, {}, {}, 0, of_sinks};
    }
    /// The end of the spans that are committed in a layer of n tokens.
    int due(int n, const page_geometry& g) const noexcept {
        int i = committed;
        while (i < size() && is_due((*this)[i], n, g)) ++i;
        return i;
    }
    /// Replaces the 16-bit page of a span that is committed at n tokens. The page becomes the copy, if a trim can restore it; else
    /// it is returned. The caller counts the span in `committed` when it has all of its pages.
    page_ref commit_page(int i, std::size_t piece, page_ref quantized, int n, const page_geometry& g,
                         int rollback) noexcept {
        page_span& s = (*this)[i];
        page_ref before = std::exchange(s.pages[piece], std::move(quantized));
        if (!before || !keeps_copies(s, n, g, rollback)) return before;
        s.copies[piece] = std::move(before);
        return {};
    }

    /// Removes the draft, if there is one.
    void drop_draft() noexcept {
        if (draft == 0) return;
        spans.pop_back();
        tokens -= std::exchange(draft, 0);
    }
    /// May a layer with this geometry hold the span, as one of its committed spans, or as (the last of) the others? For spans from
    /// files and messages.
    static bool is_possible(const page_span& s, bool is_committed, bool last,
                            const page_geometry& g) noexcept {
        const int capacity = g.capacity(s.sinks);
        return s.tokens >= 1 && s.skip >= 0 && s.room >= 1 && s.room <= capacity && s.skip < s.room &&
               s.tokens <= s.room - s.skip &&
               (is_committed || (s.skip == 0 && (last ? s.room == capacity : s.full())));
    }

    /// May a page of a span, or its copy, have memory for so many tokens? Pages of a span that was closed had memory for a whole page once.
    static bool may_have_memory(const page_span& s, bool is_committed, int memory,
                                const page_geometry& g) noexcept {
        return memory >= (is_committed ? s.room : s.tokens) && memory <= g.capacity(s.sinks);
    }
    /// May a committed span of a layer of n tokens have 16-bit copies?
    static bool may_have_copies(const page_span& s, int n, const page_geometry& g, int rollback) noexcept {
        return !s.sinks && s.skip == 0 && s.full() && keeps_copies(s, n, g, rollback);
    }

    /// Drops copies that no trim within `rollback` can restore any more, once the layer has `added` tokens more. Spans without copies may
    /// lie between those with copies.
    void drop_copies(const page_geometry& g, int rollback, int added = 0) noexcept {
        for (int i = copies_from; i < committed; ++i)
            if (!keeps_copies((*this)[i], tokens + added, g, rollback))
                for (page_ref& copy : (*this)[i].copies) copy = page_ref{};
        while (copies_from < committed && !(*this)[copies_from].copies[0] && !(*this)[copies_from].copies[1])
            ++copies_from;
    }
    /// A page of another format is to take the place of a committed span's page: does this one become the copy? That is true of a 16-bit
    /// page that a trim within `rollback` would bring back into the window. (False for a page that a deep trim has left in 16 bit because
    /// the page of another piece was quantized: it never returns to the window.)
    bool keeps_page(int i, std::size_t piece, const page_geometry& g, int rollback) const noexcept {
        const page_span& s = (*this)[i];
        return s.pages[piece]->format == 0 && s.skip == 0 && is_due(s, tokens, g) && !s.copies[piece] &&
               keeps_copies(s, tokens, g, rollback);
    }
    /// Replaces the page of a committed span by one of another format.
    void change_page(int i, std::size_t piece, page_ref fresh, const page_geometry& g,
                     int rollback) noexcept {
        page_span& s = (*this)[i];
        if (keeps_page(i, piece, g, rollback)) {
            s.copies[piece] = std::move(s.pages[piece]);
            copies_from = smaller(copies_from, i);
        }
        s.pages[piece] = std::move(fresh);
    }
    /// Drops all copies: trims find the quantized pages alone.
    void drop_all_copies() noexcept {
        for (; copies_from < committed; ++copies_from)
            for (page_ref& copy : (*this)[copies_from].copies) copy = page_ref{};
    }
    /// What a trim leaves.
    struct rest {
        int spans, committed;
    };
    /// Of a trim to n tokens. O(spans that go or are restored)
    rest after_trim(int n, const page_geometry& g) const noexcept {
        int left = size();
        while (left > 0 && (*this)[left - 1].first_token >= n) --left;
        return {left, still_committed(left, n, g)};
    }
    /// Removes every token from position n on. Spans that are not due any more become 16 bit again where an exact copy exists;
    /// the remaining tokens of other quantized pages keep their codes. Returns whether one of these pages shows fewer tokens than before.
    bool trim(int n, const page_geometry& g) noexcept {
        if (n >= tokens) return false;
        const rest left = after_trim(n, g);
        const page* const removed = left.spans < size() ? (*this)[left.spans].pages[0].get() : nullptr;
        spans.erase(spans.begin() + left.spans, spans.end());  // `removed` is only compared from here on
        const bool within = size() > 0 && (spans.back().end() > n || spans.back().pages[0].get() == removed);
        if (size() > 0) spans.back().tokens = smaller(spans.back().tokens, n - spans.back().first_token);
        tokens = n;
        committed = smaller(committed, size());
        restore(left.committed, g);
        // A page that shows a part of its tokens needs no copy: restoring it would bring back the tokens behind them.
        if (committed > 0 && !(*this)[committed - 1].full())
            for (page_ref& copy : (*this)[committed - 1].copies) copy = page_ref{};
        copies_from = smaller(copies_from, committed);
        return within && committed == size();
    }
    /// A span of 16-bit pages of which only the tokens from `skip` on are taken.
    struct cut_window {
        int span = -1, skip = 0;
    };
    /// An erase, a shift or a splice builds a table of runs of others: appends tokens [first, last) of `from`, whose keys move by `by`.
    /// Quantized pages are shared by the spans on both sides of a cut. 16-bit pages that are cut (a run has one such span at most) are
    /// returned: the caller gives the span pages that begin with its first token. 16-bit copies stay behind.
    cut_window take(const page_table& from, int first, int last, std::int64_t by, const page_geometry& g) {
        cut_window cut;
        rearranged = true;
        for (int i = 0; i < from.size(); ++i) {
            const int begin = larger(first, from[i].first_token), end = smaller(last, from[i].end());
            if (begin >= end) continue;
            const bool is_committed = i < from.committed;
            page_span s = from[i];
            const int before = begin - s.first_token;
            s.first_token = tokens;
            s.tokens = end - begin;
            s.shift += by;
            s.copies = {};
            if (is_committed)
                s.skip += before;
            else
                s.room = g.capacity(s.sinks);
            if (!is_committed && before > 0) cut = {size(), before};
            add(std::move(s), is_committed);
        }
        return cut;
    }
    /// Spans behind the last one follow: it takes no more tokens.
    void close_last() noexcept {
        if (size() > committed) spans.back().room = spans.back().skip + spans.back().tokens;
    }
    /// One span with pages of its own replaces spans [first, last), all of them committed or none.
    void join_spans(int first, int last, page_span s) noexcept {
        if (first < committed) {
            committed -= last - first - 1;
            copies_from = smaller(copies_from, first);
            const bool quantized = std::any_of(s.pages.begin(), s.pages.end(),
                                               [](const page_ref& p) { return p && p->format != 0; });
            if (quantized) repacked += static_cast<std::size_t>(s.tokens);
        }
        (*this)[first] = std::move(s);
        spans.erase(spans.begin() + first + 1, spans.begin() + last);
    }
    /// After a cut: spans that are not due any more become 16 bit again, from the last one on, as long as they can.
    void uncommit(const page_geometry& g) noexcept { restore(still_committed(size(), tokens, g), g); }
    /// After a restore: may two spans share a page?
    void find_rearranged() {
        std::vector<const page*> held;
        rearranged = false;
        for (const page_span& s : spans) {
            rearranged = rearranged || s.skip > 0 || s.shift != 0;
            for (const auto* list : {&s.pages, &s.copies})
                for (const page_ref& p : *list)
                    if (p) held.push_back(p.get());
        }
        std::sort(held.begin(), held.end());
        rearranged = rearranged || std::adjacent_find(held.begin(), held.end()) != held.end();
    }
    /// After a restore of what does not say which spans share a page (version 3): equal pages of committed spans become one page.
    void join_pages() {
        find_rearranged();
        if (!rearranged) return;
        std::vector<page_ref*> held;
        for (std::size_t role = 0; role < 2; ++role) {
            held.clear();
            for (int i = 0; i < committed; ++i) held.push_back(&(*this)[i].pages[role]);
            const auto compare = [](const page& a, const page& b) {
                if (a.format != b.format) return a.format < b.format ? -1 : 1;
                if (a.bytes != b.bytes) return a.bytes < b.bytes ? -1 : 1;
                return std::memcmp(a.data(), b.data(), a.bytes);
            };
            std::sort(held.begin(), held.end(),
                      [&](const page_ref* a, const page_ref* b) { return compare(**a, **b) < 0; });
            for (std::size_t i = 1; i < held.size(); ++i)
                if (compare(**held[i - 1], **held[i]) == 0) *held[i] = *held[i - 1];
        }
    }
    /// Calls f(page) once for every page of tensor `role` that is only a 16-bit copy.
    template <class F>
    void for_each_copy(std::size_t role, F&& f) const {
        if (!rearranged) {
            for (const page_span& s : spans)
                if (s.copies[role]) f(*s.copies[role]);
            return;
        }
        std::vector<const page*> shown, held;
        for (const page_span& s : spans) {
            shown.push_back(s.pages[role].get());
            if (s.copies[role]) held.push_back(s.copies[role].get());
        }
        std::sort(shown.begin(), shown.end());
        std::sort(held.begin(), held.end());
        held.erase(std::unique(held.begin(), held.end()), held.end());
        for (const page* const p : held)
            if (!std::binary_search(shown.begin(), shown.end(), p)) f(*p);
    }
    /// Calls f(page, shown) once for every page of tensor `role`, with the number of its tokens that spans show.
    template <class F>
    void for_each_page(std::size_t role, F&& f) const {
        if (!rearranged) {
            for (const page_span& s : spans) f(*s.pages[role], s.tokens);
            return;
        }
        std::vector<std::pair<const page*, int>> held;
        for (const page_span& s : spans) held.emplace_back(s.pages[role].get(), s.tokens);
        std::sort(held.begin(), held.end());
        for (std::size_t i = 0; i < held.size();) {
            const page* const p = held[i].first;
            int shown = 0;
            for (; i < held.size() && held[i].first == p; ++i) shown += held[i].second;
            f(*p, smaller(shown, p->tokens));
        }
    }

private:
    /// Behind the others, or as a part of the last one if it goes on in the same pages.
    void add(page_span s, bool is_committed) {
        if (is_committed && size() > 0 && size() == committed) {
            page_span& last = spans.back();
            if (last.pages[0].get() == s.pages[0].get() && last.pages[1].get() == s.pages[1].get() &&
                last.shift == s.shift && last.skip + last.tokens == s.skip) {
                last.tokens += s.tokens;
                tokens = last.end();
                return;
            }
        }
        close_last();
        spans.reserve(table_capacity(spans.size() + 1));
        tokens = s.end();
        committed += is_committed;
        spans.push_back(std::move(s));
    }
    /// How many of the first `left` spans stay committed in n tokens: the others are not due any more, and have their 16-bit pages.
    int still_committed(int left, int n, const page_geometry& g) const noexcept {
        int i = smaller(committed, left);
        for (; i > 0; --i) {
            const page_span& s = (*this)[i - 1];
            const bool whole = s.end() <= n;
            if (whole && is_due(s, n, g)) break;
            // Only the last span may be filled.
            const bool filled = (whole && s.full()) || i == left;
            if (!filled || s.skip > 0 || !s.has_window_page(0) || !s.has_window_page(1)) break;
        }
        return i;
    }
    /// Spans from `first` on are 16 bit again.
    void restore(int first, const page_geometry& g) noexcept {
        for (; committed > first; --committed) {
            page_span& s = (*this)[committed - 1];
            for (std::size_t piece = 0; piece < s.pages.size(); ++piece)
                if (s.copies[piece]) s.pages[piece] = std::move(s.copies[piece]);
        }
        // The last span may be filled, also if it was closed.
        if (size() > committed) spans.back().room = g.capacity(spans.back().sinks);
    }
};

}}}  // namespace kvq::detail
