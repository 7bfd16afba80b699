"""Attention to latents for kvq.transformers: absorbed weights, from the modules that hold them.

A module of latent attention has expand_kv(latents, rotary), which makes the keys and values of each head (transformers 5.17). It is
linear, so what it makes of the unit vectors is all that attention to the latents themselves needs:

    key of head h        K[h]^T x      x: R latent channels and P rotary ones of a token
    value of head h      V[h]^T x
    score                q . K[h]^T x = (K[h] q) . x
    output of head h     V[h]^T (sum of latents)
"""
from __future__ import annotations

import weakref
from typing import Any, Tuple

import torch

from ._errors import UnsupportedError
from ._models import model_name

_Weights = Tuple[torch.Tensor, torch.Tensor]
_of_modules: "weakref.WeakKeyDictionary[Any, _Weights]" = weakref.WeakKeyDictionary()


class Absorbed:
    """The weights of a module. They are held once for each module, and made again where a cache gets its first tokens.

    latent, rotary  channels
    like            a tensor of the dtype and on the device of the latents
    first           whether the cache has no tokens
    """

    def __init__(self, module: Any, latent: int, rotary: int, like: torch.Tensor, first: bool) -> None:
        made = _of_modules.get(module)
        if made is None or first or made[0].dtype != like.dtype or made[0].device != like.device:
            made = _of_modules[module] = _weights(module, latent, rotary, like)
        self._k, self._v = made

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """[batch][heads][n][channels of a key] as queries of latents, [batch][heads][n][R + P]."""
        return torch.einsum("bhnd,hrd->bhnr", q, self._k)

    def outputs(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums of latents, [batch][n][heads][R], as [batch][n][heads][channels of a value]."""
        return torch.einsum("bnhr,hrd->bnhd", sums, self._v)


def _weights(module: Any, latent: int, rotary: int, like: torch.Tensor) -> _Weights:
    """K, [heads][R + P][channels], and V, [heads][R][channels]."""
    name = f"{type(module).__name__} of {model_name()}"
    expand = getattr(module, "expand_kv", None)
    if expand is None:
        raise UnsupportedError(f"kvq: {name} gives latents to its cache, but has no expand_kv, which makes keys and values of them")
    with torch.inference_mode(False), torch.no_grad():  # other modes may come
        units = torch.eye(latent + rotary + 1, latent + rotary, dtype=like.dtype, device=like.device)[None, None]
        k, v = (x[0] for x in expand(*units.split([latent, rotary], dim=-1)))
    if bool(k[:, -1].any()) or bool(v[:, latent:].any()):
        raise UnsupportedError(f"kvq: {name} makes keys and values that are not linear in its {latent} latent channels; "
                               "kvq.transformers.Cache(...) holds these keys and values")
    return k[:, :-1].contiguous(), v[:, :latent].contiguous()


def format_names(keys: Any, rotary: int) -> str:
    """Names of formats of keys as those of latents, whose last `rotary` channels are 16 bit: "std4" as "std4-fp16x64"."""
    made = []
    for name in keys.split(",") if isinstance(keys, str) else keys:
        inner, bounds, _ = name.strip().partition("-bounds")
        as_it_is = inner in ("fp32", "fp16", "bf16") or "-fp16x" in inner
        made.append(name if as_it_is else f"{inner}-fp16x{rotary}{bounds}")
    return ",".join(made)
