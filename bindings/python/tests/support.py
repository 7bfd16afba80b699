"""What tests share: random tensors with a printed seed, and attention in double precision."""
import os
import random

import numpy as np

SEED = int(os.environ.get("KVQ_TEST_SEED", "0")) or random.randrange(1, 2**31)
print(f"KVQ_TEST_SEED={SEED}")


def generator(name):
    return np.random.default_rng([SEED, *name.encode()])


def attention(q, k, v, *, visible=None, scale=None, bias=None, softcap=None, sink_logits=None):
    """softmax(q K^T) V and the log of each softmax sum, in double precision.

    q [m][q_heads][d], the last m tokens; k [n][kv_heads][d]; v [n][kv_heads][dv]
    visible(query, key) -> bool of positions; None: causal. bias(head, query, key) is added to scaled scores
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    m, q_heads, d = q.shape
    n, kv_heads, _ = k.shape
    out, lse = np.zeros((m, q_heads, v.shape[2])), np.zeros((m, q_heads))
    visible = visible or (lambda query, key: key <= query)
    for h in range(q_heads):
        of = h // (q_heads // kv_heads)
        scores = q[:, h] @ k[:, of].T * (d**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        for i in range(m):
            position = n - m + i
            row = scores[i]
            if bias is not None:
                row = row + np.array([bias(h, position, j) for j in range(n)])
            row = np.where([visible(position, j) for j in range(n)], row, -np.inf)
            top = max(row.max(), sink_logits[h] if sink_logits is not None else -np.inf)
            weights = np.exp(row - top)
            total = weights.sum() + (np.exp(sink_logits[h] - top) if sink_logits is not None else 0.0)
            out[i, h] = weights @ v[:, of] / total
            lse[i, h] = top + np.log(total)
    return out, lse
