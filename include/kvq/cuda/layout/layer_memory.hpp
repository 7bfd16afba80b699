// Where pages of one layer lie, and which of them a number in a table names.
//
// Contract: plain values. Pointers are to device memory.
#pragma once

#include <cstddef>

#include "../../config.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// Where the keys or the values of strided_rows lie within a page. Bytes.
struct row_memory {
    std::size_t token_bytes = 0, head_bytes = 0;  ///< from one to the next
    const std::byte* scales = nullptr;            ///< of formats that have them; on 4 bytes
    std::size_t scale_page_bytes = 0, scale_token_bytes = 0, scale_head_bytes = 0;
};

namespace detail {

/// Pages of one layer and format.
struct layer_memory {
    std::byte *keys = nullptr, *values = nullptr;
    std::size_t key_page_bytes = 0, value_page_bytes = 0;
};

/// A number in tables of a page with two planes (plane_pair.cuh) names a page of each: the upper one's in its
/// lower 16 bits. So there are so many pages of lower and of upper planes at most, those of the upper format
/// alone among them.
inline constexpr int most_lower_pages = 1 << 15, most_upper_pages = 1 << 16;
KVQ_HD constexpr int plane_number(int upper, int lower) noexcept { return lower << 16 | upper; }
KVQ_HD constexpr int upper_of(int number) noexcept { return number & 0xffff; }
KVQ_HD constexpr int lower_of(int number) noexcept { return number >> 16; }

}  // namespace detail
}}}  // namespace kvq::cuda
