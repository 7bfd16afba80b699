// Models that select the tokens that they read, on a cache (cache.hpp): an index chooses positions on the
// device, attention takes them.
//
//   append(index, k)                           the keys of the indexer, as tokens of any layer
//   select(index, q, weights, n, positions)    the best n tokens of every query
//   append(layer, k, v); attend_lists(layer, q, out, {.selected = {positions, n}})
//
// Contract: positions are those of the sequence, also where pages are cut. Nothing waits for the host: the
// calls can be captured as those of a step.
#pragma once

#include "cache_class.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// Why the workspace is too small.
inline status cache::no_list_space(int layer, const char* what, int queries, std::size_t needed) const {
    return detail::bad_value(
        "%s: %s for %d queries in one launch needs %zu bytes, but the workspace has %zu: listed_tokens is %d",
        describe(layer).c_str(), what, queries, needed, scratch_.bytes(), options_.listed_tokens);
}

/// Do no others wait for the layer's prompt?
inline status cache::check_waiting(int layer) const {
    const chunk* const c = shared_chunk(layer);
    if (c == nullptr || !c->waits()) return {};
    return detail::bad_value("%s: its prompt waits for %d layers that share it", describe(layer).c_str(),
                             c->waiting());
}

/// Are all keys of the step where they were appended?
inline status cache::check_unmoved(int layer) const {
    if (runs_of(layer) == 1) return {};
    return detail::bad_value("%s: keys of a sequence have moved; selections and lists do not turn queries",
                             describe(layer).c_str());
}

inline status cache::select(int layer, const query_view& q, const float* weights, int query_tokens, int count,
                            int* positions, cudaStream_t stream) const {
    if (status s = check_layer(layer, {q.type}); !s) return s;
    const detail::layer_group& g = group_of(layer);
    if (!g.format.index)
        return detail::bad_value("%s: it is no index, which selects tokens", describe(layer).c_str());
    if (status s = check_unmoved(layer); !s) return s;
    const int rows = step_.rows, room = options_.max_tokens;
    if (query_tokens < 1 || q.tokens != 1LL * rows * query_tokens || q.heads < 1 || q.dim != g.shape.head_dim)
        return detail::bad_value(
            "q is %d x %d x %d, but the step has %d sequences of %d query tokens and the "
            "index %d channels",
            q.tokens, q.heads, q.dim, rows, query_tokens, g.shape.head_dim);
    if (positions == nullptr || weights == nullptr || q.data == nullptr)
        return detail::bad_value("q, weights or positions is a null pointer");
    const auto bytes = [&](int queries) {
        return g.format.functions->select_workspace_bytes(queries, room, count);
    };
    // Prompts go in slices.
    int most = query_tokens;
    while (rows == 1 && most > 1 && bytes(most) > scratch_.bytes()) most = (most + 1) / 2;
    if (bytes(rows * most) > scratch_.bytes())
        return no_list_space(layer, "selecting tokens", rows * most, bytes(rows * most));
    for (int first = 0; first < query_tokens; first += most) {
        const int n = common::smaller(most, query_tokens - first);
        const std::ptrdiff_t row = std::ptrdiff_t{first} * rows;
        if (status s = g.format.functions->select(
                view(layer), most == query_tokens ? q : g.slice(q, first, n), weights + row * q.heads,
                {n, query_tokens - first - n, count, room}, positions + row * count, scratch_.as<>(),
                scratch_.bytes(), stream);
            !s)
            return s;
    }
    return {};
}

inline status cache::attend_lists(int layer, const query_view& q, const output_view& out, list_options lists,
                                  cudaStream_t stream) const {
    if (status s = check_layer(layer, {q.type, out.type}); !s) return s;
    const detail::layer_group& g = group_of(layer);
    if (g.geometry.window || is_cross(layer))
        return detail::bad_value("%s: lists are for layers whose queries see all tokens before them",
                                 describe(layer).c_str());
    if (status s = check_waiting(layer); !s) return s;
    if (status s = check_unmoved(layer); !s) return s;
    if (status s = detail::check_lists(lists, g.shape.kv_heads); !s) return s;
    const int rows = step_.rows, n = lists.query_tokens, width = g.shape.dim(tensor::value);
    if (n < 1 || q.tokens != 1LL * rows * n || lists.behind != 0 || lists.places)
        return detail::bad_value(
            "q has %d tokens, but the step has %d sequences of %d query tokens, whose "
            "lists are positions",
            q.tokens, rows, n);
    const int count = lists.selected.count + lists.window.count, heads = g.shape.kv_heads;
    const auto bytes = [&](int queries) {
        return g.format.functions->list_workspace_bytes(queries, q.heads, heads, count);
    };
    // Prompts go in slices.
    int most = n;
    while (rows == 1 && most > 1 && bytes(most) > scratch_.bytes()) most = (most + 1) / 2;
    if (g.format.latent && bytes(rows * most) > scratch_.bytes())
        return no_list_space(layer, "attention over lists", rows * most, bytes(rows * most));
    for (int first = 0; first < n; first += most) {
        list_options slice = lists;
        slice.query_tokens = common::smaller(most, n - first);
        slice.behind = n - first - slice.query_tokens;
        const std::ptrdiff_t row = std::ptrdiff_t{first} * q.heads;
        for (token_lists* list : {&slice.selected, &slice.window})
            if (list->tokens != nullptr) list->tokens += std::ptrdiff_t{first} * lists.kv_heads * list->count;
        if (lists.lse != nullptr) slice.lse = lists.lse + row;
        if (lists.state_in != nullptr) slice.state_in = lists.state_in + row * (width + 2);
        if (lists.state_out != nullptr) slice.state_out = lists.state_out + row * (width + 2);
        const auto part = [&](const auto& x) {
            return most == n ? x : g.slice(x, first, slice.query_tokens);
        };
        if (status s = g.format.functions->attend_lists(view(layer), part(q), part(out), slice,
                                                        scratch_.as<>(), scratch_.bytes(), stream);
            !s)
            return s;
    }
    return {};
}

}}}  // namespace kvq::cuda
