// SPDX-License-Identifier: MIT
// The CUDA examples of docs/, as snippets.cpp.
#include <cstdio>
#include <kvq/cuda.cuh>
#include <kvq/cuda/host/prefixes.hpp>
#include <kvq/cuda/host/save.hpp>
#include <kvq/cuda/select/index_scores.cuh>
#include <kvq/cuda/select/select_top.cuh>
#include <kvq/policy/prefix_cache.hpp>
#include <kvq/policy/prefix_tiers.hpp>

void decode_step(const kvq::float16* new_k, const kvq::float16* new_v, const kvq::float16* new_q,
                 kvq::float16* to, int batch, int q_heads, int recent, void* workspace,
                 std::size_t workspace_bytes, cudaStream_t stream) {
    using namespace kvq;
    using quantized_format = cuda::kivi_pair<4, 64, /*head_dim*/ 128, /*page_tokens*/ 64>;
    using window_format = cuda::block_pair<full<float16>, full<float16>, 128, 64>;
    using sink_format = cuda::block_pair<full<float16>, full<float16>, 128, 16>;
    cuda::cache_ref<quantized_format> quantized = {};
    cuda::cache_ref<window_format> window = {};
    cuda::cache_ref<sink_format> sinks = {};
    const token_view<const float16> k(new_k, batch, 8, 128), v(new_v, batch, 8, 128),
        q(new_q, batch, q_heads, 128);
    const token_view<float16> out(to, batch, q_heads, 128);

    auto cache = cuda::make_mixed(recent, cuda::behind_window(quantized), cuda::in_window(window),
                                  cuda::sink_tokens(sinks, 4));
    auto s =
        cuda::commit_due_pages(quantized, window, recent, /*new_tokens*/ 1, /*not_finite*/ nullptr, stream);
    s = cuda::attend(cache, cuda::new_token_rows<float16>{k, v}, q, out,
                     {.softcap = 30.f, .query_tokens = 1, .early = true}, workspace, workspace_bytes, stream);
    if (!s) std::puts(s.message);
}

void attend(const kvq::float16* q, kvq::float16* out, float* lse, int batch, int q_heads, void* workspace,
            std::size_t workspace_bytes, cudaStream_t stream) {
    using quantized = kvq::cuda::kivi_pair<4, 64, /*head_dim*/ 128, /*page_tokens*/ 64>;
    kvq::cuda::cache_ref<quantized> cache = {};
    auto s = kvq::cuda::attend<quantized, kvq::float16>(
        cache, {q, batch, q_heads, 128}, {out, batch, q_heads, 128},
        {.softcap = 30.f, .window = 4096, .query_tokens = 1, .lse = lse}, workspace, workspace_bytes, stream);
    if (!s) std::puts(s.message);
}

float bytes_of_others(float key_scale, float value_scale) {
    using fp8 = kvq::rows_of<kvq::row_layout_number("fp8")>;
    kvq::cuda::cache_ref<kvq::cuda::strided_rows<kvq::cuda::block_pair<fp8, fp8, 128, 16>>> cache;
    cache.own_keys = {fp8(key_scale), {.token_bytes = 8 * 128, .head_bytes = 128}};  // vLLM, 8 heads
    cache.own_values.scheme = fp8(value_scale);
    return cache.own_keys.scheme.tensor_scale();
}

/// A template, so that these kernels are checked and not compiled: tests/gpu/cache.cu compiles such.
template <int = 0>
void owned_pages(const kvq::token_view<const kvq::float16>* k, const kvq::token_view<const kvq::float16>* v,
                 const kvq::token_view<const kvq::float16>* q, const kvq::token_view<kvq::float16>* out,
                 int n, cudaStream_t stream) {
    using namespace kvq;
    const cuda::device_format compiled[] = {
        cuda::make_device_format<float16, cuda::kivi_pair<4, 64, /*head_dim*/ 128, /*page_tokens*/ 64>>(),
        cuda::make_device_format<float16, cuda::preset_pair<std4, 128, 64>,
                                 cuda::preset_pair<low2, 128, 64>>()};
    cuda::cache cache;
    auto s = cache.open({.layers = 32, .kv_heads = 8, .head_dim = 128},
                        {.formats = {"kivi-4-g64"},
                         .page_tokens = 64,
                         .sinks = 4,
                         .recent = 128,
                         .max_batch = 64,
                         .max_tokens = 32768},
                        compiled, stream);
    cuda::sequence_id a = cache.new_sequence(), b;

    s = cache.begin_prompt(a, n, stream);
    for (int layer = 0; layer < 32; ++layer)
        s = cache.prefill(layer, k[layer], v[layer], q[layer], out[layer], {}, stream);
    s = cache.fork(a, b, stream);

    const cuda::sequence_id batch[] = {a, b};
    s = cache.begin_step(batch, /*new_tokens*/ 1, stream);
    for (int layer = 0; layer < 32; ++layer) {
        s = cache.attend(layer, k[layer], v[layer], q[layer], out[layer], {.early = true}, stream);
    }
    if (!s) std::puts(s.message);
}

template <int = 0>
void host_pages(kvq::cuda::cache& cache, kvq::cuda::sequence_id a, kvq::cuda::sequence_id b,
                kvq::token_ids tokens, kvq::token_ids prompt, cudaStream_t stream) {
    using namespace kvq;
    cuda::status s;
    s = cuda::save(cache, a, "chat.kvq", {.model = "my-model"}, stream);
    s = cuda::restore(cache, "chat.kvq", {.model = "my-model"}, b, stream);

    cuda::host_pages pages(cache, 8ull << 30);
    kvq::prefix_cache store(pages.cache());
    kvq::sequence held = pages.cache().new_sequence();
    s = cuda::offload(cache, a, held, stream);
    store.store(tokens, held);
    s = cuda::onload(store.fetch(prompt).sequence, cache, b, stream);
    if (!s) std::puts(s.message);
}

template <int = 0>
void prefixes(kvq::cuda::cache& cache, kvq::cuda::sequence_id a, kvq::cuda::sequence_id b,
              kvq::token_ids tokens, kvq::token_ids prompt, cudaStream_t stream) {
    using namespace kvq;
    cuda::status s;
    cuda::prefixes<kvq::prefix_tiers> store(
        cache,
        {.bytes = {.device = 4ull << 30, .host = 64ull << 30, .files = 1ull << 40}, .folder = "/var/tmp"});
    s = store.store(tokens, a, stream);
    cuda::found_prefix found;
    s = store.fetch(prompt, found, stream);  // found.id has the first found.tokens of the prompt
    s = store.park(tokens, b, stream);       // a request waits; later: fetch(tokens, found, stream)
    if (!s) std::puts(s.message);
}

void list_of_layers(kvq::cuda::cache& model, const kvq::cuda::cache_options& options,
                    std::span<const kvq::cuda::device_format> compiled, cudaStream_t stream) {
    kvq::cuda::status s;
    std::vector<kvq::layer> layers;
    for (int i = 0; i < 24; ++i)
        layers.push_back(i % 6 == 5 ? kvq::full_attention({.kv_heads = 4, .head_dim = 128})
                                    : kvq::sliding_attention(1024, {.kv_heads = 8, .head_dim = 128}));
    s = model.open(layers, options, compiled, stream);
    if (!s) std::puts(s.message);
}

kvq::cuda::status plans_of_keys(const kvq::cache_shape& shape,
                                std::span<const kvq::cuda::device_format> compiled, cudaStream_t stream) {
    using namespace kvq;
    cuda::status s;
    cuda::cache cache;
    s = cache.open(shape, {.formats = {"mix4"}}, compiled, stream);
    s = cache.open(shape, {.formats = {"mix4"}, .statistics = kvq::key_statistics::shared}, compiled, stream);
    s = cache.open(shape, {.formats = {"mix4"}, .statistics = kvq::key_statistics::off}, compiled, stream);
    return s;
}

void selected_pages(kvq::cuda::cache& cache, const kvq::cache_shape& shape,
                    std::span<const kvq::cuda::device_format> compiled, int layer, int next_layer,
                    const kvq::token_view<const kvq::float16>& k,
                    const kvq::token_view<const kvq::float16>& v,
                    const kvq::token_view<const kvq::float16>& q,
                    const kvq::token_view<const kvq::float16>& guess,
                    const kvq::token_view<kvq::float16>& out, cudaStream_t stream,
                    cudaStream_t other_stream) {
    using namespace kvq;
    cuda::status s;
    s = cache.attend(layer, k, v, q, out, {.selected_tokens = 4096}, stream);
    s = cache.open(shape,
                   {.formats = {"std4"},
                    .max_tokens = 1 << 20,
                    .listed_tokens = 4096,
                    .resident_tokens = 32768,
                    .pool_tokens = 1 << 20,
                    .pool_sequences = 1,
                    .growing = false},
                   compiled, stream);
    s = cache.attend(layer, k, v, q, out, {.selected_tokens = 4096}, stream);
    s = cache.fetch_ahead(next_layer, guess, 4096, other_stream);
    if (!s) std::puts(s.message);
}

void selected_tokens(kvq::cuda::cache& cache, int index, int layer,
                     const kvq::token_view<const kvq::float16>& index_k,
                     const kvq::token_view<const kvq::float16>& index_q, const float* weights, int* positions,
                     const kvq::token_view<const kvq::float16>& k,
                     const kvq::token_view<const kvq::float16>& v,
                     const kvq::token_view<const kvq::float16>& q, const kvq::token_view<kvq::float16>& out,
                     float scale, cudaStream_t stream) {
    using namespace kvq;
    cuda::status s;
    s = cache.append(index, index_k, kvq::no_rows(), stream);
    s = cache.select(index, index_q, weights, /*query_tokens*/ 1, /*count*/ 2048, positions, stream);
    s = cache.append(layer, k, v, stream);
    s = cache.attend_lists(layer, q, out, {.scale = scale, .selected = {positions, 2048}}, stream);
    if (!s) std::puts(s.message);
}

void recurrent_state(kvq::cuda::cache& cache, std::span<const kvq::cuda::sequence_id> batch, int layer, int n,
                     cudaStream_t stream) {
    using namespace kvq;
    cuda::status s;
    const cuda::sequence_id id = batch[0];
    s = cache.begin_step(batch, 1, stream);
    cuda::state_view view;
    s = cache.state(layer, /*part*/ 0, view);
    int from = cache.reach(id, n);
    s = cache.trim(id, n);
    if (!s) std::printf("%s: %d\n", s.message, from);
}

template <int = 0>
void drafted_trees(kvq::cuda::cache& cache, std::span<const kvq::cuda::sequence_id> batch,
                   const kvq::token_view<const kvq::float16>* k, const kvq::token_view<const kvq::float16>* v,
                   const kvq::token_view<const kvq::float16>* q, const kvq::token_view<kvq::float16>* out,
                   const std::uint64_t* words, std::span<const std::span<const int>> paths, int n,
                   cudaStream_t stream) {
    using namespace kvq;
    auto s = cache.begin_draft(batch, n, stream);
    for (int layer = 0; layer < 32; ++layer) {
        s = cache.append(layer, k[layer], v[layer], stream);
        s = cache.attend(layer, q[layer], out[layer], {.query_tokens = n, .ancestors = words}, stream);
    }
    s = cache.keep(batch, paths, stream);
    if (!s) std::puts(s.message);
}

template <int = 0>
void latents(int sequences, int q_heads, float scale, const kvq::token_view<const kvq::bfloat16>& q,
             const kvq::token_view<kvq::bfloat16>& out, void* workspace, cudaStream_t stream) {
    using namespace kvq;
    using quantized_format =
        cuda::latent_pair<std4::keys, /*latent*/ 512, /*rotary*/ 64, /*values*/ 512, /*page_tokens*/ 128>;
    using window_format = cuda::latent_pair<full<bfloat16>, 512, 64, 512, 128>;
    cuda::cache_ref<quantized_format> quantized = {};
    cuda::cache_ref<window_format> window = {};
    const auto pages =
        cuda::make_mixed(/*recent*/ 128, cuda::behind_window(quantized), cuda::in_window(window));

    const std::size_t bytes =
        cuda::latent_workspace_bytes<std::remove_const_t<decltype(pages)>, bfloat16>(sequences, q_heads);
    auto s = cuda::attend_latents<bfloat16>(pages, q, out, {.scale = scale}, workspace, bytes, stream);
    if (!s) std::puts(s.message);
}

template <class Pages>
void selected_tokens(const Pages& pages, const kvq::token_view<const kvq::bfloat16>& new_keys,
                     const kvq::token_view<const kvq::bfloat16>& no_values, const long long* mapping,
                     const kvq::token_view<const kvq::bfloat16>& index_q, const float* weights, float* scores,
                     int* positions, int sequences, float scale,
                     const kvq::token_view<const kvq::bfloat16>& q, const kvq::token_view<kvq::bfloat16>& out,
                     void* workspace, std::size_t workspace_bytes, cudaStream_t stream) {
    using namespace kvq;
    using index_format = cuda::index_pair</*channels*/ 128, /*page_tokens*/ 64>;
    cuda::cache_ref<index_format> index = {};
    auto s = cuda::store(index, new_keys, no_values, mapping, /*not_finite*/ nullptr, stream);
    s = cuda::index_scores(index, index_q, weights, /*query_tokens*/ 1, scores, stream);
    s = cuda::select_top({scores, index.tokens, sequences, 1, index.table_columns * 64}, /*count*/ 2048,
                         positions, workspace, workspace_bytes, stream);
    s = cuda::attend_latent_lists<bfloat16>(pages, q, out, {.scale = scale, .selected = {positions, 2048}},
                                            workspace, workspace_bytes, stream);
    if (!s) std::puts(s.message);
}
