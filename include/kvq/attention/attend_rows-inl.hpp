// Definitions of attend_rows.hpp.
#pragma once

#include <atomic>
#include <cmath>
#include <limits>

#include "attend_rows.hpp"
#include "carver.hpp"
#include "softmax_state.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// Blocks of the table up to a token. Blocks may be of any size: no sum with it.
inline int used_blocks(const row_blocks& blocks, int tokens) {
    return tokens == 0 ? 0 : (tokens - 1) / blocks.block_tokens + 1;
}
/// Formats without products are read as floats first.
inline const row_place_functions& places_of(const rows_view& of) { return of.rows.functions().of_places; }
inline bool reads_floats(const rows_view& of) { return places_of(of).keys == nullptr; }

/// The rows of a head of a sequence that ends in front of token `end`.
inline row_place place_of(const rows_view& of, const row_blocks& blocks, int end, int head) {
    row_place p;
    if (of.data) p.rows = static_cast<const std::byte*>(of.data) + head * of.head_stride;
    p.row_stride = of.token_stride;
    if (of.scales) p.scales = static_cast<const std::byte*>(of.scales) + head * of.scale_head_stride;
    p.scale_stride = of.scale_token_stride;
    p.group_stride = of.scale_group_stride != 0 || reads_floats(of) ? of.scale_group_stride : 1;
    if (of.biases) p.biases = static_cast<const std::byte*>(of.biases) + head * of.scale_head_stride;
    p.blocks = blocks.table;
    p.block_tokens = blocks.block_tokens;
    p.block_stride = of.block_stride;
    p.scale_block_stride = of.scale_block_stride;
    p.end = end;
    return p;
}

/// Raises unless rows of `tokens` tokens can lie so.
KVQ_FUNC void check_rows(const rows_view& of, const char* name, const row_blocks& blocks, int tokens,
                         const cache_shape& shape, tensor role) {
    expect(!blocks.table || (blocks.block_tokens >= 1 && blocks.blocks >= 0), "a block table of ",
           blocks.blocks, " blocks of ", blocks.block_tokens, " tokens");
    expect(shape.kv_heads <= most_heads && shape.dim(role) <= most_head_dim, name, " of ", shape.kv_heads,
           " kv heads of ", shape.dim(role), " channels; ", most_heads, " of ", most_head_dim,
           " are the most");
    expect(static_cast<bool>(of.rows), name, " have no format");
    const row_place_functions& places = places_of(of);
    expect(
        places.keys != nullptr || places.read != nullptr, name, " are ", of.rows.asked_name(),
        ", which is no format of rows in the bytes of another system, or whose kernels this program lacks");
    of.rows.functions().check(of.rows.scheme(), shape, role);
    const auto check_beside = [&](int bytes, const void* given, const char* what) {
        const bool beside = bytes > 0;
        expect(given != nullptr || tokens == 0 || !beside, name, " are ", of.rows.asked_name(), ", whose ",
               what, " lie beside the rows, but ", what, " is null");
        expect(given == nullptr || beside, name, " are ", of.rows.asked_name(), ", which has no ", what,
               " beside the rows, but ", what, " are given");
    };
    const row_bytes bytes = places.bytes(of.rows.scheme(), shape.dim(role));
    check_beside(bytes.scales, of.scales, "scales");
    expect(!blocks.table || blocks.block_tokens % bytes.together == 0, name, " are ", of.rows.asked_name(),
           ", where scales of ", bytes.together, " tokens take turns, but blocks have ", blocks.block_tokens,
           " tokens");
    check_beside(bytes.biases, of.biases, "biases");
    expect(of.data != nullptr || tokens == 0, name, " have no data for ", tokens, " tokens");
    const int together = blocks.table ? smaller(blocks.block_tokens, tokens) : tokens;
    const bool several = blocks.table && used_blocks(blocks, tokens) > 1;
    // Strides that are too short are those of elements, or of a dimension that was forgotten.
    const auto apart = [](std::ptrdiff_t stride, int least) { return stride >= least || stride <= -least; };
    expect((together <= 1 || apart(of.token_stride, bytes.row)) &&
               (!several || apart(of.block_stride, bytes.row)) &&
               (shape.kv_heads <= 1 || tokens == 0 || apart(of.head_stride, bytes.row)),
           name, " of ", tokens, " tokens and ", shape.kv_heads, " heads have strides of ", of.token_stride,
           " bytes from one token to the next, ", of.head_stride, " from head to head and ", of.block_stride,
           " from block to block, but rows of ", bytes.row, " bytes");
    // Side by side, or each in another place.
    const int unit = larger(bytes.group / bytes.together, 1),
              beside = of.scale_group_stride == 0 || of.scale_group_stride == unit ? bytes.scales : unit;
    expect(!of.scales || ((together <= 1 || apart(of.scale_token_stride, beside)) &&
                          (!several || apart(of.scale_block_stride, beside)) &&
                          (shape.kv_heads <= 1 || tokens == 0 || apart(of.scale_head_stride, beside))),
           "scales of ", name, " of ", tokens, " tokens and ", shape.kv_heads, " heads have strides of ",
           of.scale_token_stride, " bytes from one token to the next, ", of.scale_head_stride,
           " from head to head and ", of.scale_block_stride, " from block to block, but ", beside, " bytes");
}

/// Raises unless the table has blocks of the memory for tokens [first, end).
KVQ_FUNC void check_row_blocks(const row_blocks& blocks, int first, int end) {
    if (!blocks.table || first == end) return;
    const int used = used_blocks(blocks, end);
    expect(used <= blocks.blocks, end, " tokens need ", used, " blocks of ", blocks.block_tokens,
           ", but the table has ", blocks.blocks);
    for (int i = first / blocks.block_tokens; i < used; ++i)
        expect(blocks.table[i] >= 0 && blocks.table[i] < blocks.all_blocks, "block ", i, " of the table is ",
               blocks.table[i], ", but the memory has ", blocks.all_blocks, " blocks");
}

/// One call: what its tasks share.
struct rows_attention {
    static constexpr int span_tokens = 128, most_rows = 32, split_tokens = 16 * span_tokens;
    static constexpr std::uint64_t none = ~std::uint64_t{0};

    const rows_view& keys;
    const rows_view& values;
    const row_blocks& blocks;
    const rows_shape& shape;
    const query_view& q;
    const output_view& out;
    const mods_view& mods;
    int value_dim;
    bool one_latent = false;                     ///< values are the first channels of keys
    std::byte* parts = nullptr;                  ///< of key splits: states, then outputs
    std::atomic<std::uint64_t> bad_scale{none};  ///< the first one: head, span, values or keys

    int group() const { return q.heads / shape.kv_heads; }
    int rows() const { return q.tokens * group(); }
    int rows_of_task() const { return smaller(rows(), most_rows); }
    int row_blocks_of_head() const { return ceil_div(rows(), rows_of_task()); }
    /// Key splits, of decode steps: the tasks of few rows. The shape alone says how many.
    int splits() const { return rows() <= most_rows ? larger(1, ceil_div(shape.tokens, split_tokens)) : 1; }
    int tasks() const { return shape.kv_heads * row_blocks_of_head() * splits(); }
    /// Of the state of a row of a split, with its output.
    std::size_t part_floats() const { return static_cast<std::size_t>(value_dim) + 2; }
    std::size_t part_bytes() const {
        return splits() == 1 ? 0
                             : static_cast<std::size_t>(tasks()) * static_cast<std::size_t>(rows()) *
                                   part_floats() * sizeof(float);
    }
    float* part(int head, int split, int row) const {
        const std::ptrdiff_t at = (std::ptrdiff_t{head} * splits() + split) * rows() + row;
        return reinterpret_cast<float*>(parts) + at * static_cast<std::ptrdiff_t>(part_floats());
    }
    int dim_of(tensor role) const { return role == tensor::key || one_latent ? shape.head_dim : value_dim; }
    block_shape shape_of(tensor role) const {
        return {role, smaller(larger(shape.tokens, 1), span_tokens),
                role == tensor::key ? shape.head_dim : value_dim};
    }
    /// Are keys and values the same rows? Strides from which nothing is read do not count.
    bool same_records() const {
        const rows_view &a = keys, &b = values;
        if (!a.rows || !b.rows || !reads_floats(a) || places_of(a).bytes == nullptr ||
            !a.rows.same_as(b.rows) || a.data != b.data || a.scales != b.scales || a.biases != b.biases ||
            shape.head_dim < 1 || shape.head_dim > most_head_dim)
            return false;
        const int dense = places_of(a).bytes(a.rows.scheme(), shape.head_dim).group;
        const auto same = [](bool read, std::ptrdiff_t x, std::ptrdiff_t y) { return !read || x == y; };
        const auto group = [&](const rows_view& of) {
            return of.scale_group_stride != 0 ? of.scale_group_stride : dense;
        };
        const bool heads = shape.kv_heads > 1, has_blocks = blocks.table != nullptr, beside = a.scales;
        return a.token_stride == b.token_stride && same(heads, a.head_stride, b.head_stride) &&
               same(has_blocks, a.block_stride, b.block_stride) &&
               same(beside, a.scale_token_stride, b.scale_token_stride) &&
               same(beside && heads, a.scale_head_stride, b.scale_head_stride) &&
               same(beside && has_blocks, a.scale_block_stride, b.scale_block_stride) &&
               same(beside, group(a), group(b));
    }

    /// Memory of a task.
    struct space {
        std::byte *key_plan, *value_plan, *key_space, *value_space;
        float *x, *scores, *sums, *keys, *values;
    };
    space carve(carver& memory) const {
        const int n = rows_of_task();
        const auto plan = [&](const rows_view& of, tensor role, std::size_t* bytes) {
            const format_functions& f = of.rows.functions();
            if (reads_floats(of)) return std::size_t{0};
            *bytes = f.make_plan(of.rows.scheme(), shape_of(role), {}, n, nullptr);
            return f.plan_bytes;
        };
        std::size_t key_bytes = 0, value_bytes = 0;
        const std::size_t key_plan = plan(keys, tensor::key, &key_bytes),
                          value_plan = plan(values, tensor::value, &value_bytes);
        space s;
        s.key_plan = memory.take(key_plan);
        s.value_plan = memory.take(value_plan);
        s.key_space = memory.take(key_bytes);
        s.value_space = memory.take(value_bytes);
        const auto floats = [&](int count) {
            return memory.floats(static_cast<std::size_t>(n) * static_cast<std::size_t>(count));
        };
        s.x = floats(shape.head_dim);
        s.scores = floats(span_tokens);
        s.sums = floats(value_dim);
        const auto tokens_of = [&](const rows_view& of, tensor role) {
            return memory.floats(
                reads_floats(of) ? std::size_t{span_tokens} * static_cast<std::size_t>(dim_of(role)) : 0);
        };
        s.keys = tokens_of(keys, tensor::key);
        s.values = reads_floats(values) && one_latent ? s.keys : tokens_of(values, tensor::value);
        return s;
    }

    int position(int row) const {
        return (mods.has_query_positions() ? shape.tokens - q.tokens : 0) + row / group();
    }

    void run(int task, const space& s) {
        const int split = task % splits(), block = task / splits(), head = block / row_blocks_of_head(),
                  first = block % row_blocks_of_head() * rows_of_task(),
                  n = smaller(rows() - first, rows_of_task()), dim = shape.head_dim,
                  first_key = split * split_tokens,
                  end_key = splits() == 1 ? shape.tokens : smaller(shape.tokens, first_key + split_tokens);
        const format_functions &k = keys.rows.functions(), &v = values.rows.functions();
        const block_id id{0, head};
        const auto q_head = [&](int i) { return head * group() + (first + i) % group(); };
        float scale = mods.scale(dim);
        if (!mods.changes_scores()) scale *= softmax_state::log2e;
        float max[most_rows], sum[most_rows], factor[most_rows];
        bool bad[most_rows];
        for (int i = 0; i < n; ++i) {
            bad[i] = !k.backend->load_query(q.type, q.at((first + i) / group(), q_head(i)), dim, scale,
                                            s.x + i * dim);
            max[i] = -std::numeric_limits<float>::infinity();
            sum[i] = 0.0f;
        }
        for (int i = 0; i < n * value_dim; ++i) s.sums[i] = 0.0f;
        if (!reads_floats(keys)) {
            k.make_plan(keys.rows.scheme(), shape_of(tensor::key), id, n, s.key_plan);
            k.begin(s.key_plan, shape_of(tensor::key), id, nullptr, s.x, dim, s.key_space);
        }
        if (!reads_floats(values))
            v.make_plan(values.rows.scheme(), shape_of(tensor::value), id, n, s.value_plan);
        const row_place of_keys = place_of(keys, blocks, shape.tokens, head),
                        of_values = place_of(values, blocks, shape.tokens, head);
        const int first_q = position(first), last_q = position(first + n - 1);
        for (int span = first_key; span < end_key; span += span_tokens) {
            int from = span, end = smaller(end_key, span + span_tokens);
            const page_visibility seen = mods.page(first_q, last_q, from, end);
            if (seen == page_visibility::none) continue;
            // What lies before and behind the tokens that are seen may be no numbers.
            const auto hidden = [&](int t) {
                return mods.page(first_q, last_q, t, t + 1) == page_visibility::none;
            };
            while (from < end && hidden(from)) ++from;
            while (from < end && hidden(end - 1)) --end;
            const int here = end - from;
            if (here == 0) continue;
            bool finite = true;
            if (reads_floats(keys)) {
                finite = k.of_places.read(keys.rows.scheme(), of_keys, dim, from, here, s.keys);
                k.backend->score_tokens(s.keys, dim, here, dim, s.x, dim, n, s.scores, span_tokens);
            } else {
                finite =
                    k.of_places.keys(s.key_plan, of_keys, from, here, s.scores, span_tokens, s.key_space);
            }
            if (!finite) report(head, from, false);
            for (int i = 0; i < n; ++i) {
                float* const row = s.scores + i * span_tokens;
                if (mods.changes_scores())
                    mods.change_scores(row, here, q_head(i), position(first + i), from, softmax_state::log2e);
                if (seen != page_visibility::all) mods.hide(row, here, position(first + i), from);
            }
            k.backend->softmax(s.scores, span_tokens, n, here, max, sum, factor);
            for (int i = 0; i < n; ++i) {
                const float by = factor[i];
                for (int d = 0; d < value_dim && by != 1.0f; ++d) s.sums[i * value_dim + d] *= by;
            }
            if (reads_floats(values)) {
                const int row = dim_of(tensor::value);
                finite = one_latent ||
                         v.of_places.read(values.rows.scheme(), of_values, row, from, here, s.values);
                v.backend->add_tokens(s.values, row, here, value_dim, s.scores, span_tokens, n, s.sums,
                                      value_dim);
            } else {
                finite = v.of_places.values(s.value_plan, of_values, from, here, s.scores, span_tokens,
                                            s.sums, value_dim, s.value_space);
            }
            if (!finite) report(head, from, true);
        }
        for (int i = 0; i < n; ++i) {
            softmax_state state{max[i], bad[i] ? std::numeric_limits<float>::quiet_NaN() : sum[i],
                                s.sums + i * value_dim};
            if (splits() == 1) {
                finish(state, head, first + i);
                continue;
            }
            float* const to = part(head, split, first + i);
            to[0] = state.max;
            to[1] = state.sum;
            for (int d = 0; d < value_dim; ++d) to[2 + d] = state.output[d];
        }
    }
    /// All splits of a kv head, in the order of tokens.
    void merge(int head) {
        for (int row = 0; row < rows(); ++row) {
            const auto state_of = [&](int split) {
                float* const from = part(head, split, row);
                return softmax_state{from[0], from[1], from + 2};
            };
            softmax_state state = state_of(0);
            for (int split = 1; split < splits(); ++split) state.merge(state_of(split), value_dim);
            finish(state, head, row);
        }
    }
    void finish(softmax_state& state, int head, int row) {
        const int token = row / group(), q_head = head * group() + row % group();
        const float sink =
            mods.has_sink() ? mods.sink_logit(q_head) : -std::numeric_limits<float>::infinity();
        if (mods.has_sink()) state.add_sink(sink, value_dim);
        if (float* const lse = out.lse(token, q_head)) *lse = state.log_sum_exp(sink);
        state.finish(state.output, value_dim);
        out.store(token, q_head, state.output);
    }

    void report(int head, int from, bool of_values) {
        const std::uint64_t here =
            (static_cast<std::uint64_t>(head) << 32 | static_cast<std::uint64_t>(from / span_tokens) << 1) |
            (of_values ? 1u : 0u);
        std::uint64_t before = bad_scale.load();
        while (here < before && !bad_scale.compare_exchange_weak(before, here)) {
        }
    }
    void raise_bad_scale() const {
        const std::uint64_t bad = bad_scale.load();
        if (bad == none) return;
        const int from = static_cast<int>(bad >> 1 & 0x7fffffffu) * span_tokens,
                  last = smaller(from + span_tokens, shape.tokens) - 1;
        fail((bad & 1u) != 0 ? "values" : "keys", " of tokens ", from, " to ", last, " of kv head ",
             static_cast<int>(bad >> 32), " have a scale that is NaN or infinite");
    }

    void check() const {
        expect(shape.tokens >= 0 && shape.kv_heads >= 1 && shape.head_dim >= 1 && value_dim >= 1, "rows of ",
               shape.tokens, " tokens, ", shape.kv_heads, " kv heads, ", shape.head_dim, " and ", value_dim,
               " channels");
        const auto shape_for = [&](tensor role) {
            return cache_shape{.layers = 1,
                               .kv_heads = shape.kv_heads,
                               .head_dim = shape.head_dim,
                               .value_dim = dim_of(role)};
        };
        check_rows(keys, "keys", blocks, shape.tokens, shape_for(tensor::key), tensor::key);
        check_rows(values, "values", blocks, shape.tokens, shape_for(tensor::value), tensor::value);
        expect(q.tokens >= 0 && q.heads >= 1 && q.heads % shape.kv_heads == 0 && q.dim == shape.head_dim,
               "q has ", q.heads, " heads of ", q.dim, " channels, for ", shape.kv_heads, " kv heads of ",
               shape.head_dim);
        expect(out.tokens == q.tokens && out.heads == q.heads && out.dim == value_dim, "out has ", out.tokens,
               " tokens, ", out.heads, " heads and ", out.dim, " channels, but q and the values have ",
               q.tokens, ", ", q.heads, " and ", value_dim);
        expect(!mods.has_query_positions() || q.tokens <= shape.tokens, "q has ", q.tokens,
               " tokens, more than the ", shape.tokens, " of the keys");
        expect(mods.lists() == nullptr && mods.selection() == nullptr && mods.skipping() == nullptr,
               "lists, selections and skipped values are for pages of kvq, not for rows of other systems");
        mods.check(q.heads);
        check_row_blocks(blocks, 0, shape.tokens);
    }
};

}  // namespace detail

KVQ_FUNC void attend_rows(const rows_view& keys, const rows_view& values, const row_blocks& blocks,
                          const rows_shape& shape, query_view q, output_view out, workspace& memory,
                          const mods_view& mods, executor_view threads) {
    const int value_dim = shape.value_dim > 0 ? shape.value_dim : shape.head_dim;
    detail::rows_attention of{keys, values, blocks, shape, q, out, mods, value_dim};
    of.one_latent = value_dim <= shape.head_dim && of.same_records();
    of.check();
    if (q.tokens == 0) return;
    const int tasks = of.tasks(), jobs = detail::smaller(tasks, detail::larger(threads.concurrency(), 1));
    detail::carver size(nullptr);
    of.carve(size);
    const std::size_t bytes = size.used();
    std::byte* const all = memory.reserve(bytes * static_cast<std::size_t>(jobs) + of.part_bytes());
    of.parts = all + bytes * static_cast<std::size_t>(jobs);
    threads.parallel_for(jobs, [&](int job) {
        detail::carver own(all + bytes * static_cast<std::size_t>(job));
        const auto space = of.carve(own);
        for (int task = job; task < tasks; task += jobs) of.run(task, space);
    });
    if (of.splits() > 1) threads.parallel_for(shape.kv_heads, [&](int head) { of.merge(head); });
    of.raise_bad_scale();
}

}}  // namespace kvq
