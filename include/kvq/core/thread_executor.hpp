// Executors (core/executor.hpp) on plain threads and on OpenMP's. Engines with their own thread pool pass an executor for it.
//
// Contract: the caller gets the first error of the tasks, after the last task ends.
#pragma once

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "error.hpp"
#include "executor.hpp"
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace kvq::inline KVQ_TAGGED {

namespace detail {

/// Catches errors of tasks on other threads; raise() rethrows the first one on the caller's thread.
class task_errors {
public:
    template <class F>
    void run(F& f, int i) noexcept {
#if KVQ_EXCEPTIONS
        try {
            f(i);
        } catch (...) {
            if (!taken_.exchange(true)) first_ = std::current_exception();
        }
#else
        f(i);
#endif
    }
    /// Call after all tasks have ended.
    void raise() const {
#if KVQ_EXCEPTIONS
        if (first_) std::rethrow_exception(first_);
#endif
    }

private:
    std::atomic<bool> taken_{false};
    std::exception_ptr first_;
};

}  // namespace detail

/// Plain threads, started for every call: simple, no dependency.
class thread_executor {
public:
    explicit thread_executor(int threads) : threads_(threads) {
        detail::expect(threads >= 1, "thread_executor needs at least 1 thread, got ", threads);
    }
    int concurrency() const noexcept { return threads_; }
    template <class F>
    void parallel_for(int n, F&& f) const {
        if (n <= 1) {
            for (int i = 0; i < n; ++i) f(i);
            return;
        }
        detail::task_errors errors;
        {
            joined_threads others;
            others.all.reserve(static_cast<std::size_t>(n - 1));
            for (int i = 1; i < n; ++i) others.all.emplace_back([&f, &errors, i] { errors.run(f, i); });
            errors.run(f, 0);
        }
        errors.raise();
    }

private:
    // std::jthread is not in every standard library yet.
    struct joined_threads {
        std::vector<std::thread> all;
        ~joined_threads() {
            for (std::thread& t : all) t.join();
        }
    };
    int threads_;
};

#if defined(_OPENMP)
/// The threads of OpenMP's current team size.
struct openmp_executor {
    static int concurrency() noexcept { return omp_get_max_threads(); }
    template <class F>
    void parallel_for(int n, F&& f) const {
        detail::task_errors errors;
#pragma omp parallel for schedule(dynamic, 1)
        for (int i = 0; i < n; ++i) errors.run(f, i);
        errors.raise();
    }
};
#endif

}  // namespace kvq::inline KVQ_TAGGED
