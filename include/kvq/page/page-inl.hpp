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

KVQ_FUNC page_ref page_pool::allocate(std::size_t bytes, int format, int tokens, std::size_t lower_bytes) {
    const std::size_t total = allocation(bytes);
    std::size_t used = in_use_.load(std::memory_order_relaxed);
    do {
        if (total > budget_ || used > budget_ - total) detail::raise<out_of_memory>(total, used, budget_);
    } while (!in_use_.compare_exchange_weak(used, used + total, std::memory_order_relaxed));
    void* memory = nullptr;
    void* lower = nullptr;
    const std::exception_ptr failed = detail::caught([&] {
        memory = take(total - lower_bytes, total, used);
        if (lower_bytes > 0) lower = take(lower_bytes, total, used);
    });
    if (failed) {
        if (memory) put_back(memory, total - lower_bytes);
        in_use_.fetch_sub(total, std::memory_order_relaxed);
        std::rethrow_exception(failed);
    }
    page* const p = ::new (memory) page;
    p->format = format;
    p->tokens = tokens;
    p->bytes = bytes;
    p->owner = this;
    p->lower = static_cast<std::byte*>(lower);
    p->lower_units = static_cast<std::uint32_t>(lower_bytes / 16);
    pages_.fetch_add(1, std::memory_order_relaxed);
    return page_ref(p);
}

/// total, used: for the message.
KVQ_FUNC void* page_pool::take(std::size_t bytes, std::size_t total, std::size_t used) {
    if (!arena_) return detail::allocate_bytes(*memory_, bytes, alignof(page));
    void* const memory = arena_->allocate(bytes);
    if (!memory) detail::raise<out_of_memory>(total, used, budget_, arena_->longest());
    return memory;
}

KVQ_FUNC void page_pool::put_back(void* memory, std::size_t bytes) noexcept {
    if (arena_)
        arena_->deallocate(memory, bytes);
    else
        memory_->deallocate(memory, bytes, alignof(page));
}

KVQ_FUNC void page_pool::drop_lower(page& p, int format) noexcept {
    const std::size_t freed = p.lower_bytes();
    put_back(p.lower, freed);
    p.lower = nullptr;
    p.lower_units = 0;
    p.bytes -= freed;
    p.format = format;
    in_use_.fetch_sub(freed, std::memory_order_relaxed);
}

KVQ_FUNC void page_pool::free(page* p) noexcept {
    const std::size_t total = allocation(p->bytes), lower_bytes = p->lower_bytes();
    std::byte* const lower = p->lower;
    p->~page();
    put_back(p, total - lower_bytes);
    if (lower) put_back(lower, lower_bytes);
    in_use_.fetch_sub(total, std::memory_order_relaxed);
    pages_.fetch_sub(1, std::memory_order_relaxed);
}

}}
