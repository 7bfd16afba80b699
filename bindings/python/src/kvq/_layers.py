"""The layers of a model: what each of them holds, and of which shape."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterable, List, Optional, Tuple, Union

from . import _abi
from ._attention import choice
from ._errors import ArgumentError
from ._library import limit, text

_KINDS = {"full": _abi.FULL_ATTENTION, "sliding": _abi.SLIDING_ATTENTION, "chunked": _abi.CHUNKED_ATTENTION,
          "shared": _abi.SHARED, "cross": _abi.CROSS_ATTENTION, "state": _abi.STATE,
          "latent": _abi.LATENT, "index": _abi.INDEX}
_NAMES = {number: name for name, number in _KINDS.items()}
_DTYPES = {"float32": _abi.FP32, "float16": _abi.FP16, "bfloat16": _abi.BF16}
_SNAPSHOTS = {"exact": _abi.SNAPSHOT_EXACT, "int8-rows": _abi.SNAPSHOT_INT8_ROWS,
              "int8-columns": _abi.SNAPSHOT_INT8_COLUMNS, "e4m3": _abi.SNAPSHOT_E4M3}


@dataclass(frozen=True)
class StatePart:
    """A tensor [heads][rows][columns] of the recurrent state of a layer. A vector has one row.

    name      of its own within the layer
    dtype     "float32", "float16" or "bfloat16"
    snapshot  how snapshots hold it: "exact"; "int8-rows" with a scale per head and row; "int8-columns" with one per head
              and column (k channels are the columns of a state [heads][v][k]); "e4m3" with one per head and 32 rows. Keep
              rows of a convolution exact
    """

    name: str
    dtype: str = "float32"
    heads: int = 1
    rows: int = 1
    columns: int = 1
    snapshot: str = "exact"


@dataclass(frozen=True)
class Layer:
    """One layer of a model. Made by full_attention, sliding_attention, chunked_attention, shared_with, cross_layer,
    latent_attention, index_layer and state_layer.

    kind       "full", "sliding", "chunked", "shared", "cross", "latent", "index" or "state"
    value_dim  channels of a value; None: head_dim
    window     tokens of a sliding window or a chunk; of kind "latent" its rotary channels; 0 of other kinds
    sinks      first tokens that every query sees as well
    parts      of kind "state", which has no heads and channels
    owner      of kind "shared": the earlier layer whose keys and values it reads
    """

    kind: str
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: Optional[int] = None
    window: int = 0
    sinks: int = 0
    parts: Tuple[StatePart, ...] = ()
    owner: int = 0

    @property
    def hides(self) -> bool:
        """Whether its queries see only a window or a chunk."""
        return self.kind in ("sliding", "chunked")


def full_attention(kv_heads: int, head_dim: int, value_dim: Optional[int] = None) -> Layer:
    """A layer that holds all of its tokens."""
    return Layer("full", kv_heads, head_dim, value_dim)


def sliding_attention(window: int, kv_heads: int, head_dim: int, value_dim: Optional[int] = None, *,
                      sinks: int = 0) -> Layer:
    """A layer whose queries see themselves and the window - 1 tokens before them, without Mods. It frees pages that no query
    sees any more.

    window  tokens, at least 1
    sinks   first tokens that every query sees as well, at most those of the cache
    """
    return Layer("sliding", kv_heads, head_dim, value_dim, window, sinks)


def chunked_attention(window: int, kv_heads: int, head_dim: int, value_dim: Optional[int] = None, *,
                      sinks: int = 0) -> Layer:
    """The same with queries that see their own chunk: from the last multiple of `window` on (Llama 4)."""
    return Layer("chunked", kv_heads, head_dim, value_dim, window, sinks)


def shared_with(owner: int) -> Layer:
    """A layer that reads the keys and values of an earlier one, under its window (Gemma 3n and 4). It takes queries only: prefill with k
    and v None, once after each prefill of the owner, or attend.

    owner  its number; a layer with keys and values of its own
    """
    return Layer("shared", owner=owner)


def cross_layer(kv_heads: int, head_dim: int, value_dim: Optional[int] = None) -> Layer:
    """A layer whose keys and values are those of another text, the encoder's (Whisper, mllama): one append or prefill, then any number of
    queries in attend, which see all of them. Its tokens are no part of Sequence.tokens() and of trims; forks share its pages.
    """
    return Layer("cross", kv_heads, head_dim, value_dim)


def latent_attention(latent_channels: int, rotary_channels: int, value_channels: Optional[int] = None) -> Layer:
    """A layer of latent attention (MLA): a token has one latent, the key of all query heads. Its first value_channels are its value (None:
    latent_channels). prefill, append and append_draft take v None. Formats of keys keep the rotary channels: "std4-fp16x64".
    """
    return Layer("latent", 1, latent_channels + rotary_channels,
                 latent_channels if value_channels is None else value_channels, rotary_channels)


def index_layer(channels: int = 128) -> Layer:
    """A layer of keys by which queries select the tokens that other layers attend to (DeepSeek V3.2): Sequence.select. append and
    append_draft take v None.
    """
    return Layer("index", 1, channels)


def state_layer(parts: Iterable[StatePart]) -> Layer:
    """A layer with recurrent state in place of keys and values (Gated DeltaNet, Mamba, RWKV): Sequence.state."""
    return Layer("state", parts=tuple(parts))


def part_number(layers: Tuple[Layer, ...], layer: int, part: Union[int, str]) -> int:
    """The number of a part of a layer's state. Where the layer has none, one that the library refuses."""
    parts = layers[layer].parts if 0 <= layer < len(layers) else ()
    if not isinstance(part, str):
        return part
    names = [p.name for p in parts]
    if parts and part not in names:
        raise ArgumentError(f"kvq: layer {layer} has no part {part!r} of its state, only {', '.join(names)}")
    return names.index(part) if parts else 0


def layers_to_c(layers: List[Any], o: Any) -> None:
    """Makes this the list of layers of a cache, and their parts of state, in options for the CPU or for a GPU."""
    for i, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise TypeError(f"layers[{i}] is a {type(layer).__name__}, not a kvq.Layer")
    o.layers = len(layers)
    o.layer_list = (_abi.kvq_layer * len(layers))(*[
        _abi.kvq_layer(kind=choice(_KINDS, l.kind, "kind"), kv_heads=l.kv_heads, head_dim=l.head_dim,
                       value_dim=limit(l.value_dim, f"value_dim of layer {i}"), window=l.window, sinks=l.sinks,
                       owner=l.owner)
        for i, l in enumerate(layers)])
    parts = [_abi.kvq_state_part(name=text(p.name), layer=i, dtype=choice(_DTYPES, p.dtype, "dtype"), heads=p.heads,
                                 rows=p.rows, columns=p.columns, snapshot=choice(_SNAPSHOTS, p.snapshot, "snapshot"))
             for i, l in enumerate(layers) for p in l.parts]
    o.state_parts = (_abi.kvq_state_part * len(parts))(*parts)
    o.state_part_count = len(parts)


def layer_from_c(c: _abi.kvq_layer, parts: Tuple[StatePart, ...] = ()) -> Layer:
    """A layer of a cache."""
    return Layer(_NAMES[c.kind], c.kv_heads, c.head_dim, c.value_dim or None, c.window, c.sinks, parts, c.owner)
