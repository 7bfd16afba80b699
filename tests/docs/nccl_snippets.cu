// SPDX-License-Identifier: MIT
// The examples of docs/ that need NCCL, as snippets.cpp.
#include <kvq/adapters/distributed/nccl_prefill.cuh>
#include <kvq/adapters/distributed/nccl_transfer.cuh>
#include <kvq/adapters/distributed/peer_attention.cuh>

#include <cstdio>

void divided_context(const ncclUniqueId& id, int rank, int ranks, kvq::cuda::cache& cache,
                     std::span<const kvq::cuda::sequence_id> batch, bool is_home, int layers, int max_batch,
                     int q_heads, int value_dim, const kvq::token_view<const kvq::float16>& k,
                     const kvq::token_view<const kvq::float16>& v,
                     const kvq::token_view<const kvq::float16>& q, const kvq::token_view<float>& out,
                     cudaStream_t stream) {
    using namespace kvq;
    cuda::nccl_group group;
    auto s = group.open(id, rank, ranks, std::chrono::seconds(30));

    cuda::context_attention merge;
    s = merge.open(group, max_batch, q_heads, value_dim, stream);

    s = cache.begin_step(batch, is_home ? 1 : 0, stream);
    for (int layer = 0; layer < layers; ++layer) {
        if (is_home) s = cache.append(layer, k, v, stream);
        s = merge.attend(cache, layer, q, out, {.early = true}, stream);
    }
    s = group.wait(stream, "for the outputs");
    if (!s) std::puts(s.message);
}

void divided_prompt(kvq::cuda::nccl_group& group, kvq::cuda::cache& cache, kvq::cuda::sequence_id id,
                    kvq::context_split& split, int n, int q_heads, int layers,
                    const kvq::token_view<const kvq::float16>& k,
                    const kvq::token_view<const kvq::float16>& v,
                    const kvq::token_view<const kvq::float16>& q, const kvq::token_view<kvq::float16>& out,
                    cudaStream_t stream) {
    using namespace kvq;
    cuda::status s;
    cuda::context_prefill prompt;
    s = prompt.open(group, q_heads);

    s = prompt.begin(cache, id, split, n, stream);
    for (int layer = 0; layer < layers; ++layer) s = prompt.prefill(layer, k, v, q, out, {}, stream);
    s = group.wait(stream, "for the outputs");
    if (!s) std::puts(s.message);
}

void send(kvq::cuda::nccl_group& group, int to, kvq::cuda::cache& cache, kvq::cuda::sequence_id id, int n,
          int layers, const kvq::token_view<const kvq::float16>* k,
          const kvq::token_view<const kvq::float16>* v, cudaStream_t stream) {
    using namespace kvq;
    cuda::status s;
    s = cache.begin_prompt(id, n, stream);
    cuda::sequence_sender sender;
    s = sender.open(group, to, cache, id, stream);
    for (int layer = 0; layer < layers; ++layer) {
        s = cache.append(layer, k[layer], v[layer], stream);
        s = sender.send_layer(layer, stream);
    }
    cuda::sequence_report report;
    s = sender.finish(&report);
    if (!s) std::puts(s.message);
}

void receive(kvq::cuda::nccl_group& group, int from, kvq::cuda::cache& cache, kvq::cuda::sequence_id& id,
             kvq::cuda::sequence_report& report, cudaStream_t stream) {
    using namespace kvq;
    cuda::status s;
    cuda::sequence_receiver receiver;
    s = receiver.open(group, from, cache, stream, "std4");
    s = receiver.receive(id, &report);
    if (!s) std::puts(s.message);
}
