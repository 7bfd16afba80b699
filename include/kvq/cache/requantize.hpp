// Requantizing a live cache: quantized pages of one or several sequences change their format, page by page.
//
//   requantize_request to_4_bit{.key = 1, .value = 1};         // positions in cache_options::keys and values
//   cache.plan_requantize(sequence, to_4_bit);                 // dry run: bytes before, after, peak, freed
//   cache.requantize(sequence, to_4_bit, {.pages = 64});       // 64 pages now, the others between later decode steps
//
// Only pages that lie behind the recent window change; sinks, recent tokens and the page being filled stay 16 bit. The pages are
// the only state: a page that already has the wanted format needs no work, so the same request can be
// made again until `pages_left` is 0. A page that several of the given sequences share, or several spans of one of them, is
// converted once and stays shared.
// Peak: the old pages, one new page per thread, and the new versions of pages whose old versions stay (as 16-bit copies, or because
// another sequence holds them). The dry run predicts the run byte for byte, as long as no other sequence takes or drops references
// to these pages in between.
// A page with tokens hidden by a trim or an erase is converted whole, and shows the same tokens as before.
// Error: cache/convert.hpp. 16-bit copies for exact rollback do not change.
#pragma once

#include <cstdint>

#include "sequence.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// How much of a request to do in one call. The first page is always done.
struct requantize_limit {
    std::size_t pages = (std::numeric_limits<std::size_t>::max)();
    std::int64_t nanoseconds = (std::numeric_limits<std::int64_t>::max)();
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "requantize-inl.hpp"
#endif
