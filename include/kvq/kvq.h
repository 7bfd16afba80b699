// kvq in C: caches, sequences, attention and saved files behind handles; formats by name. C99, and C++98 as
// well.
//
//   kvq_cache_options o; KVQ_INIT(o);
//   o.layers = 32; o.kv_heads = 8; o.head_dim = 128; o.keys = "std4";
//   kvq_cache* cache; kvq_sequence* s;
//   if (kvq_cache_create(&o, &cache) != KVQ_OK) puts(kvq_last_error());
//   kvq_sequence_create(cache, &s);
//   kvq_sequence_prefill(s, layer, &k, &v, &q, &out, NULL);
//
// The program links kvq::library (CMake option KVQ_LIBRARY), static or shared. docs/guide/c.md is the guide.
//
// Errors: functions return a status. On any other than KVQ_OK nothing has changed (tensors of outputs aside,
// which may be written in part), and kvq_last_error() is a sentence with the numbers in it. No function
// crashes on a null pointer, on a handle that was freed, or on one of another cache. No exception crosses.
// Structs with a member `size` may grow in later versions. KVQ_INIT(object) sets all members to zero and
// `size` to sizeof(object). Zero is the default of every member. Other structs stay as they are.
// Threads: functions that take a const handle may run together on it, others not; different sequences are
// independent. kvq_sequence_create and kvq_cache_*, except kvq_cache_add_format and kvq_cache_commit_to, may
// run together on one cache.
// Lifetimes: a freed cache stays in memory until its last sequence, ring, store, table or receiver is freed.
// Other pointers in an option or a request are read during the call only, unless a comment says that they are
// kept.
#ifndef KVQ_KVQ_H
#define KVQ_KVQ_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define KVQ_API __attribute__((visibility("default")))
#else
#define KVQ_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/// Grows when a function or a struct of this header changes so that a compiled program no longer fits.
#define KVQ_ABI_VERSION 1

// ---- status ----------------------------------------------------------------------------------------------

typedef int32_t kvq_status;
enum {
    KVQ_OK = 0,
    KVQ_ERROR_ARGUMENT = 1,  // a value out of range, or a shape that does not fit
    KVQ_ERROR_HANDLE =
        2,  // a null pointer, a handle that was freed or is of another kind, a handle of another cache
    KVQ_ERROR_STRUCT = 3,  // the size of a struct is unknown to this library
    KVQ_ERROR_MEMORY = 4,  // an allocator returned NULL, or the byte budget of the cache would be exceeded
    KVQ_ERROR_DATA =
        5,  // a file or a message is damaged, does not fit the cache, or cannot be read or written
    KVQ_ERROR_CALLBACK = 6,     // a callback reported a failure
    KVQ_ERROR_UNSUPPORTED = 7,  // this library was built without what the function needs
    KVQ_ERROR_INTERNAL = 8
};

/// The message of the last call on this thread that failed; "" if none did. Valid until the next call on this
/// thread.
KVQ_API const char* kvq_last_error(void);
/// "KVQ_OK", "KVQ_ERROR_ARGUMENT", ...; "unknown status" for other numbers.
KVQ_API const char* kvq_status_name(kvq_status status);
/// The version of the library, such as "0.3.0".
KVQ_API const char* kvq_version(void);
/// KVQ_ABI_VERSION of the library.
KVQ_API int32_t kvq_abi_version(void);

/// Sets all members of an object with a member `size` to their defaults.
#define KVQ_INIT(object) (memset(&(object), 0, sizeof(object)), (object).size = sizeof(object))

/// Zero tokens, where 0 means the default.
#define KVQ_NONE (-1)
/// Every layer.
#define KVQ_ALL_LAYERS (-1)

// ---- handles ---------------------------------------------------------------------------------------------
// Every *_free takes NULL as well. KVQ_ERROR_HANDLE for a handle that was freed before.

typedef struct kvq_format kvq_format;
typedef struct kvq_statistics kvq_statistics;
typedef struct kvq_executor kvq_executor;
typedef struct kvq_workspace kvq_workspace;
typedef struct kvq_cache kvq_cache;
typedef struct kvq_sequence kvq_sequence;
typedef struct kvq_receiver kvq_receiver;
typedef struct kvq_prefix_cache kvq_prefix_cache;
typedef struct kvq_ring kvq_ring;
typedef struct kvq_sequence_table kvq_sequence_table;

// ---- tensors ---------------------------------------------------------------------------------------------

typedef int32_t kvq_role;
enum { KVQ_KEY = 0, KVQ_VALUE = 1 };

typedef int32_t kvq_dtype;
enum { KVQ_FP32 = 0, KVQ_FP16 = 1, KVQ_BF16 = 2 };  // float; IEEE half in a uint16_t; bfloat16 in a uint16_t

/// [tokens][heads][dim] in memory of the caller. Channels are contiguous. Strides count values; both 0:
/// dense. Inputs are not written.
typedef struct kvq_tensor {
    void* data;  // may be NULL if tokens is 0
    kvq_dtype dtype;
    int32_t tokens, heads, dim;
    ptrdiff_t token_stride, head_stride;
} kvq_tensor;

// ---- memory ----------------------------------------------------------------------------------------------

/// Memory for pages and tables of a cache, or for a workspace. Both functions are called from any thread.
typedef struct kvq_allocator {
    size_t size;
    /// `alignment` is a power of 2. NULL: no memory; the call that needs it fails with KVQ_ERROR_MEMORY.
    void* (*allocate)(void* user, size_t bytes, size_t alignment);
    void (*deallocate)(void* user, void* memory, size_t bytes, size_t alignment);
    void* user;
} kvq_allocator;

/// A buffer for the scratch of attention: once it is large enough (kvq_cache_workspace_bytes), calls that are
/// given it allocate nothing for scratch. It only grows. One call at a time. allocator: NULL for the default;
/// its functions and `user` are kept.
KVQ_API kvq_status kvq_workspace_create(const kvq_allocator* allocator, size_t bytes, kvq_workspace** out);
KVQ_API kvq_status kvq_workspace_free(kvq_workspace* workspace);
/// Makes it at least this large. Contents are lost.
KVQ_API kvq_status kvq_workspace_reserve(kvq_workspace* workspace, size_t bytes);
KVQ_API kvq_status kvq_workspace_bytes(const kvq_workspace* workspace, size_t* bytes);

// ---- threads ---------------------------------------------------------------------------------------------
// Wherever a function takes an executor, NULL is the calling thread. Results have the same bits on any number
// of threads.

typedef void (*kvq_task)(void* task_data, int32_t index);

/// The engine's own threads.
typedef struct kvq_executor_callbacks {
    size_t size;
    int32_t concurrency;  // tasks that may run at once, at least 1
    /// Calls task(task_data, i) for every i in [0, n), in any order, on any threads, and returns 0 when all
    /// have ended. Any other result is KVQ_ERROR_CALLBACK, and so is a task that was not run, or run twice;
    /// no task may run after the return.
    int32_t (*parallel_for)(void* user, int32_t n, kvq_task task, void* task_data);
    void* user;
} kvq_executor_callbacks;

/// The functions and `user` are kept. An executor serves one call at a time.
KVQ_API kvq_status kvq_executor_create(const kvq_executor_callbacks* callbacks, kvq_executor** out);
/// Threads of kvq, at least 1. After fork() a child has none of them: there an executor runs its tasks on the
/// calling thread.
KVQ_API kvq_status kvq_executor_create_threads(int32_t threads, kvq_executor** out);
KVQ_API kvq_status kvq_executor_free(kvq_executor* executor);

// ---- formats ---------------------------------------------------------------------------------------------
// Names: fp16, bf16, fp32, int8, e4m3, affine-B-gG, kivi-B-gG (B: 1 to 8 bits; G: values that share a
// scale), and the presets ref8, hi6, std5, std4, mix4 to mix6, low3, low2, hi6-h, std5-h, std4-h, low3-h,
// low2-h.
// In the bytes of other systems: fp8, fp8-e5m2, nvfp4, nvfp4-4over6, mxfp8, mxfp4, q8_0, q4_0, q4_1, q5_0,
// q5_1, q6_0, iq4_nl, int8-token-head, fp8-token-head, mlx-2-g64 to mlx-8-g64, the same with "-bf16" behind
// (scales and biases in bf16), nvfp4-v4, mxfp4-g16, mla-656, mla-656-pow2, mla-584, mla-528, mla-288,
// index-132, index-68. Any G of affine and kivi may be asked for. kvq_format_list names all. With "-bounds"
// at the end of a name, keys carry the range of every channel of a page, by which kvq_mods.selected_tokens
// ranks pages without reading them. With "-fp16x64" their last 64 channels are 16 bit, as keys of KVQ_LATENT
// have them, with "-ref8x64" 8 bit with parameters per channel, with "-int8x64" 8 bit with a scale per token.

typedef struct kvq_format_entry {
    size_t size;
    const char* name;          // lives as long as the program
    int32_t keys, values;      // 1: for this tensor. K and V of one name may be two entries
    int32_t takes_statistics;  // 1: keys that can be made from statistics
    int32_t group;             // the G of the name; 0: none
    int32_t preset;            // 1: one of the presets
} kvq_format_entry;

KVQ_API kvq_status kvq_format_count(int32_t* count);
/// index: 0 to count - 1
KVQ_API kvq_status kvq_format_list(int32_t index, kvq_format_entry* entry);

/// A format by name, for keys or for values. statistics: NULL, or those from which keys are made, if the
/// format takes them. KVQ_ERROR_ARGUMENT for an unknown name; the message lists the most similar names.
KVQ_API kvq_status kvq_format_find(const char* name, kvq_role role, const kvq_statistics* statistics,
                                   kvq_format** out);
/// The same for the bytes of another system whose tensor has a scale, by which its numbers were divided:
/// "fp8", "nvfp4" with vLLM's k_scale; others have the scale 1. Keys or values. KVQ_ERROR_ARGUMENT for other
/// formats.
KVQ_API kvq_status kvq_format_find_rows(const char* name, float tensor_scale, kvq_format** out);
/// The same with a scale for each head: `count` of them, [kv_heads] or [layers][kv_heads].
KVQ_API kvq_status kvq_format_find_head_rows(const char* name, const float* scales, int32_t count,
                                             int32_t kv_heads, kvq_format** out);
/// Bytes of a token of one head in the rows of another system: in its row, of scales and of biases beside it.
/// NULL: not asked for. KVQ_ERROR_ARGUMENT for other formats, and for channels that they cannot have.
KVQ_API kvq_status kvq_format_row_bytes(const kvq_format* format, int32_t dim, int32_t* row, int32_t* scales,
                                        int32_t* biases);
KVQ_API kvq_status kvq_format_free(kvq_format* format);

typedef struct kvq_format_description {
    size_t size;
    const char* name;                      // of the scheme; lives as long as the handle
    const char* backend;                   // "avx2", ...
    double bits;                           // per value, parameters included
    size_t block_bytes;                    // of one head, a multiple of 16
    int32_t quantize, dequantize, attend;  // 1: in vectors (quantize: from fp16); 0: a portable loop, slower
    int32_t dequantizes_first;             // 1: attention multiplies a dequantized copy of each block
    int32_t holds_values;                  // 1: fp32, fp16 or bf16, not quantized
    const char* asked_name;  // by which it was found, such as "std4"; lives as long as the handle
    char quantize_by[104];   // the header of the kernel, or "portable: " and the reason; so are the next two
    char dequantize_by[104];
    char attend_by[104];
} kvq_format_description;

/// Describes the format for blocks of tokens x dim values.
KVQ_API kvq_status kvq_format_describe(const kvq_format* format, kvq_role role, int32_t tokens, int32_t dim,
                                       kvq_format_description* description);

// ---- pages in memory of the caller -----------------------------------------------------------------------
// A page is `heads` blocks, one after the other (docs/reference/format.md). It has no header and no pointers;
// its address is a multiple of 16.

typedef struct kvq_page_shape {
    kvq_role role;
    int32_t tokens, heads, dim;  // at least 1 each; tokens * dim at most 2^28
    int32_t layer, first_head;   // of the model, for formats that were made from statistics; else 0
} kvq_page_shape;

/// Bytes of a page, and of the workspace that quantizing or dequantizing it takes. workspace_bytes may be
/// NULL.
KVQ_API kvq_status kvq_format_page_bytes(const kvq_format* format, const kvq_page_shape* shape,
                                         size_t* page_bytes, size_t* workspace_bytes);
/// Quantizes values [tokens][heads][dim] to `page`. The bytes are those that a cache writes whose window has
/// the type of the values. workspace: workspace_bytes bytes, a multiple of 64 as address. not_finite: NULL,
/// or gets the number of NaN and infinities.
KVQ_API kvq_status kvq_format_quantize(const kvq_format* format, const kvq_page_shape* shape,
                                       const kvq_tensor* values, void* page, size_t page_bytes,
                                       void* workspace, size_t workspace_bytes, size_t* not_finite);
/// Dequantizes `page` to out, [tokens][heads][dim], rounded once.
KVQ_API kvq_status kvq_format_dequantize(const kvq_format* format, const kvq_page_shape* shape,
                                         const void* page, size_t page_bytes, const kvq_tensor* out,
                                         void* workspace, size_t workspace_bytes);

/// Two pages that hold the keys and the values of the same tokens of a layer, all kv heads. Of KVQ_LATENT
/// both are the page of keys.
typedef struct kvq_page {
    const void *keys, *values;
    int32_t key_format, value_format;      // kvq_cache_find_format; 0 is the window format
    int32_t key_capacity, value_capacity;  // tokens that the pages have memory for (kvq_page_shape.tokens)
    int32_t skip, tokens;  // tokens [skip, skip + tokens) of both pages are shown; tokens is at least 1
    int64_t shift;         // positions by which the keys moved since they were rotated (kvq_sequence_shift)
} kvq_page;

// ---- masks and score modifiers ---------------------------------------------------------------------------

/// Tokens [begin, end) of a sequence.
typedef struct kvq_token_range {
    int32_t begin, end;
} kvq_token_range;

/// Tokens that queries [first_query, last_query] of a call read in a kv head.
typedef struct kvq_chosen_tokens {
    int32_t layer, kv_head, first_query, last_query;
    kvq_token_range tokens;
} kvq_chosen_tokens;

/// What kvq_mods.selected_tokens did. Calls that succeed add to it; KVQ_INIT begins again. One call at a
/// time.
typedef struct kvq_selection_report {
    size_t size;
    int64_t pages,
        read;  // that masks show, once for every kv head and block of query rows; those that were read
    kvq_chosen_tokens*
        chosen;  // NULL, or gets the runs of read pages: requests, kv heads, rows and tokens ascend
    int32_t chosen_capacity;  // entries of `chosen`
    int32_t chosen_count;     // runs so far, at most INT32_MAX; those beyond the capacity are not written
} kvq_selection_report;

/// What kvq_mods.skipped_mass did. As kvq_selection_report.
typedef struct kvq_skipping_report {
    size_t size;
    int64_t pages, skipped;  // pages of values that were seen, as above; those that were not read
    int64_t rows;            // query tokens x query heads
    double left_out;         // sum over rows of the share of weights that was left out
    float most_left_out;     // of one row
} kvq_skipping_report;

enum {
    KVQ_CAUSAL = 0,         // a query attends to itself and the tokens before it
    KVQ_BIDIRECTIONAL = 1,  // to all tokens of the sequence
    KVQ_CROSS = 2           // to all tokens; queries are not of the sequence, any number of them is allowed
};
enum { KVQ_PAGE_NONE = 0, KVQ_PAGE_SOME = 1, KVQ_PAGE_ALL = 2 };

/// What queries attend to, and changes of scores. All zero: causal, scores q k / sqrt(head_dim). Masks are
/// joined with AND. Score modifiers apply to scaled scores in the order softcap, ALiBi, callback; then masks.
/// Positions are those of the sequence.
typedef struct kvq_mods {
    size_t size;
    int32_t direction;               // KVQ_CAUSAL, ...
    int32_t window;                  // 0: none; n: itself and the n - 1 tokens before it
    int32_t window_sinks;            // with a window: also the first tokens
    int32_t prefix;                  // prefix-LM: all queries see the first `prefix` tokens
    const int32_t* document_starts;  // as cu_seqlens: ascending, the first one 0; a query sees its document
    int32_t documents;               // number of document_starts
    const int32_t* tree_parents;     // a tree of drafted tokens: parents[i] < i, or -1 for the accepted text
    int32_t tree_tokens;             // 0: no tree; at most 64
    int32_t tree_first;              // tokens of the layer before the draft
    float scale;                     // 0: 1 / sqrt(head_dim)
    float softcap;                   // 0: none; c tanh(score / c)
    const float* alibi_slopes;       // NULL, or one per query head: score - slope * distance
    int32_t alibi_heads;             // number of alibi_slopes
    int32_t sink_heads;              // number of sink_logits
    const float* sink_logits;        // NULL, or one per query head: one more score in the softmax sum
    /// Own mask, or NULL: sets scores[i] of hidden keys first_key + i to -infinity. Called from any thread.
    void (*mask_row)(void* user, float* scores, int32_t n, int32_t query, int32_t first_key);
    /// NULL, or says what queries [first_query, last_query] see of keys [first_key, end_key): KVQ_PAGE_NONE,
    /// ...; needs mask_row.
    int32_t (*mask_page)(void* user, int32_t first_query, int32_t last_query, int32_t first_key,
                         int32_t end_key);
    /// Own score modifier, or NULL: changes n scores of keys from first_key on in place.
    void (*score_row)(void* user, float* scores, int32_t n, int32_t query_head, int32_t query,
                      int32_t first_key);
    void* user;
    /// Both NULL: no such mask. Queries see tokens of these ranges, which ascend within a query.
    const kvq_token_range* token_ranges;
    // NULL: all queries see all ranges; else query i sees [range_starts[i], range_starts[i + 1])
    const int32_t* range_starts;
    int32_t range_count;        // number of token_ranges
    int32_t range_start_count;  // number of range_starts: queries + 1
    int32_t range_first_query;  // with range_starts: position of query 0 in the sequence; KVQ_CROSS: 0
    int32_t selected_tokens;  // 0: all pages are read; n: only the best pages of each kv head, about n tokens
    float
        skipped_mass;  // 0: all values are read; below 1: values of pages with at most so much weight are not
    int32_t upper_only;  // 1: of pages with two planes (format nested8) the upper one alone is read
    kvq_selection_report* selection;  // NULL, or what selected_tokens did
    kvq_skipping_report* skipping;    // NULL, or what skipped_mass did
    /// Lists of tokens, where list_queries is not 0: queries attend to the tokens of both of their lists, as
    /// far as masks show them, and nothing else is read; to nothing where both counts are 0. Positions of
    /// the sequence in any order, -1: none; a token that is listed twice counts twice. Without
    /// selected_tokens and skipped_mass.
    const int32_t* listed_tokens;  // [list_queries][list_kv_heads][listed_count], such as the best tokens
    const int32_t* listed_window;  // [list_queries][list_kv_heads][listed_window_count], such as the last
    int32_t listed_count, listed_window_count;
    int32_t list_queries;   // query tokens of the call; 0: no lists, all pointers NULL and counts 0
    int32_t list_kv_heads;  // 0 or 1: a query has one list for all heads; else the kv heads of the layer
} kvq_mods;

// ---- caches ----------------------------------------------------------------------------------------------

enum { KVQ_HALF_SPLIT = 0, KVQ_INTERLEAVED = 1 };  // pairs (j, j + dims / 2); pairs (2 j, 2 j + 1)

/// How a layer rotates keys before they are appended. All zero: not at all.
typedef struct kvq_rotary {
    int32_t dims;               // rotated channels, even; 0: none
    int32_t first_channel;      // the first of them
    int32_t layout;             // KVQ_HALF_SPLIT, ...
    int32_t frequency_count;    // dims / 2, or 0
    double base;                // 0: 10000
    const double* frequencies;  // radians per position of each pair; NULL: base^(-2 j / dims)
    /// Instead of all of the above, or NULL: rotates a row by `by` positions more. Called from any thread.
    /// Kept, and `user`. In files the numbers above tell such functions apart.
    void (*rotate)(void* user, float* row, int32_t head_dim, int64_t by);
    void* user;
} kvq_rotary;

/// Frequencies, [dims / 2], of rope_scaling "llama3": Llama 3.1 has factor 8, low 1, high 4, context 8192.
KVQ_API kvq_status kvq_rotary_llama3(int32_t dims, double base, double factor, double low_freq_factor,
                                     double high_freq_factor, double original_context, double* frequencies);
/// Frequencies, [dims / 2], of rope_scaling "yarn": beta_fast is usually 32, beta_slow 1.
KVQ_API kvq_status kvq_rotary_yarn(int32_t dims, double base, double factor, double original_context,
                                   double beta_fast, double beta_slow, double* frequencies);

/// Formats of a layer by name; NULL: the first one of kvq_cache_options.keys or values.
typedef struct kvq_layer_formats {
    const char *keys, *values;
} kvq_layer_formats;

/// What a layer holds: all of its tokens; a sliding window; the tokens of the current chunk; a recurrent
/// state; latents, which are keys and in their first value_dim channels values (MLA); an index, one key of
/// head_dim channels per token, by which kvq_sequence_select chooses tokens. The last two take keys alone: v
/// of 0 tokens. Windows and chunks free
/// pages by themselves.
enum {
    KVQ_FULL_ATTENTION = 0,
    KVQ_SLIDING_ATTENTION = 1,
    KVQ_CHUNKED_ATTENTION = 2,
    KVQ_SHARED = 3,
    KVQ_CROSS_ATTENTION = 4,
    KVQ_STATE = 5,
    KVQ_LATENT = 6,
    KVQ_INDEX = 7
};

/// One layer of a model whose layers differ.
typedef struct kvq_layer {
    int32_t kind;                // KVQ_FULL_ATTENTION, ...
    int32_t kv_heads, head_dim;  // 0 of KVQ_STATE; 0 or those of the owner of KVQ_SHARED
    int32_t value_dim;           // 0: head_dim
    int32_t window;  // tokens of a sliding window or a chunk; of KVQ_LATENT its last, rotary channels; else 0
    int32_t
        sinks;  // first tokens that every query sees as well, at most those of the cache; 0 of other kinds
    int32_t owner;  // of KVQ_SHARED the earlier layer whose keys and values it reads; 0 of other kinds
} kvq_layer;

/// How snapshots hold a part of a state: as it is; int8 with a scale per head and row, or per head and
/// column; FP8 with one per head and 32 rows.
enum {
    KVQ_SNAPSHOT_EXACT = 0,
    KVQ_SNAPSHOT_INT8_ROWS = 1,
    KVQ_SNAPSHOT_INT8_COLUMNS = 2,
    KVQ_SNAPSHOT_E4M3 = 3
};

/// A part of the state of a layer: values [heads][rows][columns].
typedef struct kvq_state_part {
    const char* name;  // of its own within the layer
    int32_t layer;     // of kind KVQ_STATE
    kvq_dtype dtype;
    int32_t heads, rows, columns;
    int32_t snapshot;  // KVQ_SNAPSHOT_EXACT, ...
} kvq_state_part;

/// Whose keys say which channels get how many bits: each sequence's own first tokens, with plans that forks
/// and prefix hits inherit; or those of the first sequence that has enough, with one plan for the cache.
enum { KVQ_OWN_STATISTICS = 0, KVQ_SHARED_STATISTICS = 1 };

typedef struct kvq_cache_options {
    size_t size;
    int32_t layers, kv_heads, head_dim;
    int32_t value_dim;  // 0: head_dim
    /// Names, separated by commas. Pages are quantized to the first one; kvq_cache_requantize and others take
    /// all. values: NULL: as keys.
    const char *keys, *values;
    const char* window;   // fp32, fp16 or bf16; NULL: fp16
    int32_t page_tokens;  // 0: 128; multiples of 32 waste no bytes
    int32_t sinks;        // first tokens, always in the window format; 0: 4; KVQ_NONE
    int32_t recent;       // at least so many newest tokens are in the window format; 0: 32; KVQ_NONE
    int32_t rollback;     // a trim by up to so many tokens is exact; 0: 16; KVQ_NONE
    size_t byte_budget;   // for all pages; 0: none
    /// NULL, or [layers]. Names that `keys` and `values` do not list are added to them.
    const kvq_layer_formats* layer_formats;
    const kvq_rotary* rotary;  // NULL: keys cannot move
    int32_t rotary_count;      // 1: for all layers; or `layers`
    // for keys whose format takes a plan and was made without statistics: KVQ_OWN_STATISTICS, ...; KVQ_NONE
    int32_t key_statistics;
    const kvq_statistics* statistics;  // NULL, or for all keys whose format takes them
    const kvq_allocator* allocator;    // NULL: the heap. Functions and `user` are kept; must be thread-safe
    // 1: byte_budget is allocated when the cache is made; pages take multiples of 64 bytes of it
    int32_t preallocate;
    // cuts repack pages that show less than this part of their tokens, at most 0.5; 0: 0.25; below 0: never
    float repack;
    const kvq_layer* layer_list;        // NULL, or [layers]; kv_heads, head_dim and value_dim are 0 then
    const kvq_state_part* state_parts;  // NULL, or [state_part_count]: of all layers of kind KVQ_STATE
    size_t snapshot_bytes;              // at most, for the snapshots of a sequence; 0: no limit
    int32_t state_part_count;
    int32_t snapshot_every;       // tokens from one snapshot to the next; 0: none along the way
    int32_t snapshot_prompt_end;  // one at the end of a prompt; 0: 1; KVQ_NONE
    int32_t statistics_tokens;    // first tokens that make a plan, 16 bit until then; 0: 512; at least 64
    int32_t reserved;             // 0
} kvq_cache_options;

/// Takes no memory for pages yet, unless `preallocate` is 1. KVQ_ERROR_ARGUMENT for an impossible size, an
/// unknown name, or a format that cannot hold such blocks.
KVQ_API kvq_status kvq_cache_create(const kvq_cache_options* options, kvq_cache** out);
KVQ_API kvq_status kvq_cache_free(kvq_cache* cache);

/// The options in force, defaults filled in.
typedef struct kvq_cache_info {
    size_t size;
    int32_t layers, kv_heads, head_dim, value_dim;  // 0 where layers differ
    int32_t page_tokens, sinks, recent, rollback;
    size_t byte_budget;   // SIZE_MAX: none
    size_t bytes_in_use;  // of all pages of all sequences, each counted once, headers included
    size_t pages_in_use;
    size_t bytes_held;  // for pages: byte_budget if it was allocated at once, else bytes_in_use
} kvq_cache_info;
KVQ_API kvq_status kvq_cache_get_info(const kvq_cache* cache, kvq_cache_info* info);
/// Kind and shape of a layer, value_dim filled in.
KVQ_API kvq_status kvq_cache_get_layer(const kvq_cache* cache, int32_t layer, kvq_layer* out);

/// Adds a format under a name that the cache does not list yet. name: NULL for the name by which the format
/// was found. No other call on the cache or its sequences may run at the same time.
KVQ_API kvq_status kvq_cache_add_format(kvq_cache* cache, kvq_role role, const kvq_format* format,
                                        const char* name);
/// Pages of sequences that are created from now on are quantized to this listed format in layers
/// [first_layer, last_layer); last_layer 0: all. Sequences that exist keep theirs (`new_pages` of a request
/// changes it). No other call on the cache may run at the same time.
KVQ_API kvq_status kvq_cache_commit_to(kvq_cache* cache, kvq_role role, const char* name, int32_t first_layer,
                                       int32_t last_layer);
/// The index that pages of a listed format carry (kvq_page); 0 is the window format. An index may stand for
/// several names.
KVQ_API kvq_status kvq_cache_find_format(const kvq_cache* cache, kvq_role role, const char* name,
                                         int32_t* index);
/// The format of pages with this index, as a handle to be freed.
KVQ_API kvq_status kvq_cache_get_format(const kvq_cache* cache, kvq_role role, int32_t index,
                                        kvq_format** out);

/// Bytes of workspace for attention of q_tokens x q_heads queries over a sequence of `tokens`, on `threads`
/// threads.
KVQ_API kvq_status kvq_cache_workspace_bytes(const kvq_cache* cache, int32_t tokens, int32_t q_heads,
                                             int32_t q_tokens, int32_t threads, size_t* bytes);

// ---- sequences -------------------------------------------------------------------------------------------

KVQ_API kvq_status kvq_sequence_create(kvq_cache* cache, kvq_sequence** out);
KVQ_API kvq_status kvq_sequence_free(kvq_sequence* sequence);
/// A sequence with the same tokens that shares every page.
KVQ_API kvq_status kvq_sequence_fork(const kvq_sequence* sequence, kvq_sequence** out);
/// Tokens of a layer; KVQ_ALL_LAYERS: of the longest one.
KVQ_API kvq_status kvq_sequence_tokens(const kvq_sequence* sequence, int32_t layer, int32_t* tokens);
/// As kvq_cache_get_layer of its cache.
KVQ_API kvq_status kvq_sequence_get_layer(const kvq_sequence* sequence, int32_t layer, kvq_layer* out);

/// How to attend. NULL instead of a pointer to it: all zero.
typedef struct kvq_attend_options {
    size_t size;
    const kvq_mods* mods;      // NULL: causal
    kvq_executor* executor;    // NULL: the calling thread
    kvq_workspace* workspace;  // NULL: memory of the cache's allocator for the duration of the call
    float*
        lse;  // NULL, or gets the natural log of each row's softmax sum, [q.tokens][q_heads]. Batches: NULL
} kvq_attend_options;

/// One call for each layer of a prompt's chunk, or of a decode step: appends k.tokens tokens and computes out
/// = softmax(q K^T) V for the last q.tokens of them. Attention reads the chunk in 16 bit; pages behind the
/// recent window are quantized afterwards. k: [n][kv_heads][head_dim], v: [n][kv_heads][value_dim], of one
/// type; q: [m][q_heads][head_dim], out: [m][q_heads][value_dim]; q_heads is a multiple of kv_heads.
/// KVQ_ERROR_MEMORY: the sequence is unchanged.
/// A layer of kind KVQ_SHARED takes k and v of 0 tokens, once after each prefill of its owner, and sees the
/// chunk as the owner saw it: the owner's chunk stays in 16 bit until all layers that share it have had
/// theirs, or until the sequence changes otherwise.
KVQ_API kvq_status kvq_sequence_prefill(kvq_sequence* sequence, int32_t layer, const kvq_tensor* k,
                                        const kvq_tensor* v, const kvq_tensor* q, const kvq_tensor* out,
                                        const kvq_attend_options* options);
/// Appends k.tokens tokens to a layer, without queries. A layer of kind KVQ_CROSS_ATTENTION takes all tokens
/// of its own text in one such call, or one kvq_sequence_prefill; queries of kvq_sequence_attend, any number,
/// see all of them.
KVQ_API kvq_status kvq_sequence_append(kvq_sequence* sequence, int32_t layer, const kvq_tensor* k,
                                       const kvq_tensor* v);
/// out = softmax(q K^T) V for the last q.tokens tokens of the layer.
KVQ_API kvq_status kvq_sequence_attend(const kvq_sequence* sequence, int32_t layer, const kvq_tensor* q,
                                       const kvq_tensor* out, const kvq_attend_options* options);

/// Keys or values of one sequence and layer in the memory of another system, in its bytes. Strides: bytes
/// from one token, head and block to the next.
typedef struct kvq_rows {
    const kvq_format* format;  // of rows or records: fp8, q8_0, mla-656, ... (kvq_format_find, _find_rows)
    const void* data;
    ptrdiff_t token_stride, head_stride, block_stride;
    const void*
        scales;  // of formats whose scales lie beside the rows (nvfp4, mxfp4, mla-584, ...); else NULL
    ptrdiff_t scale_token_stride, scale_head_stride, scale_block_stride;
    ptrdiff_t scale_group_stride;  // from one group of channels to the next; 0: one behind the other
    const void* biases;            // of formats that have them (MLX), with the strides of scales; else NULL
} kvq_rows;

typedef struct kvq_row_blocks {
    const int32_t* table;   // NULL: all tokens are one block; else [blocks], blocks of the sequence in order
    int32_t blocks;         // of the table
    int32_t block_tokens;   // of a block
    int32_t memory_blocks;  // of the memory: numbers of the table are below
    int32_t tokens;         // of the sequence
    int32_t kv_heads;
} kvq_row_blocks;

/// out = softmax(q K^T) V for the last q.tokens tokens of a sequence that another system keeps; nothing is
/// copied. Values of latents: the same rows as keys, of which value_dim channels are read. q: [m][q_heads]
/// [head_dim], out: [m][q_heads][value_dim]. Without lists, selected_tokens and skipped_mass.
/// KVQ_ERROR_ARGUMENT for what does not fit, before rows are read, and for scales that are NaN or infinite;
/// out is written in part then.
KVQ_API kvq_status kvq_attend_rows(const kvq_rows* keys, const kvq_rows* values, const kvq_row_blocks* blocks,
                                   const kvq_tensor* q, const kvq_tensor* out,
                                   const kvq_attend_options* options);

/// Tokens [first, first + out.tokens) of such memory, out: [n][kv_heads][dim], rounded once: to read a cache
/// of another system, or to append it to one of kvq. options: mods and lse are NULL. KVQ_ERROR_ARGUMENT as
/// above.
KVQ_API kvq_status kvq_read_rows(const kvq_rows* rows, const kvq_row_blocks* blocks, int32_t first,
                                 const kvq_tensor* out, const kvq_attend_options* options);
/// Writes tokens [first, first + x.tokens) of it, by the rule of the rows' format. The memory is the caller's
/// to write to, and no block stands in the table twice. not_finite: NULL, or gets how many values were NaN,
/// which become the number nearest to zero, or infinite, which saturate.
KVQ_API kvq_status kvq_write_rows(const kvq_rows* rows, const kvq_row_blocks* blocks, int32_t first,
                                  const kvq_tensor* x, int64_t* not_finite,
                                  const kvq_attend_options* options);
/// All tokens of one memory become those of another one, of any format, block size and order, with rows of
/// dim channels: bytes are copied where both formats are the same, else written as by kvq_write_rows. The
/// memory that is written lies apart from the other.
KVQ_API kvq_status kvq_convert_rows(const kvq_rows* from, const kvq_row_blocks* of_from, const kvq_rows* to,
                                    const kvq_row_blocks* of_to, int32_t dim, int64_t* not_finite,
                                    const kvq_attend_options* options);

/// The `best` tokens of a layer of kind KVQ_INDEX for each of the last q.tokens tokens: of those up to itself
/// the ones with the largest sum over heads of weight * max(q . k, 0); of equal ones the earlier first.
/// q: [n][heads][head_dim], weights: [n][heads], out: [n][best] positions, the best first; -1 where there are
/// no more: lists for kvq_mods.listed_tokens. options: mods and lse are NULL.
KVQ_API kvq_status kvq_sequence_select(const kvq_sequence* sequence, int32_t layer, const kvq_tensor* q,
                                       const float* weights, int32_t best, int32_t* out,
                                       const kvq_attend_options* options);

/// Appends drafted tokens; at most 64 wait at a time, until keep. Attend to them under kvq_mods.tree_parents.
/// Until then all other changes are refused but a trim to the accepted tokens or fewer, which removes the
/// draft; an erase to the end is a trim.
KVQ_API kvq_status kvq_sequence_append_draft(kvq_sequence* sequence, int32_t layer, const kvq_tensor* k,
                                             const kvq_tensor* v);
/// Accepts drafted tokens path[0] < path[1] < ..., numbers within the draft, and removes the others, in every
/// layer with a draft.
KVQ_API kvq_status kvq_sequence_keep(kvq_sequence* sequence, const int32_t* path, int32_t count);

/// Removes every token from position `tokens` on, in all layers. With layers of kind KVQ_STATE all layers go
/// back to kvq_sequence_reach. KVQ_ERROR_ARGUMENT below the limit of kvq_sequence_trim_limit; 0 is always
/// possible.
KVQ_API kvq_status kvq_sequence_trim(kvq_sequence* sequence, int32_t tokens);
/// The least number of tokens from which on every trim is possible; 0, unless a layer with a window has freed
/// tokens, or kvq_sequence_retain has dropped some. Where none is, but to 0: one more than the sequence has.
KVQ_API kvq_status kvq_sequence_trim_limit(const kvq_sequence* sequence, int32_t* tokens);
/// Gives back the 16-bit copies of quantized pages (kvq_usage.rollback). A trim into pages that are quantized
/// now then keeps their codes, as one by more than `rollback` tokens does. With kvq_sequence_fork: a sequence
/// to save or send without copies.
KVQ_API kvq_status kvq_sequence_drop_copies(kvq_sequence* sequence);
/// Removes tokens [first, last); those behind them move to the front, keys included. Needs
/// kvq_cache_options.rotary if keys move.
KVQ_API kvq_status kvq_sequence_erase(kvq_sequence* sequence, int32_t first, int32_t last);
/// Moves the rotary positions of the keys of tokens [first, last) by `by`.
KVQ_API kvq_status kvq_sequence_shift(kvq_sequence* sequence, int32_t first, int32_t last, int64_t by);
/// Appends tokens [first, last) of another sequence of the cache (or this one), whose pages are shared.
KVQ_API kvq_status kvq_sequence_splice(kvq_sequence* sequence, const kvq_sequence* other, int32_t first,
                                       int32_t last);

/// How much attention the tokens of a layer get: mass[h * tokens + t], of all tokens of the layer, is the sum
/// of the weights of token t over the queries and query heads of kv head h. q and options.mods as for
/// kvq_sequence_attend, without lists, selected pages and skipped values; options.lse is NULL.
KVQ_API kvq_status kvq_sequence_attention_mass(const kvq_sequence* sequence, int32_t layer,
                                               const kvq_tensor* q, float* mass,
                                               const kvq_attend_options* options);
/// Tokens that a layer does not hold any more: [first, last) behind its sinks, which are the tokens before
/// `first`. Equal unless a window has freed some, or kvq_sequence_retain has dropped some.
KVQ_API kvq_status kvq_sequence_gap(const kvq_sequence* sequence, int32_t layer, int32_t* first,
                                    int32_t* last);
/// Drops all tokens of a layer but those that its kv heads list, as many in each; their memory goes back.
/// kept: [kv_heads][count] positions that ascend and begin with all sinks. They lie side by side in front of
/// the next token then, and count as the sinks and the last count - sinks tokens; the sequence has as many
/// tokens as before. Trims go back to this point. Rows of quantized pages that are not kept whole by every kv
/// head are quantized once more. For layers of full and latent attention.
KVQ_API kvq_status kvq_sequence_retain(kvq_sequence* sequence, int32_t layer, const int32_t* kept,
                                       int32_t count);
/// All tokens of such layers stay 16 bit until kvq_sequence_retain of the layer or kvq_sequence_release:
/// those of a prompt, so that only what is kept of it is quantized.
KVQ_API kvq_status kvq_sequence_hold(kvq_sequence* sequence);
/// Quantizes what kvq_sequence_hold has kept in 16 bit.
KVQ_API kvq_status kvq_sequence_release(kvq_sequence* sequence);

/// Upper bounds of the bytes that the call takes from the pool, for n tokens in every layer.
KVQ_API kvq_status kvq_sequence_append_bytes(const kvq_sequence* sequence, int32_t n, size_t* bytes);
KVQ_API kvq_status kvq_sequence_prefill_bytes(const kvq_sequence* sequence, int32_t n, size_t* bytes);
/// n: at most 64 drafted tokens, and the keep of any path
KVQ_API kvq_status kvq_sequence_draft_bytes(const kvq_sequence* sequence, int32_t n, size_t* bytes);

/// Writes the values of tokens [first, first + out.tokens) of a layer's K or V to out, [n][kv_heads][dim],
/// rounded once.
KVQ_API kvq_status kvq_sequence_dequantize(const kvq_sequence* sequence, int32_t layer, kvq_role role,
                                           int32_t first, const kvq_tensor* out);

/// Bytes of a sequence. A shared page counts in every sequence that holds it.
typedef struct kvq_usage {
    size_t size;
    size_t quantized;    // quantized pages
    size_t window;       // 16- and 32-bit pages
    size_t slack;        // part of `window` that holds no token yet
    size_t rollback;     // 16-bit copies of quantized pages
    size_t bookkeeping;  // page headers and tables
    size_t workspace;    // scratch for quantizing
    size_t bytes;        // the sum of all of the above but `slack`, and `reserved`
    size_t not_finite;   // NaN and infinities that were appended: in 16-bit pages, or quantized
    int32_t tokens;      // of the longest layer
    size_t reserved;     // for the next step: kvq_cache_reserve
    size_t repacked;     // tokens that cuts quantized once more, summed over layers
    size_t state;        // recurrent state and its snapshots; part of `bytes`
} kvq_usage;
KVQ_API kvq_status kvq_sequence_get_usage(const kvq_sequence* sequence, kvq_usage* usage);

/// The pages of a layer in the order of their tokens, to read them; valid until the sequence changes. Writes
/// at most `capacity` entries; count gets the number of all. pages may be NULL if capacity is 0. Keys with
/// a plan of their own are refused: key_statistics is KVQ_NONE then.
KVQ_API kvq_status kvq_sequence_get_pages(const kvq_sequence* sequence, int32_t layer, kvq_page* pages,
                                          int32_t capacity, int32_t* count);

// ---- recurrent state -------------------------------------------------------------------------------------
// Of layers of kind KVQ_STATE (Gated DeltaNet, Mamba, RWKV): the caller's kernels read and write it in place.
// It cannot be cut, so a trim goes back to a snapshot, and the tokens behind it must run again.
// KVQ_ERROR_ARGUMENT where no layer has state.

/// The bytes of part number `part` of a layer, at a multiple of 64 bytes, until the next call that changes
/// the sequence; zeros at first. From this call until kvq_sequence_advance a step is under way: a trim then
/// goes back to a snapshot, also to the present token.
KVQ_API kvq_status kvq_sequence_state(kvq_sequence* sequence, int32_t layer, int32_t part, void** data,
                                      size_t* bytes);
/// The state of all layers has taken n more tokens. Takes a snapshot if one is due; taken: 1 if it did, else
/// 0, also where one was due and had no memory.
KVQ_API kvq_status kvq_sequence_advance(kvq_sequence* sequence, int32_t n, int32_t prompt_ends,
                                        kvq_executor* executor, int32_t* taken);
/// Takes a snapshot. tokens: those that the state has taken.
KVQ_API kvq_status kvq_sequence_snapshot(kvq_sequence* sequence, int32_t tokens, kvq_executor* executor);
/// Gives all snapshots back: a trim then goes to token 0.
KVQ_API kvq_status kvq_sequence_drop_snapshots(kvq_sequence* sequence);
/// The token to which a trim to `tokens` goes: tokens - *reached tokens must run again.
KVQ_API kvq_status kvq_sequence_reach(const kvq_sequence* sequence, int32_t tokens, int32_t* reached);

typedef struct kvq_snapshot {
    int32_t tokens;
    int32_t reserved;
    size_t bytes;  // of its pages, headers included
    double error;  // sqrt(sum (x - x^)^2 / sum x^2) over the quantized parts
} kvq_snapshot;
/// Ascending by tokens. Writes at most `capacity` of them; count gets the number of all. snapshots may be
/// NULL if capacity is 0.
KVQ_API kvq_status kvq_sequence_get_snapshots(const kvq_sequence* sequence, kvq_snapshot* snapshots,
                                              int32_t capacity, int32_t* count);

// ---- batches ---------------------------------------------------------------------------------------------
// Many sequences of one cache in one call: all threads share one list of tasks. Every sequence gets the bits
// that it gets alone.

typedef struct kvq_attend_request {
    const kvq_sequence* sequence;
    kvq_tensor q, out;
    float* lse;            // as in kvq_attend_options
    const kvq_mods* mods;  // NULL: those of the call
} kvq_attend_request;

typedef struct kvq_prefill_request {
    kvq_sequence* sequence;  // every sequence once
    kvq_tensor k, v, q, out;
    float* lse;
    const kvq_mods* mods;
} kvq_prefill_request;

/// As the arguments of kvq_sequence_select.
typedef struct kvq_select_request {
    const kvq_sequence* sequence;
    kvq_tensor q;          // [n][heads][head_dim]
    const float* weights;  // [n][heads]
    int32_t* out;          // [n][best]
} kvq_select_request;

/// One sequence's part of a step over all layers.
typedef struct kvq_step_request {
    kvq_sequence* sequence;  // every sequence once
    int32_t tokens;          // new tokens in every layer
    int32_t q_tokens;        // query tokens in every layer; 0: no attention
    const kvq_mods* mods;    // NULL: those of the call
} kvq_step_request;

/// Takes the memory of a step over all layers ahead of it, for all sequences or for none: pages, tables and
/// options.workspace, which must not be NULL, for q_heads query heads on the threads of options.executor
/// under options.mods. Afterwards kvq_cache_prefill of these sequences with the same options, or
/// kvq_sequence_prefill, _append and _attend one by one, takes no memory: in every layer once, in any order.
/// What is left goes back with the last layer, with the next kvq_cache_reserve of the sequence, or at once
/// with kvq_sequence_release_reserved. In between the sequences must not be changed nor forked.
/// KVQ_ERROR_MEMORY: nothing is reserved.
KVQ_API kvq_status kvq_cache_reserve(kvq_cache* cache, const kvq_step_request* requests, int32_t count,
                                     int32_t q_heads, const kvq_attend_options* options);
KVQ_API kvq_status kvq_sequence_release_reserved(kvq_sequence* sequence);

KVQ_API kvq_status kvq_cache_attend(const kvq_cache* cache, int32_t layer, const kvq_attend_request* requests,
                                    int32_t count, const kvq_attend_options* options);
KVQ_API kvq_status kvq_cache_select(const kvq_cache* cache, int32_t layer, const kvq_select_request* requests,
                                    int32_t count, int32_t best, const kvq_attend_options* options);
/// Chunks of any length beside sequences that decode one token. On an error all sequences are unchanged.
KVQ_API kvq_status kvq_cache_prefill(kvq_cache* cache, int32_t layer, const kvq_prefill_request* requests,
                                     int32_t count, const kvq_attend_options* options);
/// Attention over pages in memory of the caller, in the shape and the formats of a cache: out = softmax(q
/// K^T) V for the last q.tokens of their tokens. The bits are those of a sequence with these pages. A page
/// has at most page_tokens tokens.
KVQ_API kvq_status kvq_cache_attend_pages(const kvq_cache* cache, int32_t layer, const kvq_page* pages,
                                          int32_t count, const kvq_tensor* q, const kvq_tensor* out,
                                          const kvq_attend_options* options);

// ---- other formats for pages that exist ------------------------------------------------------------------

typedef struct kvq_requantize_request {
    size_t size;
    const char *keys, *values;        // listed formats by name; NULL: unchanged
    int32_t first_layer, last_layer;  // layers [first, last); last 0: all
    int32_t first_token, last_token;  // pages that lie wholly in tokens [first, last); last 0: all
    int32_t only_smaller;             // 1: skip pages that would not shrink
    int32_t new_pages;                // 1: pages quantized from now on take these formats, too
    int32_t dry_run;                  // 1: report only
    int32_t reserved;                 // 0
    size_t most_pages;                // in this call; 0: all
    int64_t most_nanoseconds;  // after which no page is begun; 0: no limit. The first page is always done
    kvq_executor* executor;
    kvq_workspace* workspace;
} kvq_requantize_request;

typedef struct kvq_requantize_report {
    size_t size;
    size_t pages, pages_left;                      // converted; of the request, but not yet converted
    size_t bytes_before, bytes_after, bytes_peak;  // in the pool
    size_t bytes_freed;
    size_t workspace;  // scratch during the call
} kvq_requantize_report;

/// Changes the format of pages; pages that the sequences share stay shared. report may be NULL.
/// KVQ_ERROR_MEMORY: the budget has no room for one more page per thread; pages that were converted until
/// then stay so.
KVQ_API kvq_status kvq_cache_requantize(kvq_cache* cache, kvq_sequence* const* sequences, int32_t count,
                                        const kvq_requantize_request* request, kvq_requantize_report* report);

/// From `age` tokens behind the newest one on, pages have these formats.
typedef struct kvq_tier {
    int32_t age;
    int32_t reserved;           // 0
    const char *keys, *values;  // listed formats by name; NULL: the first one
} kvq_tier;

typedef struct kvq_step_down_policy {
    size_t size;
    const kvq_tier* tiers;  // ages ascending, formats from wide to narrow
    int32_t tier_count;
    int32_t first_layers_kept, last_layers_kept;  // that no tier touches
    int32_t reserved;                             // 0
    size_t byte_budget;  // of the pool: beyond it the oldest pages go down further; 0: none
} kvq_step_down_policy;

typedef struct kvq_step_down_report {
    size_t size;
    size_t pages;                                  // that changed
    size_t bytes_before, bytes_after, bytes_peak;  // in the pool
    int32_t fits;                                  // 0: the budget is still exceeded
} kvq_step_down_report;

/// Applies a policy, between decode steps. report and executor may be NULL. KVQ_ERROR_MEMORY: as
/// kvq_cache_requantize.
KVQ_API kvq_status kvq_cache_step_down(kvq_cache* cache, kvq_sequence* const* sequences, int32_t count,
                                       const kvq_step_down_policy* policy, kvq_executor* executor,
                                       kvq_step_down_report* report);
/// A dry run: the report of kvq_cache_step_down with this executor, byte for byte. Nothing changes, and a
/// pool without room is no error. executor may be NULL.
KVQ_API kvq_status kvq_cache_plan_step_down(const kvq_cache* cache, kvq_sequence* const* sequences,
                                            int32_t count, const kvq_step_down_policy* policy,
                                            kvq_executor* executor, kvq_step_down_report* report);

// ---- estimates -------------------------------------------------------------------------------------------

typedef struct kvq_footprint_query {
    size_t size;
    int32_t sequences;                   // 0: 1
    int32_t q_heads;                     // 0: without the workspace of attention
    int32_t q_tokens;                    // 0: 1
    int32_t threads;                     // 0: 1
    int32_t chunk;                       // most tokens of one prefill; 0: append only
    int32_t cross_tokens;                // tokens of every layer of kind KVQ_CROSS_ATTENTION
    const kvq_step_down_policy* policy;  // NULL: none
} kvq_footprint_query;

typedef struct kvq_footprint {
    size_t size;
    size_t quantized, window, rollback, bookkeeping, workspace;  // as kvq_usage
    size_t attention;                                            // workspace of one attention call
    size_t total;                                                // the sum of the above, and of `unused`
    size_t transient;  // upper bound of what a call adds temporarily
    size_t unused;     // of a byte budget that was allocated at once: bytes without a page
    size_t state;  // as kvq_usage, with the snapshots of kvq_cache_options.snapshot_every; part of `total`
} kvq_footprint;

/// Bytes of sequences of `tokens` tokens, equal to what will be allocated. query may be NULL.
KVQ_API kvq_status kvq_cache_get_footprint(const kvq_cache* cache, int32_t tokens,
                                           const kvq_footprint_query* query, kvq_footprint* footprint);
/// The longest context that fits `budget` bytes at every length up to it; -1: not even an empty one. query
/// may be NULL.
KVQ_API kvq_status kvq_cache_longest_context(const kvq_cache* cache, size_t budget,
                                             const kvq_footprint_query* query, int32_t* tokens);

/// What an engine asks of a cache.
typedef struct kvq_budget_query {
    size_t size;
    int32_t tokens;     // most tokens of a sequence
    int32_t sequences;  // of so many tokens each; 0: 1
    int32_t chunk;      // most new tokens of a sequence in one step; 0: 1
    /// Most pages of a sequence and layer that show only a part of their tokens at a time: a trim by more
    /// than `rollback` tokens leaves at most one; kvq_sequence_erase, _shift and _splice leave at most three
    /// each.
    int32_t cuts;
    int32_t cross_tokens;  // most tokens of every layer of kind KVQ_CROSS_ATTENTION
} kvq_budget_query;

/// The least byte_budget with which every step succeeds (kvq_cache_reserve of all sequences at once, and
/// steps without it), before there is a cache; options.byte_budget does not matter. With cuts it is an upper
/// bound. A draft takes kvq_sequence_draft_bytes more; with `preallocate` free ranges that fit no page come
/// on top. KVQ_ERROR_ARGUMENT as kvq_cache_create.
KVQ_API kvq_status kvq_get_budget(const kvq_cache_options* options, const kvq_budget_query* query,
                                  size_t* bytes);

// ---- saved sequences and pages on the wire ---------------------------------------------------------------

/// Takes all bytes and returns 0; any other result is KVQ_ERROR_CALLBACK.
typedef int32_t (*kvq_write)(void* user, const void* data, size_t bytes);
/// Writes up to `bytes` bytes to `to` and returns how many; 0: the end.
typedef size_t (*kvq_read)(void* user, void* to, size_t bytes);

typedef struct kvq_save_options {
    size_t size;
    const char* model;  // any text by which the engine recognizes its model. NULL: "" to save, any to restore
    int32_t convert;    // restore: 1: pages may change to the formats and the layout of this cache
    int32_t upper_only;  // save: 1: of pages with two planes (format nested8) the upper one alone; restore: 0
} kvq_save_options;

/// Writes a sequence as a safetensors file (docs/guide/save.md). options may be NULL. KVQ_ERROR_UNSUPPORTED
/// without nlohmann-json.
KVQ_API kvq_status kvq_sequence_save(const kvq_sequence* sequence, const kvq_save_options* options,
                                     kvq_write write, void* user);
/// The same to a file, which is renamed when it is complete.
KVQ_API kvq_status kvq_sequence_save_file(const kvq_sequence* sequence, const kvq_save_options* options,
                                          const char* path);
KVQ_API kvq_status kvq_sequence_restore(kvq_cache* cache, const kvq_save_options* options, kvq_read read,
                                        void* user, kvq_sequence** out);
KVQ_API kvq_status kvq_sequence_restore_file(kvq_cache* cache, const kvq_save_options* options,
                                             const char* path, kvq_sequence** out);

/// Writes the pages of a layer, one message per call of `write`, to a process that decodes on. The first
/// layer of kind KVQ_STATE sends the state of all of them, as one message.
KVQ_API kvq_status kvq_sequence_send_pages(const kvq_sequence* sequence, int32_t layer, kvq_write write,
                                           void* user);
/// Collects the messages of one sequence, in any order. Not for several threads at once.
KVQ_API kvq_status kvq_receiver_create(kvq_cache* cache, kvq_receiver** out);
KVQ_API kvq_status kvq_receiver_free(kvq_receiver* receiver);
/// Before the first message: pages may change to the formats of this cache (kvq_save_options::convert).
/// sinks, recent, page_tokens: of the sender's cache; -1: as of this one. Where they differ, tokens are
/// dequantized and appended again by kvq_receiver_finish, which needs memory for both.
KVQ_API kvq_status kvq_receiver_convert(kvq_receiver* receiver, int32_t sinks, int32_t recent,
                                        int32_t page_tokens);
/// Takes one whole message.
KVQ_API kvq_status kvq_receiver_accept(kvq_receiver* receiver, const void* message, size_t bytes);
/// The sequence, once every layer has `tokens` tokens (-1: as many as the messages say). The receiver is then
/// empty, and keeps its pages if the call fails.
KVQ_API kvq_status kvq_receiver_finish(kvq_receiver* receiver, int32_t tokens, kvq_sequence** out);

// ---- prefix cache ----------------------------------------------------------------------------------------
// Sequences by their token ids. All functions may be called from any thread.

enum {
    KVQ_MATCH_EXACT = 0,
    KVQ_MATCH_SUPERSEQUENCE = 1,  // a longer entry, trimmed
    KVQ_MATCH_PREFIX = 2,
    KVQ_MATCH_LCP = 3,  // the longest common prefix, trimmed
    KVQ_MISS = 4,
    KVQ_MISS_SHORT_PREFIX = 5,
    KVQ_MISS_SHORT_LCP = 6
};
enum { KVQ_STORED = 0, KVQ_STORE_DUPLICATE = 1, KVQ_STORE_TOO_LARGE = 2 };

typedef struct kvq_prefix_cache_options {
    size_t size;
    size_t byte_limit;            // for the pages of all entries; 0: none
    int32_t max_entries;          // 0: 1000
    int32_t min_prefix_tokens;    // a shorter common prefix is a miss; 0: 128; KVQ_NONE
    int32_t min_quantize_tokens;  // shorter entries keep their formats; 0: 256; KVQ_NONE
    int32_t reserved;             // 0
    const char *keys,
        *values;  // listed formats to which entries are requantized where that is smaller; both NULL: none
} kvq_prefix_cache_options;

/// options may be NULL.
KVQ_API kvq_status kvq_prefix_cache_create(kvq_cache* cache, const kvq_prefix_cache_options* options,
                                           kvq_prefix_cache** out);
KVQ_API kvq_status kvq_prefix_cache_free(kvq_prefix_cache* store);
/// What a fetch would find: how (KVQ_MATCH_EXACT, ...), and the number of leading tokens that need not be
/// computed.
KVQ_API kvq_status kvq_prefix_cache_lookup(const kvq_prefix_cache* store, const int32_t* tokens,
                                           int32_t count, int32_t* match, int32_t* found);
/// A sequence that holds as many of the first tokens as the store has; empty on a miss.
KVQ_API kvq_status kvq_prefix_cache_fetch(kvq_prefix_cache* store, const int32_t* tokens, int32_t count,
                                          int32_t* match, int32_t* found, kvq_sequence** out);
/// Stores the first `count` tokens of a sequence, which does not change. outcome: KVQ_STORED, ...
KVQ_API kvq_status kvq_prefix_cache_store(kvq_prefix_cache* store, const int32_t* tokens, int32_t count,
                                          const kvq_sequence* sequence, int32_t* outcome);
/// Removes the entry with exactly these tokens. erased: 1, or 0 if there is none.
KVQ_API kvq_status kvq_prefix_cache_erase(kvq_prefix_cache* store, const int32_t* tokens, int32_t count,
                                          int32_t* erased);
KVQ_API kvq_status kvq_prefix_cache_clear(kvq_prefix_cache* store);
/// Evicts the least recently used entries until the store holds `bytes` less. released: by how much its bytes
/// fell.
KVQ_API kvq_status kvq_prefix_cache_release(kvq_prefix_cache* store, size_t bytes, size_t* released);
/// kvq_cache_step_down for all entries and the given live sequences together.
KVQ_API kvq_status kvq_prefix_cache_step_down(kvq_prefix_cache* store, kvq_sequence* const* live,
                                              int32_t count, const kvq_step_down_policy* policy,
                                              kvq_executor* executor, kvq_step_down_report* report);

typedef struct kvq_prefix_cache_statistics {
    size_t size;
    size_t fetches[7];  // by match
    size_t tokens_saved, stored, duplicates, rejections, replaced, evictions;
    size_t entries, bytes;  // now
} kvq_prefix_cache_statistics;
KVQ_API kvq_status kvq_prefix_cache_get_statistics(const kvq_prefix_cache* store,
                                                   kvq_prefix_cache_statistics* statistics);

// ---- ring ------------------------------------------------------------------------------------------------

typedef struct kvq_ring_options {
    size_t size;
    int32_t window;  // a query attends to itself, the window - 1 tokens before it, and the sinks of the cache
    int32_t slack;   // a trim to so many tokens less than the most so far is always possible; 0: 16; KVQ_NONE
    int32_t
        sinks_in_cache;  // 1: sinks move along, directly before the window; needs kvq_cache_options.rotary
    int32_t reserved;    // 0
    // tokens of the text before the first one that the sequence holds behind its sinks; 0: it begins there
    int64_t first_token;
} kvq_ring_options;

/// A ring over a fork of the sequence, which has the same number of tokens in every layer, possibly none.
/// Positions count from the first token ever appended, in 64 bits. Pages that no query attends to any more
/// are freed.
KVQ_API kvq_status kvq_ring_create(const kvq_sequence* sequence, const kvq_ring_options* options,
                                   kvq_ring** out);
KVQ_API kvq_status kvq_ring_free(kvq_ring* ring);
KVQ_API kvq_status kvq_ring_fork(const kvq_ring* ring, kvq_ring** out);
/// As the functions of a sequence, over the window. options.mods must not have a window.
KVQ_API kvq_status kvq_ring_prefill(kvq_ring* ring, int32_t layer, const kvq_tensor* k, const kvq_tensor* v,
                                    const kvq_tensor* q, const kvq_tensor* out,
                                    const kvq_attend_options* options);
KVQ_API kvq_status kvq_ring_append(kvq_ring* ring, int32_t layer, const kvq_tensor* k, const kvq_tensor* v);
KVQ_API kvq_status kvq_ring_attend(const kvq_ring* ring, int32_t layer, const kvq_tensor* q,
                                   const kvq_tensor* out, const kvq_attend_options* options);
KVQ_API kvq_status kvq_ring_append_draft(kvq_ring* ring, int32_t layer, const kvq_tensor* k,
                                         const kvq_tensor* v);
KVQ_API kvq_status kvq_ring_keep(kvq_ring* ring, const int32_t* path, int32_t count);
KVQ_API kvq_status kvq_ring_trim(kvq_ring* ring, int64_t tokens);
/// Tokens appended so far to a layer (KVQ_ALL_LAYERS: the longest one), and the position from which on every
/// token is held. Each of the two may be NULL.
KVQ_API kvq_status kvq_ring_tokens(const kvq_ring* ring, int32_t layer, int64_t* tokens,
                                   int64_t* first_token);
/// The held tokens as a sequence, to be freed: a fork, to save, to measure or to dequantize.
KVQ_API kvq_status kvq_ring_held(const kvq_ring* ring, kvq_sequence** out);

// ---- sequences by id -------------------------------------------------------------------------------------
// Sequences by id and tokens by position, as llama.cpp's memory has them. A token may be in several of them;
// those with the same tokens share their pages until these differ. Positions ascend within a sequence, and
// masks count tokens, not positions. One call at a time for a table.
// id -1: every id, where a comment says so. Positions are [first, last); first < 0: 0; last < 0: no end.

/// The tokens of a step, as rows of its tensors.
typedef struct kvq_token_batch {
    size_t size;
    const int32_t* positions;   // [tokens], behind those that their ids have
    const int32_t* id_counts;   // [tokens], at least 1 each; NULL: 1 each
    const int32_t* const* ids;  // [tokens][id_counts[i]]; a token attends as one of its first id
    int32_t tokens;
    int32_t reserved;  // 0
} kvq_token_batch;

/// Ids 0 to ids - 1, all empty, at most 2^20. Not for caches with layers of KVQ_CROSS and KVQ_STATE.
KVQ_API kvq_status kvq_sequence_table_create(kvq_cache* cache, int32_t ids, kvq_sequence_table** out);
KVQ_API kvq_status kvq_sequence_table_free(kvq_sequence_table* table);
/// There are ids 0 to ids - 1 now; fewer than before: nothing changes.
KVQ_API kvq_status kvq_sequence_table_grow(kvq_sequence_table* table, int32_t ids);

/// Begins a step: takes the memory of all layers, as kvq_cache_reserve with the same options, and gives the
/// tokens their positions. A step that is still open ends first.
KVQ_API kvq_status kvq_sequence_table_begin(kvq_sequence_table* table, const kvq_token_batch* batch,
                                            int32_t q_heads, const kvq_attend_options* options);
/// One layer of the step, as kvq_sequence_prefill, over the rows of the batch.
KVQ_API kvq_status kvq_sequence_table_prefill(kvq_sequence_table* table, int32_t layer, const kvq_tensor* k,
                                              const kvq_tensor* v, const kvq_tensor* q, const kvq_tensor* out,
                                              const kvq_attend_options* options);
/// Ends the step. Where a layer has not got its tokens, the step is taken back: KVQ_ERROR_ARGUMENT.
KVQ_API kvq_status kvq_sequence_table_end(kvq_sequence_table* table);
/// The tokens of an open step go.
KVQ_API kvq_status kvq_sequence_table_take_back(kvq_sequence_table* table);

/// Removes tokens of an id, or of every id; the others keep their positions. From the middle this needs
/// kvq_cache_options.rotary; from the end it is a trim.
KVQ_API kvq_status kvq_sequence_table_remove(kvq_sequence_table* table, int32_t id, int32_t first,
                                             int32_t last);
/// Id `to` gets these tokens of `from` as well, behind its own ones. A part that does not begin with the
/// first token, or goes behind others, needs kvq_cache_options.rotary.
KVQ_API kvq_status kvq_sequence_table_copy(kvq_sequence_table* table, int32_t from, int32_t to, int32_t first,
                                           int32_t last);
/// Removes all tokens that are not of this id.
KVQ_API kvq_status kvq_sequence_table_keep(kvq_sequence_table* table, int32_t id);
/// Adds `by` to positions of an id, or of every id. Needs kvq_cache_options.rotary. Tokens whose position
/// would be negative go; positions that would no longer ascend are refused.
KVQ_API kvq_status kvq_sequence_table_shift(kvq_sequence_table* table, int32_t id, int32_t first,
                                            int32_t last, int32_t by);
KVQ_API kvq_status kvq_sequence_table_clear(kvq_sequence_table* table);

/// The positions of an id, ascending. Writes at most `capacity` of them; count gets the number of all.
/// positions may be NULL if capacity is 0.
KVQ_API kvq_status kvq_sequence_table_positions(const kvq_sequence_table* table, int32_t id,
                                                int32_t* positions, int32_t capacity, int32_t* count);
/// The tokens of an id as a sequence, to be freed: a fork.
KVQ_API kvq_status kvq_sequence_table_fork(const kvq_sequence_table* table, int32_t id, kvq_sequence** out);

typedef struct kvq_table_usage {
    size_t size;
    size_t tokens;  // that are stored; those of pages that sequences share count once
    size_t bytes;   // of the pages of the cache, and of positions
    int32_t ids;
    int32_t can_shift;  // 1: the cache has rotary
} kvq_table_usage;
KVQ_API kvq_status kvq_sequence_table_get_usage(const kvq_sequence_table* table, kvq_table_usage* usage);

/// Writes the sequence of an id, or all of them. An open step ends first.
KVQ_API kvq_status kvq_sequence_table_write(kvq_sequence_table* table, int32_t id, kvq_write write,
                                            void* user);
/// The bytes that kvq_sequence_table_write writes.
KVQ_API kvq_status kvq_sequence_table_state_bytes(kvq_sequence_table* table, int32_t id, size_t* bytes);
/// Replaces the sequence of an id, or all of them, by what was written. Needs the memory of both.
KVQ_API kvq_status kvq_sequence_table_read(kvq_sequence_table* table, int32_t id, kvq_read read, void* user);

// ---- statistics ------------------------------------------------------------------------------------------
// Of the first tokens of a text, a few hundred: keys of mix4 to mix6, low3 and low2 get channel widths from
// them, hi6 to low2 error feedback. A cache may take those of its own first tokens: list keys "fp16"; after
// some hundred tokens add the sequence (and its queries), find "mix4" with these statistics,
// kvq_cache_add_format, kvq_cache_commit_to, and kvq_cache_requantize with only_smaller and new_pages.

/// products: 1 to sum q q^T as well, which error feedback needs (head_dim^2 doubles per layer and kv head).
KVQ_API kvq_status kvq_statistics_create(int32_t layers, int32_t kv_heads, int32_t head_dim, int32_t products,
                                         kvq_statistics** out);
KVQ_API kvq_status kvq_statistics_free(kvq_statistics* statistics);
/// Keys of consecutive tokens, [n][kv_heads][head_dim]. Whole groups of 64 tokens count, and a last one of at
/// least 16.
KVQ_API kvq_status kvq_statistics_add_keys(kvq_statistics* statistics, int32_t layer, const kvq_tensor* k);
/// Keys of tokens [first, first + count) of all layers of a sequence, as its pages give them.
KVQ_API kvq_status kvq_statistics_add_sequence(kvq_statistics* statistics, const kvq_sequence* sequence,
                                               int32_t first, int32_t count);
/// Queries, [n][q_heads][head_dim].
KVQ_API kvq_status kvq_statistics_add_queries(kvq_statistics* statistics, int32_t layer, const kvq_tensor* q);
KVQ_API kvq_status kvq_statistics_save(const kvq_statistics* statistics, kvq_write write, void* user);
KVQ_API kvq_status kvq_statistics_load(const void* data, size_t bytes, kvq_statistics** out);

#ifdef __cplusplus
}
#endif

#endif
