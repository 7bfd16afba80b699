"""The C interface include/kvq/kvq.h in ctypes: constants, structs and functions. Made by bindings/generate.py."""
from __future__ import annotations

from ctypes import (CFUNCTYPE, POINTER, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_ssize_t, c_void_p)
from typing import Any, Dict, List, Tuple

from ._struct import Struct, handle

OK = 0
ERROR_ARGUMENT = 1
ERROR_HANDLE = 2
ERROR_STRUCT = 3
ERROR_MEMORY = 4
ERROR_DATA = 5
ERROR_CALLBACK = 6
ERROR_UNSUPPORTED = 7
ERROR_INTERNAL = 8
KEY = 0
VALUE = 1
FP32 = 0
FP16 = 1
BF16 = 2
CAUSAL = 0
BIDIRECTIONAL = 1
CROSS = 2
PAGE_NONE = 0
PAGE_SOME = 1
PAGE_ALL = 2
HALF_SPLIT = 0
INTERLEAVED = 1
FULL_ATTENTION = 0
SLIDING_ATTENTION = 1
CHUNKED_ATTENTION = 2
SHARED = 3
CROSS_ATTENTION = 4
STATE = 5
LATENT = 6
INDEX = 7
SNAPSHOT_EXACT = 0
SNAPSHOT_INT8_ROWS = 1
SNAPSHOT_INT8_COLUMNS = 2
SNAPSHOT_E4M3 = 3
OWN_STATISTICS = 0
SHARED_STATISTICS = 1
MATCH_EXACT = 0
MATCH_SUPERSEQUENCE = 1
MATCH_PREFIX = 2
MATCH_LCP = 3
MISS = 4
MISS_SHORT_PREFIX = 5
MISS_SHORT_LCP = 6
STORED = 0
STORE_DUPLICATE = 1
STORE_TOO_LARGE = 2
ABI_VERSION = 1
NONE = -1
ALL_LAYERS = -1

task_function = CFUNCTYPE(None, c_void_p, c_int32)
write_function = CFUNCTYPE(c_int32, c_void_p, c_void_p, c_size_t)
read_function = CFUNCTYPE(c_size_t, c_void_p, c_void_p, c_size_t)
allocate_function = CFUNCTYPE(c_void_p, c_void_p, c_size_t, c_size_t)
deallocate_function = CFUNCTYPE(None, c_void_p, c_void_p, c_size_t, c_size_t)
parallel_for_function = CFUNCTYPE(c_int32, c_void_p, c_int32, c_void_p, c_void_p)
mask_row_function = CFUNCTYPE(None, c_void_p, c_void_p, c_int32, c_int32, c_int32)
mask_page_function = CFUNCTYPE(c_int32, c_void_p, c_int32, c_int32, c_int32, c_int32)
score_row_function = CFUNCTYPE(None, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32)
rotate_function = CFUNCTYPE(None, c_void_p, c_void_p, c_int32, c_int64)


class kvq_tensor(Struct):
    _fields_ = [("data", c_void_p), ("dtype", c_int32), ("tokens", c_int32), ("heads", c_int32), ("dim", c_int32),
                ("token_stride", c_ssize_t), ("head_stride", c_ssize_t)]


class kvq_allocator(Struct):
    _fields_ = [("size", c_size_t), ("allocate", allocate_function), ("deallocate", deallocate_function),
                ("user", c_void_p)]


class kvq_executor_callbacks(Struct):
    _fields_ = [("size", c_size_t), ("concurrency", c_int32), ("parallel_for", parallel_for_function),
                ("user", c_void_p)]


class kvq_format_entry(Struct):
    _fields_ = [("size", c_size_t), ("name", c_char_p), ("keys", c_int32), ("values", c_int32),
                ("takes_statistics", c_int32), ("group", c_int32), ("preset", c_int32)]


class kvq_format_description(Struct):
    _fields_ = [("size", c_size_t), ("name", c_char_p), ("backend", c_char_p), ("bits", c_double),
                ("block_bytes", c_size_t), ("quantize", c_int32), ("dequantize", c_int32), ("attend", c_int32),
                ("dequantizes_first", c_int32), ("holds_values", c_int32), ("asked_name", c_char_p),
                ("quantize_by", c_char * 104), ("dequantize_by", c_char * 104), ("attend_by", c_char * 104)]


class kvq_page_shape(Struct):
    _fields_ = [("role", c_int32), ("tokens", c_int32), ("heads", c_int32), ("dim", c_int32), ("layer", c_int32),
                ("first_head", c_int32)]


class kvq_page(Struct):
    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("key_format", c_int32), ("value_format", c_int32),
                ("key_capacity", c_int32), ("value_capacity", c_int32), ("skip", c_int32), ("tokens", c_int32),
                ("shift", c_int64)]


class kvq_token_range(Struct):
    _fields_ = [("begin", c_int32), ("end", c_int32)]


class kvq_chosen_tokens(Struct):
    _fields_ = [("layer", c_int32), ("kv_head", c_int32), ("first_query", c_int32), ("last_query", c_int32),
                ("tokens", kvq_token_range)]


class kvq_selection_report(Struct):
    _fields_ = [("size", c_size_t), ("pages", c_int64), ("read", c_int64), ("chosen", POINTER(kvq_chosen_tokens)),
                ("chosen_capacity", c_int32), ("chosen_count", c_int32)]


class kvq_skipping_report(Struct):
    _fields_ = [("size", c_size_t), ("pages", c_int64), ("skipped", c_int64), ("rows", c_int64), ("left_out", c_double),
                ("most_left_out", c_float)]


class kvq_mods(Struct):
    _fields_ = [("size", c_size_t), ("direction", c_int32), ("window", c_int32), ("window_sinks", c_int32),
                ("prefix", c_int32), ("document_starts", POINTER(c_int32)), ("documents", c_int32),
                ("tree_parents", POINTER(c_int32)), ("tree_tokens", c_int32), ("tree_first", c_int32),
                ("scale", c_float), ("softcap", c_float), ("alibi_slopes", POINTER(c_float)), ("alibi_heads", c_int32),
                ("sink_heads", c_int32), ("sink_logits", POINTER(c_float)), ("mask_row", mask_row_function),
                ("mask_page", mask_page_function), ("score_row", score_row_function), ("user", c_void_p),
                ("token_ranges", POINTER(kvq_token_range)), ("range_starts", POINTER(c_int32)),
                ("range_count", c_int32), ("range_start_count", c_int32), ("range_first_query", c_int32),
                ("selected_tokens", c_int32), ("skipped_mass", c_float), ("upper_only", c_int32),
                ("selection", POINTER(kvq_selection_report)), ("skipping", POINTER(kvq_skipping_report)),
                ("listed_tokens", POINTER(c_int32)), ("listed_window", POINTER(c_int32)), ("listed_count", c_int32),
                ("listed_window_count", c_int32), ("list_queries", c_int32), ("list_kv_heads", c_int32)]


class kvq_rotary(Struct):
    _fields_ = [("dims", c_int32), ("first_channel", c_int32), ("layout", c_int32), ("frequency_count", c_int32),
                ("base", c_double), ("frequencies", POINTER(c_double)), ("rotate", rotate_function), ("user", c_void_p)]


class kvq_layer_formats(Struct):
    _fields_ = [("keys", c_char_p), ("values", c_char_p)]


class kvq_layer(Struct):
    _fields_ = [("kind", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32), ("value_dim", c_int32),
                ("window", c_int32), ("sinks", c_int32), ("owner", c_int32)]


class kvq_state_part(Struct):
    _fields_ = [("name", c_char_p), ("layer", c_int32), ("dtype", c_int32), ("heads", c_int32), ("rows", c_int32),
                ("columns", c_int32), ("snapshot", c_int32)]


class kvq_cache_options(Struct):
    _fields_ = [("size", c_size_t), ("layers", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32),
                ("value_dim", c_int32), ("keys", c_char_p), ("values", c_char_p), ("window", c_char_p),
                ("page_tokens", c_int32), ("sinks", c_int32), ("recent", c_int32), ("rollback", c_int32),
                ("byte_budget", c_size_t), ("layer_formats", POINTER(kvq_layer_formats)),
                ("rotary", POINTER(kvq_rotary)), ("rotary_count", c_int32), ("key_statistics", c_int32),
                ("statistics", handle), ("allocator", POINTER(kvq_allocator)), ("preallocate", c_int32),
                ("repack", c_float), ("layer_list", POINTER(kvq_layer)), ("state_parts", POINTER(kvq_state_part)),
                ("snapshot_bytes", c_size_t), ("state_part_count", c_int32), ("snapshot_every", c_int32),
                ("snapshot_prompt_end", c_int32), ("statistics_tokens", c_int32), ("reserved", c_int32)]


class kvq_cache_info(Struct):
    _fields_ = [("size", c_size_t), ("layers", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32),
                ("value_dim", c_int32), ("page_tokens", c_int32), ("sinks", c_int32), ("recent", c_int32),
                ("rollback", c_int32), ("byte_budget", c_size_t), ("bytes_in_use", c_size_t),
                ("pages_in_use", c_size_t), ("bytes_held", c_size_t)]


class kvq_attend_options(Struct):
    _fields_ = [("size", c_size_t), ("mods", POINTER(kvq_mods)), ("executor", handle), ("workspace", handle),
                ("lse", c_void_p)]


class kvq_rows(Struct):
    _fields_ = [("format", handle), ("data", c_void_p), ("token_stride", c_ssize_t), ("head_stride", c_ssize_t),
                ("block_stride", c_ssize_t), ("scales", c_void_p), ("scale_token_stride", c_ssize_t),
                ("scale_head_stride", c_ssize_t), ("scale_block_stride", c_ssize_t), ("scale_group_stride", c_ssize_t),
                ("biases", c_void_p)]


class kvq_row_blocks(Struct):
    _fields_ = [("table", POINTER(c_int32)), ("blocks", c_int32), ("block_tokens", c_int32), ("memory_blocks", c_int32),
                ("tokens", c_int32), ("kv_heads", c_int32)]


class kvq_usage(Struct):
    _fields_ = [("size", c_size_t), ("quantized", c_size_t), ("window", c_size_t), ("slack", c_size_t),
                ("rollback", c_size_t), ("bookkeeping", c_size_t), ("workspace", c_size_t), ("bytes", c_size_t),
                ("not_finite", c_size_t), ("tokens", c_int32), ("reserved", c_size_t), ("repacked", c_size_t),
                ("state", c_size_t)]


class kvq_snapshot(Struct):
    _fields_ = [("tokens", c_int32), ("reserved", c_int32), ("bytes", c_size_t), ("error", c_double)]


class kvq_attend_request(Struct):
    _fields_ = [("sequence", handle), ("q", kvq_tensor), ("out", kvq_tensor), ("lse", c_void_p),
                ("mods", POINTER(kvq_mods))]


class kvq_prefill_request(Struct):
    _fields_ = [("sequence", handle), ("k", kvq_tensor), ("v", kvq_tensor), ("q", kvq_tensor), ("out", kvq_tensor),
                ("lse", c_void_p), ("mods", POINTER(kvq_mods))]


class kvq_select_request(Struct):
    _fields_ = [("sequence", handle), ("q", kvq_tensor), ("weights", POINTER(c_float)), ("out", c_void_p)]


class kvq_step_request(Struct):
    _fields_ = [("sequence", handle), ("tokens", c_int32), ("q_tokens", c_int32), ("mods", POINTER(kvq_mods))]


class kvq_requantize_request(Struct):
    _fields_ = [("size", c_size_t), ("keys", c_char_p), ("values", c_char_p), ("first_layer", c_int32),
                ("last_layer", c_int32), ("first_token", c_int32), ("last_token", c_int32), ("only_smaller", c_int32),
                ("new_pages", c_int32), ("dry_run", c_int32), ("reserved", c_int32), ("most_pages", c_size_t),
                ("most_nanoseconds", c_int64), ("executor", handle), ("workspace", handle)]


class kvq_requantize_report(Struct):
    _fields_ = [("size", c_size_t), ("pages", c_size_t), ("pages_left", c_size_t), ("bytes_before", c_size_t),
                ("bytes_after", c_size_t), ("bytes_peak", c_size_t), ("bytes_freed", c_size_t), ("workspace", c_size_t)]


class kvq_tier(Struct):
    _fields_ = [("age", c_int32), ("reserved", c_int32), ("keys", c_char_p), ("values", c_char_p)]


class kvq_step_down_policy(Struct):
    _fields_ = [("size", c_size_t), ("tiers", POINTER(kvq_tier)), ("tier_count", c_int32),
                ("first_layers_kept", c_int32), ("last_layers_kept", c_int32), ("reserved", c_int32),
                ("byte_budget", c_size_t)]


class kvq_step_down_report(Struct):
    _fields_ = [("size", c_size_t), ("pages", c_size_t), ("bytes_before", c_size_t), ("bytes_after", c_size_t),
                ("bytes_peak", c_size_t), ("fits", c_int32)]


class kvq_footprint_query(Struct):
    _fields_ = [("size", c_size_t), ("sequences", c_int32), ("q_heads", c_int32), ("q_tokens", c_int32),
                ("threads", c_int32), ("chunk", c_int32), ("cross_tokens", c_int32),
                ("policy", POINTER(kvq_step_down_policy))]


class kvq_footprint(Struct):
    _fields_ = [("size", c_size_t), ("quantized", c_size_t), ("window", c_size_t), ("rollback", c_size_t),
                ("bookkeeping", c_size_t), ("workspace", c_size_t), ("attention", c_size_t), ("total", c_size_t),
                ("transient", c_size_t), ("unused", c_size_t), ("state", c_size_t)]


class kvq_budget_query(Struct):
    _fields_ = [("size", c_size_t), ("tokens", c_int32), ("sequences", c_int32), ("chunk", c_int32), ("cuts", c_int32),
                ("cross_tokens", c_int32)]


class kvq_save_options(Struct):
    _fields_ = [("size", c_size_t), ("model", c_char_p), ("convert", c_int32), ("upper_only", c_int32)]


class kvq_prefix_cache_options(Struct):
    _fields_ = [("size", c_size_t), ("byte_limit", c_size_t), ("max_entries", c_int32), ("min_prefix_tokens", c_int32),
                ("min_quantize_tokens", c_int32), ("reserved", c_int32), ("keys", c_char_p), ("values", c_char_p)]


class kvq_prefix_cache_statistics(Struct):
    _fields_ = [("size", c_size_t), ("fetches", c_size_t * 7), ("tokens_saved", c_size_t), ("stored", c_size_t),
                ("duplicates", c_size_t), ("rejections", c_size_t), ("replaced", c_size_t), ("evictions", c_size_t),
                ("entries", c_size_t), ("bytes", c_size_t)]


class kvq_ring_options(Struct):
    _fields_ = [("size", c_size_t), ("window", c_int32), ("slack", c_int32), ("sinks_in_cache", c_int32),
                ("reserved", c_int32), ("first_token", c_int64)]


class kvq_token_batch(Struct):
    _fields_ = [("size", c_size_t), ("positions", POINTER(c_int32)), ("id_counts", POINTER(c_int32)),
                ("ids", POINTER(c_int32)), ("tokens", c_int32), ("reserved", c_int32)]


class kvq_table_usage(Struct):
    _fields_ = [("size", c_size_t), ("tokens", c_size_t), ("bytes", c_size_t), ("ids", c_int32), ("can_shift", c_int32)]


# Arguments of the functions that return a status.
FUNCTIONS: Dict[str, List[Any]] = {
    "kvq_workspace_create": [POINTER(kvq_allocator), c_size_t, POINTER(handle)],
    "kvq_workspace_free": [handle],
    "kvq_workspace_reserve": [handle, c_size_t],
    "kvq_workspace_bytes": [handle, POINTER(c_size_t)],
    "kvq_executor_create": [POINTER(kvq_executor_callbacks), POINTER(handle)],
    "kvq_executor_create_threads": [c_int32, POINTER(handle)],
    "kvq_executor_free": [handle],
    "kvq_format_count": [POINTER(c_int32)],
    "kvq_format_list": [c_int32, POINTER(kvq_format_entry)],
    "kvq_format_find": [c_char_p, c_int32, handle, POINTER(handle)],
    "kvq_format_find_rows": [c_char_p, c_float, POINTER(handle)],
    "kvq_format_find_head_rows": [c_char_p, POINTER(c_float), c_int32, c_int32, POINTER(handle)],
    "kvq_format_row_bytes": [handle, c_int32, POINTER(c_int32), POINTER(c_int32), POINTER(c_int32)],
    "kvq_format_free": [handle],
    "kvq_format_describe": [handle, c_int32, c_int32, c_int32, POINTER(kvq_format_description)],
    "kvq_format_page_bytes": [handle, POINTER(kvq_page_shape), POINTER(c_size_t), POINTER(c_size_t)],
    "kvq_format_quantize": [handle, POINTER(kvq_page_shape), POINTER(kvq_tensor), c_void_p, c_size_t, c_void_p,
        c_size_t, POINTER(c_size_t)],
    "kvq_format_dequantize": [handle, POINTER(kvq_page_shape), c_void_p, c_size_t, POINTER(kvq_tensor), c_void_p,
        c_size_t],
    "kvq_rotary_llama3": [c_int32, c_double, c_double, c_double, c_double, c_double, POINTER(c_double)],
    "kvq_rotary_yarn": [c_int32, c_double, c_double, c_double, c_double, c_double, POINTER(c_double)],
    "kvq_cache_create": [POINTER(kvq_cache_options), POINTER(handle)],
    "kvq_cache_free": [handle],
    "kvq_cache_get_info": [handle, POINTER(kvq_cache_info)],
    "kvq_cache_get_layer": [handle, c_int32, POINTER(kvq_layer)],
    "kvq_cache_add_format": [handle, c_int32, handle, c_char_p],
    "kvq_cache_commit_to": [handle, c_int32, c_char_p, c_int32, c_int32],
    "kvq_cache_find_format": [handle, c_int32, c_char_p, POINTER(c_int32)],
    "kvq_cache_get_format": [handle, c_int32, c_int32, POINTER(handle)],
    "kvq_cache_workspace_bytes": [handle, c_int32, c_int32, c_int32, c_int32, POINTER(c_size_t)],
    "kvq_sequence_create": [handle, POINTER(handle)],
    "kvq_sequence_free": [handle],
    "kvq_sequence_fork": [handle, POINTER(handle)],
    "kvq_sequence_tokens": [handle, c_int32, POINTER(c_int32)],
    "kvq_sequence_get_layer": [handle, c_int32, POINTER(kvq_layer)],
    "kvq_sequence_prefill": [handle, c_int32, POINTER(kvq_tensor), POINTER(kvq_tensor), POINTER(kvq_tensor),
        POINTER(kvq_tensor), POINTER(kvq_attend_options)],
    "kvq_sequence_append": [handle, c_int32, POINTER(kvq_tensor), POINTER(kvq_tensor)],
    "kvq_sequence_attend": [handle, c_int32, POINTER(kvq_tensor), POINTER(kvq_tensor), POINTER(kvq_attend_options)],
    "kvq_attend_rows": [POINTER(kvq_rows), POINTER(kvq_rows), POINTER(kvq_row_blocks), POINTER(kvq_tensor),
        POINTER(kvq_tensor), POINTER(kvq_attend_options)],
    "kvq_read_rows": [POINTER(kvq_rows), POINTER(kvq_row_blocks), c_int32, POINTER(kvq_tensor),
        POINTER(kvq_attend_options)],
    "kvq_write_rows": [POINTER(kvq_rows), POINTER(kvq_row_blocks), c_int32, POINTER(kvq_tensor), POINTER(c_int64),
        POINTER(kvq_attend_options)],
    "kvq_convert_rows": [POINTER(kvq_rows), POINTER(kvq_row_blocks), POINTER(kvq_rows), POINTER(kvq_row_blocks),
        c_int32, POINTER(c_int64), POINTER(kvq_attend_options)],
    "kvq_sequence_select": [handle, c_int32, POINTER(kvq_tensor), POINTER(c_float), c_int32, POINTER(c_int32),
        POINTER(kvq_attend_options)],
    "kvq_sequence_append_draft": [handle, c_int32, POINTER(kvq_tensor), POINTER(kvq_tensor)],
    "kvq_sequence_keep": [handle, POINTER(c_int32), c_int32],
    "kvq_sequence_trim": [handle, c_int32],
    "kvq_sequence_trim_limit": [handle, POINTER(c_int32)],
    "kvq_sequence_drop_copies": [handle],
    "kvq_sequence_erase": [handle, c_int32, c_int32],
    "kvq_sequence_shift": [handle, c_int32, c_int32, c_int64],
    "kvq_sequence_splice": [handle, handle, c_int32, c_int32],
    "kvq_sequence_attention_mass": [handle, c_int32, POINTER(kvq_tensor), POINTER(c_float),
        POINTER(kvq_attend_options)],
    "kvq_sequence_gap": [handle, c_int32, POINTER(c_int32), POINTER(c_int32)],
    "kvq_sequence_retain": [handle, c_int32, POINTER(c_int32), c_int32],
    "kvq_sequence_hold": [handle],
    "kvq_sequence_release": [handle],
    "kvq_sequence_append_bytes": [handle, c_int32, POINTER(c_size_t)],
    "kvq_sequence_prefill_bytes": [handle, c_int32, POINTER(c_size_t)],
    "kvq_sequence_draft_bytes": [handle, c_int32, POINTER(c_size_t)],
    "kvq_sequence_dequantize": [handle, c_int32, c_int32, c_int32, POINTER(kvq_tensor)],
    "kvq_sequence_get_usage": [handle, POINTER(kvq_usage)],
    "kvq_sequence_get_pages": [handle, c_int32, POINTER(kvq_page), c_int32, POINTER(c_int32)],
    "kvq_sequence_state": [handle, c_int32, c_int32, c_void_p, POINTER(c_size_t)],
    "kvq_sequence_advance": [handle, c_int32, c_int32, handle, POINTER(c_int32)],
    "kvq_sequence_snapshot": [handle, c_int32, handle],
    "kvq_sequence_drop_snapshots": [handle],
    "kvq_sequence_reach": [handle, c_int32, POINTER(c_int32)],
    "kvq_sequence_get_snapshots": [handle, POINTER(kvq_snapshot), c_int32, POINTER(c_int32)],
    "kvq_cache_reserve": [handle, POINTER(kvq_step_request), c_int32, c_int32, POINTER(kvq_attend_options)],
    "kvq_sequence_release_reserved": [handle],
    "kvq_cache_attend": [handle, c_int32, POINTER(kvq_attend_request), c_int32, POINTER(kvq_attend_options)],
    "kvq_cache_select": [handle, c_int32, POINTER(kvq_select_request), c_int32, c_int32, POINTER(kvq_attend_options)],
    "kvq_cache_prefill": [handle, c_int32, POINTER(kvq_prefill_request), c_int32, POINTER(kvq_attend_options)],
    "kvq_cache_attend_pages": [handle, c_int32, POINTER(kvq_page), c_int32, POINTER(kvq_tensor), POINTER(kvq_tensor),
        POINTER(kvq_attend_options)],
    "kvq_cache_requantize": [handle, POINTER(handle), c_int32, POINTER(kvq_requantize_request),
        POINTER(kvq_requantize_report)],
    "kvq_cache_step_down": [handle, POINTER(handle), c_int32, POINTER(kvq_step_down_policy), handle,
        POINTER(kvq_step_down_report)],
    "kvq_cache_plan_step_down": [handle, POINTER(handle), c_int32, POINTER(kvq_step_down_policy), handle,
        POINTER(kvq_step_down_report)],
    "kvq_cache_get_footprint": [handle, c_int32, POINTER(kvq_footprint_query), POINTER(kvq_footprint)],
    "kvq_cache_longest_context": [handle, c_size_t, POINTER(kvq_footprint_query), POINTER(c_int32)],
    "kvq_get_budget": [POINTER(kvq_cache_options), POINTER(kvq_budget_query), POINTER(c_size_t)],
    "kvq_sequence_save": [handle, POINTER(kvq_save_options), write_function, c_void_p],
    "kvq_sequence_save_file": [handle, POINTER(kvq_save_options), c_char_p],
    "kvq_sequence_restore": [handle, POINTER(kvq_save_options), read_function, c_void_p, POINTER(handle)],
    "kvq_sequence_restore_file": [handle, POINTER(kvq_save_options), c_char_p, POINTER(handle)],
    "kvq_sequence_send_pages": [handle, c_int32, write_function, c_void_p],
    "kvq_receiver_create": [handle, POINTER(handle)],
    "kvq_receiver_free": [handle],
    "kvq_receiver_convert": [handle, c_int32, c_int32, c_int32],
    "kvq_receiver_accept": [handle, c_void_p, c_size_t],
    "kvq_receiver_finish": [handle, c_int32, POINTER(handle)],
    "kvq_prefix_cache_create": [handle, POINTER(kvq_prefix_cache_options), POINTER(handle)],
    "kvq_prefix_cache_free": [handle],
    "kvq_prefix_cache_lookup": [handle, POINTER(c_int32), c_int32, POINTER(c_int32), POINTER(c_int32)],
    "kvq_prefix_cache_fetch": [handle, POINTER(c_int32), c_int32, POINTER(c_int32), POINTER(c_int32), POINTER(handle)],
    "kvq_prefix_cache_store": [handle, POINTER(c_int32), c_int32, handle, POINTER(c_int32)],
    "kvq_prefix_cache_erase": [handle, POINTER(c_int32), c_int32, POINTER(c_int32)],
    "kvq_prefix_cache_clear": [handle],
    "kvq_prefix_cache_release": [handle, c_size_t, POINTER(c_size_t)],
    "kvq_prefix_cache_step_down": [handle, POINTER(handle), c_int32, POINTER(kvq_step_down_policy), handle,
        POINTER(kvq_step_down_report)],
    "kvq_prefix_cache_get_statistics": [handle, POINTER(kvq_prefix_cache_statistics)],
    "kvq_ring_create": [handle, POINTER(kvq_ring_options), POINTER(handle)],
    "kvq_ring_free": [handle],
    "kvq_ring_fork": [handle, POINTER(handle)],
    "kvq_ring_prefill": [handle, c_int32, POINTER(kvq_tensor), POINTER(kvq_tensor), POINTER(kvq_tensor),
        POINTER(kvq_tensor), POINTER(kvq_attend_options)],
    "kvq_ring_append": [handle, c_int32, POINTER(kvq_tensor), POINTER(kvq_tensor)],
    "kvq_ring_attend": [handle, c_int32, POINTER(kvq_tensor), POINTER(kvq_tensor), POINTER(kvq_attend_options)],
    "kvq_ring_append_draft": [handle, c_int32, POINTER(kvq_tensor), POINTER(kvq_tensor)],
    "kvq_ring_keep": [handle, POINTER(c_int32), c_int32],
    "kvq_ring_trim": [handle, c_int64],
    "kvq_ring_tokens": [handle, c_int32, POINTER(c_int64), POINTER(c_int64)],
    "kvq_ring_held": [handle, POINTER(handle)],
    "kvq_sequence_table_create": [handle, c_int32, POINTER(handle)],
    "kvq_sequence_table_free": [handle],
    "kvq_sequence_table_grow": [handle, c_int32],
    "kvq_sequence_table_begin": [handle, POINTER(kvq_token_batch), c_int32, POINTER(kvq_attend_options)],
    "kvq_sequence_table_prefill": [handle, c_int32, POINTER(kvq_tensor), POINTER(kvq_tensor), POINTER(kvq_tensor),
        POINTER(kvq_tensor), POINTER(kvq_attend_options)],
    "kvq_sequence_table_end": [handle],
    "kvq_sequence_table_take_back": [handle],
    "kvq_sequence_table_remove": [handle, c_int32, c_int32, c_int32],
    "kvq_sequence_table_copy": [handle, c_int32, c_int32, c_int32, c_int32],
    "kvq_sequence_table_keep": [handle, c_int32],
    "kvq_sequence_table_shift": [handle, c_int32, c_int32, c_int32, c_int32],
    "kvq_sequence_table_clear": [handle],
    "kvq_sequence_table_positions": [handle, c_int32, POINTER(c_int32), c_int32, POINTER(c_int32)],
    "kvq_sequence_table_fork": [handle, c_int32, POINTER(handle)],
    "kvq_sequence_table_get_usage": [handle, POINTER(kvq_table_usage)],
    "kvq_sequence_table_write": [handle, c_int32, write_function, c_void_p],
    "kvq_sequence_table_state_bytes": [handle, c_int32, POINTER(c_size_t)],
    "kvq_sequence_table_read": [handle, c_int32, read_function, c_void_p],
    "kvq_statistics_create": [c_int32, c_int32, c_int32, c_int32, POINTER(handle)],
    "kvq_statistics_free": [handle],
    "kvq_statistics_add_keys": [handle, c_int32, POINTER(kvq_tensor)],
    "kvq_statistics_add_sequence": [handle, handle, c_int32, c_int32],
    "kvq_statistics_add_queries": [handle, c_int32, POINTER(kvq_tensor)],
    "kvq_statistics_save": [handle, write_function, c_void_p],
    "kvq_statistics_load": [c_void_p, c_size_t, POINTER(handle)],
}

# The others: result and arguments.
OTHERS: Dict[str, Tuple[Any, List[Any]]] = {
    "kvq_last_error": (c_char_p, []),
    "kvq_status_name": (c_char_p, [c_int32]),
    "kvq_version": (c_char_p, []),
    "kvq_abi_version": (c_int32, []),
}
