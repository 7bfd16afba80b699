"""numpy arrays and torch tensors as kvq_tensor: pointers and strides, no copy. Neither library is needed to import this package."""
from __future__ import annotations

import array
import ctypes
import math
import sys
from typing import Any, Dict, Iterable, Optional, Sequence, Tuple

from . import _abi
from ._errors import ArgumentError, UnsupportedError

Tensor = Any
"""A numpy array or a torch tensor on the CPU, [tokens][heads][dim], channels contiguous, of dtype float32, float16 or bfloat16.
In numpy bfloat16 is that of ml_dtypes, or uint16 with the bits."""

_NAMES = {
    "float32": _abi.FP32, "float16": _abi.FP16, "bfloat16": _abi.BF16, "uint16": _abi.BF16,
    "torch.float32": _abi.FP32, "torch.float16": _abi.FP16, "torch.bfloat16": _abi.BF16,
}
_numbers: Dict[Any, int] = {}  # by dtype


def is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_numpy(x: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray)


def _number(x: Tensor, name: str) -> int:
    """The dtype as the library has it."""
    dtype = x.dtype
    number = _numbers.get(dtype)
    if number is None:
        text = getattr(dtype, "name", None) or str(dtype)
        if not getattr(dtype, "isnative", True):
            raise ArgumentError(f"kvq: {name} is {dtype}, in another order of bytes than this machine's")
        number = _NAMES.get(text)
        if number is None:
            raise ArgumentError(f"kvq: {name} is {text}, none of float32, float16 and bfloat16")
        _numbers[dtype] = number
    return number


def _memory(x: Tensor, name: str, write: bool) -> Tuple[int, Tuple[int, ...]]:
    """Address, and strides in values."""
    if is_numpy(x):
        if write and not x.flags.writeable:
            raise ArgumentError(f"kvq: {name} cannot be written")
        bytes_of = x.itemsize
        strides = tuple([s // bytes_of for s in x.strides])
        if any([s * bytes_of != of for s, of in zip(strides, x.strides)]):
            raise ArgumentError(f"kvq: {name} has strides of {x.strides} bytes, not multiples of {bytes_of}")
        return x.ctypes.data, strides
    if is_torch(x):
        if x.device.type != "cpu":
            raise UnsupportedError(
                f"kvq: {name} is on {x.device}; a kvq.Cache takes tensors of the CPU, use {name}.cpu() or a kvq.cuda.Cache"
            )
        if str(x.layout) != "torch.strided":
            raise ArgumentError(f"kvq: {name} is {x.layout}, not torch.strided")
        return x.data_ptr(), x.stride()
    raise TypeError(f"{name} is a {type(x).__name__}, neither a numpy array nor a torch tensor")


def tensor(x: Tensor, name: str, write: bool = False) -> _abi.kvq_tensor:
    """x as the library takes it. x must live until the call returns."""
    address, strides = _memory(x, name, write)
    number = _number(x, name)
    shape = x.shape
    if len(shape) != 3:
        raise ArgumentError(f"kvq: {name} has shape {list(shape)}, not [tokens][heads][dim]")
    tokens, heads, dim = shape
    if dim > 1 and strides[2] != 1 and tokens * heads > 0:
        raise ArgumentError(f"kvq: {name} has strides {list(strides)}; its channels must be contiguous, so copy it")
    # Strides of axes with one entry mean nothing, nor do those of no values, and may be anything.
    empty = 0 in (tokens, heads, dim)
    token_stride = strides[0] if tokens > 1 and not empty else heads * dim
    head_stride = strides[1] if heads > 1 and not empty else dim
    repeats = (token_stride == 0 and tokens > 1) or (head_stride == 0 and heads > 1)
    if dim > 0 and ((repeats and write) or (token_stride == 0 and head_stride == 0 and tokens * heads > 0)):
        raise ArgumentError(f"kvq: {name} has strides {list(strides)}: tokens or heads share memory, so copy it")
    if max(shape) >= 2**31:
        raise ArgumentError(f"kvq: {name} has shape {list(shape)}, more than 32 bits can count")
    c = _abi.kvq_tensor.__new__(_abi.kvq_tensor)
    ctypes.Structure.__init__(c, address, number, tokens, heads, dim, token_stride, head_stride)  # checked above
    return c


def optional_tensor(x: Optional[Tensor], name: str) -> _abi.kvq_tensor:
    """The same; None has no tokens."""
    return _abi.kvq_tensor(dtype=_abi.FP32) if x is None else tensor(x, name)


def rows(x: Optional[Tensor], shape: Sequence[int], name: str, write: bool = True) -> Optional[int]:
    """The address of a dense float32 array of this shape; write: that is written."""
    if x is None:
        return None
    address, strides = _memory(x, name, write)
    got = x.shape
    if str(x.dtype) not in ("float32", "torch.float32") or tuple(got) != tuple(shape):
        raise ArgumentError(f"kvq: {name} is {x.dtype} {list(got)}, not float32 {list(shape)}")
    dense = 1
    for n, stride in zip(reversed(got), reversed(strides)):
        if n > 1 and stride != dense and 0 not in got:
            raise ArgumentError(f"kvq: {name} has strides {list(strides)} and must be contiguous")
        dense *= n
    if address % 4:
        raise ArgumentError(f"kvq: {name} is not aligned to its values of 4 bytes")
    return address


def empty_beside(x: Tensor, shape: Sequence[int], dtype: Any = None) -> Tensor:
    """New memory of the library and, unless given, the dtype of x."""
    if is_torch(x):
        return sys.modules["torch"].empty(tuple(shape), dtype=dtype or x.dtype)
    if is_numpy(x):
        return sys.modules["numpy"].empty(tuple(shape), dtype=dtype or x.dtype)
    raise TypeError(f"q is a {type(x).__name__}, neither a numpy array nor a torch tensor")


def empty_positions(x: Tensor, shape: Sequence[int]) -> Tuple[Tensor, int]:
    """New int32 memory of the library of x, and its address."""
    of = empty_beside(x, shape, sys.modules["torch"].int32 if is_torch(x) else "int32")
    return of, _memory(of, "positions", True)[0]


def integers(values: Iterable[int], name: str) -> Tuple[Any, int]:
    """A list of int32 and its length."""
    try:
        held = array.array("i", values)
    except OverflowError:
        raise ArgumentError(f"kvq: {name} has an entry that is no 32-bit integer") from None
    except TypeError as e:
        raise TypeError(f"{name} is no flat list of integers: {e}") from None
    return (ctypes.c_int32 * len(held)).from_buffer(held) if held else (ctypes.c_int32 * 0)(), len(held)


def floats(values: Iterable[float], of: Any = ctypes.c_float) -> Any:
    """A list of float32 or double."""
    held = [float(v) for v in values]
    return (of * len(held))(*held)


_VIEWS = {"float32": (ctypes.c_float, "f"), "float16": (ctypes.c_uint16, "H"), "bfloat16": (ctypes.c_uint16, "H")}


def view(address: int, shape: Sequence[int], dtype: str = "float32", owner: Any = None) -> Any:
    """Values of the library, to be written: a numpy array if numpy is there, else a memoryview, of 16-bit values by their
    bits. It keeps `owner` alive."""
    of, letter = _VIEWS[dtype]
    memory = (of * math.prod(shape)).from_address(address)
    memory.owner = owner
    try:
        import numpy
    except ImportError:
        return memoryview(memory).cast("B").cast(letter, shape)
    return numpy.frombuffer(memory, dtype="float16" if dtype == "float16" else of).reshape(shape)
