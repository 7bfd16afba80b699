// What to requantize, and the report, which plan_requantize() fills with what a run then does, byte for byte
// (cache/requantize.hpp).
#pragma once

#include <cstddef>
#include <limits>

#include "../config.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// Pages to change, and their new formats.
struct requantize_request {
    static constexpr int keep = -1;
    static constexpr int all = (std::numeric_limits<int>::max)();

    int key = keep;    ///< format for keys, 0-based in cache_options::keys; `keep`: unchanged
    int value = keep;  ///< format for values
    int first_layer = 0, last_layer = all;  ///< layers [first_layer, last_layer)
    int first_token = 0, last_token = all;  ///< pages that lie wholly in tokens [first_token, last_token)
    bool only_smaller = false;              ///< skip pages that would not shrink
    bool new_pages = false;                 ///< pages committed from now on take these formats, too
};

struct requantize_limit;  // cache/requantize.hpp

/// The result of a run, or of a dry run. Bytes are those of pages, headers included, as page_pool counts
/// them.
struct requantize_report {
    std::size_t pages = 0;         ///< converted pages; a shared page counts once
    std::size_t pages_left = 0;    ///< pages of the request that are not converted yet
    std::size_t bytes_before = 0;  ///< in the pool
    std::size_t bytes_after = 0;   ///< in the pool
    std::size_t bytes_peak = 0;    ///< largest in between
    std::size_t bytes_freed = 0;   ///< of old pages; pages that another sequence still holds are not freed
    std::size_t workspace = 0;     ///< scratch for the duration of the call, not in the pool
};

}}  // namespace kvq
