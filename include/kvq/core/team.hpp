// An executor for engines that send all of their threads into every operation, as ggml and OpenMP do.
//
//   kvq::team team;                                              one per pool of threads
//   team.enter(nth, [&](kvq::executor_view threads) {            on each of the nth threads, with the same
//                                                                work
//       cache.prefill(layer, batch, kvq::causal{}, threads, workspace);
//   });
//   team.check();                                                once per step, on one thread: raises what an
//                                                                operation raised
//
// The first thread that enters runs the operation, the others run tasks of it, and all of them return when it
// has ended and all have entered. Contract: allocates nothing and takes no lock; nth may differ from
// operation to operation; a thread that enters late gets no task. Threads wait as detail::task_list says.
// enter() raises nothing, because a C callback cannot pass an exception on: the team keeps the first error
// and skips further operations until check().
#pragma once

#include <atomic>
#include <utility>

#include "error.hpp"
#include "executor.hpp"
#include "task_list.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

class team {
public:
    team() = default;
    team(const team&) = delete;
    team& operator=(const team&) = delete;

    /// Every one of nth threads calls it once for every operation. op: void(executor_view); one thread calls
    /// it, and its executor has nth threads. The operations of a team follow one another. Raises kvq::error
    /// for nth below 1, and nothing else.
    template <class Op>
    void enter(int nth, Op&& op) {
        detail::expect(nth >= 1, "a team of ", nth, " threads");
        const auto all = static_cast<std::uint32_t>(nth);
        // No operation ends before all of its threads have entered, so this one has not.
        const std::uint32_t ended = ended_.load(std::memory_order_acquire);
        const std::uint32_t before = entered_.fetch_add(1, std::memory_order_acq_rel);
        if (before != 0) {
            if (before + 1 == all) entered_.notify_all();
            tasks_.help([&] { return ended_.load(std::memory_order_acquire) != ended; });
            return;
        }
        run(op, members{&tasks_, nth});
        for (std::uint32_t here = entered_.load(std::memory_order_acquire); here < all;
             here = entered_.load(std::memory_order_acquire))
            detail::wait_while(entered_, here);
        entered_.store(0, std::memory_order_relaxed);
        ended_.fetch_add(1, std::memory_order_acq_rel);
        tasks_.wake();
    }

    /// Did an operation fail since the last check()? Between operations, on any thread.
    bool failed() const noexcept { return static_cast<bool>(error_); }
    /// Raises the first error since the last check(), if there was one. Between operations, on any thread.
    void check() {
        if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    }

private:
    struct members {
        detail::task_list* tasks;
        int threads;
        static constexpr bool runs_each_task_once = true;
        int concurrency() const noexcept { return threads; }
        template <class F>
        void parallel_for(int n, F&& f) const {
            tasks->run(n, f);
        }
    };

    template <class Op>
    void run(Op& op, const members& threads) noexcept {
        if (!error_) error_ = detail::caught([&] { op(executor_view(threads)); });
    }

    detail::task_list tasks_;
    alignas(64) std::atomic<std::uint32_t> entered_{0};  // threads that are in the present operation
    alignas(64) std::atomic<std::uint32_t> ended_{0};    // operations
    std::exception_ptr error_;                           // of the thread that runs the operation
};

}}  // namespace kvq
