// When snapshots of recurrent state are taken without being asked for, and which go when they take too much.
//
//   due      a step from token a to token b that reaches or passes a multiple of `every`; the end of a prompt
//   goes     the earliest one, while all take more than `most_bytes`
//
// Contract: allocates nothing. A snapshot that is just taken stays.
#pragma once

#include <cstddef>
#include <limits>
#include <span>

#include "../config.hpp"

namespace kvq { inline namespace KVQ_COMMON {

struct snapshot_policy {
    int every = 0;           ///< tokens; 0: none along the way
    bool prompt_end = true;  ///< when advance() says that a prompt ends
    /// For the snapshots of one sequence, page headers included. Pages that the live state or forks share
    /// count as well.
    std::size_t most_bytes = (std::numeric_limits<std::size_t>::max)();
};

/// A snapshot: the state of all layers after some tokens.
struct snapshot_mark {
    int tokens = 0;
    std::size_t bytes = 0;  ///< of its pages, headers included
};

namespace detail {

/// Does a step from token `from` to token `to` end with a snapshot?
constexpr bool is_due(const snapshot_policy& policy, int from, int to, bool prompt_ends) noexcept {
    return (policy.every > 0 && from / policy.every < to / policy.every) ||
           (policy.prompt_end && prompt_ends && to > 0);
}

/// How many of the first snapshots must go so that the others and `added` bytes take at most `limit`.
inline std::size_t surplus(std::span<const snapshot_mark> marks, std::size_t added,
                           std::size_t limit) noexcept {
    std::size_t held = added, n = 0;
    for (const snapshot_mark& m : marks) held += m.bytes;
    while (held > limit && n < marks.size()) held -= marks[n++].bytes;
    return n;
}

}  // namespace detail
}}  // namespace kvq
