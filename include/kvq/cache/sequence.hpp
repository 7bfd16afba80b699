// A sequence: the K and V of one token stream, layer by layer.
//
//   prefill  a chunk of new tokens with their queries: attention over the chunk in 16 bit, then commit
//   append   new tokens without queries, or one token before attend
//   attend   fused attention over the present pages
//   append_draft, keep   a drafted tree of tokens, and the path of it that was accepted
//   trim     remove every token from a position on
//   fork     a second sequence that shares all pages; a shared page is copied before it is written
//   erase, shift, splice   remove tokens from the middle, move keys, append tokens of another sequence (cache/rearrange.hpp)
//
// New tokens go to 16-bit pages; a page that falls behind the recent window is quantized (committed). The pages depend only on
// the tokens, not on the sizes of the chunks, as long as trims reach back at most cache_options::rollback tokens: such trims
// restore 16-bit copies. A deeper trim into a quantized page hides the tokens that it cuts; the other tokens keep their codes, unless less
// than cache_options::repack of the page is left.
// Guarantees: arguments are checked and memory is allocated before anything changes (strong exception guarantee).
// Thread safety: const members may run together; one writer per sequence; different sequences are independent.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <span>

#include "draft.hpp"
#include "repack.hpp"
#include "usage_report.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {
struct sequence_access;
}

class sequence {
public:
    sequence(sequence&&) noexcept = default;
    sequence& operator=(sequence&& other) noexcept {
        // Assignment member by member would keep the memory resource of the former cache.
        if (this != &other) {
            std::destroy_at(this);
            std::construct_at(this, std::move(other));
        }
        return *this;
    }
    sequence(const sequence&) = delete;  // use fork()

    /// One call for each layer of a prompt's chunk, or of a decode step: appends k.tokens tokens and computes
    /// out = softmax(q K^T) V for the last q.tokens of them. Attention reads the chunk, and all tokens that were 16 bit before it, in
    /// 16 bit; pages that fall behind the recent window are committed afterwards. Any other way to cut the tokens into chunks gives
    /// the same pages. Shapes and types: as for append() and attend(); q.tokens may be less than k.tokens.
    /// Memory: during the call, one layer's chunk in 16 bit (prefill_bytes()), and the workspace.
    void prefill(int layer, const input_view& k, const input_view& v, const query_view& q,
                 const output_view& out) {
        workspace space(memory());
        prefill(layer, k, v, q, out, causal{}, serial_executor{}, space);
    }
    void prefill(int layer, const input_view& k, const input_view& v, const query_view& q,
                 const output_view& out, const mods_view& mods, executor_view executor, workspace& space) {
        const prefill_request one{this, k, v, q, out, {}};
        cache_->prefill(layer, std::span(&one, 1), mods, executor, space);
    }

    /// Appends k.tokens tokens to one layer. k: [n][kv_heads][head_dim], v: [n][kv_heads][value_dim]; n may be 0.
    /// For tokens without queries: an import, or a draft. After an append of several tokens, attend() reads pages of that chunk that
    /// are already quantized; prefill() reads them in 16 bit. O(n), plus the quantizing of pages that fall behind the
    /// recent window.
    void append(int layer, const input_view& k, const input_view& v) {
        check_chunk(layer, k, v);
        if (k.tokens == 0) return;
        detail::chunk added = new_chunk(layer, k.tokens, detail::chunk_pages::at_once);
        added.stage();
        added.write(k, v, scratch_.data());
        for (int i = 0; i < added.jobs(); ++i) added.quantize(i, scratch_.data());
        added.commit();
    }

    /// Appends k.tokens drafted tokens to one layer; at most 64 drafted tokens wait at a time. They stay 16 bit, and the pages of the
    /// accepted tokens stay as they are, until keep(). attend() sees them: under a token_tree{tokens(layer) before the draft, parents} as
    /// mask, or as a chain without. Further calls make the draft longer, level by level. While a layer has a draft, all other
    /// changes are refused but trim() to the accepted tokens or fewer, and an erase() to the end that is such a
    /// trim. k and v: as for append(). O(k.tokens)
    void append_draft(int layer, const input_view& k, const input_view& v) {
        check_rows(layer, k, v);
        detail::page_table& track = tracks_[static_cast<std::size_t>(layer)];
        detail::expect(k.tokens <= detail::most_drafted - track.draft, "a draft has at most ",
                       detail::most_drafted, " tokens: layer ", layer, " holds ", track.draft,
                       " and cannot take ", k.tokens, " more");
        if (k.tokens > 0) detail::append_draft(*cache_, track, k, v);
    }
    /// Accepts the drafted tokens path[0] < path[1] < ..., numbers within the draft (a path of token_tree::is_path()), and removes the others,
    /// in every layer that has a draft. The sequence is then, bit for bit, what appending the accepted tokens instead of the
    /// draft would have given: pages, bytes, usage. Needs the memory of that append() while the draft is still held.
    void keep(std::span<const int> path) {
        int drafted = 0, fewest = detail::most_drafted;
        for (const detail::page_table& track : tracks_) {
            drafted = detail::larger(drafted, track.draft);
            if (track.draft > 0) fewest = detail::smaller(fewest, track.draft);
        }
        const int most = drafted > 0 ? fewest : 0;
        for (std::size_t i = 0; i < path.size(); ++i)
            detail::expect(path[i] >= 0 && path[i] < most && (i == 0 || path[i] > path[i - 1]), "token ",
                           path[i], " at place ", i, " of a path through a draft of ", most,
                           " tokens: a path ascends from 0 on");
        if (drafted == 0) return;
        detail::kept_drafts kept(*cache_, tracks_);
        kept.append(path, scratch_.data());
        kept.commit();
    }

    /// out = softmax(q K^T) V for the last q.tokens tokens of the layer; each token attends to itself and all tokens before it.
    /// q: [n][q_heads][head_dim], out: [n][q_heads][value_dim], each float, float16 or bfloat16; q_heads is a multiple of kv_heads.
    /// Takes a workspace for the duration of the call; pass one to avoid the allocation.
    void attend(int layer, const query_view& q, const output_view& out) const {
        workspace space(memory());
        attend(layer, q, out, causal{}, serial_executor{}, space);
    }
    void attend(int layer, const query_view& q, const output_view& out, const mods_view& mods) const {
        workspace space(memory());
        attend(layer, q, out, mods, serial_executor{}, space);
    }
    void attend(int layer, const query_view& q, const output_view& out, const mods_view& mods,
                executor_view executor, workspace& space) const {
        const attention_request one{this, q, out, {}};
        cache_->attend(layer, std::span(&one, 1), mods, executor, space);
    }

    /// Removes every token from position n on, in all layers (layers shorter than n are unchanged). A trim of at most `rollback`
    /// tokens restores the sequence as it was before those tokens. Where a deeper trim cuts a quantized page, the remaining tokens
    /// keep their codes and the page keeps its bytes, unless less than cache_options::repack of it is left: then these tokens are quantized
    /// once more, in a shorter page. The next tokens begin a new page. Needs no memory: without any, nothing is repacked. O(spans).
    void trim(int n) {
        detail::expect(n >= 0 && n <= tokens(), "cannot trim to ", n, " tokens: the sequence holds ",
                       tokens());
        for (const detail::page_table& track : tracks_)
            detail::expect(n <= track.tokens - track.draft || n >= track.tokens || track.draft == 0,
                           "cannot trim to ", n, " tokens: the draft of a layer is tokens ",
                           track.tokens - track.draft, " to ", track.tokens, ", keep() a part of it");
        for (std::size_t layer = 0; layer < tracks_.size(); ++layer) {
            detail::page_table& track = tracks_[layer];
            if (n < track.tokens) track.drop_draft();
            if (track.trim(n, geometry()))
                detail::repacker(*cache_, track, static_cast<int>(layer)).run(true);
        }
    }

    /// Removes tokens [first, last) of all layers (of shorter layers, those that they have); the tokens behind them move to the front,
    /// positions of the keys included: the next token is token tokens(), and its key and query are rotated for this position. Quantized
    /// pages that are cut keep their codes, and their bytes until they show less than cache_options::repack of their tokens: these are then
    /// quantized once more, in shorter pages. The page that is being filled goes on filling, with keys in its rotation. 16-bit copies for
    /// exact trims go: later trims are exact for tokens appended later. Defined in cache/rearrange.hpp, as the next two. O(spans).
    /// Raises kvq::error for a range outside, and when tokens behind it would move in a cache without cache_options::rotary.
    void erase(int first, int last);
    /// Moves the rotary positions of the keys of tokens [first, last) by `by`. Order, masks and score modifiers stay: they count tokens.
    /// Otherwise as erase().
    void shift(int first, int last, std::int64_t by);
    /// Appends tokens [first, last) of `other`, a sequence of the same cache (or this one): shares the pages, moved to the new positions.
    /// All layers must have the same number of tokens, in both. Commits what is not committed of this sequence, whatever
    /// the recent window, since quantized pages may follow; 16-bit pages of `other` stay 16 bit. Otherwise as erase().
    void splice(const sequence& other, int first, int last);

    /// Upper bound of the bytes that append() of n tokens to every layer takes from the pool: with so many bytes left of
    /// `byte_budget`, append() cannot exceed the budget. (append() frees pages as well; the bound counts only freed pages that the
    /// same append() took.) O(layers + added pages).
    [[nodiscard]] std::size_t append_bytes(int n) const {
        return added_bytes(n, detail::chunk_pages::at_once);
    }
    /// The same for prefill() of a chunk of n tokens in every layer, one layer after the other. Includes one layer's chunk in 16 bit.
    [[nodiscard]] std::size_t prefill_bytes(int n) const {
        return added_bytes(n, detail::chunk_pages::after_attend);
    }
    /// The same for a draft of up to n tokens in every layer, appended in any number of calls, and keep() of any path of it. To be asked before
    /// the draft begins. O(n * (layers + added pages))
    [[nodiscard]] std::size_t draft_bytes(int n) const {
        detail::expect(n >= 0 && n <= detail::most_drafted, "a draft has 0 to ", detail::most_drafted,
                       " tokens, not ", n);
        std::size_t most = 0;
        for (int accepted = 1; accepted <= n; ++accepted) {
            std::size_t kept = 0;  // of all layers at once
            for (const detail::page_table& track : tracks_) {
                check_added(track, n);
                check_no_draft(track);
                kept += detail::chunk::needs_of(*cache_, track, accepted, detail::chunk_pages::at_once).taken;
            }
            most = detail::larger(most, kept);
        }
        return most + detail::draft_pages_bytes(*cache_, n);
    }

    /// Gives back what cache::reserve took for this sequence and what no step has used.
    void release_reserved() noexcept { stock_.clear(); }

    /// Gives back the 16-bit copies of quantized pages (usage().rollback). A trim into pages that are quantized now then keeps their
    /// codes, as one by more than `rollback` tokens does; pages that are quantized later have copies again. With fork(), which shares
    /// the pages, a sequence to save or send without copies. O(spans)
    void drop_copies() noexcept {
        for (detail::page_table& track : tracks_) track.drop_all_copies();
    }

    /// A sequence with the same tokens that shares every page.
    [[nodiscard]] sequence fork() const { return {*this, 0}; }

    /// Tokens of one layer.
    [[nodiscard]] int tokens(int layer) const {
        check_layer(layer);
        return tracks_[static_cast<std::size_t>(layer)].tokens;
    }
    /// Tokens of the longest layer.
    [[nodiscard]] int tokens() const noexcept {
        int n = 0;
        for (const detail::page_table& track : tracks_) n = detail::larger(n, track.tokens);
        return n;
    }

    /// Writes x^ of tokens [first, first + out.tokens) of one layer's K or V to out: [tokens][kv_heads][dim].
    /// T: float, float16 or bfloat16; x^ is computed in float and rounded once. Keys that moved are rotated to their new positions.
    void dequantize(int layer, tensor role, int first, const output_view& out) const {
        const int held = tokens(layer);
        detail::expect(first >= 0 && out.tokens >= 0 && out.tokens <= held && first <= held - out.tokens,
                       "cannot dequantize ", out.tokens, " tokens from ", first, " on of layer ", layer,
                       ": it holds ", held);
        detail::expect(out.heads == shape().kv_heads && out.dim == shape().dim(role), "out is ", out.heads,
                       " x ", out.dim, " but blocks are ", shape().kv_heads, " x ", shape().dim(role));
        detail::expect(out.data != nullptr || out.tokens == 0, "out has no data for ", out.tokens, " tokens");
        const layer_pages all = pages(layer);
        const int dim = shape().dim(role);
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
            const format& f = cache_->table(role)[p.format];
            const std::size_t bytes = f.block_bytes(block);
            const bool moved = rotate && entry.shift != 0, all_of_it = !moved && to - from == p.tokens;
            const float_type type = moved ? float_type::fp32 : out.type;
            const std::size_t row = static_cast<std::size_t>(dim) * size_of(type);
            if (!all_of_it) some.resize(longest * row);
            for (int h = 0; h < shape().kv_heads; ++h) {
                f.functions().dequantize(f.scheme(), block, block_id{layer, h},
                                         p.data() + bytes * static_cast<std::size_t>(h), type,
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

    [[nodiscard]] usage_report usage() const {
        usage_report u;
        u.workspace = scratch_.capacity() * sizeof(float);
        u.bookkeeping = tracks_.capacity() * sizeof(detail::page_table);
        for (const detail::page_table& track : tracks_) {
            u.tokens = detail::larger(u.tokens, track.tokens);
            u.repacked += track.repacked;
            u.bookkeeping += track.spans.capacity() * sizeof(page_span);
            for (std::size_t role = 0; role < 2; ++role) {
                track.for_each_page(role, [&](const page& p, int shown) { count_page(p, shown, u); });
                track.for_each_copy(role, [&](const page& copy) {
                    u.rollback += copy.bytes;
                    u.bookkeeping += sizeof(page);
                });
            }
            for (int i = track.committed; i < track.size(); ++i)  // a trim or an erase may have hidden tokens
                for (const tensor role : {tensor::key, tensor::value}) {
                    const page& p = *track[i].pages[static_cast<std::size_t>(role)];
                    u.not_finite -= p.not_finite - detail::held_not_finite(cache_->table(role).window_type(),
                                                                           p, role, shape().dim(role),
                                                                           shape().kv_heads, track[i].tokens);
                }
        }
        u.reserved = stock_.page_bytes() + stock_.list_bytes();
        u.bytes = u.quantized + u.window + u.rollback + u.bookkeeping + u.workspace + u.reserved;
        return u;
    }

    /// The pages of one layer, as attention walks them. Valid until the sequence changes.
    [[nodiscard]] layer_pages pages(int layer) const {
        check_layer(layer);
        const detail::page_table& track = tracks_[static_cast<std::size_t>(layer)];
        return {geometry(), track.tokens, track.spans.data(), track.size()};
    }

private:
    friend class cache;
    friend struct detail::sequence_access;

    explicit sequence(cache& of) : cache_(&of), tracks_(memory()), scratch_(memory()), stock_(memory()) {
        tracks_.reserve(static_cast<std::size_t>(shape().layers));
        for (int i = 0; i < shape().layers; ++i)
            tracks_.emplace_back(memory(), of.target_format(tensor::key, i),
                                 of.target_format(tensor::value, i));
        reserve_scratch();
    }
    sequence(const sequence& other, int)
        : cache_(other.cache_), tracks_(memory()), scratch_(memory()), stock_(memory()) {
        tracks_.reserve(other.tracks_.size());
        for (const detail::page_table& track : other.tracks_) tracks_.emplace_back(track, memory());
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
    std::pmr::memory_resource* memory() const noexcept { return cache_->pool().memory(); }

    void check_layer(int layer) const {
        const auto layers = static_cast<int>(tracks_.size());  // none after a move
        detail::expect(layer >= 0 && layer < layers, "layer ", layer, " is not among the ", layers,
                       " layers of the cache");
    }
    void check_added(const detail::page_table& track, int n) const {
        detail::expect(n >= 0 && n <= (std::numeric_limits<int>::max)() - track.tokens - page_tokens(),
                       "a sequence of ", track.tokens, " tokens cannot take ", n, " more");
    }
    static void check_no_draft(const detail::page_table& track) {
        detail::expect(track.draft == 0, "a layer holds a draft of ", track.draft,
                       " tokens: keep() a part of it first, or trim() to ", track.tokens - track.draft);
    }
    void check_rows(int layer, const input_view& k, const input_view& v) const {
        check_layer(layer);
        check_input(k, "k", shape().dim(tensor::key));
        check_input(v, "v", shape().dim(tensor::value));
        detail::expect(k.tokens == v.tokens, "k has ", k.tokens, " tokens but v has ", v.tokens);
        check_added(tracks_[static_cast<std::size_t>(layer)], k.tokens);
    }
    void check_chunk(int layer, const input_view& k, const input_view& v) const {
        check_rows(layer, k, v);
        check_no_draft(tracks_[static_cast<std::size_t>(layer)]);
    }
    void check_input(const input_view& x, const char* name, int dim) const {
        detail::expect(x.tokens >= 0, name, " has ", x.tokens, " tokens");
        detail::expect(x.heads == shape().kv_heads && x.dim == dim, name, " is ", x.heads, " heads x ", x.dim,
                       " channels but the cache holds ", shape().kv_heads, " x ", dim);
        detail::expect(x.data != nullptr || x.tokens == 0, name, " has no data for ", x.tokens, " tokens");
    }

    detail::chunk new_chunk(int layer, int n, detail::chunk_pages when) noexcept {
        return {*cache_, tracks_[static_cast<std::size_t>(layer)], layer, n, when, &stock_};
    }
    /// Fills the stock for prefill() of n tokens in every layer; strong guarantee.
    void reserve_step(int n);
    std::size_t added_bytes(int n, detail::chunk_pages when) const {
        std::size_t held = 0, most = 0;
        for (const detail::page_table& track : tracks_) {
            check_added(track, n);
            check_no_draft(track);
            if (n == 0) continue;
            const auto needs = detail::chunk::needs_of(*cache_, track, n, when);
            most = detail::larger(most, held + needs.taken);
            held += needs.taken - needs.returned;
        }
        return most;
    }

    void count_page(const page& p, int used, usage_report& u) const {
        u.bookkeeping += sizeof(page);
        u.not_finite += p.not_finite;
        if (p.format == 0) {
            u.window += p.bytes;
            u.slack +=
                p.bytes - p.bytes / static_cast<std::size_t>(p.tokens) * static_cast<std::size_t>(used);
        } else {
            u.quantized += p.bytes;
        }
    }

    cache* cache_;
    resource_vector<detail::page_table> tracks_;
    resource_vector<float> scratch_;
    detail::page_stock stock_;             // of the next step, if it was reserved
    std::optional<detail::chunk> staged_;  // during cache::prefill
};

namespace detail {

/// Request: attention_request or prefill_request.
template <class Request>
attention_items items_of(std::span<const Request> batch, int layer) {
    return {batch.data(), layer, static_cast<int>(batch.size()), [](const void* requests, int of, int i) {
                const Request& r = static_cast<const Request*>(requests)[i];
                return attention_item{r.sequence->pages(of), r.q, r.out, r.mods ? &*r.mods : nullptr};
            }};
}

/// Access to the members of a sequence, for the operations of other headers: requantizing, saving, restoring.
struct sequence_access {
    /// Sequence: const or not.
    template <class Sequence>
    static auto& tracks(Sequence& s) {
        expect(!s.tracks_.empty(), "a sequence that was moved from has no layers");
        for (const page_table& track : s.tracks_) sequence::check_no_draft(track);
        return s.tracks_;
    }
    static kvq::cache& cache(const sequence& s) noexcept { return *s.cache_; }
};

}  // namespace detail

inline sequence cache::new_sequence() { return sequence(*this); }

inline void cache::check_member(const sequence* s, std::size_t i) const {
    detail::expect(s != nullptr && s->cache_ == this, "sequence ", i,
                   " of the batch is not one of this cache");
}

inline std::size_t cache::attention_workspace(int tokens, int q_heads, int q_tokens, int threads,
                                              const mods_view& mods) const {
    detail::expect(
        tokens >= 0 && tokens <= (std::numeric_limits<int>::max)() - options_.page_tokens && q_tokens >= 0 &&
            (q_heads < 1 || q_tokens <= (std::numeric_limits<int>::max)() / q_heads),
        "a workspace for ", q_tokens, " query tokens of ", q_heads, " heads over ", tokens, " tokens");
    detail::expect(q_heads >= 1 && q_heads % shape_.kv_heads == 0, "a workspace for ", q_heads,
                   " query heads, not a multiple of the ", shape_.kv_heads, " kv heads");
    detail::expect(threads >= 1, "a workspace for ", threads, " threads");
    layer_pages pages;
    pages.geometry = geometry();
    pages.tokens = tokens;
    const token_view<float> rows(nullptr, q_tokens, q_heads, shape_.dim(tensor::key));
    const detail::attention_item item{pages, rows, rows, nullptr};
    const detail::attention_items items{&item, 0, 1, [](const void* of, int, int) {
                                            return *static_cast<const detail::attention_item*>(of);
                                        }};
    return detail::attention_batch(keys_, values_, shape_, geometry(), rotations_, items, mods)
        .bytes(threads);
}

inline void cache::attend_items(int layer, const detail::attention_items& items, const mods_view& mods,
                                executor_view executor, workspace& space) const {
    long long rows = 0;
    for (int i = 0; i < items.count; ++i) {
        const query_view q = items(i).q;
        rows += static_cast<long long>(q.tokens) * q.heads;
    }
    detail::expect(rows <= (std::numeric_limits<int>::max)() / 2, "a batch of ", rows, " query rows");
    if (rows == 0) return;
    const int threads = executor.concurrency();
    const detail::attention_batch all(keys_, values_, shape_, geometry(), rotations_, items, mods);
    all.run(layer, executor, threads, space.reserve(all.bytes(threads)));
}

inline void cache::attend(int layer, std::span<const attention_request> batch, const mods_view& mods,
                          executor_view executor, workspace& space) const {
    for (std::size_t i = 0; i < batch.size(); ++i) {
        check_member(batch[i].sequence, i);
        check_attention(layer, batch[i].sequence->tokens(layer), batch[i].q, batch[i].out,
                        batch[i].mods ? *batch[i].mods : mods);
    }
    attend_items(layer, detail::items_of(batch, layer), mods, executor, space);
}

inline void cache::prefill(int layer, std::span<const prefill_request> batch, const mods_view& mods,
                           executor_view executor, workspace& space) {
    for (std::size_t i = 0; i < batch.size(); ++i) {
        const prefill_request& r = batch[i];
        check_member(r.sequence, i);
        for (std::size_t j = 0; j < i; ++j)
            detail::expect(batch[j].sequence != r.sequence, "sequence ", i, " of the batch is sequence ", j,
                           " again");
        r.sequence->check_chunk(layer, r.k, r.v);
        check_attention(layer, r.sequence->tokens(layer) + r.k.tokens, r.q, r.out, r.mods ? *r.mods : mods);
    }
    // Chunks that are not committed put the former state back.
    struct staged_chunks {
        std::span<const prefill_request> batch;
        ~staged_chunks() {
            for (const prefill_request& r : batch) r.sequence->staged_.reset();
        }
    } const undo{batch};
    int jobs = 0;
    long long tokens = 0;
    for (const prefill_request& r : batch) {
        tokens += r.k.tokens;
        if (r.k.tokens == 0) continue;
        detail::chunk& chunk = r.sequence->staged_.emplace(
            r.sequence->new_chunk(layer, r.k.tokens, detail::chunk_pages::after_attend));
        chunk.stage();
        jobs += chunk.jobs();
    }
    const int heads = shape_.kv_heads;
    detail::expect(batch.size() <= static_cast<std::size_t>((std::numeric_limits<int>::max)() / (2 * heads)),
                   "a batch of ", batch.size(), " sequences with ", heads, " kv heads");
    const int writes = static_cast<int>(batch.size()) * 2 * heads;
    const auto write = [&](int i) {
        const prefill_request& r = batch[static_cast<std::size_t>(i / (2 * heads))];
        const tensor role = i % (2 * heads) < heads ? tensor::key : tensor::value;
        if (r.k.tokens > 0) r.sequence->staged_->write_head(role, role == tensor::key ? r.k : r.v, i % heads);
    };
    // Few tokens are written sooner than threads are called.
    if (tokens < 64)
        serial_executor{}.parallel_for(writes, write);
    else
        executor.parallel_for(writes, write);
    for (const prefill_request& r : batch)
        if (r.sequence->staged_) r.sequence->staged_->move_keys(r.sequence->scratch_.data());
    attend_items(layer, detail::items_of(batch, layer), mods, executor, space);
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
    for (const prefill_request& r : batch)
        if (r.sequence->staged_) r.sequence->staged_->commit();
}

}}  // namespace kvq
