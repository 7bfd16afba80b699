"""What calls report, and policies. All bytes are of memory unless said otherwise."""
from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, List, Optional, Sequence

from . import _abi
from ._library import limit, text


@dataclass(frozen=True)
class CacheInfo:
    """The options in force, and what all sequences of a cache hold together."""

    layers: int
    kv_heads: int
    """0 where layers differ, as the next two: Cache.layers says it of each."""
    head_dim: int
    value_dim: int
    page_tokens: int
    sinks: int
    recent: int
    rollback: int
    byte_budget: Optional[int]
    bytes_in_use: int
    """Of all pages, each counted once, headers included."""
    pages_in_use: int
    bytes_held: int
    """For pages: byte_budget if it was allocated at once, else bytes_in_use."""


@dataclass(frozen=True)
class Usage:
    """Bytes of a sequence. A shared page counts in every sequence that holds it."""

    quantized: int
    """Quantized pages."""
    window: int
    """16- and 32-bit pages."""
    slack: int
    """Part of `window` that holds no token yet."""
    rollback: int
    """16-bit copies of quantized pages."""
    bookkeeping: int
    """Page headers and tables."""
    workspace: int
    """Scratch for quantizing."""
    bytes: int
    """The sum of all of the above but `slack`, and `reserved` and `state`."""
    not_finite: int
    """Number of NaN and infinities that were quantized."""
    tokens: int
    """Of the longest layer."""
    reserved: int
    """For the next step: Cache.reserve."""
    repacked: int
    """Tokens that cuts quantized once more, summed over layers."""
    state: int
    """Recurrent state and its snapshots."""


@dataclass(frozen=True)
class Footprint:
    """Bytes that sequences of a length will take, equal to what will be allocated. The first five are those of Usage."""

    quantized: int
    window: int
    rollback: int
    bookkeeping: int
    workspace: int
    attention: int
    """Workspace of one attention call."""
    total: int
    """The sum of the above, and `unused` and `state`."""
    transient: int
    """Upper bound of what a call adds temporarily."""
    unused: int
    """Of a byte budget that was allocated at once: bytes without a page."""
    state: int
    """Recurrent state, with the snapshots of Cache(snapshot_every=...)."""


@dataclass(frozen=True)
class Snapshot:
    """Of the recurrent state of a sequence."""

    tokens: int
    """That the state had taken."""
    bytes: int
    """Of its pages, headers included."""
    error: float
    """sqrt(sum (x - x^)^2 / sum x^2) over the quantized parts."""


@dataclass(frozen=True)
class ChosenTokens:
    """Tokens [begin, end) that queries [first_query, last_query] of a call read in a kv head."""

    layer: int
    kv_head: int
    first_query: int
    last_query: int
    begin: int
    end: int


class SelectionReport:
    """What Mods(selected_tokens=...) did: made by Mods.report, and read at any time between calls."""

    def __init__(self, c: Any, runs: Any) -> None:
        self._c, self._runs = c, runs

    @property
    def pages(self) -> int:
        """That masks show, once for every kv head and block of query rows."""
        return self._c.pages

    @property
    def read(self) -> int:
        """Those that were read."""
        return self._c.read

    @property
    def chosen(self) -> List[ChosenTokens]:
        """The first runs of read pages, as many as Mods.report was asked to keep."""
        n = min(self._c.chosen_count, self._c.chosen_capacity)
        return [ChosenTokens(r.layer, r.kv_head, r.first_query, r.last_query, r.tokens.begin, r.tokens.end)
                for r in self._runs[:n]]

    @property
    def chosen_count(self) -> int:
        """Runs, kept or not."""
        return self._c.chosen_count


class SkippingReport:
    """What Mods(skipped_mass=...) did: made by Mods.report, and read at any time between calls."""

    def __init__(self, c: Any) -> None:
        self._c = c

    @property
    def pages(self) -> int:
        """Pages of values that were seen, once for every kv head and block of query rows."""
        return self._c.pages

    @property
    def skipped(self) -> int:
        """Those that were not read."""
        return self._c.skipped

    @property
    def rows(self) -> int:
        """Query tokens x query heads."""
        return self._c.rows

    @property
    def left_out(self) -> float:
        """Sum over rows of the share of weights that was left out."""
        return self._c.left_out

    @property
    def most_left_out(self) -> float:
        """Of one row."""
        return self._c.most_left_out


@dataclass(frozen=True)
class RequantizeReport:
    pages: int
    """That were converted, or would be."""
    pages_left: int
    """Of the request, not yet converted."""
    bytes_before: int
    """In the pool of the cache, as the next two."""
    bytes_after: int
    bytes_peak: int
    bytes_freed: int
    workspace: int
    """Scratch during the call."""


@dataclass(frozen=True)
class StepDownReport:
    pages: int
    """That changed."""
    bytes_before: int
    """In the pool of the cache, as the next two."""
    bytes_after: int
    bytes_peak: int
    fits: bool
    """False: the budget is still exceeded."""


@dataclass(frozen=True)
class Tier:
    """From `age` tokens behind the newest one on, pages have these formats, by name; None: the first one of the cache."""

    age: int
    keys: Optional[str] = None
    values: Optional[str] = None


@dataclass(frozen=True)
class StepDownPolicy:
    """How formats narrow with age.

    tiers                        ages ascending, formats from wide to narrow
    first_layers_kept, last_...  layers that no tier touches
    byte_budget                  bytes of the pool, beyond which the oldest pages go down further; None: none
    """

    tiers: Sequence[Tier] = ()
    first_layers_kept: int = 0
    last_layers_kept: int = 0
    byte_budget: Optional[int] = None


def policy_to_c(policy: StepDownPolicy) -> _abi.kvq_step_down_policy:
    """A struct that keeps what it points to."""
    if not isinstance(policy, StepDownPolicy):
        raise TypeError(f"policy is a {type(policy).__name__}, not a kvq.StepDownPolicy")
    tiers = [_abi.kvq_tier(age=t.age, keys=text(t.keys), values=text(t.values)) for t in policy.tiers]
    return _abi.kvq_step_down_policy(
        tiers=(_abi.kvq_tier * len(tiers))(*tiers), tier_count=len(tiers), first_layers_kept=policy.first_layers_kept,
        last_layers_kept=policy.last_layers_kept, byte_budget=limit(policy.byte_budget, "byte_budget"))


def query_to_c(sequences: int, q_heads: Optional[int], q_tokens: int, threads: int, chunk: Optional[int],
               policy: Optional[StepDownPolicy], cross_tokens: int) -> _abi.kvq_footprint_query:
    """The question of an estimate."""
    c = _abi.kvq_footprint_query(sequences=sequences, q_heads=limit(q_heads, "q_heads"), q_tokens=q_tokens, threads=threads,
                                 chunk=limit(chunk, "chunk"), cross_tokens=cross_tokens)
    if policy is not None:
        c.policy = ctypes.pointer(policy_to_c(policy))
    return c
