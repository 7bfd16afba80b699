// A cache: the shapes, formats and page pool that sequences share.
//
//   kvq::cache cache({.layers = 32, .kv_heads = 8, .head_dim = 128},
//                    {.keys = kvq::make_format<keys>(), .values = kvq::make_format<values>(), .sinks = 4, .recent = 128});
//   auto sequence = cache.new_sequence();
//
// Formats are values. Caches of all formats have this one type, and a cache takes further formats while it is in use.
// Thread safety: every const member and new_sequence() may be called from any thread. A cache outlives its sequences.
#pragma once

#include <cmath>
#include <limits>
#include <span>

#include "../core/executor.hpp"
#include "../core/workspace.hpp"
#include "../format/format_table.hpp"
#include "batch.hpp"
#include "options.hpp"
#include "requantize_request.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

class sequence;
class page_list;

class cache {
public:
    /// Raises kvq::error when a size is impossible, or when a format is missing, listed twice or unable to hold such blocks, or when
    /// a rotary embedding does not fit a head.
    explicit cache(const cache_shape& shape, const cache_options& options)
        : shape_(shape),
          options_(checked(shape, options)),
          keys_(tensor::key, window_of(options), options.keys),
          values_(tensor::value, window_of(options), options.values.empty() ? options.keys : options.values),
          rotations_(options.rotary, shape.layers, shape.head_dim),
          pool_(options.memory, options.byte_budget, options.preallocate) {
        for (const layer_format& f : options.layers) {
            expect_listed(tensor::key, f.key);
            expect_listed(tensor::value, f.value);
        }
        for (const tensor role : {tensor::key, tensor::value})
            for (int i = 0; i < table(role).listed(); ++i) {
                check(role, table(role)[i + 1], i);
                const int first = table(role).find(table(role)[i + 1]);
                detail::expect(first == i, detail::name_of(role), " formats ", first, " and ", i,
                               " are both ", format_text(table(role)[i + 1]), " on ",
                               table(role)[i + 1].backend(), ": list a format once");
            }
        detail::check_backends(keys_, values_);
    }
    cache(const cache&) = delete;
    cache& operator=(const cache&) = delete;

    [[nodiscard]] sequence new_sequence();

    const cache_shape& shape() const noexcept { return shape_; }
    const cache_options& options() const noexcept { return options_; }
    page_geometry geometry() const noexcept {
        return {options_.sinks, options_.recent, options_.page_tokens};
    }
    page_pool& pool() noexcept { return pool_; }
    const page_pool& pool() const noexcept { return pool_; }

    /// Formats of K or V: index 0 is the window, listed format i has index i + 1.
    const detail::format_table& table(tensor role) const noexcept {
        return role == tensor::key ? keys_ : values_;
    }
    const format& window() const noexcept { return keys_.window(); }
    /// How keys of a layer are rotated when they move.
    const detail::rotation_table& rotations() const noexcept { return rotations_; }
    /// Adds one format. Returns its index among the listed formats, which layer_format, requantize_request and tiers take. A format that
    /// is listed already adds nothing: its index is returned. No other call on the cache or its sequences may run at the
    /// same time. Raises kvq::error for a format that cannot hold such blocks.
    int add_format(tensor role, const format& f) {
        detail::format_table& list = role == tensor::key ? keys_ : values_;
        check(role, f, list.listed());
        if (const int i = list.find(f); i < list.listed()) return i;
        detail::check_backends(keys_, values_, f);
        list.add(f);
        return list.listed() - 1;
    }

    /// Makes a listed format that of the pages of sequences that are made from now on, in layers [first_layer, last_layer). Sequences
    /// that exist keep theirs (requantize_request::new_pages changes it). No other call on the cache may run at the same time. Raises
    /// kvq::error for a number that is not listed, or std::bad_alloc; nothing has changed then.
    void commit_to(tensor role, int listed, int first_layer = 0, int last_layer = requantize_request::all) {
        expect_listed(role, listed);
        detail::expect(first_layer >= 0 && first_layer <= last_layer &&
                           (last_layer <= shape_.layers || last_layer == requantize_request::all),
                       "layers ", first_layer, " to ", last_layer, " are not a range of the ", shape_.layers,
                       " layers of the cache");
        options_.layers.resize(static_cast<std::size_t>(shape_.layers));
        for (int i = first_layer; i < detail::smaller(last_layer, shape_.layers); ++i) {
            layer_format& f = options_.layers[static_cast<std::size_t>(i)];
            (role == tensor::key ? f.key : f.value) = listed;
        }
    }

    /// Bytes of all pages of all sequences, each counted once.
    [[nodiscard]] std::size_t bytes_in_use() const noexcept { return pool_.bytes_in_use(); }

    /// Bytes that the cache holds for pages: byte_budget if they are allocated up front, else bytes_in_use().
    [[nodiscard]] std::size_t bytes_held() const noexcept { return pool_.bytes_held(); }

    /// Index of the format that a layer's pages are quantized to; 0 if they stay in the window format.
    int target_format(tensor role, int layer) const {
        const layer_format f =
            options_.layers.empty() ? layer_format{} : options_.layers[static_cast<std::size_t>(layer)];
        return table(role).index_of(role == tensor::key ? f.key : f.value);
    }

    /// Bytes of data of a page of `tokens` tokens in format `index`.
    [[nodiscard]] std::size_t page_bytes(tensor role, int index, int tokens) const {
        return table(role).block_bytes(index, {role, tokens, shape_.dim(role)}) *
               static_cast<std::size_t>(shape_.kv_heads);
    }

    /// Workspace that attend() needs for q_tokens x q_heads queries over a sequence of `tokens`, on `threads` threads. mods: those of
    /// the call, of which only selected_pages and skipped_values take memory (and a little more for every cut of a sequence).
    [[nodiscard]] std::size_t attention_workspace(int tokens, int q_heads, int q_tokens = 1, int threads = 1,
                                                  const mods_view& mods = causal{}) const;

    /// Attention of one layer for many sequences at once, of any length and any number of queries. All threads share one list of tasks,
    /// which saves a start and an end per sequence. Outputs are those of sequence::attend, bit for bit. Takes its scratch
    /// from `space`. Raises kvq::error before anything is written.
    void attend(int layer, std::span<const attention_request> batch, const mods_view& mods,
                executor_view executor, workspace& space) const;

    /// Takes the memory of a step of many sequences over all layers ahead of it: pages, tables, and `space` for q_heads query heads on
    /// `threads` threads under `mods`. After it, prefill() or append() of request.tokens tokens in every layer, in any order of the
    /// layers, and attend() of request.q_tokens queries with `space`, take no memory, for one sequence or for the whole batch. They still
    /// raise kvq::error for bad arguments, and what schemes of your own and encoders that allocate raise (docs/guide/engine.md). Memory counts
    /// in byte_budget and in usage().reserved; sequence::prefill_bytes() is a lower bound. What is left goes back when the last layer has
    /// its tokens; the next reserve() of the sequence gives back what it did not use, release_reserved() at once. In between the sequences
    /// must not be changed nor forked. Raises kvq::error, kvq::out_of_memory or std::bad_alloc; nothing is reserved then.
    /// Defined in cache/reserve.hpp. O(sequences * layers + added pages)
    void reserve(std::span<const step_request> batch, int q_heads, int threads, workspace& space,
                 const mods_view& mods = causal{});

    /// sequence::prefill of one layer for many sequences at once (continuous batching): prompts in chunks of any length beside
    /// sequences that decode one token. Every sequence gets the same pages and outputs as alone, bit for bit, on any number of
    /// threads. Takes scratch from `space`. Raises kvq::error, kvq::out_of_memory or std::bad_alloc; all sequences are then
    /// unchanged.
    void prefill(int layer, std::span<const prefill_request> batch, const mods_view& mods,
                 executor_view executor, workspace& space);

    /// Dry run of requantize() on `threads` threads: reports what the whole request will do. Nothing changes. O(pages).
    [[nodiscard]] requantize_report plan_requantize(const sequence& s, const requantize_request& request,
                                                    int threads = 1) const;
    [[nodiscard]] requantize_report plan_requantize(std::span<const sequence* const> sequences,
                                                    const requantize_request& request, int threads = 1) const;

    /// Changes the format of pages (cache/requantize.hpp). Pages that the given sequences share stay shared.
    /// Raises kvq::error for an impossible request before anything changes. Raises kvq::out_of_memory when the byte budget has
    /// no room for one more page per thread: pages converted until then stay converted, the other pages are unchanged.
    requantize_report requantize(sequence& s, const requantize_request& request,
                                 const requantize_limit& limit = {});
    requantize_report requantize(std::span<sequence* const> sequences, const requantize_request& request,
                                 const requantize_limit& limit, executor_view executor, workspace& space);

private:
    friend class page_list;

    static const cache_options& checked(const cache_shape& shape, const cache_options& options) {
        detail::check_shape(shape);
        detail::expect(options.memory != nullptr, "a cache needs a memory resource");
        detail::expect(options.sinks >= 0, "sinks must not be negative, got ", options.sinks);
        detail::expect(options.recent >= 0, "recent must not be negative, got ", options.recent);
        detail::expect(!options.preallocate || options.byte_budget != page_pool::no_budget,
                       "a cache can allocate its pages up front only within a byte_budget");
        detail::expect(options.rollback >= 0, "rollback must not be negative, got ", options.rollback);
        detail::expect(options.page_tokens >= 1 && options.page_tokens <= 65536,
                       "page_tokens must be between 1 and 65536, got ", options.page_tokens);
        constexpr int most = (std::numeric_limits<int>::max)() / 4;
        detail::expect(options.sinks <= most && options.recent <= most && options.rollback <= most, "sinks ",
                       options.sinks, ", recent ", options.recent, " and rollback ", options.rollback,
                       " must not be more than ", most);
        detail::expect(options.repack >= 0.0f && options.repack <= 0.5f, "repack ", options.repack,
                       " must be 0, for never, or at most 0.5");
        const page_geometry g{options.sinks, options.recent, options.page_tokens};
        for (const tensor role : {tensor::key, tensor::value})
            detail::check_page(g.longest_page(), shape.dim(role));
        detail::expect(options.layers.empty() || static_cast<int>(options.layers.size()) == shape.layers,
                       "formats are given for ", options.layers.size(), " layers of a cache with ",
                       shape.layers);
        detail::expect(!options.keys.empty(), "a cache needs a format for its keys, such as fp16");
        for (const format_list* list : {&options.keys, &options.values})
            for (const format& f : *list)
                detail::expect(static_cast<bool>(f), "a format of the cache is empty");
        detail::expect(!options.window || options.window.holds_values(), "the window format must be ",
                       "fp32, fp16 or bf16, got ", options.window ? format_text(options.window) : "none");
        return options;
    }
    static const format& window_of(const cache_options& options) {
        if (options.window) return options.window;
        return options.keys[0].functions().backend->fp16();
    }
    void check(tensor role, const format& f, int number) const {
        detail::check_format(f, shape_, role, options_.page_tokens,
                             std::string(detail::name_of(role)) + " format " + std::to_string(number));
    }
    void expect_listed(tensor role, int number) const {
        detail::expect(number >= 0 && number < table(role).listed(), detail::name_of(role), " format ",
                       number, " is not among the ", table(role).listed(), " listed ones");
    }
    void check_member(const sequence* s, std::size_t i) const;
    /// held: tokens of the layer, those of the call included.
    void check_attention(int layer, int held, const query_view& q, const output_view& out,
                         const mods_view& mods) const {
        detail::expect(q.heads >= 1 && q.heads % shape_.kv_heads == 0, "q has ", q.heads,
                       " heads, not a multiple of the ", shape_.kv_heads, " kv heads");
        detail::expect(q.dim == shape_.dim(tensor::key), "q has head_dim ", q.dim, " but keys have ",
                       shape_.dim(tensor::key));
        detail::expect(out.tokens == q.tokens && out.heads == q.heads && out.dim == shape_.dim(tensor::value),
                       "out is ", out.tokens, " x ", out.heads, " x ", out.dim, " but must be ", q.tokens,
                       " x ", q.heads, " x ", shape_.dim(tensor::value));
        const int most = mods.has_query_positions() ? held : (std::numeric_limits<int>::max)() / q.heads;
        detail::expect(q.tokens >= 0 && q.tokens <= most, "q has ", q.tokens, " tokens but layer ", layer,
                       " holds ", held);
        detail::expect(q.data != nullptr || q.tokens == 0, "q has no data for ", q.tokens, " tokens");
        detail::expect(out.data != nullptr || q.tokens == 0, "out has no data for ", out.tokens, " tokens");
        mods.check(q.heads);
        detail::expect(std::isfinite(mods.scale(q.dim)), "scores cannot be scaled by ", mods.scale(q.dim));
    }
    /// Floats that quantizing one block takes as scratch.
    std::size_t scratch_floats() const noexcept {
        return static_cast<std::size_t>(options_.page_tokens) *
               static_cast<std::size_t>(detail::larger(shape_.dim(tensor::key), shape_.dim(tensor::value)));
    }
    /// Scratch of one thread that quantizes.
    std::size_t scratch_bytes() const noexcept {
        return detail::round_up(scratch_floats() * sizeof(float), std::size_t{64});
    }
    void attend_items(int layer, const detail::attention_items& items, const mods_view& mods,
                      executor_view executor, workspace& space) const;

    cache_shape shape_;
    cache_options options_;
    detail::format_table keys_;
    detail::format_table values_;
    detail::rotation_table rotations_;
    page_pool pool_;
};

}}  // namespace kvq
