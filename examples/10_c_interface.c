// An engine in C: two prompts, batches of decode steps on the engine's own threads, fewer bits when memory
// runs short.
//
//   10_c_interface [format]      any name of kvq_format_list; std4 by default
#include <kvq/kvq.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 4, KV_HEADS = 2, Q_HEADS = 8, HEAD_DIM = 64, PROMPT = 700, ANSWER = 20, SEQUENCES = 2 };

static void check(kvq_status status) {
    if (status == KVQ_OK) return;
    fprintf(stderr, "%s: %s\n", kvq_status_name(status), kvq_last_error());
    exit(1);
}

// The engine's threads. Here it has one: tasks run one after the other.
static int32_t parallel_for(void* user, int32_t n, kvq_task task, void* task_data) {
    int32_t i;
    (void)user;
    for (i = 0; i < n; ++i) task(task_data, i);
    return 0;
}

// What a model computes: n tokens of 16-bit values, here random ones. 0x3800 is 0.5.
static kvq_tensor random_tensor(uint16_t* memory, int32_t n, int32_t heads) {
    kvq_tensor t = {NULL, KVQ_FP16, 0, 0, HEAD_DIM, 0, 0};
    int32_t i;
    for (i = 0; i < n * heads * HEAD_DIM; ++i)
        memory[i] = (uint16_t)((rand() & 1 ? 0x8000 : 0) | (0x3800 + rand() % 1024));
    t.data = memory;
    t.tokens = n;
    t.heads = heads;
    return t;
}

static uint16_t memory[SEQUENCES][4][PROMPT * Q_HEADS * HEAD_DIM];

int main(int argc, char** argv) {
    kvq_cache_options options;
    kvq_executor_callbacks threads;
    kvq_attend_options attend;
    kvq_requantize_request smaller;
    kvq_requantize_report report;
    kvq_usage usage;
    kvq_cache* cache;
    kvq_sequence* sequences[SEQUENCES];
    int32_t step, layer, i;

    KVQ_INIT(options);
    options.layers = LAYERS;
    options.kv_heads = KV_HEADS;
    options.head_dim = HEAD_DIM;
    options.keys = argc > 1 ? argv[1] : "std4";  // values: the same
    check(kvq_cache_create(&options, &cache));
    for (i = 0; i < SEQUENCES; ++i) check(kvq_sequence_create(cache, &sequences[i]));

    KVQ_INIT(threads);
    threads.concurrency = 1;
    threads.parallel_for = parallel_for;
    KVQ_INIT(attend);
    check(kvq_executor_create(&threads, &attend.executor));
    check(kvq_workspace_create(NULL, 0, &attend.workspace));

    // Step 0 is a prompt for each sequence, the others are one token for each. Its memory is taken first: a
    // step does not fail in the middle.
    for (step = 0; step <= ANSWER; ++step) {
        const int32_t n = step == 0 ? PROMPT : 1;
        kvq_step_request steps[SEQUENCES];
        for (i = 0; i < SEQUENCES; ++i) {
            steps[i].sequence = sequences[i];
            steps[i].tokens = steps[i].q_tokens = n;
            steps[i].mods = NULL;
        }
        check(kvq_cache_reserve(cache, steps, SEQUENCES, Q_HEADS, &attend));
        for (layer = 0; layer < LAYERS; ++layer) {
            kvq_prefill_request batch[SEQUENCES];
            for (i = 0; i < SEQUENCES; ++i) {
                batch[i].sequence = sequences[i];
                batch[i].k = random_tensor(memory[i][0], n, KV_HEADS);
                batch[i].v = random_tensor(memory[i][1], n, KV_HEADS);
                batch[i].q = random_tensor(memory[i][2], n, Q_HEADS);
                batch[i].out = batch[i].q;
                batch[i].out.data = memory[i][3];
                batch[i].lse = NULL;
                batch[i].mods = NULL;
            }
            check(kvq_cache_prefill(cache, layer, batch, SEQUENCES, &attend));
        }
    }

    // A later prompt needs the memory of the first one: older pages go to 2 bits. First the cache is told of
    // the format.
    {
        kvq_format* low2[2];
        check(kvq_format_find("low2", KVQ_KEY, NULL, &low2[0]));
        check(kvq_format_find("low2", KVQ_VALUE, NULL, &low2[1]));
        check(kvq_cache_add_format(cache, KVQ_KEY, low2[0], NULL));
        check(kvq_cache_add_format(cache, KVQ_VALUE, low2[1], NULL));
        check(kvq_format_free(low2[0]));
        check(kvq_format_free(low2[1]));
    }
    KVQ_INIT(smaller);
    KVQ_INIT(report);
    smaller.keys = smaller.values = "low2";
    smaller.only_smaller = 1;
    smaller.executor = attend.executor;
    check(kvq_cache_requantize(cache, &sequences[0], 1, &smaller, &report));
    printf("%zu pages converted: %zu bytes before, %zu after\n", report.pages, report.bytes_before,
           report.bytes_after);

    // An error changes nothing and is a sentence.
    if (kvq_sequence_trim(sequences[0], PROMPT + ANSWER + 1) != KVQ_OK)
        printf("refused: %s\n", kvq_last_error());

    KVQ_INIT(usage);
    for (i = 0; i < SEQUENCES; ++i) {
        check(kvq_sequence_get_usage(sequences[i], &usage));
        printf("sequence %d: %d tokens in %zu bytes, 16 bit would be %d\n", i, usage.tokens, usage.bytes,
               usage.tokens * LAYERS * 2 * KV_HEADS * HEAD_DIM * 2);
        check(kvq_sequence_free(sequences[i]));
    }
    check(kvq_workspace_free(attend.workspace));
    check(kvq_executor_free(attend.executor));
    check(kvq_cache_free(cache));
    return 0;
}
