// Definitions of page_list.hpp.
#pragma once

#include "../attention/attention_batch.hpp"
#include "../core/error.hpp"
#include "page_list.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC page_list::page_list(const cache& of, int layer)
    : cache_(of), layer_(layer), headers_(of.pool().memory()), spans_(of.pool().memory()) {
    detail::expect(layer >= 0 && layer < of.layer_count(), "layer ", layer, " is not among the ",
                   of.layer_count(), " layers of the cache");
    of.expect_tokens(layer);
}

KVQ_FUNC void page_list::add(const borrowed_pages& p) {
    const auto place = spans_.size();
    const int capacity = cache_.tensors(layer_).size() == 1
                             ? p.key_capacity
                             : detail::smaller(p.key_capacity, p.value_capacity);
    detail::expect(p.tokens >= 1 && p.tokens <= capacity && p.skip >= 0 && p.skip <= capacity - p.tokens,
                   "pages ", place, " show ", p.tokens, " tokens from ", p.skip, " on of ", capacity);
    detail::expect(tokens_ <= (std::numeric_limits<int>::max)() - cache_.options().page_tokens - p.tokens,
                   "pages ", place, " of ", p.tokens, " tokens behind ", tokens_, " tokens are too many");
    detail::expect_shift(cache_.rotations(), p.shift, "keys of pages ", place);
    cache_.expect_values_stay(layer_, p.shift);
    page_span span{tokens_, p.tokens, capacity, {}, {}, p.skip, false, p.shift};
    for (const tensor role : cache_.tensors(layer_))
        span.pages[static_cast<std::size_t>(role)] = header(role, p, place);
    spans_.push_back(std::move(span));
    tokens_ += p.tokens;
}

KVQ_FUNC void page_list::attend(const query_view& q, const output_view& out, const mods_view& mods,
                                executor_view executor, workspace& space) const {
    cache_.check_attention(layer_, tokens_, q, out, mods);
    const layer_pages pages{cache_.geometry(), tokens_, spans_.data(), static_cast<int>(spans_.size()),
                            false};
    const detail::attention_item item{pages, q, out, nullptr};
    const detail::attention_items one{&item, layer_, 1, [](const void* of, int, int) {
                                          return *static_cast<const detail::attention_item*>(of);
                                      }};
    cache_.attend_items(layer_, one, mods, executor, space);
}

KVQ_FUNC page_ref page_list::header(tensor role, const borrowed_pages& p, std::size_t place) {
    const bool keys = role == tensor::key;
    const detail::format_table& table = cache_.table(role);
    const int format = keys ? p.key_format : p.value_format;
    const int capacity = keys ? p.key_capacity : p.value_capacity;
    const std::byte* const data = keys ? p.keys : p.values;
    detail::expect(format >= 0 && format < table.size(), "pages ", place, " have ", detail::name_of(role),
                   " format ", format, ", the cache has ", table.size());
    if (keys) cache_.expect_fits(layer_, format);
    detail::expect(!table[format].functions().upper, "pages ", place, " have ", detail::name_of(role),
                   " format ", format_text(table[format]), ", whose two planes do not lie in one place");
    const int most = detail::planned_tokens(format, cache_.geometry());
    detail::expect(capacity <= most, "pages ", place, " have memory for ", capacity,
                   " tokens, pages of this cache for at most ", most);
    detail::expect(data != nullptr && reinterpret_cast<std::uintptr_t>(data) % 16 == 0, detail::name_of(role),
                   " page ", place, " is not at an address that is a multiple of 16");
    detail::expect(!keys || p.key_plan || !table[format].wants_plan(), "pages ", place, " have keys of ",
                   format_text(table[format]),
                   ", which are not read without their plan: key_plan is page::plan, or the format itself");
    page& made = headers_.emplace_back();
    if (keys && p.key_plan && !p.key_plan.is(table[format])) {
        detail::expect(table[format].functions().plans != nullptr &&
                           table[format].functions().plans == p.key_plan.functions().plans,
                       "pages ", place, " have a plan of ", format_text(p.key_plan), " for keys of ",
                       format_text(table[format]));
        p.key_plan.functions().check(p.key_plan.scheme(), cache_.shape(layer_), role);
        made.plan = p.key_plan;
    }
    made.references = 2;  // so that no reference of a span frees it
    made.format = format;
    made.tokens = capacity;
    made.bytes = cache_.page_bytes(role, layer_, format, capacity);
    made.memory = const_cast<std::byte*>(data);
    return page_ref(&made);
}

}}
