// Requantizing a live cache: quantized pages of one or several sequences change their format, page by page.
//
//   requantize_request to_4_bit{.key = 1, .value = 1};         // positions in cache_options::keys and values
//   cache.plan_requantize(sequence, to_4_bit);                 // dry run: bytes before, after, peak, freed
//   cache.requantize(sequence, to_4_bit, {.pages = 64});       // 64 pages now, the others between later
//                                                              // decode steps
//
// Only pages behind the recent window change; 16-bit copies stay. The pages are the only state: one that has
// the wanted format needs no work, so a request can be made again until `pages_left` is 0. A page is
// converted whole, with the tokens that a cut has hidden. Which pages change, each once:
// page/page_changes.hpp. Error: convert.hpp.
// Peak: the old pages, one new page per thread, and the new versions of pages whose old versions stay (as
// 16-bit copies, or because another sequence holds them). The dry run predicts the run byte for byte, as long
// as no other sequence takes or drops references to these pages in between.
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
