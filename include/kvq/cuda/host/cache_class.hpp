// The class of a cache that owns its pages; what it promises: cache.hpp. Its members: cache_*.hpp.
//
// Layers of one shape, window and formats are a group (layer_group.hpp): tables, pools and launches are those
// of groups. A cache of equal layers has one. A sequence has pages in every group.
#pragma once

#include <initializer_list>
#include <span>

#include "../../cache/requantize_request.hpp"
#include "../../page/page_changes.hpp"
#include "../../quant/rotation.hpp"
#include "../layout/window_columns.hpp"
#include "begun_step.hpp"
#include "layer_group.hpp"
#include "state_pages.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {
struct cache_access;
struct splice_plan;
struct transfer_access;
}

class cache {
public:
    cache() = default;
    cache(const cache&) = delete;
    cache& operator=(const cache&) = delete;

    /// Once. compiled: what the program has instantiated; the entry with the formats, head_dim, page size and
    /// type is taken.
    status open(const cache_shape& shape, const cache_options& options,
                std::span<const device_format> compiled, cudaStream_t stream);
    /// Layers of several shapes and formats (cache/layers.hpp). Raises kvq::error for an impossible layer.
    /// The pages of a layer are committed to the keys of format formats.key of options.formats and the values
    /// of formats.value. An entry of `compiled` is taken for every shape, with these and the formats of
    /// options.formats that no layer has: those are for requantize() and step_down().
    status open(std::vector<layer> layers, const cache_options& options,
                std::span<const device_format> compiled, cudaStream_t stream);

    /// Keys of a format, made from statistics (widths of channels, feedback), as find_format(name,
    /// tensor::key, statistics) makes the CPU's. "mix4/": of every format with such keys. Before its first
    /// page. Raises kvq::error for statistics that the scheme refuses.
    status calibrate(std::string_view format, const calibration& statistics, cudaStream_t stream);
    /// The matrices of keys or values of a format that is rotated<...>, before its first page. Raises
    /// kvq::error for matrices of another shape. Waits for the stream.
    status rotate(std::string_view format, tensor role, const rotation& matrices, cudaStream_t stream);

    /// Pages of sequences that are made from now on are committed to this format; sequences that exist keep
    /// theirs. A name as in requantize_request::format.
    status commit_to(std::string_view format);

    bool is_open() const noexcept { return !groups_.empty(); }
    /// As they were given.
    const std::vector<layer>& layers() const noexcept { return layers_; }
    int layer_count() const noexcept { return static_cast<int>(layers_.size()); }
    /// The shape of a layer; its `layers` is the number of all.
    cache_shape shape(int layer) const noexcept {
        const kvq::layer& l = layers_[static_cast<std::size_t>(layer)];
        return {layer_count(), l.kv_heads, l.head_dim, l.value_dim};
    }
    /// Does a layer take the tokens of steps, prompts and drafts? Others have no keys and values of the
    /// sequence's own text.
    bool takes_tokens(int layer) const noexcept {
        return layers_[static_cast<std::size_t>(layer)].kind <= layer_kind::chunked || keys_alone(layer);
    }
    const cache_options& options() const noexcept { return options_; }
    /// The parts of layers with state (kvq::state_layer); null if there are none.
    const kvq::state_layout* state_layout() const noexcept { return states_ ? &states_->layers() : nullptr; }
    /// The entry that open() has taken for a layer with keys and values. Formats of the layer are numbered as
    /// its kinds.
    const device_format& formats(int layer) const noexcept { return group_of(layer).format; }
    /// Is every layer full attention of one shape in the same formats? Divided contexts and transfers between
    /// GPUs take such caches only.
    status check_equal_layers(const char* who) const;

    /// An empty sequence. It holds no memory yet. None before open().
    [[nodiscard]] sequence_id new_sequence();
    /// Gives back its pages. Launches that were made before may still read them.
    status free(sequence_id id);
    /// Tokens of a sequence, drafted ones included; 0 for one that is not there.
    int tokens(sequence_id id) const noexcept {
        if (!is_here(id)) return 0;
        const detail::sequence_pages& s = entry_of(id).pages[0];
        return s.tokens() + s.drafted;
    }
    /// Tokens that the sequence has in a layer: of one with cross attention those of its own text.
    int tokens(sequence_id id, int layer) const noexcept;

    /// Every sequence of the batch gets new_tokens tokens more, in all layers: append() writes them. 0:
    /// attend() only. A sequence_id{} is a row that is not there: its keys are ignored, its output is 0.
    status begin_step(std::span<const sequence_id> batch, int new_tokens, cudaStream_t stream);
    /// One sequence gets any number of tokens. Pages that fall behind the window are quantized at once.
    status begin_prompt(sequence_id id, int new_tokens, cudaStream_t stream);
    /// The text of the layers with cross attention (kvq::cross_layer), of any number of tokens up to
    /// max_tokens, once for a sequence. append() writes them, in each of these layers; then they take any
    /// number of queries of attend() in steps and drafts, or of prefill() with k and v of 0 tokens in
    /// prompts, which see all of them. Trims leave them, forks share their pages.
    status begin_cross(sequence_id id, int tokens, cudaStream_t stream);
    /// Every sequence of the batch gets new_tokens drafted tokens behind those that it has: a tree, whose
    /// words attend() takes as options.ancestors, or a chain. They stay 16 bit and no page is quantized.
    /// Further calls make all drafts of the batch longer; 0: attend() only. Until keep(), or a trim() to the
    /// accepted tokens, other begins, offload and requantizing of these sequences are refused.
    status begin_draft(std::span<const sequence_id> batch, int new_tokens, cudaStream_t stream);
    /// Accepts the drafted tokens paths[b][0] < paths[b][1] < ... of sequence b (a path of
    /// token_tree::is_path()) and removes its others, in all layers: the sequence is bit for bit what
    /// appending the accepted tokens alone gives. One launch, and one if pages leave a window.
    status keep(std::span<const sequence_id> batch, std::span<const std::span<const int>> paths,
                cudaStream_t stream);
    /// New tokens of one layer, [rows x new_tokens][kv_heads][dim]; once per layer (a second time is
    /// refused), the first one of a shape and format before the others: it also quantizes the pages that
    /// leave the recent windows of all of them. T: options().type. Of latents v has 0 tokens.
    status append(int layer, const input_view& k, const input_view& v, cudaStream_t stream);
    /// append() of a prompt's tokens behind their attention: they see each other, and all that is in the
    /// window, in 16 bit, and quantized pages as they are, without scratch memory (prefill.cuh). After
    /// begin_prompt(). q, out: [new_tokens][q_heads][head_dim]. The tokens of a layer that others share wait
    /// until the last of these had its prefill(), with k and v of 0 tokens, or for the next begin: they see
    /// what this layer saw. Of latents v has 0 tokens, and the tokens go through scratch memory as well.
    template <class Score = unmodified>
    status prefill(int layer, const input_view& k, const input_view& v, const query_view& q,
                   const output_view& out, prefill_options options, cudaStream_t stream,
                   const Score& score = {}) {
        if (status s = check_score(layer, detail::score_mark::of<Score>(), true); !s) return s;
        return prefill_prompt(layer, k, v, q, out, options, stream, &score);
    }
    /// prefill() of any queries, without the append: k and v are the first new tokens of begin_prompt(), any
    /// number of them, or none, then also after a begin_step() of one sequence. options.lead says which of
    /// them a query sees. Before append().
    status prefill_part(int layer, const input_view& k, const input_view& v, const query_view& q,
                        prefill_options options, cudaStream_t stream);
    /// Attention of the batch's last options.query_tokens tokens over all that it has, in one launch. A layer
    /// with a window hides what its window hides, also where options.window is 0, and takes at most rollback
    /// + 1 tokens more than the step has new ones (of a prompt: rollback + 1 in all). q: [rows x
    /// query_tokens][q_heads][head_dim], out likewise with value_dim. Score: that of make_scored_format().
    template <class Score = unmodified>
    status attend(int layer, const query_view& q, const output_view& out, attention_options options,
                  cudaStream_t stream, const Score& score = {}) {
        if (status s = check_attend<Score>(layer, q, out, options); !s) return s;
        if (options.selected_tokens != 0) return attend_pages(layer, q, out, options, stream, &score);
        if (runs_of(layer) > 1) return attend_runs(layer, q, out, options, stream, &score);
        const detail::device_memory& space = workspace_of(layer);
        return group_of(layer).format.functions->attend(view(layer), q, out, options, space.as<>(),
                                                        space.bytes(), stream, &score);
    }
    /// append() of a step or a draft and attend() of all its tokens: one launch, but two for latents and for
    /// pages that attend_new_tokens.cuh does not take.
    template <class Score = unmodified>
    status attend(int layer, const input_view& k, const input_view& v, const query_view& q,
                  const output_view& out, attention_options options, cudaStream_t stream,
                  const Score& score = {}) {
        if (status s = check_append(layer, k, v); !s) return s;
        if (step_.prompt)
            return detail::bad_value("a prompt's %d tokens are appended before attend(), or take prefill()",
                                     step_.new_tokens);
        if (options.query_tokens < step_.new_tokens)
            return detail::bad_value("attention of %d tokens that appends %d", options.query_tokens,
                                     step_.new_tokens);
        if (status s = check_attend<Score>(layer, q, out, options); !s) return s;
        if (step_.draft) options.early = false;  // its tables may have been sent right before
        return append_and_attend(layer, k, v, q, out, options, stream, &score);
    }
    /// Attention of the last lists.query_tokens tokens of each row over the tokens that lists name, in device
    /// memory: of layers with keys and values or latents, without a window. Positions are those of the
    /// sequence; one behind the query's own, or below 0, is none. Behind append(), in steps, prompts and
    /// drafts that are chains. A prompt sees its own tokens as its pages hold them.
    status attend_lists(int layer, const query_view& q, const output_view& out, list_options lists,
                        cudaStream_t stream);
    /// The `count` tokens (1 to 8192) of an index (kvq::index_layer) with the largest sum over heads h of
    /// weights[h] * max(0, q[h] . k), for each of the last query_tokens tokens of the rows, of the tokens up
    /// to their own. q: [rows x query_tokens][heads][channels]; weights: [rows x query_tokens][heads];
    /// positions: [rows x query_tokens][count], ascending, -1 behind the last one; all in device memory. Of
    /// equal scores the earlier tokens are taken, NaN last. Behind append().
    status select(int layer, const query_view& q, const float* weights, int query_tokens, int count,
                  int* positions, cudaStream_t stream);
    /// Of a layer whose pages are in host memory: fetches what attend() with these selected_tokens would read
    /// for q, which may be a guess, such as the query of the layer before. On any stream, behind the first
    /// append() of the step, and behind the call before, whose memory it takes; attend() of this layer must
    /// wait for it.
    status fetch_ahead(int layer, const query_view& q, int selected_tokens, cudaStream_t stream) const;
    /// Of all its kv heads so far. Waits for the stream.
    status fetches(int layer, fetch_report& report, cudaStream_t stream) const;
    /// Does attend() of a layer take these options, for so many query heads? Asked before append().
    status check_options(int layer, int q_heads, attention_options options) const {
        if (status s = check_keys(layer); !s) return s;
        const detail::layer_group& g = group_of(layer);
        if (g.format.latent)
            if (status s = check_latents(layer, step_.rows, q_heads, options); !s) return s;
        if (runs_of(layer) > 1)
            if (status s = check_runs(layer, step_.rows * options.query_tokens, q_heads); !s) return s;
        if (status s = check_pages(layer, q_heads, options); !s) return s;
        return g.add_window(options, member_of(layer));
    }
    /// A captured step may be replayed after a begin_step() as long as this number is what it was at the
    /// capture: it depends on the batch's number of rows and new tokens, on the formats that its pages are
    /// committed to, on the most moves of keys that a sequence of it has, and on where pools lie.
    std::uint64_t graph_id() const noexcept;

    /// Part number `part` of the state of a layer, for the rows of the step or prompt that has begun: its
    /// kernels read and write it in place. The state counts the tokens of a begin as taken, so a step that
    /// fails is taken back by trim(). Zeros at first. What the view holds stays as long as graph_id() does;
    /// slots are those of the last begin.
    status state(int layer, int part, state_view& view) const;
    /// The same of one sequence, until the next call that changes it. Null: zeros. Others may share it,
    /// except after a begin. Behind a trim to a quantized snapshot it takes a page, on the stream of the last
    /// begin, which must exist still.
    status state(sequence_id id, int layer, int part, std::byte*& data);
    /// Keeps the state at the sequence's tokens, with what the step that has begun makes of it. Copies
    /// nothing: the next begin does. cache_options::snapshots say which ones are taken without this call, and
    /// which ones go.
    status snapshot(sequence_id id);
    status drop_snapshots(sequence_id id);
    /// Ascending by tokens, until the sequence changes. None where no layer has state.
    std::span<const snapshot_mark> snapshots(sequence_id id) const noexcept;
    /// The token to which trim(id, n) goes: n, or where layers have state n = tokens(id), or that of the
    /// newest snapshot at or before n, or 0. n - reach(id, n) tokens must run again.
    int reach(sequence_id id, int n) const noexcept;

    /// Removes tokens from position reach(id, n) on. Exact within `rollback` tokens. After a deeper trim a
    /// quantized page that it ends in keeps its bytes and shows fewer tokens, and new tokens begin a page:
    /// tokens that stay have the values that they had. Takes effect with the next begin. A begun prompt that
    /// some layer does not have yet is taken back whole, within `rollback` or with the page of its first
    /// token; a step, within `rollback`. A cache with state copies on the stream of the last begin, which
    /// must exist still.
    status trim(sequence_id id, int n);
    /// The least n from which on trim(id, n) is possible for every n: layers with a window have freed what
    /// earlier lengths need. While a draft of several tokens waits, or a prompt for layers that lack it, it
    /// is tokens(id). O(pages)
    int trim_limit(sequence_id id) const noexcept;
    /// As sequence::erase, shift and splice: kept tokens keep their bytes, and attention turns queries for
    /// keys that have moved, with a launch for each number of positions (options().rotary). Takes effect with
    /// the next begin. What would leave 16-bit pages with gaps is refused: a cut within the recent window or
    /// the sinks, unless the erase reaches the end: then it is a trim. A splice quantizes what the sequence
    /// has, shares quantized pages with the other one and copies those in 16 bit; the sequence must be empty,
    /// or end with a page, and not within its sinks.
    status erase(sequence_id id, int first, int last);
    status shift(sequence_id id, int first, int last, std::int64_t by);
    status splice(sequence_id id, sequence_id other, int first, int last, cudaStream_t stream);
    /// For text without an end, as kvq::ring: gives back the pages behind the sinks that no query with this
    /// window sees, from the next token on or behind a trim by `rollback`. Tokens behind the `dropped` ones
    /// have earlier positions; keys stay as they were rotated. move_sinks: sink_positions::in_cache.
    status drop_front(sequence_id id, int window, bool move_sinks, int& dropped);
    /// A second sequence with the same tokens. Quantized pages and states are shared, 16-bit pages are
    /// copied. Refused, as requantize(), step_down(), offload() and the next begin, while some layer lacks a
    /// prompt that has begun.
    status fork(sequence_id id, sequence_id& copy, cudaStream_t stream);
    /// Pages that several of the sequences share stay shared. report: bytes are those in use
    /// (bytes_in_use()), a page holds K and V of all layers of a group, and there is no workspace.
    status requantize(std::span<const sequence_id> ids, const requantize_request& request,
                      cudaStream_t stream, requantize_report* report = nullptr);
    /// Dry runs: the reports that requantize() would give and of what step_down() would do, byte for byte.
    status plan_requantize(std::span<const sequence_id> ids, const requantize_request& request,
                           requantize_report& report) const;
    /// Pages get the format of the last tier whose age all of their tokens have. Ages ascend. Pages only
    /// shrink. Then, while pages in use have more than byte_budget bytes (bytes_in_use()), the oldest pages
    /// go one tier down, and from there further; pages that other sequences hold too stay. More may be in use
    /// at the end, if all of them are in the last tier.
    status step_down(std::span<const sequence_id> ids, std::span<const tier> tiers, cudaStream_t stream,
                     std::size_t byte_budget = no_budget);
    status plan_step_down(std::span<const sequence_id> ids, std::span<const tier> tiers,
                          requantize_report& report, std::size_t byte_budget = no_budget) const;
    static constexpr std::size_t no_budget = ~std::size_t{0};

    /// Of one sequence, as sequence::usage(): bytes of device memory in all layers. None for a sequence that
    /// is not there. O(pages)
    usage_report usage(sequence_id id) const;
    /// Of all memory of the cache: `bytes` is what the allocator was asked for. Each page counts once;
    /// `reserved` has the free ones. O(sequences)
    usage_report usage() const;
    /// Part of usage().workspace: memory of prompts, as much as any of them has needed so far.
    std::size_t prompt_bytes() const noexcept;
    /// Bytes of all pages that sequences hold, each counted once, and of these and the free ones.
    std::size_t bytes_in_use() const noexcept;
    std::size_t bytes_held() const noexcept;
    /// Writes for each layer how many NaN and infinities were quantized so far; a page that is quantized
    /// again behind a trim counts again. Waits for the stream.
    status not_finite(std::span<unsigned> by_layer, cudaStream_t stream) const;

private:
    friend struct detail::cache_access;
    friend struct detail::transfer_access;

    struct entry {
        std::vector<detail::sequence_pages> pages;  // by group
        std::optional<recurrent_state> state;
        unsigned generation = 0;
        bool alive = false;
        unsigned stamp = 0;         // of the last begin that named it
        std::uint64_t version = 0;  // of its tables
    };
    /// One that a call makes. It is freed again unless the call takes it, also where the host has no memory.
    struct unfinished_sequence {
        cache& of;
        sequence_id id;

        ~unfinished_sequence() {
            if (id != sequence_id{}) (void)of.free(id);
        }
        sequence_id take() noexcept { return std::exchange(id, {}); }
    };
    using step = detail::begun_step;
    using chunk = detail::shared_chunk;
    /// Where a layer is; of a shared one: where its owner is. Of one with state: nowhere.
    struct place {
        int group, member;
    };

    bool is_here(sequence_id id) const noexcept {
        return id.index >= 0 && id.index < static_cast<int>(entries_.size()) && entry_of(id).alive &&
               entry_of(id).generation == id.generation;
    }
    entry& entry_of(sequence_id id) noexcept { return entries_[static_cast<std::size_t>(id.index)]; }
    const entry& entry_of(sequence_id id) const noexcept {
        return entries_[static_cast<std::size_t>(id.index)];
    }
    status check_here(sequence_id id) const {
        if (is_here(id)) return {};
        return detail::bad_value("sequence %d is not one of this cache, or was freed", id.index);
    }
    /// Has the cache this layer, with keys and values?
    status check_keys(int layer) const {
        if (layer < 0 || layer >= layer_count())
            return detail::bad_value("layer %d is not among the %d layers of the cache", layer,
                                     layer_count());
        if (has_state(layer))
            return detail::bad_value("%s: it holds no keys and values", describe(layer).c_str());
        return {};
    }
    status check_layer(int layer, std::initializer_list<float_type> types) const;
    /// The type of rows; of none that of others.
    template <class Others>
    static float_type type_of(const input_view& rows, const Others& others) noexcept {
        return rows.tokens == 0 ? others.type : rows.type;
    }
    status check_append(int layer, const input_view& k, const input_view& v);
    const detail::device_memory& workspace_of(int layer) const {
        return keys_alone(layer) ? scratch_ : workspace_;
    }
    /// Before new tokens of a step: pages that leave the windows are quantized.
    status commit_due(int layer, cudaStream_t stream) {
        if (step_.draft) return {};
        return group_of(layer).commit(member_of(layer), step_.rows, step_.new_tokens, stream);
    }
    /// Completes the options.
    template <class Score>
    status check_attend(int layer, const query_view& q, const output_view& out, attention_options& options) {
        if (status s = check_layer(layer, {q.type, out.type}); !s) return s;
        const detail::layer_group& g = group_of(layer);
        if (g.format.index)
            return detail::bad_value("%s: it has no values to attend to", describe(layer).c_str());
        if (g.format.latent)
            if (status s = check_latents(layer, step_.rows, q.heads, options); !s) return s;
        if (status s = check_score(layer, detail::score_mark::of<Score>(), false); !s) return s;
        if (status s = check_waiting(layer); !s) return s;
        const int of_step = step_.prompt ? 0 : common::larger(step_.new_tokens, step_.draft);
        if (!g.holds_queries(options.query_tokens, of_step))
            return detail::bad_value(
                "%s: attention of %d tokens, but it may have freed keys that more than %d see (rollback + 1, "
                "and those of a step); take prefill()",
                g.describe(member_of(layer)).c_str(), options.query_tokens,
                g.geometry.rollback + 1 + of_step);
        if (status s = check_pages(layer, q.heads, options); !s) return s;
        if (status s = g.add_window(options, member_of(layer)); !s) return s;
        if (step_.prompt) options.early = false;  // pages were requantized right before
        if (options.drafted == 0) options.drafted = step_.draft;
        if (is_cross(layer)) {
            options.all_keys = true;
            options.ancestors = nullptr;
        }
        return {};
    }
    /// Tokens of a sequence that attend in a step or a draft, at most.
    int most_queries() const noexcept {
        return common::larger(1, common::larger(options_.step_tokens, options_.draft_tokens));
    }
    /// Does attention over latents take the options, and is the workspace large enough?
    status check_latents(int layer, int rows, int q_heads, const attention_options& options) const;
    status check_batch(std::span<const sequence_id> ids, bool holes);
    status check_move(sequence_id id, const char* verb, int first, int last, std::int64_t by) const;
    status check_rows(std::span<const sequence_id> batch) const;
    status check_no_draft(std::span<const sequence_id> ids) const;
    /// Has no layer of these sequences still to get a prompt that has begun?
    status check_whole(std::span<const sequence_id> ids) const;
    status check_waiting(int layer) const;
    status check_unmoved(int layer) const;
    status no_list_space(int layer, const char* what, int queries, std::size_t needed) const;
    /// Has the layer not been given the tokens of this step?
    status check_lacks(int layer) {
        const chunk* const c = shared_chunk(layer);
        if (group_of(layer).appended[static_cast<std::size_t>(member_of(layer))] == 0 &&
            (c == nullptr || !c->waits()))
            return {};
        return detail::bad_value("%s: it has the tokens of this step already", describe(layer).c_str());
    }
    status check_growth(sequence_id id, int new_tokens, bool cross = false) const;
    status check_prompt(sequence_id id, int new_tokens) const;
    status begin_text(sequence_id id, int new_tokens, bool cross, cudaStream_t stream);
    // Keys that have moved: cache_moves.hpp.
    template <class Build>
    status rearrange(sequence_id id, const char* does, Build&& build);
    status check_still(sequence_id id, const char* verb) const;
    status fill_spliced(detail::layer_group& g, detail::splice_plan& plan,
                        const detail::sequence_pages& theirs, cudaStream_t stream);
    std::size_t moving_bytes(int layer, std::size_t tokens, std::size_t q_heads) const noexcept;
    status ensure_runs(std::span<const sequence_id> batch, int keys, cudaStream_t stream);
    status ensure_moving(std::size_t bytes, cudaStream_t stream);
    /// Launches of an attention: one for each number of positions by which keys of the step have moved.
    int runs_of(int layer) const noexcept {
        return rotations_.at(layer) == nullptr ? 1 : group_of(layer).now.runs;
    }
    status check_runs(int layer, int tokens, int q_heads) const;
    detail::turn_args turn_of(int layer, const detail::input_rows& from, std::byte* to) const noexcept;
    /// Keys as the pages want them that they go to. lengths: null if all go to a page that has tokens.
    status turn_keys(int layer, input_view& k, int of_sequence, const int* lengths,
                     cudaStream_t stream) const;
    status turn_query(int layer, int run, query_view& q, int of_sequence, cudaStream_t stream) const;
    status append_and_attend(int layer, const input_view& k, const input_view& v, const query_view& q,
                             const output_view& out, const attention_options& options, cudaStream_t stream,
                             const void* score);
    /// Can pages be selected for these queries? Otherwise why not.
    status check_pages(int layer, int q_heads, const attention_options& options) const;
    status attend_pages(int layer, const query_view& q, const output_view& out,
                        const attention_options& options, cudaStream_t stream, const void* score) const;
    float* run_states(int layer, std::size_t rows) const noexcept;
    template <class Options>
    status chain_run(int layer, int r, query_view& q, output_view& out, Options& options, int of_sequence,
                     cudaStream_t stream) const;
    status ensure_query_runs(int layer, int tokens, int q_heads, cudaStream_t stream);
    status attend_runs(int layer, const query_view& q, const output_view& out,
                       const attention_options& options, cudaStream_t stream, const void* score);
    status check_score(int layer, detail::score_mark score, bool prompt) const;
    status prefill_prompt(int layer, const input_view& k, const input_view& v, const query_view& q,
                          const output_view& out, prefill_options options, cudaStream_t stream,
                          const void* score);
    status prefill_runs(int layer, const input_view& k, const input_view& v, const query_view& q,
                        const output_view& out, const prefill_options& options, cudaStream_t stream,
                        const void* score);
    status append_prompt(int layer, const input_view& k, const input_view& v, cudaStream_t stream);
    bool lacks_page(sequence_id id, std::size_t group, int n) const noexcept;
    status check_options(const cache_options& options) const;
    status open_scratch();
    std::size_t scratch_bytes(const detail::layer_group& g, int tokens, const detail::format_spans& spans,
                              int new_tokens, std::size_t most) const;
    prefill_scratch scratch_of(int layer) const;
    status make_rotations();
    status send_rotations(cudaStream_t stream);
    status make_groups(std::span<const device_format> compiled);
    status open_group(detail::layer_group& g) const;
    status place_pages(detail::layer_group& g) const;
    status open_resident(cudaStream_t stream);
    int pool_pages(const detail::layer_group& g) const noexcept;
    template <class T>
    status put_layers(detail::device_memory& to, const detail::layer_group& g,
                      std::initializer_list<const T*> arrays, std::size_t count, cudaStream_t stream) const;
    status ensure_pages(std::span<const sequence_id> batch, int new_tokens, bool draft, bool cross,
                        cudaStream_t stream);
    status send_step(std::span<const sequence_id> batch, int new_tokens, bool draft, cudaStream_t stream);
    void forget_rows() {
        for (detail::layer_group& g : groups_) g.forget_rows();
        slots_.assign(states_ ? static_cast<std::size_t>(options_.max_batch) : 0, unknown_slot);
    }
    detail::word_writer writer(cudaStream_t stream) const noexcept {
        return {*groups_[0].format.functions, words_.as<int>(), stream};
    }
    /// A page in use that another one replaces.
    struct format_change {
        page_ref from, to;
        int format;                            // of the new one
        page_ref plan;                         // of its keys
        std::vector<common::held_span> spans;  // in the tables of the call's sequences
    };
    /// By group.
    using format_changes = std::vector<std::vector<format_change>>;
    std::vector<common::page_table*> tables_of(std::span<const sequence_id> ids, std::size_t group);
    status find_changes(std::span<const sequence_id> ids, const common::change_range& range,
                        std::string_view format, bool only_smaller, format_changes& changes,
                        std::size_t& saved);
    status find_changes(std::span<const sequence_id> ids, const requantize_request& request,
                        format_changes& changes);
    status convert_pages(detail::layer_group& g, int from, int target,
                         std::span<const detail::page_pair> pages, const page_ref& plan, cudaStream_t stream);
    status ensure_plans(std::span<const sequence_id> ids, int new_tokens, bool cross, cudaStream_t stream);
    status settle(std::span<const sequence_id> ids, cudaStream_t stream);
    requantize_report report_of(const format_changes& changes, std::size_t in_use) const;
    static void end_report(requantize_report& r, std::size_t in_use) noexcept;
    struct rehearsal;
    template <class InUse, class Carry>
    status lower_pages(std::span<const sequence_id> ids, std::span<const tier> tiers, std::size_t byte_budget,
                       InUse&& bytes, Carry&& carry);
    status requantize_pages(std::span<const sequence_id> ids, format_changes& changes, cudaStream_t stream);
    status check_format(std::string_view format) const;
    struct named_format {
        detail::layer_group& group;
        int number;
    };
    std::vector<named_format> find_named(std::string_view format);
    status check_statistics(std::string_view format, const cache_shape& of) const;
    /// Can new sequences be committed to a format of this name?
    status check_target(std::string_view format) const;
    status no_pair(const detail::layer_group& g, int from, std::string_view format) const;
    std::string describe(int layer) const {
        return common::describe_layer(layer, layers_[static_cast<std::size_t>(layer)]);
    }
    bool has_state(int layer) const noexcept {
        return layers_[static_cast<std::size_t>(layer)].kind == layer_kind::state;
    }
    status check_states(std::span<const sequence_id> ids, const char* verb) const;
    status check_part(int layer, int part) const;
    status ensure_states(std::span<const sequence_id> batch, int new_tokens, cudaStream_t stream);
    void write_states(std::span<const sequence_id> batch, int new_tokens, bool prompt,
                      detail::word_writer& to);
    /// Groups whose layers take steps. Those with cross attention stand behind them.
    std::size_t step_groups() const noexcept;
    bool is_cross(int layer) const noexcept {
        return layers_[static_cast<std::size_t>(layer)].kind == layer_kind::cross;
    }
    /// Latents and indexes.
    bool keys_alone(int layer) const noexcept {
        return common::holds_keys_alone(layers_[static_cast<std::size_t>(layer)].kind);
    }
    bool is_shared(int layer) const noexcept {
        return layers_[static_cast<std::size_t>(layer)].kind == layer_kind::shared;
    }
    /// Of a layer that shares, or is shared; null for others.
    const chunk* shared_chunk(int layer) const noexcept {
        const int owner = is_shared(layer) ? layers_[static_cast<std::size_t>(layer)].owner : layer;
        for (const chunk& c : chunks_)
            if (c.owner == owner) return &c;
        return nullptr;
    }
    chunk* shared_chunk(int layer) noexcept {
        return const_cast<chunk*>(std::as_const(*this).shared_chunk(layer));
    }
    status find_chunks(int new_tokens, detail::larger_memories& larger, cudaStream_t stream);
    status hold(chunk& c, const input_view& k, const input_view& v, cudaStream_t stream);
    status prefill_latents(int layer, const input_view& k, const input_view& v, const query_view& q,
                           const output_view& out, const prefill_options& options, cudaStream_t stream);
    /// Appends the chunks that still wait.
    status append_chunks(cudaStream_t stream);
    int waiting() const noexcept {
        int count = 0;
        for (const chunk& c : chunks_) count += c.waiting();
        return count;
    }
    /// Layers that a begun prompt has not been given to. What waits for layers that share it is given.
    int missing() const noexcept {
        if (step_.id == sequence_id{}) return 0;
        int count = 0;
        for (const detail::layer_group& g : groups_) count += g.missing_layers();
        for (const chunk& c : chunks_) count -= c.waits() ? 1 : 0;
        return count;
    }
    /// A sequence has changed, so the step has ended; its own prompt has as well.
    void end_step(sequence_id changed) noexcept {
        step_.begun = false;
        if (step_.id != changed) return;
        step_.id = {};
        for (chunk& c : chunks_) std::ranges::fill(c.waits_for, char{0});
    }
    detail::layer_group& group_of(int layer) noexcept {
        return groups_[static_cast<std::size_t>(places_[static_cast<std::size_t>(layer)].group)];
    }
    const detail::layer_group& group_of(int layer) const noexcept {
        return groups_[static_cast<std::size_t>(places_[static_cast<std::size_t>(layer)].group)];
    }
    int member_of(int layer) const noexcept { return places_[static_cast<std::size_t>(layer)].member; }
    detail::layer_view view(int layer) const noexcept {
        return group_of(layer).view(member_of(layer), step_.rows);
    }

    std::vector<layer> layers_;
    std::vector<place> places_;  // by layer
    cache_options options_;
    std::vector<detail::layer_group> groups_;
    std::vector<chunk> chunks_;
    std::unique_ptr<detail::state_pages> states_;  // null: no layer has state
    std::vector<int> slots_;                       // of rows, as the device has them
    int first_slot_ = 0;                           // their first word
    static constexpr int unknown_slot = -2;
    common::rotation_table rotations_;
    std::vector<std::size_t> first_turn_;  // of each layer, in turns_
    detail::device_memory turns_;          // of all pairs of the layers that rotate
    detail::device_memory moving_;         // keys and queries that are turned, then softmax states
    unsigned moving_generation_ = 0;
    detail::device_memory words_;
    // scratch_: for latents, lists, scores and selected pages; the other one is zero between launches.
    detail::device_memory workspace_, scratch_;
    detail::device_memory tickets_;  // of selections of pages: zero between launches
    detail::device_memory ahead_;    // the same for pages that are fetched ahead, then their scratch
    detail::device_memory staging_;  // slots of a prompt's tokens, then its pages of one layer, or scratch
    std::size_t most_scratch_ = 0;   // for prefill()
    std::vector<entry> entries_;
    std::vector<int> unused_;  // entries
    std::uint64_t versions_ = 0;
    unsigned stamp_ = 0;
    step step_;
};

}}}  // namespace kvq::cuda
