"""A serializer for chunks of a KV cache, as LMCache calls it: to_bytes(tensor) and from_bytes(bytes).

A chunk is [key, value][layers][tokens][kv_heads * dim] in float16, LMCache's layout KV_2LTD. Its bytes are a saved sequence: they describe
and check themselves, and any cache of the same shape reads them. "std4" takes a quarter of the bytes, "int8" a half.
"""
import numpy as np

import kvq


class KvqSerde:
    """keys, values  names of formats
    device-free: tensors of numpy, or of torch on the CPU"""

    def __init__(self, kv_heads, dim, keys="std4", values=None, model=""):
        self.kv_heads, self.dim, self.model = kv_heads, dim, model
        self.formats = keys, values if values is not None else keys
        self._caches = {}

    def _cache(self, layers):
        # Chunks are read as a whole: nothing stays in 16 bit but tokens behind the last whole page. Keys of low2, low3 and mix4
        # have a plan of the first page.
        if layers not in self._caches:
            self._caches[layers] = kvq.Cache(
                layers, self.kv_heads, self.dim, *self.formats, page_tokens=128, sinks=0, recent=0, rollback=0,
                statistics_tokens=128)
        return self._caches[layers]

    def to_bytes(self, tensor):
        both, layers, tokens, width = tensor.shape
        if both != 2 or width != self.kv_heads * self.dim:
            raise ValueError(f"a chunk is [2][layers][tokens][{self.kv_heads * self.dim}], but has shape {tuple(tensor.shape)}")
        sequence = self._cache(layers).new_sequence()
        for layer in range(layers):
            k, v = (tensor[i][layer].reshape(tokens, self.kv_heads, self.dim) for i in range(2))
            sequence.append(layer, k, v)
        return sequence.to_bytes(self.model)

    def from_bytes(self, data, layers):
        sequence = self._cache(layers).from_bytes(data, self.model)
        out = np.empty((2, layers, len(sequence), self.kv_heads, self.dim), np.float16)
        for layer in range(layers):
            for i, role in enumerate(("key", "value")):
                sequence.dequantize(layer, role, out[i, layer])
        return out.reshape(2, layers, len(sequence), -1)


KV_HEADS, DIM, LAYERS, TOKENS = 2, 64, 3, 256
chunk = np.random.default_rng(1).standard_normal((2, LAYERS, TOKENS, KV_HEADS * DIM)).astype(np.float16)
for name in ("int8", "std4", "fp8", "low2"):
    serde = KvqSerde(KV_HEADS, DIM, name, model="example")
    data = serde.to_bytes(chunk)
    back = serde.from_bytes(data, LAYERS)
    error = float(np.square(back.astype(np.float64) - chunk).sum() / np.square(chunk.astype(np.float64)).sum())
    print(f"{name}: {chunk.nbytes} bytes become {len(data)}, squared error {error:.1e}")
    assert back.shape == chunk.shape and 0 < error < {"int8": 1e-4, "std4": 1.2e-2, "fp8": 1e-3, "low2": 0.3}[name]
    # Another chunk of one cache gives the same bytes again.
    assert serde.to_bytes(back) is not None and serde.to_bytes(chunk) == data
    try:
        serde.from_bytes(data[:-1], LAYERS)
    except kvq.DataError as e:
        print(f"  a chunk that was cut: {e}")
    else:
        raise AssertionError("a damaged chunk was read")
