"""What kvq.transformers knows of a model of transformers: its class, the kinds of its layers, and what it
does with tensors that it was handed."""
from __future__ import annotations

import sys
from typing import Any, Iterator, Optional

import torch
from transformers import cache_utils

from ._errors import UnsupportedError

# Of config.layer_types. Masks say what these attend to.
_HELD = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
# What tells something of a tensor, or changes nothing.
_LOOKS = {"__get__", "__len__", "__hash__", "__repr__", "__format__", "__str__", "size", "dim", "ndimension",
          "stride", "numel", "nelement", "is_contiguous", "is_floating_point", "element_size", "data_ptr",
          "get_device", "to", "contiguous", "type"}


def model_name() -> str:
    """The class of the model whose forward pass this is. For messages only: it walks the stack."""
    name, frame = "this model", sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and hasattr(module, "config"):
            name = type(module).__name__
        frame = frame.f_back
    return name


def state_layer() -> Optional[type]:
    """The package's layer of recurrent and convolution states; None: this version has none."""
    return getattr(cache_utils, "LinearAttentionLayer", None)


def check_model(config: Any) -> None:
    """Raises UnsupportedError for layers that no cache of kvq.transformers holds."""
    states = getattr(config, "number_of_conv_states", None) or 1
    if states > 1:
        raise UnsupportedError(f"kvq: layers of {model_name()} keep {states} convolution states each, "
                               "kvq.transformers.Cache holds one")
    kinds: Any = {}
    for name in ("LAYER_TYPE_CACHE_MAPPING", "DYNAMIC_LAYER_TYPE_MAPPING"):  # of 5.7, of 5.17
        kinds = getattr(cache_utils, name, kinds)
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _HELD and (state_layer() is None or kinds.get(kind) is not state_layer()):
            raise UnsupportedError(f"kvq: {model_name()} has layers of the type {kind}, which neither "
                                   "kvq.transformers.Cache nor the package's layer of recurrent states holds")


class Handed(torch.Tensor):
    """A tensor that goes through a model to the attention function, and stands for what that finds in `of`.
    Anything else that is done with it would go unnoticed, and is refused."""

    of: Any = None
    what = ""  # for messages

    @classmethod
    def make(cls, x: torch.Tensor, of: Any, what: str) -> "Handed":
        made = torch.Tensor._make_subclass(cls, x)
        made.of, made.what = of, what
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", str(function))
        with torch._C.DisableTorchFunction():
            if name in _LOOKS:
                result = function(*args, **kwargs)
                if result is args[0] or not isinstance(result, torch.Tensor):
                    return result
            handed = next(x for x in _flat((args, kwargs)) if isinstance(x, Handed))
            module = _expanding()
            if module is not None and hasattr(handed.of, "expand"):
                handed.of.expand(handed, module)
                return function(*args, **kwargs)
        if name == "__get__":
            name = getattr(function.__self__, "__name__", name)
        raise UnsupportedError(
            f"kvq: {model_name()} does not hand {handed.what} to the attention function as it is, but calls "
            f'{name} with it; kvq needs a model whose attention is the function that attn_implementation="kvq" names')


class HandedMask(Handed):
    """Goes with a model's layers to any device."""

    def to(self, *_: Any, **__: Any) -> "HandedMask":
        return self


def _flat(x: Any) -> Iterator[Any]:
    """What lists, tuples and dictionaries hold."""
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, (list, tuple)):
        for part in x:
            yield from _flat(part)
    else:
        yield x


def _expanding() -> Optional[torch.nn.Module]:
    """The module of latent attention that makes the keys and values of each head, from the latents of new
    tokens which it has given to the cache: its method expand_kv (transformers 5.17) is running. None: there
    is none."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "expand_kv":
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("self")
