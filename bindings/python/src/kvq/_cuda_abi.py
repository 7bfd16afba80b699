"""The C interface include/kvq/kvq_cuda.h in ctypes: constants, structs and functions. Made by bindings/generate.py."""
from __future__ import annotations

from ctypes import (CFUNCTYPE, POINTER, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p)
from typing import Any, Dict, List

from ._struct import Struct, handle
from ._abi import (kvq_layer, kvq_layer_formats, kvq_requantize_report, kvq_rotary, kvq_save_options, kvq_snapshot,
                   kvq_state_part, kvq_step_down_report, kvq_tensor, kvq_usage, read_function, write_function)

ERROR_CUDA = 9
CUDA_PLACE_NONE = 0
CUDA_PLACE_DEVICE = 1
CUDA_PLACE_HOST = 2
CUDA_PLACE_FILE = 3

allocate_function = CFUNCTYPE(c_void_p, c_void_p, c_size_t)
deallocate_function = CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)


class kvq_cuda_format_entry(Struct):
    _fields_ = [("size", c_size_t), ("formats", c_char_p), ("head_dim", c_int32), ("page_tokens", c_int32),
                ("window", c_int32), ("alibi", c_int32)]


class kvq_cuda_allocator(Struct):
    _fields_ = [("size", c_size_t), ("allocate", allocate_function), ("deallocate", deallocate_function),
                ("user", c_void_p)]


class kvq_cuda_cache_options(Struct):
    _fields_ = [("size", c_size_t), ("layers", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32),
                ("page_tokens", c_int32), ("formats", c_char_p), ("window", c_char_p), ("sinks", c_int32),
                ("recent", c_int32), ("rollback", c_int32), ("max_batch", c_int32), ("max_tokens", c_int32),
                ("step_tokens", c_int32), ("draft_tokens", c_int32), ("pool_tokens", c_int32),
                ("pool_sequences", c_int32), ("fixed", c_int32), ("statistics", handle),
                ("allocator", POINTER(kvq_cuda_allocator)), ("alibi", c_int32), ("query_heads", c_int32),
                ("layer_list", POINTER(kvq_layer)), ("layer_formats", POINTER(kvq_layer_formats)),
                ("state_parts", POINTER(kvq_state_part)), ("snapshot_bytes", c_size_t), ("state_part_count", c_int32),
                ("snapshot_every", c_int32), ("snapshot_prompt_end", c_int32), ("pool_states", c_int32),
                ("rotary_count", c_int32), ("rotary", POINTER(kvq_rotary)), ("listed_tokens", c_int32),
                ("resident_tokens", c_int32), ("key_statistics", c_int32), ("statistics_tokens", c_int32),
                ("prompt_scratch_mib", c_int32)]


class kvq_cuda_cache_info(Struct):
    _fields_ = [("size", c_size_t), ("layers", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32),
                ("page_tokens", c_int32), ("sinks", c_int32), ("recent", c_int32), ("rollback", c_int32),
                ("max_batch", c_int32), ("max_tokens", c_int32), ("step_tokens", c_int32), ("draft_tokens", c_int32),
                ("device", c_int32), ("quantized", c_size_t), ("window", c_size_t), ("unused", c_size_t),
                ("tables", c_size_t), ("workspace", c_size_t), ("prompt", c_size_t), ("bytes", c_size_t),
                ("state", c_size_t)]


class kvq_cuda_state_view(Struct):
    _fields_ = [("size", c_size_t), ("data", c_void_p), ("slot_bytes", c_size_t), ("bytes", c_size_t),
                ("row_slots", c_void_p), ("slot_count", c_int32), ("rows", c_int32)]


class kvq_cuda_attend_options(Struct):
    _fields_ = [("size", c_size_t), ("scale", c_float), ("softcap", c_float), ("window", c_int32),
                ("window_sinks", c_int32), ("ancestors", c_void_p), ("lse", c_void_p), ("sink_logits", c_void_p),
                ("alibi_slopes", c_void_p), ("listed_tokens", c_void_p), ("listed_window", c_void_p),
                ("listed_count", c_int32), ("listed_window_count", c_int32), ("list_kv_heads", c_int32),
                ("selected_tokens", c_int32), ("upper_only", c_int32)]


class kvq_cuda_requantize_request(Struct):
    _fields_ = [("size", c_size_t), ("format", c_char_p), ("first_token", c_int32), ("last_token", c_int32),
                ("only_smaller", c_int32), ("new_pages", c_int32), ("dry_run", c_int32), ("reserved", c_int32),
                ("report", POINTER(kvq_requantize_report))]


class kvq_cuda_tier(Struct):
    _fields_ = [("age", c_int32), ("format", c_char_p)]


class kvq_cuda_prefix_options(Struct):
    _fields_ = [("size", c_size_t), ("device_bytes", c_size_t), ("host_bytes", c_size_t), ("file_bytes", c_size_t),
                ("min_prefix_tokens", c_int32), ("min_quantize_tokens", c_int32), ("format", c_char_p),
                ("folder", c_char_p), ("model", c_char_p)]


class kvq_cuda_prefix_statistics(Struct):
    _fields_ = [("size", c_size_t), ("entries", c_size_t), ("bytes", c_size_t), ("host_bytes", c_size_t),
                ("files", c_size_t), ("file_bytes", c_size_t), ("fetches", c_uint64 * 4), ("tokens_saved", c_uint64),
                ("stored", c_uint64), ("lowered", c_uint64), ("lost", c_uint64), ("failed", c_uint64)]


class kvq_cuda_rows(Struct):
    _fields_ = [("token_stride", c_size_t), ("head_stride", c_size_t), ("scales", c_void_p),
                ("scale_page_stride", c_size_t), ("scale_token_stride", c_size_t), ("scale_head_stride", c_size_t)]


class kvq_cuda_pages(Struct):
    _fields_ = [("format", c_char_p), ("keys", c_void_p), ("values", c_void_p), ("key_stride", c_size_t),
                ("value_stride", c_size_t), ("page_tokens", c_int32), ("layer", c_int32), ("key_scale", c_float),
                ("value_scale", c_float), ("key_rows", kvq_cuda_rows), ("value_rows", kvq_cuda_rows)]


class kvq_cuda_part(Struct):
    _fields_ = [("pages", kvq_cuda_pages), ("table", c_void_p), ("first_page", c_void_p), ("end_page", c_void_p)]


class kvq_cuda_layer(Struct):
    _fields_ = [("size", c_size_t), ("sequences", c_int32), ("kv_heads", c_int32), ("tokens", c_void_p),
                ("committed", c_void_p), ("parts", POINTER(kvq_cuda_part)), ("part_count", c_int32),
                ("columns", c_int32), ("window", kvq_cuda_pages), ("window_table", c_void_p),
                ("window_columns", c_int32), ("sink_tokens", c_int32), ("sinks", kvq_cuda_pages),
                ("sink_table", c_void_p), ("most_tokens", c_int32)]


# Arguments of the functions that return a status.
FUNCTIONS: Dict[str, List[Any]] = {
    "kvq_cuda_format_count": [POINTER(c_int32)],
    "kvq_cuda_format_list": [c_int32, POINTER(kvq_cuda_format_entry)],
    "kvq_cuda_cache_create": [POINTER(kvq_cuda_cache_options), c_void_p, POINTER(handle)],
    "kvq_cuda_cache_free": [handle],
    "kvq_cuda_cache_get_info": [handle, POINTER(kvq_cuda_cache_info)],
    "kvq_cuda_cache_get_layer": [handle, c_int32, POINTER(kvq_layer)],
    "kvq_cuda_cache_not_finite": [handle, POINTER(c_uint32), c_int32, c_void_p],
    "kvq_cuda_sequence_create": [handle, POINTER(handle)],
    "kvq_cuda_sequence_free": [handle],
    "kvq_cuda_sequence_fork": [handle, c_void_p, POINTER(handle)],
    "kvq_cuda_sequence_tokens": [handle, POINTER(c_int32)],
    "kvq_cuda_sequence_bytes": [handle, POINTER(c_size_t)],
    "kvq_cuda_sequence_get_usage": [handle, POINTER(kvq_usage)],
    "kvq_cuda_sequence_trim": [handle, c_int32],
    "kvq_cuda_sequence_trim_limit": [handle, POINTER(c_int32)],
    "kvq_cuda_sequence_erase": [handle, c_int32, c_int32],
    "kvq_cuda_sequence_shift": [handle, c_int32, c_int32, c_int64],
    "kvq_cuda_sequence_splice": [handle, handle, c_int32, c_int32, c_void_p],
    "kvq_cuda_sequence_drop_front": [handle, c_int32, c_int32, POINTER(c_int32)],
    "kvq_cuda_cache_state": [handle, c_int32, c_int32, POINTER(kvq_cuda_state_view)],
    "kvq_cuda_sequence_state": [handle, c_int32, c_int32, c_void_p, POINTER(c_size_t)],
    "kvq_cuda_sequence_snapshot": [handle],
    "kvq_cuda_sequence_drop_snapshots": [handle],
    "kvq_cuda_sequence_reach": [handle, c_int32, POINTER(c_int32)],
    "kvq_cuda_sequence_get_snapshots": [handle, POINTER(kvq_snapshot), c_int32, POINTER(c_int32)],
    "kvq_cuda_cache_begin_step": [handle, POINTER(handle), c_int32, c_int32, c_void_p],
    "kvq_cuda_cache_begin_prompt": [handle, handle, c_int32, c_void_p],
    "kvq_cuda_cache_begin_cross": [handle, handle, c_int32, c_void_p],
    "kvq_cuda_cache_begin_draft": [handle, POINTER(handle), c_int32, c_int32, c_void_p],
    "kvq_cuda_cache_keep": [handle, POINTER(handle), c_int32, POINTER(c_int32), POINTER(c_int32), c_void_p],
    "kvq_cuda_cache_prefill": [handle, c_int32, POINTER(kvq_tensor), POINTER(kvq_tensor), POINTER(kvq_tensor),
        POINTER(kvq_tensor), POINTER(kvq_cuda_attend_options), c_void_p],
    "kvq_cuda_cache_append": [handle, c_int32, POINTER(kvq_tensor), POINTER(kvq_tensor), c_void_p],
    "kvq_cuda_cache_attend": [handle, c_int32, POINTER(kvq_tensor), POINTER(kvq_tensor),
        POINTER(kvq_cuda_attend_options), c_void_p],
    "kvq_cuda_cache_fetch_ahead": [handle, c_int32, POINTER(kvq_tensor), c_int32, c_void_p],
    "kvq_cuda_cache_fetches": [handle, c_int32, POINTER(c_int64), POINTER(c_int64), c_void_p],
    "kvq_cuda_cache_select": [handle, c_int32, POINTER(kvq_tensor), POINTER(c_float), c_int32, POINTER(c_int32),
        c_void_p],
    "kvq_cuda_cache_graph_id": [handle, POINTER(c_uint64)],
    "kvq_cuda_cache_requantize": [handle, POINTER(handle), c_int32, POINTER(kvq_cuda_requantize_request), c_void_p],
    "kvq_cuda_cache_commit_to": [handle, c_char_p],
    "kvq_cuda_cache_self_calibrate": [handle, POINTER(handle), c_int32, c_char_p, handle, c_int32, c_void_p,
        POINTER(c_int32)],
    "kvq_cuda_cache_step_down": [handle, POINTER(handle), c_int32, POINTER(kvq_cuda_tier), c_int32, c_size_t, c_void_p],
    "kvq_cuda_cache_plan_step_down": [handle, POINTER(handle), c_int32, POINTER(kvq_cuda_tier), c_int32, c_size_t,
        POINTER(kvq_step_down_report)],
    "kvq_cuda_cache_host_pages": [handle, c_size_t, POINTER(handle)],
    "kvq_cuda_sequence_offload": [handle, handle, c_void_p, POINTER(handle)],
    "kvq_cuda_sequence_onload": [handle, handle, c_void_p, POINTER(handle)],
    "kvq_cuda_sequence_save": [handle, POINTER(kvq_save_options), write_function, c_void_p, c_void_p],
    "kvq_cuda_sequence_save_file": [handle, POINTER(kvq_save_options), c_char_p, c_void_p],
    "kvq_cuda_sequence_restore": [handle, POINTER(kvq_save_options), read_function, c_void_p, c_void_p,
        POINTER(handle)],
    "kvq_cuda_sequence_restore_file": [handle, POINTER(kvq_save_options), c_char_p, c_void_p, POINTER(handle)],
    "kvq_cuda_prefix_cache_create": [handle, POINTER(kvq_cuda_prefix_options), POINTER(handle)],
    "kvq_cuda_prefix_cache_free": [handle],
    "kvq_cuda_prefix_cache_lookup": [handle, POINTER(c_int32), c_int32, POINTER(c_int32), POINTER(c_int32),
        POINTER(c_int32)],
    "kvq_cuda_prefix_cache_fetch": [handle, POINTER(c_int32), c_int32, c_void_p, POINTER(c_int32), POINTER(c_int32),
        POINTER(c_int32), POINTER(handle)],
    "kvq_cuda_prefix_cache_store": [handle, POINTER(c_int32), c_int32, handle, c_void_p],
    "kvq_cuda_prefix_cache_park": [handle, POINTER(c_int32), c_int32, handle, c_void_p],
    "kvq_cuda_prefix_cache_release": [handle, c_size_t, c_void_p],
    "kvq_cuda_prefix_cache_step_down": [handle, POINTER(handle), c_int32, POINTER(kvq_cuda_tier), c_int32, c_size_t,
        c_void_p],
    "kvq_cuda_prefix_cache_get_statistics": [handle, POINTER(kvq_cuda_prefix_statistics)],
    "kvq_cuda_kernels_find": [c_char_p, c_int32, c_int32, c_char_p, POINTER(handle)],
    "kvq_cuda_kernels_free": [handle],
    "kvq_cuda_kernels_page_bytes": [handle, c_char_p, c_int32, c_int32, POINTER(c_size_t), POINTER(c_size_t)],
    "kvq_cuda_kernels_workspace_bytes": [handle, c_int32, c_int32, c_int32, POINTER(c_size_t)],
    "kvq_cuda_pages_store": [handle, POINTER(kvq_cuda_pages), POINTER(kvq_tensor), POINTER(kvq_tensor),
        POINTER(c_int64), c_void_p],
    "kvq_cuda_pages_requantize": [handle, c_int32, POINTER(kvq_cuda_pages), POINTER(c_int32), POINTER(kvq_cuda_pages),
        POINTER(c_int32), c_int32, POINTER(c_uint32), c_void_p],
    "kvq_cuda_pages_dequantize": [handle, c_int32, POINTER(kvq_cuda_part), c_int32, c_int32, POINTER(c_int32),
        POINTER(kvq_tensor), POINTER(kvq_tensor), POINTER(c_int32), c_void_p],
    "kvq_cuda_kernels_convert_bytes": [handle, c_int32, c_int32, POINTER(c_size_t)],
    "kvq_cuda_pages_convert": [handle, POINTER(kvq_cuda_part), c_int32, handle, POINTER(kvq_cuda_part), c_int32,
        c_int32, c_int32, POINTER(c_int32), c_void_p, c_size_t, POINTER(c_uint32), c_void_p],
    "kvq_cuda_pages_attend": [handle, POINTER(kvq_cuda_layer), POINTER(kvq_tensor), POINTER(kvq_tensor),
        POINTER(kvq_cuda_attend_options), c_void_p, c_size_t, c_void_p],
    "kvq_cuda_pages_prefill": [handle, POINTER(kvq_cuda_layer), POINTER(kvq_tensor), POINTER(kvq_tensor),
        POINTER(kvq_tensor), POINTER(kvq_tensor), POINTER(c_int32), c_int32, POINTER(kvq_cuda_attend_options), c_void_p,
        c_size_t, c_void_p],
    "kvq_cuda_pages_prefill_bytes": [handle, POINTER(kvq_cuda_layer), c_int32, c_int32, POINTER(c_size_t)],
}
