// Sequences by id and tokens by position, as llama.cpp's memory has them: what a batch adds, and removal,
// copies and shifts of positions.
//
//   kvq::sequence_table table(cache, 8);                                  ids 0 to 7, all empty
//   table.begin({n, positions, id_counts, ids}, q_heads, threads, space);   takes the memory of a step; its
//                                                                           tokens have positions from now on
//   table.prefill(layer, k, v, q, out, mods, threads, space);             once per layer, in any order: rows
//                                                                         of the batch
//   table.end();                                                          the step is complete, or it is
//                                                                         taken back
//
// A token may be in several sequences. Sequences with the same tokens share one kvq::sequence until their
// tokens differ; a token of sequences that do not is held by each of them. It attends as a token of the first
// id that it names. Layers with a window free their pages. What would need a freed token is refused. Layers
// with recurrent state: the engine runs over part_of_step(i), between begin() and end(); removal from the end
// goes to a snapshot, nothing else is removed or moved.
// Contract: positions ascend within a sequence, tokens attend to the tokens before them; gaps are allowed,
// and masks count tokens, not positions. Bad input raises kvq::error before anything changes. Every member
// leaves all as it was when it raises. Not for several threads at once.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "../cache/rearrange.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// The tokens of a step, as rows of its tensors.
struct token_batch {
    int tokens = 0;
    const std::int32_t* positions = nullptr;   ///< [tokens]
    const std::int32_t* id_counts = nullptr;   ///< [tokens], at least 1 each; null: 1 each
    const std::int32_t* const* ids = nullptr;  ///< [tokens][id_counts[i]]
};

class sequence_table {
public:
    static constexpr int most_ids = 1 << 20;  ///< a step takes time and memory for every id
    /// A table for ids 0 to ids - 1. The cache outlives it.
    sequence_table(cache& of, int ids);
    sequence_table(const sequence_table&) = delete;
    sequence_table& operator=(const sequence_table&) = delete;
    ~sequence_table();

    cache& storage() const noexcept { return *cache_; }
    int ids() const noexcept { return static_cast<int>(held_.size()); }
    /// There are ids 0 to n - 1 now, at most most_ids; n < ids(): nothing changes.
    void grow(int n);
    /// Keys can move: copies of parts, removal from the middle and shifts are possible.
    bool can_shift() const noexcept { return cache_->rotations().known() && !cache_->state_layout(); }

    /// Tokens of an id.
    int tokens(int id) const;
    /// The first and the last position of an id; -1 if it has no tokens.
    std::int32_t position_min(int id) const;
    std::int32_t position_max(int id) const;
    /// The positions of an id, ascending; valid until the table changes.
    std::span<const std::int32_t> positions(int id) const;
    /// The sequence of an id; null if it is empty. Valid until the table changes. Other ids may have the same
    /// one.
    const sequence* find(int id) const;
    /// Tokens that are stored, for a limit in tokens: those of pages that sequences share count once, those
    /// of a page that a sequence had to copy when its tokens began to differ count again. Of the first layer
    /// with full attention, or the first with tokens. O(pages log pages)
    [[nodiscard]] std::size_t distinct_tokens() const;
    /// Bytes of pages (cache::bytes_held) and of positions.
    [[nodiscard]] std::size_t bytes() const;

    // ---- steps ----

    /// Begins a step: checks the batch, takes the memory of all layers (cache::reserve, with its arguments
    /// and errors) and gives the tokens their positions, which ascend within each id and follow those it has.
    /// A step that is still open ends first (end(), without its error). O(tokens * ids of a token + sequences
    /// * layers)
    /// With recurrent state, and with windows where a sequence gets more than cache_options::rollback tokens,
    /// the sequence before the step is held until it ends: kvq::budget needs budget_use::cuts of 1 more, and
    /// state_layout::live_bytes() for each sequence.
    void begin(const token_batch& batch, int q_heads, int threads, workspace& space,
               const mods_view& mods = causal{});

    /// One layer of the step: appends k and v, [batch.tokens][kv_heads][dim], and writes the attention of q,
    /// [batch.tokens][q_heads][head_dim], to out and to its log-sum-exps, if it has them; for a layer that
    /// shares those of another one k and v of 0 tokens. Arguments as of cache::prefill. Raises kvq::error for
    /// other shapes or without a step. Takes no memory if the step was begun with these q_heads, at least so
    /// many threads, this workspace and mods that need no more.
    void prefill(int layer, const input_view& k, const input_view& v, const query_view& q,
                 const output_view& out, const mods_view& mods, executor_view executor, workspace& space);

    /// The tokens of the step that go to one sequence: for layers with recurrent state, which the engine runs
    /// itself, over rows of the batch in ascending order.
    struct step_part {
        std::span<const int> rows;
        std::span<const char> wanted;  ///< [rows]: 1 where the output of the row is that of this part
        recurrent_state* state;        ///< null: the cache has none
    };
    int step_tokens() const noexcept { return step_tokens_; }
    int step_parts() const noexcept { return static_cast<int>(parts_.size()); }
    /// Valid until the step ends. Raises kvq::error for a part that does not exist.
    step_part part_of_step(int i) const;

    /// Ends the step. If a layer has not got its tokens, the step is taken back, and kvq::error is raised.
    /// Otherwise the recurrent state has taken the tokens; prompt_ends: as of recurrent_state::advance.
    void end(bool prompt_ends = false);
    /// Takes the step back: its tokens are removed from all layers that have them, and the recurrent state is
    /// the one before. Nothing happens without a step.
    void take_back() noexcept;

    // ---- tokens by position; id -1: every id; positions [first, last), where first < 0 is 0 and last < 0 is
    // infinity ----

    /// Removes tokens; the others keep their positions. From the middle this needs can_shift(). From the end
    /// it is a trim, which takes no memory unless other ids share the tokens; raises kvq::error where a layer
    /// has freed what the next token would see, and where the recurrent state has no snapshot behind the last
    /// token that stays. O(spans)
    void remove(int id, std::int32_t first, std::int32_t last);
    /// Id `to` gets the tokens of `from` as well, behind its own ones. The first one that it gets needs a
    /// position behind its last. A part that does not begin with the first token, or that goes behind others,
    /// needs can_shift().
    void copy(int from, int to, std::int32_t first, std::int32_t last);
    /// Removes all tokens that are not of this id.
    void keep(int id);
    /// Adds `by` to positions, those of the keys included; tokens whose position would be negative are
    /// removed. Needs can_shift(). Raises kvq::error where positions would no longer ascend. Sequences that
    /// shared the tokens keep the former positions.
    void shift(int id, std::int32_t first, std::int32_t last, std::int32_t by);
    /// Positions divided by d > 1 would move every token by another distance: refused.
    void divide(int id, std::int32_t first, std::int32_t last, int d) const;
    /// Removes everything.
    void clear() noexcept;

    /// For reading and restoring: an id, or -1 for all of them (adapters/sequence_state.hpp).
    struct access;

private:
    friend struct access;

    struct entry {
        sequence tokens;
        std::vector<std::int32_t> positions = {};

        explicit entry(sequence s) : tokens(std::move(s)) {}
        int size() const noexcept { return static_cast<int>(positions.size()); }
        /// Tokens with positions [first, last).
        std::pair<int, int> range(std::int32_t first, std::int32_t last) const {
            const auto place = [&](std::int32_t p) {
                return static_cast<int>(std::lower_bound(positions.begin(), positions.end(), p) -
                                        positions.begin());
            };
            const int from = place(detail::larger(first, 0)), to = last < 0 ? size() : place(last);
            return {from, detail::larger(from, to)};
        }
        /// A copy without tokens [from, to), whose other keys stay where they are.
        std::shared_ptr<entry> without(int from, int to) const {
            auto made = fork(*this);
            made->tokens.erase(from, to);
            if (to < size()) made->tokens.shift(from, made->tokens.tokens(), std::int64_t{to} - from);
            made->positions.erase(made->positions.begin() + from, made->positions.begin() + to);
            return made;
        }
    };
    using shared_entry = std::shared_ptr<entry>;

    /// The tokens of a step that go to one sequence.
    struct part {
        shared_entry of;
        std::vector<int> ids;
        std::vector<int> rows;
        std::vector<char> wanted = {};  // whether the row attends here
        int first_query = 0;            // the first of them
        int step =
            1;  // from one row to the next; 0: they do not lie at one distance, or not all queries are wanted
        int before = 0;  // tokens
        std::optional<sequence> former =
            {};  // the sequence before the step, where a trim may not give it back

        bool regular() const noexcept { return step > 0; }
        bool queries() const noexcept { return first_query < static_cast<int>(rows.size()); }
        template <class View>
        View view(View v, int from) const noexcept {
            const std::size_t n = rows.size() - static_cast<std::size_t>(from);
            if (n > 0) {
                const int first = rows[static_cast<std::size_t>(from)];
                if constexpr (std::is_same_v<View, output_view>)
                    v = v.with_lse(v.lse(first, 0), v.lse_stride() * step);
                v.data = v.at(first, 0);
            }
            v.tokens = static_cast<int>(n);
            v.token_bytes *= step;
            return v;
        }
    };

    static shared_entry fork(const entry& e);
    const shared_entry& at(int id) const;
    template <class F>
    void for_each_entry(F&& f) const;
    int tokens_in(int id, std::int32_t first, std::int32_t last) const;
    /// Gives an id, or all, what f makes of its entry; null: the same. Entries that ids share stay shared.
    template <class F>
    void change(int id, F&& f);
    void put(int id, shared_entry e) noexcept;

    void check(const token_batch& b) const;
    /// Refuses a trim of an id to its first n tokens that would leave fewer.
    void check_trim(int id, int n) const;

    /// Ids with the same entry and the same rows make one part. Entries of other ids are forked.
    std::vector<part> parts_of(const token_batch& b) const;

    /// Ends a step that is open.
    void settle() noexcept;
    /// A layer that has not got its tokens; -1: all have them.
    int missing_layer() const noexcept;
    void finish_step(bool prompt_ends) noexcept;
    void forget_step() noexcept;

    cache* cache_;
    std::vector<shared_entry> held_;  // [ids]; null: no tokens
    std::vector<part> parts_;         // of the step
    std::vector<float> gathered_;     // rows of its irregular parts
    std::vector<prefill_request> batch_;
    int step_tokens_ = 0;
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "sequence_table-inl.hpp"
#endif
