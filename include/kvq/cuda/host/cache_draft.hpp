// Drafted tokens of a cache (cache.hpp): several guesses of the next tokens are checked in one attention, then a path of them stays.
//
//   begin_draft(batch, n)       n drafted tokens behind the accepted ones; append() and attend() as in a step
//   keep(batch, paths)          the accepted ones move together, the others are gone; pages that leave the window are quantized
//
// Drafted tokens lie in the ring of the window (and in sinks), which is `draft_tokens` wider. No page is quantized for them.
// Contract: after keep() a sequence is bit for bit what appending the accepted tokens alone gives (cache/draft.hpp).
#pragma once

#include "cache_class.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

inline status cache::check_no_draft(std::span<const sequence_id> ids) const {
    for (const sequence_id id : ids) {
        if (!is_here(id)) continue;
        const detail::sequence_pages& s = entry_of(id).pages;
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
    int drafted = -1;
    for (const sequence_id id : batch) {
        if (id == sequence_id{}) continue;
        const int own = entry_of(id).pages.drafted;
        if (drafted < 0) drafted = own;
        if (own != drafted)
            return detail::bad_value(
                "drafts of a batch grow together: sequence %d holds %d drafted tokens, others %d", id.index,
                own, drafted);
        if (status s = check_growth(id, new_tokens); !s) return s;
    }
    drafted = common::larger(drafted, 0);
    if (new_tokens < 0 || new_tokens > options_.draft_tokens - drafted)
        return detail::bad_value("%d drafted tokens behind %d, but draft_tokens is %d", new_tokens, drafted,
                                 options_.draft_tokens);
    if (status s = ensure_pages(batch, new_tokens, true, stream); !s) return s;
    return send_step(batch, new_tokens, true, stream);
}

inline status cache::keep(std::span<const sequence_id> batch, std::span<const std::span<const int>> paths,
                          cudaStream_t stream) {
    if (status s = check_rows(batch); !s) return s;
    if (status s = check_batch(batch, false); !s) return s;
    if (paths.size() != batch.size())
        return detail::bad_value("%zu paths for %zu sequences", paths.size(), batch.size());
    std::vector<int> quantized(format_.kinds.size(), 0);
    int most = 0;
    for (std::size_t b = 0; b < batch.size(); ++b) {
        const detail::sequence_pages& s = entry_of(batch[b]).pages;
        int before = -1;
        for (const int i : paths[b]) {
            if (i <= before || i >= s.drafted)
                return detail::bad_value(
                    "token %d follows token %d in a path of sequence %d: paths ascend, and its draft has %d "
                    "tokens",
                    i, before, batch[b].index, s.drafted);
            before = i;
        }
        const auto count = static_cast<int>(paths[b].size());
        most = common::larger(most, count);
        quantized[static_cast<std::size_t>(s.target())] +=
            s.committed_after(count, geometry_) - s.committed();
    }
    if (status s = ensure_free(quantized, 0, 0, stream); !s) return s;
    step_ = {};
    detail::word_writer to(*format_.functions, words_.as<int>(), stream);
    for (std::size_t b = 0; b < batch.size(); ++b) {
        const auto at = static_cast<int>(b);
        to.put(counts_at(at), static_cast<int>(paths[b].size()));
        for (std::size_t i = 0; i < paths[b].size(); ++i)
            to.put(path_at(at) + static_cast<int>(i), paths[b][i]);
        entry_of(batch[b]).pages.drafted = 0;
        grow_row(at, batch[b], static_cast<int>(paths[b].size()), false, to);
    }
    status result = to.flush();
    if (!result) forget_rows();
    if (result && most > 0) {
        step_.rows = static_cast<int>(batch.size());  // for view()
        const int* const words = words_.as<int>();
        const detail::pool_memory& window = window_.memory();
        result = format_.functions->keep(
            {window, options_.sinks > 0 ? sinks_.memory() : window, words + window_at(0), words + sinks_at(0),
             words + tokens_at(0), words + counts_at(0), words + path_at(0), geometry_.ring, sink_columns_,
             options_.sinks, shape_.kv_heads, options_.draft_tokens},
            step_.rows, shape_.layers, stream);
        for (int f = 0; f < kinds() && result; ++f)
            if (quantized[static_cast<std::size_t>(f)] > 0)
                result = format_.functions->commit(all_layers(), f, most, words + counts_at(0), stream);
        step_ = {};
    }
    for (const sequence_id id : batch) {
        entry& e = entry_of(id);
        e.pages.release_unused(geometry_);
        e.version = ++versions_;
    }
    return result;
}

}}}  // namespace kvq::cuda
