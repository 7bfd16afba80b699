// SPDX-License-Identifier: MIT
// Comparison family: exact. The page table (page/page_table.hpp) alone, without a byte of a page. Random
// growths, trims, erases, shifts, splices, repackings, forks and changes of formats against a list of tokens
// that does the same: the spans show the tokens of the list, and every page has the right holders. A trim
// within the rollback, and a growth in parts, give the table of a sequence that never had the other tokens.
#include <doctest/doctest.h>

#include <algorithm>
#include <kvq/cuda/host/free_pages.hpp>
#include <kvq/page/page_changes.hpp>
#include <kvq/page/repack_plan.hpp>
#include <map>
#include <memory_resource>
#include <set>

#include "support/random.hpp"

namespace page_table_tests {

namespace {

using kvq::page_ref;
using kvq::page_span;
using kvq::detail::page_table;
using kvq::detail::smaller;

/// What a cache does for its tables, with numbers of tokens in place of bytes.
class executor final : kvq::detail::page_sizes {
public:
    kvq::page_geometry g;
    int rollback;
    std::vector<int> targets;  // of each piece

    executor(const kvq::page_geometry& geometry, int back, std::vector<int> formats)
        : g(geometry),
          rollback(back),
          targets(std::move(formats)),
          pools_{{0, g.longest_page(), 0}, {1, g.longest_page(), 0}, {2, g.longest_page(), 0}} {}

    std::size_t pieces() const { return targets.size(); }
    page_table make() const { return {std::pmr::new_delete_resource(), targets.front(), targets.back()}; }
    page_table fork(const page_table& t) const { return {t, std::pmr::new_delete_resource()}; }
    std::vector<int>& held(const page_ref& p) { return contents_[p.get()]; }
    int used(int format) const { return pools_[format].used(); }
    page_ref take(int format) {
        kvq::cuda::detail::free_pages& pool = pools_[format];
        if (pool.available() == 0) pool.grow(pool.size() + 8);
        page_ref p = pool.take();
        held(p).assign(static_cast<std::size_t>(g.longest_page()), -1);
        p->bytes = bytes(0, format, g.page_tokens) - sizeof(kvq::page);
        return p;
    }
    page_ref copy(const page_ref& from, int format, int skip = 0) {
        page_ref p = take(format);
        std::copy(held(from).begin() + skip, held(from).end(), held(p).begin());
        return p;
    }

    void grow(page_table& t, int n, int first_id) {
        const int before = t.tokens, after = before + n;
        if (t.has_open_span()) {
            page_span& s = t.spans.back();
            for (std::size_t piece = 0; piece < pieces(); ++piece)
                if (s.pages[piece].shared()) s.pages[piece] = copy(s.pages[piece], 0);
        }
        t.grow(after, g, [&](page_span& s) {
            for (std::size_t piece = 0; piece < pieces(); ++piece) s.pages[piece] = take(0);
        });
        for (int i = t.committed; i < t.size(); ++i)
            for (int token = std::max(before, t[i].first_token); token < t[i].end(); ++token)
                for (std::size_t piece = 0; piece < pieces(); ++piece)
                    held(t[i].pages[piece])[static_cast<std::size_t>(token - t[i].first_token)] =
                        first_id + token - before;
        commit(t, t.due(after, g), true);
        t.drop_copies(g, rollback);
    }
    /// As cache/rearrange.hpp.
    void take_run(page_table& to, const page_table& from, int first, int last, std::int64_t by) {
        const page_table::cut_window cut = to.take(from, first, last, by, g);
        for (std::size_t piece = 0; piece < pieces() && cut.span >= 0; ++piece)
            to[cut.span].pages[piece] = copy(to[cut.span].pages[piece], 0, cut.skip);
    }
    void commit(page_table& t, int end, bool copies) {
        for (int i = t.committed; i < end; ++i) {
            for (std::size_t piece = 0; piece < pieces() && !t[i].sinks; ++piece) {
                if (targets[piece] == 0) continue;
                page_ref p = copy(t[i].pages[piece], targets[piece]);
                if (copies)
                    (void)t.commit_page(i, piece, std::move(p), t.tokens, g, rollback);
                else
                    t[i].pages[piece] = std::move(p);
            }
        }
        t.committed = std::max(t.committed, end);
    }
    std::size_t bytes(std::size_t, int format, int tokens) const override {
        return sizeof(kvq::page) + static_cast<std::size_t>(tokens) * (format == 0 ? 32 : 8);
    }
    /// As cache/repack.hpp, of committed spans. Returns how many groups got new pages.
    int repack(page_table& t, float part, std::vector<std::int64_t>& shifts) {
        const kvq::detail::repack_plan plan(t, true, g, part, *this, std::pmr::new_delete_resource());
        int changed = 0;
        for (std::size_t i = plan.groups().size(); i-- > 0;) {
            const kvq::detail::repack_group& group = plan.groups()[i];
            if (!plan.changes(group)) continue;
            ++changed;
            REQUIRE(group.tokens <= g.page_tokens);
            page_span fresh = plan.span_of(group);
            for (std::size_t piece = 0; piece < pieces(); ++piece) {
                fresh.pages[piece] = take(plan.format_of(group, piece));
                auto to = held(fresh.pages[piece]).begin();
                for (int s = group.first; s < group.last; ++s) {
                    REQUIRE(!t[s].copies[piece]);
                    to = std::copy_n(held(t[s].pages[piece]).begin() + t[s].skip, t[s].tokens, to);
                }
                fresh.pages[piece]->bytes =
                    bytes(piece, fresh.pages[piece]->format, group.tokens) - sizeof(kvq::page);
            }
            for (int token = fresh.first_token; token < fresh.end(); ++token)
                shifts[static_cast<std::size_t>(token)] = fresh.shift;  // keys are rotated
            t.join_spans(group.first, group.last, std::move(fresh));
        }
        return changed;
    }
    void finish(page_table& t) {
        commit(t, t.due(t.tokens, g), false);
        t.uncommit(g);
        t.copies_from = t.committed;
    }

private:
    kvq::cuda::detail::free_pages pools_[3];
    std::map<const kvq::page*, std::vector<int>> contents_;
};

/// A sequence, and what it must show.
struct both {
    page_table table;
    std::vector<int> ids;
    std::vector<std::int64_t> shifts;
    int longest = 0;  // so far
    bool rearranged = false;
};

void require_shown(executor& e, const both& b) {
    const page_table& t = b.table;
    REQUIRE(t.tokens == static_cast<int>(b.ids.size()));
    int at = 0;
    for (int i = 0; i < t.size(); ++i) {
        const page_span& s = t[i];
        const bool committed = i < t.committed;
        REQUIRE(s.first_token == at);
        REQUIRE(page_table::is_possible(s, committed, i == t.size() - 1, e.g));
        for (std::size_t piece = 0; piece < e.pieces(); ++piece) {
            REQUIRE((s.pages[piece]->format == 0 || (committed && !s.sinks)));
            if (s.copies[piece]) {
                REQUIRE(page_table::may_have_copies(s, t.tokens, e.g, e.rollback));
                REQUIRE(i >= t.copies_from);
            }
            for (int k = 0; k < s.tokens; ++k) {
                const auto in_page = static_cast<std::size_t>(s.skip + k);
                const int id = b.ids[static_cast<std::size_t>(at + k)];
                REQUIRE(e.held(s.pages[piece])[in_page] == id);
                if (s.copies[piece]) REQUIRE(e.held(s.copies[piece])[in_page] == id);
            }
        }
        for (int k = 0; k < s.tokens; ++k, ++at) REQUIRE(s.shift == b.shifts[static_cast<std::size_t>(at)]);
    }
    REQUIRE(page_table::may_wait(t.spans, static_cast<std::size_t>(t.committed), t.tokens, e.g));
}

/// Reports on usage are sums over for_each_page(): each page once, with the tokens that its spans show.
void require_counted(const std::vector<both>& all, std::size_t piece) {
    struct use {
        int shown = 0, spans = 0;
        bool is_shown = false;
    };
    std::map<const kvq::page*, std::set<const both*>> holders;
    for (const both& b : all)
        for (const page_span& s : b.table.spans)
            for (const page_ref* p : {&s.pages[piece], &s.copies[piece]})
                if (*p) holders[p->get()].insert(&b);
    for (const both& b : all) {
        std::map<const kvq::page*, use> want;
        for (const page_span& s : b.table.spans) {
            use& own = want[s.pages[piece].get()];
            own.shown += s.tokens;
            own.is_shown = true;
            ++own.spans;
            if (s.copies[piece]) ++want[s.copies[piece].get()].spans;
        }
        kvq::usage_report u;
        std::size_t found = 0, bytes = 0, shared = 0;
        b.table.for_each_page(piece, [&](const kvq::detail::held_page& p) {
            const use& own = want.at(&p.held);
            ++found;
            REQUIRE(p.shown == smaller(own.shown, p.held.tokens));
            REQUIRE(p.copy == !own.is_shown);
            REQUIRE(static_cast<int>(p.spans) == own.spans);
            REQUIRE(p.shared() == (holders.at(&p.held).size() > 1));
            bytes += p.held.bytes;
            shared += p.shared() ? p.held.bytes : 0;
            kvq::detail::add_page(u, p);
        });
        REQUIRE(found == want.size());
        REQUIRE(u.pages == found);
        REQUIRE(u.quantized + u.window + u.rollback == bytes);
        REQUIRE(u.shared == shared);
        REQUIRE(u.slack <= u.window);
    }
}

void require_same(const page_table& a, const page_table& b, bool formats) {
    REQUIRE(a.tokens == b.tokens);
    REQUIRE(a.committed == b.committed);
    REQUIRE(a.size() == b.size());
    for (int i = 0; i < a.size(); ++i) {
        REQUIRE(a[i].first_token == b[i].first_token);
        REQUIRE(a[i].tokens == b[i].tokens);
        REQUIRE(a[i].room == b[i].room);
        REQUIRE(a[i].skip == b[i].skip);
        REQUIRE(a[i].sinks == b[i].sinks);
        for (std::size_t piece = 0; piece < 2; ++piece)
            if (formats && a[i].pages[piece])
                REQUIRE((a[i].pages[piece]->format == 0) == (b[i].pages[piece]->format == 0));
    }
}

}  // namespace

TEST_CASE("sinks that were closed, and then show their page as a fork does, have its room") {
    executor e({16, 0, 4}, 0, {1});
    page_table whole = e.make(), made = e.make();
    e.grow(whole, 16, 0);
    page_table cut = e.fork(whole);
    (void)cut.trim(15, e.g);
    e.take_run(made, cut, 0, 15, 0);
    made.close_last();
    e.commit(made, made.size(), false);
    e.take_run(made, whole, 15, 16, 0);
    e.finish(made);
    REQUIRE(made.size() == 1);
    CHECK(made[0].tokens == 16);
    CHECK(made[0].room == 16);
    CHECK(page_table::is_possible(made[0], made.committed == 1, true, e.g));
}

TEST_CASE("a page table shows the tokens that a list of tokens has after the same growths and cuts") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    constexpr int most = 300;
    int cuts = 0, undone = 0, changed = 0, repacked = 0;
    for (int round = 0; round < test::rounds(40); ++round) {
        executor e(
            {random.one_in(3) ? 0 : random.between(1, 20), random.between(0, 20),
             random.pick(std::vector{1, 4, 16, 7})},
            random.one_in(3) ? 0 : random.between(1, 30),
            // One piece as on a GPU, or K and V, which may stay 16 bit.
            random.one_in(2) ? std::vector{1} : std::vector{random.between(0, 2), random.between(0, 2)});
        const int before_round = changed;
        std::vector<both> all;
        all.push_back({e.make(), {}, {}});
        int next_id = 0;
        for (int i = 0; i < 150; ++i) {
            const auto at = static_cast<std::size_t>(random.between(0, static_cast<int>(all.size()) - 1));
            both& b = all[at];
            const int n = b.table.tokens, what = random.between(0, 13);
            const int first = random.between(0, n), last = random.between(first, n);
            // Builds a table of runs of others, as erase, shift and splice do.
            const auto rearrange = [&](auto&& build) {
                page_table made = e.make();
                build(made);
                e.finish(made);
                b.table = std::move(made);
                b.rearranged = true;
            };
            if (what < 5) {
                const int added = what == 0 ? random.between(1, 60) : random.between(1, 5);
                if (n + added > most) continue;
                page_table parts = e.fork(b.table);
                // New keys of a page whose keys moved take its rotation.
                const bool open = b.table.has_open_span();
                const int room = open ? b.table.spans.back().room - b.table.spans.back().tokens : 0;
                const std::int64_t by = open ? b.table.spans.back().shift : 0;
                e.grow(b.table, added, next_id);
                for (int k = 0; k < added; ++k) {
                    e.grow(parts, 1, next_id + k);
                    b.ids.push_back(next_id + k);
                    b.shifts.push_back(k < room ? by : 0);
                }
                require_same(parts, b.table, true);
                next_id += added;
                b.longest = std::max(b.longest, n + added);
                // A trim within the rollback is as if the tokens had never been there.
                const int back = random.between(0, smaller(e.rollback, n + added));
                if (!b.rearranged && b.longest == n + added && back > 0) {
                    page_table never = e.make(), trimmed = e.fork(b.table);
                    e.grow(never, n + added - back, 0);
                    (void)trimmed.trim(n + added - back, e.g);
                    const bool whole =
                        std::all_of(trimmed.spans.begin(), trimmed.spans.begin() + trimmed.committed,
                                    [](const page_span& s) { return s.full(); });
                    if (whole)
                        require_same(trimmed, never, changed == before_round);  // no page was cut before
                    undone += whole;
                }
            } else if (what < 7) {
                const int left = random.one_in(2) ? first : std::max(0, n - e.rollback);
                const page_table::rest rest = b.table.after_trim(left, e.g);
                cuts += b.table.trim(left, e.g);
                if (left < n) {
                    REQUIRE(b.table.size() == rest.spans);
                    REQUIRE(b.table.committed == rest.committed);
                }
                b.ids.resize(static_cast<std::size_t>(left));
                b.shifts.resize(static_cast<std::size_t>(left));
            } else if (what < 8 && last < n && first < last) {
                const page_table before = e.fork(b.table);
                rearrange([&](page_table& made) {
                    e.take_run(made, before, 0, first, 0);
                    e.take_run(made, before, last, n, first - last);
                });
                b.ids.erase(b.ids.begin() + first, b.ids.begin() + last);
                b.shifts.erase(b.shifts.begin() + first, b.shifts.begin() + last);
                for (auto k = static_cast<std::size_t>(first); k < b.shifts.size(); ++k)
                    b.shifts[k] += first - last;
            } else if (what < 9 && first < last) {
                const int by = random.between(-50, 50);
                const page_table before = e.fork(b.table);
                rearrange([&](page_table& made) {
                    e.take_run(made, before, 0, first, 0);
                    e.take_run(made, before, first, last, by);
                    e.take_run(made, before, last, n, 0);
                });
                for (int k = first; k < last; ++k) b.shifts[static_cast<std::size_t>(k)] += by;
            } else if (what < 10 && first < last) {
                // Tokens of this sequence behind those of another one.
                const both from{e.fork(b.table), b.ids, b.shifts};
                both& to = all[static_cast<std::size_t>(random.between(0, static_cast<int>(all.size()) - 1))];
                const int held = to.table.tokens;
                if (held + last - first > most) continue;
                page_table made = e.make();
                e.take_run(made, e.fork(to.table), 0, held, 0);
                made.close_last();
                e.commit(made, made.size(), false);
                e.take_run(made, from.table, first, last, held - first);
                e.finish(made);
                to.table = std::move(made);
                to.rearranged = true;
                for (auto k = static_cast<std::size_t>(first); k < static_cast<std::size_t>(last); ++k) {
                    to.ids.push_back(from.ids[k]);
                    to.shifts.push_back(from.shifts[k] + held - first);
                }
            } else if (what < 11) {
                // Every page of the range in every table that holds it, once.
                std::vector<page_table*> tables;
                for (both& one : all) tables.push_back(&one.table);
                const auto piece =
                    static_cast<std::size_t>(random.between(0, static_cast<int>(e.pieces()) - 1));
                const int format = random.between(e.pieces() == 1 ? 1 : 0, 2);
                kvq::detail::page_changes changes(std::pmr::new_delete_resource(), e.g, e.rollback);
                const bool only_freed = random.one_in(2), only_own = only_freed || random.one_in(2);
                changes.select(tables, {.first_token = first,
                                        .last_token = last,
                                        .only_own = only_own,
                                        .only_freed = only_freed});
                std::set<const kvq::page*> seen;
                std::vector<page_ref> kept;  // so that no page is seen again under another name
                const auto wanted = [&](const kvq::page& p) { return p.format != format; };
                changes.for_each(piece, wanted, [&](const kvq::detail::page_change& change) {
                    const page_ref old = change.held;
                    const std::uint32_t holders = old.references() - 1;
                    REQUIRE(seen.insert(old.get()).second);
                    if (only_own) REQUIRE(holders == change.spans.size());
                    const page_ref fresh = e.copy(old, format);
                    for (const kvq::detail::held_span& at_span : change.spans)
                        tables[static_cast<std::size_t>(at_span.table)]->change_page(at_span.span, piece,
                                                                                     fresh, e.g, e.rollback);
                    kept.push_back(old);
                    ++changed;
                });
                std::map<const kvq::page*, std::uint32_t> may_change;  // spans that show it
                for (const page_table* t : tables)
                    for (int s = 0; s < t->committed; ++s)
                        if (!(*t)[s].sinks) ++may_change[(*t)[s].pages[piece].get()];
                for (const page_table* t : tables)
                    for (int s = 0; s < t->committed && !only_freed; ++s) {
                        const page_ref& p = (*t)[s].pages[piece];
                        if ((*t)[s].sinks || (*t)[s].first_token < first || (*t)[s].end() > last) continue;
                        // One that a window, sinks or copies hold as well would not be freed.
                        REQUIRE((p->format == format || (only_own && p.references() > may_change[p.get()])));
                    }
            } else if (what < 12) {
                const float part = random.pick(std::vector{0.1f, 0.25f, 0.5f});
                const int spans = b.table.size(), groups = e.repack(b.table, part, b.shifts);
                if (groups > 0) b.rearranged = true;
                repacked += groups;
                REQUIRE(b.table.size() <= spans);
                REQUIRE(e.repack(b.table, part, b.shifts) == 0);  // again changes nothing
            } else if (all.size() < 3) {
                all.push_back({e.fork(b.table), b.ids, b.shifts, b.longest, b.rearranged});
            } else {
                all.erase(all.begin() + static_cast<std::ptrdiff_t>(at));
            }
            std::set<const kvq::page*> pages[3];
            for (const both& one : all) {
                require_shown(e, one);
                for (const page_span& s : one.table.spans)
                    for (const auto* const list : {&s.pages, &s.copies})
                        for (const page_ref& p : *list)
                            if (p) pages[p->format].insert(p.get());
            }
            for (int f = 0; f < 3; ++f) REQUIRE(static_cast<int>(pages[f].size()) == e.used(f));
            for (std::size_t piece = 0; piece < e.pieces(); ++piece) require_counted(all, piece);
        }
    }
    CHECK(cuts > 0);
    CHECK(undone > 0);
    CHECK(changed > 0);
    CHECK(repacked > 0);
}

}  // namespace page_table_tests
