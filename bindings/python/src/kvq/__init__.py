"""KV caches of transformers in few bits, and attention on them.

    import kvq, numpy as np
    cache = kvq.Cache(layers=32, kv_heads=8, head_dim=128, keys="std4")
    sequence = cache.new_sequence()
    out = sequence.prefill(layer, k, v, q)      # [tokens][heads][dim], numpy or torch

Tensors are numpy arrays or torch tensors of the CPU, read and written in place. Caches on a GPU are in kvq.cuda. docs/guide/python.md is
the guide.
"""
from ._attention import Mods, Threads, Workspace
from ._cache import Cache, Rotary
from ._errors import (ArgumentError, CallbackError, CudaError, DataError, Error, HandleError, InternalError, OutOfMemoryError,
                      StructError, UnsupportedError)
from ._formats import Format, FormatDescription, FormatEntry, Statistics, formats
from ._layers import (Layer, StatePart, chunked_attention, cross_layer, full_attention, index_layer, latent_attention,
                      shared_with, sliding_attention, state_layer)
from ._library import library as _library
from ._prefix_cache import Match, PrefixCache, PrefixCacheStatistics
from ._reports import (CacheInfo, ChosenTokens, Footprint, RequantizeReport, SelectionReport, SkippingReport, Snapshot,
                       StepDownPolicy, StepDownReport, Tier, Usage)
from ._rows import Rows, attend_rows, convert_rows, read_rows, write_rows
from ._sequence import Receiver, Ring, Sequence

__version__: str = _library.kvq_version().decode()
"""Of the library."""

__all__ = [
    "ArgumentError", "Cache", "CacheInfo", "CallbackError", "ChosenTokens", "CudaError", "DataError", "Error", "Footprint", "Format",
    "FormatDescription", "FormatEntry", "HandleError", "InternalError", "Layer", "Match", "Mods", "OutOfMemoryError",
    "PrefixCache", "PrefixCacheStatistics", "Receiver", "RequantizeReport", "Ring", "Rotary", "Rows", "SelectionReport",
    "Sequence", "SkippingReport", "Snapshot", "StatePart", "Statistics", "StepDownPolicy", "StepDownReport", "StructError",
    "Threads", "Tier", "UnsupportedError", "Usage", "Workspace", "attend_rows", "chunked_attention", "convert_rows", "cross_layer",
    "formats", "full_attention", "index_layer", "latent_attention", "read_rows", "shared_with", "sliding_attention", "state_layer",
    "write_rows",
]
