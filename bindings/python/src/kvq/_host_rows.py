"""Sequences of a batch on the CPU for kvq.transformers, and the recurrent states of the package's layers in them."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence as Sequence_, Tuple

import torch

from ._cache import Cache
from ._configs import ROLLBACK
from ._errors import ArgumentError, UnsupportedError
from ._latents import format_names
from ._layers import Layer, full_attention
from ._models import model_name
from ._sequence import Sequence

_SNAPSHOTS = 4  # room for so many


class Rows:
    """One sequence for each row of a batch, in a kvq.Cache: of one layer, whose shape is that of the first keys, or of all
    layers of a model.

    layers  of the model; None: one
    """

    def __init__(self, keys: Any, values: Any, options: Dict[str, Any], layers: Optional[List[Layer]] = None) -> None:
        self._formats, self._options, self.layers = (keys, values), options, layers
        self.pages: Any = None
        self.sequences: List[Sequence] = []
        self.snapshot_every = options.get("snapshot_every")  # tokens; None: no snapshots but at the end of prompts

    def begin(self, number: int, batch: int, kv_heads: int, head_dim: int, value_dim: int) -> None:
        """Rows for a layer without tokens, whose keys and values have these sizes."""
        if self.layers is None:
            self._make([full_attention(kv_heads, head_dim, value_dim)])
            self.sequences = []
        else:
            of = self.layers[number]
            said = (of.kv_heads, of.head_dim, of.head_dim if of.value_dim is None else of.value_dim)
            if said != (kv_heads, head_dim, value_dim):
                raise UnsupportedError(
                    f"kvq: layer {number} of {model_name()} has {kv_heads} heads with {head_dim} and {value_dim} channels, its "
                    f"config says {said[0]} with {said[1]} and {said[2]}; kvq.transformers.Cache(...) takes what it is given")
            if self.pages is None:
                self._make(self.layers)
        if len(self.sequences) != batch:
            if any(s.tokens() for s in self.sequences):
                raise ArgumentError(f"kvq: a batch of {batch} for a cache of {len(self.sequences)} sequences")
            self.sequences = [self.pages.new_sequence() for _ in range(batch)]

    def _make(self, layers: List[Layer]) -> None:
        options = dict(self._options)
        if any(layer.hides for layer in layers):
            options.setdefault("rollback", ROLLBACK)
        parts = [part for layer in layers for part in layer.parts]
        if parts:
            bytes_ = sum(4 * part.heads * part.rows * part.columns + 256 for part in parts)
            options.setdefault("snapshot_bytes", _SNAPSHOTS * bytes_)
        keys, values = self._formats
        latent = next((layer for layer in layers if layer.kind == "latent"), None)
        if latent is not None:
            keys = format_names(keys, latent.window)
        self.pages = Cache(layers, 0, 0, keys, values, **options)

    def trim(self, lengths: List[int]) -> None:
        """Every row to a number of tokens, at most those that it has; none where one cannot."""
        lost = [(s, n) for s, n in zip(self.sequences, lengths) if 0 < n < s.trim_limit()]
        for s, n in lost or zip(self.sequences, lengths):  # the first of those that cannot says why
            if n < s.tokens():
                s.trim(n)

    def choose(self, rows: Sequence_[int]) -> None:
        """Forks of these rows stand in their place."""
        self.sequences = [self.sequences[i].fork() for i in rows]

    def copy(self) -> "Rows":
        made = Rows(*self._formats, self._options, self.layers)
        made.pages, made.sequences = self.pages, [s.fork() for s in self.sequences]
        return made


class States:
    """The recurrent states that layers of the package have computed, in the sequences of Rows: so forks share them, and a crop
    goes back to a snapshot.

    numbers  of the layers with state
    keys     of those with keys
    """

    def __init__(self, numbers: List[int], keys: List[int]) -> None:
        self.numbers, self._keys = numbers, keys
        self._last = -1  # layer of the forward pass; -1: between two
        self._passes = 0  # that have ended
        self._open = False  # a pass has changed states that are not stored

    def fresh(self) -> "States":
        """Of no pass."""
        return States(self.numbers, self._keys)

    def enters(self, number: int, rows: Rows, layers: Dict[int, Any]) -> None:
        """A forward pass has come to a layer, and not changed its state yet. Layers come in ascending order: else it is
        another pass."""
        if number < self._last:
            if number in self._keys and self.numbers[0] < number:
                raise UnsupportedError(f"kvq: layers of {model_name()} change their state before they ask the cache for it, with "
                                       "has_previous_state(layer)")
            self._ended(rows, layers)
        self._last, self._open = number, True

    def enters_any(self, rows: Rows, layers: Dict[int, Any]) -> None:
        """The same for a layer with state that does not say its number. If it is the first one no layer with keys has got
        tokens since the pass before; behind the last layer with keys it could be any."""
        first, last = ([s.tokens(n) for s in rows.sequences] for n in (self._keys[0], self._keys[-1]))
        if first == last and self.numbers[-1] < self._keys[-1] and self._last >= 0:
            self._ended(rows, layers)

    def _ended(self, rows: Rows, layers: Dict[int, Any]) -> None:
        """Stores states of which a snapshot is due: behind more than one token, and where the rows say so."""
        new = [(s.tokens(self.numbers[0]), s.tokens(self._keys[0])) for s in rows.sequences]
        every = rows.snapshot_every
        if any(b - a > self._passes + 1 or (every and b // every > a // every) for a, b in new):
            self.store(rows, layers)
        else:
            self._last, self._passes = -1, self._passes + 1

    def store(self, rows: Rows, layers: Dict[int, Any], lengths: Optional[List[int]] = None) -> None:
        """Writes what passes have left, the states after `lengths` tokens. None: after all tokens."""
        if not self._open or rows.pages is None:
            return
        passes = self._passes + (self._last >= 0)
        self._open, self._last, self._passes = False, -1, 0
        for row, s in enumerate(rows.sequences):
            for number in self.numbers:
                for part, to in _parts(s, number):
                    _write(to, _live(layers[number], part)[0], row, number, part)
            tokens = s.tokens(self._keys[0]) if lengths is None else lengths[row]
            new = tokens - s.tokens(self.numbers[0])
            s.advance(new, prompt_ends=new > passes)

    def crop(self, removed: int, lengths: List[int], rows: Rows, layers: Dict[int, Any]) -> bool:
        """States after `lengths` tokens, `removed` less than now; the caller trims the rows. Returns whether load() must follow."""
        own = [layers[number] for number in self.numbers]
        # Of convolutions alone the package keeps all inputs of a pass, if it was told to.
        if self._open and all(layer.record_past and layer.is_croppable for layer in own):
            for layer in own:
                layer.crop(-removed)
            self.store(rows, layers, lengths)
            return False
        self.store(rows, layers)
        for s, n in zip(rows.sequences, lengths):
            if removed and s.reach(n) != n:
                at = ", ".join(str(x.tokens) for x in s.snapshots) or "none"
                raise UnsupportedError(
                    f"kvq: {model_name()} has recurrent states, which go back to a snapshot: there is none at token {n}, only at "
                    f"{at}; they are taken at the end of a prompt, and with snapshot_every")
        return removed > 0

    def load(self, rows: Rows, layers: Dict[int, Any]) -> None:
        """What the sequences hold after a trim becomes the states of the package's layers."""
        for number in self.numbers:
            if not any(s.tokens(number) for s in rows.sequences):
                layers[number].reset()
                continue
            for part, first in _parts(rows.sequences[0], number):
                x, at = _live(layers[number], part)
                of_rows = [torch.from_numpy(s.state(number, part)).to(x.dtype).clone() for s in rows.sequences]
                at[0] = torch.stack(of_rows).view(x.shape[0], *x.shape[1:-1], first.shape[-1])
        for s in rows.sequences:
            s.advance(0)


def _parts(s: Sequence, number: int) -> List[Tuple[str, torch.Tensor]]:
    """Names and memory of the live state of a layer."""
    return [(p.name, torch.from_numpy(s.state(number, p.name))) for p in s.cache.layers[number].parts]


def _live(layer: Any, part: str) -> Tuple[Any, Any]:
    """The tensor of the package's layer, [batch][...], and what holds it."""
    at = layer.conv_states if part == "conv" else layer.recurrent_states
    return at[0], at


def _write(to: torch.Tensor, x: Any, row: int, number: int, part: str) -> None:
    of = () if x is None else tuple(x.shape[1:])
    want = tuple(to.shape[1:] if to.shape[0] == 1 else to.shape)
    if of[:-1] != want[:-1] or (part != "conv" and of != want):
        raise UnsupportedError(f"kvq: the {part} state of layer {number} of {model_name()} is {list(of)}, its config says "
                               f"{list(want)}")
    width = min(of[-1], want[-1])  # of a convolution: the last inputs, behind zeros
    to[..., : want[-1] - width] = 0
    to[..., want[-1] - width :] = x[row][..., of[-1] - width :].view(*to.shape[:-1], width)
