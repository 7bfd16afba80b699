// Definitions of sequence.hpp, of steps of many sequences: attend, prefill, reserve; and of chunks that wait
// for layers that share them.
#pragma once

#include <atomic>
#include <limits>
#include <span>

#include "../attention/attention_batch.hpp"
#include "../attention/attention_mass.hpp"
#include "../attention/token_selection.hpp"
#include "../core/error.hpp"
#include "sequence.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// Request: attention_request or prefill_request.
template <class Request>
attention_items items_of(std::span<const Request> batch, int layer) {
    return {batch.data(), layer, static_cast<int>(batch.size()), [](const void* requests, int of, int i) {
                const Request& r = static_cast<const Request*>(requests)[i];
                return attention_item{r.sequence->pages(of), r.q, r.out, r.mods ? &*r.mods : nullptr};
            }};
}

}  // namespace detail

KVQ_FUNC void sequence::set_waits(int owner, bool waits) noexcept {
    for (int i = owner; i < cache_->layer_count(); ++i)
        if (cache_->owner(i) == owner) tables_[static_cast<std::size_t>(i)].waits = waits;
}

KVQ_FUNC bool sequence::waits_alone(int layer) const noexcept {
    const int owner = cache_->owner(layer);
    bool alone = tables_[static_cast<std::size_t>(owner)].waits;
    for (int i = owner + 1; i < cache_->layer_count(); ++i)
        alone =
            alone && (i == layer || cache_->owner(i) != owner || !tables_[static_cast<std::size_t>(i)].waits);
    return alone;
}

KVQ_FUNC void sequence::commit_waiting(int layer) {
    detail::chunk kept = new_chunk(layer, 0, detail::chunk_pages::after_attend);
    kept.stage();
    kept.plan_keys();
    for (int i = 0; i < kept.jobs(); ++i) kept.quantize(i, scratch_.data());
    kept.commit();
}

KVQ_FUNC void sequence::commit_shared(int layer) {
    if (!tables_[static_cast<std::size_t>(layer)].waits) return;
    commit_waiting(layer);
    set_waits(layer, false);
}

KVQ_FUNC void sequence::commit_due() {
    for (int layer = 0; layer < static_cast<int>(tables_.size()); ++layer) {
        const detail::page_table& held = tables_[static_cast<std::size_t>(layer)];
        if (cache_->holds_tokens(layer) && held.due(held.tokens, cache_->geometry(layer)) > held.committed)
            commit_waiting(layer);
    }
}

KVQ_FUNC void sequence::commit_shared() {
    for (int layer = 0; layer < static_cast<int>(tables_.size()); ++layer)  // none after a move
        if (cache_->holds_tokens(layer)) commit_shared(layer);
}

KVQ_FUNC void sequence::try_commit_shared() noexcept {
    // What is left waits on: the next change of its layer commits it, or raises the error.
    (void)detail::caught([&] { commit_shared(); });
}

KVQ_FUNC void sequence::ended_waits::add(sequence& s, int layer) {
    const detail::page_table& table = s.tables_[static_cast<std::size_t>(layer)];
    if (!table.waits) return;
    layer_before before{&s, layer, detail::page_table(table, s.memory()), {}};
    // A page that is shared would be copied before it takes tokens.
    if (table.has_open_span()) before.table.spans.back().pages = {};
    for (const detail::page_table& t : s.tables_) before.waits.push_back(t.waits);
    saved_.push_back(std::move(before));
}

// NOLINTNEXTLINE(bugprone-exception-escape): both tables have the sequence's memory resource
KVQ_FUNC sequence::ended_waits::~ended_waits() {
    for (layer_before& before : saved_) {
        auto& tables = before.of->tables_;
        detail::page_table& now = tables[static_cast<std::size_t>(before.layer)];
        if (before.table.has_open_span()) before.table.spans.back().pages = std::move(now.spans.back().pages);
        now = std::move(before.table);
        for (std::size_t i = 0; i < tables.size(); ++i)
            if (before.of->cache_->owner(static_cast<int>(i)) == before.layer)
                tables[i].waits = before.waits[i];
    }
}

KVQ_FUNC void cache::check_member(const sequence* s, std::size_t i) const {
    detail::expect(s != nullptr && s->cache_ == this, "sequence ", i,
                   " of the batch is not one of this cache");
}

KVQ_FUNC void cache::attend_items(int layer, const detail::attention_items& items, const mods_view& mods,
                                  executor_view executor, workspace& space) const {
    long long rows = 0;
    for (int i = 0; i < items.count; ++i) {
        const query_view q = items(i).q;
        rows += static_cast<long long>(q.tokens) * q.heads;
    }
    detail::expect(rows <= (std::numeric_limits<int>::max)() / 2, "a batch of ", rows, " query rows");
    if (rows == 0) return;
    const int threads = executor.concurrency();
    const detail::attention_batch all(table(tensor::key, layer), read_values(layer), shape(layer),
                                      geometry(layer), rotations_, items, mods);
    all.run(layer, executor, threads, space.reserve(all.bytes(threads)));
}

KVQ_FUNC void cache::attend(int layer, std::span<const attention_request> batch, const mods_view& mods,
                            executor_view executor, workspace& space) const {
    for (std::size_t i = 0; i < batch.size(); ++i) {
        check_member(batch[i].sequence, i);
        check_attention(layer, batch[i].sequence->tokens(layer), batch[i].q, batch[i].out,
                        batch[i].mods ? *batch[i].mods : mods);
        batch[i].sequence->check_window(layer, batch[i].sequence->tokens(layer) - batch[i].q.tokens);
    }
    attend_items(owner(layer), detail::items_of(batch, owner(layer)), mods, executor, space);
}

KVQ_FUNC void sequence::attention_mass(int layer, const query_view& q, float* mass, const mods_view& mods,
                                       executor_view executor, workspace& space) const {
    const int held = tokens(layer);
    // No output is written: one of the right shape.
    const token_view<float> shape_of_out(nullptr, 0, q.heads, shape(layer).dim(tensor::value));
    query_view checked = q;
    checked.tokens = 0;
    cache_->check_attention(layer, held, checked, shape_of_out, mods);
    detail::expect(q.tokens >= 1 && q.tokens <= held && q.data != nullptr && mass != nullptr, "q has ",
                   q.tokens, " tokens for the mass of layer ", layer, ", which holds ", held,
                   mass == nullptr || q.data == nullptr ? ", and something is null" : "");
    detail::expect(
        mods.lists() == nullptr && mods.selection() == nullptr && mods.skipping() == nullptr,
        "the mass is that of all tokens that masks show: lists, selections and skipped values have "
        "none");
    check_window(layer, held - q.tokens);
    const int of = cache_->owner(layer), threads = executor.concurrency();
    const page_geometry g = cache_->geometry(of);
    const detail::attention_mass all(cache_->table(tensor::key, of), cache_->read_values(of), shape(of), g,
                                     cache_->rotations_, of, pages(of), q, mods.within(g.window), threads);
    all.run(executor, space.reserve(all.bytes()), mass);
}

KVQ_FUNC void cache::select(int layer, std::span<const select_request> batch, int best,
                            executor_view executor, workspace& space) const {
    detail::expect(best >= 1, "a query selects at least 1 token, not ", best);
    for (std::size_t i = 0; i < batch.size(); ++i) {
        const select_request& r = batch[i];
        check_member(r.sequence, i);
        r.sequence->check_layer(layer);
        if (layers_[static_cast<std::size_t>(layer)].kind != layer_kind::index)
            detail::fail(r.sequence->describe(layer), ": it is no index, which selects tokens");
        const int held = r.sequence->tokens(layer), channels = shape(layer).head_dim;
        detail::expect(r.q.heads >= 1 && r.q.dim == channels, "q is ", r.q.heads, " x ", r.q.dim,
                       ", not at least 1 head of the ", channels, " channels of layer ", layer);
        detail::expect(r.q.tokens >= 0 && r.q.tokens <= held, "q has ", r.q.tokens, " tokens but layer ",
                       layer, " holds ", held);
        detail::expect((r.q.data != nullptr && r.weights != nullptr && r.out != nullptr) || r.q.tokens == 0,
                       "there are no ",
                       r.q.data == nullptr    ? "queries"
                       : r.weights == nullptr ? "weights"
                                              : "lists",
                       " for ", r.q.tokens, " tokens");
    }
    if (batch.empty()) return;
    const detail::token_selection::item_list items{
        batch.data(), layer, static_cast<int>(batch.size()), [](const void* requests, int of, int i) {
            const select_request& r = static_cast<const select_request*>(requests)[i];
            return detail::token_selection::item{r.sequence->pages(of), r.q, r.weights, r.out};
        }};
    const detail::token_selection all(table(tensor::key, layer), read_values(layer), shape(layer),
                                      geometry(layer), rotations_, items, best, executor.concurrency());
    all.run(executor, space.reserve(all.bytes()));
}

KVQ_FUNC void cache::prefill(int layer, std::span<const prefill_request> batch, const mods_view& mods,
                             executor_view executor, workspace& space) {
    if (batch.empty()) return;
    const std::uint64_t list = detail::next_list();
    for (std::size_t i = 0; i < batch.size(); ++i) {
        const prefill_request& r = batch[i];
        check_member(r.sequence, i);
        if (std::exchange(r.sequence->list_, list) == list)
            detail::expect_distinct(i, "batch", [&](std::size_t j) { return batch[j].sequence; });
        r.sequence->check_layer(layer);
        if (owner(layer) == layer)
            r.sequence->check_chunk(layer, r.k, r.v);
        else
            r.sequence->check_no_rows(r, layer);
        const int held = r.sequence->tokens(layer) + r.k.tokens;
        check_attention(layer, held, r.q, r.out, r.mods ? *r.mods : mods);
        r.sequence->check_window(layer, held - r.q.tokens);
    }
    sequence::ended_waits ended;
    // Chunks that are not committed put the former state back.
    struct staged_chunks {
        std::span<const prefill_request> batch;
        ~staged_chunks() {
            for (const prefill_request& r : batch) r.sequence->staged_.reset();
        }
    } const undo{batch};
    const int of = owner(layer);
    const auto stage = [of](const prefill_request& r, int n, detail::chunk_pages when) {
        r.sequence->staged_.emplace(r.sequence->new_chunk(of, n, when)).stage();
    };
    const bool keeps = of == layer && is_shared(layer);
    const auto is_step = [](const prefill_request& r) { return r.k.tokens > 0 || r.q.tokens > 0; };
    if (keeps) {  // the last chunk waits no longer
        for (const prefill_request& r : batch)
            if (is_step(r)) ended.add(*r.sequence, layer);
        for (const prefill_request& r : batch)
            if (is_step(r) && r.sequence->table(layer).waits) stage(r, 0, detail::chunk_pages::after_attend);
        commit_staged(batch, executor, space);
        for (const prefill_request& r : batch)
            if (is_step(r)) r.sequence->set_waits(layer, false);
    }
    long long tokens = 0;
    for (const prefill_request& r : batch) {
        tokens += r.k.tokens;
        if (keeps ? is_step(r) : r.k.tokens > 0 || (of != layer && r.sequence->waits_alone(layer)))
            stage(r, r.k.tokens, keeps ? detail::chunk_pages::shared : detail::chunk_pages::after_attend);
    }
    const int heads = shape(layer).kv_heads;
    detail::expect(batch.size() <= static_cast<std::size_t>((std::numeric_limits<int>::max)() / (2 * heads)),
                   "a batch of ", batch.size(), " sequences with ", heads, " kv heads");
    const int blocks = static_cast<int>(tensors(of).size()) * heads;
    const int writes = static_cast<int>(batch.size()) * blocks;
    const auto write = [&](int i) {
        const prefill_request& r = batch[static_cast<std::size_t>(i / blocks)];
        const tensor role = i % blocks < heads ? tensor::key : tensor::value;
        if (r.k.tokens > 0) r.sequence->staged_->write_head(role, role == tensor::key ? r.k : r.v, i % heads);
    };
    // Few tokens are written sooner than threads are called.
    if (tokens < 64)
        serial_executor{}.parallel_for(writes, write);
    else
        executor.parallel_for(writes, write);
    for (const prefill_request& r : batch)
        if (r.sequence->staged_) r.sequence->staged_->move_keys(r.sequence->scratch_.data());
    attend_items(of, detail::items_of(batch, of), mods, executor, space);
    commit_staged(batch, executor, space);
    ended.keep();
    for (const prefill_request& r : batch) {
        if (keeps && is_step(r)) r.sequence->set_waits(layer, true);
        if (of != layer) r.sequence->tables_[static_cast<std::size_t>(layer)].waits = false;
    }
}

KVQ_FUNC void cache::commit_staged(std::span<const prefill_request> batch, executor_view executor,
                                   workspace& space) {
    int jobs = 0;
    for (const prefill_request& r : batch)
        if (r.sequence->staged_) r.sequence->staged_->plan_keys();
    for (const prefill_request& r : batch)
        if (r.sequence->staged_) jobs += r.sequence->staged_->jobs();
    const int workers = detail::larger(1, detail::smaller(executor.concurrency(), jobs));
    std::byte* const memory = space.reserve(static_cast<std::size_t>(workers) * scratch_bytes());
    std::atomic<int> next{0};
    const auto quantize = [&](int worker) {
        auto* const floats =
            reinterpret_cast<float*>(memory + static_cast<std::size_t>(worker) * scratch_bytes());
        for (int job = next.fetch_add(1); job < jobs; job = next.fetch_add(1)) {
            int first = 0;
            for (const prefill_request& r : batch) {
                if (!r.sequence->staged_) continue;
                const int own = r.sequence->staged_->jobs();
                if (job < first + own) {
                    r.sequence->staged_->quantize(job - first, floats);
                    break;
                }
                first += own;
            }
        }
    };
    if (workers == 1)
        quantize(0);
    else
        executor.parallel_for(workers, quantize);
    for (const prefill_request& r : batch) {
        if (r.sequence->staged_) r.sequence->staged_->commit();
        r.sequence->staged_.reset();
    }
}

KVQ_FUNC void sequence::reserve_step(int n) {
    detail::page_stock fresh(memory());
    for (std::size_t layer = 0; layer < tables_.size(); ++layer) {
        const detail::page_table& table = tables_[layer];
        if (!cache_->takes_steps(static_cast<int>(layer))) {
            fresh.end_layer(0, 0);
            continue;
        }
        const std::size_t commits =
            detail::chunk::count_reserved(*cache_, static_cast<int>(layer), table, n, fresh);
        const std::size_t capacity = table.capacity_after(n, geometry());
        fresh.end_layer(capacity > table.spans.capacity() ? capacity : 0, commits, 1,
                        cache_->is_shared(static_cast<int>(layer)));
    }
    fresh.fill(cache_->pool());
    if (state_) state_->reserve();
    stock_.swap(fresh);
    for (int layer = 0; layer < cache_->layer_count(); ++layer)
        if (!cache_->takes_steps(layer)) stock_.end_step();  // no call of the step is for this layer
}

KVQ_FUNC void cache::reserve(std::span<const step_request> batch, int q_heads, int threads, workspace& space,
                             const mods_view& mods) {
    expect_query_heads("a step with ", q_heads);
    detail::expect(threads >= 1, "a step on ", threads, " threads");
    const std::uint64_t list = detail::next_list();
    long long rows = 0;
    for (std::size_t i = 0; i < batch.size(); ++i) {
        const step_request& r = batch[i];
        check_member(r.sequence, i);
        if (std::exchange(r.sequence->list_, list) == list)
            detail::expect_distinct(i, "batch", [&](std::size_t j) { return batch[j].sequence; });
        for (int layer = 0; layer < layer_count(); ++layer) {
            r.sequence->check_layer(layer);
            if (!takes_steps(layer)) continue;
            r.sequence->check_added(r.sequence->table(layer), r.tokens);
            sequence::check_no_draft(r.sequence->table(layer));
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
    for (const step_request& r : batch) {
        r.sequence->commit_shared();
        r.sequence->release_reserved();
    }
    std::size_t bytes = static_cast<std::size_t>(threads) * scratch_bytes();
    for (int layer = 0; layer < layer_count(); ++layer) {
        if (!holds_tokens(layer)) continue;
        struct step {
            std::span<const step_request> batch;
            int q_heads;
        } const of{batch, q_heads};
        const detail::attention_items items{
            &of, layer, static_cast<int>(batch.size()), [](const void* s, int at, int i) {
                const step& step_of = *static_cast<const step*>(s);
                const step_request& r = step_of.batch[static_cast<std::size_t>(i)];
                layer_pages pages = r.sequence->pages(at);
                const int added = r.sequence->cache_->takes_steps(at) ? r.tokens : 0;
                pages.tokens += added;
                pages.count = r.sequence->table(at).size_after(added, pages.geometry);
                const token_view<float> q(nullptr, r.q_tokens, step_of.q_heads,
                                          r.sequence->shape(at).dim(tensor::key));
                return detail::attention_item{pages, q, q, r.mods ? &*r.mods : nullptr};
            }};
        if (rows > 0)
            bytes = detail::larger(
                bytes, detail::attention_batch(table(tensor::key, layer), read_values(layer), shape(layer),
                                               geometry(), rotations_, items, mods)
                           .bytes(threads));
    }
    space.reserve(bytes);
    for (const step_request& r : batch)
        if (r.tokens > 0) r.sequence->reserve_step(r.tokens);
    all.done = true;
}

}}
