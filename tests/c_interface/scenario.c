/* SPDX-License-Identifier: MIT */
/* scenario KEYS VALUES FILE: prefill, decode, trim, fork, save and restore with formats by name. Prints a hash of all outputs. scenario.cpp does
   the same in C++; so may any other language, with the same hash and the same file. */
#include <kvq/kvq.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 2, KV_HEADS = 2, Q_HEADS = 4, DIM = 64, CHUNK = 100, PROMPT = 300, DECODE = 40 };

#define CHECK(call) check((call), #call)
static void check(kvq_status status, const char* call) {
    if (status == KVQ_OK) return;
    fprintf(stderr, "%s: %s: %s\n", call, kvq_status_name(status), kvq_last_error());
    exit(1);
}

static unsigned long long hash = 14695981039346656037ull; /* FNV-1a, 64 bits */
static void add_to_hash(const void* data, size_t bytes) {
    size_t i;
    for (i = 0; i < bytes; ++i) hash = (hash ^ ((const unsigned char*)data)[i]) * 1099511628211ull;
}

static float data[3][CHUNK * Q_HEADS * DIM], out[CHUNK * Q_HEADS * DIM]; /* keys, values, queries */

/* A value in [-1, 1) of tensor `role` at token, head and channel. */
static float value(uint32_t layer, uint32_t role, uint32_t token, uint32_t i) {
    uint32_t h = (((token * LAYERS + layer) * 3 + role) * 256 + i) * 2654435761u;
    h = (h ^ (h >> 15)) * 2246822519u;
    h ^= h >> 13;
    return (float)(h >> 8) / 8388608.0f - 1.0f;
}

static kvq_tensor tensor(float* x, int32_t tokens, int32_t heads) {
    kvq_tensor t = {NULL, KVQ_FP32, 0, 0, DIM, 0, 0};
    t.data = x;
    t.tokens = tokens;
    t.heads = heads;
    return t;
}

/* n more tokens in every layer. */
static void step(kvq_sequence* s, int32_t n) {
    int32_t layer, first, role, t, i;
    CHECK(kvq_sequence_tokens(s, KVQ_ALL_LAYERS, &first));
    for (layer = 0; layer < LAYERS; ++layer) {
        const kvq_tensor k = tensor(data[0], n, KV_HEADS), v = tensor(data[1], n, KV_HEADS),
                         q = tensor(data[2], n, Q_HEADS), o = tensor(out, n, Q_HEADS);
        for (role = 0; role < 3; ++role)
            for (t = 0; t < n; ++t)
                for (i = 0; i < (role < 2 ? KV_HEADS : Q_HEADS) * DIM; ++i)
                    data[role][t * (role < 2 ? KV_HEADS : Q_HEADS) * DIM + i] =
                        value((uint32_t)layer, (uint32_t)role, (uint32_t)(first + t), (uint32_t)i);
        CHECK(kvq_sequence_prefill(s, layer, &k, &v, &q, &o, NULL));
        add_to_hash(out, (size_t)n * Q_HEADS * DIM * sizeof(float));
    }
}

int main(int argc, char** argv) {
    kvq_cache_options options;
    kvq_save_options model;
    kvq_cache* cache;
    kvq_sequence *s, *fork, *restored;
    int32_t i;
    if (argc != 4) return 2;
    KVQ_INIT(options);
    options.layers = LAYERS;
    options.kv_heads = KV_HEADS;
    options.head_dim = DIM;
    options.keys = argv[1];
    options.values = argv[2];
    CHECK(kvq_cache_create(&options, &cache));
    CHECK(kvq_sequence_create(cache, &s));
    for (i = 0; i < PROMPT; i += CHUNK) step(s, CHUNK);
    for (i = 0; i < DECODE; ++i) step(s, 1);
    CHECK(kvq_sequence_trim(s, PROMPT + 30));
    CHECK(kvq_sequence_fork(s, &fork));
    for (i = 0; i < 5; ++i) step(fork, 1);
    KVQ_INIT(model);
    model.model = "scenario";
    CHECK(kvq_sequence_save_file(s, &model, argv[3]));
    CHECK(kvq_sequence_restore_file(cache, &model, argv[3], &restored));
    step(restored, 3);
    step(s, 3);
    printf("%s %s: outputs %016llx\n", argv[1], argv[2], hash);
    CHECK(kvq_sequence_free(s));
    CHECK(kvq_sequence_free(fork));
    CHECK(kvq_sequence_free(restored));
    CHECK(kvq_cache_free(cache));
    return 0;
}
