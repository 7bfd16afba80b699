// The pages of a pool on a device, by number: which are free, and headers for those that sequences hold.
// Plain C++: no byte of a page is touched here.
//
//   take()  a reference to the page that was freed last, or to the next one that was never used. The last
//           reference gives it back
//
// Contract: callers ask available() before they take(). References do not outlive the pool, and their number
// is not counted on several threads. O(1) each.
#pragma once

#include <deque>
#include <vector>

#include "../../page/page.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

class free_pages final : public page_owner {
public:
    /// format: as page::format, 0 for 16 bit. bytes: of a page in all layers.
    free_pages(int format, int tokens, std::size_t bytes) noexcept
        : format_(format), tokens_(tokens), bytes_(bytes) {}

    int size() const noexcept { return static_cast<int>(pages_.size()); }
    int used() const noexcept { return size() - available(); }
    int available() const noexcept { return static_cast<int>(free_.size()); }

    /// To `size` pages; never fewer than before.
    void grow(int size) {
        taken_.resize(static_cast<std::size_t>(size), 0);
        free_.reserve(static_cast<std::size_t>(size));  // for all of them, so that free() cannot fail
        const int before = this->size();
        for (int i = before; i < size; ++i) {
            page& p = pages_.emplace_back();
            p.format = format_;
            p.tokens = tokens_;
            p.bytes = bytes_;
            p.owner = this;
            p.number = i;
        }
        // The lowest numbers are taken first.
        free_.insert(free_.begin(), static_cast<std::size_t>(size - before), nullptr);
        for (int i = 0; i < size - before; ++i)
            free_[static_cast<std::size_t>(i)] = &pages_[static_cast<std::size_t>(size - 1 - i)];
    }
    /// How often a page was taken.
    unsigned taken(int number) const noexcept { return taken_[static_cast<std::size_t>(number)]; }
    page_ref take() noexcept {
        page* const p = free_.back();
        ++taken_[static_cast<std::size_t>(p->number)];
        free_.pop_back();
        p->references.store(1, std::memory_order_relaxed);
        return page_ref(p);
    }
    void free(page* p) noexcept override { free_.push_back(p); }

private:
    int format_, tokens_;
    std::size_t bytes_;
    std::deque<page> pages_;
    std::vector<page*> free_;
    std::vector<unsigned> taken_;  // by number
};

}}}  // namespace kvq::cuda::detail
