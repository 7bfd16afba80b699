// Attention over pages in memory of the caller: of a tiering codec, or of the page store of another engine.
//
//   kvq::page_list pages(cache, layer);             the shape, the formats and the layout of a cache
//   pages.add({.keys = k, .values = v, .key_format = 1, .value_format = 1,
//              .key_capacity = 128, .value_capacity = 128, .tokens = 128});
//   pages.attend(q, out, kvq::causal{}, executor, workspace);
//
// Contract: the bits are those of a sequence with these pages. Nothing is copied, and pages are only read:
// they must outlive the list.
// Memory: the headers and the table of spans, from the resource of the cache.
#pragma once

#include <deque>

#include "sequence.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// Two pages that hold keys and values of the same tokens of a layer: kv_heads blocks each, one after the
/// other, at addresses that are multiples of 16.
struct borrowed_pages {
    const std::byte* keys = nullptr;
    const std::byte* values = nullptr;  ///< of a latent layer none, nor format and capacity
    int key_format = 0;                 ///< index in cache::table(tensor::key)
    int value_format = 0;               ///< index in cache::table(tensor::value)
    /// Tokens that the page has memory for.
    int key_capacity = 0;
    int value_capacity = 0;
    int skip = 0;            ///< tokens before the first shown one
    int tokens = 0;          ///< shown tokens, at least 1
    std::int64_t shift = 0;  ///< by how much the keys moved since they were rotated
    /// The format of the keys with their plan, as format_table::of(page) gives it: page::plan, or the format
    /// itself for even widths. Needed for formats that take a plan (mix4 to mix6, low3, low2 without
    /// statistics).
    format key_plan = {};
};

class page_list {
public:
    page_list(const cache& of, int layer);

    /// The tokens that follow. Raises kvq::error for pages that no sequence of the cache could have.
    void add(const borrowed_pages& p);

    int tokens() const noexcept { return tokens_; }

    /// As sequence::attend, for the last q.tokens tokens of the list.
    void attend(const query_view& q, const output_view& out, const mods_view& mods, executor_view executor,
                workspace& space) const;

private:
    page_ref header(tensor role, const borrowed_pages& p, std::size_t place);

    const cache& cache_;
    int layer_;
    int tokens_ = 0;
    std::pmr::deque<page> headers_;
    resource_vector<page_span> spans_;
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "page_list-inl.hpp"
#endif
