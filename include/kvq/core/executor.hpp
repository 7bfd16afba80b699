// Executors run the tasks of an attention call. An executor is any type with
//
//   int concurrency() const                 number of tasks that may run at once (at least 1)
//   void parallel_for(int n, F f)           calls f(0) ... f(n-1), in any order, and returns when all are
//                                           done. f may throw (a scheme that runs out of memory): after the
//                                           last task ends, the caller must get one of the errors
//
// A list of which a task was not run, or run twice, raises kvq::error; a task never runs a second time.
// Results never depend on the executor: tasks are cut by shape, and partial results are merged in a fixed
// order. serial_executor: everything on the calling thread. thread_pool (core/thread_pool.hpp): threads that
// wait for work. team (core/team.hpp): the threads of an engine that sends all of them into every operation,
// of ggml and OpenMP for example. oneTBB: struct { int concurrency() const; void parallel_for(int n, auto f)
// { tbb::parallel_for(0, n, f); } };
#pragma once

#include <concepts>
#include <type_traits>

#include "error.hpp"
#include "task_marks.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

template <class E>
concept executor = requires(E& e, void (*f)(int)) {
    { e.concurrency() } -> std::convertible_to<int>;
    e.parallel_for(1, f);
};

namespace detail {
/// Executors of kvq, whose tasks need no marks.
template <class E>
concept exact_executor = requires {
    requires E::runs_each_task_once;
};
}  // namespace detail

namespace detail {
/// Runs call(f, i) for all i below n on an executor of type E. Here, so that it has the name of the
/// instruction set, whoever E is from.
template <class E>
void run_of(void* self, int n, void* f, void (*call)(void*, int)) {
    if constexpr (exact_executor<E>) {
        static_cast<E*>(self)->parallel_for(n, [f, call](int i) { call(f, i); });
    } else if (n > 0) {
        task_marks marks(n);
        static_cast<E*>(self)->parallel_for(n, [f, call, &marks](int i) {
            if (marks.take(i)) call(f, i);
        });
        if (!marks.all_once()) fail("the executor's ", marks.complaint());
    }
}
}  // namespace detail

/// Everything on the calling thread.
struct serial_executor {
    static constexpr bool runs_each_task_once = true;
    static constexpr int concurrency() noexcept { return 1; }
    template <class F>
    void parallel_for(int n, F&& f) const {
        for (int i = 0; i < n; ++i) f(i);
    }
};

}}  // namespace kvq

namespace kvq { inline namespace KVQ_COMMON {

/// An executor of a type that is known only at run time. The view must not outlive the executor.
class executor_view {
public:
    /// One call at a time uses the executor. The call may change it, even a const one (a temporary, for
    /// example).
    template <class E>
    requires executor<E> &&(!std::same_as<E, executor_view>)KVQ_NO_COPY executor_view(const E& e) noexcept
        : executor_(const_cast<E*>(&e)),
          threads_(static_cast<int>(const_cast<E&>(e).concurrency())),
          run_(&detail::run_of<E>) {}

    int concurrency() const noexcept { return threads_; }
    template <class F>
    void parallel_for(int n, F&& f) const {
        run_(executor_, n, const_cast<void*>(static_cast<const void*>(&f)),
             [](void* of, int i) { (*static_cast<std::remove_reference_t<F>*>(of))(i); });
    }

private:
    void* executor_;
    int threads_;
    void (*run_)(void*, int, void*, void (*)(void*, int));
};

}}  // namespace kvq
