// Independent tasks on several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace llama {

// Calls work(0) ... work(count - 1) on several threads; after an exception no further work starts, and the caller gets it.
template <class Work>
void run_parallel(int count, int threads, const Work& work) {
    std::atomic<int> next = 0;
    std::exception_ptr failure;
    std::mutex failure_mutex;
    const auto worker = [&] {
        try {
            for (int index = next++; index < count; index = next++) {
                work(index);
            }
        } catch (...) {
            const std::lock_guard lock(failure_mutex);
            failure = std::current_exception();
            next = count;
        }
    };
    {
        std::vector<std::jthread> helpers;
        for (int helper = 1; helper < std::min(threads, count); ++helper) {
            helpers.emplace_back(worker);
        }
        worker();
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
}

}  // namespace llama
