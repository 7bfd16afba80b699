"""Sequences of a cache."""
from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, BinaryIO, Iterable, List, Optional, Tuple, TYPE_CHECKING, Union

from . import _abi
from ._attention import Call, Mods, Threads, Workspace
from ._formats import from_c, messages, role_of, stream, written
from ._errors import ArgumentError
from ._layers import part_number
from ._library import Handle, ask, handle_of, library, optional_handle, text
from ._reports import RequantizeReport, StepDownPolicy, StepDownReport, Snapshot, Usage
from ._tensors import Tensor, empty_beside, empty_positions, integers, is_torch, optional_tensor, rows, tensor, view

if TYPE_CHECKING:
    from ._cache import Cache

File = Union[str, "os.PathLike[str]", BinaryIO]


def save_options(model: Optional[str], convert: bool = False, upper_only: bool = False) -> Any:
    return ctypes.byref(_abi.kvq_save_options(model=text(model), convert=int(convert), upper_only=int(upper_only)))


def selection(q: Tensor, weights: Tensor, best: int, place: str = "") -> Tuple[Any, Any, Tensor, int]:
    """Queries, their weights, the array for positions, and its address. place: of both in their lists."""
    queries = tensor(q, "q" + place)
    given = rows(weights, (queries.tokens, queries.heads), "weights" + place, False)
    out, address = empty_positions(q, (queries.tokens, max(best, 0)))
    return queries, ctypes.cast(given, ctypes.POINTER(ctypes.c_float)), out, address


class Attended:
    """The tensors of an attention call as the library takes them."""

    def __init__(self, cache: "Cache", layer: int, q: Tensor, out: Optional[Tensor], lse: Optional[Tensor]) -> None:
        self.q = tensor(q, "q")
        self.result = out
        if out is None:
            known = 0 <= layer < len(cache.layers)  # else the call is refused
            dim = cache.layers[layer].value_dim if known else None
            self.result = empty_beside(q, (self.q.tokens, self.q.heads, dim or 0))
        self.out = tensor(self.result, "out", write=True)
        self.lse = rows(lse, (self.q.tokens, self.q.heads), "lse")


class TokenStore(Handle):
    """What sequences and rings have in common."""

    _kind = ""
    cache: "Cache"

    def __init__(self, cache: "Cache", pointer: int) -> None:
        super().__init__(pointer, self._function("free"))
        self.cache = cache  # lives as long, with what its callbacks need

    @classmethod
    def _function(cls, name: str) -> Any:
        return getattr(library, f"kvq_{cls._kind}_{name}")

    def prefill(self, layer: int, k: Optional[Tensor], v: Optional[Tensor], q: Tensor, out: Optional[Tensor] = None, *,
                mods: Optional[Mods] = None, lse: Optional[Tensor] = None, threads: Optional[Threads] = None,
                workspace: Optional[Workspace] = None) -> Tensor:
        """Appends n tokens to a layer and attends for the last m of them: one call for each layer of a chunk of the prompt, or of a decode
        step. Attention reads the chunk in 16 bit; pages behind the recent window are quantized afterwards.

        k    [n][kv_heads][head_dim], rotated if the model has rotary positions
        v    [n][kv_heads][value_dim], of the dtype of k; None for a layer made by latent_attention; both None for one made by
             shared_with, which sees the chunk as its owner saw it: once after each prefill of the owner
        q    [m][q_heads][head_dim], m at most n unless mods say otherwise; q_heads is a multiple of kv_heads
        out  [m][q_heads][value_dim]; None: new memory of the dtype of q
        lse  None, or float32 [m][q_heads], gets the natural logarithm of each softmax sum

        Returns out, softmax(q K^T) V. On an error the sequence is unchanged.
        """
        a = Attended(self.cache, layer, q, out, lse)
        Call(mods, threads, workspace, a.lse).run(
            self._function("prefill"), self, layer, ctypes.byref(optional_tensor(k, "k")),
            ctypes.byref(optional_tensor(v, "v")), ctypes.byref(a.q), ctypes.byref(a.out))
        return a.result

    def append(self, layer: int, k: Tensor, v: Optional[Tensor]) -> None:
        """Appends n tokens to a layer, without queries. k, v: as of prefill"""
        self._function("append")(self, layer, ctypes.byref(tensor(k, "k")), ctypes.byref(optional_tensor(v, "v")))

    def attend(self, layer: int, q: Tensor, out: Optional[Tensor] = None, *, mods: Optional[Mods] = None,
               lse: Optional[Tensor] = None, threads: Optional[Threads] = None,
               workspace: Optional[Workspace] = None) -> Tensor:
        """softmax(q K^T) V for the last m tokens of a layer. q, out, lse: as of prefill. Returns out."""
        a = Attended(self.cache, layer, q, out, lse)
        Call(mods, threads, workspace, a.lse).run(
            self._function("attend"), self, layer, ctypes.byref(a.q), ctypes.byref(a.out))
        return a.result

    def append_draft(self, layer: int, k: Tensor, v: Optional[Tensor]) -> None:
        """Appends drafted tokens; at most 64 wait at a time, until keep. Attend to them under Mods(tree_parents=...)."""
        self._function("append_draft")(self, layer, ctypes.byref(tensor(k, "k")), ctypes.byref(optional_tensor(v, "v")))

    def keep(self, path: Iterable[int]) -> None:
        """Accepts drafted tokens path[0] < path[1] < ..., numbers within the draft, and removes the others, in every layer with a
        draft."""
        self._function("keep")(self, *integers(path, "path"))


class Sequence(TokenStore):
    """Tokens of one text. Made by Cache.new_sequence, fork and others.

    One thread at a time calls methods that change a sequence; attend, usage, save and other reading methods may run together.
    Different sequences are independent.
    """

    _kind = "sequence"

    def fork(self) -> "Sequence":
        """A sequence with the same tokens that shares every page."""
        return Sequence(self.cache, ask(library.kvq_sequence_fork, self))

    def select(self, layer: int, q: Tensor, weights: Tensor, best: int, *, threads: Optional[Threads] = None,
               workspace: Optional[Workspace] = None) -> Tensor:
        """The best tokens of a layer made by index_layer, for each of the last n tokens: of those up to itself the ones with the
        largest sum over heads of weight * max(q . k, 0); of equal ones the earlier first.

        q        [n][heads][channels]
        weights  [n][heads], float32
        Returns int32 positions [n][best], the best first; -1 where there are no more: Mods(listed_tokens=...).
        """
        queries, given, out, address = selection(q, weights, best)
        Call(None, threads, workspace).run(library.kvq_sequence_select, self, layer, ctypes.byref(queries), given, best,
                                           ctypes.cast(address, ctypes.POINTER(ctypes.c_int32)))
        return out

    def __len__(self) -> int:
        return self.tokens()

    def __bool__(self) -> bool:
        return True  # also without tokens

    def tokens(self, layer: Optional[int] = None) -> int:
        """Tokens of a layer; None: of the longest one."""
        return ask(library.kvq_sequence_tokens, self, _abi.ALL_LAYERS if layer is None else _layer(layer),
                   out=ctypes.c_int32)

    def trim(self, tokens: int) -> int:
        """Removes every token from position `tokens` on, in all layers. Within `rollback` tokens it is exact. Where layers have
        state, all layers go to token reach(tokens). Returns how many tokens before `tokens` must run again.

        ArgumentError: a layer with a window has freed tokens that the next one would see. From trim_limit() on, and to 0,
        no trim is refused.
        """
        library.kvq_sequence_trim(self, tokens)
        return tokens - self.tokens()

    def trim_limit(self) -> int:
        """The least number of tokens from which on every trim is possible; 0, unless a layer with a window has freed
        tokens."""
        return ask(library.kvq_sequence_trim_limit, self, out=ctypes.c_int32)

    def drop_copies(self) -> None:
        """Gives back the 16-bit copies of quantized pages (usage().rollback). A trim into pages that are quantized now then keeps their
        codes, as one by more than `rollback` tokens does. With fork(): a sequence to save or send without copies."""
        library.kvq_sequence_drop_copies(self)

    def erase(self, first: int, last: int) -> None:
        """Removes tokens [first, last); those behind them move to the front, keys included. Needs Cache(rotary=...) if keys move."""
        library.kvq_sequence_erase(self, first, last)

    def shift(self, first: int, last: int, by: int) -> None:
        """Moves the rotary positions of the keys of tokens [first, last) by `by`. Needs Cache(rotary=...)."""
        library.kvq_sequence_shift(self, first, last, by)

    def splice(self, other: "Sequence", first: int, last: int) -> None:
        """Appends tokens [first, last) of another sequence of the cache (or this one), whose pages are shared."""
        library.kvq_sequence_splice(self, handle_of(other, Sequence, "other"), first, last)

    def attention_mass(self, layer: int, q: Tensor, *, mods: Optional[Mods] = None, threads: Optional[Threads] = None,
                       workspace: Optional[Workspace] = None) -> Tensor:
        """How much attention each token of a layer gets from queries: float32 [kv_heads][tokens], sums of weights over the queries and
        the query heads of a kv head. q, mods: as of attend, without lists, selected pages and skipped values."""
        queries = tensor(q, "q")
        known = 0 <= layer < len(self.cache.layers)  # else the call is refused
        shape = (self.cache.layers[layer].kv_heads, self.tokens(layer)) if known else (1, 1)
        out = empty_beside(q, shape, sys.modules["torch"].float32 if is_torch(q) else "float32")
        Call(mods, threads, workspace).run(library.kvq_sequence_attention_mass, self, layer, ctypes.byref(queries),
                                           ctypes.cast(rows(out, shape, "mass"), ctypes.POINTER(ctypes.c_float)))
        return out

    def gap(self, layer: int) -> Tuple[int, int]:
        """Tokens [first, last) that a layer does not hold any more, behind its sinks, which are the tokens before `first`. Equal unless
        a window has freed some, or retain has dropped some."""
        first, last = ctypes.c_int32(), ctypes.c_int32()
        library.kvq_sequence_gap(self, _layer(layer), ctypes.byref(first), ctypes.byref(last))
        return first.value, last.value

    def retain(self, layer: int, kept: Any) -> None:
        """Drops all tokens of a layer but those that its kv heads list, as many in each; their memory goes back.

        kept  [kv_heads][count] positions that ascend and begin with all sinks
        They lie side by side in front of the next token then, and count as the sinks and the last tokens: in later lists, in masks
        and for dequantize. len() stays, and so does the number of the next token. A trim goes back to this point. Rows of
        quantized pages that are not kept whole by every kv head are quantized once more (usage().repacked).
        kvq.press makes such lists of scores.
        """
        lists = [integers(of.tolist() if hasattr(of, "tolist") else of, "kept") for of in kept]
        counts = sorted({n for _, n in lists})
        heads = self.cache.layers[layer].kv_heads if 0 <= layer < len(self.cache.layers) else len(lists)
        if len(lists) != heads or len(counts) > 1:
            raise ArgumentError(f"kvq: layer {layer} has {heads} kv heads, which keep as many tokens each, and kept has lists of "
                                f"{[n for _, n in lists]}")
        every, _ = integers([t for of, _ in lists for t in of], "kept")
        library.kvq_sequence_retain(self, layer, every, counts[0] if counts else 0)

    def hold(self) -> None:
        """All tokens of layers of full and latent attention stay 16 bit until retain of the layer, or release: those of a prompt, so
        that only what is kept of it is quantized."""
        library.kvq_sequence_hold(self)

    def release(self) -> None:
        """Quantizes what hold has kept in 16 bit."""
        library.kvq_sequence_release(self)

    def release_reserved(self) -> None:
        """Gives back what Cache.reserve took and no step has used."""
        library.kvq_sequence_release_reserved(self)

    def append_bytes(self, n: int) -> int:
        """Upper bound of the bytes that appending n tokens to every layer takes."""
        return ask(library.kvq_sequence_append_bytes, self, n, out=ctypes.c_size_t)

    def prefill_bytes(self, n: int) -> int:
        """Upper bound of the bytes that prefill of n tokens in every layer takes."""
        return ask(library.kvq_sequence_prefill_bytes, self, n, out=ctypes.c_size_t)

    def draft_bytes(self, n: int) -> int:
        """Upper bound of the bytes that n drafted tokens in every layer, and the keep of any path, take."""
        return ask(library.kvq_sequence_draft_bytes, self, n, out=ctypes.c_size_t)

    def dequantize(self, layer: int, role: str, out: Tensor, first: int = 0) -> Tensor:
        """Writes the values of tokens [first, first + n) of a layer's keys (role "key") or values ("value") to out, [n][kv_heads][dim],
        rounded once. Returns out."""
        library.kvq_sequence_dequantize(
            self, layer, role_of(role), first, ctypes.byref(tensor(out, "out", write=True)))
        return out

    def usage(self) -> Usage:
        """Bytes of this sequence."""
        c = _abi.kvq_usage()
        library.kvq_sequence_get_usage(self, ctypes.byref(c))
        return from_c(Usage, c)

    # ---- recurrent state, of layers made by state_layer ----

    def state(self, layer: int, part: Union[int, str] = 0) -> Any:
        """A part of a layer's live state, by number or name: a numpy array [heads][rows][columns] to read and to write, zeros at
        first. It is memory of the sequence: ask for it in every step, and do not use it after a call that changes the
        sequence. From this call until advance() a step is under way, and a trim goes back to a snapshot, also to the present
        token.

        bfloat16 is uint16 with the bits; in torch: torch.from_numpy(x).view(torch.bfloat16). Without numpy it is a
        memoryview.
        """
        number = part_number(self.cache.layers, layer, part)
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        library.kvq_sequence_state(self, layer, number, ctypes.byref(data), ctypes.byref(size))
        p = self.cache.layers[layer].parts[number]
        return view(data.value, (p.heads, p.rows, p.columns), p.dtype, self)

    def advance(self, n: int, prompt_ends: bool = False, threads: Optional[Threads] = None) -> bool:
        """The state of all layers has taken n more tokens. Takes a snapshot if one is due: Cache(snapshot_every=...), or the end
        of a prompt. Returns whether it did; False also where one was due and had no memory."""
        executor = optional_handle(threads, Threads, "threads")
        return ask(library.kvq_sequence_advance, self, n, int(prompt_ends), executor, out=ctypes.c_int32) != 0

    def snapshot(self, threads: Optional[Threads] = None) -> None:
        """Takes a snapshot of the state after all tokens of the sequence, which it must have taken."""
        library.kvq_sequence_snapshot(self, self.tokens(), optional_handle(threads, Threads, "threads"))

    def drop_snapshots(self) -> None:
        """Gives all snapshots back."""
        library.kvq_sequence_drop_snapshots(self)

    def reach(self, tokens: int) -> int:
        """The token to which trim(tokens) goes: `tokens`, or where layers have state that of the newest snapshot at or before it,
        or 0."""
        return ask(library.kvq_sequence_reach, self, tokens, out=ctypes.c_int32)

    @property
    def snapshots(self) -> List[Snapshot]:
        """Ascending by tokens."""
        count = ctypes.c_int32()
        library.kvq_sequence_get_snapshots(self, None, 0, ctypes.byref(count))
        marks = (_abi.kvq_snapshot * count.value)()
        library.kvq_sequence_get_snapshots(self, marks, count.value, ctypes.byref(count))
        return [from_c(Snapshot, c) for c in marks]

    # ---- formats and files ----

    def requantize(self, keys: Optional[str] = None, values: Optional[str] = None, **others: Any) -> RequantizeReport:
        """Cache.requantize for this sequence alone."""
        return self.cache.requantize([self], keys, values, **others)

    def step_down(self, policy: StepDownPolicy, threads: Optional[Threads] = None) -> StepDownReport:
        """Cache.step_down for this sequence alone."""
        return self.cache.step_down([self], policy, threads)

    def plan_step_down(self, policy: StepDownPolicy, threads: Optional[Threads] = None) -> StepDownReport:
        """Cache.plan_step_down for this sequence alone."""
        return self.cache.plan_step_down([self], policy, threads)

    def save(self, to: File, model: str = "", *, upper_only: bool = False) -> None:
        """Writes a safetensors file. to: a path, renamed when it is complete, or a binary file that is open for writing.

        model       any text by which the model is recognized
        upper_only  of pages with two planes (format "nested8") the upper one alone, which the cache must list
        """
        options = save_options(model, upper_only=upper_only)
        if hasattr(to, "write"):
            stream(lambda write: library.kvq_sequence_save(self, options, write, None), to.write)
        else:
            library.kvq_sequence_save_file(self, options, os.fsencode(to))

    def to_bytes(self, model: str = "", *, upper_only: bool = False) -> bytes:
        """The file of save() as bytes, for Cache.from_bytes."""
        options = save_options(model, upper_only=upper_only)
        return written(lambda write: library.kvq_sequence_save(self, options, write, None))

    def send_pages(self, layer: int) -> List[bytes]:
        """The pages of a layer as messages to a process that decodes on, for Receiver.accept."""
        return messages(lambda write: library.kvq_sequence_send_pages(self, layer, write, None))


class Receiver(Handle):
    """Collects the messages of one sequence, in any order. One thread at a time."""

    def __init__(self, cache: "Cache", convert: bool = False, *, sinks: Optional[int] = None, recent: Optional[int] = None,
                 page_tokens: Optional[int] = None) -> None:
        """convert: pages may change to the formats of the cache, which must also list those of the messages, and to its sinks, recent
        window and page_tokens, if those of the sender are said here (None: as of the cache)."""
        self.cache = cache
        super().__init__(ask(library.kvq_receiver_create, cache), library.kvq_receiver_free)
        if convert:
            library.kvq_receiver_convert(self, *(-1 if x is None else x for x in (sinks, recent, page_tokens)))

    def accept(self, message: bytes) -> None:
        """Takes one whole message of Sequence.send_pages."""
        message = bytes(message)
        library.kvq_receiver_accept(self, message, len(message))

    def finish(self, tokens: Optional[int] = None) -> Sequence:
        """The sequence, once every layer has `tokens` tokens (None: as many as the messages say). The receiver is then empty."""
        return Sequence(self.cache, ask(library.kvq_receiver_finish, self, -1 if tokens is None else _layer(tokens)))


class Ring(TokenStore):
    """A sequence without an end: a query attends to itself, the window - 1 tokens before it, and the sinks of the cache. Positions count
    from the first token ever appended. Pages that no query attends to any more are freed. mods must not have a window.

    sequence        the ring goes on behind its tokens, of which every layer has the same number; it is not changed
    window          tokens
    slack           a trim by so many tokens is always possible; None: 16
    sinks_in_cache  sinks move along, directly before the window; needs Cache(rotary=...)
    first_token     tokens of the text before the first one that the sequence holds behind its sinks; 0: it begins there
    """

    _kind = "ring"

    def __init__(self, sequence: Sequence, window: int, *, slack: Optional[int] = None, sinks_in_cache: bool = False,
                 first_token: int = 0) -> None:
        from ._library import count

        options = _abi.kvq_ring_options(window=window, slack=count(slack, "slack"), sinks_in_cache=int(sinks_in_cache),
                                        first_token=first_token)
        of = handle_of(sequence, Sequence, "sequence")
        super().__init__(sequence.cache, ask(library.kvq_ring_create, of, ctypes.byref(options)))

    def fork(self) -> "Ring":
        """A ring with the same tokens that shares every page."""
        made = Ring.__new__(Ring)
        TokenStore.__init__(made, self.cache, ask(library.kvq_ring_fork, self))
        return made

    def trim(self, tokens: int) -> None:
        """Removes every token from position `tokens` on, in all layers. Within `rollback` tokens it is exact."""
        library.kvq_ring_trim(self, tokens)

    def _tokens(self, layer: Optional[int]) -> Tuple[int, int]:
        tokens, first = ctypes.c_int64(), ctypes.c_int64()
        library.kvq_ring_tokens(self, _abi.ALL_LAYERS if layer is None else _layer(layer), ctypes.byref(tokens),
                                ctypes.byref(first))
        return tokens.value, first.value

    def tokens(self, layer: Optional[int] = None) -> int:
        """Tokens appended so far to a layer; None: to the longest one."""
        return self._tokens(layer)[0]

    def first_token(self, layer: Optional[int] = None) -> int:
        """The position from which on every token is held."""
        return self._tokens(layer)[1]

    def held(self) -> Sequence:
        """The held tokens as a sequence, a fork: to save, to measure or to dequantize."""
        return Sequence(self.cache, ask(library.kvq_ring_held, self))


def _layer(number: int) -> int:
    if number < 0:
        raise ArgumentError(f"kvq: {number} is negative")
    return number
