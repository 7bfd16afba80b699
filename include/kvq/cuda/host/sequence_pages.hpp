// The pages of a sequence on the device: a page table for layers of one shape (page/page_table.hpp), and
// where its 16-bit pages lie. Plain C++: no byte of a page is touched here.
//
//   sinks     tokens [0, sinks)     16 bit, in pages of 16 tokens
//   page i    a span of the table   quantized for i < committed(); else 16 bit, in column i % ring of the
//                                   window
//
// Kernels count tokens by paged positions: that of token t of page i is sinks + i * page_tokens + t, whether
// the page shows it or not. The lengths that they read are paged lengths: tokens of the sequence, and those
// of quantized pages that a trim has cut off, or an erase on the CPU (page_cuts.cuh).
// The window is a ring of columns that is wide enough for the pages that are not committed and for the 16-bit
// copies that a trim within `rollback` restores. So a sequence holds `ring` 16-bit pages at most.
// Layers with a window (page/key_window.hpp) free pages that no query sees any more. Pages keep their
// numbers: those before gone() are not there. What the last growth has freed is held until the next one,
// since launches of its step read it.
// Contract: the same pages are quantized and the same tokens shown as in a CPU cache that did the same: the
// table decides for both (tests/properties/gpu_sequence_pages.cpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory_resource>
#include <set>
#include <utility>
#include <vector>

#include "../../page/page_table.hpp"
#include "free_pages.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// How tokens are divided into pages, and for how many of them there are 16-bit pages.
struct device_geometry : page_geometry {
    int rollback = 0;
    int ring = 0;  ///< columns of the window's table

    static constexpr int sink_page_tokens = 16;
    constexpr int sink_pages(int n) const noexcept {
        return common::ceil_div(common::smaller(n, sinks), sink_page_tokens);
    }
};

/// Where a sequence takes its pages from. quantized: of the format that its pages are committed to.
struct sequence_pools {
    free_pages &quantized, &window, &sinks;
};

struct sequence_pages {
    common::page_table table{std::pmr::new_delete_resource(), 0, 0};
    int drafted = 0;  ///< tokens behind those of the table that wait for keep(), in the window and in sinks
    std::vector<page_ref> sinks;  ///< pages of 16 tokens
    std::vector<page_ref> ahead;  ///< 16-bit pages behind those of the table, for the draft
    /// Of keys of several widths: of all its pages, and of pages to come (group_formats.hpp). Null: none yet.
    page_ref plan;
    /// What launches of the step still read: 16-bit pages that the last growth has committed and that are no
    /// copies, and pages that it has freed.
    struct leaving_page {
        int page;
        page_ref held;
        std::int64_t shift;
    };
    std::vector<leaving_page> leaving;
    /// By how many positions keys of its spans have moved (page_span::shift), each number once, without 0.
    std::vector<std::int64_t> moved;
    int gone_pages = 0;  ///< all of them: the table's count stops at most_freed, and pages keep their numbers

    int tokens() const noexcept { return table.tokens; }
    int sink_spans() const noexcept { return table.size() > 0 && table[0].sinks ? 1 : 0; }
    /// Pages behind the sinks that a window has freed.
    int gone() const noexcept { return gone_pages; }
    /// Pages behind the sinks, those that are gone included.
    int pages() const noexcept { return gone() + table.size() - sink_spans(); }
    int committed() const noexcept { return gone() + common::larger(0, table.committed - sink_spans()); }
    /// From gone() on.
    const page_span& operator[](int page) const noexcept { return table[page - gone() + sink_spans()]; }
    /// The quantized page of a committed page; null if no launch of the step reads it any more.
    const page* quantized_page(int i) const noexcept {
        if (i >= gone()) return (*this)[i].pages[0].get();
        return left(i, true);
    }
    /// The format of the cache that pages are committed to. A page of format f has page::format f + 1.
    int target() const noexcept { return table.targets[0] - 1; }
    void set_target(int format) noexcept { table.targets[0] = table.targets[1] = format + 1; }
    static int format_of(const page_span& s) noexcept { return s.pages[0]->format - 1; }
    static int number_of(const page_span& s) noexcept { return s.pages[0]->number; }
    /// Its format, -1 if it is not there.
    int format_of(int i) const noexcept {
        const page* const p = quantized_page(i);
        return p != nullptr ? p->format - 1 : -1;
    }

    /// Pages [first, end) from the first one to the last one of those that `named` says; where there is none,
    /// none behind the last page.
    template <class F>
    std::pair<int, int> pages_where(F&& named) const {
        int first = 0, end = committed();
        while (end > 0 && !named(end - 1)) --end;
        while (first < end && !named(first)) ++first;
        return end > 0 ? std::pair(first, end) : std::pair(committed(), committed());
    }
    std::pair<int, int> pages_of(int format) const {
        return pages_where([&](int i) { return format_of(i) == format; });
    }

    /// Where the next accepted token goes.
    int paged_tokens(const device_geometry& g) const noexcept {
        if (pages() == gone()) return tokens();
        return g.first_token(pages() - 1) +
               (pages() == committed() ? g.page_tokens : (*this)[pages() - 1].tokens);
    }
    /// Tokens that quantized pages do not show.
    int skipped(const device_geometry& g) const noexcept { return paged_tokens(g) - tokens(); }
    static bool is_cut(const page_span& s, const device_geometry& g) noexcept {
        return s.tokens < g.page_tokens;
    }
    /// Committed pages that do not show all of their tokens, and the end of the last of them. O(pages)
    int cut_pages(const device_geometry& g) const noexcept {
        int count = 0;
        for (int i = gone(); i < committed(); ++i) count += is_cut((*this)[i], g);
        return count;
    }
    int cut_end(const device_geometry& g) const noexcept {
        int end = committed();
        while (end > gone() && !is_cut((*this)[end - 1], g)) --end;
        // Pages that are gone may have been cut: their tokens count as well.
        return end > gone() || skipped(g) != 0 ? end : 0;
    }
    /// Pages and committed pages after n more tokens.
    int pages_after(int n, const device_geometry& g) const noexcept { return g.pages(paged_tokens(g) + n); }
    /// Of the pages that are not committed yet: the first that a window does not free with n more tokens.
    int gone_after(int n, const device_geometry& g) const noexcept {
        if (!g.window) return 0;
        const int needed = g.first_needed(tokens() + n, g.rollback) + skipped(g) - g.sinks;
        return common::larger(gone(), needed / g.page_tokens);
    }
    int committed_after(int n, const device_geometry& g) const noexcept {
        return common::larger(common::larger(committed(), gone_after(n, g)),
                              g.committed(paged_tokens(g) + n));
    }
    /// Quantized pages that n more tokens take from the pool: those that a window frees at once are never
    /// quantized, unless queries of a step see them.
    int missing_quantized(int n, const device_geometry& g) const noexcept {
        const int due = common::larger(committed(), g.committed(paged_tokens(g) + n)),
                  fresh = common::larger(pages(), gone_after(n, g));
        return common::smaller(due, pages()) - committed() + common::larger(0, due - fresh);
    }
    /// Pages from here on are read in 16 bit by launches of the step: those that are not committed, also if a
    /// window has freed them.
    int first_in_16_bit() const noexcept {
        int first = committed();
        while (first > 0 && first <= gone() && left(first - 1, false) != nullptr &&
               left(first - 1, true) == nullptr)
            --first;
        return first;
    }
    int committed_after_trim(int n, const device_geometry& g) const noexcept {
        const auto left_over = table.after_trim(n, g);
        const int sinks_left = common::smaller(left_over.spans, sink_spans());
        return (left_over.spans > sinks_left ? gone() : 0) +
               common::larger(0, left_over.committed - sinks_left);
    }
    /// The 16-bit page of a page: of its tokens, or their copy. Null if there is none.
    const page* window_page(int i) const noexcept {
        if (i >= pages()) return ahead[static_cast<std::size_t>(i - pages())].get();
        if (i >= committed()) return (*this)[i].pages[0].get();
        if (i >= gone())
            if (const page* const copy = (*this)[i].copies[0].get()) return copy;
        return left(i, false);
    }
    /// Pages from here on have 16-bit values that stay.
    int first_in_window() const noexcept {
        int first = committed();
        while (first > gone() && (*this)[first - 1].copies[0]) --first;
        return first;
    }

    /// 16-bit pages that n more tokens take from the pool, beyond those that the sequence gives back before.
    int missing_pages(int n, const device_geometry& g) const noexcept {
        const int end = pages_after(n, g), window = end - g.ring;
        int missing = end - common::larger(pages(), window) - static_cast<int>(ahead.size()) -
                      in_16_bit_leaving() - common::larger(0, common::smaller(window, pages()) - committed());
        for (int i = table.copies_from; i < table.committed; ++i)
            missing -= table[i].copies[0] && !table.keeps_copies(table[i], tokens() + n, g, g.rollback);
        return common::larger(0, missing);
    }
    /// Do n more tokens complete those of a plan?
    bool completes(int n, const device_geometry& g) const noexcept {
        return tokens() < g.commits_from && tokens() + n >= g.commits_from;
    }
    /// Do pages wait to be quantized that no step commits?
    bool has_due(const device_geometry& g) const noexcept { return table.due(tokens(), g) > table.committed; }
    /// n more tokens. The pools have enough free pages. prompt: what is due is quantized with it; in a step
    /// that completes the tokens of a plan, nothing is.
    void grow(int n, const device_geometry& g, const sequence_pools& pools, bool prompt = false) {
        const bool waits = !prompt && completes(n, g);
        const int after = tokens() + n, window = pages_after(n, g) - g.ring, before_growth = table.size();
        leaving.clear();
        table.drop_copies(g, g.rollback, n);
        // Pages that leave the window in a prompt: launches read them before the next page of their column
        // takes their place.
        for (int i = committed(); i < common::smaller(window, pages()); ++i)
            leaving.push_back({i, std::exchange(table[i - gone() + sink_spans()].pages[0], {}), shift_of(i)});
        take_sinks(paged_tokens(g) + n, g, pools);
        table.grow(after, g, [&](page_span& s) {
            if (!s.sinks && pages() >= window) s.pages[0] = next_window_page(g, pools);
        });
        leaving.clear();
        const int due = waits ? table.committed : table.due(after, g);
        for (int i = table.committed; i < due; ++i) {
            if (table[i].sinks) continue;
            page_ref quantized;
            if (i < before_growth || !table.leaves(table[i], after, g, g.rollback))
                quantized = pools.quantized.take();
            page_ref before = table.commit_page(i, 0, std::move(quantized), after, g, g.rollback);
            if (before) leaving.push_back({i + gone() - sink_spans(), std::move(before), table[i].shift});
        }
        table.committed = due;
        table.drop_copies(g, g.rollback);
        for (int i = sink_spans(); i < table.size() && table.leaves(table[i], after, g, g.rollback); ++i)
            for (page_ref* const p : {&table[i].pages[0], &table[i].copies[0]})
                if (*p) leaving.push_back({i + gone() - sink_spans(), std::move(*p), table[i].shift});
        const int held = table.size();
        table.free_unseen(g, g.rollback, [](page_ref&&) {});
        gone_pages += held - table.size();
    }
    /// After an erase, shift, splice or trim: finds what `moved` says. O(spans * numbers)
    void find_moved() {
        moved.clear();
        if (!table.rearranged) return;
        for (const page_span& s : table.spans)
            if (s.shift != 0 && std::ranges::find(moved, s.shift) == moved.end()) moved.push_back(s.shift);
    }
    /// Of the keys of a page, also of one that leaves with the last growth.
    std::int64_t shift_of(int i) const noexcept {
        if (i >= pages()) return 0;
        if (i >= gone()) return (*this)[i].shift;
        for (const leaving_page& l : leaving)
            if (l.page == i) return l.shift;
        return 0;
    }
    std::int64_t shift_of_sinks() const noexcept { return sink_spans() > 0 ? table[0].shift : 0; }
    /// Of the page that the next token goes to.
    std::int64_t open_shift() const noexcept { return table.has_open_span() ? table.spans.back().shift : 0; }
    /// 16-bit pages that n more drafted tokens take from the pool.
    int missing_draft_pages(int n, const device_geometry& g) const noexcept {
        return common::larger(
            0, pages_after(drafted + n, g) - pages() - static_cast<int>(ahead.size()) - in_16_bit_leaving());
    }
    /// n more drafted tokens. No page is committed for them.
    void draft(int n, const device_geometry& g, const sequence_pools& pools) {
        leaving.clear();
        drafted += n;
        const int after = paged_tokens(g) + drafted;
        while (pages() + static_cast<int>(ahead.size()) < g.pages(after))
            ahead.push_back(pools.window.take());
        take_sinks(after, g, pools);
    }
    /// Gives back the pages of a draft that is gone, and those that only launches until now read.
    void release_unused(const device_geometry& g) noexcept {
        ahead.clear();
        leaving.clear();
        while (static_cast<int>(sinks.size()) > g.sink_pages(tokens())) sinks.pop_back();
    }
    /// To n tokens. A draft is gone. Gives back what no token needs. O(pages that go)
    void trim(int n, const device_geometry& g) noexcept {
        drafted = 0;
        (void)table.trim(n, g);
        if (table.size() == sink_spans()) table.freed = gone_pages = 0;  // pages begin again behind the sinks
        release_unused(g);
        if (!moved.empty()) find_moved();
        forget_plan(g);
    }
    /// Behind a trim: a plan that no page has is made again.
    void forget_plan(const device_geometry& g) noexcept {
        if (tokens() >= g.commits_from) return;
        for (int i = 0; i < table.committed; ++i)
            if (table[i].pages[0] && table[i].pages[0]->format != 0) return;
        plan = {};
    }
    /// The pages that has_due() finds have been quantized, in order.
    void commit_due(const device_geometry& g, std::vector<page_ref>& quantized) noexcept {
        const int due = table.due(tokens(), g);
        auto next = quantized.begin();
        for (int i = table.committed; i < due; ++i) {
            if (table[i].sinks) continue;
            (void)table.commit_page(i, 0, std::move(*next++), tokens(), g, g.rollback);
        }
        table.committed = due;
        leaving.clear();
    }

    /// Adds the 16-bit pages to a report. They are of this sequence alone, but for those of layers with cross
    /// attention: with `counted` each of these counts once. O(pages in the window)
    void add_window(usage_report& u, std::set<const page*>* counted = nullptr) const {
        const auto add = [&](const common::held_page& p) {
            if (counted == nullptr || !p.shared() || counted->insert(&p.held).second) common::add_page(u, p);
        };
        for (std::size_t i = 0; i < sinks.size(); ++i) {
            const int room = sinks[i]->tokens, before = static_cast<int>(i) * room;
            add({*sinks[i], common::smaller(room, tokens() - before)});
        }
        for (int i = table.copies_from; i < table.size(); ++i) {
            const page_span& s = table[i];
            if (s.copies[0]) add({*s.copies[0], 0, true});
            if (i >= table.committed && !s.sinks) add({*s.pages[0], s.tokens});
        }
        for (const page_ref& p : ahead) u.reserved += p->bytes;
        for (const leaving_page& l : leaving)
            if (l.held->format == 0) u.reserved += l.held->bytes;
    }
    /// And the quantized ones, without the sum. O(pages)
    void add_to(usage_report& u) const {
        add_window(u);
        table.for_each_page(0, [&](const common::held_page& p) {
            if (p.held.format != 0) common::add_page(u, p);
        });
        for (const leaving_page& l : leaving) {
            if (l.held->format == 0) continue;
            u.reserved += l.held->bytes;
            if (common::held_page{*l.held}.shared()) u.shared += l.held->bytes;
        }
    }

private:
    /// A page that leaves with the last growth.
    const page* left(int i, bool quantized) const noexcept {
        for (const leaving_page& l : leaving)
            if (l.page == i && (l.held->format != 0) == quantized) return l.held.get();
        return nullptr;
    }
    int in_16_bit_leaving() const noexcept {
        int count = 0;
        for (const leaving_page& l : leaving) count += l.held->format == 0;
        return count;
    }
    /// The 16-bit page of page pages().
    page_ref next_window_page(const device_geometry& g, const sequence_pools& pools) {
        page_ref p;
        if (!ahead.empty()) {
            p = std::move(ahead.front());
            ahead.erase(ahead.begin());
            return p;
        }
        for (leaving_page& l : leaving)
            if (l.held && l.page % g.ring == pages() % g.ring) return std::move(l.held);
        return pools.window.take();
    }
    void take_sinks(int n, const device_geometry& g, const sequence_pools& pools) {
        while (static_cast<int>(sinks.size()) < g.sink_pages(n)) sinks.push_back(pools.sinks.take());
    }
};

}}}  // namespace kvq::cuda::detail
