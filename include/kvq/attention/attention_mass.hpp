// How much attention the tokens of a layer get from some queries: what policies that drop tokens ask.
//
//   mass of token t of a kv head
//     = sum over queries and query heads of exp(score - log-sum-exp of the row)
//
// Two passes over the keys and none over values: log-sum-exps of all rows, split by split and merged in
// token order; then, for every kv head and split, the weights of its tokens, added up row by row. Scores and
// weights are those of attention. Contract: the same bits on any number of threads.
// Sources: SnapKV, arXiv 2404.14469 (the last queries of a prompt); H2O, arXiv 2306.14048 (all of them).
#pragma once

#include <atomic>
#include <cmath>
#include <utility>

#include "../core/executor.hpp"
#include "attention_rows.hpp"
#include "tile_sessions.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

class attention_mass {
public:
    /// mods: within the window of the layer.
    attention_mass(const format_table& keys, const format_table& values, const cache_shape& shape,
                   const page_geometry& geometry, const rotation_table& rotations, int layer,
                   const layer_pages& pages, const query_view& q, const mods_view& mods, int threads)
        : geometry_(geometry),
          rotates_(rotations.any()),
          rows_{keys,
                values,
                mods,
                pages,
                {shape, geometry, pages.tokens, q.heads, q.tokens, most_task_rows(keys, values), false},
                layer,
                rotations.at(layer),
                q},
          workers_(threads) {}

    std::size_t bytes() const {
        return states() * sizeof(state) + static_cast<std::size_t>(workers_) * scratch_of(nullptr).bytes;
    }

    /// memory: bytes(), aligned to 64. mass: [kv_heads][tokens].
    void run(executor_view ex, std::byte* memory, float* mass) const {
        auto* const found = reinterpret_cast<state*>(memory);
        std::byte* const scratches = memory + states() * sizeof(state);
        const std::size_t scratch_bytes = scratch_of(nullptr).bytes;
        const attention_plan& plan = rows_.plan;
        const int places = plan.kv_heads * plan.splits();
        struct alignas(64) {
            std::atomic<int> task{0};
        } next;
        const auto each = [&](int tasks, const auto& task) {
            next.task = 0;
            ex.parallel_for(smaller(workers_, tasks), [&](int worker) {
                const scratch s = scratch_of(scratches + static_cast<std::size_t>(worker) * scratch_bytes);
                for (int i = next.task.fetch_add(1, std::memory_order_relaxed); i < tasks;
                     i = next.task.fetch_add(1, std::memory_order_relaxed))
                    task(i, s);
            });
        };
        each(places * plan.row_blocks(), [&](int i, const scratch& s) {
            sum_block(i / plan.row_blocks(), i % plan.row_blocks() * plan.block_rows, s, found);
        });
        std::fill_n(mass, static_cast<std::size_t>(plan.kv_heads) * static_cast<std::size_t>(plan.tokens),
                    0.0f);
        each(places, [&](int i, const scratch& s) {
            const int head = i / plan.splits();
            float* const to = mass + static_cast<std::size_t>(head) * static_cast<std::size_t>(plan.tokens);
            for (int first = 0; first < plan.rows(); first += plan.block_rows)
                add_block(i, first, s, found, to);
        });
    }

private:
    using scratch = attention_scratch;
    /// Of a row in a split.
    struct state {
        float max, sum;
    };

    std::size_t states() const noexcept {
        return round_up(static_cast<std::size_t>(rows_.plan.kv_heads) *
                            static_cast<std::size_t>(rows_.plan.splits()) *
                            static_cast<std::size_t>(rows_.plan.rows()),
                        std::size_t{64} / sizeof(state));
    }
    state& at(state* found, int head, int split, int row) const noexcept {
        const attention_plan& plan = rows_.plan;
        return found[(static_cast<std::size_t>(head) * static_cast<std::size_t>(plan.rows()) +
                      static_cast<std::size_t>(row)) *
                         static_cast<std::size_t>(plan.splits()) +
                     static_cast<std::size_t>(split)];
    }
    scratch scratch_of(std::byte* memory) const {
        return {rows_.keys, rows_.values, rows_.plan, geometry_, {rotates_, false, false, 0}, memory};
    }

    /// Calls f(rows, entry) for the pages of a split that some rows of a block see, with their scores.
    template <class F>
    void visit(int place, int first, const scratch& s, F&& f) const {
        const attention_plan& plan = rows_.plan;
        const int n = smaller(plan.block_rows, plan.rows() - first), split = place % plan.splits();
        const int from = rows_.pages.lower_bound(split * plan.split_tokens),
                  to = rows_.pages.lower_bound(plan.split_end(split));
        const int first_pos = rows_.q_pos(first), last_pos = rows_.q_pos(first + n - 1);
        float scale = rows_.mods.scale(plan.dim);
        if (!rows_.mods.changes_scores()) scale *= attention_rows::log2e;
        attention_rows::row_block rows;
        bool begun = false;
        const tile_sessions tiles(rows_.keys, rows_.values, n);
        for (int e = from; e < to; ++e) {
            const layer_pages::entry entry = rows_.pages.at(e);
            const page_visibility seen =
                rows_.mods.page(first_pos, last_pos, entry.first_token, entry.first_token + entry.tokens);
            if (seen == page_visibility::none) continue;
            if (!begun) rows = rows_.begin_rows(place / plan.splits(), first, n, scale, s);
            begun = true;
            rows_.score_page(rows, entry, rows_.pages.at(smaller(e + 1, to - 1)), s);
            rows_.change_and_mask(rows, entry, seen, s);
            f(rows, entry);
        }
    }

    void sum_block(int place, int first, const scratch& s, state* found) const {
        const attention_plan& plan = rows_.plan;
        const int n = smaller(plan.block_rows, plan.rows() - first);
        float max[most_query_rows], sum[most_query_rows], factor[most_query_rows];
        attention_rows::empty_rows(n, max, sum);
        visit(place, first, s, [&](const auto&, const layer_pages::entry& entry) {
            rows_.softmax(s, n, entry.tokens, max, sum, factor);
        });
        for (int i = 0; i < n; ++i)
            at(found, place / plan.splits(), place % plan.splits(), first + i) = {max[i], sum[i]};
    }

    /// Binary log-sum-exp of a row.
    float log_sum_of(state* found, int head, int row) const {
        float max = attention_rows::minus_infinity;
        double sum = 0.0;
        const int splits = rows_.plan.splits();
        for (int split = 0; split < splits; ++split) max = larger(max, at(found, head, split, row).max);
        for (int split = 0; split < splits; ++split) {
            const state& of = at(found, head, split, row);
            if (!(of.sum == 0.0f))
                sum += static_cast<double>(of.sum) * std::exp2(static_cast<double>(of.max - max));
        }
        if (rows_.mods.has_sink()) {
            const float sink = softmax_state::as_max(rows_.mods.sink_logit(rows_.q_head(head, row)));
            if (sink > attention_rows::minus_infinity && max == attention_rows::minus_infinity) max = sink;
            if (sink > attention_rows::minus_infinity) sum += std::exp2(static_cast<double>(sink - max));
        }
        return sum == 0.0 ? attention_rows::minus_infinity : max + static_cast<float>(std::log2(sum));
    }

    void add_block(int place, int first, const scratch& s, state* found, float* mass) const {
        const attention_plan& plan = rows_.plan;
        const int n = smaller(plan.block_rows, plan.rows() - first), head = place / plan.splits();
        float log_sum[most_query_rows], max[most_query_rows], sum[most_query_rows], factor[most_query_rows];
        float bad[most_query_rows] = {};  // NaN: the row, or one of its scores, is not finite
        for (int i = 0; i < n; ++i) {
            log_sum[i] = log_sum_of(found, head, first + i);
            if (log_sum[i] != log_sum[i]) bad[i] = std::exchange(log_sum[i], attention_rows::minus_infinity);
        }
        visit(place, first, s, [&](const attention_rows::row_block& rows, const layer_pages::entry& entry) {
            // With a maximum that no score exceeds, the weights of a softmax are relative to it.
            for (int i = 0; i < n; ++i) {
                max[i] = log_sum[i];
                sum[i] = 0.0f;
            }
            rows_.softmax(s, n, entry.tokens, max, sum, factor);
            float* const to = mass + entry.first_token;
            for (int i = 0; i < n; ++i) {
                const float* const weight = s.scores + i * s.scores_stride;
                const float added =
                    rows.bad[static_cast<std::size_t>(i)] ? std::numeric_limits<float>::quiet_NaN() : bad[i];
                for (int t = 0; t < entry.tokens; ++t) to[t] += weight[t] + added;
            }
        });
    }

    page_geometry geometry_;
    bool rotates_;
    attention_rows rows_;
    int workers_;
};

}}}  // namespace kvq::detail
