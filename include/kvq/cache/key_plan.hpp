// Plans of keys: which channels get how many bits, made by a sequence from its own first tokens.
//
//   first T tokens of a layer (cache_options::statistics_tokens, at most its window)     16 bit
//   the step that completes them     plan = widths of least error for their keys (quant/width_allocation.hpp)
//   then                             pages behind the recent window are quantized by the plan
//
// A plan belongs to a layer of a sequence. A page holds the format with the plan that quantized it
// (page/page.hpp), a page table that of its next pages. So forks, prefix hits and spliced pages are read
// under their own plan, and a plan is freed with its last page. A trim to fewer than T tokens forgets the
// plan for later pages. Guard: it doubts what keys say of queries (key_doubt), and a page whose
// own keys expect a larger error from it than from even widths has even widths, in as many bytes.
// Contract: the plan depends on the tokens alone, as pages do (cache/sequence.hpp), not on the sizes of
// chunks. Layers of keys alone have none.
#pragma once

#include "../page/page_table.hpp"
#include "cache.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// The plan for keys of format `index`: that of the table's own first tokens, or with key_statistics::shared
/// that of the cache. Empty: the format takes none, or the layer has too few tokens. O(T * channels)
format plan_of_keys(cache& of, const page_table& table, int layer, int index);

/// Temporary bytes of plan_of_keys(), at most.
std::size_t plan_bytes(const cache& of, int layer);

/// The plan that pages of format `index` of a table get: the one that it has, or plan_of_keys().
format plan_for(cache& of, const page_table& table, int layer, int index);

/// Gives the page the plan, unless its keys, where `from` is a 16-bit page, expect less error from even
/// widths. O(values), takes no memory
void choose_plan(const cache& of, int layer, const page& from, const format& plan, page& to);

}}}  // namespace kvq::detail

#if !defined(KVQ_COMPILED)
#include "key_plan-inl.hpp"
#endif
