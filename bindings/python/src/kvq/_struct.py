"""Structs of the C interface: `S(members...)` fills the member `size`. Numbers are checked: one that does not fit its type is an
error, never cut off."""
from __future__ import annotations

import ctypes
import operator
from ctypes import c_int32, c_int64, c_size_t
from typing import Any, Dict

from ._errors import ArgumentError

# The integers that a C type holds.
RANGES = {c_int32: (-(2**31), 2**31 - 1), c_int64: (-(2**63), 2**63 - 1), c_size_t: (0, 2**64 - 1)}

handle = ctypes.c_void_p


def in_range(of: Any, value: Any, what: str) -> int:
    """The value as an integer that fits a C type."""
    number = operator.index(value)
    low, high = RANGES[of]
    if not low <= number <= high:
        raise ArgumentError(f"kvq: {what} is {number}, none of the integers from {low} to {high}")
    return number


class Struct(ctypes.Structure):
    _ranged: Dict[str, type] = {}  # members that are checked, by name

    def __init_subclass__(cls) -> None:
        cls._ranged = {name: of for name, of, *_ in cls._fields_ if of in RANGES}

    def __init__(self, **members: Any) -> None:
        super().__init__()
        if self._fields_[0][0] == "size":
            self.size = ctypes.sizeof(self)
        for name, value in members.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        of = self._ranged.get(name)
        super().__setattr__(name, value if of is None else in_range(of, value, name))
