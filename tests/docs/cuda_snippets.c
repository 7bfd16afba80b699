/* SPDX-License-Identifier: MIT */
/* The C example of docs/guide/c.md for GPUs: it needs no header of CUDA. */
#include <kvq/kvq_cuda.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct model model;
enum { LAYERS = 32, KV_HEADS = 8, Q_HEADS = 32, HEAD_DIM = 128, BATCH = 16, CHUNK = 512 };

/* Of the engine: queries, keys and values of new tokens in device memory, and what follows attention. */
void project(model* m, int layer, void* q, void* k, void* v, int tokens, void* stream);
void mix(model* m, int layer, const void* out, int tokens, void* stream);
void serve(model* m, void* q, void* k, void* v, void* out, void* stream);

// Every layer of what has begun, on device memory of the engine.
static kvq_status forward(kvq_cuda_cache* cache, model* m, void* q, void* k, void* v, void* out, int tokens,
                          void* stream) {
    const kvq_tensor keys = {k, KVQ_BF16, tokens, KV_HEADS, HEAD_DIM, 0, 0};
    const kvq_tensor values = {v, KVQ_BF16, tokens, KV_HEADS, HEAD_DIM, 0, 0};
    const kvq_tensor queries = {q, KVQ_BF16, tokens, Q_HEADS, HEAD_DIM, 0, 0};
    const kvq_tensor outputs = {out, KVQ_BF16, tokens, Q_HEADS, HEAD_DIM, 0, 0};
    int layer;
    for (layer = 0; layer < LAYERS; ++layer) {
        kvq_status status;
        project(m, layer, q, k, v, tokens, stream);
        status = kvq_cuda_cache_prefill(cache, layer, &keys, &values, &queries, &outputs, NULL, stream);
        if (status != KVQ_OK) return status;
        mix(m, layer, out, tokens, stream);
    }
    return KVQ_OK;
}

static void check(kvq_status status) {
    if (status == KVQ_OK) return;
    fprintf(stderr, "%s\n", kvq_last_error());
    exit(1);
}

void serve(model* m, void* q, void* k, void* v, void* out, void* stream) {
    kvq_cuda_cache_options options;
    kvq_cuda_cache* cache;
    kvq_cuda_sequence* rows[BATCH];
    int row, step;
    KVQ_INIT(options);
    options.layers = LAYERS;
    options.kv_heads = KV_HEADS;
    options.head_dim = HEAD_DIM;
    options.formats = "std4";
    options.window = "bf16";
    options.recent = 128;
    options.max_batch = BATCH;
    check(kvq_cuda_cache_create(&options, stream, &cache));

    for (row = 0; row < BATCH; ++row) {  // a prompt is one sequence's, in chunks
        check(kvq_cuda_sequence_create(cache, &rows[row]));
        check(kvq_cuda_cache_begin_prompt(cache, rows[row], CHUNK, stream));
        check(forward(cache, m, q, k, v, out, CHUNK, stream));
    }
    for (step = 0; step < 100;
         ++step) {  // a step is the batch's: from the begin on it can be a captured graph
        check(kvq_cuda_cache_begin_step(cache, rows, BATCH, 1, stream));
        check(forward(cache, m, q, k, v, out, BATCH, stream));
    }
    for (row = 0; row < BATCH; ++row) check(kvq_cuda_sequence_free(rows[row]));
    check(kvq_cuda_cache_free(cache));
}
