"""A prompt, decode steps, a fork, a saved file. Random tensors stand for those of a model."""
import tempfile
import pathlib

import numpy as np

import kvq

LAYERS, KV_HEADS, Q_HEADS, HEAD_DIM = 4, 2, 8, 64
random = np.random.default_rng(1)


def projected(tokens, heads):
    """Keys, values or queries of a layer, [tokens][heads][dim]; keys and queries rotated."""
    return random.standard_normal((tokens, heads, HEAD_DIM)).astype(np.float16)


def forward(sequence, tokens, **options):
    """Appends tokens to every layer and attends for all of them."""
    for layer in range(LAYERS):
        k, v, q = projected(tokens, KV_HEADS), projected(tokens, KV_HEADS), projected(tokens, Q_HEADS)
        out = sequence.prefill(layer, k, v, q, **options)
    return out


cache = kvq.Cache(LAYERS, KV_HEADS, HEAD_DIM, keys="std4", rotary=kvq.Rotary(HEAD_DIM))
print(f"32768 tokens will take {cache.footprint(32768).total / 1e6:.1f} MB")

sequence = cache.new_sequence()
threads = kvq.Threads(2)
for _ in range(4):
    forward(sequence, 256, threads=threads)  # the prompt in chunks
for _ in range(16):
    out = forward(sequence, 1)  # a decode step
print(f"{len(sequence)} tokens in {sequence.usage().bytes} bytes, out {out.shape} {out.dtype}")

other = sequence.fork()  # shares all pages
other.trim(1030)  # another answer to the same prompt
forward(other, 1, mods=kvq.Mods(window=512))
other.erase(100, 200)  # the tokens behind move to the front

with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "chat.safetensors")
    sequence.save(path, model="my model")
    restored = cache.restore(path, model="my model")

q = projected(1, Q_HEADS)
assert (restored.attend(0, q) == sequence.attend(0, q)).all()
try:
    sequence.trim(2000)
except kvq.ArgumentError as e:
    print(e)
