// Which pages of a pool are in use, by number, and by how many sequences. Plain C++: no page is touched here.
//
//   take()  the page that was freed last, or the next one that was never used      share()  one holder more
//   release()  one holder less; without holders the page is free
//
// Contract: callers ask available() before they take(). Not thread-safe. O(1) each.
#pragma once

#include <vector>

#include "../../config.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

class free_pages {
public:
    int size() const noexcept { return static_cast<int>(holders_.size()); }
    int used() const noexcept { return size() - available(); }
    int available() const noexcept { return static_cast<int>(free_.size()); }
    int holders(int page) const noexcept { return holders_[static_cast<std::size_t>(page)]; }

    /// To `size` pages; never fewer than before.
    void grow(int size) {
        free_.reserve(static_cast<std::size_t>(size));
        const int before = this->size();
        holders_.resize(static_cast<std::size_t>(size), 0);
        // The lowest numbers are taken first.
        free_.insert(free_.begin(), static_cast<std::size_t>(size - before), 0);
        for (int i = 0; i < size - before; ++i) free_[static_cast<std::size_t>(i)] = size - 1 - i;
    }
    int take() noexcept {
        const int page = free_.back();
        free_.pop_back();
        holders_[static_cast<std::size_t>(page)] = 1;
        return page;
    }
    void share(int page) noexcept { ++holders_[static_cast<std::size_t>(page)]; }
    void release(int page) noexcept {
        if (--holders_[static_cast<std::size_t>(page)] == 0) free_.push_back(page);
    }

private:
    std::vector<int> holders_, free_;  // free_ has memory for all pages, so release() cannot fail
};

}}}  // namespace kvq::cuda::detail
