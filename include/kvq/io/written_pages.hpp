// The pages of one layer and tensor as they are saved or sent: each page once, without the values of trimmed tokens.
//
//   page of a committed span, or a 16-bit copy    as it is: hidden tokens share parameters with the others
//   page of other spans only                      with memory as if it were new; tokens that none of them shows are zero
//
// Contract: two sequences in the same state give the same pages in the same order: by the first span that holds them, copies behind pages.
#pragma once

#include <array>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "../cache/layer_track.hpp"
#include "../cache/window.hpp"
#include "page_kind.hpp"

namespace kvq::inline KVQ_TAGGED::detail {

class written_pages {
public:
    struct entry {
        page_ref page;
        page_kind kind;  ///< copy: no span shows it
        int span;        ///< the first one that shows it, or has it as its copy
    };
    /// Numbers of the page and of the copy of a span; -1: it has no copy.
    using numbers = std::array<int, 2>;

    /// scratch: for pages that are not written as they are; outlives this object.
    written_pages(const format& window, const layer_track& track, tensor role, const cache_shape& shape,
                  const page_geometry& g, page_pool& scratch) {
        const auto at = static_cast<std::size_t>(role);
        std::unordered_map<const page*, int> known;
        std::vector<extent> extents;
        const auto number_of = [&](const page_ref& p, page_kind kind, int span) {
            const auto [found, is_new] = known.emplace(p.get(), static_cast<int>(entries_.size()));
            if (is_new) {
                entries_.push_back({p, kind, span});
                extents.emplace_back();
            }
            return found->second;
        };
        spans_.resize(track.spans.size(), numbers{-1, -1});
        for (int i = 0; i < track.size(); ++i) {
            const page_span& s = track[i];
            const int n = spans_[static_cast<std::size_t>(i)][0] = number_of(s.pages[at], page_kind::page, i);
            extent& e = extents[static_cast<std::size_t>(n)];
            e.as_it_is = e.as_it_is || i < track.committed;
            e.shown = larger(e.shown, s.skip + s.tokens);
            e.memory = larger(e.memory, g.window_tokens(s.tokens, g.capacity(s.sinks)));
        }
        for (int i = 0; i < track.size(); ++i) {
            if (!track[i].copies[at]) continue;
            const int n = number_of(track[i].copies[at], page_kind::copy, i);
            spans_[static_cast<std::size_t>(i)][1] = n;
            extents[static_cast<std::size_t>(n)].as_it_is = true;
        }
        for (std::size_t n = 0; n < entries_.size(); ++n)
            if (!extents[n].as_it_is) clean(window, entries_[n].page, extents[n], role, shape, scratch);
    }

    const std::vector<entry>& all() const noexcept { return entries_; }
    numbers of_span(int i) const noexcept { return spans_[static_cast<std::size_t>(i)]; }

private:
    struct extent {
        bool as_it_is = false;
        int shown = 0, memory = 0;  // tokens
    };

    static void clean(const format& window, page_ref& p, const extent& e, tensor role,
                      const cache_shape& shape, page_pool& scratch) {
        const int memory = smaller(p->tokens, e.memory);
        if (e.shown == p->tokens && memory == p->tokens) return;
        const std::size_t bytes =
            window.block_bytes({role, memory, shape.dim(role)}) * static_cast<std::size_t>(shape.kv_heads);
        page_ref copy = scratch.allocate(bytes, 0, memory);
        std::memset(copy->data(), 0, bytes);
        copy->not_finite = p->not_finite;
        copy_tokens(window.functions().value_type, *p, *copy, role, shape.dim(role), shape.kv_heads, e.shown);
        p = std::move(copy);
    }

    std::vector<entry> entries_;
    std::vector<numbers> spans_;
};

}  // namespace kvq::inline KVQ_TAGGED::detail
