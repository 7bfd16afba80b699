"""Hugging Face transformers with a cache of kvq, on the CPU.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvq")
    model.generate(**inputs, past_key_values=kvq.transformers.Cache("std4"))

Written for the classes Cache, CacheLayerMixin, AttentionInterface and AttentionMaskInterface of transformers 4.56 and 5; run with 5.17.
tests/test_transformers.py runs it against a small model and stand-ins of these classes, and against a LlamaForCausalLM of the
package where that is installed.

For decoder-only models whose attention is causal (a sliding window, softcapping and learned sinks included). Batches may be padded. Masks of
other kinds (prefix-LM, packed sequences) are not seen by an attention function and must not be used. Beam search forks sequences, assisted
decoding trims them.
"""
from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache as _Cache, CacheLayerMixin

from ._attention import Mods, Threads
from ._cache import Cache as _Pages
from ._errors import ArgumentError, UnsupportedError
from ._sequence import Sequence

__all__ = ["Cache", "attention", "padding_mask"]


class Layer(CacheLayerMixin):
    """One layer of a Cache: one sequence per row of the batch. update() only takes note of keys and values; attention() appends them, as
    it knows which of them are padding."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, keys: Any = "std4", values: Any = None, threads: Optional[Threads] = None, **options: Any) -> None:
        super().__init__()
        self._formats = (keys, values)
        self._threads = threads
        self._options = options
        self._waits = False
        self.pages: Optional[_Pages] = None
        self.sequences: List[Sequence] = []
        self.real = torch.zeros(0, 0, dtype=torch.bool)  # [batch][tokens]: False for padding

    def lazy_initialization(self, key_states: torch.Tensor, value_states: Optional[torch.Tensor] = None) -> None:
        batch, kv_heads, _, head_dim = key_states.shape
        value_dim = head_dim if value_states is None else value_states.shape[-1]
        keys, values = self._formats
        self.pages = _Pages(1, kv_heads, head_dim, keys, values, value_dim=value_dim, **self._options)
        self.sequences = [self.pages.new_sequence() for _ in range(batch)]
        self.real = torch.zeros(batch, 0, dtype=torch.bool)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        """Returns both as they are: attention() reads the cache itself."""
        if key_states.device.type != "cpu":
            raise UnsupportedError(f"kvq: the model is on {key_states.device}; this cache is of the CPU only")
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
               mods: Optional[Mods]) -> torch.Tensor:
        """Appends k and v, [batch][kv_heads][n][dim], and attends for q, [batch][q_heads][n][dim]. Returns [batch][n][q_heads][dim].

        mask: [batch][all tokens so far], 0 for padding; None: there is none
        """
        batch, q_heads, n, _ = q.shape
        past = self.real.shape[1]
        self._waits = False
        new = torch.ones(batch, n, dtype=torch.bool)
        if mask is not None:
            if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < past + n:
                raise ArgumentError(f"kvq: the attention mask is {list(mask.shape)}, not [{batch}][{past + n}]")
            mask = mask.to(torch.bool)
            if not torch.equal(mask[:, :past], self.real):
                raise ArgumentError("kvq: the attention mask hides other tokens than before; cached tokens cannot be hidden")
            new = mask[:, past : past + n]
        out = torch.zeros(batch, n, q_heads, v.shape[-1], dtype=q.dtype)
        rows = [i for i in range(batch) if bool(new[i].any())]

        def tokens(x: torch.Tensor, i: int) -> torch.Tensor:
            x = x[i].transpose(0, 1)
            if not bool(new[i].all()):
                return x[new[i]]
            return x if x.stride(-1) == 1 else x.contiguous()

        assert self.pages is not None
        with torch.no_grad():
            outs = self.pages.prefill(
                0, [self.sequences[i] for i in rows], [tokens(k, i) for i in rows], [tokens(v, i) for i in rows],
                [tokens(q, i) for i in rows], mods=mods, threads=self._threads)
        for i, of_row in zip(rows, outs):
            out[i, new[i]] = of_row
        self.real = torch.cat([self.real, new], dim=1)
        return out

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self.real.shape[1]

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
            self.real = self.real[:, :0]
            self._waits = False

    def crop(self, tokens_to_remove: int) -> None:
        """-n removes n tokens from the end, 0 none; a positive number, of older versions, is the number of tokens to keep."""
        n, change = self.get_seq_length(), int(tokens_to_remove)
        keep = change if change > 0 else max(n + change, 0)
        if keep < n:
            self.real = self.real[:, :keep]
            for s, real in zip(self.sequences, self.real):
                s.trim(int(real.sum()))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            chosen = torch.arange(len(self.sequences))[indices].tolist()
            self.sequences = [self.sequences[i].fork() for i in chosen]
            self.real = self.real[chosen]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx.cpu())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(len(self.sequences)).repeat_interleave(repeats))

    def offload(self) -> None:
        """Nothing: pages are in the memory of the CPU."""

    def prefetch(self) -> None:
        """Nothing."""


class Cache(_Cache):
    """past_key_values of a model whose attention is "kvq".

    keys, values  formats by name, as of kvq.Cache
    threads       of kvq; None: the calling thread
    options       others of kvq.Cache: sinks, recent, window, ...
    """

    def __init__(self, keys: Any = "std4", values: Any = None, *, threads: Optional[Threads] = None, **options: Any) -> None:
        super().__init__(layer_class_to_replicate=lambda: Layer(keys, values, threads, **options))

    def bytes(self) -> int:
        """Of all layers and sequences, shared pages counted once."""
        return sum(layer.pages.info().bytes_in_use for layer in self.layers if layer.pages is not None)


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
    mods = None
    if scaling is not None or sliding_window is not None or softcap is not None or s_aux is not None:
        mods = Mods(scale=scaling, window=sliding_window, softcap=softcap,
                    sink_logits=None if s_aux is None else s_aux.detach().float().flatten().tolist())
    return layer.attend(key, value, query, attention_mask, mods), None


def padding_mask(*args: Any, attention_mask: Optional[torch.Tensor] = None, **kwargs: Any) -> Optional[torch.Tensor]:
    """The mask function "kvq": hands the padding of the batch on, [batch][tokens]."""
    return attention_mask


AttentionInterface.register("kvq", attention)
AttentionMaskInterface.register("kvq", padding_mask)
