// SPDX-License-Identifier: MIT
// The C++ examples of README.md and docs/, each in the surroundings that it supposes. Compiled; check.py sees
// to it that none is missing or differs.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <kvq/adapters/distributed/context_parallel.hpp>
#include <kvq/adapters/distributed/head_parallel.hpp>
#include <kvq/adapters/distributed/send_sequence.hpp>
#include <kvq/adapters/eigen.hpp>
#include <kvq/adapters/paged.hpp>
#include <kvq/adapters/sequence_state.hpp>
#include <kvq/core/team.hpp>
#include <kvq/core/thread_pool.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/format/find_format.hpp>
#include <kvq/io/file.hpp>
#include <kvq/io/page_transfer.hpp>
#include <kvq/kvq.hpp>
#include <kvq/policy/kept_tokens.hpp>
#include <kvq/policy/prefix_cache.hpp>
#include <kvq/policy/prefix_tiers.hpp>
#include <kvq/policy/ring.hpp>
#include <kvq/policy/self_calibration.hpp>
#include <string>
#include <vector>

namespace {

using tokens_in = kvq::token_view<const float>;
using tokens_out = kvq::token_view<float>;
using numbers = std::vector<std::int32_t>;

namespace dropped {

void half(kvq::sequence& sequence, int layers, tokens_in k, tokens_in v, tokens_in q, tokens_out out,
          tokens_in last_queries) {
    sequence.hold();  // the prompt stays in 16 bit
    for (int i = 0; i < layers; ++i) sequence.prefill(i, k, v, q, out);
    for (int i = 0; i < layers; ++i) {
        const auto scores = kvq::snapkv_scores(sequence, i, last_queries);
        const int count = sequence.tokens(i) / 2;
        sequence.retain(i, kvq::best_tokens(sequence, i, scores, count, last_queries.tokens), count);
    }
}

}  // namespace dropped

namespace latent {

void selects(kvq::sequence& sequence, tokens_in index_k, tokens_in index_q, const float* weights, int count,
             tokens_in k, tokens_in q, tokens_out out, kvq::score_scale scale, kvq::thread_pool& threads,
             kvq::workspace& space) {
    std::vector<kvq::layer> layers{kvq::latent_attention(512, 64), kvq::index_layer(128)};
    layers[1].formats.key = 1;
    kvq::cache_options options{.keys = {kvq::find_format("std4-fp16x64", kvq::tensor::key),
                                        kvq::find_format("int8", kvq::tensor::key)}};
    kvq::cache cache(layers, options);

    sequence.append(1, index_k, kvq::no_rows());
    std::vector<std::int32_t> best(static_cast<std::size_t>(index_q.tokens * count));
    sequence.select(1, index_q, weights, count, best.data(), threads, space);
    const kvq::listed_tokens lists{.selected = {best.data(), count}, .queries = index_q.tokens};
    sequence.prefill(0, k, kvq::no_rows(), q, out, kvq::mods{lists, scale}, threads, space);
}

}  // namespace latent

namespace readme {

void first(int layer, tokens_in k, tokens_in v, tokens_in q, tokens_out out, int n_tokens) {
    kvq::cache cache({.layers = 32, .kv_heads = 8, .head_dim = 128}, kvq::preset("std4"));
    auto sequence = cache.new_sequence();
    sequence.prefill(layer, k, v, q, out);
    sequence.trim(n_tokens);
    auto other = sequence.fork();
}

using my_keys = kvq::scheme<kvq::bits<3>, kvq::asymmetric, kvq::per_channel<32>, kvq::params<kvq::bfloat16>>;
static_assert(kvq::key_scheme<my_keys>);

void preset(kvq::cache_shape shape, int layer, tokens_in k, tokens_in q) {
    kvq::calibration statistics(shape, true);
    statistics.add_keys(layer, k);
    statistics.add_queries(layer, q);
    auto options = kvq::preset_options(kvq::make_formats<kvq::low2>());
    options.keys = kvq::make_format<kvq::simd<>>(kvq::low2::keys(statistics));
    kvq::cache cache(shape, options);
}

void by_name(kvq::cache_shape shape, const std::string& name) {
    kvq::cache cache(shape, kvq::preset("std4"));
    kvq::cache other(shape, {.keys = kvq::find_format("kivi-2-g64", kvq::tensor::key),
                             .values = kvq::find_format(name, kvq::tensor::value),
                             .sinks = 4,
                             .recent = 32});
}

}  // namespace readme

namespace scale {

void heads(std::vector<int> weights, std::size_t rank, int layers, int kv_heads, int head_dim,
           kvq::cache_options options) {
    const auto heads = kvq::split(kv_heads, weights);
    kvq::cache cache({.layers = layers, .kv_heads = heads[rank].size(), .head_dim = head_dim}, options);
}

template <kvq::transport Transport>
void context(kvq::message_channel<Transport>& channel, kvq::cache& cache, std::vector<int> weights, int n,
             int layers, tokens_in k, tokens_in v, tokens_in q, tokens_out out) {
    kvq::context_split split({.sinks = 4, .recent = 32, .page_tokens = 128}, weights);
    auto sequence = cache.new_sequence();
    kvq::context_parallel group(channel, split, sequence);
    group.begin(n);
    for (int layer = 0; layer < layers; ++layer) group.step(layer, k, v, q, out);
}

template <kvq::transport Transport>
void send(kvq::message_channel<Transport>& channel, int to, kvq::cache& cache, kvq::sequence& sequence,
          int layers, tokens_in k, tokens_in v, tokens_in q, tokens_out out) {
    kvq::sequence_sender sender(channel, to, cache);
    for (int layer = 0; layer < layers; ++layer) {
        sequence.prefill(layer, k, v, q, out);
        sender.send_layer(sequence, layer);
    }
    sender.finish(sequence);
}

template <kvq::transport Transport>
void receive(kvq::message_channel<Transport>& channel, int from, kvq::cache& cache, std::string key_format,
             std::string value_format) {
    kvq::sequence_receiver receiver(channel, from, cache, {.key = key_format, .value = value_format});
    auto [sequence, report] = receiver.receive();
}

/// A transport of one rank, so that the templates above are instantiated.
struct alone {
    int rank() const { return 0; }
    int ranks() const { return 1; }
    void send(int, std::vector<std::byte>) {}
    std::vector<std::byte> receive(int) { return {}; }
    void progress() {}
    void flush() {}
};
template void context(kvq::message_channel<alone>&, kvq::cache&, std::vector<int>, int, int, tokens_in,
                      tokens_in, tokens_in, tokens_out);
template void send(kvq::message_channel<alone>&, int, kvq::cache&, kvq::sequence&, int, tokens_in, tokens_in,
                   tokens_in, tokens_out);
template void receive(kvq::message_channel<alone>&, int, kvq::cache&, std::string, std::string);

void tiers(kvq::cache& cache, std::size_t memory_bytes, std::size_t file_bytes, std::string folder,
           numbers prompt, numbers all_tokens) {
    kvq::prefix_tiers store(
        cache, {.memory = {.byte_limit = memory_bytes}, .folder = folder, .file_bytes = file_bytes});
    auto [match, tokens, sequence, tier] = store.fetch(prompt);
    store.store(all_tokens, sequence);
}

}  // namespace scale

namespace adapters {

void vllm(kvq::sequence& sequence, kvq::float16* memory, std::size_t size, int layer, int blocks,
          int block_size, int heads, int dim, int tokens, int first, numbers block_table,
          std::vector<std::int64_t> slot_mapping) {
    const auto keys = kvq::paged_nhd(memory, blocks, block_size, heads, dim);
    const auto values = kvq::paged_nhd(memory + size / 2, blocks, block_size, heads, dim);
    kvq::append_from_blocks(sequence, layer, keys, values, std::span(block_table), tokens);
    kvq::write_slots(sequence, layer, first, std::span(slot_mapping), keys, values);
}

void nano_vllm(kvq::float16* memory, int layer, int layers, int blocks, int block_size, int heads, int dim) {
    const std::size_t one_layer = static_cast<std::size_t>(blocks) * block_size * heads * dim;
    const auto keys = kvq::paged_nhd(memory + layer * one_layer, blocks, block_size, heads, dim);
    const auto values = kvq::paged_nhd(memory + (layers + layer) * one_layer, blocks, block_size, heads, dim);
}

void flashinfer(kvq::sequence& sequence, int layer, kvq::bfloat16* memory, int pages, int page_size,
                int heads, int dim, numbers indptr, numbers indices, numbers last_page_len, std::size_t r) {
    auto keys = kvq::paged_hnd(memory, pages, page_size, heads, dim), values = keys;
    keys.block_stride = values.block_stride = 2 * page_size * heads * dim;
    values.data += page_size * heads * dim;
    const auto table = std::span(indices).subspan(indptr[r], indptr[r + 1] - indptr[r]);
    kvq::append_from_blocks(sequence, layer, keys, values, table,
                            (static_cast<int>(table.size()) - 1) * page_size + last_page_len[r]);
}

void llama_cpp(kvq::sequence& sequence, int layer, const kvq::float16* k, const kvq::float16* v, int cells,
               int heads, int dim, numbers cells_of_sequence, int tokens) {
    kvq::append_from_blocks(sequence, layer, kvq::paged_nhd(k, cells, 1, heads, dim),
                            kvq::paged_nhd(v, cells, 1, heads, dim), std::span(cells_of_sequence), tokens);
}

kvq::format own_transform() {
    struct reversed {
        std::string name() const { return "reversed"; }
        std::uint64_t fingerprint() const { return 0; }
        void forward(int dim, kvq::block_id, float* x) const { std::reverse(x, x + dim); }
        void backward(int dim, kvq::block_id, float* x) const { std::reverse(x, x + dim); }
    };
    using keys = kvq::transformed<reversed, kvq::affine<4, kvq::per_channel<64>>>;
    return kvq::make_format<keys, kvq::scalar>();
}

void mlx(kvq::sequence& sequence, int layer, const kvq::float16* k, const kvq::float16* v, int tokens,
         int heads, int dim, int capacity) {
    const kvq::token_view<const kvq::float16> held(k, tokens, heads, dim, dim, capacity * dim);
    sequence.append(layer, held, {v, tokens, heads, dim, dim, capacity * dim});
}

void eigen(kvq::sequence& sequence, int layer, int heads, int q_heads, const Eigen::MatrixXf& k,
           const Eigen::MatrixXf& v, const Eigen::MatrixXf& q, Eigen::MatrixXf& out,
           Eigen::Matrix<Eigen::half, -1, -1>& half_matrix) {
    sequence.prefill(layer, kvq::tokens_of(k, heads), kvq::tokens_of(v, heads), kvq::tokens_of(q, q_heads),
                     kvq::tokens_of(out, q_heads));
    sequence.dequantize(layer, kvq::tensor::key, 0, kvq::tokens_of(half_matrix, heads));
}

void state(int layer, int n, bool prompt_ends, void (*step)(std::span<float>, std::span<kvq::bfloat16>)) {
    std::vector<kvq::layer> model;
    for (int i = 0; i < 64; ++i)
        model.push_back(
            i % 4 == 3
                ? kvq::full_attention({.kv_heads = 4, .head_dim = 256})
                : kvq::state_layer(
                      {{.name = "recurrent",
                        .heads = 48,
                        .rows = 128,
                        .columns = 128,
                        .snapshot = kvq::snapshot_type::int8_columns},
                       {.name = "convolution", .type = kvq::float_type::bf16, .rows = 10240, .columns = 3}}));
    auto options = kvq::preset("std4");
    options.snapshots = {.every = 1024, .most_bytes = std::size_t{1} << 30};
    kvq::cache cache(model, options);
    auto sequence = cache.new_sequence();
    auto& state = sequence.state();
    step(state.values<float>(layer, 0), state.values<kvq::bfloat16>(layer, 1));
    state.advance(n, prompt_ends);
    const int again = sequence.trim(900);
}
void layers_that_differ() {
    std::vector<kvq::layer> model;
    for (int i = 0; i < 60; ++i)
        model.push_back(i % 6 == 5 ? kvq::full_attention({.kv_heads = 4, .head_dim = 512})
                                   : kvq::sliding_attention(1024, {.kv_heads = 16, .head_dim = 256}));
    kvq::cache cache(model, kvq::preset("std4"));
}
void ring(kvq::cache& cache, int layer, tokens_in k, tokens_in v, tokens_in q, tokens_out out, int n) {
    kvq::ring ring(cache.new_sequence(), {.window = 4096, .slack = 16});
    ring.prefill(layer, k, v, q, out);
    ring.trim(n);
}
void ring_goes_on(kvq::cache& cache, kvq::ring& ring, const std::string& path, std::int64_t first_token) {
    auto draft = ring.fork();
    cache.requantize(ring.held(), {.key = 0, .value = 0});
    kvq::save(ring.held(), path);
    kvq::ring again(kvq::restore(cache, path), ring.options(), first_token);
}

struct request {
    kvq::sequence sequence;
    tokens_in k, v, q;
    tokens_out out;
};
std::vector<std::size_t> continuous(kvq::cache& cache, int layer, int tokens, std::span<request> running,
                                    kvq::workspace& workspace, kvq::thread_pool& threads) {
    std::vector<kvq::prefill_request> batch;
    for (request& r : running) batch.push_back({&r.sequence, r.k, r.v, r.q, r.out});
    cache.prefill(layer, batch, kvq::causal{}, threads, workspace);

    std::vector<std::size_t> wanted;
    for (request& r : running) wanted.push_back(r.sequence.prefill_bytes(tokens));
    return wanted;
}

struct node {
    kvq::cache& cache;
    kvq::workspace& workspace;
    kvq::team& team;
    int layer;
    std::vector<kvq::prefill_request> batch;
};
void run_node(int nth, node& n) {
    n.team.enter(nth, [&](kvq::executor_view threads) {
        n.cache.prefill(n.layer, n.batch, kvq::causal{}, threads, n.workspace);
    });
}
void after_the_graph(kvq::team& team) { team.check(); }

void pool(kvq::cache& cache, int layer, const std::vector<kvq::prefill_request>& batch,
          kvq::workspace& workspace) {
    kvq::thread_pool threads(8);
    cache.prefill(layer, batch, kvq::causal{}, threads, workspace);
}

void reserve(kvq::cache& cache, std::span<request> running, int layers, int q_heads,
             kvq::thread_pool& threads, kvq::workspace& workspace,
             const std::function<void(int)>& prefill_layer) {
    std::vector<kvq::step_request> step;
    for (request& r : running) step.push_back({&r.sequence, r.k.tokens, r.q.tokens});
    cache.reserve(step, q_heads, threads.concurrency(), workspace);
    for (int layer = 0; layer < layers; ++layer) prefill_layer(layer);
}

void errors(kvq::cache& cache, const std::vector<kvq::step_request>& step, int q_heads,
            kvq::thread_pool& threads, kvq::workspace& workspace, void (*make_room)(),
            void (*refuse)(const char*)) {
    try {
        cache.reserve(step, q_heads, threads.concurrency(), workspace);
    } catch (const std::bad_alloc&) {
        make_room();
    } catch (const kvq::error& e) {
        refuse(e.what());
    }
}

template <class Memory>
int begin(Memory& memory, const kvq::token_batch& batch, int q_heads, int threads) {
    try {
        memory.begin(batch, q_heads, threads);
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (const kvq::error& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return -1;
    }
    return 0;
}

void budget(kvq::cache_options options, kvq::cache_shape shape, int n_ctx, int slots, int n_batch) {
    options.byte_budget =
        kvq::budget(options, shape, {.tokens = n_ctx, .sequences = slots, .chunk = n_batch, .cuts = 0});
    kvq::cache cache(shape, options);
}

std::size_t preallocate(kvq::cache_shape shape, const kvq::format_list& keys, const kvq::format_list& values,
                        int tokens, int q_heads, int threads) {
    kvq::cache cache(
        shape, {.keys = keys, .values = values, .byte_budget = std::size_t{8} << 30, .preallocate = true});
    const std::size_t bytes =
        kvq::footprint(cache, tokens, 1, {.q_heads = q_heads, .threads = threads}).total;
    return bytes;
}

void prefix(kvq::cache& cache, numbers prompt, numbers all_tokens, std::span<kvq::sequence* const> live,
            const kvq::step_down_policy& policy) {
    kvq::prefix_cache store(
        cache, {.byte_limit = std::size_t{8} << 30, .format = kvq::layer_format{.key = 1, .value = 1}});

    auto [match, reused, sequence] = store.fetch(prompt);
    store.store(all_tokens, sequence);
    store.step_down(live, policy);
}

}  // namespace adapters

void requantize(kvq::cache_shape shape, kvq::sequence& sequence) {
    using kvq::make_format;

    const kvq::format_list formats{make_format<kvq::full<kvq::float16>>(), make_format<kvq::int8>(),
                                   make_format<kvq::affine<4>>(), make_format<kvq::affine<2>>()};
    kvq::cache cache(shape, {.keys = formats, .values = formats, .sinks = 4, .recent = 128});

    kvq::requantize_request to_4_bit{.key = 2, .value = 2};
    auto plan = cache.plan_requantize(sequence, to_4_bit);
    cache.requantize(sequence, to_4_bit, {.pages = 64});
    kvq::step_down_policy policy{.tiers = {{.age = 0, .format = {0, 0}},
                                           {.age = 1024, .format = {1, 1}},
                                           {.age = 8192, .format = {2, 2}}},
                                 .byte_budget = std::size_t{4} << 30};
    auto foretold = kvq::plan_step_down(cache, sequence, policy);
    auto report = kvq::step_down(cache, sequence, policy);
}

void save(kvq::cache& cache, const kvq::sequence& sequence) {
    kvq::save(sequence, "prompt.safetensors", {.model = "my-model-7"});
    auto again = kvq::restore(cache, "prompt.safetensors", {.model = "my-model-7"});
}

template <class Sink>
void without_copies(const kvq::sequence& sequence, kvq::sequence_table& table, int id, Sink&& sink) {
    kvq::save(sequence, "prompt.safetensors", {.copies = false});
    kvq::write_state(table, sink, id, {.copies = false});
    auto without = sequence.fork();
    without.drop_copies();
}

void other_formats(kvq::cache& cache) {
    kvq::page_receiver receiver(cache);
    receiver.convert_pages();
}

void presets(kvq::cache_shape shape, int layer, tokens_in k, tokens_in q) {
    kvq::cache cache(shape, kvq::preset_options(kvq::make_formats<kvq::std4>()));

    kvq::calibration statistics(shape, true);
    statistics.add_keys(layer, k);
    statistics.add_queries(layer, q);
    auto options = kvq::preset_options(kvq::make_formats<kvq::low2>());
    options.keys = kvq::make_format<kvq::simd<>>(kvq::low2::keys(statistics));
    kvq::cache measured(shape, options);
}

void default_statistics(kvq::cache_shape shape) {
    kvq::cache by_default(shape, kvq::preset("mix4"));
    auto options = kvq::preset("mix4");
    options.statistics = kvq::key_statistics::shared;
    options.statistics_tokens = 256;
    options.statistics = kvq::key_statistics::off;
}

void self_calibration(kvq::cache_shape shape, int steps, tokens_in k, tokens_in v, tokens_in q,
                      kvq::token_view<float> out) {
    auto options = kvq::preset_options(kvq::make_formats<kvq::low2>());
    options.keys = kvq::make_format<kvq::simd<>>(kvq::full<kvq::float16>{});
    kvq::cache cache(shape, options);
    auto sequence = cache.new_sequence();
    kvq::self_calibration own(cache, 512);
    const auto make = [](const kvq::calibration& statistics) {
        return kvq::make_format<kvq::simd<>>(kvq::low2::keys(statistics));
    };
    for (int step = 0; step < steps; ++step) {
        for (int layer = 0; layer < shape.layers; ++layer) {
            own.add_queries(layer, q);
            sequence.prefill(layer, k, v, q, out);
        }
        own.apply(sequence, make);
    }
}

}  // namespace
