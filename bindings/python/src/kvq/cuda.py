"""Caches on a GPU: torch CUDA tensors, formats by name, steps of a batch on torch's current stream.

    cache = kvq.cuda.Cache(layers=32, kv_heads=8, head_dim=128, formats="std4", dtype=torch.bfloat16, max_batch=16)
    a, b = cache.new_sequence(), cache.new_sequence()
    cache.begin_prompt(a, n)                     # then for every layer: out = cache.prefill(layer, k, v, q)
    cache.begin_step([a, b])                     # then for every layer: out = cache.prefill(layer, k, v, q)

Needs a library that was built with KVQ_LIBRARY_CUDA. Nothing waits for the device, except where a pool grows, for a prompt that is longer
than all before it, for the statistics of a new cache, and in methods that say so.
Calls that follow a begin can be captured by torch.cuda.graph and replayed after later begins (Cache.graph_id).
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import types
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence as List_, Tuple, Union

import torch

from . import _abi, _cuda_abi
from ._cache import Cache as _HostCache, Rotary, _names, formats_of_layers, rotary_to_c, statistics_to_c
from ._engine_pages import ROWS, expect_blocks, order_of, row_strides, tensor_scale
from ._errors import ArgumentError, OutOfMemoryError, UnsupportedError
from ._formats import Statistics, from_c, reading, stream, written
from ._layers import Layer, StatePart, layer_from_c, layers_to_c, part_number
from ._library import Handle, _checked, ask, count, handle_of, library, limit, text
from ._prefix_cache import Match, match_of
from ._reports import RequantizeReport, Snapshot, StepDownReport, Usage
from ._sequence import File, Sequence as _HostSequence, save_options
from ._tensors import Tensor, integers

__all__ = ["Cache", "CacheInfo", "FormatEntry", "Pages", "PrefixCache", "PrefixStatistics", "Sequence", "StateView", "attend_pages",
           "available", "convert_pages", "formats", "prefill_pages", "store_pages"]

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_NUMBERS = {torch.float16: _abi.FP16, torch.bfloat16: _abi.BF16}
_KIND = "cuda"  # of devices whose tensors are taken
_loaded: Optional[types.SimpleNamespace] = None


def available() -> bool:
    """Whether the library has kvq_cuda.h. Whether there is a GPU is torch.cuda.is_available()."""
    return hasattr(library.dll, "kvq_cuda_format_count")


def _functions() -> types.SimpleNamespace:
    """The functions of kvq_cuda.h: `name` raises what its status says, `raw_name` returns it."""
    global _loaded
    if _loaded is None:
        if not available():
            raise UnsupportedError(f"kvq: {library.path} was built without KVQ_LIBRARY_CUDA")
        _loaded = types.SimpleNamespace()
        for name, arguments in _cuda_abi.FUNCTIONS.items():
            setattr(_loaded, name, _checked(library.dll, name, arguments))
        # Pointers of these are made once and passed as they are.
        for name in ("kvq_cuda_cache_begin_step", "kvq_cuda_cache_prefill", "kvq_cuda_cache_attend"):
            fast = library.dll[name]  # an object of its own
            fast.restype = ctypes.c_int32
            fast.argtypes = [ctypes.c_void_p if t in _PASSED else t for t in _cuda_abi.FUNCTIONS[name]]
            setattr(_loaded, "raw_" + name, fast)
    return _loaded


_PASSED = tuple(ctypes.POINTER(t) for t in (_cuda_abi.handle, _abi.kvq_tensor, _cuda_abi.kvq_cuda_attend_options))


def _raw_stream(device: int) -> int:
    """torch's current stream of a device, as an address."""
    return torch.cuda.current_stream(device).cuda_stream


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)


@dataclass(frozen=True)
class FormatEntry:
    """Formats that may be in one cache, and the caches that they are compiled for."""

    formats: Tuple[str, ...]
    head_dim: int
    page_tokens: int
    window: str
    alibi: bool
    """For caches with alibi=True."""


def formats() -> List[FormatEntry]:
    """What the library was compiled for. "fp16" and "bf16" go with every head_dim."""
    f, all_of = _functions(), []
    for i in range(ask(f.kvq_cuda_format_count, out=ctypes.c_int32)):
        c = _cuda_abi.kvq_cuda_format_entry()
        f.kvq_cuda_format_list(i, ctypes.byref(c))
        all_of.append(FormatEntry(tuple(c.formats.decode().split(",")), c.head_dim, c.page_tokens,
                                  "fp16" if c.window == _abi.FP16 else "bf16", bool(c.alibi)))
    return all_of


@dataclass(frozen=True)
class CacheInfo:
    """The options in force, and bytes of device memory."""

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    sinks: int
    recent: int
    rollback: int
    max_batch: int
    max_tokens: int
    step_tokens: int
    draft_tokens: int
    device: int
    quantized: int
    """Pages in use, of all formats."""
    window: int
    """16-bit pages in use, sinks included."""
    unused: int
    """Pages that no sequence holds."""
    tables: int
    """And lengths, plans, matrices of feedback."""
    workspace: int
    prompt: int
    """One layer of the longest prompt so far in 16 bit."""
    bytes: int
    """The sum of all."""
    state: int
    """Recurrent states of sequences and of snapshots, in use."""

    @property
    def bytes_in_use(self) -> int:
        """Of all pages that sequences hold."""
        return self.quantized + self.window + self.state


@dataclass(frozen=True)
class StateView:
    """A part of a layer's recurrent state for the rows of a step: that of row b is values[slots[b]], read and written in place."""

    values: torch.Tensor
    """[slots][heads][rows][columns]; stays as long as Cache.graph_id() does."""
    slots: torch.Tensor
    """int32 [rows], on the device; -1 for a row that is not there."""


def tensor(x: Tensor, name: str, dtype: Optional[torch.dtype] = None) -> _abi.kvq_tensor:
    """A torch tensor [tokens][heads][dim] on the device as the library takes it."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, not a torch tensor")
    if x.device.type != _KIND:
        raise UnsupportedError(f"kvq: {name} is on {x.device}, the cache on a GPU; use {name}.cuda()")
    if x.dtype not in _NUMBERS or (dtype is not None and x.dtype != dtype):
        raise ArgumentError(f"kvq: {name} is {x.dtype}, not {dtype or 'torch.float16 or torch.bfloat16'}")
    if x.dim() != 3:
        raise ArgumentError(f"kvq: {name} has shape {list(x.shape)}, not [tokens][heads][dim]")
    tokens, heads, dim = x.shape
    strides = x.stride()
    if dim > 1 and strides[2] != 1:
        raise ArgumentError(f"kvq: {name} has strides {list(strides)}; its channels must be contiguous, so copy it")
    token_stride, head_stride = strides[0] if tokens > 1 else heads * dim, strides[1] if heads > 1 else dim
    if dim > 0 and token_stride == 0 and head_stride == 0 and tokens * heads > 0:
        raise ArgumentError(f"kvq: {name} has strides {list(strides)}: tokens or heads share memory, so copy it")
    return _abi.kvq_tensor(data=x.data_ptr(), dtype=_NUMBERS[x.dtype], tokens=tokens, heads=heads, dim=dim,
                           token_stride=token_stride, head_stride=head_stride)


class Cache(Handle):
    """Keys and values of many sequences in pages on a GPU.

    layers, kv_heads, head_dim  of the model: layers of one shape; or
    layers          a list of kvq.full_attention(...), sliding_attention, chunked_attention, shared_with, cross_layer, latent_attention
                    and state_layer, which say kv_heads and head_dim, or the parts of a state. Layers with a window free pages that no
                    query sees any more, and hide what their window hides
    layer_formats   {layer: (keys, values)} by name, None for the first one of formats
    formats         by name: a str with commas, or several. Pages are quantized to the first one; requantize and step_down take all.
                    "fp16" or "bf16": nothing is quantized. kvq.cuda.formats() says what there is
    dtype           of the window, and of k, v, q and out: torch.float16 or torch.bfloat16
    device          of torch; None: the current one
    page_tokens     None: 128
    sinks           first tokens, always in 16 bit; None: 4
    recent          at least so many newest tokens are in 16 bit; None: 64
    rollback        a trim by up to so many tokens is exact; None: 16
    max_batch       sequences of one step
    max_tokens      of one sequence
    step_tokens     new tokens that a step gives to every sequence, at most
    draft_tokens    drafted tokens of a sequence, at most 64
    query_heads     of layers made by latent_attention, and of steps over keys that have moved, at most: memory for so many
    rotary          how keys were rotated, for all layers or one per layer; None: keys cannot move
    listed_tokens   of a query, in lists, select and selected_tokens: memory for so many
    resident_tokens of each layer and kv head: device memory for so many tokens that selected_tokens has read last. Quantized pages then lie
                    in pinned host memory, in a pool of pool_tokens; needs growing=False. 0: in device memory
    pool_tokens     quantized pages for so many tokens are allocated at once,
    pool_sequences  and 16-bit pages for so many sequences
    prompt_scratch_mib
                    at most, for prompts on GPUs of sm_90a: pages of a layer as half floats. None: what they can use, up to 1/128 of the
                    device's memory or what one kv head needs; 0: none
    pool_states     and recurrent states: one for a sequence, and one for each of its snapshots
    snapshot_every, snapshot_prompt_end, snapshot_bytes
                    of recurrent states, as of kvq.Cache; the end of a prompt is that of every begin_prompt
    growing         pools that are full grow, in a begin, which then waits for the stream
    statistics      as of kvq.Cache: "own", "shared", None, or a kvq.Statistics for all keys whose format takes them
    statistics_tokens
                    first tokens of which a plan is made, 16 bit until then; None: 512
    alibi           attention takes alibi_slopes, always

    Memory is cudaMalloc's; where there is none, torch gives back what it holds but does not use.
    """

    def __init__(self, layers: Union[int, Iterable[Layer]], kv_heads: int = 0, head_dim: int = 0,
                 formats: Union[str, Iterable[str]] = "std4", *,
                 layer_formats: Optional[Dict[int, Tuple[Optional[str], Optional[str]]]] = None,
                 dtype: torch.dtype = torch.float16, device: Any = None, page_tokens: Optional[int] = None,
                 sinks: Optional[int] = None, recent: Optional[int] = None, rollback: Optional[int] = None, max_batch: int = 1,
                 max_tokens: int = 32768, step_tokens: int = 1, draft_tokens: int = 0, query_heads: int = 128, listed_tokens: int = 0, resident_tokens: int = 0,
                 pool_tokens: int = 0,
                 pool_sequences: int = 0, pool_states: int = 0, snapshot_every: Optional[int] = None,
                 snapshot_prompt_end: bool = True, snapshot_bytes: Optional[int] = None, growing: bool = True,
                 statistics: Union[None, str, Statistics] = "own", statistics_tokens: Optional[int] = None,
                 alibi: bool = False, prompt_scratch_mib: Optional[int] = None,
                 rotary: Union[None, Rotary, List_[Rotary]] = None) -> None:
        if dtype not in _NAMES:
            raise ArgumentError(f"kvq: a cache on a GPU is of torch.float16 or torch.bfloat16, not {dtype}")
        for name, value in (("max_batch", max_batch), ("max_tokens", max_tokens), ("step_tokens", step_tokens),
                            ("query_heads", query_heads)):
            if value < 1:
                raise ArgumentError(f"kvq: {name} is {value}, which must be at least 1")
        listed = list(layers) if hasattr(layers, "__iter__") else None
        self.dtype, self.head_dim, self.max_batch, self.step_tokens = dtype, head_dim, max_batch, step_tokens
        self._f = _functions()
        if _KIND == "cuda":
            at = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
            self.device = torch.device("cuda", torch.cuda.current_device() if at.index is None else at.index)
            on_device: Any = torch.cuda.device(self.device)
        else:
            self.device, on_device = torch.device(_KIND), contextlib.nullcontext()
        o = _cuda_abi.kvq_cuda_cache_options(
            layers=layers if listed is None else 0, kv_heads=kv_heads, head_dim=head_dim, formats=text(_names(formats)),
            window=text(_NAMES[dtype]),
            page_tokens=limit(page_tokens, "page_tokens"), sinks=count(sinks, "sinks"), recent=count(recent,
            "recent"), rollback=count(rollback, "rollback"), max_batch=max_batch, max_tokens=max_tokens,
            step_tokens=step_tokens, draft_tokens=draft_tokens, query_heads=query_heads, listed_tokens=listed_tokens, resident_tokens=resident_tokens,
            pool_tokens=pool_tokens,
            pool_sequences=pool_sequences, pool_states=pool_states, snapshot_every=limit(snapshot_every, "snapshot_every"),
            snapshot_prompt_end=0 if snapshot_prompt_end else _abi.NONE,
            snapshot_bytes=limit(snapshot_bytes, "snapshot_bytes"), fixed=int(not growing), alibi=int(alibi))
        o.prompt_scratch_mib = count(prompt_scratch_mib, "prompt_scratch_mib")
        o.statistics_tokens = limit(statistics_tokens, "statistics_tokens")
        statistics_to_c(statistics, o)
        rotary_to_c(rotary, o)  # the arguments keep what it points to
        if listed is not None:
            layers_to_c(listed, o)
        if layer_formats is not None:
            o.layer_formats = formats_of_layers(layer_formats, o.layers)
        with on_device:
            made = ctypes.c_void_p()
            self._with_memory(self._f.kvq_cuda_cache_create, ctypes.byref(o), self.stream(), ctypes.byref(made))
        super().__init__(made.value, self._f.kvq_cuda_cache_free)
        self.layers = tuple(layer_from_c(ask(self._f.kvq_cuda_cache_get_layer, self, i, out=_abi.kvq_layer),
                                         listed[i].parts if listed else ())
                            for i in range(o.layers))

    def stream(self) -> int:
        """torch's current stream of the device, as an address."""
        return _raw_stream(self.device.index) if _KIND == "cuda" else 0

    def stream_of(self) -> Callable[[], int]:
        """stream, for calls of every layer."""
        return functools.partial(_raw_stream, self.device.index) if _KIND == "cuda" else self.stream

    def _with_memory(self, function: Callable, *arguments: Any) -> None:
        """Calls it. If memory runs out, asks torch to free its unused memory and calls it again."""
        try:
            function(*arguments)
        except OutOfMemoryError:
            if _KIND != "cuda":
                raise
            torch.cuda.empty_cache()
            function(*arguments)

    def info(self) -> CacheInfo:
        """The options in force, and bytes."""
        c = _cuda_abi.kvq_cuda_cache_info()
        self._f.kvq_cuda_cache_get_info(self, ctypes.byref(c))
        return from_c(CacheInfo, c)

    def not_finite(self) -> List[int]:
        """NaN and infinities that were quantized so far, by layer. Waits for the stream."""
        layers = self.info().layers
        counts = (ctypes.c_uint32 * layers)()
        self._f.kvq_cuda_cache_not_finite(self, counts, layers, self.stream())
        return list(counts)

    def new_sequence(self) -> "Sequence":
        """An empty sequence."""
        return Sequence(self, ask(self._f.kvq_cuda_sequence_create, self))

    # ---- steps ----

    def begin_step(self, rows: List_[Optional["Sequence"]], new_tokens: int = 1) -> None:
        """Every sequence of the batch gets new_tokens tokens more in all layers. 0: attention only. None is a row that is not there: its
        keys are ignored, its output is 0."""
        self._with_memory(self._f.kvq_cuda_cache_begin_step, self, *_rows(rows), new_tokens, self.stream())

    def begin_prompt(self, sequence: "Sequence", new_tokens: int) -> None:
        """One sequence gets any number of tokens."""
        self._with_memory(self._f.kvq_cuda_cache_begin_prompt, self, handle_of(sequence, Sequence, "sequence"), new_tokens,
                          self.stream())

    def begin_cross(self, sequence: "Sequence", tokens: int) -> None:
        """The text of the layers made by cross_layer, once for a sequence: append() of each of them writes its tokens. From then on these
        layers take queries only, which see all of the text. Forks share its pages, trims leave it."""
        self._with_memory(self._f.kvq_cuda_cache_begin_cross, self, handle_of(sequence, Sequence, "sequence"), tokens, self.stream())

    def begin_draft(self, rows: List_[Optional["Sequence"]], new_tokens: int) -> None:
        """Every sequence of the batch gets new_tokens drafted tokens behind those that it has, until keep()."""
        self._with_memory(self._f.kvq_cuda_cache_begin_draft, self, *_rows(rows), new_tokens, self.stream())

    def keep(self, rows: List_["Sequence"], paths: List_[Iterable[int]]) -> None:
        """Accepts the drafted tokens paths[b] of sequence b, ascending numbers within its draft, and removes the others."""
        if len(paths) != len(rows):
            raise ArgumentError(f"kvq: {len(paths)} paths for {len(rows)} sequences")
        starts, together = [0], []
        for path in paths:
            together.extend(path)
            starts.append(len(together))
        self._with_memory(self._f.kvq_cuda_cache_keep, self, *_rows(rows), integers(together, "paths")[0],
                          integers(starts, "starts")[0], self.stream())

    def prefill(self, layer: int, k: Optional[torch.Tensor], v: Optional[torch.Tensor], q: torch.Tensor,
                out: Optional[torch.Tensor] = None, *,
                lse: Optional[torch.Tensor] = None, **options: Any) -> torch.Tensor:
        """One call for each layer of a step, a prompt or a draft, layer 0 first: its new tokens, and their attention over all that their
        sequences hold and over each other, causal.

        k, v     [rows x new tokens][kv_heads][head_dim], on the device: the tokens of row 0, of row 1, ...; both None for a layer made by
                 shared_with or cross_layer, v None for one made by latent_attention
        q, out   [rows x new tokens][q_heads][head_dim], out with channels of values; q_heads is a multiple of kv_heads. out=None: new
                 memory
        lse      None, or float32 [rows x new tokens][q_heads], gets the natural logarithm of each softmax sum
        options  scale, softcap, window: of Mods. window_sinks: with a window, also the sinks of the cache.
                 ancestors: int64 [rows][new tokens], which drafted tokens a query sees (bit 0: the first one).
                 sink_logits: float32 [q_heads], learned sinks: one more score in each softmax sum; but in a prompt with lse only.
                 alibi_slopes: float32 [q_heads]: score - slope * distance, of a cache with alibi=True.
                 listed_tokens, listed_window: int32 [rows x new tokens][n] or [...][kv_heads][n], positions of the sequence in any order,
                 -1: none: queries attend to these tokens up to their own alone. Of attend alone, behind append.
                 selected_tokens: of Mods, up to the cache's listed_tokens: in steps of one token, over pages that no trim has cut
                 upper_only: of Mods, but not in prompts: of pages with two planes (nested8+nested4) the upper one alone is read

        Returns out.
        """
        out = self._output(layer, q) if out is None else out
        k = q[:0, :1] if k is None and v is None else k  # no tokens
        v = k[:0] if v is None else v
        o = attend_options(lse=lse, **options)
        self._f.kvq_cuda_cache_prefill(
            self, layer, *[ctypes.byref(tensor(x, name, self.dtype)) for name, x in (("k", k), ("v", v), ("q", q), ("out", out))],
            ctypes.byref(o), self.stream())
        return out

    def _output(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """New memory for the outputs of queries."""
        of = self.layers[layer] if 0 <= layer < len(self.layers) else None
        if of is None or q.dim() != 3 or of.value_dim in (0, None, q.shape[2]):
            return torch.empty_like(q, memory_format=torch.contiguous_format)
        return q.new_empty((q.shape[0], q.shape[1], of.value_dim))

    def append(self, layer: int, k: torch.Tensor, v: Optional[torch.Tensor]) -> None:
        """The new tokens of a layer alone. k, v: as of prefill"""
        v = k[:0] if v is None else v
        self._f.kvq_cuda_cache_append(self, layer, ctypes.byref(tensor(k, "k", self.dtype)),
                                      ctypes.byref(tensor(v, "v", self.dtype)), self.stream())

    def attend(self, layer: int, q: torch.Tensor, out: Optional[torch.Tensor] = None, *, lse: Optional[torch.Tensor] = None,
               **options: Any) -> torch.Tensor:
        """Attention of the last q.tokens / rows tokens of every row. q, out, lse, options: as of prefill. Returns out."""
        out = self._output(layer, q) if out is None else out
        o = attend_options(lse=lse, **options)
        self._f.kvq_cuda_cache_attend(self, layer, ctypes.byref(tensor(q, "q", self.dtype)),
                                      ctypes.byref(tensor(out, "out", self.dtype)), ctypes.byref(o), self.stream())
        return out

    def fetch_ahead(self, layer: int, q: torch.Tensor, selected_tokens: int) -> None:
        """Of a cache with resident_tokens, on the current stream: fetches the pages that attend with these selected_tokens would read for q,
        which may be a guess. Behind the first prefill or append of a step, and behind the fetch before; attend of this layer must wait for it."""
        self._f.kvq_cuda_cache_fetch_ahead(self, layer, ctypes.byref(tensor(q, "q", self.dtype)), selected_tokens, self.stream())

    def fetches(self, layer: int) -> Tuple[int, int]:
        """Pages that all kv heads of a layer in host memory have read so far, and how many of them were fetched."""
        read, fetched = ctypes.c_int64(), ctypes.c_int64()
        self._f.kvq_cuda_cache_fetches(self, layer, ctypes.byref(read), ctypes.byref(fetched), self.stream())
        return read.value, fetched.value

    def select(self, layer: int, q: torch.Tensor, weights: torch.Tensor, best: int) -> torch.Tensor:
        """The `best` tokens of a layer made by index_layer for each of the last q.tokens / rows tokens of every row: of those up to its
        own the ones with the largest sum over heads of weight * max(q . k, 0); of equal ones the earlier first. Behind append.

        q        [rows x tokens][heads][channels], on the device
        weights  float32 [rows x tokens][heads]

        Returns int32 positions [rows x tokens][best] on the device, ascending; -1 where there are no more: listed_tokens of attend.
        """
        _expect_on_device("weights", weights, torch.float32)
        if weights.shape != q.shape[:2] or best < 1:
            raise ArgumentError(f"kvq: weights are {list(weights.shape)}, q {list(q.shape)}, and {best} tokens are to be selected")
        out = torch.empty((q.shape[0], best), dtype=torch.int32, device=q.device)
        self._f.kvq_cuda_cache_select(self, layer, ctypes.byref(tensor(q, "q", self.dtype)),
                                      ctypes.cast(weights.data_ptr(), ctypes.POINTER(ctypes.c_float)), best,
                                      ctypes.cast(out.data_ptr(), ctypes.POINTER(ctypes.c_int32)),
                                      self.stream())
        return out

    def state(self, layer: int, part: Union[int, str] = 0) -> StateView:
        """A part of the state of a layer made by kvq.state_layer, by number or name, for the rows of the step that has begun. The begin counts
        its tokens as taken: a step that fails is taken back by trim. Zeros at first."""
        c = _cuda_abi.kvq_cuda_state_view()
        number = part_number(self.layers, layer, part)
        self._f.kvq_cuda_cache_state(self, layer, number, ctypes.byref(c))
        return StateView(self._in_memory(c.data, self.layers[layer].parts[number], c.slot_count, c.slot_bytes),
                         _on_device(c.row_slots, 4 * c.rows, self.device).view(torch.int32))

    def _in_memory(self, data: int, p: StatePart, slots: int, slot_bytes: int) -> torch.Tensor:
        """Values of a part on the device, [slots][heads][rows][columns]."""
        dtype = getattr(torch, p.dtype)
        if slots == 0:  # no sequence has a state
            return torch.empty((0, p.heads, p.rows, p.columns), dtype=dtype, device=self.device)
        size = torch.empty((), dtype=dtype).element_size()
        values = _on_device(data, (slots - 1) * slot_bytes + p.heads * p.rows * p.columns * size, self.device).view(dtype)
        return values.as_strided((slots, p.heads, p.rows, p.columns), (slot_bytes // size, p.rows * p.columns, p.columns, 1))

    def graph_id(self) -> int:
        """A captured step may be replayed after a begin as long as this number is what it was at the capture."""
        return ask(self._f.kvq_cuda_cache_graph_id, self, out=ctypes.c_uint64)

    def host_pages(self, byte_budget: Optional[int] = None) -> _HostCache:
        """A CPU cache for pages of this one, in pinned memory: of its layers, options and formats. It computes nothing; what works on pages
        works on its sequences: Sequence.offload and Cache.onload, fork, trim, send_pages and Receiver, save, PrefixCache. byte_budget: of
        all its pages, allocated at once; None: none, and every page is an allocation."""
        return _HostCache._of_handle(ask(self._f.kvq_cuda_cache_host_pages, self, limit(byte_budget, "byte_budget")), self.layers)

    # ---- other formats, later ----

    def requantize(self, sequences: List_["Sequence"], format: str, *, first_token: int = 0, last_token: Optional[int] = None,
                   only_smaller: bool = False, new_pages: bool = False, dry_run: bool = False) -> RequantizeReport:
        """Pages that lie wholly in tokens [first_token, last_token) get the format, K and V; "int8/" is for keys alone, "/std4" for values
        alone. new_pages: those to come, too. dry_run: reports only. The report counts pages of the device, with K and V of several layers."""
        if last_token is not None and not 0 <= first_token < last_token:
            raise ArgumentError(f"kvq: tokens [{first_token}, {last_token}) are none")
        report = _abi.kvq_requantize_report()
        r = _cuda_abi.kvq_cuda_requantize_request(format=text(format), first_token=first_token,
                                                  last_token=last_token or 0,
                                                  only_smaller=int(only_smaller), new_pages=int(new_pages), dry_run=int(dry_run),
                                                  report=ctypes.pointer(report))
        self._with_memory(self._f.kvq_cuda_cache_requantize, self, *_rows(sequences), ctypes.byref(r), self.stream())
        return from_c(RequantizeReport, report)

    def commit_to(self, format: str) -> None:
        """Pages of sequences that are made from now on take this format; others keep theirs."""
        self._f.kvq_cuda_cache_commit_to(self, text(format))

    def self_calibrate(self, sequences: List_["Sequence"], format: str, statistics: Statistics, tokens: int = 512) -> bool:
        """Makes the plan of keys of a format (mix4 to mix6, low3, low2) from the first tokens of these sequences. Call it after a step until it
        returns True; it returns False while there are fewer than `tokens`, all together. From then on new pages take the format, and pages
        that become smaller are requantized to it, with the bytes of a CPU cache that does the same.

        format      "mix4/" for keys alone; no page may have it before
        statistics  kvq.Statistics of this cache, to which queries may have been added; it gets the keys
        """
        done = ctypes.c_int32()
        self._with_memory(self._f.kvq_cuda_cache_self_calibrate, self, *_rows(sequences), text(format),
                          handle_of(statistics, Statistics, "statistics"), tokens, self.stream(), ctypes.byref(done))
        return done.value != 0

    def step_down(self, sequences: List_["Sequence"], tiers: List_[Tuple[int, str]], byte_budget: Optional[int] = None) -> None:
        """tiers: (age, format), ages ascending: from `age` tokens behind the newest one on, pages have this format. byte_budget: of all
        pages in use; beyond it the oldest pages go down further."""
        self._with_memory(self._f.kvq_cuda_cache_step_down, self, *_rows(sequences), *_tiers(tiers),
                          limit(byte_budget, "byte_budget"), self.stream())

    def plan_step_down(self, sequences: List_["Sequence"], tiers: List_[Tuple[int, str]],
                       byte_budget: Optional[int] = None) -> StepDownReport:
        """A dry run of step_down: pages and bytes, to the byte."""
        report = _abi.kvq_step_down_report()
        self._f.kvq_cuda_cache_plan_step_down(self, *_rows(sequences), *_tiers(tiers), limit(byte_budget, "byte_budget"),
                                              ctypes.byref(report))
        return from_c(StepDownReport, report)

    def onload(self, sequence: _HostSequence) -> "Sequence":
        """A sequence from one of a CPU cache with the same options. Waits for the stream."""
        made = ctypes.c_void_p()
        self._with_memory(self._f.kvq_cuda_sequence_onload, self, handle_of(sequence, _HostSequence, "sequence"), self.stream(),
                          ctypes.byref(made))
        return Sequence(self, made.value)

    def restore(self, source: File, model: Optional[str] = None) -> "Sequence":
        """A sequence from a file of Sequence.save, here or of a CPU cache with the same options and formats. Waits for the stream.

        source   a path, or a binary file that is open for reading
        model    the text that was saved; None: any
        """
        if hasattr(source, "read"):
            return self._read(source.read, model)
        return self._restored(self._f.kvq_cuda_sequence_restore_file, model, os.fsencode(source))

    def from_bytes(self, data: bytes, model: Optional[str] = None) -> "Sequence":
        """A sequence from Sequence.to_bytes."""
        return self._read(io.BytesIO(data).read, model)

    def _read(self, read: Callable[[int], bytes], model: Optional[str]) -> "Sequence":
        return reading(read, lambda give: self._restored(self._f.kvq_cuda_sequence_restore, model, give, None))

    def _restored(self, function: Callable, model: Optional[str], *source: Any) -> "Sequence":
        made = ctypes.c_void_p()
        function(self, save_options(model), *source, self.stream(), ctypes.byref(made))
        return Sequence(self, made.value)


class Sequence(Handle):
    """Tokens of one text on a GPU. Made by Cache.new_sequence and fork."""

    def __init__(self, cache: Cache, pointer: int) -> None:
        super().__init__(pointer, cache._f.kvq_cuda_sequence_free)
        self.cache = cache

    def __len__(self) -> int:
        """Tokens, drafted ones included."""
        return ask(self.cache._f.kvq_cuda_sequence_tokens, self, out=ctypes.c_int32)

    def __bool__(self) -> bool:
        return True

    @property
    def bytes(self) -> int:
        """Of its pages in all layers, shared ones included."""
        return ask(self.cache._f.kvq_cuda_sequence_bytes, self, out=ctypes.c_size_t)

    def usage(self) -> Usage:
        """Bytes of this sequence by kind. not_finite is 0: Cache.not_finite."""
        c = _abi.kvq_usage()
        self.cache._f.kvq_cuda_sequence_get_usage(self, ctypes.byref(c))
        return from_c(Usage, c)

    def fork(self) -> "Sequence":
        """A sequence with the same tokens. Quantized pages are shared, 16-bit pages are copied."""
        made = ctypes.c_void_p()
        self.cache._with_memory(self.cache._f.kvq_cuda_sequence_fork, self, self.cache.stream(), ctypes.byref(made))
        return Sequence(self.cache, made.value)

    def trim(self, tokens: int) -> int:
        """Removes every token from position `tokens` on, which trim_limit() bounds. Within `rollback` tokens it is exact. After a deeper one the quantized page
        that it ends in keeps its bytes and hides the tokens behind; new tokens begin a page.

        Returns how many tokens must run again: more than 0 where layers have state, which goes back to reach(tokens)."""
        self.cache._f.kvq_cuda_sequence_trim(self, tokens)
        return tokens - len(self)

    def erase(self, first: int, last: int) -> None:
        """Removes tokens [first, last); those behind them move to the front, keys included. Needs Cache(rotary=...) if keys move. Refused: a cut
        within a 16-bit page or the sinks, unless the erase reaches the end: then it is a trim."""
        self.cache._f.kvq_cuda_sequence_erase(self, first, last)

    def shift(self, first: int, last: int, by: int) -> None:
        """Moves the rotary positions of the keys of tokens [first, last) by `by`. Needs Cache(rotary=...)."""
        self.cache._f.kvq_cuda_sequence_shift(self, first, last, by)

    def splice(self, other: "Sequence", first: int, last: int) -> None:
        """Tokens [first, last) of another sequence, or of this one, follow, and share its quantized pages. What this one has is quantized,
        so that it must end with a page; or it is empty. Needs Cache(rotary=...) if keys move."""
        self.cache._with_memory(self.cache._f.kvq_cuda_sequence_splice, self, handle_of(other, Sequence, "other"), first, last,
                                self.cache.stream())

    def drop_front(self, window: int, *, move_sinks: bool = False) -> int:
        """For text without an end, as kvq.Ring: gives back the pages behind the sinks that no query with this window sees, from the next
        token on or behind a trim by `rollback`, and returns how many tokens. Those behind them have earlier positions; keys stay as they were
        rotated, at positions of the text. move_sinks: the sinks stay directly before the window. Attention is given the window."""
        return ask(self.cache._f.kvq_cuda_sequence_drop_front, self, window, int(move_sinks), out=ctypes.c_int32)

    def state(self, layer: int, part: Union[int, str] = 0) -> Optional[torch.Tensor]:
        """The part of Cache.state of this sequence, [heads][rows][columns] on the device, until the next call that changes it; None: zeros. To
        be written behind a begin only: others may share it before."""
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        number = part_number(self.cache.layers, layer, part)
        self.cache._f.kvq_cuda_sequence_state(self, layer, number, ctypes.byref(data), ctypes.byref(size))
        if data.value is None:
            return None
        return self.cache._in_memory(data.value, self.cache.layers[layer].parts[number], 1, size.value)[0]

    def snapshot(self) -> None:
        """Keeps the state at all tokens of the sequence, with what the step that has begun makes of it."""
        self.cache._f.kvq_cuda_sequence_snapshot(self)

    def drop_snapshots(self) -> None:
        """Gives all snapshots back."""
        self.cache._f.kvq_cuda_sequence_drop_snapshots(self)

    def reach(self, tokens: int) -> int:
        """The token to which trim(tokens) goes: `tokens`, or where layers have state that of the newest snapshot at or before it, or 0."""
        return ask(self.cache._f.kvq_cuda_sequence_reach, self, tokens, out=ctypes.c_int32)

    @property
    def snapshots(self) -> List[Snapshot]:
        """Ascending by tokens. Their errors are 0: an offloaded sequence has them."""
        count = ctypes.c_int32()
        self.cache._f.kvq_cuda_sequence_get_snapshots(self, None, 0, ctypes.byref(count))
        marks = (_abi.kvq_snapshot * count.value)()
        self.cache._f.kvq_cuda_sequence_get_snapshots(self, marks, count.value, ctypes.byref(count))
        return [from_c(Snapshot, c) for c in marks]

    def trim_limit(self) -> int:
        """From this number of tokens on, trim reaches every one; earlier ones need tokens that a layer with a window has freed."""
        return ask(self.cache._f.kvq_cuda_sequence_trim_limit, self, out=ctypes.c_int32)

    def retain(self, *_: Any, **__: Any) -> Any:
        """Refused, with the reason; so are hold, release, gap and attention_mass."""
        raise UnsupportedError("kvq: tokens are dropped head by head on the CPU alone, since pages of a GPU begin at whole multiples of "
                               "page_tokens for all kv heads")

    hold = release = gap = attention_mass = retain

    def offload(self, to: _HostCache) -> _HostSequence:
        """A sequence of a CPU cache with the same options and the same bytes of pages. Waits for the stream."""
        return _HostSequence(to, ask(self.cache._f.kvq_cuda_sequence_offload, self, handle_of(to, _HostCache, "to"),
                                     self.cache.stream()))

    def save(self, to: File, model: str = "") -> None:
        """Writes a safetensors file, as a CPU cache does. to: a path, renamed when it is complete, or a binary file that is open for
        writing. model: any text by which the model is recognized. Waits for the stream."""
        f, at = self.cache._f, self.cache.stream()
        if hasattr(to, "write"):
            stream(lambda write: f.kvq_cuda_sequence_save(self, save_options(model), write, None, at), to.write)
        else:
            f.kvq_cuda_sequence_save_file(self, save_options(model), os.fsencode(to), at)

    def to_bytes(self, model: str = "") -> bytes:
        """The file of save() as bytes, for Cache.from_bytes."""
        f, at = self.cache._f, self.cache.stream()
        return written(lambda write: f.kvq_cuda_sequence_save(self, save_options(model), write, None, at))


_PLACES = (None, "device", "host", "file")


@dataclass(frozen=True)
class PrefixStatistics:
    entries: int
    """On the device, now."""
    bytes: int
    """Of the pages of these entries, now."""
    host_bytes: int
    """Of pages in host memory, now."""
    files: int
    file_bytes: int
    fetches: Dict[Optional[str], int]
    """By place: "device", "host", "file"; None: misses."""
    tokens_saved: int
    stored: int
    lowered: int
    """Entries that left the device for a tier below."""
    lost: int
    """Entries that no tier had room for."""
    failed: int
    """Files that could not be written or read."""


class PrefixCache(Handle):
    """Prefixes and sequences that wait, by their token ids, over three tiers: device memory, pinned host memory, files. What has no room
    in a tier goes to the next one, the least recently used first, and comes back byte for byte. What no tier has room for, and files that
    are gone, cut or damaged, are misses.

    device_bytes         of the pages that entries hold; None: no limit
    host_bytes           of pinned memory, allocated at once; None: as much as is needed
    file_bytes           of all files; None: no limit
    folder               in which the store makes a folder of its own; None: no files
    min_prefix_tokens    a shorter common prefix is a miss; None: 128
    min_quantize_tokens  shorter entries keep their formats; None: 256
    format               entries are requantized to it where that is smaller, as by Cache.requantize; None: they stay
    model                any text, in the files
    """

    def __init__(self, cache: Cache, *, device_bytes: Optional[int] = None, host_bytes: Optional[int] = None,
                 file_bytes: Optional[int] = None, folder: Union[str, os.PathLike, None] = None,
                 min_prefix_tokens: Optional[int] = None, min_quantize_tokens: Optional[int] = None,
                 format: Optional[str] = None, model: str = "") -> None:
        self._f = handle_of(cache, Cache, "cache") and cache._f
        o = _cuda_abi.kvq_cuda_prefix_options(
            device_bytes=limit(device_bytes, "device_bytes"), host_bytes=limit(host_bytes, "host_bytes"),
            file_bytes=limit(file_bytes, "file_bytes"), min_prefix_tokens=count(min_prefix_tokens, "min_prefix_tokens"),
            min_quantize_tokens=count(min_quantize_tokens, "min_quantize_tokens"), format=text(format),
            folder=None if folder is None else os.fsencode(folder), model=text(model))
        self.cache = cache
        super().__init__(ask(self._f.kvq_cuda_prefix_cache_create, cache, ctypes.byref(o)), self._f.kvq_cuda_prefix_cache_free)

    def lookup(self, tokens: Iterable[int]) -> Tuple[Match, Optional[str]]:
        """What fetch would find if files can be read, and where."""
        match, found, place = ctypes.c_int32(), ctypes.c_int32(), ctypes.c_int32()
        self._f.kvq_cuda_prefix_cache_lookup(self, *integers(tokens, "tokens"), ctypes.byref(match), ctypes.byref(found),
                                             ctypes.byref(place))
        return match_of(match, found), _PLACES[place.value]

    def fetch(self, tokens: Iterable[int]) -> Tuple[Sequence, Match, Optional[str]]:
        """A sequence that holds as many of the first tokens as the store has, empty on a miss; and where it was: "device", "host", "file"."""
        match, found, place, out = ctypes.c_int32(), ctypes.c_int32(), ctypes.c_int32(), ctypes.c_void_p()
        self.cache._with_memory(self._f.kvq_cuda_prefix_cache_fetch, self, *integers(tokens, "tokens"), self.cache.stream(),
                                ctypes.byref(match), ctypes.byref(found), ctypes.byref(place), ctypes.byref(out))
        return Sequence(self.cache, out.value or 0), match_of(match, found), _PLACES[place.value]

    def store(self, tokens: Iterable[int], sequence: Sequence) -> None:
        """Keeps the first len(tokens) tokens of a sequence, which does not change."""
        self.cache._with_memory(self._f.kvq_cuda_prefix_cache_store, self, *integers(tokens, "tokens"),
                                handle_of(sequence, Sequence, "sequence"), self.cache.stream())

    def park(self, tokens: Iterable[int], sequence: Sequence) -> None:
        """The same of a whole sequence that is not needed for now, without a copy. Then the sequence is empty."""
        self.cache._with_memory(self._f.kvq_cuda_prefix_cache_park, self, *integers(tokens, "tokens"),
                                handle_of(sequence, Sequence, "sequence"), self.cache.stream())

    def release(self, bytes: int) -> None:
        """Moves the least recently used entries down until those on the device hold `bytes` less: where a begin found no memory."""
        self._f.kvq_cuda_prefix_cache_release(self, bytes, self.cache.stream())

    def step_down(self, live: List_[Sequence], tiers: List_[Tuple[int, str]], byte_budget: Optional[int] = None) -> None:
        """Cache.step_down of these sequences and all entries on the device: pages that they share stay shared."""
        self.cache._with_memory(self._f.kvq_cuda_prefix_cache_step_down, self, *_rows(live), *_tiers(tiers),
                                limit(byte_budget, "byte_budget"), self.cache.stream())

    def statistics(self) -> PrefixStatistics:
        """What happened so far, and what the tiers hold now."""
        c = _cuda_abi.kvq_cuda_prefix_statistics()
        self._f.kvq_cuda_prefix_cache_get_statistics(self, ctypes.byref(c))
        return from_c(PrefixStatistics, c, fetches=dict(zip(_PLACES, c.fetches)))


class Pages:
    """Keys and values of a batch in device memory of the caller, such as an engine's pages: for attend_pages, prefill_pages, store_pages,
    convert_pages.

    format       by name: "fp8", "std4", "int8/std4", ... of formats(), or "fp16" and "bf16"
    keys         bytes of rows of others (fp8, nvfp4, ...): [pages][page_tokens][kv_heads][bytes of a row], with any strides of the first
                 three axes; else [pages][...], a page the blocks of all kv heads, one after the other (kvq's pages)
    values       the same, with strides of their own
    block_table  int32 [sequences][columns] on the device: numbers of pages; negative: there is none
    kv_heads, head_dim, page_tokens (1, as SGLang has them: all tokens of a sequence)
    order        of four axes of rows of others: "NHD" (None; vLLM, SGLang; as of kvq.Rows) or "HND", [pages][kv_heads][page_tokens][...].
                 Where there are as many kv heads as tokens of a page it must be said
    key_scales   of four axes in nvfp4, nvfp4-4over6, mxfp8 and mxfp4: bytes in the same order, [scales of a row]; value_scales
    key_scale    by which numbers of fp8 and nvfp4 were divided (vLLM's k_scale); value_scale
    layer        of the model, from 0: formats behind a transform (std4-h) need it
    dtype        float16 or bfloat16: which of formats() is taken
    """

    def __init__(self, format: str, keys: torch.Tensor, values: torch.Tensor, block_table: torch.Tensor, *, kv_heads: int,
                 head_dim: int, page_tokens: int = 128, order: Optional[str] = None, key_scale: float = 1.0, value_scale: float = 1.0,
                 key_scales: Optional[torch.Tensor] = None, value_scales: Optional[torch.Tensor] = None,
                 layer: Optional[int] = None, dtype: torch.dtype = torch.float16) -> None:
        orders = [order_of(format, order, name, x, page_tokens, kv_heads) for name, x in (("keys", keys), ("values", values))]
        if block_table.dim() != 2:
            raise ArgumentError(f"kvq: block_table has shape {list(block_table.shape)}, not [sequences][columns]")
        _expect_on_device("block_table", block_table, torch.int32)
        self._f, self.kv_heads, self._held = _functions(), kv_heads, (keys, values, block_table, key_scales, value_scales)
        self.sequences, self.columns = block_table.shape
        names: Tuple[str, ...] = (format,)
        if format in _NAMES.values():  # the kernels of any format read pages of the window's type
            shape = (head_dim, page_tokens, format)
            names = next((e.formats for e in formats() if (e.head_dim, e.page_tokens, e.window) == shape and not e.alibi), names)
        of_kernels = page_tokens
        if page_tokens == 1 and orders[0] is not None:  # kernels of any page size read pages of one token
            shape = ((format,), head_dim, _NAMES[dtype])
            of_kernels = next((e.page_tokens for e in formats() if (e.formats, e.head_dim, e.window) == shape and not e.alibi), 128)
        self._kernels = Handle(ask(self._f.kvq_cuda_kernels_find, text(",".join(names)), head_dim, of_kernels, text(_NAMES[dtype])),
                               self._f.kvq_cuda_kernels_free)
        pages = _cuda_abi.kvq_cuda_pages(format=text(format), layer=0 if layer is None else layer + 1,
                                         page_tokens=1 if page_tokens == 1 else 0)
        bytes_of = (ctypes.c_size_t(), ctypes.c_size_t())
        if None in orders:
            self._f.kvq_cuda_kernels_page_bytes(self._kernels, text(format), page_tokens, kv_heads, *map(ctypes.byref, bytes_of))
        both = zip(("key", "value"), (keys, values), (key_scales, value_scales), format.split("/") * 2, bytes_of, orders)
        for name, x, scales, of, least, axes in both:
            for what, given in ((name + "s", x), (name + "_scales", scales)):
                if given is not None and given.device.type != _KIND:
                    raise UnsupportedError(f"kvq: {what} are on {given.device}, not on a GPU")
            size, strides = x.element_size(), x.stride()
            setattr(pages, name + "s", x.data_ptr())
            if axes is not None:
                per_byte, per_scale = ROWS[of]
                strides = row_strides(name + "s", x, axes, page_tokens, kv_heads, head_dim // per_byte)
                rows = _cuda_abi.kvq_cuda_rows(token_stride=strides[1], head_stride=strides[2])
                if scales is not None:
                    steps = row_strides(name + "_scales", scales, axes, page_tokens, kv_heads, head_dim // per_scale if per_scale else 0)
                    rows.scales, rows.scale_page_stride, rows.scale_token_stride, rows.scale_head_stride = scales.data_ptr(), *steps
                if per_scale or scales is not None or page_tokens == 1 or strides[1:] != (head_dim, page_tokens * head_dim):  # else as pages of kvq
                    setattr(pages, name + "_rows", rows)
            elif scales is not None:
                raise ArgumentError(f"kvq: {name}_scales are of rows of four axes; other pages have them behind their rows")
            else:
                expect_blocks(format, name + "s", x, page_tokens, kv_heads, least.value)
            setattr(pages, name + "_stride", strides[0] * size)
        for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
            scale = tensor_scale(name, scale)
            if scale != 1.0:
                setattr(pages, name, scale)
        self._c = _cuda_abi.kvq_cuda_part(pages=pages, table=block_table.data_ptr())
        self._page_tokens, self._dtype, self._workspace = page_tokens, dtype, torch.zeros(16, dtype=torch.uint8, device=block_table.device)

    def _layer(self, tokens: torch.Tensor) -> Tuple[_cuda_abi.kvq_cuda_layer, torch.Tensor]:
        """All tokens of the sequences in these pages, and what must live as long."""
        name = self._c.pages.format.decode()
        if name in _NAMES.values():
            raise ArgumentError(f"kvq: pages are {name}; attention takes quantized ones")
        _expect_on_device("tokens", tokens, torch.int32)
        if tokens.shape != (self.sequences,):
            raise ArgumentError(f"kvq: tokens have shape {list(tokens.shape)}, for {self.sequences} sequences")
        committed = torch.div(tokens + (self._page_tokens - 1), self._page_tokens, rounding_mode="floor").to(torch.int32)
        window = _cuda_abi.kvq_cuda_pages(keys=self._c.pages.keys, values=self._c.pages.values)  # it has no pages
        return _cuda_abi.kvq_cuda_layer(
            sequences=self.sequences, kv_heads=self.kv_heads, tokens=tokens.data_ptr(), committed=committed.data_ptr(),
            parts=ctypes.pointer(self._c), part_count=1, columns=self.columns, window=window, window_table=self._c.table,
            window_columns=1), committed

    def _tensors(self, **given: torch.Tensor) -> List[Any]:
        return [ctypes.byref(tensor(x, name, self._dtype)) for name, x in given.items()]


def attend_pages(pages: Pages, q: torch.Tensor, tokens: torch.Tensor, out: Optional[torch.Tensor] = None, *,
                 lse: Optional[torch.Tensor] = None, **options: Any) -> torch.Tensor:
    """Attention of the last q.tokens / sequences tokens of every sequence over pages as they lie, without a copy. Returns out.

    q       [sequences x tokens][heads][head_dim] of pages' dtype
    tokens  int32 [sequences] on the device: of each sequence, all in pages
    options  as of Cache.prefill. One stream at a time may use the same Pages; the first call allocates their workspace
    """
    layer, _held = pages._layer(tokens)
    if q.shape[0] % max(pages.sequences, 1) != 0:
        raise ArgumentError(f"kvq: q has {q.shape[0]} tokens, for {pages.sequences} sequences")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if pages.sequences == 0:
        return out
    size = ask(pages._f.kvq_cuda_kernels_workspace_bytes, pages._kernels, q.shape[1], pages.kv_heads, q.shape[0] // pages.sequences,
               out=ctypes.c_size_t)
    if pages._workspace.numel() < size:
        pages._workspace = torch.zeros(size, dtype=torch.uint8, device=tokens.device)
    pages._f.kvq_cuda_pages_attend(
        pages._kernels, ctypes.byref(layer), *pages._tensors(q=q, out=out), ctypes.byref(attend_options(lse=lse, **options)),
        pages._workspace.data_ptr(), size, _raw_stream(tokens.device.index) if _KIND == "cuda" else None)
    return out


def prefill_pages(pages: Pages, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor,
                  most_new_tokens: int, out: Optional[torch.Tensor] = None, *, most_tokens: Optional[int] = None,
                  lse: Optional[torch.Tensor] = None, **options: Any) -> torch.Tensor:
    """Attention of new tokens over pages as they lie, and over each other, causal. Nothing is stored. Returns out.

    k, v, q  [new tokens][heads][head_dim] of pages' dtype
    tokens   int32 [sequences] on the device, before the new ones: all in pages
    starts   int32 [sequences + 1] on the device: rows starts[s] to starts[s + 1] - 1 are those of sequence s
    most_new_tokens  of one sequence
    most_tokens  of one sequence before the new ones, else as many as its table names: on sm_90a memory for all of them is allocated.
                 Rows of a sequence that has more are NaN
    options  as of Cache.prefill
    """
    layer, _held = pages._layer(tokens)
    layer.most_tokens = limit(most_tokens, "most_tokens")
    _expect_on_device("starts", starts, torch.int32)
    if starts.shape != (pages.sequences + 1,):
        raise ArgumentError(f"kvq: starts have shape {list(starts.shape)}, for {pages.sequences} sequences")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if pages.sequences == 0:
        return out
    size = ask(pages._f.kvq_cuda_pages_prefill_bytes, pages._kernels, ctypes.byref(layer), most_new_tokens, 0, out=ctypes.c_size_t)
    workspace = torch.empty(size, dtype=torch.uint8, device=tokens.device)
    pages._f.kvq_cuda_pages_prefill(
        pages._kernels, ctypes.byref(layer), *pages._tensors(k=k, v=v, q=q, out=out),
        ctypes.cast(starts.data_ptr(), ctypes.POINTER(ctypes.c_int32)), most_new_tokens,
        ctypes.byref(attend_options(lse=lse, **options)), workspace.data_ptr() if size else None, size,
        _raw_stream(tokens.device.index) if _KIND == "cuda" else None)
    return out


def store_pages(pages: Pages, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """New tokens into pages as they lie, quantized on the device to rows of others with the bytes of kvq.write_rows; or to fp16 and bf16.
    On torch's current stream; nothing waits.

    k, v   [tokens][kv_heads][head_dim] of pages' dtype
    slots  int64 [tokens] on the device, vLLM's slot_mapping: page * page_tokens + position, of each token its own; negative: not stored
    """
    _expect_on_device("slots", slots, torch.int64)
    if k.dim() != 3 or k.shape[1] != pages.kv_heads or slots.shape != k.shape[:1]:
        raise ArgumentError(f"kvq: k has shape {list(k.shape)} and slots {list(slots.shape)}, for pages of {pages.kv_heads} kv heads")
    if k.shape[0] == 0:
        return
    pages._f.kvq_cuda_pages_store(
        pages._kernels, ctypes.byref(pages._c.pages), *pages._tensors(k=k, v=v),
        ctypes.cast(slots.data_ptr(), ctypes.POINTER(ctypes.c_int64)), _raw_stream(slots.device.index) if _KIND == "cuda" else None)


def convert_pages(source: Pages, target: Pages, tokens: torch.Tensor, *, pages_at_once: int = 256) -> None:
    """All pages that target's table names from those of source's: between formats and page sizes, on the device, with the bytes of
    the CPU. On torch's current stream; nothing waits.

    tokens  int32 [sequences] on the device; what source does not hold is zeros
    """
    if (source.sequences, source.kv_heads) != (target.sequences, target.kv_heads):
        raise ArgumentError(f"kvq: source has {source.sequences} sequences of {source.kv_heads} kv heads, target {target.sequences} of "
                            f"{target.kv_heads}")
    _expect_on_device("tokens", tokens, torch.int32)
    if tokens.shape != (source.sequences,):
        raise ArgumentError(f"kvq: tokens have shape {list(tokens.shape)}, for {source.sequences} sequences")
    f = source._f
    of_turn = ask(f.kvq_cuda_kernels_convert_bytes, target._kernels, target.kv_heads, pages_at_once, out=ctypes.c_size_t)
    workspace = torch.empty(of_turn, dtype=torch.uint8, device=tokens.device)
    f.kvq_cuda_pages_convert(source._kernels, ctypes.byref(source._c), source.columns, target._kernels, ctypes.byref(target._c),
                             target.columns, source.kv_heads, source.sequences,
                             ctypes.cast(tokens.data_ptr(), ctypes.POINTER(ctypes.c_int32)), workspace.data_ptr(), of_turn, None,
                             _raw_stream(tokens.device.index) if _KIND == "cuda" else None)


class _Memory:
    """Bytes of the library's, as torch takes memory of a device."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def _on_device(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Bytes of the library's as a tensor, without a copy."""
    if _KIND == "cuda":
        return torch.as_tensor(_Memory(address, size), device=device)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def _rows(rows: Iterable[Optional[Sequence]]) -> Tuple[Any, int]:
    pointers = [None if s is None else handle_of(s, Sequence, "a row") for s in rows]
    return (ctypes.c_void_p * len(pointers))(*pointers), len(pointers)


def _tiers(tiers: List_[Tuple[int, str]]) -> Tuple[Any, int]:
    c = [_cuda_abi.kvq_cuda_tier(age=a, format=text(f)) for a, f in tiers]
    return (_cuda_abi.kvq_cuda_tier * len(c))(*c), len(c)


def _expect_on_device(name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype or not x.is_contiguous() or x.device.type != _KIND:
        raise ArgumentError(f"kvq: {name} is {x.dtype} on {x.device}, not contiguous {dtype} on a GPU")


def attend_options(scale: Optional[float] = None, softcap: Optional[float] = None, window: Optional[int] = None,
                   window_sinks: bool = False, ancestors: Optional[torch.Tensor] = None,
                   lse: Optional[torch.Tensor] = None, sink_logits: Optional[torch.Tensor] = None,
                   alibi_slopes: Optional[torch.Tensor] = None, listed_tokens: Optional[torch.Tensor] = None,
                   listed_window: Optional[torch.Tensor] = None,
                   selected_tokens: Optional[int] = None, upper_only: bool = False) -> _cuda_abi.kvq_cuda_attend_options:
    """How to attend, as the library takes it."""
    for name, value in (("scale", scale), ("softcap", softcap), ("window", window), ("selected_tokens", selected_tokens)):
        if value is not None and not value > 0:
            raise ArgumentError(f"kvq: {name} is {value}, which must be positive, or None")
    for name, x, dtype in (("ancestors", ancestors, torch.int64), ("lse", lse, torch.float32),
                           ("sink_logits", sink_logits, torch.float32), ("alibi_slopes", alibi_slopes, torch.float32),
                           ("listed_tokens", listed_tokens, torch.int32), ("listed_window", listed_window, torch.int32)):
        if x is not None:
            _expect_on_device(name, x, dtype)
    lists = [x for x in (listed_tokens, listed_window) if x is not None]
    shapes = {tuple(x.shape[:-1]) for x in lists}
    if len(shapes) > 1 or any(x.dim() not in (2, 3) for x in lists):
        raise ArgumentError(f"kvq: lists of tokens are {[list(x.shape) for x in lists]}, not [queries][n] or [queries][kv_heads][n]")
    return _cuda_abi.kvq_cuda_attend_options(
        listed_tokens=None if listed_tokens is None else listed_tokens.data_ptr(),
        listed_window=None if listed_window is None else listed_window.data_ptr(),
        listed_count=0 if listed_tokens is None else listed_tokens.shape[-1],
        listed_window_count=0 if listed_window is None else listed_window.shape[-1],
        list_kv_heads=(*shapes.pop(), 1)[1] if shapes else 0, selected_tokens=selected_tokens or 0, upper_only=int(upper_only),
        scale=scale or 0.0, softcap=softcap or 0.0, window=window or 0, window_sinks=int(window_sinks),
        ancestors=None if ancestors is None else ancestors.data_ptr(), lse=None if lse is None else lse.data_ptr(),
        sink_logits=None if sink_logits is None else sink_logits.data_ptr(),
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.data_ptr())
