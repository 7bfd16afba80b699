"""Attention over keys and values that another system keeps, in its bytes and its memory; copies to and from them."""
from __future__ import annotations

import ctypes
from typing import Any, Iterable, Optional, Sequence, Union

from . import _abi
from ._attention import Call, Mods, Threads, Workspace
from ._errors import ArgumentError
from ._library import Handle, ask, library, text
from ._tensors import Tensor, _memory, empty_beside, integers, is_torch, rows, tensor

_ORDERS = {"NHD": (1, 2), "HND": (2, 1)}  # axes of tokens and heads


_BYTE_SCALES = ("nvfp4", "nvfp4-4over6", "mxfp8", "mxfp4", "mxfp4-g16", "mla-584", "index-68")


def _format_of(name: str, scale: Union[float, Sequence[float]]) -> Any:
    """With the scale of the tensor, or with one for each kv head."""
    if hasattr(scale, "__len__") and getattr(scale, "ndim", 1) > 0:
        scales = [float(x) for x in scale]
        n = len(scales)
        return ask(library.kvq_format_find_head_rows, text(name), (ctypes.c_float * n)(*scales), n, n)
    return ask(library.kvq_format_find_rows, text(name), float(scale))


class Rows:
    """Keys or values of one layer in blocks of another system, such as a cache of vLLM. Nothing is copied.

    format        of rows in the bytes of another system: "fp8", "q8_0", "mla-656", "mlx-4-g64", ... (docs/guide/formats.md)
    data          bytes: [blocks][block_tokens][kv_heads][bytes of a row] ("NHD"), or
                  [blocks][kv_heads][block_tokens][bytes of a row] ("HND"); a numpy array or a torch tensor of the CPU, any
                  strides but those of a row's bytes
    order         "NHD" or "HND"
    tensor_scale  by which numbers were divided (vLLM's k_scale, v_scale): fp8, nvfp4; or one for each kv head
    scales        where they lie beside the rows (nvfp4, mxfp4, mla-584, ...): as data, the last axis the bytes of a token;
                  of formats with a scale in one byte they may have any strides
    biases        of MLX: as scales, with their strides

    Latents have one kv head, and one object is keys and values.
    """

    def __init__(self, format: str, data: Tensor, *, order: str = "NHD", tensor_scale: Union[float, Sequence[float]] = 1.0,
                 scales: Optional[Tensor] = None, biases: Optional[Tensor] = None) -> None:
        if order not in _ORDERS:
            raise ArgumentError(f'kvq: order is {order!r}, neither "NHD" nor "HND"')
        tokens, heads = _ORDERS[order]
        self._format = Handle(_format_of(format, tensor_scale), library.kvq_format_free)
        self._held = (data, scales, biases)
        self._c = _abi.kvq_rows(format=self._format.address)
        for name, x in (("data", data), ("scales", scales), ("biases", biases)):
            if x is None:
                continue
            if not is_torch(x) and not hasattr(x, "shape"):
                raise TypeError(f"{name} is a {type(x).__name__}, neither a numpy array nor a torch tensor")
            if len(x.shape) != 4 or (x.element_size() if is_torch(x) else getattr(x, "itemsize", 1)) != 1:
                pool = ": a pool of tokens is x[:, None], blocks of one token" if len(x.shape) == 3 else ""
                raise ArgumentError(f"kvq: {name} is {x.dtype} {list(x.shape)}, not bytes with four axes, {order} in blocks{pool}")
            address, of_axes = _memory(x, name, False)
            strides = tuple([stride if n > 1 else 1 for stride, n in zip(of_axes, x.shape)])  # else it means nothing
            setattr(self._c, name, address)
            if name == "biases":
                same = (self._c.scale_block_stride, self._c.scale_token_stride, self._c.scale_head_stride)
                if scales is None or x.shape != scales.shape or (strides[0], strides[tokens], strides[heads]) != same:
                    beside = "no scales" if scales is None else f"scales {list(scales.shape)} with other strides"
                    raise ArgumentError(f"kvq: biases have shape {list(x.shape)}, beside {beside}; both must be laid out alike")
                if x.shape[3] > 1 and strides[3] != 1:
                    raise ArgumentError(f"kvq: biases have strides {list(strides)}; those of a token must be contiguous")
                continue
            prefix = "" if name == "data" else "scale_"
            setattr(self._c, prefix + "token_stride", strides[tokens])
            setattr(self._c, prefix + "head_stride", strides[heads])
            setattr(self._c, prefix + "block_stride", strides[0])
            if name == "scales":
                if x.shape[:3] != data.shape[:3]:
                    raise ArgumentError(f"kvq: scales have shape {list(x.shape)}, but data {list(data.shape)}")
                self._c.scale_group_stride = strides[3] if format in _BYTE_SCALES else 0
                if x.shape[3] > 1 and strides[3] != 1 and format not in _BYTE_SCALES:
                    raise ArgumentError(f"kvq: scales have strides {list(strides)}; those of a token must be contiguous")
            elif x.shape[3] > 1 and strides[3] != 1:
                raise ArgumentError(f"kvq: data has strides {list(strides)}; the bytes of a row must be contiguous")
        self.blocks, self.block_tokens, self.kv_heads = data.shape[0], data.shape[tokens], data.shape[heads]
        self._row = tuple(0 if x is None else x.shape[3] for x in self._held)

    def _expect_channels(self, dim: int, name: str) -> None:
        row, beside, biases = (ctypes.c_int32() for _ in range(3))
        library.kvq_format_row_bytes(self._format, dim, ctypes.byref(row), ctypes.byref(beside), ctypes.byref(biases))
        if self._row != (row.value, beside.value, biases.value):
            given, scales, of_biases = self._row
            raise ArgumentError(f"kvq: {name} have {given} bytes, {scales} of scales and {of_biases} of biases a token and head, "
                                f"but {dim} channels take {row.value}, {beside.value} and {biases.value}")

    def _blocks(self, table: Optional[Iterable[int]], tokens: int, name: str = "block_table") -> _abi.kvq_row_blocks:
        held, blocks = integers(range(self.blocks) if table is None else table, name)
        return _abi.kvq_row_blocks(table=ctypes.cast(held, ctypes.POINTER(ctypes.c_int32)), blocks=blocks,
                                   block_tokens=self.block_tokens, memory_blocks=self.blocks, tokens=tokens, kv_heads=self.kv_heads)

    def _expect_writable(self, name: str) -> None:
        for x, of in zip(self._held, ("data", "scales", "biases")):
            if x is not None:
                _memory(x, f"{of} of {name}", True)


def _expect_rows(**given: Any) -> None:
    for name, x in given.items():
        if not isinstance(x, Rows):
            raise TypeError(f"{name} is a {type(x).__name__}, not a kvq.Rows")


def attend_rows(keys: Rows, values: Rows, q: Tensor, *, tokens: int, block_table: Optional[Iterable[int]] = None,
                value_dim: Optional[int] = None, out: Optional[Tensor] = None, mods: Optional[Mods] = None,
                lse: Optional[Tensor] = None, threads: Optional[Threads] = None,
                workspace: Optional[Workspace] = None) -> Any:
    """softmax(q K^T) V for the last m tokens of a sequence that another system keeps.

    q            [m][q_heads][head_dim]; out [m][q_heads][value_dim], lse [m][q_heads] float32
    tokens       of the sequence
    block_table  its blocks in order; None: block 0, 1, ...
    value_dim    None: head_dim; of latents, whose keys are their values, it may be less
    Returns out. mods: without lists, selected_tokens and skipped_mass. Tokens that a model selects are the block_table of Rows with
    blocks of one token, with Mods(direction="cross").
    """
    _expect_rows(keys=keys, values=values)
    shape = (keys.blocks, keys.block_tokens, keys.kv_heads)
    if shape != (values.blocks, values.block_tokens, values.kv_heads):
        raise ArgumentError(
            f"kvq: keys are {keys.blocks} blocks of {keys.block_tokens} tokens x {keys.kv_heads} heads, values "
            f"{values.blocks} of {values.block_tokens} x {values.kv_heads}")
    of_q = tensor(q, "q")
    dim = of_q.dim if value_dim is None else value_dim
    if out is None:
        out = empty_beside(q, (of_q.tokens, of_q.heads, dim))
    of_out = tensor(out, "out", write=True)
    keys._expect_channels(of_q.dim, "keys")
    if values is not keys or of_out.dim > of_q.dim:
        values._expect_channels(of_out.dim, "values")
    of = keys._blocks(block_table, tokens)
    row_sums = rows(lse, (of_q.tokens, of_q.heads), "lse")
    Call(mods, threads, workspace, row_sums).run(
        library.kvq_attend_rows, ctypes.byref(keys._c), ctypes.byref(values._c), ctypes.byref(of), ctypes.byref(of_q),
        ctypes.byref(of_out))
    return out


def read_rows(source: Rows, out: Tensor, *, first: int = 0, block_table: Optional[Iterable[int]] = None,
              threads: Optional[Threads] = None, workspace: Optional[Workspace] = None) -> Any:
    """Reads tokens [first, first + n) of a sequence that another system keeps into out, [n][kv_heads][dim], and returns it: for
    Sequence.append, or for a system that keeps floats."""
    _expect_rows(source=source)
    of_out = tensor(out, "out", write=True)
    source._expect_channels(of_out.dim, "rows")
    of = source._blocks(block_table, first + of_out.tokens)
    Call(None, threads, workspace).run(library.kvq_read_rows, ctypes.byref(source._c), ctypes.byref(of), first, ctypes.byref(of_out))
    return out


def write_rows(target: Rows, x: Tensor, *, first: int = 0, block_table: Optional[Iterable[int]] = None,
               threads: Optional[Threads] = None, workspace: Optional[Workspace] = None) -> int:
    """Writes x, [n][kv_heads][dim], as tokens [first, first + n) of a sequence that another system keeps, in its bytes. Returns how
    many values were NaN, which become the number nearest to zero, or infinite, which saturate."""
    _expect_rows(target=target)
    of_x = tensor(x, "x")
    target._expect_channels(of_x.dim, "rows")
    target._expect_writable("the rows")
    of, bad = target._blocks(block_table, first + of_x.tokens), ctypes.c_int64()
    Call(None, threads, workspace).run(library.kvq_write_rows, ctypes.byref(target._c), ctypes.byref(of), first, ctypes.byref(of_x),
                                       ctypes.byref(bad))
    return bad.value


def convert_rows(source: Rows, target: Rows, *, tokens: int, dim: int, source_table: Optional[Iterable[int]] = None,
                 target_table: Optional[Iterable[int]] = None, threads: Optional[Threads] = None,
                 workspace: Optional[Workspace] = None) -> int:
    """Tokens [0, tokens) of one memory, of `dim` channels a head, become those of another one: formats, blocks and orders may
    differ. Bytes are copied where both formats are the same. The target's memory lies apart. Returns what write_rows returns."""
    _expect_rows(source=source, target=target)
    source._expect_channels(dim, "rows of the source")
    target._expect_channels(dim, "rows of the target")
    target._expect_writable("the target")
    of, to, bad = source._blocks(source_table, tokens), target._blocks(target_table, tokens, "target_table"), ctypes.c_int64()
    Call(None, threads, workspace).run(library.kvq_convert_rows, ctypes.byref(source._c), ctypes.byref(of), ctypes.byref(target._c),
                                       ctypes.byref(to), dim, ctypes.byref(bad))
    return bad.value
