// What sequence::usage() reports. By layer, tensor and format: usage.hpp.
// Contract: it counts every allocation of a sequence.
#pragma once

#include <cstddef>

#include "../config.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// Bytes held by a sequence. Shared pages count in every sequence that holds them (the pool counts them once).
struct usage_report {
    std::size_t quantized = 0;    ///< data of quantized pages
    std::size_t window = 0;       ///< data of 16/32-bit pages: sinks, recent, and pages not yet quantized
    std::size_t slack = 0;        ///< part of `window` that holds no token yet
    std::size_t rollback = 0;     ///< 16-bit copies kept so that a short trim is exact
    std::size_t bookkeeping = 0;  ///< page headers and tables
    std::size_t workspace = 0;    ///< scratch for quantizing
    std::size_t reserved = 0;    ///< for the next step (cache::reserve): pages with their headers, and tables
    std::size_t bytes = 0;       ///< sum of all of the above except `slack`
    std::size_t not_finite = 0;  ///< NaN and infinities that were appended: in 16-bit pages, or quantized
    int tokens = 0;              ///< of the longest layer
    std::size_t repacked =
        0;  ///< tokens that cuts quantized once more, summed over layers, since the sequence was made or restored
};

}}  // namespace kvq
