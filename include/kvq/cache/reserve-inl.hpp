// Definitions of reserve.hpp.
#pragma once

#include "../attention/attention_batch.hpp"
#include "../core/error.hpp"
#include "reserve.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC void sequence::reserve_step(int n) {
    detail::page_stock fresh(memory());
    for (const detail::page_table& table : tables_) {
        const std::size_t commits = detail::chunk::count_reserved(*cache_, table, n, fresh);
        const std::size_t capacity =
            detail::table_capacity(static_cast<std::size_t>(table.size_after(n, geometry())));
        fresh.end_layer(capacity > table.spans.capacity() ? capacity : 0, commits);
    }
    fresh.fill(cache_->pool());
    stock_.swap(fresh);
}

KVQ_FUNC void cache::reserve(std::span<const step_request> batch, int q_heads, int threads, workspace& space,
                             const mods_view& mods) {
    detail::expect(q_heads >= 1 && q_heads % shape_.kv_heads == 0, "a step with ", q_heads,
                   " query heads, not a multiple of the ", shape_.kv_heads, " kv heads");
    detail::expect(threads >= 1, "a step on ", threads, " threads");
    long long rows = 0;
    for (std::size_t i = 0; i < batch.size(); ++i) {
        const step_request& r = batch[i];
        check_member(r.sequence, i);
        for (std::size_t j = 0; j < i; ++j)
            detail::expect(batch[j].sequence != r.sequence, "sequence ", i, " of the batch is sequence ", j,
                           " again");
        for (const detail::page_table& table : r.sequence->tables_) {
            r.sequence->check_added(table, r.tokens);
            sequence::check_no_draft(table);
        }
        detail::expect(r.q_tokens >= 0, "a step with ", r.q_tokens, " query tokens");
        rows += static_cast<long long>(r.q_tokens) * q_heads;
    }
    detail::expect(rows <= (std::numeric_limits<int>::max)() / 2, "a batch of ", rows, " query rows");
    // Nothing is reserved unless everything is.
    struct reserved_steps {
        std::span<const step_request> batch;
        bool done = false;
        ~reserved_steps() {
            if (done) return;
            for (const step_request& r : batch) r.sequence->release_reserved();
        }
    } all{batch};
    for (const step_request& r : batch) r.sequence->release_reserved();
    std::size_t bytes = static_cast<std::size_t>(threads) * scratch_bytes();
    for (int layer = 0; layer < shape_.layers; ++layer) {
        struct step {
            std::span<const step_request> batch;
            int q_heads;
        } const of{batch, q_heads};
        const detail::attention_items items{
            &of, layer, static_cast<int>(batch.size()), [](const void* s, int at, int i) {
                const step& step_of = *static_cast<const step*>(s);
                const step_request& r = step_of.batch[static_cast<std::size_t>(i)];
                layer_pages pages = r.sequence->pages(at);
                pages.tokens += r.tokens;
                pages.count =
                    r.sequence->tables_[static_cast<std::size_t>(at)].size_after(r.tokens, pages.geometry);
                const token_view<float> q(nullptr, r.q_tokens, step_of.q_heads,
                                          r.sequence->shape().dim(tensor::key));
                return detail::attention_item{pages, q, q, r.mods ? &*r.mods : nullptr};
            }};
        if (rows > 0)
            bytes = detail::larger(
                bytes, detail::attention_batch(keys_, values_, shape_, geometry(), rotations_, items, mods)
                           .bytes(threads));
    }
    space.reserve(bytes);
    for (const step_request& r : batch)
        if (r.tokens > 0) r.sequence->reserve_step(r.tokens);
    all.done = true;
}

}}  // namespace kvq
