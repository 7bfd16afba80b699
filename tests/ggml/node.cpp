// SPDX-License-Identifier: MIT
// Comparison family: exact, and ggml's own attention. Graphs of ggml whose attention is kvq's, on one thread
// and on several.
#include <doctest/doctest.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>

#include <algorithm>
#include <cmath>
#include <kvq/adapters/ggml.hpp>
#include <kvq/adapters/sequence_state.hpp>
#include <kvq/attention/score_modifiers.hpp>

#include "support/memory.hpp"
#include "support/messages.hpp"
#include "support/random.hpp"
#include "support/typed_cache.hpp"

namespace ggml_node_tests {

namespace {

constexpr int layers = 3, kv_heads = 2, q_heads = 6, dim = 32, value_dim = 48, ids = 4;
const kvq::cache_shape shape{layers, kv_heads, dim, value_dim};

kvq::cache_options options(bool quantized) {
    kvq::cache_options o;
    o.keys = {test::made<kvq::scalar>(kvq::full<kvq::float16>{})};
    if (quantized) {
        o.keys = {test::made<kvq::scalar>(kvq::std4::keys{})};
        o.values = {test::made<kvq::scalar>(kvq::std4::values{})};
    }
    o.page_tokens = 32;
    o.sinks = 4;
    o.recent = 16;
    o.rotary = {{.dims = dim}};
    return o;
}

/// A batch and what it points to.
struct held_batch {
    std::vector<std::int32_t> positions, counts;
    std::vector<std::vector<std::int32_t>> of;
    std::vector<const std::int32_t*> pointers{};

    void add(std::int32_t position, std::vector<std::int32_t> of_ids) {
        positions.push_back(position);
        counts.push_back(static_cast<std::int32_t>(of_ids.size()));
        of.push_back(std::move(of_ids));
    }
    int tokens() const { return static_cast<int>(positions.size()); }
    kvq::token_batch c() {
        pointers.clear();
        for (const auto& list : of) pointers.push_back(list.data());
        return {tokens(), positions.data(), counts.data(), pointers.data()};
    }
};

template <auto Free>
struct freed_by {
    template <class T>
    void operator()(T* p) const {
        Free(p);
    }
};

/// Half of the state, and the first channel of the queries.
void fold(const kvq::sequence_table::step_part& part, ggml_tensor* out, kvq::executor_view threads) {
    float& state = part.state->values<float>(0, 0)[1];
    threads.parallel_for(1, [&](int) {
        for (std::size_t i = 0; i < part.rows.size(); ++i) {
            const auto row = static_cast<std::size_t>(part.rows[i]);
            const auto* const x = static_cast<const std::byte*>(out->src[0]->data) + row * out->src[0]->nb[2];
            state = 0.5f * state + *reinterpret_cast<const float*>(x);
            if (part.wanted[i]) static_cast<float*>(out->data)[row] = state;
        }
    });
}

/// A graph with the attention of every layer. The queries of a layer are those of its input plus the output
/// of the layer before.
class graph {
public:
    graph(kvq::ggml_memory& memory, int tokens, int threads, ggml_type type, bool permuted,
          const kvq::mods_view& mods)
        : backend_(ggml_backend_cpu_init()),
          context_(ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true})) {
        ggml_backend_cpu_set_n_threads(backend_.get(), threads);
        ggml_context* const c = context_.get();
        const auto input = [&](int channels, int heads) {
            if (!permuted) return inputs_.emplace_back(ggml_new_tensor_3d(c, type, channels, heads, tokens));
            // Heads are the outermost dimension in memory.
            return ggml_permute(c, inputs_.emplace_back(ggml_new_tensor_3d(c, type, channels, tokens, heads)),
                                0, 2, 1, 3);
        };
        graph_ = ggml_new_graph(c);
        for (int layer = 0; layer < layers; ++layer) {
            ggml_tensor *q = input(dim, q_heads), *k = input(dim, kv_heads), *v = input(value_dim, kv_heads);
            const kvq::cache& of = memory.sequences().storage();
            if (of.owner(layer) != layer) k = v = nullptr;
            out_.push_back(of.layers()[static_cast<std::size_t>(layer)].parts.empty()
                               ? memory.attend(c, layer, q, k, v, mods)
                               : memory.recur(c, layer, std::span(&q, 1), 1, tokens, fold));
            ggml_build_forward_expand(graph_, out_.back());
        }
        memory_.reset(ggml_backend_alloc_ctx_tensors(c, backend_.get()));
        REQUIRE(memory_);
    }

    /// values: of q, k and v of every layer, in the order of memory.
    void run(const std::vector<std::vector<float>>& values) {
        for (std::size_t i = 0; i < inputs_.size(); ++i) {
            std::vector<std::byte> as(ggml_nbytes(inputs_[i]));
            ggml_quantize_chunk(inputs_[i]->type, values[i].data(), as.data(), 0, ggml_nrows(inputs_[i]),
                                inputs_[i]->ne[0], nullptr);
            if (inputs_[i]->type == GGML_TYPE_F32) std::memcpy(as.data(), values[i].data(), as.size());
            ggml_backend_tensor_set(inputs_[i], as.data(), 0, as.size());
        }
        REQUIRE(ggml_backend_graph_compute(backend_.get(), graph_) == GGML_STATUS_SUCCESS);
    }
    std::vector<float> output(int layer) const {
        const ggml_tensor* const t = out_[static_cast<std::size_t>(layer)];
        std::vector<float> x(static_cast<std::size_t>(ggml_nelements(t)));
        ggml_backend_tensor_get(t, x.data(), 0, ggml_nbytes(t));
        return x;
    }

private:
    std::unique_ptr<ggml_backend, freed_by<ggml_backend_free>> backend_;
    std::unique_ptr<ggml_context, freed_by<ggml_free>> context_;
    std::unique_ptr<ggml_backend_buffer, freed_by<ggml_backend_buffer_free>> memory_;
    ggml_cgraph* graph_ = nullptr;
    std::vector<ggml_tensor*> inputs_, out_;
};

/// Values of the inputs of a graph.
std::vector<std::vector<float>> inputs(test::generator& random, int tokens) {
    std::vector<std::vector<float>> all;
    for (int layer = 0; layer < layers; ++layer)
        for (const int row : {dim * q_heads, dim * kv_heads, value_dim * kv_heads})
            all.push_back(random.normals(static_cast<std::size_t>(row * tokens)));
    return all;
}

/// The same in the type of a tensor, as float.
std::vector<float> rounded(std::vector<float> x, ggml_type type) {
    for (float& f : x)
        f = type == GGML_TYPE_F16    ? static_cast<float>(kvq::float16(f))
            : type == GGML_TYPE_BF16 ? static_cast<float>(kvq::bfloat16(f))
                                     : f;
    return x;
}
kvq::token_view<float> view(std::vector<float>& x, int tokens, int heads, int channels, bool permuted) {
    return permuted ? kvq::token_view<float>(x.data(), tokens, heads, channels, channels, channels * tokens)
                    : kvq::token_view<float>(x.data(), tokens, heads, channels);
}

held_batch draw(test::generator& random, const kvq::sequence_table& table) {
    held_batch b;
    std::vector<std::int32_t> next;
    for (int id = 0; id < ids; ++id) next.push_back(table.position_max(id) + 1);
    const int n = random.one_in(2) ? random.between(1, 6) : random.between(30, 80),
              kind = random.between(0, 2);
    for (int i = 0; i < n; ++i) {
        std::vector<std::int32_t> of = {kind == 0 ? 1 : kind == 1 ? i % ids : random.between(0, ids - 1)};
        if (kind == 2 && random.one_in(3)) of.push_back((of[0] + 1) % ids);
        std::int32_t position = 0;
        for (const int id : of) position = std::max(position, next[static_cast<std::size_t>(id)]);
        for (const int id : of) next[static_cast<std::size_t>(id)] = position + 1;
        b.add(position, of);
    }
    return b;
}

}  // namespace

TEST_CASE("graphs give the bits of cache::prefill, on any number of threads") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::mods capped{kvq::softcap{3.0f}, kvq::score_scale{0.2f}};
    for (const bool quantized : {false, true})
        for (const int threads : {1, 2, 3}) {
            kvq::cache cache(shape, options(quantized)), same_cache(shape, options(quantized));
            kvq::ggml_memory memory(cache, ids);
            kvq::sequence_table direct(same_cache, ids);
            kvq::workspace space;
            for (int step = 0; step < 14; ++step) {
                held_batch b = draw(random, direct);
                const int n = b.tokens();
                const ggml_type type = random.pick(std::vector{GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16});
                const bool permuted = random.one_in(3);
                const kvq::causal plain{};
                const kvq::mods_view mods = random.one_in(3) ? kvq::mods_view(capped) : kvq::mods_view(plain);
                graph g(memory, n, threads, type, permuted, mods);
                for (int again = 0; again < (step % 4 == 0 ? 2 : 1); ++again) {  // a graph that is used again
                    if (again > 0) {
                        const std::int32_t behind =
                            *std::max_element(b.positions.begin(), b.positions.end()) + 1;
                        for (std::int32_t& p : b.positions) p += behind;
                    }
                    const auto values = inputs(random, n);
                    memory.begin(b.c(), q_heads, threads);
                    g.run(values);
                    memory.end();
                    direct.begin(b.c(), q_heads, 1, space);
                    for (int layer = 0; layer < layers; ++layer) {
                        std::vector<float> of[3];
                        for (int i = 0; i < 3; ++i)
                            of[i] = rounded(values[static_cast<std::size_t>(3 * layer + i)], type);
                        std::vector<float> out(static_cast<std::size_t>(n * q_heads * value_dim));
                        direct.prefill(layer, view(of[1], n, kv_heads, dim, permuted),
                                       view(of[2], n, kv_heads, value_dim, permuted),
                                       view(of[0], n, q_heads, dim, permuted),
                                       view(out, n, q_heads, value_dim, false), mods, kvq::serial_executor{},
                                       space);
                        REQUIRE(g.output(layer) == out);
                    }
                    direct.end();
                }
                const int id = random.between(0, ids - 1), end = direct.position_max(id) + 1;
                for (kvq::sequence_table* table : {&memory.sequences(), &direct}) {
                    if (step % 3 == 0) table->remove(id, end / 3, end / 2);
                    if (step % 3 == 1) table->copy(id, (id + 1) % ids, end, -1);
                    if (step % 5 == 4) {
                        table->remove((id + 1) % ids, -1, -1);
                        table->copy(id, (id + 1) % ids, -1, -1);
                    }
                }
            }
            CHECK(memory.bytes() > 0);
        }
}

TEST_CASE(
    "layers with a window, with recurrent state, and that share keys, beside sequences that are driven "
    "directly") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::layer heads{.kv_heads = kv_heads, .head_dim = dim, .value_dim = value_dim};
    std::vector<kvq::layer> list{kvq::state_layer({{.name = "s", .columns = 3}}),
                                 kvq::sliding_attention(20, heads), kvq::full_attention(heads)};
    kvq::cache_options o = options(true);
    o.rotary.clear();  // of one layer each, or of all
    const kvq::causal mask{};
    for (const int threads : {1, 3}) {
        if (threads == 3) list.back() = kvq::shared_with(1);
        kvq::cache cache(list, o), same_cache(list, o);
        kvq::ggml_memory memory(cache, 2);
        kvq::sequence one = same_cache.new_sequence();
        float state = 0.0f;
        for (int step = 0; step < 12; ++step) {
            // Id 1 gets as many tokens in between.
            const int n = random.one_in(2) ? random.between(1, 4) : random.between(20, 50),
                      before = one.tokens();
            held_batch b;
            for (int i = 0; i < 2 * n; ++i) b.add(before + i / 2, {i % 2});
            graph g(memory, 2 * n, threads, GGML_TYPE_F32, false, mask);
            const auto values = inputs(random, 2 * n);
            memory.begin(b.c(), q_heads, threads);
            g.run(values);
            memory.end(true);
            const std::vector<float> folded = g.output(0);
            for (int i = 0; i < n; ++i) {
                state = 0.5f * state + values[0][static_cast<std::size_t>(2 * i * dim * q_heads)];
                REQUIRE(folded[static_cast<std::size_t>(2 * i)] == state);
            }
            one.state().advance(n, true);
            for (int layer = 1; layer < layers; ++layer) {
                const auto rows = [&](int of, int count, int channels) {
                    std::vector<float> x;
                    const std::vector<float>& all = values[static_cast<std::size_t>(3 * layer + of)];
                    const std::ptrdiff_t row = std::ptrdiff_t{count} * channels;
                    for (int i = 0; i < n; ++i)
                        x.insert(x.end(), all.begin() + 2 * i * row, all.begin() + (2 * i + 1) * row);
                    return x;
                };
                std::vector<float> q = rows(0, q_heads, dim), k = rows(1, kv_heads, dim),
                                   v = rows(2, kv_heads, value_dim),
                                   out(static_cast<std::size_t>(n * q_heads * value_dim));
                const int added = cache.owner(layer) == layer ? n : 0;
                one.prefill(layer, view(k, added, kv_heads, dim, false),
                            view(v, added, kv_heads, value_dim, false), view(q, n, q_heads, dim, false),
                            view(out, n, q_heads, value_dim, false));
                const std::vector<float> got = g.output(layer);
                for (int i = 0; i < n; ++i)
                    for (int c = 0; c < q_heads * value_dim; ++c)
                        REQUIRE(got[static_cast<std::size_t>(2 * i * q_heads * value_dim + c)] ==
                                out[static_cast<std::size_t>(i * q_heads * value_dim + c)]);
            }
        }
        CHECK(memory.sequences().find(0)->pages(1).at(1).first_token > 32);  // the window has freed pages
        ggml_context* const c = ggml_init({1 << 20, nullptr, true});
        ggml_tensor* const x = ggml_new_tensor_3d(c, GGML_TYPE_F32, dim, q_heads, 1);
        CHECK(test::contains(test::message_of([&] { memory.attend(c, 0, x, x, x); }),
                             "layer 0, state of 1 parts: its node is recur(), not attend()"));
        CHECK(test::contains(test::message_of([&] { memory.recur(c, 1, {}, 1, 1, fold); }),
                             "its node is attend(), not recur()"));
        ggml_free(c);
    }
}

TEST_CASE("beside ggml's own attention") {
    test::generator random(7);
    constexpr int n = 300, last = 40;
    const kvq::causal mask{};
    kvq::cache cache(shape, options(false));
    kvq::ggml_memory memory(cache, 1);
    held_batch first, second;
    for (int i = 0; i < n - last; ++i) first.add(i, {0});
    for (int i = n - last; i < n; ++i) second.add(i, {0});
    std::vector<float> k, v;  // of layer 0
    std::vector<std::vector<float>> values;
    std::vector<float> out;
    for (held_batch* b : {&first, &second}) {
        graph g(memory, b->tokens(), 2, GGML_TYPE_F32, false, mask);
        values = inputs(random, b->tokens());
        k.insert(k.end(), values[1].begin(), values[1].end());
        v.insert(v.end(), values[2].begin(), values[2].end());
        memory.begin(b->c(), q_heads, 2);
        g.run(values);
        memory.end();
        out = g.output(0);
    }
    // softmax(q k^T / sqrt(dim)) v of matrices in float.
    ggml_context* const c = ggml_init({std::size_t{64} << 20, nullptr, false});
    ggml_tensor *tq = ggml_new_tensor_3d(c, GGML_TYPE_F32, dim, q_heads, last),
                *tk = ggml_new_tensor_3d(c, GGML_TYPE_F32, dim, kv_heads, n),
                *tv = ggml_new_tensor_3d(c, GGML_TYPE_F32, value_dim, kv_heads, n),
                *seen = ggml_new_tensor_2d(c, GGML_TYPE_F32, n, last);
    std::copy(values[0].begin(), values[0].end(), static_cast<float*>(tq->data));
    std::copy(k.begin(), k.end(), static_cast<float*>(tk->data));
    std::copy(v.begin(), v.end(), static_cast<float*>(tv->data));
    for (int i = 0; i < last; ++i)
        for (int t = 0; t < n; ++t)
            static_cast<float*>(seen->data)[i * n + t] = t <= n - last + i ? 0.0f : -INFINITY;
    ggml_tensor* const scores =
        ggml_mul_mat(c, ggml_permute(c, tk, 0, 2, 1, 3), ggml_permute(c, tq, 0, 2, 1, 3));
    ggml_tensor* const weights = ggml_soft_max_ext(c, scores, seen, 1.0f / std::sqrt(float{dim}), 0.0f);
    ggml_tensor* const turned = ggml_cont(c, ggml_permute(c, tv, 1, 2, 0, 3));
    ggml_tensor* const expected = ggml_cont(c, ggml_permute(c, ggml_mul_mat(c, turned, weights), 0, 2, 1, 3));
    ggml_cgraph* const g = ggml_new_graph(c);
    ggml_build_forward_expand(g, expected);
    REQUIRE(ggml_graph_compute_with_ctx(c, g, 1) == GGML_STATUS_SUCCESS);
    double off = 0.0, size = 0.0;
    for (std::size_t i = 0; i < out.size(); ++i) {
        const double x = static_cast<double>(static_cast<const float*>(expected->data)[i]);
        off += std::pow(static_cast<double>(out[i]) - x, 2.0);
        size += x * x;
    }
    CHECK(std::sqrt(off / size) < 1e-3);  // keys and values are 16 bit in one of the two
    CHECK(std::sqrt(off / size) > 0.0);
    ggml_free(c);
}

TEST_CASE("errors do not cross ggml") {
    test::generator random(3);
    test::counting_resource resource;
    kvq::cache_options o = options(true);
    o.memory = &resource;
    kvq::cache cache(shape, o);
    kvq::ggml_memory memory(cache, ids);
    const kvq::causal mask{};
    held_batch b;
    for (int i = 0; i < 50; ++i) b.add(i, {i % 2});
    graph g(memory, 50, 2, GGML_TYPE_F32, false, mask), longer(memory, 51, 2, GGML_TYPE_F32, false, mask);
    // Without a step.
    g.run(inputs(random, 50));
    CHECK(memory.failed());
    CHECK(test::contains(test::message_of([&] { memory.end(); }), "but the step has 0 tokens"));
    CHECK_FALSE(memory.failed());
    // With another number of tokens. The next step forgets the error.
    memory.begin(b.c(), q_heads, 2);
    longer.run(inputs(random, 51));
    CHECK(test::contains(test::message_of([&] { memory.end(); }),
                         "layer 0 has 51 keys, 51 values, 51 queries and 51 outputs"));
    CHECK(memory.sequences().tokens(0) == 0);
    memory.begin(b.c(), q_heads, 2);
    longer.run(inputs(random, 51));
    memory.begin(b.c(), q_heads, 2);
    // The step takes no memory while the graph runs.
    resource.fail_every(1);
    g.run(inputs(random, 50));
    resource.fail_every(0);
    memory.end();
    CHECK(memory.sequences().tokens(1) == 25);
    // A graph that does not run.
    for (int i = 0; i < 50; ++i) b.positions[static_cast<std::size_t>(i)] += 50;
    memory.begin(b.c(), q_heads, 2);
    CHECK(memory.sequences().tokens(1) == 50);
    CHECK(test::contains(test::message_of([&] { memory.end(); }), "before layer 0 had its tokens"));
    CHECK(memory.sequences().tokens(1) == 25);
    // No memory when the step begins.
    resource.fail_every(1);
    CHECK_THROWS_AS(memory.begin(b.c(), q_heads, 2), std::bad_alloc);
    resource.fail_every(0);
    CHECK(memory.sequences().tokens(1) == 25);

    ggml_context* const c = ggml_init({1 << 20, nullptr, true});
    const auto tensor = [&](ggml_type type, int channels, int heads, int tokens) {
        return ggml_new_tensor_3d(c, type, channels, heads, tokens);
    };
    ggml_tensor *q = tensor(GGML_TYPE_F32, dim, q_heads, 5), *k = tensor(GGML_TYPE_F32, dim, kv_heads, 5),
                *v = tensor(GGML_TYPE_F32, value_dim, kv_heads, 5);
    const auto refused = [&](ggml_tensor* a, ggml_tensor* x, ggml_tensor* y, int layer, const char* part) {
        const std::string text = test::message_of([&] { memory.attend(c, layer, a, x, y); });
        INFO(text);
        CHECK(test::contains(text, part));
    };
    refused(q, k, v, 3, "layer 3 is not among the 3");
    refused(nullptr, k, v, 0, "q is null");
    refused(tensor(GGML_TYPE_Q8_0, dim, q_heads, 5), k, v, 0, "q is q8_0, none of f32, f16 and bf16");
    refused(tensor(GGML_TYPE_F32, dim, 5, 5), k, v, 0, "q has 5 heads, not a multiple of the 2 kv heads");
    refused(q, tensor(GGML_TYPE_F32, dim, 3, 5), v, 0, "k is 32 channels x 3 heads x 5 tokens");
    refused(q, k, k, 0, "v is 32 channels x 2 heads x 5 tokens x 1, the cache has 48 channels and 2 heads");
    refused(q, tensor(GGML_TYPE_F32, dim, kv_heads, 4), v, 0, "q has 5 tokens, k 4 and v 5");
    refused(ggml_permute(c, tensor(GGML_TYPE_F32, q_heads, dim, 5), 1, 0, 2, 3), k, v, 0,
            "channels lie side by side");
    CHECK(memory.attend(c, 2, q, k, v)->ne[0] == value_dim);
    ggml_free(c);
}

}  // namespace ggml_node_tests
