// SPDX-License-Identifier: MIT
// Memory resources that count, and that fail when told to.
#pragma once

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <limits>
#include <memory_resource>
#include <new>

namespace test {

/// Bytes and blocks in use, from any thread; fails the allocation number `fail_at` (counted from 0 since the
/// last arm()), or every n-th one.
class counting_resource : public std::pmr::memory_resource {
public:
    static constexpr int never = std::numeric_limits<int>::max();

    std::size_t bytes() const noexcept { return bytes_; }
    std::size_t blocks() const noexcept { return blocks_; }
    std::size_t peak() const noexcept { return peak_; }
    void reset_peak() noexcept { peak_ = bytes_.load(); }
    void arm(int fail_at) noexcept {
        allocations_ = 0;
        fail_at_ = fail_at;
    }
    void fail_every(int n) noexcept { fail_every_ = n; }
    /// Allocations since the last arm().
    int allocations() const noexcept { return allocations_; }

private:
    void* do_allocate(std::size_t bytes, std::size_t alignment) override {
        const int number = allocations_++, every = fail_every_;
        if (number == fail_at_ || (every > 0 && (number + 1) % every == 0)) throw std::bad_alloc();
        void* const p = ::operator new(bytes, std::align_val_t(alignment));
        ++blocks_;
        const std::size_t now = bytes_ += bytes;
        std::size_t peak = peak_;
        while (now > peak && !peak_.compare_exchange_weak(peak, now)) {
        }
        return p;
    }
    void do_deallocate(void* p, std::size_t bytes, std::size_t alignment) override {
        bytes_ -= bytes;
        --blocks_;
        ::operator delete(p, std::align_val_t(alignment));
    }
    bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

    std::atomic<std::size_t> bytes_{0}, blocks_{0}, peak_{0};
    std::atomic<int> allocations_{0}, fail_at_{never}, fail_every_{0};
};

/// Runs `operation` with allocation number 0, 1, 2, ... failing until it gets through; after each failure
/// `unchanged`.
template <class Operation, class Unchanged>
int fail_everywhere(counting_resource& memory, Operation operation, Unchanged unchanged) {
    for (int i = 0;; ++i) {
        REQUIRE(i < 10000);
        memory.arm(i);
        bool failed = false;
        try {
            operation();
        } catch (const std::bad_alloc&) {
            failed = true;
        }
        memory.arm(counting_resource::never);
        if (!failed) return i;
        INFO("allocation ", i);
        unchanged();
    }
}

}  // namespace test
