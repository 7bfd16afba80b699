// Bytes of a sequence: by layer, tensor and format, with codes and parameters apart.
//
//   for (const usage_row& row : usage_rows(sequence)) ...      // where the bytes of usage() are
//
// Contract: as usage() (page/usage_report.hpp). Copies for rollback have no rows. Reads only; O(pages).
#pragma once

#include <string>
#include <vector>

#include "sequence.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// Pages of one layer and tensor that are in one format. Format 0 is the window: sinks, recent tokens, pages
/// not yet quantized.
struct usage_row {
    int layer = 0;
    tensor role = tensor::key;
    int format = 0;
    std::string name;    ///< the name that was asked for (format::asked_name)
    std::string scheme;  ///< the scheme behind it
    int pages = 0;
    int tokens = 0;         ///< that spans show
    int room = 0;           ///< tokens that the pages have memory for
    std::size_t codes = 0;  ///< bytes of codes or of 16/32-bit values
    /// bytes of scales, biases and padding; all bytes of a block whose codes do not lie apart from the
    /// parameters
    std::size_t parameters = 0;
    std::size_t slack = 0;        ///< part of `codes` that holds no token yet
    std::size_t shared = 0;       ///< bytes of pages that other sequences hold as well
    std::size_t bookkeeping = 0;  ///< page headers
};

/// One row per layer, tensor and format in use, in this order. Codes and parameters of all rows add up to
/// usage_report::quantized + window. O(pages).
[[nodiscard]] std::vector<usage_row> usage_rows(const sequence& s);

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "usage-inl.hpp"
#endif
