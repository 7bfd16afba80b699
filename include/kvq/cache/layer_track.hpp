// One layer of one sequence: its spans (page/layer_pages.hpp) and how far they are committed.
//
//   spans   [sinks][page][page] ... [page]     the first `committed` of them are past the recent window
//
// Committed means: quantized, or left in 16 bit if that is the target format of the tensor. Spans that are not committed
// are the last ones: they hold 16-bit pages and skip no tokens, and the very last one may take more tokens; if its keys moved, new
// keys take its rotation. A committed span that was closed before it was full (cache/rearrange.hpp) has pages for its own tokens only.
// Contract: K and V share the spans. The vector reserves its memory before anything changes, so that later steps cannot fail.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory_resource>
#include <utility>
#include <vector>

#include "../core/resource_vector.hpp"
#include "../core/shape.hpp"
#include "options.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

struct layer_track {
    int tokens = 0;
    int committed = 0;   ///< leading spans that are past the window; the sinks count once they are complete
    int first_copy = 0;  ///< spans before it have no 16-bit copies
    int targets[2];      ///< formats to which K and V pages are committed; 0: pages stay 16 bit
    bool rearranged = false;   ///< after an erase, shift or splice: two spans may share a page
    std::size_t repacked = 0;  ///< tokens that were quantized once more (cache/repack.hpp)
    resource_vector<page_span> spans;
    int draft = 0;                 ///< tokens of the last span that wait for keep() (cache/draft.hpp)
    std::size_t table_before = 0;  ///< capacity of `spans` before the draft

    layer_track(std::pmr::memory_resource* memory, int key_target, int value_target)
        : targets{key_target, value_target}, spans(memory) {}
    layer_track(const layer_track& other, std::pmr::memory_resource* memory)
        : tokens(other.tokens),
          committed(other.committed),
          first_copy(other.first_copy),
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

    /// Drops copies that no trim within `rollback` can restore any more. Spans without copies may lie between those with copies.
    void drop_copies(const page_geometry& g, int rollback) noexcept {
        for (int i = first_copy; i < committed; ++i)
            if (!keeps_copies((*this)[i], tokens, g, rollback))
                for (page_ref& copy : (*this)[i].copies) copy = page_ref{};
        while (first_copy < committed && !(*this)[first_copy].copies[0] && !(*this)[first_copy].copies[1])
            ++first_copy;
    }
    /// Drops all copies: trims find the quantized pages alone.
    void drop_all_copies() noexcept {
        for (; first_copy < committed; ++first_copy)
            for (page_ref& copy : (*this)[first_copy].copies) copy = page_ref{};
    }
    /// Removes every token from position n on. Spans that are not due any more become 16 bit again where an exact copy exists;
    /// the remaining tokens of other quantized pages keep their codes. Returns whether one of these pages shows fewer tokens than before.
    bool cut(int n, const page_geometry& g) noexcept {
        if (n >= tokens) return false;
        const page* removed = nullptr;  // only compared: it may be gone
        while (size() > 0 && spans.back().first_token >= n) {
            removed = spans.back().pages[0].get();
            spans.pop_back();
        }
        const bool within = size() > 0 && (spans.back().end() > n || spans.back().pages[0].get() == removed);
        if (size() > 0) spans.back().tokens = smaller(spans.back().tokens, n - spans.back().first_token);
        tokens = n;
        committed = smaller(committed, size());
        uncommit(n, g);
        // A page that shows a part of its tokens needs no copy: restoring it would bring back the hidden tokens.
        if (committed > 0 && !spans[static_cast<std::size_t>(committed - 1)].full())
            for (page_ref& copy : spans[static_cast<std::size_t>(committed - 1)].copies) copy = page_ref{};
        first_copy = smaller(first_copy, committed);
        return within && committed == size();
    }
    /// Spans that are not due any more in a layer of n tokens become 16 bit again, from the last one on, as long as they can.
    void uncommit(int n, const page_geometry& g) noexcept {
        while (committed > 0 && !is_due((*this)[committed - 1], n, g)) {
            page_span& s = spans[static_cast<std::size_t>(committed - 1)];
            // Only the last span may be filled.
            const bool filled = s.full() || committed == size();
            if (!filled || s.skip > 0 || !s.has_window_page(0) || !s.has_window_page(1)) break;
            for (int role = 0; role < 2; ++role)
                if (s.copies[role]) s.pages[role] = std::move(s.copies[role]);
            --committed;
        }
        // The last span may be filled, also if it was closed.
        if (size() > committed) spans.back().room = g.capacity(spans.back().sinks);
    }
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
};

}}}  // namespace kvq::detail
