// Definitions of sequence_table.hpp.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "../cache/sequence_access.hpp"
#include "../core/error.hpp"
#include "sequence_table.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC sequence_table::sequence_table(cache& of, int ids) : cache_(&of) {
    detail::expect(ids >= 1, "a table of sequences needs at least 1 id, got ", ids);
    grow(ids);
    for (int i = 0; i < of.layer_count(); ++i)
        if (of.geometry(i).window.cross)
            detail::fail(detail::describe_layer(i, of.layers()[static_cast<std::size_t>(i)]),
                         ": a table of sequences has no other text");
}

KVQ_FUNC sequence_table::~sequence_table() = default;

KVQ_FUNC void sequence_table::grow(int n) {
    detail::expect(n <= most_ids, "a table of sequences has at most ", most_ids, " ids, not ", n);
    if (n > ids()) held_.resize(static_cast<std::size_t>(n));
}

KVQ_FUNC int sequence_table::tokens(int id) const {
    const entry* const e = at(id).get();
    return e ? static_cast<int>(e->positions.size()) : 0;
}

KVQ_FUNC std::int32_t sequence_table::position_min(int id) const {
    return tokens(id) == 0 ? -1 : at(id)->positions.front();
}

KVQ_FUNC std::int32_t sequence_table::position_max(int id) const {
    return tokens(id) == 0 ? -1 : at(id)->positions.back();
}

KVQ_FUNC std::span<const std::int32_t> sequence_table::positions(int id) const {
    const entry* const e = at(id).get();
    return e ? std::span<const std::int32_t>(e->positions) : std::span<const std::int32_t>();
}

KVQ_FUNC const sequence* sequence_table::find(int id) const { return at(id) ? &at(id)->tokens : nullptr; }

KVQ_FUNC std::size_t sequence_table::distinct_tokens() const {
    struct run {
        const page* of;
        int first, last;
    };
    const std::vector<layer>& layers = cache_->layers();
    const auto first = [&](auto&& is) { return std::find_if(layers.begin(), layers.end(), is); };
    auto counted = first([](const layer& l) { return l.kind == layer_kind::full; });
    if (counted == layers.end()) counted = first([](const layer& l) { return l.kind != layer_kind::state; });
    if (counted == layers.end()) return 0;
    std::vector<run> runs;
    for_each_entry([&](const shared_entry& e) {
        const layer_pages pages = e->tokens.pages(static_cast<int>(counted - layers.begin()));
        for (int i = 0; i < pages.entries(); ++i) {
            const layer_pages::entry s = pages.at(i);
            runs.push_back({s.keys, s.skip, s.skip + s.tokens});
        }
    });
    std::sort(runs.begin(), runs.end(), [](const run& a, const run& b) {
        return a.of != b.of ? std::less<const page*>()(a.of, b.of) : a.first < b.first;
    });
    std::size_t sum = 0;
    int end = 0;  // of the tokens of the present page that are counted
    for (std::size_t i = 0; i < runs.size(); ++i) {
        if (i == 0 || runs[i].of != runs[i - 1].of) end = 0;
        sum += static_cast<std::size_t>(detail::larger(0, runs[i].last - detail::larger(end, runs[i].first)));
        end = detail::larger(end, runs[i].last);
    }
    return sum;
}

KVQ_FUNC std::size_t sequence_table::bytes() const {
    std::size_t sum = cache_->bytes_held();
    for_each_entry([&](const shared_entry& e) { sum += e->positions.capacity() * sizeof(std::int32_t); });
    return sum;
}

KVQ_FUNC void sequence_table::begin(const token_batch& batch, int q_heads, int threads, workspace& space,
                                    const mods_view& mods) {
    settle();
    check(batch);
    std::vector<part> parts = parts_of(batch);
    std::vector<step_request> requests;
    requests.reserve(parts.size());
    std::size_t rows = 0;
    for (const part& p : parts) {
        requests.push_back({&p.of->tokens, static_cast<int>(p.rows.size()),
                            p.queries() ? static_cast<int>(p.rows.size()) - p.first_query : 0});
        if (!p.regular()) rows += p.rows.size();
    }
    for (const part& p : parts)
        p.of->positions.reserve(
            detail::larger(2 * p.of->positions.size(), p.of->positions.size() + p.rows.size()));
    const auto heads = static_cast<std::size_t>(detail::larger(q_heads, 0));
    std::size_t floats = 0;  // of the layer that needs most, with a log-sum-exp for every row of an output
    for (int layer = 0; layer < cache_->layer_count(); ++layer) {
        const cache_shape& shape = cache_->shape(layer);
        const int wide = shape.dim(tensor::key) + shape.dim(tensor::value);
        floats = detail::larger(
            floats,
            static_cast<std::size_t>(wide) * (static_cast<std::size_t>(shape.kv_heads) + heads) + heads);
    }
    std::vector<float> gathered(rows * floats);
    batch_.reserve(parts.size());
    // Windows give back what a trim of `rollback` tokens needs, a state only snapshots.
    const cache_options& options = cache_->options();
    const bool has_windows = std::any_of(cache_->layers().begin(), cache_->layers().end(),
                                         [](const layer& l) { return l.window > 0; });
    for (part& p : parts) {
        p.before = p.of->size();
        const bool is_short =
            static_cast<int>(p.rows.size()) <= options.rollback && p.before >= options.sinks;
        if (p.before > 0 && (cache_->state_layout() || (has_windows && !is_short)))
            p.former.emplace(p.of->tokens.fork());
    }
    cache_->reserve(requests, q_heads, threads, space, mods);
    // Nothing below fails.
    for (part& p : parts) {
        for (const int row : p.rows) p.of->positions.push_back(batch.positions[row]);
        for (const int id : p.ids) held_[static_cast<std::size_t>(id)] = p.of;
    }
    parts_.swap(parts);
    gathered_.swap(gathered);
    step_tokens_ = batch.tokens;
}

KVQ_FUNC void sequence_table::prefill(int layer, const input_view& k, const input_view& v,
                                      const query_view& q, const output_view& out, const mods_view& mods,
                                      executor_view executor, workspace& space) {
    detail::expect(!parts_.empty() || step_tokens_ == 0, "layer ", layer,
                   " has tokens, but no step was begun");
    detail::expect(layer >= 0 && layer < cache_->layer_count(), "layer ", layer, " is not among the ",
                   cache_->layer_count(), " layers of the cache");
    const bool is_shared = cache_->owner(layer) != layer;
    const int added = is_shared ? 0 : step_tokens_;
    const bool has_values = !is_shared && cache_->tensors(layer).size() == 2;
    detail::expect(k.tokens == added && v.tokens == (has_values ? added : 0) && q.tokens == step_tokens_ &&
                       out.tokens == step_tokens_,
                   "layer ", layer, " has ", k.tokens, " keys, ", v.tokens, " values, ", q.tokens,
                   " queries and ", out.tokens, " outputs, but the step has ", step_tokens_, " tokens",
                   is_shared     ? ", and the layer takes queries only"
                   : !has_values ? ", and the layer takes no values"
                                 : "");
    batch_.clear();
    auto* free = reinterpret_cast<std::byte*>(gathered_.data());
    float* lse = gathered_.data() + gathered_.size();  // of gathered outputs: from the end to the front
    const auto gather = [&](auto view, std::span<const int> rows, bool copy) {
        const std::size_t row = static_cast<std::size_t>(view.dim) * size_of(view.type),
                          bytes = row * static_cast<std::size_t>(view.heads) * rows.size();
        const std::size_t left = static_cast<std::size_t>(reinterpret_cast<std::byte*>(lse) - free);
        detail::expect(bytes <= left, "layer ", layer, " has rows of ", view.heads, " heads x ", view.dim,
                       " channels, for which the step took no memory");
        if (copy)
            for (std::size_t i = 0; i < rows.size(); ++i)
                for (int h = 0; h < view.heads; ++h)
                    std::memcpy(
                        free + (i * static_cast<std::size_t>(view.heads) + static_cast<std::size_t>(h)) * row,
                        view.at(rows[i], h), row);
        view.data = free;
        view.head_bytes = static_cast<std::ptrdiff_t>(row);
        view.token_bytes = view.head_bytes * view.heads;
        view.tokens = static_cast<int>(rows.size());
        free += bytes;
        return view;
    };
    const auto gather_out = [&](std::span<const int> rows) {
        const output_view made = gather(out, rows, false);
        if (!out.lse(0, 0)) return made;
        const std::size_t n = rows.size() * static_cast<std::size_t>(out.heads),
                          left = static_cast<std::size_t>(reinterpret_cast<std::byte*>(lse) - free);
        detail::expect(n * sizeof(float) <= left, "layer ", layer, " has log-sum-exps of ", out.heads,
                       " heads, for which the step took no memory");
        return made.with_lse(lse -= n);
    };
    for (const part& p : parts_) {
        const std::span<const int> rows = p.rows,
                                   asked = rows.subspan(static_cast<std::size_t>(p.first_query));
        const auto added_rows = [&](const input_view& x, bool given) {
            return !given ? x : p.regular() ? p.view(x, 0) : gather(x, rows, true);
        };
        if (p.regular())
            batch_.push_back({&p.of->tokens, added_rows(k, !is_shared), added_rows(v, has_values),
                              p.view(q, p.first_query), p.view(out, p.first_query)});
        else
            batch_.push_back({&p.of->tokens, added_rows(k, !is_shared), added_rows(v, has_values),
                              gather(q, asked, true), gather_out(asked)});
    }
    cache_->prefill(layer, batch_, mods, executor, space);
    for (std::size_t i = 0; i < parts_.size(); ++i) {
        const part& p = parts_[i];
        if (p.regular()) continue;
        const output_view& from = batch_[i].out;
        const std::size_t bytes = static_cast<std::size_t>(out.dim) * size_of(out.type);
        for (std::size_t r = static_cast<std::size_t>(p.first_query); r < p.rows.size(); ++r)
            for (int h = 0; h < out.heads && p.wanted[r]; ++h) {
                const int row = static_cast<int>(r) - p.first_query;
                std::memcpy(out.at(p.rows[r], h), from.at(row, h), bytes);
                if (float* const to = out.lse(p.rows[r], h)) *to = *from.lse(row, h);
            }
    }
}

KVQ_FUNC sequence_table::step_part sequence_table::part_of_step(int i) const {
    detail::expect(i >= 0 && i < step_parts(), "part ", i, " is not among the ", step_parts(),
                   " of the step");
    const part& p = parts_[static_cast<std::size_t>(i)];
    return {p.rows, p.wanted, cache_->state_layout() ? &p.of->tokens.state() : nullptr};
}

KVQ_FUNC int sequence_table::missing_layer() const noexcept {
    for (int layer = 0; layer < cache_->layer_count(); ++layer)
        for (const part& p : parts_)
            if (cache_->owner(layer) != layer
                    ? detail::sequence_access::waits(p.of->tokens, layer)
                    : cache_->holds_tokens(layer) && p.of->tokens.tokens(layer) != p.of->size())
                return layer;
    return -1;
}

KVQ_FUNC void sequence_table::finish_step(bool prompt_ends) noexcept {
    if (cache_->state_layout())
        for (const part& p : parts_)
            p.of->tokens.state().advance(static_cast<int>(p.rows.size()), prompt_ends);
    forget_step();
}

KVQ_FUNC void sequence_table::end(bool prompt_ends) {
    const int missing = missing_layer();
    if (missing < 0) return finish_step(prompt_ends);
    take_back();
    detail::fail("the step ended before layer ", missing, " had its tokens");
}

KVQ_FUNC void sequence_table::take_back() noexcept {
    for (part& p : parts_) {
        p.of->tokens.release_reserved();
        if (p.former)
            p.of->tokens = std::move(*p.former);
        else
            p.of->tokens.trim(p.before);
        p.of->positions.resize(static_cast<std::size_t>(p.before));
    }
    for (const part& p : parts_)
        for (const int id : p.ids)
            if (p.of->positions.empty()) held_[static_cast<std::size_t>(id)].reset();
    forget_step();
}

KVQ_FUNC void sequence_table::check_trim(int id, int n) const {
    const entry& e = *at(id);
    if (const int to = e.tokens.reach(n); to < n)
        detail::fail("cannot remove positions from ", e.positions[static_cast<std::size_t>(n)],
                     " on of sequence ", id,
                     ": the recurrent state has no snapshot there, the newest one before is of ", to,
                     " of its ", e.size(), " tokens");
    if (n == 0 || e.tokens.can_trim(n)) return;
    sequence refused = e.tokens.fork();
    refused.trim(n);  // raises: it names the layer
}

KVQ_FUNC void sequence_table::remove(int id, std::int32_t first, std::int32_t last) {
    settle();
    if (id >= 0) (void)at(id);
    const int begin = id < 0 ? 0 : id, behind = id < 0 ? ids() : id + 1;
    for (int i = begin; i < behind; ++i)
        if (const entry* const e = at(i).get()) {
            const auto [from, to] = e->range(first, last);
            if (from < to && to == e->size()) check_trim(i, from);
        }
    change(id, [&](const entry& e) -> shared_entry {
        const auto [from, to] = e.range(first, last);
        return from == to || to == e.size() ? nullptr : e.without(from, to);
    });
    for (int i = begin; i < behind; ++i) {
        shared_entry e = at(i);
        if (!e) continue;
        const auto [from, to] = e->range(first, last);
        if (from < to && to == e->size()) {
            if (id >= 0 && e.use_count() > 2) e = fork(*e);  // other ids have it
            e->tokens.trim(from);
            e->positions.resize(static_cast<std::size_t>(from));
        }
        put(i, std::move(e));
    }
}

KVQ_FUNC void sequence_table::copy(int from, int to, std::int32_t first, std::int32_t last) {
    settle();
    const shared_entry source = at(from);
    const int had = tokens(to);
    if (from == to || !source) return;
    const auto [begin, end] = source->range(first, last);
    if (begin == end) return;
    detail::expect(had == 0 || source->positions[static_cast<std::size_t>(begin)] > position_max(to),
                   "sequence ", to, " ends at position ", position_max(to),
                   " and cannot take positions from ", source->positions[static_cast<std::size_t>(begin)],
                   " on of sequence ", from);
    if (had > 0 || begin > 0 || end < source->size()) {
        const auto made = had > 0 ? fork(*at(to)) : std::make_shared<entry>(cache_->new_sequence());
        if (had == 0 && begin == 0) {
            check_trim(from, end);
            made->tokens = source->tokens.fork();
            made->tokens.trim(end);
        } else {
            made->tokens.splice(source->tokens, begin, end);
            made->tokens.shift(had, made->tokens.tokens(), std::int64_t{begin} - had);
        }
        made->positions.insert(made->positions.end(), source->positions.begin() + begin,
                               source->positions.begin() + end);
        held_[static_cast<std::size_t>(to)] = made;
    } else {
        held_[static_cast<std::size_t>(to)] = source;
    }
}

KVQ_FUNC void sequence_table::keep(int id) {
    settle();
    const shared_entry kept = at(id);
    for (shared_entry& e : held_) e.reset();
    held_[static_cast<std::size_t>(id)] = kept;
}

KVQ_FUNC void sequence_table::shift(int id, std::int32_t first, std::int32_t last, std::int32_t by) {
    change(id, [&](const entry& e) -> shared_entry {
        const auto [from, to] = e.range(first, last);
        if (by == 0 || from == to) return nullptr;
        int gone = from;
        while (gone < to && std::int64_t{e.positions[static_cast<std::size_t>(gone)]} + by < 0) ++gone;
        const shared_entry made = gone > from ? e.without(from, gone) : fork(e);
        const int end = to - (gone - from);
        made->tokens.shift(from, end, by);
        for (int i = from; i < end; ++i) {
            std::int32_t& p = made->positions[static_cast<std::size_t>(i)];
            detail::expect(std::int64_t{p} + by <= (std::numeric_limits<std::int32_t>::max)(), "position ", p,
                           " cannot grow by ", by);
            p += by;
        }
        for (std::size_t i = 1; i < made->positions.size(); ++i)
            detail::expect(made->positions[i - 1] < made->positions[i], "positions cannot move by ", by, ": ",
                           made->positions[i - 1], " would lie before ", made->positions[i]);
        return made;
    });
}

KVQ_FUNC void sequence_table::divide(int id, std::int32_t first, std::int32_t last, int d) const {
    if (tokens_in(id, first, last) == 0 || d == 1) return;
    detail::fail("positions cannot be divided by ", d, ": keys of a page move by one distance, and every ", d,
                 " tokens would have another one");
}

KVQ_FUNC void sequence_table::clear() noexcept {
    forget_step();
    for (shared_entry& e : held_) e.reset();
}

KVQ_FUNC sequence_table::shared_entry sequence_table::fork(const entry& e) {
    auto made = std::make_shared<entry>(e.tokens.fork());
    made->positions = e.positions;
    return made;
}

KVQ_FUNC const sequence_table::shared_entry& sequence_table::at(int id) const {
    detail::expect(id >= 0 && id < ids(), "sequence ", id, " is not among the ", ids(), " of the table");
    return held_[static_cast<std::size_t>(id)];
}

template <class F>
void sequence_table::for_each_entry(F&& f) const {
    std::unordered_set<const entry*> seen;
    for (const shared_entry& e : held_)
        if (e && (e.use_count() == 1 || seen.insert(e.get()).second)) f(e);
}

KVQ_FUNC int sequence_table::tokens_in(int id, std::int32_t first, std::int32_t last) const {
    if (id >= 0) (void)at(id);
    int n = 0;
    for (int i = id < 0 ? 0 : id; i < (id < 0 ? ids() : id + 1); ++i)
        if (const entry* const e = at(i).get()) {
            const auto [from, to] = e->range(first, last);
            n += to - from;
        }
    return n;
}

template <class F>
void sequence_table::change(int id, F&& f) {
    settle();
    if (id >= 0) {
        if (const shared_entry& e = at(id))
            if (shared_entry made = f(*e)) put(id, std::move(made));
        return;
    }
    std::unordered_map<shared_entry, shared_entry> made;
    for_each_entry([&](const shared_entry& e) {
        if (shared_entry fresh = f(*e)) made.emplace(e, std::move(fresh));
    });
    for (int i = 0; i < ids(); ++i)
        if (const auto changed = made.find(at(i)); changed != made.end()) put(i, changed->second);
}

KVQ_FUNC void sequence_table::put(int id, shared_entry e) noexcept {
    held_[static_cast<std::size_t>(id)] = e->positions.empty() ? nullptr : std::move(e);
}

KVQ_FUNC void sequence_table::check(const token_batch& b) const {
    detail::expect(b.tokens >= 0, "a batch of ", b.tokens, " tokens");
    detail::expect(b.tokens == 0 || (b.positions != nullptr && b.ids != nullptr), "a batch of ", b.tokens,
                   " tokens needs positions and ids");
    std::unordered_map<int, std::int64_t> last;  // positions of ids of the batch
    for (int i = 0; i < b.tokens; ++i) {
        const int n = b.id_counts ? b.id_counts[i] : 1;
        detail::expect(n >= 1 && b.ids[i] != nullptr, "token ", i, " of the batch has ", n, " ids");
        for (int j = 0; j < n; ++j) {
            const int id = b.ids[i][j];
            detail::expect(id >= 0 && id < ids(), "token ", i, " of the batch is of sequence ", id,
                           ", which is not among the ", ids(), " of the table");
            std::int64_t& before = last.try_emplace(id, position_max(id)).first->second;
            detail::expect(b.positions[i] > before, "token ", i, " of the batch has position ",
                           b.positions[i], " in sequence ", id, ", which is not behind position ", before);
            before = b.positions[i];
        }
    }
}

KVQ_FUNC std::vector<sequence_table::part> sequence_table::parts_of(const token_batch& b) const {
    std::map<int, std::vector<int>> rows_of;  // by id
    for (int i = 0; i < b.tokens; ++i)
        for (int j = 0; j < (b.id_counts ? b.id_counts[i] : 1); ++j) rows_of[b.ids[i][j]].push_back(i);
    std::vector<part> parts;
    std::unordered_map<int, std::size_t> part_of;  // by id
    std::map<std::pair<const entry*, std::span<const int>>, std::size_t,
             decltype([](const auto& x, const auto& y) {
                 return x.first != y.first ? std::less<>()(x.first, y.first)
                                           : std::ranges::lexicographical_compare(x.second, y.second);
             })>
        same;
    for (const auto& [id, rows] : rows_of) {
        const auto [found, fresh] = same.try_emplace({at(id).get(), rows}, parts.size());
        if (fresh) parts.push_back({at(id), {}, rows});
        part_of[id] = found->second;
        parts[found->second].ids.push_back(id);
    }
    for (part& p : parts) p.wanted.assign(p.rows.size(), 0);
    for (int i = 0; i < b.tokens; ++i) {
        part& p = parts[part_of[b.ids[i][0]]];
        p.wanted[static_cast<std::size_t>(std::lower_bound(p.rows.begin(), p.rows.end(), i) -
                                          p.rows.begin())] = 1;
    }
    for (part& p : parts) {
        const auto first = std::find(p.wanted.begin(), p.wanted.end(), char{1});
        p.first_query = static_cast<int>(first - p.wanted.begin());
        p.step = p.rows.size() > 1 ? p.rows[1] - p.rows[0] : 1;
        for (std::size_t i = 1; i < p.rows.size(); ++i)
            if (p.rows[i] - p.rows[i - 1] != p.step) p.step = 0;
        if (std::find(first, p.wanted.end(), char{0}) != p.wanted.end()) p.step = 0;
        if (!p.of)
            p.of = std::make_shared<entry>(cache_->new_sequence());
        else if (static_cast<std::size_t>(p.of.use_count()) > p.ids.size() + 1)  // other ids have it
            p.of = fork(*p.of);
    }
    return parts;
}

KVQ_FUNC void sequence_table::settle() noexcept {
    if (missing_layer() < 0)
        finish_step(false);
    else
        take_back();
}

KVQ_FUNC void sequence_table::forget_step() noexcept {
    parts_.clear();
    batch_.clear();
    step_tokens_ = 0;
}

}}  // namespace kvq
