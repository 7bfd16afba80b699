// Erase, shift, splice: the tokens of a sequence in another order.
//
//   erase(first, last)          tokens [0, first), then [last, n) moved by first - last
//   shift(first, last, by)      the same tokens; the keys of [first, last) move by `by`
//   splice(other, first, last)
//     the tokens of this sequence, then [first, last) of the other one, moved by n - first
//
// All three build the new spans of every layer from runs of old spans (page_table::take), then exchange them,
// so that a failure changes nothing. A span stores by how much its keys moved; attention rotates the query
// instead (attention/rotary.hpp).
//   quantized page that is cut     shared by the spans on both sides of the cut; codes stay
//   16-bit page that is cut        the tokens behind the cut are copied to a page of their own, which is
//                                  exact
//   16-bit page, not full, that is no longer the last    closed: it is committed with the tokens it has, to
//                                                        pages for just these
//   16-bit page whose keys moved, the last one           stays open: new keys take its rotation
//                                                        (cache/chunk.hpp)
// What many cuts leave is repacked (cache/repack.hpp).
#pragma once

#include "sequence.hpp"

#if !defined(KVQ_COMPILED)
#include "rearrange-inl.hpp"
#endif
