"""The Python program of README.md: a prompt into a cache of 4 bits, and its attention."""
import kvq
import numpy as np

sequence = kvq.Cache(layers=2, kv_heads=8, head_dim=128, keys="std4").new_sequence()
x = np.random.default_rng(1).standard_normal((500, 48, 128)).astype(np.float16)  # stands for a model's k, v and q
for layer in range(2):
    out = sequence.prefill(layer, x[:, :8], x[:, 8:16], x[:, 16:])
print(len(sequence), "tokens in", sequence.usage().bytes, "bytes")
