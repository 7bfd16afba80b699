// Drafted tokens of a cache (cache.hpp): several guesses of the next tokens are checked in one attention,
// then a path of them stays.
//
//   begin_draft(batch, n)       n drafted tokens behind the accepted ones; append() and attend() as in a step
//   keep(batch, paths)          the accepted ones move together, the others are gone; pages that leave the
//                               window are quantized
//
// Drafted tokens lie in the ring of the window (and in sinks), which is `draft_tokens` wider. No page is
// quantized for them.
// Contract: after keep() a sequence is bit for bit what appending the accepted tokens alone gives
// (cache/draft.hpp).
#pragma once

#include "cache_class.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

inline status cache::check_no_draft(std::span<const sequence_id> ids) const {
    for (const sequence_id id : ids) {
        if (!is_here(id)) continue;
        const detail::sequence_pages& s = entry_of(id).pages[0];
        if (s.drafted > 0)
            return detail::bad_value(
                "sequence %d holds a draft of %d tokens: keep() a part of it first, or trim() to %d",
                id.index, s.drafted, s.tokens());
    }
    return {};
}

inline status cache::begin_draft(std::span<const sequence_id> batch, int new_tokens, cudaStream_t stream) {
    if (status s = check_rows(batch); !s) return s;
    if (status s = check_batch(batch, true); !s) return s;
    if (status s = check_states(batch, "draft"); !s) return s;
    int drafted = -1;
    for (const sequence_id id : batch) {
        if (id == sequence_id{}) continue;
        const int own = entry_of(id).pages[0].drafted;
        if (drafted < 0) drafted = own;
        if (own != drafted)
            return detail::bad_value(
                "drafts of a batch grow together: sequence %d holds %d drafted tokens, others %d", id.index,
                own, drafted);
        if (status s = check_growth(id, new_tokens); !s) return s;
        for (std::size_t i = 0; i < step_groups(); ++i)
            if (const detail::sequence_pages& s = entry_of(id).pages[i]; s.open_shift() != 0)
                return detail::bad_value(
                    "sequence %d cannot take a draft: the keys of its last page have moved, and a draft "
                    "would end "
                    "behind it; append %d tokens first",
                    id.index, s.table.spans.back().room - s.table.spans.back().tokens);
    }
    drafted = common::larger(drafted, 0);
    if (new_tokens < 0 || new_tokens > options_.draft_tokens - drafted)
        return detail::bad_value("%d drafted tokens behind %d, but draft_tokens is %d", new_tokens, drafted,
                                 options_.draft_tokens);
    if (status s = check_whole(std::span(&step_.id, 1)); !s) return s;
    if (status s = settle(batch, stream); !s) return s;
    if (status s = ensure_pages(batch, new_tokens, true, false, stream); !s) return s;
    if (status s = ensure_runs(batch, new_tokens, stream); !s) return s;
    if (status s = append_chunks(stream); !s) return s;
    return send_step(batch, new_tokens, true, stream);
}

inline status cache::keep(std::span<const sequence_id> batch, std::span<const std::span<const int>> paths,
                          cudaStream_t stream) {
    if (status s = check_rows(batch); !s) return s;
    if (status s = check_batch(batch, false); !s) return s;
    if (paths.size() != batch.size())
        return detail::bad_value("%zu paths for %zu sequences", paths.size(), batch.size());
    int most = 0;
    std::vector<int> counts;
    for (std::size_t b = 0; b < batch.size(); ++b) {
        const int drafted = entry_of(batch[b]).pages[0].drafted;
        int before = -1;
        for (const int i : paths[b]) {
            if (i <= before || i >= drafted)
                return detail::bad_value(
                    "token %d follows token %d in a path of sequence %d: paths ascend, and its draft has %d "
                    "tokens",
                    i, before, batch[b].index, drafted);
            before = i;
        }
        counts.push_back(static_cast<int>(paths[b].size()));
        most = common::larger(most, counts.back());
    }
    if (status s = check_whole(std::span(&step_.id, 1)); !s) return s;
    std::vector<std::vector<int>> quantized;  // by group and format
    for (std::size_t i = 0; i < step_groups(); ++i) {
        detail::layer_group& g = groups_[i];
        std::vector<int>& of = quantized.emplace_back(g.format.kinds.size(), 0);
        for (std::size_t b = 0; b < batch.size(); ++b) {
            const detail::sequence_pages& s = entry_of(batch[b]).pages[i];
            of[static_cast<std::size_t>(s.target())] += s.missing_quantized(counts[b], g.geometry);
        }
        if (status s = g.ensure_free(of, 0, 0, stream); !s) return s;
    }
    if (status s = append_chunks(stream); !s) return s;
    // From here on nothing is refused.
    step_ = {};
    detail::word_writer to = writer(stream);
    for (std::size_t i = 0; i < step_groups(); ++i) {
        detail::layer_group& g = groups_[i];
        g.new_step();
        for (std::size_t b = 0; b < batch.size(); ++b) {
            const auto at = static_cast<int>(b);
            g.send(to, g.counts_at(at), counts[b]);
            for (int k = 0; k < counts[b]; ++k)
                g.send(to, g.path_at(at) + k, paths[b][static_cast<std::size_t>(k)]);
            entry& e = entry_of(batch[b]);
            e.pages[i].drafted = 0;
            g.grow_row(at, batch[b], e.version, e.pages[i], counts[b], false, to);
        }
    }
    status result = to.flush();
    if (!result) forget_rows();
    const auto rows = static_cast<int>(batch.size());
    for (std::size_t i = 0; i < step_groups() && most > 0; ++i) {
        const detail::layer_group& g = groups_[i];
        const detail::pool_memory& window = g.window.memory();
        if (result)
            result = g.format.functions->keep(
                {window, options_.sinks > 0 ? g.sinks.memory() : window, g.words + g.window_at(0),
                 g.words + g.sinks_at(0), g.words + g.tokens_at(0), g.words + g.counts_at(0),
                 g.words + g.path_at(0), g.geometry.ring, g.sink_columns, options_.sinks, g.shape.kv_heads,
                 options_.draft_tokens},
                rows, g.shape.layers, stream);
        for (int f = 0; f < g.kinds() && result; ++f)
            if (quantized[i][static_cast<std::size_t>(f)] > 0)
                result =
                    g.format.functions->commit(g.all_layers(rows), f, most, g.words + g.counts_at(0), stream);
    }
    for (const sequence_id id : batch) {
        entry& e = entry_of(id);
        for (std::size_t i = 0; i < step_groups(); ++i) e.pages[i].release_unused(groups_[i].geometry);
        e.version = ++versions_;
    }
    return result;
}

}}}  // namespace kvq::cuda
