// A list of tasks that several threads share without locks: what thread_pool and team are made of.
//
//   run(n, f)    calls f(0) ... f(n-1) on this thread and on those in help(), and returns when all have ended
//   help(over)   runs tasks of one list after the other, until over() holds; wake() makes waiting threads ask
//                again
//
// Contract: allocates nothing. All tasks run, also when some of them raise; run() then raises the first
// error. One list at a time: a run() while another one is going on (from one of its tasks, or from another
// thread) runs its tasks on the calling thread alone.
// Waiting: a thread spins for at most `longest_spin`, about what sleeping and waking cost, then it sleeps
// (std::atomic::wait).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>

#include "error.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

/// Catches errors of tasks on other threads; raise() rethrows the first one on the caller's thread.
class task_errors {
public:
    template <class F>
    void run(F& f, int i) noexcept {
        if (std::exception_ptr e = caught([&] { f(i); }); e && !taken_.exchange(true)) first_ = std::move(e);
    }
    /// Call after all tasks have ended.
    void raise() const {
        if (first_) std::rethrow_exception(first_);
    }

private:
    std::atomic<bool> taken_{false};
    std::exception_ptr first_;
};

inline constexpr std::chrono::microseconds longest_spin{100};

/// Returns when `a` is not `old` any more. Whoever changes `a` calls one of its notify functions.
inline void wait_while(const std::atomic<std::uint32_t>& a, std::uint32_t old) noexcept {
    const auto begin = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < 16; ++i) {
            if (a.load(std::memory_order_acquire) != old) return;
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            __asm__ __volatile__("yield");
#endif
        }
    } while (std::chrono::steady_clock::now() - begin < longest_spin);
    while (a.load(std::memory_order_acquire) == old) a.wait(old, std::memory_order_acquire);
}

class task_list {
public:
    task_list() = default;
    task_list(const task_list&) = delete;
    task_list& operator=(const task_list&) = delete;

    template <class F>
    void run(int n, F& f) {
        if (n <= 1 || busy_.exchange(true, std::memory_order_acquire)) {
            for (int i = 0; i < n; ++i) f(i);
            return;
        }
        task_errors errors;
        const auto task = [&](int i) noexcept { errors.run(f, i); };
        of_.store(&task, std::memory_order_relaxed);
        call_.store([](const void* of, int i) noexcept { (*static_cast<const decltype(task)*>(of))(i); },
                    std::memory_order_relaxed);
        count_.store(n, std::memory_order_relaxed);
        unfinished_.store(static_cast<std::uint32_t>(n), std::memory_order_relaxed);
        left_.store(++lists_ << 32 | static_cast<std::uint32_t>(n), std::memory_order_release);
        wake();
        while (take()) {
        }
        for (std::uint32_t left = unfinished_.load(std::memory_order_acquire); left != 0;
             left = unfinished_.load(std::memory_order_acquire))
            wait_while(unfinished_, left);
        busy_.store(false, std::memory_order_release);
        errors.raise();
    }

    template <class Over>
    void help(Over over) noexcept {
        for (;;) {
            const std::uint32_t seen = signal_.load(std::memory_order_acquire);
            while (take()) {
            }
            if (over()) return;
            wait_while(signal_, seen);
        }
    }

    void wake() noexcept {
        signal_.fetch_add(1, std::memory_order_acq_rel);
        signal_.notify_all();
    }

private:
    /// Runs a task that no thread has taken; false if there is none.
    bool take() noexcept {
        std::uint64_t left = left_.load(std::memory_order_acquire);
        while (static_cast<std::uint32_t>(left) != 0) {
            // What is read here belongs to list left >> 32 if the exchange succeeds: the next list is written
            // only after the last task of this one was taken, which changes left_.
            const void* const of = of_.load(std::memory_order_relaxed);
            const auto call = call_.load(std::memory_order_relaxed);
            const int count = count_.load(std::memory_order_relaxed);
            if (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acquire)) continue;
            call(of, count - static_cast<int>(static_cast<std::uint32_t>(left)));
            if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_all();
            return true;
        }
        return false;
    }

    // Number of the list, and below it the number of its tasks that no thread has taken.
    alignas(64) std::atomic<std::uint64_t> left_{0};
    std::atomic<const void*> of_{nullptr};
    std::atomic<void (*)(const void*, int)> call_{nullptr};
    std::atomic<int> count_{0};
    alignas(64) std::atomic<std::uint32_t> unfinished_{0};
    alignas(64) std::atomic<std::uint32_t> signal_{0};  // changes when there is something to do or to ask
    std::atomic<bool> busy_{false};
    std::uint64_t lists_ = 0;  // guarded by busy_
};

}}}  // namespace kvq::detail
