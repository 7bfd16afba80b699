"""Masks of transformers as kvq takes them: what its mask functions say of one forward pass."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from ._errors import UnsupportedError
from ._models import model_name


class Said:
    """What a mask says of the queries of one forward pass, for all layers that are given it.

    padding  [batch][tokens so far], False for padding; None: there is none
    window   only itself and the window - 1 tokens before it; None: no window
    chunk    tokens attend within chunks of so many; None: no chunks
    left     padding on the left, behind which chunks are counted, [batch]; None: none
    seen     [batch or 1][queries][tokens so far] on the CPU, what each query sees; None: what the others say
    """

    def __init__(self, padding: Optional[torch.Tensor] = None, window: Optional[int] = None,
                 chunk: Optional[int] = None, left: Optional[torch.Tensor] = None,
                 seen: Optional[torch.Tensor] = None) -> None:
        self.padding, self.window, self.chunk, self.seen = padding, window, chunk, seen
        self._left = left
        self._rows: Tuple[Any, Any] = (None, None)

    def needs_rows(self, tokens: int) -> bool:
        """Whether a context of so many tokens needs what rows() gives."""
        return self.seen is not None or (self.chunk is not None and tokens > self.chunk)

    def of_encoder(self, tokens: int) -> Optional[torch.Tensor]:
        """Which tokens of an encoder its decoder sees, [batch][tokens] on the CPU; None: all."""
        if self.seen is not None:
            if not bool((self.seen == self.seen[:, :1]).all()):
                raise UnsupportedError(f"kvq: the mask of {model_name()} shows other tokens of the encoder to other queries")
            real = self.seen[:, 0]
        elif self.padding is not None:
            real = self.padding[:, :tokens].to("cpu", torch.bool)
        else:
            return None
        return None if bool(real.all()) else real

    def shown(self, device: Any) -> Optional[torch.Tensor]:
        """What the queries of an encoder see, [batch][1][queries or 1][tokens]; None: all tokens."""
        if self.seen is not None:
            return self.seen[:, None].to(device)
        return None if self.padding is None else self.padding[:, None, None, :].to(device, torch.bool)

    def agree(self, of: Any, window: Optional[int], real: Optional[torch.Tensor], tokens: int, new: int) -> None:
        """Raises UnsupportedError where this is not what a layer with a window or chunks hides by itself. Arguments: as of rows()

        of      a kvq.Layer
        window  of the mask, or what the model says beside it
        """
        own, found, what = of.window, window, "a window"
        if of.kind == "chunked":
            found, what = self.chunk, "chunks"
        if found not in (None, own) or (found is None and self.seen is None and tokens > own):
            has = "neither" if found is None else f"{what} of {found}"
            raise UnsupportedError(f"kvq: a layer of {model_name()} has {what} of {own} tokens by its config, its mask says {has}")
        if tokens <= own:
            return
        if self.seen is not None:
            far = of.kind == "chunked" or bool(torch.tril(self.seen, tokens - new - own).any())
            if far:
                raise UnsupportedError(f"kvq: the mask of {model_name()} shows tokens that a layer with {what} of {own} has freed")
        elif of.kind == "chunked":
            left = torch.zeros(1, dtype=torch.long)
            if self._left is not None and self.padding is not None:
                left = self._left = self._left.cpu()  # waits for a GPU, once in a forward pass
            first = torch.zeros_like(left) if real is None else real.long().argmax(dim=1)
            if bool((first != left).any()) or (real is not None and bool((real.sum(1) != tokens - first).any())):
                raise UnsupportedError(f"kvq: {model_name()} counts padding behind tokens in its chunks of {own}; with a cache of "
                                       "for_model padding must be on the left")

    def rows(self, real: Optional[torch.Tensor], batch: int, tokens: int, new: int) -> List[Dict[str, Any]]:
        """Arguments of Mods for each row of the batch. Found once for layers that have the same `real`.

        real  [batch][tokens] on the CPU, False for padding; None: there is none
        new   the last so many tokens are queries
        """
        known, rows = self._rows
        if known is None or known[0] is not real or known[1:] != (batch, tokens, new):
            find = self._ranges if self.seen is not None else self._documents
            if self._left is not None:
                self._left = self._left.cpu()
            rows = [find(i, None if real is None else real[i], tokens, new) for i in range(batch)]
            self._rows = ((real, batch, tokens, new), rows)
        return rows

    def _documents(self, row: int, real: Optional[torch.Tensor], tokens: int, new: int) -> Dict[str, Any]:
        """Chunks, as documents of the tokens that are no padding."""
        left = 0 if self._left is None else int(self._left[row])
        starts = range(left + self.chunk, tokens, self.chunk)
        before = None if real is None else real.cumsum(0)
        return {"document_starts": [0] + [at if before is None else int(before[at - 1]) for at in starts]}

    def _ranges(self, row: int, real: Optional[torch.Tensor], tokens: int, new: int) -> Dict[str, Any]:
        """What each query sees, as ranges of the tokens that are no padding."""
        seen = self.seen[min(row, len(self.seen) - 1)]
        if real is not None:
            seen = seen[real[tokens - new :]][:, real]
        queries, count = seen.shape
        if queries == 0:
            return {}
        edges = torch.nn.functional.pad(seen.to(torch.int8), (1, 1)).diff(dim=1)
        begins, ends = ((edges == step).nonzero().tolist() for step in (1, -1))
        lists: List[List[Tuple[int, int]]] = [[] for _ in range(queries)]
        for (query, begin), (_, end) in zip(begins, ends):
            lists[query].append((begin, end))
        first = count - queries
        later = any(ranges and ranges[-1][1] > first + i + 1 for i, ranges in enumerate(lists))
        direction = "bidirectional" if later else "causal"
        return {"direction": direction, "token_ranges": lists, "range_first_query": first}


def given_mask(mask: torch.Tensor) -> Said:
    """A mask that said() has not made: [batch][tokens], 0 for padding, or [batch][1][queries][tokens], True
    or 0.0
    for what is seen."""
    if mask.dim() == 2:
        return Said(mask)
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise UnsupportedError(f"kvq: the attention mask of {model_name()} is {list(mask.shape)}, neither "
                               "[batch][tokens] nor [batch][1][queries][tokens]")
    if mask.dtype != torch.bool:
        seen = mask == 0
        if not bool((seen | (mask <= -1e4)).all()):
            raise UnsupportedError(f"kvq: the attention mask of {model_name()} adds to scores; kvq hides tokens, and "
                                   "adds nothing")
        mask = seen
    return Said(seen=mask[:, 0].cpu())


def said(mask_function: Optional[Callable], attention_mask: Optional[torch.Tensor], batch: int, queries: Any,
         tokens: int, use_vmap: bool, device: Any) -> Said:
    """What transformers hands to a mask function.

    mask_function   f(batch, head, query, key) -> bool; None: causal
    attention_mask  [batch][tokens], False for padding; None: there is none
    queries         their positions: (first, last + 1), or a tensor
    use_vmap        mask_function takes numbers, not tensors that are joined by broadcasting
    """
    if mask_function is None:
        return Said(attention_mask)
    known = _known(mask_function)
    if known is not None:
        return Said(attention_mask, **known)
    # Of no known kind: asked for every query and token, as the package's own attention does.
    queries = torch.arange(*queries, device=device) if isinstance(queries, tuple) else queries.to(device)
    batches, heads, keys = (torch.arange(n, device=device) for n in (batch, 1, tokens))
    seen = _asked(mask_function, (batches, heads, queries, keys), use_vmap)
    seen = seen.expand(batch, -1, len(queries), tokens)
    if seen.shape[1] != 1:
        raise UnsupportedError(f"kvq: the mask of {model_name()} differs between heads")
    seen = seen[:, 0]
    if bool((seen == (keys[None, :] <= queries[:, None])).all()):
        return Said(attention_mask)
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, :tokens].to(device, torch.bool)
    return Said(attention_mask, seen=seen.cpu())


def _asked(f: Callable, at: Tuple[torch.Tensor, ...], use_vmap: bool) -> torch.Tensor:
    """f of all combinations of numbers, [batch][heads][queries][keys], or of sizes that broadcast to
    these."""
    if not use_vmap:
        return f(*(x.view([-1 if i == axis else 1 for i in range(4)]) for axis, x in enumerate(at)))
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    for axis in (3, 2, 1, 0):
        f = torch.vmap(f, in_dims=tuple(0 if i == axis else None for i in range(4)))
    with TransformGetItemToIndex():  # numbers as indices
        return f(*at)


def _known(f: Callable) -> Optional[Dict[str, Any]]:
    """A window or chunks, behind the causal mask; None: something else."""
    found: Dict[str, Any] = {}
    parts, causal = [f], False
    while parts:
        part = parts.pop()
        name, inside = getattr(part, "__qualname__", ""), _closure(part)
        if not getattr(part, "__module__", "").startswith("transformers."):
            return None
        if name == "causal_mask_function":
            causal = True
        elif name.startswith("and_masks.") and "mask_functions" in inside:
            parts.extend(inside["mask_functions"])
        elif name.startswith("sliding_window_overlay.") and "sliding_window" in inside and not found:
            found["window"] = int(inside["sliding_window"])
        elif name.startswith("chunked_overlay.") and "chunk_size" in inside and not found:
            found.update(chunk=int(inside["chunk_size"]), left=inside.get("left_padding"))
        else:
            return None
    return found if causal else None


def _closure(f: Callable) -> Dict[str, Any]:
    code, cells = getattr(f, "__code__", None), getattr(f, "__closure__", None)
    if code is None or cells is None:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells)))
