// SPDX-License-Identifier: MIT
// Memory resources that count, and that fail when told to.
#pragma once

#include <cstddef>
#include <limits>
#include <memory_resource>
#include <new>

namespace test {

/// Bytes and blocks in use; fails the allocation number `fail_at` (counted from 0 since the last arm()).
class counting_resource : public std::pmr::memory_resource {
public:
    static constexpr int never = std::numeric_limits<int>::max();

    std::size_t bytes() const noexcept { return bytes_; }
    std::size_t blocks() const noexcept { return blocks_; }
    std::size_t peak() const noexcept { return peak_; }
    void reset_peak() noexcept { peak_ = bytes_; }
    void arm(int fail_at) noexcept {
        allocations_ = 0;
        fail_at_ = fail_at;
    }
    /// Allocations since the last arm().
    int allocations() const noexcept { return allocations_; }

private:
    void* do_allocate(std::size_t bytes, std::size_t alignment) override {
        if (allocations_++ == fail_at_) throw std::bad_alloc();
        void* const p = ::operator new(bytes, std::align_val_t(alignment));
        bytes_ += bytes;
        ++blocks_;
        peak_ = bytes_ > peak_ ? bytes_ : peak_;
        return p;
    }
    void do_deallocate(void* p, std::size_t bytes, std::size_t alignment) override {
        bytes_ -= bytes;
        --blocks_;
        ::operator delete(p, std::align_val_t(alignment));
    }
    bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

    std::size_t bytes_ = 0, blocks_ = 0, peak_ = 0;
    int allocations_ = 0, fail_at_ = never;
};

}  // namespace test
