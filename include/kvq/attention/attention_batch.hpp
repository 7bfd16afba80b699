// The attention of several sequences as one list of tasks for all threads.
//
//   task = one kv head, one block of query rows and, where there are few of those, one chunk of keys, of one sequence
//
// The thread that ends the last chunk of a block merges its chunks, so there is one list of tasks and no thread waits in between.
// Contract: every sequence gets the bits that it gets alone, on any number of threads: work is cut by the shape of each sequence, and chunks
// are merged in token order. No list of tasks is allocated; memory is bytes(threads), taken from the caller.
#pragma once

#include <atomic>
#include <new>

#include "../core/executor.hpp"
#include "attend.hpp"

namespace kvq::inline KVQ_TAGGED::detail {

/// Attention of one sequence of a batch: its pages, its queries, its outputs.
struct attention_item {
    layer_pages pages;
    query_view q;
    output_view out;
    const mods_view* mods;  ///< null: those of the call
};

/// The items of a batch, made from the requests on demand, so that no list of them is allocated.
struct attention_items {
    const void* batch;
    int layer, count;
    attention_item (*item)(const void* batch, int layer, int i);

    attention_item operator()(int i) const { return item(batch, layer, i); }
};

/// The attention of several sequences as one list of tasks.
class attention_batch {
public:
    attention_batch(const format_table& keys, const format_table& values, const cache_shape& shape,
                    const page_geometry& geometry, const rotation_table& rotations,
                    const attention_items& items)
        : keys_(keys),
          values_(values),
          shape_(shape),
          geometry_(geometry),
          rotations_(rotations),
          items_(items),
          count_(items.count),
          query_rows_(attention_rows(keys, values)) {
        const int count = count_;
        int most_rows = 0;
        for (int i = 0; i < count; ++i) {
            const attention_plan plan = plan_of(items_(i));
            tasks_ += plan.tasks();
            partial_bytes_ += plan.partial_bytes();
            merges_ += plan.merges();
            if (plan.rows() <= most_rows && i > 0) continue;
            most_rows = plan.rows();
            largest_ = plan;
        }
        place_bytes_ = round_up(static_cast<std::size_t>(count) * sizeof(place), std::size_t{64}) +
                       round_up(static_cast<std::size_t>(merges_) * sizeof(counter), std::size_t{64});
        if (count > 0) scratch_bytes_ = scratch_of(nullptr).bytes;
    }

    int workers(int threads) const noexcept { return larger(1, smaller(threads, tasks_)); }
    std::size_t bytes(int threads) const noexcept {
        return place_bytes_ + partial_bytes_ + static_cast<std::size_t>(workers(threads)) * scratch_bytes_;
    }

    /// memory: bytes(threads) bytes, aligned to 64.
    void run(int layer, const mods_view& mods, executor_view ex, int threads, std::byte* memory) const {
        if (tasks_ == 0) return;
        auto* const places = reinterpret_cast<place*>(memory);
        std::byte* partials = memory + place_bytes_;
        auto* left = reinterpret_cast<counter*>(
            memory + round_up(static_cast<std::size_t>(count_) * sizeof(place), std::size_t{64}));
        for (int i = 0, task = 0; i < count_; ++i) {
            const attention_plan plan = plan_of(items_(i));
            new (places + i) place{task, reinterpret_cast<float*>(partials), left};
            for (int merge = 0; merge < plan.merges(); ++merge) new (left++) counter(plan.chunks());
            task += plan.tasks();
            partials += plan.partial_bytes();
        }
        const auto job = [&](int i) {
            const attention_item of = items_(i);
            return attention{
                keys_, values_, of.mods ? *of.mods : mods, of.pages, plan_of(of), layer, rotations_.at(layer),
                of.q,  of.out,  places[i].partials};
        };
        std::byte* const scratch_memory = partials;
        struct alignas(64) {  // written by all threads; what they read is elsewhere
            std::atomic<int> task{0};
        } next;
        ex.parallel_for(workers(threads), [&](int worker) {
            int taken = next.task.fetch_add(1, std::memory_order_relaxed);
            if (taken >= tasks_) return;  // a thread that comes late
            const scratch mine =
                scratch_of(scratch_memory + static_cast<std::size_t>(worker) * scratch_bytes_);
            // From the last task to the first: later blocks of rows see more keys, and short tasks at the end let threads end together.
            for (int i = count_ - 1; taken < tasks_;
                 taken = next.task.fetch_add(1, std::memory_order_relaxed)) {
                int task = tasks_ - 1 - taken;
                while (places[i].first_task > task) --i;
                task -= places[i].first_task;
                const attention of = job(i);
                of.run(task, mine);
                if (!of.plan.split()) continue;
                const int block = task / of.plan.chunks();
                if (places[i].left[block].fetch_sub(1, std::memory_order_acq_rel) == 1) of.merge(block);
            }
        });
    }

private:
    using scratch = attention_scratch;
    using counter = std::atomic<int>;
    /// Index of the first task of an item, its partial states, and for each of its blocks the number of chunks to come.
    struct place {
        int first_task;
        float* partials;
        counter* left;
    };

    scratch scratch_of(std::byte* memory) const {
        return {keys_, values_, largest_, geometry_, rotations_.any(), memory};
    }
    attention_plan plan_of(const attention_item& of) const noexcept {
        return {shape_, geometry_, of.pages.tokens, of.q.heads, of.q.tokens, query_rows_};
    }

    const format_table& keys_;
    const format_table& values_;
    const cache_shape& shape_;
    page_geometry geometry_;
    const rotation_table& rotations_;
    attention_items items_;
    int count_, query_rows_;
    int tasks_ = 0, merges_ = 0;
    attention_plan largest_{shape_, geometry_, 0, shape_.kv_heads, 1, query_rows_};
    std::size_t place_bytes_ = 0, partial_bytes_ = 0, scratch_bytes_ = 0;
};

}  // namespace kvq::inline KVQ_TAGGED::detail
