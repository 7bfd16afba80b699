// Budget: the least byte_budget with which every step of an engine succeeds, before there is a cache.
//
//   budget = sequences * (max over n and m of held(n) + stock(n, m) + cuts * cut)
//   held(n)       pages of a sequence of n tokens
//   stock(n, m)   pages that cache::reserve takes for m more tokens, while those of n tokens are held
//   cut           for K and V of every layer, a 16-bit page (of the sinks, if they are longer) and a page of
//                 the layer's format
//
// Contract: with so many bytes, cache::reserve succeeds for steps of all sequences at once, of any lengths up
// to `chunk`, as long as no sequence becomes longer than `tokens`; so do steps without reserve. Without cuts
// it is the least number: with one byte less some step fails (tests/properties/budget.cpp). Counted by the
// function that counts for cache::reserve (cache/chunk.hpp).
#pragma once

#include "../cache/cache.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// What an engine asks of a cache.
struct budget_use {
    int tokens = 0;     ///< most tokens of a sequence
    int sequences = 1;  ///< sequences of so many tokens; those that share whole pages take less
    int chunk = 1;      ///< most new tokens of a sequence in one step
    /// Most pages of a sequence and layer that show only a part of their tokens at a time: a trim by more
    /// than `rollback` tokens leaves at most one; erase(), shift() and splice() leave at most three each
    /// (cache/rearrange.hpp).
    int cuts = 0;
    int cross_tokens = 0;  ///< most tokens of every layer with cross attention
};

/// The least cache_options::byte_budget for a cache of this shape with these options, whose own byte_budget
/// does not matter. With cuts it is an upper bound: a closed page waits in 16 bit until it is quantized. A
/// draft takes sequence::draft_bytes() more. With cache_options::preallocate pages count in multiples of 64
/// bytes, and free ranges that fit no page come on top (page/page_arena.hpp). Raises kvq::error as cache()
/// does, and for negative numbers. Takes milliseconds, with cuts up to 32 times as long.
[[nodiscard]] std::size_t budget(const cache_options& options, const cache_shape& shape,
                                 const budget_use& use);
/// The same for layers that differ. With a window an upper bound: each such layer counts at its longest, as
/// if all were so at the same time.
[[nodiscard]] std::size_t budget(const cache_options& options, const std::vector<layer>& layers,
                                 const budget_use& use);

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "budget-inl.hpp"
#endif
