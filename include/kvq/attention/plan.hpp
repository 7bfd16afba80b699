// The shape of an attention call: its division into tasks, and the memory that a worker needs for one of
// them.
//
//   task      a kv head, a block of query rows and, where these are few, a key split
//   scratch   queries (plain, transformed, moved), scores, running outputs, the workspaces of formats
//
// Contract: bytes are counted with the same code that carves them, so the workspace that a cache asks for is
// the one that it uses. Nothing depends on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#include "../core/shape.hpp"
#include "../format/format_table.hpp"
#include "../page/layer_pages.hpp"
#include "held_pages.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

inline constexpr int most_query_rows = 128;     // of any backend
inline constexpr int most_split_tokens = 2048;  // keys per softmax state, about
/// Listed tokens per softmax state, and per gathered block.
inline constexpr int listed_split_tokens = 512, listed_block_tokens = 64;
inline constexpr int enough_tasks = 64;  // below this, splits become tasks of their own

/// The shape of one attention call and its division into tasks.
struct attention_plan {
    int kv_heads, group, query_tokens, dim, value_dim;
    int tokens, split_tokens;
    int block_rows;  // query rows per task: half of the maximum if the maximum gives too few tasks
    bool skips;      // values: states hold the weights that were left out as well

    attention_plan(const cache_shape& s, const page_geometry& g, int key_tokens, int q_heads, int q_tokens,
                   int most_rows, bool skips_values) noexcept
        : kv_heads(s.kv_heads),
          group(q_heads / s.kv_heads),
          query_tokens(q_tokens),
          dim(s.dim(tensor::key)),
          value_dim(s.dim(tensor::value)),
          tokens(key_tokens),
          split_tokens(larger(1, most_split_tokens / g.page_tokens) * g.page_tokens),
          block_rows(most_rows > 64 && kv_heads * parts(rows(), most_rows) < enough_tasks ? most_rows / 2
                                                                                          : most_rows),
          skips(skips_values) {}

    /// Of lists with `listed` tokens for every query token: a block of rows belongs to one of these.
    static attention_plan of_lists(const cache_shape& s, const page_geometry& g, int listed, int q_heads,
                                   int q_tokens) noexcept {
        attention_plan plan(s, g, listed, q_heads, q_tokens, most_query_rows, false);
        plan.split_tokens = listed_split_tokens;
        plan.block_rows = smaller(plan.group, most_query_rows);
        while (plan.group % plan.block_rows != 0) --plan.block_rows;
        return plan;
    }

    int rows() const noexcept { return group * query_tokens; }
    int row_blocks() const noexcept { return parts(rows(), block_rows); }
    /// Key splits are cut by position, so that trims change neither tasks nor workspace. A page belongs to
    /// the split of its first token.
    int splits() const noexcept { return parts(tokens, split_tokens); }
    /// The token behind those of a split.
    int split_end(int split) const noexcept {
        return split * split_tokens + smaller(split_tokens, tokens - split * split_tokens);
    }
    bool splits_are_tasks() const noexcept { return splits() > 1 && kv_heads * row_blocks() < enough_tasks; }
    int tasks() const noexcept { return kv_heads * row_blocks() * (splits_are_tasks() ? splits() : 1); }
    /// Whether all tasks but the last split of a head see as many keys.
    bool tasks_are_equal() const noexcept { return splits_are_tasks() || row_blocks() == 1; }
    /// Blocks of rows whose splits are tasks of their own, and are merged when the last of them has ended.
    int merges() const noexcept { return splits_are_tasks() ? kv_heads * row_blocks() : 0; }
    /// Floats from one row of outputs to the next in scratch: an odd number of cache lines, so that a column
    /// of all rows does not lie in a few sets of a cache.
    int output_stride() const noexcept { return (parts(value_dim, 16) | 1) * 16; }
    /// Floats of one row's partial state.
    std::size_t state_floats() const noexcept {
        return static_cast<std::size_t>(value_dim) + (skips ? 3 : 2);
    }
    std::size_t partial_bytes() const noexcept {
        return splits_are_tasks()
                   ? round_up(static_cast<std::size_t>(kv_heads) * static_cast<std::size_t>(rows()) *
                                  static_cast<std::size_t>(splits()) * state_floats() * sizeof(float),
                              std::size_t{64})
                   : 0;
    }

private:
    /// ceil_div() of numbers up to the largest int.
    static int parts(int n, int of_size) noexcept { return n / of_size + (n % of_size != 0); }
};

/// Query rows per task that every format of both tables supports.
inline int most_task_rows(const format_table& keys, const format_table& values) noexcept {
    int rows = most_query_rows;
    for (const format_table* table : {&keys, &values})
        for (int i = 0; i < table->size(); ++i)
            rows = smaller(rows, (*table)[i].functions().backend->query_rows);
    return rows;
}

/// Tokens of the longest pages of a format of a table. Products with the window's format are planned once,
/// for these; those with other formats again for pages of another length (closed ones, cache/rearrange.hpp).
constexpr int planned_tokens(int index, const page_geometry& g) noexcept {
    return index == 0 ? g.longest_page() : g.page_tokens;
}

/// Which parts of the scratch memory the calls of a batch need.
struct scratch_use {
    bool rotates, estimates, skips;
    int listed_rows;  ///< most query rows of a task that attends to a list; 0: there is none
};

/// One worker's scratch memory.
struct attention_scratch {
    /// Workspace of one format of a table.
    struct format_space {
        std::byte* plan;
        std::byte* workspace;
        int planned;  // tokens of the pages for which `plan` was made, for the rows of a task; 0: none yet
        const void* scheme;  // for which it was made
        /// For which the queries are transformed, and those for keys that moved; or null.
        const void* turned[2];
        bool begun;               // the operands are in `workspace`, likewise
        int tokens;               // of the last page; 0: none yet
        std::size_t block_bytes;  // of its blocks, without lower planes
        std::size_t lower_bytes;  // of the lower planes of its blocks
    };

    /// For which keys the queries are: 0, or the shift of a span.
    struct shift_state {
        std::int64_t moved;  // of `moved`
        std::int64_t begun;  // of the workspaces of the key formats
    };

    float* query;   // [rows][dim]
    float* turned;  // [rows][dim] per transforming key format
    float* moved;   // the same for keys that moved: [rows][dim], and per transforming key format
    shift_state* shifts;
    float* scores;         // [rows][scores_stride]
    float* output;         // [rows][value_dim], the running state
    float* part;           // [rows][output_stride], the current split
    float* rotated;        // [rows][output_stride] per transforming value format
    float* estimate;       // scratch of estimates of scores, if they are used
    held_pages* held;      // if values may be skipped
    std::int32_t* listed;  // [listed_split_tokens], if there are lists, and what of them is gathered:
    float *listed_keys, *listed_values, *listed_scratch;
    format_space* key_spaces;    // [keys.size()]
    format_space* value_spaces;  // [values.size()], which share one workspace
    int scores_stride;
    std::size_t bytes;

    attention_scratch(const format_table& keys, const format_table& values, const attention_plan& plan,
                      const page_geometry& g, const scratch_use& use, std::byte* memory) {
        carver c(memory);
        const int n = smaller(plan.rows(), plan.block_rows);
        const bool lists = use.listed_rows > 0;
        const auto rows = static_cast<std::size_t>(n),
                   any_rows = static_cast<std::size_t>(larger(n, use.listed_rows));
        const auto dim = static_cast<std::size_t>(plan.dim),
                   value_dim = static_cast<std::size_t>(plan.value_dim);
        scores_stride = round_up(larger(g.longest_page(), lists ? listed_block_tokens : 0), 16) + 16;
        query = c.floats(any_rows * dim + 16);
        turned = c.floats(keys.transforming() * rows * dim + 16);
        moved = c.floats(use.rotates ? (1 + keys.transforming()) * rows * dim + 16 : 0);
        shifts = reinterpret_cast<shift_state*>(c.take(sizeof(shift_state)));
        scores = c.floats(any_rows * static_cast<std::size_t>(scores_stride));
        output = c.floats(any_rows * value_dim + 16);
        const auto output_stride = static_cast<std::size_t>(plan.output_stride());
        part = c.floats(any_rows * output_stride + 16);
        rotated = c.floats(values.transforming() * rows * output_stride + 16);
        estimate = c.floats(use.estimates ? estimate_floats(keys, plan, g) : 0);
        held = use.skips ? held_pages::carve(c, n, plan.split_tokens, g) : nullptr;
        listed =
            reinterpret_cast<std::int32_t*>(c.take(lists ? listed_split_tokens * sizeof(std::int32_t) : 0));
        listed_keys = c.floats(lists ? listed_block_tokens * dim + 16 : 0);
        listed_values = c.floats(lists ? listed_block_tokens * value_dim + 16 : 0);
        const std::size_t most_dim = larger(dim, value_dim);
        listed_scratch =
            c.floats(lists ? (static_cast<std::size_t>(g.longest_page()) + 4) * most_dim + 64 : 0);
        key_spaces = spaces(c, keys);
        value_spaces = spaces(c, values);
        const auto workspace_bytes = [&](const format_table& table, int i, tensor role, int channels) {
            const format& f = table[i];
            return f.functions().make_plan(f.scheme(), {role, planned_tokens(i, g), channels}, {}, n,
                                           nullptr);
        };
        for (int i = 0; i < keys.size(); ++i) {
            std::byte* const space = c.take(workspace_bytes(keys, i, tensor::key, plan.dim));
            if (memory) key_spaces[i].workspace = space;
        }
        std::size_t most = 0;
        for (int i = 0; i < values.size(); ++i)
            most = larger(most, workspace_bytes(values, i, tensor::value, plan.value_dim));
        std::byte* const space = c.take(most);
        for (int i = 0; i < values.size() && memory; ++i) value_spaces[i].workspace = space;
        bytes = c.used();
    }

    /// Called before the rows of a task.
    void forget_plans(const format_table& keys, const format_table& values) const noexcept {
        *shifts = {0, 0};
        for (int i = 0; i < keys.size(); ++i) {
            key_spaces[i].planned = 0;
            key_spaces[i].begun = false;
            key_spaces[i].turned[0] = key_spaces[i].turned[1] = nullptr;
        }
        for (int i = 0; i < values.size(); ++i) value_spaces[i].planned = 0;
    }

private:
    static std::size_t estimate_floats(const format_table& keys, const attention_plan& plan,
                                       const page_geometry& g) {
        std::size_t most = 0;
        for (int i = 0; i < keys.size(); ++i)
            if (const format_functions& f = keys[i].functions(); f.estimate_floats)
                most =
                    larger(most, f.estimate_floats(keys[i].scheme(), {tensor::key, g.page_tokens, plan.dim}));
        return most;
    }
    static format_space* spaces(carver& c, const format_table& table) {
        const auto n = static_cast<std::size_t>(table.size());
        auto* const all = reinterpret_cast<format_space*>(c.take(n * sizeof(format_space)));
        for (std::size_t i = 0; i < n; ++i) {
            std::byte* const plan = c.take(table[static_cast<int>(i)].functions().plan_bytes);
            if (all) ::new (all + i) format_space{plan, nullptr, 0, nullptr, {}, false, 0, 0, 0};
        }
        return all;
    }
};

}}}  // namespace kvq::detail
