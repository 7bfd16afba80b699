// Query rows of one layer and the products of them with pages: what every walk over pages is made of.
//
//   rows     query tokens x query heads of a kv head's group, up to 128 at a time
//   scores   q K^T of a page, then score modifiers and masks
//   outputs  weights times V of a page, added up in the basis of its format
//
// For keys that moved, the queries are rotated back (rotary.hpp). Only blocks whose codes cannot be folded
// are dequantized. Who walks: attend.hpp.
#pragma once

#include <algorithm>
#include <bitset>
#include <limits>

#include "../core/row_view.hpp"
#include "mods.hpp"
#include "plan.hpp"
#include "rotary.hpp"
#include "softmax_state.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// The queries of a call to one layer of one sequence.
struct attention_rows {
    using scratch = attention_scratch;
    using row_flags = std::bitset<most_query_rows>;
    static constexpr float log2e = softmax_state::log2e;
    static constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

    const format_table& keys;
    const format_table& values;
    mods_view mods;  // within the window of the layer
    layer_pages pages;
    attention_plan plan;
    int layer;
    const rotation* rotate;  // of the layer, or null
    query_view q;

    /// The query rows of a task.
    struct row_block {
        int head, first, n;
        row_flags bad;  // rows that are not finite
    };

    int q_head(int head, int row) const noexcept { return head * plan.group + row % plan.group; }
    int q_pos(int row) const noexcept {
        return (mods.has_query_positions() ? pages.tokens - plan.query_tokens : 0) + row / plan.group;
    }
    /// Reads the queries of rows [first, first + n) of a kv head, times `scale`.
    row_block begin_rows(int head, int first, int n, float scale, const scratch& s) const {
        const row_block rows{head, first, n, load_queries(head, first, n, scale, s)};
        s.forget_plans(keys, values);
        return rows;
    }
    static void empty_rows(int n, float* max, float* sum) noexcept {
        for (int i = 0; i < n; ++i) {
            max[i] = minus_infinity;
            sum[i] = 0.0f;
        }
    }

    /// The queries for a page whose keys moved by `shift`, transformed as its format wants: that of number
    /// `index`, or one with a plan of the page.
    const float* queries_for(const row_block& rows, std::int64_t shift, int index, const format& of,
                             const scratch& s) const {
        const auto size = static_cast<std::size_t>(rows.n) * static_cast<std::size_t>(plan.dim);
        if (!rotate) shift = 0;
        if (shift != s.shifts->begun) {
            for (int i = 0; i < keys.size(); ++i) s.key_spaces[i].begun = false;
            s.shifts->begun = shift;
        }
        if (shift != 0 && shift != s.shifts->moved) {
            for (std::size_t i = 0; i < size; ++i) s.moved[i] = s.query[i];
            (*rotate)(s.moved, rows.n, plan.dim, -shift);
            for (int i = 0; i < keys.size(); ++i) s.key_spaces[i].turned[1] = nullptr;
            s.shifts->moved = shift;
        }
        const float* const plain = shift == 0 ? s.query : s.moved;
        if (!of.functions().transforms) return plain;
        float* const to = (shift == 0 ? s.turned : s.moved + size) + keys.transforming_before(index) * size;
        const void*& turned = s.key_spaces[index].turned[shift != 0];
        if (turned != of.scheme()) {
            for (std::size_t i = 0; i < size; ++i) to[i] = plain[i];
            of.functions().transform_query(of.scheme(), {tensor::key, pages.geometry.page_tokens, plan.dim},
                                           block_id{layer, rows.head}, to, plan.dim, rows.n);
            turned = of.scheme();
        }
        return to;
    }

    /// The functions of a format and their workspace for the rows of a task, from its first page on.
    struct bound_product {
        const format_functions& functions;
        const attention_scratch::format_space& space;
    };
    bound_product product_of(const format& f, int index, const block_shape& shape, const row_block& rows,
                             attention_scratch::format_space* spaces) const {
        attention_scratch::format_space& space = spaces[index];
        if (const int tokens = index == 0 ? planned_tokens(0, pages.geometry) : shape.tokens;
            space.planned != tokens || space.scheme != f.scheme()) {
            f.functions().make_plan(f.scheme(), {shape.role, tokens, shape.dim}, {layer, rows.head}, rows.n,
                                    space.plan);
            space.planned = tokens;
            space.scheme = f.scheme();
            space.begun = false;
        }
        if (space.tokens != shape.tokens) {
            space.tokens = shape.tokens;
            space.lower_bytes = f.lower_bytes(shape);
            space.block_bytes = f.block_bytes(shape) - space.lower_bytes;
        }
        return {f.functions(), space};
    }
    /// The block of a head, with its lower plane if the call reads it.
    block_id id_of(const bound_product& product, const page& p, const page& next, int head) const noexcept {
        block_id id{layer, head};
        if (product.space.lower_bytes > 0 && !mods.upper_only()) {
            id.lower = p.lower + product.space.lower_bytes * static_cast<std::size_t>(head);
            if (next.lower)
                id.lower_ahead = static_cast<std::ptrdiff_t>(reinterpret_cast<std::uintptr_t>(next.lower) -
                                                             reinterpret_cast<std::uintptr_t>(p.lower));
        }
        return id;
    }

    void score_page(const row_block& rows, const layer_pages::entry& entry, const layer_pages::entry& next,
                    const scratch& s) const {
        const page& p = *entry.keys;
        const block_shape shape = key_shape(p);
        const format& of = keys.of(p);
        const bound_product product = product_of(of, p.format, shape, rows, s.key_spaces);
        const block_id id = id_of(product, p, *next.keys, rows.head);
        const format_functions& f = product.functions;
        const std::byte* const block =
            pages.data(p) + product.space.block_bytes * static_cast<std::size_t>(rows.head);
        const float* const x = queries_for(rows, entry.shift, p.format, of, s);
        bool& begun = s.key_spaces[p.format].begun;
        if (!f.begins_once[0] || !begun)
            f.begin(product.space.plan, shape, id, block, x, plan.dim, product.space.workspace);
        begun = true;
        f.finish(product.space.plan, shape, id, block, x, plan.dim, entry.skip + entry.tokens, plan.dim,
                 s.scores, s.scores_stride, false, ahead(p, *next.keys), product.space.workspace);
        // From here on score 0 is that of the first shown token.
        for (int i = 0; i < rows.n && entry.skip > 0; ++i) {
            float* const score = s.scores + i * s.scores_stride;
            std::copy(score + entry.skip, score + entry.skip + entry.tokens, score);
        }
    }

    void change_and_mask(const row_block& rows, const layer_pages::entry& entry, page_visibility seen,
                         const scratch& s) const {
        if (seen == page_visibility::all && !mods.changes_scores()) return;
        for (int i = 0; i < rows.n; ++i) {
            float* const score = s.scores + i * s.scores_stride;
            const int row = rows.first + i, pos = q_pos(row);
            if (mods.changes_scores())
                mods.change_scores(score, entry.tokens, q_head(rows.head, row), pos, entry.first_token,
                                   log2e);
            if (seen != page_visibility::all) mods.hide(score, entry.tokens, pos, entry.first_token);
        }
    }

    /// Scores of n rows become weights; factor: that of the outputs so far.
    void softmax(const scratch& s, int n, int tokens, float* max, float* sum, float* factor) const {
        values.window().functions().backend->softmax(s.scores, s.scores_stride, n, tokens, max, sum, factor);
    }
    void scale_outputs(int n, const float* factor, const scratch& s) const {
        const int dim = plan.value_dim, stride = plan.output_stride();
        const std::size_t rotations = values.transforming();
        for (int i = 0; i < n; ++i) {
            const float by = factor[i];  // a copy, which no output can be: else compilers multiply one by one
            if (by == 1.0f) continue;
            for (int d = 0; d < dim; ++d) s.part[i * stride + d] *= by;
            for (std::size_t r = 0; r < rotations; ++r) {
                float* const turned =
                    s.rotated + (r * static_cast<std::size_t>(n) + static_cast<std::size_t>(i)) *
                                    static_cast<std::size_t>(stride);
                for (int d = 0; d < dim; ++d) turned[d] *= by;
            }
        }
    }
    /// Adds weights times values of a page to the outputs.
    void add_values(const row_block& rows, const layer_pages::entry& entry, const layer_pages::entry& next,
                    const scratch& s) const {
        const int n = rows.n, dim = plan.value_dim, stride = plan.output_stride();
        const page& p = *entry.values;
        const block_shape shape = value_shape(p);
        // Tokens before the shown ones, and behind them where the whole block is folded, get weight zero.
        const int end = entry.skip + entry.tokens;
        for (int i = 0; i < n && entry.skip > 0; ++i) {
            float* const weight = s.scores + i * s.scores_stride;
            std::copy_backward(weight, weight + entry.tokens, weight + end);
            std::fill_n(weight, entry.skip, 0.0f);
        }
        if (p.format != 0)
            for (int i = 0; i < n; ++i)
                for (int t = end; t < p.tokens; ++t) s.scores[i * s.scores_stride + t] = 0.0f;
        const bound_product product = product_of(values[p.format], p.format, shape, rows, s.value_spaces);
        const block_id id = id_of(product, p, *next.values, rows.head);
        const format_functions& f = product.functions;
        const std::byte* const block =
            pages.data(p) + product.space.block_bytes * static_cast<std::size_t>(rows.head);
        float* to = s.part;
        if (f.transforms)
            to = s.rotated + values.transforming_before(p.format) * static_cast<std::size_t>(n * stride);
        f.begin(product.space.plan, shape, id, block, s.scores, s.scores_stride, product.space.workspace);
        f.finish(product.space.plan, shape, id, block, s.scores, s.scores_stride, dim, end, to, stride, true,
                 ahead(p, *next.values), product.space.workspace);
    }

    /// Restores outputs that were summed in a transformed basis, and adds them to the others.
    void restore_outputs(int head, int n, const scratch& s) const {
        const int stride = plan.output_stride();
        const block_shape shape{tensor::value, pages.geometry.page_tokens, plan.value_dim};
        std::size_t index = 0;
        for (int f = 0; f < values.size(); ++f) {
            const format_functions& functions = values[f].functions();
            if (!functions.transforms) continue;
            float* const from = s.rotated + index++ * static_cast<std::size_t>(n * stride);
            functions.restore_output(values[f].scheme(), shape, block_id{layer, head}, from, stride, n);
            for (int i = 0; i < n * stride; ++i) s.part[i] += from[i];
        }
    }
    std::ptrdiff_t distance(const page& now, const page& next) const noexcept {
        return static_cast<std::ptrdiff_t>(reinterpret_cast<std::uintptr_t>(pages.data(next)) -
                                           reinterpret_cast<std::uintptr_t>(pages.data(now)));
    }

private:
    block_shape key_shape(const page& p) const noexcept { return {tensor::key, p.tokens, plan.dim}; }
    block_shape value_shape(const page& p) const noexcept {
        return {tensor::value, p.tokens, plan.value_dim};
    }

    /// Loads the queries and returns which rows are not finite: integer products would hide them.
    row_flags load_queries(int head, int first, int n, float scale, const scratch& s) const {
        const auto load = values.window().functions().backend->load_query;
        row_flags bad;
        for (int i = 0; i < n; ++i) {
            const void* const row = q.at((first + i) / plan.group, q_head(head, first + i));
            bad[static_cast<std::size_t>(i)] = !load(q.type, row, plan.dim, scale, s.query + i * plan.dim);
        }
        return bad;
    }
    /// Distance to the same head's block of the next page: prefetches do not wait for that page's header.
    std::ptrdiff_t ahead(const page& now, const page& next) const noexcept {
        prefetch(&next);
        return distance(now, next);
    }
};

}}}  // namespace kvq::detail
