// Pages in use that change their format: which of them, in which order, each once.
//
//   requantizing    the pages of a range of tokens (change_range)
//   stepping down   by age, the narrowest tier first, so that no page changes twice; then by budget, the
//                   oldest page of the widest tier first
//
// A page that several tables hold, or several spans of one (after an erase), is one change for all of them.
// Caches carry the changes out: they make the new pages, and page_table::change_page() puts them in. The
// place of a span counts the spans that a window has freed before it, so that spans in one place are about as
// old.
// Contract: tables are only read. Sinks and spans that are not committed never change. The order depends on
// the tables and on their order, not on addresses.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "page_table.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// Pages that may change: those of committed spans that lie wholly within.
struct change_range {
    static constexpr int all = (std::numeric_limits<int>::max)();

    int first_token = 0, last_token = all;
    /// One per table, replaces last_token: a page behind it changes only if another holder of the page has a
    /// later last token.
    std::span<const int> last_tokens{};
    /// Skip pages that others hold, which would not be freed.
    bool only_own = false;
    /// Skip those as well that would be kept as 16-bit copies.
    bool only_freed = false;
    int first_place = 0, last_place = all;  ///< of spans, those in a gap counted: page_table::freed
};

/// A span that holds a page: of which of the selected tables.
struct held_span {
    int table, span;
};
/// A page, and all spans that take the new one.
struct page_change {
    const page_ref& held;
    std::span<const held_span> spans;
};

class page_changes {
public:
    page_changes(std::pmr::memory_resource* memory, const page_geometry& g, int rollback)
        : geometry_(g), rollback_(rollback), rows_(memory), found_(memory), spans_(memory) {}

    /// The geometry of the layer that is selected next.
    void set_geometry(const page_geometry& g) noexcept { geometry_ = g; }
    /// tables: of the same layer, one per sequence; they stay where they are until the next selection.
    void select(std::span<page_table* const> tables, const change_range& range) {
        tables_ = tables;
        only_own_ = range.only_own || range.only_freed;
        only_freed_ = range.only_freed;
        elsewhere_ = false;
        rows_.clear();
        rows_.reserve(tables.size());
        found_.reserve(tables.size());
        spans_.reserve(tables.size());
        begin_ = change_range::all;
        end_ = 0;
        for (std::size_t s = 0; s < tables.size(); ++s) {
            const page_table& table = *tables[s];
            const int token = range.last_tokens.empty() ? range.last_token : range.last_tokens[s];
            const auto at = [&](int i) { return table.spans.begin() + i; };
            const auto first = std::partition_point(at(0), at(table.committed), [&](const page_span& span) {
                return span.first_token < range.first_token;
            });
            const auto last = std::partition_point(
                first, at(table.committed), [&](const page_span& span) { return span.end() <= token; });
            const row own{larger(range.first_place - table.freed, static_cast<int>(first - at(0))),
                          smaller(range.last_place - table.freed, static_cast<int>(last - at(0)))};
            rows_.push_back(own);
            elsewhere_ = elsewhere_ || table.rearranged || table.freed != tables[0]->freed ||
                         table.freed == page_table::most_freed;
            begin_ = smaller(begin_, own.first);
            end_ = larger(end_, own.last);
        }
    }

    /// Calls f(change) for every page of a piece for which wanted(page) holds, oldest pages first.
    template <class Wanted, class F>
    void for_each(std::size_t piece, Wanted&& wanted, F&& f) {
        for (int i = begin_; i < end_; ++i) {
            if (!find_holders(i, piece, wanted)) continue;
            if (elsewhere_) find_other_places(i, piece);
            for (std::size_t at = 0, next; at < found_.size(); at = next) {
                bool wanted_here = false;
                spans_.clear();
                for (next = at; next < found_.size() && found_[next].first == found_[at].first; ++next) {
                    const holder& h = found_[next];
                    const row& r = rows_[static_cast<std::size_t>(h.index)];
                    wanted_here = wanted_here || (h.span >= r.first && h.span < r.last);
                    spans_.push_back({h.index, h.span});
                }
                const page_change change{table(spans_[0].table)[spans_[0].span].pages[piece], spans_};
                if (!wanted_here || (only_own_ && change.held.references() > change.spans.size())) continue;
                if (!only_freed_ || !keeps(change, piece)) f(change);
            }
        }
    }

private:
    /// The spans of a table to change.
    struct row {
        int first, last;
    };
    /// A table that holds a page to change, the span there, and the first holder of this page.
    struct holder {
        const page* held;
        int first, index;  // of tables
        int span;
    };

    const page_table& table(int i) const noexcept { return *tables_[static_cast<std::size_t>(i)]; }
    int tables() const noexcept { return static_cast<int>(tables_.size()); }

    /// Fills found_ with the tables that hold page i, holders of the same page side by side, in the order of
    /// the tables.
    template <class Wanted>
    bool find_holders(int i, std::size_t piece, Wanted&& wanted) {
        constexpr int ahead = 8;
        found_.clear();
        bool one_page = true;
        for (int s = 0; s < tables(); ++s) {
            const page_table& of = table(s);
            if (i >= of.committed) continue;
            // When no page has to change, all of the time is spent waiting for pages from memory.
            if (i + ahead < of.committed) prefetch(of[i + ahead].pages[piece].get());
            if (of[i].sinks) continue;
            const page* const p = of[i].pages[piece].get();
            if (!wanted(*p)) continue;
            const int first = found_.empty() ? s : found_.front().index;
            one_page = one_page && (found_.empty() || found_.front().held == p);
            found_.push_back({p, first, s, i});
        }
        if (one_page) return !found_.empty();
        sort_found([](const holder& a, const holder& b) {
            return a.held != b.held ? std::less<>{}(a.held, b.held) : a.index < b.index;
        });
        for (std::size_t k = 0; k < found_.size(); ++k)
            found_[k].first =
                k > 0 && found_[k].held == found_[k - 1].held ? found_[k - 1].first : found_[k].index;
        // The order must not depend on addresses.
        sort_found([](const holder& a, const holder& b) {
            return a.first != b.first ? a.first < b.first : a.index < b.index;
        });
        return true;
    }

    /// After an erase or a splice, and where a window has left more of one table than of another: adds the
    /// spans that hold the pages in found_ at other indices. Pages that were found from an earlier index of
    /// the range on go. O(spans) for each page with more references than were found.
    void find_other_places(int i, std::size_t piece) {
        const std::size_t found_here = found_.size();
        for (std::size_t at = 0, next; at < found_here; at = next) {
            const page* const p = found_[at].held;
            for (next = at; next < found_here && found_[next].held == p;) ++next;
            const int owner = found_[at].first;
            if (p->references.load(std::memory_order_acquire) <= next - at) continue;
            bool earlier = false;
            for (int s = 0; s < tables(); ++s)
                for (int span = 0; span < table(s).committed; ++span) {
                    if (span == i || table(s)[span].pages[piece].get() != p) continue;
                    earlier = earlier || (span >= begin_ && span < i);
                    found_.push_back({p, owner, s, span});
                }
            if (earlier)
                for (holder& h : found_)
                    if (h.held == p) h.held = nullptr;
        }
        std::erase_if(found_, [](const holder& h) { return h.held == nullptr; });
        sort_found([](const holder& a, const holder& b) {
            if (a.first != b.first) return a.first < b.first;
            return a.index != b.index ? a.index < b.index : a.span < b.span;
        });
    }

    /// One sort for all orders: every file with a cache compiles it.
    void sort_found(bool (*before)(const holder&, const holder&)) {
        std::sort(found_.begin(), found_.end(), before);
    }

    /// Does one of these spans keep the page of a change as a copy once all of them have the new page?
    bool keeps(const page_change& change, std::size_t piece) const {
        for (const held_span& at : change.spans)
            if (table(at.table).keeps_page(at.span, piece, geometry_, rollback_)) return true;
        return false;
    }

    page_geometry geometry_;
    int rollback_;
    std::span<page_table* const> tables_;
    resource_vector<row> rows_;  // by table
    resource_vector<holder> found_;
    resource_vector<held_span> spans_;  // of the change that f() gets
    bool only_own_ = false, only_freed_ = false;
    bool elsewhere_ = false;   // tables may hold a page at other indices
    int begin_ = 0, end_ = 0;  // spans in which any table has pages to change
};

/// Calls lower(tier, range) for the pages that have reached the age of each tier and that no other sequence
/// holds. lengths: tokens of the sequences.
template <class Lower>
void step_down_by_age(std::span<const int> ages, std::span<const int> lengths, Lower&& lower) {
    std::vector<int> last(lengths.size());
    for (std::size_t tier = ages.size(); tier-- > 0;) {
        int longest = 0;
        for (std::size_t s = 0; s < last.size(); ++s) {
            last[s] = lengths[s] - ages[tier];
            longest = larger(longest, last[s]);
        }
        if (longest > 0) lower(tier, {.last_token = longest, .last_tokens = last, .only_own = true});
    }
}

/// Calls lower(tier, range), which returns the bytes in use afterwards, for one span of all tables after the
/// other, until `budget` holds them. tables: of all layers and sequences.
template <class Lower>
void step_down_by_budget(std::size_t tiers, std::span<const page_table* const> tables, std::size_t in_use,
                         std::size_t budget, Lower&& lower) {
    std::vector<change_range> spans;
    for (const page_table* const table : tables)
        for (int i = 0; i < table->committed; ++i) {
            const page_span& s = (*table)[i];
            const int at = i + table->freed;
            for (int place = static_cast<int>(spans.size()); place <= at; ++place)
                spans.push_back({change_range::all, 0, {}, true, true, place, place + 1});
            change_range& range = spans[static_cast<std::size_t>(at)];
            range.first_token = smaller(range.first_token, s.first_token);
            range.last_token = larger(range.last_token, s.end());
        }
    for (std::size_t tier = 1; tier < tiers; ++tier)
        for (const change_range& range : spans) {
            if (in_use <= budget) return;
            if (range.last_token > 0) in_use = lower(tier, range);
        }
}

}}}  // namespace kvq::detail
