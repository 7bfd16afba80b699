// A page: `page_tokens` tokens of one layer's K or V, all kv heads, in one allocation; and the pool of pages.
//
//   page data = kv_heads blocks, one after the other (docs/reference/format.md); relocatable, no pointers
//     inside
//
// A page of a cache on a GPU is a header without data: its owner knows by its number where the bytes of all
// layers lie.
// Pages are shared by reference counting: forked sequences hold the same pages until one of them writes.
// Thread safety: the pool and reference counts may be used from any thread; a page's contents are written
// only by a sequence that holds its only reference. The byte budget is never exceeded, not even temporarily.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory_resource>

#include "../config.hpp"
#include "../format/format.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {
class page_arena;
}

struct page;

/// Takes back a page that nobody refers to any more.
class page_owner {
public:
    virtual void free(page* p) noexcept = 0;

protected:
    page_owner() = default;
    ~page_owner() = default;
};

/// Header in front of a page's data. 64 bytes, so that the data starts on a cache line.
struct alignas(64) page {
    std::atomic<std::uint32_t> references{1};
    /// NaN and infinities among the values that it holds, as they were before they were quantized. Of a
    /// 16-bit page an upper bound: a trim leaves it as it is, and held_not_finite() (cache/window.hpp) counts
    /// again.
    std::uint32_t not_finite = 0;
    std::int32_t format = 0;  ///< index in the cache's list of formats; 0 is the 16-bit window
    std::int32_t tokens = 0;  ///< capacity
    std::size_t bytes = 0;    ///< bytes of data, of both planes
    page_owner* owner = nullptr;
    /// Behind the header; of a page in a page_list (cache/page_list.hpp) in memory of the caller.
    std::byte* memory = reinterpret_cast<std::byte*>(this + 1);
    std::int32_t number = 0;  ///< of a page in the memory of a device (cuda/host/free_pages.hpp): which one
    /// The lower planes of all heads, in memory of their own; null: the format has none (format/planes.hpp).
    std::uint32_t lower_units = 0;  ///< of 16 bytes
    std::byte* lower = nullptr;
    /// Of keys that were quantized by a plan of their own (cache/key_plan.hpp): the format with it. Empty:
    /// that of the list.
    kvq::format plan = {};

    std::byte* data() noexcept { return memory; }
    const std::byte* data() const noexcept { return memory; }
    std::size_t upper_bytes() const noexcept { return bytes - lower_bytes(); }
    std::size_t lower_bytes() const noexcept { return std::size_t{16} * lower_units; }
    /// Calls f(bytes at, count) for the data in its order: the upper plane, then the lower one.
    template <class F>
    void for_each_plane(F&& f) const {
        f(static_cast<const std::byte*>(memory), upper_bytes());
        if (lower) f(static_cast<const std::byte*>(lower), lower_bytes());
    }
    /// Have both pages the same data?
    friend bool same_data(const page& a, const page& b) noexcept {
        return a.bytes == b.bytes && a.lower_units == b.lower_units &&
               std::memcmp(a.memory, b.memory, a.upper_bytes()) == 0 &&
               (a.lower_units == 0 || std::memcmp(a.lower, b.lower, a.lower_bytes()) == 0);
    }
    /// data() of a page of a pool. The header is not read: a walk over pages need not wait for it.
    const std::byte* data_behind_header() const noexcept {
        return reinterpret_cast<const std::byte*>(this + 1);
    }
};
static_assert(sizeof(page) == 64);

/// Counted reference to a page.
class page_ref {
public:
    page_ref() = default;
    explicit page_ref(page* owned) noexcept;
    page_ref(const page_ref& other) noexcept;
    page_ref(page_ref&& other) noexcept;
    page_ref& operator=(page_ref other) noexcept;
    ~page_ref() {
        if (page_) release();
    }

    explicit operator bool() const noexcept { return page_ != nullptr; }
    page* operator->() const noexcept { return page_; }
    page& operator*() const noexcept { return *page_; }
    page* get() const noexcept { return page_; }
    bool shared() const noexcept { return references() > 1; }
    std::uint32_t references() const noexcept { return page_->references.load(std::memory_order_acquire); }

private:
    KVQ_FUNC KVQ_NOINLINE void release() noexcept;
    page* page_ = nullptr;
};

/// Allocates pages from a memory resource within a byte budget and counts the bytes in use.
class page_pool final : public page_owner {
public:
    static constexpr std::size_t no_budget = (std::numeric_limits<std::size_t>::max)();

    /// preallocate: the budget, which must be a number of bytes then, is allocated now, at once for all
    /// pages.
    explicit page_pool(std::pmr::memory_resource* memory, std::size_t budget = no_budget,
                       bool preallocate = false);
    ~page_pool();
    page_pool(const page_pool&) = delete;
    page_pool& operator=(const page_pool&) = delete;

    /// Bytes of a page with `bytes` of data, header included.
    static constexpr std::size_t allocation(std::size_t bytes) noexcept { return sizeof(page) + bytes; }

    /// A page with uninitialised data, of which `lower_bytes` are a lower plane. Raises out_of_memory when
    /// the budget would be exceeded, std::bad_alloc when the memory resource fails; the pool is then
    /// unchanged.
    page_ref allocate(std::size_t bytes, int format, int tokens, std::size_t lower_bytes = 0);
    /// Frees the lower plane of a page of this pool, whose format becomes that of the upper plane.
    void drop_lower(page& p, int format) noexcept;

    /// Bytes of all pages, headers included.
    std::size_t bytes_in_use() const noexcept { return in_use_.load(std::memory_order_relaxed); }
    /// Bytes taken from the memory resource for pages: the budget if it was allocated up front, else those in
    /// use.
    std::size_t bytes_held() const noexcept { return arena_ ? budget_ : bytes_in_use(); }
    std::size_t pages_in_use() const noexcept { return pages_.load(std::memory_order_relaxed); }
    std::size_t budget() const noexcept { return budget_; }
    std::pmr::memory_resource* memory() const noexcept { return memory_; }

private:
    void* take(std::size_t bytes, std::size_t total, std::size_t used);
    void put_back(void* memory, std::size_t bytes) noexcept;
    void free(page* p) noexcept override;

    std::pmr::memory_resource* memory_;
    std::size_t budget_;
    detail::page_arena* arena_ = nullptr;  // owned
    std::atomic<std::size_t> in_use_{0};
    std::atomic<std::size_t> pages_{0};
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "page-inl.hpp"
#endif
