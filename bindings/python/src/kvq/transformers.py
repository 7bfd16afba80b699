"""Hugging Face transformers with a cache of kvq, where the model is: on the CPU or on a GPU.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvq")
    model.generate(**inputs, past_key_values=kvq.transformers.Cache("std4"))

Written for the classes Cache, CacheLayerMixin, AttentionInterface and AttentionMaskInterface of transformers 4.56 and 5; run with 5.17.
tests/test_transformers.py runs it against a small model and stand-ins of these classes, and against a LlamaForCausalLM of the
package where that is installed.

For decoder-only models whose attention is causal (a sliding window, softcapping and learned sinks included). Batches may be padded. Masks of
other kinds (prefix-LM, packed sequences) are not seen by an attention function and must not be used. Beam search forks sequences, assisted
decoding trims them.
On a GPU (a library with KVQ_LIBRARY_CUDA; float16 or bfloat16) every layer has a kvq.cuda.Cache on its device. Padding is not appended: each
row of a batch is a sequence of its own length. Nothing waits for the device, but for the mask of a batch, once in a forward pass.
"""
from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache as _Cache, CacheLayerMixin

from ._attention import Mods, Threads
from ._cache import Cache as _Pages
from ._errors import ArgumentError, Error, UnsupportedError
from ._sequence import Sequence

__all__ = ["Cache", "DecodeGraph", "attention", "decode_in_graphs", "padding_mask"]

_DEVICE = "cuda"  # of tensors for caches on a GPU


class _Padding:
    """What masks say, found once for all layers of a forward pass, and which tokens of the cache are padding, held once for all layers.

    real: [batch][tokens] on the CPU, False for padding; None: there is none
    """

    def __init__(self) -> None:
        self._readers: set = set()  # ids of the layers that have read in this forward pass
        self._answers: List[Tuple[Tuple, Tuple]] = []
        self._changed: Optional[Tuple] = None

    def read(self, layer: Any, mask: Optional[torch.Tensor], real: Optional[torch.Tensor], batch: int, past: int,
             n: int) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
        """Of n new tokens behind `past`: which of them are real (None: all), and `real` with them.

        mask: [batch][all tokens so far], 0 for padding; None: there is none. A layer that reads again begins the next forward pass, whose
        mask may be the same tensor with other contents
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
                raise ArgumentError("kvq: the attention mask hides other tokens than before; cached tokens cannot be hidden")
            new = mask[:, past:]
        whole = bool(new.all())
        if whole and real is None:
            return None, None
        old = torch.ones(batch, past, dtype=torch.bool) if real is None else real
        return None if whole else new, torch.cat([old, new], dim=1)


class Layer(CacheLayerMixin):
    """One layer of a Cache: one sequence per row of the batch. update() only takes note of keys and values; attention() appends them, as
    it knows which of them are padding."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, keys: Any = "std4", values: Any = None, threads: Optional[Threads] = None, padding: Optional[_Padding] = None,
                 **options: Any) -> None:
        super().__init__()
        self._formats = (keys, values)
        self._threads = threads
        self._options = options
        self._waits = False
        self._padding = padding or _Padding()
        self._device: Any = None  # on a GPU: DevicePages
        self.pages: Any = None  # a kvq.Cache or a kvq.cuda.Cache
        self._host: List[Sequence] = []
        self.tokens = 0  # padding included
        self.real: Optional[torch.Tensor] = None  # [batch][tokens]: False for padding; None: there is none

    @property
    def sequences(self) -> List[Any]:
        """One per row of the batch."""
        return self._host if self._device is None else self._device.sequences

    def lazy_initialization(self, key_states: torch.Tensor, value_states: Optional[torch.Tensor] = None) -> None:
        batch, kv_heads, _, head_dim = key_states.shape
        value_dim = head_dim if value_states is None else value_states.shape[-1]
        keys, values = self._formats
        if key_states.device.type == _DEVICE:
            if value_dim != head_dim:
                raise UnsupportedError(f"kvq: on a GPU keys and values have one head_dim, not {head_dim} and {value_dim}")
            from ._device_layer import DevicePages

            self._device = DevicePages(key_states, values, keys, self._options)
            self.pages = self._device.pages
        else:
            self.pages = _Pages(1, kv_heads, head_dim, keys, values, value_dim=value_dim, **self._options)
            self._host = [self.pages.new_sequence() for _ in range(batch)]
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        """Returns both as they are: attention() reads the cache itself."""
        if key_states.device.type not in ("cpu", _DEVICE):
            raise UnsupportedError(f"kvq: the model is on {key_states.device}, neither on the CPU nor on a CUDA device")
        if self._waits:
            raise ArgumentError('kvq: the attention of this model did not read the cache; load it with attn_implementation="kvq"')
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(self.sequences):
            raise ArgumentError(f"kvq: a batch of {key_states.shape[0]} for a cache of {len(self.sequences)} sequences")
        self._waits = True
        key_states = key_states.view_as(key_states)  # an object of its own
        setattr(key_states, "kvq_layer", self)
        return key_states, value_states

    def attend(self, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, mask: Optional[torch.Tensor],
               how: Tuple[Optional[float], Optional[float], Optional[int]], s_aux: Optional[torch.Tensor]) -> torch.Tensor:
        """Appends k and v, [batch][kv_heads][n][dim], and attends for q, [batch][q_heads][n][dim]. Returns [batch][n][q_heads][dim].

        mask: [batch][all tokens so far], 0 for padding; None: there is none. how: scale, softcap, window
        """
        batch, _, n, _ = q.shape
        self._waits = False
        new, real = self._padding.read(self, mask, self.real, batch, self.tokens, n)
        if self._device is None:
            out = self._on_cpu(k, v, q, new, how, s_aux)
        else:
            out = self._device.attend(k, v, q, new, how, s_aux)
        self.tokens += n
        self.real = real
        return out

    def stepped(self) -> None:
        """A graph has given every row a token."""
        _, self.real = self._padding.read(self, None, self.real, len(self.sequences), self.tokens, 1)
        self.tokens += 1
        self._device.stepped()

    def restore(self, tokens: int, real: Optional[torch.Tensor]) -> None:
        """Back to what a step has found: the first `tokens` tokens, padding included."""
        self.tokens, self.real, self._waits = tokens, real, False
        self._device.trim([tokens] * len(self.sequences) if real is None else real.sum(1).tolist())

    def _on_cpu(self, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, new: Optional[torch.Tensor],
                how: Tuple[Optional[float], Optional[float], Optional[int]], s_aux: Optional[torch.Tensor]) -> torch.Tensor:
        batch, q_heads, n, _ = q.shape
        mods = None
        if s_aux is not None or any(x is not None for x in how):
            scale, softcap, window = how
            mods = Mods(scale=scale, window=window, softcap=softcap,
                        sink_logits=None if s_aux is None else s_aux.detach().float().flatten().tolist())
        out = torch.zeros(batch, n, q_heads, v.shape[-1], dtype=q.dtype)
        rows = [i for i in range(batch) if new is None or bool(new[i].any())]

        def tokens(x: torch.Tensor, i: int) -> torch.Tensor:
            x = x[i].transpose(0, 1)
            if new is not None and not bool(new[i].all()):
                return x[new[i]]
            return x if x.stride(-1) == 1 else x.contiguous()

        with torch.no_grad():
            outs = self.pages.prefill(
                0, [self._host[i] for i in rows], [tokens(k, i) for i in rows], [tokens(v, i) for i in rows],
                [tokens(q, i) for i in rows], mods=mods, threads=self._threads)
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
        if self.is_initialized:
            for s in self.sequences:
                s.trim(0)
            self.tokens, self.real, self._waits = 0, None, False

    def crop(self, tokens_to_remove: int) -> None:
        """-n removes n tokens from the end, 0 none; a positive number, of older versions, is the number of tokens to keep."""
        n, change = self.get_seq_length(), int(tokens_to_remove)
        keep = change if change > 0 else max(n + change, 0)
        if keep < n:
            real = self._padding.change(self.real, keep, lambda r: r[:, :keep])
            for i, s in enumerate(self.sequences):  # a cache on a GPU may refuse the first
                s.trim(keep if real is None else int(real[i].sum()))
            self.tokens, self.real = keep, real

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            chosen = torch.arange(len(self.sequences))[indices.cpu()].tolist()
            forks = [self.sequences[i].fork() for i in chosen]
            if self._device is None:
                self._host = forks
            else:
                self._device.replace(forks)
            self.real = self._padding.change(self.real, chosen, lambda r: r[chosen])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(len(self.sequences)).repeat_interleave(repeats))

    def offload(self) -> None:
        """Nothing: pages stay where they are."""

    def prefetch(self) -> None:
        """Nothing."""


class Cache(_Cache):
    """past_key_values of a model whose attention is "kvq".

    keys, values  formats by name, as of kvq.Cache; on a GPU of kvq.cuda.Cache, one for both
    threads       of kvq, on the CPU; None: the calling thread
    options       others of kvq.Cache: sinks, recent, window, ...; on a GPU of kvq.cuda.Cache: max_tokens (None: 32768), ...
    """

    def __init__(self, keys: Any = "std4", values: Any = None, *, threads: Optional[Threads] = None, **options: Any) -> None:
        self._padding = padding = _Padding()
        self._graph: Optional[DecodeGraph] = None  # of decode_in_graphs
        super().__init__(layer_class_to_replicate=lambda: Layer(keys, values, threads, padding, **options))

    def bytes(self) -> int:
        """Of all layers and sequences, shared pages counted once."""
        return sum(layer.pages.info().bytes_in_use for layer in self.layers if layer.pages is not None)


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
        if not layers or any(layer._device is None for layer in layers):
            raise ArgumentError("kvq: a graph of decode steps needs a cache on a GPU that holds a prompt")
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
        number = [layer._device.pages.graph_id() for layer in layers]
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
    if ids is None or not layers or any(layer._device is None for layer in layers) or torch.is_grad_enabled():
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
              sliding_window: Optional[int] = None, softcap: Optional[float] = None, s_aux: Optional[torch.Tensor] = None,
              is_causal: Optional[bool] = None, **others: Any) -> Tuple[torch.Tensor, None]:
    """The attention function "kvq". query: [batch][q_heads][n][head_dim]; returns [batch][n][q_heads][value_dim], None."""
    layer = getattr(key, "kvq_layer", None)
    if layer is None:
        raise ArgumentError('kvq: attn_implementation="kvq" needs past_key_values=kvq.transformers.Cache(...)')
    if dropout:
        raise UnsupportedError(f"kvq: attention has no dropout, got {dropout}; call model.eval()")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedError("kvq: this attention is not causal")
    for name in ("head_mask", "position_bias", "layer_head_mask"):
        if others.get(name) is not None:
            raise UnsupportedError(f"kvq: attention takes no {name}")
    return layer.attend(key, value, query, attention_mask, (scaling, softcap, sliding_window), s_aux), None


def padding_mask(*args: Any, attention_mask: Optional[torch.Tensor] = None, **kwargs: Any) -> Optional[torch.Tensor]:
    """The mask function "kvq": hands the padding of the batch on, [batch][tokens]."""
    return attention_mask


AttentionInterface.register("kvq", attention)
AttentionMaskInterface.register("kvq", padding_mask)
