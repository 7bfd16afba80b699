// What a sequence takes, on the CPU and on a GPU: its pages as its page table says
// (page_table::for_each_page), and what the cache adds.
//
//   sequence.usage()                        on the CPU. By layer, tensor and format: cache/usage.hpp
//   cuda::cache::usage(id), usage()         on a GPU: of one sequence, of all memory of the cache
//
// Contract: every byte is in one of the parts whose sum is `bytes`. A page that several spans show counts
// once.
#pragma once

#include <cstddef>

#include "page.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// Bytes held by a sequence. Pages that other sequences hold, too, count in each of them, and once in a
/// report on a whole cache.
struct usage_report {
    std::size_t quantized = 0;  ///< data of quantized pages
    std::size_t window = 0;     ///< data of 16/32-bit pages: sinks, recent, and pages not yet quantized
    std::size_t slack = 0;      ///< part of `window` that holds no token yet
    std::size_t rollback = 0;   ///< 16-bit copies kept so that a short trim is exact
    std::size_t bookkeeping =
        0;  ///< page headers and tables; of a whole cache on a GPU: tables, widths, feedback
    std::size_t workspace =
        0;  ///< scratch for quantizing; of a whole cache on a GPU: for attention and prompts
    std::size_t reserved = 0;  ///< for the next step (cache::reserve), or a draft; on a GPU also free pages
    std::size_t state = 0;     ///< recurrent state: live pages, and those of snapshots
    std::size_t bytes = 0;     ///< sum of all of the above except `slack`
    std::size_t not_finite =
        0;                     ///< NaN and infinities that were appended; on a GPU: cuda::cache::not_finite()
    int tokens = 0;            ///< of the longest layer or sequence
    std::size_t repacked = 0;  ///< tokens that cuts quantized once more, summed over layers, since the
                               ///< sequence was made or restored
    std::size_t pages = 0;     ///< with data in quantized, window and rollback
    std::size_t shared = 0;    ///< part of these data in pages that other sequences hold as well
};

namespace detail {

/// A page of a table, and what its spans make of it.
struct held_page {
    const page& held;
    int shown = 0;            ///< of its tokens
    bool copy = false;        ///< no span shows it: it is only a 16-bit copy for rollback
    std::uint32_t spans = 1;  ///< that show it, or have it as their copy

    bool shared() const noexcept { return held.references.load(std::memory_order_acquire) > spans; }
    /// Bytes of a 16-bit page without a token.
    std::size_t slack() const noexcept {
        if (held.format != 0 || copy) return 0;
        return held.bytes -
               held.bytes / static_cast<std::size_t>(held.tokens) * static_cast<std::size_t>(shown);
    }
};

inline void add_page(usage_report& u, const held_page& p) noexcept {
    (p.copy ? u.rollback : p.held.format == 0 ? u.window : u.quantized) += p.held.bytes;
    u.slack += p.slack();
    u.not_finite += p.copy ? 0 : p.held.not_finite;
    u.shared += p.shared() ? p.held.bytes : 0;
    ++u.pages;
}
/// When all parts are there.
inline void add_up(usage_report& u) noexcept {
    u.bytes = u.quantized + u.window + u.rollback + u.bookkeeping + u.workspace + u.reserved + u.state;
}

}  // namespace detail
}}  // namespace kvq
