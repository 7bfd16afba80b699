// A cache: the shapes, formats and page pool that sequences share.
//
//   kvq::cache cache({.layers = 32, .kv_heads = 8, .head_dim = 128},
//                    {.keys = kvq::make_format<keys>(), .values = kvq::make_format<values>(),
//                     .sinks = 4, .recent = 128});
//   auto sequence = cache.new_sequence();
//
// Formats are values. Caches of all formats have this one type, and a cache takes further formats while it is
// in use.
// Thread safety: every const member and new_sequence() may be called from any thread. A cache outlives its
// sequences.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <span>

#include "../core/executor.hpp"
#include "../core/workspace.hpp"
#include "../format/format_table.hpp"
#include "../page/layer_pages.hpp"
#include "../state/state_layout.hpp"
#include "batch.hpp"
#include "options.hpp"
#include "requantize_request.hpp"

namespace kvq { inline namespace KVQ_COMMON {

class sequence;
class page_list;
namespace detail {
struct attention_items;
}

class cache {
public:
    /// Raises kvq::error when a size is impossible, or when a format is missing, listed twice or unable to
    /// hold such blocks, or when a rotary embedding does not fit a head.
    explicit cache(const cache_shape& shape, const cache_options& options);
    /// Layers of several shapes and formats (cache/layers.hpp). Every listed format must be able to hold
    /// blocks of every layer.
    cache(std::vector<layer> layers, const cache_options& options);
    ~cache();
    cache(const cache&) = delete;
    cache& operator=(const cache&) = delete;

    [[nodiscard]] sequence new_sequence();

    /// Formats are those that sequences get from now on (commit_to); rotary embeddings as they were given.
    const std::vector<layer>& layers() const noexcept { return layers_; }
    int layer_count() const noexcept { return shapes_.count(); }
    /// Raises kvq::error if a layer frees tokens by itself, or reads those of another one or of another text.
    /// who: "a ring".
    void expect_all_tokens(const char* who) const;
    /// Are all layers full attention of one shape?
    bool has_equal_layers() const noexcept { return shapes_.equal(); }
    /// Can sequences be trimmed to any number of tokens? Not where a layer has a window or state.
    bool trims_to_every_token() const noexcept;
    /// The shape of all layers. Raises kvq::error unless they are equal, so that code for equal layers is
    /// never silently wrong.
    const cache_shape& shape() const;
    /// The shape of one layer; its `layers` is the number of all.
    const cache_shape& shape(int layer) const noexcept { return shapes_[layer]; }
    /// The parts of layers with state; null if there are none.
    const kvq::state_layout* state_layout() const noexcept { return state_ ? &*state_ : nullptr; }
    /// Does a layer hold keys and values of its own?
    bool holds_tokens(int layer) const noexcept {
        const layer_kind kind = layers_[static_cast<std::size_t>(layer)].kind;
        return kind != layer_kind::state && kind != layer_kind::shared;
    }
    /// The layer whose keys and values a layer reads: another one for a shared layer, else itself.
    int owner(int layer) const noexcept {
        const kvq::layer& of = layers_[static_cast<std::size_t>(layer)];
        return of.kind == layer_kind::shared ? of.owner : layer;
    }
    /// Raises kvq::error for the format of a page of keys, by its index, that cannot hold those of a layer.
    void expect_fits(int layer, int index) const;
    /// The same for a listed one, and for one in which a latent layer would lose its rotary channels.
    void expect_holds_rotary(int layer, int listed) const;
    /// Raises kvq::error where keys that move by `by` positions turn channels that are values of the layer.
    void expect_values_stay(int layer, std::int64_t by) const;
    /// The tensors of which a layer holds pages: K and V, or K alone, of which a latent layer reads its
    /// values.
    std::span<const tensor> tensors(int layer) const noexcept {
        return detail::tensors_of(layers_[static_cast<std::size_t>(layer)]);
    }
    /// Does a layer take the new tokens of every step? Not one with those of another text.
    bool takes_steps(int layer) const noexcept {
        return holds_tokens(layer) && layers_[static_cast<std::size_t>(layer)].kind != layer_kind::cross;
    }
    /// Can tokens be dropped from a layer (sequence::retain)? Not where their positions say which are seen,
    /// or selected.
    bool retains(int layer) const noexcept {
        const layer_kind kind = layers_[static_cast<std::size_t>(layer)].kind;
        return kind == layer_kind::full || kind == layer_kind::latent;
    }
    /// Do other layers read its keys and values?
    bool is_shared(int layer) const noexcept;
    const cache_options& options() const noexcept { return options_; }
    page_geometry geometry() const noexcept;
    /// With the window of a layer.
    page_geometry geometry(int layer) const noexcept;
    page_pool& pool() noexcept { return pool_; }
    const page_pool& pool() const noexcept { return pool_; }

    /// Formats of pages of K or V: index 0 is the window, listed format i has index i + 1.
    const detail::format_table& table(tensor role) const noexcept;
    /// With the window in place of those that cannot hold the keys of this layer.
    const detail::format_table& table(tensor role, int layer) const noexcept;
    const format& window() const noexcept { return keys_.window(); }
    /// Floats that quantizing a block of any layer takes as scratch.
    std::size_t scratch_floats() const noexcept;
    /// Tokens of a layer of which its keys get a plan; 0: they get none (cache/key_plan.hpp).
    int plan_tokens(int layer) const noexcept;
    /// The plan of keys in format `index`: make(), or with key_statistics::shared what it gave first.
    template <class Make>
    format key_plan(int layer, int index, Make&& make) {
        if (options_.statistics != key_statistics::shared) return make();
        const std::lock_guard making(shared_plans_mutex_);
        format& plan = shared_plans_[{layer, index}];
        if (!plan) plan = make();
        return plan;
    }
    /// A step has failed that was given the shared plan: unless others have it, it is made anew.
    void drop_plan(int layer, int index, const format& plan) noexcept;
    /// How keys of a layer are rotated when they move.
    const detail::rotation_table& rotations() const noexcept { return rotations_; }
    /// Adds one format. Returns its index among the listed formats, which layer_format, requantize_request
    /// and tiers take. A format that is listed already adds nothing: its index is returned. No other call on
    /// the cache or its sequences may run at the same time. Raises kvq::error for a format that cannot hold
    /// such blocks.
    int add_format(tensor role, const format& f);

    /// Makes a listed format that of the pages of sequences that are made from now on, in layers
    /// [first_layer, last_layer). Sequences that exist keep theirs (requantize_request::new_pages changes
    /// it). No other call on the cache may run at the same time. Raises kvq::error for a number that is not
    /// listed, or std::bad_alloc; nothing has changed then.
    void commit_to(tensor role, int listed, int first_layer = 0, int last_layer = requantize_request::all);

    /// Bytes of all pages of all sequences, each counted once.
    [[nodiscard]] std::size_t bytes_in_use() const noexcept { return pool_.bytes_in_use(); }

    /// Bytes that the cache holds for pages: byte_budget if they are allocated up front, else bytes_in_use().
    [[nodiscard]] std::size_t bytes_held() const noexcept { return pool_.bytes_held(); }

    /// Index of the format that a layer's pages are quantized to; 0 if they stay in the window format.
    int target_format(tensor role, int layer) const;

    /// Bytes of data of a layer's page of `tokens` tokens in format `index`.
    [[nodiscard]] std::size_t page_bytes(tensor role, int layer, int index, int tokens) const;
    /// Those of them in the lower planes of formats with two planes.
    [[nodiscard]] std::size_t lower_bytes(tensor role, int layer, int index, int tokens) const;
    /// The same for all layers. Raises kvq::error unless layers are equal.
    [[nodiscard]] std::size_t page_bytes(tensor role, int index, int tokens) const;

    /// Workspace that attend() needs for q_tokens x q_heads queries over a sequence of `tokens`, on `threads`
    /// threads. mods: those of the call, of which only selected_pages and skipped_values take memory (and a
    /// little more for every cut of a sequence). Of the layer that needs most.
    [[nodiscard]] std::size_t attention_workspace(int tokens, int q_heads, int q_tokens = 1, int threads = 1,
                                                  const mods_view& mods = causal{}) const;

    /// Attention of one layer for many sequences at once, of any length and any number of queries. All
    /// threads share one list of tasks, which saves a start and an end per sequence. Outputs are those of
    /// sequence::attend, bit for bit. Takes its scratch from `space`. Raises kvq::error before anything is
    /// written.
    void attend(int layer, std::span<const attention_request> batch, const mods_view& mods,
                executor_view executor, workspace& space) const;

    /// The `best` tokens of an index layer for every query: those with the largest sum over heads of weight *
    /// max(q . k, 0), as lists for listed_tokens. A query is one of the last q.tokens tokens of its sequence,
    /// and selects of those up to itself; of equal scores the earlier token, NaN last. Drafted tokens are a
    /// chain: in a tree, a list may name tokens of other branches, which token_tree hides from attention.
    /// Scratch from `space`.
    /// Raises kvq::error before anything is written. O(queries * heads * tokens)
    void select(int layer, std::span<const select_request> batch, int best, executor_view executor,
                workspace& space) const;

    /// Takes the memory of a step of many sequences over all layers ahead of it: pages, tables, and `space`
    /// for q_heads query heads on `threads` threads under `mods`. After it, prefill() or append() of
    /// request.tokens tokens in every layer, in any order of the layers, and attend() of request.q_tokens
    /// queries with `space`, take no memory, for one sequence or for the whole batch (select() may). They
    /// still raise kvq::error for bad arguments, and what schemes of your own and encoders that allocate
    /// raise (docs/guide/engine.md). Memory counts in byte_budget and in usage().reserved;
    /// sequence::prefill_bytes() is a lower bound. What is left goes back when the last layer has its tokens;
    /// the next reserve() of the sequence gives back what it did not use, release_reserved() at once. In
    /// between the sequences must not be changed nor forked. Raises kvq::error, kvq::out_of_memory or
    /// std::bad_alloc; nothing is reserved then, but live pages of states may stay. O(sequences * layers +
    /// added pages)
    void reserve(std::span<const step_request> batch, int q_heads, int threads, workspace& space,
                 const mods_view& mods = causal{});

    /// sequence::prefill of one layer for many sequences at once (continuous batching): prompts in chunks of
    /// any length beside sequences that decode one token. Every sequence gets the same pages and outputs as
    /// alone, bit for bit, on any number of threads. Takes scratch from `space`. Raises kvq::error,
    /// kvq::out_of_memory or std::bad_alloc; all sequences are then unchanged, but a chunk that waited for
    /// layers that share it may be committed. A layer that others share keeps its chunk in 16 bit until each
    /// of them has had its prefill(), in any batches, or until its sequence changes otherwise. Those calls
    /// have k and v of 0 tokens, and see the chunk as the owner saw it.
    void prefill(int layer, std::span<const prefill_request> batch, const mods_view& mods,
                 executor_view executor, workspace& space);

    /// Dry run of requantize() on `threads` threads: reports what the whole request will do. Nothing changes.
    /// O(pages).
    [[nodiscard]] requantize_report plan_requantize(const sequence& s, const requantize_request& request,
                                                    int threads = 1) const;
    [[nodiscard]] requantize_report plan_requantize(std::span<const sequence* const> sequences,
                                                    const requantize_request& request, int threads = 1) const;

    /// Changes the format of pages (cache/requantize.hpp). Pages that the given sequences share stay shared.
    /// Raises kvq::error for an impossible request before anything changes. Raises kvq::out_of_memory when
    /// the byte budget has no room for one more page per thread: pages converted until then stay converted,
    /// the other pages are unchanged.
    requantize_report requantize(sequence& s, const requantize_request& request);
    requantize_report requantize(sequence& s, const requantize_request& request,
                                 const requantize_limit& limit);
    requantize_report requantize(std::span<sequence* const> sequences, const requantize_request& request,
                                 const requantize_limit& limit, executor_view executor, workspace& space);

private:
    friend class page_list;
    friend class sequence;

    static const cache_options& checked(const detail::layer_shapes& shapes, const cache_options& options);
    static std::vector<layer> with_formats(std::vector<layer> layers, const cache_options& options);
    static const format& window_of(const cache_options& options);
    void check(tensor role, const format& f, int number) const;
    void check(tensor role, const format& f, int number, int layer) const;
    /// f, or the window if f cannot hold the keys of this layer.
    const format& fitting(int layer, const format& f) const;
    void expect_listed(tensor role, int number) const;
    /// The formats in which attention reads the values of a layer; of one of keys alone, these.
    const detail::format_table& read_values(int layer) const noexcept;
    void check_member(const sequence* s, std::size_t i) const;
    /// held: tokens of the layer, those of the call included.
    void check_attention(int layer, int held, const query_view& q, const output_view& out,
                         const mods_view& mods) const;
    void check_lists(int layer, int held, const query_view& q, const mods_view& mods) const;
    void expect_query_heads(const char* what, int q_heads) const;
    /// Has it keys and values to read?
    void expect_tokens(int layer) const;
    /// Quantizes and commits the chunks that sequences of a batch have staged.
    void commit_staged(std::span<const prefill_request> batch, executor_view executor, workspace& space);
    /// Scratch of one thread that quantizes.
    std::size_t scratch_bytes() const noexcept;
    /// Pages of layers whose keys get a plan wait for it.
    void wait_for_plans() noexcept;
    void attend_items(int layer, const detail::attention_items& items, const mods_view& mods,
                      executor_view executor, workspace& space) const;

    std::vector<layer> layers_;
    std::vector<bool> shared_;  // by layer: do others read its keys and values?
    detail::layer_shapes shapes_;
    std::optional<kvq::state_layout> state_;
    cache_options options_;
    detail::format_table keys_;
    detail::format_table values_;
    // By kv heads and channels, where there are several.
    std::map<std::pair<int, int>, detail::format_table> fitting_keys_;
    // Of layers of keys alone, by channels of keys and values.
    std::map<std::pair<int, int>, detail::format_table> latent_values_;
    detail::rotation_table rotations_;
    std::vector<int> commits_from_;                       // by layer
    std::map<std::pair<int, int>, format> shared_plans_;  // by layer and index of a format
    std::mutex shared_plans_mutex_;
    page_pool pool_;
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "cache-inl.hpp"
#endif
