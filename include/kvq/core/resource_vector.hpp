// Vectors in memory of a std::pmr::memory_resource.
//
// As std::pmr::vector, but elements are constructed as they are, not "with the allocator": what needs memory
// is given it where it is made. Elements therefore move as bytes where they can, and a file takes less time
// to compile.
// Contract: the resource outlives the vector and is not null. Memory goes along with a move, not with a copy
// or an assignment, as with std::pmr::vector; a vector of vectors gives its inner vectors no resource.
#pragma once

#include <cstddef>
#include <memory_resource>
#include <vector>

#include "allocate.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// What a resource_vector takes its memory with. A copy of a vector takes it from the default resource, as
/// with std::pmr::vector.
template <class T>
class resource_allocator {
public:
    using value_type = T;

    resource_allocator() noexcept : memory_(std::pmr::get_default_resource()) {}
    resource_allocator(std::pmr::memory_resource* memory) noexcept : memory_(memory) {}
    template <class U>
    resource_allocator(const resource_allocator<U>& other) noexcept : memory_(other.resource()) {}

    // NOLINTBEGIN(bugprone-sizeof-expression): elements may be pointers
    T* allocate(std::size_t n) {
        return static_cast<T*>(
            detail::allocate_bytes(*memory_, detail::bounded_product(n, sizeof(T)), alignof(T)));
    }
    void deallocate(T* data, std::size_t n) noexcept { memory_->deallocate(data, n * sizeof(T), alignof(T)); }
    // NOLINTEND(bugprone-sizeof-expression)
    resource_allocator select_on_container_copy_construction() const noexcept { return {}; }
    std::pmr::memory_resource* resource() const noexcept { return memory_; }

    friend bool operator==(const resource_allocator& a, const resource_allocator& b) noexcept {
        return *a.memory_ == *b.memory_;
    }

private:
    std::pmr::memory_resource* memory_;
};

template <class T>
using resource_vector = std::vector<T, resource_allocator<T>>;

}}  // namespace kvq
