#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Decode steps of Hugging Face transformers with caches of kvq beside its own, in one run: scripts/gpu-bench transformers.

transformers_decode.py [--layers 4] [--batch 16] [--context 8192] [--steps 64] [--static] [--quick]

Random weights of Llama 3 8B's shape in bf16, of a few layers. The context is read in chunks of 512 tokens, then every step decodes one token of
every row, greedily. Prints for each cache tokens per second, how many times those of transformers' DynamicCache with sdpa attention, bytes of
the cache, the time of the prompt, and how many ids come before the first that differs from the first row's; then what the Python calls of one
layer take on the host. "graph" is kvq.transformers.DecodeGraph, which leaves out what Python takes for every layer. DynamicCache runs twice:
with the attention that torch chooses, which may plan anew for every length, and without cuDNN; kvq is compared with the faster one. --static
adds StaticCache with torch.compile, another way to run a model, which is not for kvq's calls. Ends with status 1 where std4 in a graph is
below 1.3 times DynamicCache.
"""

import argparse
import sys
import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import kvq.transformers

BOUND = 1.3


def make_model(layers):
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, rope_theta=500000.0, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def bytes_of(cache):
    if hasattr(cache, "bytes"):
        return cache.bytes()
    return sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in cache.layers)


@torch.inference_mode()
def run(model, attention, cache, ids, steps, compiled=None, graph=False):
    """Tokens per second, bytes of the cache, seconds of the prompt, the ids."""
    model.set_attn_implementation(attention)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for first in range(0, ids.shape[1], 512):
        token = model(ids[:, first : first + 512], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
    torch.cuda.synchronize()
    prompt = time.perf_counter() - begin
    step = model if compiled is None else compiled
    if graph:
        replayed = kvq.transformers.DecodeGraph(model, cache)
    out = [token]
    for i in range(8 + steps):
        if i == 8:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        if graph:
            logits = replayed(token)
        else:
            logits = step(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1:].argmax(-1)
        out.append(token)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return ids.shape[0] * steps / seconds, bytes_of(cache), prompt, torch.cat(out, dim=1)


@torch.inference_mode()
def host_time(model, attention, cache, batch):
    """Microseconds that update() and the attention function of one layer take on the host, with short contexts."""
    from transformers import AttentionInterface

    config = model.config
    k = torch.randn(batch, 1, config.num_key_value_heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    q = torch.randn(batch, 1, config.num_attention_heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    module = model.model.layers[0].self_attn
    function = AttentionInterface()[attention]
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(40):
            keys, values = cache.update(k, k, 0)
            function(module, q, keys, values, None, dropout=0.0, scaling=0.088)
        best = min(best, (time.perf_counter() - begin) / 40)
    return best * 1e6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--quick", action="store_true", help="batch 2, context 1024, 8 steps, 1 layer: does it run?")
    a = parser.parse_args()
    if a.quick:
        a.layers, a.batch, a.context, a.steps = 1, 2, 1024, 8
    torch.manual_seed(1)
    model = make_model(a.layers)
    ids = torch.randint(2, 128000, (a.batch, a.context), device="cuda")
    most = a.context + a.steps + 64

    def ours(keys):
        return lambda: kvq.transformers.Cache(keys, max_tokens=most, recent=128, page_tokens=64, pool_tokens=a.batch * most, pool_sequences=a.batch)

    caches = [("DynamicCache, sdpa", "sdpa", DynamicCache), ("DynamicCache, no cuDNN", "sdpa", DynamicCache)]
    caches += [(f"kvq {keys}{graph}", "kvq", ours(keys)) for graph in ("", ", graph") for keys in ("bf16", "kivi-4-g64", "std4")]
    print(f"{torch.cuda.get_device_name()}, Llama 3 8B's shape, {a.layers} layers, {a.batch} x {a.context}, bf16")
    print(f"{'cache':24} {'tokens/s':>9} {'':>8} {'MB':>7} {'prompt s':>9}  equal ids")
    rows, reference, host = [], None, []
    for i, (name, attention, make) in enumerate(caches):
        torch.backends.cuda.enable_cudnn_sdp("no cuDNN" not in name)
        speed, size, prompt, out = run(model, attention, make(), ids, a.steps, graph="graph" in name)
        reference = out if reference is None else reference
        rows.append((name, speed, size, prompt, int((out == reference).long().cumprod(dim=1).sum())))
        torch.cuda.empty_cache()
        if "graph" not in name:
            host.append(f"{name} {host_time(model, attention, make(), a.batch):.0f}")
        theirs = max(row[1] for row in rows[:2])
        for name, speed, size, prompt, same in [rows[:2], rows[-1:]][i > 1] if i > 0 else []:
            print(f"{name:24} {speed:9.0f} {speed / theirs:6.2f} x {size / 1e6:7.0f} {prompt:9.2f}  {same} of {out.numel()}", flush=True)
    ratio = rows[-1][1] / theirs
    print("host time of one layer's calls, us: " + "; ".join(host), flush=True)
    if a.static:
        cache = StaticCache(model.config, max_cache_len=most)
        compiled = torch.compile(model, mode="reduce-overhead")
        speed, size, prompt, _ = run(model, "sdpa", cache, ids, a.steps, compiled)
        print(f"{'StaticCache, compiled':24} {speed:9.0f} {speed / theirs:6.2f} x {size / 1e6:7.0f} {prompt:9.2f}")
    if not a.quick and ratio < BOUND:
        sys.exit(f"std4 in a graph is {ratio:.2f} times DynamicCache, below {BOUND}")


main()
