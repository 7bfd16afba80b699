// One bit for every task of a list: an executor that runs a task twice, or leaves one out, is found out.
//
//   task_marks marks(n);
//   ... if (marks.take(i)) f(i);          on any threads; a task that was taken before is not run again
//   if (!marks.all_once()) fail(marks.complaint());
//
// Contract: allocates nothing for up to 4096 tasks; calls of kvq have more only in batches of hundreds of
// prompts.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

#include "tagged_vector.hpp"
#include "text.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

class task_marks {
public:
    explicit task_marks(int n) : n_(n) {
        const auto wanted = static_cast<std::size_t>(words());
        if (wanted <= sizeof(own_) / sizeof(own_[0]))
            for (std::size_t i = 0; i < wanted; ++i) own_[i].store(0, std::memory_order_relaxed);
        else
            tagged_vector<word>(wanted).swap(more_);  // atomics do not move
    }

    /// False for a task that was taken before, and for a number that is none.
    bool take(int i) noexcept {
        if (i < 0 || i >= n_) {
            outside_.store(i, std::memory_order_relaxed);
            return false;
        }
        const std::uint32_t bit = 1u << (i % 32);
        if ((at(i / 32).fetch_or(bit, std::memory_order_relaxed) & bit) == 0) return true;
        again_.store(i, std::memory_order_relaxed);
        return false;
    }
    /// After all tasks: did the executor run each of them once, and no other?
    bool all_once() noexcept {
        return again_.load(std::memory_order_relaxed) < 0 &&
               outside_.load(std::memory_order_relaxed) == none && first_missing() == n_;
    }
    /// What it did wrong.
    short_text complaint() {
        if (const int i = again_.load(std::memory_order_relaxed); i >= 0) return task(i) + " twice";
        if (const int i = outside_.load(std::memory_order_relaxed); i != none) return task(i);
        return short_text("parallel_for did not run task ") + short_text::of(first_missing()) + of_all();
    }

private:
    using word = std::atomic<std::uint32_t>;
    static constexpr int none = 0;  // task 0 is never outside, there is at least one

    int first_missing() noexcept {
        for (int i = 0; i < n_; i += 32) {
            const std::uint32_t seen = at(i / 32).load(std::memory_order_relaxed);
            if (const int run = std::countr_one(seen); run < 32) return run < n_ - i ? i + run : n_;
        }
        return n_;
    }
    int words() const noexcept { return n_ / 32 + 1; }
    word& at(int i) noexcept { return more_.empty() ? own_[i] : more_[static_cast<std::size_t>(i)]; }
    short_text of_all() const { return short_text(" of ") + short_text::of(n_); }
    short_text task(int i) const {
        return short_text("parallel_for ran task ") + short_text::of(i) + of_all();
    }

    int n_;
    word own_[129];
    tagged_vector<word> more_;
    std::atomic<int> again_{-1}, outside_{none};
};

}}}  // namespace kvq::detail
