// What a page was in its sequence, for pages that have left it: in saved files (io/saved_index.hpp) and
// messages (io/page_wire.hpp).
//
// Contract: the numbers are part of both formats and never change (docs/reference/files.md).
#pragma once

#include <cstdint>

#include "../config.hpp"

namespace kvq { inline namespace KVQ_COMMON {

enum class page_kind : std::uint8_t {
    copy,  ///< 16-bit copy of a quantized page, kept for exact rollback
    page   ///< of a span: sinks, quantized pages, recent tokens
};

}}  // namespace kvq
