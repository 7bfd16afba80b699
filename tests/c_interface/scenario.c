/* SPDX-License-Identifier: MIT */
/* scenario KEYS VALUES FILE: prefill, decode, trim, fork, save and restore with formats by name. Prints a
   hash of all outputs. scenario.cpp does the same in C++; so may any other language, with the same hash and the
   same file. */
#include <kvq/kvq.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 2, KV_HEADS = 2, Q_HEADS = 4, DIM = 64, CHUNK = 100, ROW = (2 * KV_HEADS + Q_HEADS) * DIM };
static float data[CHUNK * ROW], out[CHUNK * Q_HEADS * DIM]; /* keys, values and queries of a layer; outputs */
static unsigned long long hash = 14695981039346656037ull;   /* FNV-1a of all outputs, 64 bits */

static void check(kvq_status status) {
    if (status == KVQ_OK) return;
    fprintf(stderr, "%s: %s\n", kvq_status_name(status), kvq_last_error());
    exit(1);
}

/* n more tokens in every layer. Values in [-1, 1) are made from their number. */
static void step(kvq_sequence* s, int32_t n) {
    static uint32_t made;
    const kvq_tensor k = {data, KVQ_FP32, n, KV_HEADS, DIM, 0, 0};
    const kvq_tensor v = {data + n * KV_HEADS * DIM, KVQ_FP32, n, KV_HEADS, DIM, 0, 0};
    const kvq_tensor q = {data + 2 * n * KV_HEADS * DIM, KVQ_FP32, n, Q_HEADS, DIM, 0, 0};
    const kvq_tensor o = {out, KVQ_FP32, n, Q_HEADS, DIM, 0, 0};
    for (int32_t layer = 0; layer < LAYERS; ++layer) {
        for (int i = 0; i < n * ROW; ++i) data[i] = (float)((made++ * 2654435761u) >> 8) / 8388608.0f - 1.0f;
        check(kvq_sequence_prefill(s, layer, &k, &v, &q, &o, NULL));
        for (size_t i = 0; i < (size_t)n * Q_HEADS * DIM * sizeof(float); ++i)
            hash = (hash ^ ((const unsigned char*)out)[i]) * 1099511628211ull;
    }
}

int main(int argc, char** argv) {
    kvq_cache_options options;
    kvq_cache* cache;
    kvq_sequence *s, *fork, *restored;
    if (argc != 4) return 2;
    KVQ_INIT(options);
    options.layers = LAYERS;
    options.kv_heads = KV_HEADS;
    options.head_dim = DIM;
    options.keys = argv[1];
    options.values = argv[2];
    check(kvq_cache_create(&options, &cache));
    check(kvq_sequence_create(cache, &s));
    for (int chunk = 0; chunk < 3; ++chunk) step(s, CHUNK);
    for (int token = 0; token < 40; ++token) step(s, 1);
    check(kvq_sequence_trim(s, 330));
    check(kvq_sequence_fork(s, &fork));
    step(fork, 5);
    check(kvq_sequence_save_file(s, NULL, argv[3]));
    check(kvq_sequence_restore_file(cache, NULL, argv[3], &restored));
    step(restored, 3);
    step(s, 3);
    printf("%s %s: outputs %016llx\n", argv[1], argv[2], hash);
    check(kvq_sequence_free(s));
    check(kvq_sequence_free(fork));
    check(kvq_sequence_free(restored));
    check(kvq_cache_free(cache));
}
