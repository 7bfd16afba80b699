// The tokens of an index that score best for every query: what models that select tokens attend to.
//
//   score of token t = sum over heads h of w[h] max(q[h] . k[t], 0),   over tokens up to the query itself
//
// Products are those of attention on the codes; per query, scores of all tokens are written, then the best k
// are chosen. Contract: equal scores are resolved by position, the earlier token first; a score that is NaN
// comes last. So the choice is the same on any number of threads, alone or in a batch.
// Source: the lightning indexer of DeepSeek V3.2.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>

#include "../core/executor.hpp"
#include "attention_rows.hpp"
#include "masks.hpp"
#include "tile_sessions.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// Selection for one query after the other; as many at a time as there are threads.
class token_selection {
public:
    struct item {
        layer_pages pages;
        query_view q;
        const float* weights;  ///< [q.tokens][q.heads]
        std::int32_t* out;     ///< [q.tokens][best]
    };
    /// The items of a batch, made from the requests on demand, so that no list of them is allocated.
    struct item_list {
        const void* batch;
        int layer, count;
        item (*at)(const void* batch, int layer, int i);

        item operator[](int i) const { return at(batch, layer, i); }
    };

    token_selection(const format_table& keys, const format_table& values, const cache_shape& shape,
                    const page_geometry& geometry, const rotation_table& rotations, const item_list& items,
                    int best, int threads)
        : keys_(keys),
          values_(values),
          shape_(shape),
          geometry_(geometry),
          rotations_(rotations),
          items_(items),
          best_(best),
          workers_(threads) {
        for (int i = 0; i < items_.count; ++i) {
            const item of = items_[i];
            queries_ += of.q.tokens;
            tokens_ = larger(tokens_, of.pages.tokens);
            heads_ = larger(heads_, of.q.heads);
        }
        together_ = smaller(workers_, most_together);
        if (queries_ < together_) together_ = larger(1, static_cast<int>(queries_));
        const auto all = static_cast<std::size_t>(tokens_);
        row_bytes_ = round_up(all * sizeof(float), std::size_t{64}) +
                     round_up(all * sizeof(std::uint64_t), std::size_t{64});
        scratch_bytes_ = scratch_of(nullptr).bytes;
    }

    std::size_t bytes() const noexcept {
        return static_cast<std::size_t>(together_) * row_bytes_ +
               static_cast<std::size_t>(workers_) * scratch_bytes_;
    }

    /// memory: bytes(), aligned to 64.
    void run(executor_view ex, std::byte* memory) const {
        std::byte* const scratches = memory + static_cast<std::size_t>(together_) * row_bytes_;
        const int splits = plan_of(tokens_, 1).splits();
        struct alignas(64) {
            std::atomic<int> task{0};
        } next;
        const auto each = [&](int tasks, const auto& task) {
            next.task = 0;
            ex.parallel_for(smaller(workers_, tasks), [&](int worker) {
                for (int i = next.task.fetch_add(1, std::memory_order_relaxed); i < tasks;
                     i = next.task.fetch_add(1, std::memory_order_relaxed))
                    task(i, scratches + static_cast<std::size_t>(worker) * scratch_bytes_);
            });
        };
        const auto row = [&](int i) { return memory + static_cast<std::size_t>(i) * row_bytes_; };
        place last{0, 0};
        for (std::int64_t done = 0; done < queries_;) {
            place of[most_together];
            int count = 0;
            for (; count < together_ && done < queries_; ++count, ++done) {
                while (last.query == items_[last.item].q.tokens) last = {last.item + 1, 0};
                of[count] = last;
                ++last.query;
            }
            each(count * splits, [&](int i, std::byte* scratch) {
                score(of[i / splits], i % splits, scratch_of(scratch),
                      reinterpret_cast<float*>(row(i / splits)));
            });
            each(count, [&](int i, std::byte*) { choose(of[i], row(i)); });
        }
    }

private:
    static constexpr int most_together = 64;
    struct place {
        int item, query;
    };
    /// Tokens that a query sees.
    static int seen_by(const item& of, int query) noexcept {
        return of.pages.tokens - of.q.tokens + query + 1;
    }

    attention_plan plan_of(int tokens, int heads) const noexcept {
        return {shape_, geometry_, tokens, heads, 1, most_task_rows(keys_, values_), false};
    }
    attention_scratch scratch_of(std::byte* memory) const {
        return {keys_,
                values_,
                plan_of(tokens_, larger(1, heads_)),
                geometry_,
                {rotations_.any(), false, false, 0},
                memory};
    }

    /// Scores of the pages that begin in a split.
    void score(const place& at, int split, const attention_scratch& s, float* scores) const {
        static const causal positions;
        const item of = items_[at.item];
        const int seen = seen_by(of, at.query);
        attention_plan plan = plan_of(of.pages.tokens, of.q.heads);
        if (split >= plan.splits()) return;
        const int from = of.pages.lower_bound(split * plan.split_tokens),
                  to = of.pages.lower_bound(smaller(plan.split_end(split), seen));
        plan.query_tokens = of.q.tokens;
        const attention_rows rows_of{
            keys_, values_, positions, of.pages, plan, items_.layer, rotations_.at(items_.layer), of.q};
        const backend_functions& backend = *keys_.window().functions().backend;
        for (int first = 0; first < plan.group; first += plan.block_rows) {
            const int n = smaller(plan.block_rows, plan.group - first);
            const auto rows = rows_of.begin_rows(0, at.query * plan.group + first, n, 1.0f, s);
            const tile_sessions tiles(keys_, values_, n);
            float weights[most_query_rows];
            for (int i = 0; i < n; ++i)
                weights[i] = rows.bad[static_cast<std::size_t>(i)]
                                 ? std::numeric_limits<float>::quiet_NaN()
                                 : of.weights[std::ptrdiff_t{at.query} * plan.group + first + i];
            for (int e = from; e < to; ++e) {
                const layer_pages::entry entry = of.pages.at(e);
                const int shown = smaller(entry.tokens, seen - entry.first_token);
                if (first == 0) std::fill_n(scores + entry.first_token, shown, 0.0f);
                rows_of.score_page(rows, entry, of.pages.at(smaller(e + 1, to - 1)), s);
                backend.add_rectified(s.scores, s.scores_stride, n, shown, weights,
                                      scores + entry.first_token);
            }
        }
    }

    /// Larger for better tokens.
    static std::uint64_t rank(float score, int token) noexcept {
        const auto bits = bit_cast<std::uint32_t>(score + 0.0f);  // -0 is 0
        const std::uint32_t ordered = score != score ? 0 : bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
        return std::uint64_t{ordered} << 32 | ~static_cast<std::uint32_t>(token);
    }
    void choose(const place& at, std::byte* memory) const {
        const item of = items_[at.item];
        const int seen = seen_by(of, at.query), n = smaller(best_, seen);
        const auto* const scores = reinterpret_cast<const float*>(memory);
        auto* const ranks = reinterpret_cast<std::uint64_t*>(
            memory + round_up(static_cast<std::size_t>(tokens_) * sizeof(float), std::size_t{64}));
        for (int t = 0; t < seen; ++t) ranks[t] = rank(scores[t], t);
        if (n < seen) std::nth_element(ranks, ranks + n, ranks + seen, std::greater<>{});
        std::sort(ranks, ranks + n, std::greater<>{});
        std::int32_t* const out = of.out + std::ptrdiff_t{at.query} * best_;
        for (int i = 0; i < n; ++i) out[i] = static_cast<std::int32_t>(~static_cast<std::uint32_t>(ranks[i]));
        std::fill(out + n, out + best_, -1);
    }

    const format_table& keys_;
    const format_table& values_;
    const cache_shape& shape_;
    page_geometry geometry_;
    const rotation_table& rotations_;
    item_list items_;
    int best_, workers_, together_ = 1;
    std::int64_t queries_ = 0;
    int tokens_ = 0, heads_ = 0;
    std::size_t row_bytes_ = 0, scratch_bytes_ = 0;
};

}}}  // namespace kvq::detail
