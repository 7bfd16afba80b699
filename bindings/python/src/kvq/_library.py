"""Finds and loads the shared library, turns statuses into exceptions, and owns handles."""
from __future__ import annotations

import ctypes
import ctypes.util
import os
import pathlib
import sys
import types
import weakref
from typing import Any, Callable, Iterable, Optional, Tuple

from . import _abi
from ._errors import BY_STATUS, ArgumentError, HandleError, InternalError
from ._struct import RANGES, in_range


_FILE = {"darwin": "libkvq.dylib", "win32": "kvq.dll"}.get(sys.platform, "libkvq.so")


def _candidates():
    named = os.environ.get("KVQ_LIBRARY_PATH")
    if named:
        path = pathlib.Path(named)
        yield str(path / _FILE if path.is_dir() else path)
        return
    beside = pathlib.Path(__file__).parent / _FILE
    if beside.exists():
        yield str(beside)
        return
    yield ctypes.util.find_library("kvq") or _FILE


def _checked(library: ctypes.CDLL, name: str, types: list) -> Callable:
    """A function that raises what its status says. Integers that do not fit are errors before the call."""
    function = getattr(library, name)
    function.restype = ctypes.c_int32
    function.argtypes = types
    integers = [(i, of) for i, of in enumerate(types) if of in RANGES]

    def call(*given: Any) -> None:
        arguments = [a.address if isinstance(a, Handle) else a for a in given]
        for i, of in integers:
            arguments[i] = in_range(of, arguments[i], f"argument {i + 1} of {name}")
        status = function(*arguments)
        if status != _abi.OK:
            raise BY_STATUS.get(status, InternalError)(library.kvq_last_error().decode("utf-8", "replace"))

    return call


def _load() -> types.SimpleNamespace:
    path = next(_candidates())
    try:
        library = ctypes.CDLL(path)
    except OSError as e:
        raise ImportError(
            f"kvq: the library {path} cannot be loaded ({e}). Build it with -DKVQ_LIBRARY=ON -DBUILD_SHARED_LIBS=ON, "
            "and set KVQ_LIBRARY_PATH to the file or its folder"
        ) from None
    loaded = types.SimpleNamespace(path=path, dll=library)
    try:
        for name, (result, arguments) in _abi.OTHERS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
            setattr(loaded, name, function)
        version = loaded.kvq_abi_version()
        if version != _abi.ABI_VERSION:
            raise ImportError(f"kvq: {path} has interface {version}, this package needs {_abi.ABI_VERSION}")
        for name, arguments in _abi.FUNCTIONS.items():
            setattr(loaded, name, _checked(library, name, arguments))
    except AttributeError as e:
        raise ImportError(f"kvq: {path} is no library of this version of kvq: {e}") from None
    return loaded


library = _load()


def text(name: Optional[str]) -> Optional[bytes]:
    """A name as C takes it; None is NULL."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, not {type(name).__name__}")
    if "\0" in name:
        raise ArgumentError(f"kvq: the name {name!r} has a zero in it")
    return name.encode()


def count(number: Optional[int], what: str) -> int:
    """A number of tokens where None is the default of C, and 0 is none of them."""
    if number is None:
        return 0
    if number < 0:  # KVQ_NONE is negative, and would be taken for 0
        raise ArgumentError(f"kvq: {what} is {number}, which must be at least 0, or None")
    return _abi.NONE if number == 0 else number


def limit(number: Optional[int], what: str) -> int:
    """A number of tokens, bytes, pages or entries where None is the default, or no limit (0 in C)."""
    if number is None:
        return 0
    if number < 1:
        raise ArgumentError(f"kvq: {what} is {number}, which must be at least 1, or None")
    return number


def ask(function: Callable, *arguments: Any, out: type = ctypes.c_void_p) -> Any:
    """What a function writes to its last argument."""
    result = out()
    function(*arguments, ctypes.byref(result))
    return result if isinstance(result, ctypes.Structure) else result.value


class Handle:
    """An object of the library. It is freed with the last reference to it, or by close(), in any order with others."""

    def __init__(self, pointer: int, free: Callable) -> None:
        self._pointer: Optional[int] = pointer
        self._finalizer = weakref.finalize(self, free, pointer)

    @property
    def address(self) -> int:
        """The handle of the C interface."""
        if self._pointer is None:
            raise HandleError(f"kvq: this {type(self).__name__} was closed")
        return self._pointer

    def close(self) -> None:
        """Frees it now. Later calls raise HandleError; a second close() does nothing."""
        self._pointer = None
        self._finalizer()

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._pointer is None

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(f"a {type(self).__name__} is not copied; a sequence has fork(), save() and to_bytes()")


def handle_of(x: Any, of: Any, name: str) -> int:
    """The handle of an argument."""
    if not isinstance(x, of):
        raise TypeError(f"{name} is a {type(x).__name__}, not a kvq.{of.__name__}")
    return x.address


def optional_handle(x: Any, of: type, name: str) -> Optional[int]:
    return None if x is None else handle_of(x, of, name)


def handles(all_of: Iterable[Any], of: type, name: str) -> Tuple[Any, int]:
    """A list of handles and its length."""
    pointers = [handle_of(x, of, name) for x in all_of]
    return (ctypes.c_void_p * len(pointers))(*pointers), len(pointers)
