"""Attention over the FP8 pages of vLLM, where they lie; a new token written to them; the sequence moved to a cache of kvq.

vLLM keeps a layer as [key, value][blocks][block_size][heads][dim] of e4m3 bytes (numpy: uint8; torch: float8_e4m3fn), with one scale
for its keys and one for its values: x = scale * number. Here its memory is made of random numbers; a torch tensor is taken as it is.
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

of_vllm = pages.copy()
q = random.standard_normal((1, Q_HEADS, DIM)).astype(np.float32)
keys = kvq.Rows("fp8", pages[0], tensor_scale=k_scale)
values = kvq.Rows("fp8", pages[1], tensor_scale=v_scale)
out = kvq.attend_rows(keys, values, q, tokens=TOKENS, block_table=block_table)
assert (pages == of_vllm).all()

# The same in double.
k, v = (scale * NUMBERS[tokens_of(pages[i], block_table, TOKENS)].astype(np.float64) for i, scale in enumerate((k_scale, v_scale)))
group = Q_HEADS // KV_HEADS
worst = 0.0
for head in range(Q_HEADS):
    scores = k[:, head // group] @ q[0, head] / DIM**0.5
    weights = np.exp(scores - scores.max())
    exact = weights @ v[:, head // group] / weights.sum()
    worst = max(worst, float(np.linalg.norm(out[0, head] - exact) / np.linalg.norm(exact)))
print(f"{TOKENS} tokens of vLLM's FP8 pages, attended in place: output off by {worst:.1e}")
assert worst < 1e-5

# The next token goes into vLLM's block, and the whole sequence to a machine that decodes in 4 bits with pages of 128 tokens.
new = random.standard_normal((2, 1, KV_HEADS, DIM)).astype(np.float32)
for rows, x in ((keys, new[0]), (values, new[1])):
    assert kvq.write_rows(rows, x, first=TOKENS, block_table=block_table) == 0
again = kvq.attend_rows(keys, values, q, tokens=TOKENS + 1, block_table=block_table)
sequence = kvq.Cache(1, KV_HEADS, DIM, "std4").new_sequence()
both = [np.empty((TOKENS + 1, KV_HEADS, DIM), np.float32) for _ in range(2)]
for rows, x in zip((keys, values), both):
    kvq.read_rows(rows, x, block_table=block_table)
sequence.append(0, *both)
off = float(np.linalg.norm(sequence.attend(0, q) - again) / np.linalg.norm(again))
print(f"one token more, and the same in std4: {sequence.usage().bytes} bytes, off by {off:.1e}")
assert 0 < off < 0.3 and np.abs(again - out).max() > 0
