// Fused attention over packed pages of any mix of formats: out = softmax(q K^T) V, decode (one token) and prefill (many).
//
// Walk: for every kv head and every block of up to 16 or 128 query rows (query tokens x query heads of the GQA group), pages are read
// in token order. Per page: scores from the key block, online softmax, weights times the value block. Only blocks whose
// codes cannot be folded are dequantized, one at a time, into the workspace. For keys that moved, the queries are rotated back
// (rotary.hpp), once for pages in a row that moved alike. Keys are cut into chunks of about 2048 tokens; each
// chunk gives a softmax state, and states are merged in token order. The result is the same bit for bit on any number of threads,
// alone or in a batch.
//
// Numeric contract: integer products with 16-bit fixed-point queries and weights, float sums; relative error against double
// arithmetic on the dequantized values below 5e-4 on random data (tests/properties/attention.cpp), and more where single terms of a
// score are large: outliers of keys times large queries (docs/architecture.md). Queries that are not finite give NaN.
#pragma once

#include <algorithm>
#include <bitset>
#include <cmath>
#include <limits>
#include <new>

#include "mods.hpp"
#include "plan.hpp"
#include "query_view.hpp"
#include "rotary.hpp"
#include "softmax_state.hpp"

namespace kvq::inline KVQ_TAGGED {

namespace detail {

/// Opens the tile state of the backend that has one, and closes it at the end.
class tile_sessions {
public:
    tile_sessions(const format_table& keys, const format_table& values, int rows) {
        for (const format_table* table : {&keys, &values})
            for (int i = 0; i < table->size(); ++i) {
                const backend_functions* const backend = (*table)[i].functions().backend;
                if (backend->open_tiles == nullptr || backend == open_) continue;
                open_ = backend;  // the only one of the cache (check_backends)
                backend->open_tiles(rows, state_);
            }
    }
    ~tile_sessions() {
        if (open_) open_->close_tiles(state_);
    }
    tile_sessions(const tile_sessions&) = delete;
    tile_sessions& operator=(const tile_sessions&) = delete;

private:
    const backend_functions* open_ = nullptr;
    alignas(64) std::byte state_[backend_functions::tile_state_bytes];
};

/// Attention of one layer, ready to run its tasks.
class attention {
public:
    using scratch = attention_scratch;

    const format_table& keys;
    const format_table& values;
    const mods_view& mods;
    layer_pages pages;
    attention_plan plan;
    int layer;
    const rotation* rotate;  // of the layer, or null
    query_view q;
    output_view out;
    float* partials;

    /// task: index, which gives kv head, row block and (if split) chunk.
    void run(int task, const scratch& s) const {
        const int chunks = plan.split() ? plan.chunks() : 1;
        const int head = task / (plan.row_blocks() * chunks);
        const int block = task / chunks % plan.row_blocks();
        const int first = block * plan.block_rows;
        const int n = smaller(plan.block_rows, plan.rows() - first);
        const int dim = plan.value_dim;
        // The first chunk is never left out: it makes queries that are not finite give NaN.
        if (const int chunk = task % chunks; chunk > 0 && hides(chunk, first, n)) {
            for (int i = 0; i < n; ++i) {
                float* const to = partial(head, first + i, chunk);
                to[0] = -std::numeric_limits<float>::infinity();
                to[1] = 0.0f;
            }
            return;
        }
        const row_block rows{head, first, n, load_queries(head, first, n, s)};
        const tile_sessions tiles(keys, values, n);
        s.forget_plans(keys, values);
        float max[most_query_rows], sum[most_query_rows];
        if (plan.split()) {
            const int chunk = task % chunks;
            visit_chunk(rows, chunk, s, max, sum);
            for (int i = 0; i < n; ++i) {
                float* const to = partial(head, first + i, chunk);
                to[0] = max[i];
                to[1] = rows.bad[static_cast<std::size_t>(i)] ? not_a_number : sum[i];
                for (int d = 0; d < dim; ++d) to[2 + d] = s.part[i * dim + d];
            }
            return;
        }
        softmax_state running[most_query_rows];
        for (int i = 0; i < n; ++i) {
            running[i].output = s.output + i * dim;
            for (int d = 0; d < dim; ++d) running[i].output[d] = 0.0f;
        }
        for (int chunk = 0; chunk < plan.chunks(); ++chunk) {
            if (hides(chunk, first, n)) continue;
            visit_chunk(rows, chunk, s, max, sum);
            for (int i = 0; i < n; ++i) running[i].merge({max[i], sum[i], s.part + i * dim}, dim);
        }
        for (int i = 0; i < n; ++i) {
            if (rows.bad[static_cast<std::size_t>(i)]) running[i].sum = not_a_number;
            finish(running[i], head, first + i);
        }
    }

    /// Merges the chunks of every row of a block, in token order, after their tasks. index: task / chunks.
    void merge(int index) const {
        const int head = index / plan.row_blocks(), first = index % plan.row_blocks() * plan.block_rows;
        for (int row = first; row < smaller(first + plan.block_rows, plan.rows()); ++row) merge(head, row);
    }

private:
    static constexpr float log2e = softmax_state::log2e;
    static constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
    using row_flags = std::bitset<most_query_rows>;

    /// The query rows of a task.
    struct row_block {
        int head, first, n;
        row_flags bad;  // rows that are not finite
    };

    /// Uses the row's first partial as accumulator.
    void merge(int head, int row) const {
        float* const first = partial(head, row, 0);
        softmax_state running{first[0], first[1], first + 2};
        for (int chunk = 1; chunk < plan.chunks(); ++chunk) {
            float* const p = partial(head, row, chunk);
            running.merge({p[0], p[1], p + 2}, plan.value_dim);
        }
        finish(running, head, row);
    }
    float* partial(int head, int row, int chunk) const noexcept {
        const auto index = (static_cast<std::size_t>(head) * static_cast<std::size_t>(plan.rows()) +
                            static_cast<std::size_t>(row)) *
                               static_cast<std::size_t>(plan.chunks()) +
                           static_cast<std::size_t>(chunk);
        return partials + index * plan.state_floats();
    }
    int q_head(int head, int row) const noexcept { return head * plan.group + row % plan.group; }
    int q_pos(int row) const noexcept {
        return (mods.has_query_positions() ? pages.tokens - plan.query_tokens : 0) + row / plan.group;
    }
    void finish(softmax_state& row_state, int head, int row) const {
        if (mods.has_sink()) row_state.add_sink(mods.sink_logit(q_head(head, row)), plan.value_dim);
        if (float* const lse = out.lse(row / plan.group, q_head(head, row))) *lse = row_state.log_sum_exp();
        row_state.finish(row_state.output, plan.value_dim);
        out.store(row / plan.group, q_head(head, row), row_state.output);
    }
    block_shape key_shape(const page& p) const noexcept { return {tensor::key, p.tokens, plan.dim}; }
    block_shape value_shape(const page& p) const noexcept {
        return {tensor::value, p.tokens, plan.value_dim};
    }

    /// Loads the queries and returns which rows are not finite: integer products would hide them.
    row_flags load_queries(int head, int first, int n, const scratch& s) const {
        float scale = mods.scale(plan.dim);
        if (!mods.changes_scores()) scale *= log2e;
        for (int i = 0; i < n; ++i)
            q.load((first + i) / plan.group, q_head(head, first + i), s.query + i * plan.dim, scale);
        row_flags bad;
        for (int i = 0; i < n; ++i) {
            float zero = 0.0f;
            for (int d = 0; d < plan.dim; ++d) zero += 0.0f * s.query[i * plan.dim + d];
            bad[static_cast<std::size_t>(i)] = zero != 0.0f;
        }
        transform_queries(head, n, s.query, s.turned);
        return bad;
    }
    /// to: [n][dim] for every transforming format of keys.
    void transform_queries(int head, int n, const float* query, float* to) const {
        const block_shape shape{tensor::key, pages.geometry.page_tokens, plan.dim};
        for (int f = 0; f < keys.size(); ++f) {
            const format_functions& functions = keys[f].functions();
            if (!functions.transforms) continue;
            for (int i = 0; i < n; ++i) {
                for (int d = 0; d < plan.dim; ++d) to[i * plan.dim + d] = query[i * plan.dim + d];
                functions.transform_query(keys[f].scheme(), shape, block_id{layer, head}, to + i * plan.dim);
            }
            to += n * plan.dim;
        }
    }
    /// The queries for a page whose keys moved by `shift`, transformed as its format wants.
    const float* queries_for(const row_block& rows, std::int64_t shift, int format, const scratch& s) const {
        const auto size = static_cast<std::size_t>(rows.n) * static_cast<std::size_t>(plan.dim);
        if (!rotate) shift = 0;
        if (shift != s.shifts->begun) {
            for (int i = 0; i < keys.size(); ++i) s.key_spaces[i].begun = false;
            s.shifts->begun = shift;
        }
        if (shift != 0 && shift != s.shifts->moved) {
            for (std::size_t i = 0; i < size; ++i) s.moved[i] = s.query[i];
            (*rotate)(s.moved, rows.n, plan.dim, -shift);
            transform_queries(rows.head, rows.n, s.moved, s.moved + size);
            s.shifts->moved = shift;
        }
        if (!keys[format].functions().transforms) return shift == 0 ? s.query : s.moved;
        return (shift == 0 ? s.turned : s.moved + size) + keys.transforming_before(format) * size;
    }

    /// Is no key of the chunk visible to any of the rows? An empty state, which changes nothing when it is merged.
    bool hides(int chunk, int first, int n) const {
        const int begin = chunk * plan.chunk_tokens,
                  next = begin + smaller(plan.chunk_tokens, plan.tokens - begin);
        const int from = pages.lower_bound(begin), to = pages.lower_bound(next);
        if (from == to) return true;
        const layer_pages::entry last = pages.at(to - 1);
        return mods.page(q_pos(first), q_pos(first + n - 1), pages.at(from).first_token,
                         last.first_token + last.tokens) == page_visibility::none;
    }

    /// Computes one chunk's softmax state: s.part, max, sum.
    void visit_chunk(const row_block& rows, int chunk, const scratch& s, float* max, float* sum) const {
        const int first = rows.first, n = rows.n;
        const int dim = plan.value_dim;
        for (int i = 0; i < n; ++i) {
            max[i] = -std::numeric_limits<float>::infinity();
            sum[i] = 0.0f;
        }
        for (int i = 0; i < n * dim; ++i) s.part[i] = 0.0f;
        const std::size_t rotations = values.transforming();
        for (std::size_t i = 0; i < rotations * static_cast<std::size_t>(n * dim); ++i) s.rotated[i] = 0.0f;

        const int first_pos = q_pos(first), last_pos = q_pos(first + n - 1);
        const int begin = chunk * plan.chunk_tokens;
        int last = begin + smaller(plan.chunk_tokens, plan.tokens - begin) - 1;
        if (mods.is_causal()) last = smaller(last, last_pos);
        for (int e = pages.lower_bound(begin); e < pages.entries(); ++e) {
            const layer_pages::entry entry = pages.at(e);
            if (entry.first_token > last) break;
            const page_visibility seen =
                mods.page(first_pos, last_pos, entry.first_token, entry.first_token + entry.tokens);
            if (seen == page_visibility::none) continue;
            const layer_pages::entry next = e + 1 < pages.entries() ? pages.at(e + 1) : entry;
            score_page(rows, entry, next, s);
            change_and_mask(rows, entry, seen, s);
            weigh_page(rows, entry, next, s, max, sum);
        }
        restore_outputs(rows.head, n, s);
    }

    /// The functions of a format and their workspace for the rows of a task. Planned at the first page of the format.
    struct bound_product {
        const format_functions& functions;
        const attention_scratch::format_space& space;
    };
    bound_product product_of(const format_table& table, int index, const block_shape& shape,
                             const row_block& rows, attention_scratch::format_space* spaces) const {
        const format& f = table[index];
        attention_scratch::format_space& space = spaces[index];
        if (!space.planned) {
            f.functions().make_plan(f.scheme(),
                                    {shape.role, planned_tokens(index, pages.geometry), shape.dim},
                                    {layer, rows.head}, rows.n, space.plan);
            space.planned = true;
        }
        if (space.tokens != shape.tokens) {
            space.tokens = shape.tokens;
            space.block_bytes = f.block_bytes(shape);
        }
        return {f.functions(), space};
    }

    void score_page(const row_block& rows, const layer_pages::entry& entry, const layer_pages::entry& next,
                    const scratch& s) const {
        const page& p = *entry.keys;
        const block_shape shape = key_shape(p);
        const block_id id{layer, rows.head};
        const bound_product product = product_of(keys, p.format, shape, rows, s.key_spaces);
        const format_functions& f = product.functions;
        const std::byte* const block =
            p.data() + product.space.block_bytes * static_cast<std::size_t>(rows.head);
        const float* const x = queries_for(rows, entry.shift, p.format, s);
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
        for (int i = 0; i < rows.n; ++i) {
            float* const score = s.scores + i * s.scores_stride;
            const int row = rows.first + i, pos = q_pos(row);
            if (mods.changes_scores())
                mods.change_scores(score, entry.tokens, q_head(rows.head, row), pos, entry.first_token,
                                   log2e);
            if (seen != page_visibility::all) mods.hide(score, entry.tokens, pos, entry.first_token);
        }
    }

    void weigh_page(const row_block& rows, const layer_pages::entry& entry, const layer_pages::entry& next,
                    const scratch& s, float* max, float* sum) const {
        const int n = rows.n;
        const page& p = *entry.values;
        const block_shape shape = value_shape(p);
        const block_id id{layer, rows.head};
        const int dim = plan.value_dim;
        const std::size_t rotations = values.transforming();
        float factor[most_query_rows];
        values.window().functions().backend->softmax(s.scores, s.scores_stride, n, entry.tokens, max, sum,
                                                     factor);
        for (int i = 0; i < n; ++i) {
            if (factor[i] != 1.0f) {
                for (int d = 0; d < dim; ++d) s.part[i * dim + d] *= factor[i];
                for (std::size_t r = 0; r < rotations; ++r) {
                    float* const turned =
                        s.rotated + (r * static_cast<std::size_t>(n) + static_cast<std::size_t>(i)) *
                                        static_cast<std::size_t>(dim);
                    for (int d = 0; d < dim; ++d) turned[d] *= factor[i];
                }
            }
        }
        // Tokens in front of the shown ones, and those behind them where parameters are folded for the whole block, get weight zero.
        const int end = entry.skip + entry.tokens;
        for (int i = 0; i < n && entry.skip > 0; ++i) {
            float* const weight = s.scores + i * s.scores_stride;
            std::copy_backward(weight, weight + entry.tokens, weight + end);
            std::fill_n(weight, entry.skip, 0.0f);
        }
        if (p.format != 0)
            for (int i = 0; i < n; ++i)
                for (int t = end; t < p.tokens; ++t) s.scores[i * s.scores_stride + t] = 0.0f;
        const bound_product product = product_of(values, p.format, shape, rows, s.value_spaces);
        const format_functions& f = product.functions;
        const std::byte* const block =
            p.data() + product.space.block_bytes * static_cast<std::size_t>(rows.head);
        float* to = s.part;
        if (f.transforms)
            to = s.rotated + values.transforming_before(p.format) * static_cast<std::size_t>(n * dim);
        f.begin(product.space.plan, shape, id, block, s.scores, s.scores_stride, product.space.workspace);
        f.finish(product.space.plan, shape, id, block, s.scores, s.scores_stride, dim, end, to, dim, true,
                 ahead(p, *next.values), product.space.workspace);
    }

    /// Distance from a block to the same head's block of the next page; 0 if that page has another layout.
    static std::ptrdiff_t ahead(const page& now, const page& next) noexcept {
        return now.format == next.format && now.bytes == next.bytes
                   ? static_cast<std::ptrdiff_t>(reinterpret_cast<std::uintptr_t>(next.data()) -
                                                 reinterpret_cast<std::uintptr_t>(now.data()))
                   : 0;
    }

    /// Restores outputs that were summed in a transformed basis, and adds them to the others.
    void restore_outputs(int head, int n, const scratch& s) const {
        const int dim = plan.value_dim;
        const block_shape shape{tensor::value, pages.geometry.page_tokens, dim};
        std::size_t index = 0;
        for (int f = 0; f < values.size(); ++f) {
            const format_functions& functions = values[f].functions();
            if (!functions.transforms) continue;
            float* const from = s.rotated + index++ * static_cast<std::size_t>(n * dim);
            for (int i = 0; i < n; ++i) {
                functions.restore_output(values[f].scheme(), shape, block_id{layer, head}, from + i * dim);
                for (int d = 0; d < dim; ++d) s.part[i * dim + d] += from[i * dim + d];
            }
        }
    }
};

}  // namespace detail
}  // namespace kvq::inline KVQ_TAGGED
