// Reading a part of a cache (cache.hpp). Models that select the tokens that they read: an index chooses
// positions on the device, attention takes them. Others: each kv head reads its best pages.
//
//   append(index, k)                           the keys of the indexer, as tokens of any layer
//   select(index, q, weights, n, positions)    the best n tokens of every query
//   append(layer, k, v); attend_lists(layer, q, out, {.selected = {positions, n}})
//   attend(layer, k, v, q, out, {.selected_tokens = n})
//
// Contract: positions are those of the sequence, also where pages are cut; sequences with such pages are
// refused where pages are selected. Nothing waits for the host: the calls can be captured as those of a step.
#pragma once

#include "cache_class.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// A format of a row's pages whose keys have no estimate; -1: none.
inline int without_estimate(const layer_group& g, int b) noexcept {
    for (int f = 0; f < g.kinds(); ++f)
        if (g.format.kinds[static_cast<std::size_t>(f)].no_estimate != nullptr && g.holds(f, b)) return f;
    return -1;
}
/// Has one of the first `rows` rows pages that are not ranked (cache::check_pages)?
inline bool has_unranked(const layer_group& g, int rows) noexcept {
    bool found = g.has_cuts(0, rows);
    for (int b = 0; b < rows; ++b) found = found || without_estimate(g, b) >= 0;
    return found;
}

}  // namespace detail

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
    return detail::bad_value(
        "%s: keys of a sequence have moved; pages are ranked for queries that do not turn",
        describe(layer).c_str());
}

inline status cache::check_pages(int layer, int q_heads, const attention_options& options) const {
    if (options.selected_tokens == 0) return {};
    const detail::layer_group& g = group_of(layer);
    const auto refused = [&](const char* why) {
        return detail::bad_value("%s: %s", describe(layer).c_str(), why);
    };
    if (options.selected_tokens < 1 || options.selected_tokens > options_.listed_tokens)
        return detail::bad_value("%s: %d selected tokens, but 1 to listed_tokens, %d, can be",
                                 describe(layer).c_str(), options.selected_tokens, options_.listed_tokens);
    if (const char* const why = g.format.functions->no_pages) return refused(why);
    if (g.geometry.window || is_cross(layer))
        return refused(
            "pages are selected in layers with keys and values whose queries see all tokens before them");
    if (options.query_tokens != 1 || options.ancestors != nullptr || options.window != 0)
        return detail::bad_value(
            "%s: pages are selected for one query of each sequence, without tree or window; got %d, window "
            "%d",
            describe(layer).c_str(), options.query_tokens, options.window);
    if (status s = check_unmoved(layer); !s) return s;
    for (int b = 0; b < step_.rows; ++b) {
        if (g.has_cuts(b, b + 1))
            return detail::bad_value(
                "%s: row %d has pages of which a trim or an erase shows a part; they are not ranked",
                describe(layer).c_str(), b);
        if (const int f = detail::without_estimate(g, b); f >= 0) {
            const auto& kind = g.format.kinds[static_cast<std::size_t>(f)];
            return detail::bad_value("%s: pages in %s are not ranked, since %s", describe(layer).c_str(),
                                     kind.name.c_str(), kind.no_estimate);
        }
    }
    const int rows = step_.rows, heads = g.shape.kv_heads, ring = g.geometry.ring;
    if (status s = g.format.functions->check_selection(rows, q_heads, heads, g.columns, ring,
                                                       options.selected_tokens, g.resident.places());
        !s)
        return s;
    const std::size_t bytes = g.format.functions->page_selection_bytes(rows, q_heads, heads, g.columns, ring,
                                                                       options.selected_tokens);
    if (bytes > scratch_.bytes() || 4 * static_cast<std::size_t>(rows * heads) > tickets_.bytes())
        return detail::bad_value(
            "%s: selecting pages for %d query heads needs %zu bytes, but the workspace has %zu: query_heads "
            "is "
            "%d",
            describe(layer).c_str(), q_heads, bytes, scratch_.bytes(), options_.query_heads);
    return {};
}

inline status cache::attend_pages(int layer, const query_view& q, const output_view& out,
                                  const attention_options& options, cudaStream_t stream,
                                  const void* score) const {
    return group_of(layer).format.functions->attend_pages(
        view(layer), q, out, options, scratch_.as<std::byte>(), tickets_.as<unsigned>(), workspace_.as<>(),
        workspace_.bytes(), stream, score);
}

inline status cache::select(int layer, const query_view& q, const float* weights, int query_tokens, int count,
                            int* positions, cudaStream_t stream) {
    if (status s = check_layer(layer, {q.type}); !s) return s;
    const detail::layer_group& g = group_of(layer);
    if (!g.format.index)
        return detail::bad_value("%s: it is no index, which selects tokens", describe(layer).c_str());
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
    if (status s = ensure_query_runs(layer, rows * most, q.heads, stream); !s) return s;
    for (int first = 0; first < query_tokens; first += most) {
        const int n = common::smaller(most, query_tokens - first);
        const std::ptrdiff_t row = std::ptrdiff_t{first} * rows;
        // Every run writes the scores of its tokens, and the last one selects.
        for (int r = 0, runs = runs_of(layer); r < runs; ++r) {
            query_view queries = most == query_tokens ? q : g.slice(q, first, n);
            if (status s = turn_query(layer, r, queries, n, stream); !s) return s;
            if (status s = g.format.functions->select(
                    g.view(member_of(layer), rows, runs == 1 ? -1 : r), queries, weights + row * q.heads,
                    {n, query_tokens - first - n, r + 1 < runs ? 0 : count, room}, positions + row * count,
                    scratch_.as<>(), scratch_.bytes(), stream);
                !s)
                return s;
        }
    }
    return {};
}

inline status cache::attend_lists(int layer, const query_view& q, const output_view& out, list_options lists,
                                  cudaStream_t stream) {
    if (status s = check_layer(layer, {q.type, out.type}); !s) return s;
    const detail::layer_group& g = group_of(layer);
    if (g.geometry.window || is_cross(layer))
        return detail::bad_value("%s: lists are for layers whose queries see all tokens before them",
                                 describe(layer).c_str());
    if (status s = check_waiting(layer); !s) return s;
    if (lists.drafted == 0) lists.drafted = step_.draft;
    if (status s = detail::check_lists(lists, g.shape.kv_heads); !s) return s;
    if (runs_of(layer) > 1 && lists.sink_logits != nullptr)
        return detail::bad_value("%s: keys have moved, and logits of sinks are for keys in their place",
                                 describe(layer).c_str());
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
    if (status s = ensure_query_runs(layer, rows * most, q.heads, stream); !s) return s;
    for (int first = 0; first < n; first += most) {
        list_options slice = lists;
        slice.query_tokens = common::smaller(most, n - first);
        slice.behind = n - first - slice.query_tokens;
        if (lists.ancestors != nullptr) slice.ancestors = lists.ancestors + first;
        const std::ptrdiff_t row = std::ptrdiff_t{first} * q.heads;
        for (token_lists* list : {&slice.selected, &slice.window})
            if (list->tokens != nullptr) list->tokens += std::ptrdiff_t{first} * lists.kv_heads * list->count;
        if (lists.lse != nullptr) slice.lse = lists.lse + row;
        if (lists.state_in != nullptr) slice.state_in = lists.state_in + row * (width + 2);
        if (lists.state_out != nullptr) slice.state_out = lists.state_out + row * (width + 2);
        const auto part = [&](const auto& x) {
            return most == n ? x : g.slice(x, first, slice.query_tokens);
        };
        for (int r = 0, runs = runs_of(layer); r < runs; ++r) {
            query_view queries = part(q);
            output_view to = part(out);
            list_options o = slice;
            if (status s = chain_run(layer, r, queries, to, o, slice.query_tokens, stream); !s) return s;
            if (status s = g.format.functions->attend_lists(
                    g.view(member_of(layer), rows, runs == 1 ? -1 : r), queries, to, o, scratch_.as<>(),
                    scratch_.bytes(), stream);
                !s)
                return s;
        }
    }
    return {};
}

}}}  // namespace kvq::cuda
