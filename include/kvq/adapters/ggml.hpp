// Attention of ggml on a kvq cache: a node of a graph that stores new keys and values and attends; for layers
// with recurrent state one that runs the engine's kernel on the state. Uses ggml's public interface.
//
//   kvq::ggml_memory memory(cache, 8);                              sequences 0 to 7
//   ggml_tensor* out = memory.attend(ctx, layer, q, k, v);          while the graph is built: instead of
//                                                                   writing a cache and of attention
//   memory.begin({n, positions, id_counts, ids}, q_heads, threads);   before it runs: the memory of all
//                                                                     layers, so that no node can fail
//   ggml_backend_graph_compute(backend, graph);                     each node of `attend` once; on any number
//                                                                   of threads
//   memory.end();                                                   raises what a node raised; the step is
//                                                                   taken back then
//
// q [tokens][q_heads][head_dim] and k, v [tokens][kv_heads][dim] are tensors of the CPU, of type F32, F16 or
// BF16 and any strides between tokens and heads; keys and queries are rotated already. The result is F32
// [tokens][q_heads][value_dim], dense: what ggml_flash_attn_ext gives. (ggml counts dimensions the other way
// around: q has ne = {head_dim, q_heads, tokens}.)
// Contract: outputs are those of cache::prefill, bit for bit, on any number of threads. A graph may be run
// again for another batch of as many tokens. Errors do not cross ggml; after one the other nodes of the step
// do nothing. Removal, copies, shifts: sequences().
#pragma once

#include <ggml.h>

#include <deque>
#include <functional>

#include "../core/team.hpp"
#include "sequence_table.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

class ggml_memory {
public:
    /// A memory of sequences 0 to ids - 1. The cache outlives it, and it outlives its graphs. Its layers are
    /// those of the cache.
    ggml_memory(kvq::cache& of, int ids) : table_(of, ids), space_(of.pool().memory()) {
        for (int layer = 0; layer < of.layer_count(); ++layer)
            nodes_.push_back({this, layer, every_key(), {}});
    }
    ggml_memory(const ggml_memory&) = delete;
    ggml_memory& operator=(const ggml_memory&) = delete;

    /// The sequences: what llama.cpp's memory does with them (docs/guide/llama_cpp.md).
    sequence_table& sequences() noexcept { return table_; }
    const sequence_table& sequences() const noexcept { return table_; }

    /// The node of a layer. mods: not copied, and used when the graph runs; those of the last call for a
    /// layer hold in all graphs. Raises kvq::error for tensors that do not fit the cache. One such node per
    /// layer in a graph; of a layer that shares the keys and values of another one k and v are null, and its
    /// node comes behind.
    ggml_tensor* attend(ggml_context* context, int layer, ggml_tensor* q, ggml_tensor* k, ggml_tensor* v,
                        const mods_view& mods = every_key()) {
        check_layer(layer, true);
        const cache_shape& shape = table_.storage().shape(layer);
        const bool is_shared = table_.storage().owner(layer) != layer;
        check(q, "q", shape.head_dim, 0);
        if (is_shared) {
            detail::expect(k == nullptr && v == nullptr, "layer ", layer,
                           " shares keys and values, its k and v are null");
        } else {
            check(k, "k", shape.head_dim, shape.kv_heads);
            check(v, "v", shape.dim(tensor::value), shape.kv_heads);
            detail::expect(k->ne[2] == q->ne[2] && v->ne[2] == q->ne[2], "q has ", q->ne[2], " tokens, k ",
                           k->ne[2], " and v ", v->ne[2]);
        }
        detail::expect(q->ne[1] % shape.kv_heads == 0, "q has ", q->ne[1], " heads, not a multiple of the ",
                       shape.kv_heads, " kv heads");
        node& of = nodes_[static_cast<std::size_t>(layer)];
        of.mods = mods;
        ggml_tensor* inputs[] = {q, k, v};
        return ggml_custom_4d(context, GGML_TYPE_F32, shape.dim(tensor::value), q->ne[1], q->ne[2], 1, inputs,
                              is_shared ? 1 : 3, run, GGML_N_TASKS_MAX, &of);
    }

    /// What a layer with recurrent state does with one part of a step: reads rows of out->src, part.rows,
    /// changes *part.state, and writes the rows of out that are wanted. Called by one thread, which may share
    /// its work over `threads`; the others wait in the node.
    using recurrence =
        std::function<void(const sequence_table::step_part& part, ggml_tensor* out, executor_view threads)>;

    /// The node of a layer with recurrent state. inputs: 1 to GGML_MAX_SRC tensors, which become out->src.
    /// The result is F32, [tokens][channels]. f: that of the last call for a layer holds in all graphs.
    /// Raises kvq::error for a layer of another kind.
    ggml_tensor* recur(ggml_context* context, int layer, std::span<ggml_tensor* const> inputs,
                       std::int64_t channels, std::int64_t tokens, recurrence f) {
        check_layer(layer, false);
        detail::expect(!inputs.empty() && inputs.size() <= GGML_MAX_SRC, "a node has 1 to ", GGML_MAX_SRC,
                       " inputs, not ", inputs.size());
        node& of = nodes_[static_cast<std::size_t>(layer)];
        of.f = std::move(f);
        std::vector<ggml_tensor*> list(inputs.begin(), inputs.end());
        return ggml_custom_4d(context, GGML_TYPE_F32, channels, tokens, 1, 1, list.data(),
                              static_cast<int>(list.size()), run_recurrence, GGML_N_TASKS_MAX, &of);
    }

    /// Before the graph runs: sequence_table::begin, with a workspace of its own. threads: those of the
    /// graph. mods: as of the nodes; only selected_pages and skipped_values take memory. An error of an
    /// earlier step that end() has not raised is dropped.
    void begin(const token_batch& batch, int q_heads, int threads, const mods_view& mods = every_key()) {
        (void)detail::caught([&] { team_.check(); });
        table_.begin(batch, q_heads, threads, space_, mods);
    }
    /// After the graph has run: raises what a node raised, or kvq::error if a layer has not got its tokens.
    /// The step is taken back then. prompt_ends: as of recurrent_state::advance.
    void end(bool prompt_ends = false) {
        if (team_.failed()) table_.take_back();
        team_.check();
        table_.end(prompt_ends);
    }
    /// Did a node fail since begin()? Between graphs.
    bool failed() const noexcept { return team_.failed(); }

    /// Bytes of pages, positions and the workspace.
    [[nodiscard]] std::size_t bytes() const { return table_.bytes() + space_.size(); }

private:
    struct node {
        ggml_memory* memory;
        int layer;
        mods_view mods;
        recurrence f;
    };

    void check_layer(int layer, bool attends) const {
        const kvq::cache& of = table_.storage();
        detail::expect(layer >= 0 && layer < of.layer_count(), "layer ", layer, " is not among the ",
                       of.layer_count(), " layers of the cache");
        const bool has_state = of.layers()[static_cast<std::size_t>(layer)].kind == layer_kind::state;
        if (has_state == attends)
            detail::fail(
                detail::describe_layer(layer, of.layers()[static_cast<std::size_t>(layer)]),
                attends ? ": its node is recur(), not attend()" : ": its node is attend(), not recur()");
    }

    static const mods_view& every_key() noexcept {
        static const causal mask{};
        static const mods_view view(mask);
        return view;
    }

    static void check(const ggml_tensor* t, const char* name, int dim, int heads) {
        detail::expect(t != nullptr, name, " is null");
        detail::expect(t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16 || t->type == GGML_TYPE_BF16,
                       name, " is ", ggml_type_name(t->type), ", none of f32, f16 and bf16");
        detail::expect(t->ne[0] == dim && (heads == 0 ? t->ne[1] >= 1 : t->ne[1] == heads) && t->ne[3] == 1,
                       name, " is ", t->ne[0], " channels x ", t->ne[1], " heads x ", t->ne[2], " tokens x ",
                       t->ne[3], ", the cache has ", dim, " channels", heads == 0 ? "" : " and ",
                       heads == 0 ? 1 : heads, heads == 0 ? " at least" : " heads");
        const std::size_t bytes = ggml_type_size(t->type);
        detail::expect(t->nb[0] == bytes && t->nb[1] % bytes == 0 && t->nb[2] % bytes == 0, name,
                       " has strides of ", t->nb[0], ", ", t->nb[1], " and ", t->nb[2],
                       " bytes; channels lie side by side");
        constexpr std::int64_t most = 1 << 30;
        detail::expect(t->ne[1] <= most && t->ne[2] <= most, name, " has ", t->ne[1], " heads x ", t->ne[2],
                       " tokens");
    }

    template <class T>
    static token_view<T> view(const ggml_tensor* t) noexcept {
        return {static_cast<T*>(t->data),
                static_cast<int>(t->ne[2]),
                static_cast<int>(t->ne[1]),
                static_cast<int>(t->ne[0]),
                static_cast<std::ptrdiff_t>(t->nb[2] / sizeof(T)),
                static_cast<std::ptrdiff_t>(t->nb[1] / sizeof(T))};
    }
    template <class View>
    static View view_of(const ggml_tensor* t) noexcept {
        if (t->type == GGML_TYPE_F16) return view<const float16>(t);
        if (t->type == GGML_TYPE_BF16) return view<const bfloat16>(t);
        return view<const float>(t);
    }

    /// Null: none, of a layer that shares those of another one.
    static input_view rows_of(const ggml_tensor* t) noexcept {
        return t ? view_of<input_view>(t) : input_view(token_view<const float>(nullptr, 0, 0, 0));
    }

    /// Called by each of ggml's threads.
    static void run(ggml_tensor* out, int, int nth, void* of) {
        node& n = *static_cast<node*>(of);
        ggml_memory& memory = *n.memory;
        memory.team_.enter(nth, [&](executor_view threads) {
            memory.table_.prefill(n.layer, rows_of(out->src[1]), rows_of(out->src[2]),
                                  view_of<query_view>(out->src[0]), view<float>(out), n.mods, threads,
                                  memory.space_);
        });
    }

    static void run_recurrence(ggml_tensor* out, int, int nth, void* of) {
        node& n = *static_cast<node*>(of);
        const sequence_table& table = n.memory->table_;
        n.memory->team_.enter(nth, [&](executor_view threads) {
            detail::expect(table.step_tokens() == out->ne[1], "layer ", n.layer, " has ", out->ne[1],
                           " tokens, but the step has ", table.step_tokens(), " tokens");
            for (int i = 0; i < table.step_parts(); ++i) n.f(table.part_of_step(i), out, threads);
        });
    }

    sequence_table table_;
    workspace space_;
    team team_;
    std::deque<node> nodes_;  // [layers]; graphs point to them
};

}}  // namespace kvq
