// The attention of several sequences as one list of tasks for all threads.
//
//   task = one kv head, one block of query rows and, where there are few of those, one key split, of one
//     sequence
//
// The thread that ends the last split of a block merges its splits, so there is one list of tasks and no
// thread waits in between.
// Contract: every sequence gets the bits that it gets alone, on any number of threads: work is cut by the
// shape of each sequence, and splits are merged in token order. No list of tasks is allocated; memory is
// bytes(threads), taken from the caller.
#pragma once

#include <atomic>

#include "../core/executor.hpp"
#include "attend.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

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
                    const attention_items& items, const mods_view& mods)
        : keys_(keys),
          values_(values),
          shape_(shape),
          geometry_(geometry),
          rotations_(rotations),
          items_(items),
          mods_(mods),
          count_(items.count),
          query_rows_(most_task_rows(keys, values)) {
        const int count = count_;
        int most_rows = -1;
        for (int i = 0; i < count; ++i) {
            const attention_item of = items_(i);
            const attention_plan plan = plan_of(of);
            const page_choice choice(plan, of.pages, mods_of(of), nullptr);
            tasks_ += plan.tasks();
            partial_bytes_ += plan.partial_bytes();
            choice_bytes_ += choice.bytes;
            selects_ = selects_ || choice.selection;
            skips_ = skips_ || choice.skipping;
            reports_ = reports_ || mods_of(of).selection() || mods_of(of).skipping();
            merges_ += plan.merges();
            if (mods_of(of).lists()) {
                listed_rows_ = larger(listed_rows_, plan.block_rows);
                continue;
            }
            if (plan.rows() <= most_rows) continue;
            most_rows = plan.rows();
            largest_ = plan;
        }
        place_bytes_ = round_up(static_cast<std::size_t>(count) * sizeof(place), std::size_t{64}) +
                       round_up(static_cast<std::size_t>(merges_) * sizeof(counter), std::size_t{64});
        if (count > 0) scratch_bytes_ = scratch_of(nullptr).bytes;
    }

    int workers(int threads) const noexcept { return larger(1, smaller(threads, tasks_)); }
    std::size_t bytes(int threads) const noexcept {
        return place_bytes_ + partial_bytes_ + choice_bytes_ +
               static_cast<std::size_t>(workers(threads)) * scratch_bytes_;
    }

    /// memory: bytes(threads) bytes, aligned to 64.
    void run(int layer, executor_view ex, int threads, std::byte* memory) const {
        if (tasks_ == 0) return;
        auto* const places = reinterpret_cast<place*>(memory);
        std::byte* partials = memory + place_bytes_;
        std::byte* choices = partials + partial_bytes_;
        auto* left = reinterpret_cast<counter*>(
            memory + round_up(static_cast<std::size_t>(count_) * sizeof(place), std::size_t{64}));
        const bool by_scores = selects_ && lacks_estimates();
        for (int i = 0, task = 0; i < count_; ++i) {
            const attention_item of = items_(i);
            const attention_plan plan = plan_of(of);
            new (places + i) place{task, reinterpret_cast<float*>(partials), left, choices,
                                   by_scores && reads_without_estimate(of.pages)};
            for (int merge = 0; merge < plan.merges(); ++merge) new (left++) counter(plan.splits());
            task += plan.tasks();
            partials += plan.partial_bytes();
            choices += page_choice(plan, of.pages, mods_of(of), nullptr).bytes;
        }
        const auto job = [&](int i) {
            const attention_item of = items_(i);
            const attention_plan plan = plan_of(of);
            return attention{{keys_, values_, mods_of(of), of.pages, plan, layer, rotations_.at(layer), of.q},
                             of.out,
                             places[i].partials,
                             page_choice(plan, of.pages, mods_of(of), places[i].choice),
                             places[i].by_scores};
        };
        std::byte* const scratch_memory = memory + place_bytes_ + partial_bytes_ + choice_bytes_;
        struct alignas(64) {  // written by all threads; what they read is elsewhere
            std::atomic<int> task{0};
        } next;
        const auto each_task = [&](const auto& run_task) {
            next.task = 0;
            ex.parallel_for(workers(threads), [&](int worker) {
                int taken = next.task.fetch_add(1, std::memory_order_relaxed);
                if (taken >= tasks_) return;  // a thread that comes late
                const scratch mine =
                    scratch_of(scratch_memory + static_cast<std::size_t>(worker) * scratch_bytes_);
                // From the last task to the first: later blocks of rows see more keys, and short tasks at the
                // end let threads end together. Where all rows see the same keys (decode), from the first to
                // the last: beside other programs memory is read faster in the order of its addresses.
                for (int i = count_ - 1; taken < tasks_;
                     taken = next.task.fetch_add(1, std::memory_order_relaxed)) {
                    const int task = tasks_ - 1 - taken;
                    while (places[i].first_task > task) --i;
                    const attention of = job(i);
                    const int own = task - places[i].first_task;
                    run_task(of, of.plan.tasks_are_equal() ? of.plan.tasks() - 1 - own : own, mine,
                             places[i]);
                }
            });
        };
        if (selects_ || skips_)
            each_task([](const attention& of, int task, const scratch& s, const place&) {
                if (of.choice.floors) of.bound_sums(task, s);
            });
        if (selects_) {
            for (int i = 0; i < count_; ++i)
                if (const attention of = job(i); of.choice.selection) of.choice.read_formats(keys_, of.pages);
            each_task([](const attention& of, int task, const scratch& s, const place&) {
                if (of.choice.selection) of.rank(task, s);
            });
            each_task([](const attention& of, int task, const scratch&, const place&) {
                if (of.choice.selection) of.choose(task);
            });
        }
        each_task([](const attention& of, int task, const scratch& s, const place& at) {
            of.run(task, s);
            if (!of.plan.splits_are_tasks()) return;
            const int block = task / of.plan.splits();
            if (at.left[block].fetch_sub(1, std::memory_order_acq_rel) == 1) of.merge(block);
        });
        for (int i = 0; reports_ && i < count_; ++i) job(i).report();
    }

private:
    using scratch = attention_scratch;
    using counter = std::atomic<int>;
    /// Index of the first task of an item, its partial states, for each of its blocks the number of splits to
    /// come, and what is chosen.
    struct place {
        int first_task;
        float* partials;
        counter* left;
        std::byte* choice;
        bool by_scores;
    };

    scratch scratch_of(std::byte* memory) const {
        return {keys_, values_, largest_, geometry_, {rotations_.any(), selects_, skips_, listed_rows_},
                memory};
    }
    attention_plan plan_of(const attention_item& of) const noexcept {
        if (const listed_tokens* const lists = mods_of(of).lists())
            return attention_plan::of_lists(shape_, geometry_, lists->count(), of.q.heads, of.q.tokens);
        return {shape_,
                geometry_,
                of.pages.tokens,
                of.q.heads,
                of.q.tokens,
                query_rows_,
                mods_of(of).skipping() != nullptr};
    }
    mods_view mods_of(const attention_item& of) const noexcept {
        return (of.mods ? *of.mods : mods_).within(geometry_.window);
    }

    /// Estimates are compared with estimates only: one page of keys without decides for all pages of a
    /// sequence.
    bool lacks_estimates() const noexcept {
        for (int i = 0; i < keys_.size(); ++i)
            if (i > 0 && !keys_[i].functions().estimate_scores) return true;
        return false;
    }
    bool reads_without_estimate(const layer_pages& pages) const noexcept {
        for (int e = 0; e < pages.entries(); ++e)
            if (const int f = pages.at(e).keys->format; f > 0 && !keys_[f].functions().estimate_scores)
                return true;
        return false;
    }

    const format_table& keys_;
    const format_table& values_;
    const cache_shape& shape_;
    page_geometry geometry_;
    const rotation_table& rotations_;
    attention_items items_;
    const mods_view& mods_;
    int count_, query_rows_;
    int tasks_ = 0, merges_ = 0, listed_rows_ = 0;
    bool selects_ = false, skips_ = false, reports_ = false;
    attention_plan largest_{shape_, geometry_, 0, shape_.kv_heads, 1, query_rows_, false};
    std::size_t place_bytes_ = 0, partial_bytes_ = 0, choice_bytes_ = 0, scratch_bytes_ = 0;
};

}}}  // namespace kvq::detail
