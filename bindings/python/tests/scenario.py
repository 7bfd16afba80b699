"""tests/c_interface/scenario.c in Python: the same arguments, the same hash, the same file.

scenario.py KEYS VALUES FILE
"""
import sys

import numpy as np

import kvq

LAYERS, KV_HEADS, Q_HEADS, DIM, CHUNK, PROMPT, DECODE = 2, 2, 4, 64, 100, 300, 40


class Hash:
    """FNV-1a, 64 bits."""

    value = 14695981039346656037

    def add(self, data):
        h = self.value
        for byte in data:
            h = (h ^ byte) * 1099511628211 & 0xFFFFFFFFFFFFFFFF
        self.value = h


def tensor(layer, role, first, n, heads):
    """Values in [-1, 1) of tokens [first, first + n)."""
    token = np.arange(first, first + n, dtype=np.uint32).reshape(n, 1)
    i = np.arange(heads * DIM, dtype=np.uint32)
    h = (((token * np.uint32(LAYERS) + np.uint32(layer)) * np.uint32(3) + np.uint32(role)) * np.uint32(256) + i) * np.uint32(
        2654435761)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(2246822519)
    h ^= h >> np.uint32(13)
    return ((h >> np.uint32(8)).astype(np.float32) / np.float32(8388608) - np.float32(1)).reshape(n, heads, DIM)


def run(keys, values, path):
    """Returns the hash of all outputs."""
    hash = Hash()

    def step(sequence, n):
        first = len(sequence)
        for layer in range(LAYERS):
            k, v, q = (tensor(layer, role, first, n, heads) for role, heads in enumerate((KV_HEADS, KV_HEADS, Q_HEADS)))
            hash.add(sequence.prefill(layer, k, v, q).tobytes())

    cache = kvq.Cache(LAYERS, KV_HEADS, DIM, keys, values)
    sequence = cache.new_sequence()
    for _ in range(0, PROMPT, CHUNK):
        step(sequence, CHUNK)
    for _ in range(DECODE):
        step(sequence, 1)
    sequence.trim(PROMPT + 30)
    fork = sequence.fork()
    for _ in range(5):
        step(fork, 1)
    sequence.save(path, model="scenario")
    restored = cache.restore(path, model="scenario")
    step(restored, 3)
    step(sequence, 3)
    return hash.value


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(2)
    print(f"{sys.argv[1]} {sys.argv[2]}: outputs {run(*sys.argv[1:]):016x}")
