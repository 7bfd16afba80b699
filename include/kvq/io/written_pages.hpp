// The pages of one layer and tensor as they are saved or sent: each page once, without the values of trimmed
// tokens.
//
//   page of a committed span, or a 16-bit copy    as it is: hidden tokens share parameters with the others
//   page of other spans only                      with memory as if it were new; tokens that none of them
//                                                 shows are zero
//
// Contract: two sequences in the same state give the same pages in the same order: by the first span that
// holds them, copies behind pages.
#pragma once

#include <array>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "../cache/window.hpp"
#include "../page/page_table.hpp"
#include "page_kind.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// What of every page is written: of one layer and tensor, or of several sequences that share pages.
class page_extents {
public:
    struct extent {
        bool as_it_is = false;
        int shown = 0, memory = 0;  // tokens
    };

    void add(const page_table& table, tensor role, const page_geometry& g) {
        const auto at = static_cast<std::size_t>(role);
        for (int i = 0; i < table.size(); ++i) {
            const page_span& s = table[i];
            extent& e = of_[s.pages[at].get()];
            e.as_it_is = e.as_it_is || i < table.committed;
            e.shown = larger(e.shown, s.tokens);
            e.memory = larger(e.memory, g.window_tokens(s.tokens, g.capacity(s.sinks)));
            if (s.copies[at]) of_[s.copies[at].get()].as_it_is = true;
        }
    }
    extent of(const page& p) const { return of_.at(&p); }

private:
    std::unordered_map<const page*, extent> of_;
};

class written_pages {
public:
    struct entry {
        page_ref page;
        page_kind kind;         ///< copy: no span shows it
        int span;               ///< the first one that shows it, or has it as its copy
        const kvq::page* held;  ///< the page of the sequence
    };

    /// scratch: for pages that are not written as they are; outlives this object.
    written_pages(const format& window, const page_table& table, tensor role, const cache_shape& shape,
                  page_pool& scratch, const page_extents& extents) {
        const auto at = static_cast<std::size_t>(role);
        std::unordered_map<const page*, int> known;
        const auto number_of = [&](const page_ref& p, page_kind kind, int span) {
            const auto [found, is_new] = known.emplace(p.get(), static_cast<int>(entries_.size()));
            if (is_new)
                entries_.push_back(
                    {clean(window, p, extents.of(*p), role, shape, scratch), kind, span, p.get()});
            return found->second;
        };
        for (int i = 0; i < table.size(); ++i)
            spans_.push_back({number_of(table[i].pages[at], page_kind::page, i), -1});
        for (int i = 0; i < table.size(); ++i)
            if (const page_ref& copy = table[i].copies[at])
                spans_[static_cast<std::size_t>(i)][1] = number_of(copy, page_kind::copy, i);
    }

    const std::vector<entry>& all() const noexcept { return entries_; }
    /// Numbers of the page and of the copy of a span; -1: it has no copy.
    std::array<int, 2> of_span(int i) const noexcept { return spans_[static_cast<std::size_t>(i)]; }

private:
    static page_ref clean(const format& window, const page_ref& p, const page_extents::extent& e, tensor role,
                          const cache_shape& shape, page_pool& scratch) {
        const int memory = smaller(p->tokens, e.memory);
        if (e.as_it_is || (e.shown == p->tokens && memory == p->tokens)) return p;
        const std::size_t bytes =
            window.block_bytes({role, memory, shape.dim(role)}) * static_cast<std::size_t>(shape.kv_heads);
        page_ref copy = scratch.allocate(bytes, 0, memory);
        std::memset(copy->data(), 0, bytes);
        copy_tokens(window.functions().value_type, *p, *copy, role, shape.dim(role), shape.kv_heads, e.shown);
        return copy;
    }

    std::vector<entry> entries_;
    std::vector<std::array<int, 2>> spans_;
};

}}}  // namespace kvq::detail
