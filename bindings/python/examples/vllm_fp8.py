"""Attention over the FP8 pages of vLLM, without changing a byte of them.

vLLM keeps a layer as [key, value][blocks][block_size][heads][dim] of e4m3 bytes (numpy: uint8; torch: float8_e4m3fn), with one scale
for its keys and one for its values: x = scale * number. Format "fp8" holds the numbers alone, so the scales go to the scores and to the
output. Here vLLM's memory is made of random numbers; with torch it would be `layer.view(torch.uint8).numpy()`.
"""
import numpy as np

import kvq

KV_HEADS, Q_HEADS, DIM, BLOCKS, BLOCK_SIZE, TOKENS = 2, 8, 64, 24, 16, 300
random = np.random.default_rng(1)


def e4m3_numbers():
    """What each of the 256 bytes stands for: 1 bit of sign, 4 of exponent (bias 7), 3 of mantissa; no infinities."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7) / 8
    size = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    size[code & 127 == 127] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


NUMBERS = e4m3_numbers()


def tokens_of(blocks, table, n):
    """The first n tokens of a block table, [tokens][heads][dim], as bytes."""
    return blocks[table].reshape(-1, KV_HEADS, DIM)[:n]


# What vLLM holds. Bytes of moderate numbers; 0x7f and 0xff would be NaN.
pages = random.integers(0, 0x50, (2, BLOCKS, BLOCK_SIZE, KV_HEADS, DIM)).astype(np.uint8)
pages |= random.integers(0, 2, pages.shape).astype(np.uint8) << 7
k_scale, v_scale = 0.04, 0.07
block_table = random.permutation(BLOCKS)[: -(-TOKENS // BLOCK_SIZE)]

cache = kvq.Cache(1, KV_HEADS, DIM, keys="fp8", page_tokens=64, sinks=0, recent=0, rollback=0)
sequence = cache.new_sequence()
k_bytes, v_bytes = (tokens_of(pages[i], block_table, TOKENS) for i in range(2))
sequence.append(0, NUMBERS[k_bytes], NUMBERS[v_bytes])

q = random.standard_normal((1, Q_HEADS, DIM)).astype(np.float32)
out = v_scale * sequence.attend(0, q, mods=kvq.Mods(scale=k_scale / DIM**0.5))

# The numbers came back as they were, so the pages hold vLLM's bytes.
held = sequence.dequantize(0, "key", np.empty((TOKENS, KV_HEADS, DIM), np.float32))
assert (held == NUMBERS[k_bytes]).all()

# The same in double.
k = k_scale * NUMBERS[k_bytes].astype(np.float64)
v = v_scale * NUMBERS[v_bytes].astype(np.float64)
group = Q_HEADS // KV_HEADS
worst = 0.0
for head in range(Q_HEADS):
    scores = k[:, head // group] @ q[0, head] / DIM**0.5
    weights = np.exp(scores - scores.max())
    exact = weights @ v[:, head // group] / weights.sum()
    worst = max(worst, float(np.linalg.norm(out[0, head] - exact) / np.linalg.norm(exact)))
usage = sequence.usage()
print(f"{TOKENS} tokens of vLLM's FP8 pages: {usage.quantized} bytes in fp8, output off by {worst:.1e}")
assert worst < 1e-3
