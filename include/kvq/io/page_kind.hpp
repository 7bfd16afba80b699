// What a page is to its sequence, for those who see it outside.
#pragma once

#include <cstdint>

#include "../config.hpp"

namespace kvq::inline KVQ_TAGGED {

enum class page_kind : std::uint8_t {
    copy,  ///< 16-bit page from which a quantized page was made; kept for exact rollback
    page   ///< of a span: sinks, quantized pages, recent tokens
};

}  // namespace kvq::inline KVQ_TAGGED
