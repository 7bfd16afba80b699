"""One layer of a cache of kvq.transformers on a GPU: what kvq.transformers.Layer hands to a kvq.cuda.Cache.

A decode step is two calls of the library with structs that are made once: it takes some microseconds and never waits for the device.
"""
from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Dict, Iterable, List, Optional, Sequence as Sequence_, Tuple

import torch

from . import _abi
from ._configs import ROLLBACK
from ._errors import BY_STATUS, ArgumentError, Error, InternalError, UnsupportedError
from ._latents import format_names
from ._layers import Layer, full_attention
from ._library import library
from .cuda import Cache, Sequence, attend_options

_OK = _abi.OK
How = Tuple[Optional[float], Optional[float], Optional[int]]  # scale, softcap, window


class _PlainTensor(ctypes.Structure):
    """kvq_tensor whose members are set without checks, for calls of every layer."""

    _fields_ = _abi.kvq_tensor._fields_


class _Rows:
    """A tensor [rows][heads][tokens][dim] as rows x tokens for the library."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device, number: int) -> None:
        self.name, self.dtype, self.device = name, dtype, device
        self.c = _PlainTensor(dtype=number)
        self.pointer = ctypes.addressof(self.c)
        self.shape: Any = None  # of the last one that was not copied: the next one has its strides, as a rule
        self.strides: Any = None

    def set(self, x: torch.Tensor) -> torch.Tensor:
        """x must live until the call: what it was copied to, where its tokens do not follow each other in memory."""
        shape, strides = x.shape, x.stride()
        if strides == self.strides and shape == self.shape and x.dtype is self.dtype and x.device == self.device:
            self.c.data = x.data_ptr()
            return x
        if x.dtype is not self.dtype or x.device != self.device:
            raise ArgumentError(f"kvq: {self.name} is {x.dtype} on {x.device}, the cache {self.dtype} on {self.device}")
        self.strides = None
        batch, heads, n, dim = shape
        of_row, head, token, channel = strides
        if channel != 1 or 0 in (of_row, head, token) or (n > 1 and batch > 1 and of_row != n * token):
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
            of_row, head, token, channel = x.stride()
        else:
            self.shape, self.strides = shape, strides
        c = self.c
        c.data, c.tokens, c.heads, c.dim = x.data_ptr(), batch * n, heads, dim
        c.token_stride, c.head_stride = token if n > 1 else of_row, head
        return x


class DevicePages:
    """Sequences of a batch in one layer."""

    def __init__(self, k: torch.Tensor, values: Any, keys: Any, options: Dict[str, Any], layer: Layer) -> None:
        if values is not None and values != keys:
            raise UnsupportedError(f"kvq: on a GPU keys and values have one format, not {keys} and {values}")
        batch = k.shape[0]
        given = dict(options)
        stored = given.pop("window", None)
        self.dtype = k.dtype
        names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
        if k.dtype not in names:
            raise UnsupportedError(f"kvq: the keys are {k.dtype}; caches on a GPU take torch.float16 and torch.bfloat16")
        if stored not in (None, names[k.dtype]):
            raise ArgumentError(f"kvq: the window is {stored}, but the keys are {names[k.dtype]}")
        most = given.pop("max_batch", batch)
        if layer.hides:
            given.setdefault("rollback", ROLLBACK)
        if layer.kind == "latent":
            keys = format_names(keys, layer.window)
        # A cache on a device needs a layer that takes steps; a layer of a text takes none.
        layers = [full_attention(layer.kv_heads, layer.head_dim), layer] if layer.kind == "cross" else [layer]
        pages = Cache(layers, formats=keys, dtype=k.dtype, device=k.device, max_batch=most, **given)
        self._hold(pages, [pages.new_sequence() for _ in range(batch)])

    def _hold(self, pages: Cache, sequences: List[Sequence]) -> None:
        self._number = len(pages.layers) - 1
        self.pages, self.layer, self.sequences = pages, pages.layers[self._number], sequences
        self._rows: Optional[Any] = None
        self._begun = False
        self._lent: Optional[Tuple] = None  # forks from before the prompt, its keys and values; None: a step, or nobody asks
        self._address, self._stream = pages.address, pages.stream_of()
        number = _abi.FP16 if self.dtype == torch.float16 else _abi.BF16
        names = ("k", "v", "q", "out")
        self._k, self._v, self._q, self._out = (_Rows(n, self.dtype, pages.device, number) for n in names)
        self._options: Dict[Tuple, Any] = {}
        f = self.pages._f
        self._begin, self._prefill, self._attend = (
            f.raw_kvq_cuda_cache_begin_step, f.raw_kvq_cuda_cache_prefill, f.raw_kvq_cuda_cache_attend)

    def copy(self) -> "DevicePages":
        """Forks of the same sequences."""
        made = DevicePages.__new__(DevicePages)
        made.dtype = self.dtype
        made._hold(self.pages, [s.fork() for s in self.sequences])
        return made

    def replace(self, sequences: List[Sequence]) -> None:
        """Other sequences stand in the rows."""
        self.sequences, self._rows, self._begun, self._lent = sequences, None, False, None
        if len(sequences) > self.pages.max_batch:
            raise ArgumentError(f"kvq: {len(sequences)} sequences, but the cache was made for {self.pages.max_batch}: pass "
                                f"max_batch={len(sequences)}")

    def _error(self, status: int) -> Exception:
        return BY_STATUS.get(status, InternalError)(library.kvq_last_error().decode("utf-8", "replace"))

    def check_trim(self, lengths: List[int]) -> None:
        """Raises what trim() of rows raises that have freed what it needs."""
        for s, n in zip(self.sequences, lengths):
            if 0 < n < s.trim_limit():
                s.trim(n)

    def trim(self, lengths: List[int]) -> None:
        """Every row to a number of tokens that it had before. What has begun, has not."""
        self._begun, self._lent = False, None
        for s, n in zip(self.sequences, lengths):
            if len(s) > n:
                s.trim(n)

    def attend(self, k: torch.Tensor, v: Optional[torch.Tensor], q: torch.Tensor, new: Optional[torch.Tensor], how: How,
               s_aux: Optional[torch.Tensor] = None, lends: bool = False) -> torch.Tensor:
        """As Layer.attend. new: [batch][n] on the CPU, False for padding; None: there is none. lends: lend() may follow"""
        v = k[:, :, :0] if v is None else v  # latents are values, too
        options, n = self._options_of(how, s_aux, q), q.shape[2]
        self._lent = None
        if n <= self.pages.step_tokens:
            absent = [] if new is None else (~new).nonzero().tolist()
            if not absent or n == 1:
                return self._step(k, v, q, options, [i for i, _ in absent])
        before = [s.fork() for s in self.sequences] if lends else None
        out = self._prompts(self.sequences, k, v, q, new, options)
        self._lent = None if before is None else (before, k, v)
        return out

    def lend(self, q: torch.Tensor, new: Optional[torch.Tensor], how: How, s_aux: Optional[torch.Tensor]) -> torch.Tensor:
        """Attends for other queries of the tokens that attend() has appended, to what its own have seen: a prompt in 16 bit."""
        options = self._options_of(how, s_aux, q)
        if self._lent is None:
            return self._queries(q, options)
        before, k, v = self._lent
        return self._prompts((s.fork() for s in before), k, v, q, new, options)

    def append_text(self, k: torch.Tensor, v: torch.Tensor, shown: Optional[torch.Tensor]) -> None:
        """The text of a layer with cross attention, once. shown: [batch][tokens] on the CPU, False for padding; None: there is none"""
        for row, s in enumerate(self.sequences):
            of_row = [x[row].transpose(0, 1) if shown is None else x[row].transpose(0, 1)[shown[row].to(x.device)] for x in (k, v)]
            if len(of_row[0]) > 0:
                self.pages.begin_cross(s, len(of_row[0]))
                self.pages.append(self._number, *(x.contiguous() for x in of_row))

    def attend_text(self, q: torch.Tensor, how: How, s_aux: Optional[torch.Tensor]) -> torch.Tensor:
        """Attends to it with any number of queries."""
        self.begin(0)
        self._begun = False
        return self._queries(q, self._options_of(how, s_aux, q))

    def _options_of(self, how: How, s_aux: Optional[torch.Tensor], q: torch.Tensor) -> int:
        """The address of a struct."""
        held = self._options.get(how)
        if held is None:
            options = attend_options(*how)
            held = self._options[how] = (options, ctypes.addressof(options))
        batch, q_heads, n, _ = q.shape
        if s_aux is not None:
            if s_aux.numel() != q_heads:
                raise ArgumentError(f"kvq: {s_aux.numel()} learned sinks for {q_heads} query heads")
            sinks = s_aux.detach().to(q.device, torch.float32).flatten().contiguous()
            sums = torch.empty(batch * n, q_heads, dtype=torch.float32, device=q.device)
            held[0].sink_logits, held[0].lse = sinks.data_ptr(), sums.data_ptr()
            self._sinks = (sinks, sums)  # a graph reads them again
        elif held[0].sink_logits:
            held[0].sink_logits = held[0].lse = None
        return held[1]

    def begin(self, n: int, absent: Sequence_[int] = ()) -> None:
        """Every row but absent ones gets n tokens more: the next attend() writes them. attend() begins by itself, unless this has."""
        batch, pages = len(self.sequences), self.pages
        rows = self._rows
        if rows is None or absent:
            addresses = [None if i in absent else s.address for i, s in enumerate(self.sequences)]
            self._held = (ctypes.c_void_p * batch)(*addresses)
            rows = ctypes.addressof(self._held)
            self._rows = None if absent else rows
        status = self._begin(self._address, rows, batch, n, self._stream())
        if status == _abi.ERROR_MEMORY:
            pages.begin_step([None if i in absent else s for i, s in enumerate(self.sequences)], n)
        elif status != _OK:
            raise self._error(status)
        self._begun = True

    def stepped(self) -> None:
        """A graph has done what begin() has begun."""
        self._begun = False

    def _output(self, make: Any, q: torch.Tensor) -> torch.Tensor:
        batch, q_heads, n, dim = q.shape
        return make((batch, n, q_heads, self.layer.value_dim or dim), dtype=q.dtype, device=q.device)

    def _step(self, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, options: int, absent: List[int]) -> torch.Tensor:
        n, out = q.shape[2], self._output(torch.empty, q)
        held = self._k.set(k), self._v.set(v), self._q.set(q), self._out.set(out.transpose(1, 2))
        if not self._begun:
            self.begin(n, absent)
        self._begun = False
        status = self._prefill(self._address, self._number, self._k.pointer, self._v.pointer, self._q.pointer, self._out.pointer, options,
                               self._stream())
        del held
        if status != _OK:
            error = self._error(status)
            self.trim([len(s) - (0 if i in absent else n) for i, s in enumerate(self.sequences)])
            raise error
        return out

    def _queries(self, q: torch.Tensor, options: int) -> torch.Tensor:
        """Attention of the step that has begun, without new tokens."""
        out = self._output(torch.empty, q)
        held = self._q.set(q), self._out.set(out.transpose(1, 2))
        status = self._attend(self._address, self._number, self._q.pointer, self._out.pointer, options, self._stream())
        del held
        if status != _OK:
            raise self._error(status)
        return out

    def _prompts(self, sequences: Iterable[Sequence], k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, new: Optional[torch.Tensor],
                 options: int) -> torch.Tensor:
        out = self._output(torch.empty if new is None else torch.zeros, q)
        with contextlib.ExitStack() as undo:
            self._prompt_rows(sequences, k, v, q, new, options, out, undo)
            undo.pop_all()
        return out

    def _prompt_rows(self, sequences: Iterable[Sequence], k: torch.Tensor, v: torch.Tensor, q: torch.Tensor,
                     new: Optional[torch.Tensor], options: int, out: torch.Tensor, undo: contextlib.ExitStack) -> None:
        n, pages = q.shape[2], self.pages
        for row, s in enumerate(sequences):
            first, count, chosen = 0, n, None
            if new is not None:
                real = new[row].nonzero().flatten().tolist()
                if not real:
                    continue
                first, count = real[0], len(real)
                if real[-1] - first + 1 != count:
                    chosen = torch.tensor(real, device=q.device)

            def tokens(x: torch.Tensor) -> torch.Tensor:
                x = x[row : row + 1]
                if x.shape[2] == 0:
                    return x
                return x[:, :, first : first + count] if chosen is None else x[:, :, chosen]

            to = out[row : row + 1, first : first + count] if chosen is None else out.new_empty(1, count, *out.shape[2:])
            held = [of.set(x) for of, x in ((self._k, tokens(k)), (self._v, tokens(v)), (self._q, tokens(q)),
                                            (self._out, to.transpose(1, 2)))]
            before = len(s)
            pages.begin_prompt(s, count)
            undo.callback(_trim, s, before)
            status = self._prefill(self._address, self._number, self._k.pointer, self._v.pointer, self._q.pointer, self._out.pointer,
                                   options, self._stream())
            del held
            if status != _OK:
                raise self._error(status)
            if chosen is not None:
                out[row, chosen] = to[0]


def _trim(sequence: Sequence, n: int) -> None:
    """Takes the tokens of a failed step back. An error of its own would hide the one that is reported."""
    with contextlib.suppress(Error):
        sequence.trim(n)
