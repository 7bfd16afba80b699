// Fused attention over packed pages of any mix of formats: out = softmax(q K^T) V, of one token or many.
// Walk: for every kv head and every block of up to 16 or 128 query rows (query tokens x query heads of the
// GQA group), pages are read in token order. Per page: scores from the key block, online softmax, weights
// times the value block. Only blocks whose codes cannot be folded are dequantized. For keys that moved, the
// queries are rotated back (rotary.hpp). Keys are cut into key splits of about 2048 tokens, whose softmax
// states are merged in token order. The result is the same bit for bit on any number of threads, alone or in
// a batch. Where pages are selected (selection.hpp), bound_sums(), rank() and choose() run for all tasks
// before run(); where values may be skipped, the scores of a split come before the values that matter.
//
// Numeric contract: integer products with 16-bit fixed-point queries and weights, float sums; relative error
// against double arithmetic on the dequantized values below 5e-4 on random data and where few keys dominate
// (tests/properties/{attention,peaked}.cpp), and more where single terms of a score are large: outliers of
// keys times large queries (architecture.md). NaN and +infinity give NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention_rows.hpp"
#include "listed_split.hpp"
#include "page_choice.hpp"
#include "tile_sessions.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// Attention of one layer, ready to run its tasks.
class attention : public attention_rows {
public:
    output_view out;
    float* partials;
    page_choice choice;
    bool ranks_by_scores;  // and not by estimates, because a page of keys has a format without

    /// Bounds the sums of the rows from below, by the first page that they may see and the last two.
    void bound_sums(int task, const scratch& s) const {
        const task_place at = place_of(task);
        if (at.split > 0) return;
        const row_block rows = begin_task(at, s);
        const tile_sessions tiles(keys, values, at.n);
        float max[most_query_rows], sum[most_query_rows], factor[most_query_rows];
        empty_rows(at.n, max, sum);
        const page_walk walk{nullptr, q_pos(at.first), q_pos(at.first + at.n - 1)};
        const int end = end_of(walk);
        for (int e = 0; e < end; e = larger(e + 1, end - 2)) {
            const visible_page page = next_page(walk, e, plan.tokens);
            if (page.index != e) continue;
            const layer_pages::entry entry = pages.at(e);
            score_page(rows, entry, entry, s);
            change_and_mask(rows, entry, page.seen, s);
            softmax(s, at.n, entry.tokens, max, sum, factor);
        }
        for (int i = 0; i < at.n; ++i) {
            float& floor = choice.floors[at.head * choice.rows + at.first + i];
            floor = sum[i] > 0.0f ? max[i] + std::log2(sum[i]) : minus_infinity;
            if (mods.has_sink())
                floor = larger(floor, softmax_state::as_max(mods.sink_logit(q_head(at.head, at.first + i))));
        }
    }

    /// Ranks the pages of a task. Before choose().
    void rank(int task, const scratch& s) const {
        const task_place at = place_of(task);
        const row_block rows = begin_task(at, s);
        const tile_sessions tiles(keys, values, at.n);
        const page_walk walk{nullptr, q_pos(at.first), q_pos(at.first + at.n - 1)};
        const int last_two = end_of(walk) - 2;
        int e = 0, end = pages.entries();
        if (plan.splits_are_tasks()) {
            e = pages.lower_bound(at.split * plan.split_tokens);
            end = pages.lower_bound(plan.split_end(at.split));
        }
        float* const ranks = choice.ranks_of(at.head, at.first);
        for (; e < end; ++e) {
            const layer_pages::entry entry = pages.at(e);
            const int next_token = entry.first_token + entry.tokens;
            if (mods.page(walk.first_pos, walk.last_pos, entry.first_token, next_token) ==
                page_visibility::none)
                ranks[e] = page_choice::hidden;
            else if (choice.formats[e].index == 0 || e == 0 || e >= last_two ||
                     (mods.has_query_positions() && next_token > walk.first_pos &&
                      entry.first_token <= walk.last_pos))
                ranks[e] = page_choice::always;
            else
                ranks[e] = rank_of(rows, e, pages.at(smaller(e + 4, end - 1)), s);
        }
    }

    /// Chooses the pages of a kv head and a block of rows. After rank() of all tasks, before run().
    void choose(int task) const {
        const task_place at = place_of(task);
        if (at.split == 0) choice.choose(at.head, at.first, pages.geometry);
    }

    /// task: index, which gives kv head, row block and, if splits are tasks, split.
    void run(int task, const scratch& s) const {
        const task_place at = place_of(task);
        const int head = at.head, first = at.first, n = at.n, dim = plan.value_dim,
                  stride = plan.output_stride();
        // The first split is never left out: it makes queries that are not finite give NaN.
        if (at.split > 0 && hides(at.split, head, first, n)) {
            for (int i = 0; i < n; ++i) {
                float* const to = partial(head, first + i, at.split);
                to[0] = minus_infinity;
                to[1] = 0.0f;
                if (plan.skips) to[2 + dim] = 0.0f;
            }
            count_values(task, 0, 0);
            return;
        }
        const row_block rows = begin_task(at, s);
        // Lists are multiplied without tiles, by any number of rows.
        const tile_sessions tiles(keys, values, mods.lists() ? 1 : n);
        if (plan.skips) s.held->seen = s.held->skipped = 0;
        float max[most_query_rows], sum[most_query_rows];
        if (plan.splits_are_tasks()) {
            visit_split(rows, at.split, s, max, sum);
            for (int i = 0; i < n; ++i) {
                float* const to = partial(head, first + i, at.split);
                to[0] = max[i];
                to[1] = rows.bad[static_cast<std::size_t>(i)] ? not_a_number : sum[i];
                for (int d = 0; d < dim; ++d) to[2 + d] = s.part[i * stride + d];
                if (plan.skips) to[2 + dim] = s.held->left[i];
            }
        } else {
            softmax_state running[most_query_rows];
            float left[most_query_rows];
            for (int i = 0; i < n; ++i) {
                running[i].output = s.output + i * dim;
                left[i] = 0.0f;
                for (int d = 0; d < dim; ++d) running[i].output[d] = 0.0f;
            }
            for (int split = 0; split < plan.splits(); ++split) {
                if (hides(split, head, first, n)) continue;
                visit_split(rows, split, s, max, sum);
                for (int i = 0; i < n; ++i)
                    merge(running[i], {max[i], sum[i], s.part + i * stride}, left[i],
                          plan.skips ? s.held->left + i : nullptr);
            }
            for (int i = 0; i < n; ++i) {
                if (rows.bad[static_cast<std::size_t>(i)]) running[i].sum = not_a_number;
                finish(running[i], left[i], head, first + i);
            }
        }
        if (plan.skips) count_values(task, s.held->seen, s.held->skipped);
    }

    /// Merges the splits of every row of a block, in token order, after their tasks. index: task / splits.
    void merge(int index) const {
        const int head = index / plan.row_blocks(), first = index % plan.row_blocks() * plan.block_rows;
        for (int row = first; row < smaller(first + plan.block_rows, plan.rows()); ++row) merge(head, row);
    }

    /// Adds what was chosen and skipped to the reports. After run() and merge() of all tasks and rows.
    void report() const {
        if (mods.selection() && mods.selection()->report)
            for (int head = 0; head < plan.kv_heads; ++head)
                for (int first = 0; first < plan.rows(); first += plan.block_rows) {
                    const int last = smaller(first + plan.block_rows, plan.rows()) - 1;
                    const page_walk walk{nullptr, q_pos(first), q_pos(last)};
                    page_choice::report_pages(*mods.selection()->report,
                                              {layer, head, first / plan.group, last / plan.group, {}},
                                              choice.ranks_of(head, first), pages,
                                              [&](int e) { return next_page(walk, e, plan.tokens).index; });
                }
        if (choice.skipping) choice.report_skipping(plan);
    }

private:
    static constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

    /// What a task is about.
    struct task_place {
        int head, first, n;  // rows [first, first + n) of a kv head
        int split;           // 0 if splits are no tasks
    };
    task_place place_of(int task) const noexcept {
        const int splits = plan.splits_are_tasks() ? plan.splits() : 1;
        const int first = task / splits % plan.row_blocks() * plan.block_rows;
        // Tasks run from the last to the first, splits in order: the end of each prefetches the next.
        return {task / (plan.row_blocks() * splits), first, smaller(plan.block_rows, plan.rows() - first),
                splits - 1 - task % splits};
    }

    row_block begin_task(const task_place& at, const scratch& s) const {
        float scale = mods.scale(plan.dim);
        if (!mods.changes_scores()) scale *= log2e;
        return begin_rows(at.head, at.first, at.n, scale, s);
    }

    /// Uses the row's first partial as accumulator.
    void merge(int head, int row) const {
        float* const first = partial(head, row, 0);
        softmax_state running{first[0], first[1], first + 2};
        float left = plan.skips ? first[2 + plan.value_dim] : 0.0f;
        for (int split = 1; split < plan.splits(); ++split) {
            float* const p = partial(head, row, split);
            merge(running, {p[0], p[1], p + 2}, left, plan.skips ? p + 2 + plan.value_dim : nullptr);
        }
        finish(running, left, head, row);
    }
    float* partial(int head, int row, int split) const noexcept {
        const auto index = (static_cast<std::size_t>(head) * static_cast<std::size_t>(plan.rows()) +
                            static_cast<std::size_t>(row)) *
                               static_cast<std::size_t>(plan.splits()) +
                           static_cast<std::size_t>(split);
        return partials + index * plan.state_floats();
    }
    /// Merges a state, and the weights that were left out of it, in units of its maximum.
    void merge(softmax_state& running, const softmax_state& other, float& left,
               const float* other_left) const {
        const float before = running.max;
        running.merge(other, plan.value_dim);
        if (!other_left) return;
        left = in_units_of(running.max, left, before) + in_units_of(running.max, *other_left, other.max);
    }
    static float in_units_of(float max, float weight, float max_of_weight) noexcept {
        return weight > 0.0f ? weight * std::exp2(max_of_weight - max) : 0.0f;
    }
    void finish(softmax_state& row_state, float left, int head, int row) const {
        const float max = row_state.max;
        const float sink = mods.has_sink() ? mods.sink_logit(q_head(head, row)) : minus_infinity;
        if (mods.has_sink()) row_state.add_sink(sink, plan.value_dim);
        if (plan.skips)
            choice.left[head * choice.rows + row] =
                row_state.sum > 0.0f ? in_units_of(row_state.max, left, max) / row_state.sum : 0.0f;
        if (float* const lse = out.lse(row / plan.group, q_head(head, row)))
            *lse = row_state.log_sum_exp(sink);
        row_state.finish(row_state.output, plan.value_dim);
        out.store(row / plan.group, q_head(head, row), row_state.output);
    }
    /// Is no key of the split visible to any of the rows? An empty state, which merging ignores.
    bool hides(int split, int head, int first, int n) const {
        if (mods.lists()) return false;
        const int from = pages.lower_bound(split * plan.split_tokens),
                  to = pages.lower_bound(plan.split_end(split));
        if (from == to) return true;
        if (const float* const ranks = choice.ranks_of(head, first))
            if (std::none_of(ranks + from, ranks + to, page_choice::chosen)) return true;
        const layer_pages::entry last = pages.at(to - 1);
        return mods.page(q_pos(first), q_pos(first + n - 1), pages.at(from).first_token,
                         last.first_token + last.tokens) == page_visibility::none;
    }

    /// Pages that some rows see.
    struct page_walk {
        const float* ranks;  // of a selection, or null
        int first_pos, last_pos;
    };
    struct visible_page {
        int index;  // pages.entries(): no further page
        page_visibility seen;
    };
    page_walk walk_of(const row_block& rows) const {
        return {choice.ranks_of(rows.head, rows.first), q_pos(rows.first), q_pos(rows.first + rows.n - 1)};
    }
    /// The page behind the last one that may be seen.
    int end_of(const page_walk& walk) const noexcept {
        return mods.is_causal() ? pages.lower_bound(walk.last_pos + 1) : pages.entries();
    }
    /// The first page from e on, of those that begin at or before token `last`, that is read.
    visible_page next_page(const page_walk& walk, int e, int last) const {
        if (mods.is_causal()) last = smaller(last, walk.last_pos);
        for (; e < pages.entries(); ++e) {
            const layer_pages::entry entry = pages.at(e);
            if (entry.first_token > last) break;
            if (walk.ranks && !page_choice::chosen(walk.ranks[e])) continue;
            const page_visibility seen =
                mods.page(walk.first_pos, walk.last_pos, entry.first_token, entry.first_token + entry.tokens);
            if (seen != page_visibility::none) return {e, seen};
        }
        return {pages.entries(), page_visibility::none};
    }
    /// The page to prefetch during page e: the one that is read next, or the first one of the next split.
    layer_pages::entry page_after(const page_walk& walk, int e, int next) const {
        if (next < pages.entries()) return pages.at(next);
        const bool follows =
            e + 1 < pages.entries() && (!walk.ranks || page_choice::chosen(walk.ranks[e + 1]));
        return pages.at(follows ? e + 1 : e);
    }
    /// Of the page behind the next one: the next one's says where its lower plane is.
    static void fetch_headers(const layer_pages::entry& entry) noexcept {
        prefetch(entry.keys);
        prefetch(entry.values);
    }
    /// Computes one split's softmax state: s.part, max, sum; and s.held->left, if values may be skipped.
    void visit_split(const row_block& rows, int split, const scratch& s, float* max, float* sum) const {
        const int n = rows.n, stride = plan.output_stride();
        empty_rows(n, max, sum);
        for (int i = 0; i < n * stride; ++i) s.part[i] = 0.0f;
        if (mods.lists())
            return listed_split{*this, rows, s}.attend(split * plan.split_tokens, plan.split_end(split), max,
                                                       sum);
        const std::size_t rotations = values.transforming();
        for (std::size_t i = 0; i < rotations * static_cast<std::size_t>(n * stride); ++i)
            s.rotated[i] = 0.0f;
        if (plan.skips) s.held->begin_split();

        const page_walk walk = walk_of(rows);
        const int begin = split * plan.split_tokens, last = plan.split_end(split) - 1;
        visible_page page = next_page(walk, pages.lower_bound(begin), last);
        while (page.index < pages.entries()) {
            const visible_page following = next_page(walk, page.index + 1, last);
            const layer_pages::entry entry = pages.at(page.index),
                                     next = page_after(walk, page.index, following.index);
            if (following.index + 1 < pages.entries()) fetch_headers(pages.at(following.index + 1));
            if (plan.skips) {
                hold_page(rows, page, entry, next, s, max, sum);
            } else {
                float factor[most_query_rows];
                score_page(rows, entry, next, s);
                change_and_mask(rows, entry, page.seen, s);
                softmax(s, n, entry.tokens, max, sum, factor);
                scale_outputs(n, factor, s);
                add_values(rows, entry, next, s);
            }
            page = following;
        }
        if (plan.skips) release_pages(rows, s, max, sum);
        restore_outputs(rows.head, n, s);
    }

    /// Weights of a page, whose values may be added later.
    void hold_page(const row_block& rows, const visible_page& page, const layer_pages::entry& entry,
                   const layer_pages::entry& next, const scratch& s, float* max, float* sum) const {
        held_pages& held = *s.held;
        if (held.count == held.most) release_pages(rows, s, max, sum);
        scratch here = s;
        here.scores = held.weights + held.tokens;
        here.scores_stride = held.stride;
        score_page(rows, entry, next, here);
        change_and_mask(rows, entry, page.seen, here);
        softmax(here, rows.n, entry.tokens, max, sum, held.factor + held.count * held.rows);
        held.hold(page.index, entry.tokens, rows.n, max);
    }
    /// Adds the values of the held pages that matter.
    void release_pages(const row_block& rows, const scratch& s, const float* max, const float* sum) const {
        held_pages& held = *s.held;
        const float share = static_cast<float>(held.tokens) / static_cast<float>(plan.tokens);
        held.choose(rows.n, choice.skipping->mass * share, choice.floors_of(rows.head, rows.first), max, sum);
        for (int j = 0; j < held.count; ++j) {
            const held_pages::one& page = held.pages[j];
            scale_outputs(rows.n, held.factor + j * held.rows, s);
            if (page.skipped) continue;
            for (int i = 0; i < rows.n; ++i)
                std::copy_n(held.weights + i * held.stride + page.at, page.tokens,
                            s.scores + i * s.scores_stride);
            int following = j + 1;
            while (following < held.count && held.pages[following].skipped) ++following;
            add_values(rows, pages.at(page.entry),
                       pages.at(following < held.count ? held.pages[following].entry : page.entry), s);
        }
        held.count = held.tokens = 0;
    }
    void count_values(int task, int seen, int skipped) const noexcept {
        if (!plan.skips) return;
        choice.counts[task][0] = seen;
        choice.counts[task][1] = skipped;
    }

    /// The rank of a page. Masks are left out of it, score modifiers see the last key of the page.
    float rank_of(const row_block& rows, int e, const layer_pages::entry& next, const scratch& s) const {
        const layer_pages::entry entry = pages.at(e);
        const page& p = *entry.keys;
        float score[most_query_rows], max[most_query_rows], sum[most_query_rows], factor[most_query_rows];
        if (ranks_by_scores) {
            score_page(rows, entry, next, s);
            change_and_mask(rows, entry, page_visibility::all, s);
            empty_rows(rows.n, max, sum);
            softmax(s, rows.n, entry.tokens, max, sum, factor);
            for (int i = 0; i < rows.n; ++i) score[i] = max[i] + std::log2(sum[i]);
        } else {
            // The headers of pages are not read here.
            const int index = choice.formats[e].index;
            const format& of = *choice.formats[e].of;
            const block_shape shape{tensor::key, choice.formats[e].tokens, plan.dim};
            const bound_product product = product_of(of, index, shape, rows, s.key_spaces);
            // Format 0 is the window's: queries without a transform.
            const bool plain = product.functions.estimates_first;
            product.functions.estimate_scores(
                of.scheme(), shape, {layer, rows.head},
                pages.data(p) + product.space.block_bytes * static_cast<std::size_t>(rows.head),
                queries_for(rows, entry.shift, plain ? 0 : index, plain ? keys[0] : of, s), plan.dim, rows.n,
                entry.skip, entry.skip + entry.tokens, page_choice::spread, score, distance(p, *next.keys),
                s.estimate);
            if (mods.changes_scores())
                for (int i = 0; i < rows.n; ++i) {
                    const int row = rows.first + i;
                    mods.change_scores(score + i, 1, q_head(rows.head, row), q_pos(row),
                                       entry.first_token + entry.tokens - 1, log2e);
                }
        }
        const float* const floors = choice.floors_of(rows.head, rows.first);
        float rank = 0.0f;
        for (int i = 0; i < rows.n; ++i)
            if (!rows.bad[static_cast<std::size_t>(i)])
                rank += page_choice::rough_exp2(score[i] - (floors[i] > minus_infinity ? floors[i] : 0.0f));
        return rank;
    }
};

}}}  // namespace kvq::detail
