// Definitions of prefix_cache.hpp.
#pragma once

#include <algorithm>
#include <cstring>

#include "../cache/sequence_access.hpp"
#include "../cache/step_down.hpp"
#include "../core/error.hpp"
#include "prefix_cache.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// The tokens that an entry can hold: with state up to the last snapshot at or before the end.
KVQ_FUNC token_ids entry_tokens(token_ids tokens, const sequence& s) {
    const auto n =
        static_cast<int>(smaller(tokens.size(), static_cast<std::size_t>((std::numeric_limits<int>::max)())));
    const int held = s.reach(n);
    if (held == 0) {
        const cache& of = sequence_access::cache(s);
        const int layer = of.state_layout()->layers()[0].number;
        fail("an entry of ", n,
             " tokens cannot be made: ", describe_layer(layer, of.layers()[static_cast<std::size_t>(layer)]),
             ", has no snapshot at or before it");
    }
    return held < n ? tokens.first(static_cast<std::size_t>(held)) : tokens;
}

/// To how many of its first n tokens an entry can be trimmed.
KVQ_FUNC int trimmed_tokens(const sequence& s, int n) noexcept {
    // What a window has freed leaves nothing between the sinks and the first token that a trim reaches.
    const int sinks = sequence_access::cache(s).options().sinks;
    for (n = s.reach(n); n > 0 && !s.can_trim(n);) n = s.reach(smaller(n - 1, sinks));
    return n;
}

/// Trims a fork to the tokens of its entry. Of state an entry holds snapshots.
KVQ_FUNC void make_entry(sequence& s, int tokens) {
    s.trim(tokens);
    const state_layout* const layout = sequence_access::cache(s).state_layout();
    if (!layout || layout->snapshot_bytes() > s.state().policy().most_bytes) return;
    s.state().snapshot(tokens);
    s.state().drop_live();
}

}  // namespace detail

KVQ_FUNC prefix_cache::prefix_cache(cache& of, const prefix_cache_options& options)
    : cache_(&of), options_(options) {
    detail::expect(options.max_entries >= 1, "max_entries must be at least 1, got ", options.max_entries);
    detail::expect(options.min_prefix_tokens >= 0, "min_prefix_tokens must not be negative, got ",
                   options.min_prefix_tokens);
    detail::expect(options.min_quantize_tokens >= 0, "min_quantize_tokens must not be negative, got ",
                   options.min_quantize_tokens);
    for (int i = 0; i < of.layer_count(); ++i)
        if (of.geometry(i).window.cross)
            detail::fail(
                detail::describe_layer(i, of.layers()[static_cast<std::size_t>(i)]),
                ": a prefix cache finds sequences by their tokens, which do not say those of another text");
    if (options.format) {
        // The request is checked on an empty sequence.
        const sequence nothing = of.new_sequence();
        (void)of.plan_requantize(nothing, request());
    }
}

KVQ_FUNC prefix_cache::~prefix_cache() = default;

KVQ_FUNC prefix_cache::lookup_result prefix_cache::lookup(token_ids tokens) const {
    const std::lock_guard lock(mutex_);
    return find(tokens).result;
}

KVQ_FUNC prefix_cache::fetch_result prefix_cache::fetch(token_ids tokens) {
    std::shared_ptr<const sequence> held;
    lookup_result result;
    {
        const std::lock_guard lock(mutex_);
        const found f = find(tokens);
        result = f.result;
        if (f.node) {
            touch(f.node->value);
            held = f.node->value->sequence;
        }
    }
    kvq::sequence sequence = held ? fork(*held) : cache_->new_sequence();
    if (sequence.tokens() > result.tokens) sequence.trim(result.tokens);
    const std::lock_guard lock(mutex_);
    ++statistics_.fetches[static_cast<std::size_t>(result.match)];
    statistics_.tokens_saved += static_cast<std::size_t>(result.tokens);
    return {result.match, result.tokens, std::move(sequence)};
}

KVQ_FUNC store_outcome prefix_cache::store(token_ids tokens, const kvq::sequence& sequence) {
    detail::expect(&detail::sequence_access::cache(sequence) == cache_,
                   "a sequence belongs to another cache");
    detail::expect(!tokens.empty(), "an entry needs at least 1 token");
    tokens = detail::entry_tokens(tokens, sequence);
    for (int layer = 0; layer < cache_->layer_count(); ++layer)
        detail::expect(tokens.size() <= static_cast<std::size_t>(sequence.tokens(layer)), "an entry of ",
                       tokens.size(), " tokens cannot be made: layer ", layer, " holds ",
                       sequence.tokens(layer));
    std::shared_ptr<const kvq::sequence> nearest;
    int common = 0;
    {
        const std::lock_guard lock(mutex_);
        if (is_duplicate(tokens)) return store_outcome::duplicate;
        const auto m = tree_.find(tokens);
        common = static_cast<int>(m.tokens);
        if (common > 0) nearest = (m.extension ? m.extension : m.prefix)->value->sequence;
    }
    const auto kept = std::make_shared<kvq::sequence>(sequence.fork());
    detail::make_entry(*kept, static_cast<int>(tokens.size()));
    (void)detail::sequence_access::committed_tables(
        *kept);  // raises the error of a draft, which share() must not
    if (options_.format && static_cast<int>(tokens.size()) >= options_.min_quantize_tokens) quantize(*kept);
    if (nearest) {
        const std::shared_lock reading(changing_);
        share(*kept, *nearest, common);
    }
    auto pages = detail::page_counts::of(*kept);
    const std::size_t bytes = detail::page_counts::bytes_of(pages);

    std::list<entry> fresh(1), dropped;  // freed outside the lock
    if (options_.evicted) fresh.front().tokens.assign(tokens.begin(), tokens.end());
    {
        const std::lock_guard lock(mutex_);
        if (is_duplicate(tokens)) return store_outcome::duplicate;
        if (bytes > options_.byte_limit) {
            ++statistics_.rejections;
            return store_outcome::too_large;
        }
        held_.reserve(pages.size());
        auto* const node = tree_.insert(tokens).first;
        // No step after this line can fail.
        fresh.front().sequence = kept;
        fresh.front().node = node;
        node->value = fresh.begin();
        entries_.splice(entries_.begin(), fresh);
        held_.add(*kept, pages);
        ++statistics_.stored;
        // Where windows or states limit trims, a longer entry may give less than a shorter one.
        while (auto* const shorter = cache_->trims_to_every_token() ? node->shorter() : nullptr) {
            ++statistics_.replaced;
            drop(shorter->value, dropped);
        }
        while (held_.bytes() > options_.byte_limit ||
               tree_.size() > static_cast<std::size_t>(options_.max_entries))
            evict(dropped);
    }
    report(dropped);
    return store_outcome::stored;
}

KVQ_FUNC bool prefix_cache::refresh(token_ids tokens) {
    const std::lock_guard lock(mutex_);
    const auto m = tree_.find(tokens);
    if (m.exact) touch(m.exact->value);
    return m.exact != nullptr;
}

KVQ_FUNC bool prefix_cache::erase(token_ids tokens) {
    std::list<entry> dropped;
    const std::lock_guard lock(mutex_);
    const auto m = tree_.find(tokens);
    if (!m.exact) return false;
    drop(m.exact->value, dropped);
    return true;
}

KVQ_FUNC void prefix_cache::clear() {
    std::list<entry> dropped;
    const std::lock_guard lock(mutex_);
    while (!entries_.empty()) drop(entries_.begin(), dropped);
}

KVQ_FUNC std::size_t prefix_cache::release(std::size_t bytes) {
    std::list<entry> dropped;
    std::size_t freed = 0;
    {
        const std::lock_guard lock(mutex_);
        const std::size_t before = held_.bytes();
        while (!entries_.empty() && before - held_.bytes() < bytes) evict(dropped);
        freed = before - held_.bytes();
    }
    report(dropped);
    return freed;
}

KVQ_FUNC step_down_report prefix_cache::step_down(std::span<sequence* const> live,
                                                  const step_down_policy& policy, executor_view executor) {
    step_down_report report;
    std::list<entry> dropped;
    const std::exception_ptr failed = detail::caught([&] {
        const std::lock_guard lock(mutex_);
        const std::lock_guard alone(changing_);
        std::vector<sequence*> all(live.begin(), live.end());
        for (const entry& e : entries_) all.push_back(e.sequence.get());
        recounting pages{*this, dropped};
        report = kvq::step_down(*cache_, std::span<sequence* const>(all), policy, executor);
        pages.needed = !report.steps.empty();
    });
    this->report(dropped, failed);
    dropped.clear();
    report.bytes_after = cache_->pool().bytes_in_use();
    report.fits = report.bytes_after <= policy.byte_budget;
    return report;
}

KVQ_FUNC std::size_t prefix_cache::entries() const {
    const std::lock_guard lock(mutex_);
    return tree_.size();
}

KVQ_FUNC std::size_t prefix_cache::bytes() const {
    const std::lock_guard lock(mutex_);
    return held_.bytes();
}

KVQ_FUNC prefix_cache_statistics prefix_cache::statistics() const {
    const std::lock_guard lock(mutex_);
    return statistics_;
}

KVQ_FUNC prefix_cache::found prefix_cache::find(token_ids tokens) const noexcept {
    found best;
    // Windows and states may keep an entry from giving all that it has in common.
    tree_.visit_closest(tokens, [&](const tree::node* node, std::size_t common) {
        const auto same = static_cast<int>(common);
        if (same <= best.result.tokens) return false;
        if (const int held = detail::trimmed_tokens(*node->value->sequence, same); held > best.result.tokens)
            best = {{match_of(node->tokens(), tokens, common), held}, node};
        return true;
    });
    const bool whole = best.result.match == prefix_match::prefix;
    if ((whole || best.result.match == prefix_match::lcp) && best.result.tokens < options_.min_prefix_tokens)
        return {{whole ? prefix_match::miss_short_prefix : prefix_match::miss_short_lcp, 0}, nullptr};
    return best;
}

KVQ_FUNC bool prefix_cache::is_duplicate(token_ids tokens) {
    const auto m = tree_.find(tokens);
    if (!m.exact) return false;
    touch(m.exact->value);
    ++statistics_.duplicates;
    return true;
}

KVQ_FUNC void prefix_cache::touch(position e) noexcept { entries_.splice(entries_.begin(), entries_, e); }

KVQ_FUNC requantize_request prefix_cache::request() const noexcept {
    return {.key = options_.format->key, .value = options_.format->value, .only_smaller = true};
}

KVQ_FUNC void prefix_cache::quantize(sequence& s) {
    cache_->requantize(s, request());
    s.drop_copies();  // they make short trims exact during decode, which an entry does not need
}

KVQ_FUNC void prefix_cache::share(sequence& s, const sequence& from, int common) const noexcept {
    const auto take = [](page_ref& mine, const page_ref& theirs) {
        const auto same_plan = [&] {
            if (!mine->plan || !theirs->plan) return !mine->plan && !theirs->plan;
            return mine->plan.record().fingerprint == theirs->plan.record().fingerprint;
        };
        if (mine && mine.get() != theirs.get() && mine->format == theirs->format && same_plan() &&
            same_data(*mine, *theirs))
            mine = theirs;
    };
    auto& tables = detail::sequence_access::tables(s);
    for (std::size_t layer = 0; layer < tables.size(); ++layer) {
        detail::page_table& mine = tables[layer];
        const detail::page_table& theirs = detail::sequence_access::tables(from)[layer];
        for (int i = 0, j = 0; i < mine.size() && j < theirs.size(); ++i, ++j) {
            // A window may have left more of one than of the other.
            while (i < mine.size() && mine[i].first_token < theirs[j].first_token) ++i;
            while (i < mine.size() && j < theirs.size() && theirs[j].first_token < mine[i].first_token) ++j;
            if (i == mine.size() || j == theirs.size() || mine[i].end() > common ||
                mine[i].first_token != theirs[j].first_token || mine[i].tokens != theirs[j].tokens ||
                !mine[i].full())
                break;
            for (int role = 0; role < 2; ++role) take(mine[i].pages[role], theirs[j].pages[role]);
        }
    }
}

KVQ_FUNC sequence prefix_cache::fork(const sequence& s) const {
    const std::shared_lock reading(changing_);
    return s.fork();
}

KVQ_FUNC void prefix_cache::recount(std::list<entry>& dropped) noexcept {
    held_.clear();
    for (position e = entries_.begin(); e != entries_.end();) {
        const position at = e++;
        if (count(*at->sequence)) continue;
        ++statistics_.evictions;
        at->evicted = true;
        tree_.erase(at->node);
        dropped.splice(dropped.end(), entries_, at);
    }
    while (held_.bytes() > options_.byte_limit) evict(dropped);
}

KVQ_FUNC bool prefix_cache::count(const sequence& s) noexcept {
    return detail::has_memory([&] {
        auto pages = detail::page_counts::of(s);
        held_.reserve(pages.size());
        held_.add(s, pages);
    });
}

KVQ_FUNC void prefix_cache::drop(position e, std::list<entry>& dropped) noexcept {
    held_.remove(*e->sequence);
    tree_.erase(e->node);
    dropped.splice(dropped.end(), entries_, e);
}

KVQ_FUNC void prefix_cache::evict(std::list<entry>& dropped) noexcept {
    ++statistics_.evictions;
    entries_.back().evicted = true;
    drop(std::prev(entries_.end()), dropped);
}

KVQ_FUNC void prefix_cache::report(const std::list<entry>& dropped, std::exception_ptr first) const {
    for (const entry& e : dropped) {
        if (!e.evicted || !options_.evicted) continue;
        std::exception_ptr failed = detail::caught([&] { options_.evicted(e.tokens, *e.sequence); });
        if (!first) first = std::move(failed);
    }
    if (first) std::rethrow_exception(first);
}

}}  // namespace kvq
