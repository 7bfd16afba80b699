// Definitions of sequence.hpp.
#pragma once

#include <cstring>
#include <limits>
#include <new>
#include <span>
#include <utility>

#include "../core/error.hpp"
#include "../core/float_environment.hpp"
#include "draft.hpp"
#include "repack.hpp"
#include "sequence.hpp"
#include "window.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC sequence::sequence(sequence&&) noexcept = default;
KVQ_FUNC sequence::~sequence() = default;

KVQ_FUNC sequence cache::new_sequence() { return sequence(*this); }

KVQ_FUNC sequence sequence::fork() const { return {*this, 0}; }

KVQ_FUNC sequence& sequence::operator=(sequence&& other) noexcept {
    // Assignment member by member would keep the memory resource of the former cache.
    if (this != &other) {
        this->~sequence();
        ::new (this) sequence(std::move(other));
    }
    return *this;
}

KVQ_FUNC void sequence::prefill(int layer, const input_view& k, const input_view& v, const query_view& q,
                                const output_view& out) {
    workspace space(memory());
    prefill(layer, k, v, q, out, causal{}, serial_executor{}, space);
}

KVQ_FUNC void sequence::prefill(int layer, const input_view& k, const input_view& v, const query_view& q,
                                const output_view& out, const mods_view& mods, executor_view executor,
                                workspace& space) {
    const prefill_request one{this, k, v, q, out, {}};
    cache_->prefill(layer, std::span(&one, 1), mods, executor, space);
}

KVQ_FUNC void sequence::append(int layer, const input_view& k, const input_view& v) {
    check_chunk(layer, k, v);
    if (k.tokens == 0) return;
    ended_waits ended;
    ended.add(*this, layer);
    commit_shared(layer);
    const detail::page_table& held = tables_[static_cast<std::size_t>(layer)];
    detail::chunk added = new_chunk(layer, k.tokens, detail::pages_of_append(*cache_, layer, held, k.tokens));
    added.stage();
    added.write(k, v, scratch_.data());
    added.plan_keys();
    for (int i = 0; i < added.jobs(); ++i) added.quantize(i, scratch_.data());
    added.commit();
    ended.keep();
}

KVQ_FUNC void sequence::append_draft(int layer, const input_view& k, const input_view& v) {
    check_rows(layer, k, v);
    if (!cache_->takes_steps(layer)) detail::fail(describe(layer), ": it takes no drafts");
    detail::page_table& table = tables_[static_cast<std::size_t>(layer)];
    detail::expect(k.tokens <= detail::most_drafted - table.draft, "a draft has at most ",
                   detail::most_drafted, " tokens: layer ", layer, " holds ", table.draft,
                   " and cannot take ", k.tokens, " more");
    if (k.tokens == 0) return;
    ended_waits ended;
    ended.add(*this, layer);
    commit_shared(layer);
    detail::append_draft(*cache_, layer, table, k, v);
    ended.keep();
}

KVQ_FUNC void sequence::keep(std::span<const int> path) {
    int drafted = 0, fewest = detail::most_drafted;
    for (const detail::page_table& table : tables_) {
        drafted = detail::larger(drafted, table.draft);
        if (table.draft > 0) fewest = detail::smaller(fewest, table.draft);
    }
    const int most = drafted > 0 ? fewest : 0;
    for (std::size_t i = 0; i < path.size(); ++i)
        detail::expect(path[i] >= 0 && path[i] < most && (i == 0 || path[i] > path[i - 1]), "token ", path[i],
                       " at place ", i, " of a path through a draft of ", most,
                       " tokens: a path ascends from 0 on");
    if (drafted == 0) return;
    detail::kept_drafts kept(*cache_, tables_);
    kept.append(path, scratch_.data());
    kept.commit();
}

KVQ_FUNC void sequence::attend(int layer, const query_view& q, const output_view& out,
                               const mods_view& mods) const {
    workspace space(memory());
    attend(layer, q, out, mods, serial_executor{}, space);
}

KVQ_FUNC void sequence::attend(int layer, const query_view& q, const output_view& out, const mods_view& mods,
                               executor_view executor, workspace& space) const {
    const attention_request one{this, q, out, {}};
    cache_->attend(layer, std::span(&one, 1), mods, executor, space);
}

KVQ_FUNC void sequence::attention_mass(int layer, const query_view& q, float* mass,
                                       const mods_view& mods) const {
    workspace space(memory());
    attention_mass(layer, q, mass, mods, serial_executor{}, space);
}

KVQ_FUNC void sequence::select(int layer, const query_view& q, const float* weights, int best,
                               std::int32_t* out) const {
    workspace space(memory());
    select(layer, q, weights, best, out, serial_executor{}, space);
}

KVQ_FUNC void sequence::select(int layer, const query_view& q, const float* weights, int best,
                               std::int32_t* out, executor_view executor, workspace& space) const {
    const select_request one{this, q, weights, out};
    cache_->select(layer, std::span(&one, 1), best, executor, space);
}

KVQ_FUNC int sequence::trim(int wanted) {
    detail::expect(wanted >= 0 && wanted <= tokens(), "cannot trim to ", wanted,
                   " tokens: the sequence holds ", tokens());
    const int n = reach(wanted);
    for (const detail::page_table& table : tables_)
        detail::expect(n <= table.tokens - table.draft || n >= table.tokens || table.draft == 0,
                       "cannot trim to ", n, " tokens: the draft of a layer is tokens ",
                       table.tokens - table.draft, " to ", table.tokens, ", keep() a part of it");
    for (int layer = 0; n > 0 && layer < static_cast<int>(tables_.size()); ++layer) {
        const detail::page_table& table = tables_[static_cast<std::size_t>(layer)];
        const page_geometry g = cache_->geometry(layer);
        if (n < table.tokens && table.ends_in_cut_sinks(n, g))
            detail::fail("cannot trim to ", n, " tokens: ", describe(layer), ": every query sees the first ",
                         g.window.sinks,
                         " tokens, and an earlier cut keeps new ones out of the page of token ", n - 1,
                         "; the limit is ", trim_limit());
        if (table.dropped > 0 && !table.reaches(n, g))
            detail::fail("cannot trim to ", n, " tokens: ", describe(layer), ", dropped tokens when it held ",
                         table.dropped, "; the limit is ", trim_limit());
        if (!table.reaches(n, g))
            detail::fail("cannot trim to ", n, " tokens: ", describe(layer), ", holds tokens from ",
                         table.front(), " on of ", table.tokens, ", the next token must see those from ",
                         g.window.first_seen(n), " on; the limit is ", trim_limit());
    }
    for (std::size_t layer = 0; layer < tables_.size(); ++layer) {
        detail::page_table& table = tables_[layer];
        if (!cache_->takes_steps(static_cast<int>(layer))) continue;
        if (n < table.tokens) table.drop_draft();
        if (table.trim(n, cache_->geometry(static_cast<int>(layer))))
            detail::repacker(*cache_, table, static_cast<int>(layer)).run(true);
    }
    try_commit_shared();
    if (state_) state_->trim(wanted);
    return wanted - n;
}

KVQ_FUNC recurrent_state& sequence::state() {
    detail::expect(!tables_.empty(), "a sequence that was moved from has no layers");
    detail::expect(state_.has_value(),
                   "no layer of the cache has state: a list of layers says it (kvq::state_layer)");
    return *state_;
}

KVQ_FUNC const recurrent_state& sequence::state() const { return const_cast<sequence*>(this)->state(); }

KVQ_FUNC int sequence::trim_limit() const noexcept {
    int least = 0;
    for (std::size_t layer = 0; layer < tables_.size(); ++layer)
        least = detail::larger(least, tables_[layer].trim_limit(cache_->geometry(static_cast<int>(layer))));
    if (!state_ || least == 0) return least;
    return state_->trim_limit(tokens(), [&](int n) { return can_trim(n); });
}

KVQ_FUNC bool sequence::can_trim(int n) const noexcept {
    bool all = n >= 0 && n <= tokens();
    if (all) n = reach(n);
    for (std::size_t layer = 0; n > 0 && layer < tables_.size(); ++layer)
        all = all && tables_[layer].reaches(n, cache_->geometry(static_cast<int>(layer)));
    return all;
}

KVQ_FUNC bool sequence::holds(int layer, int first, int last) const {
    return first >= 0 && last <= tokens(layer) && table(layer).holds(first, last);
}

KVQ_FUNC token_range sequence::gap(int layer) const {
    check_layer(layer);
    const int sinks = table(layer).end_of_sinks();
    return {sinks, detail::larger(sinks, table(layer).front())};
}

KVQ_FUNC std::string sequence::describe(int layer) const {
    return detail::describe_layer(layer, cache_->layers()[static_cast<std::size_t>(layer)]);
}

KVQ_FUNC void sequence::check_held(const char* verb, int layer, int first, int last) const {
    const detail::page_table& of = table(layer);
    if (!of.holds(first, last))
        detail::fail("cannot ", verb, " tokens ", first, " to ", last, ": ", describe(layer),
                     ", has freed tokens ", of.end_of_sinks(), " to ", of.front());
}

KVQ_FUNC void sequence::check_window(int layer, int first) const {
    const int front = table(layer).front(), dropped = table(layer).dropped;
    if (dropped > 0) {
        if (first < dropped - 1)
            detail::fail(describe(layer), ": a query at position ", first, " comes before token ",
                         dropped - 1, ", behind which tokens were dropped");
        return;
    }
    if (const int seen = cache_->geometry(layer).window.first_seen(first); seen < front)
        detail::fail(describe(layer), ": a query at position ", first, " sees tokens from ", seen,
                     " on, but those before token ", front, " are freed");
}

KVQ_FUNC std::size_t sequence::append_bytes(int n) const {
    return added_bytes(n, detail::chunk_pages::at_once);
}

KVQ_FUNC std::size_t sequence::prefill_bytes(int n) const {
    return added_bytes(n, detail::chunk_pages::after_attend);
}

KVQ_FUNC std::size_t sequence::draft_bytes(int n) const {
    detail::expect(n >= 0 && n <= detail::most_drafted, "a draft has 0 to ", detail::most_drafted,
                   " tokens, not ", n);
    std::size_t most = 0;
    for (int accepted = 1; accepted <= n; ++accepted) {
        std::size_t kept = 0;  // of all layers at once
        for (std::size_t layer = 0; layer < tables_.size(); ++layer) {
            const detail::page_table& table = tables_[layer];
            if (!cache_->takes_steps(static_cast<int>(layer))) continue;
            check_added(table, n);
            check_no_draft(table);
            const int number = static_cast<int>(layer);
            kept += detail::chunk::needs_of(*cache_, number, table, accepted,
                                            detail::pages_of_append(*cache_, number, table, accepted))
                        .taken;
        }
        most = detail::larger(most, kept);
    }
    return most + detail::draft_pages_bytes(*cache_, n);
}

KVQ_FUNC void sequence::drop_copies() noexcept {
    try_commit_shared();
    for (detail::page_table& table : tables_) table.drop_all_copies();
}

KVQ_FUNC int sequence::tokens(int layer) const {
    check_layer(layer);
    return cache_->holds_tokens(cache_->owner(layer)) ? table(layer).tokens : state_->tokens();
}

KVQ_FUNC int sequence::tokens() const noexcept {
    int n = state_ ? state_->tokens() : 0;
    for (std::size_t layer = 0; layer < tables_.size(); ++layer)
        if (tables_[layer].tokens > n && cache_->takes_steps(static_cast<int>(layer)))
            n = tables_[layer].tokens;
    return n;
}

KVQ_FUNC void sequence::dequantize(int layer, tensor role, int first, const output_view& out) const {
    const int held = tokens(layer);
    if (const int owner = cache_->owner(layer); owner != layer) return dequantize(owner, role, first, out);
    detail::expect(first >= 0 && out.tokens >= 0 && out.tokens <= held && first <= held - out.tokens,
                   "cannot dequantize ", out.tokens, " tokens from ", first, " on of layer ", layer,
                   ": it holds ", held);
    check_held("dequantize", layer, first, first + out.tokens);
    detail::expect(out.heads == shape(layer).kv_heads && out.dim == shape(layer).dim(role), "out is ",
                   out.heads, " x ", out.dim, " but blocks are ", shape(layer).kv_heads, " x ",
                   shape(layer).dim(role));
    detail::expect(out.data != nullptr || out.tokens == 0, "out has no data for ", out.tokens, " tokens");
    if (static_cast<std::size_t>(role) >= cache_->tensors(layer).size())
        return dequantize_values(layer, first, out);
    const layer_pages all = pages(layer);
    const int dim = shape(layer).dim(role);
    const auto longest = static_cast<std::size_t>(geometry().longest_page());
    resource_vector<float> scratch(longest * static_cast<std::size_t>(dim), memory());
    // Pages of which only a part is wanted, and keys that moved, are dequantized here first.
    resource_vector<std::byte> some(memory());
    const detail::rotation* const rotate = role == tensor::key ? cache_->rotations().at(layer) : nullptr;
    const detail::default_arithmetic arithmetic;
    for (int e = detail::larger(0, all.lower_bound(first + 1) - 1); e < all.entries(); ++e) {
        const layer_pages::entry entry = all.at(e);
        if (entry.first_token >= first + out.tokens) break;
        const int from = detail::larger(first, entry.first_token);
        const int to = detail::smaller(first + out.tokens, entry.first_token + entry.tokens);
        if (from >= to) continue;
        const page& p = role == tensor::key ? *entry.keys : *entry.values;
        const block_shape block{role, p.tokens, dim};
        const format& f = cache_->table(role).of(p);
        const bool moved = rotate && entry.shift != 0, all_of_it = !moved && to - from == p.tokens;
        const float_type type = moved ? float_type::fp32 : out.type;
        const std::size_t row = static_cast<std::size_t>(dim) * size_of(type);
        if (!all_of_it) some.resize(longest * row);
        for (int h = 0; h < shape(layer).kv_heads; ++h) {
            block_id id{layer, h};
            const std::byte* const of_head = f.block_at(block, p.data(), p.lower, h, id);
            f.functions().dequantize(f.scheme(), block, id, of_head, type,
                                     all_of_it ? out.at(from - first, h) : some.data(),
                                     all_of_it ? out.token_stride() : dim, scratch.data());
            if (all_of_it) continue;
            for (int t = from; t < to; ++t) {
                std::byte* const x =
                    some.data() + row * static_cast<std::size_t>(entry.skip + t - entry.first_token);
                if (!moved) {
                    std::memcpy(out.at(t - first, h), x, row);
                    continue;
                }
                auto* const values = reinterpret_cast<float*>(x);
                (*rotate)(values, 1, dim, entry.shift);
                out.store(t - first, h, values);
            }
        }
    }
}

KVQ_FUNC void sequence::dequantize_values(int layer, int first, const output_view& out) const {
    const int dim = shape(layer).dim(tensor::key), step = geometry().longest_page();
    resource_vector<float> rows(static_cast<std::size_t>(detail::smaller(step, out.tokens)) *
                                    static_cast<std::size_t>(out.heads * dim),
                                memory());
    for (int t = 0; t < out.tokens; t += step) {
        const int n = detail::smaller(step, out.tokens - t);
        const token_view<float> keys(rows.data(), n, out.heads, dim);
        dequantize(layer, tensor::key, first + t, keys);
        for (int i = 0; i < n; ++i)
            for (int h = 0; h < out.heads; ++h) out.store(t + i, h, keys.at(i, h));
    }
}

KVQ_FUNC usage_report sequence::usage() const {
    usage_report u;
    u.workspace = scratch_.capacity() * sizeof(float);
    u.bookkeeping = tables_.capacity() * sizeof(detail::page_table);
    for (std::size_t layer = 0; layer < tables_.size(); ++layer) {
        const detail::page_table& table = tables_[layer];
        const cache_shape& of = shape(static_cast<int>(layer));
        u.repacked += table.repacked;
        u.bookkeeping += table.spans.capacity() * sizeof(page_span);
        for (std::size_t piece = 0; piece < 2; ++piece)
            table.for_each_page(piece, [&](const detail::held_page& p) { add_page(u, p); });
        for (int i = table.committed; i < table.size(); ++i)  // a trim or an erase may have hidden tokens
            for (const tensor role : cache_->tensors(static_cast<int>(layer))) {
                const page& p = *table[i].pages[static_cast<std::size_t>(role)];
                u.not_finite -=
                    p.not_finite - detail::held_not_finite(cache_->table(role).window_type(), p, role,
                                                           of.dim(role), of.kv_heads, table[i].tokens);
            }
    }
    u.reserved = stock_.page_bytes() + stock_.list_bytes();
    u.bookkeeping += u.pages * sizeof(page);
    if (state_) {
        const state_usage held = state_->usage();
        u.state = held.live + held.snapshots;
        u.bookkeeping += held.bookkeeping;
        u.shared += held.shared;
        u.pages += held.pages;
        u.not_finite += held.not_finite;
    }
    u.tokens = tokens();
    detail::add_up(u);
    return u;
}

KVQ_FUNC layer_pages sequence::pages(int layer) const {
    check_layer(layer);
    cache_->expect_tokens(layer);
    const detail::page_table& of = table(layer);
    return {geometry(), of.tokens, of.spans.data(), of.size()};
}

KVQ_FUNC sequence::sequence(cache& of)
    : cache_(&of), tables_(memory()), scratch_(memory()), stock_(memory()) {
    tables_.reserve(static_cast<std::size_t>(cache_->layer_count()));
    for (int i = 0; i < cache_->layer_count(); ++i)
        tables_.emplace_back(memory(), of.target_format(tensor::key, i), of.target_format(tensor::value, i));
    if (of.state_layout()) state_.emplace(*of.state_layout(), of.pool(), of.options().snapshots);
    reserve_scratch();
}

KVQ_FUNC sequence::sequence(const sequence& other, int)
    : cache_(other.cache_), tables_(memory()), scratch_(memory()), stock_(memory()) {
    tables_.reserve(other.tables_.size());
    for (const detail::page_table& table : other.tables_) tables_.emplace_back(table, memory());
    if (other.state_) state_.emplace(other.state_->fork());
    reserve_scratch();
}

KVQ_FUNC void sequence::reserve_scratch() { scratch_.resize(cache_->scratch_floats()); }

KVQ_FUNC void sequence::check_layer(int layer) const {
    const auto layers = static_cast<int>(tables_.size());  // none after a move
    detail::expect(layer >= 0 && layer < layers, "layer ", layer, " is not among the ", layers,
                   " layers of the cache");
}

KVQ_FUNC void sequence::check_added(const detail::page_table& table, int n) const {
    detail::expect(n >= 0 && n <= (std::numeric_limits<int>::max)() - table.tokens - page_tokens(),
                   "a sequence of ", table.tokens, " tokens cannot take ", n, " more");
}

KVQ_FUNC void sequence::check_no_draft(const detail::page_table& table) {
    detail::expect(table.draft == 0, "a layer holds a draft of ", table.draft,
                   " tokens: keep() a part of it first, or trim() to ", table.tokens - table.draft);
}

KVQ_FUNC void sequence::expect_no_state(const char* verb) const {
    if (!state_) return;
    const int layer = cache_->state_layout()->layers()[0].number;
    detail::fail(detail::describe_layer(layer, cache_->layers()[static_cast<std::size_t>(layer)]),
                 ": cannot ", verb, " tokens of a state; a trim goes back to a snapshot of it");
}

KVQ_FUNC void sequence::check_no_rows(const prefill_request& r, int layer) const {
    check_layer(layer);
    if (r.k.tokens != 0 || r.v.tokens != 0)
        detail::fail(describe(layer), ": it takes queries only, not k of ", r.k.tokens, " and v of ",
                     r.v.tokens, " tokens");
    if (r.q.tokens > 0 && !tables_[static_cast<std::size_t>(layer)].waits)
        detail::fail(describe(layer), ": no chunk of that layer waits for it; prefill() of layer ",
                     cache_->owner(layer), " comes first, and each layer that shares it has one prefill()");
}

KVQ_FUNC void sequence::check_rows(int layer, const input_view& k, const input_view& v) const {
    check_layer(layer);
    cache_->expect_tokens(layer);
    if (!cache_->holds_tokens(layer)) detail::fail(describe(layer), ": it takes no keys and values");
    check_input(k, "k", layer, tensor::key);
    if (cache_->tensors(layer).size() == 2) {
        check_input(v, "v", layer, tensor::value);
        detail::expect(k.tokens == v.tokens, "k has ", k.tokens, " tokens but v has ", v.tokens);
    } else if (v.tokens != 0) {
        detail::fail(describe(layer), ": it takes keys alone, and v has ", v.tokens, " tokens, not 0");
    }
    check_added(tables_[static_cast<std::size_t>(layer)], k.tokens);
}

KVQ_FUNC void sequence::check_chunk(int layer, const input_view& k, const input_view& v) const {
    check_rows(layer, k, v);
    check_no_draft(tables_[static_cast<std::size_t>(layer)]);
    if (k.tokens > 0 && table(layer).tokens > 0 && !cache_->takes_steps(layer))
        detail::fail(describe(layer), ": it has its ", table(layer).tokens,
                     " tokens, all of which are appended in one call, and takes no ", k.tokens, " more");
}

KVQ_FUNC void sequence::check_input(const input_view& x, const char* name, int layer, tensor role) const {
    const cache_shape& of = shape(layer);
    detail::expect(x.tokens >= 0, name, " has ", x.tokens, " tokens");
    detail::expect(x.heads == of.kv_heads && x.dim == of.dim(role), name, " is ", x.heads, " heads x ", x.dim,
                   " channels but the cache holds ", of.kv_heads, " x ", of.dim(role));
    detail::expect(x.data != nullptr || x.tokens == 0, name, " has no data for ", x.tokens, " tokens");
}

KVQ_FUNC detail::chunk sequence::new_chunk(int layer, int n, detail::chunk_pages when) noexcept {
    return {*cache_, tables_[static_cast<std::size_t>(layer)],      layer, n,
            when,    cache_->takes_steps(layer) ? &stock_ : nullptr};
}

KVQ_FUNC std::size_t sequence::added_bytes(int n, detail::chunk_pages when) const {
    std::size_t held = 0, most = 0;
    for (std::size_t layer = 0; layer < tables_.size(); ++layer) {
        const detail::page_table& table = tables_[layer];
        if (!cache_->takes_steps(static_cast<int>(layer))) continue;
        check_added(table, n);
        check_no_draft(table);
        if (n == 0) continue;
        const auto needs =
            detail::chunk::needs_of(*cache_, static_cast<int>(layer), table, n,
                                    when == detail::chunk_pages::at_once
                                        ? detail::pages_of_append(*cache_, static_cast<int>(layer), table, n)
                                        : when);
        most = detail::larger(most, held + needs.taken);
        held += needs.taken - (cache_->is_shared(static_cast<int>(layer)) ? 0 : needs.returned);
    }
    return most;
}

}}
