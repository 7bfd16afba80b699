// A sequence: the K and V of one token stream, layer by layer.
//
//   append   tokens go to window pages; a page that falls behind the recent window is coded (committed)
//   attend   fused attention over whatever pages there are
//   trim     forget every token from a position on
//   fork     a second sequence that shares all pages; whoever writes to a shared page copies it first
//
// The state after any history depends only on what tokens it holds, as long as trims reach back no further than
// cache_options::rollback: pages coded meanwhile go back to their originals. A deeper trim into a coded page turns its
// surviving tokens back into window values, exact to the scheme's error.
// Guarantees: arguments are checked and memory is allocated before anything changes (strong exception guarantee).
// Thread safety: const members may run together; one writer per sequence; different sequences are independent.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>

#include "../attention/attend.hpp"
#include "../attention/workspace.hpp"
#include "convert.hpp"
#include "layer_track.hpp"
#include "window.hpp"

namespace kvq::inline v0_1 {

namespace detail {
struct sequence_access;
}

template <class Cache>
class sequence {
public:
    using backend = typename Cache::backend;
    using window = typename Cache::window;

    sequence(sequence&&) noexcept = default;
    sequence& operator=(sequence&& other) noexcept {
        // Not member by member: vectors would keep the memory resource of the cache that they leave.
        if (this != &other) {
            std::destroy_at(this);
            std::construct_at(this, std::move(other));
        }
        return *this;
    }
    sequence(const sequence&) = delete;  // fork() says what it does

    /// Appends k.tokens tokens to one layer. k: [n][kv_heads][head_dim], v: [n][kv_heads][value_dim]; n may be 0.
    /// O(n), plus the coding of pages that fall behind the recent window.
    template <class K, class V>
    void append(int layer, const token_view<K>& k, const token_view<V>& v) {
        using T = std::remove_const_t<K>;
        static_assert(float_format<T> && std::is_same_v<T, std::remove_const_t<V>>,
                      "kvq::sequence::append: K and V must both be float, float16 or bfloat16");
        check_layer(layer);
        check_input(k, "k", shape().dim(tensor::key));
        check_input(v, "v", shape().dim(tensor::value));
        detail::expect(k.tokens == v.tokens, "k has ", k.tokens, " tokens but v has ", v.tokens);
        detail::layer_track& track = tracks_[static_cast<std::size_t>(layer)];
        check_added(track, k.tokens);
        if (k.tokens == 0) return;
        auto keys = stage<tensor::key>(layer, k.tokens);
        auto values = stage<tensor::value>(layer, k.tokens);
        // A scheme may run out of memory while it codes: until both tensors are coded, only pages behind the last one are new.
        unfinished_append guard{track, {track[tensor::key].pages.size(), track[tensor::value].pages.size()}};
        write<tensor::key>(layer, token_view<const T>(k), keys);
        write<tensor::value>(layer, token_view<const T>(v), values);
        guard.finished = true;
        const int after = track.tokens + k.tokens;
        const int committed = detail::larger(track.committed, geometry().committed(after));
        commit(track, track[tensor::key], after, keys);
        commit(track, track[tensor::value], after, values);
        track.tokens = after;
        track.committed = committed;
    }

    /// out = softmax(q K^T) V for the last q.tokens tokens of the layer, each seeing itself and what came before.
    /// q: [n][q_heads][head_dim], out: [n][q_heads][value_dim], each float, float16 or bfloat16; q_heads is a multiple of kv_heads.
    /// Takes a workspace for the duration of the call; pass one to avoid the allocation.
    void attend(int layer, const query_view& q, const output_view& out) const {
        workspace space(memory());
        attend(layer, q, out, causal{}, serial_executor{}, space);
    }
    template <class Variant>
    void attend(int layer, const query_view& q, const output_view& out, const Variant& variant) const {
        workspace space(memory());
        attend(layer, q, out, variant, serial_executor{}, space);
    }
    template <class Variant, class Executor>
    void attend(int layer, const query_view& q, const output_view& out, const Variant& variant,
                Executor&& executor, workspace& space) const {
        const typename Cache::attention_request one{this, q, out};
        cache_->attend(layer, std::span(&one, 1), variant, executor, space);
    }

    /// Forgets every token from position n on, in all layers (layers shorter than n stay as they are). Where it cuts a coded page,
    /// the tokens that stay need a window page: kvq::out_of_memory if there is none, and nothing has changed then. Trims to
    /// boundaries of pages and within `rollback` need none.
    void trim(int n) {
        detail::expect(n >= 0 && n <= tokens(), "cannot trim to ", n, " tokens: the sequence holds ",
                       tokens());
        std::pmr::vector<trim_plan> plans(memory());
        plans.reserve(tracks_.size());
        for (std::size_t layer = 0; layer < tracks_.size(); ++layer)
            plans.push_back(plan_trim(tracks_[layer], static_cast<int>(layer), n));
        for (std::size_t layer = 0; layer < tracks_.size(); ++layer)
            apply_trim(tracks_[layer], n, plans[layer]);
    }

    /// Bytes that appending n tokens to every layer takes from the pool at most: while so many are left of `byte_budget`, it cannot
    /// run out of it. (It frees pages as well, which is not counted.) O(layers), and the pages that are added.
    std::size_t append_bytes(int n) const {
        std::size_t bytes = 0;
        for (const detail::layer_track& track : tracks_) {
            check_added(track, n);
            if (n > 0) bytes += needed_bytes<tensor::key>(track, n) + needed_bytes<tensor::value>(track, n);
        }
        return bytes;
    }

    /// A sequence with the same tokens that shares every page.
    [[nodiscard]] sequence fork() const { return sequence(*this, 0); }

    /// Tokens of one layer.
    [[nodiscard]] int tokens(int layer) const {
        check_layer(layer);
        return tracks_[static_cast<std::size_t>(layer)].tokens;
    }
    /// Tokens of the longest layer.
    [[nodiscard]] int tokens() const noexcept {
        int n = 0;
        for (const detail::layer_track& track : tracks_) n = detail::larger(n, track.tokens);
        return n;
    }

    /// Writes x^ of tokens [first, first + out.tokens) of one layer's K or V to out: [tokens][kv_heads][dim].
    /// T: float, float16 or bfloat16; x^ is computed in float and rounded once.
    template <float_format T>
    void decode(int layer, tensor role, int first, const token_view<T>& out) const {
        check_layer(layer);
        const int held = tracks_[static_cast<std::size_t>(layer)].tokens;
        detail::expect(first >= 0 && out.tokens >= 0 && out.tokens <= held && first <= held - out.tokens,
                       "cannot decode ", out.tokens, " tokens from ", first, " on of layer ", layer,
                       ": it holds ", held);
        detail::expect(out.heads == shape().kv_heads && out.dim == shape().dim(role), "out is ", out.heads,
                       " x ", out.dim, " but blocks are ", shape().kv_heads, " x ", shape().dim(role));
        detail::expect(out.data != nullptr || out.tokens == 0, "out has no data for ", out.tokens, " tokens");
        role == tensor::key ? decode_tokens<tensor::key>(layer, first, out)
                            : decode_tokens<tensor::value>(layer, first, out);
    }

    [[nodiscard]] usage_report usage() const {
        usage_report u;
        u.workspace = scratch_.capacity() * sizeof(float);
        u.bookkeeping = tracks_.capacity() * sizeof(detail::layer_track);
        for (const detail::layer_track& track : tracks_) {
            u.tokens = detail::larger(u.tokens, track.tokens);
            for (const tensor role : {tensor::key, tensor::value}) {
                const detail::page_table& table = track[role];
                u.bookkeeping += (table.pages.capacity() + table.originals.capacity()) * sizeof(page_ref);
                if (table.sink) count_page(*table.sink, detail::smaller(track.tokens, geometry().sinks), u);
                for (std::size_t i = 0; i < table.pages.size(); ++i)
                    count_page(*table.pages[i],
                               detail::smaller(page_tokens(),
                                               track.tokens - geometry().first_token(static_cast<int>(i))),
                               u);
                int i = table.first_original();
                for (const page_ref& p : table.originals) {
                    if (p.get() == table.pages[static_cast<std::size_t>(i++)].get()) continue;
                    u.rollback += p->bytes;
                    u.bookkeeping += sizeof(page);
                }
            }
        }
        u.bytes = u.coded + u.window + u.rollback + u.bookkeeping + u.workspace;
        return u;
    }

    /// The pages of one layer, as attention walks them. Valid until the sequence changes.
    [[nodiscard]] layer_pages pages(int layer) const {
        check_layer(layer);
        const detail::layer_track& track = tracks_[static_cast<std::size_t>(layer)];
        const detail::page_table &k = track[tensor::key], &v = track[tensor::value];
        return {geometry(), track.tokens, k.sink.get(), v.sink.get(), k.pages.data(), v.pages.data()};
    }

private:
    friend Cache;
    friend struct detail::sequence_access;

    explicit sequence(Cache& cache) : cache_(&cache), tracks_(memory()), scratch_(memory()) {
        tracks_.reserve(static_cast<std::size_t>(shape().layers));
        for (int i = 0; i < shape().layers; ++i)
            tracks_.emplace_back(memory(), cache.template target_format<tensor::key>(i),
                                 cache.template target_format<tensor::value>(i));
        reserve_scratch();
    }
    sequence(const sequence& other, int) : cache_(other.cache_), tracks_(memory()), scratch_(memory()) {
        tracks_.reserve(other.tracks_.size());
        for (const detail::layer_track& track : other.tracks_) tracks_.emplace_back(track, memory());
        reserve_scratch();
    }
    void reserve_scratch() {
        scratch_.resize(
            static_cast<std::size_t>(page_tokens()) *
            static_cast<std::size_t>(detail::larger(shape().dim(tensor::key), shape().dim(tensor::value))));
    }

    const cache_shape& shape() const noexcept { return cache_->shape(); }
    page_geometry geometry() const noexcept { return cache_->geometry(); }
    int page_tokens() const noexcept { return cache_->options().page_tokens; }
    int rollback() const noexcept { return cache_->options().rollback; }
    std::pmr::memory_resource* memory() const noexcept { return cache_->pool().memory(); }

    void check_layer(int layer) const {
        const auto layers = static_cast<int>(tracks_.size());  // none after a move
        detail::expect(layer >= 0 && layer < layers, "layer ", layer, " is not among the ", layers,
                       " layers of the cache");
    }
    void check_attention(int layer, const query_view& q, const output_view& out) const {
        const int held = tokens(layer);
        detail::expect(q.heads >= 1 && q.heads % shape().kv_heads == 0, "q has ", q.heads,
                       " heads, not a multiple of the ", shape().kv_heads, " kv heads");
        detail::expect(q.dim == shape().dim(tensor::key), "q has head_dim ", q.dim, " but keys have ",
                       shape().dim(tensor::key));
        detail::expect(
            out.tokens == q.tokens && out.heads == q.heads && out.dim == shape().dim(tensor::value),
            "out is ", out.tokens, " x ", out.heads, " x ", out.dim, " but must be ", q.tokens, " x ",
            q.heads, " x ", shape().dim(tensor::value));
        detail::expect(q.tokens >= 0 && q.tokens <= held, "q has ", q.tokens, " tokens but layer ", layer,
                       " holds ", held);
        detail::expect(q.data != nullptr || q.tokens == 0, "q has no data for ", q.tokens, " tokens");
        detail::expect(out.data != nullptr || q.tokens == 0, "out has no data for ", out.tokens, " tokens");
    }
    void check_added(const detail::layer_track& track, int n) const {
        detail::expect(n >= 0 && n <= (std::numeric_limits<int>::max)() - track.tokens - page_tokens(),
                       "a sequence of ", track.tokens, " tokens cannot take ", n, " more");
    }
    template <class T>
    void check_input(const token_view<T>& x, const char* name, int dim) const {
        detail::expect(x.tokens >= 0, name, " has ", x.tokens, " tokens");
        detail::expect(x.heads == shape().kv_heads && x.dim == dim, name, " is ", x.heads, " heads x ", x.dim,
                       " channels but the cache holds ", shape().kv_heads, " x ", dim);
        detail::expect(x.data != nullptr || x.tokens == 0, name, " has no data for ", x.tokens, " tokens");
    }

    template <tensor Role>
    page_ref new_page(int format, int tokens) {
        const std::size_t bytes = cache_->template page_bytes<Role>(format, tokens);
        page_ref p = cache_->pool().allocate(bytes, format, tokens);
        if (format == 0) std::memset(p->data(), 0, bytes);
        return p;
    }

    void count_page(const page& p, int used, usage_report& u) const {
        u.bookkeeping += sizeof(page);
        u.not_finite += p.not_finite;
        if (p.format == 0) {
            u.window += p.bytes;
            u.slack +=
                p.bytes - p.bytes / static_cast<std::size_t>(p.tokens) * static_cast<std::size_t>(used);
        } else {
            u.coded += p.bytes;
        }
    }

    // ---- append: first everything that can fail, then everything that cannot ----

    /// New pages that an append will need, in the order in which it takes them.
    struct staged_pages {
        page_ref sink;                     // new, or the copy of a shared one
        page_ref last;                     // copy of a shared last page that will be written
        page_ref temporary;                // window page for pages that are coded at once
        std::pmr::vector<page_ref> fresh;  // window pages that stay
        std::pmr::vector<page_ref> coded;
        explicit staged_pages(std::pmr::memory_resource* memory) : fresh(memory), coded(memory) {}
    };

    /// Forgets the pages that an append has added, unless it is finished.
    struct unfinished_append {
        detail::layer_track& track;
        std::size_t pages[2];  // before
        bool finished = false;
        ~unfinished_append() {
            if (finished) return;
            for (int role = 0; role < 2; ++role) {
                auto& list = track.tables[role].pages;
                list.erase(list.begin() + static_cast<std::ptrdiff_t>(pages[role]), list.end());
                if (track.tokens == 0) track.tables[role].sink = page_ref{};
            }
        }
    };

    /// Is the original of page i kept when the sequence holds n tokens?
    bool keeps_original(int i, int n) const noexcept { return geometry().commit_at(i) > n - rollback(); }

    /// Pages that an append needs before it frees any.
    struct page_needs {
        bool sink, last, temporary;
        int fresh, coded;
    };
    page_needs needs(const detail::layer_track& track, tensor role, int added) const {
        const detail::page_table& table = track[role];
        const page_geometry g = geometry();
        const int before = track.tokens, after = before + added;
        const int pages_before = g.pages(before), pages_after = g.pages(after);
        const int committed = detail::larger(track.committed, g.committed(after));
        const bool writes_last = pages_before > 0 && before < g.first_token(pages_before);
        page_needs n{before < g.sinks && (!table.sink || table.sink.shared()),
                     writes_last && table.pages.back().shared(), false, pages_after - pages_before, 0};
        if (table.target == 0) return n;
        for (int i = pages_before; i < detail::smaller(pages_after, committed); ++i)
            if (!keeps_original(i, after)) {
                n.temporary = true;
                --n.fresh;
            }
        n.coded = committed - track.committed;
        return n;
    }
    template <tensor Role>
    std::size_t needed_bytes(const detail::layer_track& track, int added) const {
        const page_needs n = needs(track, Role, added);
        const auto bytes = [&](int format, int tokens) {
            return page_pool::allocation(cache_->template page_bytes<Role>(format, tokens));
        };
        return (n.sink ? bytes(0, geometry().sinks) : 0) +
               static_cast<std::size_t>(n.last + n.temporary + n.fresh) * bytes(0, page_tokens()) +
               static_cast<std::size_t>(n.coded) * bytes(track[Role].target, page_tokens());
    }

    template <tensor Role>
    staged_pages stage(int layer, int added) {
        detail::layer_track& track = tracks_[static_cast<std::size_t>(layer)];
        detail::page_table& table = track[Role];
        const page_needs n = needs(track, Role, added);
        staged_pages staged(memory());
        if (n.sink) staged.sink = new_page<Role>(0, geometry().sinks);
        if (n.last) staged.last = new_page<Role>(0, page_tokens());
        if (n.temporary) staged.temporary = new_page<Role>(0, page_tokens());
        staged.fresh.reserve(static_cast<std::size_t>(n.fresh));
        for (int i = 0; i < n.fresh; ++i) staged.fresh.push_back(new_page<Role>(0, page_tokens()));
        staged.coded.reserve(static_cast<std::size_t>(n.coded));
        for (int i = 0; i < n.coded; ++i) staged.coded.push_back(new_page<Role>(table.target, page_tokens()));
        table.pages.reserve(
            detail::table_capacity(static_cast<std::size_t>(geometry().pages(track.tokens + added))));
        if (table.target != 0) table.originals.reserve(detail::originals_capacity(rollback(), page_tokens()));
        return staged;
    }

    template <tensor Role, class T>
    void write(int layer, const token_view<const T>& source, staged_pages& staged) {
        detail::layer_track& track = tracks_[static_cast<std::size_t>(layer)];
        detail::page_table& table = track[Role];
        const page_geometry g = geometry();
        const int dim = shape().dim(Role), heads = shape().kv_heads;
        const int before = track.tokens, after = before + source.tokens;
        const int pages_before = g.pages(before), pages_after = g.pages(after);
        const int committed = detail::larger(track.committed, g.committed(after));
        const bool codes = table.target != 0;

        if (before < g.sinks) {
            if (staged.sink) {
                if (table.sink)
                    detail::copy_tokens<window>(*table.sink, *staged.sink, Role, dim, heads, before);
                table.sink = std::move(staged.sink);
            }
            detail::write_tokens<backend, window>(*table.sink, Role, dim, source, 0,
                                                  detail::smaller(g.sinks, after) - before, before);
        }
        if (staged.last) {
            detail::copy_tokens<window>(*table.pages.back(), *staged.last, Role, dim, heads,
                                        before - g.first_token(pages_before - 1));
            table.pages.back() = std::move(staged.last);
        }
        std::size_t next_fresh = 0;
        const bool writes_last = pages_before > 0 && before < g.first_token(pages_before);
        const int first_written = writes_last ? pages_before - 1 : pages_before;
        for (int i = detail::smaller(track.committed, first_written); i < pages_after; ++i) {
            const bool commit = codes && i >= track.committed && i < committed;
            if (i < first_written && !commit) continue;
            if (i >= pages_before) {
                if (codes && i < committed && !keeps_original(i, after)) {
                    page_ref& coded = staged.coded[static_cast<std::size_t>(i - track.committed)];
                    detail::code_tokens<backend, window>(cache_->template table<Role>(), shape(), layer,
                                                         source, g.first_token(i) - before, *staged.temporary,
                                                         *coded, scratch_.data());
                    table.pages.push_back(coded);
                    continue;
                }
                table.pages.push_back(std::move(staged.fresh[next_fresh++]));
            }
            page& slot = *table.pages[static_cast<std::size_t>(i)];
            if (i >= first_written) {
                const int first = g.first_token(i);
                const int from = detail::larger(first, before),
                          to = detail::smaller(first + page_tokens(), after);
                detail::write_tokens<backend, window>(slot, Role, dim, source, from - before, to - from,
                                                      from - first);
            }
            if (commit)
                convert<Role>(layer, slot, *staged.coded[static_cast<std::size_t>(i - track.committed)]);
        }
    }

    /// Puts the coded pages into their places; n: tokens that the sequence holds then. Cannot fail.
    void commit(const detail::layer_track& track, detail::page_table& table, int n, staged_pages& staged) {
        table.drop_originals(
            table.useless_originals(track.committed, [&](int i) { return keeps_original(i, n); }));
        for (std::size_t j = 0; j < staged.coded.size(); ++j) {
            const int i = track.committed + static_cast<int>(j);
            page_ref& slot = table.pages[static_cast<std::size_t>(i)];
            if (slot.get() == staged.coded[j].get()) continue;  // coded at once
            if (keeps_original(i, n)) table.keep_original(i, std::move(slot));
            slot = std::move(staged.coded[j]);
        }
    }

    /// A page in the format of `to`.
    template <tensor Role>
    void convert(int layer, const page& from, page& to) {
        detail::convert_page<backend, window>(cache_->template table<Role>(), shape(), layer, from, to,
                                              scratch_.data());
    }

    // ---- trim ----

    struct trim_plan {
        int committed = 0;      // afterwards
        page_ref survivors[2];  // window pages for what is left of a coded page
    };

    trim_plan plan_trim(const detail::layer_track& track, int layer, int n) {
        trim_plan plan;
        plan.committed = track.committed;
        if (n >= track.tokens) return plan;
        const page_geometry g = geometry();
        // Pages whose originals are kept go back to them, as far as a sequence of n tokens would hold them uncoded.
        const int at_most = detail::smaller(track.committed, g.pages(n));
        int committed = track.committed;
        while (committed > g.committed(n) && can_restore(track, committed - 1)) --committed;
        plan.committed = detail::smaller(committed, at_most);
        const int last = g.pages(n) - 1;
        const bool cuts = last >= 0 && n < g.first_token(last + 1);
        if (cuts && last < plan.committed) {
            plan.committed = last;
            plan.survivors[0] = survivor<tensor::key>(track, layer, last);
            plan.survivors[1] = survivor<tensor::value>(track, layer, last);
        }
        return plan;
    }

    /// Do both tables hold a window version of coded page i?
    bool can_restore(const detail::layer_track& track, int i) const {
        const auto has = [&](const detail::page_table& table) {
            return table.pages[static_cast<std::size_t>(i)]->format == 0 || table.has_original(i);
        };
        return has(track[tensor::key]) && has(track[tensor::value]);
    }

    template <tensor Role>
    page_ref survivor(const detail::layer_track& track, int layer, int i) {
        const page& coded = *track[Role].pages[static_cast<std::size_t>(i)];
        if (coded.format == 0) return {};
        page_ref p = new_page<Role>(0, page_tokens());
        convert<Role>(layer, coded, *p);
        return p;
    }

    void apply_trim(detail::layer_track& track, int n, trim_plan& plan) {
        if (n >= track.tokens) return;
        const int pages_left = geometry().pages(n);
        for (const tensor role : {tensor::key, tensor::value}) {
            detail::page_table& table = track[role];
            page_ref& survivor_page = plan.survivors[static_cast<int>(role)];
            if (survivor_page) {
                table.pages[static_cast<std::size_t>(plan.committed)] = std::move(survivor_page);
            } else {
                for (int i = plan.committed; i < track.committed; ++i)
                    if (page_ref* const original = table.original(i))
                        table.pages[static_cast<std::size_t>(i)] = std::move(*original);
            }
            while (!table.originals.empty() && table.originals_end > plan.committed) {
                table.originals.pop_back();
                --table.originals_end;
            }
            table.pages.erase(table.pages.begin() + pages_left, table.pages.end());
            if (n == 0) table.sink = page_ref{};
        }
        track.tokens = n;
        track.committed = plan.committed;
    }

    template <tensor Role, class T>
    void decode_tokens(int layer, int first, const token_view<T>& out) const {
        const layer_pages all = pages(layer);
        const int dim = shape().dim(Role);
        const auto longest = static_cast<std::size_t>(detail::larger(page_tokens(), geometry().sinks));
        std::pmr::vector<float> values(longest * static_cast<std::size_t>(dim), memory());
        // Pages that are wanted in part are decoded here first.
        std::pmr::vector<T> some(memory());
        const detail::default_arithmetic arithmetic;
        for (int e = 0; e < all.entries(); ++e) {
            const layer_pages::entry entry = all.at(e);
            const int from = detail::larger(first, entry.first_token);
            const int to = detail::smaller(first + out.tokens, entry.first_token + entry.tokens);
            if (from >= to) continue;
            const page& p = Role == tensor::key ? *entry.keys : *entry.values;
            const block_shape shape_of{Role, p.tokens, dim};
            cache_->template table<Role>().visit(p.format, [&](const auto& scheme) {
                const std::size_t bytes = scheme.block_bytes(shape_of);
                const bool all_of_it = to - from == p.tokens;
                if (!all_of_it) some.resize(values.size());
                for (int h = 0; h < shape().kv_heads; ++h) {
                    T* const to_out = out.at(from - first, h);
                    backend::decode(
                        scheme, shape_of, block_id{layer, h}, p.data() + bytes * static_cast<std::size_t>(h),
                        all_of_it ? to_out : some.data(), all_of_it ? out.token_stride : dim, values.data());
                    if (all_of_it) continue;
                    for (int t = from; t < to; ++t)
                        std::copy_n(some.data() + (t - entry.first_token) * dim, dim,
                                    to_out + (t - from) * out.token_stride);
                }
            });
        }
    }

    Cache* cache_;
    std::pmr::vector<detail::layer_track> tracks_;
    std::pmr::vector<float> scratch_;
};

namespace detail {

/// The inside of a sequence, for the operations that live in headers of their own: requantizing, saving, restoring.
struct sequence_access {
    template <class Sequence>
    static auto& tracks(Sequence& s) {
        expect(!s.tracks_.empty(), "a sequence that was moved from has no layers");
        return s.tracks_;
    }
    template <class Cache>
    static Cache& cache(const sequence<Cache>& s) noexcept {
        return *s.cache_;
    }
};

}  // namespace detail
}  // namespace kvq::inline v0_1
