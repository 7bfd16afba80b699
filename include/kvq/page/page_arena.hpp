// One allocation for all pages of a pool, allocated when the pool is made (cache_options::preallocate).
//
//   free ranges lie in a list in the order of their addresses; a page takes the smallest one that has room,
//   and what is given back joins its neighbours
//
// Contract: allocate() takes multiples of 64 bytes, and returns null when no free range is long enough; pages
// of several sizes may leave ranges that fit none of them. Any thread may call. O(free ranges).
#pragma once

#include <cstddef>
#include <memory_resource>
#include <mutex>

#include "../config.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

class page_arena {
public:
    static constexpr std::size_t alignment = 64;

    /// Takes `bytes` bytes from `memory`. Raises what allocate_bytes() raises.
    page_arena(std::pmr::memory_resource* memory, std::size_t bytes);
    page_arena(const page_arena&) = delete;
    page_arena& operator=(const page_arena&) = delete;
    ~page_arena() { memory_->deallocate(data_, bytes_, alignment); }

    void* allocate(std::size_t bytes) noexcept;
    void deallocate(void* p, std::size_t bytes) noexcept;
    /// Bytes of the longest free range.
    std::size_t longest() const noexcept;

private:
    struct range {
        std::size_t bytes;
        range* next;
    };
    /// Makes one range of this one and the next, if they touch.
    static void join(range* p) noexcept;

    std::pmr::memory_resource* memory_;
    std::size_t bytes_;
    std::byte* data_;
    range* first_ = nullptr;
    mutable std::mutex mutex_;
};

}}}  // namespace kvq::detail

#if !defined(KVQ_COMPILED)
#include "page_arena-inl.hpp"
#endif
