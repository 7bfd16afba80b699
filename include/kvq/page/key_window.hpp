// Which keys in front of a query it sees, where it does not see all of them: what a layer may free by itself.
//
//   sliding   the last `tokens` keys up to the query        sliding window attention
//   chunked   the keys of the query's own chunk of `tokens` tokens: from the last multiple of `tokens` on
//             Llama 4
//   cross     all keys, whose tokens are not those of the queries       encoders and decoders
//   sinks     and the first `sinks` keys; Xiao et al., arXiv 2309.17453
//
// Contract: first_seen() does not fall from one query to the next, so a key that a query does not see is not
// seen by later ones.
#pragma once

#include "../core/bits.hpp"

namespace kvq { inline namespace KVQ_COMMON {

struct key_window {
    int tokens = 0;  ///< 0: every key is seen
    bool chunked = false;
    int sinks = 0;
    bool cross = false;

    explicit constexpr operator bool() const noexcept { return tokens > 0; }
    /// The first key behind the sinks that the query at this position sees.
    constexpr int first_seen(int query) const noexcept {
        if (tokens == 0) return 0;
        return chunked ? query / tokens * tokens : detail::larger(0, query - tokens + 1);
    }
    friend constexpr bool operator==(const key_window&, const key_window&) = default;
};

}}  // namespace kvq
