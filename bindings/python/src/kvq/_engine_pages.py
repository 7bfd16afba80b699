"""Shapes, orders of axes and strides of an engine's pages, for kvq.cuda.Pages: of anything with shape, dtype, stride() and element_size()."""
from __future__ import annotations

from typing import Any, Optional, Tuple

from ._errors import ArgumentError, UnsupportedError

# Rows of others: channels in a byte, and those that share a scale in a tensor of its own.
ROWS = {"fp8": (1, 0), "fp8-e5m2": (1, 0), "nvfp4": (2, 16), "nvfp4-4over6": (2, 16), "mxfp8": (1, 32), "mxfp4": (2, 32)}


def order_of(format: str, order: Optional[str], name: str, x: Any, page_tokens: int, kv_heads: int) -> Optional[str]:
    """"NHD" or "HND" of rows [pages][..][..][bytes], None of pages of kvq: the blocks of all kv heads, one after the other."""
    if order not in ("HND", "NHD", None):
        raise ArgumentError(f'kvq: order is {order!r}, neither "NHD" nor "HND"')
    if not all(of in ROWS for of in format.split("/")):
        if order == "NHD":
            raise ArgumentError(f'kvq: order "NHD" is of rows of others ({", ".join(ROWS)}); a page of {format} is not bytes of tokens, but '
                                f"of blocks of {kv_heads} kv heads, one after the other")
        return None
    if len(x.shape) != 4 and order != "NHD":
        return None
    if order is None and kv_heads == page_tokens > 1:
        raise ArgumentError(f'kvq: {name} are {list(x.shape)}: say order="NHD" or order="HND", since {kv_heads} kv heads are as many as '
                            "the tokens of a page")
    return order or "NHD"


def expect_blocks(format: str, name: str, x: Any, page_tokens: int, kv_heads: int, least: int) -> None:
    """Raises unless these are pages of kvq of at least so many bytes."""
    if len(x.shape) > 2 and x.shape[1] != kv_heads:
        raise ArgumentError(f"kvq: {name} are {list(x.shape)}; pages of {format} are the blocks of {kv_heads} kv heads, one after the "
                            f"other, [pages][{kv_heads}][...]{'; these are NHD' if x.shape[1] == page_tokens else ''}")
    if x.shape[0] > 0 and (not x[0].is_contiguous() or x[0].numel() * x.element_size() < least):
        raise ArgumentError(f"kvq: {name} are {x.dtype} {list(x.shape)} with strides {list(x.stride())}; a page of {format} is {least} "
                            "contiguous bytes")


def row_strides(name: str, x: Any, order: str, page_tokens: int, kv_heads: int, row: int) -> Tuple[int, int, int]:
    """Of bytes [pages][page_tokens][kv_heads][row] or, HND, with heads before tokens: from a page, a token and a head to the next; those
    of one page, token or head mean nothing."""
    heads_first = order == "HND"
    shape = (kv_heads, page_tokens, row) if heads_first else (page_tokens, kv_heads, row)
    given, strides = tuple(x.shape), tuple(x.stride())
    if given[1:] != shape:
        other = "NHD" if heads_first else "HND"
        hint = f'; they are order="{other}"' if given[1:] == (shape[1], shape[0], row) else ""
        raise ArgumentError(f'kvq: {name} are {x.dtype} {list(given)}, not bytes [pages]{"".join(f"[{n}]" for n in shape)} (order="{order}", '
                            f"{page_tokens} tokens, {kv_heads} kv heads){hint}")
    if strides[3] != 1 or x.element_size() != 1:
        raise ArgumentError(f"kvq: {name} are {x.dtype} {list(given)} with strides {list(strides)}, not contiguous bytes of a row")
    least = (row + 15) // 16 * 16
    first, second = (stride if n > 1 else least for stride, n in zip(strides[1:3], given[1:]))
    page = strides[0] if given[0] > 1 else max(least, first * given[1], second * given[2])
    return (page, second, first) if heads_first else (page, first, second)


def tensor_scale(name: str, scale: Any) -> float:
    """One positive number, also of a tensor with one."""
    if getattr(scale, "ndim", 1) > 0 and hasattr(scale, "__len__"):
        if len(scale) != 1:
            raise UnsupportedError(f"kvq: {name} has {len(scale)} numbers; rows on a GPU have one scale of the tensor (kvq.Rows on the CPU "
                                   "also one for each kv head); multiply a head's queries by its key_scale, outputs by its value_scale")
        scale = scale[0]
    if not float(scale) > 0:
        raise ArgumentError(f"kvq: {name} is {float(scale)}, which must be positive")
    return float(scale)
