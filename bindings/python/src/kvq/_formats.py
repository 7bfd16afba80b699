"""Formats by name, statistics from which keys are made, and pages in memory of the caller."""
from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, List, Optional

from . import _abi
from ._attention import choice
from ._errors import ArgumentError
from ._library import Handle, ask, handle_of, library, optional_handle, text
from ._tensors import Tensor, tensor

_ROLES = {"key": _abi.KEY, "value": _abi.VALUE}


def role_of(role: str) -> int:
    return choice(_ROLES, role, "role")


def from_c(of: Any, c: ctypes.Structure, **others: Any) -> Any:
    """A dataclass from the members of a struct that have its names."""
    given = {f: getattr(c, f) for f in of.__dataclass_fields__ if f not in others}
    for f, value in given.items():
        if isinstance(value, bytes):
            given[f] = value.decode()
        elif of.__dataclass_fields__[f].type == "bool":
            given[f] = bool(value)
    return of(**given, **others)


@dataclass(frozen=True)
class FormatEntry:
    """A format that has a name. K and V of one name may be two entries."""

    name: str
    keys: bool
    """It holds keys."""
    values: bool
    """It holds values."""
    takes_statistics: bool
    """Keys can be made from statistics."""
    group: int
    """Values that share a scale, the G of the name; 0: none."""
    preset: bool


def formats() -> List[FormatEntry]:
    """All formats of the library. Other groups than those listed may be asked for by name, too."""
    entries = []
    for i in range(ask(library.kvq_format_count, out=ctypes.c_int32)):
        entry = _abi.kvq_format_entry()
        library.kvq_format_list(i, ctypes.byref(entry))
        entries.append(from_c(FormatEntry, entry))
    return entries


class Statistics(Handle):
    """Sums over the first tokens of a text, a few hundred: keys of mix4 to mix6, low3 and low2 get channel widths from them, those of hi6 to
    low2 error feedback.

    products: also sum q q^T, which error feedback needs (head_dim^2 doubles per layer and kv head)
    """

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, products: bool = False) -> None:
        super().__init__(
            ask(library.kvq_statistics_create, layers, kv_heads, head_dim, int(products)), library.kvq_statistics_free)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Statistics":
        """What to_bytes() returned."""
        made = cls.__new__(cls)
        data = bytes(data)
        Handle.__init__(made, ask(library.kvq_statistics_load, data, len(data)), library.kvq_statistics_free)
        return made

    def to_bytes(self) -> bytes:
        """All sums as bytes."""
        return written(lambda write: library.kvq_statistics_save(self, write, None))

    def add_keys(self, layer: int, k: Tensor) -> None:
        """Adds keys of consecutive tokens, [n][kv_heads][head_dim]. Whole groups of 64 tokens count, and a last one of at least 16."""
        library.kvq_statistics_add_keys(self, layer, ctypes.byref(tensor(k, "k")))

    def add_sequence(self, sequence: Handle, first: int, count: int) -> None:
        """Adds the keys of tokens [first, first + count) of all layers of a Sequence, as its pages give them."""
        library.kvq_statistics_add_sequence(self, handle_of(sequence, Handle, "sequence"), first, count)

    def add_queries(self, layer: int, q: Tensor) -> None:
        """Adds queries, [n][q_heads][head_dim]."""
        library.kvq_statistics_add_queries(self, layer, ctypes.byref(tensor(q, "q")))


def written(function: Any) -> bytes:
    """The bytes that a function writes to its callback."""
    return b"".join(messages(function))


def messages(function: Any) -> List[bytes]:
    """The bytes of each call of its callback."""
    parts: List[bytes] = []
    stream(function, parts.append)
    return parts


def stream(function: Any, write: Any) -> None:
    """Calls function with a callback that hands its bytes to write. What write raises is raised."""
    raised: List[BaseException] = []

    def take(_: Any, data: int, count: int) -> int:
        try:
            write(ctypes.string_at(data, count))
            return 0
        except BaseException as e:  # it cannot cross the library
            raised.append(e)
            return 1

    callback = _abi.write_function(take)
    try:
        function(callback)
    except Exception:
        if raised:
            raise raised[0] from None
        raise


@dataclass(frozen=True)
class FormatDescription:
    """A format on this CPU, for blocks of a shape."""

    name: str
    """Of the scheme."""
    backend: str
    """"avx2", ..."""
    bits: float
    """Per value, parameters included."""
    block_bytes: int
    """Of one head of a page, a multiple of 16."""
    quantize: bool
    """Quantizes in vectors; else in a portable loop, which is slower."""
    dequantize: bool
    attend: bool
    dequantizes_first: bool
    """Attention multiplies a dequantized copy of each block."""
    holds_values: bool
    """fp32, fp16 or bf16, not quantized."""
    asked_name: str
    """By which it was found, such as "std4"."""
    quantize_by: str
    """The header of the kernel, or "portable: " and the reason; so are the next two."""
    dequantize_by: str
    attend_by: str


class Format(Handle):
    """A format by name, for keys or for values.

    name        fp16, bf16, fp32, int8, e4m3, affine-B-gG, kivi-B-gG (B: 1 to 8 bits; G: values that share a scale), or one of the
                presets ref8, hi6, std5, std4, mix4, mix5, mix6, low3, low2, hi6-h, std5-h, std4-h, low3-h, low2-h; in the bytes of
                other systems fp8, fp8-e5m2, nvfp4, nvfp4-4over6, mxfp8, mxfp4, q8_0, q4_0, q4_1, q5_0, q5_1, q6_0, iq4_nl;
                with "-bounds" at the end, keys carry bounds for Mods.selected_tokens; with "-fp16x64" their last 64
                channels are 16 bit, with "-ref8x64" or "-int8x64" 8 bit (latent_attention)
    role        "key" or "value"
    statistics  those from which keys are made, if the format takes them
    """

    def __init__(self, name: str, role: str, statistics: Optional[Statistics] = None) -> None:
        of = optional_handle(statistics, Statistics, "statistics")
        super().__init__(ask(library.kvq_format_find, text(name), role_of(role), of), library.kvq_format_free)
        self.name = name
        self.role = role

    def describe(self, tokens: int = 128, dim: int = 128) -> FormatDescription:
        """Describes it for blocks of tokens x dim values."""
        c = _abi.kvq_format_description()
        library.kvq_format_describe(self, role_of(self.role), tokens, dim, ctypes.byref(c))
        return from_c(FormatDescription, c)

    def _shape(self, tokens: int, heads: int, dim: int, layer: int, first_head: int) -> _abi.kvq_page_shape:
        return _abi.kvq_page_shape(
            role=role_of(self.role), tokens=tokens, heads=heads, dim=dim, layer=layer, first_head=first_head)

    def _bytes(self, shape: _abi.kvq_page_shape) -> Any:
        page, work = ctypes.c_size_t(), ctypes.c_size_t()
        library.kvq_format_page_bytes(self, ctypes.byref(shape), ctypes.byref(page), ctypes.byref(work))
        return page.value, work.value

    def page_bytes(self, tokens: int, heads: int, dim: int) -> int:
        """Bytes of a page of [tokens][heads][dim] values."""
        return self._bytes(self._shape(tokens, heads, dim, 0, 0))[0]

    def quantize(self, values: Tensor, *, layer: int = 0, first_head: int = 0) -> bytes:
        """Quantizes values [tokens][heads][dim] to a page: the bytes that a cache writes whose window has their dtype.

        layer, first_head: of the model, for formats that were made from statistics
        """
        x = tensor(values, "values")
        shape = self._shape(x.tokens, x.heads, x.dim, layer, first_head)
        page_bytes, work_bytes = self._bytes(shape)
        page, work = aligned(page_bytes), aligned(work_bytes)
        library.kvq_format_quantize(self, ctypes.byref(shape), ctypes.byref(x), page, page_bytes, work, work_bytes, None)
        return ctypes.string_at(page, page_bytes)

    def dequantize(self, page: bytes, out: Tensor, *, layer: int = 0, first_head: int = 0) -> Tensor:
        """Dequantizes a page to out, [tokens][heads][dim], rounded once. Returns out."""
        x = tensor(out, "out", write=True)
        shape = self._shape(x.tokens, x.heads, x.dim, layer, first_head)
        work_bytes = self._bytes(shape)[1]
        page = bytes(page)
        held, work = aligned(len(page)), aligned(work_bytes)
        ctypes.memmove(held, page, len(page))
        library.kvq_format_dequantize(self, ctypes.byref(shape), held, len(page), ctypes.byref(x), work, work_bytes)
        return out


def aligned(count: int) -> Any:
    """Bytes at an address that is a multiple of 64."""
    memory = (ctypes.c_char * (count + 64))()
    part = (ctypes.c_char * max(count, 1)).from_buffer(memory, -ctypes.addressof(memory) % 64)
    return part


def reading(read: Any, function: Any) -> Any:
    """What function returns for a callback that gives it the bytes of read(most). What read raises is raised."""
    raised: List[BaseException] = []

    def give(_: Any, to: int, most: int) -> int:
        try:
            part = read(most)
            if len(part) > most:
                raise ArgumentError(f"kvq: read({most}) returned {len(part)} bytes")
            ctypes.memmove(to, bytes(part), len(part))
            return len(part)
        except BaseException as e:  # it cannot cross the library
            raised.append(e)
            return 0

    callback = _abi.read_function(give)
    try:
        return function(callback)
    except Exception:
        if raised:
            raise raised[0] from None
        raise
