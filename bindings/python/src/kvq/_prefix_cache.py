"""Sequences by their token ids."""
from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Dict, Iterable, Optional, Tuple

from . import _abi
from ._attention import Threads
from ._cache import Cache
from ._formats import from_c
from ._library import Handle, ask, count, handle_of, handles, library, limit, optional_handle, text
from ._reports import StepDownPolicy, StepDownReport, policy_to_c
from ._sequence import Sequence
from ._tensors import integers

_MATCHES = ("exact", "supersequence", "prefix", "lcp", "miss", "miss_short_prefix", "miss_short_lcp")
_OUTCOMES = ("stored", "duplicate", "too_large")


@dataclass(frozen=True)
class Match:
    """What a prefix cache has of a list of tokens."""

    kind: str
    """"exact", "supersequence" (a longer entry, trimmed), "prefix", "lcp" (the longest common prefix, trimmed), "miss",
    "miss_short_prefix" or "miss_short_lcp"."""
    tokens: int
    """Leading tokens that need not be computed."""


def match_of(kind: ctypes.c_int32, found: ctypes.c_int32) -> Match:
    """What the library has written."""
    return Match(_MATCHES[kind.value], found.value)


@dataclass(frozen=True)
class PrefixCacheStatistics:
    fetches: Dict[str, int]
    """By the kind of match."""
    tokens_saved: int
    stored: int
    duplicates: int
    rejections: int
    replaced: int
    evictions: int
    entries: int
    """Now."""
    bytes: int
    """Of the pages of all entries, now."""


class PrefixCache(Handle):
    """Sequences by their token ids, least recently used ones evicted. All methods may be called from any thread.

    byte_limit           bytes of the pages of all entries; None: no limit
    max_entries          None: 1000
    min_prefix_tokens    a shorter common prefix is a miss; None: 128
    min_quantize_tokens  shorter entries keep their formats; None: 256
    keys, values         listed formats to which entries are requantized where that is smaller; both None: none
    """

    def __init__(self, cache: Cache, *, byte_limit: Optional[int] = None, max_entries: Optional[int] = None,
                 min_prefix_tokens: Optional[int] = None, min_quantize_tokens: Optional[int] = None,
                 keys: Optional[str] = None, values: Optional[str] = None) -> None:
        o = _abi.kvq_prefix_cache_options(
            byte_limit=limit(byte_limit, "byte_limit"), max_entries=limit(max_entries, "max_entries"),
            min_prefix_tokens=count(min_prefix_tokens, "min_prefix_tokens"),
            min_quantize_tokens=count(min_quantize_tokens, "min_quantize_tokens"), keys=text(keys),
            values=text(values))
        self.cache = cache
        super().__init__(ask(library.kvq_prefix_cache_create, handle_of(cache, Cache, "cache"), ctypes.byref(o)),
                         library.kvq_prefix_cache_free)

    def lookup(self, tokens: Iterable[int]) -> Match:
        """What fetch would find."""
        match, found = ctypes.c_int32(), ctypes.c_int32()
        library.kvq_prefix_cache_lookup(self, *integers(tokens, "tokens"), ctypes.byref(match), ctypes.byref(found))
        return match_of(match, found)

    def fetch(self, tokens: Iterable[int]) -> Tuple[Sequence, Match]:
        """A sequence that holds as many of the first tokens as the store has; empty on a miss."""
        match, found, out = ctypes.c_int32(), ctypes.c_int32(), ctypes.c_void_p()
        library.kvq_prefix_cache_fetch(self, *integers(tokens, "tokens"), ctypes.byref(match), ctypes.byref(found),
                                       ctypes.byref(out))
        return Sequence(self.cache, out.value or 0), match_of(match, found)

    def store(self, tokens: Iterable[int], sequence: Sequence) -> str:
        """Stores the sequence of these tokens, its first len(tokens), which does not change. Returns "stored", "duplicate" or
        "too_large"."""
        return _OUTCOMES[ask(library.kvq_prefix_cache_store, self, *integers(tokens, "tokens"),
                             handle_of(sequence, Sequence, "sequence"), out=ctypes.c_int32)]

    def erase(self, tokens: Iterable[int]) -> bool:
        """Removes the entry with exactly these tokens. False: there is none."""
        return bool(ask(library.kvq_prefix_cache_erase, self, *integers(tokens, "tokens"), out=ctypes.c_int32))

    def clear(self) -> None:
        """Removes all entries."""
        library.kvq_prefix_cache_clear(self)

    def release(self, bytes: int) -> int:
        """Evicts the least recently used entries until the store holds `bytes` less. Returns by how many its bytes fell."""
        return ask(library.kvq_prefix_cache_release, self, bytes, out=ctypes.c_size_t)

    def step_down(self, live: Iterable[Sequence], policy: StepDownPolicy,
                  threads: Optional[Threads] = None) -> StepDownReport:
        """Cache.step_down for all entries and the given live sequences together."""
        report = _abi.kvq_step_down_report()
        library.kvq_prefix_cache_step_down(self, *handles(live, Sequence, "a sequence"), ctypes.byref(policy_to_c(policy)),
                                           optional_handle(threads, Threads, "threads"), ctypes.byref(report))
        return from_c(StepDownReport, report)

    def statistics(self) -> PrefixCacheStatistics:
        """What happened so far, and what the store holds now."""
        c = _abi.kvq_prefix_cache_statistics()
        library.kvq_prefix_cache_get_statistics(self, ctypes.byref(c))
        return from_c(PrefixCacheStatistics, c, fetches=dict(zip(_MATCHES, c.fetches)))
