// Attention of ggml on a kvq cache: two answers to one prompt, a context that is shifted, a state that is
// saved.
//
// Random tensors stand for those of a model: a graph has an input for q, k and v of each layer, and the node
// that attends.
#include <ggml-backend.h>
#include <ggml-cpu.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <kvq/adapters/ggml.hpp>
#include <kvq/adapters/sequence_state.hpp>
#include <kvq/cache/preset_options.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/presets.hpp>
#include <random>
#include <vector>

constexpr int layers = 2, kv_heads = 2, q_heads = 8, dim = 64, threads = 2;

// Tokens of one step: consecutive positions, each of them in all of these sequences.
void step(kvq::ggml_memory& memory, ggml_backend_t backend, int tokens, std::vector<std::int32_t> ids) {
    static std::mt19937 random(1);
    std::normal_distribution<float> normal;
    ggml_context* const context =
        ggml_init({32 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
    std::vector<ggml_tensor*> inputs;
    ggml_cgraph* const graph = ggml_new_graph(context);
    for (int layer = 0; layer < layers; ++layer) {
        ggml_tensor* const q = ggml_new_tensor_3d(context, GGML_TYPE_F32, dim, q_heads, tokens);
        ggml_tensor* const k = ggml_new_tensor_3d(context, GGML_TYPE_F32, dim, kv_heads, tokens);
        ggml_tensor* const v = ggml_new_tensor_3d(context, GGML_TYPE_F32, dim, kv_heads, tokens);
        inputs.insert(inputs.end(), {q, k, v});
        ggml_build_forward_expand(graph, memory.attend(context, layer, q, k, v));
    }
    ggml_backend_buffer_t const buffer = ggml_backend_alloc_ctx_tensors(context, backend);
    for (ggml_tensor* const input : inputs) {
        std::vector<float> x(static_cast<std::size_t>(ggml_nelements(input)));
        for (float& f : x) f = normal(random);
        ggml_backend_tensor_set(input, x.data(), 0, ggml_nbytes(input));
    }

    const int first = memory.sequences().position_max(ids[0]) + 1, count = static_cast<int>(ids.size());
    std::vector<std::int32_t> positions, counts(static_cast<std::size_t>(tokens), count);
    for (int i = 0; i < tokens; ++i) positions.push_back(first + i);
    const std::vector<const std::int32_t*> all(static_cast<std::size_t>(tokens), ids.data());
    memory.begin({tokens, positions.data(), counts.data(), all.data()}, q_heads, threads);
    ggml_backend_graph_compute(backend, graph);
    memory.end();

    ggml_backend_buffer_free(buffer);
    ggml_free(context);
}

int main() {
    kvq::cache_options options = kvq::preset_options();
    options.keys = {kvq::make_format<kvq::std4::keys>()};
    options.values = {kvq::make_format<kvq::std4::values>()};
    options.rotary = {{.dims = dim, .layout = kvq::rotary_layout::interleaved}};
    kvq::cache cache({.layers = layers, .kv_heads = kv_heads, .head_dim = dim}, options);
    kvq::ggml_memory memory(cache, 4);
    kvq::sequence_table& sequences = memory.sequences();
    ggml_backend_t const backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, threads);

    step(memory, backend, 700, {0, 1});  // a prompt of two sequences is stored once
    for (int i = 0; i < 20; ++i) {
        step(memory, backend, 1, {0});
        step(memory, backend, 1, {1});
    }
    std::printf("%d + %d tokens in %zu bytes\n", sequences.tokens(0), sequences.tokens(1), memory.bytes());

    // The context is full: tokens 100 to 399 go, those behind them move to the front.
    sequences.remove(0, 100, 400);
    sequences.shift(0, 400, -1, -300);
    step(memory, backend, 1, {0});
    // Another answer from position 600 on.
    sequences.copy(1, 2, -1, 600);
    step(memory, backend, 3, {2});
    for (int id = 0; id < 4; ++id)
        std::printf("sequence %d: positions %d to %d\n", id, sequences.position_min(id),
                    sequences.position_max(id));

    std::vector<std::byte> state;
    kvq::write_state(
        sequences,
        [&](const void* data, std::size_t bytes) {
            const auto* const from = static_cast<const std::byte*>(data);
            state.insert(state.end(), from, from + bytes);
        },
        2);
    std::size_t at = 0;
    kvq::read_state(
        sequences,
        [&](void* to, std::size_t bytes) {
            bytes = std::min(bytes, state.size() - at);
            std::memcpy(to, state.data() + at, bytes);
            at += bytes;
            return bytes;
        },
        3);
    step(memory, backend, 1, {3});

    try {
        sequences.divide(0, 0, -1, 2);
    } catch (const kvq::error& e) {
        std::printf("refused: %s\n", e.what());
    }
    ggml_backend_free(backend);
}
