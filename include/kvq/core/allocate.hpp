// Memory of a size that a caller names: the one place that refuses sizes that no object can have.
//
// Operator new with an alignment rounds the size up. Within 62 bytes of the largest std::size_t that wraps,
// and the allocation succeeds with 0 bytes. So no size above PTRDIFF_MAX reaches a memory resource.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>

#include "error.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

/// The most bytes of an allocation.
inline constexpr std::size_t most_bytes = PTRDIFF_MAX;

/// Sums and products of sizes that do not wrap: where they do not fit, the largest std::size_t, which
/// allocate_bytes() refuses.
constexpr std::size_t bounded_sum(std::size_t a, std::size_t b) noexcept {
    return b > SIZE_MAX - a ? SIZE_MAX : a + b;
}
constexpr std::size_t bounded_product(std::size_t a, std::size_t b) noexcept {
    return a != 0 && b > SIZE_MAX / a ? SIZE_MAX : a * b;
}

/// memory.allocate(bytes, alignment). Raises out_of_memory above most_bytes, else what the resource raises.
inline void* allocate_bytes(std::pmr::memory_resource& memory, std::size_t bytes, std::size_t alignment) {
    if (bytes > most_bytes) {
        short_text message = "kvq: no memory has ";
        message += short_text::of(bytes);
        message += " bytes, the limit is ";
        message += short_text::of(most_bytes);
        raise<out_of_memory>(message.c_str());
    }
    return memory.allocate(bytes, alignment);
}

}}}  // namespace kvq::detail
