// Definitions of rearrange.hpp.
#pragma once

#include "../core/error.hpp"
#include "chunk.hpp"
#include "convert.hpp"
#include "rearrange.hpp"
#include "repack.hpp"
#include "sequence_access.hpp"
#include "window.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// The new spans of one layer.
class rearranged_table {
public:
    rearranged_table(kvq::cache& of, const page_table& before, int layer)
        : cache_(of), layer_(layer), table_(of.pool().memory(), before.targets[0], before.targets[1]) {
        table_.repacked = before.repacked;
        table_.plan = before.plan;
    }

    /// Appends tokens [first, last) of `from`, moved by `by`.
    void take(const page_table& from, int first, int last, std::int64_t by) {
        for (const page_span& s : from.spans)
            expect(s.first_token >= last || s.end() <= first ||
                       (s.shift <= farthest_shift - by && s.shift >= -farthest_shift - by),
                   "keys cannot move from ", s.shift, " by ", by, " positions");
        const page_table::cut_window cut = table_.take(from, first, last, by, geometry());
        if (cut.span >= 0) copy_tokens_behind(table_[cut.span], cut.skip);
    }

    /// Commits all spans, also those within the recent window. scratch: as for quantize().
    void commit_all(float* scratch) {
        pack(false);
        table_.close_last();
        commit(table_.size(), scratch);
    }

    std::size_t number() const noexcept { return static_cast<std::size_t>(layer_); }
    page_table finish(float* scratch) {
        const page_geometry g = geometry();
        const layer& of = cache_.layers()[static_cast<std::size_t>(layer_)];
        if (!table_.shows_sinks(g.window.sinks))
            fail(describe_layer(layer_, of), ": every query sees the first ", g.window.sinks,
                 " tokens, its sinks: they cannot be erased or replaced, nor cut before all of them are "
                 "there");
        if (!table_.is_whole(table_.tokens, g))
            fail("tokens cannot be taken out of ", describe_layer(layer_, of), ": token ", table_.tokens,
                 " would see tokens from ", g.window.first_seen(table_.tokens),
                 " on, but those before token ", table_.front(), " are freed");
        pack(false);
        commit(table_.due(table_.tokens, g), scratch);
        table_.uncommit(g);
        pack(true);
        table_.forget_plan(g);
        table_.copies_from = table_.committed;
        table_.free_unseen(g, cache_.options().rollback, [](const page_ref&) {});
        return std::move(table_);
    }

private:
    page_geometry geometry() const noexcept { return cache_.geometry(layer_); }
    void pack(bool committed) { repacker(cache_, table_, layer_).run(committed); }

    /// Commits the spans before `end`.
    void commit(int end, float* scratch) {
        if (!table_.plan) table_.plan = plan_of_keys(cache_, table_, layer_, table_.targets[0]);
        for (int& i = table_.committed; i < end; ++i) {
            page_span& s = table_[i];
            for (const tensor tensor_of : cache_.tensors(layer_)) {
                const int role = static_cast<int>(tensor_of);
                const int target = s.sinks ? 0 : table_.targets[role];
                if (s.pages[role]->tokens != s.room)
                    s.pages[role] = shorter_page(cache_, layer_, *s.pages[role], role, s.room);
                if (target == 0) continue;
                page_ref p = new_page(cache_, layer_, role, target, s.room);
                if (role == 0 && table_.plan) choose_plan(cache_, layer_, *s.pages[0], table_.plan, *p);
                convert_page(cache_.table(tensor_of), cache_.shape(layer_), layer_, *s.pages[role], *p,
                             scratch);
                s.pages[role] = std::move(p);
            }
        }
    }

    /// The pages of a 16-bit span without their first tokens.
    void copy_tokens_behind(page_span& s, int skip) {
        for (const tensor tensor_of : cache_.tensors(layer_)) {
            const int role = static_cast<int>(tensor_of);
            const page_ref from = s.pages[role];
            const page_geometry g = geometry();
            s.pages[role] =
                new_window_page(cache_, layer_, role, g.window_tokens(s.tokens, g.capacity(s.sinks)));
            move_tokens(cache_.table(tensor::key).window_type(), *from, skip, *s.pages[role], 0, tensor_of,
                        cache_.shape(layer_).dim(tensor_of), cache_.shape(layer_).kv_heads, s.tokens);
        }
    }

    kvq::cache& cache_;
    int layer_;
    page_table table_;
};

/// Gives every layer the spans that `build(new spans, old spans)` makes, or leaves all as it is.
template <class Build>
void rearrange(sequence& s, float* scratch, Build&& build) {
    kvq::cache& of = sequence_access::cache(s);
    auto& tables = sequence_access::committed_tables(s);
    resource_vector<page_table> fresh(of.pool().memory());
    fresh.reserve(tables.size());
    for (std::size_t layer = 0; layer < tables.size(); ++layer) {
        if (!of.takes_steps(static_cast<int>(layer))) {
            fresh.emplace_back(tables[layer], of.pool().memory());
            continue;
        }
        rearranged_table table(of, tables[layer], static_cast<int>(layer));
        build(table, std::as_const(tables[layer]));
        fresh.push_back(table.finish(scratch));
    }
    tables.swap(fresh);
}

/// Raises kvq::error if keys would move by `by` positions in a cache without cache_options::rotary.
KVQ_FUNC void expect_rotary(const kvq::cache& of, std::int64_t by) {
    constexpr std::int64_t farthest = std::int64_t{1} << 40;
    expect(by >= -farthest && by <= farthest, "keys cannot move by ", by, " positions, the limit is ",
           farthest);
    expect(by == 0 || of.rotations().known(), "keys cannot move by ", by,
           " positions: set cache_options::rotary to say how they are rotated");
    for (int i = 0; i < of.layer_count(); ++i) of.expect_values_stay(i, by);
}

KVQ_FUNC void expect_range(const char* verb, int first, int last, const char* whose, int held) {
    expect(first >= 0 && first <= last && last <= held, "cannot ", verb, " tokens ", first, " to ", last,
           ": the ", whose, " holds ", held);
}

}  // namespace detail

KVQ_FUNC void sequence::erase(int first, int last) {
    expect_no_state("erase");
    const int held = tokens();
    detail::expect_range("erase", first, last, "sequence", held);
    if (first == last) return;
    if (last == held) {
        trim(first);
        return;
    }
    detail::sequence_access::expect_none_dropped(*this, "erase");
    const std::int64_t by = std::int64_t{first} - last;
    detail::expect_rotary(*cache_, by);
    detail::rearrange(*this, scratch_.data(),
                      [&](detail::rearranged_table& to, const detail::page_table& from) {
                          to.take(from, 0, first, 0);
                          to.take(from, last, held, by);
                      });
}

KVQ_FUNC void sequence::shift(int first, int last, std::int64_t by) {
    expect_no_state("shift");
    const int held = tokens();
    detail::expect_range("shift", first, last, "sequence", held);
    detail::expect_rotary(*cache_, by);
    if (first == last || by == 0) return;
    detail::sequence_access::expect_none_dropped(*this, "shift");
    detail::rearrange(*this, scratch_.data(),
                      [&](detail::rearranged_table& to, const detail::page_table& from) {
                          to.take(from, 0, first, 0);
                          to.take(from, first, last, by);
                          to.take(from, last, held, 0);
                      });
}

KVQ_FUNC void sequence::splice(const sequence& other, int first, int last) {
    expect_no_state("splice");
    for (int layer = 0; layer < cache_->layer_count(); ++layer)
        if (cache_->holds_tokens(layer) && !cache_->takes_steps(layer))
            detail::fail(describe(layer), ": tokens of another sequence belong to another text");
    const cache_shape &mine = shape(0), &theirs = other.shape(0);
    detail::expect(other.cache_ == cache_, "a sequence of another cache cannot be spliced: it has ",
                   theirs.layers, " layers, the first one of ", theirs.kv_heads, " x ", theirs.head_dim,
                   ", this one ", mine.layers, ", of ", mine.kv_heads, " x ", mine.head_dim);
    const int held = tokens(), theirs_held = other.tokens();
    detail::expect_range("splice", first, last, "other sequence", theirs_held);
    for (int layer = 0; layer < mine.layers; ++layer) {
        detail::expect(tokens(layer) == held && other.tokens(layer) == theirs_held,
                       "cannot splice in the middle of a step: layer ", layer, " holds ", tokens(layer),
                       " and ", other.tokens(layer), " tokens, other layers ", held, " and ", theirs_held);
        check_added(tables_[static_cast<std::size_t>(layer)], last - first);
        other.check_held("splice", layer, first, last);
    }
    const std::int64_t by = std::int64_t{held} - first;
    if (first == last) return;
    for (const sequence* const s : {static_cast<const sequence*>(this), &other})
        detail::sequence_access::expect_none_dropped(*s, "splice");
    detail::expect_rotary(*cache_, by);
    auto& others = &other == this ? detail::sequence_access::committed_tables(*this)
                                  : detail::sequence_access::tables(other);
    detail::rearrange(*this, scratch_.data(),
                      [&](detail::rearranged_table& to, const detail::page_table& from) {
                          to.take(from, 0, held, 0);
                          to.commit_all(scratch_.data());
                          to.take(others[to.number()], first, last, by);
                      });
}

}}  // namespace kvq
