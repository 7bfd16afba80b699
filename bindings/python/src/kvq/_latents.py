"""Attention to latents for kvq.transformers: absorbed weights, from the modules that hold them.

A module of latent attention has expand_kv(latents, rotary), which makes the keys and values of each head (transformers 5.17). It is
linear, so what it makes of the unit vectors is all that attention to the latents themselves needs:

    key of head h        K[h]^T x      x: R latent channels and P rotary ones of a token
    value of head h      V[h]^T x
    score                q . K[h]^T x = (K[h] q) . x
    output of head h     V[h]^T (sum of latents)
"""
from __future__ import annotations

import re
import weakref
from typing import Any

import torch

from ._errors import UnsupportedError
from ._models import model_name


class Absorbed:
    """The weights of a module, as they are now.

    latent, rotary  channels
    like            a tensor of the dtype and on the device of the latents
    """

    def __init__(self, module: Any, latent: int, rotary: int, like: torch.Tensor) -> None:
        name = f"{type(module).__name__} of {model_name()}"
        expand = getattr(module, "expand_kv", None)
        if expand is None:
            raise UnsupportedError(f"kvq: {name} gives latents to its cache, but has no expand_kv, which makes keys and values of them")
        n = latent + rotary
        with torch.inference_mode(False), torch.no_grad():  # other modes may come
            units = torch.eye(n + 2, n, device=like.device).to(like.dtype)
            units[-1, 0] = 2.0  # behind zeros; a norm would take it for 1
            k, v = (x[0] for x in expand(*units[None, None].split([latent, rotary], dim=-1)))
        doubled = all(torch.equal(x[:, -1], 2 * x[:, 0]) for x in (k, v))
        if bool(k[:, n].any()) or bool(v[:, latent : n + 1].any()) or not doubled:
            raise UnsupportedError(f"kvq: {name} makes keys and values that are not linear in its {latent} latent channels; "
                                   "kvq.transformers.Cache(...) holds these keys and values")
        self._k = k[:, :n].contiguous()  # [heads][R + P][channels]
        self._v = v[:, :latent].contiguous()  # [heads][R][channels]

    @property
    def heads(self) -> int:
        """Of queries."""
        return self._k.shape[0]

    def equal(self, other: "Absorbed") -> bool:
        """Whether both have the same numbers."""
        return all(a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
                   for a, b in ((self._k, other._k), (self._v, other._v)))

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """[batch][heads][n][channels of a key] as queries of latents, [batch][heads][n][R + P]."""
        return torch.einsum("bhnd,hrd->bhnr", q, self._k)

    def outputs(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums of latents, [batch][n][heads][R], as [batch][n][heads][channels of a value]."""
        return torch.einsum("bnhr,hrd->bnhd", sums, self._v)


_of_modules: "weakref.WeakKeyDictionary[Any, Absorbed]" = weakref.WeakKeyDictionary()


def absorbed(module: Any, latent: int, rotary: int, like: torch.Tensor) -> Absorbed:
    """The weights of a module, for a cache that gets its first tokens. Caches share them as long as they do not change."""
    made, known = Absorbed(module, latent, rotary, like), _of_modules.get(module)
    if known is None or not made.equal(known):
        known = _of_modules[module] = made
    return known


def format_names(keys: Any, rotary: int) -> str:
    """Names of formats of keys as those of latents: "std4" as "std4-fp16x64", whose last `rotary` channels are 16 bit."""
    made = []
    for name in keys.split(",") if isinstance(keys, str) else keys:
        inner, bounds, _ = name.strip().partition("-bounds")
        as_it_is = inner in ("fp32", "fp16", "bf16") or re.search(r"-(fp16|int8|ref8)x\d+$", inner)
        made.append(name if as_it_is else f"{inner}-fp16x{rotary}{bounds}")
    return ",".join(made)
