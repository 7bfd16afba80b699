// The kind of a page outside of its sequence.
#pragma once

#include <cstdint>

#include "../config.hpp"

namespace kvq::inline KVQ_TAGGED {

enum class page_kind : std::uint8_t {
    copy,  ///< 16-bit copy of a quantized page, kept for exact rollback
    page   ///< of a span: sinks, quantized pages, recent tokens
};

}  // namespace kvq::inline KVQ_TAGGED
