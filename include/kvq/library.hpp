// The compiled library in C++: kvq.h with owners of handles, exceptions, spans and lambdas, for engines that want the compile time and the
// ABI of an ordinary library.
//
//   namespace library = kvq::library;
//   library::cache_options o;                                  all members zero, which is the default of each
//   o.layers = 32, o.kv_heads = 8, o.head_dim = 128, o.keys = "std4";
//   library::cache cache(o);
//   library::sequence sequence = cache.new_sequence();
//   sequence.prefill(layer, k, v, q, out);                     k = library::input(data, tokens, kv_heads, head_dim), ...
//
// Contract: kvq.h says what each function does; here results are returned, and a status other than KVQ_OK is raised with the library's
// message: KVQ_ERROR_MEMORY as kvq::out_of_memory, all others as kvq::library_error, which is a kvq::error. Owners move and do not copy. The
// handle of an owner that was moved from is NULL, which every function refuses. What an option or a request points to is named by get().
// Callables are referred to, not copied, and must not throw where nothing else is said. The program links kvq::library. kvq/kvq.hpp may be
// included as well. Source: include/kvq/kvq.h, docs/guide/c.md.
#pragma once

#include "library/callbacks.hpp"
#include "library/handle.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace library {

inline const char* version() noexcept { return kvq_version(); }
inline int32_t abi_version() noexcept { return kvq_abi_version(); }
inline const char* status_name(kvq_status status) noexcept { return kvq_status_name(status); }

// ---- structs and tensors ---------------------------------------------------------------------------------------------

using cache_options = initialized<kvq_cache_options>;
using attend_options = initialized<kvq_attend_options>;
using requantize_request = initialized<kvq_requantize_request>;
using step_down_policy = initialized<kvq_step_down_policy>;
using footprint_query = initialized<kvq_footprint_query>;
using budget_query = initialized<kvq_budget_query>;
using save_options = initialized<kvq_save_options>;
using prefix_cache_options = initialized<kvq_prefix_cache_options>;
using ring_options = initialized<kvq_ring_options>;
using selection_report = initialized<kvq_selection_report>;
using skipping_report = initialized<kvq_skipping_report>;

using tensor = kvq_tensor;
/// Values that are read, and values that are written: float, or of a type such as KVQ_FP16.
inline tensor input(kvq_dtype type, const void* data, int32_t tokens, int32_t heads, int32_t dim,
                    ptrdiff_t token_stride = 0, ptrdiff_t head_stride = 0) noexcept {
    return {const_cast<void*>(data), type, tokens, heads, dim, token_stride, head_stride};
}
inline tensor output(kvq_dtype type, void* data, int32_t tokens, int32_t heads, int32_t dim,
                     ptrdiff_t token_stride = 0, ptrdiff_t head_stride = 0) noexcept {
    return {data, type, tokens, heads, dim, token_stride, head_stride};
}
inline tensor input(const float* data, int32_t tokens, int32_t heads, int32_t dim) noexcept {
    return input(KVQ_FP32, data, tokens, heads, dim);
}
inline tensor output(float* data, int32_t tokens, int32_t heads, int32_t dim) noexcept {
    return output(KVQ_FP32, data, tokens, heads, dim);
}

/// frequencies: [dims / 2]
inline void rotary_llama3(std::span<double> frequencies, double base, double factor, double low_freq_factor,
                          double high_freq_factor, double original_context) {
    detail::check(kvq_rotary_llama3(2 * detail::count(frequencies), base, factor, low_freq_factor,
                                    high_freq_factor, original_context, frequencies.data()));
}
inline void rotary_yarn(std::span<double> frequencies, double base, double factor, double original_context,
                        double beta_fast, double beta_slow) {
    detail::check(kvq_rotary_yarn(2 * detail::count(frequencies), base, factor, original_context, beta_fast,
                                  beta_slow, frequencies.data()));
}

// ---- memory and threads ----------------------------------------------------------------------------------------------

class workspace : public detail::owner<kvq_workspace, kvq_workspace_free> {
public:
    using owner::owner;
    explicit workspace(size_t bytes = 0, const kvq_allocator* memory = nullptr)
        : owner(kvq_workspace_create, memory, bytes) {}

    void reserve(size_t bytes) { call(kvq_workspace_reserve, bytes); }
    size_t bytes() const { return ask<size_t>(kvq_workspace_bytes); }
};

class executor : public detail::owner<kvq_executor, kvq_executor_free> {
public:
    using owner::owner;
    /// Threads of kvq.
    explicit executor(int32_t threads) : owner(kvq_executor_create_threads, threads) {}
    /// The engine's threads: run(n, task) calls task(i) for every i in [0, n) and returns when all have ended. It must outlive the executor.
    template <class Run>
    executor(int32_t concurrency, Run& run) : executor(executor_callbacks(concurrency, run)) {}
    /// An executor of core/executor.hpp, such as kvq::thread_pool.
    template <detail::parallel Threads>
    explicit executor(Threads& t) : executor(static_cast<int32_t>(t.concurrency()), t) {}
    explicit executor(const kvq_executor_callbacks& callbacks) : owner(kvq_executor_create, &callbacks) {}
};

// ---- formats and statistics ------------------------------------------------------------------------------------------

inline int32_t format_count() { return detail::ask<int32_t>(kvq_format_count); }
inline kvq_format_entry format_at(int32_t index) {
    return detail::ask<kvq_format_entry>(kvq_format_list, index);
}

class format : public detail::owner<kvq_format, kvq_format_free> {
public:
    struct bytes {
        size_t page, workspace;
    };

    using owner::owner;
    format(const char* name, kvq_role role, const kvq_statistics* statistics = nullptr)
        : owner(kvq_format_find, name, role, statistics) {}

    kvq_format_description describe(kvq_role role, int32_t tokens, int32_t dim) const {
        return ask<kvq_format_description>(kvq_format_describe, role, tokens, dim);
    }
    bytes page_bytes(const kvq_page_shape& shape) const {
        bytes of{};
        call(kvq_format_page_bytes, &shape, &of.page, &of.workspace);
        return of;
    }
    /// Returns the number of NaN and infinities.
    size_t quantize(const kvq_page_shape& shape, const tensor& values, std::span<std::byte> page,
                    std::span<std::byte> workspace) const {
        return ask<size_t>(kvq_format_quantize, &shape, &values, page.data(), page.size(), workspace.data(),
                           workspace.size());
    }
    void dequantize(const kvq_page_shape& shape, std::span<const std::byte> page, const tensor& out,
                    std::span<std::byte> workspace) const {
        call(kvq_format_dequantize, &shape, page.data(), page.size(), &out, workspace.data(),
             workspace.size());
    }
};

class statistics : public detail::owner<kvq_statistics, kvq_statistics_free> {
public:
    using owner::owner;
    statistics(int32_t layers, int32_t kv_heads, int32_t head_dim, bool products = false)
        : owner(kvq_statistics_create, layers, kv_heads, head_dim, int32_t{products}) {}
    static statistics load(std::span<const std::byte> saved) {
        return {kvq_statistics_load, saved.data(), saved.size()};
    }

    void add_keys(int32_t layer, const tensor& k) { call(kvq_statistics_add_keys, layer, &k); }
    void add_queries(int32_t layer, const tensor& q) { call(kvq_statistics_add_queries, layer, &q); }
    void add_sequence(const kvq_sequence* s, int32_t first, int32_t count) {
        call(kvq_statistics_add_sequence, s, first, count);
    }
    /// write: see sequence::save.
    template <class Write>
    void save(Write&& write) const {
        detail::stream to{write};
        to.check(kvq_statistics_save(get(), to.write, &to));
    }
};

// ---- sequences and caches --------------------------------------------------------------------------------------------

class sequence : public detail::owner<kvq_sequence, kvq_sequence_free> {
public:
    using owner::owner;
    sequence fork() const { return {kvq_sequence_fork, get()}; }
    int32_t tokens(int32_t layer = KVQ_ALL_LAYERS) const { return ask<int32_t>(kvq_sequence_tokens, layer); }

    void prefill(int32_t layer, const tensor& k, const tensor& v, const tensor& q, const tensor& out,
                 kvq_attend_options options = {}) {
        call(kvq_sequence_prefill, layer, &k, &v, &q, &out, detail::sized(options));
    }
    void append(int32_t layer, const tensor& k, const tensor& v) { call(kvq_sequence_append, layer, &k, &v); }
    void attend(int32_t layer, const tensor& q, const tensor& out, kvq_attend_options options = {}) const {
        call(kvq_sequence_attend, layer, &q, &out, detail::sized(options));
    }
    void append_draft(int32_t layer, const tensor& k, const tensor& v) {
        call(kvq_sequence_append_draft, layer, &k, &v);
    }
    void keep(std::span<const int32_t> path) { call(kvq_sequence_keep, path.data(), detail::count(path)); }
    void trim(int32_t tokens) { call(kvq_sequence_trim, tokens); }
    void drop_copies() { call(kvq_sequence_drop_copies); }
    void erase(int32_t first, int32_t last) { call(kvq_sequence_erase, first, last); }
    void shift(int32_t first, int32_t last, int64_t by) { call(kvq_sequence_shift, first, last, by); }
    void splice(const sequence& other, int32_t first, int32_t last) {
        call(kvq_sequence_splice, other.get(), first, last);
    }
    void release_reserved() { call(kvq_sequence_release_reserved); }

    size_t append_bytes(int32_t n) const { return ask<size_t>(kvq_sequence_append_bytes, n); }
    size_t prefill_bytes(int32_t n) const { return ask<size_t>(kvq_sequence_prefill_bytes, n); }
    size_t draft_bytes(int32_t n) const { return ask<size_t>(kvq_sequence_draft_bytes, n); }
    kvq_usage usage() const { return ask<kvq_usage>(kvq_sequence_get_usage); }
    void dequantize(int32_t layer, kvq_role role, int32_t first, const tensor& out) const {
        call(kvq_sequence_dequantize, layer, role, first, &out);
    }
    /// Returns the number of all pages.
    int32_t pages(int32_t layer, std::span<kvq_page> to) const {
        return ask<int32_t>(kvq_sequence_get_pages, layer, to.data(), detail::count(to));
    }

    /// write(const void* data, size_t bytes) takes all bytes. What it throws is thrown on; if it returns a bool, false is a failure.
    template <class Write>
    void save(Write&& write, kvq_save_options options = {}) const {
        detail::stream to{write};
        to.check(kvq_sequence_save(get(), detail::sized(options), to.write, &to));
    }
    void save_file(const char* path, kvq_save_options options = {}) const {
        call(kvq_sequence_save_file, detail::sized(options), path);
    }
    /// One message per call of write.
    template <class Write>
    void send_pages(int32_t layer, Write&& write) const {
        detail::stream to{write};
        to.check(kvq_sequence_send_pages(get(), layer, to.write, &to));
    }
};

/// Handles, for functions that take several sequences.
using sequence_list = std::span<kvq_sequence* const>;

class cache : public detail::owner<kvq_cache, kvq_cache_free> {
public:
    using owner::owner;
    explicit cache(kvq_cache_options options) : owner(kvq_cache_create, detail::sized(options)) {}

    /// The least byte_budget of a cache with these options.
    static size_t budget(kvq_cache_options options, kvq_budget_query query) {
        return detail::ask<size_t>(kvq_get_budget, detail::sized(options), detail::sized(query));
    }

    sequence new_sequence() { return {kvq_sequence_create, get()}; }
    kvq_cache_info info() const { return ask<kvq_cache_info>(kvq_cache_get_info); }

    /// name: NULL for the name by which the format was found.
    void add_format(kvq_role role, const format& added, const char* name = nullptr) {
        call(kvq_cache_add_format, role, added.get(), name);
    }
    void commit_to(kvq_role role, const char* name, int32_t first_layer = 0, int32_t last_layer = 0) {
        call(kvq_cache_commit_to, role, name, first_layer, last_layer);
    }
    int32_t find_format(kvq_role role, const char* name) const {
        return ask<int32_t>(kvq_cache_find_format, role, name);
    }
    format get_format(kvq_role role, int32_t index) const {
        return {kvq_cache_get_format, get(), role, index};
    }

    size_t workspace_bytes(int32_t tokens, int32_t q_heads, int32_t q_tokens, int32_t threads) const {
        return ask<size_t>(kvq_cache_workspace_bytes, tokens, q_heads, q_tokens, threads);
    }
    kvq_footprint footprint(int32_t tokens, kvq_footprint_query query = {}) const {
        return ask<kvq_footprint>(kvq_cache_get_footprint, tokens, detail::sized(query));
    }
    int32_t longest_context(size_t budget, kvq_footprint_query query = {}) const {
        return ask<int32_t>(kvq_cache_longest_context, budget, detail::sized(query));
    }

    /// options.workspace must not be NULL.
    void reserve(std::span<const kvq_step_request> steps, int32_t q_heads, kvq_attend_options options) {
        call(kvq_cache_reserve, steps.data(), detail::count(steps), q_heads, detail::sized(options));
    }
    void attend(int32_t layer, std::span<const kvq_attend_request> batch,
                kvq_attend_options options = {}) const {
        call(kvq_cache_attend, layer, batch.data(), detail::count(batch), detail::sized(options));
    }
    void prefill(int32_t layer, std::span<const kvq_prefill_request> batch, kvq_attend_options options = {}) {
        call(kvq_cache_prefill, layer, batch.data(), detail::count(batch), detail::sized(options));
    }
    void attend_pages(int32_t layer, std::span<const kvq_page> pages, const tensor& q, const tensor& out,
                      kvq_attend_options options = {}) const {
        call(kvq_cache_attend_pages, layer, pages.data(), detail::count(pages), &q, &out,
             detail::sized(options));
    }

    kvq_requantize_report requantize(sequence_list all, kvq_requantize_request request) {
        return ask<kvq_requantize_report>(kvq_cache_requantize, all.data(), detail::count(all),
                                          detail::sized(request));
    }
    kvq_step_down_report step_down(sequence_list all, kvq_step_down_policy policy,
                                   kvq_executor* executor = nullptr) {
        return ask<kvq_step_down_report>(kvq_cache_step_down, all.data(), detail::count(all),
                                         detail::sized(policy), executor);
    }

    /// read(void* to, size_t bytes) writes up to `bytes` bytes and returns how many, 0 at the end. What it throws is thrown on.
    template <class Read>
    sequence restore(Read&& read, kvq_save_options options = {}) {
        detail::stream from{read};
        kvq_sequence* s = nullptr;
        from.check(kvq_sequence_restore(get(), detail::sized(options), from.read, &from, &s));
        sequence restored(s);
        return restored;
    }
    sequence restore_file(const char* path, kvq_save_options options = {}) {
        return {kvq_sequence_restore_file, get(), detail::sized(options), path};
    }
};

class receiver : public detail::owner<kvq_receiver, kvq_receiver_free> {
public:
    using owner::owner;
    explicit receiver(cache& to) : owner(kvq_receiver_create, to.get()) {}

    void accept(std::span<const std::byte> message) {
        call(kvq_receiver_accept, message.data(), message.size());
    }
    sequence finish(int32_t tokens = -1) { return {kvq_receiver_finish, get(), tokens}; }
};

// ---- prefix cache and ring -------------------------------------------------------------------------------------------

class prefix_cache : public detail::owner<kvq_prefix_cache, kvq_prefix_cache_free> {
public:
    using token_ids = std::span<const int32_t>;
    struct lookup_result {
        int32_t match, tokens;  // KVQ_MATCH_EXACT, ...; leading tokens that need not be computed
    };
    struct fetch_result {
        int32_t match, tokens;
        library::sequence sequence;
    };

    using owner::owner;
    explicit prefix_cache(cache& of, kvq_prefix_cache_options options = {})
        : owner(kvq_prefix_cache_create, of.get(), detail::sized(options)) {}

    lookup_result lookup(token_ids ids) const {
        lookup_result r{};
        call(kvq_prefix_cache_lookup, ids.data(), detail::count(ids), &r.match, &r.tokens);
        return r;
    }
    fetch_result fetch(token_ids ids) {
        fetch_result r{KVQ_MISS, 0, library::sequence(nullptr)};
        r.sequence = library::sequence(kvq_prefix_cache_fetch, get(), ids.data(), detail::count(ids),
                                       &r.match, &r.tokens);
        return r;
    }
    /// Returns KVQ_STORED, ...
    int32_t store(token_ids ids, const sequence& s) {
        return ask<int32_t>(kvq_prefix_cache_store, ids.data(), detail::count(ids), s.get());
    }
    bool erase(token_ids ids) {
        return ask<int32_t>(kvq_prefix_cache_erase, ids.data(), detail::count(ids)) != 0;
    }
    void clear() { call(kvq_prefix_cache_clear); }
    size_t release_bytes(size_t bytes) { return ask<size_t>(kvq_prefix_cache_release, bytes); }
    kvq_step_down_report step_down(sequence_list live, kvq_step_down_policy policy,
                                   kvq_executor* executor = nullptr) {
        return ask<kvq_step_down_report>(kvq_prefix_cache_step_down, live.data(), detail::count(live),
                                         detail::sized(policy), executor);
    }
    kvq_prefix_cache_statistics statistics() const {
        return ask<kvq_prefix_cache_statistics>(kvq_prefix_cache_get_statistics);
    }
};

class ring : public detail::owner<kvq_ring, kvq_ring_free> {
public:
    struct positions {
        int64_t tokens, first_token;
    };

    using owner::owner;
    ring(const sequence& s, kvq_ring_options options)
        : owner(kvq_ring_create, s.get(), detail::sized(options)) {}

    ring fork() const { return {kvq_ring_fork, get()}; }
    sequence held() const { return {kvq_ring_held, get()}; }
    positions tokens(int32_t layer = KVQ_ALL_LAYERS) const {
        positions p{};
        call(kvq_ring_tokens, layer, &p.tokens, &p.first_token);
        return p;
    }
    void prefill(int32_t layer, const tensor& k, const tensor& v, const tensor& q, const tensor& out,
                 kvq_attend_options options = {}) {
        call(kvq_ring_prefill, layer, &k, &v, &q, &out, detail::sized(options));
    }
    void append(int32_t layer, const tensor& k, const tensor& v) { call(kvq_ring_append, layer, &k, &v); }
    void attend(int32_t layer, const tensor& q, const tensor& out, kvq_attend_options options = {}) const {
        call(kvq_ring_attend, layer, &q, &out, detail::sized(options));
    }
    void append_draft(int32_t layer, const tensor& k, const tensor& v) {
        call(kvq_ring_append_draft, layer, &k, &v);
    }
    void keep(std::span<const int32_t> path) { call(kvq_ring_keep, path.data(), detail::count(path)); }
    void trim(int64_t tokens) { call(kvq_ring_trim, tokens); }
};

}}}  // namespace kvq::library
