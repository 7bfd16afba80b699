#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times torch's scaled_dot_product_attention with the cuDNN backend on fp16 caches.

Prints one line per shape, as bench/gpu/attention.cu reads them: batch tokens q_heads kv_heads head_dim microseconds.
Graph replay, medians of events; every launch reads another cache than the one before.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

LENGTHS = [(1, 131072), (8, 32768), (16, 2048), (64, 1024), (64, 4096), (128, 8192)]
HEADS = [(32, 8), (64, 8), (32, 32)]
DIM = 128


def time_shape(batch, tokens, q_heads, kv_heads):
    cache_bytes = 2 * 2 * batch * tokens * kv_heads * DIM
    sets = max(1, min((3 << 28) // cache_bytes + 1, (40 << 30) // cache_bytes))
    q = torch.randn(batch, q_heads, 1, DIM, device="cuda", dtype=torch.float16)
    caches = [torch.randn(2, batch, kv_heads, tokens, DIM, device="cuda", dtype=torch.float16) for _ in range(sets)]

    def launch(i):
        k, v = caches[i % sets]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q_heads != kv_heads)

    count = max(sets, min(20, (1 << 31) // cache_bytes + 1))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(sets, 3)):
            launch(i)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = [launch(i) for i in range(count)]
        times = []
        for i in range(11):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            if i >= 2:
                times.append(begin.elapsed_time(end))
    del outputs, graph
    return 1000 * sorted(times)[len(times) // 2] / count


def main():
    quick = "--quick" in sys.argv
    for q_heads, kv_heads in HEADS[:1] if quick else HEADS:
        for batch, tokens in LENGTHS:
            if kv_heads == 32 and batch == 128:
                continue
            us = time_shape(batch, tokens, q_heads, kv_heads)
            torch.cuda.empty_cache()
            print(batch, tokens, q_heads, kv_heads, DIM, f"{us:.2f}", flush=True)


if __name__ == "__main__":
    main()
