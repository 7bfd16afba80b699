// The page table: which pages hold the tokens of a layer, and what a growth, a trim or a cut does to them.
//
//   spans   [sinks][page][page] ... [page]     the first `committed` of them are past the recent window
//
// A layer with a key_window frees spans behind the sinks that no query sees any more. The others keep their
// positions, so there is one gap: behind the sinks. A table holds its last token always. Tokens that are
// retained when others are dropped (cache/retain.hpp) lie behind such a gap as well, side by side.
//
// The cache on the CPU has a table for each layer (cache/sequence.hpp), the cache on a GPU one for all layers
// of a group (cuda/host/sequence_pages.hpp). Both ask it what is committed, copied, restored, shared and
// given back, and carry that out: they allocate pages and fill them. A table holds references to pages and
// writes no byte of them.
//
// Committed means: quantized, or left in 16 bit if that is the target format. Spans that are not committed
// are the last ones: they hold 16-bit pages and skip no tokens, and the very last one may take more tokens;
// if its keys moved, new keys take its rotation. A committed span that was closed before it was full (an
// erase) has pages for its own tokens only.
// Pieces: the parts of a span's pages that are held and freed apart. On the CPU they are K and V; on a GPU,
// and of a latent layer, there is one, and the other is null.
// Contract: all pieces share the spans. The vector reserves its memory before anything changes, so that later
// steps cannot fail. The decisions depend on the spans alone, so that the same calls give the same tables on
// both sides (tests/properties/page_table.cpp).
#pragma once

#include <memory_resource>
#include <utility>
#include <vector>

#include "../core/resource_vector.hpp"
#include "layer_pages.hpp"
#include "usage_report.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

// NOLINTNEXTLINE(bugprone-exception-escape): tables move within one memory resource, without allocating
struct page_table {
    int tokens = 0;
    int committed = 0;    ///< leading spans that are past the window; the sinks count once they are complete
    int copies_from = 0;  ///< spans before it have no 16-bit copies
    int targets[2];       ///< formats to which K and V pages are committed; 0: pages stay 16 bit
    /// A prefill() of the layer keeps its chunk in 16 bit for the layers that share it; of such a layer: the
    /// chunk waits for it.
    bool waits = false;
    bool held = false;        ///< pages stay 16 bit and are not committed (sequence::hold)
    bool rearranged = false;  ///< after an erase, shift or splice: two spans may share a page
    /// Of keys to come: the format with their plan (cache/key_plan.hpp). Empty: none yet, or none wanted.
    format plan = {};
    std::size_t repacked = 0;  ///< tokens that were quantized once more (cache/repack.hpp)
    resource_vector<page_span> spans;
    int freed = 0;  ///< spans in the gap, up to most_freed: the vector has memory for them all the same
    /// The number of tokens when some of them were dropped; 0: none were. Those before it are not at their
    /// own positions.
    int dropped = 0;
    int draft = 0;                 ///< tokens of the last span that wait for keep() (cache/draft.hpp)
    std::size_t table_before = 0;  ///< capacity of `spans` before the draft

    page_table(std::pmr::memory_resource* memory, int key_target, int value_target);
    page_table(const page_table& other, std::pmr::memory_resource* memory);

    page_span& operator[](int i) noexcept { return spans[static_cast<std::size_t>(i)]; }
    const page_span& operator[](int i) const noexcept { return spans[static_cast<std::size_t>(i)]; }
    int size() const noexcept { return static_cast<int>(spans.size()); }

    /// Number of tokens at which a whole span is committed. A span that was closed is whole from the next
    /// token on.
    static std::int64_t commit_at(const page_span& s, const page_geometry& g) noexcept;
    /// Is a span committed in a layer of n tokens without cuts?
    static bool is_due(const page_span& s, int n, const page_geometry& g) noexcept;
    /// Could the spans behind the first `committed` ones still wait to be committed in a layer of n tokens?
    /// Spans are committed in their order, so only the first of them must not be due. For spans from files
    /// and messages.
    template <class Spans>
    static bool may_wait(const Spans& spans, std::size_t committed, int n, const page_geometry& g) noexcept {
        return committed >= spans.size() || !is_due(spans[committed], n, g);
    }
    /// Does a layer of n tokens need the 16-bit copies of span i? Yes, if a trim by up to `rollback` tokens
    /// can restore them.
    static bool keeps_copies(const page_span& s, int n, const page_geometry& g, int rollback) noexcept;
    /// Does a new span pass the window at once in a growth to n tokens? Then its 16-bit pages are only read
    /// to quantize them.
    static bool passes(const page_span& s, int n, const page_geometry& g, int rollback) noexcept;
    /// May the last span take more tokens?
    bool has_open_span() const noexcept { return size() > committed && !spans.back().full(); }
    /// Do new tokens begin with the sinks?
    bool begins_with_sinks(const page_geometry& g) const noexcept { return size() == 0 && g.sinks > 0; }
    /// Number of spans after `added` more tokens.
    int size_after(int added, const page_geometry& g) const noexcept;
    /// Spans that the vector has memory for then.
    std::size_t capacity_after(int added, const page_geometry& g) const noexcept {
        return table_capacity(static_cast<std::size_t>(size_after(added, g)) +
                              static_cast<std::size_t>(freed));
    }

    /// The token behind the sinks.
    int end_of_sinks() const noexcept;
    /// Are its first n tokens, those to come included, the first ones of its pages of sinks?
    bool shows_sinks(int n) const noexcept;
    /// The first token behind the gap; 0: there is none.
    int front() const noexcept;
    /// Does the table hold tokens [first, last)?
    bool holds(int first, int last) const noexcept {
        return first >= last || first >= front() || last <= end_of_sinks();
    }
    /// Would a trim to n tokens end in sinks that a cut has left without the first tokens of their page? Such
    /// a page takes no more tokens, but the next one must be a sink where every query sees more of them than
    /// n.
    bool ends_in_cut_sinks(int n, const page_geometry& g) const noexcept;
    /// Can it be trimmed to n tokens? Yes, if it holds what the next token sees, and its last token; not to a
    /// part of a draft.
    bool reaches(int n, const page_geometry& g) const noexcept {
        return n >= tokens || (n <= tokens - draft && is_whole(n, g) && !ends_in_cut_sinks(n, g));
    }
    /// Does it hold the last one of n tokens, and what the next one sees?
    bool is_whole(int n, const page_geometry& g) const noexcept;
    /// The least n from which on it can be trimmed to any number of tokens.
    int trim_limit(const page_geometry& g) const noexcept;
    /// Does a span leave a layer of n tokens?
    static bool leaves(const page_span& s, int n, const page_geometry& g, int rollback) noexcept {
        return !s.sinks && s.end() <= g.first_needed(n, rollback);
    }
    /// Frees the spans that have left. give_back(page): takes each of their pages.
    template <class GiveBack>
    void free_unseen(const page_geometry& g, int rollback, GiveBack&& give_back) noexcept {
        if (!g.window) return;
        const int kept = leading_sinks(), needed = g.first_needed(tokens, rollback);
        int end = kept;
        for (; end < size() && (*this)[end].end() <= needed; ++end)
            for (auto* const list : {&(*this)[end].pages, &(*this)[end].copies})
                for (page_ref& p : *list) give_back(std::move(p));
        free_spans(kept, end);
    }

    /// The span of the next tokens in a growth to n tokens, when no span is open. Without pages.
    page_span next_span(int n, const page_geometry& g) const noexcept;
    /// A growth to n tokens: the open span takes what it has room for, new spans take the others. fill(span)
    /// gives a new span its pages, before the table has it. The vector has its memory.
    template <class Fill>
    void grow(int n, const page_geometry& g, Fill&& fill) {
        if (has_open_span()) {
            page_span& s = spans.back();
            s.tokens += smaller(n - tokens, s.room - s.tokens);
            tokens = s.end();
        }
        while (tokens < n) {
            page_span s = next_span(n, g);
            fill(s);
            tokens = s.end();
            spans.push_back(std::move(s));
        }
    }
    /// The end of the spans that are committed in a layer of n tokens.
    int due(int n, const page_geometry& g) const noexcept;
    /// Replaces the 16-bit page of a span that is committed at n tokens. The page becomes the copy, if a trim
    /// can restore it; else it is returned. The caller counts the span in `committed` when it has all of its
    /// pages.
    page_ref commit_page(int i, std::size_t piece, page_ref quantized, int n, const page_geometry& g,
                         int rollback) noexcept;

    /// Removes the draft, if there is one.
    void drop_draft() noexcept;
    /// May a layer with this geometry hold the span, as one of its committed spans, or as (the last of) the
    /// others? For spans from files and messages.
    static bool is_possible(const page_span& s, bool is_committed, bool last,
                            const page_geometry& g) noexcept;

    /// So that a text of any length, and a file that says it has one, takes a bounded table.
    static constexpr int most_freed = 1 << 16;
    /// Spans that have left a layer without cuts whose first token behind the gap is `front`, up to
    /// most_freed; 0: there is no gap.
    static int freed_spans(int front, const page_geometry& g) noexcept {
        return smaller(larger(0, front - g.sinks) / g.page_tokens, most_freed);
    }

    /// May a page of a span, or its copy, have memory for so many tokens? Pages of a span that was closed had
    /// memory for a whole page once.
    static bool may_have_memory(const page_span& s, bool is_committed, int memory,
                                const page_geometry& g) noexcept;
    /// May a committed span of a layer of n tokens have 16-bit copies?
    static bool may_have_copies(const page_span& s, int n, const page_geometry& g, int rollback) noexcept;

    /// Drops copies that no trim within `rollback` can restore any more, once the layer has `added` tokens
    /// more. Spans without copies may lie between those with copies.
    void drop_copies(const page_geometry& g, int rollback, int added = 0) noexcept;
    /// A page of another format is to take the place of a committed span's page: does this one become the
    /// copy? That is true of a 16-bit page that a trim within `rollback` would bring back into the window.
    /// (False for a page that a deep trim has left in 16 bit because the page of another piece was quantized:
    /// it never returns to the window.)
    bool keeps_page(int i, std::size_t piece, const page_geometry& g, int rollback) const noexcept;
    /// Replaces the page of a committed span by one of another format.
    void change_page(int i, std::size_t piece, page_ref fresh, const page_geometry& g, int rollback) noexcept;
    /// Drops all copies: trims find the quantized pages alone.
    void drop_all_copies() noexcept;
    /// What a trim leaves.
    struct rest {
        int spans, committed;
    };
    /// Of a trim to n tokens. O(spans that go or are restored)
    rest after_trim(int n, const page_geometry& g) const noexcept;
    /// Removes every token from position n on. Spans that are not due any more become 16 bit again where an
    /// exact copy exists; the remaining tokens of other quantized pages keep their codes. Returns whether one
    /// of these pages shows fewer tokens than before.
    bool trim(int n, const page_geometry& g) noexcept;
    /// Removes the n tokens behind the sinks: whole spans. The tokens behind them have earlier positions
    /// then, keys stay as they are.
    void drop_front(int n, const page_geometry& g) noexcept;
    /// A span of 16-bit pages of which only the tokens from `skip` on are taken.
    struct cut_window {
        int span = -1, skip = 0;
    };
    /// An erase, a shift or a splice builds a table of runs of others: appends tokens [first, last) of
    /// `from`, whose keys move by `by`. Quantized pages are shared by the spans on both sides of a cut.
    /// 16-bit pages that are cut (a run has one such span at most) are returned: the caller gives the span
    /// pages that begin with its first token. 16-bit copies stay behind.
    cut_window take(const page_table& from, int first, int last, std::int64_t by, const page_geometry& g);
    /// Spans behind the last one follow: it takes no more tokens.
    void close_last() noexcept;
    /// One span with pages of its own replaces spans [first, last), all of them committed or none.
    void join_spans(int first, int last, page_span s) noexcept;
    /// Behind the last take() of an erase, a shift or a splice, with what is due committed: spans that are
    /// not due any more become 16 bit again, from the last one on, as long as they can. Those before
    /// `quantized` cannot: their pages are about to be quantized.
    void uncommit(const page_geometry& g, int quantized = 0) noexcept {
        restore(larger(still_committed(size(), tokens, g), quantized), g);
        copies_from = committed;
    }
    /// Keys to come have the plan of the last page of keys in their format that has one.
    void find_plan() noexcept;
    /// Behind a trim: with too few tokens for a plan, and no quantized page, keys to come get one anew.
    void forget_plan(const page_geometry& g) noexcept;
    /// Does the last page of keys that has a plan have this one?
    bool shows_plan() const noexcept;
    /// After its spans have come from elsewhere, of which the first `committed_spans` are committed.
    /// says_all: they share pages as they did. Otherwise (version 3 of files and messages) equal pages of
    /// committed spans become one page.
    void restored(int committed_spans, const page_geometry& g, int rollback, bool says_all = true);
    /// Calls f(held_page) once for every page of a piece. O(pages), times log(pages) when two spans may share
    /// one.
    template <class F>
    void for_each_page(std::size_t piece, F&& f) const {
        if (rearranged) {
            for (const held_page& p : distinct_pages(piece)) f(p);
            return;
        }
        for (const page_span& s : spans) {
            if (s.pages[piece]) f(held_page{*s.pages[piece], s.tokens});
            if (s.copies[piece]) f(held_page{*s.copies[piece], 0, true});
        }
    }

private:
    /// Number of spans in front that show sinks.
    int leading_sinks() const noexcept;
    /// Removes spans [kept, end), which have left.
    void free_spans(int kept, int end) noexcept;
    const page* last_planned() const noexcept;
    /// May two spans share a page?
    void find_rearranged();
    std::vector<held_page> distinct_pages(std::size_t piece) const;
    /// Behind the others, or as a part of the last one if it goes on in the same pages.
    void add(page_span s, bool is_committed);
    /// How many of the first `left` spans stay committed in n tokens: the others are not due any more, and
    /// have their 16-bit pages.
    int still_committed(int left, int n, const page_geometry& g) const noexcept;
    /// Spans from `first` on are 16 bit again.
    void restore(int first, const page_geometry& g) noexcept;
};

}}}  // namespace kvq::detail

#if !defined(KVQ_COMPILED)
#include "page_table-inl.hpp"
#endif
