"""The C interface include/kvq/kvq_cuda.h in ctypes, as _abi is that of kvq.h. tests/test_abi.py compares it with the header."""
from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_float, c_int32, c_int64, c_size_t, c_ssize_t, c_uint32, c_uint64, c_void_p
from typing import Any, Dict, List

from ._abi import _Struct, handle, kvq_tensor

ERROR_CUDA = 9

allocate_function = CFUNCTYPE(c_void_p, c_void_p, c_size_t)
deallocate_function = CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)


class kvq_cuda_format_entry(_Struct):
    _fields_ = [("size", c_size_t), ("formats", c_char_p), ("head_dim", c_int32), ("page_tokens", c_int32), ("window", c_int32),
                ("alibi", c_int32)]


class kvq_cuda_allocator(_Struct):
    _fields_ = [("size", c_size_t), ("allocate", allocate_function), ("deallocate", deallocate_function), ("user", c_void_p)]


class kvq_cuda_cache_options(_Struct):
    _fields_ = [("size", c_size_t), ("layers", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32), ("page_tokens", c_int32),
                ("formats", c_char_p), ("window", c_char_p), ("sinks", c_int32), ("recent", c_int32), ("rollback", c_int32),
                ("max_batch", c_int32), ("max_tokens", c_int32), ("step_tokens", c_int32), ("draft_tokens", c_int32),
                ("pool_tokens", c_int32), ("pool_sequences", c_int32), ("fixed", c_int32), ("statistics", handle),
                ("allocator", POINTER(kvq_cuda_allocator)), ("alibi", c_int32), ("reserved", c_int32)]


class kvq_cuda_cache_info(_Struct):
    _fields_ = [("size", c_size_t), ("layers", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32), ("page_tokens", c_int32),
                ("sinks", c_int32), ("recent", c_int32), ("rollback", c_int32), ("max_batch", c_int32), ("max_tokens", c_int32),
                ("step_tokens", c_int32), ("draft_tokens", c_int32), ("device", c_int32), ("quantized", c_size_t),
                ("window", c_size_t), ("unused", c_size_t), ("tables", c_size_t), ("workspace", c_size_t), ("prompt", c_size_t),
                ("bytes", c_size_t)]


class kvq_cuda_attend_options(_Struct):
    _fields_ = [("size", c_size_t), ("scale", c_float), ("softcap", c_float), ("window", c_int32), ("window_sinks", c_int32),
                ("ancestors", c_void_p), ("lse", c_void_p), ("sink_logits", c_void_p), ("alibi_slopes", c_void_p)]


class kvq_cuda_requantize_request(_Struct):
    _fields_ = [("size", c_size_t), ("format", c_char_p), ("first_token", c_int32), ("last_token", c_int32), ("only_smaller", c_int32),
                ("new_pages", c_int32)]


class kvq_cuda_tier(_Struct):
    _fields_ = [("age", c_int32), ("format", c_char_p)]


class kvq_cuda_pages(_Struct):
    _fields_ = [("format", c_char_p), ("keys", c_void_p), ("values", c_void_p), ("key_stride", c_size_t), ("value_stride", c_size_t),
                ("page_tokens", c_int32), ("reserved", c_int32)]


class kvq_cuda_part(_Struct):
    _fields_ = [("pages", kvq_cuda_pages), ("table", c_void_p), ("first_page", c_void_p), ("end_page", c_void_p)]


class kvq_cuda_layer(_Struct):
    _fields_ = [("size", c_size_t), ("sequences", c_int32), ("kv_heads", c_int32), ("tokens", c_void_p), ("committed", c_void_p),
                ("parts", POINTER(kvq_cuda_part)), ("part_count", c_int32), ("columns", c_int32), ("window", kvq_cuda_pages),
                ("window_table", c_void_p), ("window_columns", c_int32), ("sink_tokens", c_int32), ("sinks", kvq_cuda_pages),
                ("sink_table", c_void_p)]


class plain_tensor(ctypes.Structure):
    """kvq_tensor whose members are set without checks, for calls of every layer."""

    _fields_ = [("data", c_void_p), ("dtype", c_int32), ("tokens", c_int32), ("heads", c_int32), ("dim", c_int32),
                ("token_stride", c_ssize_t), ("head_stride", c_ssize_t)]


i32, i32_out, size_out, out = c_int32, POINTER(c_int32), POINTER(c_size_t), POINTER(c_void_p)
_handles, _tensor = POINTER(c_void_p), POINTER(kvq_tensor)
_attend = POINTER(kvq_cuda_attend_options)
_pages, _part, _layer = POINTER(kvq_cuda_pages), POINTER(kvq_cuda_part), POINTER(kvq_cuda_layer)

FUNCTIONS: Dict[str, List[Any]] = {
    "kvq_cuda_format_count": [i32_out],
    "kvq_cuda_format_list": [i32, POINTER(kvq_cuda_format_entry)],
    "kvq_cuda_cache_create": [POINTER(kvq_cuda_cache_options), c_void_p, out],
    "kvq_cuda_cache_free": [handle],
    "kvq_cuda_cache_get_info": [handle, POINTER(kvq_cuda_cache_info)],
    "kvq_cuda_cache_not_finite": [handle, POINTER(c_uint32), i32, c_void_p],
    "kvq_cuda_sequence_create": [handle, out],
    "kvq_cuda_sequence_free": [handle],
    "kvq_cuda_sequence_fork": [handle, c_void_p, out],
    "kvq_cuda_sequence_tokens": [handle, i32_out],
    "kvq_cuda_sequence_bytes": [handle, size_out],
    "kvq_cuda_sequence_trim": [handle, i32],
    "kvq_cuda_cache_begin_step": [handle, _handles, i32, i32, c_void_p],
    "kvq_cuda_cache_begin_prompt": [handle, handle, i32, c_void_p],
    "kvq_cuda_cache_begin_draft": [handle, _handles, i32, i32, c_void_p],
    "kvq_cuda_cache_keep": [handle, _handles, i32, i32_out, i32_out, c_void_p],
    "kvq_cuda_cache_prefill": [handle, i32, _tensor, _tensor, _tensor, _tensor, _attend, c_void_p],
    "kvq_cuda_cache_append": [handle, i32, _tensor, _tensor, c_void_p],
    "kvq_cuda_cache_attend": [handle, i32, _tensor, _tensor, _attend, c_void_p],
    "kvq_cuda_cache_graph_id": [handle, POINTER(c_uint64)],
    "kvq_cuda_cache_requantize": [handle, _handles, i32, POINTER(kvq_cuda_requantize_request), c_void_p],
    "kvq_cuda_cache_step_down": [handle, _handles, i32, POINTER(kvq_cuda_tier), i32, c_size_t, c_void_p],
    "kvq_cuda_sequence_offload": [handle, handle, c_void_p, out],
    "kvq_cuda_sequence_onload": [handle, handle, c_void_p, out],
    "kvq_cuda_kernels_find": [c_char_p, i32, i32, c_char_p, out],
    "kvq_cuda_kernels_free": [handle],
    "kvq_cuda_kernels_page_bytes": [handle, c_char_p, i32, i32, size_out, size_out],
    "kvq_cuda_kernels_workspace_bytes": [handle, i32, i32, i32, size_out],
    "kvq_cuda_pages_store": [handle, _pages, _tensor, _tensor, POINTER(c_int64), c_void_p],
    "kvq_cuda_pages_requantize": [handle, i32, _pages, i32_out, _pages, i32_out, i32, POINTER(c_uint32), c_void_p],
    "kvq_cuda_pages_dequantize": [handle, i32, _part, i32, i32, i32_out, _tensor, _tensor, i32_out, c_void_p],
    "kvq_cuda_pages_attend": [handle, _layer, _tensor, _tensor, _attend, c_void_p, c_size_t, c_void_p],
    "kvq_cuda_pages_prefill": [handle, _layer, _tensor, _tensor, _tensor, _tensor, i32_out, i32, _attend, c_void_p],
}
