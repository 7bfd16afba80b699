// One layer of one sequence: which pages it holds and how far they are coded.
//
//   tokens   [sink page][page 0][page 1] ...     K and V alike; the first `committed` pages are past the window
//   originals   ... of pages [originals_end - n, originals_end), for a trim that must not lose anything
//
// Contract: K and V have as many pages, page i of both holds the same tokens (page/layer_pages.hpp), and `committed` is one number
// for both. Vectors take their room before anything changes, so that what comes then cannot fail.
#pragma once

#include <cstring>
#include <memory_resource>
#include <vector>

#include "../core/shape.hpp"
#include "options.hpp"

namespace kvq::inline v0_1::detail {

/// K or V pages of a layer.
struct page_table {
    page_ref sink;
    std::pmr::vector<page_ref> pages;
    /// Window pages from which pages [originals_end - originals.size(), originals_end) were coded a moment ago. A page between
    /// them that is not coded yet is its own original.
    std::pmr::vector<page_ref> originals;
    int originals_end = 0;
    int target =
        0;  ///< format that pages are coded to when they fall behind the window; 0: they stay as they are

    page_table(std::pmr::memory_resource* memory, int target_format)
        : pages(memory), originals(memory), target(target_format) {}
    page_table(const page_table& other, std::pmr::memory_resource* memory)
        : sink(other.sink),
          pages(memory),
          originals(memory),
          originals_end(other.originals_end),
          target(other.target) {
        pages.reserve(table_capacity(other.pages.size()));
        pages.assign(other.pages.begin(), other.pages.end());
        originals.reserve(other.originals.capacity());
        originals.assign(other.originals.begin(), other.originals.end());
    }

    int first_original() const noexcept { return originals_end - static_cast<int>(originals.size()); }
    /// The window page from which page i was coded, if it is still there.
    page_ref* original(int i) noexcept {
        return has_original(i) ? &originals[static_cast<std::size_t>(i - first_original())] : nullptr;
    }
    /// gone: so many originals, the first ones, count as dropped; for what is only planned.
    bool has_original(int i, std::size_t gone = 0) const noexcept {
        return i >= first_original() + static_cast<int>(gone) && i < originals_end;
    }
    /// Is there a use for the original of page i? Not if a page behind it is coded and has none: no trim to page i is exact then.
    bool can_keep_original(int i, std::size_t gone = 0) const noexcept {
        const int first = first_original() + static_cast<int>(gone);
        return uncoded(i + 1, first < originals_end && i < first ? first : static_cast<int>(pages.size()));
    }
    /// Keeps the original of page i, which can be kept, where useless ones were dropped: the others are within `rollback` tokens, as
    /// it is, and there is room for as many.
    void keep_original(int i, page_ref window_page) {
        const int first = first_original();
        const auto page = [&](int at) { return pages.begin() + at; };
        if (!originals.empty() && i < first) {
            originals.insert(originals.begin(), page(i + 1), page(first));
            originals.insert(originals.begin(), std::move(window_page));
            return;
        }
        if (!originals.empty()) originals.insert(originals.end(), page(originals_end), page(i));
        originals.push_back(std::move(window_page));
        originals_end = i + 1;
    }
    /// How many originals, the first ones, are of no use: those of pages that no trim goes back to (needed(page) is false), and all
    /// of them if a page behind them is coded and has none. Only the first `committed` pages may be coded, so that an append, which
    /// asks every time, hardly ever looks at one.
    template <class F>
    std::size_t useless_originals(int committed, F&& needed) const {
        if (originals.empty()) return 0;
        if (!uncoded(originals_end, committed)) return originals.size();
        std::size_t n = 0;
        while (n < originals.size() && !needed(first_original() + static_cast<int>(n))) ++n;
        return n;
    }
    void drop_originals(std::size_t n) noexcept {
        originals.erase(originals.begin(), originals.begin() + static_cast<std::ptrdiff_t>(n));
    }

    /// Pages that came from elsewhere as their own originals are one page again.
    void join_originals() noexcept {
        int i = first_original();
        for (page_ref& original : originals) {
            const page_ref& p = pages[static_cast<std::size_t>(i++)];
            if (p->format == 0 && p->bytes == original->bytes &&
                std::memcmp(p->data(), original->data(), p->bytes) == 0)
                original = p;
        }
    }

private:
    bool uncoded(int begin, int end) const noexcept {
        for (int i = begin; i < end; ++i)
            if (pages[static_cast<std::size_t>(i)]->format != 0) return false;
        return true;
    }
};

struct layer_track {
    int tokens = 0;
    int committed =
        0;  ///< leading pages that are past the window: coded (or left as they are, if their format is the window)
    page_table tables[2];

    layer_track(std::pmr::memory_resource* memory, int key_target, int value_target)
        : tables{page_table(memory, key_target), page_table(memory, value_target)} {}
    layer_track(const layer_track& other, std::pmr::memory_resource* memory)
        : tokens(other.tokens),
          committed(other.committed),
          tables{page_table(other.tables[0], memory), page_table(other.tables[1], memory)} {}

    page_table& operator[](tensor role) noexcept { return tables[static_cast<int>(role)]; }
    const page_table& operator[](tensor role) const noexcept { return tables[static_cast<int>(role)]; }
};

}  // namespace kvq::inline v0_1::detail
