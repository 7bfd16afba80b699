// Who runs the tasks of an attention call. An executor is anything with
//
//   int concurrency() const                 how many tasks may run at once (at least 1)
//   void parallel_for(int n, F f)           calls f(0) ... f(n-1), in any order, and returns when all are done. f may throw (a scheme
//                                           that runs out of memory): one of the errors must reach the caller, when none runs any more
//
// Results never depend on the executor: tasks are cut by shape, and partial results are merged in a fixed order.
// serial_executor: everything on the calling thread. thread_executor, openmp_executor: core/thread_executor.hpp.
// oneTBB: struct { int concurrency() const; void parallel_for(int n, auto f) { tbb::parallel_for(0, n, f); } };
#pragma once

#include <concepts>
#include <type_traits>

#include "../config.hpp"

namespace kvq::inline KVQ_TAGGED {

template <class E>
concept executor = requires(E& e, void (*f)(int)) {
    { e.concurrency() } -> std::convertible_to<int>;
    e.parallel_for(1, f);
};

/// Everything on the calling thread.
struct serial_executor {
    static constexpr int concurrency() noexcept { return 1; }
    template <class F>
    void parallel_for(int n, F&& f) const {
        for (int i = 0; i < n; ++i) f(i);
    }
};

/// An executor of a type that is known at run time only; what it refers to must outlive it.
class executor_view {
public:
    /// An executor is used by one call at a time and may change meanwhile, also one that is given as const: a temporary, say.
    template <class E>
    requires executor<E> &&(!std::same_as<E, executor_view>)executor_view(const E& e) noexcept
        : executor_(const_cast<E*>(&e)),
          threads_(static_cast<int>(const_cast<E&>(e).concurrency())),
          run_([](void* self, int n, void* f, void (*call)(void*, int)) {
              static_cast<E*>(self)->parallel_for(n, [f, call](int i) { call(f, i); });
          }) {}

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

}  // namespace kvq::inline KVQ_TAGGED
