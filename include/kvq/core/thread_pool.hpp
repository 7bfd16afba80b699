// The ready-made executor (core/executor.hpp): threads that stay and sleep when there is no work.
//
//   kvq::thread_pool threads(8);                                       seven threads, and the one that calls
//   cache.prefill(layer, batch, kvq::causal{}, threads, workspace);
//
// For engines without threads of their own; those that send all of their threads into an operation:
// core/team.hpp. fork(): a child has none of the threads. There parallel_for() runs all tasks on the calling
// thread, and the destructor does not wait. A fork while a call of kvq is going on on another thread leaves
// the child what that call had locked.
#pragma once

#include <memory>
#include <thread>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include "error.hpp"
#include "executor.hpp"
#include "task_list.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

class thread_pool {
public:
    /// Starts threads - 1 threads; the calling thread of parallel_for() is the other one. Raises kvq::error
    /// below 1.
    explicit thread_pool(int threads) : threads_(threads) {
        detail::expect(threads >= 1, "a thread_pool needs at least 1 thread, got ", threads);
        helpers_.all->reserve(static_cast<std::size_t>(threads - 1));
        for (int i = 1; i < threads; ++i)
            helpers_.all->emplace_back([this] { tasks_.help([this] { return helpers_.stop.load(); }); });
    }
    thread_pool(const thread_pool&) = delete;
    thread_pool& operator=(const thread_pool&) = delete;

    static constexpr bool runs_each_task_once = true;
    int concurrency() const noexcept { return threads_; }
    /// Calls f(0) ... f(n-1) and returns when all have ended; then raises the first error of a task.
    /// Allocates nothing. May be called from any thread; while another call is going on, and from a task, it
    /// runs its tasks on the calling thread alone.
    template <class F>
    void parallel_for(int n, F&& f) const {
        tasks_.run(n, f);
    }

private:
    // Joins also those threads that were started before one could not be.
    struct helpers {
        detail::task_list& tasks;
        std::atomic<bool> stop{false};
        long process = this_process();
        std::unique_ptr<std::vector<std::thread>> all = std::make_unique<std::vector<std::thread>>();
        ~helpers() {
            if (this_process() != process) {  // the threads are those of the parent: left as they are
                (void)all.release();
                return;
            }
            stop = true;
            tasks.wake();
            for (std::thread& t : *all) t.join();
        }
    };
    static long this_process() noexcept {
#if defined(__unix__) || defined(__APPLE__)
        return static_cast<long>(::getpid());
#else
        return 0;  // no fork()
#endif
    }

    int threads_;
    mutable detail::task_list tasks_;
    helpers helpers_{tasks_};
};

}}  // namespace kvq
