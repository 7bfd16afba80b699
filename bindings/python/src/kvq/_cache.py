"""Caches."""
from __future__ import annotations

import ctypes
import os
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence as List_, Tuple, Union

from . import _abi
from ._attention import Call, Mods, Threads, Workspace, choice
from ._errors import ArgumentError
from ._formats import Format, Statistics, from_c, reading, role_of
from ._layers import Layer, layer_from_c, layers_to_c
from ._library import Handle, ask, count, handle_of, handles, library, limit, optional_handle, text
from ._reports import (CacheInfo, Footprint, RequantizeReport, StepDownPolicy, StepDownReport, policy_to_c, query_to_c)
from ._sequence import Attended, File, Sequence, save_options, selection
from ._struct import in_range
from ._tensors import Tensor, floats, optional_tensor, view

Names = Union[str, Iterable[str]]
Layers = Union[int, Iterable[Layer]]
_LAYOUTS = {"half_split": _abi.HALF_SPLIT, "interleaved": _abi.INTERLEAVED}


class Rotary:
    """How a layer rotates keys before they are appended, so that they can move later.

    dims           rotated channels, even
    first_channel  the first of them
    layout         "half_split": pairs (j, j + dims / 2); "interleaved": pairs (2 j, 2 j + 1)
    base           frequencies base^(-2 j / dims)
    frequencies    instead of base: radians per position of each pair, [dims / 2]
    rotate         instead of all of the above: f(row, by) rotates a float32 row of head_dim channels by `by` positions more, in place.
                   Called from any thread; it must not raise: an exception is printed, and ends no call
    """

    def __init__(self, dims: int = 0, *, first_channel: int = 0, layout: str = "half_split", base: float = 10000.0,
                 frequencies: Optional[Iterable[float]] = None,
                 rotate: Optional[Callable[[Any, int], None]] = None) -> None:
        self._c = _abi.kvq_rotary(
            dims=dims, first_channel=first_channel, layout=choice(_LAYOUTS, layout, "layout"), base=base)
        if frequencies is not None:
            held = floats(frequencies, ctypes.c_double)
            self._c.frequencies, self._c.frequency_count = held, len(held)
        if rotate is not None:
            f = rotate
            self._c.rotate = _abi.rotate_function(lambda _, row, n, by: f(view(row, (n,)), by))

    @classmethod
    def llama3(cls, dims: int, *, base: float = 500000.0, factor: float = 8.0, low_freq_factor: float = 1.0,
               high_freq_factor: float = 4.0, original_context: float = 8192, **others: Any) -> "Rotary":
        """rope_scaling "llama3"; defaults: Llama 3.1."""
        return cls(dims, frequencies=_frequencies(
            library.kvq_rotary_llama3, dims, base, factor, low_freq_factor, high_freq_factor, original_context), **others)

    @classmethod
    def yarn(cls, dims: int, *, base: float = 10000.0, factor: float, original_context: float, beta_fast: float = 32.0,
             beta_slow: float = 1.0, **others: Any) -> "Rotary":
        """rope_scaling "yarn"."""
        return cls(dims, frequencies=_frequencies(
            library.kvq_rotary_yarn, dims, base, factor, original_context, beta_fast, beta_slow), **others)


def _frequencies(function: Callable, dims: int, *others: float) -> List[float]:
    held = (ctypes.c_double * max(in_range(ctypes.c_int32, dims, "dims") // 2, 1))()
    function(dims, *others, held)
    return list(held)


def _names(names: Optional[Names]) -> Optional[str]:
    if names is None or isinstance(names, str):
        return names
    if isinstance(names, int):
        raise TypeError(f"a format name is a {type(names).__name__}, not a str")
    return ",".join(names)


def rotary_to_c(rotary: Union[None, Rotary, List_[Rotary]], options: Any) -> List[Rotary]:
    """Gives options their rotary embeddings: those returned, whose numbers they point to."""
    of_layers = [rotary] if isinstance(rotary, Rotary) else list(rotary or [])
    if of_layers:
        options.rotary = (_abi.kvq_rotary * len(of_layers))(*[r._c for r in of_layers])
        options.rotary_count = len(of_layers)
    return of_layers


def formats_of_layers(chosen: Dict[int, Tuple[Optional[str], Optional[str]]], layers: int) -> Any:
    """layer_formats as the library takes it."""
    formats = (_abi.kvq_layer_formats * max(layers, 0))()
    for layer, (of_keys, of_values) in chosen.items():
        if not 0 <= layer < layers:
            raise ArgumentError(f"kvq: layer_formats has layer {layer}, the cache has {layers} layers")
        formats[layer] = _abi.kvq_layer_formats(keys=text(of_keys), values=text(of_values))
    return formats


_KEY_STATISTICS = {"own": _abi.OWN_STATISTICS, "shared": _abi.SHARED_STATISTICS, None: _abi.NONE}


def statistics_to_c(statistics: Union[None, str, Statistics], o: Any) -> None:
    if statistics is None or isinstance(statistics, str):
        if statistics not in _KEY_STATISTICS:
            raise ArgumentError(f'kvq: statistics is {statistics!r}, not "own", "shared", None or a Statistics')
        o.key_statistics = _KEY_STATISTICS[statistics]
    else:
        o.statistics = optional_handle(statistics, Statistics, "statistics")


def _options(layers: Layers, kv_heads: int = 0, head_dim: int = 0, keys: Names = "std4", values: Optional[Names] = None, *,
             value_dim: Optional[int] = None, window: Optional[str] = None, page_tokens: Optional[int] = None,
             sinks: Optional[int] = None, recent: Optional[int] = None, rollback: Optional[int] = None,
             byte_budget: Optional[int] = None,
             layer_formats: Optional[Dict[int, Tuple[Optional[str], Optional[str]]]] = None,
             rotary: Union[None, Rotary, List_[Rotary]] = None, statistics: Union[None, str, Statistics] = "own",
             statistics_tokens: Optional[int] = None, preallocate: bool = False, repack: Optional[float] = None,
             snapshot_every: Optional[int] = None, snapshot_prompt_end: bool = True,
             snapshot_bytes: Optional[int] = None) -> Tuple[_abi.kvq_cache_options, List[Rotary]]:
    """Options of a cache in C, and the embeddings whose callbacks they refer to."""
    o = _abi.kvq_cache_options(
        kv_heads=kv_heads, head_dim=head_dim, value_dim=limit(value_dim, "value_dim"),
        keys=text(_names(keys)), values=text(_names(values)), window=text(window),
        page_tokens=limit(page_tokens, "page_tokens"), sinks=count(sinks, "sinks"), recent=count(recent, "recent"),
        rollback=count(rollback, "rollback"), byte_budget=limit(byte_budget, "byte_budget"), preallocate=int(preallocate),
        repack=0.0 if repack is None else repack if repack != 0 else -1.0,
        snapshot_every=limit(snapshot_every, "snapshot_every"), snapshot_prompt_end=0 if snapshot_prompt_end else _abi.NONE,
        snapshot_bytes=limit(snapshot_bytes, "snapshot_bytes"), statistics_tokens=limit(statistics_tokens, "statistics_tokens"))
    if hasattr(layers, "__iter__"):
        listed = list(layers)
        layers_to_c(listed, o)
    else:
        o.layers = layers
    statistics_to_c(statistics, o)
    if layer_formats is not None:
        o.layer_formats = formats_of_layers(layer_formats, o.layers)
    return o, rotary_to_c(rotary, o)


class Cache(Handle):
    """Keys and values of any number of sequences, in pages of quantized blocks.

    layers, kv_heads, head_dim  of a model with layers of full attention. Of a model whose layers differ, a list instead of
                   the three: [full_attention(...), sliding_attention(...), state_layer(...), ...]
    keys           formats by name: a str with commas, or several. Pages are quantized to the first one; requantize takes all
    values         None: as keys
    value_dim      channels of values; None: head_dim
    window         "fp32", "fp16" or "bf16": the format of sinks and recent tokens
    page_tokens    tokens of a page; None: 128. Multiples of 32 waste no bytes
    sinks          first tokens, always in the window format; None: 4
    recent         at least so many newest tokens are in the window format; None: 32
    rollback       a trim by up to so many tokens is exact; None: 16
    byte_budget    bytes of all pages; None: no limit
    layer_formats  {layer: (keys, values)} by name, None for the first one of the cache
    rotary         how keys were rotated, for all layers or one per layer; None: keys cannot move
    statistics     of keys, for formats that take a plan of channel widths (mix4 to mix6, low3, low2): "own": of each sequence's first
                   tokens; forks and prefix hits inherit the plan; "shared": of the first sequence that has enough; None; or a
                   Statistics, for all keys whose format takes them
    statistics_tokens    first tokens that make a plan, 16 bit until then; None: 512
    preallocate    byte_budget is allocated when the cache is made
    repack         cuts repack pages that show less than this part of their tokens, 0.5 at most; 0: never; None: 0.25
    snapshot_every       Sequence.advance takes a snapshot of recurrent state every so many tokens; None: none
    snapshot_prompt_end  and one at the end of a prompt
    snapshot_bytes       of all snapshots of a sequence, the earliest ones go first; None: no limit

    Takes no memory for pages yet, unless `preallocate`. The memory of a closed cache stays until its last sequence is closed.
    """

    def __init__(self, layers: Layers, kv_heads: int = 0, head_dim: int = 0, keys: Names = "std4", values: Optional[Names] = None,
                 *, value_dim: Optional[int] = None, window: Optional[str] = None, page_tokens: Optional[int] = None,
                 sinks: Optional[int] = None, recent: Optional[int] = None, rollback: Optional[int] = None,
                 byte_budget: Optional[int] = None,
                 layer_formats: Optional[Dict[int, Tuple[Optional[str], Optional[str]]]] = None,
                 rotary: Union[None, Rotary, List_[Rotary]] = None, statistics: Union[None, str, Statistics] = "own",
                 statistics_tokens: Optional[int] = None, preallocate: bool = False, repack: Optional[float] = None,
                 snapshot_every: Optional[int] = None, snapshot_prompt_end: bool = True,
                 snapshot_bytes: Optional[int] = None) -> None:
        listed = list(layers) if hasattr(layers, "__iter__") else None
        o, self._rotary = _options(
            layers if listed is None else listed, kv_heads, head_dim, keys, values, value_dim=value_dim, window=window,
            page_tokens=page_tokens, sinks=sinks, recent=recent, rollback=rollback, byte_budget=byte_budget, layer_formats=layer_formats,
            rotary=rotary, statistics=statistics, statistics_tokens=statistics_tokens, preallocate=preallocate, repack=repack, snapshot_every=snapshot_every,
            snapshot_prompt_end=snapshot_prompt_end, snapshot_bytes=snapshot_bytes)  # callbacks of rotary are kept
        super().__init__(ask(library.kvq_cache_create, ctypes.byref(o)), library.kvq_cache_free)
        self.layers = tuple(layer_from_c(ask(library.kvq_cache_get_layer, self, i, out=_abi.kvq_layer),
                                         () if listed is None else listed[i].parts) for i in range(o.layers))

    @classmethod
    def _of_handle(cls, handle: int, layers: Tuple[Layer, ...]) -> "Cache":
        """A cache that the library has made."""
        made = cls.__new__(cls)
        Handle.__init__(made, handle, library.kvq_cache_free)
        made._rotary, made.layers = [], tuple(layers)
        return made

    def info(self) -> CacheInfo:
        """The options in force, and bytes and pages in use."""
        c = _abi.kvq_cache_info()
        library.kvq_cache_get_info(self, ctypes.byref(c))
        none = ctypes.c_size_t(-1).value
        return from_c(CacheInfo, c, byte_budget=None if c.byte_budget == none else c.byte_budget)

    def new_sequence(self) -> Sequence:
        """An empty sequence."""
        return Sequence(self, ask(library.kvq_sequence_create, self))

    def add_format(self, format: Format, name: Optional[str] = None) -> None:
        """Adds a format, of its role, for requantize. name: None for its own. No other call on the cache or its sequences may run at
        the same time."""
        library.kvq_cache_add_format(self, role_of(format.role), handle_of(format, Format, "format"), text(name))

    def commit_to(self, role: str, name: str, first_layer: int = 0, last_layer: int = 0) -> None:
        """Pages of sequences that are made from now on are quantized to a listed format, in layers [first_layer, last_layer); 0: to the
        last. role: "key" or "value". Sequences that exist keep theirs (requantize(new_pages=True) changes it)."""
        library.kvq_cache_commit_to(self, role_of(role), text(name), first_layer, last_layer)

    def workspace_bytes(self, tokens: int, q_heads: int, q_tokens: int = 1, threads: int = 1) -> int:
        """Bytes of workspace for attention of q_tokens x q_heads queries over a sequence of `tokens`, on `threads` threads."""
        return ask(library.kvq_cache_workspace_bytes, self, tokens, q_heads, q_tokens, threads, out=ctypes.c_size_t)

    # ---- many sequences in one call ----

    def attend(self, layer: int, sequences: List_[Sequence], q: List_[Tensor], out: Optional[List_[Tensor]] = None, *,
               mods: Union[None, Mods, List_[Optional[Mods]]] = None, lse: Optional[List_[Tensor]] = None,
               threads: Optional[Threads] = None, workspace: Optional[Workspace] = None) -> List[Tensor]:
        """Sequence.attend for many sequences, whose tasks all threads share. Every sequence gets the bits that it gets alone.

        q, out, lse: one per sequence. mods: one for all, or one per sequence
        """
        return self._batch(library.kvq_cache_attend, _abi.kvq_attend_request, layer, sequences, {}, q, out, mods, lse,
                           threads, workspace)

    def select(self, layer: int, sequences: List_[Sequence], q: List_[Tensor], weights: List_[Tensor], best: int, *,
               threads: Optional[Threads] = None, workspace: Optional[Workspace] = None) -> List[Tensor]:
        """Sequence.select for many sequences, whose queries all threads share. q, weights: one per sequence."""
        n = len(sequences)
        for name, values in (("q", q), ("weights", weights)):
            if len(values) != n:
                raise ArgumentError(f"kvq: {name} has {len(values)} entries for {n} sequences")
        requests, results = (_abi.kvq_select_request * n)(), []
        for i, r in enumerate(requests):
            r.sequence = handle_of(sequences[i], Sequence, f"sequences[{i}]")
            r.q, r.weights, result, r.out = selection(q[i], weights[i], best, f"[{i}]")
            results.append(result)
        Call(None, threads, workspace).run(library.kvq_cache_select, self, layer, requests, n, best)
        return results

    def prefill(self, layer: int, sequences: List_[Sequence], k: List_[Optional[Tensor]], v: List_[Optional[Tensor]], q: List_[Tensor],
                out: Optional[List_[Tensor]] = None, *, mods: Union[None, Mods, List_[Optional[Mods]]] = None,
                lse: Optional[List_[Tensor]] = None, threads: Optional[Threads] = None,
                workspace: Optional[Workspace] = None) -> List[Tensor]:
        """Sequence.prefill for many sequences, every one once: chunks of any length beside sequences that decode one token. On an error
        all are unchanged."""
        return self._batch(library.kvq_cache_prefill, _abi.kvq_prefill_request, layer, sequences, {"k": k, "v": v}, q, out,
                           mods, lse, threads, workspace)

    def reserve(self, sequences: List_[Sequence], tokens: List_[int], q_heads: int, *, workspace: Workspace,
                q_tokens: Optional[List_[int]] = None, mods: Union[None, Mods, List_[Optional[Mods]]] = None,
                threads: Optional[Threads] = None) -> None:
        """Takes the memory of a step over all layers ahead of it, for all sequences or for none. Afterwards prefill of these sequences,
        with the same workspace, mods and threads, takes no memory in kvq, in every layer once. Until then the sequences must not be
        changed nor forked. What is left goes back with the last layer, or with Sequence.release_reserved.

        tokens    new tokens of each sequence, in every layer
        q_tokens  query tokens of each sequence; None: as many as tokens
        """
        n = len(sequences)
        queries = tokens if q_tokens is None else q_tokens
        own = list(mods) if isinstance(mods, (list, tuple)) else []
        for name, values in (("tokens", tokens), ("q_tokens", queries), ("mods", own or None)):
            if values is not None and len(values) != n:
                raise ArgumentError(f"kvq: {name} has {len(values)} entries for {n} sequences")
        call = Call(None if own else mods, threads, workspace, others=own)
        requests = (_abi.kvq_step_request * n)()
        for i, r in enumerate(requests):
            r.sequence = handle_of(sequences[i], Sequence, f"sequences[{i}]")
            r.tokens, r.q_tokens = tokens[i], queries[i]
            if own and own[i] is not None:
                r.mods = ctypes.pointer(own[i]._c)
        call.run(library.kvq_cache_reserve, self, requests, n, q_heads)

    def _batch(self, function: Callable, request: Any, layer: int, sequences: List_[Sequence],
               inputs: Dict[str, List_[Optional[Tensor]]], q: List_[Tensor], out: Optional[List_[Tensor]], mods: Any,
               lse: Optional[List_[Tensor]], threads: Optional[Threads], workspace: Optional[Workspace]) -> List[Tensor]:
        n = len(sequences)
        own = list(mods) if isinstance(mods, (list, tuple)) else []
        given = {**inputs, "q": q, "out": out, "lse": lse, "mods": own or None}
        for name, values in given.items():
            if values is not None and len(values) != n:
                raise ArgumentError(f"kvq: {name} has {len(values)} entries for {n} sequences")
        call = Call(None if own else mods, threads, workspace, others=own)
        requests, results = (request * n)(), []
        for i, r in enumerate(requests):
            a = Attended(self, layer, q[i], None if out is None else out[i], None if lse is None else lse[i])
            r.sequence = handle_of(sequences[i], Sequence, f"sequences[{i}]")
            r.q, r.out, r.lse = a.q, a.out, a.lse
            for name, values in inputs.items():
                setattr(r, name, optional_tensor(values[i], f"{name}[{i}]"))
            if own and own[i] is not None:
                r.mods = ctypes.pointer(own[i]._c)
            results.append(a.result)
        call.run(function, self, layer, requests, n)
        return results

    # ---- other formats for pages that exist ----

    def requantize(self, sequences: Iterable[Sequence], keys: Optional[str] = None, values: Optional[str] = None, *,
                   layers: Optional[Tuple[int, int]] = None, tokens: Optional[Tuple[int, int]] = None,
                   only_smaller: bool = False, new_pages: bool = False, dry_run: bool = False,
                   most_pages: Optional[int] = None, most_seconds: Optional[float] = None,
                   threads: Optional[Threads] = None, workspace: Optional[Workspace] = None) -> RequantizeReport:
        """Changes the format of pages; pages that the sequences share stay shared.

        keys, values  listed formats by name; None: unchanged
        layers        [first, last); None: all
        tokens        only pages that lie wholly in tokens [first, last); None: all
        only_smaller  skips pages that would not shrink
        new_pages     pages quantized from now on take these formats, too
        dry_run       reports only
        most_pages, most_seconds  no further page is begun after so many; None: no limit. The first page is always done

        OutOfMemoryError: the budget has no room for one more page per thread; pages that were converted until then stay so.
        """
        c = _abi.kvq_requantize_request(keys=text(keys), values=text(values), only_smaller=int(only_smaller),
                                        new_pages=int(new_pages), dry_run=int(dry_run),
                                        most_pages=limit(most_pages, "most_pages"))
        for name, given in (("layer", layers), ("token", tokens)):
            if given is not None:
                first, last = given
                if not 0 <= first < last:
                    raise ArgumentError(f"kvq: {name}s [{first}, {last}) are none")
                setattr(c, f"first_{name}", first)
                setattr(c, f"last_{name}", last)
        if most_seconds is not None:
            c.most_nanoseconds = max(int(most_seconds * 1e9), 1)
        c.executor = optional_handle(threads, Threads, "threads")
        c.workspace = optional_handle(workspace, Workspace, "workspace")
        report = _abi.kvq_requantize_report()
        library.kvq_cache_requantize(self, *handles(sequences, Sequence, "a sequence"), ctypes.byref(c), ctypes.byref(report))
        return from_c(RequantizeReport, report)

    def step_down(self, sequences: Iterable[Sequence], policy: StepDownPolicy,
                  threads: Optional[Threads] = None) -> StepDownReport:
        """Applies a policy, between decode steps. OutOfMemoryError: as requantize."""
        report = _abi.kvq_step_down_report()
        library.kvq_cache_step_down(self, *handles(sequences, Sequence, "a sequence"), ctypes.byref(policy_to_c(policy)),
                                    optional_handle(threads, Threads, "threads"), ctypes.byref(report))
        return from_c(StepDownReport, report)

    def plan_step_down(self, sequences: Iterable[Sequence], policy: StepDownPolicy,
                       threads: Optional[Threads] = None) -> StepDownReport:
        """A dry run: the report of step_down with these threads, to the byte."""
        report = _abi.kvq_step_down_report()
        library.kvq_cache_plan_step_down(self, *handles(sequences, Sequence, "a sequence"),
                                         ctypes.byref(policy_to_c(policy)),
                                         optional_handle(threads, Threads, "threads"), ctypes.byref(report))
        return from_c(StepDownReport, report)

    # ---- estimates ----

    def footprint(self, tokens: int, *, sequences: int = 1, q_heads: Optional[int] = None, q_tokens: int = 1,
                  threads: int = 1, chunk: Optional[int] = None, policy: Optional[StepDownPolicy] = None,
                  cross_tokens: int = 0) -> Footprint:
        """Bytes of sequences of `tokens` tokens, equal to what will be allocated.

        q_heads       None: without the workspace of attention
        chunk         most tokens of one prefill; None: append only
        cross_tokens  tokens of every layer made by cross_layer
        """
        c = _abi.kvq_footprint()
        library.kvq_cache_get_footprint(
            self, tokens, ctypes.byref(query_to_c(sequences, q_heads, q_tokens, threads, chunk, policy, cross_tokens)),
            ctypes.byref(c))
        return from_c(Footprint, c)

    def longest_context(self, budget: int, *, sequences: int = 1, q_heads: Optional[int] = None, q_tokens: int = 1,
                        threads: int = 1, chunk: Optional[int] = None, policy: Optional[StepDownPolicy] = None,
                        cross_tokens: int = 0) -> int:
        """The longest context that fits `budget` bytes at every length up to it; -1: not even an empty one."""
        return ask(library.kvq_cache_longest_context, self, budget,
                   ctypes.byref(query_to_c(sequences, q_heads, q_tokens, threads, chunk, policy, cross_tokens)),
                   out=ctypes.c_int32)

    @staticmethod
    def budget(tokens: int, *, sequences: int = 1, chunk: int = 1, cuts: int = 0, cross_tokens: int = 0, **options: Any) -> int:
        """The least byte_budget with which every step succeeds, for a cache with these options (those of Cache: layers, kv_heads, head_dim,
        keys and others), before it is made. With cuts it is an upper bound.

        tokens     most tokens of a sequence
        sequences  of so many tokens each
        chunk      most new tokens of a sequence in one step
        cuts       most pages of a sequence and layer that show only a part of their tokens at a time: a trim by more than `rollback` tokens
                   leaves at most one; erase, shift and splice leave at most three each
        cross_tokens  most tokens of every layer made by cross_layer
        """
        o, _rotary = _options(**options)
        query = _abi.kvq_budget_query(tokens=tokens, sequences=sequences, chunk=chunk, cuts=cuts, cross_tokens=cross_tokens)
        return ask(library.kvq_get_budget, ctypes.byref(o), ctypes.byref(query), out=ctypes.c_size_t)

    # ---- saved sequences ----

    def restore(self, source: File, model: Optional[str] = None, *, convert: bool = False) -> Sequence:
        """A sequence from a file of Sequence.save.

        source   a path, or a binary file that is open for reading
        model    the text that was saved; None: any
        convert  pages may change to the formats and the layout of this cache
        """
        if hasattr(source, "read"):
            return self._read(source.read, model, convert)
        return Sequence(self, ask(library.kvq_sequence_restore_file, self, save_options(model, convert), os.fsencode(source)))

    def from_bytes(self, data: bytes, model: Optional[str] = None, *, convert: bool = False) -> Sequence:
        """A sequence from Sequence.to_bytes."""
        import io

        return self._read(io.BytesIO(data).read, model, convert)

    def _read(self, read: Callable[[int], bytes], model: Optional[str], convert: bool) -> Sequence:
        return Sequence(self, reading(read, lambda give: ask(library.kvq_sequence_restore, self, save_options(model, convert), give, None)))
