// What the handles of the C interface hold.
#pragma once

#include <deque>
#include <kvq/cache/page_list.hpp>
#include <kvq/cache/requantize.hpp>
#include <kvq/core/task_marks.hpp>
#include <kvq/core/thread_pool.hpp>
#include <kvq/quant/calibration.hpp>
#include <memory>
#include <memory_resource>
#include <optional>
#include <string>
#include <vector>

#include "structs.hpp"

namespace kvq::c {

/// The allocator of a caller, or the heap.
class caller_memory final : public std::pmr::memory_resource {
public:
    /// Reads the struct; NULL: the heap.
    explicit caller_memory(const kvq_allocator* allocator);

private:
    void* do_allocate(std::size_t bytes, std::size_t alignment) override;
    void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override;
    bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
        return this == &other;
    }

    kvq_allocator functions_{};
};

/// The threads of a caller, or of kvq. Errors of tasks do not cross the functions of the caller.
class caller_executor {
public:
    explicit caller_executor(int threads)
        : own_(std::make_unique<thread_pool>(threads)), concurrency_(threads) {}
    explicit caller_executor(const kvq_executor_callbacks& callbacks)
        : callbacks_(callbacks), concurrency_(callbacks.concurrency) {}

    static constexpr bool runs_each_task_once = true;  // else it raises a failure with its own status
    int concurrency() const noexcept { return concurrency_; }
    template <class F>
    void parallel_for(int n, F&& f) const {
        if (own_) return own_->parallel_for(n, f);
        if (n <= 0) return;
        struct work {
            std::remove_reference_t<F>& f;
            detail::task_marks marks;
            detail::task_errors errors{};
        } all{f, detail::task_marks(n)};
        const kvq_task task = [](void* data, std::int32_t i) {
            work& mine = *static_cast<work*>(data);
            if (mine.marks.take(i)) mine.errors.run(mine.f, i);
        };
        const std::int32_t result = callbacks_.parallel_for(callbacks_.user, n, task, &all);
        all.errors.raise();
        expect(result == 0, KVQ_ERROR_CALLBACK, "parallel_for returned ", result);
        if (!all.marks.all_once()) fail(KVQ_ERROR_CALLBACK, all.marks.complaint());
    }

private:
    std::unique_ptr<thread_pool> own_;  // null: callbacks_
    kvq_executor_callbacks callbacks_{};
    int concurrency_;
};

/// A cache, its memory, and the names of its formats. Kept by all that belongs to the cache.
struct cache_state {
    struct named {
        std::string name;
        int listed;  // in cache_options::keys or values
    };

    caller_memory memory;
    std::shared_ptr<std::pmr::memory_resource> pages;  ///< or null: `memory`
    std::vector<named> names[2];
    kvq::cache cache;

    cache_state(const kvq_cache_options& o);
    /// o.memory is that of `of_pages`.
    cache_state(std::vector<layer> layers, const cache_options& o,
                std::shared_ptr<std::pmr::memory_resource> of_pages);

    const std::vector<named>& names_of(tensor role) const noexcept {
        return names[static_cast<std::size_t>(role)];
    }
    /// The listed format of this name. Raises a failure if there is none.
    int listed(tensor role, const char* name) const;

private:
    static std::vector<layer> layers_of(const kvq_cache_options& o);
    cache_options read(const kvq_cache_options& o);
    int list(tensor role, const std::string& name, format_list& formats, const calibration* statistics);
};
using shared_cache = std::shared_ptr<cache_state>;

/// The names of a list "a, b, c".
inline std::vector<std::string> listed_names(const std::string& list, const char* what) {
    std::vector<std::string> names;
    for (std::size_t at = 0; at <= list.size();) {
        const std::size_t end = std::min(list.find(',', at), list.size());
        const std::size_t first = std::min(list.find_first_not_of(' ', at), end);
        const std::size_t last = list.find_last_not_of(' ', end == 0 ? 0 : end - 1);
        expect(first < end, KVQ_ERROR_ARGUMENT, what, " \"", list, "\" lists an empty name");
        names.push_back(list.substr(first, last + 1 - first));
        at = end + 1;
    }
    return names;
}

/// The format of a name, made from statistics if it takes them.
format found_format(const std::string& name, tensor role, const calibration* statistics);

/// A layer without its formats and parts of state.
layer layer_of(const kvq_layer& given);
/// Gives layers their parts of state.
void add_parts(std::vector<layer>& layers, const kvq_state_part* parts, std::int32_t count);
/// Options of a cache on the CPU or on a device.
template <class Options>
snapshot_policy snapshots_of(const Options& o) {
    snapshot_policy p;
    p.every = o.snapshot_every;
    p.prompt_end = o.snapshot_prompt_end != KVQ_NONE;
    if (o.snapshot_bytes != 0) p.most_bytes = o.snapshot_bytes;
    return p;
}
inline key_statistics statistics_of(std::int32_t given) {
    expect(given >= KVQ_NONE && given <= KVQ_SHARED_STATISTICS, KVQ_ERROR_ARGUMENT,
           "options.key_statistics is ", given,
           ", none of KVQ_OWN_STATISTICS, KVQ_SHARED_STATISTICS and KVQ_NONE");
    return given == KVQ_NONE                ? key_statistics::off
           : given == KVQ_SHARED_STATISTICS ? key_statistics::shared
                                            : key_statistics::own;
}
rotary_embedding rotary_of(const kvq_rotary& given);
template <class Options>
std::vector<rotary_embedding> rotary_list(const Options& o) {
    expect(o.rotary_count >= 0, KVQ_ERROR_ARGUMENT, "rotary_count is ", o.rotary_count);
    expect_list(o.rotary, o.rotary_count, "options.rotary");
    expect(o.rotary_count <= std::max(1, o.layers), KVQ_ERROR_ARGUMENT, o.rotary_count,
           " rotary embeddings for ", o.layers, " layers");
    std::vector<rotary_embedding> list;
    for (std::int32_t i = 0; i < o.rotary_count; ++i) list.push_back(rotary_of(o.rotary[i]));
    return list;
}
/// Kind and shape of a layer of a cache, on the CPU or on a device.
template <class Cache>
kvq_layer layer_of(const Cache& of, int i) noexcept {
    const layer& l = of.layers()[static_cast<std::size_t>(i)];
    return {static_cast<std::int32_t>(l.kind),
            l.kv_heads,
            l.head_dim,
            of.shape(i).dim(tensor::value),
            l.kind == layer_kind::latent ? l.rotary_channels : l.window,
            l.sinks,
            l.owner};
}

}  // namespace kvq::c

struct kvq_workspace : kvq::c::handle<kvq_workspace> {
    static constexpr std::uint32_t word = 0x776b7631;
    static constexpr const char* kind = "workspace";
    kvq::c::caller_memory memory;
    kvq::workspace space{&memory};

    explicit kvq_workspace(const kvq_allocator* allocator) : memory(allocator) {}
};

struct kvq_executor : kvq::c::handle<kvq_executor> {
    static constexpr std::uint32_t word = 0x656b7631;
    static constexpr const char* kind = "executor";
    kvq::c::caller_executor threads;

    template <class From>
    explicit kvq_executor(const From& from) : threads(from) {}
};

struct kvq_format : kvq::c::handle<kvq_format> {
    static constexpr std::uint32_t word = 0x666b7631;
    static constexpr const char* kind = "format";
    kvq::format format;
    std::string name;        // by which it was found
    kvq::cache_shape model;  // for which its state was made; 0 layers: any

    kvq_format(kvq::format f, std::string found, const kvq::cache_shape& shape)
        : format(std::move(f)), name(std::move(found)), model(shape) {}
};

struct kvq_statistics : kvq::c::handle<kvq_statistics> {
    static constexpr std::uint32_t word = 0x636b7631;
    static constexpr const char* kind = "statistics";
    kvq::calibration sums;

    explicit kvq_statistics(kvq::calibration c) : sums(std::move(c)) {}
};

struct kvq_cache : kvq::c::handle<kvq_cache> {
    static constexpr std::uint32_t word = 0x6b766371;
    static constexpr const char* kind = "cache";
    kvq::c::shared_cache state;

    explicit kvq_cache(kvq::c::shared_cache s) : state(std::move(s)) {}
};

struct kvq_sequence : kvq::c::handle<kvq_sequence> {
    static constexpr std::uint32_t word = 0x736b7631;
    static constexpr const char* kind = "sequence";
    kvq::c::shared_cache of;
    kvq::sequence sequence;

    kvq_sequence(kvq::c::shared_cache c, kvq::sequence s) : of(std::move(c)), sequence(std::move(s)) {}
    /// What take() returns. It is called when the handle has its memory: what it takes away is not lost
    /// without a handle.
    template <class Take>
    requires std::is_invocable_r_v<kvq::sequence, Take> kvq_sequence(kvq::c::shared_cache c, Take&& take)
        : of(std::move(c)), sequence(take()) {}
};

namespace kvq::c {

/// Raises a failure unless both belong to one cache.
inline void expect_same(const shared_cache& a, const shared_cache& b, const char* name) {
    expect(a == b, KVQ_ERROR_HANDLE, name, " belongs to another cache");
}

/// NULL: the calling thread.
executor_view executor_of(kvq_executor* executor);

/// The workspace of a call: that of the caller, or one for the duration of the call.
class call_workspace {
public:
    call_workspace(kvq_workspace* given, const kvq::cache& of)
        : own_(of.pool().memory()), space_(given ? &get(given, "workspace").space : &own_) {}
    call_workspace(const call_workspace&) = delete;
    call_workspace& operator=(const call_workspace&) = delete;
    operator workspace&() noexcept { return *space_; }

private:
    workspace own_;
    workspace* space_;
};

/// A sink of bytes of the caller.
struct caller_sink {
    kvq_write write;
    void* user;

    void operator()(const void* data, std::size_t bytes) const {
        const std::int32_t result = write(user, data, bytes);
        expect(result == 0, KVQ_ERROR_CALLBACK, "write returned ", result, " for ", bytes, " bytes");
    }
};

/// The sequences of a list, all of this cache.
std::vector<sequence*> sequences_of(kvq_sequence* const* list, std::int32_t count, const shared_cache& of);

}  // namespace kvq::c
