#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times torch's scaled_dot_product_attention (cuDNN) for chunks of a prompt over a long 16-bit context.

Prints one line per shape, as bench/gpu/prefill.cu reads them: chunk context microseconds. No mask: the chunk counts half, which is
what a causal mask leaves of it. Graph replay, medians of events. --head-dim N: 128 by default.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

Q_HEADS, KV_HEADS = 32, 8
DIM = int(sys.argv[sys.argv.index("--head-dim") + 1]) if "--head-dim" in sys.argv else 128


def time_shape(chunk, context):
    tokens = context + chunk // 2
    q = torch.randn(1, Q_HEADS, chunk, DIM, device="cuda", dtype=torch.float16)
    k = torch.randn(1, KV_HEADS, tokens, DIM, device="cuda", dtype=torch.float16)
    v = torch.randn_like(k)

    def launch():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = [launch() for _ in range(3)]
        times = []
        for i in range(9):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            if i >= 2:
                times.append(begin.elapsed_time(end))
    del outputs, graph
    return 1000 * sorted(times)[len(times) // 2] / 3


def main():
    for context in (32768, 131072):
        for chunk in (512, 2048):
            if "--quick" in sys.argv and (context, chunk) != (32768, 2048):
                continue
            print(chunk, context, f"{time_shape(chunk, context):.2f}", flush=True)


if __name__ == "__main__":
    main()
