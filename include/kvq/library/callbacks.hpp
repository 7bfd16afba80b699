// C++ callables as the callbacks of kvq.h: a pointer to a function, and the object as `user`. Nothing is allocated.
//
//   auto near = [](int query, int key) { return query - key < 100; };
//   mods m; m.use(near);                            kvq_mods
//   allocator memory(resource);                     kvq_allocator, from a std::pmr::memory_resource
//   executor_callbacks threads(8, run);             kvq_executor_callbacks, from a lambda or an executor of core/executor.hpp
//   stream to{write};                               kvq_write and kvq_read of one call
//
// Contract: objects are referred to, not copied. Exceptions of streams are thrown on behind the call, those of allocators and executors are
// KVQ_ERROR_MEMORY and KVQ_ERROR_CALLBACK; hooks and deallocate must not throw.
#pragma once

#include <exception>
#include <limits>

#include "handle.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace library {

namespace detail {

template <class F>
void* address(F& f) noexcept {
    return const_cast<void*>(static_cast<const void*>(&f));
}
template <class F>
F& at(void* user) noexcept {
    return *static_cast<F*>(user);
}

/// f(), or `failed` and what it threw: no exception crosses the library.
template <class T, class F>
T guarded([[maybe_unused]] T failed, [[maybe_unused]] std::exception_ptr* thrown, F&& f) noexcept {
#if KVQ_EXCEPTIONS
    try {
        return f();
    } catch (...) {
        if (thrown != nullptr) *thrown = std::current_exception();
        return failed;
    }
#else
    return f();
#endif
}

/// A callable for one call of the library.
template <class F>
struct stream {
    F& f;
    std::exception_ptr thrown{};

    static int32_t write(void* user, const void* data, size_t bytes) noexcept {
        stream& s = at<stream>(user);
        return guarded(int32_t{1}, &s.thrown, [&] {
            if constexpr (std::is_void_v<decltype(s.f(data, bytes))>)
                return s.f(data, bytes), int32_t{0};
            else
                return s.f(data, bytes) ? int32_t{0} : int32_t{1};
        });
    }
    static size_t read(void* user, void* to, size_t bytes) noexcept {
        stream& s = at<stream>(user);
        return guarded(size_t{0}, &s.thrown, [&] { return static_cast<size_t>(s.f(to, bytes)); });
    }
    /// Raises what it threw, or what the status says.
    void check(kvq_status status) const {
        if (thrown) std::rethrow_exception(thrown);
        detail::check(status);
    }
};
template <class F>
stream(F&) -> stream<F>;

// Hooks of attention/mods.hpp; a mask or a score modifier for one key may be the object itself, a lambda.
template <class H>
concept row_mask = requires(const H& h, float* scores) {
    h.mask_row(scores, 0, 0, 0);
};
template <class H>
concept named_mask = requires(const H& h) {
    bool(h.mask(0, 0));
};
template <class H>
concept any_mask = row_mask<H> || named_mask<H> || requires(const H& h) {
    bool(h(0, 0));
};
template <class H>
concept page_mask = requires(const H& h) {
    static_cast<int32_t>(h.mask_page(0, 0, 0, 0));
};
template <class H>
concept row_score = requires(const H& h, float* scores) {
    h.score_row(scores, 0, 0, 0, 0);
};
template <class H>
concept named_score = requires(const H& h) {
    float(h.score(0.0f, 0, 0, 0));
};
template <class H>
concept any_score = row_score<H> || named_score<H> || requires(const H& h) {
    float(h(0.0f, 0, 0, 0));
};
/// Hooks for which kvq_mods has members.
template <class H>
concept other_hook = requires(const H& h) {
    h.scale(1);
}
|| requires(const H& h) { h.sink_logit(0); }
|| requires(const H& h) { h.selection(); }
|| requires(const H& h) { h.skipping(); }
|| requires { H::is_causal; }
|| requires { H::has_query_positions; };

template <class H>
struct hooks {
    static bool sees(const H& h, int32_t query, int32_t key) {
        if constexpr (named_mask<H>)
            return bool(h.mask(query, key));
        else
            return bool(h(query, key));
    }
    static float changed(const H& h, float score, int32_t query_head, int32_t query, int32_t key) {
        if constexpr (named_score<H>)
            return float(h.score(score, query_head, query, key));
        else
            return float(h(score, query_head, query, key));
    }
    static void mask_row(void* user, float* scores, int32_t n, int32_t query, int32_t first_key) noexcept {
        const H& h = at<const H>(user);
        if constexpr (row_mask<H>)
            h.mask_row(scores, n, query, first_key);
        else
            for (int32_t i = 0; i < n; ++i)
                if (!sees(h, query, first_key + i)) scores[i] = -std::numeric_limits<float>::infinity();
    }
    static int32_t mask_page(void* user, int32_t first_query, int32_t last_query, int32_t first_key,
                             int32_t end_key) noexcept {
        return static_cast<int32_t>(at<const H>(user).mask_page(first_query, last_query, first_key, end_key));
    }
    static void score_row(void* user, float* scores, int32_t n, int32_t query_head, int32_t query,
                          int32_t first_key) noexcept {
        const H& h = at<const H>(user);
        if constexpr (row_score<H>)
            h.score_row(scores, n, query_head, query, first_key);
        else
            for (int32_t i = 0; i < n; ++i)
                scores[i] = changed(h, scores[i], query_head, query, first_key + i);
    }
};

}  // namespace detail

/// Memory of an object with allocate(bytes, alignment) and deallocate(memory, bytes, alignment), such as a std::pmr::memory_resource. An
/// exception of allocate is KVQ_ERROR_MEMORY. The object must outlive what is made with it.
struct allocator : initialized<kvq_allocator> {
    template <class Memory>
    explicit allocator(Memory& memory) noexcept {
        user = detail::address(memory);
        allocate = [](void* of, size_t bytes, size_t alignment) {
            return detail::guarded(static_cast<void*>(nullptr), nullptr, [&]() -> void* {
                return detail::at<Memory>(of).allocate(bytes, alignment);
            });
        };
        deallocate = [](void* of, void* data, size_t bytes, size_t alignment) {
            detail::at<Memory>(of).deallocate(data, bytes, alignment);
        };
    }
};

/// One of the tasks that an executor of the engine runs: task(i).
struct task {
    kvq_task run;
    void* data;
    void operator()(int32_t i) const { run(data, i); }
};

namespace detail {
template <class E>
concept parallel = requires(E& e) {
    e.parallel_for(1, task{});
};
}  // namespace detail

/// run(n, task) calls task(i) for every i in [0, n) and returns when all have ended; or run is an executor of core/executor.hpp.
struct executor_callbacks : initialized<kvq_executor_callbacks> {
    template <class Run>
    executor_callbacks(int32_t tasks_at_once, Run& run) noexcept {
        concurrency = tasks_at_once;
        user = detail::address(run);
        parallel_for = [](void* of, int32_t n, kvq_task f, void* data) {
            return detail::guarded(int32_t{1}, nullptr, [&] {
                if constexpr (detail::parallel<Run>)
                    detail::at<Run>(of).parallel_for(n, task{f, data});
                else
                    detail::at<Run>(of)(n, task{f, data});
                return int32_t{0};
            });
        };
    }
};

struct mods : initialized<kvq_mods> {
    /// Own mask and score modifier: a lambda, bool(int query, int key) or float(float score, int query_head, int query, int key), or an
    /// object with any of mask, mask_row, mask_page, score and score_row as in attention/mods.hpp. It must outlive the mods. Called from
    /// any thread.
    template <class Hooks>
    mods& use(const Hooks& hooks) noexcept {
        static_assert(
            detail::any_mask<Hooks> || detail::any_score<Hooks>,
            "kvq: hooks are const: mask(int, int) or score(float, int, int, int), or such a lambda");
        static_assert(!detail::other_hook<Hooks>, "kvq: this hook is a member of kvq_mods");
        user = detail::address(hooks);
        mask_row = nullptr, mask_page = nullptr, score_row = nullptr;
        if constexpr (detail::any_mask<Hooks>) mask_row = detail::hooks<Hooks>::mask_row;
        if constexpr (detail::page_mask<Hooks>) mask_page = detail::hooks<Hooks>::mask_page;
        if constexpr (detail::any_score<Hooks>) score_row = detail::hooks<Hooks>::score_row;
        return *this;
    }
    template <class Hooks>
    mods& use(const Hooks&&) = delete;
};

/// Keys are rotated by f(float* row, int head_dim, int64_t by), from any thread. It must outlive the cache.
template <class F>
kvq_rotary rotated_by(const F& f) noexcept {
    kvq_rotary rotary{};
    rotary.user = detail::address(f);
    rotary.rotate = [](void* of, float* row, int32_t head_dim, int64_t by) {
        detail::at<const F>(of)(row, head_dim, by);
    };
    return rotary;
}
template <class F>
kvq_rotary rotated_by(const F&&) = delete;

}}}  // namespace kvq::library
