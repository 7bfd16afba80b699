// The pages of a pool on a device, by number: which are free, and headers for those that sequences hold.
// Plain C++: no byte of a page is touched here.
//
//   take()  a reference to the page that was freed last, or to the next one that was never used. The last
//           reference gives it back
//   upper() of a page of two planes: the page of its upper one, which the pool of those gave. It stays where
//           it is when the lower plane goes back
//
// Contract: callers ask available() before they take(). References do not outlive the pool, and their number
// is not counted on several threads. O(1) each.
#pragma once

#include <deque>
#include <vector>

#include "../../page/page.hpp"
#include "../layout/layer_memory.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

class free_pages final : public page_owner {
public:
    /// format: as page::format, 0 for 16 bit. bytes: of a page in all layers.
    /// upper: of formats with two planes the pool of the others; its pages count as room of their own.
    free_pages(int format, int tokens, std::size_t bytes, free_pages* upper = nullptr) noexcept
        : format_(format), tokens_(tokens), bytes_(bytes), upper_(upper) {}

    int size() const noexcept { return static_cast<int>(pages_.size()); }
    int used() const noexcept { return size() - available(); }
    int available() const noexcept { return static_cast<int>(free_.size()); }

    /// To `size` pages; never fewer than before.
    void grow(int size) {
        taken_.resize(static_cast<std::size_t>(size), 0);
        if (upper_ != nullptr) uppers_.resize(static_cast<std::size_t>(size));
        free_.reserve(static_cast<std::size_t>(size));  // for all of them, so that free() cannot fail
        const int before = this->size();
        for (int i = before; i < size; ++i) {
            page& p = pages_.emplace_back();
            p.format = format_;
            p.tokens = tokens_;
            p.bytes = bytes_;
            p.owner = this;
            p.number = upper_ != nullptr ? plane_number(0, i) : i;
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
        const int own = upper_ != nullptr ? p->number >> 16 : p->number;
        ++taken_[static_cast<std::size_t>(own)];
        free_.pop_back();
        if (upper_ != nullptr) {
            page_ref& of = uppers_[static_cast<std::size_t>(own)];
            of = upper_->take();
            p->number = plane_number(of->number, own);
        }
        p->references.store(1, std::memory_order_relaxed);
        return page_ref(p);
    }
    void free(page* p) noexcept override {
        if (upper_ != nullptr) uppers_[static_cast<std::size_t>(p->number >> 16)] = {};
        free_.push_back(p);
    }
    /// Of a page of two planes.
    const page_ref& upper(const page& p) const noexcept {
        return uppers_[static_cast<std::size_t>(p.number >> 16)];
    }

private:
    int format_, tokens_;
    std::size_t bytes_;
    std::deque<page> pages_;
    std::vector<page*> free_;
    std::vector<unsigned> taken_;  // by number
    free_pages* upper_;
    std::vector<page_ref> uppers_;  // by number of the lower plane
};

}}}  // namespace kvq::cuda::detail
