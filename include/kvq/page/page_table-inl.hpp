// Definitions of page_table.hpp.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "page_table.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// A reference of a table to a page. One type and one sort for all lists of them: every file with a cache
/// compiles these.
struct page_use {
    const page* of;
    page_ref* held = nullptr;
    bool copy = false;
    int shown = 0;  ///< tokens
};
inline void sort_uses(std::vector<page_use>& uses, bool (*before)(const page_use&, const page_use&)) {
    std::sort(uses.begin(), uses.end(), before);
}
/// Uses of the same page side by side, copies last.
inline void sort_by_page(std::vector<page_use>& uses) {
    sort_uses(uses, [](const page_use& a, const page_use& b) {
        return a.of != b.of ? std::less<>{}(a.of, b.of) : a.copy < b.copy;
    });
}

KVQ_FUNC page_table::page_table(std::pmr::memory_resource* memory, int key_target, int value_target)
    : targets{key_target, value_target}, spans(memory) {}

KVQ_FUNC page_table::page_table(const page_table& other, std::pmr::memory_resource* memory)
    : tokens(other.tokens),
      committed(other.committed),
      copies_from(other.copies_from),
      targets{other.targets[0], other.targets[1]},
      waits(other.waits),
      held(other.held),
      rearranged(other.rearranged),
      plan(other.plan),
      repacked(other.repacked),
      spans(memory),
      freed(other.freed),
      dropped(other.dropped),
      draft(other.draft),
      table_before(draft == 0 ? 0
                              : table_capacity(other.spans.size() - 1 + static_cast<std::size_t>(freed))) {
    spans.reserve(table_capacity(other.spans.size() + static_cast<std::size_t>(freed)));
    spans.assign(other.spans.begin(), other.spans.end());
}

KVQ_FUNC std::int64_t page_table::commit_at(const page_span& s, const page_geometry& g) noexcept {
    const int closed = s.room < g.capacity(s.sinks) ? 1 : 0;
    return larger(std::int64_t{g.commits_from},
                  std::int64_t{s.first_token} + s.room - s.skip + larger(g.recent, closed));
}

KVQ_FUNC bool page_table::is_due(const page_span& s, int n, const page_geometry& g) noexcept {
    return s.full() && ((s.sinks && s.room == g.sinks) || commit_at(s, g) <= n);
}

KVQ_FUNC bool page_table::keeps_copies(const page_span& s, int n, const page_geometry& g,
                                       int rollback) noexcept {
    return commit_at(s, g) > n - rollback;
}

KVQ_FUNC bool page_table::passes(const page_span& s, int n, const page_geometry& g, int rollback) noexcept {
    return s.full() && !s.sinks && commit_at(s, g) <= n && !keeps_copies(s, n, g, rollback);
}

KVQ_FUNC int page_table::size_after(int added, const page_geometry& g) const noexcept {
    int spans_after = size();
    if (has_open_span()) added -= smaller(added, spans.back().room - spans.back().tokens);
    if (added > 0 && begins_with_sinks(g)) {
        added -= smaller(added, g.sinks);
        ++spans_after;
    }
    return spans_after + ceil_div(added, g.page_tokens);
}

KVQ_FUNC int page_table::leading_sinks() const noexcept {
    int n = 0;
    while (n < size() && (*this)[n].sinks && (*this)[n].first_token == (n == 0 ? 0 : (*this)[n - 1].end()))
        ++n;
    return n;
}

KVQ_FUNC int page_table::end_of_sinks() const noexcept {
    const int n = leading_sinks();
    return n == 0 ? 0 : (*this)[n - 1].end();
}

KVQ_FUNC bool page_table::shows_sinks(int n) const noexcept {
    const int end = end_of_sinks();
    bool all = end >= n || tokens == 0 || (end == tokens && has_open_span());
    for (int i = 0; i < size() && (*this)[i].first_token < n; ++i)
        all = all && (*this)[i].skip == (*this)[i].first_token;
    return all;
}

KVQ_FUNC int page_table::front() const noexcept {
    const int n = leading_sinks();
    const int first = n < size() ? (*this)[n].first_token : tokens;
    return first > end_of_sinks() ? first : 0;
}

KVQ_FUNC bool page_table::is_whole(int n, const page_geometry& g) const noexcept {
    const int first = front();
    if (first == 0 || n <= end_of_sinks()) return true;
    return n > first && (dropped > 0 ? n >= dropped : g.window.first_seen(n) >= first);
}

KVQ_FUNC bool page_table::ends_in_cut_sinks(int n, const page_geometry& g) const noexcept {
    if (n >= g.window.sinks) return false;
    return std::any_of(spans.begin(), spans.end(),
                       [n](const page_span& s) { return s.first_token < n && n <= s.end() && s.skip > 0; });
}

KVQ_FUNC int page_table::trim_limit(const page_geometry& g) const noexcept {
    if (draft > 1) return tokens;
    if (dropped > 0) return dropped;
    const int first = front(), w = g.window.tokens;
    if (first == 0) {
        int n = smaller(g.window.sinks, tokens) - 1;
        while (n > 0 && !ends_in_cut_sinks(n, g)) --n;
        return n > 0 ? n + 1 : 0;
    }
    const std::int64_t least =
        g.window.chunked ? ceil_div(std::int64_t{first}, std::int64_t{w}) * w : std::int64_t{first} + w - 1;
    return static_cast<int>(smaller(larger(least, std::int64_t{first} + 1), std::int64_t{tokens}));
}

KVQ_FUNC void page_table::free_spans(int kept, int end) noexcept {
    if (end == kept) return;
    spans.erase(spans.begin() + kept, spans.begin() + end);
    const auto without = [&](int n) { return n > end ? n - (end - kept) : smaller(n, kept); };
    committed = without(committed);
    copies_from = without(copies_from);
    freed = smaller(freed + end - kept, most_freed);
}

KVQ_FUNC page_span page_table::next_span(int n, const page_geometry& g) const noexcept {
    const bool of_sinks = begins_with_sinks(g);
    const int room = g.capacity(of_sinks);
    return {tokens, smaller(room, n - tokens), room, {}, {}, 0, of_sinks};
}

KVQ_FUNC int page_table::due(int n, const page_geometry& g) const noexcept {
    int i = committed;
    while (!held && i < size() && is_due((*this)[i], n, g)) ++i;
    return i;
}

KVQ_FUNC page_ref page_table::commit_page(int i, std::size_t piece, page_ref quantized, int n,
                                          const page_geometry& g, int rollback) noexcept {
    page_span& s = (*this)[i];
    page_ref before = std::exchange(s.pages[piece], std::move(quantized));
    if (!before || !keeps_copies(s, n, g, rollback)) return before;
    s.copies[piece] = std::move(before);
    return {};
}

KVQ_FUNC void page_table::drop_draft() noexcept {
    if (draft == 0) return;
    spans.pop_back();
    tokens -= std::exchange(draft, 0);
}

KVQ_FUNC bool page_table::is_possible(const page_span& s, bool is_committed, bool last,
                                      const page_geometry& g) noexcept {
    const int capacity = g.capacity(s.sinks);
    return s.tokens >= 1 && s.skip >= 0 && s.room >= 1 && s.room <= capacity && s.skip < s.room &&
           s.tokens <= s.room - s.skip &&
           (is_committed || (s.skip == 0 && (last ? s.room == capacity : s.full())));
}

KVQ_FUNC bool page_table::may_have_memory(const page_span& s, bool is_committed, int memory,
                                          const page_geometry& g) noexcept {
    return memory >= (is_committed ? s.room : s.tokens) && memory <= g.capacity(s.sinks);
}

KVQ_FUNC bool page_table::may_have_copies(const page_span& s, int n, const page_geometry& g,
                                          int rollback) noexcept {
    return !s.sinks && s.skip == 0 && s.full() && keeps_copies(s, n, g, rollback);
}

KVQ_FUNC void page_table::drop_copies(const page_geometry& g, int rollback, int added) noexcept {
    for (int i = copies_from; i < committed; ++i)
        if (!keeps_copies((*this)[i], tokens + added, g, rollback))
            for (page_ref& copy : (*this)[i].copies) copy = page_ref{};
    while (copies_from < committed && !(*this)[copies_from].copies[0] && !(*this)[copies_from].copies[1])
        ++copies_from;
}

KVQ_FUNC bool page_table::keeps_page(int i, std::size_t piece, const page_geometry& g,
                                     int rollback) const noexcept {
    const page_span& s = (*this)[i];
    return s.pages[piece]->format == 0 && s.skip == 0 && is_due(s, tokens, g) && !s.copies[piece] &&
           keeps_copies(s, tokens, g, rollback);
}

KVQ_FUNC void page_table::change_page(int i, std::size_t piece, page_ref fresh, const page_geometry& g,
                                      int rollback) noexcept {
    page_span& s = (*this)[i];
    if (keeps_page(i, piece, g, rollback)) {
        s.copies[piece] = std::move(s.pages[piece]);
        copies_from = smaller(copies_from, i);
    }
    s.pages[piece] = std::move(fresh);
}

KVQ_FUNC void page_table::drop_all_copies() noexcept {
    for (; copies_from < committed; ++copies_from)
        for (page_ref& copy : (*this)[copies_from].copies) copy = page_ref{};
}

KVQ_FUNC page_table::rest page_table::after_trim(int n, const page_geometry& g) const noexcept {
    int left = size();
    while (left > 0 && (*this)[left - 1].first_token >= n) --left;
    return {left, still_committed(left, n, g)};
}

KVQ_FUNC bool page_table::trim(int n, const page_geometry& g) noexcept {
    if (n >= tokens) return false;
    const rest left = after_trim(n, g);
    const page* const removed = left.spans < size() ? (*this)[left.spans].pages[0].get() : nullptr;
    spans.erase(spans.begin() + left.spans, spans.end());  // `removed` is only compared from here on
    const bool within = size() > 0 && (spans.back().end() > n || spans.back().pages[0].get() == removed);
    if (size() > 0) spans.back().tokens = smaller(spans.back().tokens, n - spans.back().first_token);
    tokens = n;
    committed = smaller(committed, size());
    restore(left.committed, g);
    // A page that shows a part of its tokens needs no copy: restoring it would bring back the tokens behind
    // them.
    if (committed > 0 && !(*this)[committed - 1].full())
        for (page_ref& copy : (*this)[committed - 1].copies) copy = page_ref{};
    copies_from = smaller(copies_from, committed);
    if (front() == 0) freed = dropped = 0;
    forget_plan(g);
    return within && committed == size();
}

KVQ_FUNC void page_table::drop_front(int n, const page_geometry& g) noexcept {
    const int kept = g.sinks > 0 ? 1 : 0;
    int end = kept;
    while (end < size() && (*this)[end].first_token < g.sinks + n) ++end;
    spans.erase(spans.begin() + kept, spans.begin() + end);
    for (int i = kept; i < size(); ++i) (*this)[i].first_token -= n;
    tokens -= n;
    committed = larger(kept, committed - (end - kept));
    copies_from = larger(0, copies_from - (end - kept));
}

KVQ_FUNC page_table::cut_window page_table::take(const page_table& from, int first, int last, std::int64_t by,
                                                 const page_geometry& g) {
    cut_window cut;
    rearranged = true;
    last = smaller(last, from.tokens);
    const int start = tokens;  // new position of token `first`
    for (int i = 0; i < from.size(); ++i) {
        const int begin = larger(first, from[i].first_token), end = smaller(last, from[i].end());
        if (begin >= end) continue;
        const bool is_committed = i < from.committed;
        page_span s = from[i];
        const int before = begin - s.first_token;
        s.first_token = start + begin - first;
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
    tokens = start + larger(0, last - first);
    return cut;
}

KVQ_FUNC void page_table::close_last() noexcept {
    if (size() > committed) spans.back().room = spans.back().skip + spans.back().tokens;
}

KVQ_FUNC void page_table::join_spans(int first, int last, page_span s) noexcept {
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

KVQ_FUNC void page_table::find_rearranged() {
    std::vector<page_use> uses;
    rearranged = false;
    for (const page_span& s : spans) {
        rearranged = rearranged || s.skip > 0 || s.shift != 0;
        for (const auto* list : {&s.pages, &s.copies})
            for (const page_ref& p : *list)
                if (p) uses.push_back({p.get()});
    }
    sort_by_page(uses);
    for (std::size_t i = 1; i < uses.size(); ++i) rearranged = rearranged || uses[i].of == uses[i - 1].of;
}

KVQ_FUNC const page* page_table::last_planned() const noexcept {
    for (int i = committed; i-- > 0;)
        if (const page_ref& p = (*this)[i].pages[0]; p && p->plan && p->format == targets[0]) return p.get();
    return nullptr;
}

KVQ_FUNC void page_table::forget_plan(const page_geometry& g) noexcept {
    for (int i = 0; tokens < g.commits_from && i < committed; ++i)
        if (const page_ref& p = (*this)[i].pages[0]; p && p->format != 0) return;
    if (tokens < g.commits_from) plan = {};
}

KVQ_FUNC bool page_table::shows_plan() const noexcept {
    const page* const planned = last_planned();
    return planned && planned->plan.is(plan);
}

KVQ_FUNC void page_table::find_plan() noexcept {
    const page* const planned = last_planned();
    plan = planned ? planned->plan : format{};
}

KVQ_FUNC void page_table::restored(int committed_spans, const page_geometry& g, int rollback, bool says_all) {
    tokens = size() == 0 ? 0 : spans.back().end();
    committed = committed_spans;
    freed = freed_spans(front(), g);
    dropped = g.window || front() == 0 ? 0 : tokens;
    drop_copies(g, rollback);
    find_plan();
    find_rearranged();
    if (!rearranged || says_all) return;
    std::vector<page_use> uses;
    for (std::size_t role = 0; role < 2; ++role) {
        uses.clear();
        for (int i = 0; i < committed; ++i) {
            page_ref& p = (*this)[i].pages[role];
            if (p) uses.push_back({p.get(), &p});
        }
        const auto before = [](const page_use& first, const page_use& second) {
            const page &a = *first.of, &b = *second.of;
            if (a.format != b.format) return a.format < b.format;
            if (a.bytes != b.bytes) return a.bytes < b.bytes;
            if (a.lower_bytes() != b.lower_bytes()) return a.lower_bytes() < b.lower_bytes();
            const int upper = std::memcmp(a.data(), b.data(), a.upper_bytes());
            return upper != 0 || !a.lower ? upper < 0 : std::memcmp(a.lower, b.lower, a.lower_bytes()) < 0;
        };
        sort_uses(uses, before);
        for (std::size_t i = 1; i < uses.size(); ++i)
            if (!before(uses[i - 1], uses[i])) {
                *uses[i].held = *uses[i - 1].held;
                uses[i].of = uses[i - 1].of;
            }
    }
}

KVQ_FUNC void page_table::add(page_span s, bool is_committed) {
    if (is_committed && size() > 0 && size() == committed) {
        page_span& last = spans.back();
        if (last.pages[0].get() == s.pages[0].get() && last.pages[1].get() == s.pages[1].get() &&
            last.shift == s.shift && last.skip + last.tokens == s.skip) {
            last.tokens += s.tokens;
            last.room = larger(last.room, s.room);  // it was closed where it shows the page's first tokens
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

KVQ_FUNC int page_table::still_committed(int left, int n, const page_geometry& g) const noexcept {
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

KVQ_FUNC void page_table::restore(int first, const page_geometry& g) noexcept {
    for (; committed > first; --committed) {
        page_span& s = (*this)[committed - 1];
        for (std::size_t piece = 0; piece < s.pages.size(); ++piece)
            if (s.copies[piece]) s.pages[piece] = std::move(s.copies[piece]);
    }
    // The last span may be filled, also if it was closed.
    if (size() > committed) spans.back().room = g.capacity(spans.back().sinks);
}

KVQ_FUNC std::vector<held_page> page_table::distinct_pages(std::size_t piece) const {
    std::vector<page_use> uses;
    for (const page_span& s : spans) {
        if (s.pages[piece]) uses.push_back({s.pages[piece].get(), nullptr, false, s.tokens});
        if (s.copies[piece]) uses.push_back({s.copies[piece].get(), nullptr, true});
    }
    sort_by_page(uses);
    std::vector<held_page> distinct;
    for (std::size_t first = 0, end; first < uses.size(); first = end) {
        int shown = 0;
        for (end = first; end < uses.size() && uses[end].of == uses[first].of; ++end)
            shown += uses[end].shown;
        const page& p = *uses[first].of;
        distinct.push_back(
            {p, smaller(shown, p.tokens), uses[first].copy, static_cast<std::uint32_t>(end - first)});
    }
    return distinct;
}

}}}
