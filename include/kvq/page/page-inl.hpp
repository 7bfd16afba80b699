// Definitions of page.hpp.
#pragma once

#include "../core/allocate.hpp"
#include "../core/error.hpp"
#include "page.hpp"
#include "page_arena.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC page_ref::page_ref(page* owned) noexcept : page_(owned) {}

KVQ_FUNC page_ref::page_ref(const page_ref& other) noexcept : page_(other.page_) {
    if (page_) page_->references.fetch_add(1, std::memory_order_relaxed);
}

KVQ_FUNC page_ref::page_ref(page_ref&& other) noexcept : page_(std::exchange(other.page_, nullptr)) {}

KVQ_FUNC page_ref& page_ref::operator=(page_ref other) noexcept {
    std::swap(page_, other.page_);
    return *this;
}

/// Not inlined: it would be the larger part of all code that moves pages from list to list.
void page_ref::release() noexcept {  // KVQ_FUNC stands at its declaration
    if (page_->references.fetch_sub(1, std::memory_order_acq_rel) == 1) page_->owner->free(page_);
}

KVQ_FUNC page_pool::page_pool(std::pmr::memory_resource* memory, std::size_t budget, bool preallocate)
    : memory_(memory), budget_(budget) {
    if (preallocate) arena_ = new detail::page_arena(memory, budget);
}

KVQ_FUNC page_pool::~page_pool() { delete arena_; }

KVQ_FUNC page_ref page_pool::allocate(std::size_t bytes, int format, int tokens) {
    const std::size_t total = allocation(bytes);
    std::size_t used = in_use_.load(std::memory_order_relaxed);
    do {
        if (total > budget_ || used > budget_ - total) detail::raise<out_of_memory>(total, used, budget_);
    } while (!in_use_.compare_exchange_weak(used, used + total, std::memory_order_relaxed));
    void* memory = nullptr;
    if (arena_) {
        memory = arena_->allocate(total);
        if (!memory) {
            in_use_.fetch_sub(total, std::memory_order_relaxed);
            detail::raise<out_of_memory>(total, used, budget_, arena_->longest());
        }
        return page_in(memory, bytes, format, tokens);
    }
    const std::exception_ptr failed =
        detail::caught([&] { memory = detail::allocate_bytes(*memory_, total, alignof(page)); });
    if (failed) {
        in_use_.fetch_sub(total, std::memory_order_relaxed);
        std::rethrow_exception(failed);
    }
    return page_in(memory, bytes, format, tokens);
}

KVQ_FUNC page_ref page_pool::page_in(void* memory, std::size_t bytes, int format, int tokens) noexcept {
    page* const p = ::new (memory) page;
    p->format = format;
    p->tokens = tokens;
    p->bytes = bytes;
    p->owner = this;
    pages_.fetch_add(1, std::memory_order_relaxed);
    return page_ref(p);
}

KVQ_FUNC void page_pool::free(page* p) noexcept {
    const std::size_t total = allocation(p->bytes);
    p->~page();
    if (arena_)
        arena_->deallocate(p, total);
    else
        memory_->deallocate(p, total, alignof(page));
    in_use_.fetch_sub(total, std::memory_order_relaxed);
    pages_.fetch_sub(1, std::memory_order_relaxed);
}

}}
