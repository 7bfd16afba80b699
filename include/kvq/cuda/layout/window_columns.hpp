// Counts of pages and tokens that the host and kernels share.
#pragma once

#include "../../config.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// Columns that the ring of a recent window needs, where launches store new_tokens tokens per sequence and
/// commit the pages that are then behind the window. For attention alone: new_tokens = 0.
KVQ_HD constexpr int window_columns(int recent, int page_tokens, int new_tokens = 1) noexcept {
    return (recent + new_tokens + page_tokens - 2) / page_tokens + 1;
}
/// Pages wholly behind the recent window of a sequence that has so many tokens behind its sinks.
KVQ_HD constexpr int committed_pages(int tokens, int recent, int page_tokens) noexcept {
    return tokens > recent ? (tokens - recent) / page_tokens : 0;
}

namespace detail {

/// Of a sequence: sums and differences of a few numbers of tokens fit into an int.
inline constexpr int most_tokens = 1 << 28;

}  // namespace detail
}}}  // namespace kvq::cuda
