// One layer of one sequence: which pages it holds and how far they are coded.
#pragma once

#include <memory_resource>
#include <vector>

#include "../core/shape.hpp"
#include "options.hpp"

namespace kvq::inline v0_1::detail {

/// K or V pages of a layer.
struct page_table {
    page_ref sink;
    std::pmr::vector<page_ref> pages;
    /// Window pages from which the last coded pages were made, oldest first; they end at the last coded page.
    std::pmr::vector<page_ref> originals;

    explicit page_table(std::pmr::memory_resource* memory) : pages(memory), originals(memory) {}
    page_table(const page_table& other, std::pmr::memory_resource* memory)
        : sink(other.sink), pages(memory), originals(memory) {
        pages.reserve(table_capacity(other.pages.size()));
        pages.assign(other.pages.begin(), other.pages.end());
        originals.reserve(other.originals.capacity());
        originals.assign(other.originals.begin(), other.originals.end());
    }
};

struct layer_track {
    int tokens = 0;
    int committed =
        0;  ///< leading pages that are past the window: coded (or left as they are, if their format is the window)
    page_table tables[2];

    explicit layer_track(std::pmr::memory_resource* memory)
        : tables{page_table(memory), page_table(memory)} {}
    layer_track(const layer_track& other, std::pmr::memory_resource* memory)
        : tokens(other.tokens),
          committed(other.committed),
          tables{page_table(other.tables[0], memory), page_table(other.tables[1], memory)} {}

    page_table& operator[](tensor role) noexcept { return tables[static_cast<int>(role)]; }
    const page_table& operator[](tensor role) const noexcept { return tables[static_cast<int>(role)]; }
};

}  // namespace kvq::inline v0_1::detail
