// Repacking: which spans of a table give their tokens to shorter pages, so that the bytes of a layer stay in
// proportion to its tokens.
//
//   run         neighbouring spans that show tokens of one page, in their order
//   allowance   tokens of a run * bytes of a whole page / page_tokens / cache_options::repack, for all pieces
//               together
//
// A run with more bytes than its allowance is repacked: its tokens go to a page with memory for just these,
// together with those of the next such runs, as far as they fit in one page. If the new page has more bytes
// than its allowance even so (a few tokens under one header), and also with those of the next run, the tokens
// of that run join it. So but for the last run
//   bytes of a layer's pages <= footprint of its tokens / repack + one page
//     (tests/properties/shifts_bytes.cpp)
//
// Contract: the result depends on the spans of the layer alone, not on other sequences, so that forks and
// restored sequences have the same future. A span with 16-bit copies is not repacked: a trim within
// cache_options::rollback must restore it. Repacking again changes nothing.
#pragma once

#include "page_table.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// Bytes of pages, headers included.
class page_sizes {
public:
    virtual std::size_t bytes(std::size_t piece, int format, int tokens) const = 0;

protected:
    page_sizes() = default;
    ~page_sizes() = default;
};

/// Neighbouring spans: a run, or the runs that become one page.
struct repack_group {
    int first, last;  // spans
    int runs;
    int tokens;
    std::size_t bytes;  // of their pages; 16-bit pages that wait count as they would be saved
    std::size_t held;   // of their pages as they are
    double allowance;
    bool fresh;  // its tokens get a new page
};

/// The groups of the spans that are committed, or of those that are not. The table may change behind a group
/// that is looked at: from the last group on, the others keep their spans.
class repack_plan {
public:
    repack_plan(const page_table& of, bool committed, const page_geometry& g, float repack,
                const page_sizes& sizes, std::pmr::memory_resource* memory)
        : table_(of), committed_(committed), geometry_(g), repack_(repack), sizes_(sizes), groups_(memory) {
        const int first = committed ? own_sinks() : larger(of.committed, own_sinks());
        const int last = committed ? of.committed : of.size();
        if (first >= last) return;
        find_groups(first, last);
        join_small_ones();
    }

    const resource_vector<repack_group>& groups() const noexcept { return groups_; }
    /// Does the group get new pages?
    bool changes(const repack_group& g) const {
        return g.runs > 1 ||
               (static_cast<double>(g.held) > g.allowance && may_change(g) && new_bytes(g) < g.held);
    }
    /// Of the new pages of a group.
    std::size_t new_bytes(const repack_group& g) const {
        std::size_t bytes = 0;
        for (std::size_t piece = 0; piece < 2; ++piece)
            if (table_[g.first].pages[piece]) bytes += sizes_.bytes(piece, format_of(g, piece), rows_of(g));
        return bytes;
    }
    /// The span that takes the place of those of a group, without its pages.
    page_span span_of(const repack_group& g) const noexcept {
        const int room = committed_ || g.last != table_.size() ? g.tokens : geometry_.page_tokens;
        return {table_[g.first].first_token, g.tokens, room, {}, {}, 0, false, largest_of(g).shift};
    }
    /// Tokens that its pages have memory for.
    int rows_of(const repack_group& g) const noexcept {
        return committed_ ? g.tokens : geometry_.window_tokens(g.tokens, geometry_.page_tokens);
    }
    /// Sinks of another sequence take the format of the layer.
    int format_of(const repack_group& g, std::size_t piece) const noexcept {
        const page_span& s = largest_of(g);
        return committed_ && s.sinks ? table_.targets[piece] : s.pages[piece]->format;
    }

    /// Of its keys (page::plan).
    const kvq::format& plan_of(const repack_group& g) const noexcept {
        const page_span& s = largest_of(g);
        return committed_ && s.sinks ? table_.plan : s.pages[0]->plan;
    }

private:
    /// The spans in front that show the sinks of the sequence itself, and others that every query sees: a
    /// window must not leave them.
    int own_sinks() const noexcept {
        int n = 0;
        while (n < table_.size() && table_[n].sinks &&
               (same_pages(table_[n], table_[0]) || table_[n].first_token < geometry_.window.sinks))
            ++n;
        return n;
    }
    static bool same_pages(const page_span& a, const page_span& b) noexcept {
        return a.pages[0].get() == b.pages[0].get() && a.pages[1].get() == b.pages[1].get();
    }
    static std::size_t bytes_of(const page_span& s) noexcept {
        std::size_t bytes = 0;
        for (const page_ref& p : s.pages) bytes += p ? page_pool::allocation(p->bytes) : 0;
        return bytes;
    }
    /// The span of a group that shows the most tokens.
    const page_span& largest_of(const repack_group& g) const noexcept {
        int most = g.first;
        for (int i = g.first; i < g.last; ++i)
            if (table_[i].tokens > table_[most].tokens) most = i;
        return table_[most];
    }

    repack_group run_from(int first, int last) const {
        const page_span& s = table_[first];
        int end = first + 1, tokens = s.tokens;
        for (; end < last; ++end) {
            const page_span &before = table_[end - 1], &next = table_[end];
            if (!same_pages(next, s) || next.skip < before.skip + before.tokens) break;
            tokens += next.tokens;
        }
        repack_group g{first, end, 1, tokens, bytes_of(s), bytes_of(s), 0.0, false};
        g.allowance = allowance_of(g, false);
        if (!committed_) g.bytes = new_bytes(g);
        return g;
    }
    /// Of its pages as they are, or in the formats of its new ones.
    double allowance_of(const repack_group& g, bool fresh) const {
        std::size_t whole = 0;
        for (std::size_t piece = 0; piece < 2; ++piece)
            if (const page_ref& p = table_[g.first].pages[piece])
                whole += sizes_.bytes(piece, fresh ? format_of(g, piece) : p->format, geometry_.page_tokens);
        return static_cast<double>(whole) * g.tokens / geometry_.page_tokens / static_cast<double>(repack_);
    }
    /// Not across the gap of a window.
    bool fits(const repack_group& a, const repack_group& b) const noexcept {
        return a.tokens + b.tokens <= geometry_.page_tokens &&
               table_[a.last - 1].end() == table_[b.first].first_token;
    }
    void join(repack_group& to, const repack_group& next) const {
        to.last = next.last;
        to.runs += next.runs;
        to.tokens += next.tokens;
        to.bytes += next.bytes;
        to.held += next.held;
        to.allowance = allowance_of(to, true);
        to.fresh = true;
    }
    bool may_change(const repack_group& g) const noexcept {
        for (int i = g.first; i < g.last; ++i)
            if (table_[i].copies[0] || table_[i].copies[1]) return false;
        return g.tokens <= geometry_.page_tokens;
    }

    void find_groups(int first, int last) {
        for (int i = first; i < last;) {
            repack_group g = run_from(i, last);
            i = g.last;
            g.fresh = static_cast<double>(g.bytes) > g.allowance && may_change(g);
            if (g.fresh) g.allowance = allowance_of(g, true);
            if (g.fresh && !groups_.empty() && groups_.back().fresh && fits(groups_.back(), g))
                join(groups_.back(), g);
            else
                groups_.push_back(g);
        }
    }
    void join_small_ones() {
        std::size_t n = 0;  // groups that are done
        const auto excess = [this](const repack_group& of) {
            return static_cast<double>(of.fresh ? new_bytes(of) : of.bytes) - of.allowance;
        };
        for (const repack_group& g : groups_) {
            repack_group* const before = n > 0 ? &groups_[n - 1] : nullptr;
            if (before && before->fresh && fits(*before, g) && may_change(g) && excess(*before) > 0.0 &&
                excess(*before) + excess(g) > 0.0)
                join(*before, g);
            else
                groups_[n++] = g;
        }
        groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(n), groups_.end());
    }

    const page_table& table_;
    bool committed_;
    page_geometry geometry_;
    float repack_;
    const page_sizes& sizes_;
    resource_vector<repack_group> groups_;
};

}}}  // namespace kvq::detail
