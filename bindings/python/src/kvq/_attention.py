"""What an attention call takes beside its tensors: masks, score modifiers, threads, scratch."""
from __future__ import annotations

import ctypes
import threading
from numbers import Integral
from typing import Any, Callable, Iterable, List, Optional, Sequence, Tuple

from . import _abi
from ._errors import ArgumentError
from ._library import Handle, ask, library, optional_handle
from ._reports import SelectionReport, SkippingReport
from ._tensors import floats, integers, view

_DIRECTIONS = {"causal": _abi.CAUSAL, "bidirectional": _abi.BIDIRECTIONAL, "cross": _abi.CROSS}
_PAGES = {"none": _abi.PAGE_NONE, "some": _abi.PAGE_SOME, "all": _abi.PAGE_ALL}


def choice(names: dict, value: str, what: str) -> int:
    """The number of a name."""
    if value not in names:
        raise ArgumentError(f"kvq: {what} is {value!r}, none of {', '.join(names)}")
    return names[value]


class Threads(Handle):
    """Threads of kvq. One call at a time runs on them; results have the same bits on any number.

    threads: at least 1
    """

    def __init__(self, threads: int) -> None:
        super().__init__(ask(library.kvq_executor_create_threads, threads), library.kvq_executor_free)


class Workspace(Handle):
    """Scratch of attention that calls share, one at a time. It only grows. bytes: Cache.workspace_bytes, or 0."""

    def __init__(self, bytes: int = 0) -> None:
        super().__init__(ask(library.kvq_workspace_create, None, bytes), library.kvq_workspace_free)

    def reserve(self, bytes: int) -> None:
        """Makes it at least this large."""
        library.kvq_workspace_reserve(self, bytes)

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
        return ask(library.kvq_workspace_bytes, self, out=ctypes.c_size_t)


def _flat(lists: Any, name: str) -> Tuple[List[int], Tuple[int, ...]]:
    """Lists [queries][n] or [queries][kv_heads][n] as one list, and their shape."""
    if hasattr(lists, "tolist"):
        lists = lists.tolist()
    flat, shape = lists, []
    try:
        while len(shape) < 3 and not all(isinstance(x, Integral) for x in flat):
            n = len(flat[0])
            if any(len(x) != n for x in flat):
                raise TypeError
            shape.append(n)
            flat = [x for row in flat for x in row]
        if not shape:
            raise TypeError
    except TypeError:
        raise ArgumentError(f"kvq: {name} is not [queries][n] nor [queries][kv_heads][n], with as many positions for each query") from None
    return flat, (len(lists), *shape)


class Mods:
    """What queries attend to, and changes of scores. Masks are joined with AND. Positions are those of the sequence.

    direction        "causal": itself and the tokens before it; "bidirectional": all tokens of the sequence;
                     "cross": all tokens, and queries are no tokens of the sequence
    window           only itself and the window - 1 tokens before it; None: no window
    window_sinks     with a window: also so many first tokens
    prefix           prefix-LM: all queries see the first `prefix` tokens
    document_starts  ascending from 0, as cu_seqlens: a query sees its document
    tree_parents     of a tree of drafted tokens: parents[i] < i, or -1 for the accepted text; at most 64
    tree_first       tokens of the layer before the draft
    scale            of scores; None: 1 / sqrt(head_dim)
    softcap          c tanh(score / c); None: none
    alibi_slopes     one per query head: score - slope * distance
    sink_logits      one per query head: one more score in the softmax sum
    token_ranges     queries see tokens of these (begin, end), which ascend: one list for all queries, or with range_first_query one
                     list per query
    range_first_query  position of the first of these queries in the sequence; 0 with "cross"
    selected_tokens  only the best pages of each kv head are read, about so many tokens; None: all
    listed_tokens    queries attend to these tokens alone, as far as masks show them: positions [queries][n], or
                     [queries][kv_heads][n], in any order; -1: none; a token that is listed twice counts twice
    listed_window    a second list for each of the same queries, such as the last tokens
    skipped_mass     values of pages with at most this share of the weights are not read; 0: all are read
    upper_only       of pages with two planes (format "nested8") the upper one alone is read
    mask_row         f(scores, query, first_key): sets scores[i] of hidden keys first_key + i to -inf
    mask_page        f(first_query, last_query, first_key, end_key) -> "none", "some" or "all": what these queries see of these
                     keys; needs mask_row
    score_row        f(scores, query_head, query, first_key): changes scores in place

    Functions are called from any thread, once for each row of each page, which takes long in Python: they are for trying things
    out. scores is a float32 numpy array (a memoryview without numpy) that must not be kept. If one raises, so does the call, after
    it has ended: tokens are appended, outputs mean nothing.
    """

    def __init__(
        self,
        *,
        direction: str = "causal",
        window: Optional[int] = None,
        window_sinks: int = 0,
        prefix: int = 0,
        document_starts: Optional[Iterable[int]] = None,
        tree_parents: Optional[Iterable[int]] = None,
        tree_first: int = 0,
        scale: Optional[float] = None,
        softcap: Optional[float] = None,
        alibi_slopes: Optional[Iterable[float]] = None,
        sink_logits: Optional[Iterable[float]] = None,
        token_ranges: Optional[Iterable[Any]] = None,
        range_first_query: Optional[int] = None,
        selected_tokens: Optional[int] = None,
        listed_tokens: Optional[Any] = None,
        listed_window: Optional[Any] = None,
        skipped_mass: float = 0.0,
        upper_only: bool = False,
        mask_row: Optional[Callable[[Any, int, int], None]] = None,
        mask_page: Optional[Callable[[int, int, int, int], str]] = None,
        score_row: Optional[Callable[[Any, int, int, int], None]] = None,
    ) -> None:
        c = _abi.kvq_mods(direction=choice(_DIRECTIONS, direction, "direction"), window_sinks=window_sinks, prefix=prefix)
        if window is not None:
            if window < 1:
                raise ArgumentError(f"kvq: window is {window}, which must be at least 1, or None")
            c.window = window
        self._kept: List[Any] = []
        self._lock = threading.Lock()
        self._error: Optional[BaseException] = None
        if document_starts is not None:
            c.document_starts, c.documents = self._keep(integers(document_starts, "document_starts"))
        if tree_parents is not None:
            c.tree_parents, c.tree_tokens = self._keep(integers(tree_parents, "tree_parents"))
            c.tree_first = tree_first
        for name, value in (("scale", scale), ("softcap", softcap)):
            if value is not None:
                if value == 0:
                    raise ArgumentError(f"kvq: {name} is 0; None is the default")
                setattr(c, name, value)
        if alibi_slopes is not None:
            slopes = floats(alibi_slopes)
            c.alibi_slopes, c.alibi_heads = self._keep((slopes, len(slopes)))
        if sink_logits is not None:
            logits = floats(sink_logits)
            c.sink_logits, c.sink_heads = self._keep((logits, len(logits)))
        if token_ranges is not None:
            lists = list(token_ranges) if range_first_query is not None else [token_ranges]
            ranges: List[Any] = []
            starts = [0]
            for of_query in lists:
                ranges.extend(_abi.kvq_token_range(begin=begin, end=end) for begin, end in of_query)
                starts.append(len(ranges))
            if not ranges and range_first_query is None:
                raise ArgumentError("kvq: token_ranges is empty; None is no such mask")
            c.token_ranges = self._keep((_abi.kvq_token_range * len(ranges))(*ranges))
            c.range_count = len(ranges)
            if range_first_query is not None:
                c.range_starts, c.range_start_count = self._keep(integers(starts, "starts of token_ranges"))
                c.range_first_query = range_first_query
        if selected_tokens is not None:
            if selected_tokens < 1:
                raise ArgumentError(f"kvq: selected_tokens is {selected_tokens}, which must be at least 1, or None")
            c.selected_tokens = selected_tokens
        if listed_tokens is not None or listed_window is not None:
            shapes = []
            for name, given in (("listed_tokens", listed_tokens), ("listed_window", listed_window)):
                if given is None:
                    continue
                flat, shape = _flat(given, name)
                shapes.append(shape[:-1])
                tokens, _ = self._keep(integers(flat, name))
                setattr(c, name, tokens)
                setattr(c, "listed_count" if name == "listed_tokens" else "listed_window_count", shape[-1])
            if shapes[0] != shapes[-1]:
                raise ArgumentError(f"kvq: listed_tokens and listed_window are for {shapes[0]} and {shapes[-1]} queries and kv heads")
            c.list_queries, c.list_kv_heads = (*shapes[0], 1)[:2]
        c.skipped_mass = skipped_mass
        c.upper_only = int(upper_only)
        self.has_callbacks = mask_row is not None or mask_page is not None or score_row is not None
        if mask_row is not None:
            row = mask_row
            c.mask_row = self._keep(_abi.mask_row_function(
                lambda _, scores, n, query, key: self._run(lambda: row(view(scores, (n,)), query, key), None)))
        if mask_page is not None:
            page = mask_page
            c.mask_page = self._keep(_abi.mask_page_function(
                lambda _, q, last, key, end: self._run(
                    lambda: choice(_PAGES, page(q, last, key, end), "the result of mask_page"), _abi.PAGE_SOME)))
        if score_row is not None:
            change = score_row
            c.score_row = self._keep(_abi.score_row_function(
                lambda _, scores, n, head, query, key: self._run(
                    lambda: change(view(scores, (n,)), head, query, key), None)))
        self._c = c

    def report(self, most_runs: int = 0) -> Tuple[SelectionReport, SkippingReport]:
        """What selected_tokens and skipped_mass do from now on. Calls that succeed add to it; one call at a time.

        most_runs  of the runs of pages that are read, so many are kept
        """
        runs = (_abi.kvq_chosen_tokens * most_runs)()
        selection = _abi.kvq_selection_report(chosen_capacity=most_runs)
        if most_runs:
            selection.chosen = runs
        skipping = _abi.kvq_skipping_report()
        self._c.selection, self._c.skipping = ctypes.pointer(selection), ctypes.pointer(skipping)
        self._reports = (selection, skipping, runs)
        return SelectionReport(selection, runs), SkippingReport(skipping)

    def _keep(self, of_c: Any) -> Any:
        self._kept.append(of_c)
        return of_c

    def _run(self, f: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return f() if otherwise is not None else (f(), None)[1]
        except BaseException as e:  # it cannot cross the library
            with self._lock:
                self._error = self._error or e
            return otherwise

    def _raise(self) -> None:
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error


class Call:
    """Options of one call as the library takes them."""

    def __init__(self, mods: Optional[Mods], threads: Optional[Threads], workspace: Optional[Workspace],
                 lse: Optional[int] = None, others: Sequence[Optional[Mods]] = ()) -> None:
        for m in (mods, *others):
            if m is not None and not isinstance(m, Mods):
                raise TypeError(f"mods is a {type(m).__name__}, not a kvq.Mods")
        self._mods = [m for m in (mods, *others) if m is not None and m.has_callbacks]
        self.c = _abi.kvq_attend_options(lse=lse)
        if mods is not None:
            self.c.mods = ctypes.pointer(mods._c)
        self.c.executor = optional_handle(threads, Threads, "threads")
        self.c.workspace = optional_handle(workspace, Workspace, "workspace")

    def run(self, function: Callable, *arguments: Any) -> None:
        """Calls it, then raises what callbacks raised."""
        try:
            function(*arguments, ctypes.byref(self.c))
        finally:
            for m in self._mods:
                m._raise()

