//! The C interface of kvq (include/kvq/kvq.h) as it is: see there what everything means. The crate `kvq` is the safe way
//! to it. Made by bindings/generate.py; tests/layout.rs compares it with what a C compiler makes of the header.
#![allow(non_camel_case_types)]
#![cfg_attr(rustfmt, rustfmt_skip)]

use core::ffi::c_void;
use std::os::raw::c_char;

pub type kvq_status = i32;
pub type kvq_role = i32;
pub type kvq_dtype = i32;

pub const KVQ_OK: i32 = 0;
pub const KVQ_ERROR_ARGUMENT: i32 = 1;
pub const KVQ_ERROR_HANDLE: i32 = 2;
pub const KVQ_ERROR_STRUCT: i32 = 3;
pub const KVQ_ERROR_MEMORY: i32 = 4;
pub const KVQ_ERROR_DATA: i32 = 5;
pub const KVQ_ERROR_CALLBACK: i32 = 6;
pub const KVQ_ERROR_UNSUPPORTED: i32 = 7;
pub const KVQ_ERROR_INTERNAL: i32 = 8;
pub const KVQ_KEY: i32 = 0;
pub const KVQ_VALUE: i32 = 1;
pub const KVQ_FP32: i32 = 0;
pub const KVQ_FP16: i32 = 1;
pub const KVQ_BF16: i32 = 2;
pub const KVQ_CAUSAL: i32 = 0;
pub const KVQ_BIDIRECTIONAL: i32 = 1;
pub const KVQ_CROSS: i32 = 2;
pub const KVQ_PAGE_NONE: i32 = 0;
pub const KVQ_PAGE_SOME: i32 = 1;
pub const KVQ_PAGE_ALL: i32 = 2;
pub const KVQ_HALF_SPLIT: i32 = 0;
pub const KVQ_INTERLEAVED: i32 = 1;
pub const KVQ_FULL_ATTENTION: i32 = 0;
pub const KVQ_SLIDING_ATTENTION: i32 = 1;
pub const KVQ_CHUNKED_ATTENTION: i32 = 2;
pub const KVQ_SHARED: i32 = 3;
pub const KVQ_CROSS_ATTENTION: i32 = 4;
pub const KVQ_STATE: i32 = 5;
pub const KVQ_LATENT: i32 = 6;
pub const KVQ_INDEX: i32 = 7;
pub const KVQ_SNAPSHOT_EXACT: i32 = 0;
pub const KVQ_SNAPSHOT_INT8_ROWS: i32 = 1;
pub const KVQ_SNAPSHOT_INT8_COLUMNS: i32 = 2;
pub const KVQ_SNAPSHOT_E4M3: i32 = 3;
pub const KVQ_OWN_STATISTICS: i32 = 0;
pub const KVQ_SHARED_STATISTICS: i32 = 1;
pub const KVQ_MATCH_EXACT: i32 = 0;
pub const KVQ_MATCH_SUPERSEQUENCE: i32 = 1;
pub const KVQ_MATCH_PREFIX: i32 = 2;
pub const KVQ_MATCH_LCP: i32 = 3;
pub const KVQ_MISS: i32 = 4;
pub const KVQ_MISS_SHORT_PREFIX: i32 = 5;
pub const KVQ_MISS_SHORT_LCP: i32 = 6;
pub const KVQ_STORED: i32 = 0;
pub const KVQ_STORE_DUPLICATE: i32 = 1;
pub const KVQ_STORE_TOO_LARGE: i32 = 2;
pub const KVQ_ABI_VERSION: i32 = 1;
pub const KVQ_NONE: i32 = -1;
pub const KVQ_ALL_LAYERS: i32 = -1;

#[repr(C)]
pub struct kvq_format {
    _private: [u8; 0],
}

#[repr(C)]
pub struct kvq_statistics {
    _private: [u8; 0],
}

#[repr(C)]
pub struct kvq_executor {
    _private: [u8; 0],
}

#[repr(C)]
pub struct kvq_workspace {
    _private: [u8; 0],
}

#[repr(C)]
pub struct kvq_cache {
    _private: [u8; 0],
}

#[repr(C)]
pub struct kvq_sequence {
    _private: [u8; 0],
}

#[repr(C)]
pub struct kvq_receiver {
    _private: [u8; 0],
}

#[repr(C)]
pub struct kvq_prefix_cache {
    _private: [u8; 0],
}

#[repr(C)]
pub struct kvq_ring {
    _private: [u8; 0],
}

#[repr(C)]
pub struct kvq_sequence_table {
    _private: [u8; 0],
}

pub type kvq_task = Option<unsafe extern "C" fn(task_data: *mut c_void, index: i32)>;
pub type kvq_write = Option<unsafe extern "C" fn(user: *mut c_void, data: *const c_void, bytes: usize) -> i32>;
pub type kvq_read = Option<unsafe extern "C" fn(user: *mut c_void, to: *mut c_void, bytes: usize) -> usize>;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_tensor {
    pub data: *mut c_void,
    pub dtype: kvq_dtype,
    pub tokens: i32,
    pub heads: i32,
    pub dim: i32,
    pub token_stride: isize,
    pub head_stride: isize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_allocator {
    pub size: usize,
    pub allocate: Option<unsafe extern "C" fn(user: *mut c_void, bytes: usize, alignment: usize) -> *mut c_void>,
    pub deallocate: Option<unsafe extern "C" fn(user: *mut c_void, memory: *mut c_void, bytes: usize,
        alignment: usize)>,
    pub user: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_executor_callbacks {
    pub size: usize,
    pub concurrency: i32,
    pub parallel_for: Option<unsafe extern "C" fn(user: *mut c_void, n: i32, task: kvq_task, task_data: *mut c_void) ->
        i32>,
    pub user: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_format_entry {
    pub size: usize,
    pub name: *const c_char,
    pub keys: i32,
    pub values: i32,
    pub takes_statistics: i32,
    pub group: i32,
    pub preset: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_format_description {
    pub size: usize,
    pub name: *const c_char,
    pub backend: *const c_char,
    pub bits: f64,
    pub block_bytes: usize,
    pub quantize: i32,
    pub dequantize: i32,
    pub attend: i32,
    pub dequantizes_first: i32,
    pub holds_values: i32,
    pub asked_name: *const c_char,
    pub quantize_by: [c_char; 104],
    pub dequantize_by: [c_char; 104],
    pub attend_by: [c_char; 104],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct kvq_page_shape {
    pub role: kvq_role,
    pub tokens: i32,
    pub heads: i32,
    pub dim: i32,
    pub layer: i32,
    pub first_head: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_page {
    pub keys: *const c_void,
    pub values: *const c_void,
    pub key_format: i32,
    pub value_format: i32,
    pub key_capacity: i32,
    pub value_capacity: i32,
    pub skip: i32,
    pub tokens: i32,
    pub shift: i64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct kvq_token_range {
    pub begin: i32,
    pub end: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct kvq_chosen_tokens {
    pub layer: i32,
    pub kv_head: i32,
    pub first_query: i32,
    pub last_query: i32,
    pub tokens: kvq_token_range,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_selection_report {
    pub size: usize,
    pub pages: i64,
    pub read: i64,
    pub chosen: *mut kvq_chosen_tokens,
    pub chosen_capacity: i32,
    pub chosen_count: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_skipping_report {
    pub size: usize,
    pub pages: i64,
    pub skipped: i64,
    pub rows: i64,
    pub left_out: f64,
    pub most_left_out: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_mods {
    pub size: usize,
    pub direction: i32,
    pub window: i32,
    pub window_sinks: i32,
    pub prefix: i32,
    pub document_starts: *const i32,
    pub documents: i32,
    pub tree_parents: *const i32,
    pub tree_tokens: i32,
    pub tree_first: i32,
    pub scale: f32,
    pub softcap: f32,
    pub alibi_slopes: *const f32,
    pub alibi_heads: i32,
    pub sink_heads: i32,
    pub sink_logits: *const f32,
    pub mask_row: Option<unsafe extern "C" fn(user: *mut c_void, scores: *mut f32, n: i32, query: i32, first_key: i32)>,
    pub mask_page: Option<unsafe extern "C" fn(user: *mut c_void, first_query: i32, last_query: i32, first_key: i32,
        end_key: i32) -> i32>,
    pub score_row: Option<unsafe extern "C" fn(user: *mut c_void, scores: *mut f32, n: i32, query_head: i32, query: i32,
        first_key: i32)>,
    pub user: *mut c_void,
    pub token_ranges: *const kvq_token_range,
    pub range_starts: *const i32,
    pub range_count: i32,
    pub range_start_count: i32,
    pub range_first_query: i32,
    pub selected_tokens: i32,
    pub skipped_mass: f32,
    pub upper_only: i32,
    pub selection: *mut kvq_selection_report,
    pub skipping: *mut kvq_skipping_report,
    pub listed_tokens: *const i32,
    pub listed_window: *const i32,
    pub listed_count: i32,
    pub listed_window_count: i32,
    pub list_queries: i32,
    pub list_kv_heads: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_rotary {
    pub dims: i32,
    pub first_channel: i32,
    pub layout: i32,
    pub frequency_count: i32,
    pub base: f64,
    pub frequencies: *const f64,
    pub rotate: Option<unsafe extern "C" fn(user: *mut c_void, row: *mut f32, head_dim: i32, by: i64)>,
    pub user: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_layer_formats {
    pub keys: *const c_char,
    pub values: *const c_char,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct kvq_layer {
    pub kind: i32,
    pub kv_heads: i32,
    pub head_dim: i32,
    pub value_dim: i32,
    pub window: i32,
    pub sinks: i32,
    pub owner: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_state_part {
    pub name: *const c_char,
    pub layer: i32,
    pub dtype: kvq_dtype,
    pub heads: i32,
    pub rows: i32,
    pub columns: i32,
    pub snapshot: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_cache_options {
    pub size: usize,
    pub layers: i32,
    pub kv_heads: i32,
    pub head_dim: i32,
    pub value_dim: i32,
    pub keys: *const c_char,
    pub values: *const c_char,
    pub window: *const c_char,
    pub page_tokens: i32,
    pub sinks: i32,
    pub recent: i32,
    pub rollback: i32,
    pub byte_budget: usize,
    pub layer_formats: *const kvq_layer_formats,
    pub rotary: *const kvq_rotary,
    pub rotary_count: i32,
    pub key_statistics: i32,
    pub statistics: *const kvq_statistics,
    pub allocator: *const kvq_allocator,
    pub preallocate: i32,
    pub repack: f32,
    pub layer_list: *const kvq_layer,
    pub state_parts: *const kvq_state_part,
    pub snapshot_bytes: usize,
    pub state_part_count: i32,
    pub snapshot_every: i32,
    pub snapshot_prompt_end: i32,
    pub statistics_tokens: i32,
    pub reserved: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_cache_info {
    pub size: usize,
    pub layers: i32,
    pub kv_heads: i32,
    pub head_dim: i32,
    pub value_dim: i32,
    pub page_tokens: i32,
    pub sinks: i32,
    pub recent: i32,
    pub rollback: i32,
    pub byte_budget: usize,
    pub bytes_in_use: usize,
    pub pages_in_use: usize,
    pub bytes_held: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_attend_options {
    pub size: usize,
    pub mods: *const kvq_mods,
    pub executor: *mut kvq_executor,
    pub workspace: *mut kvq_workspace,
    pub lse: *mut f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_rows {
    pub format: *const kvq_format,
    pub data: *const c_void,
    pub token_stride: isize,
    pub head_stride: isize,
    pub block_stride: isize,
    pub scales: *const c_void,
    pub scale_token_stride: isize,
    pub scale_head_stride: isize,
    pub scale_block_stride: isize,
    pub scale_group_stride: isize,
    pub biases: *const c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_row_blocks {
    pub table: *const i32,
    pub blocks: i32,
    pub block_tokens: i32,
    pub memory_blocks: i32,
    pub tokens: i32,
    pub kv_heads: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_usage {
    pub size: usize,
    pub quantized: usize,
    pub window: usize,
    pub slack: usize,
    pub rollback: usize,
    pub bookkeeping: usize,
    pub workspace: usize,
    pub bytes: usize,
    pub not_finite: usize,
    pub tokens: i32,
    pub reserved: usize,
    pub repacked: usize,
    pub state: usize,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct kvq_snapshot {
    pub tokens: i32,
    pub reserved: i32,
    pub bytes: usize,
    pub error: f64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_attend_request {
    pub sequence: *const kvq_sequence,
    pub q: kvq_tensor,
    pub out: kvq_tensor,
    pub lse: *mut f32,
    pub mods: *const kvq_mods,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_prefill_request {
    pub sequence: *mut kvq_sequence,
    pub k: kvq_tensor,
    pub v: kvq_tensor,
    pub q: kvq_tensor,
    pub out: kvq_tensor,
    pub lse: *mut f32,
    pub mods: *const kvq_mods,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_select_request {
    pub sequence: *const kvq_sequence,
    pub q: kvq_tensor,
    pub weights: *const f32,
    pub out: *mut i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_step_request {
    pub sequence: *mut kvq_sequence,
    pub tokens: i32,
    pub q_tokens: i32,
    pub mods: *const kvq_mods,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_requantize_request {
    pub size: usize,
    pub keys: *const c_char,
    pub values: *const c_char,
    pub first_layer: i32,
    pub last_layer: i32,
    pub first_token: i32,
    pub last_token: i32,
    pub only_smaller: i32,
    pub new_pages: i32,
    pub dry_run: i32,
    pub reserved: i32,
    pub most_pages: usize,
    pub most_nanoseconds: i64,
    pub executor: *mut kvq_executor,
    pub workspace: *mut kvq_workspace,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_requantize_report {
    pub size: usize,
    pub pages: usize,
    pub pages_left: usize,
    pub bytes_before: usize,
    pub bytes_after: usize,
    pub bytes_peak: usize,
    pub bytes_freed: usize,
    pub workspace: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_tier {
    pub age: i32,
    pub reserved: i32,
    pub keys: *const c_char,
    pub values: *const c_char,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_step_down_policy {
    pub size: usize,
    pub tiers: *const kvq_tier,
    pub tier_count: i32,
    pub first_layers_kept: i32,
    pub last_layers_kept: i32,
    pub reserved: i32,
    pub byte_budget: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_step_down_report {
    pub size: usize,
    pub pages: usize,
    pub bytes_before: usize,
    pub bytes_after: usize,
    pub bytes_peak: usize,
    pub fits: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_footprint_query {
    pub size: usize,
    pub sequences: i32,
    pub q_heads: i32,
    pub q_tokens: i32,
    pub threads: i32,
    pub chunk: i32,
    pub cross_tokens: i32,
    pub policy: *const kvq_step_down_policy,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_footprint {
    pub size: usize,
    pub quantized: usize,
    pub window: usize,
    pub rollback: usize,
    pub bookkeeping: usize,
    pub workspace: usize,
    pub attention: usize,
    pub total: usize,
    pub transient: usize,
    pub unused: usize,
    pub state: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_budget_query {
    pub size: usize,
    pub tokens: i32,
    pub sequences: i32,
    pub chunk: i32,
    pub cuts: i32,
    pub cross_tokens: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_save_options {
    pub size: usize,
    pub model: *const c_char,
    pub convert: i32,
    pub upper_only: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_prefix_cache_options {
    pub size: usize,
    pub byte_limit: usize,
    pub max_entries: i32,
    pub min_prefix_tokens: i32,
    pub min_quantize_tokens: i32,
    pub reserved: i32,
    pub keys: *const c_char,
    pub values: *const c_char,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_prefix_cache_statistics {
    pub size: usize,
    pub fetches: [usize; 7],
    pub tokens_saved: usize,
    pub stored: usize,
    pub duplicates: usize,
    pub rejections: usize,
    pub replaced: usize,
    pub evictions: usize,
    pub entries: usize,
    pub bytes: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_ring_options {
    pub size: usize,
    pub window: i32,
    pub slack: i32,
    pub sinks_in_cache: i32,
    pub reserved: i32,
    pub first_token: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_token_batch {
    pub size: usize,
    pub positions: *const i32,
    pub id_counts: *const i32,
    pub ids: *const *const i32,
    pub tokens: i32,
    pub reserved: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvq_table_usage {
    pub size: usize,
    pub tokens: usize,
    pub bytes: usize,
    pub ids: i32,
    pub can_shift: i32,
}

extern "C" {
    pub fn kvq_last_error() -> *const c_char;
    pub fn kvq_status_name(status: kvq_status) -> *const c_char;
    pub fn kvq_version() -> *const c_char;
    pub fn kvq_abi_version() -> i32;
    pub fn kvq_workspace_create(allocator: *const kvq_allocator, bytes: usize, out: *mut *mut kvq_workspace) ->
        kvq_status;
    pub fn kvq_workspace_free(workspace: *mut kvq_workspace) -> kvq_status;
    pub fn kvq_workspace_reserve(workspace: *mut kvq_workspace, bytes: usize) -> kvq_status;
    pub fn kvq_workspace_bytes(workspace: *const kvq_workspace, bytes: *mut usize) -> kvq_status;
    pub fn kvq_executor_create(callbacks: *const kvq_executor_callbacks, out: *mut *mut kvq_executor) -> kvq_status;
    pub fn kvq_executor_create_threads(threads: i32, out: *mut *mut kvq_executor) -> kvq_status;
    pub fn kvq_executor_free(executor: *mut kvq_executor) -> kvq_status;
    pub fn kvq_format_count(count: *mut i32) -> kvq_status;
    pub fn kvq_format_list(index: i32, entry: *mut kvq_format_entry) -> kvq_status;
    pub fn kvq_format_find(name: *const c_char, role: kvq_role, statistics: *const kvq_statistics,
        out: *mut *mut kvq_format) -> kvq_status;
    pub fn kvq_format_find_rows(name: *const c_char, tensor_scale: f32, out: *mut *mut kvq_format) -> kvq_status;
    pub fn kvq_format_find_head_rows(name: *const c_char, scales: *const f32, count: i32, kv_heads: i32,
        out: *mut *mut kvq_format) -> kvq_status;
    pub fn kvq_format_row_bytes(format: *const kvq_format, dim: i32, row: *mut i32, scales: *mut i32, biases: *mut i32)
        -> kvq_status;
    pub fn kvq_format_free(format: *mut kvq_format) -> kvq_status;
    pub fn kvq_format_describe(format: *const kvq_format, role: kvq_role, tokens: i32, dim: i32,
        description: *mut kvq_format_description) -> kvq_status;
    pub fn kvq_format_page_bytes(format: *const kvq_format, shape: *const kvq_page_shape, page_bytes: *mut usize,
        workspace_bytes: *mut usize) -> kvq_status;
    pub fn kvq_format_quantize(format: *const kvq_format, shape: *const kvq_page_shape, values: *const kvq_tensor,
        page: *mut c_void, page_bytes: usize, workspace: *mut c_void, workspace_bytes: usize, not_finite: *mut usize) ->
        kvq_status;
    pub fn kvq_format_dequantize(format: *const kvq_format, shape: *const kvq_page_shape, page: *const c_void,
        page_bytes: usize, out: *const kvq_tensor, workspace: *mut c_void, workspace_bytes: usize) -> kvq_status;
    pub fn kvq_rotary_llama3(dims: i32, base: f64, factor: f64, low_freq_factor: f64, high_freq_factor: f64,
        original_context: f64, frequencies: *mut f64) -> kvq_status;
    pub fn kvq_rotary_yarn(dims: i32, base: f64, factor: f64, original_context: f64, beta_fast: f64, beta_slow: f64,
        frequencies: *mut f64) -> kvq_status;
    pub fn kvq_cache_create(options: *const kvq_cache_options, out: *mut *mut kvq_cache) -> kvq_status;
    pub fn kvq_cache_free(cache: *mut kvq_cache) -> kvq_status;
    pub fn kvq_cache_get_info(cache: *const kvq_cache, info: *mut kvq_cache_info) -> kvq_status;
    pub fn kvq_cache_get_layer(cache: *const kvq_cache, layer: i32, out: *mut kvq_layer) -> kvq_status;
    pub fn kvq_cache_add_format(cache: *mut kvq_cache, role: kvq_role, format: *const kvq_format, name: *const c_char)
        -> kvq_status;
    pub fn kvq_cache_commit_to(cache: *mut kvq_cache, role: kvq_role, name: *const c_char, first_layer: i32,
        last_layer: i32) -> kvq_status;
    pub fn kvq_cache_find_format(cache: *const kvq_cache, role: kvq_role, name: *const c_char, index: *mut i32) ->
        kvq_status;
    pub fn kvq_cache_get_format(cache: *const kvq_cache, role: kvq_role, index: i32, out: *mut *mut kvq_format) ->
        kvq_status;
    pub fn kvq_cache_workspace_bytes(cache: *const kvq_cache, tokens: i32, q_heads: i32, q_tokens: i32, threads: i32,
        bytes: *mut usize) -> kvq_status;
    pub fn kvq_sequence_create(cache: *mut kvq_cache, out: *mut *mut kvq_sequence) -> kvq_status;
    pub fn kvq_sequence_free(sequence: *mut kvq_sequence) -> kvq_status;
    pub fn kvq_sequence_fork(sequence: *const kvq_sequence, out: *mut *mut kvq_sequence) -> kvq_status;
    pub fn kvq_sequence_tokens(sequence: *const kvq_sequence, layer: i32, tokens: *mut i32) -> kvq_status;
    pub fn kvq_sequence_get_layer(sequence: *const kvq_sequence, layer: i32, out: *mut kvq_layer) -> kvq_status;
    pub fn kvq_sequence_prefill(sequence: *mut kvq_sequence, layer: i32, k: *const kvq_tensor, v: *const kvq_tensor,
        q: *const kvq_tensor, out: *const kvq_tensor, options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_sequence_append(sequence: *mut kvq_sequence, layer: i32, k: *const kvq_tensor, v: *const kvq_tensor) ->
        kvq_status;
    pub fn kvq_sequence_attend(sequence: *const kvq_sequence, layer: i32, q: *const kvq_tensor, out: *const kvq_tensor,
        options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_attend_rows(keys: *const kvq_rows, values: *const kvq_rows, blocks: *const kvq_row_blocks,
        q: *const kvq_tensor, out: *const kvq_tensor, options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_read_rows(rows: *const kvq_rows, blocks: *const kvq_row_blocks, first: i32, out: *const kvq_tensor,
        options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_write_rows(rows: *const kvq_rows, blocks: *const kvq_row_blocks, first: i32, x: *const kvq_tensor,
        not_finite: *mut i64, options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_convert_rows(from: *const kvq_rows, of_from: *const kvq_row_blocks, to: *const kvq_rows,
        of_to: *const kvq_row_blocks, dim: i32, not_finite: *mut i64, options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_sequence_select(sequence: *const kvq_sequence, layer: i32, q: *const kvq_tensor, weights: *const f32,
        best: i32, out: *mut i32, options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_sequence_append_draft(sequence: *mut kvq_sequence, layer: i32, k: *const kvq_tensor,
        v: *const kvq_tensor) -> kvq_status;
    pub fn kvq_sequence_keep(sequence: *mut kvq_sequence, path: *const i32, count: i32) -> kvq_status;
    pub fn kvq_sequence_trim(sequence: *mut kvq_sequence, tokens: i32) -> kvq_status;
    pub fn kvq_sequence_trim_limit(sequence: *const kvq_sequence, tokens: *mut i32) -> kvq_status;
    pub fn kvq_sequence_drop_copies(sequence: *mut kvq_sequence) -> kvq_status;
    pub fn kvq_sequence_erase(sequence: *mut kvq_sequence, first: i32, last: i32) -> kvq_status;
    pub fn kvq_sequence_shift(sequence: *mut kvq_sequence, first: i32, last: i32, by: i64) -> kvq_status;
    pub fn kvq_sequence_splice(sequence: *mut kvq_sequence, other: *const kvq_sequence, first: i32, last: i32) ->
        kvq_status;
    pub fn kvq_sequence_attention_mass(sequence: *const kvq_sequence, layer: i32, q: *const kvq_tensor, mass: *mut f32,
        options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_sequence_gap(sequence: *const kvq_sequence, layer: i32, first: *mut i32, last: *mut i32) -> kvq_status;
    pub fn kvq_sequence_retain(sequence: *mut kvq_sequence, layer: i32, kept: *const i32, count: i32) -> kvq_status;
    pub fn kvq_sequence_hold(sequence: *mut kvq_sequence) -> kvq_status;
    pub fn kvq_sequence_release(sequence: *mut kvq_sequence) -> kvq_status;
    pub fn kvq_sequence_append_bytes(sequence: *const kvq_sequence, n: i32, bytes: *mut usize) -> kvq_status;
    pub fn kvq_sequence_prefill_bytes(sequence: *const kvq_sequence, n: i32, bytes: *mut usize) -> kvq_status;
    pub fn kvq_sequence_draft_bytes(sequence: *const kvq_sequence, n: i32, bytes: *mut usize) -> kvq_status;
    pub fn kvq_sequence_dequantize(sequence: *const kvq_sequence, layer: i32, role: kvq_role, first: i32,
        out: *const kvq_tensor) -> kvq_status;
    pub fn kvq_sequence_get_usage(sequence: *const kvq_sequence, usage: *mut kvq_usage) -> kvq_status;
    pub fn kvq_sequence_get_pages(sequence: *const kvq_sequence, layer: i32, pages: *mut kvq_page, capacity: i32,
        count: *mut i32) -> kvq_status;
    pub fn kvq_sequence_state(sequence: *mut kvq_sequence, layer: i32, part: i32, data: *mut *mut c_void,
        bytes: *mut usize) -> kvq_status;
    pub fn kvq_sequence_advance(sequence: *mut kvq_sequence, n: i32, prompt_ends: i32, executor: *mut kvq_executor,
        taken: *mut i32) -> kvq_status;
    pub fn kvq_sequence_snapshot(sequence: *mut kvq_sequence, tokens: i32, executor: *mut kvq_executor) -> kvq_status;
    pub fn kvq_sequence_drop_snapshots(sequence: *mut kvq_sequence) -> kvq_status;
    pub fn kvq_sequence_reach(sequence: *const kvq_sequence, tokens: i32, reached: *mut i32) -> kvq_status;
    pub fn kvq_sequence_get_snapshots(sequence: *const kvq_sequence, snapshots: *mut kvq_snapshot, capacity: i32,
        count: *mut i32) -> kvq_status;
    pub fn kvq_cache_reserve(cache: *mut kvq_cache, requests: *const kvq_step_request, count: i32, q_heads: i32,
        options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_sequence_release_reserved(sequence: *mut kvq_sequence) -> kvq_status;
    pub fn kvq_cache_attend(cache: *const kvq_cache, layer: i32, requests: *const kvq_attend_request, count: i32,
        options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_cache_select(cache: *const kvq_cache, layer: i32, requests: *const kvq_select_request, count: i32,
        best: i32, options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_cache_prefill(cache: *mut kvq_cache, layer: i32, requests: *const kvq_prefill_request, count: i32,
        options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_cache_attend_pages(cache: *const kvq_cache, layer: i32, pages: *const kvq_page, count: i32,
        q: *const kvq_tensor, out: *const kvq_tensor, options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_cache_requantize(cache: *mut kvq_cache, sequences: *const *mut kvq_sequence, count: i32,
        request: *const kvq_requantize_request, report: *mut kvq_requantize_report) -> kvq_status;
    pub fn kvq_cache_step_down(cache: *mut kvq_cache, sequences: *const *mut kvq_sequence, count: i32,
        policy: *const kvq_step_down_policy, executor: *mut kvq_executor, report: *mut kvq_step_down_report) ->
        kvq_status;
    pub fn kvq_cache_plan_step_down(cache: *const kvq_cache, sequences: *const *mut kvq_sequence, count: i32,
        policy: *const kvq_step_down_policy, executor: *mut kvq_executor, report: *mut kvq_step_down_report) ->
        kvq_status;
    pub fn kvq_cache_get_footprint(cache: *const kvq_cache, tokens: i32, query: *const kvq_footprint_query,
        footprint: *mut kvq_footprint) -> kvq_status;
    pub fn kvq_cache_longest_context(cache: *const kvq_cache, budget: usize, query: *const kvq_footprint_query,
        tokens: *mut i32) -> kvq_status;
    pub fn kvq_get_budget(options: *const kvq_cache_options, query: *const kvq_budget_query, bytes: *mut usize) ->
        kvq_status;
    pub fn kvq_sequence_save(sequence: *const kvq_sequence, options: *const kvq_save_options, write: kvq_write,
        user: *mut c_void) -> kvq_status;
    pub fn kvq_sequence_save_file(sequence: *const kvq_sequence, options: *const kvq_save_options, path: *const c_char)
        -> kvq_status;
    pub fn kvq_sequence_restore(cache: *mut kvq_cache, options: *const kvq_save_options, read: kvq_read,
        user: *mut c_void, out: *mut *mut kvq_sequence) -> kvq_status;
    pub fn kvq_sequence_restore_file(cache: *mut kvq_cache, options: *const kvq_save_options, path: *const c_char,
        out: *mut *mut kvq_sequence) -> kvq_status;
    pub fn kvq_sequence_send_pages(sequence: *const kvq_sequence, layer: i32, write: kvq_write, user: *mut c_void) ->
        kvq_status;
    pub fn kvq_receiver_create(cache: *mut kvq_cache, out: *mut *mut kvq_receiver) -> kvq_status;
    pub fn kvq_receiver_free(receiver: *mut kvq_receiver) -> kvq_status;
    pub fn kvq_receiver_convert(receiver: *mut kvq_receiver, sinks: i32, recent: i32, page_tokens: i32) -> kvq_status;
    pub fn kvq_receiver_accept(receiver: *mut kvq_receiver, message: *const c_void, bytes: usize) -> kvq_status;
    pub fn kvq_receiver_finish(receiver: *mut kvq_receiver, tokens: i32, out: *mut *mut kvq_sequence) -> kvq_status;
    pub fn kvq_prefix_cache_create(cache: *mut kvq_cache, options: *const kvq_prefix_cache_options,
        out: *mut *mut kvq_prefix_cache) -> kvq_status;
    pub fn kvq_prefix_cache_free(store: *mut kvq_prefix_cache) -> kvq_status;
    pub fn kvq_prefix_cache_lookup(store: *const kvq_prefix_cache, tokens: *const i32, count: i32, r#match: *mut i32,
        found: *mut i32) -> kvq_status;
    pub fn kvq_prefix_cache_fetch(store: *mut kvq_prefix_cache, tokens: *const i32, count: i32, r#match: *mut i32,
        found: *mut i32, out: *mut *mut kvq_sequence) -> kvq_status;
    pub fn kvq_prefix_cache_store(store: *mut kvq_prefix_cache, tokens: *const i32, count: i32,
        sequence: *const kvq_sequence, outcome: *mut i32) -> kvq_status;
    pub fn kvq_prefix_cache_erase(store: *mut kvq_prefix_cache, tokens: *const i32, count: i32, erased: *mut i32) ->
        kvq_status;
    pub fn kvq_prefix_cache_clear(store: *mut kvq_prefix_cache) -> kvq_status;
    pub fn kvq_prefix_cache_release(store: *mut kvq_prefix_cache, bytes: usize, released: *mut usize) -> kvq_status;
    pub fn kvq_prefix_cache_step_down(store: *mut kvq_prefix_cache, live: *const *mut kvq_sequence, count: i32,
        policy: *const kvq_step_down_policy, executor: *mut kvq_executor, report: *mut kvq_step_down_report) ->
        kvq_status;
    pub fn kvq_prefix_cache_get_statistics(store: *const kvq_prefix_cache, statistics: *mut kvq_prefix_cache_statistics)
        -> kvq_status;
    pub fn kvq_ring_create(sequence: *const kvq_sequence, options: *const kvq_ring_options, out: *mut *mut kvq_ring) ->
        kvq_status;
    pub fn kvq_ring_free(ring: *mut kvq_ring) -> kvq_status;
    pub fn kvq_ring_fork(ring: *const kvq_ring, out: *mut *mut kvq_ring) -> kvq_status;
    pub fn kvq_ring_prefill(ring: *mut kvq_ring, layer: i32, k: *const kvq_tensor, v: *const kvq_tensor,
        q: *const kvq_tensor, out: *const kvq_tensor, options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_ring_append(ring: *mut kvq_ring, layer: i32, k: *const kvq_tensor, v: *const kvq_tensor) -> kvq_status;
    pub fn kvq_ring_attend(ring: *const kvq_ring, layer: i32, q: *const kvq_tensor, out: *const kvq_tensor,
        options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_ring_append_draft(ring: *mut kvq_ring, layer: i32, k: *const kvq_tensor, v: *const kvq_tensor) ->
        kvq_status;
    pub fn kvq_ring_keep(ring: *mut kvq_ring, path: *const i32, count: i32) -> kvq_status;
    pub fn kvq_ring_trim(ring: *mut kvq_ring, tokens: i64) -> kvq_status;
    pub fn kvq_ring_tokens(ring: *const kvq_ring, layer: i32, tokens: *mut i64, first_token: *mut i64) -> kvq_status;
    pub fn kvq_ring_held(ring: *const kvq_ring, out: *mut *mut kvq_sequence) -> kvq_status;
    pub fn kvq_sequence_table_create(cache: *mut kvq_cache, ids: i32, out: *mut *mut kvq_sequence_table) -> kvq_status;
    pub fn kvq_sequence_table_free(table: *mut kvq_sequence_table) -> kvq_status;
    pub fn kvq_sequence_table_grow(table: *mut kvq_sequence_table, ids: i32) -> kvq_status;
    pub fn kvq_sequence_table_begin(table: *mut kvq_sequence_table, batch: *const kvq_token_batch, q_heads: i32,
        options: *const kvq_attend_options) -> kvq_status;
    pub fn kvq_sequence_table_prefill(table: *mut kvq_sequence_table, layer: i32, k: *const kvq_tensor,
        v: *const kvq_tensor, q: *const kvq_tensor, out: *const kvq_tensor, options: *const kvq_attend_options) ->
        kvq_status;
    pub fn kvq_sequence_table_end(table: *mut kvq_sequence_table) -> kvq_status;
    pub fn kvq_sequence_table_take_back(table: *mut kvq_sequence_table) -> kvq_status;
    pub fn kvq_sequence_table_remove(table: *mut kvq_sequence_table, id: i32, first: i32, last: i32) -> kvq_status;
    pub fn kvq_sequence_table_copy(table: *mut kvq_sequence_table, from: i32, to: i32, first: i32, last: i32) ->
        kvq_status;
    pub fn kvq_sequence_table_keep(table: *mut kvq_sequence_table, id: i32) -> kvq_status;
    pub fn kvq_sequence_table_shift(table: *mut kvq_sequence_table, id: i32, first: i32, last: i32, by: i32) ->
        kvq_status;
    pub fn kvq_sequence_table_clear(table: *mut kvq_sequence_table) -> kvq_status;
    pub fn kvq_sequence_table_positions(table: *const kvq_sequence_table, id: i32, positions: *mut i32, capacity: i32,
        count: *mut i32) -> kvq_status;
    pub fn kvq_sequence_table_fork(table: *const kvq_sequence_table, id: i32, out: *mut *mut kvq_sequence) ->
        kvq_status;
    pub fn kvq_sequence_table_get_usage(table: *const kvq_sequence_table, usage: *mut kvq_table_usage) -> kvq_status;
    pub fn kvq_sequence_table_write(table: *mut kvq_sequence_table, id: i32, write: kvq_write, user: *mut c_void) ->
        kvq_status;
    pub fn kvq_sequence_table_state_bytes(table: *mut kvq_sequence_table, id: i32, bytes: *mut usize) -> kvq_status;
    pub fn kvq_sequence_table_read(table: *mut kvq_sequence_table, id: i32, read: kvq_read, user: *mut c_void) ->
        kvq_status;
    pub fn kvq_statistics_create(layers: i32, kv_heads: i32, head_dim: i32, products: i32,
        out: *mut *mut kvq_statistics) -> kvq_status;
    pub fn kvq_statistics_free(statistics: *mut kvq_statistics) -> kvq_status;
    pub fn kvq_statistics_add_keys(statistics: *mut kvq_statistics, layer: i32, k: *const kvq_tensor) -> kvq_status;
    pub fn kvq_statistics_add_sequence(statistics: *mut kvq_statistics, sequence: *const kvq_sequence, first: i32,
        count: i32) -> kvq_status;
    pub fn kvq_statistics_add_queries(statistics: *mut kvq_statistics, layer: i32, q: *const kvq_tensor) -> kvq_status;
    pub fn kvq_statistics_save(statistics: *const kvq_statistics, write: kvq_write, user: *mut c_void) -> kvq_status;
    pub fn kvq_statistics_load(data: *const c_void, bytes: usize, out: *mut *mut kvq_statistics) -> kvq_status;
}
