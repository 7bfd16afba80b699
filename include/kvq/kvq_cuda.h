// The CUDA half of kvq in C: caches in device memory behind handles, formats by name, steps of a batch on the
// caller's streams. C99, and C++98 as well.
//
//   kvq_cuda_cache_options o; KVQ_INIT(o);
//   o.layers = 32; o.kv_heads = 8; o.head_dim = 128; o.formats = "std4"; o.max_batch = 16;
//   kvq_cuda_cache* cache; kvq_cuda_sequence* s;
//   if (kvq_cuda_cache_create(&o, stream, &cache) != KVQ_OK) puts(kvq_last_error());
//   kvq_cuda_sequence_create(cache, &s);
//   kvq_cuda_cache_begin_prompt(cache, s, n, stream);                then for every layer
//                                                                    kvq_cuda_cache_prefill
//   kvq_cuda_cache_begin_step(cache, &s, 1, 1, stream);              then for every layer
//                                                                    kvq_cuda_cache_prefill
//
// The program links kvq::library, built with the CMake option KVQ_LIBRARY_CUDA. docs/guide/c.md is the guide.
//
// Conventions are those of kvq.h: statuses, kvq_last_error(), KVQ_INIT, handles. Also: Streams are
// cudaStream_t, NULL is the default stream. They belong to the device that was current when the cache was
// made; calls make it the current one and set it back. Tensors are in device memory, of the cache's window
// type, [rows x tokens][heads][dim]: the tokens of row 0, of row 1, ... Their data must live until the stream
// has passed the call. Nothing waits for the stream, except where a pool grows, for a prompt that is longer
// than all before it, for the statistics of a new cache, and in the functions that say so. What follows a
// begin takes lengths and page numbers from device memory: the calls of a step can be captured in a CUDA
// graph and replayed after later begins (kvq_cuda_cache_graph_id). Errors of kernels arrive later, as with
// every launch, as KVQ_ERROR_CUDA.
// Threads: calls on one cache and its sequences wait for each other. One thread makes a begin and the calls
// of its layers, on one stream.
#ifndef KVQ_KVQ_CUDA_H
#define KVQ_KVQ_CUDA_H

#include "kvq.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KVQ_ERROR_CUDA = 9 };  // the CUDA runtime reported an error; the message names it

typedef struct kvq_cuda_cache kvq_cuda_cache;
typedef struct kvq_cuda_sequence kvq_cuda_sequence;
typedef struct kvq_cuda_prefix_cache kvq_cuda_prefix_cache;

// ---- formats ---------------------------------------------------------------------------------------------
// Kernels are compiled for pairs of formats and head sizes, both window types, pages of 128 tokens: int8,
// kivi-4-g64, kivi-2-g64 and std4 with heads of 64 and 128 channels. fp16 and bf16 are there for all of them:
// nothing is quantized. The CMake options KVQ_CUDA_FORMATS, KVQ_CUDA_HEAD_DIMS and KVQ_CUDA_PAGE_TOKENS
// choose others, KVQ_CUDA_ALIBI formats that have kernels for ALiBi as well. "int8/std4" is the name of int8
// keys with std4 values.

/// Formats that may be in one cache, and its geometry.
typedef struct kvq_cuda_format_entry {
    size_t size;
    const char* formats;            // names, separated by commas; lives as long as the program
    int32_t head_dim, page_tokens;  // of keys and of values
    kvq_dtype window;               // KVQ_FP16 or KVQ_BF16
    int32_t alibi;                  // 1: for caches with kvq_cuda_cache_options.alibi
} kvq_cuda_format_entry;

KVQ_API kvq_status kvq_cuda_format_count(int32_t* count);
/// index: 0 to count - 1
KVQ_API kvq_status kvq_cuda_format_list(int32_t index, kvq_cuda_format_entry* entry);

// ---- caches ----------------------------------------------------------------------------------------------

/// Device memory of the caller.
typedef struct kvq_cuda_allocator {
    size_t size;
    /// 256-byte aligned memory of the cache's device, or NULL: the call that needs it fails with
    /// KVQ_ERROR_MEMORY.
    void* (*allocate)(void* user, size_t bytes);
    void (*deallocate)(void* user, void* memory, size_t bytes);
    void* user;
} kvq_cuda_allocator;

typedef struct kvq_cuda_cache_options {
    size_t size;
    int32_t layers, kv_heads, head_dim;
    int32_t page_tokens;  // 0: 128
    /// Names, separated by commas. Pages are quantized to the first one; kvq_cuda_cache_requantize and
    /// _step_down take all. "fp16" or "bf16" alone: all tokens stay in the window.
    const char* formats;
    const char* window;   // fp16 or bf16: the type of the window, and of k, v, q and out; NULL: fp16
    int32_t sinks;        // first tokens, always in the window type; 0: 4; KVQ_NONE
    int32_t recent;       // at least so many newest tokens are in the window type; 0: 64; KVQ_NONE
    int32_t rollback;     // a trim by up to so many tokens is exact; 0: 16; KVQ_NONE
    int32_t max_batch;    // sequences of one step; 0: 1
    int32_t max_tokens;   // of one sequence; 0: 32768
    int32_t step_tokens;  // new tokens of a step for every sequence, at most page_tokens and recent; 0: 1
    /// The most drafted tokens of a sequence, 0 to the smallest of 64, page_tokens and recent; 0: no drafts.
    int32_t draft_tokens;
    int32_t pool_tokens;     // quantized pages for so many tokens are allocated at once,
    int32_t pool_sequences;  // and 16-bit pages for so many sequences
    int32_t fixed;           // 1: pools do not grow; 0: they do, in a begin, which then waits for the stream
    const kvq_statistics* statistics;     // NULL, or for all keys whose format takes them
    const kvq_cuda_allocator* allocator;  // NULL: cudaMalloc. Functions and `user` are kept
    /// 1: attention takes kvq_cuda_attend_options.alibi_slopes, always.
    int32_t alibi;
    /// Of layers of KVQ_LATENT, and of steps over keys that have moved, at most: memory for so many; 0: 128
    int32_t query_heads;
    /// NULL, or [layers] of any kind; kv_heads and head_dim are 0 then. Layers of one shape, window and
    /// formats share launches. A layer with a window frees pages that no query sees any more, and hides what
    /// its window hides.
    const kvq_layer* layer_list;
    /// NULL, or [layers]: formats of keys and values of a layer, of `formats` or others; NULL in it: the
    /// first one. Formats that no layer has are for kvq_cuda_cache_requantize and _step_down.
    const kvq_layer_formats* layer_formats;
    const kvq_state_part* state_parts;  // NULL, or [state_part_count]: of all layers of kind KVQ_STATE
    size_t snapshot_bytes;              // as in kvq_cache_options, as the next three
    int32_t state_part_count;
    int32_t snapshot_every;
    /// One at the end of every kvq_cuda_cache_begin_prompt; 0: 1; KVQ_NONE, where prompts come in parts
    int32_t snapshot_prompt_end;
    int32_t pool_states;   // states allocated at once: one for a sequence, and one for each of its snapshots
    int32_t rotary_count;  // 1: for all layers; or `layers`
    const kvq_rotary* rotary;  // NULL: keys cannot move. Without functions
    int32_t listed_tokens;     // of a query, in lists and selections: memory for so many
    /// Of each layer and kv head: device memory for so many tokens, those that attention with selected_tokens
    /// has read last. All quantized pages of layers that see all tokens lie in pinned host memory then, in a
    /// pool of pool_tokens; needs `fixed` and listed_tokens. 0: in device memory.
    int32_t resident_tokens;
    /// As in kvq_cache_options, for keys that `statistics` are not given for: KVQ_OWN_STATISTICS, ...;
    /// KVQ_NONE. Sequences whose keys get a plan are 16 bit up to statistics_tokens; 0: 512; at least 64
    int32_t key_statistics;
    int32_t statistics_tokens;
    /// MiB at most, for prompts on sm_90a: a layer's pages as half floats, in the memory of prompts. 0: what
    /// they can use, up to 1/128 of the device's memory or what one kv head needs; KVQ_NONE: none
    int32_t prompt_scratch_mib;
} kvq_cuda_cache_options;

/// A cache on the current device. KVQ_ERROR_ARGUMENT for an impossible size, or for formats that were not
/// compiled for this head_dim; of layers of KVQ_LATENT the library needs KVQ_CUDA_LATENTS, and their keys are
/// in such as "kivi-4-g64-fp16x64"; of KVQ_INDEX it needs KVQ_CUDA_INDEXES, and their keys are in "int8"
/// or "e4m3". KVQ_ERROR_UNSUPPORTED for a layer of another kind.
KVQ_API kvq_status kvq_cuda_cache_create(const kvq_cuda_cache_options* options, void* stream,
                                         kvq_cuda_cache** out);
/// A freed cache stays in memory until its last sequence is freed. All launches must have ended before the
/// later of the two calls.
KVQ_API kvq_status kvq_cuda_cache_free(kvq_cuda_cache* cache);

/// The options in force, and bytes of device memory.
typedef struct kvq_cuda_cache_info {
    size_t size;
    int32_t layers, kv_heads, head_dim;  // the latter two 0 where layers with keys differ
    int32_t page_tokens, sinks, recent, rollback;
    int32_t max_batch, max_tokens, step_tokens, draft_tokens;
    int32_t device;
    size_t quantized;  // pages in use, of all formats
    size_t window;     // 16-bit pages in use, sinks included
    size_t unused;     // pages that no sequence holds
    size_t tables;     // and lengths, plans, matrices of feedback
    size_t workspace;
    size_t prompt;  // one layer of the longest prompt so far in 16 bit, or its scratch, and its slots
    size_t bytes;   // the sum of all, with `state`: what the allocator was asked for
    size_t state;   // states of sequences and of snapshots, in use
} kvq_cuda_cache_info;
KVQ_API kvq_status kvq_cuda_cache_get_info(const kvq_cuda_cache* cache, kvq_cuda_cache_info* info);
/// Kind and shape of a layer, value_dim filled in.
KVQ_API kvq_status kvq_cuda_cache_get_layer(const kvq_cuda_cache* cache, int32_t layer, kvq_layer* out);
/// NaN and infinities that were quantized so far, [layers]. Waits for the stream.
KVQ_API kvq_status kvq_cuda_cache_not_finite(const kvq_cuda_cache* cache, uint32_t* by_layer, int32_t layers,
                                             void* stream);

// ---- sequences -------------------------------------------------------------------------------------------
// Functions that change a sequence end the step that has begun: its layers are refused from then on.

KVQ_API kvq_status kvq_cuda_sequence_create(kvq_cuda_cache* cache, kvq_cuda_sequence** out);
KVQ_API kvq_status kvq_cuda_sequence_free(kvq_cuda_sequence* sequence);
/// A sequence with the same tokens. Quantized pages are shared, 16-bit pages are copied.
KVQ_API kvq_status kvq_cuda_sequence_fork(const kvq_cuda_sequence* sequence, void* stream,
                                          kvq_cuda_sequence** out);
/// Tokens, drafted ones included.
KVQ_API kvq_status kvq_cuda_sequence_tokens(const kvq_cuda_sequence* sequence, int32_t* tokens);
/// Bytes of its pages in all layers, shared ones included.
KVQ_API kvq_status kvq_cuda_sequence_bytes(const kvq_cuda_sequence* sequence, size_t* bytes);
/// The same by kind, as kvq_sequence_get_usage; not_finite is 0 (kvq_cuda_cache_not_finite).
KVQ_API kvq_status kvq_cuda_sequence_get_usage(const kvq_cuda_sequence* sequence, kvq_usage* usage);
/// Removes every token from position `tokens` on. Exact within `rollback` tokens. After a deeper trim the
/// quantized page that it ends in keeps its bytes and hides the tokens behind, and new tokens begin a page. A
/// sequence has room for 64 such pages beyond max_tokens. A prompt that some layer does not have yet is taken
/// back within `rollback`, or with the page of its first token. With layers with state it goes to the token
/// that kvq_cuda_sequence_reach says. KVQ_ERROR_ARGUMENT where a layer with a window has freed what the next
/// token sees; from the limit on every number is possible, and 0.
KVQ_API kvq_status kvq_cuda_sequence_trim(kvq_cuda_sequence* sequence, int32_t tokens);
KVQ_API kvq_status kvq_cuda_sequence_trim_limit(const kvq_cuda_sequence* sequence, int32_t* tokens);
/// As kvq_sequence_erase and _shift: pages keep their bytes, and attention turns queries for keys that have
/// moved. KVQ_ERROR_ARGUMENT for a cut within a 16-bit page or the sinks, unless the erase reaches the end:
/// then it is a trim; without kvq_cuda_cache_options.rotary.
KVQ_API kvq_status kvq_cuda_sequence_erase(kvq_cuda_sequence* sequence, int32_t first, int32_t last);
KVQ_API kvq_status kvq_cuda_sequence_shift(kvq_cuda_sequence* sequence, int32_t first, int32_t last,
                                           int64_t by);
/// As kvq_sequence_splice: tokens [first, last) of another sequence, or of the same one, follow and share its
/// quantized pages. What the sequence has is quantized: it must end with a page, or be empty.
KVQ_API kvq_status kvq_cuda_sequence_splice(kvq_cuda_sequence* sequence, const kvq_cuda_sequence* other,
                                            int32_t first, int32_t last, void* stream);
/// For text without an end, as kvq_ring: gives back the pages behind the sinks that no query with this window
/// sees, from the next token on or behind a trim by `rollback`. The tokens behind the `dropped` ones have
/// earlier positions; keys stay as they were rotated, at positions of the text. move_sinks: 1 if the sinks
/// stay directly before the window, 0 if at their positions in the text. Attention is given the window.
KVQ_API kvq_status kvq_cuda_sequence_drop_front(kvq_cuda_sequence* sequence, int32_t window,
                                                int32_t move_sinks, int32_t* dropped);

// ---- recurrent state
// ------------------------------------------------------------------------------------------------- Of layers
// of kind KVQ_STATE: the caller's kernels read and write it in place, between a begin and the next one. A
// begin counts its tokens as taken and takes the snapshots that are due; it copies a state that a snapshot or
// a fork holds, too, and quantizes snapshots whose parts say so. A step that fails is taken back by a trim.
// Drafts are refused. Offloading quantizes exact snapshots if the cache on the CPU does.

/// A part for the rows of the step: that of row b begins at data + row_slots[b] * slot_bytes. A slot of -1 is
/// a row that is not there.
typedef struct kvq_cuda_state_view {
    size_t size;
    // device memory, a multiple of 64, or NULL without slots; stays as long as kvq_cuda_cache_graph_id does
    void* data;
    size_t slot_bytes;
    size_t bytes;              // of one sequence
    const int32_t* row_slots;  // device memory, [rows]
    int32_t slot_count;        // slots that there is memory for
    int32_t rows;
} kvq_cuda_state_view;
/// Part number `part` of a layer, behind a begin with new tokens. Zeros at first.
KVQ_API kvq_status kvq_cuda_cache_state(kvq_cuda_cache* cache, int32_t layer, int32_t part,
                                        kvq_cuda_state_view* view);
/// The same of one sequence, until the next call that changes it. data gets NULL for zeros. To be written
/// behind a begin only.
KVQ_API kvq_status kvq_cuda_sequence_state(kvq_cuda_sequence* sequence, int32_t layer, int32_t part,
                                           void** data, size_t* bytes);
/// Keeps the state at the sequence's tokens, with what the step that has begun makes of it. Copies nothing:
/// the next begin does.
KVQ_API kvq_status kvq_cuda_sequence_snapshot(kvq_cuda_sequence* sequence);
KVQ_API kvq_status kvq_cuda_sequence_drop_snapshots(kvq_cuda_sequence* sequence);
/// As kvq_sequence_reach and kvq_sequence_get_snapshots. Errors are 0: an offloaded sequence has them.
KVQ_API kvq_status kvq_cuda_sequence_reach(const kvq_cuda_sequence* sequence, int32_t tokens,
                                           int32_t* reached);
KVQ_API kvq_status kvq_cuda_sequence_get_snapshots(const kvq_cuda_sequence* sequence, kvq_snapshot* snapshots,
                                                   int32_t capacity, int32_t* count);

// ---- steps -----------------------------------------------------------------------------------------------

/// Every sequence of the batch gets new_tokens tokens more in all layers. 0: attention only. A NULL is a row
/// that is not there: its keys are ignored, its output is 0.
KVQ_API kvq_status kvq_cuda_cache_begin_step(kvq_cuda_cache* cache, kvq_cuda_sequence* const* rows,
                                             int32_t count, int32_t new_tokens, void* stream);
/// One sequence gets any number of tokens. Until every layer has them, what reads them (fork, requantize,
/// step_down, offload) and the next begin are refused; a trim takes all of them back.
KVQ_API kvq_status kvq_cuda_cache_begin_prompt(kvq_cuda_cache* cache, kvq_cuda_sequence* sequence,
                                               int32_t new_tokens, void* stream);
/// The text of the layers of kind KVQ_CROSS_ATTENTION, once for a sequence: kvq_cuda_cache_append of each of
/// them writes its tokens. From then on these layers take queries only, with k and v of 0 tokens; every query
/// sees all of the text. Forks share its pages, trims leave it.
KVQ_API kvq_status kvq_cuda_cache_begin_cross(kvq_cuda_cache* cache, kvq_cuda_sequence* sequence,
                                              int32_t tokens, void* stream);
/// Every sequence of the batch gets new_tokens drafted tokens behind those that it has. They stay in 16 bit
/// until kvq_cuda_cache_keep.
KVQ_API kvq_status kvq_cuda_cache_begin_draft(kvq_cuda_cache* cache, kvq_cuda_sequence* const* rows,
                                              int32_t count, int32_t new_tokens, void* stream);
/// Accepts drafted tokens paths[starts[b]] < ... < paths[starts[b + 1] - 1] of row b, numbers within its
/// draft, and removes the others. starts: [count + 1], the first one 0. Both in host memory.
KVQ_API kvq_status kvq_cuda_cache_keep(kvq_cuda_cache* cache, kvq_cuda_sequence* const* rows, int32_t count,
                                       const int32_t* paths, const int32_t* starts, void* stream);

/// How to attend. NULL instead of a pointer to it: all zero. Pointers are to device memory.
typedef struct kvq_cuda_attend_options {
    size_t size;
    float scale;           // of scores; 0: 1 / sqrt(head_dim)
    float softcap;         // 0: none; c tanh(score / c)
    int32_t window;        // 0: none; n: itself and the n - 1 tokens before it
    int32_t window_sinks;  // 1: with a window: also the sinks of the cache
    /// Trees of drafted tokens: [rows][query tokens] words. A query sees the drafted tokens of its row whose
    /// bit is set, bit 0 the first. NULL: a chain.
    const uint64_t* ancestors;
    float* lse;  // NULL, or gets the natural log of each row's softmax sum, [q.tokens][q_heads]
    /// [q_heads]: learned sinks, one more score without a value in each softmax sum. NULL: none. All but
    /// prompts need lse, too.
    const float* sink_logits;
    const float* alibi_slopes;  // [q_heads]: score - slope * distance, of caches with `alibi`; else NULL
    /// Lists of tokens, or 0 and NULL: queries attend to the tokens of both of their lists up to their own,
    /// and nothing else is read. Positions of the sequence in any order, negative: none; a token that is
    /// listed twice counts twice. In layers without a window; without softcap and window; `ancestors` hides
    /// listed tokens, too; sinks need no lse. Of kvq_cuda_cache_attend alone.
    const int32_t* listed_tokens;  // [q.tokens][list_kv_heads][listed_count], such as the best tokens
    const int32_t* listed_window;  // [q.tokens][list_kv_heads][listed_window_count], such as the last
    int32_t listed_count, listed_window_count;
    int32_t list_kv_heads;  // 0 or 1: a query has one list for all heads; else the kv heads of the layer
    /// 0: all pages are read; n, up to the cache's listed_tokens: of each kv head only its best quantized
    /// pages, about n tokens, the first page, the last two and the 16-bit ones, as
    /// kvq_mods.selected_tokens of the CPU chooses them. In steps of one token and layers without a window;
    /// without window and ancestors. Refused over pages that trims or erases have cut, over moved keys, and
    /// for keys without parameters per channel (int8). The ranking does not know sink_logits.
    int32_t selected_tokens;
    int32_t
        upper_only;  // 1: of pages with two planes (nested8+nested4) the upper one alone is read; not prompts
} kvq_cuda_attend_options;

/// One call for each layer of a step, a prompt or a draft: its new tokens, and their attention over all that
/// their sequences hold and over each other, causal. Prompts see themselves in 16 bit; pages behind the
/// window are quantized afterwards. A step quantizes the page that leaves the window before its attention, in
/// all layers of one shape with the first of them, which comes first. A shared layer, and one with cross
/// attention, takes k and v of 0 tokens. In a prompt a shared layer sees its owner's tokens in 16 bit, as the
/// owner did: they wait in memory of the cache for the last layer that shares them, or for the next begin. k,
/// v: [rows x new tokens][kv_heads][head_dim]; q, out: [rows x new tokens][q_heads][head_dim]; q_heads is a
/// multiple of kv_heads.
KVQ_API kvq_status kvq_cuda_cache_prefill(kvq_cuda_cache* cache, int32_t layer, const kvq_tensor* k,
                                          const kvq_tensor* v, const kvq_tensor* q, const kvq_tensor* out,
                                          const kvq_cuda_attend_options* options, void* stream);
/// The new tokens of a layer alone.
KVQ_API kvq_status kvq_cuda_cache_append(kvq_cuda_cache* cache, int32_t layer, const kvq_tensor* k,
                                         const kvq_tensor* v, void* stream);
/// Attention of the last q.tokens / rows tokens of every row over all that it has. Behind
/// kvq_cuda_cache_append. Layers with a window take at most rollback + 1 tokens more than the step has new
/// ones; of a prompt rollback + 1 in all.
KVQ_API kvq_status kvq_cuda_cache_attend(kvq_cuda_cache* cache, int32_t layer, const kvq_tensor* q,
                                         const kvq_tensor* out, const kvq_cuda_attend_options* options,
                                         void* stream);
/// With resident_tokens, of a layer whose pages are in host memory: fetches those that an attend with these
/// selected_tokens would read for q, which may be a guess. On any stream, behind the first prefill or append
/// of the step, and behind the fetch before; the attend of this layer must wait for it.
KVQ_API kvq_status kvq_cuda_cache_fetch_ahead(kvq_cuda_cache* cache, int32_t layer, const kvq_tensor* q,
                                              int32_t selected_tokens, void* stream);
/// How many pages all kv heads of such a layer have read so far, and how many of them were fetched. Waits for
/// the stream.
KVQ_API kvq_status kvq_cuda_cache_fetches(kvq_cuda_cache* cache, int32_t layer, int64_t* read,
                                          int64_t* fetched, void* stream);
/// The `best` tokens, up to 8192, of a layer of kind KVQ_INDEX for each of the last q.tokens / rows tokens of
/// every row: of those up to its own the ones with the largest sum over heads of weight * max(q . k, 0); of
/// equal ones the earlier first. q: [n][heads][head_dim], weights: [n][heads], positions: [n][best],
/// ascending, -1 where there are no more: lists for kvq_cuda_attend_options.listed_tokens. All in device
/// memory. Behind kvq_cuda_cache_append.
KVQ_API kvq_status kvq_cuda_cache_select(kvq_cuda_cache* cache, int32_t layer, const kvq_tensor* q,
                                         const float* weights, int32_t best, int32_t* positions,
                                         void* stream);
/// A captured step or draft may be replayed after a begin as long as this number is what it was at the
/// capture. It depends on the number of rows and of new tokens, on the formats that pages are quantized to,
/// and on where pools lie.
KVQ_API kvq_status kvq_cuda_cache_graph_id(const kvq_cuda_cache* cache, uint64_t* id);

// ---- other formats, later --------------------------------------------------------------------------------

typedef struct kvq_cuda_requantize_request {
    size_t size;
    const char* format;  // K and V; "int8/": keys alone, "/std4": values alone, the others keep their bytes
    int32_t first_token, last_token;  // pages that lie wholly in tokens [first, last); last 0: all
    int32_t only_smaller;             // 1: skip pages that would not shrink
    int32_t new_pages;                // 1: pages quantized from now on take the format, too
    int32_t dry_run;                  // 1: report only
    int32_t reserved;                 // 0
    kvq_requantize_report* report;    // or NULL; its `size` is set. Pages are those of the device
} kvq_cuda_requantize_request;
/// Pages that the sequences share stay shared.
KVQ_API kvq_status kvq_cuda_cache_requantize(kvq_cuda_cache* cache, kvq_cuda_sequence* const* sequences,
                                             int32_t count, const kvq_cuda_requantize_request* request,
                                             void* stream);
/// Pages of sequences that are created from now on take this format; others keep theirs.
KVQ_API kvq_status kvq_cuda_cache_commit_to(kvq_cuda_cache* cache, const char* format);

/// Makes the plan of keys of a format (mix4 to mix6, low3, low2) from the first `tokens` tokens of these
/// sequences together, at least 64: call it after a step until `done` is 1. From then on new pages take the
/// format, also those of sequences that are created later, and pages that become smaller are requantized.
/// format: as in kvq_cuda_requantize_request, "mix4/" for keys alone; no page may have it before. statistics:
/// made for this cache, queries may have been added; it gets the keys. As a CPU cache with these steps
/// (kvq_statistics_add_sequence), with the same plan. Waits for the stream, once.
KVQ_API kvq_status kvq_cuda_cache_self_calibrate(kvq_cuda_cache* cache, kvq_cuda_sequence* const* sequences,
                                                 int32_t count, const char* format,
                                                 kvq_statistics* statistics, int32_t tokens, void* stream,
                                                 int32_t* done);

/// From `age` tokens behind the newest one on, pages have this format.
typedef struct kvq_cuda_tier {
    int32_t age;
    const char* format;
} kvq_cuda_tier;
/// tiers: ages ascending, formats from wide to narrow. byte_budget: of all pages in use; beyond it the oldest
/// pages go down further; 0: none.
KVQ_API kvq_status kvq_cuda_cache_step_down(kvq_cuda_cache* cache, kvq_cuda_sequence* const* sequences,
                                            int32_t count, const kvq_cuda_tier* tiers, int32_t tier_count,
                                            size_t byte_budget, void* stream);
/// A dry run: bytes of the device before, after and at most in between, byte for byte.
KVQ_API kvq_status kvq_cuda_cache_plan_step_down(const kvq_cuda_cache* cache,
                                                 kvq_cuda_sequence* const* sequences, int32_t count,
                                                 const kvq_cuda_tier* tiers, int32_t tier_count,
                                                 size_t byte_budget, kvq_step_down_report* report);

// ---- to the CPU and back ---------------------------------------------------------------------------------
// Both caches have the same shape, window type, page_tokens, sinks, recent and rollback, and the CPU cache
// lists the formats. Bytes of pages stay as they are. Both functions wait for the stream.

/// A CPU cache for the pages of a cache on a device, in pinned memory: of its layers, options and formats. It
/// computes nothing; what works on pages works on its sequences: offload and onload, fork, trim,
/// kvq_sequence_send_pages and a kvq_receiver, kvq_sequence_save, kvq_prefix_cache. Functions that attend or
/// quantize are refused. Made after statistics; freed after its sequences. byte_budget: of all its pages,
/// allocated at once; 0: none, and every page is an allocation.
KVQ_API kvq_status kvq_cuda_cache_host_pages(kvq_cuda_cache* cache, size_t byte_budget, kvq_cache** out);
/// A sequence of a CPU cache with the same tokens.
KVQ_API kvq_status kvq_cuda_sequence_offload(const kvq_cuda_sequence* sequence, kvq_cache* to, void* stream,
                                             kvq_sequence** out);
/// And back. All layers hold the same tokens; where keys have moved, both caches have the same rotary
/// embeddings. Trims and erases may have cut pages, but pages that repacking has left shorter are refused
/// (none with a repack below 0 in the options of the CPU's cache).
KVQ_API kvq_status kvq_cuda_sequence_onload(kvq_cuda_cache* cache, const kvq_sequence* from, void* stream,
                                            kvq_cuda_sequence** out);

// ---- saved sequences -------------------------------------------------------------------------------------
// Files as those of kvq_sequence_save: a CPU cache of the same options and formats restores what a device's
// has saved, and the other way round. Pages go through pinned memory. All wait for the stream; write and read
// must not call functions of the cache. KVQ_ERROR_UNSUPPORTED without nlohmann-json.

KVQ_API kvq_status kvq_cuda_sequence_save(const kvq_cuda_sequence* sequence, const kvq_save_options* options,
                                          kvq_write write, void* user, void* stream);
/// The same to a file, which is renamed when it is complete.
KVQ_API kvq_status kvq_cuda_sequence_save_file(const kvq_cuda_sequence* sequence,
                                               const kvq_save_options* options, const char* path,
                                               void* stream);
/// options.convert must be 0: that takes a CPU cache.
KVQ_API kvq_status kvq_cuda_sequence_restore(kvq_cuda_cache* cache, const kvq_save_options* options,
                                             kvq_read read, void* user, void* stream,
                                             kvq_cuda_sequence** out);
KVQ_API kvq_status kvq_cuda_sequence_restore_file(kvq_cuda_cache* cache, const kvq_save_options* options,
                                                  const char* path, void* stream, kvq_cuda_sequence** out);

// ---- prefixes and sequences that wait ---------------------------------------------------------------------
// By their token ids, over three tiers: device memory, pinned host memory, files. What has no room in a tier
// goes to the next one, the least recently used first, and comes back byte for byte when it is asked for.
// What no tier has room for, and files that are gone, cut or damaged, are misses. Results are those of
// kvq_prefix_cache (KVQ_MATCH_...). Functions that change a store may wait for the stream.

enum {  // where a prefix was found
    KVQ_CUDA_PLACE_NONE = 0,
    KVQ_CUDA_PLACE_DEVICE = 1,
    KVQ_CUDA_PLACE_HOST = 2,
    KVQ_CUDA_PLACE_FILE = 3
};

typedef struct kvq_cuda_prefix_options {
    size_t size;
    size_t device_bytes;          // of the pages that entries hold, each counted once; 0: no limit
    size_t host_bytes;            // of pinned memory, allocated at once; 0: as much as is needed
    size_t file_bytes;            // of all files; 0: no limit
    int32_t min_prefix_tokens;    // a shorter common prefix is a miss; 0: 128; KVQ_NONE
    int32_t min_quantize_tokens;  // shorter entries keep their formats; 0: 256; KVQ_NONE
    const char* format;           // NULL, or entries are requantized to it where that is smaller, as
                                  // kvq_cuda_requantize_request.format
    const char* folder;           // NULL: no files; or a folder, in which the store makes one of its own.
                                  // KVQ_ERROR_UNSUPPORTED without nlohmann-json
    const char* model;            // NULL, or as in kvq_save_options, in the files
} kvq_cuda_prefix_options;

/// options may be NULL. Made after the statistics of the cache.
KVQ_API kvq_status kvq_cuda_prefix_cache_create(kvq_cuda_cache* cache, const kvq_cuda_prefix_options* options,
                                                kvq_cuda_prefix_cache** out);
/// With its entries and files.
KVQ_API kvq_status kvq_cuda_prefix_cache_free(kvq_cuda_prefix_cache* store);
/// What a fetch would find, if files can be read: KVQ_MATCH_..., leading tokens, KVQ_CUDA_PLACE_... Each
/// result may be NULL.
KVQ_API kvq_status kvq_cuda_prefix_cache_lookup(const kvq_cuda_prefix_cache* store, const int32_t* tokens,
                                                int32_t count, int32_t* match, int32_t* found,
                                                int32_t* place);
/// A sequence that holds as many of the first tokens as the store has; empty on a miss.
KVQ_API kvq_status kvq_cuda_prefix_cache_fetch(kvq_cuda_prefix_cache* store, const int32_t* tokens,
                                               int32_t count, void* stream, int32_t* match, int32_t* found,
                                               int32_t* place, kvq_cuda_sequence** out);
/// Keeps the first `count` tokens of a sequence, which does not change.
KVQ_API kvq_status kvq_cuda_prefix_cache_store(kvq_cuda_prefix_cache* store, const int32_t* tokens,
                                               int32_t count, const kvq_cuda_sequence* sequence,
                                               void* stream);
/// The same of a whole sequence that is not needed for now, without a copy. Then the sequence is empty.
KVQ_API kvq_status kvq_cuda_prefix_cache_park(kvq_cuda_prefix_cache* store, const int32_t* tokens,
                                              int32_t count, kvq_cuda_sequence* sequence, void* stream);
/// Moves the least recently used entries down until those on the device hold `bytes` less: where a begin has
/// failed with KVQ_ERROR_MEMORY.
KVQ_API kvq_status kvq_cuda_prefix_cache_release(kvq_cuda_prefix_cache* store, size_t bytes, void* stream);
/// kvq_cuda_cache_step_down of these sequences and all entries on the device: pages that they share stay
/// shared.
KVQ_API kvq_status kvq_cuda_prefix_cache_step_down(kvq_cuda_prefix_cache* store,
                                                   kvq_cuda_sequence* const* live, int32_t count,
                                                   const kvq_cuda_tier* tiers, int32_t tier_count,
                                                   size_t byte_budget, void* stream);

typedef struct kvq_cuda_prefix_statistics {
    size_t size;
    size_t entries, bytes;   // on the device, now
    size_t host_bytes;       // of pages in host memory, now
    size_t files;            // now
    size_t file_bytes;       // now
    uint64_t fetches[4];     // by KVQ_CUDA_PLACE_...
    uint64_t tokens_saved;   // that fetches returned
    uint64_t stored;         // entries on the device, those that came back included
    uint64_t lowered, lost;  // entries that left the device: for a tier below, or for none
    uint64_t failed;         // files that could not be written or read
} kvq_cuda_prefix_statistics;
KVQ_API kvq_status kvq_cuda_prefix_cache_get_statistics(const kvq_cuda_prefix_cache* store,
                                                        kvq_cuda_prefix_statistics* statistics);

// ---- pages in device memory of the caller ----------------------------------------------------------------
// For engines that have pools and tables of their own. Nothing is kept between calls, nothing is allocated,
// and calls run on the current device. Every pointer to tables, lengths and lists is to device memory, of the
// caller, and must live until the stream has passed the call. Pages have the bytes of kvq_format_quantize;
// their memory is zero before its first use. Formats are those without statistics. Signs of a transform
// (std4-h) depend on the layer: kvq_cuda_pages says it.

/// Kernels of an entry of kvq_cuda_format_list.
typedef struct kvq_cuda_kernels kvq_cuda_kernels;
/// Those for pages of these formats, separated by commas. page_tokens: 0: 128. window: fp16 or bf16, NULL:
/// fp16.
KVQ_API kvq_status kvq_cuda_kernels_find(const char* formats, int32_t head_dim, int32_t page_tokens,
                                         const char* window, kvq_cuda_kernels** out);
KVQ_API kvq_status kvq_cuda_kernels_free(kvq_cuda_kernels* kernels);

/// Where the keys, or the values, of pages of another system lie: strides in bytes, from one token, and from
/// one head, of a page to the next, as vLLM's NHD has them. Of fp8, fp8-e5m2, nvfp4, nvfp4-4over6, mxfp8 and
/// mxfp4 whose scales of a token are a multiple of 4 bytes. Not of pages of a list
/// (kvq_cuda_pages_requantize).
typedef struct kvq_cuda_rows {
    size_t token_stride, head_stride;  // multiples of 16; 0: one head after the other, as in kvq's pages
    const void* scales;  // of all but fp8, in a tensor of their own; NULL: none. Multiples of 4:
    size_t scale_page_stride, scale_token_stride, scale_head_stride;
} kvq_cuda_rows;

/// Pages of one format: page p begins at keys + p * key_stride and at values + p * value_stride.
typedef struct kvq_cuda_pages {
    const char* format;               // by name; fp16 or bf16: values of the window's type
    void *keys, *values;              // multiples of 16
    size_t key_stride, value_stride;  // multiples of 16; 0: kvq_cuda_kernels_page_bytes
    /// 0: that of the kernels; 16, for sinks in the window's type; or 1, as SGLang has them: with key_rows
    /// and value_rows, alone in their layer, of kernels of one format. They hold all tokens: `committed`,
    /// first_page and end_page are not read. Not of kvq_cuda_pages_convert.
    int32_t page_tokens;
    int32_t layer;  // of the model, counted from 1: formats with a transform (std4-h) need it; or 0
    /// Of the tensor, by which numbers were divided (vLLM's k_scale, v_scale): fp8, nvfp4; 0: 1.
    float key_scale, value_scale;
    kvq_cuda_rows key_rows, value_rows;
} kvq_cuda_pages;

/// Bytes from a page of keys, and of values, to the next: the blocks of all kv heads, up to a multiple of 16.
KVQ_API kvq_status kvq_cuda_kernels_page_bytes(const kvq_cuda_kernels* kernels, const char* format,
                                               int32_t page_tokens, int32_t kv_heads, size_t* keys,
                                               size_t* values);
/// Of kvq_cuda_pages_attend, for any number of sequences. May be 0.
KVQ_API kvq_status kvq_cuda_kernels_workspace_bytes(const kvq_cuda_kernels* kernels, int32_t q_heads,
                                                    int32_t kv_heads, int32_t query_tokens, size_t* bytes);

/// Token i of k and v to slot slots[i] = page * page_tokens + token, which no other token of the call has; a
/// negative one is not stored. Pages of the window's type; or of rows of others, as an engine has them
/// (key_rows, value_rows or neither), which are quantized with the bytes of kvq_write_rows: NaN becomes the
/// number nearest to zero, infinities saturate.
KVQ_API kvq_status kvq_cuda_pages_store(const kvq_cuda_kernels* kernels, const kvq_cuda_pages* to,
                                        const kvq_tensor* k, const kvq_tensor* v, const int64_t* slots,
                                        void* stream);
/// Quantizes page from_pages[i] of one format to page to_pages[i] of another. Negative numbers are skipped.
/// not_finite: NULL, or NaN and infinities are added to it.
KVQ_API kvq_status kvq_cuda_pages_requantize(const kvq_cuda_kernels* kernels, int32_t kv_heads,
                                             const kvq_cuda_pages* from, const int32_t* from_pages,
                                             const kvq_cuda_pages* to, const int32_t* to_pages, int32_t count,
                                             uint32_t* not_finite, void* stream);

/// Which tokens of a batch of sequences pages of one format hold.
typedef struct kvq_cuda_part {
    kvq_cuda_pages pages;
    const int32_t*
        table;  // [sequences][columns]: the page in each column; negative: it is not in this format
    const int32_t *first_page, *end_page;  // [sequences]: columns [first, end). NULL: 0, and layer.committed
} kvq_cuda_part;

/// Writes token t of sequence s to row starts[s] + t of k and v, in the window's type. tokens: [sequences],
/// from the first column on.
KVQ_API kvq_status kvq_cuda_pages_dequantize(const kvq_cuda_kernels* kernels, int32_t kv_heads,
                                             const kvq_cuda_part* from, int32_t sequences, int32_t columns,
                                             const int32_t* tokens, const kvq_tensor* k, const kvq_tensor* v,
                                             const int32_t* starts, void* stream);

/// Bytes of workspace of kvq_cuda_pages_convert for turns of so many pages of the target.
KVQ_API kvq_status kvq_cuda_kernels_convert_bytes(const kvq_cuda_kernels* to_kernels, int32_t kv_heads,
                                                  int32_t pages, size_t* bytes);
/// All pages that the table of `to` names from those that the table of `from` does: between formats, page
/// sizes and orders of pages, such as an engine's pages of fp8 to kvq's and back, with the CPU's bytes. Both
/// kernels have the same head_dim; tables have from_columns and to_columns columns and begin with each
/// sequence's first token; tokens: [sequences]. first_page and end_page are NULL. Tokens that `from` does not
/// hold are zeros. workspace: a multiple of 16. not_finite: as in kvq_cuda_pages_requantize.
KVQ_API kvq_status kvq_cuda_pages_convert(const kvq_cuda_kernels* from_kernels, const kvq_cuda_part* from,
                                          int32_t from_columns, const kvq_cuda_kernels* to_kernels,
                                          const kvq_cuda_part* to, int32_t to_columns, int32_t kv_heads,
                                          int32_t sequences, const int32_t* tokens, void* workspace,
                                          size_t workspace_bytes, uint32_t* not_finite, void* stream);

/// A layer of a batch. Of each sequence: the first sink_tokens tokens in pages of 16 tokens, then `committed`
/// quantized pages, then pages of the window's type, of which page i stands in column i % window_columns.
typedef struct kvq_cuda_layer {
    size_t size;
    int32_t sequences, kv_heads;
    const int32_t* tokens;     // [sequences], sinks included
    const int32_t* committed;  // [sequences]
    const kvq_cuda_part* parts;
    int32_t part_count;  // formats that there are pages of; at most those that the kernels were found for
    int32_t columns;     // of their tables, at least 1
    kvq_cuda_pages window;
    const int32_t* window_table;  // [sequences][window_columns]
    int32_t window_columns;       // at least 1
    int32_t sink_tokens;          // 0: none
    kvq_cuda_pages sinks;
    const int32_t* sink_table;  // [sequences][sink_tokens / 16, rounded up]
    /// For workspaces of prompts: no sequence has more, sinks included; 0: as many as its tables name. Rows
    /// of one that has more are NaN.
    int32_t most_tokens;
} kvq_cuda_layer;

/// Attention of the last q.tokens / sequences tokens of every sequence. workspace: a multiple of 16, zero
/// before its first use; calls leave it ready for the next one, on one stream at a time.
KVQ_API kvq_status kvq_cuda_pages_attend(const kvq_cuda_kernels* kernels, const kvq_cuda_layer* layer,
                                         const kvq_tensor* q, const kvq_tensor* out,
                                         const kvq_cuda_attend_options* options, void* workspace,
                                         size_t workspace_bytes, void* stream);
/// Attention of new tokens over sequences as they are before them, and over each other, causal. Rows
/// starts[s] to starts[s + 1] - 1 are those of sequence s; starts: [sequences + 1]. most_new_tokens: of one
/// sequence. Nothing is stored. workspace: of any content, a multiple of 16; NULL: none, which is slower on
/// sm_90a.
KVQ_API kvq_status kvq_cuda_pages_prefill(const kvq_cuda_kernels* kernels, const kvq_cuda_layer* layer,
                                          const kvq_tensor* k, const kvq_tensor* v, const kvq_tensor* q,
                                          const kvq_tensor* out, const int32_t* starts,
                                          int32_t most_new_tokens, const kvq_cuda_attend_options* options,
                                          void* workspace, size_t workspace_bytes, void* stream);
/// Bytes of its workspace, for `heads` kv heads at a time, 0: all; 0 where the device takes none.
KVQ_API kvq_status kvq_cuda_pages_prefill_bytes(const kvq_cuda_kernels* kernels, const kvq_cuda_layer* layer,
                                                int32_t most_new_tokens, int32_t heads, size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif
