// Sequences of a cache on the device between steps (cache.hpp): new, trim, fork, free, requantize, step down.
//
// Page numbers live on the host (sequence_pages.hpp). trim() and free() are arithmetic there; fork() copies
// sinks and window on the stream; requantizing quantizes new pages and then exchanges numbers. The next begin
// sends what has changed.
// Contract: what changes a sequence ends the step that has begun. A call that fails changes nothing, but for
// step_down(): the tiers that it has done stay done. Pages that sequences outside of the call hold stay as
// they are.
#pragma once

#include <algorithm>
#include <deque>
#include <map>

#include "cache_class.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// Copies 16-bit pages to others of their pool, several in a launch.
struct page_copier {
    const layer_group& group;
    cudaStream_t stream;
    page_copies copies{};
    status result{};

    /// p becomes a free page with its values.
    void add(page_ref& p, const device_pages& pool) {
        copies.from[copies.count] = p->number;
        p = pool.pages().take();
        copies.to[copies.count++] = p->number;
        if (copies.count == page_copies::room) launch(pool);
    }
    void launch(const device_pages& pool) {
        if (result && copies.count > 0)
            result = group.format.functions->copy_pages(copies, pool.memory(), group.shape.layers, stream);
        copies.count = 0;
    }
};

}  // namespace detail

inline sequence_id cache::new_sequence() {
    if (!is_open()) return {};
    if (unused_.empty()) {
        // Room for all of them, so that free() cannot fail.
        if (unused_.capacity() <= entries_.size()) unused_.reserve(2 * entries_.size() + 1);
        entries_.emplace_back();
        unused_.push_back(static_cast<int>(entries_.size()) - 1);
    }
    const int index = unused_.back();
    entry& e = entries_[static_cast<std::size_t>(index)];
    e.pages.resize(groups_.size());
    for (std::size_t i = 0; i < groups_.size(); ++i) e.pages[i].set_target(groups_[i].target);
    if (states_) e.state.emplace(states_->make(options_.snapshots));
    unused_.pop_back();
    e.alive = true;
    e.version = ++versions_;
    return {index, ++e.generation};
}

inline status cache::free(sequence_id id) {
    if (status s = check_here(id); !s) return s;
    entry& e = entry_of(id);
    e.pages.clear();
    e.state.reset();
    e.alive = false;
    unused_.push_back(id.index);
    end_step(id);
    return {};
}

/// Would a trim to n end in or behind a page that layers of a begun prompt have not quantized yet? Also where
/// another call has ended the prompt since.
inline bool cache::lacks_page(sequence_id id, std::size_t group, int n) const noexcept {
    const detail::layer_group& g = groups_[group];
    return step_.id == id && g.missing_layers() > 0 &&
           entry_of(id).pages[group].committed_after_trim(n, g.geometry) > g.now.committed_before;
}

inline status cache::trim(sequence_id id, int n) {
    if (status s = check_here(id); !s) return s;
    entry& e = entry_of(id);
    const int accepted = e.pages[0].tokens(), held = tokens(id);
    if (n < 0 || n > held)
        return detail::bad_value("cannot trim to %d tokens: sequence %d holds %d", n, id.index, held);
    const int wanted = std::exchange(n, reach(id, n));
    if (n == held) return {};
    if (n > accepted)
        return detail::bad_value("cannot trim to %d: tokens %d to %d are a draft, keep() a part of it", n,
                                 accepted, held);
    if (step_.cross)
        if (status s = check_whole(std::span(&id, 1)); !s) return s;
    if (const int lacking = missing(); step_.id == id && lacking > 0 && n > held - step_.new_tokens)
        return detail::bad_value(
            "cannot trim to %d: %d layers lack the prompt that has begun; trim to at most %d, or append the "
            "prompt to them first",
            n, lacking, held - step_.new_tokens);
    if (const int shared = waiting(); shared > 0 && (step_.id != id || n > held - step_.new_tokens))
        return detail::bad_value(
            "cannot trim to %d: %d layers share the keys of a prompt and have not attended to it; give them "
            "prefill(), or begin the next step first",
            n, shared);
    for (std::size_t i = 0; i < step_groups(); ++i) {
        const detail::layer_group& g = groups_[i];
        const detail::sequence_pages& s = e.pages[i];
        if (!s.table.reaches(n, g.geometry))
            return detail::bad_value(
                "%s: cannot trim to %d tokens: it has freed what they need, and holds at least %d",
                g.describe(0).c_str(), n, s.table.trim_limit(g.geometry));
        if (lacks_page(id, i, n))
            return detail::bad_value(
                "cannot trim to %d: %d layers lack the prompt that has begun and have not quantized that "
                "token's page; trim to at most %d, or append the prompt to them first",
                n, g.missing_layers(), s[common::larger(g.now.committed_before, s.gone())].first_token);
    }
    if (e.state)
        if (status s = states_->ensure_here(0, e.state->missing_snapshots(wanted), options_.growing); !s)
            return s;
    for (std::size_t i = 0; i < step_groups(); ++i) e.pages[i].trim(n, groups_[i].geometry);
    if (e.state) (void)e.state->trim(wanted);
    e.version = ++versions_;
    end_step(id);
    return states_ ? states_->take_error() : status{};
}

inline int cache::tokens(sequence_id id, int layer) const noexcept {
    if (!is_here(id) || layer < 0 || layer >= layer_count()) return 0;
    if (!is_cross(layer)) return tokens(id);
    return entry_of(id)
        .pages[static_cast<std::size_t>(places_[static_cast<std::size_t>(layer)].group)]
        .tokens();
}

inline int cache::trim_limit(sequence_id id) const noexcept {
    if (!is_here(id)) return 0;
    const int held = tokens(id);
    if (entry_of(id).pages[0].drafted > 1 || waiting() > 0 || (step_.id == id && missing() > 0)) return held;
    int limit = 0;
    for (std::size_t i = 0; i < step_groups(); ++i)
        limit = common::larger(limit, entry_of(id).pages[i].table.trim_limit(groups_[i].geometry));
    if (const std::optional<recurrent_state>& state = entry_of(id).state)
        return state->trim_limit(held, [&](int n) { return n == 0 || n >= limit; });
    return limit;
}

inline status cache::fork(sequence_id id, sequence_id& copy, cudaStream_t stream) {
    if (status s = check_here(id); !s) return s;
    if (status s = check_whole(std::span(&id, 1)); !s) return s;
    if (status s = settle(std::span(&id, 1), stream); !s) return s;
    const auto in_16_bit = [](const page_ref& p) { return p && p->format == 0; };
    for (std::size_t i = 0; i < step_groups(); ++i) {
        const detail::sequence_pages& s = entry_of(id).pages[i];
        int window = static_cast<int>(s.ahead.size());
        for (const page_span& span : s.table.spans)
            window += in_16_bit(span.pages[0]) + in_16_bit(span.copies[0]);
        if (status r = groups_[i].ensure_free({}, window, static_cast<int>(s.sinks.size()), stream); !r)
            return r;
    }
    if (status s = append_chunks(stream); !s) return s;
    unfinished_sequence fresh{*this, new_sequence()};
    const sequence_id made = fresh.id;
    status result;
    for (std::size_t i = 0; i < groups_.size(); ++i) {
        const detail::layer_group& g = groups_[i];
        detail::sequence_pages& s = entry_of(made).pages[i];
        s = entry_of(id).pages[i];
        s.leaving.clear();
        if (!g.takes_steps()) continue;  // nothing is appended to its pages any more
        detail::page_copier copies{g, stream};
        for (page_span& span : s.table.spans)
            for (page_ref* const p : {&span.pages[0], &span.copies[0]})
                if (in_16_bit(*p)) copies.add(*p, g.window);
        for (page_ref& p : s.ahead) copies.add(p, g.window);
        copies.launch(g.window);
        for (page_ref& p : s.sinks) copies.add(p, g.sinks);
        copies.launch(g.sinks);
        if (result) result = copies.result;
    }
    if (!result) return result;
    if (states_) entry_of(made).state.emplace(entry_of(id).state->fork());
    copy = fresh.take();
    return result;
}

/// The tables of these sequences.
inline std::vector<common::page_table*> cache::tables_of(std::span<const sequence_id> ids,
                                                         std::size_t group) {
    std::vector<common::page_table*> tables;
    for (const sequence_id id : ids) tables.push_back(&entry_of(id).pages[group].table);
    return tables;
}

inline status cache::no_pair(const detail::layer_group& g, int from, std::string_view format) const {
    return detail::bad_value(
        "%s: what is %.40s cannot become %.40s: add the pair of both to its make_device_format<...>()",
        g.describe(0).c_str(), g.format.kinds[static_cast<std::size_t>(from)].name.c_str(),
        std::string(format).c_str());
}

/// Adds the pages of a range to those that get the format, in groups that have it. saved: grows by the bytes
/// that this saves.
inline status cache::find_changes(std::span<const sequence_id> ids, const common::change_range& range,
                                  std::string_view format, bool only_smaller, format_changes& changes,
                                  std::size_t& saved) {
    changes.resize(groups_.size());
    status result;
    for (std::size_t i = 0; i < groups_.size(); ++i) {
        const detail::layer_group& g = groups_[i];
        std::vector<int> targets;  // by format
        for (int f = 0; f < g.kinds(); ++f) targets.push_back(g.target_of(f, format));
        // Tokens of a range are those of the sequence.
        const bool all_tokens = range.first_token == 0 && range.last_token == common::change_range::all &&
                                range.last_tokens.empty();
        if (!g.has_named(format) || (!all_tokens && !g.takes_steps())) continue;
        const std::vector<common::page_table*> tables = tables_of(ids, i);
        common::page_changes found(std::pmr::new_delete_resource(), g.geometry, g.geometry.rollback);
        found.select(tables, range);
        const auto wanted = [&](const page& p) {
            const int to = targets[static_cast<std::size_t>(p.format - 1)];
            return p.format != to + 1 && (!only_smaller || to < 0 || g.shrinks(p.format - 1, to));
        };
        found.for_each(0, wanted, [&](const common::page_change& change) {
            const int to = targets[static_cast<std::size_t>(change.held->format - 1)];
            if (to < 0) {
                if (result) result = no_pair(g, change.held->format - 1, format);
                return;
            }
            changes[i].push_back({change.held, {}, to, {}, {change.spans.begin(), change.spans.end()}});
            saved += change.held->bytes - g.quantized[static_cast<std::size_t>(to)].page_bytes();
        });
    }
    return result;
}

/// What a run of these changes takes, with so many bytes in use before it. Old pages are held until all new
/// ones are there.
inline requantize_report cache::report_of(const format_changes& changes, std::size_t in_use) const {
    requantize_report r;
    r.bytes_before = r.bytes_peak = in_use;
    for (std::size_t i = 0; i < changes.size(); ++i)
        for (const format_change& c : changes[i]) {
            ++r.pages;
            if (!groups_[i].drops_lower(c.from->format - 1, c.format))
                r.bytes_peak += groups_[i].quantized[static_cast<std::size_t>(c.format)].page_bytes();
        }
    return r;
}
/// Completes it behind the run.
inline void cache::end_report(requantize_report& r, std::size_t in_use) noexcept {
    r.bytes_after = in_use;
    r.bytes_freed = r.bytes_peak - in_use;
}

/// Quantizes pages of one format (-1: 16 bit) to pages of another one, in all layers of a group.
inline status cache::convert_pages(detail::layer_group& g, int from, int target,
                                   std::span<const detail::page_pair> pages, const page_ref& plan,
                                   cudaStream_t stream) {
    const kept_tensors kept = from < 0 ? kept_tensors{} : g.kept(from, target);
    detail::word_writer to = writer(stream);
    while (!pages.empty()) {
        const std::size_t count = common::smaller(pages.size(), static_cast<std::size_t>(g.columns));
        for (const bool fresh : {false, true})
            for (std::size_t k = 0; k < count; ++k)
                g.send(to, g.list_at(fresh) + static_cast<int>(k), fresh ? pages[k].to : pages[k].from);
        status result = to.flush();
        for (int member = 0; member < g.shape.layers && result; ++member) {
            const detail::layer_view l = g.view_of_plan(member, plan);
            result =
                g.format.functions->requantize(l, from, l.window, target, kept, g.words + g.list_at(false),
                                               g.words + g.list_at(true), static_cast<int>(count), stream);
        }
        if (!result) return result;
        pages = pages.subspan(count);
    }
    return {};
}

/// Carries changes out.
inline status cache::requantize_pages(std::span<const sequence_id> ids, format_changes& changes,
                                      cudaStream_t stream) {
    bool any = false;
    for (std::size_t i = 0; i < changes.size(); ++i) {
        std::vector<int> fresh(groups_[i].quantized.size(), 0);
        for (const format_change& c : changes[i])
            if (!groups_[i].drops_lower(c.from->format - 1, c.format))
                ++fresh[static_cast<std::size_t>(c.format)];
        any = any || !changes[i].empty();
        if (status s = groups_[i].ensure_free(fresh, 0, 0, stream); !s) return s;
    }
    if (any)
        if (status s = append_chunks(stream); !s) return s;
    for (std::size_t i = 0; i < changes.size(); ++i) {
        detail::layer_group& g = groups_[i];
        std::vector<format_change>& list = changes[i];
        if (list.empty()) continue;
        step_.begun = false;
        // Pages of the same formats together.
        for (format_change& c : list)
            for (const common::held_span& at : c.spans) {
                detail::sequence_pages& s = entry_of(ids[static_cast<std::size_t>(at.table)]).pages[i];
                if (g.plans.takes(c.format) && !s.plan) s.plan = g.plans.even;
                c.plan = s.plan;
            }
        const auto formats = [](const format_change& c) {
            return std::tuple(c.format, c.from->format, c.plan ? c.plan->number : -1);
        };
        std::stable_sort(list.begin(), list.end(), [&](const format_change& a, const format_change& b) {
            return formats(a) < formats(b);
        });
        // A page of two planes has the upper one as a page of its own: no byte is read or written.
        for (format_change& c : list) {
            const int from = c.from->format - 1;
            c.to = g.drops_lower(from, c.format)
                       ? g.quantized[static_cast<std::size_t>(from)].pages().upper(*c.from)
                       : g.quantized[static_cast<std::size_t>(c.format)].pages().take();
        }
        std::vector<detail::page_pair> pages;
        for (std::size_t first = 0, end; first < list.size(); first = end) {
            pages.clear();
            for (end = first; end < list.size() && formats(list[end]) == formats(list[first]); ++end)
                pages.push_back({list[end].from->number, list[end].to->number});
            if (g.drops_lower(list[first].from->format - 1, list[first].format)) continue;
            if (status s = convert_pages(g, list[first].from->format - 1, list[first].format, pages,
                                         list[first].plan, stream);
                !s)
                return s;
        }
        for (format_change& c : list)
            for (const common::held_span& at : c.spans) {
                entry& e = entry_of(ids[static_cast<std::size_t>(at.table)]);
                e.pages[i].table.change_page(at.span, 0, c.to, g.geometry, g.geometry.rollback);
                e.version = ++versions_;
            }
    }
    changes.clear();
    return {};
}

/// All that is checked before a page changes.
inline status cache::find_changes(std::span<const sequence_id> ids, const requantize_request& request,
                                  format_changes& changes) {
    if (status s = check_batch(ids, false); !s) return s;
    if (status s = check_no_draft(ids); !s) return s;
    if (request.first_token < 0 || request.first_token > request.last_token)
        return detail::bad_value("tokens %d to %d are not a range", request.first_token, request.last_token);
    if (status s = check_format(request.format); !s) return s;
    if (status s = check_whole(ids); !s) return s;
    if (request.new_pages)
        for (std::size_t i = 0; i < groups_.size(); ++i)
            for (const sequence_id id : ids)
                if (const int now = entry_of(id).pages[i].target();
                    groups_[i].has_named(request.format) && groups_[i].target_of(now, request.format) < 0)
                    return no_pair(groups_[i], now, request.format);
    std::size_t saved = 0;
    return find_changes(ids, {request.first_token, request.last_token}, request.format, request.only_smaller,
                        changes, saved);
}

inline status cache::requantize(std::span<const sequence_id> ids, const requantize_request& request,
                                cudaStream_t stream, requantize_report* report) {
    format_changes changes;
    if (status s = find_changes(ids, request, changes); !s) return s;
    if (status s = settle(ids, stream); !s) return s;
    changes.clear();
    if (status s = find_changes(ids, request, changes); !s) return s;
    requantize_report done = report_of(changes, bytes_in_use());
    if (status s = requantize_pages(ids, changes, stream); !s) return s;
    end_report(done, bytes_in_use());
    if (request.new_pages)
        for (std::size_t i = 0; i < groups_.size(); ++i)
            for (const sequence_id id : ids) {
                detail::sequence_pages& s = entry_of(id).pages[i];
                if (const int f = groups_[i].target_of(s.target(), request.format); f >= 0) s.set_target(f);
            }
    if (report != nullptr) *report = done;
    return {};
}

/// What stepping down does, page by page. bytes(): in use; carry(changes): carries them out.
template <class InUse, class Carry>
status cache::lower_pages(std::span<const sequence_id> ids, std::span<const tier> tiers,
                          std::size_t byte_budget, InUse&& bytes, Carry&& carry) {
    if (status s = check_batch(ids, false); !s) return s;
    if (status s = check_no_draft(ids); !s) return s;
    for (std::size_t i = 0; i < tiers.size(); ++i) {
        if (status s = check_format(tiers[i].format); !s) return s;
        const int before = i == 0 ? 0 : tiers[i - 1].age;
        if (tiers[i].age < before)
            return detail::bad_value("tier %zu starts at age %d, before %d", i, tiers[i].age, before);
    }
    std::vector<int> ages, lengths;
    for (const tier& t : tiers) ages.push_back(t.age);
    for (const sequence_id id : ids) lengths.push_back(tokens(id));
    if (status s = check_whole(ids); !s) return s;
    status result;
    format_changes changes;
    std::size_t changing = 0;  // the tier of `changes`
    const auto carry_out = [&] {
        if (result) result = carry(changes);
    };
    std::size_t in_use = 0;
    // The changes of a tier are carried out together.
    const auto lower = [&](std::size_t index, const common::change_range& range) {
        if (index != changing) carry_out();
        changing = index;
        std::size_t saved = 0;
        if (result) result = find_changes(ids, range, tiers[index].format, true, changes, saved);
        return in_use -= saved;
    };
    if (tiers.empty()) return {};
    common::step_down_by_age(ages, lengths, lower);
    carry_out();
    in_use = bytes();
    std::vector<const common::page_table*> read;
    for (std::size_t i = 0; i < step_groups(); ++i)
        for (const common::page_table* const table : tables_of(ids, i)) read.push_back(table);
    common::step_down_by_budget(tiers.size(), read, in_use, byte_budget, lower);
    carry_out();
    return result;
}

inline status cache::step_down(std::span<const sequence_id> ids, std::span<const tier> tiers,
                               cudaStream_t stream, std::size_t byte_budget) {
    if (status s = check_batch(ids, false); !s) return s;
    if (status s = check_no_draft(ids); !s) return s;
    if (status s = check_whole(ids); !s) return s;
    if (status s = settle(ids, stream); !s) return s;
    return lower_pages(
        ids, tiers, byte_budget, [&] { return bytes_in_use(); },
        [&](format_changes& changes) { return requantize_pages(ids, changes, stream); });
}

/// The tables of sequences with other pages in them, of as many bytes, formats and holders, but without
/// memory: changes are carried out on these, what waits for a plan first. Then the tables are as before.
struct cache::rehearsal final : page_owner {
    cache& of;
    std::size_t in_use, most;
    /// upper: of a page of two planes, which frees the other one's bytes alone.
    struct twin_page : page {
        page_ref upper;
    };
    std::deque<twin_page> made;
    std::vector<page_ref> elsewhere;  // what other holders have
    std::vector<std::pair<detail::sequence_pages*, detail::sequence_pages>> before;

    explicit rehearsal(cache& c) : of(c), in_use(c.bytes_in_use()), most(in_use) {}
    // Where memory runs out, the destructor puts the tables back that have been exchanged.
    rehearsal(cache& c, std::span<const sequence_id> ids) : rehearsal(c) {
        std::map<const page*, page_ref> twins;
        before.reserve(ids.size() * of.groups_.size());
        for (const sequence_id id : ids)
            for (std::size_t i = 0; i < of.groups_.size(); ++i) {
                const auto twin_of = [&](const page& p) -> page_ref& {
                    page_ref& twin = twins[&p];
                    if (!twin) twin = make(p.format, p.bytes);
                    return twin;
                };
                const auto exchange = [&](page_ref& p) {
                    if (!p) return;
                    const page_ref twin = twin_of(*p);
                    if (p->format > 0 && !upper_in(*twin))
                        if (const page_ref* const upper =
                                of.groups_[i].quantized[static_cast<std::size_t>(p->format - 1)].upper_page(
                                    *p))
                            upper_in(*twin) = twin_of(**upper);
                    p = twin;
                };
                detail::sequence_pages& pages = of.entry_of(id).pages[i];
                detail::sequence_pages copy = pages;
                for (page_span& span : copy.table.spans) {
                    exchange(span.pages[0]);
                    exchange(span.copies[0]);
                }
                for (detail::sequence_pages::leaving_page& leaving : copy.leaving) exchange(leaving.held);
                copy.sinks.clear();
                copy.ahead.clear();
                std::swap(pages, copy);
                before.emplace_back(&pages, std::move(copy));
            }
        for (const auto& [held, twin] : twins)
            for (auto more = held->references.load() - (twin.references() - 1); more > 0; --more)
                elsewhere.push_back(twin);
        settle(ids);
    }
    ~rehearsal() {
        for (auto& [pages, old] : before) *pages = std::move(old);
    }
    rehearsal(const rehearsal&) = delete;
    rehearsal& operator=(const rehearsal&) = delete;

    page_ref make(int format, std::size_t bytes) {
        page& p = made.emplace_back();
        p.format = format;
        p.bytes = bytes;
        p.owner = this;
        p.references.store(1);
        return page_ref(&p);
    }
    static page_ref& upper_in(page& p) noexcept { return static_cast<twin_page&>(p).upper; }
    /// A new page of a group.
    page_ref take(const detail::layer_group& g, int format) {
        const detail::device_pages& pool = g.quantized[static_cast<std::size_t>(format)];
        page_ref p = make(format + 1, pool.page_bytes());
        if (const int upper = g.format.kinds[static_cast<std::size_t>(format)].upper; upper >= 0)
            upper_in(*p) = make(upper + 1, pool.upper()->page_bytes());
        in_use += p->bytes;
        return p;
    }
    void free(page* p) noexcept override {
        const page_ref upper = std::move(upper_in(*p));
        in_use -= p->bytes - (upper ? upper->bytes : 0);
    }

    /// As cache::settle().
    void settle(std::span<const sequence_id> ids) {
        for (std::size_t i = 0; i < of.groups_.size(); ++i)
            for (const sequence_id id : ids) {
                const detail::layer_group& g = of.groups_[i];
                detail::sequence_pages& s = of.entry_of(id).pages[i];
                if (g.plans.tokens == 0 || !s.has_due(g.geometry)) continue;
                std::vector<page_ref> fresh;
                for (int k = s.table.committed; k < s.table.due(s.tokens(), g.geometry); ++k)
                    if (!s.table[k].sinks) fresh.push_back(take(g, s.target()));
                most = common::larger(most, in_use);
                s.commit_due(g.geometry, fresh);
            }
    }
    void carry_out(std::span<const sequence_id> ids, format_changes& changes) {
        for (std::size_t i = 0; i < changes.size(); ++i) {
            const detail::layer_group& g = of.groups_[i];
            for (format_change& c : changes[i]) {
                c.to = g.drops_lower(c.from->format - 1, c.format) ? upper_in(*c.from) : take(g, c.format);
                for (const common::held_span& at : c.spans)
                    of.entry_of(ids[static_cast<std::size_t>(at.table)])
                        .pages[i]
                        .table.change_page(at.span, 0, c.to, g.geometry, g.geometry.rollback);
            }
        }
        changes.clear();
    }
};

inline status cache::plan_requantize(std::span<const sequence_id> ids, const requantize_request& request,
                                     requantize_report& report) const {
    cache& self = const_cast<cache&>(*this);  // its tables are as before when this ends
    {
        format_changes changes;
        if (status s = self.find_changes(ids, request, changes); !s) return s;
    }
    rehearsal tables(self, ids);
    format_changes changes;
    if (status s = self.find_changes(ids, request, changes); !s) return s;
    report = report_of(changes, tables.in_use);
    tables.carry_out(ids, changes);
    end_report(report, tables.in_use);
    return {};
}

inline status cache::plan_step_down(std::span<const sequence_id> ids, std::span<const tier> tiers,
                                    requantize_report& report, std::size_t byte_budget) const {
    cache& self = const_cast<cache&>(*this);  // its tables are as before when this ends
    if (status s = self.check_batch(ids, false); !s) return s;
    if (status s = check_no_draft(ids); !s) return s;
    if (status s = check_whole(ids); !s) return s;
    requantize_report sum;
    sum.bytes_before = bytes_in_use();
    rehearsal tables(self, ids);
    sum.bytes_peak = tables.most;
    status s = self.lower_pages(
        ids, tiers, byte_budget, [&] { return tables.in_use; },
        [&](format_changes& changes) {
            requantize_report r = report_of(changes, tables.in_use);
            tables.carry_out(ids, changes);
            end_report(r, tables.in_use);
            sum.pages += r.pages;
            sum.bytes_freed += r.bytes_freed;
            sum.bytes_peak = common::larger(sum.bytes_peak, r.bytes_peak);
            return status{};
        });
    sum.bytes_after = tables.in_use;
    if (s) report = sum;
    return s;
}

}}}  // namespace kvq::cuda
