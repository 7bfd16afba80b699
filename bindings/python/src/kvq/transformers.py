"""Hugging Face transformers with a cache of kvq, where the model is: on the CPU or on a GPU.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvq")
    model.generate(**inputs, past_key_values=kvq.transformers.Cache("std4"))
    model.generate(**inputs, past_key_values=kvq.transformers.Cache.for_model(model, "std4"))    # layers as its config says

Written for the classes Cache, CacheLayerMixin, AttentionInterface and AttentionMaskInterface of transformers
4.56 and 5; run with 5.17. tests/test_transformers.py runs it against a small model and stand-ins of these
classes, tests/architectures.py with models of the package where that is installed.

For models whose attention is the function that attn_implementation="kvq" names, and causal: a sliding window,
chunks, softcapping and learned sinks included. Batches may be padded. On the CPU a mask may show and hide any
tokens (prefix-LM, packed sequences). Layers of recurrent states are the package's own; for_model stores what they
hold in sequences of kvq. What a cache does not hold, or cannot see, is refused with the model's class in the first
forward pass. Beam search forks sequences, assisted decoding trims them, copy.deepcopy(cache) forks all of them.
Attention that has no cache and is not causal, that of an encoder, is torch's.
On a GPU (a library with KVQ_LIBRARY_CUDA; float16 or bfloat16) every layer has a kvq.cuda.Cache on its
device. Padding is not appended: each row of a batch is a sequence of its own length. Nothing waits for the
device, but for the mask of a batch, once in a forward pass.
"""
from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from dataclasses import replace
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, cache_utils
from transformers.cache_utils import Cache as _Cache, CacheLayerMixin

from ._attention import Mods, Threads
from ._configs import layers_of, text_config
from ._errors import ArgumentError, Error, UnsupportedError
from ._host_rows import Rows, States
from ._latents import Absorbed, absorbed
from ._layers import Layer as _OfModel, chunked_attention, cross_layer, full_attention
from ._masks import Said, given_mask, said
from ._models import Handed, HandedMask, check_model, model_name, state_layer

__all__ = ["Cache", "DecodeGraph", "attention", "attention_mask", "decode_in_graphs"]

_DEVICE = "cuda"  # of tensors for caches on a GPU
How = Tuple[Optional[float], Optional[float], Optional[int]]  # scale, softcap, window


class _Padding:
    """What masks say of padding, found once for all layers of a forward pass, and which tokens of the cache
    are padding, held once for all layers.

    real: [batch][tokens] on the CPU, False for padding; None: there is none
    """

    def __init__(self) -> None:
        self._readers: set = set()  # ids of the layers that have read in this forward pass
        self._answers: List[Tuple[Tuple, Tuple]] = []
        self._changed: Optional[Tuple] = None

    def read(self, layer: Any, mask: Optional[torch.Tensor], real: Optional[torch.Tensor], batch: int, past: int,
             n: int) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
        """Of n new tokens behind `past`: which of them are real (None: all), and `real` with them.

        mask: [batch][all tokens so far], 0 for padding; None: there is none. A layer that reads again begins
        the next forward pass, whose mask may be the same tensor with other contents
        """
        if mask is None and real is None:
            return None, None
        if id(layer) in self._readers:
            self._readers.clear()
            self._answers.clear()
        self._readers.add(id(layer))
        for asked, answer in self._answers:
            if asked[0] is mask and asked[1] is real and asked[2:] == (batch, past, n):
                return answer
        answer = self._read(mask, real, batch, past, n)
        self._answers.append(((mask, real, batch, past, n), answer))
        return answer

    def change(self, real: Optional[torch.Tensor], how: Any, make: Any) -> Optional[torch.Tensor]:
        """make(real), one result for layers that change the same `real` in the same way."""
        if real is None:
            return None
        if self._changed is None or self._changed[0] is not real or self._changed[1] != how:
            self._changed = (real, how, make(real))
        return self._changed[2]

    @staticmethod
    def _read(mask: Optional[torch.Tensor], real: Optional[torch.Tensor], batch: int, past: int,
              n: int) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
        new = torch.ones(batch, n, dtype=torch.bool)
        if mask is not None:
            if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < past + n:
                raise ArgumentError(f"kvq: the attention mask is {list(mask.shape)}, not [{batch}][{past + n}]")
            mask = mask[:, : past + n].to(torch.bool).cpu()
            before = mask[:, :past]
            if not (bool(before.all()) if real is None else torch.equal(before, real)):
                raise ArgumentError("kvq: the attention mask hides other tokens than before; cached tokens "
                                    "cannot be hidden")
            new = mask[:, past:]
        whole = bool(new.all())
        if whole and real is None:
            return None, None
        old = torch.ones(batch, past, dtype=torch.bool) if real is None else real
        return None if whole else new, torch.cat([old, new], dim=1)


class Layer(CacheLayerMixin):
    """One layer of a Cache: one sequence per row of the batch. update() only takes note of keys and values;
    attention() appends them, as it knows which of them are padding."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, keys: Any = "std4", values: Any = None, threads: Optional[Threads] = None,
                 padding: Optional[_Padding] = None, rows: Optional[Rows] = None, number: int = 0,
                 **options: Any) -> None:
        super().__init__()
        self._formats = (keys, values)
        self._threads = threads
        self._options = options
        self._rows = rows or Rows(keys, values, options)  # on the CPU
        self._number = number  # of the layer in them
        self._borrowers: Dict[int, int] = {}  # layers of the model that attend with these keys, and their numbers
        self._lent: Any = None  # what update() returned in this pass (a weak reference), and which of its tokens are real
        self._waiting: Optional[Tuple[Handed, torch.Tensor]] = None  # what update() returned, and the keys
        self._padding = padding or _Padding()
        self._shape: Any = None  # of keys and values, what pages are made for
        self._device: Any = None  # on a GPU: DevicePages
        self.latents: Optional[Tuple[int, int]] = None  # channels of latents and of their rotary part, if keys are latents
        self.weights: Optional[Absorbed] = None  # of the module, if so
        self.tokens = 0  # padding included
        self.real: Optional[torch.Tensor] = None  # [batch][tokens]: False for padding; None: there is none

    @property
    def pages(self) -> Any:
        """A kvq.Cache or a kvq.cuda.Cache."""
        return self._rows.pages if self._device is None else self._device.pages

    @property
    def sequences(self) -> List[Any]:
        """One per row of the batch."""
        return self._rows.sequences if self._device is None else self._device.sequences

    @property
    def of_model(self) -> Optional[_OfModel]:
        """What the config of the model says of the layer; None: nothing."""
        return None if self._rows.layers is None else self._rows.layers[self._number]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: Optional[torch.Tensor] = None,
                            chunk: Optional[int] = None) -> None:
        """chunk: tokens of a chunk, if the mask says that attention is chunked"""
        batch, kv_heads, _, head_dim = key_states.shape
        value_dim = self._value_dim(value_states)
        keys, values = self._formats
        if key_states.device.type == _DEVICE:
            if value_dim != head_dim and self.latents is None:
                raise UnsupportedError(
                    f"kvq: on a GPU keys and values have one head_dim, not {head_dim} and {value_dim}")
            from ._device_layer import DevicePages

            layer, options = self._made_for(kv_heads, head_dim), self._options
            if self.latents is not None:
                layer, options = self.of_model, dict(dict(query_heads=self.weights.heads), **options)
            elif self.of_model is not None and self.of_model.hides:
                layer = replace(layer, kind=self.of_model.kind, window=self.of_model.window)
            elif chunk is not None:
                layer = chunked_attention(chunk, kv_heads, head_dim)
            self._device = DevicePages(key_states, values, keys, options, layer)
        else:
            self._rows.begin(self._number, batch, kv_heads, head_dim, value_dim)
            self._device = None
        self._shape, self.is_initialized = self._shape_of(key_states, value_dim), True

    @staticmethod
    def _made_for(kv_heads: int, head_dim: int) -> _OfModel:
        """The layer of a cache on a GPU, where the model does not say more."""
        return full_attention(kv_heads, head_dim)

    def _value_dim(self, v: Optional[torch.Tensor]) -> int:
        """Channels of values. None: the values of latents are channels of these"""
        return self.of_model.value_dim if v is None else v.shape[-1]

    @staticmethod
    def _shape_of(k: torch.Tensor, value_dim: int) -> Tuple:
        dtype = k.dtype if k.device.type == _DEVICE else None  # pages of the CPU take any
        return k.shape[0], k.shape[1], k.shape[3], value_dim, k.device, dtype

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        """Returns both as they are: attention() reads the cache itself. Keys are for it alone."""
        if key_states.device.type not in ("cpu", _DEVICE):
            raise UnsupportedError(
                f"kvq: {model_name()} is on {key_states.device}, neither on the CPU nor on a CUDA device")
        if self._waiting is not None:
            self._waiting = None
            raise ArgumentError(f"kvq: the attention of {model_name()} did not read the cache; load it with "
                                'attn_implementation="kvq"')
        keys, self.latents = key_states, None
        if self.of_model is not None and self.of_model.kind == "latent":
            self.latents = self._check_latents(key_states, value_states)
            # attend() takes the latents. The module makes keys and values of one token, which nobody reads.
            keys = torch.cat([key_states, value_states], dim=-1)
            key_states, value_states = key_states[:, :, :1], value_states[:, :, :1]
        handed = Handed.make(key_states, self, "the keys of its cache")
        self._waiting = (handed, keys)
        return handed, value_states

    def _check_latents(self, latents: torch.Tensor, rotary: torch.Tensor) -> Tuple[int, int]:
        """Their numbers of channels."""
        of = self.of_model
        said, found = (of.head_dim - of.window, of.window), (latents.shape[3], rotary.shape[3])
        if latents.shape[1] != 1 or found != said:
            raise UnsupportedError(
                f"kvq: layer {self._number} of {model_name()} gives its cache {latents.shape[1]} heads with {found[0]} and {found[1]} "
                f"channels, its config says latents of {said[0]} and {said[1]}; kvq.transformers.Cache(...) takes what it is given")
        return said

    def take(self, handed: Handed) -> torch.Tensor:
        """The keys that update() has handed out, once."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or waiting[0] is not handed:
            raise UnsupportedError(
                f"kvq: layers of {model_name()} attend with the keys of another layer, which "
                "kvq.transformers.Cache(...) does not hold: each layer must update() the cache itself")
        self._lent = (weakref.ref(handed), None)
        return waiting[1]

    def lends(self, handed: Handed, layer_idx: Optional[int]) -> bool:
        """Whether another layer of the model may attend with these keys now: for_model knows of it, and this one has."""
        return (layer_idx in self._borrowers and self._waiting is None and self._lent is not None
                and self._lent[0]() is handed)

    def expand(self, handed: Handed, module: torch.nn.Module) -> None:
        """A module of latent attention makes the keys and values of each head from what update() has handed
        out. Its call of attention() follows, with these."""
        if self._waiting is not None:
            _expanded.keys = self.take(handed)
            _expanded.layer, _expanded.module = self, module

    def attend(self, k: torch.Tensor, v: Optional[torch.Tensor], q: torch.Tensor, mask: Said, how: How,
               s_aux: Optional[torch.Tensor]) -> torch.Tensor:
        """Appends k and v, [batch][kv_heads][n][dim], and attends for q, [batch][q_heads][n][dim]. v is None if k are latents.

        Returns [batch][n][q_heads][dim].
        """
        batch, _, n, _ = q.shape
        # A layer without tokens is as good as new: after reset() the batch may be another.
        if not self.is_initialized or (self.tokens == 0 and self._shape != self._shape_of(k, self._value_dim(v))):
            self.lazy_initialization(k, v, mask.chunk)
        if batch != len(self.sequences):
            raise ArgumentError(f"kvq: a batch of {batch} for a cache of {len(self.sequences)} sequences")
        new, real = self._padding.read(self, mask.padding, self.real, batch, self.tokens, n)
        if self._device is None:
            out = self._on_cpu(self._number, k, v, q, self.tokens + n, new, real, mask, how, s_aux)
        else:
            self._check_on_device(mask, how, real, self.tokens + n, n)
            out = self._device.attend(k, v, q, new, how, s_aux, bool(self._borrowers))
        self._lent = self._lent and (self._lent[0], new)
        self.tokens += n
        self.real = real
        return out

    def lend(self, layer_idx: int, q: torch.Tensor, mask: Said, how: How, s_aux: Optional[torch.Tensor]) -> torch.Tensor:
        """Attends for another layer of the model, as attend() has for this one."""
        if self._device is None:
            return self._on_cpu(self._borrowers[layer_idx], None, None, q, self.tokens, self._lent[1], self.real, mask, how, s_aux)
        self._check_on_device(mask, how, self.real, self.tokens, q.shape[2])
        return self._device.lend(q, self._lent[1], how, s_aux)

    def _check_on_device(self, mask: Said, how: How, real: Optional[torch.Tensor], total: int, n: int) -> None:
        """Raises UnsupportedError for a mask of the last n of `total` tokens that attention on a GPU does not take."""
        of = self._device.layer
        if mask.seen is not None or (mask.needs_rows(total) and of.kind != "chunked"):
            raise UnsupportedError(f"kvq: the mask of {model_name()} is neither causal nor a sliding window, nor the chunks "
                                   "that it had before; others are for the CPU only, not for a GPU")
        if of.hides:
            mask.agree(of, how[2], real, total, n)

    def stepped(self) -> None:
        """A graph has given every row a token."""
        _, self.real = self._padding.read(self, None, self.real, len(self.sequences), self.tokens, 1)
        self.tokens += 1
        self._device.stepped()

    def restore(self, tokens: int, real: Optional[torch.Tensor]) -> None:
        """Back to what a step has found: the first `tokens` tokens, padding included."""
        self.tokens, self.real, self._waiting = tokens, real, None
        self._device.trim([tokens] * len(self.sequences) if real is None else real.sum(1).tolist())

    def _on_cpu(self, number: int, k: Optional[torch.Tensor], v: Optional[torch.Tensor], q: torch.Tensor, total: int,
                new: Optional[torch.Tensor], real: Optional[torch.Tensor], mask: Said, how: How,
                s_aux: Optional[torch.Tensor]) -> torch.Tensor:
        """total: tokens with the new ones, padding included. k, v: None for those of this layer"""
        batch, q_heads, n, _ = q.shape
        scale, softcap, window = how
        of = self.of_model
        hides = of is not None and of.hides  # by itself
        if hides:
            mask.agree(of, window, real, total, n)
            window = None
        shared: Dict[str, Any] = dict(scale=scale, window=window, softcap=softcap, sink_logits=_logits(s_aux))
        out = torch.zeros(batch, n, q_heads, self._shape[3], dtype=q.dtype)
        rows = [i for i in range(batch) if new is None or bool(new[i].any())]
        mods: Any = None
        if mask.needs_rows(total) and not (hides and mask.seen is None):
            of_rows = mask.rows(real, batch, total, n)
            mods = [Mods(**shared, **of_rows[i]) for i in rows]
        elif any(x is not None for x in shared.values()):
            mods = Mods(**shared)

        def tokens(x: torch.Tensor, i: int) -> torch.Tensor:
            x = x[i].transpose(0, 1)
            if new is not None and not bool(new[i].all()):
                return x[new[i]]
            return x if x.stride(-1) == 1 else x.contiguous()

        with torch.no_grad():
            ks, vs = ([None if x is None else tokens(x, i) for i in rows] for x in (k, v))
            outs = self.pages.prefill(number, [self.sequences[i] for i in rows], ks, vs, [tokens(q, i) for i in rows], mods=mods,
                                      threads=self._threads)
        for i, of_row in zip(rows, outs):
            out[i, slice(None) if new is None else new[i]] = of_row
        return out

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self.tokens

    def get_mask_sizes(self, query: Any) -> Tuple[int, int]:
        n = query if isinstance(query, int) else query.shape[0]  # a number of tokens, or their positions
        return self.get_seq_length() + n, 0

    def get_max_length(self) -> int:
        """There is no maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """get_max_length() of older versions."""
        return -1

    def reset(self) -> None:
        """No tokens. The next batch may have another size."""
        if self.is_initialized:
            for s in self.sequences:
                s.trim(0)
        self.tokens, self.real, self._waiting, self._lent = 0, None, None, None

    def forget(self, keep: int) -> None:
        """Back to the first `keep` tokens, padding included. Rows on the CPU have been trimmed."""
        if self._device is not None:
            self._device.trim(self.lengths(keep))
        self.real = self._padding.change(self.real, keep, lambda r: r[:, :keep])
        self.tokens = keep

    def lengths(self, keep: int) -> List[int]:
        """Of the first `keep` tokens those of each row that are no padding."""
        return [keep] * len(self.sequences) if self.real is None else self.real[:, :keep].sum(1).tolist()

    def choose(self, rows: List[int]) -> None:
        """Forks of these rows. Those on the CPU have been made."""
        if self._device is not None:
            self._device.replace([self.sequences[i].fork() for i in rows])
        self.real = self._padding.change(self.real, rows, lambda r: r[rows])

    def copy(self, padding: _Padding, rows: Rows) -> "Layer":
        """A layer of another cache with the same tokens, which shares pages with this one."""
        made = type(self)(*self._formats, self._threads, padding, rows, self._number, **self._options)
        made._borrowers = self._borrowers
        if self.is_initialized:
            made.is_initialized, made._shape = True, self._shape
            made._device = None if self._device is None else self._device.copy()
            made.tokens, made.real, made.weights = self.tokens, self.real, self.weights
        return made

    def offload(self) -> None:
        """Nothing: pages stay where they are."""

    def prefetch(self) -> None:
        """Nothing."""


class CrossLayer(Layer):
    """A layer of a decoder that attends to the output of the encoder: what the first forward pass appends, any number of times.

    Models find keys and values in `keys` and `values` afterwards, and hand them to the attention function.
    """

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        if self.tokens > 0:
            raise ArgumentError(f"kvq: {model_name()} appends the output of its encoder again; reset() the cache before")
        self._hand_out(value_states)
        return super().update(key_states, value_states, *args, **kwargs)

    @staticmethod
    def _made_for(kv_heads: int, head_dim: int) -> _OfModel:
        return cross_layer(kv_heads, head_dim)

    def _hand_out(self, values: torch.Tensor) -> None:
        self.keys, self.values = Handed.make(_EMPTY, self, "the keys of its cache"), values.new_empty(0)

    def take(self, handed: Handed) -> Any:
        """The keys that update() has handed out; afterwards none."""
        return None if self._waiting is None and handed is self.keys and self.tokens > 0 else super().take(handed)

    def attend(self, k: Any, v: torch.Tensor, q: torch.Tensor, mask: Said, how: How,
               s_aux: Optional[torch.Tensor]) -> torch.Tensor:
        """As of Layer, for queries that are no tokens of the encoder. k: None behind the first pass"""
        batch = q.shape[0]
        if k is not None:
            self.lazy_initialization(k, v)
        if batch != len(self.sequences):
            raise ArgumentError(f"kvq: a batch of {batch} for a cache of {len(self.sequences)} sequences")
        if self._device is not None:
            if k is not None:
                real = mask.of_encoder(k.shape[2])
                self._device.append_text(k, v, real)
                self.tokens, self.real = k.shape[2], real
            return self._device.attend_text(q, (how[0], how[1], None), s_aux)
        mods = Mods(scale=how[0], softcap=how[1], sink_logits=_logits(s_aux), direction="cross")
        rows = [x.transpose(0, 1).contiguous() for x in q]
        with torch.no_grad():
            if k is None:
                outs = self.pages.attend(self._number, self.sequences, rows, mods=mods, threads=self._threads)
            else:
                real = mask.of_encoder(k.shape[2])
                shown = [slice(None)] * batch if real is None else list(real)
                ks, vs = ([x[i].transpose(0, 1)[shown[i]].contiguous() for i in range(batch)] for x in (k, v))
                outs = self.pages.prefill(self._number, self.sequences, ks, vs, rows, mods=mods, threads=self._threads)
                self.tokens, self.real = k.shape[2], real
        return torch.stack(outs)

    def reset(self) -> None:
        """No tokens: the next batch is another one."""
        self._rows.sequences, self._device, self.keys, self.values, self.is_initialized = [], None, None, None, False
        super().reset()

    def copy(self, padding: _Padding, rows: Rows) -> "Layer":
        made = super().copy(padding, rows)
        if self.keys is not None:
            made._hand_out(self.values)
        return made


def _logits(s_aux: Optional[torch.Tensor]) -> Optional[List[float]]:
    """Learned sinks as Mods take them."""
    return None if s_aux is None else s_aux.detach().float().flatten().tolist()


@functools.lru_cache(maxsize=None)
def _zero_keeps_all() -> bool:
    """Whether crop(0) of the package's own layers removes nothing; in older versions it removes all."""
    layer, token = cache_utils.DynamicLayer(), torch.zeros(1, 1, 1, 1)
    layer.update(token, token)
    layer.crop(0)
    return layer.get_seq_length() > 0


class _Layers(list):
    """The layers that a cache has been given so far."""

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, int) and i >= len(self):
            raise UnsupportedError(f"kvq: {model_name()} looks for layer {i} of the cache before it has given it anything; "
                                   "kvq.transformers.Cache.for_model(model, ...) makes all layers at once")
        return super().__getitem__(i)


class Cache(_Cache):
    """past_key_values of a model whose attention is "kvq".

    Layers of recurrent states (linear attention, convolutions) are the package's own. for_model() reads the config of
    the model; this takes the layers that come. copy.deepcopy() forks
    all sequences: the copy shares pages with this cache, and bytes() counts those of both.

    keys, values  formats by name, as of kvq.Cache; on a GPU of kvq.cuda.Cache, one for both
    threads       of kvq, on the CPU; None: the calling thread
    options       others of kvq.Cache: sinks, recent, window, ...; on a GPU of kvq.cuda.Cache: max_tokens
                  (None: 32768), ...
    """

    def __init__(self, keys: Any = "std4", values: Any = None, *, threads: Optional[Threads] = None,
                 **options: Any) -> None:
        self._padding = padding = _Padding()
        self._graph: Optional[DecodeGraph] = None  # of decode_in_graphs
        self._records = False  # activate_past_recording
        self._given = dict(keys=keys, values=values, threads=threads, **options)
        # Of for_model:
        self._of_model: List[Optional[_OfModel]] = []
        self._kind: Any = Layer
        self._numbers: List[Optional[int]] = []  # of the layers of the model in kvq; None: a layer that keeps nothing
        self._rows: Optional[Rows] = None  # on the CPU
        self._states: Optional[States] = None
        super().__init__(layer_class_to_replicate=lambda: Layer(keys, values, threads, padding, **options))
        self.layers = _Layers()

    @classmethod
    def for_model(cls, model: Any, keys: Any = "std4", values: Any = None, *, threads: Optional[Threads] = None,
                  **options: Any) -> Any:
        """A cache for the layers that the config of a model names: windows, chunks, sizes of heads, latents, recurrent states, layers
        that share the keys of others. For an encoder with a decoder an EncoderDecoderCache of two, one for each attention.

        model   a model of transformers or its config
        others  as of Cache; on the CPU also snapshot_every and snapshot_bytes (None: four snapshots)

        On the CPU all layers are in one kvq.Cache: `pages`, and `sequences`, one per row. Layers with a window or chunks free
        what no query sees any more. Latents are stored once, their rotary channels in 16 bit: "std4" is "std4-fp16x64". Recurrent
        states are stored when rows are chosen, copied or asked for, and when a snapshot is due: at the end of a prompt and every
        `snapshot_every` tokens. crop() goes back to a snapshot, and is refused elsewhere.
        On a GPU every layer with keys of its own has a kvq.cuda.Cache, and states are the package's own. UnsupportedError names the type of a
        model that cannot be served, and why.
        """
        config = getattr(model, "config", model)
        of_model, made = layers_of(config), []
        both = getattr(text_config(config), "is_encoder_decoder", False)
        for kind in (Layer, CrossLayer)[: 1 + both]:
            made.append(cls(keys, values, threads=threads, **options))
            made[-1]._begin(of_model, kind)
        return EncoderDecoder(*made) if both else made[0]

    def _begin(self, of_model: List[Optional[_OfModel]], kind: Any) -> None:
        """Makes the layers of a model; those with keys are of the class `kind`."""
        self._kind, self._of_model, self.layer_class_to_replicate = kind, of_model, None
        held = [layer for layer in of_model if layer is not None]
        if state_layer() is None and any(layer is None or layer.parts for layer in of_model):
            raise UnsupportedError("kvq: this version of transformers has no layers of recurrent states in its caches")
        with_states = [i for i, layer in enumerate(held) if layer.parts]
        with_keys = [i for i, layer in enumerate(held) if not layer.parts and layer.kind != "shared"]
        given = dict(self._given)
        keys, values, threads = (given.pop(name) for name in ("keys", "values", "threads"))
        self._rows = rows = Rows(keys, values, given, held)
        if with_states:
            self._states = States(with_states, with_keys)
        numbers = iter(range(len(held)))
        self._numbers = [None if layer is None else next(numbers) for layer in of_model]

        def made(number: Optional[int]) -> Any:
            if number is None or held[number].parts:
                return state_layer()()
            return kind(keys, values, threads, self._padding, rows, number, **given)

        # The package has no layers for those that share keys: all of them are at the end.
        self.layers = [made(number) for number, layer in zip(self._numbers, of_model) if layer is None or layer.kind != "shared"]
        for i, layer in enumerate(of_model):
            if layer is not None and layer.kind == "shared":
                self.layers[layer.owner]._borrowers[i] = self._numbers[i]

    @property
    def pages(self) -> Any:
        """Of for_model, on the CPU: the kvq.Cache of all layers. None: no pass has begun."""
        return None if self._rows is None else self._rows.pages

    @property
    def sequences(self) -> List[Any]:
        """Of for_model, on the CPU: one kvq.Sequence for each row of the batch, with the states of all passes so far."""
        self._store()
        return [] if self._rows is None else self._rows.sequences

    def _of_number(self) -> Dict[int, Any]:
        """The package's layers of states, by the numbers that they have in kvq."""
        return {n: layer for n, layer in zip(self._numbers, self.layers) if n is not None and not isinstance(layer, Layer)}

    def _enters(self, layer_idx: int) -> None:
        """A forward pass has come to a layer."""
        if self._states is not None and self._numbers[layer_idx] is not None:
            self._states.enters(self._numbers[layer_idx], self._rows, self._of_number())

    def _store(self) -> None:
        if self._states is not None:
            self._states.store(self._rows, self._of_number())

    def __deepcopy__(self, memo: Dict[int, Any]) -> "Cache":
        self._store()
        made = memo[id(self)] = type(self)(**self._given)
        made._records = self._records
        if self._rows is not None:
            made._begin(self._of_model, self._kind)
            made._rows = self._rows.copy()
        made.layers = _Layers(layer.copy(made._padding, made._rows or layer._rows.copy()) if isinstance(layer, Layer)
                              else copy.deepcopy(layer, memo) for layer in self.layers)
        return made

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any,
               **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        if self._of_model and layer_idx >= len(self.layers):
            raise ArgumentError(f"kvq: layer {layer_idx} of {model_name()}: the cache was made for {len(self.layers)} layers")
        if layer_idx < len(self.layers) and not isinstance(self.layers[layer_idx], Layer):
            raise UnsupportedError(f"kvq: layer {layer_idx} of {model_name()} has keys and recurrent states at "
                                   "once, which kvq.transformers.Cache does not hold")
        self._enters(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _of_states(self, layer_idx: int) -> None:
        """Makes the package's own layer where a model keeps recurrent states."""
        while self.layer_class_to_replicate is not None and len(self.layers) <= layer_idx:
            self.layers.append(self.layer_class_to_replicate())
        made, layer = state_layer(), self.layers[layer_idx]
        if isinstance(layer, Layer):
            if made is None or layer.is_initialized or self._of_model:
                both = " and keys at once" if made else ""
                raise UnsupportedError(f"kvq: layer {layer_idx} of {model_name()} has recurrent states{both}, "
                                       "which kvq.transformers.Cache does not hold")
            self.layers[layer_idx] = made()
            if self._records:
                self.layers[layer_idx].activate_past_recording()

    def activate_past_recording(self) -> None:
        """Layers of recurrent states keep what crop() needs, those that will be made as well."""
        self._records = True
        super().activate_past_recording()

    def update_indexer(self, *_: Any, **__: Any) -> torch.Tensor:
        raise UnsupportedError(f"kvq: {model_name()} chooses the tokens that it attends to with keys of an "
                               "indexer, which kvq.transformers.Cache does not hold")

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any,
                          **kwargs: Any) -> torch.Tensor:
        self._of_states(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any,
                               **kwargs: Any) -> torch.Tensor:
        self._of_states(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def has_previous_state(self, layer_idx: Optional[int] = None, *args: Any, **kwargs: Any) -> bool:
        """Whether a layer of recurrent states has some; None: the last such layer."""
        # Layers of states ask this before they read them.
        if layer_idx is None and self._states is not None:
            self._states.enters_any(self._rows, self._of_number())
        elif layer_idx is not None and layer_idx < len(self._numbers):
            self._enters(layer_idx)
        own = self.layers if layer_idx is None else self.layers[layer_idx : layer_idx + 1]
        if all(isinstance(layer, Layer) for layer in own):
            return False
        return super().has_previous_state(layer_idx, *args, **kwargs)

    def _held(self, layer_idx: int) -> Optional[Layer]:
        """The layer, or the first one that has been given keys: a model may have layers without."""
        of_model = [layer for layer in self.layers if isinstance(layer, Layer) and layer.is_initialized]
        asked = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        return asked if asked in of_model else of_model[0] if of_model else None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far, padding included."""
        held = self._held(layer_idx)
        return 0 if held is None else held.get_seq_length()

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> Tuple[int, int]:
        held = self._held(layer_idx)
        if held is not None:
            return held.get_mask_sizes(query)
        return query if isinstance(query, int) else query.shape[0], 0

    def reset(self) -> None:
        """No tokens and no states. The next batch may have another size."""
        for i, layer in enumerate(self.layers):
            if isinstance(layer, Layer):
                layer.reset()
            else:
                self.layers[i] = self.layer_class_to_replicate() if self.layer_class_to_replicate else state_layer()()
        if self._states is not None:
            self._states = self._states.fresh()

    def _host_rows(self) -> List[Rows]:
        """Each of them once."""
        held = [layer for layer in self.layers if isinstance(layer, Layer) and layer.is_initialized]
        rows = {id(layer._rows): layer._rows for layer in held if layer._device is None}
        return list(rows.values())

    def crop(self, tokens_to_remove: int) -> None:
        """As the installed version of the package means it: -n removes n tokens from the end, a positive
        number is the number of tokens to keep; 0 removes none where it is a number to remove, and all where
        it is one to keep."""
        held, change = self._held(0), int(tokens_to_remove)
        if held is None:
            return
        n = held.tokens
        keep = change if change > 0 else 0 if change == 0 and not _zero_keeps_all() else max(n + change, 0)
        keep, load = min(keep, n), False
        if self._states is not None and self.pages is not None:
            load = self._states.crop(n - keep, held.lengths(keep), self._rows, self._of_number())
        else:
            for layer in self.layers:
                if not isinstance(layer, Layer):
                    layer.crop(tokens_to_remove)
        if keep < n:
            layers = [layer for layer in self.layers if isinstance(layer, Layer) and layer.is_initialized]
            for layer in layers:
                if layer._device is not None:
                    layer._device.check_trim(held.lengths(keep))
            for rows in self._host_rows():
                rows.trim(held.lengths(keep))
            for layer in layers:
                layer.forget(keep)
        if load:
            self._states.load(self._rows, self._of_number())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._store()
        held = self._held(0)
        if held is None:
            return
        chosen = torch.arange(len(held.sequences))[indices.cpu()].tolist()
        for rows in self._host_rows():
            rows.choose(chosen)
        for layer in self.layers:
            if not isinstance(layer, Layer):
                layer.reorder_cache(torch.tensor(chosen))
            elif layer.is_initialized:
                layer.choose(chosen)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        held = self._held(0)
        if held is not None:
            self.batch_select_indices(torch.arange(len(held.sequences)).repeat_interleave(repeats))

    def bytes(self) -> int:
        """Of kvq's layers and sequences, shared pages counted once."""
        held = [layer for layer in self.layers if isinstance(layer, Layer) and layer.is_initialized]
        pages = {id(layer.pages): layer.pages for layer in held}
        return sum(of.info().bytes_in_use for of in pages.values())

    def _on_device(self) -> bool:
        """Whether all layers are kvq's, on a GPU, and hold tokens."""
        on_device = [isinstance(layer, Layer) and layer._device is not None for layer in self.layers]
        return len(on_device) > 0 and all(on_device)


class EncoderDecoder(cache_utils.EncoderDecoderCache):
    """Caches of for_model for the two kinds of attention of a decoder."""

    def check_dynamic_cache(self, method: str) -> None:
        """All methods are defined."""

    def bytes(self) -> int:
        """Of both."""
        return self.self_attention_cache.bytes() + self.cross_attention_cache.bytes()


class DecodeGraph:
    """Decode steps of a model as a CUDA graph, which is replayed while contexts grow: without what Python takes for every layer.

        logits = model(prompt, past_key_values=cache).logits[:, -1:]
        step = kvq.transformers.DecodeGraph(model, cache)
        for _ in range(n):
            logits = step(logits.argmax(-1))    # [batch][1][vocabulary], overwritten by the next call

    model  a decoder-only model on one GPU whose attention is "kvq", in eval mode
    cache  holds the prompt

    The first step runs as it is, the second one is captured; so is one after the batch, formats or the place of pools have changed. pool_tokens
    and pool_sequences of the cache (of every layer) keep pools where they are. A model whose forward pass waits for the GPU, or depends on
    lengths but by positions, cannot be captured. An error leaves the cache as it was before the call.
    """

    def __init__(self, model: Callable, cache: Cache) -> None:
        self._model, self._cache = model, cache
        self._graph: Any = None
        self._number: Any = None  # what the graph was captured for
        self._ran = False
        self._batch = 0
        self._lengths: List[int] = []  # that the positions on the device are those of

    def _run(self) -> None:
        self._logits = self._model(self._ids, position_ids=self._positions, past_key_values=self._cache, use_cache=True,
                                   logits_to_keep=1).logits
        self._positions.add_(1)

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """One token of every row, [batch][1]. Returns logits."""
        layers: List[Any] = self._cache.layers
        if not self._cache._on_device():
            raise ArgumentError("kvq: a graph of decode steps needs a cache on a GPU that holds a prompt, and no "
                                "layers of recurrent states")
        batch = len(layers[0].sequences)
        if tuple(ids.shape) != (batch, 1):
            raise ArgumentError(f"kvq: the ids of a step are {list(ids.shape)}, not [{batch}][1]")
        if batch != self._batch:
            self._batch, self._ran, self._number, self._lengths = batch, False, None, []
            with torch.inference_mode(False):
                self._ids, self._positions = (torch.empty(batch, 1, dtype=torch.long, device=ids.device) for _ in range(2))
        before = [(layer.tokens, layer.real) for layer in layers]
        try:
            self._step(ids, layers, batch)
        except BaseException:
            # Also where the model itself has failed between two layers.
            self._lengths, self._number = [], None
            for layer, held in zip(layers, before):
                with contextlib.suppress(Error):  # of the device, which the first one names
                    layer.restore(*held)
            raise
        return self._logits

    def _step(self, ids: torch.Tensor, layers: List[Any], batch: int) -> None:
        lengths = [layers[0].tokens] * batch if layers[0].real is None else layers[0].real.sum(1).tolist()
        if lengths != self._lengths:
            self._positions.copy_(torch.tensor(lengths).unsqueeze(1))
        self._ids.copy_(ids)
        for layer in layers:
            layer._device.begin(1)
        number = [(layer._device.pages.graph_id(), layer.weights) for layer in layers]
        if not self._ran:
            self._run()
            self._ran = True
        elif number != self._number:
            self._graph, self._number = torch.cuda.CUDAGraph(), None
            with torch.cuda.graph(self._graph):
                self._run()
            self._number = number
            self._graph.replay()
        else:
            self._graph.replay()
            for layer in layers:
                layer.stepped()
        self._lengths = [n + 1 for n in lengths]


def decode_in_graphs(model: torch.nn.Module) -> None:
    """From now on decode steps of the model are those of DecodeGraph, also in model.generate(), where past_key_values is a Cache on a GPU:
    one token of every row, none of it padding, with gradients disabled. Others run as before. `del model.forward` takes it back.

    Positions are the numbers of tokens before, padding not counted; position_ids are not read. Logits are overwritten by the next step.
    """
    from transformers.modeling_outputs import CausalLMOutputWithPast

    plain = model.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if args or not isinstance(cache, Cache) or not _fits_graph(cache, kwargs):
            return plain(*args, **kwargs)
        if cache._graph is None:
            cache._graph = DecodeGraph(plain, cache)
        graph = cache._graph
        graph._cache = cache
        try:
            return CausalLMOutputWithPast(logits=graph(kwargs["input_ids"]), past_key_values=cache)
        finally:
            graph._cache = None  # the cache has the graph: no circle keeps its memory

    model.forward = forward


def _fits_graph(cache: Cache, kwargs: Dict[str, Any]) -> bool:
    layers: List[Any] = cache.layers
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    if ids is None or not cache._on_device() or torch.is_grad_enabled():
        return False
    if kwargs.get("return_dict") is False or any(kwargs.get(name) for name in ("output_attentions", "output_hidden_states")):
        return False
    if any(kwargs.get(name) is not None for name in ("inputs_embeds", "labels")):
        return False
    batch, first = len(layers[0].sequences), layers[0]
    if tuple(ids.shape) != (batch, 1):
        return False
    return _Padding._read(mask, first.real, batch, first.tokens, 1)[0] is None


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: Optional[torch.Tensor], scaling: Optional[float] = None, dropout: float = 0.0,
              sliding_window: Optional[int] = None, softcap: Optional[float] = None,
              s_aux: Optional[torch.Tensor] = None, is_causal: Optional[bool] = None,
              **others: Any) -> Tuple[torch.Tensor, None]:
    """The attention function "kvq". query: [batch][q_heads][n][head_dim]. Returns
    [batch][n][q_heads][value_dim], None.

    attention_mask is what the mask function "kvq" has returned, or [batch][tokens] or [batch][1][n][tokens]
    of a user. sliding_window counts where that says nothing of a window.
    """
    borrower = None
    if isinstance(key, Handed):
        layer, idx = key.of, getattr(module, "layer_idx", None)
        borrower, keys = (idx, None) if layer.lends(key, idx) else (None, layer.take(key))
    else:
        layer, keys = (_expanded.layer if _expanded.module is module else None), key
        if layer is not None and layer.latents is not None:
            keys, value = _expanded.keys, None
    _expanded.layer = _expanded.module = _expanded.keys = None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    of_encoder = not causal and layer is None and not getattr(module, "is_decoder", False)
    if not causal and not of_encoder and not isinstance(layer, CrossLayer):
        raise UnsupportedError(f"kvq: {type(module).__name__} of {model_name()} is not causal; a decoder that attends to an encoder "
                               "needs kvq.transformers.Cache.for_model")
    if layer is None and not of_encoder:
        raise ArgumentError(f"kvq: {model_name()} attends with keys that were not given to a cache of kvq; "
                            'attn_implementation="kvq" needs past_key_values=kvq.transformers.Cache(...)')
    if dropout:
        raise UnsupportedError(f"kvq: attention has no dropout, got {dropout}; call model.eval()")
    for name in _REFUSED:
        if others.get(name) is not None:
            raise UnsupportedError(f"kvq: attention takes no {name}, which {model_name()} gives")
    if others.get("output_attentions"):
        raise UnsupportedError("kvq: attention gives no weights, but output_attentions is set")
    if of_encoder:
        if softcap is not None or s_aux is not None:
            raise UnsupportedError(f"kvq: {type(module).__name__} of {model_name()} is not causal, and has softcapping or sinks")
        return _of_encoder(query, key, value, attention_mask, scaling), None
    if isinstance(attention_mask, HandedMask):
        mask, window = attention_mask.of, attention_mask.of.window
    else:
        check_model(getattr(module, "config", None))
        mask, window = Said() if attention_mask is None else given_mask(attention_mask), sliding_window
    how = (scaling, softcap, window)
    if borrower is not None:
        return layer.lend(borrower, query, mask, how, s_aux), None
    if layer.latents is None:
        return layer.attend(keys, value, query, mask, how, s_aux), None
    if layer.tokens == 0:
        layer.weights = absorbed(module, *layer.latents, keys)
    how = (query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, window)
    return layer.weights.outputs(layer.attend(keys, value, layer.weights.queries(query), mask, how, s_aux)), None


def _of_encoder(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Optional[torch.Tensor],
                scale: Optional[float]) -> torch.Tensor:
    """Attention of an encoder, which has no cache: torch's own. Returns [batch][n][heads][value_dim]."""
    if isinstance(mask, HandedMask):
        if mask.of.seen is None and q.shape[2] > 1:
            raise UnsupportedError(f"kvq: attention of {model_name()} has no cache and is not causal, but its mask is")
        mask = mask.of.shown(k.device)
    elif mask is not None and mask.dim() == 2:
        mask = Said(mask).shown(k.device)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2)


def attention_mask(batch_size: int, kv_length: int = 0, kv_offset: int = 0,
                   mask_function: Optional[Callable] = None, attention_mask: Optional[torch.Tensor] = None,
                   q_length: int = 0, q_offset: int = 0, cache_position: Optional[torch.Tensor] = None,
                   config: Any = None, use_vmap: bool = False, device: Any = None, **others: Any) -> torch.Tensor:
    """The mask function "kvq": hands on what the package says of the mask, for the attention function."""
    check_model(config)
    queries = (q_offset, q_offset + q_length) if cache_position is None else cache_position
    if device is None and cache_position is not None:  # older versions
        device = cache_position.device
    mask = said(mask_function, attention_mask, batch_size, queries, kv_length, use_vmap, device)
    return HandedMask.make(_EMPTY, mask, "its attention mask")


class _Expanded(threading.local):
    layer: Optional[Layer] = None
    module: Optional[torch.nn.Module] = None
    keys: Optional[torch.Tensor] = None  # that update() was given


_EMPTY = torch.empty(0)
_expanded = _Expanded()  # of latent attention: the layer whose keys the module gives to attention() next
# What changes attention: biases, tokens that a model chooses, documents of packed sequences.
_REFUSED = ("head_mask", "layer_head_mask", "position_bias", "indices", "block_indices", "cu_seq_lens_q",
            "cu_seq_lens_k")
AttentionInterface.register("kvq", attention)
AttentionMaskInterface.register("kvq", attention_mask)
