// Fused attention over packed pages of any mix of formats: out = softmax(q K^T) V, decode (one token) and prefill (many).
//
// Walk: for every kv head and every block of up to 16 query rows, or 128 (query tokens x query heads of the group), pages are
// visited in token order. Per page: scores from the key block, online softmax, weights into the value block. Only blocks whose
// codes cannot be folded are decoded, one at a time, into the workspace. Keys are cut into chunks of about 2048 tokens; each
// chunk gives a softmax state, and states are merged in token order: on one thread or on many, alone or in a batch, the result
// is the same bit for bit.
//
// Numeric contract: integer products with 16-bit fixed-point queries and weights, float sums; relative error against double
// arithmetic on the decoded values below 5e-4 on random data (tests/properties/attention.cpp), and more where single terms of a
// score are large: outliers of keys times large queries (docs/architecture.md). Queries that are not finite give NaN.
#pragma once

#include <atomic>
#include <bitset>
#include <type_traits>

#include "../backends/kernels/block_product.hpp"
#include "../backends/kernels/softmax.hpp"
#include "../page/formats.hpp"
#include "../page/layer_pages.hpp"
#include "executor.hpp"
#include "query_view.hpp"
#include "softmax_state.hpp"
#include "variant.hpp"

namespace kvq::inline v0_1 {

namespace detail {

/// Query rows per task, at most. More of them where all rows of a task share what is made of a block (word_product.hpp).
template <class Backend>
inline constexpr int attention_rows =
    kernels::has_word_dots<typename Backend::lanes> && !kernels::has_tiles<typename Backend::lanes> ? 128
                                                                                                    : 16;
inline constexpr int attention_chunk = 2048;  // keys per softmax state, about
inline constexpr int enough_tasks = 64;       // below this, chunks become tasks of their own

/// Cuts a buffer into aligned pieces; counts when there is no buffer.
class carver {
public:
    explicit carver(std::byte* memory) noexcept : memory_(memory) {}
    std::byte* take(std::size_t bytes) noexcept {
        std::byte* const p = memory_ ? memory_ + used_ : nullptr;
        used_ += round_up(bytes, std::size_t{64});
        return p;
    }
    float* floats(std::size_t n) noexcept { return reinterpret_cast<float*>(take(n * sizeof(float))); }
    std::size_t used() const noexcept { return used_; }

private:
    std::byte* memory_;
    std::size_t used_ = 0;
};

/// The shape of one attention call and how it is cut into tasks.
struct attention_plan {
    int kv_heads, group, query_tokens, dim, value_dim;
    int tokens, chunk_tokens;
    int block_rows;  // query rows per task: half of the most where those would leave too few tasks

    attention_plan(const cache_shape& s, const page_geometry& g, int key_tokens, int q_heads, int q_tokens,
                   int most_rows) noexcept
        : kv_heads(s.kv_heads),
          group(q_heads / s.kv_heads),
          query_tokens(q_tokens),
          dim(s.dim(tensor::key)),
          value_dim(s.dim(tensor::value)),
          tokens(key_tokens),
          chunk_tokens(larger(1, attention_chunk / g.page_tokens) * g.page_tokens),
          block_rows(most_rows > 64 && kv_heads * ceil_div(rows(), most_rows) < enough_tasks ? most_rows / 2
                                                                                             : most_rows) {}

    int rows() const noexcept { return group * query_tokens; }
    int row_blocks() const noexcept { return ceil_div(rows(), block_rows); }
    /// By positions, so that cuts change neither tasks nor workspace. A page belongs to the chunk in which it begins.
    int chunks() const noexcept { return ceil_div(tokens, chunk_tokens); }
    bool split() const noexcept { return chunks() > 1 && kv_heads * row_blocks() < enough_tasks; }
    int tasks() const noexcept { return kv_heads * row_blocks() * (split() ? chunks() : 1); }
    /// Floats that one row's partial state takes.
    std::size_t state_floats() const noexcept { return static_cast<std::size_t>(value_dim) + 2; }
    std::size_t partial_bytes() const noexcept {
        return split() ? round_up(static_cast<std::size_t>(kv_heads) * static_cast<std::size_t>(rows()) *
                                      static_cast<std::size_t>(chunks()) * state_floats() * sizeof(float),
                                  std::size_t{64})
                       : 0;
    }
};

/// One worker's scratch memory.
template <class Backend, class Keys, class Values>
struct attention_scratch {
    float* query;    // [rows][dim]
    float* turned;   // [rows][dim] per transforming key format
    float* scores;   // [rows][scores_stride]
    float* output;   // [rows][value_dim], the running state
    float* part;     // [rows][value_dim], the current chunk
    float* rotated;  // [rows][value_dim] per transforming value format
    std::byte* key_space[Keys::size];
    std::byte* value_space;
    int scores_stride;
    std::size_t bytes;

    attention_scratch(const Keys& keys, const Values& values, const attention_plan& plan,
                      const page_geometry& g, std::byte* memory) {
        carver c(memory);
        const auto rows = static_cast<std::size_t>(smaller(plan.rows(), plan.block_rows));
        const auto dim = static_cast<std::size_t>(plan.dim),
                   value_dim = static_cast<std::size_t>(plan.value_dim);
        scores_stride = round_up(larger(g.page_tokens, g.sinks), 16) + 16;
        query = c.floats(rows * dim + 16);
        turned = c.floats(transforming_count(keys) * rows * dim + 16);
        scores = c.floats(rows * static_cast<std::size_t>(scores_stride));
        output = c.floats(rows * value_dim + 16);
        part = c.floats(rows * value_dim + 16);
        rotated = c.floats(transforming_count(values) * rows * value_dim + 16);
        keys.for_each([&]<class S>(const S& s, int i) {
            const block_shape shape{tensor::key, g.page_tokens, plan.dim};
            const kernels::block_product<Backend, S> product(s, shape, block_id{}, static_cast<int>(rows));
            key_space[i] = c.take(product.workspace_bytes());
        });
        std::size_t most = 0;
        values.for_each([&]<class S>(const S& s, int) {
            const block_shape shape{tensor::value, g.page_tokens, plan.value_dim};
            const kernels::block_product<Backend, S> product(s, shape, block_id{}, static_cast<int>(rows));
            most = larger(most, product.workspace_bytes());
        });
        value_space = c.take(most);
        bytes = c.used();
    }

    template <class Table>
    static std::size_t transforming_count(const Table& table) {
        std::size_t n = 0;
        table.for_each([&]<class S>(const S&, int) { n += transforming<S>; });
        return n;
    }
    /// Position of format `index` among the transforming ones.
    template <class Table>
    static std::size_t transforming_index(const Table& table, int index) {
        std::size_t n = 0;
        table.for_each([&]<class S>(const S&, int i) { n += transforming<S> && i < index; });
        return n;
    }
};

/// Products of n vectors with one head's blocks of every format of a table.
template <class Backend, class Table>
auto make_products(const Table& table, const block_shape& shape, block_id id, int n) {
    return table.map(
        [&]<class S>(const S& s) { return kernels::block_product<Backend, S>(s, shape, id, n); });
}

/// Attention of one layer, ready to run its tasks.
template <class Backend, class Keys, class Values, class Variant>
class attention {
public:
    using lanes = typename Backend::lanes;
    using scratch = attention_scratch<Backend, Keys, Values>;

    const Keys& keys;
    const Values& values;
    const Variant& kind;
    layer_pages pages;
    attention_plan plan;
    int layer;
    query_view q;
    output_view out;
    float* partials;

    /// Task number -> kv head, row block and (if split) chunk.
    void run(int task, const scratch& s) const {
        const int chunks = plan.split() ? plan.chunks() : 1;
        const int head = task / (plan.row_blocks() * chunks);
        const int block = task / chunks % plan.row_blocks();
        const int first = block * plan.block_rows;
        const int n = smaller(plan.block_rows, plan.rows() - first);
        const int dim = plan.value_dim;
        const row_flags bad = load_queries(head, first, n, s);
        const row_block rows{
            head,
            first,
            n,
            bad,
            make_products<Backend>(keys, {tensor::key, pages.geometry.page_tokens, plan.dim}, {layer, head},
                                   n),
            make_products<Backend>(values, {tensor::value, pages.geometry.page_tokens, plan.value_dim},
                                   {layer, head}, n)};
        const kernels::tile_session<lanes, Backend> tiles(n);
        bool folded[Keys::size] = {};
        float max[most_rows], sum[most_rows];
        if (plan.split()) {
            const int chunk = task % chunks;
            visit_chunk(rows, chunk, s, folded, max, sum);
            for (int i = 0; i < n; ++i) {
                float* const to = partial(head, first + i, chunk);
                to[0] = max[i];
                to[1] = sum[i];
                for (int d = 0; d < dim; ++d) to[2 + d] = s.part[i * dim + d];
            }
            return;
        }
        softmax_state running[most_rows];
        for (int i = 0; i < n; ++i) {
            running[i].output = s.output + i * dim;
            for (int d = 0; d < dim; ++d) running[i].output[d] = 0.0f;
        }
        for (int chunk = 0; chunk < plan.chunks(); ++chunk) {
            visit_chunk(rows, chunk, s, folded, max, sum);
            for (int i = 0; i < n; ++i) running[i].merge({max[i], sum[i], s.part + i * dim}, dim);
        }
        for (int i = 0; i < n; ++i) finish(running[i], head, first + i);
    }

    /// Merges the chunks of one row of one head, in token order. Uses the row's first partial as accumulator.
    void merge(int head, int row) const {
        float* const first = partial(head, row, 0);
        softmax_state running{first[0], first[1], first + 2};
        for (int chunk = 1; chunk < plan.chunks(); ++chunk) {
            float* const p = partial(head, row, chunk);
            running.merge({p[0], p[1], p + 2}, plan.value_dim);
        }
        finish(running, head, row);
    }

private:
    static constexpr float log2e = softmax_state::log2e;
    static constexpr int most_rows = attention_rows<Backend>;
    using row_flags = std::bitset<most_rows>;

    /// The query rows of a task, and what multiplies them with blocks.
    struct row_block {
        int head, first, n;
        row_flags bad;  // rows that are not finite
        decltype(make_products<Backend>(std::declval<const Keys&>(), {}, {}, 0)) key_products;
        decltype(make_products<Backend>(std::declval<const Values&>(), {}, {}, 0)) value_products;
    };

    float* partial(int head, int row, int chunk) const noexcept {
        const auto index = (static_cast<std::size_t>(head) * static_cast<std::size_t>(plan.rows()) +
                            static_cast<std::size_t>(row)) *
                               static_cast<std::size_t>(plan.chunks()) +
                           static_cast<std::size_t>(chunk);
        return partials + index * plan.state_floats();
    }
    int q_head(int head, int row) const noexcept { return head * plan.group + row % plan.group; }
    int q_pos(int row) const noexcept { return pages.tokens - plan.query_tokens + row / plan.group; }
    void finish(const softmax_state& row_state, int head, int row) const noexcept {
        if (float* const lse = out.lse(row / plan.group, q_head(head, row))) *lse = row_state.log_sum_exp();
        row_state.finish(row_state.output, plan.value_dim);
        out.store(row / plan.group, q_head(head, row), row_state.output);
    }
    block_shape key_shape(const page& p) const noexcept { return {tensor::key, p.tokens, plan.dim}; }
    block_shape value_shape(const page& p) const noexcept {
        return {tensor::value, p.tokens, plan.value_dim};
    }

    /// Returns which rows are not finite: products of integers would not show it.
    row_flags load_queries(int head, int first, int n, const scratch& s) const {
        float scale = 0.0f;
        if constexpr (scaling<Variant>)
            scale = kind.scale(plan.dim);
        else
            scale = 1.0f / std::sqrt(static_cast<float>(plan.dim));
        if constexpr (!changing_logits<Variant>) scale *= log2e;
        for (int i = 0; i < n; ++i)
            q.load((first + i) / plan.group, q_head(head, first + i), s.query + i * plan.dim, scale);
        row_flags bad;
        for (int i = 0; i < n; ++i) {
            float zero = 0.0f;
            for (int d = 0; d < plan.dim; ++d) zero += 0.0f * s.query[i * plan.dim + d];
            bad[static_cast<std::size_t>(i)] = zero != 0.0f;
        }
        std::size_t copies = 0;
        const block_shape shape{tensor::key, pages.geometry.page_tokens, plan.dim};
        keys.for_each([&]<class S>(const S& scheme, int) {
            if constexpr (transforming<S>) {
                float* const to = s.turned + copies++ * static_cast<std::size_t>(n * plan.dim);
                for (int i = 0; i < n; ++i) {
                    for (int d = 0; d < plan.dim; ++d) to[i * plan.dim + d] = s.query[i * plan.dim + d];
                    scheme.transform_query(shape, block_id{layer, head}, to + i * plan.dim);
                }
            }
        });
        return bad;
    }

    /// One chunk's softmax state into s.part, max, sum.
    void visit_chunk(const row_block& rows, int chunk, const scratch& s, bool* folded, float* max,
                     float* sum) const {
        const int first = rows.first, n = rows.n;
        const int dim = plan.value_dim;
        for (int i = 0; i < n; ++i) {
            max[i] = -std::numeric_limits<float>::infinity();
            sum[i] = 0.0f;
        }
        for (int i = 0; i < n * dim; ++i) s.part[i] = 0.0f;
        const std::size_t rotations = scratch::transforming_count(values);
        for (std::size_t i = 0; i < rotations * static_cast<std::size_t>(n * dim); ++i) s.rotated[i] = 0.0f;

        const int last_pos = q_pos(first + n - 1);
        int first_key = 0;
        if constexpr (limiting_keys<Variant>) first_key = kind.first_key(q_pos(first));
        const int begin = chunk * plan.chunk_tokens;
        const int last = smaller(last_pos, begin + smaller(plan.chunk_tokens, plan.tokens - begin) - 1);
        for (int e = pages.lower_bound(begin); e < pages.entries(); ++e) {
            const layer_pages::entry entry = pages.at(e);
            if (entry.first_token > last) break;
            if (entry.first_token + entry.tokens <= first_key && entry.first_token >= kept_keys(kind))
                continue;
            const layer_pages::entry next = e + 1 < pages.entries() ? pages.at(e + 1) : entry;
            score_page(rows, entry, next, s, folded);
            mask_and_change(rows.head, first, n, entry, s);
            weigh_page(rows, entry, next, s, max, sum);
        }
        restore_outputs(rows.head, n, s);
        for (int i = 0; i < n; ++i)  // a sum that is not a number makes the whole row so
            if (rows.bad[static_cast<std::size_t>(i)]) sum[i] = std::numeric_limits<float>::quiet_NaN();
    }

    void score_page(const row_block& rows, const layer_pages::entry& entry, const layer_pages::entry& next,
                    const scratch& s, bool* folded) const {
        const page& p = *entry.keys;
        const block_shape shape = key_shape(p);
        const block_id id{layer, rows.head};
        visit_element(rows.key_products, p.format, [&]<class Product>(const Product& product) {
            const std::byte* const block =
                p.data() + product.block_bytes(shape) * static_cast<std::size_t>(rows.head);
            const float* x = s.query;
            if constexpr (transforming<typename Product::scheme_type>)
                x = s.turned +
                    scratch::transforming_index(keys, p.format) * static_cast<std::size_t>(rows.n * plan.dim);
            std::byte* const space = s.key_space[p.format];
            if (!Product::folds_once(tensor::key) || !folded[p.format]) {
                product.begin(shape, id, block, x, plan.dim, space);
                folded[p.format] = true;
            }
            product.finish(shape, id, block, x, plan.dim, entry.tokens, plan.dim, s.scores, s.scores_stride,
                           false, ahead(p, *next.keys), space);
        });
    }

    void mask_and_change(int head, int first, int n, const layer_pages::entry& entry,
                         const scratch& s) const {
        for (int i = 0; i < n; ++i) {
            float* const score = s.scores + i * s.scores_stride;
            const int pos = q_pos(first + i);
            if constexpr (changing_logits<Variant>)
                for (int t = 0; t < entry.tokens; ++t)
                    score[t] =
                        log2e * kind.logit(score[t], q_head(head, first + i), pos, entry.first_token + t);
            constexpr float never = -std::numeric_limits<float>::infinity();
            for (int t = larger(0, pos + 1 - entry.first_token); t < entry.tokens; ++t) score[t] = never;
            if constexpr (limiting_keys<Variant>) {
                const int hidden = smaller(entry.tokens, kind.first_key(pos) - entry.first_token);
                for (int t = larger(0, kept_keys(kind) - entry.first_token); t < hidden; ++t)
                    score[t] = never;
            }
        }
    }

    void weigh_page(const row_block& rows, const layer_pages::entry& entry, const layer_pages::entry& next,
                    const scratch& s, float* max, float* sum) const {
        const int n = rows.n;
        const page& p = *entry.values;
        const block_shape shape = value_shape(p);
        const block_id id{layer, rows.head};
        const int dim = plan.value_dim;
        const std::size_t rotations = scratch::transforming_count(values);
        float factor[most_rows];
        const auto weigh = [&](int i, auto count) {
            kernels::softmax_tile<lanes, decltype(count)::value>(
                s.scores + i * s.scores_stride, s.scores_stride, entry.tokens, max + i, sum + i, factor + i);
        };
        constexpr int together = kernels::query_block;
        int weighed = 0;
        for (; weighed + together <= n; weighed += together)
            weigh(weighed, std::integral_constant<int, together>{});
        for (; weighed < n; ++weighed) weigh(weighed, std::integral_constant<int, 1>{});
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
        // Parameters are folded for the whole block: tokens that it does not show have no weight.
        if (p.format != 0)
            for (int i = 0; i < n; ++i)
                for (int t = entry.tokens; t < p.tokens; ++t) s.scores[i * s.scores_stride + t] = 0.0f;
        visit_element(rows.value_products, p.format, [&]<class Product>(const Product& product) {
            const std::byte* const block =
                p.data() + product.block_bytes(shape) * static_cast<std::size_t>(rows.head);
            float* to = s.part;
            if constexpr (transforming<typename Product::scheme_type>)
                to = s.rotated +
                     scratch::transforming_index(values, p.format) * static_cast<std::size_t>(n * dim);
            product.begin(shape, id, block, s.scores, s.scores_stride, s.value_space);
            product.finish(shape, id, block, s.scores, s.scores_stride, dim, entry.tokens, to, dim, true,
                           ahead(p, *next.values), s.value_space);
        });
    }

    /// From a block to the same head's block of the page that is read next; 0 where that has another layout.
    static std::ptrdiff_t ahead(const page& now, const page& next) noexcept {
        return now.format == next.format && now.bytes == next.bytes
                   ? static_cast<std::ptrdiff_t>(reinterpret_cast<std::uintptr_t>(next.data()) -
                                                 reinterpret_cast<std::uintptr_t>(now.data()))
                   : 0;
    }

    /// Outputs that were summed in a transformed basis go back and join the others.
    void restore_outputs(int head, int n, const scratch& s) const {
        const int dim = plan.value_dim;
        const block_shape shape{tensor::value, pages.geometry.page_tokens, dim};
        std::size_t index = 0;
        values.for_each([&]<class S>(const S& scheme, int) {
            if constexpr (transforming<S>) {
                float* const from = s.rotated + index++ * static_cast<std::size_t>(n * dim);
                for (int i = 0; i < n; ++i) {
                    scheme.restore_output(shape, block_id{layer, head}, from + i * dim);
                    for (int d = 0; d < dim; ++d) s.part[i * dim + d] += from[i * dim + d];
                }
            }
        });
    }
};

/// What one sequence of a batch attends with: its pages, its queries, its outputs.
struct attention_item {
    layer_pages pages;
    query_view q;
    output_view out;
};

/// The attention of several sequences as one list of tasks. Items: attention_item operator()(int) const.
template <class Backend, class Keys, class Values, class Items>
class attention_batch {
public:
    attention_batch(const Keys& keys, const Values& values, const cache_shape& shape,
                    const page_geometry& geometry, const Items& items, int count)
        : keys_(keys), values_(values), shape_(shape), geometry_(geometry), items_(items), count_(count) {
        int most_rows = 0;
        for (int i = 0; i < count; ++i) {
            const attention_plan plan = plan_of(items(i));
            tasks_ += plan.tasks();
            partial_bytes_ += plan.partial_bytes();
            if (plan.rows() <= most_rows && i > 0) continue;
            most_rows = plan.rows();
            largest_ = plan;
        }
        place_bytes_ = round_up(static_cast<std::size_t>(count) * sizeof(place), std::size_t{64});
        if (count > 0) scratch_bytes_ = scratch(keys_, values_, largest_, geometry_, nullptr).bytes;
    }

    int workers(int threads) const noexcept { return larger(1, smaller(threads, tasks_)); }
    std::size_t bytes(int threads) const noexcept {
        return place_bytes_ + partial_bytes_ + static_cast<std::size_t>(workers(threads)) * scratch_bytes_;
    }

    /// memory: bytes(threads) of it, aligned to 64.
    template <class Variant, class Executor>
    void run(int layer, const Variant& variant, Executor& ex, int threads, std::byte* memory) const {
        if (tasks_ == 0) return;
        auto* const places = reinterpret_cast<place*>(memory);
        std::byte* partials = memory + place_bytes_;
        for (int i = 0, task = 0; i < count_; ++i) {
            const attention_plan plan = plan_of(items_(i));
            new (places + i) place{task, reinterpret_cast<float*>(partials)};
            task += plan.tasks();
            partials += plan.partial_bytes();
        }
        const auto job = [&](int i) {
            const attention_item item = items_(i);
            return attention<Backend, Keys, Values, Variant>{keys_,      values_,       variant,
                                                             item.pages, plan_of(item), layer,
                                                             item.q,     item.out,      places[i].partials};
        };
        std::byte* const scratch_memory = partials;
        std::atomic<int> next{0};
        ex.parallel_for(workers(threads), [&](int worker) {
            const scratch mine(keys_, values_, largest_, geometry_,
                               scratch_memory + static_cast<std::size_t>(worker) * scratch_bytes_);
            int i = 0;
            for (int task = next.fetch_add(1); task < tasks_; task = next.fetch_add(1)) {
                while (i + 1 < count_ && places[i + 1].first_task <= task) ++i;
                job(i).run(task - places[i].first_task, mine);
            }
        });
        const auto merge = [&](int i) {
            const auto mine = job(i);
            if (!mine.plan.split()) return;
            for (int head = 0; head < mine.plan.kv_heads; ++head)
                for (int row = 0; row < mine.plan.rows(); ++row) mine.merge(head, row);
        };
        if (count_ == 1) return merge(0);
        if (partial_bytes_ == 0) return;
        next = 0;
        ex.parallel_for(larger(1, smaller(threads, count_)), [&](int) {
            for (int i = next.fetch_add(1); i < count_; i = next.fetch_add(1)) merge(i);
        });
    }

private:
    using scratch = attention_scratch<Backend, Keys, Values>;
    /// Where an item's tasks begin, and its partial states.
    struct place {
        int first_task;
        float* partials;
    };

    attention_plan plan_of(const attention_item& item) const noexcept {
        return {shape_, geometry_, item.pages.tokens, item.q.heads, item.q.tokens, attention_rows<Backend>};
    }

    const Keys& keys_;
    const Values& values_;
    const cache_shape& shape_;
    page_geometry geometry_;
    const Items& items_;
    int count_;
    int tasks_ = 0;
    attention_plan largest_{shape_, geometry_, 0, shape_.kv_heads, 1, attention_rows<Backend>};
    std::size_t place_bytes_ = 0, partial_bytes_ = 0, scratch_bytes_ = 0;
};

/// For one sequence.
template <class Backend, class Keys, class Values, class F>
auto with_one_item(const Keys& keys, const Values& values, const cache_shape& shape,
                   const attention_item& item, F&& f) {
    const auto items = [&](int) -> const attention_item& { return item; };
    return f(attention_batch<Backend, Keys, Values, decltype(items)>(keys, values, shape, item.pages.geometry,
                                                                     items, 1));
}

}  // namespace detail

/// Bytes of workspace that one attention call needs.
template <class Backend, class Keys, class Values>
std::size_t attention_workspace_bytes(const Keys& keys, const Values& values, const cache_shape& shape,
                                      const page_geometry& geometry, int tokens, int q_heads,
                                      int query_tokens, int threads) {
    layer_pages pages;
    pages.geometry = geometry;
    pages.tokens = tokens;
    const token_view<float> rows(nullptr, query_tokens, q_heads, shape.dim(tensor::key));
    return detail::with_one_item<Backend>(keys, values, shape, {pages, rows, rows},
                                          [&](const auto& batch) { return batch.bytes(threads); });
}

/// out = softmax(q K^T) V for the last q.tokens tokens of `pages`. Arguments must be valid (sequence::attend checks them);
/// `memory` holds attention_workspace_bytes() for so many threads.
template <class Backend, class Keys, class Values, class Variant, executor Executor>
void attend(const Keys& keys, const Values& values, const cache_shape& shape, int layer,
            const layer_pages& pages, const query_view& q, const output_view& out, const Variant& variant,
            Executor& ex, int threads, std::byte* memory) {
    detail::expect_variant(variant);
    detail::with_one_item<Backend>(keys, values, shape, {pages, q, out}, [&](const auto& batch) {
        batch.run(layer, variant, ex, threads, memory);
    });
}

}  // namespace kvq::inline v0_1
