// How much of a request to requantize is done in one call (cache/requantize.hpp).
#pragma once

#include <chrono>
#include <cstddef>
#include <limits>

#include "../config.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// How much of a request to do in one call. The first page is always done.
struct requantize_limit {
    std::size_t pages = (std::numeric_limits<std::size_t>::max)();
    std::chrono::nanoseconds time = (std::chrono::nanoseconds::max)();
};

}}  // namespace kvq
