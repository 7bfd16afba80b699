"""Tokens dropped head by head, by scores [kv head][token]: what the presses of kvpress compute, with memory that goes back.

    sequence.hold()                                                 # the prompt stays in 16 bit
    ...                                                             # prefill of all of its tokens, in all layers
    for layer in range(layers):
        scores = kvq.press.snapkv(sequence, layer, q)               # q: the last 64 queries of the prompt
        kvq.press.retain(sequence, layer, scores, keep=0.5, recent=64)

Scores may come from anywhere, also from a press of kvpress: press.score(module, hidden_states, keys, values, None, {})[0]. Larger is
better. numpy or torch tensors.
"""
from __future__ import annotations

import operator
from typing import Any, List, Optional, Union

from ._attention import Mods, Threads
from ._errors import ArgumentError
from ._sequence import Sequence
from ._tensors import Tensor, empty_beside


def best(sequence: Sequence, layer: int, scores: Tensor, count: int, recent: int = 0) -> List[List[int]]:
    """Lists for Sequence.retain: of each kv head its sinks, the last `recent` tokens, and the others with the largest scores, `count`
    in all. scores: [kv_heads][tokens]; those of tokens that are gone are not read. Of equal scores the later token; NaN last."""
    tokens, heads = sequence.tokens(layer), sequence.cache.layers[layer].kv_heads
    if tuple(scores.shape) != (heads, tokens):
        raise ArgumentError(f"kvq: layer {layer} has {heads} kv heads of {tokens} tokens, and scores are {list(scores.shape)}")
    if recent < 0:
        raise ArgumentError(f"kvq: recent is {recent}, a negative number of tokens")
    sinks, first = sequence.gap(layer)
    last = max(first, tokens - recent)
    chosen = count - sinks - (tokens - last)
    if chosen < 0 or chosen > last - first:
        raise ArgumentError(f"kvq: layer {layer} keeps {count} tokens, at least its {sinks} sinks and {tokens - last} recent ones, "
                            f"and at most {sinks + tokens - first}")

    def better(of: Any, t: int) -> Any:
        x = float(of[t])
        return (x == x, x if x == x else 0.0, t)

    lists = []
    for of in (row.tolist() for row in scores):
        order = sorted(range(first, last), key=lambda t: better(of, t), reverse=True)
        lists.append(list(range(sinks)) + sorted(order[:chosen]) + list(range(last, tokens)))
    return lists


def retain(sequence: Sequence, layer: int, scores: Tensor, keep: Union[int, float], recent: int = 0) -> int:
    """Keeps the best tokens of a layer: so many, or (a float) such a share of those that it holds. Returns how many."""
    sinks, first = sequence.gap(layer)
    held = sinks + sequence.tokens(layer) - first
    if hasattr(keep, "__index__"):  # of numpy and torch, too
        count = operator.index(keep)
    elif 0 < keep <= 1:
        count = max(round(keep * held), min(held, sinks + max(recent, 1)))
    else:
        raise ArgumentError(f"kvq: keep is {keep}, neither a number of tokens nor a share above 0 and up to 1")
    sequence.retain(layer, best(sequence, layer, scores, count, recent))
    return count


def snapkv(sequence: Sequence, layer: int, q: Tensor, *, width: int = 5, mods: Optional[Mods] = None,
           threads: Optional[Threads] = None) -> Tensor:
    """Scores by the attention of the last queries, averaged over `width` neighbouring tokens (SnapKV, arXiv 2404.14469). Keep the tokens
    of the queries: recent=len(q). With all queries and width 1: H2O (arXiv 2306.14048)."""
    if width < 1:
        raise ArgumentError(f"kvq: width is {width}, of at least 1 token")
    mass = sequence.attention_mass(layer, q, mods=mods, threads=threads)
    if width == 1:
        return mass
    scores = empty_beside(mass, mass.shape)
    tokens = mass.shape[1]
    scores[:] = 0
    for by in range(-(width // 2), width - width // 2):
        to, at = max(0, -by), max(0, by)
        n = tokens - abs(by)
        if n > 0:
            scores[:, to:to + n] += mass[:, at:at + n]
    scores /= width
    return scores


def rows(sequence: Sequence, layer: int, role: str, like: Tensor) -> Tensor:
    """Keys ("key") or values ("value") of a layer, float32 [kv_heads][tokens][dim] of the library of `like`; zeros where tokens are gone."""
    of = sequence.cache.layers[layer]
    sinks, first = sequence.gap(layer)
    dim = (of.value_dim or of.head_dim) if role == "value" else of.head_dim
    out = empty_beside(like, (sequence.tokens(layer), of.kv_heads, dim), _float32(like))
    out[:] = 0
    for begin, end in ((0, sinks), (first, sequence.tokens(layer))):
        if begin < end:
            sequence.dequantize(layer, role, out[begin:end], begin)
    return out.transpose(1, 0, 2) if hasattr(out, "ctypes") else out.transpose(0, 1)


def knorm(sequence: Sequence, layer: int, like: Tensor) -> Tensor:
    """Scores that prefer short keys (arXiv 2406.11430), in the library of `like`."""
    keys = rows(sequence, layer, "key", like)
    return -((keys * keys).sum(-1) ** 0.5)


def expected_attention(sequence: Sequence, layer: int, q: Tensor) -> Tensor:
    """Scores by the attention that queries like these would give on average (Expected Attention, arXiv 2510.00636): the log of
    E[exp(q . k)] |v| for normally distributed queries. q: [n][q_heads][dim], float32, of this text or of others."""
    keys, values = rows(sequence, layer, "key", q), rows(sequence, layer, "value", q)
    heads, dim = keys.shape[0], keys.shape[2]
    group = q.shape[1] // heads
    scores = empty_beside(q, keys.shape[:2], _float32(q))
    for h in range(heads):
        of = q[:, h * group:(h + 1) * group].reshape(-1, dim) * dim**-0.5
        mean = of.mean(0)
        centred = of - mean
        covariance = centred.T @ centred / of.shape[0]
        norm = (values[h] * values[h]).sum(-1) + 1e-30
        exponent = keys[h] @ mean + 0.5 * ((keys[h] @ covariance) * keys[h]).sum(-1)
        scores[h] = exponent + 0.5 * (norm.log() if hasattr(norm, "log") else _log(norm))
    return scores


def pyramid(layers: int, mean: int, steepness: float = 0.5) -> List[int]:
    """Tokens of each layer, `mean` on average: the first one has (1 + steepness) times as many, the last one (1 - steepness) times
    (PyramidKV, arXiv 2406.02069)."""
    places = [0.0 if layers == 1 else 1 - 2 * i / (layers - 1) for i in range(layers)]
    return [max(1, round(mean * (1 + steepness * place))) for place in places]


def _float32(like: Tensor) -> Any:
    import sys
    torch = sys.modules.get("torch")
    return torch.float32 if torch is not None and isinstance(like, torch.Tensor) else "float32"


def _log(x: Any) -> Any:
    import numpy
    return numpy.log(x)
