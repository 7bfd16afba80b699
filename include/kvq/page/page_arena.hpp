// One allocation for all pages of a pool, allocated when the pool is made (cache_options::preallocate).
//
//   free ranges lie in a list in the order of their addresses; a page takes the smallest one that has room, and what is given back joins
//   its neighbours
//
// Contract: allocate() takes multiples of 64 bytes, and returns null when no free range is long enough; pages of several sizes may
// leave ranges that fit none of them. Any thread may call. O(free ranges).
#pragma once

#include <cstddef>
#include <memory_resource>
#include <mutex>
#include <new>

#include "../core/allocate.hpp"
#include "../core/bits.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

class page_arena {
public:
    static constexpr std::size_t alignment = 64;

    /// Takes `bytes` bytes from `memory`. Raises what allocate_bytes() raises.
    page_arena(std::pmr::memory_resource* memory, std::size_t bytes)
        : memory_(memory),
          bytes_(bytes),
          data_(static_cast<std::byte*>(allocate_bytes(*memory, bytes, alignment))) {
        if (const std::size_t usable = bytes / alignment * alignment; usable > 0)
            first_ = ::new (data_) range{usable, nullptr};
    }
    page_arena(const page_arena&) = delete;
    page_arena& operator=(const page_arena&) = delete;
    ~page_arena() { memory_->deallocate(data_, bytes_, alignment); }

    void* allocate(std::size_t bytes) noexcept {
        const std::size_t wanted = round_up(bytes, alignment);
        const std::lock_guard lock(mutex_);
        range** best = nullptr;
        for (range** at = &first_; *at != nullptr; at = &(*at)->next) {
            if ((*at)->bytes < wanted || (best && (*at)->bytes >= (*best)->bytes)) continue;
            best = at;
            if ((*at)->bytes == wanted) break;
        }
        if (!best) return nullptr;
        range* const taken = *best;
        *best = taken->bytes == wanted ? taken->next
                                       : ::new (reinterpret_cast<std::byte*>(taken) + wanted)
                                             range{taken->bytes - wanted, taken->next};
        return taken;
    }
    void deallocate(void* p, std::size_t bytes) noexcept {
        const std::lock_guard lock(mutex_);
        range** at = &first_;
        range* before = nullptr;
        while (*at != nullptr && static_cast<void*>(*at) < p) {
            before = *at;
            at = &before->next;
        }
        range* const freed = ::new (p) range{round_up(bytes, alignment), *at};
        *at = freed;
        join(freed);
        if (before) join(before);
    }
    /// Bytes of the longest free range.
    std::size_t longest() const noexcept {
        const std::lock_guard lock(mutex_);
        std::size_t most = 0;
        for (const range* p = first_; p != nullptr; p = p->next) most = larger(most, p->bytes);
        return most;
    }

private:
    struct range {
        std::size_t bytes;
        range* next;
    };
    /// Makes one range of this one and the next, if they touch.
    static void join(range* p) noexcept {
        if (p->next == nullptr ||
            reinterpret_cast<std::byte*>(p) + p->bytes != reinterpret_cast<std::byte*>(p->next))
            return;
        p->bytes += p->next->bytes;
        p->next = p->next->next;
    }

    std::pmr::memory_resource* memory_;
    std::size_t bytes_;
    std::byte* data_;
    range* first_ = nullptr;
    mutable std::mutex mutex_;
};

}}}  // namespace kvq::detail
