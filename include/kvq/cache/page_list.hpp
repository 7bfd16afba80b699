// Attention over pages in memory of the caller: of a tiering codec, or of the page store of another engine.
//
//   kvq::page_list pages(cache, layer);             the shape, the formats and the layout of a cache
//   pages.add({.keys = k, .values = v, .key_format = 1, .value_format = 1,
//              .key_capacity = 128, .value_capacity = 128, .tokens = 128});
//   pages.attend(q, out, kvq::causal{}, executor, workspace);
//
// Contract: the bits are those of a sequence with these pages. Nothing is copied, and pages are only read: they must outlive the list.
// Memory: the headers and the table of spans, from the resource of the cache.
#pragma once

#include <deque>

#include "sequence.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Two pages that hold keys and values of the same tokens of a layer: kv_heads blocks each, one after the other, at addresses that are
/// multiples of 16.
struct borrowed_pages {
    const std::byte* keys = nullptr;
    const std::byte* values = nullptr;
    int key_format = 0;    ///< index in cache::table(tensor::key)
    int value_format = 0;  ///< index in cache::table(tensor::value)
    /// Tokens that the page has memory for.
    int key_capacity = 0;
    int value_capacity = 0;
    int skip = 0;            ///< tokens before the first shown one
    int tokens = 0;          ///< shown tokens, at least 1
    std::int64_t shift = 0;  ///< by how much the keys moved since they were rotated
};

class page_list {
public:
    page_list(const cache& of, int layer)
        : cache_(of), layer_(layer), headers_(of.pool().memory()), spans_(of.pool().memory()) {
        detail::expect(layer >= 0 && layer < of.shape().layers, "layer ", layer, " is not among the ",
                       of.shape().layers, " layers of the cache");
    }

    /// The tokens that follow. Raises kvq::error for pages that no sequence of the cache could have.
    void add(const borrowed_pages& p) {
        const auto place = spans_.size();
        const int capacity = detail::smaller(p.key_capacity, p.value_capacity);
        detail::expect(p.tokens >= 1 && p.tokens <= capacity && p.skip >= 0 && p.skip <= capacity - p.tokens,
                       "pages ", place, " show ", p.tokens, " tokens from ", p.skip, " on of ", capacity);
        detail::expect(tokens_ <= (std::numeric_limits<int>::max)() - cache_.options().page_tokens - p.tokens,
                       "pages ", place, " of ", p.tokens, " tokens behind ", tokens_, " tokens are too many");
        detail::expect_shift(cache_.rotations(), p.shift, "keys of pages ", place);
        page_span span{tokens_, p.tokens, capacity, {}, {}, p.skip, false, p.shift};
        for (const tensor role : {tensor::key, tensor::value})
            span.pages[static_cast<std::size_t>(role)] = header(role, p, place);
        spans_.push_back(std::move(span));
        tokens_ += p.tokens;
    }

    int tokens() const noexcept { return tokens_; }

    /// As sequence::attend, for the last q.tokens tokens of the list.
    void attend(const query_view& q, const output_view& out, const mods_view& mods, executor_view executor,
                workspace& space) const {
        cache_.check_attention(layer_, tokens_, q, out, mods);
        const layer_pages pages{cache_.geometry(), tokens_, spans_.data(), static_cast<int>(spans_.size()),
                                false};
        const detail::attention_item item{pages, q, out, nullptr};
        const detail::attention_items one{&item, layer_, 1, [](const void* of, int, int) {
                                              return *static_cast<const detail::attention_item*>(of);
                                          }};
        cache_.attend_items(layer_, one, mods, executor, space);
    }

private:
    page_ref header(tensor role, const borrowed_pages& p, std::size_t place) {
        const bool keys = role == tensor::key;
        const detail::format_table& table = cache_.table(role);
        const int format = keys ? p.key_format : p.value_format;
        const int capacity = keys ? p.key_capacity : p.value_capacity;
        const std::byte* const data = keys ? p.keys : p.values;
        detail::expect(format >= 0 && format < table.size(), "pages ", place, " have ", detail::name_of(role),
                       " format ", format, ", the cache has ", table.size());
        const int most = detail::planned_tokens(format, cache_.geometry());
        detail::expect(capacity <= most, "pages ", place, " have memory for ", capacity,
                       " tokens, pages of this cache for at most ", most);
        detail::expect(data != nullptr && reinterpret_cast<std::uintptr_t>(data) % 16 == 0,
                       detail::name_of(role), " page ", place,
                       " is not at an address that is a multiple of 16");
        page& made = headers_.emplace_back();
        made.references = 2;  // so that no reference of a span frees it
        made.format = format;
        made.tokens = capacity;
        made.bytes = cache_.page_bytes(role, format, capacity);
        made.memory = const_cast<std::byte*>(data);
        return page_ref(&made);
    }

    const cache& cache_;
    int layer_;
    int tokens_ = 0;
    std::pmr::deque<page> headers_;
    resource_vector<page_span> spans_;
};

}}  // namespace kvq
