// Threads that wait for tasks of the model and of the attention of its cache.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace llama {

// A kvq executor (kvq/core/executor.hpp). One call at a time. Results never depend on the number of
// threads: callers cut their work by size.
class worker_pool {
public:
    explicit worker_pool(int threads = 1) {
        for (int helper = 1; helper < threads; ++helper) {
            helpers_.emplace_back([this](const std::stop_token& stop) { wait_for_work(stop); });
        }
    }
    worker_pool(const worker_pool&) = delete;
    worker_pool& operator=(const worker_pool&) = delete;

    int concurrency() const noexcept { return static_cast<int>(helpers_.size()) + 1; }

    // Calls work(0) ... work(count - 1) and returns when all have ended. The caller gets the first exception.
    template <class Work>
    void parallel_for(int count, Work&& work) {
        if (helpers_.empty() || count <= 1) {
            for (int index = 0; index < count; ++index) {
                work(index);
            }
            return;
        }
        std::unique_lock lock(mutex_);
        work_ = std::ref(work);
        next_ = 0;
        count_ = count;
        unfinished_ = count;
        lock.unlock();
        begin_.notify_all();
        lock.lock();
        take_tasks(lock);
        end_.wait(lock, [&] { return unfinished_ == 0; });
        if (failure_) {
            std::rethrow_exception(std::exchange(failure_, nullptr));
        }
    }

private:
    void wait_for_work(const std::stop_token& stop) {
        std::unique_lock lock(mutex_);
        while (begin_.wait(lock, stop, [&] { return next_ < count_; })) {
            take_tasks(lock);
        }
    }

    // The lock is held, except while a task runs.
    void take_tasks(std::unique_lock<std::mutex>& lock) {
        while (next_ < count_) {
            const int index = next_++;
            lock.unlock();
            std::exception_ptr failure;
            try {
                work_(index);
            } catch (...) {
                failure = std::current_exception();
            }
            lock.lock();
            if (failure && !failure_) {
                failure_ = failure;
            }
            if (--unfinished_ == 0) {
                end_.notify_one();
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable_any begin_, end_;
    std::function<void(int)> work_;
    int next_ = 0, count_ = 0, unfinished_ = 0;
    std::exception_ptr failure_;
    std::vector<std::jthread> helpers_;  // last member: they stop before other members are destroyed
};

}  // namespace llama
