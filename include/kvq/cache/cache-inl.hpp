// Definitions of cache.hpp.
#pragma once

#include <cmath>
#include <limits>
#include <string>

#include "../core/bits.hpp"
#include "../core/error.hpp"
#include "cache.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC cache::cache(const cache_shape& shape, const cache_options& options)
    : shape_(shape),
      options_(checked(shape, options)),
      keys_(tensor::key, window_of(options), options.keys),
      values_(tensor::value, window_of(options), options.values.empty() ? options.keys : options.values),
      rotations_(options.rotary, shape.layers, shape.head_dim),
      pool_(options.memory, options.byte_budget, options.preallocate) {
    for (const layer_format& f : options.layers) {
        expect_listed(tensor::key, f.key);
        expect_listed(tensor::value, f.value);
    }
    for (const tensor role : {tensor::key, tensor::value})
        for (int i = 0; i < table(role).listed(); ++i) {
            check(role, table(role)[i + 1], i);
            const int first = table(role).find(table(role)[i + 1]);
            detail::expect(first == i, detail::name_of(role), " formats ", first, " and ", i, " are both ",
                           format_text(table(role)[i + 1]), " on ", table(role)[i + 1].backend(),
                           ": list a format once");
        }
    detail::check_backends(keys_, values_);
}

KVQ_FUNC cache::~cache() = default;

KVQ_FUNC page_geometry cache::geometry() const noexcept {
    return {options_.sinks, options_.recent, options_.page_tokens};
}

KVQ_FUNC const detail::format_table& cache::table(tensor role) const noexcept {
    return role == tensor::key ? keys_ : values_;
}

KVQ_FUNC int cache::add_format(tensor role, const format& f) {
    detail::format_table& list = role == tensor::key ? keys_ : values_;
    check(role, f, list.listed());
    if (const int i = list.find(f); i < list.listed()) return i;
    detail::check_backends(keys_, values_, f);
    list.add(f);
    return list.listed() - 1;
}

KVQ_FUNC void cache::commit_to(tensor role, int listed, int first_layer, int last_layer) {
    expect_listed(role, listed);
    detail::expect(first_layer >= 0 && first_layer <= last_layer &&
                       (last_layer <= shape_.layers || last_layer == requantize_request::all),
                   "layers ", first_layer, " to ", last_layer, " are not a range of the ", shape_.layers,
                   " layers of the cache");
    options_.layers.resize(static_cast<std::size_t>(shape_.layers));
    for (int i = first_layer; i < detail::smaller(last_layer, shape_.layers); ++i) {
        layer_format& f = options_.layers[static_cast<std::size_t>(i)];
        (role == tensor::key ? f.key : f.value) = listed;
    }
}

KVQ_FUNC int cache::target_format(tensor role, int layer) const {
    const layer_format f =
        options_.layers.empty() ? layer_format{} : options_.layers[static_cast<std::size_t>(layer)];
    return table(role).index_of(role == tensor::key ? f.key : f.value);
}

KVQ_FUNC std::size_t cache::page_bytes(tensor role, int index, int tokens) const {
    return table(role).block_bytes(index, {role, tokens, shape_.dim(role)}) *
           static_cast<std::size_t>(shape_.kv_heads);
}

KVQ_FUNC const cache_options& cache::checked(const cache_shape& shape, const cache_options& options) {
    detail::check_shape(shape);
    detail::expect(options.memory != nullptr, "a cache needs a memory resource");
    detail::expect(options.sinks >= 0, "sinks must not be negative, got ", options.sinks);
    detail::expect(options.recent >= 0, "recent must not be negative, got ", options.recent);
    detail::expect(!options.preallocate || options.byte_budget != page_pool::no_budget,
                   "a cache can allocate its pages up front only within a byte_budget");
    detail::expect(options.rollback >= 0, "rollback must not be negative, got ", options.rollback);
    detail::expect(options.page_tokens >= 1 && options.page_tokens <= 65536,
                   "page_tokens must be between 1 and 65536, got ", options.page_tokens);
    constexpr int most = (std::numeric_limits<int>::max)() / 4;
    detail::expect(options.sinks <= most && options.recent <= most && options.rollback <= most, "sinks ",
                   options.sinks, ", recent ", options.recent, " and rollback ", options.rollback,
                   " must not be more than ", most);
    detail::expect(options.repack >= 0.0f && options.repack <= 0.5f, "repack ", options.repack,
                   " must be 0, for never, or at most 0.5");
    const page_geometry g{options.sinks, options.recent, options.page_tokens};
    for (const tensor role : {tensor::key, tensor::value})
        detail::check_page(g.longest_page(), shape.dim(role));
    detail::expect(options.layers.empty() || static_cast<int>(options.layers.size()) == shape.layers,
                   "formats are given for ", options.layers.size(), " layers of a cache with ", shape.layers);
    detail::expect(!options.keys.empty(), "a cache needs a format for its keys, such as fp16");
    for (const format_list* list : {&options.keys, &options.values})
        for (const format& f : *list) detail::expect(static_cast<bool>(f), "a format of the cache is empty");
    detail::expect(!options.window || options.window.holds_values(), "the window format must be ",
                   "fp32, fp16 or bf16, got ", options.window ? format_text(options.window) : "none");
    return options;
}

KVQ_FUNC const format& cache::window_of(const cache_options& options) {
    if (options.window) return options.window;
    return options.keys[0].functions().backend->fp16();
}

KVQ_FUNC void cache::check(tensor role, const format& f, int number) const {
    detail::check_format(f, shape_, role, options_.page_tokens,
                         std::string(detail::name_of(role)) + " format " + std::to_string(number));
}

KVQ_FUNC void cache::expect_listed(tensor role, int number) const {
    detail::expect(number >= 0 && number < table(role).listed(), detail::name_of(role), " format ", number,
                   " is not among the ", table(role).listed(), " listed ones");
}

KVQ_FUNC void cache::check_attention(int layer, int held, const query_view& q, const output_view& out,
                                     const mods_view& mods) const {
    detail::expect(q.heads >= 1 && q.heads % shape_.kv_heads == 0, "q has ", q.heads,
                   " heads, not a multiple of the ", shape_.kv_heads, " kv heads");
    detail::expect(q.dim == shape_.dim(tensor::key), "q has head_dim ", q.dim, " but keys have ",
                   shape_.dim(tensor::key));
    detail::expect(out.tokens == q.tokens && out.heads == q.heads && out.dim == shape_.dim(tensor::value),
                   "out is ", out.tokens, " x ", out.heads, " x ", out.dim, " but must be ", q.tokens, " x ",
                   q.heads, " x ", shape_.dim(tensor::value));
    const int most = mods.has_query_positions() ? held : (std::numeric_limits<int>::max)() / q.heads;
    detail::expect(q.tokens >= 0 && q.tokens <= most, "q has ", q.tokens, " tokens but layer ", layer,
                   " holds ", held);
    detail::expect(q.data != nullptr || q.tokens == 0, "q has no data for ", q.tokens, " tokens");
    detail::expect(out.data != nullptr || q.tokens == 0, "out has no data for ", out.tokens, " tokens");
    mods.check(q.heads);
    detail::expect(std::isfinite(mods.scale(q.dim)), "scores cannot be scaled by ", mods.scale(q.dim));
}

KVQ_FUNC std::size_t cache::scratch_floats() const noexcept {
    return static_cast<std::size_t>(options_.page_tokens) *
           static_cast<std::size_t>(detail::larger(shape_.dim(tensor::key), shape_.dim(tensor::value)));
}

KVQ_FUNC std::size_t cache::scratch_bytes() const noexcept {
    return detail::round_up(scratch_floats() * sizeof(float), std::size_t{64});
}

}}
