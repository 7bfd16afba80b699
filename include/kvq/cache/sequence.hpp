// A sequence: the K and V of one token stream, layer by layer.
//
//   prefill  a chunk of new tokens with their queries: attention over the chunk in 16 bit, then commit
//   append   new tokens without queries, or one token before attend
//   attend   fused attention over the present pages
//   append_draft, keep   a drafted tree of tokens, and the path of it that was accepted
//   trim     remove every token from a position on
//   fork     a second sequence that shares all pages; a shared page is copied before it is written
//   erase, shift, splice   remove tokens from the middle, move keys, append tokens of another sequence
//                          (cache/rearrange.hpp)
//
// New tokens go to 16-bit pages; a page that falls behind the recent window is quantized (committed). The
// pages depend only on the tokens, not on the sizes of the chunks, as long as trims reach back at most
// cache_options::rollback tokens: such trims restore 16-bit copies. A deeper trim into a quantized page hides
// the tokens that it cuts; the other tokens keep their codes, unless less than cache_options::repack of the
// page is left.
// Guarantees: arguments are checked and memory is allocated before anything changes (strong exception
// guarantee).
// Thread safety: const members may run together; one writer per sequence; different sequences are
// independent.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../core/resource_vector.hpp"
#include "../state/recurrent_state.hpp"
#include "chunk.hpp"
#include "page_stock.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {
struct sequence_access;
}

class sequence {
public:
    sequence(sequence&&) noexcept;
    sequence& operator=(sequence&& other) noexcept;
    sequence(const sequence&) = delete;  // use fork()
    ~sequence();

    /// One call for each layer of a prompt's chunk, or of a decode step: appends k.tokens tokens and computes
    /// out = softmax(q K^T) V for the last q.tokens of them. Attention reads the chunk, and all tokens that
    /// were 16 bit before it, in 16 bit; pages that fall behind the recent window are committed afterwards.
    /// Any other way to cut the tokens into chunks gives the same pages. Shapes and types: as for append()
    /// and attend(); q.tokens may be less than k.tokens.
    /// Memory: during the call, one layer's chunk in 16 bit (prefill_bytes()), and the workspace.
    void prefill(int layer, const input_view& k, const input_view& v, const query_view& q,
                 const output_view& out);
    void prefill(int layer, const input_view& k, const input_view& v, const query_view& q,
                 const output_view& out, const mods_view& mods, executor_view executor, workspace& space);

    /// Appends k.tokens tokens to one layer. k: [n][kv_heads][head_dim], v: [n][kv_heads][value_dim]; n may
    /// be 0.
    /// For tokens without queries: an import, or a draft. After an append of several tokens, attend() reads
    /// pages of that chunk that are already quantized; prefill() reads them in 16 bit. O(n), plus the
    /// quantizing of pages that fall behind the recent window.
    void append(int layer, const input_view& k, const input_view& v);

    /// Appends k.tokens drafted tokens to one layer; at most 64 drafted tokens wait at a time. They stay 16
    /// bit, and the pages of the accepted tokens stay as they are, until keep(). attend() sees them: under a
    /// token_tree{tokens(layer) before the draft, parents} as mask, or as a chain without. Further calls make
    /// the draft longer, level by level. While a layer has a draft, all other changes are refused but trim()
    /// to the accepted tokens or fewer, and an erase() to the end that is such a trim. k and v: as for
    /// append(). O(k.tokens)
    void append_draft(int layer, const input_view& k, const input_view& v);
    /// Accepts the drafted tokens path[0] < path[1] < ..., numbers within the draft (a path of
    /// token_tree::is_path()), and removes the others, in every layer that has a draft. The sequence is then,
    /// bit for bit, what appending the accepted tokens instead of the draft would have given: pages, bytes,
    /// usage. Needs the memory of that append() while the draft is still held.
    void keep(std::span<const int> path);

    /// out = softmax(q K^T) V for the last q.tokens tokens of the layer; each token attends to itself and all
    /// tokens before it. q: [n][q_heads][head_dim], out: [n][q_heads][value_dim], each float, float16 or
    /// bfloat16; q_heads is a multiple of kv_heads. Takes a workspace for the duration of the call; pass one
    /// to avoid the allocation.
    void attend(int layer, const query_view& q, const output_view& out,
                const mods_view& mods = causal{}) const;
    void attend(int layer, const query_view& q, const output_view& out, const mods_view& mods,
                executor_view executor, workspace& space) const;

    /// How much attention the tokens get: mass[h * tokens(layer) + t] is the sum of the weights of token t
    /// over all queries and query heads of kv head h. q and mods: as for attend(), without lists, selected
    /// pages and skipped values. Weights as in attend(), 0 where a mask hides the token; NaN in the pages
    /// that a query sees which is not finite, or has such a score. Reads the keys twice, and no values. The
    /// same bits on any number of threads. O(queries * heads * tokens)
    void attention_mass(int layer, const query_view& q, float* mass, const mods_view& mods = causal{}) const;
    void attention_mass(int layer, const query_view& q, float* mass, const mods_view& mods,
                        executor_view executor, workspace& space) const;

    /// The `best` tokens of an index layer for each of the last q.tokens tokens (cache::select). q:
    /// [n][heads][channels], weights: [n][heads], out: [n][best] positions, the best first; -1 where there
    /// are no more.
    void select(int layer, const query_view& q, const float* weights, int best, std::int32_t* out) const;
    void select(int layer, const query_view& q, const float* weights, int best, std::int32_t* out,
                executor_view executor, workspace& space) const;

    /// Removes every token from position n on, in all layers (layers shorter than n are unchanged). A trim of
    /// at most `rollback` tokens restores the sequence as it was before those tokens. Where a deeper trim
    /// cuts a quantized page, the remaining tokens keep their codes and the page keeps its bytes, unless less
    /// than cache_options::repack of it is left: then these tokens are quantized once more, in a shorter
    /// page. The next tokens begin a new page. Needs no memory: without any, nothing is repacked. O(spans).
    /// With layers with state all layers go to token reach(n). Returns n - reach(n): how many tokens before n
    /// must run again.
    /// Raises kvq::error if a layer with a window has freed tokens that the next one would see (trim_limit);
    /// 0 is always possible.
    int trim(int n);
    /// The token to which trim(n) goes: n, or where layers have state the newest snapshot at or before it
    /// (recurrent_state::reach).
    [[nodiscard]] int reach(int n) const noexcept { return state_ ? state_->reach(n) : n; }

    /// The recurrent state of the layers that have it: their parts to read and write in place, advance(),
    /// snapshots. trim() and fork() of the sequence are those of its state as well. Raises kvq::error where
    /// no layer of the cache has state.
    [[nodiscard]] recurrent_state& state();
    [[nodiscard]] const recurrent_state& state() const;
    /// The least n such that the sequence can be trimmed to n, and to every number of tokens above it. It is
    /// 0 unless a layer with a window has freed tokens. Without state, cache_options::rollback tokens less
    /// than the longest length so far are in reach. With state, trims go to snapshots: tokens() + 1 says that
    /// none of these is in reach. While a draft of several tokens waits, it is tokens(). O(layers *
    /// snapshots)
    [[nodiscard]] int trim_limit() const noexcept;
    /// Can it be trimmed to n tokens? O(layers)
    [[nodiscard]] bool can_trim(int n) const noexcept;
    /// Does a layer hold tokens [first, last)? O(sinks)
    [[nodiscard]] bool holds(int layer, int first, int last) const;

    /// Tokens that a layer does not hold any more: [begin, end) behind its sinks, which are the tokens before
    /// `begin`. Empty unless a window has freed some, or retain() has dropped some. O(sinks)
    [[nodiscard]] token_range gap(int layer) const;

    /// Removes tokens [first, last) of all layers (of shorter layers, those that they have); the tokens
    /// behind them move to the front, positions of the keys included: the next token is token tokens(), and
    /// its key and query are rotated for this position. Quantized pages that are cut keep their codes, and
    /// their bytes until they show less than cache_options::repack of their tokens: these are then quantized
    /// once more, in shorter pages. The page that is being filled goes on filling, with keys in its rotation.
    /// 16-bit copies for exact trims go: later trims are exact for tokens appended later. Defined in
    /// cache/rearrange.hpp, as the next two. O(spans).
    /// Raises kvq::error for a range outside, when tokens behind it would move in a cache without
    /// cache_options::rotary, and when a window would then reach tokens that its layer has freed.
    void erase(int first, int last);
    /// Moves the rotary positions of the keys of tokens [first, last) by `by`. Order, masks and score
    /// modifiers stay: they count tokens. Otherwise as erase().
    void shift(int first, int last, std::int64_t by);
    /// Appends tokens [first, last) of `other`, a sequence of the same cache (or this one): shares the pages,
    /// moved to the new positions. All layers must have the same number of tokens, in both. Commits what is
    /// not committed of this sequence, the recent window too, since quantized pages may follow; 16-bit
    /// pages of `other` stay 16 bit. Otherwise as erase().
    void splice(const sequence& other, int first, int last);

    /// Drops all tokens of a layer but those that its kv heads list, as many in each. kept: [kv_heads][count]
    /// positions that ascend and begin with all sinks. They lie side by side in front of the next token then,
    /// and count as the sinks and the tokens [tokens() - count + sinks, tokens()): for dequantize(), masks,
    /// score modifiers and later lists. Keys keep their rotation, so the next token is token tokens() as
    /// before. Pages that every head keeps whole are not touched. Later trims go back to this point at most,
    /// or into the sinks; queries are those of later tokens, or of the last one. Ends hold() for the layer.
    /// Defined in cache/retain.hpp, as the next two. Takes memory for the new pages while it holds the old
    /// ones; strong guarantee. O(held values)
    /// Raises kvq::error for lists out of order, and for layers that are neither full nor latent attention.
    void retain(int layer, std::span<const int> kept, int count);
    /// All tokens of full and latent layers stay 16 bit until retain(), or release(): those of a prompt, so
    /// that only what is kept of it is quantized. (Pages that are quantized already stay so.)
    void hold();
    /// Quantizes what hold() has kept in 16 bit. Raises kvq::out_of_memory or std::bad_alloc; layers that are
    /// not done are held on then.
    void release();

    /// Upper bound of the bytes that append() of n tokens to every layer takes from the pool: with so many
    /// bytes left of `byte_budget`, append() cannot exceed the budget. (append() frees pages as well; the
    /// bound counts only freed pages that the same append() took.) O(layers + added pages).
    [[nodiscard]] std::size_t append_bytes(int n) const;
    /// The same for prefill() of a chunk of n tokens in every layer, one layer after the other. Includes one
    /// layer's chunk in 16 bit.
    [[nodiscard]] std::size_t prefill_bytes(int n) const;
    /// The same for a draft of up to n tokens in every layer, appended in any number of calls, and keep() of
    /// any path of it. To be asked before the draft begins. O(n * (layers + added pages))
    [[nodiscard]] std::size_t draft_bytes(int n) const;

    /// Gives back what cache::reserve took for this sequence and what no step has used.
    void release_reserved() noexcept { stock_.clear(); }

    /// Gives back the 16-bit copies of quantized pages (usage().rollback). A trim into pages that are
    /// quantized now then keeps their codes, as one by more than `rollback` tokens does; pages that are
    /// quantized later have copies again. With fork(), which shares the pages, a sequence to save or send
    /// without copies. O(spans)
    void drop_copies() noexcept;

    /// A sequence with the same tokens that shares every page.
    [[nodiscard]] sequence fork() const;

    /// Tokens of one layer, of its owner if it is shared; of one with state those that it has taken.
    [[nodiscard]] int tokens(int layer) const;
    /// Tokens of the longest layer.
    [[nodiscard]] int tokens() const noexcept;

    /// Writes x^ of tokens [first, first + out.tokens) of one layer's K or V to out: [tokens][kv_heads][dim].
    /// T: float, float16 or bfloat16; x^ is computed in float and rounded once. Keys that moved are rotated
    /// to their new positions.
    void dequantize(int layer, tensor role, int first, const output_view& out) const;

    [[nodiscard]] usage_report usage() const;

    /// The pages of one layer, as attention walks them. Valid until the sequence changes.
    [[nodiscard]] layer_pages pages(int layer) const;

private:
    friend class cache;
    friend struct detail::sequence_access;

    explicit sequence(cache& of);
    sequence(const sequence& other, int);
    void reserve_scratch();

    const cache_shape& shape(int layer) const noexcept { return cache_->shape(layer); }
    page_geometry geometry() const noexcept { return cache_->geometry(); }
    std::string describe(int layer) const;
    int page_tokens() const noexcept { return cache_->options().page_tokens; }
    std::pmr::memory_resource* memory() const noexcept { return cache_->pool().memory(); }

    void release(int layer);
    void check_layer(int layer) const;
    void check_held(const char* verb, int layer, int first, int last) const;
    /// Does the layer hold what queries from position `first` on see?
    void check_window(int layer, int first) const;
    void check_added(const detail::page_table& table, int n) const;
    /// Refuses `verb` in a cache with state, from which nothing can be removed in the middle.
    void expect_no_state(const char* verb) const;
    static void check_no_draft(const detail::page_table& table);
    /// Of a layer that reads those of another one.
    void check_no_rows(const prefill_request& r, int layer) const;
    void check_rows(int layer, const input_view& k, const input_view& v) const;
    void check_chunk(int layer, const input_view& k, const input_view& v) const;
    void check_input(const input_view& x, const char* name, int layer, tensor role) const;

    detail::chunk new_chunk(int layer, int n, detail::chunk_pages when) noexcept;
    /// The tokens that a layer reads.
    const detail::page_table& table(int layer) const noexcept {
        return tables_[static_cast<std::size_t>(cache_->owner(layer))];
    }
    /// A chunk of a layer waits for the layers that share it, or no more.
    void set_waits(int owner, bool waits) noexcept;
    /// Is the chunk of a shared layer's owner to be committed after it? Yes, if no other layer waits for it.
    bool waits_alone(int layer) const noexcept;
    /// Commits the chunk that a layer keeps for those that share it, or those of all layers.
    void commit_shared(int layer);
    void commit_shared();
    void commit_waiting(int layer);
    /// The same, if there is memory.
    void try_commit_shared() noexcept;
    /// Commits the spans that are due.
    void commit_due();
    /// Layers whose chunk a step commits first, so that it waits no longer. Unless the step keeps that, the
    /// destructor puts them back as they were. (Meanwhile no page is given back that the chunk had.)
    class ended_waits {
    public:
        ended_waits() = default;
        ended_waits(const ended_waits&) = delete;
        ended_waits& operator=(const ended_waits&) = delete;
        // NOLINTNEXTLINE(bugprone-exception-escape): both tables have the sequence's memory resource
        ~ended_waits();
        /// Before the commit. Layers that do not wait are left out.
        void add(sequence& s, int layer);
        void keep() noexcept { saved_.clear(); }

    private:
        struct layer_before {
            sequence* of;
            int layer;
            detail::page_table table;  // without the pages of the last span, if it takes more tokens
            std::vector<bool> waits;   // by layer of the sequence
        };
        std::vector<layer_before> saved_;
    };
    /// Fills the stock for prefill() of n tokens in every layer; strong guarantee.
    void reserve_step(int n);
    std::size_t added_bytes(int n, detail::chunk_pages when) const;
    /// Of a latent layer: the first channels of its keys.
    void dequantize_values(int layer, int first, const output_view& out) const;

    cache* cache_;
    resource_vector<detail::page_table> tables_;
    resource_vector<float> scratch_;
    detail::page_stock stock_;             // of the next step, if it was reserved
    std::optional<detail::chunk> staged_;  // during cache::prefill
    std::optional<recurrent_state> state_;
    std::uint64_t list_ = 0;  // the last list of sequences that it was in (detail::next_list)
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "sequence-inl.hpp"
#include "sequence_steps-inl.hpp"
#endif
