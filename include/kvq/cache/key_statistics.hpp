// Whose keys say which channels get how many bits (cache/key_plan.hpp), on the CPU and on a device.
#pragma once

#include "../config.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// For formats of keys that have a plan of widths and were made without one: mix4, mix5, mix6, low3, low2.
enum class key_statistics : unsigned char {
    off = 0,    ///< none: all channels have the same width
    own = 1,    ///< every sequence has a plan, of its own first tokens; forks and prefix hits inherit it
    shared = 2  ///< one plan for the cache, of the first sequence that has enough tokens
};

}}  // namespace kvq
