// One piece of memory for all pages of a pool, allocated when the pool is made (cache_options::preallocate).
//
//   free pieces lie in a list in the order of their addresses; a page takes the smallest one that has room, and what is given back joins
//   its neighbours
//
// Contract: allocate() takes multiples of 64 bytes, and returns null when no free piece is long enough; pages of several sizes may
// leave pieces that fit none of them. Any thread may call. O(free pieces).
#pragma once

#include <cstddef>
#include <memory_resource>
#include <mutex>
#include <new>

#include "../core/bits.hpp"

namespace kvq::inline KVQ_TAGGED::detail {

class page_arena {
public:
    static constexpr std::size_t alignment = 64;

    /// Takes `bytes` bytes from `memory`. Raises what the resource raises.
    page_arena(std::pmr::memory_resource* memory, std::size_t bytes)
        : memory_(memory), bytes_(bytes), data_(static_cast<std::byte*>(memory->allocate(bytes, alignment))) {
        if (const std::size_t usable = bytes / alignment * alignment; usable > 0)
            first_ = ::new (data_) piece{usable, nullptr};
    }
    page_arena(const page_arena&) = delete;
    page_arena& operator=(const page_arena&) = delete;
    ~page_arena() { memory_->deallocate(data_, bytes_, alignment); }

    void* allocate(std::size_t bytes) noexcept {
        const std::size_t wanted = round_up(bytes, alignment);
        const std::lock_guard lock(mutex_);
        piece** best = nullptr;
        for (piece** at = &first_; *at != nullptr; at = &(*at)->next) {
            if ((*at)->bytes < wanted || (best && (*at)->bytes >= (*best)->bytes)) continue;
            best = at;
            if ((*at)->bytes == wanted) break;
        }
        if (!best) return nullptr;
        piece* const taken = *best;
        *best = taken->bytes == wanted ? taken->next
                                       : ::new (reinterpret_cast<std::byte*>(taken) + wanted)
                                             piece{taken->bytes - wanted, taken->next};
        return taken;
    }
    void deallocate(void* p, std::size_t bytes) noexcept {
        const std::lock_guard lock(mutex_);
        piece** at = &first_;
        piece* before = nullptr;
        while (*at != nullptr && static_cast<void*>(*at) < p) {
            before = *at;
            at = &before->next;
        }
        piece* const freed = ::new (p) piece{round_up(bytes, alignment), *at};
        *at = freed;
        join(freed);
        if (before) join(before);
    }
    /// Bytes of the longest free piece.
    std::size_t longest() const noexcept {
        const std::lock_guard lock(mutex_);
        std::size_t most = 0;
        for (const piece* p = first_; p != nullptr; p = p->next) most = larger(most, p->bytes);
        return most;
    }

private:
    struct piece {
        std::size_t bytes;
        piece* next;
    };
    /// Makes one piece of this one and the next, if they touch.
    static void join(piece* p) noexcept {
        if (p->next == nullptr ||
            reinterpret_cast<std::byte*>(p) + p->bytes != reinterpret_cast<std::byte*>(p->next))
            return;
        p->bytes += p->next->bytes;
        p->next = p->next->next;
    }

    std::pmr::memory_resource* memory_;
    std::size_t bytes_;
    std::byte* data_;
    piece* first_ = nullptr;
    mutable std::mutex mutex_;
};

}  // namespace kvq::inline KVQ_TAGGED::detail
