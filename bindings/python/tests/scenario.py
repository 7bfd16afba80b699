"""tests/c_interface/scenario.c in Python: the same arguments, the same hash, the same file.

scenario.py KEYS VALUES FILE
"""
import sys

import numpy as np

import kvq

LAYERS, KV_HEADS, Q_HEADS, DIM, CHUNK = 2, 2, 4, 64, 100


class Hash:
    """FNV-1a, 64 bits."""

    value = 14695981039346656037

    def add(self, data):
        h = self.value
        for byte in data:
            h = (h ^ byte) * 1099511628211 & 0xFFFFFFFFFFFFFFFF
        self.value = h


class Values:
    """Values in [-1, 1), made from their number."""

    made = 0

    def tensor(self, n, heads):
        count = n * heads * DIM
        number = np.arange(self.made, self.made + count, dtype=np.uint32)
        self.made += count
        values = (number * np.uint32(2654435761) >> np.uint32(8)).astype(np.float32)
        return (values / np.float32(8388608) - np.float32(1)).reshape(n, heads, DIM)


def run(keys, values, path):
    """Returns the hash of all outputs."""
    hash, values_of = Hash(), Values()

    def step(sequence, n):
        for layer in range(LAYERS):
            k, v, q = (values_of.tensor(n, heads) for heads in (KV_HEADS, KV_HEADS, Q_HEADS))
            hash.add(sequence.prefill(layer, k, v, q).tobytes())

    cache = kvq.Cache(LAYERS, KV_HEADS, DIM, keys, values)
    sequence = cache.new_sequence()
    for _ in range(3):
        step(sequence, CHUNK)
    for _ in range(40):
        step(sequence, 1)
    sequence.trim(330)
    fork = sequence.fork()
    step(fork, 5)
    sequence.save(path)
    restored = cache.restore(path)
    step(restored, 3)
    step(sequence, 3)
    return hash.value


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(2)
    print(f"{sys.argv[1]} {sys.argv[2]}: outputs {run(*sys.argv[1:]):016x}")
