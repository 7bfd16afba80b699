#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times decode steps of a model of Llama 3 8B's shape in torch: bf16, random weights, a preallocated cache, one CUDA graph.

Prints one line per shape, as bench/gpu/engine.cu reads them: batch context layers milliseconds. Attention is
scaled_dot_product_attention with the cuDNN backend over the whole cache. Of layers as many as fit.
"""

import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, VOCAB = 4096, 14336, 32, 32, 8, 128, 128256
SHAPES = [(64, 8192), (16, 32768), (16, 2048)]


def weights(outputs, inputs):
    return torch.empty(outputs, inputs, device="cuda", dtype=torch.bfloat16).normal_(0, inputs**-0.5)


class Layer:
    def __init__(self, batch, context):
        self.norms = torch.ones(2, DIM, device="cuda", dtype=torch.bfloat16)
        self.qkv = weights((HEADS + 2 * KV_HEADS) * HEAD, DIM)
        self.out = weights(DIM, HEADS * HEAD)
        self.gate_up = weights(2 * HIDDEN, DIM)
        self.down = weights(DIM, HIDDEN)
        self.cache = torch.empty(2, batch, KV_HEADS, context, HEAD, device="cuda", dtype=torch.bfloat16).normal_()


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def step(layers, embedding, logits, norm, token, position, cos, sin):
    x = F.embedding(token, embedding)
    batch = token.shape[0]
    for layer in layers:
        h = F.linear(F.rms_norm(x, (DIM,), layer.norms[0], 1e-5), layer.qkv).view(batch, -1, 1, HEAD)
        q, k, v = h.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        layer.cache[0].index_copy_(2, position, rotate(k, cos, sin))
        layer.cache[1].index_copy_(2, position, v)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            a = F.scaled_dot_product_attention(rotate(q, cos, sin), layer.cache[0], layer.cache[1], enable_gqa=True)
        x = x + F.linear(a.reshape(batch, -1), layer.out)
        gate, up = F.linear(F.rms_norm(x, (DIM,), layer.norms[1], 1e-5), layer.gate_up).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, layer.down)
    token.copy_(F.linear(F.rms_norm(x, (DIM,), norm, 1e-5), logits).argmax(dim=-1))


@torch.inference_mode()
def time_shape(batch, context):
    row = 4 * KV_HEADS * HEAD
    of_layer = 2 * DIM * (2 * (HEADS + KV_HEADS) * HEAD + 3 * HIDDEN) + row * (batch * context + 4160)
    free = torch.cuda.mem_get_info()[0]
    count = min(LAYERS, int((free - 4 * VOCAB * DIM - (3 << 30)) // of_layer))
    layers = [Layer(batch, context) for _ in range(count)]
    embedding, logits = weights(VOCAB, DIM), weights(VOCAB, DIM)
    norm = torch.ones(DIM, device="cuda", dtype=torch.bfloat16)
    token = torch.randint(0, VOCAB, (batch,), device="cuda")
    position = torch.tensor([context - 1], device="cuda")
    angles = (context - 1) * 500000.0 ** (-torch.arange(0, HEAD, 2, device="cuda") / HEAD)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    arguments = (layers, embedding, logits, norm, token, position, cos, sin)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(*arguments)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step(*arguments)
        for _ in range(3):
            graph.replay()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        for _ in range(20):
            graph.replay()
        end.record(stream)
        end.synchronize()
    return count, begin.elapsed_time(end) / 20


def main():
    for batch, context in SHAPES:
        if "--quick" in sys.argv and batch * context > 64 * 8192 / 4:
            continue
        count, ms = time_shape(batch, context)
        torch.cuda.empty_cache()
        print(batch, context, count, f"{ms:.3f}", flush=True)


if __name__ == "__main__":
    main()
