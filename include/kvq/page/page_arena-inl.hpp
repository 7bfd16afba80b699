// Definitions of page_arena.hpp.
#pragma once

#include <new>

#include "../core/allocate.hpp"
#include "../core/bits.hpp"
#include "page_arena.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

KVQ_FUNC page_arena::page_arena(std::pmr::memory_resource* memory, std::size_t bytes)
    : memory_(memory),
      bytes_(bytes),
      data_(static_cast<std::byte*>(allocate_bytes(*memory, bytes, alignment))) {
    if (const std::size_t usable = bytes / alignment * alignment; usable > 0)
        first_ = ::new (data_) range{usable, nullptr};
}

KVQ_FUNC void* page_arena::allocate(std::size_t bytes) noexcept {
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

KVQ_FUNC void page_arena::deallocate(void* p, std::size_t bytes) noexcept {
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

KVQ_FUNC std::size_t page_arena::longest() const noexcept {
    const std::lock_guard lock(mutex_);
    std::size_t most = 0;
    for (const range* p = first_; p != nullptr; p = p->next) most = larger(most, p->bytes);
    return most;
}

KVQ_FUNC void page_arena::join(range* p) noexcept {
    if (p->next == nullptr ||
        reinterpret_cast<std::byte*>(p) + p->bytes != reinterpret_cast<std::byte*>(p->next))
        return;
    p->bytes += p->next->bytes;
    p->next = p->next->next;
}

}}}
